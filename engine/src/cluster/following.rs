//! Whom this node follows: the coordinator, its epoch, and the members as it published them.
//!
//! Owns: the seat, the list of members, what the last tries to join said. Does not own: joining and beating (`member`), which epoch counts
//! and what silence means (`protocol::membership::View`), what follows from a change of the seat (`Cluster::sit`).

use super::{NotIn, Seat, address_of};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};
use std::time::Duration;
use tidemark_protocol::cluster::members::Missed;
use tidemark_protocol::cluster::wire::{Member, Members, MembersChange};
use tidemark_protocol::id::{Epoch, Incarnation};
use tidemark_protocol::membership::{Coordinator, Life, View};
use tidemark_transport::Address;
use tokio::sync::watch;
use tokio::time::Instant;

/// Time after which a new coordinator knows who keeps which copies: members report their copies when they join, and all others are gone.
const SETTLED: Duration = Duration::from_secs(5);

/// See the module's head.
#[derive(Debug)]
pub struct Following {
    seat: RwLock<Seat>,
    seat_changed: watch::Sender<u64>,
    /// When the coordinator role was last taken over.
    seated: Mutex<Option<Instant>>,
    members: watch::Sender<Arc<Members>>,
    /// The coordinator that this node follows, and when that one last answered.
    view: Mutex<View>,
    began: Instant,
    /// How often a coordinator let this node join.
    joined: AtomicU64,
    /// How the last try to join failed; none once one succeeded.
    not_in: Mutex<Option<NotIn>>,
    /// The node that last sent a change of the members, and its epoch: that node was the coordinator of the epoch.
    commander: Mutex<Option<(Epoch, String)>>,
}

impl Following {
    pub(super) fn new(own: Life) -> Self {
        Self {
            seat: RwLock::default(),
            seat_changed: watch::Sender::new(0),
            seated: Mutex::default(),
            members: watch::Sender::default(),
            view: Mutex::new(View::new(own, Epoch::default())),
            began: Instant::now(),
            joined: AtomicU64::new(0),
            not_in: Mutex::default(),
            commander: Mutex::default(),
        }
    }

    /// Locks the seat, so that what follows from a change of it is done before anybody sees the change.
    pub(super) fn lock_seat(&self) -> RwLockWriteGuard<'_, Seat> {
        self.seat.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that another coordinator is to be followed.
    pub(super) fn seat_has_changed(&self) {
        *self.seated.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.view().rejoin();
        self.seat_changed.send_modify(|number| *number += 1);
    }

    /// Notes that a coordinator let this node join.
    pub(super) fn has_joined(&self) {
        self.joined.fetch_add(1, Ordering::AcqRel);
        self.tried_to_join(None);
    }

    /// Whether this node has been the coordinator long enough for all members to report the copies they keep.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let seated = *self.seated.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_coordinator() && seated.is_some_and(|at| at.elapsed() >= SETTLED)
    }

    /// Returns where the coordinator is.
    #[must_use]
    pub fn seat(&self) -> Seat {
        self.seat.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether this node is the coordinator, or a coordinator has let it join, which may be away by now.
    #[must_use]
    pub fn is_in(&self) -> bool {
        self.is_coordinator() || !matches!(self.coordinator(), Coordinator::Unknown)
    }

    /// Returns how the last try to join failed; none if it succeeded, and before the first.
    #[must_use]
    pub fn why_not_in(&self) -> Option<NotIn> {
        self.not_in.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records how a try to join ended. Returns whether the result differs from the last one.
    pub(super) fn tried_to_join(&self, not_in: Option<NotIn>) -> bool {
        let mut noted = self.not_in.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = *noted != not_in;
        *noted = not_in;
        is_news
    }

    /// Notifies of each change of the coordinator.
    #[must_use]
    pub fn watch_seat(&self) -> watch::Receiver<u64> {
        self.seat_changed.subscribe()
    }

    pub(super) fn joined_number(&self) -> u64 {
        self.joined.load(Ordering::Acquire)
    }

    /// Whether this node is the coordinator.
    #[must_use]
    pub fn is_coordinator(&self) -> bool {
        matches!(*self.seat.read().unwrap_or_else(PoisonError::into_inner), Seat::Here(_))
    }

    /// Returns the members as last published.
    #[must_use]
    pub fn members(&self) -> Arc<Members> {
        Arc::clone(&self.members.borrow())
    }

    /// Notifies of each change of the members.
    #[must_use]
    pub fn watch_members(&self) -> watch::Receiver<Arc<Members>> {
        self.members.subscribe()
    }

    /// Returns the member of that life.
    #[must_use]
    pub fn member_of(&self, incarnation: Incarnation) -> Option<Member> {
        let members = self.members.borrow();
        members.members.iter().find(|member| member.life.incarnation == incarnation).cloned()
    }

    /// Replaces the list of members, unless the new list is older than the known one.
    pub fn take_members(&self, members: Arc<Members>) {
        self.saw_epoch(members.epoch);
        self.members.send_if_modified(|known| {
            let newer = (members.epoch, members.number) > (known.epoch, known.number);
            if newer {
                *known = members;
            }
            newer
        });
    }

    /// Follows a change of the members.
    ///
    /// # Errors
    /// An earlier change was missed: the caller has to ask for the whole list.
    pub fn follow_members(&self, change: MembersChange) -> Result<(), Missed> {
        self.saw_epoch(change.epoch);
        let mut followed = Ok(false);
        self.members.send_if_modified(|known| {
            followed = Arc::make_mut(known).follow(change);
            matches!(followed, Ok(true))
        });
        followed.map(drop)
    }

    /// Returns the highest epoch that was seen.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.view().epoch()
    }

    /// Records an epoch. Returns false if a higher one was seen: the sender has then been replaced.
    pub fn saw_epoch(&self, epoch: Epoch) -> bool {
        self.view().follow(epoch).is_ok()
    }

    /// Records that a coordinator sent a change of its members.
    pub(super) fn heard_commander(&self, epoch: Epoch, node: String) {
        *self.commander.lock().unwrap_or_else(PoisonError::into_inner) = Some((epoch, node));
    }

    /// Returns the coordinator of the highest epoch that was seen, if it sent its members to this node.
    #[must_use]
    pub fn commander(&self) -> Option<Address> {
        let (epoch, node) = self.commander.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        self.address_of(&node).filter(|_| epoch == self.epoch())
    }

    /// Returns the address of a member that is not gone.
    #[must_use]
    pub fn address_of(&self, node: &str) -> Option<Address> {
        let members = self.members();
        let member = members.members.iter().find(|member| member.life.node.as_str() == node && !member.gone);
        member.map(address_of)
    }

    /// Whether the coordinator has answered lately.
    #[must_use]
    pub fn is_reachable(&self) -> bool {
        self.is_coordinator() || matches!(self.coordinator(), Coordinator::Heard { .. })
    }

    /// Returns what this node, which is not the coordinator itself, knows of its coordinator.
    #[must_use]
    pub fn coordinator(&self) -> Coordinator {
        let now_ms = self.now_ms();
        self.view().coordinator(now_ms)
    }

    pub(super) fn heard_coordinator(&self) {
        let now_ms = self.now_ms();
        self.view().heard(now_ms);
    }

    pub(super) fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time of [`View`]'s clock.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

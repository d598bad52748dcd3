//! This node among others: one tree over all of them.
//!
//! | file | owns |
//! |---|---|
//! | `names` | which directories this node may answer for, and asking about the rest |
//! | `publisher` | telling the coordinator what changed here |
//! | `facts` | the tree's nodes as others are told of them |
//! | `member` | joining, beating, following the coordinator |
//! | `calls` | how often the coordinator was asked for what |
//! | `service` | what other nodes ask of this one |
//! | `aside` | files of this node that lost their names to others |
//! | `copies` | which copies are kept here, and who keeps which |
//! | `pace` | telling nodes that a checkpoint is complete, or that somebody waits |
//! | `participants` | asking other nodes for their parts of a commit |
//! | `tagged` | one link for all that is asked |
//! | `witness` | whether this node hears one that the coordinator does not |
//! | `whereabouts` | where a file's bytes can be had |
//!
//! Does not own: the coordinator (control), which node that is (the daemon), the tree (`namespace`), links (transport).
//! `engine/design/0018-one-tree.md` has the argument.

mod aside;
mod calls;
mod copies;
mod facts;
mod member;
mod names;
mod pace;
mod participants;
mod publisher;
mod service;
mod tagged;
mod whereabouts;
mod witness;

pub use copies::tell_copies;
pub use facts::state_of;
pub use member::{Presence, follow};
pub use names::{Access, Guard};
pub use service::{Inbox, NodeService};
pub use tagged::Tagged;
pub use whereabouts::Near;

use bytes::Bytes;
use calls::Calls;
use copies::Holders;
use names::Names;
use publisher::Publisher;
use serde::de::DeserializeOwned;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tidemark_namespace::{Moment, Namespace, NodeId};
use tidemark_protocol::cluster::members::Missed;
use tidemark_protocol::cluster::wire::{
    self, Member, Members, MembersChange, ToCoordinator, ToNode, WireError,
};
use tidemark_protocol::error::error_text;
use tidemark_protocol::id::{Epoch, Incarnation, StartId};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::membership::{Coordinator, Life, View};
use tidemark_protocol::path::join;
use tidemark_protocol::report;
use tidemark_transport::{Address, Link, LinkError, LinkErrorKind, Refusal};

/// How long an answer of the coordinator is waited for that may take other nodes' answers.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

/// A new coordinator has heard by then who keeps which copies: members tell that when they join, and those that do not are gone.
pub(crate) const SETTLED: Duration = Duration::from_secs(5);

/// What the first byte of a call says that it is.
pub(crate) mod tag {
    /// [`super::ToCoordinator`].
    pub(crate) const COORDINATOR: u8 = b'C';
    /// [`super::ToNode`].
    pub(crate) const NODE: u8 = b'N';
    /// Replication.
    pub(crate) const REPLICATION: u8 = b'R';
    /// A command of a person.
    pub(crate) const COMMAND: u8 = b'A';
}

/// Who decides over names and checkpoints: answers what nodes ask of the coordinator.
#[async_trait::async_trait]
pub trait Authority: Send + Sync + std::fmt::Debug {
    /// The bytes of the answer that belongs to the message.
    ///
    /// # Errors
    /// A refusal for the asker to read.
    async fn answer(&self, from: NodeLife, message: ToCoordinator) -> Result<Vec<u8>, Refusal>;

    /// The coordinator's own node made a directory; false where another has it already.
    fn made(&self, path: &[u8]) -> bool;

    /// The coordinator's own node gave a directory another name: who has what below it is known under that from now on. Of two that
    /// changed places (`exchange`) nobody has anything alone.
    fn moved(&self, from: &[u8], to: &[u8], exchange: bool);

    /// The coordinator itself gave or took away these names: nodes that have them, or their directories, alone are to look again. Not
    /// waited for, and must not block.
    fn changed_here(&self, paths: &[&[u8]]);

    /// It is new, and has not heard everybody.
    fn hears_still(&self) -> bool;

    /// Whether what the coordinator's own node did until now is kept elsewhere, for which this waits within bounds. True where nobody keeps it.
    async fn is_kept(&self) -> bool;

    /// Has everybody who may know of names at or below a path publish them; false where one could not be asked.
    async fn hear_below(&self, path: &[u8]) -> bool;

    /// Has every node of which something is expected publish what it knows; a sentence for each that did not.
    async fn hear_all(&self) -> Vec<String>;

    /// The last connection with a node's daemon is gone. Must not block.
    fn disconnected(&self, life: Life);

    /// Every member, for people.
    fn nodes(&self) -> Vec<report::Node>;

    /// Who keeps whose copies, and what that survives.
    fn placement(&self) -> report::Placement;

    /// How often it was asked for what.
    fn calls(&self) -> Vec<(&'static str, u64)>;
}

/// Where the coordinator is.
#[derive(Debug, Clone, Default)]
pub enum Seat {
    /// Nobody knows.
    #[default]
    Unknown,
    /// In this process.
    Here(Arc<dyn Authority>),
    /// On another node.
    There(Address),
}

/// Why the coordinator did not answer.
#[derive(Debug, thiserror::Error)]
pub enum Away {
    #[error("nobody is known to be the coordinator")]
    Nobody,
    #[error("another coordinator took over before this one answered")]
    Replaced,
    #[error("the coordinator is new and has not heard all nodes")]
    New,
    #[error("the coordinator cannot be asked")]
    Link(#[from] LinkError),
    #[error("the coordinator refused: {0}")]
    Refused(Refusal),
    #[error("the coordinator did not answer within {} ms", .0.as_millis())]
    Late(Duration),
    #[error("the etcd of the cluster has not taken the change yet")]
    NotKept,
    #[error("the coordinator's answer is not understood")]
    Wire(#[from] WireError),
}

impl Away {
    /// Whether it may be otherwise in a moment: another coordinator takes the seat, or this one answers again.
    fn passes(&self) -> bool {
        match self {
            Self::Nobody | Self::Replaced | Self::New | Self::Late(_) | Self::NotKept => true,
            Self::Link(error) => !matches!(error, LinkError::Handshake { .. }),
            Self::Refused(refusal) => {
                matches!(refusal.kind, LinkErrorKind::Unavailable | LinkErrorKind::Fenced)
            }
            Self::Wire(_) => false,
        }
    }
}

/// Why the coordinator has not let this node in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotIn {
    /// The error with its causes.
    pub why: String,
    /// Another try does not help before a person changes something.
    pub for_good: bool,
}

impl NotIn {
    fn of(error: &Away) -> Self {
        let for_good = match error {
            Away::Link(LinkError::Handshake { .. }) => true,
            Away::Refused(refusal) => refusal.kind == LinkErrorKind::Invalid,
            _ => false,
        };
        Self { why: error_text(error), for_good }
    }
}

/// See the module's head. Share it by `Arc`.
#[derive(Debug)]
pub struct Cluster {
    pub life: NodeLife,
    pub start: StartId,
    namespace: Arc<Namespace>,
    link: OnceLock<Arc<dyn Link>>,
    runtime: tokio::runtime::Handle,
    seat: RwLock<Seat>,
    seat_changed: tokio::sync::watch::Sender<u64>,
    members: tokio::sync::watch::Sender<Arc<Members>>,
    /// Whom it follows, and when that one last answered.
    view: Mutex<View>,
    began: Instant,
    calls: Calls,
    names: Names,
    publisher: Publisher,
    holders: Holders,
    /// How often this node was let join.
    joined: AtomicU64,
    /// How the last try to join failed; none once one succeeded.
    not_in: Mutex<Option<NotIn>>,
    /// When the seat was last taken by somebody.
    seated: Mutex<Option<Instant>>,
    /// It was the coordinator, and collected no states for another.
    led: AtomicBool,
    /// Who told of the members last, and in which epoch: that node decided then.
    commander: Mutex<Option<(Epoch, String)>>,
    /// The least difference seen between this node's clock and that of the coordinator of an epoch (`protocol::cluster::clocks` says why).
    ahead_ns: Mutex<Option<(Epoch, i64)>>,
}

impl Cluster {
    /// A node that knows of nobody yet.
    #[must_use]
    pub fn new(
        life: NodeLife,
        start: StartId,
        namespace: Arc<Namespace>,
        runtime: tokio::runtime::Handle,
    ) -> Arc<Self> {
        let NodeLife { node, incarnation } = life.clone();
        let view = View::new(Life { node, incarnation, start }, Epoch::default());
        Arc::new(Self {
            life,
            start,
            names: Names::default(),
            publisher: Publisher::new(namespace.moment_before()),
            holders: Holders::default(),
            joined: AtomicU64::new(0),
            not_in: Mutex::default(),
            seated: Mutex::default(),
            led: AtomicBool::new(false),
            commander: Mutex::default(),
            ahead_ns: Mutex::default(),
            namespace,
            link: OnceLock::new(),
            runtime,
            seat: RwLock::default(),
            seat_changed: tokio::sync::watch::Sender::new(0),
            members: tokio::sync::watch::Sender::default(),
            view: Mutex::new(view),
            began: Instant::now(),
            calls: Calls::default(),
        })
    }

    /// This run of this node's daemon.
    #[must_use]
    pub fn own_life(&self) -> Life {
        let NodeLife { node, incarnation } = self.life.clone();
        Life { node, incarnation, start: self.start }
    }

    /// How often the coordinator, where it is another node, was asked for what.
    #[must_use]
    pub fn calls(&self) -> Vec<(&'static str, u64)> {
        self.calls.counted()
    }

    fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The clock of [`View`].
    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Sets how other nodes are reached. Once.
    pub fn connect(&self, link: Arc<dyn Link>) {
        assert!(self.link.set(link).is_ok(), "a node has one end of the links");
    }

    /// How other nodes are reached.
    #[must_use]
    pub fn link(&self) -> Option<&Arc<dyn Link>> {
        self.link.get()
    }

    /// From now on this is the coordinator. Directories that this node has alone it goes on having until that one says otherwise.
    pub fn sit(&self, seat: Seat) {
        let mut now = self.seat.write().unwrap_or_else(PoisonError::into_inner);
        let same = matches!((&*now, &seat), (Seat::There(one), Seat::There(other)) if one == other);
        if matches!(*now, Seat::Here(_)) {
            self.namespace.forget_removed();
            self.namespace.collect_no_more();
            self.led.store(true, Ordering::Release);
        }
        if matches!(seat, Seat::There(_)) {
            self.namespace.is_catalog_no_more();
        }
        if let Seat::Here(authority) = &seat {
            let alone = self.names.alone(&self.namespace);
            let kept: Vec<_> = alone.into_iter().filter(|path| authority.made(path)).collect();
            self.names.keep_alone(&self.namespace, &kept);
        }
        *now = seat;
        drop(now);
        if !same {
            *self.seated.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            self.view().rejoin();
            self.seat_changed.send_modify(|number| *number += 1);
        }
    }

    /// Whether this node has been the coordinator for so long that all who keep copies have said it.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let seated = *self.seated.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_coordinator() && seated.is_some_and(|at| at.elapsed() >= SETTLED)
    }

    /// Where the coordinator is.
    #[must_use]
    pub fn seat(&self) -> Seat {
        self.seat.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether this node decides, or a coordinator has let it in, which may be away by now.
    #[must_use]
    pub fn is_in(&self) -> bool {
        self.is_coordinator() || !matches!(self.coordinator(), Coordinator::Unknown)
    }

    /// How the last try to join failed; none where it succeeded, and before the first.
    #[must_use]
    pub fn why_not_in(&self) -> Option<NotIn> {
        self.not_in.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes how a try to join ended. Whether that is news.
    fn tried_to_join(&self, not_in: Option<NotIn>) -> bool {
        let mut noted = self.not_in.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = *noted != not_in;
        *noted = not_in;
        is_news
    }

    /// Changes of who the coordinator is.
    #[must_use]
    pub fn watch_seat(&self) -> tokio::sync::watch::Receiver<u64> {
        self.seat_changed.subscribe()
    }

    fn joined_number(&self) -> u64 {
        self.joined.load(Ordering::Acquire)
    }

    /// Whether this node decides.
    #[must_use]
    pub fn is_coordinator(&self) -> bool {
        matches!(*self.seat.read().unwrap_or_else(PoisonError::into_inner), Seat::Here(_))
    }

    /// The members as they were last told.
    #[must_use]
    pub fn members(&self) -> Arc<Members> {
        Arc::clone(&self.members.borrow())
    }

    /// Changes of the members.
    #[must_use]
    pub fn watch_members(&self) -> tokio::sync::watch::Receiver<Arc<Members>> {
        self.members.subscribe()
    }

    /// The member of that life.
    #[must_use]
    pub fn member_of(&self, incarnation: Incarnation) -> Option<Member> {
        let members = self.members.borrow();
        members.members.iter().find(|member| member.life.incarnation == incarnation).cloned()
    }

    /// The members are these now. What is older than what is known is not taken.
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
    /// One before it was missed: the whole list is to be asked for.
    pub fn follow_members(&self, change: MembersChange) -> Result<(), Missed> {
        self.saw_epoch(change.epoch);
        let mut followed = Ok(false);
        self.members.send_if_modified(|known| {
            followed = Arc::make_mut(known).follow(change);
            matches!(followed, Ok(true))
        });
        followed.map(drop)
    }

    /// The highest epoch that was seen.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.view().epoch()
    }

    /// An epoch was heard of. False when it is older than one that was seen: who speaks has been replaced.
    pub fn saw_epoch(&self, epoch: Epoch) -> bool {
        self.view().follow(epoch).is_ok()
    }

    /// A coordinator told of its members.
    fn heard_commander(&self, epoch: Epoch, node: String) {
        *self.commander.lock().unwrap_or_else(PoisonError::into_inner) = Some((epoch, node));
    }

    /// The coordinator of the highest epoch that was seen, where it was heard from itself.
    #[must_use]
    pub fn commander(&self) -> Option<Address> {
        let (epoch, node) = self.commander.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        let members = self.members();
        let member = members.members.iter().find(|member| member.life.node.as_str() == node && !member.gone);
        member.filter(|_| epoch == self.epoch()).map(address_of)
    }

    /// The coordinator of that epoch said its time.
    fn heard_clock(&self, epoch: Epoch, theirs_ns: i64) {
        let seen = self.namespace.now_ns().saturating_sub(theirs_ns);
        let mut ahead = self.ahead_ns.lock().unwrap_or_else(PoisonError::into_inner);
        let least = ahead.filter(|(of, _)| *of == epoch).map_or(seen, |(_, least)| least.min(seen));
        *ahead = Some((epoch, least));
    }

    /// How many nanoseconds this node's clock is ahead of that of the coordinator of that epoch, as far as it was heard.
    #[must_use]
    pub fn ahead_of_coordinator(&self, epoch: Epoch) -> Option<i64> {
        let ahead = *self.ahead_ns.lock().unwrap_or_else(PoisonError::into_inner);
        ahead.filter(|(of, _)| *of == epoch).map(|(_, ahead_ns)| ahead_ns)
    }

    /// Whether the coordinator has answered lately.
    #[must_use]
    pub fn is_reachable(&self) -> bool {
        self.is_coordinator() || matches!(self.coordinator(), Coordinator::Heard { .. })
    }

    /// Whether somebody decides for this node, which is not the coordinator itself.
    #[must_use]
    pub fn coordinator(&self) -> Coordinator {
        let now_ms = self.now_ms();
        self.view().coordinator(now_ms)
    }

    pub(crate) fn heard_coordinator(&self) {
        let now_ms = self.now_ms();
        self.view().heard(now_ms);
    }

    /// Asks the coordinator.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        message: &ToCoordinator,
        deadline: Duration,
    ) -> Result<T, Away> {
        let bytes = match self.seat() {
            Seat::Unknown => return Err(Away::Nobody),
            Seat::Here(authority) => {
                let answer = authority.answer(self.life.clone(), message.clone());
                let answer = tokio::time::timeout(deadline, answer).await;
                Bytes::from(answer.map_err(|_| Away::Late(deadline))?.map_err(Away::Refused)?)
            }
            Seat::There(address) => {
                let link = self.link.get().ok_or(Away::Nobody)?;
                self.calls.count(message);
                let mut seats = self.seat_changed.subscribe();
                let answer = tokio::select! {
                    answer = link.call(&address, tagged(tag::COORDINATOR, message)?, deadline) => answer,
                    // The answer of one that has been replaced is nobody's.
                    _ = seats.changed() => return Err(Away::Replaced),
                };
                let answer = answer.map_err(|error| match error {
                    LinkError::Refused { refusal, .. } => Away::Refused(refusal),
                    error => Away::Link(error),
                })?;
                self.heard_coordinator();
                answer
            }
        };
        Ok(wire::decode(&bytes)?)
    }

    /// Hands a person's command to the coordinator; both ends agree on the bytes.
    ///
    /// # Errors
    /// The coordinator is away, or refuses. [`Away::Nobody`] where it is this node.
    pub async fn forward(&self, command: &[u8], deadline: Duration) -> Result<Bytes, Away> {
        let Seat::There(address) = self.seat() else { return Err(Away::Nobody) };
        let link = self.link.get().ok_or(Away::Nobody)?;
        let body = [&[tag::COMMAND], command].concat();
        link.call(&address, body.into(), deadline).await.map_err(|error| match error {
            LinkError::Refused { refusal, .. } => Away::Refused(refusal),
            error => Away::Link(error),
        })
    }

    /// Asks a node.
    ///
    /// # Errors
    /// As the link's; a message that it does not take.
    pub async fn ask_node<T: DeserializeOwned>(
        &self,
        node: &Address,
        message: &ToNode,
        deadline: Duration,
    ) -> Result<T, Away> {
        let link = self.link.get().ok_or(Away::Nobody)?;
        let answer = link.call(node, tagged(tag::NODE, message)?, deadline).await?;
        Ok(wire::decode(&answer)?)
    }

    /// Tells every other member of which something is expected, each on its own; `what` is said in the log of one that cannot be told.
    /// Encoded once: to all nodes of a large cluster that is megabytes. Gives how many bytes are on their way.
    pub fn tell_others(
        &self,
        members: &Members,
        message: &ToNode,
        deadline: Duration,
        what: &'static str,
    ) -> u64 {
        self.tell_each(members.members.iter(), message, deadline, what)
    }

    /// The same for some members.
    fn tell_each<'a>(
        &self,
        members: impl Iterator<Item = &'a Member>,
        message: &ToNode,
        deadline: Duration,
        what: &'static str,
    ) -> u64 {
        let Some(link) = self.link.get() else { return 0 };
        let body = match tagged(tag::NODE, message) {
            Ok(body) => body,
            Err(error) => {
                tracing::error!(%error, what, "nobody can be told");
                return 0;
            }
        };
        let others = members.filter(|member| !member.gone && member.life != self.life);
        let mut bytes = 0;
        for address in others.map(address_of) {
            let (link, body) = (Arc::clone(link), body.clone());
            bytes += body.len() as u64;
            self.runtime.spawn(async move {
                if let Err(error) = link.call(&address, body, deadline).await {
                    tracing::debug!(%error, node = %address.node, what, "not told");
                }
            });
        }
        bytes
    }

    /// Sends the coordinator everything that it has not heard.
    ///
    /// # Errors
    /// The coordinator is away; it is told later.
    pub async fn publish(&self) -> Result<(), Away> {
        match self.seat() {
            Seat::Here(authority) => {
                if authority.is_kept().await {
                    Ok(())
                } else {
                    Err(Away::NotKept)
                }
            }
            Seat::There(_) | Seat::Unknown => publisher::publish(self).await,
        }
    }

    /// The same for who only wants the coordinator to know.
    async fn publish_unkept(&self) -> Result<(), Away> {
        publisher::publish(self).await
    }

    /// On the coordinator: it is new, and has not heard everybody. False on all others.
    #[must_use]
    pub fn hears_still(&self) -> bool {
        matches!(self.seat(), Seat::Here(authority) if authority.hears_still())
    }

    /// On the coordinator: everybody who may know of names at or below a path has told them; false where one could not be asked.
    pub(crate) async fn hear_below(&self, path: &[u8]) -> bool {
        match self.seat() {
            Seat::Here(authority) => authority.hear_below(path).await,
            Seat::There(_) | Seat::Unknown => false,
        }
    }

    /// On the coordinator: its loop gave or took away these names, which is no call that was let go on.
    pub(crate) fn changed_here(&self, paths: &[&[u8]]) {
        if let Seat::Here(authority) = self.seat() {
            authority.changed_here(paths);
        }
    }

    /// Until when what was done here is in this node's publications up to one; none: nobody has any.
    #[must_use]
    pub fn told_until(&self, publication: Option<u64>) -> Moment {
        self.publisher.told_until(publication.unwrap_or(0))
    }

    /// The same for a thread that is not the runtime's. Blocks.
    ///
    /// # Errors
    /// As [`Cluster::publish`].
    pub fn publish_now(&self) -> Result<(), Away> {
        self.runtime.block_on(self.publish())
    }

    /// The namespace of this node.
    #[must_use]
    pub fn namespace(&self) -> &Arc<Namespace> {
        &self.namespace
    }

    /// What this node made is its own.
    pub fn made_directory(&self, node: NodeId) {
        // In the coordinator's tree others see it at once, and one of them may have it by now.
        if let Seat::Here(authority) = self.seat()
            && !self.namespace.path_of(node).is_some_and(|path| authority.made(&path))
        {
            return;
        }
        self.names.hold(&self.namespace, node);
    }

    /// A name was moved here. On other nodes the operation says so to the coordinator.
    pub fn moved(&self, from: (NodeId, &[u8]), to: (NodeId, &[u8]), exchange: bool) {
        let directory = |(parent, name): (NodeId, &[u8])| self.namespace.child_directory(parent, name);
        let moved: Vec<NodeId> = if exchange {
            [from, to].into_iter().filter_map(directory).collect()
        } else {
            directory(to).into_iter().collect()
        };
        if exchange {
            moved.iter().for_each(|node| self.names.forget_below(*node));
        }
        let path = |(parent, name): (NodeId, &[u8])| Some(join(&self.namespace.path_of(parent)?, name));
        if let (false, Seat::Here(authority)) = (moved.is_empty(), self.seat())
            && let (Some(from), Some(to)) = (path(from), path(to))
        {
            authority.moved(&from, &to, exchange);
        }
    }
}

/// Where a member is reached.
#[must_use]
pub fn address_of(member: &Member) -> Address {
    Address { node: member.life.node.to_string(), address: member.address.clone() }
}

/// The body of a call.
pub(crate) fn tagged<T: serde::Serialize>(tag: u8, message: &T) -> Result<Bytes, WireError> {
    let mut body = vec![tag];
    body.extend(wire::encode(message)?);
    Ok(Bytes::from(body))
}

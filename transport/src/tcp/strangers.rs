//! Connections that have not proven which node opened them: how many there are, from where, and which gives way.
//!
//! Owns: the limits. Does not own: sockets (`listen`). Time is an argument.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};

/// Limit over all origins. Each connection holds a descriptor and, amid its handshake, some ten KiB. All nodes of a large
/// cluster may come at once after an outage: those beyond wait in the kernel's queue, which is soon empty, since a handshake
/// takes a millisecond or two.
pub(crate) const UNPROVEN_MAX: usize = 256;

/// Limit for one IPv4 address, or one /64 network of IPv6, among whose addresses one machine may choose. A node opens nine at a time
/// (`bulk/pool`), and some nodes may share a machine.
pub(crate) const UNPROVEN_PER_ORIGIN_MAX: usize = 32;

/// Refusals that are logged with their reason in one second. Refusals of a node's own peers are among them: those peers try again.
const LOGGED_PER_SECOND_MAX: u64 = 8;

const _: () = assert!(8 * UNPROVEN_PER_ORIGIN_MAX <= UNPROVEN_MAX, "one origin must not fill the table");

/// Age at which a connection may have to give way to a newcomer. A handshake over a network of 100 ms round trip takes
/// 300 ms; one that takes longer is only in danger while the table, or its origin's share of it, is full.
const GIVES_WAY_AFTER: Duration = Duration::from_millis(500);

/// The connections of one listener that are not proven yet.
#[derive(Debug)]
pub(crate) struct Strangers {
    table: Mutex<Table>,
    left: Notify,
}

#[derive(Debug)]
struct Table {
    per_origin_max: usize,
    /// In the order in which they came.
    waiting: Vec<Waiting>,
    came: u64,
    refused: u64,
    refused_last: Option<IpAddr>,
    logged: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    origin: IpAddr,
    since: Instant,
    /// Dropped when the connection has to give way.
    _place: oneshot::Sender<()>,
}

impl Strangers {
    /// Makes an empty table. Where nothing can be proven (`proves` is false), all nodes share the loopback address, and only
    /// the sum is limited.
    pub(crate) fn new(proves: bool) -> Arc<Self> {
        let per_origin_max = if proves { UNPROVEN_PER_ORIGIN_MAX } else { UNPROVEN_MAX };
        let table =
            Table { per_origin_max, waiting: vec![], came: 0, refused: 0, refused_last: None, logged: 0 };
        Arc::new(Self { table: Mutex::new(table), left: Notify::new() })
    }

    /// Waits until a newcomer has a place, at most [`GIVES_WAY_AFTER`]. Cancel safe.
    pub(crate) async fn room(&self) {
        loop {
            let left = self.left.notified();
            let Some(wait) = self.table().full_for(Instant::now()) else { return };
            // An error is the end of the wait: then the oldest gives way.
            drop(tokio::time::timeout(wait, left).await);
        }
    }

    /// Admits a newcomer; `None` when it has to be closed at once.
    pub(crate) fn admit(self: &Arc<Self>, address: IpAddr, now: Instant) -> Option<Stranger> {
        let (number, gives_way) = self.table().admit(address, now)?;
        Some(Stranger { strangers: Arc::clone(self), number, gives_way })
    }

    /// Returns whether the reason for one more refusal is logged; otherwise counts the refusal.
    pub(crate) fn may_log(&self, address: IpAddr) -> bool {
        let mut table = self.table();
        table.logged += 1;
        if table.logged > LOGGED_PER_SECOND_MAX {
            table.refused += 1;
            table.refused_last = Some(address);
        }
        table.logged <= LOGGED_PER_SECOND_MAX
    }

    /// Returns how many refusals without a log line there were since the last call, and the address of the last one. Callers run it every
    /// second.
    pub(crate) fn take_refused(&self) -> Option<(u64, IpAddr)> {
        let mut table = self.table();
        table.logged = 0;
        let last = table.refused_last.take()?;
        Some((std::mem::take(&mut table.refused), last))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Returns how long a full table has no room: until its oldest connection may have to give way.
    fn full_for(&self, now: Instant) -> Option<Duration> {
        let oldest = self.waiting.first().filter(|_| self.waiting.len() >= UNPROVEN_MAX)?;
        let age = now.saturating_duration_since(oldest.since);
        GIVES_WAY_AFTER.checked_sub(age).filter(|left| !left.is_zero())
    }

    fn admit(&mut self, address: IpAddr, now: Instant) -> Option<(u64, oneshot::Receiver<()>)> {
        let origin = origin(address);
        let of_origin = |waiting: &&Waiting| waiting.origin == origin;
        let oldest = if self.waiting.iter().filter(of_origin).count() >= self.per_origin_max {
            self.waiting.iter().find(of_origin)
        } else {
            self.waiting.first().filter(|_| self.waiting.len() >= UNPROVEN_MAX)
        };
        if let Some(oldest) = oldest {
            self.refused += 1;
            self.refused_last = Some(address);
            if now.saturating_duration_since(oldest.since) < GIVES_WAY_AFTER {
                return None;
            }
            let number = oldest.number;
            self.remove(number);
        }
        let (place, gives_way) = oneshot::channel();
        self.came += 1;
        self.waiting.push(Waiting { number: self.came, origin, since: now, _place: place });
        Some((self.came, gives_way))
    }

    fn remove(&mut self, number: u64) {
        self.waiting.retain(|waiting| waiting.number != number);
    }
}

/// Returns the part that all addresses have in common among which one machine may choose.
fn origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => {
            let network = u128::from(address) >> 64 << 64;
            IpAddr::V6(Ipv6Addr::from(network))
        }
    }
}

/// A connection's place among the unproven ones. Dropped when the connection is proven, or ends.
#[derive(Debug)]
pub(crate) struct Stranger {
    strangers: Arc<Strangers>,
    number: u64,
    gives_way: oneshot::Receiver<()>,
}

impl Stranger {
    /// Waits until the connection has to be closed in favour of a newcomer. Cancel safe.
    pub(crate) async fn gives_way(&mut self) {
        // Nothing is ever sent: the other end is dropped.
        drop((&mut self.gives_way).await);
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.strangers.table().remove(self.number);
        self.strangers.left.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: usize) -> IpAddr {
        IpAddr::from([10, 0, u8::try_from(number >> 8).expect("few"), number.to_le_bytes()[0]])
    }

    fn is_over(stranger: &mut Stranger) -> bool {
        stranger.gives_way.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn one_origin_has_its_share_and_its_oldest_connection_gives_way_when_it_is_slow() {
        let (strangers, start) = (Strangers::new(true), Instant::now());
        let mut held: Vec<_> = (0..UNPROVEN_PER_ORIGIN_MAX)
            .map(|_| strangers.admit(address(1), start).expect("a place"))
            .collect();
        let soon = start + GIVES_WAY_AFTER - Duration::from_millis(1);
        assert!(strangers.admit(address(1), soon).is_none(), "the others may be about to prove themselves");
        assert!(strangers.admit(address(2), soon).is_some(), "another origin has its own");
        assert!(!is_over(&mut held[0]));
        let later = start + GIVES_WAY_AFTER;
        let _newcomer = strangers.admit(address(1), later).expect("in the place of the oldest");
        assert!(is_over(&mut held[0]) && !is_over(&mut held[1]));
        assert_eq!(strangers.take_refused(), Some((2, address(1))));
        assert_eq!(strangers.take_refused(), None);
        // A proven connection leaves its place.
        held.truncate(UNPROVEN_PER_ORIGIN_MAX - 1);
        assert!(strangers.admit(address(1), later).is_some());
    }

    #[test]
    fn a_full_table_has_room_again_when_its_oldest_connection_is_slow() {
        let (strangers, start) = (Strangers::new(true), Instant::now());
        let mut held: Vec<_> = (0..UNPROVEN_MAX)
            .map(|number| strangers.admit(address(number), start).expect("a place"))
            .collect();
        assert_eq!(strangers.table().full_for(start), Some(GIVES_WAY_AFTER));
        assert!(strangers.admit(address(999), start).is_none());
        let later = start + GIVES_WAY_AFTER;
        assert_eq!(strangers.table().full_for(later), None);
        let _newcomer = strangers.admit(address(999), later).expect("in the place of the oldest");
        assert!(is_over(&mut held[0]) && !is_over(&mut held[1]));
        drop(held);
        assert_eq!(strangers.table().waiting.len(), 1);
    }

    #[test]
    fn a_second_has_few_reasons_in_the_log_and_the_others_are_counted() {
        let strangers = Strangers::new(true);
        let logged = (0..100).filter(|_| strangers.may_log(address(1))).count() as u64;
        assert_eq!(logged, LOGGED_PER_SECOND_MAX);
        assert_eq!(strangers.take_refused(), Some((100 - LOGGED_PER_SECOND_MAX, address(1))));
        assert!(strangers.may_log(address(1)));
    }

    #[test]
    fn without_proofs_only_the_sum_is_limited() {
        let (strangers, start) = (Strangers::new(false), Instant::now());
        let _held: Vec<_> =
            (0..UNPROVEN_MAX).map(|_| strangers.admit(address(1), start).expect("a place")).collect();
        assert!(strangers.admit(address(1), start).is_none());
    }

    #[test]
    fn what_one_machine_may_choose_among_is_one_origin() {
        let of = |text: &str| origin(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}

//! The lease in Tier-3, which needs nothing but create-if-absent.
//!
//! Owns: the numbered objects `lease/<20 digits>`, acquiring, renewing and releasing. Does not own: a clock (the caller passes its
//! monotonic time), nor the loop that calls this.
//!
//! The highest number present is the lease. A holder renews by creating the next number. A rival that has seen the same number for longer
//! than a term creates the next one itself. Exactly one of the two wins, so there is nothing to compare and swap. The epoch of a term is
//! the number with which it began; renewals repeat it in their bodies.

use super::{LeaseError, LeaseTimes, Turn};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Instant;
use tidemark_protocol::format::{check_seal, seal};
use tidemark_protocol::id::Epoch;
use tidemark_store::{Created, Store, StoreError};

/// The folder of the lease's objects, relative to the store's URL.
const LEASE_FOLDER: &str = ".tidemark/lease/";

/// Number of digits of a key, so that text order is number order.
const DIGITS: usize = 20;

/// The longest body, a short JSON document.
const BODY_BYTES: u64 = 4096;

/// Superseded numbers that stay, for people to read; older ones are deleted, a few with each renewal.
const KEPT: usize = 8;
const DELETED_AT_ONCE: usize = 16;

/// The most of our own renewals with lost answers that are stepped over.
const CATCH_UP: u32 = 16;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Body {
    holder: String,
    /// Random number, drawn once per [`StoreLease`], which tells two lives of one holder apart.
    nonce: u64,
    epoch: Epoch,
    /// Whether the holder released the lease: no rival needs to wait.
    released: bool,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    number: u64,
    epoch: Epoch,
    until: Instant,
}

/// A candidate's view of the lease.
#[derive(Debug)]
pub struct StoreLease {
    folder: &'static str,
    store: Arc<dyn Store>,
    holder: String,
    nonce: u64,
    times: LeaseTimes,
    held: Option<Held>,
    /// The newest number seen, and when it was first seen.
    seen: Option<(u64, Instant)>,
}

impl StoreLease {
    /// Makes a candidate named `holder`; `nonce` is random and new for each start of the daemon.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, holder: String, nonce: u64, times: LeaseTimes) -> Self {
        Self::in_folder(LEASE_FOLDER, store, holder, nonce, times)
    }

    /// Makes a candidate for another lease than the coordinator's. `folder` ends with a slash.
    #[must_use]
    pub fn in_folder(
        folder: &'static str,
        store: Arc<dyn Store>,
        holder: String,
        nonce: u64,
        times: LeaseTimes,
    ) -> Self {
        Self { folder, store, holder, nonce, times, held: None, seen: None }
    }

    /// Returns the epoch of the term, if the holder may act on it at `now`.
    #[must_use]
    pub fn epoch(&self, now: Instant) -> Option<Epoch> {
        self.held.filter(|held| now < held.until).map(|held| held.epoch)
    }

    /// Takes the lease if it is free or its term is over. `now` is the time just before this call. Costs a listing, a read, and a create if
    /// there is something to take.
    pub async fn try_acquire(&mut self, now: Instant) -> Result<Turn, LeaseError> {
        self.try_acquire_from(now, |_| false).await
    }

    /// Takes the lease as [`Self::try_acquire`] does, without waiting for the term of a holder that the caller knows to be gone.
    pub async fn try_acquire_from(
        &mut self,
        now: Instant,
        is_gone: impl Fn(&str) -> bool,
    ) -> Result<Turn, LeaseError> {
        self.held = None;
        let numbers = self.numbers().await?;
        let mut next = 1;
        if let Some(&highest) = numbers.last() {
            let body = self.read_or_unknown(highest).await?;
            let first_seen = match self.seen {
                Some((number, first_seen)) if number == highest => first_seen,
                _ => now,
            };
            self.seen = Some((highest, first_seen));
            let needed = self.times.term + self.times.margin;
            let waited = now.saturating_duration_since(first_seen);
            // A former term of our own, whose end we know, is over as soon as we say so.
            let free = body.released || self.is_ours(&body) || waited >= needed || is_gone(&body.holder);
            if !free {
                let (holder, epoch) = (body.holder, body.epoch);
                return Ok(Turn::Theirs { holder, epoch, wait: needed.saturating_sub(waited) });
            }
            next = highest.checked_add(1).ok_or_else(|| self.unreadable(highest, "the last number"))?;
        }
        let epoch = Epoch(next);
        if self.create(next, epoch, false).await? {
            let above = self.numbers().await?.last().copied().filter(|&number| number > next);
            if above.is_none() {
                self.held = Some(Held { number: next, epoch, until: now + self.times.term });
                return Ok(Turn::Ours(epoch));
            }
        }
        // A rival was faster. The rival's number is new here, so its term begins to count now.
        let highest = self.numbers().await?.last().copied().unwrap_or(next);
        let body = self.read_or_unknown(highest).await?;
        self.seen = Some((highest, now));
        let wait = self.times.term + self.times.margin;
        Ok(Turn::Theirs { holder: body.holder, epoch: body.epoch, wait })
    }

    /// Extends the term, counted from `now`, the time just before this call. Returns [`LeaseError::Lost`] when another took over. After any
    /// other error the old term still runs, and [`Self::epoch`] says for how long.
    pub async fn renew(&mut self, now: Instant) -> Result<Epoch, LeaseError> {
        let Some(held) = self.held else {
            return Err(self.lost(Epoch(0), Epoch(0), "nobody: it was not held".to_owned()));
        };
        let mut number = held.number;
        for _ in 0..CATCH_UP {
            number = number.checked_add(1).ok_or_else(|| self.unreadable(number, "the last number"))?;
            if self.create(number, held.epoch, false).await? {
                let numbers = self.numbers().await?;
                let highest = numbers.last().copied().unwrap_or(number);
                if highest > number {
                    return Err(self.superseded(held.epoch, highest).await);
                }
                self.held = Some(Held { number, epoch: held.epoch, until: now + self.times.term });
                self.sweep(&numbers).await;
                return Ok(held.epoch);
            }
            let body = self.read(number).await?;
            if !self.is_ours(&body) || body.epoch != held.epoch {
                return Err(self.superseded(held.epoch, number).await);
            }
            // A renewal of ours whose answer was lost: continue from it.
        }
        Err(self.unreadable(number, "too many renewals whose answers were lost"))
    }

    /// Releases the lease, so that a rival need not wait. Does nothing if it is not held.
    pub async fn release(&mut self) -> Result<(), LeaseError> {
        let Some(held) = self.held.take() else { return Ok(()) };
        if let Some(number) = held.number.checked_add(1) {
            self.create(number, held.epoch, true).await?;
        }
        Ok(())
    }

    fn is_ours(&self, body: &Body) -> bool {
        body.holder == self.holder && body.nonce == self.nonce
    }

    async fn create(&self, number: u64, epoch: Epoch, released: bool) -> Result<bool, LeaseError> {
        let body = Body { holder: self.holder.clone(), nonce: self.nonce, epoch, released };
        let text = serde_json::to_vec(&body)
            .map_err(|error| self.unreadable(number, &format!("it cannot be written: {error}")))?;
        let created = self.store.create(&self.key(number), Bytes::from(seal(text))).await;
        Ok(created.map_err(|source| self.failed(source))? == Created::Created)
    }

    /// Lists all numbers present, ascending. Other names are ignored.
    async fn numbers(&self) -> Result<Vec<u64>, LeaseError> {
        let listing = self.store.list(self.folder, true).await.map_err(|source| self.failed(source))?;
        Ok(listing.keys.iter().filter_map(|head| parse(self.folder, &head.key)).collect())
    }

    async fn read(&self, number: u64) -> Result<Body, LeaseError> {
        self.read_body(number).await?.map_err(|reason| self.unreadable(number, &reason))
    }

    /// Reads a body. The inner error says why it cannot be read.
    async fn read_body(&self, number: u64) -> Result<Result<Body, String>, LeaseError> {
        match self.store.get(&self.key(number), BODY_BYTES).await {
            Ok(Some(found)) => Ok(opened(&found)),
            Ok(None) => Err(self.unreadable(number, "it is gone again")),
            Err(error @ (StoreError::TooLarge { .. } | StoreError::Damaged { .. })) => {
                Ok(Err(error.to_string()))
            }
            Err(source) => Err(self.failed(source)),
        }
    }

    /// Reads a body, also of a holder that cannot be read, as after damage or from a later version. The number counts as any other: if the
    /// holder lives, it creates the next one. If it is silent for a term, it is gone.
    async fn read_or_unknown(&self, number: u64) -> Result<Body, LeaseError> {
        let reason = match self.read_body(number).await? {
            Ok(body) => return Ok(body),
            Err(reason) => reason,
        };
        let key = self.key(number);
        // Logged once: the number is read again each second.
        if self.seen.is_none_or(|(seen, _)| seen != number) {
            tracing::warn!(
                key,
                reason,
                "a lease object cannot be read: its holder, if it lives, is waited for"
            );
        }
        Ok(Body { holder: String::new(), nonce: 0, epoch: Epoch(number), released: false })
    }

    async fn superseded(&mut self, ours: Epoch, number: u64) -> LeaseError {
        self.held = None;
        match self.read(number).await {
            Ok(body) => self.lost(ours, body.epoch, body.holder),
            Err(error) => error,
        }
    }

    /// Deletes old numbers. If a zombie later creates a deleted number, the listing that follows every create shows that: the newest number
    /// is never deleted.
    async fn sweep(&self, numbers: &[u64]) {
        let old = numbers.len().saturating_sub(KEPT).min(DELETED_AT_ONCE);
        for &number in &numbers[..old] {
            if let Err(error) = self.store.delete(&self.key(number)).await {
                tracing::debug!(number, %error, "an old lease object stays until the next renewal");
                return;
            }
        }
    }

    fn key(&self, number: u64) -> String {
        format!("{}{number:0DIGITS$}", self.folder)
    }

    fn failed(&self, source: StoreError) -> LeaseError {
        LeaseError::Store { store: self.store.describe(), source: Box::new(source) }
    }

    fn unreadable(&self, number: u64, reason: &str) -> LeaseError {
        LeaseError::Unreadable {
            store: self.store.describe(),
            key: self.key(number),
            reason: reason.to_owned(),
        }
    }

    fn lost(&self, ours: Epoch, theirs: Epoch, holder: String) -> LeaseError {
        LeaseError::Lost { store: self.store.describe(), ours, theirs, holder }
    }
}

/// Checks the seal of a body and decodes it; the error says why that failed.
fn opened(text: &[u8]) -> Result<Body, String> {
    check_seal(text).map_err(|error| error.to_string())?;
    serde_json::from_slice(text).map_err(|error| error.to_string())
}

fn parse(folder: &str, key: &str) -> Option<u64> {
    let digits = key.strip_prefix(folder)?;
    (digits.len() == DIGITS && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tidemark_store::{Effect, Fault, FaultyStore, MemoryStore, Operation};

    fn candidate(store: &Arc<dyn Store>, name: &str, nonce: u64) -> StoreLease {
        StoreLease::new(Arc::clone(store), name.to_owned(), nonce, LeaseTimes::default())
    }

    fn memory() -> Arc<dyn Store> {
        Arc::new(MemoryStore::new())
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn a_holder_with_a_changed_byte_is_one_that_nobody_knows() {
        let store = memory();
        let body = Body { holder: "node1".to_owned(), nonce: 1, epoch: Epoch(1), released: false };
        let text = String::from_utf8(seal(serde_json::to_vec(&body).expect("JSON"))).expect("text");
        let key = format!("{LEASE_FOLDER}{:0DIGITS$}", 1);
        store.create(&key, Bytes::from(text.replace("node1", "node0"))).await.expect("create");
        let turn = candidate(&store, "node2", 2).try_acquire(Instant::now()).await.expect("acquire");
        assert!(matches!(&turn, Turn::Theirs { holder, .. } if holder.is_empty()), "{turn:?}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_many_candidates_one_holds() {
        let store = memory();
        let now = Instant::now();
        let mut tasks = Vec::new();
        for nonce in 0..16 {
            let mut lease = candidate(&store, &format!("node{nonce}"), nonce);
            tasks.push(tokio::spawn(async move { lease.try_acquire(now).await.expect("acquire") }));
        }
        let mut held = 0;
        for task in tasks {
            held += usize::from(matches!(task.await.expect("task"), Turn::Ours(Epoch(1))));
        }
        assert_eq!(held, 1);
    }

    #[tokio::test]
    async fn a_rival_takes_over_only_after_a_term_without_renewal_and_the_old_holder_learns_of_it() {
        let store = memory();
        let start = Instant::now();
        let (mut a, mut b) = (candidate(&store, "a", 1), candidate(&store, "b", 2));
        assert_eq!(a.try_acquire(start).await.expect("a"), Turn::Ours(Epoch(1)));
        assert!(matches!(b.try_acquire(start).await.expect("b"), Turn::Theirs { epoch: Epoch(1), .. }));
        // Renewed in time, so the number that b saw first is replaced, and its wait restarts.
        assert_eq!(a.renew(start + 2 * SECOND).await.expect("renew"), Epoch(1));
        assert!(matches!(b.try_acquire(start + 5 * SECOND).await.expect("b"), Turn::Theirs { .. }));
        assert_eq!(a.epoch(start + 4 * SECOND), Some(Epoch(1)));
        assert_eq!(a.epoch(start + 5 * SECOND), None, "the holder stops before any rival begins");
        assert!(matches!(b.try_acquire(start + 9 * SECOND).await.expect("b"), Turn::Theirs { .. }));
        assert_eq!(b.try_acquire(start + 10 * SECOND).await.expect("b"), Turn::Ours(Epoch(3)));
        let error = a.renew(start + 10 * SECOND).await.expect_err("lost");
        assert!(matches!(error, LeaseError::Lost { ours: Epoch(1), theirs: Epoch(3), .. }), "{error}");
        assert_eq!(error.kind(), tidemark_protocol::error::ErrorKind::Fenced);
    }

    #[tokio::test]
    async fn an_object_that_cannot_be_read_is_waited_for_as_a_holder_that_may_live() {
        for damaged in [&b""[..], b"{\"holder\"", &[b' '; 8 << 10]] {
            let store = memory();
            let start = Instant::now();
            let mut a = candidate(&store, "a", 1);
            assert_eq!(a.try_acquire(start).await.expect("a"), Turn::Ours(Epoch(1)));
            store.delete(&a.key(1)).await.expect("delete");
            store.create(&a.key(1), Bytes::copy_from_slice(damaged)).await.expect("damage");
            let mut b = candidate(&store, "b", 2);
            assert!(matches!(b.try_acquire(start).await.expect("b"), Turn::Theirs { .. }));
            // The holder lives: the next number restarts the wait.
            a.renew(start + SECOND).await.expect("renew");
            assert!(matches!(b.try_acquire(start + 5 * SECOND).await.expect("b"), Turn::Theirs { .. }));
            store.delete(&a.key(2)).await.expect("delete");
            store.create(&a.key(2), Bytes::copy_from_slice(damaged)).await.expect("damage");
            assert!(matches!(b.try_acquire(start + 9 * SECOND).await.expect("b"), Turn::Theirs { .. }));
            assert_eq!(b.try_acquire(start + 10 * SECOND).await.expect("b"), Turn::Ours(Epoch(3)));
            // Or a person says that it is gone.
            let mut c = candidate(&store, "c", 3);
            store.create(&c.key(4), Bytes::copy_from_slice(damaged)).await.expect("damage");
            let turn = c.try_acquire_from(start, |_| true).await.expect("c");
            assert_eq!(turn, Turn::Ours(Epoch(5)));
        }
    }

    #[tokio::test]
    async fn a_released_lease_is_free_at_once_with_a_higher_epoch() {
        let store = memory();
        let now = Instant::now();
        let (mut a, mut b) = (candidate(&store, "a", 1), candidate(&store, "b", 2));
        a.try_acquire(now).await.expect("a");
        a.release().await.expect("release");
        assert_eq!(a.epoch(now), None);
        assert_eq!(b.try_acquire(now).await.expect("b"), Turn::Ours(Epoch(3)));
    }

    #[tokio::test]
    async fn a_renewal_whose_answer_was_lost_does_not_cost_the_lease() {
        let fault = Fault {
            operation: Operation::Create,
            key_contains: "lease/".to_owned(),
            nth: Some(2),
            effect: Effect::FailAfter,
        };
        let faulty = Arc::new(FaultyStore::new(memory(), vec![fault]));
        let store = Arc::clone(&faulty) as Arc<dyn Store>;
        let now = Instant::now();
        let mut a = candidate(&store, "a", 1);
        a.try_acquire(now).await.expect("acquire");
        let error = a.renew(now + SECOND).await.expect_err("lost answer");
        assert!(matches!(error, LeaseError::Store { .. }), "{error}");
        assert_eq!(a.epoch(now + 2 * SECOND), Some(Epoch(1)), "the old term still runs");
        assert_eq!(a.renew(now + 2 * SECOND).await.expect("renew"), Epoch(1));
        assert_eq!(faulty.fired(0), 1);
    }

    #[tokio::test]
    async fn old_numbers_are_swept_and_a_zombie_that_creates_one_of_them_does_not_hold() {
        let store = memory();
        let now = Instant::now();
        let (mut a, mut zombie) = (candidate(&store, "a", 1), candidate(&store, "z", 2));
        zombie.try_acquire(now).await.expect("zombie");
        zombie.release().await.expect("release");
        a.try_acquire(now).await.expect("a");
        for _ in 0..30 {
            a.renew(now).await.expect("renew");
        }
        let left = store.list(LEASE_FOLDER, true).await.expect("list").keys.len();
        assert!(left <= KEPT + 1, "{left} lease objects are left");
        zombie.held = Some(Held { number: 1, epoch: Epoch(1), until: now + SECOND });
        let error = zombie.renew(now).await.expect_err("fenced");
        assert!(matches!(error, LeaseError::Lost { theirs: Epoch(3), .. }), "{error}");
    }
}

//! A link that fails on purpose: faults as data, around any other link.
//!
//! Owns: when a fault strikes, and what it does to one operation of this end. Does not own: chance. A fault that
//! strikes at random draws from its own seed, so that the same operations in the same order meet the same faults.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rustix::fs::MemfdFlags;

use crate::copy;
use crate::error::LinkError;
use crate::link::{Address, BytesSink, BytesSource, Grant, Link, Pace, local};
use crate::range::{Landed, PIECE_BYTES, pieces};
use crate::token::Token;

/// A fault: what goes wrong, when, and in which operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The node whose operations meet the fault; `None`: any node.
    pub with: Option<String>,
    /// The operations that meet the fault.
    pub on: Operation,
    /// The turns at which the fault strikes.
    pub when: When,
    /// The effect.
    pub what: What,
}

/// An operation of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`Link::call`].
    Call,
    /// [`Link::tell`].
    Tell,
    /// [`Link::push`].
    Push,
    /// [`Link::pull`].
    Pull,
}

/// The turns at which a fault strikes, counted from 1 over its operations since the fault was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Every turn.
    Always,
    /// The nth turn only.
    Nth(u64),
    /// The nth turn and every later one.
    From(u64),
    /// On average one turn in `of`.
    OneIn {
        /// Number of turns to one that fails; 0: none fails.
        of: u64,
        /// Start value of the draw.
        seed: u64,
    },
}

/// The effect of a fault. An effect that makes no sense for an operation does nothing to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The operation fails at once, and the other end hears nothing.
    Fail,
    /// The words do not arrive: a call waits for its deadline, a tell seems sent, a transfer is cut before the first
    /// byte.
    Lose,
    /// The other end hears the call, and its answer does not arrive.
    LoseAnswer,
    /// The operation begins later. A call's deadline keeps running.
    Delay {
        /// The delay.
        delay_ms: u64,
    },
    /// The words arrive twice; a call's second answer is the one that counts.
    Duplicate,
    /// The transfer ends after `bytes` bytes.
    CutAfter {
        /// Number of bytes that land.
        bytes: u64,
    },
    /// A byte arrives changed.
    Flip {
        /// The byte's offset in the file; nothing happens when it is not among the bytes that move.
        offset: u64,
        /// The bits that are inverted.
        mask: u8,
    },
}

/// A link with faults around it.
pub struct Faulty {
    inner: Arc<dyn Link>,
    faults: Mutex<Vec<(Fault, u64)>>,
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faulty({:?}, {} faults)", self.inner, self.faults().len())
    }
}

impl Faulty {
    /// Puts faults around a link.
    pub fn new(inner: Arc<dyn Link>, faults: Vec<Fault>) -> Self {
        let faulty = Self { inner, faults: Mutex::default() };
        faulty.set(faults);
        faulty
    }

    /// Replaces the faults, and counts turns from 1 again.
    pub fn set(&self, faults: Vec<Fault>) {
        *self.faults() = faults.into_iter().map(|fault| (fault, 0)).collect();
    }

    fn faults(&self) -> std::sync::MutexGuard<'_, Vec<(Fault, u64)>> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an operation, and returns the effects that strike it.
    fn strike(&self, on: Operation, with: &str) -> Vec<What> {
        let mut struck = vec![];
        for (fault, count) in self.faults().iter_mut() {
            if fault.on != on || fault.with.as_deref().is_some_and(|node| node != with) {
                continue;
            }
            *count += 1;
            if strikes(fault.when, *count) {
                struck.push(fault.what);
            }
        }
        struck
    }

    async fn delay(&self, struck: &[What]) {
        for what in struck {
            if let What::Delay { delay_ms } = what {
                tokio::time::sleep(Duration::from_millis(*delay_ms)).await;
            }
        }
    }

    async fn call_now(
        &self,
        to: &Address,
        body: Bytes,
        deadline: Duration,
        struck: &[What],
    ) -> Result<Bytes, LinkError> {
        if struck.contains(&What::Lose) {
            return std::future::pending().await;
        }
        if struck.contains(&What::Duplicate) {
            // The first answer is lost, good or bad.
            drop(self.inner.call(to, body.clone(), deadline).await);
        }
        let answer = self.inner.call(to, body, deadline).await;
        if struck.contains(&What::LoseAnswer) {
            return std::future::pending().await;
        }
        answer
    }
}

fn strikes(when: When, count: u64) -> bool {
    match when {
        When::Always => true,
        When::Nth(nth) => count == nth,
        When::From(first) => count >= first,
        When::OneIn { of, seed } => of > 0 && mixed(seed.wrapping_add(count)).is_multiple_of(of),
    }
}

/// Returns a number that looks random (the finisher of splitmix64).
fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

fn unreachable(to: &Address) -> LinkError {
    let source = io::Error::new(io::ErrorKind::ConnectionRefused, "a fault that was asked for");
    LinkError::Unreachable { node: to.node.clone(), address: to.address.clone(), source }
}

/// Returns the ranges that a transfer still moves before it is cut, or `None` when it is not cut.
fn cut(ranges: &[Range<u64>], struck: &[What]) -> Option<Vec<Range<u64>>> {
    let allowed = struck.iter().filter_map(|what| match what {
        What::CutAfter { bytes } => Some(*bytes),
        What::Lose => Some(0),
        _ => None,
    });
    let mut left = allowed.min()?;
    let mut kept = vec![];
    for range in ranges {
        let bytes = range.end.saturating_sub(range.start).min(left);
        left -= bytes;
        if bytes > 0 {
            kept.push(range.start..range.start + bytes);
        }
    }
    Some(kept)
}

/// Ends an operation that was cut: the ranges that were kept have landed.
fn cut_off(to: &Address, kept: Option<Vec<Range<u64>>>) -> Result<(), LinkError> {
    let Some(kept) = kept else { return Ok(()) };
    let mut landed = Landed::default();
    kept.into_iter().for_each(|range| landed.add(range));
    let reason = "a fault that was asked for".to_owned();
    Err(LinkError::Cut { node: to.node.clone(), landed: landed.into_ranges(), reason })
}

fn flips(struck: &[What]) -> Vec<(u64, u8)> {
    let flips = struck.iter().filter_map(|what| match what {
        What::Flip { offset, mask } => Some((*offset, *mask)),
        _ => None,
    });
    flips.collect()
}

/// A file in memory between sender and receiver, in which bytes are changed.
#[derive(Debug)]
struct Between {
    file: OwnedFd,
    flips: Vec<(u64, u8)>,
}

impl Between {
    fn new(flips: Vec<(u64, u8)>) -> io::Result<Self> {
        Ok(Self { file: rustix::fs::memfd_create("tidemark-faulty", MemfdFlags::CLOEXEC)?, flips })
    }

    fn flip(&self, range: &Range<u64>) -> io::Result<()> {
        for (offset, mask) in self.flips.iter().filter(|(offset, _)| range.contains(offset)) {
            let mut byte = [0];
            copy::read_at(self, &mut byte, *offset)?;
            copy::write_at(self, &[byte[0] ^ mask], *offset)?;
        }
        Ok(())
    }
}

impl BytesSource for Between {
    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl BytesSink for Between {
    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A sink that receives bytes, changes some, and passes them on.
struct Changing {
    between: Between,
    into: Arc<dyn BytesSink>,
    failed: Mutex<Option<(Range<u64>, io::Error)>>,
}

impl BytesSink for Changing {
    fn file(&self) -> BorrowedFd<'_> {
        self.between.file.as_fd()
    }

    fn landing(&self, piece: Range<u64>) {
        self.into.landing(piece);
    }

    fn landed(&self, range: Range<u64>) {
        let handed_on = self.between.flip(&range).and_then(|()| {
            copy::piece(&self.between, self.into.as_ref(), &range).map_err(|(_, error)| error)
        });
        match handed_on {
            Ok(()) => self.into.landed(range),
            Err(error) => {
                self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((range, error));
            }
        }
    }
}

#[async_trait]
impl Link for Faulty {
    async fn call(&self, to: &Address, body: Bytes, deadline: Duration) -> Result<Bytes, LinkError> {
        let struck = self.strike(Operation::Call, &to.node);
        if struck.contains(&What::Fail) {
            return Err(unreachable(to));
        }
        let faulty = async {
            self.delay(&struck).await;
            self.call_now(to, body, deadline, &struck).await
        };
        tokio::time::timeout(deadline, faulty)
            .await
            .unwrap_or_else(|_| Err(LinkError::Deadline { node: to.node.clone(), deadline }))
    }

    async fn tell(&self, to: &Address, body: Bytes) -> Result<(), LinkError> {
        let struck = self.strike(Operation::Tell, &to.node);
        if struck.contains(&What::Fail) {
            return Err(unreachable(to));
        }
        self.delay(&struck).await;
        if struck.contains(&What::Lose) {
            return Ok(());
        }
        if struck.contains(&What::Duplicate) {
            self.inner.tell(to, body.clone()).await?;
        }
        self.inner.tell(to, body).await
    }

    fn grant(&self, peer: &str, grant: Grant) -> Token {
        self.inner.grant(peer, grant)
    }

    fn revoke(&self, token: Token) {
        self.inner.revoke(token);
    }

    async fn push(
        &self,
        to: &Address,
        token: Token,
        from: Arc<dyn BytesSource>,
        ranges: &[Range<u64>],
        pace: &dyn Pace,
    ) -> Result<(), LinkError> {
        let struck = self.strike(Operation::Push, &to.node);
        if struck.contains(&What::Fail) {
            return Err(unreachable(to));
        }
        self.delay(&struck).await;
        let kept = cut(ranges, &struck);
        let ranges = kept.as_deref().unwrap_or(ranges);
        let flips = flips(&struck);
        let from = if flips.is_empty() {
            from
        } else {
            let whole = 0..u64::MAX;
            let between = Between::new(flips).map_err(|error| local("changing", &whole, error))?;
            for piece in pieces(ranges, PIECE_BYTES) {
                copy::piece(from.as_ref(), &between, &piece)
                    .map_err(|(doing, error)| local(doing, &piece, error))?;
                between.flip(&piece).map_err(|error| local("changing", &piece, error))?;
            }
            Arc::new(between)
        };
        self.inner.push(to, token, from, ranges, pace).await?;
        cut_off(to, kept)
    }

    async fn pull(
        &self,
        from: &Address,
        token: Token,
        ranges: &[Range<u64>],
        into: Arc<dyn BytesSink>,
    ) -> Result<(), LinkError> {
        let struck = self.strike(Operation::Pull, &from.node);
        if struck.contains(&What::Fail) {
            return Err(unreachable(from));
        }
        self.delay(&struck).await;
        let kept = cut(ranges, &struck);
        let ranges = kept.as_deref().unwrap_or(ranges);
        let flips = flips(&struck);
        if flips.is_empty() {
            self.inner.pull(from, token, ranges, into).await?;
        } else {
            let whole = 0..u64::MAX;
            let between = Between::new(flips).map_err(|error| local("changing", &whole, error))?;
            let changing = Arc::new(Changing { between, into, failed: Mutex::default() });
            self.inner.pull(from, token, ranges, Arc::clone(&changing) as Arc<dyn BytesSink>).await?;
            let failed = changing.failed.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some((range, error)) = failed {
                return Err(local("changing", &range, error));
            }
        }
        cut_off(from, kept)
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_when_it_says() {
        let struck = |when| (1..=6).filter(|count| strikes(when, *count)).collect::<Vec<_>>();
        assert_eq!(struck(When::Always), [1, 2, 3, 4, 5, 6]);
        assert_eq!(struck(When::Nth(3)), [3]);
        assert_eq!(struck(When::From(5)), [5, 6]);
        assert_eq!(struck(When::OneIn { of: 0, seed: 1 }), []);
        let often = |seed| (0..10_000).filter(|count| strikes(When::OneIn { of: 10, seed }, *count)).count();
        assert!((800..1200).contains(&often(7)), "{} of 10000", often(7));
        assert_eq!(often(7), often(7));
    }

    #[test]
    fn a_cut_keeps_the_first_bytes() {
        let ranges = [10..20, 30..40];
        let kept = cut(&ranges, &[What::CutAfter { bytes: 15 }]);
        assert_eq!(kept, Some(vec![10..20, 30..35]));
        assert_eq!(cut(&ranges, &[What::Lose]), Some(vec![]));
        assert_eq!(cut(&ranges, &[What::Duplicate]), None);
    }
}

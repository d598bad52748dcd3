//! Why host copies stay: the condition for which each waits before it may give way.
//!
//! Owns: the reasons, and counting bytes by them. Does not own: making room (`reclaim`), when it is made (the node loop).

use super::file::File;
use super::node::Body;
use super::reclaim::Place;
use super::view::{NODES_AT_ONCE, NodeViews};
use super::{FileState, NodeId, ReclaimClass};
use std::collections::BTreeMap;
use std::time::Instant;

/// Reason why a host copy stays; the first that holds, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeptBy {
    /// A process has the file open, for reading or writing.
    Open,
    /// A writable mapping of it lives.
    Mapped,
    /// The writer died, and the file's fate is undecided.
    Cut,
    /// Closed, and not hashed yet.
    NotSealed,
    /// Sealed, and of no committed version nor recorded as a loose file.
    NotCommitted,
    /// The bytes were just fetched for an open that has not come yet, or are being hashed, uploaded or verified.
    InUse,
    /// No reason: the copy gives way as soon as its room is needed.
    Nothing,
}

impl KeptBy {
    /// Returns the words that `ckptctl tiers` shows.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Mapped => "mapped for writing",
            Self::Cut => "cut, its writer died",
            Self::NotSealed => "closed, not sealed yet",
            Self::NotCommitted => "not committed yet",
            Self::InUse => "being read by the daemon, or just fetched",
            Self::Nothing => "may give way",
        }
    }

    fn of(file: &File, now: Instant) -> Self {
        let seal = file.fate.seal().map(|seal| seal.number);
        let elsewhere = seal.is_some() && file.object.as_ref().map(|noted| noted.0) == seal;
        match file.fate.state() {
            _ if file.opens > 0 => Self::Open,
            FileState::Open { .. } => Self::Open,
            FileState::Mapped => Self::Mapped,
            FileState::Cut => Self::Cut,
            FileState::Closed => Self::NotSealed,
            FileState::Sealed { .. } if !elsewhere || file.class == ReclaimClass::Never => Self::NotCommitted,
            FileState::Sealed { .. }
                if file.busy || file.is_held() || file.kept_until.is_some_and(|until| now < until) =>
            {
                Self::InUse
            }
            FileState::Sealed { .. } => Self::Nothing,
        }
    }
}

/// Bytes here by the reason why they stay.
pub type Kept = BTreeMap<KeptBy, u64>;

impl NodeViews<'_> {
    /// Returns the bytes of host copies in `place`, by the reason why they stay. Costs a pass over all nodes, in slices of the lock: 10 ms
    /// for 100,000.
    #[must_use]
    pub fn kept_in(&self, place: Place) -> Kept {
        let mut kept = Kept::new();
        let mut after: Option<NodeId> = None;
        let now = Instant::now();
        loop {
            let last = self.state.look(|state| {
                let from = after.map_or(std::ops::Bound::Unbounded, std::ops::Bound::Excluded);
                let mut last = None;
                for (id, node) in
                    state.tree.nodes.range((from, std::ops::Bound::Unbounded)).take(NODES_AT_ONCE)
                {
                    last = Some(*id);
                    let Body::File(file) = &node.body else { continue };
                    let Some(backing) = file.backing.as_ref().filter(|backing| Place::of(backing) == place)
                    else {
                        continue;
                    };
                    *kept.entry(KeptBy::of(file, now)).or_default() += backing.held_bytes();
                }
                last
            });
            if last.is_none() {
                return kept;
            }
            after = last;
        }
    }
}

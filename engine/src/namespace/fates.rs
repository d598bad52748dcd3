//! What became of processes of other nodes.
//!
//! Owns: the last word about each, and which words the deputy has not heard. Does not own: finding out (each node about its own).

use std::collections::{BTreeMap, BTreeSet};
use tidemark_protocol::cluster::wire::WireFate;
use tidemark_protocol::id::Incarnation;

/// What became of a process on another node, and when it was seen to have failed.
pub type FateOf = (WireFate, Option<i64>);

/// Fates remembered: the writers of a large job over a few of its lives. Beyond it the oldest go, and count as gone.
const FATES_MAX: usize = 1 << 18;

/// A process: the life of its node, its number there, and when it started.
pub(super) type Process = (Incarnation, u32, u64);

/// What became of processes of other nodes.
#[derive(Debug, Default)]
pub(super) struct Fates {
    pub(super) known: BTreeMap<Process, FateOf>,
    /// Those that the deputy has not been told of; none where there is no deputy.
    pub(super) untold: Option<BTreeSet<Process>>,
}

impl Fates {
    pub(super) fn set(&mut self, process: Process, fate: FateOf) {
        if self.known.len() >= FATES_MAX
            && let Some((oldest, _)) = self.known.pop_first()
            && let Some(untold) = &mut self.untold
        {
            untold.remove(&oldest);
        }
        if self.known.insert(process, fate) != Some(fate)
            && let Some(untold) = &mut self.untold
        {
            untold.insert(process);
        }
    }
}

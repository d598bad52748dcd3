//! What became of processes of other nodes.
//!
//! Owns: the last word about each, and which words are not kept elsewhere. Does not own: finding out (each node about its own).

use std::collections::{BTreeMap, BTreeSet};
use tidemark_protocol::cluster::kept::Process;
use tidemark_protocol::cluster::wire::WireFate;

/// What became of a process on another node, and when it was seen to have failed.
pub type FateOf = (WireFate, Option<i64>);

/// Fates remembered: the writers of a large job over a few of its lives. Beyond it the oldest go, and count as gone.
const FATES_MAX: usize = 1 << 18;

/// What became of processes of other nodes.
#[derive(Debug, Default)]
pub(super) struct Fates {
    pub(super) known: BTreeMap<Process, FateOf>,
    /// Processes whose fate is not kept elsewhere yet; none where nobody keeps it.
    pub(super) unkept: Option<BTreeSet<Process>>,
    /// Processes whose fate may be kept elsewhere, and is not known here any more.
    pub(super) forgotten: BTreeSet<Process>,
}

impl Fates {
    pub(super) fn set(&mut self, process: Process, fate: FateOf) {
        if self.known.len() >= FATES_MAX
            && let Some((oldest, _)) = self.known.pop_first()
            && let Some(unkept) = &mut self.unkept
        {
            unkept.remove(&oldest);
            self.forgotten.insert(oldest);
        }
        if self.known.insert(process, fate) != Some(fate)
            && let Some(unkept) = &mut self.unkept
        {
            self.forgotten.remove(&process);
            unkept.insert(process);
        }
    }

    /// From now on what changes is collected, and first of all what is known.
    pub(super) fn collect_unkept(&mut self) {
        self.unkept = Some(self.known.keys().copied().collect());
        self.forgotten.clear();
    }
}

//! Fates of other nodes' processes.
//!
//! Owns: the last known fate of each, and which fates are not kept elsewhere. Does not own: finding out (each node about its own).

use super::catalog::CatalogTree;
use super::writer::WriterId;
use std::collections::{BTreeMap, BTreeSet};
use tidemark_protocol::cluster::kept::Process;
use tidemark_protocol::cluster::wire::{WireFate, WriterFact};
use tidemark_protocol::id::Incarnation;

/// Fate of a process on another node, and when it was seen to have failed.
pub type FateOf = (WireFate, Option<i64>);

/// Most fates remembered: the writers of a large job over a few of its lives. Those beyond that are dropped in the order of
/// their keys, and count as gone.
const FATES_MAX: usize = 1 << 18;

/// Fates of other nodes' processes.
#[derive(Debug, Default)]
pub(super) struct Fates {
    pub(super) known: BTreeMap<Process, FateOf>,
    /// Processes whose fate is not kept elsewhere yet; none while this tree is not kept elsewhere.
    pub(super) unkept: Option<BTreeSet<Process>>,
    /// Processes whose fate this node has forgotten, but which may still be kept elsewhere.
    pub(super) forgotten: BTreeSet<Process>,
}

impl Fates {
    pub(super) fn set(&mut self, process: Process, fate: FateOf) {
        if self.known.len() >= FATES_MAX
            && let Some((first, _)) = self.known.pop_first()
            && let Some(unkept) = &mut self.unkept
        {
            unkept.remove(&first);
            self.forgotten.insert(first);
        }
        if self.known.insert(process, fate) != Some(fate)
            && let Some(unkept) = &mut self.unkept
        {
            self.forgotten.remove(&process);
            unkept.insert(process);
        }
    }

    /// Collects changed fates from now on; the first are all known ones.
    pub(super) fn collect_unkept(&mut self) {
        self.unkept = Some(self.known.keys().copied().collect());
        self.forgotten.clear();
    }
}

impl CatalogTree<'_> {
    /// Accepts the fates of processes that another node publishes.
    pub fn take_fates(&self, fates: &[WriterFact], home: Incarnation) {
        let mut known = self.fates.lock().expect(super::UNPOISONED);
        for fact in fates {
            known.set((home, fact.process.0, fact.process.1), (fact.fate, fact.failed_at_ns));
        }
        drop(known);
        self.state.catalog_changed.notify_one();
    }

    /// Ends the fates of a lost node's processes.
    pub fn end_fates(&self, home: Incarnation, now_ns: i64) {
        let mut known = self.fates.lock().expect(super::UNPOISONED);
        let lives = known.known.range((home, 0, 0)..=(home, u32::MAX, u64::MAX));
        let alive = lives.filter(|(_, fate)| fate.0 == WireFate::Alive).map(|(process, _)| *process);
        for process in alive.collect::<Vec<_>>() {
            known.set(process, (WireFate::Killed, Some(now_ns)));
        }
        drop(known);
        self.state.catalog_changed.notify_one();
    }

    /// Returns the fate of a writer process on another node.
    #[must_use]
    pub fn fate_elsewhere(&self, writer: &WriterId) -> Option<FateOf> {
        let home = writer.home?;
        let known = self.fates.lock().expect(super::UNPOISONED);
        let fate = known.known.get(&(home, writer.tgid, writer.start_time_ticks));
        Some(fate.copied().unwrap_or((WireFate::Gone, None)))
    }
}

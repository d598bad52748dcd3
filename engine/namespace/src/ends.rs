//! How processes were seen to end, across restarts of the daemon.
//!
//! Owns: [`End`], which ends are remembered, which of them the next daemon recovers. Does not own: seeing them (`writer`, `pidfd`), their
//! records (`record`), what follows from them (the node).
//!
//! The kernel reports once how a process ended, to the one watcher. So every end goes to the journal when it is seen: finding out whether a
//! file names that process would cost a pass over all files. A snapshot and the next daemon keep the ends of processes that a file names.

use super::pidfd::Ended;
use super::tree::Tree;
use super::writer::WriterId;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Most ends remembered, the latest. A copy made file by file has one process for each file.
const ENDS_MAX: usize = 16 << 10;

/// A process of this node ([`WriterId::process`]).
pub(super) type Process = (u32, u64);

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// When the end was seen, in nanoseconds of CLOCK_REALTIME.
    pub at_ns: i64,
    pub how: Ended,
}

impl End {
    /// Returns when the end was seen, if the process did not end well.
    #[must_use]
    pub fn failed_at_ns(self) -> Option<i64> {
        match self.how {
            Ended::Well => None,
            Ended::Failed | Ended::Killed => Some(self.at_ns),
        }
    }
}

/// The ends that were seen, by process.
#[derive(Debug, Default)]
pub(super) struct Ends {
    known: BTreeMap<Process, End>,
    /// Processes in the order in which their ends were seen.
    order: VecDeque<Process>,
}

impl Ends {
    /// Adds an end; false if the process's end is known already. A process ends once, and the first time when that was
    /// seen counts.
    pub(super) fn add(&mut self, process: Process, end: End) -> bool {
        if self.known.contains_key(&process) {
            return false;
        }
        self.known.insert(process, end);
        self.order.push_back(process);
        if self.order.len() > ENDS_MAX
            && let Some(first) = self.order.pop_front()
        {
            self.known.remove(&first);
        }
        true
    }

    pub(super) fn get(&self, process: Process) -> Option<End> {
        self.known.get(&process).copied()
    }

    /// Keeps the ends of processes that a file of the tree names; no other end is ever needed. `told`: in the journal's order.
    pub(super) fn found(told: Vec<(Process, End)>, tree: &Tree) -> Self {
        let ended: BTreeSet<Process> = told.iter().map(|(process, _)| *process).collect();
        let files = tree.nodes.values().filter_map(|node| node.file().ok());
        let writers = files.flat_map(|file| &file.writers).map(|writer| writer.process());
        let named: BTreeSet<Process> = writers.filter(|process| ended.contains(process)).collect();
        let mut ends = Self::default();
        for (process, end) in told {
            if named.contains(&process) {
                ends.add(process, end);
            }
        }
        ends
    }

    /// Returns the ends of `writers` that a snapshot lacks, and counts them as contained from now on.
    pub(super) fn untold<'a>(
        &'a self,
        writers: &'a [Arc<WriterId>],
        told: &'a mut BTreeSet<Process>,
    ) -> impl Iterator<Item = (Process, End)> + 'a {
        let ended = writers.iter().filter_map(move |writer| {
            let process = writer.process();
            Some((process, self.get(process)?))
        });
        ended.filter(move |(process, _)| told.insert(*process))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WELL: End = End { at_ns: 1, how: Ended::Well };

    #[test]
    fn of_very_many_ends_the_latest_are_known() {
        let mut ends = Ends::default();
        for tgid in 0..=u32::try_from(ENDS_MAX).unwrap() {
            assert!(ends.add((tgid, 1), WELL));
            assert!(!ends.add((tgid, 1), WELL), "it is no news");
        }
        assert_eq!((ends.known.len(), ends.order.len()), (ENDS_MAX, ENDS_MAX));
        assert_eq!(ends.get((0, 1)), None);
    }

    /// A daemon that takes over finds a process that was not waited for, and sees its end later than the daemon before it.
    #[test]
    fn when_an_end_was_seen_first_counts() {
        let mut ends = Ends::default();
        ends.add((7, 1), WELL);
        ends.add((7, 1), End { at_ns: 9, how: Ended::Well });
        assert_eq!(ends.get((7, 1)), Some(WELL));
    }
}

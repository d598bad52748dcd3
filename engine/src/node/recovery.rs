//! `ckptctl recover --plan`: what a job of each run comes back to.
//!
//! Owns: what is asked about each version. Does not own: the choice (`protocol::recovery`), which files have no good copy
//! (`visibility::lost`).

use crate::node::answer::checkpoint_ref;
use crate::node::book::{Book, Number, VersionBook};
use crate::node::run::{Engine, Node};
use std::collections::BTreeMap;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::recovery::{Standing, Standpoint, choose};
use tidemark_protocol::report::{Recovery, RecoveryRow, RunRecovery};

/// The versions of one run.
#[derive(Default)]
struct OfRun<'a> {
    versions: Vec<(&'a Book, Number, &'a VersionBook)>,
    /// Of how many the job removed all names.
    removed: u64,
}

impl Node {
    /// Every run that has checkpoints at or below `place`, or one in which it lies.
    pub async fn recovery(&self, place: Vec<u8>) -> Option<Recovery> {
        self.ask(move |engine| engine.recovery(&place)).await
    }
}

impl Engine {
    fn recovery(&self, place: &[u8]) -> Recovery {
        let mut runs: BTreeMap<&RunPath, OfRun<'_>> = BTreeMap::new();
        for book in self.books_about(place) {
            self.add_versions(book, runs.entry(&book.id.run).or_default());
        }
        let is_one = |(_, _, version): &(&Book, Number, &VersionBook)| version.checkpoint.failure().is_none();
        runs.retain(|_, run| run.versions.iter().any(is_one));
        Recovery { runs: runs.into_iter().map(|(run, of_run)| self.run_recovery(run, &of_run)).collect() }
    }

    /// Adds the versions of a checkpoint that a job may come back to, or would have: from the newest to the first that can be loaded.
    /// Older ones were saved over, and what the job removed it does not miss.
    fn add_versions<'a>(&'a self, book: &'a Book, run: &mut OfRun<'a>) {
        for (number, version) in book.versions.iter().rev() {
            let checkpoint = &version.checkpoint;
            let is_reason = checkpoint.failure().or_else(|| checkpoint.why_unreadable()).is_some();
            if !checkpoint.is_committed() && !checkpoint.is_alive() && !is_reason {
                continue;
            }
            if self.is_removed(book, *number, version) {
                run.removed += 1;
                continue;
            }
            run.versions.push((book, *number, version));
            if self.is_loadable(checkpoint) && self.comes_in_sight(book, version) {
                return;
            }
        }
    }

    /// All its names are in the tree, or come back by themselves when the process fails that removed them.
    fn comes_in_sight(&self, book: &Book, version: &VersionBook) -> bool {
        let newest = book.newest().is_some_and(|(_, newest)| std::ptr::eq(newest, version));
        self.is_in_sight(book, version) || newest && self.visibility.may_be_undone(&book.id)
    }

    fn run_recovery(&self, run: &RunPath, OfRun { versions, removed }: &OfRun<'_>) -> RunRecovery {
        let standings: Vec<_> = versions
            .iter()
            .map(|(book, _, version)| Standing {
                checkpoint: &version.checkpoint,
                lost: self.why_lost(version.record()),
                in_sight: self.comes_in_sight(book, version),
            })
            .collect();
        let choices = choose(&standings);
        let chosen = choices.iter().find(|choice| choice.standpoint == Standpoint::Chosen);
        let chosen = chosen.map(|choice| checkpoint_ref(standings[choice.index].checkpoint));
        let row = |choice: tidemark_protocol::recovery::Choice| {
            let (book, number, version) = versions[choice.index];
            RecoveryRow {
                checkpoint: self.version_row(book, number, version),
                standpoint: choice.standpoint,
                reason: choice.reason,
            }
        };
        RunRecovery {
            run: run.to_string(),
            chosen,
            versions: choices.into_iter().map(row).collect(),
            removed: *removed,
        }
    }
}

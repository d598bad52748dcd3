//! `ckptctl recover --plan`: what a job of each run comes back to.
//!
//! Owns: what is asked about each version, and which of its names are in the tree. Does not own: the choice (`protocol::recovery`), which
//! files have no good copy (`visibility::lost`).

use crate::node::answer::checkpoint_ref;
use crate::node::book::{Book, Number, VersionBook};
use crate::node::run::{Engine, Node};
use std::collections::BTreeMap;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::recovery::{Choice, Sight, Standing, Standpoint, choose};
use tidemark_protocol::report::{Recovery, RecoveryRow, RunRecovery};

/// A version that a job may come back to, or would have.
struct Known<'a> {
    book: &'a Book,
    number: Number,
    version: &'a VersionBook,
    sight: Sight,
}

/// The versions of one run.
#[derive(Default)]
struct OfRun<'a> {
    versions: Vec<Known<'a>>,
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
        let is_one = |known: &Known<'_>| known.version.checkpoint.failure().is_none();
        runs.retain(|_, run| run.versions.iter().any(is_one));
        Recovery { runs: runs.into_iter().map(|(run, of_run)| self.run_recovery(run, &of_run)).collect() }
    }

    /// Adds the versions of a checkpoint that a job may come back to, or would have: from the newest to the first that can be loaded.
    /// Older ones were saved over, and what the job removed it does not miss.
    fn add_versions<'a>(&'a self, book: &'a Book, run: &mut OfRun<'a>) {
        let mut is_saved_over = false;
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
            // Saved over under another name, and so are the older ones.
            if self.successor(book, version).is_some() {
                return;
            }
            let sight = self.sight_of(book, *number, version);
            if is_saved_over && sight != Sight::All {
                continue;
            }
            run.versions.push(Known { book, number: *number, version, sight });
            match sight {
                Sight::All if self.is_loadable(checkpoint) => return,
                Sight::InPart { .. } if self.is_loadable(checkpoint) => is_saved_over = true,
                Sight::All | Sight::InPart { .. } | Sight::Missing => {}
            }
        }
    }

    /// Which names of a version are in the tree, whatever checkpoint they count for now, or come back by themselves when the process fails
    /// that removed them.
    pub(crate) fn sight_of(&self, book: &Book, number: Number, version: &VersionBook) -> Sight {
        let newest = book.newest().is_some_and(|(_, newest)| std::ptr::eq(newest, version));
        if self.shows_all(version) || newest && self.visibility.may_be_undone(&book.id) {
            return Sight::All;
        }
        let (left, of) = (self.names_in_sight(version), version.contents.len());
        let gone = version.contents.keys().filter(|path| self.is_gone(path)).count();
        // A name that has other bytes was written over, by whom and how far nobody says here.
        if left > 0 && left + gone == of && self.are_removals_meant(book, number) {
            return Sight::InPart { left: left as u64, of: of as u64 };
        }
        Sight::Missing
    }

    /// Another checkpoint that can be loaded and has all names of this version by now: a model in shards, saved beside the one file that
    /// it was. Costs a pass over the books where the tree has nothing under the checkpoint's own name.
    pub(crate) fn successor(&self, book: &Book, version: &VersionBook) -> Option<&Book> {
        let first = version.contents.keys().next().filter(|_| book.candidate.is_none())?;
        self.ledger.books.values().filter(|other| other.holds(first)).find(|other| {
            let has_all = |newer: &VersionBook| {
                version.contents.keys().all(|path| newer.contents.contains_key(path))
                    && self.is_loadable(&newer.checkpoint)
                    && self.is_in_sight(other, newer)
            };
            other.versions.values().any(has_all)
        })
    }

    fn run_recovery(&self, run: &RunPath, OfRun { versions, removed }: &OfRun<'_>) -> RunRecovery {
        let standings: Vec<_> = versions
            .iter()
            .map(|known| Standing {
                checkpoint: &known.version.checkpoint,
                lost: self.why_lost(known.version.record()),
                sight: known.sight,
            })
            .collect();
        let choices = choose(&standings);
        let chosen = choices.iter().find(|choice| choice.standpoint == Standpoint::Chosen);
        let chosen = chosen.map(|choice| checkpoint_ref(standings[choice.index].checkpoint));
        let row = |choice: Choice| {
            let Known { book, number, version, .. } = &versions[choice.index];
            RecoveryRow {
                checkpoint: self.version_row(book, *number, version),
                standpoint: choice.standpoint,
                reason: choice.reason,
                removed_in_part: choice.removed_in_part,
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

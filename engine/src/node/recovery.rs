//! `ckptctl recover --plan`: what a job of each run comes back to.
//!
//! Owns: what is asked about each version. Does not own: the choice (`protocol::recovery`), which files have no good copy
//! (`lost`).

use crate::node::answer::checkpoint_ref;
use crate::node::book::{Book, Number, VersionBook};
use crate::node::flush::covers;
use crate::node::run::{Engine, Node};
use std::collections::BTreeMap;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::recovery::{Standing, Standpoint, choose};
use tidemark_protocol::report::{Recovery, RecoveryRow, RunRecovery};

impl Node {
    /// Every run that has checkpoints at or below `place`.
    pub async fn recovery(&self, place: Vec<u8>) -> Option<Recovery> {
        self.ask(move |engine| engine.recovery(&place)).await
    }
}

impl Engine {
    fn recovery(&self, place: &[u8]) -> Recovery {
        let mut runs: BTreeMap<&RunPath, Vec<(&Book, Number, &VersionBook)>> = BTreeMap::new();
        for book in self.ledger.books.values().filter(|book| covers(place, &book.path())) {
            let stands = |(_, version): &(&Number, &VersionBook)| {
                let checkpoint = &version.checkpoint;
                checkpoint.is_committed() || checkpoint.is_alive() || checkpoint.failure().is_some()
            };
            let versions = book.versions.iter().filter(stands);
            runs.entry(&book.id.run)
                .or_default()
                .extend(versions.map(|(number, version)| (book, *number, version)));
        }
        let is_one = |(_, _, version): &(&Book, Number, &VersionBook)| version.checkpoint.failure().is_none();
        runs.retain(|_, versions| versions.iter().any(is_one));
        Recovery { runs: runs.into_iter().map(|(run, versions)| self.run_recovery(run, &versions)).collect() }
    }

    fn run_recovery(&self, run: &RunPath, versions: &[(&Book, Number, &VersionBook)]) -> RunRecovery {
        let standings: Vec<_> = versions
            .iter()
            .map(|(book, _, version)| Standing {
                checkpoint: &version.checkpoint,
                lost: self.why_lost(version.record()),
                in_sight: self.is_in_sight(book, version),
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
        RunRecovery { run: run.to_string(), chosen, versions: choices.into_iter().map(row).collect() }
    }
}

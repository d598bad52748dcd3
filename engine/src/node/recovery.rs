//! Runs and the checkpoints that their jobs resume from, for `ckptctl recover --plan` and `status`.
//!
//! Owns: what is asked about each version, and which of its names are in the tree. Does not own: the choice (`protocol::recovery`), which
//! files have no good copy (`visibility::lost`).

use crate::node::answer::{self, checkpoint_ref};
use crate::node::book::{Book, Number, VersionBook};
use crate::node::damage::BadCopies;
use crate::node::inventory::Inventory;
use crate::node::outstanding::Outstanding;
use crate::node::problems::NodeHealth;
use crate::node::run::{Engine, Node};
use crate::node::tiers::Tiers;
use std::collections::{BTreeMap, BTreeSet};
use tidemark_protocol::checkpoint;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::recovery::{Choice, Sight, Standing, Standpoint, choose};
use tidemark_protocol::report::{CopyCount, Recovery, RecoveryRow, RunRecovery, RunStatus};
use tokio::time::Instant;

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
    /// Number of versions that lost all names to the job.
    removed: u64,
}

impl Node {
    /// Returns every run that has checkpoints at or below `place`, or one in which it lies.
    pub async fn recovery(&self, place: Vec<u8>) -> Option<Recovery> {
        self.ask(move |engine| Standings { engine }.recovery(&place)).await
    }
}

/// Runs, their newest checkpoints and what is not saved, as `status` and `recover --plan` print them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Standings<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> Standings<'a> {
    fn recovery(self, place: &[u8]) -> Recovery {
        let mut runs: BTreeMap<&RunPath, OfRun<'_>> = BTreeMap::new();
        for book in self.engine.by_path().books_about(place) {
            self.add_versions(book, runs.entry(&book.id.run).or_default());
        }
        let is_one = |known: &Known<'_>| known.version.checkpoint.failure().is_none();
        runs.retain(|_, run| run.versions.iter().any(is_one));
        Recovery { runs: runs.into_iter().map(|(run, of_run)| self.run_recovery(run, &of_run)).collect() }
    }

    /// Adds the versions of a checkpoint that a job may come back to, or would have: from the newest to the first that can be loaded.
    /// Older ones were saved over, and what the job removed it does not miss.
    fn add_versions(self, book: &'a Book, run: &mut OfRun<'a>) {
        let mut is_saved_over = false;
        for (number, version) in book.versions.iter().rev() {
            let checkpoint = &version.checkpoint;
            let is_reason = checkpoint.failure().or_else(|| checkpoint.why_unreadable()).is_some();
            if !checkpoint.is_committed() && !checkpoint.is_alive() && !is_reason {
                continue;
            }
            if self.engine.selection().is_removed(book, *number, version) {
                run.removed += 1;
                continue;
            }
            // Saved over under another name, and so are the older ones.
            if self.engine.tree_names().successor(book, version).is_some() {
                return;
            }
            let sight = self.engine.selection().sight_of(book, *number, version);
            if is_saved_over && sight != Sight::All {
                continue;
            }
            run.versions.push(Known { book, number: *number, version, sight });
            match sight {
                Sight::All if self.engine.tree_names().is_loadable(checkpoint) => return,
                Sight::InPart { .. } if self.engine.tree_names().is_loadable(checkpoint) => {
                    is_saved_over = true
                }
                Sight::All | Sight::InPart { .. } | Sight::Missing => {}
            }
        }
    }

    fn run_recovery(self, run: &RunPath, OfRun { versions, removed }: &OfRun<'_>) -> RunRecovery {
        let standings: Vec<_> = versions
            .iter()
            .map(|known| Standing {
                checkpoint: &known.version.checkpoint,
                lost: self.engine.tree_names().why_lost(known.version.record()),
                sight: known.sight,
            })
            .collect();
        let choices = choose(&standings);
        let chosen = choices.iter().find(|choice| choice.standpoint == Standpoint::Chosen);
        let chosen = chosen.map(|choice| checkpoint_ref(standings[choice.index].checkpoint));
        let row = |choice: Choice| {
            let Known { book, number, version, .. } = &versions[choice.index];
            RecoveryRow {
                checkpoint: Inventory { engine: self.engine }.version_row(book, *number, version),
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

    pub(crate) fn standing(self) -> answer::Standing {
        let now = Instant::now();
        let runs: BTreeSet<_> = self.engine.ledger.books.keys().map(|id| id.run.clone()).collect();
        let tiers = Tiers { engine: self.engine }.tiers();
        let (unsaved, unsealed) = self.unsaved();
        answer::Standing {
            problems: NodeHealth { engine: self.engine }.problems(&tiers, now),
            tiers,
            unsaved,
            unsealed,
            untold: self.engine.tree.untold,
            runs: runs.into_iter().map(|run| self.run_status(&run)).collect(),
        }
    }

    /// Counts names whose bytes are in this node's memory and not in Tier-3, and those of them that are not sealed. Bytes that
    /// Tier-3 has in a version without a decision count as saved, although no reader gets them.
    fn unsaved(self) -> (CopyCount, CopyCount) {
        let versions = self.engine.ledger.books.values().flat_map(|book| book.versions.values());
        let undecided =
            versions.filter(|version| version.checkpoint.is_prepared() && version.checkpoint.is_alive());
        let listed: BTreeMap<_, _> = undecided.flat_map(|version| &version.contents).collect();
        let kept = listed.into_iter().filter_map(|(path, (file, seal))| {
            let view = self
                .engine
                .ledger
                .file(path)
                .filter(|view| view.file == *file && view.sealed() == Some(*seal))?;
            (view.host && view.object.is_none()).then_some(view.size_bytes)
        });
        // At the end of the daemon a caller asks once what was lost; there may be very many files.
        let loose =
            self.engine.rights.draining.then(|| self.engine.ledger.loose.keys()).into_iter().flatten();
        let stand = loose.filter_map(|path| {
            let view = self.engine.ledger.file(path).filter(|view| view.host && view.sealed().is_none())?;
            Outstanding { engine: self.engine }.standing_of_loose(path, view).1.then_some(view.size_bytes)
        });
        let all = self.engine.ledger.copies;
        let less =
            |left: CopyCount, bytes: u64| CopyCount { files: left.files - 1, bytes: left.bytes - bytes };
        let (unsaved, unsealed) = stand.fold(
            (
                CopyCount { files: all.unsaved_files, bytes: all.unsaved_bytes },
                CopyCount { files: all.unsealed_files, bytes: all.unsealed_bytes },
            ),
            |(unsaved, unsealed), bytes| (less(unsaved, bytes), less(unsealed, bytes)),
        );
        (kept.fold(unsaved, less), unsealed)
    }

    fn run_status(self, run: &RunPath) -> RunStatus {
        let watermark = self.engine.books().watermark(run).map(checkpoint_ref);
        // Whole in this node's memory, or committed: what a restart of the job would load.
        let newest = self.engine.selection().newest_in_sight(run, |_| true);
        let damaged = BadCopies { engine: self.engine }.damaged_versions(run);
        let is_durable = |found: &checkpoint::Checkpoint| {
            found.is_committed() && !damaged.contains(&found.record().version)
        };
        let durable = match newest {
            Some(newest) if !is_durable(newest) => self.engine.selection().newest_in_sight(run, is_durable),
            newest => newest,
        };
        let (recoverable, durable) = (newest.map(checkpoint_ref), durable.map(checkpoint_ref));
        let lag = self.engine.backlog.lag(&self.engine.ledger, self.engine.shared.now_ns(), Some(run));
        RunStatus {
            run: run.to_string(),
            // A checkpoint that is not whole is never the latest (P1).
            latest: recoverable.clone(),
            watermark,
            recoverable,
            durable,
            lag_versions: lag.versions,
            lag_bytes: lag.bytes,
            lag_seconds: lag.seconds,
        }
    }
}

//! Versions as the retention rules see them.
//!
//! Owns: the facts that the rules are given, and their verdicts with reasons. Does not own: the rules (`protocol::retention`), carrying
//! out a verdict (`gc`).

use crate::node::Shared;
use crate::node::answer::checkpoint_ref;
use crate::node::book::{Book, BookLookup, Number, VersionBook};
use crate::node::decide::is_covered;
use crate::node::gc::{Gc, Verdict, listed};
use crate::node::ledger::{Ledger, contents};
use crate::node::metric::SaidLater;
use crate::node::recover::above;
use crate::node::visibility::Visibility;
use crate::node::visibility::tree_names::TreeNames;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_namespace::Leads;
use tidemark_protocol::id::FileId;
use tidemark_protocol::lineage;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::report::GcRow;
use tidemark_protocol::retention::{Committed, Keep, Metric, Standing, retain};

/// Versions as the retention rules see them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Retention<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a Ledger,
    pub(crate) gc: &'a Gc,
    pub(crate) visibility: &'a Visibility,
    pub(crate) said_later: &'a SaidLater,
}

impl<'a> Retention<'a> {
    /// Returns every committed version of a run, or of all, in order of run and lineage.
    pub(crate) fn verdicts(self, of: Option<&RunPath>) -> Vec<Verdict> {
        let mut runs: BTreeMap<&RunPath, Vec<(&Book, Number, &VersionBook)>> = BTreeMap::new();
        let books = self.ledger.books.values();
        for book in books.filter(|book| of.is_none_or(|run| *run == book.id.run)) {
            let committed = book.versions.iter().filter(|(_, version)| version.checkpoint.is_committed());
            let run = runs.entry(&book.id.run).or_default();
            run.extend(committed.map(|(number, version)| (book, *number, version)));
        }
        let mut verdicts = Vec::new();
        for (run, mut versions) in runs {
            versions.sort_by(|a, b| lineage::order(a.2.record()).cmp(&lineage::order(b.2.record())));
            let policy = self.shared.settings.retention.policy_of(run);
            let rows = versions.iter().map(|(book, number, version)| self.row_of(book, *number, version));
            let mut rows: Vec<Committed> = rows.collect();
            if policy.keep_best.is_some() {
                for (row, (book, number, version)) in rows.iter_mut().zip(&versions) {
                    row.metric = self.said_later.metric_of(book, *number, version);
                }
            }
            let now_ns = self.shared.now_ns();
            let keeps = retain(&policy, &rows, now_ns);
            for ((row, keep), (book, number, _)) in rows.into_iter().zip(keeps).zip(versions) {
                let shown = row.standing == Standing::Shown;
                verdicts.push(Verdict { id: book.id.clone(), number, shown, keep });
            }
        }
        verdicts
    }

    /// Returns how the tree leads to a version. If its manifest is not known, everything counts as needed.
    pub(crate) fn leads_to(self, version: &VersionBook) -> Leads {
        let all = Leads { names: true, copies: true, needs: true, alive: true };
        version.manifest().map_or(all, |manifest| self.shared.namespace.nodes().leads_to(&listed(manifest)))
    }

    /// Whether a file of a version is in the tree under another name, or open, while it has none of its own. If the manifest is not
    /// known, the answer is yes.
    pub(crate) fn lives_elsewhere(self, version: &VersionBook) -> bool {
        let Some(manifest) = version.manifest() else { return true };
        let namespace = &self.shared.namespace;
        let mut files = listed(manifest);
        let named = files.iter().filter(|file| namespace.nodes().node_at(file.path.as_bytes()).is_some());
        let named: BTreeSet<FileId> = named.map(|file| file.file).collect();
        files.retain(|file| !named.contains(&file.file));
        namespace.nodes().leads_to(&files).alive
    }

    /// Returns the facts about a version that retention needs.
    fn row_of(self, book: &Book, number: Number, version: &VersionBook) -> Committed {
        let record = version.record();
        let of = (book.id.clone(), number);
        let leads = self.leads_to(version);
        let superseded = book.committed().is_some_and(|(newest, _)| *newest > number);
        let standing = self.gc.standing(&of, leads.names, superseded);
        let held = leads.needs
            || self.gc.is_held(&of)
            || self.gc.is_unshown(&of.0, of.1)
            || self.visibility.is_out_of_sight(&of.0, of.1)
            || match standing {
                Standing::Shown => !self.is_all_there_is(book, number),
                // The names mean other bytes now, and a file under one of them has its copy there.
                Standing::Withdrawn { .. } | Standing::Replaced | Standing::Gone => leads.copies,
            };
        Committed {
            version: record.version.clone(),
            step: record.step,
            completed_at_ns: record.completed_at_ns,
            // At its upload, the store refused damaged parts, or every byte was read back. A version known to be lost since does
            // not count.
            verified: self.tree_names().why_lost(record).is_none(),
            pinned: self.gc.pins.contains(&of),
            held,
            standing,
            wished: self.gc.is_wished(&of),
            metric: Metric::Unsaid,
        }
    }

    /// Whether the tree holds nothing under the checkpoint's name but what this version lists: nothing newer is being
    /// written over it.
    fn is_all_there_is(self, book: &Book, number: Number) -> bool {
        let Some(candidate) = &book.candidate else { return false };
        let present = contents(self.ledger.files_of(candidate, &book.scope));
        let is_newest = above(book, Some(number)).is_empty();
        is_newest && present.is_some_and(|present| is_covered(&present, &book.versions[&number].contents))
    }

    /// Returns what retention says of every committed version, for people.
    pub(crate) fn gc_rows(self) -> Vec<GcRow> {
        let row = |verdict: Verdict| {
            let version = self.books().version(&verdict.id, verdict.number);
            let (given_up, reason) = match &verdict.keep {
                Keep::Kept { reason } => (false, reason.clone()),
                Keep::Retired(leave) => (true, leave.reason().to_owned()),
            };
            GcRow {
                run: verdict.id.run.to_string(),
                checkpoint: checkpoint_ref(&version.checkpoint),
                bytes: version.record().size_bytes(),
                given_up,
                reason,
            }
        };
        self.verdicts(None).into_iter().map(row).collect()
    }

    fn books(self) -> BookLookup<'a> {
        BookLookup { ledger: self.ledger }
    }

    fn tree_names(self) -> TreeNames<'a> {
        TreeNames { shared: self.shared, ledger: self.ledger }
    }
}

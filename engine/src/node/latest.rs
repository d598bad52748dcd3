//! Which checkpoint `latest` means: for `ckptctl`, and in the control directory of the mount.
//!
//! Owns: the choice among runs. Does not own: which of one run's a job would load (`answer`, `protocol::lineage`).

use crate::node::answer::Wanted;
use crate::node::book::Book;
use crate::node::run::{Engine, Node};
use std::collections::BTreeSet;
use tidemark_protocol::lineage;
use tidemark_protocol::recognise::CheckpointId;

impl Node {
    /// The path of what `latest` means, where a job would load something; `Some(None)` where nothing.
    pub async fn latest(&self) -> Option<Option<Vec<u8>>> {
        self.ask(|engine| engine.latest(None).map(Book::path)).await
    }
}

impl Engine {
    /// Of what the jobs of the runs would load now, what was whole last. Steps of two runs say nothing about which is newer. Costs a pass
    /// over the versions.
    pub(super) fn latest<'a>(&'a self, run: Option<&'a [u8]>) -> Option<&'a Book> {
        let runs: BTreeSet<_> = self.books_of(run).map(|book| &book.id.run).collect();
        let newest = runs.into_iter().filter_map(|run| self.newest_in_sight(run, |_| true));
        let newest = newest
            .map(|found| found.record())
            .max_by_key(|record| (record.completed_at_ns, lineage::order(record)))?;
        let (run, directory) = (newest.version.run.clone(), newest.version.directory.clone());
        self.ledger.books.get(&CheckpointId { run, directory })
    }

    /// The newest that is committed, whether the tree shows it or not.
    pub(super) fn latest_committed<'a>(&'a self, run: Option<&'a [u8]>) -> Option<&'a Book> {
        let committed = self.books_of(run).filter_map(|book| Some((book.committed()?.1.record(), book)));
        let (_, newest) = committed.clone().max_by_key(|(record, _)| lineage::order(record))?;
        let of_its_run = committed.filter(|(_, book)| book.id.run == newest.id.run);
        of_its_run.max_by_key(|(record, _)| lineage::order_to_resume(record)).map(|(_, book)| book)
    }

    /// As [`Engine::find`], for what is done to committed versions only.
    pub(crate) fn find_committed<'a>(&'a self, wanted: &'a Wanted) -> Option<&'a Book> {
        match wanted {
            Wanted::Latest { run } => self.latest_committed(run.as_deref()),
            Wanted::Path(_) | Wanted::Step { .. } => self.find(wanted),
        }
    }
}

//! Names that a checkpoint lost: which processes removed them, and whether that is decided.
//!
//! Owns: the facts about a removal. Does not own: undoing it (`removed`), the rule (`protocol::removal`).

use crate::node::Shared;
use crate::node::book::Book;
use crate::node::file_jobs::FileJobs;
use crate::node::ledger::Ledger;
use crate::node::visibility::removed::Undecided;
use crate::node::visibility::sessions::Sessions;
use crate::node::visibility::{DECIDED_WITHIN, Visibility};
use std::sync::Arc;
use tidemark_namespace::{FileState, FileView, WriterId, is_alive};
use tidemark_protocol::evidence::Verdict;
use tidemark_protocol::id::FileId;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::CheckpointId;
use tokio::time::Instant;

/// Lookups about names that a checkpoint lost: which processes removed them, and whether that is decided.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Removals<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a Ledger,
    pub(crate) visibility: &'a Visibility,
    pub(crate) file_jobs: &'a FileJobs,
}

impl<'a> Removals<'a> {
    /// Returns the processes that removed names of a checkpoint's newest save, for names that are still missing. While any removal is
    /// remembered, costs a pass over the save's files.
    pub(crate) fn removers_of(
        self,
        id: &CheckpointId,
        is_there: impl Fn(&RelPath, FileId) -> bool,
    ) -> Vec<Arc<WriterId>> {
        let mut found: Vec<Arc<WriterId>> = Vec::new();
        let heard = &self.visibility.removers;
        let newest = self.ledger.books.get(id).filter(|_| !heard.is_empty()).and_then(Book::newest_save);
        for (path, (file, _)) in newest.iter().flat_map(|(_, version)| &version.contents) {
            let Some(remover) = heard.get(file) else { continue };
            if !found.contains(remover) && !is_there(path, *file) {
                found.push(Arc::clone(remover));
            }
        }
        found
    }

    /// Returns what the decision about a checkpoint's lost names waits for; none if it lost none, or if that was decided. `is_there` says
    /// whether the tree has a name of a file; the books may learn that later.
    pub(crate) fn undecided_removal(
        self,
        id: &CheckpointId,
        now: Instant,
        is_there: impl Fn(&RelPath, FileId) -> bool,
    ) -> Option<Undecided> {
        let Some(noted) = self.visibility.noted.get(id) else {
            // The checkpoint is examined once its scope is grouped.
            return (!self.removers_of(id, is_there).is_empty()).then_some(Undecided::Now);
        };
        let lives = noted.removers.iter().any(|who| is_alive(&self.shared.namespace, who));
        let in_time = |since: Instant| now.saturating_duration_since(since) < DECIDED_WITHIN;
        Some(match noted.dead_since {
            _ if noted.comes_back => Undecided::ComesBack,
            _ if lives => Undecided::Lasts,
            Some(since) if !in_time(since) => Undecided::Lasts,
            Some(_) | None => Undecided::Now,
        })
    }

    /// Whether a process that removed a checkpoint had begun another that can no longer be completed, because this ending daemon refuses
    /// writers. False on several nodes, where processes on other nodes write on.
    pub(crate) fn saves_in_vain(self, id: &CheckpointId) -> bool {
        self.shared.namespace.gate().are_writers_refused()
            && self.shared.cluster.get().is_none()
            && self.visibility.noted[id]
                .removers
                .iter()
                .any(|who| self.sessions().has_unfinished(who, &id.run))
    }

    /// Whether the loop does not know yet if another checkpoint of the run is whole.
    pub(crate) fn is_another_in_hand(self, removed: &CheckpointId) -> bool {
        let ledger = &self.ledger;
        let another = |book: &&Book| book.id.run == removed.run && book.id != *removed;
        ledger.has_stale_scope_in(&removed.run)
            || ledger.books.values().filter(another).any(|book| {
                let Some(candidate) = &book.candidate else { return false };
                let concluded = match &book.verdict {
                    // Without a verdict, some version matches what is there.
                    None => !book.versions.is_empty(),
                    // It has no version yet: a version would count as whole in sight.
                    Some(Verdict::Complete { .. } | Verdict::ReadIndex { .. }) => false,
                    Some(_) => true,
                };
                let mut files = ledger.files_of(candidate, &book.scope);
                !concluded || files.any(|(_, view)| self.is_in_hand(view))
            })
    }

    /// Whether a file is closed, and its bytes are being hashed or read.
    fn is_in_hand(self, view: &FileView) -> bool {
        let waits = view.state == FileState::Closed && !self.ledger.unreadable.contains_key(&view.node);
        waits || self.file_jobs.is_judging(view.node)
    }

    fn sessions(self) -> Sessions<'a> {
        Sessions { shared: self.shared, ledger: self.ledger }
    }
}

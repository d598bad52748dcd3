//! Lookups of checkpoints by path.
//!
//! Owns: which checkpoints lie at, below or around a path. Does not own: which of them a person means (`select`).

use crate::node::Shared;
use crate::node::book::{Book, VersionBook};
use crate::node::flush::covers;
use crate::node::ledger::Ledger;
use crate::node::proof::Known;
use crate::node::recover::above;
use crate::node::select::is_inside;
use std::sync::Arc;
use tidemark_namespace::FileState;
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::path::RelPath;

/// Lookups of checkpoints by path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ByPath<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a Ledger,
}

impl<'a> ByPath<'a> {
    /// Returns the checkpoint at a path, or the innermost in which the path lies.
    pub(crate) fn find_at(self, path: &[u8]) -> Option<&'a Book> {
        let books = self.ledger.books.values().filter(|book| self.is_named_by(book, path));
        books.max_by_key(|book| book.path().len())
    }

    /// Whether `path` means this checkpoint: its own path, or a path inside it.
    fn is_named_by(self, book: &Book, path: &[u8]) -> bool {
        let top = book.path();
        let run = book.id.run.path().map_or(&b""[..], RelPath::as_bytes);
        if !covers(run, path) {
            return false;
        }
        top == path
            || covers(&top, path) && self.shared.namespace.nodes().node_at(path).is_some()
            || book.candidate.as_ref().is_some_and(|held| is_inside(&top, path, held.files.keys()))
            || above(book, None).iter().any(|(_, version)| is_inside(&top, path, version.contents.keys()))
    }

    /// Whether a question about `place` concerns this checkpoint: the checkpoint is at or below the place, or the place lies in it. A file
    /// of a checkpoint is safe only together with its checkpoint.
    pub(crate) fn is_about(self, place: &[u8], book: &Book) -> bool {
        covers(place, &book.path()) || self.is_named_by(book, place)
    }

    /// Returns the checkpoints that a question about `place` concerns. Costs a pass over the books.
    pub(crate) fn books_about(self, place: &'a [u8]) -> impl Iterator<Item = &'a Book> {
        self.ledger.books.values().filter(move |book| self.is_about(place, book))
    }

    pub(crate) fn is_in_tree(self, place: &[u8]) -> bool {
        place.is_empty()
            || self.shared.namespace.nodes().node_at(place).is_some()
            || self.ledger.books.values().any(|book| book.candidate.is_some() && book.path() == place)
    }

    pub(crate) fn is_known(self, place: &[u8]) -> bool {
        let stands = |book: &Book| !above(book, None).is_empty();
        self.is_in_tree(place) || self.books_about(place).any(stands)
    }

    pub(crate) fn committed_below(self, place: &[u8]) -> Vec<(Vec<u8>, Checkpoint, Option<Known>)> {
        let books = self.books_about(place);
        let known = |version: &VersionBook| {
            let (manifest, epoch) = version.committed.clone()?;
            Some(Known { manifest, epoch, previous: version.previous.clone() })
        };
        let committed = books.flat_map(|book| {
            let versions = book.versions.values().filter(|version| version.checkpoint.is_committed());
            versions.map(|version| (book.path(), version.checkpoint.clone(), known(version)))
        });
        committed.collect()
    }

    /// Returns when the last of a checkpoint's files was closed, in nanoseconds; `i64::MAX` while one is open.
    pub(crate) fn last_closed_ns(self, book: &Book) -> i64 {
        let files = book.candidate.iter().flat_map(|candidate| self.ledger.files_of(candidate, &book.scope));
        let closed_ns = files.map(|(_, view)| match view.state {
            FileState::Open { .. } | FileState::Mapped => i64::MAX,
            FileState::Closed | FileState::Cut | FileState::Sealed { .. } => view.published_ns,
        });
        closed_ns.max().unwrap_or(i64::MIN)
    }
}

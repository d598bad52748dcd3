//! Directories that Tier-3 is not told of yet, because nothing of their checkpoint is there.
//!
//! Owns: which those are. Does not own: when the tree is told (`tree`).

use crate::namespace::TreeSnapshot;
use crate::node::book::Book;
use std::collections::BTreeSet;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::Shape;

/// The directories of checkpoints of which Tier-3 has no version. After the loss of this node they would be there and empty, and
/// a job that takes the highest step it finds would fail on one. The manifest of a version brings its own.
pub(crate) struct Unsaved {
    tops: BTreeSet<RelPath>,
    /// Above files of anything else.
    used: BTreeSet<RelPath>,
}

impl Unsaved {
    pub(crate) fn of<'a>(books: impl Iterator<Item = &'a Book>, snapshot: &TreeSnapshot) -> Self {
        let prepared = |book: &Book| book.versions.values().any(|version| version.checkpoint.is_prepared());
        let unsaved: Vec<_> = books
            .filter(|book| !prepared(book))
            .filter_map(|book| book.candidate.as_ref())
            .filter(|candidate| candidate.shape == Shape::Tree)
            .collect();
        let tops: BTreeSet<_> = unsaved.iter().filter_map(|candidate| candidate.id.path()).collect();
        let mut used = BTreeSet::new();
        if !tops.is_empty() {
            let own: BTreeSet<_> = unsaved
                .iter()
                .flat_map(|candidate| candidate.files.keys().chain(&candidate.temporaries))
                .map(RelPath::as_bytes)
                .collect();
            let other = snapshot.files.iter().filter(|file| !own.contains(file.node.path.as_slice()));
            let other = other.filter_map(|file| RelPath::new(file.node.path.clone()).ok());
            let below = other.filter(|path| tops.iter().any(|top| path.is_below(top)));
            used.extend(below.flat_map(|path| std::iter::successors(path.parent(), RelPath::parent)));
        }
        Self { tops, used }
    }

    pub(crate) fn has(&self, directory: &RelPath) -> bool {
        let of_one = std::iter::successors(Some(directory.clone()), RelPath::parent)
            .any(|above| self.tops.contains(&above));
        of_one && !self.used.contains(directory)
    }
}

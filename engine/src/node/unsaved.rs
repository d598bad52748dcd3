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
    /// Directories of which it is not known yet what their files belong to.
    stale: BTreeSet<RelPath>,
}

impl Unsaved {
    /// `stale`: such directories whose files were not grouped since they changed.
    pub(crate) fn of<'a>(
        books: impl Iterator<Item = &'a Book>,
        stale: impl Iterator<Item = &'a RelPath>,
        snapshot: &TreeSnapshot,
    ) -> Self {
        let unsaved: Vec<_> = books
            .filter(|book| !book.is_prepared())
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
        Self { tops, used, stale: stale.cloned().collect() }
    }

    /// Whether a later look may find more of them, or fewer.
    pub(crate) fn is_stale(&self) -> bool {
        !self.stale.is_empty()
    }

    pub(crate) fn has(&self, directory: &RelPath) -> bool {
        let is_below = |tops: &BTreeSet<RelPath>| {
            let mut above = std::iter::successors(Some(directory.clone()), RelPath::parent);
            !tops.is_empty() && above.any(|above| tops.contains(&above))
        };
        is_below(&self.stale) || is_below(&self.tops) && !self.used.contains(directory)
    }
}

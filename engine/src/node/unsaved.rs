//! Directories that are not published to Tier-3 yet, because nothing of their checkpoint is there.
//!
//! Owns: which those are. Does not own: when the tree is published (`tree`), which of them were only begun (`visibility`).

use crate::node::book::{Book, LooseBook, LooseStage};
use std::collections::{BTreeMap, BTreeSet};
use tidemark_namespace::TreeSnapshot;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::Shape;

/// Directories of checkpoints of which Tier-3 has no version. After the loss of this node they would be there and empty, and a job
/// that takes the highest step it finds would fail on one. The manifest of a version brings its own.
///
/// If a name in such a directory is published, so is the directory: whoever brings the name back could only guess what the
/// directory was.
pub(crate) struct Unsaved {
    tops: BTreeSet<RelPath>,
    /// Directories with the name of a checkpoint in which nothing is yet that makes one.
    begun: BTreeSet<RelPath>,
    /// Directories above files of anything else.
    used: BTreeSet<RelPath>,
    /// Directories whose files are not grouped yet, so that it is open what they belong to.
    stale: BTreeSet<RelPath>,
}

impl Unsaved {
    /// Collects such directories. `stale`: those whose files were not grouped since they changed. `loose`: the files that belong to
    /// no checkpoint.
    pub(crate) fn of<'a>(
        books: impl Iterator<Item = &'a Book>,
        stale: impl Iterator<Item = &'a RelPath>,
        begun: BTreeSet<RelPath>,
        loose: &BTreeMap<RelPath, LooseBook>,
        snapshot: &TreeSnapshot,
    ) -> Self {
        let unsaved: Vec<_> = books
            .filter(|book| !book.is_prepared())
            .filter_map(|book| book.candidate.as_ref())
            .filter(|candidate| candidate.shape == Shape::Tree)
            .collect();
        let tops: BTreeSet<_> = unsaved.iter().filter_map(|candidate| candidate.id.path()).collect();
        let mut used = BTreeSet::new();
        if !tops.is_empty() || !begun.is_empty() {
            let own: BTreeSet<_> = unsaved
                .iter()
                .flat_map(|candidate| candidate.files.keys().chain(&candidate.temporaries))
                .map(RelPath::as_bytes)
                .collect();
            let path = |bytes: &[u8]| RelPath::new(bytes.to_vec()).ok();
            let is_begun = |path: &RelPath| path.parent().is_some_and(|above| begun.contains(&above));
            let is_below_top = |path: &RelPath| tops.iter().any(|top| path.is_below(top));
            let files = snapshot.files.iter().filter(|file| !own.contains(file.node.path.as_slice()));
            let files = files.filter_map(|file| path(&file.node.path)).filter(|path| is_below_top(path));
            // A further name of a file that Tier-3 has or gets under another one: nothing else carries it there.
            let links = snapshot.hard_links.iter().filter(|link| {
                let is_own = own.contains(link.path.as_slice()) || own.contains(link.to.as_slice());
                !is_own && path(&link.to).is_some_and(|to| !is_begun(&to))
            });
            let links = links.filter_map(|link| path(&link.path));
            let links = links.filter(|path| is_below_top(path) || is_begun(path));
            let is_there = |book: &LooseBook| matches!(book.stage, LooseStage::Uploaded { .. });
            let uploaded = loose.iter().filter(|(path, book)| is_begun(path) && is_there(book));
            let uploaded = uploaded.map(|(path, _)| path.clone());
            let names = files.chain(links).chain(uploaded);
            used.extend(names.flat_map(|path| std::iter::successors(path.parent(), RelPath::parent)));
        }
        Self { tops, begun, used, stale: stale.cloned().collect() }
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
        let is_unsaved = is_below(&self.tops) || self.begun.contains(directory);
        !self.used.contains(directory) && (is_below(&self.stale) || is_unsaved)
    }
}

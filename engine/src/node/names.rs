//! Changes of names that the loop itself makes.
//!
//! Owns: that the nodes that serve such names on their own examine them again. Does not own: why names go and come (`gc`,
//! `keeping`, `visibility`), the names (`namespace`), which node serves which name (the coordinator).

use crate::node::Shared;
use std::collections::BTreeSet;
use tidemark_namespace::{FsError, Listed};
use tidemark_protocol::path::RelPath;

impl Shared {
    /// Works as [`HiddenNames::withdraw`](tidemark_namespace::HiddenNames::withdraw).
    pub(crate) fn withdraw(&self, files: &[Listed<'_>], directories: &[RelPath]) -> Result<usize, FsError> {
        let gone = self.namespace.hidden().withdraw(files, directories);
        // Also where it failed: some names are gone then.
        self.changed_names(files.iter().map(|file| file.path).chain(directories));
        gone
    }

    /// Works as [`HiddenNames::hide`](tidemark_namespace::HiddenNames::hide).
    pub(crate) fn hide(&self, path: &RelPath) -> Result<(), FsError> {
        self.namespace.hidden().hide(path)?;
        self.changed_names([path]);
        Ok(())
    }

    /// Works as [`HiddenNames::show_again`](tidemark_namespace::HiddenNames::show_again).
    pub(crate) fn show_again(&self, path: &RelPath) -> Result<(), FsError> {
        self.namespace.hidden().show_again(path)?;
        self.changed_names([path]);
        Ok(())
    }

    /// Works as [`HiddenNames::replace`](tidemark_namespace::HiddenNames::replace).
    pub(crate) fn replace(&self, path: &RelPath, bytes: &[u8]) -> Result<(), FsError> {
        self.namespace.hidden().replace(path, bytes)?;
        self.changed_names([path]);
        Ok(())
    }

    /// Does what brings these names into the tree. With them come the directories above that were not there.
    pub(crate) fn bring_back<'a>(&self, names: impl IntoIterator<Item = &'a RelPath>, bring: impl FnOnce()) {
        let mut missing = BTreeSet::new();
        for name in names {
            let above = std::iter::successors(Some(name.clone()), RelPath::parent);
            missing
                .extend(above.take_while(|path| self.namespace.nodes().node_at(path.as_bytes()).is_none()));
        }
        bring();
        self.changed_names(&missing);
    }

    fn changed_names<'a>(&self, paths: impl IntoIterator<Item = &'a RelPath>) {
        if let Some(cluster) = self.cluster.get() {
            let paths: Vec<_> = paths.into_iter().map(RelPath::as_bytes).collect();
            cluster.changed_here(&paths);
        }
    }
}

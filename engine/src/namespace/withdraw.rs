//! Names that are taken out of the tree by the daemon itself, and what still leads to an object of Tier-3.
//!
//! Owns: both. Does not own: which versions are given up (`node::gc`).

use super::view::NODES_AT_ONCE;
use super::{FsError, Namespace, NodeId, State};
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::path::RelPath;

/// Is told the directory and the name.
pub type Withdrawn = Box<dyn Fn(NodeId, &[u8]) + Send + Sync>;

/// What in the tree leads to objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Use {
    /// Nothing: no file has one of them as its copy.
    #[default]
    None,
    /// A name.
    Named,
    /// An open handle, with a name or without.
    Open,
}

/// A file as a version lists it.
#[derive(Debug, Clone, Copy)]
pub struct Listed<'a> {
    pub path: &'a RelPath,
    pub file: FileId,
    pub seal: SealNumber,
    /// The key of its bytes in Tier-3.
    pub key: &'a str,
}

impl Namespace {
    /// The strongest way in which the tree leads to one of these files' objects.
    #[must_use]
    pub fn use_of(&self, files: &[Listed<'_>]) -> Use {
        let of = |state: &State, listed: &Listed<'_>| {
            let Some(node) = state.node_of(listed.file, self.incarnation) else { return Use::None };
            let Ok(found) = state.tree.node(node) else { return Use::None };
            let Ok(file) = found.file() else { return Use::None };
            let is_its_copy = file.object.as_ref().is_some_and(|noted| noted.1.key == listed.key);
            match (is_its_copy, file.opens, found.link_count()) {
                (false, ..) | (true, 0, 0) => Use::None,
                (true, 0, _) => Use::Named,
                (true, ..) => Use::Open,
            }
        };
        let chunk = |files: &[Listed<'_>]| {
            self.look(|state| files.iter().map(|listed| of(state, listed)).max().unwrap_or_default())
        };
        files.chunks(NODES_AT_ONCE).map(chunk).max().unwrap_or_default()
    }

    /// Takes the names of these files out of the tree, where they still are those very bytes, and then those of the
    /// directories that are empty without them. Programs that have one open keep it.
    ///
    /// # Errors
    /// [`FsError::Io`] when the journal cannot be written; some names are gone then.
    pub fn withdraw(&self, files: &[Listed<'_>], directories: &[RelPath]) -> Result<(), FsError> {
        let now_ns = self.clock.now_ns();
        let mut gone = Vec::new();
        for files in files.chunks(NODES_AT_ONCE) {
            self.change(|state| {
                gone.extend(files.iter().filter_map(|listed| state.withdraw(listed, now_ns)));
                Ok(())
            })?;
        }
        // The deepest first.
        let mut directories: Vec<_> = directories.iter().collect();
        directories.sort_by_key(|path| std::cmp::Reverse(path.as_bytes().len()));
        self.change(|state| {
            for path in directories {
                let Some(parent) = state.parent_of(path) else { continue };
                // One that is not empty, or no directory any more, is somebody's.
                if let Ok(node) = state.tree.rmdir(parent, path.name(), now_ns) {
                    state.mark(node);
                    state.release_unreachable(node);
                    gone.push((parent, path.name()));
                }
            }
            Ok(())
        })?;
        if let Some(told) = self.withdrawn.get() {
            gone.into_iter().for_each(|(parent, name)| told(parent, name));
        }
        Ok(())
    }

    /// Sets who is told of each name that the daemon takes away, with the directory that it was in: the kernel remembers
    /// names for a while. Once, before anything is withdrawn.
    pub fn tell_withdrawn(&self, told: Withdrawn) {
        assert!(self.withdrawn.set(told).is_ok(), "one mount is told");
    }
}

impl State {
    /// The name that is gone, and the directory that it was in.
    fn withdraw<'a>(&mut self, listed: &Listed<'a>, now_ns: i64) -> Option<(NodeId, &'a [u8])> {
        let (parent, name) = (self.parent_of(listed.path)?, listed.path.name());
        let node = self.tree.child(parent, name).ok()?;
        let is_it = self.tree.node(node).and_then(|node| node.file()).is_ok_and(|file| {
            file.id == listed.file && file.fate.seal().is_some_and(|seal| seal.number == listed.seal)
        });
        if !is_it || self.tree.unlink(parent, name, now_ns).is_err() {
            return None;
        }
        self.mark(node);
        self.release_unreachable(node);
        Some((parent, name))
    }

    fn parent_of(&self, path: &RelPath) -> Option<NodeId> {
        path.parent().map_or(Some(super::ROOT), |above| self.tree.resolve(above.as_bytes()).ok())
    }
}

//! Names that the daemon itself removes from the tree, and the ways in which the tree still leads to an object of Tier-3.
//!
//! Owns: both. Does not own: which versions are retired (`node::gc`).

use super::hidden::HiddenNames;
use super::tree::Tree;
use super::view::{NODES_AT_ONCE, NodeViews};
use super::{FsError, NodeId, State};
use std::collections::HashSet;
use tidemark_protocol::id::{FileId, Incarnation, SealNumber};
use tidemark_protocol::path::RelPath;

/// Callback for a removed name: receives its directory, the name, and the node if the node lost its last name.
pub type Withdrawn = Box<dyn Fn(NodeId, &[u8], Option<NodeId>) + Send + Sync>;

/// How the tree leads to a version that lists files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Leads {
    /// A listed path names the very bytes that are listed.
    pub names: bool,
    /// A file has its copy among the version's objects, and a listed path.
    pub copies: bool,
    /// A file has its copy among them, and a name that is not listed, or a program has it open.
    pub needs: bool,
    /// A listed file is in the tree or open, whatever its bytes and its name.
    pub alive: bool,
}

impl Leads {
    fn and(self, other: Self) -> Self {
        Self {
            names: self.names | other.names,
            copies: self.copies | other.copies,
            needs: self.needs | other.needs,
            alive: self.alive | other.alive,
        }
    }
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

impl NodeViews<'_> {
    /// Returns how the tree leads to the version that lists these files, under all their names.
    #[must_use]
    pub fn leads_to(&self, files: &[Listed<'_>]) -> Leads {
        let listed: HashSet<&[u8]> = files.iter().map(|file| file.path.as_bytes()).collect();
        let own = self.state.incarnation;
        let chunk = |files: &[Listed<'_>]| {
            self.state.look(|state| {
                files.iter().fold(Leads::default(), |sum, file| sum.and(state.leads(file, &listed, own)))
            })
        };
        files.chunks(NODES_AT_ONCE).map(chunk).fold(Leads::default(), Leads::and)
    }
}

impl HiddenNames<'_> {
    /// Removes the names of these files that still are those very bytes, and then the directories that this empties. Returns how many
    /// names of files went. Programs that have such a file open keep it.
    ///
    /// # Errors
    /// [`FsError::Io`] when the journal cannot be written; some names are gone then.
    pub fn withdraw(&self, files: &[Listed<'_>], directories: &[RelPath]) -> Result<usize, FsError> {
        let now_ns = self.state.now_ns();
        let mut gone = Vec::new();
        for files in files.chunks(NODES_AT_ONCE) {
            self.state.change(|state| {
                gone.extend(files.iter().filter_map(|listed| state.withdraw(listed, now_ns)));
                Ok(())
            })?;
        }
        let count = gone.len();
        // The deepest first.
        let mut directories: Vec<_> = directories.iter().collect();
        directories.sort_by_key(|path| std::cmp::Reverse(path.as_bytes().len()));
        self.state.change(|state| {
            for path in directories {
                let Some(parent) = parent_of(&state.tree, path) else { continue };
                // A directory that is not empty, or was replaced, is in use.
                if let Ok(node) = state.tree.rmdir(parent, path.name(), now_ns) {
                    state.tree.mark(node);
                    state.forsake(node);
                    gone.push((parent, path.name()));
                }
            }
            Ok(())
        })?;
        if let Some(told) = self.state.withdrawn.get() {
            gone.into_iter().for_each(|(parent, name)| told(parent, name, None));
        }
        Ok(count)
    }

    /// Sets the callback for each name that the daemon, or another node, removes. The callback gets the name's directory, and the node if
    /// the node lost its last name: the kernel remembers names for a while, and a node without any until it is short of memory. Call this
    /// once, before anything is withdrawn.
    pub fn tell_withdrawn(&self, told: Withdrawn) {
        assert!(self.state.withdrawn.set(told).is_ok(), "one mount is told");
    }
}

impl State {
    fn leads(&self, listed: &Listed<'_>, paths: &HashSet<&[u8]>, own: Incarnation) -> Leads {
        let named = parent_of(&self.tree, listed.path)
            .and_then(|parent| self.tree.child(parent, listed.path.name()).ok());
        let mut leads = Leads {
            names: named.is_some_and(|node| self.tree.holds(node, listed.file, listed.seal)),
            ..Leads::default()
        };
        let Some(node) = self.node_of(listed.file, own) else { return leads };
        let Ok(found) = self.tree.node(node) else { return leads };
        let Ok(file) = found.file() else { return leads };
        leads.alive = self.tree.is_reachable(node);
        if file.object.as_ref().is_some_and(|noted| noted.1.key == listed.key) {
            leads.needs = file.opens > 0;
            for path in found.links().filter_map(|link| self.tree.path(link)) {
                if paths.contains(path.as_slice()) {
                    leads.copies = true;
                } else {
                    leads.needs = true;
                }
            }
        }
        leads
    }

    /// Removes the name of a listed file; returns its directory and the name. None if the name does not hold the listed bytes.
    fn withdraw<'a>(&mut self, listed: &Listed<'a>, now_ns: i64) -> Option<(NodeId, &'a [u8])> {
        let (parent, name) = (parent_of(&self.tree, listed.path)?, listed.path.name());
        let node = self.tree.child(parent, name).ok()?;
        if !self.tree.holds(node, listed.file, listed.seal) || self.tree.unlink(parent, name, now_ns).is_err()
        {
            return None;
        }
        self.tree.mark(node);
        self.forsake(node);
        Some((parent, name))
    }
}
fn parent_of(tree: &Tree, path: &RelPath) -> Option<NodeId> {
    path.parent().map_or(Some(super::ROOT), |above| tree.resolve(above.as_bytes()).ok())
}

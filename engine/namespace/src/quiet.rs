//! Names that no program makes: published by other nodes, read from Tier-3, or hidden.
//!
//! Owns: making them, with the directories above them, so that directories keep their times. Does not own: the tree, the choice of names.
//!
//! Jobs rotate by the times of directories, and a directory's own mtime is published or read with it.

use super::cold::AdoptEntry;
use super::hidden::is_hidden;
use super::node::{Body, Node};
use super::tree::Tree;
use super::{FsError, NodeId, ROOT};

/// Modes of a directory of which nothing is known, and of one where that mode could admit users who were kept out.
const DIRECTORY_MODE: u32 = 0o755;
const OWNERS_DIRECTORY_MODE: u32 = 0o700;

/// A tree whose directories keep their times while names change.
#[derive(Debug)]
pub(super) struct QuietNames<'a> {
    tree: &'a mut Tree,
}

impl Tree {
    /// Returns the tree for changes of names that leave the directories' times.
    #[inline]
    pub(super) fn quietly(&mut self) -> QuietNames<'_> {
        QuietNames { tree: self }
    }
}

impl QuietNames<'_> {
    /// Returns the directory of `parts`, made if it is missing, with the attributes of the entry below it.
    pub(super) fn make_parents(&mut self, parts: &[&[u8]], entry: &AdoptEntry) -> Result<NodeId, FsError> {
        self.make_parents_with(parts, entry, DIRECTORY_MODE)
    }

    /// Does the same above another name of a node. If the document does not describe the directories of such a name, their former
    /// permissions are unknown. Such directories then belong to the named node's owner alone: access can be granted later, but an
    /// intrusion cannot be undone.
    pub(super) fn make_parents_of_link(
        &mut self,
        node: NodeId,
        parts: &[&[u8]],
        entry: &AdoptEntry,
    ) -> Result<NodeId, FsError> {
        let named = self.tree.node(node)?;
        let (uid, gid, mtime_ns) = (named.uid, named.gid, named.mtime_ns);
        let above = AdoptEntry { uid, gid, mtime_ns, ..entry.clone() };
        self.make_parents_with(parts, &above, OWNERS_DIRECTORY_MODE)
    }

    pub(super) fn make_parents_with(
        &mut self,
        parts: &[&[u8]],
        entry: &AdoptEntry,
        mode: u32,
    ) -> Result<NodeId, FsError> {
        let mut at = ROOT;
        for part in parts {
            at = match self.tree.child(at, part) {
                Ok(found) => found,
                Err(FsError::NotFound) => {
                    let made = self.adopt_node(at, part, entry, Body::Directory(Box::default()))?;
                    self.tree.node_mut(made)?.mode = mode;
                    made
                }
                Err(error) => return Err(error),
            };
        }
        self.tree.node(at)?.directory()?;
        Ok(at)
    }

    /// Gives a node that is not a directory another name; its ctime stays.
    pub(super) fn adopt_link(
        &mut self,
        node: NodeId,
        parent: NodeId,
        name: &[u8],
    ) -> Result<NodeId, FsError> {
        let ctime_ns = self.tree.node(node)?.ctime_ns;
        self.keeping_times(parent, |tree| tree.link(node, parent, name, ctime_ns))?;
        self.tree.mark(node);
        Ok(node)
    }

    /// Gives a file the name that other nodes know it by. Where it had lost its last name here, and lives on because a program has it open,
    /// it has one again.
    pub(super) fn name_again(
        &mut self,
        node: NodeId,
        parent: NodeId,
        name: &[u8],
        now_ns: i64,
    ) -> Result<(), FsError> {
        if self.tree.node(node)?.link_count() > 0 {
            return self.keeping_times(parent, |tree| tree.link(node, parent, name, now_ns));
        }
        self.tree.check_free(parent, name)?;
        let file = self.tree.node_mut(node)?;
        file.file()?;
        (file.forsaken, file.ctime_ns) = (false, now_ns);
        self.keeping_times(parent, |tree| {
            tree.attach(parent, name, node, now_ns);
            Ok(())
        })
    }

    /// Makes a node under a name that is free, with the entry's attributes except its mode.
    pub(super) fn adopt_node(
        &mut self,
        parent: NodeId,
        name: &[u8],
        entry: &AdoptEntry,
        body: Body,
    ) -> Result<NodeId, FsError> {
        self.tree.check_free(parent, name)?;
        let id = self.tree.number();
        self.tree.insert(id, Node::new(id, DIRECTORY_MODE, entry.uid, entry.gid, entry.mtime_ns, body));
        self.keeping_times(parent, |tree| {
            tree.attach(parent, name, id, entry.mtime_ns);
            Ok(())
        })?;
        Ok(id)
    }

    /// Runs `f`, which changes names in `directory`. If `f` fails, the times stay as they are then.
    pub(super) fn keeping_times(
        &mut self,
        directory: NodeId,
        f: impl FnOnce(&mut Tree) -> Result<(), FsError>,
    ) -> Result<(), FsError> {
        let times = self.times(directory)?;
        f(self.tree)?;
        self.put_back(directory, times)
    }

    /// Returns the times of a directory (mtime, ctime), for a change that needs more than the tree; see [`QuietNames::put_back`].
    pub(super) fn times(&self, directory: NodeId) -> Result<(i64, i64), FsError> {
        let node = self.tree.node(directory)?;
        Ok((node.mtime_ns, node.ctime_ns))
    }

    /// Gives a directory the times that it had before that change.
    pub(super) fn put_back(&mut self, directory: NodeId, times: (i64, i64)) -> Result<(), FsError> {
        let node = self.tree.node_mut(directory)?;
        (node.mtime_ns, node.ctime_ns) = times;
        Ok(())
    }

    /// Makes a hidden directory and those above it; returns the last.
    pub(super) fn make_hidden(&mut self, path: &[u8], now_ns: i64) -> Result<NodeId, FsError> {
        let mut at = ROOT;
        for name in path.split(|byte| *byte == b'/') {
            at = match self.tree.child(at, name) {
                Ok(found) => found,
                Err(FsError::NotFound) => {
                    let id = self.tree.number();
                    let body = Body::Directory(Box::default());
                    self.tree.insert(id, Node::new(id, 0o755, 0, 0, now_ns, body));
                    self.keeping_times(at, |tree| {
                        tree.attach(at, name, id, now_ns);
                        Ok(())
                    })?;
                    id
                }
                Err(error) => return Err(error),
            };
        }
        Ok(at)
    }

    /// Moves a name to a free one. If the new name is hidden, also makes its directories.
    pub(super) fn move_name(&mut self, from: &[u8], to: &[u8], now_ns: i64) -> Result<(), FsError> {
        let (from_parent, from_name) = self.tree.split(from)?;
        self.tree.entry(from_parent, from_name)?;
        if let (true, Some(at)) = (is_hidden(to), to.iter().rposition(|byte| *byte == b'/')) {
            self.make_hidden(&to[..at], now_ns)?;
        }
        let to = self.tree.split(to)?;
        self.keeping_times(from_parent, |tree| {
            tree.quietly().keeping_times(to.0, |tree| {
                // Not marked as a rename by the job, which would vouch for the bytes.
                let (moved, _) = tree.rename((from_parent, from_name), to, true, now_ns)?;
                tree.touched.node(moved);
                tree.mark(moved);
                Ok(())
            })
        })
    }
}

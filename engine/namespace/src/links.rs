//! The other names of a file, as the coordinator tells of them with one.
//!
//! Owns: which names a state tells of, and bringing this node's to them. Does not own: the name that was asked about (`mirror`).
//!
//! A node learns of names by asking about them. Of a file it has to know all: whoever takes the last name that it knows away gives the
//! bytes up.

use super::hidden::path_in;
use super::mirroring::{Mirroring, entry, parts};
use super::tree::Tree;
use super::{AdoptKind, FsError, NodeId, is_hidden};
use std::collections::BTreeSet;
use tidemark_protocol::cluster::wire::{NodeKind, NodeState};

/// Names told with one of them: more than programs give a file. A file with more is told of by the name that was asked about alone.
const OTHER_NAMES_MAX: usize = 1024;

/// The paths in sight of a file besides one; none where they are too many to be told.
pub(super) fn other_names(tree: &Tree, node: NodeId, path: &[u8]) -> Option<Vec<Vec<u8>>> {
    let found = tree.node(node).ok()?;
    if found.is_directory() || found.link_count() == 1 {
        return Some(Vec::new());
    }
    let paths = found.links().filter_map(|link| tree.path(link));
    let others: Vec<_> = paths.filter(|other| other != path && !is_hidden(other)).collect();
    (others.len() <= OTHER_NAMES_MAX).then_some(others)
}

impl Mirroring<'_> {
    /// Gives a file, which was found under one name, the others that the coordinator tells of, and takes away what it does not.
    /// Names that changed here after it was asked stay.
    pub(super) fn settle_other_names(
        &mut self,
        (parent, name): (NodeId, &[u8]),
        found: &NodeState,
        asked_at: u64,
        now_ns: i64,
    ) -> Result<(), FsError> {
        let Some(others) = &found.other_names else { return Ok(()) };
        let node = self.state.tree.child(parent, name)?;
        self.leave_aside(node, now_ns)?;
        if others.is_empty() && self.state.tree.node(node)?.link_count() == 1 {
            return Ok(());
        }
        let mut names = BTreeSet::from([(parent, name.to_vec())]);
        for path in others.iter().take(OTHER_NAMES_MAX) {
            let (parent, name) = self.make_directories_of(path, found)?;
            if !self.state.outgoing.is_newer(parent, name, asked_at) {
                self.give_name(node, (parent, name), now_ns)?;
            }
            names.insert((parent, name.to_vec()));
        }
        for (parent, name) in self.state.tree.names_of(node) {
            let is_hidden = path_in(&self.state.tree, parent, &name).is_none();
            if names.contains(&(parent, name.clone()))
                || is_hidden
                || self.state.outgoing.is_newer(parent, &name, asked_at)
            {
                continue;
            }
            self.state
                .tree
                .quietly()
                .keeping_times(parent, |tree| tree.unlink(parent, &name, now_ns).map(drop))?;
            self.loses_name(parent, &name, node);
        }
        Ok(())
    }

    /// Whether nodes have told of a file since this tree is the catalog, and so of its names; of one that only Tier-3 knows none has.
    pub(super) fn was_told(&self, told: &NodeState) -> bool {
        match &told.kind {
            NodeKind::File(facts) => self
                .state
                .node_of(facts.file, self.own)
                .filter(|node| self.state.tree.is_reachable(*node))
                .and_then(|node| self.state.tree.node(node).ok()?.file().ok())
                .is_some_and(|file| file.remote.is_some() || file.id.incarnation == self.own),
            NodeKind::Directory | NodeKind::Symlink { .. } => self.state.tree.resolve(&told.path).is_ok(),
        }
    }

    /// Gives what was not told before all names that are told of it, where nothing else has them. Takes none away: others may have given it more.
    pub(super) fn make_names(&mut self, node: NodeId, told: &NodeState) -> Result<(), FsError> {
        if self.state.tree.node(node)?.is_directory() {
            return Ok(());
        }
        let others = told.other_names.iter().flatten().take(OTHER_NAMES_MAX);
        for path in std::iter::once(&told.path).chain(others) {
            let (parent, name) = self.make_directories_of(path, told)?;
            if self.state.tree.child(parent, name).is_err() {
                self.give_name(node, (parent, name), told.attributes.mtime_ns)?;
            }
        }
        Ok(())
    }

    /// The directory of a path of what is told, made where it is missing, and the name in it.
    pub(super) fn make_directories_of<'a>(
        &mut self,
        path: &'a [u8],
        told: &NodeState,
    ) -> Result<(NodeId, &'a [u8]), FsError> {
        let (parents, name) = parts(path)?;
        let entry = entry(path, &told.attributes, AdoptKind::Directory);
        Ok((self.state.tree.quietly().make_parents(&parents, &entry)?, name))
    }

    /// Gives a node this name, whatever has it.
    pub(super) fn give_name(
        &mut self,
        node: NodeId,
        (parent, name): (NodeId, &[u8]),
        now_ns: i64,
    ) -> Result<(), FsError> {
        match self.state.tree.child(parent, name) {
            Ok(there) if there == node => return Ok(()),
            Ok(_) => self.drop_name(parent, name, now_ns)?,
            Err(_) => {}
        }
        self.state
            .tree
            .quietly()
            .keeping_times(parent, |tree| tree.link(node, parent, name, now_ns).map(drop))?;
        self.state.tree.mark(node);
        Ok(())
    }
}

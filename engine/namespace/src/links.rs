//! The other names of a file, which the coordinator publishes with one name.
//!
//! Owns: which names a state lists, and giving this node's file the same names. Does not own: the name that was asked about (`mirror`).
//!
//! A node learns of names by asking about them. For a file it has to know all: a program that removes the last known name frees the bytes.

use super::hidden::path_in;
use super::mirroring::{Mirroring, entry, parts};
use super::outgoing::Question;
use super::tree::Tree;
use super::{AdoptKind, FsError, NodeId, is_hidden};
use std::collections::BTreeSet;
use tidemark_protocol::cluster::wire::{NodeKind, NodeState};

/// Most other names published with one name: more than programs give a file. If a file has more, only the name that was asked about is
/// published.
const OTHER_NAMES_MAX: usize = 1024;

/// Returns a file's visible paths besides one; none if they are too many to publish.
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
    /// Gives a file, which was found under one name, the other names that the coordinator lists, and removes all further ones. Names that
    /// changed here after the question stay.
    pub(super) fn settle_other_names(
        &mut self,
        (parent, name): (NodeId, &[u8]),
        found: &NodeState,
        asked: Question,
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
            if !self.state.outgoing.is_passed_over(parent, name, asked) {
                self.give_name(node, (parent, name), now_ns)?;
            }
            names.insert((parent, name.to_vec()));
        }
        for (parent, name) in self.state.tree.names_of(node) {
            let is_hidden = path_in(&self.state.tree, parent, &name).is_none();
            if names.contains(&(parent, name.clone()))
                || is_hidden
                || self.state.outgoing.is_passed_over(parent, &name, asked)
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

    /// Whether nodes have published a file, and so its names, since this tree is the catalog. No node has if only Tier-3 knows the file.
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

    /// Gives a newly published node all names that its state lists, if they are free. Removes none: other nodes may have given it more.
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

    /// Returns the directory and the last name of a listed path. Missing directories are made.
    pub(super) fn make_directories_of<'a>(
        &mut self,
        path: &'a [u8],
        told: &NodeState,
    ) -> Result<(NodeId, &'a [u8]), FsError> {
        let (parents, name) = parts(path)?;
        let entry = entry(path, &told.attributes, AdoptKind::Directory);
        Ok((self.state.tree.quietly().make_parents(&parents, &entry)?, name))
    }

    /// Gives a node this name, whatever node has it.
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
        self.state.tree.quietly().name_again(node, parent, name, now_ns)?;
        self.state.tree.mark(node);
        Ok(())
    }
}

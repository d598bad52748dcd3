//! The other names of a file, as the coordinator tells of them with one.
//!
//! Owns: which names a state tells of, and bringing this node's to them. Does not own: the name that was asked about (`mirror`).
//!
//! A node learns of names by asking about them. Of a file it has to know all: whoever takes the last name that it knows away gives the
//! bytes up.

use super::{FsError, NodeId, State, is_hidden};
use std::collections::BTreeSet;
use tidemark_protocol::cluster::wire::NodeState;

/// Names told with one of them: more than programs give a file. A file with more is told of by the name that was asked about alone.
const OTHER_NAMES_MAX: usize = 1024;

impl State {
    /// The paths in sight of a file besides one; none where they are too many to be told.
    pub(super) fn other_names(&self, node: NodeId, path: &[u8]) -> Option<Vec<Vec<u8>>> {
        let found = self.tree.node(node).ok()?;
        if found.is_directory() || found.link_count() == 1 {
            return Some(Vec::new());
        }
        let paths = found.links().filter_map(|link| self.tree.path(link));
        let others: Vec<_> = paths.filter(|other| other != path && !is_hidden(other)).collect();
        (others.len() <= OTHER_NAMES_MAX).then_some(others)
    }

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
        let node = self.tree.child(parent, name)?;
        self.leave_aside(node, now_ns)?;
        if others.is_empty() && self.tree.node(node)?.link_count() == 1 {
            return Ok(());
        }
        let mut names = BTreeSet::from([(parent, name.to_vec())]);
        for path in others.iter().take(OTHER_NAMES_MAX) {
            let other = NodeState { path: path.clone(), ..found.clone() };
            let (parent, name) = self.make_directories_of(&other)?;
            if !self.is_newer(parent, &name, asked_at) && self.tree.child(parent, &name) != Ok(node) {
                if self.tree.child(parent, &name).is_ok() {
                    self.drop_name(parent, &name, now_ns)?;
                }
                self.keeping_times(parent, |state| state.tree.link(node, parent, &name, now_ns).map(drop))?;
                self.mark(node);
            }
            names.insert((parent, name));
        }
        for (parent, name) in self.names_of(node) {
            let is_hidden = self.path_in(parent, &name).is_none();
            if names.contains(&(parent, name.clone())) || is_hidden || self.is_newer(parent, &name, asked_at)
            {
                continue;
            }
            self.keeping_times(parent, |state| state.tree.unlink(parent, &name, now_ns).map(drop))?;
            self.loses_name(parent, &name, node);
        }
        Ok(())
    }
}

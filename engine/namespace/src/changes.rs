//! Nodes that changed, for each reader of changes.
//!
//! Owns: the set of each reader. Does not own: noting changes for the journal ([`Touched`]), what other nodes must be notified of
//! (`outgoing`).
//!
//! Each set is level-triggered: a node is in it until its reader has taken it, however often it changed.

use super::NodeId;
use super::tree::Touched;
use std::collections::BTreeSet;

/// The changed nodes by reader. Each set has at most one entry a node, plus the nodes removed since its reader last
/// asked.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// For the node loop: files, and directories renamed or removed.
    dirty: BTreeSet<NodeId>,
    /// For the task that keeps this tree elsewhere; none while no task does.
    unkept: Option<BTreeSet<NodeId>>,
    /// Nodes changed since a snapshot of the tree was begun; none while no snapshot is taken.
    since_snapshot: Option<BTreeSet<NodeId>>,
}

impl Changes {
    #[inline]
    pub(super) fn mark(&mut self, node: NodeId) {
        self.dirty.insert(node);
    }

    #[inline]
    pub(super) fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    pub(super) fn take_dirty(&mut self) -> Vec<NodeId> {
        std::mem::take(&mut self.dirty).into_iter().collect()
    }

    /// Collects what a change touched, for the readers of the whole tree.
    #[inline]
    pub(super) fn collect(&mut self, touched: &Touched) {
        let nodes = touched.nodes.iter().chain(&touched.freed);
        if let Some(unkept) = &mut self.unkept {
            unkept.extend(nodes.clone());
        }
        if let Some(changed) = &mut self.since_snapshot {
            changed.extend(nodes.chain(touched.xattrs.iter().map(|(id, _)| id)));
        }
    }

    /// Collects changes from now on for the task that keeps the tree elsewhere. `all`: the nodes that exist already.
    pub(super) fn keep(&mut self, all: BTreeSet<NodeId>) {
        self.unkept = Some(all);
    }

    /// Stops collecting: the tree is not kept elsewhere any more.
    pub(super) fn keep_no_more(&mut self) {
        self.unkept = None;
    }

    #[inline]
    pub(super) fn has_unkept(&self) -> bool {
        self.unkept.as_ref().is_some_and(|unkept| !unkept.is_empty())
    }

    pub(super) fn pop_unkept(&mut self) -> Option<NodeId> {
        self.unkept.as_mut()?.pop_first()
    }

    pub(super) fn begin_snapshot(&mut self) {
        self.since_snapshot = Some(BTreeSet::new());
    }

    /// Takes up to `most` nodes that changed since a snapshot was begun, and returns whether others are left. Taking the last of them ends
    /// the collecting.
    pub(super) fn take_since_snapshot(&mut self, most: usize) -> (BTreeSet<NodeId>, bool) {
        let Some(mut changed) = self.since_snapshot.take() else { return (BTreeSet::new(), false) };
        self.since_snapshot =
            changed.iter().nth(most).copied().map(|first_left| changed.split_off(&first_left));
        let are_left = self.since_snapshot.is_some();
        (changed, are_left)
    }
}

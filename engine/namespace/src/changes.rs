//! Nodes that changed, for each reader that asks what did.
//!
//! Owns: the set of each reader. Does not own: noting changes for the journal ([`Touched`]), what other nodes have to be told (`outgoing`).
//!
//! Each set is level-triggered: a node is in it until its reader has taken it, however often it changed.

use super::NodeId;
use super::tree::Touched;
use std::collections::BTreeSet;

/// The changed nodes by reader. Each set has at most one entry a node, plus those removed since its reader came last.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// For the node loop: files, and directories renamed or removed.
    dirty: BTreeSet<NodeId>,
    /// For whoever keeps this tree elsewhere; none where nobody does.
    unkept: Option<BTreeSet<NodeId>>,
    /// Since a snapshot of the tree was begun; none while none is taken.
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

    /// From now on changes are collected for whoever keeps the tree; `all`: what is there.
    pub(super) fn keep(&mut self, all: BTreeSet<NodeId>) {
        self.unkept = Some(all);
    }

    /// Nobody keeps the tree any more.
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

    /// Takes up to `most` nodes that changed since a snapshot was begun, and whether others are left. With the last of them collecting
    /// ends.
    pub(super) fn take_since_snapshot(&mut self, most: usize) -> (BTreeSet<NodeId>, bool) {
        let Some(mut changed) = self.since_snapshot.take() else { return (BTreeSet::new(), false) };
        self.since_snapshot =
            changed.iter().nth(most).copied().map(|first_left| changed.split_off(&first_left));
        let are_left = self.since_snapshot.is_some();
        (changed, are_left)
    }
}

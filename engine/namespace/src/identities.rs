//! Files by their identity.
//!
//! Owns: which node carries an identity that is not its own. Does not own: the nodes (`tree`), when a file takes another identity (`open`).
//!
//! A file of this incarnation is named for its node. Only two kinds of files need an entry: those of another incarnation, and those of our
//! own that were removed and brought back under another node.

use super::NodeId;
use super::tree::Tree;
use std::collections::BTreeMap;
use tidemark_protocol::id::{FileId, Incarnation};

/// The files that carry another identity than their node's.
#[derive(Debug, Default)]
pub(super) struct Identities {
    adopted: BTreeMap<FileId, NodeId>,
}

impl Identities {
    /// Returns the node that carries a file's identity. `own`: this node's incarnation.
    pub(super) fn node_of(&self, tree: &Tree, id: FileId, own: Incarnation) -> Option<NodeId> {
        // A file of our own that was removed and brought back has another node than the one it is named for.
        let node = self.adopted(id).or_else(|| (id.incarnation == own).then_some(id.counter.0))?;
        let file = tree.nodes.get(&node)?.file().ok()?;
        (file.id == id).then_some(node)
    }

    /// Returns the node that carries this identity although the identity names another.
    pub(super) fn adopted(&self, id: FileId) -> Option<NodeId> {
        self.adopted.get(&id).copied()
    }

    pub(super) fn adopt(&mut self, id: FileId, node: NodeId) {
        self.adopted.insert(id, node);
    }

    /// Removes the identity from the node; does nothing if another node carries it.
    pub(super) fn remove(&mut self, id: FileId, node: NodeId) {
        if self.adopted(id) == Some(node) {
            self.adopted.remove(&id);
        }
    }
}

//! Nodes as they stand, for whoever tells other nodes of them: the coordinator's answers, and a look at what is here before it is asked.
//!
//! Owns: finding them, by path, by identity and all at once. Does not own: which of them are to be told (`outgoing`), their form
//! ([`OutgoingNode`]).

use super::guarded::Guarded;
use super::hidden::path_in_sight;
use super::links::other_names;
use super::node::{Body, Node};
use super::outgoing::attributes;
use super::tree::Tree;
use super::view::file_view;
use super::{FileState, NodeId, OutgoingBody, OutgoingNode, is_hidden};
use tidemark_protocol::cluster::wire::NodeAttributes;
use tidemark_protocol::id::{FileId, Incarnation};
use tidemark_protocol::path::join;

/// Nodes as they stand, for whoever tells other nodes of them.
#[derive(Debug, Clone, Copy)]
pub struct StandingNodes<'a> {
    pub(super) state: &'a Guarded,
}

impl StandingNodes<'_> {
    /// The node on which a file is being written, of whose bytes nothing was heard yet.
    #[must_use]
    pub fn begun_elsewhere(&self, node: NodeId) -> Option<Incarnation> {
        self.state.look(|state| {
            let file = state.tree.node(node).ok()?.file().ok()?;
            let remote = file.remote.as_ref().filter(|_| file.size_bytes == 0)?;
            matches!(remote.state, FileState::Open { .. }).then_some(remote.home)
        })
    }

    /// All that is in sight with all its names, parents before what is in them. Costs the size of the tree, in slices of the lock.
    #[must_use]
    pub fn whole_tree(&self) -> Vec<OutgoingNode> {
        let mut nodes = Vec::new();
        self.state.for_each_node(|state, id| {
            let Some(found) = node_in_sight(&state.tree, id) else { return };
            state.outgoing.note_begun(id, Some(&found));
            nodes.push(OutgoingNode { other_names: other_names(&state.tree, id, &found.path), ..found });
        });
        nodes.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        nodes
    }

    /// The node that a directory has under a name, where there is one.
    #[must_use]
    pub fn child_number(&self, parent: NodeId, name: &[u8]) -> Option<NodeId> {
        self.state.look(|state| state.tree.child(parent, name).ok())
    }

    /// The same where it is a directory.
    #[must_use]
    pub fn child_directory(&self, parent: NodeId, name: &[u8]) -> Option<NodeId> {
        self.state.look(|state| {
            let node = state.tree.child(parent, name).ok()?;
            state.tree.node(node).ok()?.is_directory().then_some(node)
        })
    }

    /// Whether nothing is known in a directory.
    #[must_use]
    pub fn is_empty_directory(&self, directory: NodeId) -> bool {
        self.state.look(|state| {
            let body = state.tree.nodes.get(&directory).map(|node| &node.body);
            matches!(body, Some(Body::Directory(directory)) if directory.by_cookie.is_empty())
        })
    }

    /// A directory and those below it that are known here; none where they are more than `most`.
    #[must_use]
    pub fn directories_below(&self, directory: NodeId, most: usize) -> Option<Vec<NodeId>> {
        self.state.look(|state| {
            let mut found = vec![directory];
            let mut next = 0;
            while let Some(at) = found.get(next).copied() {
                next += 1;
                let directory = state.tree.node(at).ok()?.directory().ok()?;
                let below = directory.subdirectories as usize;
                if found.len() + below > most {
                    return None;
                }
                let entries = directory.by_cookie.values().map(|entry| entry.node);
                let is_directory = |node: &NodeId| state.tree.node(*node).is_ok_and(Node::is_directory);
                // Most have none below them, and their files need not be looked at.
                found.extend(entries.filter(is_directory).take(below));
            }
            Some(found)
        })
    }

    /// Whether the name is here.
    #[must_use]
    pub fn has_name(&self, parent: NodeId, name: &[u8]) -> bool {
        self.state.look(|state| state.tree.child(parent, name).is_ok())
    }

    /// One node in sight by its path.
    #[must_use]
    pub fn outgoing_at(&self, path: &[u8]) -> Option<OutgoingNode> {
        self.state.look(|state| {
            let node = state.tree.resolve(path).ok()?;
            let mut found = node_in_sight(&state.tree, node)?;
            path.clone_into(&mut found.path);
            found.other_names = other_names(&state.tree, node, path);
            Some(found)
        })
    }

    /// One file by its identity.
    #[must_use]
    pub fn outgoing_file(&self, file: FileId) -> Option<OutgoingNode> {
        self.state.look(|state| node_in_sight(&state.tree, state.node_of(file, self.state.incarnation)?))
    }

    /// The same, in sight or not.
    #[must_use]
    pub fn outgoing_anywhere(&self, file: FileId) -> Option<OutgoingNode> {
        self.state.look(|state| {
            let node = state.node_of(file, self.state.incarnation)?;
            let path = state.tree.path(state.tree.node(node).ok()?.first_link()?)?;
            node_in_sight(&state.tree, node).or_else(|| node_under(&state.tree, node, path))
        })
    }

    /// The nodes in a directory; none where it is not one.
    #[must_use]
    pub fn outgoing_in(&self, path: &[u8]) -> Option<Vec<OutgoingNode>> {
        self.state.look(|state| {
            let directory = state.tree.resolve(path).ok()?;
            let entries = &state.tree.node(directory).ok()?.directory().ok()?.by_cookie;
            let found = entries.values().filter_map(|entry| {
                let mut found = node_in_sight(&state.tree, entry.node)?;
                found.path = join(path, &entry.name);
                found.other_names = other_names(&state.tree, entry.node, &found.path);
                (!is_hidden(&found.path)).then_some(found)
            });
            Some(found.collect())
        })
    }
}
/// A node as it stands, under a path.
pub(super) fn node_under(tree: &Tree, id: NodeId, path: Vec<u8>) -> Option<OutgoingNode> {
    let node = tree.nodes.get(&id)?;
    let attributes = attributes(node);
    let (attributes, body) = match &node.body {
        Body::Directory(_) => (attributes, OutgoingBody::Directory),
        Body::Symlink(target) => (attributes, OutgoingBody::Symlink(target.to_vec())),
        // What its other end is, lives on this node only.
        Body::Special(_) => return None,
        Body::File(_) => {
            let view = file_view(tree, id)?;
            (NodeAttributes { mtime_ns: view.mtime_ns, ..attributes }, OutgoingBody::File(Box::new(view)))
        }
    };
    Some(OutgoingNode {
        node: id,
        path,
        attributes,
        attributes_ns: node.attributes_ns,
        other_names: None,
        body,
    })
}

pub(super) fn node_in_sight(tree: &Tree, id: NodeId) -> Option<OutgoingNode> {
    node_under(tree, id, path_in_sight(tree, id)?)
}

//! Nodes as they stand, for publication: the coordinator's answers, and a look at what is here before the coordinator is asked.
//!
//! Owns: finding them, by path, by identity and all at once. Does not own: which of them are published (`outgoing`), their form
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

/// Nodes as they stand, for publication to other nodes.
#[derive(Debug, Clone, Copy)]
pub struct StandingNodes<'a> {
    pub(super) state: &'a Guarded,
}

impl StandingNodes<'_> {
    /// Returns the life that writes a file on another node, while nothing of the file's bytes was published yet.
    #[must_use]
    pub fn begun_elsewhere(&self, node: NodeId) -> Option<Incarnation> {
        self.state.look(|state| {
            let file = state.tree.node(node).ok()?.file().ok()?;
            let remote = file.remote.as_ref().filter(|_| file.size_bytes == 0)?;
            matches!(remote.state, FileState::Open { .. }).then_some(remote.home)
        })
    }

    /// Returns all nodes that are not hidden, with all their names, parents first. Costs the size of the tree, in slices of the lock.
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

    /// Returns the node that a directory has under a name, if there is one.
    #[must_use]
    pub fn child_number(&self, parent: NodeId, name: &[u8]) -> Option<NodeId> {
        self.state.look(|state| state.tree.child(parent, name).ok())
    }

    /// Does the same, but only for a directory.
    #[must_use]
    pub fn child_directory(&self, parent: NodeId, name: &[u8]) -> Option<NodeId> {
        self.state.look(|state| {
            let node = state.tree.child(parent, name).ok()?;
            state.tree.node(node).ok()?.is_directory().then_some(node)
        })
    }

    /// Whether a directory has no known entries.
    #[must_use]
    pub fn is_empty_directory(&self, directory: NodeId) -> bool {
        self.state.look(|state| {
            let body = state.tree.nodes.get(&directory).map(|node| &node.body);
            matches!(body, Some(Body::Directory(directory)) if directory.by_cookie.is_empty())
        })
    }

    /// Returns a directory and the directories below it that are known here; none if they are more than `most`.
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
                // Most directories have none below them, and their files need not be examined.
                found.extend(entries.filter(is_directory).take(below));
            }
            Some(found)
        })
    }

    /// Whether the directory has this name here.
    #[must_use]
    pub fn has_name(&self, parent: NodeId, name: &[u8]) -> bool {
        self.state.look(|state| state.tree.child(parent, name).is_ok())
    }

    /// Returns the node at a path, unless it is hidden.
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

    /// Returns a file by its identity, unless it is hidden.
    #[must_use]
    pub fn outgoing_file(&self, file: FileId) -> Option<OutgoingNode> {
        self.state.look(|state| node_in_sight(&state.tree, state.node_of(file, self.state.incarnation)?))
    }

    /// Does the same, even if the file is hidden.
    #[must_use]
    pub fn outgoing_anywhere(&self, file: FileId) -> Option<OutgoingNode> {
        self.state.look(|state| {
            let node = state.node_of(file, self.state.incarnation)?;
            let path = state.tree.path(state.tree.node(node).ok()?.first_link()?)?;
            node_in_sight(&state.tree, node).or_else(|| node_under(&state.tree, node, path))
        })
    }

    /// Returns the nodes in a directory; none if the path is not a directory.
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
/// Returns a node as it stands, under a path.
pub(super) fn node_under(tree: &Tree, id: NodeId, path: Vec<u8>) -> Option<OutgoingNode> {
    let node = tree.nodes.get(&id)?;
    let attributes = attributes(node);
    let (attributes, body) = match &node.body {
        Body::Directory(_) => (attributes, OutgoingBody::Directory),
        Body::Symlink(target) => (attributes, OutgoingBody::Symlink(target.to_vec())),
        // The other end of such a node exists on this node only.
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

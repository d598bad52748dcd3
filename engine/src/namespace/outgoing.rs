//! What other nodes have to be told: the operations on names made here, in order, and the nodes whose state changed.
//!
//! Owns: collecting both in the change that makes them. Does not own: sending them (`cluster::publisher`), taking in what
//! others send (`mirror`).
//!
//! Operations keep their order; states are told as they are when somebody asks, so that a thousand changes of one file are one.
//! Where more has gathered than is kept, everything is told anew instead: nothing is lost by that but time.

use super::node::{Body, Node};
use super::view::NODES_AT_ONCE;
use super::{FileView, Namespace, NodeId, ROOT, State, is_hidden};
use std::collections::{BTreeSet, HashMap, VecDeque};
use tidemark_protocol::cluster::wire::{NameOperation, NodeAttributes};
use tidemark_protocol::id::FileId;
use tidemark_protocol::path::join;

/// Operations kept while nobody takes them: a coordinator that is away for an hour while a save a minute makes a thousand files
/// each. About 100 bytes each.
const OPERATIONS_MAX: usize = 1 << 18;

/// Names whose last operation is remembered: far more than change while one question is on its way.
const RECENT_MAX: usize = 1 << 14;

/// What has not been told.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    operations: Vec<NameOperation>,
    touched: BTreeSet<NodeId>,
    /// More than is kept: everything is to be told.
    overflowed: bool,
    /// What is changed now was heard from others.
    muted: bool,
    /// Counts operations on names.
    number: u64,
    /// The last operation on each name lately, and their order.
    recent: HashMap<(NodeId, Vec<u8>), u64>,
    order: VecDeque<((NodeId, Vec<u8>), u64)>,
}

impl Outgoing {
    fn note(&mut self, name: (NodeId, Vec<u8>)) {
        self.number += 1;
        self.recent.insert(name.clone(), self.number);
        self.order.push_back((name, self.number));
        if self.order.len() > RECENT_MAX
            && let Some((name, number)) = self.order.pop_front()
            && self.recent.get(&name) == Some(&number)
        {
            self.recent.remove(&name);
        }
    }
}

/// What was taken to be told.
#[derive(Debug, Default)]
pub struct Told {
    pub operations: Vec<NameOperation>,
    pub states: Vec<OutgoingNode>,
    /// Operations were dropped before these: only everything is enough.
    pub overflowed: bool,
}

/// A node as it stands.
#[derive(Debug, Clone)]
pub struct OutgoingNode {
    pub node: NodeId,
    pub path: Vec<u8>,
    pub attributes: NodeAttributes,
    pub body: OutgoingBody,
}

/// What it is.
#[derive(Debug, Clone)]
pub enum OutgoingBody {
    Directory,
    Symlink(Vec<u8>),
    File(Box<FileView>),
}

impl Namespace {
    /// From now on changes are collected for [`Namespace::take_outgoing`].
    pub fn collect_outgoing(&self) {
        self.look(|state| {
            state.outgoing.get_or_insert_default();
        });
    }

    /// Nobody is told any more: this node's tree is what others are told of.
    pub fn stop_outgoing(&self) {
        self.look(|state| state.outgoing = None);
    }

    /// Takes what is to be told: operations first, and states once no operation is left. Empty when there is nothing.
    #[must_use]
    pub fn take_outgoing(&self, most: usize) -> Told {
        self.look(|state| {
            let Some(outgoing) = &mut state.outgoing else { return Told::default() };
            let overflowed = std::mem::take(&mut outgoing.overflowed);
            let count = outgoing.operations.len().min(most);
            let operations: Vec<_> = outgoing.operations.drain(..count).collect();
            let mut nodes = Vec::new();
            if outgoing.operations.is_empty() {
                while nodes.len() + count < most
                    && let Some(node) = outgoing.touched.pop_first()
                {
                    nodes.push(node);
                }
            }
            let states = nodes.into_iter().filter_map(|node| state.outgoing_node(node)).collect();
            Told { operations, states, overflowed }
        })
    }

    /// How many operations on names there have been: what was asked before the next one does not know of that.
    #[must_use]
    pub fn names_number(&self) -> u64 {
        self.look(|state| state.outgoing_number())
    }

    /// Wakes whoever tells others, whether there is something or not.
    pub fn told_again(&self) {
        self.told.notify_one();
    }

    /// Resolves when there may be something to tell.
    pub async fn outgoing_changed(&self) {
        self.told.notified().await;
    }

    /// All that is in sight, parents before what is in them. Costs the size of the tree, in slices of the lock.
    #[must_use]
    pub fn whole_tree(&self) -> Vec<OutgoingNode> {
        let mut nodes = Vec::new();
        let mut after = ROOT;
        loop {
            let last = self.look(|state| {
                let range = (std::ops::Bound::Excluded(after), std::ops::Bound::Unbounded);
                let ids: Vec<_> =
                    state.tree.nodes.range(range).take(NODES_AT_ONCE).map(|(id, _)| *id).collect();
                nodes.extend(ids.iter().filter_map(|id| state.outgoing_node(*id)));
                ids.last().copied()
            });
            match last {
                Some(last) => after = last,
                None => break,
            }
        }
        nodes.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        nodes
    }

    /// The directory of that name, where there is one.
    #[must_use]
    pub fn child_directory(&self, parent: NodeId, name: &[u8]) -> Option<NodeId> {
        self.look(|state| {
            let node = state.tree.child(parent, name).ok()?;
            state.tree.node(node).ok()?.is_directory().then_some(node)
        })
    }

    /// Whether the name is here.
    #[must_use]
    pub fn has_name(&self, parent: NodeId, name: &[u8]) -> bool {
        self.look(|state| state.tree.child(parent, name).is_ok())
    }

    /// Nanoseconds since 1970 by this node's clock.
    #[must_use]
    pub fn now_ns(&self) -> i64 {
        self.clock.now_ns()
    }

    /// One node in sight by its path.
    #[must_use]
    pub fn outgoing_at(&self, path: &[u8]) -> Option<OutgoingNode> {
        self.look(|state| {
            let node = state.tree.resolve(path).ok()?;
            let mut found = state.outgoing_node(node)?;
            path.clone_into(&mut found.path);
            Some(found)
        })
    }

    /// One file by its identity.
    #[must_use]
    pub fn outgoing_file(&self, file: FileId) -> Option<OutgoingNode> {
        self.look(|state| state.outgoing_node(state.node_of(file, self.incarnation)?))
    }

    /// The same, in sight or not.
    #[must_use]
    pub fn outgoing_anywhere(&self, file: FileId) -> Option<OutgoingNode> {
        self.look(|state| {
            let node = state.node_of(file, self.incarnation)?;
            let path = state.tree.path(state.tree.node(node).ok()?.first_link()?)?;
            state.outgoing_node(node).or_else(|| state.outgoing_under(node, path))
        })
    }

    /// The nodes in a directory; none where it is not one.
    #[must_use]
    pub fn outgoing_in(&self, path: &[u8]) -> Option<Vec<OutgoingNode>> {
        self.look(|state| {
            let directory = state.tree.resolve(path).ok()?;
            let entries = &state.tree.node(directory).ok()?.directory().ok()?.by_cookie;
            let found = entries.values().filter_map(|entry| {
                let mut found = state.outgoing_node(entry.node)?;
                found.path = join(path, &entry.name);
                (!is_hidden(&found.path)).then_some(found)
            });
            Some(found.collect())
        })
    }
}

impl State {
    pub(super) fn outgoing_number(&self) -> u64 {
        self.outgoing.as_ref().map_or(0, |outgoing| outgoing.number)
    }

    /// Notes an operation on names. Costs nothing where nobody is to be told.
    pub(super) fn tell(&mut self, operation: impl FnOnce(&Self) -> Option<NameOperation>) {
        match &self.outgoing {
            Some(outgoing) if !outgoing.muted => {}
            _ => return,
        }
        let Some(operation) = operation(self) else { return };
        let Some(outgoing) = &mut self.outgoing else { return };
        if outgoing.operations.len() >= OPERATIONS_MAX {
            outgoing.operations.clear();
            outgoing.overflowed = true;
        }
        outgoing.operations.push(operation);
    }

    /// A name was given or taken away here.
    pub(super) fn note_name(&mut self, parent: NodeId, name: &[u8]) {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.note((parent, name.to_vec()));
        }
    }

    /// Whether a name changed here after so many operations.
    pub(super) fn is_newer(&self, parent: NodeId, name: &[u8], number: u64) -> bool {
        let outgoing = self.outgoing.as_ref();
        outgoing.is_some_and(|outgoing| {
            outgoing.recent.get(&(parent, name.to_vec())).is_some_and(|last| *last > number)
        })
    }

    /// What this change touches was heard from others; they are not told of it.
    pub(super) fn mute(&mut self) {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.muted = true;
        }
    }

    /// The bytes of a file are to be seen elsewhere as they are now. Nothing of it changes for the journal.
    pub(super) fn tell_size(&mut self, node: NodeId) {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.touched.insert(node);
        }
    }

    /// Whether there is something to tell.
    pub(super) fn tells(&self) -> bool {
        self.outgoing.as_ref().is_some_and(|outgoing| {
            outgoing.overflowed || !outgoing.operations.is_empty() || !outgoing.touched.is_empty()
        })
    }

    /// At the end of a change: its nodes are to be told, or not.
    pub(super) fn collect_touched(&mut self) {
        if let Some(untold) = &mut self.untold {
            untold.extend(self.tree.touched.nodes.iter().chain(&self.tree.touched.freed));
        }
        if let Some(outgoing) = &mut self.outgoing
            && !std::mem::take(&mut outgoing.muted)
        {
            outgoing.touched.extend(self.tree.touched.nodes.iter().filter(|node| **node != ROOT));
        }
    }

    /// The path of a name in a directory.
    pub(super) fn path_in(&self, parent: NodeId, name: &[u8]) -> Option<Vec<u8>> {
        let path = if parent == ROOT {
            name.to_vec()
        } else {
            [&self.tree.path(self.tree.node(parent).ok()?.first_link()?)?, name].join(&b'/')
        };
        (!is_hidden(&path)).then_some(path)
    }

    fn outgoing_node(&self, id: NodeId) -> Option<OutgoingNode> {
        let node = self.tree.nodes.get(&id)?;
        let path = node.links().filter_map(|link| self.tree.path(link)).find(|path| !is_hidden(path))?;
        self.outgoing_under(id, path)
    }

    /// A node as it stands, under a path.
    pub(super) fn outgoing_under(&self, id: NodeId, path: Vec<u8>) -> Option<OutgoingNode> {
        let node = self.tree.nodes.get(&id)?;
        let attributes = attributes(node);
        let (attributes, body) = match &node.body {
            Body::Directory(_) => (attributes, OutgoingBody::Directory),
            Body::Symlink(target) => (attributes, OutgoingBody::Symlink(target.to_vec())),
            // What its other end is, lives on this node only.
            Body::Special(_) => return None,
            Body::File(_) => {
                let view = self.view(id)?;
                (NodeAttributes { mtime_ns: view.mtime_ns, ..attributes }, OutgoingBody::File(Box::new(view)))
            }
        };
        Some(OutgoingNode { node: id, path, attributes, body })
    }
}

pub(super) fn attributes(node: &Node) -> NodeAttributes {
    NodeAttributes {
        mode: node.mode,
        uid: node.uid,
        gid: node.gid,
        mtime_ns: node.mtime_ns,
        xattrs: node.xattrs.as_ref().map_or_else(Vec::new, |xattrs| xattrs.pairs()),
    }
}

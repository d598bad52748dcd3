//! The whole tree as plain data, for Tier-3.
//!
//! Owns: [`TreeSnapshot`], and that it is of one moment. Does not own: its form in Tier-3 (the protocol), taking it back in
//! (`adopt`).

use super::attr::{Special, observe};
use super::node::{Body, Name, Node};
use super::tree::Tree;
use super::view::NODES_AT_ONCE;
use super::{Namespace, NodeId, ROOT, UNPOISONED, is_hidden};
use std::collections::HashMap;
use std::sync::Arc;
use tidemark_protocol::id::{FileId, Generation, SealNumber};

/// Holds of the lock in which nodes that changed meanwhile are examined again. Each shortens the list by [`NODES_AT_ONCE`]; no number of
/// programs changes that many in the same time. After so many holds the rest is examined in a single hold.
const AGAIN_MAX: usize = 1 << 14;

/// A name with its attributes. Paths are relative to the mount, in bytes; the root's is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotNode {
    pub path: Vec<u8>,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime_ns: i64,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A file: its bytes are named by (file, seal); seal 0 was never sealed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotFile {
    pub node: SnapshotNode,
    pub file: FileId,
    pub seal: SealNumber,
    pub generation: Generation,
    pub size_bytes: u64,
}

/// A further name of the node at `to`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotHardLink {
    pub path: Vec<u8>,
    pub to: Vec<u8>,
}

/// Everything that the tree holds besides bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TreeSnapshot {
    pub root: SnapshotNode,
    pub directories: Vec<SnapshotNode>,
    pub symlinks: Vec<(SnapshotNode, Vec<u8>)>,
    pub specials: Vec<(SnapshotNode, Special)>,
    pub files: Vec<SnapshotFile>,
    pub hard_links: Vec<SnapshotHardLink>,
}

/// A node as it was when examined: its content and its names.
#[derive(Debug)]
struct Taken {
    links: Vec<(NodeId, Name)>,
    /// The node without its path, which is filled in when all paths are known.
    node: SnapshotNode,
    body: TakenBody,
}

#[derive(Debug)]
enum TakenBody {
    Directory,
    Symlink(Vec<u8>),
    File { file: FileId, seal: SealNumber, generation: Generation, size_bytes: u64 },
    Special(Special),
}

impl Taken {
    fn of(tree: &Tree, node: &Node) -> Self {
        let name = |link: super::node::Link| Some((link.parent, Arc::clone(&tree.entry_at(link)?.name)));
        let mut taken = SnapshotNode {
            path: Vec::new(),
            mode: node.mode,
            uid: node.uid,
            gid: node.gid,
            mtime_ns: node.mtime_ns,
            xattrs: node.xattrs.as_ref().map_or_else(Vec::new, |xattrs| xattrs.pairs()),
        };
        let body = match &node.body {
            Body::Directory(_) => TakenBody::Directory,
            Body::Symlink(target) => TakenBody::Symlink(target.to_vec()),
            Body::Special(special) => TakenBody::Special(*special),
            Body::File(file) => {
                let observed = observe(node, file).ok();
                taken.mtime_ns = observed.map_or(node.mtime_ns, |observed| observed.mtime_ns);
                TakenBody::File {
                    file: file.id,
                    seal: file.fate.last_seal(),
                    generation: file.generation,
                    size_bytes: observed.map_or(file.size_bytes, |observed| observed.size_bytes),
                }
            }
        };
        Self { links: node.links().filter_map(name).collect(), node: taken, body }
    }
}

impl Namespace {
    /// Returns the tree without its bytes, sorted by path, as it was at one moment. Costs the size of the tree, in slices of the lock:
    /// nodes that change meanwhile are examined again, until few enough are left for one hold.
    pub fn tree_snapshot(&self) -> TreeSnapshot {
        let _alone = self.snapshots.lock().expect(UNPOISONED);
        self.state.look(|state| state.tree.changes.begin_snapshot());
        let mut nodes: HashMap<NodeId, Taken> = HashMap::new();
        let mut after: NodeId = 0;
        loop {
            let last = self.state.look(|state| {
                let mut last = None;
                let range = (std::ops::Bound::Excluded(after), std::ops::Bound::Unbounded);
                for (id, node) in state.tree.nodes.range(range).take(NODES_AT_ONCE) {
                    last = Some(*id);
                    nodes.insert(*id, Taken::of(&state.tree, node));
                }
                last
            });
            match last {
                Some(last) => after = last,
                None => break,
            }
        }
        let mut again = 0;
        while self.state.look(|state| look_again(&mut state.tree, &mut nodes, again == AGAIN_MAX)) {
            again += 1;
        }
        TreeSnapshot::of(nodes)
    }
}

/// Examines again the nodes that changed since they were examined; all of them if they are few, or if `all` is set. Returns true while
/// others are left.
fn look_again(tree: &mut Tree, nodes: &mut HashMap<NodeId, Taken>, all: bool) -> bool {
    let (changed, are_left) = tree.changes.take_since_snapshot(if all { usize::MAX } else { NODES_AT_ONCE });
    for id in changed {
        match tree.nodes.get(&id) {
            Some(node) => nodes.insert(id, Taken::of(tree, node)),
            None => nodes.remove(&id),
        };
    }
    are_left
}

impl TreeSnapshot {
    fn of(nodes: HashMap<NodeId, Taken>) -> Self {
        let directories = Directories::of(&nodes);
        let mut snapshot = Self::default();
        for (id, taken) in nodes {
            if id == ROOT {
                snapshot.root = taken.node;
                continue;
            }
            let paths = taken.links.iter().filter_map(|(parent, name)| directories.below(*parent, name));
            // Hidden nodes belong to this node's memory only.
            let mut paths = paths.filter(|path| !is_hidden(path));
            let Some(path) = paths.next() else { continue };
            let others = paths.map(|other| SnapshotHardLink { path: other, to: path.clone() });
            snapshot.hard_links.extend(others);
            let node = SnapshotNode { path, ..taken.node };
            match taken.body {
                TakenBody::Directory => snapshot.directories.push(node),
                TakenBody::Symlink(target) => snapshot.symlinks.push((node, target)),
                TakenBody::Special(special) => snapshot.specials.push((node, special)),
                TakenBody::File { file, seal, generation, size_bytes } => {
                    snapshot.files.push(SnapshotFile { node, file, seal, generation, size_bytes });
                }
            }
        }
        snapshot.directories.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        snapshot.symlinks.sort_unstable_by(|one, other| one.0.path.cmp(&other.0.path));
        snapshot.specials.sort_unstable_by(|one, other| one.0.path.cmp(&other.0.path));
        snapshot.files.sort_unstable_by(|one, other| one.node.path.cmp(&other.node.path));
        snapshot.hard_links.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        snapshot
    }
}

/// The paths of directories, each followed by a slash; the root's is empty.
struct Directories(HashMap<NodeId, Vec<u8>>);

impl Directories {
    fn of(nodes: &HashMap<NodeId, Taken>) -> Self {
        let mut known = HashMap::from([(ROOT, Vec::new())]);
        for start in nodes.iter().filter(|(_, taken)| matches!(taken.body, TakenBody::Directory)) {
            let (mut at, mut chain) = (*start.0, Vec::new());
            while !known.contains_key(&at) {
                let Some((parent, name)) = nodes.get(&at).and_then(|taken| taken.links.first()) else {
                    break;
                };
                chain.push((at, name));
                at = *parent;
            }
            // Below a directory that was removed there is no path.
            let Some(mut path) = known.get(&at).cloned() else { continue };
            for (below, name) in chain.into_iter().rev() {
                path.extend_from_slice(name);
                path.push(b'/');
                known.insert(below, path.clone());
            }
        }
        Self(known)
    }

    fn below(&self, parent: NodeId, name: &[u8]) -> Option<Vec<u8>> {
        Some([self.0.get(&parent)?.as_slice(), name].concat())
    }
}

//! The whole tree as plain data, for Tier-3.
//!
//! Owns: [`TreeSnapshot`]. Does not own: its form in Tier-3 (the protocol), taking it back in (`adopt`).

use super::attr::observe;
use super::node::{Body, Node};
use super::view::NODES_AT_ONCE;
use super::{Namespace, NodeId, ROOT, is_hidden};
use tidemark_protocol::id::{FileId, Generation, SealNumber};

/// A name with its attributes. Paths are relative to the mount, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// Another name of the file at `to`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotHardLink {
    pub path: Vec<u8>,
    pub to: Vec<u8>,
}

/// All that the tree holds besides bytes, and besides pipes, sockets and devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TreeSnapshot {
    pub directories: Vec<SnapshotNode>,
    pub symlinks: Vec<(SnapshotNode, Vec<u8>)>,
    pub files: Vec<SnapshotFile>,
    pub hard_links: Vec<SnapshotHardLink>,
}

impl Namespace {
    /// The tree without its bytes, sorted by path. Costs the size of the tree, in slices of the lock: it is of
    /// one moment only where nothing changes meanwhile, which a snapshot of loose metadata does not need.
    pub fn tree_snapshot(&self) -> TreeSnapshot {
        let mut snapshot = TreeSnapshot::default();
        let mut after: NodeId = ROOT;
        loop {
            let last = self.look(|state| {
                let mut last = None;
                let range = (std::ops::Bound::Excluded(after), std::ops::Bound::Unbounded);
                for (id, node) in state.tree.nodes.range(range).take(NODES_AT_ONCE) {
                    last = Some(*id);
                    let paths = node.links().filter_map(|link| state.tree.path(link));
                    // What is out of sight is of this node's memory only.
                    let mut paths = paths.filter(|path| !is_hidden(path));
                    if let Some(path) = paths.next() {
                        snapshot
                            .hard_links
                            .extend(paths.map(|other| SnapshotHardLink { path: other, to: path.clone() }));
                        snapshot.take(path, node);
                    }
                }
                last
            });
            match last {
                Some(last) => after = last,
                None => break,
            }
        }
        snapshot.directories.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        snapshot.symlinks.sort_unstable_by(|one, other| one.0.path.cmp(&other.0.path));
        snapshot.files.sort_unstable_by(|one, other| one.node.path.cmp(&other.node.path));
        snapshot.hard_links.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        snapshot
    }
}

impl TreeSnapshot {
    fn take(&mut self, path: Vec<u8>, node: &Node) {
        let mut taken = SnapshotNode {
            path,
            mode: node.mode,
            uid: node.uid,
            gid: node.gid,
            mtime_ns: node.mtime_ns,
            xattrs: node.xattrs.as_ref().map_or_else(Vec::new, |xattrs| xattrs.pairs()),
        };
        match &node.body {
            Body::Directory(_) => self.directories.push(taken),
            Body::Symlink(target) => self.symlinks.push((taken, target.to_vec())),
            // What its other end is, lives on this node only.
            Body::Special(_) => {}
            Body::File(file) => {
                let observed = observe(node, file).ok();
                taken.mtime_ns = observed.map_or(node.mtime_ns, |observed| observed.mtime_ns);
                self.files.push(SnapshotFile {
                    node: taken,
                    file: file.id,
                    seal: file.fate.last_seal(),
                    generation: file.generation,
                    size_bytes: observed.map_or(file.size_bytes, |observed| observed.size_bytes),
                });
            }
        }
    }
}

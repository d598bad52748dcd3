//! Views: files as the node loop sees them.
//!
//! Owns: [`FileView`], how paths are found, and the pass over all nodes. Does not own: the decisions based on them.

use super::attr::observe;
use super::copies::Present;
use super::file::ObjectCopy;
use super::guarded::Guarded;
use super::links::other_names;
use super::mirror::Remote;
use super::node::{Body, Node};
use super::tree::Tree;
use super::writer::WriterId;
use super::{FileState, FsError, HIDDEN, NodeId, ROOT, ReclaimClass};
use std::sync::Arc;
use tidemark_content::Judgement;
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::manifest::{Attributes, Base64};
use tidemark_protocol::path::RawText;

/// A file as it is now. Paths are relative to the mount, in bytes, without a leading slash.
#[derive(Debug, Clone, PartialEq)]
pub struct FileView {
    pub node: NodeId,
    pub file: FileId,
    pub ino: u64,
    pub paths: Vec<Vec<u8>>,
    pub size_bytes: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime_ns: i64,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub generation: Generation,
    pub state: FileState,
    pub writers: Vec<WriterId>,
    /// Number of the file's names.
    pub links: u32,
    /// Handles of all kinds.
    pub opens: u32,
    /// Whether the bytes are in Tier-1.
    pub host: bool,
    /// The copy in Tier-3 of the present seal.
    pub object: Option<ObjectCopy>,
    /// Judgement of the bytes. None if they do not begin as a known format, or were not judged.
    pub content: Option<Judgement>,
    /// Whether the bytes were judged here since they last changed.
    pub judged: bool,
    pub reclaim: ReclaimClass,
    pub opened_ns: i64,
    /// When the file's last writer released it.
    pub closed_ns: i64,
    /// When the last close(2) or rename(2) put the present bytes under the present name.
    pub published_ns: i64,
    /// Whether a rename came since the file was last opened for writing.
    pub renamed: bool,
    /// The same if the file was cut before: then a rename counts only for writers that ended well.
    pub renamed_cut: bool,
    /// Whether a writer was not seen to close the file, whether or not the file is sealed as it is.
    pub cut: bool,
    /// Whether the file was cut, and all who opened it for writing since closed it.
    pub closed_again: bool,
    /// Number of the present seal, or of the last one.
    pub last_seal: SealNumber,
    /// Facts published by the writers' node, if that is another node.
    pub remote: Option<Box<Remote>>,
}

impl FileView {
    /// Returns the attributes that Tier-3 keeps beside the bytes.
    pub fn attributes(&self) -> Attributes {
        let xattrs = self.xattrs.iter().map(|(name, value)| (RawText(name.clone()), Base64(value.clone())));
        Attributes {
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            mtime_ns: self.mtime_ns,
            xattrs: xattrs.collect(),
        }
    }

    /// Returns the number of the present seal; none while the file is not sealed.
    #[must_use]
    pub fn sealed(&self) -> Option<SealNumber> {
        match self.state {
            FileState::Sealed { seal, .. } => Some(seal),
            FileState::Open { .. } | FileState::Closed | FileState::Cut | FileState::Mapped => None,
        }
    }

    /// Whether the file's content was left by a writer that was not seen to close it.
    #[must_use]
    pub fn is_left_cut(&self) -> bool {
        self.cut && !matches!(self.state, FileState::Open { .. })
    }
}

/// Nodes by path and by number, and the facts known of each.
#[derive(Debug, Clone, Copy)]
pub struct NodeViews<'a> {
    pub(super) state: &'a Guarded,
}

impl NodeViews<'_> {
    /// Returns a file; none if the node is not a file, has no name left, or is gone.
    pub fn view(&self, node: NodeId) -> Option<FileView> {
        self.state.look(|state| file_view(&state.tree, node))
    }

    /// Does the same for a file that may have lost its last name: a program has it open, or the kernel remembers it.
    pub fn view_of_node(&self, node: NodeId) -> Option<FileView> {
        self.state.look(|state| file_view_with(&state.tree, node, Vec::new()))
    }

    /// Returns a file by its identity.
    pub fn view_of(&self, file: FileId) -> Option<FileView> {
        self.state.look(|state| file_view(&state.tree, state.node_of(file, self.state.incarnation)?))
    }

    /// Returns all files below a path, including a file at the path itself, in no order. Hidden files are included only if the path is
    /// hidden, too. Costs the size of that part of the tree, in slices: files that come or go meanwhile may be in it or not.
    pub fn views_below(&self, path: &[u8]) -> Vec<FileView> {
        let mut views = Vec::new();
        let Ok(start) = self.state.look(|state| state.tree.resolve(path)) else { return views };
        let mut todo = vec![start];
        while !todo.is_empty() {
            self.state.look(|state| {
                for _ in 0..NODES_AT_ONCE {
                    let Some(at) = todo.pop() else { break };
                    let Some(node) = state.tree.nodes.get(&at) else { continue };
                    match &node.body {
                        Body::Directory(directory) => {
                            let entries = directory.by_cookie.values();
                            let seen = entries.filter(|entry| at != ROOT || *entry.name != *HIDDEN);
                            todo.extend(seen.map(|entry| entry.node));
                        }
                        Body::File(_) => views.extend(file_view(&state.tree, at)),
                        Body::Symlink(_) | Body::Special(_) => {}
                    }
                }
            });
        }
        views.sort_unstable_by_key(|view| view.node);
        views.dedup_by_key(|view| view.node); // A file with several names below the path is one file.
        views
    }

    /// Returns the extended attributes that a node keeps, without the computed ones; none if the node is gone.
    pub fn xattrs_of(&self, node: NodeId) -> Vec<(Vec<u8>, Vec<u8>)> {
        self.state.look(|state| {
            let xattrs = state.tree.nodes.get(&node).and_then(|node| node.xattrs.as_ref());
            xattrs.map_or_else(Vec::new, |xattrs| xattrs.pairs())
        })
    }

    /// Returns the first path of a node, relative to the mount; empty for the root, none for a node without a name.
    pub fn path_of(&self, node: NodeId) -> Option<Vec<u8>> {
        self.state.look(|state| {
            if node == ROOT {
                return Some(Vec::new());
            }
            state.tree.path(state.tree.nodes.get(&node)?.first_link()?)
        })
    }

    /// Returns a path at which this machine's root can read, and for tests change, the host copy without the mount. The path is good for
    /// as long as this process has the file.
    pub fn host_path(&self, node: NodeId) -> Option<String> {
        self.state.look(|state| {
            let file = state.tree.nodes.get(&node)?.file().ok()?;
            Some(file.backing.as_ref()?.host_path())
        })
    }

    /// Returns the node at a path relative to the mount; symlinks are not followed.
    pub fn node_at(&self, path: &[u8]) -> Option<NodeId> {
        self.state.look(|state| state.tree.resolve(path).ok())
    }

    /// Returns when the directory at a path, relative to the mount, got its name by rename; none if it was made under that name, or is
    /// not a directory.
    pub fn renamed_ns(&self, path: &[u8]) -> Option<i64> {
        let node = self.node_at(path)?;
        self.state
            .look(|state| state.tree.node(node)?.directory().map(|directory| directory.renamed_ns))
            .ok()
            .filter(|renamed_ns| *renamed_ns != 0)
    }

    /// Returns all names of a node, each with its directory.
    pub fn names_of(&self, node: NodeId) -> Vec<(NodeId, Vec<u8>)> {
        self.state.look(|state| state.tree.names_of(node))
    }

    /// Returns a file's paths that are not hidden, besides `path`; none if the node is not a file, or has too many.
    #[must_use]
    pub fn other_names(&self, path: &[u8]) -> Vec<Vec<u8>> {
        self.state
            .look(|state| {
                let node = state.tree.resolve(path).ok()?;
                other_names(&state.tree, node, path)
            })
            .unwrap_or_default()
    }

    /// Returns the directory above a node; the root's is the root.
    ///
    /// # Errors
    /// [`FsError::Stale`].
    pub fn parent(&self, node: NodeId) -> Result<NodeId, FsError> {
        self.state.look(|state| {
            state.tree.node(node)?;
            Ok(state.tree.parent(node).unwrap_or(ROOT))
        })
    }

    /// Returns the node of a file of the tree; none if the tree has no such file.
    #[must_use]
    pub fn node_of_file(&self, file: FileId) -> Option<NodeId> {
        self.state.look(|state| state.node_of(file, self.state.incarnation))
    }

    /// Returns the bytes of a file that is not COLD, whichever node writes them.
    #[must_use]
    pub fn present(&self, node: NodeId) -> Option<Present> {
        self.state.look(|state| {
            let node = state.tree.node(node).ok()?;
            let file = node.file().ok().filter(|file| !file.busy && node.link_count() > 0)?;
            Some(Present { file: file.id, backing: Arc::clone(file.backing.as_ref()?) })
        })
    }
}

/// Nodes examined in one hold of the lock.
pub(super) const NODES_AT_ONCE: usize = 256;

pub(super) fn file_view_with(tree: &Tree, id: NodeId, paths: Vec<Vec<u8>>) -> Option<FileView> {
    let node: &Node = tree.nodes.get(&id)?;
    let Body::File(file) = &node.body else { return None };
    let observed = observe(node, file).ok()?;
    let seal = file.fate.last_seal();
    let remote = file.remote.as_deref();
    Some(FileView {
        node: id,
        file: file.id,
        ino: node.ino,
        paths,
        size_bytes: observed.size_bytes,
        mode: node.mode,
        uid: node.uid,
        gid: node.gid,
        mtime_ns: observed.mtime_ns,
        xattrs: node.xattrs.as_ref().map_or_else(Vec::new, |xattrs| xattrs.pairs()),
        generation: file.generation,
        state: remote.map_or_else(|| file.fate.state(), |remote| remote.state.clone()),
        writers: file.writers.iter().map(|writer| WriterId::clone(writer)).collect(),
        links: node.link_count(),
        opens: file.opens,
        host: file.backing.is_some(),
        object: file.object.as_ref().filter(|noted| noted.0 == seal).map(|noted| noted.1.clone()),
        content: file.judged.as_ref().and_then(|judged| judged.as_deref().cloned()),
        judged: file.judged.is_some(),
        reclaim: file.class,
        opened_ns: file.opened_ns,
        closed_ns: file.closed_ns,
        published_ns: remote.map_or_else(|| file.flushed_ns.max(file.named_ns), |remote| remote.published_ns),
        cut: remote.map_or_else(|| file.fate.is_cut(), |remote| remote.state == FileState::Cut),
        closed_again: remote.is_none() && file.fate.is_closed_again(),
        renamed: remote.map_or_else(|| file.fate.is_vouched(), |remote| remote.vouched),
        renamed_cut: remote.is_none() && file.fate.is_renamed_cut(),
        last_seal: seal,
        remote: file.remote.clone(),
    })
}

pub(super) fn file_view(tree: &Tree, id: NodeId) -> Option<FileView> {
    let node: &Node = tree.nodes.get(&id)?;
    let Body::File(_) = &node.body else { return None };
    let paths: Vec<Vec<u8>> = node.links().filter_map(|link| tree.path(link)).collect();
    if paths.is_empty() { None } else { file_view_with(tree, id, paths) }
}

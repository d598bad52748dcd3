//! Hidden names: checkpoints that can never be complete, below a directory that no listing of the root shows.
//!
//! Owns: moving names there and back, and dropping hidden files when memory is short. Does not own: which names are hidden and why
//! (`node::shield`), the path to them, `.tidemark/torn` (the adapter).
//!
//! The directory is an ordinary one of the tree under a reserved name. The journal, a takeover and every call on the hidden files therefore
//! treat it as any other. Only the node loop and Tier-3 ignore it.

use super::file::File;
use super::guarded::Guarded;
use super::handle::OpenFile;
use super::node::{Body, Node};
use super::reclaim::Candidate;
use super::tree::Tree;
use super::view::NodeViews;
use super::{Caller, FileView, FsError, Namespace, NodeId, ROOT, State};
use tidemark_protocol::file::FileFate;
use tidemark_protocol::id::{FileCounter, FileId, Generation, Incarnation, SealNumber};
use tidemark_protocol::path::RelPath;

/// Name in the root; the adapter's virtual directory stands in front of it.
pub const HIDDEN: &[u8] = b".tidemark";
/// Torn checkpoints, each at its own path.
pub(super) const TORN: &[u8] = b"torn";
/// A file that is being made for a place in the tree.
const NEW: &[u8] = b"new";
/// Nodes removed in one hold of the lock.
const REMOVED_AT_ONCE: usize = 256;

/// A directory that the adapter shows in its virtual one; its name is looked up in `parent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HiddenDirectory {
    pub parent: NodeId,
    pub name: &'static [u8],
    pub node: NodeId,
}

/// Whether a path, relative to the mount, is hidden.
#[must_use]
pub fn is_hidden(path: &[u8]) -> bool {
    path.strip_prefix(HIDDEN).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// Returns where the torn checkpoint of a path lies.
#[must_use]
pub fn torn_path(path: &RelPath) -> Vec<u8> {
    [HIDDEN, TORN, path.as_bytes()].join(&b'/')
}

/// Returns the path that a torn checkpoint had in the tree.
#[must_use]
pub fn path_of_torn(hidden: &[u8]) -> Option<&[u8]> {
    hidden.strip_prefix(HIDDEN)?.strip_prefix(b"/")?.strip_prefix(TORN)?.strip_prefix(b"/")
}

/// Calls that hide names, or remove them from the tree, on the daemon's behalf.
#[derive(Debug, Clone, Copy)]
pub struct HiddenNames<'a> {
    pub(super) state: &'a Guarded,
    pub(super) namespace: &'a Namespace,
}

impl HiddenNames<'_> {
    /// Returns the directory of torn checkpoints, if there ever was one.
    #[must_use]
    pub fn torn_directory(&self) -> Option<HiddenDirectory> {
        let parent = NodeViews { state: self.state }.node_at(HIDDEN)?;
        let node = self.state.look(|state| state.tree.child(parent, TORN)).ok()?;
        Some(HiddenDirectory { parent, name: TORN, node })
    }

    /// Returns all hidden files with their hidden paths.
    #[must_use]
    pub fn torn_files(&self) -> Vec<FileView> {
        NodeViews { state: self.state }.views_below(&[HIDDEN, TORN].join(&b'/'))
    }

    /// Hides a name, whatever it stands for, and drops what was hidden under that name before. Files that are open stay
    /// so, and the directory keeps its times, because jobs rotate by them.
    ///
    /// # Errors
    /// [`FsError::NotFound`]; [`FsError::Io`] when the journal cannot be written.
    pub fn hide(&self, path: &RelPath) -> Result<(), FsError> {
        self.drop_torn(path)?;
        self.move_name(path.as_bytes(), &torn_path(path))?;
        self.tell_gone(path.as_bytes());
        Ok(())
    }

    /// Whether a process has a file open all of whose names are hidden.
    #[must_use]
    pub fn is_open_out_of_sight(&self, file: FileId) -> bool {
        self.state.look(|state| {
            let found = state
                .node_of(file, self.state.incarnation)
                .filter(|node| is_out_of_sight(&state.tree, *node));
            found.is_some_and(|node| {
                state.tree.node(node).and_then(|n| n.file()).is_ok_and(|file| file.opens > 0)
            })
        })
    }

    /// Puts a name back that [`HiddenNames::hide`] hid.
    ///
    /// # Errors
    /// [`FsError::NotFound`]; [`FsError::Exists`] when something has the name.
    pub fn show_again(&self, path: &RelPath) -> Result<(), FsError> {
        let hidden = torn_path(path);
        self.move_name(&hidden, path.as_bytes())?;
        self.tell_gone(&hidden);
        Ok(())
    }

    /// Drops what [`HiddenNames::hide`] hid under a name.
    ///
    /// # Errors
    /// [`FsError::Io`] when the journal cannot be written.
    pub fn drop_torn(&self, path: &RelPath) -> Result<(), FsError> {
        let hidden = torn_path(path);
        self.remove_below(&hidden)?;
        self.tell_gone(&hidden);
        Ok(())
    }

    /// Hides the file at `path`, and gives its name to a new, closed file with these bytes and the old file's mode and owner. A look-up
    /// finds one or the other.
    ///
    /// # Errors
    /// [`FsError::NoSpace`], [`FsError::NotFound`] for a name that is gone, [`FsError::ReadOnly`] at the end.
    pub fn replace(&self, path: &RelPath, bytes: &[u8]) -> Result<(), FsError> {
        let old = self
            .namespace
            .getattr(NodeViews { state: self.state }.node_at(path.as_bytes()).ok_or(FsError::NotFound)?)?;
        let now_ns = self.state.now_ns();
        let caller = Caller { uid: old.uid, gid: old.gid, now_ns, pid: 0, request: 0 };
        let parent = self.state.change(|state| state.tree.quietly().make_hidden(HIDDEN, now_ns))?;
        match self.namespace.names().unlink(&caller, parent, NEW) {
            Ok(()) | Err(FsError::NotFound) => {}
            Err(error) => return Err(error),
        }
        let (made, open) = self.namespace.create(&caller, parent, NEW, old.mode, WRITE_ONLY)?;
        let written =
            write_all(&open, bytes).and_then(|()| self.namespace.handles().flush(open.fh, &caller, false));
        let released = self.namespace.handles().release(open.fh);
        self.namespace.forget(made.node, 1);
        written.and(released)?;
        self.drop_torn(path)?;
        self.state.change(|state| {
            let to = state.tree.split(path.as_bytes())?;
            state.tree.quietly().move_name(path.as_bytes(), &torn_path(path), now_ns)?;
            state.tree.quietly().keeping_times(to.0, |tree| {
                let (new, _) = tree.rename((parent, NEW), to, true, now_ns)?;
                tree.renamed(new, now_ns);
                Ok(())
            })
        })?;
        self.tell_gone(path.as_bytes());
        Ok(())
    }

    /// Drops all hidden files that are not open: a save that waits for memory is worth more than a checkpoint that can
    /// never be complete.
    pub fn drop_hidden(&self) {
        let files = self.torn_files().len();
        if files == 0 {
            return;
        }
        let torn = [HIDDEN, TORN].join(&b'/');
        match self.remove_below(&torn) {
            Ok(()) => {
                self.tell_gone(&torn);
                tracing::warn!(
                    files,
                    "torn checkpoints that were out of sight were dropped: memory is short"
                );
            }
            Err(error) => tracing::error!(%error, "what is torn stays, although memory is short"),
        }
    }

    fn move_name(&self, from: &[u8], to: &[u8]) -> Result<(), FsError> {
        let now_ns = self.state.now_ns();
        self.state.change(|state| state.tree.quietly().move_name(from, to, now_ns))
    }

    /// Removes the node at a path and all below it, in slices of the lock. An open file goes with its last handle.
    fn remove_below(&self, path: &[u8]) -> Result<(), FsError> {
        let now_ns = self.state.now_ns();
        loop {
            let done = self.state.change(|state| {
                for _ in 0..REMOVED_AT_ONCE {
                    let Ok((parent, name)) = state.tree.split(path) else { return Ok(true) };
                    let Ok(top) = state.tree.child(parent, name) else { return Ok(true) };
                    let (mut at, mut entry) = (top, (parent, name.to_vec()));
                    while let Some((name, below)) = first_entry(&state.tree, at) {
                        entry = (at, name);
                        at = below;
                    }
                    let gone = if state.tree.node(at)?.is_directory() {
                        state.tree.rmdir(entry.0, &entry.1, now_ns)?
                    } else {
                        state.tree.unlink(entry.0, &entry.1, now_ns)?
                    };
                    state.tree.mark(gone);
                    state.forsake(gone);
                }
                Ok(false)
            })?;
            if done {
                return Ok(());
            }
        }
    }

    /// Notifies the kernel of a name that is gone, because the kernel remembers names for a while.
    fn tell_gone(&self, path: &[u8]) {
        let Some(told) = self.state.withdrawn.get() else { return };
        if let Ok((parent, name)) = self.state.look(|state| state.tree.split(path)) {
            told(parent, name, None);
        }
    }
}

/// Whether every name of a node is hidden.
pub(super) fn is_out_of_sight(tree: &Tree, node: NodeId) -> bool {
    let Ok(found) = tree.node(node) else { return false };
    found.links().filter_map(|link| tree.path(link)).all(|path| is_hidden(&path))
}

/// Returns the path of a name in a directory; none if it is hidden or the directory has no path.
pub(super) fn path_in(tree: &Tree, parent: NodeId, name: &[u8]) -> Option<Vec<u8>> {
    let path = if parent == ROOT {
        name.to_vec()
    } else {
        [&tree.path(tree.node(parent).ok()?.first_link()?)?, name].join(&b'/')
    };
    (!is_hidden(&path)).then_some(path)
}

pub(super) fn path_in_sight(tree: &Tree, id: NodeId) -> Option<Vec<u8>> {
    let node = tree.nodes.get(&id)?;
    node.links().filter_map(|link| tree.path(link)).find(|path| !is_hidden(path))
}

/// Whether a node has a name that programs see.
pub(super) fn is_in_sight(tree: &Tree, id: NodeId) -> bool {
    path_in_sight(tree, id).is_some()
}

pub(super) fn first_entry(tree: &Tree, node: NodeId) -> Option<(Vec<u8>, NodeId)> {
    let directory = tree.node(node).ok()?.directory().ok()?;
    directory.by_cookie.values().next().map(|entry| (entry.name.to_vec(), entry.node))
}

/// O_WRONLY of Linux.
const WRITE_ONLY: i32 = 1;

fn write_all(open: &OpenFile, bytes: &[u8]) -> Result<(), FsError> {
    let mut written = 0;
    while written < bytes.len() {
        match open.backing.write_at(&bytes[written..], written as u64)? {
            0 => return Err(FsError::NoSpace),
            more => written += more,
        }
    }
    Ok(())
}

impl State {
    /// Gives a file's bytes and names to a new node, which frees the file's identity for its earlier seal.
    ///
    /// [`FsError::Busy`] while it is open: then its handles need it as it is.
    pub(super) fn renew(&mut self, old: NodeId, own: Incarnation, now_ns: i64) -> Result<NodeId, FsError> {
        let id = self.tree.number();
        let node = self.tree.node(old)?;
        let file = node.file()?;
        if file.opens > 0 || file.busy {
            return Err(FsError::Busy);
        }
        let key = Candidate::of(old, file);
        let (identity, cut) = (FileId { incarnation: own, counter: FileCounter(id) }, file.fate.is_cut());
        let mut fresh = File::new(identity, Generation(id), file.backing.clone(), now_ns);
        fresh.size_bytes = file.size_bytes;
        fresh.writers.clone_from(&file.writers);
        (fresh.opened_ns, fresh.closed_ns, fresh.named_ns) = (file.opened_ns, file.closed_ns, file.named_ns);
        fresh.flushed_ns = file.flushed_ns;
        fresh.baseline_ns = file.baseline_ns;
        let fate = FileFate::found(None, SealNumber(0), cut, false, file.fate.is_vouched());
        fresh.fate = fate.found_renamed_cut(file.fate.is_renamed_cut());
        let body = Body::File(Box::new(fresh));
        let mut new = Node::new(node.ino, node.mode, node.uid, node.gid, node.ctime_ns, body);
        (new.atime_ns, new.mtime_ns) = (node.atime_ns, node.mtime_ns);
        self.reclaimable.remove(&key);
        self.tree.insert(id, new);
        self.tree.touched.writers.push(id);
        self.tree.move_names(old, id);
        // The bytes belong to the new node now.
        self.tree.file_mut(old)?.backing = None;
        self.tree.mark(old);
        self.tree.mark(id);
        self.forsake(old);
        Ok(id)
    }
}

//! The calls that make, move and list names.
//!
//! Owns: lookup and forget, mkdir, symlink, mknod, link, unlink, rmdir, rename, readlink, readdir.
//! Does not own: the structure they work on (`tree`), creating files (`open`).

use super::attr::{Attr, Kind, Special, attr};
use super::begun::Made;
use super::guarded::Guarded;
use super::handle::DirEntry;
use super::hidden::path_in;
use super::node::{Body, Link, Node};
use super::outgoing::attributes;
use super::session::Answer;
use super::tree::Tree;
use super::writer::WriterCache;
use super::{Caller, FsError, MAX_TARGET_BYTES, Namespace, NodeId};
use tidemark_protocol::cluster::wire::NameOperation;
use tidemark_protocol::file::FileEvent;
use tidemark_protocol::id::Generation;

/// rename(2): fail where the new name exists.
pub const RENAME_NOREPLACE: u32 = 1;
/// rename(2): swap the two.
pub const RENAME_EXCHANGE: u32 = 2;

/// Entries in one answer of readdir: more than fill the kernel's buffer, few enough to copy under the lock.
const READDIR_ENTRIES: usize = 1024;
/// The sgid bit: entries made in such a directory take its group, directories the bit too.
const SGID: u32 = 0o2000;

impl Namespace {
    /// Finds a name and counts that the kernel knows its node.
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::NotDirectory`], [`FsError::NameTooLong`], [`FsError::Stale`].
    pub fn lookup(&self, parent: NodeId, name: &[u8]) -> Result<Attr, FsError> {
        self.state.look(|state| {
            let id = state.tree.child(parent, name)?;
            let node = state.tree.node_mut(id)?;
            let attr = attr(id, node)?;
            node.lookups += 1;
            Ok(attr)
        })
    }

    /// Drops `count` of the kernel's look-ups of a node.
    pub fn forget(&self, node: NodeId, count: u64) {
        let forgotten = self.state.change(|state| {
            if let Ok(known) = state.tree.node_mut(node) {
                known.lookups = known.lookups.saturating_sub(count);
                // The kernel drops all its look-ups of a node at once.
                known.taken_up = false;
                state.release_unreachable(node);
            }
            Ok(())
        });
        if let Err(error) = forgotten {
            tracing::warn!(node, %error, "a forgotten node is still in the journal");
        }
    }

    /// # Errors
    /// [`FsError::Stale`] for an unknown node, [`FsError::Io`].
    pub fn getattr(&self, node: NodeId) -> Result<Attr, FsError> {
        self.state.look(|state| attr(node, state.tree.node(node)?))
    }
}

/// Calls that make, move and list names.
#[derive(Debug, Clone, Copy)]
pub struct NameCalls<'a> {
    pub(super) state: &'a Guarded,
    pub(super) writers: &'a WriterCache,
}

impl NameCalls<'_> {
    /// Makes a directory; counts the look-up.
    ///
    /// # Errors
    /// [`FsError::Exists`], [`FsError::NotFound`], [`FsError::NotDirectory`], [`FsError::NoSpace`] when the journal is full.
    pub fn mkdir(&self, caller: &Caller, parent: NodeId, name: &[u8], mode: u32) -> Result<Attr, FsError> {
        let maker = self.writers.identify(caller.pid);
        let body = Body::Directory(Box::default());
        let made = self.make(caller, parent, name, mode & body.mode_bits(), body)?;
        if let Some(maker) = maker {
            let made = Made { directory: made.node, maker, at_ns: caller.now_ns };
            self.state.look(|state| state.deeds.note_made(made));
        }
        Ok(made)
    }

    /// Makes a symlink; counts the look-up. The target is kept as it is.
    ///
    /// # Errors
    /// As [`NameCalls::mkdir`]; [`FsError::NameTooLong`] for a target over 4095 bytes, [`FsError::NotFound`] for an empty one.
    pub fn symlink(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &[u8],
        target: &[u8],
    ) -> Result<Attr, FsError> {
        if target.is_empty() {
            return Err(FsError::NotFound);
        }
        if target.len() > MAX_TARGET_BYTES {
            return Err(FsError::NameTooLong);
        }
        self.make(caller, parent, name, 0o777, Body::Symlink(target.into()))
    }

    /// Makes a pipe, a socket or a device; counts the look-up. The node exists on this node only: Tier-3 does not know it.
    ///
    /// # Errors
    /// As [`NameCalls::mkdir`].
    pub fn make_special(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &[u8],
        mode: u32,
        special: Special,
    ) -> Result<Attr, FsError> {
        let body = Body::Special(special);
        self.make(caller, parent, name, mode & body.mode_bits(), body)
    }

    fn make(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &[u8],
        mode: u32,
        body: Body,
    ) -> Result<Attr, FsError> {
        let limit = self.state.weight_limit();
        self.state.change(|state| {
            state.tree.check_free(parent, name)?;
            if state.tree.weight_bytes >= limit {
                return Err(FsError::NoSpace);
            }
            let (gid, sgid) = state.tree.node(parent)?.inherited(caller);
            let mode = if matches!(body, Body::Directory(_)) { mode | sgid } else { mode };
            let id = state.tree.number();
            let mut node = Node::new(id, mode, caller.uid, gid, caller.now_ns, body);
            node.lookups = 1;
            state.tree.insert(id, node);
            state.tree.attach(parent, name, id, caller.now_ns);
            state.outgoing.tell(|| made_operation(&state.tree, parent, name, id));
            state.outgoing.note_name(parent, name);
            state.tree.mark(id);
            state.session.answer(caller.request, Answer::Entered(id));
            attr(id, state.tree.node(id)?)
        })
    }

    /// Gives a node that is not a directory another name; counts the look-up.
    ///
    /// # Errors
    /// [`FsError::NotPermitted`] for a directory, [`FsError::Exists`], [`FsError::NotFound`] for a node without names.
    pub fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: &[u8]) -> Result<Attr, FsError> {
        let limit = self.state.weight_limit();
        self.state.change(|state| {
            if state.tree.weight_bytes >= limit {
                return Err(FsError::NoSpace);
            }
            let first = state.tree.node(node)?.first_link();
            state.tree.link(node, parent, name, caller.now_ns)?;
            state.outgoing.tell(|| {
                let (from, path) = (state.tree.path(first?)?, path_in(&state.tree, parent, name)?);
                Some(NameOperation::Linked { from, path, what: state.tree.node(node).ok()?.file_id() })
            });
            state.outgoing.note_name(parent, name);
            state.tree.named(node, caller.now_ns);
            state.session.answer(caller.request, Answer::Entered(node));
            let linked = state.tree.node_mut(node)?;
            linked.lookups += 1;
            attr(node, linked)
        })
    }

    /// Removes the name of a node that is not a directory. A file's bytes stay until the last handle is released.
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::IsDirectory`].
    pub fn unlink(&self, caller: &Caller, parent: NodeId, name: &[u8]) -> Result<(), FsError> {
        let sealed = self.state.look(|state| {
            let node = state.tree.child(parent, name).and_then(|node| state.tree.node(node));
            node.and_then(Node::file).ok()?.sealed_id()
        });
        let remover = sealed.and_then(|file| Some((file, self.writers.identify(caller.pid)?)));
        self.state.change(|state| {
            let node = state.tree.unlink(parent, name, caller.now_ns)?;
            state.outgoing.tell(|| {
                let what = state.tree.node(node).ok()?.file_id();
                Some(NameOperation::Removed { path: path_in(&state.tree, parent, name)?, what })
            });
            state.outgoing.note_name(parent, name);
            if let Some((file, remover)) = remover {
                state.deeds.note_remover(file, remover);
            }
            state.session.answer(caller.request, Answer::Done);
            state.tree.mark(node);
            state.took_name(node, self.state.incarnation);
            state.release_unreachable(node);
            Ok(())
        })
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`FsError::NotEmpty`], [`FsError::NotFound`], [`FsError::NotDirectory`].
    pub fn rmdir(&self, caller: &Caller, parent: NodeId, name: &[u8]) -> Result<(), FsError> {
        self.state.change(|state| {
            let node = state.tree.rmdir(parent, name, caller.now_ns)?;
            state.outgoing.tell(|| {
                Some(NameOperation::Removed { path: path_in(&state.tree, parent, name)?, what: None })
            });
            state.outgoing.note_name(parent, name);
            state.session.answer(caller.request, Answer::Done);
            state.tree.mark(node);
            state.release_unreachable(node);
            Ok(())
        })
    }

    /// Moves a name, replacing the node that has the new one; a directory in constant time, whatever it holds.
    ///
    /// # Errors
    /// As rename(2): [`FsError::Invalid`] for a loop or unknown flags, [`FsError::NotEmpty`], [`FsError::Exists`], ….
    pub fn rename(
        &self,
        caller: &Caller,
        from: (NodeId, &[u8]),
        to: (NodeId, &[u8]),
        flags: u32,
    ) -> Result<(), FsError> {
        self.state.change(|state| {
            let exchange = flags == RENAME_EXCHANGE;
            let told = state.outgoing.untold.as_ref().and_then(|_| moves(&state.tree, from, to, exchange));
            let replaced = match flags {
                0 | RENAME_NOREPLACE => {
                    let no_replace = flags == RENAME_NOREPLACE;
                    let (moved, replaced) = state.tree.rename(from, to, no_replace, caller.now_ns)?;
                    state.tree.renamed(moved, caller.now_ns);
                    replaced
                }
                RENAME_EXCHANGE => {
                    let (one, other) = state.tree.exchange(from, to, caller.now_ns)?;
                    state.tree.renamed(one, caller.now_ns);
                    state.tree.renamed(other, caller.now_ns);
                    None
                }
                _ => return Err(FsError::Invalid),
            };
            state.outgoing.tell(|| told);
            state.outgoing.note_name(from.0, from.1);
            state.outgoing.note_name(to.0, to.1);
            if let Some(replaced) = replaced {
                state.tree.mark(replaced);
                state.took_name(replaced, self.state.incarnation);
                state.release_unreachable(replaced);
            }
            state.session.answer(caller.request, Answer::Done);
            Ok(())
        })
    }

    /// # Errors
    /// [`FsError::Invalid`] for a node that is not a symlink.
    pub fn readlink(&self, node: NodeId) -> Result<Vec<u8>, FsError> {
        self.state.look(|state| state.tree.target(node))
    }

    /// # Errors
    /// [`FsError::NotDirectory`], [`FsError::Stale`].
    pub fn opendir(&self, node: NodeId) -> Result<(), FsError> {
        self.fsyncdir(node)
    }

    /// Entries after `cookie` (0: from the start), at most 1,024; none is the end. `.` and `..` are the
    /// adapter's, which may use the cookies 1 and 2 for them. An entry that stays is listed exactly once.
    ///
    /// # Errors
    /// [`FsError::NotDirectory`], [`FsError::Stale`].
    pub fn readdir(&self, node: NodeId, cookie: u64) -> Result<Vec<DirEntry>, FsError> {
        self.readdir_to(node, cookie, u64::MAX)
    }

    /// Returns where a listing that begins now ends: entries named later have a cookie beyond.
    ///
    /// # Errors
    /// [`FsError::NotDirectory`], [`FsError::Stale`].
    pub fn listing_end(&self, node: NodeId) -> Result<u64, FsError> {
        self.state.look(|state| Ok(state.tree.node(node)?.directory()?.next_cookie))
    }

    /// As [`NameCalls::readdir`], of the entries with cookies below `end` ([`NameCalls::listing_end`]).
    ///
    /// # Errors
    /// As [`NameCalls::readdir`].
    pub fn readdir_to(&self, node: NodeId, cookie: u64, end: u64) -> Result<Vec<DirEntry>, FsError> {
        self.state.look(|state| {
            let directory = state.tree.node(node)?.directory()?;
            let first = cookie.saturating_add(1);
            let after = first..end.max(first);
            let entries = directory.by_cookie.range(after);
            entries
                .filter(|(_, entry)| node != super::ROOT || *entry.name != *super::HIDDEN)
                .take(READDIR_ENTRIES)
                .map(|(cookie, entry)| {
                    let target = state.tree.node(entry.node)?;
                    let kind = match target.body {
                        Body::File(_) => Kind::File,
                        Body::Directory(_) => Kind::Directory,
                        Body::Symlink(_) => Kind::Symlink,
                        Body::Special(special) => Kind::Special(special),
                    };
                    let name = entry.name.to_vec();
                    Ok(DirEntry { name, node: entry.node, ino: target.ino, kind, cookie: *cookie })
                })
                .collect()
        })
    }

    /// A listing holds nothing but its cookie, so there is nothing to give back.
    pub fn releasedir(&self, _node: NodeId) {}

    /// The journal has the directory's entries already: each was journaled before its call returned.
    ///
    /// # Errors
    /// [`FsError::Stale`], [`FsError::NotDirectory`].
    pub fn fsyncdir(&self, node: NodeId) -> Result<(), FsError> {
        self.state.look(|state| state.tree.node(node)?.directory().map(|_| ()))
    }
}

impl Tree {
    pub(super) fn names_of(&self, node: NodeId) -> Vec<(NodeId, Vec<u8>)> {
        let Ok(found) = self.node(node) else { return Vec::new() };
        let name = |link: Link| Some((link.parent, self.entry_at(link)?.name.to_vec()));
        found.links().filter_map(name).collect()
    }

    /// Notes that a rename named a node: a file's bytes are meant to be whole, and so are those of the files in a directory.
    pub(super) fn renamed(&mut self, node: NodeId, now_ns: i64) {
        if let Ok(file) = self.file_mut(node) {
            file.happens(FileEvent::Vouched);
        } else if let Ok(Body::Directory(directory)) = self.node_mut(node).map(|node| &mut node.body) {
            directory.renamed_ns = now_ns;
        }
        self.named(node, now_ns);
    }

    /// Notes that a node has a new name: it is the newest that this path names. A link does not vouch for the bytes: a backup also links
    /// files that are still being written.
    pub(super) fn named(&mut self, node: NodeId, now_ns: i64) {
        let generation = Generation(self.number());
        if let Ok(file) = self.file_mut(node) {
            file.generation = generation;
            file.named_ns = now_ns;
        }
        self.touched.node(node);
        self.mark(node);
    }
}
/// Returns the operation that describes a node that was just made.
pub(super) fn made_operation(tree: &Tree, parent: NodeId, name: &[u8], id: NodeId) -> Option<NameOperation> {
    let node = tree.node(id).ok()?;
    let (path, attributes) = (path_in(tree, parent, name)?, attributes(node));
    match &node.body {
        Body::Directory(_) => Some(NameOperation::Directory { path, attributes }),
        Body::Symlink(target) => Some(NameOperation::Symlink { path, target: target.to_vec(), attributes }),
        Body::File(file) => Some(NameOperation::File { path, file: file.id, attributes }),
        Body::Special(_) => None,
    }
}

/// Returns the operation that describes a rename, before it is carried out: the paths are as they were.
fn moves(tree: &Tree, from: (NodeId, &[u8]), to: (NodeId, &[u8]), exchange: bool) -> Option<NameOperation> {
    let what = tree.child(from.0, from.1).and_then(|node| tree.node(node)).ok()?.file_id();
    let (from, to) = (path_in(tree, from.0, from.1)?, path_in(tree, to.0, to.1)?);
    Some(NameOperation::Renamed { from, to, exchange, what })
}

impl Node {
    /// Returns the group and the sgid bit for entries made in this directory.
    pub(super) fn inherited(&self, caller: &Caller) -> (u32, u32) {
        let sgid = self.mode & SGID;
        (if sgid == 0 { caller.gid } else { self.gid }, sgid)
    }
}

//! Opening: creating files, and what O_TRUNC, appending and updating mean for bytes that are frozen.
//!
//! Owns: create, open, and the choice between changing bytes in place, a new backing file and a new node.
//! Does not own: which thread was sent back to the names (`stale`), truncation by size (`resize`), fetching (`cold`).
//!
//! A FUSE inode has one backing file while any handle is open. So where old handles must keep the old bytes, the
//! open is answered ESTALE and changes nothing. The kernel looks the name up again, and that look-up gives the names to a
//! new node with the same inode number (`stale`). An open that comes back without a look-up has no name: it came by
//! `/proc/self/fd` or by a handle. There the bytes are changed where they are, as on every file system.

use super::attr::{Attr, attr_of_new, observe, rebase};
use super::cold::ColdFile;
use super::file::File;
use super::guarded::own_file;
use super::handle::OpenFile;
use super::names::made_operation;
use super::node::{Body, Node};
use super::reclaim::Candidate;
use super::session::Answer;
use super::stale::{Patience, Spared};
use super::{Caller, FILE_MODE_BITS, FsError, Namespace, NodeId, State};
use std::sync::{Arc, Weak};
use tidemark_protocol::file::FileEvent;
use tidemark_protocol::id::{FileId, Generation, Incarnation};
use tidemark_tier1::Backing;

/// Outcome of an open.
#[derive(Debug)]
pub enum OpenOutcome {
    Ready(OpenFile),
    /// The bytes are elsewhere: fetch them, then call [`Namespace::finish_cold_open`].
    Cold(ColdFile),
    /// The bytes lay here while no daemon was running: verify them, then open again.
    Unverified,
}

/// O_ACCMODE, O_WRONLY, O_TRUNC and O_EXCL of Linux, and what the kernel sets in an open for execve(2).
const ACCESS_MODE: i32 = 0o3;
const WRITE_ONLY: i32 = 0o1;
const TRUNCATE: i32 = 0o1000;
const EXCLUSIVE: i32 = 0o200;
const EXECUTES: i32 = 0o40;

/// How bytes are prepared for a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// In this backing file.
    InPlace,
    /// In a new backing file of the same node, with the first `keep_bytes` of the old one.
    NewBacking { keep_bytes: u64 },
    /// In a new node that takes the names.
    NewNode { keep_bytes: u64 },
}

impl File {
    /// Returns how to make a change of a file of `size_bytes` that keeps `kept` of them.
    pub(super) fn change(&self, size_bytes: u64, kept: Spared) -> Change {
        let keep_bytes = kept.of(size_bytes);
        // An empty file has no bytes to lose, and often exists only to be locked.
        let emptied = keep_bytes == 0 && size_bytes > 0;
        let frozen = self.is_held() || (self.fate.seal().is_some() && emptied);
        match (frozen, self.opens) {
            _ if self.backing.is_none() => Change::NewBacking { keep_bytes: 0 },
            (false, _) => Change::InPlace,
            (true, 0) => Change::NewBacking { keep_bytes },
            (true, _) => Change::NewNode { keep_bytes },
        }
    }
}

impl Namespace {
    /// Creates and opens a file; counts the look-up. Where the name exists: refused with O_EXCL, opened without.
    /// Costs the pool's hand-out of a backing file and one journal record.
    ///
    /// # Errors
    /// [`FsError::ReadOnly`] once the daemon is ending; [`FsError::Exists`], [`FsError::NoSpace`], [`FsError::NotFound`],
    /// [`FsError::NotDirectory`], [`FsError::NameTooLong`]; [`FsError::Stale`] for an existing name whose bytes are elsewhere: the kernel
    /// then opens it.
    pub fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &[u8],
        mode: u32,
        flags: i32,
    ) -> Result<(Attr, OpenFile), FsError> {
        let path = {
            let state = self.state.lock();
            match state.tree.check_free(parent, name) {
                Ok(()) => {}
                Err(FsError::Exists) if flags & EXCLUSIVE == 0 => {
                    drop(state);
                    return self.open_existing(caller, parent, name, flags);
                }
                Err(error) => return Err(error),
            }
            if self.gate.is_closed() {
                return Err(FsError::ReadOnly);
            }
            if state.tree.weight_bytes >= self.state.weight_limit() {
                return Err(FsError::NoSpace);
            }
            let mut path = match state.tree.nodes.get(&parent).and_then(|node| node.first_link()) {
                Some(link) => state.tree.path(link).unwrap_or_default(),
                None => Vec::new(),
            };
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name);
            path
        };
        let backing = self.room().new_backing(self.overwrites().predict(&path))?;
        let writable = flags & ACCESS_MODE != 0;
        let writer = if writable { self.writers.opens(caller) } else { None };
        let mut backing = Some(backing);
        let made = self.state.change(|state| {
            state.tree.check_free(parent, name)?;
            let (gid, _) = state.tree.node(parent)?.inherited(caller);
            let id = state.tree.number();
            let mut file = File::new(self.state.file_id(id), Generation(id), backing.take(), caller.now_ns);
            file.add_writer(writer.as_ref());
            let mut node = Node::new(
                id,
                mode & FILE_MODE_BITS,
                caller.uid,
                gid,
                caller.now_ns,
                Body::File(Box::new(file)),
            );
            node.lookups = 1;
            state.tree.insert(id, node);
            state.tree.touched.writers.push(id);
            let open = state.open_handle(id, writable, caller.now_ns);
            let open = open.inspect_err(|_| {
                state.tree.free(id);
            })?;
            state.handles.made(open.fh);
            state.tree.attach(parent, name, id, caller.now_ns);
            state.outgoing.tell(|| made_operation(&state.tree, parent, name, id));
            state.outgoing.note_name(parent, name);
            state.tree.mark(id);
            state.session.answer(caller.request, Answer::Created(id, open.fh));
            Ok((attr_of_new(id, state.tree.node(id)?), open))
        });
        match made {
            Err(FsError::Exists) if flags & EXCLUSIVE == 0 => self.open_existing(caller, parent, name, flags),
            made => made,
        }
    }

    /// Makes an empty file that nobody has open, as open(2) with O_CREAT and O_EXCL for writing and close(2) do; counts the look-up.
    /// Costs what these cost.
    ///
    /// # Errors
    /// As [`Namespace::create`], and then nothing was made; [`FsError::Io`] once the daemon keeps nothing more.
    pub fn make_file(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &[u8],
        mode: u32,
    ) -> Result<Attr, FsError> {
        let (made, open) = self.create(caller, parent, name, mode, WRITE_ONLY | EXCLUSIVE)?;
        if let Err(error) = self.handles().close(open.fh) {
            self.forget(made.node, 1);
            if let Err(kept) = self.handles().take_back(open.fh) {
                tracing::warn!(fh = open.fh, error = %kept, "a file that was not to be made could not be taken back");
            }
            return Err(error);
        }
        Ok(made)
    }

    fn open_existing(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &[u8],
        flags: i32,
    ) -> Result<(Attr, OpenFile), FsError> {
        let found = self.lookup(parent, name)?;
        let opened = self.open(caller, found.node, flags).and_then(|outcome| match outcome {
            OpenOutcome::Ready(open) => Ok(open),
            OpenOutcome::Cold(_) | OpenOutcome::Unverified => Err(FsError::Stale),
        });
        match opened {
            Ok(open) => Ok((self.getattr(found.node)?, open)),
            Err(error) => {
                self.forget(found.node, 1);
                Err(error)
            }
        }
    }

    /// Opens a file. O_TRUNC of unsealed bytes happens in place; of sealed ones in a new backing file, or, with handles open, in a new
    /// node. Opening for append or update withdraws the seal; while the seal's bytes are being hashed or uploaded they are copied first,
    /// and the copy's cost is in this call. A failed open has changed nothing. A file that is overwritten may lack room for its former
    /// size ([`OpenFile::awaits_bytes`]).
    ///
    /// # Errors
    /// [`FsError::Stale`] once where the name is to be looked up again ([`Namespace::lookup_by`]); [`FsError::IsDirectory`],
    /// [`FsError::NoSpace`]; [`FsError::Running`] for O_RDONLY with O_TRUNC of a program that runs;
    /// [`FsError::Busy`] when another call changes these bytes for longer than a minute, or where there is no name to look up
    /// and an upload has read them for ten seconds.
    pub fn open(&self, caller: &Caller, node: NodeId, flags: i32) -> Result<OpenOutcome, FsError> {
        let writable = flags & ACCESS_MODE != 0;
        let truncates = flags & TRUNCATE != 0;
        if !writable && !truncates {
            let opened = self.open_for_reading(caller, node)?;
            if let (true, OpenOutcome::Ready(open)) = (flags & EXECUTES != 0, &opened) {
                self.state.look(|state| state.handles.runs(open.fh, open.node));
            }
            return Ok(opened);
        }
        let writer = self.writers.opens(caller);
        let kept = if truncates { Spared::First(0) } else { Spared::All };
        let mut patience = Patience::begin(caller.pid, kept);
        let (size_bytes, mut change, old) = loop {
            let mut state = self.state.settle(node)?;
            if !patience.is_nameless() {
                let State { tree, stale, .. } = &mut *state;
                stale.send_back_if_forsaken(node, tree.node(node)?, caller.pid)?;
            }
            let target = state.tree.node(node)?;
            let file = target.file()?;
            if !writable && state.handles.is_running(node) {
                // With O_RDONLY|O_TRUNC the kernel checks only after our truncation whether a program runs from the file.
                return Err(FsError::Running);
            }
            if target.link_count() == 0 && file.is_lost() && !truncates {
                return Err(FsError::Stale);
            }
            if file.backing.is_none() && !truncates && file.size_bytes > 0 {
                return Ok(OpenOutcome::Cold(ColdFile::of(node, file)));
            }
            if file.unverified && !truncates {
                return Ok(OpenOutcome::Unverified);
            }
            let size_bytes = observe(target, file)?.size_bytes;
            let change = file.change(size_bytes, kept);
            let Some((mut state, change)) =
                self.overwrites().without_new_node(state, node, change, &mut patience)?
            else {
                continue;
            };
            let file = state.tree.file_mut(node)?;
            file.busy = true;
            // If no program has the file open, it may be recreated elsewhere.
            break (size_bytes, change, file.backing.clone().filter(|_| file.opens == 0));
        };
        // An overwritten file becomes about as large as before, or as its name was the last time.
        let expected_bytes =
            if truncates { self.overwrites().expected_bytes(node).max(size_bytes) } else { 0 };
        if let (true, Change::InPlace, Some(old)) = (truncates && self.tier1.has_spill(), change, &old)
            && !old.is_spilled()
            && (self.tier1.is_outgrown(Some(expected_bytes))
                || self.tier1.admit(expected_bytes.saturating_sub(old.held_bytes())).is_err())
        {
            change = Change::NewBacking { keep_bytes: 0 };
        }
        // Another owner of these bytes would keep their memory, for which `reserve` waits below.
        drop(old);
        if change == Change::InPlace && truncates {
            // Before a byte is touched: a daemon that dies in between must not leave a seal over other bytes.
            self.state.change(|state| state.withdraw_seal(node, self.state.file_id(node)))?;
        }
        let prepared = if truncates && change != Change::InPlace {
            self.overwrites().prepare_overwrite(expected_bytes)
        } else {
            self.overwrites().prepare(node, change, if truncates { 0 } else { size_bytes }, size_bytes)
        };
        let mut opened = self.state.change(|state| {
            state.apply_change(
                self.state.incarnation,
                node,
                change,
                prepared,
                truncates.then_some(0),
                caller.now_ns,
            )?;
            state.stale.settle(caller.pid, node);
            if writable {
                let file = state.tree.file_mut(node)?;
                if truncates {
                    file.writers.clear();
                    file.happens(FileEvent::Emptied);
                }
                if file.add_writer(writer.as_ref()) || truncates {
                    state.tree.touched.writers.push(node);
                }
            }
            state.open_for(caller, node, writable)
        })?;
        // The replaced bytes are released only now, and are often the room that the new ones need.
        if writable && expected_bytes > 0 && opened.backing.reserve(expected_bytes).is_err() {
            opened.awaits_bytes = expected_bytes;
        }
        Ok(OpenOutcome::Ready(opened))
    }

    fn open_for_reading(&self, caller: &Caller, node: NodeId) -> Result<OpenOutcome, FsError> {
        let here = {
            let mut state = self.state.settle(node)?;
            let State { tree, stale, .. } = &mut *state;
            stale.send_back_if_forsaken(node, tree.node(node)?, caller.pid)?;
            let target = state.tree.node(node)?;
            let file = target.file()?;
            if file.is_lost() && target.link_count() == 0 {
                return Err(FsError::Stale);
            }
            if file.backing.is_none() && file.size_bytes > 0 {
                return Ok(OpenOutcome::Cold(ColdFile::of(node, file)));
            }
            if file.unverified {
                return Ok(OpenOutcome::Unverified);
            }
            file.backing.is_some()
        };
        // Nothing to fetch: an empty file gets an empty backing file.
        let mut empty = if here { None } else { Some(self.room().new_backing(Some(0))?) };
        let opened = self.state.change(|state| {
            let file = state.tree.file_mut(node)?;
            // The file was reclaimed, or a change of it began, between the two holds of the lock.
            if file.busy || (file.backing.is_none() && file.size_bytes > 0) {
                return Ok(None);
            }
            if file.backing.is_none() {
                file.backing = empty.take();
                state.tree.touched.node(node);
            }
            state.open_for(caller, node, false).map(Some)
        })?;
        match opened {
            Some(open) => {
                self.readers.opened(caller.pid, node);
                Ok(OpenOutcome::Ready(open))
            }
            None => self.open_for_reading(caller, node),
        }
    }
}

impl State {
    /// Withdraws the seal of a file whose bytes are about to be changed in place.
    pub(super) fn withdraw_seal(&mut self, node: NodeId, own: FileId) -> Result<(), FsError> {
        let file = self.tree.file_mut(node)?;
        if file.fate.seal().is_none() {
            return Ok(());
        }
        let (key, old_id) = (Candidate::of(node, file), file.id);
        file.unseal(own);
        self.reclaimable.remove(&key);
        self.takes(node, old_id, own);
        self.tree.touched.node(node);
        self.tree.mark(node);
        Ok(())
    }

    /// Notes that the names of `node` meant the file `from` until now, and mean `own` from now on.
    fn takes(&mut self, node: NodeId, from: FileId, own: FileId) {
        if from == own {
            return;
        }
        if let Some(removed) = self.removed.as_mut().filter(|_| from.incarnation != own.incarnation) {
            removed.note(from);
        }
        self.identities.remove(from, node);
        self.outgoing.tell_taken(&self.tree, node, from, own);
    }

    /// Ends what `prepare` began: takes the busy mark away, and on success makes the new bytes the node's (or a
    /// new node's, which is returned). `new_size_bytes` is set where the caller truncates.
    pub(super) fn apply_change(
        &mut self,
        own: Incarnation,
        node: NodeId,
        change: Change,
        prepared: Result<Option<Arc<Backing>>, FsError>,
        new_size_bytes: Option<u64>,
        now_ns: i64,
    ) -> Result<NodeId, FsError> {
        self.waiters.woken = true;
        let own_id = own_file(own, node);
        let file = self.tree.file_mut(node)?;
        file.busy = false;
        let fresh = match prepared {
            Ok(fresh) => fresh,
            Err(error) => {
                self.release_unreachable(node);
                return Err(error);
            }
        };
        if let (Change::NewNode { .. }, Some(fresh)) = (change, &fresh) {
            return self.supersede(own, node, Arc::clone(fresh), now_ns);
        }
        let file = self.tree.file_mut(node)?;
        let key = Candidate::of(node, file);
        let old_id = file.id;
        file.unseal(own_id);
        let replaced = fresh.is_some();
        if let Some(fresh) = fresh {
            let old = file.backing.replace(fresh);
            file.hold = Weak::new(); // Whoever holds the old bytes has them; the new ones are nobody's yet.
            self.trash.extend(old);
        }
        self.reclaimable.remove(&key);
        self.takes(node, old_id, own_id);
        let target = self.tree.node_mut(node)?;
        let size_bytes = target.file()?.backing.as_ref().ok_or(FsError::Stale)?.stat()?.size_bytes;
        if new_size_bytes.is_some() {
            target.mtime_ns = now_ns;
            target.ctime_ns = now_ns;
        }
        if replaced || new_size_bytes.is_some() {
            // Otherwise another writer's changes may be in the backing file's clock, and stay news.
            rebase(target, size_bytes)?;
        }
        self.tree.touched.node(node);
        self.tree.mark(node);
        Ok(node)
    }

    /// Gives the names of `old` to a new node with the same inode number and `fresh` for its bytes.
    fn supersede(
        &mut self,
        own: Incarnation,
        old: NodeId,
        fresh: Arc<Backing>,
        now_ns: i64,
    ) -> Result<NodeId, FsError> {
        let id = self.tree.number();
        let size_bytes = fresh.stat()?.size_bytes;
        let replaced = self.tree.node_mut(old)?;
        replaced.overwritten = true;
        replaced.forsaken = true;
        let mut file = File::new(own_file(own, id), Generation(id), Some(fresh), now_ns);
        file.size_bytes = size_bytes;
        let mut node = Node::new(
            replaced.ino,
            replaced.mode,
            replaced.uid,
            replaced.gid,
            now_ns,
            Body::File(Box::new(file)),
        );
        node.atime_ns = replaced.atime_ns;
        node.overwritten = true;
        node.xattrs = replaced.xattrs.clone();
        if let Some(xattrs) = &node.xattrs {
            self.tree.touched.xattrs.extend(xattrs.names().map(|name| (id, name)));
        }
        rebase(&mut node, size_bytes)?;
        self.tree.insert(id, node);
        self.tree.move_names(old, id);
        let from = self.tree.file_mut(old)?.id;
        // The old bytes are still open under the old identity.
        self.outgoing.tell_taken(&self.tree, id, from, own_file(own, id));
        self.tree.mark(old);
        self.tree.mark(id);
        self.release_unreachable(old);
        Ok(id)
    }
}

//! Handles: open files and their callers.
//!
//! Owns: handle numbers, open counts, FLUSH and RELEASE, fsync, fallocate.
//! Does not own: opening (`open`), what a closed file becomes next (`seal`).

use super::attr::{Kind, freeze, measure_from_now, measure_writer};
use super::guarded::Guarded;
use super::node::Body;
use super::session::Answer;
use super::{Caller, FsError, Namespace, NodeId, State};
use std::collections::BTreeMap;
use std::sync::Arc;
use tidemark_protocol::file::FileEvent;
use tidemark_tier1::Backing;

/// An open file: what a read, a write or a mapping needs.
#[derive(Debug, Clone)]
pub struct OpenFile {
    pub fh: u64,
    pub backing: Arc<Backing>,
    pub writable: bool,
    pub node: NodeId,
    /// Number of bytes that a file which is saved over is expected to reach, if there was no room for them; 0 otherwise. See
    /// [`HostRoom::wait_for_expected`](super::HostRoom::wait_for_expected).
    pub awaits_bytes: u64,
}

/// An entry of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    pub name: Vec<u8>,
    pub node: NodeId,
    pub ino: u64,
    pub kind: Kind,
    /// Cookie to pass back in order to go on after this entry.
    pub cookie: u64,
}

/// Figures of statfs(2); sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statfs {
    pub size_bytes: u64,
    pub free_bytes: u64,
    pub nodes: u64,
    pub nodes_free: u64,
}

/// How the last FLUSH of a handle was, if there was one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closing {
    Unseen,
    Closed,
    Cut,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handle {
    pub(super) node: NodeId,
    pub(super) writable: bool,
    pub(super) closing: Closing,
    /// When the last FLUSH came; before the first, when the handle was opened.
    pub(super) flushed_ns: i64,
}

/// All open handles. A handle's backing file is its node's, and does not change while a handle is open.
#[derive(Debug, Default)]
pub(super) struct HandleTable {
    open: BTreeMap<u64, Handle>,
    last: u64,
    /// The handles that programs run from, with their nodes; nearly always empty.
    running: Vec<(u64, NodeId)>,
    /// The latest handles that were made together with their files.
    made: Made,
}

/// Handles remembered as made with their files: more than there are threads that answer a create.
const MADE_KEPT: usize = 64;

#[derive(Debug)]
struct Made([u64; MADE_KEPT]);

impl Default for Made {
    fn default() -> Self {
        Self([0; MADE_KEPT])
    }
}

impl Made {
    fn place(fh: u64) -> usize {
        usize::try_from(fh % MADE_KEPT as u64).expect("below 64")
    }
}

impl HandleTable {
    /// Notes a handle that execve(2) opened. The kernel keeps it until the program ends.
    pub(super) fn runs(&mut self, fh: u64, node: NodeId) {
        self.running.push((fh, node));
    }

    /// Notes that a handle was made together with its file.
    pub(super) fn made(&mut self, fh: u64) {
        self.made.0[Made::place(fh)] = fh;
    }

    /// Whether a handle is known to have been made with its file; only for the latest.
    fn has_made(&self, fh: u64) -> bool {
        self.made.0[Made::place(fh)] == fh
    }

    pub(super) fn is_running(&self, node: NodeId) -> bool {
        self.running.iter().any(|(_, running)| *running == node)
    }
}

impl State {
    /// Counts an open and gives it a number. The bytes must be here.
    pub(super) fn open_handle(
        &mut self,
        node: NodeId,
        writable: bool,
        now_ns: i64,
    ) -> Result<OpenFile, FsError> {
        if writable && self.tree.file_mut(node)?.fate.writers() == 0 {
            measure_writer(self.tree.node_mut(node)?, now_ns)?;
        }
        let file = self.tree.file_mut(node)?;
        let backing = Arc::clone(file.backing.as_ref().ok_or(FsError::Stale)?);
        file.opens += 1;
        file.kept_until = None;
        if writable {
            if file.fate.writers() == 0 {
                file.opened_ns = now_ns;
                backing.begin_growth();
            }
            file.happens(FileEvent::WriterOpened);
            file.changes += 1;
            self.tree.touched.node(node);
            self.tree.mark(node);
        }
        self.handles.last += 1;
        let fh = self.handles.last;
        self.handles.open.insert(fh, Handle { node, writable, closing: Closing::Unseen, flushed_ns: now_ns });
        self.session.touched.handles.insert(fh);
        Ok(OpenFile { fh, backing, writable, node, awaits_bytes: 0 })
    }

    /// Opens a handle for a request, and notes the handle as the request's answer.
    pub(super) fn open_for(
        &mut self,
        caller: &Caller,
        node: NodeId,
        writable: bool,
    ) -> Result<OpenFile, FsError> {
        let open = self.open_handle(node, writable, caller.now_ns)?;
        self.session.answer(caller.request, Answer::Opened(open.fh));
        Ok(open)
    }
}

impl HandleTable {
    pub(super) fn numbers(&self) -> Vec<u64> {
        self.open.keys().copied().collect()
    }

    pub(super) fn get(&self, fh: u64) -> Option<Handle> {
        self.open.get(&fh).copied()
    }

    /// Recovers a journaled handle.
    pub(super) fn put(&mut self, fh: u64, handle: Handle) {
        self.last = self.last.max(fh);
        self.open.insert(fh, handle);
    }

    /// Reserves all numbers up to this one, so that none is assigned again.
    pub(super) fn given(&mut self, fh: u64) {
        self.last = self.last.max(fh);
    }
}

/// Calls on open files.
#[derive(Debug, Clone, Copy)]
pub struct HandleCalls<'a> {
    pub(super) state: &'a Guarded,
    pub(super) namespace: &'a Namespace,
}

impl HandleCalls<'_> {
    /// Returns the file that a handle opened, for an adapter that serves reads and writes itself.
    pub fn handle(&self, fh: u64) -> Option<OpenFile> {
        self.state.look(|state| {
            let handle = state.handles.open.get(&fh)?;
            let file = state.tree.node(handle.node).ok()?.file().ok()?;
            let backing = Arc::clone(file.backing.as_ref()?);
            Some(OpenFile { fh, backing, writable: handle.writable, node: handle.node, awaits_bytes: 0 })
        })
    }

    /// Handles the close of one of the handle's descriptors; `cut` when the kernel closed it for a process being
    /// killed.
    ///
    /// # Errors
    /// [`FsError::BadHandle`]; [`FsError::Io`] once the daemon keeps nothing more.
    pub fn flush(&self, fh: u64, caller: &Caller, cut: bool) -> Result<(), FsError> {
        self.state.change(|state| {
            let handle = state.handles.open.get_mut(&fh).ok_or(FsError::BadHandle)?;
            // Checked under the lock: a caller that looks after writers were refused sees every answer given before.
            if handle.writable && self.namespace.gate.are_writers_refused() {
                return Err(FsError::Io);
            }
            handle.closing = if cut { Closing::Cut } else { Closing::Closed };
            handle.flushed_ns = caller.now_ns;
            if handle.writable {
                let node = handle.node;
                state.session.touched.handles.insert(fh);
                // RELEASE may come only after another node has asked for the size, and close-to-open must hold over
                // nodes.
                state.outgoing.tell_size(node);
            }
            Ok(())
        })
    }

    /// Closes a handle that no program got as a program would: its file stays, closed.
    ///
    /// # Errors
    /// [`FsError::BadHandle`]; [`FsError::Io`] once the daemon keeps nothing more.
    pub fn close(&self, fh: u64) -> Result<(), FsError> {
        self.flush(fh, &self.nobody(), false)?;
        self.release(fh)
    }

    /// Undoes an open that no program got. No byte was written through the handle, so it leaves no cut file. A file that was made for it is
    /// removed, since a failed open changes nothing.
    ///
    /// # Errors
    /// [`FsError::BadHandle`].
    pub fn take_back(&self, fh: u64) -> Result<(), FsError> {
        let made = self.state.change(|state| {
            let handle = state.handles.open.get_mut(&fh).ok_or(FsError::BadHandle)?;
            handle.closing = Closing::Closed;
            let node = handle.node;
            state.session.touched.handles.insert(fh);
            let target = state.tree.node(node)?;
            let only_ours = target.link_count() == 1 && target.file().is_ok_and(|file| file.opens == 1);
            let name = target.first_link().filter(|_| only_ours && state.handles.has_made(fh));
            Ok(name.and_then(|link| Some((link.parent, state.tree.entry_at(link)?.name.to_vec()))))
        })?;
        self.release(fh)?;
        let Some((parent, name)) = made else { return Ok(()) };
        self.namespace.names().unlink(&self.nobody(), parent, &name)
    }

    /// Returns the daemon itself as the caller, now.
    fn nobody(&self) -> Caller {
        Caller { uid: 0, gid: 0, pid: 0, now_ns: self.state.now_ns(), request: 0 }
    }

    /// Handles the loss of the handle's last descriptor. The last writer's release makes the file closed. If its last
    /// FLUSH came from a process being killed, or never came, the file becomes cut: an unseen close does not count.
    ///
    /// # Errors
    /// [`FsError::BadHandle`].
    pub fn release(&self, fh: u64) -> Result<(), FsError> {
        let now_ns = self.state.now_ns();
        let mut closed = None;
        let released = self.state.change(|state| {
            let handle = state.handles.open.remove(&fh).ok_or(FsError::BadHandle)?;
            state.session.touched.handles.insert(fh);
            state.handles.running.retain(|(running, _)| *running != fh);
            let node = state.tree.node_mut(handle.node)?;
            if let Body::File(file) = &mut node.body {
                file.opens -= 1;
                if handle.writable && file.fate.writers() == 1 {
                    // While the last writer still counts, the backing file's clock holds.
                    if let Err(error) = freeze(node) {
                        tracing::error!(node = handle.node, %error, "times of a closed file kept as they were");
                    }
                }
            }
            let file = state.tree.file_mut(handle.node)?;
            if handle.writable {
                let cut = handle.closing != Closing::Closed;
                file.happens(FileEvent::WriterReleased { cut });
                // close(2) waits for FLUSH and not for RELEASE: of two files closed one after the other, the second may
                // be released first, and an index must not seem older than what it lists.
                file.flushed_ns = file.flushed_ns.max(if cut { now_ns } else { handle.flushed_ns });
                if file.fate.writers() == 0 {
                    file.closed_ns = now_ns;
                    file.changes += 1;
                    if let Some(backing) = &file.backing {
                        backing.end_growth();
                        closed = Some(Arc::clone(backing));
                    }
                    state.tree.mark(handle.node);
                }
                // A cut stays, whatever other writers do, and after a daemon takes them over.
                state.tree.touched.node(handle.node);
            }
            state.waiters.woken = true;
            state.release_unreachable(handle.node);
            Ok(())
        });
        // Gives the space made ready beyond the end back at once and not at the seal: a burst of small files must not
        // fill Tier-1. If a writer came meanwhile, it keeps the space, and the trim is refused.
        if let Some(backing) = closed
            && let Err(error) = backing.trim()
            && error.kind() != std::io::ErrorKind::ResourceBusy
        {
            tracing::warn!(%error, "the surplus of a closed file was not given back");
        }
        released
    }

    /// Waits until the journal has all changes of this handle's file. A return does not mean that the file is whole:
    /// trainers sync in the middle of a write.
    ///
    /// # Errors
    /// [`FsError::BadHandle`]; [`FsError::Io`] when the journal failed, and once the daemon keeps nothing more.
    pub fn fsync(&self, fh: u64) -> Result<(), FsError> {
        self.state.change(|state| {
            let handle = state.handles.open.get(&fh).ok_or(FsError::BadHandle)?;
            if handle.writable && self.namespace.gate.are_writers_refused() {
                Err(FsError::Io)
            } else {
                Ok(())
            }
        })
    }

    /// fallocate(2) on a writable handle. Modes besides 0, KEEP_SIZE, PUNCH_HOLE and ZERO_RANGE are unsupported.
    ///
    /// # Errors
    /// [`FsError::BadHandle`], [`FsError::Unsupported`], [`FsError::NoSpace`], [`FsError::NeverFits`], [`FsError::TooBig`],
    /// [`FsError::Invalid`].
    pub fn fallocate(
        &self,
        caller: &Caller,
        fh: u64,
        mode: u32,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<(), FsError> {
        let flags = rustix::fs::FallocateFlags::from_bits_truncate(mode);
        if mode & !SUPPORTED_MODES != 0 {
            return Err(FsError::Unsupported);
        }
        let end = offset_bytes.checked_add(len_bytes).ok_or(FsError::TooBig)?;
        if len_bytes == 0 {
            return Err(FsError::Invalid);
        }
        if mode & PUNCH_HOLE == 0 {
            self.namespace.room().could_hold(end, len_bytes)?;
        } else if i64::try_from(end).is_err() {
            return Err(FsError::TooBig);
        }
        let open = self.handle(fh).filter(|open| open.writable).ok_or(FsError::BadHandle)?;
        self.state.change(|state| freeze_times(state, open.node))?;
        if mode & PUNCH_HOLE != 0 {
            open.backing.punch(offset_bytes, len_bytes)?;
        } else {
            open.backing.allocate(flags, offset_bytes, len_bytes)?;
        }
        self.state.change(|state| {
            let node = state.tree.node_mut(open.node)?;
            measure_from_now(node)?;
            node.mtime_ns = caller.now_ns;
            node.ctime_ns = caller.now_ns;
            state.tree.touched.node(open.node);
            Ok(())
        })
    }

    /// Returns all open handles, for an adapter that recovers a session.
    pub fn open_files(&self) -> Vec<OpenFile> {
        let handles = self.state.look(|state| state.handles.numbers());
        handles.into_iter().filter_map(|fh| self.handle(fh)).collect()
    }
}

fn freeze_times(state: &mut State, node: NodeId) -> Result<(), FsError> {
    freeze(state.tree.node_mut(node)?)
}

/// FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE and FALLOC_FL_ZERO_RANGE: what the kernel lets a FUSE file ask.
const PUNCH_HOLE: u32 = 0x02;
const SUPPORTED_MODES: u32 = 0x01 | PUNCH_HOLE | 0x10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Clock, NamespaceSettings, OpenOutcome};
    use tidemark_protocol::id::Incarnation;
    use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};

    const ROOT: NodeId = 1;
    /// The daemon's clock when it handles a RELEASE.
    const RELEASED_NS: i64 = 1_000_000;

    fn caller(now_ns: i64) -> Caller {
        Caller { uid: 0, gid: 0, pid: 0, now_ns, request: 0 }
    }

    fn settings() -> NamespaceSettings {
        let clock = Clock(Arc::new(|| RELEASED_NS));
        NamespaceSettings { clock, journal_bytes: Some(1 << 20), ..NamespaceSettings::new(Incarnation(1)) }
    }

    #[test]
    fn what_was_closed_first_is_the_older_whichever_release_comes_first_and_whoever_sees_it() {
        let directory = tempfile::tempdir().unwrap();
        let medium = MediumChoice::Directory(directory.path().join("tier1"));
        let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
        let namespace = Namespace::new(settings(), Arc::clone(&tier1)).unwrap();
        let flags = (rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CREATE).bits().cast_signed();
        let create = |name: &[u8]| namespace.create(&caller(1), ROOT, name, 0o644, flags).unwrap().1;
        let [shard, index, cut] = [b"shard".as_slice(), b"index", b"cut"].map(create);
        namespace.handles().flush(shard.fh, &caller(2), false).unwrap();
        namespace.handles().flush(index.fh, &caller(3), false).unwrap();
        namespace.handles().flush(cut.fh, &caller(4), true).unwrap();
        namespace.handles().release(index.fh).unwrap();
        namespace.handles().release(cut.fh).unwrap();
        drop(namespace);

        let mut backing = |number| {
            let known = [&shard, &index, &cut].map(|open| Arc::clone(&open.backing));
            known.into_iter().find(|backing| backing.number() == number)
        };
        let next = Namespace::recover(settings(), tier1, true, &mut backing).unwrap();
        next.handles().release(shard.fh).unwrap();
        let published_ns = |open: &OpenFile| next.nodes().view(open.node).unwrap().published_ns;
        assert_eq!([&shard, &index, &cut].map(published_ns), [2, 3, RELEASED_NS]);
        assert_eq!(next.nodes().view(shard.node).unwrap().closed_ns, RELEASED_NS);
    }

    /// The kernel never got this handle, so no byte was written through it.
    #[test]
    fn an_open_that_no_program_got_leaves_nothing_behind_and_cuts_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let medium = MediumChoice::Directory(directory.path().join("tier1"));
        let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
        let namespace = Namespace::new(settings(), tier1).unwrap();
        let flags = (rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CREATE).bits().cast_signed();
        let create = |name: &[u8]| namespace.create(&caller(1), ROOT, name, 0o644, flags).unwrap().1;
        let made = create(b"made");
        namespace.handles().take_back(made.fh).unwrap();
        assert_eq!(namespace.lookup(ROOT, b"made").unwrap_err(), FsError::NotFound);

        let whole = create(b"whole");
        whole.backing.write_at(b"whole", 0).unwrap();
        namespace.handles().flush(whole.fh, &caller(2), false).unwrap();
        namespace.handles().release(whole.fh).unwrap();
        let opened = create(b"whole");
        namespace.handles().take_back(opened.fh).unwrap();
        let view = namespace.nodes().view(whole.node).unwrap();
        assert_eq!((view.state, view.size_bytes), (super::super::FileState::Closed, 5), "not cut, and there");

        let (first, second) = (create(b"both"), create(b"both"));
        namespace.handles().take_back(first.fh).unwrap();
        assert!(namespace.lookup(ROOT, b"both").is_ok(), "another program has it open");
        namespace.handles().release(second.fh).unwrap();
    }

    #[test]
    fn a_file_that_is_made_without_being_opened_stays_as_one_that_was_closed() {
        let directory = tempfile::tempdir().unwrap();
        let medium = MediumChoice::Directory(directory.path().join("tier1"));
        let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
        let namespace = Namespace::new(settings(), tier1).unwrap();
        let pid = std::process::id();
        let made = namespace.make_file(&Caller { pid, ..caller(1) }, ROOT, b"made", 0o640).unwrap();
        assert_eq!(namespace.lookup(ROOT, b"made").unwrap().node, made.node);
        let view = namespace.nodes().view(made.node).unwrap();
        assert_eq!((view.state, view.size_bytes), (super::super::FileState::Closed, 0));
        assert_eq!(view.writers.first().map(|writer| writer.tgid), Some(pid));
        assert!(namespace.handles().open_files().is_empty());
        let again = namespace.make_file(&caller(2), ROOT, b"made", 0o640);
        assert_eq!(again.map(|_| ()), Err(FsError::Exists));
        namespace.gate().refuse_writers();
        let late = namespace.make_file(&caller(3), ROOT, b"late", 0o640);
        assert_eq!(late.map(|_| ()), Err(FsError::ReadOnly));
        assert_eq!(namespace.lookup(ROOT, b"late").unwrap_err(), FsError::NotFound);
    }

    #[test]
    fn once_writers_are_refused_no_close_of_theirs_is_a_success() {
        let directory = tempfile::tempdir().unwrap();
        let medium = MediumChoice::Directory(directory.path().join("tier1"));
        let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
        let namespace = Namespace::new(settings(), tier1).unwrap();
        let flags = (rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CREATE).bits().cast_signed();
        let written = namespace.create(&caller(1), ROOT, b"f", 0o644, flags).unwrap().1;
        let OpenOutcome::Ready(read) = namespace.open(&caller(1), written.node, 0).unwrap() else { panic!() };
        namespace.handles().fsync(written.fh).unwrap();
        namespace.gate().refuse_writers();
        assert_eq!(namespace.handles().flush(written.fh, &caller(2), false), Err(FsError::Io));
        assert_eq!(namespace.handles().fsync(written.fh), Err(FsError::Io));
        namespace.handles().flush(read.fh, &caller(2), false).unwrap();
        assert_eq!(
            namespace.create(&caller(1), ROOT, b"g", 0o644, flags).map(|_| ()),
            Err(FsError::ReadOnly)
        );
        namespace.handles().release(written.fh).unwrap();
        assert_eq!(namespace.nodes().view(written.node).unwrap().state, super::super::FileState::Cut);
    }
}

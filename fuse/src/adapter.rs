//! Translates the kernel's requests into calls of the namespace, and answers them.
//!
//! Owns: the translation, request by request. Does not own: any behaviour (the namespace), the bytes
//! (`handle`), the control files' content (`control_dir`).

use crate::attr;
use crate::backing_ids::{BackingIds, Kernel};
use crate::cold::{Job, Workers};
use crate::control_dir::ControlDir;
use crate::convert::{answer_bytes, answer_empty, caller, is_resent, refuse, request_id, set_time};
use crate::counters::Opcode;
use crate::device::Device;
use crate::entries;
use crate::errno::errno;
use crate::gate;
use crate::handle::{DataPath, Fallback};
use crate::init;
use crate::named::{self, Remove};
use crate::room;
use crate::set;
use crate::shared::Shared;
use fuser::{
    BsdFileFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, IoctlFlags,
    KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tidemark_engine::cluster::Wanted;
use tidemark_keeper::closed_by;
use tidemark_namespace::{Caller, FsError, Namespace, OpenOutcome, SetAttr};

/// Block size that statfs reports.
const STATFS_BLOCK_BYTES: u32 = 4096;

/// The longest name, in bytes.
const NAME_MAX_BYTES: u32 = 255;

/// Suid and sgid are never stored on files: see `init`.
pub(crate) const FILE_MODE_BITS: u32 = 0o1777;

/// The file system that fuser calls.
#[derive(Debug)]
pub(crate) struct Adapter {
    pub(crate) shared: Arc<Shared>,
    pub(crate) workers: Workers,
    /// The device on which backing files are registered; `None` in FALLBACK.
    pub(crate) passthrough: Option<Arc<Device>>,
    /// The flags that the kernel and the daemon before this one agreed on. A living mount grants no others.
    pub(crate) agreed_before: Option<InitFlags>,
}

impl Adapter {
    fn count(&self, opcode: Opcode) {
        self.shared.count(opcode);
    }

    fn ns(&self) -> &Namespace {
        &self.shared.namespace
    }

    /// Returns why a name may not be changed: it belongs to the control directory, or the daemon keeps no more changes.
    fn refuse(&self, parent: INodeNo, name: &OsStr) -> Option<Errno> {
        refuse(parent, name).or_else(|| self.keeps_nothing())
    }

    /// Returns the error of every change once the daemon keeps no more changes.
    fn keeps_nothing(&self) -> Option<Errno> {
        self.ns().gate().are_writers_refused().then_some(Errno::EROFS)
    }
}

impl Filesystem for Adapter {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let agreed = init::negotiate(config, self.passthrough.is_some(), self.agreed_before);
        let data = match &self.passthrough {
            Some(device) if agreed.passthrough => {
                let (device, namespace) = (Arc::clone(device), Arc::clone(&self.shared.namespace));
                DataPath::Passthrough(BackingIds::new(Kernel { device, namespace }))
            }
            // The probe saw the kernel offer passthrough a moment ago.
            Some(_) => return Err(io::Error::from_raw_os_error(libc::EPROTO)),
            None => DataPath::Fallback(Fallback::new(agreed.direct_io_allow_mmap)),
        };
        self.shared.data.set(data).expect("INIT comes once a session");
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.count(Opcode::Lookup);
        let name = name.as_bytes();
        let control = &self.shared.control;
        if ControlDir::is_reserved(parent.0, name) {
            return reply.entry(&attr::TTL_DEFAULT, &control.directory(), Generation(0));
        }
        if ControlDir::owns(parent.0) {
            if let Some(torn) = self.ns().hidden().torn_directory().filter(|torn| torn.name == name) {
                return self.shared.answer_entry(0, self.ns().lookup(torn.parent, name), reply);
            }
            return match control.lookup(name) {
                Some(file) => reply.entry(&Duration::ZERO, &file, Generation(0)),
                None => reply.error(Errno::ENOENT),
            };
        }
        named::lookup(&self.shared, &self.workers, caller(request), (parent.0, name), reply);
    }

    fn forget(&self, _: &Request, node: INodeNo, lookups: u64) {
        self.count(Opcode::Forget);
        if !ControlDir::owns(node.0) {
            self.ns().forget(node.0, lookups);
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.count(Opcode::GetAttr);
        if ControlDir::owns(node.0) {
            return match self.shared.control.attr(node.0) {
                Some(found) => reply.attr(&attr::TTL_DEFAULT, &found),
                None => reply.error(Errno::ESTALE),
            };
        }
        self.shared.answer_attr(self.ns().getattr(node.0), reply);
    }

    fn setattr(
        &self,
        request: &Request,
        node: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        handle: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.count(Opcode::SetAttr);
        if ControlDir::owns(node.0) {
            return reply.error(Errno::EROFS);
        }
        if let Some(refused) = self.keeps_nothing() {
            return reply.error(refused);
        }
        let change = SetAttr { mode, uid, gid, size, atime: atime.map(set_time), mtime: mtime.map(set_time) };
        let of = (node.0, handle.is_some());
        set::setattr(&self.shared, &self.workers, caller(request), of, change, reply);
    }

    fn readlink(&self, _: &Request, node: INodeNo, reply: ReplyData) {
        self.count(Opcode::ReadLink);
        match self.ns().names().readlink(node.0) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        device_number: u32,
        reply: ReplyEntry,
    ) {
        self.count(Opcode::MkNod);
        if let Some(refused) = self.refuse(parent, name) {
            return reply.error(refused);
        }
        if let Some(answer) = self.shared.answered(request) {
            return self.shared.answer_entry_again(request_id(request), answer, reply);
        }
        let special = attr::special(mode, device_number);
        if mode & libc::S_IFMT != libc::S_IFREG && special.is_none() {
            return reply.error(Errno::EPERM);
        }
        let place = (parent.0, name.as_bytes().to_vec());
        let special = special.filter(|_| mode & libc::S_IFMT != libc::S_IFREG);
        named::mknod(&self.shared, &self.workers, caller(request), place, mode, special, reply);
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        self.count(Opcode::MkDir);
        if let Some(refused) = self.refuse(parent, name) {
            return reply.error(refused);
        }
        if let Some(answer) = self.shared.answered(request) {
            return self.shared.answer_entry_again(request_id(request), answer, reply);
        }
        let place = (parent.0, name.as_bytes().to_vec());
        named::mkdir(&self.shared, &self.workers, caller(request), place, mode & 0o7777, reply);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.count(Opcode::Unlink);
        if let Some(refused) = self.refuse(parent, name) {
            return reply.error(refused);
        }
        if self.shared.answered(request).is_some() {
            return self.shared.answer_done(request_id(request), Ok(()), reply);
        }
        let place = (parent.0, name.as_bytes().to_vec());
        named::remove(&self.shared, &self.workers, caller(request), place, Remove::Name, reply);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.count(Opcode::RmDir);
        if let Some(refused) = self.refuse(parent, name) {
            return reply.error(refused);
        }
        if self.shared.answered(request).is_some() {
            return self.shared.answer_done(request_id(request), Ok(()), reply);
        }
        let place = (parent.0, name.as_bytes().to_vec());
        named::remove(&self.shared, &self.workers, caller(request), place, Remove::Directory, reply);
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        self.count(Opcode::SymLink);
        if let Some(refused) = self.refuse(parent, name) {
            return reply.error(refused);
        }
        if let Some(answer) = self.shared.answered(request) {
            return self.shared.answer_entry_again(request_id(request), answer, reply);
        }
        let target = target.as_os_str().as_bytes().to_vec();
        let place = (parent.0, name.as_bytes().to_vec());
        named::symlink(&self.shared, &self.workers, caller(request), place, target, reply);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.count(Opcode::Rename);
        if let Some(refused) = self.refuse(parent, name).or_else(|| self.refuse(new_parent, new_name)) {
            return reply.error(refused);
        }
        if self.shared.answered(request).is_some() {
            return self.shared.answer_done(request_id(request), Ok(()), reply);
        }
        let from = (parent.0, name.as_bytes().to_vec());
        let to = (new_parent.0, new_name.as_bytes().to_vec());
        named::rename(&self.shared, &self.workers, caller(request), (from, to), flags.bits(), reply);
    }

    fn link(&self, request: &Request, node: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.count(Opcode::Link);
        if let Some(refused) = self.refuse(parent, name) {
            return reply.error(refused);
        }
        if ControlDir::owns(node.0) {
            return reply.error(Errno::EPERM);
        }
        if let Some(answer) = self.shared.answered(request) {
            return self.shared.answer_entry_again(request_id(request), answer, reply);
        }
        let place = (parent.0, name.as_bytes().to_vec());
        named::link(&self.shared, &self.workers, caller(request), node.0, place, reply);
    }

    fn open(&self, request: &Request, node: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.count(Opcode::Open);
        if ControlDir::owns(node.0) {
            if flags.0 & (libc::O_ACCMODE | libc::O_TRUNC) != libc::O_RDONLY {
                return reply.error(Errno::EROFS);
            }
            return match self.shared.control.open(node.0) {
                Some(fh) => {
                    reply.opened(FileHandle(fh), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_NOFLUSH);
                }
                None => reply.error(Errno::ENOENT),
            };
        }
        if let Some(answer) = self.shared.answered(request) {
            return self.shared.answer_open_again(request_id(request), answer, reply);
        }
        let (caller, node, flags) = (caller(request), node.0, flags.0);
        if flags & (libc::O_ACCMODE | libc::O_TRUNC) != libc::O_RDONLY {
            if self.ns().gate().are_writers_refused() {
                return self.shared.refuse_open(caller.request, FsError::ReadOnly, reply);
            }
            let workers = self.workers.clone();
            return gate::pass(
                &self.shared,
                &self.workers,
                || Wanted::Write { node },
                move |shared, leave| match leave {
                    Ok(leave) => workers.submit(Job::Open { caller, node, flags, leave, reply }),
                    Err(error) => shared.refuse_open(caller.request, error, reply),
                },
            );
        }
        if self.shared.host.cluster().is_some_and(|cluster| cluster.is_begun_on_lost(node)) {
            tracing::warn!(
                node,
                "a file was begun on a node that is lost, and nothing of its bytes was heard"
            );
            return self.shared.refuse_open(caller.request, FsError::Io, reply);
        }
        match self.ns().open(&caller, node, flags) {
            Ok(OpenOutcome::Ready(file)) => self.shared.answer_open(caller.request, &file, reply),
            Ok(OpenOutcome::Unverified) => {
                self.workers.submit(Job::OpenUnverified { caller, node, flags, reply });
            }
            Ok(OpenOutcome::Cold(cold)) => {
                self.workers.submit(Job::OpenCold { cold, caller, node, flags, reply });
            }
            Err(error) => self.shared.refuse_open(caller.request, error, reply),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        self.count(Opcode::Create);
        if let Some(refused) = self.refuse(parent, name) {
            return reply.error(refused);
        }
        if let Some(answer) = self.shared.answered(request) {
            return self.shared.answer_create_again(request_id(request), answer, reply);
        }
        let mode = mode & FILE_MODE_BITS;
        let (caller, parent, name) = (caller(request), parent.0, name.as_bytes().to_vec());
        let sure = flags & libc::O_EXCL != 0;
        let wanted = || Wanted::Change { parent, name: name.clone(), sure };
        let (workers, name) = (self.workers.clone(), name.clone());
        gate::pass(&self.shared, &self.workers, wanted, move |shared, leave| {
            let leave = match leave {
                Ok(leave) => leave,
                Err(error) => return shared.answer_create(caller.request, Err(error), reply),
            };
            let create = move |shared: &Shared| shared.namespace.create(&caller, parent, &name, mode, flags);
            room::create(shared, &workers, leave, caller.request, create, reply);
        });
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if ControlDir::owns_handle(fh.0) {
            return match self.shared.control.read(fh.0, offset, size) {
                Some((content, range)) => reply.data(&content[range]),
                None => reply.error(Errno::EBADF),
            };
        }
        self.count(Opcode::Read);
        match self.shared.data() {
            DataPath::Fallback(files) => files.read(fh.0, offset, size, reply),
            // The kernel reads the backing file itself; it has no reason to send READ.
            DataPath::Passthrough(_) => reply.error(Errno::EIO),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.count(Opcode::Write);
        if self.ns().gate().are_writers_refused() {
            return reply.error(Errno::EIO);
        }
        match self.shared.data() {
            DataPath::Fallback(files) => files.write(fh.0, offset, data, reply),
            DataPath::Passthrough(_) => reply.error(Errno::EIO),
        }
    }

    fn flush(&self, request: &Request, _: INodeNo, fh: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.count(Opcode::Flush);
        if ControlDir::owns_handle(fh.0) {
            return reply.ok();
        }
        let cut = closed_by(request.pid()).cut();
        answer_empty(self.ns().handles().flush(fh.0, &caller(request), cut), reply);
    }

    fn release(
        &self,
        request: &Request,
        _: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.count(Opcode::Release);
        if ControlDir::owns_handle(fh.0) {
            self.shared.control.release(fh.0);
            return reply.ok();
        }
        match self.ns().handles().handle(fh.0) {
            Some(file) => self.shared.data().released(&file),
            // Released before the previous daemon died.
            None if is_resent(request) => return reply.ok(),
            None => {}
        }
        answer_empty(self.ns().handles().release(fh.0), reply);
    }

    fn fsync(&self, _: &Request, _: INodeNo, fh: FileHandle, _: bool, reply: ReplyEmpty) {
        self.count(Opcode::FSync);
        if ControlDir::owns_handle(fh.0) {
            return reply.ok();
        }
        answer_empty(self.ns().handles().fsync(fh.0), reply);
    }

    fn fallocate(
        &self,
        request: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.count(Opcode::FAllocate);
        if let Some(refused) = self.keeps_nothing() {
            return reply.error(refused);
        }
        let mode = mode.cast_unsigned();
        answer_empty(self.ns().handles().fallocate(&caller(request), fh.0, mode, offset, length), reply);
    }

    fn opendir(&self, _: &Request, node: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.count(Opcode::OpenDir);
        if ControlDir::owns(node.0) {
            return reply.opened(FileHandle(0), FopenFlags::empty());
        }
        let node = node.0;
        gate::pass(
            &self.shared,
            &self.workers,
            || Wanted::List { directory: node },
            move |shared, leave| match leave.and_then(|_leave| shared.namespace.names().opendir(node)) {
                Ok(()) => reply.opened(FileHandle(shared.listings.open()), FopenFlags::empty()),
                Err(error) => reply.error(errno(error)),
            },
        );
    }

    fn readdir(&self, _: &Request, node: INodeNo, fh: FileHandle, cookie: u64, mut reply: ReplyDirectory) {
        self.count(Opcode::ReadDir);
        match entries::fill(&self.shared, node, fh, cookie, &mut reply) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn readdirplus(
        &self,
        _: &Request,
        node: INodeNo,
        fh: FileHandle,
        cookie: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        self.count(Opcode::ReadDirPlus);
        match entries::fill_plus(&self.shared, node, fh, cookie, &mut reply) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn releasedir(&self, _: &Request, node: INodeNo, fh: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.count(Opcode::ReleaseDir);
        if !ControlDir::owns(node.0) {
            self.shared.listings.close(fh.0);
            self.ns().names().releasedir(node.0);
        }
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, node: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.count(Opcode::FSyncDir);
        if ControlDir::owns(node.0) {
            return reply.ok();
        }
        answer_empty(self.ns().names().fsyncdir(node.0), reply);
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.count(Opcode::StatFs);
        let stat = self.ns().room().statfs();
        let blocks = |bytes: u64| bytes / u64::from(STATFS_BLOCK_BYTES);
        let free = blocks(stat.free_bytes);
        reply.statfs(
            blocks(stat.size_bytes),
            free,
            free,
            stat.nodes.saturating_add(stat.nodes_free),
            stat.nodes_free,
            STATFS_BLOCK_BYTES,
            NAME_MAX_BYTES,
            STATFS_BLOCK_BYTES,
        );
    }

    fn setxattr(
        &self,
        request: &Request,
        node: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        self.count(Opcode::SetXattr);
        if ControlDir::owns(node.0) {
            return reply.error(Errno::EROFS);
        }
        if let Some(refused) = self.keeps_nothing() {
            return reply.error(refused);
        }
        if self.shared.answered(request).is_some() {
            return self.shared.answer_done(request_id(request), Ok(()), reply);
        }
        let (node, flags) = (node.0, flags.cast_unsigned());
        let (name, value) = (name.as_bytes().to_vec(), value.to_vec());
        let done = move |names: &Namespace, caller: &Caller| {
            names.xattrs().setxattr(node, &name, &value, flags, caller)
        };
        set::xattr(&self.shared, &self.workers, caller(request), node, done, reply);
    }

    fn getxattr(&self, _: &Request, node: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.count(Opcode::GetXattr);
        // The kernel asks for security.capability before the first write after an open. Answered without the
        // namespace's lock, as no program can store such an attribute.
        if ControlDir::owns(node.0) || name.as_bytes().starts_with(b"security.") {
            return reply.error(Errno::ENODATA);
        }
        if name.as_bytes().starts_with(b"user.tidemark.") {
            let name = name.as_bytes().to_vec();
            return self.workers.submit(Job::GetXattr { node: node.0, name, size, reply });
        }
        match self.ns().xattrs().getxattr(node.0, name.as_bytes()) {
            Ok(value) => answer_bytes(&value, size, reply),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn listxattr(&self, _: &Request, node: INodeNo, size: u32, reply: ReplyXattr) {
        self.count(Opcode::ListXattr);
        if ControlDir::owns(node.0) {
            return answer_bytes(&[], size, reply);
        }
        match self.ns().xattrs().listxattr(node.0) {
            Ok(names) => {
                let mut joined = names.join(&0u8);
                if !joined.is_empty() {
                    joined.push(0);
                }
                answer_bytes(&joined, size, reply);
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn removexattr(&self, request: &Request, node: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.count(Opcode::RemoveXattr);
        if ControlDir::owns(node.0) {
            return reply.error(Errno::EROFS);
        }
        if let Some(refused) = self.keeps_nothing() {
            return reply.error(refused);
        }
        if self.shared.answered(request).is_some() {
            return self.shared.answer_done(request_id(request), Ok(()), reply);
        }
        let (node, name) = (node.0, name.as_bytes().to_vec());
        let done = move |names: &Namespace, caller: &Caller| names.xattrs().removexattr(node, &name, caller);
        set::xattr(&self.shared, &self.workers, caller(request), node, done, reply);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        self.count(Opcode::Other);
        // Python asks every file whether it is a terminal.
        reply.error(Errno::ENOTTY);
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        self.count(Opcode::Other);
        // Remembered by the kernel, which from then on answers SEEK_DATA and SEEK_HOLE as for a file without
        // holes: correct, and no request for it again.
        reply.error(Errno::ENOSYS);
    }

    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: fuser::PollNotifier,
        _: fuser::PollEvents,
        _: fuser::PollFlags,
        reply: fuser::ReplyPoll,
    ) {
        self.count(Opcode::Other);
        // Remembered by the kernel: a regular file is always ready.
        reply.error(Errno::ENOSYS);
    }

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: fuser::CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        self.count(Opcode::Other);
        // Remembered by the kernel, which copies by splice instead, without the daemon where there is passthrough.
        reply.error(Errno::ENOSYS);
    }
}

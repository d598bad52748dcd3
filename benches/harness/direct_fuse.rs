//! A plain FUSE file system that answers every read and write itself: the baseline of the fallback.
//!
//! Owns: files in memory in one flat folder, with direct I/O and the largest requests the kernel allows. Does
//! not own: anything a real file system needs beyond create, write, read, stat, truncate and unlink.

use anyhow::Context;
use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::MemfdFlags;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time after which names are looked up again; sizes are always requested.
const NAME_TTL: Duration = Duration::from_secs(1);
/// The most bytes of one WRITE. The library could take 16 MiB, but the kernel stops at 1 MiB.
const WRITE_BYTES_MAX: u32 = 1 << 20;
/// More files than a bench makes; bounds descriptors.
const FILES_MAX: usize = 1024;

/// The mounted baseline; unmounted when dropped.
#[derive(Debug)]
pub struct DirectFuse {
    session: Option<BackgroundSession>,
}

impl DirectFuse {
    /// Mounts the baseline at `mountpoint`, an empty folder. Needs root or fusermount3.
    ///
    /// # Errors
    /// The mount fails.
    pub fn mount(mountpoint: &Path) -> anyhow::Result<Self> {
        let mut config = Config::default();
        config.mount_options =
            vec![MountOption::FSName("direct-fuse".to_owned()), MountOption::NoSuid, MountOption::NoDev];
        let session = fuser::spawn_mount(Baseline::default(), mountpoint, &config)
            .with_context(|| format!("mount the baseline FUSE at {}", mountpoint.display()))?;
        Ok(Self { session: Some(session) })
    }

    /// Unmounts and waits for the session's end.
    ///
    /// # Errors
    /// A file is still open below it, or the session ended with an error.
    pub fn unmount(mut self) -> anyhow::Result<()> {
        self.session
            .take()
            .map_or(Ok(()), |session| session.umount_and_join().context("unmount the baseline"))
    }
}

#[derive(Debug, Default)]
struct Baseline {
    files: Mutex<Files>,
}

#[derive(Debug, Default)]
struct Files {
    names: HashMap<OsString, u64>,
    files: HashMap<u64, Arc<File>>,
    last: u64,
}

impl Baseline {
    fn lock(&self) -> MutexGuard<'_, Files> {
        self.files.lock().expect("no request panics while it holds the lock")
    }

    fn file(&self, ino: INodeNo) -> Result<Arc<File>, Errno> {
        self.lock().files.get(&u64::from(ino)).cloned().ok_or(Errno::ENOENT)
    }

    fn attr(&self, ino: INodeNo) -> Result<FileAttr, Errno> {
        if ino == INodeNo::ROOT {
            return Ok(attr(ino, FileType::Directory, 0));
        }
        let size_bytes = self.file(ino)?.metadata()?.len();
        Ok(attr(ino, FileType::RegularFile, size_bytes))
    }

    fn create_file(&self, name: &OsStr) -> Result<FileAttr, Errno> {
        let mut files = self.lock();
        if files.files.len() >= FILES_MAX {
            return Err(Errno::ENOSPC);
        }
        let memory = rustix::fs::memfd_create("direct-fuse", MemfdFlags::CLOEXEC).map_err(io::Error::from)?;
        // The root is 1.
        files.last += 1;
        let ino = files.last + 1;
        files.names.insert(name.to_owned(), ino);
        files.files.insert(ino, Arc::new(File::from(memory)));
        Ok(attr(INodeNo(ino), FileType::RegularFile, 0))
    }

    fn read_file(&self, ino: INodeNo, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        let file = self.file(ino)?;
        let mut bytes = vec![0; usize::try_from(size).map_err(|_| Errno::EINVAL)?];
        let mut filled = 0;
        while filled < bytes.len() {
            match file.read_at(&mut bytes[filled..], offset + filled as u64)? {
                0 => break,
                got => filled += got,
            }
        }
        bytes.truncate(filled);
        Ok(bytes)
    }
}

fn attr(ino: INodeNo, kind: FileType, size: u64) -> FileAttr {
    let time: SystemTime = UNIX_EPOCH;
    FileAttr {
        ino,
        size,
        blocks: size.div_ceil(512),
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind,
        perm: 0o755,
        nlink: 1,
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Baseline {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        config.set_max_write(WRITE_BYTES_MAX).map(drop).map_err(|most| {
            io::Error::other(format!("requests of {WRITE_BYTES_MAX} bytes refused; most: {most}"))
        })
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let ino = self.lock().names.get(name).copied();
        match ino.ok_or(Errno::ENOENT).and_then(|ino| self.attr(INodeNo(ino))) {
            Ok(attr) => reply.entry(&NAME_TTL, &attr, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(ino) {
            Ok(attr) => reply.attr(&Duration::ZERO, &attr),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let resized = size.map_or(Ok(()), |size| Ok(self.file(ino)?.set_len(size)?));
        match resized.and_then(|()| self.attr(ino)) {
            Ok(attr) => reply.attr(&Duration::ZERO, &attr),
            Err(error) => reply.error(error),
        }
    }

    fn create(&self, _: &Request, _: INodeNo, name: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        match self.create_file(name) {
            Ok(attr) => {
                reply.created(&NAME_TTL, &attr, Generation(0), FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
            }
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.read_file(ino, offset, size) {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self.file(ino).and_then(|file| Ok(file.write_all_at(data, offset)?));
        match (written, u32::try_from(data.len())) {
            (Ok(()), Ok(count)) => reply.written(count),
            (Err(error), _) => reply.error(error),
            (_, Err(_)) => reply.error(Errno::EINVAL),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn unlink(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let mut files = self.lock();
        match files.names.remove(name) {
            Some(ino) => {
                files.files.remove(&ino);
                reply.ok();
            }
            None => reply.error(Errno::ENOENT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files;

    #[test]
    fn a_file_comes_back_as_it_was_written() {
        // Without FUSE there is no fallback to measure either.
        if !Path::new("/dev/fuse").exists() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let baseline = DirectFuse::mount(folder.path()).unwrap();
        let path = folder.path().join("file");
        let bytes = files::buffer(3 * files::BLOCK_BYTES + 5);
        std::fs::write(&path, &bytes).unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes);
        assert!(files::read(&path, bytes.len() as u64).unwrap() > 0.0);
        std::fs::write(&path, b"short").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 5, "truncated at open");
        files::remove(&path).unwrap();
        assert!(!path.exists());
        baseline.unmount().unwrap();
    }
}

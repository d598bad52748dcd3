//! Tests by use whether passthrough works here.
//!
//! Owns: a throw-away mount with one file, written and read through the kernel. Does not own: the decision for FALLBACK
//! (`session`).
//!
//! Versions lie: passthrough can be compiled out, be refused by a container, by the backing file system's stack
//! depth, or be there with a size bug (6.9 to 6.11: the inode's size did not grow with a passthrough write). So
//! a private FUSE file system is mounted without a path, a real backing file is registered, and the bytes, the
//! size and the absence of READ and WRITE requests are checked.

use crate::init;
use crate::mount::{SOURCE, open_device};
use fuser::{
    BackingId, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite,
    ReplyXattr, Request, Session, SessionACL, WriteFlags,
};
use rustix::fs::{Mode, OFlags, SeekFrom, fstat, openat, seek};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

const FILE: &str = "probe";
const FILE_NODE: INodeNo = INodeNo(2);

/// Two writes of this odd size: the second grows the file, and neither ends at a page's end.
const WRITE_BYTES: usize = 65_537;

/// Tries passthrough onto `backing`, a read-only descriptor of an empty regular file of the kind that the mount will
/// use. The file is written to: do not use it again. Costs about 2 ms.
///
/// The error says in words why passthrough does not work.
pub(crate) fn passthrough(backing: BorrowedFd<'_>) -> Result<(), String> {
    let device = open_device().map_err(|error| error.to_string())?;
    let tree = private_mount(&device)?;
    let seen = Arc::new(Seen::default());
    let file_system = Probe {
        backing: backing
            .try_clone_to_owned()
            .map_err(|error| format!("duplicating a descriptor: {error}"))?,
        registered: Mutex::default(),
        seen: Arc::clone(&seen),
    };
    let session = Session::from_fd(file_system, device, SessionACL::All, Config::default())
        .map_err(|error| format!("FUSE_INIT failed: {error}"))?;
    let served = session.spawn().map_err(|error| format!("starting a thread: {error}"))?;
    let result = if seen.offered.load(Ordering::Relaxed) == 0 {
        Err("the kernel does not offer FUSE_PASSTHROUGH (older than 6.9, or built without it)".to_owned())
    } else {
        use_it(&tree, backing, &seen)
    };
    // The last reference to the mount: the kernel then ends the connection, and with it the session.
    drop(tree);
    if let Err(error) = served.join() {
        tracing::debug!(%error, "the probe's session ended with an error");
    }
    result
}

/// Makes a FUSE mount that is at no path; it lives as long as the descriptor.
fn private_mount(device: &OwnedFd) -> Result<OwnedFd, String> {
    let step = |what: &str, errno: rustix::io::Errno| {
        if errno == rustix::io::Errno::PERM {
            format!("{what} was refused: no CAP_SYS_ADMIN")
        } else {
            format!("{what} failed: {errno}")
        }
    };
    let context =
        rustix::mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC).map_err(|e| step("fsopen", e))?;
    let settings = [
        ("source", SOURCE.to_owned()),
        ("fd", device.as_raw_fd().to_string()),
        ("rootmode", "40000".to_owned()),
        ("user_id", rustix::process::getuid().as_raw().to_string()),
        ("group_id", rustix::process::getgid().as_raw().to_string()),
    ];
    for (key, value) in settings {
        rustix::mount::fsconfig_set_string(context.as_fd(), key, value.as_str())
            .map_err(|e| step("fsconfig", e))?;
    }
    rustix::mount::fsconfig_create(context.as_fd()).map_err(|e| step("fsconfig", e))?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        .map_err(|e| step("fsmount", e))
}

fn use_it(tree: &OwnedFd, backing: BorrowedFd<'_>, seen: &Seen) -> Result<(), String> {
    let opened = openat(tree, FILE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let file = opened.map_err(|errno| {
        let refused = seen.refused.lock().unwrap_or_else(PoisonError::into_inner).take();
        refused.unwrap_or_else(|| format!("opening a file with FOPEN_PASSTHROUGH failed: {errno}"))
    })?;
    let pattern: Vec<u8> = (0..2 * WRITE_BYTES).map(|i| u8::try_from(i % 251).expect("below 251")).collect();
    for part in pattern.chunks(WRITE_BYTES) {
        let written = rustix::io::write(&file, part).map_err(|errno| format!("a write failed: {errno}"))?;
        if written != part.len() {
            return Err(format!("a write of {} bytes took {written}", part.len()));
        }
    }
    let end = seek(&file, SeekFrom::End(0)).map_err(|errno| format!("a seek failed: {errno}"))?;
    if end != pattern.len() as u64 {
        return Err(format!(
            "the kernel has the size bug of 6.9 to 6.11: {end} instead of {}",
            pattern.len()
        ));
    }
    for (what, descriptor) in [("the mount", file.as_fd()), ("the backing file", backing)] {
        let mut bytes = vec![0; pattern.len()];
        let read = rustix::io::pread(descriptor, &mut bytes, 0)
            .map_err(|errno| format!("reading from {what} failed: {errno}"))?;
        if read != pattern.len() || bytes != pattern {
            return Err(format!("{what} does not hold what was written"));
        }
    }
    match seen.data_requests.load(Ordering::Relaxed) {
        0 => Ok(()),
        n => Err(format!("the kernel accepted passthrough but sent {n} READ or WRITE requests")),
    }
}

#[derive(Debug, Default)]
struct Seen {
    offered: AtomicU64,
    data_requests: AtomicU64,
    refused: Mutex<Option<String>>,
}

#[derive(Debug)]
struct Probe {
    backing: OwnedFd,
    registered: Mutex<Option<BackingId>>,
    seen: Arc<Seen>,
}

impl Probe {
    fn attr(&self, node: INodeNo) -> FileAttr {
        let root = node == INodeNo::ROOT;
        let size = fstat(&self.backing).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
        FileAttr {
            ino: node,
            size: if root { 0 } else { size },
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if root { FileType::Directory } else { FileType::RegularFile },
            perm: if root { 0o700 } else { 0o600 },
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: crate::attr::BLOCK_SIZE_FALLBACK,
            flags: 0,
        }
    }
}

impl Filesystem for Probe {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let agreed = init::negotiate(config, true, None);
        self.seen.offered.store(u64::from(agreed.passthrough), Ordering::Relaxed);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == FILE {
            reply.entry(&Duration::ZERO, &self.attr(FILE_NODE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &self.attr(node));
    }

    /// The kernel asks for `security.capability` before the first write.
    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENODATA);
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match reply.open_backing(&self.backing) {
            Ok(id) => {
                let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
                reply.opened_passthrough(FileHandle(1), FopenFlags::empty(), registered.insert(id));
            }
            Err(error) => {
                let why = match error.raw_os_error() {
                    Some(libc::EPERM) => "registering a backing file needs CAP_SYS_ADMIN".to_owned(),
                    Some(libc::ELOOP) => {
                        "Tier-1's directory is on a stacked file system (overlay): choose one on tmpfs or a disk"
                            .to_owned()
                    }
                    _ => format!("registering a backing file failed: {error}"),
                };
                *self.seen.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
                reply.error(Errno::EIO);
            }
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.seen.data_requests.fetch_add(1, Ordering::Relaxed);
        reply.error(Errno::EIO);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.seen.data_requests.fetch_add(1, Ordering::Relaxed);
        reply.error(Errno::EIO);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};

    #[test]
    fn what_cannot_back_a_file_is_refused_in_words() {
        let device = File::open("/dev/null").unwrap();
        let reason = passthrough(device.as_fd()).unwrap_err();
        assert!(reason.contains(' '), "{reason}");
    }

    #[test]
    fn an_answer_of_yes_means_the_bytes_are_there() {
        let path = format!("/dev/shm/tidemark-probe-{}", std::process::id());
        drop(OpenOptions::new().write(true).create_new(true).open(&path).unwrap());
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let answer = passthrough(file.as_fd());
        let held = file.metadata().unwrap().len();
        match answer {
            Ok(()) => assert_eq!(held, 2 * WRITE_BYTES as u64),
            Err(reason) => {
                eprintln!("no passthrough here: {reason}");
                assert_eq!(held, 0, "{reason}");
            }
        }
    }
}

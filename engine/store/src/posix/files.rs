//! The blocking half of the POSIX store: durable files with plain system calls.
//!
//! Owns: staging, create-if-absent by link(2), which directories are synced. Does not own: keys beyond `names`, the proof that the
//! directory is the store's and links below it (`root`), listing (`walk`), errors beyond `io::Error`, threads.

use super::compare::write_compared;
use super::direct::{DIRECT_LEAST_BYTES, Direct};
use super::names::{STAGING, path_of};
use super::root::{Root, is_absent, is_mark, open_object};
use super::sync::DirectorySyncs;
use bytes::Bytes;
use rustix::fs::{
    self, Advice, AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Gid, Mode, OFlags, RenameFlags,
};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidemark_protocol::file::Readers;

/// Age from which an unlocked staging file counts as left over from a crash; younger ones may be about to be locked.
const LEFTOVER_AGE: Duration = Duration::from_secs(600);

/// Maximum number of tries to place an object: a concurrent delete may remove a directory between its mkdir and the link into it.
const PLACE_ATTEMPTS: u32 = 8;

/// Bytes gathered before a sync: enough for sequential writes, and little beside a host's memory.
const DIRTY_MOST_BYTES: u64 = 128 << 20;

/// Mode of the directories of objects: only the daemon's user may change them, whatever its umask is.
const DIRECTORY_MODE: u32 = 0o755;
/// Mode of the staging directory: unfinished files are closed to other users.
const STAGING_MODE: u32 = 0o700;

/// Files are compared in blocks of this size.
const COMPARE_BYTES: usize = 1 << 20;

/// A file under a temporary name, locked so that a sweep leaves it alone; unlinked when dropped.
#[derive(Debug)]
pub(super) struct Staged {
    path: PathBuf,
    file: File,
    /// A second descriptor, past the page cache, and the object that uses it.
    direct: Option<(Arc<Direct>, File)>,
    /// Bytes written that are not on their way to the disk yet.
    dirty_bytes: AtomicU64,
}

impl Drop for Staged {
    fn drop(&mut self) {
        // After a rename the name is gone already. A failure leaves a leftover, which the next open sweeps.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Staged {
    /// Makes a new empty file with `size_bytes` of space reserved, so that a full disk is noticed before the first part. The file is made
    /// only in the store's own directory: another store's may have a staging directory, too.
    pub(super) fn new(root: &Root, size_bytes: u64, readers: Readers) -> io::Result<Self> {
        root.enter()?.prove()?;
        let mut random = [0_u8; 16];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let name = format!("{}-{:032x}", std::process::id(), u128::from_le_bytes(random));
        let path = root.path().join(STAGING).join(name);
        let mode = object_mode(readers);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(mode).open(&path)?;
        let staged = Self { path, file, direct: None, dirty_bytes: AtomicU64::new(0) };
        if readers.group != readers.others
            && fs::fchown(&staged.file, None, Some(Gid::from_raw(readers.gid))).is_err()
        {
            // Without the right to give the file to that group, members cannot be told from others, so no other user may read it.
            fs::fchmod(&staged.file, Mode::from_raw_mode(object_mode(Readers::default())))?;
        }
        // Without lock support (some network mounts) the age alone protects the file.
        let _ = fs::flock(&staged.file, FlockOperation::NonBlockingLockExclusive);
        if size_bytes > 0 {
            match fs::fallocate(&staged.file, FallocateFlags::empty(), 0, size_bytes) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => staged.file.set_len(size_bytes)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(staged)
    }

    /// Does the same, for parts that may go past the page cache.
    pub(super) fn new_direct(
        root: &Root,
        size_bytes: u64,
        readers: Readers,
        direct: &Arc<Direct>,
    ) -> io::Result<Self> {
        let mut staged = Self::new(root, size_bytes, readers)?;
        staged.direct = direct.open_for_write(&staged.path).map(|file| (Arc::clone(direct), file));
        Ok(staged)
    }

    /// Writes a part. As much as possible goes directly to the device, the rest into the page cache. The rest is compared with the file's
    /// content, and synced to the disk when enough has gathered. The last sync thus finds little left, and the page cache stays free for
    /// others.
    pub(super) fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let gone = self.direct.as_ref().map_or(0, |(direct, file)| direct.write(file, bytes, offset));
        let (bytes, offset) = (&bytes[gone..], offset + gone as u64);
        if bytes.is_empty() {
            return Ok(());
        }
        write_compared(&self.file, bytes, offset)?;
        let written = bytes.len() as u64;
        let dirty = self.dirty_bytes.fetch_add(written, Ordering::Relaxed) + written;
        if dirty >= DIRTY_MOST_BYTES {
            // The thread that takes the count syncs; the others go on writing.
            if self.dirty_bytes.swap(0, Ordering::Relaxed) >= DIRTY_MOST_BYTES {
                self.file.sync_data()?;
                self.drop_cached();
            }
        }
        Ok(())
    }

    /// Makes the bytes durable, and drops them from the page cache unless they will be read again soon.
    pub(super) fn sync(&self, keep_cached: bool) -> io::Result<()> {
        self.file.sync_all()?;
        if !keep_cached {
            self.drop_cached();
        }
        Ok(())
    }

    fn drop_cached(&self) {
        // Only advice: if it is refused, the cache stays fuller than necessary.
        let _ = fs::fadvise(&self.file, 0, None, Advice::DontNeed);
    }

    /// Gives the file its name if that is free, durably either way. Returns `false` if the name was taken.
    pub(super) fn place(&self, root: &Root, target: &Path, syncs: &DirectorySyncs) -> io::Result<bool> {
        let mut attempts = 0;
        let placed = loop {
            attempts += 1;
            match directory_of(root, target).and_then(|directory| self.link(&directory, target)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && attempts < PLACE_ATTEMPTS => {}
                result => break result?,
            }
        };
        if !placed && let Ok(there) = open_object(&root.enter()?, target) {
            // The writer of that object may not have synced it yet, and our caller will act on its content.
            there.sync_all()?;
        }
        sync_parents(root.path(), target, syncs)?;
        Ok(placed)
    }

    /// Makes the bytes durable, then their name. Returns `Some` if the name holds other bytes, with their number.
    pub(super) fn finish(
        &self,
        root: &Root,
        target: &Path,
        syncs: &DirectorySyncs,
    ) -> io::Result<Option<u64>> {
        self.sync(false)?;
        if self.place(root, target, syncs)? {
            return Ok(None);
        }
        let (same, there_bytes) = self.equals(root, target)?;
        Ok((!same).then_some(there_bytes))
    }

    /// Makes the bytes durable, then gives them the name, whatever it held before.
    pub(super) fn replace(&self, root: &Root, target: &Path, syncs: &DirectorySyncs) -> io::Result<()> {
        self.sync(false)?;
        let directory = directory_of(root, target)?;
        let name = name_of(target)?;
        match fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) if FileType::from_raw_mode(there.st_mode) == FileType::RegularFile => {}
            Ok(_) => return Err(io::Error::new(io::ErrorKind::IsADirectory, "no object has this name")),
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        fs::renameat(CWD, &self.path, &directory, name)?;
        sync_parents(root.path(), target, syncs)
    }

    fn link(&self, directory: &OwnedFd, target: &Path) -> io::Result<bool> {
        let name = name_of(target)?;
        match fs::linkat(CWD, &self.path, directory, name, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            // There are no hard links here; the rename that refuses to replace is as good.
            Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK) => {
                match fs::renameat_with(CWD, &self.path, directory, name, RenameFlags::NOREPLACE) {
                    Ok(()) => Ok(true),
                    Err(Errno::EXIST) => Ok(false),
                    Err(error) => Err(error.into()),
                }
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Returns whether `target` holds the same bytes, and its size.
    pub(super) fn equals(&self, root: &Root, target: &Path) -> io::Result<(bool, u64)> {
        let mut theirs = open_object(&root.enter()?, target)?;
        let there_bytes = theirs.metadata()?.len();
        let ours_bytes = self.file.metadata()?.len();
        if there_bytes != ours_bytes {
            return Ok((false, there_bytes));
        }
        let (mut a, mut b) = (vec![0; COMPARE_BYTES], vec![0; COMPARE_BYTES]);
        let mut offset = 0;
        while offset < ours_bytes {
            let len =
                usize::try_from((ours_bytes - offset).min(COMPARE_BYTES as u64)).unwrap_or(COMPARE_BYTES);
            self.file.read_exact_at(&mut a[..len], offset)?;
            theirs.read_exact(&mut b[..len])?;
            if a[..len] != b[..len] {
                return Ok((false, there_bytes));
            }
            offset += len as u64;
        }
        Ok((true, there_bytes))
    }
}

/// Makes the root and the staging directory, adopts the root as the store's from now on, and removes what crashes left there.
pub(super) fn prepare(of: &Root) -> io::Result<()> {
    let root = of.path();
    make_directories(root)?;
    if let Err(error) = std::fs::DirBuilder::new().mode(STAGING_MODE).create(root.join(STAGING))
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(error);
    }
    of.take()?;
    let mut at = Some(root);
    while let Some(directory) = at.filter(|d| !d.as_os_str().is_empty()) {
        // Directories above the root that the daemon may not open existed before.
        match File::open(directory) {
            Ok(open) => open.sync_all()?,
            Err(_) if directory != root => break,
            Err(error) => return Err(error),
        }
        at = directory.parent();
    }
    for entry in std::fs::read_dir(root.join(STAGING))? {
        let entry = entry?;
        let path = entry.path();
        if is_mark(&entry.file_name()) {
            continue;
        }
        if let Err(error) = sweep(&path) {
            tracing::debug!(path = %path.display(), %error, "a leftover could not be removed");
        }
    }
    Ok(())
}

fn sweep(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    let age = file.metadata()?.modified()?.elapsed().unwrap_or(Duration::ZERO);
    if age >= LEFTOVER_AGE && fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// Writes, names and syncs a whole small object; returns `Ok(false)` if the name holds other bytes.
pub(super) fn create(root: &Root, key: &str, body: &Bytes, syncs: &DirectorySyncs) -> io::Result<bool> {
    let target = path_of(root.path(), key);
    // A document names files, and holds attributes, that may be closed to other users.
    let mut staged = Staged::new(root, 0, Readers::default())?;
    staged.file.write_all(body)?;
    staged.sync(true)?;
    if staged.place(root, &target, syncs)? {
        return Ok(true);
    }
    Ok(staged.equals(root, &target)?.0)
}

/// Writes, names and syncs a whole data object; returns `Ok(Some(bytes there))` if the name holds other bytes.
pub(super) fn upload(
    root: &Root,
    target: &Path,
    (body, readers): (&Bytes, Readers),
    syncs: &DirectorySyncs,
    direct: &Arc<Direct>,
) -> io::Result<Option<u64>> {
    // Space is reserved only for writes past the page cache, which are slow beyond the end of a file.
    let staged = if body.len() < DIRECT_LEAST_BYTES {
        Staged::new(root, 0, readers)?
    } else {
        Staged::new_direct(root, body.len() as u64, readers, direct)?
    };
    staged.write_at(body, 0)?;
    staged.finish(root, target, syncs)
}

/// Finds out whether parts can go past the page cache here. If nothing can be written now, they do not until the next start: existing
/// objects can still be read, and a writer gets its own error.
pub(super) fn try_direct(root: &Root, direct: &Direct) -> io::Result<()> {
    match Staged::new(root, 0, Readers::default()) {
        Ok(staged) => direct.try_out(&staged.path, &staged.file),
        Err(error) if takes_nothing(error.kind()) => {
            tracing::warn!(%error, "the store takes nothing now: it is opened for reading");
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Whether this is the answer of a file system that is full or read-only, but can be read.
pub(super) fn takes_nothing(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::ReadOnlyFilesystem
    )
}

/// Whether a difference between the written bytes and the file is found, for the probe.
pub(super) fn finds_damage(root: &Root) -> io::Result<bool> {
    let staged = Staged::new(root, 0, Readers::default())?;
    super::compare::finds_damage(&staged.file)
}

/// Removes the object, durably, and the directories that it leaves empty.
pub(super) fn delete(root: &Root, key: &str) -> io::Result<()> {
    let top = root.path();
    let path = path_of(top, key);
    let above = path.parent().unwrap_or(top);
    let inside = root.enter()?;
    inside.prove()?;
    let Some(directory) = inside.found(inside.open(above, OFlags::PATH | OFlags::DIRECTORY))? else {
        return Ok(());
    };
    let name = name_of(&path)?;
    let removed = match fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(there) if FileType::from_raw_mode(there.st_mode) == FileType::Directory => {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "a directory, not an object"));
        }
        Ok(_) => fs::unlinkat(&directory, name, AtFlags::empty()),
        Err(errno) => Err(errno),
    };
    if inside.found(removed.map_err(io::Error::from))?.is_none() {
        return Ok(());
    }
    let mut at = Some(above);
    while let Some(directory) = at.filter(|directory| *directory != top) {
        match std::fs::remove_dir(directory) {
            Ok(()) => at = directory.parent(),
            Err(_) => break,
        }
    }
    match File::open(at.unwrap_or(top)) {
        Ok(directory) => directory.sync_all(),
        Err(error) if is_absent(&error) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Opens the directory of an object, and makes it if it is missing. No link leads there, and the directory is made only in the store's
/// own.
fn directory_of(root: &Root, target: &Path) -> io::Result<OwnedFd> {
    let top = root.path();
    let parent = target.parent().unwrap_or(top);
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let inside = root.enter()?;
    if let Some(directory) = inside.found(inside.open(parent, flags))? {
        return Ok(directory);
    }
    make_directories(parent)?;
    inside.open(parent, flags)
}

fn name_of(path: &Path) -> io::Result<&std::ffi::OsStr> {
    path.file_name().ok_or_else(|| io::Error::other("a key has a last part"))
}

fn make_directories(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path)
}

/// Returns the mode of an object: the daemon's user reads and writes; the users who may read the file read. The umask may remove more.
fn object_mode(readers: Readers) -> u32 {
    let group = if readers.group { 0o040 } else { 0 };
    let others = if readers.others { 0o004 } else { 0 };
    0o600 | group | others
}

/// fsyncs every directory from the object's up to the root. Another writer may have just made any of them without a sync, so none is
/// skipped. Callers that need the same directory at the same time share its fsync.
fn sync_parents(root: &Path, target: &Path, syncs: &DirectorySyncs) -> io::Result<()> {
    let mut at = target.parent();
    while let Some(directory) = at {
        syncs.sync(directory)?;
        if directory == root {
            break;
        }
        at = directory.parent();
    }
    Ok(())
}

//! The spill's own folder in a directory that a person named: made private, locked, and cleared of what dead daemons left.
//!
//! Owns: the folder's name and life, its lock, the check that the directory can hold backing files. Does not own: the files in
//! it (`file`), the budget (`mod`), the directory itself, which is never made nor emptied.
//!
//! A folder's name is `tidemark-spill-<node>-<incarnation>`. The folder is locked while its daemon lives, or the keeper that has the
//! descriptor. When memory is lost, the journal is lost with it, and without the journal these files belong to nothing.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, open, openat, statat, unlinkat};
use rustix::io::Errno;

use crate::{Tier1Error, adopt, mount};

const FOLDER_PREFIX: &str = "tidemark-spill-";

/// Prefix of the names of backing files, before their number.
pub(super) const FILE_PREFIX: &str = "f-";

/// The folder of one node's life. Removed at an orderly end, or when it is dropped and no successor was promised it.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    removed: AtomicBool,
    /// Whether a successor may go on with it: then this process's end is not its end.
    is_kept: AtomicBool,
    /// The directory, which also carries the lock: duplicates share it, also those that the keeper has.
    directory: OwnedFd,
}

impl Folder {
    /// Makes the folder of `name` below `base`, after removing those of dead daemons.
    ///
    /// # Errors
    /// When `base` is missing, cannot be written, or lies on a file system that cannot hold backing files.
    pub(super) fn make(base: &Path, name: &str) -> Result<Self, Tier1Error> {
        let failed = |step, source: io::Error| Tier1Error::Spill { step, path: base.to_owned(), source };
        let base_lock = open_directory(base).map_err(|source| failed("opening", source))?;
        // Held while folders are made and removed, so that no other daemon removes one that is not locked yet.
        flock(&base_lock, FlockOperation::LockExclusive).map_err(|error| failed("locking", error.into()))?;
        sweep(base);
        let path = base.join(format!("{FOLDER_PREFIX}{name}"));
        let made = fs::DirBuilder::new().mode(0o700).create(&path);
        made.map_err(|source| failed("making a folder in", source))?;
        let directory = open_directory(&path).map_err(|source| failed("opening the folder in", source))?;
        flock(&directory, FlockOperation::NonBlockingLockExclusive)
            .map_err(|error| failed("locking the folder in", error.into()))?;
        let folder = Self::new(path, directory, false);
        let (leases, preallocation) = mount::probe(&folder.directory);
        for (what, capability) in [("asking leases in", leases), ("making space ready in", preallocation)] {
            if !capability.works {
                return Err(failed(what, io::Error::other(capability.reason)));
            }
        }
        Ok(folder)
    }

    /// Makes a folder from the one that an earlier daemon made, with its lock.
    pub(super) fn take_over(path: PathBuf, directory: OwnedFd) -> io::Result<Self> {
        adopt::is_alive(&directory)?;
        Ok(Self::new(path, directory, true))
    }

    fn new(path: PathBuf, directory: OwnedFd, is_kept: bool) -> Self {
        Self { path, removed: AtomicBool::new(false), is_kept: AtomicBool::new(is_kept), directory }
    }

    /// Leaves the removal to [`Folder::remove`] alone.
    pub(super) fn keep(&self) {
        self.is_kept.store(true, Ordering::Release);
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn directory(&self) -> &OwnedFd {
        &self.directory
    }
}

impl Folder {
    /// Removes the folder with everything in it, once; threads that still have one of its files open keep that file.
    pub(super) fn remove(&self) {
        if self.removed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Err(error) = empty(&self.directory).and_then(|()| fs::remove_dir(&self.path)) {
            tracing::warn!(path = %self.path.display(), %error, "the spill's folder stays behind until the next start");
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !*self.is_kept.get_mut() {
            self.remove();
        }
    }
}

/// Removes the folders of daemons that are dead, including their keepers. Only directories of this user with a name like ours
/// and nothing but backing files are removed; anything else is left as it is.
fn sweep(base: &Path) {
    let Ok(entries) = fs::read_dir(base) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(FOLDER_PREFIX) {
            continue;
        }
        let path = entry.path();
        let Ok(directory) = open_directory(&path) else { continue };
        let ours = statat(&directory, ".", AtFlags::empty())
            .is_ok_and(|stat| stat.st_uid == rustix::process::geteuid().as_raw());
        if !ours || flock(&directory, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        match empty(&directory).and_then(|()| fs::remove_dir(&path)) {
            Ok(()) => tracing::info!(path = %path.display(), "removed the spill of a dead daemon"),
            Err(error) => tracing::warn!(path = %path.display(), %error, "a dead daemon's spill stays"),
        }
    }
}

/// Removes the backing files, and only those.
fn empty(directory: &OwnedFd) -> io::Result<()> {
    for number in adopt::numbers(directory, FILE_PREFIX)? {
        match unlinkat(directory, file_name(number), AtFlags::empty()) {
            // The last user of that file was quicker.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    // Left by a daemon that was killed during its probe.
    let _ = unlinkat(directory, mount::PROBE_NAME, AtFlags::empty());
    Ok(())
}

pub(super) fn file_name(number: u64) -> String {
    format!("{FILE_PREFIX}{number}")
}

pub(super) fn open_file(directory: &OwnedFd, number: u64, access: OFlags) -> io::Result<OwnedFd> {
    let mode = Mode::RUSR | Mode::WUSR;
    Ok(openat(directory, file_name(number), access | OFlags::NOFOLLOW | OFlags::CLOEXEC, mode)?)
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    Ok(open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

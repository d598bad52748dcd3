//! The medium of the bytes: three private tmpfs mounts, or three folders of a directory without privileges.
//!
//! Owns: making and removing the medium, and finding out its abilities by real calls ([`Capabilities`]). Does not own:
//! the files in it (`pool`, `backing`, `ballast`; the namespace's journal).

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags, flock, fstat, lstat, open, openat, unlinkat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use rustix::mount::{fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen};

use super::adopt::{self, KeptMounts};
use super::{MediumChoice, Tier1Error, lease};

/// The result of a real call, with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capability {
    pub works: bool,
    pub reason: String,
}

impl Capability {
    fn yes(reason: &str) -> Self {
        Self { works: true, reason: reason.to_owned() }
    }

    fn no(reason: impl Into<String>) -> Self {
        Self { works: false, reason: reason.into() }
    }
}

/// The abilities of this Tier-1 on this machine. Every field is the result of a call made at open, never of a version
/// number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether the bytes lie on a tmpfs of our own that no path leads to.
    pub private_tmpfs: Capability,
    /// Whether the mount accepted `huge=within_size`: files get 2 MiB folios if they are long enough.
    pub huge: Capability,
    /// Whether the mount accepted `noswap`.
    pub noswap: Capability,
    /// Whether leases show that a writable handle or mapping lives; without them nothing can be sealed safely.
    pub leases: Capability,
    /// Whether space beyond the end of a file can be made ready and freed; without that there is no pool and no
    /// ballast.
    pub preallocation: Capability,
}

/// The open directories of one medium.
#[derive(Debug)]
pub(super) struct Medium {
    pub(super) files: OwnedFd,
    pub(super) ballast: OwnedFd,
    pub(super) journal: OwnedFd,
    /// Whether the kernel enforces the size (our own tmpfs); a directory shares its file system with others.
    pub(super) walled: bool,
    /// The folder, if the medium is one; dropped last.
    folder: Option<Folder>,
}

const FOLDERS: [&str; 3] = ["files", "ballast", "journal"];

impl Medium {
    pub(super) fn open(
        choice: &MediumChoice,
        size_bytes: u64,
        journal_bytes: u64,
    ) -> Result<(Self, Capabilities), Tier1Error> {
        match choice {
            MediumChoice::PrivateTmpfs => Self::private(size_bytes, journal_bytes),
            MediumChoice::Directory(path) => {
                Self::directory(path, Capability::no("a directory was asked for"))
            }
            MediumChoice::Auto => match Self::private(size_bytes, journal_bytes) {
                Ok(medium) => Ok(medium),
                Err(error) => {
                    let uid = rustix::process::geteuid().as_raw();
                    let path = PathBuf::from(format!("/dev/shm/tidemark-{uid}"));
                    Self::directory(&path, Capability::no(error.to_string()))
                }
            },
        }
    }

    /// Goes on with kept directories. The mounts still have the options that they were made with.
    pub(super) fn take_over(kept: KeptMounts) -> Result<(Self, Capabilities), Tier1Error> {
        let KeptMounts { files, ballast, journal, folder, spill: _ } = kept;
        for directory in [&files, &ballast, &journal] {
            adopt::is_alive(directory).map_err(adopt::failed)?;
        }
        let private = folder.is_none();
        let (leases, preallocation) = probe(&files);
        let ours = |reason: &str| {
            if private { Capability::yes(reason) } else { Capability::no("a directory was asked for") }
        };
        let capabilities = Capabilities {
            private_tmpfs: ours("taken over with its files from the daemon before"),
            huge: ours("the mount has it since it was made, where the kernel knows it"),
            noswap: ours("the mount has it since it was made, where the kernel knows it"),
            leases,
            preallocation,
        };
        let folder = folder.map(|(path, lock)| Folder::new(path, lock, true));
        Ok((Self { files, ballast, journal, walled: private, folder }, capabilities))
    }

    /// Returns duplicates of everything that a successor needs. From now on only [`Medium::remove`] removes a folder.
    pub(super) fn keep(&self) -> io::Result<KeptMounts> {
        let folder = match &self.folder {
            Some(folder) => {
                folder.is_kept.store(true, Ordering::Release);
                Some((folder.path.clone(), folder.lock.try_clone()?))
            }
            None => None,
        };
        let (files, ballast) = (self.files.try_clone()?, self.ballast.try_clone()?);
        Ok(KeptMounts { files, ballast, journal: self.journal.try_clone()?, folder, spill: None })
    }

    /// Ends the memory: a folder is removed with everything in it. Open files stay until they are closed.
    pub(super) fn remove(&self) {
        if let Some(folder) = &self.folder {
            folder.remove();
        }
    }

    /// Whether the files have no names any more.
    pub(super) fn is_removed(&self) -> bool {
        self.folder.as_ref().is_some_and(|folder| folder.is_removed.load(Ordering::Acquire))
    }

    fn private(size_bytes: u64, journal_bytes: u64) -> Result<(Self, Capabilities), Tier1Error> {
        let (files, options) = private_tmpfs(size_bytes - journal_bytes)?;
        // The ballast's own limit is the whole budget, because the budget's sum decides. No page of the ballast may
        // count against the wall that the files meet.
        let (ballast, _) = private_tmpfs(size_bytes)?;
        let (journal, _) = private_tmpfs(journal_bytes)?;
        let (leases, preallocation) = probe(&files);
        let capabilities = Capabilities {
            private_tmpfs: Capability::yes("fsopen and fsmount made a detached tmpfs"),
            huge: options.huge,
            noswap: options.noswap,
            leases,
            preallocation,
        };
        Ok((Self { files, ballast, journal, walled: true, folder: None }, capabilities))
    }

    fn directory(base: &Path, why: Capability) -> Result<(Self, Capabilities), Tier1Error> {
        let folder = Folder::make(base)?;
        let [files, ballast, journal] = FOLDERS.map(|name| {
            let path = folder.path.join(name);
            make_private(&path)?;
            open_directory(&path)
        });
        let (files, ballast, journal) = (files?, ballast?, journal?);
        let (leases, preallocation) = probe(&files);
        let no = || Capability::no("only a mount of our own takes this option");
        let capabilities =
            Capabilities { private_tmpfs: why, huge: no(), noswap: no(), leases, preallocation };
        Ok((Self { files, ballast, journal, walled: false, folder: Some(folder) }, capabilities))
    }
}

struct MountOptions {
    huge: Capability,
    noswap: Capability,
}

/// Makes a tmpfs that is attached nowhere; the descriptor is its root and its only owner.
///
/// `huge=within_size` gives 2 MiB folios to long files and small ones to short files (`always` spends 2 MiB
/// and milliseconds on every 4 KiB file). Options a kernel does not know are left out and reported.
fn private_tmpfs(size_bytes: u64) -> Result<(OwnedFd, MountOptions), Tier1Error> {
    let failed =
        |step| move |source: rustix::io::Errno| Tier1Error::Mount { step, size_bytes, source: source.into() };
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed("fsopen"))?;
    fsconfig_set_string(&context, "size", size_bytes.to_string()).map_err(failed("setting size"))?;
    fsconfig_set_string(&context, "mode", "0700").map_err(failed("setting mode"))?;
    let huge = match fsconfig_set_string(&context, "huge", "within_size") {
        Ok(()) => Capability::yes("the mount took huge=within_size"),
        Err(error) => Capability::no(format!("huge=within_size: {error}")),
    };
    let noswap = match fsconfig_set_flag(&context, "noswap") {
        Ok(()) => Capability::yes("the mount took noswap"),
        Err(error) => Capability::no(format!("noswap: {error}")),
    };
    fsconfig_create(&context).map_err(failed("creating"))?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let root = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(failed("fsmount"))?;
    // The mount's own descriptor is a path only; a directory opened through it also supports readdir and fsync.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(&root, ".", flags, Mode::empty()).map_err(failed("opening the root"))?;
    Ok((root, MountOptions { huge, noswap }))
}

/// Name of the file used by the probe.
pub(super) const PROBE_NAME: &str = "probe";

/// Tries a lease with and without a writer, and space beyond the end of a file.
pub(super) fn probe(files: &OwnedFd) -> (Capability, Capability) {
    const NAME: &str = PROBE_NAME;
    // A daemon that was killed during its probe left this file behind; otherwise there is none.
    let _ = unlinkat(files, NAME, rustix::fs::AtFlags::empty());
    let made = openat(
        files,
        NAME,
        OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC,
        Mode::RUSR | Mode::WUSR,
    );
    let writer = match made {
        Ok(writer) => writer,
        Err(error) => {
            let no = Capability::no(format!("creating a file: {error}"));
            return (no.clone(), no);
        }
    };
    let preallocation = probe_preallocation(&writer);
    let answers = (probe_leases(files, NAME, writer), preallocation);
    if let Err(error) = unlinkat(files, NAME, rustix::fs::AtFlags::empty()) {
        tracing::warn!(%error, "the probe file of tier-1 could not be removed");
    }
    answers
}

/// Takes the writer, because the second question is only true once the writer is gone.
fn probe_leases(files: &OwnedFd, name: &str, writer: OwnedFd) -> Capability {
    let tried = || -> io::Result<(bool, bool)> {
        let reader = openat(files, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let with_writer = lease::writable_elsewhere(reader.as_fd())?;
        drop(writer);
        Ok((with_writer, lease::writable_elsewhere(reader.as_fd())?))
    };
    match tried() {
        Ok((true, false)) => Capability::yes("a read lease is refused exactly while a writer lives"),
        Ok((false, _)) => Capability::no("a read lease was granted although a writer lives"),
        Ok((true, true)) => Capability::no("a read lease was refused although no writer lives"),
        Err(error) => Capability::no(format!("F_SETLEASE: {error}")),
    }
}

fn probe_preallocation(writer: &OwnedFd) -> Capability {
    const LEN_BYTES: u64 = 64 << 10;
    let tried = rustix::fs::fallocate(writer, FallocateFlags::KEEP_SIZE, 0, LEN_BYTES).and_then(|()| {
        rustix::fs::fallocate(writer, FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE, 0, LEN_BYTES)
    });
    match tried {
        Ok(()) => Capability::yes("fallocate keeps the size and punches holes"),
        // The Tier-1 was taken over while programs fill it: it is full because this works.
        Err(rustix::io::Errno::NOSPC) => Capability::yes("fallocate says that there is no room now"),
        Err(error) => Capability::no(format!("fallocate: {error}")),
    }
}

/// The folder of one Tier-1 below the directory that the user named. A lock on it shows that its owner lives.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    lock: OwnedFd,
    /// Whether a successor may go on with it: then this process's end is not its end.
    is_kept: AtomicBool,
    is_removed: AtomicBool,
}

const FOLDER_PREFIX: &str = "tier1-";
static FOLDERS_MADE: AtomicU64 = AtomicU64::new(0);

/// Times that a folder is emptied before it is left behind: work that ends with the process may make a file during the
/// first.
const REMOVE_TRIES: u32 = 8;

impl Folder {
    fn make(base: &Path) -> Result<Self, Tier1Error> {
        make_private(base)?;
        // Held while folders are made and removed, so that no other daemon removes one that is not locked yet.
        let base_lock = open_directory(base)?;
        lock(&base_lock, base, FlockOperation::LockExclusive)?;
        sweep(base);
        let number = FOLDERS_MADE.fetch_add(1, Ordering::Relaxed);
        let path = base.join(format!("{FOLDER_PREFIX}{}-{number}", std::process::id()));
        make_private(&path)?;
        let own = open_directory(&path)?;
        lock(&own, &path, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self::new(path, own, false))
    }

    fn new(path: PathBuf, lock: OwnedFd, is_kept: bool) -> Self {
        Self { path, lock, is_kept: AtomicBool::new(is_kept), is_removed: AtomicBool::new(false) }
    }

    /// Removes the folder with everything in it, once.
    fn remove(&self) {
        if self.is_removed.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut removed = self.try_remove();
        for _ in 1..REMOVE_TRIES {
            if !removed.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::DirectoryNotEmpty) {
                break;
            }
            removed = self.try_remove();
        }
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "tier-1's folder stays behind and holds memory");
        }
    }

    /// Removes the folder only while its path still leads to the locked one: another folder in its place is not ours.
    fn try_remove(&self) -> io::Result<()> {
        let found = match lstat(&self.path) {
            Ok(found) => found,
            Err(rustix::io::Errno::NOENT) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let ours = fstat(&self.lock)?;
        if (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino) {
            return Ok(());
        }
        fs::remove_dir_all(&self.path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !*self.is_kept.get_mut() {
            self.remove();
        }
    }
}

/// Removes the folders of daemons that were killed: their memory would never be freed.
fn sweep(base: &Path) {
    let Ok(entries) = fs::read_dir(base) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(FOLDER_PREFIX) {
            continue;
        }
        let path = entry.path();
        let Ok(directory) = open_directory(&path) else { continue };
        if flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok() {
            match fs::remove_dir_all(&path) {
                Ok(()) => {
                    tracing::info!(path = %path.display(), "removed the tier-1 folder of a dead daemon")
                }
                Err(error) => tracing::warn!(path = %path.display(), %error, "a dead daemon's folder stays"),
            }
        }
    }
}

fn make_private(path: &Path) -> Result<(), Tier1Error> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|source| Tier1Error::Directory {
        step: "making",
        path: path.to_owned(),
        source,
    })
}

fn open_directory(path: &Path) -> Result<OwnedFd, Tier1Error> {
    open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
        .map_err(|source| Tier1Error::Directory {
            step: "opening",
            path: path.to_owned(),
            source: source.into(),
        })
}

fn lock(directory: &OwnedFd, path: &Path, how: FlockOperation) -> Result<(), Tier1Error> {
    flock(directory, how).map_err(|source| Tier1Error::Directory {
        step: "locking",
        path: path.to_owned(),
        source: source.into(),
    })
}

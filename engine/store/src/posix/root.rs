//! The directory that holds the store: whether it is present, and names below it that no symbolic link leads away from.
//!
//! Owns: the proof that a directory is the store's, opening below it. Does not own: keys (`names`), the use of opened files (`files`,
//! `walk`).
//!
//! An empty mount point looks like a store from which everything was removed. Only the store's own directory can therefore say that an
//! object is absent. Each call opens the directory once and works below that descriptor; if nothing is found, the descriptor must prove to
//! be the store's. There are two proofs: the directory (mount, device and inode) was the store's before, or it has the store's mark. The
//! mark is an empty directory with a random name in the staging directory, and identifies a file system that was mounted again. No
//! descriptor is kept between calls, because it would block an unmount.
//!
//! No symbolic link below the directory is followed, whoever made it: the daemon may read and write more than the user who made the link.
//! The directory itself may be a link, or lie below one.

use super::names::STAGING;
use rustix::fs::{self, AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Prefix of a mark's name. Two daemons that make one at the same time leave two, and each is as good.
const MARK: &str = "store-";

/// Maximum number of links that are logged: these suffice to show what is wrong with a store.
const LINKS_TOLD_MAX: usize = 64;

/// Mode of a mark, which has no content but its name.
const MARK_MODE: u32 = 0o700;

/// See the module's head.
#[derive(Debug)]
pub(super) struct Root {
    path: PathBuf,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// Symbolic links that were logged.
    links: BTreeSet<String>,
    /// The last directory that was the store's.
    identity: Option<Identity>,
    /// The path of the mark below the directory. None before [`Root::take`].
    mark: Option<PathBuf>,
}

/// Identity of a directory of one mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    mount: u64,
    device: (u32, u32),
    inode: u64,
}

/// The directory as found at the beginning of one call.
#[derive(Debug)]
pub(super) struct Inside<'a> {
    root: &'a Root,
    directory: OwnedFd,
}

impl Root {
    /// Makes a root, without access to the directory.
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), known: Mutex::default() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the directory for one call.
    ///
    /// # Errors
    /// When the directory is missing, which is no answer about any object.
    pub(super) fn enter(&self) -> io::Result<Inside<'_>> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match fs::openat(CWD, &self.path, flags, Mode::empty()) {
            Ok(directory) => Ok(Inside { root: self, directory }),
            Err(Errno::NOENT | Errno::NOTDIR) => Err(self.away()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Adopts the present directory as the store's: finds its mark, or makes one. The staging directory exists.
    pub(super) fn take(&self) -> io::Result<()> {
        let inside = self.enter()?;
        let staging = self.path.join(STAGING);
        let mut found = None;
        for entry in std::fs::read_dir(&staging)? {
            let name = entry?.file_name();
            if is_mark(&name) {
                found = Some(name);
                break;
            }
        }
        let name = match found {
            Some(name) => name,
            None => {
                let mut random = [0_u8; 16];
                getrandom::fill(&mut random).map_err(io::Error::other)?;
                let name = format!("{MARK}{:032x}", u128::from_le_bytes(random));
                let mark = Path::new(STAGING).join(&name);
                fs::mkdirat(&inside.directory, &mark, Mode::from_raw_mode(MARK_MODE))?;
                File::open(&staging)?.sync_all()?;
                name.into()
            }
        };
        let identity = inside.identity()?;
        let mut known = self.known();
        known.identity = Some(identity);
        known.mark = Some(Path::new(STAGING).join(name));
        Ok(())
    }

    /// Logs, once for each symbolic link, that a listing left it out.
    pub(super) fn leaves_out(&self, link: &str) {
        let mut known = self.known();
        if known.links.len() < LINKS_TOLD_MAX && known.links.insert(link.to_owned()) {
            tracing::warn!(
                store = %self.path.display(), link,
                "a symbolic link below the store is not followed: what it leads to is not there; mount that directory in its place (mount --bind)"
            );
        }
    }

    /// Makes the error for a missing directory. The kind is not `NotFound`, so that no caller takes it for an answer about an object.
    fn away(&self) -> io::Error {
        io::Error::other(format!(
            "{} is missing, or is not the directory that this store was opened in, such as an empty mount point; mount it or put it \
             back, or restart the daemon if this directory is the store from now on",
            self.path.display()
        ))
    }
}

impl Inside<'_> {
    /// Opens `path`, which begins with the path of the directory.
    ///
    /// # Errors
    /// The errors of open(2). A symbolic link on the way or at its end is of the kind `InvalidData`.
    pub(super) fn open(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let below = path.strip_prefix(&self.root.path).map_err(io::Error::other)?;
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let opened = fs::openat2(&self.directory, below, flags | OFlags::CLOEXEC, Mode::empty(), resolve);
        opened.map_err(|errno| match errno {
            Errno::LOOP => io::Error::new(
                io::ErrorKind::InvalidData,
                "a symbolic link is or leads there, and none below this store is followed",
            ),
            Errno::NOSYS => {
                io::Error::new(io::ErrorKind::Unsupported, "this kernel, or its filter, has no openat2(2)")
            }
            errno => errno.into(),
        })
    }

    /// Resolves the answer of a call below the directory. `None`: there is no such object, and this is the store's directory.
    ///
    /// # Errors
    /// The error in `result`, or that this is not the store's directory.
    pub(super) fn found<T>(&self, result: io::Result<T>) -> io::Result<Option<T>> {
        match result {
            Ok(found) => Ok(Some(found)),
            Err(error) if is_absent(&error) => self.prove().map(|()| None),
            Err(error) => Err(error),
        }
    }

    /// Fails unless this is the store's directory.
    pub(super) fn prove(&self) -> io::Result<()> {
        let identity = self.identity()?;
        let mark = {
            let known = self.root.known();
            if known.identity == Some(identity) {
                return Ok(());
            }
            known.mark.clone()
        };
        let Some(mark) = mark else { return Err(self.root.away()) };
        match fs::statat(&self.directory, &mark, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => {
                self.root.known().identity = Some(identity);
                Ok(())
            }
            Err(Errno::NOENT | Errno::NOTDIR) => Err(self.root.away()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns the identity of the directory. Network file systems that are mounted one after the other may have one device number, and one
    /// inode for their roots: the number of the mount tells them apart.
    fn identity(&self) -> io::Result<Identity> {
        let wanted = StatxFlags::INO | StatxFlags::MNT_ID;
        let found = fs::statx(&self.directory, "", AtFlags::EMPTY_PATH, wanted)?;
        Ok(Identity {
            mount: found.stx_mnt_id,
            device: (found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
        })
    }
}

/// Whether an entry of the staging directory is a mark, which no sweep removes.
pub(super) fn is_mark(name: &std::ffi::OsStr) -> bool {
    name.as_encoded_bytes().starts_with(MARK.as_bytes())
}

/// Opens an object for reading. A directory, a socket and the like are refused before a read could hang on them.
pub(super) fn open_object(inside: &Inside<'_>, path: &Path) -> io::Result<File> {
    open_object_with(inside, path, OFlags::empty())
}

/// Does the same with further flags. The file is opened nonblocking.
pub(super) fn open_object_with(inside: &Inside<'_>, path: &Path, flags: OFlags) -> io::Result<File> {
    let file = File::from(inside.open(path, OFlags::RDONLY | OFlags::NONBLOCK | flags)?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::IsADirectory,
            "a directory or special file, not an object",
        ));
    }
    Ok(file)
}

/// Whether the error means that there is no such object.
pub(super) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn scene() -> (tempfile::TempDir, Root) {
        let folder = tempfile::tempdir().expect("tempdir");
        let root = Root::new(&folder.path().join("root"));
        std::fs::create_dir_all(root.path().join(STAGING)).expect("create");
        root.take().expect("take");
        (folder, root)
    }

    fn is_there(root: &Root, name: &str) -> io::Result<bool> {
        let inside = root.enter()?;
        Ok(inside.found(inside.open(&root.path().join(name), OFlags::PATH))?.is_some())
    }

    #[test]
    fn only_the_directory_of_the_store_says_that_something_is_absent() {
        let (folder, root) = scene();
        std::fs::write(root.path().join("k"), "1").expect("write");
        assert!(is_there(&root, "k").expect("there"));
        assert!(!is_there(&root, "other").expect("absent"));
        let aside = folder.path().join("aside");
        std::fs::rename(root.path(), &aside).expect("rename");
        let error = is_there(&root, "k").expect_err("no directory");
        assert_eq!(error.kind(), io::ErrorKind::Other, "{error}");
        // A mount point, and a directory in which another store was made.
        std::fs::create_dir(root.path()).expect("create");
        is_there(&root, "k").expect_err("an empty directory");
        std::fs::create_dir_all(root.path().join(STAGING).join(format!("{MARK}0"))).expect("create");
        is_there(&root, "k").expect_err("another store");
        std::fs::remove_dir_all(root.path()).expect("remove");
        std::fs::rename(&aside, root.path()).expect("rename");
        assert!(is_there(&root, "k").expect("it is back"));
        assert!(!is_there(&root, "other").expect("absent once more"));
    }

    #[test]
    fn a_store_that_is_mounted_again_is_known_by_its_mark_and_one_whose_mark_is_gone_by_itself() {
        let (folder, root) = scene();
        let staging = root.path().join(STAGING);
        let mark =
            std::fs::read_dir(&staging).expect("list").next().expect("a mark").expect("entry").file_name();
        // Another inode with the same mark, as after a mount with another device number.
        std::fs::rename(root.path(), folder.path().join("aside")).expect("rename");
        std::fs::create_dir_all(staging.join(&mark)).expect("create");
        assert!(!is_there(&root, "k").expect("the same store"));
        std::fs::remove_dir(staging.join(&mark)).expect("remove");
        assert!(!is_there(&root, "k").expect("the same directory"));
        root.take().expect("take");
        assert_eq!(std::fs::read_dir(&staging).expect("list").count(), 1, "a new mark");
        Root::new(root.path()).take().expect("take");
        assert_eq!(std::fs::read_dir(&staging).expect("list").count(), 1, "one mark for all");
    }

    #[test]
    fn no_link_below_is_followed_and_those_above_are() {
        let (folder, root) = scene();
        std::fs::write(folder.path().join("secret"), "1").expect("write");
        symlink("../secret", root.path().join("out")).expect("link");
        std::fs::write(root.path().join("k"), "1").expect("write");
        symlink("k", root.path().join("in")).expect("link");
        symlink("..", root.path().join("up")).expect("link");
        for name in ["out", "in", "up", "up/secret", "up/root/k"] {
            let error = is_there(&root, name).expect_err(name);
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{name}: {error}");
        }
        symlink(folder.path(), folder.path().join("way")).expect("link");
        let led = Root::new(&folder.path().join("way/root"));
        led.take().expect("take");
        assert!(is_there(&led, "k").expect("there"));
    }
}

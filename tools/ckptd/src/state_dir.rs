//! The state directory: this user's own, one daemon each.
//!
//! Owns: the directory, its lock, making both again if someone removed them, reading and replacing files in it. Does not own: the socket
//! (control), the last known status (`up`), the members that a coordinator knew (`known`). Nothing in the directory is durable; it may be
//! deleted while no daemon runs.
//!
//! The daemon mostly runs as root, and writes here without being asked. So a directory that other users own or may change is
//! refused as it is, and no symbolic link in it is followed.

use anyhow::{Context, bail, ensure};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tidemark_api::{KEEPER_FILE_NAME, SOCKET_NAME, STATUS_FILE_NAME};
use tidemark_protocol::membership::MemberList;

/// How long a daemon may take to leave that was killed: its memory goes first, its locks after.
const LEAVING_PATIENCE: Duration = Duration::from_secs(3);
/// A status is a few kilobytes, and a list of members 3 MiB for ten thousand; a file that is larger was not written by us.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// The members that a coordinator without a lease knows.
const MEMBERS_FILE_NAME: &str = "members.json";
const LEAVING_EVERY: Duration = Duration::from_millis(20);

/// Permission of group and others to change a directory.
const OTHERS_WRITE: u32 = 0o022;

/// Proof that this process is the only daemon with this state directory. Released by death.
#[derive(Debug, Clone)]
pub(crate) struct StateDir {
    path: PathBuf,
    held: Arc<Mutex<Held>>,
}

#[derive(Debug)]
struct Held {
    /// None: it could not be opened by a daemon that goes on without.
    directory: Option<OwnedFd>,
    lock: File,
}

impl StateDir {
    /// Makes the directory if missing and takes its lock, unless it was `inherited` with the lock taken. Errors: the directory
    /// is not this user's alone; a live daemon holds it (its pid is named) and does not leave within [`LEAVING_PATIENCE`].
    /// With an inherited lock there is none: what serves does not need the directory.
    pub(crate) fn take(path: &Path, inherited: Option<OwnedFd>) -> anyhow::Result<Self> {
        let held = match inherited {
            Some(lock) => Held { directory: open_own(path).ok(), lock: lock.into() },
            None => {
                make(path)?;
                let directory = open_own(path)?;
                let lock = take_lock(path, &directory, LEAVING_PATIENCE)?;
                Held { directory: Some(directory), lock }
            }
        };
        Ok(Self { path: path.to_owned(), held: Arc::new(Mutex::new(held)) })
    }

    /// Whether the path still leads to the directory that this process holds.
    pub(crate) fn is_there(&self) -> bool {
        let held = self.held();
        let Some(directory) = &held.directory else { return false };
        let there = rustix::fs::stat(&self.path);
        let ours = rustix::fs::fstat(directory);
        matches!((there, ours), (Ok(there), Ok(ours)) if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino))
    }

    /// Makes the directory and its lock again. Errors: as [`StateDir::take`]; then another daemon has it, mostly.
    pub(crate) fn make_again(&self) -> anyhow::Result<()> {
        make(&self.path)?;
        let directory = open_own(&self.path)?;
        let mut held = self.held();
        let there = rustix::fs::statat(&directory, "lock", AtFlags::SYMLINK_NOFOLLOW);
        let ours = rustix::fs::fstat(&held.lock);
        // The earlier directory, which someone put back.
        let is_ours = matches!((there, ours), (Ok(there), Ok(ours)) if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino));
        if !is_ours {
            held.lock = take_lock(&self.path, &directory, Duration::ZERO)?;
        }
        held.directory = Some(directory);
        Ok(())
    }

    fn held(&self) -> std::sync::MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A duplicate of the lock: it is held until the last one is closed.
    pub(crate) fn lock(&self) -> std::io::Result<OwnedFd> {
        Ok(self.held().lock.try_clone()?.into())
    }

    /// Returns device and inode of the lock: a daemon that recorded them is dead once another process has the same lock.
    pub(crate) fn lock_identity(&self) -> std::io::Result<(u64, u64)> {
        let found = rustix::fs::fstat(&self.held().lock)?;
        Ok((found.st_dev, found.st_ino))
    }

    /// The socket that `ckptctl` talks to.
    pub(crate) fn socket(&self) -> PathBuf {
        self.path.join(SOCKET_NAME)
    }

    /// The coordinator's lock file when no other lease is asked for.
    pub(crate) fn lease(&self) -> PathBuf {
        self.path.join("lease")
    }

    /// Commands are answered: what the keeper said of daemons before this one is over.
    pub(crate) fn clear_keeper_status(&self) {
        // Nearly always there is none.
        if let Some(directory) = &self.held().directory {
            let _ = rustix::fs::unlinkat(directory, KEEPER_FILE_NAME, AtFlags::empty());
        }
    }

    /// Reads the last status of an earlier daemon; `None` if none can be read.
    pub(crate) fn last_status(&self) -> Option<tidemark_protocol::report::Status> {
        let mut text = Vec::new();
        let file = File::open(self.path.join("status.json")).ok()?;
        file.take(FILE_BYTES_MAX).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// The members that a daemon before this one knew when it was the coordinator; none where it was not, or the file is gone.
    ///
    /// # Errors
    /// It cannot be read, or is not what we write.
    pub(crate) fn last_members(&self) -> anyhow::Result<Option<MemberList>> {
        let held = self.held();
        let Some(directory) = &held.directory else { return Ok(None) };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(directory, MEMBERS_FILE_NAME, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let mut text = Vec::new();
        file.take(FILE_BYTES_MAX).read_to_end(&mut text)?;
        Ok(Some(serde_json::from_slice(&text)?))
    }

    /// Replaces the list of members that the next daemon begins with. Not synced: what members have not published is in memory, as this
    /// node's tree is.
    pub(crate) fn write_members(&self, members: &MemberList) -> std::io::Result<()> {
        self.replace(MEMBERS_FILE_NAME, &serde_json::to_vec(members)?)
    }

    /// Replaces the last known status, for `ckptctl status` when no daemon answers.
    pub(crate) fn write_status(&self, json: &[u8]) -> std::io::Result<()> {
        self.replace(STATUS_FILE_NAME, json)
    }

    /// Replaces a file of the directory in one step.
    fn replace(&self, name: &str, json: &[u8]) -> std::io::Result<()> {
        let held = self.held();
        let directory = held.directory.as_ref().ok_or(Errno::NOENT)?;
        let fresh = format!("{name}.new");
        // A daemon that was killed here may have left this file; it is never written through, whatever it is.
        match rustix::fs::unlinkat(directory, &fresh, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, &fresh, flags, Mode::RUSR | Mode::WUSR)?;
        File::from(file).write_all(json)?;
        Ok(rustix::fs::renameat(directory, &fresh, directory, name)?)
    }
}

/// Makes the directory with mode 0700 if it is missing.
fn make(path: &Path) -> anyhow::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("the state directory {} cannot be made", path.display()))
}

/// Opens the directory, and never changes an existing one. Errors: it is a link, belongs to another user, or others may change it.
fn open_own(path: &Path) -> anyhow::Result<OwnedFd> {
    let shown = path.display();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty());
    let directory = directory.map_err(|errno| match errno {
        Errno::LOOP | Errno::NOTDIR => anyhow::anyhow!(
            "the state directory {shown} is a symbolic link or no directory; give --state-dir the directory itself"
        ),
        errno => anyhow::Error::from(errno).context(format!("the state directory {shown} cannot be opened")),
    })?;
    let found = rustix::fs::fstat(&directory)
        .with_context(|| format!("the state directory {shown} cannot be looked at"))?;
    let own = rustix::process::geteuid().as_raw();
    ensure!(
        found.st_uid == own,
        "the state directory {shown} belongs to user {}, and ckptd runs as user {own}; give --state-dir a directory that is not \
         there yet",
        found.st_uid
    );
    ensure!(
        found.st_mode & OTHERS_WRITE == 0,
        "the state directory {shown} has mode {:04o}, with which other users may change it; give --state-dir a directory in it \
         that is not there yet, or take their permission away (chmod go-w)",
        found.st_mode & 0o7777
    );
    Ok(directory)
}

fn take_lock(path: &Path, directory: &OwnedFd, patience: Duration) -> anyhow::Result<File> {
    let shown = path.join("lock");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let descriptor = rustix::fs::openat(directory.as_fd(), "lock", flags, Mode::RUSR | Mode::WUSR)
        .with_context(|| format!("the lock {} cannot be opened", shown.display()))?;
    let mut lock = File::from(descriptor);
    let until = Instant::now() + patience;
    while let Err(errno) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        if !matches!(errno, Errno::WOULDBLOCK | Errno::INTR) {
            return Err(errno).with_context(|| format!("the lock {} cannot be taken", shown.display()));
        }
        if Instant::now() < until {
            std::thread::sleep(LEAVING_EVERY);
            continue;
        }
        let mut holder = String::new();
        let _ = (&lock).take(32).read_to_string(&mut holder);
        bail!(
            "another ckptd (pid {}) uses the state directory {}; stop it, or give this one --state-dir",
            holder.trim(),
            path.display()
        );
    }
    lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| write!(lock, "{}", std::process::id()))?;
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use tidemark_protocol::id::Epoch;

    fn refusal(path: &Path) -> String {
        format!("{:#}", StateDir::take(path, None).unwrap_err())
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_directory_that_others_may_change_or_a_link_is_refused_and_left_as_it_is() {
        let home = tempfile::tempdir().unwrap();
        let shared = home.path().join("shared");
        fs::create_dir(&shared).unwrap();
        for others in [0o1777, 0o775, 0o702] {
            fs::set_permissions(&shared, Permissions::from_mode(others)).unwrap();
            assert!(refusal(&shared).contains(&format!("mode {others:04o}")), "{}", refusal(&shared));
            assert_eq!((mode(&shared), fs::read_dir(&shared).unwrap().count()), (others, 0));
        }
        let link = home.path().join("link");
        let own = home.path().join("own");
        StateDir::take(&own, None).unwrap();
        symlink(&own, &link).unwrap();
        assert!(refusal(&link).contains("symbolic link"), "{}", refusal(&link));
        fs::set_permissions(&own, Permissions::from_mode(0o755)).unwrap();
        StateDir::take(&own, None).unwrap();
        assert_eq!(mode(&own), 0o755, "what others may only look into is taken, and not changed");
    }

    #[test]
    fn no_link_is_written_through_and_no_file_is_open_to_others() {
        let home = tempfile::tempdir().unwrap();
        let state = StateDir::take(&home.path().join("a/state"), None).unwrap();
        let precious = home.path().join("precious");
        fs::write(&precious, "precious").unwrap();
        for name in ["status.json.new", "status.json"] {
            symlink(&precious, state.path.join(name)).unwrap();
        }
        state.write_status(b"{}").unwrap();
        assert_eq!(fs::read(&precious).unwrap(), b"precious");
        assert_eq!(fs::read(state.path.join("status.json")).unwrap(), b"{}");
        assert_eq!((mode(&state.path), mode(&state.path.join("status.json"))), (0o700, 0o600));
    }

    #[test]
    fn the_members_that_were_written_last_are_read_and_what_is_no_list_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let state = StateDir::take(&home.path().join("state"), None).unwrap();
        assert_eq!(state.last_members().unwrap(), None);
        for epoch in [3, 4] {
            let list = MemberList { epoch: Epoch(epoch), ..MemberList::default() };
            state.write_members(&list).unwrap();
            assert_eq!(state.last_members().unwrap(), Some(list));
        }
        let path = state.path.join(MEMBERS_FILE_NAME);
        assert_eq!(mode(&path), 0o600);
        fs::write(&path, "{").unwrap();
        assert!(state.last_members().is_err());
        fs::remove_file(&path).unwrap();
        symlink(home.path().join("list"), &path).unwrap();
        assert!(state.last_members().is_err(), "a link is not followed");
    }

    #[test]
    fn a_directory_that_was_removed_is_made_again_unless_another_daemon_has_it() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("state");
        let state = StateDir::take(&path, None).unwrap();
        assert!(state.is_there());
        fs::remove_dir_all(&path).unwrap();
        assert!(!state.is_there());
        state.make_again().unwrap();
        assert!(state.is_there() && mode(&path) == 0o700);
        fs::remove_dir_all(&path).unwrap();
        let other = StateDir::take(&path, None).unwrap();
        assert!(format!("{:#}", state.make_again().unwrap_err()).contains("another ckptd"));
        assert!(other.is_there() && !state.is_there());
    }

    #[test]
    fn a_daemon_that_goes_on_needs_no_directory_and_takes_the_one_that_is_put_back() {
        let home = tempfile::tempdir().unwrap();
        let (path, aside) = (home.path().join("state"), home.path().join("aside"));
        let first = StateDir::take(&path, None).unwrap();
        fs::rename(&path, &aside).unwrap();
        let next = StateDir::take(&path, Some(first.lock().unwrap())).unwrap();
        assert!(!next.is_there() && !path.exists() && next.write_status(b"{}").is_err());
        fs::rename(&aside, &path).unwrap();
        next.make_again().unwrap();
        assert!(next.is_there());
        next.write_status(b"{}").unwrap();
    }
}

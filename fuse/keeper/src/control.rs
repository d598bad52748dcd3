//! The socket through which callers request an upgrade.
//!
//! Owns: the socket's path, the request and the answer, and the callers that are allowed: the keeper's own user and root, whatever the
//! state directory's mode is. Does not own: the upgrade (`keep`).

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The socket's name below the state directory.
const NAME: &str = "keeper.sock";

/// The longest request: a path of Linux and a word.
const QUESTION_MAX_BYTES: usize = 8 << 10;
const ANSWER_MAX_BYTES: usize = 4 << 10;

/// Requests that wait: one upgrade runs at a time.
const WAITING_MAX: i32 = 4;

/// How long a caller waits. The keeper gives a new daemon ten seconds, and then the old one as long.
const ANSWER_PATIENCE: Duration = Duration::from_secs(40);

/// Why a daemon was not replaced.
#[derive(Debug)]
pub enum UpgradeError {
    /// No keeper answers there.
    NoKeeper { path: PathBuf, source: io::Error },
    /// The keeper refused and says why; the old daemon serves.
    Refused { why: String },
}

impl std::fmt::Display for UpgradeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoKeeper { path, source } => write!(
                f,
                "no keeper answers at {} ({source}); is ckptd running, and is this its --state-dir? Where systemd keeps the \
                 descriptors (FileDescriptorStoreMax=) there is no keeper: replace the binary, then `systemctl kill \
                 --signal=KILL UNIT`, which keeps the mount and what is open",
                path.display()
            ),
            Self::Refused { why } => f.write_str(why),
        }
    }
}

impl std::error::Error for UpgradeError {}

/// Asks the keeper of a state directory to replace its daemon by `binary`. Waits until the new daemon serves, or the old one serves again.
/// Returns the new daemon's process id.
///
/// # Errors
/// [`UpgradeError`]; in both cases the daemon that served continues or is started again.
pub fn request_upgrade(state_dir: &Path, binary: &Path) -> Result<u32, UpgradeError> {
    let path = state_dir.join(NAME);
    let answer = ask(&path, binary).map_err(|source| UpgradeError::NoKeeper { path, source })?;
    match answer.strip_prefix("ready ").and_then(|pid| pid.parse().ok()) {
        Some(pid) => Ok(pid),
        None => Err(UpgradeError::Refused { why: answer }),
    }
}

fn ask(path: &Path, binary: &Path) -> io::Result<String> {
    let socket = seqpacket()?;
    rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Recv,
        Some(ANSWER_PATIENCE),
    )?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::send(&socket, binary.as_os_str().as_bytes(), SendFlags::NOSIGNAL)?;
    let mut answer = vec![0; ANSWER_MAX_BYTES];
    let (length, _) = rustix::net::recv(&socket, answer.as_mut_slice(), RecvFlags::empty())?;
    if length == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    answer.truncate(length);
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn seqpacket() -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// The keeper's end.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    path: PathBuf,
    /// Device and inode number of the socket's file, so that a removal is noticed.
    inode: (u64, u64),
}

/// A request for an upgrade, whose caller waits.
#[derive(Debug)]
pub(crate) struct Question {
    asker: OwnedFd,
    pub(crate) binary: PathBuf,
}

impl Listener {
    /// Replaces a socket that a dead keeper left. The state directory's lock ensures that no other keeper lives.
    pub(crate) fn bind(state_dir: &Path) -> io::Result<Self> {
        let path = state_dir.join(NAME);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let socket = seqpacket()?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path)?)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        rustix::net::listen(&socket, WAITING_MAX)?;
        let inode = inode_of(&path)?;
        Ok(Self { socket, path, inode })
    }

    /// Creates the socket again if it was removed and the state directory is there.
    pub(crate) fn stay(&mut self, state_dir: &Path) {
        if inode_of(&self.path).is_ok_and(|there| there == self.inode) || !state_dir.is_dir() {
            return;
        }
        match Self::bind(state_dir) {
            Ok(again) => {
                tracing::warn!(path = %self.path.display(), "the keeper's socket was removed; it is made again");
                *self = again;
            }
            Err(error) => {
                tracing::debug!(path = %self.path.display(), %error, "the keeper's socket is not made again");
            }
        }
    }

    /// Returns the next request. Callers send it right after they connect; the keeper waits only briefly for it.
    ///
    /// # Errors
    /// Also when another user asks; that caller gets no answer.
    pub(crate) fn accept(&self) -> io::Result<Question> {
        let asker = rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC)?;
        let peer = rustix::net::sockopt::socket_peercred(&asker)?;
        if !may_ask(peer.uid.as_raw(), rustix::process::geteuid().as_raw()) {
            tracing::warn!(uid = peer.uid.as_raw(), "another user asked the keeper for an upgrade; refused");
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let patience = Some(Duration::from_millis(200));
        rustix::net::sockopt::set_socket_timeout(&asker, rustix::net::sockopt::Timeout::Recv, patience)?;
        let mut path = vec![0; QUESTION_MAX_BYTES];
        let (length, _) = rustix::net::recv(&asker, path.as_mut_slice(), RecvFlags::empty())?;
        path.truncate(length);
        Ok(Question { asker, binary: PathBuf::from(std::ffi::OsString::from_vec(path)) })
    }
}

/// Returns whether a user may ask for an upgrade: the requested binary runs as the keeper's user.
fn may_ask(uid: u32, own_uid: u32) -> bool {
    uid == own_uid || uid == 0
}

fn inode_of(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

impl Drop for Listener {
    fn drop(&mut self) {
        // The file may be gone, alone or with the directory; a stale one is replaced later. Another keeper's file stays.
        if inode_of(&self.path).is_ok_and(|there| there == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Question {
    pub(crate) fn ready(&self, pid: u32) {
        self.answer(&format!("ready {pid}"));
    }

    pub(crate) fn refused(&self, why: &str) {
        self.answer(why);
    }

    fn answer(&self, text: &str) {
        let text = &text.as_bytes()[..text.len().min(ANSWER_MAX_BYTES)];
        // The caller may be gone.
        let _ = rustix::net::send(&self.asker, text, SendFlags::NOSIGNAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keeper_s_own_user_and_root_may_ask_and_others_may_not() {
        assert!(may_ask(1000, 1000) && may_ask(0, 1000) && may_ask(0, 0));
        assert!(!may_ask(1001, 1000) && !may_ask(65534, 0));
    }

    #[test]
    fn a_socket_that_was_removed_is_made_again_once_its_directory_is_there() {
        let home = tempfile::tempdir().unwrap();
        let state = home.path().join("state");
        fs::create_dir(&state).unwrap();
        let mut listener = Listener::bind(&state).unwrap();
        let first = listener.inode;
        listener.stay(&state);
        assert_eq!(listener.inode, first);
        fs::remove_dir_all(&state).unwrap();
        listener.stay(&state);
        assert!(!state.exists(), "the daemon makes the directory, with its lock");
        fs::create_dir(&state).unwrap();
        listener.stay(&state);
        let asker = seqpacket().unwrap();
        rustix::net::connect(&asker, &SocketAddrUnix::new(state.join(NAME)).unwrap()).unwrap();
        rustix::net::send(&asker, b"/bin/true", SendFlags::NOSIGNAL).unwrap();
        assert_eq!(listener.accept().unwrap().binary, Path::new("/bin/true"));
    }
}

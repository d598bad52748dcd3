//! The socket file: never open to others, never two daemons on one, never left over after an orderly end.
//!
//! Owns: making, replacing and removing it. Does not own: the state directory's lock (the daemon), which decides
//! between two daemons that start at the same moment.

use super::ServeError;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;

/// The longest path of a socket: `sun_path` of `sockaddr_un` without its final zero, unix(7).
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// A socket file that this process made.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode of the file, so that a successor's socket is never removed.
    inode: (u64, u64),
}

/// Listens on `path`.
pub(super) fn bind(path: &Path) -> Result<(UnixListener, SocketFile), ServeError> {
    let failed = |operation, path: &Path| {
        let path = path.to_owned();
        move |source| ServeError::Socket { operation, path, source }
    };
    let directory =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(failed("cannot make the state directory", directory))?;
    refuse_live(path)?;
    // Made under another name, closed to other users, then moved into place: no user meets a socket with wide
    // permissions, and a stale one is replaced in one step.
    let new = path.with_extension(format!("{}", std::process::id()));
    let len_bytes = new.as_os_str().len();
    if len_bytes > SOCKET_PATH_BYTES_MAX {
        let socket = path.to_owned();
        return Err(ServeError::PathTooLong { socket, len_bytes, max_bytes: SOCKET_PATH_BYTES_MAX });
    }
    match fs::remove_file(&new) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(failed("cannot remove what is left of", &new)(source));
        }
        Ok(()) | Err(_) => {}
    }
    let listener = UnixListener::bind(&new).map_err(failed("cannot make the socket", &new))?;
    let ready = fs::set_permissions(&new, fs::Permissions::from_mode(0o600))
        .and_then(|()| fs::symlink_metadata(&new))
        .and_then(|meta| fs::rename(&new, path).map(|()| (meta.dev(), meta.ino())));
    match ready {
        Ok(inode) => Ok((listener, SocketFile { path: path.to_owned(), inode })),
        Err(source) => {
            // The first failure is the one to report; the leftover file is removed at the next start.
            let _ = fs::remove_file(&new);
            Err(failed("cannot put the socket at", path)(source))
        }
    }
}

/// Refuses a socket on which a process answers; a socket that refuses connections has no listener any more.
fn refuse_live(path: &Path) -> Result<(), ServeError> {
    let socket = || path.to_owned();
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(ServeError::Socket { operation: "cannot look at", path: socket(), source });
        }
        Ok(meta) if !meta.file_type().is_socket() => return Err(ServeError::NotASocket { socket: socket() }),
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(ServeError::Live { socket: socket() }),
        Err(error) => match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => Ok(()),
            // A listener whose queue is full is alive.
            io::ErrorKind::WouldBlock => Err(ServeError::Live { socket: socket() }),
            _ => Err(ServeError::Socket { operation: "cannot try", path: socket(), source: error }),
        },
    }
}

impl SocketFile {
    /// Returns whether the file was removed, and its directory is there.
    pub(super) fn is_missing(&self) -> bool {
        let is_ours =
            fs::symlink_metadata(&self.path).is_ok_and(|meta| (meta.dev(), meta.ino()) == self.inode);
        !is_ours && self.path.parent().is_some_and(Path::is_dir)
    }

    /// Makes the file again, unless another daemon has put its own there.
    pub(super) fn make_again(&mut self) -> Result<UnixListener, ServeError> {
        let (listener, again) = bind(&self.path)?;
        *self = again;
        Ok(listener)
    }

    /// Removes the file, unless another daemon has put its own there.
    pub(super) fn remove(&self) {
        let ours = fs::symlink_metadata(&self.path).is_ok_and(|meta| (meta.dev(), meta.ino()) == self.inode);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket; the next start replaces it");
        }
    }
}

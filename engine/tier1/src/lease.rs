//! Questions to the kernel, by file leases, whether another process still has a backing file open or mapped.
//!
//! Owns: the `fcntl(F_SETLEASE)` calls (fcntl(2), "Leases"; `check_conflicting_open` in fs/locks.c). Does not own:
//! the consequences of the answer. The module has unsafe code: rustix has no leases.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Returns true while any writable handle or writable shared mapping of the file lives, in any process, ours too.
///
/// The descriptor must be O_RDONLY and the caller must keep two threads from asking at once.
pub(super) fn writable_elsewhere(fd: BorrowedFd<'_>) -> io::Result<bool> {
    refused(fd, libc::F_RDLCK)
}

/// Returns true while any other open file description or mapping of one lives: a reader counts too.
pub(super) fn open_elsewhere(fd: BorrowedFd<'_>) -> io::Result<bool> {
    refused(fd, libc::F_WRLCK)
}

/// Takes the lease and returns it at once; the kernel refuses it exactly while the file is in use.
fn refused(fd: BorrowedFd<'_>, lease: libc::c_int) -> io::Result<bool> {
    // A process may open the file between our two calls and so break the lease: it waits until the second call, and
    // we are sent a signal. SIGIO would end a process that does not expect it; SIGURG is ignored unless caught.
    fcntl(fd, F_SETSIG, libc::SIGURG)?;
    match fcntl(fd, libc::F_SETLEASE, lease) {
        Ok(()) => {
            fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK)?;
            Ok(false)
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(error) => Err(error),
    }
}

/// `F_SETSIG` of asm-generic/fcntl.h; the libc crate does not name it for every target.
const F_SETSIG: libc::c_int = 10;

fn fcntl(fd: BorrowedFd<'_>, command: libc::c_int, argument: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as it is borrowed, and these commands take an int and no pointer.
    let answer = unsafe { libc::fcntl(fd.as_raw_fd(), command, argument) };
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

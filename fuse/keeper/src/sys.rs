//! Signals as a descriptor, and descriptors across exec.
//!
//! Owns: the calls that std and rustix do not have. Contains unsafe code. Does not own: the reactions to signals.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The first number under which a descriptor is passed. Above every descriptor that the keeper has open itself: between fork and exec these
/// numbers are overwritten, and the binary and std's own pipe must not be among them.
pub(crate) const FIRST_PASSED: RawFd = 100;
/// The first number by sd_listen_fds(3): after stdin, stdout and stderr.
pub(crate) const FIRST_LISTEN: RawFd = 3;

/// Signals that this process reads from a descriptor instead of being interrupted: those that end it in order, and those that people send
/// by habit, which would end it out of order.
const WATCHED: [libc::c_int; 5] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];

/// A signal that was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    /// SIGTERM or SIGINT.
    End,
    /// A signal without a meaning here: a terminal that was closed, a rotation of logs, a reload.
    Nothing(i32),
}

/// Blocks the watched signals, and returns a descriptor that is readable when one has come.
pub(crate) fn watch_signals() -> io::Result<OwnedFd> {
    let set = watched()?;
    // SAFETY: the set is initialised; the old mask is not asked for.
    if unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: -1 asks for a new descriptor; the set is only read.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn watched() -> io::Result<libc::sigset_t> {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set it is given.
    if unsafe { libc::sigemptyset(set.as_mut_ptr()) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: initialised by the call above.
    let mut set = unsafe { set.assume_init() };
    for signal in WATCHED {
        // SAFETY: a lawful signal and an initialised set.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    Ok(set)
}

/// Reads one received signal, if any.
pub(crate) fn take_signal(signals: &OwnedFd) -> Option<Told> {
    let mut info = [0; size_of::<libc::signalfd_siginfo>()];
    let read = rustix::io::read(signals, &mut info).ok()?;
    if read != info.len() {
        return None;
    }
    // `ssi_signo` is the first field, a u32.
    Some(match i32::from_ne_bytes(info[..4].try_into().expect("four bytes")) {
        libc::SIGTERM | libc::SIGINT => Told::End,
        other => Told::Nothing(other),
    })
}

/// Makes a command start with its signals as usual, and with `passed` as descriptors from [`FIRST_PASSED`] on.
///
/// The descriptors must be above all of those numbers: see [`above`].
pub(crate) fn pass(command: &mut Command, passed: Vec<OwnedFd>) -> io::Result<()> {
    let set = watched()?;
    let before_exec = move || {
        // SAFETY: the set is initialised; the old mask is not asked for. Async-signal-safe.
        if unsafe { libc::sigprocmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) } == -1 {
            return Err(io::Error::last_os_error());
        }
        for (number, fd) in (FIRST_PASSED..).zip(&passed) {
            // SAFETY: dup2 of an open descriptor onto a number; exec would close the descriptor that was there anyway. Async-signal-safe.
            if unsafe { libc::dup2(fd.as_raw_fd(), number) } == -1 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls only: it allocates nothing and takes no lock.
    unsafe { command.pre_exec(before_exec) };
    Ok(())
}

/// Makes a duplicate, close-on-exec, with a number that [`pass`] does not use for `count` descriptors.
pub(crate) fn above(fd: BorrowedFd<'_>, count: usize) -> io::Result<OwnedFd> {
    let least = FIRST_PASSED + i32::try_from(count).map_err(io::Error::other)?;
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, least)?)
}

/// Takes over a descriptor that was passed to this process under a number. Close-on-exec from now on.
///
/// Must be called at most once for a number, before anything of this process opens or closes descriptors by number.
pub(crate) fn take_passed(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: only asks whether the number is open.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: open, and handed to this process to own; the caller takes each number once.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    Ok(fd)
}

/// Forgets an environment variable, so that processes started later do not believe that it is meant for them.
pub(crate) fn forget_variable(name: &str) {
    let Ok(name) = CString::new(name) else { return };
    // SAFETY: called at the start of the process, while it has one thread, so that no other thread reads the environment meanwhile.
    unsafe { libc::unsetenv(name.as_ptr()) };
}

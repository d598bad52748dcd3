//! Locks: which opens exclude each other, by every kind of open and every kind of lock.

use super::table::{Scenario, scenario};
use super::world::World;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::os::fd::AsRawFd;

const OPENS: [(&str, OFlags); 4] = [
    ("O_RDONLY", OFlags::RDONLY),
    ("O_RDWR", OFlags::RDWR),
    ("O_WRONLY|O_TRUNC", OFlags::WRONLY.union(OFlags::TRUNC)),
    ("O_WRONLY|O_APPEND", OFlags::WRONLY.union(OFlags::APPEND)),
];

/// Sets an open file description's lock on all of the file. `kind` is F_RDLCK, F_WRLCK or F_UNLCK.
fn lock_description(file: &File, kind: i32) -> Result<(), Errno> {
    let mut whole = libc::flock { l_type: 0, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    whole.l_type = i16::try_from(kind).expect("a small constant");
    // SAFETY: F_OFD_SETLK reads one flock structure, which lives until the call returns.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).expect("a system call failed")),
        _ => Ok(()),
    }
}

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (first, first_flags) in OPENS {
        for (second, second_flags) in OPENS {
            for (what, bytes) in [("an empty file", &b""[..]), ("a file with a number", b"4711\n")] {
                all.push(scenario(format!("flock of {what}: {first}, then {second}"), move |w| {
                    w.at_rest("lock", bytes);
                    let holder = w.open("lock", first_flags).unwrap();
                    flock(&holder, FlockOperation::NonBlockingLockExclusive).unwrap();
                    let other = w.open("lock", second_flags).unwrap();
                    let try_lock =
                        |w: &World| w.saw("lock", flock(&other, FlockOperation::NonBlockingLockExclusive));
                    try_lock(w);
                    w.saw("shared", flock(&other, FlockOperation::NonBlockingLockShared));
                    drop(holder);
                    try_lock(w);
                }));
            }
        }
    }
    all.extend([
        scenario("locks of open file descriptions", |w| {
            w.at_rest("lock", b"bytes");
            let holder = w.open("lock", OFlags::RDWR).unwrap();
            w.saw("lock", lock_description(&holder, libc::F_WRLCK));
            let other = w.open("lock", OFlags::RDWR | OFlags::TRUNC).unwrap();
            w.saw("write", lock_description(&other, libc::F_WRLCK));
            w.saw("read", lock_description(&other, libc::F_RDLCK));
            w.saw("unlock", lock_description(&holder, libc::F_UNLCK));
            w.saw("write", lock_description(&other, libc::F_WRLCK));
        }),
        scenario("a read lock of a description on a file at rest, then O_TRUNC", |w| {
            w.at_rest("lock", b"bytes");
            let holder = w.open("lock", OFlags::RDONLY).unwrap();
            w.saw("lock", lock_description(&holder, libc::F_RDLCK));
            let other = w.open("lock", OFlags::RDWR | OFlags::TRUNC).unwrap();
            w.saw("write", lock_description(&other, libc::F_WRLCK));
        }),
        scenario("a lock stays with a file that is renamed and removed", |w| {
            w.at_rest("lock", b"bytes");
            let holder = w.open("lock", OFlags::RDONLY).unwrap();
            flock(&holder, FlockOperation::LockExclusive).unwrap();
            let other = w.open("lock", OFlags::RDONLY).unwrap();
            fs::rename(w.path("lock"), w.path("moved")).unwrap();
            w.saw("lock", flock(&other, FlockOperation::NonBlockingLockExclusive));
            fs::remove_file(w.path("moved")).unwrap();
            w.saw("lock", flock(&other, FlockOperation::NonBlockingLockExclusive));
            w.put("lock", b"another");
            let anew = w.open("lock", OFlags::RDONLY).unwrap();
            w.saw("another file", flock(&anew, FlockOperation::NonBlockingLockExclusive));
        }),
        scenario("a lock by one name excludes by another", |w| {
            w.at_rest("a", b"bytes");
            fs::hard_link(w.path("a"), w.path("b")).unwrap();
            let holder = w.open("a", OFlags::RDONLY).unwrap();
            flock(&holder, FlockOperation::LockExclusive).unwrap();
            let other = w.open("b", OFlags::WRONLY | OFlags::TRUNC).unwrap();
            w.saw("lock", flock(&other, FlockOperation::NonBlockingLockExclusive));
        }),
        scenario("a lock of a duplicate is the same lock", |w| {
            w.put("lock", b"");
            let one = w.open("lock", OFlags::RDONLY).unwrap();
            let same = one.try_clone().unwrap();
            let other = w.open("lock", OFlags::RDONLY).unwrap();
            flock(&one, FlockOperation::LockExclusive).unwrap();
            w.saw("same", flock(&same, FlockOperation::NonBlockingLockExclusive));
            drop(one);
            w.saw("other", flock(&other, FlockOperation::NonBlockingLockExclusive));
            drop(same);
            w.saw("other", flock(&other, FlockOperation::NonBlockingLockExclusive));
        }),
        scenario("directories can be locked", |w| {
            let one = File::open(w.path("")).unwrap();
            let other = File::open(w.path("")).unwrap();
            w.saw("one", flock(&one, FlockOperation::NonBlockingLockExclusive));
            w.saw("other", flock(&other, FlockOperation::NonBlockingLockExclusive));
        }),
    ]);
    all
}

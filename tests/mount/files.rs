//! Attributes, extended attributes, locks, statfs.

use crate::site::{PATIENCE, Site};
use rustix::fs::{CWD, FlockOperation, Timespec, Timestamps, XattrFlags};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// S-times: "utimensat(2) is exact, and what it set stays until the next change."
#[test]
fn times_are_exact_to_the_nanosecond_for_files_and_directories() {
    let Some(site) = Site::usual() else { return };
    fs::create_dir(site.path("d")).unwrap();
    fs::write(site.path("f"), b"x").unwrap();
    for (sec, nsec) in [(1_700_000_000, 123_456_789), (0, 1), (-1, 250_000_000)] {
        let time = Timespec { tv_sec: sec, tv_nsec: nsec };
        let times = Timestamps { last_access: time, last_modification: time };
        for name in ["f", "d"] {
            rustix::fs::utimensat(CWD, site.path(name), &times, rustix::fs::AtFlags::empty()).unwrap();
            let seen = fs::metadata(site.path(name)).unwrap();
            assert_eq!((seen.mtime(), seen.mtime_nsec()), (sec, nsec), "{name}");
            assert_eq!((seen.atime(), seen.atime_nsec()), (sec, nsec), "{name}");
        }
    }
}

/// S-times: a time that utimensat set while the file was open stays after its close.
#[test]
fn a_time_set_before_close_survives_it() {
    let Some(site) = Site::usual() else { return };
    let mut file = File::create(site.path("f")).unwrap();
    file.write_all(b"bytes").unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::new(1_600_000_000, 987_654_321);
    file.set_modified(time).unwrap();
    drop(file);
    site.state_after_close("f");
    assert_eq!(fs::metadata(site.path("f")).unwrap().modified().unwrap(), time);
}

/// S-times: "what it set stays until the next change", and not longer. All changes come within a tick or two of the kernel's clock.
#[test]
fn a_write_moves_the_time_that_was_set_while_the_file_was_open() {
    type Change = fn(&File, &Path);
    let changes: [(&str, Change); 4] = [
        ("write", |file, _| file.write_all_at(b"y", 0).unwrap()),
        ("append by another", |_, path| {
            OpenOptions::new().append(true).open(path).unwrap().write_all(b"y").unwrap();
        }),
        ("new size", |file, _| file.set_len(2).unwrap()),
        ("allocation", |file, _| {
            rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, 9000).unwrap();
        }),
    ];
    let old = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 5);
    let to_come = SystemTime::UNIX_EPOCH + Duration::new(4_000_000_000, 0);
    for site in Site::both() {
        for (number, ((what, change), time)) in
            changes.iter().flat_map(|change| [(change, old), (change, to_come)]).enumerate()
        {
            let path = site.path(format!("f{number}"));
            let shown = || fs::metadata(&path).unwrap().modified().unwrap();
            let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
            file.write_all(b"bytes").unwrap();
            file.set_modified(time).unwrap();
            assert_eq!(shown(), time, "{what}");
            change(&file, &path);
            let moved = shown();
            assert!(moved != time && moved.elapsed().is_ok_and(|ago| ago < PATIENCE), "{what}: {moved:?}");
            // A time that is set afterwards stays, also after the close. A write by the next opener moves it again.
            file.set_modified(time).unwrap();
            drop(file);
            site.state_after_close(format!("f{number}"));
            assert_eq!(shown(), time, "{what}");
            OpenOptions::new().append(true).open(&path).unwrap().write_all(b"more").unwrap();
            assert_ne!(shown(), time, "{what}");
        }
    }
}

/// S-times: "Directory mtimes change when their entries do." S-size: "exact ... from another process".
#[test]
fn sizes_and_directory_times_follow_what_happens() {
    let Some(site) = Site::usual() else { return };
    let before = fs::metadata(site.path("")).unwrap().modified().unwrap();
    std::thread::sleep(Duration::from_millis(10));
    let mut file = File::create(site.path("grows")).unwrap();
    assert!(fs::metadata(site.path("")).unwrap().modified().unwrap() > before);
    let mut expected = 0;
    for size in [1usize, 4095, 4096, 100_000, 1 << 20] {
        file.write_all(&vec![7; size]).unwrap();
        expected += size;
        let seen = std::process::Command::new("stat").arg("-c").arg("%s").arg(site.path("grows")).output();
        let seen: usize = String::from_utf8(seen.unwrap().stdout).unwrap().trim().parse().unwrap();
        assert_eq!(seen, expected);
        let blocks = file.metadata().unwrap().blocks();
        assert!(blocks * 512 <= (expected as u64).next_multiple_of(4096), "{blocks} blocks for {expected}");
    }
}

/// S-ino: "stays the same over rename, reopen".
#[test]
fn inode_numbers_are_stable_and_distinct() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("a"), b"a").unwrap();
    fs::write(site.path("b"), b"b").unwrap();
    let ino = fs::metadata(site.path("a")).unwrap().ino();
    assert_ne!(ino, fs::metadata(site.path("b")).unwrap().ino());
    fs::rename(site.path("a"), site.path("c")).unwrap();
    OpenOptions::new().append(true).open(site.path("c")).unwrap().write_all(b"more").unwrap();
    assert_eq!(fs::metadata(site.path("c")).unwrap().ino(), ino);
    let listed = fs::read_dir(site.path("")).unwrap().map(|e| e.unwrap()).find(|e| e.file_name() == "c");
    assert_eq!(std::os::unix::fs::DirEntryExt::ino(&listed.unwrap()), ino);
}

/// S-mode: "chmod, chown and the umask work". "Suid and sgid are never kept on files".
#[test]
fn modes_work_and_suid_is_never_kept() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("f"), b"x").unwrap();
    fs::set_permissions(site.path("f"), Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(site.path("f")).unwrap().mode() & 0o7777, 0o640);
    fs::set_permissions(site.path("f"), Permissions::from_mode(0o6755)).unwrap();
    assert_eq!(fs::metadata(site.path("f")).unwrap().mode() & 0o7777, 0o755);
    std::os::unix::fs::chown(site.path("f"), Some(12), Some(34)).unwrap();
    let seen = fs::metadata(site.path("f")).unwrap();
    assert_eq!((seen.uid(), seen.gid()), (12, 34));
    fs::create_dir(site.path("d")).unwrap();
    fs::set_permissions(site.path("d"), Permissions::from_mode(0o3770)).unwrap();
    assert_eq!(fs::metadata(site.path("d")).unwrap().mode() & 0o7777, 0o3770);
}

/// S-mode: "Pipes, sockets and devices keep all bits, and lose suid and sgid by chown(2) as elsewhere."
#[test]
fn what_is_no_file_keeps_suid_sgid_and_sticky() {
    let Some(site) = Site::usual() else { return };
    let path = site.path("pipe");
    rustix::fs::mknodat(CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::empty(), 0).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o7755)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o7755);
    std::os::unix::fs::chown(&path, Some(12), Some(34)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o1755);
}

/// S-xattr: "Extended attributes `user.*` are kept on files and directories".
#[test]
fn user_attributes_are_kept_listed_and_removed() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("f"), b"x").unwrap();
    let path = site.path("f");
    let value = vec![0xa5u8; 3000];
    rustix::fs::setxattr(&path, "user.note", &value, XattrFlags::CREATE).unwrap();
    rustix::fs::setxattr(&path, "user.empty", b"", XattrFlags::empty()).unwrap();
    let again = rustix::fs::setxattr(&path, "user.note", b"y", XattrFlags::CREATE).unwrap_err();
    assert_eq!(again, rustix::io::Errno::EXIST);
    let mut buffer = vec![0u8; 4096];
    let length = rustix::fs::getxattr(&path, "user.note", &mut buffer[..]).unwrap();
    assert_eq!(&buffer[..length], &value[..]);
    let small = rustix::fs::getxattr(&path, "user.note", &mut [0u8; 10][..]).unwrap_err();
    assert_eq!(small, rustix::io::Errno::RANGE);
    let length = rustix::fs::listxattr(&path, &mut buffer[..]).unwrap();
    let mut names: Vec<&[u8]> = buffer[..length].split(|&b| b == 0).filter(|n| !n.is_empty()).collect();
    names.sort_unstable();
    assert_eq!(names, [&b"user.empty"[..], b"user.note"]);
    let both = XattrFlags::CREATE | XattrFlags::REPLACE;
    let refused = |name: &str, flags| rustix::fs::setxattr(&path, name, b"y", flags).unwrap_err();
    assert_eq!(refused("user.note", both), rustix::io::Errno::EXIST);
    assert_eq!(refused("user.none", both), rustix::io::Errno::NODATA);
    assert_eq!(refused("user.", XattrFlags::empty()), rustix::io::Errno::INVAL);
    rustix::fs::removexattr(&path, "user.note").unwrap();
    let gone = rustix::fs::getxattr(&path, "user.note", &mut buffer[..]).unwrap_err();
    assert_eq!(gone, rustix::io::Errno::NODATA);
    // Symlinks have no such attributes, so the tree in Tier-3 has none for them.
    std::os::unix::fs::symlink("f", site.path("link")).unwrap();
    let on_link = rustix::fs::lsetxattr(site.path("link"), "user.note", b"x", XattrFlags::empty());
    assert_eq!(on_link.unwrap_err(), rustix::io::Errno::PERM);
    let caps = rustix::fs::getxattr(&path, "security.capability", &mut buffer[..]).unwrap_err();
    assert_eq!(caps, rustix::io::Errno::NODATA);
}

/// S-locks: "flock(2), fcntl(2) POSIX locks and OFD locks work among the processes of one node".
#[test]
fn all_three_kinds_of_locks_exclude() {
    let Some(site) = Site::usual() else { return };
    let open =
        || OpenOptions::new().read(true).write(true).create(true).truncate(false).open(site.path("lock"));
    let (first, second) = (open().unwrap(), open().unwrap());
    rustix::fs::flock(&first, FlockOperation::LockExclusive).unwrap();
    let refused = rustix::fs::flock(&second, FlockOperation::NonBlockingLockExclusive).unwrap_err();
    assert_eq!(refused, rustix::io::Errno::WOULDBLOCK);
    rustix::fs::flock(&first, FlockOperation::Unlock).unwrap();
    rustix::fs::flock(&second, FlockOperation::NonBlockingLockExclusive).unwrap();

    let whole = || libc::flock { l_type: 1, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    let ofd = |file: &File| {
        let lock = whole();
        // SAFETY: F_OFD_SETLK reads one flock structure, which lives until the call returns.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }
    };
    assert_eq!((ofd(&first), ofd(&second)), (0, -1));

    let posix = site.path("posix");
    let script = "import fcntl,sys,os
f=open(sys.argv[1],'w'); fcntl.lockf(f,fcntl.LOCK_EX)
pid=os.fork()
if pid==0:
    g=open(sys.argv[1],'w')
    try: fcntl.lockf(g,fcntl.LOCK_EX|fcntl.LOCK_NB)
    except OSError: os._exit(7)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid,0)[1]))";
    let status = std::process::Command::new("python3").arg("-c").arg(script).arg(&posix).status();
    match status {
        Ok(status) => assert_eq!(status.code(), Some(7), "the second process got the lock too"),
        Err(error) => println!("POSIX locks left out: python3: {error}"),
    }
}

/// S-statfs: "shows the Tier-1 budget: its size, and what is not used yet".
#[test]
fn statfs_shows_the_budget() {
    let Some(site) = Site::usual() else { return };
    let stat = rustix::fs::statvfs(site.path("")).unwrap();
    let size = stat.f_blocks * stat.f_frsize;
    assert_eq!(size, 512 << 20);
    assert!(stat.f_bavail <= stat.f_blocks && stat.f_bavail > 0);
    assert_eq!(stat.f_namemax, 255);
}

//! Sealed files: overwritten, updated, mapped.

use crate::site::{PATIENCE, Site, pattern};
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tidemark_namespace::{FileState, NotSealable};

/// S-trunc: "O_TRUNC of a *sealed* file gives a new file under the same names and the same inode number, and every file
/// that was open before, and every mapping, keeps the old bytes".
#[test]
fn overwriting_a_sealed_file_leaves_open_files_and_mappings_their_bytes() {
    let Some(site) = Site::usual() else { return };
    let old = pattern(2_000_000, 1);
    fs::write(site.path("ckpt"), &old).unwrap();
    site.seal("ckpt");
    let ino = fs::metadata(site.path("ckpt")).unwrap().ino();
    let mut reader = File::open(site.path("ckpt")).unwrap();
    // SAFETY: the file is sealed, and sealed bytes are never truncated.
    let map = unsafe { memmap2::Mmap::map(&reader) }.unwrap();
    // The kernel gets ESTALE once and tries again, unseen by `write`.
    fs::write(site.path("ckpt"), b"new").unwrap();
    assert_eq!(fs::read(site.path("ckpt")).unwrap(), b"new");
    assert_eq!(fs::metadata(site.path("ckpt")).unwrap().ino(), ino);
    assert_eq!(reader.metadata().unwrap().ino(), ino);
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    assert!(bytes == old && map[..] == old[..]);
    drop(reader);
    assert!(map[..] == old[..], "the mapping outlives the descriptor");
}

/// S-trunc: "a new file under the same names". S-links: all of them, at once.
#[test]
fn every_name_of_an_overwritten_file_has_the_new_bytes() {
    for site in Site::both() {
        let (a, b) = (site.path("a"), site.path("b"));
        fs::write(&a, pattern(300_000, 1)).unwrap();
        site.seal("a");
        fs::hard_link(&a, &b).unwrap();
        let nodes = site.namespace.room().statfs().nodes;
        let mut reader = File::open(&a).unwrap();
        // From now on, the kernel trusts this name for a second.
        assert_eq!(fs::metadata(&a).unwrap().nlink(), 2);
        fs::write(&b, b"new").unwrap();
        for name in [&a, &b] {
            assert_eq!(fs::read(name).unwrap(), b"new");
            let seen = fs::metadata(name).unwrap();
            assert_eq!((seen.len(), seen.nlink(), seen.ino()), (3, 2, reader.metadata().unwrap().ino()));
        }
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        assert!(bytes == pattern(300_000, 1));
        drop(reader);
        site.wait_for_nodes(nodes);
    }
}

/// S-trunc: "An open by `/proc/self/fd/N` or a handle has no name that could get a new file".
#[test]
fn an_open_without_a_name_truncates_the_file_where_it_is() {
    for site in Site::both() {
        fs::write(site.path("f"), pattern(300_000, 1)).unwrap();
        site.seal("f");
        let reader = File::open(site.path("f")).unwrap();
        let FileState::Sealed { seal, .. } = site.view("f").state else { panic!("it is sealed") };
        let pin = site.namespace.seals().pin_seal(site.view("f").file, seal).unwrap();
        let upload = std::thread::spawn(move || {
            let pin = pin;
            // The file stays as it is while an upload reads it.
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(pin.backing.stat().unwrap().size_bytes, 300_000);
        });
        let again = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let mut writer = OpenOptions::new().write(true).truncate(true).open(&again).unwrap();
        upload.join().unwrap();
        assert_eq!((fs::metadata(site.path("f")).unwrap().len(), reader.metadata().unwrap().len()), (0, 0));
        writer.write_all(b"new").unwrap();
        assert_eq!(fs::read(site.path("f")).unwrap(), b"new");
        drop(writer);
        // truncate(2) has the same effect.
        site.seal("f");
        let path = CString::new(again).unwrap();
        // SAFETY: truncate(2) reads one string that ends with a zero, which lives until the call returns.
        assert_eq!(unsafe { libc::truncate(path.as_ptr(), 0) }, 0, "{}", std::io::Error::last_os_error());
        assert_eq!(fs::metadata(site.path("f")).unwrap().len(), 0);
    }
}

/// S-rename, S-unlink: an inode keeps its bytes while the kernel remembers it, and no program sees ESTALE.
#[test]
fn an_inode_without_a_name_is_opened_with_its_bytes() {
    for site in Site::both() {
        let file = site.path("f");
        let remember = || rustix::fs::open(&file, OFlags::PATH, Mode::empty()).unwrap();
        let read = |known: &OwnedFd| fs::read(format!("/proc/self/fd/{}", known.as_raw_fd())).unwrap();
        fs::write(&file, b"first").unwrap();
        let nodes = site.namespace.room().statfs().nodes;
        let replaced = remember();
        fs::write(site.path("f.tmp"), b"second").unwrap();
        fs::rename(site.path("f.tmp"), &file).unwrap();
        assert_eq!(read(&replaced), b"first");
        site.seal("f");
        let overwritten = remember();
        let reader = File::open(&file).unwrap();
        fs::write(&file, b"third").unwrap();
        drop(reader);
        assert_eq!(read(&overwritten), b"second");
        let removed = remember();
        fs::remove_file(&file).unwrap();
        assert_eq!(read(&removed), b"third");
        fs::write(format!("/proc/self/fd/{}", removed.as_raw_fd()), b"fourth").unwrap();
        assert_eq!(read(&removed), b"fourth");
        drop((replaced, overwritten, removed));
        site.wait_for_nodes(nodes - 1);
    }
}

/// S-locks: "A lock excludes whatever opens the file".
#[test]
fn a_lock_excludes_who_opens_with_truncation() {
    for site in Site::both() {
        let shared = |name: &str| File::open(site.path(name)).unwrap();
        let anew = |name: &str| OpenOptions::new().write(true).truncate(true).open(site.path(name)).unwrap();
        let lock = |file: &File| rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive);
        for (name, bytes) in [("empty", &b""[..]), ("pid", b"4711\n")] {
            fs::write(site.path(name), bytes).unwrap();
            site.seal(name);
        }
        let holder = shared("pid");
        lock(&holder).unwrap();
        let other = anew("pid");
        assert_eq!(lock(&other), Err(rustix::io::Errno::WOULDBLOCK));
        drop(holder);
        lock(&other).unwrap();
        // For an empty file, which has no bytes to keep, the order does not matter.
        let (holder, other) = (shared("empty"), anew("empty"));
        lock(&holder).unwrap();
        assert_eq!(lock(&other), Err(rustix::io::Errno::WOULDBLOCK));
    }
}

/// S-trunc, without an open file: the same inode gets a new backing file.
#[test]
fn a_sealed_file_can_be_overwritten_again_and_again() {
    let Some(site) = Site::usual() else { return };
    for round in 0..20u8 {
        let bytes = pattern(500_000 + usize::from(round) * 1000, round);
        fs::write(site.path("model.pt"), &bytes).unwrap();
        assert!(fs::read(site.path("model.pt")).unwrap() == bytes, "round {round}");
        site.seal("model.pt");
        assert!(fs::read(site.path("model.pt")).unwrap() == bytes, "round {round}, sealed");
    }
}

/// S-update: "Opening a sealed file for writing without O_TRUNC withdraws its seal".
#[test]
fn an_update_withdraws_the_seal_and_keeps_the_bytes() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("f"), b"first").unwrap();
    site.seal("f");
    OpenOptions::new().append(true).open(site.path("f")).unwrap().write_all(b", second").unwrap();
    assert_eq!(site.state_after_close("f"), FileState::Closed);
    assert_eq!(fs::read(site.path("f")).unwrap(), b"first, second");
    site.seal("f");
}

/// S-update: "A seal that is being made gives way to a change, so whoever has an unsealed file open sees every change of it." S-trunc:
/// "O_TRUNC and ftruncate to zero of a file that is not sealed happen in place".
#[test]
fn a_seal_in_the_making_gives_way_to_a_change_that_readers_see() {
    let append = |path: &Path| {
        let mut file = OpenOptions::new().append(true).open(path).unwrap();
        file.write_all(b"er").unwrap();
    };
    let truncate = |path: &Path| drop(File::create(path).unwrap());
    let grow = |path: &Path| {
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: truncate(2) reads one string that ends with a zero, which lives until the call returns.
        assert_eq!(unsafe { libc::truncate(path.as_ptr(), 9) }, 0, "{}", std::io::Error::last_os_error());
    };
    let changes: [(_, fn(&Path), _); 3] =
        [("append", append, 5), ("truncate", truncate, 0), ("grow", grow, 9)];
    for site in Site::both() {
        for (name, change, size_bytes) in changes {
            fs::write(site.path(name), b"old").unwrap();
            assert_eq!(site.state_after_close(name), FileState::Closed);
            let ticket = site.namespace.seals().begin_seal(site.view(name).node).unwrap();
            let reader = File::open(site.path(name)).unwrap();
            let hashes = std::thread::spawn(move || {
                let deadline = Instant::now() + PATIENCE;
                while !ticket.is_abandoned() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // The bytes stay as they are for as long as they are hashed: here to the ticket's end.
                (ticket.is_abandoned(), ticket.backing.stat().unwrap().size_bytes)
            });
            change(&site.path(name));
            assert_eq!(hashes.join().unwrap(), (true, 3), "{name}");
            assert_eq!(reader.metadata().unwrap().len(), size_bytes, "{name}");
            assert_eq!(fs::metadata(site.path(name)).unwrap().len(), size_bytes, "{name}");
        }
    }
}

/// S-mapped-seal: "A file that is closed but still mapped for writing is not sealed ... until the mapping is gone".
#[test]
fn a_file_mapped_for_writing_is_not_sealed_until_it_is_unmapped() {
    let Some(site) = Site::passthrough() else { return };
    fs::write(site.path("f"), vec![0; 100_000]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(site.path("f")).unwrap();
    // SAFETY: no program truncates the file while it is mapped.
    let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
    drop(file);
    assert_eq!(site.state_after_close("f"), FileState::Closed);
    let node = site.view("f").node;
    assert_eq!(site.namespace.seals().begin_seal(node).unwrap_err(), NotSealable::Mapped);
    map[0] = 1;
    assert_eq!(site.view("f").state, FileState::Mapped);
    drop(map);
    assert!(site.namespace.seals().begin_seal(node).is_ok());
}

/// S-trunc: "A file that a program runs from is not truncated, sealed or not: ETXTBSY."
#[test]
fn a_running_program_is_not_truncated() {
    let Some(site) = Site::usual() else { return };
    let truncate =
        |name: &str| rustix::fs::open(site.path(name), OFlags::RDONLY | OFlags::TRUNC, Mode::empty());
    for (name, sealed) in [("new", false), ("sealed", true)] {
        fs::copy("/bin/cat", site.path(name)).unwrap();
        fs::set_permissions(site.path(name), fs::Permissions::from_mode(0o755)).unwrap();
        if sealed {
            site.seal(name);
        }
        // `cat` waits for its standard input until that is closed.
        let mut program = Command::new(site.path(name)).stdin(Stdio::piped()).spawn().unwrap();
        assert_eq!(truncate(name).unwrap_err(), rustix::io::Errno::TXTBSY, "{name}");
        assert!(fs::read(site.path(name)).unwrap() == fs::read("/bin/cat").unwrap(), "{name}");
        drop(program.stdin.take());
        assert!(program.wait().unwrap().success());
        // RELEASE comes some time after the program's end.
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = truncate(name) {
            assert!(error == rustix::io::Errno::TXTBSY && Instant::now() < deadline, "{name}: {error}");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(fs::metadata(site.path(name)).unwrap().len(), 0);
    }
}

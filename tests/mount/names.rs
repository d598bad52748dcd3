//! Names: renaming, unlinking, linking, listing.

use crate::site::Site;
use rustix::fs::{AtFlags, CWD, RenameFlags, renameat_with};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use tidemark_namespace::FileState;

/// S-rename: "atomic for files, symlinks and directories, empty or not, over an existing name or not".
#[test]
fn a_full_directory_moves_with_everything_in_it() {
    let Some(site) = Site::usual() else { return };
    fs::create_dir_all(site.path("step_1.tmp/a/b")).unwrap();
    fs::write(site.path("step_1.tmp/a/b/shard"), b"bytes").unwrap();
    let ino = fs::metadata(site.path("step_1.tmp/a/b/shard")).unwrap().ino();
    fs::rename(site.path("step_1.tmp"), site.path("step_1")).unwrap();
    assert!(!site.path("step_1.tmp").exists());
    assert_eq!(fs::read(site.path("step_1/a/b/shard")).unwrap(), b"bytes");
    // S-ino: "An inode number stays the same over rename".
    assert_eq!(fs::metadata(site.path("step_1/a/b/shard")).unwrap().ino(), ino);
    fs::create_dir(site.path("full")).unwrap();
    fs::write(site.path("full/x"), b"").unwrap();
    let error = fs::rename(site.path("step_1"), site.path("full")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DirectoryNotEmpty);
}

/// S-rename: "A file replaced by a rename lives on for those who have it open or mapped."
#[test]
fn a_file_renamed_over_lives_on_for_those_who_have_it_open() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("latest"), b"old").unwrap();
    let mut old = File::open(site.path("latest")).unwrap();
    fs::write(site.path("latest.tmp"), b"new!").unwrap();
    fs::rename(site.path("latest.tmp"), site.path("latest")).unwrap();
    assert_eq!(fs::read(site.path("latest")).unwrap(), b"new!");
    let mut text = String::new();
    old.read_to_string(&mut text).unwrap();
    assert_eq!(text, "old");
    assert_eq!(old.metadata().unwrap().nlink(), 0);
}

/// S-rename: "RENAME_NOREPLACE and RENAME_EXCHANGE work".
#[test]
fn rename_flags_do_what_they_say() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("a"), b"a").unwrap();
    fs::write(site.path("b"), b"b").unwrap();
    let (a, b) = (site.path("a"), site.path("b"));
    let error = renameat_with(CWD, &a, CWD, &b, RenameFlags::NOREPLACE).unwrap_err();
    assert_eq!(error, rustix::io::Errno::EXIST);
    renameat_with(CWD, &a, CWD, &b, RenameFlags::EXCHANGE).unwrap();
    assert_eq!((fs::read(&a).unwrap(), fs::read(&b).unwrap()), (b"b".to_vec(), b"a".to_vec()));
}

/// S-unlink: "bytes stay for open files and mappings and go with the last of them".
#[test]
fn an_unlinked_file_can_be_read_until_it_is_closed() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("gone"), b"still here").unwrap();
    let mut open = File::open(site.path("gone")).unwrap();
    fs::remove_file(site.path("gone")).unwrap();
    assert_eq!(fs::metadata(site.path("gone")).unwrap_err().kind(), ErrorKind::NotFound);
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "still here");
    fs::create_dir(site.path("d")).unwrap();
    fs::write(site.path("d/x"), b"").unwrap();
    assert_eq!(fs::remove_dir(site.path("d")).unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
}

/// S-links: "Hard links to files and symlinks (targets up to 4095 bytes, kept as given) work."
#[test]
fn links_count_and_symlinks_keep_their_target() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("one"), b"bytes").unwrap();
    fs::hard_link(site.path("one"), site.path("two")).unwrap();
    let (one, two) = (fs::metadata(site.path("one")).unwrap(), fs::metadata(site.path("two")).unwrap());
    assert_eq!((one.ino(), one.nlink(), two.nlink()), (two.ino(), 2, 2));
    fs::remove_file(site.path("one")).unwrap();
    assert_eq!(fs::metadata(site.path("two")).unwrap().nlink(), 1);
    let target = OsStr::from_bytes(&[b't'; 4095]).to_owned();
    symlink(&target, site.path("long")).unwrap();
    assert_eq!(fs::read_link(site.path("long")).unwrap(), Path::new(&target));
    symlink("two", site.path("latest")).unwrap();
    assert_eq!(fs::read(site.path("latest")).unwrap(), b"bytes");
}

/// S-names: "A name is 1 to 255 bytes, any but `/` and zero".
#[test]
fn long_and_odd_names_work_and_longer_ones_are_refused() {
    let Some(site) = Site::usual() else { return };
    let longest = OsStr::from_bytes(&[b'n'; 255]).to_owned();
    let odd = OsStr::from_bytes(b"\xff\xfe not utf-8 \n\x01").to_owned();
    for name in [&longest, &odd] {
        fs::write(site.path(name), b"x").unwrap();
        assert_eq!(fs::read(site.path(name)).unwrap(), b"x");
    }
    let listed: BTreeSet<_> = fs::read_dir(site.path("")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(listed, BTreeSet::from([longest, odd]));
    let error = fs::write(site.path(OsStr::from_bytes(&[b'n'; 256])), b"x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENAMETOOLONG));
}

/// S-names: "A path given to one call may have 4095 bytes; deeper trees are reached in steps."
#[test]
fn a_path_of_4095_bytes_works() {
    let Some(site) = Site::usual() else { return };
    let mut path = site.path("").into_os_string().into_encoded_bytes();
    while path.last() == Some(&b'/') {
        path.pop();
    }
    while path.len() + 201 + 2 <= 4095 {
        path.push(b'/');
        path.extend([b'd'; 200]);
        fs::create_dir(OsStr::from_bytes(&path)).unwrap();
    }
    path.push(b'/');
    path.resize(4095, b'f');
    let path = Path::new(OsStr::from_bytes(&path));
    fs::write(path, b"deep").unwrap();
    assert_eq!(fs::read(path).unwrap(), b"deep");
}

/// S-readdir: "each name that stays exactly once, however many are created, removed or renamed beside it".
#[test]
fn a_listing_shows_what_stays_once_while_others_come_and_go() {
    let Some(site) = Site::usual() else { return };
    let staying: BTreeSet<String> = (0..3000).map(|i| format!("stays-{i}")).collect();
    for name in &staying {
        File::create(site.path(name)).unwrap();
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0.. {
                let name = site.path(format!("comes-{}", i % 50));
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                File::create(&name).unwrap();
                fs::remove_file(&name).unwrap();
            }
        });
        for _ in 0..5 {
            let mut seen: Vec<String> = fs::read_dir(site.path(""))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .filter(|name| name.starts_with("stays-"))
                .collect();
            seen.sort();
            assert_eq!(seen.len(), staying.len());
            assert!(seen.iter().eq(staying.iter()));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// S-readdir: "It ends, also where each entry is renamed or made anew as soon as it is seen".
#[test]
fn a_listing_ends_while_its_entries_are_renamed() {
    // The names are so long that 16 fill a page, and the kernel asks for a listing many times.
    const FILES: usize = 300;
    let long = "x".repeat(200);
    type Change = fn(&Path);
    for site in Site::both() {
        let moves: [(&str, Change); 3] = [
            ("once", |path| fs::rename(path, path.with_extension("bak")).unwrap()),
            ("there and back", |path| {
                fs::rename(path, path.with_extension("tmp")).unwrap();
                fs::rename(path.with_extension("tmp"), path).unwrap();
            }),
            ("anew", |path| {
                fs::remove_file(path).unwrap();
                File::create(path).unwrap();
            }),
        ];
        for (how, change) in moves {
            let directory = site.path(how);
            fs::create_dir(&directory).unwrap();
            (0..FILES).for_each(|i| drop(File::create(directory.join(format!("f{i}{long}"))).unwrap()));
            let listed = fs::read_dir(&directory).unwrap().take(2 * FILES);
            let seen = listed.map(|entry| change(&entry.unwrap().path())).count();
            assert_eq!(seen, FILES, "{how}");
            assert_eq!(fs::read_dir(&directory).unwrap().count(), FILES, "{how}");
        }
    }
}

/// S-readdir: a listing that is begun again has the names that came meanwhile.
#[test]
fn a_listing_that_is_rewound_shows_what_came_meanwhile() {
    let Some(site) = Site::usual() else { return };
    File::create(site.path("first")).unwrap();
    let mut directory = rustix::fs::Dir::read_from(File::open(site.path("")).unwrap()).unwrap();
    let count = |directory: &mut rustix::fs::Dir| directory.by_ref().map(Result::unwrap).count();
    assert_eq!(count(&mut directory), 3, "with the directory itself and the one above");
    File::create(site.path("second")).unwrap();
    directory.rewind();
    assert_eq!(count(&mut directory), 4);
}

/// S-create: "O_CREAT|O_EXCL creates or is EEXIST, with one winner among any number of callers."
#[test]
fn eight_threads_create_and_exclusive_creation_has_one_winner() {
    let Some(site) = Site::usual() else { return };
    let winners: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|thread| {
                let site = &site;
                scope.spawn(move || {
                    for i in 0..6 {
                        fs::write(site.path(format!("t{thread}-{i}")), format!("{thread}/{i}")).unwrap();
                    }
                    (0..10).filter(|i| File::create_new(site.path(format!("contested-{i}"))).is_ok()).count()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(winners, 10);
    assert_eq!(fs::read_dir(site.path("")).unwrap().count(), 58);
    assert_eq!(fs::read(site.path("t3-5")).unwrap(), b"3/5");
}

/// S-mknod: "Pipes and sockets work, among the processes of this node", "Devices can be made and not opened", "O_TMPFILE is
/// EOPNOTSUPP".
#[test]
fn pipes_sockets_and_devices_can_be_made() {
    use rustix::fs::{Dev, FileType, Mode, OFlags, makedev, mknodat, open, statat};
    let Some(site) = Site::usual() else { return };
    let make = |name, kind, device: Dev| {
        mknodat(CWD, site.path(name), kind, Mode::from_raw_mode(0o640), device).unwrap();
        statat(CWD, site.path(name), AtFlags::empty()).unwrap()
    };
    make("pipe", FileType::Fifo, 0);
    let mut reader =
        open(site.path("pipe"), OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()).map(File::from).unwrap();
    fs::write(site.path("pipe"), b"through a pipe").unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "through a pipe");

    let listener = UnixListener::bind(site.path("socket")).unwrap();
    UnixStream::connect(site.path("socket")).unwrap().write_all(b"through a socket").unwrap();
    text.clear();
    listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
    assert_eq!(text, "through a socket");

    let null = make("null", FileType::CharacterDevice, makedev(1, 3));
    assert_eq!(
        (null.st_rdev, FileType::from_raw_mode(null.st_mode)),
        (makedev(1, 3), FileType::CharacterDevice)
    );
    assert_eq!(fs::read(site.path("null")).unwrap_err().raw_os_error(), Some(libc::EACCES));
    let disk = make("disk", FileType::BlockDevice, makedev(259, 1_000_000));
    assert_eq!(
        (disk.st_rdev, FileType::from_raw_mode(disk.st_mode)),
        (makedev(259, 1_000_000), FileType::BlockDevice)
    );
    let mut listed: Vec<_> =
        fs::read_dir(site.path("")).unwrap().map(|e| e.unwrap().file_type().unwrap()).collect();
    listed.sort_unstable_by_key(|kind| (kind.is_fifo(), kind.is_socket(), kind.is_char_device()));
    assert!(
        listed[0].is_block_device()
            && listed[1].is_char_device()
            && listed[2].is_socket()
            && listed[3].is_fifo()
    );

    make("plain", FileType::RegularFile, 0);
    assert_eq!(statat(CWD, site.path("plain"), AtFlags::empty()).unwrap().st_size, 0);
    let error = open(site.path(""), OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR).unwrap_err();
    assert_eq!(error, rustix::io::Errno::OPNOTSUPP);
}

/// S-mknod: "A regular file is made as open(2) with O_CREAT|O_EXCL and close(2) make it."
#[test]
fn a_regular_file_can_be_made_without_being_opened() {
    use rustix::fs::{FileType, Mode, mknodat};
    for site in Site::both() {
        let make = || mknodat(CWD, site.path("made"), FileType::RegularFile, Mode::from_raw_mode(0o640), 0);
        make().unwrap();
        assert_eq!(make().unwrap_err(), rustix::io::Errno::EXIST);
        // The namespace is asked: the kernel believes the name for a second in any case.
        assert_eq!((site.state_after_close("made"), site.view("made").size_bytes), (FileState::Closed, 0));
        fs::write(site.path("made"), b"bytes").unwrap();
        assert_eq!(fs::read(site.path("made")).unwrap(), b"bytes");
        let listed: Vec<_> = fs::read_dir(site.path("")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(listed, ["made"]);
    }
}

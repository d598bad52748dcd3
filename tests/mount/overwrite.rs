//! Sealed files: overwritten, updated, mapped.

use crate::site::{PATIENCE, Site, pattern};
use rustix::fs::{Mode, OFlags};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tidemark_engine::namespace::{FileState, NotSealable};

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
    // The kernel is answered ESTALE once and tries again; `write` must see none of it.
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

/// S-trunc with no file open: a new backing file behind the same inode.
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

/// S-mapped-seal: "A file that is closed but still mapped for writing is not sealed ... until the mapping is gone".
#[test]
fn a_file_mapped_for_writing_is_not_sealed_until_it_is_unmapped() {
    let Some(site) = Site::passthrough() else { return };
    fs::write(site.path("f"), vec![0; 100_000]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(site.path("f")).unwrap();
    // SAFETY: nobody truncates the file while it is mapped.
    let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
    drop(file);
    assert_eq!(site.state_after_close("f"), FileState::Closed);
    let node = site.view("f").node;
    assert_eq!(site.namespace.begin_seal(node).unwrap_err(), NotSealable::Mapped);
    map[0] = 1;
    assert_eq!(site.view("f").state, FileState::Mapped);
    drop(map);
    assert!(site.namespace.begin_seal(node).is_ok());
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

//! Export of a version to a directory outside the mount: whole and as it was saved, or not at all.
//!
//! Owns: the demands on the exported files, read with plain calls. Does not own: which versions there are.

use std::fs::{self, File, FileTimes, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{FileType, Mode, XattrFlags};
use tidemark_tests::daemon::{Daemon, shown};

use crate::site::{CHUNK_BYTES, NEVER_SETTLES, flip, flip_host, names, noise, options, start};

const NOTE: &str = "user.note";

struct Saved {
    place: PathBuf,
    large: Vec<u8>,
    small: Vec<u8>,
}

/// Saves a directory of two files, one with two names, with a mode, a time and an attribute of its own.
fn save_directory(daemon: &Daemon, seed: u64) -> Saved {
    let place = daemon.mount().join("run/step-5");
    let (large, small) = (noise(seed, CHUNK_BYTES + 12_345), noise(seed + 1, 10));
    fs::create_dir_all(place.join("sub")).unwrap();
    fs::write(place.join("a.pt"), &large).unwrap();
    fs::write(place.join("sub/b.pt"), &small).unwrap();
    if !place.join("sub/link.pt").exists() {
        fs::hard_link(place.join("a.pt"), place.join("sub/link.pt")).unwrap();
    }
    fs::set_permissions(place.join("a.pt"), Permissions::from_mode(0o640)).unwrap();
    fs::set_permissions(place.join("sub"), Permissions::from_mode(0o2755)).unwrap();
    for path in ["a.pt", "sub", ""] {
        rustix::fs::setxattr(place.join(path), NOTE, b"kept", XattrFlags::empty()).unwrap();
    }
    for path in ["a.pt", "sub", ""] {
        let times = FileTimes::new().set_modified(UNIX_EPOCH + Duration::new(1_700_000_000, 123_456_789));
        File::open(place.join(path)).unwrap().set_times(times).unwrap();
    }
    daemon.flush();
    Saved { place, large, small }
}

fn assert_is(directory: &Path, saved: &Saved) {
    assert_eq!(names(directory), ["a.pt", "sub"]);
    assert_eq!(names(&directory.join("sub")), ["b.pt", "link.pt"]);
    assert!(
        fs::read(directory.join("a.pt")).unwrap() == saved.large,
        "other bytes in {}",
        directory.display()
    );
    assert!(
        fs::read(directory.join("sub/b.pt")).unwrap() == saved.small,
        "other bytes in {}",
        directory.display()
    );
    let of = |path: &str| fs::metadata(directory.join(path)).unwrap();
    assert_eq!((of("a.pt").ino(), of("a.pt").nlink()), (of("sub/link.pt").ino(), 2));
    assert_eq!((of("a.pt").mode() & 0o7777, of("sub/b.pt").mode() & 0o7777), (0o640, 0o644));
    assert_eq!(of("sub").mode() & 0o7777, 0o2755, "files in it get its group");
    for path in ["a.pt", "sub", ""] {
        assert_eq!((of(path).mtime(), of(path).mtime_nsec()), (1_700_000_000, 123_456_789), "{path:?}");
    }
    for path in ["a.pt", "sub", ""] {
        assert_noted(&directory.join(path));
    }
}

fn assert_noted(path: &Path) {
    let mut value = [0; 8];
    let len = rustix::fs::getxattr(path, NOTE, &mut value)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(&value[..len], b"kept", "{}", path.display());
}

#[test]
fn any_version_is_exported_as_it_was_saved_from_memory_or_from_tier3() {
    let Some(mut daemon) = start(options("256MiB", NEVER_SETTLES)) else { return };
    let out = daemon.scratch("out");
    let first = save_directory(&daemon, 1);
    let second = save_directory(&daemon, 10);
    let at = second.place.to_str().unwrap().to_owned();
    let export = |daemon: &Daemon, name: &str, more: &[&str]| {
        let target = out.join(name);
        let report = daemon.ctl_json(&[&["export", &at, target.to_str().unwrap()], more].concat());
        assert_eq!(
            (report["files"].as_u64(), report["left_out"].as_array().map(Vec::len)),
            (Some(2), Some(0)),
            "{report:#}"
        );
        (target, report["host_files"].as_u64().unwrap())
    };
    let (target, from_memory) = export(&daemon, "newest", &[]);
    assert_is(&target, &second);
    assert_eq!(from_memory, 2);
    let (target, from_memory) = export(&daemon, "older", &["--version", "0.1"]);
    assert_is(&target, &first);
    assert_eq!(from_memory, 0, "its bytes are not the tree's any more");
    daemon.stop();
    daemon.start_again();
    let (target, from_memory) = export(&daemon, "cold", &[]);
    assert_is(&target, &second);
    assert_eq!(from_memory, 0);
    fs::remove_dir_all(&second.place).unwrap();
    daemon.flush();
    let (target, _) = export(&daemon, "removed", &["--version", "0.2"]);
    assert_is(&target, &second);
    assert_eq!(names(&out), ["cold", "newest", "older", "removed"], "nothing else is left");
    // The tree's document no longer has the version's directories.
    daemon.ctl_json(&["undelete", &at]);
    for path in ["sub", ""] {
        assert_noted(&second.place.join(path));
    }
}

/// Links and empty directories are recorded in the tree, for the version that it shows, and in no version.
#[test]
fn links_and_empty_directories_are_exported_with_the_version_that_the_tree_shows() {
    let Some(mut daemon) = start(options("256MiB", NEVER_SETTLES)) else { return };
    let out = daemon.scratch("out");
    let first = save_directory(&daemon, 1);
    let place = &first.place;
    std::os::unix::fs::symlink("../a.pt", place.join("sub/best.pt")).unwrap();
    std::os::unix::fs::symlink("/no/such/place", place.join("away")).unwrap();
    fs::hard_link(place.join("away"), place.join("away-too")).unwrap();
    fs::create_dir(place.join("empty")).unwrap();
    fs::set_permissions(place.join("empty"), Permissions::from_mode(0o750)).unwrap();
    rustix::fs::setxattr(place.join("empty"), NOTE, b"kept", XattrFlags::empty()).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, place.join("pipe"), FileType::Fifo, Mode::from_raw_mode(0o600), 0)
        .unwrap();
    // The link lies beside the checkpoint, and is no part of it.
    std::os::unix::fs::symlink("step-5", daemon.mount().join("run/last")).unwrap();
    daemon.flush();
    let at = place.to_str().unwrap().to_owned();
    let export = |daemon: &Daemon, name: &str| {
        let target = out.join(name);
        let report = daemon.ctl_json(&["export", &at, target.to_str().unwrap()]);
        assert_eq!(report["left_out"], serde_json::json!(["pipes, sockets and devices: 1"]), "{report:#}");
        assert_eq!(names(&target), ["a.pt", "away", "away-too", "empty", "sub"]);
        assert_eq!(names(&target.join("sub")), ["b.pt", "best.pt", "link.pt"]);
        assert!(fs::read(target.join("sub/best.pt")).unwrap() == first.large, "it leads to the copy");
        for link in ["away", "away-too"] {
            assert_eq!(fs::read_link(target.join(link)).unwrap(), Path::new("/no/such/place"));
        }
        assert_eq!(fs::metadata(target.join("empty")).unwrap().mode() & 0o7777, 0o750);
        assert_noted(&target.join("empty"));
    };
    export(&daemon, "warm");
    daemon.stop();
    daemon.start_again();
    export(&daemon, "cold");
    // Since the tree shows another version now, this version's links are unknown.
    save_directory(&daemon, 10);
    let older = out.join("older");
    daemon.ctl_json(&["export", &at, older.to_str().unwrap(), "--version", "0.1"]);
    assert_is(&older, &first);
}

#[test]
fn a_checkpoint_that_is_one_file_lies_in_the_directory_under_its_own_name() {
    let Some(daemon) = start(options("256MiB", NEVER_SETTLES)) else { return };
    let bytes = noise(30, CHUNK_BYTES + 7);
    crate::site::save(&daemon, "run/step5.pt", &bytes);
    fs::set_permissions(daemon.mount().join("run/step5.pt"), Permissions::from_mode(0o640)).unwrap();
    daemon.flush();
    let out = daemon.scratch("out");
    let target = out.join("there");
    daemon.ctl_json(&["export", "run@5", target.to_str().unwrap()]);
    assert_eq!((names(&out), names(&target)), (vec!["there".to_owned()], vec!["step5.pt".to_owned()]));
    assert!(fs::read(target.join("step5.pt")).unwrap() == bytes);
    assert_eq!(fs::metadata(target.join("step5.pt")).unwrap().mode() & 0o7777, 0o640);
}

#[test]
fn what_cannot_be_exported_whole_leaves_nothing_and_overwrites_nothing() {
    let Some(daemon) = start(options("256MiB", NEVER_SETTLES)) else { return };
    let out = daemon.scratch("out");
    let saved = save_directory(&daemon, 1);
    let at = saved.place.to_str().unwrap();
    let refused = |args: &[&str], code: i32, says: &str| {
        let output = daemon.ctl(&[&["export"], args].concat());
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", shown(&output));
        assert!(shown(&output).contains(says), "{args:?}: {}", shown(&output));
    };
    let target = out.join("there");
    fs::write(&target, b"mine").unwrap();
    refused(&[at, target.to_str().unwrap()], 1, "nothing is overwritten");
    assert_eq!(fs::read(&target).unwrap(), b"mine");
    refused(&[at, daemon.mount().join("copy").to_str().unwrap()], 2, "in the mount itself");
    // A bind mount is the same place under another path. An export into it would make the daemon wait for itself.
    let bind = daemon.scratch("bind");
    rustix::mount::mount_bind(daemon.mount(), &bind).unwrap();
    let through_bind = daemon.ctl(&["export", at, bind.join("copy").to_str().unwrap()]);
    rustix::mount::unmount(&bind, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!(through_bind.status.code(), Some(2), "{}", shown(&through_bind));
    assert!(shown(&through_bind).contains("in the mount itself"), "{}", shown(&through_bind));
    refused(&[at, out.join("no/such").to_str().unwrap()], 2, "cannot be looked at");
    let free = out.join("free");
    let free = free.to_str().unwrap();
    refused(&["@77", free], 3, "no such checkpoint");
    refused(&[at, free, "--version", "0.7"], 3, "no version 0.7");
    refused(&[at, free, "--version", "7"], 2, "TIMELINE.VERSION");
    // A bad copy in memory is passed over. If the object is bad too, no copy is left.
    flip_host(&daemon, "run/step-5/a.pt", 5);
    let report = daemon.ctl_json(&["export", at, out.join("healed").to_str().unwrap()]);
    assert_eq!(report["host_files"], 1, "{report:#}");
    assert_is(&out.join("healed"), &saved);
    let show = daemon.ctl_json(&["show", at, "--files"]);
    let files = show["files"].as_array().unwrap();
    let object = files.iter().find(|file| file["path"] == "run/step-5/a.pt").unwrap()["object_key"].clone();
    flip(&daemon.tier3_dir().join(object.as_str().unwrap()), (CHUNK_BYTES + 7) as u64);
    refused(&[at, free], 4, "corrupt in Tier-3");
    assert_eq!(names(&out), ["healed", "there"], "nothing is left of it");
}

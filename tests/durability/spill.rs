//! Spill: when memory is full and Tier-3 away, a save goes on to a local disk, past the daemon as always.
//!
//! Owns: daemons with a spill, full, killed, and refused at the start. Does not own: the spill's own sums (engine, tier1).

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;
use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::{machine, process};

use crate::site::{MIB, NEVER_SETTLES, assert_holds, noise, options, save, start, tier};

const LIMIT: Duration = Duration::from_secs(60);

/// linux/magic.h
const OVERLAYFS: rustix::fs::FsWord = 0x794c_7630;

/// A directory on a disk. If the machine's disk is stacked, as in most containers, it cannot hold a spill, and a tmpfs is used instead.
struct Disk {
    directory: TempDir,
    is_tmpfs: bool,
}

impl Disk {
    fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.is_tmpfs {
            let _ = unmount(self.path(), UnmountFlags::DETACH);
        }
    }
}

/// Returns a disk with foreign files on it.
fn disk() -> Disk {
    let directory = tempfile::Builder::new().prefix("tidemark-spill-test-").tempdir_in("/var/tmp").unwrap();
    let is_tmpfs = rustix::fs::statfs(directory.path()).unwrap().f_type == OVERLAYFS;
    if is_tmpfs {
        mount("tidemark-tests", directory.path(), "tmpfs", MountFlags::NOSUID, None).unwrap();
    }
    let disk = Disk { directory, is_tmpfs };
    fs::write(disk.path().join("not-ours"), b"stays").unwrap();
    fs::create_dir(disk.path().join("tidemark-spill-but-not-ours")).unwrap();
    fs::write(disk.path().join("tidemark-spill-but-not-ours/a"), b"stays").unwrap();
    disk
}

/// Checks that the sweep has left foreign files alone.
fn assert_untouched(disk: &Disk) {
    for name in ["not-ours", "tidemark-spill-but-not-ours/a"] {
        assert_eq!(fs::read(disk.path().join(name)).unwrap(), b"stays", "{name}");
    }
}

fn with_spill(tier1: &str, directory: &Path, budget: &str) -> DaemonOptions {
    let config =
        format!("{NEVER_SETTLES}[spill]\ndirectory = \"{}\"\nbudget = \"{budget}\"\n", directory.display());
    options(tier1, &config)
}

/// Returns the spill folders of the lives of a node.
fn folders(disk: &Disk) -> Vec<PathBuf> {
    let entries = fs::read_dir(disk.path()).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir() && !path.ends_with("tidemark-spill-but-not-ours")).collect()
}

/// Returns the bytes of spilled files, as the daemon counts them.
fn spilled_bytes(daemon: &Daemon) -> u64 {
    tier(daemon, "spill")["used_bytes"].as_u64().unwrap()
}

/// Returns the number of requests to read or write, which is 0 in passthrough.
fn data_requests(daemon: &Daemon) -> u64 {
    let status = daemon.ctl_json(&["status"]);
    ["read", "write"].iter().map(|name| status["mount"]["requests"][name].as_u64().unwrap_or(0)).sum()
}

#[test]
fn a_save_four_times_as_large_as_memory_goes_on_to_the_disk_while_tier3_takes_nothing() {
    const SHARDS: u64 = 16;
    const NAMES: &[u8; 16] = b"abcdefghijklmnop";
    let disk = disk();
    let Some(mut daemon) = start(with_spill("256MiB", disk.path(), "4GiB")) else { return };
    let path = |shard: u64| {
        let name = NAMES.iter().zip(0..).find(|(_, number)| *number == shard).expect("sixteen names").0;
        format!("run/step1/shard{}.bin", char::from(*name))
    };
    let bytes = |shard: u64| noise(7000 + shard, 64 * MIB + 13);
    for shard in 0..SHARDS {
        save(&daemon, &path(shard), &bytes(shard));
    }
    let used = spilled_bytes(&daemon);
    assert!(used > 600 << 20, "most of it lies on the disk: {used} bytes");
    assert!(used <= 4 << 30);
    for shard in 0..SHARDS {
        assert_holds(&daemon, &path(shard), &bytes(shard), "before anything is uploaded");
    }
    assert_eq!(data_requests(&daemon), 0, "the kernel wrote and read past the daemon");
    let tiers = daemon.ctl(&["tiers"]);
    let text = shown(&tiers);
    assert!(
        text.contains("spill") && text.contains("not sealed yet") || text.contains("not committed yet"),
        "{text}"
    );

    // A spilled file is sealed, uploaded and committed like any other. After that, it may be evicted.
    daemon.flush();
    assert_eq!(daemon.checkpoint("run/step1").expect("it is listed")["state"], "committed");
    for shard in 0..SHARDS {
        assert_holds(&daemon, &path(shard), &bytes(shard), "committed");
    }
    daemon.stop();
    assert!(folders(&disk).is_empty(), "an orderly end leaves nothing: {:?}", folders(&disk));
    daemon.start_again();
    for shard in 0..SHARDS {
        assert_holds(&daemon, &path(shard), &bytes(shard), "with empty memory");
    }
    fs::remove_dir_all(daemon.mount().join("run")).unwrap();
    let empty = process::until(LIMIT, || (spilled_bytes(&daemon) == 0).then_some(()));
    assert!(empty.is_some(), "removed files give the disk back: {}", spilled_bytes(&daemon));
    assert_untouched(&disk);
}

#[test]
fn files_on_the_disk_outlive_the_daemon_and_go_with_the_memory_of_the_node() {
    let disk = disk();
    let Some(mut daemon) = start(with_spill("64MiB", disk.path(), "2GiB")) else { return };
    // The file stays open, so that memory is full when the next one begins. A closed file might be evicted by then.
    fs::create_dir(daemon.mount().join("run")).unwrap();
    let mut filler = File::create_new(daemon.mount().join("run/a.pt")).unwrap();
    filler.set_len(60 << 20).unwrap();
    let full = || (tier(&daemon, "tier1")["used_bytes"].as_u64().unwrap() >= 60 << 20).then_some(());
    process::until(LIMIT, full).expect("memory is made ready for it");
    filler.write_all(&noise(1, 60 * MIB)).unwrap();
    let bytes = noise(2, 96 * MIB);
    let target = daemon.mount().join("run/long.pt");
    let mut file = File::options().read(true).write(true).create_new(true).open(&target).unwrap();
    drop(filler);
    let (first, second) = bytes.split_at(40 * MIB + 5);
    file.write_all(first).unwrap();
    assert!(spilled_bytes(&daemon) >= 40 << 20, "it lies on the disk");
    for _ in 0..2 {
        let dead = daemon.kill_serving();
        file.write_all_at(&second[..MIB], first.len() as u64).unwrap();
        daemon.wait_for_next(dead);
    }
    file.write_all(second).unwrap();
    let mut read = Vec::new();
    File::open(&target).unwrap().read_to_end(&mut read).unwrap();
    assert!(read == bytes, "what was written before, during and after the deaths");
    drop(file);
    assert!(spilled_bytes(&daemon) >= 96 << 20, "it is counted by the daemon that took it over");
    assert_eq!(folders(&disk).len(), 1, "the same folder goes on");
    // Another daemon beside it does not take its folder for a dead one's.
    let Some(other) = start(with_spill("64MiB", disk.path(), "1GiB")) else { return };
    assert_eq!(folders(&disk).len(), 2);
    drop(other);
    daemon.flush();
    assert_holds(&daemon, "run/long.pt", &bytes, "committed");
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    assert_holds(&daemon, "run/long.pt", &bytes, "sealed, and taken over again");
    daemon.kill9();
    assert!(!folders(&disk).is_empty(), "nobody could take it away");
    daemon.start_again();
    assert_eq!(folders(&disk).len(), 1, "that of this life: {:?}", folders(&disk));
    assert_eq!(spilled_bytes(&daemon), 0);
    assert_holds(&daemon, "run/long.pt", &bytes, "with empty memory");
    assert_untouched(&disk);
}

#[test]
fn a_file_that_outgrew_memory_begins_on_the_disk_the_next_time() {
    let disk = disk();
    let Some(daemon) = start(with_spill("128MiB", disk.path(), "2GiB")) else { return };
    let bytes = noise(3, 300 * MIB);
    let target = daemon.mount().join("model.pt");
    // The daemon cannot know the size and begins in empty memory. The kernel does not allow another place for an open file.
    let refused = fs::write(&target, &bytes).expect_err("it does not fit in memory");
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC), "{refused}");
    // close(2) does not wait for the RELEASE, from which the daemon learns the size reached. A restarted job comes after it.
    let written = process::until(LIMIT, || fs::write(&target, &bytes).ok());
    assert!(written.is_some(), "the disk has room for it");
    assert_holds(&daemon, "model.pt", &bytes, "written again");
    assert!(spilled_bytes(&daemon) >= 300 << 20);
    // The daemon heeds a size that is announced.
    let known = daemon.mount().join("known.pt");
    fs::write(&known, b"short").unwrap();
    // truncate(2) names a file that is not open, so the file may move to the disk.
    let script = "import os, sys; os.truncate(sys.argv[1], 200 << 20)";
    let output = process::run(Command::new("python3").args(["-c", script]).arg(&known), LIMIT);
    assert!(output.status.success(), "{}", shown(&output));
    let file = File::options().write(true).open(&known).unwrap();
    file.write_all_at(&bytes[..200 * MIB - 5], 5).unwrap();
    drop(file);
    let expected = [b"short".as_slice(), &bytes[..200 * MIB - 5]].concat();
    assert_holds(&daemon, "known.pt", &expected, "grown by truncate");
}

#[test]
fn a_full_spill_refuses_new_files_and_says_why() {
    let disk = disk();
    let Some(daemon) = start(with_spill("64MiB", disk.path(), "100MiB")) else { return };
    let bytes = noise(4, 25 * MIB);
    let mut saved = 0;
    let refused = loop {
        match fs::write(daemon.mount().join(format!("shard{}.bin", "x".repeat(saved))), &bytes) {
            Ok(()) => saved += 1,
            Err(error) => break error,
        }
        assert!(saved < 10, "64 and 100 MiB cannot hold so many");
    };
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC), "{refused}");
    assert!(saved >= 4, "only {saved} files of 25 MiB were taken");
    let spill = tier(&daemon, "spill");
    assert!(spill["used_bytes"].as_u64().unwrap() <= 100 << 20, "{spill:#}");
    let held_by = spill["held_by"].as_object().expect("reasons");
    assert!(
        held_by.contains_key("closed, not sealed yet") || held_by.contains_key("not committed yet"),
        "{spill:#}"
    );
    for name in 0..saved {
        assert_holds(&daemon, &format!("shard{}.bin", "x".repeat(name)), &bytes, "saved before it was full");
    }
    // Committed files are evicted, and saves go on.
    daemon.flush();
    for round in 0..4 {
        save(&daemon, &format!("more/{round}/model.bin"), &bytes);
        daemon.flush();
    }
}

#[test]
fn a_directory_that_cannot_hold_a_spill_is_refused_at_the_start() {
    if !machine::can_mount() {
        return;
    }
    let refused = |directory: &Path, code: i32, why: &str| {
        let output = Daemon::start_refused(with_spill("64MiB", directory, "1GiB"));
        let text = shown(&output);
        assert_eq!(output.status.code(), Some(code), "{text}");
        let named = directory.to_str().unwrap();
        assert!(text.contains("the spill") && text.contains(named) && text.contains(why), "{why}: {text}");
    };
    let disk = disk();
    refused(&disk.path().join("missing"), 2, "No such file");
    let read_only = disk.path().join("read-only");
    fs::create_dir(&read_only).unwrap();
    mount("none", &read_only, "tmpfs", MountFlags::RDONLY, None).unwrap();
    refused(&read_only, 1, "Read-only file system");
    unmount(&read_only, UnmountFlags::DETACH).unwrap();
    assert_untouched(&disk);
}

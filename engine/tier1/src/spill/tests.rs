//! The spill without a mount: sums against the disk, the folder's life, a successor's findings.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::{Spill, SpillPlace};
use crate::{Backing, MediumChoice, Tier1, Tier1Error, Tier1Settings};

const MIB: u64 = 1 << 20;

/// Makes a directory on a disk: leases and space beyond the end of a file need a real one.
fn disk() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("tidemark-spill-unit-").tempdir_in("/var/tmp").unwrap()
}

fn place(disk: &Path, name: &str, budget_bytes: u64) -> SpillPlace {
    SpillPlace { directory: disk.to_owned(), name: name.to_owned(), budget_bytes }
}

fn tier1(disk: &Path, budget_bytes: u64) -> (tempfile::TempDir, Arc<Tier1>) {
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = MediumChoice::Directory(memory.path().to_owned());
    let tier1 = Tier1::open(Tier1Settings { size_bytes: 16 * MIB, ballast: false, medium }).unwrap();
    tier1.add_spill(&place(disk, "n-1", budget_bytes)).unwrap();
    (memory, tier1)
}

fn used(tier1: &Tier1) -> u64 {
    tier1.spill_usage().unwrap().used_bytes
}

#[test]
fn a_promise_is_blocks_on_the_disk_and_a_budget_is_not_promised_twice() {
    let disk = disk();
    let (_memory, tier1) = tier1(disk.path(), 10 * MIB);
    let first = tier1.create_spilled(Some(6 * MIB)).unwrap();
    assert!(first.allocated_bytes().unwrap() >= 6 * MIB, "the disk cannot give it to anybody else");
    assert!(used(&tier1) >= 6 * MIB);
    let refused = tier1.create_spilled(Some(6 * MIB)).unwrap_err();
    assert!(matches!(refused, Tier1Error::SpillFull { wanted_bytes, .. } if wanted_bytes == 6 * MIB));
    assert_eq!(first.write_at(&[7; 5000], 0).unwrap(), 5000);
    first.set_len(5000).unwrap();
    first.trim().unwrap();
    assert!(used(&tier1) < MIB, "what was promised and not written comes back: {}", used(&tier1));
    assert!(first.set_len(11 * MIB).is_err());
    assert_eq!(first.stat().unwrap().size_bytes, 5000);
    drop(first);
    assert_eq!(used(&tier1), 0);
    assert_eq!(tier1.spill_usage().unwrap().files, 0);
}

#[test]
fn what_a_writer_allocates_itself_is_counted_while_it_does() {
    let disk = disk();
    let (_memory, tier1) = tier1(disk.path(), 4 * MIB);
    let file = tier1.create_spilled(None).unwrap();
    file.begin_growth();
    let outside = File::options().write(true).open(file.host_path()).unwrap();
    outside.write_all_at(&vec![1; 5 << 20], 0).unwrap();
    let usage = tier1.spill_usage().unwrap();
    assert!(
        usage.used_bytes >= 5 * MIB && usage.available_bytes == 0,
        "beyond the budget, and said: {usage:?}"
    );
    assert_eq!(usage.growing_files, 1);
    assert!(tier1.create_spilled(Some(1)).is_err());
    assert!(file.writable_elsewhere().unwrap());
    drop(outside);
    file.end_growth();
    assert!(!file.writable_elsewhere().unwrap());
    assert!(file.map().unwrap().iter().all(|byte| *byte == 1));
}

#[test]
fn bytes_of_a_dropped_file_are_counted_while_somebody_has_it_open() {
    let disk = disk();
    let (_memory, tier1) = tier1(disk.path(), 64 * MIB);
    let file = tier1.create_spilled(Some(2 * MIB)).unwrap();
    let outside = File::open(file.host_path()).unwrap();
    drop(file);
    tier1.let_go();
    let usage = tier1.spill_usage().unwrap();
    assert!(usage.lingering_bytes >= 2 * MIB && usage.files_bytes == 0, "{usage:?}");
    drop(outside);
    tier1.let_go();
    assert_eq!(used(&tier1), 0);
}

#[test]
fn a_successor_finds_each_file_by_its_number_and_gives_back_the_rest() {
    let disk = disk();
    let spill = Arc::new(Spill::make(&place(disk.path(), "n-1", 64 * MIB)).unwrap());
    let claimed = Backing::spilled(spill.create(7, Some(MIB), 0).unwrap());
    claimed.write_at(b"bytes", 0).unwrap();
    let unclaimed = Backing::spilled(spill.create(9, Some(MIB), 0).unwrap());
    let kept = spill.keep().unwrap();
    // Killed: none of these is dropped in order.
    std::mem::forget((claimed, unclaimed, spill));
    // The kept descriptor holds the lock, so the folder is not removed.
    drop(Spill::make(&place(disk.path(), "n-2", MIB)).unwrap());
    let (next, highest) = Spill::take_over(kept).unwrap();
    let next = Arc::new(next);
    assert_eq!(highest, 9);
    assert!(next.usage().used_bytes >= 2 * MIB, "all of it counts before anything is claimed");
    assert!(next.adopt(8).is_none());
    let found = Backing::spilled(next.adopt(7).unwrap());
    assert!(next.adopt(7).is_none(), "once");
    let mut bytes = [0; 5];
    found.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"bytes");
    next.adopt_rest();
    assert!(next.usage().used_bytes < 2 * MIB);
    let last = next.keep().unwrap();
    drop((found, next));
    assert_eq!(
        fs::read_dir(disk.path()).unwrap().count(),
        1,
        "one that could not go on leaves it to the next"
    );
    let (last, _) = Spill::take_over(last).unwrap();
    last.remove();
    assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 0, "an orderly end leaves nothing");
}

#[test]
fn only_folders_of_the_dead_that_hold_nothing_else_are_swept() {
    let disk = disk();
    let folder = |name: &str| {
        let path = disk.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("f-3"), b"spilled").unwrap();
        path
    };
    let dead = folder("tidemark-spill-n-1");
    let other = folder("somebody-elses");
    let mixed = folder("tidemark-spill-n-2");
    fs::write(mixed.join("notes.txt"), b"mine").unwrap();
    let living = Spill::make(&place(disk.path(), "n-3", MIB)).unwrap();
    let _second = Spill::make(&place(disk.path(), "n-4", MIB)).unwrap();
    assert!(!dead.exists());
    assert_eq!(fs::read(other.join("f-3")).unwrap(), b"spilled");
    assert_eq!(fs::read(mixed.join("notes.txt")).unwrap(), b"mine");
    assert!(living.folder.path().exists(), "its lock says that it is somebody's");
    let missing = Spill::make(&place(&disk.path().join("absent"), "n-5", MIB)).unwrap_err();
    assert!(missing.to_string().contains("opening") && missing.to_string().contains("absent"), "{missing}");
}

#[test]
fn a_file_of_unknown_size_begins_where_one_like_the_largest_fits() {
    let disk = disk();
    let (_memory, tier1) = tier1(disk.path(), 64 * MIB);
    assert_eq!(tier1.unknown_bytes(), 2 * MIB, "an eighth of Tier-1");
    let large = tier1.create_spilled(Some(6 * MIB)).unwrap();
    large.begin_growth();
    large.write_at(&vec![0; 6 << 20], 0).unwrap();
    large.end_growth();
    assert_eq!(tier1.unknown_bytes(), 6 * MIB);
    let before = tier1.usage().available_bytes;
    let first = tier1.create(None).unwrap();
    let kept = before - tier1.usage().available_bytes;
    assert!(kept >= 6 * MIB, "room for it is kept: {kept}");
    let _second = tier1.create(None).unwrap();
    assert!(tier1.create(None).is_err(), "15 MiB hold two such files");
    first.begin_growth();
    first.end_growth();
    assert!(tier1.create(None).is_ok(), "closed and small, its room is free again");
}

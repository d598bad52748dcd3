//! Tests of Tier-1 on a real kernel. Run as root, they use the private tmpfs; without privileges, a directory. The latter is reported,
//! so that the lesser run is not mistaken for the full one.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::fs::{FallocateFlags, SeekFrom, fstatfs, seek};

use super::{Backing, MediumChoice, Tier1, Tier1Error, Tier1Settings, lock};
use tidemark_protocol::error::ErrorKind;

const MIB: u64 = 1 << 20;

fn directory() -> MediumChoice {
    MediumChoice::Directory(PathBuf::from(format!("/dev/shm/tidemark-test-{}", std::process::id())))
}

fn open(size_bytes: u64, ballast: bool) -> Arc<Tier1> {
    let settings = Tier1Settings { size_bytes, ballast, medium: MediumChoice::PrivateTmpfs };
    match Tier1::open(settings.clone()) {
        Ok(tier1) => tier1,
        Err(error) => {
            eprintln!("WITHOUT PRIVILEGES, on a directory instead: {error}");
            Tier1::open(Tier1Settings { medium: directory(), ..settings }).expect("a directory on /dev/shm")
        }
    }
}

/// Opens a file as a writer under passthrough: by a descriptor of its own, unknown to Tier-1.
fn open_outside(backing: &Backing) -> File {
    File::options().read(true).write(true).open(backing.host_path()).expect("the owner may open its file")
}

fn write_all(backing: &Backing, mut bytes: &[u8], mut offset: u64) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let written = backing.write_at(bytes, offset)?;
        bytes = &bytes[written..];
        offset += written as u64;
    }
    Ok(())
}

fn read_all(backing: &Backing) -> Vec<u8> {
    let size = backing.stat().expect("stat").size_bytes;
    let mut bytes = vec![0xEE; usize::try_from(size).expect("small file")];
    let mut done = 0;
    while done < bytes.len() {
        let read = backing.read_at(&mut bytes[done..], done as u64).expect("read");
        assert!(read > 0, "the file is shorter than its size");
        done += read;
    }
    bytes
}

fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_true() {
        assert!(begun.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_dropped_file_is_counted_until_its_memory_is_nobodys() {
    let tier1 = open(64 * MIB, true);
    let file = tier1.create(Some(24 * MIB)).expect("create");
    write_all(&file, &vec![7; 24 << 20], 0).expect("write");
    let (counted, holder) = (file.counted().expect("in memory"), Arc::downgrade(&file));
    let budget = lock(&tier1.space.budget);
    std::thread::scope(|scope| {
        scope.spawn(move || drop(file));
        eventually("its last holder lets go", || holder.strong_count() == 0);
        assert_eq!(counted.strong_count(), 1, "the budget does not know it yet");
        drop(budget);
        eventually("it is counted as nobody's", || counted.strong_count() == 0);
        assert_eq!(tier1.usage().files_bytes, 0);
    });
}

#[test]
fn old_bytes_are_never_seen_after_memory_was_used_again() {
    let tier1 = open(64 * MIB, true);
    for round in 0..6_u8 {
        let old = tier1.create(Some(24 * MIB)).expect("create");
        write_all(&old, &vec![0xA0 | round; 24 << 20], 0).expect("write");
        old.set_len(100).expect("truncate");
        old.set_len(2 * MIB).expect("grow again");
        assert!(read_all(&old)[100..].iter().all(|byte| *byte == 0), "the cut-off part reads as zeros");
        write_all(&old, &vec![0xB0; 20 << 20], 0).expect("write");
        drop(old);
        let fresh = tier1.create(Some(20 * MIB)).expect("create");
        assert_eq!(fresh.stat().expect("stat").size_bytes, 0);
        let mut byte = [1];
        assert_eq!(fresh.read_at(&mut byte, 0).expect("read"), 0, "space beyond the end is not readable");
        fresh.set_len(20 * MIB).expect("grow");
        assert!(read_all(&fresh).iter().all(|byte| *byte == 0), "round {round}");
    }
}

#[test]
fn a_file_with_holes_is_mapped_whole_or_not_at_all() {
    let tier1 = open(64 * MIB, false);
    let backing = tier1.create(None).expect("create");
    let writer = open_outside(&backing);
    writer.write_all_at(b"end", 16 * MIB).expect("write");
    let map = backing.map().expect("map");
    assert!(map[..16 << 20].iter().all(|byte| *byte == 0) && &map[16 << 20..] == b"end");
    assert!(backing.allocated_bytes().expect("look") > 16 * MIB, "its holes are filled");
    drop(map);
    // Reading it through a mapping would end the process.
    writer.write_all_at(b"end", 256 * MIB).expect("write");
    assert_eq!(backing.map().expect_err("no room").kind(), std::io::ErrorKind::StorageFull);
    let mut bytes = [1; 100];
    assert_eq!(backing.read_at(&mut bytes, 128 * MIB).expect("read"), 100);
    assert_eq!(bytes, [0; 100]);
}

#[test]
fn a_seal_is_refused_exactly_while_a_writable_handle_or_mapping_lives() {
    let tier1 = open(32 * MIB, false);
    if !tier1.capabilities().leases.works {
        panic!("no leases here: {}", tier1.capabilities().leases.reason);
    }
    let backing = tier1.create(None).expect("create");
    let busy = || backing.writable_elsewhere().expect("lease");
    assert!(!busy(), "a fresh file has no writer");

    let writer = open_outside(&backing);
    assert!(busy(), "a handle lives");
    writer.write_all_at(b"bytes", 0).expect("write");
    // SAFETY: the file is longer than zero and outlives the mapping; nothing reads through it.
    let map = unsafe { memmap2::MmapMut::map_mut(&writer) }.expect("map");
    drop(writer);
    assert!(busy(), "the mapping outlives its handle");
    drop(map);
    assert!(!busy(), "nothing is left");

    let reader = File::open(backing.host_path()).expect("open");
    assert!(!busy(), "a reader does not change the bytes");
    drop(reader);
    backing.begin_growth();
    write_all(&backing, b"more", 5).expect("write");
    assert!(busy(), "our own writer counts");
    backing.end_growth();
    assert!(!busy());
    assert_eq!(&*backing.map().expect("map"), b"bytesmore");
}

#[test]
fn dropping_the_last_holder_gives_the_pages_back_to_the_ballast() {
    let tier1 = open(96 * MIB, true);
    eventually("the budget is warm", || tier1.usage().warm_fraction() > 0.95);
    let before = tier1.usage();
    assert!(before.ballast_bytes > 32 * MIB, "{before:?}");
    let backing = tier1.create(Some(40 * MIB)).expect("create");
    write_all(&backing, &vec![7; 40 << 20], 0).expect("write");
    backing.trim().expect("trim");
    assert_eq!(tier1.usage().files_bytes, 40 * MIB);
    assert!(tier1.usage().ballast_bytes <= before.ballast_bytes - 32 * MIB, "the ballast gave way");
    let map = backing.map().expect("map");
    drop(backing);
    assert!(map.iter().all(|byte| *byte == 7), "a view of ours keeps the bytes");
    assert_eq!(tier1.usage().files_bytes, 40 * MIB);
    drop(map);
    assert_eq!(tier1.usage().files_bytes, 0);
    eventually("the ballast is back", || tier1.usage().ballast_bytes + 48 * MIB >= before.ballast_bytes);
    eventually("no file is left to take apart", || {
        let usage = tier1.usage();
        usage.free_bytes < 20 * MIB && usage.warm_fraction() > 0.95
    });
}

#[test]
fn a_dropped_file_that_is_still_mapped_keeps_its_bytes_and_its_place_in_the_budget() {
    let tier1 = open(64 * MIB, true);
    let backing = tier1.create(Some(8 * MIB)).expect("create");
    write_all(&backing, &vec![9; 8 << 20], 0).expect("write");
    backing.trim().expect("trim");
    let reader = File::open(backing.host_path()).expect("open");
    // SAFETY: nobody truncates the file; it is unlinked only.
    let map = unsafe { memmap2::Mmap::map(&reader) }.expect("map");
    drop(reader);
    drop(backing);
    std::thread::sleep(Duration::from_millis(120));
    assert!(map.iter().all(|byte| *byte == 9), "pages under a foreign mapping were taken");
    assert_eq!(tier1.usage().lingering_bytes, 8 * MIB);
    drop(map);
    eventually("the bytes are let go with the mapping", || tier1.usage().lingering_bytes == 0);
}

#[test]
fn what_does_not_fit_beside_the_promises_is_refused_with_the_numbers() {
    let tier1 = open(64 * MIB, true);
    let first = tier1.create(Some(40 * MIB)).expect("fits");
    let refused = tier1.create(Some(40 * MIB)).expect_err("the first has the promise of these bytes");
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    let Tier1Error::NoSpace { wanted_bytes, available_bytes, size_bytes } = refused else {
        panic!("{refused}")
    };
    assert_eq!((wanted_bytes, size_bytes), (40 * MIB, 64 * MIB));
    assert!(available_bytes < 24 * MIB);
    assert!(tier1.admit(available_bytes + 1).is_err());
    let small = tier1.create(None).expect("a small one still fits");
    assert!(matches!(small.set_len(40 * MIB), Err(Tier1Error::NoSpace { .. })));
    drop(first);
    tier1.create(Some(40 * MIB)).expect("the promise went with its file");
    let error = Tier1::open(Tier1Settings { size_bytes: 4096, ballast: false, medium: MediumChoice::Auto })
        .expect_err("too small");
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn truncating_a_fresh_file_to_nothing_keeps_its_ready_space() {
    let tier1 = open(64 * MIB, true);
    eventually("a file lies ready", || {
        tier1.usage().pool_bytes >= 2 * MIB && tier1.usage().warm_fraction() > 0.9
    });
    let backing = tier1.create(None).expect("create");
    let held = backing.held_bytes();
    assert_eq!(held, 2 * MIB, "ready before the reply");
    assert_eq!(backing.stat().expect("stat").blocks_512, 0, "and not shown as used");
    backing.set_len(0).expect("O_TRUNC");
    assert_eq!(backing.held_bytes(), held);
    write_all(&backing, &[1; 5000], 0).expect("write");
    backing.set_len(0).expect("O_TRUNC of a written file");
    assert_eq!(backing.held_bytes(), held, "ready again for the rewrite");
    write_all(&backing, &[1; 5000], 0).expect("write");
    backing.trim().expect("trim");
    assert_eq!(backing.held_bytes(), 8192);
    assert_eq!(backing.stat().expect("stat").blocks_512, 16);
}

#[test]
fn allocate_and_punch_do_what_fallocate_promises() {
    let tier1 = open(64 * MIB, true);
    let backing = tier1.create(None).expect("create");
    backing.allocate(FallocateFlags::empty(), 0, 3 * MIB).expect("allocate");
    assert_eq!(backing.stat().expect("stat").size_bytes, 3 * MIB);
    write_all(&backing, &vec![5; 3 << 20], 0).expect("write");
    backing.punch(MIB, MIB).expect("punch");
    backing.allocate(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, 0, 10).expect("zero");
    let bytes = read_all(&backing);
    assert!(bytes[..10].iter().all(|byte| *byte == 0) && bytes[10..1 << 20].iter().all(|byte| *byte == 5));
    assert!(bytes[1 << 20..2 << 20].iter().all(|byte| *byte == 0));
    assert!(bytes[2 << 20..].iter().all(|byte| *byte == 5));
    assert_eq!(backing.held_bytes(), 2 * MIB);
    let error = backing.allocate(FallocateFlags::COLLAPSE_RANGE, 0, 4096).expect_err("tmpfs has none");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(backing.allocate(FallocateFlags::empty(), u64::MAX, 2).is_err(), "no overflow");
    assert!(matches!(
        backing.allocate(FallocateFlags::KEEP_SIZE, 0, 200 * MIB),
        Err(Tier1Error::NoSpace { .. })
    ));
}

#[test]
fn a_directory_medium_is_held_to_the_budget_and_leaves_nothing_behind() {
    let MediumChoice::Directory(base) = directory() else { unreachable!() };
    let base = base.join("budget");
    let medium = MediumChoice::Directory(base.clone());
    // Left by a daemon that was killed: a folder without a lock.
    std::fs::create_dir_all(base.join("tier1-1-1/files")).expect("mkdir");
    let tier1 = Tier1::open(Tier1Settings { size_bytes: 16 * MIB, ballast: true, medium }).expect("open");
    assert!(!base.join("tier1-1-1").exists(), "a dead daemon's memory is given back");
    assert!(!tier1.capabilities().private_tmpfs.works);
    let backing = tier1.create(None).expect("create");
    let error = write_all(&backing, &vec![1; 17 << 20], 0).expect_err("more than the budget");
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    write_all(&backing, &vec![1; 8 << 20], 0).expect("this much fits");
    drop(backing);
    drop(tier1);
    assert_eq!(std::fs::read_dir(&base).expect("the base stays").count(), 0);
    std::fs::remove_dir_all(base.parent().expect("parent")).expect("clean up");
}

/// A process that ends never drops the last of its files, and a folder outlives it.
#[test]
fn an_ended_life_takes_its_folder_away_and_nobody_else_s() {
    let base = tempfile::tempdir_in("/dev/shm").expect("a tmpfs");
    let medium = MediumChoice::Directory(base.path().to_owned());
    let settings = Tier1Settings { size_bytes: 64 * MIB, ballast: true, medium };
    let other = Tier1::open(settings.clone()).expect("open");
    let tier1 = Tier1::open(settings).expect("open");
    eventually("the ballast grows", || tier1.usage().ballast_bytes > 0);
    let (held, dropped) = (tier1.create(None).expect("create"), tier1.create(None).expect("create"));
    write_all(&held, b"bytes", 0).expect("write");
    let writer = open_outside(&held);
    assert_eq!(folders(base.path()).len(), 2);
    tier1.end();
    assert_eq!(folders(base.path()).len(), 1, "with the last of it still held");
    tier1.end();
    drop((dropped, writer));
    drop((held, tier1));
    other.create(None).expect("a neighbour's memory stays");
    drop(other);
    assert!(folders(base.path()).is_empty());
}

#[test]
fn memory_that_a_successor_may_go_on_with_stays_until_a_life_ends() {
    let base = tempfile::tempdir_in("/dev/shm").expect("a tmpfs");
    let medium = MediumChoice::Directory(base.path().to_owned());
    let settings = Tier1Settings { size_bytes: 16 * MIB, ballast: false, medium };
    let tier1 = Tier1::open(settings.clone()).expect("open");
    let (first, second) =
        (tier1.kept_mounts().expect("descriptors"), tier1.kept_mounts().expect("descriptors"));
    drop(tier1);
    assert_eq!(folders(base.path()).len(), 1, "a keeper has it");
    // The first successor could not go on, and the next one is to.
    drop(Tier1::take_over(settings.clone(), first).expect("take over"));
    assert_eq!(folders(base.path()).len(), 1, "one that failed took nothing with it");
    let next = Tier1::take_over(settings, second).expect("take over");
    let folder = folders(base.path()).remove(0);
    let away = base.path().join("away");
    std::fs::rename(&folder, &away).expect("rename");
    std::fs::create_dir(&folder).expect("somebody else's");
    next.end();
    assert!(folder.exists() && away.exists(), "what lies there now is another's");
}

/// Returns the folders of lives below a directory.
fn folders(base: &std::path::Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(base).expect("the base").map(|entry| entry.expect("an entry").path());
    let is_of_a_life =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("tier1-"));
    entries.filter(is_of_a_life).collect()
}

#[test]
fn run_ahead_keeps_ready_space_before_a_writer_it_does_not_hear_of() {
    let tier1 = open(512 * MIB, true);
    let backing = tier1.create(None).expect("create");
    let mut writer = open_outside(&backing);
    backing.begin_growth();
    let chunk = vec![3; 1 << 20];
    for _ in 0..64 {
        writer.write_all(&chunk).expect("write");
        std::thread::sleep(Duration::from_micros(300));
    }
    eventually("space lies ready ahead", || backing.held_bytes() > 64 * MIB + 32 * MIB);
    assert!(tier1.usage().files_bytes < 64 * MIB + 256 * MIB, "the lead is bounded");
    assert_eq!(backing.trim().expect_err("a writer lives").kind(), std::io::ErrorKind::ResourceBusy);
    drop(writer);
    backing.end_growth();
    backing.trim().expect("trim");
    assert_eq!(tier1.usage().files_bytes, 64 * MIB);
    assert!(read_all(&backing).iter().all(|byte| *byte == 3));
}

/// Making space ready moves a file's time, and a program has set it.
#[test]
fn no_space_is_made_ready_between_a_mark_and_the_next_write() {
    let tier1 = open(512 * MIB, false);
    let marked = tier1.create(Some(64 * MIB)).expect("create");
    let other = tier1.create(Some(200 * MIB)).expect("create");
    let mtime_ns = |backing: &Backing| backing.stat().expect("look").mtime_ns;
    marked.mark_unwritten().expect("mark");
    let shown = || (mtime_ns(&marked), marked.allocated_bytes().expect("look"));
    let before = shown();
    assert_eq!(before.0, super::UNWRITTEN_NS);
    marked.begin_growth();
    other.begin_growth();
    // In steps of 64 MiB; both files are examined in each turn.
    eventually("the other is led to its plan", || other.held_bytes() >= 200 * MIB);
    assert_eq!(shown(), before);
    open_outside(&marked).write_all(b"x").expect("write");
    assert_ne!(mtime_ns(&marked), super::UNWRITTEN_NS);
    eventually("it goes on", || marked.held_bytes() >= 64 * MIB);
    marked.end_growth();
    other.end_growth();
}

/// A memory cgroup of either version with `limit_bytes`, or the reason why there is none.
struct Cgroup {
    path: PathBuf,
    version: u8,
}

impl Cgroup {
    fn make(limit_bytes: u64) -> Result<Self, String> {
        let name = format!("tidemark-test-{}", std::process::id());
        let v1 = PathBuf::from("/sys/fs/cgroup/memory");
        let v2 = PathBuf::from("/sys/fs/cgroup");
        let (path, version, limit) = if v1.join("memory.limit_in_bytes").exists() {
            (v1.join(name), 1, "memory.limit_in_bytes")
        } else {
            let controllers =
                std::fs::read_to_string(v2.join("cgroup.controllers")).map_err(|e| e.to_string())?;
            if !controllers.split_whitespace().any(|controller| controller == "memory") {
                return Err("no memory controller at /sys/fs/cgroup".to_owned());
            }
            std::fs::write(v2.join("cgroup.subtree_control"), "+memory").map_err(|e| e.to_string())?;
            (v2.join(name), 2, "memory.max")
        };
        std::fs::create_dir(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let group = Self { path, version };
        std::fs::write(group.path.join(limit), limit_bytes.to_string()).map_err(|e| e.to_string())?;
        Ok(group)
    }

    fn most_charged_bytes(&self) -> u64 {
        let names: &[&str] = if self.version == 1 {
            &["memory.max_usage_in_bytes"]
        } else {
            &["memory.peak", "memory.current"]
        };
        let read = |name: &&str| std::fs::read_to_string(self.path.join(name)).ok()?.trim().parse().ok();
        names.iter().find_map(read).expect("the group tells its usage")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir(&self.path) {
            eprintln!("{} stays: {error}", self.path.display());
        }
    }
}

#[test]
fn a_writer_in_a_small_memory_cgroup_writes_a_file_larger_than_its_limit() {
    const FILE_MIB: u64 = 2048;
    const LIMIT_MIB: u64 = 512;
    let group = match Cgroup::make(LIMIT_MIB * MIB) {
        Ok(group) => group,
        Err(why) => {
            eprintln!("LEFT OUT, no memory cgroup can be made here: {why}");
            return;
        }
    };
    let tier1 = open((FILE_MIB + 512) * MIB, true);
    eventually("some of the budget is warm", || tier1.usage().ballast_bytes > 128 * MIB);
    let backing = tier1.create(None).expect("create");
    backing.begin_growth();
    let target = backing.host_path();
    let script =
        "echo $$ > \"$0/cgroup.procs\" && exec dd if=/dev/zero of=\"$1\" bs=1M count=\"$2\" conv=notrunc";
    let output = Command::new("sh")
        .args(["-c", script])
        .arg(&group.path)
        .args([&target, &FILE_MIB.to_string()])
        .output()
        .expect("sh and dd");
    backing.end_growth();
    assert!(output.status.success(), "{:?} {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert_eq!(backing.stat().expect("stat").size_bytes, FILE_MIB * MIB);
    let charged = group.most_charged_bytes();
    eprintln!("charged to the writer at most: {} KiB for {FILE_MIB} MiB", charged >> 10);
    // Pages that the writer reaches before the lead are its own. On a busy machine it runs past the lead for as long as the
    // lead's thread waits for a processor: 1 MiB were seen alone, 106 MiB beside other tests.
    assert!(charged <= LIMIT_MIB / 2 * MIB, "{charged} bytes were charged to the writer");
}

#[test]
fn a_small_file_is_not_given_a_lead_it_will_not_use() {
    let tier1 = open(512 * MIB, true);
    eventually("the budget is warm", || tier1.usage().warm_fraction() > 0.95);
    let backing = tier1.create(None).expect("create");
    let mut writer = open_outside(&backing);
    backing.begin_growth();
    writer.write_all(&[4; 4096]).expect("write");
    std::thread::sleep(Duration::from_millis(20));
    assert!(backing.held_bytes() <= 2 * MIB, "{} held for 4 KiB", backing.held_bytes());
    drop(writer);
    backing.end_growth();
}

/// A page that was only allocated is a hole for lseek(2), and the rest of the folio is zeroed on its first writer's time.
#[test]
fn a_large_ready_file_is_zeroed_before_somebody_asks_for_it() {
    const PREDICTED: u64 = 24 * MIB;
    let tier1 = open(512 * MIB, true);
    if !tier1.capabilities().huge.works {
        eprintln!("LEFT OUT: small pages are not zeroed beforehand");
        return;
    }
    eventually("the budget is warm", || tier1.usage().warm_fraction() > 0.95);
    let data_at_the_end = |backing: &Backing| {
        let file = open_outside(backing);
        file.set_len(PREDICTED).expect("grow");
        seek(&file, SeekFrom::Data(PREDICTED - 1)).is_ok()
    };
    let first = tier1.create(Some(PREDICTED)).expect("create");
    assert!(!data_at_the_end(&first), "nobody knew of it");
    eventually("another of that size is ready, and zeroed", || {
        let pool = lock(&tier1.space.pool);
        pool.large.iter().any(|file| file.zeroed_bytes == PREDICTED)
    });
    let second = tier1.create(Some(PREDICTED)).expect("create");
    assert!(data_at_the_end(&second));
    assert_eq!(second.allocated_bytes().expect("look"), PREDICTED, "and not allocated twice");
}

/// Such files come in thousands, each for less time than run-ahead needs to give it a slice.
#[test]
fn a_file_that_is_predicted_to_be_small_is_given_no_more_than_its_stock_holds() {
    let tier1 = open(512 * MIB, true);
    eventually("the budget is warm", || tier1.usage().warm_fraction() > 0.95);
    for (predicted_bytes, ready_bytes) in
        [(0, 4 << 10), (4096, 4 << 10), (4097, 64 << 10), (60_000, 64 << 10)]
    {
        let backing = tier1.create(Some(predicted_bytes)).expect("create");
        let mut writer = open_outside(&backing);
        backing.begin_growth();
        writer.write_all(&[4; 11]).expect("write");
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(backing.allocated_bytes().expect("look"), ready_bytes, "for {predicted_bytes}");
        assert_eq!(backing.held_bytes(), ready_bytes, "for {predicted_bytes}");
        drop(writer);
        backing.end_growth();
    }
    // A file that has outgrown its prediction is led again.
    let backing = tier1.create(Some(10)).expect("create");
    let mut writer = open_outside(&backing);
    backing.begin_growth();
    writer.write_all(&[4; 16 << 10]).expect("write");
    eventually("it has a lead", || backing.held_bytes() >= 256 << 10);
    assert!(backing.held_bytes() < MIB, "{} held for 16 KiB", backing.held_bytes());
    drop(writer);
    backing.end_growth();
}

/// Judged at any moment, not only at rest. A writer leaves holes as it goes, so nothing was made ready for it, beside a ballast that
/// holds the rest of the budget. The writer is about as fast as torch.save: a faster one could get further ahead before the next look
/// than the headroom of so small a budget (note 0002).
#[test]
fn a_writer_we_do_not_hear_of_does_not_pass_the_budget_beside_the_ballast() {
    const SIZE: u64 = 1024 * MIB;
    let tier1 = open(SIZE, true);
    if !tier1.capabilities().private_tmpfs.works {
        eprintln!("LEFT OUT: a shared file system cannot be compared with the budget");
        return;
    }
    eventually("the budget is warm", || tier1.usage().warm_fraction() > 0.95);
    assert!(tier1.usage().ballast_bytes > 512 * MIB, "{:?}", tier1.usage());
    let backing = tier1.create(None).expect("create");
    backing.begin_growth();
    let writer = open_outside(&backing);
    let writing = std::thread::spawn(move || {
        let chunk = vec![6; 256 << 10];
        // From the far end to the start, every second piece: as far from sequential as can be.
        let refused = (0..4096).rev().find_map(|number| {
            std::thread::sleep(Duration::from_micros(50));
            writer.write_all_at(&chunk, number * (512 << 10)).err()
        });
        refused.map(|error| error.kind())
    });
    let mut most = 0;
    let medium = &tier1.space.medium;
    while !writing.is_finished() {
        // Files first: a slice that moves to them meanwhile is seen once or not at all, never twice.
        most = most
            .max(blocks_bytes(&medium.files) + blocks_bytes(&medium.ballast) + tier1.usage().journal_bytes);
    }
    let refused = writing.join().expect("the writer does not panic");
    backing.end_growth();
    assert!(most <= SIZE, "the kernel held {most} bytes of a budget of {SIZE}: {:?}", tier1.usage());
    assert_eq!(refused, Some(std::io::ErrorKind::StorageFull), "the wall of the budget stops the writer");
    eventually("the ballast gave way", || tier1.usage().ballast_bytes == 0);
}

#[derive(Debug, Clone)]
enum Op {
    Create(Option<u64>),
    Write { file: usize, at: u64, len: usize },
    WriteOutside { file: usize, at: u64, len: usize },
    SetLen { file: usize, len: u64 },
    Punch { file: usize, at: u64, len: u64 },
    Trim { file: usize },
    Drop { file: usize },
}

fn op() -> impl Strategy<Value = Op> {
    const AT: u64 = 24 << 20;
    prop_oneof![
        3 => prop::option::of(0..AT).prop_map(Op::Create),
        4 => (0_usize..8, 0..AT, 1_usize..(6 << 20)).prop_map(|(file, at, len)| Op::Write { file, at, len }),
        4 => (0_usize..8, 0..AT, 1_usize..(6 << 20)).prop_map(|(file, at, len)| Op::WriteOutside { file, at, len }),
        2 => (0_usize..8, 0..AT).prop_map(|(file, len)| Op::SetLen { file, len }),
        1 => (0_usize..8, 0..AT, 1..AT).prop_map(|(file, at, len)| Op::Punch { file, at, len }),
        2 => (0_usize..8).prop_map(|file| Op::Trim { file }),
        2 => (0_usize..8).prop_map(|file| Op::Drop { file }),
    ]
}

fn blocks_bytes(directory: impl AsFd) -> u64 {
    let stat = fstatfs(directory).expect("fstatfs");
    (stat.f_blocks - stat.f_bfree) * u64::try_from(stat.f_bsize).expect("positive")
}

/// Returns the bytes that the two file systems hold together, and those that the budget counts. A slice on its way from one to the
/// other may be seen in both; a true excess stays, so the least of several looks is judged.
fn held_by_kernel(tier1: &Tier1) -> u64 {
    let medium = &tier1.space.medium;
    (0..20)
        .map(|look| {
            if look > 0 {
                std::thread::sleep(Duration::from_micros(200));
            }
            blocks_bytes(&medium.files) + blocks_bytes(&medium.ballast)
        })
        .min()
        .expect("twenty looks")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_budget_is_never_passed_by_what_the_kernel_holds(ops in prop::collection::vec(op(), 1..40)) {
        const SIZE: u64 = 64 * MIB;
        let tier1 = open(SIZE, true);
        if !tier1.capabilities().private_tmpfs.works {
            eprintln!("LEFT OUT: a shared file system cannot be compared with the budget");
            return Ok(());
        }
        let bytes = vec![0x5A; 6 << 20];
        let mut files: Vec<Arc<Backing>> = Vec::new();
        for op in ops {
            let pick = |file: usize| files.get(file % files.len().max(1)).cloned();
            match op {
                // Refusals are allowed, going beyond is not.
                Op::Create(predicted) => files.extend(tier1.create(predicted).ok()),
                Op::Write { file, at, len } => {
                    if let Some(file) = pick(file) { let _ = file.write_at(&bytes[..len], at); }
                }
                Op::WriteOutside { file, at, len } => {
                    if let Some(file) = pick(file) {
                        let writer = open_outside(&file);
                        file.begin_growth();
                        let _ = writer.write_at(&bytes[..len], at);
                        drop(writer);
                        file.end_growth();
                    }
                }
                Op::SetLen { file, len } => if let Some(file) = pick(file) { let _ = file.set_len(len); },
                Op::Punch { file, at, len } => if let Some(file) = pick(file) { file.punch(at, len).expect("punch"); },
                Op::Trim { file } => if let Some(file) = pick(file) { file.trim().expect("trim"); },
                Op::Drop { file } => if !files.is_empty() { files.swap_remove(file % files.len()); },
            }
            let usage = tier1.usage();
            let held = held_by_kernel(&tier1);
            prop_assert!(held + usage.journal_bytes <= SIZE, "kernel holds {held}, {usage:?}");
        }
        // Once everything is at rest the count is exact.
        files.clear();
        let begun = Instant::now();
        loop {
            let usage = tier1.usage();
            let counted = usage.files_bytes + usage.lingering_bytes + usage.pool_bytes + usage.ballast_bytes;
            if usage.files_bytes == 0 && counted == held_by_kernel(&tier1) { break; }
            prop_assert!(begun.elapsed() < Duration::from_secs(10), "count and kernel differ: {usage:?}");
        }
    }
}

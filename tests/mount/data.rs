//! Bytes: writing, reading, mapping, truncating and appending them, without requests to the daemon.

use crate::site::{Site, pattern};
use rustix::fs::{FallocateFlags, SeekFrom};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use tidemark_fuse::Opcode;

/// "In passthrough the kernel reads, writes and maps the memory files itself and the daemon is not asked."
#[test]
fn a_save_and_a_load_send_no_read_and_no_write() {
    let Some(site) = Site::passthrough() else { return };
    let before = site.mounted.counters();
    let bytes = pattern(24 << 20, 1);
    for shard in 0..4 {
        let mut file = File::create(site.path(format!("shard-{shard}"))).unwrap();
        for part in bytes.chunks(1 << 20) {
            file.write_all(part).unwrap();
        }
    }
    for shard in 0..4 {
        assert!(fs::read(site.path(format!("shard-{shard}"))).unwrap() == bytes);
    }
    let asked = site.mounted.counters().since(&before);
    assert_eq!((asked.get(Opcode::Read), asked.get(Opcode::Write)), (0, 0), "{asked:?}");
    assert_eq!(asked.get(Opcode::Create), 4, "{asked:?}");
    let opens = asked.get(Opcode::Create) + asked.get(Opcode::Open);
    assert!(asked.get(Opcode::GetXattr) <= opens, "more than one GETXATTR per open: {asked:?}");
}

/// A program waits for each answer, so the threads that answer must run soon, however busy the processors are.
#[test]
fn requests_are_answered_by_threads_that_run_soon() {
    let Some(site) = Site::passthrough() else { return };
    fs::write(site.path("f"), b"bytes").unwrap();
    let usual = slice_ns(0);
    let soon = std::thread::spawn(|| {
        tidemark_tier1::priority::run_soon().unwrap();
        slice_ns(0)
    });
    let soon = soon.join().unwrap();
    // Before Linux 6.12, threads have no slices of their own.
    assert!(soon < usual || usual == 0, "{soon}, usually {usual}");
    let answering: Vec<_> = fs::read_dir("/proc/self/task")
        .unwrap()
        .map(|task| task.unwrap().path())
        .filter(|task| fs::read_to_string(task.join("comm")).unwrap().starts_with("fuser-"))
        .map(|task| slice_ns(task.file_name().unwrap().to_str().unwrap().parse().unwrap()))
        .collect();
    assert!(answering.contains(&soon), "{answering:?}, of which one has answered");
    assert!(answering.iter().all(|found| [soon, usual].contains(found)), "{answering:?}");
}

/// Returns a thread's slice, `sched_runtime` of sched_getattr(2), in nanoseconds; thread 0 is the caller.
fn slice_ns(thread: i32) -> u64 {
    let mut attributes = [0_u64; 6];
    // SAFETY: the call writes at most as many bytes as its size argument says, for which there is room.
    let answer = unsafe {
        libc::syscall(libc::SYS_sched_getattr, thread, attributes.as_mut_ptr(), size_of_val(&attributes), 0)
    };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    attributes[3]
}

/// S-append: "appends of several processes do not overlap".
#[test]
fn appends_of_four_processes_are_all_there() {
    let Some(site) = Site::usual() else { return };
    let path = site.path("log");
    let script = format!("for i in $(seq 200); do echo line >> {}; done", path.display());
    let children: Vec<_> =
        (0..4).map(|_| std::process::Command::new("sh").arg("-c").arg(&script).spawn().unwrap()).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!((text.len(), text.lines().count()), (4000, 800));
}

/// S-trunc: "O_TRUNC ... of a file that is not sealed happen in place". S-truncate: "to a larger size gives zeros".
#[test]
fn truncation_shrinks_grows_and_zeroes() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("f"), pattern(300_000, 1)).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(site.path("f")).unwrap();
    file.set_len(1000).unwrap();
    file.set_len(5_000_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 5_000_000);
    let bytes = fs::read(site.path("f")).unwrap();
    assert!(bytes[..1000] == pattern(1000, 1) && bytes[1000..].iter().all(|&b| b == 0));
    drop(OpenOptions::new().write(true).truncate(true).open(site.path("f")).unwrap());
    assert_eq!(file.metadata().unwrap().len(), 0);
    assert_eq!((&file).read(&mut [0; 10]).unwrap(), 0);
}

/// S-truncate, as safetensors saves: ftruncate to the full size, then write, then rename.
#[test]
fn a_file_grown_first_and_filled_later_is_whole() {
    let Some(site) = Site::usual() else { return };
    let bytes = pattern(9_000_001, 3);
    let file = File::create(site.path("model.tmp")).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    for (i, part) in bytes.chunks(1 << 20).enumerate().rev() {
        file.write_all_at(part, (i as u64) << 20).unwrap();
    }
    fs::rename(site.path("model.tmp"), site.path("model")).unwrap();
    assert!(fs::read(site.path("model")).unwrap() == bytes);
}

/// S-truncate: "fallocate(2) works with mode 0, KEEP_SIZE, PUNCH_HOLE and ZERO_RANGE".
#[test]
fn fallocate_modes_do_what_they_say() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("f"), pattern(100_000, 1)).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(site.path("f")).unwrap();
    let fallocate = |mode, offset, length| rustix::fs::fallocate(&file, mode, offset, length);
    fallocate(FallocateFlags::KEEP_SIZE, 0, 1 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 100_000);
    fallocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 4096, 8192).unwrap();
    fallocate(FallocateFlags::empty(), 0, 200_000).unwrap();
    let bytes = fs::read(site.path("f")).unwrap();
    assert_eq!(bytes.len(), 200_000);
    let expected = pattern(100_000, 1);
    assert!(bytes[..4096] == expected[..4096] && bytes[12288..100_000] == expected[12288..]);
    assert!(bytes[4096..12288].iter().chain(&bytes[100_000..]).all(|&b| b == 0));
    let refused = fallocate(FallocateFlags::COLLAPSE_RANGE, 0, 4096).unwrap_err();
    assert_eq!(refused, rustix::io::Errno::OPNOTSUPP);
}

/// S-truncate: "A length above 64 PiB is EFBIG, and one above all of Tier-1 ENOSPC at once".
#[test]
fn a_length_that_no_tier_holds_is_refused_at_once_and_says_nothing_of_room() {
    for site in Site::both() {
        let file = File::create(site.path("f")).unwrap();
        let set = |bytes: u64| file.set_len(bytes).unwrap_err().raw_os_error();
        let allocate = |bytes| rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).unwrap_err();
        let largest = 64 << 50;
        for bytes in [largest + 1, i64::MAX as u64] {
            assert_eq!(set(bytes), Some(libc::EFBIG), "{bytes}");
            assert_eq!(allocate(bytes), rustix::io::Errno::FBIG, "{bytes}");
        }
        assert_eq!(set(largest), Some(libc::ENOSPC));
        assert_eq!(allocate(largest), rustix::io::Errno::NOSPC);
        let refusals = site.namespace.room().refusals();
        assert_eq!((refusals.count, refusals.last), (0, None));
        assert_eq!(file.metadata().unwrap().len(), 0);
        file.write_all_at(b"written", 0).unwrap();
    }
    let Some(site) = Site::fallback() else { return };
    let file = File::create(site.path("f")).unwrap();
    assert_eq!(file.write_at(b"x", 64 << 50).unwrap_err().raw_os_error(), Some(libc::EFBIG));
}

/// S-mmap: "a mapping *is* the memory file ... outlives the close of its descriptor".
#[test]
fn shared_stores_are_seen_by_reads_and_outlive_the_descriptor() {
    let Some(site) = Site::passthrough() else { return };
    fs::write(site.path("f"), vec![0u8; 1 << 20]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(site.path("f")).unwrap();
    // SAFETY: no program truncates the file while it is mapped.
    let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
    drop(file);
    map[777_777] = 42;
    let mut byte = [0];
    File::open(site.path("f")).unwrap().read_exact_at(&mut byte, 777_777).unwrap();
    assert_eq!(byte, [42]);
    fs::remove_file(site.path("f")).unwrap();
    map[5] = 1;
    assert_eq!((map[5], map[777_777]), (1, 42));
}

/// S-mmap: "MAP_PRIVATE ... work for reading and writing".
#[test]
fn private_stores_stay_private() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("f"), pattern(100_000, 1)).unwrap();
    let file = File::open(site.path("f")).unwrap();
    // SAFETY: no program truncates the file while it is mapped.
    let mut map = unsafe { memmap2::MmapOptions::new().map_copy(&file) }.unwrap();
    assert!(map[..] == pattern(100_000, 1));
    map[50_000] ^= 0xff;
    assert!(fs::read(site.path("f")).unwrap() == pattern(100_000, 1));
}

/// S-seek: "SEEK_DATA and SEEK_HOLE sees a file without holes. copy_file_range(2) and sendfile(2) work".
#[test]
fn seeking_and_copying_in_the_kernel_work() {
    let Some(site) = Site::usual() else { return };
    let bytes = pattern(3_000_000, 9);
    fs::write(site.path("a"), &bytes).unwrap();
    fs::copy(site.path("a"), site.path("b")).unwrap();
    assert!(fs::read(site.path("b")).unwrap() == bytes);
    let mut file = File::open(site.path("b")).unwrap();
    assert_eq!(file.seek(std::io::SeekFrom::End(-1)).unwrap(), 2_999_999);
    assert_eq!(rustix::fs::seek(&file, SeekFrom::Hole(0)).unwrap(), 3_000_000);
    assert_eq!(rustix::fs::seek(&file, SeekFrom::Data(100)).unwrap(), 100);
}

/// S-fsync: "fsync(2) ... of a file ...; of a directory likewise". S-direct: "O_DIRECT is accepted".
#[test]
fn fsync_of_files_and_directories_succeeds() {
    let Some(site) = Site::usual() else { return };
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_DIRECT)
        .open(site.path("f"))
        .unwrap();
    let before = site.mounted.counters();
    file.write_all(&pattern(8192, 0)).unwrap();
    file.sync_all().unwrap();
    file.sync_data().unwrap();
    File::open(site.path("")).unwrap().sync_all().unwrap();
    let asked = site.mounted.counters().since(&before);
    assert_eq!((asked.get(Opcode::FSync), asked.get(Opcode::FSyncDir)), (2, 1));
    assert_eq!(file.metadata().unwrap().size(), 8192);
    let mut bytes = Vec::new();
    File::open(site.path("f")).unwrap().read_to_end(&mut bytes).unwrap();
    assert!(bytes == pattern(8192, 0));
}

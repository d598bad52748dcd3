//! FALLBACK: the same promises if every read and write comes to the daemon.

use crate::direct::write_with_libaio;
use crate::site::{Site, kernel, pattern};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use tidemark_fuse::Opcode;
use tidemark_namespace::FileState;

#[test]
fn fallback_serves_every_byte_itself() {
    let Some(site) = Site::fallback() else { return };
    let bytes = pattern(20_000_003, 1);
    let mut file = File::create(site.path("f")).unwrap();
    for part in bytes.chunks(3_000_000) {
        file.write_all(part).unwrap();
    }
    drop(file);
    assert_eq!(site.state_after_close("f"), FileState::Closed);
    assert!(fs::read(site.path("f")).unwrap() == bytes);
    let asked = site.mounted.counters();
    assert!(asked.get(Opcode::Write) >= 20 && asked.get(Opcode::Read) >= 20, "{asked:?}");
}

/// S-read: "A read that starts after a write was acknowledged sees it". S-write: "Writes to one file are done one after the
/// other."
#[test]
fn fallback_reads_and_sizes_follow_every_acknowledged_write() {
    let Some(site) = Site::fallback() else { return };
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(site.path("f")).unwrap();
    let reader = File::open(site.path("f")).unwrap();
    for round in 0..200u8 {
        let bytes = pattern(1 << 20, round);
        // Half of the bytes overlap the previous round's.
        let offset = u64::from(round) << 19;
        file.write_all_at(&bytes, offset).unwrap();
        assert_eq!(fs::metadata(site.path("f")).unwrap().len(), offset + (1 << 20));
        let mut seen = vec![0; 1 << 20];
        reader.read_exact_at(&mut seen, offset).unwrap();
        assert!(seen == bytes, "round {round}");
    }
}

#[test]
fn fallback_writes_in_random_order_end_as_the_last_said() {
    let Some(site) = Site::fallback() else { return };
    let mut model = vec![0u8; 4 << 20];
    let file = File::create(site.path("f")).unwrap();
    let mut random = 12345u64;
    for round in 0..300u32 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let offset = usize::try_from(random >> 33).unwrap() % (3 << 20);
        let length = 1 + usize::try_from(random >> 40).unwrap() % (1 << 20);
        let bytes = pattern(length, round.to_le_bytes()[0]);
        file.write_all_at(&bytes, offset as u64).unwrap();
        model[offset..offset + length].copy_from_slice(&bytes);
    }
    let seen = fs::read(site.path("f")).unwrap();
    assert!(seen[..] == model[..seen.len()] && model[seen.len()..].iter().all(|&b| b == 0));
}

/// S-mmap: "In FALLBACK a shared mapping goes through the page cache"; "on kernels before 6.6 only files opened for
/// reading can be mapped shared".
#[test]
fn fallback_maps_shared_and_private() {
    let Some(site) = Site::fallback() else { return };
    fs::write(site.path("f"), pattern(1 << 20, 1)).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(site.path("f")).unwrap();
    if kernel() < (6, 6) {
        // SAFETY: the kernel refuses the mapping.
        let refused = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENODEV));
        let reader = File::open(site.path("f")).unwrap();
        // SAFETY: no program truncates the file while it is mapped.
        let shared = unsafe { memmap2::Mmap::map(&reader) }.unwrap();
        assert!(shared[..] == pattern(1 << 20, 1));
        // S-read: a mapping is a reader too.
        file.write_all_at(&pattern(1 << 20, 2), 0).unwrap();
        assert!(shared[..] == pattern(1 << 20, 2));
        return;
    }
    // SAFETY: no program truncates the file while it is mapped.
    let mut shared = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
    assert!(shared[..] == pattern(1 << 20, 1));
    shared[4097] = 99;
    shared.flush().unwrap();
    let mut byte = [0];
    File::open(site.path("f")).unwrap().read_exact_at(&mut byte, 4097).unwrap();
    assert_eq!(byte, [99]);
    let reader = File::open(site.path("f")).unwrap();
    // SAFETY: as above.
    let mut private = unsafe { memmap2::MmapOptions::new().map_copy(&reader) }.unwrap();
    private[4097] = 1;
    reader.read_exact_at(&mut byte, 4097).unwrap();
    assert_eq!(byte, [99]);
}

#[test]
fn fallback_overwrites_sealed_files_like_passthrough() {
    let Some(site) = Site::fallback() else { return };
    let old = pattern(3_000_000, 1);
    fs::write(site.path("ckpt"), &old).unwrap();
    site.seal("ckpt");
    let mut reader = File::open(site.path("ckpt")).unwrap();
    fs::write(site.path("ckpt"), b"new").unwrap();
    assert_eq!(fs::read(site.path("ckpt")).unwrap(), b"new");
    let mut bytes = Vec::new();
    reader.seek(SeekFrom::Start(0)).unwrap();
    reader.read_to_end(&mut bytes).unwrap();
    assert!(bytes == old);
}

#[test]
fn fallback_truncates_appends_and_takes_libaio() {
    let Some(site) = Site::fallback() else { return };
    fs::write(site.path("f"), pattern(500_000, 1)).unwrap();
    let mut file = OpenOptions::new().append(true).open(site.path("f")).unwrap();
    file.set_len(200_000).unwrap();
    file.write_all(&pattern(300_000, 2)).unwrap();
    file.sync_all().unwrap();
    let bytes = fs::read(site.path("f")).unwrap();
    assert!(bytes[..200_000] == pattern(500_000, 1)[..200_000] && bytes[200_000..] == pattern(300_000, 2));
    write_with_libaio(&site);
}

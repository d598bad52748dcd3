//! Parts written past the page cache, and compared with what the device gives back.
//!
//! Owns: aligned writes and reads of one staged file. Does not own: when the file is durable and named (`files`).
//!
//! A file system refuses no damaged part, so each part is read again. Through the page cache that would compare our
//! bytes with themselves; O_DIRECT asks the device, and needs neither a second pass once everything is written nor
//! the memory of a cache that nobody reads.

use rustix::fs::{Mode, OFlags, open};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What O_DIRECT wants of offsets, lengths and addresses: the largest logical block of today's devices.
const ALIGNMENT_BYTES: usize = 4096;

/// Read back at a time, by each of the parts in flight. Larger ones were no faster, and memory is bounded.
const SCRATCH_BYTES: usize = 1 << 20;

/// How often a part that reads back wrong is written: a bit that flipped on its way is right the second time.
const WRITES_MAX: u32 = 2;

/// A second descriptor of a staged file.
#[derive(Debug)]
pub(super) struct Direct {
    file: File,
}

impl Direct {
    /// None where the file system takes no O_DIRECT.
    pub(super) fn open(path: &Path) -> io::Result<Option<Self>> {
        match open(path, OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()) {
            Ok(fd) => Ok(Some(Self { file: fd.into() })),
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes `bytes` and compares them with what is there then; `plain` takes the tail that is no whole block.
    ///
    /// # Errors
    /// The device's own; one that says so when it gives back other bytes than it was given.
    pub(super) fn write_checked(&self, plain: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let aligned = bytes.as_ptr().align_offset(ALIGNMENT_BYTES) == 0
            && offset.is_multiple_of(ALIGNMENT_BYTES as u64);
        let whole = if aligned { bytes.len() / ALIGNMENT_BYTES * ALIGNMENT_BYTES } else { 0 };
        let (body, tail) = bytes.split_at(whole);
        let tail_at = offset + whole as u64;
        let mut writes = 0;
        loop {
            writes += 1;
            self.file.write_all_at(body, offset)?;
            plain.write_all_at(tail, tail_at)?;
            let body_differs = first_difference(&self.file, body, offset)?;
            let differs = match body_differs {
                Some(at) => Some(at),
                None => first_difference(plain, tail, tail_at)?,
            };
            match differs {
                None => return Ok(()),
                Some(at) if writes == WRITES_MAX => return Err(differs_at(at)),
                Some(at) => {
                    tracing::warn!(at, "a part reads back other bytes than were written; written again")
                }
            }
        }
    }

    /// Whether a difference between what was written and what is there is found: what the probe asks.
    pub(super) fn finds_damage(&self, plain: &File) -> io::Result<bool> {
        let mut buffer = Aligned::new(ALIGNMENT_BYTES);
        let bytes = buffer.bytes(ALIGNMENT_BYTES);
        bytes.fill(0x5a);
        self.write_checked(plain, bytes, 0)?;
        bytes[17] ^= 1;
        Ok(first_difference(&self.file, bytes, 0)? == Some(17))
    }
}

pub(super) fn differs_at(at: u64) -> io::Error {
    io::Error::other(format!(
        "the device gives back other bytes than were written, first at offset {at}, {WRITES_MAX} times; check its \
         health"
    ))
}

/// The offset in the file of the first byte that is not as in `bytes`, which begin at `offset`.
pub(super) fn first_difference(file: &File, bytes: &[u8], offset: u64) -> io::Result<Option<u64>> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let mut buffer = Aligned::new(SCRATCH_BYTES.min(bytes.len().next_multiple_of(ALIGNMENT_BYTES)));
    let mut at = offset;
    for piece in bytes.chunks(SCRATCH_BYTES) {
        let found = buffer.bytes(piece.len());
        file.read_exact_at(found, at)?;
        if found != piece {
            let same = found.iter().zip(piece).take_while(|(found, wrote)| found == wrote).count();
            return Ok(Some(at + same as u64));
        }
        at += piece.len() as u64;
    }
    Ok(None)
}

/// A buffer whose bytes begin at a block's boundary.
struct Aligned {
    memory: Vec<u8>,
    skip: usize,
}

impl Aligned {
    fn new(len: usize) -> Self {
        let memory = vec![0; len + ALIGNMENT_BYTES];
        let skip = memory.as_ptr().align_offset(ALIGNMENT_BYTES);
        Self { memory, skip }
    }

    /// The first `len` bytes; `len` is at most what it was made for.
    fn bytes(&mut self, len: usize) -> &mut [u8] {
        &mut self.memory[self.skip..self.skip + len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In the build's own folder: the system's temporary directory may be a tmpfs.
    fn staged() -> (tempfile::TempDir, File, Option<Direct>) {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory on disk");
        let path = dir.path().join("staged");
        let plain = File::options().read(true).write(true).create_new(true).open(&path).expect("create");
        let direct = Direct::open(&path).expect("open");
        (dir, plain, direct)
    }

    #[test]
    fn parts_with_and_without_a_tail_arrive_and_damage_is_found() {
        let (_dir, plain, direct) = staged();
        let Some(direct) = direct else { return };
        let mut memory = Aligned::new(3 << 20);
        for len in [0, 1, 4096, 4097, (2 << 20) + 5] {
            let bytes = memory.bytes(len);
            bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = u8::try_from(i * 7 % 251).unwrap());
            plain.set_len(len as u64).expect("set_len");
            direct.write_checked(&plain, bytes, 0).expect("write");
            let mut found = vec![0; len];
            plain.read_exact_at(&mut found, 0).expect("read");
            assert!(found == bytes, "{len} bytes");
        }
        assert!(direct.finds_damage(&plain).expect("probe"));
    }

    #[test]
    fn the_first_other_byte_is_named() {
        let (_dir, plain, direct) = staged();
        let Some(direct) = direct else { return };
        let mut memory = Aligned::new(2 << 20);
        direct.write_checked(&plain, memory.bytes(2 << 20), 0).expect("write");
        memory.bytes(2 << 20)[(1 << 20) + 3] = 1;
        let found = first_difference(&direct.file, memory.bytes(2 << 20), 0).expect("read");
        assert_eq!(found, Some((1 << 20) + 3));
        assert!(differs_at(9).to_string().contains("offset 9"));
    }
}

//! Moving bytes of the process into a file, by several threads, with their checksum.
//!
//! Owns: the blocks, the threads, the memory that Python names. Does not own: what the bytes are, and where in the file they belong.
//!
//! A block is read twice, by the checksum and by what brings it into the file: the second time from the processor's cache.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crc32fast::Hasher;
use rustix::io::Errno;

use crate::mapping::Mapping;

/// A block, with its checksum, stays in a processor's second-level cache.
pub(crate) const BLOCK_BYTES: usize = 1 << 20;
/// Bytes that are stored into a mapping at once.
const PART_BYTES: usize = 128 << 10;
/// Less is not worth a mapping.
pub(crate) const MAPPED_BYTES: u64 = 16 << 20;
/// How often the calling thread looks for signals.
const SIGNALS_EVERY: Duration = Duration::from_millis(20);

/// Bytes of this process that whoever gave them keeps alive and in their place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    address: usize,
    len: usize,
}

impl Memory {
    /// Names `len` bytes at `address`.
    pub(crate) fn new(address: usize, len: usize) -> Result<Self, String> {
        let fits = isize::try_from(len).is_ok() && address.checked_add(len).is_some();
        if (address == 0 && len > 0) || !fits {
            return Err(format!("{len} bytes at address {address:#x} are no memory of this process"));
        }
        Ok(Self { address, len })
    }

    /// The bytes, for one short use.
    pub(crate) fn bytes<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the Python half passes the address and length of a storage that it holds a reference to until the call returns. A
        // program that changes a tensor while it is saved races with this read as with torch's own, and gets some mixture of the bytes.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.len) }
    }
}

/// A descriptor that the caller keeps open while it is used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct File(RawFd);

impl File {
    pub(crate) fn new(fd: RawFd) -> Result<Self, String> {
        if fd < 0 { Err(format!("{fd} is no file descriptor")) } else { Ok(Self(fd)) }
    }

    pub(crate) fn fd<'a>(self) -> BorrowedFd<'a> {
        // SAFETY: not -1, as `new` has checked; the Python half closes it after the call only.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }

    /// Writes all bytes.
    pub(crate) fn write(self, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            match rustix::io::pwrite(self.fd(), bytes, offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => (bytes, offset) = (&bytes[count..], offset + count as u64),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// A piece of memory and its place in the file.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) memory: Memory,
    pub(crate) offset: u64,
    /// The checksum, and above it a bit that says that it is known and the bytes are in the file.
    done: AtomicU64,
}

const DONE: u64 = 1 << 32;

impl Block {
    /// Cuts `memory`, which begins at `offset` of the file, into blocks.
    pub(crate) fn all(memory: Memory, offset: u64) -> impl Iterator<Item = Self> {
        (0..memory.len).step_by(BLOCK_BYTES).map(move |at| {
            let len = BLOCK_BYTES.min(memory.len - at);
            let memory = Memory { address: memory.address + at, len };
            Self { memory, offset: offset + at as u64, done: AtomicU64::new(0) }
        })
    }

    fn copy(&self, file: File, mapping: Option<&Mapping>) -> io::Result<()> {
        let bytes = self.memory.bytes();
        let mut crc = Hasher::new();
        // Pages that cannot be had are write(2)'s to explain.
        let mapping = mapping.filter(|mapping| mapping.populate(self.offset, bytes.len()).is_ok());
        let mut offset = self.offset;
        for part in bytes.chunks(if mapping.is_some() { PART_BYTES } else { BLOCK_BYTES }) {
            crc.update(part);
            match mapping {
                Some(mapping) => mapping.store(part, offset)?,
                None => file.write(part, offset)?,
            }
            offset += part.len() as u64;
        }
        self.done.store(DONE | u64::from(crc.finalize()), Ordering::Release);
        Ok(())
    }

    /// Adds the checksum to that of what stands before; false when the block has not been copied.
    #[expect(clippy::cast_possible_truncation, reason = "the lower half is the checksum")]
    pub(crate) fn append_to(&self, before: &mut Hasher) -> bool {
        let done = self.done.load(Ordering::Acquire);
        if done & DONE != 0 {
            before.combine(&Hasher::new_with_initial_len(done as u32, self.memory.len as u64));
        }
        done & DONE != 0
    }
}

/// Why a copy ended early.
#[derive(Debug)]
pub(crate) enum Stop<E> {
    /// A block could not be written.
    Io(io::Error),
    /// The caller's check said so.
    Interrupted(E),
}

/// Maps the part of the file from the first block to the end of the last; `None` where it is small or cannot be mapped.
pub(crate) fn mapping_of(file: File, blocks: &[Block]) -> Option<Mapping> {
    let (first, last) = (blocks.first()?, blocks.last()?);
    mapping_between(file, first.offset, last.offset + last.memory.len as u64)
}

/// Maps the part of the file between two offsets; `None` where it is small or cannot be mapped.
pub(crate) fn mapping_between(file: File, from: u64, to: u64) -> Option<Mapping> {
    let len = to.checked_sub(from).filter(|len| *len >= MAPPED_BYTES)?;
    Mapping::new(file, from, usize::try_from(len).ok()?).ok()
}

/// Copies all blocks with up to `threads` threads: through a mapping that holds their places, where there is one.
pub(crate) fn copy<E>(
    file: File,
    blocks: &[Block],
    threads: usize,
    mapping: Option<&Mapping>,
    mut check: impl FnMut() -> Result<(), E>,
) -> Result<(), Stop<E>> {
    if let Some(mapping) = mapping.filter(|mapping| !mapping.lost()) {
        copy_through(file, Some(mapping), blocks, threads, &mut check)?;
        if !mapping.lost() {
            return Ok(());
        }
    }
    copy_through(file, None, blocks, threads, &mut check)
}

/// Copies all blocks with up to `threads` threads, of which the calling one is the first. Calls `check` now and then.
fn copy_through<E>(
    file: File,
    mapping: Option<&Mapping>,
    blocks: &[Block],
    threads: usize,
    mut check: impl FnMut() -> Result<(), E>,
) -> Result<(), Stop<E>> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let failed: Mutex<Option<io::Error>> = Mutex::new(None);
    let step = || {
        if stop.load(Ordering::Relaxed) || mapping.is_some_and(Mapping::lost) {
            return false;
        }
        let Some(block) = blocks.get(next.fetch_add(1, Ordering::Relaxed)) else { return false };
        if let Err(error) = block.copy(file, mapping) {
            stop.store(true, Ordering::Relaxed);
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
        true
    };
    let interrupted = std::thread::scope(|scope| {
        for _ in 1..threads.min(blocks.len()) {
            // A thread that cannot be had leaves its work to the others.
            drop(
                std::thread::Builder::new()
                    .name("tidemark-copy".into())
                    .spawn_scoped(scope, || while step() {}),
            );
        }
        let mut checked = Instant::now();
        while step() {
            if checked.elapsed() >= SIGNALS_EVERY {
                if let Err(why) = check() {
                    stop.store(true, Ordering::Relaxed);
                    return Some(why);
                }
                checked = Instant::now();
            }
        }
        None
    });
    match (interrupted, failed.into_inner().unwrap_or_else(PoisonError::into_inner)) {
        (Some(why), _) => Err(Stop::Interrupted(why)),
        (None, Some(error)) => Err(Stop::Io(error)),
        (None, None) => Ok(()),
    }
}

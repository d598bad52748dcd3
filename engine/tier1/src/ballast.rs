//! The ballast: memory of the budget that no file uses, kept allocated and touched so that it stays ours.
//!
//! A virtual machine hands freed pages back to its host, and a save then pays for each of them again. Free memory is
//! therefore held in files on a tmpfs of its own, in 2 MiB folios. Such memory moves to a backing file slice by slice: punch
//! here, allocate there, on one CPU, whose free list hands the same folio out again.
//!
//! Owns: those files. Does not own: the sum (`budget`), when to fill and when to free (`worker`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, SeekFrom, fallocate, openat, seek, unlinkat};
use rustix::io::pwrite;

use super::lock;

/// Size of a folio of the largest kind, which moves as a whole. Smaller pieces would be split and lose their warmth.
pub(super) const SLICE_BYTES: u64 = 2 << 20;

/// Slices in one ballast file: one bit each of a word, and few enough descriptors for a large Tier-1.
const SLICES_PER_FILE: u32 = 64;

/// A stack of files; slices are taken from the last. A file is empty only while a slice of it is being made.
#[derive(Debug)]
pub(super) struct Ballast {
    directory: OwnedFd,
    files: Mutex<Vec<BallastFile>>,
    next_number: AtomicU64,
}

/// A file of the ballast. The name is `b-<number>`, so that a restarted daemon finds it and nothing goes cold.
#[derive(Debug)]
struct BallastFile {
    number: u64,
    file: Arc<OwnedFd>,
    /// A bit for each slice that can be taken.
    filled: u64,
    /// A bit for each slice that is being made.
    making: u64,
}

/// A slice that is being made: it cannot be taken yet, but all others can. Ends with [`Ballast::add`].
#[derive(Debug)]
pub(super) struct NewSlice {
    file: Arc<OwnedFd>,
    index: u32,
}

impl Ballast {
    /// Makes an empty ballast in `directory`.
    pub(super) fn new(directory: OwnedFd) -> Self {
        Self { directory, files: Mutex::default(), next_number: AtomicU64::new(1) }
    }

    /// Recovers the files that an earlier daemon left, by their numbers, and returns how many slices can be taken.
    /// Slices that were never touched are freed.
    pub(super) fn adopt(&self, numbers: Vec<u64>) -> io::Result<u64> {
        let mut slices = 0;
        let mut files = lock(&self.files);
        for number in numbers {
            self.next_number.fetch_max(number + 1, Ordering::Relaxed);
            let flags = OFlags::RDWR | OFlags::CLOEXEC;
            let file = openat(&self.directory, file_name(number), flags, Mode::empty())?;
            let filled = free_untouched(&file)?;
            if filled == 0 {
                self.unlink(number);
                continue;
            }
            slices += u64::from(filled.count_ones());
            files.push(BallastFile { number, file: Arc::new(file), filled, making: 0 });
        }
        Ok(slices)
    }

    fn unlink(&self, number: u64) {
        if let Err(error) = unlinkat(&self.directory, file_name(number), AtFlags::empty()) {
            tracing::warn!(number, %error, "a ballast file's name could not be removed");
        }
    }

    /// Allocates one more slice, which the caller has taken from the budget.
    pub(super) fn begin(&self) -> io::Result<NewSlice> {
        let slice = {
            let mut files = lock(&self.files);
            let full = files.last().is_none_or(|last| last.filled | last.making == u64::MAX);
            if full {
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let number = self.next_number.fetch_add(1, Ordering::Relaxed);
                let mode = Mode::RUSR | Mode::WUSR;
                let file = Arc::new(openat(&self.directory, file_name(number), flags, mode)?);
                files.push(BallastFile { number, file, filled: 0, making: 0 });
            }
            let last = files.last_mut().expect("one was just added");
            let index = (last.filled | last.making).trailing_ones();
            debug_assert!(index < SLICES_PER_FILE, "a full file was passed over");
            last.making |= 1 << index;
            NewSlice { file: Arc::clone(&last.file), index }
        };
        match fallocate(&slice.file, FallocateFlags::KEEP_SIZE, slice.at(), SLICE_BYTES) {
            Ok(()) => Ok(slice),
            Err(error) => {
                self.end(&slice, false);
                Err(error.into())
            }
        }
    }

    /// Makes the slice available.
    pub(super) fn add(&self, slice: &NewSlice) {
        self.end(slice, true);
    }

    fn end(&self, slice: &NewSlice, filled: bool) {
        let mut files = lock(&self.files);
        let found = files.iter_mut().rev().find(|file| Arc::ptr_eq(&file.file, &slice.file));
        let file = found.expect("a file stays while a slice of it is being made");
        file.making &= !(1 << slice.index);
        file.filled |= u64::from(filled) << slice.index;
    }

    /// Frees one slice on this CPU; false if there is none. The caller settles the budget.
    pub(super) fn pop_slice(&self) -> bool {
        let mut files = lock(&self.files);
        // An empty file with a slice in the making may lie above files that hold some.
        let Some(at) = files.iter().rposition(|file| file.filled != 0) else { return false };
        let file = &mut files[at];
        let index = file.filled.ilog2();
        let punch = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE;
        if let Err(error) = fallocate(&file.file, punch, u64::from(index) * SLICE_BYTES, SLICE_BYTES) {
            tracing::error!(%error, "a slice of the ballast could not be freed");
            return false;
        }
        file.filled &= !(1 << index);
        if file.filled | file.making == 0 {
            self.unlink(files.remove(at).number);
        }
        true
    }
}

/// Frees the slices of a file that were never touched, and returns a bit for each of the others.
fn free_untouched(file: &OwnedFd) -> io::Result<u64> {
    // Nearly all files are whole: one call instead of one a slice, of which a terabyte has half a million. If folios
    // are small, the call would check each of them, and costs more.
    let large = rustix::fs::fstat(file)?.st_blksize.cast_unsigned() >= SLICE_BYTES;
    if large
        && seek(file, SeekFrom::Hole(0)).is_ok_and(|hole| hole >= u64::from(SLICES_PER_FILE) * SLICE_BYTES)
    {
        return Ok(u64::MAX);
    }
    let mut filled = 0_u64;
    for index in 0..SLICES_PER_FILE {
        let at = u64::from(index) * SLICE_BYTES;
        let touched = seek(file, SeekFrom::Data(at)).is_ok_and(|data| data == at);
        if touched {
            filled |= 1 << index;
        } else {
            fallocate(file, FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE, at, SLICE_BYTES)?;
        }
    }
    Ok(filled)
}

fn file_name(number: u64) -> String {
    format!("b-{number}")
}

impl NewSlice {
    fn at(&self) -> u64 {
        u64::from(self.index) * SLICE_BYTES
    }

    /// Writes the slice, so that the host gives it real memory.
    pub(super) fn touch(&self, zeros: &[u8]) -> io::Result<()> {
        let mut at = self.at();
        let mut left = zeros;
        while !left.is_empty() {
            let written = pwrite(&self.file, left, at)?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            at += written as u64;
            left = &left[written..];
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{Mode, OFlags, fstat, open};

    use super::{Ballast, SLICE_BYTES};

    #[test]
    fn every_slice_but_the_one_in_the_making_can_be_taken() {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = tempfile::tempdir_in("/dev/shm").expect("a tmpfs");
        let directory = open(folder.path(), flags, Mode::empty()).expect("a tmpfs");
        let ballast = Ballast::new(directory);
        let first = ballast.begin().expect("allocate");
        assert!(!ballast.pop_slice(), "not made yet");
        ballast.add(&first);
        let second = ballast.begin().expect("allocate");
        assert!(ballast.pop_slice(), "made, and below the one in the making");
        assert!(!ballast.pop_slice());
        let third = ballast.begin().expect("allocate");
        assert_ne!(third.index, second.index, "a slice in the making keeps its place");
        ballast.add(&second);
        ballast.add(&third);
        let file = std::sync::Arc::clone(&third.file);
        assert_eq!(fstat(&file).expect("stat").st_blocks.cast_unsigned() * 512, 2 * SLICE_BYTES);
        assert!(ballast.pop_slice() && ballast.pop_slice() && !ballast.pop_slice());
        assert_eq!(fstat(&file).expect("stat").st_blocks, 0, "all was freed");
    }
}

//! A backing file as the rest of the engine uses it: the daemon's operations on it, wherever it lies.
//!
//! Owns: the place of the file, and the test whether it is at rest. Does not own: its space and growth (`file`, `spill`), times and
//! modes as users see them (the namespace).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Weak};

use rustix::fs::{FallocateFlags, Stat, Timespec, Timestamps, UTIME_OMIT, fstat};

use super::file::File;
use super::mapping::Mapping;
use super::space::PAGE_BYTES;
use super::spill::SpillFile;
use super::{Tier1Error, lease};

/// A file of Tier-1, shared by `Arc`. When the last holder (handles, mappings of ours) is gone, the file is unlinked and its pages go back
/// to the ballast. While another process has it open or mapped, they stay counted until that ends.
///
/// A `Backing` holds no descriptor while no writer has it open: each call that needs one opens it by its number. A process that may have
/// 20,000 files open can therefore hold 100,000 of these (`engine/design/0008-small-files.md`).
#[derive(Debug)]
pub struct Backing {
    place: Place,
}

/// The mtime of a backing file that was not written since [`Backing::mark_unwritten`]. No clock stamps a write with the first nanosecond
/// of 1970.
pub const UNWRITTEN_NS: i64 = 1;

/// Whether a file was not written since [`Backing::mark_unwritten`].
pub(super) fn is_unwritten(stat: &Stat) -> bool {
    stat.st_mtime == 0 && stat.st_mtime_nsec == UNWRITTEN_NS.cast_unsigned()
}

/// Returns the times that utimensat(2) sets for that.
pub(super) fn unwritten() -> Timestamps {
    let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    Timestamps { last_access, last_modification: Timespec { tv_sec: 0, tv_nsec: UNWRITTEN_NS } }
}

/// The place of a file, from its creation to its end.
#[derive(Debug)]
enum Place {
    Memory(Arc<File>),
    Spill(Arc<SpillFile>),
}

/// Size, times and space as the file system reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackingStat {
    pub size_bytes: u64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
    /// In units of 512 bytes; space made ready beyond the end is not included.
    pub blocks_512: u64,
}

impl Backing {
    pub(super) fn new(file: Arc<File>) -> Self {
        Self { place: Place::Memory(file) }
    }

    pub(super) fn spilled(file: Arc<SpillFile>) -> Self {
        Self { place: Place::Spill(file) }
    }

    /// Whether the file lies in the spill and not in memory.
    #[must_use]
    pub fn is_spilled(&self) -> bool {
        matches!(self.place, Place::Spill(_))
    }

    /// Returns a token that lives until a file in memory has been dropped and the budget knows; none if the file is in the spill. A
    /// `Weak` of the `Backing` is dead before that, when the drop begins.
    #[must_use]
    pub fn counted(&self) -> Option<Weak<()>> {
        match &self.place {
            Place::Memory(file) => Some(Arc::downgrade(&file.counted)),
            Place::Spill(_) => None,
        }
    }

    fn look(&self) -> io::Result<Stat> {
        match &self.place {
            Place::Memory(file) => file.look(),
            Place::Spill(file) => file.look(),
        }
    }

    /// Returns a number that is unique in this Tier-1 and never used again. The file's name is `f-<number>`.
    #[must_use]
    pub fn number(&self) -> u64 {
        match &self.place {
            Place::Memory(file) => file.number,
            Place::Spill(file) => file.number(),
        }
    }

    /// Opens a new O_RDONLY descriptor, for FUSE's registration. Close it soon: if it outlives the `Backing`, the bytes stay counted as
    /// lingering.
    pub fn read_fd(&self) -> io::Result<OwnedFd> {
        match &self.place {
            Place::Memory(file) => file.read_fd(),
            Place::Spill(file) => file.read_fd(),
        }
    }

    /// Returns the path by which this machine's root can open the file without the mount, while this process lives and has the file.
    #[must_use]
    pub fn host_path(&self) -> String {
        match &self.place {
            Place::Memory(file) => file.space.host_path(file.number),
            Place::Spill(file) => file.host_path(),
        }
    }

    /// Returns how many bytes the file system has allocated for the file, including space made ready beyond its end.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.look()?.st_blocks.cast_unsigned() * 512)
    }

    /// Stats the file once, by its name.
    pub fn stat(&self) -> io::Result<BackingStat> {
        let stat = self.look()?;
        let size_bytes = stat.st_size.cast_unsigned();
        let time_ns = |seconds: i64, nanoseconds: u64| {
            seconds.saturating_mul(1_000_000_000).saturating_add_unsigned(nanoseconds)
        };
        Ok(BackingStat {
            size_bytes,
            mtime_ns: time_ns(stat.st_mtime, stat.st_mtime_nsec),
            ctime_ns: time_ns(stat.st_ctime, stat.st_ctime_nsec),
            blocks_512: stat.st_blocks.cast_unsigned().min(size_bytes.next_multiple_of(PAGE_BYTES) / 512),
        })
    }

    /// Sets an mtime that no write sets, so that the next write is noticed even within one tick of the kernel's clock. Until that write
    /// no space is made ready ahead of writers, because that would move the time. Waits for space that is being made ready now.
    ///
    /// # Errors
    /// The errors of utimensat(2).
    pub fn mark_unwritten(&self) -> io::Result<()> {
        match &self.place {
            Place::Memory(file) => file.mark_unwritten(),
            Place::Spill(file) => file.mark_unwritten(),
        }
    }

    /// Reads up to `buffer.len()` bytes; 0 at the end of the file. Opens a descriptor for the call.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(rustix::io::pread(self.read_fd()?, buffer, offset)?)
    }

    /// Fills `buffer`, with one descriptor for all of it.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file ends before.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        std::fs::File::from(self.read_fd()?).read_exact_at(buffer, offset)
    }

    /// Writes up to `bytes.len()` bytes, after making space ready. Opens a descriptor for the call unless [`Self::begin_growth`] is in
    /// force.
    ///
    /// # Errors
    /// `StorageFull` if the budget has no room.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        match &self.place {
            Place::Memory(file) => file.write_at(bytes, offset),
            Place::Spill(file) => file.write_at(bytes, offset),
        }
    }

    /// Sets the size. Growth is admitted, and made ready in the background; shrinking frees pages at once. The present size changes
    /// nothing, so O_TRUNC of a new file keeps its ready space.
    pub fn set_len(&self, bytes: u64) -> Result<(), Tier1Error> {
        match &self.place {
            Place::Memory(file) => file.set_len(bytes),
            Place::Spill(file) => file.set_len(bytes),
        }
    }

    /// Promises, as a prediction does, that the file may reach `bytes`.
    ///
    /// # Errors
    /// [`Tier1Error::NoSpace`] if that is not available; then nothing is promised.
    pub fn reserve(&self, bytes: u64) -> Result<(), Tier1Error> {
        match &self.place {
            Place::Memory(file) => file.plan(bytes),
            Place::Spill(file) => file.plan(bytes),
        }
    }

    /// Performs `fallocate(2)` with no flag, `KEEP_SIZE`, `PUNCH_HOLE | KEEP_SIZE` or `ZERO_RANGE` (with or without `KEEP_SIZE`).
    pub fn allocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> Result<(), Tier1Error> {
        match &self.place {
            Place::Memory(file) => file.allocate(mode, offset, len),
            Place::Spill(file) => file.allocate(mode, offset, len),
        }
    }

    /// Frees `offset..offset + len`, which then reads as zeros; the size stays.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), Tier1Error> {
        self.allocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
    }

    /// Maps exactly the present size, read-only. See [`Mapping`] for the one hazard. Holes are filled first: reading one through a
    /// mapping takes a page, and if the budget has none left, that is SIGBUS.
    ///
    /// # Errors
    /// `StorageFull` if the budget has no room for the holes.
    pub fn map(&self) -> io::Result<Mapping> {
        let fd = self.read_fd()?;
        let stat = fstat(&fd)?;
        let size_bytes = stat.st_size.cast_unsigned();
        let sparse = stat.st_blocks.cast_unsigned() * 512 < size_bytes;
        // On a disk a hole reads as zeros that need no block.
        if let Place::Memory(file) = &self.place
            && sparse
            && file.space.capabilities.preallocation.works
        {
            file.allocate(FallocateFlags::KEEP_SIZE, 0, size_bytes)?;
        }
        self.mapping(&fd, size_bytes)
    }

    /// Maps the file for a reader of written parts only: holes are not filled.
    pub fn map_written(&self) -> io::Result<Mapping> {
        let fd = self.read_fd()?;
        self.mapping(&fd, fstat(&fd)?.st_size.cast_unsigned())
    }

    fn mapping(&self, fd: &OwnedFd, size_bytes: u64) -> io::Result<Mapping> {
        match &self.place {
            Place::Memory(file) => Mapping::new(Arc::clone(file) as _, fd, size_bytes),
            Place::Spill(file) => Mapping::new(Arc::clone(file) as _, fd, size_bytes),
        }
    }

    /// Returns true while any writable handle or writable shared mapping lives, in any process; a write through this type and growth
    /// that has begun count too.
    pub fn writable_elsewhere(&self) -> io::Result<bool> {
        let file = match &self.place {
            Place::Memory(file) => file,
            Place::Spill(file) => return file.writable_elsewhere(),
        };
        let growth = file.growth();
        if growth.write_fd.is_some() {
            return Ok(true);
        }
        lease::writable_elsewhere(file.read_fd()?.as_fd())
    }

    /// Notes that the file was opened for writing: space is made ready ahead of its end until as many calls of [`Self::end_growth`].
    /// Nests.
    pub fn begin_growth(&self) {
        match &self.place {
            Place::Memory(file) => file.begin_growth(),
            Place::Spill(file) => file.begin_growth(),
        }
    }

    /// Notes that a writer is gone. After the last one, the file's times no longer change.
    ///
    /// # Panics
    /// If there are more ends than begins, which is our own error.
    pub fn end_growth(&self) {
        match &self.place {
            Place::Memory(file) => file.end_growth(),
            Place::Spill(file) => file.end_growth(),
        }
    }

    /// Frees the space beyond the end. For a file at rest (the seal), live mappings do no harm.
    ///
    /// # Errors
    /// `ResourceBusy` while growth is in force: the end could move into the freed space.
    pub fn trim(&self) -> io::Result<()> {
        match &self.place {
            Place::Memory(file) => file.trim(),
            Place::Spill(file) => file.trim(),
        }
    }

    /// Returns how many bytes the budget counts for this file.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        match &self.place {
            Place::Memory(file) => file.growth().held_bytes,
            Place::Spill(file) => file.held_bytes(),
        }
    }
}

//! One backing file: what the kernel reads and writes directly, and what the daemon does to it on request.
//!
//! Owns: a file's size, space and growth, and the test whether it has come to rest.
//! Does not own: times and modes as users see them (the namespace), whose memory gives way (`space`).

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use rustix::fs::{FallocateFlags, Stat, fallocate, fstat, ftruncate};

use super::ballast::SLICE_BYTES;
use super::budget::User;
use super::lead::{Looked, RUN_AHEAD_STEP_BYTES, lead};
use super::mapping::Mapping;
use super::pool::ReadyFile;
use super::space::{BATCH_BYTES, PAGE_BYTES, RUN_AHEAD_MIN_BYTES, Space};
use super::spill::SpillFile;
use super::{Tier1Error, lease, lock};

/// All leads together take at most this part of what is available: a surplus cannot be taken back from a file that is
/// being written (its end may move into it meanwhile).
const RUN_AHEAD_SHARE: u64 = 4;

/// A write further than this behind the ready space leaves a hole instead of filling it.
const HOLE_BYTES: u64 = RUN_AHEAD_STEP_BYTES;

/// Made ready under one hold of a file's lock, so that close never waits for more than this.
const STRIDE_BYTES: u64 = BATCH_BYTES;

/// A file of Tier-1, shared by `Arc`. When the last holder (handles, mappings of ours) is gone it is unlinked and its
/// pages go back to the ballast, or, while another process has it open or mapped, are counted until that ends.
///
/// Holds no descriptor while nobody writes: it is opened by its number for each call that needs one, and a process that
/// may have 20,000 files open can hold 100,000 of these (`engine/design/0008-small-files.md`).
#[derive(Debug)]
pub struct Backing {
    place: Place,
}

/// Where a file lies, from its creation to its end.
#[derive(Debug)]
enum Place {
    Memory(Arc<File>),
    Spill(Arc<SpillFile>),
}

/// Size, times and space as the file system gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackingStat {
    pub size_bytes: u64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
    /// In units of 512 bytes; space made ready beyond the end is not shown.
    pub blocks_512: u64,
}

#[derive(Debug)]
pub(super) struct File {
    space: Arc<Space>,
    number: u64,
    growth: Mutex<Growth>,
    /// Closes that wait for the lock: run-ahead stops between two strides.
    ending: AtomicU32,
    /// Dropped after `Drop` has run, when the budget counts the bytes where they are from then on.
    counted: Arc<()>,
}

#[derive(Debug)]
struct Growth {
    writers: u32,
    /// Kept from the first need until the last writer is gone, then none: a write descriptor of ours would
    /// look like a writer to the seal test.
    write_fd: Option<Arc<OwnedFd>>,
    /// What the budget counts for this file.
    held_bytes: u64,
    /// We allocated everything before this offset and nothing of it was given back since, so a write below it needs no
    /// room. Never moves over a gap, which a write of somebody else's may have left.
    ready_to: u64,
    /// Where our allocations end; there may be gaps before. Run-ahead goes on from here, trim gives back up to here.
    led_to: u64,
    /// The size that was predicted or announced; 0 when none.
    planned_to: u64,
    /// How far a file of unknown size may count on room; not made ready before it grows. 0 where there is no spill.
    allowed_to: u64,
    /// The part of the plan, or of what is allowed, that the budget still promises.
    promised_bytes: u64,
    last_size: u64,
    last_look: Instant,
}

impl Backing {
    pub(super) fn new(file: Arc<File>) -> Self {
        Self { place: Place::Memory(file) }
    }

    pub(super) fn spilled(file: Arc<SpillFile>) -> Self {
        Self { place: Place::Spill(file) }
    }

    /// Whether it lies in the spill and not in memory.
    #[must_use]
    pub fn is_spilled(&self) -> bool {
        matches!(self.place, Place::Spill(_))
    }

    /// Alive until a file in memory has been dropped and the budget knows; none where it is in the spill. A `Weak` of the `Backing`
    /// is dead before that, when the drop begins.
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

    /// Unique in this Tier-1, never used again. The file is called `f-<number>`.
    #[must_use]
    pub fn number(&self) -> u64 {
        match &self.place {
            Place::Memory(file) => file.number,
            Place::Spill(file) => file.number(),
        }
    }

    /// A new O_RDONLY descriptor, for FUSE's registration. Close it soon; one that outlives the `Backing` keeps the
    /// bytes counted as lingering.
    pub fn read_fd(&self) -> io::Result<OwnedFd> {
        match &self.place {
            Place::Memory(file) => file.read_fd(),
            Place::Spill(file) => file.read_fd(),
        }
    }

    /// Where this machine's root can open the file without the mount, for as long as this process lives and has it.
    #[must_use]
    pub fn host_path(&self) -> String {
        match &self.place {
            Place::Memory(file) => file.space.host_path(file.number),
            Place::Spill(file) => file.host_path(),
        }
    }

    /// What the file system has allocated for it, space made ready beyond its end included.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.look()?.st_blocks.cast_unsigned() * 512)
    }

    /// One look at the file by its name.
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

    /// Reads up to `buffer.len()` bytes; 0 at the end of the file. Opens a descriptor for the call.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(rustix::io::pread(self.read_fd()?, buffer, offset)?)
    }

    /// Fills `buffer`, with one descriptor for all of it.
    ///
    /// # Errors
    /// `UnexpectedEof` when the file ends before.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        std::fs::File::from(self.read_fd()?).read_exact_at(buffer, offset)
    }

    /// Writes up to `bytes.len()` bytes, with space made ready first. Opens a descriptor for the call unless
    /// [`Self::begin_growth`] is in force.
    ///
    /// # Errors
    /// `StorageFull` when the budget has no room.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        match &self.place {
            Place::Memory(file) => file.write_at(bytes, offset),
            Place::Spill(file) => file.write_at(bytes, offset),
        }
    }

    /// Sets the size. Growing is admitted and made ready in the background; shrinking gives pages back at
    /// once; the present size changes nothing, so O_TRUNC of a fresh file keeps its ready space.
    pub fn set_len(&self, bytes: u64) -> Result<(), Tier1Error> {
        match &self.place {
            Place::Memory(file) => file.set_len(bytes),
            Place::Spill(file) => file.set_len(bytes),
        }
    }

    /// Promises, as a prediction does, that the file may reach `bytes`.
    ///
    /// # Errors
    /// [`Tier1Error::NoSpace`] when that is not available; nothing is promised then.
    pub fn reserve(&self, bytes: u64) -> Result<(), Tier1Error> {
        match &self.place {
            Place::Memory(file) => file.plan(bytes),
            Place::Spill(file) => file.plan(bytes),
        }
    }

    /// `fallocate(2)` with no flag, `KEEP_SIZE`, `PUNCH_HOLE | KEEP_SIZE` or `ZERO_RANGE` (with or without `KEEP_SIZE`).
    pub fn allocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> Result<(), Tier1Error> {
        match &self.place {
            Place::Memory(file) => file.allocate(mode, offset, len),
            Place::Spill(file) => file.allocate(mode, offset, len),
        }
    }

    /// Gives back `offset..offset + len`, which then reads as zeros; the size stays.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), Tier1Error> {
        self.allocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
    }

    /// Maps exactly the present size, read-only. See [`Mapping`] for the one hazard. Holes are filled first: reading one
    /// through a mapping takes a page, and where the budget has none left that is SIGBUS.
    ///
    /// # Errors
    /// `StorageFull` when the budget has no room for the holes.
    pub fn map(&self) -> io::Result<Mapping> {
        let fd = self.read_fd()?;
        let stat = fstat(&fd)?;
        let size_bytes = stat.st_size.cast_unsigned();
        let sparse = stat.st_blocks.cast_unsigned() * 512 < size_bytes;
        // On a disk a hole is read as zeros that need no block.
        if let Place::Memory(file) = &self.place
            && sparse
            && file.space.capabilities.preallocation.works
        {
            file.allocate(FallocateFlags::KEEP_SIZE, 0, size_bytes)?;
        }
        self.mapping(&fd, size_bytes)
    }

    /// The same for who reads only what is written: holes are not filled.
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

    /// True while any writable handle or writable shared mapping lives, in any process; a write through this
    /// type and growth that has begun count too.
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

    /// The file was opened for writing: space is made ready ahead of its end until as many ends. Nests.
    pub fn begin_growth(&self) {
        match &self.place {
            Place::Memory(file) => file.begin_growth(),
            Place::Spill(file) => file.begin_growth(),
        }
    }

    /// One writer is gone. After the last, nothing touches the file's times any more.
    ///
    /// # Panics
    /// When more ends than begins: our own error.
    pub fn end_growth(&self) {
        match &self.place {
            Place::Memory(file) => file.end_growth(),
            Place::Spill(file) => file.end_growth(),
        }
    }

    /// Gives back what lies beyond the end. For a file at rest (the seal), live mappings do no harm.
    ///
    /// # Errors
    /// `ResourceBusy` while growth is in force: the end could move into what is given back.
    pub fn trim(&self) -> io::Result<()> {
        match &self.place {
            Place::Memory(file) => file.trim(),
            Place::Spill(file) => file.trim(),
        }
    }

    /// What the budget counts for this file, in bytes.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        match &self.place {
            Place::Memory(file) => file.growth().held_bytes,
            Place::Spill(file) => file.held_bytes(),
        }
    }
}

impl Growth {
    /// `given` bytes from `from` on were allocated.
    fn led(&mut self, from: u64, given: u64) {
        let to = from + given;
        if from <= self.ready_to {
            self.ready_to = self.ready_to.max(to);
        }
        self.led_to = self.led_to.max(to);
    }

    /// Nothing is allocated at or beyond `end` any more.
    fn end_at(&mut self, end: u64) {
        self.ready_to = self.ready_to.min(end);
        self.led_to = self.led_to.min(end);
    }
}

impl File {
    pub(super) fn new(space: Arc<Space>, ready: ReadyFile) -> Arc<Self> {
        let growth = Growth {
            writers: 0,
            write_fd: None,
            held_bytes: ready.held_bytes,
            ready_to: ready.ready_bytes,
            led_to: ready.ready_bytes,
            planned_to: 0,
            allowed_to: 0,
            promised_bytes: 0,
            last_size: 0,
            last_look: Instant::now(),
        };
        let (growth, ending, counted) = (Mutex::new(growth), AtomicU32::new(0), Arc::default());
        Arc::new(Self { space, number: ready.number, growth, ending, counted })
    }

    /// A file that lies there already. Where its ready space has gaps is not known, so nothing counts as ready.
    pub(super) fn found(space: Arc<Space>, found: ReadyFile) -> Arc<Self> {
        let led_to = found.held_bytes;
        let file = Self::new(space, ReadyFile { ready_bytes: 0, ..found });
        file.growth().led_to = led_to;
        file
    }

    fn read_fd(&self) -> io::Result<OwnedFd> {
        self.space.open_for_reading(self.number)
    }

    /// Size, times and space, by name: its name goes only when the file is dropped.
    fn look(&self) -> io::Result<Stat> {
        self.space.look(self.number)
    }

    fn growth(&self) -> MutexGuard<'_, Growth> {
        lock(&self.growth)
    }

    /// Promises that the file may reach `bytes`; run-ahead makes it so once writing begins.
    pub(super) fn plan(&self, bytes: u64) -> Result<(), Tier1Error> {
        self.plan_locked(&mut self.growth(), bytes)
    }

    fn plan_locked(&self, growth: &mut Growth, bytes: u64) -> Result<(), Tier1Error> {
        let more = bytes.saturating_sub(growth.held_bytes).saturating_sub(growth.promised_bytes);
        if !lock(&self.space.budget).promise(more) {
            return Err(self.space.no_space(more));
        }
        growth.promised_bytes += more;
        growth.planned_to = growth.planned_to.max(bytes);
        self.space.clear_wall();
        Ok(())
    }

    /// Keeps room for a file of unknown size until it is closed: others are not admitted onto it.
    pub(super) fn allow(&self, bytes: u64) -> Result<(), Tier1Error> {
        let mut growth = self.growth();
        let planned_to = growth.planned_to;
        self.plan_locked(&mut growth, bytes)?;
        growth.planned_to = planned_to;
        growth.allowed_to = bytes;
        Ok(())
    }

    fn begin_growth(self: &Arc<Self>) {
        let mut growth = self.growth();
        growth.writers += 1;
        if growth.writers == 1 {
            growth.last_look = Instant::now();
            growth.last_size = self.look().map_or(0, |stat| stat.st_size.cast_unsigned());
            drop(growth);
            self.space.run_ahead.watch(self.number, self);
        }
    }

    fn end_growth(&self) {
        self.ending.fetch_add(1, Ordering::Relaxed);
        let mut growth = self.growth();
        self.ending.fetch_sub(1, Ordering::Relaxed);
        assert!(growth.writers > 0, "growth of backing file {} ended once too often", self.number);
        growth.writers -= 1;
        if growth.writers == 0 {
            growth.write_fd = None;
            let expected = growth.planned_to.max(growth.allowed_to);
            growth.planned_to = 0;
            growth.allowed_to = 0;
            self.settle(&mut growth);
            let held_bytes = growth.held_bytes;
            drop(growth);
            self.space.run_ahead.forget(self.number);
            // Small files are closed very often, and only a spill wants to know.
            if self.space.spill.get().is_some() {
                let short = expected + SLICE_BYTES < held_bytes && self.space.is_short();
                let size_bytes = self.look().map_or(0, |stat| stat.st_size.cast_unsigned());
                self.space.closed(size_bytes, short);
            }
        }
    }

    /// Brings the count to what the file holds, and its promise to what its plan still lacks.
    fn settle(&self, growth: &mut Growth) {
        let actual_bytes = self.actual_bytes(growth);
        self.settle_at(growth, actual_bytes);
    }

    /// What the file holds; what is counted for it where it cannot be looked at.
    fn actual_bytes(&self, growth: &Growth) -> u64 {
        match self.look() {
            Ok(stat) => stat.st_blocks.cast_unsigned() * 512,
            Err(error) => {
                tracing::error!(number = self.number, %error, "a backing file cannot be looked at");
                growth.held_bytes
            }
        }
    }

    /// As [`Self::settle`], for a caller that has looked.
    fn settle_at(&self, growth: &mut Growth, actual_bytes: u64) {
        growth.held_bytes = self.space.settle(User::Files, growth.held_bytes, actual_bytes);
        let lacking = growth.planned_to.max(growth.allowed_to).saturating_sub(growth.held_bytes);
        if growth.promised_bytes > lacking {
            lock(&self.space.budget).withdraw(growth.promised_bytes - lacking);
            growth.promised_bytes = lacking;
        }
    }

    fn writer(&self, growth: &mut Growth) -> io::Result<Arc<OwnedFd>> {
        if let Some(fd) = &growth.write_fd {
            return Ok(Arc::clone(fd));
        }
        let fd = Arc::new(self.space.open_for_writing(self.number)?);
        if growth.writers > 0 {
            growth.write_fd = Some(Arc::clone(&fd));
        }
        Ok(fd)
    }

    /// Makes more space ready if the file has come near the end of it. True when the file grew since the last look.
    ///
    /// `files` is how many are growing; `poll_ms` how long the caller means to wait before the next look.
    pub(super) fn run_ahead(&self, files: u64, poll_ms: u64) -> bool {
        let mut growth = self.growth();
        if growth.writers == 0 {
            return false;
        }
        let Ok(stat) = self.look() else { return false };
        let size = stat.st_size.cast_unsigned();
        let actual = stat.st_blocks.cast_unsigned() * 512;
        let grew = size > growth.last_size || actual > growth.held_bytes;
        let elapsed_us = u64::try_from(growth.last_look.elapsed().as_micros()).unwrap_or(u64::MAX).max(1);
        // The time between two looks is what it was, which on a busy machine is more than what was meant.
        let look_us = elapsed_us.max(poll_ms * 1000);
        let per_look = size.saturating_sub(growth.last_size).saturating_mul(look_us) / elapsed_us;
        growth.last_size = size;
        growth.last_look = Instant::now();
        if actual != growth.held_bytes {
            self.settle_at(&mut growth, actual);
        }
        let looked = Looked {
            size_bytes: size,
            grew,
            per_look_bytes: per_look,
            planned_to: growth.planned_to,
            led_to: growth.led_to,
        };
        let promised = growth.promised_bytes;
        let share = || (lock(&self.space.budget).available() + promised) / (RUN_AHEAD_SHARE * files.max(1));
        let Range { start: mut from, end: to } = lead(&looked, share);
        while from < to {
            let step = STRIDE_BYTES.min(to - from);
            if self.make_ready(&mut growth, from, from + step) < step {
                break;
            }
            from += step;
            if self.ending.load(Ordering::Relaxed) > 0 {
                break;
            }
        }
        grew
    }

    /// Allocates `from..to`, as far as there is room, counts it, and says how much was got.
    fn make_ready(&self, growth: &mut Growth, from: u64, to: u64) -> u64 {
        let given = self.writer(growth).and_then(|fd| self.space.give(&fd, from, to - from, User::Files));
        match given {
            Ok(given) => {
                growth.held_bytes += given;
                growth.led(from, given);
                self.settle(growth);
                given
            }
            Err(error) => {
                tracing::error!(number = self.number, %error, "space could not be made ready");
                0
            }
        }
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let end = offset
            .checked_add(bytes.len() as u64)
            .ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let mut growth = self.growth();
        if end > growth.ready_to {
            let hole = offset > growth.ready_to.saturating_add(HOLE_BYTES);
            let from = if hole { offset / PAGE_BYTES * PAGE_BYTES } else { growth.ready_to };
            // The rest of the slice is made ready too where it is likely to be written next.
            let to = end.next_multiple_of(if hole { PAGE_BYTES } else { SLICE_BYTES });
            let fd = self.writer(&mut growth)?;
            let given = self.space.give(&fd, from, to - from, User::Files)?;
            growth.held_bytes += given;
            growth.led(from, given);
            self.settle(&mut growth);
            // Our own tmpfs refuses what passes the budget; elsewhere we must.
            if from + given < end && !self.space.medium.walled {
                return Err(io::ErrorKind::StorageFull.into());
            }
        }
        let fd = self.writer(&mut growth)?;
        drop(growth);
        let written = rustix::io::pwrite(&fd, bytes, offset);
        drop(fd);
        // A refused write may have allocated pages too, and a range that was ready may have been punched meanwhile.
        self.settle(&mut self.growth());
        Ok(written?)
    }

    fn failed<E: Into<io::Error>>(
        &self,
        step: &'static str,
        offset: u64,
        len: u64,
    ) -> impl Fn(E) -> Tier1Error + use<E> {
        Tier1Error::resize(self.number, step, offset, len)
    }

    fn set_len(&self, bytes: u64) -> Result<(), Tier1Error> {
        let failed = self.failed("truncating", 0, bytes);
        let mut growth = self.growth();
        let size = self.look().map_err(self.failed("looking at the size", 0, bytes))?.st_size.cast_unsigned();
        if bytes == size {
            return Ok(());
        }
        if bytes > size {
            self.plan_locked(&mut growth, bytes).inspect_err(|_| self.space.outgrown(bytes))?;
        } else {
            growth.planned_to = growth.planned_to.min(bytes);
            growth.end_at(bytes.next_multiple_of(PAGE_BYTES));
        }
        let fd = self.writer(&mut growth).map_err(|source| Tier1Error::Resize {
            step: "opening",
            number: self.number,
            offset_bytes: 0,
            len_bytes: bytes,
            source,
        })?;
        let truncated = ftruncate(&fd, bytes).map_err(&failed);
        if truncated.is_err() {
            growth.planned_to = 0;
        }
        self.settle(&mut growth);
        truncated?;
        growth.last_size = bytes;
        if bytes == 0 {
            // Rewritten in place: ready space once more, before the first write.
            match self.space.give_from_start(&fd, RUN_AHEAD_MIN_BYTES, User::Files) {
                Ok(given) => {
                    growth.held_bytes += given;
                    growth.led(0, given);
                    self.settle(&mut growth);
                }
                Err(error) => tracing::error!(number = self.number, %error, "space could not be made ready"),
            }
        } else if growth.writers > 0 && bytes > size {
            drop(growth);
            self.space.run_ahead.look_now();
        }
        Ok(())
    }

    fn allocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> Result<(), Tier1Error> {
        let failed = self.failed("allocating", offset, len);
        let Some(end) = offset.checked_add(len).filter(|end| i64::try_from(*end).is_ok() && len > 0) else {
            return Err(failed(rustix::io::Errno::INVAL));
        };
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let zero = mode.contains(FallocateFlags::ZERO_RANGE);
        let keep = mode & FallocateFlags::KEEP_SIZE;
        if mode != punch && !(mode - FallocateFlags::ZERO_RANGE - FallocateFlags::KEEP_SIZE).is_empty() {
            return Err(failed(rustix::io::Errno::OPNOTSUPP));
        }
        let mut growth = self.growth();
        let fd = self.writer(&mut growth).map_err(|source| Tier1Error::Resize {
            step: "opening",
            number: self.number,
            offset_bytes: offset,
            len_bytes: len,
            source,
        })?;
        if mode == punch || zero {
            // tmpfs has no ZERO_RANGE; a hole that is filled again is the same.
            fallocate(&fd, punch, offset, len).map_err(&failed)?;
            // A write into the hole allocates again and must be counted, so it must not look ready.
            growth.ready_to = growth.ready_to.min(offset / PAGE_BYTES * PAGE_BYTES);
            self.settle(&mut growth);
        }
        if mode != punch {
            let seen = self.look().map_err(self.failed("looking at the size", offset, len))?;
            let size = seen.st_size.cast_unsigned();
            let from = offset / PAGE_BYTES * PAGE_BYTES;
            let whole = end.next_multiple_of(PAGE_BYTES) - from;
            if lock(&self.space.budget).available() < whole.saturating_sub(growth.held_bytes) {
                return Err(self.space.no_space(whole));
            }
            let given =
                self.space.give(&fd, from, whole, User::Files).map_err(|source| Tier1Error::Resize {
                    step: "allocating",
                    number: self.number,
                    offset_bytes: offset,
                    len_bytes: len,
                    source,
                })?;
            growth.held_bytes += given;
            growth.led(from, given);
            self.settle(&mut growth);
            if given < whole {
                return Err(self.space.no_space(whole - given));
            }
            if keep.is_empty() && end > size {
                ftruncate(&fd, end).map_err(&failed)?;
            }
        }
        Ok(())
    }

    fn trim(&self) -> io::Result<()> {
        let mut growth = self.growth();
        if growth.writers > 0 {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let stat = self.look()?;
        let end = stat.st_size.cast_unsigned().next_multiple_of(PAGE_BYTES);
        let mut actual = stat.st_blocks.cast_unsigned() * 512;
        // A file with holes may hold less than its size and still have a surplus; `led_to` tells.
        if actual > end || growth.led_to > end {
            let fd = self.space.open_for_writing(self.number)?;
            let punch = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE;
            fallocate(&fd, punch, end, i64::MAX.cast_unsigned() - end)?;
            growth.end_at(end);
            actual = self.actual_bytes(&growth);
        }
        growth.planned_to = 0;
        self.settle_at(&mut growth, actual);
        Ok(())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let growth = self.growth.get_mut().unwrap_or_else(PoisonError::into_inner);
        growth.write_fd = None;
        let (promised, held, led_to) = (growth.promised_bytes, growth.held_bytes, growth.led_to);
        lock(&self.space.budget).withdraw(promised);
        let actual = self.space.look(self.number).map_or(held, |stat| stat.st_blocks.cast_unsigned() * 512);
        let held = self.space.settle(User::Files, held, actual);
        self.space.retire(self.number, held, led_to);
    }
}

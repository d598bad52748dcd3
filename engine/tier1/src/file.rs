//! A file of Tier-1 in memory: its space, its growth, and the way of its pages when it is dropped.
//!
//! Owns: how much of a file is allocated, counted and promised. Does not own: the engine's handle for it (`backing`), which memory
//! gives way (`space`), when space is made ready (`run_ahead`).

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::fs::{FallocateFlags, Stat, fallocate, ftruncate};

use super::backing::is_unwritten;
use super::ballast::SLICE_BYTES;
use super::budget::User;
use super::lead::{Looked, RUN_AHEAD_STEP_BYTES, lead};
use super::pool::ReadyFile;
use super::space::{BATCH_BYTES, PAGE_BYTES, RUN_AHEAD_MIN_BYTES, Space};
use super::{Tier1Error, lock};

/// All leads together take at most this part of the available memory: a surplus cannot be taken back from a file that is being
/// written (its end may move into it meanwhile).
const RUN_AHEAD_SHARE: u64 = 4;

/// If a write begins further than this behind the ready space, it leaves a hole instead of filling it.
const HOLE_BYTES: u64 = RUN_AHEAD_STEP_BYTES;

/// Bytes made ready under one hold of a file's lock, so that close never waits for more than this.
const STRIDE_BYTES: u64 = BATCH_BYTES;

#[derive(Debug)]
pub(super) struct File {
    pub(super) space: Arc<Space>,
    pub(super) number: u64,
    growth: Mutex<Growth>,
    /// Number of closes, and of calls that set the file's time, that wait for the lock: run-ahead stops between two strides.
    ending: AtomicU32,
    /// Token dropped after `Drop` has run, when the budget counts the bytes at their new place.
    pub(super) counted: Arc<()>,
}

#[derive(Debug)]
pub(super) struct Growth {
    writers: u32,
    /// Kept from the first need until the last writer is gone, then none: our own write descriptor would look like a writer to the
    /// seal test.
    pub(super) write_fd: Option<Arc<OwnedFd>>,
    /// Bytes that the budget counts for this file.
    pub(super) held_bytes: u64,
    /// Everything before this offset was allocated by us, and none of it was freed since, so a write below it needs no room. The
    /// offset never moves over a gap, which a program's write may have left.
    ready_to: u64,
    /// The end of our allocations; there may be gaps before it. Run-ahead goes on from here, trim frees up to here.
    led_to: u64,
    /// The size that was predicted or announced; 0 if there is none.
    planned_to: u64,
    /// The size up to which a file of unknown size may count on room; not made ready before it grows. 0 if there is no spill.
    allowed_to: u64,
    /// The part of the plan, or of the allowed size, that the budget still promises.
    promised_bytes: u64,
    last_size: u64,
    last_look: Instant,
}

impl Growth {
    /// Notes that `given` bytes from `from` on were allocated.
    fn led(&mut self, from: u64, given: u64) {
        let to = from + given;
        if from <= self.ready_to {
            self.ready_to = self.ready_to.max(to);
        }
        self.led_to = self.led_to.max(to);
    }

    /// Notes that nothing is allocated at or beyond `end` any more.
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

    /// Makes a file that exists already. Because gaps in its ready space are unknown, nothing counts as ready.
    pub(super) fn found(space: Arc<Space>, found: ReadyFile) -> Arc<Self> {
        let led_to = found.held_bytes;
        let file = Self::new(space, ReadyFile { ready_bytes: 0, ..found });
        file.growth().led_to = led_to;
        file
    }

    pub(super) fn read_fd(&self) -> io::Result<OwnedFd> {
        self.space.open_for_reading(self.number)
    }

    /// Stats the file by its name, which goes only when the file is dropped.
    pub(super) fn look(&self) -> io::Result<Stat> {
        self.space.look(self.number)
    }

    pub(super) fn growth(&self) -> MutexGuard<'_, Growth> {
        lock(&self.growth)
    }

    /// Promises that the file may reach `bytes`; run-ahead makes them ready once writing begins.
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

    /// Keeps room for a file of unknown size until it is closed: no other file is admitted onto it.
    pub(super) fn allow(&self, bytes: u64) -> Result<(), Tier1Error> {
        let mut growth = self.growth();
        let planned_to = growth.planned_to;
        self.plan_locked(&mut growth, bytes)?;
        growth.planned_to = planned_to;
        growth.allowed_to = bytes;
        Ok(())
    }

    pub(super) fn begin_growth(self: &Arc<Self>) {
        let mut growth = self.growth();
        growth.writers += 1;
        if growth.writers == 1 {
            growth.last_look = Instant::now();
            growth.last_size = self.look().map_or(0, |stat| stat.st_size.cast_unsigned());
            drop(growth);
            self.space.run_ahead.watch(self.number, self);
        }
    }

    pub(super) fn end_growth(&self) {
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
            // Small files are closed very often, and only a spill needs this.
            if self.space.spill.get().is_some() {
                let short = expected + SLICE_BYTES < held_bytes && self.space.is_short();
                let size_bytes = self.look().map_or(0, |stat| stat.st_size.cast_unsigned());
                self.space.closed(size_bytes, short);
            }
        }
    }

    /// Sets the count to the bytes that the file holds, and its promise to the lacking part of its plan.
    fn settle(&self, growth: &mut Growth) {
        let actual_bytes = self.actual_bytes(growth);
        self.settle_at(growth, actual_bytes);
    }

    /// Returns the bytes that the file holds; if it cannot be examined, the counted ones.
    fn actual_bytes(&self, growth: &Growth) -> u64 {
        match self.look() {
            Ok(stat) => stat.st_blocks.cast_unsigned() * 512,
            Err(error) => {
                tracing::error!(number = self.number, %error, "a backing file cannot be looked at");
                growth.held_bytes
            }
        }
    }

    /// Does the same as [`Self::settle`], for a caller that has examined the file.
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

    /// See [`super::Backing::mark_unwritten`]. The code that makes space ready holds the lock from its check of the time on.
    pub(super) fn mark_unwritten(&self) -> io::Result<()> {
        self.ending.fetch_add(1, Ordering::Relaxed);
        let growth = self.growth();
        self.ending.fetch_sub(1, Ordering::Relaxed);
        let marked = self.space.mark_unwritten(self.number);
        drop(growth);
        marked
    }

    /// Makes more space ready if the file has come near the end of its ready space. Returns true if the file grew since the last
    /// look.
    ///
    /// `files` is how many are growing; `poll_ms` is how long the caller means to wait before the next look.
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
        // Uses the real time between two looks, which on a busy machine is longer than the intended one.
        let look_us = elapsed_us.max(poll_ms * 1000);
        let per_look = size.saturating_sub(growth.last_size).saturating_mul(look_us) / elapsed_us;
        growth.last_size = size;
        growth.last_look = Instant::now();
        if actual != growth.held_bytes {
            self.settle_at(&mut growth, actual);
        }
        // Making space ready would move an mtime that a program has set, and that stays until the next write.
        if is_unwritten(&stat) {
            return grew;
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

    /// Allocates `from..to`, as far as there is room, counts it, and returns how many bytes it got.
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

    pub(super) fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let end = offset
            .checked_add(bytes.len() as u64)
            .ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let mut growth = self.growth();
        if end > growth.ready_to {
            let hole = offset > growth.ready_to.saturating_add(HOLE_BYTES);
            let from = if hole { offset / PAGE_BYTES * PAGE_BYTES } else { growth.ready_to };
            // The rest of the slice is made ready too if it is likely to be written next.
            let to = end.next_multiple_of(if hole { PAGE_BYTES } else { SLICE_BYTES });
            let fd = self.writer(&mut growth)?;
            let given = self.space.give(&fd, from, to - from, User::Files)?;
            growth.held_bytes += given;
            growth.led(from, given);
            self.settle(&mut growth);
            // Our own tmpfs refuses bytes beyond the budget; on other file systems we must.
            if from + given < end && !self.space.medium.walled {
                return Err(io::ErrorKind::StorageFull.into());
            }
        }
        let fd = self.writer(&mut growth)?;
        drop(growth);
        let written = rustix::io::pwrite(&fd, bytes, offset);
        drop(fd);
        // A refused write may have allocated pages too, and a ready range may have been punched meanwhile.
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

    pub(super) fn set_len(&self, bytes: u64) -> Result<(), Tier1Error> {
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
            // The file is rewritten in place: it gets ready space again before the first write.
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

    pub(super) fn allocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> Result<(), Tier1Error> {
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
            // A write into the hole allocates again and must be counted, so the hole must not look ready.
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

    pub(super) fn trim(&self) -> io::Result<()> {
        let mut growth = self.growth();
        if growth.writers > 0 {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let stat = self.look()?;
        let end = stat.st_size.cast_unsigned().next_multiple_of(PAGE_BYTES);
        let mut actual = stat.st_blocks.cast_unsigned() * 512;
        // A file with holes may hold less than its size and still have a surplus, which `led_to` shows.
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

//! Memory in motion: which memory gives way when a file needs room, and how a folio moves without going cold.
//!
//! Owns: the order in which idle memory gives way (ballast, spent files, free, ready files) and every change of the budget. Does
//! not own: one file's state (`backing`), the lists (`pool`), when the threads act (`run_ahead`, `worker`).
//!
//! Lock order: a file's growth, then the pool, then the ballast, then the budget. None is held over a wait.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, Stat, fallocate, fstat, openat, statat, unlinkat, utimensat,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use super::adopt::Found;
use super::backing::unwritten;
use super::ballast::{Ballast, SLICE_BYTES};
use super::budget::{Budget, User};
use super::file::File;
use super::mount::{Capabilities, Medium};
use super::pool::{LingeringFile, Pool, ReadyFile, SpentFile};
use super::run_ahead::RunAhead;
use super::spill::Spill;
use super::worker::{Wake, headroom_bytes};
use super::{Tier1Error, lease, lock};
use crate::courtesy::Asked;

/// The kernel's page, the unit of what a file holds.
pub(super) const PAGE_BYTES: u64 = 4096;

/// Space made ready before a create of unknown size is answered, while memory is plentiful.
pub(super) const RUN_AHEAD_MIN_BYTES: u64 = SLICE_BYTES;

/// The first piece of a small file. Writing 4 KiB into a fresh folio clears all of it, so the first folio is short and the next
/// ones double up to the slice.
pub(super) const FIRST_PIECE_BYTES: u64 = 64 << 10;

/// Bytes allocated in one call. Each call waits for the file's lock, which a writer holds nearly always: slice by slice the
/// writer stayed ahead of us (64 MiB took 35 ms and were charged to it).
pub(super) const BATCH_BYTES: u64 = 8 * SLICE_BYTES;

/// The state that create, files and threads share.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) medium: Medium,
    pub(super) capabilities: Capabilities,
    pub(super) budget: Mutex<Budget>,
    pub(super) ballast: Ballast,
    pub(super) ballast_on: bool,
    pub(super) pool: Mutex<Pool>,
    pub(super) run_ahead: RunAhead,
    pub(super) wake: Wake,
    pub(super) asked: Asked,
    /// Set once the worker is gone: files dropped from now on go directly back to the kernel.
    pub(super) closing: AtomicBool,
    pub(super) next_number: AtomicU64,
    /// Files of an earlier daemon that were not claimed yet.
    pub(super) found: Found,
    /// Bytes without a name that existed when this daemon began; counted as lingering.
    pub(super) unnamed: AtomicU64,
    /// The place for files that find no room here; set once, before anything is made.
    pub(super) spill: OnceLock<Arc<Spill>>,
}

impl Space {
    pub(super) fn create(self: &Arc<Self>, predicted_bytes: Option<u64>) -> Result<Arc<File>, Tier1Error> {
        let wanted = predicted_bytes.unwrap_or(PAGE_BYTES).max(PAGE_BYTES);
        if wanted > lock(&self.budget).available() {
            self.let_go();
        }
        let available = lock(&self.budget).available();
        let ready_bytes = ready_before_reply(available, self.run_ahead.growing_files() + 1, predicted_bytes);
        if wanted > available {
            return Err(self.no_space(wanted));
        }
        let taken = {
            let mut pool = lock(&self.pool);
            if let Some(bytes) = predicted_bytes {
                pool.remember(bytes);
            }
            let taken = pool.take(predicted_bytes, available);
            if let Some(file) = &taken {
                lock(&self.budget).shift(User::Pool, User::Files, file.held_bytes);
            }
            if pool.is_low() || predicted_bytes.is_some_and(|bytes| bytes > SLICE_BYTES) {
                self.wake.now();
            }
            taken
        };
        let ready = match taken {
            Some(ready) => ready,
            // The caller waits: one short piece now, the rest by run-ahead if the file turns out to need it.
            None => self.make_file(User::Files, ready_bytes.min(FIRST_PIECE_BYTES))?,
        };
        let file = File::new(Arc::clone(self), ready);
        // If this call fails, the drop of the file frees its space.
        let unknown_bytes = self.spill.get().map(|spill| spill.unknown_bytes(lock(&self.budget).size()));
        match (predicted_bytes, unknown_bytes) {
            (Some(bytes), _) => file.plan(bytes)?,
            // If the file could go elsewhere, it must not begin here and meet the wall.
            (None, Some(bytes)) => file.allow(bytes)?,
            (None, None) => {}
        }
        Ok(file)
    }

    /// Whether a file that grows now meets the wall, or has met it.
    pub(super) fn is_short(&self) -> bool {
        let budget = lock(&self.budget);
        // The pool's files stand on the same tmpfs, and a writer that meets its wall does not make them give way.
        budget.available().saturating_sub(budget.held(User::Pool)) < 2 * SLICE_BYTES
    }

    /// Notes that a file was closed for writing; `short`: because there was no more room.
    pub(super) fn closed(&self, size_bytes: u64, short: bool) {
        if let Some(spill) = self.spill.get() {
            spill.closed(size_bytes, false, short);
        }
    }

    /// Notes that an open file needed `bytes`, and cannot be moved any more.
    pub(super) fn outgrown(&self, bytes: u64) {
        self.closed(bytes, true);
    }

    pub(super) fn no_space(&self, wanted_bytes: u64) -> Tier1Error {
        let budget = lock(&self.budget);
        Tier1Error::NoSpace { wanted_bytes, available_bytes: budget.available(), size_bytes: budget.size() }
    }

    /// Makes an empty file with up to `ready_bytes` allocated beyond its end and counted for `user`.
    pub(super) fn make_file(&self, user: User, ready_bytes: u64) -> Result<ReadyFile, Tier1Error> {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let failed = |source: io::Error| Tier1Error::Create { number, source };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let name = file_name(number);
        let write_fd = openat(&self.medium.files, &name, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| failed(error.into()))?;
        match self.give_from_start(&write_fd, ready_bytes, user) {
            Ok(ready_bytes) => {
                let actual =
                    fstat(&write_fd).map_err(|error| failed(error.into()))?.st_blocks.cast_unsigned() * 512;
                let held_bytes = self.settle(user, ready_bytes, actual);
                Ok(ReadyFile { number, ready_bytes, held_bytes, zeroed_bytes: 0 })
            }
            Err(error) => {
                self.unlink(number);
                Err(failed(error))
            }
        }
    }

    /// Allocates the beginning of a fresh file: whole slices for a long one, doubling pieces for a short one.
    pub(super) fn give_from_start(&self, file: &OwnedFd, bytes: u64, user: User) -> io::Result<u64> {
        if !self.capabilities.preallocation.works {
            return Ok(0);
        }
        if bytes > SLICE_BYTES {
            return self.give(file, 0, bytes, user);
        }
        let mut done = 0;
        let mut piece = FIRST_PIECE_BYTES;
        while done < bytes {
            let step = piece.min(bytes - done);
            let given = self.give(file, done, step, user)?;
            done += given;
            if given < step {
                break;
            }
            piece = done;
        }
        Ok(done)
    }

    /// Allocates `offset..offset + bytes` of a file and returns how much from the beginning it got.
    ///
    /// Whole slices come out of the ballast: freed and allocated again on one CPU, still warm. Pages that the range already had
    /// are counted twice until the caller settles.
    pub(super) fn give(&self, file: &OwnedFd, offset: u64, bytes: u64, user: User) -> io::Result<u64> {
        if !self.capabilities.preallocation.works {
            return Ok(0);
        }
        let _cpu = (bytes > SLICE_BYTES).then(OneCpu::stay);
        let mut done = 0;
        let mut short = false;
        while done < bytes && !short {
            let at = offset + done;
            let most = BATCH_BYTES.min(bytes - done);
            let mut step = 0;
            while step < most {
                let piece = (SLICE_BYTES - (at + step) % SLICE_BYTES).min(most - step);
                if !self.obtain(piece, user) {
                    short = true;
                    break;
                }
                step += piece;
            }
            if step == 0 {
                break;
            }
            if let Err(error) = fallocate(file, FallocateFlags::KEEP_SIZE, at, step) {
                lock(&self.budget).give_back(user, step);
                // The wall of the tmpfs, met because writers allocate between two looks at their files.
                if error == rustix::io::Errno::NOSPC {
                    break;
                }
                return Err(error.into());
            }
            done += step;
        }
        self.keep_headroom();
        Ok(done)
    }

    /// Keeps some memory of the budget free for pages that writers allocate before the next look. The wall of the files' tmpfs
    /// does not know that ballast and spent files would give way.
    fn keep_headroom(&self) {
        loop {
            let short = {
                let budget = lock(&self.budget);
                budget.free() < headroom_bytes(budget.size())
            };
            if !short {
                return;
            }
            if self.ballast.pop_slice() {
                lock(&self.budget).give_back(User::Ballast, SLICE_BYTES);
            } else if !self.free_spent() {
                return;
            }
        }
    }

    /// Makes all promises fit on the files' tmpfs: a writer takes pages without asking, and meets the wall if spent and ready
    /// files stand in its way. Costs about 0.1 ms for each slice of 2 MiB in the way.
    pub(super) fn clear_wall(&self) {
        while lock(&self.budget).promised_beyond_wall() > 0 {
            if self.free_spent() {
                continue;
            }
            let Some(ready) = lock(&self.pool).take_any() else { return };
            self.discard(ready);
        }
    }

    /// Returns the memory that a ready file may take: unused memory beyond the headroom. Making one by freeing another would
    /// never end.
    pub(super) fn idle_bytes(&self) -> u64 {
        let budget = lock(&self.budget);
        (budget.free() + budget.held(User::Ballast)).saturating_sub(headroom_bytes(budget.size()))
    }

    fn obtain(&self, bytes: u64, user: User) -> bool {
        if bytes == SLICE_BYTES && self.ballast.pop_slice() {
            lock(&self.budget).shift(User::Ballast, user, SLICE_BYTES);
            return true;
        }
        loop {
            // Memory of a spent file is on this CPU's list and warm; memory that was free before may not be.
            if bytes == SLICE_BYTES {
                self.free_spent();
            }
            if lock(&self.budget).take(user, bytes) {
                return true;
            }
            if !self.free_something() {
                return false;
            }
        }
    }

    /// Frees idle memory to the kernel, at least one step; false if there is none left.
    pub(super) fn free_something(&self) -> bool {
        if self.ballast.pop_slice() {
            lock(&self.budget).give_back(User::Ballast, SLICE_BYTES);
            return true;
        }
        if self.free_spent() {
            return true;
        }
        let Some(ready) = lock(&self.pool).take_any() else { return false };
        self.discard(ready);
        true
    }

    /// Frees files that no process has open any more; returns true if some still linger.
    pub(super) fn let_go(&self) -> bool {
        let unnamed = self.recount_unnamed() > 0;
        let mut pool = lock(&self.pool);
        let mut freed = 0;
        pool.lingering.retain(|file| {
            let gone = file.is_gone();
            freed += if gone { file.held_bytes } else { 0 };
            !gone
        });
        lock(&self.budget).give_back(User::Lingering, freed);
        unnamed || !pool.lingering.is_empty()
    }

    /// Frees a slice of a spent file; false if there is none.
    pub(super) fn free_spent(&self) -> bool {
        let mut pool = lock(&self.pool);
        while let Some(last) = pool.spent.last_mut() {
            match last.give_slice() {
                Ok(freed) => {
                    if last.is_empty() {
                        pool.spent.pop();
                    }
                    if freed.bytes > 0 {
                        lock(&self.budget).give_back(User::Pool, freed.bytes);
                        return true;
                    }
                }
                Err(error) => {
                    tracing::error!(%error, "a spent file could not be punched; it is closed whole");
                    let held = last.held();
                    pool.spent.pop();
                    lock(&self.budget).give_back(User::Pool, held);
                    return true;
                }
            }
        }
        false
    }

    /// Zeroes the next slice of a large ready file, so that its writer need not; false if none is left. Costs 0.1 to 0.2 ms, in
    /// which a create waits.
    pub(super) fn zero_slice(&self) -> bool {
        let mut pool = lock(&self.pool);
        let Some(file) = pool.not_zeroed() else { return false };
        let at = file.zeroed_bytes;
        let bytes = SLICE_BYTES.min(file.ready_bytes - at);
        file.zeroed_bytes = at + bytes;
        // A second allocation of a fresh folio zeroes it (mm/shmem.c, `SGP_FALLOC`); it takes no more memory.
        let zeroed = self
            .open_for_writing(file.number)
            .and_then(|fd| Ok(fallocate(&fd, FallocateFlags::KEEP_SIZE, at, bytes)?));
        if let Err(error) = zeroed {
            tracing::warn!(number = file.number, %error, "a ready file could not be zeroed; its writer does it");
            file.zeroed_bytes = file.ready_bytes;
        }
        true
    }

    /// Drops a ready file.
    pub(super) fn discard(&self, ready: ReadyFile) {
        self.unlink(ready.number);
        lock(&self.budget).give_back(User::Pool, ready.held_bytes);
    }

    /// Sets the budget's count for a file to the bytes that the file holds, as far as the sum allows.
    ///
    /// A writer may have allocated pages of its own; idle memory gives way to them. If pages do not fit although they exist (a
    /// figure elsewhere is a moment old), they are counted at the next look: the sum is never passed.
    pub(super) fn settle(&self, user: User, counted: u64, actual: u64) -> u64 {
        if actual <= counted {
            lock(&self.budget).give_back(user, counted - actual);
            return actual;
        }
        let mut counted = counted;
        loop {
            counted += lock(&self.budget).take_up_to(user, actual - counted);
            if counted == actual || !self.free_something() {
                self.keep_headroom();
                return counted;
            }
        }
    }

    /// Takes a file without holders: it is unlinked at once, and its pages are on their way back.
    pub(super) fn retire(&self, number: u64, held_bytes: u64, led_to: u64) {
        if self.medium.is_removed() {
            return lock(&self.budget).give_back(User::Files, held_bytes);
        }
        let read_fd = match self.open_for_reading(number) {
            Ok(read_fd) => read_fd,
            Err(error) => {
                // Whether others have the file mapped is unknown, and the budget must not be passed on a guess.
                tracing::error!(
                    number, held_bytes, %error,
                    "a dropped backing file cannot be opened; its bytes stay counted until the daemon ends"
                );
                self.unlink(number);
                return lock(&self.budget).shift(User::Files, User::Lingering, held_bytes);
            }
        };
        // Without leases this is unknown; such a medium has no passthrough and so no other holders.
        let leases = self.capabilities.leases.works;
        let alone = !leases || !lease::open_elsewhere(read_fd.as_fd()).unwrap_or(true);
        // Small files are quicker closed than moved; without a worker no thread would move them.
        let keep_warm =
            leases && held_bytes >= SLICE_BYTES && self.ballast_on && !self.closing.load(Ordering::Acquire);
        let write_fd = (alone && keep_warm).then(|| self.open_for_writing(number).ok()).flatten();
        let size = fstat(&read_fd).map_or(0, |stat| stat.st_size.cast_unsigned());
        self.unlink(number);
        if !alone {
            lock(&self.budget).shift(User::Files, User::Lingering, held_bytes);
            lock(&self.pool).lingering.push(LingeringFile { read_fd, held_bytes });
            self.wake.now();
        } else if let Some(write_fd) = write_fd {
            lock(&self.budget).shift(User::Files, User::Pool, held_bytes);
            let spent = SpentFile::new(write_fd, size.max(led_to), size, held_bytes);
            lock(&self.pool).spent.push(spent);
            self.wake.now();
        } else {
            drop(read_fd);
            lock(&self.budget).give_back(User::Files, held_bytes);
        }
    }

    pub(super) fn open_for_writing(&self, number: u64) -> io::Result<OwnedFd> {
        self.open_file(number, OFlags::RDWR)
    }

    pub(super) fn open_for_reading(&self, number: u64) -> io::Result<OwnedFd> {
        self.open_file(number, OFlags::RDONLY)
    }

    fn open_file(&self, number: u64, access: OFlags) -> io::Result<OwnedFd> {
        Ok(openat(&self.medium.files, file_name(number), access | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Stats a file that still has its name.
    pub(super) fn look(&self, number: u64) -> io::Result<Stat> {
        Ok(statat(&self.medium.files, file_name(number), AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// See [`super::Backing::mark_unwritten`].
    pub(super) fn mark_unwritten(&self, number: u64) -> io::Result<()> {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        Ok(utimensat(&self.medium.files, file_name(number), &unwritten(), flags)?)
    }

    pub(super) fn host_path(&self, number: u64) -> String {
        let directory = self.medium.files.as_raw_fd();
        format!("/proc/{}/fd/{directory}/{}", std::process::id(), file_name(number))
    }

    fn unlink(&self, number: u64) {
        if self.medium.is_removed() {
            return;
        }
        if let Err(error) = unlinkat(&self.medium.files, file_name(number), AtFlags::empty()) {
            tracing::warn!(number, %error, "a backing file's name could not be removed");
        }
    }
}

/// Returns the name of a file, by which a restarted daemon finds it.
fn file_name(number: u64) -> String {
    format!("f-{number}")
}

/// Returns the space to make ready before a create is answered. Each open file gets a share of the available memory, at most 2
/// MiB and no more than its prediction.
fn ready_before_reply(available: u64, open_files: u64, predicted_bytes: Option<u64>) -> u64 {
    let share = (available / (8 * open_files)).min(RUN_AHEAD_MIN_BYTES);
    let wanted = predicted_bytes.unwrap_or(u64::MAX).min(RUN_AHEAD_MIN_BYTES);
    share.min(wanted.next_multiple_of(PAGE_BYTES)) / PAGE_BYTES * PAGE_BYTES
}

/// Keeps the thread on its present CPU, so that a freed folio is found again on that CPU's free list.
struct OneCpu {
    before: Option<CpuSet>,
}

impl OneCpu {
    fn stay() -> Self {
        let mut only = CpuSet::new();
        let cpu = sched_getcpu();
        if cpu >= CpuSet::MAX_CPU {
            return Self { before: None };
        }
        only.set(cpu);
        let before = sched_getaffinity(None).ok().filter(|_| sched_setaffinity(None, &only).is_ok());
        Self { before }
    }
}

impl Drop for OneCpu {
    fn drop(&mut self) {
        if let Some(before) = &self.before
            && let Err(error) = sched_setaffinity(None, before)
        {
            tracing::warn!(%error, "a thread of tier-1 stays on one CPU");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{RUN_AHEAD_MIN_BYTES, ready_before_reply};

    #[test]
    fn ready_space_shrinks_with_the_budget_and_never_passes_the_prediction() {
        assert_eq!(ready_before_reply(1 << 30, 1, None), RUN_AHEAD_MIN_BYTES);
        assert_eq!(ready_before_reply(1 << 20, 1, None), 128 << 10);
        assert_eq!(ready_before_reply(1 << 20, 16, None), 8 << 10);
        assert_eq!(ready_before_reply(1 << 30, 1, Some(5000)), 8192);
        assert_eq!(ready_before_reply(100, 1, None), 0);
    }
}

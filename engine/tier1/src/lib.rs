//! Tier-1: this node's checkpoint memory, as files that the kernel reads and writes without us.
//!
//! | file | owns |
//! |---|---|
//! | `adopt` | recovery of what an earlier daemon left |
//! | `mount` | the private tmpfs mounts (or a directory), and what they can do |
//! | `budget` | the sum with one addend per user; pure |
//! | `space` | which memory gives way, and how a folio moves without going cold |
//! | `backing` | one file, in memory or spilled, as the engine uses it |
//! | `file` | one file in memory: its space and growth |
//! | `growing` | the time in which the daemon writes a file |
//! | `pool` | ready, spent and lingering files |
//! | `ballast` | touched memory that no file uses |
//! | `lead` | how far ahead of a writer space is made ready; pure |
//! | `run_ahead` | thread `tm-run-ahead`: space ready ahead of writers |
//! | `worker` | thread `tm-ballast`: everything that happens in the background |
//! | `pressure` | whether the machine wants memory back |
//! | `spill` | files on a local disk, where memory had no room |
//! | `priority`, `courtesy`, `allowance` | how background work gives way to programs |
//! | `descriptors` | the last call that was refused for want of a descriptor |
//! | `lease`, `mapping` | modules with unsafe code, as `priority` is |
//!
//! Does not own: names, handles, times (`namespace`); which copies may be dropped (retention). `engine/design/0002-tier1.md`
//! explains the design.

mod adopt;
pub mod allowance;
mod backing;
mod ballast;
mod budget;
pub mod courtesy;
pub mod descriptors;
mod error;
mod file;
mod growing;
mod lead;
mod lease;
mod mapping;
mod mount;
mod pool;
mod pressure;
pub mod priority;
mod run_ahead;
mod space;
mod spill;
#[cfg(test)]
mod tests;
mod worker;

use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;

pub use self::adopt::KeptMounts;
pub use self::backing::UNWRITTEN_NS;
pub use self::backing::{Backing, BackingStat};
pub use self::error::{Tier1Error, is_descriptor_limit};
pub use self::growing::Growing;
pub use self::mapping::Mapping;
pub use self::mount::{Capabilities, Capability};
pub use self::spill::{KeptSpill, SpillPlace, SpillUsage};

use self::adopt::Found;
use self::ballast::Ballast;
use self::budget::{Budget, User};
use self::mount::Medium;
use self::pool::Pool;
use self::run_ahead::RunAhead;
use self::space::Space;
use self::spill::Spill;
use self::worker::Wake;
use crate::courtesy::Asked;

/// Smallest Tier-1, in bytes. Below it, the journal and the space made ready for single files leave no room to work.
pub const LEAST_SIZE_BYTES: u64 = 8 << 20;

/// The journal's share: 1/32 of the size, within these bounds. The share is halved between two files, and 100,000 names need about
/// 44 MiB in each.
const JOURNAL_PART: u64 = 32;
const JOURNAL_LEAST_BYTES: u64 = 1 << 20;
const JOURNAL_MOST_BYTES: u64 = 256 << 20;

/// Tier-1 of one node. Share it by `Arc`; every method may be called from any thread.
///
/// The drop stops `tm-run-ahead`, then `tm-ballast`, and waits for both. The mounts, or a folder that no successor was promised, go
/// with the last `Backing`. Until then files keep working, without run-ahead and without returning pages to the ballast.
#[derive(Debug)]
pub struct Tier1 {
    space: Arc<Space>,
    run_ahead: Mutex<Option<JoinHandle<()>>>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Clone)]
pub struct Tier1Settings {
    /// The whole budget: files, ready space, ballast and journal together never hold more.
    pub size_bytes: u64,
    /// Whether to keep unused memory of the budget allocated and touched. Without that, the first writes after a pause are slow in a
    /// virtual machine, and other processes may use the memory meanwhile.
    pub ballast: bool,
    pub medium: MediumChoice,
}

/// The place of the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MediumChoice {
    /// The private tmpfs if it can be made, else a directory below /dev/shm.
    Auto,
    /// Needs CAP_SYS_ADMIN.
    PrivateTmpfs,
    /// Needs no privileges; should lie on a tmpfs. Only Tidemark enforces the budget: it covers only writes through
    /// [`Backing::write_at`].
    Directory(PathBuf),
}

/// The budget at one moment, in bytes. `journal + files + lingering + pool + ballast + free = size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub size_bytes: u64,
    /// Journal, files and lingering: the memory that does not give way when a file needs room.
    pub used_bytes: u64,
    pub journal_bytes: u64,
    /// Files that can be opened, with the space made ready ahead of their writers.
    pub files_bytes: u64,
    /// Files that were dropped here but that another process still has open or mapped.
    pub lingering_bytes: u64,
    /// Ready and spent files.
    pub pool_bytes: u64,
    pub ballast_bytes: u64,
    pub free_bytes: u64,
    /// Growth that open files were promised and do not hold yet. Not part of the sum.
    pub promised_bytes: u64,
    /// Room for new promises: the bytes that `statfs` may call available.
    pub available_bytes: u64,
    /// Bytes that files have released since the start; only rises.
    pub released_bytes: u64,
    /// Files open for writing.
    pub growing_files: u64,
    /// The part of the budget's memory that is known to be backed by real memory, in millionths: files, ready files and touched
    /// ballast over the size less journal and headroom.
    pub warm_millionths: u32,
    /// Speed at which the ballast was touched so far, bytes per second; 0 before. If it is far below memory speed, the host had
    /// taken the pages.
    pub touch_bytes_per_s: u64,
}

impl Usage {
    /// Returns the room for a writer that does not wait for pool files to give way.
    #[must_use]
    pub fn room_bytes(&self) -> u64 {
        self.free_bytes + self.ballast_bytes
    }

    /// Returns the same as a fraction, 0 to 1.
    #[must_use]
    pub fn warm_fraction(&self) -> f64 {
        f64::from(self.warm_millionths) / 1e6
    }
}

impl Tier1 {
    /// Makes the mounts, probes what they can do, and starts both threads; the ballast fills in the background.
    pub fn open(settings: Tier1Settings) -> Result<Arc<Self>, Tier1Error> {
        Self::begin(settings, None)
    }

    /// Goes on with the mounts of a daemon that died. Everything found is counted, and waits for [`Tier1::adopt`] until
    /// [`Tier1::adopt_rest`]. The size must be the former one.
    ///
    /// # Errors
    /// As [`Tier1::open`]; [`Tier1Error::Adopt`] when the kept mounts cannot be read.
    pub fn take_over(settings: Tier1Settings, kept: KeptMounts) -> Result<Arc<Self>, Tier1Error> {
        Self::begin(settings, Some(kept))
    }

    fn begin(settings: Tier1Settings, kept: Option<KeptMounts>) -> Result<Arc<Self>, Tier1Error> {
        let size_bytes = settings.size_bytes / space::PAGE_BYTES * space::PAGE_BYTES;
        if size_bytes < LEAST_SIZE_BYTES {
            return Err(Tier1Error::TooSmall { size_bytes, least_bytes: LEAST_SIZE_BYTES });
        }
        let journal_bytes = (size_bytes / JOURNAL_PART).clamp(JOURNAL_LEAST_BYTES, JOURNAL_MOST_BYTES)
            / space::PAGE_BYTES
            * space::PAGE_BYTES;
        let found = kept.is_some();
        let mut spill = None;
        let (medium, capabilities) = match kept {
            Some(mut kept) => {
                spill = kept.spill.take().map(Spill::take_over).transpose()?;
                Medium::take_over(kept)?
            }
            None => Medium::open(&settings.medium, size_bytes, journal_bytes)?,
        };
        let ballast_directory = medium.ballast.try_clone().map_err(adopt::failed)?;
        let ballast_on = settings.ballast && capabilities.preallocation.works;
        let wake = Wake::new().map_err(|source| Tier1Error::Thread { name: WORKER_NAME, source })?;
        let space = Arc::new(Space {
            medium,
            capabilities,
            budget: Mutex::new(Budget::new(size_bytes, journal_bytes)),
            ballast: Ballast::new(ballast_directory),
            ballast_on,
            pool: Mutex::new(Pool::default()),
            run_ahead: RunAhead::new(),
            wake,
            asked: Asked::default(),
            closing: AtomicBool::new(false),
            next_number: AtomicU64::new(1),
            found: Found::default(),
            unnamed: AtomicU64::new(0),
            spill: OnceLock::new(),
        });
        if found {
            space.find().map_err(adopt::failed)?;
        }
        if let Some((spill, highest)) = spill {
            // Before the threads make files, because each number is used once, in memory and in the spill together.
            space.next_number.fetch_max(highest + 1, Ordering::Relaxed);
            assert!(space.spill.set(Arc::new(spill)).is_ok(), "nobody else has the space yet");
        }
        let tier1 = Self { space: Arc::clone(&space), run_ahead: Mutex::default(), worker: Mutex::default() };
        let shared = Arc::clone(&space);
        *lock(&tier1.run_ahead) = Some(spawn(RUN_AHEAD_NAME, move || shared.run_ahead.run())?);
        *lock(&tier1.worker) = Some(spawn(WORKER_NAME, move || worker::run(&space))?);
        Ok(Arc::new(tier1))
    }

    /// Returns a new, empty file with space ready beyond its end. Costs 1 µs if a ready file fits, 11 to 17 µs if one is made
    /// (medians, `examples/tier1_small.rs`).
    ///
    /// A predicted size is promised in full (no other file is admitted onto it) and made ready once growth begins. Without a
    /// prediction, a ready file has 2 MiB, and a file that is made has a fair share of the available memory, up to 64 KiB.
    ///
    /// # Errors
    /// [`Tier1Error::NoSpace`] when the prediction, or a page, is not available.
    pub fn create(self: &Arc<Self>, predicted_bytes: Option<u64>) -> Result<Arc<Backing>, Tier1Error> {
        self.space.create(predicted_bytes).map(|file| Arc::new(Backing::new(file)))
    }

    /// Adds a place on a local disk for files that find no room. Called once, before any file is made.
    ///
    /// # Errors
    /// [`Tier1Error::Spill`] when the directory is missing, cannot be written, or cannot hold backing files.
    pub fn add_spill(&self, place: &SpillPlace) -> Result<(), Tier1Error> {
        let spill = Spill::make(place)?;
        assert!(self.space.spill.set(Arc::new(spill)).is_ok(), "there is one spill, and it comes first");
        Ok(())
    }

    /// Ends the node's life and its memory: no successor will use the folder and the spill. Stops both threads and waits for them,
    /// then removes folder and spill by name, because a process that ends may never drop its last file. Open files work until they
    /// are closed; no further file can be made in the folder.
    pub fn end(&self) {
        self.stop();
        if let Some(spill) = self.space.spill.get() {
            spill.remove();
        }
        self.space.medium.remove();
    }

    fn stop(&self) {
        self.space.run_ahead.stop();
        join(lock(&self.run_ahead).take());
        self.space.wake.stop();
        join(lock(&self.worker).take());
        self.space.closing.store(true, Ordering::Release);
    }

    /// Returns the state of the spill; none if there is no spill. Costs a stat of each of its files that is open for writing.
    #[must_use]
    pub fn spill_usage(&self) -> Option<SpillUsage> {
        self.space.spill.get().map(|spill| spill.usage())
    }

    /// Returns the size of the largest file that an empty Tier-1, or an empty spill, could hold.
    #[must_use]
    pub fn most_bytes(&self) -> u64 {
        let budget = lock(&self.space.budget).clone();
        let spill_bytes = self.space.spill.get().map_or(0, |spill| spill.size_bytes());
        (budget.size() - budget.journal()).max(spill_bytes)
    }

    #[must_use]
    pub fn has_spill(&self) -> bool {
        self.space.spill.get().is_some()
    }

    /// Whether a file of this size, or of unknown size, should not be begun in memory: a file like it met the wall.
    #[must_use]
    pub fn is_outgrown(&self, predicted_bytes: Option<u64>) -> bool {
        self.space.spill.get().is_some_and(|spill| spill.is_outgrown(predicted_bytes))
    }

    /// Returns the room that [`Tier1::create`] requires for a file of unknown size beyond its first piece.
    #[must_use]
    pub fn unknown_bytes(&self) -> u64 {
        let tier1_bytes = lock(&self.space.budget).size();
        self.space.spill.get().map_or(0, |spill| spill.unknown_bytes(tier1_bytes))
    }

    /// Returns a new, empty file in the spill; a predicted size is allocated in full. Costs some tens of µs.
    ///
    /// # Errors
    /// [`Tier1Error::SpillFull`]; [`Tier1Error::NoSpace`] when there is no spill.
    pub fn create_spilled(&self, predicted_bytes: Option<u64>) -> Result<Arc<Backing>, Tier1Error> {
        let unknown_bytes = self.unknown_bytes();
        let Some(spill) = self.space.spill.get() else {
            return Err(self.space.no_space(predicted_bytes.unwrap_or(space::PAGE_BYTES)));
        };
        let number = self.space.next_number.fetch_add(1, Ordering::Relaxed);
        let file = spill.create(number, predicted_bytes, unknown_bytes)?;
        Ok(Arc::new(Backing::spilled(file)))
    }

    /// Checks whether `bytes` more could be held now. Nothing is promised: [`Backing::set_len`] makes the promise.
    pub fn admit(&self, bytes: u64) -> Result<(), Tier1Error> {
        if bytes <= lock(&self.space.budget).available() { Ok(()) } else { Err(self.space.no_space(bytes)) }
    }

    /// Notes that a program has made a request and waits: background work keeps out of its way. Costs a relaxed add.
    pub fn asked(&self) {
        self.space.asked.now();
    }

    /// Returns the count of programs' requests, for work that gives way to them.
    pub fn asked_so_far(&self) -> &Asked {
        &self.space.asked
    }

    /// Returns the state of the budget. Costs one short lock, no system call.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let budget = lock(&self.space.budget).clone();
        let (files, lingering) = (budget.held(User::Files), budget.held(User::Lingering));
        let (pool, ballast) = (budget.held(User::Pool), budget.held(User::Ballast));
        let warmable = budget.size() - budget.journal() - worker::headroom_bytes(budget.size());
        let warm = (files + lingering + pool + ballast).min(warmable);
        let millionths = u128::from(warm) * 1_000_000 / u128::from(warmable.max(1));
        let touched = u128::from(self.space.wake.touched_bytes.load(Ordering::Relaxed)) * 1_000_000;
        let touched_us = u128::from(self.space.wake.touched_us.load(Ordering::Relaxed));
        Usage {
            size_bytes: budget.size(),
            used_bytes: budget.journal() + files + lingering,
            journal_bytes: budget.journal(),
            files_bytes: files,
            lingering_bytes: lingering,
            pool_bytes: pool,
            ballast_bytes: ballast,
            free_bytes: budget.free(),
            promised_bytes: budget.promised(),
            available_bytes: budget.available(),
            released_bytes: budget.released(),
            growing_files: self.space.run_ahead.growing_files(),
            warm_millionths: u32::try_from(millionths).unwrap_or(1_000_000),
            touch_bytes_per_s: u64::try_from(touched / touched_us.max(1)).unwrap_or(0),
        }
    }

    /// Takes back memory of files that were dropped here while another process had them open, once that process has closed them. The
    /// worker calls this every 50 ms; a caller that waits for room calls more often. Returns true while some of this memory is not
    /// yet free.
    pub fn let_go(&self) -> bool {
        if let Some(spill) = self.space.spill.get() {
            spill.let_go();
        }
        self.space.let_go()
    }

    /// Returns dropped files' memory on the files' tmpfs to the kernel until a writer finds `room_bytes`: otherwise the writer would
    /// meet the wall before the background work is done. Costs some 0.1 ms for each 2 MiB, which are cold afterwards.
    pub fn free_spent(&self, room_bytes: u64) {
        while self.usage().room_bytes() < room_bytes && self.space.free_spent() {}
    }

    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.space.capabilities
    }

    /// Returns an empty directory on a mount of its own of `journal_bytes`. The budget counts these in full from the start, so that
    /// a full Tier-1 never stops the journal. The journal allocates its files at once (`fallocate`). In a directory medium this is a
    /// folder, and only the count protects it.
    #[must_use]
    pub fn journal_dir(&self) -> BorrowedFd<'_> {
        self.space.medium.journal.as_fd()
    }
}

impl Drop for Tier1 {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Thread names, at most 15 bytes, as `top -H` and the profiler show them.
const RUN_AHEAD_NAME: &str = "tm-run-ahead";
const WORKER_NAME: &str = "tm-ballast";

fn spawn(name: &'static str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Tier1Error> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|source| Tier1Error::Thread { name, source })
}

fn join(thread: Option<JoinHandle<()>>) {
    if let Some(thread) = thread
        && thread.join().is_err()
    {
        tracing::error!("a thread of tier-1 had panicked");
    }
}

/// Locks a mutex. A panic while a lock was held has already been reported; the figures behind it are still consistent, because each
/// change of them ends with its check.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

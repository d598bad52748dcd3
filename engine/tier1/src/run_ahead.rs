//! The thread that keeps space ready ahead of every file that is open for writing.
//!
//! Pages allocated inside write(2) are charged to the writer's memory cgroup and cost the writer time; pages that exist
//! already are charged to us and cost it nothing.
//!
//! Owns: the list of growing files and when they are examined. Does not own: how much one file gets (`backing`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use super::file::File;
use super::lock;
use crate::priority;

/// Interval while a file grows: a writer of 8 GB/s passes 8 MiB between two looks, a quarter of what may be charged to
/// it.
const POLL: Duration = Duration::from_millis(1);
/// Interval when no file has grown for [`RESTING_AFTER`]: a burst after a rest passes 24 MiB before it is noticed.
const POLL_AT_REST: Duration = Duration::from_millis(3);
const RESTING_AFTER: Duration = Duration::from_secs(1);
/// Time after a file's growth in which heavy background work waits.
const BUSY_FOR_MS: u64 = 50;

#[derive(Debug)]
pub(super) struct RunAhead {
    growing: Mutex<Growing>,
    changed: Condvar,
    /// Number of files in the list, for create to read without the lock.
    count: AtomicU64,
    started: Instant,
    last_growth_ms: AtomicU64,
    stopping: AtomicBool,
}

#[derive(Debug, Default)]
struct Growing {
    files: HashMap<u64, Weak<File>>,
    /// Whether a file announced its size: look now, not at the next poll.
    hurry: bool,
    /// Whether the thread waits without a time-out. Otherwise it finds a new file by itself, and a create costs no
    /// wake-up.
    asleep: bool,
}

impl RunAhead {
    pub(super) fn new() -> Self {
        Self {
            growing: Mutex::default(),
            changed: Condvar::new(),
            count: AtomicU64::new(0),
            started: Instant::now(),
            last_growth_ms: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
        }
    }

    pub(super) fn growing_files(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns true while files are being written, when memory bandwidth is better left to the writers.
    pub(super) fn is_busy(&self) -> bool {
        self.growing_files() > 0
            && self.elapsed_ms() < self.last_growth_ms.load(Ordering::Relaxed).saturating_add(BUSY_FOR_MS)
    }

    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) fn watch(&self, number: u64, file: &Arc<File>) {
        let mut growing = lock(&self.growing);
        growing.files.insert(number, Arc::downgrade(file));
        self.count.store(growing.files.len() as u64, Ordering::Relaxed);
        if std::mem::take(&mut growing.asleep) {
            self.changed.notify_one();
        }
    }

    pub(super) fn forget(&self, number: u64) {
        let mut growing = lock(&self.growing);
        growing.files.remove(&number);
        self.count.store(growing.files.len() as u64, Ordering::Relaxed);
    }

    pub(super) fn look_now(&self) {
        lock(&self.growing).hurry = true;
        self.changed.notify_one();
    }

    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.look_now();
    }

    /// Runs the thread. Sleeps without a time-out once no file has been open for writing for a while.
    pub(super) fn run(&self) {
        // How much writers allocate before the next look depends on how soon this thread runs, on busy machines too;
        // each run is short.
        if let Err(error) = priority::run_before_others() {
            tracing::debug!(%error, "run-ahead runs at the usual priority");
        }
        let mut last_growth = Instant::now();
        let mut poll = POLL;
        loop {
            let mut files = {
                let mut growing = lock(&self.growing);
                if growing.files.is_empty() && !growing.hurry && last_growth.elapsed() >= RESTING_AFTER {
                    growing.asleep = true;
                    growing = self
                        .changed
                        .wait_while(growing, |growing| growing.asleep && !growing.hurry)
                        .unwrap_or_else(std::sync::PoisonError::into_inner);
                    growing.asleep = false;
                    last_growth = Instant::now();
                    poll = POLL;
                }
                if !growing.hurry {
                    (growing, _) = self
                        .changed
                        .wait_timeout_while(growing, poll, |growing| !growing.hurry)
                        .unwrap_or_else(std::sync::PoisonError::into_inner);
                }
                growing.hurry = false;
                // A file dropped without end_growth leaves its entry behind.
                growing.files.retain(|_, file| file.strong_count() > 0);
                self.count.store(growing.files.len() as u64, Ordering::Relaxed);
                growing.files.values().filter_map(Weak::upgrade).collect::<Vec<_>>()
            };
            if self.stopping.load(Ordering::Acquire) {
                return;
            }
            let begun = Instant::now();
            let poll_ms = u64::try_from(poll.as_millis()).unwrap_or(1);
            let count = files.len() as u64;
            let mut grew = false;
            for file in files.drain(..) {
                grew |= file.run_ahead(count, poll_ms);
            }
            if grew {
                last_growth = Instant::now();
                self.last_growth_ms.store(self.elapsed_ms(), Ordering::Relaxed);
            }
            poll = if last_growth.elapsed() < RESTING_AFTER { POLL } else { POLL_AT_REST };
            if !grew {
                // Very many files open at rest must not take a CPU for themselves.
                poll = poll.max(begun.elapsed() * 4);
            }
        }
    }
}

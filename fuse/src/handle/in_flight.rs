//! Writes of one file that were acknowledged before their bytes reached the backing file.
//!
//! Owns: their order against everything else that happens to the file. Does not own: the bytes.
//!
//! A thread copies at most one write at a time and never waits for another thread while it copies, so every
//! wait here ends: it is for copies that are running.

use std::io;
use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};

/// The writes of one file that are being copied now.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    state: Mutex<State>,
    finished: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// At most one a session thread.
    running: Vec<Range<u64>>,
    /// The errno of the first copy that failed since the last time somebody was told.
    failed: Option<i32>,
}

/// One write being copied; ends when finished or dropped.
#[derive(Debug)]
pub(super) struct Copying<'a> {
    of: &'a InFlight,
    range: Range<u64>,
}

impl InFlight {
    /// Announces a write. Waits for running ones that overlap it, so that the later of two writes to one place
    /// wins. Must be called before the write is acknowledged.
    pub(super) fn begin(&self, range: Range<u64>) -> Copying<'_> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.running.iter().any(|other| other.start < range.end && range.start < other.end) {
            state = self.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.running.push(range.clone());
        Copying { of: self, range }
    }

    /// Waits until every acknowledged write is in the backing file.
    pub(super) fn settle(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !state.running.is_empty() {
            state = self.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The error of an acknowledged write, told once.
    pub(super) fn take_error(&self) -> Option<io::Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.failed.take().map(io::Error::from_raw_os_error)
    }
}

impl Copying<'_> {
    /// Remembers that an acknowledged write failed, for the next write, fsync or close of the file.
    pub(super) fn failed(&self, error: &io::Error) {
        let mut state = self.of.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.failed.get_or_insert_with(|| error.raw_os_error().unwrap_or(libc::EIO));
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        let mut state = self.of.state.lock().unwrap_or_else(PoisonError::into_inner);
        let position = state.running.iter().position(|range| *range == self.range);
        state.running.swap_remove(position.expect("a copy that runs is listed"));
        self.of.finished.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn an_overlapping_write_waits_and_a_distant_one_does_not() {
        let writes = InFlight::default();
        let first = writes.begin(0..100);
        let distant = writes.begin(100..200);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let _second = writes.begin(50..60);
                assert!(done.load(Ordering::SeqCst), "began while the first was still copied");
            });
            std::thread::sleep(Duration::from_millis(30));
            done.store(true, Ordering::SeqCst);
            drop(first);
            waiter.join().unwrap();
        });
        drop(distant);
        writes.settle();
    }

    #[test]
    fn a_failed_copy_is_told_exactly_once() {
        let writes = InFlight::default();
        let copying = writes.begin(0..1);
        copying.failed(&io::Error::from_raw_os_error(libc::ENOSPC));
        copying.failed(&io::Error::from_raw_os_error(libc::EIO));
        drop(copying);
        assert_eq!(writes.take_error().unwrap().raw_os_error(), Some(libc::ENOSPC));
        assert!(writes.take_error().is_none());
    }
}

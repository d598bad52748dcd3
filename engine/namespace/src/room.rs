//! Waiting for memory that is on its way back.
//!
//! Owns: how long a create, an overwrite or a resize waits before it is refused, and which calls do not wait because nothing moves. Does
//! not own: making room (`reclaim`), the memory (`tier1`), the threads that wait (the adapter).
//!
//! Memory comes back a moment after it was released: the kernel's RELEASE of a reader is on its way, a mapping ends, a host copy is being
//! uploaded. A refused create costs a job its checkpoint, so it is worth that moment. Writes and closes never wait (they do not ask us),
//! and where nothing moves no call waits for long.

use super::host_room::HostRoom;
use super::{FsError, LARGEST_FILE_BYTES};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tidemark_tier1::Tier1;

/// The longest wait. Enough for one version of 30 GB to drain at 1 GB/s, and well below the time-outs of the
/// frameworks' barriers (10 minutes and more).
const ROOM_WAIT: Duration = Duration::from_secs(30);

/// Pause between two tries. Each try is a short lock and a look at what may give way.
const ROOM_LOOK: Duration = Duration::from_millis(5);

/// State shared by the calls that wait.
#[derive(Debug, Default)]
pub(super) struct Room {
    waiting: AtomicUsize,
    /// Bytes released so far, plus one, when a wait last ended in vain; 0 when none did. While no more is released, other calls are
    /// refused at once.
    in_vain_at: AtomicU64,
    refused: Mutex<Refusals>,
}

/// Calls that were refused for want of room.
#[derive(Debug, Clone, Copy, Default)]
pub struct Refusals {
    /// Refused calls, without writes that the kernel refused.
    pub count: u64,
    /// Time of the last refusal, including writes that the kernel refused.
    pub last: Option<Instant>,
}

/// How long a single call still waits.
#[derive(Debug)]
pub struct RoomWait<'a> {
    room: &'a Room,
    tier1: &'a Arc<Tier1>,
    until: Option<Instant>,
}

impl<'a> HostRoom<'a> {
    /// Returns the patience of a call that may meet [`FsError::NoSpace`](super::FsError::NoSpace): the caller repeats the call for as
    /// long as [`RoomWait::again`] returns true.
    pub fn room_wait(&self) -> RoomWait<'a> {
        RoomWait { room: self.waits, tier1: self.tier1, until: None }
    }

    /// Refuses a length for which no waiting brings room; how full memory is now does not matter. `to_bytes` is the requested length,
    /// `more_bytes` the part of it that has to be held.
    pub(super) fn could_hold(&self, to_bytes: u64, more_bytes: u64) -> Result<(), FsError> {
        if to_bytes > LARGEST_FILE_BYTES {
            return Err(FsError::TooBig);
        }
        if more_bytes > self.tier1.most_bytes() { Err(FsError::NeverFits) } else { Ok(()) }
    }

    /// Notes that a growing file met the end of the memory, where the kernel refuses its writer without asking.
    pub fn note_wall(&self) {
        self.waits.refused.lock().unwrap_or_else(PoisonError::into_inner).last = Some(Instant::now());
    }

    /// Calls that were refused for want of room since the start.
    #[must_use]
    pub fn refusals(&self) -> Refusals {
        *self.waits.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls that wait for room now.
    #[must_use]
    pub fn waiting_for_room(&self) -> usize {
        self.waits.waiting.load(Ordering::Relaxed)
    }
}

impl RoomWait<'_> {
    /// Blocks for a moment; false once waiting longer is in vain.
    pub fn again(&mut self) -> bool {
        let Some(pause) = self.pause() else { return false };
        std::thread::sleep(pause);
        true
    }

    /// How long to wait before the next try, for a caller that sleeps itself; none once waiting longer is in vain.
    pub fn pause(&mut self) -> Option<Duration> {
        let pause = self.next_pause();
        if pause.is_none() {
            let mut refused = self.room.refused.lock().unwrap_or_else(PoisonError::into_inner);
            *refused = Refusals { count: refused.count + 1, last: Some(Instant::now()) };
        }
        pause
    }

    fn next_pause(&mut self) -> Option<Duration> {
        let spilled = self.tier1.spill_usage().map_or(0, |spill| spill.released_bytes);
        let released = self.tier1.usage().released_bytes.saturating_add(spilled).saturating_add(1);
        let now = Instant::now();
        let until = match self.until {
            Some(until) => until,
            None => {
                if self.room.in_vain_at.load(Ordering::Relaxed) == released {
                    return None;
                }
                self.room.waiting.fetch_add(1, Ordering::Relaxed);
                *self.until.insert(now + ROOM_WAIT)
            }
        };
        if now >= until {
            self.room.in_vain_at.store(released, Ordering::Relaxed);
            return None;
        }
        self.tier1.let_go();
        Some(ROOM_LOOK)
    }
}

impl Drop for RoomWait<'_> {
    fn drop(&mut self) {
        if self.until.is_some() {
            self.room.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

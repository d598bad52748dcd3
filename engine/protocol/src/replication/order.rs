//! The order of files on their way to a partner, and the rate.
//!
//! Owns: the order of waiting files, and the rate that ends a checkpoint's replication before the next one is expected. Does not own:
//! the waiting (the engine sleeps), the time of the next checkpoint (the rate learns it from the last two).

use std::time::Duration;

/// Bytes that are paced at a time: a training job's own packet waits behind no more than this.
pub const MICRO_CHUNK_BYTES: u64 = 1 << 20;

/// The importance of a file to its job; lower goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Small, and each worth a few training steps.
    Differential,
    /// A checkpoint that is being saved.
    Base,
    /// A file that had a copy, whose holder is gone.
    Again,
    /// A file whose holder verified its copy and dropped it, because it was bad or because memory was short.
    Scrub,
}

/// A file that waits for its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting<K> {
    pub key: K,
    pub priority: Priority,
    /// Whether the bytes are final: sending them completes a copy, while a growing file's may be sent in vain.
    pub sealed: bool,
    pub since: Duration,
}

/// Returns the file that goes first: by priority, then sealed files, then the longest waiting. Costs a pass over all.
pub fn next_to_send<K: Copy>(waiting: impl IntoIterator<Item = Waiting<K>>) -> Option<K> {
    let first = waiting.into_iter().min_by_key(|waiting| (waiting.priority, !waiting.sealed, waiting.since));
    first.map(|waiting| waiting.key)
}

/// Part of the expected interval within which a checkpoint should be replicated. The part is less than an upload may take: until then the
/// death of one machine costs the checkpoint.
const INTERVAL_USED_PERMILLE: u64 = 500;
/// Lowest rate. At a lower one a copy would be at risk for longer than sparing the link is worth.
const RATE_MIN_BYTES_PER_S: u64 = 128 << 20;
/// Bytes that may go at once after a pause: ten milliseconds of a link of 50 Gbit/s.
const BURST_BYTES: u64 = 64 << 20;

/// A budget of bytes per second. There is no limit until two checkpoints have been seen.
#[derive(Debug)]
pub struct Rate {
    bytes_per_s: Option<u64>,
    tokens_bytes: u64,
    filled_at: Duration,
    last: Option<Duration>,
    interval: Option<Duration>,
    /// Bytes taken since the last checkpoint was complete, with a limit or without.
    taken_bytes: u64,
    /// Bytes that had no copy when the last checkpoint was complete.
    left_bytes: u64,
}

impl Rate {
    #[must_use]
    pub fn new(now: Duration) -> Self {
        Self {
            bytes_per_s: None,
            tokens_bytes: BURST_BYTES,
            filled_at: now,
            last: None,
            interval: None,
            taken_bytes: 0,
            left_bytes: 0,
        }
    }

    /// Sets the rate when a checkpoint is complete and `backlog_bytes`, its own included, have no copy yet. The next one is expected to
    /// be alike: the bytes that went while this one was written will go while the next is written.
    pub fn completed(&mut self, now: Duration, backlog_bytes: u64) {
        let seen = self.last.replace(now).map(|last| now.saturating_sub(last));
        let expected = seen.map(|seen| self.interval.map_or(seen, |before| before.min(seen)));
        self.interval = seen;
        // The rest of the earlier checkpoint goes first; all other bytes taken are of this one.
        let streamed_bytes = self.taken_bytes.saturating_sub(self.left_bytes);
        (self.taken_bytes, self.left_bytes) = (0, backlog_bytes);
        let expected_bytes = backlog_bytes.saturating_add(streamed_bytes);
        self.bytes_per_s = expected.map(|interval| {
            let usable_ms = u64::try_from(interval.as_millis())
                .unwrap_or(u64::MAX)
                .saturating_mul(INTERVAL_USED_PERMILLE)
                / 1000;
            (expected_bytes.saturating_mul(1000) / usable_ms.max(1)).max(RATE_MIN_BYTES_PER_S)
        });
    }

    /// Removes the limit until the next checkpoint: a caller waits, or a partner was lost.
    pub fn lift(&mut self) {
        self.bytes_per_s = None;
    }

    /// Returns the bytes per second in force; none is no limit.
    #[must_use]
    pub fn bytes_per_s(&self) -> Option<u64> {
        self.bytes_per_s
    }

    /// Takes `bytes`, and returns how long to wait before sending them. A caller that takes while others wait comes after them.
    pub fn take(&mut self, now: Duration, bytes: u64) -> Duration {
        self.taken_bytes = self.taken_bytes.saturating_add(bytes);
        let Some(rate) = self.bytes_per_s else { return Duration::ZERO };
        let elapsed_us = u64::try_from(now.saturating_sub(self.filled_at).as_micros()).unwrap_or(u64::MAX);
        let refill = u64::try_from(u128::from(rate) * u128::from(elapsed_us) / 1_000_000).unwrap_or(u64::MAX);
        if refill > 0 {
            self.tokens_bytes = self.tokens_bytes.saturating_add(refill).min(BURST_BYTES);
            self.filled_at = now;
        }
        if self.tokens_bytes >= bytes {
            self.tokens_bytes -= bytes;
            return Duration::ZERO;
        }
        let short = bytes - std::mem::take(&mut self.tokens_bytes);
        let pays = Duration::from_micros(short.saturating_mul(1_000_000) / rate.max(1));
        self.filled_at = self.filled_at.max(now) + pays;
        self.filled_at - now
    }
}

//! Who goes first, and how fast.
//!
//! Owns: the order of what waits, and the rate that ends a checkpoint's replication before the next one is expected. Does not own: the
//! waiting (the engine sleeps), which checkpoint is expected when (the rate learns it from the last two).

use std::time::Duration;

/// What is paced at a time: a training job's own packet waits behind no more than this.
pub const MICRO_CHUNK_BYTES: u64 = 1 << 20;

/// What a file is to its job; lower goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Small, and worth a step each.
    Differential,
    /// A checkpoint that is being saved.
    Base,
    /// It had a copy, whose holder is gone.
    Again,
    /// Its holder looked at its copy and gave it up, because it was bad or because memory was short.
    Scrub,
}

/// One file that waits for its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting<K> {
    pub key: K,
    pub priority: Priority,
    /// Its bytes are final: sending them ends something, where a growing file's may be sent in vain.
    pub sealed: bool,
    pub since: Duration,
}

/// Which of those that wait goes first: by priority, then what is sealed, then the longest waiting. Costs one look at each.
pub fn next_to_send<K: Copy>(waiting: impl IntoIterator<Item = Waiting<K>>) -> Option<K> {
    let first = waiting.into_iter().min_by_key(|waiting| (waiting.priority, !waiting.sealed, waiting.since));
    first.map(|waiting| waiting.key)
}

/// The part of the expected interval within which a checkpoint should be replicated. Less than an upload may take: until then
/// one machine's death costs the checkpoint.
const INTERVAL_USED_PERMILLE: u64 = 500;
/// Below this a copy is at risk for longer than the link is spared.
const RATE_MIN_BYTES_PER_S: u64 = 128 << 20;
/// What may go at once after a pause: ten milliseconds of a link of 50 Gbit/s.
const BURST_BYTES: u64 = 64 << 20;

/// A budget of bytes per second. Without a limit until two checkpoints have been seen.
#[derive(Debug)]
pub struct Rate {
    bytes_per_s: Option<u64>,
    tokens_bytes: u64,
    filled_at: Duration,
    last: Option<Duration>,
    interval: Option<Duration>,
    /// Taken since the last checkpoint was complete, with a limit or without.
    taken_bytes: u64,
    /// What had no copy when it was.
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

    /// A checkpoint is complete and `backlog_bytes`, its own included, have no copy yet. The next one is expected to be as this one was:
    /// what went while it was written goes again while that one is.
    pub fn completed(&mut self, now: Duration, backlog_bytes: u64) {
        let seen = self.last.replace(now).map(|last| now.saturating_sub(last));
        let expected = seen.map(|seen| self.interval.map_or(seen, |before| before.min(seen)));
        self.interval = seen;
        // What was left of the one before goes first; the rest of what was taken are bytes of this one.
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

    /// Somebody waits for it, or a partner was lost: no limit until the next checkpoint.
    pub fn lift(&mut self) {
        self.bytes_per_s = None;
    }

    /// Bytes per second in force; none is no limit.
    #[must_use]
    pub fn bytes_per_s(&self) -> Option<u64> {
        self.bytes_per_s
    }

    /// Takes `bytes`, and says how long to wait before they go. Who takes while others wait comes after them.
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

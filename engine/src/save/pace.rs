//! How fast the drain to Tier-3 may go, so that it ends just before the next checkpoint is expected.
//!
//! Owns: the byte budget and the interval it learns. Does not own: the waiting (the uploader sleeps for as long
//! as [`Pace::claim`] says). Pure: time is an argument.

use std::time::Duration;

/// What may be sent at once after a pause. One S3 part in flight per core is far below it, and a link of
/// 10 Gbit/s needs a fifth of a second for it, so training traffic waits no longer than that.
pub const BURST_BYTES: u64 = 256 << 20;

/// The drain aims to end after this part of the expected interval; the rest is room for a slow store.
const INTERVAL_USED_PERMILLE: u64 = 700;

/// Below this rate pacing would keep a checkpoint volatile for longer than it spares the network.
const RATE_MIN_BYTES_PER_S: u64 = 64 << 20;

/// A token bucket whose rate follows the observed time between checkpoints.
#[derive(Debug)]
pub struct Pace {
    rate_bytes_per_s: Option<u64>,
    tokens_bytes: u64,
    refilled_at: Duration,
    last_save: Option<Duration>,
    interval: Option<Duration>,
}

impl Pace {
    /// Unlimited until an interval has been seen.
    #[must_use]
    pub fn new(now: Duration) -> Self {
        Self {
            rate_bytes_per_s: None,
            tokens_bytes: BURST_BYTES,
            refilled_at: now,
            last_save: None,
            interval: None,
        }
    }

    /// A version of `bytes` became complete: learn the interval, and set the rate that drains `backlog_bytes`
    /// (this version included) in time.
    pub fn version_completed(&mut self, now: Duration, backlog_bytes: u64) {
        if let Some(last) = self.last_save {
            let seen = now.saturating_sub(last);
            // The shorter of the last two counts: finishing early costs bandwidth, finishing late costs safety.
            self.interval = Some(self.interval.map_or(seen, |known| known.min(seen).max(seen / 2)));
        }
        self.last_save = Some(now);
        self.rate_bytes_per_s = self.interval.map(|interval| {
            let usable_ms =
                u64::try_from(interval.as_millis()).unwrap_or(u64::MAX) / 1000 * INTERVAL_USED_PERMILLE;
            (backlog_bytes.saturating_mul(1000) / usable_ms.max(1)).max(RATE_MIN_BYTES_PER_S)
        });
    }

    /// Lifts the limit: somebody waits for the drain (`flush --wait`, SIGTERM), or memory is short.
    pub fn lift(&mut self) {
        self.rate_bytes_per_s = None;
    }

    /// Bytes per second in force; `None` is unlimited.
    #[must_use]
    pub fn rate_bytes_per_s(&self) -> Option<u64> {
        self.rate_bytes_per_s
    }

    /// Takes `bytes` from the budget and says how long to wait before sending them.
    pub fn claim(&mut self, now: Duration, bytes: u64) -> Duration {
        let Some(rate) = self.rate_bytes_per_s else { return Duration::ZERO };
        let elapsed_ms = u64::try_from(now.saturating_sub(self.refilled_at).as_millis()).unwrap_or(u64::MAX);
        let refill = (rate / 1000).saturating_mul(elapsed_ms);
        if refill > 0 {
            self.tokens_bytes = self.tokens_bytes.saturating_add(refill).min(BURST_BYTES);
            self.refilled_at = now;
        }
        if self.tokens_bytes >= bytes {
            self.tokens_bytes -= bytes;
            return Duration::ZERO;
        }
        let short = bytes - self.tokens_bytes;
        self.tokens_bytes = 0;
        let wait = Duration::from_millis(short.saturating_mul(1000) / rate.max(1));
        // The wait pays for what was short, so the bucket counts from its end.
        self.refilled_at = now + wait;
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    #[test]
    fn the_first_version_is_not_held_back() {
        let mut pace = Pace::new(S(0));
        pace.version_completed(S(10), 10 << 30);
        assert_eq!(pace.claim(S(10), 1 << 30), Duration::ZERO);
    }

    #[test]
    fn a_drain_ends_before_the_next_checkpoint_is_due() {
        let mut pace = Pace::new(S(0));
        let version = 60 << 30;
        pace.version_completed(S(0), version);
        pace.version_completed(S(300), version);
        let (mut now, mut sent) = (S(300), 0);
        while sent < version {
            now += pace.claim(now, 8 << 20);
            sent += 8 << 20;
        }
        assert!(now < S(600), "drained at {now:?}");
        assert!(now > S(300 + 150), "but not in one burst: {now:?}");
    }

    #[test]
    fn a_lifted_pace_never_waits() {
        let mut pace = Pace::new(S(0));
        pace.version_completed(S(0), 1 << 40);
        pace.version_completed(S(1), 1 << 40);
        pace.lift();
        assert_eq!(pace.claim(S(1), 1 << 40), Duration::ZERO);
    }
}

//! The rate of the drain to Tier-3, chosen so that it ends just before the next checkpoint is expected.
//!
//! Owns: the byte budget and the learnt interval. Does not own: the waiting (the uploader sleeps for the time that
//! [`Pace::claim`] returns). Pure: time is an argument.

use std::time::Duration;

/// Maximum number of bytes sent at once after a pause: far more than an S3 part in flight per core. A link of
/// 10 Gbit/s needs a fifth of a second for them, so training traffic waits no longer than that.
pub const BURST_BYTES: u64 = 256 << 20;

/// Part of the expected interval in which the drain aims to end; the rest is room for a slow store.
const INTERVAL_USED_PERMILLE: u64 = 700;

/// Lowest rate. A lower one would keep a checkpoint volatile for longer than the network gains by it.
const RATE_MIN_BYTES_PER_S: u64 = 64 << 20;

/// A token bucket whose rate follows the observed time between checkpoints.
#[derive(Debug)]
pub struct Pace {
    rate_bytes_per_s: Option<u64>,
    tokens_bytes: u64,
    refilled_at: Duration,
    last_save: Option<Duration>,
    /// The time between the last two saves.
    interval: Option<Duration>,
}

impl Pace {
    /// Makes a pace that is unlimited until an interval has been seen.
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

    /// Learns the interval from a version that became complete, and sets the rate that drains `backlog_bytes`
    /// (with this version) in time.
    pub fn version_completed(&mut self, now: Duration, backlog_bytes: u64) {
        let seen = self.last_save.map(|last| now.saturating_sub(last));
        // The shorter of the last two counts: finishing early costs bandwidth, finishing late costs safety.
        let expected = seen.map(|seen| self.interval.map_or(seen, |before| before.min(seen)));
        self.last_save = Some(now);
        self.interval = seen;
        self.rate_bytes_per_s = expected.map(|interval| {
            let interval_ms = u64::try_from(interval.as_millis()).unwrap_or(u64::MAX);
            let usable_ms = interval_ms.saturating_mul(INTERVAL_USED_PERMILLE) / 1000;
            (backlog_bytes.saturating_mul(1000) / usable_ms.max(1)).max(RATE_MIN_BYTES_PER_S)
        });
    }

    /// Lifts the limit, because a caller waits for the drain (`flush --wait`, SIGTERM) or memory is short.
    pub fn lift(&mut self) {
        self.rate_bytes_per_s = None;
    }

    /// Returns the limit in bytes per second; `None` is unlimited.
    #[must_use]
    pub fn rate_bytes_per_s(&self) -> Option<u64> {
        self.rate_bytes_per_s
    }

    /// Takes `bytes` from the budget and returns how long to wait before sending them. A claim made while others wait comes
    /// after them, so that any number of claimers together keep to the rate.
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
        let pays_for_short = Duration::from_micros(short.saturating_mul(1_000_000) / rate.max(1));
        // The wait pays for the missing bytes, so the bucket refills from the wait's end. A wait begins where the last one ends.
        self.refilled_at = self.refilled_at.max(now) + pays_for_short;
        self.refilled_at - now
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
    fn parts_that_are_sent_side_by_side_keep_to_the_rate_together() {
        let (mut pace, version, part) = (Pace::new(S(0)), 60 << 30, 8 << 20);
        pace.version_completed(S(0), version);
        pace.version_completed(S(300), version);
        // As the parts in flight do: each claims again when its wait is over.
        let mut due = [S(300); 32];
        let mut sent = 0;
        while sent < version {
            let next = due.iter_mut().min().expect("there are some");
            *next += pace.claim(*next, part);
            sent += part;
        }
        let ended = due.into_iter().max().expect("there are some");
        let most = S(300) + S(300) * 7 / 10;
        assert!(ended <= most, "{ended:?}, at most {most:?}");
        assert!(ended >= most - S(5), "32 at once must not take 32 shares: {ended:?}");
    }

    #[test]
    fn the_shorter_of_the_last_two_intervals_counts_and_no_older_one() {
        let mut pace = Pace::new(S(0));
        let rate = |interval_s: u64| Some((70_u64 << 30) * 1000 / (interval_s * 700));
        for (at_s, expected_s) in
            [(0, None), (10, Some(10)), (110, Some(10)), (210, Some(100)), (260, Some(50))]
        {
            pace.version_completed(S(at_s), 70 << 30);
            assert_eq!(pace.rate_bytes_per_s(), expected_s.and_then(rate), "at {at_s} s");
        }
    }

    #[test]
    fn an_interval_is_used_to_the_millisecond_and_none_at_all_does_no_harm() {
        let mut pace = Pace::new(S(0));
        pace.version_completed(S(0), 1 << 30);
        pace.version_completed(Duration::from_millis(1900), 1 << 30);
        assert_eq!(pace.rate_bytes_per_s(), Some((1 << 30) * 1000 / 1330));
        pace.version_completed(Duration::from_millis(1900), 1 << 30);
        assert_eq!(pace.rate_bytes_per_s(), Some((1 << 30) * 1000), "all at once");
        pace.version_completed(S(10_000_000), 1);
        pace.version_completed(S(20_000_000), 1);
        assert_eq!(pace.rate_bytes_per_s(), Some(RATE_MIN_BYTES_PER_S), "never slower");
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

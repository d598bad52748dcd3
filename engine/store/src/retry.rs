//! Repetition of requests: when, and after which pause.
//!
//! Owns: the bounds on attempts and pauses. Does not own: which answers of a back end may be repeated. Each back
//! end sorts its answers first, because repeating a conditional create blindly can turn a success into a loss.

use std::time::Duration;

/// Exponential backoff with full jitter: the pause before attempt n+1 is uniform in 0..=min(cap, first · 2^n).
/// The ranks of a job, which all fail at the same moment, thus do not all come back at the same moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Maximum number of attempts of a request, the first included.
    pub attempts: u32,
    pub first_pause: Duration,
    pub longest_pause: Duration,
}

impl Default for RetryPolicy {
    /// Six attempts wait 3 s on average and 6.2 s at most. The time is longer than a load balancer's switch, and
    /// short enough that the caller, which repeats whole uploads for as long as it takes, learns of an outage
    /// soon.
    fn default() -> Self {
        Self { attempts: 6, first_pause: Duration::from_millis(200), longest_pause: Duration::from_secs(5) }
    }
}

impl RetryPolicy {
    /// Whether another attempt follows after `done` of them.
    pub(crate) fn may_repeat(&self, done: u32) -> bool {
        done < self.attempts
    }

    /// Waits before the next attempt, after `done` attempts.
    pub(crate) async fn pause(&self, done: u32) {
        tokio::time::sleep(self.pause_after(done, random_fraction())).await;
    }

    fn pause_after(&self, done: u32, fraction: f64) -> Duration {
        let doublings = done.saturating_sub(1).min(20);
        let bound = self.first_pause.saturating_mul(1 << doublings).min(self.longest_pause);
        bound.mul_f64(fraction)
    }
}

/// Returns a number uniform in [0, 1). Without a random source every pause is the longest, which is only slower.
fn random_fraction() -> f64 {
    getrandom::u32().map_or(1.0, |bits| f64::from(bits) / (f64::from(u32::MAX) + 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_the_cap_and_never_beyond() {
        let policy = RetryPolicy::default();
        let bounds: Vec<u128> = (1..=40).map(|n| policy.pause_after(n, 1.0).as_millis()).collect();
        assert_eq!(&bounds[..6], &[200, 400, 800, 1600, 3200, 5000]);
        assert!(bounds[6..].iter().all(|&ms| ms == 5000));
        assert_eq!(policy.pause_after(3, 0.0), Duration::ZERO);
    }
}

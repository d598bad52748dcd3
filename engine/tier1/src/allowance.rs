//! A time limit for activities that cost others: a period at once, and half of all time.
//!
//! Owns: the arithmetic. Does not own: the cost, and who uses the limit.

use std::time::{Duration, Instant};

/// The rest of the allowed time: it shrinks while it is used, and grows with all other time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    at_once: Duration,
    left: Duration,
    since: Instant,
}

impl Allowance {
    /// Makes an allowance of which all of `at_once` may be used from `now` on.
    #[must_use]
    pub fn new(at_once: Duration, now: Instant) -> Self {
        Self { at_once, left: at_once, since: now }
    }

    /// Counts the time until `now` as used.
    pub fn used(&mut self, now: Instant) {
        self.left = self.left.saturating_sub(self.passed(now));
    }

    /// Counts the time until `now` as not used.
    pub fn rested(&mut self, now: Instant) {
        self.left = (self.left + self.passed(now)).min(self.at_once);
    }

    /// Returns how much longer it may be used.
    #[must_use]
    pub fn left(&self) -> Duration {
        self.left
    }

    fn passed(&mut self, now: Instant) -> Duration {
        now.saturating_duration_since(std::mem::replace(&mut self.since, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: Duration = Duration::from_secs(10);

    #[test]
    fn it_ends_with_use_and_comes_back_with_rest() {
        let began = Instant::now();
        let mut allowance = Allowance::new(AT_ONCE, began);
        allowance.used(began + AT_ONCE / 2);
        assert_eq!(allowance.left(), AT_ONCE / 2);
        allowance.used(began + AT_ONCE * 3);
        assert!(allowance.left().is_zero());
        allowance.rested(began + AT_ONCE * 3 + Duration::from_secs(1));
        assert_eq!(allowance.left(), Duration::from_secs(1), "half of all time");
        allowance.rested(began + AT_ONCE * 30);
        assert_eq!(allowance.left(), AT_ONCE, "no more than at the beginning");
    }
}

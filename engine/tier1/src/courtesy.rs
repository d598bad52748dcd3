//! Courtesy of background work, which gives way to programs that make requests.
//!
//! Owns: that a program has made a request, and how long its next one is waited for. Does not own: the share of the time
//! (`allowance`), the work that gives way.
//!
//! The scheduler alone does not do it. At best, it takes a processor at once from work that touches or hashes memory; a program
//! that opens a model makes a dozen requests, and computes in between.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::allowance::Allowance;

/// Longest gap between requests that belong to one action of a program, such as opening a model; for that time work gives way.
pub const QUIET: Duration = Duration::from_millis(5);

/// Number of requests that programs have made.
#[derive(Debug, Default)]
pub struct Asked(AtomicU64);

impl Asked {
    /// Counts a request. Costs a relaxed add.
    pub fn now(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The rule for one kind of work: it gives way for a while at once, and for half of the time, however many requests come.
#[derive(Debug)]
pub struct Courtesy {
    allowance: Allowance,
    seen: u64,
    heard: Option<Instant>,
    gave_way: bool,
}

impl Courtesy {
    pub fn new(at_once: Duration, now: Instant) -> Self {
        Self { allowance: Allowance::new(at_once, now), seen: 0, heard: None, gave_way: false }
    }

    /// Whether the work waits now. Costs a load; to be called often while it waits.
    pub fn gives_way(&mut self, asked: &Asked, now: Instant) -> bool {
        let times = asked.0.load(Ordering::Relaxed);
        if std::mem::replace(&mut self.seen, times) != times {
            self.heard = Some(now);
        }
        if self.gave_way {
            self.allowance.used(now);
        } else {
            self.allowance.rested(now);
        }
        let wanted = self.heard.is_some_and(|heard| now.saturating_duration_since(heard) < QUIET);
        self.gave_way = wanted && !self.allowance.left().is_zero();
        self.gave_way
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: Duration = Duration::from_millis(50);
    const STEP: Duration = Duration::from_millis(1);

    #[test]
    fn work_gives_way_until_requests_no_longer_follow_each_other() {
        let (asked, began) = (Asked::default(), Instant::now());
        let mut courtesy = Courtesy::new(AT_ONCE, began);
        assert!(!courtesy.gives_way(&asked, began), "nobody has asked");
        asked.now();
        assert!(courtesy.gives_way(&asked, began));
        assert!(courtesy.gives_way(&asked, began + QUIET / 2), "the next request is about to come");
        assert!(!courtesy.gives_way(&asked, began + QUIET), "none came");
        asked.now();
        assert!(courtesy.gives_way(&asked, began + 2 * QUIET));
    }

    #[test]
    fn requests_without_end_have_work_wait_for_a_while_and_then_half_of_the_time() {
        let (asked, mut now) = (Asked::default(), Instant::now());
        let mut courtesy = Courtesy::new(AT_ONCE, now);
        let mut waits = |steps: u32| {
            let step = |_: &u32| {
                now += STEP;
                asked.now();
                courtesy.gives_way(&asked, now)
            };
            (0..steps).filter(step).count()
        };
        assert_eq!(waits(50), 50);
        assert_eq!(waits(100), 50, "there was no quiet moment");
    }
}

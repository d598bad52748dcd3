//! When a dead daemon is started again.
//!
//! Owns: the pauses, and when deaths have become a crash loop. Pure: time is an argument. Does not own: starting (`keep`).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Deaths within [`LOOP_WINDOW`] that make a crash loop: five in a row are no accident.
const LOOP_DEATHS: usize = 5;
/// A daemon that lived this long has done its work; what killed it is not what kills it at once.
const LOOP_WINDOW: Duration = Duration::from_secs(5);
/// The pause in a crash loop. Longer helps nobody who waits; shorter fills the log.
const LOOP_PAUSE: Duration = Duration::from_secs(10);

/// The deaths of one keeper's daemons.
#[derive(Debug, Default)]
pub(crate) struct Restart {
    /// Of the last [`LOOP_DEATHS`] daemons: how long each lived.
    lives: VecDeque<Duration>,
    pub(crate) deaths: u64,
}

/// What to do about a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Start again now.
    Now,
    /// It dies again and again: start again after this, and say so.
    CrashLoop { pause: Duration },
}

impl Restart {
    /// A daemon that was started at `started` has died.
    pub(crate) fn died(&mut self, started: Instant, now: Instant) -> Verdict {
        self.deaths += 1;
        if self.lives.len() == LOOP_DEATHS {
            self.lives.pop_front();
        }
        self.lives.push_back(now.saturating_duration_since(started));
        if self.lives.len() == LOOP_DEATHS && self.lives.iter().sum::<Duration>() < LOOP_WINDOW {
            Verdict::CrashLoop { pause: LOOP_PAUSE }
        } else {
            Verdict::Now
        }
    }

    /// Somebody replaced the daemon: what killed the one before says nothing of the next.
    pub(crate) fn replaced(&mut self) {
        self.lives.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_deaths_are_mended_at_once_and_many_quick_ones_are_not() {
        let mut restart = Restart::default();
        let start = Instant::now();
        let quick = start + Duration::from_millis(20);
        for _ in 1..LOOP_DEATHS {
            assert_eq!(restart.died(start, quick), Verdict::Now);
        }
        assert_eq!(restart.died(start, quick), Verdict::CrashLoop { pause: LOOP_PAUSE });
        assert_eq!(restart.died(start, start + LOOP_WINDOW), Verdict::Now, "this one served");
        for _ in 0..LOOP_DEATHS - 2 {
            assert_eq!(restart.died(start, quick), Verdict::Now, "the long life still counts");
        }
        assert_eq!(restart.died(start, quick), Verdict::Now);
        assert!(matches!(restart.died(start, quick), Verdict::CrashLoop { .. }));
        restart.replaced();
        assert_eq!(restart.died(start, quick), Verdict::Now);
    }
}

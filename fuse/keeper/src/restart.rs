//! When a dead daemon is started again.
//!
//! Owns: the pauses, and when deaths have become a crash loop. Pure: time is an argument. Does not own: starting (`keep`).

use std::time::{Duration, Instant};

/// If a daemon served for less, its death counts as a short life: its cause will probably kill the next daemon too.
const SHORT_LIFE: Duration = Duration::from_millis(250);
/// Short lives in a row after which the daemon is restarted without a pause: a job that kills daemons for sport is not a crash loop.
const SHORT_LIVES_MENDED: u32 = 5;
/// The first pause, doubled with every short life, up to the longest: after each of them memory is served for a moment.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Pause from which on the deaths count as a crash loop.
const CRASH_LOOP_PAUSE: Duration = Duration::from_millis(800);

/// The deaths of one keeper's daemons.
#[derive(Debug, Default)]
pub(crate) struct Restart {
    short_lives: u32,
    pub(crate) deaths: u64,
}

/// The reaction to a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The pause before the next start.
    pub(crate) pause: Duration,
    /// Whether daemons die again and again, so that people should look.
    pub(crate) crash_loop: bool,
}

impl Restart {
    /// Counts the death of a daemon that has served since `ready`, or never.
    pub(crate) fn died(&mut self, ready: Option<Instant>, now: Instant) -> Verdict {
        self.deaths += 1;
        let short = ready.is_none_or(|ready| now.saturating_duration_since(ready) < SHORT_LIFE);
        self.short_lives = if short { self.short_lives + 1 } else { 0 };
        let pause = match self.short_lives.checked_sub(SHORT_LIVES_MENDED + 1) {
            None => Duration::ZERO,
            // Seven doublings are beyond the longest pause already.
            Some(doublings) => (FIRST_PAUSE * 2_u32.pow(doublings.min(7))).min(LONGEST_PAUSE),
        };
        Verdict { pause, crash_loop: pause >= CRASH_LOOP_PAUSE }
    }

    /// Notes that a caller replaced the daemon: the cause of earlier deaths says nothing about the new one.
    pub(crate) fn replaced(&mut self) {
        self.short_lives = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_deaths_are_mended_at_once_and_many_quick_ones_ever_later() {
        let mut restart = Restart::default();
        let start = Instant::now();
        let quick = start + Duration::from_millis(20);
        for _ in 0..SHORT_LIVES_MENDED {
            assert_eq!(
                restart.died(Some(start), quick),
                Verdict { pause: Duration::ZERO, crash_loop: false }
            );
        }
        // A daemon that never served counts as a short life however long it took to fail.
        let late = start + 10 * SHORT_LIFE;
        let pauses: Vec<_> = (0..20).map(|_| restart.died(None, late)).collect();
        assert_eq!(pauses[0], Verdict { pause: FIRST_PAUSE, crash_loop: false });
        assert!(pauses.is_sorted_by_key(|verdict| verdict.pause));
        assert_eq!(pauses[19], Verdict { pause: LONGEST_PAUSE, crash_loop: true });
        assert_eq!(restart.died(Some(start), start + SHORT_LIFE).pause, Duration::ZERO, "this one served");
        assert_eq!(restart.deaths, u64::from(SHORT_LIVES_MENDED) + 21);
        for _ in 0..SHORT_LIVES_MENDED {
            assert_eq!(restart.died(Some(start), quick).pause, Duration::ZERO);
        }
        restart.replaced();
        assert_eq!(restart.died(Some(start), quick).pause, Duration::ZERO);
    }
}

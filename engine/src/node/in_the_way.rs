//! Content of others that blocks the next version of a checkpoint: how often in a row, and how long the version after it waits.
//!
//! Owns: the count, the pause. Does not own: what counts as blocked, and what follows for the version (`advance`), the pauses
//! between two tries of one attempt (`run::retry_pause`).
//!
//! A blocked attempt is dead, and its contents are tried again under the next number. The attempt's own pauses do not slow that
//! down, so this one does.

use crate::node::run::retry_pause;
use std::time::Duration;
use tokio::time::Instant;

/// Content of others that blocked versions of one checkpoint, counted since one of its versions last reached Tier-3.
#[derive(Debug, Default)]
pub(crate) struct InTheWay {
    in_a_row: u32,
    /// When the last one was found, and what it was.
    last: Option<(Instant, String)>,
}

/// Returns the pause before the next version after `in_a_row` blocked ones. The first causes none: another coordinator's decision
/// is found at once, and the loser takes the next number immediately. Later pauses are as long as after a failure that may pass.
fn pause_after(in_a_row: u32, longest: Duration) -> Duration {
    in_a_row.checked_sub(2).map_or(Duration::ZERO, |tries| retry_pause(tries, longest))
}

impl InTheWay {
    /// Records that a version was blocked at `now`, for the reason `why`.
    pub(crate) fn came(&mut self, now: Instant, why: String) {
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.last = Some((now, why));
    }

    /// Resets the count, because a version reached Tier-3 or because no version is wanted any more.
    pub(crate) fn ended(&mut self) {
        *self = Self::default();
    }

    /// Whether the next version still has to wait. `longest`: the longest pause allowed now.
    pub(crate) fn waits(&self, longest: Duration, now: Instant) -> bool {
        let pause = pause_after(self.in_a_row, longest);
        self.last.as_ref().is_some_and(|(last, _)| now.saturating_duration_since(*last) < pause)
    }

    /// Whether the version with the next number was blocked, too.
    pub(crate) fn lasts(&self) -> bool {
        self.in_a_row > 1
    }

    /// Returns why a version was blocked last.
    pub(crate) fn why(&self) -> Option<&str> {
        self.last.as_ref().map(|(_, why)| why.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::run::RETRY_LONGEST;

    #[test]
    fn the_first_costs_no_time_and_each_further_one_twice_as_much_up_to_the_longest_pause() {
        let pauses: Vec<_> = (0..20).map(|count| pause_after(count, RETRY_LONGEST).as_millis()).collect();
        assert_eq!(&pauses[..6], &[0, 0, 200, 400, 800, 1600]);
        assert!(pauses[10..].iter().all(|ms| *ms == RETRY_LONGEST.as_millis()), "{pauses:?}");
        let urgent = Duration::from_secs(1);
        assert!((0..20).all(|count| pause_after(count, urgent) <= urgent), "somebody waits");
    }

    #[test]
    fn a_version_in_tier_3_ends_the_pause_and_begins_the_count_anew() {
        let (mut in_the_way, begun) = (InTheWay::default(), Instant::now());
        let waits =
            |way: &InTheWay, after_ms| way.waits(RETRY_LONGEST, begun + Duration::from_millis(after_ms));
        assert!(!waits(&in_the_way, 0) && in_the_way.why().is_none());
        in_the_way.came(begun, "lost".into());
        assert!(!waits(&in_the_way, 0) && !in_the_way.lasts(), "the next number is taken at once");
        in_the_way.came(begun, "lost again".into());
        assert!(waits(&in_the_way, 199) && !waits(&in_the_way, 200));
        assert_eq!((in_the_way.why(), in_the_way.lasts()), (Some("lost again"), true));
        in_the_way.ended();
        in_the_way.came(begun, "lost".into());
        assert!(!waits(&in_the_way, 0) && !in_the_way.lasts());
    }
}

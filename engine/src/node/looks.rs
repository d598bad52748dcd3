//! How much of the loop's time goes into judging checkpoints.
//!
//! Owns: when the loop may judge next. Does not own: which checkpoints are due (`ledger`), the judgement (`decide`).
//!
//! Judging costs a pass over the files of a checkpoint, and a save of many files makes its checkpoint due with each of them. Without a
//! limit the loop judged one save all the time: with 7 saves of 1,000 files that had not settled, it took two thirds of a processor, from
//! the ranks that made the files. Seals, copies and answers do not wait for this.

use std::time::Duration;
use tokio::time::Instant;

/// A pass that took less is free. So a checkpoint of some hundred files is judged as soon as something happens to it.
const FREE: Duration = Duration::from_millis(1);

/// After a longer pass the loop judges nothing for this many times as long: judging takes an eighth of a processor.
const REST_SHARE: u32 = 7;

/// The longest rest: a verdict on a checkpoint of a million files is not to be much later for it.
const REST_MAX: Duration = Duration::from_secs(1);

/// When checkpoints may be judged again.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    not_before: Option<Instant>,
}

impl Looks {
    pub(crate) fn may_begin(&self, now: Instant) -> bool {
        self.wait(now).is_none()
    }

    /// Records a pass over all that was due.
    pub(crate) fn took(&mut self, took: Duration, ended: Instant) {
        self.not_before = (took > FREE).then(|| ended + (took * REST_SHARE).min(REST_MAX));
    }

    /// Returns how long to wait for the next pass; none if it may begin.
    pub(crate) fn wait(&self, now: Instant) -> Option<Duration> {
        self.not_before
            .map(|not_before| not_before.saturating_duration_since(now))
            .filter(|wait| !wait.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn judging_takes_an_eighth_of_the_time_at_most_and_small_checkpoints_do_not_wait() {
        let mut now = Instant::now();
        let begun = now;
        let (mut looks, mut judged) = (Looks::default(), Duration::ZERO);
        let pass = Duration::from_millis(40);
        while now < begun + Duration::from_secs(60) {
            if looks.may_begin(now) {
                now += pass;
                judged += pass;
                looks.took(pass, now);
            }
            now += looks.wait(now).unwrap_or(Duration::from_millis(1)).min(Duration::from_millis(100));
        }
        let share = judged.as_secs_f64() / now.duration_since(begun).as_secs_f64();
        assert!((0.11..=0.13).contains(&share), "{share}");
        looks.took(FREE, now);
        assert!(looks.may_begin(now) && looks.wait(now).is_none());
    }
}

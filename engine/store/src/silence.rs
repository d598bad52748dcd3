//! Silence of a store: whether it gives answers at all.
//!
//! Owns: since when the store gave none, as far as requests have found out. Does not own: the requests, their time limits and their
//! repetition (each back end).
//!
//! A request is repeated for minutes before its caller gets an error. The first request without an answer reports the silence at once.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Time after which a silence is forgotten if no further request met it: without requests nothing is known. Requests are repeated
/// sooner.
const HOLDS: Duration = Duration::from_secs(60);

/// A period in which a store gives no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Silence {
    /// Time when the first request without an answer was sent.
    pub since: Instant,
    /// Time when the last such request ended.
    given_up: Instant,
    pub why: String,
}

/// The results of requests. Each call takes a lock for a moment.
#[derive(Debug, Default)]
pub(super) struct Answers(Mutex<Heard>);

#[derive(Debug, Default)]
struct Heard {
    /// Time of the last answer, whatever it said.
    answered: Option<Instant>,
    silence: Option<Silence>,
}

impl Answers {
    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an answer, of whatever kind.
    pub(super) fn came(&self, now: Instant) {
        let mut heard = self.lock();
        heard.answered = Some(now);
        heard.silence = None;
    }

    /// Records that a request sent at `sent` got no answer in time. If others were answered since, that request is slow, and the store
    /// not silent.
    pub(super) fn given_up(&self, sent: Instant, now: Instant, why: String) {
        let mut heard = self.lock();
        if heard.answered.is_some_and(|answered| answered >= sent) {
            return;
        }
        let since = heard.silence.as_ref().map_or(sent, |silence| silence.since.min(sent));
        heard.silence = Some(Silence { since, given_up: now, why });
    }

    /// Returns the present silence, if there is one.
    pub(super) fn silence(&self, now: Instant) -> Option<Silence> {
        let lasts = |silence: &&Silence| now.saturating_duration_since(silence.given_up) < HOLDS;
        self.lock().silence.as_ref().filter(lasts).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_request_without_an_answer_says_it_until_one_comes() {
        let (answers, begun) = (Answers::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        answers.came(at(1));
        answers.given_up(at(2), at(22), "none".to_owned());
        answers.given_up(at(23), at(43), "none".to_owned());
        assert_eq!(answers.silence(at(50)).map(|silence| silence.since), Some(at(2)));
        answers.came(at(51));
        assert_eq!(answers.silence(at(51)), None);
    }

    #[test]
    fn one_slow_request_among_others_is_no_silence_and_one_that_nobody_meets_is_forgotten() {
        let (answers, begun) = (Answers::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        answers.came(at(10));
        answers.given_up(at(1), at(21), "none".to_owned());
        assert_eq!(answers.silence(at(21)), None, "another one was answered meanwhile");
        answers.given_up(at(11), at(31), "none".to_owned());
        assert!(answers.silence(at(90)).is_some());
        assert_eq!(answers.silence(at(91)), None);
    }
}

//! Whether a store gives answers at all.
//!
//! Owns: since when it gave none, as far as requests have found out. Does not own: the requests, how long each is waited for and how
//! often it is repeated (each back end).
//!
//! A request is repeated for minutes before whoever waits for it hears of a failure. The first one that got no answer says it at once.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A silence that no request has met for so long is forgotten: nobody asks, and so nobody knows. Requests are repeated sooner.
const HOLDS: Duration = Duration::from_secs(60);

/// A store gives no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Silence {
    /// When the first request was sent that got none.
    pub since: Instant,
    /// When the last one was given up.
    given_up: Instant,
    pub why: String,
}

/// The marks that requests leave. Each call takes a lock for a moment.
#[derive(Debug, Default)]
pub(super) struct Answers(Mutex<Heard>);

#[derive(Debug, Default)]
struct Heard {
    /// The last answer, whatever it said.
    answered: Option<Instant>,
    silence: Option<Silence>,
}

impl Answers {
    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An answer came, of whatever kind.
    pub(super) fn came(&self, now: Instant) {
        let mut heard = self.lock();
        heard.answered = Some(now);
        heard.silence = None;
    }

    /// A request that was sent at `sent` is given up. Where others were answered since, that request is slow, and not the store silent.
    pub(super) fn given_up(&self, sent: Instant, now: Instant, why: String) {
        let mut heard = self.lock();
        if heard.answered.is_some_and(|answered| answered >= sent) {
            return;
        }
        let since = heard.silence.as_ref().map_or(sent, |silence| silence.since.min(sent));
        heard.silence = Some(Silence { since, given_up: now, why });
    }

    /// The silence that lasts.
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

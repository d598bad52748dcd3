//! Problems of the last published status, and whether that is too old to be believed.
//!
//! Owns: when the silence of the loop counts, and its words. Does not own: the problems (`api`), publishing them (`publish`).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tidemark_protocol::report::{Problem, ProblemCode, one_line};

/// Age from which the last status says nothing of a loop that hangs. The status is published five times a second, or once a second
/// while it waits for a coordinator.
const SILENT_AFTER: Duration = Duration::from_secs(2);

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct LastTold(Mutex<Option<(Instant, Vec<Problem>)>>);

impl LastTold {
    pub(crate) fn tell(&self, problems: &[Problem], now: Instant) {
        *self.get() = Some((now, problems.to_vec()));
    }

    /// Returns how long the loop has been silent, if that is too long; `None` before the first status.
    pub(crate) fn silence(&self, now: Instant) -> Option<Duration> {
        let for_ = now.saturating_duration_since(self.get().as_ref()?.0);
        (for_ > SILENT_AFTER).then_some(for_)
    }

    /// Returns the problems: the silence, and the earlier problems.
    pub(crate) fn problems(&self, now: Instant) -> Vec<Problem> {
        let silent = self.silence(now).map(|for_| {
            let what = format!(
                "the daemon's loop has not answered for {} s; what else is said was known then",
                for_.as_secs()
            );
            let action = "look at its log and at the load of this machine; its keeper replaces it after 30 s in which requests wait and \
                          nothing explains its silence";
            Problem::new(ProblemCode::NoAnswer, what, action)
        });
        let told = self.get().as_ref().map(|(_, problems)| problems.clone());
        silent.into_iter().chain(told.into_iter().flatten()).collect()
    }

    fn get(&self) -> MutexGuard<'_, Option<(Instant, Vec<Problem>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A problem as a line of `/healthz`: whatever a file is called, it is one.
pub(crate) fn line_of(problem: &Problem) -> String {
    one_line(&format!("{}: {}", problem.code, problem.what)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_forges_no_problem() {
        let problem = Problem::new(ProblemCode::NotCommitted, "run/a\nfenced: x: it failed", "a");
        assert_eq!(line_of(&problem), r"not_committed: run/a\nfenced: x: it failed");
    }

    #[test]
    fn what_was_told_too_long_ago_does_not_pass_for_now() {
        let (told, began) = (LastTold::default(), Instant::now());
        assert!(told.problems(began + SILENT_AFTER * 9).is_empty(), "it has not begun to tell");
        told.tell(&[], began);
        assert_eq!((told.silence(began + SILENT_AFTER), told.problems(began + SILENT_AFTER)), (None, vec![]));
        let late = began + Duration::from_secs(12);
        let problems = told.problems(late);
        assert_eq!((problems.len(), problems[0].code.as_str()), (1, "no_answer"));
        assert!(problems[0].what.contains("12 s"), "{problems:?}");
        let full = Problem::new(ProblemCode::Tier1Full, "w", "a");
        told.tell(std::slice::from_ref(&full), late);
        assert_eq!(told.problems(late), std::slice::from_ref(&full), "it answers again");
        assert_eq!(told.problems(late + SILENT_AFTER * 2).last(), Some(&full), "it is known still");
    }
}

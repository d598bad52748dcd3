//! When what is decided about visibility is asked again.
//!
//! Owns: one moment for each subject, and the process whose end comes before it. Does not own: what an answer is.
//!
//! Most questions read /proc of the whole machine, so each is asked once a second. A job may be started again in a second, too: the end
//! of a process that was waited for is worth a look at once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tidemark_namespace::NodeId;
use tidemark_protocol::recognise::CheckpointId;

/// Between two looks at the same thing.
pub(crate) const ASK_EVERY: Duration = Duration::from_secs(1);

/// What is asked about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    /// Whether a torn checkpoint goes out of sight.
    Torn(CheckpointId),
    /// Whether a committed version can have its names again.
    Owed(CheckpointId),
    /// Whether removals were meant.
    Removals,
    /// Whether a directory in which nothing is goes.
    Unwritten(NodeId),
    /// What the trackers say beside what went out of sight.
    Followers,
    /// The same of what went before this daemon served.
    FollowersOfKept,
    /// What trackers say beside a checkpoint in sight that lacks files.
    Lacking(CheckpointId),
    /// What trackers say that were cut themselves.
    CutTrackers,
}

#[derive(Debug)]
struct Rest {
    until: Instant,
    process: Option<u32>,
}

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct Timetable(BTreeMap<Subject, Rest>);

impl Timetable {
    /// Asks again a second after `now`, or when `process` has ended.
    pub(crate) fn ask_again(&mut self, subject: Subject, now: Instant, process: Option<u32>) {
        self.0.insert(subject, Rest { until: now + ASK_EVERY, process });
    }

    /// Whether it is not asked yet.
    pub(crate) fn rests(&self, subject: &Subject, now: Instant, is_running: impl Fn(u32) -> bool) -> bool {
        self.0.get(subject).is_some_and(|rest| rest.until > now && rest.process.is_none_or(is_running))
    }

    pub(crate) fn forget(&mut self, subject: &Subject) {
        self.0.remove(subject);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_rests_for_a_second_or_until_its_process_ends() {
        let now = Instant::now();
        let (soon, later) = (now + ASK_EVERY / 2, now + ASK_EVERY);
        let mut timetable = Timetable::default();
        let all_run = |_: u32| true;
        assert!(!timetable.rests(&Subject::Removals, now, all_run), "it was not asked yet");
        timetable.ask_again(Subject::Removals, now, Some(7));
        timetable.ask_again(Subject::Unwritten(1), now, None);
        assert!(timetable.rests(&Subject::Removals, soon, all_run));
        assert!(!timetable.rests(&Subject::Removals, soon, |process| process != 7));
        assert!(timetable.rests(&Subject::Unwritten(1), soon, |_| false), "it waits for nobody");
        assert!(!timetable.rests(&Subject::Unwritten(1), later, all_run));
        timetable.forget(&Subject::Removals);
        assert!(!timetable.rests(&Subject::Removals, soon, all_run));
    }
}

//! When each decision about visibility is made again.
//!
//! Owns: one moment for each subject, and the process whose end makes it due earlier. Does not own: the decisions.
//!
//! Most decisions read /proc of the whole machine, so each is made once a second. A job may also be restarted within a second: when
//! a process ends that a decision waits for, the decision is due at once.

use std::collections::BTreeMap;
use std::time::Duration;
use tidemark_namespace::NodeId;
use tidemark_protocol::recognise::CheckpointId;
use tokio::time::Instant;

/// Interval between two decisions about the same subject.
pub(crate) const ASK_EVERY: Duration = Duration::from_secs(1);

/// Subject of a decision about visibility.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    /// Whether a torn checkpoint is hidden.
    Torn(CheckpointId),
    /// Whether a committed version can get its names back.
    Owed(CheckpointId),
    /// Whether removals were meant.
    Removals,
    /// Whether a directory in which nothing was written is removed.
    Unwritten(NodeId),
    /// Content of trackers beside hidden checkpoints.
    Followers,
    /// Content of trackers beside checkpoints that were hidden before this daemon served.
    FollowersOfKept,
    /// Content of trackers beside a visible checkpoint that lacks files.
    Lacking(CheckpointId),
    /// Content of trackers that were cut themselves.
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
    /// Makes the subject due again a second after `now`, or when `process` has ended.
    pub(crate) fn ask_again(&mut self, subject: Subject, now: Instant, process: Option<u32>) {
        self.0.insert(subject, Rest { until: now + ASK_EVERY, process });
    }

    /// Whether the subject is not due yet.
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

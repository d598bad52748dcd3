//! Protection of a resuming job: who may still write a checkpoint, what happens to an empty directory, and what a tracker should
//! contain.
//!
//! Owns: these decisions, with their reasons. Does not own: when a checkpoint is torn and hidden (`visibility`), which processes
//! live (the node).
//!
//! A job that comes back takes the directory with the highest step, or the one that its tracker names. The tracker must therefore
//! name a whole checkpoint. Nothing may happen while a process of the session that wrote it may live: it could be about to write
//! the rest.

use crate::path::CheckpointName;
use crate::recognise::{CheckpointId, TrackerHolds};
use crate::removal::Actor;

/// The facts about the processes of one session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Session {
    /// No process of the session is left.
    Gone,
    /// Process `process` lives, and existed when the checkpoint was torn.
    Alive { process: u32 },
    /// Unknown whether a process lives.
    Doubtful { why: String },
}

impl Session {
    /// Returns the process that is known to live.
    #[must_use]
    pub fn living(&self) -> Option<u32> {
        match self {
            Self::Alive { process } => Some(*process),
            Self::Gone | Self::Doubtful { .. } => None,
        }
    }
}

/// Returns why a process of these sessions may still write; none if no process is left.
#[must_use]
pub fn who_is_left(sessions: &[Session]) -> Option<String> {
    if sessions.is_empty() {
        return Some("who wrote it is not known".to_owned());
    }
    sessions.iter().find_map(|session| match session {
        Session::Gone => None,
        Session::Alive { process } => Some(format!("process {process} of the session that wrote it lives")),
        Session::Doubtful { why } => Some(format!("whether its writers live is not known: {why}")),
    })
}

/// The decision on the directory of a checkpoint without files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unwritten {
    /// The directory is meant to be empty, as far as is known.
    Stays,
    /// Ask again later; at once when this process ends.
    Waits { process: Option<u32> },
    /// The directory leaves the tree, because a job that comes back must not find it.
    Goes { why: String },
}

/// Decides about an empty directory by its maker, and, if the maker failed, by its session: another rank may be about to write.
#[must_use]
pub fn decide_unwritten(maker: Actor, session: impl FnOnce() -> Session) -> Unwritten {
    match maker {
        Actor::Meant | Actor::Lost { .. } => Unwritten::Stays,
        Actor::Alive { process } => Unwritten::Waits { process: Some(process) },
        Actor::Ended => Unwritten::Waits { process: None },
        Actor::Failed { process } => match session() {
            Session::Gone => Unwritten::Goes {
                why: format!("process {process}, which made its directory, failed before it wrote into it"),
            },
            session => Unwritten::Waits { process: session.living() },
        },
    }
}

/// Maximum number of bytes of a tracker that are read: a name has 255.
pub const MAX_TRACKER_BYTES: usize = 4096;

/// A checkpoint that a tracker may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Named<'a> {
    pub directory: &'a CheckpointName,
    pub step: Option<u64>,
}

impl<'a> Named<'a> {
    #[must_use]
    pub fn of(id: &'a CheckpointId, step: Option<u64>) -> Self {
        Self { directory: &id.directory, step }
    }

    /// Whether `content` names this checkpoint.
    #[must_use]
    pub fn is_in(self, holds: TrackerHolds, content: &[u8]) -> bool {
        let word = content.trim_ascii();
        match holds {
            TrackerHolds::Name => word == self.directory.as_bytes(),
            TrackerHolds::Step => {
                let said = std::str::from_utf8(word).ok().and_then(|word| word.parse::<u64>().ok());
                said.is_some() && said == self.step
            }
        }
    }

    /// Returns the content of a tracker that names this checkpoint; none if the tracker needs a step and there is none.
    #[must_use]
    pub fn content(self, holds: TrackerHolds) -> Option<Vec<u8>> {
        match holds {
            TrackerHolds::Name => Some(self.directory.as_bytes().to_vec()),
            TrackerHolds::Step => self.step.map(|step| step.to_string().into_bytes()),
        }
    }
}

/// The decision on a tracker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tracker {
    /// The tracker stays: it names something that exists, or a word that is not ours to judge.
    Stays,
    /// The tracker is served with this content from now on.
    Says(Vec<u8>),
    /// The tracker is hidden: no whole checkpoint exists that it could name.
    Goes,
}

/// Decides the content of a tracker. `content`: its present content; none if its writer was killed in the middle of it. `hidden`:
/// the checkpoint that was just hidden. `whole`: the checkpoint that a job should resume from, if there is one.
#[must_use]
pub fn follow(
    holds: TrackerHolds,
    content: Option<&[u8]>,
    hidden: Option<Named<'_>>,
    whole: Option<Named<'_>>,
) -> Tracker {
    let names_hidden = |content: &[u8]| hidden.is_some_and(|hidden| hidden.is_in(holds, content));
    let stays = |content: &[u8]| !content.trim_ascii().is_empty() && !names_hidden(content);
    if content.is_some_and(stays) {
        return Tracker::Stays;
    }
    match whole.and_then(|whole| whole.content(holds)) {
        Some(says) => Tracker::Says(says),
        None => Tracker::Goes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::{RelPath, RunPath};

    fn id(directory: &str) -> CheckpointId {
        CheckpointId {
            run: RunPath::new(RelPath::new("run").unwrap()).unwrap(),
            directory: CheckpointName::new(directory).unwrap(),
        }
    }

    #[test]
    fn somebody_is_left_while_anybody_of_a_session_may_live() {
        let doubt = Session::Doubtful { why: "its environment cannot be read".into() };
        for stays in [vec![], vec![Session::Gone, Session::Alive { process: 7 }], vec![doubt, Session::Gone]]
        {
            assert!(who_is_left(&stays).is_some(), "{stays:?}");
        }
        assert_eq!(who_is_left(&[Session::Gone, Session::Gone]), None);
    }

    #[test]
    fn an_empty_directory_goes_when_its_maker_failed_and_nobody_is_left_to_fill_it() {
        let failed = Actor::Failed { process: 7 };
        assert!(matches!(decide_unwritten(failed, || Session::Gone), Unwritten::Goes { .. }));
        let doubt = Session::Doubtful { why: "its environment cannot be read".into() };
        for (session, process) in [(Session::Alive { process: 8 }, Some(8)), (doubt, None)] {
            assert_eq!(decide_unwritten(failed, || session), Unwritten::Waits { process });
        }
        assert_eq!(
            decide_unwritten(Actor::Meant, || Session::Gone),
            Unwritten::Stays,
            "mkdir(1) of a person"
        );
        for (waits, process) in [(Actor::Alive { process: 7 }, Some(7)), (Actor::Ended, None)] {
            assert_eq!(decide_unwritten(waits, || Session::Gone), Unwritten::Waits { process });
        }
    }

    #[test]
    fn a_tracker_follows_only_when_it_names_what_went() {
        let (torn, good) = (id("global_step20"), id("global_step10"));
        let (torn, good) = (Named::of(&torn, Some(20)), Named::of(&good, Some(10)));
        let says = |holds, content: &[u8], whole| follow(holds, Some(content), Some(torn), whole);
        let name = TrackerHolds::Name;
        assert_eq!(says(name, b"global_step20\n", Some(good)), Tracker::Says(b"global_step10".into()));
        assert_eq!(says(name, b"", Some(good)), Tracker::Says(b"global_step10".into()));
        assert_eq!(says(name, b"global_step10", Some(good)), Tracker::Stays);
        assert_eq!(says(name, b"my-tag", None), Tracker::Stays);
        assert_eq!(says(name, b"global_step20", None), Tracker::Goes);
        assert_eq!(
            follow(name, None, None, Some(good)),
            Tracker::Says(b"global_step10".into()),
            "half a word"
        );
        assert_eq!(follow(name, Some(b"global_step20"), None, Some(good)), Tracker::Stays);
        let step = TrackerHolds::Step;
        assert_eq!(says(step, b"20", Some(good)), Tracker::Says(b"10".into()));
        assert_eq!(says(step, b"release", Some(good)), Tracker::Stays);
        assert_eq!(says(step, b"99999999999999999999999", Some(good)), Tracker::Stays);
    }
}

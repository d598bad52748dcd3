//! The steps that bring one version to Tier-3: record, upload, prepare, manifest, marker.
//!
//! Owns: the order of the steps, the consequences of a failure, the step at which a restart goes on. Does not own: when a version is
//! complete (`evidence`), the requests and the meaning of a doubtful answer to one (the engine's save path, `marker`).
//!
//! The steps form two phases, and the engine has a job for each. Phase 1 writes the record, the files and the prepared marker. Phase 2
//! writes the manifest and the marker. Both phases may run twice: objects other than the marker have one possible content per key, and
//! the marker is read after every doubtful answer.

use crate::marker::Decision;
use crate::record::{Evidence, Record};
use crate::report::CheckpointState;

/// The point that a version has reached.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    Moving(Phase, Turn),
    /// Phase 1 is done; only evidence is missing.
    Settled,
    Committed,
    /// Aborted by the marker, or withdrawn in favour of a newer version; the number stays used.
    Aborted {
        why: String,
    },
    /// Nothing will make these bytes whole again.
    Failed {
        why: String,
    },
    /// A marker stands in Tier-3, but the marker or its manifest cannot be believed.
    Unreadable {
        why: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Record, files, prepared marker.
    Prepare,
    /// Manifest, marker. From here on the marker may exist although no answer said so: only a read of the marker ends this phase.
    Decide,
}

/// The state of a phase's job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// The phase waits for a place among the attempts in flight.
    Queued,
    /// A job runs the phase.
    Running,
    /// A passing failure stopped the job; the phase waits for a while.
    Paused,
}

/// An event for a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckpointEvent {
    /// There is a place among those in flight.
    TurnCame,
    /// Phase 1 is done: every participant's files are in Tier-3, and their markers say so.
    Prepared,
    /// The marker says commit, of this attempt.
    Committed,
    /// The marker says something else, or another writer used the attempt's number: this attempt can never be committed.
    DecidedOtherwise { why: String },
    /// The job failed in a way that may pass.
    Interrupted,
    /// The pause is over.
    PauseOver,
    /// The job failed for good: the bytes are not what was sealed.
    Spoiled { why: String },
    /// Evidence for a version that was only settled.
    Proven { evidence: Evidence, detail: String },
    /// A newer version of the same checkpoint has evidence.
    Superseded,
    /// A newer version of the same checkpoint is committed.
    Overtaken,
    /// Retention retired the committed version: its retirement record is in Tier-3.
    GivenUp { why: String },
}

/// An action that an event requires; actions are carried out in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointCommand {
    /// Wait for a place among those in flight; then comes `TurnCame`.
    Enqueue,
    /// Begin phase 1.
    Prepare,
    /// Begin phase 2, with the evidence that counts.
    Decide,
    /// Wait a while; then comes `PauseOver`.
    Pause,
    /// The version is committed: the watermark may rise, host copies may be reclaimed.
    Publish,
    /// The attempt needs nothing more: release what it holds.
    Release,
    /// Perhaps no version covers the tree's content now: judge it again.
    LookAgain,
}

/// The treatment of an attempt without a decision; `Committed` or `DecidedOtherwise` follows, as for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Whole and proven: committed, as its coordinator would have done.
    Commit,
    /// Whole without proof: settled again; nothing is done.
    Keep,
    /// Not whole: its bytes were lost with the memory they were in, so it is decided against.
    Abort,
}

/// An event that cannot happen in that state: a broken belief of the caller. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{event:?} came to a version that is {stage}")]
pub struct IllegalCheckpointEvent {
    pub stage: String,
    pub event: CheckpointEvent,
}

/// A version and its progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// The record as it was written.
    record: Record,
    /// Evidence found after a record without evidence.
    later_proof: Option<(Evidence, String)>,
    stage: Stage,
}

impl Checkpoint {
    /// Makes a version whose verdict is complete or settled and whose files are all sealed; `record` lists them.
    pub fn recorded(record: Record, todo: &mut Vec<CheckpointCommand>) -> Self {
        todo.push(CheckpointCommand::Enqueue);
        Self { record, later_proof: None, stage: Stage::Moving(Phase::Prepare, Turn::Queued) }
    }

    /// Makes a version from an attempt that a start with empty memory found in Tier-3 without a decision. `whole`: every participant
    /// is prepared.
    #[must_use]
    pub fn found(record: Record, whole: bool) -> (Self, Found) {
        let (stage, found) = match (whole, record.evidence.commits()) {
            (true, true) => (Stage::Moving(Phase::Decide, Turn::Running), Found::Commit),
            (true, false) => (Stage::Settled, Found::Keep),
            (false, _) => (Stage::Moving(Phase::Prepare, Turn::Running), Found::Abort),
        };
        (Self { record, later_proof: None, stage }, found)
    }

    /// Makes a version whose marker was found.
    #[must_use]
    pub fn decided(record: Record, decision: Decision) -> Self {
        let stage = match decision {
            Decision::Commit => Stage::Committed,
            Decision::Abort => Stage::Aborted { why: "it was decided against".to_owned() },
        };
        Self { record, later_proof: None, stage }
    }

    /// Makes a version that was decided, but whose decision can no longer be read from Tier-3. Because the version may have been
    /// committed, it stays an error until it is removed. The record may be empty.
    #[must_use]
    pub fn unreadable(record: Record, why: String) -> Self {
        Self { record, later_proof: None, stage: Stage::Unreadable { why } }
    }

    /// Returns the record as it was written; better evidence may have been found since.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Returns the evidence that counts and that the manifest will name: the record's, or later evidence if the record has none.
    #[must_use]
    pub fn evidence(&self) -> (Evidence, &str) {
        let later = self.later_proof.as_ref().map(|(evidence, detail)| (*evidence, detail.as_str()));
        later.unwrap_or((self.record.evidence, &self.record.evidence_detail))
    }

    /// Whether evidence proves that the version is whole.
    #[must_use]
    pub fn is_proven(&self) -> bool {
        self.evidence().0.commits()
    }

    /// Whether the version may still become committed.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        matches!(self.stage, Stage::Moving(..) | Stage::Settled)
    }

    #[must_use]
    pub fn is_committed(&self) -> bool {
        self.stage == Stage::Committed
    }

    /// Whether every byte of the version is in Tier-3.
    #[must_use]
    pub fn is_prepared(&self) -> bool {
        matches!(self.stage, Stage::Settled | Stage::Moving(Phase::Decide, _) | Stage::Committed)
    }

    /// Whether a job runs a phase of the version.
    #[must_use]
    pub fn is_running(&self) -> bool {
        matches!(self.stage, Stage::Moving(_, Turn::Running))
    }

    /// Whether the same contents may be tried again, as the next version.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        matches!(self.stage, Stage::Aborted { .. })
    }

    /// Returns why nothing will make the bytes whole again, if so.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        match &self.stage {
            Stage::Failed { why } => Some(why),
            _ => None,
        }
    }

    /// Returns why the marker or the manifest is not believed, if so.
    #[must_use]
    pub fn why_unreadable(&self) -> Option<&str> {
        match &self.stage {
            Stage::Unreadable { why } => Some(why),
            _ => None,
        }
    }

    /// Returns the state as people are shown it.
    #[must_use]
    pub fn state(&self) -> CheckpointState {
        match &self.stage {
            Stage::Committed => CheckpointState::Committed,
            Stage::Aborted { .. } | Stage::Failed { .. } | Stage::Unreadable { .. } => CheckpointState::Torn,
            Stage::Moving(..) | Stage::Settled if !self.is_proven() => CheckpointState::Settled,
            Stage::Moving(Phase::Prepare, _) => CheckpointState::Complete,
            Stage::Settled | Stage::Moving(Phase::Decide, _) => CheckpointState::Prepared,
        }
    }

    /// Applies one event.
    ///
    /// # Errors
    /// [`IllegalCheckpointEvent`] if the event cannot happen in this state; then nothing has changed.
    pub fn step(
        &mut self,
        event: CheckpointEvent,
        todo: &mut Vec<CheckpointCommand>,
    ) -> Result<(), IllegalCheckpointEvent> {
        use CheckpointCommand as Do;
        use CheckpointEvent as Event;
        use Phase::{Decide, Prepare};
        use Stage::{Moving, Settled};
        use Turn::{Paused, Queued, Running};
        let next = match (self.stage.clone(), event) {
            (Moving(phase, Queued), Event::TurnCame) => {
                todo.push(match phase {
                    Prepare => Do::Prepare,
                    Decide => Do::Decide,
                });
                Moving(phase, Running)
            }
            (Moving(Prepare, Running), Event::Prepared) if self.is_proven() => {
                todo.push(Do::Enqueue);
                Moving(Decide, Queued)
            }
            (Moving(Prepare, Running), Event::Prepared) => Settled,
            (Moving(Decide, Running), Event::Committed) => {
                todo.extend([Do::Publish, Do::Release, Do::LookAgain]);
                Stage::Committed
            }
            (Moving(_, Running), Event::DecidedOtherwise { why }) => {
                todo.extend([Do::Release, Do::LookAgain]);
                Stage::Aborted { why }
            }
            (Moving(_, Running), Event::Spoiled { why }) => {
                todo.push(Do::Release);
                Stage::Failed { why }
            }
            (Moving(phase, Running), Event::Interrupted) => {
                todo.push(Do::Pause);
                Moving(phase, Paused)
            }
            (Moving(phase, Paused), Event::PauseOver) => {
                todo.push(Do::Enqueue);
                Moving(phase, Queued)
            }
            (stage @ (Moving(Prepare, _) | Settled), Event::Proven { evidence, detail })
                if !self.is_proven() && evidence.commits() =>
            {
                self.later_proof = Some((evidence, detail));
                if stage == Settled {
                    todo.push(Do::Enqueue);
                    Moving(Decide, Queued)
                } else {
                    // The running job goes on; the evidence is checked when it ends.
                    stage
                }
            }
            // The attempt's pins would keep bytes that no name refers to any more. A running job is never cancelled, and an attempt
            // that may already be committed is not withdrawn.
            (Moving(Prepare, Queued | Paused), Event::Superseded | Event::Overtaken)
            | (Settled, Event::Overtaken) => {
                todo.push(Do::Release);
                Stage::Aborted { why: "a newer version of the same checkpoint took its place".to_owned() }
            }
            (stage, Event::Superseded | Event::Overtaken) => stage,
            // Only the number stays used.
            (Stage::Committed, Event::GivenUp { why }) => {
                todo.push(Do::Release);
                Stage::Aborted { why }
            }
            (stage, event) => {
                return Err(IllegalCheckpointEvent { stage: format!("{stage:?}"), event });
            }
        };
        self.stage = next;
        Ok(())
    }
}

#[cfg(test)]
#[path = "checkpoint_test.rs"]
mod tests;

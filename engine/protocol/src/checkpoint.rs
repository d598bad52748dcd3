//! One version on its way to Tier-3: record, upload, prepare, manifest, marker.
//!
//! Owns: which step follows which, what a failure leads to, what a restart goes on with. Does not own: when a version
//! is complete (`evidence`), the requests and what a doubtful answer to one means (the engine's save path, `marker`).
//!
//! The way has two phases, and the engine has a job for each: phase 1 writes the record, the files and the prepared
//! marker; phase 2 the manifest and the marker. Both may be run twice: objects other than the marker have one possible
//! content per key, and the marker is read after every answer that does not say.

use crate::marker::Decision;
use crate::record::{Evidence, Record};
use crate::report::CheckpointState;

/// Where a version stands.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    Moving(Phase, Turn),
    /// Phase 1 is done; only evidence is missing.
    Settled,
    Committed,
    /// Decided otherwise, or given up for a newer one; the number is used.
    Aborted {
        why: String,
    },
    /// Nothing will make these bytes whole again.
    Failed {
        why: String,
    },
    /// A marker stands in Tier-3, and what it says, or its manifest, cannot be believed.
    Unreadable {
        why: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Record, files, prepared marker.
    Prepare,
    /// Manifest, marker. From here the marker may stand although nobody heard so: only it ends this.
    Decide,
}

/// Who has a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// It waits for a place among those in flight.
    Queued,
    /// A job has it.
    Running,
    /// Something failed that may pass; it waits a while.
    Paused,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckpointEvent {
    /// There is a place among those in flight.
    TurnCame,
    /// Phase 1 is done: every participant's files are in Tier-3, and their markers say so.
    Prepared,
    /// The marker says commit, of this attempt.
    Committed,
    /// The marker says something else, or the attempt's number is another writer's: this attempt never will.
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
    /// It was committed, and retention let go of it: its retirement stands in Tier-3.
    GivenUp { why: String },
}

/// What has to be done, in order.
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
    /// Nothing is done for this attempt any more: let go of what it keeps.
    Release,
    /// What the tree holds may be covered by no version now: look at it again.
    LookAgain,
}

/// What is done with an attempt that nobody decided; then comes `Committed` or `DecidedOtherwise`, as for a job.
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

/// One version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// As it was written.
    record: Record,
    /// What came after a record that proves nothing.
    later_proof: Option<(Evidence, String)>,
    stage: Stage,
}

impl Checkpoint {
    /// The verdict is complete or settled, every file is sealed, and this is the list of them.
    pub fn recorded(record: Record, todo: &mut Vec<CheckpointCommand>) -> Self {
        todo.push(CheckpointCommand::Enqueue);
        Self { record, later_proof: None, stage: Stage::Moving(Phase::Prepare, Turn::Queued) }
    }

    /// An attempt that a start with empty memory found in Tier-3 without a decision. `whole`: every participant is
    /// prepared.
    #[must_use]
    pub fn found(record: Record, whole: bool) -> (Self, Found) {
        let (stage, found) = match (whole, record.evidence.commits()) {
            (true, true) => (Stage::Moving(Phase::Decide, Turn::Running), Found::Commit),
            (true, false) => (Stage::Settled, Found::Keep),
            (false, _) => (Stage::Moving(Phase::Prepare, Turn::Running), Found::Abort),
        };
        (Self { record, later_proof: None, stage }, found)
    }

    /// A version whose marker was found.
    #[must_use]
    pub fn decided(record: Record, decision: Decision) -> Self {
        let stage = match decision {
            Decision::Commit => Stage::Committed,
            Decision::Abort => Stage::Aborted { why: "it was decided against".to_owned() },
        };
        Self { record, later_proof: None, stage }
    }

    /// A version that was decided, and of which Tier-3 does not say what any more. It may have been committed: it is an error until it
    /// is removed. The record may be empty.
    #[must_use]
    pub fn unreadable(record: Record, why: String) -> Self {
        Self { record, later_proof: None, stage: Stage::Unreadable { why } }
    }

    /// The record as it was written; its evidence may have been bettered since.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// The evidence that counts, and the manifest's: the record's, or what came after a record without.
    #[must_use]
    pub fn evidence(&self) -> (Evidence, &str) {
        let later = self.later_proof.as_ref().map(|(evidence, detail)| (*evidence, detail.as_str()));
        later.unwrap_or((self.record.evidence, &self.record.evidence_detail))
    }

    /// Whether something proves that it is whole.
    #[must_use]
    pub fn is_proven(&self) -> bool {
        self.evidence().0.commits()
    }

    /// Whether it may still become committed.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        matches!(self.stage, Stage::Moving(..) | Stage::Settled)
    }

    #[must_use]
    pub fn is_committed(&self) -> bool {
        self.stage == Stage::Committed
    }

    /// Whether every byte of it is in Tier-3.
    #[must_use]
    pub fn is_prepared(&self) -> bool {
        matches!(self.stage, Stage::Settled | Stage::Moving(Phase::Decide, _) | Stage::Committed)
    }

    /// Whether a job has it.
    #[must_use]
    pub fn is_running(&self) -> bool {
        matches!(self.stage, Stage::Moving(_, Turn::Running))
    }

    /// Whether the same contents may be tried again, as the next version.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        matches!(self.stage, Stage::Aborted { .. })
    }

    /// Why nothing will make its bytes whole again.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        match &self.stage {
            Stage::Failed { why } => Some(why),
            _ => None,
        }
    }

    /// Why its marker or manifest is not believed.
    #[must_use]
    pub fn why_unreadable(&self) -> Option<&str> {
        match &self.stage {
            Stage::Unreadable { why } => Some(why),
            _ => None,
        }
    }

    /// The word for people.
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

    /// Takes one event.
    ///
    /// # Errors
    /// [`IllegalCheckpointEvent`] for what cannot happen here; nothing has changed then.
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
                    // Whoever has the phase goes on; its end looks at the evidence.
                    stage
                }
            }
            // Its pins would keep bytes that no name leads to any more. What a job has is never cancelled, and what
            // may stand committed already is not given up.
            (Moving(Prepare, Queued | Paused), Event::Superseded | Event::Overtaken)
            | (Settled, Event::Overtaken) => {
                todo.push(Do::Release);
                Stage::Aborted { why: "a newer version of the same checkpoint took its place".to_owned() }
            }
            (stage, Event::Superseded | Event::Overtaken) => stage,
            // Only its number is left.
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

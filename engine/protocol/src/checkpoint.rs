//! One version on its way to Tier-3: record, upload, prepare, manifest, marker; and out again.
//!
//! Owns: which step follows which, what a doubtful answer leads to, and what a restart resumes. Does not own: when a
//! version is complete (`evidence`), the requests (the engine's save path).
//!
//! Every command may be carried out twice: objects other than the marker have one possible content per key, and the
//! marker is read after every answer that does not say.

use crate::id::{ContentHash, Incarnation};
use crate::manifest::Prepared;
use crate::marker::{Decision, MarkerOutcome};
use crate::record::{Evidence, Record};
use std::collections::BTreeSet;
use std::fmt;

/// How often the marker is tried before the version waits for the store to be heard again.
pub const MAX_MARKER_TRIES: u32 = 8;

/// Where a version stands.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    Open,
    Torn {
        why: String,
    },
    /// The record is being written.
    Recording,
    Uploading,
    /// This node's marker is being written.
    Preparing,
    /// This node is prepared; the others, or evidence, are awaited.
    Prepared,
    Joining,
    Deciding {
        decision: Decision,
        tries: u32,
    },
    /// The tries are used up; the decision is not known.
    Doubtful {
        decision: Decision,
    },
    Committed,
    /// Decided otherwise: aborted, or another attempt's commit.
    Given {
        why: String,
    },
    Retiring,
    Retired,
}

/// The word for where a version stands, in `ls` and in metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CheckpointState {
    Open,
    Settled,
    Torn,
    Complete,
    Prepared,
    Committed,
    Aborted,
    Retired,
}

impl fmt::Display for CheckpointState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Settled => "settled",
            Self::Torn => "torn",
            Self::Complete => "complete",
            Self::Prepared => "prepared",
            Self::Committed => "committed",
            Self::Aborted => "aborted",
            Self::Retired => "retired",
        })
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckpointEvent {
    /// The verdict is complete or settled, every file is sealed, and this is the list of them.
    Recorded(Box<Record>),
    /// The verdict is torn.
    Torn {
        why: String,
    },
    /// Evidence for a version that was only settled.
    Proven {
        evidence: Evidence,
        detail: String,
    },
    /// A listed file was opened for writing, or a new file arrived.
    Changed,
    RecordWritten,
    /// Every file of this node is in Tier-3.
    Uploaded,
    /// A participant's prepared marker is in Tier-3; this node's own too.
    ParticipantPrepared(Incarnation),
    ManifestWritten(ContentHash),
    /// The marker was created, or was read after an answer that did not say.
    Marker(MarkerOutcome),
    /// The store answers again.
    StoreIsBack,
    /// Somebody gives the version up before it is decided.
    GiveUp {
        why: String,
    },
    /// Retention gives a committed version up; pins and holds were checked.
    Retire,
    RetiredWritten,
}

/// What has to be done, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckpointCommand {
    WriteRecord,
    Upload,
    WritePrepared,
    /// Join the prepared markers, write the manifest under its hash.
    WriteManifest,
    /// Create `_COMMITTED`; on any answer but "created", read it and apply [`crate::marker::doubt`].
    CreateMarker(Decision),
    /// The version is committed: the watermark may rise, host copies may be reclaimed.
    PublishCommit,
    /// What is written from now on belongs to the next version; the bytes of this one are kept as sealed.
    BeginNextVersion,
    WriteRetired,
    /// Move the boundary, delete the data, then the manifest. The markers stay.
    DeleteData,
    /// Sweep what the attempt left, its marker excepted.
    SweepAttempt,
}

/// An event that cannot happen in that state: a broken belief of the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{event} came to a version that is {state}")]
pub struct IllegalCheckpointEvent {
    pub state: CheckpointState,
    pub event: String,
}

/// One version, as its coordinator and one participant see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    me: Incarnation,
    stage: Stage,
    record: Option<Box<Record>>,
    /// What proves it complete: the record's evidence, or what came after a settled record.
    proof: Option<(Evidence, String)>,
    prepared: BTreeSet<Incarnation>,
    manifest: Option<ContentHash>,
}

impl Checkpoint {
    #[must_use]
    pub fn new(me: Incarnation) -> Self {
        let prepared = BTreeSet::new();
        Self { me, stage: Stage::Open, record: None, proof: None, prepared, manifest: None }
    }

    /// Goes on with an attempt that a restart or a new coordinator found in Tier-3: its record, the prepared markers,
    /// and the decision if there is one. Never from what merely happens to be there.
    pub fn resume(
        me: Incarnation,
        record: Record,
        prepared: &[Prepared],
        decision: Option<Decision>,
        todo: &mut Vec<CheckpointCommand>,
    ) -> Self {
        let mut version = Self::new(me);
        version.prepared = prepared.iter().map(|marker| marker.life.incarnation).collect();
        version.proof = record.evidence.commits().then(|| (record.evidence, record.evidence_detail.clone()));
        version.record = Some(Box::new(record));
        match decision {
            Some(Decision::Commit) => {
                version.stage = Stage::Committed;
                todo.push(CheckpointCommand::PublishCommit);
            }
            Some(Decision::Abort) => {
                version.stage = Stage::Given { why: "it was aborted".into() };
                todo.push(CheckpointCommand::SweepAttempt);
            }
            None if version.prepared.contains(&me) || !version.participates() => {
                version.stage = Stage::Prepared;
                version.advance(todo);
            }
            None => {
                version.stage = Stage::Uploading;
                todo.push(CheckpointCommand::Upload);
            }
        }
        version
    }

    #[must_use]
    pub fn state(&self) -> CheckpointState {
        match &self.stage {
            Stage::Open => CheckpointState::Open,
            Stage::Torn { .. } => CheckpointState::Torn,
            Stage::Committed | Stage::Retiring => CheckpointState::Committed,
            Stage::Given { .. } => CheckpointState::Aborted,
            Stage::Retired => CheckpointState::Retired,
            _ if self.proof.is_none() => CheckpointState::Settled,
            Stage::Recording | Stage::Uploading | Stage::Preparing => CheckpointState::Complete,
            Stage::Prepared | Stage::Joining | Stage::Deciding { .. } | Stage::Doubtful { .. } => {
                CheckpointState::Prepared
            }
        }
    }

    #[must_use]
    pub fn record(&self) -> Option<&Record> {
        self.record.as_deref()
    }

    /// The evidence that the manifest shall carry.
    #[must_use]
    pub fn proof(&self) -> Option<(Evidence, &str)> {
        self.proof.as_ref().map(|(evidence, detail)| (*evidence, detail.as_str()))
    }

    #[must_use]
    pub fn manifest(&self) -> Option<ContentHash> {
        self.manifest
    }

    /// Why it is torn or given up.
    #[must_use]
    pub fn why(&self) -> Option<&str> {
        match &self.stage {
            Stage::Torn { why } | Stage::Given { why } => Some(why),
            _ => None,
        }
    }

    /// Takes one event. What comes twice, or too late to matter, is absorbed.
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
        match (&mut self.stage, event) {
            (Stage::Open | Stage::Torn { .. }, Event::Recorded(record)) => {
                self.proof =
                    record.evidence.commits().then(|| (record.evidence, record.evidence_detail.clone()));
                self.record = Some(record);
                self.stage = Stage::Recording;
                todo.push(Do::WriteRecord);
            }
            (Stage::Open | Stage::Torn { .. }, Event::Torn { why }) => self.stage = Stage::Torn { why },
            (Stage::Torn { .. }, Event::Changed) => self.stage = Stage::Open,
            // The record lists seals, and their bytes are kept: the version goes on, the change is the next one's.
            (stage, Event::Changed) if !matches!(stage, Stage::Open) => todo.push(Do::BeginNextVersion),
            (stage, Event::Proven { evidence, detail })
                if self.proof.is_none()
                    && evidence.commits()
                    && !matches!(stage, Stage::Open | Stage::Torn { .. }) =>
            {
                self.proof = Some((evidence, detail));
                self.advance(todo);
            }
            (Stage::Recording, Event::RecordWritten) => {
                if self.participates() {
                    self.stage = Stage::Uploading;
                    todo.push(Do::Upload);
                } else {
                    self.stage = Stage::Prepared;
                    self.advance(todo);
                }
            }
            (Stage::Uploading, Event::Uploaded) => {
                self.stage = Stage::Preparing;
                todo.push(Do::WritePrepared);
            }
            (_, Event::ParticipantPrepared(life)) => {
                self.prepared.insert(life);
                if life == self.me && matches!(self.stage, Stage::Uploading | Stage::Preparing) {
                    self.stage = Stage::Prepared;
                }
                self.advance(todo);
            }
            (Stage::Joining, Event::ManifestWritten(hash)) => {
                self.manifest = Some(hash);
                self.decide(Decision::Commit, todo);
            }
            (Stage::Deciding { decision, .. } | Stage::Doubtful { decision }, Event::Marker(outcome)) => {
                let decision = *decision;
                self.outcome(decision, outcome, todo);
            }
            (Stage::Doubtful { decision }, Event::StoreIsBack) => {
                let decision = *decision;
                self.decide(decision, todo);
            }
            // A commit whose answer is not known may stand already: the abort's own answer tells.
            (
                Stage::Recording
                | Stage::Uploading
                | Stage::Preparing
                | Stage::Prepared
                | Stage::Joining
                | Stage::Deciding { .. }
                | Stage::Doubtful { .. },
                Event::GiveUp { .. },
            ) => self.decide(Decision::Abort, todo),
            (stage @ (Stage::Open | Stage::Torn { .. }), Event::GiveUp { why }) => {
                *stage = Stage::Given { why }
            }
            (Stage::Committed, Event::Retire) => {
                self.stage = Stage::Retiring;
                todo.push(Do::WriteRetired);
            }
            (Stage::Retiring, Event::RetiredWritten) => {
                self.stage = Stage::Retired;
                todo.push(Do::DeleteData);
            }
            // A version is retired only after it was committed.
            (stage, event @ (Event::Retire | Event::RetiredWritten))
                if !matches!(stage, Stage::Retiring | Stage::Retired) =>
            {
                return Err(IllegalCheckpointEvent { state: self.state(), event: format!("{event:?}") });
            }
            (Stage::Open | Stage::Torn { .. }, event @ (Event::ManifestWritten(_) | Event::Marker(_))) => {
                return Err(IllegalCheckpointEvent { state: self.state(), event: format!("{event:?}") });
            }
            // Reports that come again, or after the version was decided.
            _ => {}
        }
        Ok(())
    }

    fn participates(&self) -> bool {
        let record = self.record.as_ref();
        record.is_some_and(|record| record.participants.iter().any(|life| life.incarnation == self.me))
    }

    /// Phase 2 begins when every participant is prepared and the version may be committed.
    fn advance(&mut self, todo: &mut Vec<CheckpointCommand>) {
        let Some(record) = &self.record else { return };
        let all = record.participants.iter().all(|life| self.prepared.contains(&life.incarnation));
        if self.stage == Stage::Prepared && all && self.proof.is_some() {
            self.stage = Stage::Joining;
            todo.push(CheckpointCommand::WriteManifest);
        }
    }

    fn decide(&mut self, decision: Decision, todo: &mut Vec<CheckpointCommand>) {
        self.stage = Stage::Deciding { decision, tries: 1 };
        todo.push(CheckpointCommand::CreateMarker(decision));
    }

    fn outcome(&mut self, decision: Decision, outcome: MarkerOutcome, todo: &mut Vec<CheckpointCommand>) {
        let mine = self.record.as_ref().map(|record| record.attempt);
        match outcome {
            MarkerOutcome::Mine if decision == Decision::Commit => {
                self.stage = Stage::Committed;
                todo.push(CheckpointCommand::PublishCommit);
            }
            MarkerOutcome::Mine => {
                self.stage = Stage::Given { why: "it was aborted".into() };
                todo.push(CheckpointCommand::SweepAttempt);
            }
            // The abort came after my own commit, whose answer was lost.
            MarkerOutcome::Lost { decision: Decision::Commit, attempt, .. } if Some(attempt) == mine => {
                self.stage = Stage::Committed;
                todo.push(CheckpointCommand::PublishCommit);
            }
            MarkerOutcome::Lost { decision, attempt, epoch } => {
                let why = format!("epoch {epoch} decided to {decision} attempt {attempt}");
                self.stage = Stage::Given { why };
                todo.push(CheckpointCommand::SweepAttempt);
            }
            MarkerOutcome::Absent => match self.stage {
                Stage::Deciding { tries, .. } if tries < MAX_MARKER_TRIES => {
                    self.stage = Stage::Deciding { decision, tries: tries + 1 };
                    todo.push(CheckpointCommand::CreateMarker(decision));
                }
                _ => self.stage = Stage::Doubtful { decision },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{AttemptId, Epoch};
    use crate::record::tests::record;
    use CheckpointCommand as Do;
    use CheckpointEvent as Event;
    use proptest::prelude::*;

    const ME: Incarnation = Incarnation(7);
    const HASH: ContentHash = ContentHash([1; 32]);

    fn recorded(evidence: Evidence) -> Event {
        Event::Recorded(Box::new(Record { evidence, ..record() }))
    }

    fn run(events: &[Event]) -> (Checkpoint, Vec<Do>) {
        let (mut version, mut todo) = (Checkpoint::new(ME), Vec::new());
        for event in events {
            version.step(event.clone(), &mut todo).unwrap();
        }
        (version, todo)
    }

    fn to_marker(evidence: Evidence) -> Vec<Event> {
        let prepared = Event::ParticipantPrepared(ME);
        vec![
            recorded(evidence),
            Event::RecordWritten,
            Event::Uploaded,
            prepared,
            Event::ManifestWritten(HASH),
        ]
    }

    #[test]
    fn a_version_is_committed_step_by_step() {
        let mut events = to_marker(Evidence::Index);
        events.push(Event::Marker(MarkerOutcome::Mine));
        let (version, todo) = run(&events);
        assert_eq!(version.state(), CheckpointState::Committed);
        let commit = Do::CreateMarker(Decision::Commit);
        let steps =
            [Do::WriteRecord, Do::Upload, Do::WritePrepared, Do::WriteManifest, commit, Do::PublishCommit];
        assert_eq!(todo, steps);
    }

    #[test]
    fn quiescence_prepares_and_evidence_commits() {
        let (mut version, mut todo) = run(&to_marker(Evidence::Quiescence));
        assert_eq!(version.state(), CheckpointState::Settled);
        assert!(!todo.contains(&Do::WriteManifest));
        let proof = Event::Proven { evidence: Evidence::Succeeded, detail: String::new() };
        version.step(proof, &mut todo).unwrap();
        assert_eq!((version.state(), todo.last()), (CheckpointState::Prepared, Some(&Do::WriteManifest)));
    }

    #[test]
    fn a_doubtful_marker_is_tried_again_but_not_for_ever() {
        let mut events = to_marker(Evidence::Index);
        events.extend(vec![Event::Marker(MarkerOutcome::Absent); 20]);
        let (mut version, mut todo) = run(&events);
        let tries = todo.iter().filter(|command| matches!(command, Do::CreateMarker(_))).count();
        assert_eq!(tries, MAX_MARKER_TRIES as usize);
        version.step(Event::StoreIsBack, &mut todo).unwrap();
        assert_eq!(todo.last(), Some(&Do::CreateMarker(Decision::Commit)));
    }

    #[test]
    fn an_abort_that_finds_its_own_commit_is_a_commit() {
        let mut events = to_marker(Evidence::Index);
        let found = |attempt| MarkerOutcome::Lost { decision: Decision::Commit, attempt, epoch: Epoch(1) };
        events.push(Event::GiveUp { why: "drain".into() });
        let (version, _) = run(&[&events[..], &[Event::Marker(found(AttemptId(5)))]].concat());
        assert_eq!(version.state(), CheckpointState::Committed);
        let (version, todo) = run(&[&events[..], &[Event::Marker(found(AttemptId(6)))]].concat());
        assert_eq!((version.state(), todo.last()), (CheckpointState::Aborted, Some(&Do::SweepAttempt)));
    }

    #[test]
    fn a_change_after_the_record_is_the_next_version() {
        let (version, todo) = run(&[recorded(Evidence::Index), Event::Changed]);
        assert_eq!((version.state(), todo.last()), (CheckpointState::Complete, Some(&Do::BeginNextVersion)));
    }

    #[test]
    fn a_restart_goes_on_where_tier_3_says() {
        let mut todo = Vec::new();
        let version = Checkpoint::resume(ME, record(), &[], None, &mut todo);
        assert_eq!((version.state(), &todo[..]), (CheckpointState::Complete, &[Do::Upload][..]));
        todo.clear();
        let prepared = crate::manifest::tests::prepared(&record());
        Checkpoint::resume(ME, record(), &[prepared], None, &mut todo);
        assert_eq!(todo, [Do::WriteManifest]);
        todo.clear();
        let version = Checkpoint::resume(ME, record(), &[], Some(Decision::Abort), &mut todo);
        assert_eq!((version.state(), &todo[..]), (CheckpointState::Aborted, &[Do::SweepAttempt][..]));
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let outcome = prop_oneof![
            Just(MarkerOutcome::Mine),
            Just(MarkerOutcome::Absent),
            (any::<bool>(), 4_u64..7).prop_map(|(commit, attempt)| MarkerOutcome::Lost {
                decision: if commit { Decision::Commit } else { Decision::Abort },
                attempt: AttemptId(attempt),
                epoch: Epoch(2),
            }),
        ];
        let event = prop_oneof![
            Just(recorded(Evidence::Index)),
            Just(recorded(Evidence::Quiescence)),
            Just(Event::RecordWritten),
            Just(Event::Uploaded),
            Just(Event::ParticipantPrepared(ME)),
            Just(Event::ManifestWritten(HASH)),
            outcome.prop_map(Event::Marker),
            Just(Event::StoreIsBack),
            Just(Event::Changed),
            Just(Event::GiveUp { why: String::new() }),
            Just(Event::Retire),
            Just(Event::RetiredWritten),
        ];
        prop::collection::vec(event, 0..40)
    }

    proptest! {
        #[test]
        fn a_commit_follows_every_step_before_it(events in events()) {
            let (mut version, mut todo) = (Checkpoint::new(ME), Vec::new());
            let (mut decided, mut marker_seen) = (None, false);
            for event in events {
                let before = version.clone();
                if version.step(event.clone(), &mut todo).is_err() {
                    prop_assert_eq!(&version, &before);
                    continue;
                }
                marker_seen |= matches!(event, Event::Marker(_));
                let state = version.state();
                if state == CheckpointState::Committed {
                    prop_assert!(marker_seen, "no commit without the marker");
                    prop_assert!(todo.contains(&Do::WriteRecord));
                }
                if todo.contains(&Do::CreateMarker(Decision::Commit)) {
                    prop_assert!(version.proof().is_some() && todo.contains(&Do::WriteManifest));
                }
                if let Some(decided) = decided {
                    let later = state == decided
                        || (decided == CheckpointState::Committed && state == CheckpointState::Retired);
                    prop_assert!(later, "{decided} became {state}");
                }
                if matches!(state, CheckpointState::Committed | CheckpointState::Aborted | CheckpointState::Retired) {
                    decided = Some(state);
                }
            }
        }
    }
}

//! Work that takes time, and its ends: `verify`, `flush`, `commit`, and the events on the way.
//!
//! Owns: the shapes, and the exit code each result deserves. Does not own: doing the work.

use super::{ApiError, CheckpointRef, CheckpointState, ExitCode};
use serde::{Deserialize, Serialize};

/// One line of a streamed answer. Any number of progress lines, then exactly one result or error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamLine<T> {
    Progress(Progress),
    Result(T),
    Error(ApiError),
}

/// How far a piece of long work is. Totals may grow while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
    pub done_bytes: u64,
    pub total_bytes: u64,
    pub done_files: u64,
    pub total_files: u64,
    /// What is worked on: a path, relative to the mount.
    pub now: Option<String>,
}

/// `ckptctl prefetch`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Prefetch {
    /// False when it goes on after this answer; then only the totals are known.
    pub waited: bool,
    pub total_files: u64,
    pub total_bytes: u64,
    pub fetched_files: u64,
    pub fetched_bytes: u64,
    /// What did not have to be fetched.
    pub here_files: u64,
    pub here_bytes: u64,
    /// What did not fit beside what may not give way.
    pub no_room: Vec<Unfetched>,
    /// What could not be fetched whole.
    pub failed: Vec<Unfetched>,
}

impl Prefetch {
    /// Done when all of it is here, or is being fetched.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        if self.no_room.is_empty() && self.failed.is_empty() { ExitCode::Done } else { ExitCode::Failed }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unfetched {
    pub path: String,
    pub size_bytes: u64,
    /// Why, with the numbers.
    pub what: String,
}

/// `ckptctl verify`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Verify {
    pub checkpoints: u64,
    pub files: u64,
    /// Copies read and compared with their checksum.
    pub copies: u64,
    pub bytes: u64,
    /// Whether Tier-3 was read too, not only asked.
    pub deep: bool,
    /// Copies that were bad and have been replaced from a good one.
    pub repaired: Vec<VerifyRepair>,
    /// Files with no good copy left.
    pub unrecoverable: Vec<Unrecoverable>,
    /// Files that may have a good copy, and of which one could not be read now, or is bad and could not be made good; and those that have
    /// no checksum yet.
    pub unchecked: Vec<Unrecoverable>,
    /// Objects in Tier-3 that are bad or missing, and could not be written again.
    #[serde(default)]
    pub bad_objects: u64,
    /// Whether Tier-3 or another node did not answer, so that a copy was not read.
    #[serde(default)]
    pub away: bool,
    /// Committed checkpoints of which Tier-3 does not say what it must.
    #[serde(default)]
    pub broken: Vec<BrokenInvariant>,
}

impl Verify {
    /// Whether there was nothing to check.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files == 0
            && self.repaired.is_empty()
            && self.unrecoverable.is_empty()
            && self.unchecked.is_empty()
            && self.broken.is_empty()
    }

    /// Done when every listed file ends with a good copy, every commit is one, and all that was asked for was read. Unavailable when
    /// something did not answer; failed when an object is bad and could not be written again.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        if !self.unrecoverable.is_empty() || !self.broken.is_empty() {
            ExitCode::NotRecoverable
        } else if self.away {
            ExitCode::Unavailable
        } else if self.bad_objects > 0 {
            ExitCode::Failed
        } else {
            ExitCode::Done
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyRepair {
    pub path: String,
    /// `host`, `peer` or `object`.
    pub copy: String,
    /// Which chunk, and both checksums.
    pub what: String,
    /// Where the good bytes came from.
    pub from: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unrecoverable {
    pub path: String,
    /// Which copies were tried and what was wrong with each.
    pub what: String,
}

/// Something that must always be true of a committed checkpoint, and is not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokenInvariant {
    /// The checkpoint's.
    pub path: String,
    /// The sentence, as one of `invariants` is named.
    pub invariant: String,
    pub what: String,
}

/// `ckptctl flush`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Flush {
    /// Whether the command was asked to stay until all is committed.
    pub waited: bool,
    pub uploaded_files: u64,
    pub uploaded_bytes: u64,
    /// What this command saw being committed.
    pub committed: Vec<CheckpointRef>,
    /// What is not committed at the end.
    pub pending: Vec<Pending>,
    pub timed_out: bool,
    /// Whether Tier-3 did not answer at the end.
    pub tier3_away: bool,
}

impl Flush {
    /// Done when nothing is left, or nobody waited; unavailable when Tier-3 was the reason at the time-out.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        if !self.waited || self.pending.is_empty() {
            ExitCode::Done
        } else if self.timed_out && self.tier3_away {
            ExitCode::Unavailable
        } else {
            ExitCode::Failed
        }
    }
}

/// Something a flush did not bring to Tier-3.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    pub path: String,
    pub reason: PendingReason,
    /// What it waits for, in a sentence.
    pub what: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PendingReason {
    /// Some program has it open for writing.
    Open,
    /// Some program still maps it writable.
    Mapped,
    /// Its writers are gone; it is never waited for.
    Torn,
    /// A marker, index or count says that files are missing.
    Incomplete,
    /// It is closed, and its bytes cannot be read to be sealed, as where a hole does not fit into memory; it is not waited for.
    Unreadable,
    /// Tier-3 had it, and an object or a document of it is bad or missing there and could not be written again; it is not waited for.
    Damaged,
    /// No key of Tier-3 can hold its name; it is not waited for.
    Unnameable,
    /// Whole, and on its way.
    Uploading,
    /// A word of a newer daemon.
    #[serde(other)]
    Unknown,
}

impl PendingReason {
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Mapped => "mapped",
            Self::Torn => "torn",
            Self::Incomplete => "incomplete",
            Self::Unreadable => "unreadable",
            Self::Damaged => "damaged",
            Self::Unnameable => "unnameable",
            Self::Uploading => "uploading",
            Self::Unknown => "unknown",
        }
    }
}

/// `ckptctl commit`: the person says that the checkpoint is whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    pub checkpoint: CheckpointRef,
    /// How far it is now. The command gives evidence; the marker follows when its bytes are in Tier-3.
    pub state: CheckpointState,
    /// It was complete before, so nothing has changed.
    pub already: bool,
}

/// Something that happened on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Rises by one; a gap means that the daemon forgot older ones. Begins at 1 with each start.
    pub number: u64,
    pub time_ms: i64,
    pub level: EventLevel,
    /// A word of the flows, such as `sealed`, `committed`, `torn`, `repaired`.
    pub kind: String,
    /// The path it is about, relative to the mount.
    pub path: Option<String>,
    pub what: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventLevel {
    Info,
    Warn,
    #[serde(other)]
    Error,
}

impl EventLevel {
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(reason: PendingReason) -> Vec<Pending> {
        vec![Pending { path: "r/step100.pt".into(), reason, what: "pid 4 writes it".into() }]
    }

    #[test]
    fn a_flush_that_leaves_something_fails_and_blames_tier3_only_at_the_timeout() {
        let done = Flush { waited: true, ..Flush::default() };
        assert_eq!(done.exit_code(), ExitCode::Done);
        let left = Flush { waited: true, pending: pending(PendingReason::Open), ..Flush::default() };
        assert_eq!(left.exit_code(), ExitCode::Failed);
        let timed_out = Flush { timed_out: true, ..left.clone() };
        assert_eq!(timed_out.exit_code(), ExitCode::Failed);
        let away = Flush { tier3_away: true, ..timed_out };
        assert_eq!(away.exit_code(), ExitCode::Unavailable);
        let nobody_waited = Flush { waited: false, ..left };
        assert_eq!(nobody_waited.exit_code(), ExitCode::Done);
    }

    #[test]
    fn a_verify_that_repaired_everything_is_done() {
        let repair = VerifyRepair {
            path: "r/a".into(),
            copy: "host".into(),
            what: "chunk 0 has 1, expected 2".into(),
            from: "object".into(),
        };
        let repaired = Verify { repaired: vec![repair], ..Verify::default() };
        assert_eq!(repaired.exit_code(), ExitCode::Done);
        let lost = Unrecoverable { path: "r/a".into(), what: "host and object are bad".into() };
        assert_eq!(Verify { unrecoverable: vec![lost], ..repaired }.exit_code(), ExitCode::NotRecoverable);
    }

    #[test]
    fn what_was_not_read_or_stays_bad_is_not_done() {
        let unchecked = |what: &str| vec![Unrecoverable { path: "r/a".into(), what: what.into() }];
        let open = Verify { unchecked: unchecked("host: it is open"), ..Verify::default() };
        assert_eq!(open.exit_code(), ExitCode::Done, "it has a good copy, and is healed when it is closed");
        let bad = Verify { bad_objects: 1, unchecked: unchecked("object: it is gone"), ..Verify::default() };
        assert_eq!(bad.exit_code(), ExitCode::Failed, "it does not survive this node");
        assert_eq!(Verify { away: true, ..bad.clone() }.exit_code(), ExitCode::Unavailable);
        let lost = Verify { unrecoverable: unchecked("object: it is gone"), away: true, ..bad };
        assert_eq!(lost.exit_code(), ExitCode::NotRecoverable);
    }

    #[test]
    fn progress_and_ends_are_told_apart_by_their_one_key() {
        let line = serde_json::to_string(&StreamLine::<Commit>::Progress(Progress::default())).unwrap();
        assert!(line.starts_with(r#"{"progress":{"done_bytes":0,"#), "{line}");
        let error = ApiError::new(super::super::ErrorCode::Fenced, "w", "a");
        let line = serde_json::to_string(&StreamLine::<Commit>::Error(error)).unwrap();
        assert_eq!(line, r#"{"error":{"code":"fenced","what":"w","action":"a"}}"#);
    }
}

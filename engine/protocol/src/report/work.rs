//! Work that takes time, and its results: `verify`, `flush`, `commit`, and the events on the way.
//!
//! Owns: the shapes, and the exit code for each result. Does not own: doing the work.

use super::{ApiError, CheckpointRef, CheckpointState, ExitCode};
use serde::{Deserialize, Serialize};

/// A line of a streamed answer. There may be any number of progress lines, then exactly one result or error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamLine<T> {
    Progress(Progress),
    Result(T),
    Error(ApiError),
}

/// The progress of long work. Totals may grow while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
    pub done_bytes: u64,
    pub total_bytes: u64,
    pub done_files: u64,
    pub total_files: u64,
    /// Path of the present item, relative to the mount.
    pub now: Option<String>,
}

/// `ckptctl prefetch`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Prefetch {
    /// False if the work goes on after this answer; then only the totals are known.
    pub waited: bool,
    pub total_files: u64,
    pub total_bytes: u64,
    pub fetched_files: u64,
    pub fetched_bytes: u64,
    /// Number of files that did not have to be fetched.
    pub here_files: u64,
    pub here_bytes: u64,
    /// Files that found no room beside those that may not give way.
    pub no_room: Vec<Unfetched>,
    /// Files that could not be fetched whole.
    pub failed: Vec<Unfetched>,
}

impl Prefetch {
    /// Returns done if all files are here, or are being fetched.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        if self.no_room.is_empty() && self.failed.is_empty() { ExitCode::Done } else { ExitCode::Failed }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unfetched {
    pub path: String,
    pub size_bytes: u64,
    /// The reason, with its numbers.
    pub what: String,
}

/// `ckptctl verify`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Verify {
    pub checkpoints: u64,
    pub files: u64,
    /// Copies that were read and compared with their checksum.
    pub copies: u64,
    pub bytes: u64,
    /// Whether Tier-3's bytes were read too, not only its metadata.
    pub deep: bool,
    /// Copies that were bad and have been replaced from a good one.
    pub repaired: Vec<VerifyRepair>,
    /// Files with no good copy left.
    pub unrecoverable: Vec<Unrecoverable>,
    /// Files that may have a good copy, but a copy could not be read now, or is bad and could not be repaired; and files without a
    /// checksum so far.
    pub unchecked: Vec<Unrecoverable>,
    /// Objects in Tier-3 that are bad or missing, and could not be written again.
    #[serde(default)]
    pub bad_objects: u64,
    /// Whether Tier-3 or another node did not answer, so that a copy was not read.
    #[serde(default)]
    pub away: bool,
    /// Committed checkpoints that break an invariant in Tier-3.
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

    /// Returns done if every listed file ends with a good copy, every commit is valid, and everything asked for was read. Returns
    /// unavailable if a tier or a node did not answer; failed if an object is bad and could not be written again.
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
    /// The chunk, and both checksums.
    pub what: String,
    /// The source of the good bytes.
    pub from: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unrecoverable {
    pub path: String,
    /// The copies that were tried, and the defect of each.
    pub what: String,
}

/// An invariant of a committed checkpoint that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokenInvariant {
    /// The checkpoint's path.
    pub path: String,
    /// The sentence: the name of the function in `invariants`.
    pub invariant: String,
    pub what: String,
}

/// `ckptctl flush`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Flush {
    /// Whether the command was asked to wait until all is committed.
    pub waited: bool,
    pub uploaded_files: u64,
    pub uploaded_bytes: u64,
    /// Checkpoints that this command saw being committed.
    pub committed: Vec<CheckpointRef>,
    /// Checkpoints and files that are not committed at the end.
    pub pending: Vec<Pending>,
    pub timed_out: bool,
    /// Whether Tier-3 did not answer at the end.
    pub tier3_away: bool,
}

impl Flush {
    /// Returns done if nothing is left, or the caller did not wait; unavailable if Tier-3 was the reason at the time-out.
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

/// A checkpoint or file that a flush did not bring to Tier-3.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    pub path: String,
    pub reason: PendingReason,
    /// The condition that it waits for, in a sentence.
    pub what: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PendingReason {
    /// Some program has it open for writing.
    Open,
    /// Some program still maps it writable.
    Mapped,
    /// The writers are gone; a flush never waits for it.
    Torn,
    /// A marker, index or count shows that files are missing.
    Incomplete,
    /// Closed, but the bytes cannot be read for a seal, for example if a hole does not fit into memory; a flush does not wait for it.
    Unreadable,
    /// An object or a document in Tier-3 is bad or missing and could not be written again; a flush does not wait for it.
    Damaged,
    /// No key of Tier-3 can hold its name; a flush does not wait for it.
    Unnameable,
    /// Whole, and on its way to Tier-3.
    Uploading,
    /// A word that only a newer daemon knows.
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

/// `ckptctl commit`: a person declares the checkpoint whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    pub checkpoint: CheckpointRef,
    /// The state now. The command gives evidence; the marker follows when the bytes are in Tier-3.
    pub state: CheckpointState,
    /// Whether it was complete before, so that nothing has changed.
    pub already: bool,
}

/// An event on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Number of the event. A gap means that the daemon forgot older ones. The numbers begin at 1 with each start.
    pub number: u64,
    pub time_ms: i64,
    pub level: EventLevel,
    /// A word for the kind, such as `sealed`, `committed`, `torn`, `repaired`.
    pub kind: String,
    /// The path that the event concerns, relative to the mount.
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

//! Checkpoints and their files as people see them: `ls` and `show`.
//!
//! Owns: the shapes. Does not own: what makes a checkpoint complete or committed (the state machines).

use crate::checksum::Crc64;
use crate::id::{Step, Timeline, Version};
use serde::{Deserialize, Serialize};

/// Reference to a checkpoint, without its state.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CheckpointRef {
    pub timeline: Timeline,
    /// Null if the path names no step.
    pub step: Option<Step>,
    pub version: Version,
    /// Path relative to the mount.
    pub path: String,
}

/// A row of `ckptctl ls`, and of `checkpoints.json` in the control directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The run directory below the mount, `_` for the mount's root. Null for a loose file.
    pub run: Option<String>,
    pub timeline: Timeline,
    pub step: Option<Step>,
    pub version: Version,
    /// Path relative to the mount.
    pub path: String,
    /// Bytes of all its files, each counted once.
    pub bytes: u64,
    pub files: u64,
    /// The rule set that recognised the checkpoint; null for a loose file.
    pub framework: Option<String>,
    pub state: CheckpointState,
    /// The evidence in one word: `marker`, `index`, `count`, `history`, `one_process`, `command`; or
    /// `quiescence`, which alone does not complete it. Null while there is none.
    pub evidence: Option<String>,
    pub copies: Copies,
    pub pinned: bool,
    /// Time when its newest file was closed.
    pub closed_ms: Option<i64>,
}

/// The state of a checkpoint. Each word implies the ones before it on the way to commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointState {
    /// Being written.
    Open,
    /// Quiet, without evidence that it is whole.
    Settled,
    /// The writers were killed or went away before the checkpoint was complete.
    Torn,
    /// The record exists.
    Complete,
    /// Complete, and every file is in another node's memory too.
    Replicated,
    /// All files are in Tier-3; the marker is not.
    Prepared,
    /// The marker in Tier-3 says so.
    Committed,
    /// A file that belongs to no checkpoint.
    Loose,
    /// A word that only a newer daemon knows.
    #[serde(other)]
    Unknown,
}

impl CheckpointState {
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Settled => "settled",
            Self::Torn => "torn",
            Self::Complete => "complete",
            Self::Replicated => "replicated",
            Self::Prepared => "prepared",
            Self::Committed => "committed",
            Self::Loose => "loose",
            Self::Unknown => "unknown",
        }
    }
}

/// The places of good copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Copies {
    /// In this node's memory.
    pub host: CopyCount,
    /// In other nodes' memory.
    pub peer: CopyCount,
    /// In Tier-3.
    pub object: CopyCount,
}

/// The amount of data that has a copy in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CopyCount {
    pub files: u64,
    pub bytes: u64,
}

/// `ckptctl show`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Show {
    pub checkpoint: Checkpoint,
    /// The record's reason for completeness, in a sentence; null while there is no record.
    pub evidence_detail: Option<String>,
    /// Conditions that the checkpoint still waits for, in a sentence each; empty when it is committed.
    pub waits_for: Vec<String>,
    /// The attempt that is or was uploaded; null before there is one.
    pub attempt: Option<String>,
    /// The nodes whose files the checkpoint has.
    pub participants: Vec<String>,
    /// The key of its marker in Tier-3; null before it is committed.
    pub marker_key: Option<String>,
    /// The key of its manifest in Tier-3; null before it is committed.
    pub manifest_key: Option<String>,
    /// The fencing number of its commit; null before it is committed.
    pub epoch: Option<u64>,
    /// The commit before this one in the lineage.
    pub previous: Option<CheckpointRef>,
    /// The reason why it cannot be read whole; null as far as is known.
    #[serde(default)]
    pub lost: Option<String>,
    /// Only with `--files`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<File>>,
}

impl Show {
    /// Returns not recoverable if a file has no good copy, or the commit cannot be read.
    #[must_use]
    pub fn exit_code(&self) -> super::ExitCode {
        if self.lost.is_some() { super::ExitCode::NotRecoverable } else { super::ExitCode::Done }
    }
}

/// A file of a checkpoint, or a loose file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Path relative to the mount.
    pub path: String,
    pub bytes: u64,
    /// Checksum of the whole file, as sealed; null before it is sealed.
    pub crc64nvme: Option<Crc64>,
    /// Copies of this file: each place has 0 or 1 files; the shape is the checkpoint's.
    pub copies: Copies,
    /// The path by which this machine's root can read the host copy without the mount; null if there is no
    /// host copy.
    pub host_path: Option<String>,
    /// `open`, `closed`, `cut`, `mapped` or `sealed`.
    pub state: String,
    pub node: String,
    /// The key of the object copy; null if there is none.
    pub object_key: Option<String>,
    pub mtime_ms: Option<i64>,
}

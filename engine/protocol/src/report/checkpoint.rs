//! Checkpoints and their files as people see them: `ls` and `show`.
//!
//! Owns: the shapes. Does not own: what makes a checkpoint complete or committed (the state machines).

use crate::checksum::Crc64;
use crate::id::{Step, Timeline, Version};
use serde::{Deserialize, Serialize};

/// Which checkpoint, without saying anything about it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CheckpointRef {
    pub timeline: Timeline,
    /// Null where the path names no step.
    pub step: Option<Step>,
    pub version: Version,
    /// Where it is on the mount, relative to it.
    pub path: String,
}

/// One row of `ckptctl ls`, and of `checkpoints.json` in the control directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The run directory below the mount, `_` for the mount's root. Null for a loose file.
    pub run: Option<String>,
    pub timeline: Timeline,
    pub step: Option<Step>,
    pub version: Version,
    /// Relative to the mount.
    pub path: String,
    /// Of all its files, each counted once.
    pub bytes: u64,
    pub files: u64,
    /// The rule set that recognised it; null for a loose file.
    pub framework: Option<String>,
    pub state: CheckpointState,
    /// Why it is complete, in one word: `marker`, `index`, `count`, `history`, `one_process`, `command`; or
    /// `quiescence`, which alone does not complete it. Null while there is none.
    pub evidence: Option<String>,
    pub copies: Copies,
    pub pinned: bool,
    /// When its newest file was closed.
    pub closed_ms: Option<i64>,
}

/// How far a checkpoint has come. Each word implies the ones before it on the way to commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointState {
    /// Being written.
    Open,
    /// Quiet, without evidence that it is whole.
    Settled,
    /// Its writers were cut off or went away before it was complete.
    Torn,
    /// The record exists.
    Complete,
    /// Complete, and every file is in another node's memory too.
    Replicated,
    /// All files are in Tier-3; the marker is not.
    Prepared,
    /// The marker says so, durably.
    Committed,
    /// A file that belongs to no checkpoint.
    Loose,
    /// A word of a newer daemon.
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

/// Where good copies are known to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Copies {
    /// In this node's memory.
    pub host: CopyCount,
    /// In other nodes' memory.
    pub peer: CopyCount,
    /// In Tier-3.
    pub object: CopyCount,
}

/// How much of a thing has a copy in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CopyCount {
    pub files: u64,
    pub bytes: u64,
}

/// `ckptctl show`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Show {
    pub checkpoint: Checkpoint,
    /// What the record says about why it is complete, in a sentence; null while there is no record.
    pub evidence_detail: Option<String>,
    /// What it still waits for, in a sentence each; empty when it is committed.
    pub waits_for: Vec<String>,
    /// The attempt that is or was uploaded; null before there is one.
    pub attempt: Option<String>,
    /// The nodes whose files it has.
    pub participants: Vec<String>,
    /// The key of its marker in Tier-3; null before it is committed.
    pub marker_key: Option<String>,
    /// The key of its manifest in Tier-3; null before it is committed.
    pub manifest_key: Option<String>,
    /// Committed by which fencing number; null before it is committed.
    pub epoch: Option<u64>,
    /// The commit before it in its lineage.
    pub previous: Option<CheckpointRef>,
    /// Why it cannot be read whole; null for all that is known.
    #[serde(default)]
    pub lost: Option<String>,
    /// Only with `--files`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<File>>,
}

impl Show {
    /// Not recoverable where a file has no good copy, or the commit cannot be read.
    #[must_use]
    pub fn exit_code(&self) -> super::ExitCode {
        if self.lost.is_some() { super::ExitCode::NotRecoverable } else { super::ExitCode::Done }
    }
}

/// One file of a checkpoint, or one loose file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Relative to the mount.
    pub path: String,
    pub bytes: u64,
    /// Of the whole file, as sealed; null before it is sealed.
    pub crc64nvme: Option<Crc64>,
    /// Each place has 0 or 1 files here: the same shape as for a checkpoint.
    pub copies: Copies,
    /// Where this machine's root can read the host copy without the mount; null where there is none.
    pub host_path: Option<String>,
    /// `open`, `closed`, `cut`, `mapped` or `sealed`.
    pub state: String,
    pub node: String,
    /// The key of the object copy; null where there is none.
    pub object_key: Option<String>,
    pub mtime_ms: Option<i64>,
}

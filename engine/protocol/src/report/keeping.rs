//! Reports about keeping and resuming: `gc`, `pin`, `rm`, `undelete`, `export`, `import`, `recover`.
//!
//! Owns: the shapes, and the exit code for each result. Does not own: which versions may be retired (`retention`).

use super::{Checkpoint, CheckpointRef, ExitCode};
use crate::recovery::Standpoint;
use serde::{Deserialize, Serialize};

/// `ckptctl gc`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Gc {
    /// Whether nothing was done: the rows say what would be done.
    pub dry_run: bool,
    /// Every committed version, in order of run and lineage.
    pub rows: Vec<GcRow>,
    /// Number of versions to be retired that are still there.
    pub left: u64,
    /// The reason why some are left.
    pub trouble: Option<String>,
}

impl Gc {
    /// Returns done if no version is left that was to be retired; unavailable if Tier-3 refused.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        if self.dry_run { ExitCode::Done } else { of_what_is_left(self.left, self.trouble.as_deref()) }
    }
}

fn of_what_is_left(left: u64, trouble: Option<&str>) -> ExitCode {
    match (left, trouble) {
        (0, _) => ExitCode::Done,
        (_, Some(_)) => ExitCode::Unavailable,
        (_, None) => ExitCode::Failed,
    }
}

/// The verdict of retention on one committed version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcRow {
    pub run: String,
    pub checkpoint: CheckpointRef,
    pub bytes: u64,
    /// Whether the version is retired; otherwise it is kept.
    pub given_up: bool,
    /// The reason in one sentence.
    pub reason: String,
}

/// `ckptctl pin` and `ckptctl unpin`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    pub checkpoint: CheckpointRef,
    pub pinned: bool,
    /// Whether the pin was in that state before.
    pub already: bool,
}

/// `ckptctl rm`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removal {
    /// Path relative to the mount.
    pub path: String,
    /// Committed versions that were retired.
    pub versions: u64,
    /// Number of those that are still in Tier-3.
    pub left: u64,
    /// The reason why some are left.
    pub trouble: Option<String>,
}

impl Removal {
    /// Returns the code by the rule of [`Gc::exit_code`].
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        of_what_is_left(self.left, self.trouble.as_deref())
    }
}

/// `ckptctl undelete`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undelete {
    pub checkpoint: CheckpointRef,
    /// Names that are in the tree again; their bytes come when they are opened.
    pub files: u64,
}

/// `ckptctl export`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    pub checkpoint: CheckpointRef,
    /// Absolute path on the daemon's machine.
    pub directory: String,
    pub files: u64,
    pub bytes: u64,
    /// Number of files whose bytes were in the node's memory.
    pub host_files: u64,
    /// Counts of what was left out: refused by the file system there, or by the daemon's rights; and pipes, sockets and devices in the
    /// checkpoint.
    pub left_out: Vec<String>,
}

/// `ckptctl import`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Import {
    /// Path below the URL of Tier-3.
    pub from: String,
    /// Every recognised checkpoint, and objects that cannot be files.
    pub rows: Vec<ImportRow>,
    /// Number of files that belong to no checkpoint, and stay as they are.
    pub loose: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportRow {
    /// Path relative to the mount.
    pub path: String,
    /// The version that the checkpoint became.
    pub checkpoint: Option<CheckpointRef>,
    pub files: u64,
    pub bytes: u64,
    pub outcome: ImportOutcome,
    /// The reason in one sentence.
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportOutcome {
    Imported,
    /// Imported by an earlier import.
    Already,
    /// Nothing was done.
    Refused,
    /// Unknown; also the reading of a word that this build does not know.
    #[serde(other)]
    Unknown,
}

impl ImportOutcome {
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Imported => "imported",
            Self::Already => "already",
            Self::Refused => "refused",
            Self::Unknown => "unknown",
        }
    }
}

impl Import {
    /// Returns done if every checkpoint there is now one of ours.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        let ours = |row: &ImportRow| matches!(row.outcome, ImportOutcome::Imported | ImportOutcome::Already);
        if self.rows.iter().all(ours) { ExitCode::Done } else { ExitCode::Failed }
    }
}

/// `ckptctl recover --plan`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Recovery {
    pub runs: Vec<RunRecovery>,
}

/// A run, and the checkpoint that its job loads when it comes back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecovery {
    pub run: String,
    /// None if nothing can be loaded, although there are checkpoints.
    pub chosen: Option<CheckpointRef>,
    /// Versions from the newest to the oldest along the lineage, without those that the job removed or saved over.
    pub versions: Vec<RecoveryRow>,
    /// Versions that have no row because the job, or a person, removed all their names.
    #[serde(default)]
    pub removed: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryRow {
    pub checkpoint: Checkpoint,
    pub standpoint: Standpoint,
    pub reason: String,
    /// Whether the version is passed over only because its job, or a person, removed a part of it.
    #[serde(default)]
    pub removed_in_part: bool,
}

impl RunRecovery {
    /// Whether the run has nothing to load, for another reason than a removal by its job or a person.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        let meant = !self.versions.is_empty() && self.versions.iter().all(|row| row.removed_in_part);
        self.chosen.is_none() && !meant
    }
}

impl Recovery {
    /// Returns not recoverable if a run with checkpoints can load none, and its job did not intend that: such a job must not begin again at
    /// step 0 unnoticed.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        if self.runs.iter().any(RunRecovery::is_lost) { ExitCode::NotRecoverable } else { ExitCode::Done }
    }
}

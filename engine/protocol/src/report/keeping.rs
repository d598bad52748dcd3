//! What is kept and what is not, and what a job comes back to: `gc`, `pin`, `rm`, `undelete`,
//! `export`, `import`, `recover`.
//!
//! Owns: the shapes, and the exit code each result deserves. Does not own: what may go (`retention`).

use super::{Checkpoint, CheckpointRef, ExitCode};
use crate::recovery::Standpoint;
use serde::{Deserialize, Serialize};

/// `ckptctl gc`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Gc {
    /// Nothing was done: the rows say what would be.
    pub dry_run: bool,
    /// Every committed version, in order of run and lineage.
    pub rows: Vec<GcRow>,
    /// Those to be given up that are still there.
    pub left: u64,
    /// Why, where something is left.
    pub trouble: Option<String>,
}

impl Gc {
    /// Done when nothing is left that was to go; unavailable when Tier-3 did not take it.
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

/// What retention says of one committed version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcRow {
    pub run: String,
    pub checkpoint: CheckpointRef,
    pub bytes: u64,
    /// It is given up; otherwise it is kept.
    pub given_up: bool,
    /// One sentence.
    pub reason: String,
}

/// `ckptctl pin` and `ckptctl unpin`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    pub checkpoint: CheckpointRef,
    pub pinned: bool,
    /// It was so before.
    pub already: bool,
}

/// `ckptctl rm`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removal {
    /// Relative to the mount.
    pub path: String,
    /// Committed versions that were given up.
    pub versions: u64,
    /// Those that are still in Tier-3.
    pub left: u64,
    /// Why, where something is left.
    pub trouble: Option<String>,
}

impl Removal {
    /// As [`Gc::exit_code`].
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
    /// Absolute, on the daemon's machine.
    pub directory: String,
    pub files: u64,
    pub bytes: u64,
    /// Of the files, those whose bytes were in the node's memory.
    pub host_files: u64,
    /// Counts what the file system there, or the daemon's rights, did not take, and how many pipes, sockets and devices lie in the checkpoint.
    pub left_out: Vec<String>,
}

/// `ckptctl import`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Import {
    /// Below the URL of Tier-3.
    pub from: String,
    /// Every checkpoint that was recognised, and objects that cannot be files.
    pub rows: Vec<ImportRow>,
    /// Files that belong to no checkpoint, and stay as they are.
    pub loose: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportRow {
    /// Relative to the mount.
    pub path: String,
    /// The version that it became.
    pub checkpoint: Option<CheckpointRef>,
    pub files: u64,
    pub bytes: u64,
    pub outcome: ImportOutcome,
    /// One sentence.
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportOutcome {
    Imported,
    /// By an import before this one.
    Already,
    /// Nothing was done.
    Refused,
    /// Also a word that this build does not know.
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
    /// Done when every checkpoint there is one of ours now.
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

/// One run: what a job of it loads when it comes back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecovery {
    pub run: String,
    /// None where nothing can be loaded, although there are checkpoints.
    pub chosen: Option<CheckpointRef>,
    /// From the newest to the oldest along the lineage, without what the job removed and what it saved over.
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
    /// The version is passed over only because its job, or a person, removed a part of it.
    #[serde(default)]
    pub removed_in_part: bool,
}

impl RunRecovery {
    /// The run has nothing to load, and not because of what its job, or a person, removed.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        let meant = !self.versions.is_empty() && self.versions.iter().all(|row| row.removed_in_part);
        self.chosen.is_none() && !meant
    }
}

impl Recovery {
    /// Not recoverable where a run that has checkpoints can load none, and its job did not mean that: it must not begin again at step 0
    /// unnoticed.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        if self.runs.iter().any(RunRecovery::is_lost) { ExitCode::NotRecoverable } else { ExitCode::Done }
    }
}

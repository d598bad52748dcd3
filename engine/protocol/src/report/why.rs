//! `ckptctl why`: what was concluded about a path, and from which facts.

use super::CheckpointState;
use serde::{Deserialize, Serialize};

/// `ckptctl why`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Why {
    /// Relative to the mount: of the checkpoint that the path belongs to, else of the file.
    pub path: String,
    pub state: CheckpointState,
    /// What was concluded, in a sentence.
    pub verdict: String,
    /// Whether programs find it under that path.
    pub in_sight: bool,
    /// Why it stays in sight although it can never be complete, or why it went; null where neither was decided.
    pub sight: Option<String>,
    /// Something whole is there that a job could load instead.
    pub fallback: bool,
    pub writers: Vec<WhyWriter>,
    pub files: Vec<WhyFile>,
    /// Files that are not listed, of very many.
    pub files_left_out: u64,
}

/// A process that wrote some of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WhyWriter {
    pub process: u32,
    pub session: String,
    /// As its launcher gave it; null where none did.
    pub rank: Option<u64>,
    pub world_size: Option<u64>,
    /// How it ended, in words.
    pub end: String,
    /// How many of the files it wrote.
    pub files: u64,
}

/// What is known of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WhyFile {
    /// Relative to the mount.
    pub path: String,
    pub bytes: u64,
    /// `open`, `closed`, `cut`, `mapped` or `sealed`.
    pub state: String,
    /// It got its name by rename(2) after it was written.
    pub renamed: bool,
    /// The newest committed version holds these bytes under this name.
    pub committed: bool,
}

//! `ckptctl why`: the conclusions about a path, and the facts behind them.

use super::CheckpointState;
use serde::{Deserialize, Serialize};

/// `ckptctl why`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Why {
    /// Path relative to the mount: of the checkpoint that the path belongs to, else of the file.
    pub path: String,
    pub state: CheckpointState,
    /// The conclusion, in a sentence.
    pub verdict: String,
    /// Whether programs find it under that path.
    pub in_sight: bool,
    /// The reason why it stays visible although it can never be complete, or why it was hidden; null if neither
    /// was decided.
    pub sight: Option<String>,
    /// Whether a whole checkpoint exists that a job could load instead.
    pub fallback: bool,
    pub writers: Vec<WhyWriter>,
    pub files: Vec<WhyFile>,
    /// Number of files that are not listed, if there are very many.
    pub files_left_out: u64,
}

/// A process that wrote some of the files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WhyWriter {
    pub process: u32,
    pub session: String,
    /// The rank from its launcher; null if there is none.
    pub rank: Option<u64>,
    pub world_size: Option<u64>,
    /// The end of the process, in words.
    pub end: String,
    /// Number of files that it wrote.
    pub files: u64,
}

/// The facts about one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WhyFile {
    /// Path relative to the mount.
    pub path: String,
    pub bytes: u64,
    /// `open`, `closed`, `cut`, `mapped` or `sealed`.
    pub state: String,
    /// Whether a rename(2) gave the file its name after it was written.
    pub renamed: bool,
    /// Whether the newest committed version holds these bytes under this name.
    pub committed: bool,
}

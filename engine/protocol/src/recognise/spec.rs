//! The description of a framework's names, ours or from the configuration.
//!
//! Owns: the words of a rule. Does not own: the built-in rules (`frameworks`), the use of a rule (`rules`).

use serde::{Deserialize, Serialize};

/// The names of a framework. Patterns are regular expressions over bytes, matched against one component. A match
/// may begin anywhere, so anchor patterns with `^` and `$`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuleSpec {
    /// The word that `ls` shows as the framework.
    pub name: String,
    /// The name of a directory that is one checkpoint with all that lies below; its group `step` is the step.
    /// Without this pattern, the checkpoint is all that lies directly in a directory with a file of the signature.
    pub directory: Option<String>,
    /// The name that the parent directory must have.
    pub parent: Option<String>,
    /// A file that shows that the rule applies.
    pub signature: Option<String>,
    /// Whether the signature counts only directly in the directory, not deeper.
    pub on_top: bool,
    /// Files that hold state; the group `rank` is the rank.
    pub shard: Option<String>,
    /// The file that lists the files that the checkpoint needs.
    pub index: Option<String>,
    pub index_kind: Option<IndexKind>,
    /// The file that is written last; without it the checkpoint is not complete.
    pub marker: Option<String>,
    /// How much the marker proves.
    pub marker_by: MarkerBy,
    /// The file that each rank writes last; the group `rank` is the rank.
    pub rank_marker: Option<String>,
    /// A file that each rank writes, so that as many exist as the job has ranks. The group `rank` is the rank.
    pub each_rank: Option<String>,
    /// Whether the index and the ranks' files mean the same inside another framework's directory.
    pub anywhere: bool,
    /// Whether the directory gets its name by rename when all ranks are done.
    pub renamed: bool,
    /// The directory's name while it is written; with this name it is not complete.
    pub in_flight: Option<String>,
    /// A name beside the directory that exists while the directory is written; the group `name` is the directory's.
    pub unfinished: Option<String>,
    /// Whether files may follow the evidence: the settle time keeps them in the same version.
    pub more_follows: bool,
    /// A file that is a checkpoint by itself, or, if its name carries a rank, that rank's part of one.
    pub single: Option<String>,
    /// Names that `signature`, `single` and `shard` do not mean, though they match.
    pub except: Option<String>,
    /// Names of files that are still being written.
    pub temporary: Option<String>,
    /// The file beside the checkpoints that names the one to resume from.
    pub tracker: Option<String>,
    pub tracker_holds: Option<TrackerHolds>,
}

/// The format of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexKind {
    /// The pickled `.metadata` of torch.distributed.checkpoint.
    Dcp,
    /// `*.safetensors.index.json`.
    Safetensors,
    /// `integrity.json` of Megatron-LM.
    Megatron,
}

/// The writer of a marker, and the moment of its writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MarkerBy {
    /// After a barrier over all ranks: the marker proves that all files exist.
    #[default]
    Barrier,
    /// By a single rank, when its own part is done: nothing is complete without this marker, but it proves nothing.
    OneRank,
}

/// The way in which a tracker names a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrackerHolds {
    /// The name of the checkpoint's directory (DeepSpeed's `latest`).
    Name,
    /// The checkpoint's step in decimal (Megatron's `latest_checkpointed_iteration.txt`).
    Step,
}

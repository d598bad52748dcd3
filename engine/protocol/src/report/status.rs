//! State of this node: `status`, `tiers`, `nodes`, `doctor`.
//!
//! Owns: the shapes. Does not own: checkpoints and their files (`checkpoint`), long work (`work`).

use super::{CheckpointRef, CopyCount, Problem, ProblemCode};
use crate::id::{Incarnation, StartId};
use crate::size::Shown;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `ckptctl status`, `/status`, `status.json` in the state directory and in the control directory of the mount.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The daemon's own version, as `ckptd --version` prints it.
    pub version: String,
    /// Process id of the serving daemon, which is safe to kill.
    pub pid: u32,
    /// The process that holds the mount while the daemon is away; null if there is none.
    pub keeper_pid: Option<u32>,
    #[serde(with = "super::hex16")]
    pub start: StartId,
    pub node: String,
    #[serde(with = "super::hex16")]
    pub incarnation: Incarnation,
    pub state: NodeState,
    /// The address at which other nodes reach this one.
    pub listen: String,
    /// The address of `/metrics` and `/healthz`.
    pub http: String,
    /// Empty if nothing is wrong.
    pub problems: Vec<Problem>,
    pub mount: MountStatus,
    pub tiers: Vec<TierStatus>,
    pub runs: Vec<RunStatus>,
    /// Files whose bytes are in this node's memory and not in Tier-3.
    #[serde(default)]
    pub unsaved: CopyCount,
    /// Files among `unsaved` that are open or not sealed yet: no other node has a copy.
    #[serde(default)]
    pub unsealed: CopyCount,
    /// Changes of the tree that Tier-3 should have received but did not; null if none is known.
    #[serde(default)]
    pub untold: Option<Untold>,
    /// The copying of this node's files to another one; null for a node that is alone.
    #[serde(default)]
    pub replication: Option<ReplicationStatus>,
    /// Time of this report; it shows how old a `status.json` is.
    pub written_ms: i64,
}

/// Names and attributes that were set, changed or removed, and that Tier-3 does not have yet: a start with empty memory has them as they
/// were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Untold {
    /// Number of removals among them; a whole checkpoint counts as one. The other changes are not counted.
    pub removals: u64,
}

/// The cost of losing a node's memory, a sentence each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Loss {
    /// Data that is gone.
    pub gone: Vec<String>,
    /// Data that only other nodes have: it exists while they live.
    pub copied: Vec<String>,
}

impl Status {
    /// Changes the report to the state after the loss of this node's memory, and returns the cost. A checkpoint that other nodes have
    /// copies of stays.
    ///
    /// A daemon that stopped with all of its data durable loses nothing.
    pub fn lose_memory(&mut self) -> Loss {
        let mut loss = Loss::default();
        if self.state == NodeState::Stopped {
            return loss;
        }
        let copied_to = self.copied_to();
        for run in &mut self.runs {
            if run.recoverable.is_none() || run.recoverable == run.durable {
                continue;
            }
            let name = |found: &Option<CheckpointRef>| match found {
                None => "nothing".to_owned(),
                Some(CheckpointRef { step: Some(step), .. }) => format!("step {step}"),
                Some(CheckpointRef { path, version, .. }) => format!("{path} version {version}"),
            };
            let (newest, durable) = (name(&run.recoverable), name(&run.durable));
            if let Some(at) = &copied_to {
                loss.copied.push(format!(
                    "run {}: {newest} is at {at} only; without that a job loads {durable}",
                    run.run
                ));
                continue;
            }
            loss.gone.push(format!(
                "run {}: {newest} was in its memory only, and a job loads {durable} now",
                run.run
            ));
            run.recoverable.clone_from(&run.durable);
            run.latest.clone_from(&run.durable);
        }
        if let Some(Untold { removals }) = self.untold {
            let back = match removals {
                0 => String::new(),
                removals => format!(", {removals} removals among them: what was removed is back"),
            };
            let what = format!("names or attributes that had changed were not told to Tier-3{back}");
            match &copied_to {
                None => loss.gone.push(what),
                Some(at) => loss.copied.push(format!("{what}; they are at {at} only")),
            }
        }
        for problem in self.problems.iter().filter(|problem| problem.code == ProblemCode::Unnameable.word()) {
            match &copied_to {
                None => loss.gone.push(problem.what.clone()),
                Some(at) => loss.copied.push(format!("{}; they are at {at} only", problem.what)),
            }
        }
        let Self { unsaved, unsealed, .. } = self;
        let CopyCount { files, bytes } = if copied_to.is_some() { *unsealed } else { *unsaved };
        if files > 0 {
            loss.gone.push(format!("{files} files ({}) were not in Tier-3", Shown(bytes)));
        }
        let copied = unsaved.files.saturating_sub(unsealed.files);
        if let Some(at) = copied_to.filter(|_| copied > 0) {
            let bytes = unsaved.bytes.saturating_sub(unsealed.bytes);
            loss.copied
                .push(format!("{copied} files ({}) were copied to {at} and not in Tier-3", Shown(bytes)));
        }
        loss
    }

    /// Returns the node or nodes with copies of all sealed files; none if a file lacks a copy.
    fn copied_to(&self) -> Option<String> {
        let replication = self.replication.as_ref().filter(|replication| replication.lacking_files == 0)?;
        let partner = replication.partner.as_ref();
        Some(partner.map_or_else(|| "other nodes".to_owned(), |partner| format!("node {partner}")))
    }
}

/// The activity of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// Not serving yet: rebuilding the tree.
    Starting,
    /// All promises hold.
    Serving,
    /// The mount serves, but a promise is weaker; `problems` names it.
    Degraded,
    /// The daemon was told to end, and uploads and commits what it can.
    Draining,
    Stopped,
    /// A word that only a newer daemon knows.
    #[serde(other)]
    Unknown,
}

impl NodeState {
    /// Returns the word in JSON.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Degraded => "degraded",
            Self::Draining => "draining",
            Self::Stopped => "stopped",
            Self::Unknown => "unknown",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountStatus {
    pub path: String,
    pub mode: FuseMode,
    /// The reason for this mode: what the probe tried and what the kernel answered.
    pub reason: String,
    /// Requests that the kernel has sent, by operation. Passthrough I/O does not appear, because it does not reach the daemon.
    pub requests: BTreeMap<String, u64>,
}

/// The way of bytes between programs and Tier-1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FuseMode {
    /// The kernel reads and writes Tier-1 itself.
    Passthrough,
    /// Each read and write passes through the daemon.
    Fallback,
    /// A word that only a newer daemon knows.
    #[serde(other)]
    Unknown,
}

impl FuseMode {
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Passthrough => "passthrough",
            Self::Fallback => "fallback",
            Self::Unknown => "unknown",
        }
    }
}

/// A tier: a place that holds copies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TierStatus {
    /// `tier1`, `spill`, `tier2`, `tier3`.
    pub name: String,
    pub used_bytes: u64,
    /// Null if the tier has no size of its own, such as an object store.
    pub size_bytes: Option<u64>,
    /// Part of the tier whose pages exist already, 0 to 1; null if that has no meaning.
    pub warm_fraction: Option<f64>,
    pub state: TierState,
    /// The medium: a URL without secrets, `private tmpfs`, a directory.
    pub medium: String,
    pub files: u64,
    /// The users of the budget, by name. The values sum to `used_bytes`.
    pub used_by: BTreeMap<String, u64>,
    /// Bytes that wait to be copied here.
    pub queued_bytes: u64,
    /// Whether the store was seen to let exactly one of many creates of one key win; null if it was not tried.
    pub fencing: Option<bool>,
    /// Whether the store was seen to refuse a damaged part; null if it was not tried.
    pub part_checksums: Option<bool>,
    /// The marks between which reclaiming works; null if nothing is reclaimed.
    #[serde(default)]
    pub marks: Option<Marks>,
    /// While more than the low mark is in use: the bytes that are kept, by reason. `may give way` counts bytes whose room has not been
    /// needed yet.
    #[serde(default)]
    pub held_by: BTreeMap<String, u64>,
    /// Facts a person should know, such as that commits do not survive this machine.
    pub notes: Vec<String>,
}

/// Reclaiming begins when more than `high_bytes` are in use, and goes on until less than `low_bytes` are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marks {
    pub high_bytes: u64,
    pub low_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TierState {
    Ok,
    /// Usable; memory is still being touched, so saves are slower than they will be.
    Warming,
    /// Nothing more is admitted until something is reclaimed.
    Full,
    /// Does not answer; retried.
    Away,
    /// Not configured.
    Off,
    /// A word that only a newer daemon knows.
    #[serde(other)]
    Unknown,
}

impl TierState {
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warming => "warming",
            Self::Full => "full",
            Self::Away => "away",
            Self::Off => "off",
            Self::Unknown => "unknown",
        }
    }
}

/// The copying of a node's sealed files to its partner.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ReplicationStatus {
    /// The node that keeps the copies; null if no node does now.
    pub partner: Option<String>,
    /// Number of files of which no live node has a whole copy.
    pub lacking_files: u64,
    pub lacking_bytes: u64,
    /// Time since when there are such files; null if there are none.
    pub since_ms: Option<i64>,
    /// The reason why they lack a copy; null while they are on their way.
    pub why: Option<String>,
}

/// The state of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunStatus {
    /// The run directory below the mount, `_` for the mount's root.
    pub run: String,
    /// The newest whole checkpoint: complete, wherever its bytes are.
    pub latest: Option<CheckpointRef>,
    /// The newest committed one of the lineage.
    pub watermark: Option<CheckpointRef>,
    /// The checkpoint that a restart would load now: the newest whole one that was not removed.
    pub recoverable: Option<CheckpointRef>,
    /// The checkpoint that a restart would load after the loss of this node's memory: as `recoverable`, among committed ones without a
    /// known defect in Tier-3.
    #[serde(default)]
    pub durable: Option<CheckpointRef>,
    /// Complete versions that are newer than the watermark.
    pub lag_versions: u64,
    /// Their bytes that are not in Tier-3 yet.
    pub lag_bytes: u64,
    /// Time for which the oldest of them has been complete. 0 if there is none.
    pub lag_seconds: f64,
}

/// A row of `ckptctl nodes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Node {
    pub name: String,
    #[serde(with = "super::hex16")]
    pub incarnation: Incarnation,
    #[serde(with = "super::hex16")]
    pub start: StartId,
    pub state: NodeState,
    pub listen: String,
    pub version: String,
    /// The last fencing number that the node saw.
    pub epoch: u64,
    pub coordinator: bool,
    /// Whether this is the node that answered.
    pub this: bool,
    pub tier1_used_bytes: u64,
    pub tier1_size_bytes: u64,
    /// The coordinator's verdict: `awaited`, `alive`, `suspect`, `cut_off` or `gone`. Empty from an older daemon.
    #[serde(default)]
    pub standing: String,
    /// Time of its present standing, unless it is alive.
    #[serde(default)]
    pub since_ms: Option<i64>,
    /// The reason for its standing, unless it is alive.
    #[serde(default)]
    pub why: Option<String>,
    /// Time since the node was last heard; null for the coordinator's own.
    #[serde(default)]
    pub heard_ago_seconds: Option<f64>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The node that keeps its copies; null if no node does.
    #[serde(default)]
    pub partner: Option<String>,
}

/// `ckptctl doctor`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doctor {
    pub checks: Vec<Check>,
}

impl Doctor {
    /// Returns failed if a check failed; warnings alone are not a failure.
    #[must_use]
    pub fn exit_code(&self) -> super::ExitCode {
        if self.checks.iter().any(|check| check.verdict == CheckVerdict::Fail) {
            super::ExitCode::Failed
        } else {
            super::ExitCode::Done
        }
    }
}

/// A check that was tried on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Stable name: lower-case words joined by `_`.
    pub name: String,
    pub verdict: CheckVerdict,
    /// The check and its result.
    pub what: String,
    /// The remedy; null if there is nothing to do.
    pub fix: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckVerdict {
    Ok,
    /// Works, slower or with a weaker promise.
    Warn,
    Fail,
    /// Could not be tried here.
    Skipped,
    /// A word that only a newer daemon knows.
    #[serde(other)]
    Unknown,
}

impl CheckVerdict {
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
            Self::Skipped => "skipped",
            Self::Unknown => "unknown",
        }
    }
}

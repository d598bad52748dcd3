//! What a person may decide: plain data, documented, with defaults that are enough on one machine.
//!
//! Owns: the keys of `ckptd.toml`, their defaults and their limits. Does not own: flags and the environment
//! (`ckptd`), which win over the file.

mod cluster;

pub use cluster::{MembersSettings, PlacementSettings, ReplicationSettings};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use tidemark_protocol::encoding::Codec;
use tidemark_protocol::label::Labels;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::recognise::{RuleError, RuleSpec, Rules};
use tidemark_protocol::report::Marks;
use tidemark_protocol::retention::{Best, Policy};

/// The whole of `ckptd.toml`. An unknown key is refused, so that a typing error is not a silent default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub node: NodeSettings,
    pub placement: PlacementSettings,
    pub replication: ReplicationSettings,
    pub members: MembersSettings,
    pub mount: MountSettings,
    pub tier1: Tier1Settings,
    pub spill: SpillSettings,
    pub tier3: Tier3Settings,
    pub save: SaveSettings,
    pub torn: TornSettings,
    pub fsync: FsyncSettings,
    pub verify: VerifySettings,
    pub shutdown: ShutdownSettings,
    pub retention: RetentionSettings,
    pub compression: CompressionSettings,
    /// How other frameworks' checkpoints look, one `[[rules]]` each; they come before our own, so a rule may also correct
    /// one of those.
    pub rules: Vec<RuleSpec>,
}

/// Who this node is and where it listens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeSettings {
    /// The node's name in status, markers and logs. Default: the host name.
    pub name: Option<String>,
    /// Holds the socket, the lock and the last known status; nothing in it is durable.
    pub state_dir: PathBuf,
    /// Where peers connect.
    pub listen: String,
    /// Plain HTTP for `/metrics` and `/healthz`.
    pub http: String,
    /// The coordinator's lease: `file:PATH` (one machine, released by death) or `tier3` (conditional puts).
    /// Default: a lock file in the state directory.
    pub lease: Option<String>,
    /// The cluster that this node is of; its certificate says so, too.
    pub cluster: String,
    /// Where the coordinator is: `embedded` (this node, or whoever has the lease), or where to find it, as
    /// `NODE@HOST:PORT[,…]`.
    pub coordinator: String,
    /// Where peers reach this node, when that is not what it listens on.
    pub advertise: Option<String>,
    /// The directory with `ca.pem` and this node's certificate and key; see `ckptctl certs`.
    pub certs: Option<PathBuf>,
    /// Links without certificates, for one machine only: nothing is proved and nothing hidden.
    pub insecure: bool,
    /// What this node is called by for placement: `rack = "r1"`, `switch = "s3"`.
    pub labels: BTreeMap<String, String>,
}

impl Default for NodeSettings {
    fn default() -> Self {
        Self {
            name: None,
            state_dir: PathBuf::from("/run/tidemark"),
            listen: "127.0.0.1:7070".to_owned(),
            http: "127.0.0.1:7071".to_owned(),
            lease: None,
            cluster: "tidemark".to_owned(),
            coordinator: "embedded".to_owned(),
            advertise: None,
            certs: None,
            insecure: false,
            labels: BTreeMap::new(),
        }
    }
}

/// How the kernel reaches us.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MountSettings {
    /// `auto` takes passthrough where a real call shows that it works; `fallback` never does.
    pub mode: MountMode,
    /// Session threads; 0 is one for each CPU, two to eight. Names need few: a thread more than CPUs costs each request
    /// a colder cache.
    pub threads: u32,
    /// While requests follow each other, the kernel is asked to keep idle processors from sleeping: a small file then costs
    /// less than half. At most half of the time, never without requests.
    pub keep_awake: bool,
}

impl Default for MountSettings {
    fn default() -> Self {
        Self { mode: MountMode::Auto, threads: 0, keep_awake: true }
    }
}

/// See [`MountSettings::mode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MountMode {
    Auto,
    Passthrough,
    Fallback,
}

/// This node's memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tier1Settings {
    /// The budget, e.g. `"64GiB"`. Default: half of the smaller of MemAvailable and the cgroup's limit.
    pub size: Option<String>,
    /// Keep unused budget allocated and touched, so that a save never waits for the host to give memory. Costs the
    /// budget from the start; without it the first save after a pause is several times slower on a virtual machine.
    pub ballast: bool,
    /// Without privileges Tier-1 is a directory; on a memory file system, please.
    pub directory: Option<PathBuf>,
    #[serde(flatten)]
    pub marks: MarkSettings,
}

impl Default for Tier1Settings {
    fn default() -> Self {
        Self { size: None, ballast: true, directory: None, marks: MarkSettings::default() }
    }
}

/// A local disk for files that find no room in memory. Without both keys there is none.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpillSettings {
    /// An existing directory on a disk of this machine, e.g. `"/local/nvme/tidemark"`; not a network or stacked file system. The
    /// daemon makes a private folder in it and touches nothing else.
    pub directory: Option<PathBuf>,
    /// How much of the disk it may take, e.g. `"200GiB"`.
    pub budget: Option<String>,
    #[serde(flatten)]
    pub marks: MarkSettings,
}

/// When host copies give way in a tier before somebody needs the room, in percent of its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MarkSettings {
    /// Reclaiming begins when more is in use. Lower leaves more room for a save of unknown size, higher keeps more
    /// checkpoints where they open at once.
    pub high_percent: u64,
    /// It ends when less is in use, and begins here while some file grows.
    pub low_percent: u64,
}

impl Default for MarkSettings {
    fn default() -> Self {
        Self { high_percent: 85, low_percent: 75 }
    }
}

impl MarkSettings {
    /// Both marks in bytes of a tier's size.
    #[must_use]
    pub fn of(self, size_bytes: u64) -> Marks {
        let part = |percent: u64| size_bytes / 100 * percent;
        Marks { high_bytes: part(self.high_percent), low_bytes: part(self.low_percent) }
    }
}

/// The durable tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tier3Settings {
    /// `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///directory`.
    pub url: String,
    /// Bytes in one part of a multipart upload. Larger parts cost memory (times `parts_in_flight`), smaller ones
    /// requests. A multiple of the 8 MiB chunk.
    pub part_bytes: u64,
    /// Parts on their way at once, over all files, at most: the daemon finds out how many the way holds. `part_bytes` times
    /// this is the memory the drain may use.
    pub parts_in_flight: u32,
    /// Chunks of 8 MiB fetched at once, over all files that are opened cold, at most: as above.
    pub fetches_in_flight: u32,
    /// Spread the drain over the time until the next checkpoint is expected.
    pub paced: bool,
}

impl Default for Tier3Settings {
    fn default() -> Self {
        Self {
            url: "file:///var/lib/tidemark/tier3".to_owned(),
            part_bytes: 8 << 20,
            parts_in_flight: 32,
            fetches_in_flight: 16,
            paced: true,
        }
    }
}

/// When files become checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SaveSettings {
    /// Seconds of quiet after which closed files count as settled. Longer than the longest pause of a save that
    /// is still going on, shorter than a person wants to wait.
    pub settle_s: f64,
}

impl Default for SaveSettings {
    fn default() -> Self {
        Self { settle_s: 5.0 }
    }
}

/// What becomes of checkpoints that can never be complete.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TornSettings {
    /// Take them out of sight once nobody of the session that wrote them lives, and let trackers name what is whole, so that
    /// a job that comes back finds the newest whole one. They lie below `.tidemark/torn` until memory is short.
    pub hide: bool,
}

impl Default for TornSettings {
    fn default() -> Self {
        Self { hide: true }
    }
}

/// What `fsync` waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FsyncSettings {
    /// `host`: this node's journal has it.
    pub policy: FsyncPolicy,
}

impl Default for FsyncSettings {
    fn default() -> Self {
        Self { policy: FsyncPolicy::Host }
    }
}

/// See [`FsyncSettings::policy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FsyncPolicy {
    Host,
}

/// How often bytes at rest are looked at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VerifySettings {
    /// Bytes per second the scrub reads of sealed host pages; 0 switches it off. 256 MiB/s is about 2 % of one
    /// core and goes over 1 TiB in 70 minutes.
    pub scrub_bytes_per_s: u64,
}

impl Default for VerifySettings {
    fn default() -> Self {
        Self { scrub_bytes_per_s: 256 << 20 }
    }
}

/// How the daemon ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShutdownSettings {
    /// Seconds SIGTERM may spend on making everything durable before it gives up and says what is not.
    pub drain_timeout_s: u64,
    /// Seconds after SIGTERM in which jobs that are ending too may still make files; from then on a new file is EROFS, so
    /// that what is to be drained does not grow. Shorter loses the last save of a slow job, longer leaves less time for
    /// its upload.
    pub grace_s: u64,
}

impl Default for ShutdownSettings {
    fn default() -> Self {
        Self { drain_timeout_s: 60, grace_s: 10 }
    }
}

/// What is kept of each run in Tier-3: everything, unless one of these says less. What any of them keeps stays, and so do the
/// newest two versions of a run, what is pinned, and what somebody has open.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetentionSettings {
    #[serde(flatten)]
    pub all: RunRetention,
    /// Other words for single runs, by their path below the mount: `[retention.runs."team/run7"]`.
    pub runs: BTreeMap<String, RunRetention>,
}

/// See [`RetentionSettings`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunRetention {
    /// So many of the newest versions.
    pub keep_last: Option<u64>,
    /// Versions whose step is a multiple of this.
    pub keep_every_steps: Option<u64>,
    /// The first version of each period of so many seconds.
    pub keep_every_s: Option<u64>,
    /// Versions younger than so many seconds.
    pub ttl_s: Option<u64>,
    /// So many of those whose `user.tidemark.metric` is best; of equal ones the newer. The job, or whoever evaluates it, sets
    /// that attribute to a number, on the checkpoint's directory or on a file of it, before the other rules let it go: where
    /// an evaluation takes as long as three saves, keep the last four too.
    pub keep_best: Option<u64>,
    /// Whether the `lowest` is the best, as of a loss, or the `highest`.
    pub best: Best,
    /// Whether what the job removed, or saved anew under the same name, goes from Tier-3 too once two newer versions are
    /// committed. Without it such a version stays, and `ckptctl undelete` brings it back.
    pub follow_removals: bool,
}

impl RunRetention {
    fn policy(&self) -> Policy {
        let ns = |seconds: u64| i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1_000_000_000);
        Policy {
            keep_last: self.keep_last,
            keep_every_steps: self.keep_every_steps,
            keep_every_ns: self.keep_every_s.map(ns),
            ttl_ns: self.ttl_s.map(ns),
            keep_best: self.keep_best,
            best: self.best,
            honour_removals: self.follow_removals,
        }
    }
}

impl RetentionSettings {
    /// Of one run.
    #[must_use]
    pub fn policy_of(&self, run: &RunPath) -> Policy {
        let path = run.path().map_or(&b""[..], |path| path.as_bytes());
        let own = std::str::from_utf8(path).ok().and_then(|path| self.runs.get(path));
        own.unwrap_or(&self.all).policy()
    }

    /// Whether nothing is ever given up.
    #[must_use]
    pub fn keeps_everything(&self) -> bool {
        let nothing =
            |run: &RunRetention| Policy { best: Best::default(), ..run.policy() } == Policy::default();
        self.runs.values().chain([&self.all]).all(nothing)
    }
}

/// How checkpoints are made smaller on their way to Tier-3: not at all, unless one of these says how. What is in Tier-3
/// already stays as it is, and is read whatever stands here. Loose files are never encoded.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CompressionSettings {
    pub codec: CodecChoice,
    /// Other words for single runs, by their path below the mount: `[compression.runs."team/run7"]`.
    pub runs: BTreeMap<String, RunCompression>,
}

/// See [`CompressionSettings`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunCompression {
    pub codec: CodecChoice,
}

/// See [`CompressionSettings`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodecChoice {
    /// Objects are the files' bytes, and plain tools can copy a checkpoint out of Tier-3.
    #[default]
    None,
    /// zstd over the bytes as they are: repetitive data, and little of tensors.
    Zstd,
    /// Exponents and mantissas of BF16 and FP32 apart, each by zstd where that helps: smaller and faster on tensors.
    Planes,
}

impl CodecChoice {
    fn codec(self) -> Option<Codec> {
        match self {
            Self::None => None,
            Self::Zstd => Some(Codec::Zstd),
            Self::Planes => Some(Codec::Planes),
        }
    }
}

impl CompressionSettings {
    /// Of one run.
    #[must_use]
    pub fn codec_of(&self, run: &RunPath) -> Option<Codec> {
        let path = run.path().map_or(&b""[..], |path| path.as_bytes());
        let own = std::str::from_utf8(path).ok().and_then(|path| self.runs.get(path));
        own.map_or(self.codec, |own| own.codec).codec()
    }
}

/// A setting that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("the configuration does not parse: {0}")]
    Parse(String),
    #[error("{key} is {value}, but must be {rule}")]
    Value { key: &'static str, value: String, rule: &'static str },
    #[error(transparent)]
    Rule(#[from] RuleError),
}

impl Settings {
    /// Checks what types cannot say. Errors name the key, the value and the rule.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let refuse = |key, value: String, rule| Err(SettingsError::Value { key, value, rule });
        let chunk = tidemark_protocol::layout::CHUNK_BYTES;
        if let Err(error) = Labels::try_from(self.node.labels.clone()) {
            let value = format!("{:?} ({error})", self.node.labels);
            return refuse("node.labels", value, "a few short words each");
        }
        self.placement.validate()?;
        self.members.validate()?;
        if self.tier3.part_bytes == 0
            || !self.tier3.part_bytes.is_multiple_of(chunk)
            || self.tier3.part_bytes > 512 << 20
        {
            return refuse(
                "tier3.part_bytes",
                self.tier3.part_bytes.to_string(),
                "a multiple of 8 MiB up to 512 MiB",
            );
        }
        for (key, marks) in
            [("tier1.high_percent", self.tier1.marks), ("spill.high_percent", self.spill.marks)]
        {
            if marks.high_percent > 100 || marks.low_percent >= marks.high_percent {
                let value = format!("{} with a low_percent of {}", marks.high_percent, marks.low_percent);
                return refuse(key, value, "more than low_percent, and at most 100");
            }
        }
        if self.spill.directory.is_some() != self.spill.budget.is_some() {
            let which = if self.spill.budget.is_some() { "spill.directory" } else { "spill.budget" };
            return refuse(which, "not set".to_owned(), "given together with the other key of [spill]");
        }
        if !(1..=256).contains(&self.tier3.parts_in_flight) {
            return refuse("tier3.parts_in_flight", self.tier3.parts_in_flight.to_string(), "1 to 256");
        }
        if !(1..=256).contains(&self.tier3.fetches_in_flight) {
            return refuse("tier3.fetches_in_flight", self.tier3.fetches_in_flight.to_string(), "1 to 256");
        }
        if self.mount.threads > 64 {
            return refuse("mount.threads", self.mount.threads.to_string(), "0 to 64");
        }
        if !(0.0..=86_400.0).contains(&self.save.settle_s) {
            return refuse("save.settle_s", self.save.settle_s.to_string(), "0 to 86400 seconds");
        }
        if self.shutdown.drain_timeout_s > 86_400 {
            return refuse(
                "shutdown.drain_timeout_s",
                self.shutdown.drain_timeout_s.to_string(),
                "at most 86400",
            );
        }
        if self.rules.is_empty() {
            // Ours alone are good, and compiling them would hold up a daemon that takes a mount over.
            return Ok(());
        }
        self.recognition().map(drop)
    }

    /// The rules by which checkpoints are recognised: the user's, then ours.
    ///
    /// # Errors
    /// [`SettingsError::Rule`], the first that cannot be used.
    pub fn recognition(&self) -> Result<Rules, SettingsError> {
        Ok(Rules::with(&self.rules)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        Settings::default().validate().unwrap();
    }

    #[test]
    fn a_run_is_encoded_as_it_says_and_the_others_as_all_are() {
        let settings: CompressionSettings = serde_json::from_str(
            r#"{"codec":"planes","runs":{"team/run7":{"codec":"none"},"logs":{"codec":"zstd"}}}"#,
        )
        .unwrap();
        let of = |path: &str| {
            settings.codec_of(&RunPath::new(tidemark_protocol::path::RelPath::new(path).unwrap()).unwrap())
        };
        assert_eq!((of("team/run7"), of("logs"), of("team")), (None, Some(Codec::Zstd), Some(Codec::Planes)));
        let default = CompressionSettings::default();
        assert_eq!(default.codec_of(&RunPath::root()), None, "off unless somebody asks for it");
        let error = serde_json::from_str::<CompressionSettings>(r#"{"codec":"lz4"}"#).unwrap_err();
        assert!(error.to_string().contains("lz4"), "{error}");
    }

    #[test]
    fn a_misspelt_key_of_one_run_is_refused_as_one_of_all_runs() {
        let read = serde_json::from_str::<RetentionSettings>;
        for text in [r#"{"keep_lats":3}"#, r#"{"runs":{"team/run7":{"keep_lats":3}}}"#] {
            assert!(read(text).unwrap_err().to_string().contains("keep_lats"), "{text}");
        }
        let settings = read(r#"{"keep_last":3,"runs":{"team/run7":{"ttl_s":9}}}"#).unwrap();
        assert_eq!((settings.all.keep_last, settings.runs["team/run7"].ttl_s), (Some(3), Some(9)));
    }

    #[test]
    fn marks_that_cross_and_half_a_spill_are_refused() {
        let refused = |change: fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            settings.validate().unwrap_err().to_string()
        };
        let crossed = refused(|settings| settings.spill.marks.low_percent = 85);
        assert!(crossed.contains("spill.high_percent is 85 with a low_percent of 85"), "{crossed}");
        let half = refused(|settings| settings.spill.directory = Some("/mnt".into()));
        assert!(half.contains("spill.budget is not set"), "{half}");
        let text = r#"{"tier1": {"high_percent": 90, "low_percent": 40}, "spill": {"directory": "/mnt", "budget": "1GiB"}}"#;
        let settings: Settings = serde_json::from_str(text).unwrap();
        settings.validate().unwrap();
        assert_eq!(settings.tier1.marks.of(1000), Marks { high_bytes: 900, low_bytes: 400 });
        assert_eq!(settings.spill.marks, MarkSettings::default());
    }

    #[test]
    fn a_part_that_is_no_whole_number_of_chunks_is_refused() {
        let mut settings = Settings::default();
        settings.tier3.part_bytes = 5 << 20;
        assert!(settings.validate().unwrap_err().to_string().contains("tier3.part_bytes"));
    }
}

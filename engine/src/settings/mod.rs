//! The settings of a node: plain data, with defaults that suffice on one machine.
//!
//! Owns: the keys of `ckptd.toml`, their defaults and their limits. Does not own: flags and the environment (`ckptd`), which
//! override the file; what each key means (`tools/ckptd/ckptd.toml`, whose tests name a key that is missing there).

mod cluster;
mod place;
mod retention;
mod runs;

pub use cluster::{EtcdSettings, LinksSettings, MembersSettings, PlacementSettings, ReplicationSettings};
pub use retention::{RetentionSettings, RunRetention};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use tidemark_protocol::encoding::Codec;
use tidemark_protocol::id::NodeName;
use tidemark_protocol::label::Labels;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::recognise::{RuleError, RuleSpec, Rules};
use tidemark_protocol::report::Marks;

/// The whole of `ckptd.toml`. Unknown keys are refused, so that a misspelt key is not a silent default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub node: NodeSettings,
    pub etcd: EtcdSettings,
    pub placement: PlacementSettings,
    pub replication: ReplicationSettings,
    pub links: LinksSettings,
    pub members: MembersSettings,
    pub mount: MountSettings,
    pub tier1: Tier1Settings,
    pub spill: SpillSettings,
    pub tier3: Tier3Settings,
    pub save: SaveSettings,
    pub torn: TornSettings,
    pub content: ContentSettings,
    pub fsync: FsyncSettings,
    pub verify: VerifySettings,
    pub shutdown: ShutdownSettings,
    pub retention: RetentionSettings,
    pub compression: CompressionSettings,
    pub rules: Vec<RuleSpec>,
}

/// Identity and addresses of this node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeSettings {
    pub name: Option<String>,
    pub state_dir: PathBuf,
    pub listen: String,
    pub http: String,
    pub lease: Option<String>,
    pub cluster: String,
    pub coordinator: String,
    pub advertise: Option<String>,
    pub certs: Option<PathBuf>,
    pub insecure: bool,
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

impl NodeSettings {
    fn validate(&self) -> Result<(), SettingsError> {
        let refuse = |key, value: String, rule| Err(SettingsError::Value { key, value, rule });
        if !place::is_path(&self.state_dir) {
            return refuse("node.state_dir (--state-dir)", format!("{:?}", self.state_dir), place::PATH_RULE);
        }
        if place::is_root(&self.state_dir) {
            let rule = "a directory of its own, such as /run/tidemark: the daemon writes into it";
            return refuse("node.state_dir (--state-dir)", format!("{:?}", self.state_dir), rule);
        }
        // A cluster's name has a node's form, so that both stand in certificates and on command lines.
        if self.cluster.parse::<NodeName>().is_err() {
            let rule = "1 to 64 letters, digits, '.', '_' or '-', the first no '.' or '-'";
            return refuse("node.cluster", format!("{:?}", self.cluster), rule);
        }
        if let Some(advertise) =
            self.advertise.as_ref().filter(|advertise| !place::is_host_and_port(advertise))
        {
            let rule = "the host and port at which other nodes reach this one, such as 10.0.0.1:7070";
            return refuse("node.advertise (--advertise)", format!("{advertise:?}"), rule);
        }
        Ok(())
    }
}

/// Connection of the mount with the kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MountSettings {
    pub mode: MountMode,
    pub threads: u32,
    pub keep_awake: bool,
}

impl Default for MountSettings {
    fn default() -> Self {
        Self { mode: MountMode::Auto, threads: 0, keep_awake: true }
    }
}

/// Path of file contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MountMode {
    Auto,
    Passthrough,
    Fallback,
}

/// Memory of this node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tier1Settings {
    pub size: Option<String>,
    pub ballast: bool,
    pub directory: Option<PathBuf>,
    #[serde(flatten)]
    pub marks: MarkSettings,
}

impl Default for Tier1Settings {
    fn default() -> Self {
        Self { size: None, ballast: true, directory: None, marks: MarkSettings::default() }
    }
}

/// Local disk for files that find no room in memory; none without a directory and a budget.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpillSettings {
    pub directory: Option<PathBuf>,
    pub budget: Option<String>,
    #[serde(flatten)]
    pub marks: MarkSettings,
}

/// Marks of a tier between which host copies are reclaimed ahead of need, in percent of its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MarkSettings {
    pub high_percent: u64,
    pub low_percent: u64,
}

impl Default for MarkSettings {
    fn default() -> Self {
        Self { high_percent: 85, low_percent: 75 }
    }
}

impl MarkSettings {
    /// Returns both marks in bytes of a tier's size.
    #[must_use]
    pub fn of(self, size_bytes: u64) -> Marks {
        let part = |percent: u64| size_bytes / 100 * percent;
        Marks { high_bytes: part(self.high_percent), low_bytes: part(self.low_percent) }
    }
}

/// Durable storage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tier3Settings {
    pub url: String,
    pub part_bytes: u64,
    pub parts_in_flight: u32,
    pub fetches_in_flight: u32,
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

/// Recognition of finished saves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SaveSettings {
    pub settle_s: f64,
}

impl Default for SaveSettings {
    fn default() -> Self {
        Self { settle_s: 5.0 }
    }
}

/// Treatment of checkpoints that can never become complete.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TornSettings {
    pub hide: bool,
}

impl Default for TornSettings {
    fn default() -> Self {
        Self { hide: true }
    }
}

/// Reading of what files hold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ContentSettings {
    pub judge: bool,
}

impl Default for ContentSettings {
    fn default() -> Self {
        Self { judge: true }
    }
}

/// Meaning of fsync(2) on the mount.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FsyncSettings {
    pub policy: FsyncPolicy,
}

impl Default for FsyncSettings {
    fn default() -> Self {
        Self { policy: FsyncPolicy::Host }
    }
}

/// Condition for fsync(2) to return.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FsyncPolicy {
    Host,
}

/// Verification of bytes at rest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VerifySettings {
    pub scrub_bytes_per_s: u64,
}

impl Default for VerifySettings {
    fn default() -> Self {
        Self { scrub_bytes_per_s: 256 << 20 }
    }
}

/// Orderly end of the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShutdownSettings {
    pub drain_timeout_s: u64,
    pub grace_s: u64,
}

impl Default for ShutdownSettings {
    fn default() -> Self {
        Self { drain_timeout_s: 60, grace_s: 10 }
    }
}

/// Compression of uploads: of runs that are listed by `runs`, of all others by `codec`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CompressionSettings {
    pub codec: CodecChoice,
    #[serde(deserialize_with = "runs::of_compression")]
    pub runs: BTreeMap<RunPath, RunCompression>,
}

/// Compression of one run's uploads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunCompression {
    pub codec: CodecChoice,
}

/// Compression method.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodecChoice {
    #[default]
    None,
    Zstd,
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
    /// Returns the codec of one run.
    #[must_use]
    pub fn codec_of(&self, run: &RunPath) -> Option<Codec> {
        self.runs.get(run).map_or(self.codec, |own| own.codec).codec()
    }
}

/// An invalid setting.
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
    /// Checks what types cannot express. Errors name the key, the value and the rule.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let refuse = |key, value: String, rule| Err(SettingsError::Value { key, value, rule });
        let chunk = tidemark_protocol::layout::CHUNK_BYTES;
        if let Err(error) = Labels::try_from(self.node.labels.clone()) {
            let value = format!("{:?} ({error})", self.node.labels);
            return refuse("node.labels", value, "a few short words each");
        }
        if let Some(lease) = &self.node.lease
            && lease != "tier3"
            && !["file:", cluster::LEASE_IN_ETCD]
                .iter()
                .any(|kind| lease.strip_prefix(kind).is_some_and(|rest| !rest.is_empty()))
        {
            let kinds =
                "file:PATH or tier3; for several nodes give --etcd http[s]://HOST:PORT/PREFIX instead";
            return refuse("node.lease (--lease)", format!("{lease:?}"), kinds);
        }
        self.etcd.validate(self.node.lease.as_deref())?;
        self.placement.validate()?;
        self.members.validate()?;
        self.retention.validate()?;
        self.node.validate()?;
        let directories = [
            ("tier1.directory", self.tier1.directory.as_deref()),
            ("spill.directory", self.spill.directory.as_deref()),
        ];
        for (key, directory) in directories {
            if let Some(directory) = directory.filter(|directory| !place::is_path(directory)) {
                return refuse(key, format!("{directory:?}"), place::PATH_RULE);
            }
        }
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
            // The built-in rules are known to be good, and compiling them would delay a daemon that takes a mount over.
            return Ok(());
        }
        self.recognition().map(drop)
    }

    /// Returns the etcd that names the coordinator, as the user wrote it; none if there is none.
    #[must_use]
    pub fn etcd_place(&self) -> Option<&str> {
        let older = self.node.lease.as_deref().filter(|lease| lease.starts_with(cluster::LEASE_IN_ETCD));
        self.etcd.url.as_deref().or(older)
    }

    /// Returns the rules by which checkpoints are recognised: the user's, then the built-in ones.
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
    fn names_and_places_that_cannot_be_are_refused_by_their_keys() {
        let refused = |change: &dyn Fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            settings.validate().unwrap_err().to_string()
        };
        for place in ["", "a\0b"] {
            let said = refused(&|settings| settings.node.state_dir = place.into());
            assert!(said.contains("node.state_dir"), "{said}");
            let said = refused(&|settings| settings.tier1.directory = Some(place.into()));
            assert!(said.contains("tier1.directory"), "{said}");
            let said = refused(&|settings| {
                settings.spill = SpillSettings {
                    directory: Some(place.into()),
                    budget: Some("1GiB".into()),
                    ..SpillSettings::default()
                };
            });
            assert!(said.contains("spill.directory"), "{said}");
        }
        for place in ["/", "//", "/.", "/run/..", "/run/../../"] {
            let said = refused(&|settings| settings.node.state_dir = place.into());
            assert!(said.contains("node.state_dir") && said.contains("of its own"), "{place}: {said}");
        }
        for name in ["", ".a", "-a", "a b", "a/b", "é"] {
            let said = refused(&|settings| settings.node.cluster = name.into());
            assert!(said.contains("node.cluster"), "{said}");
        }
        for address in
            ["", "10.0.0.1", ":7070", "10.0.0.1:", "10.0.0.1:70700", "h:0", "h :1", "fe80::1:7070", "[]:1"]
        {
            let said = refused(&|settings| settings.node.advertise = Some(address.into()));
            assert!(said.contains("node.advertise"), "{address}: {said}");
        }
        for address in ["10.0.0.1:7070", "node-1.example:7070", "[fe80::1]:7070"] {
            let mut settings = Settings::default();
            settings.node.advertise = Some(address.into());
            settings.node.state_dir = "state/..".into();
            settings.validate().unwrap();
        }
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
    fn keys_of_an_etcd_that_do_not_fit_together_are_refused() {
        let read = |text: &str| serde_json::from_str::<Settings>(text).unwrap();
        let refused = |text: &str| read(text).validate().unwrap_err().to_string();
        for (text, words) in [
            (r#"{"etcd": {"url": "etcd://h:1/p"}}"#, "etcd.url (--etcd) is \"etcd://h:1/p\""),
            (r#"{"etcd": {"url": "https://"}}"#, "http[s]://HOST:PORT"),
            (
                r#"{"etcd": {"url": "http://h:1/p"}, "node": {"lease": "etcd://h:1/p"}}"#,
                "node.lease (--lease)",
            ),
            (r#"{"etcd": {"url": "http://h:1/p"}, "node": {"lease": "tier3"}}"#, "etcd.url (--etcd) is set"),
            (r#"{"etcd": {"user": "a", "password_file": "/f"}}"#, "etcd.user is set"),
            (r#"{"etcd": {"ca": "/f"}, "node": {"lease": "tier3"}}"#, "etcd.ca is set"),
            (r#"{"etcd": {"url": "http://h:1/p", "user": "a"}}"#, "etcd.password_file is not set"),
            (r#"{"etcd": {"url": "http://h:1/p", "password_file": "/f"}}"#, "etcd.user is not set"),
            (r#"{"etcd": {"url": "http://h:1/p", "user": "", "password_file": "/f"}}"#, "etcd.user is empty"),
            (r#"{"etcd": {"url": "https://h:1/p", "cert": "/f"}}"#, "etcd.key is not set"),
            (r#"{"etcd": {"url": "http://h:1/p", "ca": "/f"}}"#, "https://"),
            (r#"{"etcd": {"cert": "/f", "key": "/f"}, "node": {"lease": "etcd://h:1/p"}}"#, "https://"),
        ] {
            assert!(refused(text).contains(words), "{text}: {}", refused(text));
        }
        for (text, place) in [
            (
                r#"{"etcd": {"url": "https://h:1/p", "ca": "/f", "cert": "/f", "key": "/f"}}"#,
                Some("https://h:1/p"),
            ),
            (
                r#"{"node": {"lease": "etcd://h:1/p"}, "etcd": {"user": "a", "password_file": "/f"}}"#,
                Some("etcd://h:1/p"),
            ),
            (r#"{"node": {"lease": "file:/x"}}"#, None),
        ] {
            let settings = read(text);
            settings.validate().unwrap();
            assert_eq!(settings.etcd_place(), place);
        }
    }

    #[test]
    fn a_part_that_is_no_whole_number_of_chunks_is_refused() {
        let mut settings = Settings::default();
        settings.tier3.part_bytes = 5 << 20;
        assert!(settings.validate().unwrap_err().to_string().contains("tier3.part_bytes"));
    }
}

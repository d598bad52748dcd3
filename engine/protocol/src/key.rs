//! All keys of Tier-3: building and parsing them. No other module writes or splits a key.
//!
//! Owns: the layout of section 1 of `engine/design/0003-tier3-format.md`. Does not own: the content of the objects (`marker`,
//! `record`, `manifest`, `documents`), the prefix of the store's URL (the engine's store).

use crate::escape::{
    COMMITTED, OURS, RETIRED, escape_in_attempt, escape_loose, is_our_name, looks_like_version, unescape,
};
use crate::id::{
    AttemptId, ContentHash, Generation, Incarnation, NodeName, Step, Timeline, Version, hex_u64,
};
use crate::path::{
    CheckpointName, MAX_CHECKPOINT_KEY_BYTES, MAX_COMPONENT_BYTES, MAX_RUN_KEY_BYTES, RelPath, RunPath,
};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Maximum number of bytes in a key of ours. S3 allows 1024, of which 128 are left for the prefix in the store's URL.
pub const MAX_KEY_BYTES: usize = 896;
/// The longest fixed part: a prepared marker written by a stand-in, with two node names and two incarnations.
const MAX_FIXED_BYTES: usize =
    "/v/".len() + 41 + "/a--/.tidemark/prepared--by--.json".len() + 3 * 16 + 2 * 64;
const _: () = assert!(
    MAX_RUN_KEY_BYTES + 1 + MAX_CHECKPOINT_KEY_BYTES + MAX_FIXED_BYTES <= MAX_KEY_BYTES,
    "every marker of every version has a key"
);

/// Digits of a numbered key: as many as 2^64 has, so that order by name is order by number.
const NUMBER_DIGITS: usize = 20;

/// Identity of a save: the checkpoint, and the number of the save.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VersionId {
    pub run: RunPath,
    /// The checkpoint's directory in the run, or its file's name.
    pub directory: CheckpointName,
    pub timeline: Timeline,
    pub version: Version,
}

impl VersionId {
    /// Returns the prefix of the version's keys, without a slash at the end.
    #[must_use]
    pub fn prefix(&self) -> String {
        format!("{}/{}/v{}.{}", self.run, self.directory, self.timeline, self.version)
    }

    /// Returns the part of `path` that follows the attempt in a key: below the checkpoint's directory, or, if the checkpoint
    /// is a file, below the run. `None` for a path outside the run.
    #[must_use]
    pub fn relative(&self, path: &RelPath) -> Option<RelPath> {
        let in_run = self.run.below(path)?;
        let directory = RelPath::new(self.directory.as_bytes()).ok();
        Some(directory.and_then(|directory| in_run.below(&directory)).unwrap_or(in_run))
    }
}

impl fmt::Display for VersionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix())
    }
}

/// A part of an attempt: the attempt's own part, or that of a lost participant. A holder of the participant's peer copies
/// uploads those files under the holder's incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    pub attempt: AttemptId,
    pub stand_in: Option<Incarnation>,
}

impl From<AttemptId> for Part {
    fn from(attempt: AttemptId) -> Self {
        Self { attempt, stand_in: None }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a-{}", self.attempt)?;
        self.stand_in.map_or(Ok(()), |incarnation| write!(f, "+{:016x}", incarnation.0))
    }
}

/// A node's life, as a prepared marker names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeLife {
    pub node: NodeName,
    #[serde(with = "incarnation_text")]
    pub incarnation: Incarnation,
}

impl fmt::Display for NodeLife {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:016x}", self.node, self.incarnation.0)
    }
}

/// Incarnations as 16 hex digits: they are random 64-bit numbers, and JSON readers lose digits of those.
pub(crate) mod incarnation_text {
    use super::{Incarnation, hex_u64};
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(value: &Incarnation, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:016x}", value.0))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Incarnation, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        hex_u64(&text)
            .map(Incarnation)
            .ok_or_else(|| serde::de::Error::custom(format!("an incarnation is 16 hex digits, not {text:?}")))
    }
}

/// A run (or a checkpoint of it) as one component of a key. Labels are compared, never turned back into a path: a long one is
/// a hash.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Label(String);

impl Label {
    /// Longest label, in bytes, so that `boundary-<label>` fits one component of a POSIX path. A longer text becomes a hash.
    const MAX_BYTES: usize = 200;

    #[must_use]
    pub fn of_run(run: &RunPath) -> Self {
        Self::of_text(&run.to_string())
    }

    #[must_use]
    pub fn of_checkpoint(directory: &CheckpointName) -> Self {
        Self::of_text(&directory.to_string())
    }

    fn of_text(text: &str) -> Self {
        let flat = text.replace('/', "%2F");
        if flat.len() <= Self::MAX_BYTES {
            return Self(flat);
        }
        // No escape begins with "%-", so a hash is never taken for a path.
        Self(format!("%-{}", ContentHash::of(flat.as_bytes())))
    }

    fn parse(text: &str) -> Option<Self> {
        if let Some(hash) = text.strip_prefix("%-") {
            return hash.parse::<ContentHash>().ok().map(|_| Self(text.to_owned()));
        }
        let path = text.replace("%2F", "/");
        let known = path.parse::<RunPath>().is_ok() || path.parse::<CheckpointName>().is_ok();
        (known && Self::of_text(&path).0 == text).then(|| Self(text.to_owned()))
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a file's bytes in a key: the path, or its hash if the key would be too long.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathOrHash {
    Path(RelPath),
    Hash(ContentHash),
}

/// Series of small documents, of which the highest number counts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Series {
    Epoch,
    Members,
    Tree,
    /// The boundary below which nothing of the run is kept.
    Boundary(Label),
    /// Timelines; the number is the timeline's.
    Timelines(Label),
    Pins {
        run: Label,
        checkpoint: Label,
        timeline: Timeline,
        version: Version,
    },
}

impl Series {
    /// Returns the prefix of all keys of pins.
    #[must_use]
    pub fn pins_prefix() -> String {
        format!("{OURS}/pins-")
    }

    /// Returns the series that says whether a version is pinned.
    #[must_use]
    pub fn pins_of(version: &VersionId) -> Self {
        Self::Pins {
            run: Label::of_run(&version.run),
            checkpoint: Label::of_checkpoint(&version.directory),
            timeline: version.timeline,
            version: version.version,
        }
    }

    /// Returns the directory to list, with a slash at the end.
    #[must_use]
    pub fn prefix(&self) -> String {
        match self {
            Self::Epoch => format!("{OURS}/epoch/"),
            Self::Members => format!("{OURS}/members/"),
            Self::Tree => format!("{OURS}/tree/"),
            Self::Boundary(run) => format!("{OURS}/boundary-{run}/"),
            Self::Timelines(run) => format!("{OURS}/timelines-{run}/"),
            Self::Pins { run, checkpoint, timeline, version } => {
                format!("{OURS}/pins-{run}/{checkpoint}/v{timeline}.{version}/")
            }
        }
    }
}

/// A key of Tier-3, relative to the prefix of the store's URL. `Display` builds it, `FromStr` parses it, and each undoes the
/// other.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A file's bytes as the framework wrote them.
    Data {
        version: VersionId,
        part: Part,
        relative: PathOrHash,
    },
    /// `attempt.json`, the record.
    Record {
        version: VersionId,
        attempt: AttemptId,
    },
    Prepared {
        version: VersionId,
        attempt: AttemptId,
        life: NodeLife,
        by: Option<NodeLife>,
    },
    Manifest {
        version: VersionId,
        attempt: AttemptId,
        hash: ContentHash,
    },
    Committed {
        version: VersionId,
    },
    Retired {
        version: VersionId,
    },
    Numbered {
        series: Series,
        number: u64,
    },
    Nonce,
    /// A loose file's bytes.
    Loose {
        path: PathOrHash,
        generation: Generation,
    },
    LooseSidecar {
        path: PathOrHash,
        generation: Generation,
    },
    /// A loose file's bytes in several objects. No object has this key: the sidecar lists the objects.
    LooseParts {
        path: PathOrHash,
        generation: Generation,
    },
}

impl Key {
    /// Returns the key of one file's bytes; a path that does not fit is replaced by its hash. `path` is below the mount.
    /// `None` if it is outside the version's run.
    #[must_use]
    pub fn data(version: &VersionId, part: Part, path: &RelPath) -> Option<Self> {
        let relative = version.relative(path)?;
        let long = PathOrHash::Hash(ContentHash::of(relative.as_bytes()));
        let key = Self::Data { version: version.clone(), part, relative: PathOrHash::Path(relative) };
        if key.fits() {
            return Some(key);
        }
        Some(Self::Data { version: version.clone(), part, relative: long })
    }

    /// Returns the keys of one generation of a loose file and of its sidecar.
    #[must_use]
    pub fn loose(path: &RelPath, generation: Generation) -> (Self, Self) {
        let short = PathOrHash::Path(path.clone());
        let fits = Self::LooseSidecar { path: short.clone(), generation }.fits();
        let path = if fits { short } else { PathOrHash::Hash(ContentHash::of(path.as_bytes())) };
        (Self::Loose { path: path.clone(), generation }, Self::LooseSidecar { path, generation })
    }

    /// Returns the key that stands for the bytes of a generation in several objects. `None` if it would be too long: it has
    /// one byte more than the sidecar's.
    #[must_use]
    pub fn loose_parts(path: &RelPath, generation: Generation) -> Option<Self> {
        let (Self::Loose { path, .. } | Self::LooseSidecar { path, .. }, _) = Self::loose(path, generation)
        else {
            return None;
        };
        Some(Self::LooseParts { path, generation }).filter(Self::fits)
    }

    #[must_use]
    pub fn numbered(series: Series, number: u64) -> Self {
        Self::Numbered { series, number }
    }

    /// Returns the version that the key belongs to.
    #[must_use]
    pub fn version(&self) -> Option<&VersionId> {
        match self {
            Self::Data { version, .. }
            | Self::Record { version, .. }
            | Self::Prepared { version, .. }
            | Self::Manifest { version, .. }
            | Self::Committed { version }
            | Self::Retired { version } => Some(version),
            Self::Numbered { .. }
            | Self::Nonce
            | Self::Loose { .. }
            | Self::LooseSidecar { .. }
            | Self::LooseParts { .. } => None,
        }
    }

    fn fits(&self) -> bool {
        let text = self.to_string();
        text.len() <= MAX_KEY_BYTES && text.split('/').all(|component| component.len() <= MAX_COMPONENT_BYTES)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Data { version, part, relative } => match relative {
                PathOrHash::Path(path) => {
                    write!(f, "{version}/{part}/{}", escape_path(path, escape_in_attempt))
                }
                PathOrHash::Hash(hash) => write!(f, "{version}/{part}/{OURS}/long/{hash}"),
            },
            Self::Record { version, attempt } => write!(f, "{version}/a-{attempt}/{OURS}/attempt.json"),
            Self::Prepared { version, attempt, life, by } => {
                write!(f, "{version}/a-{attempt}/{OURS}/prepared-{life}")?;
                by.as_ref().map_or(Ok(()), |by| write!(f, "-by-{by}"))?;
                f.write_str(".json")
            }
            Self::Manifest { version, attempt, hash } => {
                write!(f, "{version}/a-{attempt}/{OURS}/manifest-{hash}.json")
            }
            Self::Committed { version } => write!(f, "{version}/{COMMITTED}"),
            Self::Retired { version } => write!(f, "{version}/{RETIRED}"),
            Self::Numbered { series, number } => {
                write!(f, "{}{number:0width$}", series.prefix(), width = NUMBER_DIGITS)
            }
            Self::Nonce => write!(f, "{OURS}/nonce"),
            Self::Loose { path, generation } => write!(f, "{}/g-{generation}", loose_directory(path)),
            Self::LooseSidecar { path, generation } => {
                write!(f, "{}/g-{generation}.json", loose_directory(path))
            }
            Self::LooseParts { path, generation } => {
                write!(f, "{}/g-{generation}.parts", loose_directory(path))
            }
        }
    }
}

/// A text that is no key of ours.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key:?} is not a key of ours: {why}")]
pub struct NotAKey {
    pub key: String,
    pub why: &'static str,
}

impl FromStr for Key {
    type Err = NotAKey;

    fn from_str(text: &str) -> Result<Self, NotAKey> {
        let refuse = |why| NotAKey { key: text.chars().take(MAX_KEY_BYTES).collect(), why };
        if text.len() > MAX_KEY_BYTES {
            return Err(refuse("it is too long"));
        }
        let key = if let Some(rest) = text.strip_prefix(".tidemark/") {
            parse_ours(rest).ok_or_else(|| refuse("nothing of ours below .tidemark has this form"))?
        } else {
            parse_version(text).ok_or_else(|| refuse("it is neither data nor marker of a version"))?
        };
        // An object has exactly one key: a second spelling would be a second object.
        if key.to_string() == text { Ok(key) } else { Err(refuse("it is not spelled as we write it")) }
    }
}

fn parse_ours(rest: &str) -> Option<Key> {
    if rest == "nonce" {
        return Some(Key::Nonce);
    }
    if let Some(loose) = rest.strip_prefix("loose/") {
        let (directory, last) = loose.rsplit_once('/')?;
        let path = match directory.strip_prefix(".tidemark/long/") {
            Some(hash) => PathOrHash::Hash(hash.parse().ok()?),
            None => PathOrHash::Path(unescape_path(directory)?),
        };
        let (number, suffix) =
            last.strip_prefix("g-").map(|last| last.split_once('.').unwrap_or((last, "")))?;
        let generation = Generation(number.parse().ok()?);
        return match suffix {
            "" => Some(Key::Loose { path, generation }),
            "json" => Some(Key::LooseSidecar { path, generation }),
            "parts" => Some(Key::LooseParts { path, generation }),
            _ => None,
        };
    }
    let (series, number) = rest.rsplit_once('/')?;
    let number = number.parse().ok()?;
    let series = match series {
        "epoch" => Series::Epoch,
        "members" => Series::Members,
        "tree" => Series::Tree,
        _ => {
            if let Some(run) = series.strip_prefix("boundary-") {
                Series::Boundary(Label::parse(run)?)
            } else if let Some(run) = series.strip_prefix("timelines-") {
                Series::Timelines(Label::parse(run)?)
            } else {
                let mut parts = series.strip_prefix("pins-")?.splitn(3, '/');
                let (run, checkpoint) = (Label::parse(parts.next()?)?, Label::parse(parts.next()?)?);
                let (timeline, version) = parse_version_component(parts.next()?)?;
                Series::Pins { run, checkpoint, timeline, version }
            }
        }
    };
    Some(Key::Numbered { series, number })
}

fn parse_version(text: &str) -> Option<Key> {
    // The first component of the form v<n>.<n> is ours: in runs and checkpoint names this form is escaped.
    let mut end_of_name = 0;
    let (name, numbers, rest) = loop {
        let slash = end_of_name + text.get(end_of_name..)?.find('/')?;
        let after = text.get(slash + 1..)?;
        let component = after.split('/').next()?;
        if let Some(numbers) = parse_version_component(component) {
            let rest = after.get(component.len()..)?.strip_prefix('/')?;
            break (text.get(..slash)?, numbers, rest);
        }
        end_of_name = slash + 1;
    };
    let (run, directory) = name.rsplit_once('/')?;
    let version = VersionId {
        run: run.parse().ok()?,
        directory: directory.parse().ok()?,
        timeline: numbers.0,
        version: numbers.1,
    };
    match rest {
        COMMITTED => return Some(Key::Committed { version }),
        RETIRED => return Some(Key::Retired { version }),
        _ => {}
    }
    let (part, inside) = rest.strip_prefix("a-")?.split_once('/')?;
    let part = match part.split_once('+') {
        None => Part { attempt: part.parse().ok()?, stand_in: None },
        Some((attempt, life)) => {
            Part { attempt: attempt.parse().ok()?, stand_in: Some(Incarnation(hex_u64(life)?)) }
        }
    };
    let Some(ours) = inside.strip_prefix(".tidemark/") else {
        return Some(Key::Data { version, part, relative: PathOrHash::Path(unescape_path(inside)?) });
    };
    if let Some(hash) = ours.strip_prefix("long/") {
        return Some(Key::Data { version, part, relative: PathOrHash::Hash(hash.parse().ok()?) });
    }
    let attempt = part.attempt;
    if ours == "attempt.json" {
        return Some(Key::Record { version, attempt });
    }
    let stem = ours.strip_suffix(".json")?;
    if let Some(hash) = stem.strip_prefix("manifest-") {
        return Some(Key::Manifest { version, attempt, hash: hash.parse().ok()? });
    }
    let (life, by) = parse_prepared(stem.strip_prefix("prepared-")?)?;
    Some(Key::Prepared { version, attempt, life, by })
}

/// Parses `<node>-<incarnation>` or `<node>-<incarnation>-by-<node>-<incarnation>`. A node may itself be called `x-by-y`, but
/// `by` follows exactly 16 hex digits. A node whose name imitates that is refused by [`NodeLife::is_unambiguous`].
fn parse_prepared(text: &str) -> Option<(NodeLife, Option<NodeLife>)> {
    for (at, _) in text.match_indices("-by-") {
        let (lost, by) = (parse_life(text.get(..at)?), parse_life(text.get(at + 4..)?));
        if let (Some(lost), Some(by)) = (lost, by) {
            return Some((lost, Some(by)));
        }
    }
    Some((parse_life(text)?, None))
}

fn parse_life(text: &str) -> Option<NodeLife> {
    let (node, incarnation) = text.rsplit_once('-')?;
    Some(NodeLife { node: node.parse().ok()?, incarnation: Incarnation(hex_u64(incarnation)?) })
}

impl NodeLife {
    /// Whether a prepared marker's key names this node alone: a node called `a-<16 hex digits>-by-b` would read as a stand-in
    /// for `a`. Such a name is refused when the node starts.
    #[must_use]
    pub fn is_unambiguous(&self) -> bool {
        matches!(parse_prepared(&self.to_string()), Some((life, None)) if life == *self)
    }
}

/// Parses `v<timeline>.<version>`, in our spelling or another; the caller compares the whole key.
fn parse_version_component(component: &str) -> Option<(Timeline, Version)> {
    let (timeline, version) = component.strip_prefix('v')?.split_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(timeline) || !digits(version) {
        return None;
    }
    Some((Timeline(timeline.parse().ok()?), Version(version.parse().ok()?)))
}

fn loose_directory(path: &PathOrHash) -> String {
    match path {
        PathOrHash::Path(path) => format!("{OURS}/loose/{}", escape_path(path, escape_loose)),
        PathOrHash::Hash(hash) => format!("{OURS}/loose/{OURS}/long/{hash}"),
    }
}

fn escape_path(path: &RelPath, component: fn(&[u8]) -> String) -> String {
    path.components().map(component).collect::<Vec<_>>().join("/")
}

fn unescape_path(text: &str) -> Option<RelPath> {
    RelPath::new(unescape(text)?).ok()
}

/// Whether a manifest may name an object that another program wrote: it lies where no key of ours ever is. Retirements and
/// sweeps delete only keys below `v<n>.<n>/` and `.tidemark/`, so that no delete reaches such an object.
#[must_use]
pub fn is_foreign(key: &str) -> bool {
    let fits = |component: &str| {
        !matches!(component, "" | "." | "..")
            && component.len() <= MAX_COMPONENT_BYTES
            && !is_our_name(component)
            && !looks_like_version(component)
    };
    key.len() <= MAX_KEY_BYTES && !key.contains('\0') && key.split('/').all(fits)
}

/// Returns the path of a checkpoint below the mount, for people and for requests: `<run>/<directory>`.
#[must_use]
pub fn checkpoint_path(run: &RunPath, directory: &CheckpointName) -> Vec<u8> {
    let run = run.path().map_or(&b""[..], RelPath::as_bytes);
    match (run, directory.as_bytes()) {
        (run, b".") => run.to_vec(),
        (b"", name) => name.to_vec(),
        (run, name) => [run, b"/", name].concat(),
    }
}

/// Reference to a committed version of the same run in another's marker.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VersionRef {
    pub directory: CheckpointName,
    pub timeline: Timeline,
    pub version: Version,
    pub step: Option<Step>,
}

#[cfg(test)]
#[path = "key_test.rs"]
mod tests;

//! Selectors: the checkpoint that a person means, and the place on the mount.
//!
//! Owns: the grammar of CHECKPOINT on the command line, and turning a typed path into one relative to the mount. Does not own: finding the
//! checkpoint (the catalog), following symbolic links (the daemon, which has the tree).

use crate::id::{Timeline, Version};
use crate::path::{CheckpointName, RelPath};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// Longest path, in bytes. No path on Linux is longer (PATH_MAX, with its final zero).
pub const PATH_BYTES_MAX: usize = 4095;

/// A path relative to the mount, without leading slash, `.`, `..` or doubled slashes; empty is the mount's root. In JSON a string, or a
/// list of byte values if it is not UTF-8.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Place(Vec<u8>);

impl Place {
    /// Returns the mount's root.
    #[must_use]
    pub const fn root() -> Self {
        Self(Vec::new())
    }

    /// Makes a place from a path that is relative to the mount already. `.` and `..` are resolved by text alone.
    ///
    /// # Errors
    /// When the path leads out of the mount, has a zero byte, or is longer than [`PATH_BYTES_MAX`].
    pub fn relative(path: &[u8]) -> Result<Self, PlaceError> {
        let shown = || String::from_utf8_lossy(path).into_owned();
        if path.len() > PATH_BYTES_MAX {
            return Err(PlaceError::TooLong { len_bytes: path.len() });
        }
        if path.contains(&0) {
            return Err(PlaceError::ZeroByte { path: shown() });
        }
        let mut names: Vec<&[u8]> = Vec::new();
        for name in path.split(|byte| *byte == b'/') {
            match name {
                b"" | b"." => {}
                b".." => {
                    names.pop().ok_or_else(|| PlaceError::Outside { path: shown(), mount: String::new() })?;
                }
                name => names.push(name),
            }
        }
        Ok(Self(names.join(&b'/')))
    }

    /// Makes a place, by text alone, from a path that a person typed in directory `cwd`. The person sees the mount at `mount` (both
    /// absolute).
    ///
    /// # Errors
    /// As [`Place::relative`], and [`PlaceError::Outside`] when the path is not below the mount.
    pub fn typed(mount: &[u8], cwd: &[u8], path: &[u8]) -> Result<Self, PlaceError> {
        let outside = || PlaceError::Outside {
            path: String::from_utf8_lossy(path).into_owned(),
            mount: String::from_utf8_lossy(mount).into_owned(),
        };
        // `..` is resolved before the result is compared with the mount, so that it cannot lead out of it.
        let joined = if path.starts_with(b"/") { path.to_vec() } else { [cwd, b"/", path].concat() };
        let absolute = Self::relative(&joined).map_err(|error| match error {
            PlaceError::Outside { .. } => outside(),
            other => other,
        })?;
        below(mount, &absolute.0).map(|rest| Self(rest.to_vec())).ok_or_else(outside)
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the place that is meant if the path was typed in the form of answers (`a%FF.csv`, `100%25`); `None` if none of its names has
    /// that form. A name with a `%` that no answer writes (`%41`, `100%`) stays as it is.
    #[must_use]
    pub fn unescaped(&self) -> Option<Self> {
        let read = |name: &[u8]| -> Option<Vec<u8>> {
            let text = std::str::from_utf8(name).ok().filter(|text| text.contains('%'))?;
            // A run is written as in a key.
            let of_run = || text.parse::<CheckpointName>().map(|name| name.as_bytes().to_vec());
            text.parse::<RelPath>().map(|name| name.as_bytes().to_vec()).or_else(|_| of_run()).ok()
        };
        let names = self.0.split(|byte| *byte == b'/');
        let names: Vec<Vec<u8>> = names.map(|name| read(name).unwrap_or_else(|| name.to_vec())).collect();
        let bytes = names.join(&b'/');
        if bytes == self.0 { None } else { Self::relative(&bytes).ok() }
    }

    #[must_use]
    pub const fn is_root(&self) -> bool {
        self.0.is_empty()
    }
}

/// Returns the rest of `clean` (without leading slash) below `mount`; none if it is elsewhere.
fn below<'a>(mount: &[u8], clean: &'a [u8]) -> Option<&'a [u8]> {
    let mount = Place::relative(mount).ok()?;
    if mount.is_root() {
        return Some(clean);
    }
    match clean.strip_prefix(mount.as_bytes())? {
        b"" => Some(b""),
        rest => rest.strip_prefix(b"/"),
    }
}

/// The reason why a path is no place on the mount.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    #[error("{path:?} is not below the mount{}{mount}", if mount.is_empty() { "" } else { " " })]
    Outside { path: String, mount: String },
    #[error("a path of {len_bytes} bytes; Linux takes {PATH_BYTES_MAX}")]
    TooLong { len_bytes: usize },
    #[error("{path:?} has a zero byte")]
    ZeroByte { path: String },
}

impl Serialize for Place {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(&self.0) {
            Ok(text) => serializer.serialize_str(text),
            Err(_) => serializer.collect_seq(&self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Place {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            Bytes(Vec<u8>),
        }
        let bytes = match Written::deserialize(deserializer)? {
            Written::Text(text) => text.into_bytes(),
            Written::Bytes(bytes) => bytes,
        };
        if bytes.starts_with(b"/") {
            return Err(D::Error::custom("a place is relative to the mount, without a leading slash"));
        }
        Self::relative(&bytes).map_err(D::Error::custom)
    }
}

/// CHECKPOINT in the form that commands use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selector {
    /// `latest`: the committed checkpoint that the job of the only run would load; an error if several runs have a committed one.
    Latest,
    /// `RUN@latest`.
    LatestOf(Place),
    /// `@STEP`: the only checkpoint with that step; an error if there are several.
    Step(u64),
    /// `RUN@STEP`: as `@STEP`, within one run. If there are several, the only committed one.
    StepOf(Place, u64),
    /// A checkpoint's directory or file, or a file inside it: the newest version there.
    At(Place),
}

/// CHECKPOINT as typed: the path in it is not yet placed on the mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Typed<'a> {
    Latest,
    LatestOf(&'a [u8]),
    Step(u64),
    StepOf(&'a [u8], u64),
    At(&'a [u8]),
}

impl<'a> Typed<'a> {
    /// Parses CHECKPOINT. The text after the last `@` is a step only if it is all digits, or `latest`. Any other text is a path, which may
    /// contain `@`. A path that looks like another form needs `./` before it, or, for a run's name, a final `/`.
    ///
    /// # Errors
    /// When nothing is typed, or the step does not fit 64 bits.
    pub fn parse(text: &'a [u8]) -> Result<Self, SelectorError> {
        if text.is_empty() {
            return Err(SelectorError::Empty);
        }
        if text == b"latest" {
            return Ok(Self::Latest);
        }
        let at = text.iter().rposition(|byte| *byte == b'@');
        let Some((run, step)) = at.map(|at| (&text[..at], &text[at + 1..])) else {
            return Ok(Self::At(text));
        };
        let plain_path =
            text.starts_with(b"./") || text.starts_with(b"/") && step != b"latest" && !all_digits(step);
        if plain_path || !(all_digits(step) || step == b"latest") {
            return Ok(Self::At(text));
        }
        match (run, step) {
            (b"", b"latest") => Ok(Self::Latest),
            (run, b"latest") => Ok(Self::LatestOf(run)),
            (run, step) => {
                let digits = String::from_utf8_lossy(step);
                let step =
                    digits.parse().map_err(|_| SelectorError::StepTooLarge { step: digits.into_owned() })?;
                Ok(if run.is_empty() { Self::Step(step) } else { Self::StepOf(run, step) })
            }
        }
    }

    /// Makes the selector, with its path placed on the mount by `place`.
    ///
    /// # Errors
    /// The errors of `place`.
    pub fn place<E>(self, place: impl FnOnce(&[u8]) -> Result<Place, E>) -> Result<Selector, E> {
        Ok(match self {
            Self::Latest => Selector::Latest,
            Self::LatestOf(run) => Selector::LatestOf(place(run)?),
            Self::Step(step) => Selector::Step(step),
            Self::StepOf(run, step) => Selector::StepOf(place(run)?, step),
            Self::At(path) => Selector::At(place(path)?),
        })
    }
}

/// A version of a checkpoint, as `ckptctl ls` shows it: `TIMELINE.VERSION`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VersionNumber {
    pub timeline: Timeline,
    pub version: Version,
}

impl std::str::FromStr for VersionNumber {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        let read = || {
            let (timeline, version) = text.split_once('.')?;
            let digits = |text: &str| all_digits(text.as_bytes()).then(|| text.parse::<u64>().ok()).flatten();
            Some(Self { timeline: Timeline(digits(timeline)?), version: Version(digits(version)?) })
        };
        read().ok_or_else(|| SelectorError::Version { text: text.chars().take(64).collect() })
    }
}

impl TryFrom<String> for VersionNumber {
    type Error = SelectorError;

    fn try_from(text: String) -> Result<Self, SelectorError> {
        text.parse()
    }
}

impl From<VersionNumber> for String {
    fn from(number: VersionNumber) -> Self {
        format!("{}.{}", number.timeline, number.version)
    }
}

fn all_digits(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(u8::is_ascii_digit)
}

/// The reason why a text selects nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    #[error("an empty CHECKPOINT; write a path, RUN@STEP, @STEP or latest")]
    Empty,
    #[error("step {step} does not fit 64 bits")]
    StepTooLarge { step: String },
    #[error("{text:?} is no version; write TIMELINE.VERSION, such as 0.2, as `ckptctl ls --all` shows it")]
    Version { text: String },
}

#[cfg(test)]
#[path = "selector_test.rs"]
mod tests;

//! Paths as the mount gives them, which are bytes, and their reversible text.
//!
//! Owns: relative paths, run directories and checkpoint names. Does not own: the escapes for bytes that text cannot hold (`escape`),
//! the form of a path in a key (`key`), the tree itself (the engine's namespace).

use crate::escape::{escape, escape_above_version, unescape};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// Maximum number of bytes in a path: Linux's PATH_MAX.
pub const MAX_PATH_BYTES: usize = 4096;
/// Maximum number of bytes in one component: Linux's NAME_MAX.
pub const MAX_COMPONENT_BYTES: usize = 255;

/// Splits a path of the mount into its directory, empty for the root, and the last component.
#[must_use]
pub fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[], path),
    }
}

/// Returns a path of the mount and those of the directories above it, up to the root, which is empty.
pub fn upwards(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::successors(Some(path), |at| (!at.is_empty()).then(|| split(at).0))
}

/// Joins a name to a directory, which is empty for the root.
#[must_use]
pub fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, name].join(&b'/') }
}

/// A path below the mount: not empty, components separated by one `/`, none of them `.` or `..`, no NUL. Such a path can never name
/// anything outside the directory that it is joined to.
///
/// The text form, also in JSON, is UTF-8: every byte that is not part of valid UTF-8, every control character and every `%` is
/// written `%XX` (capitals).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelPath(Vec<u8>);

/// The reason why bytes are not a path of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathProblem {
    #[error("the path is empty")]
    Empty,
    #[error("the path has {0} bytes, and {MAX_PATH_BYTES} are allowed")]
    TooLong(usize),
    #[error("a component has {0} bytes, and {MAX_COMPONENT_BYTES} are allowed")]
    ComponentTooLong(usize),
    #[error("the path has an empty component, or begins or ends with a slash")]
    EmptyComponent,
    #[error("the path has the component '.' or '..', which could leave its directory")]
    Traversal,
    #[error("the path has a NUL byte")]
    Nul,
    #[error("the text has an escape that is not the one we write")]
    Escape,
    #[error("as part of a key it has {bytes} bytes, and {limit} are allowed")]
    KeyTooLong { bytes: usize, limit: usize },
    #[error("a checkpoint's name is one component")]
    SeveralComponents,
}

impl RelPath {
    /// # Errors
    /// When the bytes are not such a path.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, PathProblem> {
        let bytes = bytes.into();
        if bytes.is_empty() {
            return Err(PathProblem::Empty);
        }
        if bytes.len() > MAX_PATH_BYTES {
            return Err(PathProblem::TooLong(bytes.len()));
        }
        if bytes.contains(&0) {
            return Err(PathProblem::Nul);
        }
        for component in bytes.split(|b| *b == b'/') {
            match component {
                b"" => return Err(PathProblem::EmptyComponent),
                b"." | b".." => return Err(PathProblem::Traversal),
                long if long.len() > MAX_COMPONENT_BYTES => {
                    return Err(PathProblem::ComponentTooLong(long.len()));
                }
                _ => {}
            }
        }
        Ok(Self(bytes))
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn components(&self) -> impl DoubleEndedIterator<Item = &[u8]> {
        self.0.split(|b| *b == b'/')
    }

    /// Returns the last component.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        self.0.rsplit(|b| *b == b'/').next().unwrap_or(&self.0)
    }

    /// Returns the path without its last component; `None` directly below the mount.
    #[must_use]
    pub fn parent(&self) -> Option<Self> {
        let slash = self.0.iter().rposition(|b| *b == b'/')?;
        Some(Self(self.0[..slash].to_vec()))
    }

    /// Whether this path lies below `directory` (a directory is not below itself).
    #[must_use]
    pub fn is_below(&self, directory: &Self) -> bool {
        self.strip(&directory.0).is_some()
    }

    /// Returns the rest of this path below `directory`.
    #[must_use]
    pub fn below(&self, directory: &Self) -> Option<Self> {
        self.strip(&directory.0).map(|rest| Self(rest.to_vec()))
    }

    fn strip(&self, directory: &[u8]) -> Option<&[u8]> {
        self.0.strip_prefix(directory)?.strip_prefix(b"/")
    }

    /// # Errors
    /// When the two together are longer than a path may be.
    pub fn join(&self, relative: &Self) -> Result<Self, PathProblem> {
        Self::new([self.as_bytes(), b"/", relative.as_bytes()].concat())
    }
}

/// Maximum number of bytes of a run in a key; `key` adds up the parts of a key.
pub const MAX_RUN_KEY_BYTES: usize = 360;
/// Maximum number of bytes of a checkpoint's name in a key: one component of a POSIX path holds 255, and a temporary name needs a
/// few more than the name.
pub const MAX_CHECKPOINT_KEY_BYTES: usize = 240;

/// A run directory: a path below the mount, or the mount itself, whose text is `_`. The text is the form in keys (a directory really
/// named `_` is `%5F`), of at most [`MAX_RUN_KEY_BYTES`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct RunPath(Option<RelPath>);

impl RunPath {
    /// Returns the mount itself.
    #[must_use]
    pub const fn root() -> Self {
        Self(None)
    }

    /// # Errors
    /// When the path is too long to be part of a key.
    pub fn new(path: RelPath) -> Result<Self, PathProblem> {
        for component in path.components() {
            let bytes = escape_above_version(component).len();
            if bytes > MAX_COMPONENT_BYTES {
                return Err(PathProblem::KeyTooLong { bytes, limit: MAX_COMPONENT_BYTES });
            }
        }
        let run = Self(Some(path));
        let bytes = run.to_string().len();
        if bytes > MAX_RUN_KEY_BYTES {
            return Err(PathProblem::KeyTooLong { bytes, limit: MAX_RUN_KEY_BYTES });
        }
        Ok(run)
    }

    /// Returns the run directory below the mount; `None` is the mount itself.
    #[must_use]
    pub fn path(&self) -> Option<&RelPath> {
        self.0.as_ref()
    }

    /// Returns the rest of `path` below this run.
    #[must_use]
    pub fn below(&self, path: &RelPath) -> Option<RelPath> {
        match &self.0 {
            None => Some(path.clone()),
            Some(run) => path.below(run),
        }
    }
}

/// The name of a checkpoint in its run: the last component of the directory or the file. The rank of a family of files is masked as
/// `*`. If the run directory is itself the checkpoint, the name is `.`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckpointName(Vec<u8>);

impl CheckpointName {
    /// # Errors
    /// When it is not one component, or too long to be part of a key.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, PathProblem> {
        let bytes = bytes.into();
        if bytes != b"." {
            RelPath::new(bytes.clone())?;
        }
        if bytes.contains(&b'/') {
            return Err(PathProblem::SeveralComponents);
        }
        let name = Self(bytes);
        let bytes = name.to_string().len();
        if bytes > MAX_CHECKPOINT_KEY_BYTES {
            return Err(PathProblem::KeyTooLong { bytes, limit: MAX_CHECKPOINT_KEY_BYTES });
        }
        Ok(name)
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Any bytes (a symlink's target, an attribute's name) with the text form of [`RelPath`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RawText(pub Vec<u8>);

/// Decodes a text that must be exactly what [`escape`] writes, so that one path has one text.
fn unescape_exactly(text: &str) -> Result<Vec<u8>, PathProblem> {
    let bytes = unescape(text).ok_or(PathProblem::Escape)?;
    if escape(&bytes) == text { Ok(bytes) } else { Err(PathProblem::Escape) }
}

impl FromStr for RelPath {
    type Err = PathProblem;

    fn from_str(text: &str) -> Result<Self, PathProblem> {
        Self::new(unescape_exactly(text)?)
    }
}

impl FromStr for RunPath {
    type Err = PathProblem;

    fn from_str(text: &str) -> Result<Self, PathProblem> {
        if text == "_" {
            return Ok(Self::root());
        }
        let run = Self::new(RelPath::new(unescape(text).ok_or(PathProblem::Escape)?)?)?;
        if run.to_string() == text { Ok(run) } else { Err(PathProblem::Escape) }
    }
}

impl FromStr for CheckpointName {
    type Err = PathProblem;

    fn from_str(text: &str) -> Result<Self, PathProblem> {
        let name = Self::new(unescape(text).ok_or(PathProblem::Escape)?)?;
        if name.to_string() == text { Ok(name) } else { Err(PathProblem::Escape) }
    }
}

impl FromStr for RawText {
    type Err = PathProblem;

    fn from_str(text: &str) -> Result<Self, PathProblem> {
        unescape_exactly(text).map(Self)
    }
}

impl fmt::Display for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escape(&self.0))
    }
}

impl fmt::Display for RunPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(path) = &self.0 else { return f.write_str("_") };
        for (index, component) in path.components().enumerate() {
            if index > 0 {
                f.write_str("/")?;
            }
            f.write_str(&escape_above_version(component))?;
        }
        Ok(())
    }
}

impl fmt::Display for CheckpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escape_above_version(&self.0))
    }
}

impl fmt::Display for RawText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escape(&self.0))
    }
}

macro_rules! text_forms {
    ($($name:ident),*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", self.to_string())
            }
        }
    )*};
}
text_forms!(RelPath, RunPath, CheckpointName, RawText);
crate::id::json_as_text!(RelPath, RunPath, CheckpointName, RawText);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_path_never_leaves_its_directory() {
        for bad in ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a\0b"] {
            assert!(RelPath::new(bad).is_err(), "{bad:?}");
        }
        assert!(RelPath::new("a".repeat(256)).is_err());
        assert!("%2e%2e/a".parse::<RelPath>().is_err(), "small hex digits are not ours");
        assert!("%2E%2E/a".parse::<RelPath>().is_err(), "an escaped '..' is still '..'");
        assert!("a%41".parse::<RelPath>().is_err(), "one path has one text");
    }

    #[test]
    fn the_mount_root_and_a_directory_named_underscore_differ() {
        let real = RunPath::new(RelPath::new("_").unwrap()).unwrap();
        assert_eq!((RunPath::root().to_string().as_str(), real.to_string().as_str()), ("_", "%5F"));
        assert_eq!("%5F".parse::<RunPath>(), Ok(real));
        assert_eq!("_".parse::<RunPath>(), Ok(RunPath::root()));
    }

    #[test]
    fn below_is_by_component() {
        let run = RelPath::new("a/b").unwrap();
        assert!(!RelPath::new("a/bc/d").unwrap().is_below(&run));
        assert_eq!(RelPath::new("a/b/c").unwrap().below(&run), Some(RelPath::new("c").unwrap()));
    }

    proptest! {
        #[test]
        fn escaping_is_reversible_and_plain(bytes: Vec<u8>) {
            let text = escape(&bytes);
            prop_assert!(!text.chars().any(char::is_control));
            prop_assert_eq!(unescape(&text), Some(bytes));
        }

        #[test]
        fn paths_round_trip_through_json(bytes: Vec<u8>) {
            if let Ok(path) = RelPath::new(bytes) {
                let json = serde_json::to_string(&path).unwrap();
                prop_assert_eq!(serde_json::from_str::<RelPath>(&json).unwrap(), path);
            }
        }
    }
}

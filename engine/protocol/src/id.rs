//! Names and numbers, each with one meaning.
//!
//! Owns: the identifier types and their text forms. Does not own: how keys contain them (`key`).

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }

        impl $name {
            /// Returns the number after this one. Panics at 2^64, which no counter of ours reaches.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0.checked_add(1).expect("a counter that grows by one never reaches 2^64"))
            }
        }
    };
}

number! {
    /// A life of a node's Tier-1; drawn at random when Tier-1 is made, kept across restarts of the daemon.
    Incarnation
}
number! {
    /// Number of a file within one incarnation; see [`FileId`].
    FileCounter
}
number! {
    /// Number of a seal of a file's bytes. The first seal of a file is 1; 0 is "never sealed".
    SealNumber
}
number! {
    /// Order of the files that one path has named.
    Generation
}
number! {
    /// A training step.
    Step
}
number! {
    /// A branch of a run; 0 is the branch that a run begins with.
    Timeline
}
number! {
    /// Number of a save of one (run, checkpoint directory, timeline); the first is 1.
    Version
}
number! {
    /// The coordinator's fencing number; it only rises.
    Epoch
}
number! {
    /// A run of the daemon.
    StartId
}

/// A file for as long as its bytes are wanted anywhere: (node incarnation, counter). Paths are names for it.
/// The text form, also in JSON, is `<16 hex digits>-<counter>`, because JSON readers lose digits of large
/// numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    pub incarnation: Incarnation,
    pub counter: FileCounter,
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.incarnation.0, self.counter.0)
    }
}

impl FromStr for FileId {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let refused = || NotAnId { what: "a file identity", text: text.to_owned() };
        let (incarnation, counter) = text.split_once('-').ok_or_else(refused)?;
        let id = Self {
            incarnation: Incarnation(hex_u64(incarnation).ok_or_else(refused)?),
            counter: FileCounter(counter.parse().map_err(|_| refused())?),
        };
        // An identity has exactly one text: no leading zeros, no plus sign.
        if id.to_string() == text { Ok(id) } else { Err(refused()) }
    }
}

/// An attempt to bring one version to Tier-3, drawn at random by the coordinator. 16 hex digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptId(pub u64);

impl fmt::Display for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for AttemptId {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        hex_u64(text).map(Self).ok_or_else(|| NotAnId { what: "an attempt", text: text.to_owned() })
    }
}

/// BLAKE3 hash of some exact bytes. 64 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentHash(pub [u8; 32]);

impl ContentHash {
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for ContentHash {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let refused = || NotAnId { what: "a BLAKE3 hash", text: text.to_owned() };
        if text.len() != 64 || !is_lower_hex(text) {
            return Err(refused());
        }
        let hash = blake3::Hash::from_hex(text).map_err(|_| refused())?;
        Ok(Self(*hash.as_bytes()))
    }
}

/// Maximum number of bytes in a node's name. A key holds two of them, and a Linux host name has at most 64.
pub const MAX_NODE_NAME_BYTES: usize = 64;

/// A node's name: ASCII letters, digits, `.`, `_`, `-`, not beginning with `.` or `-`. Names stand unescaped in
/// keys and on command lines.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeName(String);

impl NodeName {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for NodeName {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        let first_is_plain = text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_');
        if first_is_plain && text.len() <= MAX_NODE_NAME_BYTES && text.bytes().all(allowed) {
            return Ok(Self(text.to_owned()));
        }
        let what = "a node's name (1 to 64 letters, digits, '.', '_' or '-', the first no '.' or '-')";
        Err(NotAnId { what, text: text.chars().take(MAX_NODE_NAME_BYTES).collect() })
    }
}

/// A text that is not the identifier it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {what}")]
pub struct NotAnId {
    pub what: &'static str,
    pub text: String,
}

/// Parses exactly 16 lower-case hex digits.
pub(crate) fn hex_u64(text: &str) -> Option<u64> {
    if text.len() != 16 || !is_lower_hex(text) {
        return None;
    }
    u64::from_str_radix(text, 16).ok()
}

fn is_lower_hex(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

macro_rules! json_as_text {
    ($($name:ty),*) => {$(
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Cow::<str>::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}
pub(crate) use json_as_text;

json_as_text!(FileId, AttemptId, ContentHash, NodeName);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_identity_has_one_text() {
        for text in ["1-1", "0000000000000001-01", "0000000000000001-+1", "000000000000000A-1", ""] {
            assert!(text.parse::<FileId>().is_err(), "{text}");
        }
        for text in ["", ".", "-a", "a/b", "a b", &"x".repeat(65)] {
            assert!(text.parse::<NodeName>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn identifiers_round_trip(incarnation: u64, counter: u64, hash: [u8; 32]) {
            let file = FileId { incarnation: Incarnation(incarnation), counter: FileCounter(counter) };
            prop_assert_eq!(file.to_string().parse::<FileId>().unwrap(), file);
            let hash = ContentHash(hash);
            prop_assert_eq!(hash.to_string().parse::<ContentHash>().unwrap(), hash);
            let attempt = AttemptId(counter);
            prop_assert_eq!(attempt.to_string().parse::<AttemptId>().unwrap(), attempt);
        }
    }
}

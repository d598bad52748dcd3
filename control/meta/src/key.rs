//! The keys of the metadata, and their bytes in a store.
//!
//! Owns: which keys there are, their order, their encoding. Does not own: the values (`value`).

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use tidemark_protocol::id::{FileCounter, FileId, Incarnation, NodeName};
use tidemark_protocol::path::{PathProblem, RelPath};

/// The directory at the top of the mount. No life has the number 0.
pub const ROOT: FileId = FileId { incarnation: Incarnation(0), counter: FileCounter(0) };

/// A component of a path: 1 to 255 bytes without `/` and NUL, neither `.` nor `..`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct Name(Arc<[u8]>);

impl Name {
    /// Checks and copies `bytes`.
    ///
    /// # Errors
    /// [`PathProblem`] if the bytes are not one component.
    pub fn new(bytes: &[u8]) -> Result<Self, PathProblem> {
        RelPath::new(bytes)?;
        if bytes.contains(&b'/') {
            return Err(PathProblem::SeveralComponents);
        }
        Ok(Self(bytes.into()))
    }

    /// Returns the name's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl TryFrom<Vec<u8>> for Name {
    type Error = PathProblem;

    fn try_from(bytes: Vec<u8>) -> Result<Self, PathProblem> {
        Self::new(&bytes)
    }
}

impl From<Name> for Vec<u8> {
    fn from(name: Name) -> Self {
        name.0.to_vec()
    }
}

/// A name in a directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Place {
    pub directory: FileId,
    pub name: Name,
}

/// A key of the metadata.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Key {
    /// A random number, drawn at each import or restore.
    Era,
    /// The node that may write.
    Coordinator,
    /// The number of transactions in this era.
    Tick,
    /// The number of directories that were moved to another parent.
    Moves,
    Member(NodeName),
    Publication(NodeName),
    Inode(FileId),
    Name(Place),
}

/// Bytes that are not a key of ours.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a key of the metadata")]
pub struct NotAKey(pub String);

impl Key {
    /// Returns the bytes of the key in a store, without the cluster's prefix.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Era => b"era".to_vec(),
            Self::Coordinator => b"coordinator".to_vec(),
            Self::Tick => b"tick".to_vec(),
            Self::Moves => b"moves".to_vec(),
            Self::Member(node) => format!("member/{node}").into_bytes(),
            Self::Publication(node) => format!("pub/{node}").into_bytes(),
            Self::Inode(id) => format!("inode/{id}").into_bytes(),
            Self::Name(place) => {
                [format!("name/{}/", place.directory).as_bytes(), place.name.as_bytes()].concat()
            }
        }
    }

    /// Reads [`Self::to_bytes`].
    ///
    /// # Errors
    /// [`NotAKey`] for any other bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, NotAKey> {
        Self::parse(bytes).ok_or_else(|| NotAKey(bytes.escape_ascii().to_string()))
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let Some(slash) = bytes.iter().position(|byte| *byte == b'/') else {
            return match bytes {
                b"era" => Some(Self::Era),
                b"coordinator" => Some(Self::Coordinator),
                b"tick" => Some(Self::Tick),
                b"moves" => Some(Self::Moves),
                _ => None,
            };
        };
        let (kind, rest) = (&bytes[..slash], &bytes[slash + 1..]);
        if kind == b"name" {
            let slash = rest.iter().position(|byte| *byte == b'/')?;
            let directory = str::from_utf8(&rest[..slash]).ok()?.parse().ok()?;
            return Some(Self::Name(Place { directory, name: Name::new(&rest[slash + 1..]).ok()? }));
        }
        let rest = str::from_utf8(rest).ok()?;
        match kind {
            b"member" => rest.parse().ok().map(Self::Member),
            b"pub" => rest.parse().ok().map(Self::Publication),
            b"inode" => rest.parse().ok().map(Self::Inode),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn other_bytes_are_no_keys() {
        for bytes in
            ["", "era/", "name/0000000000000000-0", "name/0000000000000000-0/", "inode/1-1", "pub/-a"]
        {
            assert!(Key::from_bytes(bytes.as_bytes()).is_err(), "{bytes}");
        }
    }

    proptest! {
        #[test]
        fn keys_round_trip(life: u64, counter: u64, name in prop::collection::vec(1_u8.., 1..256)) {
            let id = FileId { incarnation: Incarnation(life), counter: FileCounter(counter) };
            let Ok(name) = Name::new(&name) else { return Ok(()) };
            for key in [Key::Tick, Key::Inode(id), Key::Name(Place { directory: id, name })] {
                prop_assert_eq!(Key::from_bytes(&key.to_bytes()).unwrap(), key);
            }
        }
    }
}

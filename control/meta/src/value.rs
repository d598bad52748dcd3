//! The values of the metadata.
//!
//! Owns: the types, their encoding, and the content of a fresh tree. Does not own: the changes to them (`state`).

use crate::key::{Key, ROOT};
use crate::refusal::Refusal;
use serde::{Deserialize, Serialize};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::id::{Epoch, FileId, Incarnation, SealNumber};
use tidemark_protocol::key::NodeLife;

/// The kind of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    File,
    Directory,
}

/// Attributes that chmod, chown and utimens set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Attributes {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime_ns: i64,
}

/// The newest closed bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SealSummary {
    pub number: SealNumber,
    pub size_bytes: u64,
    pub crc: Crc64,
}

/// A file or a directory.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Inode {
    pub kind: Kind,
    pub attributes: Attributes,
    pub seal: Option<SealSummary>,
    /// Number of names of a file; 1 for a directory.
    pub links: u32,
    /// The life that has the newest bytes of a file, or that had the directory last.
    pub holder: Incarnation,
    /// Whether the holder may act on the inode without asking, as long as its life is present. In a directory: its delegation.
    pub alone: bool,
    /// Rises with each new content of a file, and with each new holder.
    pub version: u64,
    /// The directory that contains this directory; none for a file and for the root.
    pub parent: Option<FileId>,
}

/// The inode that a name leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Target {
    pub id: FileId,
    pub kind: Kind,
}

/// A name, present or absent. A name that has no key is absent at version 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Entry {
    /// Rises with each change of the name.
    pub version: u64,
    /// The inode; `None` for a tombstone.
    pub target: Option<Target>,
}

/// The standing of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Standing {
    Present,
    /// Present, and the changes that a former life had not published are not all published again yet.
    Returning,
    /// Declared gone: the life is over.
    Gone,
}

/// A member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Member {
    pub life: Incarnation,
    pub standing: Standing,
}

/// The progress of a node's calls.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Published {
    pub life: Incarnation,
    /// The number of the last call taken; the first call of a life is 1.
    pub number: u64,
    /// Calls that were taken as refused, from the first one for which the node had no answer. If a call is sent again after a lost answer,
    /// it is answered from this list.
    pub refused: Vec<(u64, Refusal)>,
    /// The node's last earlier life of which a call was taken, and the number of that call.
    pub before: Option<(Incarnation, u64)>,
}

/// The value of [`Key::Coordinator`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Role {
    pub life: NodeLife,
    /// The address for nodes, `host:port`.
    pub address: String,
    /// The epoch: one more than any before.
    pub epoch: Epoch,
}

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Value {
    /// The value of [`Key::Era`], [`Key::Tick`] and [`Key::Moves`].
    Number(u64),
    Role(Role),
    Member(Member),
    Published(Published),
    Inode(Inode),
    Entry(Entry),
}

/// Bytes that are not the value that their key should have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the value of {key:?} cannot be read: {why}")]
pub struct NotAValue {
    pub key: Key,
    pub why: String,
}

impl Value {
    /// Returns the bytes of the value in a store.
    ///
    /// # Panics
    /// Never: encoding into memory has no failure for these types.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("plain data is encoded into memory that grows")
    }

    /// Reads [`Self::to_bytes`], and checks that the value fits `key`.
    ///
    /// # Errors
    /// [`NotAValue`] if it does not.
    pub fn from_bytes(key: &Key, bytes: &[u8]) -> Result<Self, NotAValue> {
        let refused = |why: String| NotAValue { key: key.clone(), why };
        let value: Self = postcard::from_bytes(bytes).map_err(|error| refused(error.to_string()))?;
        if value.fits(key) { Ok(value) } else { Err(refused("it belongs to another kind of key".to_owned())) }
    }

    /// Returns whether a value of this kind may stand under `key`.
    #[must_use]
    pub fn fits(&self, key: &Key) -> bool {
        matches!(
            (key, self),
            (Key::Era | Key::Tick | Key::Moves, Self::Number(_))
                | (Key::Coordinator, Self::Role(_))
                | (Key::Member(_), Self::Member(_))
                | (Key::Publication(_), Self::Published(_))
                | (Key::Inode(_), Self::Inode(_))
                | (Key::Name(_), Self::Entry(_))
        )
    }
}

/// Returns the keys of an empty tree under a new `era`.
#[must_use]
pub fn empty_tree(era: u64) -> Vec<(Key, Value)> {
    let root = Inode {
        kind: Kind::Directory,
        attributes: Attributes { mode: 0o755, ..Attributes::default() },
        seal: None,
        links: 1,
        holder: Incarnation(0),
        alone: false,
        version: 1,
        parent: None,
    };
    vec![
        (Key::Era, Value::Number(era)),
        (Key::Tick, Value::Number(0)),
        (Key::Moves, Value::Number(0)),
        (Key::Inode(ROOT), Value::Inode(root)),
    ]
}

/// A key's new value; none removes the key.
pub type Change = (Key, Option<Value>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_read_under_its_own_kind_of_key_only() {
        for (key, value) in empty_tree(7) {
            assert_eq!(Value::from_bytes(&key, &value.to_bytes()).unwrap(), value);
            assert!(Value::from_bytes(&Key::Coordinator, &value.to_bytes()).is_err());
        }
        assert!(Value::from_bytes(&Key::Era, b"").is_err());
    }
}

//! An operation on names, as a node publishes it.
//!
//! Owns: the content of an operation. Does not own: the publication that contains it (`wire`), its consequences (the engine's
//! namespace).

use super::wire::{FIXED_BYTES, NodeAttributes};
use crate::id::FileId;
use serde::{Deserialize, Serialize};

/// An operation on names. Paths are relative to the mount. `what` is the file that the name meant at the operation; none for a
/// directory or a symlink. If the name means something else by now, another node has changed it since, and the name stays.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NameOperation {
    Directory {
        path: Vec<u8>,
        attributes: NodeAttributes,
    },
    Symlink {
        path: Vec<u8>,
        target: Vec<u8>,
        attributes: NodeAttributes,
    },
    File {
        path: Vec<u8>,
        file: FileId,
        attributes: NodeAttributes,
    },
    Linked {
        from: Vec<u8>,
        path: Vec<u8>,
        what: Option<FileId>,
    },
    Removed {
        path: Vec<u8>,
        what: Option<FileId>,
    },
    Renamed {
        from: Vec<u8>,
        to: Vec<u8>,
        exchange: bool,
        what: Option<FileId>,
    },
    /// All names of the file `from`, of which `path` is one, mean `file` from now on: the publisher is about to write it.
    Taken {
        path: Vec<u8>,
        from: FileId,
        file: FileId,
        attributes: NodeAttributes,
    },
}

impl NameOperation {
    /// Returns the names that the operation changes.
    pub fn paths(&self) -> impl Iterator<Item = &[u8]> {
        let other = match self {
            Self::Renamed { from, .. } => Some(from.as_slice()),
            _ => None,
        };
        other.into_iter().chain([self.path()])
    }

    /// Returns the paths of the directories that the operation may move or remove, and those where it may put them.
    pub fn moved_directories(&self) -> impl Iterator<Item = &[u8]> {
        let moves = match self {
            Self::Renamed { exchange, what, .. } => *exchange || what.is_none(),
            Self::Removed { what, .. } => what.is_none(),
            Self::Directory { .. }
            | Self::Symlink { .. }
            | Self::File { .. }
            | Self::Linked { .. }
            | Self::Taken { .. } => false,
        };
        self.paths().filter(move |_| moves)
    }

    /// Returns how many bytes of a message the operation takes, at most.
    #[must_use]
    pub fn bytes_most(&self) -> usize {
        let more = match self {
            Self::Directory { attributes, .. }
            | Self::File { attributes, .. }
            | Self::Taken { attributes, .. } => attributes.xattr_bytes(),
            Self::Symlink { target, attributes, .. } => target.len() + attributes.xattr_bytes(),
            Self::Linked { from, .. } => from.len(),
            Self::Removed { .. } | Self::Renamed { .. } => 0,
        };
        FIXED_BYTES + self.paths().map(<[u8]>::len).sum::<usize>() + more
    }

    /// Encodes the operation for a journal of the node that it was done on.
    ///
    /// # Panics
    /// Never: encoding into memory has no failure for these types.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("plain data is encoded into memory that grows")
    }

    /// Decodes the result of [`Self::to_bytes`]; none if the bytes are something else.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (operation, rest) = postcard::take_from_bytes(bytes).ok()?;
        rest.is_empty().then_some(operation)
    }

    /// Returns the operation without extended attributes, which may be a hundred times as large as the rest. States contain them,
    /// too.
    #[must_use]
    pub fn without_xattrs(&self) -> Self {
        let mut bare = self.clone();
        match &mut bare {
            Self::Directory { attributes, .. }
            | Self::Symlink { attributes, .. }
            | Self::File { attributes, .. }
            | Self::Taken { attributes, .. } => attributes.xattrs.clear(),
            Self::Linked { .. } | Self::Removed { .. } | Self::Renamed { .. } => {}
        }
        bare
    }

    /// Returns the path that the operation concerns; for a rename the new one.
    #[must_use]
    pub fn path(&self) -> &[u8] {
        match self {
            Self::Directory { path, .. }
            | Self::Symlink { path, .. }
            | Self::File { path, .. }
            | Self::Linked { path, .. }
            | Self::Removed { path, .. }
            | Self::Taken { path, .. }
            | Self::Renamed { to: path, .. } => path,
        }
    }
}

//! An operation on names, as a node tells it.
//!
//! Owns: what it says. Does not own: the publication that it is part of (`wire`), what follows from it (the engine's namespace).

use super::wire::{FIXED_BYTES, NodeAttributes};
use crate::id::FileId;
use serde::{Deserialize, Serialize};

/// An operation on names. Paths are relative to the mount. `what` is the file that the name meant where that was done, none for a
/// directory or a symlink: a name that means something else by now was changed by another node since, and stays.
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
    /// All names of the file `from`, of which `path` is one, mean `file` from now on: who tells this is about to write it.
    Taken {
        path: Vec<u8>,
        from: FileId,
        file: FileId,
        attributes: NodeAttributes,
    },
}

impl NameOperation {
    /// The names that it changes.
    pub fn paths(&self) -> impl Iterator<Item = &[u8]> {
        let other = match self {
            Self::Renamed { from, .. } => Some(from.as_slice()),
            _ => None,
        };
        other.into_iter().chain([self.path()])
    }

    /// How many bytes of a message it takes, at most.
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

    /// The bytes of the operation for a journal of the node that it was done on.
    ///
    /// # Panics
    /// Never: encoding into memory has no failure for these types.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("plain data is encoded into memory that grows")
    }

    /// Reads [`Self::to_bytes`]; none where it is not that.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (operation, rest) = postcard::take_from_bytes(bytes).ok()?;
        rest.is_empty().then_some(operation)
    }

    /// The same without extended attributes, which may be as large as all else a hundred times. States say them, too.
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

    /// The path that it is about; of a rename the new one.
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

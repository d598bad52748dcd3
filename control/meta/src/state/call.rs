//! Changes that a node requests, and the reasons for refusing one.
//!
//! Owns: calls and refusals as values. Does not own: their effect (`effect`).

use crate::key::Place;
use crate::value::{Attributes, Kind, SealSummary};
use serde::{Deserialize, Serialize};
use tidemark_protocol::id::{FileId, Incarnation};

/// A change. A base is the version that the caller saw; `None`: the version at the time when the call is taken.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Call {
    /// Makes a file or a directory, exclusively. The caller has it alone.
    Create {
        place: Place,
        base: Option<u64>,
        id: FileId,
        kind: Kind,
        attributes: Attributes,
    },
    /// Publishes closed bytes of a file that the caller holds. `holder`: the life that wrote them, a former one of the caller's
    /// if that was declared gone.
    Close {
        id: FileId,
        base: u64,
        holder: Incarnation,
        seal: SealSummary,
    },
    /// chmod, chown, utimens.
    SetAttributes {
        id: FileId,
        attributes: Attributes,
    },
    Link {
        id: FileId,
        place: Place,
    },
    /// Removes a name of a file.
    Unlink {
        place: Place,
        base: Option<u64>,
    },
    /// `bases`: of `from` and of `to`. `replaces`: the caller saw a file at `to`. `exchange`: both names stay and change places.
    Rename {
        from: Place,
        to: Place,
        bases: Option<(u64, u64)>,
        replaces: bool,
        exchange: bool,
    },
    /// Removes an empty directory.
    Rmdir {
        place: Place,
    },
    /// Makes the caller the holder of a file, for writing. `truncate`: as a new version without bytes, also if another node has
    /// the present one open for writing.
    Take {
        id: FileId,
        truncate: bool,
    },
    /// Gives a directory at rest to the caller alone.
    Delegate {
        directory: FileId,
    },
    /// Ends the caller's exclusive right to a file or a directory, as of that version.
    GiveBack {
        id: FileId,
        version: u64,
    },
    /// Everything that a former life had not published was published again, or dropped.
    Returned,
}

impl Call {
    /// Iterates over the names that the call changes.
    pub fn places(&self) -> impl Iterator<Item = &Place> {
        let (first, second) = match self {
            Self::Create { place, .. }
            | Self::Link { place, .. }
            | Self::Unlink { place, .. }
            | Self::Rmdir { place } => (Some(place), None),
            Self::Rename { from, to, .. } => (Some(from), Some(to)),
            _ => (None, None),
        };
        first.into_iter().chain(second)
    }

    /// Returns the inode that the call names by its identity.
    #[must_use]
    pub fn inode(&self) -> Option<FileId> {
        match self {
            Self::Create { id, .. }
            | Self::Close { id, .. }
            | Self::SetAttributes { id, .. }
            | Self::Link { id, .. }
            | Self::Take { id, .. }
            | Self::GiveBack { id, .. }
            | Self::Delegate { directory: id } => Some(*id),
            _ => None,
        }
    }
}

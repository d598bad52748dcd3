//! Why a call was refused.
//!
//! Owns: the reasons, which are stored with the publications. Does not own: when each is given (`state`).

use serde::{Deserialize, Serialize};

/// The reason for which a call was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    #[error("the name is taken (EEXIST)")]
    Exists,
    #[error("no such name (ENOENT)")]
    NoEntry,
    #[error("no such directory any more (ENOENT)")]
    NoDirectory,
    #[error("the file has no name any more (ESTALE)")]
    NoInode,
    #[error("the directory is not empty (ENOTEMPTY)")]
    NotEmpty,
    #[error("it is a directory (EISDIR)")]
    IsDirectory,
    #[error("it is no directory (ENOTDIR)")]
    NotDirectory,
    #[error("a directory would lie below itself (EINVAL)")]
    Loop,
    #[error("it was changed since the caller saw it (ESTALE)")]
    Stale,
    #[error("another node has the directory alone")]
    Held,
    #[error("the caller has to answer another node first; the call is sent again")]
    Busy,
    #[error("a node that has to be asked does not answer (EIO)")]
    Unreachable,
}

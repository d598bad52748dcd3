//! Errors of file system calls.
//!
//! Owns: [`FsError`]. Does not own: the errno each becomes (the mount's adapter maps them, without a wildcard).

use tidemark_protocol::error::ErrorKind;

/// Why a file system call failed. Small and `Copy`: the caller knows the path, the kernel wants one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum FsError {
    #[error("there is no such name; check the path")]
    NotFound,
    #[error("the name exists already; choose another or remove it first")]
    Exists,
    #[error("the directory is not empty; remove its entries first")]
    NotEmpty,
    #[error("a part of the path is not a directory")]
    NotDirectory,
    #[error("this is a directory; use the directory calls")]
    IsDirectory,
    #[error("Tier-1 or its journal is full and nothing can be reclaimed; free files or raise the budget")]
    NoSpace,
    #[error("more is asked for than an empty Tier-1, or an empty spill, holds; raise the budget")]
    NeverFits,
    #[error(
        "the daemon has as many files open as its limit allows; raise LimitNOFILE of its service, or its hard limit"
    )]
    TooManyOpen,
    #[error("the name is longer than 255 bytes or the target than 4095; shorten it")]
    NameTooLong,
    #[error("the node was replaced or is gone; look the name up again")]
    Stale,
    #[error("the backing file or the journal could not be read or written; see the daemon's log")]
    Io,
    #[error("the arguments make no sense together")]
    Invalid,
    #[error("there is no such extended attribute")]
    NoAttribute,
    #[error("this operation is not supported here")]
    Unsupported,
    #[error("the file is in use; try again when its handles are closed or its bytes are here")]
    Busy,
    #[error("a program runs from this file; end it first, or remove the name and make the file anew")]
    Running,
    #[error("the value is larger than its limit; store less")]
    TooBig,
    #[error("the answer does not fit the caller's buffer; ask again with a larger one")]
    Range,
    #[error("the operation is not permitted on this kind of node")]
    NotPermitted,
    #[error("both names must be below one mount")]
    CrossDevice,
    #[error("this part of the tree is read-only")]
    ReadOnly,
    #[error("the handle is not open, or not open for this")]
    BadHandle,
}

impl FsError {
    /// Counts and returns a refusal for want of a descriptor of this process. `status` shows it for a while.
    #[must_use]
    pub fn too_many_open() -> Self {
        tidemark_tier1::descriptors::note_refusal();
        Self::TooManyOpen
    }

    /// Returns the kind of error, which tells the caller what to do.
    #[must_use]
    pub fn kind(self) -> ErrorKind {
        match self {
            Self::NotFound | Self::Stale | Self::NoAttribute => ErrorKind::NotFound,
            Self::NoSpace | Self::NeverFits | Self::TooBig => ErrorKind::NoSpace,
            Self::Io => ErrorKind::Corrupt,
            Self::Busy | Self::Running | Self::TooManyOpen => ErrorKind::Unavailable,
            Self::Exists
            | Self::NotEmpty
            | Self::NotDirectory
            | Self::IsDirectory
            | Self::NameTooLong
            | Self::Invalid
            | Self::Unsupported
            | Self::Range
            | Self::NotPermitted
            | Self::CrossDevice
            | Self::ReadOnly
            | Self::BadHandle => ErrorKind::Invalid,
        }
    }
}

impl From<tidemark_tier1::Tier1Error> for FsError {
    /// Maps a full Tier-1 to an error for the caller; logs any other error here, once.
    fn from(error: tidemark_tier1::Tier1Error) -> Self {
        if error.kind() == ErrorKind::NoSpace {
            return Self::NoSpace;
        }
        tracing::error!(%error, "Tier-1 failed under a file system call");
        if error.is_descriptor_limit() { Self::too_many_open() } else { Self::Io }
    }
}

impl From<std::io::Error> for FsError {
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::StorageFull {
            return Self::NoSpace;
        }
        tracing::error!(%error, "a backing file failed under a file system call");
        if tidemark_tier1::is_descriptor_limit(&error) { Self::too_many_open() } else { Self::Io }
    }
}

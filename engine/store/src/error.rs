//! Errors between the engine and Tier-3.
//!
//! Owns: [`StoreError`] and its mapping to [`ErrorKind`]. Does not own: which answer of a back end becomes
//! which variant (each back end's own file), when to repeat (`retry`).

use std::error::Error;
use std::fmt;
use std::io;
use tidemark_protocol::error::ErrorKind;

/// The source of an error of a back end, whatever its type.
pub type Cause = Box<dyn Error + Send + Sync>;

/// A request to the store, as named in errors, scripted faults and logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    Open,
    Create,
    Get,
    GetRange,
    Head,
    List,
    Upload,
    Delete,
    Probe,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Create => "create",
            Self::Get => "get",
            Self::GetRange => "get range",
            Self::Head => "head",
            Self::List => "list",
            Self::Upload => "upload",
            Self::Delete => "delete",
            Self::Probe => "probe",
        })
    }
}

/// A failed operation on Tier-3. `store` is its URL without secrets; `key` is relative to that URL.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No store can be made of the URL or the environment.
    #[error("tier3 URL {url:?}: {reason}")]
    Url { url: String, reason: String },

    /// The key cannot name an object there.
    #[error("{operation} {key:?} in {store}: this key cannot be used: {reason}")]
    Key { operation: Operation, key: String, store: String, reason: String },

    /// The store understood the request and refused it, or holds something unexpected: repeating will not
    /// help.
    #[error("{operation} {key:?} in {store} was refused: {reason}; {action}")]
    Refused { operation: Operation, key: String, store: String, reason: String, action: String },

    /// The store is away, slow or failing; as far as can be known, nothing was changed.
    #[error("{operation} {key:?} in {store} failed {attempts} times: {source}; retry when the store is back")]
    Unavailable { operation: Operation, key: String, store: String, attempts: u32, source: Cause },

    /// The operation may have happened or not, and may still happen: read the key before deciding anything.
    #[error(
        "{operation} {key:?} in {store}: the answer was lost after {attempts} attempts ({reason}); \
         read the key to learn what it holds"
    )]
    Doubtful { operation: Operation, key: String, store: String, attempts: u32, reason: String },

    /// The object is larger than the caller is willing to hold.
    #[error("get {key:?} in {store}: {size_bytes} bytes are there, at most {limit_bytes} were expected")]
    TooLarge { key: String, store: String, size_bytes: u64, limit_bytes: u64 },

    /// The listing does not end within its bound.
    #[error("list {prefix:?} in {store}: more than {limit} entries; list a longer prefix")]
    TooMany { prefix: String, store: String, limit: usize },

    /// The object to read does not exist.
    #[error("{operation} {key:?} in {store}: there is no such object")]
    NotFound { operation: Operation, key: String, store: String },

    /// The range does not lie inside the object.
    #[error("get range {start}..{end} of {key:?} in {store}: {reason}")]
    Range { key: String, store: String, start: u64, end: u64, reason: String },

    /// The bytes differ from their checksum, each time they were sent.
    #[error("{operation} {key:?} in {store}: bytes were damaged on the way {attempts} times: {reason}")]
    Damaged { operation: Operation, key: String, store: String, attempts: u32, reason: String },

    /// The store, or the directory that plays its part, is full.
    #[error("{operation} {key:?} in {store}: no space left: {source}; free space there")]
    NoSpace { operation: Operation, key: String, store: String, source: io::Error },

    /// The key holds other bytes already, though no key is ever written twice with different bytes.
    #[error(
        "upload {key:?} to {store}: the key already holds other bytes ({there_bytes} against {ours_bytes})"
    )]
    Differs { key: String, store: String, there_bytes: u64, ours_bytes: u64 },

    /// Something else came where a document was expected: the store's content there is unknown.
    #[error(
        "{operation} {key:?} in {store}: what came is no document of ours ({found}); others wrote there, or something else answered than \
         the store: check the URL, and proxies on the way"
    )]
    NoDocument { operation: Operation, key: String, store: String, found: String },

    /// The bytes to upload could not be read on this side.
    #[error("upload {key:?}: reading the bytes to send failed: {source}")]
    Source { key: String, source: io::Error },
}

impl StoreError {
    /// Returns the reaction expected of the caller. [`Self::Doubtful`] counts as unavailable, but its caller
    /// reads first.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Url { .. }
            | Self::Key { .. }
            | Self::Refused { .. }
            | Self::TooLarge { .. }
            | Self::TooMany { .. }
            | Self::Range { .. } => ErrorKind::Invalid,
            Self::Unavailable { .. }
            | Self::Doubtful { .. }
            | Self::NoDocument { .. }
            | Self::Source { .. } => ErrorKind::Unavailable,
            Self::NotFound { .. } => ErrorKind::NotFound,
            // The bytes to send are still here, and sending them again helps.
            Self::Damaged { operation: Operation::Create | Operation::Upload, .. } => ErrorKind::Unavailable,
            Self::Damaged { .. } | Self::Differs { .. } => ErrorKind::Corrupt,
            Self::NoSpace { .. } => ErrorKind::NoSpace,
        }
    }

    /// Whether the operation may have taken effect although this error came back.
    #[must_use]
    pub fn is_doubtful(&self) -> bool {
        matches!(self, Self::Doubtful { .. })
    }
}

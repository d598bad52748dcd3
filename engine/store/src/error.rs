//! What can go wrong between the engine and Tier-3.
//!
//! Owns: [`StoreError`] and how it maps to [`ErrorKind`]. Does not own: which answer of which back end becomes
//! which variant (each back end's own file), nor when to repeat (`retry`).

use std::error::Error;
use std::fmt;
use std::io;
use tidemark_protocol::error::ErrorKind;

/// The source of an error of a back end, whatever its type.
pub type Cause = Box<dyn Error + Send + Sync>;

/// What was asked of the store. Used in errors, in scripted faults and in logs.
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
    /// The URL or the environment cannot be made into a store.
    #[error("tier3 URL {url:?}: {reason}")]
    Url { url: String, reason: String },

    /// The key cannot be an object's name there.
    #[error("{operation} {key:?} in {store}: this key cannot be used: {reason}")]
    Key { operation: Operation, key: String, store: String, reason: String },

    /// The store understood and said no, or what is there is not what it should be: repeating will not help.
    #[error("{operation} {key:?} in {store} was refused: {reason}; {action}")]
    Refused { operation: Operation, key: String, store: String, reason: String, action: String },

    /// Nothing was changed, as far as anyone can know, and the store is away, slow or failing.
    #[error("{operation} {key:?} in {store} failed {attempts} times: {source}; retry when the store is back")]
    Unavailable { operation: Operation, key: String, store: String, attempts: u32, source: Cause },

    /// It may have happened or not, and may still happen: read the key before deciding anything.
    #[error(
        "{operation} {key:?} in {store}: the answer was lost after {attempts} attempts ({reason}); \
         read the key to learn what it holds"
    )]
    Doubtful { operation: Operation, key: String, store: String, attempts: u32, reason: String },

    /// The object is larger than the caller allows itself to hold.
    #[error("get {key:?} in {store}: {size_bytes} bytes are there, at most {limit_bytes} were expected")]
    TooLarge { key: String, store: String, size_bytes: u64, limit_bytes: u64 },

    /// The listing does not end within its bound.
    #[error("list {prefix:?} in {store}: more than {limit} entries; list a longer prefix")]
    TooMany { prefix: String, store: String, limit: usize },

    /// The object that was to be read is not there.
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

    /// Where a document was expected came something else: nobody knows what the store holds there.
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
    /// What the caller should do. [`Self::Doubtful`] counts as unavailable, but its caller reads first.
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
            // What was sent is still here, and sending it again is what helps.
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

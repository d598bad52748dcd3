//! Who may be the coordinator: one holder at a time, and a number that only rises.
//!
//! Owns: [`FileLease`] for one machine, [`StoreLease`] for a Tier-3 that several nodes share, their epochs. Does not
//! own: the epoch in Tier-3 that fences writes (`tidemark_engine::store::raise_epoch`, given again here), nor what a
//! coordinator does with its term.
//!
//! A lease bounds availability, never safety: an old holder that does not know yet that it lost is harmless, because
//! every write carries its epoch and every reader looks for a higher one.

mod file;
mod store;

pub use file::FileLease;
pub use store::{LeaseTimes, StoreLease, Turn};
pub use tidemark_engine::store::{current_epoch, raise_epoch};

use std::io;
use std::path::PathBuf;
use tidemark_engine::error::ErrorKind;
use tidemark_engine::store::StoreError;
use tidemark_protocol::id::Epoch;

/// Why a lease is not held.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    #[error("lease file {path}: {operation} failed: {source}; the directory must be writable and local")]
    File { path: PathBuf, operation: &'static str, source: io::Error },

    #[error("lease file {path} holds {text:?}, not an epoch; if no coordinator runs, remove the file")]
    Garbled { path: PathBuf, text: String },

    #[error("lease file {path} is held by another process; stop it, or give this daemon another lease file")]
    Held { path: PathBuf },

    #[error("lease in {store}: {source}")]
    Store { store: String, source: Box<StoreError> },

    #[error("lease object {key:?} in {store} is not ours to read: {reason}")]
    Unreadable { store: String, key: String, reason: String },

    #[error("lease in {store}: epoch {ours} was superseded by epoch {theirs} of {holder}; stop deciding")]
    Lost { store: String, ours: Epoch, theirs: Epoch, holder: String },
}

impl LeaseError {
    /// What the caller should do.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::File { .. } | Self::Held { .. } => ErrorKind::Unavailable,
            Self::Garbled { .. } | Self::Unreadable { .. } => ErrorKind::Corrupt,
            Self::Store { source, .. } => source.kind(),
            Self::Lost { .. } => ErrorKind::Fenced,
        }
    }
}

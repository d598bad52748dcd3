//! The election of the coordinator: one holder at a time, and a number that only rises.
//!
//! Owns: [`FileLease`] for one machine, [`StoreLease`] for a Tier-3 that several nodes share, [`EtcdLease`] for an etcd, their epochs. Does
//! not own: the epoch in Tier-3 that fences writes (`tidemark_store::raise_epoch`, re-exported here), nor the coordinator's work in its
//! term.
//!
//! A lease bounds availability, never safety: a former holder that has not noticed its loss does no harm, because every write carries its
//! epoch and every reader looks for a higher one.

mod etcd;
mod file;
mod store;

pub use etcd::{
    AccessError, CertificateError, EtcdAccess, EtcdCatalog, EtcdError, EtcdLease, EtcdPlace, LoadError,
    MEMBERS_BYTES_MAX, NotAPlace, PasswordError,
};
pub use file::FileLease;
pub use store::StoreLease;
pub use tidemark_store::{current_epoch, raise_epoch};

use std::io;
use std::path::PathBuf;
use std::time::Duration;
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::id::Epoch;
use tidemark_store::StoreError;

/// How long a term lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseTimes {
    /// How long a holder may decide after it *sent* its last successful renewal.
    pub term: Duration,
    /// The longest time after a term until a rival has the lease. In Tier-3, a rival waits that long beyond the term after it *first saw*
    /// the newest number, since clocks run at different speeds. In etcd, etcd takes that long to end a term.
    pub margin: Duration,
}

impl LeaseTimes {
    /// Returns the times of a lease in etcd, which answers in milliseconds.
    #[must_use]
    pub const fn etcd() -> Self {
        Self { term: Duration::from_secs(2), margin: Duration::from_secs(2) }
    }
}

/// The times of a lease in Tier-3, where a request may take a second.
impl Default for LeaseTimes {
    fn default() -> Self {
        Self { term: Duration::from_secs(3), margin: Duration::from_secs(2) }
    }
}

/// The result of trying to take a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// The caller holds the lease, with this epoch.
    Ours(Epoch),
    /// Another holder has it; worth trying again when this much time has passed.
    Theirs { holder: String, epoch: Epoch, wait: Duration },
}

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

    #[error("lease at {place}: {operation} failed")]
    Etcd { place: String, operation: &'static str, source: Box<EtcdError> },

    #[error(
        "a member list of {bytes} bytes, and {store} takes {limit} at most; remove members that are gone for good"
    )]
    MembersTooLarge { store: String, bytes: usize, limit: usize },

    #[error(
        "lease object {key:?} in {store} is not ours to read: {reason}; if no daemon uses that place, remove the object"
    )]
    Unreadable { store: String, key: String, reason: String },

    #[error("lease in {store}: epoch {ours} was superseded by epoch {theirs} of {holder}; stop deciding")]
    Lost { store: String, ours: Epoch, theirs: Epoch, holder: String },
}

impl LeaseError {
    /// Returns the kind, by which the caller decides what to do.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::File { .. } | Self::Held { .. } => ErrorKind::Unavailable,
            Self::Garbled { .. } | Self::Unreadable { .. } => ErrorKind::Corrupt,
            Self::Store { source, .. } => source.kind(),
            Self::Etcd { source, .. } => source.kind(),
            Self::MembersTooLarge { .. } => ErrorKind::NoSpace,
            Self::Lost { .. } => ErrorKind::Fenced,
        }
    }
}

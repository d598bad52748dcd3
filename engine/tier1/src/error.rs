//! Errors of Tier-1, with their numbers and remedies.
//!
//! Owns: [`Tier1Error`]. Does not own: plain reads and writes, which return `io::Result`.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use tidemark_protocol::error::ErrorKind;

/// An operation on Tier-1 that failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Tier1Error {
    /// The configured size cannot hold even the journal and one file.
    #[error("tier-1 of {size_bytes} bytes is below the least of {least_bytes}: raise --tier1")]
    TooSmall { size_bytes: u64, least_bytes: u64 },
    /// The private tmpfs could not be made and no other medium was allowed.
    #[error(
        "tier-1: {step} of a private tmpfs of {size_bytes} bytes failed: {source}; run as root, or choose a directory"
    )]
    Mount { step: &'static str, size_bytes: u64, source: io::Error },
    /// The directory medium could not be prepared.
    #[error("tier-1: {step} {path} failed: {source}; give a writable directory on a tmpfs", path = path.display())]
    Directory { step: &'static str, path: PathBuf, source: io::Error },
    /// The mounts of an earlier daemon cannot be used.
    #[error("tier-1: the mounts of the daemon before cannot be taken over: {source}; start without them")]
    Adopt { source: io::Error },
    /// A background thread could not be started.
    #[error("tier-1: starting thread {name} failed: {source}; raise the limit on threads")]
    Thread { name: &'static str, source: io::Error },
    /// The bytes do not fit beside all that is held and promised.
    #[error(
        "tier-1: {wanted_bytes} bytes wanted, {available_bytes} of {size_bytes} available: \
         reclaim host copies or raise --tier1"
    )]
    NoSpace { wanted_bytes: u64, available_bytes: u64, size_bytes: u64 },
    /// The spill's directory cannot be used.
    #[error(
        "the spill: {step} {path} failed: {source}; give an existing directory of this daemon's own file system, or none",
        path = path.display()
    )]
    Spill { step: &'static str, path: PathBuf, source: io::Error },
    /// Neither memory nor the spill has room.
    #[error(
        "the spill: {wanted_bytes} bytes wanted, {available_bytes} of {size_bytes} available: raise spill.budget, or free \
         the disk"
    )]
    SpillFull { wanted_bytes: u64, available_bytes: u64, size_bytes: u64 },
    /// A backing file could not be made.
    #[error("tier-1: creating backing file {number} failed: {source}")]
    Create { number: u64, source: io::Error },
    /// A change of the size or the space of a backing file failed.
    #[error(
        "tier-1: {step} of backing file {number} at {offset_bytes} for {len_bytes} bytes failed: {source}"
    )]
    Resize { step: &'static str, number: u64, offset_bytes: u64, len_bytes: u64, source: io::Error },
}

/// Whether this process, or the machine, has as many files open as allowed: raising the limit helps, trying
/// again may.
#[must_use]
pub fn is_descriptor_limit(error: &io::Error) -> bool {
    use rustix::io::Errno;
    error
        .raw_os_error()
        .is_some_and(|code| [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error).contains(&code))
}

impl From<Tier1Error> for io::Error {
    /// Converts the error to the form of plain reads and writes.
    fn from(error: Tier1Error) -> Self {
        let full = error.kind() == ErrorKind::NoSpace;
        Self::new(if full { io::ErrorKind::StorageFull } else { io::ErrorKind::Other }, error)
    }
}

impl Tier1Error {
    /// Makes a [`Tier1Error::Resize`] of a system call's error, in memory and in the spill.
    pub(super) fn resize<E: Into<io::Error>>(
        number: u64,
        step: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> impl Fn(E) -> Self {
        move |source| Self::Resize { step, number, offset_bytes, len_bytes, source: source.into() }
    }

    /// See [`is_descriptor_limit`].
    #[must_use]
    pub fn is_descriptor_limit(&self) -> bool {
        match self {
            Self::Create { source, .. } | Self::Resize { source, .. } => is_descriptor_limit(source),
            _ => false,
        }
    }

    /// Returns the reaction expected of the caller.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::TooSmall { .. } => ErrorKind::Invalid,
            Self::Mount { .. }
            | Self::Directory { .. }
            | Self::Thread { .. }
            | Self::Adopt { .. }
            | Self::Spill { .. } => ErrorKind::Unavailable,
            Self::NoSpace { .. } | Self::SpillFull { .. } => ErrorKind::NoSpace,
            Self::Create { source, .. } | Self::Resize { source, .. } => match source.raw_os_error() {
                Some(code) if code == rustix::io::Errno::NOSPC.raw_os_error() => ErrorKind::NoSpace,
                Some(code) if code == rustix::io::Errno::INVAL.raw_os_error() => ErrorKind::Invalid,
                Some(code) if code == rustix::io::Errno::OPNOTSUPP.raw_os_error() => ErrorKind::Invalid,
                _ => ErrorKind::Unavailable,
            },
        }
    }
}

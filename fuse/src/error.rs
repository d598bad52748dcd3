//! The errors of making a mount or taking it down.
//!
//! Owns: [`MountError`]. Does not own: errors of requests inside a mount (`errno`).

use crate::holders::Holder;
use std::io;
use std::path::PathBuf;
use tidemark_protocol::error::ErrorKind;

/// Why mounting or unmounting failed. Each variant names the step that failed, the path, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error(
        "this machine has no /dev/fuse: load the module (modprobe fuse), or in a container pass the device in \
         (--device /dev/fuse)"
    )]
    NoDevice { source: io::Error },
    #[error("opening /dev/fuse was refused: run as root, or make it readable and writable for this user")]
    DeviceRefused { source: io::Error },
    #[error("mountpoint {path}: could not be looked at")]
    Inspect { path: PathBuf, source: io::Error },
    #[error("mountpoint {path} could not be made: make it by hand or choose another")]
    MakeDirectory { path: PathBuf, source: io::Error },
    #[error("mountpoint {path} is not a directory: choose another")]
    NotADirectory { path: PathBuf },
    #[error("mountpoint {path} is not empty (it has {entry:?}): empty it or choose another")]
    NotEmpty { path: PathBuf, entry: String },
    #[error(
        "mountpoint {path} carries a live mount already ({source_name}, type {fs_type}): choose a directory inside it, as \
         {path}/ckpt, or unmount it where it is not needed"
    )]
    Occupied { path: PathBuf, fs_type: String, source_name: String },
    #[error("the dead mount at {path} could not be removed: try umount -l {path}")]
    DeadMount { path: PathBuf, source: io::Error },
    #[error("mounting at {path} failed")]
    Mount { path: PathBuf, source: io::Error },
    #[error(
        "mounting at {path} needs CAP_SYS_ADMIN or fusermount3, and neither is there: run as root or install \
         the package fuse3"
    )]
    NoFusermount { path: PathBuf, source: io::Error },
    #[error("fusermount3 did not mount {path}: {message}")]
    Fusermount { path: PathBuf, message: String },
    #[error("passthrough was asked for, but is not possible here: {reason}; use mode auto or fallback")]
    NoPassthrough { reason: String },
    #[error(
        "the spill's directory cannot be written past the daemon, as memory can: {reason}; name one on a plain file system \
         (ext4, xfs), set mount.mode to fallback, or do without [spill]"
    )]
    Spill { reason: String },
    #[error("{path}: the kernel and this daemon did not agree on the protocol (FUSE_INIT)")]
    Handshake { path: PathBuf, source: io::Error },
    #[error("{path}: a thread of the mount could not be started")]
    Thread { path: PathBuf, source: io::Error },
    #[error("{path} is in use{}: close what is open there, or unmount lazily", list(holders))]
    Busy { path: PathBuf, holders: Vec<Holder> },
    #[error("{path} could not be unmounted")]
    Unmount { path: PathBuf, source: io::Error },
}

impl MountError {
    /// Returns the kind, by which the caller decides what to do.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotADirectory { .. }
            | Self::NotEmpty { .. }
            | Self::Occupied { .. }
            | Self::NoPassthrough { .. }
            | Self::Spill { .. }
            | Self::MakeDirectory { .. } => ErrorKind::Invalid,
            Self::NoDevice { .. } | Self::NoFusermount { .. } => ErrorKind::NotFound,
            Self::DeviceRefused { .. }
            | Self::Inspect { .. }
            | Self::DeadMount { .. }
            | Self::Mount { .. }
            | Self::Fusermount { .. }
            | Self::Handshake { .. }
            | Self::Thread { .. }
            | Self::Busy { .. }
            | Self::Unmount { .. } => ErrorKind::Unavailable,
        }
    }
}

fn list(holders: &[Holder]) -> String {
    if holders.is_empty() {
        return String::new();
    }
    let named: Vec<String> =
        holders.iter().map(|h| format!("pid {} ({}) has {}", h.pid, h.command, h.path.display())).collect();
    format!(" ({})", named.join("; "))
}

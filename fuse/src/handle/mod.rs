//! The data path of an open file: past the daemon, or through it.
//!
//! Owns: the answer to OPEN and CREATE, and what must be undone at RELEASE. Does not own: which of the two a
//! mount uses (`probe`), the open files themselves (the namespace).

mod fallback;
mod pages;

use crate::backing_ids::{BackingIds, Kernel};
use crate::errno::errno;
pub(crate) use fallback::Fallback;
use fuser::{Errno, FileAttr, FileHandle, FopenFlags, Generation, Notifier, ReplyCreate, ReplyOpen};
use rustix::fs::MemfdFlags;
use std::io;
use std::time::Duration;
use tidemark_namespace::{FsError, Namespace, OpenFile};
use tidemark_tier1::is_descriptor_limit;

/// The data path of one mount.
#[derive(Debug)]
pub(crate) enum DataPath {
    /// The kernel reads and writes the backing files itself.
    Passthrough(BackingIds<Kernel>),
    /// The daemon reads and writes them.
    Fallback(Fallback),
}

impl DataPath {
    /// Begins to serve: INIT was answered, and no other request yet.
    pub(crate) fn begin(&self, notifier: Notifier) -> io::Result<()> {
        match self {
            Self::Passthrough(_) => Ok(()),
            Self::Fallback(fallback) => fallback.begin(notifier),
        }
    }

    /// Answers an OPEN. An error leaves the handle for the caller to release.
    pub(crate) fn opened(&self, file: &OpenFile, reply: ReplyOpen) -> Result<(), (ReplyOpen, Errno)> {
        let flags = flush_flag(file);
        match self {
            Self::Passthrough(ids) => {
                let id = match acquire(ids, file) {
                    Ok(id) => id,
                    Err(errno) => return Err((reply, errno)),
                };
                // SAFETY: the id is registered on this session's device and `ids` keeps it so until the last
                // release, which cannot come before this answer.
                let id = unsafe { reply.wrap_backing(id) };
                reply.opened_passthrough(FileHandle(file.fh), flags, &id);
                // `ids` owns the number; fuser must not close it.
                id.into_raw();
            }
            Self::Fallback(fallback) => {
                let flags = flags | fallback.opened(file);
                reply.opened(FileHandle(file.fh), flags);
            }
        }
        Ok(())
    }

    /// Answers a CREATE. An error leaves the handle for the caller to release.
    pub(crate) fn created(
        &self,
        file: &OpenFile,
        attr: &FileAttr,
        ttl: Duration,
        reply: ReplyCreate,
    ) -> Result<(), (ReplyCreate, Errno)> {
        let flags = flush_flag(file);
        let fh = FileHandle(file.fh);
        match self {
            Self::Passthrough(ids) => {
                let id = match acquire(ids, file) {
                    Ok(id) => id,
                    Err(errno) => return Err((reply, errno)),
                };
                // SAFETY: as for OPEN above.
                let id = unsafe { reply.wrap_backing(id) };
                reply.created_passthrough(&ttl, attr, Generation(0), fh, flags, &id);
                id.into_raw();
            }
            Self::Fallback(fallback) => {
                reply.created(&ttl, attr, Generation(0), fh, flags | fallback.opened(file));
            }
        }
        Ok(())
    }

    /// Releases an open file for good. Callers do so before they notify the namespace.
    pub(crate) fn released(&self, file: &OpenFile) {
        match self {
            Self::Passthrough(ids) => ids.release(file.backing.number(), file.fh),
            Self::Fallback(fallback) => fallback.released(file.fh),
        }
    }

    /// Recovers the open files of the previous daemon.
    pub(crate) fn take_up(&self, namespace: &Namespace) -> io::Result<()> {
        let open = namespace.handles().open_files();
        match self {
            Self::Passthrough(ids) => {
                let handles = open.iter().map(|file| (file.fh, file.backing.number()));
                // From memory outside Tier-1, which may be full.
                let spare = || Ok(rustix::fs::memfd_create("tidemark-spare", MemfdFlags::CLOEXEC)?);
                ids.take_up(&namespace.session().backing_ids(), handles, spare)
            }
            Self::Fallback(fallback) => {
                for file in &open {
                    fallback.opened(file);
                }
                Ok(())
            }
        }
    }
}

fn acquire(ids: &BackingIds<Kernel>, file: &OpenFile) -> Result<u32, Errno> {
    ids.acquire(file.backing.number(), file.fh, || file.backing.read_fd()).map_err(|error| {
        tracing::error!(
            node = file.node, backing = file.backing.number(), %error,
            "a backing file could not be registered for passthrough; the open fails"
        );
        let refused = error.get_ref().and_then(|inner| inner.downcast_ref::<FsError>()).copied();
        errno(if is_descriptor_limit(&error) {
            FsError::too_many_open()
        } else {
            refused.unwrap_or(FsError::Io)
        })
    })
}

/// Returns the flag that decides whether the kernel sends FLUSH. FLUSH tells close(2) from a killed process, which
/// matters only for files that may have been written.
fn flush_flag(file: &OpenFile) -> FopenFlags {
    if file.writable { FopenFlags::empty() } else { FopenFlags::FOPEN_NOFLUSH }
}

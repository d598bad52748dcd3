//! Refusals while the daemon ends.
//!
//! Owns: whether new files and changes are refused. Does not own: when (the node), the errors that calls return (each call).

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether programs may make files, and change them.
#[derive(Debug, Default)]
pub struct Gate {
    /// Whether new files are refused, because the daemon is ending.
    closed: AtomicBool,
    /// Whether changes are refused, because the daemon is about to exit and would not keep them.
    refuses_writers: AtomicBool,
}

impl Gate {
    /// Refuses new files from now on with [`FsError::ReadOnly`](super::FsError::ReadOnly); existing files stay writable.
    pub fn close_to_new_files(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Whether new files are refused.
    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Refuses all changes by programs from now on, since they would not be kept. A close of a handle that may have
    /// written returns [`FsError::Io`](super::FsError::Io), every other change
    /// [`FsError::ReadOnly`](super::FsError::ReadOnly).
    pub fn refuse_writers(&self) {
        self.close_to_new_files();
        self.refuses_writers.store(true, Ordering::Release);
    }

    /// Whether changes are refused: see [`Gate::refuse_writers`].
    #[must_use]
    #[inline]
    pub fn are_writers_refused(&self) -> bool {
        self.refuses_writers.load(Ordering::Acquire)
    }
}

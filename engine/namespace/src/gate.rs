//! Refusals while the daemon ends.
//!
//! Owns: whether new files and changes are refused. Does not own: when (the node), the errors that calls give (each call).

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether programs may make files, and change them.
#[derive(Debug, Default)]
pub struct Gate {
    /// The daemon is ending: no new files.
    closed: AtomicBool,
    /// The daemon is about to go: nothing that is done from now on is kept.
    refuses_writers: AtomicBool,
}

impl Gate {
    /// From now on a new file is refused with [`FsError::ReadOnly`](super::FsError::ReadOnly); files that are there can be written still.
    pub fn close_to_new_files(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Whether new files are refused.
    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// From now on nothing that a program changes is kept, and it is told so: a close of what it may have written is
    /// [`FsError::Io`](super::FsError::Io), every other change [`FsError::ReadOnly`](super::FsError::ReadOnly).
    pub fn refuse_writers(&self) {
        self.close_to_new_files();
        self.refuses_writers.store(true, Ordering::Release);
    }

    /// See [`Gate::refuse_writers`].
    #[must_use]
    #[inline]
    pub fn are_writers_refused(&self) -> bool {
        self.refuses_writers.load(Ordering::Acquire)
    }
}

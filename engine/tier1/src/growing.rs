//! The time in which the daemon writes a backing file: an incoming copy, or a file that is fetched.
//!
//! Owns: the beginning and the end of that time. Does not own: making space ready (`run_ahead`). Without ready space, bytes land in
//! memory that was never touched. Each page then costs a fault, in a virtual machine one of its host: a restore from a peer was
//! three times as slow.

use super::Backing;
use std::sync::Arc;

/// A guard: space is made ready ahead of the file's end until it is dropped.
#[derive(Debug)]
pub struct Growing(Arc<Backing>);

impl Backing {
    /// See [`Backing::begin_growth`].
    #[must_use]
    pub fn growing(self: &Arc<Self>) -> Growing {
        self.begin_growth();
        Growing(Arc::clone(self))
    }
}

impl Drop for Growing {
    fn drop(&mut self) {
        self.0.end_growth();
    }
}

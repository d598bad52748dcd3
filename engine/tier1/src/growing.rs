//! The time in which a backing file is written by us: a copy that comes in, a file that is fetched.
//!
//! Owns: its beginning and its end. Does not own: making space ready (`run_ahead`). Without it bytes land in memory that nobody has
//! touched yet, where each page costs a fault, in a virtual machine one of its host: a restore from a peer was three times as slow.

use super::Backing;
use std::sync::Arc;

/// Space is made ready ahead of the file's end until it is dropped.
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

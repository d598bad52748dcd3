//! When this process, or the machine, ran out of descriptors under a call of a program.
//!
//! Owns: the moment of the last refusal, which is the process's as the limit is. Does not own: the limit itself, what a person is
//! told.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

static LAST: Mutex<Option<Instant>> = Mutex::new(None);

/// A program's call was refused for want of a descriptor of this process.
pub fn note_refusal() {
    *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
}

/// When that was last.
#[must_use]
pub fn last_refusal() -> Option<Instant> {
    *LAST.lock().unwrap_or_else(PoisonError::into_inner)
}

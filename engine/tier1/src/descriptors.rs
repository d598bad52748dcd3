//! Calls of programs that failed because this process, or the machine, ran out of descriptors.
//!
//! Owns: the moment of the last refusal, which is the process's, as the limit is. Does not own: the limit itself, the report to
//! people.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

static LAST: Mutex<Option<Instant>> = Mutex::new(None);

/// Notes that a program's call was refused for want of a descriptor of this process.
pub fn note_refusal() {
    *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
}

/// Returns the time of the last refusal.
#[must_use]
pub fn last_refusal() -> Option<Instant> {
    *LAST.lock().unwrap_or_else(PoisonError::into_inner)
}

//! The threads that answer requests run soon after they are woken.
//!
//! Owns: that each of them asks for it once. Does not own: how a thread asks (the engine's `priority`), or where the threads come
//! from (fuser starts them, and leaves no place to do this).

use std::cell::Cell;
use tidemark_tier1::priority;

thread_local! {
    static ASKED: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread answers requests that carry no bytes. Costs nothing after its first.
pub(crate) fn answering() {
    if !ASKED.replace(true)
        && let Err(error) = priority::run_soon()
    {
        tracing::debug!(%error, "requests wait for a thread as long as usual");
    }
}

//! Makes the threads that answer requests run soon after they are woken.
//!
//! Owns: that each thread asks for it once. Does not own: how a thread asks (the engine's `priority`), nor starting the threads (fuser
//! does, and offers no hook for this).

use std::cell::Cell;
use tidemark_tier1::priority;

thread_local! {
    static ASKED: Cell<bool> = const { Cell::new(false) };
}

/// Marks the calling thread as one that answers requests without bytes. Costs nothing after the first call of a thread.
pub(crate) fn answering() {
    if !ASKED.replace(true)
        && let Err(error) = priority::run_soon()
    {
        tracing::debug!(%error, "requests wait for a thread as long as usual");
    }
}

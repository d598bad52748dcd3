//! The number of calls to the coordinator, by kind.
//!
//! Owns: the counts. Does not own: the metric that shows them (the daemon sets it from the counts).

use std::sync::atomic::{AtomicU64, Ordering};
use tidemark_protocol::cluster::wire::ToCoordinator;

const WORDS: usize = ToCoordinator::WORDS.len();

/// A count for each [`ToCoordinator::word`].
#[derive(Debug, Default)]
pub(super) struct Calls([AtomicU64; WORDS]);

impl Calls {
    /// Counts a call that is about to be sent.
    pub(super) fn count(&self, message: &ToCoordinator) {
        self.0[message.kind()].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns every word with its count.
    pub(super) fn counted(&self) -> Vec<(&'static str, u64)> {
        let counts = self.0.iter().map(|count| count.load(Ordering::Relaxed));
        ToCoordinator::WORDS.into_iter().zip(counts).collect()
    }
}

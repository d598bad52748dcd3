//! How often the coordinator was asked for what.
//!
//! Owns: the counts. Does not own: the metric that shows them (the daemon brings it up to them).

use std::sync::atomic::{AtomicU64, Ordering};
use tidemark_protocol::cluster::wire::ToCoordinator;

const WORDS: usize = ToCoordinator::WORDS.len();

/// One count for each [`ToCoordinator::word`].
#[derive(Debug, Default)]
pub(super) struct Calls([AtomicU64; WORDS]);

impl Calls {
    /// It is about to be asked.
    pub(super) fn count(&self, message: &ToCoordinator) {
        self.0[message.kind()].fetch_add(1, Ordering::Relaxed);
    }

    /// Every word with its count.
    pub(super) fn counted(&self) -> Vec<(&'static str, u64)> {
        let counts = self.0.iter().map(|count| count.load(Ordering::Relaxed));
        ToCoordinator::WORDS.into_iter().zip(counts).collect()
    }
}

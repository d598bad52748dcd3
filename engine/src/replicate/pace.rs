//! The budget of bytes per second that all copies of this node's files share.
//!
//! Owns: the waiting, the rate's metric. Does not own: the rate (`protocol::replication::Rate`), when a checkpoint is complete or a
//! caller waits (the replicator's callers), which file goes first.

use crate::metrics::Metrics;
use async_trait::async_trait;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tidemark_protocol::replication::Rate;
use tidemark_transport::Pace;
use tokio::time::Instant;

/// See the module's head.
#[derive(Debug)]
pub(super) struct Paced {
    rate: Mutex<Rate>,
    began: Instant,
    metrics: Arc<Metrics>,
    /// Whether there may be a limit at all.
    enabled: bool,
}

impl Paced {
    pub(super) fn new(metrics: Arc<Metrics>, enabled: bool) -> Self {
        Self { rate: Mutex::new(Rate::new(Duration::ZERO)), began: Instant::now(), metrics, enabled }
    }

    /// Returns the time of the replication's clock.
    pub(super) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Records that a checkpoint is complete, with the bytes that have no copy yet.
    pub(super) fn completed(&self, backlog_bytes: u64) {
        if self.enabled {
            self.with(|rate, now| rate.completed(now, backlog_bytes));
        }
    }

    /// Lifts the limit until the next checkpoint. Senders that wait already go on within a tenth of a second.
    pub(super) fn lift(&self) {
        self.with(|rate, _| rate.lift());
    }

    /// Returns the limit in bytes per second; none if there is no limit.
    pub(super) fn bytes_per_s(&self) -> Option<u64> {
        self.rate.lock().unwrap_or_else(PoisonError::into_inner).bytes_per_s()
    }

    fn with(&self, change: impl FnOnce(&mut Rate, Duration)) {
        let mut rate = self.rate.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut rate, self.now());
        let bytes_per_s = rate.bytes_per_s().map_or(0, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
        self.metrics.replica_pace_bytes.set(bytes_per_s);
    }
}

#[async_trait]
impl Pace for Paced {
    async fn take(&self, bytes: u64) {
        let wait = self.rate.lock().unwrap_or_else(PoisonError::into_inner).take(self.now(), bytes);
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_beyond_the_budget_waits_unless_nothing_is_paced() {
        let metrics = Arc::new(Metrics::new());
        for enabled in [true, false] {
            let paced = Paced::new(Arc::clone(&metrics), enabled);
            for _ in 0..2 {
                paced.completed(0);
                // Waits so long that the lowest rate suffices for these bytes.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert_eq!(paced.bytes_per_s(), enabled.then_some(128 << 20));
            let began = Instant::now();
            paced.take(64 << 20).await;
            paced.take(16 << 20).await;
            // The second take waits an eighth of a second. Without a pace, only the machine decides how long it takes.
            assert!(!enabled || began.elapsed() >= Duration::from_millis(100), "{:?}", began.elapsed());
            paced.lift();
            assert_eq!(metrics.replica_pace_bytes.get(), 0);
        }
    }
}

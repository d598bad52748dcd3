//! Versions that are not at rest: what each waits for, how much lags, and checks of both against the books.
//!
//! Owns: the sets that the loop examines instead of every checkpoint, the lag, the checks between two events. Does not
//! own: what moves a version (`advance`), what must be true (`protocol::invariants`).

use crate::node::book::{BookLookup, Number};
use crate::node::decide::run_of;
use crate::node::ledger::Ledger;
use std::collections::{BTreeSet, VecDeque};
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::invariants;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::recognise::CheckpointId;
use tokio::time::Instant;

/// Steps of the loop between two checks that cost a pass over the books. Only if assertions are on.
const STEPS_PER_CHECK: u32 = 16;

/// Versions that are not at rest, by what they wait for: the loop examines only these.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    /// Versions that wait for a place in flight, oldest first.
    pub(super) queue: VecDeque<(CheckpointId, Number)>,
    pub(super) in_flight: usize,
    /// Versions whose last try failed, by the time of the next one.
    pub(super) paused: BTreeSet<(Instant, CheckpointId, Number)>,
    /// Versions that are proven and not decided.
    pub(super) lagging: BTreeSet<(CheckpointId, Number)>,
    steps: u32,
}

/// Amount of what is complete and not committed yet.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Lag {
    pub(crate) versions: u64,
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
}

pub(crate) fn lags(checkpoint: &Checkpoint) -> bool {
    checkpoint.is_alive() && checkpoint.is_proven()
}

impl Backlog {
    /// Checks what must be true between two events, once in [`STEPS_PER_CHECK`] calls. Panics if it is not.
    pub(crate) fn check_invariants(&mut self, ledger: &Ledger) {
        self.steps += 1;
        if self.steps < STEPS_PER_CHECK {
            return;
        }
        self.steps = 0;
        let runs: BTreeSet<_> = ledger.books.keys().map(|id| &id.run).collect();
        for run in runs {
            let versions = run_of(ledger, run);
            assert_eq!(invariants::the_watermark_is_the_newest_committed_version(versions), Ok(()));
        }
        for (id, book) in &ledger.books {
            for (number, version) in &book.versions {
                let lagging = self.lagging.contains(&(id.clone(), *number));
                assert_eq!(lagging, lags(&version.checkpoint), "the backlog lost {:?}", version.checkpoint);
                let kept = version.checkpoint.is_alive() && !version.checkpoint.is_running();
                assert_eq!(
                    version.attempt.is_some(),
                    kept,
                    "who has the attempt of {:?}",
                    version.checkpoint
                );
            }
        }
    }

    /// Returns the lag of one run, or of all. Costs the number of versions that lag.
    pub(crate) fn lag(&self, ledger: &Ledger, now_ns: i64, run: Option<&RunPath>) -> Lag {
        let mut lag = Lag::default();
        for (id, number) in &self.lagging {
            if run.is_some_and(|run| id.run != *run) {
                continue;
            }
            let version = BookLookup { ledger }.version(id, *number);
            lag.versions += 1;
            lag.bytes += version.bytes_left();
            #[expect(clippy::cast_precision_loss, reason = "a duration for people")]
            let seconds = (now_ns - version.record().completed_at_ns).max(0) as f64 / 1e9;
            lag.seconds = lag.seconds.max(seconds);
        }
        lag
    }
}

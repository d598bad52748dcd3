//! Facts from the coordinators that this node followed, which their answers state, and from its own time as one.
//!
//! Owns: how this node's clock differs from theirs, how far etcd kept their catalogs. Does not own: sending beats (`member`), what a
//! successor does with it (control).

use std::sync::{Mutex, MutexGuard, PoisonError};
use tidemark_protocol::cluster::kept::StepNumber;
use tidemark_protocol::cluster::wire::Beaten;
use tidemark_protocol::id::Epoch;

/// See the module's head.
#[derive(Debug, Default)]
pub struct Said {
    heard: Mutex<Heard>,
}

#[derive(Debug, Default)]
struct Heard {
    /// The least difference seen between this node's clock and that of the coordinator of an epoch (`protocol::cluster::clocks` says why).
    ahead_ns: Option<(Epoch, i64)>,
    step: Option<StepNumber>,
}

impl Said {
    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the answer to a beat by the coordinator of `epoch`; `now_ns` is this node's clock.
    pub(super) fn take(&self, epoch: Epoch, beaten: &Beaten, now_ns: i64) {
        self.take_time(epoch, beaten.now_ns, now_ns);
        self.took_step(StepNumber { epoch, number: beaten.kept_step });
    }

    /// Records that the clock of the coordinator of `epoch` said `theirs_ns` before this node's said `now_ns`.
    pub(super) fn take_time(&self, epoch: Epoch, theirs_ns: i64, now_ns: i64) {
        let seen = now_ns.saturating_sub(theirs_ns);
        let mut heard = self.lock();
        let least = heard.ahead_ns.filter(|(of, _)| *of == epoch).map_or(seen, |(_, least)| least.min(seen));
        heard.ahead_ns = Some((epoch, least));
    }

    /// Records that etcd has taken a step, of this node as the coordinator or of another; number 0 is none.
    pub fn took_step(&self, step: StepNumber) {
        let mut heard = self.lock();
        heard.step = heard.step.max((step.number > 0).then_some(step));
    }

    /// Returns how many nanoseconds this node's clock is ahead of the clock of that epoch's coordinator; none before its first answer.
    #[must_use]
    pub fn ahead_ns(&self, epoch: Epoch) -> Option<i64> {
        self.lock().ahead_ns.filter(|(of, _)| *of == epoch).map(|(_, ahead_ns)| ahead_ns)
    }

    /// Returns the number of the last step of that epoch, if no later coordinator made one; 0 if there is none.
    #[must_use]
    pub fn last_step(&self, epoch: Epoch) -> u64 {
        self.kept_step().filter(|step| step.epoch == epoch).map_or(0, |step| step.number)
    }

    /// Returns the last step that etcd is known to have taken. An etcd that has an earlier one was put back to an older state.
    #[must_use]
    pub fn kept_step(&self) -> Option<StepNumber> {
        self.lock().step
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::id::NodeName;
    use tidemark_protocol::membership::Echo;

    #[test]
    fn the_last_step_of_the_last_coordinator_counts_and_a_late_answer_takes_nothing_back() {
        let said = Said::default();
        let take = |epoch, kept_step| {
            let coordinator: NodeName = "n1".parse().unwrap();
            let echo = Echo { epoch: Epoch(epoch), coordinator, number: 1, interval_ms: 150 };
            let beaten = Beaten { echo, members_number: 0, now_ns: 0, kept_step };
            said.take(Epoch(epoch), &beaten, 7);
            said.kept_step().map(|step| (step.epoch.0, step.number))
        };
        assert_eq!(take(3, 0), None, "no etcd keeps anything");
        assert_eq!(
            [take(3, 8), take(3, 7), take(4, 1), take(3, 9)],
            [(3, 8), (3, 8), (4, 1), (4, 1)].map(Some)
        );
        assert_eq!((said.ahead_ns(Epoch(3)), said.ahead_ns(Epoch(4))), (Some(7), None), "of the last answer");
    }
}

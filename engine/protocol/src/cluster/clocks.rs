//! Conversion of one node's times to another node's clock.
//!
//! Owns: the estimate. Does not own: when messages come (the engine).
//!
//! A message is received after it was sent. Over many messages, the least difference of the two clocks exceeds the true one only
//! by the quickest delivery. A time from another node is therefore read late by that delivery at most, and never early. A node
//! may act because it heard of an event elsewhere (a barrier before the index is written). The action then came at least one
//! delivery later, so the order of the two is kept.
//!
//! The estimate becomes better with time. A time that follows the latest one that was read of its node is not read as the earlier for
//! that.

use crate::id::Incarnation;
use std::collections::BTreeMap;

/// Number of differences that are remembered: the lives of a few clusters. Beyond it the oldest life is forgotten.
const LIVES_MAX: usize = 65_536;

/// Distances between other nodes' clocks and ours.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Clocks {
    lives: BTreeMap<Incarnation, Clock>,
}

/// Another node's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Clock {
    /// Ours minus theirs, the least seen, in nanoseconds.
    offset_ns: i64,
    /// The latest of its times that was read, and what it was read as.
    latest: Option<(i64, i64)>,
}

impl Clocks {
    /// Records a message: its node's clock said `theirs_ns` when it was sent, ours said `ours_ns` when it came.
    pub fn heard(&mut self, life: Incarnation, theirs_ns: i64, ours_ns: i64) {
        let seen_ns = ours_ns.saturating_sub(theirs_ns);
        if self.lives.len() >= LIVES_MAX && !self.lives.contains_key(&life) {
            self.lives.pop_first();
        }
        let clock = self.lives.entry(life).or_insert(Clock { offset_ns: seen_ns, latest: None });
        clock.offset_ns = clock.offset_ns.min(seen_ns);
    }

    /// Converts a time of that node to our clock. The result is at most `now_ns`, because the node reported something that has
    /// happened.
    #[must_use]
    pub fn read(&mut self, life: Incarnation, theirs_ns: i64, now_ns: i64) -> i64 {
        let Some(clock) = self.lives.get_mut(&life) else { return theirs_ns.min(now_ns) };
        let read_ns = theirs_ns.saturating_add(clock.offset_ns).min(now_ns);
        let read_ns = match clock.latest {
            Some((latest_ns, was_read_ns)) if theirs_ns > latest_ns => read_ns.max(was_read_ns).min(now_ns),
            _ => read_ns,
        };
        if clock.latest.is_none_or(|(latest_ns, _)| theirs_ns >= latest_ns) {
            clock.latest = Some((theirs_ns, read_ns));
        }
        read_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIFE: Incarnation = Incarnation(1);

    proptest! {
        /// A node closes a file and reports it to another node, which then writes an index and reports that to the coordinator.
        /// However wrong the clocks and however slow the messages, the index is not read as the earlier of the two.
        #[test]
        fn cause_and_effect_keep_their_order(
            skews in proptest::collection::vec(-3_600_000_000_000_i64..3_600_000_000_000, 2),
            deliveries in proptest::collection::vec(1_000_i64..50_000_000, 3..20),
            barrier_ns in 0_i64..50_000_000,
        ) {
            let quickest = *deliveries.iter().min().unwrap();
            let mut clocks = Clocks::default();
            let (a, b) = (Incarnation(1), Incarnation(2));
            for (n, delivery) in deliveries.iter().enumerate() {
                let at = i64::try_from(n).unwrap() * 100_000_000;
                clocks.heard(a, at + skews[0], at + delivery);
                clocks.heard(b, at + skews[1], at + delivery);
            }
            let closed = 1_000_000_000_000;
            // The barrier is a message, too.
            let indexed = closed + quickest + barrier_ns;
            let now = indexed + 1_000_000_000;
            prop_assert!(clocks.read(a, closed + skews[0], now) <= clocks.read(b, indexed + skews[1], now));
            // Also against a clock of our own.
            prop_assert!(clocks.read(a, closed + skews[0], now) <= indexed);
        }
    }

    #[test]
    fn a_better_estimate_does_not_turn_the_events_of_one_node_round() {
        let mut clocks = Clocks::default();
        // The first message took 50.
        clocks.heard(LIFE, 1_000, 1_050);
        assert_eq!(clocks.read(LIFE, 900, 2_000), 950, "a file is closed");
        clocks.heard(LIFE, 1_100, 1_101);
        assert_eq!(clocks.read(LIFE, 910, 2_000), 950, "its index, 10 later");
        assert_eq!(clocks.read(LIFE, 960, 2_000), 961, "what comes after that is read right");
        assert_eq!(clocks.read(LIFE, 900, 2_000), 901, "also what is told again");
    }

    #[test]
    fn nothing_is_read_as_of_the_future() {
        let mut clocks = Clocks::default();
        assert_eq!(clocks.read(LIFE, 500, 100), 100);
    }
}

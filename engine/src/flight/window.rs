//! The number of parts on their way at once that gives the best rate: bandwidth times delay, found by trying.
//!
//! Owns: the number, and the rates measured at it. Does not own: waiting for a place (`mod`). Pure: time is an argument.
//!
//! A store's bandwidth and delay cannot be measured apart: a part's time contains both, and other traffic too. Their
//! product shows in the rate: with fewer parts the rate grows with their number, with more only the wait does. So the
//! number doubles as long as that pays. Afterwards a somewhat higher or lower number is tried now and then. If two numbers
//! give the same rate, the smaller is better: it holds less memory and delays other traffic less.

use std::time::Duration;

/// First number for an unknown store: eight parts of 8 MiB hide 20 ms of delay at 3 GB/s.
pub(super) const START: usize = 8;

/// Smallest number: one part hangs, one is being hashed, one is on its way, one is being made durable.
const LEAST: usize = 4;

/// Fewest parts by which a number is judged; never fewer than twice the number.
const JUDGED_BY_PARTS: usize = 16;

/// Smallest gain for which doubling pays. Below the product the gain would be 1000.
const DOUBLING_PAYS_PERMILLE: u64 = 150;

/// Smallest gain for which a quarter more pays; below the product it would be 250. A store's rate varies by some percent.
const MORE_PAYS_PERMILLE: u64 = 80;

/// Largest loss at which a fifth fewer is as good.
const FEWER_COSTS_PERMILLE: u64 = 30;

/// Judgements of a proven number before another is tried: so rare a trial costs little if it fails.
const SETTLED_ROUNDS: u32 = 8;

/// The purpose of the present number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The number doubles from judgement to judgement.
    Doubling,
    /// The number stays for `rounds_left` more judgements.
    Settled { rounds_left: u32 },
    /// The number is tried once; `from` is the number to return to.
    Tried { from: usize },
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Window {
    least: usize,
    most: usize,
    parts: usize,
    stage: Stage,
    /// The rate at the number with which the present one is compared.
    rate_before: Option<u64>,
    /// Whether the next trial goes up; otherwise it goes down.
    tries_more: bool,
    round: Option<Round>,
}

/// The parts that ended while every place was taken.
#[derive(Debug)]
struct Round {
    began: Duration,
    parts: usize,
    bytes: u64,
}

impl Window {
    /// Makes a window of at most `most` parts, as their memory allows.
    pub(super) fn new(most: usize) -> Self {
        let most = most.max(1);
        Self {
            least: LEAST.min(most),
            most,
            parts: START.min(most),
            stage: Stage::Doubling,
            rate_before: None,
            tries_more: true,
            round: None,
        }
    }

    /// Returns how many parts may be on their way now.
    pub(super) fn parts(&self) -> usize {
        self.parts
    }

    /// Records the end of a part of `bytes`. `full`: every place was taken until then; only such times show the number's worth.
    pub(super) fn ended(&mut self, now: Duration, bytes: u64, full: bool) {
        if !full {
            self.round = None;
            return;
        }
        let Some(round) = &mut self.round else {
            // The measurement begins with the end of this part.
            self.round = Some(Round { began: now, parts: 0, bytes: 0 });
            return;
        };
        round.parts += 1;
        round.bytes = round.bytes.saturating_add(bytes);
        if round.parts < JUDGED_BY_PARTS.max(2 * self.parts) {
            return;
        }
        let took_us = u64::try_from(now.saturating_sub(round.began).as_micros()).unwrap_or(u64::MAX).max(1);
        let rate = round.bytes.saturating_mul(1_000_000) / took_us;
        self.round = None;
        self.judge(rate);
    }

    /// Discards the measurement, because a part failed.
    pub(super) fn disturbed(&mut self) {
        self.round = None;
    }

    fn judge(&mut self, rate: u64) {
        let pays = |before: u64, permille: u64| rate >= before.saturating_add(before / 1000 * permille);
        match (self.stage, self.rate_before) {
            (Stage::Doubling, before) => {
                if before.is_none_or(|before| pays(before, DOUBLING_PAYS_PERMILLE)) {
                    self.rate_before = Some(rate);
                    if self.parts == self.most {
                        self.settle();
                    } else {
                        self.parts = (2 * self.parts).min(self.most);
                    }
                } else {
                    // The last doubling did not pay. `rate_before` is the rate of the number that is restored.
                    self.parts = self.parts.div_ceil(2).max(self.least);
                    self.settle();
                }
            }
            (Stage::Settled { rounds_left: 0 }, _) => {
                self.rate_before = Some(rate);
                self.try_another();
            }
            (Stage::Settled { rounds_left }, _) => {
                self.stage = Stage::Settled { rounds_left: rounds_left - 1 };
            }
            (Stage::Tried { from }, before) => {
                let before = before.unwrap_or(0);
                let more = self.parts > from;
                let keep = if more {
                    pays(before, MORE_PAYS_PERMILLE)
                } else {
                    rate >= before - before / 1000 * FEWER_COSTS_PERMILLE
                };
                if !keep {
                    self.parts = from;
                    self.tries_more = !self.tries_more;
                    self.settle();
                } else if more {
                    // A still higher number may pay, if other traffic has left the store.
                    self.rate_before = Some(rate);
                    self.try_another();
                } else {
                    self.settle();
                }
            }
        }
    }

    fn settle(&mut self) {
        self.stage = Stage::Settled { rounds_left: SETTLED_ROUNDS };
    }

    fn try_another(&mut self) {
        let other = if self.tries_more {
            (self.parts + (self.parts / 4).max(1)).min(self.most)
        } else {
            (self.parts - (self.parts / 5).max(1)).max(self.least)
        };
        if other == self.parts {
            self.tries_more = !self.tries_more;
            self.settle();
            return;
        }
        self.stage = Stage::Tried { from: self.parts };
        self.parts = other;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART_BYTES: u64 = 8 << 20;
    const MB: u64 = 1_000_000;

    /// A store that answers a part after `delay`, and takes `bytes_per_s` in total.
    struct Link {
        delay: Duration,
        bytes_per_s: u64,
    }

    impl Link {
        /// Returns bandwidth times delay, in parts; never less than one.
        fn product(&self) -> usize {
            let bytes = u128::from(self.bytes_per_s) * self.delay.as_micros() / 1_000_000;
            usize::try_from(bytes.div_ceil(u128::from(PART_BYTES))).unwrap().max(1)
        }

        /// Returns the time between the ends of two parts, with `parts` on their way.
        fn interval(&self, parts: usize) -> Duration {
            let alone = self.delay / u32::try_from(parts).unwrap();
            alone.max(Duration::from_micros(PART_BYTES * 1_000_000 / self.bytes_per_s))
        }
    }

    /// Sends `count` parts at a rate that varies by `sway_permille`, and returns the numbers on their way.
    fn send(
        window: &mut Window,
        link: &Link,
        now: &mut Duration,
        count: usize,
        sway_permille: u32,
    ) -> Vec<usize> {
        let mut seen = Vec::new();
        for part in 0..count {
            let sway = u32::try_from(part * 7919 % 2001).unwrap() * sway_permille / 1000;
            *now += link.interval(window.parts()) * (1000 - sway_permille + sway) / 1000;
            window.ended(*now, PART_BYTES, true);
            seen.push(window.parts());
        }
        seen
    }

    #[test]
    fn the_number_comes_near_bandwidth_times_delay_and_the_rate_near_the_most_there_is() {
        for (delay_ms, rate) in [(2, 2000 * MB), (50, 1000 * MB), (100, 2500 * MB), (150, 1200 * MB)] {
            let link = Link { delay: Duration::from_millis(delay_ms), bytes_per_s: rate };
            let (mut window, mut now) = (Window::new(64), Duration::ZERO);
            send(&mut window, &link, &mut now, 20_000, 20);
            let (found, product) = (window.parts(), link.product());
            let told = format!("{delay_ms} ms × {rate} B/s: {found} parts, product {product}");
            assert!(found * 10 >= product.min(64) * 9, "too few: {told}");
            assert!(found * 2 <= product.max(LEAST) * 3 + 2, "too many: {told}");
        }
    }

    #[test]
    fn a_long_way_is_filled_within_one_checkpoint() {
        // The path holds forty parts: 6 GiB are 768 parts.
        let link = Link { delay: Duration::from_millis(160), bytes_per_s: 2000 * MB };
        let (mut window, mut now) = (Window::new(64), Duration::ZERO);
        let seen = send(&mut window, &link, &mut now, 768, 20);
        let filled = seen.iter().position(|&parts| parts >= 32).expect("it is reached");
        assert!(filled < 100, "after {filled} parts");
    }

    #[test]
    fn it_follows_a_store_that_gets_slower_and_faster() {
        let mut link = Link { delay: Duration::from_millis(80), bytes_per_s: 2000 * MB };
        let (mut window, mut now) = (Window::new(64), Duration::ZERO);
        send(&mut window, &link, &mut now, 5_000, 20);
        let fast = window.parts();
        link.bytes_per_s = 500 * MB;
        send(&mut window, &link, &mut now, 20_000, 20);
        let slow = window.parts();
        link.bytes_per_s = 2000 * MB;
        send(&mut window, &link, &mut now, 20_000, 20);
        assert!(slow * 2 <= fast, "{fast} parts, then {slow}");
        assert!(window.parts() >= 18, "{} parts of 19 after it had been {slow}", window.parts());
    }

    #[test]
    fn the_limit_holds_and_so_does_the_least() {
        let endless = Link { delay: Duration::from_secs(1), bytes_per_s: u64::MAX / 2_000_000 };
        let at_once = Link { delay: Duration::from_micros(1), bytes_per_s: 100 * MB };
        for (most, link, expected) in
            [(12, &endless, 12), (3, &endless, 3), (1, &endless, 1), (64, &at_once, LEAST)]
        {
            let (mut window, mut now) = (Window::new(most), Duration::ZERO);
            let seen = send(&mut window, link, &mut now, 20_000, 10);
            assert!(seen.iter().all(|&parts| (1..=most).contains(&parts)), "never beyond {most}");
            // The last number may be a trial.
            assert!(window.parts().abs_diff(expected) <= 1, "{} of {expected}", window.parts());
        }
    }

    #[test]
    fn parts_of_a_queue_that_is_not_full_teach_nothing() {
        let mut window = Window::new(64);
        for part in 0..1000 {
            window.ended(Duration::from_millis(part), PART_BYTES, part % 10 != 0);
        }
        assert_eq!(window.parts(), START);
        // Times measured while parts failed teach nothing either.
        for part in 0..1000_u64 {
            window.ended(Duration::from_millis(part), PART_BYTES, true);
            if part % 10 == 0 {
                window.disturbed();
            }
        }
        assert_eq!(window.parts(), START);
    }
}

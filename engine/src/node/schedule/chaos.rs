//! The seed of a schedule, and the trouble that it causes.
//!
//! Owns: the generator, the chances of each trouble. Does not own: what a trouble is (`world`).

/// A small generator (`SplitMix64`): its numbers for a seed do not change with a library.
#[derive(Debug, Clone)]
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub(super) fn index(&mut self, count: usize) -> usize {
        usize::try_from(self.below(count as u64)).expect("below a count")
    }

    pub(super) fn permille(&mut self, chance: u64) -> bool {
        self.below(1000) < chance
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }
}

/// Chances of each trouble in a schedule, in a thousand, for each request.
#[derive(Debug, Clone)]
pub(super) struct Chaos {
    pub(super) rng: Rng,
    /// Chance that the next request is from the same start as the last: some schedules alternate, others run one start far ahead.
    pub(super) stick: u64,
    pub(super) stall: u64,
    /// Chance that a start stalls just before it decides, when that does most harm.
    pub(super) stall_at_decision: u64,
    /// Chance that answers to a decision are lost one after the other, possibly until its caller gives up.
    pub(super) silence: u64,
    pub(super) doubt: u64,
    pub(super) away: u64,
    pub(super) death: u64,
}

impl Chaos {
    pub(super) fn of(mut rng: Rng) -> Self {
        Self {
            stick: rng.pick(&[0, 500, 900]),
            stall: rng.pick(&[0, 5, 20]),
            stall_at_decision: rng.pick(&[0, 150, 400]),
            silence: rng.pick(&[0, 40, 100]),
            doubt: rng.pick(&[0, 15, 60]),
            away: rng.pick(&[0, 5, 15]),
            death: rng.pick(&[0, 4, 12]),
            rng,
        }
    }

    pub(super) fn none() -> Self {
        Self {
            rng: Rng(0),
            stick: 0,
            stall: 0,
            stall_at_decision: 0,
            silence: 0,
            doubt: 0,
            away: 0,
            death: 0,
        }
    }
}

//! Numbers that follow from a seed.

use std::cell::Cell;
use std::time::Duration;

/// SplitMix64: one word of state, and every seed is a good one.
#[derive(Debug)]
pub(crate) struct Rng(Cell<u64>);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Cell::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bf0_3635_dd4f_1a2b))
    }

    pub(crate) fn next(&self) -> u64 {
        self.0.set(self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15));
        let mut mixed = self.0.get();
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`, which is not 0.
    pub(crate) fn below(&self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn below_usize(&self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).expect("it is below a usize")
    }

    pub(crate) fn permille(&self, of: u64) -> bool {
        self.below(1000) < of
    }

    pub(crate) fn between(&self, least: Duration, most: Duration) -> Duration {
        let span = u64::try_from((most - least).as_micros()).expect("no span is that long");
        least + Duration::from_micros(self.below(span.max(1)))
    }

    pub(crate) fn one_of<'a, T>(&self, all: &'a [T]) -> Option<&'a T> {
        if all.is_empty() { None } else { all.get(self.below_usize(all.len())) }
    }
}

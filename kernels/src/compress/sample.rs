//! The sample of elements from which a threshold follows, and the threshold.
//!
//! Owns: the places, which depend on the length, the settings and a seed alone, and the quantile. Does not own: the values.
//!
//! A tensor is cut into strata of equal length, and one element of each is sampled, at a place that the seed decides: places at a fixed
//! distance would sample the same columns of every row of a matrix.

use super::{LEAST_KEPT_BITS, Settings};

/// The sample of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    len: usize,
    /// Elements per stratum, at least 1; the last stratum may have fewer.
    pub(super) stride: usize,
    /// Number of strata; 0 for an empty tensor.
    pub(super) count: usize,
    /// Number of sampled elements to keep: at least 1, at most all.
    pub(super) keep: usize,
    pub(super) seed: u64,
}

impl Sample {
    pub(super) fn of(len: usize, settings: &Settings, seed: u64) -> Self {
        let stride = len.div_ceil(settings.sample()).max(1);
        let count = len.div_ceil(stride);
        #[expect(clippy::cast_precision_loss, reason = "a sample has at most 2^20 elements")]
        let keep = (settings.ratio() * count as f64).ceil();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "from 0 to 2^20: a ratio is at most 1"
        )]
        let keep = (keep as usize).clamp(1, count.max(1));
        Self { len, stride, count, keep, seed }
    }

    /// Returns the sampled element of stratum `stratum`: the upper 64 bits of the stratum's length times a random number of 64 bits
    /// (SplitMix64, Steele, Lea and Flood 2014, at this place of its sequence).
    pub(super) fn place(&self, stratum: usize) -> usize {
        let begin = stratum * self.stride;
        let elements = self.stride.min(self.len - begin);
        let mut random =
            self.seed.wrapping_add((stratum as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        random = (random ^ random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        random = (random ^ random >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        random ^= random >> 31;
        #[expect(clippy::cast_possible_truncation, reason = "below `elements`")]
        let within = ((u128::from(random) * elements as u128) >> 64) as usize;
        begin + within
    }

    /// Returns the magnitude, as bits, from which on elements are kept: that of the sample's element at this rank from above, and at least
    /// [`LEAST_KEPT_BITS`]. Magnitudes of finite values are in the order of their bits.
    pub(super) fn threshold(&self, mut magnitudes: Vec<u32>) -> u32 {
        if magnitudes.is_empty() {
            return LEAST_KEPT_BITS;
        }
        let rank = magnitudes.len() - self.keep.min(magnitudes.len());
        let (_, &mut found, _) = magnitudes.select_nth_unstable(rank);
        found.max(LEAST_KEPT_BITS)
    }
}

/// Returns the bits of a value without its sign.
pub(super) fn magnitude(value: f32) -> u32 {
    value.to_bits() & 0x7fff_ffff
}

//! A step over one block, and the block's half copy: loops for the compiler to vectorise.
//!
//! Owns: the arithmetic of a block, in the reference's order. Does not own: the instructions (`dispatch` compiles these loops
//! several times), or which block.

use super::super::{Factors, HalfCopy, State};
use half::bf16;
use half::slice::HalfFloatSliceExt;

/// Applies a step to every element of `block`. Branches that are the same for all elements are taken here, once.
#[inline(always)]
pub(super) fn update(factors: &Factors, block: &mut State<'_>, gradient: &[f32]) {
    match (factors.coupled != 0.0, factors.from_gradient) {
        (false, false) => elements::<false, false>(factors, block, gradient),
        (false, true) => elements::<false, true>(factors, block, gradient),
        (true, false) => elements::<true, false>(factors, block, gradient),
        (true, true) => elements::<true, true>(factors, block, gradient),
    }
}

/// Does the same as `reference::update`, written out: the reference's order of operations is the meaning.
#[inline(always)]
fn elements<const COUPLED: bool, const FROM_GRADIENT: bool>(
    factors: &Factors,
    block: &mut State<'_>,
    gradient: &[f32],
) {
    // A copy, so that the compiler knows that no store changes it.
    let factors = *factors;
    let moments = block.exp_avg.iter_mut().zip(block.exp_avg_sq.iter_mut());
    for ((weight, (exp_avg, exp_avg_sq)), &gradient) in block.weights.iter_mut().zip(moments).zip(gradient) {
        let gradient = gradient * factors.gradient;
        let shrunk = *weight * factors.shrink;
        let gradient = if COUPLED { gradient + factors.coupled * shrunk } else { gradient };
        let nearer = if FROM_GRADIENT { gradient } else { *exp_avg };
        let first = nearer + factors.mix * (gradient - *exp_avg);
        let second = *exp_avg_sq * factors.beta2 + factors.fresh2 * gradient * gradient;
        let denominator = second.sqrt() * factors.correction + factors.eps;
        *weight = shrunk + factors.stride * first / denominator;
        *exp_avg = first;
        *exp_avg_sq = second;
    }
}

/// Writes the half copy of a finished block.
#[inline(always)]
pub(super) fn copy(block: &mut State<'_>) {
    match &mut block.half {
        HalfCopy::None => {}
        HalfCopy::Bf16(copy) => {
            for (copy, &weight) in copy.iter_mut().zip(block.weights.iter()) {
                *copy = to_bf16(weight);
            }
        }
        // `half` uses the processor's conversion, where there is one.
        HalfCopy::F16(copy) => copy.convert_from_f32_slice(block.weights),
    }
}

/// Rounds to nearest, ties to even, without a branch.
#[inline(always)]
fn to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // Rounding could turn a NaN into infinity; the quiet bit keeps it a NaN.
    let nan = bits >> 16 | 0x40;
    #[expect(clippy::cast_possible_truncation, reason = "the upper half of 32 bits has 16")]
    let upper = (if value.is_nan() { nan } else { rounded }) as u16;
    bf16::from_bits(upper)
}

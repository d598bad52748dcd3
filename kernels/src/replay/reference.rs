//! The meaning of a step, and of replaying steps, one element at a time.
//!
//! Owns: the meaning; every back end agrees with it bit for bit (a NaN may have other bits: it stays a NaN). Does not own:
//! speed.

use super::check::checked;
use super::{Factors, Gradient, GradientStep, HalfCopy, ReplayError, State};
use half::{bf16, f16};

/// Applies `steps`, in order, to every element of `state`, and writes the half copy.
///
/// # Errors
/// [`ReplayError`] if something does not fit; nothing is changed then.
pub fn replay(state: &mut State<'_>, steps: &[GradientStep<'_>]) -> Result<(), ReplayError> {
    let steps = checked(state, steps)?;
    for at in 0..state.weights.len() {
        let mut element = [state.weights[at], state.exp_avg[at], state.exp_avg_sq[at]];
        for (factors, gradient) in &steps {
            element = update(factors, element, value(gradient, at));
        }
        [state.weights[at], state.exp_avg[at], state.exp_avg_sq[at]] = element;
        match &mut state.half {
            HalfCopy::None => {}
            HalfCopy::Bf16(copy) => copy[at] = bf16::from_f32(element[0]),
            HalfCopy::F16(copy) => copy[at] = f16::from_f32(element[0]),
        }
    }
    Ok(())
}

/// Applies a step to one element: returns weight, `exp_avg` and `exp_avg_sq` after it. Every operation is rounded to f32 by itself, in the
/// order of torch's `_single_tensor_adam`. (Kingma and Ba, 2015, algorithm 1; Loshchilov and Hutter, 2019, algorithm 2.)
#[must_use]
pub fn update(factors: &Factors, [weight, exp_avg, exp_avg_sq]: [f32; 3], gradient: f32) -> [f32; 3] {
    let gradient = gradient * factors.gradient;
    let weight = weight * factors.shrink;
    let gradient = if factors.coupled == 0.0 { gradient } else { gradient + factors.coupled * weight };
    let nearer = if factors.from_gradient { gradient } else { exp_avg };
    let exp_avg = nearer + factors.mix * (gradient - exp_avg);
    let exp_avg_sq = exp_avg_sq * factors.beta2 + factors.fresh2 * gradient * gradient;
    let denominator = exp_avg_sq.sqrt() * factors.correction + factors.eps;
    let weight = weight + factors.stride * exp_avg / denominator;
    [weight, exp_avg, exp_avg_sq]
}

/// Returns the value of `gradient` for element `at`.
///
/// # Panics
/// When the gradient has no such element, or is one that [`replay`] refuses.
#[must_use]
pub fn value(gradient: &Gradient<'_>, at: usize) -> f32 {
    match *gradient {
        Gradient::F32(values) => values[at],
        Gradient::Bf16(values) => values[at].to_f32(),
        Gradient::F16(values) => values[at].to_f32(),
        Gradient::Int8 { values, scales, block } => f32::from(values[at]) * scales[at / block],
        Gradient::Sparse { chunk_elements, chunks } => {
            let chunk = chunks[at / chunk_elements];
            let within = i32::try_from(at % chunk_elements).expect("a chunk has at most 2^31 elements");
            chunk.indices.binary_search(&within).map_or(0.0, |entry| chunk.values[entry].to_f32())
        }
    }
}

//! The meaning of compression, one element at a time.
//!
//! Owns: the meaning; every back end must agree with it bit for bit. Does not own: speed.

use super::check;
use super::sample::{Sample, magnitude};
use super::{CompressError, Compressed, F16_MAX, INT8_MAX, SCALE_MAX, Settings, SparseChunk, Values};
use half::f16;

/// Compresses `values`, or `values + residual`; the part that is lost becomes the residual. If [`Settings::is_dense`], a tensor becomes
/// INT8 blocks. Other tensors become sparse, with a threshold from a sample that `seed` places. (TierCheck, section 3.2.)
///
/// # Errors
/// [`CompressError::Length`], [`CompressError::NotFinite`] or [`CompressError::Residual`].
pub fn compress(
    values: Values<'_>,
    mut residual: Option<&mut [f32]>,
    settings: &Settings,
    seed: u64,
) -> Result<Compressed, CompressError> {
    check::residual(values, residual.as_deref())?;
    if let Some(index) = (0..values.len()).find(|&index| !values.get(index).is_finite()) {
        return Err(CompressError::NotFinite { index });
    }
    let sum = |index| {
        residual.as_deref().map_or_else(|| values.get(index), |residual| values.get(index) + residual[index])
    };
    let sums: Vec<f32> = (0..values.len()).map(sum).collect();
    if let Some(index) = sums.iter().position(|sum| !sum.is_finite()) {
        return Err(CompressError::Residual { index });
    }
    let compressed =
        if settings.is_dense(sums.len()) { int8(&sums, settings) } else { sparse(&sums, settings, seed) };
    if let Some(residual) = &mut residual {
        residual.copy_from_slice(&sums);
        accumulate(&compressed, -1.0, residual)?;
    }
    Ok(compressed)
}

/// Adds: `dense[i] += scale * value`, for every element of an INT8 gradient and for the kept elements of a sparse one. The product of an
/// INT8 value and its block's scale is rounded first, then the product with `scale`, then the sum.
///
/// # Errors
/// If [`Compressed::check`] finds an error, or `dense` has another length.
pub fn accumulate(compressed: &Compressed, scale: f32, dense: &mut [f32]) -> Result<(), CompressError> {
    compressed.check()?;
    check::length("the dense tensor", dense.len(), compressed.len())?;
    match compressed {
        Compressed::Int8 { block, scales, values, .. } => {
            for (index, dense) in dense.iter_mut().enumerate() {
                *dense += scale * (f32::from(values[index]) * scales[index / block]);
            }
        }
        Compressed::Sparse { chunk_elements, chunks, .. } => {
            for (dense, chunk) in dense.chunks_mut(*chunk_elements).zip(chunks) {
                for (&index, value) in chunk.indices.iter().zip(&chunk.values) {
                    let index = usize::try_from(index).expect("indices are checked");
                    dense[index] += scale * value.to_f32();
                }
            }
        }
    }
    Ok(())
}

/// Makes INT8 blocks. A block's scale is its largest magnitude, divided by 127, and at most [`SCALE_MAX`]; a value is the quotient with it,
/// rounded to nearest, ties to even. In a block whose scale is 0 (all zeros, or all below 2⁻¹⁴³) the values are 0.
fn int8(sums: &[f32], settings: &Settings) -> Compressed {
    let (mut scales, mut values) = (Vec::new(), Vec::new());
    for block in sums.chunks(settings.block()) {
        let largest = block.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
        let scale = (largest / INT8_MAX).min(SCALE_MAX);
        scales.push(scale);
        for value in block {
            // A scale that is subnormal or SCALE_MAX is not exact: a quotient could exceed 127.
            let quotient = (value / scale).clamp(-INT8_MAX, INT8_MAX).round_ties_even();
            #[expect(clippy::cast_possible_truncation, reason = "from -127 to 127")]
            values.push(if scale == 0.0 { 0 } else { quotient as i8 });
        }
    }
    Compressed::Int8 { len: sums.len(), block: settings.block(), scales, values }
}

/// Keeps elements whose magnitude reaches the threshold, as binary16: to nearest, ties to even, and within its finite range.
fn sparse(sums: &[f32], settings: &Settings, seed: u64) -> Compressed {
    let sample = Sample::of(sums.len(), settings, seed);
    let looked_at = (0..sample.count).map(|stratum| magnitude(sums[sample.place(stratum)]));
    let threshold = sample.threshold(looked_at.collect());
    let mut chunks = Vec::new();
    for (place, elements) in sums.chunks(settings.chunk_elements()).enumerate() {
        let begin = place as u64 * settings.chunk_elements() as u64;
        let mut chunk = SparseChunk { begin, ..SparseChunk::default() };
        for (index, &value) in elements.iter().enumerate() {
            if magnitude(value) >= threshold {
                chunk.indices.push(i32::try_from(index).expect("a chunk has fewer than 2^31 elements"));
                chunk.values.push(f16::from_f32(value.clamp(-F16_MAX, F16_MAX)));
            }
        }
        chunks.push(chunk);
    }
    Compressed::Sparse { len: sums.len(), chunk_elements: settings.chunk_elements(), chunks }
}

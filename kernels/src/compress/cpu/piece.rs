//! A piece of a tensor: loops for the compiler to vectorise.
//!
//! Owns: the arithmetic, in the reference's order. Does not own: the instructions (`dispatch` compiles these loops several
//! times), or which piece.

use super::super::sample::magnitude;
use super::super::{F16_MAX, INFINITY_BITS, INT8_MAX, SCALE_MAX, SparseChunk, Values};
use half::{bf16, f16};

/// Elements that are summed, compared and taken before the next ones: 8 KiB of f32, which stay in the first level of the cache.
const BLOCK_ELEMENTS: usize = 2048;

/// Elements that are compared at once, before the code checks which of them were found: a power of two that divides the block. If one
/// element in a hundred is kept, six of seven groups have none.
const GROUP_ELEMENTS: usize = GROUP_ELEMENTS_32 as usize;
const GROUP_ELEMENTS_32: u32 = 16;

/// A piece of a sparse tensor, within one chunk.
pub(super) struct SparsePiece<'a> {
    pub(super) values: Values<'a>,
    pub(super) residual: Option<&'a mut [f32]>,
    /// Place in the chunk of the piece's first element.
    pub(super) begin: usize,
    /// The threshold, at most infinity's bits.
    pub(super) threshold: u32,
}

/// The kept part of a piece.
#[derive(Default)]
pub(super) struct Found {
    pub(super) indices: Vec<i32>,
    pub(super) values: Vec<f16>,
    /// Whether all sums were finite.
    pub(super) finite: bool,
}

/// A piece of whole INT8 blocks; the last one may have fewer elements.
pub(super) struct Int8Piece<'a> {
    pub(super) values: Values<'a>,
    pub(super) residual: Option<&'a mut [f32]>,
    pub(super) block: usize,
    pub(super) quantised: &'a mut [i8],
    pub(super) scales: &'a mut [f32],
}

/// Returns whether all values are finite.
#[inline(always)]
pub(super) fn finite(values: Values<'_>) -> bool {
    match values {
        Values::F32(values) => {
            values.iter().fold(0, |most, &value| most.max(magnitude(value).cast_signed()))
                < INFINITY_BITS.cast_signed()
        }
        Values::Bf16(values) => {
            values.iter().fold(0, |most, value| most.max((value.to_bits() & 0x7fff).cast_signed())) < 0x7f80
        }
        Values::F16(values) => {
            values.iter().fold(0, |most, value| most.max((value.to_bits() & 0x7fff).cast_signed())) < 0x7c00
        }
    }
}

#[inline(always)]
fn from_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Converts exactly, without a branch: a product corrects the exponent's bias and makes subnormals normal.
#[inline(always)]
fn from_f16(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    let magnitude = bits & 0x7fff;
    // 2^112
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000)).to_bits();
    let not_finite = magnitude << 13 | INFINITY_BITS;
    f32::from_bits((if magnitude >= 0x7c00 { not_finite } else { finite }) | (bits & 0x8000) << 16)
}

/// Copies the values to `out`.
#[inline(always)]
fn load(values: Values<'_>, out: &mut [f32]) {
    match values {
        Values::F32(values) => out.copy_from_slice(values),
        Values::Bf16(values) => {
            for (out, &value) in out.iter_mut().zip(values) {
                *out = from_bf16(value);
            }
        }
        Values::F16(values) => {
            for (out, &value) in out.iter_mut().zip(values) {
                *out = from_f16(value);
            }
        }
    }
}

/// Replaces the residual by its sum with the values.
#[inline(always)]
fn add(values: Values<'_>, residual: &mut [f32]) {
    match values {
        Values::F32(values) => {
            for (residual, &value) in residual.iter_mut().zip(values) {
                *residual += value;
            }
        }
        Values::Bf16(values) => {
            for (residual, &value) in residual.iter_mut().zip(values) {
                *residual += from_bf16(value);
            }
        }
        Values::F16(values) => {
            for (residual, &value) in residual.iter_mut().zip(values) {
                *residual += from_f16(value);
            }
        }
    }
}

/// Returns the kept part of a sparse piece; the residual, if any, becomes the rest.
#[inline(always)]
pub(super) fn sparse(piece: SparsePiece<'_>) -> Found {
    let SparsePiece { values, mut residual, begin, threshold } = piece;
    let mut found = Found { finite: true, ..Found::default() };
    let mut hits = [0; BLOCK_ELEMENTS];
    let mut scratch = [0.0; BLOCK_ELEMENTS];
    for at in (0..values.len()).step_by(BLOCK_ELEMENTS) {
        let elements = BLOCK_ELEMENTS.min(values.len() - at);
        let block = values.slice(at..at + elements);
        if let Some(residual) = &mut residual {
            let sums = &mut residual[at..at + elements];
            add(block, sums);
            let hits = select(sums, threshold, &mut hits);
            take(sums, hits, begin + at, &mut found);
            for &hit in hits {
                let sum = sums[hit as usize];
                sums[hit as usize] = sum - narrow(sum).to_f32();
            }
        } else if let Values::F32(sums) = block {
            take(sums, select(sums, threshold, &mut hits), begin + at, &mut found);
        } else {
            let sums = &mut scratch[..elements];
            load(block, sums);
            take(sums, select(sums, threshold, &mut hits), begin + at, &mut found);
        }
    }
    found
}

/// Finds places whose magnitude reaches the threshold, ascending. Examines at most a block's elements.
#[inline(always)]
fn select<'a>(sums: &[f32], threshold: u32, hits: &'a mut [u32; BLOCK_ELEMENTS]) -> &'a [u32] {
    // All magnitudes are below 2^31: signed comparisons are available on every processor.
    let threshold = threshold.cast_signed();
    let reaches = |sum: f32| magnitude(sum).cast_signed() >= threshold;
    let mut count = 0;
    let mut look = |group: &[f32], begin: u32| {
        for (place, &sum) in (begin..).zip(group) {
            hits[count % BLOCK_ELEMENTS] = place;
            count += usize::from(reaches(sum));
        }
    };
    let (groups, rest) = sums.as_chunks::<GROUP_ELEMENTS>();
    let mut begin = 0u32;
    for group in groups {
        if group.iter().fold(false, |any, &sum| any | reaches(sum)) {
            look(group, begin);
        }
        begin += GROUP_ELEMENTS_32;
    }
    look(rest, begin);
    &hits[..count]
}

/// Appends the selected elements of a block that begins at `begin` in its chunk.
#[inline(always)]
fn take(sums: &[f32], hits: &[u32], begin: usize, found: &mut Found) {
    for &hit in hits {
        let sum = sums[hit as usize];
        found.finite &= sum.is_finite();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_possible_wrap,
            reason = "a chunk has fewer than 2^31 elements"
        )]
        found.indices.push((begin + hit as usize) as i32);
        found.values.push(narrow(sum));
    }
}

/// Rounds to nearest, ties to even, within binary16's finite range.
#[inline(always)]
fn narrow(value: f32) -> f16 {
    f16::from_f32(value.clamp(-F16_MAX, F16_MAX))
}

/// Quantises a piece; the residual, if any, becomes the rest. Returns false if a sum is not finite; then the residual is the sum.
#[inline(always)]
pub(super) fn int8(piece: Int8Piece<'_>) -> bool {
    let Int8Piece { values, mut residual, block, quantised, scales } = piece;
    let mut all_finite = true;
    let mut scratch = if residual.is_none() { vec![0.0; block.min(values.len())] } else { Vec::new() };
    for (number, (quantised, scale)) in quantised.chunks_mut(block).zip(scales).enumerate() {
        let range = number * block..number * block + quantised.len();
        let part = values.slice(range.clone());
        let sums = if let Some(residual) = &mut residual {
            let sums = &mut residual[range];
            add(part, sums);
            sums
        } else {
            let sums = &mut scratch[..quantised.len()];
            load(part, sums);
            sums
        };
        let largest =
            sums.iter().fold(0, |most, &sum| most.max(magnitude(sum).cast_signed())).cast_unsigned();
        if largest >= INFINITY_BITS {
            all_finite = false;
            continue;
        }
        *scale = (f32::from_bits(largest) / INT8_MAX).min(SCALE_MAX);
        if *scale == 0.0 {
            quantised.fill(0);
            continue;
        }
        for (quantised, sum) in quantised.iter_mut().zip(sums) {
            *quantised = quantise(*sum, *scale);
            *sum -= f32::from(*quantised) * *scale;
        }
    }
    all_finite
}

/// Returns the quotient, to nearest, ties to even. Adding 1.5 · 2²³ leaves no bits for a fraction, and rounds in the same way.
#[inline(always)]
fn quantise(sum: f32, scale: f32) -> i8 {
    const ROUND: f32 = 12_582_912.0;
    let quotient = (sum / scale).clamp(-INT8_MAX, INT8_MAX) + ROUND;
    #[expect(clippy::cast_possible_truncation, reason = "the lowest 8 bits are the integer")]
    let lowest = quotient.to_bits() as u8;
    lowest.cast_signed()
}

/// Adds: `dense += scale * value` for a piece of whole INT8 blocks.
#[inline(always)]
pub(super) fn add_int8(values: &[i8], scales: &[f32], block: usize, scale: f32, dense: &mut [f32]) {
    for ((dense, values), of_block) in dense.chunks_mut(block).zip(values.chunks(block)).zip(scales) {
        for (dense, &value) in dense.iter_mut().zip(values) {
            *dense += scale * (f32::from(value) * of_block);
        }
    }
}

/// Adds: `dense += scale * value` for a chunk whose indices are checked.
pub(super) fn add_sparse(chunk: &SparseChunk, scale: f32, dense: &mut [f32]) {
    for (&index, value) in chunk.indices.iter().zip(&chunk.values) {
        dense[index.cast_unsigned() as usize] += scale * value.to_f32();
    }
}

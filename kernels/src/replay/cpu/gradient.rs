//! A block's part of a gradient, as f32.
//!
//! Owns: reading every kind of gradient, and the position in a sparse one. Does not own: scaling (a step's factors have it).

use super::super::{Gradient, SparseChunk};
use half::bf16;
use half::slice::HalfFloatSliceExt;

/// Position in a sparse gradient: the first entry at or after the next element. Blocks come in order, so that only the first block of a
/// piece costs a search.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    chunk: usize,
    entry: usize,
}

impl Cursor {
    /// Makes a cursor for blocks from element `begin` on.
    pub(super) fn at(gradient: &Gradient<'_>, begin: usize) -> Self {
        let Gradient::Sparse { chunk_elements, chunks } = *gradient else { return Self::default() };
        let (chunk, within) = (begin / chunk_elements, begin % chunk_elements);
        let before = |&index: &i32| usize::try_from(index).is_ok_and(|index| index < within);
        Self { chunk, entry: chunks[chunk].indices.partition_point(before) }
    }
}

/// Returns the values from element `begin` on, as many as `scratch` has. If the gradient is f32, the result is its own memory; else it is
/// `None`, and the values are in `scratch`.
#[inline(always)]
pub(super) fn values<'a>(
    gradient: &Gradient<'a>,
    begin: usize,
    cursor: &mut Cursor,
    scratch: &mut [f32],
) -> Option<&'a [f32]> {
    let range = begin..begin + scratch.len();
    match *gradient {
        Gradient::F32(values) => return Some(&values[range]),
        Gradient::Bf16(values) => from_bf16(&values[range], scratch),
        // `half` uses the processor's conversion, where there is one.
        Gradient::F16(values) => values[range].convert_to_f32_slice(scratch),
        Gradient::Int8 { values, scales, block } => from_int8(&values[range], begin, scales, block, scratch),
        Gradient::Sparse { chunk_elements, chunks } => {
            from_sparse(chunk_elements, chunks, begin, cursor, scratch)
        }
    }
    None
}

#[inline(always)]
fn from_bf16(values: &[bf16], out: &mut [f32]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = f32::from_bits(u32::from(value.to_bits()) << 16);
    }
}

#[inline(always)]
fn from_int8(values: &[i8], begin: usize, scales: &[f32], block: usize, out: &mut [f32]) {
    let mut at = 0;
    while at < values.len() {
        let scale = scales[(begin + at) / block];
        // To the end of the block of this element.
        let to = (block - (begin + at) % block).saturating_add(at).min(values.len());
        for (out, &value) in out[at..to].iter_mut().zip(&values[at..to]) {
            *out = f32::from(value) * scale;
        }
        at = to;
    }
}

fn from_sparse(
    chunk_elements: usize,
    chunks: &[SparseChunk<'_>],
    begin: usize,
    cursor: &mut Cursor,
    out: &mut [f32],
) {
    out.fill(0.0);
    let end = begin + out.len();
    while let Some(chunk) = chunks.get(cursor.chunk) {
        let chunk_begin = cursor.chunk * chunk_elements;
        for (&index, value) in chunk.indices[cursor.entry..].iter().zip(&chunk.values[cursor.entry..]) {
            let at = usize::try_from(index).map_or(end, |index| chunk_begin + index);
            if at >= end {
                return;
            }
            out[at - begin] = value.to_f32();
            cursor.entry += 1;
        }
        // The next chunk may begin beyond this block: it waits for the block in which it begins.
        if (cursor.chunk + 1).saturating_mul(chunk_elements) > end {
            return;
        }
        *cursor = Cursor { chunk: cursor.chunk + 1, entry: 0 };
    }
}

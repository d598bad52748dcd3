//! A launch's view of each step: addresses for its part of the range, and the factors.
//!
//! Owns: the address arithmetic, the cuts of a range into launches, and the layout that replay.cu reads. Does not own: any
//! call of the driver.

use super::{DeviceGradient, DeviceState};
use crate::replay::Factors;

/// Elements per tile, as in replay.cu.
pub(super) const TILE_ELEMENTS: usize = 1024;

/// Most elements per launch: counts within a launch have 32 bits, and the limit bounds tables.
const LAUNCH_ELEMENTS_MAX: usize = 1 << 26;

/// Most entries (u32) of all tables of a launch, 32 MiB: one per tile and sparse step, and one more per step.
pub(super) const TABLE_ENTRIES_MAX: usize = 1 << 23;

/// The structure `Step` of replay.cu.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(super) struct StepArgs {
    pub(super) values: u64,
    pub(super) beside: u64,
    pub(super) table: u64,
    pub(super) first: u64,
    pub(super) size: u64,
    pub(super) shift: u32,
    pub(super) kind: u32,
    pub(super) from_gradient: u32,
    pub(super) factors: [f32; 9],
}

/// A part of the range, for one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) begin: usize,
    pub(super) elements: usize,
}

impl Part {
    pub(super) fn tiles(self) -> usize {
        self.elements.div_ceil(TILE_ELEMENTS)
    }
}

/// Returns the number of sparse gradients.
pub(super) fn sparse_count(steps: &[(Factors, DeviceGradient<'_>)]) -> usize {
    steps.iter().filter(|(_, gradient)| matches!(gradient, DeviceGradient::Sparse { .. })).count()
}

/// Cuts `elements` into launches: no launch crosses a boundary of a sparse gradient's chunks, and no tables are too large.
pub(super) fn parts(elements: usize, steps: &[(Factors, DeviceGradient<'_>)]) -> impl Iterator<Item = Part> {
    let sparse = sparse_count(steps).max(1);
    let most = LAUNCH_ELEMENTS_MAX.min((TABLE_ENTRIES_MAX / sparse - 1) * TILE_ELEMENTS);
    let mut chunks: Vec<usize> = steps
        .iter()
        .filter_map(|(_, gradient)| match gradient {
            DeviceGradient::Sparse { chunk_elements, .. } => Some(*chunk_elements),
            _ => None,
        })
        .collect();
    chunks.sort_unstable();
    chunks.dedup();
    let mut begin = 0;
    std::iter::from_fn(move || {
        let rest = elements - begin;
        let to_boundary = chunks.iter().map(|&chunk| chunk - begin % chunk).min().unwrap_or(rest);
        let part = Part { begin, elements: rest.min(most).min(to_boundary) };
        begin += part.elements;
        (part.elements > 0).then_some(part)
    })
}

/// Returns the arguments of one step for one part. `table` is where a sparse gradient's table begins.
pub(super) fn step_args(
    (factors, gradient): &(Factors, DeviceGradient<'_>),
    part: Part,
    table: u64,
) -> StepArgs {
    let begin = part.begin as u64;
    let dense = |kind, values: u64, bytes| StepArgs {
        values: values + begin * bytes,
        beside: 0,
        table: 0,
        first: begin,
        size: 1,
        shift: u32::MAX,
        kind,
        from_gradient: u32::from(factors.from_gradient),
        factors: [
            factors.gradient,
            factors.shrink,
            factors.coupled,
            factors.mix,
            factors.beta2,
            factors.fresh2,
            factors.correction,
            factors.eps,
            factors.stride,
        ],
    };
    match *gradient {
        DeviceGradient::F32(values) => dense(0, values, 4),
        DeviceGradient::Bf16(values) => dense(1, values, 2),
        DeviceGradient::F16(values) => dense(2, values, 2),
        DeviceGradient::Sparse { chunk_elements, chunks } => {
            let chunk = chunks[part.begin / chunk_elements];
            StepArgs {
                values: chunk.values,
                beside: chunk.indices,
                table,
                first: (part.begin % chunk_elements) as u64,
                size: chunk.entries as u64,
                ..dense(3, 0, 0)
            }
        }
        DeviceGradient::Int8 { values, scales, block } => {
            let shift = if block.is_power_of_two() { block.trailing_zeros() } else { u32::MAX };
            StepArgs { beside: scales, size: block as u64, shift, ..dense(4, values, 1) }
        }
    }
}

/// Returns whether a launch may load four elements at a time: every address is a multiple of the size of four elements.
pub(super) fn is_wide(state: &DeviceState, part: Part, args: &[StepArgs]) -> bool {
    let begin = part.begin as u64;
    let copy = state.half.address() + begin * 2;
    let state = [state.weights, state.exp_avg, state.exp_avg_sq];
    let gradients = args.iter().all(|step| match step.kind {
        0 => step.values.is_multiple_of(16),
        1 | 2 => step.values.is_multiple_of(8),
        4 => step.values.is_multiple_of(4),
        _ => true,
    });
    state.iter().all(|address| (address + begin * 4).is_multiple_of(16))
        && copy.is_multiple_of(8)
        && gradients
}

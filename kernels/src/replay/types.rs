//! The state that steps change, and the gradients that change it, as borrowed slices.
//!
//! Owns: their shapes and their pieces. Does not own: whether they fit each other (`check`).

use super::Step;
use half::{bf16, f16};

/// Most elements in a chunk of a sparse gradient: its indices are of type `i32`, from 0 to 2³¹ - 1. (TierCheck, section 3.2.)
pub const CHUNK_ELEMENTS_MAX: usize = 1 << 31;

/// A flat range of parameters with Adam's two moments. All slices have the same length, in elements.
#[derive(Debug)]
pub struct State<'a> {
    /// The FP32 master weights.
    pub weights: &'a mut [f32],
    /// The running average of the gradient (`exp_avg`).
    pub exp_avg: &'a mut [f32],
    /// The running average of its square (`exp_avg_sq`).
    pub exp_avg_sq: &'a mut [f32],
    /// A 16-bit copy of the weights, written after the last step in the same pass.
    pub half: HalfCopy<'a>,
}

/// Where the weights go a second time, rounded to nearest, ties to even. As long as the weights.
#[derive(Debug, Default)]
pub enum HalfCopy<'a> {
    /// Nowhere.
    #[default]
    None,
    /// As bfloat16.
    Bf16(&'a mut [bf16]),
    /// As IEEE binary16. Beyond its range (65,504) it is infinity.
    F16(&'a mut [f16]),
}

/// One step's gradient over the whole range: what the backward pass left, before unscaling and clipping
/// ([`Step::gradient_scale`] does both).
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// One value per element.
    F32(&'a [f32]),
    /// One value per element.
    Bf16(&'a [bf16]),
    /// One value per element.
    F16(&'a [f16]),
    /// Few elements have one, the others' is 0: their moments decay and their weights move all the same.
    Sparse {
        /// Elements per chunk; the last one may have fewer. From 1 to [`CHUNK_ELEMENTS_MAX`].
        chunk_elements: usize,
        /// ⌈elements / `chunk_elements`⌉ chunks, in order.
        chunks: &'a [SparseChunk<'a>],
    },
    /// One value per element: `values[i] as f32 * scales[i / block]`.
    Int8 {
        /// One per element.
        values: &'a [i8],
        /// One per started block.
        scales: &'a [f32],
        /// Elements per block, at least 1.
        block: usize,
    },
}

/// The elements of one chunk that a sparse gradient has. Both slices have the same length.
#[derive(Clone, Copy, Debug, Default)]
pub struct SparseChunk<'a> {
    /// Places within the chunk, strictly ascending, from 0.
    pub indices: &'a [i32],
    /// The values there.
    pub values: &'a [f16],
}

/// A step and its gradient.
#[derive(Clone, Copy, Debug)]
pub struct GradientStep<'a> {
    /// The use of the gradient.
    pub step: Step,
    /// The gradient. A skipped step's is not looked at.
    pub gradient: Gradient<'a>,
}

impl<'a> State<'a> {
    /// The same state, borrowed for less long.
    pub(super) fn reborrow(&mut self) -> State<'_> {
        let half = match &mut self.half {
            HalfCopy::None => HalfCopy::None,
            HalfCopy::Bf16(copy) => HalfCopy::Bf16(copy),
            HalfCopy::F16(copy) => HalfCopy::F16(copy),
        };
        State { weights: self.weights, exp_avg: self.exp_avg, exp_avg_sq: self.exp_avg_sq, half }
    }

    /// Cuts off the first `elements` (at most all there are). All slices have the same length.
    pub(super) fn split_off(&mut self, elements: usize) -> Self {
        let elements = elements.min(self.weights.len());
        let half = match &mut self.half {
            HalfCopy::None => HalfCopy::None,
            HalfCopy::Bf16(copy) => HalfCopy::Bf16(cut(copy, elements)),
            HalfCopy::F16(copy) => HalfCopy::F16(cut(copy, elements)),
        };
        Self {
            weights: cut(&mut self.weights, elements),
            exp_avg: cut(&mut self.exp_avg, elements),
            exp_avg_sq: cut(&mut self.exp_avg_sq, elements),
            half,
        }
    }
}

fn cut<'a, T>(from: &mut &'a mut [T], elements: usize) -> &'a mut [T] {
    from.split_off_mut(..elements).expect("the slices of a checked state are of one length")
}

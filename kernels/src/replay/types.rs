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
    /// The running average of the gradient's square (`exp_avg_sq`).
    pub exp_avg_sq: &'a mut [f32],
    /// A 16-bit copy of the weights, written after the last step in the same pass.
    pub half: HalfCopy<'a>,
}

/// The second destination of the weights, rounded to nearest, ties to even. As long as the weights.
#[derive(Debug, Default)]
pub enum HalfCopy<'a> {
    /// None.
    #[default]
    None,
    /// As bfloat16.
    Bf16(&'a mut [bf16]),
    /// As IEEE binary16. Values beyond its range (65,504) become infinity.
    F16(&'a mut [f16]),
}

/// The gradient of a step over the whole range, as the backward pass left it, before unscaling and clipping ([`Step::gradient_scale`] does
/// both).
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// An f32 per element.
    F32(&'a [f32]),
    /// A bfloat16 per element.
    Bf16(&'a [bf16]),
    /// A binary16 per element.
    F16(&'a [f16]),
    /// Values of few elements; those of the others are 0: their moments decay and their weights move all the same.
    Sparse {
        /// Elements per chunk; the last chunk may have fewer. From 1 to [`CHUNK_ELEMENTS_MAX`].
        chunk_elements: usize,
        /// ⌈elements / `chunk_elements`⌉ chunks, in order.
        chunks: &'a [SparseChunk<'a>],
    },
    /// A value per element: `values[i] as f32 * scales[i / block]`.
    Int8 {
        /// The values, an i8 per element.
        values: &'a [i8],
        /// The scales, an f32 per started block.
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
    /// The gradient. The gradient of a skipped step is not read.
    pub gradient: Gradient<'a>,
}

impl<'a> State<'a> {
    /// Borrows the same state for a shorter time.
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

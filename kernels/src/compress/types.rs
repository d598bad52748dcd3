//! Gradients as input, and as compressed values.
//!
//! Owns: their shapes. Does not own: whether a compressed gradient from elsewhere is valid (`check`).

use half::{bf16, f16};
use std::ops::Range;

/// A gradient to compress: a flat tensor, as the optimizer sees it.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// IEEE binary32.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// IEEE binary16.
    F16(&'a [f16]),
}

impl Values<'_> {
    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::F16(values) => values.len(),
        }
    }

    /// Returns whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns element `index` as f32, which is exact.
    pub(super) fn get(&self, index: usize) -> f32 {
        match self {
            Self::F32(values) => values[index],
            Self::Bf16(values) => values[index].to_f32(),
            Self::F16(values) => values[index].to_f32(),
        }
    }

    pub(super) fn slice(&self, range: Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(&values[range]),
            Self::Bf16(values) => Self::Bf16(&values[range]),
            Self::F16(values) => Self::F16(&values[range]),
        }
    }
}

/// A compressed gradient.
#[derive(Clone, Debug, PartialEq)]
pub enum Compressed {
    /// Every element: `values[i] as f32 * scales[i / block]`. 1 byte per element and 4 per block.
    Int8 {
        /// Elements of the tensor.
        len: usize,
        /// Elements per block, at least 1; the last block may have fewer.
        block: usize,
        /// Scales, an f32 per started block: the block's largest magnitude, divided by 127.
        scales: Vec<f32>,
        /// Values, an i8 per element, -127 to 127.
        values: Vec<i8>,
    },
    /// The largest elements; the others are 0. 6 bytes per element that is kept.
    Sparse {
        /// Elements of the tensor.
        len: usize,
        /// Elements per chunk, at least 1; the last chunk may have fewer.
        chunk_elements: usize,
        /// ⌈`len` / `chunk_elements`⌉ chunks, in order, including chunks in which nothing is kept.
        chunks: Vec<SparseChunk>,
    },
}

/// The kept part of one chunk of a sparse gradient.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SparseChunk {
    /// The element of the tensor with which the chunk begins.
    pub begin: u64,
    /// Places within the chunk, strictly ascending, from 0.
    pub indices: Vec<i32>,
    /// The values there.
    pub values: Vec<f16>,
}

impl Compressed {
    /// Returns the number of elements of the tensor.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an empty tensor is no special case to any caller")]
    pub fn len(&self) -> usize {
        match *self {
            Self::Int8 { len, .. } | Self::Sparse { len, .. } => len,
        }
    }

    /// Returns the number of elements that are kept.
    #[must_use]
    pub fn kept(&self) -> usize {
        match self {
            Self::Int8 { values, .. } => values.len(),
            Self::Sparse { chunks, .. } => chunks.iter().map(|chunk| chunk.values.len()).sum(),
        }
    }

    /// Returns the bytes of scales, values and indices.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        match self {
            Self::Int8 { scales, values, .. } => values.len() + 4 * scales.len(),
            Self::Sparse { .. } => 6 * self.kept(),
        }
    }
}

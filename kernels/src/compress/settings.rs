//! The settings of compression, checked once.
//!
//! Owns: the settings' ranges and defaults. Does not own: their effects.

use super::{CompressError, check::setting};

/// The part of a large tensor's elements that is kept. (TierCheck, section 3.2: k = 0.01.)
pub const RATIO_DEFAULT: f64 = 0.01;
/// Elements per INT8 block: a scale costs 1.6 % beside them.
pub const BLOCK_DEFAULT: usize = 256;
/// Most elements per INT8 block: one outlier coarsens no more than these.
pub const BLOCK_MAX: usize = 1 << 16;
/// Most elements that are sampled to find a threshold. At a ratio of 0.01 some 164 of them lie above it: the number kept has a standard
/// deviation of 8 %.
pub const SAMPLE_DEFAULT: usize = 1 << 14;
/// The largest sample that a caller may set: 4 MiB of memory.
pub const SAMPLE_MAX: usize = 1 << 20;
/// Tensors with fewer elements are dense INT8. (TierCheck, section 3.2: 100 K.)
pub const DENSE_BELOW: usize = 100_000;
/// Most elements per chunk of a sparse tensor: indices are of type `i32`. (TierCheck, section 3.2.)
pub const CHUNK_ELEMENTS_MAX: usize = 0x7fff_ffff;

/// The settings of compression. [`Settings::default`] are TierCheck's values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    ratio: f64,
    block: usize,
    sample: usize,
    dense_below: usize,
    chunk_elements: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            ratio: RATIO_DEFAULT,
            block: BLOCK_DEFAULT,
            sample: SAMPLE_DEFAULT,
            dense_below: DENSE_BELOW,
            chunk_elements: CHUNK_ELEMENTS_MAX,
        }
    }
}

impl Settings {
    /// Checks settings. `ratio` is the part of a large tensor's elements to keep, above 0 and at most 1; `block` the elements per INT8
    /// block, 1 to [`BLOCK_MAX`]; `sample` the most elements that are sampled for a threshold, 1 to [`SAMPLE_MAX`].
    ///
    /// # Errors
    /// [`CompressError::Ratio`] or [`CompressError::Setting`] for a value out of its range.
    pub fn new(ratio: f64, block: usize, sample: usize) -> Result<Self, CompressError> {
        if !(ratio > 0.0 && ratio <= 1.0) {
            return Err(CompressError::Ratio { found: ratio });
        }
        setting("block", block, BLOCK_MAX)?;
        setting("sample", sample, SAMPLE_MAX)?;
        Ok(Self { ratio, block, sample, ..Self::default() })
    }

    /// Returns these settings with another limit: tensors with fewer than `elements` elements are dense; 0 makes all sparse, `usize::MAX`
    /// all dense.
    #[must_use]
    pub fn with_dense_below(self, elements: usize) -> Self {
        Self { dense_below: elements, ..self }
    }

    /// Returns these settings with chunks of `elements` elements, 1 to [`CHUNK_ELEMENTS_MAX`].
    ///
    /// # Errors
    /// [`CompressError::Setting`] for a size out of its range.
    pub fn with_chunk_elements(self, elements: usize) -> Result<Self, CompressError> {
        setting("chunk_elements", elements, CHUNK_ELEMENTS_MAX)?;
        Ok(Self { chunk_elements: elements, ..self })
    }

    /// Returns the room that a sparse result of `len` elements does not outgrow, unless many elements have the same magnitude: twice the
    /// number to keep, 1,024 more for small samples, and never more than `len`.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a guess, which `min` bounds"
    )]
    pub fn capacity(&self, len: usize) -> usize {
        ((2.0 * self.ratio * len as f64).ceil() as usize).saturating_add(1024).min(len)
    }

    /// Returns the part of a large tensor's elements to keep.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.ratio
    }

    /// Returns the elements per INT8 block.
    #[must_use]
    pub fn block(&self) -> usize {
        self.block
    }

    /// Returns the most elements that are sampled for a threshold.
    #[must_use]
    pub fn sample(&self) -> usize {
        self.sample
    }

    /// Returns the elements per chunk of a sparse tensor; the last chunk may have fewer.
    #[must_use]
    pub fn chunk_elements(&self) -> usize {
        self.chunk_elements
    }

    /// Returns whether a tensor of `len` elements is dense INT8.
    #[must_use]
    pub fn is_dense(&self, len: usize) -> bool {
        len < self.dense_below
    }
}

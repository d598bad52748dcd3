//! Compresses gradients, with a loss that the next step makes up for: INT8 blocks for small tensors, the largest one per cent for large
//! ones.
//!
//! Owns: the effect of compression on one flat tensor (`reference` is the meaning), and back ends that agree with it bit for bit. Does not
//! own: how compressed gradients are kept, which steps have one, or lossless encoding (`encoding` has it).
//! (TierCheck, sections 3.2 and 4: adaptive gradient compression.)
//!
//! **A gradient that is not finite is refused**, with the place of the first such element, and nothing is changed. A loss scaler skips the
//! step of such a gradient, so that there is nothing to keep. Zeros or clamped values in its place would be replayed as if the step had
//! been taken.
//!
//! **Error feedback.** Beside a gradient `g` a caller may keep a residual `r`, zeros at first: then `g + r` is compressed, and `r` becomes
//! the part that is lost. If the sum of finite values is beyond f32's range, or `r` was not finite, the residual can no longer be used: an
//! error says so, and the caller fills it with zeros.
//!
//! **Size.** Sparse output is not cut: all elements that reach the threshold are kept, 6 bytes each. With a sample of 16,384 their number
//! is within some 10 % of `ratio · len`. If many elements have the very magnitude of the threshold, all of these are kept: at most `len` of
//! them, 6 bytes each. Cutting would choose among equals by their place. A device's output buffer has a capacity; if it is too small the
//! number is returned and nothing is changed.

mod check;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod reference;
mod sample;
mod settings;
#[cfg(test)]
mod tests;
mod types;

pub use crate::replay::CpuBackend;
pub use cpu::{accumulate, accumulate_with, compress, compress_with};
pub use error::CompressError;
pub use settings::{
    BLOCK_DEFAULT, BLOCK_MAX, CHUNK_ELEMENTS_MAX, DENSE_BELOW, RATIO_DEFAULT, SAMPLE_DEFAULT, SAMPLE_MAX,
    Settings,
};
pub use types::{Compressed, SparseChunk, Values};

/// The largest finite binary16: larger values are kept as this, with their sign. (The residual has the rest.)
const F16_MAX: f32 = 65_504.0;

/// The bits of the least f32 whose binary16 is not zero: one more than those of 2⁻²⁵, which is half of the least subnormal and rounds to
/// zero, the even one. No threshold is lower, so that no entry is wasted on a zero.
const LEAST_KEPT_BITS: u32 = 0x3300_0001;

/// The bits of f32's infinity: magnitudes from here on are not finite.
const INFINITY_BITS: u32 = 0x7f80_0000;

/// The largest value of an INT8 block: -128 is not used, so that values are symmetric.
const INT8_MAX: f32 = 127.0;

/// The largest scale of an INT8 block: 127 times the next f32, which is `f32::MAX / 127` rounded, would be infinity.
const SCALE_MAX: f32 = f32::from_bits((f32::MAX / INT8_MAX).to_bits() - 1);

//! Why a gradient is not compressed, or not added: the part that does not fit, and both numbers.
//!
//! Owns: the error of every back end's checks. Does not own: the errors of a missing device (`crate::cuda`).

use std::fmt;

/// A setting, a length, a value or an index does not fit. Nothing was changed, except for [`Self::Residual`].
#[derive(Clone, Debug, PartialEq)]
pub enum CompressError {
    /// The part to keep is not above 0 and at most 1.
    Ratio {
        /// The ratio found.
        found: f64,
    },
    /// A setting is 0 or too large.
    Setting {
        /// The setting's name.
        name: &'static str,
        /// The value found.
        found: usize,
        /// The most it may be.
        most: usize,
    },
    /// A slice has a length that does not fit.
    Length {
        /// The slice.
        what: &'static str,
        /// The slice's length, in elements.
        found: usize,
        /// The length that fits.
        expected: usize,
    },
    /// The gradient has a NaN or an infinity: no optimizer step was taken with it (see the module's text).
    NotFinite {
        /// The first such element, from 0.
        index: usize,
    },
    /// The gradient is finite, and its sum with the residual is not. The residual may have changed, and can no longer be used: fill it with
    /// zeros.
    Residual {
        /// The first such element, from 0.
        index: usize,
    },
    /// Indices of a sparse chunk are not strictly ascending, or not within their chunk.
    Index {
        /// The chunk's number, from 0.
        chunk: usize,
        /// The entry's number in the chunk, from 0.
        entry: usize,
        /// The index there.
        found: i32,
        /// The least it may be: one more than the index before.
        least: i64,
        /// The number of the chunk's elements: the index must be below.
        elements: usize,
    },
    /// A sparse chunk does not begin where the one before it ends.
    Begin {
        /// The chunk's number, from 0.
        chunk: usize,
        /// The element with which the chunk says that it begins.
        found: u64,
        /// The element with which it should begin.
        expected: u64,
    },
}

impl fmt::Display for CompressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Ratio { found } => write!(f, "the ratio is {found}; it may be above 0 and at most 1"),
            Self::Setting { name, found, most } => write!(f, "{name} is {found}; it may be 1 to {most}"),
            Self::Length { what, found, expected } => {
                write!(f, "{what} has {found} elements and should have {expected}")
            }
            Self::NotFinite { index } => {
                write!(
                    f,
                    "the gradient's element {index} is not finite: a step with such a gradient is skipped"
                )
            }
            Self::Residual { index } => {
                write!(
                    f,
                    "the residual's element {index} is not finite or too large: fill the residual with zeros"
                )
            }
            Self::Index { chunk, entry, found, least, elements } => {
                write!(
                    f,
                    "index {found} at entry {entry} of chunk {chunk} is not from {least} to below {elements}"
                )
            }
            Self::Begin { chunk, found, expected } => {
                write!(f, "chunk {chunk} begins at element {found} and should at {expected}")
            }
        }
    }
}

impl std::error::Error for CompressError {}

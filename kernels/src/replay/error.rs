//! Why steps are not applied: what does not fit, and both numbers.
//!
//! Owns: the error of every back end's checks. Does not own: what a missing device says (`crate::cuda`).

use std::fmt;

/// The state, a step or a gradient does not fit. Nothing was changed. Steps are counted from 0 within the call.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplayError {
    /// A slice of the state is not as long as the weights.
    Length {
        /// Which one.
        what: &'static str,
        /// Its elements.
        found: usize,
        /// The weights' elements.
        expected: usize,
    },
    /// A part of a gradient has another length than the range asks for.
    GradientLength {
        /// Which step's.
        step: usize,
        /// Which part.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length that fits.
        expected: usize,
    },
    /// A size that a gradient names (a chunk's, a block's) is 0 or too large.
    GradientUnit {
        /// Which step's.
        step: usize,
        /// Which size.
        what: &'static str,
        /// The size found, in elements.
        found: usize,
        /// The most it may be.
        most: usize,
    },
    /// Indices of a sparse gradient are not strictly ascending, or not within their chunk.
    Index {
        /// Which step's.
        step: usize,
        /// Which chunk of the gradient.
        chunk: usize,
        /// Which entry of the chunk.
        entry: usize,
        /// The index there.
        found: i32,
        /// The least it may be: one more than the index before.
        least: i64,
        /// The chunk's elements: it must be below.
        elements: usize,
    },
    /// More steps than [`STEPS_MAX`](super::STEPS_MAX).
    Steps {
        /// How many were handed in.
        found: usize,
        /// How many may be.
        most: usize,
    },
    /// A hyperparameter is out of its range (see [`Step`](super::Step)).
    Hyperparameter {
        /// Which step's.
        step: usize,
        /// Its name.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// Steps do not follow each other, or have the number 0: one is missing or comes twice.
    StepNumber {
        /// Which one.
        step: usize,
        /// Its number.
        found: u64,
        /// The number after the last step that was not skipped.
        expected: u64,
    },
    /// A step was taken with amsgrad, which has a third moment.
    Amsgrad {
        /// Which one.
        step: usize,
    },
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Length { what, found, expected } => {
                write!(f, "{what} has {found} elements and the weights have {expected}")
            }
            Self::GradientLength { step, what, found, expected } => {
                write!(f, "step {step}: the gradient's {what} has {found} entries and should have {expected}")
            }
            Self::GradientUnit { step, what, found, most } => {
                write!(f, "step {step}: the gradient's {what} has {found} elements; it may have 1 to {most}")
            }
            Self::Index { step, chunk, entry, found, least, elements } => write!(
                f,
                "step {step}: index {found} at entry {entry} of chunk {chunk} is not from {least} to below {elements}"
            ),
            Self::Steps { found, most } => write!(f, "{found} steps in one call; at most {most}"),
            Self::Hyperparameter { step, name, value } => {
                write!(f, "step {step}: {name} is {value}, out of its range")
            }
            Self::StepNumber { step, found, expected } => {
                write!(f, "step {step} of the call has the number {found}; {expected} is due")
            }
            Self::Amsgrad { step } => {
                write!(f, "step {step} was taken with amsgrad, which cannot be replayed")
            }
        }
    }
}

impl std::error::Error for ReplayError {}

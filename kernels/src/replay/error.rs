//! Why steps are not applied: the part that does not fit, and both numbers.
//!
//! Owns: the error of every back end's checks. Does not own: the errors of a missing device (`crate::cuda`).

use std::fmt;

/// The state, a step or a gradient does not fit. Nothing was changed. Steps are counted from 0 within the call.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplayError {
    /// A slice of the state is not as long as the weights.
    Length {
        /// The slice.
        what: &'static str,
        /// The slice's length, in elements.
        found: usize,
        /// The weights' elements.
        expected: usize,
    },
    /// A part of a gradient has a length that does not fit the range.
    GradientLength {
        /// The step's number.
        step: usize,
        /// The part of the gradient.
        what: &'static str,
        /// The part's length.
        found: usize,
        /// The length that fits.
        expected: usize,
    },
    /// A size that a gradient names (a chunk's, a block's) is 0 or too large.
    GradientUnit {
        /// The step's number.
        step: usize,
        /// The size's name.
        what: &'static str,
        /// The size found, in elements.
        found: usize,
        /// The most it may be.
        most: usize,
    },
    /// Indices of a sparse gradient are not strictly ascending, or not within their chunk.
    Index {
        /// The step's number.
        step: usize,
        /// The chunk's number in the gradient.
        chunk: usize,
        /// The entry's number in the chunk.
        entry: usize,
        /// The index there.
        found: i32,
        /// The least it may be: one more than the index before.
        least: i64,
        /// The number of the chunk's elements: the index must be below.
        elements: usize,
    },
    /// More steps than [`STEPS_MAX`](super::STEPS_MAX).
    Steps {
        /// The number of steps in the call.
        found: usize,
        /// The most that a call may have.
        most: usize,
    },
    /// A hyperparameter is out of its range (see [`Step`](super::Step)).
    Hyperparameter {
        /// The step's number.
        step: usize,
        /// The hyperparameter's name.
        name: &'static str,
        /// The hyperparameter's value.
        value: f64,
    },
    /// Steps do not follow each other, or have the number 0: one is missing or comes twice.
    StepNumber {
        /// The step's number within the call.
        step: usize,
        /// The number that the step has.
        found: u64,
        /// The number after the last step that was not skipped.
        expected: u64,
    },
    /// A step was taken with amsgrad, which needs a third moment.
    Amsgrad {
        /// The step's number.
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

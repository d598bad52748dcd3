//! Checks whether a state, its steps and their gradients fit each other, before anything is changed.
//!
//! Owns: every check of the caller's input, and the factors of the steps that are applied. Does not own: the arithmetic.

use super::{
    CHUNK_ELEMENTS_MAX, Factors, Gradient, GradientStep, HalfCopy, ReplayError, STEPS_MAX, SparseChunk,
    State, Step,
};

/// A step that is applied: its factors and its gradient.
pub(super) type Applied<'a> = (Factors, Gradient<'a>);

/// Returns the steps that are not skipped, with their factors. Reads the indices of sparse gradients once; nothing else of their size.
pub(super) fn checked<'a>(
    state: &State<'_>,
    steps: &[GradientStep<'a>],
) -> Result<Vec<Applied<'a>>, ReplayError> {
    let elements = state.weights.len();
    let half = match &state.half {
        HalfCopy::None => elements,
        HalfCopy::Bf16(copy) => copy.len(),
        HalfCopy::F16(copy) => copy.len(),
    };
    for (what, found) in
        [("exp_avg", state.exp_avg.len()), ("exp_avg_sq", state.exp_avg_sq.len()), ("half copy", half)]
    {
        if found != elements {
            return Err(ReplayError::Length { what, found, expected: elements });
        }
    }
    let factors = applied(steps.iter().map(|step| &step.step))?;
    let gradients = steps.iter().enumerate().filter(|(_, step)| !step.step.skipped);
    factors
        .into_iter()
        .zip(gradients)
        .map(|(factors, (at, step))| fits(&step.gradient, at, elements).map(|()| (factors, step.gradient)))
        .collect()
}

/// Returns the factors of the steps that are not skipped, in order.
pub(super) fn applied<'a>(
    steps: impl ExactSizeIterator<Item = &'a Step>,
) -> Result<Vec<Factors>, ReplayError> {
    if steps.len() > STEPS_MAX {
        return Err(ReplayError::Steps { found: steps.len(), most: STEPS_MAX });
    }
    let mut due = None;
    let mut applied = Vec::new();
    for (at, step) in steps.enumerate().filter(|(_, step)| !step.skipped) {
        let factors = step.factors(at)?;
        let expected = due.unwrap_or(step.number);
        if step.number != expected {
            return Err(ReplayError::StepNumber { step: at, found: step.number, expected });
        }
        due = step.number.checked_add(1);
        applied.push(factors);
    }
    Ok(applied)
}

fn fits(gradient: &Gradient<'_>, step: usize, elements: usize) -> Result<(), ReplayError> {
    match *gradient {
        Gradient::F32(values) => length(step, "values", values.len(), elements),
        Gradient::Bf16(values) => length(step, "values", values.len(), elements),
        Gradient::F16(values) => length(step, "values", values.len(), elements),
        Gradient::Int8 { values, scales, block } => {
            unit(step, "block", block, usize::MAX)?;
            length(step, "values", values.len(), elements)?;
            length(step, "scales", scales.len(), elements.div_ceil(block))
        }
        Gradient::Sparse { chunk_elements, chunks } => {
            unit(step, "chunk", chunk_elements, CHUNK_ELEMENTS_MAX)?;
            length(step, "list of chunks", chunks.len(), elements.div_ceil(chunk_elements))?;
            for (at, chunk) in chunks.iter().enumerate() {
                let elements = chunk_elements.min(elements - at * chunk_elements);
                length(step, "values of a chunk", chunk.values.len(), chunk.indices.len())?;
                ascending(chunk, step, at, elements)?;
            }
            Ok(())
        }
    }
}

/// Checks the size of a gradient's units: at least 1, at most `most`.
pub(super) fn unit(step: usize, what: &'static str, found: usize, most: usize) -> Result<(), ReplayError> {
    if found == 0 || found > most {
        return Err(ReplayError::GradientUnit { step, what, found, most });
    }
    Ok(())
}

/// Checks the length of a gradient's part.
pub(super) fn length(
    step: usize,
    what: &'static str,
    found: usize,
    expected: usize,
) -> Result<(), ReplayError> {
    if found != expected {
        return Err(ReplayError::GradientLength { step, what, found, expected });
    }
    Ok(())
}

fn ascending(chunk: &SparseChunk<'_>, step: usize, at: usize, elements: usize) -> Result<(), ReplayError> {
    let mut least = 0i64;
    for (entry, &found) in chunk.indices.iter().enumerate() {
        if i64::from(found) < least || usize::try_from(found).is_ok_and(|found| found >= elements) {
            return Err(ReplayError::Index { step, chunk: at, entry, found, least, elements });
        }
        least = i64::from(found) + 1;
    }
    Ok(())
}

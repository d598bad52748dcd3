//! Checks whether lengths, indices and blocks fit each other.
//!
//! Owns: the checks before anything is read or changed. Does not own: whether values are finite, which takes a pass.

use super::{BLOCK_MAX, CHUNK_ELEMENTS_MAX, CompressError, Compressed, SparseChunk, Values};

/// Checks that a residual is as long as its gradient.
pub(super) fn residual(values: Values<'_>, residual: Option<&[f32]>) -> Result<(), CompressError> {
    residual.map_or(Ok(()), |residual| length("the residual", residual.len(), values.len()))
}

pub(super) fn length(what: &'static str, found: usize, expected: usize) -> Result<(), CompressError> {
    if found == expected { Ok(()) } else { Err(CompressError::Length { what, found, expected }) }
}

/// Returns where a chunk has to begin, and how many elements it has to have.
pub(super) fn chunk_range(len: usize, chunk_elements: usize, chunk: usize) -> (usize, usize) {
    let begin = chunk.saturating_mul(chunk_elements).min(len);
    (begin, chunk_elements.min(len - begin))
}

impl Compressed {
    /// Checks that the parts fit each other: for gradients that come from outside. Reads all indices, and no values: a value that is not
    /// finite is the writer's error.
    ///
    /// # Errors
    /// An error for the first part that does not fit.
    pub fn check(&self) -> Result<(), CompressError> {
        match self {
            Self::Int8 { len, block, scales, values } => {
                setting("block", *block, BLOCK_MAX)?;
                length("the values", values.len(), *len)?;
                length("the scales", scales.len(), len.div_ceil(*block))
            }
            Self::Sparse { len, chunk_elements, chunks } => {
                setting("chunk_elements", *chunk_elements, CHUNK_ELEMENTS_MAX)?;
                length("the list of chunks", chunks.len(), len.div_ceil(*chunk_elements))?;
                for (place, chunk) in chunks.iter().enumerate() {
                    let (begin, elements) = chunk_range(*len, *chunk_elements, place);
                    check_chunk(place, chunk, begin, elements)?;
                }
                Ok(())
            }
        }
    }
}

pub(super) fn setting(name: &'static str, found: usize, most: usize) -> Result<(), CompressError> {
    if (1..=most).contains(&found) { Ok(()) } else { Err(CompressError::Setting { name, found, most }) }
}

fn check_chunk(
    place: usize,
    chunk: &SparseChunk,
    begin: usize,
    elements: usize,
) -> Result<(), CompressError> {
    if chunk.begin != begin as u64 {
        return Err(CompressError::Begin { chunk: place, found: chunk.begin, expected: begin as u64 });
    }
    length("a chunk's values", chunk.values.len(), chunk.indices.len())?;
    let mut least = 0i64;
    for (entry, &found) in chunk.indices.iter().enumerate() {
        let fits = i64::from(found) >= least && usize::try_from(found).is_ok_and(|index| index < elements);
        if !fits {
            return Err(CompressError::Index { chunk: place, entry, found, least, elements });
        }
        least = i64::from(found) + 1;
    }
    Ok(())
}

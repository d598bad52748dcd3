//! Compression on processors: pieces dealt to threads, blocks that stay in a core's cache, loops that the compiler vectorises.
//!
//! Owns: the order of passes, and how pieces make one result. Does not own: the loops (`piece`), the threads (`deal`), the choice of
//! instructions (`dispatch`).
//!
//! A sparse tensor with a residual is read twice: its gradient alone first, so that a value that is not finite changes nothing, then both
//! in one pass, 16 bytes of memory traffic per element for f32. Without a residual the tensor is read once.

mod deal;
mod dispatch;
mod piece;

use super::sample::{Sample, magnitude};
use super::{CompressError, Compressed, CpuBackend, INFINITY_BITS, Settings, SparseChunk, Values, check};
use deal::deal;
use piece::{Found, Int8Piece, SparsePiece};

/// Elements per piece that a thread takes: so many (1 MiB of f32) that taking a piece costs nothing, and so few that a thread on a busy
/// core hardly delays the others.
const PIECE_ELEMENTS: usize = 1 << 18;

/// Compresses `values`, or `values + residual`, as [`super::reference::compress`] does, with the widest instructions of this
/// processor.
///
/// Uses the calling thread and up to `threads - 1` more (at least 1, at most [`crate::replay::THREADS_MAX`] are used); all of these have
/// ended when it returns. The result does not depend on their number. Allocates the result twice, 24 KiB per thread, and the sample.
///
/// # Errors
/// [`CompressError::Length`] or [`CompressError::NotFinite`], and nothing is changed; [`CompressError::Residual`].
pub fn compress(
    values: Values<'_>,
    residual: Option<&mut [f32]>,
    settings: &Settings,
    seed: u64,
    threads: usize,
) -> Result<Compressed, CompressError> {
    compress_with(CpuBackend::fastest(), values, residual, settings, seed, threads)
}

/// Compresses as [`compress`] does, with these instructions: for tests and benches.
///
/// # Errors
/// As [`compress`].
///
/// # Panics
/// When this processor lacks them, which [`CpuBackend::all_here`] never lists.
pub fn compress_with(
    backend: CpuBackend,
    values: Values<'_>,
    mut residual: Option<&mut [f32]>,
    settings: &Settings,
    seed: u64,
    threads: usize,
) -> Result<Compressed, CompressError> {
    check::residual(values, residual.as_deref())?;
    let dense = settings.is_dense(values.len());
    // Without a residual a sparse pass changes nothing of the caller: it finds such values itself.
    if (dense || residual.is_some()) && !all_finite(backend, values, threads) {
        return Err(not_finite(values));
    }
    let compressed = if dense {
        int8(backend, values, residual.as_deref_mut(), settings, threads)
    } else {
        sparse(backend, values, residual.as_deref_mut(), settings, seed, threads)
    };
    compressed.ok_or_else(|| match residual {
        None => not_finite(values),
        Some(residual) => CompressError::Residual {
            index: residual.iter().position(|value| !value.is_finite()).unwrap_or(residual.len()),
        },
    })
}

/// Adds: `dense[i] += scale * value`, as [`super::reference::accumulate`] does, with the widest instructions of this processor, and threads
/// as [`compress`].
///
/// # Errors
/// If [`Compressed::check`] finds an error, or `dense` has another length; nothing is changed then.
pub fn accumulate(
    compressed: &Compressed,
    scale: f32,
    dense: &mut [f32],
    threads: usize,
) -> Result<(), CompressError> {
    accumulate_with(CpuBackend::fastest(), compressed, scale, dense, threads)
}

/// Adds as [`accumulate`] does, with these instructions: for tests and benches.
///
/// # Errors
/// As [`accumulate`].
///
/// # Panics
/// When this processor lacks them, which [`CpuBackend::all_here`] never lists.
pub fn accumulate_with(
    backend: CpuBackend,
    compressed: &Compressed,
    scale: f32,
    dense: &mut [f32],
    threads: usize,
) -> Result<(), CompressError> {
    compressed.check()?;
    check::length("the dense tensor", dense.len(), compressed.len())?;
    match compressed {
        Compressed::Int8 { block, scales, values, .. } => {
            let piece = piece_of_blocks(*block);
            let values = values.chunks(piece).zip(scales.chunks(piece / block));
            let pieces: Vec<_> = dense.chunks_mut(piece).zip(values).collect();
            deal(pieces, threads, |(dense, (values, scales))| {
                dispatch::add_int8(backend, values, scales, *block, scale, dense);
            });
        }
        Compressed::Sparse { chunk_elements, chunks, .. } => {
            // Only one element in a hundred is touched: threads would wait for the same memory.
            for (dense, chunk) in dense.chunks_mut(*chunk_elements).zip(chunks) {
                piece::add_sparse(chunk, scale, dense);
            }
        }
    }
    Ok(())
}

fn all_finite(backend: CpuBackend, values: Values<'_>, threads: usize) -> bool {
    let ranges = (0..values.len()).step_by(PIECE_ELEMENTS);
    let pieces = ranges.map(|begin| values.slice(begin..values.len().min(begin + PIECE_ELEMENTS)));
    deal(pieces.collect(), threads, |piece| dispatch::finite(backend, piece)).into_iter().all(|finite| finite)
}

/// Returns the error for values of which one is not finite.
fn not_finite(values: Values<'_>) -> CompressError {
    let index = (0..values.len()).find(|&index| !values.get(index).is_finite());
    CompressError::NotFinite { index: index.unwrap_or(values.len()) }
}

/// Returns the elements per piece: whole blocks.
fn piece_of_blocks(block: usize) -> usize {
    block * (PIECE_ELEMENTS / block).max(1)
}

/// Returns the pieces of a residual, or `None` without end.
fn residual_pieces(
    residual: Option<&mut [f32]>,
    elements: usize,
) -> impl Iterator<Item = Option<&mut [f32]>> {
    let none = residual.is_none();
    let some = residual.into_iter().flat_map(move |residual| residual.chunks_mut(elements)).map(Some);
    some.chain(std::iter::repeat_with(|| None).take_while(move |_| none))
}

/// Compresses into INT8 blocks; `None` if a sum is not finite.
fn int8(
    backend: CpuBackend,
    values: Values<'_>,
    residual: Option<&mut [f32]>,
    settings: &Settings,
    threads: usize,
) -> Option<Compressed> {
    let (len, block) = (values.len(), settings.block());
    let piece = piece_of_blocks(block);
    let mut scales = vec![0.0; len.div_ceil(block)];
    let mut quantised = vec![0i8; len];
    let out = quantised.chunks_mut(piece).zip(scales.chunks_mut(piece / block));
    let pieces: Vec<_> = out
        .zip(residual_pieces(residual, piece))
        .enumerate()
        .map(|(place, ((quantised, scales), residual))| Int8Piece {
            values: values.slice(place * piece..place * piece + quantised.len()),
            residual,
            block,
            quantised,
            scales,
        })
        .collect();
    let finite = deal(pieces, threads, |piece| dispatch::int8(backend, piece));
    finite.into_iter().all(|finite| finite).then_some(Compressed::Int8 {
        len,
        block,
        scales,
        values: quantised,
    })
}

/// Keeps the largest elements; `None` if a sum is not finite.
fn sparse(
    backend: CpuBackend,
    values: Values<'_>,
    residual: Option<&mut [f32]>,
    settings: &Settings,
    seed: u64,
    threads: usize,
) -> Option<Compressed> {
    let (len, chunk_elements) = (values.len(), settings.chunk_elements());
    let sample = Sample::of(len, settings, seed);
    let looked_at = (0..sample.count).map(|stratum| {
        let place = sample.place(stratum);
        let value = values.get(place);
        magnitude(residual.as_deref().map_or(value, |residual| value + residual[place]))
    });
    // A value that is not finite reaches every threshold, so that the pass finds it.
    let threshold = sample.threshold(looked_at.collect()).min(INFINITY_BITS);

    let mut rest = residual;
    let (mut pieces, mut chunks_of) = (Vec::new(), Vec::new());
    for chunk in 0..len.div_ceil(chunk_elements) {
        let (chunk_begin, elements) = check::chunk_range(len, chunk_elements, chunk);
        for begin in (0..elements).step_by(PIECE_ELEMENTS) {
            let piece = PIECE_ELEMENTS.min(elements - begin);
            let residual = rest.as_mut().and_then(|rest| rest.split_off_mut(..piece));
            let values = values.slice(chunk_begin + begin..chunk_begin + begin + piece);
            pieces.push(SparsePiece { values, residual, begin, threshold });
            chunks_of.push(chunk);
        }
    }
    let found = deal(pieces, threads, |piece| dispatch::sparse(backend, piece));
    if found.iter().any(|found| !found.finite) {
        return None;
    }
    let mut chunks: Vec<SparseChunk> = (0..len.div_ceil(chunk_elements))
        .map(|chunk| SparseChunk { begin: chunk as u64 * chunk_elements as u64, ..SparseChunk::default() })
        .collect();
    let mut kept = vec![0; chunks.len()];
    for (chunk, found) in chunks_of.iter().zip(&found) {
        kept[*chunk] += found.indices.len();
    }
    for (chunk, kept) in chunks.iter_mut().zip(kept) {
        chunk.indices.reserve_exact(kept);
        chunk.values.reserve_exact(kept);
    }
    for (chunk, Found { indices, values, .. }) in chunks_of.into_iter().zip(found) {
        chunks[chunk].indices.extend_from_slice(&indices);
        chunks[chunk].values.extend_from_slice(&values);
    }
    Some(Compressed::Sparse { len, chunk_elements, chunks })
}

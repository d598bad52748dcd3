//! Replay on processors: pieces dealt to threads, blocks that stay in a core's cache, loops that the compiler vectorises.
//!
//! Owns: the choice of instructions, the threads, and the order of blocks and steps. Does not own: the arithmetic (`block`), or how a
//! gradient becomes f32 (`gradient`).
//!
//! Memory: a block of f32 per thread, and a cursor per step.

mod block;
mod dispatch;
mod gradient;

use super::check::{Applied, checked};
use super::{GradientStep, ReplayError, State};
use gradient::Cursor;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Most threads for one call. A core contributes some 10 GB/s to a pass over the state. A few threads saturate a socket's memory, and more
/// would only take cores from a training job beside it.
pub const THREADS_MAX: usize = 16;

/// Elements per cache block. The three slices of the state and one gradient as f32, 16 bytes per element, take 32 KiB. All of it stays in
/// the first and second level of the cache from the first step of a block to the last. A step's part of a gradient is still long enough (8
/// KiB of f32) for the processor's own prefetch.
const BLOCK_ELEMENTS: usize = 2048;

/// Elements per piece that a thread takes, in blocks: so many (1.5 MiB of state) that taking a piece costs nothing, and so few that a
/// thread on a busy core hardly delays the others.
const PIECE_ELEMENTS: usize = 64 * BLOCK_ELEMENTS;

/// The instructions for which replay is compiled. All of them give the same values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuBackend {
    /// AVX-512F: x86-64-v4.
    Avx512,
    /// AVX2: x86-64-v3.
    Avx2,
    /// The target's own instructions, which every processor of it has: SSE2, or NEON on AArch64.
    Portable,
}

impl CpuBackend {
    /// Returns the widest instructions of this processor.
    #[must_use]
    pub fn fastest() -> Self {
        if dispatch::has_avx512() {
            Self::Avx512
        } else if dispatch::has_avx2() {
            Self::Avx2
        } else {
            Self::Portable
        }
    }

    /// Lists every back end that this processor can run: for tests and benches.
    #[must_use]
    pub fn all_here() -> Vec<Self> {
        let wide = [(Self::Avx512, dispatch::has_avx512()), (Self::Avx2, dispatch::has_avx2())];
        wide.into_iter()
            .filter_map(|(backend, here)| here.then_some(backend))
            .chain([Self::Portable])
            .collect()
    }

    /// Replays as [`replay`] does, with these instructions.
    ///
    /// # Errors
    /// As [`replay`].
    ///
    /// # Panics
    /// When this processor lacks them, which [`Self::all_here`] never lists.
    pub fn replay(
        self,
        state: &mut State<'_>,
        steps: &[GradientStep<'_>],
        threads: usize,
    ) -> Result<(), ReplayError> {
        let steps = checked(state, steps)?;
        let pieces = state.weights.len().div_ceil(PIECE_ELEMENTS);
        let helpers = threads.clamp(1, THREADS_MAX).min(pieces.max(1)) - 1;
        // A free thread takes the next piece, so slower threads take fewer.
        let pieces = Mutex::new(Pieces { rest: state.reborrow(), begin: 0 });
        let work = || {
            let mut scratch = vec![0.0; BLOCK_ELEMENTS];
            loop {
                let piece = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((begin, piece)) = piece else { return };
                self.piece(piece, begin, &steps, &mut scratch);
            }
        };
        thread::scope(|scope| {
            for _ in 0..helpers {
                // If the system refuses a thread, the others do its work.
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        Ok(())
    }

    /// Applies all steps to one block before the next block.
    fn piece(self, mut piece: State<'_>, begin: usize, steps: &[Applied<'_>], scratch: &mut [f32]) {
        let mut cursors: Vec<Cursor> =
            steps.iter().map(|(_, gradient)| Cursor::at(gradient, begin)).collect();
        let mut begin = begin;
        while !piece.weights.is_empty() {
            let mut block = piece.split_off(BLOCK_ELEMENTS);
            let elements = block.weights.len();
            for ((factors, gradient), cursor) in steps.iter().zip(&mut cursors) {
                let values = dispatch::values(self, gradient, begin, cursor, &mut scratch[..elements]);
                let values = values.unwrap_or(&scratch[..elements]);
                dispatch::update(self, factors, &mut block, values);
            }
            dispatch::copy(self, &mut block);
            begin += elements;
        }
    }
}

/// Applies `steps`, in order, to every element of `state`, and writes the half copy, with the widest instructions of this
/// processor.
///
/// Reads and writes the state once for all steps: 24 bytes of memory traffic per element, the gradients', and the half copy's. Uses the
/// calling thread and up to `threads - 1` more (at least 1, at most [`THREADS_MAX`] are used); all of these have ended when it returns. The
/// result does not depend on their number. Allocates 8 KiB per thread and a few words per step.
///
/// # Errors
/// [`ReplayError`] if something does not fit; nothing is changed then.
pub fn replay(state: &mut State<'_>, steps: &[GradientStep<'_>], threads: usize) -> Result<(), ReplayError> {
    CpuBackend::fastest().replay(state, steps, threads)
}

/// Pieces that no thread has taken yet.
struct Pieces<'a> {
    rest: State<'a>,
    /// The element of the range with which `rest` begins.
    begin: usize,
}

impl<'a> Iterator for Pieces<'a> {
    type Item = (usize, State<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.weights.is_empty() {
            return None;
        }
        let piece = self.rest.split_off(PIECE_ELEMENTS);
        let begin = self.begin;
        self.begin += piece.weights.len();
        Some((begin, piece))
    }
}

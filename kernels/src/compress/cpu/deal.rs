//! Pieces of work, dealt to threads.
//!
//! Owns: how many threads there are, and the order of the results. Does not own: the work.

use crate::replay::THREADS_MAX;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Returns the results of `work` for the pieces, in the order of the pieces. A free thread takes the next piece, so slower threads take
/// fewer. If the system refuses a thread, the others do its work.
pub(super) fn deal<T: Send, R: Send>(pieces: Vec<T>, threads: usize, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let helpers = threads.clamp(1, THREADS_MAX).min(pieces.len().max(1)) - 1;
    if helpers == 0 {
        return pieces.into_iter().map(work).collect();
    }
    let done = Mutex::new(Vec::with_capacity(pieces.len()));
    let rest = Mutex::new(pieces.into_iter().enumerate());
    let take = || {
        loop {
            let piece = rest.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((place, piece)) = piece else { return };
            let result = work(piece);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((place, result));
        }
    };
    thread::scope(|scope| {
        for _ in 0..helpers {
            let _ = thread::Builder::new().spawn_scoped(scope, take);
        }
        take();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|&(place, _)| place);
    done.into_iter().map(|(_, result)| result).collect()
}

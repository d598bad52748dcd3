//! Computes the checksums of a buffer's chunks, by several threads.
//!
//! Owns: how chunks are dealt to threads. Does not own: the checksum, or how chunk checksums make a file's
//! (the protocol crate combines them without touching a byte).

use super::crc64;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Most threads for one call. A single core already reads near the bandwidth that it can get. A few threads saturate a socket's memory, and
/// more would only take cores from the training job.
pub const THREADS_MAX: usize = 16;

/// Returns the [`crc64`] of each `chunk_bytes` of `bytes`; the last chunk may be shorter, and no bytes give no chunks.
///
/// Uses the calling thread and up to `threads - 1` more (at least 1, at most [`THREADS_MAX`] are used, and never more than there are
/// chunks); all of these have ended when it returns. If the system refuses a thread, the others do its work. Each thread calls `go_on`
/// before it hashes a chunk; the call may pause. Once `go_on` returns false nothing more is hashed, and there are no checksums. Allocates
/// eight bytes per chunk.
///
/// # Panics
/// When `chunk_bytes` is 0.
#[must_use]
pub fn hash_chunks(
    bytes: &[u8],
    chunk_bytes: usize,
    threads: usize,
    go_on: impl Fn() -> bool + Sync,
) -> Option<Vec<u64>> {
    let chunk_bytes = NonZeroUsize::new(chunk_bytes).expect("a chunk has at least one byte").get();
    let count = bytes.len().div_ceil(chunk_bytes);
    let helpers = threads.clamp(1, THREADS_MAX).min(count.max(1)) - 1;
    if helpers == 0 {
        let hash = |chunk| go_on().then(|| crc64(chunk));
        return bytes.chunks(chunk_bytes).map(hash).collect();
    }

    // Chunks are taken one at a time, in order: slower threads (a busy core, memory of another NUMA node) take fewer, and chunks that are
    // read together lie together.
    let next = AtomicUsize::new(0);
    let take = || {
        let mut taken = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count || !go_on() {
                return taken;
            }
            let from = index * chunk_bytes;
            let to = from.saturating_add(chunk_bytes).min(bytes.len());
            taken.push((index, crc64(&bytes[from..to])));
        }
    };
    let mut checksums = vec![0; count];
    let mut hashed = 0;
    thread::scope(|scope| {
        let started: Vec<_> =
            (0..helpers).filter_map(|_| thread::Builder::new().spawn_scoped(scope, take).ok()).collect();
        let mut store = |taken: Vec<(usize, u64)>| {
            hashed += taken.len();
            for (index, checksum) in taken {
                checksums[index] = checksum;
            }
        };
        store(take());
        for helper in started {
            store(helper.join().expect("hashing does not panic"));
        }
    });
    assert!(hashed <= count, "every chunk is hashed once at most");
    (hashed == count).then_some(checksums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_and_threads_do_not_change_the_checksums(
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            chunk_bytes in 1usize..700,
            threads in 0usize..6,
        ) {
            let expected: Vec<u64> = bytes.chunks(chunk_bytes).map(reference::crc64).collect();
            prop_assert_eq!(hash_chunks(&bytes, chunk_bytes, threads, || true), Some(expected));
        }
    }

    #[test]
    fn a_chunk_larger_than_the_buffer_is_the_buffer() {
        assert_eq!(hash_chunks(b"123456789", usize::MAX, 4, || true), Some(vec![0xae8b_1486_0a79_9888]));
        assert_eq!(hash_chunks(b"", 1, 4, || true), Some(Vec::new()));
    }

    #[test]
    fn there_is_a_question_before_each_chunk_and_none_after_the_last() {
        for threads in [1, 3] {
            let asked = AtomicUsize::new(0);
            let go_on = || asked.fetch_add(1, Ordering::Relaxed) < usize::MAX;
            assert_eq!(hash_chunks(&[7; 41], 10, threads, go_on).map(|sums| sums.len()), Some(5));
            assert_eq!(asked.into_inner(), 5, "{threads} threads");
        }
    }

    #[test]
    fn once_nobody_wants_them_there_are_no_checksums() {
        for threads in [1, 3] {
            let asked = AtomicUsize::new(0);
            let go_on = || asked.fetch_add(1, Ordering::Relaxed) < 2;
            assert_eq!(hash_chunks(&[7; 41], 10, threads, go_on), None, "{threads} threads");
            assert!(asked.into_inner() <= 2 + threads, "each thread stops at its next chunk");
        }
    }
}

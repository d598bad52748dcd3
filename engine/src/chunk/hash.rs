//! Hashes a closed file's bytes from the pages themselves.
//!
//! Owns: how the hashing is spread over cores. Does not own: when a file may be sealed (the namespace), the meaning
//! of a seal (protocol).

use std::sync::Arc;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::layout::CHUNK_BYTES;

/// The checksums of a seal: per chunk, and of the whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealSums {
    pub crc: Crc64,
    pub chunks: Arc<[Crc64]>,
}

/// Fewest chunks for each thread: for fewer, starting another thread costs more than it saves.
const CHUNKS_PER_THREAD_MIN: usize = 4;

/// Hashes `bytes`, one CRC-64/NVME per chunk, on at most `threads` threads.
///
/// Costs one pass over the bytes; the whole-file checksum is combined from the chunks', not read again.
#[must_use]
pub fn hash(bytes: &[u8], threads: usize) -> SealSums {
    hash_while(bytes, threads, || true).expect("nobody stops it")
}

/// Does as [`hash`]; each thread calls `go_on`, which may pause, before it hashes a chunk. Returns none once that was false.
#[must_use]
pub(crate) fn hash_while(bytes: &[u8], threads: usize, go_on: impl Fn() -> bool + Sync) -> Option<SealSums> {
    let chunk_bytes = usize::try_from(CHUNK_BYTES).expect("a chunk fits an address space");
    let count = bytes.len().div_ceil(chunk_bytes);
    let threads = threads.min(count / CHUNKS_PER_THREAD_MIN).max(1);
    let sums = tidemark_kernels::hash_chunks(bytes, chunk_bytes, threads, go_on)?;
    let chunks: Vec<Crc64> = sums.into_iter().map(Crc64).collect();
    let size_bytes = u64::try_from(bytes.len()).expect("a length fits 64 bits");
    let crc = Crc64::combine_all(&chunks, size_bytes).expect("these are the chunks of this many bytes");
    Some(SealSums { crc, chunks: chunks.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_do_not_change_the_checksum() {
        let chunk = usize::try_from(CHUNK_BYTES).unwrap();
        let bytes: Vec<u8> = (0..9 * chunk + 17).map(|i| u8::try_from(i * 31 % 251).unwrap()).collect();
        let one = hash(&bytes, 1);
        assert_eq!(one, hash(&bytes, 2));
        assert_eq!(one.chunks.len(), 10);
        assert_eq!(one.crc, Crc64(tidemark_kernels::crc64(&bytes)));
    }

    #[test]
    fn an_empty_file_has_no_chunks_and_the_checksum_of_nothing() {
        let sums = hash(&[], 2);
        assert!(sums.chunks.is_empty());
        assert_eq!(sums.crc, Crc64(tidemark_kernels::crc64(&[])));
    }
}

//! Chunk geometry: how a file's bytes are cut for checksums, transfers and repair.
//!
//! Owns: chunk sizes and ranges. Does not own: the checksums of chunks (`checksum`, `manifest`).

use std::ops::Range;

/// Bytes in every chunk but the last. Large enough that one request to an object store is amortised, small
/// enough that one bad chunk is fetched again quickly.
pub const CHUNK_BYTES: u64 = 8 << 20;

const _: () = assert!(CHUNK_BYTES >= 5 << 20, "S3 refuses parts under 5 MiB, and one chunk may be one part");
const _: () = assert!(CHUNK_BYTES.is_multiple_of(2 << 20), "chunks are whole 2 MiB pages");

/// Returns how many chunks `size_bytes` make. An empty file has none.
#[must_use]
pub fn chunk_count(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(CHUNK_BYTES)
}

/// Returns the byte range of chunk `index`. Panics if the file of `size_bytes` has no such chunk.
#[must_use]
pub fn chunk_range(size_bytes: u64, index: u64) -> Range<u64> {
    assert!(index < chunk_count(size_bytes), "chunk {index} of a file of {size_bytes} bytes");
    let start = index * CHUNK_BYTES;
    start..size_bytes.min(start + CHUNK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_file_without_overlap() {
        for size in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES] {
            let mut end = 0;
            for index in 0..chunk_count(size) {
                let range = chunk_range(size, index);
                assert_eq!(range.start, end);
                assert!(range.end > range.start);
                end = range.end;
            }
            assert_eq!(end, size);
        }
    }
}

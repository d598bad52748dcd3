//! The places of a file's chunks in its object, as they are or encoded.
//!
//! Owns: the description of encoded chunks in a manifest, its bounds, and the range of each chunk. Does not own: the bytes of
//! an encoded chunk (the kernels crate), which files are encoded (the engine).

use crate::format::Flaw;
use crate::layout::{chunk_count, chunk_range};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Maximum number of bytes that an encoded chunk has beyond the chunk itself: the byte that names its encoding.
pub const ENCODED_OVERHEAD_BYTES: u64 = 1;

/// The codec that made the chunks of a file smaller. Each chunk's first byte names the encoding of that chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    Zstd,
    Planes,
}

/// An object that holds encoded chunks, one after the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Encoding {
    pub codec: Codec,
    /// Bytes of each encoded chunk. The sum is the object's size.
    pub lengths: Vec<u32>,
}

impl Encoding {
    /// Checks the encoding of a file of `size_bytes`: a length for each chunk, none of them zero, none longer than the chunk
    /// and its first byte. A reader of a chunk therefore knows how much memory it takes before asking for it.
    ///
    /// # Errors
    /// The first violation; `path` is used in its message.
    pub fn check(&self, path: &dyn std::fmt::Display, size_bytes: u64) -> Result<(), Flaw> {
        let (found, expected) = (self.lengths.len() as u64, chunk_count(size_bytes));
        if found != expected {
            return Err(Flaw::EncodedCount { path: path.to_string(), size_bytes, found, expected });
        }
        for (chunk, length) in (0..).zip(&self.lengths) {
            let range = chunk_range(size_bytes, chunk);
            let limit = range.end - range.start + ENCODED_OVERHEAD_BYTES;
            if *length == 0 || u64::from(*length) > limit {
                let path = path.to_string();
                return Err(Flaw::EncodedLength { path, chunk, found: (*length).into(), limit });
            }
        }
        Ok(())
    }

    /// Returns the object's size. Cannot overflow once the encoding is checked: a file's size does not.
    #[must_use]
    pub fn object_bytes(&self) -> u64 {
        self.lengths.iter().fold(0, |sum, length| sum.saturating_add((*length).into()))
    }
}

/// The place of each chunk of a file in its object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectLayout {
    file_bytes: u64,
    /// The end of each encoded chunk; none if the object is the file.
    ends: Option<Vec<u64>>,
}

impl ObjectLayout {
    /// Makes the layout of an object that is the file's bytes as they are.
    #[must_use]
    pub fn plain(file_bytes: u64) -> Self {
        Self { file_bytes, ends: None }
    }

    /// Makes the layout for a file of `file_bytes` with an encoding that was checked against it. Costs 8 bytes for each
    /// encoded chunk.
    #[must_use]
    pub fn new(file_bytes: u64, encoding: Option<&Encoding>) -> Self {
        let ends = encoding.map(|encoding| {
            let mut end = 0_u64;
            let ends = encoding.lengths.iter().map(|length| {
                end = end.saturating_add((*length).into());
                end
            });
            ends.collect()
        });
        Self { file_bytes, ends }
    }

    #[must_use]
    pub fn is_encoded(&self) -> bool {
        self.ends.is_some()
    }

    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.ends.as_ref().map_or_else(|| chunk_count(self.file_bytes), |ends| ends.len() as u64)
    }

    #[must_use]
    pub fn object_bytes(&self) -> u64 {
        self.ends.as_ref().map_or(self.file_bytes, |ends| ends.last().copied().unwrap_or(0))
    }

    /// Returns the chunk's range in the file.
    ///
    /// Panics when the file has no such chunk.
    #[must_use]
    pub fn file_range(&self, chunk: u64) -> Range<u64> {
        chunk_range(self.file_bytes, chunk)
    }

    /// Returns the chunk's range in the object.
    ///
    /// Panics when the file has no such chunk.
    #[must_use]
    pub fn object_range(&self, chunk: u64) -> Range<u64> {
        let Some(ends) = &self.ends else { return self.file_range(chunk) };
        let index = usize::try_from(chunk).expect("a chunk index fits an address space");
        let start = index.checked_sub(1).map_or(0, |before| ends[before]);
        start..ends[index]
    }

    /// Returns the chunk in which the object's byte at `offset` lies, for an offset inside the object.
    #[must_use]
    pub fn chunk_at(&self, offset: u64) -> u64 {
        match &self.ends {
            Some(ends) => ends.partition_point(|end| *end <= offset) as u64,
            None => offset / crate::layout::CHUNK_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::CHUNK_BYTES;
    use proptest::prelude::*;

    fn encoding(lengths: &[u32]) -> Encoding {
        Encoding { codec: Codec::Planes, lengths: lengths.to_vec() }
    }

    #[test]
    fn lengths_that_are_missing_zero_or_beyond_the_chunk_are_refused() {
        let size = CHUNK_BYTES + 10;
        let whole = u32::try_from(CHUNK_BYTES + 1).unwrap();
        let check = |lengths: &[u32]| encoding(lengths).check(&"r/x", size);
        assert_eq!(check(&[whole, 11]), Ok(()));
        assert!(matches!(check(&[whole]), Err(Flaw::EncodedCount { found: 1, expected: 2, .. })));
        assert!(matches!(check(&[1, 1, 1]), Err(Flaw::EncodedCount { found: 3, expected: 2, .. })));
        assert!(matches!(check(&[0, 11]), Err(Flaw::EncodedLength { chunk: 0, found: 0, .. })));
        assert!(matches!(check(&[whole + 1, 11]), Err(Flaw::EncodedLength { chunk: 0, .. })));
        assert!(matches!(
            check(&[whole, 12]),
            Err(Flaw::EncodedLength { chunk: 1, found: 12, limit: 11, .. })
        ));
        assert!(matches!(check(&[u32::MAX; 2]), Err(Flaw::EncodedLength { .. })));
        assert_eq!(encoding(&[]).check(&"r/x", 0), Ok(()));
    }

    proptest! {
        #[test]
        fn encoded_chunks_cover_the_object_once(lengths in prop::collection::vec(1..1000_u32, 1..20), plain: bool) {
            let file_bytes = lengths.len() as u64 * CHUNK_BYTES - 7;
            let encoding = encoding(&lengths);
            let layout = ObjectLayout::new(file_bytes, (!plain).then_some(&encoding));
            prop_assert_eq!(layout.object_bytes(), if plain { file_bytes } else { encoding.object_bytes() });
            let mut end = 0;
            for chunk in 0..layout.chunks() {
                let range = layout.object_range(chunk);
                prop_assert_eq!(range.start, end);
                prop_assert_eq!((layout.chunk_at(range.start), layout.chunk_at(range.end - 1)), (chunk, chunk));
                end = range.end;
            }
            prop_assert_eq!(end, layout.object_bytes());
        }
    }
}

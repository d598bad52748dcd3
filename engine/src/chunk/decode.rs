//! Decodes a chunk from Tier-3 to the chunk of the file.
//!
//! Owns: that decoding takes memory by the chunk's length alone. Does not own: where a chunk lies (`protocol::encoding`), that
//! it is the right one: each reader compares the checksum.

use bytes::Bytes;
use tidemark_kernels::encoding::{DecodeError, Decoder};
use tidemark_protocol::encoding::ObjectLayout;
use tidemark_protocol::layout::CHUNK_BYTES;

/// Returns the bytes of chunk `number` in the file, from the bytes of its range in the object; no copy if they are the same.
/// Keeps a core busy for milliseconds.
///
/// # Errors
/// The bytes are no encoded chunk of this length.
pub(crate) fn stored(layout: &ObjectLayout, number: u64, bytes: Bytes) -> Result<Bytes, DecodeError> {
    if !layout.is_encoded() {
        return Ok(bytes);
    }
    let range = layout.file_range(number);
    let length = usize::try_from(range.end - range.start).expect("a chunk fits an address space");
    chunk(&bytes, length).map(Bytes::from)
}

/// Decodes a chunk to its `plain_bytes` bytes.
///
/// # Errors
/// As [`stored`].
pub(crate) fn chunk(encoded: &[u8], plain_bytes: usize) -> Result<Vec<u8>, DecodeError> {
    assert!(plain_bytes as u64 <= CHUNK_BYTES, "{plain_bytes} bytes are more than a chunk");
    let mut plain = vec![0; plain_bytes];
    let mut decoder = Decoder::new().map_err(|error| DecodeError::Frame(error.to_string()))?;
    decoder.decode(encoded, &mut plain)?;
    Ok(plain)
}

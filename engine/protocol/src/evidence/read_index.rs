//! Reads the index of any framework.
//!
//! Owns: the choice of the reader for a kind. Does not own: the bounds (`index`), the formats (beside
//! this file).

use super::index::{Covered, IndexError, MAX_INDEX_BYTES};
use super::{dcp_metadata, megatron_integrity, safetensors_index};
use crate::recognise::IndexKind;

/// Reads a framework's index.
///
/// # Errors
/// [`IndexError`]; such an index proves nothing, and the checkpoint waits for other evidence.
pub fn parse_index(kind: IndexKind, bytes: &[u8]) -> Result<Covered, IndexError> {
    if bytes.len() > MAX_INDEX_BYTES {
        return Err(IndexError::TooLarge { bytes: bytes.len() });
    }
    match kind {
        IndexKind::Dcp => dcp_metadata::parse(bytes),
        IndexKind::Safetensors => safetensors_index::parse(bytes),
        IndexKind::Megatron => megatron_integrity::parse(bytes),
    }
}

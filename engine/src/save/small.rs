//! Uploading small files: each is read whole and sent in one piece.
//!
//! Owns: reading and sending a file that one request carries. Does not own: keys, retries, larger files (`upload`).
//!
//! A large file is mapped, and holds permits for its parts, whose number bounds memory. Neither pays for 4 KiB: 100,000 such
//! files would go eight at a time, although the store's file system could make many durable at once.

use crate::chunk::bytes::read_all;
use crate::save::drain::Drain;
use crate::save::upload::{SealedBytes, UploadError, arrived};
use bytes::Bytes;
use std::sync::Arc;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::encoding::ObjectLayout;
use tokio::time::Instant;

/// Largest size of a small file. The loop has at most 128 loose files on their way, so these take 32 MiB at most.
pub(crate) const SMALL_BYTES: u64 = 256 << 10;

/// Uploads one file to `key` and returns the store's etag. Reads the file back if the store checks no parts.
pub(crate) async fn upload(
    drain: &Arc<Drain>,
    key: &str,
    file: &SealedBytes,
) -> Result<Option<String>, UploadError> {
    let size_bytes = file.pin.size_bytes;
    assert!(size_bytes <= SMALL_BYTES, "{size_bytes} bytes are not small");
    drain.paced(size_bytes).await;
    let begun = Instant::now();
    let bytes = read_all(&file.pin.backing, size_bytes)
        .map_err(|source| UploadError::Read { path: file.path.clone(), source })?;
    // A small file has one chunk, or none if it is empty.
    if let (Some(&expected), found) = (file.chunks.first(), Crc64(tidemark_kernels::crc64(&bytes)))
        && found != expected
    {
        return Err(UploadError::HostCorrupt { path: file.path.clone(), chunk: 0, expected, found });
    }
    let failed = |source| UploadError::Store { path: file.path.clone(), key: key.to_owned(), source };
    let source = Arc::new((Bytes::from(bytes), file.pin.readers));
    let uploaded = drain.store.upload(key, source, &drain.limits).await.map_err(failed)?;
    arrived(drain, key, (&file.path, &ObjectLayout::plain(size_bytes), &file.chunks), begun, uploaded).await
}

//! Brings sealed bytes from Tier-1 to Tier-3, each chunk checked against its seal before it leaves.
//!
//! Owns: reading and checking parts, how many are on their way, the read-back if the store checks no parts.
//! Does not own: keys (protocol), markers (commit), retry of a whole attempt (the node loop).

use crate::chunk::decode;
use crate::flight::Place;
use crate::save::drain::Drain;
use bytes::Bytes;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use tidemark_kernels::encoding::DecodeError;
use tidemark_namespace::SealPin;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::encoding::ObjectLayout;
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::file::Readers;
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_store::{PartSource, StoreError, UploadLimits, Uploaded};
use tidemark_tier1::Mapping;
use tokio::time::Instant;

/// A sealed file on its way; the pin keeps its bytes as they are.
#[derive(Debug)]
pub struct SealedBytes {
    /// The file's path for people, in messages.
    pub path: String,
    pub pin: Arc<SealPin>,
    pub chunks: Arc<[Crc64]>,
}

/// Why a file is not in Tier-3.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    #[error("{path} cannot be read from Tier-1")]
    Read { path: String, source: io::Error },
    #[error("{path} was removed, and its memory was needed before it was in Tier-3; save it again")]
    Removed { path: String },
    #[error(
        "chunk {chunk} of {path} changed in host memory after it was sealed: checksum {found}, expected {expected}; \
         it is not uploaded; save it again"
    )]
    HostCorrupt { path: String, chunk: u64, expected: Crc64, found: Crc64 },
    #[error("{path} changed while it was read; it is read again")]
    Changed { path: String },
    #[error("{path} was not encoded")]
    Encode { path: String, source: io::Error },
    #[error("{path} did not reach {key}")]
    Store { path: String, key: String, source: StoreError },
    #[error("{key} holds {found} bytes after its upload, expected {expected}; it is not prepared")]
    Size { key: String, expected: u64, found: u64 },
    #[error(
        "chunk {chunk} of {key} reads back with checksum {found}, expected {expected}; it is not prepared"
    )]
    ReadBack { key: String, chunk: u64, expected: Crc64, found: Crc64 },
    #[error("chunk {chunk} of {key} reads back as no encoded chunk; it is not prepared")]
    ReadBackEncoded { key: String, chunk: u64, source: DecodeError },
}

impl UploadError {
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Read { .. } | Self::Changed { .. } | Self::Encode { .. } => ErrorKind::Unavailable,
            Self::Removed { .. } => ErrorKind::NotFound,
            Self::HostCorrupt { .. } => ErrorKind::Corrupt,
            // Bytes that were read back and came damaged are included.
            Self::Store { source: StoreError::Damaged { .. }, .. } => ErrorKind::Unavailable,
            Self::Store { source, .. } => source.kind(),
            // The store has other bytes than were sent; sending them again helps.
            Self::Size { .. } | Self::ReadBack { .. } | Self::ReadBackEncoded { .. } => {
                ErrorKind::Unavailable
            }
        }
    }
}

/// Uploads one file to `key` and returns the store's etag.
///
/// Costs one pass of hashing over the bytes, no copy of them, and at most the drain's parts in flight. Waits for
/// the pace. If the store checks no parts, every byte is read back and hashed before this returns.
pub async fn upload(
    drain: &Arc<Drain>,
    key: &str,
    bytes: SealedBytes,
) -> Result<Option<String>, UploadError> {
    let layout = ObjectLayout::plain(bytes.pin.size_bytes);
    let (path, chunks) = (bytes.path.clone(), Arc::clone(&bytes.chunks));
    let source = source(drain, bytes)?;
    send(drain, key, source, (&path, &layout, &chunks)).await
}

/// Makes a source of a sealed file's plain bytes, which checks each chunk as it is read.
pub(crate) fn source(drain: &Arc<Drain>, bytes: SealedBytes) -> Result<Arc<dyn PartSource>, UploadError> {
    let mapping = map(&bytes)?;
    Ok(Arc::new(SealedSource { drain: Arc::clone(drain), bytes, mapping }))
}

/// Does `work` on the bytes of a pin as long as they are wanted. If `work` is dropped halfway, the store aborts its upload.
pub(crate) async fn while_wanted<R>(
    pin: &SealPin,
    path: &str,
    work: impl Future<Output = Result<R, UploadError>>,
) -> Result<R, UploadError> {
    tokio::select! {
        biased;
        () = pin.abandoned() => Err(UploadError::Removed { path: path.to_owned() }),
        done = work => done,
    }
}

/// Maps the pages of a sealed file.
pub(crate) fn map(bytes: &SealedBytes) -> Result<Arc<Mapping>, UploadError> {
    let failed = |source| UploadError::Read { path: bytes.path.clone(), source };
    let mapping = bytes.pin.backing.map().map_err(failed)?;
    let mapped = u64::try_from(mapping.len()).expect("a length fits 64 bits");
    assert_eq!(mapped, bytes.pin.size_bytes, "a pinned seal keeps its size");
    Ok(Arc::new(mapping))
}

/// Uploads the bytes of `source`, as many parts at a time as the drain permits. Reads them back if the store checks no parts.
pub(crate) async fn send(
    drain: &Arc<Drain>,
    key: &str,
    source: Arc<dyn PartSource>,
    (path, layout, chunks): (&str, &ObjectLayout, &[Crc64]),
) -> Result<Option<String>, UploadError> {
    let parts = layout.object_bytes().div_ceil(drain.limits.part_bytes);
    let permits = drain.parts(usize::try_from(parts).unwrap_or(usize::MAX)).await;
    let limits = UploadLimits { parts_in_flight: permits.num_permits(), ..drain.limits };
    let begun = Instant::now();
    let _in_flight = InFlight::new(drain, permits.num_permits());
    let result = drain.store.upload(key, source, &limits).await;
    drain
        .metrics
        .upload_window_parts
        .set(i64::try_from(drain.flight.window()).expect("settings allow at most 256"));
    let uploaded = result.inspect_err(|_| drain.flight.disturbed()).map_err(|error| {
        let corrupt = match &error {
            StoreError::Source { source, .. } => corrupt_chunk(path, source),
            _ => None,
        };
        corrupt.unwrap_or_else(|| UploadError::Store {
            path: path.to_owned(),
            key: key.to_owned(),
            source: error,
        })
    })?;
    arrived(drain, key, (path, layout, chunks), begun, uploaded).await
}

/// Counts an upload that the store accepted, checks its size, and reads it back if the store checks no parts. Returns the
/// store's etag.
pub(crate) async fn arrived(
    drain: &Drain,
    key: &str,
    (path, layout, chunks): (&str, &ObjectLayout, &[Crc64]),
    begun: Instant,
    uploaded: Uploaded,
) -> Result<Option<String>, UploadError> {
    let object_bytes = layout.object_bytes();
    drain.metrics.upload_bytes.inc_by(object_bytes);
    drain.metrics.upload_files.inc();
    drain.metrics.upload_seconds.observe(begun.elapsed().as_secs_f64());
    if uploaded.size_bytes != object_bytes {
        let key = key.to_owned();
        return Err(UploadError::Size { key, expected: object_bytes, found: uploaded.size_bytes });
    }
    if !drain.part_checksums() {
        read_back(drain, key, path, layout, chunks).await?;
    }
    Ok(uploaded.etag)
}

/// A count of parts on their way, taken back when this is dropped, however the upload ends.
pub(crate) struct InFlight<'a> {
    drain: &'a Drain,
    parts: i64,
}

impl<'a> InFlight<'a> {
    pub(crate) fn new(drain: &'a Drain, parts: usize) -> Self {
        let parts = i64::try_from(parts).expect("settings allow at most 256");
        drain.metrics.upload_parts_in_flight.inc_by(parts);
        Self { drain, parts }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.drain.metrics.upload_parts_in_flight.dec_by(self.parts);
    }
}

async fn read_back(
    drain: &Drain,
    key: &str,
    path: &str,
    layout: &ObjectLayout,
    chunks: &[Crc64],
) -> Result<(), UploadError> {
    let layout = Arc::new(layout.clone());
    for chunk in 0..layout.chunks() {
        let bytes =
            drain.store.get_range(key, layout.object_range(chunk)).await.map_err(|source| {
                UploadError::Store { path: path.to_owned(), key: key.to_owned(), source }
            })?;
        let layout = Arc::clone(&layout);
        let found = tokio::task::spawn_blocking(move || {
            decode::stored(&layout, chunk, bytes).map(|bytes| Crc64(tidemark_kernels::crc64(&bytes)))
        })
        .await
        .expect("hashing does not panic")
        .map_err(|source| UploadError::ReadBackEncoded { key: key.to_owned(), chunk, source })?;
        let expected = chunks[usize::try_from(chunk).expect("a chunk index fits an address space")];
        if found != expected {
            return Err(UploadError::ReadBack { key: key.to_owned(), chunk, expected, found });
        }
    }
    Ok(())
}

/// The pages of a sealed file as an upload's source.
struct SealedSource {
    drain: Arc<Drain>,
    bytes: SealedBytes,
    mapping: Arc<Mapping>,
}

/// A chunk that differs from its seal, carried as the source of the store's error.
#[derive(Debug, Clone, thiserror::Error)]
#[error("chunk {chunk} has checksum {found}, sealed as {expected}")]
struct ChangedChunk {
    chunk: u64,
    expected: Crc64,
    found: Crc64,
}

/// Returns the corruption of host memory that made a source fail; none if the source failed otherwise.
pub(crate) fn corrupt_chunk(path: &str, error: &io::Error) -> Option<UploadError> {
    let ChangedChunk { chunk, expected, found } = error.get_ref()?.downcast_ref::<ChangedChunk>()?.clone();
    Some(UploadError::HostCorrupt { path: path.to_owned(), chunk, expected, found })
}

/// Refuses a chunk whose checksum differs from its seal.
pub(crate) fn check_chunk(chunks: &[Crc64], chunk: u64, bytes: &[u8]) -> io::Result<()> {
    let expected = chunks[usize::try_from(chunk).map_err(io::Error::other)?];
    let found = Crc64(tidemark_kernels::crc64(bytes));
    if found == expected {
        return Ok(());
    }
    Err(io::Error::other(ChangedChunk { chunk, expected, found }))
}

impl PartSource for SealedSource {
    fn size_bytes(&self) -> u64 {
        self.bytes.pin.size_bytes
    }

    fn readers(&self) -> Readers {
        self.bytes.pin.readers
    }

    fn read_part(&self, range: Range<u64>) -> io::Result<Bytes> {
        self.drain.wait_for_pace(range.end - range.start);
        let index = |offset: u64| usize::try_from(offset).map_err(io::Error::other);
        let place = self.drain.flight.begin_blocking(range.end - range.start);
        let mapping = Arc::clone(&self.mapping);
        let slice = Slice { mapping, start: index(range.start)?, end: index(range.end)?, _place: place };
        // Parts are whole chunks (settings), so each chunk is checked exactly once, just before it leaves.
        assert!(range.start.is_multiple_of(CHUNK_BYTES), "a part begins with a chunk");
        let first = range.start / CHUNK_BYTES;
        let chunk_bytes = index(CHUNK_BYTES)?;
        for (chunk, bytes) in (first..).zip(slice.as_ref().chunks(chunk_bytes)) {
            check_chunk(&self.bytes.chunks, chunk, bytes)?;
        }
        Ok(Bytes::from_owner(slice))
    }
}

/// A part of a mapping, handed to the store without a copy.
struct Slice {
    mapping: Arc<Mapping>,
    start: usize,
    end: usize,
    /// Place of the part, which is on its way as long as the store holds its bytes.
    _place: Place,
}

impl AsRef<[u8]> for Slice {
    fn as_ref(&self) -> &[u8] {
        &self.mapping[self.start..self.end]
    }
}

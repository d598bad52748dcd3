//! Brings the bytes of a file to Tier-3 from some offset on, even if a program may write them meanwhile.
//!
//! Owns: that exactly the bytes with these checksums are sent, or nothing. Does not own: which bytes Tier-3 has already
//! (`loose`), keys, retries.
//!
//! A sealed file is sent from its mapping. Here each part is copied before it is hashed, because mapped bytes may change
//! between hashing and sending.

use crate::flight::Place;
use crate::save::drain::Drain;
use crate::save::small::SMALL_BYTES;
use crate::save::upload::{InFlight, UploadError};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::file::Readers;
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_store::{PartSource, StoreError, UploadLimits};
use tidemark_tier1::Backing;
use tokio::time::Instant;

/// Maximum number of parts of one such file on their way: each is a copy outside the memory of Tier-1.
const PARTS_IN_FLIGHT: usize = 2;

/// The bytes to send: `range` of a file. `head` is the checksum of the bytes before `range` in its first chunk.
#[derive(Debug, Clone)]
pub(crate) struct Reading {
    /// The file's path for people, in messages.
    pub(crate) path: String,
    pub(crate) backing: Arc<Backing>,
    pub(crate) range: Range<u64>,
    pub(crate) head: Crc64,
    pub(crate) readers: Readers,
}

/// The result of an upload.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) etag: Option<String>,
    /// The checksums of the file's chunks, from the first chunk that Tier-3 did not have whole.
    pub(crate) chunks: Vec<Crc64>,
}

/// Uploads the bytes of `reading`, at least one, to `key`.
///
/// Costs a copy of two parts. If the store checks no parts, every byte is read back and hashed before this returns.
pub(crate) async fn upload(drain: &Arc<Drain>, key: &str, reading: Reading) -> Result<Sent, UploadError> {
    let Reading { path, backing, range, head, readers } = reading;
    let size_bytes = range.end - range.start;
    let source = Arc::new(Source {
        drain: Arc::clone(drain),
        backing,
        range: range.clone(),
        readers,
        pieces: Mutex::default(),
    });
    let parts = usize::try_from(size_bytes.div_ceil(drain.limits.part_bytes)).unwrap_or(usize::MAX);
    // A small upload takes no permit, because a permit for so little would only make larger ones wait.
    let permits = match size_bytes > SMALL_BYTES {
        true => Some(drain.parts(parts.min(PARTS_IN_FLIGHT)).await),
        false => None,
    };
    let parts_in_flight = permits.as_ref().map_or(1, tokio::sync::OwnedSemaphorePermit::num_permits);
    let limits = UploadLimits { parts_in_flight, ..drain.limits };
    let begun = Instant::now();
    let in_flight = InFlight::new(drain, parts_in_flight);
    let sent = drain.store.upload(key, Arc::clone(&source) as Arc<dyn PartSource>, &limits).await;
    drop(in_flight);
    let uploaded = sent.inspect_err(|_| drain.flight.disturbed()).map_err(|error| match &error {
        StoreError::Source { source, .. } if is_change(source) => UploadError::Changed { path: path.clone() },
        _ => UploadError::Store { path: path.clone(), key: key.to_owned(), source: error },
    })?;
    drain.metrics.upload_bytes.inc_by(size_bytes);
    drain.metrics.upload_files.inc();
    drain.metrics.upload_seconds.observe(begun.elapsed().as_secs_f64());
    if uploaded.size_bytes != size_bytes {
        let (key, found) = (key.to_owned(), uploaded.size_bytes);
        return Err(UploadError::Size { key, expected: size_bytes, found });
    }
    let pieces = std::mem::take(&mut *source.pieces());
    if !drain.part_checksums() {
        read_back(drain, key, &path, range.start, &pieces).await?;
    }
    let chunks = chunks(head, &range, &pieces).ok_or(UploadError::Changed { path })?;
    Ok(Sent { etag: uploaded.etag, chunks })
}

/// Checksums with their lengths, by the offset of their bytes in the file. No piece lies in two chunks.
type Pieces = BTreeMap<u64, (u64, Crc64)>;

struct Source {
    drain: Arc<Drain>,
    backing: Arc<Backing>,
    range: Range<u64>,
    readers: Readers,
    pieces: Mutex<Pieces>,
}

impl Source {
    fn pieces(&self) -> std::sync::MutexGuard<'_, Pieces> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The bytes were read twice and are not the same.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("it changed while it was read")]
struct Changed;

fn is_change(error: &io::Error) -> bool {
    // A file that ends early was made shorter.
    error.kind() == io::ErrorKind::UnexpectedEof || error.get_ref().is_some_and(|inner| inner.is::<Changed>())
}

impl PartSource for Source {
    fn size_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn read_part(&self, range: Range<u64>) -> io::Result<Bytes> {
        let len_bytes = range.end - range.start;
        self.drain.wait_for_pace(len_bytes);
        let place = self.drain.flight.begin_blocking(len_bytes);
        let mut bytes = vec![0; usize::try_from(len_bytes).map_err(io::Error::other)?];
        let mut at = self.range.start + range.start;
        self.backing.read_exact_at(&mut bytes, at)?;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let in_chunk = usize::try_from(CHUNK_BYTES - at % CHUNK_BYTES).map_err(io::Error::other)?;
            let (piece, after) = rest.split_at(in_chunk.min(rest.len()));
            let read = (piece.len() as u64, Crc64(tidemark_kernels::crc64(piece)));
            if *self.pieces().entry(at).or_insert(read) != read {
                return Err(io::Error::other(Changed));
            }
            at += read.0;
            rest = after;
        }
        Ok(Bytes::from_owner(Part { bytes, _place: place }))
    }

    fn readers(&self) -> Readers {
        self.readers
    }
}

/// A part that was read, for as long as the store holds it.
struct Part {
    bytes: Vec<u8>,
    _place: Place,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Returns the checksums of the chunks of `range`, combined from `pieces`. The first chunk begins with the bytes of `head`.
/// `None` if a piece is missing.
fn chunks(head: Crc64, range: &Range<u64>, pieces: &Pieces) -> Option<Vec<Crc64>> {
    let mut chunks = Vec::new();
    let (mut at, mut sum) = (range.start, head);
    for (start, (len_bytes, piece)) in pieces {
        if *start != at {
            return None;
        }
        sum = sum.combine(*piece, *len_bytes);
        at += len_bytes;
        if at.is_multiple_of(CHUNK_BYTES) {
            chunks.push(std::mem::take(&mut sum));
        }
    }
    if !at.is_multiple_of(CHUNK_BYTES) {
        chunks.push(sum);
    }
    (at == range.end).then_some(chunks)
}

async fn read_back(
    drain: &Drain,
    key: &str,
    path: &str,
    from: u64,
    pieces: &Pieces,
) -> Result<(), UploadError> {
    for (start, (len_bytes, expected)) in pieces {
        let range = start - from..start - from + len_bytes;
        let bytes = drain.store.get_range(key, range).await.map_err(|source| UploadError::Store {
            path: path.to_owned(),
            key: key.to_owned(),
            source,
        })?;
        let found = tokio::task::spawn_blocking(move || Crc64(tidemark_kernels::crc64(&bytes)))
            .await
            .expect("hashing does not panic");
        if found != *expected {
            let (key, chunk) = (key.to_owned(), (start - from) / CHUNK_BYTES);
            return Err(UploadError::ReadBack { key, chunk, expected: *expected, found });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_the_checksums_of_the_chunks_they_lie_in() {
        let chunk = usize::try_from(CHUNK_BYTES).unwrap();
        let bytes: Vec<u8> = (0..2 * chunk + 100).map(|i| u8::try_from(i % 251).unwrap()).collect();
        let sum = |range: Range<usize>| Crc64(tidemark_kernels::crc64(&bytes[range]));
        let piece = |range: Range<usize>| (range.start as u64, (range.len() as u64, sum(range)));
        let from = 1000;
        let all = from as u64..bytes.len() as u64;
        let mut pieces: Pieces =
            [piece(from..5000), piece(5000..chunk), piece(chunk..2 * chunk), piece(2 * chunk..bytes.len())]
                .into();
        let expected = [sum(0..chunk), sum(chunk..2 * chunk), sum(2 * chunk..bytes.len())];
        assert_eq!(chunks(sum(0..from), &all, &pieces).unwrap(), expected);
        pieces.remove(&5000);
        assert_eq!(chunks(sum(0..from), &all, &pieces), None);
        assert_eq!(chunks(Crc64::default(), &(0..0), &Pieces::new()), Some(Vec::new()));
    }
}

//! Brings one file's bytes from Tier-3 into Tier-1, or into an ordinary file, several chunks at a time, each verified before it lands.
//!
//! Owns: the second try of a bad or failed chunk. Does not own: chunks in flight (`flight`),
//! which copy is read (`restorer`), waiting callers (the mount), whether the file becomes hot (the namespace).

use crate::chunk::decode;
use crate::flight::Flight;
use crate::metrics::Metrics;
use futures::stream::{self, StreamExt, TryStreamExt};
use std::sync::Arc;
use tidemark_kernels::encoding::DecodeError;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::encoding::ObjectLayout;
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::layout::chunk_count;
use tidemark_store::{Store, StoreError};
use tidemark_tier1::Backing;

/// Maximum number of tries for a chunk. A bit flipped on the wire is right the second time; a bit flipped at rest is not, and
/// a third try would only delay the next copy.
const TRIES_PER_CHUNK: u32 = 2;

/// A (file, seal) to fetch, with everything needed to verify it.
#[derive(Debug, Clone)]
pub struct FetchPlan {
    /// The file's path for people, in messages.
    pub path: String,
    pub key: String,
    pub size_bytes: u64,
    pub chunks: Arc<[Crc64]>,
    pub layout: ObjectLayout,
}

/// The destination of verified chunks.
pub trait Landing: Send + Sync + 'static {
    /// Writes as pwrite(2) does, and returns how many bytes were written.
    ///
    /// # Errors
    /// The errors of pwrite(2).
    fn write_at(&self, bytes: &[u8], offset: u64) -> std::io::Result<usize>;
}

impl Landing for Backing {
    fn write_at(&self, bytes: &[u8], offset: u64) -> std::io::Result<usize> {
        Self::write_at(self, bytes, offset)
    }
}

impl Landing for std::fs::File {
    fn write_at(&self, bytes: &[u8], offset: u64) -> std::io::Result<usize> {
        std::os::unix::fs::FileExt::write_at(self, bytes, offset)
    }
}

/// The reason why a file could not be brought in whole.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error(
        "chunk {chunk} of {path} ({key}) is corrupt in Tier-3: checksum {found}, expected {expected}; it is not \
         served; `ckptctl verify --deep` tells which copies are good"
    )]
    Corrupt { path: String, key: String, chunk: u64, expected: Crc64, found: Crc64 },
    #[error(
        "chunk {chunk} of {path} ({key}) has {found} bytes in Tier-3, expected {expected}; it is not served"
    )]
    Short { path: String, key: String, chunk: u64, expected: u64, found: u64 },
    #[error("chunk {chunk} of {path} ({key}) is corrupt in Tier-3; it is not served")]
    Encoded { path: String, key: String, chunk: u64, source: DecodeError },
    #[error("chunk {chunk} of {path} cannot be read from Tier-3")]
    Store { path: String, chunk: u64, source: StoreError },
    #[error("chunk {chunk} of {path} cannot be written on this node")]
    Write { path: String, chunk: u64, source: std::io::Error },
    #[error("{path} is described by {chunks} checksums, but {size_bytes} bytes have {expected} chunks")]
    Geometry { path: String, chunks: u64, size_bytes: u64, expected: u64 },
}

impl FetchError {
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Corrupt { .. } | Self::Encoded { .. } | Self::Short { .. } | Self::Geometry { .. } => {
                ErrorKind::Corrupt
            }
            Self::Store { source, .. } => source.kind(),
            // Writers take pages without asking, even pages that were promised to this file.
            Self::Write { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
                ErrorKind::NoSpace
            }
            Self::Write { .. } => ErrorKind::Unavailable,
        }
    }
}

/// Fetches the whole of `plan` into `landing`, which is empty, with as many chunks on their way as `flight` has places.
///
/// Costs a chunk of memory for each place and one write per byte. After an error nothing in `landing` may be served. If the
/// future is dropped, at most one chunk write for each place still finishes.
pub async fn fetch<L: Landing>(
    store: Arc<dyn Store>,
    plan: FetchPlan,
    landing: Arc<L>,
    flight: Arc<Flight>,
    metrics: Arc<Metrics>,
) -> Result<(), FetchError> {
    let expected = chunk_count(plan.size_bytes);
    let chunks = u64::try_from(plan.chunks.len()).expect("a count fits 64 bits");
    if chunks != expected || plan.layout.chunks() != expected {
        return Err(FetchError::Geometry { path: plan.path, chunks, size_bytes: plan.size_bytes, expected });
    }
    let plan = Arc::new(plan);
    stream::iter(0..expected)
        .map(|chunk| {
            fetch_chunk(
                Arc::clone(&store),
                Arc::clone(&plan),
                Arc::clone(&landing),
                chunk,
                Arc::clone(&flight),
                Arc::clone(&metrics),
            )
        })
        .buffer_unordered(flight.most())
        .try_for_each(|()| async { Ok(()) })
        .await
}

async fn fetch_chunk<L: Landing>(
    store: Arc<dyn Store>,
    plan: Arc<FetchPlan>,
    landing: Arc<L>,
    chunk: u64,
    flight: Arc<Flight>,
    metrics: Arc<Metrics>,
) -> Result<(), FetchError> {
    let range = plan.layout.object_range(chunk);
    let _place = flight.begin(range.end - range.start).await;
    metrics.fetch_window_chunks.set(i64::try_from(flight.window()).expect("settings allow at most 256"));
    let mut tries = 0;
    loop {
        tries += 1;
        let result = try_chunk(&store, &plan, &landing, chunk, &metrics).await;
        match result {
            // This node's memory refused the chunk: asking Tier-3 again would not help.
            Ok(()) | Err(FetchError::Write { .. }) => return result,
            Err(_) if tries < TRIES_PER_CHUNK => flight.disturbed(),
            Err(_) => return result,
        }
    }
}

async fn try_chunk<L: Landing>(
    store: &Arc<dyn Store>,
    plan: &Arc<FetchPlan>,
    landing: &Arc<L>,
    chunk: u64,
    metrics: &Arc<Metrics>,
) -> Result<(), FetchError> {
    let range = plan.layout.object_range(chunk);
    let bytes = store.get_range(&plan.key, range.clone()).await.map_err(|source| FetchError::Store {
        path: plan.path.clone(),
        chunk,
        source,
    })?;
    let found = u64::try_from(bytes.len()).expect("a length fits 64 bits");
    let expected = range.end - range.start;
    if found != expected {
        return Err(FetchError::Short {
            path: plan.path.clone(),
            key: plan.key.clone(),
            chunk,
            expected,
            found,
        });
    }
    let (plan, landing, metrics) = (Arc::clone(plan), Arc::clone(landing), Arc::clone(metrics));
    // Hashing and the copy into Tier-1 keep a core busy for milliseconds: not on a runtime thread.
    tokio::task::spawn_blocking(move || {
        let bytes = decode::stored(&plan.layout, chunk, bytes).map_err(|source| {
            metrics.verify_mismatches.get_or_create(&[("copy", "object")]).inc();
            let (path, key) = (plan.path.clone(), plan.key.clone());
            FetchError::Encoded { path, key, chunk, source }
        })?;
        let index = usize::try_from(chunk).expect("a chunk index fits an address space");
        let (expected, found) = (plan.chunks[index], Crc64(tidemark_kernels::crc64(&bytes)));
        if found != expected {
            metrics.verify_mismatches.get_or_create(&[("copy", "object")]).inc();
            return Err(FetchError::Corrupt {
                path: plan.path.clone(),
                key: plan.key.clone(),
                chunk,
                expected,
                found,
            });
        }
        metrics.fetch_bytes.inc_by(u64::try_from(bytes.len()).expect("a length fits 64 bits"));
        write_all(landing.as_ref(), &bytes, plan.layout.file_range(chunk).start)
            .map_err(|source| FetchError::Write { path: plan.path.clone(), chunk, source })
    })
    .await
    .expect("verifying a chunk does not panic")
}

fn write_all<L: Landing>(landing: &L, mut bytes: &[u8], mut offset: u64) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let written = landing.write_at(bytes, offset)?;
        if written == 0 {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[written..];
        offset += u64::try_from(written).expect("a length fits 64 bits");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_memory_is_no_damage() {
        let refused =
            |source: std::io::Error| FetchError::Write { path: "a".into(), chunk: 0, source }.kind();
        // The kernel's error, and Tier-1's own.
        assert_eq!(refused(rustix::io::Errno::NOSPC.into()), ErrorKind::NoSpace);
        assert_eq!(refused(std::io::ErrorKind::StorageFull.into()), ErrorKind::NoSpace);
        assert_eq!(refused(rustix::io::Errno::IO.into()), ErrorKind::Unavailable);
    }
}

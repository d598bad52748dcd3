//! Backing files as the link reads and writes them, and the chunks in them.
//!
//! Owns: the descriptors, the chunks in which bytes landed, hashing chunks of a backing file. Does not own: the consequences of a wrong
//! chunk.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_tier1::Backing;
use tidemark_transport::{BytesSink, BytesSource};

/// Bytes read at a time for hashing: few enough to be still in the core's cache when they are hashed.
const READ_BYTES: usize = 256 << 10;

/// The chunks into which bytes have landed, or may have: a piece counts before its first byte is written. Outlives the
/// writers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Touched(Arc<Mutex<BTreeSet<u64>>>);

impl Touched {
    /// Takes all chunks since the last call.
    pub(crate) fn take(&self) -> BTreeSet<u64> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A backing file that the link writes into. As long as it lives, the link may write.
#[derive(Debug)]
pub(crate) struct Sink {
    file: File,
    touched: Touched,
}

impl Sink {
    pub(crate) fn open(backing: &Backing, touched: Touched) -> io::Result<Arc<Self>> {
        let file = File::options().read(true).write(true).open(backing.host_path())?;
        Ok(Arc::new(Self { file, touched }))
    }
}

impl BytesSink for Sink {
    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn landing(&self, piece: Range<u64>) {
        if piece.start < piece.end {
            let chunks = piece.start / CHUNK_BYTES..(piece.end - 1) / CHUNK_BYTES + 1;
            self.touched.0.lock().unwrap_or_else(PoisonError::into_inner).extend(chunks);
        }
    }
}

/// A backing file that the link reads from; the file lives as long as this value.
#[derive(Debug)]
pub(crate) struct Source<K> {
    file: File,
    /// A value that keeps the bytes as they are.
    _kept: K,
}

impl<K> Source<K> {
    pub(crate) fn open(backing: &Backing, kept: K) -> io::Result<Self> {
        Ok(Self { file: backing.read_fd()?.into(), _kept: kept })
    }
}

impl<K: Send + Sync + 'static> BytesSource for Source<K> {
    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Returns the byte range of a chunk in a file of `size_bytes`; empty beyond the file's end.
pub(crate) fn chunk_bytes(chunk: u64, size_bytes: u64) -> Range<u64> {
    let start = chunk.saturating_mul(CHUNK_BYTES).min(size_bytes);
    start..size_bytes.min(start.saturating_add(CHUNK_BYTES))
}

/// Returns the checksums of these chunks in a file of `size_bytes`, without chunks that are not whole there. Blocks.
pub(crate) fn sums(backing: &Backing, chunks: &[u64], size_bytes: u64) -> io::Result<Vec<(u64, Crc64)>> {
    let file = File::from(backing.read_fd()?);
    let mut buffer = vec![0; READ_BYTES];
    let mut sums = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        let range = chunk_bytes(*chunk, size_bytes);
        if range.is_empty() {
            continue;
        }
        let mut hash = tidemark_kernels::Crc64Digest::new();
        let mut at = range.start;
        while at < range.end {
            let wanted = usize::try_from(range.end - at).map_or(READ_BYTES, |left| left.min(READ_BYTES));
            let read = std::os::unix::fs::FileExt::read_at(&file, &mut buffer[..wanted], at)?;
            if read == 0 {
                break;
            }
            hash.update(&buffer[..read]);
            at += read as u64;
        }
        if at == range.end {
            sums.push((*chunk, Crc64(hash.finalize())));
        }
    }
    Ok(sums)
}

/// Does as [`sums`], for a file that is not made shorter meanwhile. Hashes the chunks in place, because a copy of each byte took a
/// tenth of a restore's processor time. Blocks.
pub(crate) fn landed_sums(
    backing: &Backing,
    chunks: &[u64],
    size_bytes: u64,
) -> io::Result<Vec<(u64, Crc64)>> {
    // If a disk cannot read its bytes back, a read fails with an error, but a mapping would kill the process.
    let map = if backing.is_spilled() { None } else { backing.map_written().ok() };
    let Some(map) = map else { return sums(backing, chunks, size_bytes) };
    let bytes_of = |chunk| {
        let range = chunk_bytes(chunk, size_bytes);
        map.get(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?)
    };
    let whole = chunks.iter().filter_map(|chunk| Some((*chunk, bytes_of(*chunk)?)));
    let lying = whole.filter(|(_, bytes)| !bytes.is_empty());
    Ok(lying.map(|(chunk, bytes)| (chunk, Crc64(tidemark_kernels::crc64(bytes)))).collect())
}

/// Reads all bytes of a small file at rest. Copying them keeps a core busy for microseconds only; mapping so few would cost
/// every core an interrupt at the unmapping.
pub(crate) fn read_all(backing: &Backing, size_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(size_bytes).map_err(io::Error::other)?];
    backing.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Writes all of `bytes` at the file's beginning.
pub(crate) fn write_all(backing: &Backing, mut bytes: &[u8]) -> io::Result<()> {
    let mut at = 0;
    while !bytes.is_empty() {
        match backing.write_at(bytes, at)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => {
                bytes = &bytes[written..];
                at += written as u64;
            }
        }
    }
    Ok(())
}

/// Runs blocking work on the blocking pool.
pub(crate) async fn blocking<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    tokio::task::spawn_blocking(work).await.expect("reading and hashing do not panic")
}

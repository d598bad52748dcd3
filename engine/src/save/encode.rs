//! Makes the chunks of a sealed file smaller on their way to Tier-3, if the settings of its run ask for it.
//!
//! Owns: which files are encoded, the two passes over a file, the chunks kept between them. Does not own: how many cores that takes
//! (`coders`), the bytes of an encoded chunk (the kernels crate), sending them (`upload`, the store), reading them back
//! (`chunk::decode`).
//!
//! A store needs an object's size before its first byte. So a first pass encodes every chunk to learn its length, and a second makes
//! the chunks to send. Chunks of the first pass are kept while there is room (`coders`); if a whole file fits, each of its chunks is
//! encoded once. No chunk leaves before it was decoded again and had the sealed checksum, so that every committed chunk can be read.

use crate::chunk::decode;
use crate::flight::Place;
use crate::save::drain::Drain;
use crate::save::upload::{self, SealedBytes, UploadError, check_chunk};
use bytes::{Bytes, BytesMut};
use futures::stream::{self, StreamExt, TryStreamExt};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use tidemark_kernels::encoding as kernel;
use tidemark_protocol::encoding::{Codec, Encoding, ObjectLayout};
use tidemark_protocol::file::Readers;
use tidemark_protocol::layout::chunk_count;
use tidemark_store::PartSource;
use tidemark_tier1::Mapping;
use tokio::sync::OwnedSemaphorePermit;

/// Smallest file that is encoded: a smaller one saves less than its request costs.
const ENCODED_FILE_BYTES_MIN: u64 = 64 << 10;

/// The result of an upload.
#[derive(Debug)]
pub struct Sent {
    pub etag: Option<String>,
    /// None if the object is the file's bytes.
    pub encoding: Option<Encoding>,
}

/// Uploads one file to `key`, encoded if a codec is given and makes the file smaller.
///
/// Costs one or two encodings and one decoding of each chunk on [`Coders`], and up to three chunks of memory for each part
/// in flight, beside what is kept.
pub async fn upload(
    drain: &Arc<Drain>,
    key: &str,
    bytes: SealedBytes,
    codec: Option<Codec>,
) -> Result<Sent, UploadError> {
    let (pin, path) = (Arc::clone(&bytes.pin), bytes.path.clone());
    upload::while_wanted(&pin, &path, encoded(drain, key, bytes, codec)).await
}

async fn encoded(
    drain: &Arc<Drain>,
    key: &str,
    bytes: SealedBytes,
    codec: Option<Codec>,
) -> Result<Sent, UploadError> {
    let size_bytes = bytes.pin.size_bytes;
    let Some(codec) = codec.filter(|_| size_bytes >= ENCODED_FILE_BYTES_MIN) else {
        return plain(drain, key, bytes).await;
    };
    let mapping = upload::map(&bytes)?;
    let work = Arc::new(Work { drain: Arc::clone(drain), bytes, mapping, codec });
    let slots = first_pass(&work).await?;
    let lengths = slots.iter().map(|slot| slot.length);
    let encoding = Encoding { codec, lengths: lengths.collect() };
    encoding.check(&work.bytes.path, size_bytes).expect("no encoded chunk is longer than its bound");
    let object_bytes = encoding.object_bytes();
    if object_bytes > size_bytes - size_bytes / kernel::LEAST_GAIN as u64 {
        drop(slots);
        let work = Arc::into_inner(work).expect("the first pass has ended");
        return plain(drain, key, work.bytes).await;
    }
    let layout = ObjectLayout::new(size_bytes, Some(&encoding));
    let slots = slots.into_iter().map(Mutex::new).collect();
    let source = Arc::new(EncodedSource { work: Arc::clone(&work), layout: layout.clone(), slots });
    let etag = upload::send(drain, key, source, (&work.bytes.path, &layout, &work.bytes.chunks)).await?;
    drain.metrics.encode_in_bytes.inc_by(size_bytes);
    drain.metrics.encode_out_bytes.inc_by(object_bytes);
    Ok(Sent { etag, encoding: Some(encoding) })
}

/// Returns the encoded chunks of a file as an existing object has them. Fails if this build encodes a chunk to another length,
/// because the manifest says where each chunk lies.
pub(crate) async fn source_like(
    drain: &Arc<Drain>,
    bytes: SealedBytes,
    encoding: &Encoding,
) -> Result<Arc<dyn PartSource>, UploadError> {
    let (mapping, size_bytes) = (upload::map(&bytes)?, bytes.pin.size_bytes);
    let codec = encoding.codec;
    let work = Arc::new(Work { drain: Arc::clone(drain), bytes, mapping, codec });
    let slots = first_pass(&work).await?;
    let mut lengths = (0_u64..).zip(slots.iter().map(|slot| slot.length).zip(&encoding.lengths));
    if let Some((chunk, (ours, theirs))) = lengths.find(|(_, (ours, theirs))| ours != *theirs) {
        let what =
            format!("chunk {chunk} has {ours} bytes encoded, and {theirs} in Tier-3; another build wrote it");
        let path = work.bytes.path.clone();
        return Err(UploadError::Encode { path, source: io::Error::other(what) });
    }
    let layout = ObjectLayout::new(size_bytes, Some(encoding));
    Ok(Arc::new(EncodedSource { work, layout, slots: slots.into_iter().map(Mutex::new).collect() }))
}

async fn plain(drain: &Arc<Drain>, key: &str, bytes: SealedBytes) -> Result<Sent, UploadError> {
    Ok(Sent { etag: upload::upload(drain, key, bytes).await?, encoding: None })
}

/// A file to encode.
struct Work {
    drain: Arc<Drain>,
    bytes: SealedBytes,
    mapping: Arc<Mapping>,
    codec: Codec,
}

impl Work {
    /// Returns a chunk as it was sealed. Fails if it changed in memory since.
    fn chunk(&self, chunk: u64) -> io::Result<&[u8]> {
        let range = tidemark_protocol::layout::chunk_range(self.bytes.pin.size_bytes, chunk);
        let index = |offset: u64| usize::try_from(offset).map_err(io::Error::other);
        let plain = &self.mapping[index(range.start)?..index(range.end)?];
        check_chunk(&self.bytes.chunks, chunk, plain)?;
        Ok(plain)
    }

    fn encode(&self, chunk: u64) -> io::Result<Vec<u8>> {
        let plain = self.chunk(chunk)?;
        self.drain.coders.with(|encoder| {
            let mut encoded = Vec::new();
            encoder.encode(kernel_codec(self.codec), plain, &mut encoded)?;
            encoded.shrink_to_fit();
            Ok(encoded)
        })
    }

    /// Encodes a chunk, and proves that the result decodes to the sealed one.
    fn encode_to_send(&self, chunk: u64) -> io::Result<Vec<u8>> {
        let encoded = self.encode(chunk)?;
        let plain_bytes = self.chunk(chunk)?.len();
        let decoded = decode::chunk(&encoded, plain_bytes).map_err(io::Error::other)?;
        check_chunk(&self.bytes.chunks, chunk, &decoded)?;
        Ok(encoded)
    }
}

fn kernel_codec(codec: Codec) -> kernel::Codec {
    match codec {
        Codec::Zstd => kernel::Codec::Zstd,
        Codec::Planes => kernel::Codec::Planes,
    }
}

/// An encoded chunk between the passes, and while parts take their pieces of it.
struct Slot {
    length: u32,
    /// Bytes of the chunk that no part has taken yet; all of them again if it was dropped and is encoded again.
    left: usize,
    encoded: Option<(Vec<u8>, Option<OwnedSemaphorePermit>)>,
}

impl Slot {
    fn new(encoded: Vec<u8>, kept: Option<OwnedSemaphorePermit>) -> io::Result<Self> {
        let length = u32::try_from(encoded.len()).map_err(io::Error::other)?;
        let left = encoded.len();
        Ok(Self { length, left, encoded: kept.map(|permit| (encoded, Some(permit))) })
    }
}

async fn first_pass(work: &Arc<Work>) -> Result<Vec<Slot>, UploadError> {
    let chunks = chunk_count(work.bytes.pin.size_bytes);
    let pass = stream::iter(0..chunks).map(|chunk| {
        let work = Arc::clone(work);
        async move {
            let kept = Arc::clone(&work.drain.coders.kept).try_acquire_owned().ok();
            tokio::task::spawn_blocking(move || {
                let encoded = if kept.is_some() { work.encode_to_send(chunk) } else { work.encode(chunk) }?;
                Slot::new(encoded, kept)
            })
            .await
            .expect("encoding a chunk does not panic")
        }
    });
    let result = pass.buffered(work.drain.coders.most).try_collect().await;
    result.map_err(|source| match upload::corrupt_chunk(&work.bytes.path, &source) {
        Some(corrupt) => corrupt,
        None => UploadError::Encode { path: work.bytes.path.clone(), source },
    })
}

/// Encoded chunks one after the other, as an upload's source.
struct EncodedSource {
    work: Arc<Work>,
    layout: ObjectLayout,
    slots: Vec<Mutex<Slot>>,
}

impl EncodedSource {
    /// Appends a piece of an encoded chunk to `part`, and encodes the chunk first if it is not kept. A neighbouring part that needs
    /// the other piece waits here meanwhile.
    fn take(&self, chunk: u64, piece: Range<usize>, part: &mut BytesMut) -> io::Result<()> {
        let index = usize::try_from(chunk).map_err(io::Error::other)?;
        let mut slot =
            self.slots[index].lock().map_err(|_| io::Error::other("encoding this chunk failed"))?;
        let length = usize::try_from(slot.length).map_err(io::Error::other)?;
        if slot.encoded.is_none() {
            let encoded = self.work.encode_to_send(chunk)?;
            if encoded.len() != length {
                let found = encoded.len();
                let what = format!("chunk {chunk} has {found} bytes encoded, and had {length} before");
                return Err(io::Error::other(what));
            }
            (slot.encoded, slot.left) = (Some((encoded, None)), length);
        }
        let (encoded, _) = slot.encoded.as_ref().expect("it was just made");
        part.extend_from_slice(&encoded[piece.clone()]);
        slot.left = slot.left.saturating_sub(piece.len());
        if slot.left == 0 {
            slot.encoded = None;
        }
        Ok(())
    }
}

impl PartSource for EncodedSource {
    fn size_bytes(&self) -> u64 {
        self.layout.object_bytes()
    }

    fn readers(&self) -> Readers {
        self.work.bytes.pin.readers
    }

    fn read_part(&self, range: Range<u64>) -> io::Result<Bytes> {
        self.work.drain.wait_for_pace(range.end - range.start);
        let place = self.work.drain.flight.begin_blocking(range.end - range.start);
        let index = |offset: u64| usize::try_from(offset).map_err(io::Error::other);
        let mut part = BytesMut::with_capacity(index(range.end - range.start)?);
        let mut at = range.start;
        while at < range.end {
            let chunk = self.layout.chunk_at(at);
            let lies = self.layout.object_range(chunk);
            let until = range.end.min(lies.end);
            self.take(chunk, index(at - lies.start)?..index(until - lies.start)?, &mut part)?;
            at = until;
        }
        Ok(Bytes::from_owner(Part { bytes: part.freeze(), _place: place }))
    }
}

/// A part of encoded chunks, on its way for as long as the store holds its bytes.
struct Part {
    bytes: Bytes,
    _place: Place,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

//! Uploading files that belong to no checkpoint (loose files), and the tree around them.
//!
//! Owns: bytes before sidecar, the bytes that a file shares with an earlier generation, and the numbered tree documents. Does not
//! own: when a loose file has settled, what the tree holds (the node loop), how parts are chosen (`protocol::loose`).

use crate::save::drain::{Drain, Stored};
use crate::save::reading::{self, Reading};
use crate::save::small;
use crate::save::upload::{self, SealedBytes, UploadError};
use crate::step_point::{StepPoint, reach};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use tidemark_namespace::SealPin;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::documents::{LooseSidecar, TreeDocument};
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::file::Readers;
use tidemark_protocol::format::{Document, FORMAT, FORMAT_PARTS, FormatError};
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::key::{Key, Series};
use tidemark_protocol::layout::{CHUNK_BYTES, chunk_range};
use tidemark_protocol::loose::{Left, LoosePart};
use tidemark_protocol::loose::{SHARED_FROM_BYTES, shared};
use tidemark_protocol::manifest::{Attributes, ManifestFile};
use tidemark_protocol::path::RelPath;
use tidemark_store::StoreError;
use tidemark_tier1::Backing;

/// A loose file to bring to Tier-3.
#[derive(Debug)]
pub struct LooseUpload {
    pub path: RelPath,
    pub generation: Generation,
    pub file: FileId,
    /// The number of the file's seal, or of its present bytes if a program may still write them.
    pub seal: SealNumber,
    pub bytes: LooseBytes,
    pub left: Left,
    pub attributes: Attributes,
    pub session: Option<String>,
    pub closed_at_ns: i64,
    /// An earlier generation, which may begin with the same bytes.
    pub earlier: Option<Arc<LooseStored>>,
}

/// The bytes of a loose file in Tier-1.
#[derive(Debug)]
pub enum LooseBytes {
    Sealed { chunks: Arc<[Crc64]>, pin: Arc<SealPin> },
    Standing { backing: Arc<Backing>, size_bytes: u64, readers: Readers },
}

impl LooseBytes {
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        match self {
            Self::Sealed { pin, .. } => pin.size_bytes,
            Self::Standing { size_bytes, .. } => *size_bytes,
        }
    }

    fn readers(&self) -> Readers {
        match self {
            Self::Sealed { pin, .. } => pin.readers,
            Self::Standing { readers, .. } => *readers,
        }
    }

    fn backing(&self) -> &Arc<Backing> {
        match self {
            Self::Sealed { pin, .. } => &pin.backing,
            Self::Standing { backing, .. } => backing,
        }
    }
}

/// A generation in Tier-3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LooseStored {
    pub generation: Generation,
    /// The key of the bytes: an object's, or the key that stands for several objects.
    pub key: String,
    pub size_bytes: u64,
    pub chunks: Arc<[Crc64]>,
    /// The objects; at least one if there are bytes.
    pub parts: Vec<LoosePart>,
}

impl LooseStored {
    #[must_use]
    pub fn of(sidecar: &LooseSidecar) -> Self {
        let file = &sidecar.file;
        let whole = LoosePart { generation: sidecar.generation, bytes: file.size_bytes };
        Self {
            generation: sidecar.generation,
            key: file.key.clone(),
            size_bytes: file.size_bytes,
            chunks: file.chunks.clone().into(),
            parts: if sidecar.parts.is_empty() { vec![whole] } else { sidecar.parts.clone() },
        }
    }

    /// Returns the generation if comparing a later one with it is worth its memory. Small files that are written once are too many.
    #[must_use]
    pub fn compared(self) -> Option<Arc<Self>> {
        let worth = self.size_bytes >= SHARED_FROM_BYTES || self.generation > Generation(1);
        worth.then(|| Arc::new(self))
    }
}

/// Why a loose file or the tree is not in Tier-3.
#[derive(Debug, thiserror::Error)]
pub enum LooseError {
    #[error(transparent)]
    Upload(#[from] UploadError),
    #[error("{key} was not written")]
    Write { key: String, source: StoreError },
    #[error("{key} holds other bytes; the next try takes the next number")]
    Taken { key: String },
    #[error("{key} cannot be described")]
    Format { key: String, source: FormatError },
}

impl LooseError {
    /// Whether an object stands under the key, document or not, so that the next try takes another key.
    #[must_use]
    pub fn uses_number(&self) -> bool {
        matches!(self, Self::Taken { .. } | Self::Write { source: StoreError::NoDocument { .. }, .. })
    }

    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Upload(error) => error.kind(),
            // The answer of Tier-3 came damaged: the content is unknown, and read again.
            Self::Write { source: StoreError::Damaged { .. }, .. } => ErrorKind::Unavailable,
            Self::Write { source, .. } => source.kind(),
            Self::Taken { .. } | Self::Format { .. } => ErrorKind::Invalid,
        }
    }
}

/// Uploads the bytes that Tier-3 lacks, then the sidecar: a sidecar means that the bytes are there.
pub async fn upload(drain: &Arc<Drain>, upload: LooseUpload) -> Result<LooseStored, LooseError> {
    let bytes = send(drain, &upload).await?;
    let LooseUpload { path, generation, file, seal, left, attributes, session, closed_at_ns, .. } = upload;
    reach(StepPoint::LooseBeforeSidecar);
    let size_bytes = bytes.parts.iter().map(|part| part.bytes).sum();
    let whole = bytes.parts.iter().all(|part| part.generation == generation);
    let (of_one, sidecar_key) = Key::loose(&path, generation);
    let of_parts = Key::loose_parts(&path, generation).filter(|_| !whole);
    let key = of_parts.unwrap_or(of_one);
    let crc64nvme =
        Crc64::combine_all(&bytes.chunks, size_bytes).expect("these are the chunks of this many bytes");
    let sidecar = LooseSidecar {
        format: if whole { FORMAT } else { FORMAT_PARTS },
        generation,
        epoch: drain.epoch(),
        session,
        closed_at_ns,
        left,
        follows: bytes.follows,
        parts: if whole { Vec::new() } else { bytes.parts },
        file: ManifestFile {
            path,
            key: key.to_string(),
            size_bytes,
            crc64nvme,
            chunks: bytes.chunks,
            // A loose file belongs to no run, and is seldom large.
            encoding: None,
            etag: bytes.etag,
            file,
            seal,
            attributes,
        },
    };
    write(drain, sidecar_key.to_string(), &sidecar).await?;
    Ok(LooseStored::of(&sidecar))
}

/// The uploaded bytes, as the sidecar describes them.
struct Bytes {
    chunks: Vec<Crc64>,
    parts: Vec<LoosePart>,
    follows: Option<Generation>,
    etag: Option<String>,
}

async fn send(drain: &Arc<Drain>, upload: &LooseUpload) -> Result<Bytes, UploadError> {
    let path = upload.path.to_string();
    let key = Key::loose(&upload.path, upload.generation).0.to_string();
    let size_bytes = upload.bytes.size_bytes();
    let Begins { parts, head, follows } = match &upload.earlier {
        Some(earlier) => begins_with(upload, Arc::clone(earlier))
            .await
            .map_err(|source| UploadError::Read { path: path.clone(), source })?,
        None => Begins::default(),
    };
    let own = |bytes| LoosePart { generation: upload.generation, bytes };
    match &upload.bytes {
        LooseBytes::Sealed { chunks, pin } if parts.is_empty() => {
            let bytes = SealedBytes { path, pin: Arc::clone(pin), chunks: Arc::clone(chunks) };
            let etag = if size_bytes <= small::SMALL_BYTES {
                small::upload(drain, &key, &bytes).await?
            } else {
                let path = bytes.path.clone();
                upload::while_wanted(pin, &path, upload::upload(drain, &key, bytes)).await?
            };
            return Ok(Bytes { chunks: chunks.to_vec(), parts: vec![own(size_bytes)], follows, etag });
        }
        LooseBytes::Sealed { .. } | LooseBytes::Standing { .. } => {}
    }
    let from: u64 = parts.iter().map(|part| part.bytes).sum();
    let known = usize::try_from(from / CHUNK_BYTES).expect("a chunk index fits an address space");
    let mut all = Bytes {
        chunks: upload.earlier.as_ref().map_or(&[][..], |earlier| &earlier.chunks)[..known].to_vec(),
        parts,
        follows,
        etag: None,
    };
    let rest = from..size_bytes;
    if rest.is_empty() && !from.is_multiple_of(CHUNK_BYTES) {
        all.chunks.push(head);
    }
    if !rest.is_empty() || all.parts.is_empty() {
        let reading = Reading {
            path: path.clone(),
            backing: Arc::clone(upload.bytes.backing()),
            range: rest.clone(),
            head,
            readers: upload.bytes.readers(),
        };
        let sending = reading::upload(drain, &key, reading);
        let sent = match &upload.bytes {
            LooseBytes::Sealed { pin, .. } => upload::while_wanted(pin, &path, sending).await?,
            LooseBytes::Standing { .. } => sending.await?,
        };
        all.chunks.extend(sent.chunks);
        all.etag = sent.etag;
        all.parts.push(own(rest.end - rest.start));
    }
    if let LooseBytes::Sealed { chunks, .. } = &upload.bytes
        && let Some(chunk) = (0..chunks.len()).find(|chunk| all.chunks.get(*chunk) != Some(&chunks[*chunk]))
    {
        let found = all.chunks.get(chunk).copied().unwrap_or_default();
        return Err(UploadError::HostCorrupt { path, chunk: chunk as u64, expected: chunks[chunk], found });
    }
    Ok(all)
}

/// The beginning that a file has in common with an earlier generation.
#[derive(Debug, Default)]
struct Begins {
    /// The parts that hold the file's first bytes, if it is large enough to share some.
    parts: Vec<LoosePart>,
    /// The checksum of the bytes that the parts have of their last, incomplete chunk.
    head: Crc64,
    /// The earlier generation, if the file begins with all of its bytes.
    follows: Option<Generation>,
}

/// Compares a file with an earlier generation. Costs a pass over the bytes that both may share, or over one chunk if the file is
/// sealed.
async fn begins_with(upload: &LooseUpload, earlier: Arc<LooseStored>) -> io::Result<Begins> {
    let backing = Arc::clone(upload.bytes.backing());
    let size_bytes = upload.bytes.size_bytes();
    let shares =
        size_bytes >= SHARED_FROM_BYTES && Key::loose_parts(&upload.path, upload.generation).is_some();
    let sums = match &upload.bytes {
        LooseBytes::Sealed { chunks, .. } => Some(Arc::clone(chunks)),
        LooseBytes::Standing { .. } => None,
    };
    tokio::task::spawn_blocking(move || {
        let mut chunk = Chunk::new(&backing);
        let prefix_bytes = prefix(&mut chunk, &earlier, size_bytes, sums.as_deref())?;
        let follows = (prefix_bytes == earlier.size_bytes).then_some(earlier.generation);
        let parts = if shares { shared(&earlier.parts, prefix_bytes) } else { Vec::new() };
        let from: u64 = parts.iter().map(|part| part.bytes).sum();
        // The chunk was found to be the same in both, so its checksum may be computed from the bytes here.
        let head = match from % CHUNK_BYTES {
            0 => Some(Crc64::default()),
            in_chunk => chunk.head(&earlier, from / CHUNK_BYTES, in_chunk, prefix_bytes)?,
        };
        Ok(head.map_or_else(Begins::default, |head| Begins { parts, head, follows }))
    })
    .await
    .expect("hashing does not panic")
}

/// Returns how many bytes at its beginning a file of `size_bytes` has in common with `earlier`. Compares whole chunks, and the last
/// chunk of `earlier` even if it is not full. `sums`: the checksums of the file's chunks, if known.
fn prefix(
    chunk: &mut Chunk<'_>,
    earlier: &LooseStored,
    size_bytes: u64,
    sums: Option<&[Crc64]>,
) -> io::Result<u64> {
    let mut prefix_bytes = 0;
    for (index, expected) in earlier.chunks.iter().enumerate() {
        let range = chunk_range(earlier.size_bytes, index as u64);
        if range.end > size_bytes {
            break;
        }
        let is_full = range.end - range.start == CHUNK_BYTES;
        let same = match sums.filter(|_| is_full) {
            Some(sums) => sums.get(index) == Some(expected),
            None => Crc64(tidemark_kernels::crc64(chunk.read(&range)?)) == *expected,
        };
        if !same {
            break;
        }
        prefix_bytes = range.end;
    }
    Ok(prefix_bytes)
}

/// Reads chunks of a file, one after the other, into the same memory.
struct Chunk<'a> {
    backing: &'a Backing,
    bytes: Vec<u8>,
}

impl<'a> Chunk<'a> {
    fn new(backing: &'a Backing) -> Self {
        Self { backing, bytes: Vec::new() }
    }

    fn read(&mut self, range: &Range<u64>) -> io::Result<&[u8]> {
        let len = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
        self.bytes.resize(len, 0);
        self.backing.read_exact_at(&mut self.bytes, range.start)?;
        Ok(&self.bytes)
    }

    /// Returns the checksum of the first `in_chunk` bytes of a chunk; `None` if the chunk differs from the one in `earlier`.
    fn head(
        &mut self,
        earlier: &LooseStored,
        index: u64,
        in_chunk: u64,
        prefix_bytes: u64,
    ) -> io::Result<Option<Crc64>> {
        let range = chunk_range(earlier.size_bytes, index);
        debug_assert!(range.end <= prefix_bytes, "only whole chunks were found to be the same");
        let expected = earlier.chunks.get(usize::try_from(index).map_err(io::Error::other)?);
        let bytes = self.read(&range)?;
        let same = expected == Some(&Crc64(tidemark_kernels::crc64(bytes)));
        let head = usize::try_from(in_chunk).map_err(io::Error::other)?;
        Ok(same.then(|| Crc64(tidemark_kernels::crc64(&bytes[..head]))))
    }
}

/// Writes tree document `number`. [`LooseError::Taken`] means that another writer used the number first.
pub async fn write_tree(drain: &Arc<Drain>, number: u64, tree: &TreeDocument) -> Result<(), LooseError> {
    reach(StepPoint::TreeBeforeWrite);
    write(drain, Key::numbered(Series::Tree, number).to_string(), tree).await
}

async fn write<D: Document>(drain: &Drain, key: String, document: &D) -> Result<(), LooseError> {
    let bytes = match document.encode() {
        Ok(bytes) => bytes,
        Err(source) => return Err(LooseError::Format { key, source }),
    };
    match drain.create(&key, &bytes).await {
        Ok(Stored::Ours) => Ok(()),
        Ok(Stored::Theirs) => Err(LooseError::Taken { key }),
        Err(source) => Err(LooseError::Write { key, source }),
    }
}

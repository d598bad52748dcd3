//! Files that belong to no checkpoint, and the tree around them, on their way to Tier-3.
//!
//! Owns: bytes before sidecar, and the numbered tree documents. Does not own: when a loose file has settled, or what
//! the tree holds (the node loop).

use crate::error::ErrorKind;
use crate::namespace::SealPin;
use crate::save::drain::{Drain, Stored};
use crate::save::small;
use crate::save::upload::{self, SealedBytes, UploadError};
use crate::step_point::{StepPoint, reach};
use crate::store::StoreError;
use std::sync::Arc;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::documents::{LooseSidecar, TreeDocument};
use tidemark_protocol::format::{Document, FORMAT, FormatError};
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::key::{Key, Series};
use tidemark_protocol::manifest::{Attributes, ManifestFile};
use tidemark_protocol::path::RelPath;

/// One sealed loose file to bring to Tier-3.
#[derive(Debug)]
pub struct LooseUpload {
    pub path: RelPath,
    pub generation: Generation,
    pub file: FileId,
    pub seal: SealNumber,
    pub size_bytes: u64,
    pub crc: Crc64,
    pub chunks: Arc<[Crc64]>,
    pub attributes: Attributes,
    pub session: Option<String>,
    pub closed_at_ns: i64,
    pub pin: Arc<SealPin>,
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
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Upload(error) => error.kind(),
            // What Tier-3 holds did not come whole. It is not known, and asked again.
            Self::Write { source: StoreError::Damaged { .. }, .. } => ErrorKind::Unavailable,
            Self::Write { source, .. } => source.kind(),
            Self::Taken { .. } | Self::Format { .. } => ErrorKind::Invalid,
        }
    }
}

/// Uploads the bytes, then the sidecar: a sidecar means that the bytes are there. Returns the key of the bytes.
pub async fn upload(drain: &Arc<Drain>, upload: LooseUpload) -> Result<String, LooseError> {
    let (key, sidecar_key) = Key::loose(&upload.path, upload.generation);
    let (key, sidecar_key) = (key.to_string(), sidecar_key.to_string());
    let bytes = SealedBytes {
        path: upload.path.to_string(),
        pin: Arc::clone(&upload.pin),
        chunks: Arc::clone(&upload.chunks),
    };
    let etag = if upload.size_bytes <= small::SMALL_BYTES {
        small::upload(drain, &key, &bytes).await?
    } else {
        let path = bytes.path.clone();
        upload::while_wanted(&upload.pin, &path, upload::upload(drain, &key, bytes)).await?
    };
    reach(StepPoint::LooseBeforeSidecar);
    let sidecar = LooseSidecar {
        format: FORMAT,
        generation: upload.generation,
        epoch: drain.epoch(),
        session: upload.session,
        closed_at_ns: upload.closed_at_ns,
        file: ManifestFile {
            path: upload.path,
            key: key.clone(),
            size_bytes: upload.size_bytes,
            crc64nvme: upload.crc,
            chunks: upload.chunks.to_vec(),
            // A loose file belongs to no run, and is seldom large.
            encoding: None,
            etag,
            file: upload.file,
            seal: upload.seal,
            attributes: upload.attributes,
        },
    };
    write(drain, sidecar_key, &sidecar).await?;
    Ok(key)
}

/// Writes tree document `number`. Taken means that somebody wrote that number first.
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

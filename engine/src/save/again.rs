//! Rewrites an object of Tier-3 whose bytes are bad or gone.
//!
//! Owns: whether the key may still be written, and that it gets the very bytes it had. Does not own: finding the object bad, the good
//! copy, reading the new object back (all `node::verify`).
//!
//! No key is ever written with different bytes. Each chunk is compared with the checksum of the manifest or the sidecar before it
//! leaves. An encoded object is written only if this build encodes each chunk to the length in the manifest. Only a record may
//! differ: it then gives its manifest's evidence, which may be later than the record.

use crate::save::commit::{CommitError, check_epoch, create_marker, read_marker};
use crate::save::drain::Drain;
use crate::save::encode;
use crate::save::upload::{self, SealedBytes, UploadError};
use bytes::Bytes;
use std::sync::Arc;
use tidemark_namespace::ObjectCopy;
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::format::{Document, FormatError};
use tidemark_protocol::id::Epoch;
use tidemark_protocol::key::{Key, VersionId};
use tidemark_protocol::marker::{Decision, Marker};
use tidemark_store::{StoreError, UploadLimits};

/// The reason why an object stays as it is.
#[derive(Debug, thiserror::Error)]
pub enum AgainError {
    #[error("{key} was written by others, and nothing of it is changed here")]
    Foreign { key: String },
    #[error("{key} belongs to what was given up")]
    GivenUp { key: String },
    #[error(
        "{key} has no sidecar any more, without which nothing finds it; the file was removed, or is sent again as a whole"
    )]
    NoSidecar { key: String },
    #[error("{key} says now that {decision} was decided in epoch {epoch}, and stays")]
    Decided { key: String, decision: Decision, epoch: Epoch },
    #[error("{key} cannot be described")]
    Format { key: String, source: FormatError },
    #[error("whether {key} is still wanted is not known")]
    Unknown { key: String, source: CommitError },
    #[error("{key} was not written again")]
    Store { key: String, source: StoreError },
    #[error(transparent)]
    Source(#[from] UploadError),
}

/// Rewrites the object from `bytes`. Costs one pass over them, and an encoding of each chunk if the object is encoded.
///
/// # Errors
/// The object is not one of ours; its version was retired or aborted; its sidecar is gone; the bytes are not the sealed ones; Tier-3
/// does not accept them.
pub async fn write_again(
    drain: &Arc<Drain>,
    object: &ObjectCopy,
    bytes: SealedBytes,
) -> Result<(), AgainError> {
    let key = &object.key;
    check_wanted(drain, key).await?;
    let source = match &object.encoding {
        Some(encoding) => encode::source_like(drain, bytes, encoding).await?,
        None => upload::source(drain, bytes)?,
    };
    let permits = drain.parts(drain.limits.parts_in_flight).await;
    let limits = UploadLimits { parts_in_flight: permits.num_permits(), ..drain.limits };
    let written = drain.store.replace(key, source, &limits).await;
    let written = written.map_err(|error| {
        let corrupt = match &error {
            StoreError::Source { source, .. } => upload::corrupt_chunk(key, source),
            _ => None,
        };
        corrupt.map_or_else(|| AgainError::Store { key: key.clone(), source: error }, AgainError::Source)
    })?;
    drain.metrics.upload_bytes.inc_by(written.size_bytes);
    Ok(())
}

/// Rewrites a manifest or a record.
///
/// # Errors
/// As [`write_again`].
pub async fn write_document_again(drain: &Arc<Drain>, key: &str, bytes: Vec<u8>) -> Result<(), AgainError> {
    check_wanted(drain, key).await?;
    let written = drain.store.replace(key, Arc::new(Bytes::from(bytes)), &drain.limits).await;
    written.map(drop).map_err(|source| AgainError::Store { key: key.to_owned(), source })
}

/// Rewrites the marker of a committed version if it is gone or cannot be read. A readable marker stays, because it decides.
///
/// # Errors
/// As [`write_again`].
pub async fn write_marker_again(drain: &Arc<Drain>, marker: &Marker) -> Result<(), AgainError> {
    let version = &marker.version;
    let key = Key::Committed { version: version.clone() }.to_string();
    let unknown = |source| AgainError::Unknown { key: key.clone(), source };
    check_not_retired(drain, version, &key).await?;
    match read_marker(drain, version).await {
        Ok(None) => create_marker(drain, marker).await.map_err(unknown),
        Ok(Some(Marker { decision, epoch, .. })) => {
            Err(AgainError::Decided { key: key.clone(), decision, epoch })
        }
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            let bytes = marker.encode().map_err(|source| AgainError::Format { key: key.clone(), source })?;
            let written = drain.store.replace(&key, Arc::new(Bytes::from(bytes)), &drain.limits).await;
            written.map(drop).map_err(|source| AgainError::Store { key: key.clone(), source })
        }
        Err(error) => Err(unknown(error)),
    }
}

async fn check_not_retired(drain: &Drain, version: &VersionId, key: &str) -> Result<(), AgainError> {
    let key = || key.to_owned();
    let unknown = |source| AgainError::Unknown { key: key(), source };
    check_epoch(drain, version).await.map_err(unknown)?;
    let retired = Key::Retired { version: version.clone() }.to_string();
    match drain.store.head(&retired).await {
        Ok(None) => Ok(()),
        Ok(Some(_)) => Err(AgainError::GivenUp { key: key() }),
        Err(source) => Err(AgainError::Store { key: key(), source }),
    }
}

/// Refuses a key whose version was retired or aborted, or whose sidecar is gone: a late write would leave bytes that no job
/// sweeps.
pub(super) async fn check_wanted(drain: &Drain, key: &str) -> Result<(), AgainError> {
    let given_up = || Err(AgainError::GivenUp { key: key.to_owned() });
    let store = |source| AgainError::Store { key: key.to_owned(), source };
    let unknown = |source| AgainError::Unknown { key: key.to_owned(), source };
    match key.parse::<Key>() {
        Ok(Key::Data { version, .. } | Key::Manifest { version, .. } | Key::Record { version, .. }) => {
            check_not_retired(drain, &version, key).await?;
            match read_marker(drain, &version).await {
                Ok(Some(marker)) if marker.decision == Decision::Abort => given_up(),
                Ok(Some(_) | None) => Ok(()),
                // The caller knows the version from a time when its marker could be read.
                Err(error) if error.kind() == ErrorKind::Corrupt => Ok(()),
                Err(error) => Err(unknown(error)),
            }
        }
        Ok(Key::Loose { path, generation } | Key::LooseParts { path, generation }) => {
            let sidecar = Key::LooseSidecar { path, generation }.to_string();
            match drain.store.head(&sidecar).await.map_err(store)? {
                Some(_) => Ok(()),
                None => Err(AgainError::NoSidecar { key: key.to_owned() }),
            }
        }
        Ok(_) | Err(_) => Err(AgainError::Foreign { key: key.to_owned() }),
    }
}

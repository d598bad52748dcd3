//! Stand-ins for a document that cannot be read, or that says nothing any more.
//!
//! Owns: records and identities made up from a key. Does not own: where they are needed (`recover`, `import`).

use crate::node::Shared;
use crate::node::adopt::UNKNOWN_BYTES;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::id::{FileCounter, FileId, Incarnation, SealNumber};
use tidemark_protocol::key::{VersionId, checkpoint_path};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::record::{Record, RecordFile};

/// Makes the record of a version whose key alone can be read: one file under the checkpoint's own name.
pub(super) fn stand_in(version: &VersionId, shared: &Shared) -> Record {
    let mut record = empty_record(version, shared);
    let Ok(path) = RelPath::new(checkpoint_path(&version.run, &version.directory)) else { return record };
    record.files.push(RecordFile {
        path,
        file: stand_in_file(&version.to_string()),
        seal: SealNumber(1),
        size_bytes: UNKNOWN_BYTES,
        crc64nvme: Crc64(0),
    });
    record
}

/// Makes an identity for a file whose own is unknown, the same for the same words.
pub(super) fn stand_in_file(words: &str) -> FileId {
    let hash = blake3::hash(words.as_bytes());
    let counter = u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"));
    // No life of a node has this incarnation.
    FileId { incarnation: Incarnation(0), counter: FileCounter(counter) }
}

/// Stands for a version of which only the number matters any more.
pub(crate) fn empty_record(version: &VersionId, shared: &Shared) -> Record {
    Record {
        format: tidemark_protocol::format::FORMAT,
        version: version.clone(),
        attempt: tidemark_protocol::id::AttemptId(0),
        step: None,
        framework: String::new(),
        evidence: tidemark_protocol::record::Evidence::Quiescence,
        evidence_detail: String::new(),
        epoch: shared.drain.epoch(),
        completed_at_ns: 0,
        participants: Vec::new(),
        files: Vec::new(),
        partial: false,
        doubted: false,
    }
}

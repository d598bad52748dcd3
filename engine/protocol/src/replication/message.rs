//! The messages between two nodes about copies, and their bytes.
//!
//! Owns: the messages, their bounds, [`encode`] and [`decode`]. Does not own: frames and connections (the transport), the
//! consequences of a message (`sender`, `landing`).

use crate::checksum::Crc64;
use crate::file::Seal;
use crate::id::{ContentHash, FileId, Incarnation, SealNumber};
use crate::layout::chunk_count;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Longest message, in bytes. The checksums of a file of 4 TiB (524,288 chunks of nine bytes) fit with its attributes; the
/// transport's frames carry twice that.
pub const MESSAGE_BYTES_MAX: usize = 6 << 20;
/// Largest file that travels inside its message: one round trip instead of four.
pub const SMALL_BYTES: u64 = 256 << 10;
/// Maximum number of bytes that a publisher may attach to a copy: a line or two of its catalog.
pub const FACTS_BYTES_MAX: usize = 4 << 10;
/// Maximum number of bytes of extended attributes of one file, names and values together: as many as a node of the tree
/// may have.
pub const XATTRS_BYTES_MAX: usize = 128 << 10;

const _: () =
    assert!(SMALL_BYTES < MESSAGE_BYTES_MAX as u64 / 4, "a small file leaves room for its attributes");

/// Token for moving bytes, as the link made it. A node with the token may move those bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BulkToken(pub [u8; 16]);

/// The description of a copy besides its bytes: enough to put the file back under its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyMeta {
    /// Path relative to the mount, in bytes.
    pub path: Vec<u8>,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime_ns: i64,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// The node that owns the file.
    pub home: String,
    /// When close(2) or rename(2) put these bytes under this name.
    pub published_at_ns: i64,
    /// Facts that the publisher attached, at most [`FACTS_BYTES_MAX`]; opaque here.
    pub facts: Vec<u8>,
}

impl CopyMeta {
    /// Whether all parts are within their bounds.
    #[must_use]
    pub fn is_lawful(&self) -> bool {
        let xattrs: usize = self.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        !self.path.is_empty()
            && self.path.len() <= crate::path::MAX_PATH_BYTES
            && self.home.len() <= crate::id::MAX_NODE_NAME_BYTES
            && self.facts.len() <= FACTS_BYTES_MAX
            && xattrs <= XATTRS_BYTES_MAX
    }
}

/// A whole sealed file: the checksums of its bytes, and its names and attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealedCopy {
    pub file: FileId,
    pub seal: SealNumber,
    pub size_bytes: u64,
    pub crc: Crc64,
    pub chunks: Vec<Crc64>,
    pub meta: CopyMeta,
}

impl SealedCopy {
    #[must_use]
    pub fn new(file: FileId, seal: &Seal, meta: CopyMeta) -> Self {
        let (size_bytes, crc, chunks) = (seal.size_bytes, seal.crc, seal.chunks.to_vec());
        Self { file, seal: seal.number, size_bytes, crc, chunks, meta }
    }

    #[must_use]
    pub fn sealed(&self) -> Seal {
        let (size_bytes, crc) = (self.size_bytes, self.crc);
        Seal { number: self.seal, size_bytes, crc, chunks: Arc::from(self.chunks.as_slice()) }
    }

    /// Whether the numbers agree with each other; checked first for a copy from another node.
    #[must_use]
    pub fn is_lawful(&self) -> bool {
        i64::try_from(self.size_bytes).is_ok()
            && self.seal != SealNumber(0)
            && Crc64::combine_all(&self.chunks, self.size_bytes) == Some(self.crc)
            && self.meta.is_lawful()
    }
}

/// Reason of a holder that dropped a copy whose bytes Tier-3 has. The home compares the text: it does not send that copy
/// again.
pub const GAVE_WAY: &str = "its memory was needed, and Tier-3 has the bytes";

/// A request of a home to a partner, or of a node to one that may have a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Asks for permission to send up to `until_bytes` of a file, and which bytes are there already. `sealed` is set once
    /// the file is sealed. Then the answer may be that the copy exists, or that a file alike does (unless `differs`: that
    /// was tried).
    Begin { file: FileId, until_bytes: u64, sealed: Option<(SealNumber, u64, Crc64)>, differs: bool },
    /// Reports chunks that were sent, with the checksums they should have, and asks for permission to go on up to
    /// `until_bytes`.
    Landed { file: FileId, chunks: Vec<(u64, Crc64)>, until_bytes: u64 },
    /// The whole file has been sent: verify it and keep it.
    Keep(SealedCopy),
    /// The whole of a small file.
    Small(SealedCopy, Vec<u8>),
    /// You have a file of this size and checksum; if its bytes have this hash too, keep them as this copy.
    Prove(SealedCopy, ContentHash),
    /// The home no longer wants this copy to be kept.
    Drop { file: FileId, seal: SealNumber },
    /// I no longer hold this copy. `why` is for people, except [`GAVE_WAY`].
    Withdrawn { file: FileId, seal: SealNumber, why: String },
    /// Asks for permission to read the sealed bytes that you hold.
    Pull { file: FileId, seal: SealNumber },
    /// Bytes that were read from you differ from the seal: verify that copy again.
    Suspect { file: FileId, seal: SealNumber },
    /// The bytes were read, or are not wanted any more.
    Pulled { file: FileId, seal: SealNumber, token: BulkToken },
}

/// The life of the holder's memory that has the copy. Another life no longer has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Holder(pub Incarnation);

/// Chunks that are missing or wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Need {
    pub chunks: Vec<u64>,
    pub token: BulkToken,
}

/// The answer to a [`Request`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Send. `have`: chunks that lie here, with their checksums here.
    Ready { have: Vec<(u64, Crc64)>, token: BulkToken },
    /// A file of that size and checksum lies here: prove that it is the same.
    Alike,
    /// The file alike has other bytes: send.
    Differs,
    /// Go on, but these chunks have wrong checksums; the others are right.
    Checked(Need),
    /// Not a copy yet: these chunks are missing or differ.
    Needs(Need),
    /// The file is a copy now.
    Acknowledged { file: FileId, seal: SealNumber, by: Holder },
    /// Nothing of this file has been begun here: begin again.
    Unknown,
    /// Bytes of an earlier try may still be on their way: ask again in a moment.
    Moving,
    /// The memory has no room now.
    NoRoom { wanted_bytes: u64, free_bytes: u64 },
    /// The token gives access to these bytes.
    Granted { token: BulkToken, size_bytes: u64 },
    /// The bytes are not here, or not good.
    NotHere,
    /// The bytes are being fetched: ask again.
    Coming,
    /// The bytes are here, but as many nodes as allowed read them: ask again.
    Busy,
    /// The request was recorded.
    Noted,
}

/// The reason why bytes are no message, or a message may not be sent.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    #[error(
        "a message of {bytes} bytes, and {MESSAGE_BYTES_MAX} are allowed; a file of more than 4 TiB has no peer copy"
    )]
    TooLong { bytes: usize },
    #[error("{bytes} bytes are no message of this version; both nodes must run the same one")]
    Malformed { bytes: usize, source: postcard::Error },
    #[error("{left} bytes follow after a message of {bytes}; both nodes must run the same version")]
    Trailing { bytes: usize, left: usize },
    #[error("a message names {file} seal {seal} with numbers that do not agree with each other")]
    Unlawful { file: FileId, seal: SealNumber },
}

/// Encodes a message.
///
/// # Errors
/// [`MessageError::TooLong`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, MessageError> {
    let bytes =
        postcard::to_allocvec(message).map_err(|source| MessageError::Malformed { bytes: 0, source })?;
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(MessageError::TooLong { bytes: bytes.len() });
    }
    Ok(bytes)
}

/// Decodes the result of [`encode`]. If a length inside the message exceeds the bytes that follow, that is an error and
/// takes no memory: lists grow as their items are read.
///
/// # Errors
/// [`MessageError`] for anything but one whole message.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(MessageError::TooLong { bytes: bytes.len() });
    }
    let (message, rest) = postcard::take_from_bytes(bytes)
        .map_err(|source| MessageError::Malformed { bytes: bytes.len(), source })?;
    if !rest.is_empty() {
        return Err(MessageError::Trailing { bytes: bytes.len(), left: rest.len() });
    }
    Ok(message)
}

impl Request {
    /// Refuses messages that no correct node sends.
    ///
    /// # Errors
    /// [`MessageError::Unlawful`].
    pub fn check(&self) -> Result<(), MessageError> {
        let (Self::Keep(copy) | Self::Small(copy, _) | Self::Prove(copy, _)) = self else { return Ok(()) };
        let whole = !matches!(self, Self::Small(_, bytes) if bytes.len() as u64 != copy.size_bytes);
        if copy.is_lawful() && whole && copy.chunks.len() as u64 == chunk_count(copy.size_bytes) {
            return Ok(());
        }
        Err(MessageError::Unlawful { file: copy.file, seal: copy.seal })
    }
}

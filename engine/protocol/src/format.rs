//! The codec of our JSON documents: one way to write and read them, one error, one size bound each.
//!
//! Owns: the format number, the size bounds, the reading order (size, checksum, format number, fields, meaning), sealing a document and
//! checking its seal. Does not own: the documents themselves.

use crate::checksum::Crc64;
use crate::path::PathProblem;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

/// The format that this build writes, wherever it can express everything.
pub const FORMAT: u32 = 1;
/// The format of documents that list an encoded file. A reader that knows only format 1 would skip the encoding and take the object's
/// bytes for the file's bytes.
pub const FORMAT_ENCODED: u32 = 2;
/// The format of a loose file's sidecar whose bytes lie in several objects: a reader that knows only older formats would look for one
/// object.
pub const FORMAT_PARTS: u32 = 3;
/// The newest format that this build reads, raised whenever an old reader would misread.
pub const FORMAT_NEWEST: u32 = FORMAT_PARTS;

/// Maximum number of bytes in a marker: its names are bounded by the key's length, escaped.
pub const MAX_MARKER_BYTES: usize = 64 << 10;
/// Maximum number of bytes in a record, a prepared marker, a manifest or a tree: 100 TB at 20 bytes per 8 MiB chunk, 70 TB encoded.
pub const MAX_DOCUMENT_BYTES: usize = 256 << 20;

/// The end of a sealed document, around the 16 digits of the checksum of all bytes before it. The field's name is unique: a sidecar has
/// a `crc64nvme` of the file that it describes.
const SEAL_BEGINS: &[u8] = br#","document_crc64nvme":""#;
const SEAL_DIGITS: usize = 16;
const SEAL_ENDS: &[u8] = br#""}"#;

/// Adds the last field to a JSON object that is not empty: the checksum of the exact bytes before it.
///
/// Builds that do not know this field skip it, so no document needs a newer format for it.
#[must_use]
pub fn seal(mut object: Vec<u8>) -> Vec<u8> {
    debug_assert!(object.len() > 2, "an object with a field");
    let closes = object.pop();
    debug_assert_eq!(closes, Some(b'}'), "a JSON object");
    let sum = Crc64::of(&object).to_string();
    object.reserve_exact(SEAL_BEGINS.len() + SEAL_DIGITS + SEAL_ENDS.len());
    object.extend_from_slice(SEAL_BEGINS);
    object.extend_from_slice(sum.as_bytes());
    object.extend_from_slice(SEAL_ENDS);
    object
}

/// Compares the bytes of a document with the checksum at its end. Returns `false` if there is no checksum, as in documents of older
/// builds.
///
/// # Errors
/// When the two differ.
pub fn check_seal(text: &[u8]) -> Result<bool, BrokenSeal> {
    let Some((object, said)) = parts_of_sealed(text) else { return Ok(false) };
    let found = Crc64::of(object).to_string();
    if found.as_bytes() == said {
        return Ok(true);
    }
    Err(BrokenSeal { found, said: String::from_utf8_lossy(said).into_owned() })
}

/// Returns the bytes before the checksum, and its digits.
fn parts_of_sealed(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let rest = text.strip_suffix(SEAL_ENDS)?;
    let (rest, said) = rest.split_at(rest.len().checked_sub(SEAL_DIGITS)?);
    Some((rest.strip_suffix(SEAL_BEGINS)?, said))
}

/// The error for a document that changed after it was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it has checksum {found} and ends with {said}: a byte of it has changed")]
pub struct BrokenSeal {
    pub found: String,
    pub said: String,
}

/// Whether bytes are a document of ours, of any kind and format, trusted or not: a JSON object with a format number. A page from
/// something between a client and its store, such as a login page, is no document.
#[must_use]
pub fn is_document(bytes: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Head {
        format: u32,
    }
    serde_json::from_slice(bytes).is_ok_and(|Head { format }| format > 0)
}

/// A document of ours in Tier-3.
pub trait Document: Serialize + DeserializeOwned {
    /// The document's name in messages.
    const WHAT: &'static str;
    /// Maximum number of bytes of a document that are read.
    const MAX_BYTES: usize;
    /// Whether a document ends with a checksum of its own. A document whose key contains its hash needs none.
    const SEALED: bool;

    fn format(&self) -> u32;

    /// Checks the fields against each other.
    ///
    /// # Errors
    /// The first violation.
    fn validate(&self) -> Result<(), Flaw>;

    /// # Errors
    /// When the bytes are not a valid document.
    fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        #[derive(Deserialize)]
        struct Head {
            format: u32,
            document_crc64nvme: Option<IgnoredAny>,
        }
        let what = Self::WHAT;
        if bytes.len() > Self::MAX_BYTES {
            return Err(FormatError::TooLarge { what, bytes: bytes.len(), limit: Self::MAX_BYTES });
        }
        let is_sealed = check_seal(bytes).map_err(|source| FormatError::Seal { what, source })?;
        // Reads the number alone first: the fields of a newer format may be unknown.
        let head: Head = serde_json::from_slice(bytes).map_err(|source| FormatError::json(what, source))?;
        if head.document_crc64nvme.is_some() && !is_sealed {
            return Err(FormatError::SealElsewhere { what });
        }
        if head.format == 0 || head.format > FORMAT_NEWEST {
            return Err(FormatError::Newer { what, found: head.format, supported: FORMAT_NEWEST });
        }
        let document: Self =
            serde_json::from_slice(bytes).map_err(|source| FormatError::json(what, source))?;
        document.validate().map_err(|flaw| FormatError::Meaning { what, flaw })?;
        Ok(document)
    }

    /// Encodes the exact bytes to store. Refuses to write what could not be read back.
    ///
    /// # Errors
    /// When the document breaks its own rules or its bound.
    fn encode(&self) -> Result<Vec<u8>, FormatError> {
        let what = Self::WHAT;
        self.validate().map_err(|flaw| FormatError::Meaning { what, flaw })?;
        let bytes = serde_json::to_vec(self).map_err(|source| FormatError::json(what, source))?;
        let bytes = if Self::SEALED { seal(bytes) } else { bytes };
        if bytes.len() > Self::MAX_BYTES {
            return Err(FormatError::TooLarge { what, bytes: bytes.len(), limit: Self::MAX_BYTES });
        }
        Ok(bytes)
    }
}

/// The reason why bytes are not the expected document.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    #[error("{what} has {bytes} bytes, and {limit} are read at most")]
    TooLarge { what: &'static str, bytes: usize, limit: usize },
    #[error("{what} ends too early; read it again, and if it stays so the store has lost bytes")]
    Truncated { what: &'static str, source: serde_json::Error },
    #[error("{what} is not JSON")]
    Syntax { what: &'static str, source: serde_json::Error },
    #[error("{what} is not what was written")]
    Seal { what: &'static str, source: BrokenSeal },
    #[error("{what} was written anew by something else: its checksum is not at its end")]
    SealElsewhere { what: &'static str },
    #[error("{what} has format {found}, and this build reads 1 to {supported}; use a newer build")]
    Newer { what: &'static str, found: u32, supported: u32 },
    #[error("{what} has a field that is missing or not what it should be")]
    Field { what: &'static str, source: serde_json::Error },
    #[error("{what} contradicts itself")]
    Meaning {
        what: &'static str,
        #[source]
        flaw: Flaw,
    },
    #[error("{what} hashes to {found}, and its name says {named}")]
    Hash { what: &'static str, named: String, found: String },
}

impl FormatError {
    fn json(what: &'static str, source: serde_json::Error) -> Self {
        match source.classify() {
            serde_json::error::Category::Eof => Self::Truncated { what, source },
            serde_json::error::Category::Data => Self::Field { what, source },
            serde_json::error::Category::Syntax | serde_json::error::Category::Io => {
                Self::Syntax { what, source }
            }
        }
    }
}

/// A contradiction between the fields of a document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Flaw {
    #[error("{path} is named twice")]
    PathTwice { path: String },
    #[error("{path} lies below {file}, which is not a directory")]
    BelowFile { path: String, file: String },
    #[error("{path} is outside {version}")]
    Outside { path: String, version: String },
    #[error("{path} has {size_bytes} bytes, and its parts do not make them: {why}")]
    Parts { path: String, size_bytes: u64, why: &'static str },
    #[error("key {key} is used twice")]
    KeyTwice { key: String },
    #[error("{path} has key {found}, and belongs under {expected}")]
    WrongKey { path: String, found: String, expected: String },
    #[error("{path} has {size_bytes} bytes, and at most {limit} can be")]
    Size { path: String, size_bytes: u64, limit: u64 },
    #[error("{path} has {found} chunk checksums, and {size_bytes} bytes make {expected}")]
    ChunkCount { path: String, size_bytes: u64, found: u64, expected: u64 },
    #[error("{path} has {found} lengths of encoded chunks, and {size_bytes} bytes make {expected}")]
    EncodedCount { path: String, size_bytes: u64, found: u64, expected: u64 },
    #[error("chunk {chunk} of {path} has {found} bytes encoded, and has 1 to {limit}")]
    EncodedLength { path: String, chunk: u64, found: u64, limit: u64 },
    #[error("{path} is encoded, and a document of format {format} cannot say so")]
    EncodedFormat { path: String, format: u32 },
    #[error("the chunks of {path} combine to {combined}, and the whole is said to be {whole}")]
    ChunkSum { path: String, combined: String, whole: String },
    #[error("chunks of {found} bytes, and this build cuts at {expected}")]
    ChunkSize { found: u64, expected: u64 },
    #[error("the hard link {path} leads to {to}, which is no file of the same document")]
    LinkTarget { path: String, to: String },
    #[error("a part of a checkpoint claims to be complete by {evidence}")]
    PartialClaim { evidence: String },
    #[error("{path} was sealed 0 times")]
    NeverSealed { path: String },
    #[error("{file} is named with two seals")]
    TwoSeals { file: String },
    #[error("participant {node} is named twice")]
    ParticipantTwice { node: String },
    #[error("{path} is of incarnation {incarnation}, which is no participant's")]
    Stranger { path: String, incarnation: String },
    #[error("a decision to {decision} {problem}")]
    Decision { decision: &'static str, problem: &'static str },
    #[error("{field} is {found}, and {expected} belongs there")]
    Mismatch { field: &'static str, found: String, expected: String },
    #[error("the record lists {path}, and no participant prepared it")]
    NotPrepared { path: String },
    #[error("a participant prepared {path} as {found}, and the record says {expected}")]
    PreparedOther { path: String, found: String, expected: String },
    #[error("{field} holds nothing")]
    Empty { field: &'static str },
    #[error("a path is not one: {0}")]
    Path(#[from] PathProblem),
}

/// Refuses a field that differs from another document or the key.
///
/// # Errors
/// `Flaw::Mismatch` when the two differ.
pub(crate) fn expect_same<T: PartialEq + std::fmt::Display>(
    field: &'static str,
    found: &T,
    expected: &T,
) -> Result<(), Flaw> {
    if found == expected {
        return Ok(());
    }
    Err(Flaw::Mismatch { field, found: found.to_string(), expected: expected.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documents::PinDocument;

    fn pin() -> PinDocument {
        PinDocument { format: FORMAT, pinned: true, by: "a person".into(), at_ns: 7 }
    }

    #[test]
    fn an_answer_that_something_else_made_up_is_no_document() {
        let answers: [&[u8]; 6] = [
            b"",
            b"<html>login</html>",
            br#"{"error":"please log in"}"#,
            br#"{"format":"html"}"#,
            br#"{"format":0}"#,
            br#"{"format":1,"run":"r""#,
        ];
        for answer in answers {
            assert!(!is_document(answer), "{}", String::from_utf8_lossy(answer));
        }
        assert!(is_document(br#"{"format":1,"run":"r"}"#));
        assert!(is_document(br#"{"later":[],"format":99}"#), "a newer build wrote it");
    }

    #[test]
    fn a_sealed_document_ends_with_the_checksum_of_its_exact_bytes() {
        let text = String::from_utf8(pin().encode().unwrap()).unwrap();
        let before = r#"{"format":1,"pinned":true,"by":"a person","at_ns":7"#;
        let sum = Crc64::of(before.as_bytes());
        assert_eq!(text, format!(r#"{before},"document_crc64nvme":"{sum}"}}"#));
        assert_eq!(PinDocument::parse(text.as_bytes()).unwrap(), pin());
    }

    #[test]
    fn one_of_an_older_build_has_none_and_is_believed() {
        let text = serde_json::to_vec(&pin()).unwrap();
        assert_eq!(check_seal(&text), Ok(false));
        assert_eq!(PinDocument::parse(&text).unwrap(), pin());
    }

    #[test]
    fn no_flipped_bit_changes_what_is_believed() {
        let good = pin().encode().unwrap();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1_u8 << (bit % 8);
            // In the name of the field itself: the rest is what was written.
            if let Ok(found) = PinDocument::parse(&bad) {
                assert_eq!(found, pin(), "{}", String::from_utf8_lossy(&bad));
            }
        }
        let changed = String::from_utf8(good).unwrap().replace("true", "false");
        assert!(matches!(PinDocument::parse(changed.as_bytes()), Err(FormatError::Seal { .. })));
    }

    #[test]
    fn one_that_was_written_anew_around_its_checksum_is_refused() {
        let spaced = [pin().encode().unwrap(), b"\n".to_vec()].concat();
        assert!(matches!(PinDocument::parse(&spaced), Err(FormatError::SealElsewhere { .. })));
    }
}

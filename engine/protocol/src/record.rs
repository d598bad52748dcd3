//! `attempt.json`: the record of a complete version, the first object of an attempt.
//!
//! Owns: the record's fields and the checks between them. Does not own: when a version is complete (`evidence`), the order of the commit
//! (`checkpoint`).

use crate::checksum::Crc64;
use crate::format::{Document, Flaw, MAX_DOCUMENT_BYTES};
use crate::id::{AttemptId, Epoch, FileId, SealNumber, Step};
use crate::key::{NodeLife, VersionId};
use crate::path::RelPath;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Largest file, in bytes: the limit of a signed 64-bit offset.
pub const MAX_FILE_BYTES: u64 = i64::MAX as u64;

/// The reason why a version counts as complete; `Quiescence` alone does not suffice for a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// A marker that the framework writes after a barrier over all ranks.
    Marker,
    /// The framework's own index, published after every file that it names.
    Index,
    /// As many files as their names, or the size of the job, require.
    Count,
    /// The same names as the session's previous version, from the same writers, none of which died.
    History,
    /// The only process of its session, or the only one that wrote a file by itself, has closed every file that it wrote, and the settle
    /// time has passed.
    OneProcess,
    /// `ckptctl commit`, the attribute, or `ckptctl flush --wait`.
    Told,
    /// Every writer of this version has begun a later one.
    Succeeded,
    /// Nothing happens any more. Such a version is uploaded and prepared, not committed.
    Quiescence,
}

impl Evidence {
    /// Whether a version with this evidence may be committed.
    #[must_use]
    pub fn commits(self) -> bool {
        self != Self::Quiescence
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Marker => "marker",
            Self::Index => "index",
            Self::Count => "count",
            Self::History => "history",
            Self::OneProcess => "one_process",
            Self::Told => "told",
            Self::Succeeded => "succeeded",
            Self::Quiescence => "quiescence",
        })
    }
}

/// The immutable list of a complete version. Only a record defines "every file".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub format: u32,
    #[serde(flatten)]
    pub version: VersionId,
    pub attempt: AttemptId,
    /// `null` if the framework's names carry no step.
    pub step: Option<Step>,
    /// The rule that recognised the version, as `ls` shows it.
    pub framework: String,
    pub evidence: Evidence,
    /// The evidence in one sentence for people.
    pub evidence_detail: String,
    pub epoch: Epoch,
    /// CLOCK_REALTIME when the last of its files got its bytes and its name; see `lineage::stamp`.
    pub completed_at_ns: i64,
    pub participants: Vec<NodeLife>,
    pub files: Vec<RecordFile>,
    /// Whether the version is known to be only a part: files were missing, open or cut when the daemon ended; `evidence_detail` names them.
    /// Such a version is kept for its bytes. A request to make everything durable (`ckptctl flush --wait`) does not make it whole.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// Whether something speaks against a version that stays visible. A file contradicts its own format, a process that may have been in
    /// the middle of the version failed, or a live program may have added to it. The version is kept as it is, and visible. Only an
    /// administrator's word commits it: a later daemon no longer knows what spoke against it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub doubted: bool,
}

/// A file of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordFile {
    /// Path below the mount.
    pub path: RelPath,
    pub file: FileId,
    pub seal: SealNumber,
    pub size_bytes: u64,
    pub crc64nvme: Crc64,
}

impl Document for Record {
    const WHAT: &'static str = "a record (attempt.json)";
    const MAX_BYTES: usize = MAX_DOCUMENT_BYTES;
    const SEALED: bool = true;

    fn format(&self) -> u32 {
        self.format
    }

    fn validate(&self) -> Result<(), Flaw> {
        if self.files.is_empty() {
            return Err(Flaw::Empty { field: "files" });
        }
        if self.participants.is_empty() {
            return Err(Flaw::Empty { field: "participants" });
        }
        if self.partial && self.evidence.commits() {
            return Err(Flaw::PartialClaim { evidence: self.evidence.to_string() });
        }
        let mut lives = BTreeSet::new();
        for life in &self.participants {
            if !lives.insert(life.incarnation) {
                return Err(Flaw::ParticipantTwice { node: life.to_string() });
            }
        }
        let mut paths = BTreeSet::new();
        let mut seals = BTreeMap::new();
        for entry in &self.files {
            let path = || entry.path.to_string();
            check_size(&entry.path, entry.size_bytes)?;
            if entry.seal == SealNumber(0) {
                return Err(Flaw::NeverSealed { path: path() });
            }
            if self.version.relative(&entry.path).is_none() {
                return Err(Flaw::Outside { path: path(), version: self.version.to_string() });
            }
            if !paths.insert(&entry.path) {
                return Err(Flaw::PathTwice { path: path() });
            }
            if !lives.contains(&entry.file.incarnation) {
                let incarnation = format!("{:016x}", entry.file.incarnation.0);
                return Err(Flaw::Stranger { path: path(), incarnation });
            }
            // A file may have several names, but only one state of its bytes is part of a version.
            if *seals.entry(entry.file).or_insert(entry.seal) != entry.seal {
                return Err(Flaw::TwoSeals { file: entry.file.to_string() });
            }
        }
        Ok(())
    }
}

impl Record {
    /// Returns the sum over all files.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, entry| sum.saturating_add(entry.size_bytes))
    }
}

/// # Errors
/// `Flaw::Size` beyond the limit of an offset.
pub(crate) fn check_size(path: &RelPath, size_bytes: u64) -> Result<(), Flaw> {
    if size_bytes > MAX_FILE_BYTES {
        return Err(Flaw::Size { path: path.to_string(), size_bytes, limit: MAX_FILE_BYTES });
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::format::{FORMAT, FormatError};
    use crate::id::{FileCounter, Incarnation, Timeline, Version};
    use crate::path::{CheckpointName, RunPath};

    pub(crate) fn path(text: &str) -> RelPath {
        RelPath::new(text).unwrap()
    }

    pub(crate) fn life() -> NodeLife {
        NodeLife { node: "n1".parse().unwrap(), incarnation: Incarnation(7) }
    }

    pub(crate) fn version() -> VersionId {
        VersionId {
            run: RunPath::new(path("r")).unwrap(),
            directory: CheckpointName::new("step-1").unwrap(),
            timeline: Timeline(0),
            version: Version(1),
        }
    }

    pub(crate) fn record() -> Record {
        let file = |counter, name: &str| RecordFile {
            path: path(name),
            file: FileId { incarnation: Incarnation(7), counter: FileCounter(counter) },
            seal: SealNumber(1),
            size_bytes: 0,
            crc64nvme: Crc64(0),
        };
        Record {
            format: FORMAT,
            version: version(),
            attempt: AttemptId(5),
            step: Some(Step(1)),
            framework: "dcp".into(),
            evidence: Evidence::Index,
            evidence_detail: String::new(),
            epoch: Epoch(1),
            completed_at_ns: 1,
            participants: vec![life()],
            files: vec![file(1, "r/step-1/.metadata"), file(2, "r/step-1/__0_0.distcp")],
            partial: false,
            doubted: false,
        }
    }

    #[test]
    fn a_record_is_read_back_as_it_was_written() {
        let bytes = record().encode().unwrap();
        assert_eq!(Record::parse(&bytes).unwrap(), record());
        assert!(!String::from_utf8(bytes).unwrap().contains("partial"), "said only where it is so");
        let partial = Record { partial: true, evidence: Evidence::Quiescence, ..record() };
        assert_eq!(Record::parse(&partial.encode().unwrap()).unwrap(), partial);
        let doubted = Record { doubted: true, partial: false, ..partial.clone() };
        assert_eq!(Record::parse(&doubted.encode().unwrap()).unwrap(), doubted);
        let claims = Record { evidence: Evidence::Index, ..partial };
        assert!(claims.encode().is_err(), "a part is never complete");
    }

    #[test]
    fn a_broken_record_is_refused_and_says_why() {
        let bytes = record().encode().unwrap();
        assert!(matches!(Record::parse(&bytes[..bytes.len() - 1]), Err(FormatError::Truncated { .. })));
        assert!(matches!(Record::parse(b"{]"), Err(FormatError::Syntax { .. })));
        let sealed = String::from_utf8(bytes).unwrap();
        let parse = |from: &str, to: &str| Record::parse(sealed.replace(from, to).as_bytes()).unwrap_err();
        assert!(matches!(parse("\"format\":1", "\"format\":1 "), FormatError::Seal { .. }));
        // As one that was written before documents had a checksum.
        let (text, _) = sealed.split_once(",\"document_crc64nvme\"").unwrap();
        let text = format!("{text}}}");
        let parse = |from: &str, to: &str| {
            assert!(text.contains(from));
            Record::parse(text.replace(from, to).as_bytes()).unwrap_err()
        };
        assert!(matches!(parse("\"format\":1", "\"format\":4"), FormatError::Newer { found: 4, .. }));
        assert!(matches!(parse("\"size_bytes\":0", "\"size_bytes\":-1"), FormatError::Field { .. }));
        assert!(matches!(
            parse("\"size_bytes\":0", "\"size_bytes\":18446744073709551616"),
            FormatError::Field { .. }
        ));
        assert!(matches!(
            parse("\"size_bytes\":0", "\"size_bytes\":9223372036854775808"),
            FormatError::Meaning { flaw: Flaw::Size { .. }, .. }
        ));
        assert!(matches!(parse("r/step-1/.metadata", "r/../etc/passwd"), FormatError::Field { .. }));
        assert!(matches!(
            parse("r/step-1/.metadata", "other/x"),
            FormatError::Meaning { flaw: Flaw::Outside { .. }, .. }
        ));
        assert!(matches!(
            parse("r/step-1/.metadata", "r/step-1/__0_0.distcp"),
            FormatError::Meaning { flaw: Flaw::PathTwice { .. }, .. }
        ));
        assert!(matches!(
            parse("\"incarnation\":\"0000000000000007\"", "\"incarnation\":\"0000000000000008\""),
            FormatError::Meaning { flaw: Flaw::Stranger { .. }, .. }
        ));
    }
}

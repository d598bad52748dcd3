//! The manifest, which describes a committed version file by file, under the hash of its own bytes; and the prepared
//! markers that it is joined from.
//!
//! Owns: their fields, the checks on them, how they join. Does not own: who writes them and when (`checkpoint`).

use crate::checksum::Crc64;
use crate::encoding::Encoding;
use crate::format::{Document, FORMAT_ENCODED, Flaw, FormatError, MAX_DOCUMENT_BYTES, expect_same};
use crate::id::{AttemptId, ContentHash, Epoch, FileId, SealNumber, Step};
use crate::key::{Key, NodeLife, Part, PathOrHash, VersionId, is_foreign};
use crate::layout::{CHUNK_BYTES, chunk_count};
use crate::path::{RawText, RelPath};
use crate::record::{Evidence, Record, RecordFile, check_size};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// The description of a committed version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: u32,
    #[serde(flatten)]
    pub version: VersionId,
    pub attempt: AttemptId,
    pub step: Option<Step>,
    pub framework: String,
    pub evidence: Evidence,
    pub evidence_detail: String,
    pub epoch: Epoch,
    pub completed_at_ns: i64,
    pub chunk_bytes: u64,
    pub participants: Vec<NodeLife>,
    /// Sorted by path, as are the other lists.
    pub files: Vec<ManifestFile>,
    pub directories: Vec<Directory>,
    pub symlinks: Vec<Symlink>,
    pub hard_links: Vec<HardLink>,
}

/// A file: the place of its bytes, their checksums, and its attributes in the tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    /// Path below the mount.
    pub path: RelPath,
    /// Key below the prefix of the store's URL: the key that the path makes, or, for imported files, an object that
    /// another program wrote.
    pub key: String,
    pub size_bytes: u64,
    pub crc64nvme: Crc64,
    /// Checksums, one for each chunk of `chunk_bytes`.
    pub chunks: Vec<Crc64>,
    /// Left out if the object is the file's bytes as they are. Checksums are always of the file's bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
    pub etag: Option<String>,
    pub file: FileId,
    pub seal: SealNumber,
    #[serde(flatten)]
    pub attributes: Attributes,
}

impl ManifestFile {
    /// Returns the file as a record lists it.
    #[must_use]
    pub fn entry(&self) -> RecordFile {
        RecordFile {
            path: self.path.clone(),
            file: self.file,
            seal: self.seal,
            size_bytes: self.size_bytes,
            crc64nvme: self.crc64nvme,
        }
    }
}

/// Attributes of a file or directory in the tree.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Attributes {
    /// Permission bits, without the file type.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime_ns: i64,
    /// User attributes: names escaped, values base64.
    #[serde(default)]
    pub xattrs: BTreeMap<RawText, Base64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory {
    pub path: RelPath,
    #[serde(flatten)]
    pub attributes: Attributes,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Symlink {
    pub path: RelPath,
    /// The target as the user wrote it; it may lead anywhere, and only the user's kernel follows it.
    pub target: RawText,
    pub uid: u32,
    pub gid: u32,
    pub mtime_ns: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardLink {
    pub path: RelPath,
    /// Path of a file in the same document.
    pub to: RelPath,
}

/// Bytes that JSON carries as base64.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Base64(pub Vec<u8>);

impl Serialize for Base64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<str>::deserialize(deserializer)?;
        STANDARD.decode(text.as_bytes()).map(Self).map_err(serde::de::Error::custom)
    }
}

/// `prepared-<node>-<incarnation>.json`: all files that one participant has in the attempt are in Tier-3.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared {
    pub format: u32,
    #[serde(flatten)]
    pub version: VersionId,
    pub attempt: AttemptId,
    pub epoch: Epoch,
    /// The participant whose files these are.
    #[serde(flatten)]
    pub life: NodeLife,
    /// The node that uploaded the files, if the participant was lost before it could.
    pub by: Option<NodeLife>,
    pub chunk_bytes: u64,
    pub files: Vec<ManifestFile>,
    pub directories: Vec<Directory>,
    pub symlinks: Vec<Symlink>,
    pub hard_links: Vec<HardLink>,
}

/// A manifest whose bytes hash to its name and whose fields agree with each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidatedManifest {
    manifest: Manifest,
    hash: ContentHash,
}

impl ValidatedManifest {
    /// # Errors
    /// When the bytes do not hash to `named`, or are not a manifest that holds together.
    pub fn parse(bytes: &[u8], named: &ContentHash) -> Result<Self, FormatError> {
        let hash = ContentHash::of(bytes);
        if hash != *named {
            let (named, found) = (named.to_string(), hash.to_string());
            return Err(FormatError::Hash { what: Manifest::WHAT, named, found });
        }
        Ok(Self { manifest: Manifest::parse(bytes)?, hash })
    }

    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    #[must_use]
    pub fn hash(&self) -> ContentHash {
        self.hash
    }

    #[must_use]
    pub fn into_manifest(self) -> Manifest {
        self.manifest
    }
}

impl Manifest {
    /// Joins a record and the prepared markers of all its participants. The result does not depend on the order of the
    /// markers.
    ///
    /// # Errors
    /// When a marker is of another attempt, a file of the record was not prepared or was prepared otherwise, or the result
    /// breaks a rule.
    pub fn join(record: &Record, prepared: &[Prepared]) -> Result<Self, Flaw> {
        let mut files = BTreeMap::new();
        let mut directories = BTreeMap::new();
        let mut symlinks = BTreeMap::new();
        let mut hard_links = BTreeMap::new();
        for marker in prepared {
            expect_same("version", &marker.version, &record.version)?;
            expect_same("attempt", &marker.attempt, &record.attempt)?;
            for file in &marker.files {
                if files.insert(file.path.clone(), file.clone()).is_some() {
                    return Err(Flaw::PathTwice { path: file.path.to_string() });
                }
            }
            // Every participant sees the same directories; the newest times are those of the last writer.
            for directory in &marker.directories {
                let entry = directories.entry(directory.path.clone()).or_insert_with(|| directory.clone());
                if directory.attributes.mtime_ns > entry.attributes.mtime_ns {
                    *entry = directory.clone();
                }
            }
            symlinks.extend(marker.symlinks.iter().map(|link| (link.path.clone(), link.clone())));
            hard_links.extend(marker.hard_links.iter().map(|link| (link.path.clone(), link.clone())));
        }
        let mut listed = Vec::with_capacity(record.files.len());
        for entry in &record.files {
            // A second name of a file is a hard link in the manifest.
            if hard_links.contains_key(&entry.path) {
                continue;
            }
            let file = files
                .remove(&entry.path)
                .ok_or_else(|| Flaw::NotPrepared { path: entry.path.to_string() })?;
            let says = |file: FileId, seal, size: u64, crc| format!("({file}, {seal}), {size} bytes, {crc}");
            let found = says(file.file, file.seal, file.size_bytes, file.crc64nvme);
            let expected = says(entry.file, entry.seal, entry.size_bytes, entry.crc64nvme);
            if found != expected {
                return Err(Flaw::PreparedOther { path: entry.path.to_string(), found, expected });
            }
            listed.push(file);
        }
        listed.sort_by(|a, b| a.path.cmp(&b.path));
        let manifest = Self {
            format: format_of(&listed, record.format),
            version: record.version.clone(),
            attempt: record.attempt,
            step: record.step,
            framework: record.framework.clone(),
            evidence: record.evidence,
            evidence_detail: record.evidence_detail.clone(),
            epoch: record.epoch,
            completed_at_ns: record.completed_at_ns,
            chunk_bytes: CHUNK_BYTES,
            participants: record.participants.clone(),
            files: listed,
            directories: directories.into_values().collect(),
            symlinks: symlinks.into_values().collect(),
            hard_links: hard_links.into_values().collect(),
        };
        manifest.validate()?;
        Ok(manifest)
    }

    /// Returns the exact bytes and the hash that names them.
    ///
    /// # Errors
    /// When the manifest breaks a rule or is too large.
    pub fn encode_named(&self) -> Result<(Vec<u8>, ContentHash), FormatError> {
        let bytes = self.encode()?;
        let hash = ContentHash::of(&bytes);
        Ok((bytes, hash))
    }

    /// Whether the bytes are in objects that another program wrote.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        self.files.iter().any(|file| is_foreign(&file.key))
    }

    /// Returns the sum over all files.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.size_bytes))
    }
}

impl Document for Manifest {
    const WHAT: &'static str = "a manifest";
    const MAX_BYTES: usize = MAX_DOCUMENT_BYTES;
    // The key contains the hash of the exact bytes.
    const SEALED: bool = false;

    fn format(&self) -> u32 {
        self.format
    }

    fn validate(&self) -> Result<(), Flaw> {
        if self.files.is_empty() {
            return Err(Flaw::Empty { field: "files" });
        }
        let Self { format, version, attempt, chunk_bytes, files, directories, symlinks, hard_links, .. } =
            self;
        Content { format: *format, chunk_bytes: *chunk_bytes, files, directories, symlinks, hard_links }
            .validate(version, *attempt)
    }
}

impl Document for Prepared {
    const WHAT: &'static str = "a prepared marker";
    const MAX_BYTES: usize = MAX_DOCUMENT_BYTES;
    const SEALED: bool = true;

    fn format(&self) -> u32 {
        self.format
    }

    fn validate(&self) -> Result<(), Flaw> {
        let Self { format, version, attempt, chunk_bytes, files, directories, symlinks, hard_links, .. } =
            self;
        Content { format: *format, chunk_bytes: *chunk_bytes, files, directories, symlinks, hard_links }
            .validate(version, *attempt)
    }
}

/// The fields that manifests and prepared markers share.
struct Content<'a> {
    format: u32,
    chunk_bytes: u64,
    files: &'a [ManifestFile],
    directories: &'a [Directory],
    symlinks: &'a [Symlink],
    hard_links: &'a [HardLink],
}

impl Content<'_> {
    fn validate(&self, version: &VersionId, attempt: AttemptId) -> Result<(), Flaw> {
        if self.chunk_bytes != CHUNK_BYTES {
            return Err(Flaw::ChunkSize { found: self.chunk_bytes, expected: CHUNK_BYTES });
        }
        let mut keys = BTreeSet::new();
        for file in self.files {
            check_file(file, self.format)?;
            check_key(file, version, attempt)?;
            if !keys.insert(&file.key) {
                return Err(Flaw::KeyTwice { key: file.key.clone() });
            }
        }
        let mut paths: BTreeMap<&RelPath, bool> = BTreeMap::new();
        let named = (self.files.iter().map(|f| (&f.path, false)))
            .chain(self.directories.iter().map(|d| (&d.path, true)))
            .chain(self.symlinks.iter().map(|s| (&s.path, false)))
            .chain(self.hard_links.iter().map(|h| (&h.path, false)));
        for (path, is_directory) in named {
            // The checkpoint's own directory is listed too: it is not below itself, but it is below the run.
            if version.relative(path).is_none() {
                return Err(Flaw::Outside { path: path.to_string(), version: version.to_string() });
            }
            if paths.insert(path, is_directory).is_some() {
                return Err(Flaw::PathTwice { path: path.to_string() });
            }
        }
        for path in paths.keys() {
            let mut above = path.parent();
            while let Some(directory) = above {
                if paths.get(&directory) == Some(&false) {
                    return Err(Flaw::BelowFile { path: path.to_string(), file: directory.to_string() });
                }
                above = directory.parent();
            }
        }
        let files: BTreeSet<_> = self.files.iter().map(|file| &file.path).collect();
        match self.hard_links.iter().find(|link| !files.contains(&link.to)) {
            Some(link) => Err(Flaw::LinkTarget { path: link.path.to_string(), to: link.to.to_string() }),
            None => Ok(()),
        }
    }
}

/// Returns the format in which a document can list these files; no older than `least`.
#[must_use]
pub fn format_of(files: &[ManifestFile], least: u32) -> u32 {
    if files.iter().any(|file| file.encoding.is_some()) { least.max(FORMAT_ENCODED) } else { least }
}

/// Checks size, seal, the places of encoded chunks, and the sum of the chunks, which costs no reading of bytes.
pub(crate) fn check_file(file: &ManifestFile, format: u32) -> Result<(), Flaw> {
    let path = || file.path.to_string();
    if let Some(encoding) = &file.encoding {
        if format < FORMAT_ENCODED {
            return Err(Flaw::EncodedFormat { path: path(), format });
        }
        encoding.check(&file.path, file.size_bytes)?;
    }
    check_size(&file.path, file.size_bytes)?;
    if file.seal == SealNumber(0) {
        return Err(Flaw::NeverSealed { path: path() });
    }
    let Some(combined) = Crc64::combine_all(&file.chunks, file.size_bytes) else {
        return Err(Flaw::ChunkCount {
            path: path(),
            size_bytes: file.size_bytes,
            found: file.chunks.len() as u64,
            expected: chunk_count(file.size_bytes),
        });
    };
    if combined != file.crc64nvme {
        let (combined, whole) = (combined.to_string(), file.crc64nvme.to_string());
        return Err(Flaw::ChunkSum { path: path(), combined, whole });
    }
    Ok(())
}

/// Checks a file's key. The key is the one that its path makes in this attempt, possibly in a stand-in's part. Otherwise
/// it is no key of ours: an imported object stays where another program put it, out of the reach of every delete.
fn check_key(file: &ManifestFile, version: &VersionId, attempt: AttemptId) -> Result<(), Flaw> {
    let stand_in = match file.key.parse() {
        Ok(Key::Data { part, relative: PathOrHash::Path(_) | PathOrHash::Hash(_), .. }) => part.stand_in,
        _ => None,
    };
    let Some(expected) = Key::data(version, Part { attempt, stand_in }, &file.path) else {
        return Err(Flaw::Outside { path: file.path.to_string(), version: version.to_string() });
    };
    let expected = expected.to_string();
    if expected != file.key && !is_foreign(&file.key) {
        return Err(Flaw::WrongKey { path: file.path.to_string(), found: file.key.clone(), expected });
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::encoding::Codec;
    use crate::format::FORMAT;
    use crate::record::tests::{life, path, record, version};

    pub(crate) fn prepared(record: &Record) -> Prepared {
        let files = record.files.iter().map(|entry| ManifestFile {
            path: entry.path.clone(),
            key: Key::data(&record.version, record.attempt.into(), &entry.path).unwrap().to_string(),
            size_bytes: entry.size_bytes,
            crc64nvme: entry.crc64nvme,
            chunks: Vec::new(),
            encoding: None,
            etag: None,
            file: entry.file,
            seal: entry.seal,
            attributes: Attributes::default(),
        });
        Prepared {
            format: FORMAT,
            version: record.version.clone(),
            attempt: record.attempt,
            epoch: record.epoch,
            life: life(),
            by: None,
            chunk_bytes: CHUNK_BYTES,
            files: files.collect(),
            directories: vec![Directory { path: path("r/step-1"), attributes: Attributes::default() }],
            symlinks: Vec::new(),
            hard_links: Vec::new(),
        }
    }

    pub(crate) fn manifest() -> Manifest {
        Manifest::join(&record(), &[prepared(&record())]).unwrap()
    }

    #[test]
    fn a_manifest_is_read_back_under_its_hash_only() {
        let (bytes, hash) = manifest().encode_named().unwrap();
        assert_eq!(*ValidatedManifest::parse(&bytes, &hash).unwrap().manifest(), manifest());
        let mut other = bytes.clone();
        *other.last_mut().unwrap() = b' ';
        assert!(matches!(ValidatedManifest::parse(&other, &hash), Err(FormatError::Hash { .. })));
        let marker = prepared(&record()).encode().unwrap();
        assert_eq!(Prepared::parse(&marker).unwrap(), prepared(&record()));
    }

    #[test]
    fn a_manifest_holds_exactly_what_the_record_lists() {
        let mut missing = prepared(&record());
        let gone = missing.files.pop().unwrap();
        assert!(matches!(Manifest::join(&record(), &[missing]), Err(Flaw::NotPrepared { .. })));
        let mut other = prepared(&record());
        other.files[0].seal = SealNumber(2);
        assert!(matches!(Manifest::join(&record(), &[other]), Err(Flaw::PreparedOther { .. })));
        let mut twice = prepared(&record());
        twice.files.push(gone);
        assert!(matches!(Manifest::join(&record(), &[twice]), Err(Flaw::PathTwice { .. })));
        let mut stranger = prepared(&record());
        stranger.attempt = AttemptId(6);
        assert!(matches!(Manifest::join(&record(), &[stranger]), Err(Flaw::Mismatch { .. })));
    }

    #[test]
    fn an_encoded_file_raises_the_format_and_only_that_format_may_list_one() {
        let plain = String::from_utf8(manifest().encode().unwrap()).unwrap();
        assert!(plain.starts_with("{\"format\":1,") && !plain.contains("encoding"), "as it always was");

        let mut marker = prepared(&record());
        let encoding = Encoding { codec: Codec::Planes, lengths: Vec::new() };
        marker.files[0].encoding = Some(encoding);
        assert!(matches!(marker.validate(), Err(Flaw::EncodedFormat { format: 1, .. })));
        marker.format = format_of(&marker.files, FORMAT);
        assert_eq!(Prepared::parse(&marker.encode().unwrap()).unwrap(), marker);
        let joined = Manifest::join(&record(), &[marker.clone()]).unwrap();
        assert_eq!((joined.format, &joined.files[0].encoding), (FORMAT_ENCODED, &marker.files[0].encoding));
        let (bytes, hash) = joined.encode_named().unwrap();
        assert_eq!(*ValidatedManifest::parse(&bytes, &hash).unwrap().manifest(), joined);

        let mut lies = joined.clone();
        lies.files[0].encoding = Some(Encoding { codec: Codec::Zstd, lengths: vec![1] });
        assert!(matches!(lies.encode(), Err(FormatError::Meaning { flaw: Flaw::EncodedCount { .. }, .. })));
        let older = String::from_utf8(bytes).unwrap().replace("{\"format\":2,", "{\"format\":1,");
        assert!(matches!(
            Manifest::parse(older.as_bytes()),
            Err(FormatError::Meaning { flaw: Flaw::EncodedFormat { .. }, .. })
        ));
    }

    #[test]
    fn bytes_of_others_are_named_where_they_are() {
        let mut imported = manifest();
        assert!(!imported.is_foreign());
        imported.files[0].key = "old/run/checkpoint-1/model.safetensors".to_owned();
        assert!(imported.is_foreign());
        let (bytes, hash) = imported.encode_named().unwrap();
        assert_eq!(*ValidatedManifest::parse(&bytes, &hash).unwrap().manifest(), imported);
        imported.files[1].key = imported.files[0].key.clone();
        assert!(imported.validate().unwrap_err().to_string().contains("used twice"));
    }

    #[test]
    fn a_manifest_that_contradicts_itself_is_refused() {
        type Break = fn(&mut Manifest);
        let breaks: [(Break, &str); 11] = [
            (|m| m.files[0].size_bytes = 1, "0 chunk checksums"),
            (
                |m| {
                    m.files[0].size_bytes = 1;
                    m.files[0].chunks = vec![Crc64(1)];
                },
                "combine to",
            ),
            (|m| m.files[1].key = m.files[0].key.clone(), "belongs under"),
            (|m| m.files[1] = m.files[0].clone(), "used twice"),
            (|m| m.files[1].key = "r/step-1/v0.2/a-x/of-another-version".to_owned(), "belongs under"),
            (|m| m.files[1].key = "old/../r/x".to_owned(), "belongs under"),
            (|m| m.files[1].key = ".tidemark/loose/r/x/g-1".to_owned(), "belongs under"),
            (|m| m.directories[0].path = m.files[0].path.clone(), "named twice"),
            (|m| m.directories[0].path = path("elsewhere"), "outside"),
            (
                |m| {
                    m.directories[0].path = m.files[0].path.join(&path("x")).unwrap();
                },
                "which is not a directory",
            ),
            (
                |m| m.hard_links.push(HardLink { path: path("r/step-1/l"), to: path("r/step-1/none") }),
                "no file of the same document",
            ),
        ];
        for (damage, message) in breaks {
            let mut manifest = manifest();
            damage(&mut manifest);
            let flaw = manifest.validate().unwrap_err().to_string();
            assert!(flaw.contains(message), "{flaw}");
        }
        assert_eq!(manifest().version, version());
    }
}

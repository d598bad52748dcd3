//! The smaller documents of Tier-3: loose files, the tree outside checkpoints, and the numbered series.
//!
//! Owns: their fields, and the checks between the fields. Does not own: their keys (`key`), when they are written.

use crate::format::{Document, FORMAT_PARTS, Flaw, MAX_DOCUMENT_BYTES, MAX_MARKER_BYTES};
use crate::id::{Epoch, FileId, Generation, SealNumber, Step, Timeline, Version};
use crate::key::{Key, NodeLife, VersionId, VersionRef};
use crate::loose::{Left, LoosePart, PARTS_MAX};
use crate::manifest::{Attributes, Base64, Directory, HardLink, ManifestFile, Symlink, check_file};
use crate::path::{RelPath, RunPath};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Largest document beside a loose file, in bytes: 1 TiB of chunks.
pub const MAX_SIDECAR_BYTES: usize = 4 << 20;

/// `g-<n>.json`: the description of generation `n` of a loose file. Written after the bytes: if the sidecar exists, the bytes
/// do too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LooseSidecar {
    pub format: u32,
    pub generation: Generation,
    pub epoch: Epoch,
    /// The session that wrote the file; orders conflicts.
    pub session: Option<String>,
    /// CLOCK_REALTIME of the close.
    pub closed_at_ns: i64,
    /// Left out if the last writers closed the file.
    #[serde(default, skip_serializing_if = "Left::is_closed")]
    pub left: Left,
    /// The generation that the file begins with, byte for byte; left out where this was not compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follows: Option<Generation>,
    /// The objects that hold the bytes, in order; left out if one object holds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<LoosePart>,
    #[serde(flatten)]
    pub file: ManifestFile,
}

impl Document for LooseSidecar {
    const WHAT: &'static str = "a loose file's sidecar";
    const MAX_BYTES: usize = MAX_SIDECAR_BYTES;
    const SEALED: bool = true;

    fn format(&self) -> u32 {
        self.format
    }

    fn validate(&self) -> Result<(), Flaw> {
        check_file(&self.file, self.format)?;
        if let Some(why) = self.flaw_of_parts() {
            let (path, size_bytes) = (self.file.path.to_string(), self.file.size_bytes);
            return Err(Flaw::Parts { path, size_bytes, why });
        }
        let (of_one, _) = Key::loose(&self.file.path, self.generation);
        let of_parts = Key::loose_parts(&self.file.path, self.generation);
        let key = if self.parts.is_empty() { Some(of_one) } else { of_parts };
        let expected = key.map_or_else(String::new, |key| key.to_string());
        if self.file.key == expected {
            return Ok(());
        }
        let (path, found) = (self.file.path.to_string(), self.file.key.clone());
        Err(Flaw::WrongKey { path, found, expected })
    }
}

impl LooseSidecar {
    fn flaw_of_parts(&self) -> Option<&'static str> {
        let parts = &self.parts;
        if parts.is_empty() {
            return None;
        }
        let whole = parts.iter().try_fold(0_u64, |sum, part| sum.checked_add(part.bytes));
        let rises = parts.windows(2).all(|two| two[0].generation < two[1].generation);
        let own = parts.last().is_some_and(|last| last.generation <= self.generation);
        match () {
            () if self.format < FORMAT_PARTS => Some("an older format has none"),
            () if parts.len() > PARTS_MAX => Some("there are too many"),
            () if !rises || !own => Some("their generations do not rise to its own"),
            () if parts.iter().any(|part| part.bytes == 0) => Some("one is empty"),
            () if whole != Some(self.file.size_bytes) => Some("they have another length"),
            () if self.file.encoding.is_some() => Some("they cannot be encoded"),
            () => None,
        }
    }
}

/// `tree/<n>`: the names outside checkpoints, and the wishes to delete. The highest number counts. Where the document says
/// nothing, the markers and sidecars count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeDocument {
    pub format: u32,
    pub epoch: Epoch,
    /// The root directory's attributes; left out by builds that did not keep them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<Attributes>,
    pub directories: Vec<Directory>,
    pub symlinks: Vec<Symlink>,
    /// Pipes, sockets and devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub specials: Vec<SpecialFile>,
    /// Further names of everything but directories.
    pub hard_links: Vec<HardLink>,
    /// Files whose attributes differ from their sidecar or manifest: they changed after the bytes were in Tier-3.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attributes: Vec<FileAttributes>,
    /// Versions that the tree shows although they are not the newest committed versions of their checkpoints, because they
    /// settled later.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shown_versions: Vec<VersionId>,
    /// Checkpoints whose names the job removed from the tree, each up to and with this version, settled ones too. Their bytes
    /// stay until retention retires them.
    pub removed_versions: Vec<VersionId>,
    /// Names that the job removed from a checkpoint whose other names stay, with the file that each named: the same name
    /// saved again means another file or seal.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed_files: Vec<RemovedFile>,
    /// Loose files that the job removed, each with the last generation that the removal covers.
    pub removed_loose: Vec<RemovedLoose>,
    /// Metrics of committed versions that differ from their manifests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub metrics: Vec<VersionMetric>,
}

/// A value of `user.tidemark.metric`, which may be set long after the commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionMetric {
    #[serde(flatten)]
    pub version: VersionId,
    /// The checkpoint's name that has the attribute.
    pub path: RelPath,
    /// Empty if the attribute was removed.
    pub value: Base64,
}

/// A name without bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecialFile {
    pub path: RelPath,
    pub kind: SpecialKind,
    /// A device's number, as Linux has it; 0 for the others.
    #[serde(default)]
    pub device: u32,
    #[serde(flatten)]
    pub attributes: Attributes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpecialKind {
    Pipe,
    Socket,
    CharacterDevice,
    BlockDevice,
}

/// A file's attributes in the tree, stored by the file's identity: they are the same under each of its names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileAttributes {
    pub file: FileId,
    pub seal: SealNumber,
    #[serde(flatten)]
    pub attributes: Attributes,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RemovedLoose {
    pub path: RelPath,
    pub generation: Generation,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RemovedFile {
    pub path: RelPath,
    pub file: FileId,
    pub seal: SealNumber,
}

impl Document for TreeDocument {
    const WHAT: &'static str = "a tree";
    const MAX_BYTES: usize = MAX_DOCUMENT_BYTES;
    const SEALED: bool = true;

    fn format(&self) -> u32 {
        self.format
    }

    fn validate(&self) -> Result<(), Flaw> {
        let mut paths = BTreeSet::new();
        let named = (self.directories.iter().map(|d| &d.path))
            .chain(self.symlinks.iter().map(|s| &s.path))
            .chain(self.specials.iter().map(|s| &s.path))
            .chain(self.hard_links.iter().map(|h| &h.path));
        for path in named {
            if !paths.insert(path) {
                return Err(Flaw::PathTwice { path: path.to_string() });
            }
        }
        let mut removed = BTreeSet::new();
        match self.removed_loose.iter().find(|loose| !removed.insert(&loose.path)) {
            Some(twice) => Err(Flaw::PathTwice { path: twice.path.to_string() }),
            None => Ok(()),
        }
    }
}

macro_rules! small_documents {
    ($($(#[$doc:meta])* $name:ident($what:literal) { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        pub struct $name {
            pub format: u32,
            $($(#[$field_doc])* pub $field: $kind,)*
        }

        impl Document for $name {
            const WHAT: &'static str = $what;
            const MAX_BYTES: usize = MAX_MARKER_BYTES;
            const SEALED: bool = true;

            fn format(&self) -> u32 {
                self.format
            }

            fn validate(&self) -> Result<(), Flaw> {
                Ok(())
            }
        }
    )*};
}

small_documents! {
    /// `epoch/<n>`: no coordinator with a lower epoch commits, retires or deletes any more. `n` is the epoch.
    EpochDocument("an epoch") { holder: NodeLife, }
    /// `members/<n>`: the nodes that may hold something.
    MembersDocument("a member list") { epoch: Epoch, members: Vec<NodeLife>, }
    /// `boundary-<run>/<n>`: the retired versions of the run; their `_RETIRED` came first.
    BoundaryDocument("a boundary") { run: RunPath, epoch: Epoch, retired: Vec<VersionRef>, }
    /// `timelines-<run>/<n>`: where timeline `n` left its parent. Durable before its first commit.
    TimelineDocument("a timeline") {
        run: RunPath,
        timeline: Timeline,
        parent: Timeline,
        /// The restored version; what the parent committed after it is not on this lineage.
        fork: Option<VersionRef>,
        epoch: Epoch,
    }
    /// `pins-<run>/…/<n>`: whether a version is pinned; the highest number counts.
    PinDocument("a pin") { pinned: bool, by: String, at_ns: i64, }
    /// `nonce`: shows several nodes that they share one store.
    NonceDocument("a nonce") { nonce: String, }
}

/// Names a version in messages: the step if there is one.
#[must_use]
pub fn describe(step: Option<Step>, timeline: Timeline, version: Version) -> String {
    step.map_or_else(
        || format!("v{timeline}.{version}"),
        |step| format!("step {step} (v{timeline}.{version})"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::FORMAT;
    use crate::id::SealNumber;
    use crate::record::tests::{path, record};

    #[test]
    fn a_sidecar_names_its_own_bytes() {
        let entry = &record().files[0];
        let mut sidecar = LooseSidecar {
            format: FORMAT,
            generation: Generation(3),
            epoch: Epoch(1),
            session: None,
            closed_at_ns: 5,
            left: Left::Closed,
            follows: None,
            parts: Vec::new(),
            file: ManifestFile {
                path: path("r/latest"),
                key: ".tidemark/loose/r/latest/g-3".into(),
                size_bytes: 0,
                crc64nvme: entry.crc64nvme,
                chunks: Vec::new(),
                encoding: None,
                etag: None,
                file: entry.file,
                seal: SealNumber(1),
                attributes: Attributes::default(),
            },
        };
        let bytes = sidecar.encode().unwrap();
        assert_eq!(LooseSidecar::parse(&bytes).unwrap(), sidecar);
        sidecar.generation = Generation(4);
        assert!(sidecar.encode().is_err(), "the key is generation 3's");
    }

    #[test]
    fn the_parts_of_a_loose_file_make_its_bytes() {
        let entry = &record().files[0];
        let part = |generation, bytes| LoosePart { generation: Generation(generation), bytes };
        let good = LooseSidecar {
            format: FORMAT_PARTS,
            generation: Generation(4),
            epoch: Epoch(1),
            session: None,
            closed_at_ns: 5,
            left: Left::Open,
            follows: Some(Generation(3)),
            parts: vec![part(1, 90), part(3, 6), part(4, 4)],
            file: ManifestFile {
                path: path("r/log.jsonl"),
                key: ".tidemark/loose/r/log.jsonl/g-4.parts".into(),
                size_bytes: 100,
                crc64nvme: entry.crc64nvme,
                chunks: vec![entry.crc64nvme],
                encoding: None,
                etag: None,
                file: entry.file,
                seal: SealNumber(1),
                attributes: Attributes::default(),
            },
        };
        assert_eq!(LooseSidecar::parse(&good.encode().unwrap()).unwrap(), good);
        let bad = |change: &dyn Fn(&mut LooseSidecar)| {
            let mut sidecar = good.clone();
            change(&mut sidecar);
            sidecar.encode().is_err()
        };
        assert!(!bad(&|sidecar| sidecar.parts[2].generation = Generation(4)));
        assert!(bad(&|sidecar| sidecar.format = FORMAT), "an old reader would look for one object");
        assert!(bad(&|sidecar| sidecar.parts[1].bytes = 7));
        assert!(bad(&|sidecar| sidecar.parts[1].bytes = u64::MAX));
        assert!(bad(&|sidecar| sidecar.parts.swap(0, 1)));
        assert!(bad(&|sidecar| sidecar.parts[2].generation = Generation(5)));
        assert!(bad(&|sidecar| sidecar.parts[0] = part(1, 0)));
        assert!(bad(&|sidecar| sidecar.parts.clear()));
        assert!(bad(&|sidecar| sidecar.file.key = ".tidemark/loose/r/log.jsonl/g-4".into()));
    }

    #[test]
    fn a_tree_names_each_path_once() {
        let removed = RemovedLoose { path: path("x"), generation: Generation(1) };
        let mut tree = TreeDocument {
            format: FORMAT,
            epoch: Epoch(1),
            root: None,
            directories: Vec::new(),
            symlinks: Vec::new(),
            specials: Vec::new(),
            hard_links: Vec::new(),
            attributes: Vec::new(),
            shown_versions: Vec::new(),
            removed_versions: Vec::new(),
            removed_files: vec![RemovedFile {
                path: path("y"),
                file: record().files[0].file,
                seal: SealNumber(1),
            }],
            removed_loose: vec![removed.clone()],
            metrics: Vec::new(),
        };
        let text = String::from_utf8(tree.encode().unwrap()).unwrap();
        let optional = ["metrics", "root", "specials", "attributes", "shown_versions"];
        assert!(!optional.iter().any(|field| text.contains(field)), "where there are some: {text}");
        tree.specials.push(SpecialFile {
            path: path("pipe"),
            kind: SpecialKind::Pipe,
            device: 0,
            attributes: Attributes::default(),
        });
        tree.root = Some(Attributes { mode: 0o700, ..Attributes::default() });
        tree.attributes.push(FileAttributes {
            file: record().files[0].file,
            seal: SealNumber(1),
            attributes: Attributes { mtime_ns: -1, ..Attributes::default() },
        });
        tree.shown_versions.push(record().version);
        tree.metrics.push(VersionMetric {
            version: record().version,
            path: path("r/step-1"),
            value: Base64(b"0.5".to_vec()),
        });
        assert_eq!(TreeDocument::parse(&tree.encode().unwrap()).unwrap(), tree);
        tree.removed_loose.push(removed);
        assert!(tree.encode().is_err());
    }
}

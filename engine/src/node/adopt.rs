//! Puts names from Tier-3 into the tree, before their bytes are there.
//!
//! Owns: the conversion of a document's entries into namespace entries. Does not own: which entries the tree shows (`recover`).

use crate::node::Shared;
use std::collections::BTreeMap;
use tidemark_namespace::{AdoptEntry, AdoptKind, FsError, NodeId, ObjectCopy};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::documents::LooseSidecar;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::layout::chunk_count;
use tidemark_protocol::manifest::{Attributes, Directory, ManifestFile};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::record::Record;

/// Mode that a symlink always shows on Linux.
pub(super) const SYMLINK_MODE: u32 = 0o777;

/// Records that a file is in Tier-3, so that memory may drop it. The daemon before may have died before it recorded that.
pub(super) fn note(shared: &Shared, file: &ManifestFile) {
    // Another version's copy of the same bytes is as good, and may outlast this one.
    if shared.namespace.hosts().has_object(file.file, file.seal) {
        return;
    }
    // False if the file is gone or has other bytes by now.
    let _ = shared.namespace.hosts().note_object(file.file, file.seal, ObjectCopy::of(file));
}

/// Puts one entry into the tree. Returns whether the name is in the tree now.
fn adopt(shared: &Shared, entry: &AdoptEntry) -> bool {
    is_there(&entry.path, shared.namespace.adoption().adopt(entry))
}

fn is_there(path: &[u8], adopted: Result<NodeId, FsError>) -> bool {
    let path = String::from_utf8_lossy(path);
    match adopted {
        Ok(_) => return true,
        // Another document named it first: a hard link in both, or an older version's file under a newer name.
        Err(FsError::Exists) => {
            tracing::debug!(%path, "adopted already");
            return true;
        }
        // A program reads a torn file under this name; `visibility` tries again.
        Err(FsError::Busy) => tracing::debug!(%path, "not adopted while it is open"),
        Err(error) => tracing::error!(%path, ?error, "a name from Tier-3 cannot be in the tree"),
    }
    false
}

/// Puts names from documents into the tree.
pub(crate) struct Adopter<'a> {
    pub(super) shared: &'a Shared,
    /// Whether names changed in ways that the documents do not record.
    is_carrying: bool,
    /// In that case, the files of the documents: a further name may be the first that is left of a file.
    files: BTreeMap<Vec<u8>, AdoptEntry>,
}

impl<'a> Adopter<'a> {
    pub(crate) fn new(shared: &'a Shared) -> Self {
        Self { shared, is_carrying: shared.namespace.adoption().is_carrying(), files: BTreeMap::new() }
    }

    /// Puts an entry into the tree. Returns whether its name is there now, or was removed since.
    pub(super) fn adopt(&mut self, mut entry: AdoptEntry) -> bool {
        if !self.is_carrying {
            return adopt(self.shared, &entry);
        }
        let mut first = None;
        match &mut entry.kind {
            AdoptKind::File { .. } => {
                self.files.insert(entry.path.clone(), entry.clone());
            }
            AdoptKind::HardLink { to, file } => {
                first = self.files.get(to);
                *file = first.and_then(|first| first.kind.file());
            }
            AdoptKind::Directory | AdoptKind::Symlink { .. } | AdoptKind::Special(_) => {}
        }
        let mut adopted = self.shared.namespace.adoption().adopt_carried(&entry);
        if let (Some(first), Ok(outcomes)) = (first, &adopted)
            && outcomes.contains(&Err(FsError::NotFound))
        {
            adopted = self
                .shared
                .namespace
                .adoption()
                .adopt_carried(&AdoptEntry { path: entry.path.clone(), ..first.clone() });
        }
        match adopted {
            Ok(outcomes) => {
                outcomes.into_iter().fold(true, |all, outcome| is_there(&entry.path, outcome) & all)
            }
            Err(error) => is_there(&entry.path, Err(error)),
        }
    }

    /// Makes a directory that a manifest lists, or sets its attributes.
    pub(crate) fn adopt_directory(&mut self, directory: &Directory) {
        self.adopt(entry(&directory.path, AdoptKind::Directory, &directory.attributes));
    }

    /// Whether a file of a document is where it is expected now.
    pub(super) fn shows(&self, path: &RelPath, file: FileId) -> bool {
        let names = self.shared.namespace.adoption().carried_names(path.as_bytes(), file);
        names.iter().all(|path| self.shared.namespace.nodes().node_at(path).is_some())
    }

    /// Ends the adoption: all entries are in the tree.
    pub(super) fn end(self) {
        self.shared.namespace.adoption().end_carrying();
    }
}

/// Puts a loose file into the tree, as a cold file. Once its bytes are in memory, they may be evicted.
pub(crate) fn adopt_loose(shared: &Shared, sidecar: &LooseSidecar) {
    adopt(shared, &entry(&sidecar.file.path, file_kind(&sidecar.file), &sidecar.file.attributes));
    shared.namespace.hosts().set_reclaim(sidecar.file.file, tidemark_namespace::ReclaimClass::Loose);
}

pub(super) fn entry(path: &RelPath, kind: AdoptKind, attributes: &Attributes) -> AdoptEntry {
    entry_at(path.as_bytes().to_vec(), kind, attributes)
}

pub(super) fn entry_at(path: Vec<u8>, kind: AdoptKind, attributes: &Attributes) -> AdoptEntry {
    AdoptEntry {
        path,
        kind,
        mode: attributes.mode,
        uid: attributes.uid,
        gid: attributes.gid,
        mtime_ns: attributes.mtime_ns,
        xattrs: attributes.xattrs.iter().map(|(name, value)| (name.0.clone(), value.0.clone())).collect(),
    }
}

pub(super) fn file_kind(file: &ManifestFile) -> AdoptKind {
    AdoptKind::File {
        file: file.file,
        seal: file.seal,
        size_bytes: file.size_bytes,
        crc: file.crc64nvme,
        chunks: file.chunks.clone().into(),
        object: Some(ObjectCopy::of(file)),
    }
}

pub(super) fn link_entry(path: &RelPath, to: &RelPath) -> AdoptEntry {
    entry(path, AdoptKind::HardLink { to: to.as_bytes().to_vec(), file: None }, &Attributes::default())
}

/// Most chunks of all placeholders of a version, 8 TiB of files: a damaged record must not ask for more memory.
const PLACEHOLDER_CHUNKS_MAX: u64 = 1 << 20;

/// Size of a file whose size is unknown. With size 0, an open would succeed without asking for the bytes.
pub(super) const UNKNOWN_BYTES: u64 = 1;

/// Returns the entry of a file of which only the name is known: an open finds no copy.
pub(super) fn placeholder(
    path: &RelPath,
    (file, seal): (FileId, SealNumber),
    attributes: &Attributes,
) -> AdoptEntry {
    let (size_bytes, crc, chunks) = (UNKNOWN_BYTES, Crc64(0), vec![Crc64(0)].into());
    entry(path, AdoptKind::File { file, seal, size_bytes, crc, chunks, object: None }, attributes)
}

/// Returns the entries of a version that cannot be read, with their sizes: an open finds no copy.
pub(super) fn placeholders(record: &Record) -> impl Iterator<Item = AdoptEntry> {
    let mut left = PLACEHOLDER_CHUNKS_MAX;
    let mtime_ns = record.completed_at_ns;
    record.files.iter().map(move |file| {
        let chunks = chunk_count(file.size_bytes);
        let size_bytes = if chunks <= left { file.size_bytes } else { UNKNOWN_BYTES };
        left = left.saturating_sub(chunks);
        // Nothing is ever compared with these checksums, because there is no copy to read.
        let chunks = (0..chunk_count(size_bytes)).map(|_| Crc64(0)).collect();
        let kind = AdoptKind::File {
            file: file.file,
            seal: file.seal,
            size_bytes,
            crc: file.crc64nvme,
            chunks,
            object: None,
        };
        entry(&file.path, kind, &Attributes { mode: 0o644, mtime_ns, ..Attributes::default() })
    })
}

//! Names from Tier-3 in the tree, before their bytes are there.
//!
//! Owns: what a document's entry becomes in the namespace. Does not own: which of them the tree shows (`recover`).

use crate::namespace::{AdoptEntry, AdoptKind, FsError, ObjectCopy};
use crate::node::Shared;
use std::collections::BTreeMap;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::cluster::carried::Carried;
use tidemark_protocol::documents::LooseSidecar;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::layout::chunk_count;
use tidemark_protocol::manifest::{Attributes, Directory, ManifestFile};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::record::Record;

/// What a symlink always shows on Linux.
pub(super) const SYMLINK_MODE: u32 = 0o777;

/// A file that is in Tier-3 may be given up in memory; the daemon before may have died before it wrote that down.
pub(super) fn note(shared: &Shared, file: &ManifestFile) {
    // Another version's copy of the same bytes is as good, and may be the one that stays.
    if shared.namespace.has_object(file.file, file.seal) {
        return;
    }
    // False where the file is gone or has other bytes by now.
    let _ = shared.namespace.note_object(file.file, file.seal, ObjectCopy::of(file));
}

/// Makes a directory that a manifest lists, or gives it its attributes.
pub(crate) fn adopt_directory(shared: &Shared, directory: &Directory) {
    adopt(shared, entry(&directory.path, AdoptKind::Directory, &directory.attributes));
}

/// Whether the name is in the tree now.
pub(super) fn adopt(shared: &Shared, entry: AdoptEntry) -> bool {
    let path = String::from_utf8_lossy(&entry.path).into_owned();
    match shared.namespace.adopt(entry) {
        Ok(_) => return true,
        // Another document named it first: a hard link in both, or an older version's file under a newer name.
        Err(FsError::Exists) => {
            tracing::debug!(%path, "adopted already");
            return true;
        }
        // Somebody reads what was torn under this name; the shield comes back to it.
        Err(FsError::Busy) => tracing::debug!(%path, "not adopted while it is open"),
        Err(error) => tracing::error!(%path, ?error, "a name from Tier-3 cannot be in the tree"),
    }
    false
}

/// Takes names from documents into a tree in which more was done to names than the documents tell.
pub(crate) struct Adopter<'a> {
    shared: &'a Shared,
    carried: Carried,
    /// The files of the documents, where names were changed since: a further name may be the first that is left of one.
    files: BTreeMap<Vec<u8>, AdoptEntry>,
}

impl<'a> Adopter<'a> {
    /// Where nothing was done since.
    pub(crate) fn new(shared: &'a Shared) -> Self {
        Self { shared, carried: Carried::default(), files: BTreeMap::new() }
    }

    /// Where something was done since this node began to be the coordinator.
    pub(super) fn carrying(shared: &'a Shared) -> Self {
        Self { carried: Carried::new(shared.namespace.take_carried()), ..Self::new(shared) }
    }

    /// Whether the name is in the tree now, or was taken away since.
    pub(super) fn adopt(&mut self, entry: AdoptEntry) -> bool {
        if self.carried.is_empty() {
            return adopt(self.shared, entry);
        }
        let entry = match &entry.kind {
            AdoptKind::HardLink { to } => match self.files.get(to) {
                Some(file) => AdoptEntry { path: entry.path, ..file.clone() },
                None => entry,
            },
            _ => entry,
        };
        let file = match entry.kind {
            AdoptKind::File { file, .. } => {
                self.files.insert(entry.path.clone(), entry.clone());
                Some(file)
            }
            _ => None,
        };
        let mut is_there = true;
        for path in self.carried.names(&entry.path, file) {
            is_there &= adopt(self.shared, AdoptEntry { path, ..entry.clone() });
        }
        is_there
    }

    /// Whether a file of a document is where it is expected now.
    pub(super) fn shows(&self, path: &RelPath, file: FileId) -> bool {
        let names = self.carried.names(path.as_bytes(), Some(file));
        names.iter().all(|path| self.shared.namespace.node_at(path).is_some())
    }
}

/// Puts a loose file into the tree, as a cold file that may give way once it is not cold any more.
pub(crate) fn adopt_loose(shared: &Shared, sidecar: &LooseSidecar) {
    adopt(shared, entry(&sidecar.file.path, file_kind(&sidecar.file), &sidecar.file.attributes));
    shared.namespace.set_reclaim(sidecar.file.file, crate::namespace::ReclaimClass::Loose);
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
    entry(path, AdoptKind::HardLink { to: to.as_bytes().to_vec() }, &Attributes::default())
}

/// Chunks of all placeholders of a version, so that a damaged record cannot ask for more memory: 8 TiB of files.
const PLACEHOLDER_CHUNKS_MAX: u64 = 1 << 20;

/// The size of a file of which nobody knows it: an empty one would be opened without asking for its bytes.
pub(super) const UNKNOWN_BYTES: u64 = 1;

/// The name of a file of which nothing is known: an open finds no copy.
pub(super) fn placeholder(
    path: &RelPath,
    (file, seal): (FileId, SealNumber),
    attributes: &Attributes,
) -> AdoptEntry {
    let (size_bytes, crc, chunks) = (UNKNOWN_BYTES, Crc64(0), vec![Crc64(0)].into());
    entry(path, AdoptKind::File { file, seal, size_bytes, crc, chunks, object: None }, attributes)
}

/// The names of a version that cannot be read, with their sizes: an open finds no copy.
pub(super) fn placeholders(record: &Record) -> impl Iterator<Item = AdoptEntry> {
    let mut left = PLACEHOLDER_CHUNKS_MAX;
    let mtime_ns = record.completed_at_ns;
    record.files.iter().map(move |file| {
        let chunks = chunk_count(file.size_bytes);
        let size_bytes = if chunks <= left { file.size_bytes } else { UNKNOWN_BYTES };
        left = left.saturating_sub(chunks);
        // Nothing is ever compared with these: no copy is asked.
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

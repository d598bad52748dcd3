//! Copies that are known to be bad: they count for nothing in what is reported.
//!
//! Owns: which copies those are, of a version and of a file. Does not own: finding them (`scrub`, `verify`), what is said of each as a
//! problem (`problems`).

use crate::namespace::FileView;
use crate::node::book::VersionBook;
use crate::node::run::Engine;
use crate::node::scrub::Scrub;
use std::collections::BTreeSet;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::report::CopyCount;

impl Scrub {
    /// Whether the object under this key was found bad and could not be written again.
    pub(crate) fn is_bad_object(&self, file: FileId, seal: SealNumber, key: &str) -> bool {
        !self.bad_objects.is_empty() && self.bad_objects.contains_key(&(file, seal, key.to_owned()))
    }
}

impl Engine {
    /// Whether this node's memory is known to hold other bytes than were sealed.
    pub(super) fn is_bad_host(&self, view: &FileView) -> bool {
        view.sealed().is_some_and(|seal| self.scrub.bad.contains_key(&(view.file, seal)))
    }

    /// The files of a version whose object is known to be bad. Costs a pass over its files where any object is.
    pub(super) fn bad_objects_in(&self, version: &VersionBook) -> BTreeSet<FileId> {
        if self.scrub.bad_objects.is_empty() {
            return BTreeSet::new();
        }
        let files = version.manifest().into_iter().flat_map(|manifest| &manifest.files);
        let bad = files.filter(|file| self.scrub.is_bad_object(file.file, file.seal, &file.key));
        bad.map(|file| file.file).collect()
    }

    /// What Tier-3 has of a version.
    pub(super) fn object_copies(&self, version: &VersionBook) -> CopyCount {
        if !version.checkpoint.is_prepared() {
            return CopyCount::default();
        }
        let mut seen = self.bad_objects_in(version);
        let files = version.record().files.iter().filter(|entry| seen.insert(entry.file));
        files.fold(CopyCount::default(), |sum, entry| CopyCount {
            files: sum.files + 1,
            bytes: sum.bytes + entry.size_bytes,
        })
    }
}

//! Copies that are known to be bad: reports do not count them, and files that rest on them are not durable.
//!
//! Owns: which copies those are, of a version and of a file; the rows that a flush reports for them. Does not own: finding them, writing
//! them again (`scrub`, `verify`), describing each as a problem (`problems`).

use crate::node::answer::Listed;
use crate::node::book::VersionBook;
use crate::node::flush::covers;
use crate::node::inventory::Inventory;
use crate::node::run::Engine;
use crate::node::scrub::Scrub;
use std::collections::BTreeSet;
use tidemark_namespace::FileView;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::key::VersionId;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::report::{CopyCount, Pending, PendingReason, path_text};

/// Help for a bad object: a flush that waits already tried to write it again.
const OBJECT_HELP: &str = "save it again, or mend Tier-3";

/// Help for a bad document: a flush does not try to write it again, because that would read all documents.
const DOCUMENT_HELP: &str =
    "`ckptctl verify --deep` writes it again where it can; or save it again, or mend Tier-3";

fn row(path: &str, what: &str, help: &str) -> Pending {
    let what = format!("it is bad in Tier-3: {what}; {help}");
    Pending { path: path.to_owned(), reason: PendingReason::Damaged, what }
}

impl Scrub {
    /// Whether the object under this key was found bad and could not be written again.
    pub(crate) fn is_bad_object(&self, file: FileId, seal: SealNumber, key: &str) -> bool {
        !self.bad_objects.is_empty() && self.bad_objects.contains_key(&(file, seal, key.to_owned()))
    }
}

/// Lookups about copies that are known to be bad, and about what depends on them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BadCopies<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> BadCopies<'a> {
    /// Whether this node's memory is known to hold bytes other than those that were sealed.
    pub(crate) fn is_bad_host(self, view: &FileView) -> bool {
        view.sealed().is_some_and(|seal| self.engine.scrub.bad.contains_key(&(view.file, seal)))
    }

    /// Returns the files of a version whose object is known to be bad. Costs a pass over its files if any object is bad.
    pub(crate) fn bad_objects_in(self, version: &VersionBook) -> BTreeSet<FileId> {
        if self.engine.scrub.bad_objects.is_empty() {
            return BTreeSet::new();
        }
        let files = version.manifest().into_iter().flat_map(|manifest| &manifest.files);
        let bad = files.filter(|file| self.engine.scrub.is_bad_object(file.file, file.seal, &file.key));
        bad.map(|file| file.file).collect()
    }

    /// Counts the good copies that Tier-3 has of a version's files.
    pub(crate) fn object_copies(self, version: &VersionBook) -> CopyCount {
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

    /// Returns the files at or below `place` with an object that is known to be bad and may be written again. Costs a pass over the files
    /// and the versions if any object is bad.
    pub(crate) fn known_bad(self, place: &[u8]) -> Vec<Listed> {
        if self.engine.scrub.bad_objects.is_empty() || !self.engine.rights.may_write() {
            return Vec::new();
        }
        let mut objects = Inventory { engine: self.engine }.targets_and_stored(place);
        objects.retain(|listed| !listed.suspects.is_empty());
        objects
    }

    /// Returns a row for everything at or below `place` that would not outlive this node, because its copy in Tier-3 is damaged. Covers
    /// files of the tree without a good object, and the newest committed version of each checkpoint that was not removed. Costs a pass
    /// over both if anything is known to be bad.
    pub(crate) fn damaged(self, place: &[u8]) -> Vec<Pending> {
        let Scrub { bad_objects, unmended, .. } = &self.engine.scrub;
        if bad_objects.is_empty() && unmended.is_empty() {
            return Vec::new();
        }
        let books = self.engine.ledger.books.values();
        let stands: Vec<_> = books
            .filter_map(|book| Some((book, book.committed()?)))
            .filter(|(book, (number, version))| !self.engine.selection().is_removed(book, **number, version))
            .collect();
        let in_tree = self.engine.ledger.files().filter(|(_, view)| view.object.is_none());
        let lacking: BTreeSet<_> =
            in_tree.filter_map(|(_, view)| Some((view.file, view.sealed()?))).collect();
        let files = stands.iter().filter_map(|(_, (_, version))| version.manifest());
        let files = files.flat_map(|manifest| &manifest.files);
        let listed: BTreeSet<_> = files.map(|file| (file.file, file.seal, &file.key)).collect();
        let objects = bad_objects.iter().filter(|((file, seal, key), _)| {
            lacking.contains(&(*file, *seal)) || listed.contains(&(*file, *seal, key))
        });
        let objects = objects.map(|(_, bad)| row(&bad.path, &bad.what, OBJECT_HELP));
        let paths: BTreeSet<_> = stands.iter().map(|(book, _)| path_text(&book.path())).collect();
        // A bad sidecar or tree document is pending by itself until it is written again.
        let documents = unmended.iter().filter(|(path, _)| paths.contains(path));
        let documents = documents.map(|(path, what)| row(path, what, DOCUMENT_HELP));
        let place = path_text(place);
        objects.chain(documents).filter(|row| covers(place.as_bytes(), row.path.as_bytes())).collect()
    }

    /// Returns the committed versions of a run that have something bad in Tier-3. Costs nothing while nothing is known to be bad.
    pub(crate) fn damaged_versions(self, run: &RunPath) -> BTreeSet<&'a VersionId> {
        let Scrub { bad_objects, unmended, .. } = &self.engine.scrub;
        if bad_objects.is_empty() && unmended.is_empty() {
            return BTreeSet::new();
        }
        let books = self.engine.ledger.books.values().filter(|book| book.id.run == *run);
        let versions = books.flat_map(|book| {
            let path = path_text(&book.path());
            let documents = unmended.iter().any(|(of, _)| *of == path);
            book.versions.values().map(move |version| (version, documents))
        });
        let damaged = versions
            .filter(|(version, documents)| *documents || !self.bad_objects_in(version).is_empty())
            .map(|(version, _)| &version.record().version);
        damaged.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_document_is_named_with_the_command_that_writes_it_again() {
        let document = row("r/a", "its marker is not there", DOCUMENT_HELP);
        assert_eq!((document.path.as_str(), document.reason), ("r/a", PendingReason::Damaged));
        assert!(document.what.contains("marker") && document.what.contains("ckptctl verify --deep"));
        assert!(!row("r/a", "it is not there", OBJECT_HELP).what.contains("ckptctl"));
    }
}

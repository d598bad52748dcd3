//! Whether an examined object still counts: retention, a person or the job may have retired it meanwhile.
//!
//! Owns: what refers to an object now, and forgetting faults of objects that were retired. Does not own: retiring (`gc`,
//! `generations`), the examinations (`verify`, `scrub`).
//!
//! An examination takes seconds, and its objects were listed before. Bytes that are missing because their version was retired are no
//! loss, unless a name of this tree means them: another coordinator retired them without knowing of that name.
//! `_RETIRED` stands, and the sidecar of a generation is gone, before the first of its bytes is deleted.

use crate::node::Shared;
use crate::node::answer::{Listed, stored_target};
use crate::node::book::Book;
use crate::node::by_path::ByPath;
use crate::node::flush::covers;
use crate::node::gc::Gc;
use crate::node::ledger::Ledger;
use crate::node::run::{Engine, Node};
use crate::node::scrub::Scrub;
use crate::restore::locate::read_retired;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_namespace::ObjectCopy;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::key::{Key, PathOrHash, VersionId};
use tidemark_protocol::manifest::Manifest;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::report::path_text;

/// Whether an object counts now, as far as the loop knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counts {
    /// The tree shows its bytes, or its version stands.
    Yes,
    /// Only a removal that can be undone needs the object, for as long as the generation has its sidecar.
    WhileDescribed,
    No,
}

/// Consequence of bytes that are bad or missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// The bytes count.
    Counts,
    /// Another coordinator retired their version, although a name of this tree means these bytes. The bytes are missed, but not written
    /// again: that retirement may be deleting them.
    Missed {
        /// Whether the tree shows them by this very object.
        is_noted: bool,
    },
    /// The bytes do not count any more.
    GivenUp,
}

/// Objects of files in Tier-3: whether they count still, and whether they are good.
#[derive(Clone, Copy)]
pub(super) struct Objects<'a> {
    pub(super) node: &'a Node,
}

impl Objects<'_> {
    /// Returns whether an object that is bad or missing still counts. If the loop does not know, costs one request: Tier-3 also records
    /// what another coordinator retired. An unknown answer counts as no retirement.
    pub(super) async fn fate(self, of: (FileId, SealNumber), key: &str) -> Fate {
        let asked = key.to_owned();
        let known = move |engine: &mut Engine| {
            (
                engine.still_counts().counts(of, &asked),
                engine.shared.is_held(of),
                engine.shared.is_noted(of, &asked),
            )
        };
        // A stopped loop records no faults either.
        let Some((counts, is_held, is_noted)) = self.node.ask(known).await else { return Fate::GivenUp };
        let is_given_up = match (counts, key.parse::<Key>()) {
            (Counts::No, _) => true,
            (_, Ok(Key::Data { version, .. })) => {
                let is_retired = self.is_retired(&version).await;
                if is_retired && is_held {
                    return Fate::Missed { is_noted };
                }
                is_retired
            }
            (
                Counts::WhileDescribed,
                Ok(Key::Loose { path, generation } | Key::LooseParts { path, generation }),
            ) => {
                let sidecar = Key::LooseSidecar { path, generation }.to_string();
                matches!(self.node.shared().drain.store.head(&sidecar).await, Ok(None))
            }
            (Counts::Yes | Counts::WhileDescribed, _) => false,
        };
        if is_given_up { Fate::GivenUp } else { Fate::Counts }
    }

    /// Whether a version's retirement stands in Tier-3. False if the answer is unknown, or is not the version's document.
    pub(super) async fn is_retired(self, version: &VersionId) -> bool {
        matches!(read_retired(&self.node.shared().drain.store, version, None).await, Ok(Ok(_)))
    }
}

impl Shared {
    /// Whether a file that has a name holds these very bytes.
    pub(crate) fn is_held(&self, (file, seal): (FileId, SealNumber)) -> bool {
        self.namespace.nodes().view_of(file).is_some_and(|view| view.sealed() == Some(seal))
    }

    /// Whether the tree shows these bytes by this very object.
    fn is_noted(&self, (file, seal): (FileId, SealNumber), key: &str) -> bool {
        let view = self.namespace.nodes().view_of(file).filter(|view| view.sealed() == Some(seal));
        view.and_then(|view| view.object).is_some_and(|object| object.key == key)
    }
}

/// Whether objects that a pass examined earlier are still referenced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StillCounts<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a Ledger,
    pub(crate) gc: &'a Gc,
}

impl<'a> StillCounts<'a> {
    /// Returns whether the object under this key, which should hold the bytes `of`, counts. If others wrote it, costs a pass over the
    /// versions.
    pub(crate) fn counts(self, of: (FileId, SealNumber), key: &str) -> Counts {
        match key.parse::<Key>() {
            Ok(Key::Data { version, .. }) if self.is_going(&version) && !self.shared.is_noted(of, key) => {
                Counts::No
            }
            Ok(Key::Data { .. }) => Counts::Yes,
            Ok(Key::Loose { .. } | Key::LooseParts { .. }) if self.shared.is_held(of) => Counts::Yes,
            Ok(
                Key::Loose { path: PathOrHash::Path(path), .. }
                | Key::LooseParts { path: PathOrHash::Path(path), .. },
            ) if !self.ledger.removed_loose.contains_key(&path) => Counts::No,
            // For a long path the key has only its hash.
            Ok(Key::Loose { .. } | Key::LooseParts { .. }) => Counts::WhileDescribed,
            // Objects that others wrote are never deleted here, and count while anything lists them.
            Ok(_) | Err(_) => {
                let listed = || {
                    self.standing_manifests().flat_map(|manifest| &manifest.files).any(|file| file.key == key)
                };
                if self.shared.is_held(of) || listed() { Counts::Yes } else { Counts::No }
            }
        }
    }

    /// Whether a version was retired, or its retirement may stand in Tier-3 already. False for an unknown version.
    fn is_going(self, version: &VersionId) -> bool {
        let id = CheckpointId { run: version.run.clone(), directory: version.directory.clone() };
        let number = (version.timeline, version.version);
        let known = self.ledger.books.get(&id).and_then(|book| book.versions.get(&number));
        known.is_some_and(|known| known.checkpoint.is_aborted() || self.gc.is_begun(&id, number))
    }

    /// Returns the manifests of all committed versions that are not being retired.
    fn standing_manifests(self) -> impl Iterator<Item = &'a Manifest> {
        let books = self.ledger.books.values();
        let versions = books
            .flat_map(|book| book.versions.iter().map(move |(number, version)| (book, *number, version)));
        let standing = versions.filter(move |(book, number, _)| !self.gc.is_begun(&book.id, *number));
        standing.filter_map(|(.., version)| version.manifest().map(|manifest| &**manifest))
    }

    /// Returns the files of committed versions that may lie at or below `place`, with all objects that hold their bytes.
    pub(crate) fn stored(self, place: &[u8]) -> BTreeMap<(FileId, SealNumber), Listed> {
        let mut stored: BTreeMap<_, Listed> = BTreeMap::new();
        let books = self.ledger.books.values().map(|book| (book, book.path()));
        for (book, path) in
            books.filter(|(book, path)| covers(path, place) || self.by_path().is_about(place, book))
        {
            // A version that is being retired may be gone in part.
            let stays = book.versions.iter().filter(|(number, _)| !self.gc.is_begun(&book.id, **number));
            let manifests = stays.filter_map(|(_, version)| version.manifest());
            let files = manifests.flat_map(|manifest| &manifest.files);
            for file in files {
                let object = ObjectCopy::of(file);
                let of = (file.file, file.seal);
                match stored.entry(of) {
                    Entry::Occupied(known) => known.into_mut().target.add_object(object),
                    Entry::Vacant(free) => {
                        let bad = self.shared.restorer.losses.why(file.file, file.seal);
                        let target = stored_target(file, object);
                        let suspects = BTreeSet::new();
                        free.insert(Listed { target, checkpoint: Some(path.clone()), bad, suspects });
                    }
                }
            }
        }
        stored
    }

    fn by_path(self) -> ByPath<'a> {
        ByPath { shared: self.shared, ledger: self.ledger }
    }
}

impl Scrub {
    /// Forgets faults of objects that were retired, and faults of their bytes if nothing else lists these. Costs nothing if no fault was
    /// known, else a pass over the versions.
    pub(super) fn forget_found<'a>(
        &mut self,
        still_counts: StillCounts<'_>,
        objects: impl Iterator<Item = (FileId, SealNumber, &'a str)>,
    ) {
        let (shared, mut bytes) = (still_counts.shared, BTreeSet::new());
        for (file, seal, key) in objects {
            self.bad_objects.remove(&(file, seal, key.to_owned()));
            let is_found =
                self.bad.contains_key(&(file, seal)) || shared.restorer.losses.why(file, seal).is_some();
            bytes.extend(is_found.then_some((file, seal)));
        }
        if bytes.is_empty() {
            return;
        }
        bytes.retain(|of| !shared.is_held(*of));
        for file in still_counts.standing_manifests().flat_map(|manifest| &manifest.files) {
            bytes.remove(&(file.file, file.seal));
        }
        for (file, seal) in bytes {
            self.bad.remove(&(file, seal));
            shared.restorer.losses.forget(file, seal);
        }
    }

    /// Forgets faults of a checkpoint's documents, if no version of it is committed any more.
    pub(super) fn forget_documents(&mut self, book: &Book) {
        if book.committed().is_none() {
            let path = path_text(&book.path());
            self.unmended.retain(|(of, _)| *of != path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::book::LooseBook;
    use crate::node::recover::Recovered;
    use crate::node::run::NodeParts;
    use crate::node::schedule::{shared_over, tier1};
    use bytes::Bytes;
    use std::sync::Arc;
    use tidemark_protocol::id::{FileCounter, Generation, Incarnation};
    use tidemark_protocol::path::RelPath;
    use tidemark_protocol::recognise::Rules;
    use tidemark_store::{MemoryStore, Store};

    /// Checks what may happen between the listing and the examination: the name is back, or its generations were deleted.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_removed_file_counts_for_as_long_as_it_can_be_brought_back() {
        let (_folder, tier1) = tier1();
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let shared = shared_over(Arc::clone(&store), &tier1, 1);
        let node =
            Node::start(NodeParts { shared, rules: Rules::builtin(), recovered: Recovered::default() });
        let of = (FileId { incarnation: Incarnation(7), counter: FileCounter(1) }, SealNumber(1));
        let path = RelPath::new("run/log").unwrap();
        let (bytes, sidecar) = Key::loose(&path, Generation(3));
        let (key, sidecar) = (bytes.to_string(), sidecar.to_string());
        assert_eq!(
            Objects { node: &node }.fate(of, &key).await,
            Fate::GivenUp,
            "nothing has been removed there"
        );
        let removed = path.clone();
        let remove = move |engine: &mut Engine| {
            let book = LooseBook { generation: Some(Generation(3)), ..LooseBook::default() };
            engine.ledger.removed_loose.insert(removed, book);
        };
        node.ask(remove).await.unwrap();
        assert_eq!(
            Objects { node: &node }.fate(of, &key).await,
            Fate::GivenUp,
            "the sidecar goes before the bytes"
        );
        store.create(&sidecar, Bytes::new()).await.unwrap();
        assert_eq!(
            Objects { node: &node }.fate(of, &key).await,
            Fate::Counts,
            "`undelete` would bring it back"
        );
        node.ask(move |engine| engine.ledger.removed_loose.remove(&path)).await.unwrap();
        assert_eq!(
            Objects { node: &node }.fate(of, &key).await,
            Fate::GivenUp,
            "the name is another file's by now"
        );
        assert_eq!(
            Objects { node: &node }.fate(of, "others/model.bin").await,
            Fate::GivenUp,
            "nothing lists it"
        );
        node.stop();
    }
}

//! The tree around the checkpoints, as Tier-3 keeps it: directories, links, and what was removed.
//!
//! Owns: when the tree document is written and what is in it. Does not own: writing it (`save::loose`), reading it
//! (`recover`).

use crate::namespace::{SnapshotFile, TreeSnapshot};
use crate::node::Shared;
use crate::node::away::Cause;
use crate::node::book::{Book, LooseStage, Number};
use crate::node::jobs::Done;
use crate::node::recover::{above, shown};
use crate::node::run::{Engine, error_text};
use crate::save::loose::{self, LooseError};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_protocol::documents::{RemovedFile, RemovedLoose, TreeDocument};
use tidemark_protocol::format::FORMAT;
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::manifest::{Attributes, Base64, Directory, HardLink, Symlink};
use tidemark_protocol::path::{RawText, RelPath};
use tidemark_protocol::recognise::Shape;

/// The tree is written at most this often unless somebody waits: its document is as large as the tree has directories.
const WRITE_EVERY: Duration = Duration::from_secs(10);

/// Making the document may take one part in this many of the loop's time, even while somebody waits: it is a pass over
/// the tree, and each file of 100,000 that is being saved changes it.
const MAKE_SHARE: u32 = 8;

/// When the tree was written, and whether it is being written.
#[derive(Debug)]
pub(crate) struct TreeState {
    /// The highest number present in Tier-3.
    number: u64,
    running: bool,
    written: Option<Instant>,
    retry_at: Option<Instant>,
    not_before: Option<Instant>,
    /// What the last written document said, without its epoch: an equal one is not written again.
    last: Option<blake3::Hash>,
    /// The tree of this moment is in Tier-3.
    clean_at: Option<Instant>,
    /// The removals of loose files in the document that is being written.
    removing: BTreeMap<RelPath, Generation>,
    /// When the tree that is being written was looked at.
    looked_at: Option<Instant>,
    /// Something is left out of it until Tier-3 has more: removals of what is the only copy of a file that lives on, directories
    /// of checkpoints that are not there yet.
    withheld: bool,
}

impl TreeState {
    pub(crate) fn new(number: u64) -> Self {
        Self {
            number,
            running: false,
            written: None,
            retry_at: None,
            not_before: None,
            last: None,
            clean_at: None,
            removing: BTreeMap::new(),
            looked_at: None,
            withheld: false,
        }
    }
}

impl Engine {
    /// Whether the tree as it was at `since` is not in Tier-3 yet.
    pub(crate) fn tree_is_pending(&self, since: Instant) -> bool {
        self.fenced.is_none() && self.tree.clean_at.is_none_or(|clean| clean < since)
    }

    pub(crate) fn write_tree(&mut self, now: Instant) {
        let urgent = !self.flushes.is_empty() || self.draining;
        let wanted = self.ledger.tree_changed;
        let early =
            self.tree.written.is_some_and(|written| now.saturating_duration_since(written) < WRITE_EVERY);
        let held = [self.tree.retry_at, self.tree.not_before].iter().flatten().any(|at| *at > now);
        if self.tree.running || !self.may_write() || !wanted || held || (early && !urgent) {
            return;
        }
        self.ledger.tree_changed = false;
        let begun = Instant::now();
        let (document, withheld) = self.tree_document();
        self.tree.withheld = withheld;
        let mut unstamped = document.clone();
        unstamped.epoch = tidemark_protocol::id::Epoch(0);
        let text = serde_json::to_vec(&unstamped).expect("plain data is written as JSON");
        let hash = blake3::hash(&text);
        self.tree.not_before = Some(now + begun.elapsed() * MAKE_SHARE);
        if self.tree.last == Some(hash) {
            self.tree.clean_at = Some(now);
            return;
        }
        self.tree.looked_at = Some(now);
        self.tree.last = Some(hash);
        self.tree.running = true;
        let removed = document.removed_loose.iter();
        self.tree.removing = removed.map(|removed| (removed.path.clone(), removed.generation)).collect();
        let number = self.tree.number + 1;
        let shared = Arc::clone(&self.shared);
        self.jobs.spawn(run(shared, number, document));
    }

    pub(crate) fn tree_done(&mut self, number: u64, result: Result<(), LooseError>, now: Instant) {
        self.tree.running = false;
        self.tree.written = Some(now);
        match result {
            Ok(()) => {
                self.tree.number = number;
                self.tree.clean_at = self.tree.looked_at;
                let removed = std::mem::take(&mut self.tree.removing);
                self.removals_stand(removed);
                self.tier3_away.ended(&Cause::Tree);
            }
            Err(error) => {
                if matches!(error, LooseError::Taken { .. }) {
                    // Numbers only rise; the next try takes the next.
                    self.tree.number = number;
                }
                let why = error_text(&error);
                tracing::warn!(%why, "the tree did not reach Tier-3 yet");
                self.tier3_away.failed(Cause::Tree, now, why);
                self.ledger.tree_changed = true;
                self.tree.last = None;
                self.tree.retry_at = Some(now + Duration::from_secs(1));
            }
        }
    }

    /// Something reached Tier-3, so that a removal need not be withheld any more.
    pub(crate) fn tree_may_tell_more(&mut self) {
        if self.tree.withheld {
            self.ledger.tree_changed = true;
            self.tree.clean_at = None;
        }
    }

    /// The tree as it is, and whether something is withheld from it.
    fn tree_document(&self) -> (TreeDocument, bool) {
        let snapshot = self.shared.namespace.tree_snapshot();
        let attributes = |node: &crate::namespace::SnapshotNode| Attributes {
            mode: node.mode,
            uid: node.uid,
            gid: node.gid,
            mtime_ns: node.mtime_ns,
            xattrs: node
                .xattrs
                .iter()
                .map(|(name, value)| (RawText(name.clone()), Base64(value.clone())))
                .collect(),
        };
        let path = |bytes: &[u8]| RelPath::new(bytes.to_vec()).ok();
        let unsaved = Unsaved::of(self.ledger.books.values(), &snapshot);
        let begun: BTreeSet<_> = self.begun().collect();
        let mut withheld = false;
        let directories: Vec<_> = snapshot
            .directories
            .iter()
            .filter_map(|node| Some(Directory { path: path(&node.path)?, attributes: attributes(node) }))
            .filter(|directory| {
                let left_out = unsaved.has(&directory.path) || begun.contains(&directory.path);
                withheld |= left_out;
                !left_out
            })
            .collect();
        let symlinks = snapshot.symlinks.iter().filter_map(|(node, target)| {
            Some(Symlink {
                path: path(&node.path)?,
                target: RawText(target.clone()),
                uid: node.uid,
                gid: node.gid,
                mtime_ns: node.mtime_ns,
            })
        });
        let hard_links = snapshot
            .hard_links
            .iter()
            .filter_map(|link| Some(HardLink { path: path(&link.path)?, to: path(&link.to)? }));
        let here = Here::of(&snapshot);
        let (mut removed_versions, mut removed_files) = (Vec::new(), Vec::new());
        for book in self.ledger.books.values() {
            // Who asks for everything to be durable means the removals too.
            let told = !self.flushes.is_empty() || self.draining;
            if self.removals.may_be_undone(&book.id) && !told {
                withheld = true;
                continue;
            }
            // A renamed checkpoint is found under its old name until Tier-3 has it under the new one.
            let mut lives_on = |file: FileId| {
                let only_copy = self.is_only_copy(&here, file);
                withheld |= only_copy;
                only_copy
            };
            // What the daemon took out of sight, or never showed, is not removed.
            let unshown = shown(book, None)
                .is_some_and(|(number, _)| self.shields.is_out_of_sight(&book.id, *number))
                || book.unreadable().is_some_and(|(number, _)| self.gc.is_unshown(&book.id, *number));
            match if unshown { Removed::Nothing } else { here.removed(book) } {
                Removed::Nothing => {}
                Removed::All(number) => {
                    let shown = shown(book, None);
                    let mut files = shown.iter().flat_map(|(_, version)| version.contents.values());
                    if !files.any(|(file, _)| lives_on(*file)) {
                        removed_versions.push(book.version_id(number));
                    }
                }
                Removed::Files(files) => {
                    removed_files.extend(files.into_iter().filter(|gone| !lives_on(gone.file)));
                }
            }
        }
        let mut removed_loose = Vec::new();
        for (path, book) in &self.ledger.removed_loose {
            let Some(generation) = book.generation else { continue };
            if book.of.is_some_and(|(file, _)| self.is_only_copy(&here, file)) {
                withheld = true;
            } else {
                removed_loose.push(RemovedLoose { path: path.clone(), generation });
            }
        }
        let document = TreeDocument {
            format: FORMAT,
            epoch: self.shared.drain.epoch(),
            directories,
            symlinks: symlinks.collect(),
            hard_links: hard_links.collect(),
            removed_versions,
            removed_files,
            removed_loose,
            metrics: self.metrics(),
        };
        (document, withheld)
    }

    /// Whether a file that lost a name has another one, under which Tier-3 does not hold it yet. Until it does, a
    /// restart finds it under the old name.
    fn is_only_copy(&self, here: &Here<'_>, file: FileId) -> bool {
        let Some((path, seal)) = here.first_names.get(&file) else { return false };
        let (Ok(path), of) = (RelPath::new(path.to_vec()), (file, *seal)) else { return false };
        let loose = self.ledger.loose.get(&path);
        if loose.is_some_and(|book| matches!(book.stage, LooseStage::Uploaded { of: done } if done == of)) {
            return false;
        }
        let holds = |book: &Book| {
            shown(book, None).is_some_and(|(_, version)| {
                version.checkpoint.is_prepared() && version.contents.get(&path) == Some(&of)
            })
        };
        !self.ledger.books.values().any(holds)
    }
}

/// The directories of checkpoints of which Tier-3 has no version. After the loss of this node they would be there and empty, and
/// a job that takes the highest step it finds would fail on one. The manifest of a version brings its own.
struct Unsaved {
    tops: BTreeSet<RelPath>,
    /// Above files of anything else.
    used: BTreeSet<RelPath>,
}

impl Unsaved {
    fn of<'a>(books: impl Iterator<Item = &'a Book>, snapshot: &TreeSnapshot) -> Self {
        let prepared = |book: &Book| book.versions.values().any(|version| version.checkpoint.is_prepared());
        let unsaved: Vec<_> = books
            .filter(|book| !prepared(book))
            .filter_map(|book| book.candidate.as_ref())
            .filter(|candidate| candidate.shape == Shape::Tree)
            .collect();
        let tops: BTreeSet<_> = unsaved.iter().filter_map(|candidate| candidate.id.path()).collect();
        let mut used = BTreeSet::new();
        if !tops.is_empty() {
            let own: BTreeSet<_> = unsaved
                .iter()
                .flat_map(|candidate| candidate.files.keys().chain(&candidate.temporaries))
                .map(RelPath::as_bytes)
                .collect();
            let other = snapshot.files.iter().filter(|file| !own.contains(file.node.path.as_slice()));
            let other = other.filter_map(|file| RelPath::new(file.node.path.clone()).ok());
            let below = other.filter(|path| tops.iter().any(|top| path.is_below(top)));
            used.extend(below.flat_map(|path| std::iter::successors(path.parent(), RelPath::parent)));
        }
        Self { tops, used }
    }

    fn has(&self, directory: &RelPath) -> bool {
        let of_one = std::iter::successors(Some(directory.clone()), RelPath::parent)
            .any(|above| self.tops.contains(&above));
        of_one && !self.used.contains(directory)
    }
}

/// What of a checkpoint the job removed.
#[derive(Debug, PartialEq, Eq)]
enum Removed {
    Nothing,
    /// Every name of it, up to and with this version.
    All(Number),
    /// These names; others of the same version stay as they are.
    Files(Vec<RemovedFile>),
}

/// The names of files in the tree, by path: the tree itself says what is gone, since books lag behind it.
struct Here<'a> {
    names: HashMap<&'a [u8], (FileId, SealNumber)>,
    /// The name of each file that carries its bytes to Tier-3.
    first_names: HashMap<FileId, (&'a [u8], SealNumber)>,
}

impl<'a> Here<'a> {
    fn of(snapshot: &'a TreeSnapshot) -> Self {
        let mut names: HashMap<&[u8], _> =
            snapshot.files.iter().map(|file| (file.node.path.as_slice(), (file.file, file.seal))).collect();
        for link in &snapshot.hard_links {
            if let Some(of) = names.get(link.to.as_slice()).copied() {
                names.insert(&link.path, of);
            }
        }
        let first = |file: &'a SnapshotFile| (file.file, (file.node.path.as_slice(), file.seal));
        Self { names, first_names: snapshot.files.iter().map(first).collect() }
    }

    /// Looks at the version that a restart would show. A name that means something else by now is not removed: its
    /// new bytes are on their way to a version of their own, and until they are there the old ones stand.
    fn removed(&self, book: &Book) -> Removed {
        let unreadable = book.unreadable();
        let Some((number, version)) = shown(book, None).or(unreadable) else { return Removed::Nothing };
        let now = |path: &RelPath| self.names.get(path.as_bytes());
        let newer = above(book, Some(*number));
        let mut all =
            version.contents.keys().chain(newer.iter().flat_map(|(_, newer)| newer.contents.keys()));
        if all.all(|path| now(path).is_none()) {
            let newest = newer.last().map_or(*number, |(newest, _)| **newest);
            return Removed::All(unreadable.map_or(newest, |(number, _)| newest.max(*number)));
        }
        let mut files = Vec::new();
        for (path, of) in &version.contents {
            match now(path) {
                Some(now) if now == of => {}
                Some(_) => return Removed::Nothing,
                None => files.push(RemovedFile { path: path.clone(), file: of.0, seal: of.1 }),
            }
        }
        if files.is_empty() { Removed::Nothing } else { Removed::Files(files) }
    }
}

async fn run(shared: Arc<Shared>, number: u64, document: TreeDocument) -> Done {
    let result = loose::write_tree(&shared.drain, number, &document).await;
    Done::Tree { number, result }
}

//! The tree around the checkpoints, as Tier-3 keeps it: directories, links, and where the tree differs from what manifests and
//! sidecars say.
//!
//! Owns: when the tree document is written and what is in it. Does not own: writing it (`save::loose`), reading it
//! (`recover`).
//!
//! The document is made by comparing: what the tree holds at one moment against what Tier-3 holds by itself. So it does not
//! matter how a difference came about, or whether the daemon that is asked saw it happen.

use crate::node::Shared;
use crate::node::away::Cause;
use crate::node::book::{Book, LooseStage, Number, VersionBook};
use crate::node::decide::is_covered;
use crate::node::jobs::Done;
use crate::node::recover::{Knows, above, manifest_of, shown};
use crate::node::removals::{Told, ToldOfOne};
use crate::node::replaced::Replacing;
use crate::node::run::Engine;
use crate::node::unsaved::Unsaved;
use crate::node::visibility::Undecided;
use crate::save::loose::{self, LooseError};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_namespace::{SnapshotFile, SnapshotNode, TreeSnapshot};
use tidemark_protocol::documents::{FileAttributes, RemovedFile, RemovedLoose, TreeDocument};
use tidemark_protocol::error::error_text;
use tidemark_protocol::format::FORMAT;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::key::VersionId;
use tidemark_protocol::manifest::{Attributes, Base64, Directory, HardLink};
use tidemark_protocol::path::{RawText, RelPath};
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::report::{Pending, PendingReason, Untold};

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
    /// The tree of this moment was compared with what Tier-3 was told.
    compared_at: Option<Instant>,
    /// The removals that Tier-3 has.
    pub(crate) told: Told,
    /// The removals in the document that is being written.
    telling: Told,
    /// The document that was made last differs from what Tier-3 was told.
    pub(crate) untold: Option<Untold>,
    /// When the tree that is being written was looked at.
    looked_at: Option<Instant>,
    /// Something is left out of it until Tier-3 has more: removals of what is the only copy of a file that lives on, directories
    /// of checkpoints that are not there yet.
    withheld: bool,
    /// Files whose bytes have to be in Tier-3 before more can be told.
    waits_for: BTreeSet<FileId>,
}

impl TreeState {
    pub(crate) fn new(number: u64, told: Told) -> Self {
        Self {
            number,
            told,
            running: false,
            written: None,
            retry_at: None,
            not_before: None,
            last: None,
            clean_at: None,
            compared_at: None,
            telling: Told::default(),
            untold: None,
            looked_at: None,
            withheld: false,
            waits_for: BTreeSet::new(),
        }
    }

    /// Whether the tree as it was at `since` is not in Tier-3.
    fn is_pending(&self, since: Instant) -> bool {
        self.clean_at.is_none_or(|clean| clean < since)
    }

    /// Whether waiting may bring it there, or show that it is there. `writes`: this daemon may still write; `looks`: it may look.
    fn may_come(&self, since: Instant, writes: bool, looks: bool) -> bool {
        self.is_pending(since) && (writes || looks && self.compared_at.is_none_or(|at| at < since))
    }
}

impl Engine {
    /// Whether the tree as it was at `since` is not in Tier-3.
    pub(crate) fn tree_is_pending(&self, since: Instant) -> bool {
        self.tree.is_pending(since)
    }

    /// Whether waiting may change that.
    pub(crate) fn tree_may_come(&self, since: Instant) -> bool {
        self.tree.may_come(since, self.fenced.is_none(), self.knows == Knows::All)
    }

    /// What a tree that Tier-3 was not told waits for.
    pub(crate) fn untold_names(&self) -> Pending {
        let (reason, what) = match &self.fenced {
            None => {
                (PendingReason::Uploading, "the names outside checkpoints are not in Tier-3 yet".to_owned())
            }
            Some(why) => (
                PendingReason::Unknown,
                format!(
                    "names that were given, changed or removed are not in Tier-3 and do not get there: another daemon decides ({why})"
                ),
            ),
        };
        Pending { path: String::new(), reason, what }
    }

    pub(crate) fn write_tree(&mut self, now: Instant) {
        let urgent = !self.flushes.is_empty() || self.draining;
        let wanted = self.ledger.tree_changed;
        let early =
            self.tree.written.is_some_and(|written| now.saturating_duration_since(written) < WRITE_EVERY);
        let held = [self.tree.retry_at, self.tree.not_before].iter().flatten().any(|at| *at > now);
        // Where another daemon decides, it is only looked at, for those who wait.
        let rests = (early || self.fenced.is_some()) && !urgent;
        if self.tree.running || self.knows != Knows::All || !wanted || held || rests {
            return;
        }
        let begun = Instant::now();
        self.ledger.tree_changed = false;
        let mut snapshot = self.shared.namespace.tree_snapshot();
        // It may show what was done after this turn began.
        self.hear_who_changed_names();
        self.had_not_heard(|_, _| false);
        self.ledger.regroup(now);
        self.ledger.name_by_carrier(&mut snapshot);
        self.ledger.unkept.look_at(&snapshot);
        let (document, left_out) = self.tree_document(&snapshot, now);
        self.tree.withheld = left_out.withheld;
        self.tree.waits_for = left_out.waits_for;
        // A removal that is being decided is looked at again, and no other event may lead to its checkpoint.
        let is_undecided = !left_out.undecided.is_empty();
        // A flush does not wait for directories that are being filled: for their checkpoints it does.
        self.ledger.tree_changed |= is_undecided || left_out.stale;
        self.ledger.due.extend(left_out.undecided);
        let mut unstamped = document.clone();
        unstamped.epoch = tidemark_protocol::id::Epoch(0);
        let text = serde_json::to_vec(&unstamped).expect("plain data is written as JSON");
        let hash = blake3::hash(&text);
        self.tree.not_before = Some(now + begun.elapsed() * MAKE_SHARE);
        let looked_at = (!is_undecided).then_some(now);
        self.tree.compared_at = Some(now);
        if self.tree.last == Some(hash) {
            self.tree.clean_at = looked_at;
            self.tree.untold = None;
            return;
        }
        let telling = Told::of(&document);
        self.tree.untold = Some(Untold { removals: telling.removals_beyond(&self.tree.told) });
        if self.fenced.is_some() {
            return;
        }
        self.tree.looked_at = looked_at;
        self.tree.last = Some(hash);
        self.tree.running = true;
        self.tree.telling = telling;
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
                self.tree.untold = None;
                let told = std::mem::take(&mut self.tree.telling);
                let before = std::mem::replace(&mut self.tree.told, told);
                self.removals_stand(&before.loose);
                self.tier3_away.ended(&Cause::Tree);
            }
            Err(error) => {
                if error.uses_number() {
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

    /// The bytes of a file reached Tier-3, so that something need not be withheld any more.
    pub(crate) fn tree_may_tell_more(&mut self, file: FileId) {
        if self.tree.waits_for.contains(&file) {
            self.tree_tells_more();
        } else if self.tree.withheld {
            // The document on its way says all that this file could add: a flush does not wait for another one.
            self.ledger.tree_changed = true;
            self.tree.clean_at = None;
        }
    }

    /// Looks again at everything that was withheld until something reached Tier-3.
    pub(crate) fn tree_looks_at_withheld(&mut self) {
        if self.tree.withheld {
            self.tree_tells_more();
        }
    }

    /// Tier-3 holds something that may differ from what the tree shows: the last document does not say so.
    pub(crate) fn tree_tells_more(&mut self) {
        self.ledger.tree_changed = true;
        // The document that is on its way does not say so either.
        (self.tree.clean_at, self.tree.looked_at) = (None, None);
    }

    /// The number of the newest document of Tier-3, unless one is on its way.
    pub(crate) fn tree_in_tier3(&self) -> Option<u64> {
        (self.tree.number > 0 && !self.tree.running).then_some(self.tree.number)
    }

    /// Tier-3 lost the last document: what it said goes there as the next one.
    pub(crate) fn write_tree_again(&mut self) {
        self.tree.last = None;
        self.tree_tells_more();
    }

    /// The tree as it is, and what is withheld from it.
    fn tree_document(&self, snapshot: &TreeSnapshot, now: Instant) -> (TreeDocument, LeftOut) {
        let path = |bytes: &[u8]| RelPath::new(bytes.to_vec()).ok();
        let (stale, begun) = (self.ledger.stale_checkpoints(), self.begun(now).collect());
        let unsaved = Unsaved::of(self.ledger.books.values(), stale, begun, &self.ledger.loose, snapshot);
        let is_known = |path: &RelPath| path.parent().is_none_or(|above| !unsaved.has(&above));
        let (symlinks, mut withheld) = self.links_to_tell(snapshot, is_known);
        let directories: Vec<_> = snapshot
            .directories
            .iter()
            .filter_map(|node| Some(Directory { path: path(&node.path)?, attributes: attributes_of(node) }))
            .filter(|directory| {
                let left_out = unsaved.has(&directory.path);
                withheld |= left_out;
                !left_out
            })
            .collect();
        let specials = self.specials_to_tell(snapshot, is_known);
        let hard_links = snapshot
            .hard_links
            .iter()
            .filter_map(|link| Some(HardLink { path: path(&link.path)?, to: path(&link.to)? }))
            .filter(|link| is_known(&link.path));
        let here = Here::of(snapshot, self.ledger.books.values());
        let mut removed = self.removed_of_checkpoints(&here, now);
        removed.left_out.withheld |= withheld;
        removed.left_out.stale = unsaved.is_stale();
        let removed_loose = self.removed_loose(&here, &mut removed.left_out.waits_for);
        let shown = here.shown.values().filter(|shown| shown.otherwise);
        let document = TreeDocument {
            format: FORMAT,
            epoch: self.shared.drain.epoch(),
            root: Some(attributes_of(&snapshot.root)),
            directories,
            symlinks,
            specials,
            hard_links: hard_links.collect(),
            attributes: self.changed_attributes(&here),
            shown_versions: shown.map(|shown| shown.version.record().version.clone()).collect(),
            removed_versions: removed.versions,
            removed_files: removed.files,
            removed_loose,
            metrics: self.metrics(),
        };
        (document, removed.left_out)
    }

    /// What the job removed of checkpoints.
    fn removed_of_checkpoints(&self, here: &Here<'_>, now: Instant) -> RemovedOfCheckpoints {
        let mut all = RemovedOfCheckpoints::default();
        let mut replacing = Replacing::of(self.ledger.books.values());
        for (id, Shown { version, .. }) in &here.shown {
            let whole = version.checkpoint.is_committed() && !version.record().partial;
            if replacing.asks_about(&id.run) && whole && here.shows(version) {
                replacing.stays(id);
            }
        }
        for book in self.ledger.books.values() {
            let Some(shown) = here.shown.get(&book.id) else { continue };
            let is_there = |path: &RelPath, file| here.of_path(path).is_some_and(|(there, _)| *there == file);
            let undecided = self.undecided_removal(&book.id, now, is_there);
            let mut told = match undecided {
                Some(Undecided::ComesBack) => ToldOfOne::default(),
                Some(Undecided::Now | Undecided::Lasts) | None => {
                    self.tree.told.standing(book, shown.number, |path| here.of_path(path).copied())
                }
            };
            if self.may_tell_more(&replacing, (book, shown), undecided, &mut all.left_out) {
                // A renamed checkpoint is found under its old name until Tier-3 has it under the new one.
                let waits_for = &mut all.left_out.waits_for;
                let mut lives_on = |file: FileId| {
                    let only_copy = self.is_only_copy(here, file);
                    waits_for.extend(only_copy.then_some(file));
                    only_copy
                };
                match here.removed(book, shown, |path, of| self.holds_loose(path, of)) {
                    Removed::Nothing => {}
                    Removed::Later(file) => waits_for.extend([file]),
                    Removed::All(number) if told.version >= Some(number) => {}
                    Removed::All(number) => {
                        if !shown.version.contents.values().any(|(file, _)| lives_on(*file)) {
                            told.version = Some(number);
                        }
                    }
                    Removed::Files(mut files) => {
                        files.retain(|gone| !told.files.contains(gone) && !lives_on(gone.file));
                        told.files.extend(files);
                    }
                }
            }
            all.versions.extend(told.version.map(|number| book.version_id(number)));
            all.files.extend(told.files);
        }
        all
    }

    /// Whether what a checkpoint lost, and Tier-3 does not know yet, may be told.
    fn may_tell_more(
        &self,
        replacing: &Replacing<'_>,
        (book, shown): (&Book, &Shown<'_>),
        undecided: Option<Undecided>,
        left_out: &mut LeftOut,
    ) -> bool {
        // A flush and the daemon's end mean the removals of those who live, too, and wait for a removal that is decided now.
        let told = !self.flushes.is_empty() || self.draining;
        if undecided == Some(Undecided::Now) {
            left_out.undecided.push(book.id.clone());
        }
        let written = match undecided {
            Some(Undecided::Now | Undecided::ComesBack) => false,
            _ if replacing.is_awaited_for(&book.id) || self.has_newer_in_memory(book, shown) => false,
            // Until the end has refused writers, whoever removed it may be killed.
            Some(Undecided::Lasts) if self.draining => self.shared.namespace.are_writers_refused(),
            Some(Undecided::Lasts) => told,
            None => true,
        };
        left_out.withheld |= !written;
        // A checkpoint that the daemon took out of sight, or could not bring into the tree, is not removed.
        written
            && !self.visibility.is_out_of_sight(&book.id, shown.number)
            && !self.gc.is_unshown(&book.id, shown.number)
            && !book.unreadable().is_some_and(|(number, _)| self.gc.is_unshown(&book.id, *number))
    }

    /// Whether a checkpoint that lost names has been saved again under them, and that is in memory only.
    fn has_newer_in_memory(&self, book: &Book, shown: &Shown<'_>) -> bool {
        let is_newer = |(id, number): &(CheckpointId, Number)| *id == book.id && *number > shown.number;
        book.candidate.is_some() && self.backlog.lagging.iter().any(is_newer)
    }

    /// The loose files of Tier-3 that a restart must not find under their paths.
    fn removed_loose(&self, here: &Here<'_>, waits_for: &mut BTreeSet<FileId>) -> Vec<RemovedLoose> {
        let mut removed = Vec::new();
        for (path, book) in self.ledger.loose.iter().chain(&self.ledger.removed_loose) {
            let Some(generation) = book.generation else { continue };
            let now = here.of_path(path);
            let mut told = self.tree.told.standing_loose(path, book, now);
            let is_removed = !here.keeps_loose(path, book.of) && (now.is_some() || !book.unshown);
            if is_removed && told < Some(generation) {
                let files = book.of.iter().chain(now).map(|(file, _)| *file);
                let only: Vec<_> = files.filter(|file| self.is_only_copy(here, *file)).collect();
                if only.is_empty() {
                    told = Some(generation);
                }
                waits_for.extend(only);
            }
            removed.extend(told.map(|generation| RemovedLoose { path: path.clone(), generation }));
        }
        removed.sort_unstable();
        removed
    }

    /// What files show that is not what their sidecars and manifests say.
    fn changed_attributes(&self, here: &Here<'_>) -> Vec<FileAttributes> {
        let mut changed = BTreeMap::new();
        for shown in here.shown.values() {
            let manifest = manifest_of(shown.version);
            let files = manifest.iter().flat_map(|manifest| &manifest.files);
            changed.extend(files.filter_map(|file| here.differs((file.file, file.seal), &file.attributes)));
        }
        for book in self.ledger.loose.values().chain(self.ledger.removed_loose.values()) {
            changed.extend(book.of.and_then(|of| here.differs(of, &book.attributes)));
        }
        changed.into_values().collect()
    }

    /// Whether Tier-3 holds these bytes as a loose file's newest under that path.
    fn holds_loose(&self, path: &RelPath, of: (FileId, SealNumber)) -> bool {
        let book = self.ledger.loose.get(path);
        book.is_some_and(|book| matches!(book.stage, LooseStage::Uploaded { of: done } if done == of))
    }

    /// Whether a file that lost a name has another one, under which Tier-3 does not hold it yet. Until it does, a
    /// restart finds it under the old name.
    fn is_only_copy(&self, here: &Here<'_>, file: FileId) -> bool {
        let Some(first) = here.files.get(&file) else { return false };
        let (Ok(path), of) = (RelPath::new(first.node.path.clone()), (file, first.seal)) else {
            return false;
        };
        let holds = |shown: &Shown<'_>| {
            shown.version.checkpoint.is_prepared() && shown.version.contents.get(&path) == Some(&of)
        };
        !self.holds_loose(&path, of) && !here.shown.values().any(holds)
    }
}

/// What of a checkpoint the job removed.
#[derive(Debug, PartialEq, Eq)]
enum Removed {
    Nothing,
    /// A name of it is this file's by now, whose bytes are on their way to Tier-3.
    Later(FileId),
    /// Every name of it, up to and with this version.
    All(Number),
    /// These names; others of the same version stay as they are.
    Files(Vec<RemovedFile>),
}

/// The same of all checkpoints.
#[derive(Debug, Default)]
struct RemovedOfCheckpoints {
    versions: Vec<VersionId>,
    files: Vec<RemovedFile>,
    left_out: LeftOut,
}

/// The changes that a document does not say yet.
#[derive(Debug, Default)]
struct LeftOut {
    /// Something is left out until Tier-3 has more, or until a removal is known to be meant.
    withheld: bool,
    /// Files of which Tier-3 has to have the bytes first.
    waits_for: BTreeSet<FileId>,
    /// Checkpoints of which removals are decided within moments.
    undecided: Vec<CheckpointId>,
    /// Directories that nothing is known of yet.
    stale: bool,
}

/// The version of a checkpoint that a restart is to show.
#[derive(Debug)]
struct Shown<'a> {
    number: Number,
    version: &'a VersionBook,
    /// A restart would not show it by itself.
    otherwise: bool,
}

/// The names of files in the tree, by path, and what of it Tier-3 has: the tree itself says what is gone, since books lag
/// behind it.
struct Here<'a> {
    names: HashMap<&'a [u8], (FileId, SealNumber)>,
    /// Each file, under the name that carries its bytes to Tier-3.
    files: HashMap<FileId, &'a SnapshotFile>,
    shown: BTreeMap<&'a CheckpointId, Shown<'a>>,
}

impl<'a> Here<'a> {
    fn of(snapshot: &'a TreeSnapshot, books: impl Iterator<Item = &'a Book>) -> Self {
        let mut names: HashMap<&[u8], _> =
            snapshot.files.iter().map(|file| (file.node.path.as_slice(), (file.file, file.seal))).collect();
        for link in &snapshot.hard_links {
            if let Some(of) = names.get(link.to.as_slice()).copied() {
                names.insert(&link.path, of);
            }
        }
        let files = snapshot.files.iter().map(|file| (file.file, file)).collect();
        let mut here = Self { names, files, shown: BTreeMap::new() };
        here.shown = books.filter_map(|book| Some((&book.id, here.shows_of(book)?))).collect();
        here
    }

    fn of_path(&self, path: &RelPath) -> Option<&(FileId, SealNumber)> {
        self.names.get(path.as_bytes())
    }

    /// The newest version in Tier-3 that the tree shows, if it is whole; else what a restart would show by itself.
    fn shows_of(&self, book: &'a Book) -> Option<Shown<'a>> {
        // Of one that cannot be read the names may be there, too.
        let (number, version) = shown(book, None).or_else(|| book.unreadable())?;
        let newer = above(book, Some(*number)).into_iter().rev();
        // One that keeps only what was added, where the rest had left this memory, does not stand for all of it.
        let all_there = version.contents.iter().all(|(path, of)| self.of_path(path) == Some(of));
        let has_all = |newer: &VersionBook| !all_there || is_covered(&version.contents, &newer.contents);
        let mut whole = newer.filter(|(_, version)| {
            let in_tier3 = version.checkpoint.is_prepared() && !version.record().partial;
            in_tier3 && self.shows(version) && has_all(version)
        });
        Some(match whole.next() {
            Some((number, version)) => Shown { number: *number, version, otherwise: true },
            None => Shown { number: *number, version, otherwise: false },
        })
    }

    /// Whether names of a version are in the tree, and none of them means something else.
    fn shows(&self, version: &VersionBook) -> bool {
        let now = version.contents.iter().filter_map(|(path, of)| Some((self.of_path(path)?, of)));
        let mut now = now.peekable();
        now.peek().is_some() && now.all(|(now, of)| now == of)
    }

    /// What the tree shows of a file, where that is not what Tier-3 says of the same bytes.
    fn differs(&self, of: (FileId, SealNumber), known: &Attributes) -> Option<(FileId, FileAttributes)> {
        let (file, seal) = of;
        let now = self.files.get(&file).filter(|now| now.seal == seal)?;
        let attributes = attributes_of(&now.node);
        (attributes != *known).then_some((file, FileAttributes { file, seal, attributes }))
    }

    /// Whether what Tier-3 holds of a loose file is what a restart is to find under its path. The first name of a file gets its
    /// bytes there, and until then the old ones stand; a further name is a link.
    fn keeps_loose(&self, path: &RelPath, of: Option<(FileId, SealNumber)>) -> bool {
        self.of_path(path).is_some_and(|now| {
            let first = self.files.get(&now.0).is_some_and(|file| file.node.path == path.as_bytes());
            first || of.as_ref() == Some(now)
        })
    }

    /// Looks at the version that a restart would show. A name that means something else by now is removed only once its new
    /// bytes are in Tier-3 as a loose file's; if they are on their way to a version of their own, the old ones stand until that
    /// is there.
    fn removed(
        &self,
        book: &Book,
        shown: &Shown<'_>,
        is_loose: impl Fn(&RelPath, (FileId, SealNumber)) -> bool,
    ) -> Removed {
        let Shown { number, version, .. } = shown;
        let newer = above(book, Some(*number));
        let mut all =
            version.contents.keys().chain(newer.iter().flat_map(|(_, newer)| newer.contents.keys()));
        if all.all(|path| self.of_path(path).is_none()) {
            let newest = newer.last().map_or(*number, |(newest, _)| **newest);
            return Removed::All(book.unreadable().map_or(newest, |(number, _)| newest.max(*number)));
        }
        let mut files = Vec::new();
        for (path, of) in &version.contents {
            match self.of_path(path) {
                Some(now) if now == of => {}
                Some(now) if !is_loose(path, *now) => return Removed::Later(now.0),
                Some(_) | None => files.push(RemovedFile { path: path.clone(), file: of.0, seal: of.1 }),
            }
        }
        if files.is_empty() { Removed::Nothing } else { Removed::Files(files) }
    }
}

pub(crate) fn attributes_of(node: &SnapshotNode) -> Attributes {
    let xattrs = node.xattrs.iter().map(|(name, value)| (RawText(name.clone()), Base64(value.clone())));
    Attributes {
        mode: node.mode,
        uid: node.uid,
        gid: node.gid,
        mtime_ns: node.mtime_ns,
        xattrs: xattrs.collect(),
    }
}

async fn run(shared: Arc<Shared>, number: u64, document: TreeDocument) -> Done {
    let result = loose::write_tree(&shared.drain, number, &document).await;
    Done::Tree { number, result }
}

#[cfg(test)]
#[path = "tree_test.rs"]
mod tests;

//! The next tree document, built from the tree and the books.
//!
//! Owns: which directories, links, attributes and removals the document names. Does not own: when it is written (`tree`).

use crate::node::book::{Book, LooseStage, Number, VersionBook};
use crate::node::decide::is_covered;
use crate::node::links::{named, special_file};
use crate::node::recover::{above, manifest_of, shown};
use crate::node::removals::ToldOfOne;
use crate::node::replaced::Replacing;
use crate::node::run::Engine;
use crate::node::unsaved::Unsaved;
use crate::node::visibility::Undecided;
use crate::node::visibility::noted::Removals;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tidemark_namespace::{SnapshotFile, SnapshotNode, TreeSnapshot};
use tidemark_protocol::documents::{FileAttributes, RemovedFile, RemovedLoose, SpecialFile, TreeDocument};
use tidemark_protocol::format::FORMAT;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::key::VersionId;
use tidemark_protocol::manifest::{Attributes, Base64, Directory, HardLink, Symlink};
use tidemark_protocol::path::{RawText, RelPath};
use tidemark_protocol::recognise::CheckpointId;
use tokio::time::Instant;

/// The next tree document, built from the tree and the books.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TreeNow<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> TreeNow<'a> {
    /// Returns the tree as it is, and what is withheld from it.
    pub(crate) fn tree_document(self, snapshot: &TreeSnapshot, now: Instant) -> (TreeDocument, LeftOut) {
        let path = |bytes: &[u8]| RelPath::new(bytes.to_vec()).ok();
        let (stale, begun) =
            (self.engine.ledger.stale_checkpoints(), self.engine.beginnings().begun(now).collect());
        let unsaved =
            Unsaved::of(self.engine.ledger.books.values(), stale, begun, &self.engine.ledger.loose, snapshot);
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
        let here = Here::of(snapshot, self.engine.ledger.books.values());
        let mut removed = self.removed_of_checkpoints(&here, now);
        removed.left_out.withheld |= withheld;
        removed.left_out.stale = unsaved.is_stale();
        let removed_loose = self.removed_loose(&here, &mut removed.left_out.waits_for);
        let shown = here.shown.values().filter(|shown| shown.otherwise);
        let document = TreeDocument {
            format: FORMAT,
            epoch: self.engine.shared.drain.epoch(),
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
            metrics: self.engine.said_later.documented(&self.engine.ledger),
        };
        (document, removed.left_out)
    }

    /// Returns what the job removed of checkpoints.
    fn removed_of_checkpoints(self, here: &Here<'_>, now: Instant) -> RemovedOfCheckpoints {
        let mut all = RemovedOfCheckpoints::default();
        let mut replacing = Replacing::of(self.engine.ledger.books.values());
        for (id, Shown { version, .. }) in &here.shown {
            let whole = version.checkpoint.is_committed() && !version.record().partial;
            if replacing.asks_about(&id.run) && whole && here.shows(version) {
                replacing.stays(id);
            }
        }
        let Engine { shared, ledger, visibility, file_jobs, .. } = self.engine;
        let removals = Removals { shared, ledger, visibility, file_jobs };
        for book in self.engine.ledger.books.values() {
            let Some(shown) = here.shown.get(&book.id) else { continue };
            let is_there = |path: &RelPath, file| here.of_path(path).is_some_and(|(there, _)| *there == file);
            let undecided = removals.undecided_removal(&book.id, now, is_there);
            let mut told = match undecided {
                Some(Undecided::ComesBack) => ToldOfOne::default(),
                Some(Undecided::Now | Undecided::Lasts) | None => {
                    self.engine.tree.told.standing(book, shown.number, |path| here.of_path(path).copied())
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

    /// Whether the losses of a checkpoint that Tier-3 does not know yet may be published.
    fn may_tell_more(
        self,
        replacing: &Replacing<'_>,
        (book, shown): (&Book, &Shown<'_>),
        undecided: Option<Undecided>,
        left_out: &mut LeftOut,
    ) -> bool {
        // A flush and the daemon's end mean the removals of those who live, too, and wait for a removal that is decided now.
        let told = !self.engine.flushes.is_empty() || self.engine.rights.draining;
        if undecided == Some(Undecided::Now) {
            left_out.undecided.push(book.id.clone());
        }
        let written = match undecided {
            Some(Undecided::Now | Undecided::ComesBack) => false,
            _ if replacing.is_awaited_for(&book.id) || self.has_newer_in_memory(book, shown) => false,
            // Until the end has refused writers, whoever removed it may be killed.
            Some(Undecided::Lasts) if self.engine.rights.draining => {
                self.engine.shared.namespace.gate().are_writers_refused()
            }
            Some(Undecided::Lasts) => told,
            None => true,
        };
        left_out.withheld |= !written;
        // A checkpoint that the daemon hid, or could not bring into the tree, is not removed.
        written
            && !self.engine.visibility.is_out_of_sight(&book.id, shown.number)
            && !self.engine.gc.is_unshown(&book.id, shown.number)
            && !book.unreadable().is_some_and(|(number, _)| self.engine.gc.is_unshown(&book.id, *number))
    }

    /// Whether a checkpoint that lost names has been saved again under them, and that is in memory only.
    fn has_newer_in_memory(self, book: &Book, shown: &Shown<'_>) -> bool {
        let is_newer = |(id, number): &(CheckpointId, Number)| *id == book.id && *number > shown.number;
        book.candidate.is_some() && self.engine.backlog.lagging.iter().any(is_newer)
    }

    /// Returns the loose files of Tier-3 that a restart must not find under their paths.
    fn removed_loose(self, here: &Here<'_>, waits_for: &mut BTreeSet<FileId>) -> Vec<RemovedLoose> {
        let mut removed = Vec::new();
        for (path, book) in self.engine.ledger.loose.iter().chain(&self.engine.ledger.removed_loose) {
            let Some(generation) = book.generation else { continue };
            let now = here.of_path(path);
            let mut told = self.engine.tree.told.standing_loose(path, book, now);
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

    /// Returns the attributes of files that differ from those in their sidecars and manifests.
    fn changed_attributes(self, here: &Here<'_>) -> Vec<FileAttributes> {
        let mut changed = BTreeMap::new();
        for shown in here.shown.values() {
            let manifest = manifest_of(shown.version);
            let files = manifest.iter().flat_map(|manifest| &manifest.files);
            changed.extend(files.filter_map(|file| here.differs((file.file, file.seal), &file.attributes)));
        }
        for book in self.engine.ledger.loose.values().chain(self.engine.ledger.removed_loose.values()) {
            changed.extend(book.of.and_then(|of| here.differs(of, &book.attributes)));
        }
        changed.into_values().collect()
    }

    /// Whether Tier-3 holds these bytes as a loose file's newest under that path.
    fn holds_loose(self, path: &RelPath, of: (FileId, SealNumber)) -> bool {
        let book = self.engine.ledger.loose.get(path);
        book.is_some_and(|book| matches!(book.stage, LooseStage::Uploaded { of: done } if done == of))
    }

    /// Whether a file that lost a name has another one, under which Tier-3 does not hold it yet. Until it does, a
    /// restart finds it under the old name.
    fn is_only_copy(self, here: &Here<'_>, file: FileId) -> bool {
        let Some(first) = here.files.get(&file) else { return false };
        let (Ok(path), of) = (RelPath::new(first.node.path.clone()), (file, first.seal)) else {
            return false;
        };
        let holds = |shown: &Shown<'_>| {
            shown.version.checkpoint.is_prepared() && shown.version.contents.get(&path) == Some(&of)
        };
        !self.holds_loose(&path, of) && !here.shown.values().any(holds)
    }

    /// Returns the links to publish, of those in directories that Tier-3 knows, and whether one of them waits for what it names.
    fn links_to_tell(
        self,
        snapshot: &TreeSnapshot,
        is_known: impl Fn(&RelPath) -> bool,
    ) -> (Vec<Symlink>, bool) {
        let mut waits = false;
        let mut comes: BTreeMap<&CheckpointId, bool> = BTreeMap::new();
        let links = snapshot.symlinks.iter().filter_map(|(node, target)| {
            let path = RelPath::new(node.path.clone()).ok().filter(|path| is_known(path))?;
            let told = self.engine.tree.told.links.get(&path);
            // There may be very many, and nearly all are published.
            let is_new = told.is_none_or(|told| told.target.0 != *target);
            let book =
                if is_new { named(&path, target).and_then(|named| self.checkpoint_at(&named)) } else { None };
            if let Some(book) = book
                && *comes.entry(&book.id).or_insert_with(|| self.engine.saves().first_comes(book).is_some())
            {
                waits = true;
                return told.cloned();
            }
            let (uid, gid, mtime_ns) = (node.uid, node.gid, node.mtime_ns);
            Some(Symlink { path, target: RawText(target.clone()), uid, gid, mtime_ns })
        });
        (links.collect(), waits)
    }

    /// Returns the special files to publish. On several nodes there are none: their other ends live on one of the nodes.
    fn specials_to_tell(
        self,
        snapshot: &TreeSnapshot,
        is_known: impl Fn(&RelPath) -> bool,
    ) -> Vec<SpecialFile> {
        let alone = self.engine.shared.cluster.get().is_none();
        let specials = snapshot.specials.iter().filter(|_| alone).filter_map(|(node, special)| {
            let path = RelPath::new(node.path.clone()).ok().filter(|path| is_known(path))?;
            Some(special_file(path, node, *special))
        });
        specials.collect()
    }

    /// Returns the checkpoint that a path is, or lies in.
    fn checkpoint_at(self, path: &RelPath) -> Option<&'a Book> {
        let above = std::iter::successors(Some(path.clone()), RelPath::parent);
        let mut books = above.filter_map(|at| self.engine.ledger.books.get(&CheckpointId::at(&at)?));
        books.find(|book| book.candidate.is_some())
    }
}

/// Part of a checkpoint that the job removed.
#[derive(Debug, PartialEq, Eq)]
enum Removed {
    Nothing,
    /// Nothing yet: one of its names belongs to this file now, whose bytes are on their way to Tier-3.
    Later(FileId),
    /// Every name of it, up to and with this version.
    All(Number),
    /// Some names; others of the same version stay as they are.
    Files(Vec<RemovedFile>),
}

/// Removed parts of all checkpoints.
#[derive(Debug, Default)]
struct RemovedOfCheckpoints {
    versions: Vec<VersionId>,
    files: Vec<RemovedFile>,
    left_out: LeftOut,
}

/// The changes that a document does not say yet.
#[derive(Debug, Default)]
pub(crate) struct LeftOut {
    /// Whether something is left out until Tier-3 has more, or until a removal is known to be meant.
    pub(super) withheld: bool,
    /// Files of which Tier-3 has to have the bytes first.
    pub(super) waits_for: BTreeSet<FileId>,
    /// Checkpoints whose removals are decided within moments.
    pub(super) undecided: Vec<CheckpointId>,
    /// Whether there are directories of which nothing is known yet.
    pub(super) stale: bool,
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

    /// Returns the newest version in Tier-3 that the tree shows, if it is whole. Otherwise returns the one that a restart would
    /// show by itself.
    fn shows_of(&self, book: &'a Book) -> Option<Shown<'a>> {
        // The names of an unreadable version may be in the tree, too.
        let (number, version) = shown(book, None).or_else(|| book.unreadable())?;
        let newer = above(book, Some(*number)).into_iter().rev();
        // A version that keeps only additions, since the rest had left this memory, does not stand for the whole.
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

    /// Returns the attributes that the tree shows for a file, if Tier-3 has others for the same bytes.
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

    /// Returns what the job removed of the version that a restart would show. If a name means something else now, it counts as
    /// removed only once Tier-3 has its new bytes as a loose file's. If those bytes are on their way to a version of their own, the
    /// old ones stand until that version is there.
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

#[cfg(test)]
#[path = "tree_now_test.rs"]
mod tests;

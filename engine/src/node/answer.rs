//! Reports for people: what the loop knows, in the shapes of `protocol::report`.
//!
//! Owns: filling those shapes. Does not own: the shapes (protocol), what only the daemon knows (mount, addresses).

use crate::node::book::{Book, Number, VersionBook};
use crate::node::decide::is_covered;
use crate::node::flush::covers;
use crate::node::given_up::Counts;
use crate::node::recover::above;
use crate::node::run::{Engine, Node};
use crate::node::scrub::{Target, target};
use crate::node::select::is_inside;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use tidemark_namespace::{FileState, FileView, ObjectCopy, path_of_torn, torn_path};
use tidemark_protocol::checkpoint;
use tidemark_protocol::evidence::Verdict;
use tidemark_protocol::id::{FileId, SealNumber, Timeline, Version};
use tidemark_protocol::key::{VersionId, checkpoint_path};
use tidemark_protocol::lineage;
use tidemark_protocol::manifest::ManifestFile;
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::{Candidate, CheckpointId};
use tidemark_protocol::record::RecordFile;
use tidemark_protocol::report::{
    ApiError, Checkpoint, CheckpointRef, CheckpointState, Commit, Copies, CopyCount, ErrorCode, Problem,
    RunStatus, TierStatus, Untold, path_text,
};

/// Who answers.
#[derive(Debug, Clone)]
pub struct Identity {
    pub node: String,
}

/// What `status` needs from the loop.
#[derive(Debug)]
pub struct Standing {
    pub problems: Vec<Problem>,
    pub tiers: Vec<TierStatus>,
    pub runs: Vec<RunStatus>,
    /// Files whose bytes are in this node's memory and not in Tier-3.
    pub unsaved: CopyCount,
    /// Of those, files that are not sealed yet.
    pub unsealed: CopyCount,
    /// Changes of the tree that Tier-3 was not told of.
    pub untold: Option<Untold>,
}

/// A verify target and the checkpoint it belongs to.
#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) target: Target,
    pub(crate) checkpoint: Option<Vec<u8>>,
    /// What an earlier look found, where the host copy was given up for it, or no copy is good.
    pub(crate) bad: Option<String>,
    /// Keys of objects that an earlier look found bad.
    pub(crate) suspects: BTreeSet<String>,
}

impl std::ops::Deref for Listed {
    type Target = Target;

    fn deref(&self) -> &Target {
        &self.target
    }
}

/// Why nothing can be done with a checkpoint whose commit cannot be read.
pub(crate) fn unreadable(path: &str, why: &str) -> ApiError {
    let what = format!("Tier-3 does not say any more what was committed of {path}: {why}");
    ApiError::new(
        ErrorCode::NotRecoverable,
        what,
        "restore that object from a copy of Tier-3 and restart the daemon",
    )
}

/// Names a version without saying anything about it.
pub(crate) fn checkpoint_ref(version: &checkpoint::Checkpoint) -> CheckpointRef {
    let VersionId { run, directory, timeline, version: number } = &version.record().version;
    let path = path_text(&checkpoint_path(run, directory));
    CheckpointRef { timeline: *timeline, step: version.record().step, version: *number, path }
}

impl Node {
    /// Rows of `ls`, in order of run, timeline, step and path, the newest version of each first.
    pub async fn list(&self, place: Vec<u8>, all: bool) -> Option<Vec<Checkpoint>> {
        self.ask(move |engine| engine.list(&place, all)).await
    }

    pub async fn standing(&self) -> Option<Standing> {
        self.ask(|engine| engine.standing()).await
    }

    /// Takes a person's word that the checkpoint at `path` is whole. `None` inside: there is none.
    pub async fn commit(&self, path: Vec<u8>) -> Option<Option<Commit>> {
        self.ask(move |engine| engine.commit_told(&path)).await
    }

    /// Whether the tree has this name, or a checkpoint in the tree has it.
    pub async fn is_in_tree(&self, place: Vec<u8>) -> Option<bool> {
        self.ask(move |engine| engine.is_in_tree(&place)).await
    }

    /// Whether a path means anything, also of what only `undelete` brings back.
    pub async fn is_meant(&self, place: Vec<u8>) -> Option<bool> {
        self.ask(move |engine| engine.is_meant(&place)).await
    }

    /// Whether there is anything at or below this path, in the tree or, of what the job removed, in Tier-3 alone.
    pub async fn is_known(&self, place: Vec<u8>) -> Option<bool> {
        self.ask(move |engine| engine.is_known(&place)).await
    }
}

/// What there is to check of a file that the tree does not show.
pub(super) fn stored_target(file: &ManifestFile, object: ObjectCopy) -> Target {
    Target {
        // No node of the tree has this number, and nothing is asked of it: there is no host copy.
        node: 0,
        file: file.file,
        seal: file.seal,
        path: file.path.to_string(),
        size_bytes: file.size_bytes,
        crc: file.crc64nvme,
        chunks: file.chunks.clone().into(),
        host: false,
        object: Some(object),
        more: Vec::new(),
    }
}

/// A checkpoint that no version stands for, as `ls` shows it.
fn unfinished_row<'a>(
    candidate: &Candidate,
    (timeline, version): Number,
    path: &[u8],
    state: CheckpointState,
    files: impl Iterator<Item = &'a FileView> + Clone,
    size_now: impl Fn(&FileView) -> u64,
) -> Checkpoint {
    let mut seen = BTreeSet::new();
    let (mut all, mut host) = (CopyCount::default(), CopyCount::default());
    for view in files.clone() {
        // Every name counts as a file, and the bytes of several names of one file once.
        let bytes = if seen.insert(view.file) { size_now(view) } else { 0 };
        all = CopyCount { files: all.files + 1, bytes: all.bytes + bytes };
        if view.host {
            host = CopyCount { files: host.files + 1, bytes: host.bytes + bytes };
        }
    }
    Checkpoint {
        run: Some(candidate.id.run.to_string()),
        timeline,
        step: candidate.step,
        version,
        path: path_text(path),
        bytes: all.bytes,
        files: all.files,
        framework: Some(candidate.framework.clone()),
        state,
        evidence: None,
        copies: Copies { host, ..Copies::default() },
        pinned: false,
        closed_ms: files.map(|view| view.closed_ns / 1_000_000).max(),
    }
}

/// Whether a file holds the bytes that a version lists. One that was updated in place is the same file with other bytes.
pub(super) fn is_of(entry: &RecordFile, view: &FileView) -> bool {
    view.file == entry.file && view.sealed() == Some(entry.seal)
}

/// Whether a version without a decision holds nothing that a newer one of the same checkpoint does not.
fn is_part_of_newer(book: &Book, number: Number, version: &VersionBook) -> bool {
    let newer = above(book, Some(number));
    !version.checkpoint.is_committed()
        && newer.iter().any(|(_, newer)| is_covered(&version.contents, &newer.contents))
}

impl Engine {
    fn list(&self, place: &[u8], all: bool) -> Vec<Checkpoint> {
        let mut rows = Vec::new();
        let torn = self.torn();
        let is_listed = |candidate: &Candidate, path: &RelPath| {
            let is_in = |place: &[u8]| {
                is_inside(path.as_bytes(), place, candidate.files.keys()) || path.as_bytes() == place
            };
            covers(place, &torn_path(path)) || path_of_torn(place).is_some_and(is_in)
        };
        let listed_there: BTreeSet<_> = torn
            .iter()
            .filter(|(candidate, _)| candidate.id.path().is_some_and(|path| is_listed(candidate, &path)))
            .map(|(candidate, _)| &candidate.id)
            .collect();
        for book in self.books_about(place) {
            let kept = self.kept_out_of_sight(&book.id).filter(|_| listed_there.contains(&book.id));
            let kept = kept.map(|(number, _)| number);
            let of_book = self.rows(book, all).into_iter();
            rows.extend(of_book.filter(|row| kept != Some((row.timeline, row.version))));
        }
        for (candidate, files) in &torn {
            // Where it is now: under its own path there may be another.
            if let Some(path) = candidate.id.path().filter(|path| is_listed(candidate, path)) {
                let path = torn_path(&path);
                let kept = self.kept_out_of_sight(&candidate.id);
                let number = kept.map_or_else(|| self.next_number(&candidate.id), |(number, _)| number);
                let size = |view: &FileView| self.size_now(view);
                let mut row =
                    unfinished_row(candidate, number, &path, CheckpointState::Torn, files.iter(), size);
                row.copies.object =
                    kept.map_or_else(CopyCount::default, |(_, version)| self.object_copies(version));
                rows.push(row);
            }
        }
        if all {
            let loose = self.ledger.loose.iter().filter(|(path, _)| covers(place, path.as_bytes()));
            rows.extend(loose.filter_map(|(path, _)| self.loose_row(path)));
        }
        rows.sort_by(|a, b| {
            let of = |row: &Checkpoint| (row.timeline, row.step);
            let place = a.run.cmp(&b.run).then(of(a).cmp(&of(b))).then(a.path.cmp(&b.path));
            // What the tree holds now stands above what it replaced.
            place.then(b.version.cmp(&a.version))
        });
        rows
    }

    /// The newest state of a checkpoint first; with `all` its older committed versions too.
    pub(super) fn rows(&self, book: &Book, all: bool) -> Vec<Checkpoint> {
        let mut rows = Vec::new();
        let uncovered = self.uncovered(book);
        if let Some(row) = &uncovered {
            rows.push(row.clone());
        }
        for (number, version) in book.versions.iter().rev() {
            // One that cannot be read stands for the checkpoint only where no other does.
            let unreadable =
                version.checkpoint.why_unreadable().is_some() && (all || book.committed().is_none());
            let shown = version.checkpoint.is_committed() || version.checkpoint.is_alive() || unreadable;
            if shown
                && (all || !is_part_of_newer(book, *number, version))
                && (all
                    || rows.is_empty()
                    || matches!(
                        rows[0].state,
                        CheckpointState::Open | CheckpointState::Torn | CheckpointState::Settled
                    ))
            {
                if rows.iter().any(|row| row.version == number.1 && row.timeline == number.0) {
                    continue;
                }
                rows.push(self.version_row(book, *number, version));
                if !all && version.checkpoint.is_committed() {
                    break;
                }
            }
        }
        rows
    }

    /// What a stop kept of a checkpoint that was not whole, and that lies out of sight since.
    fn kept_out_of_sight(&self, id: &CheckpointId) -> Option<(Number, &VersionBook)> {
        let mut versions = self.ledger.books.get(id)?.versions.iter().rev();
        let is_kept = |number: Number, version: &VersionBook| {
            version.record().partial && self.visibility.is_out_of_sight(id, number)
        };
        let (number, version) = versions.find(|(number, version)| is_kept(**number, version))?;
        Some((*number, version))
    }

    /// What the tree holds that no version covers: being written, torn, or waiting for evidence.
    fn uncovered(&self, book: &Book) -> Option<Checkpoint> {
        let candidate = book.candidate.as_ref()?;
        let files: Vec<_> = self.ledger.files_of(candidate, &book.scope).collect();
        if files.is_empty() {
            return None;
        }
        let present = self.ledger.present(book);
        if present.as_ref().is_some_and(|present| book.covering(&self.shared, present).is_some()) {
            return None;
        }
        let state = match &book.verdict {
            Some(Verdict::Torn { .. } | Verdict::Broken { .. }) => CheckpointState::Torn,
            Some(Verdict::Settled { .. } | Verdict::Incomplete { kept_at_ns: Some(_), .. }) => {
                CheckpointState::Settled
            }
            Some(Verdict::Complete { .. }) => CheckpointState::Complete,
            Some(Verdict::Open { .. } | Verdict::ReadIndex { .. } | Verdict::Incomplete { .. }) | None => {
                CheckpointState::Open
            }
        };
        let views = files.iter().map(|(_, view)| view.as_ref());
        let size = |view: &FileView| self.size_now(view);
        Some(unfinished_row(candidate, book.next_number(), &book.path(), state, views, size))
    }

    pub(crate) fn version_row(&self, book: &Book, number: Number, version: &VersionBook) -> Checkpoint {
        let record = version.record();
        let mut copies = Copies::default();
        let (mut seen, mut bytes) = (BTreeSet::new(), 0_u64);
        let mut views: BTreeMap<FileId, &FileView> = BTreeMap::new();
        let bad_objects = self.bad_objects_in(version);
        for entry in &record.files {
            let view = self.ledger.file(&entry.path).filter(|view| is_of(entry, view));
            views.extend(view.map(|view| (entry.file, view.as_ref())));
        }
        for entry in &record.files {
            // Every name counts as a file, and the bytes of several names of one file once.
            let new_bytes = if seen.insert(entry.file) { entry.size_bytes } else { 0 };
            bytes = bytes.saturating_add(new_bytes);
            let one = |sum: CopyCount| CopyCount {
                files: sum.files + 1,
                bytes: sum.bytes.saturating_add(new_bytes),
            };
            let view = views.get(&entry.file).copied();
            if view.is_some_and(|view| self.is_at_home(view)) {
                copies.host = one(copies.host);
            }
            if self.shared.is_copied(entry.file, entry.seal) {
                copies.peer = one(copies.peer);
            }
            if version.checkpoint.is_prepared() && !bad_objects.contains(&entry.file) {
                copies.object = one(copies.object);
            }
        }
        let files = u64::try_from(record.files.len()).expect("a count fits 64 bits");
        Checkpoint {
            run: Some(book.id.run.to_string()),
            timeline: number.0,
            step: record.step,
            version: number.1,
            path: path_text(&book.path()),
            bytes,
            files,
            framework: Some(record.framework.clone()),
            state: match version.checkpoint.state() {
                // Tier-3 has what there is of it.
                CheckpointState::Settled if book.is_torn() && book.candidate.is_some() => {
                    CheckpointState::Torn
                }
                CheckpointState::Complete if copies.peer.files == files => CheckpointState::Replicated,
                state => state,
            },
            evidence: Some(version.checkpoint.evidence().0.to_string()),
            copies,
            pinned: self.gc.pins.contains(&(book.id.clone(), number)),
            closed_ms: Some(record.completed_at_ns / 1_000_000),
        }
    }

    /// Its bytes are in the memory of the node that wrote it, as far as is known.
    fn is_at_home(&self, view: &FileView) -> bool {
        match &view.remote {
            Some(remote) => remote.host && !self.shared.is_gone(remote.home),
            None => view.host && !self.is_bad_host(view),
        }
    }

    /// The size of a file that is open, or was until its writer died, is its memory's: the view has that of the last close.
    pub(crate) fn size_now(&self, view: &FileView) -> u64 {
        match view.state {
            FileState::Open { .. } | FileState::Cut | FileState::Mapped => {
                self.shared.namespace.getattr(view.node).map_or(view.size_bytes, |now| now.size_bytes)
            }
            FileState::Closed | FileState::Sealed { .. } => view.size_bytes,
        }
    }

    pub(super) fn loose_row(&self, path: &RelPath) -> Option<Checkpoint> {
        let view = self.ledger.file(path)?;
        let (bytes, object) = self.standing_of_loose(path, view);
        let one = |here: bool| if here { CopyCount { files: 1, bytes } } else { CopyCount::default() };
        Some(Checkpoint {
            run: None,
            timeline: Timeline(0),
            step: None,
            version: Version(0),
            path: path.to_string(),
            bytes,
            files: 1,
            framework: None,
            state: CheckpointState::Loose,
            evidence: None,
            copies: Copies {
                host: one(self.is_at_home(view)),
                peer: one(view.sealed().is_some_and(|seal| self.shared.is_copied(view.file, seal))),
                object: one(object),
            },
            pinned: false,
            closed_ms: Some(view.closed_ns / 1_000_000),
        })
    }

    fn is_in_tree(&self, place: &[u8]) -> bool {
        place.is_empty()
            || self.shared.namespace.node_at(place).is_some()
            || self.ledger.books.values().any(|book| book.candidate.is_some() && book.path() == place)
    }

    fn is_known(&self, place: &[u8]) -> bool {
        let stands = |book: &Book| !above(book, None).is_empty();
        self.is_in_tree(place) || self.books_about(place).any(stands)
    }

    fn is_meant(&self, place: &[u8]) -> bool {
        let is_it = |path: RelPath| path.as_bytes() == place;
        self.is_known(place)
            || self.ledger.removed_loose.keys().any(|path| covers(place, path.as_bytes()))
            || self.torn().iter().any(|(candidate, _)| candidate.id.path().is_some_and(is_it))
    }

    /// What the tree holds of a checkpoint, as `ls` shows it; of one that is not in the tree its newest version.
    pub(crate) fn standing_row(&self, book: &Book) -> Option<Checkpoint> {
        let present = self.ledger.present(book);
        match present.as_ref().and_then(|present| book.covering(&self.shared, present)) {
            Some((number, version)) => Some(self.version_row(book, *number, version)),
            None => self.rows(book, false).into_iter().next(),
        }
    }

    fn commit_told(&mut self, path: &[u8]) -> Option<Commit> {
        let id = self.find_at(path)?.id.clone();
        let book = &self.ledger.books[&id];
        // Of bytes that are still being written nobody can say that they are whole.
        let present = self.ledger.present(book);
        // The word is about what the tree holds, not about a version above or below it.
        let covering = |book: &Book| {
            present.as_ref().and_then(|present| book.covering(&self.shared, present)).map(|(n, _)| *n)
        };
        let already = match covering(book) {
            Some(number) => book.versions[&number].checkpoint.is_proven(),
            None => book.candidate.is_none() && book.committed().is_some(),
        };
        if !already {
            let book = self.ledger.books.get_mut(&id).expect("it was found");
            book.told_of.clone_from(&present);
            self.ledger.due.insert(id.clone());
            self.look_at(&id);
        }
        let book = &self.ledger.books[&id];
        let row = self.standing_row(book)?;
        let checkpoint =
            CheckpointRef { timeline: row.timeline, step: row.step, version: row.version, path: row.path };
        Some(Commit { checkpoint, state: row.state, already })
    }

    /// The files of the tree at or below `place`, each once, with the path of its checkpoint.
    pub(crate) fn files_at<'a>(
        &'a self,
        place: &'a [u8],
    ) -> impl Iterator<Item = (&'a RelPath, &'a FileView, Option<Vec<u8>>)> {
        let mut owners: BTreeMap<&RelPath, Vec<u8>> = BTreeMap::new();
        for book in self.ledger.books.values() {
            let paths = book.candidate.iter().flat_map(|candidate| candidate.files.keys());
            owners.extend(paths.map(|path| (path, book.path())));
        }
        let mut seen = BTreeSet::new();
        self.ledger.files().filter_map(move |(path, view)| {
            let owner = owners.get(path);
            let wanted = covers(place, path.as_bytes()) || owner.is_some_and(|of| of == place);
            (wanted && seen.insert(view.file)).then(|| (path, view.as_ref(), owner.cloned()))
        })
    }

    /// The sealed files of the tree at or below `place`, and those that went out of sight because they could not be read.
    pub(crate) fn targets(&self, place: &[u8]) -> Vec<Listed> {
        let in_tree = self.files_at(place).filter_map(|(path, view, checkpoint)| {
            let target = target(path.to_string(), view)?;
            let bad = self.scrub.bad.get(&(target.file, target.seal)).cloned();
            let bad = bad.or_else(|| self.shared.restorer.losses.refusal(target.file, target.seal));
            // The presence of its object says nothing: an open has just read it.
            let bad = bad.or_else(|| self.shared.restorer.losses.why(target.file, target.seal));
            Some(Listed { target, checkpoint, bad, suspects: BTreeSet::new() })
        });
        in_tree.chain(self.lost_targets(place)).collect()
    }

    /// Everything to verify at or below `place`: the targets with all their objects, and what committed versions list that the tree
    /// does not show.
    pub(crate) fn targets_and_stored(&self, place: &[u8]) -> Vec<Listed> {
        let mut listed = self.targets(place);
        let mut stored = self.stored(place);
        for Listed { target, .. } in &mut listed {
            let also = stored.remove(&(target.file, target.seal));
            also.iter()
                .flat_map(|also| also.target.objects())
                .for_each(|object| target.add_object(object.clone()));
        }
        let place_text = path_text(place);
        let wanted = |listed: &Listed| {
            let of = listed.checkpoint.as_deref().unwrap_or_default();
            covers(place, of) || covers(place_text.as_bytes(), listed.target.path.as_bytes())
        };
        listed.extend(stored.into_values().filter(wanted));
        for Listed { target, suspects, .. } in &mut listed {
            for (key, bad) in self.scrub.bad_objects_of(target.file, target.seal) {
                if self.counts((target.file, target.seal), key) == Counts::No {
                    continue;
                }
                suspects.insert(key.clone());
                target.add_object(bad.object.clone());
            }
        }
        listed
    }

    /// The files of committed versions that may lie at or below `place`, with all objects that hold their bytes.
    fn stored(&self, place: &[u8]) -> BTreeMap<(FileId, SealNumber), Listed> {
        let mut stored: BTreeMap<_, Listed> = BTreeMap::new();
        let books = self.ledger.books.values().map(|book| (book, book.path()));
        for (book, path) in books.filter(|(book, path)| covers(path, place) || self.is_about(place, book)) {
            // What is being given up may be gone in part.
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

    fn standing(&self) -> Standing {
        let now = Instant::now();
        let runs: BTreeSet<_> = self.ledger.books.keys().map(|id| id.run.clone()).collect();
        let tiers = self.tiers();
        let (unsaved, unsealed) = self.unsaved();
        Standing {
            problems: self.problems(&tiers, now),
            tiers,
            unsaved,
            unsealed,
            untold: self.tree.untold,
            runs: runs.into_iter().map(|run| self.run_status(&run)).collect(),
        }
    }

    /// Names whose bytes are in this node's memory and not in Tier-3, and those of them that are not sealed. What Tier-3 has in a version
    /// without a decision serves no reader, and is there.
    fn unsaved(&self) -> (CopyCount, CopyCount) {
        let versions = self.ledger.books.values().flat_map(|book| book.versions.values());
        let undecided =
            versions.filter(|version| version.checkpoint.is_prepared() && version.checkpoint.is_alive());
        let listed: BTreeMap<_, _> = undecided.flat_map(|version| &version.contents).collect();
        let kept = listed.into_iter().filter_map(|(path, (file, seal))| {
            let view =
                self.ledger.file(path).filter(|view| view.file == *file && view.sealed() == Some(*seal))?;
            (view.host && view.object.is_none()).then_some(view.size_bytes)
        });
        // At the end of the daemon somebody asks once what it cost; there may be very many files.
        let loose = self.draining.then(|| self.ledger.loose.keys()).into_iter().flatten();
        let stand = loose.filter_map(|path| {
            let view = self.ledger.file(path).filter(|view| view.host && view.sealed().is_none())?;
            self.standing_of_loose(path, view).1.then_some(view.size_bytes)
        });
        let all = self.ledger.copies;
        let less =
            |left: CopyCount, bytes: u64| CopyCount { files: left.files - 1, bytes: left.bytes - bytes };
        let (unsaved, unsealed) = stand.fold(
            (
                CopyCount { files: all.unsaved_files, bytes: all.unsaved_bytes },
                CopyCount { files: all.unsealed_files, bytes: all.unsealed_bytes },
            ),
            |(unsaved, unsealed), bytes| (less(unsaved, bytes), less(unsealed, bytes)),
        );
        (kept.fold(unsaved, less), unsealed)
    }

    /// The version of a run that a job would load, of those that fit: what was removed is not there for it. Costs a pass over the versions,
    /// and a sort of them where the first was removed.
    pub(super) fn newest_in_sight(
        &self,
        run: &RunPath,
        fits: impl Fn(&checkpoint::Checkpoint) -> bool,
    ) -> Option<&checkpoint::Checkpoint> {
        let is_there = |(book, number, version): &(&Book, Number, &VersionBook)| {
            book.candidate.is_some() || !self.is_removed(book, *number, version)
        };
        type Row<'a> = (&'a Book, Number, &'a VersionBook);
        fn place<'a>(row: &Row<'a>) -> impl Ord + use<'a> {
            lineage::order_to_resume(row.2.record())
        }
        let newer_first = |a: &Row<'_>, b: &Row<'_>| place(b).cmp(&place(a));
        let books = self.ledger.books.values().filter(|book| book.id.run == *run);
        let all = books
            .flat_map(|book| book.versions.iter().map(move |(number, version)| (book, *number, version)));
        let loadable = all.filter(|(.., version)| {
            let checkpoint = &version.checkpoint;
            let stands = checkpoint.is_alive() || checkpoint.is_committed();
            stands && checkpoint.is_proven() && fits(checkpoint) && self.why_lost(version.record()).is_none()
        });
        let newest = loadable.clone().min_by(newer_first)?;
        if is_there(&newest) {
            return Some(&newest.2.checkpoint);
        }
        let mut sorted: Vec<_> = loadable.collect();
        sorted.sort_by(newer_first);
        sorted.into_iter().find(is_there).map(|(.., version)| &version.checkpoint)
    }

    fn run_status(&self, run: &RunPath) -> RunStatus {
        let watermark = self.watermark(run).map(checkpoint_ref);
        // Whole in this node's memory, or committed: what a restart of the job would load.
        let newest = self.newest_in_sight(run, |_| true);
        let damaged = self.damaged_versions(run);
        let is_durable = |found: &checkpoint::Checkpoint| {
            found.is_committed() && !damaged.contains(&found.record().version)
        };
        let durable = match newest {
            Some(newest) if !is_durable(newest) => self.newest_in_sight(run, is_durable),
            newest => newest,
        };
        let (recoverable, durable) = (newest.map(checkpoint_ref), durable.map(checkpoint_ref));
        let lag = self.lag(Some(run));
        RunStatus {
            run: run.to_string(),
            // What is not whole is never the latest (P1).
            latest: recoverable.clone(),
            watermark,
            recoverable,
            durable,
            lag_versions: lag.versions,
            lag_bytes: lag.bytes,
            lag_seconds: lag.seconds,
        }
    }
}

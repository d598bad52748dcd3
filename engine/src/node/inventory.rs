//! The rows of `ls`, `show` and `verify`.
//!
//! Owns: which files, versions and copies a row counts. Does not own: the requests (`answer`), what is bad (`damage`).

use crate::node::answer::{Listed, is_of, is_part_of_newer, unfinished_row};
use crate::node::book::{Book, Number, VersionBook};
use crate::node::damage::BadCopies;
use crate::node::flush::covers;
use crate::node::given_up::Counts;
use crate::node::outstanding::Outstanding;
use crate::node::run::Engine;
use crate::node::scrub::target;
use crate::node::select::is_inside;
use std::collections::{BTreeMap, BTreeSet};
use tidemark_namespace::{FileState, FileView, path_of_torn, torn_path};
use tidemark_protocol::evidence::Verdict;
use tidemark_protocol::id::{FileId, Timeline, Version};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{Candidate, CheckpointId};
use tidemark_protocol::report::{Checkpoint, CheckpointState, Copies, CopyCount, path_text};

/// The rows of `ls`, `show` and `verify`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inventory<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> Inventory<'a> {
    pub(crate) fn list(self, place: &[u8], all: bool) -> Vec<Checkpoint> {
        let mut rows = Vec::new();
        let torn = self.engine.sessions().torn();
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
        for book in self.engine.by_path().books_about(place) {
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
                let number =
                    kept.map_or_else(|| self.engine.books().next_number(&candidate.id), |(number, _)| number);
                let size = |view: &FileView| self.size_now(view);
                let mut row =
                    unfinished_row(candidate, number, &path, CheckpointState::Torn, files.iter(), size);
                row.copies.object = kept.map_or_else(CopyCount::default, |(_, version)| {
                    BadCopies { engine: self.engine }.object_copies(version)
                });
                rows.push(row);
            }
        }
        if all {
            let loose = self.engine.ledger.loose.iter().filter(|(path, _)| covers(place, path.as_bytes()));
            rows.extend(loose.filter_map(|(path, _)| self.loose_row(path)));
        }
        rows.sort_by(|a, b| {
            let of = |row: &Checkpoint| (row.timeline, row.step);
            let place = a.run.cmp(&b.run).then(of(a).cmp(&of(b))).then(a.path.cmp(&b.path));
            // Present content of the tree stands above the versions that it replaced.
            place.then(b.version.cmp(&a.version))
        });
        rows
    }

    /// Returns the newest state of a checkpoint first. With `all`, its older committed versions follow.
    pub(crate) fn rows(self, book: &Book, all: bool) -> Vec<Checkpoint> {
        let mut rows = Vec::new();
        let uncovered = self.uncovered(book);
        if let Some(row) = &uncovered {
            rows.push(row.clone());
        }
        for (number, version) in book.versions.iter().rev() {
            // An unreadable version stands for the checkpoint only where no other does.
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

    /// Returns the newest partial version that is hidden. A stop of the daemon kept it of a checkpoint that was not whole.
    fn kept_out_of_sight(self, id: &CheckpointId) -> Option<(Number, &'a VersionBook)> {
        let mut versions = self.engine.ledger.books.get(id)?.versions.iter().rev();
        let is_kept = |number: Number, version: &VersionBook| {
            version.record().partial && self.engine.visibility.is_out_of_sight(id, number)
        };
        let (number, version) = versions.find(|(number, version)| is_kept(**number, version))?;
        Some((*number, version))
    }

    /// Returns the row for files in the tree that no version covers: they are being written, torn, or waiting for evidence.
    fn uncovered(self, book: &Book) -> Option<Checkpoint> {
        let candidate = book.candidate.as_ref()?;
        let files: Vec<_> = self.engine.ledger.files_of(candidate, &book.scope).collect();
        if files.is_empty() {
            return None;
        }
        let present = self.engine.ledger.present(book);
        if present.as_ref().is_some_and(|present| book.covering(&self.engine.shared, present).is_some()) {
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

    pub(crate) fn version_row(self, book: &Book, number: Number, version: &VersionBook) -> Checkpoint {
        let record = version.record();
        let mut copies = Copies::default();
        let (mut seen, mut bytes) = (BTreeSet::new(), 0_u64);
        let mut views: BTreeMap<FileId, &FileView> = BTreeMap::new();
        let bad_objects = BadCopies { engine: self.engine }.bad_objects_in(version);
        for entry in &record.files {
            let view = self.engine.ledger.file(&entry.path).filter(|view| is_of(entry, view));
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
            if self.engine.shared.is_copied(entry.file, entry.seal) {
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
            pinned: self.engine.gc.pins.contains(&(book.id.clone(), number)),
            closed_ms: Some(record.completed_at_ns / 1_000_000),
        }
    }

    /// Whether the bytes are in the memory of the node that wrote the file, as far as this node knows.
    fn is_at_home(self, view: &FileView) -> bool {
        match &view.remote {
            Some(remote) => remote.host && !self.engine.shared.is_gone(remote.home),
            None => view.host && !BadCopies { engine: self.engine }.is_bad_host(view),
        }
    }

    /// Returns a file's size now. While the file is open or mapped, or after its writer died, Tier-1 knows the size: the view has
    /// that of the last close.
    pub(crate) fn size_now(self, view: &FileView) -> u64 {
        match view.state {
            FileState::Open { .. } | FileState::Cut | FileState::Mapped => {
                self.engine.shared.namespace.getattr(view.node).map_or(view.size_bytes, |now| now.size_bytes)
            }
            FileState::Closed | FileState::Sealed { .. } => view.size_bytes,
        }
    }

    pub(crate) fn loose_row(self, path: &RelPath) -> Option<Checkpoint> {
        let view = self.engine.ledger.file(path)?;
        let (bytes, object) = Outstanding { engine: self.engine }.standing_of_loose(path, view);
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
                peer: one(view.sealed().is_some_and(|seal| self.engine.shared.is_copied(view.file, seal))),
                object: one(object),
            },
            pinned: false,
            closed_ms: Some(view.closed_ns / 1_000_000),
        })
    }

    /// Returns the row for what the tree holds of a checkpoint, as `ls` shows it. If the tree holds nothing, the row is that of the
    /// newest version.
    pub(crate) fn standing_row(self, book: &Book) -> Option<Checkpoint> {
        let present = self.engine.ledger.present(book);
        match present.as_ref().and_then(|present| book.covering(&self.engine.shared, present)) {
            Some((number, version)) => Some(self.version_row(book, *number, version)),
            None => self.rows(book, false).into_iter().next(),
        }
    }

    /// Returns the files of the tree at or below `place`, each once, with the path of its checkpoint.
    pub(crate) fn files_at(
        self,
        place: &'a [u8],
    ) -> impl Iterator<Item = (&'a RelPath, &'a FileView, Option<Vec<u8>>)> {
        let mut owners: BTreeMap<&RelPath, Vec<u8>> = BTreeMap::new();
        for book in self.engine.ledger.books.values() {
            let paths = book.candidate.iter().flat_map(|candidate| candidate.files.keys());
            owners.extend(paths.map(|path| (path, book.path())));
        }
        let mut seen = BTreeSet::new();
        self.engine.ledger.files().filter_map(move |(path, view)| {
            let owner = owners.get(path);
            let wanted = covers(place, path.as_bytes()) || owner.is_some_and(|of| of == place);
            (wanted && seen.insert(view.file)).then(|| (path, view.as_ref(), owner.cloned()))
        })
    }

    /// Returns the sealed files of the tree at or below `place`, and those hidden because they could not be read.
    pub(crate) fn targets(self, place: &[u8]) -> Vec<Listed> {
        let in_tree = self.files_at(place).filter_map(|(path, view, checkpoint)| {
            let target = target(path.to_string(), view)?;
            let bad = self.engine.scrub.bad.get(&(target.file, target.seal)).cloned();
            let bad = bad.or_else(|| self.engine.shared.restorer.losses.refusal(target.file, target.seal));
            // The presence of its object says nothing: an open has just read it.
            let bad = bad.or_else(|| self.engine.shared.restorer.losses.why(target.file, target.seal));
            Some(Listed { target, checkpoint, bad, suspects: BTreeSet::new() })
        });
        in_tree
            .chain(self.engine.visibility.lost_targets(&self.engine.shared, &self.engine.ledger, place))
            .collect()
    }

    /// Returns everything to verify at or below `place`: the targets with all their objects, and files that committed versions list
    /// but the tree does not show.
    pub(crate) fn targets_and_stored(self, place: &[u8]) -> Vec<Listed> {
        let mut listed = self.targets(place);
        let mut stored = self.engine.still_counts().stored(place);
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
            for (key, bad) in self.engine.scrub.bad_objects_of(target.file, target.seal) {
                if self.engine.still_counts().counts((target.file, target.seal), key) == Counts::No {
                    continue;
                }
                suspects.insert(key.clone());
                target.add_object(bad.object.clone());
            }
        }
        listed
    }
}

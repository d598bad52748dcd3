//! Committed checkpoints that cannot be read whole any more: said once, and out of sight where an older one is whole, so that a
//! job that comes back loads that; in sight again once they were read whole after all.
//!
//! Owns: which files have no good copy left, and what follows for their checkpoint. Does not own: finding that out (an open,
//! `verify`), what a job comes back to (`protocol::recovery`).
//!
//! The next daemon knows nothing of it: it finds out again, at the first open.

use crate::node::Shared;
use crate::node::answer::Listed;
use crate::node::book::{Book, Number, VersionBook};
use crate::node::decide::{is_covered, seal_of};
use crate::node::flush::covers;
use crate::node::problems::and_more;
use crate::node::run::Engine;
use crate::node::scrub::target;
use std::collections::{BTreeMap, BTreeSet};
use tidemark_namespace::{FileView, FsError, torn_path};
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::lineage;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::record::Record;
use tidemark_protocol::report::{EventLevel, path_text};

impl Shared {
    /// Why a version cannot be read whole; none for all that is known. Costs nothing while nothing is lost.
    pub(crate) fn why_lost(&self, record: &Record) -> Option<String> {
        let losses = &self.restorer.losses;
        if losses.is_empty() {
            return None;
        }
        record.files.iter().find_map(|file| losses.why(file.file, file.seal))
    }
}

impl Engine {
    /// Why a version cannot be read whole; none for all that is known.
    pub(crate) fn why_lost(&self, record: &Record) -> Option<String> {
        self.shared.why_lost(record)
    }

    /// Whether the job, or a person, took all names of a version away, and nothing brings them back by itself.
    pub(crate) fn is_removed(&self, book: &Book, number: Number, version: &VersionBook) -> bool {
        !version.contents.is_empty()
            && self.are_removals_meant(book, number)
            && version.contents.keys().all(|path| self.is_gone(path))
    }

    /// Whether names of a version that are gone were taken away by the job, or by a person, and nothing brings them back by itself.
    pub(crate) fn are_removals_meant(&self, book: &Book, number: Number) -> bool {
        !self.visibility.may_be_undone(&book.id)
            && !self.visibility.is_out_of_sight(&book.id, number)
            && !self.gc.is_unshown(&book.id, number)
    }

    /// Neither the tree has the name, nor what is out of sight.
    pub(crate) fn is_gone(&self, path: &RelPath) -> bool {
        let namespace = &self.shared.namespace;
        namespace.node_at(path.as_bytes()).is_none() && namespace.node_at(&torn_path(path)).is_none()
    }

    /// Checkpoints that were committed and cannot be read whole, and why; not what was removed, nor what a newer version of the same
    /// checkpoint took the place of. Costs a pass over the versions, and over their files where something is lost.
    pub(crate) fn lost_checkpoints(&self) -> Vec<(String, String)> {
        let mut lost = Vec::new();
        for book in self.ledger.books.values() {
            let committed = book.committed().filter(|(_, version)| self.why_lost(version.record()).is_some());
            // One that was committed after the damage stands in for it.
            let unreadable = book
                .unreadable()
                .filter(|(number, _)| book.committed().is_none_or(|(committed, _)| committed < *number));
            let Some((number, version)) = unreadable.or(committed) else { continue };
            let unreadable = version.checkpoint.why_unreadable().map(ToOwned::to_owned);
            let Some(why) = unreadable.or_else(|| self.why_lost(version.record())) else { continue };
            if !self.is_removed(book, *number, version) {
                lost.push((path_text(&book.path()), why));
            }
        }
        lost
    }

    /// Files outside checkpoints of which no copy is good, in a sentence: there may be thousands. Costs a pass over such files where
    /// something is lost.
    pub(crate) fn lost_loose(&self) -> Option<String> {
        let losses = &self.shared.restorer.losses;
        if losses.is_empty() {
            return None;
        }
        let mut lost = self.ledger.loose.keys().filter_map(|path| {
            let view = self.ledger.file(path)?;
            let (file, seal) = (view.file, view.sealed()?);
            Some((path, losses.refusal(file, seal).or_else(|| losses.why(file, seal))?))
        });
        let (path, why) = lost.next()?;
        Some(and_more(format!("{path} cannot be read: {why}"), lost.count(), "files outside checkpoints"))
    }

    /// Committed, or proven and on its way, and all of it can be read.
    pub(crate) fn is_loadable(&self, checkpoint: &Checkpoint) -> bool {
        let proven = checkpoint.is_committed() || checkpoint.is_alive() && checkpoint.is_proven();
        proven && self.why_lost(checkpoint.record()).is_none()
    }

    /// All names of a version are in the tree as this checkpoint, with its bytes, whatever lies beside them.
    pub(crate) fn is_in_sight(&self, book: &Book, version: &VersionBook) -> bool {
        book.candidate.is_some() && self.shows_all(version)
    }

    /// All names of a version are in the tree, with its bytes, whatever checkpoint they count for.
    pub(crate) fn shows_all(&self, version: &VersionBook) -> bool {
        let contents = &version.contents;
        !contents.is_empty() && contents.iter().all(|(path, held)| self.shows(path, *held))
    }

    /// How many names of a version are in the tree, with its bytes.
    pub(crate) fn names_in_sight(&self, version: &VersionBook) -> usize {
        version.contents.iter().filter(|(path, held)| self.shows(path, **held)).count()
    }

    fn shows(&self, path: &RelPath, held: (FileId, SealNumber)) -> bool {
        self.ledger.file(path).and_then(|view| seal_of(view)) == Some(held)
    }

    /// Takes out of sight what was found to be lost since the last time.
    pub(crate) fn hide_lost(&mut self) {
        if self.shields_nothing() || !self.shared.restorer.losses.take_news() {
            return;
        }
        let lost = |book: &Book| {
            let (number, version) = book.committed()?;
            let why = self.why_lost(version.record())?;
            let present = self.ledger.present(book)?;
            // A job takes the newest: an older one does no harm. And where nothing is left to load it must fail, and not
            // begin at step 0.
            let whole = self.whole_of(&book.id.run, Some(&book.id), self.stands_in_for(book))?;
            let is_newer = lineage::order(version.record()) > lineage::order(whole.record());
            (is_newer && is_covered(&present, &version.contents)).then(|| (book.id.clone(), *number, why))
        };
        let lost: Vec<_> = self.ledger.books.values().filter_map(lost).collect();
        for (id, number, why) in lost {
            if let Err(error) = self.hide_version(&id, number, &why) {
                tracing::error!(checkpoint = %format_args!("{}/{}", id.run, id.directory), %error, "what cannot be read whole stays in sight");
            }
        }
    }

    /// Puts back what went out of sight as lost, and of which no file is known to be lost any more. Where something else has the name by now,
    /// it stays where it is. Costs nothing but where a file was read whole that was lost.
    pub(crate) fn show_found(&mut self) {
        if !self.shared.restorer.losses.take_good_news() {
            return;
        }
        let out_of_sight = &self.visibility.out_of_sight;
        self.visibility.lost.retain(|of| out_of_sight.contains(of));
        let whole = |(id, number): &&(CheckpointId, Number)| {
            self.ledger.books[id].candidate.is_none()
                && self.why_lost(self.version(id, *number).record()).is_none()
        };
        let found: Vec<_> = self.visibility.lost.iter().filter(whole).cloned().collect();
        let hidden = || self.shared.namespace.torn_files().iter().filter_map(seal_of).collect();
        let hidden: BTreeSet<_> = if found.is_empty() { BTreeSet::new() } else { hidden() };
        // A save that was torn since may have taken the place.
        let is_all_there = |(id, number): &(CheckpointId, Number)| {
            self.version(id, *number).contents.values().all(|held| hidden.contains(held))
        };
        let found: Vec<_> = found.into_iter().filter(is_all_there).collect();
        for of in found {
            let mut torn = self.torn().into_iter().map(|(candidate, _)| candidate);
            let Some(candidate) = torn.find(|candidate| candidate.id == of.0) else { continue };
            self.visibility.lost.remove(&of);
            match self.show_names(&candidate) {
                Ok(()) => {
                    let what = format!("version {} was read whole after all, and is in sight again", of.1.1);
                    self.event(EventLevel::Info, "found", &of.0, what);
                }
                Err(why) => {
                    tracing::error!(checkpoint = %format_args!("{}/{}", of.0.run, of.0.directory), why, "what was read whole stays out of sight");
                }
            }
        }
    }

    /// The files of what is out of sight because it could not be read: they may be good again.
    pub(crate) fn lost_targets(&self, place: &[u8]) -> Vec<Listed> {
        let mut paths: BTreeMap<FileId, (&RelPath, Vec<u8>)> = BTreeMap::new();
        for (id, number) in &self.visibility.out_of_sight {
            let checkpoint = self.ledger.books[id].path();
            let contents = self.version(id, *number).contents.iter();
            let wanted =
                contents.filter(|(path, _)| covers(place, path.as_bytes()) || covers(place, &checkpoint));
            paths.extend(wanted.map(|(path, (file, _))| (*file, (path, checkpoint.clone()))));
        }
        if paths.is_empty() {
            return Vec::new();
        }
        let listed = |view: FileView| {
            let (path, checkpoint) = paths.get(&view.file)?;
            let target = target(path.to_string(), &view)?;
            let bad = self.shared.restorer.losses.why(target.file, target.seal);
            Some(Listed { target, checkpoint: Some(checkpoint.clone()), bad, suspects: BTreeSet::new() })
        };
        self.shared.namespace.torn_files().into_iter().filter_map(listed).collect()
    }

    fn hide_version(&mut self, id: &CheckpointId, number: Number, why: &str) -> Result<(), FsError> {
        let Some(candidate) = self.ledger.books[id].candidate.clone().filter(|_| !self.was_returned(id))
        else {
            return Ok(());
        };
        self.hide_names(&candidate)?;
        // Nobody removed it.
        self.gc.keep_unshown(id.clone(), number);
        self.visibility.out_of_sight.insert((id.clone(), number));
        self.visibility.lost.insert((id.clone(), number));
        let what = format!(
            "version {} cannot be read whole, and went out of sight, below .tidemark/torn: {why}; once it is read whole it \
             comes back, and `ckptctl undelete` puts it back at once, `ckptctl recover --plan` says what a job loads now",
            number.1
        );
        self.event(EventLevel::Error, "lost", id, what);
        let book = &self.ledger.books[id];
        let older = book.versions.range(..number).rev();
        let mut readable = older.filter(|(_, version)| {
            version.checkpoint.is_committed() && self.why_lost(version.record()).is_none()
        });
        if let Some(older) = readable.next().map(|(number, _)| *number) {
            self.serve_again(id, older);
        }
        self.follow(id, &candidate);
        Ok(())
    }
}

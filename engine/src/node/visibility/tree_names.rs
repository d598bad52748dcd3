//! The names in the tree, compared with the contents of each version.
//!
//! Owns: which versions are in the tree, whole or in part, and what stands beside them. Does not own: hiding and showing names (`torn`,
//! `lost`, `on_its_way`).

use crate::node::Shared;
use crate::node::book::{Book, BookLookup, Number, VersionBook};
use crate::node::decide::{is_covered, seal_of, waits_for};
use crate::node::ledger::{Contents, Ledger, contents};
use crate::node::problems::and_more;
use crate::node::visibility::on_its_way::Name;
use std::sync::Arc;
use tidemark_namespace::torn_path;
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::evidence::Verdict;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::{Candidate, CheckpointId, Shape, may_stand_in};
use tidemark_protocol::record::Record;
use tidemark_protocol::report::{ProblemCode, path_text};

/// Comparisons of the names in the tree with the contents of versions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TreeNames<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a Ledger,
}

impl<'a> TreeNames<'a> {
    /// Returns why a version cannot be read whole; none if no file of it is known to be lost.
    pub(crate) fn why_lost(self, record: &Record) -> Option<String> {
        self.shared.why_lost(record)
    }

    /// Whether the name is gone, neither in the tree nor hidden.
    pub(crate) fn is_gone(self, path: &RelPath) -> bool {
        let namespace = &self.shared.namespace;
        namespace.nodes().node_at(path.as_bytes()).is_none()
            && namespace.nodes().node_at(&torn_path(path)).is_none()
    }

    /// Describes in one sentence the files outside checkpoints that have no good copy: there may be thousands. Costs a pass over files
    /// outside checkpoints if anything is lost.
    pub(crate) fn lost_loose(self) -> Option<String> {
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

    /// Whether a version can be loaded: committed, or proven and on its way, and with no file known to be lost.
    pub(crate) fn is_loadable(self, checkpoint: &Checkpoint) -> bool {
        let proven = checkpoint.is_committed() || checkpoint.is_alive() && checkpoint.is_proven();
        proven && self.why_lost(checkpoint.record()).is_none()
    }

    /// Whether all names of a version are in the tree as this checkpoint, with its bytes, whatever lies beside them.
    pub(crate) fn is_in_sight(self, book: &Book, version: &VersionBook) -> bool {
        book.candidate.is_some() && self.shows_all(version)
    }

    /// Whether all names of a version are in the tree, with its bytes, whatever checkpoint they count for.
    pub(crate) fn shows_all(self, version: &VersionBook) -> bool {
        let contents = &version.contents;
        !contents.is_empty() && contents.iter().all(|(path, held)| self.shows(path, *held))
    }

    /// Counts the names of a version that are in the tree with its bytes.
    pub(crate) fn names_in_sight(self, version: &VersionBook) -> usize {
        version.contents.iter().filter(|(path, held)| self.shows(path, **held)).count()
    }

    pub(crate) fn shows(self, path: &RelPath, held: (FileId, SealNumber)) -> bool {
        self.ledger.file(path).and_then(|view| seal_of(view)) == Some(held)
    }

    pub(crate) fn shows_only(self, book: &Book, number: Number) -> bool {
        let Some(candidate) = &book.candidate else { return false };
        let present = contents(self.ledger.files_of(candidate, &book.scope));
        present.is_some_and(|present| is_covered(&present, &book.versions[&number].contents))
    }

    pub(crate) fn who_has_name(
        self,
        id: &CheckpointId,
        number: Number,
        shape: Shape,
        meanwhile: Option<Number>,
    ) -> Name {
        let book = &self.ledger.books[id];
        let namespace = &self.shared.namespace;
        let mut files = self.books().version(id, number).contents.keys();
        let is_name_free = match shape {
            // Its files were hidden one by one: their directory is also a run's, and stays.
            Shape::Flat | Shape::Family => book.candidate.is_none(),
            Shape::Tree | Shape::Single => namespace.nodes().node_at(&book.path()).is_none(),
        };
        let is_free = is_name_free && files.all(|path| namespace.nodes().node_at(path.as_bytes()).is_none());
        match meanwhile {
            Some(older) if self.shows_only(book, older) => Name::StandIn(older),
            None if is_free => Name::Free,
            // If a version stood in and is not there any more, it was removed.
            Some(_) | None => Name::Taken,
        }
    }

    /// Whether the newest version of some checkpoint of the run is loadable and has all its names.
    pub(crate) fn is_whole_in_sight(self, run: &RunPath) -> bool {
        self.ledger.books.values().filter(|book| book.id.run == *run).any(|book| {
            book.newest().is_some_and(|(_, version)| {
                self.is_loadable(&version.checkpoint) && self.is_in_sight(book, version)
            })
        })
    }

    /// Whether another checkpoint of the run that may stand in for this one is committed, readable, and in the tree.
    pub(crate) fn has_committed_beside(self, id: &CheckpointId, candidate: &Candidate) -> bool {
        let others = self.ledger.books.values().filter(|book| book.id.run == id.run && book.id != *id);
        let committed = others.filter_map(|book| Some((book, book.committed()?.1)));
        committed.into_iter().any(|(book, version)| {
            let other = version.candidate(self.ledger.rules(), &book.id);
            // The writers are not known any more, so it does not count as a trainer's.
            other.is_some_and(|other| may_stand_in(candidate, &other, false))
                && self.is_loadable(&version.checkpoint)
                && self.shared.namespace.nodes().node_at(&book.path()).is_some()
        })
    }

    /// Whether nothing more comes, and the tree has all of the newest committed version.
    pub(crate) fn is_committed_with_more(self, book: &Book) -> bool {
        matches!(book.verdict, Some(Verdict::Settled { undecided: false, .. }))
            && book.committed().is_some_and(|(_, version)| self.is_in_sight(book, version))
    }

    /// Whether the newest committed version holds all that is there, or is in the tree with other files beside it.
    pub(crate) fn is_committed_beside(self, book: &Book, present: Option<&Contents>) -> bool {
        let lies_beside = || {
            !book.apart.is_empty()
                && book.committed().is_some_and(|(_, version)| self.is_in_sight(book, version))
        };
        present.is_some_and(|present| book.is_committed_with(self.shared, present)) || lies_beside()
    }

    /// Returns another loadable checkpoint that has all names of this version by now: a model in shards, saved beside its former single
    /// file. Costs a pass over the books if the tree has nothing under the checkpoint's own name.
    pub(crate) fn successor(self, book: &Book, version: &VersionBook) -> Option<&'a Book> {
        let first = version.contents.keys().next().filter(|_| book.candidate.is_none())?;
        self.ledger.books.values().filter(|other| other.holds(first)).find(|other| {
            let has_all = |newer: &VersionBook| {
                version.contents.keys().all(|path| newer.contents.contains_key(path))
                    && self.is_loadable(&newer.checkpoint)
                    && self.is_in_sight(other, newer)
            };
            other.versions.values().any(has_all)
        })
    }

    /// Describes visible checkpoints that will not be committed as they are, in one sentence for each kind: there may be thousands.
    pub(crate) fn unproven(self) -> Vec<(ProblemCode, String)> {
        let code = |book: &&Book| {
            let verdict = book.verdict.as_ref().filter(|verdict| verdict.is_doubt());
            match verdict.filter(|_| book.candidate.is_some()) {
                Some(Verdict::Broken { .. }) => Some(ProblemCode::Broken),
                Some(_) => Some(ProblemCode::Undecided),
                None => self.recorded_doubt(book).map(|_| ProblemCode::Undecided),
            }
        };
        let of = |wanted| {
            let mut books = self.ledger.books.values().filter(|book| code(book) == Some(wanted));
            let first = books.next()?;
            let is_doubt = first.verdict.as_ref().is_some_and(Verdict::is_doubt);
            let recorded = self.recorded_doubt(first).filter(|_| !is_doubt);
            let why = recorded.map_or_else(|| waits_for(first), ToOwned::to_owned);
            let what = format!("{}: {why}", path_text(&first.path()));
            Some((wanted, and_more(what, books.count(), "checkpoints")))
        };
        [ProblemCode::Broken, ProblemCode::Undecided].into_iter().filter_map(of).collect()
    }

    /// Returns the doubt with which Tier-3 got what the tree holds of a checkpoint. None if that was proven since, or if it only keeps
    /// files beside a committed version. Costs a pass over the files of a checkpoint that has a doubted version.
    fn recorded_doubt(self, book: &'a Book) -> Option<&'a str> {
        let is_doubted = |version: &VersionBook| version.record().doubted && !version.checkpoint.is_proven();
        if !book.versions.values().any(is_doubted) {
            return None;
        }
        let present = self.ledger.present(book)?;
        let (_, version) = book.covering(self.shared, &present)?;
        let stands = is_doubted(version) && !self.is_committed_beside(book, Some(&present));
        stands.then(|| version.record().evidence_detail.as_str())
    }

    fn books(self) -> BookLookup<'a> {
        BookLookup { ledger: self.ledger }
    }
}

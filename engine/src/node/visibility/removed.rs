//! Puts the newest checkpoint of a run back when the process that removed it failed before anything else was whole.
//!
//! Owns: who removed which checkpoint, asking how they ended, carrying the decision out. Does not own: the decision
//! (`protocol::removal`), what a removal means for Tier-3 (`tree`, `gc`).
//!
//! Nothing of it outlives the daemon: the next one takes every removal for meant. One that is waited for is not in Tier-3 yet,
//! so that the names are there again after the death of a node.

use crate::namespace::{Ended, FileView, WriterId};
use crate::node::book::{Book, Number};
use crate::node::decide::is_alive;
use crate::node::run::Engine;
use crate::node::visibility::timetable::Subject;
use crate::node::visibility::tracker::is_of_run;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use tidemark_protocol::lineage;
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::removal::{Actor, Left, Removal, decide};
use tidemark_protocol::report::EventLevel;

/// Files whose removers are remembered: of a checkpoint with more of them, the last say who it was.
const REMOVERS_MAX: usize = 4096;

fn wrote(view: &FileView, who: &WriterId) -> bool {
    view.writers.iter().any(|of| of.process() == who.process())
}

impl Engine {
    /// Takes down who removed what since the last time. Before the books are looked at.
    pub(crate) fn hear_removers(&mut self) {
        let heard = self.shared.namespace.take_removers();
        self.visibility.removers.extend(heard);
        while self.visibility.removers.len() > REMOVERS_MAX {
            self.visibility.removers.pop_first();
        }
    }

    /// Looks whether names of a checkpoint's newest version are gone, and who took them. Costs a pass over its files while
    /// any removal is remembered.
    pub(crate) fn note_removal(&mut self, id: &CheckpointId) {
        if self.visibility.removers.is_empty() {
            return;
        }
        let Some((_, version)) = self.ledger.books.get(id).and_then(Book::newest) else { return };
        let mut removers: Vec<Arc<WriterId>> = Vec::new();
        for (path, (file, _)) in &version.contents {
            let Some(remover) = self.visibility.removers.get(file) else { continue };
            let there = self.ledger.file(path).is_some_and(|view| view.file == *file);
            if !there && !removers.contains(remover) {
                removers.push(Arc::clone(remover));
            }
        }
        if !removers.is_empty() {
            self.visibility.noted.insert(id.clone(), removers);
        }
    }

    /// Decides about what was removed, the newest first.
    pub(crate) fn undo_removals(&mut self, now: Instant) {
        let idle = self.draining || !self.may_write();
        if idle || self.visibility.rests(&Subject::Removals, now) {
            return;
        }
        let mut noted: Vec<_> = self.visibility.noted.keys().cloned().collect();
        let stamp = |id: &CheckpointId| {
            self.ledger.books[id].newest().map(|(_, version)| lineage::order(version.record()))
        };
        noted.sort_by(|one, other| stamp(other).cmp(&stamp(one)));
        let awaited: Vec<_> = noted.iter().filter_map(|id| self.undo_removal(id)).collect();
        let lives = awaited.iter().find_map(|actor| match actor {
            Actor::Alive { process } => Some(*process),
            Actor::Ended | Actor::Meant | Actor::Failed { .. } | Actor::Lost { .. } => None,
        });
        // How one ended that has, the kernel says within moments, and a job may be started again in a second.
        if !awaited.contains(&Actor::Ended) {
            self.visibility.timetable.ask_again(Subject::Removals, now, lives);
        }
        let namespace = &self.shared.namespace;
        // Thousands of files have one remover.
        let mut asked = BTreeMap::new();
        self.visibility.removers.retain(|_, who| {
            let told = || {
                namespace.is_end_awaited(who) || namespace.end(who).is_some_and(|end| end.how != Ended::Well)
            };
            *asked.entry(who.process()).or_insert_with(told)
        });
    }

    /// Gives the process that is waited for.
    fn undo_removal(&mut self, id: &CheckpointId) -> Option<Actor> {
        let removers: Vec<_> = self.visibility.noted[id].iter().map(|who| self.actor(who, &id.run)).collect();
        let book = &self.ledger.books[id];
        let newest = book.newest();
        let committed = newest.filter(|(_, version)| version.checkpoint.is_committed());
        let committed = committed.map(|(number, _)| *number);
        let left = Left {
            whole: self.is_whole_in_sight(&id.run),
            committed: committed.is_some_and(|number| self.gc.check_stays(&(id.clone(), number)).is_ok()),
            on_its_way: newest
                .is_some_and(|(_, version)| version.checkpoint.is_alive() && version.checkpoint.is_proven()),
        };
        match (decide(&removers, left), committed) {
            (Removal::Waits { .. }, _) => {
                return removers
                    .into_iter()
                    .find(|actor| matches!(actor, Actor::Alive { .. } | Actor::Ended));
            }
            // What it removed may have another name by now.
            (Removal::Undone { .. }, Some(_)) if self.had_not_heard(is_of_run(&id.run)) => {}
            (Removal::Undone { why }, Some(number)) => self.undo(id, number, &why),
            (Removal::Undone { .. } | Removal::Stands { .. }, _) => self.end_removal(id),
        }
        None
    }

    /// How a process stands that removed names of a run, or made some.
    pub(crate) fn actor(&self, who: &WriterId, run: &RunPath) -> Actor {
        let namespace = &self.shared.namespace;
        if is_alive(namespace, who) {
            return Actor::Alive { process: who.tgid };
        }
        let failed = || Actor::Failed { process: who.tgid };
        match namespace.end(who).map(|end| end.how) {
            Some(Ended::Killed) => failed(),
            // rm(1) exits with 1 for a name that is not there, and meant what it removed.
            Some(Ended::Failed) if self.has_written(who, run) => failed(),
            None if namespace.is_end_awaited(who) => Actor::Ended,
            None if self.has_begun_another(who, run) => Actor::Lost { process: who.tgid },
            Some(Ended::Well | Ended::Failed) | None => Actor::Meant,
        }
    }

    /// Whether files of a checkpoint of the run are there that a process wrote, in sight or not.
    fn has_begun_another(&self, who: &WriterId, run: &RunPath) -> bool {
        self.files_of_checkpoints(|of| of.run == *run).any(|view| wrote(view, who))
            || self.wrote_torn(who, run)
    }

    /// Whether a process wrote files of the run that are there, in sight or not.
    fn has_written(&self, who: &WriterId, run: &RunPath) -> bool {
        let in_run = |path: &RelPath| run.path().is_none_or(|run| path.is_below(run));
        self.ledger.files().any(|(path, view)| in_run(path) && wrote(view, who)) || self.wrote_torn(who, run)
    }

    fn wrote_torn(&self, who: &WriterId, run: &RunPath) -> bool {
        let torn = self.torn().into_iter().filter(|(candidate, _)| candidate.id.run == *run);
        torn.flat_map(|(_, files)| files).any(|view| wrote(&view, who))
    }

    fn undo(&mut self, id: &CheckpointId, number: Number, why: &str) {
        let (files, back) = self.put_back(id, number);
        let what = format!("version {} is in the tree again, {back} of {files} files: {why}", number.1);
        self.event(EventLevel::Warn, "undeleted", id, what);
        self.end_removal(id);
    }

    /// It stays as it is, and Tier-3 may know.
    fn end_removal(&mut self, id: &CheckpointId) {
        self.visibility.noted.remove(id);
        for (file, _) in
            self.ledger.books[id].newest().iter().flat_map(|(_, version)| version.contents.values())
        {
            self.visibility.removers.remove(file);
        }
        self.ledger.tree_changed = true;
    }

    /// A version of the run that is proven whole has all its names.
    fn is_whole_in_sight(&self, run: &RunPath) -> bool {
        self.ledger.books.values().filter(|book| book.id.run == *run).any(|book| {
            book.newest().is_some_and(|(_, version)| {
                self.is_loadable(&version.checkpoint) && self.is_in_sight(book, version)
            })
        })
    }
}

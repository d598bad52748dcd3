//! Puts the newest checkpoint of a run back if the process that removed it failed before another checkpoint was whole.
//!
//! Owns: which process removed which checkpoint, asking how it ended, carrying the decision out. Does not own: the decision
//! (`protocol::removal`), what a removal means for Tier-3 (`tree`, `gc`).
//!
//! Nothing of this outlives the daemon: the next one takes every removal as meant. Until a removal is decided, Tier-3 does not learn of
//! it, so that the names are there again after the death of a node. A flush and the daemon's end also write removals by living
//! processes; for removals by dead ones they wait for the decision. An ending daemon puts nothing back itself. If it cuts off the next
//! save of a remover, it does not write that removal.

use crate::node::book::Number;
use crate::node::visibility::Shielding;
use crate::node::visibility::timetable::Subject;
use crate::node::visibility::tracker::is_of_run;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_namespace::{Ended, FileView, WriterId, torn_path};
use tidemark_protocol::id::FileId;
use tidemark_protocol::lineage;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::removal::{Actor, Left, Removal, decide};
use tidemark_protocol::report::EventLevel;
use tokio::time::Instant;

/// Files whose removers are remembered. If a checkpoint has more files, the last of them still say which process it was.
const REMOVERS_MAX: usize = 4096;

/// A checkpoint that lost names.
#[derive(Debug)]
pub(super) struct Noted {
    pub(super) removers: Vec<Arc<WriterId>>,
    /// Since when no remover lives, as of the last check.
    pub(super) dead_since: Option<Instant>,
    /// Whether showing the names again is left to the next daemon, because this one ends.
    pub(super) comes_back: bool,
}

/// A removal that is not decided yet, by what it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Undecided {
    /// The loop decides within moments.
    Now,
    /// The remover lives, or the decision waits for something that takes long.
    Lasts,
    /// The next daemon shows the names again.
    ComesBack,
}

/// An event that a decision waits for.
#[derive(Debug, PartialEq, Eq)]
enum Awaited {
    /// The end of this process.
    End { process: u32 },
    /// News from the kernel or from the loop, which comes within moments.
    Moments,
}

pub(crate) fn wrote(view: &FileView, who: &WriterId) -> bool {
    view.writers.iter().any(|of| of.process() == who.process())
}

impl Shielding<'_> {
    /// Records which processes removed which files since the last call. Must run before the books are examined.
    pub(crate) fn hear_removers(&mut self) {
        let heard = self.shared.namespace.writers().take_removers();
        if !heard.is_empty() && !self.visibility.out_of_sight.is_empty() {
            self.end_what_was_removed_out_of_sight(heard.iter().map(|(file, _)| *file).collect());
        }
        self.visibility.removers.extend(heard);
        while self.visibility.removers.len() > REMOVERS_MAX {
            self.visibility.removers.pop_first();
        }
    }

    /// Forgets hidden versions that a person removed below `.tidemark/torn`. The daemon itself also drops names there, for their memory.
    fn end_what_was_removed_out_of_sight(&mut self, removed: BTreeSet<FileId>) {
        let lies = |path: &RelPath| self.shared.namespace.nodes().node_at(&torn_path(path)).is_some();
        let is_removed = |(id, number): &&(CheckpointId, Number)| {
            let contents = &self.books().version(id, *number).contents;
            contents.values().any(|(file, _)| removed.contains(file)) && !contents.keys().any(lies)
        };
        let gone: Vec<_> = self.visibility.out_of_sight.iter().filter(is_removed).cloned().collect();
        for of in gone {
            self.visibility.out_of_sight.remove(&of);
            self.visibility.note_unwanted(&of.0, of.1);
            self.tree.tells_more(self.ledger);
        }
    }

    /// Records which processes removed names of a checkpoint's newest save, if any are gone.
    pub(crate) fn note_removal(&mut self, id: &CheckpointId) {
        let is_there = |path: &RelPath, file| {
            self.ledger.file(path).is_some_and(|view: &Arc<FileView>| view.file == file)
        };
        let removers = self.removals_noted().removers_of(id, is_there);
        if removers.is_empty() {
            return;
        }
        if let Some(noted) = self.visibility.noted.get_mut(id) {
            noted.removers = removers;
            return;
        }
        self.visibility.noted.insert(id.clone(), Noted { removers, dead_since: None, comes_back: false });
        self.visibility.ask_about_removals();
    }

    /// Decides about all removals that are due, the newest checkpoint first.
    pub(crate) fn undo_removals(&mut self, now: Instant) {
        if !self.rights.may_write() || self.visibility.rests(&Subject::Removals, now) {
            return;
        }
        let mut noted: Vec<_> = self.visibility.noted.keys().cloned().collect();
        let stamp = |id: &CheckpointId| {
            self.ledger.books[id].newest_save().map(|(_, version)| lineage::order(version.record()))
        };
        noted.sort_by(|one, other| stamp(other).cmp(&stamp(one)));
        let awaited: Vec<_> = noted.iter().filter_map(|id| self.undo_removal(id, now)).collect();
        let lives = awaited.iter().find_map(|awaited| match awaited {
            Awaited::End { process } => Some(*process),
            Awaited::Moments => None,
        });
        // A job may be restarted within a second.
        if !awaited.contains(&Awaited::Moments) {
            self.visibility.timetable.ask_again(Subject::Removals, now, lives);
        }
        let namespace = &self.shared.namespace;
        // A process is asked once, though it may have removed thousands of files.
        let mut asked = BTreeMap::new();
        self.visibility.removers.retain(|_, who| {
            let told = || {
                namespace.writers().is_end_awaited(who)
                    || namespace.writers().end(who).is_some_and(|end| end.how != Ended::Well)
            };
            *asked.entry(who.process()).or_insert_with(told)
        });
    }

    /// Decides about one removal, and carries the decision out. Returns what the decision waits for.
    fn undo_removal(&mut self, id: &CheckpointId, now: Instant) -> Option<Awaited> {
        let removers = &self.visibility.noted[id].removers;
        let removers: Vec<_> = removers.iter().map(|who| self.sessions().actor(who, &id.run)).collect();
        let lives = removers.iter().any(|actor| matches!(actor, Actor::Alive { .. }));
        let noted = self.visibility.noted.get_mut(id).expect("it was there a moment ago");
        noted.dead_since = if lives { None } else { noted.dead_since.or(Some(now)) };
        let book = &self.ledger.books[id];
        let newest = book.newest_save();
        let committed = newest.filter(|(_, version)| version.checkpoint.is_committed());
        let committed = committed.map(|(number, _)| *number);
        let whole = self.tree_names().is_whole_in_sight(&id.run);
        let left = Left {
            whole,
            in_hand: !whole && self.removals_noted().is_another_in_hand(id),
            committed: committed.is_some_and(|number| self.gc.check_stays(&(id.clone(), number)).is_ok()),
            on_its_way: newest
                .is_some_and(|(_, version)| version.checkpoint.is_alive() && version.checkpoint.is_proven()),
        };
        let decided = decide(&removers, left);
        if matches!(decided, Removal::Waits { .. })
            && committed.is_some()
            && self.removals_noted().saves_in_vain(id)
        {
            self.comes_back(id);
            return None;
        }
        match (decided, committed) {
            (Removal::Waits { .. }, _) => {
                let awaited = removers.iter().find_map(|actor| match actor {
                    Actor::Alive { process } => Some(Awaited::End { process: *process }),
                    Actor::Ended => Some(Awaited::Moments),
                    Actor::Meant | Actor::Failed { .. } | Actor::Lost { .. } => None,
                });
                return awaited.or_else(|| left.in_hand.then_some(Awaited::Moments));
            }
            // The removed files may have another name by now, and names that came back a moment ago are visible from now on.
            (Removal::Undone { .. }, Some(_))
                if self.shared.had_not_heard(self.ledger, is_of_run(&id.run)) =>
            {
                return Some(Awaited::Moments);
            }
            // An ending daemon hides nothing any more, so other files may have these names.
            (Removal::Undone { .. }, Some(_)) if self.rights.draining => self.comes_back(id),
            (Removal::Undone { why }, Some(number)) => self.undo(id, number, &why),
            (Removal::Undone { .. } | Removal::Stands { .. }, _) => self.end_removal(id),
        }
        None
    }

    /// Leaves it to the next daemon to show the names again.
    fn comes_back(&mut self, id: &CheckpointId) {
        let noted = self.visibility.noted.get_mut(id).expect("it was there a moment ago");
        if !std::mem::replace(&mut noted.comes_back, true) {
            self.tree.tells_more(self.ledger);
        }
    }

    fn undo(&mut self, id: &CheckpointId, number: Number, why: &str) {
        let (files, back) = self.put_back(id, number);
        let what = format!("version {} is in the tree again, {back} of {files} files: {why}", number.1);
        self.shared.event_of(EventLevel::Warn, "undeleted", id, what);
        self.end_removal(id);
    }

    /// Ends the wait for a decision: the names stay as they are, and Tier-3 may learn of it.
    fn end_removal(&mut self, id: &CheckpointId) {
        self.visibility.noted.remove(id);
        for (file, _) in
            self.ledger.books[id].newest_save().iter().flat_map(|(_, version)| version.contents.values())
        {
            self.visibility.removers.remove(file);
        }
        self.ledger.tree_changed = true;
    }
}

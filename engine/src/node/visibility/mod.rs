//! Visibility for a job that comes back: torn checkpoints are hidden, removals that were not meant are undone, and trackers name
//! whole checkpoints.
//!
//! Owns: the state for this, gathering the facts, carrying decisions out, and when each decision is made again. Does not own: the
//! decisions (`protocol::{visibility, shield, removal}`), which are pure.
//!
//! | file | handles |
//! |---|---|
//! | `torn` | checkpoints that can never be complete |
//! | `lost` | committed checkpoints that cannot be read whole any more |
//! | `kept` | parts of checkpoints that a stop kept |
//! | `on_its_way` | whole versions that are hidden together with torn files |
//! | `unwritten` | directories in which nothing was written |
//! | `removed` | removals that were not meant |
//! | `tracker` | files that name a checkpoint |
//! | `timetable` | when each decision is made again |
//!
//! Their facts come from `tree_names` (names and versions), `sessions` (writers) and `fallbacks` (what else a job can load).

pub(crate) mod fallbacks;
mod kept;
mod lost;
pub(crate) mod noted;
mod on_its_way;
mod removed;
pub(crate) mod sessions;
mod timetable;
mod torn;
mod tracker;
pub(crate) mod tree_names;
pub(crate) mod unwritten;

use crate::node::Shared;
use crate::node::book::{BookLookup, Number};
use crate::node::file_jobs::FileJobs;
use crate::node::flush::Flushes;
use crate::node::gc::Gc;
use crate::node::jobs::Done;
use crate::node::ledger::Ledger;
use crate::node::metric::SaidLater;
use crate::node::rights::Rights;
use crate::node::tree::TreeState;
use fallbacks::Fallbacks;
use noted::Removals;
use on_its_way::OnItsWay;
use removed::Noted;
pub(crate) use removed::Undecided;
use sessions::Sessions;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tidemark_namespace::{NodeId, WriterId, is_running};
use tidemark_protocol::id::FileId;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{Candidate, CheckpointId};
use timetable::{Subject, Timetable};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracker::Trackers;
pub(crate) use tracker::trackers_may_go;
use tree_names::TreeNames;
use unwritten::{Beginnings, Begun, DIRECTORIES_MAX};

/// Longest wait of a flush, or of the daemon's end, for a decision about what dead processes removed or began. By then, what they
/// wrote last is hashed and read.
const DECIDED_WITHIN: Duration = Duration::from_secs(10);

/// State of the loop for visibility. Except for what a stop writes down, nothing outlives the daemon: the next one finds out again.
#[derive(Debug, Default)]
pub(crate) struct Visibility {
    timetable: Timetable,
    /// Torn checkpoints that stay visible.
    in_sight: BTreeMap<CheckpointId, InSight>,
    /// Why each hidden checkpoint was hidden.
    hidden: BTreeMap<CheckpointId, String>,
    /// Checkpoints that an administrator wants to be visible. The next daemon hides them again.
    returned: BTreeSet<CheckpointId>,
    /// Committed versions whose names must still be put back: a program has a hidden file of theirs open.
    owed: BTreeMap<CheckpointId, Number>,
    /// Whole versions that are hidden, and get their names back once they are committed.
    on_its_way: BTreeMap<CheckpointId, OnItsWay>,
    /// Hidden versions that were not removed: those that cannot be read whole, those that are on their way, and parts that a stop kept.
    out_of_sight: BTreeSet<(CheckpointId, Number)>,
    /// Members of `out_of_sight` that could not be read whole.
    lost: BTreeSet<(CheckpointId, Number)>,
    /// Versions that the tree has not shown since the start, and whose trackers were not examined yet.
    kept: Vec<(CheckpointId, Number)>,
    /// Checkpoints hidden since the start, whose trackers could not be changed yet.
    to_follow: BTreeMap<CheckpointId, Candidate>,
    /// Trackers that wait for a checkpoint that may become whole.
    waiting: BTreeMap<RelPath, tracker::Wait>,
    /// When cut trackers were examined last.
    cut_looked_at: Option<Instant>,
    removers: BTreeMap<FileId, Arc<WriterId>>,
    /// Checkpoints that lost names, until it is clear whether that was meant.
    noted: BTreeMap<CheckpointId, Noted>,
    /// Directories made lately, by node number. Node numbers only rise, so the first entry is the oldest.
    made: BTreeMap<NodeId, Begun>,
}

/// Why a torn checkpoint stays visible.
#[derive(Debug)]
struct InSight {
    why: String,
    /// Whether it may stay for ever: no living process is known whose end is waited for.
    lasts: bool,
}

impl Visibility {
    fn rests(&self, subject: &Subject, now: Instant) -> bool {
        self.timetable.rests(subject, now, is_running)
    }

    pub(crate) fn is_out_of_sight(&self, id: &CheckpointId, number: Number) -> bool {
        self.out_of_sight.contains(&(id.clone(), number))
    }

    /// Returns why a torn checkpoint stays visible; none if that was not decided.
    pub(crate) fn why_in_sight(&self, id: &CheckpointId) -> Option<&str> {
        self.in_sight.get(id).map(|stays| stays.why.as_str())
    }

    /// Whether a torn checkpoint may stay visible for ever. If so, Tier-3 keeps what is there of it.
    pub(crate) fn may_last(&self, id: &CheckpointId) -> bool {
        self.in_sight.get(id).is_some_and(|stays| stays.lasts)
    }

    /// Returns why a checkpoint was hidden; none if the daemon before this one hid it.
    pub(crate) fn why_hidden(&self, id: &CheckpointId) -> Option<&str> {
        self.hidden.get(id).map(String::as_str)
    }

    /// Makes the next pass decide about removals.
    pub(crate) fn ask_about_removals(&mut self) {
        self.timetable.forget(&Subject::Removals);
    }

    /// Returns the whole version of a checkpoint that was hidden together with torn files, until it is committed.
    pub(crate) fn on_its_way(&self, id: &CheckpointId) -> Option<&OnItsWay> {
        self.on_its_way.get(id)
    }

    /// Whether names that a checkpoint lost may come back.
    pub(crate) fn may_be_undone(&self, id: &CheckpointId) -> bool {
        self.noted.contains_key(id)
    }

    pub(crate) fn end_owed(&mut self, id: &CheckpointId) {
        self.owed.remove(id);
        self.timetable.forget(&Subject::Owed(id.clone()));
    }

    pub(crate) fn forget_made(&mut self, node: NodeId) {
        self.made.remove(&node);
        self.timetable.forget(&Subject::Unwritten(node));
    }

    /// Whether an administrator wants the checkpoint to be visible.
    pub(crate) fn was_returned(&self, id: &CheckpointId) -> bool {
        self.returned.contains(id)
    }

    /// Records the directories that were made since the last call.
    pub(crate) fn hear_made(&mut self, shared: &Shared) {
        for made in shared.namespace.writers().take_made() {
            self.made.insert(made.directory, Begun { made, dead_since: None });
        }
        while self.made.len() > DIRECTORIES_MAX {
            let (node, _) = self.made.pop_first().expect("there are more than may be");
            self.timetable.forget(&Subject::Unwritten(node));
        }
    }

    /// Records that a version is served under a name again. If another version is on its way to that name, this one stands in for it.
    pub(crate) fn note_stand_in(&mut self, id: &CheckpointId, number: Number) {
        if let Some(on_its_way) = self.on_its_way.get_mut(id) {
            on_its_way.meanwhile = Some(number);
        }
    }

    /// Forgets a version on its way, because a person removed it where it lay hidden.
    pub(crate) fn note_unwanted(&mut self, id: &CheckpointId, number: Number) {
        if self.on_its_way.get(id).is_some_and(|on_its_way| on_its_way.number == number) {
            self.on_its_way.remove(id);
        }
    }
}

/// The parts of the loop that decisions about visibility read and change.
pub(crate) struct Shielding<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) visibility: &'a mut Visibility,
    pub(crate) gc: &'a mut Gc,
    pub(crate) said_later: &'a SaidLater,
    pub(crate) tree: &'a mut TreeState,
    pub(crate) file_jobs: &'a mut FileJobs,
    pub(crate) jobs: &'a mut JoinSet<Done>,
    pub(crate) flushes: &'a Flushes,
    pub(crate) rights: &'a Rights,
}

impl Shielding<'_> {
    /// Makes all decisions about visibility that are due, except two. [`Self::shield`] decides about a torn checkpoint right after its
    /// verdict. [`Self::undo_removals`] decides about removals after all books that are due were examined.
    pub(crate) fn look_at_all(&mut self, now: Instant) {
        self.serve_arrivals();
        self.serve_owed(now);
        self.trackers().mend_cut_trackers(now);
        self.drop_unwritten(now);
        self.trackers().follow_kept(now);
        self.trackers().follow_later(now);
        self.show_found();
        self.hide_lost();
    }

    /// Records which processes removed and made names since the last call. Must run before the books are examined.
    pub(crate) fn hear_who_changed_names(&mut self) {
        self.hear_removers();
        self.visibility.hear_made(self.shared);
    }

    pub(crate) fn trackers(&mut self) -> Trackers<'_> {
        let Self { shared, ledger, visibility, file_jobs, jobs, gc, flushes, rights, .. } = self;
        Trackers { shared, ledger, visibility, file_jobs, jobs, gc, flushes, rights }
    }

    fn books(&self) -> BookLookup<'_> {
        BookLookup { ledger: self.ledger }
    }

    fn tree_names(&self) -> TreeNames<'_> {
        TreeNames { shared: self.shared, ledger: self.ledger }
    }

    fn sessions(&self) -> Sessions<'_> {
        Sessions { shared: self.shared, ledger: self.ledger }
    }

    fn fallbacks(&self) -> Fallbacks<'_> {
        Fallbacks { shared: self.shared, ledger: self.ledger, gc: self.gc }
    }

    fn beginnings(&self) -> Beginnings<'_> {
        let Self { shared, ledger, visibility, flushes, rights, .. } = self;
        Beginnings { shared, ledger, visibility, flushes, rights }
    }

    fn removals_noted(&self) -> Removals<'_> {
        Removals {
            shared: self.shared,
            ledger: self.ledger,
            visibility: self.visibility,
            file_jobs: self.file_jobs,
        }
    }
}

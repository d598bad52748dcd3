//! What a job sees that comes back: what is torn goes out of sight, what was not meant to go comes back, and trackers name what is
//! whole.
//!
//! Owns: all that is remembered for it, and when it is asked again. Does not own: the decisions (`protocol::{visibility, shield,
//! removal}`), which are pure; here the facts for them are gathered, and what they say is carried out.
//!
//! | file | decides about |
//! |---|---|
//! | `torn` | checkpoints that can never be complete |
//! | `lost` | committed ones that cannot be read whole any more |
//! | `kept` | what a stop kept of those that were not whole |
//! | `on_its_way` | whole versions that go with what is torn |
//! | `unwritten` | directories in which nothing was written |
//! | `removed` | removals that were not meant |
//! | `tracker` | files that name a checkpoint |
//! | `timetable` | when each is asked again |
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
use crate::node::book::Number;
use crate::node::run::Engine;
use on_its_way::OnItsWay;
use removed::Noted;
pub(crate) use removed::Undecided;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_namespace::{NodeId, WriterId, is_running};
use tidemark_protocol::id::FileId;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{Candidate, CheckpointId};
use timetable::{Subject, Timetable};
use unwritten::{Begun, DIRECTORIES_MAX};

/// For so long a flush and the daemon's end wait for the decision about what the dead removed, and for one about what they began: what
/// they wrote last is hashed and read by then.
const DECIDED_WITHIN: Duration = Duration::from_secs(10);

/// What the loop keeps for it. Nothing of it outlives the daemon but what a stop writes of it: the next one finds out again.
#[derive(Debug, Default)]
pub(crate) struct Visibility {
    timetable: Timetable,
    /// Torn checkpoints that stay in sight.
    in_sight: BTreeMap<CheckpointId, InSight>,
    /// Why those went that are out of sight.
    hidden: BTreeMap<CheckpointId, String>,
    /// An administrator wants these to be seen. The next daemon hides them again.
    returned: BTreeSet<CheckpointId>,
    /// Committed versions whose names are still to be put back, because what was torn under them is open.
    owed: BTreeMap<CheckpointId, Number>,
    /// Whole versions that are out of sight, and have their names again once they are committed.
    on_its_way: BTreeMap<CheckpointId, OnItsWay>,
    /// Versions out of sight that nobody removed: those that cannot be read whole, those that are on their way, and what a stop kept of
    /// those that were not whole.
    out_of_sight: BTreeSet<(CheckpointId, Number)>,
    /// The ones that could not be read whole.
    lost: BTreeSet<(CheckpointId, Number)>,
    /// Those that went at the start, whose trackers were not looked at yet.
    kept: Vec<(CheckpointId, Number)>,
    /// Those that went since, whose trackers could not follow yet.
    to_follow: BTreeMap<CheckpointId, Candidate>,
    /// Trackers that wait for what may become whole.
    waiting: BTreeMap<RelPath, tracker::Wait>,
    /// When trackers that were cut were looked at last.
    cut_looked_at: Option<Instant>,
    removers: BTreeMap<FileId, Arc<WriterId>>,
    /// The checkpoints that lost names, until it is clear that they were meant to.
    noted: BTreeMap<CheckpointId, Noted>,
    /// Directories that were made of late, by their nodes, which only rise.
    made: BTreeMap<NodeId, Begun>,
}

/// Why a torn checkpoint stays in sight.
#[derive(Debug)]
struct InSight {
    why: String,
    /// No process is known to live that is waited for: it may stay for ever.
    lasts: bool,
}

impl Visibility {
    fn rests(&self, subject: &Subject, now: Instant) -> bool {
        self.timetable.rests(subject, now, is_running)
    }

    pub(crate) fn is_out_of_sight(&self, id: &CheckpointId, number: Number) -> bool {
        self.out_of_sight.contains(&(id.clone(), number))
    }

    /// Why a torn checkpoint stays in sight; none where that was not asked.
    pub(crate) fn why_in_sight(&self, id: &CheckpointId) -> Option<&str> {
        self.in_sight.get(id).map(|stays| stays.why.as_str())
    }

    /// Whether a torn checkpoint may stay in sight for ever: then Tier-3 has what is there of it.
    pub(crate) fn may_last(&self, id: &CheckpointId) -> bool {
        self.in_sight.get(id).is_some_and(|stays| stays.lasts)
    }

    /// Why a checkpoint went out of sight; none where the daemon before this one did it.
    pub(crate) fn why_hidden(&self, id: &CheckpointId) -> Option<&str> {
        self.hidden.get(id).map(String::as_str)
    }

    /// Asks about removals at the next look.
    pub(crate) fn ask_about_removals(&mut self) {
        self.timetable.forget(&Subject::Removals);
    }

    /// The whole version of a checkpoint that was hidden with what is torn, until it is committed.
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

    /// An administrator wants it to be seen.
    pub(crate) fn was_returned(&self, id: &CheckpointId) -> bool {
        self.returned.contains(id)
    }

    /// Takes down what was made since the last time.
    pub(crate) fn hear_made(&mut self, shared: &Shared) {
        for made in shared.namespace.take_made() {
            self.made.insert(made.directory, Begun { made, dead_since: None });
        }
        while self.made.len() > DIRECTORIES_MAX {
            let (node, _) = self.made.pop_first().expect("there are more than may be");
            self.timetable.forget(&Subject::Unwritten(node));
        }
    }

    /// A version is served under a name again: where another is on its way, it stands in for that.
    pub(crate) fn note_stand_in(&mut self, id: &CheckpointId, number: Number) {
        if let Some(on_its_way) = self.on_its_way.get_mut(id) {
            on_its_way.meanwhile = Some(number);
        }
    }

    /// A person removed it where it lay out of sight.
    pub(crate) fn note_unwanted(&mut self, id: &CheckpointId, number: Number) {
        if self.on_its_way.get(id).is_some_and(|on_its_way| on_its_way.number == number) {
            self.on_its_way.remove(id);
        }
    }
}

impl Engine {
    /// Nothing is hidden, and no tracker changed.
    pub(crate) fn shields_nothing(&self) -> bool {
        self.draining || self.never_shields()
    }

    /// As long as this daemon runs, and also while it ends.
    fn never_shields(&self) -> bool {
        self.fenced.is_some() || !self.shared.settings.torn.hide
    }

    /// Looks at all that is to be asked again. Whether a torn checkpoint goes is asked with its verdict ([`Engine::shield`]), and whether
    /// a removal was meant once all that is due was looked at ([`Engine::undo_removals`]).
    pub(crate) fn look_at_visibility(&mut self, now: Instant) {
        self.serve_arrivals();
        self.serve_owed(now);
        self.mend_cut_trackers(now);
        self.drop_unwritten(now);
        self.follow_kept(now);
        self.follow_later(now);
        self.show_found();
        self.hide_lost();
    }

    /// Takes down who removed and made what since the last time. Before the books are looked at.
    pub(crate) fn hear_who_changed_names(&mut self) {
        self.hear_removers();
        self.visibility.hear_made(&self.shared);
    }
}

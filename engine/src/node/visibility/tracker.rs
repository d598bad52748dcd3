//! Makes trackers beside torn checkpoints, and trackers that were cut themselves, name a whole checkpoint.
//!
//! Owns: when a tracker is changed, and its wait for a checkpoint that may become whole. Does not own: the content of a tracker
//! (`protocol::shield`), which checkpoints it may name (`fallbacks`), which are hidden (`torn`, `kept`).

use crate::node::Shared;
use crate::node::book::{Book, BookLookup};
use crate::node::file_jobs::FileJobs;
use crate::node::flush::{Flushes, covers};
use crate::node::gc::Gc;
use crate::node::jobs::Done;
use crate::node::ledger::Ledger;
use crate::node::recover::Knows;
use crate::node::rights::Rights;
use crate::node::visibility::Visibility;
use crate::node::visibility::fallbacks::{Fallbacks, Fit, Newer};
use crate::node::visibility::sessions::Sessions;
use crate::node::visibility::timetable::Subject;
use std::sync::Arc;
use std::time::Duration;
use tidemark_namespace::{FileView, is_alive};
use tidemark_protocol::evidence::Verdict;
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::{Candidate, CheckpointId, Rules, TrackerHolds};
use tidemark_protocol::report::{EventLevel, path_text};
use tidemark_protocol::shield::{self, Named, Session, Tracker};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Time beyond the settle time for which a tracker waits for an unproven checkpoint, before it names an older one. By then the newer one
/// is proven, or nothing will prove it. A flush, which waits for no settle time, also waits this long for a tracker.
const PATIENCE: Duration = Duration::from_secs(3);
/// A wait that was not renewed for this long is over: the job wrote the tracker anew.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(5);

/// A tracker's wait for a checkpoint that may become whole.
#[derive(Debug)]
pub(super) struct Wait {
    began: Instant,
    /// Since when the tracker could name an older checkpoint.
    could_name_older: Option<Instant>,
    asked: Instant,
}

/// Flaw in the content of a tracker.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wrong<'a> {
    /// The tracker's writer was killed in the middle of it.
    Cut,
    /// The tracker names this checkpoint, which was hidden.
    Hidden(Named<'a>),
    /// The tracker names this visible checkpoint, which lacks files that no living process can bring. A job fails on such a checkpoint.
    /// Without a tracker the job would begin at step 0, so the tracker stays as it is while nothing else is whole.
    Lacking(Named<'a>),
}

impl<'a> Wrong<'a> {
    /// Returns the checkpoint that the tracker must not name.
    fn named(self) -> Option<Named<'a>> {
        match self {
            Self::Cut => None,
            Self::Hidden(named) | Self::Lacking(named) => Some(named),
        }
    }
}

pub(crate) fn is_of_run(run: &RunPath) -> impl Fn(&Rules, &RelPath) -> bool {
    let run = run.path().cloned();
    move |_, path| run.as_ref().is_none_or(|run| path.is_below(run))
}

impl Visibility {
    /// Whether a tracker waits for `newer`, which may become whole. If it could name an older checkpoint, the wait has a limit.
    fn tracker_waits(
        &mut self,
        shared: &Shared,
        tracker: &RelPath,
        newer: &Newer,
        could_name_older: bool,
    ) -> bool {
        let now = Instant::now();
        self.waiting.retain(|_, wait| wait.asked + FORGOTTEN_AFTER > now);
        let longest = Duration::from_secs_f64(shared.settings.save.settle_s) + PATIENCE;
        let is_new = !self.waiting.contains_key(tracker);
        let wait = self.waiting.entry(tracker.clone()).or_insert(Wait {
            began: now,
            could_name_older: None,
            asked: now,
        });
        wait.asked = now;
        let since = wait.could_name_older.filter(|_| could_name_older && !newer.sealing).unwrap_or(now);
        wait.could_name_older = Some(since);
        let waits = now.saturating_duration_since(since) < longest;
        if is_new {
            let newer = tidemark_protocol::key::checkpoint_path(&newer.id.run, &newer.id.directory);
            let path = path_text(tracker.as_bytes());
            let what = format!("it says what it said while {} may become whole", path_text(&newer));
            shared.events.add(shared.now_ns(), EventLevel::Info, "tracker", Some(path), what);
        }
        waits
    }

    /// Whether a tracker at or below `place` may be about to change, for a flush that began at `asked`.
    pub(crate) fn trackers_change(&self, ledger: &Ledger, place: &[u8], asked: Instant) -> bool {
        let looked = ledger.cut.is_empty() || self.cut_looked_at.is_some_and(|at| at >= asked);
        let waits = |(path, wait): (&RelPath, &Wait)| {
            covers(place, path.as_bytes())
                && wait.asked.elapsed() < FORGOTTEN_AFTER
                && wait.began.max(asked).elapsed() < PATIENCE
        };
        !looked || self.waiting.iter().any(waits)
    }
}

/// Makes a checkpoint's trackers due for Tier-3.
pub(crate) fn trackers_may_go(ledger: &mut Ledger, id: &CheckpointId) {
    let Some(candidate) = ledger.books.get(id).and_then(|book| book.candidate.as_ref()) else { return };
    let books = BookLookup { ledger };
    let trackers: Vec<_> = books.trackers_of(id, &candidate.framework).map(|(path, ..)| path).collect();
    trackers.into_iter().for_each(|path| ledger.loose_due.insert(path));
}

/// The parts of the loop that changing trackers reads and changes.
pub(crate) struct Trackers<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) visibility: &'a mut Visibility,
    pub(crate) file_jobs: &'a mut FileJobs,
    pub(crate) jobs: &'a mut JoinSet<Done>,
    pub(crate) gc: &'a Gc,
    pub(crate) flushes: &'a Flushes,
    pub(crate) rights: &'a Rights,
}

impl Trackers<'_> {
    /// Makes the trackers beside a checkpoint that was just hidden name a whole one. Trackers that cannot follow yet are tried again later.
    pub(crate) fn follow(&mut self, hidden: &CheckpointId, candidate: &Candidate) {
        let trackers: Vec<_> = self.books().trackers_of(hidden, &candidate.framework).collect();
        let mut all = true;
        for (path, view, holds) in trackers {
            let torn = Named::of(hidden, candidate.step.map(|step| step.0));
            all &= self.mend(hidden, Wrong::Hidden(torn), &path, &view, holds);
        }
        if all {
            self.visibility.to_follow.remove(hidden);
        } else {
            self.visibility.to_follow.insert(hidden.clone(), candidate.clone());
        }
    }

    /// Tries again to change the trackers that could not follow. If their checkpoint is visible again, they are left alone.
    pub(crate) fn follow_later(&mut self, now: Instant) {
        let rests = self.visibility.rests(&Subject::Followers, now);
        if self.visibility.to_follow.is_empty() || rests || self.rights.shields_nothing() {
            return;
        }
        self.visibility.timetable.ask_again(Subject::Followers, now, None);
        for (id, candidate) in std::mem::take(&mut self.visibility.to_follow) {
            let back = self.ledger.books.get(&id).is_some_and(|book| book.candidate.is_some());
            if !back {
                self.follow(&id, &candidate);
            }
        }
    }

    /// Mends trackers whose writers were killed in the middle of them, even when no checkpoint is torn.
    pub(crate) fn mend_cut_trackers(&mut self, now: Instant) {
        // The checkpoint to name may be whole in Tier-3 alone, which is not known yet.
        if self.ledger.cut.is_empty() || self.rights.shields_nothing() || self.rights.knows == Knows::Names {
            return;
        }
        // A flush that began since then does not wait for the next pass.
        let flushed_at = self.flushes.last_began();
        let asked_since =
            flushed_at.is_some_and(|at| self.visibility.cut_looked_at.is_none_or(|looked| looked < at));
        if self.visibility.rests(&Subject::CutTrackers, now) && !asked_since {
            return;
        }
        self.visibility.timetable.ask_again(Subject::CutTrackers, now, None);
        self.visibility.cut_looked_at = Some(now);
        for node in self.ledger.cut.clone() {
            let Some((path, view)) = self.ledger.node(node) else { continue };
            let (path, view) = (path.clone(), Arc::clone(view));
            if !self.ledger.loose.contains_key(&path) {
                continue;
            }
            let above = path.parent();
            let beside = self.ledger.books.values().filter(|book| book.id.run.path() == above.as_ref());
            let mut found = beside.filter_map(|book| {
                let present = book.candidate.as_ref().map(|candidate| &candidate.framework);
                let framework = present.or_else(|| Some(&book.newest()?.1.record().framework))?;
                Some((book.id.clone(), self.ledger.rules().tracker(framework, &path)?))
            });
            if let Some((id, holds)) = found.next() {
                self.mend(&id, Wrong::Cut, &path, &view, holds);
            }
        }
    }

    /// If trackers name a visible checkpoint that lacks files, makes them name a whole one, once no process of the job is left to bring
    /// the files. A copy that a person makes file by file also has a tracker, and its other files may follow: that tracker stays.
    pub(crate) fn follow_lacking(&mut self, id: &CheckpointId, now: Instant) {
        let subject = Subject::Lacking(id.clone());
        let book = &self.ledger.books[id];
        let kept_from = book.verdict.as_ref().filter(|_| book.is_kept_without_proof());
        let is_over = |(at_ns, _): (i64, &str)| at_ns <= self.shared.now_ns();
        let is_due = kept_from.and_then(Verdict::kept_from).is_some_and(is_over);
        let rests = self.visibility.rests(&subject, now);
        if !is_due || rests || self.rights.shields_nothing() || self.visibility.was_returned(id) {
            return;
        }
        let Some(candidate) = book.candidate.clone() else { return };
        let named = Named::of(id, candidate.step.map(|step| step.0));
        let names_it = |(_, view, holds): &(RelPath, Arc<FileView>, TrackerHolds)| {
            self.fallbacks().content(view).is_some_and(|content| named.is_in(*holds, &content))
        };
        let trackers: Vec<_> = self.books().trackers_of(id, &candidate.framework).filter(names_it).collect();
        let mut process = None;
        if !trackers.is_empty() && self.sessions().is_of_a_trainer(id, &candidate) {
            let sessions = self.sessions().sessions_of(id, &candidate);
            process = sessions.iter().find_map(Session::living);
            if shield::who_is_left(&sessions).is_none() {
                for (path, view, holds) in trackers {
                    self.mend(id, Wrong::Lacking(named), &path, &view, holds);
                }
            }
        }
        self.visibility.timetable.ask_again(subject, now, process);
    }

    /// Makes a tracker beside `beside` name a whole checkpoint, if its content has the flaw `wrong`. Returns false if the caller must try
    /// again: a program has the tracker open, or a newer checkpoint than the one it could name may become whole. A tracker is not replaced
    /// under a reader. Meanwhile it stays, although the checkpoint that it names is missing: a job fails on that, whereas without a tracker
    /// it would begin at step 0.
    pub(super) fn mend(
        &mut self,
        beside: &CheckpointId,
        wrong: Wrong<'_>,
        path: &RelPath,
        view: &FileView,
        holds: TrackerHolds,
    ) -> bool {
        if view.writers.iter().any(|writer| is_alive(&self.shared.namespace, writer)) {
            // The tracker is another job's, and says what that job knows.
            return true;
        }
        // Readers that come or go are not reported to the loop, so the namespace is asked.
        if self.shared.namespace.nodes().view(view.node).is_some_and(|now| now.opens > 0) {
            return false;
        }
        let cut = view.is_left_cut();
        let content = if cut { None } else { self.fallbacks().content(view) };
        if content.is_none() && !cut {
            tracing::error!(%path, "a tracker that cannot be read may name what is torn");
            return true;
        }
        let unfit = wrong.named();
        // The tracker may be right, whichever checkpoint is whole.
        if shield::follow(holds, content.as_deref(), unfit, None) == Tracker::Stays {
            self.visibility.waiting.remove(path);
            return true;
        }
        // A hidden checkpoint may have its name again, with an older version. One that lacks files is not whole.
        let fits = |other: &Book| !matches!(wrong, Wrong::Lacking(_)) || other.id != *beside;
        let Fit { named, newer } = self.fallbacks().fit_to_be_named(&beside.run, unfit.map(|_| beside), fits);
        if named.is_none() && matches!(wrong, Wrong::Lacking(_)) {
            return true;
        }
        if let Some(newer) = newer
            && self.visibility.tracker_waits(self.shared, path, &newer, named.is_some())
        {
            return false;
        }
        // A living process may have added to the checkpoint that would be named, or may have changed the tracker.
        if self.shared.had_not_heard(self.ledger, is_of_run(&beside.run)) {
            return false;
        }
        self.visibility.waiting.remove(path);
        let whole = named.as_ref().map(|(id, step)| Named::of(id, *step));
        let what = match shield::follow(holds, content.as_deref(), unfit, whole) {
            Tracker::Stays => return true,
            Tracker::Says(says) => {
                let put = self.shared.replace(path, &says);
                let text = String::from_utf8_lossy(&says).into_owned();
                put.map(|()| format!("{path} says {text}, the newest whole one"))
            }
            Tracker::Goes => self
                .shared
                .hide(path)
                .map(|()| format!("{path} went out of sight: nothing whole is there that it could name")),
        };
        match what {
            Ok(what) => {
                self.shared.event_of(EventLevel::Warn, "tracker", beside, what);
                // The next answer to a flush takes the change into account.
                let put = self.shared.namespace.nodes().node_at(path.as_bytes());
                let changed: Vec<_> = put.into_iter().chain([view.node]).collect();
                self.ledger.refresh(&self.shared.namespace, &changed);
            }
            Err(error) => tracing::error!(%path, %error, "a tracker still names what is torn"),
        }
        true
    }

    pub(super) fn books(&self) -> BookLookup<'_> {
        BookLookup { ledger: self.ledger }
    }

    fn sessions(&self) -> Sessions<'_> {
        Sessions { shared: self.shared, ledger: self.ledger }
    }

    fn fallbacks(&self) -> Fallbacks<'_> {
        Fallbacks { shared: self.shared, ledger: self.ledger, gc: self.gc }
    }
}

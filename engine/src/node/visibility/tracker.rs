//! Lets the trackers beside torn checkpoints, and those that were cut themselves, name what is whole.
//!
//! Owns: which checkpoint a tracker may name, and when; that it waits for what may become whole. Does not own: what a tracker
//! says (`protocol::shield`), which checkpoints go out of sight (`torn`, `kept`).

use crate::node::Shared;
use crate::node::book::Book;
use crate::node::flush::covers;
use crate::node::recover::Knows;
use crate::node::run::Engine;
use crate::node::visibility::Visibility;
use crate::node::visibility::fallbacks::{Fit, Newer};
use crate::node::visibility::timetable::Subject;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_namespace::{FileView, is_alive};
use tidemark_protocol::evidence::Verdict;
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::{Candidate, CheckpointId, Rules, TrackerHolds};
use tidemark_protocol::report::{EventLevel, path_text};
use tidemark_protocol::shield::{self, Named, Session, Tracker};

/// How much longer than the settle time a tracker waits for what is not proven whole, before it names an older one: by then it
/// is, or nobody can say. A flush, which waits for no settle time, waits so long for a tracker.
const PATIENCE: Duration = Duration::from_secs(3);
/// What was not asked for so long waits no more: somebody wrote it anew.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(5);

/// A tracker's wait for what may become whole.
#[derive(Debug)]
pub(super) struct Wait {
    began: Instant,
    /// Since when there is an older one that it could name.
    could_name_older: Option<Instant>,
    asked: Instant,
}

/// What is wrong with what a tracker says.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wrong<'a> {
    /// Its writer was killed in the middle of it.
    Cut,
    /// This went out of sight.
    Hidden(Named<'a>),
    /// This stays in sight, and lacks files that nobody is left to bring. A job fails on it, and begins at step 0 without a tracker: it
    /// goes on naming that while nothing else is whole.
    Lacking(Named<'a>),
}

impl<'a> Wrong<'a> {
    /// What must not be named.
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
    /// Whether a tracker waits for what may become whole; not for ever where there is an older one that it could name.
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
}

impl Engine {
    /// The trackers beside a checkpoint that went out of sight.
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

    /// Looks again at trackers that could not follow. Those of checkpoints that are in sight again are left alone.
    pub(crate) fn follow_later(&mut self, now: Instant) {
        let rests = self.visibility.rests(&Subject::Followers, now);
        if self.visibility.to_follow.is_empty() || rests || self.shields_nothing() {
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

    /// Trackers whose writers were killed in the middle of them: no checkpoint need be torn for that.
    pub(crate) fn mend_cut_trackers(&mut self, now: Instant) {
        // What is whole in Tier-3 alone may be what it should name.
        if self.ledger.cut.is_empty() || self.shields_nothing() || self.knows == Knows::Names {
            return;
        }
        // A flush that began since is not kept waiting for the next look.
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

    /// Lets the trackers beside a checkpoint in sight name another that is whole, where they name this one, files of it are missing, and
    /// nobody of the job that wrote it is left to bring them. A copy that a person makes, file by file, has a tracker as well, and the rest
    /// of it may follow: that one stays.
    pub(crate) fn follow_lacking(&mut self, id: &CheckpointId, now: Instant) {
        let subject = Subject::Lacking(id.clone());
        let book = &self.ledger.books[id];
        let kept_from = book.verdict.as_ref().filter(|_| book.is_kept_without_proof());
        let is_over = |(at_ns, _): (i64, &str)| at_ns <= self.shared.now_ns();
        let is_due = kept_from.and_then(Verdict::kept_from).is_some_and(is_over);
        let rests = self.visibility.rests(&subject, now);
        if !is_due || rests || self.shields_nothing() || self.visibility.was_returned(id) {
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

    /// Lets a tracker beside `beside` name what is whole, where it does not. `wrong`: what is wrong with what it says. False for what is
    /// to be asked again: somebody has it open, and it is not exchanged under a reader, or something newer than what it could name may
    /// become whole. What it names is not there meanwhile, and a job fails on that; one that finds no tracker begins at step 0.
    pub(super) fn mend(
        &mut self,
        beside: &CheckpointId,
        wrong: Wrong<'_>,
        path: &RelPath,
        view: &FileView,
        holds: TrackerHolds,
    ) -> bool {
        if view.writers.iter().any(|writer| is_alive(&self.shared.namespace, writer)) {
            // Another job's: it says what that one knows.
            return true;
        }
        // A reader that came or went since changed nothing that the loop would have been told of.
        if self.shared.namespace.view(view.node).is_some_and(|now| now.opens > 0) {
            return false;
        }
        let cut = view.is_left_cut();
        let content = if cut { None } else { self.fallbacks().content(view) };
        if content.is_none() && !cut {
            tracing::error!(%path, "a tracker that cannot be read may name what is torn");
            return true;
        }
        let unfit = wrong.named();
        // Whatever is whole.
        if shield::follow(holds, content.as_deref(), unfit, None) == Tracker::Stays {
            self.visibility.waiting.remove(path);
            return true;
        }
        // What went may have its name again; what lacks files is not whole, whatever it was before.
        let fits = |other: &Book| !matches!(wrong, Wrong::Lacking(_)) || other.id != *beside;
        let Fit { named, newer } = self.fallbacks().fit_to_be_named(&beside.run, unfit.map(|_| beside), fits);
        if named.is_none() && matches!(wrong, Wrong::Lacking(_)) {
            return true;
        }
        if let Some(newer) = newer
            && self.visibility.tracker_waits(&self.shared, path, &newer, named.is_some())
        {
            return false;
        }
        // Somebody who lives may have added to what would be named, and the tracker may say something else by now.
        if self.had_not_heard(is_of_run(&beside.run)) {
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
                // A flush that is answered next knows of it.
                let put = self.shared.namespace.node_at(path.as_bytes());
                let changed: Vec<_> = put.into_iter().chain([view.node]).collect();
                self.ledger.refresh(&self.shared.namespace, &changed);
            }
            Err(error) => tracing::error!(%path, %error, "a tracker still names what is torn"),
        }
        true
    }

    /// What a checkpoint's trackers say may go to Tier-3 now.
    pub(crate) fn trackers_may_go(&mut self, id: &CheckpointId) {
        let Some(candidate) = self.ledger.books.get(id).and_then(|book| book.candidate.as_ref()) else {
            return;
        };
        let trackers: Vec<_> =
            self.books().trackers_of(id, &candidate.framework).map(|(path, ..)| path).collect();
        trackers.into_iter().for_each(|path| self.ledger.loose_due.insert(path));
    }

    /// Whether a tracker at or below `place` is about to say something else, as far as was known at `asked`.
    pub(crate) fn trackers_change(&self, place: &[u8], asked: Instant) -> bool {
        let looked =
            self.ledger.cut.is_empty() || self.visibility.cut_looked_at.is_some_and(|at| at >= asked);
        let waits = |(path, wait): (&RelPath, &Wait)| {
            covers(place, path.as_bytes())
                && wait.asked.elapsed() < FORGOTTEN_AFTER
                && wait.began.max(asked).elapsed() < PATIENCE
        };
        !self.shields_nothing() && (!looked || self.visibility.waiting.iter().any(waits))
    }
}

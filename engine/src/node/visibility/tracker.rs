//! Lets the trackers beside torn checkpoints, and those that were cut themselves, name what is whole.
//!
//! Owns: which checkpoint a tracker may name, and when; that it waits for what may become whole. Does not own: what a tracker
//! says (`protocol::shield`), which checkpoints go out of sight (`torn`, `kept`).

use crate::node::book::Book;
use crate::node::decide::{look, run_of};
use crate::node::flush::covers;
use crate::node::recover::Knows;
use crate::node::rescue::{self, Rescue};
use crate::node::run::Engine;
use crate::node::visibility::timetable::Subject;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_namespace::{FileState, FileView, is_alive};
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::evidence::{Told, Verdict};
use tidemark_protocol::lineage;
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::TrackerHolds;
use tidemark_protocol::recognise::{Candidate, CheckpointId, PARTS, Rules, may_stand_in};
use tidemark_protocol::record::Evidence;
use tidemark_protocol::report::{EventLevel, Pending, path_text};
use tidemark_protocol::shield::{self, MAX_TRACKER_BYTES, Named, Session, Tracker};

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

/// What a tracker of a run may name.
struct Fit {
    /// The newest whole one, and its step.
    named: Option<(CheckpointId, Option<u64>)>,
    /// A newer one that may become whole.
    newer: Option<Newer>,
}

struct Newer {
    id: CheckpointId,
    /// It is being hashed: that ends.
    sealing: bool,
}

/// What is known of a checkpoint that stands in the tree; with when it got its last file, where no version covers it.
enum Standing {
    Covered,
    /// Something proves that all is there, and nobody is left who could add to it: time will bring nothing more.
    Whole(i64),
    Undecided {
        published_ns: i64,
        sealing: bool,
    },
}

pub(crate) fn is_of_run(run: &RunPath) -> impl Fn(&Rules, &RelPath) -> bool {
    let run = run.path().cloned();
    move |_, path| run.as_ref().is_none_or(|run| path.is_below(run))
}

fn id_of(checkpoint: &Checkpoint) -> CheckpointId {
    let version = &checkpoint.record().version;
    CheckpointId { run: version.run.clone(), directory: version.directory.clone() }
}

impl Engine {
    /// The trackers beside a checkpoint that went out of sight.
    pub(crate) fn follow(&mut self, hidden: &CheckpointId, candidate: &Candidate) {
        let trackers: Vec<_> = self.trackers_of(hidden, &candidate.framework).collect();
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
        if !is_due || rests || self.shields_nothing() || self.was_returned(id) {
            return;
        }
        let Some(candidate) = book.candidate.clone() else { return };
        let named = Named::of(id, candidate.step.map(|step| step.0));
        let names_it = |(_, view, holds): &(RelPath, Arc<FileView>, TrackerHolds)| {
            self.content(view).is_some_and(|content| named.is_in(*holds, &content))
        };
        let trackers: Vec<_> = self.trackers_of(id, &candidate.framework).filter(names_it).collect();
        let mut process = None;
        if !trackers.is_empty() && self.is_of_a_trainer(id, &candidate) {
            let sessions = self.sessions_of(id, &candidate);
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
        let content = if cut { None } else { self.content(view) };
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
        let Fit { named, newer } = self.fit_to_be_named(&beside.run, unfit.map(|_| beside), fits);
        if named.is_none() && matches!(wrong, Wrong::Lacking(_)) {
            return true;
        }
        if let Some(newer) = newer
            && self.waits(path, &newer, named.is_some())
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
                self.event(EventLevel::Warn, "tracker", beside, what);
                // A flush that is answered next knows of it.
                let put = self.shared.namespace.node_at(path.as_bytes());
                let changed: Vec<_> = put.into_iter().chain([view.node]).collect();
                self.ledger.refresh(&self.shared.namespace, &changed);
            }
            Err(error) => tracing::error!(%path, %error, "a tracker still names what is torn"),
        }
        true
    }

    /// Why a tracker stays out of Tier-3: what it names is not there yet. After the loss of the node a job would be led to a checkpoint that
    /// it does not find; the tracker of before names one that it does.
    pub(crate) fn why_tracker_waits(&self, path: &RelPath) -> Option<Pending> {
        let rules = self.ledger.rules();
        if !rules.is_tracker_name(path) {
            return None;
        }
        let above = path.parent();
        let beside = self.ledger.books.values().filter(|book| book.id.run.path() == above.as_ref());
        let unsaved: Vec<_> = beside
            .filter(|book| !book.is_prepared())
            .filter_map(|book| {
                let candidate = book.candidate.as_ref()?;
                Some((book, candidate, rules.tracker(&candidate.framework, path)?))
            })
            .collect();
        let view = self.ledger.file(path).filter(|view| view.sealed().is_some() && !unsaved.is_empty())?;
        let content = self.content(view)?;
        unsaved.into_iter().find_map(|(book, candidate, holds)| {
            let named = Named::of(&book.id, candidate.step.map(|step| step.0));
            let of_named = named.is_in(holds, &content).then(|| self.first_comes(book))??;
            let what = format!("it names {}, which is not in Tier-3: {}", of_named.path, of_named.what);
            Some(Pending { path: path.to_string(), reason: of_named.reason, what })
        })
    }

    /// The reason why Tier-3 has nothing of a checkpoint yet; none where it has something, or nothing is to come.
    pub(crate) fn first_comes(&self, book: &Book) -> Option<Pending> {
        // At the end what is closed goes, too, where nothing more comes of what it names.
        let ended =
            || self.draining && matches!(rescue::look(&self.shared, &self.ledger, book), Rescue::Done);
        if book.is_prepared() || ended() { None } else { self.comes(book) }
    }

    /// What a checkpoint's trackers say may go to Tier-3 now.
    pub(crate) fn trackers_may_go(&mut self, id: &CheckpointId) {
        let Some(candidate) = self.ledger.books.get(id).and_then(|book| book.candidate.as_ref()) else {
            return;
        };
        let trackers: Vec<_> = self.trackers_of(id, &candidate.framework).map(|(path, ..)| path).collect();
        trackers.into_iter().for_each(|path| self.ledger.loose_due.insert(path));
    }

    pub(crate) fn trackers_of<'a>(
        &'a self,
        id: &'a CheckpointId,
        framework: &'a str,
    ) -> impl Iterator<Item = (RelPath, Arc<FileView>, TrackerHolds)> + 'a {
        let beside = self.ledger.loose.keys().filter(|path| path.parent().as_ref() == id.run.path());
        beside.filter_map(|path| {
            let holds = self.ledger.rules().tracker(framework, path)?;
            Some((path.clone(), Arc::clone(self.ledger.file(path)?), holds))
        })
    }

    /// A tracker's bytes; none where they are not here, or are too many.
    fn content(&self, view: &FileView) -> Option<Vec<u8>> {
        if view.size_bytes > MAX_TRACKER_BYTES as u64 {
            return None;
        }
        std::fs::read(self.shared.namespace.host_path(view.node)?).ok()
    }

    /// Whether a tracker waits for what may become whole; not for ever where there is an older one that it could name.
    fn waits(&mut self, tracker: &RelPath, newer: &Newer, could_name_older: bool) -> bool {
        let now = Instant::now();
        self.visibility.waiting.retain(|_, wait| wait.asked + FORGOTTEN_AFTER > now);
        let longest = Duration::from_secs_f64(self.shared.settings.save.settle_s) + PATIENCE;
        let is_new = !self.visibility.waiting.contains_key(tracker);
        let wait = self.visibility.waiting.entry(tracker.clone()).or_insert(Wait {
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
            self.shared.events.add(self.shared.now_ns(), EventLevel::Info, "tracker", Some(path), what);
        }
        waits
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

    /// The newest version of the run that is whole, and in the tree. `gone`: what just left it. `fits`: what else is asked of it.
    pub(crate) fn whole_of(
        &self,
        run: &RunPath,
        gone: Option<&CheckpointId>,
        fits: impl Fn(&Book) -> bool,
    ) -> Option<&Checkpoint> {
        let standing = self.standing_of_run(run, gone).filter(|book| fits(book));
        let standing: BTreeSet<_> = standing.map(|book| &book.id).collect();
        let whole = run_of(&self.ledger, run).filter(|checkpoint| self.is_loadable(checkpoint));
        let whole = whole.filter(|found| standing.contains(&id_of(found)));
        whole.max_by_key(|checkpoint| lineage::order(checkpoint.record()))
    }

    /// What of the run is in the tree, and not torn; of what is gone, the version that may have its name again.
    fn standing_of_run(&self, run: &RunPath, gone: Option<&CheckpointId>) -> impl Iterator<Item = &Book> {
        let of_run = self.ledger.books.values().filter(move |book| book.id.run == *run);
        of_run.filter(move |book| {
            let top = self.shared.namespace.node_at(&book.path()).is_some();
            top && (Some(&book.id) == gone || book.candidate.is_some() && !book.is_torn())
        })
    }

    /// Whether a job that lost one checkpoint may load the other: a model does not stand in for the optimizer beside it. Costs a pass over
    /// the run where the lost one is a model in parts.
    pub(crate) fn stands_in_for(&self, lost: &Book) -> impl Fn(&Book) -> bool {
        let in_parts = lost.candidate.as_ref().filter(|candidate| candidate.framework == PARTS);
        let trained = in_parts.is_some_and(|candidate| self.is_of_a_trainer(&lost.id, candidate));
        move |other| {
            let both = lost.candidate.as_ref().zip(other.candidate.as_ref());
            both.is_some_and(|(lost, other)| may_stand_in(lost, other, trained))
        }
    }

    /// Whether a job could load something else than this checkpoint: an older version of it, or a whole one of the run that may stand
    /// in for it, committed or waiting for nothing but time.
    pub(crate) fn has_fallback(&self, id: &CheckpointId) -> bool {
        let book = &self.ledger.books[id];
        let committed = book.committed().map(|(number, _)| *number);
        // A version of its own that is on its way has the name again no sooner than it is committed.
        let stands_in = self.stands_in_for(book);
        let another = |other: &Book| other.id != *id && stands_in(other);
        committed.is_some_and(|number| self.gc.check_stays(&(id.clone(), number)).is_ok())
            || self.fit_to_be_named(&id.run, Some(id), another).named.is_some()
    }

    /// Whether a job could load another directory of the run than this one, in which nothing is that a rule knows.
    pub(crate) fn has_another(&self, id: &CheckpointId) -> bool {
        let is_directory = |other: &Book| other.candidate.as_ref().is_some_and(Candidate::is_directory);
        self.fit_to_be_named(&id.run, Some(id), is_directory).named.is_some()
    }

    fn fit_to_be_named(
        &self,
        run: &RunPath,
        gone: Option<&CheckpointId>,
        fits: impl Fn(&Book) -> bool,
    ) -> Fit {
        let recorded = self.whole_of(run, gone, &fits);
        // What has no record yet is newer than all that have one; what may get none may be old.
        let recorded_ns = recorded.map_or(i64::MIN, |whole| whole.record().completed_at_ns);
        let (mut settling, mut undecided) = (Vec::new(), Vec::new());
        for book in self.standing_of_run(run, gone).filter(|book| Some(&book.id) != gone && fits(book)) {
            match self.standing_for_tracker(book) {
                Standing::Covered => {}
                Standing::Whole(published_ns) => settling.push((published_ns, book)),
                Standing::Undecided { published_ns, sealing } => {
                    undecided.push((published_ns, Newer { id: book.id.clone(), sealing }));
                }
            }
        }
        let (named_ns, named) = match settling.into_iter().max_by_key(|(published_ns, _)| *published_ns) {
            Some((published_ns, book)) => {
                let step = book.candidate.as_ref().and_then(|candidate| candidate.step);
                (published_ns, Some((book.id.clone(), step.map(|step| step.0))))
            }
            None => {
                let named = |newest: &Checkpoint| (id_of(newest), newest.record().step.map(|step| step.0));
                (recorded_ns, recorded.map(named))
            }
        };
        let newest = undecided.into_iter().max_by_key(|(published_ns, _)| *published_ns);
        let newer = newest.filter(|(published_ns, _)| *published_ns > named_ns).map(|(_, newer)| newer);
        Fit { named, newer }
    }

    fn standing_for_tracker(&self, book: &Book) -> Standing {
        let Some(candidate) = &book.candidate else { return Standing::Covered };
        let files: Vec<_> = self.ledger.files_of(candidate, &book.scope).collect();
        let Some(published_ns) = files.iter().map(|(_, view)| view.published_ns).max() else {
            return Standing::Covered;
        };
        let sealing = || {
            let is_closed = |state: &FileState| matches!(state, FileState::Closed | FileState::Sealed { .. });
            files.iter().all(|(_, view)| is_closed(&view.state))
                && files.iter().any(|(_, view)| view.state == FileState::Closed)
        };
        // What is there may be more than what was grouped: somebody else may be adding to it.
        if self.ledger.is_stale_scope(&book.scope) || self.ledger.is_stale_before(candidate) {
            return Standing::Undecided { published_ns, sealing: true };
        }
        match look(&self.shared, &self.ledger, book, Told::Flush).verdict {
            // It is about to go out of sight, if it has not.
            None | Some(Verdict::Torn { .. } | Verdict::Broken { .. }) => Standing::Covered,
            // A flush takes what nothing proves for whole.
            Some(Verdict::Complete { evidence, .. })
                if evidence.commits()
                    && evidence != Evidence::Told
                    && shield::who_is_left(&self.sessions_of(&book.id, candidate)).is_none() =>
            {
                Standing::Whole(published_ns)
            }
            Some(_) => Standing::Undecided { published_ns, sealing: sealing() },
        }
    }
}

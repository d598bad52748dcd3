//! Who waits for what to be durable: `flush`, and the end of the daemon.
//!
//! Owns: the waiting, what is still pending and why. Does not own: uploading (`run`) or what counts as complete
//! (protocol).

use crate::namespace::{FileState, FileView, torn_path};
use crate::node::alive::{ask_anew, is_alive};
use crate::node::book::Book;
use crate::node::decide;
use crate::node::loose::Lack;
use crate::node::rescue::{self, Rescue};
use crate::node::run::{Engine, Node};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_protocol::evidence::{Told, Verdict};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::Shape;
use tidemark_protocol::report::{CheckpointRef, Flush, Pending, PendingReason, Progress};
use tokio::sync::oneshot;

/// A flush looks at what is pending this often: each look costs a pass over the books.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Those looks may take one part in this many of the loop's time: a pass over 100,000 loose files takes longer than that.
const LOOK_SHARE: u32 = 8;

/// Between two files of one save a program has none of them open. A save whose last file was closed less than this ago goes on.
const SAVE_GAP_NS: i64 = 2 * 1_000_000_000;

/// Entries of a pending list; a flush of 100,000 open files need not name them all.
const PENDING_MAX: usize = 1000;

/// Those who wait.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    waiting: Vec<Waiter>,
    not_before: Option<Instant>,
    /// When other nodes were told that somebody waits, since the last checkpoint was complete.
    pub(crate) told_others: Option<Instant>,
}

#[derive(Debug)]
struct Waiter {
    place: Vec<u8>,
    until: Option<Instant>,
    told: Told,
    /// The end of the daemon waits only for what can still move by itself, and, while the grace lasts, for programs that save.
    ending: bool,
    /// Writers are refused since this waiter began to look once more: what they closed before is all there is.
    writers_refused: bool,
    answer: Option<oneshot::Sender<FlushOutcome>>,
    began: Instant,
}

/// How a flush ended.
#[derive(Debug, Default)]
pub struct FlushOutcome {
    pub pending: Vec<Pending>,
    pub timed_out: bool,
    pub tier3_away: bool,
}

/// What is not durable.
struct Row {
    pending: Pending,
    /// Waiting may bring it, as far as its reason lets it.
    comes: bool,
}

impl Row {
    fn of(pending: Pending) -> Self {
        let comes = !matches!(pending.reason, PendingReason::Torn | PendingReason::Unreadable);
        Self { pending, comes }
    }
}

impl Flushes {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// When the last of them began.
    pub(crate) fn last_began(&self) -> Option<Instant> {
        self.waiting.iter().map(|waiter| waiter.began).max()
    }

    /// What the flushes that cover `path` say of it.
    pub(crate) fn told(&self, path: &[u8]) -> Told {
        let covering = self.waiting.iter().filter(|waiter| covers(&waiter.place, path));
        covering.map(|waiter| waiter.told).max().unwrap_or_default()
    }
}

/// Whether `path` is `place` or lies below it.
pub(crate) fn covers(place: &[u8], path: &[u8]) -> bool {
    place.is_empty() || path.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

impl Engine {
    pub(crate) fn begin_flush(
        &mut self,
        place: Vec<u8>,
        until: Option<Instant>,
        told: Told,
        ending: bool,
    ) -> oneshot::Receiver<FlushOutcome> {
        let (answer, answered) = oneshot::channel();
        self.see_all_below(&place);
        // And that its writer was killed: of what is known to be torn a flush makes nothing.
        ask_anew();
        self.shared.namespace.forget_ended_writers();
        self.visibility.ask_about_removals();
        self.flushes.waiting.push(Waiter {
            place,
            until,
            told,
            ending,
            writers_refused: false,
            answer: Some(answer),
            began: Instant::now(),
        });
        // Somebody waits: drain and copies may use the whole link, and everything is looked at again.
        self.lift_paces();
        self.look_at_everything();
        answered
    }

    /// What was closed just before must be seen, however far behind the watcher is.
    fn see_all_below(&mut self, place: &[u8]) {
        let nodes: Vec<_> =
            self.shared.namespace.views_below(place).into_iter().map(|view| view.node).collect();
        self.ledger.refresh(&self.shared.namespace, &nodes);
    }

    fn look_at_everything(&mut self) {
        self.ledger.due.extend(self.ledger.books.keys().cloned());
        self.ledger.loose_all_due();
        self.flushes.not_before = None;
        self.ledger.tree_changed = true;
    }

    /// Ends the time in which the end of the daemon waits for programs that save.
    pub(crate) fn end_grace(&mut self, now: Instant) {
        if self.grace_until.is_some_and(|until| until <= now) {
            self.grace_until = None;
            // What was left alone while it was being saved is taken up as it is.
            self.look_at_everything();
        }
    }

    /// Whether the end of the daemon still waits for a program that saves this checkpoint.
    pub(crate) fn waits_for_saving(&self, book: &Book) -> bool {
        self.grace_until.is_some() && self.saving(book).is_some()
    }

    /// Why a program is believed to be saving this checkpoint still; none where no program is.
    fn saving(&self, book: &Book) -> Option<(PendingReason, String)> {
        let candidate = book.candidate.as_ref().filter(|_| !book.is_torn())?;
        let is_part = matches!(
            book.verdict,
            Some(Verdict::Incomplete { .. } | Verdict::Open { again_at_ns: None, .. })
        );
        // To a directory more may come.
        let is_part = is_part || candidate.shape == Shape::Tree && self.is_waiting_for_time(book);
        self.ledger
            .files_of(candidate, &book.scope)
            .find_map(|(path, view)| self.written(path, view, is_part))
    }

    fn is_waiting_for_time(&self, book: &Book) -> bool {
        decide::is_waiting_for_time(book, book.verdict.as_ref(), self.shared.now_ns())
    }

    /// Whether any program is saving: a checkpoint, or a file under a name that it will not keep.
    fn is_anything_saved(&self) -> bool {
        // The cheap look first: there may be very many files.
        let in_flight = |(path, view): (&RelPath, &Arc<FileView>)| {
            (view.sealed().is_none() || self.was_just_closed(view))
                && self.ledger.rules().is_temporary(path)
                && self.written(path, view, true).is_some()
        };
        self.ledger.books.values().any(|book| self.saving(book).is_some())
            || self.ledger.files().any(in_flight)
            || self.is_anything_begun(SAVE_GAP_NS)
    }

    fn was_just_closed(&self, view: &FileView) -> bool {
        self.shared.now_ns().saturating_sub(view.closed_ns) < SAVE_GAP_NS
    }

    /// Why a file is believed to be written still. `is_part`: with what is there its save is not over.
    fn written(&self, path: &RelPath, view: &FileView, is_part: bool) -> Option<(PendingReason, String)> {
        match view.state {
            FileState::Open { writers } => {
                Some((PendingReason::Open, format!("{path} has {writers} open writers")))
            }
            FileState::Mapped => Some((PendingReason::Mapped, format!("{path} is mapped writable"))),
            FileState::Closed | FileState::Cut | FileState::Sealed { .. } => {
                let lives = |writer| is_alive(&self.shared.namespace, writer);
                let goes_on = is_part && self.was_just_closed(view) && view.writers.iter().any(lives);
                let what = || format!("{path} was closed a moment ago, and more is to come");
                goes_on.then(|| (PendingReason::Incomplete, what()))
            }
        }
    }

    /// When the end of the daemon waits no longer.
    pub(crate) fn end_is_due(&self) -> Option<Instant> {
        self.flushes.waiting.iter().filter(|waiter| waiter.ending).filter_map(|waiter| waiter.until).max()
    }

    /// Answers the flushes whose place is durable, or whose time is up.
    pub(crate) fn answer_flushes(&mut self, now: Instant) {
        if self.flushes.is_empty() {
            return;
        }
        if self.flushes.not_before.is_some_and(|not_before| now < not_before) {
            return;
        }
        let begun = Instant::now();
        let mut refuses_writers = false;
        let asked = self.flushes.last_began();
        let mut waiting = std::mem::take(&mut self.flushes.waiting);
        let saves = self.grace_until.is_some()
            && waiting.iter().any(|waiter| waiter.ending)
            && self.is_anything_saved();
        let decides = self.decides_about_begun(now);
        // Many may wait for one place.
        let mut known: BTreeMap<Vec<u8>, Vec<Row>> = BTreeMap::new();
        waiting.retain_mut(|waiter| {
            if waiter.answer.as_ref().is_none_or(oneshot::Sender::is_closed) {
                return false;
            }
            // What was closed just before the flush may not have been noticed yet.
            let noticed =
                !self.ledger.is_stale() && now.saturating_duration_since(waiter.began) >= LOOK_EVERY;
            let pending =
                known.entry(waiter.place.clone()).or_insert_with(|| self.pending(&waiter.place, asked, now));
            let timed_out = waiter.until.is_some_and(|until| until <= now);
            let waits = |row: &Row| match row.pending.reason {
                PendingReason::Open | PendingReason::Mapped | PendingReason::Incomplete => {
                    row.comes && !waiter.ending
                }
                PendingReason::Torn
                | PendingReason::Unreadable
                | PendingReason::Uploading
                | PendingReason::Unknown => row.comes,
            };
            // A fenced node commits nothing more: what is pending stays so, however long anyone waits.
            let moves = self.fenced.is_none() && (waiter.ending && saves || pending.iter().any(waits));
            let changes = moves
                || decides
                || self.tree_may_come(waiter.began)
                || self.trackers_change(&waiter.place, waiter.began);
            if !timed_out && (!noticed || changes) {
                return true;
            }
            if waiter.ending && !timed_out && !waiter.writers_refused {
                // A close that was answered until now counts, and may not have been noticed yet.
                self.shared.namespace.refuse_writers();
                (waiter.writers_refused, waiter.began, refuses_writers) = (true, Instant::now(), true);
                return true;
            }
            let mut pending: Vec<_> = pending.iter().map(|row| row.pending.clone()).collect();
            if self.tree_is_pending(waiter.began) {
                pending.push(self.untold_names());
            }
            pending.truncate(PENDING_MAX);
            let outcome = FlushOutcome { pending, timed_out, tier3_away: self.tier3_away.is_away() };
            let answer = waiter.answer.take().expect("it was there a moment ago");
            // The client hung up: nobody needs the answer.
            let _ = answer.send(outcome);
            false
        });
        self.flushes.waiting.append(&mut waiting);
        self.flushes.not_before = Some(now + LOOK_EVERY.max(begun.elapsed() * LOOK_SHARE));
        if refuses_writers {
            self.give_up_writers();
            self.see_all_below(b"");
            self.look_at_everything();
            self.visibility.ask_about_removals();
            self.undo_removals(now);
        }
    }

    /// What a tree that Tier-3 was not told waits for.
    fn untold_names(&self) -> Pending {
        let (reason, what) = match &self.fenced {
            None => {
                (PendingReason::Uploading, "the names outside checkpoints are not in Tier-3 yet".to_owned())
            }
            Some(why) => (
                PendingReason::Unknown,
                format!(
                    "names that were given, changed or removed are not in Tier-3 and do not get there: another daemon decides ({why})"
                ),
            ),
        };
        Pending { path: String::new(), reason, what }
    }

    /// Keeps as it is what programs have open or mapped of checkpoints while the daemon ends: no close of theirs succeeds any more.
    /// On several nodes another one may have the writer.
    fn give_up_writers(&mut self) {
        if self.shared.cluster.get().is_some() {
            return;
        }
        let unfinished = self
            .files_of_checkpoints(|_| true)
            .filter(|view| view.host && matches!(view.state, FileState::Open { .. } | FileState::Mapped));
        let namespace = &self.shared.namespace;
        let given_up: Vec<_> =
            unfinished.map(|view| view.node).filter(|node| namespace.give_up(*node)).collect();
        self.seal_as_they_are(&given_up);
    }

    /// Everything at or below `place` that is not durable, and why. `asked`: when somebody asked last.
    fn pending(&self, place: &[u8], asked: Option<Instant>, now: Instant) -> Vec<Row> {
        let mut rows = Vec::new();
        for book in self.ledger.books.values().filter(|book| covers(place, &book.path())) {
            rows.extend(self.pending_book(book));
        }
        for (candidate, _) in self.torn() {
            let Some(path) = candidate.id.path().filter(|path| covers(place, path.as_bytes())) else {
                continue;
            };
            let path = String::from_utf8_lossy(&torn_path(&path)).into_owned();
            let what = "it can never be complete, and is out of sight".to_owned();
            rows.push(Row::of(Pending { path, reason: PendingReason::Torn, what }));
        }
        for (path, book) in self.ledger.loose.iter().filter(|(path, _)| covers(place, path.as_bytes())) {
            if let Some(Lack { reason, what, comes }) = self.lack_of(path, book, asked, now) {
                rows.push(Row { pending: Pending { path: path.to_string(), reason, what }, comes });
            }
        }
        rows
    }

    /// What a checkpoint waits for that is to come to Tier-3 by itself.
    pub(crate) fn comes(&self, book: &Book) -> Option<Pending> {
        self.pending_book(book).filter(|row| row.comes).map(|row| row.pending)
    }

    fn pending_book(&self, book: &Book) -> Option<Row> {
        let candidate = book.candidate.as_ref()?;
        let path = String::from_utf8_lossy(&book.path()).into_owned();
        let row = |reason, what: String| Some(Row::of(Pending { path: path.clone(), reason, what }));
        let files: Vec<_> = self.ledger.files_of(candidate, &book.scope).collect();
        let contents = crate::node::ledger::contents(files.iter().copied());
        let covering = contents.as_ref().and_then(|contents| book.covering(&self.shared, contents));
        if let Some((_, version)) = covering {
            let checkpoint = &version.checkpoint;
            let unproven = checkpoint.is_prepared() && !checkpoint.is_proven();
            return match &version.trouble {
                // Of what cannot be read any more a flush makes nothing.
                _ if checkpoint.is_committed() || checkpoint.why_unreadable().is_some() => None,
                Some(why) => row(PendingReason::Uploading, why.clone()),
                None if unproven && version.record().partial => {
                    row(PendingReason::Torn, version.record().evidence_detail.clone())
                }
                // Taken up early because the daemon ends: it is committed when its time has passed.
                None if unproven && self.draining && self.is_waiting_for_time(book) => {
                    row(PendingReason::Uploading, decide::waits_for(book))
                }
                // Tier-3 has all that there is of it, and waiting brings no proof.
                None if unproven && version.record().doubted => {
                    let pending = Pending {
                        path: path.clone(),
                        reason: PendingReason::Incomplete,
                        what: decide::waits_for(book),
                    };
                    Some(Row { pending, comes: false })
                }
                None if unproven => row(PendingReason::Incomplete, decide::waits_for(book)),
                None => row(PendingReason::Uploading, "its bytes are on their way to Tier-3".to_owned()),
            };
        }
        let unreadable = |(path, view): &(&RelPath, &Arc<FileView>)| {
            let why = self.ledger.unreadable.get(&view.node)?;
            Some(format!("{path} is closed and cannot be read to be sealed: {why}"))
        };
        if let Some(what) = files.iter().find_map(unreadable) {
            return row(PendingReason::Unreadable, what);
        }
        if self.draining {
            if let Some((reason, what)) = self.saving(book).filter(|_| self.grace_until.is_some()) {
                return row(reason, what);
            }
            let what = match rescue::look(&self.shared, &self.ledger, book) {
                Rescue::Sealing => Some("its files are being sealed"),
                Rescue::Uploading | Rescue::Wanted(_) => Some("its sealed files are on their way to Tier-3"),
                Rescue::Done => None,
            };
            if let Some(what) = what {
                return row(PendingReason::Uploading, what.to_owned());
            }
        }
        if book.is_torn() {
            return row(PendingReason::Torn, decide::waits_for(book));
        }
        for (path, view) in &files {
            match view.state {
                FileState::Open { writers } => {
                    return row(PendingReason::Open, format!("{path} has {writers} open writers"));
                }
                FileState::Mapped => return row(PendingReason::Mapped, format!("{path} is mapped writable")),
                FileState::Closed | FileState::Cut | FileState::Sealed { .. } => {}
            }
        }
        if contents.is_none() && !files.iter().any(|(_, view)| matches!(view.state, FileState::Cut)) {
            return row(PendingReason::Uploading, "its files are being sealed".to_owned());
        }
        // A failed version covers these contents: nothing will make them whole.
        if let Some((_, version)) = book.versions.iter().next_back()
            && let (Some(why), Some(contents)) = (version.checkpoint.failure(), &contents)
            && decide::is_covered(contents, &version.contents)
        {
            return row(PendingReason::Torn, why.to_owned());
        }
        let settling = decide::is_settling(book);
        let reason = if settling { PendingReason::Uploading } else { PendingReason::Incomplete };
        row(reason, decide::waits_for(book))
    }
}

impl Node {
    /// Makes everything closed at or below `place` durable. `wait` says whether to stay until it is, at most for
    /// `timeout`. Dropping the future ends the waiting, not the uploads.
    pub async fn flush(
        &self,
        place: Vec<u8>,
        wait: bool,
        timeout: Option<Duration>,
        progress: impl Fn(Progress),
    ) -> Option<Flush> {
        let metrics = &self.shared().metrics;
        let (files_before, bytes_before) = (metrics.upload_files.get(), metrics.upload_bytes.get());
        // Beyond all clocks is for ever.
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let since = self.shared().events.since(0).last().map_or(0, |event| event.number);
        let begun = place.clone();
        let answered = self.ask(move |engine| engine.begin_flush(begun, until, Told::Flush, false)).await?;
        let outcome = if wait {
            let mut answered = answered;
            let mut tick = tokio::time::interval(Duration::from_millis(500));
            loop {
                tokio::select! {
                    outcome = &mut answered => break outcome.ok()?,
                    _ = tick.tick() => {
                        let place = place.clone();
                        let left = self.ask(move |engine| engine.pending(&place, None, Instant::now()).len()).await?;
                        let done_bytes = metrics.upload_bytes.get() - bytes_before;
                        let done_files = metrics.upload_files.get() - files_before;
                        progress(Progress {
                            done_bytes,
                            total_bytes: done_bytes + self.lag_bytes().await?,
                            done_files,
                            total_files: done_files + u64::try_from(left).unwrap_or(u64::MAX),
                            now: None,
                        });
                    }
                }
            }
        } else {
            FlushOutcome::default()
        };
        let committed =
            self.shared().events.since(since).into_iter().filter(|event| event.kind == "committed");
        let paths: Vec<String> = committed.filter_map(|event| event.path).collect();
        let refs = self.ask(move |engine| engine.refs(&paths)).await?;
        Some(Flush {
            waited: wait,
            uploaded_files: metrics.upload_files.get() - files_before,
            uploaded_bytes: metrics.upload_bytes.get() - bytes_before,
            committed: refs,
            pending: outcome.pending,
            timed_out: outcome.timed_out,
            tier3_away: outcome.tier3_away,
        })
    }

    async fn lag_bytes(&self) -> Option<u64> {
        self.ask(|engine| engine.lag(None).bytes).await
    }

    /// The end of the daemon: seals, uploads and commits what can be, for at most `timeout`; answers what is not
    /// durable then. For `grace` it waits for programs that save; then, or when none does, writers are refused, so that no
    /// close is answered with success that is not followed by an upload.
    pub async fn drain(&self, timeout: Duration, grace: Duration) -> Option<FlushOutcome> {
        let now = Instant::now();
        let until = Some(now + timeout);
        let answered = self
            .ask(move |engine| {
                engine.draining = true;
                engine.grace_until = Some(now + grace);
                // Memory ends with us: what is sealed of them is kept as of any other.
                engine.show_all_torn();
                engine.begin_flush(Vec::new(), until, Told::No, true)
            })
            .await?;
        answered.await.ok()
    }
}

impl Engine {
    fn refs(&self, paths: &[String]) -> Vec<CheckpointRef> {
        let books = self.ledger.books.values();
        books
            .filter(|book| paths.iter().any(|path| *path == String::from_utf8_lossy(&book.path())))
            .filter_map(|book| {
                let (_, version) = book.committed()?;
                Some(crate::node::answer::checkpoint_ref(&version.checkpoint))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::covers;

    #[test]
    fn a_place_covers_itself_and_what_is_below_it_only() {
        assert!(covers(b"", b"anything"));
        assert!(covers(b"r/a", b"r/a"));
        assert!(covers(b"r/a", b"r/a/b"));
        assert!(!covers(b"r/a", b"r/ab"));
        assert!(!covers(b"r/a", b"r"));
    }
}

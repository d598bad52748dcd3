//! Moves versions towards their marker: passes events to the rules, and carries out their commands.
//!
//! Owns: which attempts run, the waits between them, what a commit changes in the namespace. Does not own: which step follows
//! which (`protocol::checkpoint`), the order of versions (`protocol::lineage`), the jobs' bodies (`jobs`).

use crate::node::Shared;
use crate::node::away::{Away, Cause};
use crate::node::backlog::{Backlog, lags};
use crate::node::book::{BookLookup, Number, VersionBook};
use crate::node::decide::Plan;
use crate::node::flush::Flushes;
use crate::node::gc::Gc;
use crate::node::given_up::StillCounts;
use crate::node::jobs::{self, Done};
use crate::node::ledger::Ledger;
use crate::node::rights::Rights;
use crate::node::run::{RETRY_LONGEST, retry_pause};
use crate::node::scrub::Scrub;
use crate::node::tree::TreeState;
use crate::node::visibility::trackers_may_go;
use crate::save::commit::{Attempt, CommitError};
use crate::save::upload::UploadError;
use std::collections::BTreeMap;
use std::sync::Arc;
use tidemark_namespace::ObjectCopy;
use tidemark_protocol::checkpoint::{Checkpoint, CheckpointCommand, CheckpointEvent};
use tidemark_protocol::error::{ErrorKind, error_text};
use tidemark_protocol::evidence::{History, masked_names};
use tidemark_protocol::id::FileId;
use tidemark_protocol::invariants;
use tidemark_protocol::manifest::{Manifest, ManifestFile};
use tidemark_protocol::path::RunPath;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::record::RecordFile;
use tidemark_protocol::report::EventLevel;
use tidemark_protocol::residency::{ReclaimClass, reclaim_class};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Attempts in flight at once: one uploads while the other writes its markers.
pub const ATTEMPTS_IN_FLIGHT_MAX: usize = 2;

/// Tries, over some seconds, of an attempt that reads something that is no document, for example because a proxy asks for a password or
/// the store is replaced. Then the version number counts as used, as others may have written there: the next version has another key.
const NO_DOCUMENT_TRIES: u32 = 6;

/// The parts of the loop that moving a version reads and changes.
pub(crate) struct Versions<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) backlog: &'a mut Backlog,
    pub(crate) jobs: &'a mut JoinSet<Done>,
    pub(crate) tree: &'a mut TreeState,
    pub(crate) gc: &'a mut Gc,
    pub(crate) tier3_away: &'a mut Away,
    pub(crate) rights: &'a mut Rights,
    pub(crate) flushes: &'a mut Flushes,
    pub(crate) scrub: &'a mut Scrub,
}

impl Versions<'_> {
    /// Opens a version and queues its attempt.
    pub(crate) fn start(&mut self, id: &CheckpointId, plan: Plan) {
        let Plan { record, contents, files, directories, hard_links, shares } = plan;
        let previous = self.books().previous(&id.run);
        let mut attempt = Attempt::new(record.clone(), files, previous.clone());
        attempt.directories = directories;
        attempt.hard_links = hard_links;
        attempt.shares = shares;
        let queued =
            self.backlog.queue.iter().map(|(id, number)| self.books().version(id, *number).bytes_left());
        let backlog_bytes = queued.sum::<u64>() + attempt.bytes_left();
        self.flushes.set_paces(self.shared, self.rights.draining, &record, backlog_bytes);
        let proven = record.evidence.commits();
        let kind = if proven { "complete" } else { "settled" };
        self.shared.event_of(EventLevel::Info, kind, id, record.evidence_detail.clone());
        if proven {
            self.remember(id);
        }
        let number = (record.version.timeline, record.version.version);
        let mut todo = Vec::new();
        let checkpoint = Checkpoint::recorded(record, &mut todo);
        let mut version = VersionBook::new(checkpoint, contents);
        version.previous = previous;
        version.attempt = Some(Box::new(attempt));
        let book = self.ledger.books.get_mut(id).expect("the plan is of this book");
        book.versions.insert(number, version);
        if proven {
            self.tell_older(id, number, &CheckpointEvent::Superseded);
        }
        self.carry_out(id, number, todo);
        self.give_turns();
    }

    /// Passes an event of a version to the rules, and carries out their commands.
    pub(crate) fn happens(&mut self, id: &CheckpointId, number: Number, event: CheckpointEvent) {
        let mut todo = Vec::new();
        if let Err(illegal) = self.ledger.version_mut(id, number).checkpoint.step(event, &mut todo) {
            tracing::error!(checkpoint = %format_args!("{}/{}", id.run, id.directory), %illegal, "a broken belief");
            debug_assert!(false, "{illegal}");
            return;
        }
        self.carry_out(id, number, todo);
    }

    fn carry_out(&mut self, id: &CheckpointId, number: Number, todo: Vec<CheckpointCommand>) {
        let version = self.books().version(id, number);
        debug_assert_eq!(invariants::nothing_is_committed_without_evidence(&version.checkpoint), Ok(()));
        let entry = (id.clone(), number);
        if lags(&version.checkpoint) {
            self.backlog.lagging.insert(entry);
        } else if self.backlog.lagging.remove(&entry) {
            self.tree.looks_at_withheld(self.ledger);
        }
        for command in todo {
            match command {
                CheckpointCommand::Enqueue => {
                    self.ledger.version_mut(id, number).trouble = None;
                    self.backlog.queue.push_back((id.clone(), number));
                }
                CheckpointCommand::Prepare => {
                    let (shared, attempt) = (Arc::clone(self.shared), self.take_attempt(id, number));
                    self.jobs.spawn(jobs::prepare(shared, id.clone(), number, attempt));
                }
                CheckpointCommand::Decide => {
                    let (shared, mut attempt) = (Arc::clone(self.shared), self.take_attempt(id, number));
                    // Evidence may have come after the record was written; the manifest names the evidence that counted.
                    let (evidence, detail) = self.books().version(id, number).checkpoint.evidence();
                    attempt.raise(evidence, detail);
                    self.jobs.spawn(jobs::decide(shared, id.clone(), number, attempt));
                }
                CheckpointCommand::Pause => self.pause_version(id, number),
                CheckpointCommand::Publish => self.publish(id, number),
                CheckpointCommand::Release => {
                    self.ledger.version_mut(id, number).attempt = None;
                    let other = |of: &CheckpointId, at: &Number| (of, *at) != (id, number);
                    self.backlog.queue.retain(|(of, at)| other(of, at));
                    self.backlog.paused.retain(|(_, of, at)| other(of, at));
                }
                CheckpointCommand::LookAgain => {
                    self.ledger.due.insert(id.clone());
                }
            }
        }
    }

    /// Begins queued attempts while fewer than [`ATTEMPTS_IN_FLIGHT_MAX`] run.
    pub(crate) fn give_turns(&mut self) {
        while self.backlog.in_flight < ATTEMPTS_IN_FLIGHT_MAX && self.rights.may_write() {
            let Some((id, number)) = self.backlog.queue.pop_front() else { return };
            self.happens(&id, number, CheckpointEvent::TurnCame);
        }
    }

    fn take_attempt(&mut self, id: &CheckpointId, number: Number) -> Box<Attempt> {
        self.backlog.in_flight += 1;
        self.ledger.version_mut(id, number).attempt.take().expect("no other job has it, or it had no turn")
    }

    pub(crate) fn prepare_done(
        &mut self,
        id: &CheckpointId,
        number: Number,
        attempt: Box<Attempt>,
        result: Result<(), CommitError>,
    ) {
        self.give_back(id, number, attempt);
        match result {
            Ok(()) => {
                self.tier3_away.ended(&Cause::Version(id.clone(), number));
                if !self.books().version(id, number).checkpoint.is_proven() {
                    // An unproven version rests there.
                    self.nothing_in_the_way(id);
                }
                self.shared.metrics.prepare_versions.inc();
                self.happens(id, number, CheckpointEvent::Prepared);
                trackers_may_go(self.ledger, id);
                self.tree.tells_more(self.ledger);
            }
            Err(error) => self.failed(id, number, &error),
        }
    }

    /// Applies the end of phase 2. Returns whether the version is committed: then what was torn under its name is dropped.
    #[must_use]
    pub(crate) fn decide_done(
        &mut self,
        id: &CheckpointId,
        number: Number,
        attempt: Box<Attempt>,
        result: Result<Box<Manifest>, CommitError>,
    ) -> bool {
        self.give_back(id, number, attempt);
        match result {
            Ok(manifest) => {
                self.tier3_away.ended(&Cause::Version(id.clone(), number));
                self.nothing_in_the_way(id);
                let epoch = self.shared.drain.epoch();
                self.ledger.version_mut(id, number).committed = Some((Arc::new(*manifest), epoch));
                self.happens(id, number, CheckpointEvent::Committed);
                true
            }
            Err(error) => {
                self.failed(id, number, &error);
                false
            }
        }
    }

    fn give_back(&mut self, id: &CheckpointId, number: Number, attempt: Box<Attempt>) {
        self.backlog.in_flight -= 1;
        self.ledger.version_mut(id, number).attempt = Some(attempt);
    }

    fn failed(&mut self, id: &CheckpointId, number: Number, error: &CommitError) {
        let why = error_text(error);
        let (level, event) = match (error.kind(), error) {
            (_, error) if error.ends_the_attempt() => {
                (EventLevel::Warn, CheckpointEvent::DecidedOtherwise { why: why.clone() })
            }
            // This decides nothing yet: something other than the store may have answered. Content that stays there has used the number.
            (_, error) if error.is_no_document() => {
                let now = Instant::now();
                self.tier3_away.failed(Cause::InTheWay(id.clone()), now, why.clone());
                self.shared.metrics.upload_failures.inc();
                let attempt =
                    self.ledger.version_mut(id, number).attempt.as_mut().expect("its job gave it back");
                let stays = attempt.count_no_document() >= NO_DOCUMENT_TRIES;
                let otherwise = CheckpointEvent::DecidedOtherwise { why: why.clone() };
                (EventLevel::Warn, if stays { otherwise } else { CheckpointEvent::Interrupted })
            }
            // Its files were removed, which is no error.
            (_, CommitError::Upload(UploadError::Removed { .. })) => {
                (EventLevel::Warn, CheckpointEvent::Spoiled { why: why.clone() })
            }
            (ErrorKind::Corrupt, _) => (EventLevel::Error, CheckpointEvent::Spoiled { why: why.clone() }),
            (ErrorKind::Fenced, _) => {
                self.rights.fenced = Some(why.clone());
                (EventLevel::Error, CheckpointEvent::Interrupted)
            }
            (ErrorKind::Unavailable | ErrorKind::NoSpace | ErrorKind::Invalid | ErrorKind::NotFound, _) => {
                self.tier3_away.failed(Cause::Version(id.clone(), number), Instant::now(), why.clone());
                self.shared.metrics.upload_failures.inc();
                (EventLevel::Warn, CheckpointEvent::Interrupted)
            }
        };
        let checkpoint = format_args!("{}/{}", id.run, id.directory);
        match level {
            EventLevel::Error => tracing::error!(%checkpoint, %why, "not committed"),
            EventLevel::Warn | EventLevel::Info => tracing::warn!(%checkpoint, %why, "not committed yet"),
        }
        match &event {
            CheckpointEvent::DecidedOtherwise { .. } => {
                self.stands_in_the_way(id, why.clone(), Instant::now());
            }
            // A spoiled version is not tried again.
            CheckpointEvent::Spoiled { .. } => self.nothing_in_the_way(id),
            _ => {}
        }
        self.ledger.version_mut(id, number).trouble = Some(why.clone());
        self.shared.event_of(level, "not_committed", id, why);
        self.happens(id, number, event);
    }

    /// Records that other content stood where a version was to be written: another program's, or what this node wrote before a restart. Each
    /// time in a row, the next version waits longer.
    fn stands_in_the_way(&mut self, id: &CheckpointId, why: String, now: Instant) {
        let book = self.ledger.books.get_mut(id).expect("a version is of a book, and books stay");
        book.in_the_way.came(now, why.clone());
        if book.in_the_way.lasts() {
            self.tier3_away.failed(Cause::InTheWay(id.clone()), now, why);
        }
    }

    /// Ends that wait: a version is in Tier-3, or none is tried any more.
    fn nothing_in_the_way(&mut self, id: &CheckpointId) {
        self.ledger.books.get_mut(id).expect("a version is of a book, and books stay").in_the_way.ended();
        self.tier3_away.ended(&Cause::InTheWay(id.clone()));
    }

    /// Whether the next version of a checkpoint waits because content of others stood in the way of the last one.
    pub(crate) fn is_held_up(&self, id: &CheckpointId, now: Instant) -> bool {
        self.ledger.books[id].in_the_way.waits(self.flushes.retry_longest(), now)
    }

    fn pause_version(&mut self, id: &CheckpointId, number: Number) {
        let longest = if self.rights.fenced.is_some() { RETRY_LONGEST } else { self.flushes.retry_longest() };
        let attempt = self.ledger.version_mut(id, number).attempt.as_mut().expect("its job gave it back");
        let pause = retry_pause(attempt.count_failure(), longest);
        self.backlog.paused.insert((Instant::now() + pause, id.clone(), number));
    }

    /// Ends the pauses that are over. Costs the number of pauses that end.
    pub(crate) fn end_pauses(&mut self, now: Instant) {
        while self.backlog.paused.first().is_some_and(|(until, ..)| *until <= now) {
            let Some((_, id, number)) = self.backlog.paused.pop_first() else { return };
            self.happens(&id, number, CheckpointEvent::PauseOver);
        }
    }

    /// Applies a commit: records its objects, ends older attempts, and lets host copies be evicted.
    fn publish(&mut self, id: &CheckpointId, number: Number) {
        let Some(manifest) = self.books().version(id, number).manifest().map(Arc::clone) else { return };
        self.shared.metrics.commit_versions.inc();
        #[expect(clippy::cast_precision_loss, reason = "a duration for a histogram")]
        let seconds = (self.shared.now_ns() - manifest.completed_at_ns).max(0) as f64 / 1e9;
        self.shared.metrics.commit_seconds.observe(seconds);
        for file in &manifest.files {
            self.shared.namespace.hosts().note_object(file.file, file.seal, ObjectCopy::of(file));
        }
        if let Some(cluster) = self.shared.cluster.get() {
            let of = |file: &ManifestFile| (file.file, file.seal, ObjectCopy::of(file));
            cluster.tell_objects(manifest.files.iter().map(of).collect());
        }
        if let Some(book) = self.ledger.books.get_mut(id) {
            book.told_of = None;
        }
        self.ledger.frees_temporaries(id);
        self.tell_older(id, number, &CheckpointEvent::Overtaken);
        let (files, bytes) = (manifest.files.len(), manifest.size_bytes());
        let what = format!("version {} of {files} files and {bytes} bytes is committed", number.1);
        self.shared.event_of(EventLevel::Info, "committed", id, what);
        self.gc.has_news();
        self.shared.classify_run(self.ledger, &id.run);
        self.tree.tells_more(self.ledger);
    }

    /// Forgets a committed version that was retired. Only its number stays used.
    pub(crate) fn forget_version(&mut self, id: &CheckpointId, number: Number, why: &str) {
        self.happens(id, number, CheckpointEvent::GivenUp { why: why.to_owned() });
        let version = self.ledger.version_mut(id, number);
        let committed = version.committed.take();
        version.contents.clear();
        let files = committed.iter().flat_map(|(manifest, _)| &manifest.files);
        let still_counts = StillCounts { shared: self.shared, ledger: self.ledger, gc: self.gc };
        self.scrub.forget_found(still_counts, files.map(|file| (file.file, file.seal, file.key.as_str())));
        self.scrub.forget_documents(&self.ledger.books[id]);
        self.ledger.tree_changed = true;
        self.shared.classify_run(self.ledger, &id.run);
    }

    /// Remembers what the next version of the same session should look like.
    fn remember(&mut self, id: &CheckpointId) {
        let book = &self.ledger.books[id];
        let Some(candidate) = &book.candidate else { return };
        let views: Vec<_> = self.ledger.parts_of(book).map(|(_, view)| Arc::clone(view)).collect();
        let writers: Vec<_> = views.iter().flat_map(|view| &view.writers).collect();
        let Some(first) = writers.first() else { return };
        let history = History {
            framework: candidate.framework.clone(),
            names: masked_names(candidate, self.ledger.parts_of(book).map(|(path, _)| path)),
            world_size: writers.iter().filter_map(|writer| writer.world_size).max(),
            processes: writers.iter().map(|writer| writer.process()).collect(),
            session: first.session.0.clone(),
        };
        self.ledger.history.insert(id.run.clone(), history);
    }

    /// Passes an event to the older versions of the same checkpoint that may still be committed.
    fn tell_older(&mut self, id: &CheckpointId, newer: Number, event: &CheckpointEvent) {
        let older = self.ledger.books[id].versions.range(..newer);
        let alive = older.filter(|(_, version)| version.checkpoint.is_alive());
        for number in alive.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.happens(id, number, event.clone());
        }
    }

    fn books(&self) -> BookLookup<'_> {
        BookLookup { ledger: self.ledger }
    }
}

impl Shared {
    /// Sets which host copies of a run may be evicted, and in which order.
    pub(crate) fn classify_run(&self, ledger: &Ledger, run: &RunPath) {
        let newest = BookLookup { ledger }.watermark(run);
        let watermark = newest.map(|version| &version.record().version);
        let mut classes: BTreeMap<FileId, ReclaimClass> = BTreeMap::new();
        for book in ledger.books.values().filter(|book| book.id.run == *run) {
            // Files that older versions of the same checkpoint list have no name any more, or are in the newest, too.
            let Some((_, version)) = book.committed() else { continue };
            let class = reclaim_class(&version.record().version, watermark);
            for file in version.manifest().iter().flat_map(|manifest| &manifest.files) {
                let known = classes.entry(file.file).or_insert(class);
                *known = class.max(*known);
            }
        }
        if cfg!(debug_assertions) {
            let listed = newest.iter().flat_map(|version| &version.record().files);
            let of = |entry: &RecordFile| Some((entry.path.clone(), *classes.get(&entry.file)?));
            let files: Vec<_> = listed.filter_map(of).collect();
            assert_eq!(invariants::the_newest_committed_version_gives_way_last(&files), Ok(()));
        }
        for (file, class) in classes {
            self.namespace.hosts().set_reclaim(file, class);
        }
    }
}

#[cfg(test)]
#[path = "advance_test.rs"]
mod tests;

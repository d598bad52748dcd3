//! Waits until files are durable: `flush`, and the end of the daemon.
//!
//! Owns: the waiting. Does not own: which files of a checkpoint are pending (`pending`), uploading (`run`), completeness (protocol).

use crate::node::book::Book;
use crate::node::damage::BadCopies;
use crate::node::given_up::Objects;
use crate::node::outstanding::Outstanding;
use crate::node::pending::Row;
use crate::node::run::{Engine, Node, RETRY_LONGEST, RETRY_URGENT};
use std::collections::BTreeMap;
use std::time::Duration;
use tidemark_namespace::{FileState, ask_anew};
use tidemark_protocol::evidence::Told;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::report::{Flush, Pending, PendingReason, Progress};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Shortest interval between two passes that collect what is pending for flushes: each costs a pass over the books.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// After such a pass, the next waits this many times as long as the pass took: a pass over 100,000 loose files may take longer than
/// [`LOOK_EVERY`].
const LOOK_SHARE: u32 = 8;

/// Longest gap, in nanoseconds, between two files of one save, in which a program has none of them open. A save whose last file was
/// closed less than this ago goes on.
pub(crate) const SAVE_GAP_NS: i64 = 2 * 1_000_000_000;

/// Longest time until a command that does not wait is answered. Normally it is answered once all files closed just before it were
/// examined, but a job that saves without a pause gives no such moment.
const NOTICED_WITHIN: Duration = Duration::from_secs(1);

/// Longest time that the end of the daemon spends on rewriting objects that are bad in Tier-3, enough for an object of some GB. A machine
/// that stops does not wait long; a `verify` has no such limit.
const MEND_AT_END: Duration = Duration::from_secs(5);

/// Time for which the word of a command that did not wait holds for files that are not sealed yet: some 300 GB are sealed by then.
const WORD_HOLDS: Duration = Duration::from_secs(300);

/// Most words kept at once, one for each place, including commands that are not answered yet: each costs a pass over the books now and
/// then. Without the word, the settle time leads to the same result later.
const WORDS_MAX: usize = 64;

/// Most entries of a pending list; a flush of 100,000 open files need not name them all.
pub(crate) const PENDING_MAX: usize = 1000;

/// Flushes that are waiting, and words that still hold.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    waiting: Vec<Waiter>,
    not_before: Option<Instant>,
    /// When other nodes were notified of a waiting flush, since the last checkpoint was complete.
    pub(crate) told_others: Option<Instant>,
}

/// Kind of a flush, by how it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    /// A command that waits for everything that may still become durable.
    Caller,
    /// A command that only asks what is pending. After the answer, its word about the files closed by then holds until they are
    /// committed, or for [`WORD_HOLDS`].
    Nobody,
    /// The end of the daemon, which waits only for uploads that move by themselves, and, while the grace lasts, for programs that save.
    End,
}

#[derive(Debug)]
struct Waiter {
    place: Vec<u8>,
    until: Option<Instant>,
    told: Told,
    waits: Waits,
    /// Whether writers are refused since this waiter began its last pass: files that they closed before are all there is.
    writers_refused: bool,
    /// None once the answer was sent.
    answer: Option<oneshot::Sender<FlushOutcome>>,
    began: Instant,
    /// The same moment on the clock of the files.
    began_ns: i64,
}

impl Waiter {
    /// Whether only its word is left: the command was answered and does not wait.
    fn is_word(&self) -> bool {
        self.waits == Waits::Nobody && self.answer.is_none()
    }
}

/// How a flush ended.
#[derive(Debug)]
pub struct FlushOutcome {
    pub pending: Vec<Pending>,
    pub timed_out: bool,
    pub tier3_away: bool,
}

impl FlushOutcome {
    /// Returns the outcome for a command that does not wait, if nothing was examined: a starting coordinator does not answer for a while.
    fn unknown(tier3_away: bool) -> Self {
        let what = "this node does not know yet what Tier-3 holds".to_owned();
        let pending = vec![Pending { path: String::new(), reason: PendingReason::Unknown, what }];
        Self { pending, timed_out: false, tier3_away }
    }
}

impl Flushes {
    /// Whether no flush waits. A word that only holds hurries nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.iter().all(Waiter::is_word)
    }

    /// Returns when the last flush began.
    pub(crate) fn last_began(&self) -> Option<Instant> {
        self.waiting.iter().map(|waiter| waiter.began).max()
    }

    /// Returns the strongest word of the flushes about a checkpoint. `is_about` says whether a flush of a place includes it; `closed_ns`
    /// says when the last of its files was closed. The word of a command that did not wait does not cover files closed later.
    pub(crate) fn told(&self, is_about: impl Fn(&[u8]) -> bool, closed_ns: impl Fn() -> i64) -> Told {
        let holds = |waiter: &&Waiter| waiter.waits != Waits::Nobody || closed_ns() <= waiter.began_ns;
        let about = self.waiting.iter().filter(|waiter| is_about(&waiter.place)).filter(holds);
        about.map(|waiter| waiter.told).max().unwrap_or_default()
    }

    /// Drops an older word about `place`. If there are still too many, also drops the oldest word, or the oldest command that does not
    /// wait and is not answered yet.
    fn make_room(&mut self, place: &[u8]) {
        self.waiting.retain(|waiter| !(waiter.is_word() && waiter.place == place));
        let is_one = |waiter: &Waiter| waiter.waits == Waits::Nobody;
        if self.waiting.iter().filter(|waiter| is_one(waiter)).count() >= WORDS_MAX
            && let Some(oldest) = self.waiting.iter().position(is_one)
        {
            self.waiting.remove(oldest);
        }
    }

    /// Returns when the end of the daemon stops waiting.
    pub(crate) fn end_is_due(&self) -> Option<Instant> {
        let ending = self.waiting.iter().filter(|waiter| waiter.waits == Waits::End);
        ending.filter_map(|waiter| waiter.until).max()
    }

    /// Returns the longest pause between two tries now.
    pub(crate) fn retry_longest(&self) -> Duration {
        if self.is_empty() { RETRY_LONGEST } else { RETRY_URGENT }
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
        waits: Waits,
    ) -> oneshot::Receiver<FlushOutcome> {
        let (answer, answered) = oneshot::channel();
        if waits == Waits::Nobody {
            self.flushes.make_room(&place);
        }
        self.see_all_about(&place);
        // Also collects exit statuses now, so that the flush does not commit a checkpoint whose writer was killed.
        ask_anew();
        self.shared.namespace.writers().forget_ended_writers();
        self.visibility.ask_about_removals();
        self.flushes.waiting.push(Waiter {
            place,
            until,
            told,
            waits,
            writers_refused: false,
            answer: Some(answer),
            began: Instant::now(),
            began_ns: self.shared.now_ns(),
        });
        // While a flush waits, drain and copies may use the whole link, and everything is examined again.
        self.flushes.lift_paces(&self.shared);
        self.look_at_everything();
        answered
    }

    /// Refreshes all files at or below `place`, so that files closed just before are seen although the loop's next look is still to come. If the place
    /// lies in a checkpoint, refreshes its whole scope: a checkpoint with missing files must not be taken for whole.
    fn see_all_about(&mut self, place: &[u8]) {
        let namespace = &self.shared.namespace;
        let mut views = namespace.nodes().views_below(place);
        let is_file =
            || namespace.nodes().node_at(place).is_some_and(|node| namespace.nodes().view(node).is_some());
        let lies_in_one = || self.by_path().books_about(place).any(|book| !covers(place, &book.path()));
        if let Ok(path) = RelPath::new(place)
            && (is_file() || lies_in_one())
        {
            let scope = self.ledger.rules().scope(&path);
            views.extend(namespace.nodes().views_below(scope.as_ref().map_or(&b""[..], RelPath::as_bytes)));
        }
        let nodes: Vec<_> = views.into_iter().map(|view| view.node).collect();
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
        if self.rights.grace_until.is_some_and(|until| until <= now) {
            self.rights.grace_until = None;
            // Files that were left alone during their save are now taken as they are.
            self.look_at_everything();
        }
    }

    /// Answers the flushes whose place is durable, or whose time is up.
    pub(crate) fn answer_flushes(&mut self, now: Instant) {
        if self.flushes.waiting.is_empty() {
            return;
        }
        if self.flushes.not_before.is_some_and(|not_before| now < not_before) {
            return;
        }
        let begun = Instant::now();
        let mut refuses_writers = false;
        let asked = self.flushes.last_began();
        let mut waiting = std::mem::take(&mut self.flushes.waiting);
        let saves = self.rights.grace_until.is_some()
            && waiting.iter().any(|waiter| waiter.waits == Waits::End)
            && Outstanding { engine: self }.is_anything_saved();
        let decides = self.beginnings().decides_about_begun(now);
        let trackers_change = |place: &[u8], asked| {
            !self.rights.shields_nothing() && self.visibility.trackers_change(&self.ledger, place, asked)
        };
        // Many flushes may wait for one place.
        let mut known: BTreeMap<Vec<u8>, Vec<Row>> = BTreeMap::new();
        waiting.retain_mut(|waiter| {
            let is_gone = waiter.answer.as_ref().is_none_or(oneshot::Sender::is_closed);
            if is_gone && waiter.waits != Waits::Nobody {
                return false;
            }
            // Files closed just before the flush may not have been noticed yet.
            let noticed =
                !self.ledger.is_stale() && now.saturating_duration_since(waiter.began) >= LOOK_EVERY;
            let pending = known
                .entry(waiter.place.clone())
                .or_insert_with(|| Outstanding { engine: self }.pending(&waiter.place, asked, now));
            let timed_out = waiter.until.is_some_and(|until| until <= now);
            let waits = |row: &Row| match row.pending.reason {
                PendingReason::Open | PendingReason::Mapped => row.comes && waiter.waits == Waits::Caller,
                // Includes files that are sealed and about to be judged.
                PendingReason::Incomplete => row.comes && waiter.waits != Waits::End,
                PendingReason::Torn
                | PendingReason::Unreadable
                | PendingReason::Damaged
                | PendingReason::Unnameable
                | PendingReason::Uploading
                | PendingReason::Unknown => row.comes,
            };
            // A fenced node commits nothing more: pending files stay pending, however long a flush waits.
            let saves = waiter.waits == Waits::End && saves;
            let moves = self.rights.fenced.is_none() && (saves || pending.iter().any(waits));
            let tree_may_come = Outstanding { engine: self }.tree_may_come(waiter.began);
            let changes = moves || decides || tree_may_come || trackers_change(&waiter.place, waiter.began);
            // Names that are about to be examined may all be in Tier-3 already.
            let is_seen = noticed && !(tree_may_come && self.ledger.tree_changed);
            let is_late = now.saturating_duration_since(waiter.began) >= NOTICED_WITHIN;
            if waiter.waits == Waits::Nobody
                && (is_seen || is_late)
                && let Some(answer) = waiter.answer.take()
            {
                let mut outcome = Outstanding { engine: self }.outcome(pending, waiter.began, false);
                if !noticed {
                    let what = "what was closed just before has not been looked at yet".to_owned();
                    let (path, reason) = (String::new(), PendingReason::Unknown);
                    outcome.pending.push(Pending { path, reason, what });
                }
                // If the client hung up, the answer is not needed, but the word holds.
                let _ = answer.send(outcome);
            }
            if !timed_out && (!noticed || changes) {
                return true;
            }
            if waiter.waits == Waits::End && !timed_out && !waiter.writers_refused {
                // Every close that was answered until now counts, and may not have been noticed yet.
                self.shared.namespace.gate().refuse_writers();
                (waiter.writers_refused, waiter.began, refuses_writers) = (true, Instant::now(), true);
                return true;
            }
            if let Some(answer) = waiter.answer.take() {
                // If the client hung up, the answer is not needed.
                let _ = answer.send(Outstanding { engine: self }.outcome(pending, waiter.began, timed_out));
            }
            false
        });
        self.flushes.waiting.append(&mut waiting);
        self.flushes.not_before = Some(now + LOOK_EVERY.max(begun.elapsed() * LOOK_SHARE));
        if refuses_writers {
            self.give_up_writers();
            self.see_all_about(b"");
            self.look_at_everything();
            self.visibility.ask_about_removals();
            self.shielding().undo_removals(now);
        }
    }

    /// Seals as they are the checkpoint files that programs have open or mapped, because no close succeeds while the daemon ends. Does
    /// nothing on several nodes, where another node may have the writer.
    fn give_up_writers(&mut self) {
        if self.shared.cluster.get().is_some() {
            return;
        }
        let unfinished = self
            .sessions()
            .files_of_checkpoints(|_| true)
            .filter(|view| view.host && matches!(view.state, FileState::Open { .. } | FileState::Mapped));
        let namespace = &self.shared.namespace;
        let given_up: Vec<_> =
            unfinished.map(|view| view.node).filter(|node| namespace.seals().give_up(*node)).collect();
        self.ledger.seal_as_they_are(&given_up);
    }
}

async fn unknown(node: &Node) -> Option<FlushOutcome> {
    node.ask(|engine| FlushOutcome::unknown(engine.tier3_away.trouble(&engine.shared).is_some())).await
}

/// Adds rows for what is bad in Tier-3, which no waiting mends.
async fn with_damaged(node: &Node, place: Vec<u8>, mut outcome: FlushOutcome) -> Option<FlushOutcome> {
    let damaged = node.ask(move |engine| BadCopies { engine }.damaged(&place)).await?;
    outcome.pending.extend(damaged);
    outcome.pending.truncate(PENDING_MAX);
    Some(outcome)
}

async fn lag_bytes(node: &Node) -> Option<u64> {
    node.ask(|engine| engine.backlog.lag(&engine.ledger, engine.shared.now_ns(), None).bytes).await
}

impl Node {
    /// Makes everything closed at or below `place`, or the checkpoint in which it lies, durable.
    ///
    /// With `wait`, returns when that is done, at most after `timeout`; objects that are known to be bad in Tier-3 are written again, or
    /// named. Without `wait`, returns within seconds with what is pending. Dropping the future ends the waiting, not the uploads.
    pub async fn flush(
        &self,
        place: Vec<u8>,
        wait: bool,
        timeout: Option<Duration>,
        progress: impl Fn(Progress),
    ) -> Option<Flush> {
        let metrics = &self.shared().metrics;
        let (files_before, bytes_before) = (metrics.upload_files.get(), metrics.upload_bytes.get());
        let (waits, timeout) =
            if wait { (Waits::Caller, timeout) } else { (Waits::Nobody, Some(WORD_HOLDS)) };
        // A time beyond the clock's range means for ever.
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let since = self.shared().events.since(0).last().map_or(0, |event| event.number);
        let begun = place.clone();
        let mut answered =
            self.ask(move |engine| engine.begin_flush(begun, until, Told::Flush, waits)).await?;
        if wait {
            Objects { node: self }.mend_known(&place, until).await?;
        }
        let mut tick = tokio::time::interval(Duration::from_millis(500));
        let mut given_up = std::pin::pin!(tokio::time::sleep(2 * NOTICED_WITHIN));
        let outcome = loop {
            tokio::select! {
                outcome = &mut answered => match outcome {
                    Ok(outcome) => break outcome,
                    Err(_) if wait => return None,
                    Err(_) => break unknown(self).await?,
                },
                () = &mut given_up, if !wait => break unknown(self).await?,
                _ = tick.tick() => {
                    let place = place.clone();
                    let left = self.ask(move |engine| Outstanding { engine }.pending(&place, None, Instant::now()).len()).await?;
                    let done_bytes = metrics.upload_bytes.get() - bytes_before;
                    let done_files = metrics.upload_files.get() - files_before;
                    progress(Progress {
                        done_bytes,
                        total_bytes: done_bytes + lag_bytes(self).await?,
                        done_files,
                        total_files: done_files + u64::try_from(left).unwrap_or(u64::MAX),
                        now: None,
                    });
                }
            }
        };
        let outcome = with_damaged(self, place, outcome).await?;
        let committed =
            self.shared().events.since(since).into_iter().filter(|event| event.kind == "committed");
        let paths: Vec<String> = committed.filter_map(|event| event.path).collect();
        let refs = self.ask(move |engine| engine.books().refs(&paths)).await?;
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

    /// Ends the daemon's work: seals, uploads and commits what it can, for at most `timeout`, and returns what is not durable then.
    ///
    /// Waits for programs that save, for at most `grace`. After that, writers are refused, so that no close succeeds without a later
    /// upload. Meanwhile, objects that are known to be bad are written again.
    pub async fn drain(&self, timeout: Duration, grace: Duration) -> Option<FlushOutcome> {
        let now = Instant::now();
        let until = Some(now + timeout);
        let answered = self
            .ask(move |engine| {
                engine.rights.draining = true;
                engine.rights.grace_until = Some(now + grace);
                // Memory ends with the daemon: sealed files of torn checkpoints are kept like any others.
                engine.shielding().show_all_torn();
                engine.begin_flush(Vec::new(), until, Told::No, Waits::End)
            })
            .await?;
        let mending = Objects { node: self }.mend_known(b"", Some(now + timeout.min(MEND_AT_END)));
        let (answered, _) = tokio::join!(answered, mending);
        with_damaged(self, Vec::new(), answered.ok()?).await
    }
}

impl Engine {
    /// Takes over flushes and people's words from the loop `before`, which did not know what Tier-3 holds. Each word is compared with
    /// the tree's content whenever it is used.
    pub(crate) fn keep_words(&mut self, before: &mut Self) {
        self.flushes = std::mem::take(&mut before.flushes);
        for (id, book) in &mut before.ledger.books {
            let Some(told_of) = book.told_of.take() else { continue };
            let book = self.ledger.books.entry(id.clone()).or_insert_with(|| Book::new(id.clone()));
            book.told_of = Some(told_of);
        }
    }
}

#[cfg(test)]
#[path = "flush_test.rs"]
mod tests;

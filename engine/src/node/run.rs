//! The loop, and what follows from each event.
//!
//! Owns: what the loop waits for, which seals, fetches and loose uploads run. Does not own: decisions about a checkpoint
//! (`decide`, protocol), its versions' jobs (`advance`), the jobs' bodies (`jobs`).

use crate::node::away::{Away, Cause};
use crate::node::backlog::Backlog;
use crate::node::book::is_damage;
use crate::node::decide::Action;
use crate::node::due::Due;
use crate::node::file_jobs::FileJobs;
use crate::node::flush::Flushes;
use crate::node::full::Full;
use crate::node::gc::Gc;
use crate::node::generations::Generations;
use crate::node::jobs::{self, Done};
use crate::node::ledger::{Contents, Ledger};
use crate::node::looks::Looks;
use crate::node::loose::UploadsInFlight;
use crate::node::metric::SaidLater;
use crate::node::recover::{Knows, NotBelieved, Recovered};
use crate::node::rights::Rights;
use crate::node::scrub::Scrub;
use crate::node::tree::TreeState;
use crate::node::visibility::Visibility;
use crate::node::{Shared, decide, pressure, rescue};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tidemark_namespace::{NodeId, ROOT};
use tidemark_protocol::checkpoint::CheckpointEvent;
use tidemark_protocol::recognise::{CheckpointId, Rules};
use tidemark_protocol::replication::Priority;
use tidemark_protocol::report::{EventLevel, path_text};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Questions that wait for the loop. Each comes from a request, which the server bounds; more only wait longer.
pub const QUESTIONS_MAX: usize = 64;

/// Interval at which the loop checks what only time changes: settling, retries, mapped files.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// The first pause after a failure that may pass, doubled up to the longest.
const RETRY_FIRST: Duration = Duration::from_millis(200);
pub(crate) const RETRY_LONGEST: Duration = Duration::from_secs(30);
/// The longest pause while a caller waits for the result.
pub(crate) const RETRY_URGENT: Duration = Duration::from_secs(1);

/// Pause between two looks at what changed: a burst of small files is one look, not one each, and the threads that answer the burst keep
/// their CPUs. A seal begins so much later at most.
const DIRTY_PAUSE: Duration = Duration::from_millis(5);

type Question = Box<dyn FnOnce(&mut Engine) + Send>;

/// Parts from which a node starts.
#[derive(Debug)]
pub struct NodeParts {
    pub shared: Arc<Shared>,
    pub rules: Rules,
    pub recovered: Recovered,
}

/// A running node loop. Dropping it does not stop the loop; [`Node::stop`] does.
#[derive(Debug)]
pub struct Node {
    shared: Arc<Shared>,
    questions: mpsc::Sender<Question>,
    turning: tokio::task::AbortHandle,
    stop: Arc<AtomicBool>,
}

/// State that the loop owns.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) shared: Arc<Shared>,
    pub(crate) ledger: Ledger,
    pub(crate) jobs: JoinSet<Done>,
    pub(crate) flushes: Flushes,
    pub(crate) tree: TreeState,
    pub(crate) scrub: Scrub,
    pub(crate) gc: Gc,
    pub(crate) generations: Generations,
    pub(crate) said_later: SaidLater,
    pub(crate) visibility: Visibility,
    pub(crate) full: Full,
    /// Books whose candidate no version covers. Time alone may change them, so each is examined again.
    pub(crate) unsettled: BTreeSet<CheckpointId>,
    looks: Looks,
    pub(crate) backlog: Backlog,
    pub(crate) file_jobs: FileJobs,
    /// Checkpoints about which other nodes are asked, with the contents that were whole when all nodes had answered.
    hearing: BTreeMap<CheckpointId, Option<Contents>>,
    pub(crate) loose_in_flight: UploadsInFlight,
    /// Operations that Tier-3 does not take now.
    pub(crate) tier3_away: Away,
    pub(crate) rights: Rights,
    pub(crate) passed_over: Vec<NotBelieved>,
    last_tick: Instant,
}

impl Node {
    /// Starts the loop on the current runtime.
    #[must_use]
    pub fn start(parts: NodeParts) -> Self {
        let NodeParts { shared, rules, recovered } = parts;
        let (questions, asked) = mpsc::channel(QUESTIONS_MAX);
        let stop = Arc::new(AtomicBool::new(false));
        let sizes = Arc::clone(&shared.sizes);
        shared.namespace.set_prediction(Box::new(move |path| sizes.predict(path)));
        let reclaimer = (Arc::clone(&shared), Arc::clone(&stop));
        std::thread::Builder::new()
            .name("reclaim".to_owned())
            .spawn(move || pressure::run(&reclaimer.0, &reclaimer.1))
            .expect("a thread can be started when the daemon starts");
        let engine = Engine::new(Arc::clone(&shared), rules, recovered);
        let turning = tokio::spawn(run(engine, asked)).abort_handle();
        Self { shared, questions, turning, stop }
    }

    #[must_use]
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Asks the loop something, between two of its events. `None` when it has stopped.
    pub(crate) async fn ask<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Engine) -> R + Send + 'static,
    ) -> Option<R> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let question: Question = Box::new(move |engine| {
            // The caller waits no more, so nothing needs the answer.
            let _ = answer.send(f(engine));
        });
        self.questions.send(question).await.ok()?;
        answered.await.ok()
    }

    /// Resolves when the loop has come to this question, which says that it turns, or has stopped.
    pub async fn turns(&self) {
        let _ = self.ask(|_| ()).await;
    }

    /// Makes this node the coordinator: from now on it decides about what its tree and `recovered` hold.
    pub async fn decide_from_now_on(&self, recovered: Recovered) {
        // A loop that has stopped decides nothing.
        let _ = self.ask(|engine| engine.decide_from_now_on(recovered)).await;
    }

    /// Records why Tier-3 is not recovered yet. The record ends when the node gets the [`Recovered`] of a Tier-3 that is.
    pub async fn tier3_is_not_taken_up(&self, why: String) {
        let failed = |engine: &mut Engine| engine.tier3_away.failed(Cause::TakingUp, Instant::now(), why);
        // A loop that has stopped reports nothing.
        let _ = self.ask(failed).await;
    }

    /// Makes this node forget what it knew of checkpoints, because another node is the coordinator, or is about to be.
    pub async fn decide_no_more(&self) {
        // A loop that has stopped decides nothing either.
        let _ = self.ask(|engine| engine.decide_no_more()).await;
    }

    /// Stops all decisions here, because another coordinator took over. Content in memory is served as before.
    pub async fn fence(&self, why: String) {
        // A loop that has stopped decides nothing either.
        let _ = self.ask(|engine| engine.rights.fenced = Some(why)).await;
    }

    /// Ends the loop once the current event is done. Running jobs are dropped: a later start finds what they wrote.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.turning.abort();
    }
}

async fn run(mut engine: Engine, mut asked: mpsc::Receiver<Question>) {
    let namespace = Arc::clone(&engine.shared.namespace);
    let mut next_look = Instant::now();
    loop {
        let pause = engine.pause(Instant::now());
        let dirty = async {
            if Instant::now() < next_look {
                tokio::time::sleep_until(next_look).await;
            }
            namespace.dirty().await;
        };
        tokio::select! {
            () = dirty => {
                engine.shared.catch_up(&mut engine.ledger);
                next_look = Instant::now() + DIRTY_PAUSE;
            }
            Some(done) = engine.jobs.join_next(), if !engine.jobs.is_empty() => {
                match done {
                    Ok(done) => engine.apply(done),
                    // The runtime ends, and this loop with it.
                    Err(error) if error.is_cancelled() => return,
                    Err(error) => panic!("a job does not panic: {error}"),
                }
            }
            Some(question) = asked.recv() => {
                // The caller has seen everything that was done before its question.
                engine.shared.catch_up(&mut engine.ledger);
                engine.ledger.regroup(Instant::now());
                question(&mut engine);
            }
            () = tokio::time::sleep(pause) => {}
        }
        engine.step(Instant::now());
    }
}

impl Shared {
    /// Files that changed are copied to other nodes.
    pub(crate) fn copy_to_peers(&self, nodes: &[NodeId]) {
        if let Some(replicator) = self.replicator.get() {
            nodes.iter().for_each(|node| replicator.look_at_node(*node, Priority::Base));
        }
    }

    pub(crate) fn event_of(&self, level: EventLevel, kind: &str, id: &CheckpointId, what: String) {
        let path = tidemark_protocol::key::checkpoint_path(&id.run, &id.directory);
        let path = path_text(&path);
        self.events.add(self.now_ns(), level, kind, Some(path), what);
    }
}

impl Engine {
    fn new(shared: Arc<Shared>, rules: Rules, recovered: Recovered) -> Self {
        let now = Instant::now();
        let mut ledger = Ledger::new(rules);
        ledger.books = recovered.books;
        ledger.removed_loose = recovered.loose;
        ledger.loose_numbers = recovered.loose_numbers;
        let generations = Generations::after_start(ledger.removed_loose.iter());
        let rights = Rights::new(recovered.knows, shared.settings.torn.hide);
        let mut engine = Self {
            flushes: Flushes::default(),
            tree: TreeState::new(recovered.tree_number, recovered.removals),
            scrub: Scrub::new(now),
            gc: Gc::new(recovered.pins, recovered.unshown, now),
            generations,
            said_later: SaidLater::of(recovered.metrics),
            visibility: Visibility::default(),
            full: Full::default(),
            shared,
            ledger,
            jobs: JoinSet::new(),
            unsettled: BTreeSet::new(),
            looks: Looks::default(),
            backlog: Backlog::default(),
            file_jobs: FileJobs::default(),
            hearing: BTreeMap::new(),
            loose_in_flight: UploadsInFlight::default(),
            tier3_away: Away::default(),
            rights,
            passed_over: recovered.passed_over,
            last_tick: now,
        };
        let runs: BTreeSet<_> = engine.ledger.books.keys().map(|id| id.run.clone()).collect();
        for run in runs {
            engine.shared.classify_run(&engine.ledger, &run);
        }
        engine.shielding().hide_kept(recovered.names);
        engine.shielding().trackers().follow_unreadable(recovered.names);
        engine.sifting().removals_stand(&BTreeMap::new());
        engine
    }

    /// Returns how long the loop may wait for an event.
    fn pause(&self, now: Instant) -> Duration {
        let tick = TICK.saturating_sub(now.saturating_duration_since(self.last_tick));
        let looks = self.looks.wait(now).filter(|_| !self.ledger.due.is_empty());
        let next = self.ledger.next_regroup(now).into_iter().chain(looks).fold(tick, Duration::min);
        next.max(Duration::from_millis(1))
    }

    /// Runs one step of a node that does not decide: seals closed files, and looks after its bytes.
    fn step_of_member(&mut self, now: Instant) {
        self.ledger.regroup(now);
        self.ledger.due.clear();
        self.ledger.loose_due = Due::new();
        if now.saturating_duration_since(self.last_tick) >= TICK {
            self.last_tick = now;
            self.measure();
            self.watch_room(now);
            self.shared.namespace.writers().forget_ended_writers();
            self.ledger.seals_again();
            let _ = self.shared.namespace.writers().take_removers();
        }
        self.file_jobs.start_seals(&self.shared, &mut self.ledger, &mut self.jobs);
        self.scrub.start(&self.shared, &self.ledger, &mut self.jobs, self.rights.draining, now);
    }

    /// Forgets what this node knew of checkpoints. Running jobs are dropped. The next coordinator finds what they wrote, and
    /// continues with what this one decided.
    fn decide_no_more(&mut self) {
        self.jobs.abort_all();
        let rules = self.ledger.rules().clone();
        let mut fresh = Self::new(Arc::clone(&self.shared), rules, Recovered::default());
        fresh.rights.end_as(&self.rights);
        *self = fresh;
        self.ledger.refresh(&self.shared.namespace, &[ROOT]);
    }

    /// Makes this node decide from now on: it examines everything again.
    pub(crate) fn decide_from_now_on(&mut self, recovered: Recovered) {
        let rules = self.ledger.rules().clone();
        let mut fresh = Self::new(Arc::clone(&self.shared), rules, recovered);
        fresh.jobs = std::mem::take(&mut self.jobs);
        fresh.file_jobs = std::mem::take(&mut self.file_jobs);
        fresh.keep_words(self);
        // It is about bytes in memory and in Tier-3, and says nothing of what is committed there.
        std::mem::swap(&mut fresh.scrub, &mut self.scrub);
        fresh.rights.end_as(&self.rights);
        if fresh.rights.knows != Knows::All {
            fresh.tier3_away = std::mem::take(&mut self.tier3_away);
        }
        *self = fresh;
        self.ledger.refresh(&self.shared.namespace, &[ROOT]);
    }

    /// Does everything that is due, after whatever happened.
    fn step(&mut self, now: Instant) {
        if self.rights.knows == Knows::Nothing || !self.shared.decides() {
            return self.step_of_member(now);
        }
        self.ledger.regroup(now);
        let tick = now.saturating_duration_since(self.last_tick) >= TICK;
        if tick {
            self.last_tick = now;
            self.end_grace(now);
            self.ledger.due.extend(self.unsettled.iter().cloned());
            self.tier3_away.forget_settled(&self.ledger);
            self.measure();
            self.watch_room(now);
            self.shared.namespace.writers().forget_ended_writers();
            self.ledger.seals_again();
            self.shielding().look_at_all(now);
        }
        self.file_jobs.start_seals(&self.shared, &mut self.ledger, &mut self.jobs);
        // Before Tier-3 is read nothing is decided with it; and what is heard would be forgotten with what is known now.
        if self.rights.knows == Knows::All {
            self.shielding().hear_who_changed_names();
        }
        // A caller that waits is answered from what was judged.
        if self.looks.may_begin(now) || self.rights.draining || !self.flushes.is_empty() {
            let begun = Instant::now();
            for id in std::mem::take(&mut self.ledger.due) {
                self.look_at(&id);
            }
            self.looks.took(begun.elapsed(), Instant::now());
        }
        if tick {
            self.shielding().undo_removals(now);
        }
        self.loose_uploads().start(now);
        self.versions().end_pauses(now);
        self.versions().give_turns();
        self.write_tree(now);
        self.scrub.start(&self.shared, &self.ledger, &mut self.jobs, self.rights.draining, now);
        self.retiring().collect(now);
        self.sifting().sift(now);
        self.answer_flushes(now);
        if cfg!(debug_assertions) {
            self.backlog.check_invariants(&self.ledger);
        }
    }

    pub(crate) fn look_at(&mut self, id: &CheckpointId) {
        if !self.ledger.books.contains_key(id) || self.ledger.puts_off(id) {
            return;
        }
        self.shielding().note_removal(id);
        if self.saves().is_stood_in(id) {
            // The last conclusion was about content that is hidden now.
            let book = self.ledger.books.get_mut(id).expect("it was there a moment ago");
            book.verdict = None;
            book.apart.clear();
            self.unsettled.remove(id);
            return;
        }
        self.said_later.note_metric(&self.shared, &mut self.ledger, id);
        if self.rights.draining || self.rescues().stays_torn(id) {
            rescue::seal_what_was_cut(&self.shared, &mut self.ledger, id);
        }
        let book = &self.ledger.books[id];
        let told = self
            .flushes
            .told(|place| self.by_path().is_about(place, book), || self.by_path().last_closed_ns(book));
        let told = told.max(book.told(&self.ledger));
        let mut outcome = decide::look(&self.shared, &self.ledger, book, told);
        if matches!(outcome.action, Action::None)
            && let Some(why) = self.rescues().why_in_part(id, outcome.verdict.as_ref(), told)
        {
            let concluded = (outcome.verdict.as_ref(), &outcome.apart);
            let trainer = || {
                book.candidate
                    .as_ref()
                    .is_some_and(|candidate| self.sessions().is_of_a_trainer(id, candidate))
            };
            let plan = rescue::plan(&self.shared, &self.ledger, book, concluded, why, trainer);
            outcome.action = plan.map_or(Action::None, Action::Start);
        }
        let (torn_before, kept_before) = (book.is_torn(), book.is_kept_without_proof());
        let decides = !matches!(outcome.action, Action::None | Action::Fetch(_) | Action::Judge(_))
            || !torn_before && outcome.verdict.as_ref().is_some_and(is_damage);
        if decides && self.shared.had_not_heard_of(&mut self.ledger, id) {
            self.unsettled.insert(id.clone());
            return;
        }
        let book = self.ledger.books.get_mut(id).expect("it was there a moment ago");
        if outcome.unsettled {
            self.unsettled.insert(id.clone());
        } else {
            self.unsettled.remove(id);
        }
        book.indices.extend(outcome.indices);
        book.verdict = outcome.verdict;
        book.apart = outcome.apart;
        let book = &self.ledger.books[id];
        let why = || decide::waits_for(book);
        if book.is_torn() && !torn_before {
            self.shared.metrics.torn_versions.inc();
            self.shared.event_of(EventLevel::Warn, "torn", id, why());
        } else if book.is_kept_without_proof() && !kept_before {
            self.shared.event_of(
                EventLevel::Warn,
                "incomplete",
                id,
                format!("it stays, and is not committed: {}", why()),
            );
        }
        match outcome.action {
            Action::None => {}
            Action::Accept(node) => {
                // An index proved a cut file's exact size.
                self.shared.namespace.seals().accept_cut(node);
            }
            Action::SealAsTheyAre(nodes) => self.ledger.seal_as_they_are(&nodes),
            // Tier-3's content is not known yet, and may include all of it.
            Action::Fetch(_) if self.rights.knows == Knows::Names => {}
            Action::Fetch(node) => self.file_jobs.fetch(&self.shared, &mut self.jobs, node),
            Action::Judge(nodes) => self.file_jobs.judge(&self.shared, &mut self.jobs, nodes),
            // Looked at again with the next tick.
            Action::Start(_) if self.versions().is_held_up(id, Instant::now()) => {
                self.unsettled.insert(id.clone());
            }
            Action::Start(plan) => {
                if self.has_heard_others(id, &plan.contents) {
                    self.versions().start(id, *plan);
                }
            }
            Action::Raise { number, evidence, detail } => {
                self.shared.event_of(EventLevel::Info, "complete", id, detail.clone());
                self.versions().happens(id, number, CheckpointEvent::Proven { evidence, detail });
            }
        }
        if self.ledger.books[id].is_torn() {
            self.shielding().shield(id, Instant::now());
        } else if self.ledger.books[id].is_kept_without_proof() {
            self.shielding().trackers().follow_lacking(id, Instant::now());
        }
    }

    /// Whether no other node can know more of a checkpoint that is whole with these contents. If that is not known, asks the other
    /// nodes.
    fn has_heard_others(&mut self, id: &CheckpointId, contents: &Contents) -> bool {
        if self.shared.cluster.get().is_none() {
            return true;
        }
        match self.hearing.get(id) {
            Some(Some(heard)) if heard == contents => {
                self.hearing.remove(id);
                return true;
            }
            Some(None) => return false,
            Some(Some(_)) | None => {}
        }
        self.hearing.insert(id.clone(), None);
        let path = self.ledger.books[id].path();
        self.jobs.spawn(jobs::hear(Arc::clone(&self.shared), id.clone(), path, contents.clone()));
        false
    }

    pub(crate) fn others_heard(&mut self, id: CheckpointId, contents: Contents, heard: bool) {
        if heard {
            self.hearing.insert(id.clone(), Some(contents));
        } else {
            self.hearing.remove(&id);
        }
        if self.ledger.books.contains_key(&id) {
            self.ledger.due.insert(id);
        } else {
            self.hearing.remove(&id);
        }
    }

    fn measure(&self) {
        let usage = self.shared.tier1.usage();
        let gauge = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let metrics = &self.shared.metrics;
        metrics.tier1_used_bytes.set(gauge(usage.used_bytes));
        metrics.tier1_size_bytes.set(gauge(usage.size_bytes));
        metrics.tier1_warm_ratios.set(usage.warm_fraction());
        if let Some(spill) = self.shared.tier1.spill_usage() {
            metrics.spill_used_bytes.set(gauge(spill.used_bytes));
            metrics.spill_size_bytes.set(gauge(spill.size_bytes));
        }
        let lag = self.backlog.lag(&self.ledger, self.shared.now_ns(), None);
        metrics.lag_versions.set(gauge(lag.versions));
        metrics.lag_bytes.set(gauge(lag.bytes));
        metrics.lag_seconds.set(lag.seconds);
    }
}

/// Returns how long to wait after so many failures that may pass.
pub(crate) fn retry_pause(tries: u32, longest: Duration) -> Duration {
    // Ten doublings are beyond the longest pause already.
    (RETRY_FIRST * 2_u32.saturating_pow(tries.min(10))).min(longest)
}

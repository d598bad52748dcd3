//! A start of a daemon, as far as Tier-3 sees it: it raises the epoch, recovers, saves, proves and retires versions.
//!
//! Owns: which of the engine's own functions are called when, and what must be true of their answers. Does not own:
//! the functions; when one of their requests happens (`world`). The node loop, its threads and its clocks are left out:
//! the seed decides in their place, and the states of a version are the rules' own (`protocol::checkpoint`).

use super::audit::{is_retired, marker};
use super::chaos::Rng;
use super::tally::Seen;
use super::wire::{Call, Wire};
use super::world::World;
use crate::chunk::{self, SealSums};
use crate::metrics::Metrics;
use crate::node::book::{Book, Number, VersionBook, reference};
use crate::node::recover::NotBelieved;
use crate::node::{Events, Names, Recovered, Shared, recover};
use crate::restore::Restorer;
use crate::restore::peer::Nearby;
use crate::save::commit::{self, Attempt, AttemptFile, CommitError};
use crate::save::drain::Drain;
use crate::settings::Settings;
use bytes::Bytes;
use futures::future;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tidemark_namespace::{Caller, Clock, Namespace, NamespaceSettings, ROOT, SealPin};
use tidemark_protocol::checkpoint::{Checkpoint, CheckpointCommand, CheckpointEvent};
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::format::FORMAT;
use tidemark_protocol::id::{AttemptId, Epoch, FileId, Incarnation, SealNumber, Step};
use tidemark_protocol::invariants;
use tidemark_protocol::key::{NodeLife, VersionId};
use tidemark_protocol::lineage::{order, watermark};
use tidemark_protocol::manifest::{Attributes, Manifest};
use tidemark_protocol::path::{CheckpointName, RelPath, RunPath};
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::record::{Evidence, Record, RecordFile};
use tidemark_protocol::retention::{Committed, Keep, Metric, Policy, Standing, retain};
use tidemark_store::{Probe, Store, UploadLimits, raise_epoch};
use tidemark_tier1::Tier1;

/// Two checkpoints of one run: few, so that two starts want the same number.
const CHECKPOINTS: [&str; 2] = ["a", "b"];
const FILES_MAX: u64 = 2;
const FILE_BYTES_MAX: u64 = 24;
/// Tries of an operation that fails, after which the start ends without it.
const TRIES_MAX: u32 = 5;
/// Size of a start's journal, for some hundred changes of names and files. Small, because every start has its own.
const JOURNAL_BYTES: u64 = 64 << 10;
const O_RDWR: i32 = 2;

/// Amount of work of one start.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work {
    pub(super) saves: u64,
    pub(super) looks: u64,
}

/// A start of a daemon.
#[derive(Debug)]
pub(super) struct Life {
    world: Arc<World>,
    start: u64,
    wire: Arc<Wire>,
    shared: Arc<Shared>,
    pub(super) books: RefCell<BTreeMap<CheckpointId, Book>>,
    rng: RefCell<Rng>,
    files: Cell<u64>,
    fenced: Cell<bool>,
}

impl Life {
    pub(super) fn new(world: &Arc<World>, tier1: &Arc<Tier1>, start: u64, rng: Rng) -> Self {
        let wire = Arc::new(Wire { world: Arc::clone(world), start });
        let shared = shared(Arc::clone(&wire) as Arc<dyn Store>, tier1, start);
        let (world, books, files) = (Arc::clone(world), RefCell::default(), Cell::new(0));
        Self { world, start, wire, shared, books, rng: RefCell::new(rng), files, fenced: Cell::new(false) }
    }

    /// Runs the start from its first request to its last. A failure for good ends it, as it ends a daemon.
    pub(super) async fn run(&self, work: Work) {
        if !self.begin().await {
            return;
        }
        let saver = async {
            for _ in 0..work.saves {
                if self.fenced.get() {
                    return;
                }
                self.save().await;
                self.rest().await;
            }
        };
        let other_saver = async {
            self.prove_settled().await;
            for _ in 0..work.saves / 2 {
                if self.fenced.get() {
                    return;
                }
                self.save().await;
            }
        };
        future::join3(saver, other_saver, self.retain(work.looks)).await;
    }

    /// Fences older starts, and recovers. Returns whether the start may go on.
    pub(super) async fn begin(&self) -> bool {
        match raise_epoch(self.wire.as_ref(), Epoch(self.start)).await {
            Ok(highest) if highest <= Epoch(self.start) => {}
            Ok(_) => return self.stop(),
            Err(_) => return false,
        }
        let standing = self.world.with(|state| {
            state.audit.reading_begins(&state.bucket, self.start);
            state.audit.standing(&state.bucket)
        });
        let recovered = recover(&self.shared, Names::Empty).await;
        self.world.with(|state| state.audit.reading_ended(self.start));
        match recovered {
            Ok(Recovered { books, passed_over, .. }) => {
                self.world.note(self.start, "has recovered");
                self.knows_what_stands(&standing, &books, &passed_over);
                *self.books.borrow_mut() = books;
                true
            }
            Err(error) => {
                self.world.note(self.start, format_args!("cannot start: {error}"));
                false
            }
        }
    }

    /// Checks that a recovery knows every version that stood when it began and still stands, and that no version stands that it takes for
    /// aborted.
    fn knows_what_stands(
        &self,
        before: &std::collections::BTreeSet<VersionId>,
        books: &BTreeMap<CheckpointId, Book>,
        passed_over: &[NotBelieved],
    ) {
        self.world.with(|state| {
            let standing = state.audit.standing(&state.bucket);
            let version_of = |version: &VersionId| {
                let id = CheckpointId { run: version.run.clone(), directory: version.directory.clone() };
                books.get(&id)?.versions.get(&(version.timeline, version.version))
            };
            for version in before.intersection(&standing) {
                let known = version_of(version).is_some_and(|known| known.checkpoint.is_committed());
                assert!(
                    known,
                    "{version} stood when start {} began to recover, and it does not know",
                    self.start
                );
            }
            for version in books.values().flat_map(|book| book.versions.values()) {
                let id = &version.record().version;
                let decision = marker(&state.bucket, id);
                invariants::a_committed_version_has_its_marker(&version.checkpoint, decision.as_ref())
                    .unwrap();
                let dead = version.checkpoint.is_aborted() && standing.contains(id);
                assert!(!dead, "{id} stands, and start {} takes it for dead", self.start);
            }
            assert!(passed_over.is_empty(), "start {} does not believe {passed_over:?}", self.start);
        });
    }

    /// Saves a checkpoint: its bytes, its record, and the steps up to its marker.
    async fn save(&self) {
        let (id, number, todo) = self.plan();
        self.advance(&id, number, todo).await;
    }

    fn plan(&self) -> (CheckpointId, Number, Vec<CheckpointCommand>) {
        let mut rng = self.rng.borrow_mut();
        let run = RunPath::new(RelPath::new("r").unwrap()).unwrap();
        let name = rng.pick(&CHECKPOINTS);
        let directory = CheckpointName::new(name).unwrap();
        let id = CheckpointId { run, directory };
        let mut books = self.books.borrow_mut();
        let previous = watermark(books.values().flat_map(Book::checkpoints)).map(reference);
        let book = books.entry(id.clone()).or_insert_with(|| Book::new(id.clone()));
        let number = book.next_number();
        let mut files = Vec::new();
        let mut saved = BTreeMap::new();
        for index in 0..=rng.below(FILES_MAX) {
            let length = usize::try_from(rng.below(FILE_BYTES_MAX)).unwrap();
            let bytes: Bytes = (0..length).map(|_| rng.next().to_le_bytes()[0]).collect();
            let path = RelPath::new(format!("r/{name}/{index}")).unwrap();
            files.push(self.sealed(path.clone(), &bytes));
            saved.insert(path, bytes);
        }
        let proven = rng.permille(700);
        let (evidence, detail) =
            if proven { (Evidence::Index, "an index") } else { (Evidence::Quiescence, "quiet") };
        let record = Record {
            format: FORMAT,
            version: book.version_id(number),
            attempt: AttemptId(rng.next()),
            step: Some(Step(rng.below(9))),
            framework: "torch_save".to_owned(),
            evidence,
            evidence_detail: detail.to_owned(),
            epoch: Epoch(self.start),
            completed_at_ns: self.world.now_ns(),
            participants: vec![self.shared.drain.life.clone()],
            files: files.iter().map(|file| file.entry.clone()).collect(),
            partial: false,
            doubted: false,
        };
        self.world.with(|state| state.audit.save(&record, saved));
        let mut todo = Vec::new();
        let checkpoint = Checkpoint::recorded(record.clone(), &mut todo);
        let mut version = VersionBook::new(checkpoint, BTreeMap::new());
        version.attempt = Some(Box::new(Attempt::new(record, files, previous)));
        book.versions.insert(number, version);
        drop(books);
        if proven {
            self.tell_older(&id, number, &CheckpointEvent::Superseded);
        }
        (id, number, todo)
    }

    /// Puts bytes into Tier-1 under a seal, as a program's save leaves them.
    fn sealed(&self, path: RelPath, bytes: &[u8]) -> AttemptFile {
        let namespace = &self.shared.namespace;
        let caller = Caller { uid: 0, gid: 0, pid: 0, now_ns: 0, request: 0 };
        let name = format!("saved-{}", self.files.replace(self.files.get() + 1));
        let (_, file) = namespace.create(&caller, ROOT, name.as_bytes(), 0o644, O_RDWR).unwrap();
        assert_eq!(file.backing.write_at(bytes, 0).unwrap(), bytes.len());
        namespace.handles().flush(file.fh, &caller, false).unwrap();
        namespace.handles().release(file.fh).unwrap();
        let ticket =
            namespace.seals().begin_seal(namespace.nodes().node_at(name.as_bytes()).unwrap()).unwrap();
        let SealSums { crc, chunks } = chunk::hash(bytes, 1);
        namespace.seals().finish_seal(&ticket, crc, Arc::clone(&chunks)).unwrap();
        let (file, seal): (FileId, SealNumber) = (ticket.file, ticket.seal);
        let pin: SealPin = namespace.seals().pin_seal(file, seal).unwrap();
        let entry = RecordFile { path, file, seal, size_bytes: bytes.len() as u64, crc64nvme: crc };
        AttemptFile { entry, attributes: Attributes::default(), chunks, pin: Some(Arc::new(pin)) }
    }

    /// Brings evidence for some versions of this start or an earlier one that were only settled.
    async fn prove_settled(&self) {
        let settled: Vec<(CheckpointId, Number)> = {
            let books = self.books.borrow();
            let all = books
                .values()
                .flat_map(|book| book.versions.iter().map(move |(number, version)| (book, *number, version)));
            let settled = all.filter(|(_, _, version)| {
                version.checkpoint.is_alive() && !version.checkpoint.is_proven() && version.attempt.is_some()
            });
            settled.map(|(book, number, _)| (book.id.clone(), number)).collect()
        };
        for (id, number) in settled {
            if !self.rng.borrow_mut().permille(500) {
                continue;
            }
            if self.is_alive(&id, number) && !self.fenced.get() {
                let detail = format!("start {} was told", self.start);
                let todo =
                    self.step(&id, number, CheckpointEvent::Proven { evidence: Evidence::Told, detail });
                self.advance(&id, number, todo).await;
            }
        }
    }

    /// Carries out the rules' commands for one version, until there are no more or this start gives up.
    async fn advance(&self, id: &CheckpointId, number: Number, todo: Vec<CheckpointCommand>) {
        let mut todo = VecDeque::from(todo);
        let mut tries = 0;
        while let Some(command) = todo.pop_front() {
            match command {
                CheckpointCommand::Enqueue => todo.extend(self.step(id, number, CheckpointEvent::TurnCame)),
                CheckpointCommand::Prepare => {
                    let mut attempt = self.take(id, number);
                    let result = attempt.prepare(&self.shared.drain).await;
                    self.give_back(id, number, attempt);
                    let event = match result {
                        Ok(()) => CheckpointEvent::Prepared,
                        Err(error) => self.failed(&error),
                    };
                    todo.extend(self.step(id, number, event));
                }
                CheckpointCommand::Decide => {
                    let event = self.decide(id, number).await;
                    todo.extend(self.step(id, number, event));
                }
                CheckpointCommand::Pause => {
                    tries += 1;
                    if tries > TRIES_MAX || self.fenced.get() {
                        return;
                    }
                    self.rest().await;
                    if !self.is_alive(id, number) {
                        return;
                    }
                    todo.extend(self.step(id, number, CheckpointEvent::PauseOver));
                }
                CheckpointCommand::Publish => self.tell_older(id, number, &CheckpointEvent::Overtaken),
                CheckpointCommand::Release => self.release(id, number),
                CheckpointCommand::LookAgain => {}
            }
        }
    }

    /// Runs phase 2 of a version, and checks that its answer is true.
    async fn decide(&self, id: &CheckpointId, number: Number) -> CheckpointEvent {
        let mut attempt = self.take(id, number);
        let (evidence, detail) = {
            let books = self.books.borrow();
            let (evidence, detail) = books[id].versions[&number].checkpoint.evidence();
            (evidence, detail.to_owned())
        };
        attempt.raise(evidence, &detail);
        let superseded = self.is_superseded();
        let result = attempt.commit(&self.shared.drain).await;
        assert!(!superseded || result.is_err(), "start {} was superseded, and decided", self.start);
        let version = attempt.record.version.clone();
        let wanted = attempt.manifest().unwrap().encode_named().unwrap().1;
        let found = self.world.with(|state| marker(&state.bucket, &version));
        let ours = (attempt.record.attempt, Some(wanted));
        let is_ours = found.as_ref().is_some_and(|found| (found.attempt, found.manifest_hash) == ours);
        self.give_back(id, number, attempt);
        match result {
            Ok(manifest) => {
                assert!(is_ours, "start {} was told that {version} is committed, and it is not", self.start);
                self.version(id, number, |version| {
                    version.committed = Some((Arc::new(manifest), Epoch(self.start)));
                });
                CheckpointEvent::Committed
            }
            Err(error) => {
                let lost = matches!(error, CommitError::Lost { .. });
                let is_theirs = found.is_some() && !is_ours;
                assert!(
                    !lost || is_theirs,
                    "start {} was told that {version} is another's, and it is not",
                    self.start
                );
                self.failed(&error)
            }
        }
    }

    /// Returns the event that an error of a job is to the rules, as in the node loop.
    fn failed(&self, error: &CommitError) -> CheckpointEvent {
        self.world.note(self.start, format_args!("was told: {error}"));
        match (error.kind(), error) {
            (_, error) if error.ends_the_attempt() => {
                CheckpointEvent::DecidedOtherwise { why: error.to_string() }
            }
            (ErrorKind::Corrupt, _) => panic!("nothing damages anything here: {error}"),
            (ErrorKind::Fenced, _) => {
                self.stop();
                CheckpointEvent::Interrupted
            }
            _ => CheckpointEvent::Interrupted,
        }
    }

    /// Retires versions that retention lets go of, one at a time.
    async fn retain(&self, looks: u64) {
        for _ in 0..looks {
            self.rest().await;
            if self.fenced.get() {
                return;
            }
            let Some((id, number, manifest, leave)) = self.let_go() else { continue };
            let superseded = self.is_superseded();
            let result = commit::retire(&self.shared.drain, &manifest, &leave, self.world.now_ns()).await;
            assert!(!superseded || result.is_err(), "start {} was superseded, and gave up", self.start);
            match result {
                Ok(()) => {
                    let version = &manifest.version;
                    let retired = self.world.with(|state| is_retired(&state.bucket, version));
                    assert!(
                        retired,
                        "start {} was told that {version} is given up, and it is not",
                        self.start
                    );
                    let why = leave.reason().to_owned();
                    let todo = self.step(&id, number, CheckpointEvent::GivenUp { why });
                    assert_eq!(todo, [CheckpointCommand::Release]);
                    self.version(&id, number, |version| version.committed = None);
                }
                Err(error) => drop(self.failed(&error)),
            }
        }
    }

    /// Returns the first version that may be retired, by everything that this start knows.
    fn let_go(
        &self,
    ) -> Option<(CheckpointId, Number, Arc<Manifest>, tidemark_protocol::retention::Retirement)> {
        let books = self.books.borrow();
        let all = books
            .values()
            .flat_map(|book| book.versions.iter().map(move |(number, version)| (book, *number, version)));
        let mut committed: Vec<_> = all.filter(|(_, _, version)| version.checkpoint.is_committed()).collect();
        committed.sort_by(|a, b| order(a.2.record()).cmp(&order(b.2.record())));
        let rows: Vec<Committed> = committed.iter().map(|(_, _, version)| row(version.record())).collect();
        let policy = Policy { keep_last: Some(1), ..Policy::default() };
        let keeps = retain(&policy, &rows, 0);
        assert_eq!(invariants::the_newest_verified_versions_are_kept(&rows, &keeps), Ok(()));
        committed.into_iter().zip(keeps).find_map(|((book, number, version), keep)| match keep {
            Keep::Retired(leave) => Some((book.id.clone(), number, Arc::clone(version.manifest()?), leave)),
            Keep::Kept { .. } => None,
        })
    }

    /// Lets other starts go on.
    async fn rest(&self) {
        // The request asks nothing, so its answer does not matter.
        let _ = self.wire.ask(Call::Rest).await;
    }

    fn stop(&self) -> bool {
        if !self.fenced.replace(true) {
            self.world.with(|state| state.tally.count(Seen::FencedStart));
            self.world.note(self.start, "is fenced");
        }
        false
    }

    fn is_superseded(&self) -> bool {
        self.world.with(|state| state.audit.epoch > self.start)
    }

    /// Whether the version is alive: no newer one took its place meanwhile.
    fn is_alive(&self, id: &CheckpointId, number: Number) -> bool {
        self.version(id, number, |version| version.checkpoint.is_alive())
    }

    fn step(&self, id: &CheckpointId, number: Number, event: CheckpointEvent) -> Vec<CheckpointCommand> {
        let mut todo = Vec::new();
        self.version(id, number, |version| version.checkpoint.step(event, &mut todo)).unwrap();
        todo
    }

    fn tell_older(&self, id: &CheckpointId, newer: Number, event: &CheckpointEvent) {
        let older: Vec<Number> = {
            let books = self.books.borrow();
            let older = books[id].versions.range(..newer);
            older.filter(|(_, version)| version.checkpoint.is_alive()).map(|(number, _)| *number).collect()
        };
        for number in older {
            for command in self.step(id, number, event.clone()) {
                assert_eq!(command, CheckpointCommand::Release, "what is overtaken is let go");
                self.release(id, number);
            }
        }
    }

    fn release(&self, id: &CheckpointId, number: Number) {
        self.version(id, number, |version| version.attempt = None);
    }

    fn take(&self, id: &CheckpointId, number: Number) -> Box<Attempt> {
        self.version(id, number, |version| version.attempt.take().expect("no other job has it"))
    }

    fn give_back(&self, id: &CheckpointId, number: Number, attempt: Box<Attempt>) {
        self.version(id, number, |version| version.attempt = Some(attempt));
    }

    fn version<R>(&self, id: &CheckpointId, number: Number, f: impl FnOnce(&mut VersionBook) -> R) -> R {
        let mut books = self.books.borrow_mut();
        f(books.get_mut(id).unwrap().versions.get_mut(&number).unwrap())
    }
}

fn row(record: &Record) -> Committed {
    Committed {
        version: record.version.clone(),
        step: record.step,
        completed_at_ns: record.completed_at_ns,
        verified: true,
        pinned: false,
        held: false,
        standing: Standing::Shown,
        wished: false,
        metric: Metric::Unsaid,
    }
}

/// Returns the shared state of a start with empty memory.
pub(in crate::node) fn shared(store: Arc<dyn Store>, tier1: &Arc<Tier1>, start: u64) -> Arc<Shared> {
    let incarnation = Incarnation(start);
    let life = NodeLife { node: "n".parse().unwrap(), incarnation };
    let probe = Probe {
        fencing: true,
        fencing_reason: String::new(),
        part_checksums: true,
        part_checksums_reason: String::new(),
    };
    let metrics = Arc::new(Metrics::new());
    let names =
        NamespaceSettings { journal_bytes: Some(JOURNAL_BYTES), ..NamespaceSettings::new(incarnation) };
    let limits = UploadLimits::default();
    let namespace = Namespace::new(names, Arc::clone(tier1)).unwrap();
    let drain = Arc::new(Drain::new(store, life, Epoch(start), limits, &probe, Arc::clone(&metrics)));
    let (named, store) = (Arc::clone(&namespace), Arc::clone(&drain.store));
    let restorer = Restorer::new(named, store, Arc::clone(&metrics), 1, Nearby::alone());
    Arc::new(Shared {
        restorer,
        cluster: Default::default(),
        replicator: Default::default(),
        settings: Settings::default(),
        namespace,
        tier1: Arc::clone(tier1),
        drain,
        metrics,
        events: Events::default(),
        clock: Clock::system(),
        sizes: Arc::default(),
        seal_threads: 1,
    })
}

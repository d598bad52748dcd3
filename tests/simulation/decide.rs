//! Checkpoints: when each is complete, and its upload to Tier-3, as the engine's node loop does on the coordinator.
//!
//! Owns: the search for checkpoints in the tree, the versions of each checkpoint and their jobs, going on with what an older
//! coordinator left. Does not own: the writes (`save`), the rules (protocol).

use super::coordinator::Catalog;
use super::save::SaveError;
use super::tree::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::LazyLock;
use std::time::Duration;
use tidemark_protocol::checkpoint::{Checkpoint, CheckpointCommand, CheckpointEvent};
use tidemark_protocol::cluster::wire::{self, FileFacts, WireFate, WireState};
use tidemark_protocol::evidence::{
    Before, Facts, Fate, FileFact, SETTLE_NS, Told, Verdict, Writer, complete,
};
use tidemark_protocol::file::{FileState, Seal};
use tidemark_protocol::format::FORMAT;
use tidemark_protocol::id::{AttemptId, FileId, Incarnation, SealNumber, Timeline, Version};
use tidemark_protocol::key::{Key, NodeLife, Part, VersionId, VersionRef};
use tidemark_protocol::lineage;
use tidemark_protocol::manifest::Prepared;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{Candidate, CheckpointId, MarkerBy, Role, RuleSpec, Rules};
use tidemark_protocol::record::{Record, RecordFile};
use tidemark_protocol::visibility::Content;

const LOOK_EVERY: Duration = Duration::from_millis(200);
const PAUSE: Duration = Duration::from_secs(1);
/// Most versions in flight at once.
const IN_FLIGHT_MAX: usize = 2;

/// The job's own rule: ranks write, and one of them writes a marker after a barrier. The rule also states that each rank writes a
/// file, since a node that is lost or unreachable may have written a file that no other node knows of. Without that statement,
/// the marker alone would prove that all files are there.
static RULES: LazyLock<Rules> = LazyLock::new(|| {
    let some = |text: &str| Some(text.to_owned());
    let rule = RuleSpec {
        name: "simulated".into(),
        directory: some(r"(?-u)^step-(?<step>\d+)$"),
        signature: some(r"(?-u)^rank-\d+\.pt$"),
        each_rank: some(r"(?-u)^rank-(?<rank>\d+)\.pt$"),
        marker: some("^done$"),
        marker_by: MarkerBy::Barrier,
        ..RuleSpec::default()
    };
    Rules::with(&[rule]).expect("the rule is a good one")
});

type Contents = BTreeMap<RelPath, (FileId, SealNumber)>;

/// The coordinator's knowledge of checkpoints.
#[derive(Debug, Default)]
pub(crate) struct Books {
    books: BTreeMap<CheckpointId, BTreeMap<Version, Known>>,
    ended: BTreeSet<Incarnation>,
    queue: Vec<(CheckpointId, Version)>,
    running: usize,
}

#[derive(Debug)]
struct Known {
    checkpoint: Checkpoint,
    contents: Contents,
    prepared: Vec<Prepared>,
}

impl Books {
    /// Records that all processes of a life have ended.
    pub(crate) fn end_fates(&mut self, life: Incarnation) {
        self.ended.insert(life);
    }

    fn run(&self) -> impl Iterator<Item = &Checkpoint> + Clone {
        self.books.values().flat_map(|versions| versions.values().map(|known| &known.checkpoint))
    }
}

impl Catalog {
    /// Examines checkpoints until the term ends.
    pub(crate) async fn decide(self: Rc<Self>) {
        while !self.is_closed() {
            if !self.state.borrow().is_tier3_listed && self.recover().await.is_err() {
                self.node.world.sleep(PAUSE).await;
            }
            for candidate in self.candidates() {
                self.look_at(&candidate);
            }
            self.take_turns();
            self.node.world.sleep(LOOK_EVERY).await;
        }
    }

    /// Recovers the versions that Tier-3 has, and goes on with them.
    async fn recover(self: &Rc<Self>) -> Result<(), SaveError> {
        self.make_sure_of_epoch().await.inspect_err(|error| {
            if *error == SaveError::Fenced {
                self.close();
            }
        })?;
        let found = self.list_tier3().await?;
        for (record, marker) in found {
            let id =
                CheckpointId { run: record.version.run.clone(), directory: record.version.directory.clone() };
            let version = record.version.version;
            let contents = contents_of(&record);
            let mut todo = Vec::new();
            let checkpoint = match marker {
                Some(marker) => Checkpoint::decided(record, marker.decision),
                None => {
                    self.node.world.count("attempt taken over by a new coordinator");
                    Checkpoint::recorded(record, &mut todo)
                }
            };
            let known = Known { checkpoint, contents, prepared: Vec::new() };
            self.books.borrow_mut().books.entry(id.clone()).or_default().insert(version, known);
            self.carry(&id, version, todo);
        }
        self.state.borrow_mut().is_tier3_listed = true;
        self.watermark();
        Ok(())
    }

    fn candidates(&self) -> Vec<Candidate> {
        let tree = self.node.memory.tree.borrow();
        let files = tree.names.iter().filter(|(_, entry)| matches!(entry, Entry::File(_)));
        let paths: Vec<RelPath> = files.filter_map(|(path, _)| RelPath::new(path.clone()).ok()).collect();
        let grouping = RULES.group(&paths);
        grouping.candidates.into_iter().filter(|candidate| candidate.framework == "simulated").collect()
    }

    fn facts(&self, path: &RelPath) -> Option<FileFacts> {
        let tree = self.node.memory.tree.borrow();
        match tree.names.get(path.as_bytes())? {
            Entry::File(file) => tree.facts_of(*file),
            Entry::Directory(_) => None,
        }
    }

    fn look_at(self: &Rc<Self>, candidate: &Candidate) {
        let facts: BTreeMap<RelPath, FileFacts> =
            candidate.files.keys().filter_map(|path| Some((path.clone(), self.facts(path)?))).collect();
        let sealed = |facts: &FileFacts| {
            matches!(facts.state, WireState::Sealed { .. }).then_some((facts.file, facts.seal))
        };
        let present: Option<Contents> =
            facts.iter().map(|(path, facts)| Some((path.clone(), sealed(facts)?))).collect();
        let now_ns = self.node.now_ns();
        let file_facts: BTreeMap<_, _> =
            facts.iter().map(|(path, facts)| (path.clone(), self.fact(facts))).collect();
        let known = Facts {
            files: &file_facts,
            indices: &BTreeMap::new(),
            told: Told::No,
            history: None,
            older: None,
            succeeded: false,
            removed: &BTreeSet::new(),
            names_before: 0,
            renamed_at_ns: None,
            settle_ns: SETTLE_NS,
        };
        let verdict = complete(&RULES, candidate, &known, now_ns);
        if matches!(&verdict, Verdict::Incomplete { .. } | Verdict::Torn { .. }) && is_marked(candidate) {
            self.node.world.count("marker without all files");
        }
        let (Verdict::Complete { evidence, detail }, Some(present)) = (verdict, present) else { return };
        // A node may have written files that it has not published yet; the decision waits for them.
        if !self.knows_all() {
            return;
        }
        self.replicated(&present);
        let mut books = self.books.borrow_mut();
        let versions = books.books.entry(candidate.id.clone()).or_default();
        let is_covered = |known: &Known| {
            !known.checkpoint.is_aborted()
                && present.iter().all(|(path, seal)| known.contents.get(path) == Some(seal))
        };
        if !self.state.borrow().is_tier3_listed || versions.values().any(is_covered) {
            return;
        }
        let version = versions.keys().last().map_or(Version(1), |last| last.next());
        let of = VersionId {
            run: candidate.id.run.clone(),
            directory: candidate.id.directory.clone(),
            timeline: Timeline(0),
            version,
        };
        let published_ns = facts.values().map(|facts| self.published_ns(facts)).max().unwrap_or(now_ns);
        let completed_at_ns = lineage::stamp(&of, published_ns, now_ns, books.run());
        let record = Record {
            format: FORMAT,
            version: of,
            attempt: AttemptId(self.node.world.rng.next()),
            step: candidate.step,
            framework: candidate.framework.clone(),
            evidence,
            evidence_detail: detail,
            epoch: self.epoch,
            completed_at_ns,
            participants: self.participants(&present),
            files: facts.iter().map(|(path, facts)| entry_of(path, facts)).collect(),
            partial: false,
            doubted: false,
        };
        if record.participants.is_empty() {
            return;
        }
        let mut todo = Vec::new();
        let checkpoint = Checkpoint::recorded(record, &mut todo);
        let known = Known { checkpoint, contents: present, prepared: Vec::new() };
        books.books.entry(candidate.id.clone()).or_default().insert(version, known);
        drop(books);
        self.node.world.note(|| format!("{} is complete, version {version}", candidate.id.directory));
        self.carry(&candidate.id, version, todo);
    }

    fn published_ns(&self, facts: &FileFacts) -> i64 {
        facts.published_ns
    }

    fn fact(&self, facts: &FileFacts) -> FileFact {
        let ended = self.books.borrow().ended.contains(&facts.file.incarnation);
        let writer = |fact: &wire::WriterFact| Writer {
            session: fact.session.clone(),
            process: fact.process,
            environment_seen: fact.environment_seen,
            world_size: fact.world_size,
            rank: fact.rank,
            fate: match fact.fate {
                WireFate::Alive if ended => Fate::Killed,
                WireFate::Alive => Fate::Alive,
                WireFate::Exited => Fate::Exited,
                WireFate::Killed => Fate::Killed,
                WireFate::Gone => Fate::Gone,
            },
            failed_at_ns: fact.failed_at_ns.or_else(|| ended.then(|| self.node.now_ns())),
        };
        FileFact {
            state: facts.file_state(),
            size_bytes: facts.size_bytes,
            published_at_ns: facts.published_ns,
            closed_at_ns: facts.closed_ns,
            opened_at_ns: facts.opened_ns,
            vouched: facts.vouched,
            content: Content::Unknown,
            content_reason: String::new(),
            committed: false,
            before: Before::Nothing,
            doubted: false,
            writers: facts.writers.iter().map(writer).collect(),
        }
    }

    /// Returns the lives whose files these are. Each is or was a member.
    fn participants(&self, present: &Contents) -> Vec<NodeLife> {
        let lives: BTreeSet<Incarnation> = present.values().map(|(file, _)| file.incarnation).collect();
        let name = |life: Incarnation| {
            let known = self.node.world.truth.borrow().name_of(life);
            known.map(|node| NodeLife { node, incarnation: life })
        };
        lives.into_iter().filter_map(name).collect()
    }

    pub(crate) fn seal_of(&self, entry: &RecordFile) -> Option<Seal> {
        let facts = self.node.memory.tree.borrow().facts_of(entry.file)?;
        match facts.file_state() {
            FileState::Sealed { seal, size_bytes, crc, chunks } if seal == entry.seal => {
                Some(Seal { number: seal, size_bytes, crc, chunks })
            }
            _ => None,
        }
    }

    /// Claims that a checkpoint is replicated if every file has two places, as far as this coordinator knows. The truth checks
    /// the claim.
    fn replicated(&self, present: &Contents) {
        let is_twice = |(file, seal): &(FileId, SealNumber)| {
            self.is_copied(*file, *seal) && self.suppliers(*file, *seal).len() > 1
        };
        if present.values().all(is_twice) {
            let files: Vec<_> = present.values().copied().collect();
            self.node.world.truth.borrow_mut().replicated(&self.node.world, &files, |file, seal| {
                self.suppliers(file, seal).iter().filter_map(|name| self.node.world.index_of(name)).collect()
            });
        }
    }

    // Jobs.

    fn event(self: &Rc<Self>, id: &CheckpointId, version: Version, event: CheckpointEvent) {
        let mut todo = Vec::new();
        {
            let mut books = self.books.borrow_mut();
            let known = books.books.get_mut(id).and_then(|versions| versions.get_mut(&version));
            let known = known.expect("versions are not forgotten");
            if let Err(illegal) = known.checkpoint.step(event, &mut todo) {
                self.node.world.broken("every event fits the state of its version", &illegal.to_string());
            }
        }
        self.carry(id, version, todo);
    }

    fn carry(self: &Rc<Self>, id: &CheckpointId, version: Version, todo: Vec<CheckpointCommand>) {
        for command in todo {
            let id = id.clone();
            match command {
                CheckpointCommand::Enqueue => self.books.borrow_mut().queue.push((id, version)),
                CheckpointCommand::Prepare => {
                    self.run(|catalog| async move { catalog.prepares(id, version).await });
                }
                CheckpointCommand::Decide => {
                    self.run(|catalog| async move { catalog.decides(id, version).await });
                }
                CheckpointCommand::Pause => self.run(|catalog| async move {
                    catalog.node.world.sleep(PAUSE).await;
                    catalog.event(&id, version, CheckpointEvent::PauseOver);
                }),
                CheckpointCommand::Publish => self.published(&id, version),
                CheckpointCommand::Release | CheckpointCommand::LookAgain => {}
            }
        }
    }

    fn take_turns(self: &Rc<Self>) {
        loop {
            let next = {
                let mut books = self.books.borrow_mut();
                if books.running >= IN_FLIGHT_MAX || books.queue.is_empty() {
                    return;
                }
                books.running += 1;
                books.queue.remove(0)
            };
            self.event(&next.0, next.1, CheckpointEvent::TurnCame);
        }
    }

    fn record(&self, id: &CheckpointId, version: Version) -> (Record, Vec<Prepared>) {
        let books = self.books.borrow();
        let known = &books.books[id][&version];
        (known.checkpoint.record().clone(), known.prepared.clone())
    }

    fn ended_job(
        self: &Rc<Self>,
        id: &CheckpointId,
        version: Version,
        result: Result<CheckpointEvent, SaveError>,
    ) {
        self.books.borrow_mut().running -= 1;
        let event = match result {
            Ok(event) => event,
            Err(SaveError::Fenced) => {
                self.node.world.count("coordinator that learnt in Tier-3 that it was replaced");
                self.close();
                return;
            }
            Err(SaveError::Passing(_)) => CheckpointEvent::Interrupted,
            Err(SaveError::Otherwise(why)) => CheckpointEvent::DecidedOtherwise { why },
        };
        self.event(id, version, event);
    }

    async fn prepares(self: Rc<Self>, id: CheckpointId, version: Version) {
        let (record, _) = self.record(&id, version);
        let result = match self.prepare(&record).await {
            Ok(prepared) => {
                let mut books = self.books.borrow_mut();
                let known = books.books.get_mut(&id).and_then(|versions| versions.get_mut(&version));
                known.expect("versions are not forgotten").prepared = prepared;
                Ok(CheckpointEvent::Prepared)
            }
            Err(SaveError::Otherwise(why)) => {
                self.node.world.note(|| format!("{} is given up: {why}", record.version));
                self.abort(&record).await.map(|()| CheckpointEvent::DecidedOtherwise { why })
            }
            Err(error) => Err(error),
        };
        self.ended_job(&id, version, result);
    }

    async fn decides(self: Rc<Self>, id: CheckpointId, version: Version) {
        let (record, prepared) = self.record(&id, version);
        let previous = lineage::watermark(self.books.borrow().run()).map(|newest| {
            let VersionId { directory, timeline, version, .. } = newest.record().version.clone();
            VersionRef { directory, timeline, version, step: newest.record().step }
        });
        let result = self.commit(&record, &prepared, previous).await.map(|()| CheckpointEvent::Committed);
        self.ended_job(&id, version, result);
    }

    fn published(self: &Rc<Self>, id: &CheckpointId, version: Version) {
        self.watermark();
        let (record, prepared) = self.record(id, version);
        let object = |entry: &RecordFile| {
            let key = Key::data(&record.version, Part::from(record.attempt), &entry.path)?.to_string();
            Some((entry.file, entry.seal, wire::Object { key, size_bytes: entry.size_bytes, encoding: None }))
        };
        assert!(!prepared.is_empty(), "what is committed was prepared");
        let objects: Vec<_> = record.files.iter().filter_map(object).collect();
        self.tell_objects(&objects);
    }

    fn watermark(&self) {
        let books = self.books.borrow();
        if let Some(newest) = lineage::watermark(books.run()) {
            self.node.world.truth.borrow_mut().watermark(&self.node.world, newest.record());
        }
        let holds = tidemark_protocol::invariants::the_watermark_is_the_newest_committed_version(books.run());
        if let Err(why) = holds {
            self.node.world.broken("the watermark is the newest committed version", &why);
        }
        for version in books.run() {
            if let Err(why) = tidemark_protocol::invariants::nothing_is_committed_without_evidence(version) {
                self.node.world.broken("nothing is committed without evidence", &why);
            }
        }
    }

    /// Returns the directories that have a committed version, as far as this coordinator knows.
    pub(crate) fn committed(&self) -> BTreeSet<Vec<u8>> {
        let books = self.books.borrow();
        let committed = |versions: &BTreeMap<Version, Known>| {
            versions.values().any(|known| known.checkpoint.is_committed())
        };
        let ids = books.books.iter().filter(|(_, versions)| committed(versions)).map(|(id, _)| id);
        ids.filter_map(|id| id.path().map(|path| path.as_bytes().to_vec())).collect()
    }
}

fn contents_of(record: &Record) -> Contents {
    record.files.iter().map(|entry| (entry.path.clone(), (entry.file, entry.seal))).collect()
}

fn entry_of(path: &RelPath, facts: &FileFacts) -> RecordFile {
    let WireState::Sealed { crc, .. } = facts.state else { unreachable!("all were sealed") };
    RecordFile {
        path: path.clone(),
        file: facts.file,
        seal: facts.seal,
        size_bytes: facts.size_bytes,
        crc64nvme: crc,
    }
}

fn is_marked(candidate: &Candidate) -> bool {
    candidate.files.values().any(|role| *role == Role::Marker)
}

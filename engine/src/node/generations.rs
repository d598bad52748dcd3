//! Generations of loose files that Tier-3 no longer has to keep.
//!
//! Owns: which paths are examined and when, one at a time; keeping generations that hold the bytes of a file in the tree. Does not own:
//! the rule (`protocol::loose`), reading and deleting (`save::generations`).
//!
//! A path is examined when it has collected some generations, when a removal of it stands in Tier-3, after a start, and when a
//! person asks. Results are not remembered, because Tier-3 can be read again.

use crate::node::Shared;
use crate::node::away::Away;
use crate::node::book::{BookLookup, LooseBook, LooseStage};
use crate::node::flush::Flushes;
use crate::node::gc::Gc;
use crate::node::given_up::StillCounts;
use crate::node::jobs::Done;
use crate::node::keeping::ending;
use crate::node::ledger::Ledger;
use crate::node::recover::adopt_loose;
use crate::node::rights::Rights;
use crate::node::run::{Engine, Node, retry_pause};
use crate::node::scrub::Scrub;
use crate::node::select::Wanted;
use crate::node::tree::TreeState;
use crate::save::generations::{self, Generations as Found, GiveUpError};
use crate::save::loose::LooseStored;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tidemark_namespace::Listed;
use tidemark_protocol::documents::LooseSidecar;
use tidemark_protocol::error::error_text;
use tidemark_protocol::id::{FileId, Generation, SealNumber, Timeline, Version};
use tidemark_protocol::loose;
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::report::{ApiError, CheckpointRef, ErrorCode, EventLevel, GcRow, Removal, Undelete};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Generations that a path collects between two examinations: each costs a listing and some reads.
const LOOK_AFTER: u64 = 8;

/// Generations from which a path is examined. With fewer, there is nothing to delete.
const LOOK_FROM: u64 = 3;

/// Longest wait of a removal until Tier-3 has it.
const TREE_WITHIN: Duration = Duration::from_secs(60);

/// Interval at which a waiting command checks how far the deletes are.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// State of the loop for deleting generations.
#[derive(Debug, Default)]
pub(crate) struct Generations {
    /// Paths to examine, and whether a person asked only what would be deleted.
    due: BTreeMap<RelPath, bool>,
    running: bool,
    /// Paths whose last examination failed.
    waiting: BTreeMap<RelPath, Waiting>,
    /// Files that an administrator removed: their generations go, whatever the policy says of removals.
    wishes: BTreeMap<RelPath, Generation>,
    /// Rows found since a person asked last.
    rows: Vec<GcRow>,
}

#[derive(Debug)]
struct Waiting {
    until: Instant,
    tries: u32,
    why: String,
}

/// Result of an examination, or of the deletes that followed.
#[derive(Debug)]
pub(crate) struct Sifted {
    path: RelPath,
    newest: Generation,
    only_look: bool,
    result: Result<Outcome, GiveUpError>,
}

#[derive(Debug)]
enum Outcome {
    Found(Found),
    GivenUp(Going),
}

/// Generations of a path that are being deleted.
#[derive(Debug)]
struct Going {
    generations: BTreeSet<Generation>,
    /// Objects that their sidecars named, with the bytes that these should hold.
    objects: Vec<(FileId, SealNumber, String)>,
}

async fn read(shared: Arc<Shared>, path: RelPath, newest: Generation, only_look: bool) -> Done {
    let result = generations::read(&shared.drain, &path, newest).await.map(Outcome::Found);
    Done::Sifted(Sifted { path, newest, only_look, result })
}

async fn give_up(shared: Arc<Shared>, path: RelPath, newest: Generation, going: Going) -> Done {
    let result = generations::give_up(&shared.drain, &path, &going.generations).await;
    Done::Sifted(Sifted { path, newest, only_look: false, result: result.map(|()| Outcome::GivenUp(going)) })
}

/// Returns the directory that a loose file lies in, as a policy names it.
fn run_of(path: &RelPath) -> RunPath {
    path.parent().and_then(|parent| RunPath::new(parent).ok()).unwrap_or_else(RunPath::root)
}

impl Generations {
    /// Returns the state after a start, with all paths due that have enough generations: which of them can be deleted is not known.
    pub(crate) fn after_start<'a>(loose: impl Iterator<Item = (&'a RelPath, &'a LooseBook)>) -> Self {
        let many = |book: &LooseBook| book.generation.is_some_and(|generation| generation.0 >= LOOK_FROM);
        let due = loose.filter(|(_, book)| many(book)).map(|(path, _)| (path.clone(), false)).collect();
        Self { due, ..Self::default() }
    }

    fn failed(&mut self, path: RelPath, why: String, longest: Duration, now: Instant) {
        let tries = self.waiting.get(&path).map_or(0, |waiting| waiting.tries);
        let until = now + retry_pause(tries, longest);
        self.waiting.insert(path.clone(), Waiting { until, tries: tries.saturating_add(1), why });
        self.due.insert(path, false);
    }

    /// Records that a further generation of a loose file arrived.
    pub(crate) fn collects(&mut self, path: &RelPath, generation: Generation) {
        if generation.0.is_multiple_of(LOOK_AFTER) {
            self.due.entry(path.clone()).or_insert(false);
        }
    }

    pub(crate) fn take_rows(&mut self) -> Vec<GcRow> {
        let mut rows = std::mem::take(&mut self.rows);
        rows.sort_by(|one, other| {
            let key = |row: &GcRow| (row.checkpoint.path.clone(), row.checkpoint.version);
            key(one).cmp(&key(other))
        });
        rows
    }

    pub(crate) fn removal_counts(&self, shared: &Shared, path: &RelPath, generation: Generation) -> bool {
        let wished = self.wishes.get(path).is_some_and(|wished| *wished >= generation);
        wished || shared.settings.retention.policy_of(&run_of(path)).honour_removals
    }

    /// Makes all paths due that may have generations to delete, because a person asks.
    pub(crate) fn sift_all(&mut self, ledger: &Ledger, only_look: bool) {
        self.rows.clear();
        self.waiting.clear();
        let many = ledger
            .loose
            .iter()
            .filter(|(_, book)| book.generation.is_some_and(|generation| generation.0 >= LOOK_FROM));
        let removed = ledger.removed_loose.keys();
        let all: Vec<_> = many.map(|(path, _)| path).chain(removed).cloned().collect();
        self.due.extend(all.into_iter().map(|path| (path, only_look)));
    }
}

impl Shared {
    /// Whether a file in the tree, under whatever name, has its bytes in this generation, or a program has it open.
    pub(crate) fn needs(&self, sidecar: &LooseSidecar) -> bool {
        let file = &sidecar.file;
        let listed = Listed { path: &file.path, file: file.file, seal: file.seal, key: &file.key };
        let leads = self.namespace.nodes().leads_to(&[listed]);
        leads.copies || leads.needs
    }
}

/// The parts of the loop that giving up generations of loose files reads and changes.
pub(crate) struct Sifting<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) generations: &'a mut Generations,
    pub(crate) jobs: &'a mut JoinSet<Done>,
    pub(crate) scrub: &'a mut Scrub,
    pub(crate) rights: &'a mut Rights,
    pub(crate) tree: &'a TreeState,
    pub(crate) gc: &'a Gc,
    pub(crate) tier3_away: &'a Away,
    pub(crate) flushes: &'a Flushes,
}

impl Sifting<'_> {
    /// Makes paths due whose removal Tier-3 has only now. `before` are the removals that it had.
    pub(crate) fn removals_stand(&mut self, before: &BTreeMap<RelPath, Generation>) {
        for (path, generation) in &self.tree.told.loose {
            let is_new = before.get(path) != Some(generation);
            let was_open = || self.ledger.removed_loose.get(path).is_some_and(|book| book.read.is_some());
            if is_new && (self.generations.removal_counts(self.shared, path, *generation) || was_open()) {
                self.generations.due.entry(path.clone()).or_insert(false);
            }
        }
    }

    /// Returns the last removal of a path that Tier-3 has.
    fn removal_of(&self, path: &RelPath) -> Option<loose::Removal> {
        let until = *self.tree.told.loose.get(path)?;
        Some(loose::Removal { until, counts: self.generations.removal_counts(self.shared, path, until) })
    }

    /// Begins to examine one path that is due.
    pub(crate) fn sift(&mut self, now: Instant) {
        if self.generations.running || self.rights.draining || !self.rights.may_write() {
            return;
        }
        let waits =
            |path: &RelPath| self.generations.waiting.get(path).is_some_and(|waiting| waiting.until > now);
        let next = self.generations.due.iter().find(|(path, _)| !waits(path));
        let Some((path, only_look)) = next.map(|(path, only_look)| (path.clone(), *only_look)) else {
            return;
        };
        self.generations.due.remove(&path);
        let books = BookLookup { ledger: self.ledger };
        if let Some(newest) = books.newest_arrived(&path) {
            self.generations.running = true;
            self.jobs.spawn(read(Arc::clone(self.shared), path, newest, only_look));
        }
    }

    pub(crate) fn sifted(&mut self, done: Sifted, now: Instant) {
        self.generations.running = false;
        let Sifted { path, newest, only_look, result } = done;
        match result {
            Ok(Outcome::Found(found)) => {
                self.generations.waiting.remove(&path);
                self.found(path, newest, only_look, &found);
            }
            Ok(Outcome::GivenUp(Going { generations, objects })) => {
                self.generations.waiting.remove(&path);
                let still_counts = StillCounts { shared: self.shared, ledger: self.ledger, gc: self.gc };
                self.scrub.forget_found(
                    still_counts,
                    objects.iter().map(|(file, seal, key)| (*file, *seal, key.as_str())),
                );
                let what = format!("{} generations of it were given up", generations.len());
                let path = path.to_string();
                self.shared.events.add(self.shared.now_ns(), EventLevel::Info, "retired", Some(path), what);
            }
            Err(error) => {
                let why = error_text(&error);
                tracing::warn!(%path, %why, "generations of a loose file are not given up yet");
                if matches!(error, GiveUpError::Fenced { .. }) {
                    self.rights.fenced = Some(why.clone());
                }
                let longest = self.flushes.retry_longest();
                self.generations.failed(path, why, longest, now);
            }
        }
    }

    fn found(&mut self, path: RelPath, newest: Generation, only_look: bool, found: &Found) {
        let held: Vec<_> = found.sidecars.iter().map(generations::held).collect();
        let policy = self.shared.settings.retention.policy_of(&run_of(&path));
        let needed = found.sidecars.iter().filter(|sidecar| self.shared.needs(sidecar));
        let needed: BTreeSet<_> = needed.map(|sidecar| sidecar.generation).collect();
        let removal = self.removal_of(&path);
        let verdicts = loose::retain(&policy, &held, removal, &needed, self.shared.now_ns());
        let mut going = Going { generations: found.remains.clone(), objects: Vec::new() };
        for (sidecar, verdict) in found.sidecars.iter().zip(verdicts) {
            if verdict.given_up {
                going.generations.insert(sidecar.generation);
                let file = &sidecar.file;
                going.objects.push((file.file, file.seal, file.key.clone()));
            }
            self.generations.rows.push(GcRow {
                run: run_of(&path).to_string(),
                checkpoint: reference(&path, sidecar.generation),
                bytes: sidecar.file.size_bytes,
                given_up: verdict.given_up,
                reason: verdict.reason,
            });
        }
        if !only_look && !going.generations.is_empty() {
            self.generations.running = true;
            self.jobs.spawn(give_up(Arc::clone(self.shared), path, newest, going));
        }
    }

    /// Returns how many paths are still to be examined, and the reason if nothing more happens by itself soon.
    fn sift_left(&self) -> (u64, Option<String>) {
        let due = self.generations.due.len() as u64;
        let left = due + u64::from(self.generations.running);
        let stuck = self.tier3_away.why_nothing_is_written(self.shared, self.rights).or_else(|| {
            let stuck = self.generations.due.keys().all(|path| self.generations.waiting.contains_key(path));
            let (_, waiting) = self.generations.waiting.iter().next()?;
            (stuck && !self.generations.running).then(|| waiting.why.clone())
        });
        (left, stuck.filter(|_| left > 0))
    }
}

/// Returns the reference by which a person sees a generation of a loose file.
fn reference(path: &RelPath, generation: Generation) -> CheckpointRef {
    let version = Version(generation.0);
    CheckpointRef { timeline: Timeline(0), step: None, version, path: path.to_string() }
}

impl Sifting<'_> {
    /// Removes the name of a loose file from the tree, if it is still there, so that its generations are deleted. Returns the last
    /// generation; `None` if there is no such file.
    fn remove_loose(&mut self, path: &RelPath) -> Option<Result<Generation, String>> {
        let here = self.ledger.loose.get(path);
        let book = here.or_else(|| self.ledger.removed_loose.get(path))?;
        if here.is_none() && self.shared.namespace.nodes().node_at(path.as_bytes()).is_some() {
            return None; // Something else has the name now.
        }
        let generation = book.generation;
        if here.is_some() {
            let view = self.ledger.file(path)?;
            let Some(seal) = view.sealed().filter(|_| view.opens == 0) else {
                return Some(Err("a program has it open, or it was closed just now".to_owned()));
            };
            let listed = Listed { path, file: view.file, seal, key: "" };
            let node = view.node;
            match self.shared.withdraw(&[listed], &[]) {
                Ok(1) => self.ledger.refresh(&self.shared.namespace, &[node]),
                Ok(_) => return Some(Err("it changed just now".to_owned())),
                Err(error) => return Some(Err(error.to_string())),
            }
        }
        let generation = generation.unwrap_or(Generation(0));
        self.generations.wishes.insert(path.clone(), generation);
        Some(Ok(generation))
    }

    fn put_loose_back(&mut self, sidecar: &LooseSidecar) -> Result<(), String> {
        let path = &sidecar.file.path;
        if self.shared.namespace.nodes().node_at(path.as_bytes()).is_some() {
            return Err("something has the name".to_owned());
        }
        self.generations.wishes.remove(path);
        self.generations.due.remove(path);
        self.shared.bring_back([path], || adopt_loose(self.shared, sidecar));
        let node = self.shared.namespace.nodes().node_at(path.as_bytes());
        let node = node.ok_or("it could not be put back; the log says why")?;
        if let Some(book) = self.ledger.removed_loose.get_mut(path) {
            let of = (sidecar.file.file, sidecar.file.seal);
            // A start takes the newest generation. If that is another one, these bytes are uploaded again, as a newer generation.
            let is_newest = book.generation == Some(sidecar.generation);
            book.stage = if is_newest { LooseStage::Uploaded { of } } else { LooseStage::Idle };
            book.stored = LooseStored::of(sidecar).compared();
        }
        self.ledger.refresh(&self.shared.namespace, &[node]);
        let what = format!("generation {} is in the tree again", sidecar.generation);
        self.shared.events.add(
            self.shared.now_ns(),
            EventLevel::Info,
            "undeleted",
            Some(path.to_string()),
            what,
        );
        Ok(())
    }
}

fn path_of(wanted: &Wanted) -> Option<RelPath> {
    let Wanted::Path(path) = wanted else { return None };
    RelPath::new(path.clone()).ok()
}

impl Node {
    /// Removes a loose file: its name from the tree, its generations from Tier-3. `None`: `wanted` names no loose file.
    pub(crate) async fn remove_loose(&self, wanted: &Wanted) -> Result<Option<Removal>, ApiError> {
        let Some(path) = path_of(wanted) else { return Ok(None) };
        let asked = path.clone();
        let begun = self.ask(move |engine| engine.sifting().remove_loose(&asked)).await.ok_or_else(ending)?;
        let Some(begun) = begun else { return Ok(None) };
        begun.map_err(|why| {
            let what = format!("{path} is not removed: {why}");
            ApiError::new(ErrorCode::Failed, what, "close it, then say it again")
        })?;
        // Nothing is deleted before Tier-3 has the removal.
        let place = path.parent().map_or_else(Vec::new, |parent| parent.as_bytes().to_vec());
        self.flush(place, true, Some(TREE_WITHIN), |_| {}).await.ok_or_else(ending)?;
        let (rows, left, trouble) = self.sift(false).await?;
        let text = path.to_string();
        let own = rows.iter().filter(|row| row.checkpoint.path == text);
        let (gone, stays): (Vec<_>, Vec<_>) = own.partition(|row| row.given_up);
        let why = trouble.or_else(|| stays.first().map(|row| row.reason.clone()));
        let left = left.min(1) + stays.len() as u64;
        let trouble = why.filter(|_| left > 0);
        Ok(Some(Removal { path: text, versions: gone.len() as u64, left, trouble }))
    }

    /// Puts a loose file that was removed into the tree again. `None`: `wanted` names no removed loose file.
    pub(crate) async fn undelete_loose(&self, wanted: &Wanted) -> Result<Option<Undelete>, ApiError> {
        let Some(path) = path_of(wanted) else { return Ok(None) };
        let asked = path.clone();
        let newest =
            self.ask(move |engine| engine.books().removed_generation(&asked)).await.ok_or_else(ending)?;
        let Some(newest) = newest else { return Ok(None) };
        let refused = |what: String, action: &str| ApiError::new(ErrorCode::Failed, what, action);
        let found = generations::readable(&self.shared().drain, &path, newest)
            .await
            .map_err(|error| refused(error_text(&error), "`ckptctl status` shows how Tier-3 is"))?;
        let held: Vec<_> = found.sidecars.iter().map(generations::held).collect();
        let wanted = loose::wanted(&held);
        let sidecar = found.sidecars.into_iter().find(|sidecar| Some(sidecar.generation) == wanted);
        let Some(sidecar) = sidecar else { return Ok(None) };
        let checkpoint = reference(&path, sidecar.generation);
        let put =
            self.ask(move |engine| engine.sifting().put_loose_back(&sidecar)).await.ok_or_else(ending)?;
        put.map_err(|why| {
            refused(format!("{path} is not put back: {why}"), "rename what has the name, then say it again")
        })?;
        Ok(Some(Undelete { checkpoint, files: 1 }))
    }

    /// Examines all loose files that may have generations to delete. Returns a row for each generation, how many paths were left over,
    /// and why. Without `only_look`, the generations are deleted when this returns.
    pub(crate) async fn sift(&self, only_look: bool) -> Result<(Vec<GcRow>, u64, Option<String>), ApiError> {
        self.ask(move |engine| engine.generations.sift_all(&engine.ledger, only_look))
            .await
            .ok_or_else(ending)?;
        loop {
            let (left, trouble) = self.ask(|engine| engine.sifting().sift_left()).await.ok_or_else(ending)?;
            if left == 0 || trouble.is_some() {
                let rows = self
                    .ask(|engine: &mut Engine| engine.generations.take_rows())
                    .await
                    .ok_or_else(ending)?;
                return Ok((rows, left, trouble));
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }
}

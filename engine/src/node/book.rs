//! One checkpoint as this node knows it, over all its versions; and one loose file.
//!
//! Owns: what the loop keeps for each version and each loose file. Does not own: the states of a version (protocol),
//! what moves it (`decide`, `advance`), the files themselves (the namespace).

use crate::node::Shared;
use crate::node::decide::{is_covered, run_of};
use crate::node::in_the_way::InTheWay;
use crate::node::ledger::{Contents, Ledger};
use crate::node::select::{is_run, several, step_of};
use crate::save::commit::Attempt;
use crate::save::loose::LooseStored;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_namespace::{FileView, NodeId, Reach};
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::evidence::{Covered, Told, Verdict};
use tidemark_protocol::id::{Epoch, FileId, Generation, SealNumber, Timeline, Version};
use tidemark_protocol::key::{VersionId, VersionRef};
use tidemark_protocol::lineage;
use tidemark_protocol::manifest::{Attributes, Manifest};
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::{Candidate, CheckpointId, Rules, TrackerHolds};
use tidemark_protocol::record::Record;
use tidemark_protocol::report::{ApiError, CheckpointRef, path_text};

/// A version's number within its checkpoint.
pub(crate) type Number = (Timeline, Version);

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Book {
    pub(crate) id: CheckpointId,
    pub(crate) scope: Option<RelPath>,
    /// What the tree holds under this name now.
    pub(crate) candidate: Option<Candidate>,
    /// What was concluded of it last.
    pub(crate) verdict: Option<Verdict>,
    /// Files in its directory that are no part of it, as far as was concluded last.
    pub(crate) apart: BTreeSet<RelPath>,
    /// Somebody said that it is whole, of these contents.
    pub(crate) told_of: Option<Contents>,
    pub(crate) versions: BTreeMap<Number, VersionBook>,
    /// The indices as they were read.
    pub(crate) indices: BTreeMap<RelPath, ParsedIndex>,
    pub(crate) in_the_way: InTheWay,
}

/// An index that was read once.
#[derive(Debug)]
pub(crate) struct ParsedIndex {
    pub(crate) of: (FileId, SealNumber),
    /// What it lists; an error was said when it was read.
    pub(crate) covered: Result<Arc<Covered>, ()>,
}

/// One version: its standing by the rules, and what the loop keeps to move it.
#[derive(Debug)]
pub(crate) struct VersionBook {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) contents: Contents,
    pub(crate) previous: Option<VersionRef>,
    /// What was done so far, and the pins of what is left. A running job has it.
    pub(crate) attempt: Option<Box<Attempt>>,
    /// Why the last try failed, until the next.
    pub(crate) trouble: Option<String>,
    /// What its marker names, and in which epoch.
    pub(crate) committed: Option<(Arc<Manifest>, Epoch)>,
}

impl VersionBook {
    /// A version for which nothing has to be kept.
    pub(crate) fn new(checkpoint: Checkpoint, contents: Contents) -> Self {
        Self { checkpoint, contents, previous: None, attempt: None, trouble: None, committed: None }
    }

    pub(crate) fn record(&self) -> &Record {
        self.checkpoint.record()
    }

    /// What its files made in the tree. Costs some patterns for each of them.
    pub(crate) fn candidate(&self, rules: &Rules, id: &CheckpointId) -> Option<Candidate> {
        rules.group(self.contents.keys()).candidates.into_iter().find(|candidate| candidate.id == *id)
    }

    pub(crate) fn manifest(&self) -> Option<&Arc<Manifest>> {
        self.committed.as_ref().map(|(manifest, _)| manifest)
    }

    /// The bytes that have to leave before it is prepared.
    pub(crate) fn bytes_left(&self) -> u64 {
        match &self.attempt {
            Some(attempt) => attempt.bytes_left(),
            // A job has the attempt, and does not say how far it is.
            None if self.checkpoint.is_prepared() => 0,
            None => self.record().size_bytes(),
        }
    }
}

impl Book {
    pub(crate) fn new(id: CheckpointId) -> Self {
        Self {
            id,
            scope: None,
            candidate: None,
            verdict: None,
            apart: BTreeSet::new(),
            told_of: None,
            versions: BTreeMap::new(),
            indices: BTreeMap::new(),
            in_the_way: InTheWay::default(),
        }
    }

    pub(crate) fn set_candidate(&mut self, candidate: Option<Candidate>, scope: Option<RelPath>) {
        self.scope = scope;
        if candidate.is_none() {
            self.verdict = None;
            self.told_of = None;
            self.indices.clear();
            self.in_the_way.ended();
        }
        self.candidate = candidate;
    }

    /// The newest version that is, or may become, committed.
    pub(crate) fn newest(&self) -> Option<(&Number, &VersionBook)> {
        self.standing().next()
    }

    /// The same, but for a version that only keeps what there is of a save that was cut, or what lay beside one that is committed.
    pub(crate) fn newest_save(&self) -> Option<(&Number, &VersionBook)> {
        self.standing()
            .find(|(number, version)| !version.record().partial && !self.keeps_beside(**number, version))
    }

    /// Whether a version holds all of the committed one before it, and more of which nothing says that it is whole.
    fn keeps_beside(&self, number: Number, version: &VersionBook) -> bool {
        let proven = version.checkpoint.is_proven() || version.checkpoint.is_committed();
        let adds = |whole: &VersionBook| {
            whole.contents.len() < version.contents.len() && is_covered(&whole.contents, &version.contents)
        };
        !proven && self.committed().is_some_and(|(at, whole)| *at < number && adds(whole))
    }

    /// Whether the newest committed version holds all of this, and nothing newer stands.
    pub(crate) fn is_committed_with(&self, shared: &Shared, present: &Contents) -> bool {
        self.committed().is_some_and(|(number, version)| {
            is_covered(present, &version.contents) && !self.is_superseded(shared, *number)
        })
    }

    /// The versions that are, or may become, committed, the newest first.
    fn standing(&self) -> impl Iterator<Item = (&Number, &VersionBook)> {
        let stands = |checkpoint: &Checkpoint| checkpoint.is_alive() || checkpoint.is_committed();
        self.versions.iter().rev().filter(move |(_, version)| stands(&version.checkpoint))
    }

    /// The newest version that stands or may come to stand, or cannot be read any more, and holds all of `present`; none where a restart
    /// would show a newer one instead.
    pub(crate) fn covering(&self, shared: &Shared, present: &Contents) -> Option<(&Number, &VersionBook)> {
        let found = self.versions.iter().rev().find(|(_, version)| {
            let checkpoint = &version.checkpoint;
            let stands =
                checkpoint.is_alive() || checkpoint.is_committed() || checkpoint.why_unreadable().is_some();
            stands && is_covered(present, &version.contents)
        });
        found.filter(|(number, _)| !self.is_superseded(shared, **number))
    }

    /// Whether a newer version stands, or is about to, whose bytes can be had: a file that was renamed back makes a new version of what
    /// it holds, since a start with empty memory would show the newer one.
    pub(crate) fn is_superseded(&self, shared: &Shared, number: Number) -> bool {
        let newer = self.versions.range((Bound::Excluded(number), Bound::Unbounded));
        newer.map(|(_, version)| &version.checkpoint).any(|checkpoint| {
            checkpoint.is_committed() && shared.why_lost(checkpoint.record()).is_none()
                || checkpoint.is_alive() && checkpoint.is_proven()
        })
    }

    /// The newest committed version of this checkpoint.
    pub(crate) fn committed(&self) -> Option<(&Number, &VersionBook)> {
        self.versions.iter().rev().find(|(_, version)| version.checkpoint.is_committed())
    }

    /// The newest version that was complete in the tree, in Tier-3 already or not: what differs from it was written since.
    pub(crate) fn newest_whole(&self) -> Option<(&Number, &VersionBook)> {
        // The bytes of one that was decided against may have been lost with the memory they were in.
        let was_whole = |checkpoint: &Checkpoint| {
            checkpoint.is_committed() || checkpoint.is_proven() && !checkpoint.is_aborted()
        };
        self.versions.iter().rev().find(|(_, version)| was_whole(&version.checkpoint))
    }

    /// The newest version of which Tier-3 does not say any more what was committed.
    pub(crate) fn unreadable(&self) -> Option<(&Number, &VersionBook)> {
        self.versions.iter().rev().find(|(_, version)| version.checkpoint.why_unreadable().is_some())
    }

    /// Whether a version of it is on its way, or waits because of what stood in the way of the last one.
    pub(crate) fn is_tried(&self) -> bool {
        let moves = |checkpoint: &Checkpoint| {
            checkpoint.is_alive() && (checkpoint.is_proven() || !checkpoint.is_prepared())
        };
        self.checkpoints().any(moves) || self.in_the_way.why().is_some()
    }

    /// The number the next version takes: above every number ever used, decided or not.
    pub(crate) fn next_number(&self) -> Number {
        let last = self.versions.keys().next_back();
        last.map_or((Timeline(0), Version(1)), |(timeline, version)| (*timeline, version.next()))
    }

    pub(crate) fn version_id(&self, number: Number) -> VersionId {
        VersionId {
            run: self.id.run.clone(),
            directory: self.id.directory.clone(),
            timeline: number.0,
            version: number.1,
        }
    }

    /// The versions as the rules see them.
    pub(crate) fn checkpoints(&self) -> impl Iterator<Item = &Checkpoint> + Clone {
        self.versions.values().map(|version| &version.checkpoint)
    }

    /// What a person said of exactly what the tree holds now. A word about other bytes counts for nothing.
    pub(crate) fn told(&self, ledger: &Ledger) -> Told {
        let Some(told_of) = &self.told_of else { return Told::No };
        if ledger.present(self).as_ref() == Some(told_of) { Told::Commit } else { Told::No }
    }

    /// Whether the file at `path` is part of what the tree holds under this name.
    pub(crate) fn holds(&self, path: &RelPath) -> bool {
        let candidate = self.candidate.as_ref();
        candidate.is_some_and(|found| found.files.contains_key(path) || found.temporaries.contains(path))
    }

    /// Whether Tier-3 has all bytes of some version, committed or not.
    pub(crate) fn is_prepared(&self) -> bool {
        self.versions.values().any(|version| version.checkpoint.is_prepared())
    }

    /// What is there is committed as it stands, and only a change of it could make another version.
    pub(crate) fn is_at_rest(&self) -> bool {
        let whole = matches!(self.verdict, None | Some(Verdict::Complete { .. }));
        whole && self.newest().is_some_and(|(_, version)| version.checkpoint.is_committed())
    }

    /// It can never be complete as it is: torn, or broken.
    pub(crate) fn is_torn(&self) -> bool {
        self.verdict.as_ref().is_some_and(is_damage)
    }

    /// Files are missing, and nobody is left to bring them.
    pub(crate) fn is_kept_without_proof(&self) -> bool {
        matches!(self.verdict, Some(Verdict::Incomplete { kept_at_ns: Some(_), .. }))
    }

    /// The newest version of which it is known what it held, where nothing of it is in the tree any more.
    pub(crate) fn removed(&self) -> Option<&VersionBook> {
        let held = || self.versions.values().rev().find(|version| !version.contents.is_empty());
        if self.candidate.is_none() { held() } else { None }
    }

    /// Where the checkpoint is on the mount, relative to it.
    pub(crate) fn path(&self) -> Vec<u8> {
        tidemark_protocol::key::checkpoint_path(&self.id.run, &self.id.directory)
    }
}

/// Whether a verdict says that it can never be complete.
pub(crate) fn is_damage(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Torn { .. } | Verdict::Broken { .. })
}

/// How another marker names a version.
pub(crate) fn reference(checkpoint: &Checkpoint) -> VersionRef {
    let VersionId { directory, timeline, version, .. } = checkpoint.record().version.clone();
    VersionRef { directory, timeline, version, step: checkpoint.record().step }
}

/// A file that belongs to no checkpoint.
#[derive(Debug, Default)]
pub(crate) struct LooseBook {
    pub(crate) stage: LooseStage,
    /// The newest generation that was begun.
    pub(crate) generation: Option<Generation>,
    /// What that generation holds.
    pub(crate) of: Option<(FileId, SealNumber)>,
    /// The newest generation whose sidecar was read or written.
    pub(crate) described: Option<Generation>,
    /// The newest generation that its writers had closed, as far as this daemon knows.
    pub(crate) closed: Option<Generation>,
    /// Since when Tier-3 is known to lack some of its bytes.
    pub(crate) lacking: Option<Instant>,
    /// The last time its bytes were read although somebody might write them.
    pub(crate) read: Option<Read>,
    /// What the last upload took.
    pub(crate) took: Duration,
    /// What Tier-3 has of the last generation that arrived, where the next may share some of it.
    pub(crate) stored: Option<Arc<LooseStored>>,
    /// What its sidecar says of the newest generation besides the bytes.
    pub(crate) attributes: Attributes,
    /// It could not be brought into the tree at the start: that its name is not there does not mean that somebody removed it.
    pub(crate) unshown: bool,
}

/// Bytes that were read while they might change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Read {
    pub(crate) at: Instant,
    pub(crate) node: NodeId,
    /// How far they reached; none where a write at that very moment would not show.
    pub(crate) reach: Option<Reach>,
    /// They are in Tier-3.
    pub(crate) arrived: bool,
}

/// How far a loose file is.
#[derive(Debug, Default)]
pub(crate) enum LooseStage {
    #[default]
    Idle,
    Uploading,
    Waiting {
        until: Instant,
        tries: u32,
        why: String,
    },
    Uploaded {
        of: (FileId, SealNumber),
    },
}
/// Lookups over the books of all checkpoints: one version, or the newest of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BookLookup<'a> {
    pub(crate) ledger: &'a Ledger,
}

impl<'a> BookLookup<'a> {
    pub(crate) fn version(self, id: &CheckpointId, number: Number) -> &'a VersionBook {
        &self.ledger.books[id].versions[&number]
    }

    /// The newest committed version of a run.
    pub(crate) fn watermark(self, run: &RunPath) -> Option<&'a Checkpoint> {
        lineage::watermark(run_of(self.ledger, run))
    }

    /// The committed version of the run that a new one follows.
    pub(crate) fn previous(self, run: &RunPath) -> Option<VersionRef> {
        self.watermark(run).map(reference)
    }

    /// The run of which `latest` is meant: the named one, or the only one; `None`: nothing of it is committed.
    ///
    /// # Errors
    /// None is named, and several have something committed.
    pub(crate) fn run_of_latest(self, run: Option<&[u8]>) -> Result<Option<&'a RunPath>, ApiError> {
        let mut runs = self.runs_with_commits(run);
        if runs.len() > 1 {
            let names = runs.iter().map(ToString::to_string);
            return Err(several("several runs have checkpoints", names, "name one as RUN@latest"));
        }
        Ok(runs.pop_first())
    }

    /// The newest committed one of a run, whether the tree shows it or not.
    pub(crate) fn newest_committed_of(self, run: &RunPath) -> Option<&'a Book> {
        let of_run = self.ledger.books.values().filter(|book| book.id.run == *run);
        let committed = of_run.filter_map(|book| Some((book.committed()?.1.record(), book)));
        committed.max_by_key(|(record, _)| lineage::order_to_resume(record)).map(|(_, book)| book)
    }

    pub(crate) fn book_of(self, record: &Record) -> Option<&'a Book> {
        let (run, directory) = (record.version.run.clone(), record.version.directory.clone());
        self.ledger.books.get(&CheckpointId { run, directory })
    }

    /// Runs, or the named one, with a committed checkpoint in the tree; where none has one, those with a committed checkpoint that a job
    /// removed.
    fn runs_with_commits(self, run: Option<&[u8]>) -> BTreeSet<&'a RunPath> {
        let committed = || self.books_of(run).filter(|book| book.committed().is_some());
        let in_tree: BTreeSet<_> =
            committed().filter(|book| book.candidate.is_some()).map(|book| &book.id.run).collect();
        if in_tree.is_empty() { committed().map(|book| &book.id.run).collect() } else { in_tree }
    }

    /// The checkpoints with this step, of one run or of all.
    pub(crate) fn at_step(self, run: Option<&'a [u8]>, step: u64) -> impl Iterator<Item = &'a Book> {
        self.books_of(run).filter(move |book| step_of(book).is_some_and(|found| found.0 == step))
    }

    /// The books of one run, named by its path or as `ls` shows it, or of all.
    fn books_of(self, run: Option<&[u8]>) -> impl Iterator<Item = &'a Book> {
        self.ledger.books.values().filter(move |book| run.is_none_or(|run| is_run(&book.id.run, run)))
    }

    /// The number that the next version of a checkpoint has.
    pub(crate) fn next_number(self, id: &CheckpointId) -> Number {
        let book = self.ledger.books.get(id);
        book.map_or_else(|| Book::new(id.clone()).next_number(), Book::next_number)
    }

    pub(crate) fn trackers_of(
        self,
        id: &'a CheckpointId,
        framework: &'a str,
    ) -> impl Iterator<Item = (RelPath, Arc<FileView>, TrackerHolds)> + 'a {
        let beside = self.ledger.loose.keys().filter(|path| path.parent().as_ref() == id.run.path());
        beside.filter_map(|path| {
            let holds = self.ledger.rules().tracker(framework, path)?;
            Some((path.clone(), Arc::clone(self.ledger.file(path)?), holds))
        })
    }

    pub(crate) fn refs(self, paths: &[String]) -> Vec<CheckpointRef> {
        let books = self.ledger.books.values();
        books
            .filter(|book| paths.contains(&path_text(&book.path())))
            .filter_map(|book| {
                let (_, version) = book.committed()?;
                Some(crate::node::answer::checkpoint_ref(&version.checkpoint))
            })
            .collect()
    }

    /// The newest generation of a path that Tier-3 may have whole; none while nothing of it is known.
    pub(crate) fn newest_arrived(self, path: &RelPath) -> Option<Generation> {
        let book = self.ledger.loose.get(path).or_else(|| self.ledger.removed_loose.get(path))?;
        let newest = book.generation?;
        match book.stage {
            LooseStage::Uploading => newest.0.checked_sub(1).map(Generation),
            LooseStage::Idle | LooseStage::Waiting { .. } | LooseStage::Uploaded { .. } => Some(newest),
        }
    }

    /// The name of a loose file that is not in the tree any more, with the last generation there was.
    pub(crate) fn removed_generation(self, path: &RelPath) -> Option<Generation> {
        self.ledger.removed_loose.get(path)?.generation
    }
}

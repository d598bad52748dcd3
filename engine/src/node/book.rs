//! State that this node keeps for one checkpoint, over all its versions, and for one loose file.
//!
//! Owns: the loop's entries for each version and each loose file. Does not own: the states of a version (protocol),
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
use std::time::Duration;
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
use tokio::time::Instant;

/// A version's number within its checkpoint.
pub(crate) type Number = (Timeline, Version);

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Book {
    pub(crate) id: CheckpointId,
    pub(crate) scope: Option<RelPath>,
    /// Files that the tree holds under this name now.
    pub(crate) candidate: Option<Candidate>,
    /// Last conclusion about the candidate.
    pub(crate) verdict: Option<Verdict>,
    /// Files in its directory that are no part of it, by the last conclusion.
    pub(crate) apart: BTreeSet<RelPath>,
    /// Contents of which a person said that they are whole.
    pub(crate) told_of: Option<Contents>,
    pub(crate) versions: BTreeMap<Number, VersionBook>,
    /// Indices as they were read.
    pub(crate) indices: BTreeMap<RelPath, ParsedIndex>,
    pub(crate) in_the_way: InTheWay,
}

/// An index that was read once.
#[derive(Debug)]
pub(crate) struct ParsedIndex {
    pub(crate) of: (FileId, SealNumber),
    /// Files that it lists; an error was reported when it was read.
    pub(crate) covered: Result<Arc<Covered>, ()>,
}

/// A version: its state by the rules, and what the loop keeps to move it.
#[derive(Debug)]
pub(crate) struct VersionBook {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) contents: Contents,
    pub(crate) previous: Option<VersionRef>,
    /// Progress so far, and the pins of the files that are left. None while a running job has it.
    pub(crate) attempt: Option<Box<Attempt>>,
    /// Why the last try failed, until the next.
    pub(crate) trouble: Option<String>,
    /// Manifest that its marker names, and the epoch.
    pub(crate) committed: Option<(Arc<Manifest>, Epoch)>,
}

impl VersionBook {
    /// Returns a version for which nothing else has to be kept.
    pub(crate) fn new(checkpoint: Checkpoint, contents: Contents) -> Self {
        Self { checkpoint, contents, previous: None, attempt: None, trouble: None, committed: None }
    }

    pub(crate) fn record(&self) -> &Record {
        self.checkpoint.record()
    }

    /// Returns the checkpoint that its files formed in the tree. Costs some patterns for each file.
    pub(crate) fn candidate(&self, rules: &Rules, id: &CheckpointId) -> Option<Candidate> {
        rules.group(self.contents.keys()).candidates.into_iter().find(|candidate| candidate.id == *id)
    }

    pub(crate) fn manifest(&self) -> Option<&Arc<Manifest>> {
        self.committed.as_ref().map(|(manifest, _)| manifest)
    }

    /// Returns the bytes that must be uploaded before it is prepared.
    pub(crate) fn bytes_left(&self) -> u64 {
        match &self.attempt {
            Some(attempt) => attempt.bytes_left(),
            // A job has the attempt, and does not report its progress.
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

    /// Returns the newest version that is, or may become, committed.
    pub(crate) fn newest(&self) -> Option<(&Number, &VersionBook)> {
        self.standing().next()
    }

    /// Like [`Self::newest`], but skips a version that only keeps a part of a cut save, or files beside a committed version.
    pub(crate) fn newest_save(&self) -> Option<(&Number, &VersionBook)> {
        self.standing()
            .find(|(number, version)| !version.record().partial && !self.keeps_beside(**number, version))
    }

    /// Whether a version holds all of the committed one before it, and more files that nothing proves to be whole.
    fn keeps_beside(&self, number: Number, version: &VersionBook) -> bool {
        let proven = version.checkpoint.is_proven() || version.checkpoint.is_committed();
        let adds = |whole: &VersionBook| {
            whole.contents.len() < version.contents.len() && is_covered(&whole.contents, &version.contents)
        };
        !proven && self.committed().is_some_and(|(at, whole)| *at < number && adds(whole))
    }

    /// Whether the newest committed version holds all of `present`, and nothing newer stands.
    pub(crate) fn is_committed_with(&self, shared: &Shared, present: &Contents) -> bool {
        self.committed().is_some_and(|(number, version)| {
            is_covered(present, &version.contents) && !self.is_superseded(shared, *number)
        })
    }

    /// Returns the versions that are, or may become, committed, the newest first.
    fn standing(&self) -> impl Iterator<Item = (&Number, &VersionBook)> {
        let stands = |checkpoint: &Checkpoint| checkpoint.is_alive() || checkpoint.is_committed();
        self.versions.iter().rev().filter(move |(_, version)| stands(&version.checkpoint))
    }

    /// Returns the newest version that holds all of `present` and is committed, may be committed, or cannot be read any more. None if
    /// a restart would show a newer version instead.
    pub(crate) fn covering(&self, shared: &Shared, present: &Contents) -> Option<(&Number, &VersionBook)> {
        let found = self.versions.iter().rev().find(|(_, version)| {
            let checkpoint = &version.checkpoint;
            let stands =
                checkpoint.is_alive() || checkpoint.is_committed() || checkpoint.why_unreadable().is_some();
            stands && is_covered(present, &version.contents)
        });
        found.filter(|(number, _)| !self.is_superseded(shared, **number))
    }

    /// Whether a newer version is committed or about to be, and its bytes can be read. A start with empty memory would show that version.
    /// So when a file is renamed back, its content becomes a new version.
    pub(crate) fn is_superseded(&self, shared: &Shared, number: Number) -> bool {
        let newer = self.versions.range((Bound::Excluded(number), Bound::Unbounded));
        newer.map(|(_, version)| &version.checkpoint).any(|checkpoint| {
            checkpoint.is_committed() && shared.why_lost(checkpoint.record()).is_none()
                || checkpoint.is_alive() && checkpoint.is_proven()
        })
    }

    /// Returns the newest committed version of this checkpoint.
    pub(crate) fn committed(&self) -> Option<(&Number, &VersionBook)> {
        self.versions.iter().rev().find(|(_, version)| version.checkpoint.is_committed())
    }

    /// Returns the newest version that was complete in the tree, in Tier-3 already or not. Files that differ from it were written since.
    pub(crate) fn newest_whole(&self) -> Option<(&Number, &VersionBook)> {
        // The bytes of an aborted version may have been lost with the memory they were in.
        let was_whole = |checkpoint: &Checkpoint| {
            checkpoint.is_committed() || checkpoint.is_proven() && !checkpoint.is_aborted()
        };
        self.versions.iter().rev().find(|(_, version)| was_whole(&version.checkpoint))
    }

    /// Returns the newest version whose commit cannot be read from Tier-3 any more.
    pub(crate) fn unreadable(&self) -> Option<(&Number, &VersionBook)> {
        self.versions.iter().rev().find(|(_, version)| version.checkpoint.why_unreadable().is_some())
    }

    /// Whether a version of it is on its way, or waits because content of others stood in the way of the last one.
    pub(crate) fn is_tried(&self) -> bool {
        let moves = |checkpoint: &Checkpoint| {
            checkpoint.is_alive() && (checkpoint.is_proven() || !checkpoint.is_prepared())
        };
        self.checkpoints().any(moves) || self.in_the_way.why().is_some()
    }

    /// Returns the number that the next version takes: above every number ever used, decided or not.
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

    /// Returns the versions as the rules see them.
    pub(crate) fn checkpoints(&self) -> impl Iterator<Item = &Checkpoint> + Clone {
        self.versions.values().map(|version| &version.checkpoint)
    }

    /// Returns a person's word about exactly the content that the tree holds now. A word about other bytes counts for nothing.
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

    /// Whether the content is committed as it stands, so that only a change of it could make another version.
    pub(crate) fn is_at_rest(&self) -> bool {
        let whole = matches!(self.verdict, None | Some(Verdict::Complete { .. }));
        whole && self.newest().is_some_and(|(_, version)| version.checkpoint.is_committed())
    }

    /// Whether it can never be complete as it is: torn, or broken.
    pub(crate) fn is_torn(&self) -> bool {
        self.verdict.as_ref().is_some_and(is_damage)
    }

    /// Whether files are missing, and no process is left to bring them.
    pub(crate) fn is_kept_without_proof(&self) -> bool {
        matches!(self.verdict, Some(Verdict::Incomplete { kept_at_ns: Some(_), .. }))
    }

    /// Returns the newest version whose contents are known, if the tree has nothing of the checkpoint any more.
    pub(crate) fn removed(&self) -> Option<&VersionBook> {
        let held = || self.versions.values().rev().find(|version| !version.contents.is_empty());
        if self.candidate.is_none() { held() } else { None }
    }

    /// Returns the checkpoint's path, relative to the mount.
    pub(crate) fn path(&self) -> Vec<u8> {
        tidemark_protocol::key::checkpoint_path(&self.id.run, &self.id.directory)
    }
}

/// Whether a verdict says that the checkpoint can never be complete.
pub(crate) fn is_damage(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Torn { .. } | Verdict::Broken { .. })
}

/// Returns the reference by which another marker names a version.
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
    /// Bytes that this generation holds.
    pub(crate) of: Option<(FileId, SealNumber)>,
    /// The newest generation whose sidecar was read or written.
    pub(crate) described: Option<Generation>,
    /// The newest generation that all writers had closed, as far as this daemon knows.
    pub(crate) closed: Option<Generation>,
    /// Since when Tier-3 is known to lack some of its bytes.
    pub(crate) lacking: Option<Instant>,
    /// The last read of its bytes during which they might have been written.
    pub(crate) read: Option<Read>,
    /// Duration of the last upload.
    pub(crate) took: Duration,
    /// Objects of the last generation that arrived in Tier-3, if the next one may share some of them.
    pub(crate) stored: Option<Arc<LooseStored>>,
    /// Attributes in the sidecar of the newest generation.
    pub(crate) attributes: Attributes,
    /// Whether the start could not put it into the tree: its name is missing, but was not removed.
    pub(crate) unshown: bool,
}

/// A read of bytes that might change meanwhile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Read {
    pub(crate) at: Instant,
    pub(crate) node: NodeId,
    /// How far the bytes reached; none if a write at that very moment would not show.
    pub(crate) reach: Option<Reach>,
    /// Whether the bytes are in Tier-3.
    pub(crate) arrived: bool,
}

/// Progress of a loose file towards Tier-3.
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

    /// Returns the newest committed version of a run.
    pub(crate) fn watermark(self, run: &RunPath) -> Option<&'a Checkpoint> {
        lineage::watermark(run_of(self.ledger, run))
    }

    /// Returns the committed version of the run that a new one follows.
    pub(crate) fn previous(self, run: &RunPath) -> Option<VersionRef> {
        self.watermark(run).map(reference)
    }

    /// Returns the run that `latest` refers to: the named run, or the only one. `None`: nothing of it is committed.
    ///
    /// # Errors
    /// Fails if no run is named, and several runs have committed checkpoints.
    pub(crate) fn run_of_latest(self, run: Option<&[u8]>) -> Result<Option<&'a RunPath>, ApiError> {
        let mut runs = self.runs_with_commits(run);
        if runs.len() > 1 {
            let names = runs.iter().map(ToString::to_string);
            return Err(several("several runs have checkpoints", names, "name one as RUN@latest"));
        }
        Ok(runs.pop_first())
    }

    /// Returns the newest committed checkpoint of a run, whether the tree shows it or not.
    pub(crate) fn newest_committed_of(self, run: &RunPath) -> Option<&'a Book> {
        let of_run = self.ledger.books.values().filter(|book| book.id.run == *run);
        let committed = of_run.filter_map(|book| Some((book.committed()?.1.record(), book)));
        committed.max_by_key(|(record, _)| lineage::order_to_resume(record)).map(|(_, book)| book)
    }

    pub(crate) fn book_of(self, record: &Record) -> Option<&'a Book> {
        let (run, directory) = (record.version.run.clone(), record.version.directory.clone());
        self.ledger.books.get(&CheckpointId { run, directory })
    }

    /// Returns the runs, or the named one, with a committed checkpoint in the tree. If there are none, returns those with a committed
    /// checkpoint that a job removed.
    fn runs_with_commits(self, run: Option<&[u8]>) -> BTreeSet<&'a RunPath> {
        let committed = || self.books_of(run).filter(|book| book.committed().is_some());
        let in_tree: BTreeSet<_> =
            committed().filter(|book| book.candidate.is_some()).map(|book| &book.id.run).collect();
        if in_tree.is_empty() { committed().map(|book| &book.id.run).collect() } else { in_tree }
    }

    /// Returns the checkpoints with this step, of one run or of all.
    pub(crate) fn at_step(self, run: Option<&'a [u8]>, step: u64) -> impl Iterator<Item = &'a Book> {
        self.books_of(run).filter(move |book| step_of(book).is_some_and(|found| found.0 == step))
    }

    /// Returns the books of one run, named by its path or as `ls` shows it, or of all.
    fn books_of(self, run: Option<&[u8]>) -> impl Iterator<Item = &'a Book> {
        self.ledger.books.values().filter(move |book| run.is_none_or(|run| is_run(&book.id.run, run)))
    }

    /// Returns the number that the next version of a checkpoint takes.
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

    /// Returns the newest generation of a path that Tier-3 may have whole; none while nothing of it is known.
    pub(crate) fn newest_arrived(self, path: &RelPath) -> Option<Generation> {
        let book = self.ledger.loose.get(path).or_else(|| self.ledger.removed_loose.get(path))?;
        let newest = book.generation?;
        match book.stage {
            LooseStage::Uploading => newest.0.checked_sub(1).map(Generation),
            LooseStage::Idle | LooseStage::Waiting { .. } | LooseStage::Uploaded { .. } => Some(newest),
        }
    }

    /// Returns the last generation of a loose file that is not in the tree any more.
    pub(crate) fn removed_generation(self, path: &RelPath) -> Option<Generation> {
        self.ledger.removed_loose.get(path)?.generation
    }
}

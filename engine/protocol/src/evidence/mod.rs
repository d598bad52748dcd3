//! The verdict on a candidate checkpoint: whether it is complete, on one node, and by which evidence.
//!
//! Owns: the verdict, a pure function of the candidate's files, the knowledge of their writers, the indices, and the time. Does not own:
//! grouping (`recognise`), the record (`record`), the consequences of the verdict (`checkpoint`).
//!
//! Trackers are not evidence: DeepSpeed's `latest` was seen before a rank's file existed.

mod apart;
mod dcp_metadata;
mod doubt;
mod filled;
mod index;
mod megatron_integrity;
mod names;
mod over;
mod read_index;
mod safetensors_index;
mod writer;

pub use crate::recognise::PARTS;
pub use apart::judge;
pub use filled::believed;
pub use index::{Covered, IndexError, MAX_INDEX_BYTES, MAX_INDEX_FILES};
use names::ByName;
pub use over::Before;
pub use read_index::parse_index;
pub use writer::{Fate, Writer, have_ended_well};

use crate::file::FileState;
use crate::path::RelPath;
use crate::recognise::{Candidate, IndexKind, MarkerBy, Role, Rule, Rules, Shape};
use crate::record::Evidence;
use crate::visibility::{self, Content, Ends, Names, Seen, Standing};
use std::collections::{BTreeMap, BTreeSet};

/// The rules of plain files.
const FILES: &str = "torch_save";
const OTHER_FILES: &str = "file";

/// Time without any event after which a checkpoint without better evidence counts as settled.
pub const SETTLE_NS: i64 = 5_000_000_000;
/// The facts about one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileFact {
    pub state: FileState,
    pub size_bytes: u64,
    /// When the first of its last writers opened it.
    pub opened_at_ns: i64,
    /// When the bytes last got the name: the later of the last close and the last rename. Any clock, the same as `now_ns`.
    pub published_at_ns: i64,
    /// When the last writer released the file: no earlier than the last close, and much later if a mapping stayed.
    pub closed_at_ns: i64,
    /// Whether a rename(2) vouches for the bytes.
    pub vouched: bool,
    /// The verdict of the file's format on its bytes.
    pub content: Content,
    /// The reason for `content` in a sentence; empty if the content was not read.
    pub content_reason: String,
    /// Whether the last committed version of the checkpoint holds these bytes under this name.
    pub committed: bool,
    /// Comparison of these bytes with those that the newest complete version holds under this name.
    pub before: Before,
    /// Whether the file was cut and a record in Tier-3 of exactly these bytes expresses doubt: its author knew of no writer that was
    /// killed.
    pub doubted: bool,
    /// The processes that had it open for writing since it was last sealed.
    pub writers: Vec<Writer>,
}

impl FileFact {
    /// Whether the file was cut, and neither a rename nor its own structure proves it whole.
    fn is_cut(&self) -> bool {
        self.state == FileState::Cut && !self.vouched && self.content != Content::Whole
    }

    /// Whether all writers are known to have ended with status 0.
    fn ended_well(&self) -> bool {
        !self.writers.is_empty() && self.writers.iter().all(|writer| writer.fate == Fate::Exited)
    }

    /// Whether no writer of a cut file failed or was killed, as far as is known now or was when the doubt was recorded.
    fn was_left_well(&self) -> bool {
        let knows_better = |writer: &Writer| !matches!(writer.fate, Fate::Exited | Fate::Gone);
        self.ended_well() || self.doubted && !self.writers.iter().any(knows_better)
    }
}

/// Whether a person vouches for the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Told {
    #[default]
    No,
    /// `ckptctl flush --wait`. A checkpoint with a marker, an index or a count still waits for it. Only one with fewer files than the
    /// version before waits for the settle time.
    Flush,
    /// `ckptctl commit` or the attribute: complete as it is, once closed.
    Commit,
}

/// The session's previous complete version of the same run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    pub framework: String,
    /// The version's names with steps masked, as [`masked_names`] returns them.
    pub names: BTreeSet<String>,
    pub world_size: Option<u64>,
    /// The processes that wrote the version.
    pub processes: BTreeSet<(u32, u64)>,
    pub session: String,
}

/// The nearest older checkpoint of the same run and rule, whole or not, if it has more files: this one may still lack some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Older {
    pub files: usize,
    /// Number of those files that every rank writes one of.
    pub ranks: usize,
}

/// The facts on which a verdict rests.
#[derive(Debug, Clone)]
pub struct Facts<'a> {
    pub files: &'a BTreeMap<RelPath, FileFact>,
    /// Every index of the candidate that is closed, as [`parse_index`] read it.
    pub indices: &'a BTreeMap<RelPath, Result<Covered, IndexError>>,
    pub told: Told,
    pub history: Option<&'a History>,
    pub older: Option<Older>,
    /// Every writer of this version has begun a later one.
    pub succeeded: bool,
    /// Names that the last committed version of this checkpoint had, and that its job has removed since.
    pub removed: &'a BTreeSet<RelPath>,
    /// Number of names in the newest complete version; 0 without one.
    pub names_before: usize,
    /// When the checkpoint's directory got its name by rename; `None` if it was made under this name, or is no directory.
    pub renamed_at_ns: Option<i64>,
    /// Time for which nothing must have happened; [`SETTLE_NS`] unless configured.
    pub settle_ns: i64,
}

/// Whether a checkpoint is complete. Each verdict gives its reason for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All files are there.
    Complete { evidence: Evidence, detail: String },
    /// Nothing happens any more, but nothing proves that all files are there: the record is provisional, and never committed.
    /// `undecided`: something speaks against the checkpoint.
    Settled { detail: String, undecided: bool },
    /// Judge again after the next event, or at `again_at_ns` if only time is missing.
    Open { why: String, again_at_ns: Option<i64> },
    /// An index is closed and has to be read first.
    ReadIndex { path: RelPath, kind: IndexKind },
    /// Files are known to be missing. If no writer is left to bring them, the checkpoint is kept as it is from `kept_at_ns` on, without a
    /// commit. `undecided`: it is not known how its writers ended.
    Incomplete { missing: Vec<String>, why: String, kept_at_ns: Option<i64>, undecided: bool },
    /// The checkpoint can never be complete: a writer was killed or failed while files were missing, or while it had a file open.
    Torn { why: String },
    /// A file contradicts its own format: never committed, whatever else is proven. If no trainer wrote the checkpoint, it is kept as it
    /// is from `kept_at_ns` on.
    Broken { why: String, kept_at_ns: Option<i64> },
}

impl Verdict {
    /// Whether something speaks against a checkpoint that is kept without a commit.
    #[must_use]
    pub fn is_doubt(&self) -> bool {
        match self {
            Self::Broken { .. } => true,
            Self::Settled { undecided, .. } | Self::Incomplete { undecided, .. } => *undecided,
            Self::Complete { .. } | Self::Open { .. } | Self::ReadIndex { .. } | Self::Torn { .. } => false,
        }
    }

    /// Returns the time from which on the files are kept without a commit, and why.
    #[must_use]
    pub fn kept_from(&self) -> Option<(i64, &str)> {
        match self {
            Self::Settled { detail, .. } => Some((i64::MIN, detail)),
            Self::Incomplete { why, kept_at_ns, .. } | Self::Broken { why, kept_at_ns } => {
                kept_at_ns.map(|at_ns| (at_ns, why.as_str()))
            }
            Self::Complete { .. } | Self::Open { .. } | Self::ReadIndex { .. } | Self::Torn { .. } => None,
        }
    }
}

/// Returns the verdict on one candidate at `now_ns`.
#[must_use]
pub fn complete(rules: &Rules, candidate: &Candidate, facts: &Facts<'_>, now_ns: i64) -> Verdict {
    judge(rules, candidate, facts, now_ns).0
}

/// Returns the names of a version relative to its run, with the digits of steps masked, to compare versions of one job.
#[must_use]
pub fn masked_names<'a>(
    candidate: &Candidate,
    paths: impl IntoIterator<Item = &'a RelPath>,
) -> BTreeSet<String> {
    let step = candidate.step.map(|step| step.to_string());
    let mask = |path: &RelPath| {
        let text = candidate.id.run.below(path).map_or_else(|| path.to_string(), |path| path.to_string());
        // Zero padding goes with the digits, so that iter_0000099 and iter_0000100 are one name.
        match &step {
            Some(step) => {
                text.replace(step.as_str(), "#").replace("0#", "#").replace("0#", "#").replace("0#", "#")
            }
            None => text,
        }
    };
    paths.into_iter().map(mask).collect()
}

/// The finding of one kind of evidence.
enum Finding {
    /// The rule has no such evidence.
    Silent,
    Proves(Evidence, String),
    Missing(Vec<String>, String),
    Read(RelPath, IndexKind),
}

impl Finding {
    fn missing(&self) -> Option<(Vec<String>, String)> {
        match self {
            Self::Missing(names, why) => Some((names.clone(), why.clone())),
            Self::Silent | Self::Proves(..) | Self::Read(..) => None,
        }
    }
}

struct Case<'a> {
    rules: &'a Rules,
    candidate: &'a Candidate,
    facts: &'a Facts<'a>,
    now_ns: i64,
}

impl Case<'_> {
    fn verdict(&self) -> Verdict {
        if let Some(waiting) = self.unfinished() {
            return waiting;
        }
        let names = ByName { case: self };
        let index = match names.index() {
            Finding::Read(path, kind) => return Verdict::ReadIndex { path, kind },
            other => other,
        };
        // The writer of a cut file never declared it whole; its bytes need not prove more.
        if let Some(torn) = self.cut(&index) {
            return torn;
        }
        if let Some(broken) = self.broken() {
            return broken;
        }
        // Without these nothing is complete, whatever else is proven.
        let needed = [self.in_flight(), index, self.marker(), names.each_rank()];
        if let Some(missing) = needed.iter().find_map(Finding::missing) {
            return self.unproven(Some(missing));
        }
        let [_, index, marker, each_rank] = needed;
        // A proof that all names exist proves nothing about the bytes of a file.
        let left_open = self.left_open(&index);
        let mut unproven = None;
        for finding in [self.renamed(), marker, index, names.rank_markers(), each_rank, names.count()] {
            match finding {
                Finding::Proves(evidence, detail) => {
                    return left_open.unwrap_or_else(|| self.proven(evidence, detail));
                }
                Finding::Missing(names, why) => unproven = unproven.or(Some((names, why))),
                Finding::Silent | Finding::Read(..) => {}
            }
        }
        match left_open.filter(|_| unproven.is_none()) {
            Some(undecided) => undecided,
            None => self.unproven(unproven),
        }
    }

    /// Judges a checkpoint that nothing proves to be whole; `missing`: what it is known to lack.
    fn unproven(&self, missing: Option<(Vec<String>, String)>) -> Verdict {
        if self.facts.told == Told::Commit {
            return Verdict::Complete { evidence: Evidence::Told, detail: "an administrator said so".into() };
        }
        match missing {
            Some((missing, why)) => self.lacking(missing, why),
            None => self.without_proof(),
        }
    }

    /// Doubts a file that a program still had open when it ended with status 0: another thread may have been writing it.
    fn left_open(&self, index: &Finding) -> Option<Verdict> {
        let mut cut = self.cut_files(index).into_iter().filter(|_| self.facts.told != Told::Commit);
        let (path, _) = cut.find(|found| !self.is_settled_by(index, *found))?;
        let detail = format!(
            "who wrote {path} ended well without closing it, and its bytes do not say whether it is whole"
        );
        Some(self.doubt(detail))
    }

    /// Gives the verdict when something speaks against the checkpoint and no more is known.
    fn doubt(&self, detail: String) -> Verdict {
        if self.quiet() { Verdict::Settled { detail, undecided: true } } else { self.wait(&detail) }
    }

    /// Judges a checkpoint whose names are known to be missing in part.
    fn lacking(&self, missing: Vec<String>, why: String) -> Verdict {
        let ends = self.ends();
        let standing = visibility::standing(Seen {
            ends,
            names: Names::Lacking,
            content: Content::Unknown,
            cut: false,
            trainer: self.is_of_a_trainer(),
            layout: !matches!(self.candidate.framework.as_str(), PARTS | FILES | OTHER_FILES),
        });
        let ended = match ends {
            Ends::Living => return Verdict::Incomplete { missing, why, kept_at_ns: None, undecided: false },
            Ends::Well => "every writer ended well".to_owned(),
            Ends::Failed { process } => format!("process {process}, which wrote it, was killed or failed"),
            Ends::Unknown => match self.writers().find(|w| matches!(w.fate, Fate::Killed | Fate::Failed)) {
                Some(late) => {
                    format!("process {} was killed or failed long after its last file", late.process.0)
                }
                None => "every writer is gone, and how they ended is not known".to_owned(),
            },
        };
        let why = format!("{ended}, and {why}");
        match standing {
            Standing::Torn => Verdict::Torn { why },
            _ => Verdict::Incomplete {
                missing,
                why,
                kept_at_ns: Some(self.quiet_at_ns()),
                undecided: standing == Standing::Undecided,
            },
        }
    }

    fn ends(&self) -> Ends {
        let crew: Vec<_> = self.crew().collect();
        let any = |fates: &[Fate]| crew.iter().any(|writer| fates.contains(&writer.fate));
        if any(&[Fate::Alive, Fate::Ended]) {
            return Ends::Living;
        }
        if let Some(writer) = self.first_early(crew.iter().copied()) {
            return Ends::Failed { process: writer.process.0 };
        }
        if any(&[Fate::Killed, Fate::Failed, Fate::Gone]) || crew.is_empty() {
            return Ends::Unknown;
        }
        Ends::Well
    }

    /// Whether a launcher gave a rank to a writer, or a writer wrote the version before, too.
    fn is_of_a_trainer(&self) -> bool {
        let before = self.facts.history.map(|history| &history.processes);
        let wrote_before = |writer: &Writer| before.is_some_and(|before| before.contains(&writer.process));
        self.writers().any(|writer| writer.rank.is_some() || wrote_before(writer))
    }

    /// Whether a copy of a model's parts failed: `cp -a` ends with 1 if it could not keep an attribute.
    fn is_a_copy_that_failed(&self) -> bool {
        let killed = self.writers().any(|writer| writer.fate == Fate::Killed);
        matches!(self.ends(), Ends::Failed { .. })
            && !killed
            && !self.is_of_a_trainer()
            && self.candidate.framework == PARTS
    }

    fn broken(&self) -> Option<Verdict> {
        let broken = self.present().find(|(_, _, fact)| fact.content == Content::Broken);
        broken.map(|(path, _, fact)| Verdict::Broken {
            why: format!("{path} contradicts its own format: {}", fact.content_reason),
            kept_at_ns: (!self.is_of_a_trainer()).then(|| self.quiet_at_ns()),
        })
    }

    /// Judges proven evidence. If the evidence names every file and the rule says that nothing follows, no time is needed. Otherwise the
    /// settle time keeps later files (an optimizer's state after the index of the model) in the same version.
    fn proven(&self, evidence: Evidence, detail: String) -> Verdict {
        // A count of ranks proves nothing about later files, such as objects that a user registered with Accelerate.
        let counted = evidence == Evidence::Count && self.rule().is_some_and(Rule::more_follows);
        // A job with another number of ranks writes another number of files.
        let ranks = self.candidate.ranks();
        let older = self.facts.older.filter(|older| ranks > 0 && older.ranks == ranks);
        if let Some(fewer) = self.fewer_than(older).filter(|_| counted) {
            if let Some(writer) = self.failed_early() {
                return Verdict::Torn { why: format!("process {} failed at {fewer}", writer.process.0) };
            }
            if !self.is_over() {
                return self.wait(&format!("{detail}, but only {fewer}; waiting for the settle time"));
            }
        }
        if self.is_last(evidence) || self.facts.told != Told::No || self.quiet() || self.facts.succeeded {
            return Verdict::Complete { evidence, detail };
        }
        self.wait(&format!("{detail}; waiting for the settle time, in case more follows"))
    }

    /// Whether nothing follows such evidence.
    fn is_last(&self, evidence: Evidence) -> bool {
        let last = match evidence {
            Evidence::Marker => true,
            Evidence::Index => {
                self.candidate.shape == Shape::Flat || ByName { case: self }.index_lies_on_top()
            }
            Evidence::Count => self.candidate.shape == Shape::Family,
            _ => false,
        };
        last && !self.rule().is_some_and(Rule::more_follows)
    }

    /// Judges a checkpoint that no rule proves: by the session's history, its size, the administrator and time.
    fn without_proof(&self) -> Verdict {
        if self.facts.succeeded {
            let detail = "every writer has begun a later checkpoint".into();
            return Verdict::Complete { evidence: Evidence::Succeeded, detail };
        }
        // An exception closes files on its way out. If the bytes do not prove themselves whole, only the end of the process shows this,
        // moments later. A killing signal closes nothing: whatever was closed by then, the program had closed.
        let untold = self.stands_alone() && self.present().any(|(_, _, fact)| fact.content != Content::Whole);
        let failed = self.failed_early().filter(|writer| untold && writer.fate == Fate::Failed);
        if let Some(writer) = failed {
            let process = writer.process.0;
            let detail = format!(
                "process {process}, which wrote it, failed before the settle time had passed, and its bytes do not say \
                 whether it is whole"
            );
            return self.doubt(detail);
        }
        if let Some(detail) = self.history().filter(|_| !untold || self.quiet()) {
            return Verdict::Complete { evidence: Evidence::History, detail };
        }
        let alone = self.one_process();
        // A file by itself is whole once closed, and so is a checkpoint that its only process marked as done. For any other directory it
        // is unknown what was still to come.
        let whole = self.stands_alone() || alone && self.is_marked();
        if let Some(writer) = self.failed_early().filter(|_| !whole) {
            let process = writer.process.0;
            let why = format!("process {process}, which wrote it, failed before the settle time had passed");
            // The job may have renamed the directory before the failure; then it was whole.
            return match self.renamed_at_ns() {
                Some(_) => self.doubt(format!("{why}, and it was renamed since")),
                None => Verdict::Torn { why },
            };
        }
        let fewer = self.fewer_than(self.facts.older).filter(|_| !whole);
        let doubted = fewer.is_some() || !whole && self.writers().any(|writer| writer.fate == Fate::Ended);
        if self.facts.told == Told::Flush && (self.is_over() || !doubted) {
            return Verdict::Complete { evidence: Evidence::Told, detail: "flush was asked for".into() };
        }
        if !self.quiet() {
            let fewer = fewer.map_or_else(String::new, |fewer| format!(", but only {fewer}"));
            return self.wait(&format!("all files are closed{fewer}; waiting for the settle time"));
        }
        if alone {
            let detail =
                "the only process that wrote it closed every file, and the settle time passed".into();
            return Verdict::Complete { evidence: Evidence::OneProcess, detail };
        }
        Verdict::Settled {
            detail: "nothing happens any more, and nothing proves that every rank wrote".into(),
            undecided: false,
        }
    }

    /// Returns in words that there are fewer files than in `older` or in the version before, unless this is known to be intended.
    fn fewer_than(&self, older: Option<Older>) -> Option<String> {
        if self.facts.told == Told::Commit || self.facts.succeeded {
            return None;
        }
        let history = self.facts.history.filter(|history| {
            history.framework == self.candidate.framework && history.world_size == self.world_size()
        });
        let before = history.map(|history| history.names.len()).max(older.map(|older| older.files))?;
        let here = self.candidate.files.len();
        (here < before).then(|| format!("{here} files, and the version before has {before}"))
    }

    /// Returns a writer that was killed or failed before the settle time had passed.
    fn failed_early(&self) -> Option<&Writer> {
        self.first_early(self.writers())
    }

    fn first_early<'w>(&self, mut writers: impl Iterator<Item = &'w Writer>) -> Option<&'w Writer> {
        let quiet_at_ns = self.quiet_at_ns();
        writers.find(|writer| writer.failed_before(quiet_at_ns))
    }

    /// Whether the file that the saving process writes last exists and was written last.
    fn is_marked(&self) -> bool {
        let last = self.present().max_by_key(|(_, role, fact)| (fact.published_at_ns, *role == Role::Marker));
        last.is_some_and(|(_, role, _)| role == Role::Marker)
    }

    fn wait(&self, why: &str) -> Verdict {
        Verdict::Open { why: why.to_owned(), again_at_ns: Some(self.quiet_at_ns()) }
    }

    fn quiet_at_ns(&self) -> i64 {
        let last = self.present().map(|(_, _, fact)| fact.published_at_ns.max(fact.closed_at_ns)).max();
        let last = last.unwrap_or(self.now_ns);
        last.saturating_add(self.facts.settle_ns)
    }

    fn has_settled(&self) -> bool {
        self.now_ns >= self.quiet_at_ns()
    }

    /// Whether nothing more comes, as far as time shows: a file in flight without a live writer stays in flight.
    fn is_over(&self) -> bool {
        let finish = || self.writers().any(|writer| writer.fate == Fate::Alive);
        self.has_settled() && (self.candidate.temporaries.is_empty() || !finish())
    }

    fn quiet(&self) -> bool {
        self.has_settled() && self.candidate.temporaries.is_empty()
    }

    fn present(&self) -> impl Iterator<Item = (&RelPath, Role, &FileFact)> {
        (self.candidate.files.iter())
            .filter_map(|(path, role)| self.facts.files.get(path).map(|fact| (path, *role, fact)))
    }

    /// Returns the writers of the present files. Committed files are whole, whoever wrote them, and are left out.
    fn writers(&self) -> impl Iterator<Item = &Writer> {
        let fresh = self.present().filter(|(_, _, fact)| !fact.committed);
        fresh.flat_map(|(_, _, fact)| &fact.writers)
    }

    /// Returns a verdict unless every file is closed, which is required in any case.
    fn unfinished(&self) -> Option<Verdict> {
        let open = |why: String| Some(Verdict::Open { why, again_at_ns: None });
        if self.candidate.files.is_empty() {
            return open("it has no files".into());
        }
        for path in self.candidate.files.keys() {
            let Some(fact) = self.facts.files.get(path) else {
                return open(format!("nothing is known of {path} yet"));
            };
            match fact.state {
                FileState::Open { writers } => {
                    return open(format!("{path} is open for writing ({writers} handles)"));
                }
                FileState::Mapped => return open(format!("{path} is still mapped for writing")),
                FileState::Closed | FileState::Cut | FileState::Sealed { .. } => {}
            }
        }
        None
    }

    /// Returns the cut files that neither a rename, nor an index, nor their own structure proves whole.
    fn cut_files(&self, index: &Finding) -> Vec<(&RelPath, &FileFact)> {
        let proven = matches!(index, Finding::Proves(..));
        let exact =
            |path: &RelPath, fact: &FileFact| proven && self.exact_size(path) == Some(fact.size_bytes);
        let present = self.present().map(|(path, _, fact)| (path, fact));
        present.filter(|(path, fact)| fact.is_cut() && !exact(path, fact)).collect()
    }

    /// Returns torn for a cut file, unless all its writers are known to have ended with status 0: many programs leave closing to their
    /// end.
    fn cut(&self, index: &Finding) -> Option<Verdict> {
        let (path, fact) = self.cut_files(index).into_iter().find(|(_, fact)| !fact.was_left_well())?;
        if fact.writers.iter().any(|writer| writer.fate == Fate::Ended) {
            let why = format!("how the writer of {path} ended is not known yet");
            return Some(Verdict::Open { why, again_at_ns: None });
        }
        Some(Verdict::Torn { why: format!("the writer of {path} was killed while it was open") })
    }

    fn exact_size(&self, path: &RelPath) -> Option<u64> {
        self.facts.indices.iter().find_map(|(index, covered)| {
            let relative = below_parent(index, path)?;
            *covered.as_ref().ok()?.get(&relative)?
        })
    }

    fn rule(&self) -> Option<&Rule> {
        self.rules.rule(&self.candidate.framework)
    }

    /// Reports a directory whose name, or a file beside it or beside one of its files, says that it is not done.
    fn in_flight(&self) -> Finding {
        let name = self.candidate.id.directory.as_bytes();
        if self.rule().is_some_and(|rule| rule.is_in_flight(name)) {
            return Finding::Missing(Vec::new(), "its directory still has its temporary name".into());
        }
        let files = &self.candidate.files;
        let is_filled =
            |path: &RelPath| self.rules.filled_beside(path).is_some_and(|file| files.contains_key(&file));
        let says = |path: &&RelPath| self.rules.unfinished_beside(path).is_some() || is_filled(path);
        match self.candidate.temporaries.iter().find(says) {
            Some(path) => Finding::Missing(Vec::new(), format!("{path} says that it is not finished")),
            None => Finding::Silent,
        }
    }

    /// Returns when the directory got its name, if all its files existed before.
    fn renamed_at_ns(&self) -> Option<i64> {
        let is_renamed = |_: &i64| self.rule().is_some_and(Rule::is_renamed_when_done);
        let renamed_at_ns = self.facts.renamed_at_ns.filter(is_renamed)?;
        // If something changed the directory later, other evidence has to prove it.
        self.present().all(|(_, _, fact)| fact.published_at_ns <= renamed_at_ns).then_some(renamed_at_ns)
    }

    /// Finds a proof in the rename of the directory, if all its files existed before and no writer had failed by then. A rename of what a
    /// killed job left proves nothing.
    fn renamed(&self) -> Finding {
        let Some(renamed_at_ns) = self.renamed_at_ns() else { return Finding::Silent };
        let before = |writer: &&Writer| writer.failed_at_ns.is_none_or(|at_ns| at_ns < renamed_at_ns);
        match self.first_early(self.writers().filter(before)) {
            Some(_) => Finding::Silent,
            None => {
                Finding::Proves(Evidence::Marker, "its directory was renamed when all was written".into())
            }
        }
    }

    fn marker(&self) -> Finding {
        let Some(by) = self.rule().and_then(Rule::marker_by) else { return Finding::Silent };
        // Each item may have its own marker: the last one counts.
        let markers = self.present().filter(|(_, role, _)| *role == Role::Marker);
        let Some((path, _, marker)) = markers.max_by_key(|(_, _, fact)| fact.published_at_ns) else {
            return Finding::Missing(vec!["the marker".into()], "its marker is missing".into());
        };
        if by == MarkerBy::OneRank {
            return Finding::Silent;
        }
        // An index is exempt: its order is checked elsewhere.
        let follows = |role| !matches!(role, Role::Marker | Role::Index(_));
        let later = self
            .present()
            .find(|(_, role, fact)| follows(*role) && fact.published_at_ns > marker.published_at_ns);
        match later {
            Some((other, ..)) => {
                Finding::Missing(Vec::new(), format!("{other} was written after the marker {path}"))
            }
            None => Finding::Proves(Evidence::Marker, format!("{path} was written last")),
        }
    }

    fn world_size(&self) -> Option<u64> {
        self.writers().filter_map(|writer| writer.world_size).max()
    }

    fn history(&self) -> Option<String> {
        let history = self.facts.history?;
        let mut writers = BTreeSet::new();
        for writer in self.writers() {
            if writer.session != history.session || !matches!(writer.fate, Fate::Alive | Fate::Exited) {
                return None;
            }
            writers.insert(writer.process);
        }
        let same = masked_names(self.candidate, self.candidate.files.keys()) == history.names
            && self.world_size() == history.world_size
            && writers == history.processes;
        same.then(|| {
            format!("the same {} names from the same writers as the version before", history.names.len())
        })
    }

    /// Whether the checkpoint is a file of which no other rank writes a part: its name carries no rank, or a number that no rank of its
    /// job has.
    fn stands_alone(&self) -> bool {
        match self.candidate.shape {
            Shape::Single => true,
            Shape::Family => !self
                .candidate
                .files
                .iter()
                .any(|(path, role)| ByName { case: self }.is_one_ranks(path, *role)),
            Shape::Tree | Shape::Flat => false,
        }
    }

    /// Whether one process wrote everything, and no other process of the job has a part to write: either the job has no other process, or
    /// the checkpoint is one file.
    fn one_process(&self) -> bool {
        let one_file = self.stands_alone();
        let mut processes = BTreeSet::new();
        for writer in self.writers() {
            let is_of_many = writer.world_size.is_some_and(|size| size > 1);
            if !writer.environment_seen || is_of_many && !one_file {
                return false;
            }
            processes.insert((&writer.session, writer.process));
        }
        processes.len() == 1
    }
}

/// Returns `path` relative to the directory that `index` lies in.
fn below_parent(index: &RelPath, path: &RelPath) -> Option<RelPath> {
    index.parent().map_or_else(|| Some(path.clone()), |directory| path.below(&directory))
}

#[cfg(test)]
mod tests;

//! Whether a candidate checkpoint is complete, on one node, and by which evidence.
//!
//! Owns: the verdict, a pure function of the candidate's files, what is known of their writers, the indices, and the
//! time. Does not own: grouping (`recognise`), the record (`record`), what follows from the verdict (`checkpoint`).
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

/// How long nothing must have happened before a checkpoint without better evidence counts as settled.
pub const SETTLE_NS: i64 = 5_000_000_000;
/// What is known of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileFact {
    pub state: FileState,
    pub size_bytes: u64,
    /// When the first of its last writers opened it.
    pub opened_at_ns: i64,
    /// When the bytes last got the name: the later of the last close and the last rename. Any clock, the same as
    /// `now_ns`.
    pub published_at_ns: i64,
    /// When its last writer let go of it: no earlier than the last close, and much later where a mapping stayed.
    pub closed_at_ns: i64,
    /// rename(2) vouches for the bytes.
    pub vouched: bool,
    /// What its format says of its bytes.
    pub content: Content,
    /// Why, in a sentence; empty where nobody asked.
    pub content_reason: String,
    /// The last committed version of the checkpoint holds these bytes under this name.
    pub committed: bool,
    /// Compares these bytes with those that the newest complete version holds under this name.
    pub before: Before,
    /// It was cut, and what keeps just these bytes in Tier-3 is doubted: whoever recorded that knew of no writer that was killed.
    pub doubted: bool,
    /// The processes that had it open for writing since it was last sealed.
    pub writers: Vec<Writer>,
}

impl FileFact {
    /// The file was cut, and neither a rename nor its own structure says that it is whole.
    fn is_cut(&self) -> bool {
        self.state == FileState::Cut && !self.vouched && self.content != Content::Whole
    }

    /// All who wrote it are known to have ended with status 0.
    fn ended_well(&self) -> bool {
        !self.writers.is_empty() && self.writers.iter().all(|writer| writer.fate == Fate::Exited)
    }

    /// A cut file: nobody who wrote it failed or was killed, as far as is known now or was when it was recorded.
    fn was_left_well(&self) -> bool {
        let knows_better = |writer: &Writer| !matches!(writer.fate, Fate::Exited | Fate::Gone);
        self.ended_well() || self.doubted && !self.writers.iter().any(knows_better)
    }
}

/// Whether somebody vouches for the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Told {
    #[default]
    No,
    /// `ckptctl flush --wait`: what has a marker, an index or a count still waits for it; only what has fewer files
    /// than the version before waits for the settle time.
    Flush,
    /// `ckptctl commit` or the attribute: complete as it is, once closed.
    Commit,
}

/// The session's previous complete version of the same run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    pub framework: String,
    /// Its names with steps masked, as [`masked_names`] gives them.
    pub names: BTreeSet<String>,
    pub world_size: Option<u64>,
    /// The processes that wrote it.
    pub processes: BTreeSet<(u32, u64)>,
    pub session: String,
}

/// The nearest older checkpoint of the same run and rule, whole or not, where it has more files: this one may still lack some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Older {
    pub files: usize,
    /// How many of them are of those that every rank writes one of.
    pub ranks: usize,
}

/// What a verdict rests on.
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
    /// Names that the last committed version of this checkpoint had, and that its job took away since.
    pub removed: &'a BTreeSet<RelPath>,
    /// How many names the newest complete version has; 0 without one.
    pub names_before: usize,
    /// When the checkpoint's directory got its name by rename; `None` where it was made under it, or is no directory.
    pub renamed_at_ns: Option<i64>,
    /// How long nothing must have happened; [`SETTLE_NS`] unless configured.
    pub settle_ns: i64,
}

/// Whether a checkpoint is complete. Each says why, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All of it is there.
    Complete { evidence: Evidence, detail: String },
    /// Nothing happens any more, and nothing proves that all of it is there: a provisional record, never a commit.
    /// `undecided`: something speaks against it.
    Settled { detail: String, undecided: bool },
    /// Ask again when something happens, or at `again_at_ns` when only time is missing.
    Open { why: String, again_at_ns: Option<i64> },
    /// This index is closed and has to be read first.
    ReadIndex { path: RelPath, kind: IndexKind },
    /// Files are known to be missing. Where nobody is left to bring them, it is kept as it is from `kept_at_ns` on, without a
    /// commit. `undecided`: then nobody knows how who wrote it ended.
    Incomplete { missing: Vec<String>, why: String, kept_at_ns: Option<i64>, undecided: bool },
    /// It can never be complete: a writer was killed or failed while files are missing, or while it had one open.
    Torn { why: String },
    /// A file contradicts its own format: never committed, whatever else is proven. What no trainer wrote is kept as it is from
    /// `kept_at_ns` on.
    Broken { why: String, kept_at_ns: Option<i64> },
}

impl Verdict {
    /// Whether something speaks against what is kept without a commit.
    #[must_use]
    pub fn is_doubt(&self) -> bool {
        match self {
            Self::Broken { .. } => true,
            Self::Settled { undecided, .. } | Self::Incomplete { undecided, .. } => *undecided,
            Self::Complete { .. } | Self::Open { .. } | Self::ReadIndex { .. } | Self::Torn { .. } => false,
        }
    }

    /// From when on what is there is kept without a commit, and why.
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

/// The verdict on one candidate at `now_ns`.
#[must_use]
pub fn complete(rules: &Rules, candidate: &Candidate, facts: &Facts<'_>, now_ns: i64) -> Verdict {
    judge(rules, candidate, facts, now_ns).0
}

/// The names of a version relative to its run, with the digits of steps masked, to compare versions of one job.
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

/// What one kind of evidence says.
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
        let index = match self.index() {
            Finding::Read(path, kind) => return Verdict::ReadIndex { path, kind },
            other => other,
        };
        // The writer of a cut file never called it whole, so that its bytes need not say more.
        if let Some(torn) = self.cut(&index) {
            return torn;
        }
        if let Some(broken) = self.broken() {
            return broken;
        }
        // Nothing is complete without these, whatever else proves.
        let needed = [self.in_flight(), index, self.marker(), self.each_rank()];
        if let Some(missing) = needed.iter().find_map(Finding::missing) {
            return self.unproven(Some(missing));
        }
        let [_, index, marker, each_rank] = needed;
        // A proof that all names are there says nothing about the bytes of one.
        let left_open = self.left_open(&index);
        let mut unproven = None;
        for finding in [self.renamed(), marker, index, self.rank_markers(), each_rank, self.count()] {
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

    /// Nothing proves that all is there, and something may say what is not.
    fn unproven(&self, missing: Option<(Vec<String>, String)>) -> Verdict {
        if self.facts.told == Told::Commit {
            return Verdict::Complete { evidence: Evidence::Told, detail: "an administrator said so".into() };
        }
        match missing {
            Some((missing, why)) => self.lacking(missing, why),
            None => self.without_proof(),
        }
    }

    /// A program that ended with status 0 while it had a file open may have been in the middle of it: another thread may have written.
    fn left_open(&self, index: &Finding) -> Option<Verdict> {
        let mut cut = self.cut_files(index).into_iter().filter(|_| self.facts.told != Told::Commit);
        let (path, _) = cut.find(|found| !self.is_settled_by(index, *found))?;
        let detail = format!(
            "who wrote {path} ended well without closing it, and its bytes do not say whether it is whole"
        );
        Some(self.doubt(detail))
    }

    /// Something speaks against it, and nobody can say more.
    fn doubt(&self, detail: String) -> Verdict {
        if self.quiet() { Verdict::Settled { detail, undecided: true } } else { self.wait(&detail) }
    }

    /// Names are known to be missing.
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

    /// A launcher gave one of its writers a rank, or one wrote the version before.
    fn is_of_a_trainer(&self) -> bool {
        let before = self.facts.history.map(|history| &history.processes);
        let wrote_before = |writer: &Writer| before.is_some_and(|before| before.contains(&writer.process));
        self.writers().any(|writer| writer.rank.is_some() || wrote_before(writer))
    }

    /// Of a model's parts, which people copy about: `cp -a` ends with 1 where it could not keep an attribute.
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

    /// Evidence that names every file needs no time where the rule says that nothing follows; elsewhere the settle
    /// time keeps files that follow (an optimizer's state after the index of the model) in the same version.
    fn proven(&self, evidence: Evidence, detail: String) -> Verdict {
        // That every rank wrote says nothing of what follows it, such as objects that a user registered with Accelerate.
        let counted = evidence == Evidence::Count && self.rule().is_some_and(Rule::more_follows);
        // Another number of ranks writes another number of files.
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

    /// Nothing follows such evidence.
    fn is_last(&self, evidence: Evidence) -> bool {
        let last = match evidence {
            Evidence::Marker => true,
            Evidence::Index => self.candidate.shape == Shape::Flat || self.index_lies_on_top(),
            Evidence::Count => self.candidate.shape == Shape::Family,
            _ => false,
        };
        last && !self.rule().is_some_and(Rule::more_follows)
    }

    /// No rule proves anything: what the session's past, its size, people and time say.
    fn without_proof(&self) -> Verdict {
        if self.facts.succeeded {
            let detail = "every writer has begun a later checkpoint".into();
            return Verdict::Complete { evidence: Evidence::Succeeded, detail };
        }
        // An exception closes a file on its way out: of bytes that do not say whether they are whole only the end of the
        // process tells, moments later. A signal that ends it closes nothing: what was closed then the program had closed.
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
        // A file by itself is whole when it was closed, and so is what its only process marked as done; of any other
        // directory nobody knows what was to come.
        let whole = self.stands_alone() || alone && self.is_marked();
        if let Some(writer) = self.failed_early().filter(|_| !whole) {
            let process = writer.process.0;
            let why = format!("process {process}, which wrote it, failed before the settle time had passed");
            // Its job may have given it a name before, and then it was whole.
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

    /// That there are fewer files than in `older` or in the version before, where nothing says that it is meant so.
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

    /// A writer that was killed or failed before the settle time had passed.
    fn failed_early(&self) -> Option<&Writer> {
        self.first_early(self.writers())
    }

    fn first_early<'w>(&self, mut writers: impl Iterator<Item = &'w Writer>) -> Option<&'w Writer> {
        let quiet_at_ns = self.quiet_at_ns();
        writers.find(|writer| writer.failed_before(quiet_at_ns))
    }

    /// The file that the saving process writes last is there, and was.
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

    /// Nothing more comes, as far as time tells: a file in flight that nobody is left to finish stays so.
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

    /// Who wrote what is there. What was committed before is whole, whoever wrote it.
    fn writers(&self) -> impl Iterator<Item = &Writer> {
        let fresh = self.present().filter(|(_, _, fact)| !fact.committed);
        fresh.flat_map(|(_, _, fact)| &fact.writers)
    }

    /// Every file must be closed, whatever else is known.
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

    /// The files that were cut, and that neither rename, nor an index, nor their own structure says to be whole.
    fn cut_files(&self, index: &Finding) -> Vec<(&RelPath, &FileFact)> {
        let proven = matches!(index, Finding::Proves(..));
        let exact =
            |path: &RelPath, fact: &FileFact| proven && self.exact_size(path) == Some(fact.size_bytes);
        let present = self.present().map(|(path, _, fact)| (path, fact));
        present.filter(|(path, fact)| fact.is_cut() && !exact(path, fact)).collect()
    }

    /// A cut file is torn, unless all who wrote it are known to have ended with status 0: many a program leaves it to its end to close
    /// what it wrote.
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

    /// The directory's name says that it is not done, or something beside it or beside one of its files does.
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

    /// When the directory got its name, where that was after all that is in it was there.
    fn renamed_at_ns(&self) -> Option<i64> {
        let is_renamed = |_: &i64| self.rule().is_some_and(Rule::is_renamed_when_done);
        let renamed_at_ns = self.facts.renamed_at_ns.filter(is_renamed)?;
        // Where something else changed it, others say what that proves.
        self.present().all(|(_, _, fact)| fact.published_at_ns <= renamed_at_ns).then_some(renamed_at_ns)
    }

    /// The directory got its name after all that is in it was there, and nobody who wrote it had failed by then: who moves what a
    /// killed job left does not know more of it.
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
        // There may be one for each item: the last one counts.
        let markers = self.present().filter(|(_, role, _)| *role == Role::Marker);
        let Some((path, _, marker)) = markers.max_by_key(|(_, _, fact)| fact.published_at_ns) else {
            return Finding::Missing(vec!["the marker".into()], "its marker is missing".into());
        };
        if by == MarkerBy::OneRank {
            return Finding::Silent;
        }
        // An index has an order of its own.
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

    /// A file by itself, of which no other rank writes a part: its name carries no rank, or a number that no rank of its job has.
    fn stands_alone(&self) -> bool {
        match self.candidate.shape {
            Shape::Single => true,
            Shape::Family => !self.candidate.files.iter().any(|(path, role)| self.is_one_ranks(path, *role)),
            Shape::Tree | Shape::Flat => false,
        }
    }

    /// Whether one process wrote all of it, and no other process of the job has a part to write: the job has no other, or it is one file.
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

/// `path` relative to the directory that `index` lies in.
fn below_parent(index: &RelPath, path: &RelPath) -> Option<RelPath> {
    index.parent().map_or_else(|| Some(path.clone()), |directory| path.below(&directory))
}

#[cfg(test)]
mod tests;

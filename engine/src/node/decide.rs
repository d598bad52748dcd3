//! Decides the next step of a book.
//!
//! Owns: the facts a verdict needs, and the action that follows from it. Does not own: the verdict (protocol), carrying the action
//! out (`run`). Nothing is changed here: a decision is a value.

use crate::node::Shared;
use crate::node::book::{Book, Number, ParsedIndex, VersionBook};
use crate::node::indices::{known_indices, not_readable, read_index, to_read};
use crate::node::ledger::{Contents, Ledger, contents};
use crate::save::commit::AttemptFile;
use crate::save::share::Share;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_content::{Format, Judgement};
use tidemark_namespace::{FileState, FileView, NodeId, WriterId, fate_of};
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::evidence::{
    Before, Covered, Facts, Fate, FileFact, IndexError, Older, Told, Verdict, Writer, believed,
    have_ended_well, judge,
};
use tidemark_protocol::format::FORMAT;
use tidemark_protocol::id::{AttemptId, FileId, SealNumber};
use tidemark_protocol::key::VersionId;
use tidemark_protocol::lineage;
use tidemark_protocol::manifest::{Attributes, Base64, Directory, HardLink};
use tidemark_protocol::path::{RawText, RelPath, RunPath};
use tidemark_protocol::recognise::Candidate;
use tidemark_protocol::record::{Evidence, Record, RecordFile};
use tidemark_protocol::visibility::Content;

/// Result of examining a book.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) verdict: Option<Verdict>,
    pub(crate) action: Action,
    /// Whether time alone may change the outcome, so that the book must be examined again.
    pub(crate) unsettled: bool,
    /// Indices that were read meanwhile.
    pub(crate) indices: BTreeMap<RelPath, ParsedIndex>,
    /// Open or cut files that are no part of the checkpoint: they stay in the tree, and no record lists them.
    pub(crate) apart: BTreeSet<RelPath>,
}

impl Outcome {
    fn nothing() -> Self {
        let (indices, apart) = (BTreeMap::new(), BTreeSet::new());
        Self { verdict: None, action: Action::None, unsettled: false, indices, apart }
    }
}

/// See [`Outcome`].
#[derive(Debug)]
pub(crate) enum Action {
    None,
    /// An index proves the exact size of this cut file: it counts as closed.
    Accept(NodeId),
    /// Seals these cut files as they are, because no process will close them. The files stay marked as cut.
    SealAsTheyAre(Vec<NodeId>),
    /// A new version contains this file, whose bytes are only in Tier-3.
    Fetch(NodeId),
    /// The verdict needs a judgement of the content of these files.
    Judge(Vec<NodeId>),
    Start(Box<Plan>),
    /// A provisional version has evidence now.
    Raise {
        number: Number,
        evidence: Evidence,
        detail: String,
    },
}

/// A version to begin.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) record: Record,
    pub(crate) contents: Contents,
    pub(crate) files: Vec<AttemptFile>,
    pub(crate) directories: Vec<Directory>,
    pub(crate) hard_links: Vec<HardLink>,
    /// Files of it that other nodes have.
    pub(crate) shares: Vec<Share>,
}

/// Most indices read in one examination; a checkpoint has one or two.
const INDICES_MAX: usize = 64;

/// Examines a book as the tree stands.
pub(crate) fn look(shared: &Shared, ledger: &Ledger, book: &Book, told: Told) -> Outcome {
    let Some(candidate) = &book.candidate else { return Outcome::nothing() };
    let mut files: Vec<_> = ledger.files_of(candidate, &book.scope).collect();
    if files.len() != candidate.files.len() {
        // The scope is being grouped again, which makes the book due.
        return Outcome::nothing();
    }
    // Names without bytes make nothing whole: they count as not there.
    let lost: BTreeSet<RelPath> =
        files.iter().filter(|(_, view)| shared.has_lost(view)).map(|(path, _)| (*path).clone()).collect();
    if lost.is_empty() {
        return look_at(shared, ledger, book, candidate, files, told, &BTreeSet::new());
    }
    files.retain(|(path, _)| !lost.contains(*path));
    look_at(shared, ledger, book, &without(candidate, &lost), files, told, &BTreeSet::new())
}

fn without(candidate: &Candidate, names: &BTreeSet<RelPath>) -> Candidate {
    let mut left = candidate.clone();
    left.files.retain(|path, _| !names.contains(path));
    left
}

/// Examines a book by `files`, which are all files of `candidate`. The files in `apart` lie beside them.
fn look_at(
    shared: &Shared,
    ledger: &Ledger,
    book: &Book,
    candidate: &Candidate,
    mut files: Vec<(&RelPath, &Arc<FileView>)>,
    told: Told,
    apart: &BTreeSet<RelPath>,
) -> Outcome {
    let mut outcome = Outcome::nothing();
    let present = contents(files.iter().copied());
    let covering = present.as_ref().and_then(|present| {
        // A version that was kept together with the files apart proves nothing about the rest.
        let with_them = |version: &VersionBook| apart.iter().any(|path| version.contents.contains_key(path));
        let mut versions = book.versions.iter().rev();
        versions.find(|(_, version)| is_covered(present, &version.contents) && !with_them(version))
    });
    // The version to be proven, and the record that describes the files.
    let (raise, known) = match covering {
        // Aborted contents are tried again as the next version. So are older contents that came back under the name.
        Some((_, version)) if version.checkpoint.is_aborted() => (None, None),
        Some((number, _)) if book.is_superseded(shared, *number) => (None, None),
        // The files that are left are committed: removing files from a checkpoint makes no version of it.
        Some((_, version))
            if holds_more_and_is_a_part(version, files.len())
                && present.as_ref().is_some_and(|present| book.is_committed_with(shared, present)) =>
        {
            return outcome;
        }
        // The files that were removed from a part may have been its flaw. The rest is the next version, and still counts as a part.
        Some((_, version)) if holds_more_and_is_a_part(version, files.len()) => {
            (None, Some(version.record()))
        }
        Some((number, version)) if version.checkpoint.is_alive() && !version.checkpoint.is_proven() => {
            (Some(*number), Some(version.record()))
        }
        Some(_) => return outcome,
        None => (None, None),
    };
    let (partial, doubted) = known.map_or((false, false), |record| (record.partial, record.doubted));
    let now_ns = shared.now_ns();
    let committed = book.committed().map(|(_, version)| &version.contents);
    let whole = book.newest_whole().map(|(_, version)| &version.contents);
    let fact = |path: &RelPath, view: &Arc<FileView>| {
        let is_committed = committed.is_some_and(|committed| committed.get(path) == seal_of(view).as_ref());
        let before = match whole.and_then(|whole| whole.get(path)) {
            None => Before::Nothing,
            Some(held) if Some(*held) == seal_of(view) => Before::Same,
            Some(_) => Before::Other,
        };
        fact(shared, view, is_committed, before, doubted)
    };
    let file_facts: BTreeMap<_, _> =
        files.iter().map(|(path, view)| ((*path).clone(), fact(path, view))).collect();
    let witnessed = is_witnessed(&file_facts);
    // A known part does not become whole because a flush wants everything to be durable.
    let told = if partial && !witnessed && told == Told::Flush { Told::No } else { told };
    let removed = removed(ledger, book);
    let unjudged: Vec<NodeId> = match shared.settings.content.judge {
        true => files.iter().filter(|(_, view)| is_unjudged(view)).map(|(_, view)| view.node).collect(),
        false => Vec::new(),
    };
    if !unjudged.is_empty() {
        let why = "what its files hold is being looked at".to_owned();
        outcome.verdict = Some(Verdict::Open { why, again_at_ns: None });
        outcome.action = Action::Judge(unjudged);
        outcome.unsettled = true;
        return outcome;
    }
    let settle_ns = settle_ns(shared);
    let older = older(ledger, candidate);
    let mut wanted = None;
    let (verdict, apart) = loop {
        let indices: BTreeMap<RelPath, Result<Covered, IndexError>> =
            known_indices(book, &outcome.indices, &files);
        let facts = Facts {
            files: &file_facts,
            indices: &indices,
            told,
            history: ledger.history.get(&candidate.id.run),
            older,
            succeeded: succeeded(ledger, candidate, &files),
            removed: &removed,
            names_before: whole.map_or(0, BTreeMap::len),
            renamed_at_ns: shared.namespace.nodes().renamed_ns(&book.path()),
            settle_ns,
        };
        match judge(ledger.rules(), candidate, &facts, now_ns) {
            (Verdict::ReadIndex { path, kind }, _) if outcome.indices.len() < INDICES_MAX => {
                match read_index(shared, &files, &path, kind) {
                    Some(index) => {
                        outcome.indices.insert(path, index);
                    }
                    // Not sealed yet, or on its way from another node. When that ends, the book is due again.
                    None => {
                        let found = files.iter().find(|(found, _)| **found == path);
                        wanted =
                            found.and_then(|found| to_read(shared, ledger, found, file_facts[&path].vouched));
                        let verdict = match found {
                            Some((_, view)) if view.state == FileState::Cut && wanted.is_none() => {
                                not_readable(&path, view, settle_ns, now_ns)
                            }
                            _ => Verdict::Open { why: format!("{path} is being sealed"), again_at_ns: None },
                        };
                        break (verdict, BTreeSet::new());
                    }
                }
            }
            judged => break judged,
        }
    };
    if !apart.is_empty() {
        files.retain(|(path, _)| !apart.contains(*path));
        // No file of the rest lies apart.
        let mut rest = look_at(shared, ledger, book, &without(candidate, &apart), files, told, &apart);
        rest.indices.append(&mut outcome.indices);
        rest.apart = apart;
        return rest;
    }
    outcome.unsettled = true;
    let kept = verdict.kept_from().filter(|(at_ns, _)| now_ns >= *at_ns).map(|(_, why)| why.to_owned());
    let more_is_known = match &verdict {
        Verdict::Complete { evidence, .. } => is_beyond_doubt(*evidence, &files, witnessed),
        _ => witnessed,
    };
    let doubt = known.filter(|_| doubted && told != Told::Commit && !more_is_known);
    outcome.action = match (&verdict, raise, &present) {
        (Verdict::Settled { .. }, None, None) => Action::SealAsTheyAre(left_cut(shared, ledger, &files)),
        (Verdict::Complete { .. }, ..) if doubt.is_some() => Action::None,
        (Verdict::Complete { evidence, detail }, Some(number), _) => {
            Action::Raise { number, evidence: *evidence, detail: detail.clone() }
        }
        (Verdict::Complete { evidence, detail }, None, Some(present)) => {
            start(shared, ledger, book, &files, present, (*evidence, detail.clone()))
        }
        (Verdict::Complete { .. }, None, None) => {
            // The checkpoint is complete although a file is cut, because its size was proved. Other files are being sealed.
            let cut = files.iter().find(|(_, view)| view.is_left_cut());
            cut.map_or(Action::None, |(_, view)| Action::Accept(view.node))
        }
        (verdict, None, Some(present)) if kept.is_some() => {
            let evidence = (Evidence::Quiescence, kept.unwrap_or_default());
            match start(shared, ledger, book, &files, present, evidence) {
                Action::Start(mut plan) => {
                    (plan.record.partial, plan.record.doubted) = (partial, doubted || verdict.is_doubt());
                    Action::Start(plan)
                }
                other => other,
            }
        }
        // A checkpoint that is kept without proof is sealed as it is.
        (_, None, None) if kept.is_some() => Action::SealAsTheyAre(left_cut(shared, ledger, &files)),
        _ => wanted.unwrap_or(Action::None),
    };
    let stands = || present.as_ref().is_some_and(|present| book.is_committed_with(shared, present));
    outcome.verdict = Some(match doubt.filter(|_| !stands()) {
        Some(record) => verdict.in_doubt(&record.evidence_detail),
        None => verdict,
    });
    outcome
}

/// Whether `present` holds nothing that `version` does not: the same bytes, or fewer because names were removed.
/// Removing files from a checkpoint does not make a new version of it.
pub(crate) fn is_covered(present: &Contents, version: &Contents) -> bool {
    present.iter().all(|(path, seal)| version.get(path) == Some(seal))
}

pub(crate) fn settle_ns(shared: &Shared) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "settings allow at most a day")]
    let ns = (shared.settings.save.settle_s * 1e9) as i64;
    ns
}

/// Whether a file's content was not judged yet, and no process writes the file.
fn is_unjudged(view: &FileView) -> bool {
    view.host && !view.judged && matches!(view.state, FileState::Cut | FileState::Sealed { .. })
}

/// Whether an unproven version is a part or doubted, and holds more than `files` files.
fn holds_more_and_is_a_part(version: &VersionBook, files: usize) -> bool {
    let record = version.record();
    let is_part = (record.partial || record.doubted) && !version.checkpoint.is_proven();
    is_part && version.contents.len() > files
}

/// Whether today's facts outweigh a recorded doubt: all bytes are in memory and were judged, and either names prove the checkpoint
/// or the end of every writer is known.
fn is_beyond_doubt(evidence: Evidence, files: &[(&RelPath, &Arc<FileView>)], witnessed: bool) -> bool {
    let named = matches!(evidence, Evidence::Index | Evidence::Marker | Evidence::Count);
    (named || witnessed) && files.iter().all(|(_, view)| view.host && view.judged)
}

/// Whether the writers of every file are known, and none of them failed. The verdict then rests on complete facts, and a part that
/// was uploaded earlier adds nothing. Files that were read back from Tier-3 have no writers.
fn is_witnessed(facts: &BTreeMap<RelPath, FileFact>) -> bool {
    let well = |writer: &Writer| matches!(writer.fate, Fate::Alive | Fate::Exited);
    facts.values().all(|fact| !fact.writers.is_empty() && fact.writers.iter().all(well))
}

/// Returns the cut files, which are sealed only on request. None on several nodes, where another node may have a writer.
pub(crate) fn left_cut(
    shared: &Shared,
    ledger: &Ledger,
    files: &[(&RelPath, &Arc<FileView>)],
) -> Vec<NodeId> {
    if shared.cluster.get().is_some() {
        return Vec::new();
    }
    let cut = files.iter().map(|(_, view)| view).filter(|view| view.state == FileState::Cut && view.host);
    cut.map(|view| view.node).filter(|node| !ledger.unreadable.contains_key(node)).collect()
}

/// Returns the judgement of a file's content, as far as it can be believed.
fn content_of(view: &FileView) -> Content {
    let Some(Judgement { verdict, format, .. }) = &view.content else { return Content::Unknown };
    let says = match verdict {
        tidemark_content::Verdict::Whole => Content::Whole,
        tidemark_content::Verdict::Broken => Content::Broken,
        tidemark_content::Verdict::Unknown => Content::Unknown,
    };
    let in_advance = format.is_some_and(Format::is_sized_in_advance);
    believed(says, in_advance, view.is_left_cut())
}

/// Returns a file's state as reports name it.
pub(crate) fn state_word(state: &FileState) -> &'static str {
    match state {
        FileState::Open { .. } => "open",
        FileState::Closed => "closed",
        FileState::Cut => "cut",
        FileState::Mapped => "mapped",
        FileState::Sealed { .. } => "sealed",
    }
}

/// Returns the identity of a file's sealed bytes; none if it is not sealed.
pub(crate) fn seal_of(view: &FileView) -> Option<(FileId, SealNumber)> {
    match view.state {
        FileState::Sealed { seal, .. } => Some((view.file, seal)),
        FileState::Open { .. } | FileState::Closed | FileState::Cut | FileState::Mapped => None,
    }
}

/// Returns the names of the last committed version that are not in the tree any more.
fn removed(ledger: &Ledger, book: &Book) -> BTreeSet<RelPath> {
    let had = book.committed().into_iter().flat_map(|(_, version)| version.contents.keys());
    had.filter(|path| ledger.file(path).is_none()).cloned().collect()
}

/// Collects the facts about one file. `doubted`: whether the record that keeps a part of the checkpoint is doubted.
fn fact(shared: &Shared, view: &Arc<FileView>, committed: bool, before: Before, doubted: bool) -> FileFact {
    let (cut, doubted) = (view.is_left_cut(), view.is_left_cut() && doubted);
    let mut writers: Vec<Writer> = view.writers.iter().map(|writer| fate(shared, writer, cut)).collect();
    if doubted {
        // Only the daemon that wrote the record saw how they ended: it would have recorded a torn save as a part, not as doubted.
        let unseen = |writer: &&mut Writer| writer.fate == Fate::Killed && writer.failed_at_ns.is_none();
        writers.iter_mut().filter(unseen).for_each(|writer| writer.fate = Fate::Gone);
    }
    let ended_well = have_ended_well(writers.iter().map(|writer| writer.fate));
    FileFact {
        // A file that belonged to no checkpoint when it was cut may be sealed as it is, which does not make it whole.
        state: if cut { FileState::Cut } else { view.state.clone() },
        size_bytes: view.size_bytes,
        opened_at_ns: view.opened_ns,
        published_at_ns: view.published_ns,
        closed_at_ns: view.closed_ns,
        vouched: view.renamed || view.renamed_cut && ended_well,
        content: content_of(view),
        content_reason: view.content.as_ref().map(|content| content.reason.clone()).unwrap_or_default(),
        committed,
        before,
        doubted,
        writers,
    }
}

fn fate(shared: &Shared, writer: &WriterId, cut: bool) -> Writer {
    let (fate, failed_at_ns) = fate_of(&shared.namespace, writer, cut);
    Writer {
        session: writer.session.0.clone(),
        process: writer.process(),
        environment_seen: writer.environment_seen,
        world_size: writer.world_size,
        rank: writer.rank,
        fate,
        failed_at_ns,
    }
}

/// Whether every process that wrote this candidate has begun a later one of the same run.
fn succeeded(ledger: &Ledger, candidate: &Candidate, files: &[(&RelPath, &Arc<FileView>)]) -> bool {
    let Some(step) = candidate.step else { return false };
    let writers: BTreeSet<_> =
        files.iter().flat_map(|(_, view)| &view.writers).map(|w| w.process()).collect();
    if writers.is_empty() {
        return false;
    }
    let mut later = BTreeSet::new();
    for book in ledger.books.values() {
        let Some(other) = &book.candidate else { continue };
        if other.id.run != candidate.id.run || other.step.is_none_or(|other| other <= step) {
            continue;
        }
        for (_, view) in ledger.files_of(other, &book.scope) {
            later.extend(view.writers.iter().map(|w| w.process()));
        }
    }
    writers.is_subset(&later)
}

/// Returns the nearest older checkpoint of the same run and rule, if it has more files. Counts even if it is not whole, or was removed
/// before this one was written. Costs a pass over the books, and for a removed checkpoint some patterns for each of its files.
fn older(ledger: &Ledger, candidate: &Candidate) -> Option<Older> {
    let step = candidate.step?;
    let known = |book: &Book| match &book.candidate {
        Some(found) => {
            let files = found.files.len().saturating_sub(book.apart.len());
            (found.framework == candidate.framework).then_some((found.step?, files))
        }
        None => {
            let version = book.removed()?;
            let framework = &version.record().framework;
            (*framework == candidate.framework).then_some((version.record().step?, version.contents.len()))
        }
    };
    let of_run = ledger.books.values().filter(|book| book.id.run == candidate.id.run);
    let found = of_run.filter_map(|book| Some((known(book)?, book)));
    let ((_, files), book) =
        found.filter(|((other, _), _)| *other < step).max_by_key(|((other, _), _)| *other)?;
    if files <= candidate.files.len() {
        return None;
    }
    let ranks = match &book.candidate {
        Some(found) => found.ranks(),
        None => book.removed()?.candidate(ledger.rules(), &book.id)?.ranks(),
    };
    Some(Older { files, ranks })
}

pub(crate) fn start(
    shared: &Shared,
    ledger: &Ledger,
    book: &Book,
    files: &[(&RelPath, &Arc<FileView>)],
    present: &Contents,
    (evidence, detail): (Evidence, String),
) -> Action {
    let Some(candidate) = &book.candidate else { return Action::None };
    let version = book.version_id(book.next_number());
    let mut participants = vec![shared.drain.life.clone()];
    let mut entries = Vec::with_capacity(files.len());
    let mut attempt_files: Vec<AttemptFile> = Vec::with_capacity(files.len());
    let mut hard_links = Vec::new();
    let mut shares: Vec<Share> = Vec::new();
    for (path, view) in files {
        let FileState::Sealed { seal, size_bytes, crc, chunks } = &view.state else {
            unreachable!("contents are present only when every file is sealed")
        };
        let entry = RecordFile {
            path: (*path).clone(),
            file: view.file,
            seal: *seal,
            size_bytes: *size_bytes,
            crc64nvme: *crc,
        };
        // The bytes may be from another node, or from an earlier life of this node, found again in Tier-3.
        let life = shared.life_of(view.file.incarnation);
        if !participants.contains(&life) {
            participants.push(life.clone());
        }
        entries.push(entry.clone());
        if let Some(first) = attempt_files.iter().find(|file| file.entry.file == view.file) {
            hard_links.push(HardLink { path: (*path).clone(), to: first.entry.path.clone() });
            continue;
        }
        if let Some(first) = shares.iter_mut().find_map(|share| {
            let first = share.files.iter().find(|file| file.entry.file == view.file)?.entry.path.clone();
            Some((share, first))
        }) {
            first.0.hard_links.push(HardLink { path: (*path).clone(), to: first.1 });
            continue;
        }
        if view.remote.as_ref().is_some_and(|remote| remote.host) && !shared.is_gone(view.file.incarnation) {
            let file =
                AttemptFile { entry, attributes: view.attributes(), chunks: Arc::clone(chunks), pin: None };
            match shares.iter_mut().find(|share| share.life == life) {
                Some(share) => share.files.push(file),
                None => shares.push(Share::new(life, vec![file], Vec::new())),
            }
            continue;
        }
        let Some(pin) = shared.namespace.seals().pin_seal(view.file, *seal) else {
            return if view.host { Action::None } else { Action::Fetch(view.node) };
        };
        attempt_files.push(AttemptFile {
            entry,
            attributes: view.attributes(),
            chunks: Arc::clone(chunks),
            pin: Some(Arc::new(pin)),
        });
    }
    let completed_at_ns = stamp(shared, ledger, &version, files);
    let record = Record {
        format: FORMAT,
        version,
        attempt: AttemptId(getrandom::u64().expect("the kernel has random numbers")),
        step: candidate.step,
        framework: candidate.framework.clone(),
        evidence,
        evidence_detail: detail,
        epoch: shared.drain.epoch(),
        completed_at_ns,
        participants,
        files: entries,
        partial: false,
        doubted: false,
    };
    let directories = directories(shared, book, files);
    Action::Start(Box::new(Plan {
        record,
        contents: present.clone(),
        files: attempt_files,
        directories,
        hard_links,
        shares,
    }))
}

/// Returns when the version that these files form became complete.
fn stamp(shared: &Shared, ledger: &Ledger, version: &VersionId, files: &[(&RelPath, &Arc<FileView>)]) -> i64 {
    let now_ns = shared.now_ns();
    let published_ns = files.iter().map(|(_, view)| view.published_ns).max().unwrap_or(now_ns);
    lineage::stamp(version, published_ns, now_ns, run_of(ledger, &version.run))
}

/// Returns every version of a run.
pub(crate) fn run_of<'ledger, 'run>(
    ledger: &'ledger Ledger,
    run: &'run RunPath,
) -> impl Iterator<Item = &'ledger Checkpoint> + Clone + use<'ledger, 'run> {
    ledger.books.values().filter(move |book| book.id.run == *run).flat_map(Book::checkpoints)
}

/// Returns the directories that hold the checkpoint's files, including the checkpoint's own if it is a directory.
fn directories(shared: &Shared, book: &Book, files: &[(&RelPath, &Arc<FileView>)]) -> Vec<Directory> {
    let Ok(top) = RelPath::new(book.path()) else { return Vec::new() };
    let mut paths = BTreeSet::new();
    for (path, _) in files {
        let above = std::iter::successors(path.parent(), RelPath::parent);
        paths.extend(above.take_while(|directory| *directory == top || directory.is_below(&top)));
    }
    let mut directories = Vec::new();
    for path in paths {
        let Some(node) = shared.namespace.nodes().node_at(path.as_bytes()) else { continue };
        let Ok(attr) = shared.namespace.getattr(node) else { continue };
        let xattrs = shared.namespace.nodes().xattrs_of(node).into_iter();
        let attributes = Attributes {
            mode: attr.mode,
            uid: attr.uid,
            gid: attr.gid,
            mtime_ns: attr.mtime_ns,
            xattrs: xattrs.map(|(name, value)| (RawText(name), Base64(value))).collect(),
        };
        directories.push(Directory { path, attributes });
    }
    directories
}

/// Describes a verdict in a sentence.
pub(crate) fn verdict_text(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Complete { detail, .. } | Verdict::Settled { detail, .. } => detail.clone(),
        Verdict::Open { why, .. } | Verdict::Torn { why } | Verdict::Broken { why, .. } => why.clone(),
        Verdict::Incomplete { missing, why, .. } if missing.is_empty() => why.clone(),
        Verdict::Incomplete { missing, why, .. } => format!("{why}: {}", missing.join(", ")),
        Verdict::ReadIndex { path, .. } => format!("{path} is to be read"),
    }
}

/// Describes in a sentence what a book waits for.
pub(crate) fn waits_for(book: &Book) -> String {
    book.verdict.as_ref().map_or_else(|| "it has just been seen".to_owned(), verdict_text)
}

/// Time after a settle time within which the loop has examined the book again.
const LOOKED_WITHIN_NS: i64 = 1_000_000_000;

/// Whether only the settle time is missing. False beside a file under a temporary name, where a settle time that has passed proves
/// nothing.
pub(crate) fn is_waiting_for_time(book: &Book, verdict: Option<&Verdict>, now_ns: i64) -> bool {
    let Some(Verdict::Open { again_at_ns: Some(at_ns), .. }) = verdict else { return false };
    let has_temporaries = book.candidate.as_ref().is_some_and(|candidate| !candidate.temporaries.is_empty());
    !has_temporaries && now_ns < at_ns.saturating_add(LOOKED_WITHIN_NS)
}

/// Whether a book waits for time alone.
pub(crate) fn is_settling(book: &Book) -> bool {
    matches!(
        book.verdict,
        None | Some(
            Verdict::Open { again_at_ns: Some(_), .. } | Verdict::Complete { .. } | Verdict::Settled { .. }
        )
    )
}

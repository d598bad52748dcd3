//! Which checkpoint a person means.
//!
//! Owns: how one is named, that a name of several chooses none of them, and which one `latest` in the control directory names. Does not
//! own: the grammar of the command line (protocol), which of one run's a job would load (`answer`), what is done with the checkpoint
//! (`show`, `keeping`, `export`).

use crate::node::book::Book;
use crate::node::flush::covers;
use crate::node::recover::above;
use crate::node::run::{Engine, Node};
use std::collections::BTreeSet;
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::id::Step;
use tidemark_protocol::lineage;
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::record::Record;
use tidemark_protocol::report::{ApiError, ErrorCode, path_text};

/// Names in an error about several: a person reads a few, and `ckptctl ls` shows all.
const NAMES_MAX: usize = 10;

/// How a person names a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    Path(Vec<u8>),
    /// Of one run, or of all.
    Step {
        run: Option<Vec<u8>>,
        step: u64,
    },
    /// Of one run, or of the only one.
    Latest {
        run: Option<Vec<u8>>,
    },
}

impl Node {
    /// The path of what `wanted` names. The outer `None`: the loop has stopped; the inner one: there is none.
    ///
    /// # Errors
    /// `wanted` names several.
    pub async fn path_of(&self, wanted: Wanted) -> Option<Result<Option<Vec<u8>>, ApiError>> {
        self.ask(move |engine| engine.find(&wanted).map(|found| found.map(Book::path))).await
    }

    /// The path of what was whole last, of what the jobs of all runs would load now. The outer `None`: the loop has stopped; the inner
    /// one: no job would load anything.
    pub async fn whole_last(&self) -> Option<Option<Vec<u8>>> {
        self.ask(|engine| engine.whole_last().map(Book::path)).await
    }
}

/// A checkpoint that has the step which somebody asks for.
#[derive(Debug, Clone, Copy)]
struct AtStep<'a> {
    run: &'a RunPath,
    /// Tier-3 has a commit of it, whether it can be read or not.
    is_committed: bool,
}

/// The index of the one that is meant among several with one step: the only one, or the only committed one where all are of one run.
fn meant(found: &[AtStep<'_>]) -> Option<usize> {
    if found.len() == 1 {
        return Some(0);
    }
    let first = found.first()?;
    if found.iter().any(|other| other.run != first.run) {
        return None;
    }
    let mut committed = (0..found.len()).filter(|index| found[*index].is_committed);
    let only = committed.next()?;
    committed.next().is_none().then_some(only)
}

fn several(what: &str, names: impl Iterator<Item = String>, action: &str) -> ApiError {
    let mut names: Vec<_> = names.collect();
    let more = names.len().saturating_sub(NAMES_MAX);
    names.truncate(NAMES_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    ApiError::new(ErrorCode::Usage, format!("{what}: {}{more}", names.join(", ")), action)
}

/// Refuses to choose among checkpoints, of which these are the paths.
pub(crate) fn several_at_step(step: u64, paths: impl Iterator<Item = Vec<u8>>) -> ApiError {
    let what = format!("several checkpoints have step {step}");
    several(&what, paths.map(|path| path_text(&path)), "name one by its path")
}

fn step_of(book: &Book) -> Option<Step> {
    let newest = book.newest().or_else(|| book.unreadable()).map(|(_, version)| version.record().step);
    let present = || book.candidate.as_ref().map(|candidate| candidate.step);
    newest.or_else(present).flatten()
}

/// Whether Tier-3 has a commit of it, readable or not.
pub(crate) fn has_commit(book: &Book) -> bool {
    book.committed().is_some() || book.unreadable().is_some()
}

/// Whether a run is the one that somebody names, by its path or as `ls` shows it.
pub(crate) fn is_run(run: &RunPath, name: &[u8]) -> bool {
    let path = run.path().map_or(&b""[..], RelPath::as_bytes);
    path == name || run.to_string().as_bytes() == name
}

/// Whether `place` is one of these files, or a directory below `top` in which some of them lie.
pub(crate) fn is_inside<'a>(top: &[u8], place: &[u8], mut files: impl Iterator<Item = &'a RelPath>) -> bool {
    // The files of a family share no directory of their own, so each is looked for by its name.
    let is_below = covers(top, place);
    files.any(|file| file.as_bytes() == place || is_below && covers(place, file.as_bytes()))
}

impl Engine {
    /// The checkpoint that `wanted` names; `None`: there is none. Costs a pass over the books.
    ///
    /// # Errors
    /// `wanted` names several. What is chosen may be removed for good, so nothing is chosen by chance.
    pub(crate) fn find<'a>(&'a self, wanted: &'a Wanted) -> Result<Option<&'a Book>, ApiError> {
        match wanted {
            Wanted::Path(path) => Ok(self.find_at(path)),
            Wanted::Step { run, step } => {
                let found: Vec<_> = self.at_step(run.as_deref(), *step).collect();
                let all: Vec<_> = found
                    .iter()
                    .map(|book| AtStep { run: &book.id.run, is_committed: has_commit(book) })
                    .collect();
                match meant(&all) {
                    Some(index) => Ok(Some(found[index])),
                    None if found.is_empty() => Ok(None),
                    None => Err(several_at_step(*step, found.into_iter().map(Book::path))),
                }
            }
            Wanted::Latest { run } => {
                Ok(self.run_of_latest(run.as_deref())?.and_then(|run| self.latest_of(run)))
            }
        }
    }

    /// The run of which `latest` is meant: the named one, or the only one; `None`: nothing of it is committed.
    ///
    /// # Errors
    /// None is named, and several have something committed.
    pub(crate) fn run_of_latest(&self, run: Option<&[u8]>) -> Result<Option<&RunPath>, ApiError> {
        let mut runs = self.runs_with_commits(run);
        if runs.len() > 1 {
            let names = runs.iter().map(ToString::to_string);
            return Err(several("several runs have checkpoints", names, "name one as RUN@latest"));
        }
        Ok(runs.pop_first())
    }

    /// The newest committed one of a run that its job would load, as the job chooses it; where the job removed all, the newest of those.
    fn latest_of(&self, run: &RunPath) -> Option<&Book> {
        let loadable = self.newest_in_sight(run, Checkpoint::is_committed);
        loadable.and_then(|found| self.book_of(found.record())).or_else(|| self.newest_committed_of(run))
    }

    /// The newest committed one of a run, whether the tree shows it or not.
    pub(crate) fn newest_committed_of(&self, run: &RunPath) -> Option<&Book> {
        let of_run = self.ledger.books.values().filter(|book| book.id.run == *run);
        let committed = of_run.filter_map(|book| Some((book.committed()?.1.record(), book)));
        committed.max_by_key(|(record, _)| lineage::order_to_resume(record)).map(|(_, book)| book)
    }

    /// Of what the jobs of all runs would load now, what was whole last: steps of two runs say nothing about which is newer. For programs
    /// that only read it, so that several runs are no error. Costs a pass over the versions of each run.
    fn whole_last(&self) -> Option<&Book> {
        let runs: BTreeSet<_> = self.ledger.books.keys().map(|id| &id.run).collect();
        let newest = runs.into_iter().filter_map(|run| self.newest_in_sight(run, |_| true));
        let records = newest.map(Checkpoint::record);
        self.book_of(records.max_by_key(|record| (record.completed_at_ns, lineage::order(record)))?)
    }

    fn book_of(&self, record: &Record) -> Option<&Book> {
        let (run, directory) = (record.version.run.clone(), record.version.directory.clone());
        self.ledger.books.get(&CheckpointId { run, directory })
    }

    /// Runs, or the named one, with a committed checkpoint in the tree; where none has one, those with a committed checkpoint that a job
    /// removed.
    fn runs_with_commits(&self, run: Option<&[u8]>) -> BTreeSet<&RunPath> {
        let committed = || self.books_of(run).filter(|book| book.committed().is_some());
        let in_tree: BTreeSet<_> =
            committed().filter(|book| book.candidate.is_some()).map(|book| &book.id.run).collect();
        if in_tree.is_empty() { committed().map(|book| &book.id.run).collect() } else { in_tree }
    }

    /// The checkpoint at a path, or in which the path lies.
    pub(crate) fn find_at(&self, path: &[u8]) -> Option<&Book> {
        let books = self.ledger.books.values().filter(|book| self.is_named_by(book, path));
        books.max_by_key(|book| book.path().len())
    }

    /// The checkpoints with this step, of one run or of all.
    pub(crate) fn at_step<'a>(&'a self, run: Option<&'a [u8]>, step: u64) -> impl Iterator<Item = &'a Book> {
        self.books_of(run).filter(move |book| step_of(book).is_some_and(|found| found.0 == step))
    }

    /// Whether `path` means this checkpoint: it is its path, or something in it.
    pub(crate) fn is_named_by(&self, book: &Book, path: &[u8]) -> bool {
        let top = book.path();
        let run = book.id.run.path().map_or(&b""[..], RelPath::as_bytes);
        if !covers(run, path) {
            return false;
        }
        top == path
            || covers(&top, path) && self.shared.namespace.node_at(path).is_some()
            || book.candidate.as_ref().is_some_and(|held| is_inside(&top, path, held.files.keys()))
            || above(book, None).iter().any(|(_, version)| is_inside(&top, path, version.contents.keys()))
    }

    /// Whether what is asked about `place` is about this checkpoint: it is at or below the place, or the place lies in it. A file of a
    /// checkpoint is safe with that, and not before.
    pub(crate) fn is_about(&self, place: &[u8], book: &Book) -> bool {
        covers(place, &book.path()) || self.is_named_by(book, place)
    }

    /// The checkpoints that a question about `place` is about. Costs a pass over the books.
    pub(crate) fn books_about<'a>(&'a self, place: &'a [u8]) -> impl Iterator<Item = &'a Book> {
        self.ledger.books.values().filter(move |book| self.is_about(place, book))
    }

    /// The books of one run, named by its path or as `ls` shows it, or of all.
    fn books_of<'a>(&'a self, run: Option<&[u8]>) -> impl Iterator<Item = &'a Book> {
        self.ledger.books.values().filter(move |book| run.is_none_or(|run| is_run(&book.id.run, run)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn among_several_with_one_step_only_the_only_commit_of_one_run_is_meant() {
        let [one, other] = ["one", "other"].map(|name| RunPath::new(RelPath::new(name).unwrap()).unwrap());
        let of = |run, is_committed| AtStep { run, is_committed };
        assert_eq!(meant(&[]), None);
        assert_eq!(meant(&[of(&one, false)]), Some(0));
        assert_eq!(meant(&[of(&one, true), of(&other, true)]), None);
        assert_eq!(meant(&[of(&one, true), of(&other, false)]), None, "of several runs none is preferred");
        assert_eq!(meant(&[of(&one, false), of(&one, true)]), Some(1));
        assert_eq!(meant(&[of(&one, true), of(&one, true)]), None);
        assert_eq!(meant(&[of(&one, false), of(&one, false)]), None);
    }

    #[test]
    fn a_place_lies_in_a_checkpoint_as_a_file_or_as_a_directory_of_files() {
        let files = ["run/step_1/a.pt", "run/step_1/sub/b.pt", "run/family_rank0.pt"];
        let files = files.map(|path| RelPath::new(path).unwrap());
        let of = |top: &str, place: &str| is_inside(top.as_bytes(), place.as_bytes(), files.iter());
        for place in ["run/step_1", "run/step_1/a.pt", "run/step_1/sub", "run/step_1/sub/b.pt"] {
            assert!(of("run/step_1", place), "{place}");
        }
        assert!(of("run/family_rank*.pt", "run/family_rank0.pt"));
        for place in ["", "run", "run/step_1/absent", "run/step_1/s", "run/step_12"] {
            assert!(!of("run/step_1", place), "{place}");
        }
    }

    #[test]
    fn an_error_about_several_names_a_few_of_them() {
        let error = several_at_step(7, (0..12).map(|number| format!("r{number}/step7.pt").into_bytes()));
        assert_eq!(error.code, ErrorCode::Usage);
        assert!(error.what.contains("step 7: r0/step7.pt, r1/step7.pt, "), "{error}");
        assert!(error.what.ends_with("r9/step7.pt and 2 more"), "{error}");
    }
}

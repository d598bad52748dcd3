//! The checkpoint that a person means.
//!
//! Owns: how one is named, that a name of several chooses none of them, and which one `latest` in the control directory names. Does not
//! own: the grammar of the command line (protocol), which of one run's a job would load (`answer`), what is done with the checkpoint
//! (`show`, `keeping`, `export`).

use crate::node::Shared;
use crate::node::answer::{checkpoint_ref, unreadable};
use crate::node::book::{Book, BookLookup, Number, VersionBook};
use crate::node::by_path::ByPath;
use crate::node::flush::covers;
use crate::node::gc::Gc;
use crate::node::keeping::Chosen;
use crate::node::ledger::Ledger;
use crate::node::run::Node;
use crate::node::visibility::Visibility;
use crate::node::visibility::sessions::Sessions;
use crate::node::visibility::tree_names::TreeNames;
use std::collections::BTreeSet;
use std::sync::Arc;
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::id::Step;
use tidemark_protocol::lineage;
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::Candidate;
use tidemark_protocol::recovery::Sight;
use tidemark_protocol::report::{ApiError, BrokenInvariant, ErrorCode, path_text};

/// Names in an error about several: a person reads a few, and `ckptctl ls` shows all.
const NAMES_MAX: usize = 10;

/// How a person names a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    Path(Vec<u8>),
    /// A step of one run, or of all runs.
    Step {
        run: Option<Vec<u8>>,
        step: u64,
    },
    /// The newest of one run, or of the only run.
    Latest {
        run: Option<Vec<u8>>,
    },
}

impl Node {
    /// Returns the path of the checkpoint that `wanted` names. The outer `None`: the loop has stopped. The inner one: there is
    /// none.
    ///
    /// # Errors
    /// Fails when `wanted` names several.
    pub async fn path_of(&self, wanted: Wanted) -> Option<Result<Option<Vec<u8>>, ApiError>> {
        self.ask(move |engine| engine.selection().find(&wanted).map(|found| found.map(Book::path))).await
    }

    /// Returns the path of the checkpoint that became whole last, of those that the jobs of all runs would load now. The outer
    /// `None`: the loop has stopped. The inner one: no job would load anything.
    pub async fn whole_last(&self) -> Option<Option<Vec<u8>>> {
        self.ask(|engine| engine.selection().whole_last().map(Book::path)).await
    }
}

/// A checkpoint that has the requested step.
#[derive(Debug, Clone, Copy)]
struct AtStep<'a> {
    run: &'a RunPath,
    /// Tier-3 has a commit of it, whether it can be read or not.
    is_committed: bool,
}

/// Returns the index of the one that is meant among several with one step: the only one, or the only committed one if all are of
/// one run.
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

pub(crate) fn several(what: &str, names: impl Iterator<Item = String>, action: &str) -> ApiError {
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

pub(crate) fn step_of(book: &Book) -> Option<Step> {
    let newest = book.newest().or_else(|| book.unreadable()).map(|(_, version)| version.record().step);
    let present = || book.candidate.as_ref().map(|candidate| candidate.step);
    newest.or_else(present).flatten()
}

/// Whether Tier-3 has a commit of it, readable or not.
pub(crate) fn has_commit(book: &Book) -> bool {
    book.committed().is_some() || book.unreadable().is_some()
}

/// Whether a person names this run, by its path or as `ls` shows it.
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

/// Selects the checkpoint that a job would load, or that a person names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Selection<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a Ledger,
    pub(crate) gc: &'a Gc,
    pub(crate) visibility: &'a Visibility,
}

impl<'a> Selection<'a> {
    /// Returns the checkpoint that `wanted` names. `None`: there is none. Costs a pass over the books.
    ///
    /// # Errors
    /// Fails when `wanted` names several. The caller may remove the chosen one for good, so none is chosen by chance.
    pub(crate) fn find(self, wanted: &'a Wanted) -> Result<Option<&'a Book>, ApiError> {
        match wanted {
            Wanted::Path(path) => Ok(self.by_path().find_at(path)),
            Wanted::Step { run, step } => {
                let found: Vec<_> = self.books().at_step(run.as_deref(), *step).collect();
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
                Ok(self.books().run_of_latest(run.as_deref())?.and_then(|run| self.latest_of(run)))
            }
        }
    }

    /// Returns the newest committed checkpoint of a run that its job would load, as the job chooses it. If the job removed all,
    /// returns the newest of those.
    fn latest_of(self, run: &RunPath) -> Option<&'a Book> {
        let loadable = self.newest_in_sight(run, Checkpoint::is_committed);
        loadable
            .and_then(|found| self.books().book_of(found.record()))
            .or_else(|| self.books().newest_committed_of(run))
    }

    /// Returns the checkpoint that became whole last, of those that the jobs of all runs would load now. Steps of two runs do not
    /// say which is newer. Only programs that read use it, so several runs are no error. Costs a pass over the versions of each
    /// run.
    fn whole_last(self) -> Option<&'a Book> {
        let runs: BTreeSet<_> = self.ledger.books.keys().map(|id| &id.run).collect();
        let newest = runs.into_iter().filter_map(|run| self.newest_in_sight(run, |_| true));
        let records = newest.map(Checkpoint::record);
        self.books().book_of(records.max_by_key(|record| (record.completed_at_ns, lineage::order(record)))?)
    }

    /// Whether the job, or a person, took all names of a version away, and nothing brings them back by itself.
    pub(crate) fn is_removed(self, book: &Book, number: Number, version: &VersionBook) -> bool {
        !version.contents.is_empty()
            && self.are_removals_meant(book, number)
            && version.contents.keys().all(|path| self.tree_names().is_gone(path))
    }

    /// Whether names of a version that are gone were taken away by the job, or by a person, and nothing brings them back by itself.
    fn are_removals_meant(self, book: &Book, number: Number) -> bool {
        !self.visibility.may_be_undone(&book.id)
            && !self.visibility.is_out_of_sight(&book.id, number)
            && !self.gc.is_unshown(&book.id, number)
    }

    /// Checkpoints that were committed and cannot be read whole, and why; not what was removed, nor what a newer version of the same
    /// checkpoint took the place of. Costs a pass over the versions, and over their files where something is lost.
    pub(crate) fn lost_checkpoints(self) -> Vec<(String, String)> {
        let mut lost = Vec::new();
        for book in self.ledger.books.values() {
            let committed = book
                .committed()
                .filter(|(_, version)| self.tree_names().why_lost(version.record()).is_some());
            // A version committed after the damage stands in for the unreadable one.
            let unreadable = book
                .unreadable()
                .filter(|(number, _)| book.committed().is_none_or(|(committed, _)| committed < *number));
            let Some((number, version)) = unreadable.or(committed) else { continue };
            let unreadable = version.checkpoint.why_unreadable().map(ToOwned::to_owned);
            let Some(why) = unreadable.or_else(|| self.tree_names().why_lost(version.record())) else {
                continue;
            };
            if !self.is_removed(book, *number, version) {
                lost.push((path_text(&book.path()), why));
            }
        }
        lost
    }

    /// Returns the version of a run that a job would load, of those that fit. For the job, removed versions are not there. Costs a
    /// pass over the versions, and a sort of them where the first was removed.
    pub(crate) fn newest_in_sight(
        self,
        run: &RunPath,
        fits: impl Fn(&Checkpoint) -> bool,
    ) -> Option<&'a Checkpoint> {
        let is_there = |(book, number, version): &(&Book, Number, &VersionBook)| {
            book.candidate.is_some() || !self.is_removed(book, *number, version)
        };
        type Row<'a> = (&'a Book, Number, &'a VersionBook);
        fn place<'a>(row: &Row<'a>) -> impl Ord + use<'a> {
            lineage::order_to_resume(row.2.record())
        }
        let newer_first = |a: &Row<'_>, b: &Row<'_>| place(b).cmp(&place(a));
        let books = self.ledger.books.values().filter(|book| book.id.run == *run);
        let all = books
            .flat_map(|book| book.versions.iter().map(move |(number, version)| (book, *number, version)));
        let loadable = all.filter(|(.., version)| {
            let checkpoint = &version.checkpoint;
            let stands = checkpoint.is_alive() || checkpoint.is_committed();
            stands
                && checkpoint.is_proven()
                && fits(checkpoint)
                && self.tree_names().why_lost(version.record()).is_none()
        });
        let newest = loadable.clone().min_by(newer_first)?;
        if is_there(&newest) {
            return Some(&newest.2.checkpoint);
        }
        let mut sorted: Vec<_> = loadable.collect();
        sorted.sort_by(newer_first);
        sorted.into_iter().find(is_there).map(|(.., version)| &version.checkpoint)
    }

    pub(crate) fn newest_committed(self, wanted: &Wanted) -> Result<Chosen, ApiError> {
        let none = |what: &str| {
            ApiError::new(ErrorCode::NotFound, what.to_owned(), "`ckptctl ls` shows what there is")
        };
        let book = self.find(wanted)?.ok_or_else(|| none("there is no such checkpoint"))?;
        let path = path_text(&book.path());
        let damaged = book.unreadable().and_then(|(_, version)| version.checkpoint.why_unreadable());
        let (number, version) = book.committed().ok_or_else(|| match damaged {
            Some(why) => unreadable(&path, why),
            None => none(&format!("no version of {path} is committed")),
        })?;
        let reference = checkpoint_ref(&version.checkpoint);
        let version = version.record().version.clone();
        Ok(Chosen { id: book.id.clone(), number: *number, version, reference })
    }

    /// Returns the path of a checkpoint that may be hidden: one that was never recorded has no book to find it by. A step prefers
    /// hidden checkpoints over those in the tree. `latest` means the newest, in the tree or not.
    pub(crate) fn path_out_of_sight(self, wanted: &Wanted) -> Result<Option<Vec<u8>>, ApiError> {
        let (run, step) = match wanted {
            Wanted::Path(path) => return Ok(Some(path.clone())),
            Wanted::Latest { run } => {
                let run = self.books().run_of_latest(run.as_deref())?;
                return Ok(run.and_then(|run| self.books().newest_committed_of(run)).map(Book::path));
            }
            Wanted::Step { run, step } => (run.as_deref(), *step),
        };
        let is_it = |candidate: &&Candidate| {
            candidate.step.is_some_and(|found| found.0 == step)
                && run.is_none_or(|run| is_run(&candidate.id.run, run))
        };
        let torn = self.sessions().torn();
        let torn = torn.iter().map(|(candidate, _)| candidate).filter(is_it);
        let torn = torn.filter_map(|candidate| Some(candidate.id.path()?.as_bytes().to_vec()));
        let removed =
            self.books().at_step(run, step).filter(|book| book.candidate.is_none() && has_commit(book));
        let mut paths: BTreeSet<Vec<u8>> = removed.map(Book::path).chain(torn).collect();
        match paths.len() {
            0 => Ok(self.find(wanted)?.map(Book::path)),
            1 => Ok(paths.pop_first()),
            _ => Err(several_at_step(step, paths.into_iter())),
        }
    }

    /// Versions of which the start could not read the marker or the manifest.
    pub(crate) fn unreadable_below(self, place: &[u8]) -> Vec<BrokenInvariant> {
        let found = self.by_path().books_about(place).flat_map(|book| {
            let there = book.versions.iter().filter(|(number, version)| !self.is_removed(book, **number, version));
            let whys = there.filter_map(|(_, version)| version.checkpoint.why_unreadable());
            whys.map(|why| BrokenInvariant {
                path: path_text(&book.path()),
                invariant: "a_committed_version_has_its_marker_and_its_manifest".to_owned(),
                what: format!("{why}; restore that object from a copy of Tier-3 and restart the daemon, or remove the checkpoint"),
            })
        });
        found.collect()
    }

    /// Returns which names of a version are in the tree, whatever checkpoint they count for now. Names that come back by
    /// themselves, if the process that removed them fails, count as present.
    pub(crate) fn sight_of(self, book: &Book, number: Number, version: &VersionBook) -> Sight {
        let newest = book.newest().is_some_and(|(_, newest)| std::ptr::eq(newest, version));
        if self.tree_names().shows_all(version) || newest && self.visibility.may_be_undone(&book.id) {
            return Sight::All;
        }
        let (left, of) = (self.tree_names().names_in_sight(version), version.contents.len());
        let gone = version.contents.keys().filter(|path| self.tree_names().is_gone(path)).count();
        // A name that has other bytes was written over; by which program and how far is not known here.
        if left > 0 && left + gone == of && self.are_removals_meant(book, number) {
            return Sight::InPart { left: left as u64, of: of as u64 };
        }
        Sight::Missing
    }

    fn books(self) -> BookLookup<'a> {
        BookLookup { ledger: self.ledger }
    }

    fn by_path(self) -> ByPath<'a> {
        ByPath { shared: self.shared, ledger: self.ledger }
    }

    fn sessions(self) -> Sessions<'a> {
        Sessions { shared: self.shared, ledger: self.ledger }
    }

    fn tree_names(self) -> TreeNames<'a> {
        TreeNames { shared: self.shared, ledger: self.ledger }
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

//! Saves over a version that is whole: all names exist from the start, so that names alone prove nothing.
//!
//! Owns: how much of a family of rank files belongs to this save, and whether its job is known to have left the rest as it was. Does not
//! own: which files are such a family (`names`), the consequences (the parent).
//!
//! A rank file that equals the version before counts as missing if other files of its family were written since. The processes that wrote
//! that version have to write the rest. If one of them was killed, the save is torn; if all of them ended well, they left it on purpose.

use super::names::{ByName, named};
use super::{Case, Fate, FileFact, Finding, Writer};
use crate::path::RelPath;
use crate::record::Evidence;
use std::collections::BTreeSet;

/// The relation of a file to the version before, which is the newest complete one, in Tier-3 already or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Before {
    /// The version before has no such name.
    #[default]
    Nothing,
    /// Other bytes: this save wrote over the file.
    Other,
    /// The same bytes: this save has not written the file.
    Same,
}

/// The part of a family of rank files that belongs to this save.
#[derive(Debug, PartialEq, Eq)]
enum Saved {
    All,
    /// All but the files that these ranks still have to write.
    Part(Vec<u64>),
    /// None: the save wrote over other files of the checkpoint only.
    Nothing,
}

/// Returns how much of `family` this save wrote. `family`: the files by their ranks, at least as many as the job has ranks (`size`).
/// `over`: the save wrote over some file of the checkpoint. Files that an older and larger job left beside those of all ranks do not count.
fn saved(family: &[(u64, Before)], size: u64, over: bool) -> Saved {
    let old: Vec<u64> =
        family.iter().filter(|(_, before)| *before == Before::Same).map(|(rank, _)| *rank).collect();
    let new = family.len() - old.len();
    if old.is_empty() || u64::try_from(new).is_ok_and(|new| new >= size) {
        Saved::All
    } else if new > 0 {
        Saved::Part(old)
    } else if over {
        Saved::Nothing
    } else {
        Saved::All
    }
}

impl ByName<'_> {
    pub(super) fn before(self, path: &RelPath) -> Before {
        self.case.facts.files.get(path).map_or(Before::Nothing, |fact| fact.before)
    }

    /// Returns the finding about a family of rank files all of whose names exist.
    pub(super) fn of_this_save(self, family: &[(u64, Before)], size: u64, detail: String) -> Finding {
        let over = self.case.present().any(|(_, _, fact)| fact.before == Before::Other);
        match saved(family, size, over) {
            Saved::All => Finding::Proves(Evidence::Count, detail),
            Saved::Part(_) | Saved::Nothing if self.was_rest_left() => {
                let detail = format!("{detail}, and all who wrote the version before ended well");
                Finding::Proves(Evidence::Count, detail)
            }
            Saved::Part(old) => {
                let distinct: BTreeSet<_> = family.iter().map(|(rank, _)| rank).collect();
                // If a name carries two ranks, one rank alone does not tell which file is missing.
                let missing =
                    if distinct.len() == family.len() { named(old.iter().copied()) } else { Vec::new() };
                let new = family.len() - old.len();
                Finding::Missing(
                    missing,
                    format!("only {new} of {size} ranks have saved over the version before"),
                )
            }
            // The family may be left over from a job that wrote more. If a writer failed, its files may have been still to come.
            Saved::Nothing if self.case.failed_early().is_some() => Finding::Missing(
                Vec::new(),
                format!("none of {size} ranks has saved over all of the version before"),
            ),
            Saved::Nothing => Finding::Silent,
        }
    }

    /// Whether only the processes that wrote the version before wrote this save, and all of them are known to have ended well.
    fn was_rest_left(self) -> bool {
        let waits = |fact: &FileFact| fact.before == Before::Same;
        self.case.is_of_the_same_processes()
            && self.case.present().all(|(_, _, fact)| !waits(fact) || fact.ended_well())
            && self.case.crew().all(|writer| writer.fate == Fate::Exited)
    }
}

impl Case<'_> {
    /// Whether all writers of this save wrote the version before, too. A process that lives for one save only tells nothing about the
    /// others of its job.
    fn is_of_the_same_processes(&self) -> bool {
        let Some(history) = self.facts.history else { return false };
        let wrote_before = |writer: &Writer| {
            writer.session == history.session && history.processes.contains(&writer.process)
        };
        self.present().any(|(_, _, fact)| fact.before != Before::Same && !fact.writers.is_empty())
            && self.present().flat_map(|(_, _, fact)| &fact.writers).all(wrote_before)
    }

    /// Returns the writers of this save, and those that have to write the rest of it.
    pub(super) fn crew(&self) -> impl Iterator<Item = &Writer> {
        let same = self.is_of_the_same_processes();
        let files = self.present().filter(move |(_, _, fact)| !fact.committed || same);
        files.flat_map(|(_, _, fact)| &fact.writers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_of_this_save_once_every_rank_wrote_its_file() {
        use Before::{Nothing as New, Other as Over, Same as Old};
        let family = |before: &[Before]| (0..).zip(before.iter().copied()).collect::<Vec<_>>();
        let saved = |before: &[Before], over: bool| saved(&family(before), 2, over);
        assert_eq!(saved(&[New, New], false), Saved::All, "the first save");
        assert_eq!(saved(&[Over, Over], true), Saved::All);
        assert_eq!(saved(&[Over, Old], true), Saved::Part(vec![1]));
        assert_eq!(saved(&[Old, New], false), Saved::Part(vec![0]), "the job has grown");
        assert_eq!(saved(&[Over, Over, Old, Old], true), Saved::All, "the job has shrunk");
        assert_eq!(saved(&[Over, Old, Old, Old], true), Saved::Part(vec![1, 2, 3]));
        assert_eq!(saved(&[Old, Old], false), Saved::All, "files were added to what is whole");
        assert_eq!(saved(&[Old, Old], true), Saved::Nothing, "the ranks' files may follow");
    }
}

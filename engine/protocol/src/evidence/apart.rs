//! Files beside a checkpoint that is whole without them: a log, an editor's file, what an evaluation adds.
//!
//! Owns: which open or cut files do not delay a verdict, and from when on; that a failing program does not damage a whole checkpoint by
//! adding to it. Does not own: the proof of the rest (the parent, `names`), that these files stay in the tree and out of the record (the
//! node).
//!
//! A file whose name no rule knows may be needed or not. Such a file is passed over only if the rest is known to be whole without it.
//! Either an index lists the needed files and the rule says that nothing follows, or the rest is the version before, byte for byte. A
//! marker or a rename lists no files: it does not prove that a file cut earlier is no part (Orbax has data under any name).

use super::{Before, Case, Facts, Fate, FileFact, Finding, PARTS, Told, Verdict, below_parent};
use crate::file::FileState;
use crate::path::RelPath;
use crate::recognise::{Candidate, Role, Rule, Rules};
use crate::record::Evidence;
use crate::visibility::Content;
use std::collections::BTreeSet;

/// Returns the verdict on one candidate at `now_ns`, and the files that the verdict passes over.
#[must_use]
pub fn judge(
    rules: &Rules,
    candidate: &Candidate,
    facts: &Facts<'_>,
    now_ns: i64,
) -> (Verdict, BTreeSet<RelPath>) {
    let case = Case { rules, candidate, facts, now_ns };
    let apart = Apart { case: &case };
    apart.without_apart().unwrap_or_else(|| (apart.with_added(), BTreeSet::new()))
}

/// The files that lie apart from the rest of a checkpoint.
#[derive(Clone, Copy)]
struct Apart<'a> {
    case: &'a Case<'a>,
}

impl Apart<'_> {
    /// Returns none if no file lies apart, or if the rest is not whole without those files.
    fn without_apart(self) -> Option<(Verdict, BTreeSet<RelPath>)> {
        let apart = self.apart();
        if apart.is_empty() {
            return None;
        }
        let mut left = self.case.candidate.clone();
        left.files.retain(|path, _| !apart.contains(path));
        let rest = Case { candidate: &left, ..*self.case };
        let of_rest = Apart { case: &rest };
        if of_rest.is_the_version_before() {
            return Some((of_rest.with_added(), apart));
        }
        let lists = |evidence: Evidence| evidence == Evidence::Index && rest.is_last(evidence);
        match rest.verdict() {
            Verdict::Complete { evidence, .. } if !lists(evidence) => None,
            // A file that may be closed in a moment then belongs to this version, such as a tokenizer after the index of the model.
            Verdict::Complete { detail, .. } if !rest.has_settled() && self.may_be_closed(&apart) => {
                Some((rest.wait(&format!("{detail}; other files in there are not closed")), BTreeSet::new()))
            }
            whole @ Verdict::Complete { .. } => Some((whole, apart)),
            read @ Verdict::ReadIndex { .. } => Some((read, BTreeSet::new())),
            _ => None,
        }
    }

    /// Judges the candidate with the added files. Closed files that no rule knows take nothing from the version before that lies beside
    /// them, whoever wrote them and however their writers ended. Because they may be half of something, a version with them is not
    /// committed.
    fn with_added(self) -> Verdict {
        match self.case.verdict() {
            Verdict::Torn { why } | Verdict::Settled { detail: why, undecided: true } if self.only_adds() => {
                let detail =
                    format!("all that was complete is there unchanged, and to what was added: {why}");
                let rests = self.case.has_settled() || self.case.facts.told != Told::No;
                if rests { Verdict::Settled { detail, undecided: false } } else { self.case.wait(&detail) }
            }
            verdict => verdict,
        }
    }

    fn only_adds(self) -> bool {
        let is_added = |role: Role, fact: &FileFact| {
            role == Role::Other && (fact.state != FileState::Cut || fact.was_left_well())
        };
        self.is_the_version_before()
            && self.case.present().all(|(_, role, fact)| fact.before == Before::Same || is_added(role, fact))
    }

    /// Selects the files that lie beside the rest. A file is left out if a writer of the rest began it after some of the rest existed, and
    /// left it open. Such a file may be the writer's last save, such as a data loader's state after the index.
    fn apart(self) -> BTreeSet<RelPath> {
        let (beside, rest): (Vec<_>, Vec<_>) = self.case.present().partition(|found| self.is_apart(*found));
        let first_ns = rest.iter().map(|(_, _, fact)| fact.published_at_ns).min();
        let processes = rest.iter().flat_map(|(_, _, fact)| &fact.writers).map(|writer| writer.process);
        let processes: BTreeSet<_> = processes.collect();
        let follows = |fact: &FileFact| {
            fact.state == FileState::Cut
                && first_ns.is_some_and(|first_ns| fact.opened_at_ns >= first_ns)
                && fact.writers.iter().any(|writer| processes.contains(&writer.process))
        };
        beside.into_iter().filter(|(_, _, fact)| !follows(fact)).map(|(path, ..)| path.clone()).collect()
    }

    /// Whether no program closed the file and no rule, no index and no version before knows its name.
    fn is_apart(self, (path, role, fact): (&RelPath, Role, &FileFact)) -> bool {
        let unclosed = match fact.state {
            FileState::Open { .. } | FileState::Mapped => true,
            FileState::Cut => !fact.vouched && fact.content != Content::Whole && !fact.was_left_well(),
            FileState::Closed | FileState::Sealed { .. } => false,
        };
        unclosed && role == Role::Other && fact.before == Before::Nothing && !self.case.is_listed(path)
    }

    fn may_be_closed(self, apart: &BTreeSet<RelPath>) -> bool {
        let is_over = |fact: &FileFact| {
            fact.state == FileState::Cut && fact.writers.iter().all(|writer| writer.fate != Fate::Ended)
        };
        let open = apart.iter().filter_map(|path| self.case.facts.files.get(path)).any(|fact| !is_over(fact));
        open && self.case.facts.told == Told::No
    }

    /// Whether every name of the newest complete version is there, with its bytes.
    fn is_the_version_before(self) -> bool {
        let same = self.case.present().filter(|(_, _, fact)| fact.before == Before::Same).count();
        self.case.facts.names_before > 0 && same == self.case.facts.names_before
    }
}

impl Case<'_> {
    /// Whether a proof by index suffices for a file that a program left open when it ended with status 0. If nothing follows an index,
    /// files that it does not list are not needed. A model's parts are often fetched by a program that leaves closing to its end
    /// (`curl URL >shard`).
    pub(super) fn is_settled_by(&self, index: &Finding, (path, fact): (&RelPath, &FileFact)) -> bool {
        let proves = matches!(index, Finding::Proves(Evidence::Index, _));
        if !proves || self.rule().is_some_and(Rule::more_follows) {
            return false;
        }
        let role = self.candidate.files.get(path);
        if self.is_listed(path) || matches!(role, Some(Role::Index(_))) {
            return self.candidate.framework == PARTS && !self.is_of_a_trainer();
        }
        role == Some(&Role::Other) && fact.before != Before::Other
    }

    fn is_listed(&self, path: &RelPath) -> bool {
        self.facts.indices.iter().any(|(index, covered)| {
            let lists = |name: RelPath| covered.as_ref().is_ok_and(|covered| covered.contains_key(&name));
            below_parent(index, path).is_some_and(lists)
        })
    }
}

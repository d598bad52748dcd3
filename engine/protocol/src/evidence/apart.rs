//! Files beside a checkpoint that is whole without them: a log, an editor's file, what an evaluation adds.
//!
//! Owns: which open or cut files hold nothing back, and from when on; that a program which fails takes nothing from what is whole by
//! adding to it. Does not own: what proves the rest (the parent, `names`), that they stay in the tree and out of the record (the node).
//!
//! A name that no rule knows may be needed or not. So it is passed over only where the rest is known to be whole without it: an index
//! lists what is needed, and the rule says that nothing follows; or the rest is what the version before holds, byte for byte. A marker or
//! a rename names nothing: of a file that was cut before it they do not say that it is no part (Orbax has data under any name).

use super::{Before, Case, Facts, Fate, FileFact, Finding, PARTS, Told, Verdict, below_parent};
use crate::file::FileState;
use crate::path::RelPath;
use crate::recognise::{Candidate, Role, Rule, Rules};
use crate::record::Evidence;
use crate::visibility::Content;
use std::collections::BTreeSet;

/// The verdict on one candidate at `now_ns`, and the files that it passes over: it is about the others.
#[must_use]
pub fn judge(
    rules: &Rules,
    candidate: &Candidate,
    facts: &Facts<'_>,
    now_ns: i64,
) -> (Verdict, BTreeSet<RelPath>) {
    let case = Case { rules, candidate, facts, now_ns };
    case.without_apart().unwrap_or_else(|| (case.with_added(), BTreeSet::new()))
}

impl Case<'_> {
    /// None where nothing lies apart, or the rest is not whole without it.
    fn without_apart(&self) -> Option<(Verdict, BTreeSet<RelPath>)> {
        let apart = self.apart();
        if apart.is_empty() {
            return None;
        }
        let mut left = self.candidate.clone();
        left.files.retain(|path, _| !apart.contains(path));
        let rest = Case { candidate: &left, ..*self };
        if rest.is_the_version_before() {
            return Some((rest.with_added(), apart));
        }
        let lists = |evidence: Evidence| evidence == Evidence::Index && rest.is_last(evidence);
        match rest.verdict() {
            Verdict::Complete { evidence, .. } if !lists(evidence) => None,
            // It may be closed in a moment, and is of this version then: a tokenizer after the index of the model.
            Verdict::Complete { detail, .. } if !rest.has_settled() && self.may_be_closed(&apart) => {
                Some((rest.wait(&format!("{detail}; other files in there are not closed")), BTreeSet::new()))
            }
            whole @ Verdict::Complete { .. } => Some((whole, apart)),
            read @ Verdict::ReadIndex { .. } => Some((read, BTreeSet::new())),
            _ => None,
        }
    }

    /// Nothing is lacking of what the version before holds because of closed files beside it that no rule knows, whoever wrote them and
    /// however they ended. They may be half of something, so that they make no version that is committed.
    fn with_added(&self) -> Verdict {
        match self.verdict() {
            Verdict::Torn { why } | Verdict::Settled { detail: why, undecided: true } if self.only_adds() => {
                let detail =
                    format!("all that was complete is there unchanged, and to what was added: {why}");
                let rests = self.has_settled() || self.facts.told != Told::No;
                if rests { Verdict::Settled { detail, undecided: false } } else { self.wait(&detail) }
            }
            verdict => verdict,
        }
    }

    fn only_adds(&self) -> bool {
        let is_added = |role: Role, fact: &FileFact| {
            role == Role::Other && (fact.state != FileState::Cut || fact.was_left_well())
        };
        self.is_the_version_before()
            && self.present().all(|(_, role, fact)| fact.before == Before::Same || is_added(role, fact))
    }

    /// Selects the files that lie beside the rest. If a writer of the rest began a file after some of the rest was there, and left it open, the
    /// file may be what that writer saved last, such as a data loader's state after the index: it is no log, and is not selected.
    fn apart(&self) -> BTreeSet<RelPath> {
        let (beside, rest): (Vec<_>, Vec<_>) = self.present().partition(|found| self.is_apart(*found));
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

    /// Not closed by a program, of a name that no rule, no index and no version before knows.
    fn is_apart(&self, (path, role, fact): (&RelPath, Role, &FileFact)) -> bool {
        let unclosed = match fact.state {
            FileState::Open { .. } | FileState::Mapped => true,
            FileState::Cut => !fact.vouched && fact.content != Content::Whole && !fact.was_left_well(),
            FileState::Closed | FileState::Sealed { .. } => false,
        };
        unclosed && role == Role::Other && fact.before == Before::Nothing && !self.is_listed(path)
    }

    /// Whether a proof by index says enough of a file that a program left open when it ended with status 0. Where nothing follows an index,
    /// what it does not list is not needed. And what people fetch of a model's parts is left to the end of its program to close
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

    fn may_be_closed(&self, apart: &BTreeSet<RelPath>) -> bool {
        let is_over = |fact: &FileFact| {
            fact.state == FileState::Cut && fact.writers.iter().all(|writer| writer.fate != Fate::Ended)
        };
        let open = apart.iter().filter_map(|path| self.facts.files.get(path)).any(|fact| !is_over(fact));
        open && self.facts.told == Told::No
    }

    /// Every name of the newest complete version is there, with its bytes.
    fn is_the_version_before(&self) -> bool {
        let same = self.present().filter(|(_, _, fact)| fact.before == Before::Same).count();
        self.facts.names_before > 0 && same == self.facts.names_before
    }
}

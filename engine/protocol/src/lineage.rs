//! The order of a run's versions, and which one a job comes back to.
//!
//! Owns: timelines and the order along them, the watermark, the choice of the newest recoverable version with its
//! reasons. Does not own: what is retired (`retention`), where bytes are fetched from (`residency`).
//!
//! Within a timeline versions are ordered by when they were completed: the coordinator stamps records of a run with
//! times that strictly rise, also across its own replacement (one above the highest stamp that it finds). A step
//! alone is no order: a job that went back saves the same step again.

use crate::id::{Step, Timeline};
use crate::key::VersionId;
use std::collections::BTreeMap;

/// Where a version stands in its run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub version: VersionId,
    pub step: Option<Step>,
    /// The record's stamp.
    pub completed_at_ns: i64,
    pub kind: StandingKind,
    /// Listed files that no live copy can supply; any at all and the version cannot be had whole.
    pub missing: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StandingKind {
    /// Nothing proves it complete: listed, never chosen.
    Settled,
    /// Its record exists, and it may still be lost with its nodes.
    Complete,
    Committed,
}

/// Where a timeline left its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fork {
    pub parent: Timeline,
    /// The stamp of the version that was restored: what the parent completed later is another branch.
    /// `None` when nothing was restored.
    pub at_ns: Option<i64>,
}

/// A run's branches. Timeline 0 has no entry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lineage {
    forks: BTreeMap<Timeline, Fork>,
}

/// Why a timeline cannot be what it says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("timeline {timeline} cannot leave {parent}: a timeline leaves an older one, once")]
pub struct BadFork {
    pub timeline: Timeline,
    pub parent: Timeline,
}

impl Lineage {
    /// # Errors
    /// When the parent is not older, or the timeline left another one before. So the branches are a tree.
    pub fn fork(&mut self, timeline: Timeline, fork: Fork) -> Result<(), BadFork> {
        let parent = fork.parent;
        let known = self.forks.get(&timeline);
        if parent >= timeline || known.is_some_and(|known| *known != fork) {
            return Err(BadFork { timeline, parent });
        }
        self.forks.insert(timeline, fork);
        Ok(())
    }

    /// The number for a timeline that opens now.
    #[must_use]
    pub fn next_timeline(&self) -> Timeline {
        self.forks.keys().next_back().copied().unwrap_or_default().next()
    }

    /// The newest timeline, the one a job that comes back continues.
    #[must_use]
    pub fn newest(&self) -> Timeline {
        self.forks.keys().next_back().copied().unwrap_or_default()
    }

    /// Whether a version completed at that time on `timeline` is an ancestor of what is written on `head` (or on it).
    #[must_use]
    pub fn contains(&self, head: Timeline, timeline: Timeline, completed_at_ns: i64) -> bool {
        let (mut at, mut limit) = (head, i64::MAX);
        loop {
            if at == timeline {
                return completed_at_ns <= limit;
            }
            // Parents are older, so this ends.
            let Some(fork) = self.forks.get(&at) else { return false };
            let Some(at_ns) = fork.at_ns else { return false };
            limit = limit.min(at_ns);
            at = fork.parent;
        }
    }

    /// The versions on the lineage of `head`, oldest first.
    #[must_use]
    pub fn along<'a>(&self, head: Timeline, versions: &'a [Standing]) -> Vec<&'a Standing> {
        let on = |v: &&Standing| self.contains(head, v.version.timeline, v.completed_at_ns);
        let mut along: Vec<_> = versions.iter().filter(on).collect();
        along.sort_by_key(|v| order(v));
        along
    }

    /// The newest committed version of the lineage: what may be forgotten is below it.
    #[must_use]
    pub fn watermark<'a>(&self, head: Timeline, versions: &'a [Standing]) -> Option<&'a Standing> {
        self.along(head, versions).into_iter().rfind(|v| v.kind == StandingKind::Committed)
    }
}

/// Order within one lineage. Stamps differ; the rest only makes the order total for stamps that do not.
fn order(standing: &Standing) -> (i64, Option<Step>, &VersionId) {
    (standing.completed_at_ns, standing.step, &standing.version)
}

/// Which version a job comes back to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    pub chosen: Option<VersionId>,
    /// One sentence.
    pub reason: String,
    /// Newer ones that were not chosen, newest first, each with why.
    pub passed_over: Vec<(VersionId, String)>,
    /// The lineage had none, and this one is of another branch.
    pub other_branch: bool,
}

/// The newest version of the lineage of `head` that can be had whole; of other branches only when the lineage has
/// none. Pure, so that it is asked once and frozen for all ranks alike.
#[must_use]
pub fn newest_recoverable(lineage: &Lineage, head: Timeline, versions: &[Standing]) -> Choice {
    let mut passed_over = Vec::new();
    let mut newest = |candidates: &mut dyn Iterator<Item = &Standing>| {
        for candidate in candidates {
            match unfit(candidate) {
                None => return Some(candidate.clone()),
                Some(why) => passed_over.push((candidate.version.clone(), why)),
            }
        }
        None
    };
    let along = lineage.along(head, versions);
    if let Some(chosen) = newest(&mut along.iter().rev().copied()) {
        let state = if chosen.kind == StandingKind::Committed { "committed" } else { "complete" };
        let reason = format!("the newest of timeline {head}'s lineage that can be had whole; it is {state}");
        return Choice { chosen: Some(chosen.version), reason, passed_over, other_branch: false };
    }
    let mut others: Vec<_> =
        versions.iter().filter(|v| !lineage.contains(head, v.version.timeline, v.completed_at_ns)).collect();
    others.sort_by_key(|v| order(v));
    let chosen = newest(&mut others.iter().rev().copied());
    let reason = match &chosen {
        Some(chosen) => format!(
            "timeline {head}'s lineage has none that can be had whole; this one is of timeline {}, another branch",
            chosen.version.timeline
        ),
        None if versions.is_empty() => "the run has no checkpoint".to_owned(),
        None => format!("none of {} versions can be had whole", versions.len()),
    };
    let other_branch = chosen.is_some();
    Choice { chosen: chosen.map(|chosen| chosen.version), reason, passed_over, other_branch }
}

/// Why a version cannot be chosen.
fn unfit(standing: &Standing) -> Option<String> {
    if standing.kind == StandingKind::Settled {
        return Some("nothing proves that it is complete".into());
    }
    let first = standing.missing.first()?;
    Some(format!("{} of its files have no good copy, {first} for one", standing.missing.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Version;
    use crate::record::tests::version;
    use StandingKind::{Committed, Complete, Settled};
    use proptest::prelude::*;

    fn standing(timeline: u64, at: i64, kind: StandingKind) -> Standing {
        let number = Version(u64::try_from(at).unwrap());
        Standing {
            version: VersionId { timeline: Timeline(timeline), version: number, ..version() },
            step: None,
            completed_at_ns: at,
            kind,
            missing: Vec::new(),
        }
    }

    fn forked() -> Lineage {
        let mut lineage = Lineage::default();
        lineage.fork(Timeline(1), Fork { parent: Timeline(0), at_ns: Some(2) }).unwrap();
        lineage
    }

    fn chosen(choice: &Choice) -> Option<u64> {
        choice.chosen.as_ref().map(|version| version.version.0)
    }

    #[test]
    fn what_the_parent_did_after_the_fork_is_another_branch() {
        let versions = [standing(0, 1, Committed), standing(0, 2, Committed), standing(0, 3, Committed)];
        let choice = newest_recoverable(&forked(), Timeline(1), &versions);
        assert_eq!((chosen(&choice), choice.other_branch), (Some(2), false));
        let choice = newest_recoverable(&forked(), Timeline(0), &versions);
        assert_eq!(chosen(&choice), Some(3));
        assert_eq!(forked().watermark(Timeline(1), &versions).map(|v| v.completed_at_ns), Some(2));
    }

    #[test]
    fn the_newest_that_is_whole_is_chosen_and_the_rest_is_named() {
        let mut versions = [
            standing(0, 1, Committed),
            standing(0, 2, Committed),
            standing(0, 3, Complete),
            standing(0, 4, Settled),
        ];
        let lineage = Lineage::default();
        assert_eq!(chosen(&newest_recoverable(&lineage, Timeline(0), &versions)), Some(3));
        versions[2].missing = vec!["a".into()];
        let choice = newest_recoverable(&lineage, Timeline(0), &versions);
        assert_eq!((chosen(&choice), choice.passed_over.len()), (Some(2), 2));
        for version in &mut versions {
            version.missing = vec!["a".into()];
        }
        let choice = newest_recoverable(&lineage, Timeline(0), &versions);
        assert_eq!((chosen(&choice), choice.passed_over.len()), (None, 4));
    }

    #[test]
    fn another_branch_serves_only_when_the_lineage_has_none() {
        let versions = [standing(0, 3, Committed)];
        let choice = newest_recoverable(&forked(), Timeline(1), &versions);
        assert_eq!((chosen(&choice), choice.other_branch), (Some(3), true));
    }

    #[test]
    fn branches_are_a_tree() {
        let mut lineage = forked();
        let fork = |parent| Fork { parent: Timeline(parent), at_ns: None };
        assert!(lineage.fork(Timeline(2), fork(2)).is_err());
        assert!(lineage.fork(Timeline(1), fork(0)).is_err(), "it left elsewhere before");
        assert_eq!(lineage.next_timeline(), Timeline(2));
    }

    proptest! {
        #[test]
        fn the_choice_does_not_depend_on_the_order_of_reports(
            stamps in prop::collection::btree_map(1_i64..40, (0_u64..2, 0_u8..4), 0..12), turn in 0_usize..12,
        ) {
            let mut versions: Vec<_> = stamps.into_iter().map(|(at, (timeline, kind))| {
                let kinds = [Settled, Complete, Committed, Committed];
                let mut v = standing(timeline, at, kinds[usize::from(kind)]);
                if kind == 3 { v.missing = vec!["x".into()]; }
                v
            }).collect();
            let before = newest_recoverable(&forked(), Timeline(1), &versions);
            if let Some(found) = &before.chosen {
                let found = versions.iter().find(|v| v.version == *found).unwrap();
                prop_assert!(found.kind != Settled && found.missing.is_empty());
            }
            let count = versions.len().max(1);
            versions.rotate_left(turn % count);
            prop_assert_eq!(newest_recoverable(&forked(), Timeline(1), &versions), before);
        }
    }
}

//! Which checkpoint of a run a job comes back to, and why not a newer one.
//!
//! Owns: the choice, with a reason for each version. Does not own: what is known of the copies (the node), the order of
//! versions (`lineage`).

use crate::checkpoint::Checkpoint;
use crate::lineage;
use serde::{Deserialize, Serialize};

/// One version of the run, as the node knows it.
#[derive(Debug, Clone)]
pub struct Standing<'a> {
    pub checkpoint: &'a Checkpoint,
    /// Why it cannot be had whole: a file of it has no good copy left.
    pub lost: Option<String>,
    /// All its names are in the tree.
    pub in_sight: bool,
}

/// What becomes of one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standpoint {
    /// A job that comes back loads this one.
    Chosen,
    /// It is newer than the chosen one, and cannot be loaded.
    PassedOver,
    /// It could be loaded, and a newer one can too.
    Older,
}

/// A version, by its place among those given, and what is said of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    pub index: usize,
    pub standpoint: Standpoint,
    pub reason: String,
}

/// The versions of one run from the newest to the oldest along its lineage, at most one of them chosen.
#[must_use]
pub fn choose(versions: &[Standing<'_>]) -> Vec<Choice> {
    let mut order: Vec<usize> = (0..versions.len()).collect();
    order.sort_by(|a, b| {
        let stamp = |index: &usize| lineage::order(versions[*index].checkpoint.record());
        stamp(b).cmp(&stamp(a))
    });
    let mut chosen = false;
    let mut choices = Vec::with_capacity(order.len());
    for index in order {
        let (standpoint, reason) = match (unfit(&versions[index]), chosen) {
            (Some(why), _) => (Standpoint::PassedOver, why),
            (None, true) => (Standpoint::Older, "a newer one can be loaded".to_owned()),
            (None, false) => {
                chosen = true;
                (Standpoint::Chosen, "the newest that is proven whole and can be read".to_owned())
            }
        };
        choices.push(Choice { index, standpoint, reason });
    }
    choices
}

fn unfit(version: &Standing<'_>) -> Option<String> {
    let checkpoint = version.checkpoint;
    if let Some(why) = checkpoint.failure() {
        return Some(why.to_owned());
    }
    if let Some(why) = checkpoint.why_unreadable() {
        return Some(format!("Tier-3 does not say any more what was committed: {why}"));
    }
    if !checkpoint.is_committed() && !checkpoint.is_alive() {
        return Some("it was given up, or superseded before it was committed".to_owned());
    }
    if !checkpoint.is_proven() {
        return Some(format!("nothing proves that it is whole: {}", checkpoint.evidence().1));
    }
    if let Some(lost) = &version.lost {
        return Some(format!("it cannot be read whole: {lost}"));
    }
    let removed = "its names are not in the tree; `ckptctl undelete` brings them back";
    (!version.in_sight).then(|| removed.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Step, Version};
    use crate::key::VersionId;
    use crate::marker::Decision;
    use crate::record::tests::{record, version};
    use crate::record::{Evidence, Record};

    fn committed(step: u64) -> Checkpoint {
        let version = VersionId { version: Version(step), ..version() };
        let completed_at_ns = i64::try_from(step).unwrap();
        let record = Record {
            version,
            step: Some(Step(step)),
            completed_at_ns,
            evidence: Evidence::Index,
            ..record()
        };
        Checkpoint::decided(record, Decision::Commit)
    }

    fn whole(checkpoint: &Checkpoint) -> Standing<'_> {
        Standing { checkpoint, lost: None, in_sight: true }
    }

    fn standpoints(versions: &[Standing<'_>]) -> Vec<(usize, Standpoint)> {
        choose(versions).into_iter().map(|choice| (choice.index, choice.standpoint)).collect()
    }

    #[test]
    fn the_newest_that_can_be_read_whole_is_chosen_and_every_other_says_why_not() {
        let [one, two, three] = [1, 2, 3].map(committed);
        use Standpoint::{Chosen, Older, PassedOver};
        let mut versions = [whole(&one), whole(&three), whole(&two)];
        assert_eq!(standpoints(&versions), [(1, Chosen), (2, Older), (0, Older)]);
        versions[1].lost = Some("r/a has no good copy".to_owned());
        assert_eq!(standpoints(&versions), [(1, PassedOver), (2, Chosen), (0, Older)]);
        assert!(choose(&versions)[0].reason.contains("r/a has no good copy"));
        versions[2].in_sight = false;
        assert_eq!(standpoints(&versions), [(1, PassedOver), (2, PassedOver), (0, Chosen)]);
        versions[0].in_sight = false;
        assert!(standpoints(&versions).iter().all(|(_, standpoint)| *standpoint == PassedOver));
    }

    #[test]
    fn what_cannot_be_believed_is_passed_over_with_the_reason() {
        let damaged = Checkpoint::unreadable(committed(9).record().clone(), "the marker is empty".to_owned());
        let older = committed(1);
        assert_eq!(
            standpoints(&[whole(&damaged), whole(&older)]),
            [(0, Standpoint::PassedOver), (1, Standpoint::Chosen)]
        );
        let alone = choose(&[whole(&damaged)]);
        assert_eq!(alone[0].standpoint, Standpoint::PassedOver);
        assert!(alone[0].reason.contains("the marker is empty"), "{}", alone[0].reason);
    }

    #[test]
    fn what_was_decided_against_is_never_chosen() {
        let aborted = Checkpoint::decided(committed(9).record().clone(), Decision::Abort);
        let older = committed(1);
        let found = standpoints(&[whole(&aborted), whole(&older)]);
        assert_eq!(found, [(0, Standpoint::PassedOver), (1, Standpoint::Chosen)]);
    }
}

//! Recovery: the checkpoint of a run that a job resumes from, and why not a newer one.
//!
//! Owns: the choice, with a reason for each version. Does not own: the knowledge of the copies (the node), the order of versions
//! (`lineage`).

use crate::checkpoint::Checkpoint;
use crate::lineage;
use serde::{Deserialize, Serialize};

/// A version of the run, as the node knows it.
#[derive(Debug, Clone)]
pub struct Standing<'a> {
    pub checkpoint: &'a Checkpoint,
    /// The reason why the version is not available whole: a file of it has no good copy left.
    pub lost: Option<String>,
    pub sight: Sight,
}

/// The names of a version that are in the tree, with its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight {
    /// All names, or they come back by themselves.
    All,
    /// `left` of `of` names. The job, or a person, removed the others, and nothing has taken their place.
    InPart { left: u64, of: u64 },
    /// Some names are missing, but it is not known that a job or a person removed them.
    Missing,
}

/// The result for one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standpoint {
    /// A job that comes back loads this version.
    Chosen,
    /// The version is newer than the chosen one, but cannot be loaded.
    PassedOver,
    /// The version could be loaded. The chosen one is newer, or its name says that it holds more of a save.
    Older,
}

/// The result for a version, which is given by its index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    pub index: usize,
    pub standpoint: Standpoint,
    pub reason: String,
    /// Whether the version is passed over only because its job, or a person, removed a part of it.
    pub removed_in_part: bool,
}

/// Judges the versions of one run, in the order in which a job would load them ([`lineage::order_to_resume`]); chooses at most
/// one.
#[must_use]
pub fn choose(versions: &[Standing<'_>]) -> Vec<Choice> {
    let mut order: Vec<usize> = (0..versions.len()).collect();
    let place = |index: usize| lineage::order_to_resume(versions[index].checkpoint.record());
    let is_named = |index: usize| place(index).0;
    order.sort_by(|a, b| place(*b).cmp(&place(*a)));
    let mut chosen = None;
    let mut choices = Vec::with_capacity(order.len());
    for index in order {
        let (standpoint, reason) = match (unfit(&versions[index]), chosen) {
            (Some(why), _) => (Standpoint::PassedOver, why),
            (None, Some(chosen)) if is_named(chosen) && !is_named(index) => {
                (Standpoint::Older, "by its name it may be only a part of a save".to_owned())
            }
            (None, Some(_)) => (Standpoint::Older, "a newer one can be loaded".to_owned()),
            (None, None) => {
                chosen = Some(index);
                (Standpoint::Chosen, "the newest that is proven whole and can be read".to_owned())
            }
        };
        let in_part = matches!(versions[index].sight, Sight::InPart { .. });
        let removed_in_part = in_part && unfit_besides_names(&versions[index]).is_none();
        choices.push(Choice { index, standpoint, reason, removed_in_part });
    }
    choices
}

fn unfit(version: &Standing<'_>) -> Option<String> {
    unfit_besides_names(version).or_else(|| match version.sight {
        Sight::All => None,
        Sight::InPart { left, of } => Some(format!(
            "its job, or a person, removed a part of it: {left} of {of} files are left; `ckptctl undelete` brings the \
             others back"
        )),
        Sight::Missing => {
            Some("its names are not in the tree; `ckptctl undelete` brings them back".to_owned())
        }
    })
}

/// Returns why the version cannot be loaded, apart from its names in the tree.
fn unfit_besides_names(version: &Standing<'_>) -> Option<String> {
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
    version.lost.as_ref().map(|lost| format!("it cannot be read whole: {lost}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Step, Version};
    use crate::key::{VersionId, checkpoint_path};
    use crate::marker::Decision;
    use crate::path::{CheckpointName, RelPath};
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
        Standing { checkpoint, lost: None, sight: Sight::All }
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
        versions[2].sight = Sight::Missing;
        assert_eq!(standpoints(&versions), [(1, PassedOver), (2, PassedOver), (0, Chosen)]);
        versions[0].sight = Sight::Missing;
        assert!(standpoints(&versions).iter().all(|(_, standpoint)| *standpoint == PassedOver));
    }

    #[test]
    fn what_its_job_thinned_out_says_how_much_is_left_and_is_told_from_what_is_lost() {
        let [one, two] = [1, 2].map(committed);
        let thinned = |checkpoint| Standing { sight: Sight::InPart { left: 5, of: 6 }, ..whole(checkpoint) };
        let choices = choose(&[thinned(&one), thinned(&two)]);
        for choice in &choices {
            assert!(choice.standpoint == Standpoint::PassedOver && choice.removed_in_part, "{choice:?}");
            assert!(
                choice.reason.contains("5 of 6 files") && choice.reason.contains("undelete"),
                "{choice:?}"
            );
        }
        let lost = Standing { lost: Some("r/a has no good copy".to_owned()), ..thinned(&two) };
        let missing = Standing { sight: Sight::Missing, ..whole(&two) };
        for other in [lost, missing, whole(&two)] {
            let choices = choose(&[thinned(&one), other]);
            assert!(!choices[0].removed_in_part && choices[1].removed_in_part, "{choices:?}");
        }
    }

    #[test]
    fn a_file_that_may_be_a_part_of_a_save_is_not_what_a_job_goes_on_from() {
        let file = |directory: &str, step: Option<u64>, completed_at_ns| {
            let version = VersionId { directory: CheckpointName::new(directory).unwrap(), ..version() };
            let mut record = Record { version, step: step.map(Step), completed_at_ns, ..record() };
            let path = checkpoint_path(&record.version.run, &record.version.directory);
            record.files.truncate(1);
            record.files[0].path = RelPath::new(path).unwrap();
            record.evidence = Evidence::Index;
            Checkpoint::decided(record, Decision::Commit)
        };
        let save = file("step5.pt", Some(5), 1);
        let (last, arguments) = (file("last.pt", None, 2), file("training_args.bin", None, 3));
        let all = [whole(&save), whole(&last), whole(&arguments)];
        use Standpoint::{Chosen, Older};
        assert_eq!(standpoints(&all), [(1, Chosen), (0, Older), (2, Older)]);
        assert!(choose(&all)[2].reason.contains("part of a save"), "{}", choose(&all)[2].reason);
        let directory = committed(4);
        let both = [whole(&directory), whole(&arguments)];
        assert_eq!(standpoints(&both), [(0, Chosen), (1, Older)]);
        assert_eq!(standpoints(&[whole(&arguments)]), [(0, Chosen)], "there is nothing else");
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

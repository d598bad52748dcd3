//! The order of a run's versions.
//!
//! Owns: the order along the lineage, the watermark, the newest version that a job could come back to, the stamps
//! that the order rests on. Does not own: the states of a version (`checkpoint`), what is retired (`retention`).
//!
//! A step alone is no order: a job that went back saves the same step again. Within a timeline versions are ordered by
//! when they became complete, which is when the last of their files got its bytes and its name. The moment at which
//! that was noticed is no order either: proof of an older version may come after a newer one.

use crate::checkpoint::Checkpoint;
use crate::id::{Step, Timeline};
use crate::key::{VersionId, checkpoint_path};
use crate::recognise::is_called_whole;
use crate::record::Record;

/// Returns the place of a version in its run; later ones compare greater. Steps and numbers only make the order total if two stamps
/// are equal.
#[must_use]
pub fn order(record: &Record) -> (Timeline, i64, Option<Step>, &VersionId) {
    (record.version.timeline, record.completed_at_ns, record.step, &record.version)
}

/// Returns the place of a version among those that a job of its run may go on from. A file may be only a part of a save if its name
/// gives no step and does not claim a whole save (`training_args.bin`, `vocab.pt`). Such a file comes after all others, whenever it
/// was written.
#[must_use]
pub fn order_to_resume(record: &Record) -> (bool, (Timeline, i64, Option<Step>, &VersionId)) {
    let VersionId { run, directory, .. } = &record.version;
    let path = checkpoint_path(run, directory);
    let is_one_file = record.files.iter().all(|file| file.path.as_bytes() == path);
    let is_named = record.step.is_some() || is_called_whole(directory.as_bytes());
    (is_named || !is_one_file, order(record))
}

/// Returns the newest committed version of one run: older ones may be forgotten, and the next commit names this one.
#[must_use]
pub fn watermark<'a>(run: impl IntoIterator<Item = &'a Checkpoint>) -> Option<&'a Checkpoint> {
    newest(run.into_iter().filter(|version| version.is_committed()))
}

/// Returns the newest version of one run that is proven whole and available: committed, or about to be.
#[must_use]
pub fn newest_recoverable<'a>(run: impl IntoIterator<Item = &'a Checkpoint>) -> Option<&'a Checkpoint> {
    let fit = |version: &&Checkpoint| version.is_proven() && (version.is_alive() || version.is_committed());
    newest(run.into_iter().filter(fit))
}

fn newest<'a>(versions: impl Iterator<Item = &'a Checkpoint>) -> Option<&'a Checkpoint> {
    versions.max_by(|a, b| order(a.record()).cmp(&order(b.record())))
}

/// Returns the stamp of a version whose last file got its bytes and name at `published_ns`. `run` has the versions of its run.
///
/// If the clock is behind the highest stamp of the run, it went back, and must not place a new save below earlier ones. If an older
/// directory replaces a checkpoint, it consists of older files but still comes after that checkpoint.
#[must_use]
pub fn stamp<'a>(
    version: &VersionId,
    published_ns: i64,
    now_ns: i64,
    run: impl IntoIterator<Item = &'a Checkpoint>,
) -> i64 {
    let (mut newest_ns, mut own_ns) = (i64::MIN, i64::MIN);
    for record in run.into_iter().map(Checkpoint::record) {
        newest_ns = newest_ns.max(record.completed_at_ns);
        if record.version.directory == version.directory {
            own_ns = own_ns.max(record.completed_at_ns);
        }
    }
    if newest_ns > now_ns {
        return newest_ns.saturating_add(1);
    }
    // A file's time may have been set to anything; a version that is complete now was not completed later.
    published_ns.min(now_ns).max(own_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Version;
    use crate::marker::Decision;
    use crate::path::CheckpointName;
    use crate::record::Evidence;
    use crate::record::tests::{record, version as any_version};
    use proptest::prelude::*;

    fn at(timeline: u64, stamp_ns: i64, step: u64, evidence: Evidence) -> Record {
        let number = Version(u64::try_from(stamp_ns).unwrap());
        let version = VersionId { timeline: Timeline(timeline), version: number, ..any_version() };
        Record { version, step: Some(Step(step)), completed_at_ns: stamp_ns, evidence, ..record() }
    }

    fn committed(timeline: u64, stamp_ns: i64, step: u64) -> Checkpoint {
        Checkpoint::decided(at(timeline, stamp_ns, step, Evidence::Index), Decision::Commit)
    }

    fn stamp_of(found: Option<&Checkpoint>) -> Option<i64> {
        found.map(|found| found.record().completed_at_ns)
    }

    #[test]
    fn the_order_is_by_timeline_and_completion_and_not_by_step() {
        let went_back = [committed(0, 1, 100), committed(0, 2, 300), committed(0, 3, 200)];
        assert_eq!(stamp_of(watermark(&went_back)), Some(3));
        let branched = [committed(0, 3, 300), committed(1, 2, 200)];
        assert_eq!(stamp_of(watermark(&branched)), Some(2));
    }

    #[test]
    fn what_is_not_committed_is_no_watermark_and_what_is_not_proven_is_not_come_back_to() {
        let mut todo = Vec::new();
        let complete = Checkpoint::recorded(at(0, 2, 2, Evidence::Index), &mut todo);
        let settled = Checkpoint::recorded(at(0, 3, 3, Evidence::Quiescence), &mut todo);
        let aborted = Checkpoint::decided(at(0, 4, 4, Evidence::Index), Decision::Abort);
        let run = [committed(0, 1, 1), complete, settled, aborted];
        assert_eq!(stamp_of(watermark(&run)), Some(1));
        assert_eq!(stamp_of(newest_recoverable(&run)), Some(2));
        assert_eq!(stamp_of(watermark(&run[1..])), None);
    }

    /// Makes version `number` of checkpoint `directory`.
    fn version_of(directory: &str, number: usize) -> VersionId {
        let directory = CheckpointName::new(directory).unwrap();
        VersionId { directory, version: Version(number as u64), ..any_version() }
    }

    fn committed_at(version: VersionId, completed_at_ns: i64) -> Checkpoint {
        Checkpoint::decided(Record { version, completed_at_ns, ..record() }, Decision::Commit)
    }

    #[test]
    fn a_stamp_is_when_it_was_complete_and_never_in_the_future() {
        let of = version_of("step2", 2);
        let with = |published_ns, now_ns, run: &[(&str, i64)]| {
            let run: Vec<_> = run.iter().map(|(name, at)| committed_at(version_of(name, 1), *at)).collect();
            stamp(&of, published_ns, now_ns, &run)
        };
        assert_eq!(with(5, 9, &[]), 5);
        assert_eq!(with(5, 9, &[("step1", 7)]), 5, "proof came late");
        assert_eq!(with(50, 9, &[("step1", 7)]), 9, "somebody set the file's time");
        assert_eq!(with(5, 9, &[("step1", 20)]), 21, "the clock went back");
        assert_eq!(with(5, 9, &[("step1", 8), ("step2", 7)]), 7, "an older directory is in its place");
    }

    proptest! {
        #[test]
        fn the_watermark_does_not_depend_on_the_order_of_reports(
            mut stamps in prop::collection::btree_map(1_i64..40, (0_u64..3, 0_u64..9), 1..12)
                .prop_map(|map| map.into_iter().collect::<Vec<_>>()),
            turn in 0_usize..12,
        ) {
            let run = |stamps: &[(i64, (u64, u64))]| -> Vec<_> {
                stamps.iter().map(|(at, (timeline, step))| committed(*timeline, *at, *step)).collect()
            };
            let before = watermark(&run(&stamps)).cloned().unwrap();
            for version in run(&stamps) {
                prop_assert!(order(version.record()) <= order(before.record()));
            }
            let count = stamps.len();
            stamps.rotate_left(turn % count);
            let turned = run(&stamps);
            prop_assert_eq!(watermark(&turned), Some(&before));
        }

        /// Saves, changes and replaces two checkpoints in any order, while the clock moves in both directions.
        #[test]
        fn the_versions_of_a_checkpoint_stand_in_the_order_of_their_numbers(
            saves in prop::collection::vec((0_usize..2, 0_i64..50, 0_i64..50), 1..12),
        ) {
            let mut run: Vec<Checkpoint> = Vec::new();
            for (index, (of, published_ns, now_ns)) in saves.into_iter().enumerate() {
                let version = version_of(["step1", "step2"][of], index);
                let stamp_ns = stamp(&version, published_ns, now_ns, &run);
                run.push(committed_at(version, stamp_ns));
                let new = run.last().map(Checkpoint::record).unwrap();
                for known in run.iter().map(Checkpoint::record) {
                    prop_assert!(known.version.directory != new.version.directory || order(known) <= order(new));
                }
            }
        }
    }
}

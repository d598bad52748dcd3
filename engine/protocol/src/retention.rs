//! Which committed versions are given up.
//!
//! Owns: the policy, the verdict on every version with its reason, and the leave without which the engine deletes
//! nothing ([`Retirement`]). Does not own: the order along the lineage (`lineage`), the deletes (the engine).

use crate::id::Step;
use crate::key::VersionId;
use crate::recognise;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Committed and verified versions that are always kept, whatever the policy says: the newest, and one to fall back
/// to when it turns out to be bad.
pub const ALWAYS_KEPT: usize = 2;

/// The user attribute by which a job says how good a checkpoint is: a number as text, on the checkpoint's directory or on
/// one of its files.
pub const METRIC_XATTR: &str = "user.tidemark.metric";

/// No number needs more text; a longer value is none.
pub const METRIC_BYTES_MAX: usize = 64;

/// Which end of the metric is the good one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Best {
    /// As of a loss.
    #[default]
    Lowest,
    /// As of an accuracy.
    Highest,
}

impl Best {
    fn word(self) -> &'static str {
        match self {
            Self::Lowest => "lowest",
            Self::Highest => "highest",
        }
    }
}

/// What the job said of a version.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Metric {
    #[default]
    Unsaid,
    /// Finite.
    Number(f64),
    /// What it said instead, for people.
    NoNumber(String),
}

impl Metric {
    /// Reads the attribute's value; spaces around the number are allowed, since `echo` and `setfattr` leave some.
    #[must_use]
    pub fn parse(value: &[u8]) -> Self {
        let text = std::str::from_utf8(value).map(str::trim).ok().filter(|_| value.len() <= METRIC_BYTES_MAX);
        match text.map(|text| (text, text.parse::<f64>())) {
            Some(("", _)) => Self::Unsaid,
            Some((_, Ok(number))) if number.is_finite() => Self::Number(number),
            _ => Self::NoNumber(
                String::from_utf8_lossy(value).chars().take(METRIC_BYTES_MAX).collect::<String>(),
            ),
        }
    }
}

/// What to keep. Everything, unless one of these says less; a version is kept when any of them keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Policy {
    pub keep_last: Option<u64>,
    /// Versions whose step is a multiple.
    pub keep_every_steps: Option<u64>,
    /// The first version of each such period.
    pub keep_every_ns: Option<i64>,
    /// Versions younger than this.
    pub ttl_ns: Option<i64>,
    /// So many of those whose metric is best; of equal ones the newer.
    pub keep_best: Option<u64>,
    pub best: Best,
    /// Whether a version that the job removed from the tree is given up without another reason.
    pub honour_removals: bool,
}

/// A committed version of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Committed {
    pub version: VersionId,
    pub step: Option<Step>,
    pub completed_at_ns: i64,
    /// Its bytes in Tier-3 were right when last read or written.
    pub verified: bool,
    pub pinned: bool,
    /// A program has it open, a file in the tree needs its bytes, or a recovery chose it.
    pub held: bool,
    /// The job removed its names.
    pub removed: bool,
    pub metric: Metric,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Keep {
    Kept { reason: String },
    Retired(Retirement),
}

/// Leave to give a committed version up. Only [`retain`] gives it, so P7 holds for whoever has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retirement {
    version: VersionId,
    reason: String,
}

impl Retirement {
    #[must_use]
    pub fn version(&self) -> &VersionId {
        &self.version
    }

    /// One sentence.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// The verdict on each version of one run, given oldest first, in the same order.
///
/// The last, the first and the best are counted within a series: a neighbour is no newer version.
#[must_use]
pub fn retain(policy: &Policy, lineage: &[Committed], now_ns: i64) -> Vec<Keep> {
    let all: Vec<usize> = (0..lineage.len()).collect();
    let floor = floor(lineage, &all);
    let mut series: BTreeMap<Vec<u8>, Vec<usize>> = BTreeMap::new();
    for (index, version) in lineage.iter().enumerate() {
        let of = recognise::series(version.version.directory.as_bytes(), version.step);
        series.entry(of).or_default().push(index);
    }
    let mut verdicts = vec![None; lineage.len()];
    for members in series.values() {
        let found = retain_series(policy, lineage, members, floor, now_ns);
        members.iter().zip(found).for_each(|(index, keep)| verdicts[*index] = Some(keep));
    }
    verdicts.into_iter().map(|keep| keep.expect("each is of one series")).collect()
}

/// The first of these that is always kept: the newest verified ones, and what is newer than the oldest of those, which may verify yet.
fn floor(lineage: &[Committed], members: &[usize]) -> usize {
    let verified = members.iter().rev().filter(|index| lineage[**index].verified);
    verified.copied().nth(ALWAYS_KEPT - 1).unwrap_or(0)
}

/// `members` follow one another; `run_floor`: what is always kept of the run.
fn retain_series(
    policy: &Policy,
    lineage: &[Committed],
    members: &[usize],
    run_floor: usize,
    now_ns: i64,
) -> Vec<Keep> {
    let floor = floor(lineage, members);
    let firsts = firsts_of_periods(policy, lineage, members);
    let best = best_of(policy, lineage, members);
    let verdict = |(place, index): (usize, usize)| {
        let version = &lineage[index];
        let from_end = (members.len() - place) as u64;
        let kept = |reason: &str| Keep::Kept { reason: reason.to_owned() };
        let retired = |reason| Keep::Retired(Retirement { version: version.version.clone(), reason });
        if index >= run_floor {
            return kept("the newest verified committed versions are never given up");
        }
        if version.pinned {
            return kept("it is pinned");
        }
        if version.held {
            return kept(
                "a program has it open, a file in the tree needs its bytes, or it is being exported",
            );
        }
        if version.removed && policy.honour_removals {
            return retired("the job removed it, and newer ones are committed".to_owned());
        }
        let limits = [
            policy.keep_last.is_some(),
            policy.keep_every_steps.is_some(),
            policy.keep_every_ns.is_some(),
            policy.ttl_ns.is_some(),
            policy.keep_best.is_some(),
        ];
        if !limits.contains(&true) {
            return kept("everything is kept");
        }
        if index >= floor {
            return kept("it is one of the newest two of its kind");
        }
        if policy.keep_last.is_some_and(|last| from_end <= last) {
            return kept("it is one of the last");
        }
        let every = policy.keep_every_steps.filter(|every| *every > 0);
        if every.zip(version.step).is_some_and(|(every, step)| step.0.is_multiple_of(every)) {
            return kept("its step is a multiple of the interval to keep");
        }
        if let (Metric::Number(metric), true) = (&version.metric, best.contains(&index)) {
            let (count, end) = (best.len(), policy.best.word());
            return Keep::Kept { reason: format!("its metric {metric} is one of the {count} {end}") };
        }
        if firsts.contains(&index) {
            return kept("it is the first of its period");
        }
        let age_ns = now_ns.saturating_sub(version.completed_at_ns);
        if policy.ttl_ns.is_some_and(|ttl_ns| age_ns < ttl_ns) {
            return kept("it is younger than the time to live");
        }
        let ignored = match &version.metric {
            Metric::NoNumber(text) if policy.keep_best.is_some() => {
                format!("; its {METRIC_XATTR} {text:?} is no number, and is ignored")
            }
            Metric::Unsaid | Metric::Number(_) | Metric::NoNumber(_) => String::new(),
        };
        retired(format!("{from_end} from the newest, and no rule keeps it{ignored}"))
    };
    members.iter().copied().enumerate().map(verdict).collect()
}

fn firsts_of_periods(policy: &Policy, lineage: &[Committed], members: &[usize]) -> BTreeSet<usize> {
    let Some(period_ns) = policy.keep_every_ns.filter(|period_ns| *period_ns > 0) else {
        return BTreeSet::new();
    };
    let mut seen = BTreeSet::new();
    let first = |index: &usize| seen.insert(lineage[*index].completed_at_ns.div_euclid(period_ns));
    members.iter().copied().filter(first).collect()
}

/// The versions whose metric is among the best. What has no number is not compared.
fn best_of(policy: &Policy, lineage: &[Committed], members: &[usize]) -> BTreeSet<usize> {
    let number = |index: &usize| match lineage[*index].metric {
        Metric::Number(metric) => Some((metric, *index)),
        Metric::Unsaid | Metric::NoNumber(_) => None,
    };
    let mut ranked: Vec<_> = members.iter().filter_map(number).collect();
    ranked.sort_by(|a, b| {
        let better = match policy.best {
            Best::Lowest => a.0.total_cmp(&b.0),
            Best::Highest => b.0.total_cmp(&a.0),
        };
        better.then(b.1.cmp(&a.1))
    });
    let count = usize::try_from(policy.keep_best.unwrap_or(0)).unwrap_or(usize::MAX);
    ranked.into_iter().take(count).map(|(_, index)| index).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::the_newest_verified_versions_are_kept;
    use crate::path::CheckpointName;
    use crate::record::tests::version;
    use proptest::prelude::*;

    fn lineage(count: i64) -> Vec<Committed> {
        let one = |at: i64| Committed {
            version: version(),
            step: Some(Step(u64::try_from(at).unwrap() * 10)),
            completed_at_ns: at,
            verified: true,
            pinned: false,
            held: false,
            removed: false,
            metric: Metric::Unsaid,
        };
        (1..=count).map(one).collect()
    }

    fn kept(policy: &Policy, lineage: &[Committed]) -> Vec<usize> {
        let verdicts = retain(policy, lineage, 100);
        (0..lineage.len()).filter(|index| matches!(verdicts[*index], Keep::Kept { .. })).collect()
    }

    #[test]
    fn everything_is_kept_unless_something_says_less() {
        assert_eq!(kept(&Policy::default(), &lineage(5)).len(), 5);
        assert_eq!(kept(&Policy { keep_last: Some(3), ..Policy::default() }, &lineage(5)), [2, 3, 4]);
        assert_eq!(kept(&Policy { keep_last: Some(0), ..Policy::default() }, &lineage(5)), [3, 4]);
        assert_eq!(kept(&Policy { keep_every_steps: Some(20), ..Policy::default() }, &lineage(5)), [1, 3, 4]);
        assert_eq!(kept(&Policy { keep_every_ns: Some(3), ..Policy::default() }, &lineage(6)), [0, 2, 4, 5]);
        assert_eq!(kept(&Policy { ttl_ns: Some(98), ..Policy::default() }, &lineage(5)), [2, 3, 4]);
    }

    /// A job's model, its optimizer, its layers and what it trains on lie side by side; it numbers only some of it by steps.
    #[test]
    fn a_neighbour_is_no_newer_version() {
        let named = |name: &str, step: Option<u64>| {
            let directory = CheckpointName::new(name).unwrap();
            (VersionId { directory, ..version() }, step.map(Step))
        };
        let names = [
            named("model.pt", None),
            named("layer_1.pt", None),
            named("layer_2.pt", None),
            named("G_step1.pth", Some(1)),
            named("D_step1.pth", Some(1)),
            named("G_step2.pth", Some(2)),
            named("D_step2.pth", Some(2)),
            named("G_step3.pth", Some(3)),
            named("D_step3.pth", Some(3)),
            named("optimizer.pt", None),
        ];
        let mut versions = lineage(10);
        for (version, (id, step)) in versions.iter_mut().zip(names) {
            (version.version, version.step) = (id, step);
        }
        let last = Policy { keep_last: Some(1), ..Policy::default() };
        assert_eq!(kept(&last, &versions), [0, 1, 2, 5, 6, 7, 8, 9], "the newest two of each kind");
        let old = Policy { ttl_ns: Some(1), ..Policy::default() };
        assert_eq!(kept(&old, &versions), [0, 1, 2, 5, 6, 7, 8, 9]);
        // A version that the job removed itself may go, whatever is beside it.
        versions[1].removed = true;
        let honour = Policy { honour_removals: true, ..last };
        assert_eq!(kept(&honour, &versions), [0, 2, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn pins_and_holds_keep_and_removals_are_wishes() {
        let mut versions = lineage(5);
        versions[0].pinned = true;
        versions[1].held = true;
        let strict = Policy { keep_last: Some(1), ..Policy::default() };
        assert_eq!(kept(&strict, &versions), [0, 1, 3, 4]);
        for version in &mut versions {
            version.removed = true;
        }
        let honour = Policy { honour_removals: true, ..Policy::default() };
        assert_eq!(kept(&honour, &versions), [0, 1, 3, 4]);
    }

    #[test]
    fn the_best_by_the_jobs_own_number_are_kept() {
        let mut versions = lineage(8);
        for (version, metric) in versions.iter_mut().zip(["0.5", "0.1", "nan", " 0.3\n", "1e400", "0.1", "x"])
        {
            version.metric = Metric::parse(metric.as_bytes());
        }
        let best = |keep_best, best| Policy { keep_best: Some(keep_best), best, ..Policy::default() };
        assert_eq!(kept(&best(1, Best::Lowest), &versions), [5, 6, 7], "of equal ones the newer");
        assert_eq!(kept(&best(3, Best::Lowest), &versions), [1, 3, 5, 6, 7]);
        assert_eq!(kept(&best(1, Best::Highest), &versions), [0, 6, 7]);
        assert_eq!(kept(&best(0, Best::Highest), &versions), [6, 7]);
        let last = Policy { keep_last: Some(4), ..best(1, Best::Highest) };
        assert_eq!(kept(&last, &versions), [0, 4, 5, 6, 7], "what any rule keeps stays");
        let reasons: Vec<_> = retain(&best(1, Best::Highest), &versions, 100)
            .into_iter()
            .map(|verdict| match verdict {
                Keep::Kept { reason } => reason,
                Keep::Retired(leave) => leave.reason().to_owned(),
            })
            .collect();
        assert_eq!(reasons[0], "its metric 0.5 is one of the 1 highest");
        assert!(
            reasons[2].contains(r#""nan" is no number"#) && reasons[4].contains(r#""1e400""#),
            "{reasons:?}"
        );
        assert!(!reasons[1].contains("metric"), "{reasons:?}");
    }

    #[test]
    fn what_a_job_says_is_a_number_or_is_shown() {
        assert_eq!(Metric::parse(b""), Metric::Unsaid);
        assert_eq!(Metric::parse(b"-1.25e-3"), Metric::Number(-0.00125));
        for none in [&b"inf"[..], b"NaN", b"0,5", b"\xff\xfe", &[b'1'; METRIC_BYTES_MAX + 1]] {
            assert!(matches!(Metric::parse(none), Metric::NoNumber(_)), "{none:?}");
        }
    }

    proptest! {
        #[test]
        fn no_policy_gives_up_the_newest_verified(
            flags in prop::collection::vec((any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()), 0..12),
            keep_last in prop::option::of(0_u64..4), every in prop::option::of(0_u64..50),
            period in prop::option::of(0_i64..5), ttl in prop::option::of(-5_i64..200), honour_removals: bool,
            keep_best in prop::option::of(0_u64..4), highest: bool,
        ) {
            let mut versions = lineage(i64::try_from(flags.len()).unwrap());
            for (version, (verified, pinned, held, removed)) in versions.iter_mut().zip(flags) {
                (version.verified, version.pinned) = (verified, pinned);
                (version.held, version.removed) = (held, removed);
            }
            let policy = Policy {
                keep_last, keep_every_steps: every, keep_every_ns: period, ttl_ns: ttl, honour_removals, keep_best,
                best: if highest { Best::Highest } else { Best::Lowest },
            };
            for (index, version) in versions.iter_mut().enumerate() {
                version.metric = Metric::parse(["", "x", "1", "-2"][index % 4].as_bytes());
            }
            let verdicts = retain(&policy, &versions, 100);
            prop_assert_eq!(the_newest_verified_versions_are_kept(&versions, &verdicts), Ok(()));
        }
    }
}

//! Retention: the committed versions that are retired.
//!
//! Owns: the policy, the verdict on every version with its reason, and the permission without which the engine deletes nothing
//! ([`Retirement`]). Does not own: the order along the lineage (`lineage`), the deletes (the engine).
//!
//! Only versions that the tree shows take places among the newest, the first and the best: a removed version would push a live one
//! out. A version that the tree does not show is judged as if every version took a place. The same rules keep it for `undelete`, so
//! the policy bounds how many such versions stay in addition.

use crate::id::Step;
use crate::key::VersionId;
use crate::recognise;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Number of committed and verified versions that are always kept, whatever the policy: the newest, and one to fall
/// back to if it turns out to be bad. The same number is kept of those that the tree shows, and of all.
pub const ALWAYS_KEPT: usize = 2;

/// The user attribute by which a job rates a checkpoint: a number as text, on the checkpoint's directory or on one of its files.
pub const METRIC_XATTR: &str = "user.tidemark.metric";

/// Longest metric, in bytes. No number needs more text; a longer value is no metric.
pub const METRIC_BYTES_MAX: usize = 64;

/// The better end of the metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Best {
    /// For example a loss.
    #[default]
    Lowest,
    /// For example an accuracy.
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

/// The job's rating of a version.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Metric {
    #[default]
    Unsaid,
    /// A finite number.
    Number(f64),
    /// A value that is no number, for people.
    NoNumber(String),
}

impl Metric {
    /// Parses the attribute's value; spaces around the number are allowed, because `echo` and `setfattr` leave some.
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

/// The retention policy. Without any of its limits everything is kept; with some, a version is kept if any of them keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Policy {
    pub keep_last: Option<u64>,
    /// Keep versions whose step is a multiple.
    pub keep_every_steps: Option<u64>,
    /// Keep the first version of each such period.
    pub keep_every_ns: Option<i64>,
    /// Keep versions younger than this.
    pub ttl_ns: Option<i64>,
    /// Keep so many versions with the best metric; of equal ones the newer.
    pub keep_best: Option<u64>,
    pub best: Best,
    /// Whether a version that the job removed from the tree is retired without another reason.
    pub honour_removals: bool,
}

/// The relation of the tree to a committed version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// The tree has names of the version.
    Shown,
    /// Retention removed the names, by a permission with this reason.
    Withdrawn { reason: String },
    /// A newer version of the same checkpoint is committed.
    Replaced,
    /// The names are gone, but it is not known whether the job, a person or an earlier daemon removed them.
    Gone,
}

impl Standing {
    /// Returns why `follow_removals` retires the version; none if nothing was removed.
    fn removal(&self) -> Option<&'static str> {
        match self {
            Self::Shown | Self::Withdrawn { .. } => None,
            Self::Replaced => Some("it was saved again under the same name, and newer ones are committed"),
            Self::Gone => Some("its names are gone from the tree, and newer ones are committed"),
        }
    }
}

/// A committed version of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Committed {
    pub version: VersionId,
    pub step: Option<Step>,
    pub completed_at_ns: i64,
    /// Whether the bytes in Tier-3 were right when last read or written.
    pub verified: bool,
    pub pinned: bool,
    /// Whether a program has the version open, a file in the tree needs its bytes, or a recovery chose it.
    pub held: bool,
    pub standing: Standing,
    /// Whether an administrator removed the version: it is retired as soon as possible, whatever the policy says of removals.
    pub wished: bool,
    pub metric: Metric,
}

impl Committed {
    pub(crate) fn is_shown(&self) -> bool {
        self.standing == Standing::Shown
    }

    /// Whether the version takes a place when versions that the tree shows are judged. A version that an administrator removed is
    /// about to go, and takes none.
    fn takes_a_place(&self) -> bool {
        self.is_shown() && !self.wished
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Keep {
    Kept { reason: String },
    Retired(Retirement),
}

/// Permission to retire a committed version. Only [`retain`] makes one, so P7 holds for every holder.
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

    /// Returns the reason in one sentence.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// Returns the verdict on each version of one run, given oldest first, in the same order.
///
/// The last, the first and the best are counted within a series: a neighbour is no newer version.
#[must_use]
pub fn retain(policy: &Policy, lineage: &[Committed], now_ns: i64) -> Vec<Keep> {
    let places_of_shown = |members: &[usize]| -> Vec<usize> {
        members.iter().copied().filter(|index| lineage[*index].takes_a_place()).collect()
    };
    let run: Vec<usize> = (0..lineage.len()).collect();
    let (floor_of_shown, floor_of_all) = (floor(lineage, &places_of_shown(&run)), floor(lineage, &run));
    let mut series: BTreeMap<Vec<u8>, Vec<usize>> = BTreeMap::new();
    for (index, version) in lineage.iter().enumerate() {
        let of = recognise::series(version.version.directory.as_bytes(), version.step);
        series.entry(of).or_default().push(index);
    }
    let mut verdicts = vec![None; lineage.len()];
    for members in series.into_values() {
        let shown = Places::of(policy, lineage, places_of_shown(&members), floor_of_shown);
        let all = Places::of(policy, lineage, members, floor_of_all);
        for index in &all.members {
            let places = if lineage[*index].is_shown() { &shown } else { &all };
            verdicts[*index] = Some(verdict(policy, lineage, *index, places, now_ns));
        }
    }
    verdicts.into_iter().map(|keep| keep.expect("each is of one series")).collect()
}

/// Returns the first of these that is always kept: the newest verified ones are, and all versions newer than the oldest of those,
/// which may verify yet.
fn floor(lineage: &[Committed], members: &[usize]) -> usize {
    let verified = members.iter().rev().filter(|index| lineage[**index].verified);
    verified.copied().nth(ALWAYS_KEPT - 1).unwrap_or(0)
}

/// The versions of one series that take places, and those that the policy keeps because of their place.
struct Places {
    /// Indices, oldest first.
    members: Vec<usize>,
    /// The first index of the run that is always kept.
    run_floor: usize,
    floor: usize,
    firsts: BTreeSet<usize>,
    best: BTreeSet<usize>,
}

impl Places {
    fn of(policy: &Policy, lineage: &[Committed], members: Vec<usize>, run_floor: usize) -> Self {
        let floor = floor(lineage, &members);
        let firsts = firsts_of_periods(policy, lineage, &members);
        let best = best_of(policy, lineage, &members);
        Self { members, run_floor, floor, firsts, best }
    }

    /// Returns 1 for the newest.
    fn place_from_newest(&self, index: usize) -> u64 {
        (self.members.len() - self.members.partition_point(|member| *member < index)) as u64
    }
}

fn verdict(policy: &Policy, lineage: &[Committed], index: usize, places: &Places, now_ns: i64) -> Keep {
    let version = &lineage[index];
    let place_from_newest = places.place_from_newest(index);
    let kept = |reason: &str| Keep::Kept { reason: reason.to_owned() };
    let retired = |reason: String| {
        let reason = match &version.standing {
            // The names were removed for this reason.
            Standing::Withdrawn { reason } => reason.clone(),
            Standing::Shown | Standing::Replaced | Standing::Gone => reason,
        };
        Keep::Retired(Retirement { version: version.version.clone(), reason })
    };
    if index >= places.run_floor {
        return kept(if version.is_shown() {
            "the newest verified committed versions are never given up"
        } else {
            "the newest two committed versions stay, also where the tree does not show them"
        });
    }
    if version.pinned {
        return kept("it is pinned");
    }
    if version.held {
        return kept("a program has it open, a file in the tree needs its bytes, or it is being exported");
    }
    if version.wished {
        return retired("an administrator removed it, and newer ones are committed".to_owned());
    }
    if let Some(reason) = version.standing.removal().filter(|_| policy.honour_removals) {
        return retired(reason.to_owned());
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
    if index >= places.floor {
        return kept("it is one of the newest two of its kind");
    }
    if policy.keep_last.is_some_and(|last| place_from_newest <= last) {
        return kept("it is one of the last");
    }
    let every = policy.keep_every_steps.filter(|every| *every > 0);
    if every.zip(version.step).is_some_and(|(every, step)| step.0.is_multiple_of(every)) {
        return kept("its step is a multiple of the interval to keep");
    }
    if let (Metric::Number(metric), true) = (&version.metric, places.best.contains(&index)) {
        let (count, end) = (places.best.len(), policy.best.word());
        return Keep::Kept { reason: format!("its metric {metric} is one of the {count} {end}") };
    }
    if places.firsts.contains(&index) {
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
    retired(format!("{place_from_newest} from the newest, and no rule keeps it{ignored}"))
}

fn firsts_of_periods(policy: &Policy, lineage: &[Committed], members: &[usize]) -> BTreeSet<usize> {
    let Some(period_ns) = policy.keep_every_ns.filter(|period_ns| *period_ns > 0) else {
        return BTreeSet::new();
    };
    let mut seen = BTreeSet::new();
    let first = |index: &usize| seen.insert(lineage[*index].completed_at_ns.div_euclid(period_ns));
    members.iter().copied().filter(first).collect()
}

/// Returns the versions whose metric is among the best. Versions without a number are not compared.
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
            standing: Standing::Shown,
            wished: false,
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

    /// A job's model, its optimizer, its layers and its training data lie side by side; the job numbers only some of them by steps.
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
        versions[1].standing = Standing::Gone;
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
            version.standing = Standing::Gone;
        }
        let honour = Policy { honour_removals: true, ..Policy::default() };
        assert_eq!(kept(&honour, &versions), [0, 1, 3, 4]);
    }

    /// Step 100, step 200 that the job removed again, step 200 saved again.
    #[test]
    fn a_removed_version_takes_no_place_from_one_that_is_shown() {
        let of = |count, removed: &[usize]| {
            let mut versions = lineage(count);
            removed.iter().for_each(|index| versions[*index].standing = Standing::Gone);
            versions
        };
        let last = |keep_last| Policy { keep_last: Some(keep_last), ..Policy::default() };
        for policy in [last(1), last(2), Policy { honour_removals: true, ..last(2) }] {
            assert_eq!(
                kept(&policy, &of(3, &[1])),
                [0, 1, 2],
                "{policy:?}: the newest two shown, and of all"
            );
            assert_eq!(
                kept(&policy, &of(4, &[1])),
                [2, 3],
                "{policy:?}: two newer ones are shown, and committed"
            );
            assert_eq!(kept(&policy, &of(4, &[2, 3])), [0, 1, 2, 3], "{policy:?}: what was removed is newer");
        }
        assert_eq!(kept(&last(3), &of(6, &[3, 4])), [1, 2, 3, 4, 5], "the last three shown, and of all");
        let first = Policy { keep_every_ns: Some(1000), ..Policy::default() };
        assert_eq!(kept(&first, &of(6, &[0])), [0, 1, 4, 5], "the first that is shown, and of all");
        let mut versions = of(6, &[1]);
        for (version, metric) in versions.iter_mut().zip([2.0, 1.0, 3.0, 3.0, 3.0, 3.0]) {
            version.metric = Metric::Number(metric);
        }
        let best = Policy { keep_best: Some(1), ..Policy::default() };
        assert_eq!(kept(&best, &versions), [0, 1, 4, 5], "the best that is shown, and of all");
    }

    #[test]
    fn an_administrator_does_not_remove_one_of_the_newest_two_that_are_shown() {
        let mut versions = lineage(4);
        for index in [1, 2] {
            versions[index].standing = Standing::Gone;
        }
        versions[0].wished = true;
        assert_eq!(kept(&Policy::default(), &versions), [0, 1, 2, 3]);
        versions[1].standing = Standing::Shown;
        assert_eq!(kept(&Policy::default(), &versions), [1, 2, 3], "two newer ones are shown");
    }

    #[test]
    fn the_reason_says_what_is_known_of_who_took_the_names() {
        let reason = |policy: &Policy, standing, wished| {
            let mut versions = lineage(4);
            (versions[0].standing, versions[0].wished) = (standing, wished);
            match retain(policy, &versions, 100).swap_remove(0) {
                Keep::Kept { reason } => panic!("{reason}"),
                Keep::Retired(leave) => leave.reason,
            }
        };
        let last = Policy { keep_last: Some(2), ..Policy::default() };
        let honour = Policy { honour_removals: true, ..last };
        let leave = reason(&honour, Standing::Shown, false);
        assert_eq!(leave, "4 from the newest, and no rule keeps it");
        for policy in [last, honour] {
            let withdrawn = Standing::Withdrawn { reason: leave.clone() };
            assert_eq!(reason(&policy, withdrawn, false), leave, "{policy:?}");
            let administrator = "an administrator removed it, and newer ones are committed";
            assert_eq!(reason(&policy, Standing::Shown, true), administrator, "{policy:?}");
        }
        for (standing, why) in [(Standing::Gone, "names are gone"), (Standing::Replaced, "saved again")] {
            let said = reason(&honour, standing, false);
            assert!(said.contains(why) && !said.contains("job"), "{said}");
        }
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

    fn any_lineage() -> impl Strategy<Value = Vec<Committed>> {
        let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), 0_usize..5);
        prop::collection::vec(flags, 0..12).prop_map(|flags| {
            let mut versions = lineage(i64::try_from(flags.len()).unwrap());
            for (index, (verified, pinned, held, wished, standing)) in flags.into_iter().enumerate() {
                let version = &mut versions[index];
                (version.verified, version.pinned) = (verified, pinned);
                (version.held, version.wished) = (held, wished);
                let withdrawn = Standing::Withdrawn { reason: "a rule".to_owned() };
                let standings =
                    [withdrawn, Standing::Replaced, Standing::Gone, Standing::Shown, Standing::Shown];
                version.standing = standings[standing].clone();
                version.metric = Metric::parse(["", "x", "1", "-2"][index % 4].as_bytes());
            }
            versions
        })
    }

    fn any_policy() -> impl Strategy<Value = Policy> {
        let count = || prop::option::of(0_u64..4);
        let steps = prop::option::of(0_u64..50);
        let times = (prop::option::of(0_i64..5), prop::option::of(-5_i64..200));
        (count(), count(), steps, times, any::<bool>(), any::<bool>()).prop_map(
            |(keep_last, keep_best, keep_every_steps, (keep_every_ns, ttl_ns), highest, honour_removals)| {
                Policy {
                    keep_last,
                    keep_every_steps,
                    keep_every_ns,
                    ttl_ns,
                    keep_best,
                    best: if highest { Best::Highest } else { Best::Lowest },
                    honour_removals,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn no_policy_gives_up_the_newest_verified(policy in any_policy(), versions in any_lineage()) {
            let verdicts = retain(&policy, &versions, 100);
            prop_assert_eq!(the_newest_verified_versions_are_kept(&versions, &verdicts), Ok(()));
        }

        #[test]
        fn what_is_shown_is_judged_as_if_nothing_else_were_there(
            policy in any_policy(), versions in any_lineage(),
        ) {
            let shown: Vec<_> = versions.iter().filter(|version| version.takes_a_place()).cloned().collect();
            let verdicts = versions.iter().zip(retain(&policy, &versions, 100));
            let found: Vec<_> =
                verdicts.filter(|(version, _)| version.takes_a_place()).map(|(_, keep)| keep).collect();
            prop_assert_eq!(found, retain(&policy, &shown, 100));
        }

        /// A version that is not shown stays only where it would if shown, so the policy bounds such versions.
        #[test]
        fn what_is_not_shown_stays_only_where_it_would_if_it_were(
            policy in any_policy(), versions in any_lineage(),
        ) {
            let mut all_shown = versions.clone();
            for version in &mut all_shown {
                (version.standing, version.wished) = (Standing::Shown, false);
            }
            let stays = kept(&policy, &all_shown);
            for index in kept(&policy, &versions) {
                prop_assert!(versions[index].is_shown() || stays.contains(&index), "{index} of {versions:?}");
            }
        }
    }
}

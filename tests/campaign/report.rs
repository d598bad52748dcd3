//! A campaign's findings, as a JSON document and as a table for people, and which of them are failures.
//!
//! Owns: the figures and the demands on them. Does not own: how they come about.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;
use tidemark_tests::campaign::page::{Act, ActFigures, Doing};

use crate::claims::Promised;
use crate::watch::Tier1;

/// At least one in this many kills of a daemon must meet a write, an open and a rename under way, and at least one kill
/// in all. Otherwise the campaign was too quiet to prove anything.
const COUNTED_ONE_IN: u64 = 2;
/// Kills from which `COUNTED_ONE_IN` applies. With fewer, one counted kill is enough: some are not aimed, and some
/// miss.
const COUNTED_FROM: u64 = 20;
/// Descriptors allowed above the start, since some come and go: connections of `ckptctl` and the sampling, and ready
/// files of Tier-1's pool.
const DESCRIPTORS_MORE: u64 = 8;

/// Kills of one sort.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Kills {
    pub(crate) injected: u64,
    /// Kills that waited for a write, an open and a rename under way.
    pub(crate) aimed: u64,
    /// Kills with a write, an open and a rename unanswered at that instant.
    pub(crate) counted: u64,
    /// Kills that met at least one call of each sort.
    pub(crate) inside_of: BTreeMap<Act, u64>,
}

impl Kills {
    /// Records a kill, and the calls that had begun before it and were unanswered after it.
    pub(crate) fn injected(&mut self, aimed: bool, unanswered: &[Doing]) {
        self.injected += 1;
        self.aimed += u64::from(aimed);
        let acts: std::collections::BTreeSet<Act> = unanswered.iter().map(|doing| doing.act).collect();
        self.counted += u64::from(counts(&acts));
        for act in acts {
            *self.inside_of.entry(act).or_default() += 1;
        }
    }
}

/// Whether a kill counts, because it met a write, an open and a rename.
pub(crate) fn counts(acts: &std::collections::BTreeSet<Act>) -> bool {
    [Act::Write, Act::Open, Act::Rename].iter().all(|act| acts.contains(act))
}

/// How often a call returned, and its longest duration.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Calls {
    pub(crate) count: u64,
    pub(crate) longest_ms: f64,
}

/// State of the node after all work was removed again.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Rest {
    pub(crate) gauges: BTreeMap<String, f64>,
    pub(crate) tier1_used_bytes_at_start: f64,
    pub(crate) tier1_used_bytes: f64,
    pub(crate) descriptors_at_start: BTreeMap<String, u64>,
    pub(crate) descriptors: BTreeMap<String, u64>,
}

impl Rest {
    pub(crate) fn descriptors_are_back(&self) -> bool {
        let open = |found: &BTreeMap<String, u64>| found.values().sum::<u64>();
        open(&self.descriptors) <= open(&self.descriptors_at_start) + DESCRIPTORS_MORE
    }
}

/// All findings of a campaign.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) daemon_kills: bool,
    pub(crate) seconds: f64,
    pub(crate) rounds: u64,
    pub(crate) kills: BTreeMap<&'static str, Kills>,
    pub(crate) promised: Promised,
    pub(crate) calls: BTreeMap<Act, Calls>,
    pub(crate) longest_outage_ms: f64,
    pub(crate) flushes: u64,
    pub(crate) tier1: Tier1,
    /// Bytes that the campaign left in Tier-3.
    pub(crate) tier3_bytes: u64,
    pub(crate) rest: Rest,
}

impl Report {
    pub(crate) fn new(seed: u64, daemon_kills: bool) -> Self {
        Self {
            seed,
            daemon_kills,
            seconds: 0.0,
            rounds: 0,
            kills: BTreeMap::new(),
            promised: Promised::default(),
            calls: BTreeMap::new(),
            longest_outage_ms: 0.0,
            flushes: 0,
            tier1: Tier1::default(),
            tier3_bytes: 0,
            rest: Rest::default(),
        }
    }

    pub(crate) fn calls_were(&mut self, figures: &BTreeMap<Act, ActFigures>) {
        let calls = |(act, figures): (&Act, &ActFigures)| {
            (*act, Calls { count: figures.count, longest_ms: figures.longest.as_secs_f64() * 1000.0 })
        };
        self.calls = figures.iter().map(calls).collect();
    }

    /// Returns the problems, a line each. A broken promise ends a campaign before this point.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = vec![];
        let mut demand = |good: bool, what: String| {
            if !good {
                problems.push(what);
            }
        };
        let daemons = self.kills.iter().filter(|(what, _)| **what != "trainer").map(|(_, kills)| kills);
        let (injected, counted) =
            daemons.fold((0, 0), |sum, kills| (sum.0 + kills.injected, sum.1 + kills.counted));
        demand(
            counted > 0 && (injected < COUNTED_FROM || counted * COUNTED_ONE_IN >= injected),
            format!(
                "of {injected} kills only {counted} met a write, an open and a rename: nothing was at stake"
            ),
        );
        let trainers = self.kills.get("trainer").map_or(0, |kills| kills.injected);
        demand(trainers > 0, "no trainer was killed".into());
        for (by, count) in &self.promised.by {
            let (kept, compared) = (count.kept, count.compared);
            demand(kept == compared, format!("{by:?}: {kept} of {compared} promises kept"));
        }
        let committed = self.promised.committed;
        demand(
            committed.compared > 0 && committed.kept == committed.compared,
            format!("committed: {} of {} promises kept", committed.kept, committed.compared),
        );
        let tier1 = self.tier1;
        demand(
            tier1.samples > 0 && tier1.most_used_bytes <= tier1.size_bytes,
            format!("Tier-1 was beyond its size, or never looked at: {tier1:?}"),
        );
        for (gauge, value) in &self.rest.gauges {
            demand(*value == 0.0, format!("{gauge} is {value} when nothing is under way"));
        }
        demand(
            self.rest.descriptors_are_back(),
            format!(
                "descriptors are left open: {:?} at the start, {:?} at the end",
                self.rest.descriptors_at_start, self.rest.descriptors
            ),
        );
        problems
    }

    /// Returns the report as a table for people.
    pub(crate) fn table(&self) -> String {
        let mut text = format!(
            "campaign: seed {}, {:.0} s, {} rounds, {} flushes, daemon kills {}\n",
            self.seed,
            self.seconds,
            self.rounds,
            self.flushes,
            if self.daemon_kills { "on" } else { "off" }
        );
        let mut line = |line: std::fmt::Arguments<'_>| {
            text.write_fmt(line).expect("a string takes everything");
            text.push('\n');
        };
        line(format_args!(
            "{:<12}{:>10}{:>10}{:>10}  met at least one",
            "killed", "injected", "aimed", "counted"
        ));
        for (what, kills) in &self.kills {
            let inside: Vec<String> = kills
                .inside_of
                .iter()
                .map(|(act, count)| format!("{act:?} {count}").to_lowercase())
                .collect();
            line(format_args!(
                "{what:<12}{:>10}{:>10}{:>10}  {}",
                kills.injected,
                kills.aimed,
                kills.counted,
                inside.join(", ")
            ));
        }
        line(format_args!(
            "{:<12}{:>10}{:>10}{:>10}{:>10}",
            "promised by", "recorded", "compared", "kept", "broken"
        ));
        let committed = ("flush --wait".to_owned(), &self.promised.committed);
        let by = self.promised.by.iter().map(|(by, count)| (format!("{by:?}").to_lowercase(), count));
        for (by, count) in by.chain([committed]) {
            let broken = count.compared - count.kept;
            line(format_args!(
                "{by:<12}{:>10}{:>10}{:>10}{broken:>10}",
                count.recorded, count.compared, count.kept
            ));
        }
        line(format_args!("{:<12}{:>10}{:>14}", "call", "returned", "longest, ms"));
        for (act, calls) in &self.calls {
            let act = format!("{act:?}").to_lowercase();
            line(format_args!("{act:<12}{:>10}{:>14.1}", calls.count, calls.longest_ms));
        }
        line(format_args!("longest time without a serving daemon: {:.0} ms", self.longest_outage_ms));
        line(format_args!(
            "Tier-1: at most {:.0} of {:.0} MiB in {} samples; {:.1} MiB at the start, {:.1} at the end",
            mib(self.tier1.most_used_bytes),
            mib(self.tier1.size_bytes),
            self.tier1.samples,
            mib(self.rest.tier1_used_bytes_at_start),
            mib(self.rest.tier1_used_bytes)
        ));
        line(format_args!("Tier-3: {:.0} MiB at the end", mib(self.tier3_bytes as f64)));
        line(format_args!(
            "descriptors: {:?} at the start, {:?} at the end",
            self.rest.descriptors_at_start, self.rest.descriptors
        ));
        text
    }
}

fn mib(bytes: f64) -> f64 {
    bytes / 1_048_576.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doing(acts: &[Act]) -> Vec<Doing> {
        acts.iter().map(|act| Doing { act: *act, since_ns: 1 }).collect()
    }

    #[test]
    fn a_campaign_in_which_nothing_was_at_stake_fails() {
        let mut report = Report::new(1, true);
        let kills = report.kills.entry("daemon").or_default();
        kills.injected(true, &doing(&[Act::Write, Act::Open, Act::Rename, Act::Write]));
        assert_eq!((kills.counted, kills.inside_of[&Act::Write]), (1, 1));
        let quiet = |report: &Report| report.problems().iter().any(|problem| problem.contains("at stake"));
        assert!(!quiet(&report));
        for _ in 1..COUNTED_FROM {
            report.kills.entry("daemon").or_default().injected(true, &doing(&[Act::Write, Act::Open]));
        }
        assert!(quiet(&report), "{:?}", report.kills);
        assert!(quiet(&Report::new(1, true)), "without kills there is nothing to report");
    }

    #[test]
    fn gauges_and_descriptors_that_stay_are_failures() {
        let mut report = Report::new(1, false);
        let before = report.problems().len();
        report.rest.gauges.insert("tidemark_lag_bytes".into(), 1.0);
        report.rest.descriptors.insert("file".into(), 1 + DESCRIPTORS_MORE);
        assert_eq!(report.problems().len(), before + 2);
    }
}

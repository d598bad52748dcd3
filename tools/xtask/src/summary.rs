//! The end of a run: tables for people, and one last line for machines.
//!
//! Owns: the wording. Does not own: the verdicts and the times it shows.

use std::time::Duration;

use crate::build_times::BuildTimes;
use crate::count::Count;
use crate::spent::Spent;
use crate::test_times::TestTimes;

/// How a check or suite came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Ran(Count),
    /// Hardware or privileges that are not here; does not fail the run.
    LeftOut(String),
}

/// A row of the table.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) spent: Spent,
    /// Failure that the tests alone do not show.
    pub(crate) note: String,
}

/// All rows of a run, and where its time went.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    rows: Vec<Row>,
    /// How long the suites waited for tools, which are installed while other checks run.
    pub(crate) waited: Spent,
    pub(crate) built: Option<BuildTimes>,
    pub(crate) tests: TestTimes,
}

impl Summary {
    pub(crate) fn push(&mut self, row: Row) {
        self.rows.push(row);
    }

    pub(crate) fn total(&self) -> Count {
        self.rows.iter().fold(Count::default(), |sum, row| match &row.outcome {
            Outcome::Ran(count) => Count {
                passed: sum.passed + count.passed,
                failed: sum.failed + count.failed,
                ignored: sum.ignored + count.ignored,
            },
            Outcome::LeftOut(_) => sum,
        })
    }

    /// True when something ran and nothing failed.
    pub(crate) fn good(&self) -> bool {
        let total = self.total();
        total.failed == 0 && total.passed > 0
    }

    /// The tables and, alone on the last line, `N passed, M failed`. `share_s` gives the seconds that a check or suite may take.
    pub(crate) fn text(&self, share_s: impl Fn(&str) -> Option<u64>) -> String {
        let mut text = self.outcomes(&share_s);
        text.push_str(&self.slowest());
        let total = self.total();
        text.push_str(&format!("\n{} passed, {} failed", total.passed, total.failed));
        text
    }

    fn outcomes(&self, share_s: &impl Fn(&str) -> Option<u64>) -> String {
        let names = self.rows.iter().map(|row| row.name.len());
        let wide = names.chain([INSTALLING.len()]).max().unwrap_or(0);
        let mut text = format!("\n{:wide$}  passed  failed    wall s     CPU s   share s\n", "");
        let (mut sum, mut outgrown) = (self.waited, vec![]);
        for row in &self.rows {
            let count = match &row.outcome {
                Outcome::Ran(count) => count,
                Outcome::LeftOut(why) => {
                    text.push_str(&format!("{:wide$}  left out: {why}\n", row.name));
                    continue;
                }
            };
            sum += row.spent;
            let share = share_s(&row.name);
            if share.is_some_and(|share| row.spent.wall > Duration::from_secs(share)) {
                outgrown.push(row.name.as_str());
            }
            let Spent { wall, cpu } = row.spent;
            let share = share.map_or_else(String::new, |share| share.to_string());
            let mut line = format!(
                "{:wide$}  {:>6}  {:>6}  {:>8.1}  {:>8.1}  {share:>8}",
                row.name,
                count.passed,
                count.failed,
                wall.as_secs_f64(),
                cpu.as_secs_f64()
            );
            if count.ignored > 0 {
                line.push_str(&format!("  {} ignored", count.ignored));
            }
            if !row.note.is_empty() {
                line.push_str(&format!("  {}", row.note));
            }
            text.push_str(line.trim_end());
            text.push('\n');
            if let (Some(built), BUILD) = (&self.built, row.name.as_str()) {
                for (part, units, seconds) in built.parts() {
                    text.push_str(&format!("{:wide$}    {seconds:.1} s in {units} {part}\n", ""));
                }
            }
        }
        for (name, Spent { wall, cpu }) in [(INSTALLING, self.waited), ("all", sum)] {
            let (wall, cpu) = (wall.as_secs_f64(), cpu.as_secs_f64());
            text.push_str(&format!("{name:wide$}  {:>6}  {:>6}  {wall:>8.1}  {cpu:>8.1}\n", "", ""));
        }
        for name in outgrown {
            text.push_str(&format!(
                "{name} outgrew its share: make it quicker, or give it more in suites.rs and say why\n"
            ));
        }
        text
    }

    fn slowest(&self) -> String {
        let slowest = self.tests.slowest();
        if slowest.is_empty() {
            return String::new();
        }
        let lines = slowest.iter().map(|(name, took)| format!("{:>8.1}  {name}\n", took.as_secs_f64()));
        format!("\n  wall s  the slowest tests\n{}", lines.collect::<String>())
    }
}

/// The row of the wait for what is installed.
const INSTALLING: &str = "installing";
/// The row that is split by what was built.
const BUILD: &str = "build";

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, outcome: Outcome) -> Row {
        let spent = Spent { wall: Duration::from_millis(1500), cpu: Duration::from_millis(2500) };
        Row { name: name.into(), outcome, spent, note: String::new() }
    }

    #[test]
    fn the_last_line_is_the_sum() {
        let mut summary = Summary::default();
        summary.push(row("unit", Outcome::Ran(Count { passed: 5, failed: 0, ignored: 0 })));
        summary.push(row("mount", Outcome::LeftOut("no /dev/fuse".into())));
        assert!(summary.good());
        summary.push(row("s3", Outcome::Ran(Count { passed: 2, failed: 1, ignored: 0 })));
        assert!(!summary.good());
        let text = summary.text(|name| (name == "unit").then_some(1));
        assert_eq!(text.lines().last(), Some("7 passed, 1 failed"));
        assert!(text.contains("mount       left out: no /dev/fuse"), "{text}");
        assert!(text.contains("       5       0       1.5       2.5         1\n"), "{text}");
        assert!(text.contains("       3.0       5.0\n"), "{text}");
        assert!(text.contains("unit outgrew its share") && !text.contains("s3 outgrew"), "{text}");
    }

    #[test]
    fn a_run_of_nothing_is_not_good() {
        assert!(!Summary::default().good());
    }
}

//! The end of a run: a table for people, and one last line for machines.
//!
//! It owns the wording. It does not own the verdicts it shows.

use std::time::Duration;

use crate::count::Count;

/// How a check or suite came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Ran(Count),
    /// Hardware or privileges that are not here; does not fail the run.
    LeftOut(String),
}

/// One row of the table.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) took: Duration,
    /// What failed, when the tests alone do not say it.
    pub(crate) note: String,
}

/// All rows of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    rows: Vec<Row>,
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

    /// The table and, alone on the last line, `N passed, M failed`.
    pub(crate) fn text(&self) -> String {
        let wide = self.rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
        let mut text = format!("\n{:wide$}  passed  failed   seconds\n", "");
        for row in &self.rows {
            let seconds = row.took.as_secs_f64();
            match &row.outcome {
                Outcome::Ran(count) => {
                    let ignored = if count.ignored > 0 {
                        format!("  {} ignored", count.ignored)
                    } else {
                        String::new()
                    };
                    text.push_str(&format!(
                        "{:wide$}  {:>6}  {:>6}  {seconds:>8.1}{ignored}{}{}\n",
                        row.name,
                        count.passed,
                        count.failed,
                        if row.note.is_empty() { "" } else { "  " },
                        row.note
                    ));
                }
                Outcome::LeftOut(why) => text.push_str(&format!("{:wide$}  left out: {why}\n", row.name)),
            }
        }
        let total = self.total();
        text.push_str(&format!("\n{} passed, {} failed", total.passed, total.failed));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, outcome: Outcome) -> Row {
        Row { name: name.into(), outcome, took: Duration::from_millis(1500), note: String::new() }
    }

    #[test]
    fn the_last_line_is_the_sum() {
        let mut summary = Summary::default();
        summary.push(row("unit", Outcome::Ran(Count { passed: 5, failed: 0, ignored: 0 })));
        summary.push(row("mount", Outcome::LeftOut("no /dev/fuse".into())));
        assert!(summary.good());
        summary.push(row("s3", Outcome::Ran(Count { passed: 2, failed: 1, ignored: 0 })));
        assert!(!summary.good());
        let text = summary.text();
        assert_eq!(text.lines().last(), Some("7 passed, 1 failed"));
        assert!(text.contains("mount  left out: no /dev/fuse"));
    }

    #[test]
    fn a_run_of_nothing_is_not_good() {
        assert!(!Summary::default().good());
    }
}

//! How many tests passed and failed, read from the summaries of `cargo nextest` and of libtest.
//!
//! Owns: the two formats. Does not own: the verdict over a suite, because an exit status counts too.

use std::ops::Add;

/// Tests that ran, and those that were not run although they were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Marked `#[ignore]`. None is expected in this workspace, so the summary shows them.
    pub(crate) ignored: u64,
}

impl Add for Count {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            ignored: self.ignored + other.ignored,
        }
    }
}

/// The sum over every summary in a program's output; zero when there is none.
///
/// nextest shows the whole output of a failed test, libtest's own summary of that one test included; so where
/// nextest speaks, only its words count.
pub(crate) fn tests(output: &str) -> Count {
    let by_nextest: Vec<&str> = output.lines().filter_map(nextest_summary).collect();
    if by_nextest.is_empty() {
        sum(output.lines().filter_map(libtest_summary))
    } else {
        sum(by_nextest.into_iter())
    }
}

fn sum<'a>(summaries: impl Iterator<Item = &'a str>) -> Count {
    let mut sum = Count::default();
    for summary in summaries {
        for part in summary.split([',', ';']) {
            // `12 passed (1 slow)`: a number and the word that follows it.
            let mut words = part.split_whitespace();
            let Some(number) = words.next().and_then(|word| word.parse::<u64>().ok()) else { continue };
            match words.next() {
                Some("passed") => sum.passed += number,
                Some("failed" | "timed" | "exec") => sum.failed += number,
                Some("ignored") => sum.ignored += number,
                _ => {}
            }
        }
    }
    sum
}

/// `test result: ok. 5 passed; 0 failed; 0 ignored; …`
fn libtest_summary(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("test result: ")?.split_once(". ").map(|(_, counts)| counts)
}

/// `     Summary [   0.004s] 12 tests run: 11 passed (1 slow), 1 failed, 3 skipped`
fn nextest_summary(line: &str) -> Option<&str> {
    let line = line.trim_start().strip_prefix("Summary [")?;
    line.split_once(" run: ").map(|(_, counts)| counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nextest_counts_everything_that_did_not_pass_as_failed() {
        let output = "    PASS [ 0.1s] a\n     Summary [   0.004s] 14/20 tests run: 10 passed (1 slow, 2 leaky), 2 failed, 1 timed out, 1 exec failed, 3 skipped\n";
        assert_eq!(tests(output), Count { passed: 10, failed: 4, ignored: 0 });
    }

    #[test]
    fn libtest_summaries_are_added_up() {
        let output = "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\
                      test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
        assert_eq!(tests(output), Count { passed: 7, failed: 3, ignored: 1 });
    }

    #[test]
    fn a_failed_test_is_counted_once_under_nextest() {
        let output = "    test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 4 filtered out\n\
                           Summary [   3.3s] 5 tests run: 4 passed, 1 failed, 0 skipped\n";
        assert_eq!(tests(output), Count { passed: 4, failed: 1, ignored: 0 });
    }

    #[test]
    fn a_test_that_prints_numbers_changes_nothing() {
        assert_eq!(tests("7 passed\nresult: 3 failed\n"), Count::default());
    }
}

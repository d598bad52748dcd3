//! How long each test took, read from the lines that `cargo nextest` prints as tests end.
//!
//! Owns: that format and the choice of the slowest. libtest prints no times, so without nextest there are none.

use std::collections::BTreeMap;
use std::time::Duration;

/// How many tests the report names.
pub(crate) const SLOWEST: usize = 20;

/// Words with which nextest begins the line of a test that ended; a test killed by a signal has the signal's name.
const ENDS: &[&str] = &["PASS", "LEAK", "FAIL", "LEAK-FAIL", "TIMEOUT", "TMPASS"];

/// Each test with its wall-clock time. A test that failed is printed again at the end of a run; it is kept once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TestTimes {
    times: BTreeMap<String, Duration>,
}

impl TestTimes {
    /// Adds the tests that a run's output names.
    pub(crate) fn read(&mut self, output: &str) {
        self.times.extend(output.lines().filter_map(ended));
    }

    /// The tests that took longest, longest first.
    pub(crate) fn slowest(&self) -> Vec<(&str, Duration)> {
        let mut all: Vec<_> = self.times.iter().map(|(name, took)| (name.as_str(), *took)).collect();
        all.sort_by_key(|(name, took)| (std::cmp::Reverse(*took), *name));
        all.truncate(SLOWEST);
        all
    }
}

/// True for the line of a test that passed: there are a thousand of them, more than a person reads.
pub(crate) fn is_pass(line: &str) -> bool {
    line.trim_start().starts_with("PASS [")
}

/// Whether a test of this target ended.
pub(crate) fn names(output: &str, target: &str) -> bool {
    let is_of = |name: &str| name.split_once(' ').is_some_and(|(of, _)| of.ends_with(&format!("::{target}")));
    output.lines().filter_map(ended).any(|(name, _)| is_of(&name))
}

/// `        PASS [   0.005s] (  7/417) tidemark-tests::mount names::a_test`: a name and its time.
fn ended(line: &str) -> Option<(String, Duration)> {
    let (word, rest) = line.trim_start().split_once(" [")?;
    if !ENDS.contains(&word) && !word.starts_with("SIG") {
        return None;
    }
    let (seconds, rest) = rest.split_once("s]")?;
    let took = Duration::try_from_secs_f64(seconds.trim().parse().ok()?).ok()?;
    let rest = rest.trim_start();
    let name = match rest.strip_prefix('(') {
        Some(counted) => counted.split_once(')')?.1,
        None => rest,
    };
    Some((name.trim().to_owned(), took))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_come_first_and_a_failure_once() {
        let mut times = TestTimes::default();
        times.read(
            "        PASS [   0.005s] (1/3) tidemark-engine store::a\n\
             \x20       FAIL [  12.500s] (2/3) tidemark-tests::mount names::b\n\
             \x20    SIGKILL [   1.000s] tidemark-tests::mount names::c\n\
             \x20    Summary [  13.000s] 3 tests run: 1 passed, 2 failed, 0 skipped\n\
             \x20       FAIL [  12.500s] (2/3) tidemark-tests::mount names::b\n\
             \x20       SLOW [> 60.000s] tidemark-tests::mount names::d\n",
        );
        let slowest = times.slowest();
        let names: Vec<_> = slowest.iter().map(|(name, _)| *name).collect();
        assert_eq!(
            names,
            ["tidemark-tests::mount names::b", "tidemark-tests::mount names::c", "tidemark-engine store::a"]
        );
        assert_eq!(slowest[0].1, Duration::from_millis(12500));
    }

    #[test]
    fn a_target_of_which_no_test_ended_is_found() {
        let output = "PASS [ 0.005s] (1/3) tidemark-tests::mount names::guest\n";
        assert!(names(output, "mount") && !names(output, "guest") && !names(output, "unt"));
    }

    #[test]
    fn no_more_than_twenty_are_named() {
        let mut times = TestTimes::default();
        times.read(&(0..50).map(|n| format!("PASS [ 0.{n:03}s] a t{n}\n")).collect::<String>());
        assert_eq!(times.slowest().len(), SLOWEST);
    }
}

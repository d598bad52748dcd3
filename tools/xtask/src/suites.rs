//! The checks and the suites: the question of each, its needs, its time, and the order in which a person waits for them.
//!
//! Owns: the tables. Does not own: the suites, which are test targets of `tidemark-tests`. A target that is not in the table, or a row
//! without a target, fails the run.

use crate::machine::{self, Need};
use crate::prepare::Tool;

/// Something that `--only` can name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) name: &'static str,
    pub(crate) question: &'static str,
    pub(crate) share_s: u64,
}

/// The check that runs the tests beside the code.
pub(crate) const UNIT: &str = "unit";

/// Checks that come before the suites.
const CHECKS: &[Asked] = &[
    Asked { name: "tidy", question: "do the files keep to the house style?", share_s: 5 },
    Asked { name: "architecture", question: "does each crate depend only on what it may?", share_s: 5 },
    Asked { name: "licences", question: "may everything that is linked be shipped?", share_s: 5 },
    Asked { name: "fmt", question: "is the code formatted?", share_s: 10 },
    // With empty caches what the suites need is installed beside it.
    Asked { name: "build", question: "does everything build, without a warning of clippy's?", share_s: 440 },
    Asked { name: UNIT, question: "do the tests beside the code pass?", share_s: 60 },
    Asked { name: "doc", question: "do the examples in the documentation work?", share_s: 15 },
];

/// The check that comes after the suites.
pub(crate) const BENCH: &str = "bench";
const BENCHES: Asked = Asked { name: BENCH, question: "do the benches run, with small sizes?", share_s: 90 };

/// A suite: a test target of `tidemark-tests`.
#[derive(Debug)]
pub(crate) struct Suite {
    pub(crate) name: &'static str,
    pub(crate) question: &'static str,
    /// Seconds of wall clock that the suite may take with two cores, without `--long`. The shares sum to the time of a run; a suite that
    /// needs more says what it is worth.
    pub(crate) share_s: u64,
    pub(crate) needs: &'static [Need],
    pub(crate) tools: &'static [Tool],
    /// Whether the suite's tests start daemons with budgets. If so, nextest runs [`DAEMON_TESTS_AT_ONCE`] of them, and libtest, which knows
    /// no budgets, one.
    pub(crate) daemons: bool,
}

const MOUNT: &[Need] = &[Need::Root, Need::Fuse];

/// Tests with daemons that run at once, as the group `daemons` in `.config/nextest.toml` has places. Such tests mostly wait, so the number
/// of processors does not matter.
const DAEMON_TESTS_AT_ONCE: usize = 4;

/// Least number of tests beside the code that run at once: some of them wait too, for threads and for time.
const TESTS_AT_ONCE_MIN: usize = 4;

/// Suites that run in one go, so that one computes while another waits, and share a row. In the first row nearly all tests work without
/// daemons. In the second, some suites examine a node, some kill and mostly wait, some train. Tests that assert a time run alone
/// (`.config/nextest.toml`), and last: a round has one such end.
const TOGETHER: &[&[&str]] = &[
    &["model", "conformance", "simulation", "s3"],
    &[
        "mount",
        "posix",
        "durability",
        "crash",
        "restart",
        "guest",
        "survive",
        "campaign",
        "cluster",
        "frameworks",
        "wheel",
    ],
];

/// Quick ones first; those that start daemons after those that do not.
pub(crate) const SUITES: &[Suite] = &[
    Suite {
        name: "model",
        question: "does the file system agree with a small model of it?",
        share_s: 15,
        needs: &[],
        tools: &[],
        daemons: false,
    },
    Suite {
        name: "conformance",
        question: "does each store keep one contract?",
        share_s: 10,
        needs: &[],
        tools: &[],
        daemons: false,
    },
    Suite {
        name: "simulation",
        question: "does a cluster keep its promises under loss, delay, partition, death and wrong clocks?",
        share_s: 90,
        needs: &[],
        tools: &[],
        daemons: false,
    },
    Suite {
        name: "s3",
        question: "are the ambiguous answers of object stores read right?",
        share_s: 60,
        needs: &[],
        tools: &[Tool::PythonWithMoto],
        daemons: true,
    },
    Suite {
        name: "mount",
        question: "does a real kernel see what SEMANTICS.md says?",
        share_s: 15,
        needs: MOUNT,
        tools: &[Tool::Fuse3, Tool::Attr],
        daemons: true,
    },
    Suite {
        name: "posix",
        question: "does the mount pass what other file systems are tested with?",
        share_s: 30,
        needs: MOUNT,
        tools: &[Tool::Pjdfstest, Tool::Fsx],
        daemons: true,
    },
    Suite {
        name: "durability",
        question: "bad bytes, bad input, no room, no Tier-3: is only the truth served, and nothing sealed lost?",
        share_s: 200,
        needs: MOUNT,
        tools: &[],
        daemons: true,
    },
    Suite {
        name: "crash",
        question: "stopped at every named step, does restart tell the truth?",
        share_s: 25,
        needs: MOUNT,
        tools: &[],
        daemons: true,
    },
    Suite {
        name: "restart",
        question: "is the tree after a restart with empty memory the tree before, whatever was done and killed?",
        share_s: 180,
        needs: MOUNT,
        tools: &[],
        daemons: true,
    },
    Suite {
        name: "guest",
        question: "does FALLBACK keep its promises on a real kernel that has no passthrough?",
        share_s: 90,
        needs: &[Need::Root, Need::Fuse, Need::LinuxX86],
        tools: &[Tool::Guest],
        daemons: true,
    },
    Suite {
        name: "survive",
        question: "the daemon is killed, replaced or dies again and again: does everything that is open go on?",
        share_s: 100,
        needs: MOUNT,
        tools: &[],
        daemons: true,
    },
    Suite {
        name: "campaign",
        question: "killed at any moment under load, over and over: is every promise kept?",
        share_s: 75,
        needs: MOUNT,
        tools: &[],
        daemons: true,
    },
    Suite {
        name: "cluster",
        question: "several hosts in network namespaces: what is lost with a host or a link, and what is not?",
        share_s: 220,
        needs: &[Need::Root, Need::Fuse, Need::LinuxX86, Need::NetworkNamespaces],
        tools: &[Tool::Network, Tool::Etcd, Tool::PythonWithTorch],
        daemons: true,
    },
    Suite {
        name: "frameworks",
        question: "do unmodified frameworks save, die and resume?",
        share_s: 450,
        needs: &[Need::Root, Need::Fuse, Need::LinuxX86],
        tools: &[Tool::PythonWithTorch],
        daemons: true,
    },
    Suite {
        name: "wheel",
        question: "does the Python package save what torch saves, whatever dies?",
        share_s: 90,
        needs: &[Need::Root, Need::Fuse, Need::LinuxX86],
        tools: &[Tool::Wheel],
        daemons: true,
    },
];

impl Suite {
    /// Why this machine cannot run the suite, or `None` when it can.
    pub(crate) fn lacking(&self) -> Option<String> {
        self.needs.iter().find_map(|need| need.lacking())
    }
}

/// The suites that are wanted, in the order of a run; those of one round run in one go.
pub(crate) fn rounds(wanted: impl Fn(&Suite) -> bool) -> Vec<Vec<&'static Suite>> {
    let mut rounds: Vec<Vec<&'static Suite>> = Vec::new();
    let group = |suite: &Suite| TOGETHER.iter().position(|group| group.contains(&suite.name));
    for suite in SUITES.iter().filter(|suite| wanted(suite)) {
        let of = group(suite);
        match rounds.last_mut().filter(|round| of.is_some() && round.iter().all(|other| group(other) == of)) {
            Some(round) => round.push(suite),
            None => rounds.push(vec![suite]),
        }
    }
    rounds
}

/// How many tests run at once.
pub(crate) fn tests_at_once(daemons: bool) -> usize {
    if daemons { DAEMON_TESTS_AT_ONCE } else { machine::processors().max(TESTS_AT_ONCE_MIN) }
}

/// The name of a round's row.
pub(crate) fn row_name(round: &[&Suite]) -> String {
    round.iter().map(|suite| suite.name).collect::<Vec<_>>().join("+")
}

/// The seconds that a row may take.
pub(crate) fn share_s(row: &str) -> Option<u64> {
    let share = |name: &str| asked().find(|asked| asked.name == name).map(|asked| asked.share_s);
    row.split('+').map(share).sum()
}

/// All checks and suites, in the order of a run.
pub(crate) fn asked() -> impl Iterator<Item = Asked> {
    let suites =
        SUITES.iter().map(|&Suite { name, question, share_s, .. }| Asked { name, question, share_s });
    CHECKS.iter().copied().chain(suites).chain([BENCHES])
}

/// Test targets without a row, and rows without a test target.
pub(crate) fn mismatches(targets: &[&str]) -> Vec<String> {
    let unknown = targets.iter().filter(|target| SUITES.iter().all(|suite| suite.name != **target));
    let missing = SUITES.iter().filter(|suite| !targets.contains(&suite.name));
    unknown
        .map(|target| {
            format!("the test target `{target}` is in no row of suites.rs, so nothing would run it")
        })
        .chain(
            missing.map(|suite| format!("the suite `{}` has no test target in tests/Cargo.toml", suite.name)),
        )
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_hold_every_wanted_suite_once_and_in_order() {
        let names = |rounds: Vec<Vec<&'static Suite>>| {
            rounds.concat().iter().map(|suite| suite.name).collect::<Vec<_>>()
        };
        assert_eq!(names(rounds(|_| true)), SUITES.iter().map(|suite| suite.name).collect::<Vec<_>>());
        let rows: Vec<_> = rounds(|_| true).iter().map(|round| row_name(round)).collect();
        assert!(TOGETHER.iter().all(|group| rows.contains(&group.join("+"))), "{rows:?}");
        assert!(rows.iter().all(|row| share_s(row).is_some()), "{rows:?}");
        assert_eq!(names(rounds(|suite| suite.name == "guest")), ["guest"]);
    }

    #[test]
    fn every_name_is_there_once() {
        let mut all: Vec<_> = asked().map(|asked| asked.name).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn a_target_without_a_row_and_a_row_without_a_target_are_found() {
        let mut targets: Vec<&str> = SUITES.iter().map(|suite| suite.name).collect();
        assert!(mismatches(&targets).is_empty());
        targets[0] = "forgotten";
        assert_eq!(mismatches(&targets).len(), 2);
    }
}

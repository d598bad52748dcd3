//! The suites: what each asks, what it needs, and in which order a person waits for them.
//!
//! It owns the table. The suites themselves are test targets of `tidemark-tests`; a target that is not in the
//! table, or a row without a target, fails the run.

use crate::machine::Need;
use crate::prepare::Tool;

/// One suite: a test target of `tidemark-tests`.
#[derive(Debug)]
pub(crate) struct Suite {
    pub(crate) name: &'static str,
    pub(crate) question: &'static str,
    pub(crate) needs: &'static [Need],
    pub(crate) tools: &'static [Tool],
    /// Its tests start daemons with budgets, so they run one at a time.
    pub(crate) serial: bool,
}

const MOUNT: &[Need] = &[Need::Root, Need::Fuse];

/// Quick ones first; those that start daemons after those that do not.
pub(crate) const SUITES: &[Suite] = &[
    Suite {
        name: "model",
        question: "does the file system agree with a small model of it?",
        needs: &[],
        tools: &[],
        serial: false,
    },
    Suite {
        name: "conformance",
        question: "does each store keep one contract?",
        needs: &[],
        tools: &[],
        serial: false,
    },
    Suite {
        name: "simulation",
        question: "does a cluster keep its promises under loss, delay, partition, death and wrong clocks?",
        needs: &[],
        tools: &[],
        serial: false,
    },
    Suite {
        name: "s3",
        question: "are the ambiguous answers of object stores read right?",
        needs: &[],
        tools: &[Tool::PythonWithMoto],
        serial: false,
    },
    Suite {
        name: "mount",
        question: "does a real kernel see what SEMANTICS.md says?",
        needs: MOUNT,
        tools: &[Tool::Fuse3, Tool::Attr],
        serial: true,
    },
    Suite {
        name: "posix",
        question: "does the mount pass what other file systems are tested with?",
        needs: MOUNT,
        tools: &[Tool::Pjdfstest, Tool::Fsx],
        serial: true,
    },
    Suite {
        name: "guest",
        question: "does FALLBACK keep its promises on a real kernel that has no passthrough?",
        needs: &[Need::Root, Need::Fuse, Need::LinuxX86],
        tools: &[Tool::Guest],
        serial: true,
    },
    Suite {
        name: "durability",
        question: "bad bytes, bad input, no room, no Tier-3: is only the truth served, and nothing sealed lost?",
        needs: MOUNT,
        tools: &[],
        serial: true,
    },
    Suite {
        name: "crash",
        question: "stopped at every named step, does restart tell the truth?",
        needs: MOUNT,
        tools: &[],
        serial: true,
    },
    Suite {
        name: "survive",
        question: "the daemon is killed, replaced or dies again and again: does everything that is open go on?",
        needs: MOUNT,
        tools: &[],
        serial: true,
    },
    Suite {
        name: "campaign",
        question: "killed at any moment under load, over and over: is every promise kept?",
        needs: MOUNT,
        tools: &[],
        serial: true,
    },
    Suite {
        name: "cluster",
        question: "several hosts in network namespaces: what is lost with a host or a link, and what is not?",
        needs: &[Need::Root, Need::Fuse, Need::LinuxX86, Need::NetworkNamespaces],
        tools: &[Tool::Network, Tool::Etcd, Tool::PythonWithTorch],
        serial: true,
    },
    Suite {
        name: "frameworks",
        question: "do unmodified frameworks save, die and resume?",
        needs: &[Need::Root, Need::Fuse, Need::LinuxX86],
        tools: &[Tool::PythonWithTorch],
        serial: true,
    },
];

impl Suite {
    /// Why this machine cannot run the suite, or `None` when it can.
    pub(crate) fn lacking(&self) -> Option<String> {
        self.needs.iter().find_map(|need| need.lacking())
    }
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
    fn a_target_without_a_row_and_a_row_without_a_target_are_found() {
        let mut targets: Vec<&str> = SUITES.iter().map(|suite| suite.name).collect();
        assert!(mismatches(&targets).is_empty());
        targets[0] = "forgotten";
        assert_eq!(mismatches(&targets).len(), 2);
    }
}

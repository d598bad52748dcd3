//! Problems of a node: `problems` of `status`, the label of a metric, the exit status of `ckptctl status --exit-code`.
//!
//! Owns: the words, and the gravity of each. Does not own: noticing a problem (the engine, the daemon, `ckptctl`).
//!
//! A word here is a contract with alerts: words are added, and never given another meaning.

use super::ExitCode;
use serde::{Deserialize, Serialize};

/// A problem of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Stable, for alerts: lower-case words joined by `_`, such as `tier3_away`. See [`ProblemCode`].
    pub code: String,
    /// The problem, with its numbers.
    pub what: String,
    /// The action against it.
    pub action: String,
}

impl Problem {
    #[must_use]
    pub fn new(code: ProblemCode, what: impl Into<String>, action: impl Into<String>) -> Self {
        Self { code: code.word().to_owned(), what: what.into(), action: action.into() }
    }
}

/// Makes the enum, its words and the list of all from one table.
macro_rules! problem_codes {
    ($($name:ident, $word:literal, $exit:ident, $health:ident, $help:literal;)+) => {
        /// Every problem that a node can have.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum ProblemCode {
            $(#[doc = $help] $name,)+
        }

        impl ProblemCode {
            /// In the order of the table.
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];

            /// Returns the word in JSON and in the metric's label.
            #[must_use]
            pub const fn word(self) -> &'static str {
                match self { $(Self::$name => $word,)+ }
            }

            /// Returns the exit code of `ckptctl status --exit-code`, if no graver problem exists.
            #[must_use]
            pub const fn exit_code(self) -> ExitCode {
                match self { $(Self::$name => ExitCode::$exit,)+ }
            }

            /// Whether programs cannot use the mount, or must not: `/healthz` fails. All other problems leave the node healthy,
            /// because a restart of a daemon for its health costs it its memory.
            #[must_use]
            pub const fn fails_health(self) -> bool {
                match self { $(Self::$name => matches!(Health::$health, Health::Fails),)+ }
            }
        }
    };
}

/// The table's words.
enum Health {
    Fails,
    Stays,
}

problem_codes! {
    Fenced, "fenced", Fenced, Fails, "Another coordinator took over: nothing is committed here any more.";
    MountGone, "mount_gone", Unavailable, Fails, "The mount was taken away from outside.";
    Lost, "lost", NotRecoverable, Stays, "A committed checkpoint cannot be read whole, or Tier-3 does not say any more what it holds.";
    UncleanEnd, "unclean_end", NotRecoverable, Stays, "The daemon before ended without its drain, and what was only in its memory is gone.";
    Tier3NotBelieved, "tier3_not_believed", NotRecoverable, Stays, "A document of Tier-3 is damaged, and what it said is passed over.";
    HostCorrupt, "host_corrupt", NotRecoverable, Stays, "Memory held other bytes than were sealed, and they were not replaced.";
    ObjectCorrupt, "object_corrupt", NotRecoverable, Stays, "An object of Tier-3 is bad or missing, and could not be written again.";
    Tier3Away, "tier3_away", Unavailable, Stays, "Tier-3 does not take what it is given.";
    CoordinatorAway, "coordinator_away", Unavailable, Stays, "The coordinator does not answer.";
    EtcdAway, "etcd_away", Unavailable, Stays, "The etcd that says who the coordinator is does not answer.";
    CatalogNotKept, "catalog_not_kept", Unavailable, Stays, "The etcd does not take the changes of names that this coordinator makes.";
    NoAnswer, "no_answer", Unavailable, Stays, "The daemon lives and does not answer.";
    CrashLoop, "crash_loop", Unavailable, Stays, "The daemon dies again and again.";
    Tier1Full, "tier1_full", Failed, Stays, "Memory is full of what may not give way: saves fail.";
    SpillFull, "spill_full", Failed, Stays, "The spill is full of what may not give way.";
    Descriptors, "descriptors", Failed, Stays, "The daemon may open no more files.";
    StateDirGone, "state_dir_gone", Failed, Stays, "The state directory was removed: commands do not find the daemon.";
    UnderReplicated, "under_replicated", Failed, Stays, "Files have no copy on another node.";
    NodeAway, "node_away", Failed, Stays, "The coordinator does not hear a node.";
    NotCommitted, "not_committed", Failed, Stays, "A checkpoint will never be committed as it is.";
    Broken, "broken", Failed, Stays, "A file contradicts its own format: its checkpoint is kept, and not committed.";
    Undecided, "undecided", Failed, Stays, "Whether a checkpoint is whole is not known, and it is left as it is.";
    WritersUnseen, "writers_unseen", Failed, Stays, "Processes write that the daemon cannot see: nothing is known of how they end.";
    Unnameable, "unnameable", Failed, Stays, "Names that no key of Tier-3 can hold.";
}

/// The remedy for [`ProblemCode::WritersUnseen`].
pub const SEE_WRITERS: &str = "run ckptd in the host's pid namespace: `hostPID: true` in Kubernetes, `--pid=host` in Docker; what is known to be whole can \
     be committed with `ckptctl commit`";

impl ProblemCode {
    /// Returns the code of a word; none for a word of a newer daemon.
    #[must_use]
    pub fn of(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|code| code.word() == word)
    }
}

/// Returns the exit code of `ckptctl status --exit-code`: that of the gravest problem. A word that this build does not know is a
/// failure.
#[must_use]
pub fn exit_code_of(problems: &[Problem]) -> ExitCode {
    const GRAVEST_FIRST: [ExitCode; 4] =
        [ExitCode::Fenced, ExitCode::NotRecoverable, ExitCode::Unavailable, ExitCode::Failed];
    let of =
        |problem: &Problem| ProblemCode::of(&problem.code).map_or(ExitCode::Failed, ProblemCode::exit_code);
    let codes: Vec<_> = problems.iter().map(of).collect();
    GRAVEST_FIRST.into_iter().find(|code| codes.contains(code)).unwrap_or(ExitCode::Done)
}

/// Maximum number of problems of one code that are listed, so that a thousand lost files do not bury the problem that explains
/// them.
pub const PROBLEMS_OF_ONE_CODE_MAX: usize = 20;

/// Keeps at most [`PROBLEMS_OF_ONE_CODE_MAX`] of each code, in their order, and adds the number of the others.
#[must_use]
pub fn shortened(problems: Vec<Problem>) -> Vec<Problem> {
    let mut seen: std::collections::BTreeMap<String, usize> = std::collections::BTreeMap::new();
    let mut kept: Vec<Problem> = Vec::new();
    for problem in problems {
        let count = seen.entry(problem.code.clone()).or_default();
        *count += 1;
        if *count <= PROBLEMS_OF_ONE_CODE_MAX {
            kept.push(problem);
        }
    }
    for (code, count) in seen.into_iter().filter(|(_, count)| *count > PROBLEMS_OF_ONE_CODE_MAX) {
        let last = kept.iter_mut().rfind(|problem| problem.code == code).expect("some of it were kept");
        last.what.push_str(&format!("; and {} more of `{code}`", count - PROBLEMS_OF_ONE_CODE_MAX));
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(code: ProblemCode) -> Problem {
        Problem::new(code, "w", "a")
    }

    #[test]
    fn every_word_is_one_code_and_fit_for_a_label() {
        for code in ProblemCode::ALL {
            assert_eq!(ProblemCode::of(code.word()), Some(*code));
            assert!(code.word().bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'));
            assert_ne!(code.exit_code(), ExitCode::Done, "{}", code.word());
        }
        assert_eq!(ProblemCode::of("melted"), None);
    }

    #[test]
    fn a_script_is_told_the_gravest() {
        let [full, lost, away, fenced] =
            [ProblemCode::Tier1Full, ProblemCode::Lost, ProblemCode::Tier3Away, ProblemCode::Fenced]
                .map(problem);
        assert_eq!(exit_code_of(&[]), ExitCode::Done);
        assert_eq!(exit_code_of(std::slice::from_ref(&full)), ExitCode::Failed);
        assert_eq!(exit_code_of(&[full.clone(), away.clone()]), ExitCode::Unavailable);
        assert_eq!(exit_code_of(&[full, away, lost.clone()]), ExitCode::NotRecoverable);
        assert_eq!(exit_code_of(&[lost, fenced]), ExitCode::Fenced);
        let newer = Problem { code: "melted".into(), ..problem(ProblemCode::Lost) };
        assert_eq!(exit_code_of(&[newer]), ExitCode::Failed);
    }

    #[test]
    fn many_of_one_code_are_counted_and_others_stay() {
        let mut many = vec![problem(ProblemCode::Lost); PROBLEMS_OF_ONE_CODE_MAX + 7];
        many.push(problem(ProblemCode::Fenced));
        let short = shortened(many);
        assert_eq!(short.len(), PROBLEMS_OF_ONE_CODE_MAX + 1);
        assert!(short[PROBLEMS_OF_ONE_CODE_MAX - 1].what.ends_with("and 7 more of `lost`"), "{short:?}");
        assert_eq!(short.last(), Some(&problem(ProblemCode::Fenced)));
    }
}

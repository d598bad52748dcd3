//! Named steps where a test may stop the world.
//!
//! Owns: the list of steps and the switch that kills this process at one of them. Does not own: what happens
//! after; that is the crash suite's question. Unarmed, a step costs one relaxed load.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! step_points {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// The steps of the save and restore flows, in flow order.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum StepPoint { $($(#[$doc])* $variant,)* }

        impl StepPoint {
            /// Every step, in flow order.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name a test uses.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

step_points! {
    /// A file's bytes are hashed, the seal is not yet recorded.
    SealHashed = "seal.hashed",
    /// A version is complete in our eyes; nothing of its attempt is in Tier-3.
    CommitBeforeAttempt = "commit.before_attempt",
    /// `attempt.json` exists, no data does.
    CommitAfterAttempt = "commit.after_attempt",
    /// A file of the attempt is in Tier-3.
    UploadAfterFile = "upload.after_file",
    /// Every file is in Tier-3, the prepared marker is not.
    CommitBeforePrepared = "commit.before_prepared",
    /// The prepared marker exists.
    CommitAfterPrepared = "commit.after_prepared",
    /// The manifest exists, the marker does not.
    CommitBeforeMarker = "commit.before_marker",
    /// The marker exists; nobody has been told.
    CommitAfterMarker = "commit.after_marker",
    /// `_RETIRED` exists, data does too.
    RetireAfterMarker = "retire.after_marker",
    /// The boundary names the retired version, its data is still there.
    RetireAfterBoundary = "retire.after_boundary",
    /// Some data of a retired version is gone.
    RetireAfterFirstDelete = "retire.after_first_delete",
    /// A loose file's bytes are in Tier-3, its sidecar is not.
    LooseBeforeSidecar = "loose.before_sidecar",
    /// A rename is journaled, and its answer is not out.
    RenameBeforeAnswer = "rename.before_answer",
    /// A daemon that takes a live mount over has its memory and its names back; nothing is answered yet.
    ResumeBeforeServing = "resume.before_serving",
    /// The daemon serves; the kernel was asked for unanswered requests, and Tier-3 has not been looked at.
    ResumeAfterServing = "resume.after_serving",
    /// The tree document is about to be written.
    TreeBeforeWrite = "tree.before_write",
}

struct Armed {
    point: StepPoint,
    remaining: AtomicU64,
    dies: Dies,
}

/// The processes that die at an armed step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dies {
    /// The daemon alone, which its keeper starts again.
    Daemon,
    /// The process that started it too, so that all that was in memory is gone.
    Node,
}

static ARMED: OnceLock<Armed> = OnceLock::new();

/// Arms one step from `name` or `name:n`: the n-th time it is reached, this process kills itself.
///
/// Errors: a text that names no step, or a count that is not a positive number. May be called once.
pub fn arm(text: &str, dies: Dies) -> Result<(), String> {
    let (name, count) = match text.split_once(':') {
        Some((name, count)) => {
            (name, count.parse::<u64>().map_err(|_| format!("step count {count:?} is not a number"))?)
        }
        None => (text, 1),
    };
    let point = StepPoint::ALL
        .iter()
        .copied()
        .find(|point| point.name() == name)
        .ok_or_else(|| format!("no step point is called {name:?}; `ckptd step-points` lists them"))?;
    if count == 0 {
        return Err("a step count starts at 1".to_owned());
    }
    ARMED
        .set(Armed { point, remaining: AtomicU64::new(count), dies })
        .map_err(|_| "a step point is armed already".to_owned())
}

/// Marks that the flow is at `point`; ends the process with SIGKILL when the point is armed and due.
pub fn reach(point: StepPoint) {
    let Some(armed) = ARMED.get() else { return };
    if armed.point == point && armed.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
        if let (Dies::Node, Some(keeper)) = (armed.dies, rustix::process::getppid()) {
            // It lives as long as its child does.
            let _ = rustix::process::kill_process(keeper, rustix::process::Signal::KILL);
        }
        // SIGKILL and not abort(): no destructor, no signal handler and no flush may run, as in a real death.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_has_a_name_of_its_own() {
        let names: std::collections::HashSet<_> = StepPoint::ALL.iter().map(|point| point.name()).collect();
        assert_eq!(names.len(), StepPoint::ALL.len());
    }

    #[test]
    fn a_text_that_names_no_step_is_refused() {
        for odd in ["commit.someday", "seal.hashed:0", "seal.hashed:x"] {
            assert!(arm(odd, Dies::Daemon).is_err());
        }
    }
}

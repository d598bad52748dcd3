//! What the daemon tells people: the plain data behind every `ckptctl` command, `status.json` and the control files.
//!
//! Owns: the shapes, the words in them, and the exit code that each answer deserves. Does not own: gathering the
//! facts (the daemon), carrying them (the control crate), or drawing them (`ckptctl`).
//!
//! This is a contract with scripts. Fields are only ever added: never renamed, never given another meaning. A field
//! that is added carries `#[serde(default)]`, so that a new `ckptctl` reads an older daemon; unknown fields are
//! ignored, so that an old one reads a newer daemon. Sizes are integers of bytes, times are milliseconds since the
//! Unix epoch, durations are seconds. Identities that are drawn at random are text, since many JSON readers keep
//! only 53 bits of a number.

mod checkpoint;
mod exit;
mod keeping;
mod placement;
mod problem;
mod status;
mod why;
mod work;

pub use checkpoint::{Checkpoint, CheckpointRef, CheckpointState, Copies, CopyCount, File, Show};
pub use exit::{ApiError, ErrorCode, ExitCode};
pub use keeping::{
    Export, Gc, GcRow, Import, ImportOutcome, ImportRow, Pin, Recovery, RecoveryRow, Removal, RunRecovery,
    Undelete,
};
pub use placement::{Placement, PlacementRow, SurvivalRow, WARNINGS_MAX};
pub use problem::{PROBLEMS_OF_ONE_CODE_MAX, Problem, ProblemCode, SEE_WRITERS, exit_code_of, shortened};
pub use status::{
    Check, CheckVerdict, Doctor, FuseMode, Loss, Marks, MountStatus, Node, NodeState, ReplicationStatus,
    RunStatus, Status, TierState, TierStatus, Untold,
};
pub use why::{Why, WhyFile, WhyWriter};
pub use work::{
    BrokenInvariant, Commit, Event, EventLevel, Flush, Pending, PendingReason, Prefetch, Progress,
    StreamLine, Unfetched, Unrecoverable, Verify, VerifyRepair,
};

use std::borrow::Cow;

/// Text for people and JSON from the bytes of a path: what is not UTF-8 becomes U+FFFD, so the text is always valid
/// and may name several paths. Answers show paths; they are never used to address files again.
#[must_use]
pub fn path_text(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// A text from outside as a part of one line, with control characters escaped: a file's name must neither move the cursor nor begin a
/// line of its own.
#[must_use]
pub fn one_line(text: &str) -> Cow<'_, str> {
    if !text.chars().any(char::is_control) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().fold(String::with_capacity(text.len() + 8), |mut line, c| {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
        line
    }))
}

/// A random identity as 16 hex digits, as the type's documentation says.
pub(crate) mod hex16 {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    /// The number inside an identity.
    pub(crate) trait Number: Copy {
        fn number(self) -> u64;
        fn of(number: u64) -> Self;
    }

    impl Number for crate::id::Incarnation {
        fn number(self) -> u64 {
            self.0
        }
        fn of(number: u64) -> Self {
            Self(number)
        }
    }

    impl Number for crate::id::StartId {
        fn number(self) -> u64 {
            self.0
        }
        fn of(number: u64) -> Self {
            Self(number)
        }
    }

    pub(crate) fn serialize<N: Number, S: Serializer>(id: &N, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:016x}", id.number()))
    }

    pub(crate) fn deserialize<'de, N: Number, D: Deserializer<'de>>(deserializer: D) -> Result<N, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        if text.len() != 16 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(D::Error::custom(format!("an identity is 16 hex digits, not {text:?}")));
        }
        u64::from_str_radix(&text, 16).map(N::of).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod golden_test;

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn a_name_can_neither_move_the_cursor_nor_begin_a_line() {
        assert_eq!(one_line("run7/a b\u{fffd}"), "run7/a b\u{fffd}");
        assert_eq!(one_line("a\x1b[2J\nb"), r"a\u{1b}[2J\nb");
    }
}

//! Reports of the daemon to people: the plain data behind every `ckptctl` command, `status.json` and the control files.
//!
//! Owns: the shapes, the words in them, and the exit code for each answer. Does not own: gathering the facts (the daemon), carrying them
//! (the control crate), or drawing them (`ckptctl`).
//!
//! The shapes are a contract with scripts. Fields are only ever added: never renamed, never given another meaning. An added field carries
//! `#[serde(default)]`, so that a new `ckptctl` reads an older daemon; unknown fields are ignored, so that an old one reads a newer
//! daemon. Sizes are integers of bytes, times are milliseconds since the Unix epoch, durations are seconds. Random identities are text,
//! because many JSON readers keep only 53 bits of a number.

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
use std::ops::RangeInclusive;

/// Returns the bytes of a path as text for people and JSON, in the form of [`RelPath`](crate::path::RelPath): two paths never have the
/// same text. Commands accept the text for the path (see [`Place::unescaped`](crate::selector::Place::unescaped)). If another path has
/// that text as its name, commands that only read take that path, and commands that change something refuse.
#[must_use]
pub fn path_text(path: &[u8]) -> String {
    crate::escape::escape(path)
}

/// Characters of the Unicode categories Cf, Zl and Zp. Such characters are invisible and change how others appear: the direction of a text,
/// its lines, joined letters.
const UNSEEN: [RangeInclusive<char>; 22] = [
    '\u{ad}'..='\u{ad}',
    '\u{600}'..='\u{605}',
    '\u{61c}'..='\u{61c}',
    '\u{6dd}'..='\u{6dd}',
    '\u{70f}'..='\u{70f}',
    '\u{890}'..='\u{891}',
    '\u{8e2}'..='\u{8e2}',
    '\u{180e}'..='\u{180e}',
    '\u{200b}'..='\u{200f}',
    '\u{2028}'..='\u{2029}',
    '\u{202a}'..='\u{202e}',
    '\u{2060}'..='\u{2064}',
    '\u{2066}'..='\u{206f}',
    '\u{feff}'..='\u{feff}',
    '\u{fff9}'..='\u{fffb}',
    '\u{110bd}'..='\u{110bd}',
    '\u{110cd}'..='\u{110cd}',
    '\u{13430}'..='\u{1343f}',
    '\u{1bca0}'..='\u{1bca3}',
    '\u{1d173}'..='\u{1d17a}',
    '\u{e0001}'..='\u{e0001}',
    '\u{e0020}'..='\u{e007f}',
];

fn is_seen_as_it_is(c: char) -> bool {
    // Nearly all names consist of these.
    c.is_ascii_graphic() || c == ' ' || !c.is_control() && !UNSEEN.iter().any(|range| range.contains(&c))
}

/// Escapes control and invisible characters in a text from outside, for use within one line. A file's name must not move the cursor, begin
/// a line of its own, or turn the rest of its line around.
#[must_use]
pub fn one_line(text: &str) -> Cow<'_, str> {
    if text.chars().all(is_seen_as_it_is) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().fold(String::with_capacity(text.len() + 8), |mut line, c| {
        if !is_seen_as_it_is(c) {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
        line
    }))
}

/// Serialises a random identity as 16 hex digits, as the type's documentation says.
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
    use super::{one_line, path_text};

    #[test]
    fn two_paths_never_have_one_text() {
        let paths: [&[u8]; 6] =
            [b"r/\xff", b"r/\xfe", b"r/%FF", b"r/%25FF", "r/\u{fffd}".as_bytes(), b"r/\n"];
        let texts = paths.map(path_text);
        assert_eq!(texts, ["r/%FF", "r/%FE", "r/%25FF", "r/%2525FF", "r/\u{fffd}", "r/%0A"]);
    }

    #[test]
    fn what_is_not_seen_is_escaped_and_what_is_seen_stays() {
        assert_eq!(one_line("rtl\u{202e}tp.x"), r"rtl\u{202e}tp.x");
        assert_eq!(one_line("\u{feff}a\u{2028}b\u{2029}c\u{200b}"), r"\u{feff}a\u{2028}b\u{2029}c\u{200b}");
        let seen = "läuft/检查点 ε=0.1/עברית";
        assert_eq!(one_line(seen), seen);
    }

    #[test]
    fn a_name_can_neither_move_the_cursor_nor_begin_a_line() {
        assert_eq!(one_line("run7/a b\u{fffd}"), "run7/a b\u{fffd}");
        assert_eq!(one_line("a\x1b[2J\nb"), r"a\u{1b}[2J\nb");
    }
}

//! Texts of one line: names that cannot harm a terminal, times, durations, errors.
//!
//! Owns: how they are written. Does not own: sizes (`protocol::size`), what is escaped (`protocol::report`).

use std::error::Error;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};
use tidemark_protocol::id::Step;
use tidemark_protocol::report::{Checkpoint, CheckpointRef, CopyCount};

pub(crate) use tidemark_protocol::report::one_line as clean;

/// The beginning and the end of a text that has more than `most_chars`; none for one that fits.
pub(crate) fn cut(text: &str, most_chars: usize) -> Option<String> {
    let count = text.chars().count();
    if count <= most_chars {
        return None;
    }
    let kept = most_chars.saturating_sub(1);
    let (head, tail) = (kept - kept.div_ceil(2), kept.div_ceil(2));
    let begins = text.chars().take(head);
    Some(begins.chain(['…']).chain(text.chars().skip(count - tail)).collect())
}

/// An error and what caused it.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = clean(&error.to_string()).into_owned();
    let mut source = error.source();
    while let Some(cause) = source {
        // Writing to a string cannot fail.
        let _ = write!(text, ": {}", clean(&cause.to_string()));
        source = cause.source();
    }
    text
}

/// A checkpoint in one word: its step, or its path where it has none.
pub(crate) fn reference(checkpoint: Option<&CheckpointRef>) -> String {
    match checkpoint {
        None => "-".to_owned(),
        Some(CheckpointRef { step: Some(step), .. }) => format!("step {step}"),
        Some(CheckpointRef { path, version, .. }) => format!("{} v{version}", clean(path)),
    }
}

/// A step in a table.
pub(crate) fn step(step: Option<Step>) -> String {
    step.map_or_else(|| "-".to_owned(), |step| step.to_string())
}

/// Returns the end of a sentence with the reason, if one is known.
pub(crate) fn because(why: Option<&str>) -> String {
    why.map_or_else(String::new, |why| format!(": {}", clean(why)))
}

/// Milliseconds since the epoch, now.
pub(crate) fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

/// How long ago, for a table.
pub(crate) fn age(then_ms: i64, now_ms: i64) -> String {
    duration(u64::try_from(now_ms.saturating_sub(then_ms)).unwrap_or(0) / 1000)
}

/// Seconds as a person says them: two units at most.
pub(crate) fn duration(seconds: u64) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    match seconds {
        0..MINUTE => format!("{seconds}s"),
        MINUTE..HOUR => format!("{}m{:02}s", seconds / MINUTE, seconds % MINUTE),
        HOUR..DAY => format!("{}h{:02}m", seconds / HOUR, seconds % HOUR / MINUTE),
        DAY.. => format!("{}d{:02}h", seconds / DAY, seconds % DAY / HOUR),
    }
}

/// RFC 3339 in UTC, to the millisecond.
pub(crate) fn time(ms: i64) -> String {
    let (days, of_day_ms) = (ms.div_euclid(86_400_000), ms.rem_euclid(86_400_000));
    // The Gregorian calendar in 400-year cycles of 146,097 days that begin on 1 March, so that the leap day is last.
    let from_march_0000 = days + 719_468;
    let (cycle, of_cycle) = (from_march_0000.div_euclid(146_097), from_march_0000.rem_euclid(146_097));
    let of_cycle_years = (of_cycle - of_cycle / 1460 + of_cycle / 36_524 - of_cycle / 146_096) / 365;
    let of_year = of_cycle - (365 * of_cycle_years + of_cycle_years / 4 - of_cycle_years / 100);
    let march_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = cycle * 400 + of_cycle_years + i64::from(month <= 2);
    let (seconds, millis) = (of_day_ms / 1000, of_day_ms % 1000);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// How much of the checkpoint is in one place.
pub(crate) fn part(there: CopyCount, of: &Checkpoint) -> String {
    if there.files == 0 {
        "-".to_owned()
    } else if there.files >= of.files && there.bytes >= of.bytes {
        "all".to_owned()
    } else {
        format!("{}/{}", there.files, of.files)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::id::{Timeline, Version};
    use tidemark_protocol::report::{CheckpointState, Copies};

    #[test]
    fn a_long_name_keeps_both_ends() {
        assert_eq!(cut("run7/step-1200", 14), None);
        assert_eq!(cut("run7/step-1200", 9).as_deref(), Some("run7…1200"));
        assert_eq!(cut("äöüßäöüß", 5).as_deref(), Some("äö…üß"), "characters, not bytes");
        assert_eq!(cut("abc", 1).as_deref(), Some("…"));
    }

    #[test]
    fn times_are_the_calendar() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_700_000_000_123, "2023-11-14T22:13:20.123Z"),
            (4_102_444_799_999, "2099-12-31T23:59:59.999Z"),
            (-1, "1969-12-31T23:59:59.999Z"),
        ] {
            assert_eq!(time(ms), text);
        }
    }

    #[test]
    fn durations_have_two_units_at_most() {
        for (seconds, text) in [(0, "0s"), (59, "59s"), (61, "1m01s"), (3_700, "1h01m"), (90_000, "1d01h")] {
            assert_eq!(duration(seconds), text);
        }
        assert_eq!(age(5_000, 3_000), "0s", "a clock that went back is not an age");
    }

    #[test]
    fn a_part_is_never_shown_as_all() {
        let of = Checkpoint {
            run: None,
            timeline: Timeline(0),
            step: None,
            version: Version(1),
            path: String::new(),
            bytes: 10,
            files: 2,
            framework: None,
            state: CheckpointState::Complete,
            evidence: None,
            copies: Copies::default(),
            pinned: false,
            closed_ms: None,
        };
        assert_eq!(part(CopyCount { files: 0, bytes: 0 }, &of), "-");
        assert_eq!(part(CopyCount { files: 1, bytes: 10 }, &of), "1/2");
        assert_eq!(part(CopyCount { files: 2, bytes: 9 }, &of), "2/2");
        assert_eq!(part(CopyCount { files: 2, bytes: 10 }, &of), "all");
    }
}

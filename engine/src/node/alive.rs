//! Whether a process lives that wrote, made or removed something.
//!
//! Owns: asking /proc, and how long an answer counts. Does not own: how a process ended (`namespace`), what follows (`decide`,
//! `visibility`).

use crate::namespace::{Namespace, WriterId};
use std::cell::Cell;
use std::fs::File;
use std::io::Read;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tidemark_protocol::cluster::wire::WireFate;

/// Whether the very process still runs: same number, same start.
pub(crate) fn is_alive(namespace: &Namespace, writer: &WriterId) -> bool {
    if let Some((fate, _)) = namespace.fate_elsewhere(writer) {
        return fate == WireFate::Alive;
    }
    running_since(writer.tgid) == Some(writer.start_time_ticks)
}

/// Whether a process of that number runs.
pub(crate) fn is_running(process: u32) -> bool {
    running_since(process).is_some()
}

/// When a process that runs was started, in clock ticks since boot.
///
/// Asked for each file of a save in each turn of the loop, so the last answer counts for [`ANSWER_COUNTS_FOR`], but for nobody who asks
/// after [`ask_anew`].
fn running_since(process: u32) -> Option<u64> {
    type Answer = (u32, u64, Instant, Option<u64>);
    thread_local! {
        static LAST: Cell<Option<Answer>> = const { Cell::new(None) };
    }
    let (now, round) = (Instant::now(), ROUND.load(Ordering::Relaxed));
    if let Some((asked, of_round, at, since)) = LAST.get()
        && (asked, of_round) == (process, round)
        && now.saturating_duration_since(at) < ANSWER_COUNTS_FOR
    {
        return since;
    }
    let since = stat_of(process).and_then(|stat| start_of_running(&stat));
    LAST.set(Some((process, round, now, since)));
    since
}

/// Who lived a moment ago may be dead by now: somebody begins to wait for what is decided, and may have seen the end.
pub(crate) fn ask_anew() {
    ROUND.fetch_add(1, Ordering::Relaxed);
}

/// Answers of another round do not count. The loop's turns run on several threads, one after the other.
static ROUND: AtomicU64 = AtomicU64::new(0);

/// Less than a tick of the loop: what is decided once an end is known comes no turn later.
const ANSWER_COUNTS_FOR: Duration = Duration::from_millis(5);

/// The longest line of `/proc/PID/stat` that is of use: its 52 fields have at most 20 digits each, and the command 64 bytes.
const STAT_BYTES: usize = 2048;

fn stat_of(process: u32) -> Option<String> {
    let mut line = [0; STAT_BYTES];
    let read = File::open(format!("/proc/{process}/stat")).and_then(|mut file| file.read(&mut line)).ok()?;
    Some(String::from_utf8_lossy(&line[..read]).into_owned())
}

fn start_of_running(stat: &str) -> Option<u64> {
    // The command in parentheses may hold anything; what follows the last one is plain.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next();
    // Field 9 of the whole is the 7th after the command, and field 22 the 20th; the state was the first of them.
    let flags: u64 = fields.nth(5)?.parse().ok()?;
    let start = fields.nth(12)?.parse().ok()?;
    let ends = flags & PF_EXITING != 0 || matches!(state, Some("Z" | "X"));
    (!ends).then_some(start)
}

/// include/linux/sched.h. Freeing a trainer's memory takes up to seconds, and it runs nothing of its own any more.
const PF_EXITING: u64 = 0x4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_frees_what_it_had_lives_no_more() {
        let line = |state: &str, flags: u64| {
            format!("7 (a) (b) {state} 1 7 7 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0")
        };
        assert_eq!(start_of_running(&line("S", 0x40_0000)), Some(4711));
        assert_eq!(start_of_running(&line("D", 0x40_0004)), None, "it was killed, and ends");
        assert_eq!(start_of_running(&line("Z", 0x40_000c)), None, "nobody waited for it");
        let own = stat_of(std::process::id()).unwrap();
        assert!(start_of_running(&own).is_some(), "{own}");
    }

    #[test]
    fn an_answer_counts_until_somebody_asks_anew() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let answer = running_since(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(answer.is_some());
        ask_anew();
        assert_eq!(running_since(child.id()), None);
    }
}

//! Whether a process that wrote, made or removed something still lives, and how it ended.
//!
//! Owns: how long an answer of /proc counts. Does not own: how a process ended (`ends`), the fates that other nodes publish (`fates`), the
//! consequences (the node loop).

use super::process::Stat;
use super::{End, Ended, Namespace, WriterId};
use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tidemark_protocol::cluster::wire::WireFate;
use tidemark_protocol::evidence::Fate;

/// Whether this very process still runs: same number, same start time.
pub fn is_alive(namespace: &Namespace, writer: &WriterId) -> bool {
    if let Some((fate, _)) = namespace.catalog().fate_elsewhere(writer) {
        return fate == WireFate::Alive;
    }
    running_since(writer.tgid) == Some(writer.start_time_ticks)
}

/// Returns how a writer process ended, and when it was seen to have failed. `cut`: it left a file unclosed.
pub fn fate_of(namespace: &Namespace, writer: &WriterId, cut: bool) -> (Fate, Option<i64>) {
    if let Some((fate, failed_at_ns)) = namespace.catalog().fate_elsewhere(writer) {
        let fate = match fate {
            WireFate::Alive => Fate::Alive,
            WireFate::Exited => Fate::Exited,
            WireFate::Killed => Fate::Killed,
            WireFate::Gone if cut => Fate::Killed,
            WireFate::Gone => Fate::Gone,
        };
        return (fate, failed_at_ns);
    }
    let end = namespace.writers().end(writer);
    let failed_at_ns = end.and_then(End::failed_at_ns);
    let fate = match end {
        _ if is_alive(namespace, writer) => Fate::Alive,
        Some(end) => match end.how {
            Ended::Well => Fate::Exited,
            Ended::Failed if !cut => Fate::Failed,
            Ended::Failed | Ended::Killed => Fate::Killed,
        },
        None if namespace.writers().is_end_awaited(writer) => Fate::Ended,
        None if cut => Fate::Killed,
        None => Fate::Gone,
    };
    (fate, failed_at_ns)
}

/// Whether a process with this number runs.
pub fn is_running(process: u32) -> bool {
    running_since(process).is_some()
}

/// Returns when a running process was started, in clock ticks since boot.
///
/// The loop asks for each file of a save in each turn. The last answer therefore counts for [`ANSWER_COUNTS_FOR`], except after a call of
/// [`ask_anew`].
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
    let runs = |stat: &Stat| !stat.ended && !stat.ends;
    let since = Stat::read(Path::new("/proc"), process).filter(runs).map(|stat| stat.start_time_ticks);
    LAST.set(Some((process, round, now, since)));
    since
}

/// Voids the cached answers: a caller that begins to wait for a decision may have seen a process end that lived a
/// moment ago.
pub fn ask_anew() {
    ROUND.fetch_add(1, Ordering::Relaxed);
}

/// Answers of another round do not count. The loop's turns run on several threads, one after the other.
static ROUND: AtomicU64 = AtomicU64::new(0);

/// Shorter than a tick of the loop, so that a known end does not delay a decision by a turn.
const ANSWER_COUNTS_FOR: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

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

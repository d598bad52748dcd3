//! Cost of a check: time on the wall clock, and processor time of the whole machine.
//!
//! Owns: the two clocks. Does not own: the use of the figures (`summary`).

use std::fs;
use std::ops::AddAssign;
use std::time::{Duration, Instant};

/// The unit of `/proc/stat`: a hundredth of a second on every Linux that user programs see (`USER_HZ`).
const TICK_MS: u64 = 10;
/// The columns of the `cpu` line that count work: user, nice, system, irq, softirq. Idle, iowait and time that
/// the host took are left out, and guest time is in user already.
const BUSY_COLUMNS: [usize; 5] = [0, 1, 2, 5, 6];

/// Wall-clock and processor time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spent {
    pub(crate) wall: Duration,
    pub(crate) cpu: Duration,
}

impl AddAssign for Spent {
    fn add_assign(&mut self, other: Self) {
        self.wall += other.wall;
        self.cpu += other.cpu;
    }
}

/// Measures from its start until it is read.
///
/// Processor time is the machine's and not that of the children. A daemon that a test kills is reaped by another
/// process, and the kernel's own threads do a part of each suite's work. Other work on the machine is counted too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopwatch {
    began: Instant,
    busy: Duration,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self { began: Instant::now(), busy: busy() }
    }

    pub(crate) fn read(self) -> Spent {
        Spent { wall: self.began.elapsed(), cpu: busy().saturating_sub(self.busy) }
    }
}

/// Processor time since boot; zero where the kernel does not tell.
fn busy() -> Duration {
    fs::read_to_string("/proc/stat").ok().and_then(|text| parse(&text)).unwrap_or_default()
}

fn parse(stat: &str) -> Option<Duration> {
    let columns: Vec<u64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<_, _>>()
        .ok()?;
    let ticks: u64 = BUSY_COLUMNS.iter().map(|column| columns.get(*column)).sum::<Option<u64>>()?;
    Some(Duration::from_millis(ticks * TICK_MS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_counts_and_waiting_does_not() {
        let stat = "cpu  100 20 3 5000 600 7 8 900 10 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n";
        assert_eq!(parse(stat), Some(Duration::from_millis(1380)));
        assert_eq!(parse("cpu  100 20\n"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn a_busy_thread_is_seen() {
        let watch = Stopwatch::start();
        while watch.began.elapsed() < Duration::from_millis(200) {
            std::hint::spin_loop();
        }
        let spent = watch.read();
        assert!(spent.wall >= Duration::from_millis(200));
        assert!(spent.cpu >= Duration::from_millis(50), "{spent:?}");
    }
}

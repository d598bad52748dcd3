//! Whether a daemon that lives still does its work.
//!
//! Owns: when a daemon counts as hung, and which facts that depends on. Does not own: replacing the daemon (`keep`).
//!
//! A daemon reports every second that its loop has turned. If a daemon is silent for long while requests wait, it holds up every job on the
//! node like a dead one. But nothing restarts it. But silence alone proves nothing: the daemon may lack processors or memory, wait for a
//! disk, or be under a debugger. Then its death would only make things worse. So the silence counts only in seconds in which none of these
//! was seen, and only if this process itself ran on time.

use std::fs;
use std::time::{Duration, Instant};

/// How long a daemon may be silent while requests wait. Ten seconds of SIGSTOP are someone's experiment.
const HUNG_AFTER: Duration = Duration::from_secs(30);
/// Interval between two examinations.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Silence from which on a daemon is examined.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// If examinations are further apart, this process did not run either, or the machine slept.
const LATE_AFTER: Duration = Duration::from_secs(3);

/// The most threads of a daemon that are examined; it has some tens.
const THREADS_MAX: usize = 1024;

/// The facts about a daemon at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Facts {
    /// Whether programs have sent requests that the daemon has not even read.
    pub(crate) requests_wait: bool,
    /// Whether a debugger is attached.
    pub(crate) traced: bool,
    /// Whether a thread waits in the kernel for a device, or for memory. Not even SIGKILL ends that.
    pub(crate) blocked: bool,
    /// Whether a thread wants a processor.
    pub(crate) runnable: bool,
    /// Processor time of the daemon's threads so far.
    pub(crate) cpu: Duration,
}

/// Signs of life of one daemon.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// When the daemon last reported that its loop turned; `None` if it never did, as older daemons.
    turned: Option<Instant>,
    looked: Option<(Instant, Duration)>,
    /// Start of the silence that no fact excuses.
    without_excuse: Option<Instant>,
}

impl Pulse {
    /// Notes that the daemon's loop has turned.
    pub(crate) fn turned(&mut self, now: Instant) {
        *self = Self { turned: Some(now), ..Self::default() };
    }

    /// Returns whether an examination is due.
    pub(crate) fn is_silent(&self, now: Instant) -> bool {
        let silent = self.turned.is_some_and(|turned| now.saturating_duration_since(turned) > SILENT_AFTER);
        silent && self.looked.is_none_or(|(at, _)| now.saturating_duration_since(at) >= LOOK_EVERY)
    }

    /// Takes new facts, and returns how long the daemon has been silent, once it is certain that it hangs.
    pub(crate) fn look(&mut self, now: Instant, facts: Facts) -> Option<Duration> {
        let turned = self.turned?;
        let before = self.looked.replace((now, facts.cpu));
        let (late, starved) = before.map_or((true, false), |(at, cpu)| {
            let passed = now.saturating_duration_since(at);
            // A loop that spins has a processor nearly all the time.
            let starved = facts.runnable && facts.cpu.saturating_sub(cpu) < passed / 2;
            (passed > LATE_AFTER, starved)
        });
        if late || starved || !facts.requests_wait || facts.traced || facts.blocked {
            self.without_excuse = None;
            return None;
        }
        let since = *self.without_excuse.get_or_insert(now);
        (now.saturating_duration_since(since) >= HUNG_AFTER).then(|| now.saturating_duration_since(turned))
    }
}

/// Reads the facts about a process from /proc; `None` when it is gone.
pub(crate) fn facts_of(pid: u32, requests_wait: bool) -> Option<Facts> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let mut facts = Facts { requests_wait, traced: is_traced(&status), ..Facts::default() };
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()?.take(THREADS_MAX) {
        // A thread may end while this is read.
        let Ok(line) = fs::read_to_string(thread.ok()?.path().join("stat")) else { continue };
        let Some((state, ticks)) = state_and_ticks(&line) else { continue };
        facts.runnable |= state == 'R';
        facts.blocked |= state == 'D';
        facts.cpu += Duration::from_millis(ticks.saturating_mul(TICK_MS));
    }
    Some(facts)
}

/// USER_HZ is 100 on every Linux that this program runs on.
const TICK_MS: u64 = 10;

fn is_traced(status: &str) -> bool {
    status.lines().find_map(|line| line.strip_prefix("TracerPid:")).is_some_and(|tracer| tracer.trim() != "0")
}

/// Reads fields 3, 14 and 15 of a stat line (proc_pid_stat(5)). The name before them may contain any characters.
fn state_and_ticks(line: &str) -> Option<(char, u64)> {
    let mut fields = line.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let mut times = fields.skip(10);
    let user: u64 = times.next()?.parse().ok()?;
    let system: u64 = times.next()?.parse().ok()?;
    Some((state, user.saturating_add(system)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const WAITS: Facts =
        Facts { requests_wait: true, traced: false, blocked: false, runnable: false, cpu: Duration::ZERO };

    /// Examines once a second a daemon that fell silent, and returns the second in which it counts as hung.
    fn hangs_at(seconds: u32, facts: impl Fn(u32) -> Facts) -> Option<u32> {
        let start = Instant::now();
        let mut pulse = Pulse::default();
        pulse.turned(start);
        (1..=seconds).find(|second| {
            let now = start + *second * SECOND;
            pulse.is_silent(now) && pulse.look(now, facts(*second)).is_some()
        })
    }

    #[test]
    fn a_daemon_that_is_silent_for_long_while_requests_wait_hangs() {
        // The first examination only begins, and the silence counts from the next.
        let hung = hangs_at(60, |_| WAITS).unwrap();
        assert!((33..=36).contains(&hung), "{hung}");
        assert_eq!(hangs_at(10, |_| WAITS), None, "somebody's SIGSTOP");
        let spins = |second: u32| Facts { runnable: true, cpu: second * SECOND, ..WAITS };
        assert_eq!(hangs_at(60, spins), Some(hung), "a loop that never ends");
    }

    #[test]
    fn whatever_explains_the_silence_excuses_it() {
        let excuses: [(&str, &dyn Fn(u32) -> Facts); 5] = [
            ("nobody waits", &|_| Facts { requests_wait: false, ..WAITS }),
            ("a debugger", &|_| Facts { traced: true, ..WAITS }),
            ("a disk, or memory that is throttled", &|_| Facts { blocked: true, ..WAITS }),
            ("no processor", &|_| Facts { runnable: true, ..WAITS }),
            ("few processors", &|second| Facts { runnable: true, cpu: second * SECOND / 10, ..WAITS }),
        ];
        for (why, facts) in excuses {
            assert_eq!(hangs_at(300, facts), None, "{why}");
        }
        // An excuse now and then is enough: the silence counts anew after it.
        assert_eq!(hangs_at(300, |second| Facts { blocked: second % 20 == 0, ..WAITS }), None);
    }

    #[test]
    fn a_keeper_that_did_not_run_either_knows_nothing() {
        let start = Instant::now();
        let mut pulse = Pulse::default();
        assert!(!pulse.is_silent(start + 100 * SECOND), "it never said anything");
        pulse.turned(start);
        for look in 1..20 {
            let now = start + look * 10 * SECOND;
            assert!(pulse.is_silent(now));
            assert_eq!(pulse.look(now, WAITS), None);
        }
        pulse.turned(start + 200 * SECOND);
        assert!(!pulse.is_silent(start + 202 * SECOND));
    }

    #[test]
    fn lines_of_proc_are_read_and_odd_ones_are_nothing() {
        let line = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 2 3 4 250 50 0 0 20 0 9 0 12345 1 2";
        assert_eq!(state_and_ticks(line), Some(('S', 300)));
        for odd in ["", "7 (ckptd", "7 (ckptd) ", "7 (ckptd) R 1 2 3", "7 (x) R 1 2 3 4 5 6 7 8 9 10 x 1"] {
            assert_eq!(state_and_ticks(odd), None, "{odd}");
        }
        assert!(is_traced("Name:\tx\nTracerPid:\t12\n") && !is_traced("TracerPid:\t0\n") && !is_traced(""));
        let own = facts_of(std::process::id(), true).unwrap();
        assert!(own.requests_wait && own.runnable && !own.traced);
        assert_eq!(facts_of(u32::MAX, true), None);
    }
}

//! Whether a daemon that lives still does its work.
//!
//! Owns: when a daemon counts as hung, and what is looked at for that. Does not own: replacing it (`keep`).
//!
//! A daemon says every second that its loop has turned. One that says nothing for long while requests of programs wait holds up
//! every job on the node, as a dead one would, and nobody mends it. But silence alone proves nothing: the daemon may be starved
//! of processors or memory, wait for a disk, or be looked at with a debugger, and then its death would only make things worse.
//! So the silence counts only in seconds in which none of that was seen, and only if this process itself was on time.

use std::fs;
use std::time::{Duration, Instant};

/// So long a daemon may be silent while requests wait. Ten seconds of SIGSTOP are somebody's experiment.
const HUNG_AFTER: Duration = Duration::from_secs(30);
/// Looks are this far apart.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A daemon that spoke so lately is not looked at.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// Looks that are further apart say that this process did not run either, or that the machine slept.
const LATE_AFTER: Duration = Duration::from_secs(3);

/// Threads of a daemon that are looked at; it has some tens.
const THREADS_MAX: usize = 1024;

/// What is seen of a daemon at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Facts {
    /// Programs have asked for something that the daemon has not even read.
    pub(crate) requests_wait: bool,
    /// A debugger has it.
    pub(crate) traced: bool,
    /// A thread waits in the kernel for a device, or for memory. Not even SIGKILL ends that.
    pub(crate) blocked: bool,
    /// A thread wants a processor.
    pub(crate) runnable: bool,
    /// What its threads have had of processors so far.
    pub(crate) cpu: Duration,
}

/// The life signs of one daemon.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// When the daemon last said that its loop turned; none of one that never says so, as older ones.
    turned: Option<Instant>,
    looked: Option<(Instant, Duration)>,
    /// Since when nothing was seen that excuses the silence.
    without_excuse: Option<Instant>,
}

impl Pulse {
    /// The daemon's loop has turned.
    pub(crate) fn turned(&mut self, now: Instant) {
        *self = Self { turned: Some(now), ..Self::default() };
    }

    /// Whether a look is due.
    pub(crate) fn is_silent(&self, now: Instant) -> bool {
        let silent = self.turned.is_some_and(|turned| now.saturating_duration_since(turned) > SILENT_AFTER);
        silent && self.looked.is_none_or(|(at, _)| now.saturating_duration_since(at) >= LOOK_EVERY)
    }

    /// For how long the daemon has hung, once that is sure.
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

/// What /proc says of a process; none when it is gone.
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

/// USER_HZ is 100 on all that Linux runs on here.
const TICK_MS: u64 = 10;

fn is_traced(status: &str) -> bool {
    status.lines().find_map(|line| line.strip_prefix("TracerPid:")).is_some_and(|tracer| tracer.trim() != "0")
}

/// Fields 3, 14 and 15 of a stat line (proc_pid_stat(5)). The name before them may hold anything.
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

    /// Looks once a second at a daemon that fell silent; the second in which it counts as hung.
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
        // The first look only begins, and the silence counts from the next.
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
        // An excuse now and then is enough: it begins anew.
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

//! How soon a thread runs when it has something to do.
//!
//! Owns: the call `sched_setscheduler` (sched(7)). One of the modules with unsafe code: rustix does not have it.
//! Does not own: which thread deserves it: run-ahead, whose lateness a writer pays for; the keeper, and a daemon that takes
//! over, for whom every program waits that uses the mount.

use std::io;

/// The least of the real-time priorities: before every usual thread, behind everything that is meant to be real-time.
const PRIORITY: libc::c_int = 1;
/// The nice value where real-time is refused.
const NICE: i32 = -10;

/// Lets the calling thread run before the usual ones, as far as this process may ask for it. Threads and processes that it
/// starts run as usual.
///
/// # Errors
/// The process has no `CAP_SYS_NICE`; the thread runs as before.
pub fn run_before_others() -> io::Result<()> {
    if schedule(libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, PRIORITY).is_ok() {
        return Ok(());
    }
    schedule(libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK, 0)?;
    // 0, "no process", is the calling thread on Linux.
    rustix::process::setpriority_process(None, NICE)?;
    Ok(())
}

/// Takes [`run_before_others`] back.
///
/// # Errors
/// The kernel's; not expected.
pub fn run_as_usual() -> io::Result<()> {
    // The flag stays: only a process with CAP_SYS_NICE may clear it, and it means nothing for a usual thread.
    schedule(libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK, 0)?;
    rustix::process::setpriority_process(None, 0)?;
    Ok(())
}

fn schedule(policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: 0 is the calling thread, and the call reads one sched_param, which lives until it returns.
    let answer = unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields of proc(5) stat: nice is the 19th, the scheduling policy the 41st.
    fn nice_and_policy() -> (i32, i32) {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        (fields[19 - 3].parse().unwrap(), fields[41 - 3].parse().unwrap())
    }

    #[test]
    fn a_thread_runs_before_others_and_what_it_starts_does_not() {
        std::thread::spawn(|| {
            let usual = nice_and_policy();
            if let Err(error) = run_before_others() {
                assert_eq!(
                    error.raw_os_error().map(|_| nice_and_policy()),
                    Some(usual),
                    "{error}: nothing changed"
                );
                return;
            }
            assert_ne!(nice_and_policy(), usual);
            assert_eq!(std::thread::spawn(nice_and_policy).join().unwrap(), (0, libc::SCHED_OTHER));
            run_as_usual().unwrap();
            assert_eq!(nice_and_policy(), (0, libc::SCHED_OTHER));
        })
        .join()
        .unwrap();
    }
}

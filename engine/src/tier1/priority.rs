//! How soon a thread runs when it has something to do.
//!
//! Owns: the call `sched_setscheduler` (sched(7)). One of the modules with unsafe code: rustix does not have it.
//! Does not own: which thread deserves it (`run_ahead`).

use std::io;

/// The least of the real-time priorities: before every usual thread, behind everything that is meant to be real-time.
const PRIORITY: libc::c_int = 1;
/// The nice value where real-time is refused.
const NICE: i32 = -10;

/// Lets the calling thread run before the usual ones, as far as this process may ask for it.
pub(super) fn run_before_others() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: PRIORITY };
    // SAFETY: 0 is the calling thread, and the call reads one sched_param, which lives until it returns.
    let answer = unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const parameters) };
    if answer == 0 {
        return Ok(());
    }
    // 0, "no process", is the calling thread on Linux.
    rustix::process::setpriority_process(None, NICE)?;
    Ok(())
}

//! Priority of threads: how soon a thread runs when it has something to do.
//!
//! Owns: the calls `sched_setscheduler` and `sched_setattr` (sched(7)). The module has unsafe code: rustix has neither. Does not own:
//! which threads get priority, and which give way. Priority goes to run-ahead, whose lateness a writer pays for, to the threads that
//! answer requests, and to the keeper. A daemon that takes over gets it too, because every program that uses the mount waits for it.
//! Background work gives way.

use std::io;

/// The lowest real-time priority: before every usual thread, behind everything that is meant to be real-time.
const PRIORITY: libc::c_int = 1;
/// The nice value if real-time is refused.
const NICE: i32 = -10;

/// The slice of a thread that gives way: longer than a usual thread's (2.8 ms at most, unless configured). The slice is no longer
/// than another thread may wait that does not wake but was there before: until 6.16 a slice is not cut short for those.
const SLICE_LONG_NS: u64 = 10_000_000;
/// The shortest slice that the kernel accepts (kernel/sched/syscalls.c).
const SLICE_SHORT_NS: u64 = 100_000;

/// Lets the calling thread run before the usual ones, as far as this process may. Threads and processes that it starts run as usual.
///
/// # Errors
/// When the process has no `CAP_SYS_NICE`; the thread runs as before.
pub fn run_before_others() -> io::Result<()> {
    if schedule(libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, PRIORITY).is_ok() {
        return Ok(());
    }
    schedule(libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK, 0)?;
    // 0, "no process", is the calling thread on Linux.
    rustix::process::setpriority_process(None, NICE)?;
    Ok(())
}

/// Undoes [`run_before_others`].
///
/// # Errors
/// The kernel's errors; none is expected.
pub fn run_as_usual() -> io::Result<()> {
    // The flag stays: only a process with CAP_SYS_NICE may clear it, and it means nothing for a usual thread.
    schedule(libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK, 0)?;
    rustix::process::setpriority_process(None, 0)?;
    Ok(())
}

/// Lets usual threads that wake run at once instead of the calling one, which still gets its share of the processor. Threads that it
/// starts do so too. Kernels before 6.12 change nothing.
///
/// # Errors
/// The kernel's errors; none is expected.
pub fn give_way() -> io::Result<()> {
    slice(SLICE_LONG_NS)
}

/// Lets the calling thread run soon after it wakes, as long as it does little each time. Kernels before 6.12 change nothing.
///
/// # Errors
/// The kernel's errors; none is expected.
pub fn run_soon() -> io::Result<()> {
    slice(SLICE_SHORT_NS)
}

/// Sets how much of the processor a usual thread asks for at a time. If two threads compete, the one that asks for less runs first
/// (kernel/sched/fair.c, PREEMPT_SHORT), and neither gets more than its share over time.
fn slice(runtime_ns: u64) -> io::Result<()> {
    let attributes = Attributes {
        size: ATTRIBUTES_BYTES,
        policy: libc::SCHED_OTHER.cast_unsigned(),
        flags: 0,
        nice: rustix::process::getpriority_process(None)?,
        priority: 0,
        runtime_ns,
        deadline_ns: 0,
        period_ns: 0,
    };
    // SAFETY: 0 is the calling thread, and the call reads as many bytes as `size` says of attributes that live until it returns.
    let answer = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// SCHED_ATTR_SIZE_VER0.
const ATTRIBUTES_BYTES: u32 = 48;
const _: () = assert!(size_of::<Attributes>() == 48);

/// `struct sched_attr` of include/uapi/linux/sched/types.h, in its first size.
#[repr(C)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
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

    /// Reads the fields of proc(5) stat: nice is the 19th, the scheduling policy the 41st.
    fn nice_and_policy() -> (i32, i32) {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        (fields[19 - 3].parse().unwrap(), fields[41 - 3].parse().unwrap())
    }

    /// Reads `sched_runtime` by sched_getattr(2), which is 0 before Linux 6.12.
    fn slice_ns() -> u64 {
        let mut attributes = [0_u64; 6];
        assert_eq!(size_of_val(&attributes), size_of::<Attributes>());
        // SAFETY: 0 is the calling thread, and the call writes at most as many bytes as it is told, which are there.
        let answer = unsafe {
            libc::syscall(libc::SYS_sched_getattr, 0, attributes.as_mut_ptr(), ATTRIBUTES_BYTES, 0)
        };
        assert_eq!(answer, 0, "{}", io::Error::last_os_error());
        attributes[3]
    }

    #[test]
    fn a_thread_gives_way_or_runs_soon_and_keeps_its_share() {
        std::thread::spawn(|| {
            let usual = slice_ns();
            give_way().unwrap();
            let long = slice_ns();
            assert_eq!(std::thread::spawn(slice_ns).join().unwrap(), long, "what it starts gives way, too");
            run_soon().unwrap();
            let short = slice_ns();
            if usual == 0 {
                assert_eq!((long, short), (0, 0), "a kernel that has no slices of one's own");
            } else {
                assert_eq!((long, short), (SLICE_LONG_NS, SLICE_SHORT_NS));
            }
            assert_eq!(nice_and_policy(), (0, libc::SCHED_OTHER));
        })
        .join()
        .unwrap();
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

//! The names of namespaces, which identify their owner, and the removal of what a killed test left behind.
//!
//! A name is `tidemark-PID-START-SERIAL-HOST`. START is the owner's start time in ticks since boot. With the PID, it
//! distinguishes the owner from any other process that has the same pid earlier or later. Only the name of a dead owner is
//! removed, so tests that run at the same time leave each other alone.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use super::namespace::{NAMES, Namespace};

const PREFIX: &str = "tidemark-";

/// Returns the next number of a network of this process.
pub(super) fn next_serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Returns the name of a namespace of this process.
pub(super) fn name(serial: u64, host: &str) -> String {
    let pid = std::process::id();
    let start = start_ticks(pid).expect("this process runs");
    format!("{PREFIX}{pid}-{start}-{serial}-{host}")
}

/// Removes the namespaces of dead owners, and kills the processes in them.
///
/// Only processes in such a namespace are killed, and only a dead test of this harness can have started them.
pub(super) fn sweep() {
    // Without the directory, no namespace was ever named.
    let names = fs::read_dir(NAMES).into_iter().flatten().flatten();
    for name in names.filter_map(|entry| entry.file_name().into_string().ok()) {
        if is_left(&name, start_ticks)
            && let Ok(namespace) = Namespace::open(name)
        {
            namespace.remove().unwrap_or_else(|said| panic!("left by a killed test: {said}"));
        }
    }
}

/// Whether a name is this harness's and its owner is dead. `start_of` returns the start time of a process that runs.
fn is_left(name: &str, start_of: impl Fn(u32) -> Option<u64>) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX) else { return false };
    let mut words = rest.splitn(3, '-');
    let mut number = || words.next()?.parse::<u64>().ok();
    let (Some(pid), Some(start)) = (number(), number()) else { return false };
    let Ok(pid) = u32::try_from(pid) else { return false };
    start_of(pid) != Some(start)
}

/// Returns field 22 of `/proc/PID/stat`, or `None` if the process is gone.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field may contain any character. The third follows the last parenthesis.
    stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_name_of_ours_whose_owner_is_dead_is_left() {
        let alive = |pid| (pid == 7).then_some(100);
        assert!(!is_left("tidemark-7-100-0-n1", alive), "its owner runs");
        assert!(is_left("tidemark-7-99-0-n1", alive), "the pid went to another process");
        assert!(is_left("tidemark-8-100-0-n1", alive), "nobody has the pid");
        for other in
            ["vpn", "tidemark", "tidemark-", "tidemark-x-1-0-n1", "tidemark-7", "tidemark-99999999999-1-0"]
        {
            assert!(!is_left(other, |_| None), "{other} is not ours");
        }
    }

    #[test]
    fn a_process_knows_its_own_names() {
        let first = start_ticks(std::process::id());
        assert!(first.is_some_and(|ticks| ticks > 0));
        assert!(!is_left(&name(3, "n1"), start_ticks));
        assert_eq!(start_ticks(std::process::id()), first, "the start of a process does not change");
    }
}

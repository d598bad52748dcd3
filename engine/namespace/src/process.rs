//! A process as /proc shows it.
//!
//! Owns: reading `stat`, for the modules that identify writers (`writer`) and check which processes live (`alive`). Does not own: the
//! consequences.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// include/linux/sched.h.
pub(super) const PF_KTHREAD: u64 = 0x0020_0000;
/// Flag from the same header: the process has begun to end, and has no memory any more while its files are being closed. Freeing a
/// trainer's memory takes up to seconds, and it runs nothing of its own any more.
pub(super) const PF_EXITING: u64 = 0x4;
/// Bytes read of stat and status, which are under 2 KiB.
pub(super) const STAT_BYTES: u64 = 16 << 10;

/// The fields of /proc/<pid>/stat that we need (proc(5)).
#[derive(Debug)]
pub(super) struct Stat {
    /// A zombie, or less.
    pub(super) ended: bool,
    /// Being closed down: none of its program runs any more, and how it ends may not be known yet.
    pub(super) ends: bool,
    /// A thread of the kernel, which has no environment.
    pub(super) kernel: bool,
    pub(super) session: i64,
    pub(super) start_time_ticks: u64,
    /// Field 52, the status as wait(2) gives it.
    pub(super) exit_code: Option<i32>,
}

impl Stat {
    pub(super) fn read(proc_root: &Path, pid: u32) -> Option<Self> {
        let stat = read(&proc_root.join(pid.to_string()).join("stat"), STAT_BYTES)?;
        // The command's name stands in parentheses and may hold anything, parentheses too; fields 3… follow.
        let end = stat.iter().rposition(|byte| *byte == b')')?;
        let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
        let field = |number: usize| rest.split_ascii_whitespace().nth(number - 3);
        let ended = matches!(field(3)?, "Z" | "X");
        let flags = field(9)?.parse::<u64>().ok()?;
        Some(Self {
            ended,
            ends: flags & PF_EXITING != 0,
            kernel: flags & PF_KTHREAD != 0,
            session: field(6)?.parse().ok()?,
            start_time_ticks: field(22)?.parse().ok()?,
            exit_code: field(52).and_then(|code| code.parse().ok()),
        })
    }
}

/// Reads at most so many bytes of a file of /proc; none if it is gone, or not ours to read.
pub(super) fn read(path: &Path, limit_bytes: u64) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(limit_bytes).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

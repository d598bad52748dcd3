//! Whether a file was closed by its program or by the kernel because the program ended.
//!
//! Owns: examining the closing thread at FLUSH, for the daemon and for the keeper that stands in for it. Does not own: what a cut file
//! means (the namespace).
//!
//! FLUSH names the thread that closes. When a process ends with files open, the kernel closes them from
//! `do_exit`, after the thread has given up its memory (`exit_mm` comes before `exit_files`, kernel/exit.c): its
//! `statm` in /proc then reads zero, which no living program's does. If a process was killed by a signal or ended by exit, no `close(2)`
//! was called, so both count as cut: a program that ended in the middle of a write looks just like one that ended after it. If this process
//! cannot see the thread (another pid namespace), FLUSH carries pid 0, and the thread counts as having called `close(2)`.
//!
//! PF_EXITING in `/proc/<tid>/stat` would say the same, but must not be read here: kernels take the process's exec_update_lock for it (seen
//! on 6.18), execve(2) holds that lock while it closes close-on-exec files, and such a close waits for the daemon's answer. `statm` takes
//! only the task's lock.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Length of a statm line: seven numbers of at most 20 digits, with blanks.
const STATM_MAX_BYTES: usize = 160;

/// The closer of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClosedBy {
    /// The program, with `close(2)` (or `dup2`, or close-on-exec).
    Program,
    /// The kernel: the process was killed, or ended without closing.
    Kernel,
    /// Unknown: the thread is in a pid namespace that this process cannot see.
    Unseen,
}

impl ClosedBy {
    /// Returns whether the file's bytes may end in the middle of what the program meant to write.
    #[must_use]
    pub fn cut(self) -> bool {
        match self {
            Self::Kernel => true,
            Self::Program | Self::Unseen => false,
        }
    }
}

thread_local! {
    /// The statm file of the thread that this thread examined last. A program that writes many files closes one after the other, and
    /// opening takes twice as long as reading. The open file belongs to that very thread: once the thread is gone, reading returns ESRCH,
    /// even if its id is in use again.
    static LAST: RefCell<Option<(u32, File)>> = const { RefCell::new(None) };
}

/// Finds the closer from the thread id that FLUSH carries. Costs one read of a /proc file: about 3 µs, and 5 µs more if another thread was
/// examined before.
#[must_use]
pub fn closed_by(tid: u32) -> ClosedBy {
    if tid == 0 {
        return ClosedBy::Unseen;
    }
    let mut line = [0u8; STATM_MAX_BYTES];
    let Ok(length) = LAST.with_borrow_mut(|last| read_statm(last, tid, &mut line)) else {
        return ClosedBy::Unseen;
    };
    match total_pages(&line[..length]) {
        Some(0) => ClosedBy::Kernel,
        Some(_) => ClosedBy::Program,
        None => ClosedBy::Unseen,
    }
}

fn read_statm(last: &mut Option<(u32, File)>, tid: u32, line: &mut [u8]) -> io::Result<usize> {
    if let Some((_, file)) = last.as_ref().filter(|(of, _)| *of == tid)
        && let Ok(length) = file.read_at(line, 0)
    {
        return Ok(length);
    }
    *last = None;
    let file = File::open(format!("/proc/{tid}/task/{tid}/statm"))?;
    let length = file.read_at(line, 0)?;
    *last = Some((tid, file));
    Ok(length)
}

/// Reads field 1 of a statm line (proc_pid_statm(5)).
fn total_pages(line: &[u8]) -> Option<u64> {
    std::str::from_utf8(line).ok()?.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_odd_line_is_unseen_not_a_panic() {
        for line in [&b""[..], b" ", b"word 1", b"-1 0", b"\xff", b"99999999999999999999999"] {
            assert_eq!(total_pages(line), None);
        }
        assert_eq!(total_pages(b"0 0 0 0 0 0 0\n"), Some(0));
    }

    #[test]
    fn a_running_thread_closes_by_itself() {
        let tid = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
        assert_eq!(closed_by(tid), ClosedBy::Program);
        assert_eq!(closed_by(0), ClosedBy::Unseen);
    }

    #[test]
    fn a_process_without_memory_is_ending() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        // Not waited for, so it stays as a zombie: ended, without memory.
        while closed_by(child.id()) != ClosedBy::Kernel {
            assert!(std::time::Instant::now() < deadline, "{:?}", closed_by(child.id()));
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        // The child's file is the one that was read last; a thread that is gone has no closer.
        assert_eq!(closed_by(child.id()), ClosedBy::Unseen);
        assert!(ClosedBy::Kernel.cut() && !ClosedBy::Program.cut() && !ClosedBy::Unseen.cut());
    }
}

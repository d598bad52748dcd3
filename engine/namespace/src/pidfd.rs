//! How a process ended, read from the kernel through the process's descriptor.
//!
//! Owns: PIDFD_GET_INFO (include/uapi/linux/pidfd.h). Does not own: whose descriptors, and what follows.

use rustix::fd::OwnedFd;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use std::sync::LazyLock;

/// PIDFD_INFO_EXIT: since Linux 6.15, and only once the process was waited for.
const INFO_EXIT: u64 = 1 << 3;

/// `struct pidfd_info` in its first form, 64 bytes.
#[repr(C)]
#[derive(Debug, Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    /// Status as wait(2) gives it.
    exit_code: i32,
}

/// Mask of the signal in the status that wait(2) gives.
const SIGNAL: i32 = 0x7f;

const GET_INFO: Opcode = opcode::read_write::<PidfdInfo>(0xff, 11);

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// exit(0).
    Well,
    /// exit with anything else.
    Failed,
    /// A signal.
    Killed,
}

impl Ended {
    /// Decodes the status that wait(2) gives.
    pub(super) fn from_wait(code: i32) -> Self {
        match (code, code & SIGNAL) {
            (0, _) => Self::Well,
            (_, 0) => Self::Failed,
            _ => Self::Killed,
        }
    }
}

/// Returns how the process ended; none while its parent has not waited for it, and if the kernel does not tell.
pub(super) fn ended(process: &OwnedFd) -> Option<Ended> {
    let mut info = PidfdInfo { mask: INFO_EXIT, ..PidfdInfo::default() };
    // SAFETY: the opcode is of this structure.
    let request = unsafe { Updater::<GET_INFO, PidfdInfo>::new(&mut info) };
    // SAFETY: the kernel writes at most as many bytes as the opcode says, and any are valid for the structure.
    unsafe { ioctl(process, request) }.ok()?;
    let known = info.mask & INFO_EXIT != 0;
    known.then(|| Ended::from_wait(info.exit_code))
}

/// Whether this kernel tells at all.
pub(super) fn tells() -> bool {
    static TELLS: LazyLock<bool> = LazyLock::new(|| kernel() >= (6, 15));
    *TELLS
}

fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::process::Command;

    #[test]
    fn the_kernel_says_how_a_process_ended_where_it_can() {
        let run = |script: &str| {
            let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
            let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
            assert_eq!(ended(&process), None, "it runs, or was not waited for");
            child.wait().unwrap();
            ended(&process)
        };
        let found = ["sleep 0.1", "sleep 0.1; exit 3", "sleep 0.1; kill -9 $$"].map(run);
        let told = [Some(Ended::Well), Some(Ended::Failed), Some(Ended::Killed)];
        assert_eq!(found, told.map(|told| told.filter(|_| tells())), "Linux {:?}", kernel());
    }
}

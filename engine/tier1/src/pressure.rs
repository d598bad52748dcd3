//! Memory pressure: whether the machine wants the ballast's memory back.
//!
//! Owns: reading /proc/meminfo and /proc/pressure/memory (Documentation/accounting/psi.rst), and the trigger there.
//! Does not own: which memory is freed (`worker`).

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

/// Below this part of the machine's memory, or [`LEAST_AVAILABLE_BYTES`] if that is more, the ballast shrinks.
const AVAILABLE_PART: u64 = 32;
const LEAST_AVAILABLE_BYTES: u64 = 256 << 20;

/// "Some task waited for memory for 100 ms within one second": reclaim is hurting, and tmpfs pages are not reclaimable.
const TRIGGER: &[u8] = b"some 100000 1000000\0";

#[derive(Debug)]
pub(super) struct Pressure {
    meminfo: Option<File>,
    trigger: Option<File>,
}

impl Pressure {
    pub(super) fn watch() -> Self {
        let trigger =
            File::options().read(true).write(true).open("/proc/pressure/memory").and_then(|mut file| {
                file.write_all(TRIGGER)?;
                Ok(file)
            });
        if let Err(error) = &trigger {
            tracing::debug!(%error, "no pressure trigger: the ballast watches MemAvailable alone");
        }
        Self { meminfo: File::open("/proc/meminfo").ok(), trigger: trigger.ok() }
    }

    /// Reports POLLPRI under pressure.
    pub(super) fn trigger(&self) -> Option<BorrowedFd<'_>> {
        self.trigger.as_ref().map(AsFd::as_fd)
    }

    /// Returns how many bytes the machine lacks to be at ease; 0 if none, or if this is unknown.
    pub(super) fn missing_bytes(&self) -> u64 {
        self.read().map_or(0, |(total, available)| floor(total).saturating_sub(available))
    }

    /// Whether `bytes` more can be kept without coming near the floor: twice the floor must stay.
    pub(super) fn has_room_for(&self, bytes: u64) -> bool {
        self.read().is_none_or(|(total, available)| available >= 2 * floor(total) + bytes)
    }

    fn read(&self) -> Option<(u64, u64)> {
        // The two lines stand in the first 200 bytes.
        let mut buffer = [0_u8; 512];
        let len = self.meminfo.as_ref()?.read_at(&mut buffer, 0).ok()?;
        let text = str::from_utf8(&buffer[..len]).ok()?;
        Some((field(text, "MemTotal:")?, field(text, "MemAvailable:")?))
    }
}

fn floor(total_bytes: u64) -> u64 {
    (total_bytes / AVAILABLE_PART).max(LEAST_AVAILABLE_BYTES)
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::{Pressure, field};

    #[test]
    fn meminfo_is_read_in_bytes_and_nonsense_is_no_answer() {
        let text = "MemTotal:       24684096 kB\nMemFree:  1 kB\nMemAvailable:   24000000 kB\n";
        assert_eq!(field(text, "MemAvailable:"), Some(24_000_000 * 1024));
        assert_eq!(field("MemAvailable: many kB", "MemAvailable:"), None);
        assert_eq!(field("", "MemTotal:"), None);
    }

    #[test]
    fn more_than_the_machine_has_is_never_said_to_fit() {
        let pressure = Pressure::watch();
        assert!(!pressure.has_room_for(1 << 60), "this kernel's /proc/meminfo was not understood");
    }
}

//! The place of a campaign: the daemon's budget and settings, where Tier-3 lies, and calls that may hang.
//!
//! Owns: sizes and places. Does not own: what happens there (`rounds`).

use std::fs;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use tempfile::TempDir;
use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_tests::tier3;

/// More than the trainers' rings, logs and steps, with those of the dead that are still compared.
const TIER1: &str = "768MiB";
/// Commits happen in the background too, while other files are rewritten too often to settle. Torn checkpoints stay
/// visible, because the auditor looks for each promised file at its own path.
const CONFIG: &str =
    "[torn]\nhide = false\n[save]\nsettle_s = 1.0\n[shutdown]\ndrain_timeout_s = 5\ngrace_s = 1\n";
/// Size at which a campaign starts over with an empty Tier-3. Nothing retires versions yet, so a long campaign would
/// outgrow it.
pub(crate) const TIER3_BYTES_MAX: u64 = 2 << 30;
/// Tier-3 lies in memory if that has room for it and for its growth between two measurements of its size. Tier-3 is
/// thousands of files, and some disks take longer to remove them than the whole campaign takes. Tier-3 outlives the
/// daemon either way.
const SHM: &str = "/dev/shm";
const SHM_FREE_BYTES: u64 = 3 * TIER3_BYTES_MAX;

/// The daemon of a campaign, over its Tier-3.
pub(crate) fn options(tier3: &Path) -> DaemonOptions {
    DaemonOptions {
        tier1: TIER1.into(),
        tier3: Some(format!("file://{}", tier3.display())),
        config: Some(CONFIG.into()),
        ..DaemonOptions::default()
    }
}

/// Opens, before the count, the files that the daemon opens once and keeps, or keeps ready.
pub(crate) fn warm(daemon: &Daemon) {
    let folder = daemon.mount().join("warm");
    fs::create_dir(&folder).expect("the daemon lives");
    for number in 0..16 {
        fs::write(folder.join(format!("{number}.bin")), vec![number; 1 << (number + 8)])
            .expect("the daemon lives");
    }
    daemon.flush();
    fs::remove_dir_all(&folder).expect("the daemon lives");
    daemon.flush();
}

/// Where Tier-3 lies for the whole campaign.
pub(crate) fn tier3_dir() -> TempDir {
    let free = rustix::fs::statvfs(SHM).map_or(0, |found| found.f_bavail * found.f_frsize);
    let mut name = tempfile::Builder::new();
    name.prefix("tidemark-campaign-");
    let made = if free >= SHM_FREE_BYTES { name.tempdir_in(SHM) } else { name.tempdir() };
    made.expect("a directory for Tier-3")
}

/// Runs `work` in a thread of its own: otherwise a call on a mount that does not answer could not be abandoned.
pub(crate) fn within_limit(
    limit: Duration,
    work: impl FnOnce() -> Result<(), String> + Send + 'static,
) -> Result<(), String> {
    let (done, answer) = sync_channel(1);
    std::thread::spawn(move || {
        // The receiver is gone if the time was up.
        let _ = done.send(work());
    });
    let late = || format!("it did not end within {} s", limit.as_secs());
    answer.recv_timeout(limit).unwrap_or_else(|_| Err(late()))
}

/// The sizes of all files below a folder.
pub(crate) fn bytes_below(folder: &Path) -> u64 {
    tier3::files_below(folder)
        .iter()
        .filter_map(|file| fs::metadata(file).ok())
        .map(|found| found.len())
        .sum()
}

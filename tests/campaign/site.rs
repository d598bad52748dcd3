//! The surroundings of a campaign: the daemon's budget and settings, the place of Tier-3, and calls that may hang.
//!
//! Owns: sizes and places. Does not own: what happens there (`rounds`).

use std::fs;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use tempfile::TempDir;
use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_tests::tier3;

/// Budget for the files of all trainers, with those of dead trainers that are still compared.
const TIER1: &str = "768MiB";
/// Settings with which files settle soon, so that commits also happen in the background. Some files are rewritten too
/// often to settle. Torn checkpoints stay visible, because the auditor looks for each promised file at its own path.
const CONFIG: &str =
    "[torn]\nhide = false\n[save]\nsettle_s = 1.0\n[shutdown]\ndrain_timeout_s = 5\ngrace_s = 1\n";
/// Size at which a campaign starts over with an empty Tier-3. No version is retired with the campaign's settings, so
/// Tier-3 would grow without bound.
pub(crate) const TIER3_BYTES_MAX: u64 = 2 << 30;
/// Memory in which Tier-3 lies, if there is room for it and for its growth between two measurements of its size. Some
/// disks take longer to remove Tier-3's thousands of files than the whole campaign takes. Tier-3 outlives the daemon
/// either way.
const SHM: &str = "/dev/shm";
const SHM_FREE_BYTES: u64 = 3 * TIER3_BYTES_MAX;

/// Returns the options of a campaign's daemon, over its Tier-3.
pub(crate) fn options(tier3: &Path) -> DaemonOptions {
    DaemonOptions {
        tier1: TIER1.into(),
        tier3: Some(format!("file://{}", tier3.display())),
        config: Some(CONFIG.into()),
        ..DaemonOptions::default()
    }
}

/// Makes the daemon open, before descriptors are counted, the files that it opens once and keeps, or keeps ready.
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

/// Makes the directory of Tier-3 for the whole campaign.
pub(crate) fn tier3_dir() -> TempDir {
    let free = rustix::fs::statvfs(SHM).map_or(0, |found| found.f_bavail * found.f_frsize);
    let mut name = tempfile::Builder::new();
    name.prefix("tidemark-campaign-");
    let made = if free >= SHM_FREE_BYTES { name.tempdir_in(SHM) } else { name.tempdir() };
    made.expect("a directory for Tier-3")
}

/// Runs `work` in a thread of its own, so that a call on a mount that does not answer can be abandoned.
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

/// Returns the sum of the sizes of all files below a folder.
pub(crate) fn bytes_below(folder: &Path) -> u64 {
    tier3::files_below(folder)
        .iter()
        .filter_map(|file| fs::metadata(file).ok())
        .map(|found| found.len())
        .sum()
}

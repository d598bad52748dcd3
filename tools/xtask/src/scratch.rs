//! The folder for a command's temporary files: large enough when it begins, gone when it ends.
//!
//! Owns: that folder, the leftovers of killed runs before it, and the room that a run needs. A test or a bench makes its own folders below
//! it, and removes them if it ends well. A killed one removes nothing, and its gigabytes would fill the disk of every later run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::shell::{capture, say};

/// The names of all such folders; what follows is the number of the process that made it. Short, because a Unix socket's path below it
/// has at most 107 bytes.
const PREFIX: &str = "tidemark-run-";
/// The room that the tests or a bench may take at once: most is a bench of checkpoints of 2 GB, with two versions in a store, a copy beside
/// it and a daemon's journal.
const ROOM_BYTES: u64 = 20 << 30;

/// A folder that goes with this value.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Makes the folder below the one for temporary files, where dead runs' folders go first.
    pub(crate) fn make() -> Result<Self> {
        let parent = std::env::temp_dir();
        sweep(&parent)?;
        let folder = parent.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        Ok(Self(folder))
    }

    /// Makes the folder for a run that begins at once; see [`Scratch::ensure_room`].
    pub(crate) fn with_room() -> Result<Self> {
        let made = Self::make()?;
        made.ensure_room()?;
        Ok(made)
    }

    /// Refuses a run on a disk with too little room, where tests would fail one by one for reasons that look like their own.
    pub(crate) fn ensure_room(&self) -> Result<()> {
        let free = free_bytes(&self.0)?;
        ensure!(
            free >= ROOM_BYTES,
            "{} has {} GiB free, and a run may take {}: make room, or name a folder elsewhere with TMPDIR",
            self.0.display(),
            free >> 30,
            ROOM_BYTES >> 30
        );
        Ok(())
    }

    /// Lets `command` and all that it starts put its temporary files here.
    pub(crate) fn lend(&self, command: &mut Command) {
        command.env("TMPDIR", &self.0);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(why) = remove(&self.0) {
            say(&format!("what was run left something behind: {why:#}"));
        }
    }
}

/// Removes the folders of runs that are no more.
fn sweep(parent: &Path) -> Result<()> {
    for entry in fs::read_dir(parent).with_context(|| format!("reading {}", parent.display()))? {
        let path = entry?.path();
        let maker =
            path.file_name().and_then(|name| name.to_str()?.strip_prefix(PREFIX)?.parse::<u32>().ok());
        let dead = maker.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists());
        if dead && let Err(why) = remove(&path) {
            say(&format!("a run that was killed left something behind: {why:#}"));
        }
    }
    Ok(())
}

/// Removes a folder, but never what is mounted in it: that belongs to a daemon that still runs.
fn remove(folder: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("reading /proc/self/mounts")?;
    let within =
        mounts.lines().filter_map(|line| line.split(' ').nth(1)).find(|at| Path::new(at).starts_with(folder));
    ensure!(within.is_none(), "{} is still mounted", within.unwrap_or_default());
    fs::remove_dir_all(folder).with_context(|| format!("removing {}", folder.display()))
}

/// The room that is free at `path`, as `df` tells it.
fn free_bytes(path: &Path) -> Result<u64> {
    let told = capture(Command::new("df").args(["--output=avail", "-B1"]).arg(path))?;
    told.lines()
        .nth(1)
        .and_then(|bytes| bytes.trim().parse().ok())
        .with_context(|| format!("df printed {told:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_goes_with_the_run_or_with_the_next_one() {
        let parent = std::env::temp_dir().join(format!("scratch-{}", std::process::id()));
        // No process has the number of the first: it is beyond the kernel's largest, 2^22.
        let [dead, alive, other] =
            ["tidemark-run-4194305", "tidemark-run-1", "tidemark-run-old"].map(|name| parent.join(name));
        for folder in [&dead, &alive, &other] {
            fs::create_dir_all(folder.join("below")).unwrap();
        }
        sweep(&parent).unwrap();
        assert!(!dead.exists() && alive.exists() && other.exists());
        drop(Scratch(alive.clone()));
        assert!(!alive.exists());
        fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn a_mount_within_is_left_alone() {
        // The system has one at /proc, and this test removes nothing even where the check is wrong.
        assert!(remove(Path::new("/proc")).unwrap_err().to_string().contains("still mounted"));
    }

    #[test]
    fn df_tells_what_is_free() {
        assert!(free_bytes(Path::new("/dev/shm")).unwrap() > 0);
    }
}

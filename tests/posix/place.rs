//! Places in which the tools run: a mount, a directory on disk, a tmpfs.
//!
//! Owns: making such a place and removing it. Does not own: the tools.

use std::path::{Path, PathBuf};

use rustix::fs::statfs;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;
use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_tests::machine;

use crate::known::Mode;

/// Budget for both tools, which change megabytes.
const TIER1: &str = "1GiB";
const TMPFS_OPTIONS: &std::ffi::CStr = c"size=1g,mode=755";
/// f_type of statfs(2).
const EXT4: i64 = 0xef53;

/// A directory of a file system. Dropping the place removes the directory and, if it made one, the mount.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// Whether the place is the root of a mount of its own, which may be mounted read-only for a moment.
    pub(crate) own_mount: bool,
    _kept: Kept,
}

#[derive(Debug)]
enum Kept {
    Daemon { _daemon: Box<Daemon> },
    Directory { _directory: TempDir },
    Tmpfs { _tmpfs: Tmpfs },
}

#[derive(Debug)]
struct Tmpfs(TempDir);

impl Place {
    /// Makes a real daemon's mount, or returns `None` if the test is left out.
    pub(crate) fn mount(mode: Mode) -> Option<Self> {
        if !machine::can_mount() {
            return None;
        }
        let config = match mode {
            Mode::Passthrough => None,
            Mode::Fallback => Some("[mount]\nmode = \"fallback\"\n".to_owned()),
        };
        let daemon = Daemon::start(DaemonOptions { tier1: TIER1.into(), config, ..DaemonOptions::default() });
        match mode {
            Mode::Passthrough => daemon.assert_passthrough(),
            Mode::Fallback => assert_eq!(daemon.ready().mode, "fallback"),
        }
        let path = daemon.mount().to_owned();
        let kept = Kept::Daemon { _daemon: Box::new(daemon) };
        Some(Self { name: mode.word().to_owned(), path, own_mount: true, _kept: kept })
    }

    /// Makes a directory on disk.
    pub(crate) fn disk() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().to_owned();
        let name = match statfs(&path).expect("statfs of a temporary directory").f_type {
            EXT4 => "ext4".to_owned(),
            other => format!("disk (type {other:#x})"),
        };
        Self { name, path, own_mount: false, _kept: Kept::Directory { _directory: directory } }
    }

    /// Makes a tmpfs, or returns `None` if the test is left out.
    pub(crate) fn tmpfs() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            machine::left_out("mounting a tmpfs needs root");
            return None;
        }
        let directory = tempfile::tempdir().expect("a temporary directory");
        mount("tidemark-tests", directory.path(), "tmpfs", MountFlags::NOSUID, TMPFS_OPTIONS)
            .unwrap_or_else(|errno| panic!("mounting a tmpfs at {}: {errno}", directory.path().display()));
        let path = directory.path().to_owned();
        let kept = Kept::Tmpfs { _tmpfs: Tmpfs(directory) };
        Some(Self { name: "tmpfs".to_owned(), path, own_mount: true, _kept: kept })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // A killed tool may still use the mount, so it is detached. The directory is removed right after.
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

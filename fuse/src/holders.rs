//! Finds the processes that keep a mount busy.
//!
//! Owns: the search through /proc. Does not own: the reaction to them.

use std::fs;
use std::path::{Path, PathBuf};

/// The most holders that are returned: enough to act on. A training job with hundreds of workers is named by its first
/// ones.
const HOLDERS_MAX: usize = 8;

/// An open file or working directory below the mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The process, as numbered in this process's pid namespace.
    pub pid: u32,
    /// The command name of the process, at most 15 bytes.
    pub command: String,
    /// The path that the process has open.
    pub path: PathBuf,
}

/// Returns at most eight processes that have something below `mountpoint` open, this process left out. Reads the links
/// in /proc only, never the mount itself, so it works on a mount that does not answer. Mappings whose file is closed
/// are not found: the kernel shows them under the backing file's name.
#[must_use]
pub fn holders(mountpoint: &Path) -> Vec<Holder> {
    let own = std::process::id();
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|&pid| pid != own)
        .filter_map(|pid| {
            let path = first_below(pid, mountpoint)?;
            let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            Some(Holder { pid, command: command.trim_end().to_owned(), path })
        })
        .take(HOLDERS_MAX)
        .collect()
}

fn first_below(pid: u32, mountpoint: &Path) -> Option<PathBuf> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = [format!("/proc/{pid}/cwd"), format!("/proc/{pid}/root")].map(PathBuf::from);
    descriptors
        .map(|entry| entry.path())
        .chain(links)
        .filter_map(|link| fs::read_link(link).ok())
        .find(|target| target.starts_with(mountpoint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_with_an_open_file_below_is_named_with_that_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = fs::canonicalize(dir.path()).unwrap().join("held");
        let held = fs::File::create(&file).unwrap();
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::from(held)).spawn().unwrap();
        let found = holders(&fs::canonicalize(dir.path()).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].pid, &found[0].path), (child.id(), &file));
        assert_eq!(found[0].command, "sleep");
    }
}

//! A memory cgroup of either version for one test: made, used and removed by it.
//!
//! Owns: the group's directory and the file names of the two versions. Does not own: what a limit is to prove.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A group that is removed when dropped. If a process is still in it, the group stays; its test has then failed already.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    most_charged: &'static str,
}

impl Cgroup {
    /// Makes a group with a limit. The error says why this machine allows none. `name` keeps the groups of two tests apart.
    pub fn make(name: &str, limit_bytes: usize) -> Result<Self, String> {
        let text = |error: io::Error| error.to_string();
        let (v1, v2) = (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
        let name = format!("tidemark-{name}-{}", std::process::id());
        let (path, limit, most_charged) = if v1.join("memory.limit_in_bytes").exists() {
            (v1.join(name), "memory.limit_in_bytes", "memory.max_usage_in_bytes")
        } else {
            let controllers = fs::read_to_string(v2.join("cgroup.controllers")).map_err(text)?;
            if !controllers.split_whitespace().any(|controller| controller == "memory") {
                return Err("no memory controller at /sys/fs/cgroup".into());
            }
            fs::write(v2.join("cgroup.subtree_control"), "+memory").map_err(text)?;
            (v2.join(name), "memory.max", "memory.peak")
        };
        fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let group = Self { path, most_charged };
        fs::write(group.path.join(limit), limit_bytes.to_string()).map_err(text)?;
        Ok(group)
    }

    /// Returns the group's directory; a pid written into `cgroup.procs` there joins the group.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the most that was ever charged to the group.
    pub fn most_charged_bytes(&self) -> usize {
        let text = fs::read_to_string(self.path.join(self.most_charged)).expect("the group tells its peak");
        text.trim().parse().expect("a number of bytes")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        drop(fs::remove_dir(&self.path));
    }
}

//! Tier-3 as an auditor sees it from outside: a directory, read with plain tools and nothing of the engine.
//!
//! Owns: finding markers and attempts below a `file://` Tier-3. Does not own: the engine's idea of what is
//! committed, which is not used here, because the engine is compared with this module.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// The one decision about a version, as stored in Tier-3.
#[derive(Clone, Debug)]
pub struct Marker {
    pub path: PathBuf,
    pub body: Value,
}

impl Marker {
    /// Whether the decision is a commit; if not, it is an abort.
    pub fn commits(&self) -> bool {
        match self.body["decision"].as_str() {
            Some("commit") => true,
            Some("abort") => false,
            _ => panic!("{} has no decision: {}", self.path.display(), self.body),
        }
    }

    /// Returns the directory of the committed attempt: `v<timeline>.<version>/a-<attempt>`.
    pub fn attempt_dir(&self) -> PathBuf {
        let attempt = self.body["attempt"].as_str().expect("a marker names its attempt");
        let name = if attempt.starts_with("a-") { attempt.to_owned() } else { format!("a-{attempt}") };
        self.path.with_file_name(name)
    }
}

/// Returns every `_COMMITTED` of the checkpoint at `path` (relative to the mount), without retired versions.
pub fn markers(tier3: &Path, path: &str) -> Vec<Marker> {
    // A checkpoint in the mount's root belongs to the run `_`.
    let below = if path.contains('/') { tier3.join(path) } else { tier3.join("_").join(path) };
    files_below(&below)
        .into_iter()
        .filter(|file| file.file_name().is_some_and(|name| name == "_COMMITTED"))
        .filter(|file| !file.with_file_name("_RETIRED").exists())
        .map(|path| {
            let bytes = fs::read(&path).expect("a marker is readable");
            let body = serde_json::from_slice(&bytes)
                .unwrap_or_else(|error| panic!("{} is half a marker ({error})", path.display()));
            Marker { path, body }
        })
        .collect()
}

/// Returns the commits of the checkpoint at `path`.
pub fn commits(tier3: &Path, path: &str) -> Vec<Marker> {
    markers(tier3, path).into_iter().filter(Marker::commits).collect()
}

/// Copies a directory tree, or a file, with `cp`, the plainest tool there is.
pub fn copy_out(from: &Path, to: &Path) {
    let status = std::process::Command::new("cp").arg("-r").arg(from).arg(to).status().expect("cp starts");
    assert!(status.success(), "cp -r {} {}: {status}", from.display(), to.display());
}

/// Returns every file below a folder, sorted; none if the folder is not there.
pub fn files_below(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (vec![], vec![folder.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.expect("a readable directory").path();
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_are_told_from_aborts_and_retired_versions() {
        let dir = tempfile::tempdir().unwrap();
        for (version, decision) in [("v1.1", "commit"), ("v1.2", "abort"), ("v1.3", "commit")] {
            let folder = dir.path().join("run/step-1").join(version);
            fs::create_dir_all(&folder).unwrap();
            let body = format!(r#"{{"decision":"{decision}","attempt":"7"}}"#);
            fs::write(folder.join("_COMMITTED"), body).unwrap();
        }
        fs::write(dir.path().join("run/step-1/v1.3/_RETIRED"), "").unwrap();
        assert_eq!(markers(dir.path(), "run/step-1").len(), 2);
        let commits = commits(dir.path(), "run/step-1");
        assert_eq!(commits.len(), 1);
        assert!(commits[0].attempt_dir().ends_with("v1.1/a-7"));
        assert!(markers(dir.path(), "run/step-2").is_empty());
    }
}

//! Daemons, files and damage that the tests of this suite share.
//!
//! Owns: bytes from a seed, the flip of a bit, the place of a copy. Does not own: the expectations.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::{machine, process};

/// Bytes under one checksum. A file in which tests flip bytes has more than one such chunk.
pub(crate) const CHUNK_BYTES: usize = 8 << 20;
pub(crate) const MIB: usize = 1 << 20;

/// Configuration that settles files quickly and spreads nothing over time, because tests ask what happens, not when.
pub(crate) const CONFIG: &str = "[save]\nsettle_s = 0.3\n[tier3]\npaced = false\n";
/// Configuration with which nothing settles by itself, so files that are not flushed stay in memory only.
pub(crate) const NEVER_SETTLES: &str = "[save]\nsettle_s = 3600.0\n[tier3]\npaced = false\n";

/// Returns the options of a small daemon with a configuration file.
pub(crate) fn options(tier1: &str, config: &str) -> DaemonOptions {
    DaemonOptions { tier1: tier1.into(), config: Some(config.into()), ..DaemonOptions::default() }
}

/// Starts a daemon in passthrough mode, or returns `None` if the test is left out.
pub(crate) fn start(options: DaemonOptions) -> Option<Daemon> {
    if !machine::can_mount() {
        return None;
    }
    let daemon = Daemon::start(options);
    daemon.assert_passthrough();
    Some(daemon)
}

/// Returns bytes that no other seed gives, and that do not compress, from a xorshift generator.
pub(crate) fn noise(seed: u64, size_bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(size_bytes + 8);
    while bytes.len() < size_bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(size_bytes);
    bytes
}

/// Writes a file below the mount, and makes its directories.
pub(crate) fn save(daemon: &Daemon, path: &str, bytes: &[u8]) {
    let path = daemon.mount().join(path);
    fs::create_dir_all(path.parent().expect("a file lies in a directory")).expect("directories");
    fs::write(&path, bytes).unwrap_or_else(|error| panic!("saving {}: {error}", path.display()));
}

/// Asserts that a file below the mount holds exactly these bytes.
pub(crate) fn assert_holds(daemon: &Daemon, path: &str, bytes: &[u8], when: &str) {
    let read = fs::read(daemon.mount().join(path))
        .unwrap_or_else(|error| panic!("{when}: reading {path}: {error}\n{}", daemon.log_tail()));
    assert!(read == bytes, "{when}: {path} holds other bytes than were saved ({} bytes)", read.len());
}

/// How long `show` may not know a file that was just closed, because the node examines it on its own thread.
const KNOWN_WITHIN: Duration = Duration::from_secs(20);

/// Returns the row of `show --files` for a checkpoint that is one file.
pub(crate) fn shown_file(daemon: &Daemon, path: &str) -> Value {
    let place = daemon.mount().join(path);
    let arguments = ["show", place.to_str().expect("text"), "--files"];
    let answer = || {
        let output = daemon.ctl(&[&arguments[..], &["-o", "json"]].concat());
        output.status.success().then(|| serde_json::from_slice(&output.stdout).expect("JSON"))
    };
    // If the limit passes, one more try fails with the reason.
    let show: Value = process::until(KNOWN_WITHIN, answer).unwrap_or_else(|| daemon.ctl_json(&arguments));
    let files = show["files"].as_array().unwrap_or_else(|| panic!("no files in {show:#}"));
    files.iter().find(|file| file["path"] == path).unwrap_or_else(|| panic!("no {path} in {show:#}")).clone()
}

/// Flips one bit of a file in place, and returns the byte's old value. In Tier-1, the flip goes past the daemon and the
/// mount, as a bad memory cell does.
pub(crate) fn flip(path: &Path, offset: u64) -> u8 {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap_or_else(|error| panic!("opening {} to damage it: {error}", path.display()));
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("reading a byte");
    file.write_all_at(&[byte[0] ^ 0x10], offset).expect("writing a byte");
    byte[0]
}

/// Flips one bit of the host copy of a checkpoint that is one file.
pub(crate) fn flip_host(daemon: &Daemon, path: &str, offset: u64) {
    let file = shown_file(daemon, path);
    let host = file["host_path"].as_str().unwrap_or_else(|| panic!("no host copy: {file:#}"));
    flip(Path::new(host), offset);
}

/// Returns the path of the object of a checkpoint that is one file, below a `file://` Tier-3.
pub(crate) fn object_path(daemon: &Daemon, tier3: &Path, path: &str) -> PathBuf {
    let file = shown_file(daemon, path);
    tier3.join(file["object_key"].as_str().unwrap_or_else(|| panic!("no object: {file:#}")))
}

/// Returns the checksum of one chunk of `bytes`, as messages show it. Another crate than Tidemark's computes it.
pub(crate) fn chunk_sum(bytes: &[u8], chunk: usize) -> String {
    let chunk = bytes.chunks(CHUNK_BYTES).nth(chunk).expect("the chunk exists");
    format!("{:016x}", crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, chunk))
}

/// Returns the same bytes with one bit flipped.
pub(crate) fn flipped(bytes: &[u8], offset: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[offset] ^= 0x10;
    bytes
}

/// Returns the events so far, oldest first, from the lines of `events -o json`.
pub(crate) fn events(daemon: &Daemon) -> Vec<Value> {
    let output = daemon.ctl(&["events", "-o", "json"]);
    assert!(output.status.success(), "{}", shown(&output));
    let text = String::from_utf8(output.stdout).expect("JSON is text");
    text.lines().map(|line| serde_json::from_str(line).expect("each line is one event")).collect()
}

/// Returns the problems of `status`, as (code, what, action).
pub(crate) fn problems(daemon: &Daemon) -> Vec<(String, String, String)> {
    let status = daemon.ctl_json(&["status"]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = status["problems"].as_array().expect("status has a list of problems");
    list.iter().map(|p| (text(&p["code"]), text(&p["what"]), text(&p["action"]))).collect()
}

/// Whether `status` has a problem with that code.
pub(crate) fn has_problem(daemon: &Daemon, code: &str) -> bool {
    problems(daemon).iter().any(|(found, ..)| found == code)
}

/// Returns an entry of `tiers[]` of `status` by name.
pub(crate) fn tier(daemon: &Daemon, name: &str) -> Value {
    let status = daemon.ctl_json(&["status"]);
    let tiers = status["tiers"].as_array().expect("status has tiers");
    tiers.iter().find(|tier| tier["name"] == name).expect("the tier is listed").clone()
}

/// Returns the sum of `lag_versions` over the runs.
pub(crate) fn lag_versions(daemon: &Daemon) -> u64 {
    let status = daemon.ctl_json(&["status"]);
    status["runs"].as_array().into_iter().flatten().filter_map(|run| run["lag_versions"].as_u64()).sum()
}

/// Opens for writing without O_CREAT, so that a refusal is about the existing file.
pub(crate) fn open_for_update(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// Returns the names in a directory, sorted.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

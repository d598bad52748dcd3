//! Saves that must stay uncommitted however long they are quiet: a missing index or shard, a rank killed in
//! mid-write, a closed file that is still mapped writable.
//!
//! Each test then saves a whole checkpoint beside it, and waits until that is committed, so that the daemon had
//! enough time.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::python::{Python, hashes};
use tidemark_tests::tier3;

use crate::{SETTLE_S, below, daemon, environment, script};

/// Many times the settle time, after which quiet files would have been committed if quiet alone sufficed.
const QUIET: Duration = Duration::from_millis(12 * 500);
const WHOLE_LIMIT: Duration = Duration::from_secs(30);

#[test]
fn a_distributed_checkpoint_without_its_index_stays_uncommitted() {
    let Some(python) = environment() else { return };
    let daemon = daemon("1GiB");
    let mut ranks = python.start(2, &script("dcp.py"), &["stall", &below(&daemon, "dcp/step-1"), "1"]);
    ranks.wait_for_rank(0, "STALLED");
    assert_eq!(shards(&daemon, "dcp/step-1"), ["__0_0.distcp", "__1_0.distcp"]);
    stays_uncommitted(&daemon, &python, "dcp/step-1");
    // The death of its writers does not complete the save.
    ranks.kill9();
    stays_uncommitted(&daemon, &python, "dcp/step-1");
    flush_says_no(&daemon, "dcp/step-1");
}

#[test]
fn a_distributed_checkpoint_with_a_shard_missing_stays_uncommitted() {
    let Some(python) = environment() else { return };
    let daemon = daemon("1GiB");
    let aside = daemon.scratch("aside").join("step-1");
    python.run_ranks(2, &script("dcp.py"), &["save", aside.to_str().unwrap(), "1"]);

    // In the framework's own order, shards come first, then the index under a temporary name, and its rename.
    let missing = daemon.mount().join("dcp/step-1");
    fs::create_dir_all(&missing).unwrap();
    fs::copy(aside.join("__0_0.distcp"), missing.join("__0_0.distcp")).unwrap();
    fs::copy(aside.join(".metadata"), missing.join(".metadata.tmp")).unwrap();
    fs::rename(missing.join(".metadata.tmp"), missing.join(".metadata")).unwrap();
    stays_uncommitted(&daemon, &python, "dcp/step-1");
    flush_says_no(&daemon, "dcp/step-1");
}

#[test]
fn a_file_whose_writer_was_killed_in_mid_write_stays_uncommitted() {
    let Some(python) = environment() else { return };
    let daemon = daemon("1GiB");
    fs::create_dir(daemon.mount().join("torn")).unwrap();
    let path = below(&daemon, "torn/step-1.pt");
    let status = python.start(1, &script("torch_file.py"), &["die-midway", &path, "1"]).wait(0);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "the writer killed itself");
    stays_uncommitted(&daemon, &python, "torn/step-1.pt");
    flush_says_no(&daemon, "torn/step-1.pt");
}

#[test]
fn a_closed_file_that_is_mapped_writable_is_committed_only_when_it_is_let_go() {
    let Some(python) = environment() else { return };
    let daemon = daemon("1GiB");
    fs::create_dir(daemon.mount().join("mapped")).unwrap();
    let path = below(&daemon, "mapped/step-1.pt");
    let mut holder = python.start(1, &script("torch_file.py"), &["hold-mapped", &path]);
    holder.wait_for("MAPPED");
    stays_uncommitted(&daemon, &python, "mapped/step-1.pt");
    flush_says_no(&daemon, "mapped/step-1.pt");

    holder.terminate();
    daemon.wait_committed("mapped/step-1.pt", WHOLE_LIMIT);
    assert_eq!(tier3::commits(&daemon.tier3_dir(), "mapped/step-1.pt").len(), 1);
}

/// Waits for `QUIET`, and until a whole checkpoint that was saved later is committed. Then checks both the daemon's
/// report and Tier-3.
fn stays_uncommitted(daemon: &Daemon, python: &Python, path: &str) {
    assert!(QUIET.as_secs_f64() > 10.0 * SETTLE_S, "quiescence alone had no chance");
    let whole = format!("whole-{}.pt", path.replace('/', "-"));
    hashes(&python.run(&script("torch_file.py"), &["save", &below(daemon, &whole), "9"]), "saved");
    daemon.wait_committed(&whole, WHOLE_LIMIT);
    assert!(!tier3::commits(&daemon.tier3_dir(), &whole).is_empty(), "the auditor sees the whole one");
    sleep(QUIET);

    if let Some(listed) = daemon.checkpoint(path) {
        assert_ne!(listed["state"], "committed", "{listed}");
    }
    let commits = tier3::commits(&daemon.tier3_dir(), path);
    assert!(commits.is_empty(), "Tier-3 holds a commit: {commits:?}");
    let status = daemon.ctl_json(&["status"]);
    for run in status["runs"].as_array().into_iter().flatten() {
        for pointer in ["latest", "recoverable", "watermark"] {
            let named = run[pointer]["path"].as_str().unwrap_or_default();
            assert!(!named.ends_with(path), "{pointer} points at it: {run}");
        }
    }
}

/// Checks that `flush --wait` commits nothing without evidence: it ends with 1 and names what is not committed.
fn flush_says_no(daemon: &Daemon, path: &str) {
    let output = daemon.ctl(&["flush", "--wait", "--timeout", "3"]);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains(path), "{path} is not named:\n{}", shown(&output));
    assert!(tier3::commits(&daemon.tier3_dir(), path).is_empty());
}

fn shards(daemon: &Daemon, path: &str) -> Vec<String> {
    let entries = fs::read_dir(daemon.mount().join(path)).expect("the directory is there");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("a readable entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

//! Does the Python package save the same as torch, and does a job with it survive the same faults as one without it?
//!
//! Owns: the mount, the daemons that are killed, and that plain torch loads the files in Tier-3. Does not own: comparing the files
//! (the package's own tests, `tools/python/tests`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_tests::machine;
use tidemark_tests::python::{ACCELERATE_ENV, Python, hashes};

/// Configuration with which checkpoints complete soon, since the tests wait for some.
const CONFIG: &str = "[save]\nsettle_s = 0.5\n[tier3]\npaced = false\n";
/// Limit until a killed daemon serves again, which takes some tens of milliseconds.
const SERVED_AGAIN: Duration = Duration::from_secs(30);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are in the workspace").to_path_buf()
}

fn daemon(tier1: &str) -> Daemon {
    let options = DaemonOptions { tier1: tier1.into(), config: Some(CONFIG.into()), ..Default::default() };
    Daemon::start(options)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are UTF-8")
}

#[test]
fn its_own_tests_pass_on_a_mount() {
    if !machine::can_mount() {
        return;
    }
    let Some(python) = Python::with_wheel() else { return };
    let daemon = daemon("3GiB");
    let python = python.with("TIDEMARK_TEST_MOUNT", text(daemon.mount()));
    let tests = root().join("tools/python/tests");
    let mut arguments = vec!["-q", "-p", "no:cacheprovider", "--durations=10", text(&tests)];
    if machine::long() {
        arguments.extend(["--long", "--states", "10000"]);
    }
    let said = python.run(&python.beside("pytest"), &arguments);
    assert!(!said.contains("skipped") || !machine::long(), "{said}");
}

#[test]
fn saves_go_on_while_daemons_are_killed_and_plain_torch_loads_them_from_tier_3() {
    if !machine::can_mount() {
        return;
    }
    let (Some(fast), Some(plain)) = (Python::with_wheel(), Python::find()) else { return };
    let (fast, plain) = (fast.with(ACCELERATE_ENV, "1"), plain.with(ACCELERATE_ENV, "0"));
    let script = root().join("tests/wheel/saves.py");
    let mut daemon = daemon("1GiB");
    let run = daemon.mount().join("run");
    fs::create_dir(&run).expect("a directory on the mount");

    let steps = 8;
    let mut job = fast.start(1, &script, &["save", text(&run), &steps.to_string()]);
    for step in (0..steps - 1).step_by(2) {
        // The next save is under way, or about to begin.
        job.wait_for(&format!("SAVED {step}"));
        daemon.kill_serving();
        daemon.wait_served_again(SERVED_AGAIN);
    }
    job.finish();
    let printed = job.printed(0);
    assert!(printed.contains("MODULE tidemark._torch"), "not accelerated:\n{printed}");
    let saved = hashes(&printed, "save");

    daemon.flush();
    // A version that a kill left behind may still have a copy. The name shows the newest.
    let newest: BTreeMap<_, _> = files(&daemon.tier3_dir())
        .into_iter()
        .map(|path| (path.file_name().map(ToOwned::to_owned), path))
        .collect();
    let objects: Vec<&str> = newest.values().map(|path| text(path)).collect();
    assert_eq!(objects.len(), steps, "{objects:?}");
    let arguments: Vec<&str> = ["load"].into_iter().chain(objects).collect();
    let printed = plain.run(&script, &arguments);
    assert!(printed.contains("MODULE torch.serialization"), "{printed}");
    assert_eq!(hashes(&printed, "load"), saved);
}

/// Returns the files below a folder that have the script's names, those of newer versions last.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in
        fs::read_dir(folder).expect("a folder of Tier-3").map(|entry| entry.expect("an entry").path())
    {
        if entry.is_dir() {
            found.extend(files(&entry));
        } else if entry.extension().is_some_and(|extension| extension == "pt") {
            found.push(entry);
        }
    }
    found.sort();
    found
}

//! A model of GPT-2's size is trained, saved in two ways, and killed. Then it is loaded bit for bit from memory, from
//! Tier-3 after a restart with empty memory, and from a plain copy without Tidemark.

use std::path::{Path, PathBuf};

use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_tests::python::{Hashes, Python, hashes};
use tidemark_tests::s3::{S3Options, S3Server};
use tidemark_tests::{machine, tier3};

use crate::{below, config, environment, restart_empty, script};

/// Budget for two checkpoints of 1.5 GB, and for files that grow while they are written.
const TIER1: &str = "5GiB";
const SHARDED: &str = "runs/gpt2/step-2";
const WHOLE: &str = "runs/gpt2/full/step-2.pt";

/// Hashes that the training processes printed before they were killed.
struct Saved {
    parts: Vec<Hashes>,
    full: Hashes,
}

#[test]
fn gpt2_comes_back_bit_for_bit_from_a_directory() {
    let Some(python) = environment() else { return };
    let mut daemon = start(None, vec![]);
    let saved = train_and_kill(&daemon, &python);
    loads(&python, &below(&daemon, "runs/gpt2"), &saved);
    from_tier3(&mut daemon, &python, &saved);

    // For loads without Tidemark, cp copies the attempts' directories while no daemon runs.
    let tier3 = daemon.tier3_dir();
    let run = daemon.scratch("plain");
    daemon.stop();
    tier3::copy_out(&attempt(&tier3, SHARDED), &run.join("step-2"));
    std::fs::create_dir(run.join("full")).unwrap();
    tier3::copy_out(&attempt(&tier3, WHOLE).join("step-2.pt"), &run.join("full/step-2.pt"));
    loads_alone(&python, run.to_str().unwrap(), &saved);
}

#[test]
fn gpt2_comes_back_bit_for_bit_from_s3() {
    let Some(python) = environment() else { return };
    let server = S3Server::start(S3Options::default()).expect("a server on a free port");
    let mut daemon = start(Some(server.url("ckpt")), server.env());
    let saved = train_and_kill(&daemon, &python);
    // Loads from memory do not depend on Tier-3. The test with a directory does them, and this one only with `--long`.
    if machine::long() {
        loads(&python, &below(&daemon, "runs/gpt2"), &saved);
    }
    from_tier3(&mut daemon, &python, &saved);
    assert_eq!(server.unfinished_uploads(), 0, "every multipart upload was completed or aborted");
}

fn start(tier3: Option<String>, env: Vec<(String, String)>) -> Daemon {
    let options =
        DaemonOptions { tier1: TIER1.into(), tier3, env, config: Some(config()), ..DaemonOptions::default() };
    let daemon = Daemon::start(options);
    daemon.assert_passthrough();
    daemon
}

/// Two ranks train, save and are killed by SIGKILL while they still hold their memory.
fn train_and_kill(daemon: &Daemon, python: &Python) -> Saved {
    let mut ranks = python.start(2, &script("gpt2.py"), &["train", &below(daemon, "runs/gpt2")]);
    ranks.wait_for("SAVED");
    ranks.kill9();
    let parts = (0..2).map(|rank| hashes(&ranks.printed(rank), "parts")).collect();
    Saved { parts, full: hashes(&ranks.printed(0), "full") }
}

fn from_tier3(daemon: &mut Daemon, python: &Python, saved: &Saved) {
    let run = below(daemon, "runs/gpt2");
    restart_empty(daemon);
    for path in [SHARDED, WHOLE] {
        assert_eq!(daemon.checkpoint(path).expect(path)["state"], "committed", "{path}");
    }
    loads(python, &run, saved);
}

fn loads(python: &Python, run: &str, saved: &Saved) {
    let printed = python.run_ranks(2, &script("gpt2.py"), &["load", run]);
    for (rank, (printed, parts)) in printed.iter().zip(&saved.parts).enumerate() {
        assert_eq!(&hashes(printed, "parts"), parts, "rank {rank}");
    }
    loads_alone(python, run, saved);
}

/// Loads in one process: the torch.save file, with and without mmap, and the distributed checkpoint as whole
/// tensors.
fn loads_alone(python: &Python, run: &str, saved: &Saved) {
    let printed = python.run(&script("gpt2.py"), &["load-alone", run]);
    for way in ["full", "mapped", "whole"] {
        assert_eq!(hashes(&printed, way), saved.full, "{way}");
    }
}

/// Returns the directory of the one committed attempt.
fn attempt(tier3: &Path, path: &str) -> PathBuf {
    let commits = tier3::commits(tier3, path);
    assert_eq!(commits.len(), 1, "{path} is committed once: {commits:?}");
    commits[0].attempt_dir()
}

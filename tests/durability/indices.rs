//! An index that its writer did not close: the daemon reads it if the writer ended well. If not, the checkpoint is torn.
//!
//! Owns: such indices. Does not own: other files that were cut (`shield`, `visibility`).

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::machine;

use crate::shield::{Rank, wait_torn};
use crate::site::{CONFIG, assert_holds, events, names, noise, options, start};

const COMMITTED_WITHIN: Duration = Duration::from_secs(60);
const INDEX: &str = r#"{"metadata":{},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;
const INDEX_NAME: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// Writes a sharded model whose bytes depend on `number`, and returns its files.
fn model(directory: &Path, number: u64) -> Vec<(&'static str, Vec<u8>)> {
    fs::create_dir_all(directory).unwrap();
    let mut files: Vec<_> =
        (0..).zip(SHARDS).map(|(shard, name)| (name, noise(10 * number + shard, 300_000))).collect();
    files.push((INDEX_NAME, INDEX.into()));
    for (name, bytes) in &files {
        fs::write(directory.join(name), bytes).unwrap();
    }
    files
}

/// Runs `cat FROM >TO`, which leaves the close to the kernel, in a process of its own that ends well.
fn redirected(from: &Path, to: &Path) {
    let script = format!("exec 3>{}; cat {} >&3; exit 0", to.display(), from.display());
    let status = Command::new("setsid").args(["-w", "sh", "-c", &script]).status();
    assert!(status.unwrap().success(), "{script}");
}

/// Runs a job that rewrites both shards and the beginning of their index, and is killed there.
fn killed_in_its_index(directory: &Path, source: &Path) {
    let mut job = Rank::start(directory, None);
    for shard in SHARDS {
        job.does(&format!("cat {} >{shard}", source.join(shard).display()));
    }
    job.does(&format!("exec 3>{INDEX_NAME}; head -c 21 {} >&3", source.join(INDEX_NAME).display()));
    job.kill();
}

/// `curl URL >FILE` for each file, or for the index alone.
#[test]
fn an_index_that_ended_programs_left_unclosed_is_read() {
    if machine::kernel_release() < (6, 15) {
        return machine::left_out("the kernel does not say how a process ended");
    }
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let source = daemon.scratch("source");
    let files = model(&source, 1);
    for (directory, all) in [("all", true), ("index", false)] {
        let directory = daemon.mount().join(directory);
        fs::create_dir(&directory).unwrap();
        for (name, bytes) in &files {
            if all || *name == INDEX_NAME {
                redirected(&source.join(name), &directory.join(name));
            } else {
                fs::write(directory.join(name), bytes).unwrap();
            }
        }
    }
    let flushed = daemon.ctl(&["flush", "--wait", "--timeout", "60"]);
    assert!(flushed.status.success(), "{}", shown(&flushed));
    for directory in ["all", "index"] {
        daemon.wait_committed(directory, COMMITTED_WITHIN);
    }
    daemon.kill9();
    daemon.start_again();
    for (name, bytes) in &files {
        for directory in ["all", "index"] {
            assert_holds(&daemon, &format!("{directory}/{name}"), bytes, "with empty memory");
        }
    }
}

#[test]
fn a_save_that_is_killed_in_its_index_is_torn() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let source = daemon.scratch("source");
    model(&source, 9);
    let run = daemon.mount().join("run");
    let files = model(&run.join("checkpoint-1"), 1);
    daemon.wait_committed("run/checkpoint-1", COMMITTED_WITHIN);
    // The job is killed in a new checkpoint.
    fs::create_dir(run.join("checkpoint-2")).unwrap();
    killed_in_its_index(&run.join("checkpoint-2"), &source);
    wait_torn(&daemon, ".tidemark/torn/run/checkpoint-2");
    assert_eq!(names(&run), ["checkpoint-1"], "{:#?}", events(&daemon));
    // The job is killed in a save over a whole checkpoint.
    killed_in_its_index(&run.join("checkpoint-1"), &source);
    served(&daemon, "run/checkpoint-1", &files);
}

/// Waits until a checkpoint shows these files.
fn served(daemon: &Daemon, checkpoint: &str, files: &[(&str, Vec<u8>)]) {
    let directory = daemon.mount().join(checkpoint);
    let shows =
        || files.iter().all(|(name, bytes)| fs::read(directory.join(name)).ok().as_ref() == Some(bytes));
    tidemark_tests::process::until(COMMITTED_WITHIN, || shows().then_some(()))
        .unwrap_or_else(|| panic!("{checkpoint}: {:?} {:#?}", names(&directory), events(daemon)));
}

//! The trainer is gone and no command comes. Completed checkpoints become durable by themselves. Unfinished
//! checkpoints do not, and stay readable.
//!
//! Owns: the time between a trainer's death and the next one's start. Does not own: how the daemon distinguishes a close
//! from a death (suite mount), deaths of the daemon (suites crash and campaign).

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::tier3;

use crate::site::{CONFIG as QUICK, MIB, assert_holds, noise, options, start};

/// Configuration that keeps torn checkpoints at their paths, so that the tests can read them there. In the suite's
/// `shield`, they are hidden.
const IN_SIGHT: &str = "[torn]\nhide = false\n";
/// Limit of a commit, many times the settle time.
const COMMIT_LIMIT: Duration = Duration::from_secs(30);

/// Runs a trainer that saves two steps and is killed by `end` in the middle of the third, without closing its files.
fn trainer(daemon: &Daemon, end: &str) {
    let bytes = daemon.scratch("trainer").join("bytes");
    fs::write(&bytes, noise(1, MIB)).unwrap();
    let script = format!(
        "mkdir -p run/step_1 run/step_3
        for rank in 0 1; do cat \"$0\" >run/step_1/model_rank$rank.pt; done
        cat \"$0\" >run/step2.pt
        cat \"$0\" >run/step_3/model_rank0.pt
        exec 3>run/step_3/model_rank1.pt 4>run/step4.pt
        head -c 700000 \"$0\" >&3
        head -c 700000 \"$0\" >&4
        {end}"
    );
    let mut command = Command::new("sh");
    let status = command.args(["-c", &script]).arg(&bytes).current_dir(daemon.mount()).status().unwrap();
    assert!(status.signal().is_some() || status.code() == Some(7), "the trainer ended otherwise: {status}");
}

/// The trainer ends in both ways without a close. No process of it is left, and no command is given.
#[test]
fn what_a_dead_trainer_completed_is_committed_by_the_daemon_alone() {
    for end in ["kill -KILL $$", "exit 7"] {
        let Some(mut daemon) = start(options("256MiB", &format!("{QUICK}{IN_SIGHT}"))) else { return };
        trainer(&daemon, end);
        let bytes = noise(1, MIB);
        daemon.wait_committed("run/step2.pt", COMMIT_LIMIT);
        assert_eq!(tier3::commits(&daemon.tier3_dir(), "run/step2.pt").len(), 1, "{end}");

        // The cut saves are torn, reported as torn, and kept byte for byte.
        let torn: Vec<String> = pending(&daemon);
        assert_eq!(torn, ["run/step4.pt", "run/step_3"], "{end}");
        for path in ["run/step4.pt", "run/step_3"] {
            let listed = daemon.checkpoint(path).unwrap_or_else(|| panic!("{end}: {path} is not listed"));
            assert_eq!(listed["state"], "torn", "{end}: {listed:#}");
            assert!(tier3::markers(&daemon.tier3_dir(), path).is_empty(), "{end}: {path}");
        }
        assert_holds(&daemon, "run/step4.pt", &bytes[..700_000], end);
        assert_holds(&daemon, "run/step_3/model_rank1.pt", &bytes[..700_000], end);
        assert_holds(&daemon, "run/step_3/model_rank0.pt", &bytes, end);
        assert_eq!(latest(&daemon), ["run/step2.pt"], "{end}");

        // A restart commits none of it either.
        daemon.stop_with_status();
        daemon.start_again();
        assert_eq!(latest(&daemon), ["run/step2.pt"], "{end}");
        assert_holds(&daemon, "run/step2.pt", &bytes, end);
        for rank in 0..2 {
            assert_holds(&daemon, &format!("run/step_1/model_rank{rank}.pt"), &bytes, end);
        }
        for path in ["run/step4.pt", "run/step_3/model_rank1.pt"] {
            assert_holds(&daemon, path, &bytes[..700_000], end);
        }
        assert!(tier3::commits(&daemon.tier3_dir(), "run/step4.pt").is_empty(), "{end}: half a file");
        daemon.stop_with_status();
    }
}

/// Returns the paths that `flush --wait` does not wait for, sorted. All of them must be torn.
fn pending(daemon: &Daemon) -> Vec<String> {
    let output = daemon.ctl(&["flush", "--wait", "--timeout", "30", "-o", "json"]);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    let flush: Value = serde_json::from_slice(&output.stdout).expect("flush prints JSON");
    assert_eq!(flush["timed_out"], false, "torn is never waited for: {flush:#}");
    let rows = flush["pending"].as_array().expect("a list");
    let mut paths: Vec<String> = rows
        .iter()
        .map(|row| {
            assert_eq!(row["reason"], "torn", "{flush:#}");
            row["path"].as_str().expect("text").to_owned()
        })
        .collect();
    paths.sort();
    paths
}

/// Returns the latest checkpoints, as `status` lists them by run.
fn latest(daemon: &Daemon) -> Vec<String> {
    let status = daemon.ctl_json(&["status"]);
    let runs = status["runs"].as_array().expect("a list");
    runs.iter().filter_map(|run| run["latest"]["path"].as_str().map(str::to_owned)).collect()
}

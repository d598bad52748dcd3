//! A daemon is replaced and its memory stays: does the next daemon conclude the same as the one before it?
//!
//! Owns: conclusions from the ends of writers. Does not own: starts with empty memory (`visibility`), files that are open meanwhile
//! (suite survive).

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tidemark_tests::daemon::Daemon;
use tidemark_tests::{machine, process, tier3};

use crate::site::{CONFIG, events, has_problem, names, options, start};

const DECIDED_WITHIN: Duration = Duration::from_secs(60);
/// Duration of several checks and the settle time. A file that is there by then stays.
const STAYS: Duration = Duration::from_millis(3500);
const WRITES: &str = "head -c 300000 /dev/zero";

/// Runs a script in a process and a session of its own. Returns whether it ends well.
fn run_in(directory: &Path, script: &str) -> bool {
    let status = Command::new("setsid").args(["-w", "sh", "-c", script]).current_dir(directory).status();
    status.unwrap().success()
}

fn replace(daemon: &Daemon) {
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
}

fn wait_settled(daemon: &Daemon, path: &str) {
    let settled = || daemon.checkpoint(path).filter(|found| found["state"] == "settled").map(drop);
    process::until(DECIDED_WITHIN, settled)
        .unwrap_or_else(|| panic!("{path}: {:#?}\n{:#?}", daemon.checkpoints(), events(daemon)));
}

fn can_tell() -> bool {
    let tells = machine::kernel_release() >= (6, 15);
    if !tells {
        machine::left_out("the kernel does not say how a process ended");
    }
    tells
}

/// `curl URL >step2.bin`, and `curl URL >part`, which is renamed after the daemon that saw the end of curl is gone.
#[test]
fn what_a_program_left_open_that_ended_well_stays_in_sight_of_the_next_daemons() {
    let Some(daemon) = can_tell().then(|| start(options("256MiB", CONFIG))).flatten() else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    assert!(run_in(&run, &format!("{WRITES} >part; cat part >step1.bin; rm part")));
    daemon.wait_committed("run/step1.bin", DECIDED_WITHIN);
    assert!(run_in(&run, &format!("exec 3>step2.bin; {WRITES} >&3; exit 0")));
    assert!(run_in(&run, &format!("exec 3>part; {WRITES} >&3; exit 0")));
    // The file is sealed as it is, and Tier-3 has it as undecided.
    wait_settled(&daemon, "run/step2.bin");
    // The second replacement knows the exit only from the first one.
    for _ in 0..2 {
        replace(&daemon);
        std::thread::sleep(STAYS);
        assert_eq!(names(&run), ["part", "step1.bin", "step2.bin"], "{:#?}", events(&daemon));
        wait_settled(&daemon, "run/step2.bin");
        assert!(has_problem(&daemon, "undecided"));
    }
    fs::rename(run.join("part"), run.join("step4.bin")).unwrap();
    daemon.wait_committed("run/step4.bin", DECIDED_WITHIN);
    assert!(tier3::commits(&daemon.tier3_dir(), "run/step2.bin").is_empty(), "nobody says that it is whole");
}

/// An exception closes a file as it unwinds. The daemon that sees that dies before the settle time has passed.
#[test]
fn what_a_program_closed_that_failed_is_committed_by_no_daemon_after_the_one_that_saw_it() {
    // The settle time is longer than the test takes from the end of the program to the daemon's.
    let config = "[save]\nsettle_s = 15.0\n[tier3]\npaced = false\n";
    let Some(daemon) = can_tell().then(|| start(options("256MiB", config))).flatten() else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let path = run.join("step2.bin");
    assert!(!run_in(&run, &format!("exec 3>step2.bin; {WRITES} >&3; exec 3>&-; exit 1")));
    let failed = || {
        let output = daemon.ctl(&["why", path.to_str().unwrap(), "-o", "json"]);
        let why: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        why["writers"].as_array()?.iter().any(|writer| writer["end"] == "failed").then_some(())
    };
    process::until(DECIDED_WITHIN, failed).expect("the daemon saw the end");
    replace(&daemon);
    wait_settled(&daemon, "run/step2.bin");
    assert!(has_problem(&daemon, "undecided"));
    assert!(tier3::commits(&daemon.tier3_dir(), "run/step2.bin").is_empty(), "its bytes do not say it");
}

//! Does a restart report the truth after the daemon stopped at any named step? Real daemons are killed by SIGKILL, and
//! an auditor reads Tier-3 without the engine.
//!
//! Owns: two questions after a death: is the checkpoint committed or absent, never half, and does the next save work?
//! Does not own: the list of steps (`ckptd step-points`).

mod checkpoint;

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::thread;
use std::time::Duration;

use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::{machine, process, tier3};

use crate::checkpoint::{Checkpoint, Found};

/// Variable with the step at which `ckptd` kills itself, as `name` or `name:n` for the n-th time.
const STOP_AT: &str = "TIDEMARK_STOP_NODE_AT";
/// Limit of a death. A save of 10 MB and its commit into a local directory take far less.
const DEATH_LIMIT: Duration = Duration::from_secs(60);
/// Prefixes of steps that a save and its commit do not pass. By default, retention keeps everything.
const NOT_ON_THE_WAY: &[&str] = &["retire.", "rename.", "resume."];
/// Steps that are passed once for each file. The daemon also stops at them the second and the last time.
const ONCE_FOR_EACH_FILE: &[&str] = &["seal.hashed", "upload.after_file"];

#[test]
fn stopped_at_any_step_a_checkpoint_is_committed_or_absent() {
    if !machine::can_mount() {
        return;
    }
    let stops = stops();
    assert!(stops.len() >= 8, "a commit has more steps than {stops:?}");
    for stop in &stops {
        stopped_at(stop);
    }
}

#[test]
fn a_step_that_is_not_known_is_refused_at_start() {
    if !machine::can_mount() {
        return;
    }
    let env = vec![(STOP_AT.into(), "commit.someday".into())];
    let output = Daemon::start_refused(DaemonOptions { env, ..options() });
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn killed_at_any_moment_a_checkpoint_is_committed_or_absent() {
    if !machine::can_mount() {
        return;
    }
    let rounds = if machine::long() { 40 } else { 6 };
    for round in 0..rounds {
        // The moments are spread over the time that the commit takes here, denser at its beginning.
        let delay = Duration::from_millis(round * round * 400 / (rounds * rounds));
        let mut daemon = Daemon::start(options());
        let first = Checkpoint::new("run", 1);
        first.save(daemon.mount()).expect("the daemon lives");
        let keeper = daemon.keeper_pid();
        let killer = thread::spawn(move || {
            thread::sleep(delay);
            process::kill_node(keeper);
        });
        // The answer of `flush` does not matter: the daemon dies somewhere in it, or just after it.
        daemon.ctl(&["flush", "--wait", "--timeout", "20"]);
        killer.join().expect("the killer ends");
        let status = daemon.wait_for_death(DEATH_LIMIT).expect("it was killed");
        assert_eq!(status.signal(), Some(9));
        tells_the_truth(&mut daemon, &first, &format!("killed after {} ms", delay.as_millis()));
    }
}

fn options() -> DaemonOptions {
    let config = "[save]\nsettle_s = 0.3\n[tier3]\npaced = false\n";
    DaemonOptions { tier1: "512MiB".into(), config: Some(config.into()), ..DaemonOptions::default() }
}

/// Returns every step that a save passes, each file's steps more than once.
fn stops() -> Vec<String> {
    let output = process::run(Command::new(machine::binary("ckptd")).arg("step-points"), DEATH_LIMIT);
    assert!(output.status.success(), "ckptd step-points: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).expect("step names are text");
    let on_the_way =
        names.lines().filter(|name| !NOT_ON_THE_WAY.iter().any(|prefix| name.starts_with(prefix)));
    on_the_way
        .flat_map(|name| {
            let times: &[u32] = if ONCE_FOR_EACH_FILE.contains(&name) { &[1, 2, 4] } else { &[1] };
            times.iter().map(move |time| format!("{name}:{time}"))
        })
        .collect()
}

/// Saves and flushes with a daemon that dies at `stop`, and proves that it died there.
fn stopped_at(stop: &str) {
    let mut daemon = Daemon::start(DaemonOptions { env: vec![(STOP_AT.into(), stop.into())], ..options() });
    let first = Checkpoint::new("run", 1);
    // If the daemon dies while the job still writes, the job sees an error, as it must.
    let saved = first.save(daemon.mount()).and_then(|()| {
        // A loose file beside the checkpoint makes the daemon also pass the steps of loose files and of the tree.
        std::fs::write(daemon.mount().join("run/notes.txt"), "written before the stop\n")
    });
    let flushed = daemon.ctl(&["flush", "--wait", "--timeout", "30"]);
    let status = daemon.wait_for_death(DEATH_LIMIT).unwrap_or_else(|| {
        let status = daemon.ctl_json(&["status"]);
        let (flushed, log) = (shown(&flushed), daemon.log_tail());
        panic!("{stop} was never reached; saved: {saved:?}, flush: {flushed}\n{status:#}\n{log}")
    });
    assert_eq!(status.signal(), Some(9), "{stop}: died of something else: {status}\n{}", daemon.log_tail());
    daemon.set_env(STOP_AT, None);
    tells_the_truth(&mut daemon, &first, stop);
}

/// Starts the daemon with empty memory. Checks that it reports and serves exactly what Tier-3 has, and that saving goes on.
fn tells_the_truth(daemon: &mut Daemon, first: &Checkpoint, when: &str) {
    daemon.start_again();
    let decided = tier3::commits(&daemon.tier3_dir(), &first.path);
    let listed = daemon.checkpoint(&first.path);
    let says_committed = listed.as_ref().is_some_and(|listed| listed["state"] == "committed");
    assert_eq!(
        says_committed,
        !decided.is_empty(),
        "{when}: the daemon says {listed:?}, Tier-3 says {decided:?}\n{}",
        daemon.log_tail()
    );
    let found = first.look(daemon.mount());
    if says_committed {
        assert_eq!(found, Found::Whole, "{when}: committed, but not all of it is served");
    } else {
        let status = daemon.ctl_json(&["status"]);
        for run in status["runs"].as_array().into_iter().flatten() {
            assert!(
                run["latest"].is_null() && run["recoverable"].is_null(),
                "{when}: {found:?} is offered: {run}"
            );
        }
    }

    // The job saves again what it lost, and goes on.
    let second = Checkpoint::new("run", 2);
    if !says_committed {
        first.save(daemon.mount()).unwrap_or_else(|error| panic!("{when}: saving again: {error}"));
    }
    second.save(daemon.mount()).unwrap_or_else(|error| panic!("{when}: saving on: {error}"));
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    for checkpoint in [first, &second] {
        let listed = daemon.checkpoint(&checkpoint.path);
        let state = listed.as_ref().map(|listed| listed["state"].clone());
        assert_eq!(state, Some("committed".into()), "{when}: {}: {listed:?}", checkpoint.path);
        assert_eq!(checkpoint.look(daemon.mount()), Found::Whole, "{when}: {}", checkpoint.path);
        assert!(!tier3::commits(&daemon.tier3_dir(), &checkpoint.path).is_empty());
    }
    daemon.stop();
}

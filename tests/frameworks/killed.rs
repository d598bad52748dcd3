//! torch saves while the daemon dies again and again, and the trainer notices nothing.
//!
//! Owns: the moments of the kills, and the proof that a save was under way. Does not own: kills under a denser load (`survive`).

use std::time::Duration;

use tidemark_tests::daemon::Daemon;
use tidemark_tests::process;
use tidemark_tests::python::{Ranks, hashes};

use crate::{below, daemon, environment, script};

/// Kills that must hit torch in the middle of a save. Other kills do not count.
const KILLS: u32 = 12;
const TRIES_MAX: u32 = 200;
const PROGRESS_LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_daemon_that_dies_while_torch_saves_is_not_noticed() {
    let Some(python) = environment() else { return };
    let daemon = daemon("2GiB");
    std::fs::create_dir(daemon.mount().join("run")).unwrap();
    let directory = below(&daemon, "run");
    let mut trainer = python.start(1, &script("torch_file.py"), &["save-on", &directory]);
    trainer.wait_for("SAVED 2");
    let (mut kills, mut tries) = (0, 0);
    while kills < KILLS {
        tries += 1;
        assert!(tries <= TRIES_MAX, "{kills} of {tries} kills found torch in a save");
        kills += u32::from(killed_in_a_save(&daemon, &trainer, tries));
    }
    trainer.terminate();
    let printed = trainer.printed(0);
    let last = last_word(&printed, "SAVED ").expect("it saved");
    for step in [last - 1, last] {
        let path = format!("{directory}/step-{step}.pt");
        let loaded = python.run(&script("torch_file.py"), &["load", &path]);
        for way in ["read", "mapped"] {
            assert_eq!(
                hashes(&loaded, way),
                hashes(&printed, &format!("step-{step}.pt")),
                "step {step}, {way}"
            );
        }
    }
    daemon.flush();
    let committed = daemon.checkpoints();
    let committed = committed.iter().filter(|found| found["state"] == "committed").count();
    assert!(committed >= 2, "{:#?}", daemon.checkpoints());
}

/// Kills the daemon, at another moment each time. Returns whether torch was in the same save before and after the kill.
fn killed_in_a_save(daemon: &Daemon, trainer: &Ranks, turn: u32) -> bool {
    std::thread::sleep(Duration::from_millis(u64::from(turn * 37 % 230)));
    let saving = || {
        let printed = trainer.printed(0);
        let (begun, ended) = (last_word(&printed, "SAVING "), last_word(&printed, "SAVED "));
        begun.filter(|begun| Some(*begun) != ended)
    };
    let before = saving();
    let dead = daemon.kill_serving();
    let counts = before.is_some() && saving() == before;
    daemon.wait_for_next(dead);
    let done = last_word(&trainer.printed(0), "SAVED ");
    let goes_on =
        process::until(PROGRESS_LIMIT, || (last_word(&trainer.printed(0), "SAVED ") > done).then_some(()));
    assert!(
        goes_on.is_some(),
        "torch saves nothing any more:\n{}\n{}",
        trainer.printed(0),
        daemon.log_tail()
    );
    counts
}

/// Returns the number behind the last line that begins with `begins`.
fn last_word(printed: &str, begins: &str) -> Option<u64> {
    printed.lines().rev().find_map(|line| line.strip_prefix(begins)?.parse().ok())
}

//! A committed checkpoint that can no longer be read whole: does a job that comes back load the next older one?
//!
//! Owns: damage to every copy of the newest, hiding it, the output of `ckptctl recover --plan`. Does not own: damage to one
//! copy of several (`bytes`), checkpoints that were never whole (`shield`).

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::process;

use crate::site::{
    CONFIG, MIB, assert_holds, events, flip, noise, object_path, options, problems, save, start,
};

const LIMIT: Duration = Duration::from_secs(20);
const NAMES: [&str; 3] = ["run/step1.pt", "run/step2.pt", "run/step3.pt"];

fn bytes(name: &str) -> Vec<u8> {
    noise(u64::from(name.as_bytes()[8]), MIB)
}

pub(crate) fn plan(daemon: &Daemon) -> (Option<i32>, Value) {
    let output = daemon.ctl(&["recover", "--plan", "-o", "json"]);
    let plan =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", shown(&output)));
    (output.status.code(), plan)
}

/// Returns the chosen step of the only run, and step, standpoint and reason of each version, the newest first.
fn chosen(daemon: &Daemon) -> (Value, Vec<(u64, String, String)>) {
    let (_, plan) = plan(daemon);
    let runs = plan["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 1, "{plan:#}");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let row = |row: &Value| {
        (row["checkpoint"]["step"].as_u64().unwrap(), text(&row["standpoint"]), text(&row["reason"]))
    };
    (runs[0]["chosen"]["step"].clone(), runs[0]["versions"].as_array().unwrap().iter().map(row).collect())
}

fn there(daemon: &Daemon, path: &str) -> bool {
    daemon.mount().join(path).exists()
}

fn wait_out_of_sight(daemon: &Daemon, path: &str) {
    let hidden = || (!there(daemon, path) && there(daemon, &format!(".tidemark/torn/{path}"))).then_some(());
    process::until(LIMIT, hidden).unwrap_or_else(|| panic!("{path} stays in sight: {:#?}", events(daemon)));
}

#[test]
fn what_cannot_be_read_whole_goes_out_of_sight_and_the_next_older_one_is_loaded() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    for name in NAMES {
        save(&daemon, name, &bytes(name));
        daemon.flush();
    }
    let tier3 = daemon.tier3_dir();
    let objects = NAMES.map(|name| object_path(&daemon, &tier3, name));
    daemon.stop();
    daemon.start_again();
    let (step, versions) = chosen(&daemon);
    assert_eq!(step, 3);
    let standpoints: Vec<_> =
        versions.iter().map(|(step, standpoint, _)| (*step, standpoint.as_str())).collect();
    assert_eq!(standpoints, [(3, "chosen"), (2, "older"), (1, "older")]);

    // An open finds the damage.
    flip(&objects[2], 70_000);
    let error = fs::read(daemon.mount().join(NAMES[2])).expect_err("no copy is good");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    wait_out_of_sight(&daemon, NAMES[2]);
    let (step, versions) = chosen(&daemon);
    assert_eq!(step, 2, "{versions:?}");
    assert!(versions[0].1 == "passed_over" && versions[0].2.contains("checksum"), "{versions:?}");
    assert_eq!(daemon.ctl_json(&["status"])["runs"][0]["recoverable"]["step"], 2);
    assert_holds(&daemon, NAMES[1], &bytes(NAMES[1]), "the job comes back");

    // The damage is mended, and a person reports that by `undelete`.
    flip(&objects[2], 70_000);
    let undelete = daemon.ctl(&["undelete", daemon.mount().join(NAMES[2]).to_str().unwrap()]);
    assert!(undelete.status.success(), "{}", shown(&undelete));
    assert_holds(&daemon, NAMES[2], &bytes(NAMES[2]), "mended");
    let (step, versions) = chosen(&daemon);
    assert_eq!(step, 3, "{versions:?}");
    assert_eq!(plan(&daemon).0, Some(0));

    // No version is left, which an administrator finds. A job must fail, and not begin at step 0.
    flip(&objects[2], 70_000);
    flip(&objects[0], 70_000);
    fs::remove_file(&objects[1]).unwrap();
    daemon.kill9();
    daemon.start_again();
    assert!(NAMES.iter().all(|name| there(&daemon, name)), "what the daemon hid is not removed");
    let verify = daemon.ctl(&["verify", "--deep"]);
    assert_eq!(verify.status.code(), Some(4), "{}", shown(&verify));
    let (code, nothing) = plan(&daemon);
    assert_eq!((code, &nothing["runs"][0]["chosen"]), (Some(4), &Value::Null), "{nothing:#}");
    assert!(NAMES.iter().any(|name| there(&daemon, name)), "a job sees that there is something");
    for name in NAMES.iter().filter(|name| there(&daemon, name)) {
        let error = fs::read(daemon.mount().join(name)).expect_err("no copy is good");
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{name}");
    }
}

#[test]
fn verify_reads_the_object_of_which_an_open_found_no_good_copy() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    save(&daemon, NAMES[0], &bytes(NAMES[0]));
    daemon.flush();
    let object = object_path(&daemon, &daemon.tier3_dir(), NAMES[0]);
    daemon.stop();
    flip(&object, 70_000);
    daemon.start_again();
    let verify = |daemon: &Daemon| daemon.ctl(&["verify"]).status.code();
    assert_eq!(verify(&daemon), Some(0), "its object has the size that it should have");
    let error = fs::read(daemon.mount().join(NAMES[0])).expect_err("no copy is good");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert_eq!(verify(&daemon), Some(4), "it was just read");
    flip(&object, 70_000);
    assert_eq!(verify(&daemon), Some(0), "the object was restored");
}

/// Returns the texts of the problems with that code.
fn problems_of(daemon: &Daemon, code: &str) -> Vec<String> {
    let of = problems(daemon).into_iter().filter(|(found, ..)| found == code);
    of.map(|(_, what, _)| what).collect()
}

/// Starts with three committed checkpoints and empty memory. Flips a byte of the newest one's object, and returns its path.
fn with_a_bad_newest() -> Option<(Daemon, PathBuf)> {
    let mut daemon = start(options("256MiB", CONFIG))?;
    for name in NAMES {
        save(&daemon, name, &bytes(name));
        daemon.flush();
    }
    let object = object_path(&daemon, &daemon.tier3_dir(), NAMES[2]);
    daemon.stop();
    flip(&object, 70_000);
    daemon.start_again();
    Some((daemon, object))
}

#[test]
fn a_lost_checkpoint_is_a_problem_until_it_can_be_read_and_undelete_finds_it_by_its_step() {
    let Some((daemon, object)) = with_a_bad_newest() else { return };
    assert_eq!(daemon.ctl(&["status", "--exit-code"]).status.code(), Some(0), "nobody has looked yet");
    fs::read(daemon.mount().join(NAMES[2])).expect_err("no copy is good");
    wait_out_of_sight(&daemon, NAMES[2]);
    let lost = problems_of(&daemon, "lost");
    assert!(lost.len() == 1 && lost[0].contains(NAMES[2]) && lost[0].contains("checksum"), "{lost:?}");
    assert_eq!(daemon.ctl(&["status", "--exit-code"]).status.code(), Some(4));
    let told = process::until(LIMIT, || {
        (daemon.metric("tidemark_problem", &["code=\"lost\""]) == 1.0).then_some(())
    });
    assert!(told.is_some(), "{}", daemon.http_get("/metrics"));
    assert_eq!(daemon.metric("tidemark_problem", &["code=\"fenced\""]), 0.0);
    let health = daemon.http_get("/healthz");
    assert!(health.starts_with("degraded\nlost: "), "{health}");
    assert_eq!(daemon.ctl(&["show", "run@3"]).status.code(), Some(4));

    // The event offers this command.
    let undelete = daemon.ctl(&["undelete", "run@3"]);
    assert!(undelete.status.success(), "{}", shown(&undelete));
    assert!(there(&daemon, NAMES[2]));
    assert_eq!(problems_of(&daemon, "lost").len(), 1, "that it is in sight mends nothing");
    flip(&object, 70_000);
    assert_holds(&daemon, NAMES[2], &bytes(NAMES[2]), "mended");
    assert_eq!(problems_of(&daemon, "lost"), [""; 0]);
    assert_eq!(daemon.ctl(&["status", "--exit-code"]).status.code(), Some(0));
}

#[test]
fn what_went_out_of_sight_comes_back_by_itself_once_it_was_read_whole() {
    let Some((mut daemon, object)) = with_a_bad_newest() else { return };
    fs::read(daemon.mount().join(NAMES[2])).expect_err("no copy is good");
    wait_out_of_sight(&daemon, NAMES[2]);
    flip(&object, 70_000);
    let verify = daemon.ctl(&["verify", "--deep"]);
    assert!(verify.status.success(), "{}", shown(&verify));
    let back = || {
        (there(&daemon, NAMES[2]) && !there(&daemon, &format!(".tidemark/torn/{}", NAMES[2]))).then_some(())
    };
    process::until(LIMIT, back).unwrap_or_else(|| panic!("it stays hidden: {:#?}", events(&daemon)));
    assert_holds(&daemon, NAMES[2], &bytes(NAMES[2]), "read whole after all");
    assert_eq!(chosen(&daemon).0, 3);
    assert_eq!(problems_of(&daemon, "lost"), [""; 0]);
    // No pin keeps it visible, so new damage hides it once more.
    daemon.flush();
    daemon.stop();
    flip(&object, 70_000);
    daemon.start_again();
    fs::read(daemon.mount().join(NAMES[2])).expect_err("no copy is good");
    wait_out_of_sight(&daemon, NAMES[2]);
}

#[test]
fn what_the_job_removed_or_saved_over_has_no_row_and_its_run_is_not_lost() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    assert_eq!(plan(&daemon), (Some(0), serde_json::json!({"runs": []})));
    for name in NAMES {
        save(&daemon, name, &bytes(name));
        save(&daemon, "gone/step1.pt", &bytes(NAMES[0]));
        daemon.flush();
    }
    save(&daemon, NAMES[2], &bytes(NAMES[1]));
    daemon.flush();
    fs::remove_file(daemon.mount().join(NAMES[0])).unwrap();
    // The removal counts as meant, because its process ends well.
    let gone = daemon.mount().join("gone");
    assert!(std::process::Command::new("rm").arg("-r").arg(gone).status().unwrap().success());
    let settled = || {
        let (code, plan) = plan(&daemon);
        let runs = plan["runs"].as_array().unwrap();
        (code == Some(0) && runs.len() == 1 && runs[0]["removed"] == 1).then(|| runs[0].clone())
    };
    let run = process::until(LIMIT, settled).unwrap_or_else(|| panic!("{:#}", plan(&daemon).1));
    let row = |row: &Value| {
        (
            row["checkpoint"]["step"].as_u64().unwrap(),
            row["checkpoint"]["version"].as_u64().unwrap(),
            row["standpoint"].clone(),
        )
    };
    let rows: Vec<_> = run["versions"].as_array().unwrap().iter().map(row).collect();
    assert_eq!(rows, [(3, 2, "chosen".into()), (2, 1, "older".into())], "{run:#}");
}

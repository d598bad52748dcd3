//! A committed checkpoint that cannot be read whole any more: does a job that comes back load the next older one?
//!
//! Owns: damage to every copy of the newest, what goes out of sight, what `ckptctl recover --plan` says. Does not own: damage
//! to one copy of several (`bytes`), what was never whole (`shield`).

use std::fs;
use std::time::Duration;

use serde_json::Value;
use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::process;

use crate::site::{CONFIG, MIB, assert_holds, events, flip, noise, object_path, options, save, start};

const LIMIT: Duration = Duration::from_secs(20);
const NAMES: [&str; 3] = ["run/step1.pt", "run/step2.pt", "run/step3.pt"];

fn bytes(name: &str) -> Vec<u8> {
    noise(u64::from(name.as_bytes()[8]), MIB)
}

fn plan(daemon: &Daemon) -> (Option<i32>, Value) {
    let output = daemon.ctl(&["recover", "--plan", "-o", "json"]);
    let plan =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", shown(&output)));
    (output.status.code(), plan)
}

/// The step that is chosen of the only run, and of each version from the newest what it says.
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

    // By an open.
    flip(&objects[2], 70_000);
    let error = fs::read(daemon.mount().join(NAMES[2])).expect_err("no copy is good");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    wait_out_of_sight(&daemon, NAMES[2]);
    let (step, versions) = chosen(&daemon);
    assert_eq!(step, 2, "{versions:?}");
    assert!(versions[0].1 == "passed_over" && versions[0].2.contains("checksum"), "{versions:?}");
    assert_eq!(daemon.ctl_json(&["status"])["runs"][0]["recoverable"]["step"], 2);
    assert_holds(&daemon, NAMES[1], &bytes(NAMES[1]), "the job comes back");

    // The damage is mended, and a person says so.
    flip(&objects[2], 70_000);
    let undelete = daemon.ctl(&["undelete", daemon.mount().join(NAMES[2]).to_str().unwrap()]);
    assert!(undelete.status.success(), "{}", shown(&undelete));
    assert_holds(&daemon, NAMES[2], &bytes(NAMES[2]), "mended");
    assert_eq!(chosen(&daemon).0, 3);
    assert_eq!(plan(&daemon).0, Some(0));

    // Nothing is left, which an administrator finds: a job must fail, and not begin at step 0.
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
fn a_run_whose_names_were_removed_is_said_to_be_so() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    assert_eq!(plan(&daemon), (Some(0), serde_json::json!({"runs": []})));
    save(&daemon, NAMES[0], &bytes(NAMES[0]));
    daemon.flush();
    fs::remove_file(daemon.mount().join(NAMES[0])).unwrap();
    let removed = || (plan(&daemon).0 == Some(4)).then_some(());
    process::until(LIMIT, removed).expect("nothing of it can be loaded");
    assert!(chosen(&daemon).1[0].2.contains("undelete"));
}

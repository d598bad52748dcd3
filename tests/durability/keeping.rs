//! Retention, pins, `rm`, and undoing a removal: the versions that are retired, and those that are kept.
//!
//! Owns: the demands on Tier-3 and on the tree, read without the engine. Does not own: the rules of retention (protocol),
//! removals over a restart (`wishes`).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use rustix::fs::XattrFlags;
use serde_json::Value;
use tidemark_protocol::retention::METRIC_XATTR as METRIC;
use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::s3::{Fault, FaultEffect, S3Operation, S3Options, S3Server};
use tidemark_tests::{process, tier3};

use crate::site::{CONFIG, assert_holds, events, noise, options, problems, save, start};

/// Limit until the daemon retires versions by itself, which it checks every few seconds.
const LOOK_LIMIT: Duration = Duration::from_secs(30);
const DEATH_LIMIT: Duration = Duration::from_secs(30);
const STOP_AT: &str = "TIDEMARK_STOP_NODE_AT";

fn path(step: u64) -> String {
    format!("run/step{step}.pt")
}

fn bytes(step: u64) -> Vec<u8> {
    noise(step, 100_000 + usize::try_from(step).unwrap())
}

/// Saves these steps, and commits each before the next begins.
fn saved(daemon: &Daemon, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        save(daemon, &path(step), &bytes(step));
        daemon.flush();
    }
}

/// Returns the number of a checkpoint's objects that hold bytes or describe them: all but its markers.
fn objects(daemon: &Daemon, step: u64) -> usize {
    let files = tier3::files_below(&daemon.tier3_dir().join(path(step)));
    files.iter().filter(|file| !file.file_name().unwrap().to_string_lossy().starts_with('_')).count()
}

fn there(daemon: &Daemon, step: u64) -> bool {
    daemon.mount().join(path(step)).exists()
}

fn steps_of(rows: &Value, given_up: bool) -> Vec<u64> {
    let rows = rows["rows"].as_array().unwrap().iter().filter(|row| row["given_up"] == given_up);
    rows.map(|row| row["checkpoint"]["step"].as_u64().unwrap()).collect()
}

#[test]
fn what_no_rule_keeps_is_given_up_and_what_is_pinned_stays() {
    let config = format!("{CONFIG}[retention]\nkeep_last = 2\nkeep_every_steps = 4\n");
    let Some(mut daemon) = start(options("256MiB", &config)) else { return };
    save(&daemon, &path(1), &bytes(1));
    daemon.flush();
    let pin = daemon.ctl_json(&["pin", "@1"]);
    assert_eq!((pin["pinned"].as_bool(), pin["already"].as_bool()), (Some(true), Some(false)));
    saved(&daemon, 2..=6);
    let gone =
        |daemon: &Daemon| [2, 3].iter().all(|step| !there(daemon, *step) && objects(daemon, *step) == 0);
    process::until(LOOK_LIMIT, || {
        let none_left = || steps_of(&daemon.ctl_json(&["gc", "--dry-run"]), true).is_empty();
        (gone(&daemon) && none_left()).then_some(())
    })
    .unwrap_or_else(|| panic!("{:#}\n{}", daemon.ctl_json(&["gc", "--dry-run"]), daemon.log_tail()));
    let rows = daemon.ctl_json(&["gc", "--dry-run"]);
    assert_eq!((steps_of(&rows, false), steps_of(&rows, true)), (vec![1, 4, 5, 6], vec![]), "{rows:#}");
    assert!(rows["rows"][0]["reason"].as_str().unwrap().contains("pinned"), "{rows:#}");
    assert_eq!(daemon.checkpoint(&path(1)).unwrap()["pinned"], true);
    for restart in [false, true] {
        if restart {
            daemon.stop();
            daemon.start_again();
        }
        for step in [1, 4, 5, 6] {
            assert_holds(&daemon, &path(step), &bytes(step), &format!("kept; after a restart: {restart}"));
        }
        assert!(!there(&daemon, 2) && !there(&daemon, 3), "given up; after a restart: {restart}");
    }
    // The pin survived the daemon that wrote it. Without the pin, the version is retired.
    daemon.ctl_json(&["unpin", "@1"]);
    let gc = daemon.ctl_json(&["gc"]);
    assert_eq!((steps_of(&gc, true), gc["left"].as_u64()), (vec![1], Some(0)), "{gc:#}");
    assert_eq!(objects(&daemon, 1), 0);
    assert!(daemon.metric("tidemark_retire_versions_total", &[]) > 0.0);
    let verify = daemon.ctl_json(&["verify", "--deep"]);
    assert_eq!(verify["broken"].as_array().unwrap().len(), 0, "{verify:#}");
}

#[test]
fn a_removal_is_a_wish_and_can_be_taken_back() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    saved(&daemon, 1..=4);
    let place = daemon.mount().join("run/step-9");
    fs::create_dir_all(place.join("sub")).unwrap();
    fs::write(place.join("sub/a.pt"), bytes(9)).unwrap();
    fs::write(place.join("b.pt"), bytes(10)).unwrap();
    daemon.flush();
    fs::remove_file(daemon.mount().join(path(1))).unwrap();
    fs::remove_dir_all(&place).unwrap();
    daemon.flush();
    let gc = daemon.ctl_json(&["gc"]);
    assert!(steps_of(&gc, true).is_empty(), "everything is kept unless somebody says less: {gc:#}");
    for restart in [false, true] {
        if restart {
            daemon.stop();
            daemon.start_again();
        }
        let back = daemon.ctl_json(&["undelete", "@1"]);
        assert_eq!(back["files"], 1, "{back:#}");
        assert_holds(&daemon, &path(1), &bytes(1), "undeleted");
        let again = daemon.ctl(&["undelete", "@1"]);
        assert_eq!(again.status.code(), Some(1), "something has the name: {}", shown(&again));
        daemon.ctl_json(&["undelete", place.to_str().unwrap()]);
        assert_holds(&daemon, "run/step-9/sub/a.pt", &bytes(9), "undeleted");
        assert_holds(&daemon, "run/step-9/b.pt", &bytes(10), "undeleted");
        daemon.flush();
        assert_eq!(daemon.checkpoint(&path(1)).unwrap()["version"], 1, "the same bytes make no new version");
        // An undeleted checkpoint can be removed and undeleted again.
        fs::remove_file(daemon.mount().join(path(1))).unwrap();
        fs::remove_dir_all(&place).unwrap();
        daemon.flush();
    }
    // An undeleted checkpoint is a file like any other, so saving it again commits a new version.
    daemon.ctl_json(&["undelete", "@1"]);
    save(&daemon, &path(1), &bytes(12));
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, &path(1), &bytes(12), "undeleted, and saved anew");
    let absent = daemon.ctl(&["undelete", "@77"]);
    assert_eq!(absent.status.code(), Some(3), "{}", shown(&absent));
}

#[test]
fn a_job_that_removes_its_old_ones_is_followed_when_told_to() {
    let config = format!("{CONFIG}[retention.runs.run]\nfollow_removals = true\n");
    let Some(mut daemon) = start(options("256MiB", &config)) else { return };
    saved(&daemon, 1..=2);
    let open = fs::File::open(daemon.mount().join(path(1))).unwrap();
    // The job removes the old ones before it writes the new one, as Accelerate does.
    fs::remove_file(daemon.mount().join(path(1))).unwrap();
    fs::remove_file(daemon.mount().join(path(2))).unwrap();
    let gc = daemon.ctl_json(&["gc"]);
    assert!(steps_of(&gc, true).is_empty(), "the newest two stay, removed or not: {gc:#}");
    saved(&daemon, 3..=4);
    let rows = daemon.ctl_json(&["gc", "--dry-run"]);
    assert!(!steps_of(&rows, true).contains(&1), "a program has it open: {rows:#}");
    drop(open);
    process::until(LOOK_LIMIT, || ([1, 2].iter().all(|step| objects(&daemon, *step) == 0)).then_some(()))
        .unwrap_or_else(|| panic!("{:#}", daemon.ctl_json(&["gc", "--dry-run"])));
    daemon.stop();
    daemon.start_again();
    for step in [3, 4] {
        assert_holds(&daemon, &path(step), &bytes(step), "the newest");
    }
    let gone = daemon.ctl(&["undelete", "@1"]);
    assert_eq!(gone.status.code(), Some(3), "{}", shown(&gone));
}

/// A rollback: the job removes its newest checkpoint, goes on from the previous one, and saves the same step again.
#[test]
fn a_removed_version_takes_no_place_from_a_checkpoint_that_is_there() {
    for follow in [false, true] {
        let config = format!("{CONFIG}[retention]\nkeep_last = 2\nfollow_removals = {follow}\n");
        let Some(mut daemon) = start(options("256MiB", &config)) else { return };
        saved(&daemon, 1..=2);
        fs::remove_file(daemon.mount().join(path(2))).unwrap();
        daemon.flush();
        save(&daemon, &path(2), &bytes(12));
        daemon.flush();
        let gc = daemon.ctl_json(&["gc"]);
        assert!(steps_of(&gc, true).is_empty(), "two are there, and two are kept: {gc:#}");
        assert_holds(&daemon, &path(1), &bytes(1), "nobody touched it");
        assert_holds(&daemon, &path(2), &bytes(12), "saved again");
        // With a newer one, both go. The reason must not be a removal by the job, except for the removed version.
        saved(&daemon, 3..=3);
        daemon.ctl_json(&["gc"]);
        assert!(
            !there(&daemon, 1) && objects(&daemon, 1) == 0,
            "{:#}",
            daemon.ctl_json(&["gc", "--dry-run"])
        );
        let retired: Vec<_> =
            events(&daemon).into_iter().filter(|event| event["kind"] == "retired").collect();
        let why = |step: u64| {
            let of_step = |event: &&Value| event["path"] == path(step);
            let event = retired.iter().find(of_step).unwrap_or_else(|| panic!("{step}: {retired:#?}"));
            event["what"].as_str().unwrap().to_owned()
        };
        let by_rule = "version 1 was given up: 3 from the newest, and no rule keeps it";
        let by_removal =
            "version 1 was given up: it was saved again under the same name, and newer ones are committed";
        assert_eq!(why(1), by_rule, "follow_removals = {follow}");
        assert_eq!(why(2), if follow { by_removal } else { by_rule });
        daemon.stop();
        daemon.start_again();
        assert_holds(&daemon, &path(2), &bytes(12), "the newest two");
        assert_holds(&daemon, &path(3), &bytes(3), "the newest two");
    }
}

/// Sets a checkpoint's metric, as an evaluation does long after the save.
fn say_metric(daemon: &Daemon, path: &str, value: &str) {
    let place = daemon.mount().join(path);
    rustix::fs::setxattr(&place, METRIC, value.as_bytes(), XattrFlags::empty())
        .unwrap_or_else(|error| panic!("{METRIC} of {}: {error}", place.display()));
}

fn metric(daemon: &Daemon, path: &str) -> Option<String> {
    let mut value = [0; 64];
    let len = rustix::fs::getxattr(daemon.mount().join(path), METRIC, &mut value).ok()?;
    Some(String::from_utf8(value[..len].to_vec()).unwrap())
}

/// The metric is set after the commit: on a file, on a directory, and on a file in a directory.
#[test]
fn the_best_by_the_jobs_own_number_stay_also_after_a_restart_with_empty_memory() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    for (step, value) in [(1, "0.7"), (2, "0.1"), (3, "none yet"), (4, "0.2")] {
        saved(&daemon, step..=step);
        say_metric(&daemon, &path(step), value);
    }
    saved(&daemon, 5..=7);
    for (run, on) in [("by-directory", ""), ("by-file", "/a.pt")] {
        for step in 1..=4 {
            save(&daemon, &format!("{run}/step-{step}/a.pt"), &bytes(step));
            daemon.flush();
            say_metric(&daemon, &format!("{run}/step-{step}{on}"), &format!("{step}"));
        }
    }
    // A metric is changed, and another one removed. The last state counts.
    say_metric(&daemon, &path(1), "0.05");
    rustix::fs::removexattr(daemon.mount().join(path(4)), METRIC).unwrap();
    daemon.flush();
    daemon.stop();
    let keep_best = format!("{CONFIG}[retention]\nkeep_best = 2\n");
    let highest = "[retention.runs.by-file]\nkeep_best = 1\nbest = \"highest\"\n";
    daemon.set_config(&format!("{keep_best}{highest}"));
    daemon.start_again();
    for (path, value) in [(path(1), Some("0.05")), (path(4), None), ("by-file/step-2/a.pt".into(), Some("2"))]
    {
        assert_eq!(metric(&daemon, &path).as_deref(), value, "{path} in the tree again");
    }
    let gc = daemon.ctl_json(&["gc"]);
    let of = |run: &str, given_up: bool| -> Vec<u64> {
        let rows = gc["rows"].as_array().unwrap().iter();
        let rows = rows.filter(|row| row["run"] == run && row["given_up"] == given_up);
        rows.map(|row| row["checkpoint"]["step"].as_u64().unwrap()).collect()
    };
    assert_eq!((of("run", false), of("run", true)), (vec![1, 2, 6, 7], vec![3, 4, 5]), "{gc:#}");
    assert_eq!((of("by-directory", false), of("by-directory", true)), (vec![1, 2, 3, 4], vec![]), "{gc:#}");
    assert_eq!((of("by-file", false), of("by-file", true)), (vec![3, 4], vec![1, 2]), "{gc:#}");
    let reason = |step: u64| {
        let mut rows = gc["rows"].as_array().unwrap().iter();
        let row = rows.find(|row| row["run"] == "run" && row["checkpoint"]["step"] == step).unwrap();
        row["reason"].as_str().unwrap().to_owned()
    };
    assert_eq!(reason(1), "its metric 0.05 is one of the 2 lowest");
    assert!(reason(3).contains(r#""none yet" is no number"#), "{}", reason(3));
    assert_eq!(objects(&daemon, 3), 0);
    assert_holds(&daemon, &path(1), &bytes(1), "the best");
}

/// No removal: two checkpoints that are one file, a name that was moved, and a copy that another version has.
#[test]
fn what_the_tree_still_needs_is_no_removal() {
    let config = format!("{CONFIG}[retention]\nfollow_removals = true\n");
    let Some(mut daemon) = start(options("256MiB", &config)) else { return };
    let place = |name: &str| daemon.mount().join("run").join(name);
    saved(&daemon, 1..=2);
    fs::hard_link(place("step1.pt"), place("best.pt")).unwrap();
    daemon.flush();
    fs::rename(place("step2.pt"), place("kept2.pt")).unwrap();
    daemon.flush();
    saved(&daemon, 5..=8);
    // The versions may also have been retired before this.
    daemon.ctl_json(&["gc"]);
    let gone: Vec<_> = events(&daemon).into_iter().filter(|event| event["kind"] == "retired").collect();
    let names: Vec<_> = gone.iter().map(|event| event["path"].as_str().unwrap()).collect();
    assert_eq!(names, ["run/step2.pt"], "its bytes are under its new name: {gone:#?}");
    for (name, step) in [("run/step1.pt", 1), ("run/best.pt", 1), ("run/kept2.pt", 2), ("run/step8.pt", 8)] {
        assert_holds(&daemon, name, &bytes(step), name);
    }
    daemon.stop();
    daemon.start_again();
    daemon.ctl_json(&["gc"]);
    for (name, step) in [("run/step1.pt", 1), ("run/best.pt", 1), ("run/kept2.pt", 2), ("run/step8.pt", 8)] {
        assert_holds(&daemon, name, &bytes(step), "after a restart");
    }
    let [one, other] =
        ["step1.pt", "best.pt"].map(|name| fs::metadata(daemon.mount().join("run").join(name)).unwrap());
    assert_eq!((one.nlink(), one.ino()), (2, other.ino()), "they are one file as before");
}

#[test]
fn an_administrator_removes_what_may_go_and_is_told_why_the_rest_stays() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    saved(&daemon, 1..=4);
    for (step, why) in [("@3", "newest"), ("@4", "newest")] {
        let refused = daemon.ctl(&["rm", step]);
        assert_eq!(refused.status.code(), Some(1), "{}", shown(&refused));
        assert!(shown(&refused).contains(why), "{}", shown(&refused));
    }
    daemon.ctl_json(&["pin", "@2"]);
    let refused = daemon.ctl(&["rm", "@2"]);
    assert!(refused.status.code() == Some(1) && shown(&refused).contains("pinned"), "{}", shown(&refused));
    assert_holds(&daemon, &path(2), &bytes(2), "nothing was done");
    let removed = daemon.ctl_json(&["rm", "@1"]);
    assert_eq!((removed["versions"].as_u64(), removed["left"].as_u64()), (Some(1), Some(0)), "{removed:#}");
    assert!(!there(&daemon, 1) && objects(&daemon, 1) == 0);
    assert_eq!(daemon.ctl(&["rm", "@1"]).status.code(), Some(3));
    // The name is free, and its version numbers go on.
    save(&daemon, &path(1), &bytes(11));
    daemon.flush();
    assert_eq!(daemon.checkpoint(&path(1)).unwrap()["version"], 2);
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, &path(1), &bytes(11), "saved again");
    assert_holds(&daemon, &path(2), &bytes(2), "pinned");
}

/// The daemon dies at each step of a version's retirement. The version is then either whole or retired, and the next
/// daemon removes what is left of a retired one. Other versions stay unchanged.
#[test]
fn stopped_at_any_step_of_a_retirement_nothing_is_half_there() {
    for stop in ["retire.after_marker", "retire.after_boundary", "retire.after_first_delete"] {
        let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
        saved(&daemon, 1..=4);
        daemon.stop();
        daemon.set_env(STOP_AT, Some(&format!("{stop}:1")));
        daemon.start_again();
        // The daemon dies during the command, whose output does not matter.
        daemon.ctl(&["rm", "@1"]);
        let status = daemon.wait_for_death(DEATH_LIMIT).unwrap_or_else(|| panic!("{stop} was never reached"));
        assert_eq!(status.signal(), Some(9), "{stop}: {}", daemon.log_tail());
        assert!(objects(&daemon, 1) > 0, "{stop}: it died before the end");
        daemon.set_env(STOP_AT, None);
        daemon.start_again();
        assert!(!there(&daemon, 1), "{stop}: the retirement stands");
        process::until(LOOK_LIMIT, || (objects(&daemon, 1) == 0).then_some(()))
            .unwrap_or_else(|| panic!("{stop}: something is left\n{}", daemon.log_tail()));
        for step in 2..=4 {
            assert_holds(&daemon, &path(step), &bytes(step), stop);
        }
    }
}

/// Files that `verify` reads at once. Further files wait, so its list may be outdated when it verifies them.
const VERIFIED_AT_ONCE: u64 = 4;

/// A removed checkpoint is listed, and retired before its turn comes.
#[test]
fn a_checkpoint_that_is_given_up_while_verify_runs_is_not_said_to_be_lost() {
    let server = S3Server::start(S3Options::default()).expect("a server");
    let tier3 = Some(server.url("p"));
    let Some(daemon) = start(DaemonOptions { tier3, env: server.env(), ..options("256MiB", CONFIG) }) else {
        return;
    };
    saved(&daemon, 1..=6);
    fs::remove_file(daemon.mount().join(path(1))).unwrap();
    daemon.flush();
    // `verify` handles the checkpoints in the tree first, and reads their documents before it lists anything. The test
    // thus holds only the answers for their bytes.
    let objects = server.objects("p").unwrap();
    let bytes_of = |step: u64| objects.keys().find(|key| key.ends_with(&format!("/step{step}.pt")));
    let held: Vec<usize> = (2..=6)
        .map(|step| {
            let key_contains = bytes_of(step).expect("it was uploaded").clone();
            let (operation, effect) = (S3Operation::GetObject, FaultEffect::HeldUntilLifted);
            server.faults.add(Fault { operation, key_contains, nth: None, effect })
        })
        .collect();
    let verify = std::thread::scope(|scope| {
        let verify = scope.spawn(|| daemon.ctl(&["verify", "--deep", "-o", "json"]));
        let begun = || held.iter().map(|fault| server.faults.fired(*fault)).sum::<u64>() >= VERIFIED_AT_ONCE;
        let listed = process::until(LOOK_LIMIT, || begun().then_some(()));
        let removed = daemon.ctl(&["rm", &path(1)]);
        server.faults.lift();
        assert!(listed.is_some(), "verify reads nothing");
        assert!(removed.status.success(), "{}", shown(&removed));
        verify.join().expect("it does not panic")
    });
    let left = server.objects("p").unwrap();
    assert!(left.keys().all(|key| !key.ends_with("/step1.pt")), "it is given up: {:?}", left.keys());
    assert_eq!(verify.status.code(), Some(0), "nothing was lost: {}", shown(&verify));
    let said: Value = serde_json::from_slice(&verify.stdout).expect("JSON");
    assert_eq!((said["files"].as_u64(), said["bad_objects"].as_u64()), (Some(5), Some(0)), "{said:#}");
    assert!(problems(&daemon).is_empty(), "{:#?}", problems(&daemon));
    let events = events(&daemon);
    assert!(events.iter().all(|event| event["kind"] != "corrupt" && event["kind"] != "lost"), "{events:#?}");
    let again = daemon.ctl(&["verify", "--deep"]);
    assert!(again.status.success(), "{}", shown(&again));
}

//! Tier-3 is full, gone or refuses: saves go on, the lag is seen, and afterwards everything commits by itself.
//!
//! Owns: Tier-3 taken away under a live daemon, or under one that takes over, and given back. Does not own: single doubtful answers
//! (suite s3).

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::Value;
use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::s3::{Fault, FaultEffect, S3Operation, S3Options, S3Server};
use tidemark_tests::{machine, process, tier3};

use crate::site::{
    CONFIG, MIB, assert_holds, events, has_problem, lag_versions, noise, options, problems, save, start, tier,
};

/// Limit until the daemon reports the trouble. A failed upload is tried again with growing pauses, and the report comes well before this.
const NOTICE_LIMIT: Duration = Duration::from_secs(30);
/// Limit of the recovery: the longest pause between two tries, and the drain itself.
const RECOVERY_LIMIT: Duration = Duration::from_secs(90);

/// Waits until a status reports that Tier-3 is away, and that versions wait for it. Returns that problem.
fn wait_away(daemon: &Daemon) -> Value {
    let told = process::until(NOTICE_LIMIT, || {
        let status = daemon.ctl_json(&["status"]);
        let list = |name: &str| status[name].as_array().cloned().unwrap_or_default();
        let lag: u64 = list("runs").iter().filter_map(|run| run["lag_versions"].as_u64()).sum();
        let away = list("tiers").iter().any(|tier| tier["name"] == "tier3" && tier["state"] == "away");
        let problem = list("problems").into_iter().find(|problem| problem["code"] == "tier3_away")?;
        (away && lag > 0 && status["state"] == "degraded").then_some(problem)
    });
    told.unwrap_or_else(|| panic!("{:#}\n{}", daemon.ctl_json(&["status"]), daemon.log_tail()))
}

/// Waits until everything is committed, without a flush.
fn wait_back(daemon: &Daemon, paths: &[String]) {
    for path in paths {
        daemon.wait_committed(path, RECOVERY_LIMIT);
    }
    let healthy = process::until(NOTICE_LIMIT, || {
        (problems(daemon).is_empty() && lag_versions(daemon) == 0).then_some(())
    });
    assert!(healthy.is_some(), "{:#?}", problems(daemon));
    assert_eq!(tier(daemon, "tier3")["state"], "ok");
}

fn path(step: u64) -> String {
    format!("run/step{step}.pt")
}

fn bytes(step: u64) -> Vec<u8> {
    noise(1000 + step, 10 * MIB + 17)
}

fn save_steps(daemon: &Daemon, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        save(daemon, &path(step), &bytes(step));
    }
}

/// Starts a daemon with two steps that only Tier-3 has, and moves Tier-3's directory. Returns its proper place and its present one.
fn cold_with_tier3_aside() -> Option<(Daemon, [PathBuf; 2])> {
    let mut daemon = start(options("256MiB", CONFIG))?;
    save_steps(&daemon, 1..=2);
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    let (here, aside) = (daemon.tier3_dir(), daemon.scratch("aside").join("tier3"));
    fs::rename(&here, &aside).unwrap();
    Some((daemon, [here, aside]))
}

fn assert_all_come_back(mut daemon: Daemon, steps: std::ops::RangeInclusive<u64>) {
    daemon.stop();
    daemon.start_again();
    for step in steps {
        assert_holds(&daemon, &path(step), &bytes(step), "with empty memory");
    }
    daemon.stop();
}

#[test]
fn a_directory_that_goes_away_and_comes_back_costs_nothing() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    save_steps(&daemon, 1..=1);
    daemon.flush();
    let (here, aside) = (daemon.tier3_dir(), daemon.scratch("aside").join("tier3"));
    fs::rename(&here, &aside).unwrap();
    save_steps(&daemon, 2..=4);
    wait_away(&daemon);
    let output = daemon.ctl(&["flush", "--wait", "--timeout", "2"]);
    assert_eq!(output.status.code(), Some(5), "{}", shown(&output));
    save_steps(&daemon, 5..=6);
    for step in 1..=6 {
        assert_holds(&daemon, &path(step), &bytes(step), "while Tier-3 is away");
    }
    // An empty directory in its place (a mount that is gone) is not Tier-3. Commits into it would be lost.
    assert!(!here.exists(), "{} was made again by the daemon", here.display());
    fs::rename(&aside, &here).unwrap();
    wait_back(&daemon, &(2..=6).map(path).collect::<Vec<_>>());
    assert_all_come_back(daemon, 1..=6);
}

/// Most tries of one record while a foreign page answers for it, one every second while a flush waits. Without a pause, there would be
/// hundreds each second.
const PAGE_TRIES_MAX: u64 = 60;

/// A proxy that demands a password answers for the store, with success.
#[test]
fn a_page_of_others_in_place_of_tier3_is_away_and_decides_nothing() {
    let server = S3Server::start(S3Options::default()).expect("a server");
    let tier3 = Some(server.url("p"));
    let Some(daemon) = start(DaemonOptions { tier3, env: server.env(), ..options("256MiB", CONFIG) }) else {
        return;
    };
    save_steps(&daemon, 1..=1);
    daemon.flush();
    let page = |operation| {
        let (key_contains, effect) = ("attempt.json".to_owned(), FaultEffect::PageOfOthers);
        server.faults.add(Fault { operation, key_contains, nth: None, effect })
    };
    let [put, get, _] = [S3Operation::PutObject, S3Operation::GetObject, S3Operation::HeadObject].map(page);
    save_steps(&daemon, 2..=2);
    let problem = wait_away(&daemon);
    let what = problem["what"].as_str().unwrap_or_default();
    assert!(what.contains("no document of ours") && what.contains("<html>login"), "{problem}");
    let output = daemon.ctl(&["flush", "--wait", "--timeout", "2"]);
    assert_eq!(output.status.code(), Some(5), "{}", shown(&output));
    assert!(server.faults.fired(get) > 0, "it was read");
    assert!(server.faults.fired(put) <= PAGE_TRIES_MAX, "{} tries", server.faults.fired(put));
    let others = |event: &Value| event["what"].as_str().is_some_and(|what| what.contains("another writer"));
    assert!(!events(&daemon).iter().any(others), "nobody wrote anything: {:#?}", events(&daemon));
    server.faults.lift();
    wait_back(&daemon, &[path(2)]);
    assert_all_come_back(daemon, 1..=2);
}

/// Checkpoints that are read cold, verified or planned for while Tier-3 is away do not count as lost.
#[test]
fn a_directory_that_is_away_is_not_taken_for_lost_checkpoints() {
    let Some((daemon, [here, aside])) = cold_with_tier3_aside() else { return };
    // The directory looks as after `mv`, then as a mount point whose file system is gone.
    for moment in ["missing", "empty"] {
        if moment == "empty" {
            fs::create_dir(&here).unwrap();
        }
        fs::read(daemon.mount().join(path(2))).expect_err("its bytes are away");
        let verify = daemon.ctl(&["verify", "--deep"]);
        assert_eq!(verify.status.code(), Some(5), "{moment}: {}", shown(&verify));
        let plan = daemon.ctl(&["recover", "--plan"]);
        assert_eq!(plan.status.code(), Some(0), "{moment}: {}", shown(&plan));
        for code in ["lost", "object_corrupt"] {
            assert!(!has_problem(&daemon, code), "{moment}: {:#?}", problems(&daemon));
        }
        for step in 1..=2 {
            assert!(daemon.mount().join(path(step)).exists(), "{moment}: step {step} is out of sight");
        }
    }
    // Only an empty directory can be removed, so nothing was written below the mount point.
    fs::remove_dir(&here).unwrap();
    fs::rename(&aside, &here).unwrap();
    for step in 1..=2 {
        assert_holds(&daemon, &path(step), &bytes(step), "Tier-3 is back");
    }
    daemon.flush();
    let verify = daemon.ctl(&["verify", "--deep"]);
    assert!(verify.status.success(), "{}", shown(&verify));
    assert_all_come_back(daemon, 1..=2);
}

/// A directory with a size limit, unmounted when dropped.
struct SmallDisk {
    home: tempfile::TempDir,
}

impl SmallDisk {
    fn new(size: &str) -> Self {
        let disk = Self { home: tempfile::Builder::new().prefix("tidemark-").tempdir().unwrap() };
        disk.mount(&["-t", "tmpfs", "-o", &format!("size={size}"), "tidemark-test"]);
        disk
    }

    fn resize(&self, size: &str) {
        self.mount(&["-o", &format!("remount,size={size}")]);
    }

    fn mount(&self, arguments: &[&str]) {
        let output =
            process::run(Command::new("mount").args(arguments).arg(self.path()), Duration::from_secs(20));
        assert!(output.status.success(), "{}", shown(&output));
    }

    /// Takes all space that is left.
    fn fill(&self) {
        let mut filler = File::create(self.path().join("filler")).unwrap();
        while filler.write_all(&[7; 4096]).is_ok() {}
    }

    fn make_room(&self) {
        fs::remove_file(self.path().join("filler")).unwrap();
    }

    /// Remounts the disk. Tries repeatedly, because the daemon may have a file open for writing there just now.
    fn set_read_only(&self, read_only: bool) {
        let options = if read_only { "remount,ro" } else { "remount,rw" };
        let set = || {
            let mut command = Command::new("mount");
            let output =
                process::run(command.args(["-o", options]).arg(self.path()), Duration::from_secs(20));
            output.status.success().then_some(())
        };
        process::until(NOTICE_LIMIT, set).unwrap_or_else(|| panic!("it is not mounted with {options}"));
    }

    fn path(&self) -> &Path {
        self.home.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A failure leaves the temporary directory mounted. The test has its verdict by now.
        let _ = unmount(self.path(), UnmountFlags::DETACH);
    }
}

#[test]
fn a_tier3_that_fills_up_in_mid_upload_takes_everything_once_there_is_room() {
    if !machine::can_mount() {
        return;
    }
    let disk = SmallDisk::new("25m");
    let tier3 = Some(format!("file://{}", disk.path().display()));
    let daemon = Daemon::start(DaemonOptions { tier3, ..options("256MiB", CONFIG) });
    daemon.assert_passthrough();
    save_steps(&daemon, 1..=5);
    let problem = wait_away(&daemon);
    let what = problem["what"].as_str().unwrap_or_default().to_lowercase();
    assert!(what.contains("space") && problem["action"].as_str().is_some_and(|a| !a.is_empty()), "{problem}");
    // Small objects still get through, but Tier-3 does not count as well again.
    save(&daemon, "run/notes.txt", b"small");
    // A try that met a full disk used up its generation, so any generation may have the sidecar.
    let generations = disk.path().join(".tidemark/loose/run/notes.txt");
    let has_sidecar =
        || tier3::files_below(&generations).iter().any(|file| file.extension() == Some("json".as_ref()));
    process::until(NOTICE_LIMIT, || has_sidecar().then_some(())).expect("a small file has room");
    for _ in 0..20 {
        assert!(has_problem(&daemon, "tier3_away"), "a full store became well by a small file");
        std::thread::sleep(Duration::from_millis(50));
    }
    save_steps(&daemon, 6..=7);
    for step in 1..=7 {
        assert_holds(&daemon, &path(step), &bytes(step), "while Tier-3 is full");
    }
    disk.resize("400m");
    wait_back(&daemon, &(1..=7).map(path).collect::<Vec<_>>());
    for step in 1..=7 {
        assert_eq!(tier3::commits(disk.path(), &path(step)).len(), 1, "{}", path(step));
    }
    assert_all_come_back(daemon, 1..=7);
}

/// Saves step 3 and checks a daemon that took over and may not write to Tier-3. `why` is a word of the expected reason.
fn assert_serves_meanwhile(daemon: &Daemon, why: &str) {
    save_steps(daemon, 3..=3);
    let problem = wait_away(daemon);
    assert!(problem["what"].as_str().unwrap_or_default().contains(why), "{problem}");
    let output = daemon.ctl(&["flush", "--wait", "--timeout", "2"]);
    assert_eq!(output.status.code(), Some(5), "{}", shown(&output));
    for command in [&["gc"][..], &["rm", "run@1"]] {
        let output = daemon.ctl(command);
        assert_eq!(output.status.code(), Some(5), "{command:?}: {}", shown(&output));
        assert!(!shown(&output).contains("no daemon answers"), "{command:?}: {}", shown(&output));
    }
    assert!(daemon.checkpoint(&path(3)).is_some_and(|listed| listed["state"] != "committed"));
}

/// Kills a daemon whose steps 1 and 2 are in Tier-3 only, after `spoil` has made all writes to Tier-3 fail. Checks the next daemon.
fn takes_over_beside_what_can_only_be_read(spoil: impl Fn(&SmallDisk), mend: impl Fn(&SmallDisk), why: &str) {
    if !machine::can_mount() {
        return;
    }
    let disk = SmallDisk::new("45m");
    let tier3 = Some(format!("file://{}", disk.path().display()));
    let mut daemon = Daemon::start(DaemonOptions { tier3, ..options("256MiB", CONFIG) });
    daemon.assert_passthrough();
    save_steps(&daemon, 1..=2);
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    let epochs = || tier3::files_below(&disk.path().join(".tidemark/epoch")).len();
    let raised = epochs();
    spoil(&disk);
    let killed = daemon.kill_serving();
    daemon.wait_for_next(killed);
    for step in 1..=2 {
        assert_holds(&daemon, &path(step), &bytes(step), "cold, while Tier-3 can only be read");
        daemon.wait_committed(&path(step), NOTICE_LIMIT);
    }
    assert_serves_meanwhile(&daemon, why);
    assert_eq!(epochs(), raised, "an epoch was raised in a Tier-3 that takes nothing");
    mend(&disk);
    wait_back(&daemon, &(1..=3).map(path).collect::<Vec<_>>());
    assert!(epochs() > raised, "this daemon commits in an epoch of its own");
    for step in 1..=3 {
        assert_eq!(tier3::commits(disk.path(), &path(step)).len(), 1, "{}", path(step));
    }
    assert_all_come_back(daemon, 1..=3);
}

#[test]
fn a_daemon_that_takes_over_while_tier3_is_full_serves_and_commits_once_there_is_room() {
    takes_over_beside_what_can_only_be_read(SmallDisk::fill, SmallDisk::make_room, "full");
}

#[test]
fn a_daemon_that_takes_over_while_tier3_is_read_only_serves_and_commits_once_it_is_not() {
    let spoil = |disk: &SmallDisk| disk.set_read_only(true);
    let mend = |disk: &SmallDisk| disk.set_read_only(false);
    takes_over_beside_what_can_only_be_read(spoil, mend, "read-only");
}

/// Commands are answered, saves go on, and a read of a file that is only in Tier-3 waits a bounded time.
#[test]
fn a_daemon_that_takes_over_while_tier3_is_away_answers_and_goes_on_by_itself() {
    let Some((daemon, [here, aside])) = cold_with_tier3_aside() else { return };
    // A file in its place keeps any directory from being made there.
    fs::write(&here, b"").unwrap();
    let killed = daemon.kill_serving();
    daemon.wait_for_next(killed);
    let cold = daemon.mount().join(path(1));
    let reads = std::thread::spawn(move || fs::read(cold));
    assert_serves_meanwhile(&daemon, "Tier-3");
    // An exchange leaves no moment without Tier-3's directory.
    renameat_with(CWD, &aside, CWD, &here, RenameFlags::EXCHANGE).unwrap();
    wait_back(&daemon, &(1..=3).map(path).collect::<Vec<_>>());
    assert!(reads.join().unwrap().unwrap() == bytes(1), "a cold read that waited for Tier-3");
    assert_all_come_back(daemon, 1..=3);
}

/// The right to commit takes longer than a start waits for it. Nothing has failed, and committed files are read meanwhile.
#[test]
fn a_daemon_that_takes_over_while_tier3_is_slow_says_nothing_of_it_and_serves_what_is_committed() {
    let server = S3Server::start(S3Options::default()).expect("a server");
    let tier3 = Some(server.url("p"));
    let Some(mut daemon) = start(DaemonOptions { tier3, env: server.env(), ..options("256MiB", CONFIG) })
    else {
        return;
    };
    save_steps(&daemon, 1..=1);
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    let (operation, effect) = (S3Operation::PutObject, FaultEffect::HeldUntilLifted);
    let key_contains = ".tidemark/epoch/".to_owned();
    let raised = server.faults.add(Fault { operation, key_contains, nth: None, effect });
    let killed = daemon.kill_serving();
    daemon.wait_for_next(killed);
    assert!(!has_problem(&daemon, "tier3_away"), "{:#?}", problems(&daemon));
    let gc = daemon.ctl(&["gc"]);
    assert_eq!(gc.status.code(), Some(5), "{}", shown(&gc));
    assert!(shown(&gc).contains("is being read") && !shown(&gc).contains("repair"), "{}", shown(&gc));
    assert_holds(&daemon, &path(1), &bytes(1), "cold, while the right is waited for");
    assert!(!has_problem(&daemon, "tier3_away"), "{:#?}", problems(&daemon));
    assert!(server.faults.fired(raised) > 0, "the right was not waited for");
    server.faults.lift();
    save_steps(&daemon, 2..=2);
    wait_back(&daemon, &[path(1), path(2)]);
    assert_all_come_back(daemon, 1..=2);
}

#[test]
fn a_start_with_empty_memory_says_that_tier3_is_full() {
    if !machine::can_mount() {
        return;
    }
    let disk = SmallDisk::new("1m");
    disk.fill();
    let tier3 = Some(format!("file://{}", disk.path().display()));
    let refused = Daemon::start_refused(DaemonOptions { tier3, ..options("64MiB", CONFIG) });
    assert_eq!(refused.status.code(), Some(5), "{}", shown(&refused));
    assert!(shown(&refused).contains("Tier-3 is full"), "{}", shown(&refused));
}

#[test]
fn memory_that_fills_up_while_tier3_is_away_refuses_saves_and_loses_nothing() {
    let Some(daemon) = start(options("128MiB", CONFIG)) else { return };
    save_steps(&daemon, 1..=1);
    daemon.flush();
    let (here, aside) = (daemon.tier3_dir(), daemon.scratch("aside").join("tier3"));
    fs::rename(&here, &aside).unwrap();
    let mut saved = vec![1];
    let mut refused = None;
    for step in 2..30 {
        let target = daemon.mount().join(path(step));
        match fs::write(&target, bytes(step)) {
            Ok(()) => saved.push(step),
            Err(error) => {
                refused = Some(error);
                // The job cleans up after a failed save. A create that was refused left no name behind.
                match fs::remove_file(&target) {
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    removed => removed.unwrap(),
                }
                break;
            }
        }
    }
    let refused = refused.expect("128 MiB do not hold 300");
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC), "{refused}");
    assert!(saved.len() >= 8, "only {saved:?} fitted");
    wait_away(&daemon);
    // By now the first is in Tier-3 only, which is away. All others can be read.
    for step in saved.iter().skip(1) {
        assert_holds(&daemon, &path(*step), &bytes(*step), "in a full memory");
    }
    fs::rename(&aside, &here).unwrap();
    wait_back(&daemon, &saved.iter().map(|step| path(*step)).collect::<Vec<_>>());
    for step in 40..=42 {
        save_steps(&daemon, step..=step);
        daemon.flush();
    }
    for step in saved.into_iter().chain(40..=42) {
        assert_holds(&daemon, &path(step), &bytes(step), "after Tier-3 came back");
    }
}

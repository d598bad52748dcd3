//! A job that removes its old checkpoint before it writes the new one, and dies between the two.
//!
//! Owns: the checkpoint that the job's next life finds, by the process that removed it and that process's end. Does not own: a
//! removal's meaning for a restart and for Tier-3 (`wishes`, `keeping`).
//!
//! The job is Perl, which every Debian has: the shell cannot remove a file by itself.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::{process, tier3};

use crate::site::{CONFIG, assert_holds, events, lag_versions, names, noise, options, save, start};

const LIMIT: Duration = Duration::from_secs(20);
/// Duration of several checks of the daemon. A checkpoint that is not back by then stays removed.
const STAYS: Duration = Duration::from_millis(2500);

/// Limit until the tree is written, which happens every 10 s when no flush waits for it.
const TREE_LIMIT: Duration = Duration::from_secs(40);

const OLD: &str = "project/checkpoints/checkpoint_0";
const NAMES: [&str; 3] = ["model.safetensors", "optimizer.bin", "random_states_0.pkl"];

fn bytes(name: &str) -> Vec<u8> {
    noise(name.len() as u64, 300_000)
}

fn save_all(daemon: &Daemon, path: &str) {
    for name in NAMES {
        save(daemon, &format!("{path}/{name}"), &bytes(name));
    }
    daemon.flush();
}

fn is_back(daemon: &Daemon, path: &str) {
    for name in NAMES {
        assert_holds(daemon, &format!("{path}/{name}"), &bytes(name), "it is back");
    }
}

fn wait_back(daemon: &Daemon, path: &str) {
    let last = daemon.mount().join(path).join(NAMES[2]);
    process::until(LIMIT, || last.exists().then_some(()))
        .unwrap_or_else(|| panic!("{path} stays removed: {:#?}", events(daemon)));
    is_back(daemon, path);
}

/// Runs `script` in the directory of the checkpoints, and waits until it has printed a line.
fn job(daemon: &Daemon, script: &str) -> Child {
    let mut command = Command::new("perl");
    command.args(["-e", &format!("$| = 1; {script}")]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let directory = daemon.mount().join(OLD);
    let mut child =
        command.current_dir(directory.parent().expect("it has one")).spawn().expect("perl starts");
    let mut line = String::new();
    let said = BufReader::new(child.stdout.take().expect("it is piped")).read_line(&mut line);
    assert!(said.is_ok() && line == "removed\n", "{script}: {line}");
    child
}

/// Removes as rmtree does, then writes the first file of the next checkpoint, and prints a word.
const REMOVE_AND_WRITE: &str = "unlink glob('checkpoint_0/*'); rmdir 'checkpoint_0' or die; mkdir 'checkpoint_1'; \
     open(F, '>', 'checkpoint_1/model.safetensors'); syswrite(F, 'x' x 70000); print \"removed\\n\"; <STDIN>;";
const REMOVE: &str =
    "unlink glob('checkpoint_0/*'); rmdir 'checkpoint_0' or die; print \"removed\\n\"; <STDIN>;";

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn the_only_checkpoint_is_back_when_who_removed_it_is_killed_before_the_next_is_whole() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    save_all(&daemon, OLD);
    let checkpoints = daemon.mount().join(OLD).parent().unwrap().to_owned();
    let trainer = job(&daemon, REMOVE_AND_WRITE);
    std::thread::sleep(STAYS);
    assert_eq!(names(&checkpoints), ["checkpoint_1"], "its writer lives");
    kill(trainer);
    wait_back(&daemon, OLD);
    let gone = || (names(&checkpoints) == ["checkpoint_0"]).then_some(());
    process::until(LIMIT, gone).unwrap_or_else(|| panic!("{:?}", names(&checkpoints)));
    let said = events(&daemon).into_iter().any(|event| {
        event["kind"] == "undeleted"
            && event["what"].as_str().is_some_and(|what| what.contains("removed it, and failed"))
    });
    assert!(said, "{:#?}", events(&daemon));

    // The trainer dies in the middle of the removal, whose remaining names could pass for the whole checkpoint.
    let trainer = job(&daemon, "unlink 'checkpoint_0/optimizer.bin'; print \"removed\\n\"; <STDIN>;");
    assert_eq!(names(&daemon.mount().join(OLD)), [NAMES[0], NAMES[2]]);
    kill(trainer);
    let whole = daemon.mount().join(OLD).join(NAMES[1]);
    process::until(LIMIT, || whole.exists().then_some(())).expect("the name is back");
    is_back(&daemon, OLD);
}

/// The node is lost right after the job. Between the two, a flush asked for durability, or the daemon was told to end.
#[test]
fn it_is_back_although_the_node_goes_right_after_who_removed_it() {
    let config = format!("{CONFIG}[shutdown]\ngrace_s = 1\n");
    for round in 0..6 {
        let Some(mut daemon) = start(options("256MiB", &config)) else { return };
        save_all(&daemon, OLD);
        let trainer = job(&daemon, REMOVE_AND_WRITE);
        assert!(!daemon.mount().join(OLD).exists());
        match round % 3 {
            0 => {
                kill(trainer);
                let flushed = shown(&daemon.ctl(&["flush", "--wait", "--timeout", "20"]));
                assert!(flushed.contains("torn") && !flushed.contains("timed out"), "{flushed}");
                daemon.kill9();
            }
            1 => {
                kill(trainer);
                daemon.stop_with_status();
            }
            _ => {
                // The end of the daemon cuts off the save that was to replace the removed checkpoint.
                daemon.stop_with_status();
                kill(trainer);
            }
        }
        daemon.start_again();
        is_back(&daemon, OLD);
    }
}

/// The next save begins in the removed checkpoint's directory. Files kept of that save are no checkpoint that could replace the old one.
#[test]
fn it_is_back_although_its_next_save_was_begun_in_its_place_when_the_daemon_ended() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    save_all(&daemon, OLD);
    let begin = "unlink glob('checkpoint_0/*'); open(F, '>', 'checkpoint_0/model-00001-of-00003.safetensors'); \
         syswrite(F, 'x' x 70000); close(F); print \"removed\\n\"; <STDIN>;";
    kill(job(&daemon, begin));
    daemon.stop_with_status();
    daemon.start_again();
    is_back(&daemon, OLD);
}

#[test]
fn a_removal_that_was_meant_stands() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let there = |path: &str| daemon.mount().join(path).exists();
    // A person removes it: rm(1) ends well, or complains of a missing name.
    for command in ["rm -r checkpoint_0", "rm -r checkpoint_0 checkpoint_9; test $? = 1"] {
        save_all(&daemon, OLD);
        let directory = daemon.mount().join(OLD).parent().unwrap().to_owned();
        let status = Command::new("sh").args(["-c", command]).current_dir(&directory).status().unwrap();
        assert!(status.success(), "{command}");
        std::thread::sleep(STAYS);
        assert!(!there(OLD), "{command}");
    }
    // A job removes it and ends well without another checkpoint.
    save_all(&daemon, OLD);
    let mut ends_well = job(&daemon, REMOVE);
    drop(ends_well.stdin.take());
    assert!(ends_well.wait().unwrap().success());
    std::thread::sleep(STAYS);
    assert!(!there(OLD));
    // A job removes it and is killed after another checkpoint was whole.
    save_all(&daemon, OLD);
    let trainer = job(&daemon, REMOVE);
    save_all(&daemon, "project/checkpoints/checkpoint_1");
    kill(trainer);
    std::thread::sleep(STAYS);
    assert!(!there(OLD));
    // Without that other checkpoint, the same death brings it back, so the wait was long enough.
    fs::remove_dir_all(daemon.mount().join("project/checkpoints/checkpoint_1")).unwrap();
    save_all(&daemon, OLD);
    kill(job(&daemon, REMOVE));
    wait_back(&daemon, OLD);
}

/// The job's last save is hashed and verified only after the job's death.
#[test]
fn a_removal_stands_when_who_removed_it_is_killed_right_after_the_next_was_whole() {
    const SAVE_AND_REMOVE: &str = "my ($old, $new) = @ARGV; mkdir \"$new.tmp\"; \
         for (1 .. 400) { open(F, '>', \"$new.tmp/part-$_.bin\"); syswrite(F, 'x' x 20000); close(F) or die } \
         rename(\"$new.tmp\", $new) or die; unlink glob(\"$old/*\"); rmdir($old) or die; kill 'KILL', $$;";
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    save_all(&daemon, OLD);
    let directory = daemon.mount().join(OLD).parent().unwrap().to_owned();
    for step in 0..6 {
        let [old, new] = [step, step + 1].map(|step| format!("checkpoint_{step}"));
        let mut job = Command::new("perl");
        job.args(["-e", SAVE_AND_REMOVE, &old, &new]).current_dir(&directory);
        let status = job.status().unwrap();
        assert_eq!(status.signal(), Some(9), "{status}");
        // The flush ends when the job's end is known and the next checkpoint is committed.
        daemon.flush();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(names(&directory), [new.as_str()], "{:#?}", events(&daemon));
    }
}

#[test]
fn the_death_of_the_node_does_not_make_a_removal_meant() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    save_all(&daemon, OLD);
    let trainer = job(&daemon, REMOVE);
    // The tree is written while the process that removed it lives.
    let trees = || tier3::files_below(&daemon.tier3_dir().join(".tidemark/tree")).len();
    let before = trees();
    fs::create_dir(daemon.mount().join("made-after-it")).unwrap();
    process::until(TREE_LIMIT, || (trees() > before).then_some(())).expect("the tree is written");
    daemon.kill9();
    kill(trainer);
    daemon.start_again();
    assert!(daemon.mount().join("made-after-it").exists(), "the tree was written after the removal");
    is_back(&daemon, OLD);
}

/// The next checkpoint is whole, but only in memory.
#[test]
fn a_removal_is_in_tier3_no_sooner_than_what_replaces_what_was_removed() {
    let config = format!("{CONFIG}[shutdown]\ndrain_timeout_s = 3\n");
    for is_killed in [true, false] {
        let Some(mut daemon) = start(options("256MiB", &config)) else { return };
        let run = daemon.mount().join("run");
        save(&daemon, "run/step1.pt", &bytes("step1"));
        daemon.wait_committed("run/step1.pt", LIMIT);
        // Nothing can be written below this file.
        let held = daemon.tier3_dir().join("run/step2.pt");
        fs::write(&held, "").unwrap();
        save(&daemon, "run/step2.pt", &bytes("step2"));
        process::until(LIMIT, || (lag_versions(&daemon) > 0).then_some(())).expect("it is whole");
        fs::remove_file(run.join("step1.pt")).unwrap();
        if is_killed {
            let trees = || tier3::files_below(&daemon.tier3_dir().join(".tidemark/tree")).len();
            let before = trees();
            fs::create_dir(daemon.mount().join("made-after-it")).unwrap();
            process::until(TREE_LIMIT, || (trees() > before).then_some(())).expect("the tree is written");
            daemon.kill9();
        } else {
            assert_eq!(daemon.stop_with_status().code(), Some(1), "it was in memory only");
        }
        fs::remove_file(&held).unwrap();
        daemon.start_again();
        assert_eq!(daemon.mount().join("made-after-it").exists(), is_killed);
        assert_eq!(names(&run), ["step1.pt"], "all that Tier-3 has");
        assert_holds(&daemon, "run/step1.pt", &bytes("step1"), "its removal waited");
    }
}

/// The checkpoint that was to replace it is removed as well, so the removal of both counts.
#[test]
fn a_removal_does_not_wait_for_what_was_removed_too() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    save(&daemon, "run/step1.pt", &bytes("step1"));
    daemon.wait_committed("run/step1.pt", LIMIT);
    fs::write(daemon.tier3_dir().join("run/step2.pt"), "").unwrap();
    save(&daemon, "run/step2.pt", &bytes("step2"));
    process::until(LIMIT, || (lag_versions(&daemon) > 0).then_some(())).expect("it is whole");
    let rm = Command::new("rm").arg("-r").arg(&run).status().unwrap();
    assert!(rm.success());
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    assert!(!run.exists(), "{:?}", names(&run));
}

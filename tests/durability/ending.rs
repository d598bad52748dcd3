//! SIGTERM: complete checkpoints become durable, incomplete ones are named, and the end comes in bounded time.
//!
//! Owns: the exit status and the content of Tier-3 afterwards. Does not own: deaths without a request (suite crash).

use std::fs::{self, File};
use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::{machine, process, tier3};

use crate::shield::Rank;
use crate::site::{
    CONFIG, MIB, assert_holds, events, has_problem, names, noise, open_for_update, options, problems, save,
    start,
};

/// Returns a configuration with a short wait for files that a program never closes, or never completes.
fn short_grace() -> String {
    format!("{CONFIG}[shutdown]\ngrace_s = 1\n")
}

#[test]
fn sigterm_commits_what_is_complete_and_exits_0() {
    let config = "[save]\nsettle_s = 2.0\n[tier3]\npaced = true\n";
    let Some(mut daemon) = start(options("256MiB", config)) else { return };
    let (bytes, notes) = (noise(1, 60 * MIB + 5), b"loose beside it".as_slice());
    for step in 1..=2 {
        save(&daemon, &format!("run/step{step}.pt"), &bytes);
    }
    save(&daemon, "run/notes.txt", notes);
    // Right after the save, nothing has settled or been uploaded.
    assert!(tier3::markers(&daemon.tier3_dir(), "run/step2.pt").is_empty());
    daemon.stop();
    for step in 1..=2 {
        assert_eq!(tier3::commits(&daemon.tier3_dir(), &format!("run/step{step}.pt")).len(), 1);
    }
    daemon.start_again();
    for step in 1..=2 {
        assert_holds(&daemon, &format!("run/step{step}.pt"), &bytes, "after SIGTERM");
    }
    assert_holds(&daemon, "run/notes.txt", notes, "after SIGTERM");
    daemon.stop();
}

/// Memory in a folder would outlive the process, and nothing would free it.
#[test]
fn memory_in_a_folder_goes_with_the_node_s_life_and_stays_over_a_daemon_s_death() {
    if !machine::can_mount() {
        return;
    }
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let lives = || fs::read_dir(memory.path()).unwrap().count();
    let config = format!("{}[tier1]\ndirectory = \"{}\"\n", short_grace(), memory.path().display());
    let occupied = tempfile::tempdir().unwrap();
    fs::write(occupied.path().join("somebody-s"), b"stays").unwrap();
    let options = options("128MiB", &config);
    let refused = DaemonOptions { mountpoint: Some(occupied.path().to_owned()), ..options.clone() };
    let output = Daemon::start_refused(refused);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert_eq!(lives(), 0, "after a start whose mount was refused: {}", shown(&output));

    let mut daemon = Daemon::start(options);
    let bytes = noise(41, 9 * MIB);
    save(&daemon, "run/step1.pt", &bytes);
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    assert_eq!(lives(), 1, "the next daemon goes on with it");
    assert_holds(&daemon, "run/step1.pt", &bytes, "in memory");
    daemon.stop();
    assert_eq!(lives(), 0, "after a planned stop");

    daemon.start_again();
    let mut open = File::create(daemon.mount().join("run/step2.pt")).unwrap();
    open.write_all(&bytes).unwrap();
    assert_eq!(daemon.stop_with_status().code(), Some(1), "{}", daemon.log_tail());
    assert_eq!(lives(), 0, "after a stop that not all of it survived");
}

#[test]
fn sigterm_with_a_file_open_for_writing_names_it_and_exits_1() {
    let Some(mut daemon) = start(options("256MiB", &short_grace())) else { return };
    let bytes = noise(2, 9 * MIB);
    save(&daemon, "run/step1.pt", &bytes);
    let mut open = File::create(daemon.mount().join("run/step2.pt")).unwrap();
    open.write_all(&bytes).unwrap();
    let begun = Instant::now();
    let status = daemon.stop_with_status();
    assert_eq!(status.code(), Some(1), "{}", daemon.log_tail());
    assert!(begun.elapsed() < Duration::from_secs(30), "an open file is not waited for to the end of time");
    assert!(daemon.log().contains("run/step2.pt"), "{}", daemon.log_tail());
    drop(open);
    assert_eq!(tier3::commits(&daemon.tier3_dir(), "run/step1.pt").len(), 1);
    assert!(tier3::markers(&daemon.tier3_dir(), "run/step2.pt").is_empty());
    daemon.start_again();
    assert_holds(&daemon, "run/step1.pt", &bytes, "complete before SIGTERM");
    assert!(open_for_update(&daemon.mount().join("run/step2.pt")).is_err(), "half a file is not there");
    assert_holds(&daemon, ".tidemark/torn/run/step2.pt", &bytes, "as far as it was written");
    daemon.stop_with_status();
}

/// A file that a program has open or mapped at the end is kept up to the bytes written, and does not count as whole.
#[test]
fn what_is_open_after_the_grace_is_kept_as_cut() {
    let Some(mut daemon) = start(options("256MiB", &short_grace())) else { return };
    let bytes = noise(31, 5 * MIB + 3);
    let mount = daemon.mount().to_owned();
    for run in ["first", "of_parts/step-1"] {
        fs::create_dir_all(mount.join(run)).unwrap();
    }
    // The paths are the first save of a run, a shard of another, a partial download, and a file written through a mapping.
    let paths = ["first/step5.pt", "of_parts/step-1/__0_0.distcp", "first/corpus.bin.part", "first/step6.pt"];
    let script = "import mmap, os, sys
data = sys.stdin.buffer.read(int(sys.argv[1]))
*names, mapped = sys.argv[2:]
files = [os.open(name, os.O_CREAT | os.O_WRONLY) for name in names]
for file in files: assert os.write(file, data) == len(data)
file = os.open(mapped, os.O_CREAT | os.O_RDWR)
os.truncate(mapped, len(data))
mapping = mmap.mmap(file, len(data))
mapping[:] = data
print('written', flush=True)
sys.stdin.read()
for file in files:
    try: os.close(file)
    except OSError as error: print(error.errno)";
    let mut job = Command::new("python3")
        .args(["-c", script, &bytes.len().to_string()])
        .args(paths.iter().map(|path| mount.join(path)))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = job.stdin.take().unwrap();
    stdin.write_all(&bytes).unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(job.stdout.take().unwrap()));
    assert_eq!(lines.next().unwrap().unwrap(), "written");
    let status = daemon.stop_with_status();
    assert_eq!(status.code(), Some(1), "{}", daemon.log_tail());
    drop(stdin);
    assert_eq!(lines.count(), 3, "whoever closes too late is told");
    assert!(job.wait().unwrap().success());
    daemon.start_again();
    assert!(!has_problem(&daemon, "unclean_end"), "all of it is in Tier-3: {:#?}", problems(&daemon));
    for path in paths {
        assert_holds(&daemon, path, &bytes, "as far as it was written");
    }
    let flushed = daemon.ctl(&["flush", "--wait", "--timeout", "20"]);
    for path in ["first/step5.pt", "first/step6.pt", "of_parts/step-1"] {
        assert!(tier3::markers(&daemon.tier3_dir(), path).is_empty(), "{path}: {}", shown(&flushed));
    }
    daemon.stop_with_status();
}

#[test]
fn sigterm_keeps_the_sealed_files_of_what_is_not_complete() {
    let Some(mut daemon) = start(options("256MiB", &short_grace())) else { return };
    let shards = [noise(11, 3 * MIB + 1), noise(12, MIB)];
    // A job can load this checkpoint instead. Without it, the torn ones would stay visible.
    save(&daemon, "dcp/whole_step0.pt", &noise(10, MIB));
    daemon.wait_committed("dcp/whole_step0.pt", Duration::from_secs(60));
    // The first checkpoint never gets its index. The second has its last shard still open.
    for (number, bytes) in shards.iter().enumerate() {
        save(&daemon, &format!("dcp/step-1/__{number}_0.distcp"), bytes);
    }
    save(&daemon, "dcp/step-2/__0_0.distcp", &shards[0]);
    let mut open = File::create(daemon.mount().join("dcp/step-2/__1_0.distcp")).unwrap();
    open.write_all(&shards[1]).unwrap();
    let changed = |daemon: &Daemon| fs::metadata(daemon.mount().join("dcp")).unwrap().modified().unwrap();
    let before = changed(&daemon);
    let begun = Instant::now();
    let status = daemon.stop_with_status();
    assert_eq!(status.code(), Some(1), "{}", daemon.log_tail());
    assert!(begun.elapsed() < Duration::from_secs(30), "what cannot become complete is not waited for");
    drop(open);
    for step in ["dcp/step-1", "dcp/step-2"] {
        assert!(daemon.log().contains(step), "{}", daemon.log_tail());
        assert!(tier3::markers(&daemon.tier3_dir(), step).is_empty());
    }
    daemon.start_again();
    let kept = |daemon: &Daemon, when: &str| {
        for (number, bytes) in shards.iter().enumerate() {
            assert_holds(daemon, &format!(".tidemark/torn/dcp/step-1/__{number}_0.distcp"), bytes, when);
        }
        for (number, bytes) in shards.iter().enumerate() {
            assert_holds(daemon, &format!(".tidemark/torn/dcp/step-2/__{number}_0.distcp"), bytes, when);
        }
        // A job that comes back would load the highest visible step.
        assert_eq!(names(&daemon.mount().join("dcp")), ["whole_step0.pt"], "{when}");
        // Jobs rotate by these times, so hiding must not change them.
        assert_eq!(changed(daemon), before, "{when}");
        assert_eq!(daemon.checkpoints().len(), 3, "each is listed once, {when}");
        never_taken_for_whole(daemon, &["dcp/step-1", "dcp/step-2"]);
    };
    kept(&daemon, "sealed before SIGTERM");
    daemon.stop_with_status();
    daemon.start_again();
    kept(&daemon, "after another restart");

    // A person may want the torn checkpoint back as it is.
    let undeleted = daemon.ctl(&["undelete", ".tidemark/torn/dcp/step-1"]);
    assert!(undeleted.status.success(), "{}", shown(&undeleted));
    let verified = daemon.ctl_json(&["verify", "--deep"]);
    assert_eq!(verified["files"], 5, "out of sight or not: {verified:#}");
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    assert_eq!(
        names(&daemon.mount().join("dcp")),
        ["step-1", "whole_step0.pt"],
        "the next daemon leaves it, and what is hidden"
    );
    assert_holds(&daemon, ".tidemark/torn/dcp/step-2/__0_0.distcp", &shards[0], "after a takeover");
}

/// A node is preempted in the middle of a save: its trainer is killed, its daemon told to end. The job comes back elsewhere.
#[test]
fn after_a_preemption_the_job_finds_the_newest_whole_save_and_a_tracker_that_names_it() {
    let Some(mut daemon) = start(options("256MiB", &short_grace())) else { return };
    let run = daemon.mount().join("run");
    for rank in 0..2 {
        save(
            &daemon,
            &format!("run/global_step10/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"),
            &noise(rank, MIB),
        );
    }
    save(&daemon, "run/global_step10/mp_rank_00_model_states.pt", &noise(9, MIB));
    save(&daemon, "run/latest", b"global_step10");
    daemon.flush();
    // Rank 0's part is whole, rank 1's is not, and `latest` was written without a barrier.
    let cut = run.join("global_step20/zero_pp_rank_1_mp_rank_00_optim_states.pt");
    save(&daemon, "run/global_step20/zero_pp_rank_0_mp_rank_00_optim_states.pt", &noise(3, MIB));
    save(&daemon, "run/latest", b"global_step20");
    let mut open = File::create(&cut).unwrap();
    open.write_all(b"half of it").unwrap();
    daemon.stop_with_status();
    drop(open);

    daemon.start_again();
    assert_eq!(names(&run), ["global_step10", "latest"], "before anybody can look");
    assert_holds(&daemon, "run/global_step10/mp_rank_00_model_states.pt", &noise(9, MIB), "whole");
    let follows = || (fs::read(run.join("latest")).ok()? == b"global_step10").then_some(());
    process::until(Duration::from_secs(20), follows).unwrap_or_else(|| panic!("{:#?}", events(&daemon)));
    let kinds: Vec<_> = events(&daemon).into_iter().map(|event| event["kind"].clone()).collect();
    assert!(kinds.contains(&"hidden".into()) && kinds.contains(&"tracker".into()), "{kinds:?}");
    // The step is saved again, and the new save counts.
    for rank in 0..2 {
        save(
            &daemon,
            &format!("run/global_step20/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"),
            &noise(5 + rank, MIB),
        );
    }
    save(&daemon, "run/global_step20/mp_rank_00_model_states.pt", &noise(8, MIB));
    save(&daemon, "run/latest", b"global_step20");
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    assert_holds(
        &daemon,
        "run/global_step20/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        &noise(6, MIB),
        "saved anew",
    );
    assert_holds(&daemon, "run/latest", b"global_step20", "saved anew");
}

#[test]
fn sigterm_keeps_what_was_closed_beside_a_file_whose_writer_was_killed() {
    let Some(mut daemon) = start(options("256MiB", &short_grace())) else { return };
    let bytes = noise(13, MIB);
    save(&daemon, "run/step5.pt", &bytes);
    daemon.wait_committed("run/step5.pt", Duration::from_secs(60));
    let cut = daemon.mount().join("run/step_7/model_rank1.pt");
    fs::create_dir_all(cut.parent().unwrap()).unwrap();
    // The file is open meanwhile, because a checkpoint that a program still writes is not hidden.
    let mut whole = File::create(cut.with_file_name("model_rank0.pt")).unwrap();
    // The shell is killed with the file open, so no close was seen.
    let script = format!("exec 3>{}; head -c 5000 /dev/zero >&3; kill -9 $$", cut.display());
    Command::new("sh").args(["-c", &script]).status().unwrap();
    whole.write_all(&bytes).unwrap();
    drop(whole);
    daemon.stop_with_status();
    daemon.start_again();
    assert_holds(&daemon, ".tidemark/torn/run/step_7/model_rank0.pt", &bytes, "sealed before SIGTERM");
    assert_eq!(
        names(&daemon.mount().join(".tidemark/torn/run/step_7")),
        ["model_rank0.pt", "model_rank1.pt"],
        "with what was written of the other"
    );
    never_taken_for_whole(&daemon, &["run/step_7"]);
}

/// Checks that the checkpoints are listed as torn, are never the latest, and that no flush commits them.
fn never_taken_for_whole(daemon: &Daemon, paths: &[&str]) {
    let output = daemon.ctl(&["flush", "--wait", "--timeout", "20"]);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    for path in paths {
        assert!(shown(&output).contains(path), "{path} is not named: {}", shown(&output));
        let listed = daemon.checkpoint(&format!(".tidemark/torn/{path}"));
        let listed = listed.unwrap_or_else(|| panic!("{path} is not listed"));
        assert_eq!(listed["state"], "torn", "{listed:#}");
        assert!(tier3::markers(&daemon.tier3_dir(), path).is_empty());
    }
    let status = daemon.ctl_json(&["status"]);
    for run in status["runs"].as_array().into_iter().flatten() {
        for pointer in ["latest", "recoverable", "watermark"] {
            assert!(paths.iter().all(|path| run[pointer]["path"] != *path), "{run:#}");
        }
    }
}

#[test]
fn sigterm_gives_up_after_the_drain_timeout_and_names_what_is_not_durable() {
    let config = format!("{CONFIG}[shutdown]\ndrain_timeout_s = 3\n");
    let Some(mut daemon) = start(options("256MiB", &config)) else { return };
    save(&daemon, "run/step1.pt", &noise(3, MIB));
    daemon.flush();
    fs::rename(daemon.tier3_dir(), daemon.scratch("aside").join("tier3")).unwrap();
    save(&daemon, "run/step2.pt", &noise(4, MIB));
    let begun = Instant::now();
    let status = daemon.stop_with_status();
    assert_eq!(status.code(), Some(1), "{}", daemon.log_tail());
    let taken = begun.elapsed();
    assert!((3..20).contains(&taken.as_secs()), "it took {:.1} s", taken.as_secs_f64());
    assert!(daemon.log().contains("run/step2.pt"), "{}", daemon.log_tail());
}

#[test]
fn a_second_sigterm_ends_at_once() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    fs::rename(daemon.tier3_dir(), daemon.scratch("aside").join("tier3")).unwrap();
    save(&daemon, "run/step1.pt", &noise(5, MIB));
    let pid = daemon.keeper_pid();
    let begun = Instant::now();
    let second = std::thread::spawn(move || {
        // After the first SIGTERM is handled, the drain waits 60 s for a Tier-3 that is away.
        std::thread::sleep(Duration::from_secs(2));
        process::signal(pid, Signal::TERM);
    });
    let status = daemon.stop_with_status();
    second.join().expect("the second signal was sent");
    assert_eq!(status.code(), Some(1), "{}", daemon.log_tail());
    let taken = begun.elapsed();
    assert!((2..15).contains(&taken.as_secs()), "it took {:.1} s", taken.as_secs_f64());
}

#[test]
fn new_files_are_refused_after_the_grace_and_open_ones_are_written_on() {
    let config = format!("{CONFIG}[shutdown]\ndrain_timeout_s = 6\ngrace_s = 2\n");
    let Some(mut daemon) = start(options("256MiB", &config)) else { return };
    save(&daemon, "run/step1.pt", &noise(6, MIB));
    let mut open = File::create(daemon.mount().join("run/open.bin")).unwrap();
    // Tier-3 is away, so that the drain waits until its time is up.
    fs::rename(daemon.tier3_dir(), daemon.scratch("aside").join("tier3")).unwrap();
    save(&daemon, "run/step2.pt", &noise(7, MIB));
    let mount = daemon.mount().to_owned();
    let job = std::thread::spawn(move || {
        use std::io::Write;
        std::thread::sleep(Duration::from_millis(700));
        fs::write(mount.join("run/within"), b"the grace").expect("a job that is ending too may save");
        let refused = process::until(Duration::from_secs(5), || {
            File::create_new(mount.join(format!("run/{:?}", Instant::now()))).err()
        });
        assert_eq!(refused.and_then(|error| error.raw_os_error()), Some(libc::EROFS));
        open.write_all(b"what is open").expect("open files are written on");
    });
    let status = daemon.stop_with_status();
    job.join().expect("the job saw what it should");
    assert_eq!(status.code(), Some(1), "{}", daemon.log_tail());
}

/// SIGTERM may come at three moments of a save. A file is open, a file is open under a temporary name, or a part is closed and the
/// next does not exist yet.
#[test]
fn sigterm_waits_for_programs_that_are_saving() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = noise(21, MIB);
    let run = daemon.mount().join("run");
    fs::create_dir_all(run.join("step-4")).unwrap();
    let mut open = File::create(run.join("step2.pt")).unwrap();
    open.write_all(&bytes).unwrap();
    let mut in_flight = File::create(run.join("step3.pt.tmp")).unwrap();
    in_flight.write_all(&bytes).unwrap();
    save(&daemon, "run/step-4/__0_0.distcp", &bytes);
    let begun = Instant::now();
    let job = std::thread::spawn({
        let bytes = bytes.clone();
        move || {
            std::thread::sleep(Duration::from_millis(1200));
            fs::write(run.join("step-4/__1_0.distcp"), &bytes).expect("a save that goes on");
            open.write_all(&bytes).expect("what is open is written on");
            drop(open);
            drop(in_flight);
            // Between the close and the rename, the save has no file open.
            std::thread::sleep(Duration::from_millis(200));
            fs::rename(run.join("step3.pt.tmp"), run.join("step3.pt")).expect("a save that goes on");
        }
    });
    // The index of a checkpoint in two parts never comes, so that the end has something to report.
    let status = daemon.stop_with_status();
    job.join().expect("the job saved");
    assert_eq!(status.code(), Some(1), "{}", daemon.log_tail());
    assert!(begun.elapsed() < Duration::from_secs(9), "nobody saves any more: {:?}", begun.elapsed());
    for path in ["run/step2.pt", "run/step3.pt"] {
        assert_eq!(tier3::commits(&daemon.tier3_dir(), path).len(), 1, "{path}: {}", daemon.log_tail());
    }
    daemon.start_again();
    assert_holds(&daemon, "run/step2.pt", &[&bytes[..], &bytes].concat(), "closed after SIGTERM");
    assert_holds(&daemon, "run/step3.pt", &bytes, "renamed after SIGTERM");
    assert_holds(&daemon, ".tidemark/torn/run/step-4/__1_0.distcp", &bytes, "made after SIGTERM");
}

/// S-end: a write that comes too late fails, at the latest at close(2).
#[test]
fn a_close_that_comes_too_late_is_an_error() {
    let config = format!("{CONFIG}[shutdown]\ngrace_s = 0\n");
    let Some(mut daemon) = start(options("256MiB", &config)) else { return };
    save(&daemon, "run/step1.pt", &noise(22, MIB));
    // By a descriptor of its folder, the script still finds the file system after the path has gone from the tree.
    let script = "import os, sys, time
run = os.open(sys.argv[1] + '/run', os.O_DIRECTORY)
checkpoint = os.open('step2.pt', os.O_CREAT | os.O_WRONLY, dir_fd=run)
log = os.open('log.txt', os.O_CREAT | os.O_WRONLY, dir_fd=run)
os.write(checkpoint, b'x' * 100000)
print('writes', flush=True)
def refused(call, *words, **folders):
    try: call(*words, **folders)
    except OSError as error: return error.strerror
    return 'success'
for _ in range(3000):
    if refused(os.mkdir, 'd', dir_fd=run) != 'success': break
    refused(os.rmdir, 'd', dir_fd=run)
    time.sleep(0.01)
print(refused(os.rename, 'step1.pt', 'other.pt', src_dir_fd=run, dst_dir_fd=run))
print(refused(os.fsync, checkpoint))
print(refused(os.close, checkpoint))
print(refused(os.close, log), flush=True)";
    let mut job = Command::new("python3")
        .args(["-c", script])
        .arg(daemon.mount())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(job.stdout.take().unwrap()));
    assert_eq!(lines.next().unwrap().unwrap(), "writes");
    let status = daemon.stop_with_status();
    assert_eq!(status.code(), Some(1), "{}", daemon.log_tail());
    let told: Vec<_> = lines.map(Result::unwrap).collect();
    assert_eq!(
        told,
        ["Read-only file system", "Input/output error", "Input/output error", "Input/output error"]
    );
    assert!(job.wait().unwrap().success());
    assert!(tier3::markers(&daemon.tier3_dir(), "run/step2.pt").is_empty());
}

#[test]
fn what_an_unclean_end_cost_is_said_after_it_and_after_the_next_start() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = noise(21, MIB);
    save(&daemon, "run/step1.pt", &bytes);
    daemon.flush();
    let (tier3, away) = (daemon.tier3_dir(), daemon.tier3_dir().with_extension("away"));
    fs::rename(&tier3, &away).unwrap();
    save(&daemon, "run/step2.pt", &bytes);
    let complete = process::until(Duration::from_secs(20), || {
        let status = daemon.ctl_json(&["status"]);
        let known =
            status["runs"][0]["recoverable"]["step"] == 2 && status["problems"][0]["code"] == "tier3_away";
        known.then_some(())
    });
    assert!(complete.is_some(), "{}", daemon.log_tail());
    // The daemon writes its last known status five times a second.
    let written = process::until(Duration::from_secs(5), || {
        let text = fs::read_to_string(daemon.state_dir().join("status.json")).ok()?;
        text.contains("tier3_away").then_some(())
    });
    assert!(written.is_some());
    daemon.kill9();
    let status = || -> serde_json::Value {
        serde_json::from_slice(&daemon.ctl(&["status", "-o", "json"]).stdout).unwrap()
    };
    let last_known = status();
    let codes: Vec<_> =
        last_known["problems"].as_array().unwrap().iter().map(|p| p["code"].clone()).collect();
    assert_eq!(codes, ["tier3_away", "unclean_end"], "{last_known:#}");
    assert_eq!(last_known["runs"][0]["recoverable"]["step"], 1, "{last_known:#}");
    fs::rename(&away, &tier3).unwrap();
    daemon.start_again();
    let unclean = |daemon: &Daemon| problems(daemon).into_iter().find(|(code, ..)| code == "unclean_end");
    let (_, what, _) = unclean(&daemon).expect("step 2 is gone");
    assert!(what.contains("step 2") && what.contains("step 1"), "{what}");
    assert_eq!(daemon.ctl(&["status", "--exit-code"]).status.code(), Some(4));
    // The job went on, so the daemon has nothing to report any more.
    save(&daemon, "run/step3.pt", &bytes);
    daemon.flush();
    assert_eq!(unclean(&daemon), None);
    daemon.stop();
    daemon.start_again();
    assert_eq!(unclean(&daemon), None, "a clean end costs nothing");
}

#[test]
fn names_that_tier_3_was_not_told_at_the_end_are_said_after_it() {
    let config = format!("{CONFIG}[shutdown]\ndrain_timeout_s = 5\ngrace_s = 1\n");
    let Some(mut daemon) = start(options("256MiB", &config)) else { return };
    for path in ["gone.txt", "kept.txt"] {
        save(&daemon, path, b"text");
    }
    daemon.flush();
    let (tier3, away) = (daemon.tier3_dir(), daemon.tier3_dir().with_extension("away"));
    fs::rename(&tier3, &away).unwrap();
    fs::remove_file(daemon.mount().join("gone.txt")).unwrap();
    assert_eq!(daemon.stop_with_status().code(), Some(1), "{}", daemon.log_tail());
    fs::rename(&away, &tier3).unwrap();
    daemon.start_again();
    assert!(daemon.mount().join("gone.txt").exists(), "Tier-3 does not know that it was removed");
    let unclean = |daemon: &Daemon| problems(daemon).into_iter().find(|(code, ..)| code == "unclean_end");
    let (_, what, _) = unclean(&daemon).expect("it says so");
    assert!(what.contains("1 removals"), "{what}");
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    assert_eq!(unclean(&daemon), None, "a clean end costs nothing");
}

/// A file is closed a moment before SIGTERM, and its job is killed before the next file. The directory must not count as whole.
#[test]
fn sigterm_takes_no_directory_for_whole_whose_job_is_killed_while_it_waits() {
    if machine::kernel_release() < (6, 15) {
        // Before Linux 6.15, the kernel does not report how a process ended.
        return;
    }
    let config = format!("{}[shutdown]\ngrace_s = 0\n", CONFIG.replace("0.3", "2.0"));
    let Some(mut daemon) = start(options("256MiB", &config)) else { return };
    let run = daemon.mount().join("run");
    for name in ["model", "optimizer"] {
        save(&daemon, &format!("run/step_1/{name}.pt"), &noise(3, MIB));
    }
    daemon.wait_committed("run/step_1", Duration::from_secs(20));
    let mut job = Rank::start(&run, None);
    // The shell writes by a builtin, so the shell itself is the writer.
    job.does("mkdir step_2; printf %s state >step_2/model.pt");
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(700));
        job.kill();
    });
    daemon.stop_with_status();
    killer.join().expect("it was killed");
    daemon.start_again();
    assert_eq!(names(&run), ["step_1"]);
    let torn = daemon.mount().join(".tidemark/torn/run/step_2/model.pt");
    assert_eq!(fs::read(&torn).expect("it is kept"), b"state");

    // A person removes the hidden checkpoint for good.
    fs::remove_dir_all(torn.parent().expect("it has one")).expect("a person may");
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    assert!(!torn.exists());
    assert_eq!(names(&run), ["step_1"]);
}

/// A file that stays under its temporary name proves nothing, however long the end waits.
#[test]
fn sigterm_keeps_what_is_sealed_beside_a_file_under_a_temporary_name() {
    let config = format!("{CONFIG}[shutdown]\ndrain_timeout_s = 8\ngrace_s = 1\n");
    let Some(mut daemon) = start(options("256MiB", &config)) else { return };
    let bytes = noise(31, MIB);
    save(&daemon, "run/step_1/model.pt", &bytes);
    save(&daemon, "run/step_1/optimizer.pt.tmp", b"half of it");
    let began = Instant::now();
    daemon.stop_with_status();
    assert!(began.elapsed() < Duration::from_secs(7), "{:?}", began.elapsed());
    daemon.start_again();
    let kept = |at: &str| {
        fs::read(daemon.mount().join(at).join("run/step_1/model.pt")).is_ok_and(|read| read == bytes)
    };
    assert!(kept("") || kept(".tidemark/torn"), "{}", daemon.log_tail());
}

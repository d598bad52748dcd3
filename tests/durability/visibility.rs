//! Incomplete checkpoints that stay visible: files of programs that ended well, and files that a job cannot replace by others.
//!
//! Owns: copies file by file, saves over saves, the first save of a run. Does not own: hiding (`shield`), the table
//! (`protocol::visibility`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::{machine, process, tier3};

use crate::shield::{Rank, wait_torn};
use crate::site::{CONFIG, MIB, assert_holds, has_problem, names, noise, options, problems, save, start};

const COMMITTED_WITHIN: Duration = Duration::from_secs(60);
/// Duration of several checks and the settle time. A file that is there by then stays.
const STAYS: Duration = Duration::from_millis(3500);

const INDEX: &str = r#"{"metadata":{},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;

/// Runs a script in a process and a session of its own, which must end well.
fn run_in(directory: &Path, script: &str) {
    let status = Command::new("setsid").args(["-w", "sh", "-c", script]).current_dir(directory).status();
    assert!(status.unwrap().success(), "{script}");
}

/// Flushes until Tier-3 has everything that it can have. The flush must fail, because something cannot be committed.
fn flush(daemon: &Daemon) {
    let flushed = daemon.ctl(&["flush", "--wait", "--timeout", "60"]);
    assert_eq!(flushed.status.code(), Some(1), "{}", shown(&flushed));
}

fn sharded(directory: &Path) -> [(&'static str, Vec<u8>); 4] {
    let files = [
        ("config.json", b"{}".to_vec()),
        ("model.safetensors.index.json", INDEX.as_bytes().to_vec()),
        ("model-00001-of-00002.safetensors", noise(1, 300_000)),
        ("model-00002-of-00002.safetensors", noise(2, 300_000)),
    ];
    fs::create_dir_all(directory).unwrap();
    for (name, bytes) in &files {
        fs::write(directory.join(name), bytes).unwrap();
    }
    files
}

/// `cp`, `wget` and `scp` have a process for each file. The index is there and its process is gone, before the shards follow, if they do.
#[test]
fn a_model_that_is_copied_file_by_file_stays_and_so_does_a_part_of_one() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let source = daemon.scratch("source");
    let files = sharded(&source);
    for copy in ["whole", "part"] {
        fs::create_dir(daemon.mount().join(copy)).unwrap();
    }
    let copied = |copy: &str, name: &str| {
        run_in(&daemon.mount().join(copy), &format!("cp {} .", source.join(name).display()));
    };
    for (name, _) in &files[..2] {
        copied("part", name);
        copied("whole", name);
    }
    // By then, all their processes are gone and the settle time has passed.
    std::thread::sleep(STAYS);
    for (name, _) in &files[2..] {
        copied("whole", name);
    }
    daemon.wait_committed("whole", COMMITTED_WITHIN);
    assert_eq!(names(&daemon.mount().join("part")), ["config.json", "model.safetensors.index.json"]);
    if machine::kernel_release() >= (6, 15) {
        assert_eq!(daemon.checkpoint("part").expect("listed")["state"], "settled");
        assert!(tier3::commits(&daemon.tier3_dir(), "part").is_empty(), "nobody has the shards");
    }
    // An incomplete checkpoint is the user's, so it is kept.
    daemon.stop_with_status();
    daemon.start_again();
    for (name, bytes) in &files {
        assert_holds(&daemon, &format!("whole/{name}"), bytes, "with empty memory");
    }
    for (name, bytes) in &files[..2] {
        assert_holds(&daemon, &format!("part/{name}"), bytes, "with empty memory");
    }
    daemon.stop_with_status();
}

/// transformers' `save_pretrained` saves in one file over shards. The shards go, and their index stays.
#[test]
fn a_model_that_is_saved_in_one_file_over_its_shards_is_not_mixed_with_them() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let model = daemon.mount().join("model");
    run_in(daemon.mount(), "mkdir model");
    let source = daemon.scratch("source");
    sharded(&source);
    run_in(
        &model,
        &format!(
            "cat {0}/config.json >config.json; for f in {0}/model*; do cat $f >${{f##*/}}; done",
            source.display()
        ),
    );
    daemon.wait_committed("model", COMMITTED_WITHIN);
    run_in(&model, "printf '{ }' >config.json; rm model-0*; head -c 500000 /dev/zero >model.safetensors");
    if machine::kernel_release() < (6, 15) {
        // Before Linux 6.15, the kernel does not report that the program ended well.
        return;
    }
    let again = || (tier3::commits(&daemon.tier3_dir(), "model").len() == 2).then_some(());
    process::until(COMMITTED_WITHIN, again)
        .unwrap_or_else(|| panic!("{:#?}\n{:#?}", daemon.checkpoints(), crate::site::events(&daemon)));
    let left = ["config.json", "model.safetensors", "model.safetensors.index.json"];
    assert_eq!(names(&model), left);
    daemon.stop();
    daemon.start_again();
    assert_eq!(names(&daemon.mount().join("model")), left, "with empty memory");
    daemon.stop();
}

/// If the torn save were hidden, the job would begin at step 0 unnoticed.
#[test]
fn the_first_save_of_a_run_stays_in_sight_although_it_is_torn() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let mut job = Rank::start(&run, None);
    job.does("exec 3>step1.pt; head -c 300000 /dev/zero >&3");
    job.kill();
    wait_torn(&daemon, "run/step1.pt");
    std::thread::sleep(STAYS);
    assert_eq!(names(&run), ["step1.pt"]);
    // The same holds for a directory with an open file, and after a restart with empty memory.
    fs::create_dir(daemon.mount().join("ranks")).unwrap();
    run_in(&daemon.mount().join("ranks"), "mkdir step_1; cat /bin/true >step_1/model_rank0.pt");
    let mut job = Rank::start(&daemon.mount().join("ranks"), None);
    job.does("exec 3>step_1/model_rank1.pt; head -c 300000 /dev/zero >&3");
    job.kill();
    std::thread::sleep(STAYS);
    assert_eq!(names(&daemon.mount().join("ranks")), ["step_1"]);
    daemon.stop_with_status();
    daemon.start_again();
    assert_eq!(names(&daemon.mount().join("ranks")), ["step_1"]);
    assert_eq!(names(&daemon.mount().join("ranks/step_1")), ["model_rank0.pt", "model_rank1.pt"]);
    for file in ["run/step1.pt", "ranks/step_1/model_rank1.pt"] {
        assert_holds(&daemon, file, &vec![0; 300_000], "what was written of it, with empty memory");
    }
    flush(&daemon);
    for file in ["run/step1.pt", "ranks/step_1"] {
        assert!(tier3::commits(&daemon.tier3_dir(), file).is_empty(), "{file} is torn still");
    }
}

/// A torn file does not become whole by a backup with hard links or by a name of a kept copy.
#[test]
fn what_a_killed_program_left_is_committed_under_no_other_name() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let mount = daemon.mount();
    let run = mount.join("run");
    fs::create_dir(&run).unwrap();
    let mut job = Rank::start(&run, None);
    job.does("exec 3>model.msgpack; head -c 300000 /dev/zero >&3");
    // A backup is made during the write, and a second one of the torn file.
    run_in(mount, "cp -al run run.early");
    job.kill();
    wait_torn(&daemon, "run/model.msgpack");
    run_in(mount, "cp -al run run.bak; mv run/model.msgpack run/model.prev.msgpack");
    let copies = ["run/model.prev.msgpack", "run.early/model.msgpack", "run.bak/model.msgpack"];
    for copy in copies {
        wait_torn(&daemon, copy);
    }
    std::thread::sleep(STAYS);
    flush(&daemon);
    for copy in copies {
        assert!(tier3::commits(&daemon.tier3_dir(), copy).is_empty(), "{copy} is half");
        assert_holds(&daemon, copy, &vec![0; 300_000], "nothing is there instead");
    }
    // A move out of the hidden folder does not make a torn file whole either.
    run_in(&run, "mkdir ../other; cat /bin/true >part; cat part >../other/step1.bin; rm part");
    daemon.wait_committed("other/step1.bin", COMMITTED_WITHIN);
    let mut job = Rank::start(&mount.join("other"), None);
    job.does("exec 3>step2.bin; head -c 300000 /dev/zero >&3");
    job.kill();
    let torn = mount.join(".tidemark/torn/other");
    process::until(COMMITTED_WITHIN, || torn.join("step2.bin").exists().then_some(())).expect("it went");
    run_in(mount, "mv .tidemark/torn/other/step2.bin other/step3.bin");
    process::until(COMMITTED_WITHIN, || torn.join("step3.bin").exists().then_some(())).expect("it is half");
    assert!(tier3::commits(&daemon.tier3_dir(), "other/step3.bin").is_empty());

    if machine::kernel_release() >= (6, 15) {
        // After `curl URL >part && mv part model.bin`, the writer ended well, and the rename states that the file is whole.
        run_in(&run, "(exec 3>part; head -c 300000 /dev/zero >&3; exit 0) && mv part step4.bin");
        daemon.wait_committed("run/step4.bin", COMMITTED_WITHIN);
    }
}

/// A process that prepares a data set is killed. The files that it closed are the user's, and nothing could be loaded instead of them.
#[test]
fn parts_that_were_closed_before_a_kill_are_kept_where_nothing_stands_in_for_them() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let data = daemon.mount().join("data");
    fs::create_dir(&data).unwrap();
    save(&daemon, "data/vocab.pt", &noise(3, 10_000));
    daemon.wait_committed("data/vocab.pt", COMMITTED_WITHIN);
    let mut job = Rank::start(&data, None);
    let parts: Vec<String> = (0..4).map(|part| format!("shard-0000{part}.bin")).collect();
    for part in &parts {
        job.does(&format!("head -c 100000 /dev/zero >part; cat part >{part}; rm part"));
    }
    job.does("exec 3>shard-00004.bin; head -c 50000 /dev/zero >&3");
    job.kill();
    // A checkpoint that stays for ever must survive the loss of the node.
    let uploaded = || {
        let files = tier3::files_below(&daemon.tier3_dir().join("data"));
        (files.iter().filter(|file| file.metadata().is_ok_and(|found| found.len() >= 50_000)).count() >= 5)
            .then_some(())
    };
    process::until(COMMITTED_WITHIN, uploaded)
        .unwrap_or_else(|| panic!("{:#?}\n{:#?}", daemon.checkpoints(), crate::site::events(&daemon)));
    flush(&daemon);
    assert_eq!(daemon.checkpoint("data/shard-*.bin").expect("listed")["state"], "torn");
    daemon.kill9();
    daemon.start_again();
    for part in &parts {
        assert_holds(&daemon, &format!("data/{part}"), &vec![0; 100_000], "closed before the kill");
    }
    assert_holds(&daemon, "data/shard-00004.bin", &vec![0; 50_000], "what there was of it");
}

/// Tier-3 has the torn file with the rest. Removing that file does not make the version whole.
#[test]
fn what_a_part_holds_besides_what_is_left_is_never_committed() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let data = daemon.mount().join("data");
    fs::create_dir(&data).unwrap();
    run_in(&data, "head -c 100000 /dev/zero >rank0.pt");
    let mut job = Rank::start(&data, None);
    job.does("exec 3>rank1.pt; head -c 50000 /dev/zero >&3");
    job.kill();
    let below = || tier3::files_below(&daemon.tier3_dir().join("data"));
    let uploaded = || {
        let large =
            below().into_iter().filter(|file| file.metadata().is_ok_and(|found| found.len() >= 50_000));
        (large.count() >= 2).then_some(())
    };
    process::until(COMMITTED_WITHIN, uploaded).unwrap_or_else(|| panic!("{:#?}", daemon.checkpoints()));
    fs::remove_file(data.join("rank1.pt")).unwrap();
    std::thread::sleep(STAYS);
    daemon.ctl(&["flush", "--wait", "--timeout", "10"]);
    let decided = below().into_iter().filter(|file| file.ends_with("_COMMITTED"));
    let holds = |marker: &PathBuf| {
        let beside = tier3::files_below(marker.parent().expect("a folder"));
        beside.iter().any(|file| {
            file.extension().is_some_and(|end| end == "json")
                && fs::read_to_string(file).is_ok_and(|text| text.contains("rank1.pt"))
        })
    };
    assert_eq!(decided.filter(holds).collect::<Vec<_>>(), Vec::<PathBuf>::new(), "it holds what was torn");
    assert_holds(&daemon, "data/rank0.pt", &vec![0; 100_000], "it was closed");
}

/// A notebook downloads a model. The small index comes first, and the process that wrote all files goes on living.
#[test]
fn what_a_program_closed_that_lives_is_in_tier3_when_somebody_asks() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    fs::create_dir(daemon.mount().join("model")).unwrap();
    let source = daemon.scratch("source");
    let files = sharded(&source);
    let mut notebook = Rank::start(&daemon.mount().join("model"), None);
    for (name, _) in &files {
        // The shell itself writes the file, and lives on.
        notebook.does(&format!("exec 3>{name}; cat {}/{name} >&3; exec 3>&-", source.display()));
    }
    std::thread::sleep(STAYS);
    flush(&daemon);
    assert!(tier3::commits(&daemon.tier3_dir(), "model").is_empty(), "its index may be written anew");
    // A whole checkpoint beside it is no older version of it.
    run_in(daemon.mount(), &format!("cp -r {} other", source.display()));
    daemon.wait_committed("other", COMMITTED_WITHIN);
    daemon.kill9();
    daemon.start_again();
    for (name, bytes) in &files {
        assert_holds(&daemon, &format!("model/{name}"), bytes, "with empty memory");
    }
    // Once the writer has ended well, the names prove that all files are there, with the same bytes that were kept before.
    let mut notebook = Rank::start(&daemon.mount().join("model"), None);
    for (name, _) in &files {
        notebook.does(&format!("exec 3>{name}; cat {}/{name} >&3; exec 3>&-", source.display()));
    }
    std::thread::sleep(STAYS);
    flush(&daemon);
    notebook.ends_well();
    if machine::kernel_release() >= (6, 15) {
        daemon.wait_committed("model", COMMITTED_WITHIN);
    }
}

/// While a checkpoint's file was open, its other file went to Tier-3 as a part. After the open one is removed, nothing is missing.
#[test]
fn what_was_taken_away_while_it_lay_open_holds_back_nothing() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let ways = ["removed", "renamed", "renamed and the daemon killed"];
    for how in ways {
        let place = format!("run/{}", how.replace(' ', "-"));
        let whole = format!("{place}/rank0.pt");
        let open = daemon.mount().join(&place).join("rank1.pt");
        save(&daemon, &whole, &noise(1, 70_000));
        let held = fs::File::create(&open).unwrap();
        let waited = daemon.ctl(&["flush", "--wait", "--timeout", "3"]);
        assert!(
            !waited.status.success(),
            "{how}: a flush did not wait for a file that is open: {}",
            shown(&waited)
        );
        let checkpoint = format!("{place}/rank*.pt");
        let part = tier3::files_below(&daemon.tier3_dir().join(&place));
        assert!(!part.is_empty(), "{how}: no part went to Tier-3");
        if how == "removed" {
            fs::remove_file(&open).unwrap();
        } else {
            fs::rename(&open, open.with_file_name("notes.txt")).unwrap();
        }
        drop(held);
        if how.ends_with("killed") {
            let dead = daemon.kill_serving();
            daemon.wait_for_next(dead);
        }
        let flushed = daemon.ctl(&["flush", "--wait", "--timeout", "30"]);
        assert!(
            flushed.status.success(),
            "{how}: {}\n{:#}",
            shown(&flushed),
            daemon.checkpoint(&checkpoint).unwrap()
        );
        assert_eq!(daemon.checkpoint(&checkpoint).unwrap()["state"], "committed", "{how}");
    }
    daemon.kill9();
    daemon.start_again();
    for how in ways {
        let whole = format!("run/{}/rank0.pt", how.replace(' ', "-"));
        assert_holds(&daemon, &whole, &noise(1, 70_000), how);
    }
}

/// Many programs close their output only by their end: `curl URL >step2.bin`.
#[test]
fn what_a_program_leaves_open_that_ends_well_stays_and_is_kept_without_a_commit() {
    if machine::kernel_release() < (6, 15) {
        return machine::left_out("the kernel does not say how a process ended");
    }
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let whole = "head -c 300000 /dev/zero";
    run_in(&run, &format!("{whole} >part; cat part >step1.bin; rm part"));
    daemon.wait_committed("run/step1.bin", COMMITTED_WITHIN);
    run_in(&run, &format!("exec 3>step2.bin; {whole} >&3; exit 0"));
    // A failed program leaves half of its file.
    let failed = Command::new("setsid")
        .args(["-w", "sh", "-c", &format!("exec 3>step3.bin; {whole} >&3; exit 1")])
        .current_dir(&run)
        .status();
    assert!(!failed.unwrap().success());
    process::until(COMMITTED_WITHIN, || (!run.join("step3.bin").exists()).then_some(())).expect("it is torn");
    std::thread::sleep(STAYS);
    assert_eq!(names(&run), ["step1.bin", "step2.bin"]);
    assert_eq!(daemon.checkpoint("run/step2.bin").expect("listed")["state"], "settled");
    assert!(has_problem(&daemon, "undecided"));
    flush(&daemon);
    daemon.kill9();
    daemon.start_again();
    assert_holds(&daemon, "run/step2.bin", &vec![0; 300_000], "with empty memory");
    // The daemon that saw the program's end is gone, but the record in Tier-3 has it.
    let named = || has_problem(&daemon, "undecided").then_some(());
    process::until(COMMITTED_WITHIN, named).expect("status names it with empty memory");
    let flushed = daemon.ctl(&["flush", "--wait", "--timeout", "60"]);
    assert_eq!(flushed.status.code(), Some(1), "{}", shown(&flushed));
    assert!(shown(&flushed).contains("ended well without closing it"), "{}", shown(&flushed));
    let named = problems(&daemon);
    let is_it =
        |(code, what, _): &(String, String, String)| code == "undecided" && what.contains("step2.bin");
    assert!(named.iter().any(is_it), "after a flush: {named:?}");
    assert!(tier3::commits(&daemon.tier3_dir(), "run/step2.bin").is_empty(), "nobody says that it is whole");
    daemon.ctl_json(&["commit", "run/step2.bin"]);
    daemon.wait_committed("run/step2.bin", COMMITTED_WITHIN);
    assert!(!has_problem(&daemon, "undecided"), "somebody said that it is whole");
}

#[test]
fn what_is_torn_goes_once_something_whole_is_there() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let mut job = Rank::start(&run, None);
    job.does("exec 3>step1.pt; head -c 300000 /dev/zero >&3");
    job.kill();
    wait_torn(&daemon, "run/step1.pt");
    save(&daemon, "run/step2.pt", &noise(2, MIB));
    let hidden = || (names(&run) == ["step2.pt"]).then_some(());
    process::until(COMMITTED_WITHIN, hidden)
        .unwrap_or_else(|| panic!("{:?} {:#?}", names(&run), crate::site::events(&daemon)));
}

/// Returns the beginning of a model of 16 bytes, with `size_bytes` of them.
fn safetensors(size_bytes: usize) -> Vec<u8> {
    let header = br#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
    let length = u64::try_from(header.len()).unwrap();
    [&length.to_le_bytes()[..], header, &vec![7; size_bytes]].concat()
}

/// An exception closes a file as it unwinds, and its process may go on.
#[test]
fn a_file_that_contradicts_its_own_format_is_never_committed_and_a_trainers_goes() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let scratch = daemon.scratch("source");
    fs::write(scratch.join("whole"), safetensors(16)).unwrap();
    fs::write(scratch.join("broken"), safetensors(15)).unwrap();
    let run = daemon.mount().join("run");
    run_in(daemon.mount(), "mkdir run person");
    let copied = |from: &str, to: &str| format!("cat {} >{to}", scratch.join(from).display());
    let mut trainer = Rank::start(&run, Some(("29541", 0, 1)));
    trainer.does(&copied("whole", "step_1.safetensors"));
    daemon.wait_committed("run/step_1.safetensors", COMMITTED_WITHIN);
    trainer.does(&copied("broken", "step_2.safetensors"));
    // For a person's file, only the person knows whether it is of use.
    run_in(&daemon.mount().join("person"), &copied("whole", "step_1.safetensors"));
    run_in(&daemon.mount().join("person"), &copied("broken", "step_2.safetensors"));
    daemon.wait_committed("person/step_1.safetensors", COMMITTED_WITHIN);
    std::thread::sleep(STAYS);
    assert_eq!(names(&run), ["step_1.safetensors", "step_2.safetensors"], "its writer lives");
    trainer.kill();
    let gone = || (names(&run) == ["step_1.safetensors"]).then_some(());
    process::until(COMMITTED_WITHIN, gone).unwrap_or_else(|| panic!("{:#?}", crate::site::events(&daemon)));
    let flush = daemon.ctl(&["flush", "--wait", "--timeout", "20"]);
    assert_eq!(flush.status.code(), Some(1), "it cannot become durable as a checkpoint");
    assert_eq!(names(&daemon.mount().join("person")), ["step_1.safetensors", "step_2.safetensors"]);
    let why = daemon.ctl_json(&["why", daemon.mount().join("person/step_2.safetensors").to_str().unwrap()]);
    let verdict = why["verdict"].as_str().unwrap();
    assert!(verdict.contains("contradicts its own format") && verdict.contains("16 bytes"), "{why:#}");
    // The next daemon examines the bytes again, because no daemon records what it found in them.
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    std::thread::sleep(STAYS);
    assert_eq!(names(&daemon.mount().join("person")), ["step_1.safetensors", "step_2.safetensors"]);
    for path in ["run/step_2.safetensors", "person/step_2.safetensors"] {
        assert!(tier3::commits(&daemon.tier3_dir(), path).is_empty(), "{path}");
    }
    daemon.stop_with_status();
}

/// A job that no launcher started came back from the last checkpoint. A handler in it broke off the job's first save.
#[test]
fn who_opened_a_checkpoint_of_the_run_is_a_trainer() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let scratch = daemon.scratch("source");
    fs::write(scratch.join("whole"), safetensors(16)).unwrap();
    fs::write(scratch.join("broken"), safetensors(15)).unwrap();
    for run in ["resumed", "other"] {
        run_in(daemon.mount(), &format!("mkdir {run}"));
        run_in(
            &daemon.mount().join(run),
            &format!("cat {} >step_1.safetensors", scratch.join("whole").display()),
        );
        daemon.wait_committed(&format!("{run}/step_1.safetensors"), COMMITTED_WITHIN);
    }
    for run in ["resumed", "other"] {
        let mut job = Rank::start(&daemon.mount().join(run), None);
        // The shell itself opens both.
        job.does(": <../resumed/step_1.safetensors");
        let broken = scratch.join("broken");
        job.does(&format!("exec 3>step_2.safetensors; cat {} >&3; exec 3>&-", broken.display()));
        job.kill();
    }
    let resumed = daemon.mount().join("resumed");
    let gone = || (names(&resumed) == ["step_1.safetensors"]).then_some(());
    process::until(COMMITTED_WITHIN, gone).unwrap_or_else(|| panic!("{:#?}", crate::site::events(&daemon)));
    std::thread::sleep(STAYS);
    let other = names(&daemon.mount().join("other"));
    assert_eq!(other, ["step_1.safetensors", "step_2.safetensors"], "what it opened is of another run");
}

/// The writer is killed after the last byte and before close(2).
#[test]
fn a_cut_file_whose_bytes_say_that_it_is_whole_is_committed() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    // Two blocks of zeros end a tar archive.
    let archive = daemon.scratch("source").join("archive.tar");
    run_in(&daemon.scratch("source"), "echo state >part; tar cf archive.tar part");
    for (name, kept) in [("step1.bin", "cat"), ("step2.bin", "head -c 600")] {
        let mut job = Rank::start(&run, None);
        job.does(&format!("exec 3>{name}; {kept} {} >&3", archive.display()));
        job.kill();
    }
    daemon.wait_committed("run/step1.bin", COMMITTED_WITHIN);
    assert_holds(&daemon, "run/step1.bin", &fs::read(&archive).unwrap(), "it was all there");
    assert!(tier3::commits(&daemon.tier3_dir(), "run/step2.bin").is_empty());
}

/// `cp` of an archive that had lost its end before. No trainer wrote it, and a person may know what to do with it.
#[test]
fn a_broken_file_that_no_trainer_wrote_is_kept_and_told_and_never_committed() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = [&b"PK\x03\x04"[..], &noise(11, 300_000)].concat();
    let source = daemon.scratch("source").join("model.pt");
    fs::write(&source, &bytes).unwrap();
    fs::create_dir(daemon.mount().join("model")).unwrap();
    run_in(&daemon.mount().join("model"), &format!("cp {} .", source.display()));
    for restart in [false, true] {
        let told = || has_problem(&daemon, "broken").then_some(());
        // A file that is only in Tier-3 is examined once it is fetched.
        if restart {
            assert_holds(&daemon, "model/model.pt", &bytes, "with empty memory");
        }
        process::until(COMMITTED_WITHIN, told).unwrap_or_else(|| panic!("{:#?}", daemon.checkpoints()));
        flush(&daemon);
        assert!(tier3::commits(&daemon.tier3_dir(), "model").is_empty());
        if !restart {
            let uploaded = || {
                let files = tier3::files_below(&daemon.tier3_dir().join("model"));
                (files.iter().any(|file| file.metadata().is_ok_and(|found| found.len() > 300_000)))
                    .then_some(())
            };
            process::until(COMMITTED_WITHIN, uploaded).expect("its bytes are in Tier-3");
            daemon.stop_with_status();
            daemon.start_again();
        }
    }
}

/// A job goes on from `last.pt`, whatever the layout of its torn save.
#[test]
fn a_torn_directory_goes_where_the_last_save_in_one_file_is_whole() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    run_in(&run, "cat /bin/true >last.pt");
    daemon.wait_committed("run/last.pt", COMMITTED_WITHIN);
    fs::create_dir(run.join("checkpoint-9")).unwrap();
    let mut job = Rank::start(&run.join("checkpoint-9"), None);
    job.does("exec 3>model.safetensors; head -c 1000 /dev/zero >&3");
    job.kill();
    let gone = || (names(&run) == ["last.pt"]).then_some(());
    process::until(COMMITTED_WITHIN, gone).unwrap_or_else(|| panic!("{:#?}", crate::site::events(&daemon)));
}

/// The terminal closes during a `wget` of a model beside another one. `wget -c` later goes on where the download stopped.
#[test]
fn a_part_of_a_model_stays_beside_another_model_when_its_download_breaks_off() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let source = daemon.scratch("source");
    sharded(&source);
    run_in(daemon.mount(), &format!("mkdir -p models/b; cp -r {} models/a", source.display()));
    daemon.wait_committed("models/a", COMMITTED_WITHIN);
    let part = daemon.mount().join("models/b");
    let mut download = Rank::start(&part, None);
    download.does("exec 3>model-00001-of-00002.safetensors; head -c 100000 /dev/zero >&3");
    download.kill();
    wait_torn(&daemon, "models/b");
    std::thread::sleep(STAYS);
    assert_eq!(names(&part), ["model-00001-of-00002.safetensors"], "{:#?}", crate::site::events(&daemon));
}

/// `train.py >out/train.log` saves its model into `out`, and is killed later.
#[test]
fn a_log_that_is_open_or_cut_beside_a_whole_model_changes_nothing_of_it() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let source = daemon.scratch("source");
    let files = sharded(&source);
    // The other model could be loaded instead.
    run_in(daemon.mount(), &format!("mkdir models; cp -r {} models/base", source.display()));
    daemon.wait_committed("models/base", COMMITTED_WITHIN);
    let out = daemon.mount().join("models/out");
    fs::create_dir(&out).unwrap();
    let mut job = Rank::start(&out, None);
    job.does("exec 3>train.log; echo step 1 >&3");
    // The index comes last, as `save_pretrained` writes it.
    for at in [0, 2, 3, 1] {
        let name = files[at].0;
        job.does(&format!("exec 4>{name}; cat {}/{name} >&4; exec 4>&-", source.display()));
    }
    daemon.wait_committed("models/out", COMMITTED_WITHIN);
    job.does("echo step 2 >&3");
    job.kill();
    std::thread::sleep(STAYS);
    let mut all: Vec<_> = files.iter().map(|(name, _)| *name).chain(["train.log"]).collect();
    all.sort_unstable();
    assert_eq!(names(&out), all, "{:#?}", crate::site::events(&daemon));
    assert_holds(&daemon, "models/out/train.log", b"step 1\nstep 2\n", "it stays where it is");
    assert_eq!(tier3::commits(&daemon.tier3_dir(), "models/out").len(), 1);
    assert_eq!(daemon.checkpoint("models/out").expect("listed")["state"], "committed");
    let flushed = daemon.ctl(&["flush", "--wait", "--timeout", "60"]);
    assert_eq!(flushed.status.code(), Some(1), "{}", shown(&flushed));
    assert!(shown(&flushed).contains("train.log was left unclosed"), "{}", shown(&flushed));
    assert_eq!(tier3::commits(&daemon.tier3_dir(), "models/out").len(), 1);
    daemon.kill9();
    daemon.start_again();
    for (name, bytes) in &files {
        assert_holds(&daemon, &format!("models/out/{name}"), bytes, "with empty memory");
    }
}

/// An evaluation is killed while it writes a file, of which no index speaks, into a whole checkpoint.
#[test]
fn a_file_that_is_cut_beside_what_is_committed_takes_nothing_out_of_sight() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    for step in ["checkpoint-5", "checkpoint-6"] {
        run_in(
            &run,
            &format!(
                "mkdir {step}; head -c 300000 /dev/zero >{step}/model.safetensors; echo {{}} >{step}/trainer_state.json"
            ),
        );
        daemon.wait_committed(&format!("run/{step}"), COMMITTED_WITHIN);
    }
    let mut job = Rank::start(&run.join("checkpoint-6"), None);
    job.does("exec 3>predictions.jsonl; echo {} >&3");
    job.kill();
    std::thread::sleep(STAYS);
    let events = crate::site::events(&daemon);
    assert_eq!(names(&run), ["checkpoint-5", "checkpoint-6"], "{events:#?}");
    let all = ["model.safetensors", "predictions.jsonl", "trainer_state.json"];
    assert_eq!(names(&run.join("checkpoint-6")), all, "{events:#?}");
    assert!(!events.iter().any(|event| event["kind"] == "torn"), "{events:#?}");
    assert_eq!(daemon.checkpoint("run/checkpoint-6").expect("listed")["state"], "committed");
    // The process closes the file that it adds, and fails.
    let mut job = Rank::start(&run.join("checkpoint-5"), None);
    job.does("exec 3>eval_results.json; echo {} >&3; exec 3>&-");
    job.kill();
    std::thread::sleep(STAYS);
    let events = crate::site::events(&daemon);
    let all = ["eval_results.json", "model.safetensors", "trainer_state.json"];
    assert_eq!(names(&run.join("checkpoint-5")), all, "{events:#?}");
    assert!(!events.iter().any(|event| event["kind"] == "torn"), "{events:#?}");
}

/// A model and its optimizer are saved separately, so neither can replace the other.
#[test]
fn a_torn_file_stays_where_only_its_neighbour_is_whole() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let mut job = Rank::start(&run, None);
    job.does("head -c 300000 /dev/zero >optimizer.pt");
    daemon.wait_committed("run/optimizer.pt", COMMITTED_WITHIN);
    job.does("exec 3>model.pt; head -c 300000 /dev/zero >&3");
    job.kill();
    wait_torn(&daemon, "run/model.pt");
    std::thread::sleep(STAYS);
    assert_eq!(names(&run), ["model.pt", "optimizer.pt"]);
}

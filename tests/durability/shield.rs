//! A job comes back after its last save was torn: it must find the newest whole checkpoint under any name that it tries.
//!
//! Owns: killed writers with ranks and without, a rank that dies alone, undeleting. Does not own: the frameworks themselves (suite
//! frameworks), that nothing torn is committed (`scavenge`), names and links to checkpoints (`trackers`).

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::{machine, process, tier3};

use crate::site::{CONFIG, MIB, assert_holds, names, noise, options, save, start};

/// Limit until a torn checkpoint is hidden. The daemon checks once a second which processes live.
pub(crate) const SHIELD_LIMIT: Duration = Duration::from_secs(60);
/// Duration of several checks of the daemon. A checkpoint that is not hidden by then stays visible.
pub(crate) const STAYS: Duration = Duration::from_millis(2500);

/// A rank of a job: a shell that carries out orders and reports each as done.
pub(crate) struct Rank {
    shell: Child,
    orders: ChildStdin,
    done: BufReader<std::process::ChildStdout>,
}

impl Rank {
    /// Starts a rank. `rendezvous` names its launch; `None` is for a process that no launcher started.
    pub(crate) fn start(directory: &Path, rendezvous: Option<(&str, u32, u32)>) -> Self {
        let mut command = Command::new("setsid");
        command.args(["sh"]).current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some((port, rank, world)) = rendezvous {
            let values = [
                ("MASTER_PORT", port.to_owned()),
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", world.to_string()),
            ];
            command.env("MASTER_ADDR", "127.0.0.1").envs(values);
        }
        let mut shell = command.spawn().unwrap();
        let (orders, done) = (shell.stdin.take().unwrap(), BufReader::new(shell.stdout.take().unwrap()));
        Self { shell, orders, done }
    }

    pub(crate) fn does(&mut self, order: &str) {
        writeln!(self.orders, "{order}; echo done").unwrap();
        let mut line = String::new();
        self.done.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "done", "{order}");
    }

    pub(crate) fn ends_well(mut self) {
        drop(self.orders);
        assert!(self.shell.wait().unwrap().success());
    }

    pub(crate) fn kill(mut self) {
        self.shell.kill().unwrap();
        self.shell.wait().unwrap();
    }
}

/// Waits until a checkpoint is listed as torn.
pub(crate) fn wait_torn(daemon: &Daemon, path: &str) {
    let torn = || daemon.checkpoint(path).filter(|listed| listed["state"] == "torn").map(drop);
    process::until(SHIELD_LIMIT, torn).unwrap_or_else(|| panic!("{path}: {:#?}", daemon.checkpoints()));
}

fn wait_hidden(daemon: &Daemon, path: &str) {
    let hidden = daemon.mount().join(".tidemark/torn").join(path);
    let gone = || (hidden.exists() && !daemon.mount().join(path).exists()).then_some(());
    process::until(SHIELD_LIMIT, gone)
        .unwrap_or_else(|| panic!("{path} stays in sight: {:#?}", crate::site::events(daemon)));
}

#[test]
fn a_job_that_comes_back_finds_the_newest_whole_save_and_a_tracker_that_names_it() {
    let Some(mut daemon) = start(options("512MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let aside = daemon.scratch("deepspeed").join("run");
    fs::create_dir_all(&aside).unwrap();
    let bytes = aside.with_extension("bytes");
    let mut ranks: Vec<_> = (0..2).map(|rank| Rank::start(&run, Some(("29501", rank, 2)))).collect();
    let save_step = |ranks: &mut [Rank], step: u64, cut: bool| {
        fs::write(&bytes, noise(step, MIB)).unwrap();
        let (tag, from) = (format!("global_step{step}"), bytes.display());
        let part = |rank: usize| format!("{tag}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
        ranks[0].does(&format!("mkdir -p {tag}; cat {from} >{tag}/mp_rank_00_model_states.pt"));
        ranks[0].does(&format!("cat {from} >{}", part(0)));
        let order = if cut { "exec 3>FILE; head -c 700000 FROM >&3" } else { "cat FROM >FILE" };
        ranks[1].does(&order.replace("FILE", &part(1)).replace("FROM", &from.to_string()));
        // Rank 0 writes the tracker without a barrier.
        ranks[0].does(&format!("printf %s {tag} >latest"));
    };
    save_step(&mut ranks, 10, false);
    daemon.wait_committed("run/global_step10", SHIELD_LIMIT);
    save_step(&mut ranks, 20, true);
    assert_holds(&daemon, "run/latest", b"global_step20", "the tracker lies");

    // When rank 1 dies, other ranks may go on, and a rank that restarts alone must find its peers' files.
    ranks.pop().unwrap().kill();
    wait_torn(&daemon, "run/global_step20");
    std::thread::sleep(STAYS);
    assert_eq!(names(&run), ["global_step10", "global_step20", "latest"], "rank 0 lives");

    ranks.pop().unwrap().kill();
    wait_hidden(&daemon, "run/global_step20");
    assert_eq!(names(&run), ["global_step10", "latest"]);
    let followed = || (fs::read(run.join("latest")).ok()? == b"global_step10").then_some(());
    process::until(SHIELD_LIMIT, followed).expect("the tracker names the whole one");
    // Hidden files are not lost: they can be read at another path, which an event names.
    let hidden = ".tidemark/torn/run/global_step20/mp_rank_00_model_states.pt";
    assert_holds(&daemon, hidden, &noise(20, MIB), "out of sight");
    assert_eq!(names(&daemon.mount().join(".tidemark/torn/run")), ["global_step20", "latest"]);
    let kinds: Vec<String> = crate::site::events(&daemon)
        .iter()
        .filter_map(|event| event["kind"].as_str().map(str::to_owned))
        .collect();
    for kind in ["torn", "hidden", "tracker"] {
        assert!(kinds.iter().any(|found| found == kind), "no event {kind}: {kinds:?}");
    }
    let listed = daemon.checkpoint(".tidemark/torn/run/global_step20").expect("ls lists it");
    assert_eq!(listed["state"], "torn");

    // The next daemon hides the checkpoint as well. The job that comes back saves that step again.
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    assert_eq!(names(&run), ["global_step10", "latest"]);
    let mut again: Vec<_> = (0..2).map(|rank| Rank::start(&run, Some(("29501", rank, 2)))).collect();
    save_step(&mut again, 20, false);
    daemon.wait_committed("run/global_step20", SHIELD_LIMIT);
    assert_holds(&daemon, "run/latest", b"global_step20", "saved anew");
    let dropped = || (!daemon.mount().join(".tidemark/torn/run/global_step20").exists()).then_some(());
    process::until(SHIELD_LIMIT, dropped).expect("it is of no use any more");
    again.into_iter().for_each(Rank::kill);
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    assert_eq!(names(&run), ["global_step10", "global_step20", "latest"]);
    assert_holds(&daemon, "run/latest", b"global_step20", "after a restart");
}

/// Resume code that takes the highest number fails on an empty directory.
#[test]
fn a_directory_goes_whose_maker_was_killed_before_anything_was_in_it() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let mut ranks: Vec<_> = (0..2).map(|rank| Rank::start(&run, Some(("29502", rank, 2)))).collect();
    // mkdir(1) ends well, so its directory counts as meant. Other directories do not reach Tier-3, even by a flush.
    ranks[0].does(
        "mkdir step_1; exec perl -e '$| = 1; mkdir \"step_2\"; mkdir \"step_2/items\"; mkdir \"logs\"; \
         print \"done\\n\"; <STDIN>'",
    );
    std::thread::sleep(STAYS);
    assert_eq!(names(&run), ["logs", "step_1", "step_2"], "its maker lives");
    daemon.flush();
    ranks.remove(0).kill();
    std::thread::sleep(STAYS);
    assert_eq!(names(&run), ["logs", "step_1", "step_2"], "rank 1 may be about to write into it");
    ranks.remove(0).kill();
    let gone = || (names(&run) == ["logs", "step_1"]).then_some(());
    process::until(SHIELD_LIMIT, gone)
        .unwrap_or_else(|| panic!("{:?}: {:#?}", names(&run), crate::site::events(&daemon)));
    let said = crate::site::events(&daemon).into_iter().any(|event| {
        event["kind"] == "hidden"
            && event["what"].as_str().is_some_and(|what| what.contains("failed before it wrote into it"))
    });
    assert!(said, "{:#?}", crate::site::events(&daemon));
    // A directory with a temporary file, as safetensors writes one, is hidden with the file, which may be all that there is of something.
    let mut trainer = Rank::start(&run, Some(("29504", 0, 1)));
    trainer.does(
        "exec perl -e '$| = 1; mkdir \"step_2\"; open(F, \">step_2/.tmpAb12Cd\"); syswrite(F, \"x\"); \
         print \"done\\n\"; <STDIN>'",
    );
    trainer.kill();
    wait_hidden(&daemon, "run/step_2/.tmpAb12Cd");
    assert_eq!(names(&run), ["logs", "step_1"]);
    // Files that come before the weights stay while a job could load nothing else.
    let mut trainer = Rank::start(&run, Some(("29505", 0, 1)));
    trainer.does("exec perl -e '$| = 1; mkdir \"step_4\"; open(F, \">step_4/config.json\"); close(F); print \"done\\n\"; <STDIN>'");
    trainer.kill();
    std::thread::sleep(STAYS);
    assert_eq!(names(&run), ["logs", "step_1", "step_4"]);
    // The hidden directory's name is free for the job that comes back.
    save(&daemon, "run/step_2/model.pt", &noise(2, MIB));
    assert_holds(&daemon, "run/step_2/model.pt", &noise(2, MIB), "saved anew");
    daemon.flush();
    assert!(!daemon.mount().join(".tidemark/torn/run/step_2").exists(), "it is of no use any more");
    wait_hidden(&daemon, "run/step_4/config.json");
    assert_eq!(names(&run), ["logs", "step_1", "step_2"]);
    fs::remove_dir_all(run.join("step_2")).unwrap();

    // The whole node is lost while a directory is empty.
    let mut trainer = Rank::start(&run, Some(("29503", 0, 1)));
    trainer.does("exec perl -e '$| = 1; mkdir \"step_3\"; print \"done\\n\"; <STDIN>'");
    daemon.flush();
    daemon.kill9();
    trainer.kill();
    daemon.start_again();
    assert_eq!(names(&run), ["logs", "step_1"]);
}

/// Tier-3 is slow or away. A whole save that a torn one overwrites is hidden with it, and is served again once it is committed.
#[test]
fn a_whole_save_that_goes_with_what_is_torn_is_there_again_once_it_is_committed() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let mount = daemon.mount().to_owned();
    let job = |run: &str, order: &str| {
        fs::create_dir_all(mount.join(run)).unwrap();
        let mut job = Rank::start(&mount.join(run), None);
        job.does(order);
        job
    };
    // The shell writes by a builtin, so the shell itself is the writer.
    job("steps", "mkdir step_4; printf %s four >step_4/model.pt").ends_well();
    job("last", "printf %s one >last.pt").ends_well();
    // The directory of such a model stays when its files go.
    let model = |name: &str| {
        let shard = "model-00001-of-00001.safetensors";
        let index = format!(r#"{{"metadata":{{}},"weight_map":{{"a":"{shard}"}}}}"#);
        let put = format!("printf %s {name} >{name}/{shard}");
        format!("mkdir {name}; {put}; printf %s '{index}' >{name}/model.safetensors.index.json")
    };
    job("flat", &model("m-step4")).ends_well();
    daemon.wait_committed("steps/step_4", SHIELD_LIMIT);
    daemon.wait_committed("last/last.pt", SHIELD_LIMIT);
    daemon.wait_committed("flat/m-step4", SHIELD_LIMIT);
    let (store, away) = (daemon.tier3_dir(), daemon.tier3_dir().with_extension("away"));
    fs::rename(&store, &away).unwrap();
    job("steps", "mkdir step_5; printf %s five >step_5/model.pt").ends_well();
    job("last", "printf %s two >last.pt").ends_well();
    job("first", "mkdir step_1; printf %s one >step_1/model.pt").ends_well();
    job("flat", &model("m-step5")).ends_well();
    for path in ["steps/step_5", "last/last.pt", "first/step_1", "flat/m-step5"] {
        let whole = || daemon.checkpoint(path).filter(|listed| listed["state"] == "complete").map(drop);
        process::until(SHIELD_LIMIT, whole).unwrap_or_else(|| panic!("{path}: {:#?}", daemon.checkpoints()));
    }
    let half = |file: &str| format!("exec 3>{file}; head -c 300000 /dev/zero >&3");
    job("steps", &half("step_5/extra.pt")).kill();
    job("last", &half("last.pt")).kill();
    job("first", &half("step_1/extra.pt")).kill();
    job("flat", &half("m-step5/extra.pt")).kill();
    for path in ["steps/step_5/extra.pt", "last/last.pt", "flat/m-step5/extra.pt"] {
        let torn = mount.join(".tidemark/torn").join(path);
        process::until(SHIELD_LIMIT, || torn.exists().then_some(()))
            .unwrap_or_else(|| panic!("{path} stays in sight: {:#?}", crate::site::events(&daemon)));
    }
    std::thread::sleep(STAYS);
    assert_eq!(names(&mount.join("steps")), ["step_4"]);
    assert_eq!(names(&mount.join("last")), ["last.pt"], "the version before");
    // The step's own version cannot replace the torn save for a job while its names would not come back.
    assert_eq!(names(&mount.join("first/step_1")), ["extra.pt", "model.pt"]);

    fs::rename(&away, &store).unwrap();
    let all = [
        ("steps/step_5/model.pt", "five"),
        ("last/last.pt", "two"),
        ("first/step_1/model.pt", "one"),
        ("flat/m-step5/model-00001-of-00001.safetensors", "m-step5"),
    ];
    let served = |path: &str, bytes: &str| {
        let holds = || (fs::read(mount.join(path)).ok()? == bytes.as_bytes()).then_some(());
        let events = || crate::site::events(&daemon);
        process::until(SHIELD_LIMIT, holds)
            .unwrap_or_else(|| panic!("{path}: {:#?}\n{:#?}", daemon.checkpoints(), events()));
    };
    for (path, bytes) in all {
        served(path, bytes);
    }
    let directories = ["steps/step_5", "first/step_1"];
    for directory in directories.map(|directory| mount.join(directory)) {
        let is_there = |name: &str| directory.join(name).exists();
        let whole = || (!is_there("extra.pt") && is_there("model.pt")).then_some(());
        process::until(SHIELD_LIMIT, whole).unwrap_or_else(|| panic!("{:?}", names(&directory)));
        assert_eq!(names(&directory), ["model.pt"]);
    }
    assert_eq!(tier3::commits(&store, "last/last.pt").len(), 2, "the one before is no save of its own");
    daemon.ctl(&["flush", "--wait", "--timeout", "20"]);
    daemon.kill9();
    daemon.start_again();
    for (path, bytes) in all {
        assert_holds(&daemon, path, bytes.as_bytes(), "with empty memory");
    }
    for directory in directories {
        assert_eq!(names(&mount.join(directory)), ["model.pt"], "with empty memory");
    }
}

#[test]
fn a_file_saved_over_a_whole_one_and_torn_is_served_as_it_was() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    save(&daemon, "run/last_step5.pt", &noise(5, MIB));
    daemon.wait_committed("run/last_step5.pt", SHIELD_LIMIT);
    let mut job = Rank::start(&run, None);
    job.does("exec 3>last_step5.pt; head -c 300000 /dev/zero >&3");
    assert_eq!(fs::metadata(run.join("last_step5.pt")).unwrap().len(), 300_000);
    // A process that has the file open may read on. After that, the name means the whole save.
    let mut reader = fs::File::open(run.join("last_step5.pt")).unwrap();
    job.kill();
    wait_hidden(&daemon, "run/last_step5.pt");
    std::thread::sleep(STAYS);
    assert_eq!(std::io::copy(&mut reader, &mut std::io::sink()).unwrap(), 300_000);
    drop(reader);
    let whole = || (fs::read(run.join("last_step5.pt")).ok()? == noise(5, MIB)).then_some(());
    process::until(SHIELD_LIMIT, whole)
        .unwrap_or_else(|| panic!("{:#?}\n{}", daemon.checkpoints(), daemon.log_tail()));
    assert_eq!(tier3::commits(&daemon.tier3_dir(), "run/last_step5.pt").len(), 1);
    let torn = daemon.mount().join(".tidemark/torn/run/last_step5.pt");
    assert_eq!(fs::metadata(&torn).unwrap().len(), 300_000);
}

/// `ckpt.pt` under `torchrun`: only rank 0 saves it, over and over. No name counts steps, so only the close shows that the file is
/// whole.
#[test]
fn one_file_that_rank_0_of_many_saves_over_is_served_as_it_was_before_the_save_that_was_cut() {
    const FILE: &str = "run/ckpt.pt";
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let mut ranks: Vec<_> = (0..2).map(|rank| Rank::start(&run, Some(("29515", rank, 2)))).collect();
    for version in 1..=2 {
        ranks[0].does(&format!("printf %s save{version} >ckpt.pt"));
        let committed =
            || daemon.checkpoint(FILE).filter(|c| c["state"] == "committed" && c["version"] == version);
        process::until(SHIELD_LIMIT, committed)
            .unwrap_or_else(|| panic!("no version {version}: {:#?}", daemon.checkpoints()));
    }
    ranks[0].does("exec 3>ckpt.pt; printf %s sa >&3");
    ranks.into_iter().for_each(Rank::kill);
    let holds = || (fs::read(run.join("ckpt.pt")).ok()? == b"save2").then_some(());
    process::until(SHIELD_LIMIT, holds).unwrap_or_else(|| panic!("{:#?}", crate::site::events(&daemon)));
    daemon.kill9();
    daemon.start_again();
    holds().expect("with empty memory");
}

/// A save in place has all its names from its first file on.
#[test]
fn a_save_over_a_whole_one_is_whole_once_every_rank_has_written() {
    const FAMILY: &str = "run/ckpt_rank*.pt";
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let job = || (0..2).map(|rank| Rank::start(&run, Some(("29508", rank, 2)))).collect::<Vec<_>>();
    // The shell writes by a builtin, so the shell itself is the writer.
    let save = |ranks: &mut [Rank], rank: usize, save: u64| {
        ranks[rank].does(&format!("printf %s save{save} >ckpt_rank{rank}.pt"));
    };
    let wait_version = |daemon: &Daemon, version: u64| {
        let committed =
            || daemon.checkpoint(FAMILY).filter(|c| c["state"] == "committed" && c["version"] == version);
        process::until(SHIELD_LIMIT, committed)
            .unwrap_or_else(|| panic!("no version {version}: {:#?}", daemon.checkpoints()));
    };
    let wait_half = |daemon: &Daemon| {
        let place = daemon.mount().join(FAMILY);
        let waits = || {
            let shown = daemon.ctl_json(&["show", place.to_str().unwrap()]);
            shown["waits_for"][0].as_str()?.contains("only 1 of 2 ranks").then_some(())
        };
        process::until(SHIELD_LIMIT, waits).unwrap_or_else(|| panic!("{:#?}", daemon.checkpoints()));
    };
    let holds = |save: [u64; 2]| {
        let bytes = |rank: usize| fs::read(run.join(format!("ckpt_rank{rank}.pt"))).ok();
        (0..2).all(|rank| bytes(rank) == Some(format!("save{}", save[rank]).into_bytes())).then_some(())
    };

    let mut ranks = job();
    save(&mut ranks, 0, 1);
    save(&mut ranks, 1, 1);
    wait_version(&daemon, 1);
    save(&mut ranks, 0, 2);
    wait_half(&daemon);
    save(&mut ranks, 1, 2);
    wait_version(&daemon, 2);
    if machine::kernel_release() < (6, 15) {
        // Before Linux 6.15, the kernel does not report how a process ended.
        return;
    }
    // The job rewrites one rank's file on purpose, and then ends well.
    save(&mut ranks, 0, 3);
    wait_half(&daemon);
    ranks.into_iter().for_each(Rank::ends_well);
    wait_version(&daemon, 3);

    let mut ranks = job();
    save(&mut ranks, 0, 4);
    save(&mut ranks, 1, 4);
    wait_version(&daemon, 4);
    save(&mut ranks, 0, 5);
    wait_half(&daemon);
    holds([5, 4]).expect("its own job sees what it wrote");
    ranks.into_iter().for_each(Rank::kill);
    process::until(SHIELD_LIMIT, || holds([4, 4]))
        .unwrap_or_else(|| panic!("{:#?}", crate::site::events(&daemon)));
    assert_holds(&daemon, ".tidemark/torn/run/ckpt_rank0.pt", b"save5", "out of sight");
    daemon.kill9();
    daemon.start_again();
    holds([4, 4]).expect("with empty memory");
    wait_version(&daemon, 4);
}

#[test]
fn what_went_out_of_sight_comes_back_when_told_and_never_where_it_is_switched_off() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    // A torn save is hidden only if a job can load another one.
    save(&daemon, "run/step1.pt", &noise(1, MIB));
    daemon.wait_committed("run/step1.pt", SHIELD_LIMIT);
    let mut job = Rank::start(&run, None);
    job.does("exec 3>step7.pt; head -c 300000 /dev/zero >&3");
    job.kill();
    wait_hidden(&daemon, "run/step7.pt");
    assert_eq!(names(&run), ["step1.pt"]);
    let flush = daemon.ctl(&["flush", "--wait", "--timeout", "20"]);
    assert_eq!(flush.status.code(), Some(1), "torn is not durable: {}", shown(&flush));
    assert!(shown(&flush).contains(".tidemark/torn/run/step7.pt"), "{}", shown(&flush));
    let back = daemon.ctl_json(&["undelete", run.join("step7.pt").to_str().unwrap()]);
    assert_eq!(back["files"], 1, "{back:#}");
    std::thread::sleep(STAYS);
    assert_eq!(names(&run), ["step1.pt", "step7.pt"], "a person wants to see it");
    assert_eq!(daemon.checkpoint("run/step7.pt").expect("listed")["state"], "torn");
    drop(daemon);

    let config = format!("{CONFIG}[torn]\nhide = false\n");
    let Some(daemon) = start(options("256MiB", &config)) else { return };
    let run = daemon.mount().join("run");
    save(&daemon, "run/step1.pt", &noise(1, MIB));
    daemon.wait_committed("run/step1.pt", SHIELD_LIMIT);
    let mut job = Rank::start(&run, None);
    job.does("exec 3>step7.pt; head -c 300000 /dev/zero >&3");
    job.kill();
    std::thread::sleep(STAYS);
    assert_eq!(names(&run), ["step1.pt", "step7.pt"]);
}

/// Closed files do not show whether more were to come, but the end of their process does.
#[test]
fn a_directory_whose_writer_was_killed_between_two_files_is_not_whole() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    // The shell writes by a builtin, so the shell itself is the writer.
    let model = |step: u64| format!("mkdir step_{step}; printf %s state >step_{step}/model.pt");
    let mut well = Rank::start(&run, None);
    well.does(&model(1));
    writeln!(well.orders, "exit 0").unwrap();
    assert!(well.shell.wait().unwrap().success());
    let mut killed = Rank::start(&run, None);
    killed.does(&model(2));
    killed.kill();
    daemon.wait_committed("run/step_1", SHIELD_LIMIT);
    if machine::kernel_release() < (6, 15) {
        // Before Linux 6.15, the kernel does not report how a process ended.
        daemon.wait_committed("run/step_2", SHIELD_LIMIT);
        return;
    }
    wait_hidden(&daemon, "run/step_2");
    assert_eq!(names(&run), ["step_1"]);
    assert!(tier3::markers(&daemon.tier3_dir(), "run/step_2").is_empty());
}

/// Accelerate writes a user's registered objects last, and nothing in a checkpoint announces them. The saves follow each other so
/// fast that nothing has settled, and a flush does not wait for the settle time.
#[test]
fn a_flush_just_after_a_kill_makes_nothing_whole_that_lacks_what_the_save_before_has() {
    let Some(mut daemon) = start(options("256MiB", "[tier3]\npaced = false\n")) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let mut ranks: Vec<_> = (0..2).map(|rank| Rank::start(&run, Some(("29501", rank, 2)))).collect();
    for step in [1, 2] {
        let top = format!("checkpoint_{step}");
        ranks[0].does(&format!("mkdir {top}; printf %s model >{top}/model.safetensors"));
        for (rank, process) in ranks.iter_mut().enumerate() {
            process.does(&format!("printf %s state >{top}/random_states_{rank}.pkl"));
        }
        if step == 1 {
            ranks[0].does(&format!("printf %s progress >{top}/custom_checkpoint_0.pkl"));
        }
    }
    ranks.into_iter().for_each(Rank::kill);
    let flushed = daemon.ctl(&["flush", "--wait", "--timeout", "60", "-o", "json"]);
    let answer: serde_json::Value = serde_json::from_slice(&flushed.stdout).expect("JSON");
    let pending: Vec<_> = answer["pending"].as_array().unwrap().iter().map(|row| &row["reason"]).collect();
    if machine::kernel_release() < (6, 15) {
        // Before Linux 6.15, the kernel does not report how a process ended. A checkpoint that settles counts as whole there.
        assert!(pending.is_empty(), "{}", shown(&flushed));
        return;
    }
    assert_eq!(pending, ["torn"], "{}", shown(&flushed));
    assert!(tier3::markers(&daemon.tier3_dir(), "run/checkpoint_2").is_empty());

    daemon.kill9();
    daemon.start_again();
    assert_eq!(names(&run), ["checkpoint_1"], "what a job takes that looks for the highest number");
    assert_eq!(names(&run.join("checkpoint_1")).len(), 4);
}

/// The node is lost in the middle of a save. Resume code that takes the highest step must not find an empty one.
#[test]
fn a_save_that_the_node_died_in_is_no_empty_directory_afterwards() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    save(&daemon, "run/step_1/model.pt", &noise(1, MIB));
    daemon.wait_committed("run/step_1", SHIELD_LIMIT);
    let mut job = Rank::start(&run, None);
    job.does("mkdir -p ../other step_2/part; exec 3>step_2/part/model.pt; head -c 700000 /dev/zero >&3");
    // The flush waits in vain for the open file. Meanwhile, the tree gets to Tier-3.
    let flushed = daemon.ctl(&["flush", "--wait", "--timeout", "3"]);
    assert!(!flushed.status.success() && shown(&flushed).contains("step_2"), "{}", shown(&flushed));
    daemon.kill9();
    job.kill();
    daemon.start_again();
    assert!(daemon.mount().join("other").is_dir(), "the tree of that moment is there");
    assert_eq!(names(&run), ["step_1"]);

    // Once the step is saved, its empty directories are there too.
    save(&daemon, "run/step_2/part/model.pt", &noise(2, MIB));
    fs::create_dir(run.join("step_2/empty")).unwrap();
    daemon.wait_committed("run/step_2", SHIELD_LIMIT);
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    assert_eq!(names(&run), ["step_1", "step_2"]);
    assert_eq!(names(&run.join("step_2")), ["empty", "part"]);
}

/// `save_pretrained` writes a model's card and its configuration before any weights. If the job dies, these files must not remain alone,
/// whatever the node loses and whenever. If their writer ended well, they are ordinary files.
#[test]
fn what_comes_before_the_weights_is_not_there_alone_when_node_and_job_are_lost() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    save(&daemon, "run/checkpoint-1/model.pt", &noise(1, MIB));
    daemon.wait_committed("run/checkpoint-1", SHIELD_LIMIT);
    let begins = |port: &str, more: &str| {
        let mut trainer = Rank::start(&run, Some((port, 0, 1)));
        trainer.does(&format!(
            "exec perl -e '$| = 1; mkdir \"checkpoint-2\"; for my $before (\"README.md\", \"config.json\") \
             {{ open(F, \">checkpoint-2/$before\"); print F \"x\"; close(F); }} {more} print \"done\\n\"; <STDIN>'"
        ));
        trainer
    };
    let in_flight = "open(F, \">checkpoint-2/.tmpAb12Cd\"); syswrite(F, \"x\");";
    // A flush waits for the decision.
    begins("29506", in_flight).kill();
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    assert_eq!(names(&run), ["checkpoint-1"], "killed, flushed, lost");
    // The node is told to end right after the job.
    begins("29507", in_flight).kill();
    daemon.stop();
    daemon.start_again();
    assert_eq!(names(&run), ["checkpoint-1"], "killed, ended");
    // The daemon waits at its end for the job, and sees the job die.
    for (port, more) in [("29509", in_flight), ("29510", "")] {
        let trainer = begins(port, more);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(700));
            trainer.kill();
        });
        daemon.stop();
        killer.join().expect("it was killed");
        daemon.start_again();
        assert_eq!(names(&run), ["checkpoint-1"], "killed while the node ended, {more}");
    }

    let cp = Command::new("sh")
        .args(["-c", "mkdir checkpoint-3; echo card >checkpoint-3/README.md"])
        .current_dir(&run)
        .status();
    assert!(cp.unwrap().success());
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    assert_holds(&daemon, "run/checkpoint-3/README.md", b"card\n", "who wrote it ended well");
    // A writer that lives and adds no more may have meant just these files.
    let mut notebook = Rank::start(&run, None);
    notebook.does(
        "exec perl -e '$| = 1; mkdir \"checkpoint-4\"; open(F, \">checkpoint-4/config.json\"); close(F); print \"done\\n\"; \
         <STDIN>'",
    );
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    assert_eq!(names(&run.join("checkpoint-4")), ["config.json"], "it had a settle time to write more");
    notebook.kill();
}

/// Hidden torn checkpoints, which no user can remove by their old names, must not keep a job from saving.
#[test]
fn what_is_out_of_sight_gives_way_to_a_save_that_waits_for_memory() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    save(&daemon, "run/step0.pt", &noise(5, MIB));
    daemon.wait_committed("run/step0.pt", SHIELD_LIMIT);
    for step in 1..=3 {
        let mut job = Rank::start(&run, None);
        job.does(&format!("exec 3>step{step}.pt; head -c {} /dev/zero >&3", 60 * MIB));
        job.kill();
        wait_hidden(&daemon, &format!("run/step{step}.pt"));
    }
    save(&daemon, "run/step4.pt", &noise(4, 120 * MIB));
    // The last one was evicted too. The kernel may show a name a moment longer than it exists.
    let torn = daemon.mount().join(".tidemark/torn/run/step1.pt");
    process::until(SHIELD_LIMIT, || (!torn.exists()).then_some(())).expect("they made room");
    assert_holds(&daemon, "run/step4.pt", &noise(4, 120 * MIB), "saved");
}

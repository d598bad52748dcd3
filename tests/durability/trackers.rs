//! Names of checkpoints: trackers of frameworks, and symbolic links.
//!
//! Owns: the checkpoint that they name after a save that broke off, and that Tier-3 has them no sooner than that checkpoint. Does not
//! own: hiding (`shield`).

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;

use tidemark_tests::{machine, process, tier3};

use crate::shield::{Rank, SHIELD_LIMIT, STAYS};
use crate::site::{CONFIG, MIB, assert_holds, names, noise, options, save, start};

/// SIGTERM ends every rank with status 0 in the middle of a save. The files are the user's and stay, but no job can load them.
#[test]
fn a_tracker_names_no_save_that_lacks_files_although_every_rank_ended_well() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let part = |tag: &str, rank: usize| format!("{tag}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
    let job =
        |run: &Path| -> Vec<_> { (0..2).map(|rank| Rank::start(run, Some(("29511", rank, 2)))).collect() };
    let half = |ranks: &mut [Rank], tag: &str| {
        ranks[0].does(&format!("mkdir -p {tag}; echo {tag} >{}", part(tag, 0)));
        ranks[0].does(&format!("printf %s {tag} >latest"));
    };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let mut ranks = job(&run);
    half(&mut ranks, "global_step10");
    ranks[1].does(&format!("echo global_step10 >{}", part("global_step10", 1)));
    daemon.wait_committed("run/global_step10", SHIELD_LIMIT);
    half(&mut ranks, "global_step20");
    ranks.pop().unwrap().ends_well();
    std::thread::sleep(STAYS);
    assert_holds(&daemon, "run/latest", b"global_step20", "rank 0 lives");
    ranks.pop().unwrap().ends_well();
    let followed = || (fs::read(run.join("latest")).ok()? == b"global_step10").then_some(());
    process::until(SHIELD_LIMIT, followed)
        .unwrap_or_else(|| panic!("{:?}: {:#?}", names(&run), crate::site::events(&daemon)));
    if machine::kernel_release() >= (6, 15) {
        assert_eq!(names(&run), ["global_step10", "global_step20", "latest"], "they ended well");
    }
    // If no other checkpoint is whole, a job must fail, and not begin at step 0.
    let first = daemon.mount().join("first");
    fs::create_dir(&first).unwrap();
    let mut ranks = job(&first);
    half(&mut ranks, "global_step10");
    ranks.into_iter().for_each(Rank::ends_well);
    std::thread::sleep(STAYS);
    assert_holds(&daemon, "first/latest", b"global_step10", "there is nothing else");
    daemon.ctl(&["flush", "--wait", "--timeout", "20"]);
    daemon.kill9();
    daemon.start_again();
    assert_holds(&daemon, "run/latest", b"global_step10", "with empty memory");
    assert_holds(&daemon, "first/latest", b"global_step10", "with empty memory");
}

/// A job that saves often dies before its last whole save has settled. No process is left that could add to the save.
#[test]
fn a_tracker_names_a_whole_save_that_has_not_settled() {
    // The settle time is longer than this test.
    let Some(daemon) = start(options("256MiB", "[save]\nsettle_s = 600\n")) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let mut ranks: Vec<_> = (0..2).map(|rank| Rank::start(&run, Some(("29502", rank, 2)))).collect();
    let part = |tag: &str, rank: usize| format!("{tag}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
    for (rank, shell) in ranks.iter_mut().enumerate() {
        let mut file = |tag: &str| shell.does(&format!("mkdir -p {tag}; echo state >{}", part(tag, rank)));
        file("global_step10");
        if rank == 0 {
            file("global_step20");
        }
    }
    ranks[0].does("printf %s global_step20 >latest");
    // A writer outside the job may still add to the save.
    let mut aside = Rank::start(&run, None);
    aside.does("echo state >global_step10/mp_rank_00_model_states.pt");
    ranks.into_iter().for_each(Rank::kill);
    std::thread::sleep(STAYS);
    assert_eq!(names(&run), ["global_step10", "global_step20", "latest"], "nothing whole is there instead");
    assert_holds(&daemon, "run/latest", b"global_step20", "without a tracker a job begins at step 0");
    aside.kill();
    let followed = || (fs::read(run.join("latest")).ok()? == b"global_step10").then_some(());
    process::until(SHIELD_LIMIT, followed)
        .unwrap_or_else(|| panic!("{:?}: {:#?}", names(&run), crate::site::events(&daemon)));
    assert_eq!(names(&run), ["global_step10", "latest"]);
    assert_ne!(daemon.checkpoint("run/global_step10").expect("listed")["state"], "committed");
}

/// A rank is killed while it writes the tracker, and another of its session lives a moment longer.
#[test]
fn a_cut_tracker_waits_for_the_whole_save_that_it_was_to_name() {
    // The settle time is longer than this test.
    let Some(mut daemon) = start(options("256MiB", "[save]\nsettle_s = 600\n")) else { return };
    let save = |ranks: &mut [Rank], tag: &str| {
        for (rank, shell) in ranks.iter_mut().enumerate() {
            let part = format!("{tag}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
            shell.does(&format!("mkdir -p {tag}; echo {tag} >{part}"));
        }
    };
    // The cases are the first save of a run, and a save whose name sorts before the previous one's.
    let cases = [("first", None, "global_step10"), ("later", Some("global_step90"), "global_step100")];
    for (run, before, tag) in cases {
        let run = daemon.mount().join(run);
        fs::create_dir(&run).unwrap();
        let mut ranks: Vec<_> = (0..2).map(|rank| Rank::start(&run, Some(("29502", rank, 2)))).collect();
        if let Some(before) = before {
            save(&mut ranks, before);
            ranks[0].does(&format!("printf %s {before} >latest"));
            daemon.flush();
        }
        save(&mut ranks, tag);
        ranks[0].does("exec 3>latest");
        ranks.remove(0).kill();
        std::thread::sleep(STAYS);
        let path = format!("{}/latest", run.file_name().unwrap().to_str().unwrap());
        assert_holds(&daemon, &path, b"", "the other one may add to it");
        ranks.remove(0).kill();
        if before.is_none() {
            let followed = || (fs::read(run.join("latest")).ok()? == tag.as_bytes()).then_some(());
            process::until(SHIELD_LIMIT, followed)
                .unwrap_or_else(|| panic!("{:?}: {:#?}", names(&run), crate::site::events(&daemon)));
        }
    }
    // A flush waits for the tracker.
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    for (run, _, tag) in cases {
        assert_holds(&daemon, &format!("{run}/latest"), tag.as_bytes(), "with empty memory");
    }
}

/// The node is lost while the checkpoint that a tracker names is being uploaded. Tier-3 has the previous tracker.
#[test]
fn a_tracker_is_in_tier3_no_sooner_than_what_it_names() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    let optimizer = |step: u64, rank: u64| {
        format!("run/global_step{step}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    };
    let model = |step: u64| format!("run/global_step{step}/mp_rank_00_model_states.pt");
    save(&daemon, &optimizer(10, 0), &noise(1, MIB));
    save(&daemon, &optimizer(10, 1), &noise(2, MIB));
    save(&daemon, &model(10), &noise(3, MIB));
    save(&daemon, "run/latest", b"global_step10");
    daemon.flush();
    save(&daemon, &optimizer(20, 0), &noise(4, MIB));
    save(&daemon, &model(20), &noise(5, MIB));
    let mut open = fs::File::create(daemon.mount().join(optimizer(20, 1))).unwrap();
    open.write_all(b"half of it").unwrap();
    save(&daemon, "run/latest", b"global_step20");
    std::thread::sleep(STAYS);
    daemon.kill9();
    drop(open);
    daemon.start_again();
    assert_holds(&daemon, "run/latest", b"global_step10", "what it names is there");
    assert_eq!(names(&run), ["global_step10", "latest"]);

    for rank in 0..2 {
        save(&daemon, &optimizer(20, rank), &noise(rank, MIB));
    }
    save(&daemon, &model(20), &noise(5, MIB));
    save(&daemon, "run/latest", b"global_step20");
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    assert_holds(&daemon, "run/latest", b"global_step20", "what it names is there");
    assert_holds(&daemon, &model(20), &noise(5, MIB), "it is whole");
}

/// The rule also holds for a link, as Lightning makes one. Nor does a link alone bring back the directory in which it lies.
#[test]
fn a_link_is_in_tier3_no_sooner_than_what_it_names() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    let last = run.join("last.ckpt");
    let names_step = |step: u64| {
        drop(fs::remove_file(&last));
        symlink(format!("step={step}.ckpt"), &last).unwrap();
    };
    save(&daemon, "run/step=1.ckpt", &noise(1, MIB));
    names_step(1);
    daemon.flush();
    let mut open = fs::File::create(run.join("step=2.ckpt")).unwrap();
    open.write_all(b"half of it").unwrap();
    names_step(2);
    fs::create_dir(run.join("step_9")).unwrap();
    symlink("../step=1.ckpt", run.join("step_9/before")).unwrap();
    let held = fs::File::create(run.join("step_9/model.pt")).unwrap();
    let trees = || tier3::files_below(&daemon.tier3_dir().join(".tidemark/tree")).len();
    let before = trees();
    fs::create_dir(daemon.mount().join("made-after-it")).unwrap();
    process::until(SHIELD_LIMIT, || (trees() > before).then_some(())).expect("the tree is written");
    daemon.kill9();
    drop((open, held));
    daemon.start_again();
    assert!(daemon.mount().join("made-after-it").exists(), "the tree was written after the link");
    assert_eq!(names(&run), ["last.ckpt", "step=1.ckpt"]);
    assert_holds(&daemon, "run/last.ckpt", &noise(1, MIB), "what it names is there");

    save(&daemon, "run/step=2.ckpt", &noise(2, MIB));
    names_step(2);
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    assert_holds(&daemon, "run/last.ckpt", &noise(2, MIB), "what it names is there");
}

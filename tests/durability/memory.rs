//! A Tier-1 that is smaller than the bytes that pass through it, and a trainer whose memory is smaller than its checkpoint.
//!
//! Owns: sums of bytes against budgets. Does not own: the budget's own arithmetic (engine, tier1).

use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidemark_tests::cgroup::Cgroup;
use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::{machine, process};

use crate::site::{
    CONFIG, MIB, NEVER_SETTLES, assert_holds, events, has_problem, noise, options, problems, save, start,
    tier,
};

const SAVES: u64 = 8;
/// Size of more than half of 256 MiB, which is no multiple of a page or chunk.
const LARGE_BYTES: usize = 150 * MIB + 4099;
/// Limit of a trainer that writes 512 MiB. Into a warm Tier-1, that takes well below a second, into a cold one some seconds.
const TRAINER_LIMIT: Duration = Duration::from_secs(120);

/// Guard that ends the other thread however this one ends, because a scope waits for all of its threads.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Saves with `path_of`, flushes each save, and checks the use of the budget meanwhile.
fn saved_again_and_again(daemon: &Daemon, path_of: impl Fn(u64) -> String, seed: u64) {
    let over = AtomicBool::new(false);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                let tier1 = tier(daemon, "tier1");
                if tier1["used_bytes"].as_u64().unwrap() > tier1["size_bytes"].as_u64().unwrap() {
                    over.store(true, Ordering::Release);
                }
            }
        });
        let _end = End(&ended);
        for round in 0..SAVES {
            let (path, bytes) = (path_of(round), noise(seed + round, LARGE_BYTES));
            save(daemon, &path, &bytes);
            daemon.flush();
            assert_holds(daemon, &path, &bytes, &format!("save {round}"));
            assert_eq!(daemon.checkpoint(&path).expect("it is listed")["state"], "committed");
        }
    });
    assert!(!over.load(Ordering::Acquire), "Tier-1 went beyond its size");
}

#[test]
fn a_checkpoint_larger_than_half_of_memory_is_saved_to_new_paths_again_and_again() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let path = |round: u64| format!("run/step{round}.pt");
    saved_again_and_again(&daemon, path, 100);
    daemon.stop();
    daemon.start_again();
    for round in 0..SAVES {
        assert_holds(&daemon, &path(round), &noise(100 + round, LARGE_BYTES), "with empty memory");
    }
}

#[test]
fn a_checkpoint_larger_than_half_of_memory_is_saved_to_one_path_again_and_again() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    saved_again_and_again(&daemon, |_| "run/model.pt".into(), 200);
    // The replaced bytes are in Tier-3, so evicting them gives each save its room. No save waits for it in vain.
    assert!(!daemon.log().contains("without the room that it had"), "{}", daemon.log());
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, "run/model.pt", &noise(200 + SAVES - 1, LARGE_BYTES), "with empty memory");
}

#[test]
fn a_save_of_unknown_size_finds_room_where_everything_may_give_way() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    for step in 1..=24 {
        save(&daemon, &format!("run/step{step}.pt"), &noise(400 + step, 10 * MIB));
        daemon.flush();
    }
    // All files so far are committed. The names are new, so the daemon cannot know how large these files will be.
    for step in 101..=106 {
        save(&daemon, &format!("run/step{step}.pt"), &noise(400 + step, 30 * MIB));
    }
    daemon.flush();
    for step in 101..=106 {
        assert_holds(&daemon, &format!("run/step{step}.pt"), &noise(400 + step, 30 * MIB), "in a burst");
    }
}

/// The removed file is not yet reported as whole, so the seal or the upload may be at work on it when it goes.
#[test]
fn what_was_just_removed_makes_room_for_the_next_save() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let (first, next) = (vec![1; 220 * MIB], vec![2; 150 * MIB]);
    let path = |name: &str| daemon.mount().join(name);
    for round in 0..3 {
        fs::write(path("first"), &first).unwrap();
        fs::remove_file(path("first")).unwrap();
        // The daemon cannot know the size of this write, which comes at memory speed.
        let written = fs::write(path(&format!("next-{round}")), &next);
        assert!(written.is_ok(), "round {round}: {written:?}");
        // The same holds for a file that was renamed before its removal.
        fs::rename(path(&format!("next-{round}")), path("next")).unwrap();
        fs::remove_file(path("next")).unwrap();
    }
}

/// Most bytes are cut off while the seal reads them.
#[test]
fn what_was_just_cut_off_makes_room_for_the_next_save() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let (first, next) = (vec![1; 220 * MIB], vec![2; 150 * MIB]);
    let path = |name: &str| daemon.mount().join(name);
    for round in 0..3 {
        fs::write(path("first"), &first).unwrap();
        let cut = Command::new("truncate").args(["-s", "1M"]).arg(path("first")).status().unwrap();
        assert!(cut.success());
        let written = fs::write(path("next"), &next);
        assert!(written.is_ok(), "round {round}: {written:?}");
        assert!(fs::read(path("first")).unwrap() == first[..MIB], "round {round}");
        fs::remove_file(path("first")).unwrap();
        fs::remove_file(path("next")).unwrap();
    }
}

#[test]
fn a_trainer_in_a_memory_cgroup_smaller_than_its_checkpoint_saves_it() {
    const FILE_MIB: usize = 512;
    let group = match Cgroup::make("durability", 128 * MIB) {
        Ok(group) => group,
        Err(why) => return machine::left_out(&format!("a memory cgroup cannot be made: {why}")),
    };
    let Some(mut daemon) = start(options("1GiB", CONFIG)) else { return };
    let source = daemon.scratch("source").join("bytes");
    let bytes = noise(300, FILE_MIB * MIB);
    fs::write(&source, &bytes).unwrap();
    fs::create_dir(daemon.mount().join("run")).unwrap();
    let target = daemon.mount().join("run/step1.pt");
    // dd opens with O_TRUNC and writes on, so the daemon cannot know the file's size.
    let script = "echo $$ > \"$0/cgroup.procs\" && exec dd if=\"$1\" of=\"$2\" bs=1M iflag=direct";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(group.path()).arg(&source).arg(&target);
    let output = process::run(&mut command, TRAINER_LIMIT);
    assert!(output.status.success(), "{}", shown(&output));
    let charged = group.most_charged_bytes();
    // The limit is 32 MiB for the file, and the memory of dd itself and its reads.
    assert!(charged <= 40 * MIB, "{charged} bytes were charged to the trainer");
    assert_holds(&daemon, "run/step1.pt", &bytes, "saved from a small cgroup");
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, "run/step1.pt", &bytes, "with empty memory");
}

#[test]
fn a_tier1_that_is_full_of_what_may_not_give_way_is_a_problem() {
    let Some(daemon) = start(options("64MiB", NEVER_SETTLES)) else { return };
    let bytes = noise(40, 20 * MIB);
    fs::create_dir_all(daemon.mount().join("run/step1")).unwrap();
    assert!(!has_problem(&daemon, "tier1_full"));
    // All shards belong to one checkpoint. A file beside it would be committed when the next began, and be evicted.
    let failed =
        (0..5).find(|shard| fs::write(daemon.mount().join(format!("run/step1/{shard}.pt")), &bytes).is_err());
    assert!(failed.is_some(), "64 MiB took 100 MB");
    let said = process::until(Duration::from_secs(20), || {
        let told = events(&daemon).iter().any(|event| event["kind"] == "full");
        (has_problem(&daemon, "tier1_full") && told).then_some(())
    });
    assert!(said.is_some(), "{:#?}", problems(&daemon));
    assert_eq!(daemon.ctl(&["status", "--exit-code"]).status.code(), Some(1));
    assert!(daemon.log().contains("saves fail"), "{}", daemon.log_tail());
}

/// Symlinks have no bytes in memory.
#[test]
fn a_tree_that_has_as_many_names_as_tier1_keeps_is_a_problem_of_its_own() {
    let Some(daemon) = start(options("64MiB", CONFIG)) else { return };
    let link = |number: usize| daemon.mount().join(format!("link-{number}"));
    let refused = (0..100_000).find_map(|number| std::os::unix::fs::symlink("a", link(number)).err());
    assert_eq!(refused.and_then(|error| error.raw_os_error()), Some(libc::ENOSPC));
    let (_, told, _) =
        problems(&daemon).into_iter().find(|(code, ..)| code == "tier1_full").expect("it is said");
    assert!(told.contains("names"), "{told}");
    (0..20).for_each(|number| fs::remove_file(link(number)).unwrap());
    fs::write(daemon.mount().join("one.txt"), "there is room for a name again").unwrap();
    assert!(!has_problem(&daemon, "tier1_full"), "{:#?}", problems(&daemon));
}

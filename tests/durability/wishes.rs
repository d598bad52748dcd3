//! A restart with empty memory: files that the job removed stay removed, and an unproven save does not replace a proven one.
//!
//! Owns: the tree after a restart, against the tree before it. Does not own: the bytes themselves (`bytes`), SIGTERM (`ending`).

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use tidemark_tests::daemon::Daemon;
use tidemark_tests::{process, tier3};

use crate::site::{CONFIG, NEVER_SETTLES, assert_holds, names, noise, options, save, start};

/// Limit of settling, several times the settle time, for a busy machine.
const SETTLE_LIMIT: Duration = Duration::from_secs(20);

/// Limit until the tree is written, which happens every 10 s when no flush waits for it.
const TREE_LIMIT: Duration = Duration::from_secs(40);

/// Saves each file from a process of its own, so that nothing proves that all are there.
fn save_by_several(daemon: &Daemon, files: &[(&str, &[u8])]) {
    let aside = daemon.scratch("by-several").join("bytes");
    for (path, bytes) in files {
        fs::write(&aside, bytes).unwrap();
        let path = daemon.mount().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let copied = Command::new("cp").arg(&aside).arg(&path).status().unwrap();
        assert!(copied.success(), "{}", path.display());
    }
}

fn wait_settled(daemon: &Daemon, path: &str) {
    let settled = |daemon: &Daemon| {
        let listed = daemon.checkpoint(path)?;
        (listed["state"] == "settled" && listed["copies"]["object"]["files"].as_u64() > Some(0)).then_some(())
    };
    process::until(SETTLE_LIMIT, || settled(daemon))
        .unwrap_or_else(|| panic!("{path} has not settled: {:#?}", daemon.checkpoints()));
}

fn there(daemon: &Daemon, path: impl AsRef<Path>) -> bool {
    daemon.mount().join(path).symlink_metadata().is_ok()
}

/// S-restart: "What was removed stays removed, committed or not".
#[test]
fn what_was_removed_does_not_come_back() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = [noise(1, 70_000), noise(2, 70_001)];
    let files = [("run/step_1/rank0.pt", &bytes[0][..]), ("run/step_1/rank1.pt", &bytes[1][..])];
    save_by_several(&daemon, &files);
    wait_settled(&daemon, "run/step_1");
    save(&daemon, "run/step2.pt", &bytes[0]);
    save(&daemon, "run/step3.pt", &bytes[1]);
    daemon.wait_committed("run/step2.pt", SETTLE_LIMIT);
    fs::remove_dir_all(daemon.mount().join("run/step_1")).unwrap();
    fs::remove_file(daemon.mount().join("run/step2.pt")).unwrap();
    for restart in ["the first restart", "the second restart"] {
        daemon.stop();
        daemon.start_again();
        assert!(!there(&daemon, "run/step_1"), "settled and removed, {restart}");
        assert!(!there(&daemon, "run/step2.pt"), "committed and removed, {restart}");
        assert_holds(&daemon, "run/step3.pt", &bytes[1], restart);
    }
    // The removed names can be used again.
    save_by_several(&daemon, &files);
    save(&daemon, "run/step2.pt", &bytes[1]);
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, files[0].0, files[0].1, "saved again");
    assert_holds(&daemon, "run/step2.pt", &bytes[1], "saved again");
}

/// S-restart: "whole checkpoints or single names of them".
#[test]
fn names_removed_from_a_committed_checkpoint_do_not_come_back() {
    let Some(mut daemon) = start(options("256MiB", NEVER_SETTLES)) else { return };
    let name = |rank: u64| format!("run/step_1/rank{rank}.pt");
    for rank in 0..4 {
        save(&daemon, &name(rank), &noise(10 + rank, 70_000));
    }
    save(&daemon, "run/step_1/extra/rank4.pt", &noise(14, 70_000));
    fs::hard_link(daemon.mount().join(name(3)), daemon.mount().join("run/step_1/rank5.pt")).unwrap();
    daemon.flush();
    assert_eq!(daemon.checkpoint("run/step_1").unwrap()["state"], "committed");
    fs::remove_file(daemon.mount().join(name(1))).unwrap();
    fs::remove_file(daemon.mount().join(name(3))).unwrap();
    fs::remove_dir_all(daemon.mount().join("run/step_1/extra")).unwrap();
    daemon.flush();
    // The first restart follows a kill, because the flush has made the removals durable.
    for restart in ["killed", "stopped"] {
        if restart == "killed" {
            daemon.kill9();
        } else {
            daemon.stop();
        }
        daemon.start_again();
        for rank in [0, 2] {
            assert_holds(&daemon, &name(rank), &noise(10 + rank, 70_000), restart);
        }
        assert_holds(&daemon, "run/step_1/rank5.pt", &noise(13, 70_000), "its other name was removed");
        for gone in [&name(1), &name(3), "run/step_1/extra"] {
            assert!(!there(&daemon, gone), "{gone} came back, {restart}");
        }
        let listed = daemon.checkpoint("run/step_1").unwrap();
        assert_eq!((&listed["state"], &listed["version"]), (&"committed".into(), &1.into()), "{listed:#}");
    }
    // A file saved again under the name is not the removed one.
    save(&daemon, &name(1), &noise(20, 70_000));
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, &name(1), &noise(20, 70_000), "saved again");
    assert!(!there(&daemon, name(3)));
}

#[test]
fn a_loose_file_keeps_its_bytes_and_its_name_through_chains_of_renames() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let rename = |daemon: &Daemon, from: &str, to: &str| {
        fs::rename(daemon.mount().join(from), daemon.mount().join(to)).unwrap();
    };
    save(&daemon, "run/a.txt", b"one");
    save(&daemon, "run/b.txt", b"the other, longer");
    save(&daemon, "run/over.txt", b"replaced");
    daemon.flush();
    // A file moves away and back, with another file under its name meanwhile.
    rename(&daemon, "run/a.txt", "run/c.txt");
    daemon.flush();
    save(&daemon, "run/a.txt", b"passing");
    daemon.flush();
    rename(&daemon, "run/c.txt", "run/a.txt");
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    assert_holds(&daemon, "run/a.txt", b"one", "renamed away and back");
    assert!(!there(&daemon, "run/c.txt"));
    // Two files swap names, and one moves over a third.
    rename(&daemon, "run/a.txt", "run/t.txt");
    rename(&daemon, "run/b.txt", "run/a.txt");
    rename(&daemon, "run/t.txt", "run/over.txt");
    daemon.flush();
    for end in [Daemon::kill9, Daemon::stop] {
        end(&mut daemon);
        daemon.start_again();
        assert_holds(&daemon, "run/a.txt", b"the other, longer", "renamed onto a used name");
        assert_holds(&daemon, "run/over.txt", b"one", "renamed over another");
        for gone in ["run/b.txt", "run/c.txt", "run/t.txt"] {
            assert!(!there(&daemon, gone), "{gone} came back");
        }
        let verified = daemon.ctl_json(&["verify", "--deep"]);
        assert_eq!((&verified["files"], &verified["unrecoverable"]), (&2.into(), &serde_json::json!([])));
    }
}

#[test]
fn a_renamed_loose_file_is_found_under_its_old_name_until_the_new_one_is_in_tier3() {
    let Some(mut daemon) = start(options("256MiB", NEVER_SETTLES)) else { return };
    save(&daemon, "run/a.txt", b"the only copy");
    daemon.flush();
    let trees = |daemon: &Daemon| tier3::files_below(&daemon.tier3_dir().join(".tidemark/tree")).len();
    let before = trees(&daemon);
    fs::rename(daemon.mount().join("run/a.txt"), daemon.mount().join("run/b.txt")).unwrap();
    fs::create_dir(daemon.mount().join("beside")).unwrap();
    process::until(TREE_LIMIT, || (trees(&daemon) > before).then_some(())).expect("the tree is written");
    assert!(!daemon.tier3_dir().join(".tidemark/loose/run/b.txt").exists(), "b has not settled");
    daemon.kill9();
    daemon.start_again();
    assert!(there(&daemon, "beside"), "the tree was written after the rename");
    assert_holds(&daemon, "run/a.txt", b"the only copy", "the rename did not reach Tier-3");
    fs::rename(daemon.mount().join("run/a.txt"), daemon.mount().join("run/b.txt")).unwrap();
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    assert_holds(&daemon, "run/b.txt", b"the only copy", "the rename reached Tier-3");
    assert!(!there(&daemon, "run/a.txt"));
}

/// S-restart: after `flush --wait` reported a removal, the removed file does not come back. A file that once had its name may be
/// renamed once more, the name may be taken again, and no flush need wait any longer.
#[test]
fn a_removal_that_tier3_knows_stands() {
    let Some(mut daemon) = start(options("256MiB", NEVER_SETTLES)) else { return };
    let at = |daemon: &Daemon, path: &str| daemon.mount().join(path);
    let rename =
        |daemon: &Daemon, from: &str, to: &str| fs::rename(at(daemon, from), at(daemon, to)).unwrap();
    let trees = |daemon: &Daemon| tier3::files_below(&daemon.tier3_dir().join(".tidemark/tree")).len();
    save(&daemon, "run/a.txt", b"renamed twice");
    save(&daemon, "run/anew.txt", b"the name is taken anew");
    save(&daemon, "one/step1.pt", b"renamed twice, once a checkpoint");
    save(&daemon, "many/step_1/a.pt", b"renamed twice, of a checkpoint of which more is there");
    save(&daemon, "many/step_1/b.pt", b"what stays");
    save(&daemon, "gone/step1.pt", b"of a job that lives");
    save(&daemon, "gone/step2.pt", b"its next");
    daemon.flush();
    let away = ["run/a.txt", "run/anew.txt", "one/step1.pt", "many/step_1/a.pt", "gone/step1.pt"];
    let renamed = [away[0], away[2], away[3]];
    let kept: Vec<_> = renamed.iter().map(|path| fs::read(at(&daemon, path)).unwrap()).collect();
    for (number, path) in renamed.iter().enumerate() {
        rename(&daemon, path, &format!("run/once-{number}.txt"));
    }
    fs::remove_file(at(&daemon, away[1])).unwrap();
    fs::remove_file(at(&daemon, away[4])).unwrap();
    daemon.flush();
    let before = trees(&daemon);
    for number in 0..renamed.len() {
        rename(&daemon, &format!("run/once-{number}.txt"), &format!("run/twice-{number}.txt"));
    }
    save(&daemon, "run/anew.txt", b"not in Tier-3 yet");
    fs::create_dir(at(&daemon, "beside")).unwrap();
    process::until(TREE_LIMIT, || (trees(&daemon) > before).then_some(())).expect("the tree is written");
    daemon.kill9();
    daemon.start_again();
    assert!(there(&daemon, "beside"), "the tree was written after the second renames");
    for (number, bytes) in kept.iter().enumerate() {
        assert!(!there(&daemon, format!("run/twice-{number}.txt")), "it has not settled");
        assert_holds(&daemon, &format!("run/once-{number}.txt"), bytes, "the last name that Tier-3 has");
    }
    let back: Vec<_> = away.iter().filter(|path| there(&daemon, path)).collect();
    assert_eq!(back, Vec::<&&str>::new(), "came back");
    // The recorded removal does not apply to a file saved there later, or moved there again.
    save(&daemon, "run/anew.txt", b"anew");
    rename(&daemon, "run/once-0.txt", "run/a.txt");
    rename(&daemon, "run/once-1.txt", "one/step1.pt");
    daemon.flush();
    for end in [Daemon::kill9, Daemon::stop] {
        end(&mut daemon);
        daemon.start_again();
        assert_holds(&daemon, "run/anew.txt", b"anew", "saved under a name that was removed");
        assert_holds(&daemon, "run/a.txt", &kept[0], "renamed back");
        assert_holds(&daemon, "one/step1.pt", &kept[1], "renamed back");
        assert!(!there(&daemon, "run/once-0.txt") && !there(&daemon, "run/once-1.txt"));
    }
}

/// P2, S-restart: removals and renames that a killed daemon did not bring to Tier-3 are found by the next one, by comparison.
#[test]
fn what_was_removed_or_renamed_just_before_a_kill_stays_so() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let at = |daemon: &Daemon, path: &str| daemon.mount().join(path);
    for name in
        ["gone", "from", "grows", "linked", "becomes-a-link", "becomes-a-directory", "becomes-another"]
    {
        save(&daemon, &format!("d/{name}"), name.as_bytes());
    }
    daemon.flush();
    fs::remove_file(at(&daemon, "d/gone")).unwrap();
    for (from, to) in [("from", "to"), ("grows", "grown"), ("linked", "link1"), ("becomes-another", "kept")] {
        fs::rename(at(&daemon, &format!("d/{from}")), at(&daemon, &format!("d/{to}"))).unwrap();
    }
    for gone in ["becomes-a-link", "becomes-a-directory"] {
        fs::remove_file(at(&daemon, &format!("d/{gone}"))).unwrap();
    }
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    fs::OpenOptions::new().append(true).open(at(&daemon, "d/grown")).unwrap().write_all(b" more").unwrap();
    fs::hard_link(at(&daemon, "d/link1"), at(&daemon, "d/link2")).unwrap();
    fs::hard_link(at(&daemon, "d/kept"), at(&daemon, "d/becomes-another")).unwrap();
    std::os::unix::fs::symlink("elsewhere", at(&daemon, "d/becomes-a-link")).unwrap();
    save(&daemon, "d/becomes-a-directory/inner", b"inner");
    daemon.flush();
    let expected = [
        ("becomes-another", "becomes-another"),
        ("grown", "grows more"),
        ("kept", "becomes-another"),
        ("link1", "linked"),
        ("link2", "linked"),
        ("to", "from"),
        ("becomes-a-directory/inner", "inner"),
    ];
    for end in [Daemon::kill9, Daemon::stop] {
        end(&mut daemon);
        daemon.start_again();
        for (name, bytes) in expected {
            assert_holds(&daemon, &format!("d/{name}"), bytes.as_bytes(), "before the restart");
        }
        assert_eq!(fs::read_link(at(&daemon, "d/becomes-a-link")).unwrap(), Path::new("elsewhere"));
        let links = fs::metadata(at(&daemon, "d/kept")).unwrap().nlink();
        assert_eq!(links, 2, "the name of another file became a further one of this");
        for gone in ["gone", "from", "grows", "linked"] {
            assert!(!there(&daemon, format!("d/{gone}")), "{gone} came back");
        }
        assert_eq!(fs::read_dir(at(&daemon, "d")).unwrap().count(), 8);
    }
}

/// S-mode, S-xattr, S-times, S-links, S-restart: attributes of names are kept, whenever they changed.
#[test]
fn what_names_show_besides_bytes_is_kept_whenever_it_changed() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let at = |path: &str| daemon.mount().join(path);
    let files = ["d/loose", "run/step1.pt", "run/step_2/model.pt"];
    for file in files {
        save(&daemon, file, file.as_bytes());
        set_xattr(&at(file), "user.old");
    }
    set_xattr(&at("d"), "user.old");
    std::os::unix::fs::symlink("target", at("d/link")).unwrap();
    fs::hard_link(at("d/link"), at("run/same-link")).unwrap();
    daemon.flush();
    let then = SystemTime::UNIX_EPOCH + Duration::new(1_500_000_000, 123_456_789);
    for name in files.into_iter().chain(["d", ""]) {
        let path = at(name);
        if !name.is_empty() {
            rustix::fs::lremovexattr(&path, "user.old").unwrap();
        }
        set_xattr(&path, "user.new");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o710)).unwrap();
        std::os::unix::fs::chown(&path, Some(12), Some(34)).unwrap();
        File::open(&path).unwrap().set_modified(then).unwrap();
    }
    std::os::unix::fs::lchown(at("d/link"), Some(56), Some(78)).unwrap();
    daemon.flush();
    let links = ["d/link", "run/same-link"];
    let names = || files.into_iter().chain(links).chain(["d", ""]);
    let show = |daemon: &Daemon, name: &str| {
        let path = daemon.mount().join(name);
        let stat = fs::symlink_metadata(&path).unwrap();
        let mut xattrs = vec![0; 256];
        let listed = rustix::fs::llistxattr(&path, xattrs.as_mut_slice()).unwrap_or(0);
        xattrs.truncate(listed);
        (stat.mode(), stat.uid(), stat.gid(), stat.modified().unwrap(), stat.nlink(), xattrs)
    };
    let before: Vec<_> = names().map(|name| show(&daemon, name)).collect();
    assert_eq!(before[0], (0o100_710, 12, 34, then, 1, b"user.new\0".to_vec()));
    assert_eq!((before[3].0, before[3].4), (0o120_777, 2), "a link is lrwxrwxrwx");
    for end in [Daemon::kill9, Daemon::stop, Daemon::stop] {
        end(&mut daemon);
        daemon.start_again();
        let after: Vec<_> = names().map(|name| show(&daemon, name)).collect();
        assert_eq!(after, before);
    }
}

/// S-mode, S-times, S-links, S-mknod, S-restart: also hold for three unusual cases. A directory named as a checkpoint has only a second,
/// temporary name of another file, a pipe has all bits of its mode, and mknod(2) made a file.
#[test]
fn what_lies_beside_files_is_as_it_was_after_a_restart() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let at = |path: &str| daemon.mount().join(path);
    let then = SystemTime::UNIX_EPOCH + Duration::new(1_500_000_000, 123_456_789);
    save(&daemon, "l/keep", b"kept");
    let directories = ["checkpoint-1", "run/step3", "plain"];
    fs::create_dir(at("run")).unwrap();
    for directory in directories {
        fs::create_dir(at(directory)).unwrap();
        fs::hard_link(at("l/keep"), at(directory).join("x.tmp")).unwrap();
        fs::set_permissions(at(directory), fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(at(directory), Some(12), Some(34)).unwrap();
        File::open(at(directory)).unwrap().set_modified(then).unwrap();
    }
    mknodat(CWD, at("l/pipe"), FileType::Fifo, Mode::empty(), 0).unwrap();
    fs::set_permissions(at("l/pipe"), fs::Permissions::from_mode(0o7755)).unwrap();
    mknodat(CWD, at("l/made"), FileType::RegularFile, Mode::from_raw_mode(0o640), 0).unwrap();
    daemon.flush();
    for end in [Daemon::kill9, Daemon::stop, Daemon::stop] {
        end(&mut daemon);
        daemon.start_again();
        for directory in directories {
            let path = daemon.mount().join(directory);
            let stat = fs::metadata(&path).unwrap();
            let shown = (stat.mode() & 0o7777, stat.uid(), stat.gid(), stat.modified().unwrap());
            assert_eq!(shown, (0o700, 12, 34, then), "{directory}");
            assert_eq!(fs::read(path.join("x.tmp")).unwrap(), b"kept", "{directory}");
        }
        let place = daemon.mount().join("l");
        assert_eq!(fs::metadata(place.join("keep")).unwrap().nlink(), 4);
        assert_eq!(fs::symlink_metadata(place.join("pipe")).unwrap().mode() & 0o7777, 0o7755);
        let made = fs::metadata(place.join("made")).unwrap();
        assert_eq!((made.mode() & 0o7777, made.len()), (0o640, 0));
    }
}

fn set_xattr(path: &Path, name: &str) {
    rustix::fs::lsetxattr(path, name, b"value", rustix::fs::XattrFlags::empty()).unwrap();
}

/// S-restart: "A name shows what it showed". Only the newest *committed* version is offered.
#[test]
fn what_only_settled_is_shown_again_and_not_offered() {
    // The settle time is long against the pause between two ranks' saves on a busy machine, so that both are one version.
    let config = CONFIG.replace("settle_s = 0.3", "settle_s = 2.0");
    assert_ne!(config, CONFIG);
    let Some(mut daemon) = start(options("256MiB", &config)) else { return };
    let name = |rank: u64| format!("run/step_9/rank{rank}.pt");
    let save_version = |daemon: &Daemon, ranks: std::ops::Range<u64>, seed: u64| {
        for rank in ranks {
            save_by_several(daemon, &[(&name(rank), &noise(seed + rank, 70_000))]);
        }
    };
    save_version(&daemon, 0..3, 100);
    daemon.flush();
    assert_eq!(daemon.checkpoint("run/step_9").unwrap()["state"], "committed");
    // Only two of three ranks write the next save. After that, nothing happens.
    save_version(&daemon, 0..2, 200);
    wait_settled(&daemon, "run/step_9");
    assert_holds(&daemon, &name(0), &noise(200, 70_000), "before the restart");
    let shows = |daemon: &Daemon| {
        for rank in 0..3 {
            let seed = if rank < 2 { 200 } else { 100 };
            assert_holds(daemon, &name(rank), &noise(seed + rank, 70_000), "what it showed");
        }
    };
    daemon.stop_with_status();
    daemon.start_again();
    shows(&daemon);
    daemon.kill9();
    daemon.start_again();
    shows(&daemon);
    let mut listed = daemon.checkpoints();
    listed.sort_by_key(|row| row["version"].as_u64());
    let states: Vec<_> = listed.iter().map(|row| row["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["committed", "settled"], "{listed:#?}");
    let status = daemon.ctl_json(&["status"]);
    for pointer in ["latest", "recoverable", "watermark"] {
        assert_eq!(status["runs"][0][pointer]["version"], 1, "{status:#}");
    }
    // A person's flush states that the save is whole.
    daemon.flush();
    assert_eq!(daemon.ctl_json(&["commit", "run/step_9"])["already"], true);
    let status = daemon.ctl_json(&["status"]);
    assert_eq!(status["runs"][0]["latest"]["version"], 2, "{status:#}");
    save_version(&daemon, 0..3, 300);
    daemon.flush();
    assert_eq!(daemon.checkpoint("run/step_9").unwrap()["version"], 3);
    daemon.stop();
    daemon.start_again();
    for rank in 0..3 {
        assert_holds(&daemon, &name(rank), &noise(300 + rank, 70_000), "the next save");
    }
}

/// A backup is renamed back: `ln model.pt best; …; mv best model.pt`.
#[test]
fn a_name_that_got_earlier_bytes_back_shows_them_with_empty_memory() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let (first, second) = (noise(61, 100_000), noise(62, 200_000));
    let place = |name: &str| daemon.mount().join(name);
    save(&daemon, "run/model.pt", &first);
    daemon.flush();
    fs::hard_link(place("run/model.pt"), place("run/best")).unwrap();
    fs::write(place("run/next"), &second).unwrap();
    fs::rename(place("run/next"), place("run/model.pt")).unwrap();
    daemon.flush();
    fs::rename(place("run/best"), place("run/model.pt")).unwrap();
    daemon.flush();
    daemon.kill9();
    daemon.start_again();
    assert_holds(&daemon, "run/model.pt", &first, "renamed back");
    assert_eq!(names(&daemon.mount().join("run")), ["model.pt"]);
    daemon.stop();
}

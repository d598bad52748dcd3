//! Exit codes of `ckptctl` for questions about a path, and the attributes of a path.
//!
//! Owns: exit status 3 (not found) against found, the file that a typed path means, `user.tidemark.*`. Does not own: the form of answers
//! (the tests of ckptctl).

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use tidemark_tests::daemon::{DaemonOptions, shown};
use tidemark_tests::{machine, process, tier3};

use crate::site::{CONFIG, MIB, NEVER_SETTLES, noise, options, save, start};

#[test]
fn a_path_that_names_nothing_is_not_found() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    save(&daemon, "run/step_1/model_rank0.pt", &noise(1, 70_000));
    save(&daemon, "run/step_1/model_rank1.pt", &noise(2, 70_000));
    save(&daemon, "run/step2.pt", &noise(3, 70_000));
    save(&daemon, "run/notes.txt", b"loose");
    fs::create_dir(daemon.mount().join("empty")).unwrap();
    daemon.flush();
    let code = |words: &[&str]| {
        let output = daemon.ctl(words);
        (output.status.code(), shown(&output))
    };
    for path in ["absent", "run/absent.pt", "run/step_1/absent", "run/step2.pt/absent", "runaway"] {
        let commands: [&[&str]; 7] = [
            &["verify"],
            &["verify", "--deep"],
            &["show"],
            &["flush"],
            &["flush", "--wait"],
            &["commit"],
            &["ls"],
        ];
        for command in commands {
            let (code, shown) = code(&[command, &[path]].concat());
            assert_eq!(code, Some(3), "ckptctl {command:?} {path}: {shown}");
            assert!(shown.contains(path), "the path is named: {shown}");
        }
    }
    for words in [
        &["verify", "run"][..],
        &["verify", "run/notes.txt"],
        &["verify", "run/step_1/model_rank0.pt"],
        &["show", "run/step_1/model_rank0.pt"],
        &["show", "run/step2.pt"],
        &["flush", "--wait", "run"],
        &["flush", "empty"],
        &["commit", "run/step_1"],
        &["ls", "empty"],
        &["ls", "run/notes.txt"],
        &["ls", ""],
    ] {
        let words: Vec<_> = words.iter().copied().filter(|word| !word.is_empty()).collect();
        let (code, shown) = code(&words);
        assert_eq!(code, Some(0), "ckptctl {words:?}: {shown}");
    }
    assert_eq!(code(&["show", "run/notes.txt"]).0, Some(0), "a loose file is shown as one");
    // A directory of several checkpoints is no checkpoint, and neither is a loose file.
    for words in [&["commit", "run/notes.txt"], &["show", "empty"], &["commit", "run"]] {
        assert_eq!(code(words).0, Some(3), "ckptctl {words:?}: {}", code(words).1);
    }
    // A checkpoint that the job removed is still listed, and has no file in the tree that could be verified.
    fs::remove_file(daemon.mount().join("run/step2.pt")).unwrap();
    daemon.flush();
    for (words, expected) in
        [(&["ls", "run/step2.pt"], 0), (&["show", "run/step2.pt"], 0), (&["verify", "run/step2.pt"], 3)]
    {
        let output = daemon.ctl(words);
        assert_eq!(output.status.code(), Some(expected), "ckptctl {words:?}: {}", shown(&output));
    }
    daemon.stop();
}

#[test]
fn a_name_that_means_several_checkpoints_chooses_none_of_them() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    for (seed, run) in [(1, "one"), (2, "two")] {
        for step in [100, 200, 300] {
            save(&daemon, &format!("{run}/step{step}.pt"), &noise(seed, 70_000));
            daemon.flush();
        }
    }
    let target = daemon.scratch("out").join("exported");
    let target = target.to_str().unwrap();
    let refused = |words: &[&str], names: &[&str]| {
        let output = daemon.ctl(words);
        let shown = shown(&output);
        assert_eq!(output.status.code(), Some(2), "ckptctl {words:?}: {shown}");
        assert!(names.iter().all(|name| shown.contains(name)), "ckptctl {words:?} lists {names:?}: {shown}");
    };
    let both = ["one/step100.pt", "two/step100.pt"];
    for command in ["rm", "pin", "unpin", "show", "verify", "prefetch"] {
        refused(&[command, "@100"], &both);
        refused(&[command, "latest"], &["one", "two", "RUN@latest"]);
    }
    refused(&["export", "@100", target], &both);
    assert_eq!(daemon.checkpoints().len(), 6, "nothing was removed");
    assert_eq!(daemon.ctl_json(&["show", "two@100"])["checkpoint"]["path"], "two/step100.pt");
    assert_eq!(daemon.ctl_json(&["show", "two@latest"])["checkpoint"]["path"], "two/step300.pt");
    // A step is also ambiguous within one run that has two committed names for it.
    save(&daemon, "one/checkpoint-100/model.safetensors", &noise(3, 70_000));
    save(&daemon, "one/checkpoint-100/trainer_state.json", b"{}");
    daemon.flush();
    refused(&["rm", "one@100"], &["one/step100.pt", "one/checkpoint-100"]);
    assert!(daemon.mount().join("one/step100.pt").exists());
    // `undelete` considers only hidden checkpoints, whatever else has the step.
    fs::remove_file(daemon.mount().join("one/step100.pt")).unwrap();
    daemon.flush();
    assert_eq!(daemon.ctl_json(&["undelete", "@100"])["checkpoint"]["path"], "one/step100.pt");
    for path in both {
        fs::remove_file(daemon.mount().join(path)).unwrap();
    }
    daemon.flush();
    refused(&["undelete", "@100"], &both);
    // A run without files in the tree does not count for the latest.
    fs::remove_dir_all(daemon.mount().join("two")).unwrap();
    daemon.flush();
    let latest = daemon.ctl_json(&["show", "latest"])["checkpoint"]["path"].as_str().unwrap().to_owned();
    assert!(latest.starts_with("one/"), "{latest}");
    daemon.stop();
}

#[test]
fn a_file_in_a_checkpoint_stands_for_the_checkpoint() {
    let Some(mut daemon) = start(options("256MiB", NEVER_SETTLES)) else { return };
    // The checkpoints are a directory, and a family of files without one.
    for (file, other, checkpoint) in [
        ("run/step_1/model_rank0.pt", "run/step_1/model_rank1.pt", "run/step_1"),
        ("run/step5_rank0.pt", "run/step5_rank1.pt", "run/step5_rank*.pt"),
    ] {
        save(&daemon, file, &noise(1, 70_000));
        save(&daemon, other, &noise(2, 70_000));
        let open = fs::File::options().append(true).open(daemon.mount().join(other)).unwrap();
        let waited = daemon.ctl(&["flush", "--wait", "--timeout", "2", file]);
        assert_eq!(waited.status.code(), Some(1), "{other} is open: {}", shown(&waited));
        assert!(shown(&waited).contains(checkpoint), "{}", shown(&waited));
        drop(open);
        // Nothing settles here, so only the flush can make the checkpoint complete.
        let waited = daemon.ctl(&["flush", "--wait", "--timeout", "60", file]);
        assert_eq!(waited.status.code(), Some(0), "{}", shown(&waited));
        let row = daemon.checkpoint(checkpoint).unwrap_or_else(|| panic!("{:#?}", daemon.checkpoints()));
        assert_eq!(row["state"], "committed", "{row:#}");
        let rows = daemon.ctl_json(&["ls", file]);
        assert_eq!((rows.as_array().unwrap().len(), &rows[0]["path"]), (1, &row["path"]), "{rows:#}");
        let plan = daemon.ctl_json(&["recover", "--plan", file]);
        assert_eq!(plan["runs"][0]["chosen"]["path"], row["path"], "{plan:#}");
    }
    let file = "run/step_1/model_rank0.pt";
    let files = tier3::files_below(&daemon.tier3_dir().join("run/step_1"));
    let manifest = files.iter().find(|path| path.to_string_lossy().contains("manifest-")).unwrap();
    fs::remove_file(manifest).unwrap();
    let verify = daemon.ctl_json(&["verify", file]);
    assert_eq!(verify["repaired"].as_array().unwrap().len(), 1, "{verify:#}");
    assert!(manifest.exists(), "it is written again");
    daemon.stop();
}

#[test]
fn a_path_through_symbolic_links_is_about_what_they_lead_to() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    for step in [100, 200, 300] {
        save(&daemon, &format!("run7/step{step}.pt"), &noise(step, 70_000));
        daemon.flush();
    }
    let at = |path: &str| daemon.mount().join(path);
    symlink("run7", at("current")).unwrap();
    symlink(at("run7"), at("absolute")).unwrap();
    symlink("step300.pt", at("run7/last.ckpt")).unwrap();
    symlink("run9", at("gone")).unwrap();
    symlink("/etc", at("outside")).unwrap();
    symlink("circle", at("circle")).unwrap();
    for (path, files) in
        [("current", 3), ("run7/last.ckpt", 1), ("absolute/last.ckpt", 1), ("current@100", 1)]
    {
        let verify = daemon.ctl_json(&["verify", "--deep", path]);
        assert_eq!(verify["files"], files, "{path}: {verify:#}");
    }
    for (path, rows) in [("current", 3), ("run7/last.ckpt", 1), ("absolute", 3)] {
        let listed = daemon.ctl_json(&["ls", path]);
        assert_eq!(listed.as_array().unwrap().len(), rows, "{path}: {listed:#}");
    }
    for name in ["run7/last.ckpt", "current@latest", "absolute@300"] {
        assert_eq!(daemon.ctl_json(&["show", name])["checkpoint"]["path"], "run7/step300.pt", "{name}");
    }
    for path in ["gone", "outside", "outside/passwd", "circle"] {
        for command in [&["verify"][..], &["flush", "--wait"], &["ls"], &["show"], &["recover", "--plan"]] {
            let output = daemon.ctl(&[command, &[path]].concat());
            assert_eq!(output.status.code(), Some(3), "{command:?} {path}: {}", shown(&output));
        }
    }
    let open = fs::File::options().append(true).open(at("run7/step300.pt")).unwrap();
    for path in ["current", "run7/last.ckpt", "absolute/step300.pt"] {
        let waited = daemon.ctl(&["flush", "--wait", "--timeout", "2", path]);
        assert_eq!(waited.status.code(), Some(1), "{path} is open: {}", shown(&waited));
    }
    drop(open);
    daemon.flush();
    // `rm` removes for good only by a checkpoint's own name, not by a link.
    for (link, target) in
        [("run7/last.ckpt", "step300.pt"), ("current/last.ckpt", "step300.pt"), ("current", "run7")]
    {
        let refused = daemon.ctl(&["rm", link]);
        assert_eq!(refused.status.code(), Some(2), "{link}: {}", shown(&refused));
        assert!(shown(&refused).contains(target), "{}", shown(&refused));
    }
    assert!(at("run7/step300.pt").exists() && at("run7/last.ckpt").symlink_metadata().is_ok());
    assert_eq!(daemon.ctl_json(&["rm", "current/step100.pt"])["path"], "run7/step100.pt");
    assert!(!at("run7/step100.pt").exists());
    // A link with the removed checkpoint's name keeps `undelete` from restoring it.
    fs::remove_file(at("run7/step200.pt")).unwrap();
    symlink("step300.pt", at("run7/step200.pt")).unwrap();
    daemon.flush();
    let undelete = daemon.ctl(&["undelete", "run7/step200.pt"]);
    assert_eq!(undelete.status.code(), Some(1), "{}", shown(&undelete));
    daemon.stop();
}

#[test]
fn a_flush_that_does_not_wait_says_what_is_pending_and_holds_for_what_was_closed() {
    let Some(mut daemon) = start(options("512MiB", NEVER_SETTLES)) else { return };
    save(&daemon, "run/step_9/model_rank0.pt", &noise(1, 70_000));
    let open =
        fs::File::options().append(true).open(daemon.mount().join("run/step_9/model_rank0.pt")).unwrap();
    let asked = daemon.ctl_json(&["flush", "run/step_9"]);
    assert_eq!(
        (&asked["waited"], &asked["pending"][0]["reason"]),
        (&false.into(), &"open".into()),
        "{asked:#}"
    );
    let said = daemon.ctl(&["flush", "run/step_9"]);
    assert!(said.status.success() && shown(&said).contains("not committed yet"), "{}", shown(&said));
    drop(open);
    // The file is too large to be sealed when the command is answered. Nothing settles here, so only the command makes it complete.
    save(&daemon, "run/step_1/model_rank0.pt", &noise(2, 128 * MIB));
    let asked = daemon.ctl_json(&["flush", "run/step_1"]);
    assert_eq!(asked["waited"], false, "{asked:#}");
    let is_committed = || (daemon.checkpoint("run/step_1")?["state"] == "committed").then_some(());
    let committed = process::until(Duration::from_secs(60), is_committed);
    assert!(committed.is_some(), "{asked:#}\n{:#?}", daemon.checkpoints());
    daemon.flush();
    let nothing = daemon.ctl(&["flush"]);
    assert!(nothing.status.success() && shown(&nothing).contains("nothing is left"), "{}", shown(&nothing));
    daemon.stop();
}

#[test]
fn what_is_written_still_is_not_verified_and_nothing_is_not_ok() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    save(&daemon, "run/step_1/model_rank0.pt", &noise(1, 70_000));
    save(&daemon, "run/step_1/model_rank1.pt", &noise(2, 80_000));
    fs::create_dir(daemon.mount().join("empty")).unwrap();
    daemon.flush();
    let (whole, open) = ("run/step_1/model_rank0.pt", "run/step_1/model_rank1.pt");
    let writer = fs::File::options().append(true).open(daemon.mount().join(open)).unwrap();
    let unchecked = |place: &str| {
        let verify = daemon.ctl_json(&["verify", place]);
        let rows = verify["unchecked"].as_array().unwrap().iter().map(|row| row["path"].clone());
        rows.collect::<Vec<_>>()
    };
    let seen = process::until(Duration::from_secs(20), || (unchecked(open) == [open]).then_some(()));
    assert!(seen.is_some(), "{:?}", unchecked(open));
    assert_eq!(unchecked("run"), [open]);
    let said = daemon.ctl(&["verify", "run/step_1"]);
    assert!(said.status.success() && shown(&said).contains("NOT ALL"), "{}", shown(&said));
    assert!(unchecked(whole).is_empty(), "what is sealed is as good as before");
    let here = daemon.ctl_json(&["prefetch", open]);
    assert_eq!((&here["total_files"], &here["here_files"]), (&1.into(), &1.into()), "{here:#}");
    drop(writer);
    daemon.flush();
    assert!(unchecked("run").is_empty());
    for words in [&["verify", "empty"][..], &["verify", "--deep", "empty"], &["prefetch", "empty"]] {
        let output = daemon.ctl(words);
        assert_eq!(output.status.code(), Some(3), "ckptctl {words:?}: {}", shown(&output));
    }
    daemon.stop();
}

/// The kernel gives the working directory of a program without symbolic links.
#[test]
fn a_typed_path_means_the_same_whatever_path_leads_to_the_mount() {
    let home = tempfile::tempdir().unwrap();
    let real = home.path().canonicalize().unwrap().join("data");
    let (link, bind) = (home.path().join("ckpt"), home.path().join("bind"));
    fs::create_dir(&real).unwrap();
    fs::create_dir(&bind).unwrap();
    symlink(&real, &link).unwrap();
    let named = DaemonOptions { mountpoint: Some(link.clone()), ..options("256MiB", CONFIG) };
    let Some(mut daemon) = start(named) else { return };
    assert_eq!(daemon.mount(), real);
    save(&daemon, "step1.pt", &noise(1, 70_000));
    save(&daemon, "run/step1.pt", &noise(2, 70_000));
    daemon.flush();
    let show_in = |directory: &Path, path: &str| {
        let mut command = Command::new(machine::binary("ckptctl"));
        command.arg("--state-dir").arg(daemon.state_dir()).args(["show", path, "-o", "json"]);
        let output = process::run(command.current_dir(directory), Duration::from_secs(60));
        let found: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        let path = found.and_then(|show| show["checkpoint"]["path"].as_str().map(ToOwned::to_owned));
        (output.status.code(), path)
    };
    let is_found = |path: &str| (Some(0), Some(path.to_owned()));
    for dies in [false, true] {
        if dies {
            daemon.wait_for_next(daemon.kill_serving());
        }
        assert_eq!(show_in(&link.join("run"), "step1.pt"), is_found("run/step1.pt"));
        assert_eq!(show_in(&link, "step1.pt"), is_found("step1.pt"));
        let whole = link.join("run/step1.pt");
        assert_eq!(show_in(home.path(), whole.to_str().unwrap()), is_found("run/step1.pt"));
        let latest = || {
            let text = fs::read_to_string(real.join(".tidemark/latest")).ok()?;
            (text.starts_with(real.to_str().unwrap()) && text.ends_with("step1.pt\n")).then_some(())
        };
        process::until(Duration::from_secs(10), latest).expect("`latest` holds a path on the mount");
    }
    // A path typed in a bind mount could mean anything below the mount's root.
    mount_bind(&real, &bind).unwrap();
    let through_bind = show_in(&bind.join("run"), "step1.pt");
    unmount(&bind, UnmountFlags::DETACH).unwrap();
    assert_eq!(through_bind, (Some(2), None));
    // A name that exists in a directory outside means that file, and so none on the mount.
    fs::write(home.path().join("step1.pt"), b"mine").unwrap();
    assert_eq!(show_in(home.path(), "step1.pt"), (Some(2), None));
    assert_eq!(show_in(home.path(), "run/step1.pt"), is_found("run/step1.pt"));
    daemon.stop();
}

/// The file `latest` names one checkpoint, however many runs there are, because a program only reads it. A command may remove for good,
/// so it does not choose among runs.
#[test]
fn latest_is_what_was_whole_last_and_no_command_chooses_among_runs() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let named = |name: &str| {
        let expected = format!("{}\n", daemon.mount().join(name).display());
        let latest = || fs::read_to_string(daemon.mount().join(".tidemark/latest")).ok();
        process::until(Duration::from_secs(10), || (latest()? == expected).then_some(()))
            .unwrap_or_else(|| panic!("{:?} does not become {expected:?}", latest()));
    };
    // In a single run, the file `latest` and the command name the same checkpoint.
    let both_name = |name: &str| {
        named(name);
        assert_eq!(daemon.ctl_json(&["show", "latest"])["checkpoint"]["path"], name);
    };
    // A removal by a process that ends well counts as meant.
    let remove = |name: &str| {
        assert!(Command::new("rm").arg(daemon.mount().join(name)).status().unwrap().success());
        daemon.flush();
    };
    save(&daemon, "long/step900.pt", &noise(1, 70_000));
    daemon.flush();
    both_name("long/step900.pt");
    // The steps of two runs do not show which run's checkpoint is newer.
    save(&daemon, "short/step5.pt", &noise(2, 70_000));
    daemon.flush();
    named("short/step5.pt");
    let refused = daemon.ctl(&["show", "latest"]);
    assert_eq!(refused.status.code(), Some(2), "{}", shown(&refused));
    // A removed checkpoint is not offered.
    remove("short/step5.pt");
    both_name("long/step900.pt");
    save(&daemon, "long/step950.pt", &noise(3, 70_000));
    daemon.flush();
    both_name("long/step950.pt");
    remove("long/step950.pt");
    both_name("long/step900.pt");
    assert_eq!(daemon.ctl_json(&["undelete", "long@latest"])["checkpoint"]["path"], "long/step950.pt");
    daemon.stop();
}

/// A script waits for its save, and reads which save it was.
#[test]
fn the_control_files_say_what_a_flush_has_brought_when_it_ends() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    for step in 1..=5 {
        let path = format!("run/step{step}.pt");
        save(&daemon, &path, &noise(step, 70_000));
        daemon.flush();
        let latest = fs::read_to_string(daemon.mount().join(".tidemark/latest")).unwrap();
        assert_eq!(latest, format!("{}\n", daemon.mount().join(&path).display()));
        let rows = fs::read(daemon.mount().join(".tidemark/checkpoints.json")).unwrap();
        let rows: Vec<serde_json::Value> = serde_json::from_slice(&rows).unwrap();
        let found = rows.iter().find(|row| row["path"] == path.as_str()).unwrap();
        assert_eq!(found["state"], "committed");
    }
    daemon.stop();
}

fn attribute(path: &Path, name: &str) -> Result<String, Errno> {
    let mut buffer = [0_u8; 4096];
    let length = rustix::fs::getxattr(path, format!("user.tidemark.{name}"), &mut buffer[..])?;
    Ok(String::from_utf8(buffer[..length].to_vec()).unwrap())
}

fn listed(path: &Path) -> Vec<u8> {
    let mut buffer = [0_u8; 4096];
    let length = rustix::fs::listxattr(path, &mut buffer[..]).unwrap();
    buffer[..length].to_vec()
}

/// S-xattr-tidemark: "`user.tidemark.*` are made by the daemon when they are asked for by name, and are current".
#[test]
fn a_path_says_what_it_is_and_where_its_copies_are() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = noise(1, 70_000);
    save(&daemon, "run/step_1/model_rank0.pt", &bytes);
    save(&daemon, "run/notes.txt", b"loose");
    daemon.flush();
    let directory = daemon.mount().join("run/step_1");
    let (file, notes) = (directory.join("model_rank0.pt"), daemon.mount().join("run/notes.txt"));
    for place in [&file, &directory] {
        assert_eq!(attribute(place, "state").as_deref(), Ok("committed"));
        assert_eq!(attribute(place, "checkpoint").as_deref(), Ok("run/step_1"));
    }
    assert_eq!(attribute(&file, "copies").as_deref(), Ok("host,object"));
    let sum = format!("{:016x}", crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &bytes));
    assert_eq!(attribute(&file, "crc64nvme"), Ok(sum.clone()));
    assert_eq!(attribute(&notes, "state").as_deref(), Ok("loose"));
    for (place, name) in
        [(&notes, "checkpoint"), (&directory, "copies"), (&directory, "crc64nvme"), (&file, "x")]
    {
        assert_eq!(attribute(place, name), Err(Errno::NODATA), "{name} of {}", place.display());
    }
    // While a file is written, its attributes say so.
    let open = fs::File::options().append(true).open(&file).unwrap();
    let reopened = || (attribute(&file, "state").as_deref() == Ok("open")).then_some(());
    process::until(Duration::from_secs(10), reopened).expect("a file that is open again is not committed");
    assert_eq!(attribute(&file, "crc64nvme"), Err(Errno::NODATA));
    drop(open);
    daemon.flush();
    assert_eq!(attribute(&file, "crc64nvme"), Ok(sum.clone()));

    // Listings leave the attributes out, and copies do not carry them.
    assert!(listed(&file).is_empty(), "{:?}", String::from_utf8_lossy(&listed(&file)));
    let copy = daemon.mount().join("copy.txt");
    let copied = Command::new("cp").arg("--preserve=all").arg(&file).arg(&copy).status().unwrap();
    assert!(copied.success() && listed(&copy).is_empty());
    let set = rustix::fs::setxattr(&file, "user.tidemark.state", b"committed", XattrFlags::empty());
    assert_eq!(set, Err(Errno::PERM));
    assert_eq!(rustix::fs::removexattr(&file, "user.tidemark.state"), Err(Errno::PERM));

    daemon.flush();
    daemon.stop();
    daemon.start_again();
    let file = daemon.mount().join("run/step_1/model_rank0.pt");
    let cold = || (attribute(&file, "state").as_deref() == Ok("committed")).then_some(());
    process::until(Duration::from_secs(10), cold).expect("it is committed after a restart");
    assert_eq!(attribute(&file, "copies").as_deref(), Ok("object"));
    assert_eq!(attribute(&file, "crc64nvme"), Ok(sum));
}

#[test]
fn ls_counts_every_name_and_says_of_tier3_what_is_there_of_the_present_bytes() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let place = daemon.mount().join("run/checkpoint-1");
    save(&daemon, "run/checkpoint-1/model.safetensors", &noise(1, 100_000));
    save(&daemon, "run/checkpoint-1/trainer_state.json", b"{}");
    fs::hard_link(place.join("model.safetensors"), place.join("model.best.safetensors")).unwrap();
    save(&daemon, "run/logs/a.log", &noise(2, 70_000));
    fs::hard_link(daemon.mount().join("run/logs/a.log"), daemon.mount().join("run/logs/b.log")).unwrap();
    daemon.flush();
    let row = |path: &str| {
        let rows = daemon.ctl_json(&["ls", "--all"]);
        let row = rows.as_array().unwrap().iter().find(|row| row["path"] == path).cloned();
        let row = row.unwrap_or_else(|| panic!("{path} is not in {rows:#}"));
        let files = |copy: &str| row["copies"][copy]["files"].as_u64().unwrap();
        (row["files"].as_u64().unwrap(), files("host"), files("object"), row["bytes"].as_u64().unwrap())
    };
    assert_eq!(row("run/checkpoint-1"), (3, 3, 3, 100_002));
    for log in ["run/logs/a.log", "run/logs/b.log"] {
        assert_eq!(row(log), (1, 1, 1, 70_000));
    }
    // If a checkpoint is written again, its open version is shown above the committed one.
    save(&daemon, "run/checkpoint.pth.tar", &noise(4, 90_000));
    daemon.flush();
    assert_eq!(row("run/checkpoint.pth.tar"), (1, 1, 1, 90_000));
    let mut open = fs::File::create(daemon.mount().join("run/checkpoint.pth.tar")).unwrap();
    std::io::Write::write_all(&mut open, &noise(5, 400_000)).unwrap();
    let seen = process::until(Duration::from_secs(20), || {
        (row("run/checkpoint.pth.tar") == (1, 1, 0, 400_000)).then_some(())
    });
    assert!(seen.is_some(), "{:?}", row("run/checkpoint.pth.tar"));
    // The file is written again and open, so Tier-3 has the bytes of the previous save.
    let mut open = fs::File::create(daemon.mount().join("run/logs/a.log")).unwrap();
    std::io::Write::write_all(&mut open, &noise(3, 300_000)).unwrap();
    let seen = process::until(Duration::from_secs(20), || {
        (row("run/logs/a.log") == (1, 1, 0, 300_000)).then_some(())
    });
    assert!(seen.is_some(), "{:?}", row("run/logs/a.log"));
}

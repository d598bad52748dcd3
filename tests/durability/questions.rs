//! What `ckptctl` exits with when it is asked about a path, and what a path says of itself.
//!
//! Owns: not found (3) against found, which place a typed path means, `user.tidemark.*`. Does not own: how answers look (the tests of ckptctl).

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use tidemark_tests::daemon::{DaemonOptions, shown};
use tidemark_tests::{machine, process};

use crate::site::{CONFIG, noise, options, save, start};

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
    // A directory of several checkpoints is none, and nothing makes a loose file one.
    for words in [&["commit", "run/notes.txt"], &["show", "empty"], &["commit", "run"]] {
        assert_eq!(code(words).0, Some(3), "ckptctl {words:?}: {}", code(words).1);
    }
    // What the job removed is still listed, and has no file in the tree that could be verified.
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

/// The kernel gives the working directory of a program without symbolic links.
#[test]
fn a_typed_path_means_the_same_whatever_path_leads_to_the_mount() {
    let home = tempfile::tempdir().unwrap();
    let real = home.path().canonicalize().unwrap().join("data");
    let (link, bind) = (home.path().join("ckpt"), home.path().join("bind"));
    fs::create_dir(&real).unwrap();
    fs::create_dir(&bind).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
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
    // What is typed there could be anything below the mount's root.
    mount_bind(&real, &bind).unwrap();
    let through_bind = show_in(&bind.join("run"), "step1.pt");
    unmount(&bind, UnmountFlags::DETACH).unwrap();
    assert_eq!(through_bind, (Some(2), None));
    // Nor does a name of another directory mean one on the mount.
    fs::write(home.path().join("step1.pt"), b"mine").unwrap();
    assert_eq!(show_in(home.path(), "step1.pt"), (Some(2), None));
    assert_eq!(show_in(home.path(), "run/step1.pt"), is_found("run/step1.pt"));
    daemon.stop();
}

/// Steps of two runs say nothing about which of them is newer.
#[test]
fn latest_is_what_was_whole_last_for_whoever_asks() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    save(&daemon, "long/step900.pt", &noise(1, 70_000));
    daemon.flush();
    save(&daemon, "short/step5.pt", &noise(2, 70_000));
    daemon.flush();
    assert_eq!(daemon.ctl_json(&["show", "latest"])["checkpoint"]["path"], "short/step5.pt");
    let named = |name: &str| {
        let expected = format!("{}\n", daemon.mount().join(name).display());
        let latest = || fs::read_to_string(daemon.mount().join(".tidemark/latest")).ok();
        process::until(Duration::from_secs(10), || (latest()? == expected).then_some(()))
            .unwrap_or_else(|| panic!("{:?} does not become {expected:?}", latest()));
    };
    named("short/step5.pt");
    // What was removed is not offered. A process that ends well meant it.
    let removed = Command::new("rm").arg(daemon.mount().join("short/step5.pt")).status().unwrap();
    assert!(removed.success());
    daemon.flush();
    named("long/step900.pt");
    assert_eq!(daemon.ctl_json(&["show", "latest"])["checkpoint"]["path"], "long/step900.pt");
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
    // While it is written it says so.
    let open = fs::File::options().append(true).open(&file).unwrap();
    let reopened = || (attribute(&file, "state").as_deref() == Ok("open")).then_some(());
    process::until(Duration::from_secs(10), reopened).expect("a file that is open again is not committed");
    assert_eq!(attribute(&file, "crc64nvme"), Err(Errno::NODATA));
    drop(open);
    daemon.flush();
    assert_eq!(attribute(&file, "crc64nvme"), Ok(sum.clone()));

    // They are not listed, and copies do not carry them.
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
    // A checkpoint that is written again, too: its open version stands above the committed one.
    save(&daemon, "run/checkpoint.pth.tar", &noise(4, 90_000));
    daemon.flush();
    assert_eq!(row("run/checkpoint.pth.tar"), (1, 1, 1, 90_000));
    let mut open = fs::File::create(daemon.mount().join("run/checkpoint.pth.tar")).unwrap();
    std::io::Write::write_all(&mut open, &noise(5, 400_000)).unwrap();
    let seen = process::until(Duration::from_secs(20), || {
        (row("run/checkpoint.pth.tar") == (1, 1, 0, 400_000)).then_some(())
    });
    assert!(seen.is_some(), "{:?}", row("run/checkpoint.pth.tar"));
    // Written again and open: Tier-3 has the bytes of the save before.
    let mut open = fs::File::create(daemon.mount().join("run/logs/a.log")).unwrap();
    std::io::Write::write_all(&mut open, &noise(3, 300_000)).unwrap();
    let seen = process::until(Duration::from_secs(20), || {
        (row("run/logs/a.log") == (1, 1, 0, 300_000)).then_some(())
    });
    assert!(seen.is_some(), "{:?}", row("run/logs/a.log"));
}

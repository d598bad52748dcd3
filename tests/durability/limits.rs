//! The longest names, names that are no text, and very many small files: saved, drained, and restored.
//!
//! Owns: the limits of names and numbers. Does not own: what the tree does with names while it serves (suite mount).

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Mode, OFlags, mkdirat, openat, unlinkat};

use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::{machine, process};

use crate::site::{CONFIG, noise, options, problems, save, start};

/// Longest path that Linux accepts, in bytes without the terminating zero.
const PATH_BYTES: usize = 4095;
/// Anonymous memory that the daemon may take without files, besides mapped pages of Tier-1.
const ANONYMOUS_KIB: u64 = 64 << 10;
/// Bytes that the daemon may take for each file.
const BYTES_PER_FILE: u64 = 4500;

/// Returns a name of exactly `bytes` bytes.
fn name(seed: &str, bytes: usize) -> OsString {
    let mut name = seed.to_owned();
    name.extend(std::iter::repeat_n('n', bytes - seed.len()));
    name.into()
}

/// Returns a path below the mount that makes the absolute path exactly `bytes` long.
fn path_of(mount: &Path, component_bytes: usize, bytes: usize) -> PathBuf {
    let mut path = PathBuf::from("deep");
    loop {
        let left = bytes - mount.as_os_str().len() - 1 - path.as_os_str().len() - 1;
        // At least one byte must be left for the last component.
        if left <= 255 {
            path.push(name("f", left));
            return path;
        }
        path.push(name("d", component_bytes.min(left - 2)));
    }
}

#[test]
fn the_longest_names_and_names_that_are_no_text_come_back() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let mut paths: Vec<PathBuf> = vec![
        // Loose files, and files and directories of checkpoints, in turn.
        Path::new("names").join(name("a", 255)),
        Path::new("names").join(name("b", 252)).with_extension("pt"),
        Path::new(&name("run", 255)).join("step1.pt"),
        Path::new("run").join("step-7").join(name("shard", 252)).with_extension("pt"),
        Path::new("run").join("step-7").join(name("sub", 255)).join(name("deeper", 255)),
        Path::new("raw").join(OsStr::from_bytes(b"\xff\xfe\x01 \t\n%2F\\:*?\"<>|")),
        Path::new("raw").join(OsStr::from_bytes(b"step\xff1.pt")),
        Path::new("run").join("step-8").join(OsStr::from_bytes(b"\x80\x81.pt")),
        Path::new("raw").join(OsStr::from_bytes(&[0xfe; 255])),
        PathBuf::from("keys/_COMMITTED"),
        PathBuf::from("keys/v1.2/a-0123456789abcdef/.tidemark/attempt.json"),
        PathBuf::from("keys/step-1/v1.2/_COMMITTED/a.pt"),
        PathBuf::from("%2e%2e/%/a%2Fb.pt"),
    ];
    paths.push(path_of(daemon.mount(), 255, PATH_BYTES));
    paths.push(path_of(daemon.mount(), 97, 4001));
    let bytes = |number: usize| noise(number as u64 + 1, 1000 + number);
    for (number, path) in paths.iter().enumerate() {
        let full = daemon.mount().join(path);
        fs::create_dir_all(full.parent().unwrap()).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        fs::write(&full, bytes(number)).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    }
    assert_eq!(daemon.mount().join(&paths[paths.len() - 2]).as_os_str().len(), PATH_BYTES);
    let too_long = daemon.mount().join(name("x", 256));
    let error = fs::write(too_long, b"").expect_err("256 bytes are no name");
    assert_eq!(error.raw_os_error(), Some(libc::ENAMETOOLONG));
    daemon.flush();
    let check = |daemon: &Daemon, when: &str| {
        for (number, path) in paths.iter().enumerate() {
            let read = fs::read(daemon.mount().join(path))
                .unwrap_or_else(|error| panic!("{when}: {path:?}: {error}\n{}", daemon.log_tail()));
            assert!(read == bytes(number), "{when}: {path:?}");
        }
        let listed = |folder: &str| fs::read_dir(daemon.mount().join(folder)).unwrap().count();
        assert_eq!((listed("names"), listed("raw"), listed("keys")), (2, 3, 3), "{when}");
    };
    check(&daemon, "while it serves");
    assert!(problems(&daemon).is_empty(), "{:#?}", problems(&daemon));
    daemon.stop();
    daemon.start_again();
    check(&daemon, "with empty memory");
}

#[test]
fn a_path_that_is_no_text_is_written_as_one_and_commands_take_both() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let paths: [(&[u8], &str); 6] = [
        (b"r\xfe/step1.pt", "r%FE/step1.pt"),
        (b"100%/step1.pt", "100%25/step1.pt"),
        (b"a\xff.csv", "a%FF.csv"),
        (b"x\xff/step1.pt", "x%FF/step1.pt"),
        (b"x%FF/step1.pt", "x%25FF/step1.pt"),
        (b"r\xff/step1.pt", "r%FF/step1.pt"),
    ];
    let at = |path: &[u8]| daemon.mount().join(OsStr::from_bytes(path));
    for (number, (path, _)) in paths.iter().enumerate() {
        fs::create_dir_all(at(path).parent().unwrap()).unwrap();
        fs::write(at(path), noise(number as u64 + 1, 70_000)).unwrap();
    }
    daemon.flush();
    let rows = daemon.ctl_json(&["ls", "--all"]);
    let listed: BTreeSet<_> =
        rows.as_array().unwrap().iter().filter_map(|row| row["path"].as_str()).collect();
    assert_eq!(listed, paths.iter().map(|(_, text)| *text).collect(), "each is named, and none as another");
    let show = |path: &OsStr| {
        let mut command = Command::new(machine::binary("ckptctl"));
        command.arg("--state-dir").arg(daemon.state_dir()).args(["-o", "json", "show"]).arg(path);
        let output = process::run(&mut command, Duration::from_secs(60));
        let found: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        found.and_then(|show| show["checkpoint"]["path"].as_str().map(ToOwned::to_owned))
    };
    for (path, text) in paths {
        assert_eq!(show(OsStr::from_bytes(path)).as_deref(), Some(text), "as it is");
        // If a name exists as typed, it is meant, even if another name is shown in the same way.
        let expected = if text == "x%FF/step1.pt" { "x%25FF/step1.pt" } else { text };
        assert_eq!(show(OsStr::new(text)).as_deref(), Some(expected), "as it is written");
    }
    // A command that changes something refuses a copied name that could also mean another file.
    for command in ["rm", "pin", "unpin", "undelete", "commit"] {
        let output = daemon.ctl(&[command, "x%FF/step1.pt"]);
        assert_eq!(output.status.code(), Some(2), "{command}: {}", shown(&output));
        let text = shown(&output);
        assert!(text.contains("x%25FF/step1.pt") && text.contains("\\xFF"), "{command}: {text}");
    }
    assert_eq!(daemon.ctl_json(&["pin", "x%25FF/step1.pt"])["checkpoint"]["path"], "x%25FF/step1.pt");
    for words in [&["flush", "--wait"][..], &["why"], &["verify"]] {
        let output = daemon.ctl(&[words, &["r%FE/step1.pt"]].concat());
        assert_eq!(output.status.code(), Some(0), "{words:?}: {}", shown(&output));
    }
    let latest = || fs::read(daemon.mount().join(".tidemark/latest")).ok();
    let expected = [at(b"r\xff/step1.pt").as_os_str().as_bytes(), b"\n"].concat();
    process::until(Duration::from_secs(10), || (latest()? == expected).then_some(()))
        .unwrap_or_else(|| panic!("{:?} does not become {expected:?}", latest()));
    fs::remove_file(at(b"r\xff/step1.pt")).unwrap();
    daemon.flush();
    assert_eq!(daemon.ctl_json(&["undelete", "r%FF/step1.pt"])["checkpoint"]["path"], "r%FF/step1.pt");
    assert!(at(b"r\xff/step1.pt").exists());
    daemon.stop();
}

/// Makes a directory deeper than any path of one call, with names of 200 bytes on `levels` levels. Returns its descriptor.
fn descend(daemon: &Daemon, levels: usize) -> OwnedFd {
    let level = name("d", 200);
    let mut at = OwnedFd::from(File::open(daemon.mount()).unwrap());
    for _ in 0..levels {
        mkdirat(&at, &level, Mode::from_raw_mode(0o755)).unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        at = openat(&at, &level, flags, Mode::empty()).unwrap();
    }
    at
}

#[test]
fn names_that_tier_3_cannot_hold_are_named_by_a_flush_and_by_the_end() {
    /// Levels of the directory. From the 21st on, a path has more than 4096 bytes.
    const LEVELS: usize = 24;
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    save(&daemon, "run/step1.pt", &noise(1, 70_000));
    let deep = descend(&daemon, LEVELS);
    for name in ["weights.bin", "step1.pt"] {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = openat(&deep, name, flags, Mode::from_raw_mode(0o644)).unwrap();
        File::from(file).write_all(&noise(2, 9000)).unwrap();
    }
    let flushed = |place: &[&str]| {
        let output = daemon.ctl(&[&["flush", "--wait", "--timeout", "60"][..], place].concat());
        (output.status.code(), shown(&output))
    };
    let told = || {
        let all = problems(&daemon).into_iter();
        all.filter(|(code, ..)| code == "unnameable").map(|(_, what, _)| what).collect::<Vec<_>>()
    };
    // The pending entries are four directories and two files.
    let (code, text) = flushed(&[]);
    assert_eq!(code, Some(1), "{text}");
    for end in ["n/weights.bin", "n/step1.pt"] {
        assert!(text.contains(end), "{end}: {text}");
    }
    assert!(text.contains("unnameable") && text.contains("6 not committed"), "{text}");
    assert!(told().len() == 1 && told()[0].starts_with("6 names are too long"), "{:?}", told());
    assert_eq!(flushed(&["run"]).0, Some(0), "it is about what is below it only");
    unlinkat(&deep, "step1.pt", AtFlags::empty()).unwrap();
    assert_eq!(flushed(&[]).0, Some(1));
    assert!(told()[0].starts_with("5 names are too long"), "{:?}", told());
    drop(deep);
    let status = daemon.stop_with_status();
    assert_eq!(status.code(), Some(1), "closed bytes end with this memory: {}", daemon.log_tail());
    assert!(daemon.log().contains("n/weights.bin"), "{}", daemon.log_tail());
    daemon.start_again();
    let said: Vec<_> = problems(&daemon).into_iter().filter(|(code, ..)| code == "unclean_end").collect();
    assert!(said.len() == 1 && said[0].1.contains("5 names are too long"), "{said:?}");
    daemon.flush();
    daemon.stop();
}

/// Returns the anonymous resident memory of a process, in KiB.
pub(crate) fn anonymous_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the daemon runs");
    let line =
        status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("the kernel tells RssAnon");
    line.trim().trim_end_matches("kB").trim().parse().expect("a number of KiB")
}

/// Returns the number of files that a process holds open.
fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).expect("the daemon runs").count()
}

/// Descriptors that the daemon may have open for any number of files in memory: threads, connections, objects in
/// flight.
const DESCRIPTORS: usize = 2000;

#[test]
fn many_small_files_are_kept_in_bounded_memory() {
    const FILES_LONG: usize = 100_000;
    /// Files without `--long`. A third of them tests the same for each file, in a third of the time.
    const FILES: usize = 30_000;
    if !machine::can_mount() {
        return;
    }
    let files = if machine::long() { FILES_LONG } else { FILES };
    // Tier-3 is in memory, because the subject is the number of files, not a disk's speed. Tier-1 has 3 GiB, because the
    // journal of a smaller one has no place for so many names (`engine/design/0008-small-files.md`).
    let shared = tempfile::Builder::new().prefix("tidemark-").tempdir_in("/dev/shm").unwrap();
    let tier3 = Some(format!("file://{}", shared.path().display()));
    let mut daemon = Daemon::start(DaemonOptions { tier3, ..options("3GiB", CONFIG) });
    daemon.assert_passthrough();
    let pid = daemon.ready().pid;
    let idle = anonymous_kib(pid);
    let folder = daemon.mount().join("many");
    fs::create_dir(&folder).unwrap();
    let text = |number: usize| format!("file {number} of many\n");
    let begun = Instant::now();
    for number in 0..files {
        fs::write(folder.join(format!("f{number:06}")), text(number)).unwrap();
    }
    let (written, full) = (begun.elapsed(), anonymous_kib(pid));
    daemon.flush();
    let (flushed, drained, open) = (begun.elapsed(), anonymous_kib(pid), descriptors(pid));
    let host_bytes = daemon.ctl_json(&["status"])["tiers"][0]["used_bytes"].as_u64().expect("bytes");
    daemon.stop();
    let begun = Instant::now();
    daemon.start_again();
    let (back, again) = (begun.elapsed(), anonymous_kib(daemon.ready().pid));
    eprintln!(
        "{files} files: written in {:.1} s, flushed after {:.1} s, back in {:.1} s; anonymous memory {idle} KiB idle, \
         {full} written, {drained} flushed, {again} after a restart; {host_bytes} bytes of Tier-1, {open} descriptors",
        written.as_secs_f64(),
        flushed.as_secs_f64(),
        back.as_secs_f64(),
    );
    let most = ANONYMOUS_KIB + files as u64 * BYTES_PER_FILE / 1024;
    for kib in [full, drained, again] {
        assert!(kib < most, "{kib} KiB of anonymous memory, of {most}");
    }
    assert!(open < DESCRIPTORS, "{open} descriptors are open");
    let folder = daemon.mount().join("many");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), files);
    for number in (0..files).step_by(files / 500) {
        assert_eq!(fs::read_to_string(folder.join(format!("f{number:06}"))).unwrap(), text(number));
    }
    daemon.stop();
}

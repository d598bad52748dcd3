//! pjdfstest: 398 cases of POSIX's rules for names, modes, owners, times and errors.
//!
//! Owns: its configuration, running it, counting, comparing with the list. Does not own: the list (`known`).
//!
//! pjdfstest runs twice in a mount of its own: first without and then with remounting. The cases for read-only file
//! systems cannot remount while an earlier case of the same run has left a file open for writing.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use tempfile::TempDir;
use tidemark_tests::daemon::shown;
use tidemark_tests::{machine, process};

use crate::known::{Mode, Outcome, known};
use crate::place::Place;

/// Number of cases in version 0.2.2 on Linux. If its output names fewer, the rest were not run at all.
const CASES: usize = 398;
/// Number of cases for a read-only file system, a part of `CASES`.
const READ_ONLY_CASES: usize = 13;
/// Cases that must have run for a meaningful comparison: all but the read-only ones, and one that the C library decides.
const RAN_LEAST: usize = CASES - READ_ONLY_CASES - 1;
/// Limit of a run, which takes two to four seconds.
const RUN_LIMIT: Duration = Duration::from_secs(120);

/// Result of a run in one place.
#[derive(Debug)]
pub(crate) struct Report {
    place: String,
    outcomes: BTreeMap<String, Outcome>,
    replay: String,
    output: String,
}

/// Returns the program's path. If it was not built, returns `None` and leaves the test out.
pub(crate) fn tool() -> Option<PathBuf> {
    machine::tool("pjdfstest", "posix")
}

/// Runs every case in a place, prints the counts, and asserts that all cases exist and enough ran.
pub(crate) fn run(tool: &Path, place: &Place) -> Report {
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let (mut outcomes, replay, mut output) = run_part(tool, place, scratch.path(), false);
    if place.own_mount {
        let (second, _, more) = run_part(tool, place, scratch.path(), true);
        assert_eq!(second.len(), READ_ONLY_CASES, "cases for a read-only file system:\n{more}");
        outcomes.extend(second);
        output.push_str(&more);
    }
    let report = Report { place: place.name.clone(), outcomes, replay, output };
    let [passed, failed, skipped] =
        [Outcome::Passed, Outcome::Failed, Outcome::Skipped].map(|outcome| report.count(outcome));
    println!("posix: pjdfstest in {}: {passed} passed, {failed} failed, {skipped} skipped", report.place);
    assert_eq!(report.outcomes.len(), CASES, "cases in {}:\n{}", report.place, report.output);
    assert!(passed + failed >= RAN_LEAST, "only {passed} + {failed} ran in {}", report.place);
    report
}

impl Report {
    /// Fails with every case whose outcome differs from the list.
    pub(crate) fn assert_as_known(&self, mode: Mode) {
        let known = known(mode);
        let stray: Vec<_> = known.keys().filter(|case| !self.outcomes.contains_key(*case)).collect();
        assert!(stray.is_empty(), "known.txt names cases that there are not: {stray:?}");
        let differing: Vec<String> = self
            .outcomes
            .iter()
            .filter_map(|(case, outcome)| {
                let expected = known.get(case).copied().unwrap_or(Outcome::Passed);
                (*outcome != expected).then(|| format!("{case}: {outcome:?}, expected {expected:?}"))
            })
            .collect();
        assert!(
            differing.is_empty(),
            "{} differs from known.txt:\n  {}\nagain: {}\n{}",
            self.place,
            differing.join("\n  "),
            self.replay,
            self.output
        );
    }

    fn count(&self, outcome: Outcome) -> usize {
        self.outcomes.values().filter(|found| **found == outcome).count()
    }
}

fn run_part(
    tool: &Path,
    place: &Place,
    scratch: &Path,
    read_only: bool,
) -> (BTreeMap<String, Outcome>, String, String) {
    let config = scratch.join(if read_only { "read-only.toml" } else { "config.toml" });
    fs::write(&config, configuration(read_only)).expect("a configuration file");
    // For EXDEV, another file system is needed: the disk or, if the place is on the disk, the kernel's tmpfs.
    let other = if place.own_mount { scratch } else { Path::new("/dev/shm") };
    let mut command = Command::new(tool);
    command.arg("-c").arg(&config).arg("-p").arg(place.path()).arg("-s").arg(other);
    let replay = format!("{command:?} CASE, with config.toml:\n{}", configuration(read_only));
    command.env("NO_COLOR", "1").env("RUST_BACKTRACE", "0");
    let mut wrapper = None;
    if read_only {
        let directory = plain_mount();
        let path = env::var("PATH").unwrap_or_default();
        command.arg("erofs").env("PATH", format!("{}:{path}", directory.path().display()));
        wrapper = Some(directory);
    }
    let output = process::run(&mut command, RUN_LIMIT);
    drop(wrapper);
    let text = shown(&output);
    (parse(&String::from_utf8_lossy(&output.stdout)), replay, text)
}

/// Returns a configuration with all features that Linux has (other systems have file flags and NFSv4 ACLs). The users
/// exist on every Debian, and need no password or shell. 20 ms are two ticks of the slowest kernel clock.
fn configuration(allow_remount: bool) -> String {
    format!(
        "[features]\nposix_fallocate = {{}}\nrename_ctime = {{}}\nstat_st_birthtime = {{}}\nutime_now = {{}}\nutimensat = {{}}\n\
         [settings]\nnaptime = 0.02\nallow_remount = {allow_remount}\n\
         [dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n"
    )
}

/// Makes a `mount` that does not call the helpers of single file systems. FUSE's helper cannot remount, and would start
/// the mount's source as a program.
fn plain_mount() -> TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("mount");
    let search = env::var("PATH").unwrap_or_default();
    fs::write(&path, format!("#!/bin/sh\nPATH='{search}'\nexec mount -i \"$@\"\n")).expect("a script");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("an executable script");
    directory
}

/// Parses lines `a::b  ok`. Below a failed or skipped case, indented lines give the reason.
fn parse(output: &str) -> BTreeMap<String, Outcome> {
    let mut outcomes = BTreeMap::new();
    for line in output.lines().filter(|line| !line.starts_with(char::is_whitespace)) {
        let Some((case, rest)) = line.split_once(' ') else { continue };
        let outcome = match rest.trim() {
            "ok" => Outcome::Passed,
            "FAILED" => Outcome::Failed,
            "skipped" => Outcome::Skipped,
            _ => continue,
        };
        outcomes.insert(case.to_owned(), outcome);
    }
    outcomes
}

#[test]
fn cases_are_told_from_reasons_and_sums() {
    let output =
        "a::b      ok\nc::d   FAILED\n\tassertion failed: x ok\ne::f  skipped\n\twhy\n\nSummary: 1 failed\n";
    let outcomes = parse(output);
    assert_eq!(outcomes.len(), 3);
    assert_eq!((outcomes["a::b"], outcomes["c::d"]), (Outcome::Passed, Outcome::Failed));
}

#[test]
#[should_panic(expected = "chmod::clear_isgid_bit: Passed, expected Failed")]
fn a_known_failure_that_passes_is_a_failure() {
    let mut outcomes: BTreeMap<String, Outcome> = known(Mode::Passthrough).into_iter().collect();
    outcomes.insert("chmod::clear_isgid_bit".into(), Outcome::Passed);
    let report = Report { place: String::new(), outcomes, replay: String::new(), output: String::new() };
    report.assert_as_known(Mode::Passthrough);
}

//! fsx: random writes, mappings, truncations and holes in one file, every byte compared with a copy in memory.
//!
//! Owns: its configuration, the seeds, and the check that a run made all operations. Does not own: the program, which is
//! under the APSL and only ever run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tidemark_tests::daemon::shown;
use tidemark_tests::{machine, process};

use crate::place::Place;

/// Configuration with a file larger than a huge page, so that it has both kinds of page.
const CONFIGURATION: &str = "\
flen = 4194304
[opsize]
max = 262144
[weights]
close_open = 1
read = 10
write = 10
mapread = 10
mapwrite = 10
invalidate = 1
truncate = 3
fsync = 1
fdatasync = 1
posix_fallocate = 2
punch_hole = 3
sendfile = 2
posix_fadvise = 1
copy_file_range = 2
";
/// Every operation of the configuration, as the log names it, with its least number in 1,000.
const OPERATIONS: &[(&str, usize)] = &[
    ("read", 100),
    ("write", 100),
    ("mapread", 100),
    ("mapwrite", 100),
    ("truncate", 20),
    ("punch_hole", 20),
    ("posix_fallocate", 10),
    ("copy_file_range", 10),
    ("sendfile", 10),
    ("fsync", 5),
    ("fdatasync", 5),
    ("close/open", 5),
];
const SEEDS: u64 = 5;
const OPERATIONS_PER_SEED: usize = 5_000;
const LONG_SEEDS: u64 = 10;
const LONG_OPERATIONS_PER_SEED: usize = 20_000;
/// Limit for a seed, which takes 2 to 7 seconds, and four times that with `--long`.
const SEED_LIMIT: Duration = Duration::from_secs(240);
/// Lines shown of a failed run: its own last operations, and the difference.
const LINES_SHOWN: usize = 400;

/// Returns the program's path. If it was not built, returns `None` and leaves the test out.
pub(crate) fn tool() -> Option<PathBuf> {
    machine::tool("fsx", "posix")
}

/// Runs all seeds in a place.
pub(crate) fn run(tool: &Path, place: &Place) {
    let (seeds, operations) =
        if machine::long() { (LONG_SEEDS, LONG_OPERATIONS_PER_SEED) } else { (SEEDS, OPERATIONS_PER_SEED) };
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let config = scratch.path().join("fsx.toml");
    fs::write(&config, CONFIGURATION).expect("a configuration file");
    for seed in 1..=seeds {
        let mut command = Command::new(tool);
        command.arg("-v").arg("-f").arg(&config).args(["-N", &operations.to_string()]);
        command.args(["-S", &seed.to_string()]).arg("-P").arg(scratch.path());
        command.arg(place.path().join("fsx"));
        let replay = format!("{command:?} with fsx.toml:\n{CONFIGURATION}");
        let output = process::run(command.env("NO_COLOR", "1"), SEED_LIMIT);
        let text = shown(&output);
        let whole = output.status.success() && text.contains("All operations completed A-OK!");
        assert!(whole, "fsx in {} failed:\n{}\nagain: {replay}", place.name, last_lines(&text));
        let done = count(&text);
        for (operation, least) in OPERATIONS {
            let found = done.get(operation).copied().unwrap_or(0);
            assert!(
                found * 1000 >= least * operations,
                "only {found} times {operation} in {operations} operations: {done:?}"
            );
        }
    }
    println!("posix: fsx in {}: {seeds} seeds of {operations} operations, every byte right", place.name);
}

/// Counts each operation, by the lines `[INFO  fsx] 12 write 0x…`.
fn count(text: &str) -> BTreeMap<&str, usize> {
    let mut done = BTreeMap::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("[INFO  fsx]")) {
        if let Some(operation) = line.split_whitespace().nth(1) {
            *done.entry(operation).or_default() += 1;
        }
    }
    done
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n")
}

#[test]
fn operations_are_counted_by_name() {
    let text = "[INFO  fsx]   1 mapwrite 0x2 .. 0x3 (0x1 bytes)\n[INFO  fsx]  12 close/open\n[ERROR fsx] miscompare\n";
    assert_eq!(count(text), BTreeMap::from([("mapwrite", 1), ("close/open", 1)]));
}

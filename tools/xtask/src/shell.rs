//! Running other programs: shown as they go, and their output kept for counting.
//!
//! Owns: printing and child processes. Does not own: the meaning of the output.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use anyhow::{Context, Result, bail};

use crate::spent::{Spent, Stopwatch};

/// Lines waiting to be shown. A full queue makes the child wait, as a terminal would.
const QUEUED_LINES: usize = 256;

/// How a program ended, all it printed (both streams in the order they came), and what it cost.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) success: bool,
    pub(crate) output: String,
    pub(crate) spent: Spent,
}

/// Prints a line for the person who waits.
#[expect(
    clippy::print_stdout,
    reason = "this is a command-line program, and this is its one place that prints"
)]
pub(crate) fn say(line: &str) {
    println!("{line}");
    // Output goes to a pipe in CI; a line that comes late looks like a hang. A failure could not be reported.
    drop(std::io::stdout().flush());
}

/// Runs a program, shows its output line by line and keeps it.
pub(crate) fn watch(command: &mut Command) -> Result<Ran> {
    watch_some(command, |_| true)
}

/// As [`watch`], but shows only the lines for which `picked` holds.
pub(crate) fn watch_some(command: &mut Command, picked: impl Fn(&str) -> bool) -> Result<Ran> {
    let shown = show(command);
    say(&format!("$ {shown}"));
    let stopwatch = Stopwatch::start();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {shown}"))?;
    let (lines, shown_lines) = sync_channel::<String>(QUEUED_LINES);
    let readers = [
        forward(child.stdout.take().context("stdout was piped")?, lines.clone()),
        forward(child.stderr.take().context("stderr was piped")?, lines),
    ];
    let mut output = String::new();
    for line in shown_lines {
        if picked(&line) {
            say(&line);
        }
        output.push_str(&line);
        output.push('\n');
    }
    for reader in readers {
        drop(reader.join());
    }
    let status = child.wait().with_context(|| format!("waiting for {shown}"))?;
    Ok(Ran { success: status.success(), output, spent: stopwatch.read() })
}

/// Runs a program that must succeed and gives what it wrote to stdout.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let shown = show(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {shown}"))?;
    if !output.status.success() {
        bail!("{shown} ended with {}:\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{shown} printed no UTF-8"))
}

/// True when a program can be started and says that it succeeded.
pub(crate) fn works(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn forward(pipe: impl Read + Send + 'static, lines: SyncSender<String>) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut bytes = Vec::new();
        // Test output may hold any bytes, so lines are split before they become text.
        while pipe.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
            let line = String::from_utf8_lossy(bytes.trim_ascii_end()).into_owned();
            bytes.clear();
            if lines.send(line).is_err() {
                return;
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_streams_and_the_end_are_kept() {
        let ran =
            watch(Command::new("sh").args(["-c", "echo out; echo err >&2; printf last; exit 1"])).unwrap();
        assert!(!ran.success);
        assert!(["out\n", "err\n", "last\n"].iter().all(|line| ran.output.contains(line)), "{}", ran.output);
        assert!(ran.spent.wall.as_nanos() > 0);
    }

    #[test]
    fn a_program_that_fails_is_an_error_with_its_words() {
        let error = capture(Command::new("sh").args(["-c", "echo why >&2; exit 4"])).unwrap_err();
        assert!(error.to_string().contains("why"));
    }
}

//! Child processes with a time limit, so that a hanging daemon or script fails its test instead of the whole run.
//!
//! Owns: waiting, killing by pid and collecting output. Does not own: the meaning of a child's output.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};
use std::{io, thread};

use rustix::process::{Pid, Signal, kill_process};

/// Interval at which a waiting test checks again. Short against all durations here, which are seconds.
pub const POLL: Duration = Duration::from_millis(10);

/// Runs a command to its end and collects its output. After `limit`, kills it and panics.
pub fn run(command: &mut Command, limit: Duration) -> Output {
    let shown = format!("{command:?}");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot start {shown}: {error}"));
    let stdout = collect(child.stdout.take());
    let stderr = collect(child.stderr.take());
    let ended = wait(&mut child, limit).expect("waiting for a child of ours");
    if ended.is_none() {
        child.kill().expect("killing a child of ours");
        child.wait().expect("reaping a child of ours");
    }
    let stdout = stdout.join().expect("the reader of stdout ends with the child");
    let stderr = stderr.join().expect("the reader of stderr ends with the child");
    let Some(status) = ended else {
        panic!(
            "{shown} did not end within {} s\nstdout:\n{}\nstderr:\n{}",
            limit.as_secs(),
            String::from_utf8_lossy(&stdout),
            String::from_utf8_lossy(&stderr)
        );
    };
    Output { status, stdout, stderr }
}

/// Waits for a child for at most `limit`. Returns `None` if it still runs.
pub fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

/// Calls `found` until it returns something, for at most `limit`.
pub fn until<T>(limit: Duration, mut found: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = found() {
            return Some(value);
        }
        if Instant::now() >= deadline {
            return None;
        }
        thread::sleep(POLL);
    }
}

/// Sends a signal to a process that a test started. If the process is gone already, does nothing.
pub fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid is positive and fits");
    match kill_process(pid, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => panic!("cannot send {signal:?} to {pid:?}: {error}"),
    }
}

/// Returns the children of a process, oldest first; none if the process is gone.
pub fn children(pid: u32) -> Vec<u32> {
    let listed = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    listed.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Kills a keeper and its daemon, so that neither reacts to the other's death. Returns the daemon's pid.
pub fn kill_node(keeper: u32) -> Vec<u32> {
    let daemons = children(keeper);
    daemons.iter().for_each(|daemon| signal(*daemon, Signal::STOP));
    signal(keeper, Signal::KILL);
    daemons.iter().for_each(|daemon| signal(*daemon, Signal::KILL));
    daemons
}

/// Returns the state letter of a process's first thread from `/proc/PID/stat`, or `None` if the process is gone.
pub fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain any character. The state follows the last parenthesis.
    stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next())
}

/// Whether any thread of a process runs. A process that ended but was not reaped does not run. If the first thread has
/// ended and other threads are still ending, the process runs and has its files open.
pub fn is_alive(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    threads > 1 || !matches!(state(pid), None | Some('Z' | 'X'))
}

fn collect(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    let mut pipe = pipe.expect("the pipe was asked for");
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("reading what a child of ours prints");
        bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_status_are_collected() {
        let output =
            run(Command::new("sh").args(["-c", "echo out; echo err >&2; exit 3"]), Duration::from_secs(10));
        assert_eq!(output.status.code(), Some(3));
        assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    }

    #[test]
    #[should_panic(expected = "did not end within")]
    fn a_child_that_hangs_is_killed_at_the_limit() {
        run(Command::new("sleep").arg("600"), Duration::from_millis(50));
    }
}

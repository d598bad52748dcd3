//! Simulated nodes in a process of their own: each has three descriptors, and the number in a process is limited.
//!
//! Owns: starting that process, which is this program once more, and reading its counts. Does not own: the nodes ([`Simulated`]).

use crate::simulated::{Counted, Simulated};
use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tidemark_transport::Address;

/// The variable with the process's task, as JSON.
const ASKED: &str = "TIDEMARK_CROWD";

#[derive(Debug, Serialize, Deserialize)]
struct Asked {
    node: String,
    address: String,
    /// The number of the process's first node.
    first: usize,
    count: usize,
    limit_s: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Joined {
    joined: usize,
    why: Option<String>,
}

/// Counts since the start.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Counts {
    pub beats: u64,
    pub failed: u64,
    pub heard: u64,
    pub heard_bytes: u64,
}

impl Counts {
    /// Reads the present counts.
    #[must_use]
    pub fn of(counted: &Counted) -> Self {
        Self {
            beats: counted.beats.load(Ordering::Relaxed),
            failed: counted.failed.load(Ordering::Relaxed),
            heard: counted.heard.load(Ordering::Relaxed),
            heard_bytes: counted.heard_bytes.load(Ordering::Relaxed),
        }
    }

    /// Adds the counts of another process.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            beats: self.beats + other.beats,
            failed: self.failed + other.failed,
            heard: self.heard + other.heard,
            heard_bytes: self.heard_bytes + other.heard_bytes,
        }
    }
}

/// The process. Dropping it ends the process and its nodes.
#[derive(Debug)]
pub struct Crowd {
    child: Child,
    ask: ChildStdin,
    said: Lines<BufReader<ChildStdout>>,
}

/// Serves if this process was started as a crowd; returns true when it has finished and has to end.
///
/// The bench's executable calls this before anything else: stdout is for the answers alone.
///
/// # Errors
/// The errors of [`Simulated`].
pub fn serve_where_asked() -> anyhow::Result<bool> {
    let Some(asked) = std::env::var_os(ASKED) else { return Ok(false) };
    let asked: Asked = serde_json::from_slice(asked.as_encoded_bytes()).context("what it is asked")?;
    let coordinator = Address { node: asked.node, address: asked.address };
    let mut nodes = Simulated::new(coordinator, asked.first)?;
    let (seconds, why) = nodes.join(asked.count, Duration::from_secs(asked.limit_s))?;
    say(&Joined { joined: seconds.len(), why })?;
    for line in std::io::stdin().lock().lines() {
        line.context("read what is asked")?;
        say(&Counts::of(&nodes.counted))?;
    }
    Ok(true)
}

fn say<T: Serialize>(what: &T) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(what)?).and_then(|()| out.flush()).context("say it")
}

impl Crowd {
    /// Starts `count` more nodes, numbered from `first` on, which join and then beat. Waits until all have joined, or returns why there are
    /// fewer.
    ///
    /// # Errors
    /// The process cannot be started, or ends.
    pub fn start(
        coordinator: &Address,
        first: usize,
        count: usize,
        limit: Duration,
    ) -> anyhow::Result<(Self, Option<String>)> {
        let Address { node, address } = coordinator.clone();
        let asked = Asked { node, address, first, count, limit_s: limit.as_secs() };
        let mut child = Command::new(std::env::current_exe().context("this program")?)
            .env(ASKED, serde_json::to_string(&asked)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start a process for more simulated nodes")?;
        let ask = child.stdin.take().context("its input is a pipe")?;
        let said = BufReader::new(child.stdout.take().context("its output is a pipe")?).lines();
        let mut crowd = Self { child, ask, said };
        let Joined { joined, why } = crowd.next()?;
        ensure!(joined == count || why.is_some(), "{joined} of {count} nodes joined, and nobody says why");
        Ok((crowd, why))
    }

    /// Returns the counts since the start.
    ///
    /// # Errors
    /// The process has ended.
    pub fn counts(&mut self) -> anyhow::Result<Counts> {
        writeln!(self.ask).context("ask the other process")?;
        self.next()
    }

    fn next<T: for<'a> Deserialize<'a>>(&mut self) -> anyhow::Result<T> {
        let line = self.said.next().context("the process of more simulated nodes ended")?;
        serde_json::from_str(&line.context("hear the other process")?).context("what it says")
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        // The process may have ended by itself.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

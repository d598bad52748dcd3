//! A job whose ranks are shells. Each rank carries out orders and reports each as done.
//!
//! Owns: the processes, the environment of their launch, stopping in the middle of a call. Does not own: the orders.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A call of one rank. Paths are below the run.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) rank: usize,
    pub(crate) act: Act,
}

#[derive(Debug, Clone)]
pub(crate) enum Act {
    /// A mkdir(2), which further ranks repeat, and which then finds the directory.
    Make(String),
    /// An open with O_TRUNC, a write, and a close.
    Write(String, Vec<u8>),
    Rename(String, String),
    Remove(String),
}

/// State after the calls.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// Files with their bytes, without those that only mark a save in progress.
    pub(crate) files: BTreeMap<String, Vec<u8>>,
}

impl State {
    pub(crate) fn after(calls: Vec<Call>) -> Self {
        let mut files = BTreeMap::new();
        for call in calls {
            match call.act {
                Act::Make(_) => {}
                Act::Write(path, bytes) => drop(files.insert(path, bytes)),
                Act::Remove(path) => drop(files.remove(&path)),
                Act::Rename(from, to) => {
                    let below = |path: &str| path == from || path.starts_with(&format!("{from}/"));
                    let moved: Vec<_> = files.keys().filter(|path| below(path)).cloned().collect();
                    for path in moved {
                        let bytes = files.remove(&path).unwrap_or_default();
                        files.insert(format!("{to}{}", &path[from.len()..]), bytes);
                    }
                }
            }
        }
        Self { files }
    }
}

/// Ranks of one launch.
pub(crate) struct Job {
    ranks: Vec<Rank>,
    /// Folder outside the mount with prepared bytes, which a rank then copies.
    bytes: PathBuf,
}

struct Rank {
    shell: Child,
    orders: ChildStdin,
    done: BufReader<ChildStdout>,
}

impl Job {
    pub(crate) fn start(run: &Path, bytes: &Path, ranks: usize, number: usize) -> Self {
        let start = |rank: usize| {
            let mut command = Command::new("sh");
            command.current_dir(run).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", (20_000 + number).to_string());
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
            let mut shell = command.spawn().expect("a shell starts");
            let orders = shell.stdin.take().expect("it is piped");
            let done = BufReader::new(shell.stdout.take().expect("it is piped"));
            Rank { shell, orders, done }
        };
        Self { ranks: (0..ranks).map(start).collect(), bytes: bytes.join(format!("job{number}")) }
    }

    pub(crate) fn does(&mut self, calls: Vec<Call>) {
        for call in calls {
            let order = match &call.act {
                Act::Make(path) => format!("mkdir -p {path}"),
                Act::Write(path, bytes) => format!("cat {} >{path}", self.prepare(bytes)),
                Act::Rename(from, to) => format!("mv -T {from} {to}"),
                Act::Remove(path) => format!("rm {path}"),
            };
            self.ranks[call.rank].does(&order);
        }
    }

    /// Makes the first `cut` calls, and half of the next one if that is a write.
    pub(crate) fn does_until(&mut self, calls: Vec<Call>, cut: usize) {
        let next = calls.get(cut).cloned();
        self.does(calls.into_iter().take(cut).collect());
        if let Some(Call { rank, act: Act::Write(path, bytes) }) = next {
            let half = self.prepare(&bytes[..bytes.len() / 2]);
            self.ranks[rank].does(&format!("exec 3>{path}; cat {half} >&3"));
        }
    }

    fn prepare(&self, bytes: &[u8]) -> String {
        fs::write(&self.bytes, bytes).expect("a file outside the mount");
        self.bytes.display().to_string()
    }

    /// Sends SIGKILL to all ranks.
    pub(crate) fn kill(mut self) {
        for rank in &mut self.ranks {
            rank.shell.kill().expect("it runs");
        }
        for mut rank in self.ranks {
            rank.shell.wait().expect("it ran");
        }
    }
}

impl Rank {
    fn does(&mut self, order: &str) {
        writeln!(self.orders, "{order} && echo done || echo failed").expect("it listens");
        let mut line = String::new();
        self.done.read_line(&mut line).expect("it answers");
        assert_eq!(line.trim(), "done", "{order}");
    }
}

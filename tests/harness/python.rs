//! The Python environment of the frameworks suite: its place, and the start of scripts on one or more ranks.
//!
//! Owns: the environment variables that a launcher would set. Does not own: the making of the environment (`cargo xtask test`), the output
//! of the scripts.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{env, fs, io};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::fork_server::{ForkServer, Forked};
use crate::net::{Host, INTERFACE};
use crate::{machine, process};

/// Variable with the interpreter to use, if that is not the one in the target directory.
pub const PYTHON_ENV: &str = "TIDEMARK_PYTHON";
/// Variable that switches on the accelerator of the wheel in each script that inherits it.
pub const ACCELERATE_ENV: &str = "TIDEMARK_ACCELERATE";
/// Limit of a script. Two ranks that train and save 1.5 GB on two busy cores stay well below it.
pub const SCRIPT_LIMIT: Duration = Duration::from_secs(420);

/// Limit of a freeze. A stopped process first ends its current call, which takes milliseconds on a busy mount.
const FREEZE_LIMIT: Duration = Duration::from_secs(20);

/// Limit of an end. A killed process first ends its current call.
const END_LIMIT: Duration = Duration::from_secs(60);

/// An interpreter that can import torch.
#[derive(Clone, Debug)]
pub struct Python {
    interpreter: PathBuf,
    env: Vec<(String, String)>,
    forks: Option<Forks>,
}

/// A fork server, and the script whose packages it has loaded.
#[derive(Clone, Debug)]
struct Forks {
    script: PathBuf,
    server: Arc<Mutex<ForkServer>>,
}

/// A script that runs on one or more ranks. Dropping it kills every rank.
#[derive(Debug)]
pub struct Ranks {
    children: Vec<Rank>,
    outputs: TempDir,
    shown: String,
}

/// A process of a job.
#[derive(Debug)]
enum Rank {
    Started(Child),
    /// A rank forked by a server, which stays while the rank is waited for.
    Forked(Forked, #[expect(dead_code, reason = "it tells how the process ended")] Arc<Mutex<ForkServer>>),
}

impl Rank {
    fn id(&self) -> u32 {
        match self {
            Self::Started(child) => child.id(),
            Self::Forked(forked, _) => forked.id(),
        }
    }

    fn try_wait(&mut self) -> Option<ExitStatus> {
        match self {
            Self::Started(child) => child.try_wait().expect("looking at a rank"),
            Self::Forked(forked, _) => forked.try_wait(),
        }
    }

    fn kill(&mut self) {
        if self.try_wait().is_none() {
            process::signal(self.id(), Signal::KILL);
        }
    }
}

/// A script's output about tensors: their names and hashes.
pub type Hashes = BTreeMap<String, Value>;

impl Python {
    /// Finds the environment that `cargo xtask test` made. If there is none, returns `None` and leaves the test out.
    ///
    /// With [`ACCELERATE_ENV`] set, finds the environment with the wheel, whose accelerator the variable switches on.
    pub fn find() -> Option<Self> {
        if env::var_os(ACCELERATE_ENV).is_some() {
            return Self::with_wheel();
        }
        let interpreter = env::var_os(PYTHON_ENV)
            .map_or_else(|| machine::target_dir().join("tools/venv/bin/python"), PathBuf::from);
        if interpreter.exists() {
            return Some(Self { interpreter, env: vec![], forks: None });
        }
        machine::left_out(&format!(
            "no Python with torch at {}: run `cargo xtask test --only frameworks`, or set {PYTHON_ENV}",
            interpreter.display()
        ));
        None
    }

    /// Finds the environment that also has the wheel of `tools/python`. If there is none, returns `None` and leaves the test out.
    pub fn with_wheel() -> Option<Self> {
        let interpreter = machine::target_dir().join("tools/wheel-venv/bin/python");
        if interpreter.exists() {
            return Some(Self { interpreter, env: vec![], forks: None });
        }
        machine::left_out(&format!(
            "no Python with the wheel at {}: run `cargo xtask test --only wheel`",
            interpreter.display()
        ));
        None
    }

    /// Returns the path of a script that was installed beside the interpreter.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.interpreter.with_file_name(name)
    }

    /// Adds an environment variable for every script.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Prepares many starts of one script on `world` ranks. Each rank is forked from a process that has loaded the script's packages. From
    /// outside, a forked rank looks like any other process.
    #[must_use]
    pub fn forking(mut self, world: usize, script: &Path) -> Self {
        let mut command = Command::new(&self.interpreter);
        self.surround(&mut command, world);
        self.forks = ForkServer::start(command, script)
            .map(|server| Forks { script: script.to_owned(), server: Arc::new(Mutex::new(server)) });
        self
    }

    /// Runs a script on one rank, without any launcher's environment, and returns its output.
    pub fn run(&self, script: &Path, arguments: &[&str]) -> String {
        let mut ranks = self.start(1, script, arguments);
        ranks.finish();
        ranks.printed(0)
    }

    /// Runs a script on `world` ranks to its end, and returns the output of each.
    pub fn run_ranks(&self, world: usize, script: &Path, arguments: &[&str]) -> Vec<String> {
        let mut ranks = self.start(world, script, arguments);
        ranks.finish();
        (0..world).map(|rank| ranks.printed(rank)).collect()
    }

    /// Starts a script on `world` ranks of this machine, with the environment that `torchrun` gives.
    ///
    /// A single rank gets none of that environment, like a job of one process that a person starts.
    pub fn start(&self, world: usize, script: &Path, arguments: &[&str]) -> Ranks {
        let shown = format!("{} {arguments:?} on {world} rank(s)", script.display());
        let mut ranks = Ranks::none(shown);
        let meeting = (world > 1).then(|| Meeting::at(Ipv4Addr::LOCALHOST, "lo"));
        for _ in 0..world {
            let mut command = self.command(script, arguments, world);
            if let Some(meeting) = &meeting {
                meeting.tell(&mut command, ranks.children.len(), world);
            }
            match &self.forks {
                Some(forks) if forks.script == script => ranks.fork(&forks.server, arguments, &command),
                _ => ranks.spawn(command, |command| command.spawn()),
            }
        }
        ranks
    }

    /// Starts a script on one rank of each host, with the environment that `torchrun` gives and each host's arguments. The
    /// ranks meet at the first host.
    pub fn start_on(&self, hosts: &[(&Host, Vec<String>)], script: &Path) -> Ranks {
        let names: Vec<&str> = hosts.iter().map(|(host, _)| host.name()).collect();
        let mut ranks = Ranks::none(format!("{} on {names:?}", script.display()));
        let (first, _) = hosts.first().expect("a job has a rank");
        let meeting = first.inside(|| Meeting::at(first.address(), INTERFACE));
        for (host, arguments) in hosts {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let mut command = self.command(script, &arguments, hosts.len());
            meeting.tell(&mut command, ranks.children.len(), hosts.len());
            // Each host has a single rank, which is thus its first.
            command.env("LOCAL_RANK", "0");
            ranks.spawn(command, |command| host.spawn(command));
        }
        ranks
    }

    /// Returns a command for the script without any launcher's environment, not even that of this process's launcher.
    fn command(&self, script: &Path, arguments: &[&str], world: usize) -> Command {
        let mut command = Command::new(&self.interpreter);
        command.arg("-u").arg(script).args(arguments);
        self.surround(&mut command, world);
        command
    }

    fn surround(&self, command: &mut Command, world: usize) {
        command
            .env("CUDA_VISIBLE_DEVICES", "")
            .env("HF_HUB_OFFLINE", "1")
            // No script compiles, and loading torch's compiler costs every process a second.
            .env("TORCHDYNAMO_DISABLE", "1")
            // Python keeps a framework's compiled imports for all tests, in a folder apart from the sources.
            .env_remove("PYTHONDONTWRITEBYTECODE")
            .env("PYTHONPYCACHEPREFIX", machine::target_dir().join("tools/pycache"))
            .env("OMP_NUM_THREADS", if world > 1 { "1" } else { "2" });
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]
        {
            command.env_remove(name);
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
    }
}

/// Address and port at which the ranks of a job meet.
struct Meeting {
    address: Ipv4Addr,
    port: u16,
    interface: &'static str,
}

impl Meeting {
    /// Chooses a port that is free now where the function is called. Every job has its own port, and a clash fails loudly.
    fn at(address: Ipv4Addr, interface: &'static str) -> Self {
        let bound = TcpListener::bind((address, 0)).and_then(|listener| listener.local_addr());
        Self { address, port: bound.expect("a free port").port(), interface }
    }

    /// Sets the environment that `torchrun` gives a rank.
    fn tell(&self, command: &mut Command, rank: usize, world: usize) {
        command
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", world.to_string())
            .env("MASTER_ADDR", self.address.to_string())
            .env("MASTER_PORT", self.port.to_string())
            .env("TORCHELASTIC_RUN_ID", format!("test-{}", self.port))
            .env("TORCHELASTIC_RESTART_COUNT", "0")
            .env("GLOO_SOCKET_IFNAME", self.interface);
    }
}

impl Ranks {
    fn none(shown: String) -> Self {
        Self { children: vec![], outputs: tempfile::tempdir().expect("a temporary directory"), shown }
    }

    /// Adds a rank, which `start` starts.
    fn spawn(&mut self, mut command: Command, start: impl FnOnce(&mut Command) -> io::Result<Child>) {
        let rank = self.children.len();
        let stdout = File::create(self.file(rank, "out")).expect("a file for stdout");
        let stderr = File::create(self.file(rank, "err")).expect("a file for stderr");
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        let child =
            start(&mut command).unwrap_or_else(|error| panic!("cannot start {}: {error}", self.shown));
        self.children.push(Rank::Started(child));
    }

    /// Adds a rank as [`Ranks::spawn`] does, forked from a server.
    fn fork(&mut self, server: &Arc<Mutex<ForkServer>>, arguments: &[&str], command: &Command) {
        let [out, err, status] = ["out", "err", "status"].map(|what| self.file(self.children.len(), what));
        let forked = {
            let mut server = server.lock().expect("nobody panics with a fork server");
            server.fork(arguments, command, &out, &err, status)
        };
        self.children.push(Rank::Forked(forked, Arc::clone(server)));
    }

    /// Waits for the end of every rank and asserts that each exited with 0.
    pub fn finish(&mut self) {
        for rank in 0..self.children.len() {
            let status = self.wait(rank);
            assert!(
                status.success(),
                "rank {rank} of {} ended with {status}:\n{}",
                self.shown,
                self.said(rank)
            );
        }
    }

    /// Waits for the end of every rank, asserts that each failed, and returns their output.
    pub fn fail(&mut self) -> String {
        let ends: Vec<_> = (0..self.children.len()).map(|rank| (rank, self.wait(rank))).collect();
        let said: Vec<_> = ends.iter().map(|(rank, end)| format!("{end}\n{}", self.said(*rank))).collect();
        let said = said.join("\n");
        assert!(ends.iter().all(|(_, end)| !end.success()), "{} did not fail:\n{said}", self.shown);
        said
    }

    /// Waits for the end of one rank, however it ends.
    pub fn wait(&mut self, rank: usize) -> ExitStatus {
        process::until(SCRIPT_LIMIT, || self.children[rank].try_wait())
            .unwrap_or_else(|| panic!("rank {rank} of {} hangs:\n{}", self.shown, self.said(rank)))
    }

    /// Waits until every rank has printed a line that is exactly `word`. Fails if a rank ends without it.
    pub fn wait_for(&mut self, word: &str) {
        for rank in 0..self.children.len() {
            self.wait_for_rank(rank, word);
        }
    }

    /// Waits until one rank has printed a line that is exactly `word`.
    pub fn wait_for_rank(&mut self, rank: usize, word: &str) {
        let mut ended = false;
        let seen = process::until(SCRIPT_LIMIT, || {
            // The end is checked before the output, so that a last line is not missed.
            let was_ended = ended;
            ended = self.children[rank].try_wait().is_some();
            if self.printed(rank).lines().any(|line| line == word) {
                Some(true)
            } else {
                was_ended.then_some(false)
            }
        });
        assert!(seen == Some(true), "rank {rank} of {} never said {word}:\n{}", self.shown, self.said(rank));
    }

    /// Calls `found` on the ranks' output until it returns something. Fails if all ranks end, or one fails, before that.
    pub fn wait_until<T>(&mut self, what: &str, found: impl FnMut(&Self) -> Option<T>) -> T {
        self.seen(what, found).unwrap_or_else(|said| panic!("{said}"))
    }

    /// Waits as [`Ranks::wait_until`] does, for a caller that adds to the message. `Err` has `what` and the ranks' output.
    pub fn seen<T>(&mut self, what: &str, mut found: impl FnMut(&Self) -> Option<T>) -> Result<T, String> {
        let mut over = false;
        let seen = process::until(SCRIPT_LIMIT, || {
            let was_over = over;
            let ends: Vec<_> = self.children.iter_mut().map(Rank::try_wait).collect();
            over = ends.iter().all(Option::is_some) || ends.iter().flatten().any(|end| !end.success());
            found(self).map(Some).or_else(|| was_over.then_some(None))
        });
        seen.flatten().ok_or_else(|| {
            let said: Vec<_> = (0..self.children.len()).map(|rank| self.said(rank)).collect();
            format!("{}: never {what}:\n{}", self.shown, said.join("\n"))
        })
    }

    /// Sends SIGSTOP to every rank, after which their output shows all that they have done.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        for child in &self.children {
            let stopped =
                || process::state(child.id()).is_none_or(|state| "TtZX".contains(state)).then_some(());
            assert!(
                process::until(FREEZE_LIMIT, stopped).is_some(),
                "a rank of {} does not stop",
                self.shown
            );
        }
    }

    /// Lets frozen ranks go on.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        self.children.iter().for_each(|child| process::signal(child.id(), signal));
    }

    /// Sends SIGKILL to every rank, as a scheduler or the OOM killer would.
    pub fn kill9(&mut self) {
        self.children.iter_mut().for_each(Rank::kill);
        for rank in 0..self.children.len() {
            self.wait(rank);
        }
    }

    /// Sends SIGTERM to every rank, each of which must then end with exit status 0.
    pub fn terminate(&mut self) {
        self.signal(Signal::TERM);
        self.finish();
    }

    /// Sends SIGTERM to frozen ranks, which go on with their handlers and must each end with this exit status.
    pub fn preempt(&mut self, status: i32) {
        self.signal(Signal::TERM);
        self.thaw();
        for rank in 0..self.children.len() {
            let end = self.wait(rank);
            assert_eq!(end.code(), Some(status), "rank {rank} of {}:\n{}", self.shown, self.said(rank));
        }
    }

    /// Returns the output of a rank so far.
    pub fn printed(&self, rank: usize) -> String {
        fs::read_to_string(self.file(rank, "out")).expect("the rank's stdout is readable")
    }

    fn said(&self, rank: usize) -> String {
        format!("stdout:\n{}\nstderr:\n{}", self.printed(rank), machine::tail(&self.file(rank, "err"), 60))
    }

    fn file(&self, rank: usize, what: &str) -> PathBuf {
        self.outputs.path().join(format!("rank-{rank}.{what}"))
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.children.iter_mut().for_each(Rank::kill);
        for child in &mut self.children {
            process::until(END_LIMIT, || child.try_wait());
        }
    }
}

/// Returns the tensors' hashes in a script's output, from the one line `HASHES {…}` of a label.
///
/// # Panics
/// When the line is missing, there twice, or empty, because a comparison of nothing with nothing must not pass.
pub fn hashes(printed: &str, label: &str) -> Hashes {
    let prefix = format!("HASHES {label} ");
    let mut lines = printed.lines().filter_map(|line| line.strip_prefix(&prefix));
    let line = lines.next().unwrap_or_else(|| panic!("no line `{prefix}…` in:\n{printed}"));
    assert!(lines.next().is_none(), "`{prefix}…` is there twice in:\n{printed}");
    let found: Hashes = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    assert!(!found.is_empty(), "`{prefix}` names no tensor");
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_found_by_their_label() {
        let printed = "noise\nHASHES model {\"w\":\"1\"}\nHASHES optimizer {\"w\":\"2\"}\n";
        assert_eq!(hashes(printed, "optimizer")["w"], "2");
    }

    #[test]
    #[should_panic(expected = "names no tensor")]
    fn no_tensors_are_not_equal_to_no_tensors() {
        hashes("HASHES model {}\n", "model");
    }
}

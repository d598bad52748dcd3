//! A real `ckptd` for a test: its own mountpoint, state directory, ports and log, cleaned up whatever happens.
//!
//! Owns: the processes, the directories and the mount it made. Does not own: Tier-3. A test may start a second daemon, or the same one
//! again with empty memory, on the same URL.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::mount::{UnmountFlags, unmount};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::net::Host;
use crate::{machine, process};

/// Limit of a start, which mounts and probes Tier-3. A busy two-core machine has plenty of time for it.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// Limit of a stop. SIGTERM drains for at most `shutdown.drain_timeout` (60 s by default) and then unmounts.
const STOP_LIMIT: Duration = Duration::from_secs(120);
/// Limit of a command. If it waits for Tier-3 (`flush --wait`), the daemon may move gigabytes.
const COMMAND_LIMIT: Duration = Duration::from_secs(300);
/// Lines of a log that show why a test failed and do not hide the test's own message.
const LOG_LINES_SHOWN: usize = 120;

/// Options of a daemon that a test may choose. The rest is always the daemon's own: directories, ports, log.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    /// `--tier1`; always given, so that the budgets of a suite sum to something known.
    pub tier1: String,
    /// `--tier3`; by default a `file://` URL of a directory that goes with the daemon.
    pub tier3: Option<String>,
    /// The text of a configuration file, TOML.
    pub config: Option<String>,
    /// Variables added to the environment of `ckptd`.
    pub env: Vec<(String, String)>,
    /// Further flags of `ckptd up`.
    pub flags: Vec<String>,
    /// The mountpoint; by default a directory of the daemon's own.
    pub mountpoint: Option<PathBuf>,
    /// The host of a test network on which the daemon runs and listens. By default this machine, on 127.0.0.1.
    pub host: Option<Host>,
    /// Port of `--listen`; by default a free one, another with each start.
    pub port: u16,
}

impl Default for DaemonOptions {
    fn default() -> Self {
        Self {
            tier1: "2GiB".into(),
            tier3: None,
            config: None,
            env: vec![],
            flags: vec![],
            mountpoint: None,
            host: None,
            port: 0,
        }
    }
}

/// The words of the line that `ckptd up` prints when the mount serves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    pub mount: PathBuf,
    pub mode: String,
    pub node: String,
    pub pid: u32,
    pub listen: String,
    pub http: String,
    pub state_dir: PathBuf,
}

/// A daemon that serves a mount. Dropping it kills the daemon, unmounts, and removes its directories.
#[derive(Debug)]
pub struct Daemon {
    options: DaemonOptions,
    home: TempDir,
    running: Option<Running>,
    starts: u32,
}

#[derive(Debug)]
struct Running {
    child: Child,
    ready: Ready,
}

impl Daemon {
    /// Starts a daemon and waits for its `ready:` line. Panics with the end of its log when there is none.
    pub fn start(options: DaemonOptions) -> Self {
        let home = tempfile::Builder::new().prefix("tidemark-").tempdir().expect("a temporary directory");
        let mut daemon = Self { options, home, running: None, starts: 0 };
        daemon.start_again();
        daemon
    }

    /// Starts a daemon that is expected to refuse. Returns its exit status and log.
    pub fn start_refused(options: DaemonOptions) -> Output {
        let home = tempfile::Builder::new().prefix("tidemark-").tempdir().expect("a temporary directory");
        let daemon = Self { options, home, running: None, starts: 1 };
        let output = daemon.there(|| process::run(&mut daemon.command(), READY_LIMIT));
        daemon.clean_mount();
        output
    }

    /// Starts a daemon on a host without waiting until it serves. Returns its keeper and a function that reads its log so far. The
    /// caller ends the keeper.
    pub fn start_without_waiting(options: DaemonOptions, host: &Host) -> (Child, impl Fn() -> String) {
        let home = tempfile::Builder::new().prefix("tidemark-").tempdir().expect("a temporary directory");
        let mut options = DaemonOptions { host: Some(host.clone()), ..options };
        options.flags.extend(["--name".into(), host.name().into()]);
        let daemon = Self { options, home, running: None, starts: 1 };
        let (log, mut command) = (daemon.log_path(), daemon.command());
        let file = || File::options().create(true).append(true).open(&log).expect("a log file");
        command.stdin(Stdio::null()).stdout(file()).stderr(file());
        let child =
            daemon.there(|| command.spawn()).unwrap_or_else(|error| panic!("cannot start ckptd: {error}"));
        // The closure keeps the daemon's folder alive, in which the child's files lie.
        (child, move || daemon.log())
    }

    /// Starts the daemon again after `stop`, `kill9` or its own death: same directories, same Tier-3, empty memory.
    pub fn start_again(&mut self) {
        assert!(self.running.is_none(), "the daemon still runs");
        self.starts += 1;
        let log = File::create(self.log_path()).expect("a log file");
        let answers = self.home.path().join(format!("stdout-{}", self.starts));
        // A file, because a daemon that prints after its ready line would find a pipe closed.
        let stdout = File::create(&answers).expect("a file for stdout");
        let mut command = self.command();
        command.stdin(Stdio::null()).stdout(stdout).stderr(log);
        let mut child =
            self.there(|| command.spawn()).unwrap_or_else(|error| panic!("cannot start ckptd: {error}"));
        let started = Instant::now();
        let mut ended = None;
        let line = process::until(READY_LIMIT, || {
            let text = fs::read_to_string(&answers).unwrap_or_default();
            if let Some(line) =
                text.split_inclusive('\n').find(|l| l.starts_with("ready:") && l.ends_with('\n'))
            {
                return Some(Some(line.to_owned()));
            }
            ended = child.try_wait().expect("looking at a child of ours");
            ended.map(|_| None)
        });
        match line {
            Some(Some(line)) => self.running = Some(Running { child, ready: parse_ready(&line) }),
            Some(None) | None => {
                drop(child.kill());
                drop(child.wait());
                panic!(
                    "ckptd printed no ready line within {:.1} s (exit: {ended:?}); the end of its log:\n{}",
                    started.elapsed().as_secs_f64(),
                    self.log_tail()
                );
            }
        }
    }

    /// Sends SIGTERM, waits for drain, unmount and exit, and returns the exit status. The mount must be gone.
    pub fn stop_with_status(&mut self) -> ExitStatus {
        let mut running = self.running.take().expect("the daemon runs");
        process::signal(running.child.id(), Signal::TERM);
        let status =
            process::wait(&mut running.child, STOP_LIMIT).expect("waiting for ckptd").unwrap_or_else(|| {
                drop(running.child.kill());
                drop(running.child.wait());
                panic!("ckptd did not end {} s after SIGTERM:\n{}", STOP_LIMIT.as_secs(), self.log_tail())
            });
        assert!(!is_mounted(&running.ready.mount), "the mount outlived the daemon that was stopped");
        status
    }

    /// Stops the daemon and asserts that all is durable (exit status 0).
    pub fn stop(&mut self) {
        let status = self.stop_with_status();
        assert_eq!(status.code(), Some(0), "ckptd did not stop clean:\n{}", self.log_tail());
    }

    /// Kills keeper and daemon. Bytes that were only in memory are lost, and the mount is dead until the next start.
    pub fn kill9(&mut self) {
        let running = self.running.take().expect("the daemon runs");
        kill_node(running.child);
        self.clean_mount();
    }

    /// Returns the pid of the daemon process below the keeper; each death brings a new one. Returns `None` while the keeper
    /// starts the next.
    pub fn serving_pid(&self) -> Option<u32> {
        process::children(self.keeper_pid()).into_iter().next()
    }

    /// Returns the pid of the keeper, which is the process that the test started.
    pub fn keeper_pid(&self) -> u32 {
        self.running.as_ref().expect("the daemon runs").child.id()
    }

    /// Kills the daemon alone, so that its keeper starts the next one. Returns the pid of the killed one.
    pub fn kill_serving(&self) -> u32 {
        let pid = process::until(READY_LIMIT, || self.serving_pid()).expect("a daemon is being kept");
        process::signal(pid, Signal::KILL);
        pid
    }

    /// Waits until another daemon than `dead` answers commands, and returns its pid.
    pub fn wait_for_next(&self, dead: u32) -> u32 {
        let next = process::until(READY_LIMIT, || {
            let output = self.ctl(&["status", "-o", "json"]);
            let status: Value = serde_json::from_slice(&output.stdout).ok()?;
            let pid = u32::try_from(status["pid"].as_u64()?).ok()?;
            (output.status.success() && pid != dead).then_some(pid)
        });
        next.unwrap_or_else(|| panic!("no daemon came after {dead}:\n{}", self.log_tail()))
    }

    /// Waits until another process serves than before, and records its pid and addresses. Panics when none comes.
    pub fn wait_served_again(&mut self, limit: Duration) {
        let before = self.ready().pid;
        let status = process::until(limit, || {
            let started = &mut self.running.as_mut().expect("the daemon runs").child;
            if let Some(ended) = started.try_wait().expect("looking at a child of ours") {
                panic!("the process that was started ended with the one that served: {ended}");
            }
            let output = self.ctl(&["status", "-o", "json"]);
            let status: Value = serde_json::from_slice(&output.stdout).ok()?;
            (output.status.success() && status["pid"].as_u64() != Some(before.into())).then_some(status)
        });
        let Some(status) = status else {
            panic!("nobody serves {} s after {before} was killed:\n{}", limit.as_secs(), self.log_tail())
        };
        let ready = &mut self.running.as_mut().expect("the daemon runs").ready;
        ready.pid = status["pid"].as_u64().and_then(|pid| pid.try_into().ok()).expect("status has a pid");
        let text = |name: &str| status[name].as_str().expect("status has addresses").to_owned();
        (ready.http, ready.listen) = (text("http"), text("listen"));
    }

    /// Waits until the daemon ends by itself; `None` when it still runs after `limit`.
    pub fn wait_for_death(&mut self, limit: Duration) -> Option<ExitStatus> {
        let running = self.running.as_mut().expect("the daemon runs");
        let daemons = process::children(running.child.id());
        let status = process::wait(&mut running.child, limit).expect("waiting for ckptd")?;
        self.running = None;
        wait_until_gone(&daemons);
        self.clean_mount();
        Some(status)
    }

    /// Waits like [`Self::wait_for_death`], but leaves the mountpoint as it is, because another daemon uses it by then.
    pub fn wait_for_end_by_itself(&mut self, limit: Duration) -> Option<ExitStatus> {
        let running = self.running.as_mut().expect("the daemon runs");
        let daemons = process::children(running.child.id());
        let status = process::wait(&mut running.child, limit).expect("waiting for ckptd")?;
        self.running = None;
        wait_until_gone(&daemons);
        Some(status)
    }

    /// Sets another configuration for the next start.
    pub fn set_config(&mut self, text: &str) {
        self.options.config = Some(text.to_owned());
    }

    /// Sets an environment variable for the next start or, with `None`, removes it.
    pub fn set_env(&mut self, name: &str, value: Option<&str>) {
        self.options.env.retain(|(known, _)| known != name);
        self.options.env.extend(value.map(|value| (name.to_owned(), value.to_owned())));
    }

    /// Runs `ckptctl` against this daemon.
    pub fn ctl(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(machine::binary("ckptctl"));
        command.arg("--state-dir").arg(self.state_dir()).args(arguments);
        self.there(|| process::run(&mut command, COMMAND_LIMIT))
    }

    /// Runs `ckptctl … -o json`, asserts exit status 0, and returns its output.
    pub fn ctl_json(&self, arguments: &[&str]) -> Value {
        let output = self.ctl(&[arguments, &["-o", "json"]].concat());
        assert!(output.status.success(), "ckptctl {arguments:?}: {}\n{}", shown(&output), self.log_tail());
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
            panic!("ckptctl {arguments:?} printed no JSON ({error}): {}", shown(&output))
        })
    }

    /// Runs `ckptctl flush --wait` over the whole mount, and asserts that all is committed at its end.
    pub fn flush(&self) {
        // Less than the limit of a command, so that the command still prints what is pending.
        let output = self.ctl(&["flush", "--wait", "--timeout", "240"]);
        assert!(output.status.success(), "ckptctl flush --wait: {}\n{}", shown(&output), self.log_tail());
    }

    /// Returns the entries of `ls -o json`.
    pub fn checkpoints(&self) -> Vec<Value> {
        match self.ctl_json(&["ls"]) {
            Value::Array(list) => list,
            other => panic!("ckptctl ls -o json is not a list: {other}"),
        }
    }

    /// Returns the newest listed entry whose path, below the mount, is `path`.
    pub fn checkpoint(&self, path: &str) -> Option<Value> {
        let under_mount = self.mount().join(path);
        let is_it = |listed: &str| listed.trim_start_matches('/') == path || Path::new(listed) == under_mount;
        let mut found: Vec<Value> =
            self.checkpoints().into_iter().filter(|c| c["path"].as_str().is_some_and(is_it)).collect();
        found.sort_by_key(|c| c["version"].as_u64());
        found.pop()
    }

    /// Waits until Tier-1's memory is allocated. A host gives a virtual machine's pages one by one when they are first touched.
    pub fn wait_warm(&self) {
        let warm = || (self.metric("tidemark_tier1_warm_ratios", &[]) >= 0.95).then_some(());
        process::until(READY_LIMIT, warm)
            .unwrap_or_else(|| panic!("Tier-1 does not get warm:\n{}", self.log_tail()));
    }

    /// Waits until a checkpoint is committed. After `limit`, panics with the output of `ls`.
    pub fn wait_committed(&self, path: &str, limit: Duration) -> Value {
        let committed = |c: &Value| c["state"] == "committed";
        process::until(limit, || self.checkpoint(path).filter(committed)).unwrap_or_else(|| {
            panic!(
                "{path} is not committed after {} s: {:#?}\n{}",
                limit.as_secs(),
                self.checkpoints(),
                self.log_tail()
            )
        })
    }

    /// Fails unless the mount is in passthrough mode. Every suite that is not for FALLBACK calls this first.
    pub fn assert_passthrough(&self) {
        assert_eq!(self.ready().mode, "passthrough", "the log says why:\n{}", self.log_tail());
        assert_eq!(self.ctl_json(&["status"])["mount"]["mode"], "passthrough");
    }

    /// Returns the body of `GET path` on the daemon's `--http` address. Panics unless the answer is 200.
    pub fn http_get(&self, path: &str) -> String {
        let answer = self.there(|| http_get_from(&self.ready().http, path));
        answer.unwrap_or_else(|error| panic!("GET {path}: {error}"))
    }

    /// Runs `act` on the daemon's host, if it has one.
    fn there<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        match &self.options.host {
            Some(host) => host.inside(act),
            None => act(),
        }
    }

    /// Returns the sum of a metric's samples whose labels contain all of `labels` (`opcode="READ"`); 0 if there are none.
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        metric_sum(&self.http_get("/metrics"), name, labels)
    }

    pub fn mount(&self) -> &Path {
        &self.ready().mount
    }

    pub fn ready(&self) -> &Ready {
        &self.running.as_ref().expect("the daemon runs").ready
    }

    pub fn state_dir(&self) -> PathBuf {
        self.home.path().join("state")
    }

    /// Returns the directory behind the default `file://` Tier-3.
    pub fn tier3_dir(&self) -> PathBuf {
        self.home.path().join("tier3")
    }

    /// Makes a directory on the same disk, for files that a test puts aside. Dropping the daemon removes the directory.
    pub fn scratch(&self, name: &str) -> PathBuf {
        let dir = self.home.path().join("scratch").join(name);
        fs::create_dir_all(&dir).expect("a scratch directory");
        dir
    }

    /// Returns the last lines of the log since the last start.
    pub fn log_tail(&self) -> String {
        machine::tail(&self.log_path(), LOG_LINES_SHOWN)
    }

    /// Returns the whole log since the last start.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).expect("the log is readable")
    }

    fn log_path(&self) -> PathBuf {
        self.home.path().join(format!("ckptd-{}.log", self.starts))
    }

    fn mountpoint(&self) -> PathBuf {
        self.options.mountpoint.clone().unwrap_or_else(|| self.home.path().join("ckpt"))
    }

    fn command(&self) -> Command {
        let tier3 =
            self.options.tier3.clone().unwrap_or_else(|| format!("file://{}", self.tier3_dir().display()));
        if self.options.tier3.is_none() {
            fs::create_dir_all(self.tier3_dir()).expect("a directory for Tier-3");
        }
        let address = self.options.host.as_ref().map_or(Ipv4Addr::LOCALHOST, Host::address);
        // With port 0, the kernel chooses a free port.
        let http = format!("{address}:0");
        let listen = format!("{address}:{}", self.options.port);
        let mut command = Command::new(machine::binary("ckptd"));
        command
            .arg("up")
            .arg(self.mountpoint())
            .args(["--tier1", &self.options.tier1, "--tier3", &tier3, "--listen", &listen, "--http", &http])
            .arg("--state-dir")
            .arg(self.state_dir())
            .args(&self.options.flags)
            .envs(self.options.env.iter().map(|(name, value)| (name, value)));
        if let Some(config) = &self.options.config {
            let path = self.home.path().join("ckptd.toml");
            fs::write(&path, config).expect("a configuration file");
            command.arg("--config").arg(path);
        }
        command
    }

    /// Detaches the mount that the daemon left at its own mountpoint, and no other mount.
    fn clean_mount(&self) {
        let mountpoint = self.mountpoint();
        // The kernel lists a mount under the path that a link leads to.
        let mountpoint = fs::read_link(&mountpoint).unwrap_or(mountpoint);
        // After two starts a dead mount can lie below a live one, hence the loop, which is bounded in case a mount never goes.
        for _ in 0..4 {
            if !is_mounted(&mountpoint) || unmount(&mountpoint, UnmountFlags::DETACH).is_err() {
                return;
            }
        }
    }
}

impl Drop for Daemon {
    #[expect(clippy::print_stderr, reason = "the daemon's log belongs to the output of a failing test")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the end of {} ---\n{}", self.log_path().display(), self.log_tail());
        }
        if let Some(running) = self.running.take() {
            kill_node(running.child);
        }
        self.clean_mount();
    }
}

/// Ends a keeper and its daemon at once, and waits until both are gone.
fn kill_node(mut keeper: Child) {
    let daemons = process::kill_node(keeper.id());
    drop(keeper.wait());
    wait_until_gone(&daemons);
}

fn wait_until_gone(daemons: &[u32]) {
    for daemon in daemons {
        let gone = process::until(STOP_LIMIT, || (!process::is_alive(*daemon)).then_some(()));
        assert!(gone.is_some(), "daemon {daemon} outlives its keeper");
    }
}

/// Returns the body of `GET path` from a daemon that may be away. Any answer but 200 is an error.
pub fn http_get_from(address: &str, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(COMMAND_LIMIT))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.split(' ').nth(1) == Some("200") => Ok(body.to_owned()),
        Some((head, _)) => Err(io::Error::other(head.to_owned())),
        None => Err(io::Error::other("the answer has no head")),
    }
}

/// Whether something is mounted exactly at `path`, a dead FUSE mount included.
pub fn is_mounted(path: &Path) -> bool {
    let mounts = fs::read("/proc/self/mountinfo").expect("the mount table is readable");
    let wanted = path.as_os_str().as_encoded_bytes();
    mounts.split(|byte| *byte == b'\n').any(|line| line.split(|byte| *byte == b' ').nth(4) == Some(wanted))
}

/// Formats a command's output and exit status for a message.
pub fn shown(output: &Output) -> String {
    format!(
        "{}\nstdout:\n{}\nstderr:\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn parse_ready(line: &str) -> Ready {
    let mut ready = Ready::default();
    for word in line.trim().trim_start_matches("ready:").split_whitespace() {
        let (key, value) =
            word.split_once('=').unwrap_or_else(|| panic!("`{word}` in the ready line: {line}"));
        match key {
            "mount" => ready.mount = value.into(),
            "mode" => ready.mode = value.into(),
            "node" => ready.node = value.into(),
            "pid" => ready.pid = value.parse().unwrap_or_else(|error| panic!("pid in {line}: {error}")),
            "listen" => ready.listen = value.into(),
            "http" => ready.http = value.into(),
            "state_dir" => ready.state_dir = value.into(),
            // Newer daemons may print further fields: fields are added, never removed.
            _ => {}
        }
    }
    assert!(
        ready.pid != 0 && ready.mount.is_absolute() && !ready.mode.is_empty(),
        "the ready line lacks a word: {line}"
    );
    ready
}

/// Returns the sum of a metric's samples in the text of `/metrics`, as [`Daemon::metric`] does.
pub fn metric_sum(text: &str, name: &str, labels: &[&str]) -> f64 {
    text.lines()
        .filter_map(|line| line.strip_prefix(name))
        .filter(|rest| rest.starts_with(['{', ' ']) && labels.iter().all(|label| rest.contains(label)))
        .filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ready_line_is_read_word_by_word() {
        let line = "ready: mount=/ckpt mode=passthrough node=n1 pid=7 listen=127.0.0.1:1 http=127.0.0.1:2 state_dir=/s new=1\n";
        let ready = parse_ready(line);
        assert_eq!((ready.pid, ready.mode.as_str(), ready.node.as_str()), (7, "passthrough", "n1"));
        assert_eq!((ready.mount, ready.state_dir), ("/ckpt".into(), "/s".into()));
    }

    #[test]
    #[should_panic(expected = "lacks a word")]
    fn a_ready_line_without_a_pid_is_refused() {
        parse_ready("ready: mount=/ckpt mode=fallback\n");
    }

    #[test]
    fn a_metric_is_summed_over_its_labels_only() {
        let text = "# HELP a_total x\na_total{opcode=\"READ\",t=\"1\"} 2\na_total{opcode=\"READ\",t=\"2\"} 3\na_total_more 9\na_total{opcode=\"WRITE\"} 5\n";
        assert_eq!(metric_sum(text, "a_total", &["opcode=\"READ\""]), 5.0);
        assert_eq!(metric_sum(text, "a_total", &[]), 10.0);
        assert_eq!(metric_sum(text, "b_total", &[]), 0.0);
    }

    #[test]
    fn the_root_is_mounted_and_a_plain_directory_is_not() {
        let dir = tempfile::tempdir().unwrap();
        assert!(is_mounted(Path::new("/")));
        assert!(!is_mounted(dir.path()));
    }
}

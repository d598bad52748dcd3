//! Other programs that move bytes from one host to another: iperf3, scp and rsync, over the same network as the nodes.
//!
//! Owns: starting their servers on a host and their clients on another, rates, processor seconds of both ends. Does not own: the hosts and
//! the comparison.

use crate::footprint::{cpu_of_children_s, cpu_s};
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tidemark_tests::net::Host;
use tidemark_tests::process;

/// iperf3's own port; each host has all ports for itself.
const IPERF3_PORT: &str = "5201";
const SSH_PORT: u16 = 2022;
const RSYNC_PORT: u16 = 8730;
/// Time limit of a server's start. A server listens after some ten milliseconds.
const LISTEN_MAX: Duration = Duration::from_secs(10);
/// Duration of an iperf3 run. A run by bytes sometimes ends without knowing how many arrived.
const IPERF3_S: &str = "2";
const IPERF3_MAX: Duration = Duration::from_secs(30);
/// Time limit of a copy. 4 GiB through a link of 100 Mbit/s takes six minutes.
const COPY_MAX: Duration = Duration::from_secs(600);
const POLL: Duration = Duration::from_millis(5);

/// Returns the GB/s that iperf3 gets from one host's memory to another's, as the receiver counts them, in `streams` streams.
///
/// Before version 3.16 iperf3 serves all streams in one thread of each end.
///
/// # Errors
/// iperf3 is not installed, or one of its ends fails.
pub fn iperf3_gb_per_s(from: &Host, to: &Host, streams: usize) -> anyhow::Result<f64> {
    let address = to.address().to_string();
    let mut serve = Command::new("iperf3");
    serve.args(["-s", "-p", IPERF3_PORT]).stdin(Stdio::null()).stdout(Stdio::null());
    let _server = Ended(to.spawn(&mut serve).context("start iperf3; it is Debian's package iperf3")?);
    let mut ask = Command::new("iperf3");
    ask.args(["-c", &address, "-p", IPERF3_PORT, "-P", &streams.to_string(), "-t", IPERF3_S, "-J"]);
    let deadline = Instant::now() + IPERF3_MAX;
    loop {
        let output = from.run(&mut ask, IPERF3_MAX);
        let answer: Value = serde_json::from_slice(&output.stdout).context("iperf3 printed no JSON")?;
        let bits_per_s = answer.pointer("/end/sum_received/bits_per_second").and_then(Value::as_f64);
        if let Some(bits_per_s) = bits_per_s.filter(|rate| output.status.success() && *rate > 0.0) {
            return Ok(bits_per_s / 8e9);
        }
        // No server listens yet; or it ended without the receiver's count, which sometimes happens. A connection that only checks whether a
        // server listens would be taken for the beginning of a test.
        ensure!(Instant::now() < deadline, "iperf3 names no rate of its receiver: {answer:#}");
        thread::sleep(POLL);
    }
}

/// A program that copies files to a server of its own on another host.
#[derive(Debug)]
pub struct Copier {
    server: Ended,
    from: Host,
    client: Command,
    target: PathBuf,
    /// The folder of keys and settings; removed with this value.
    _folder: TempDir,
}

/// The cost of a copy.
#[derive(Clone, Copy, Debug)]
pub struct Copied {
    pub gb_per_s: f64,
    /// Seconds of one core, at both ends, for each GB.
    pub cpu_s_per_gb: f64,
}

impl Copier {
    /// Prepares `scp` to an `sshd` of its own: its own port, keys made for it, no account's settings.
    ///
    /// `Ok(Err)`: this machine lacks something, in words.
    ///
    /// # Errors
    /// The programs are there and do not work.
    pub fn scp(from: &Host, to: &Host, source: &Path, target: &Path) -> anyhow::Result<Result<Self, String>> {
        let Some(sshd) = program("sshd") else {
            return Ok(Err("scp: no sshd; it is Debian's package openssh-server".to_owned()));
        };
        if program("scp").is_none() || program("ssh-keygen").is_none() {
            return Ok(Err(
                "scp: no scp or no ssh-keygen; they are Debian's package openssh-client".to_owned()
            ));
        }
        let folder = tempfile::Builder::new().prefix("tidemark-bench-").tempdir().context("make a folder")?;
        let path = |name: &str| folder.path().join(name).display().to_string();
        for key in ["host", "user"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f", &path(key)])
                .status()
                .context("start ssh-keygen")?;
            ensure!(made.success(), "ssh-keygen ended with {made}");
        }
        let config = format!(
            "ListenAddress {}:{SSH_PORT}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\nStrictModes no\n\
             PermitRootLogin prohibit-password\nPasswordAuthentication no\nSubsystem sftp internal-sftp\n\
             LogLevel ERROR\n",
            to.address(),
            path("host"),
            path("user.pub"),
        );
        fs::write(path("sshd_config"), config).context("write sshd's configuration")?;
        // The folder in which sshd drops its rights; systemd would have made it.
        fs::create_dir_all("/run/sshd").context("make /run/sshd")?;
        let mut serve = Command::new(sshd);
        serve.args(["-D", "-e", "-f", &path("sshd_config")]);
        let mut client = Command::new("scp");
        client.args(["-q", "-F", "/dev/null", "-P", &SSH_PORT.to_string(), "-i", &path("user")]);
        client.args(["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]);
        client.args(["-o", "LogLevel=ERROR"]).arg(source);
        client.arg(format!("root@{}:{}", to.address(), target.display()));
        Self::begin((from, to), (serve, SSH_PORT), (client, target), folder).map(Ok)
    }

    /// Prepares `rsync` to its daemon, whole files and in place, as a user would who copies new files to memory.
    ///
    /// `Ok(Err)`: this machine lacks something, in words.
    ///
    /// # Errors
    /// The program is there and does not work.
    pub fn rsync(
        from: &Host,
        to: &Host,
        source: &Path,
        target: &Path,
    ) -> anyhow::Result<Result<Self, String>> {
        let Some(rsync) = program("rsync") else {
            return Ok(Err("rsync: not installed; it is Debian's package rsync".to_owned()));
        };
        let (Some(into), Some(name)) = (target.parent(), target.file_name()) else {
            bail!("{} is no file in a folder", target.display());
        };
        let folder = tempfile::Builder::new().prefix("tidemark-bench-").tempdir().context("make a folder")?;
        let config = folder.path().join("rsyncd.conf");
        let text = format!(
            "uid = root\ngid = root\nuse chroot = no\nread only = no\n[into]\npath = {}\n",
            into.display()
        );
        fs::write(&config, text).context("write rsync's configuration")?;
        let mut serve = Command::new(&rsync);
        serve.args(["--daemon", "--no-detach", "--port", &RSYNC_PORT.to_string()]);
        serve.arg(format!("--address={}", to.address())).arg(format!("--config={}", config.display()));
        let mut client = Command::new(rsync);
        client.args(["--whole-file", "--inplace"]).arg(source);
        client.arg(format!("rsync://{}:{RSYNC_PORT}/into/{}", to.address(), name.display()));
        Self::begin((from, to), (serve, RSYNC_PORT), (client, target), folder).map(Ok)
    }

    fn begin(
        (from, to): (&Host, &Host),
        (mut serve, port): (Command, u16),
        (client, target): (Command, &Path),
        folder: TempDir,
    ) -> anyhow::Result<Self> {
        serve.stdin(Stdio::null());
        let shown = format!("{serve:?}");
        let mut server = Ended(to.spawn(&mut serve).with_context(|| format!("start {shown}"))?);
        let deadline = Instant::now() + LISTEN_MAX;
        while from.inside(|| TcpStream::connect((to.address(), port))).is_err() {
            if let Some(status) = server.0.try_wait().context("ask whether a server runs")? {
                bail!("{shown} ended with {status}; what it said is above");
            }
            ensure!(Instant::now() < deadline, "{shown} does not listen after {LISTEN_MAX:?}");
            thread::sleep(POLL);
        }
        Ok(Self { server, from: from.clone(), client, target: target.to_owned(), _folder: folder })
    }

    /// Copies the file of `size_bytes`, and removes the copy outside the time.
    ///
    /// # Errors
    /// The program fails; the copy has another size.
    pub fn copy(&mut self, size_bytes: u64) -> anyhow::Result<Copied> {
        self.idle()?;
        let before_s = self.cpu_s()?;
        let started = Instant::now();
        let output = self.from.run(&mut self.client, COPY_MAX);
        let took_s = started.elapsed().as_secs_f64();
        ensure!(
            output.status.success(),
            "{:?} ended with {}: {}",
            self.client,
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        self.idle()?;
        let cpu_s = self.cpu_s()? - before_s;
        let copied_bytes = fs::metadata(&self.target).context("look at the copy")?.len();
        ensure!(copied_bytes == size_bytes, "{copied_bytes} of {size_bytes} bytes were copied");
        fs::remove_file(&self.target).context("remove the copy")?;
        let gigabytes = size_bytes as f64 / 1e9;
        Ok(Copied { gb_per_s: gigabytes / took_s, cpu_s_per_gb: cpu_s / gigabytes })
    }

    /// Waits until the server has waited for all its children, and so knows their processor time.
    fn idle(&self) -> anyhow::Result<()> {
        let children = || process::children(self.server.0.id());
        let idle = process::until(LISTEN_MAX, || children().is_empty().then_some(()));
        idle.with_context(|| format!("the server still has processes {:?}", children()))
    }

    /// Returns the processor seconds of the server and its children, and of all children that this process waited for.
    fn cpu_s(&self) -> anyhow::Result<f64> {
        let server = self.server.0.id();
        Ok(cpu_s(server)? + cpu_of_children_s(server)? + cpu_of_children_s(std::process::id())?)
    }
}

/// Finds a program; servers are in folders that not every account's PATH has.
fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// A process that is killed with this value.
#[derive(Debug)]
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // A process that has ended already needs neither.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_by_its_name_alone() {
        assert!(program("sh").is_some_and(|path| path.is_absolute()));
        assert_eq!(program("tidemark-is-no-program"), None);
    }
}

//! A mounted Tidemark to measure: a mount that the caller names, or a daemon started for this run.
//!
//! Owns: finding the programs, starting `ckptd up`, its ready line, waiting until memory is warm, the end. Does not
//! own: the measurement.

use crate::files;
use crate::options::Options;
use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time limit of a start. A first start makes Tier-1 and probes Tier-3; seconds, not minutes.
const READY_MAX: Duration = Duration::from_secs(60);
/// Time limit of warming. The whole budget has to be touched once, at 0.4 GB/s or more.
const WARM_MAX: Duration = Duration::from_secs(180);
/// Time limit of an end. The daemon's own drain lasts at most 60 s by default.
const STOP_MAX: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(20);
/// Tier-1 in multiples of the size: it holds the file that is written, its predecessor, and the memory that the pool
/// keeps ready.
const TIER1_PER_SIZE: u64 = 3;
const TIER1_MIN_BYTES: u64 = 256 << 20;

/// A mount to measure.
#[derive(Debug)]
pub struct Mount {
    path: PathBuf,
    daemon: Option<Daemon>,
}

#[derive(Debug)]
struct Daemon {
    child: Child,
    /// The folder of mountpoint, state directory and Tier-3; removed after the daemon has ended.
    folder: TempDir,
    config: Option<String>,
    tier1_bytes: u64,
    bucket: Option<Bucket>,
}

/// An S3 bucket instead of a directory.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// The bucket as `s3://bucket/prefix`.
    pub url: String,
    /// Environment variables of the daemon.
    pub variables: Vec<(String, String)>,
}

impl Mount {
    /// Opens `--path` of the command line, or a fresh daemon with room for files of the bench's size.
    ///
    /// # Errors
    /// The daemon cannot be found or is not ready in time.
    pub fn open(options: &Options) -> anyhow::Result<Self> {
        Self::open_with(options, None)
    }

    /// Opens a mount as [`Mount::open`] does; a fresh daemon has `config` (TOML) beside the flags.
    ///
    /// # Errors
    /// As [`Mount::open`].
    pub fn open_with(options: &Options, config: Option<&str>) -> anyhow::Result<Self> {
        match &options.path {
            Some(path) => Ok(Self { path: path.clone(), daemon: None }),
            None => Self::start(options, config),
        }
    }

    /// Starts a fresh daemon, with `config` (TOML) beside the flags.
    ///
    /// # Errors
    /// As [`Mount::open`].
    pub fn start(options: &Options, config: Option<&str>) -> anyhow::Result<Self> {
        Self::start_over(options, config, None)
    }

    /// Starts a fresh daemon with Tier-3 in a bucket, if there is one.
    ///
    /// # Errors
    /// As [`Mount::open`].
    pub fn start_over(
        options: &Options,
        config: Option<&str>,
        bucket: Option<Bucket>,
    ) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("tidemark-bench-").tempdir().context("make a folder")?;
        let usual_bytes = options.size_bytes.saturating_mul(TIER1_PER_SIZE).max(TIER1_MIN_BYTES);
        let tier1_bytes = options.tier1_bytes.unwrap_or(usual_bytes);
        let config = config.map(ToOwned::to_owned);
        let child = launch(folder.path(), config.as_deref(), tier1_bytes, bucket.as_ref())?;
        let mut daemon = Daemon { child, folder, config, tier1_bytes, bucket };
        let path = daemon.wait_ready()?;
        let mount = Self { path, daemon: Some(daemon) };
        mount.wait_warm()?;
        Ok(mount)
    }

    /// Returns the folder for the bench's files.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the state directory of a daemon that this started, and its `file://` Tier-3.
    #[must_use]
    pub fn folders(&self) -> Option<(PathBuf, PathBuf)> {
        let folder = self.daemon.as_ref()?.folder.path();
        Some((folder.join("state"), folder.join("tier3")))
    }

    /// Runs `ckptctl flush --wait` on everything: returns when all closed files are in Tier-3.
    ///
    /// # Errors
    /// The daemon was started by the caller (its state directory is not known), or the command fails.
    pub fn flush(&self) -> anyhow::Result<()> {
        let (state, _) = self.folders().context("this stage starts its own daemon: leave --path out")?;
        let status = Command::new(program("ckptctl", "TIDEMARK_CKPTCTL")?)
            .arg("--state-dir")
            .arg(state)
            .args(["flush", "--wait"])
            .stdout(Stdio::null())
            .status()
            .context("start ckptctl")?;
        ensure!(status.success(), "ckptctl flush --wait ended with {status}");
        Ok(())
    }

    /// Writes a file anew and returns the rate, in GB/s, from its close to the end of [`Mount::flush`].
    ///
    /// # Errors
    /// As [`Mount::flush`], or the file cannot be written.
    pub fn drain_rate(&self, file: &Path, size_bytes: u64) -> anyhow::Result<f64> {
        // Under a new name: if Tier-3 had bytes of a file with this name, these would not be sent again.
        static CALLS: AtomicU64 = AtomicU64::new(0);
        let file = file.with_extension(CALLS.fetch_add(1, Ordering::Relaxed).to_string());
        files::write_new(&file, size_bytes)?;
        let started = Instant::now();
        self.flush()?;
        let rate = size_bytes as f64 / 1e9 / started.elapsed().as_secs_f64();
        files::remove(&file)?;
        Ok(rate)
    }

    /// Stops the daemon and starts it again over the same Tier-3 and state directory.
    ///
    /// # Errors
    /// The errors of [`Mount::flush`], or the stop or the start fails.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        let daemon = self.daemon.as_mut().context("this stage starts its own daemon: leave --path out")?;
        daemon.stop()?;
        let (config, bucket) = (daemon.config.as_deref(), daemon.bucket.as_ref());
        daemon.child = launch(daemon.folder.path(), config, daemon.tier1_bytes, bucket)?;
        daemon.wait_ready()?;
        self.wait_warm()
    }

    /// Stops a daemon that this started.
    ///
    /// # Errors
    /// The daemon ends with an error or not in time.
    pub fn close(mut self) -> anyhow::Result<()> {
        self.daemon.as_mut().map_or(Ok(()), Daemon::stop)
    }

    /// Returns the process that serves now; another one after [`Mount::restart`].
    ///
    /// # Errors
    /// The status cannot be read.
    pub fn serving_pid(&self) -> anyhow::Result<u32> {
        let pid = self.status()?.get("pid").and_then(Value::as_u64).context("status.json names no pid")?;
        Ok(u32::try_from(pid)?)
    }

    fn status(&self) -> anyhow::Result<Value> {
        let path = self.path.join(".tidemark/status.json");
        let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_slice(&text).context("status.json is not JSON")
    }

    /// Waits until the mount's own status reports that no memory of its budget is untouched.
    fn wait_warm(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + WARM_MAX;
        loop {
            let warm_fraction =
                warm_fraction(&self.status()?).context("status.json names no warm_fraction")?;
            if warm_fraction >= 0.99 {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "Tier-1 is {warm_fraction} warm after {WARM_MAX:?}");
            thread::sleep(POLL);
        }
    }
}

impl Daemon {
    /// Reads stdout up to the ready line, and returns its mountpoint.
    fn wait_ready(&mut self) -> anyhow::Result<PathBuf> {
        let stdout = self.child.stdout.take().context("the daemon's stdout was taken before")?;
        let (sender, lines) = mpsc::sync_channel(64);
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let deadline = Instant::now() + READY_MAX;
        loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Some(fields) = line.strip_prefix("ready: ") {
                        return mount_of(fields);
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => bail!("ckptd printed no ready line in {READY_MAX:?}"),
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    bail!("ckptd ended with {} before it was ready; its log is above", self.child.wait()?)
                }
            }
        }
    }

    fn stop(&mut self) -> anyhow::Result<()> {
        if self.child.try_wait().context("ask whether ckptd runs")?.is_some() {
            return Ok(());
        }
        rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM).context("send SIGTERM")?;
        let deadline = Instant::now() + STOP_MAX;
        loop {
            if let Some(status) = self.child.try_wait().context("wait for ckptd")? {
                // Exit code 1: something was not durable, which a stage that never flushed has to expect.
                ensure!(matches!(status.code(), Some(0 | 1)), "ckptd ended with {status}");
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "ckptd still runs {STOP_MAX:?} after SIGTERM");
            thread::sleep(POLL);
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.stop().is_err() {
            // Nothing to report: the bench has failed already or reports that itself. No process may stay behind.
            self.child.kill().ok();
            self.child.wait().ok();
        }
    }
}

/// Returns the folder of the built programs: this executable's own, without `deps`.
///
/// # Errors
/// The executable's path is not known.
pub fn target_folder() -> anyhow::Result<PathBuf> {
    let executable = std::env::current_exe().context("find this executable")?;
    let folder = executable.parent().context("the executable has no folder")?;
    Ok(if folder.ends_with("deps") { folder.parent().unwrap_or(folder) } else { folder }.to_owned())
}

/// Returns a built program beside this bench's own, or the one that a variable names.
pub(crate) fn program(name: &str, variable: &str) -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Ok(path.into());
    }
    let path = target_folder()?.join(name);
    ensure!(
        path.exists(),
        "no {name} at {}: build it with this bench's profile, or set {variable}",
        path.display()
    );
    Ok(path)
}

fn launch(
    folder: &Path,
    config: Option<&str>,
    tier1_bytes: u64,
    bucket: Option<&Bucket>,
) -> anyhow::Result<Child> {
    let tier3 = folder.join("tier3");
    fs::create_dir_all(&tier3).with_context(|| format!("make {}", tier3.display()))?;
    let mut command = Command::new(program("ckptd", "TIDEMARK_CKPTD")?);
    command.arg("up").arg(folder.join("mount"));
    if let Some(config) = config {
        let path = folder.join("ckptd.toml");
        fs::write(&path, config).with_context(|| format!("write {}", path.display()))?;
        command.arg("--config").arg(path);
    }
    let url = bucket.map_or_else(|| format!("file://{}", tier3.display()), |bucket| bucket.url.clone());
    command.envs(bucket.into_iter().flat_map(|bucket| bucket.variables.iter().cloned()));
    command
        .args(["--tier1", &tier1_bytes.to_string()])
        .args(["--tier3", &url])
        .arg("--state-dir")
        .arg(folder.join("state"))
        .args(["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    command.spawn().context("start ckptd")
}

/// Reads the mountpoint in `mount=/ckpt mode=passthrough node=N …`.
fn mount_of(fields: &str) -> anyhow::Result<PathBuf> {
    let mount = fields.split(' ').find_map(|field| field.strip_prefix("mount="));
    mount.map(PathBuf::from).with_context(|| format!("the ready line names no mount: {fields:?}"))
}

fn warm_fraction(status: &Value) -> Option<f64> {
    status.get("tiers")?.as_array()?.iter().find_map(|tier| tier.get("warm_fraction")?.as_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ready_line_names_the_mount() {
        let fields =
            "mount=/ckpt mode=passthrough node=n pid=7 listen=127.0.0.1:1 http=127.0.0.1:2 state_dir=/s";
        assert_eq!(mount_of(fields).unwrap(), Path::new("/ckpt"));
        assert!(mount_of("mode=passthrough").is_err());
    }

    #[test]
    fn the_first_tier_that_has_memory_says_how_warm_it_is() {
        let status =
            serde_json::json!({"tiers": [{"name": "object", "warm_fraction": null}, {"warm_fraction": 0.5}]});
        assert_eq!(warm_fraction(&status), Some(0.5));
        assert_eq!(warm_fraction(&serde_json::json!({})), None);
    }
}

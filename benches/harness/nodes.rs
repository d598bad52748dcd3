//! Several real daemons, each on a host of its own, as one cluster over one Tier-3.
//!
//! Owns: starting them with certificates, making Tier-3 unreachable and reachable again, waiting until a file has its copy. Does not own:
//! the hosts and the loss of one (the tests' `net`), the measurement.
//!
//! Hosts are network namespaces of one machine: both ends of every transfer share its processors, and the network between
//! them is a bridge.

use crate::daemon::target_folder;
use crate::options::Options;
use anyhow::{Context, bail, ensure};
use rustix::fs::fgetxattr;
use rustix::io::Errno;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_tests::net::{Host, Network, Node};
use tidemark_transport::certs;

/// The needs of a network of hosts.
const NETWORK_NEEDS: &str = "several nodes need root, and `ip`, `nft` and `tc`; what is missing is above";
/// Time limit of the first copy, which waits for the second node to join: a connection and a beat.
const FIRST_COPY_MAX: Duration = Duration::from_secs(30);
/// Time limit of touching the budget of several nodes at 0.4 GB/s or more.
const WARM_MAX: Duration = Duration::from_secs(180);
/// Interval between two checks while something is timed: `replicated` is to be known to the millisecond, and a check costs the daemon some
/// 30 µs.
const LOOK_EVERY: Duration = Duration::from_millis(1);
const POLL: Duration = Duration::from_millis(20);
/// Most bytes of `user.tidemark.state`: more than any value has.
const STATE_BYTES_MAX: usize = 64;

/// Daemons of one cluster; the first is the coordinator. Dropping the value kills and unmounts all of them.
#[derive(Debug)]
pub struct Nodes {
    nodes: Vec<Node>,
    folder: TempDir,
    tier1_bytes: u64,
    config: String,
}

/// Makes hosts of these names.
///
/// # Errors
/// Hosts are impossible on this machine; the missing parts were printed.
pub fn network(names: &[&str]) -> anyhow::Result<Network> {
    // The tests' harness finds `ckptd` and `ckptctl` by the folder of this executable.
    let folder = target_folder()?;
    for name in ["ckptd", "ckptctl"] {
        let path = folder.join(name);
        ensure!(path.exists(), "no {name} at {}: build it with this bench's profile", path.display());
    }
    Network::make(names).context(NETWORK_NEEDS)
}

/// Returns a Tier-1 for one file of the bench's size and the memory that the pool keeps ready beside it. Several nodes share one machine's
/// memory, so it is less than for one node, which gets three times the size.
#[must_use]
pub fn tier1_for_one_file(options: &Options) -> u64 {
    const BESIDE_BYTES: u64 = 256 << 20;
    options.tier1_bytes.unwrap_or(options.size_bytes + options.size_bytes / 4 + BESIDE_BYTES)
}

impl Nodes {
    /// Starts a daemon on each host, with `config` (TOML) beside the flags, and waits until memory is warm.
    ///
    /// # Errors
    /// Certificates or folders cannot be made; memory does not become warm.
    ///
    /// # Panics
    /// When a daemon is not ready in time; the message has its log.
    pub fn start(hosts: &[&Host], tier1_bytes: u64, config: &str) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("tidemark-bench-").tempdir().context("make a folder")?;
        certs::init(&folder.path().join("certs"), "tidemark").context("make an authority")?;
        let mut nodes = Self { nodes: Vec::new(), folder, tier1_bytes, config: config.to_owned() };
        fs::create_dir(nodes.tier3()).context("make Tier-3")?;
        for host in hosts {
            nodes.add(host)?;
        }
        Ok(nodes)
    }

    /// Adds a node, with empty memory that is warm.
    ///
    /// # Errors
    /// As [`Nodes::start`].
    ///
    /// # Panics
    /// As [`Nodes::start`].
    pub fn add(&mut self, host: &Host) -> anyhow::Result<usize> {
        let certificates = self.folder.path().join("certs");
        certs::issue(&certificates, host.name(), &[host.address().to_string()])
            .with_context(|| format!("make a certificate for {}", host.name()))?;
        let mut flags = vec!["--certs".to_owned(), certificates.display().to_string()];
        if let Some(first) = self.nodes.first() {
            let coordinator = format!("{}@{}", first.host().name(), first.daemon().ready().listen);
            flags.extend(["--coordinator".to_owned(), coordinator]);
        }
        let options = DaemonOptions {
            tier1: self.tier1_bytes.to_string(),
            tier3: Some(format!("file://{}", self.tier3().display())),
            config: Some(self.config.clone()),
            flags,
            ..DaemonOptions::default()
        };
        self.nodes.push(Node::start(host, options));
        let at = self.nodes.len() - 1;
        let deadline = Instant::now() + WARM_MAX;
        while self.daemon(at).metric("tidemark_tier1_warm_ratios", &[]) < 0.99 {
            ensure!(Instant::now() < deadline, "Tier-1 of {} is not warm after {WARM_MAX:?}", host.name());
            thread::sleep(POLL);
        }
        Ok(at)
    }

    /// Returns a node, for tests of its loss.
    pub fn node_mut(&mut self, node: usize) -> &mut Node {
        &mut self.nodes[node]
    }

    #[must_use]
    pub fn daemon(&self, node: usize) -> &Daemon {
        self.nodes[node].daemon()
    }

    #[must_use]
    pub fn host(&self, node: usize) -> &Host {
        self.nodes[node].host()
    }

    #[must_use]
    pub fn mount(&self, node: usize) -> &Path {
        self.daemon(node).mount()
    }

    /// Returns the process that serves at a node.
    ///
    /// # Errors
    /// No daemon serves at the moment.
    pub fn pid(&self, node: usize) -> anyhow::Result<u32> {
        self.daemon(node).serving_pid().context("a daemon is being started again in the midst of a bench")
    }

    #[must_use]
    pub fn tier3(&self) -> PathBuf {
        self.folder.path().join("tier3")
    }

    /// Makes Tier-3 unreachable from now on: sealed files have copies in memory, or none.
    ///
    /// # Errors
    /// The folder cannot be moved.
    pub fn take_tier3_away(&self) -> anyhow::Result<()> {
        fs::rename(self.tier3(), self.folder.path().join("away")).context("move Tier-3 away")?;
        fs::write(self.tier3(), b"no directory").context("put something else in its place")
    }

    /// Waits until a small file that is closed on `node` has its copy: from then on the nodes know each other. The file stays.
    ///
    /// # Errors
    /// No copy comes in time.
    pub fn wait_for_partner(&self, node: usize) -> anyhow::Result<()> {
        let path = self.mount(node).join(format!("first-of-{}", self.host(node).name()));
        fs::write(&path, b"one").with_context(|| format!("write {}", path.display()))?;
        let deadline = Instant::now() + FIRST_COPY_MAX;
        while self.daemon(node).metric("tidemark_replica_acknowledged_files_total", &[]) < 1.0 {
            ensure!(Instant::now() < deadline, "a small file has no copy after {FIRST_COPY_MAX:?}");
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Returns a node's present value of a metric.
    #[must_use]
    pub fn metric(&self, node: usize, name: &str) -> f64 {
        self.daemon(node).metric(name, &[])
    }
}

/// Waits until the checkpoint of an open file is in one of `states`, by the attribute of that file on its node; returns that moment. The
/// node must be the coordinator's: other nodes know nothing of checkpoints.
///
/// # Errors
/// The checkpoint does not reach any of them in time; the file's attribute cannot be read.
pub fn wait_for_state(file: &File, states: &[&str], limit: Duration) -> anyhow::Result<Instant> {
    let deadline = Instant::now() + limit;
    loop {
        let state = state_of(file)?;
        if states.contains(&state.as_str()) {
            return Ok(Instant::now());
        }
        if Instant::now() >= deadline {
            bail!("the checkpoint is {state:?} after {limit:?}, and not one of {states:?}");
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Returns the attribute `user.tidemark.state`; empty if the file has none yet.
fn state_of(file: &File) -> anyhow::Result<String> {
    let mut state = [0_u8; STATE_BYTES_MAX];
    match fgetxattr(file, c"user.tidemark.state", &mut state[..]) {
        Ok(length) => Ok(String::from_utf8_lossy(&state[..length]).into_owned()),
        Err(Errno::NODATA) => Ok(String::new()),
        Err(error) => Err(error).context("read user.tidemark.state"),
    }
}

//! Several nodes of one cluster, and a job with a rank on each of them.
//!
//! Owns: starting them, with the first as the coordinator or with a lease in an etcd that names the coordinator; taking Tier-3 away.
//! Does not own: the network (the harness), the job (`job`).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tidemark_tests::daemon::DaemonOptions;
use tidemark_tests::etcd::Etcd;
use tidemark_tests::machine;
use tidemark_tests::net::{Network, Node};
use tidemark_tests::process;
use tidemark_tests::python::Python;
use tidemark_transport::certs;

use crate::job::{Job, Plan};
use crate::links::{Changes, Relay};

pub(crate) const LIMIT: Duration = Duration::from_secs(60);
pub(crate) const MIB: usize = 1 << 20;

/// Port of each node, on an address of its own, so that other nodes find it again when it is back.
const PORT: u16 = 7070;

/// Log line of a node that has taken the coordinator role.
pub(crate) const SEAT_TAKEN: &str = "the seat is taken";

/// Nodes of one cluster, each on a host of its own, and one more host.
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Node>,
    pub(crate) etcd: Option<Etcd>,
    pub(crate) network: Network,
    folder: tempfile::TempDir,
    /// Added to each node's configuration.
    config: String,
    /// Faults of the relays in front of the nodes, if there are relays.
    changes: Option<Arc<Changes>>,
}

impl Cluster {
    /// Starts three nodes, of which the first is the coordinator.
    pub(crate) fn start() -> Option<Self> {
        Self::begin(&["n1", "n2", "n3", "n4"], false, "", None)
    }

    /// Starts nodes as [`Cluster::start`] does, with more configuration. If `changes` is given, a relay stands in front of each node.
    pub(crate) fn start_with(config: &str, changes: Option<&Arc<Changes>>) -> Option<Self> {
        Self::begin(&["n1", "n2", "n3"], false, config, changes)
    }

    /// Starts three nodes with a lease in an etcd on a host of its own. The first node is the first holder.
    pub(crate) fn start_with_lease() -> Option<Self> {
        Self::start_with_lease_and("")
    }

    /// Starts nodes as [`Cluster::start_with_lease`] does, with more configuration.
    pub(crate) fn start_with_lease_and(config: &str) -> Option<Self> {
        Self::begin(&["n1", "n2", "n3", "n4", "n5", "n6", "etcd"], true, config, None)
    }

    fn begin(hosts: &[&str], lease: bool, config: &str, changes: Option<&Arc<Changes>>) -> Option<Self> {
        if !machine::can_mount() {
            return None;
        }
        let network = Network::make(hosts)?;
        let etcd = if lease { Some(Etcd::start_on(network.host("etcd"))?) } else { None };
        let folder = tempfile::tempdir().expect("a temporary directory");
        certs::init(&folder.path().join("certs"), "tidemark").expect("an authority");
        fs::create_dir(folder.path().join("tier3")).expect("a directory");
        let (nodes, config, changes) = (Vec::new(), config.to_owned(), changes.cloned());
        let mut cluster = Self { nodes, etcd, network, folder, config, changes };
        for name in ["n1", "n2", "n3"] {
            cluster.add(name);
            if lease && name == "n1" {
                cluster.wait_for_seat(&[0]);
            }
        }
        Some(cluster)
    }

    /// Starts a daemon with empty memory on a host.
    pub(crate) fn add(&mut self, name: &str) {
        let host = self.network.host(name).clone();
        let certificates = self.folder.path().join("certs");
        certs::issue(&certificates, name, &[host.address().to_string()]).expect("a certificate");
        let mut flags = vec!["--certs".to_owned(), certificates.display().to_string()];
        match (&self.etcd, self.nodes.first()) {
            (Some(etcd), _) => flags.extend(["--etcd".to_owned(), etcd.url("ckpt")]),
            (None, Some(first)) => {
                flags.extend(["--coordinator".to_owned(), format!("n1@{}", first.daemon().ready().listen)]);
            }
            (None, None) => {}
        }
        let relay = self.changes.as_ref().map(|changes| Relay::on(&host, changes));
        if let Some(relay) = &relay {
            flags.extend(["--advertise".to_owned(), relay.address().to_string()]);
        }
        let config = Some(format!("[save]\nsettle_s = 0.5\n[tier3]\npaced = false\n{}", self.config));
        let tier3 = Some(format!("file://{}", self.tier3().display()));
        let options = DaemonOptions {
            tier1: "256MiB".into(),
            config,
            tier3,
            flags,
            port: PORT,
            ..DaemonOptions::default()
        };
        let node = Node::start(&host, options);
        if let Some(relay) = relay {
            relay.serve(node.daemon().ready().listen.parse().expect("an address"));
        }
        self.nodes.push(node);
    }

    fn tier3(&self) -> PathBuf {
        self.folder.path().join("tier3")
    }

    /// Takes Tier-3 out of all nodes' reach.
    pub(crate) fn take_tier3_away(&self) {
        fs::rename(self.tier3(), self.folder.path().join("away")).expect("the folder of a test");
        fs::write(self.tier3(), b"not a directory").expect("the folder of a test");
    }

    pub(crate) fn assert_tier3_is_away(&self) {
        assert!(self.tier3().is_file(), "nobody was helped by Tier-3");
    }

    pub(crate) fn bring_tier3_back(&self) {
        self.assert_tier3_is_away();
        fs::remove_file(self.tier3()).expect("the folder of a test");
        fs::rename(self.folder.path().join("away"), self.tier3()).expect("the folder of a test");
    }

    pub(crate) fn mount(&self, node: usize) -> &Path {
        self.nodes[node].daemon().mount()
    }

    /// Waits until a checkpoint is in one of these states. Returns its row at `node`, the coordinator.
    pub(crate) fn wait_for(&self, node: usize, path: &str, states: &[&str]) -> Value {
        let coordinator = self.nodes[node].daemon();
        let there = |found: &Value| states.iter().any(|state| found["state"] == *state);
        process::until(LIMIT, || coordinator.checkpoint(path).filter(there)).unwrap_or_else(|| {
            panic!("{path} is not {states:?}: {:#?}\n{}", coordinator.checkpoints(), coordinator.log_tail())
        })
    }

    /// Waits until one of these nodes is the coordinator, and returns it.
    pub(crate) fn wait_for_seat(&self, nodes: &[usize]) -> usize {
        let seated = |node: &&usize| self.nodes[**node].daemon().log().contains(SEAT_TAKEN);
        process::until(LIMIT, || nodes.iter().find(seated).copied())
            .unwrap_or_else(|| panic!("nobody took the seat\n{}", self.nodes[nodes[0]].daemon().log_tail()))
    }

    /// Starts a job with a rank on each of these nodes, which saves below `job` in the mount.
    pub(crate) fn start_job(&self, python: &Python, nodes: [usize; 3], plan: Plan) -> Job {
        let hosts = nodes.map(|node| (self.nodes[node].host().clone(), self.mount(node).join("job")));
        let places: Vec<_> = hosts.iter().map(|(host, place)| (host, place.as_path())).collect();
        Job::start(python, &places, plan)
    }

    /// Starts the same job without Tidemark, to run from start to end for comparison.
    pub(crate) fn unbroken(&self, python: &Python, nodes: [usize; 3], plan: Plan) -> Job {
        let plain = self.folder.path().join("plain");
        fs::create_dir(&plain).expect("the folder of a test");
        let hosts = nodes.map(|node| self.nodes[node].host().clone());
        let places: Vec<_> = hosts.iter().map(|host| (host, plain.as_path())).collect();
        let mut job = Job::start(python, &places, plan);
        job.finish();
        job
    }
}

pub(crate) fn noise(seed: u8, bytes: usize) -> Vec<u8> {
    let mut state = u64::from(seed) | 1;
    std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    })
    .take(bytes)
    .collect()
}

pub(crate) fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let name = |entry: std::io::Result<fs::DirEntry>| {
        entry.expect("an entry").file_name().into_string().expect("names of tests are UTF-8")
    };
    entries.map(name).collect()
}

//! Hosts in network namespaces, joined by a bridge: the cluster suite's substitute for several machines.
//!
//! ```text
//!   n1 eth0 ─ p1 ┐
//!   n2 eth0 ─ p2 ┼ br0      one namespace for each host, one for the bridge; 10.77.0.1, .2, …; no way out
//!   n3 eth0 ─ p3 ┘
//! ```
//!
//! | file | owns |
//! |---|---|
//! | `namespace` | a named network namespace, threads that enter it, the processes in it and their end |
//! | `leftover` | the names, and what a killed test left behind |
//! | `fault` | partitions, loss, narrow and dead links, each with its proof |
//! | `node` | a host with a real `ckptd` on it |
//!
//! Owns: the namespaces and everything that runs in them. Only the network is apart: all hosts see the same files, mounts
//! and processes, so a test reads a daemon's mount without entering anything. Does not own: how a cluster must react when
//! a link fails (the suite).
//!
//! No unsafe code is needed: a *thread* enters a namespace, and what it opens or starts stays there.

mod fault;
mod leftover;
mod namespace;
mod node;

use std::net::Ipv4Addr;
use std::process::{Child, Command, Output};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use std::{fmt, io};

pub use fault::{Fault, Limit, LinkDown};
use namespace::Namespace;
pub use node::Node;

use crate::{machine, process};

/// The most hosts of one network. Their addresses end in 1 to this; a suite needs six, and the bridge could do 1023.
pub const HOSTS_MAX: u8 = 32;
/// The interface of every host that leads to the bridge.
pub const INTERFACE: &str = "eth0";

/// Limit of `ip`, `nft` and `tc`, which answer in milliseconds. A busy two-core machine has plenty of time for it.
const TOOL_LIMIT: Duration = Duration::from_secs(30);

/// Several hosts and the bridge between them. Dropping the network kills all processes in it and removes every name.
#[derive(Debug)]
pub struct Network {
    bridge: Arc<Bridge>,
    hosts: Vec<Host>,
    serial: u64,
}

/// The switch, at which faults drop packets between hosts.
struct Bridge {
    namespace: Namespace,
    /// Number of the next fault's table.
    faults: AtomicU64,
}

/// A host: an address, and the processes that run there. Cheap to clone; a clone is the same host.
#[derive(Clone, Debug)]
pub struct Host(Arc<Place>);

struct Place {
    name: String,
    address: Ipv4Addr,
    /// The bridge's end of its cable.
    port: String,
    namespace: Namespace,
    bridge: Arc<Bridge>,
}

impl Network {
    /// Makes a network with a host for each name. If this machine cannot, returns `None` and leaves the test out.
    ///
    /// # Panics
    /// When a step fails although the machine has all that is needed. The message has the tool's own words.
    pub fn make(names: &[&str]) -> Option<Self> {
        if let Some(lacking) = lacking() {
            machine::left_out(&lacking);
            return None;
        }
        leftover::sweep();
        let serial = leftover::next_serial();
        let bridge = Bridge {
            namespace: Namespace::make(leftover::name(serial, "bridge")),
            faults: AtomicU64::new(0),
        };
        // From here on, dropping the network removes what was made, also if the next step panics.
        let mut network = Self { bridge: Arc::new(bridge), hosts: vec![], serial };
        // Without a spanning tree, a port forwards from its first packet on. Without snooping, no multicast queries are sent.
        network
            .bridge
            .namespace
            .ip("link add br0 type bridge stp_state 0 mcast_snooping 0\nlink set br0 up\nlink set lo up\n");
        for name in names {
            network.add_host(name);
        }
        Some(network)
    }

    /// Adds a host, as a fresh machine that was not there when the first hosts started.
    pub fn add_host(&mut self, name: &str) -> Host {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        assert!(
            !name.is_empty() && name.chars().all(plain) && name != "bridge",
            "`{name}` is no name of a host: a-z and 0-9, and not `bridge`"
        );
        assert!(self.hosts.iter().all(|host| host.name() != name), "a host is called {name} already");
        let number = u8::try_from(self.hosts.len() + 1).unwrap_or(u8::MAX);
        assert!(number <= HOSTS_MAX, "a network has at most {HOSTS_MAX} hosts, and this is number {number}");
        let address = Ipv4Addr::new(10, 77, 0, number);
        let port = format!("p{number}");
        let namespace = Namespace::make(leftover::name(self.serial, name));
        let cable = format!(
            "link add {port} type veth peer name {INTERFACE} netns {}\nlink set {port} master br0 up\n",
            namespace.name()
        );
        let host = Host(Arc::new(Place {
            name: name.into(),
            address,
            port,
            namespace,
            bridge: self.bridge.clone(),
        }));
        // The network owns the host before a further step may fail, so that it is removed with the network.
        self.hosts.push(host.clone());
        self.bridge.namespace.ip(&cable);
        host.0
            .namespace
            .ip(&format!("link set lo up\naddr add {address}/24 dev {INTERFACE}\nlink set {INTERFACE} up\n"));
        host
    }

    /// Returns the host of that name. Panics if there is none.
    pub fn host(&self, name: &str) -> &Host {
        let found = self.hosts.iter().find(|host| host.name() == name);
        found.unwrap_or_else(|| panic!("no host is called {name}: {:?}", self.hosts))
    }

    /// Returns all hosts, in the order in which they were added.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Returns the names of the network's namespaces as `ip netns` lists them; none after its removal.
    pub fn names(&self) -> Vec<String> {
        let namespaces = self.hosts.iter().map(|host| &host.0.namespace);
        namespaces.chain([&self.bridge.namespace]).map(|namespace| namespace.name().to_owned()).collect()
    }
}

impl Drop for Network {
    #[expect(clippy::print_stderr, reason = "a test that is failing already keeps its own message")]
    fn drop(&mut self) {
        let namespaces = self.hosts.iter().map(|host| &host.0.namespace).chain([&self.bridge.namespace]);
        // Every namespace is removed, even if the removal of another fails.
        let said: Vec<String> = namespaces.filter_map(|namespace| namespace.remove().err()).collect();
        if std::thread::panicking() {
            said.iter().for_each(|said| eprintln!("{said}"));
        } else {
            assert!(said.is_empty(), "{}", said.join("\n"));
        }
    }
}

impl Host {
    /// Returns the host's name in the network, which is not the name of its namespace.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the host's address, which only hosts of the same network reach.
    pub fn address(&self) -> Ipv4Addr {
        self.0.address
    }

    /// Runs `act` on a thread of this host: what it binds, connects or starts belongs to the host and stays there.
    ///
    /// Costs a thread. A panic of `act` goes on in the caller.
    pub fn inside<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        self.0.namespace.inside(act)
    }

    /// Starts a program on this host. The caller waits for it; [`Host::kill_all`] and the end of the network kill it.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        self.inside(|| command.spawn())
    }

    /// Runs a program on this host to its end, as [`process::run`].
    pub fn run(&self, command: &mut Command, limit: Duration) -> Output {
        self.inside(|| process::run(command, limit))
    }

    /// Returns the pids of the processes that run on this host. Processes that ended but were not reaped are left out.
    pub fn processes(&self) -> Vec<u32> {
        self.0.namespace.processes()
    }

    /// Kills everything on this host with SIGKILL at one moment, so that no process sees another die first and acts on it.
    ///
    /// The kernel closes the connections and so notifies the other ends. For a host that falls silent, call
    /// [`Host::isolate`] first. Returns the pids that were killed. No killed process still runs.
    ///
    /// # Panics
    /// When something still runs after a while.
    pub fn kill_all(&self) -> Vec<u32> {
        self.0.namespace.kill_all().unwrap_or_else(|said| panic!("{said}"))
    }
}

/// Returns why this machine cannot make such a network, or `None` if it can.
fn lacking() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("network namespaces need root".into());
    }
    let works =
        |name: &&str| Command::new(name).arg("-V").output().is_ok_and(|output| output.status.success());
    let missing: Vec<&str> = ["ip", "nft", "tc"].into_iter().filter(|name| !works(name)).collect();
    (!missing.is_empty()).then(|| {
        format!("no {}: run `cargo xtask test --only cluster`, or install them", missing.join(", no "))
    })
}

impl fmt::Debug for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.namespace.name())
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ({})", self.name, self.address, self.namespace.name())
    }
}

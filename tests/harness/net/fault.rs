//! Faults between hosts: packets that are dropped, links that are narrow or dead.
//!
//! Owns: each fault from its beginning to its end, and its proof, a count of dropped packets that the test checks. Does not
//! own: when a fault begins.
//!
//! A fault ends when its value is dropped, so that none outlives the part of a test that needs it. Packets are dropped in
//! the bridge, where each fault has an nft table of its own. Delays are missing, because the kernels that the suites run on
//! have no netem.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::Value;

use super::{Bridge, Host, INTERFACE};

/// Burst of a narrow link: 20 ms of its rate, but at least one packet of the size that the kernel builds before it
/// segments it for the wire.
const BURST_MS: u64 = 20;
const BURST_BYTES_MIN: u64 = 64 << 10;
/// How long a packet waits at a narrow link before it is dropped, as in the buffers of a switch.
const QUEUE_MS: u64 = 100;
/// Parts of the whole in which a loss is expressed.
const LOSS_PARTS: u32 = 10_000;

/// A fault that drops packets until this value is dropped.
#[derive(Debug)]
#[must_use = "the fault ends when this is dropped"]
pub struct Fault {
    bridge: Arc<Bridge>,
    table: String,
}

/// A limit of a link's bits per second, each way. Dropping the value ends the limit.
#[derive(Debug)]
#[must_use = "the limit ends when this is dropped"]
pub struct Limit {
    host: Host,
}

/// A pulled cable: the host sees that its interface has no carrier. Dropping the value puts the cable back.
#[derive(Debug)]
#[must_use = "the cable is put back when this is dropped"]
pub struct LinkDown {
    host: Host,
}

impl Host {
    /// Drops all packets between two hosts, in both directions. Each still reaches all other hosts.
    pub fn partition(&self, other: &Self) -> Fault {
        self.fault(&[from_to(self, other), from_to(other, self)])
    }

    /// Drops all packets from this host to the other. Packets from the other still arrive.
    pub fn mute_towards(&self, other: &Self) -> Fault {
        self.fault(&[from_to(self, other)])
    }

    /// Drops everything to and from this host, as when a machine loses its power: no host is notified.
    pub fn isolate(&self) -> Fault {
        let (port, address) = (&self.0.port, self.address());
        self.fault(&[
            format!("iifname {port} ip saddr {address} counter name dropped drop\niifname {port} drop"),
            format!("oifname {port} ip daddr {address} counter name dropped drop\noifname {port} drop"),
        ])
    }

    /// Drops this percentage of the packets to and from this host, each by chance.
    ///
    /// A packet of TCP is up to 64 KiB here, because it is dropped before the kernel cuts it for the wire.
    pub fn loss(&self, percent: f64) -> Fault {
        assert!((0.01..=100.0).contains(&percent), "{percent} % is no loss");
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
        let below = (percent * f64::from(LOSS_PARTS / 100)) as u32;
        let (port, address) = (&self.0.port, self.address());
        // At full loss the rule has no condition, because nft refuses a comparison that is always true.
        let chosen = if below < LOSS_PARTS {
            format!("numgen random mod {LOSS_PARTS} < {below}")
        } else {
            String::new()
        };
        let drop = format!("{chosen} counter name dropped drop");
        self.fault(&[
            format!("iifname {port} ip saddr {address} {drop}"),
            format!("oifname {port} ip daddr {address} {drop}"),
        ])
    }

    /// Limits the host's link to this many bits per second, each way. Panics below a megabit: TCP would have no room for two
    /// packets.
    pub fn bandwidth(&self, bits_per_s: u64) -> Limit {
        assert!(bits_per_s >= 1_000_000, "{bits_per_s} bit/s is less than a megabit per second");
        let burst_bytes = (bits_per_s / 8 * BURST_MS / 1000).max(BURST_BYTES_MIN);
        let rate = format!("{bits_per_s}bit");
        let (burst, latency) = (format!("{burst_bytes}b"), format!("{QUEUE_MS}ms"));
        let limit = Limit { host: self.clone() };
        limit.at_both_ends(|device| {
            [
                "qdisc", "replace", "dev", device, "root", "tbf", "rate", &rate, "burst", &burst, "latency",
                &latency,
            ]
            .map(str::to_owned)
            .to_vec()
        });
        limit
    }

    /// Pulls the cable out of the bridge.
    pub fn link_down(&self) -> LinkDown {
        self.0.bridge.namespace.ip(&format!("link set {} down\n", self.0.port));
        LinkDown { host: self.clone() }
    }

    /// Whether the host's interface sees a carrier.
    pub fn has_carrier(&self) -> bool {
        let shown = self.0.namespace.ask("ip", &["-j", "link", "show", "dev", INTERFACE]);
        json(&shown)[0]["operstate"] == "UP"
    }

    /// Adds a table of its own to the bridge, with these rules.
    fn fault(&self, rules: &[String]) -> Fault {
        let bridge = self.0.bridge.clone();
        let table = format!("fault{}", bridge.faults.fetch_add(1, Ordering::Relaxed));
        let rules = rules.join("\n");
        bridge.namespace.nft(&format!(
            "table bridge {table} {{\ncounter dropped {{ }}\nchain forward {{\n\
             type filter hook forward priority 0; policy accept;\n{rules}\n}}\n}}\n"
        ));
        Fault { bridge, table }
    }
}

/// Returns a rule that drops all packets from one host to another, and counts those addressed to it. The uncounted packets
/// are address queries, which the host must not answer either, and those that a learning bridge sends everywhere.
fn from_to(from: &Host, to: &Host) -> String {
    let ports = format!("iifname {} oifname {}", from.0.port, to.0.port);
    let addresses = format!("ip saddr {} ip daddr {}", from.address(), to.address());
    format!("{ports} {addresses} counter name dropped drop\n{ports} drop")
}

impl Fault {
    /// Returns the number of packets dropped so far, as proof that something was sent and did not arrive.
    pub fn dropped_packets(&self) -> u64 {
        let shown =
            self.bridge.namespace.ask("nft", &["-j", "list", "counter", "bridge", &self.table, "dropped"]);
        let counted = json(&shown)["nftables"]
            .as_array()
            .and_then(|list| list.iter().find_map(|entry| entry["counter"]["packets"].as_u64()));
        counted.unwrap_or_else(|| panic!("nft shows no counter of {}: {shown}", self.table))
    }

    /// Ends the fault, and returns the number of packets dropped until just before.
    pub fn heal(self) -> u64 {
        self.dropped_packets()
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        // If the network was dropped first, its tables are gone.
        if self.bridge.namespace.is_named() {
            self.bridge.namespace.nft(&format!("delete table bridge {}\n", self.table));
        }
    }
}

impl Limit {
    /// Returns how often a packet had to wait for the link or was dropped there, both ways, as proof that it was narrow.
    pub fn held_back(&self) -> u64 {
        let counted = |shown: String| {
            let of = |word: &str| json(&shown)[0][word].as_u64();
            of("overlimits").zip(of("drops")).map(|(held, dropped)| held + dropped)
        };
        let shown = self.at_both_ends(|device| {
            ["-s", "-j", "qdisc", "show", "dev", device, "root"].map(str::to_owned).to_vec()
        });
        shown.into_iter().map(|shown| counted(shown).expect("tc counts what it holds back")).sum()
    }

    /// Runs `tc` for the host's interface and for the bridge's port: each of them limits what leaves it.
    fn at_both_ends(&self, arguments: impl Fn(&str) -> Vec<String>) -> [String; 2] {
        let (host, port) = (&self.host.0, &self.host.0.port);
        [(&host.namespace, INTERFACE), (&host.bridge.namespace, port.as_str())].map(|(namespace, device)| {
            let arguments = arguments(device);
            namespace.ask("tc", &arguments.iter().map(String::as_str).collect::<Vec<_>>())
        })
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        if self.host.0.bridge.namespace.is_named() {
            self.at_both_ends(|device| ["qdisc", "del", "dev", device, "root"].map(str::to_owned).to_vec());
        }
    }
}

impl Drop for LinkDown {
    fn drop(&mut self) {
        if self.host.0.bridge.namespace.is_named() {
            self.host.0.bridge.namespace.ip(&format!("link set {} up\n", self.host.0.port));
        }
    }
}

fn json(shown: &str) -> Value {
    serde_json::from_str(shown).unwrap_or_else(|error| panic!("{error} in {shown}"))
}

//! The links between nodes: what a machine between them sees of a save and can change in it, and what strangers cost.
//!
//! Owns: a capture of a host's packets, relays in front of the daemons, connections that say nothing. Does not own: a single link
//! without a daemon (transport's own tests).

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size_force, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, eth, recv, socket_with};
use tidemark_tests::daemon::Daemon;
use tidemark_tests::net::Host;
use tidemark_tests::process;

use crate::copies::in_memory;
use crate::site::{Cluster, LIMIT, MIB, noise};

const OPEN: &str = "[links]\nencrypt_bulk = false\n";
const WORD: &[u8] = b"what nobody on the way should read";

/// A capture of a host's packets.
struct Capture {
    stop: Arc<AtomicBool>,
    reader: thread::JoinHandle<(u64, bool)>,
}

impl Capture {
    /// Begins to read every packet that the host sends or receives.
    fn begin(host: &Host) -> Self {
        let packets: OwnedFd = host.inside(|| {
            socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, Some(eth::ALL))
                .expect("root may look at packets")
        });
        set_socket_recv_buffer_size_force(&packets, 64 * MIB).expect("root may have so much");
        let look = Some(Duration::from_millis(50));
        set_socket_timeout(&packets, Timeout::Recv, look).expect("a time limit");
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let reader = thread::spawn(move || {
            let (mut buffer, mut seen_bytes, mut seen) = (vec![0; 256 << 10], 0, false);
            loop {
                match recv(&packets, &mut buffer[..], RecvFlags::empty()) {
                    Ok((length, _)) => {
                        seen_bytes += length as u64;
                        seen = seen || buffer[..length].windows(WORD.len()).any(|found| found == WORD);
                    }
                    // After `end`, a pause in the packets means that all were read.
                    Err(_) if told.load(Ordering::SeqCst) => return (seen_bytes, seen),
                    Err(_) => {}
                }
            }
        });
        Self { stop, reader }
    }

    /// Ends the capture. Returns how many bytes passed, and whether the word was among them.
    fn end(self) -> (u64, bool) {
        self.stop.store(true, Ordering::SeqCst);
        self.reader.join().expect("the reader does not panic")
    }
}

/// Goal: a save's bytes cannot be read between nodes, unless the operator switches encryption off. Method: a packet socket in the
/// namespace of a copy's home, and a word in each page of a file. Without encryption, the same capture shows the word.
#[test]
fn a_capture_of_a_save_does_not_hold_its_words_unless_the_operator_allows_it() {
    for (config, is_readable) in [(OPEN, true), ("", false)] {
        let Some(cluster) = Cluster::start_with(config, None) else { return };
        let capture = Capture::begin(cluster.nodes[0].host());
        let mut bytes = noise(3, 12 * MIB);
        bytes.chunks_mut(4096).for_each(|page| page[..WORD.len()].copy_from_slice(WORD));
        fs::write(cluster.mount(0).join("step_1.pt"), &bytes).unwrap();
        cluster.wait_for(0, "step_1.pt", &["replicated", "committed"]);
        process::until(LIMIT, || (copied(&cluster, 0) >= 1.0).then_some(())).expect("its copy is there");
        let (seen_bytes, seen) = capture.end();
        assert!(seen_bytes > bytes.len() as u64 / 2, "{seen_bytes} bytes were captured of a copy");
        assert_eq!(seen, is_readable, "{config:?}");
    }
}

/// Offset in a connection at which a relay changes bytes: in the fifth piece of a transfer.
const CHANGED_AT: usize = (9 << 20) / 2;

/// Returns a pattern that does not change a message's CRC-64/NVME when added to it: the polynomial itself, in the order of
/// the checksum's bits.
fn unseen() -> [u8; 9] {
    const POLYNOMIAL: u64 = 0xad93_d235_94c9_3659;
    let mut pattern = [0; 9];
    pattern[0] = 1;
    for bit in 0..64 {
        if POLYNOMIAL >> (63 - bit) & 1 == 1 {
            pattern[(bit + 1) / 8] |= 1 << ((bit + 1) % 8);
        }
    }
    pattern
}

/// A relay between a node and all other nodes, which changes bytes once when a test arms it.
#[derive(Debug)]
pub(crate) struct Relay {
    listener: TcpListener,
    host: Host,
    changes: Arc<Changes>,
}

/// State shared by all relays of a test, so that only one connection is changed.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    armed: AtomicBool,
    made: AtomicUsize,
}

impl Changes {
    fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }
}

impl Relay {
    pub(crate) fn on(host: &Host, changes: &Arc<Changes>) -> Self {
        let listener = host.inside(|| TcpListener::bind((host.address(), 0))).expect("a port");
        Self { listener, host: host.clone(), changes: Arc::clone(changes) }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.local_addr().expect("its address")
    }

    /// Relays present and future connections to `to` until the process ends.
    pub(crate) fn serve(self, to: SocketAddr) {
        thread::spawn(move || {
            while let Ok((inward, _)) = self.listener.accept() {
                // If the node is lost, its relay does not reach it either.
                let Ok(outward) = self.host.inside(|| TcpStream::connect(to)) else { continue };
                for (from, into) in [(&inward, &outward), (&outward, &inward)] {
                    let clone = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
                    let (from, into, changes) = (clone(from), clone(into), Arc::clone(&self.changes));
                    thread::spawn(move || carry(from, into, &changes));
                }
            }
        });
    }
}

fn carry(mut from: TcpStream, mut into: TcpStream, changes: &Changes) {
    let (mut buffer, mut passed, mut changed) = (vec![0; 64 << 10], 0, None);
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        let bytes = &mut buffer[..read];
        if passed <= CHANGED_AT && passed + read > CHANGED_AT && changes.armed.swap(false, Ordering::SeqCst) {
            changes.made.fetch_add(1, Ordering::SeqCst);
            changed = Some(CHANGED_AT);
        }
        if let Some(start) = changed {
            for (at, other) in (start..).zip(unseen()) {
                if let Some(byte) = at.checked_sub(passed).and_then(|at| bytes.get_mut(at)) {
                    *byte ^= other;
                }
            }
        }
        passed += read;
        if into.write_all(bytes).is_err() {
            break;
        }
    }
    // Both threads of a connection end with either of its ends.
    let _ = from.shutdown(Shutdown::Both);
    let _ = into.shutdown(Shutdown::Both);
}

/// Goal: a machine between nodes cannot put other bytes into a copy or a restore, even bytes with the same CRC. Method: one of the relays
/// in front of the daemons changes the bytes of one connection of a push, then of a pull.
#[test]
fn bytes_that_are_changed_on_the_way_are_refused_and_come_again() {
    let zeros = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &[0; 9]);
    assert_eq!(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &unseen()), zeros);
    for config in ["", OPEN] {
        let changes = Arc::new(Changes::default());
        let Some(cluster) = Cluster::start_with(config, Some(&changes)) else { return };
        let bytes = noise(5, 24 * MIB);
        changes.arm();
        fs::write(cluster.mount(0).join("step_1.pt"), &bytes).unwrap();
        cluster.wait_for(0, "step_1.pt", &["replicated", "committed"]);
        let made = || changes.made.load(Ordering::SeqCst);
        process::until(LIMIT, || (made() == 1).then_some(())).expect("a relay changed bytes of a copy");
        let pids = [1, 2].map(|node| cluster.nodes[node].daemon().serving_pid().unwrap());
        let holders = || pids.map(|pid| !in_memory(pid, &bytes).is_empty());
        let has_copy = || holders().contains(&true).then_some(());
        process::until(LIMIT, has_copy)
            .unwrap_or_else(|| panic!("no partner has the bytes\n{}", logs(&cluster)));
        assert!(logs(&cluster).contains("a connection was ended: what came is not what a peer says"));

        let without = 1 + holders().iter().position(|has| !has).expect("one partner has it");
        changes.arm();
        assert!(
            fs::read(cluster.mount(without).join("step_1.pt")).unwrap() == bytes,
            "what another node reads"
        );
        assert_eq!(made(), 2, "a relay changed bytes of a restore");
    }
}

/// Returns how many files of a node have a copy.
fn copied(cluster: &Cluster, node: usize) -> f64 {
    cluster.nodes[node].daemon().metric("tidemark_replica_acknowledged_files_total", &[])
}

fn logs(cluster: &Cluster) -> String {
    cluster.nodes.iter().map(|node| node.daemon().log()).collect()
}

/// Connections from one host to a daemon that say nothing. A connection that is closed is opened again.
struct Silence {
    stop: Arc<AtomicBool>,
    opened: Arc<AtomicU64>,
    open: Arc<Mutex<Vec<TcpStream>>>,
    keeper: Option<thread::JoinHandle<()>>,
}

/// Number of such connections, more than a daemon accepts from peers that have proven nothing.
const SILENT: usize = 300;

impl Silence {
    fn begin(host: &Host, to: SocketAddr) -> Self {
        let (stop, opened, open) =
            (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
        let (host, told, count, kept) =
            (host.clone(), Arc::clone(&stop), Arc::clone(&opened), Arc::clone(&open));
        let keep = move || {
            while !told.load(Ordering::SeqCst) {
                let mut kept = kept.lock().expect("no panic");
                kept.retain_mut(|stream: &mut TcpStream| {
                    matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
                });
                while kept.len() < SILENT {
                    let Ok(stream) = TcpStream::connect_timeout(&to, LIMIT) else { break };
                    stream.set_nonblocking(true).expect("a socket");
                    kept.push(stream);
                    count.fetch_add(1, Ordering::SeqCst);
                }
                drop(kept);
                thread::sleep(Duration::from_millis(20));
            }
        };
        let keeper = Some(thread::spawn(move || host.inside(keep)));
        Self { stop, opened, open, keeper }
    }

    fn opened(&self) -> u64 {
        self.opened.load(Ordering::SeqCst)
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(self.keeper.take().map(thread::JoinHandle::join));
        self.open.lock().expect("no panic").clear();
    }
}

/// Goal: a peer that cannot prove to be a node takes nothing that a node needs. Method: a host beside the nodes opens 300 connections
/// that say nothing, before the first copy to a daemon, which needs new connections. The same copy between two other nodes is the measure.
#[test]
fn silent_strangers_do_not_slow_a_copy() {
    let Some(mut cluster) = Cluster::start_with("", None) else { return };
    let stranger = cluster.network.add_host("n4");
    let partner_of = |node: usize| {
        let placed = cluster.nodes[0].daemon().ctl_json(&["placement"]);
        let name = format!("n{}", node + 1);
        let row = placed["nodes"].as_array()?.iter().find(|row| row["node"] == *name)?.clone();
        let partner = row["partner"].as_str()?.strip_prefix('n')?.parse::<usize>().ok()?;
        Some(partner - 1)
    };
    let save = |node: usize| {
        process::until(LIMIT, || partner_of(node)).expect("it has a partner");
        let daemon: &Daemon = cluster.nodes[node].daemon();
        let (before, began) = (copied(&cluster, node), Instant::now());
        fs::write(cluster.mount(node).join(format!("step_{node}.pt")), noise(7, 16 * MIB)).unwrap();
        let done = || (copied(&cluster, node) > before).then_some(());
        process::until(LIMIT, done).unwrap_or_else(|| panic!("no copy\n{}", daemon.log_tail()));
        began.elapsed()
    };
    let calm = save(1);
    let to = process::until(LIMIT, || partner_of(0)).expect("it has a partner");
    let listens = cluster.nodes[to].daemon().ready().listen.parse().unwrap();
    let silence = Silence::begin(&stranger, listens);
    process::until(LIMIT, || (silence.opened() >= SILENT as u64).then_some(())).expect("they are there");
    let beside = save(0);
    assert!(beside < 3 * calm + Duration::from_secs(2), "{beside:?} beside strangers, {calm:?} without");
    let warned =
        || cluster.nodes[to].daemon().log().contains("that had proven nothing were closed").then_some(());
    process::until(LIMIT, warned).expect("the operator is told");
}

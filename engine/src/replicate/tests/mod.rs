//! Goal: copies are byte for byte what was sealed, outlive their holder's daemon, and count no longer than they exist. Method: nodes with
//! a Tier-1 and a namespace each, joined by links inside this process, with the faults that a test names.

mod pace;

use super::*;
use crate::chunk::bytes::write_all;
use crate::metrics::Metrics;
use crate::restore::coming::Coming;
use crate::restore::peer::{PeerError, PeerPlan, Suppliers, fetch_from_peers};
use ::bytes::Bytes;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tidemark_namespace::{
    Caller, FileState, Namespace, NamespaceSettings, NodeId, ObjectCopy, OpenFile, OpenOutcome, ROOT,
    ReclaimClass,
};
use tidemark_protocol::id::{FileId, Incarnation, SealNumber};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::replication::{Holder, Priority};
use tidemark_tier1::{Backing, MediumChoice, Tier1, Tier1Settings};
use tidemark_transport::faulty::{Fault, Operation, What, When};
use tidemark_transport::{Address, Faulty, Identity, Link, Network, Peer, Refusal, Service};
use tokio::sync::watch;
use tokio::task::JoinHandle;

const CHUNK: usize = 8 << 20;
const O_RDWR: i32 = 2;
const O_TRUNC: i32 = 0o1000;
const PATIENCE: Duration = Duration::from_secs(40);

struct Answers(Arc<Receiver>);

#[async_trait::async_trait]
impl Service for Answers {
    async fn call(&self, from: Peer, body: Bytes) -> Result<Bytes, Refusal> {
        self.0.answer(&from, body).await
    }
    fn tell(&self, _: Peer, _: Bytes) {}
    fn epoch(&self) -> u64 {
        0
    }
    fn saw_epoch(&self, _: &Peer, _: u64) {}
    fn connected(&self, _: &Peer) {}
    fn disconnected(&self, _: &Peer) {}
}

/// A node without the rest of a daemon.
struct Node {
    name: String,
    namespace: Arc<Namespace>,
    tier1: Arc<Tier1>,
    metrics: Arc<Metrics>,
    receiver: Arc<Receiver>,
    coming: Arc<Coming>,
    link: Arc<Faulty>,
    _folder: Arc<tempfile::TempDir>,
}

fn incarnation(name: &str) -> Incarnation {
    Incarnation(u64::from(name.as_bytes()[0]))
}

fn settings(name: &str) -> NamespaceSettings {
    NamespaceSettings { journal_bytes: Some(512 << 10), ..NamespaceSettings::new(incarnation(name)) }
}

impl Node {
    fn new(network: &Arc<Network>, name: &str, size_bytes: u64) -> Self {
        let folder = tempfile::Builder::new().prefix("tidemark-replicate-").tempdir_in("/dev/shm").unwrap();
        let medium = MediumChoice::Directory(folder.path().to_path_buf());
        let tier1 = Tier1::open(Tier1Settings { size_bytes, ballast: false, medium }).unwrap();
        let namespace = Namespace::new(settings(name), Arc::clone(&tier1)).unwrap();
        Self::with(network, name, namespace, tier1, Arc::new(folder))
    }

    fn with(
        network: &Arc<Network>,
        name: &str,
        namespace: Arc<Namespace>,
        tier1: Arc<Tier1>,
        folder: Arc<tempfile::TempDir>,
    ) -> Self {
        let (metrics, coming): (_, Arc<Coming>) = (Arc::new(Metrics::new()), Arc::default());
        let receiver = Receiver::new(ReceiverParts {
            namespace: Arc::clone(&namespace),
            tier1: Arc::clone(&tier1),
            metrics: Arc::clone(&metrics),
            holder: Holder(incarnation(name)),
            coming: Arc::clone(&coming),
            verify_threads: 1,
        });
        let identity = Identity {
            cluster: "c".to_owned(),
            node: name.to_owned(),
            incarnation: incarnation(name).0,
            start: 1,
        };
        let loopback = network.join(name, identity, Arc::new(Answers(Arc::clone(&receiver))));
        let link = Arc::new(Faulty::new(Arc::new(loopback), Vec::new()));
        receiver.use_link(Arc::clone(&link) as _);
        Self { name: name.to_owned(), namespace, tier1, metrics, receiver, coming, link, _folder: folder }
    }

    /// Replaces the daemon by another, which goes on with its memory and journal.
    fn restarted(self, network: &Arc<Network>) -> Self {
        let backings: BTreeMap<u64, Arc<Backing>> = (ROOT..1000)
            .filter_map(|node| self.namespace.nodes().present(node))
            .map(|p| (p.backing.number(), p.backing))
            .collect();
        let Self { name, tier1, _folder, namespace, .. } = self;
        drop(namespace);
        let namespace = Namespace::recover(settings(&name), Arc::clone(&tier1), false, &mut |number| {
            backings.get(&number).cloned()
        });
        Self::with(network, &name, namespace.unwrap(), tier1, _folder)
    }

    fn address(&self) -> Address {
        Address { node: self.name.clone(), address: self.name.clone() }
    }

    fn create(&self, name: &str) -> OpenFile {
        self.namespace.create(&caller(), ROOT, name.as_bytes(), 0o640, O_RDWR).unwrap().1
    }

    fn close(&self, open: &OpenFile) {
        self.namespace.handles().flush(open.fh, &caller(), false).unwrap();
        self.namespace.handles().release(open.fh).unwrap();
    }

    /// Seals a closed file as the node loop does.
    fn seal(&self, node: NodeId) -> (FileId, SealNumber) {
        let ticket = self.namespace.seals().begin_seal(node).unwrap();
        let sums = crate::chunk::hash(&ticket.backing.map().unwrap(), 1);
        self.namespace.seals().finish_seal(&ticket, sums.crc, sums.chunks).unwrap();
        (ticket.file, ticket.seal)
    }

    fn save(&self, name: &str, bytes: &[u8]) -> (NodeId, FileId, SealNumber) {
        let open = self.create(name);
        write_all(&open.backing, bytes).unwrap();
        self.close(&open);
        let (file, seal) = self.seal(open.node);
        (open.node, file, seal)
    }

    fn replicator(&self, partners: Vec<Address>) -> Running {
        let (to, partners) = watch::channel(partners);
        let parts = ReplicatorParts {
            namespace: Arc::clone(&self.namespace),
            link: Arc::clone(&self.link) as _,
            metrics: Arc::clone(&self.metrics),
            home: self.name.clone(),
            partners,
            facts: Arc::new(|view| view.paths[0].to_ascii_uppercase()),
            streams: true,
            paced: true,
        };
        let (replicator, task) = Replicator::start(parts, incarnation(&self.name));
        let told = Arc::clone(&replicator);
        self.receiver.tell_withdrawn_by(Box::new(move |node, file, seal, why| {
            told.withdrawn_by(node, file, seal, why)
        }));
        Running { replicator, task, partners: to }
    }

    fn copy_bytes(&self, file: FileId, seal: SealNumber) -> Vec<u8> {
        let pin = self.namespace.peer_copies().pin_copy(file, seal).unwrap();
        pin.backing.map().unwrap().to_vec()
    }
}

struct Running {
    replicator: Arc<Replicator>,
    task: JoinHandle<()>,
    partners: watch::Sender<Vec<Address>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Running {
    async fn acknowledged(&self, file: FileId, seal: SealNumber, holders: usize) {
        let mut changes = self.replicator.changes();
        let all = async {
            while self.replicator.holders(file, seal).len() != holders {
                changes.changed().await.unwrap();
            }
        };
        let behind = || self.replicator.behind();
        assert!(tokio::time::timeout(PATIENCE, all).await.is_ok(), "not {holders} copies: {:?}", behind());
    }
}

fn caller() -> Caller {
    Caller { uid: 7, gid: 8, pid: 0, now_ns: 5, request: 0 }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

fn fault(on: Operation, when: When, what: What) -> Fault {
    Fault { with: None, on, when, what }
}

fn damage(node: &Node, id: NodeId, offset: u64) {
    let path = node.namespace.nodes().host_path(id).unwrap();
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let all = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, all).await.is_ok(), "{what}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_is_sent_while_it_grows_and_what_changed_since_is_sent_again() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 96 << 20));
    let running = home.replicator(vec![partner.address()]);
    let mut bytes = noise(3 * CHUNK + 1234, 1);
    let open = home.create("step1.pt");
    running.replicator.look_at_node(open.node, Priority::Base);
    for (at, chunk) in bytes.chunks(1 << 20).enumerate() {
        assert_eq!(open.backing.write_at(chunk, (at << 20) as u64).unwrap(), chunk.len());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    until("three chunks are sent before the close", || {
        home.metrics.replica_sent_bytes.get() == 3 * CHUNK_BYTES
    })
    .await;
    // A program writes its header last.
    bytes[5] ^= 1;
    open.backing.write_at(&bytes[..10], 0).unwrap();
    home.close(&open);
    let (file, seal) = home.seal(open.node);
    running.replicator.look_at_node(open.node, Priority::Base);
    running.acknowledged(file, seal, 1).await;
    assert_eq!(running.replicator.holders(file, seal), ["b"]);
    assert_eq!(
        home.metrics.replica_sent_bytes.get(),
        4 * CHUNK_BYTES + 1234,
        "the changed chunk and the end"
    );
    assert!(partner.copy_bytes(file, seal) == bytes);
    let copy = partner.namespace.peer_copies().copy(file, seal).unwrap();
    assert_eq!((copy.meta.home.as_str(), copy.meta.path.as_slice()), ("a", &b"step1.pt"[..]));
    assert_eq!((copy.meta.uid, copy.meta.gid, copy.meta.mode), (7, 8, 0o640));
    assert_eq!(copy.meta.facts, b"STEP1.PT");
    assert_eq!(partner.namespace.peer_copies().copies_usage().files, 1);
    assert!(partner.namespace.peer_copies().copies_usage().bytes >= bytes.len() as u64);
    assert!(partner.namespace.nodes().views_below(b"").is_empty(), "nobody sees it in the tree");
    let counts =
        (partner.metrics.replica_received_bytes.get(), home.metrics.replica_acknowledged_files.get());
    assert_eq!(counts, (bytes.len() as u64, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_and_empty_files_are_one_message_each_and_keep_their_attributes() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 64 << 20), Node::new(&network, "b", 64 << 20));
    let running = home.replicator(vec![partner.address()]);
    for (name, len) in [("empty", 0), ("tracker", 20), ("most", 256 << 10)] {
        let bytes = noise(len, 2);
        let (node, file, seal) = home.save(name, &bytes);
        home.namespace.xattrs().setxattr(node, b"user.who", b"me", 0, &caller()).unwrap();
        running.replicator.look_at_node(node, Priority::Base);
        running.acknowledged(file, seal, 1).await;
        assert!(partner.copy_bytes(file, seal) == bytes);
        let meta = partner.namespace.peer_copies().copy(file, seal).unwrap().meta;
        assert_eq!(meta.xattrs, [(b"user.who".to_vec(), b"me".to_vec())]);
    }
    assert_eq!(home.metrics.replica_sent_bytes.get(), 20 + (256 << 10));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_acknowledgement_and_a_cut_do_not_send_the_file_again() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 96 << 20));
    // Begin, push, keep: the answer to the third call is the acknowledgement.
    home.link.set(vec![
        fault(Operation::Push, When::Nth(1), What::CutAfter { bytes: CHUNK_BYTES + (3 << 20) }),
        fault(Operation::Call, When::Nth(3), What::LoseAnswer),
    ]);
    let bytes = noise(2 * CHUNK + 99, 3);
    let (node, file, seal) = home.save("step1.pt", &bytes);
    let running = home.replicator(vec![partner.address()]);
    running.replicator.look_at_node(node, Priority::Base);
    until("it is told why it waits", || {
        running.replicator.behind().iter().any(|behind| behind.why.is_some())
    })
    .await;
    running.acknowledged(file, seal, 1).await;
    assert!(partner.copy_bytes(file, seal) == bytes);
    let sent = home.metrics.replica_sent_bytes.get();
    // The first push counts whole; after the cut only chunks that had not landed whole go again.
    assert_eq!(sent, bytes.len() as u64 + CHUNK_BYTES + 99, "sent {sent}");
    until("nothing is behind", || running.replicator.behind().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_arrive_as_others_are_not_acknowledged_before_they_are_right() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 96 << 20));
    home.link.set(vec![fault(
        Operation::Push,
        When::Nth(1),
        What::Flip { offset: CHUNK_BYTES + 7, mask: 4 },
    )]);
    let bytes = noise(2 * CHUNK + 99, 4);
    let (node, file, seal) = home.save("step1.pt", &bytes);
    let running = home.replicator(vec![partner.address()]);
    running.replicator.look_at_node(node, Priority::Base);
    running.acknowledged(file, seal, 1).await;
    assert!(partner.copy_bytes(file, seal) == bytes);
    assert_eq!(home.metrics.replica_sent_bytes.get(), bytes.len() as u64 + CHUNK_BYTES);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partner_without_room_is_waited_for_and_named() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 40 << 20));
    let (full, ..) = partner.save("own.pt", &noise(3 * CHUNK, 5));
    let bytes = noise(2 * CHUNK, 6);
    let (node, file, seal) = home.save("step1.pt", &bytes);
    let running = home.replicator(vec![partner.address()]);
    running.replicator.look_at_node(node, Priority::Base);
    let no_room = |why: &str| why.contains("its memory has no room");
    until("it says why", || {
        running.replicator.behind().iter().any(|b| b.why.as_deref().is_some_and(no_room))
    })
    .await;
    assert!(partner.namespace.nodes().view(full).unwrap().host, "what is only there does not give way");
    partner.namespace.names().unlink(&caller(), ROOT, b"own.pt").unwrap();
    partner.namespace.forget(full, 1);
    running.acknowledged(file, seal, 1).await;
    assert!(partner.copy_bytes(file, seal) == bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_outlive_their_holders_daemon_and_are_looked_at_before_they_are_counted_on() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 96 << 20));
    let running = home.replicator(vec![partner.address()]);
    let mut files = Vec::new();
    for (name, seed) in [("good.pt", 7), ("bad.pt", 8)] {
        let bytes = noise(CHUNK + 5, seed);
        let (node, file, seal) = home.save(name, &bytes);
        running.replicator.look_at_node(node, Priority::Base);
        running.acknowledged(file, seal, 1).await;
        files.push((node, file, seal, bytes));
    }
    let before = partner.namespace.peer_copies().all();
    let partner = partner.restarted(&network);
    let mut after = partner.namespace.peer_copies().all();
    assert!(after.iter().all(|copy| copy.unverified));
    after.iter_mut().for_each(|copy| copy.unverified = false);
    assert_eq!(after, before);
    damage(&partner, partner.namespace.peer_copies().copy_of(files[1].1, files[1].2).unwrap(), 3);
    // Another daemon of the home asks for the copies: no good copy is sent again.
    drop(running);
    let sent = home.metrics.replica_sent_bytes.get();
    let home = home.restarted(&network);
    let running = home.replicator(vec![partner.address()]);
    for (node, file, seal, bytes) in &files {
        running.replicator.look_at_node(*node, Priority::Base);
        running.acknowledged(*file, *seal, 1).await;
        assert!(partner.copy_bytes(*file, *seal) == *bytes);
    }
    assert_eq!(sent, 2 * (CHUNK_BYTES + 5));
    assert_eq!(home.metrics.replica_sent_bytes.get(), CHUNK_BYTES + 5, "the bad one only");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partner_that_has_the_same_bytes_keeps_them_and_is_sent_nothing() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 96 << 20));
    let bytes = noise(2 * CHUNK + 1, 9);
    let (node, file, seal) = home.save("rank0.pt", &bytes);
    let (twin, ..) = partner.save("rank1.pt", &bytes);
    let used = partner.tier1.usage().files_bytes;
    let running = home.replicator(vec![partner.address()]);
    running.replicator.look_at_node(node, Priority::Base);
    running.acknowledged(file, seal, 1).await;
    assert_eq!(home.metrics.replica_sent_bytes.get(), 0);
    assert_eq!(partner.metrics.replica_spared_bytes.get(), bytes.len() as u64);
    assert_eq!(partner.tier1.usage().files_bytes, used, "nothing is held twice");
    let usage = partner.namespace.peer_copies().copies_usage();
    assert!(usage.bytes == 0 && usage.shared_bytes >= bytes.len() as u64, "{usage:?}");
    // A program that writes the twin writes bytes of its own, also after a restart.
    let partner = partner.restarted(&network);
    partner.namespace.seals().verified(partner.namespace.nodes().view(twin).unwrap().file, SealNumber(1));
    let OpenOutcome::Ready(open) = partner.namespace.open(&caller(), twin, O_RDWR).unwrap() else {
        panic!("cold")
    };
    open.backing.write_at(b"others", 0).unwrap();
    partner.close(&open);
    assert!(partner.copy_bytes(file, seal) == bytes, "the copy changed with the file that it was taken from");
    let OpenOutcome::Ready(open) = partner.namespace.open(&caller(), twin, O_RDWR | O_TRUNC).unwrap() else {
        panic!()
    };
    partner.close(&open);
    assert!(partner.copy_bytes(file, seal) == bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_its_holder_gave_up_is_withdrawn_and_made_again() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 96 << 20));
    let running = home.replicator(vec![partner.address()]);
    let bytes = noise(CHUNK + 1, 10);
    let (node, file, seal) = home.save("step1.pt", &bytes);
    running.replicator.look_at_node(node, Priority::Base);
    running.acknowledged(file, seal, 1).await;
    let holder = &partner.namespace;
    holder.room().make_room(1 << 30);
    assert!(holder.peer_copies().copy_of(file, seal).is_some(), "no object is noted of it");
    let object = || ObjectCopy { key: "k".to_owned(), size_bytes: bytes.len() as u64, encoding: None };
    assert!(holder.peer_copies().note_copy_object(file, seal, object()));
    holder.room().make_room(1 << 30);
    assert!(holder.peer_copies().copy_of(file, seal).is_some(), "its class says never");
    holder.peer_copies().set_copy_reclaim(file, seal, ReclaimClass::BelowWatermark);
    assert_eq!(holder.room().make_room(1 << 30), bytes.len() as u64);
    assert!(holder.peer_copies().copy_of(file, seal).is_none() && holder.peer_copies().all().is_empty());
    assert_eq!(running.replicator.holders(file, seal), ["b"], "nobody has been told yet");
    // At first the home's address is unknown.
    partner.receiver.tell_withdrawn(|_| None).await;
    let (to, name) = (home.address(), home.name.clone());
    partner.receiver.tell_withdrawn(|node| (node == name).then(|| to.clone())).await;
    until("the withdrawal counts", || home.metrics.replica_withdrawn_files.get() == 1).await;
    running.acknowledged(file, seal, 1).await;
    assert!(partner.copy_bytes(file, seal) == bytes);

    // If the home knows, too, that Tier-3 has the bytes, a new copy would only take another copy's place.
    assert!(
        home.namespace.hosts().note_object(file, seal, object())
            && holder.peer_copies().note_copy_object(file, seal, object())
    );
    holder.peer_copies().set_copy_reclaim(file, seal, ReclaimClass::BelowWatermark);
    assert_eq!(holder.room().make_room(1 << 30), bytes.len() as u64);
    partner.receiver.tell_withdrawn(|_| Some(to.clone())).await;
    until("the withdrawal counts", || home.metrics.replica_withdrawn_files.get() == 2).await;
    for _ in 0..10 {
        running.replicator.look_at_node(node, Priority::Base);
        until("it was looked at", || running.replicator.board_is_read()).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(holder.peer_copies().all().is_empty() && running.replicator.behind().is_empty());
    home.namespace.hosts().forget_object(file, seal);
    running.replicator.look_at_node(node, Priority::Base);
    running.acknowledged(file, seal, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partners_change_and_copies_of_a_lost_memory_are_not_believed_in() {
    let network = Network::new();
    let (home, b, c) = (
        Node::new(&network, "a", 96 << 20),
        Node::new(&network, "b", 96 << 20),
        Node::new(&network, "c", 96 << 20),
    );
    let running = home.replicator(vec![b.address()]);
    let bytes = noise(CHUNK + 1, 11);
    let (node, file, seal) = home.save("step1.pt", &bytes);
    running.replicator.look_at_node(node, Priority::Base);
    running.acknowledged(file, seal, 1).await;
    running.partners.send_replace(vec![c.address()]);
    running.acknowledged(file, seal, 2).await;
    assert!(c.copy_bytes(file, seal) == bytes);
    running.replicator.saw_life("b", Incarnation(4711));
    running.acknowledged(file, seal, 1).await;
    assert_eq!(running.replicator.holders(file, seal), ["c"]);
    running.replicator.release(file, seal);
    until("the holder hears that it is not wanted", || c.namespace.peer_copies().all().is_empty()).await;
    assert!(running.replicator.holders(file, seal).is_empty());
    assert_eq!(b.namespace.peer_copies().all().len(), 1, "it is no partner, and was not asked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_earlier_seal_s_copy_is_given_up_once_there_is_one_of_the_next() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 96 << 20));
    let running = home.replicator(vec![partner.address()]);
    let (first, second) = (noise(CHUNK + 1, 12), noise(CHUNK - 9, 13));
    let (node, file, seal) = home.save("latest.pt", &first);
    running.replicator.look_at_node(node, Priority::Base);
    running.acknowledged(file, seal, 1).await;
    assert!(partner.copy_bytes(file, seal) == first);
    let OpenOutcome::Ready(open) = home.namespace.open(&caller(), node, O_RDWR | O_TRUNC).unwrap() else {
        panic!()
    };
    write_all(&open.backing, &second).unwrap();
    home.close(&open);
    let (again, next) = home.seal(node);
    assert_eq!((again, next), (file, SealNumber(2)));
    running.replicator.look_at_node(node, Priority::Base);
    running.acknowledged(file, next, 1).await;
    assert!(partner.copy_bytes(file, next) == second);
    until("the earlier one is given up", || partner.namespace.peer_copies().copy_of(file, seal).is_none())
        .await;
    // The last copy goes with the file.
    home.namespace.names().unlink(&caller(), ROOT, b"latest.pt").unwrap();
    running.replicator.look_at_node(node, Priority::Base);
    until("nothing is left of it", || partner.namespace.peer_copies().copy_of(file, next).is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_says_nonsense_is_refused_and_only_a_home_drops_its_copies() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 96 << 20));
    let running = home.replicator(vec![partner.address()]);
    let (node, file, seal) = home.save("step1.pt", &noise(1000, 14));
    running.replicator.look_at_node(node, Priority::Base);
    running.acknowledged(file, seal, 1).await;
    let stranger = Node::new(&network, "c", 64 << 20);
    for garbage in [&b""[..], b"\xff\xff\xff\xff", &[2; 100]] {
        let answer = stranger.link.call(&partner.address(), Bytes::copy_from_slice(garbage), PATIENCE).await;
        assert!(answer.unwrap_err().to_string().contains("replication"), "{garbage:?}");
    }
    let drop_it =
        tidemark_protocol::replication::encode(&tidemark_protocol::replication::Request::Drop { file, seal });
    stranger.link.call(&partner.address(), drop_it.unwrap().into(), PATIENCE).await.unwrap();
    assert!(partner.namespace.peer_copies().copy_of(file, seal).is_some());
}

/// The nodes that a test asks, and those found bad.
#[derive(Debug)]
struct Ask {
    whom: Vec<Address>,
    link: Arc<dyn Link>,
    bad: Mutex<Vec<(String, u64)>>,
}

impl Suppliers for Ask {
    fn suppliers(&self, _: FileId, _: SealNumber) -> Vec<Address> {
        self.whom.clone()
    }
    fn link(&self) -> Arc<dyn Link> {
        Arc::clone(&self.link)
    }
    fn is_bad(&self, node: &str, _: FileId, _: SealNumber, chunk: u64) {
        self.bad.lock().unwrap().push((node.to_owned(), chunk));
    }
}

async fn restored(
    reader: &Node,
    plan: PeerPlan,
    whom: Vec<Address>,
) -> (Result<Vec<u8>, PeerError>, Vec<(String, u64)>) {
    let ask = Arc::new(Ask { whom, link: Arc::clone(&reader.link) as _, bad: Mutex::default() });
    let landing = reader.namespace.room().backing_for(Some(plan.size_bytes)).unwrap();
    let suppliers: Arc<dyn Suppliers> = Arc::clone(&ask) as _;
    let fetched = fetch_from_peers(&suppliers, plan, Arc::clone(&landing), Arc::clone(&reader.metrics)).await;
    let bad = ask.bad.lock().unwrap().clone();
    (fetched.map(|()| landing.map().unwrap().to_vec()), bad)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_nodes_file_comes_from_its_copies_and_bad_ones_are_passed_over_and_named() {
    let network = Network::new();
    let (home, b, c) = (
        Node::new(&network, "a", 128 << 20),
        Node::new(&network, "b", 128 << 20),
        Node::new(&network, "c", 128 << 20),
    );
    let reader = Node::new(&network, "r", 128 << 20);
    let running = home.replicator(vec![b.address(), c.address()]);
    let bytes = noise(3 * CHUNK + 17, 15);
    let (node, file, seal) = home.save("step1.pt", &bytes);
    running.replicator.look_at_node(node, Priority::Base);
    running.acknowledged(file, seal, 2).await;
    let FileState::Sealed { chunks, .. } = home.namespace.nodes().view(node).unwrap().state else {
        panic!("not sealed")
    };
    let plan = PeerPlan { path: "step1.pt".to_owned(), file, seal, size_bytes: bytes.len() as u64, chunks };
    let both = vec![b.address(), c.address()];
    let gone = Address { node: "z".to_owned(), address: "z".to_owned() };

    let (good, bad) = restored(&reader, plan.clone(), vec![gone.clone(), b.address(), c.address()]).await;
    assert!(good.unwrap() == bytes && bad.is_empty());
    assert_eq!(reader.metrics.fetch_peer_bytes.get(), bytes.len() as u64);

    damage(&b, b.namespace.peer_copies().copy_of(file, seal).unwrap(), CHUNK_BYTES + 4);
    // Asked alone, the node shows its bad chunk; with the other beside it the file is whole.
    let (none, bad) = restored(&reader, plan.clone(), vec![b.address()]).await;
    assert!(matches!(none, Err(PeerError::Lacking { left: 1, chunks: 4, .. })), "{none:?}");
    assert_eq!(bad, [("b".to_owned(), 1)]);
    assert!(
        b.namespace.peer_copies().copy(file, seal).is_none(),
        "it was told, looked again, and gave the copy up"
    );
    for _ in 0..3 {
        let (good, bad) = restored(&reader, plan.clone(), both.clone()).await;
        assert!(good.unwrap() == bytes);
        assert!(bad.iter().all(|bad| *bad == ("b".to_owned(), 1)), "{bad:?}");
    }
    reader.link.set(vec![fault(Operation::Pull, When::Nth(1), What::CutAfter { bytes: 1 << 20 })]);
    let (good, _) = restored(&reader, plan.clone(), vec![c.address(), home.address()]).await;
    assert!(good.unwrap() == bytes, "the home's own bytes are as good as a copy");
    let (none, _) = restored(&reader, plan, Vec::new()).await;
    assert!(matches!(none, Err(PeerError::Nobody { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_that_is_given_up_lets_go_of_the_memory_that_it_was_for() {
    let network = Network::new();
    let (source, reader) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "r", 96 << 20));
    let bytes = noise(CHUNK + 3, 18);
    let (node, file, seal) = source.save("step1.pt", &bytes);
    let FileState::Sealed { chunks, .. } = source.namespace.nodes().view(node).unwrap().state else {
        panic!("not sealed")
    };
    let plan = PeerPlan { path: "step1.pt".to_owned(), file, seal, size_bytes: bytes.len() as u64, chunks };
    reader.link.set(vec![fault(Operation::Pull, When::Always, What::Delay { delay_ms: 600_000 })]);
    let landing = reader.namespace.room().backing_for(Some(plan.size_bytes)).unwrap();
    let link = Arc::clone(&reader.link) as _;
    let suppliers: Arc<dyn Suppliers> =
        Arc::new(Ask { whom: vec![source.address()], link, bad: Mutex::default() });
    let fetching = fetch_from_peers(&suppliers, plan, Arc::clone(&landing), Arc::clone(&reader.metrics));
    assert!(tokio::time::timeout(Duration::from_millis(200), fetching).await.is_err(), "it hangs");
    until("its lanes have ended", || Arc::strong_count(&landing) == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_being_brought_elsewhere_are_waited_for() {
    let network = Network::new();
    let (source, reader) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "r", 96 << 20));
    let bytes = noise(CHUNK + 3, 17);
    let (node, file, seal) = source.save("step1.pt", &bytes);
    let FileState::Sealed { chunks, .. } = source.namespace.nodes().view(node).unwrap().state else {
        panic!("not sealed")
    };
    let plan = PeerPlan { path: "step1.pt".to_owned(), file, seal, size_bytes: bytes.len() as u64, chunks };
    // The next seal of the same file is coming, and is not there yet.
    let next = SealNumber(seal.0 + 1);
    let coming = source.coming.begin((file, next));
    let waiting = restored(&reader, PeerPlan { seal: next, ..plan.clone() }, vec![source.address()]);
    let mut waiting = std::pin::pin!(waiting);
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut waiting).await.is_err(), "it waits");
    drop(coming);
    let (none, _) = waiting.await;
    assert!(matches!(none, Err(PeerError::Lacking { .. })), "it did not come: {none:?}");
    let _coming = source.coming.begin((file, seal));
    let (good, _) = restored(&reader, plan, vec![source.address()]).await;
    assert!(good.unwrap() == bytes, "what is there is not waited for");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cold_file_is_hot_at_once_where_its_copy_lies() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 96 << 20));
    let running = home.replicator(vec![partner.address()]);
    let bytes = noise(CHUNK + 3, 16);
    let (node, file, seal) = home.save("step1.pt", &bytes);
    let FileState::Sealed { crc, chunks, size_bytes, .. } = home.namespace.nodes().view(node).unwrap().state
    else {
        panic!()
    };
    let entry = tidemark_namespace::AdoptEntry {
        path: b"step1.pt".to_vec(),
        kind: tidemark_namespace::AdoptKind::File { file, seal, size_bytes, crc, chunks, object: None },
        mode: 0o644,
        uid: 0,
        gid: 0,
        mtime_ns: 3,
        xattrs: Vec::new(),
    };
    let there = partner.namespace.adoption().adopt(&entry).unwrap();
    assert!(partner.namespace.hosts().cold(there).is_some());
    running.replicator.look_at_node(node, Priority::Base);
    running.acknowledged(file, seal, 1).await;
    assert!(partner.namespace.hosts().cold(there).is_none(), "the copy's bytes are the file's");
    let OpenOutcome::Ready(open) = partner.namespace.open(&caller(), there, O_RDWR).unwrap() else {
        panic!()
    };
    open.backing.write_at(b"mine now", 0).unwrap();
    partner.close(&open);
    assert!(partner.copy_bytes(file, seal) == bytes, "a user's write leaves the copy alone");
    assert!(partner.namespace.peer_copies().take_withdrawn_copies().is_empty());
}

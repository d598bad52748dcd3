//! The environment of the tests: nodes with links of one kind, a service that remembers, and files with known bytes.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tidemark_transport::certs::{self, Certs};
use tidemark_transport::tcp::{Security, Settings, Tcp};
use tidemark_transport::{
    Address, BODY_BYTES_MAX, BytesSink, BytesSource, Faulty, Identity, Link, LinkErrorKind, Network, Peer,
    Refusal, Service,
};

/// Runs a test, which fails if it takes longer than any test on a busy machine.
pub(crate) async fn in_time(test: impl Future<Output = ()>) {
    tokio::time::timeout(Duration::from_secs(60), test).await.expect("the test hangs");
}

/// A deadline that is not meant to pass.
pub(crate) const AMPLE: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Loopback,
    Plain,
    Authenticated,
    Encrypted,
    Streams,
    Faulty,
}

/// Nodes that can reach each other.
pub(crate) struct World {
    kind: Kind,
    network: Arc<Network>,
    certs: tempfile::TempDir,
    joined: AtomicU64,
}

pub(crate) struct Node {
    pub(crate) link: Arc<dyn Link>,
    pub(crate) address: Address,
    pub(crate) service: Arc<Memory>,
}

impl World {
    pub(crate) fn new(kind: Kind) -> Self {
        let certs = tempfile::tempdir().expect("a folder");
        if matches!(kind, Kind::Authenticated | Kind::Encrypted) {
            certs::init(certs.path(), "blue").expect("an authority");
        }
        Self { kind, network: Network::new(), certs, joined: AtomicU64::new(0) }
    }

    pub(crate) async fn join(&self, node: &str) -> Node {
        let number = self.joined.fetch_add(1, Ordering::Relaxed);
        self.join_as("blue", node, number, number).await
    }

    pub(crate) async fn join_as(&self, cluster: &str, node: &str, incarnation: u64, start: u64) -> Node {
        let number = self.joined.fetch_add(1, Ordering::Relaxed);
        self.join_at(cluster, node, (incarnation, start), &format!("at-{number}")).await
    }

    pub(crate) async fn join_at(
        &self,
        cluster: &str,
        node: &str,
        (incarnation, start): (u64, u64),
        at: &str,
    ) -> Node {
        let identity = Identity { cluster: cluster.into(), node: node.into(), incarnation, start };
        let service = Arc::new(Memory::default());
        let answering: Arc<dyn Service> = Arc::clone(&service) as _;
        let (link, address): (Arc<dyn Link>, String) = match self.kind {
            Kind::Loopback => (Arc::new(self.network.join(at, identity, answering)), at.into()),
            Kind::Faulty => {
                let loopback = Arc::new(self.network.join(at, identity, answering));
                (Arc::new(Faulty::new(loopback, vec![])), at.into())
            }
            _ => {
                let listen = at.parse().unwrap_or_else(|_| "127.0.0.1:0".parse().expect("an address"));
                let settings = Settings {
                    listen,
                    security: self.security(cluster, node),
                    encrypt_bulk: self.kind == Kind::Encrypted,
                    bulk_streams: if self.kind == Kind::Streams { 3 } else { 1 },
                };
                let tcp = Tcp::listen(identity, settings, answering).await.expect("it listens");
                let address = tcp.local_address().to_string();
                (Arc::new(tcp), address)
            }
        };
        Node { link, address: Address { node: node.into(), address }, service }
    }

    fn security(&self, cluster: &str, node: &str) -> Security {
        if matches!(self.kind, Kind::Plain | Kind::Streams) {
            return Security::Insecure { off_loopback: false };
        }
        let folder = if cluster == "blue" {
            self.certs.path().to_owned()
        } else {
            let folder = self.certs.path().join(cluster);
            certs::init(&folder, cluster).expect("another authority");
            folder
        };
        if !folder.join(format!("{node}.pem")).exists() {
            certs::issue(&folder, node, &[]).expect("a certificate");
        }
        Security::Certificates(Certs::load(&folder, cluster, node).expect("its own"))
    }

    /// Returns an address where no node is yet, and where one may join.
    pub(crate) fn nowhere(&self) -> String {
        if matches!(self.kind, Kind::Loopback | Kind::Faulty) {
            return "nowhere".into();
        }
        let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        taken.local_addr().expect("its address").to_string()
    }

    pub(crate) fn proves_names(&self) -> bool {
        matches!(self.kind, Kind::Authenticated | Kind::Encrypted)
    }
}

/// A service that remembers what it received, and answers by the first word of a body.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) heard: Mutex<Vec<(String, Bytes)>>,
    pub(crate) events: Mutex<Vec<String>>,
    pub(crate) epoch: AtomicU64,
}

impl Memory {
    pub(crate) fn heard(&self) -> Vec<String> {
        let heard = self.heard.lock().expect("no panic");
        heard.iter().map(|(_, body)| String::from_utf8_lossy(body).into_owned()).collect()
    }

    pub(crate) fn events(&self) -> Vec<String> {
        self.events.lock().expect("no panic").clone()
    }
}

#[async_trait]
impl Service for Memory {
    async fn call(&self, from: Peer, body: Bytes) -> Result<Bytes, Refusal> {
        let text = String::from_utf8_lossy(&body[..body.len().min(64)]).into_owned();
        self.heard.lock().expect("no panic").push((from.node.clone(), body.slice(..body.len().min(64))));
        match text.split_once(' ') {
            Some(("who", _)) => Ok(from.to_string().into()),
            Some(("sleep", ms)) => {
                tokio::time::sleep(Duration::from_millis(ms.parse().expect("a number"))).await;
                Ok(body)
            }
            Some(("refuse", why)) => Err(Refusal::new(LinkErrorKind::Fenced, why)),
            Some(("grow", by)) => Ok(vec![7; BODY_BYTES_MAX + by.parse::<usize>().expect("a number")].into()),
            _ => Ok(body),
        }
    }

    fn tell(&self, from: Peer, body: Bytes) {
        self.heard.lock().expect("no panic").push((from.node, body));
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    fn saw_epoch(&self, from: &Peer, epoch: u64) {
        self.events.lock().expect("no panic").push(format!("{} in {epoch}", from.node));
    }

    fn connected(&self, peer: &Peer) {
        self.events.lock().expect("no panic").push(format!("+{}/{}", peer.node, peer.start));
    }

    fn disconnected(&self, peer: &Peer) {
        self.events.lock().expect("no panic").push(format!("-{}/{}", peer.node, peer.start));
    }
}

/// A file in memory that records which ranges landed.
#[derive(Debug)]
pub(crate) struct Bucket {
    pub(crate) file: File,
    pub(crate) landed: Mutex<Vec<Range<u64>>>,
}

impl Bucket {
    /// Makes a sparse file of `bytes` bytes.
    pub(crate) fn new(bytes: u64) -> Arc<Self> {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(bytes).expect("a size");
        Arc::new(Self { file, landed: Mutex::default() })
    }

    /// Makes a file whose every byte depends on its offset and on a seed.
    pub(crate) fn filled(bytes: u64, seed: u8) -> Arc<Self> {
        let bucket = Self::new(bytes);
        bucket.file.write_all_at(&pattern(0..bytes, seed), 0).expect("written");
        bucket
    }

    pub(crate) fn read(&self, range: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(range.end - range.start).expect("small")];
        self.file.read_exact_at(&mut bytes, range.start).expect("read");
        bytes
    }

    pub(crate) fn landed_bytes(&self) -> u64 {
        self.landed.lock().expect("no panic").iter().map(|range| range.end - range.start).sum()
    }
}

pub(crate) fn pattern(range: Range<u64>, seed: u8) -> Vec<u8> {
    range.map(|at| (at ^ (at >> 8) ^ (at >> 17)).to_le_bytes()[0].wrapping_add(seed)).collect()
}

impl BytesSource for Bucket {
    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl BytesSink for Bucket {
    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn landed(&self, range: Range<u64>) {
        self.landed.lock().expect("no panic").push(range);
    }
}

/// Waits until something holds that is on its way.
pub(crate) async fn eventually(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..2000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what} did not come to hold");
}

//! A closed link leaves nothing open. Alone in its binary: it counts this process's descriptors.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tidemark_transport::certs::{self, Certs};
use tidemark_transport::tcp::{Security, Settings, Tcp};
use tidemark_transport::{
    Address, BytesSink, BytesSource, Grant, Identity, Link, Peer, Refusal, Service, Unpaced,
};

struct Echo;

#[async_trait]
impl Service for Echo {
    async fn call(&self, _from: Peer, body: Bytes) -> Result<Bytes, Refusal> {
        Ok(body)
    }

    fn tell(&self, _from: Peer, _body: Bytes) {}

    fn epoch(&self) -> u64 {
        0
    }

    fn saw_epoch(&self, _from: &Peer, _epoch: u64) {}

    fn connected(&self, _peer: &Peer) {}

    fn disconnected(&self, _peer: &Peer) {}
}

struct Sink(std::fs::File);

impl BytesSink for Sink {
    fn file(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }
}

/// Lists this process's open descriptors by kind: sockets and pipes without their numbers, and files.
fn open_descriptors() -> Vec<String> {
    let open = std::fs::read_dir("/proc/self/fd").expect("procfs");
    let mut open: Vec<String> = open
        .filter_map(|entry| std::fs::read_link(entry.expect("an entry").path()).ok())
        .map(|target| target.to_string_lossy().split('[').next().unwrap_or_default().to_owned())
        .collect();
    open.sort();
    open
}

async fn use_links(security: impl Fn(&str) -> Security, encrypt_bulk: bool) {
    let mut nodes = vec![];
    for name in ["a", "b"] {
        let identity = Identity { cluster: "blue".into(), node: name.into(), incarnation: 1, start: 1 };
        let listen = "127.0.0.1:0".parse().expect("an address");
        let settings = Settings { listen, security: security(name), encrypt_bulk, bulk_streams: 2 };
        let link = Tcp::listen(identity, settings, Arc::new(Echo)).await.expect("it listens");
        let address = Address { node: name.into(), address: link.local_address().to_string() };
        nodes.push((link, address));
    }
    let [(a, at_a), (b, at_b)] = &nodes[..] else { unreachable!("two were made") };
    let from = tempfile::tempfile().expect("a file");
    from.set_len(40 << 20).expect("a size");
    let (from, into) = (Arc::new(from), Arc::new(Sink(tempfile::tempfile().expect("a file"))));
    a.call(at_b, "hello".into(), Duration::from_secs(20)).await.expect("an answer");
    b.call(at_a, "hello".into(), Duration::from_secs(20)).await.expect("an answer");
    let receive = Grant::Receive { into: Arc::clone(&into) as Arc<dyn BytesSink>, limit_bytes: 40 << 20 };
    let send = Grant::Send { from: Arc::clone(&from) as Arc<dyn BytesSource>, size_bytes: 40 << 20 };
    let (to, out) = (b.grant("a", receive), b.grant("a", send));
    let whole = [0..40 << 20; 1];
    a.push(at_b, to, from, &whole, &Unpaced).await.expect("pushed");
    a.pull(at_b, out, &whole, into).await.expect("pulled");
    // Ends while its bytes are on the way.
    let endless = a.call(at_b, "last".into(), Duration::from_secs(20));
    let (_, (), ()) = tokio::join!(endless, b.close(), a.close());
}

#[test]
fn a_closed_link_leaves_no_descriptor_open() {
    let folder = tempfile::tempdir().expect("a folder");
    certs::init(folder.path(), "blue").expect("an authority");
    for node in ["a", "b"] {
        certs::issue(folder.path(), node, &[]).expect("a certificate");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let certified =
        |node: &str| Security::Certificates(Certs::load(folder.path(), "blue", node).expect("its own"));
    let before = open_descriptors();
    for _ in 0..5 {
        runtime.block_on(use_links(|_| Security::Insecure { off_loopback: false }, false));
        assert_eq!(open_descriptors(), before, "after plain links");
        runtime.block_on(use_links(certified, false));
        assert_eq!(open_descriptors(), before, "after certified links");
        runtime.block_on(use_links(certified, true));
        assert_eq!(open_descriptors(), before, "after encrypted links");
    }
}

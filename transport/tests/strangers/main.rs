//! Links over TCP among strangers: wrong certificates, other versions, garbage, cut connections.
//!
//! Owns: the tests that need a real socket: which nodes may speak here, what an attacker on the way sees and changes (`on_the_way`), and
//! the cost of silent connections (`silent`). The tests for every link are in `conformance`.

mod on_the_way;
mod silent;

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use tidemark_transport::certs::{self, Certs};
use tidemark_transport::frame::{Header, Kind};
use tidemark_transport::tcp::greeting::{Answer, Hello, Purpose, VERSION};
use tidemark_transport::tcp::{ListenError, Security, Settings, Tcp};
use tidemark_transport::{
    Address, BytesSink, CALLS_IN_FLIGHT_MAX, Grant, Identity, Link, LinkError, LinkErrorKind, Mismatch, Peer,
    Refusal, Service, Unpaced,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const AMPLE: Duration = Duration::from_secs(20);

/// A service that answers with the request itself; never, if the request is `hang`.
#[derive(Default)]
struct Echo(Mutex<Vec<String>>);

#[async_trait]
impl Service for Echo {
    async fn call(&self, from: Peer, body: Bytes) -> Result<Bytes, Refusal> {
        self.0.lock().expect("no panic").push(from.node);
        if body == "hang" {
            return std::future::pending().await;
        }
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

struct Node {
    link: Tcp,
    address: Address,
    service: Arc<Echo>,
}

fn identity(node: &str) -> Identity {
    Identity { cluster: "blue".into(), node: node.into(), incarnation: 1, start: 1 }
}

async fn node(name: &str, security: Security, encrypt_bulk: bool) -> Node {
    let listen = "127.0.0.1:0".parse().expect("an address");
    let service = Arc::new(Echo::default());
    let settings = Settings { listen, security, encrypt_bulk, bulk_streams: 1 };
    let link = Tcp::listen(identity(name), settings, Arc::clone(&service) as Arc<dyn Service>)
        .await
        .expect("it listens");
    let address = Address { node: name.into(), address: link.local_address().to_string() };
    Node { link, address, service }
}

const PLAIN: Security = Security::Insecure { off_loopback: false };

fn certified(folder: &Path, name: &str) -> Security {
    if !folder.join("ca.pem").exists() {
        certs::init(folder, "blue").expect("an authority");
    }
    if !folder.join(format!("{name}.pem")).exists() {
        certs::issue(folder, name, &[]).expect("a certificate");
    }
    Security::Certificates(Certs::load(folder, "blue", name).expect("its own"))
}

async fn mismatch(from: &Node, to: &Address) -> Mismatch {
    let begun = Instant::now();
    match from.link.call(to, "hello".into(), AMPLE).await {
        Err(LinkError::Handshake { why, .. }) => {
            assert!(begun.elapsed() < AMPLE / 2, "it was tried again and again");
            why
        }
        other => panic!("not refused: {other:?}"),
    }
}

/// Opens a plain connection, and sends this hello.
async fn greeted(to: &Address, hello: &Hello, version: u16) -> (TcpStream, Vec<u8>) {
    let mut stream = TcpStream::connect(&to.address).await.expect("it listens");
    let body = hello.encode();
    let mut greeting = b"tidelink".to_vec();
    greeting.extend_from_slice(&version.to_le_bytes());
    greeting.extend_from_slice(&u16::try_from(body.len()).expect("short").to_le_bytes());
    greeting.extend_from_slice(&body);
    stream.write_all(&greeting).await.expect("sent");
    let mut head = [0; 12];
    stream.read_exact(&mut head).await.expect("an answer");
    assert_eq!(&head[..10], [b"tidelink", &VERSION.to_le_bytes()[..]].concat());
    let mut answer = vec![0; usize::from(u16::from_le_bytes([head[10], head[11]]))];
    stream.read_exact(&mut answer).await.expect("an answer");
    (stream, answer)
}

fn hello(purpose: Purpose, from: &str, to: &Address) -> Hello {
    Hello { purpose, identity: identity(from), epoch: 0, wanted: to.node.clone() }
}

/// Waits for the other end to close.
async fn ended(stream: &mut TcpStream) -> bool {
    let mut rest = vec![];
    tokio::time::timeout(AMPLE, stream.read_to_end(&mut rest)).await.is_ok()
}

#[tokio::test]
async fn a_certificate_of_another_authority_is_refused_by_both_ends() {
    let (ours, theirs) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let a = node("a", certified(ours.path(), "a"), false).await;
    let b = node("b", certified(theirs.path(), "b"), false).await;
    for (from, to) in [(&a, &b), (&b, &a)] {
        assert!(matches!(mismatch(from, &to.address).await, Mismatch::Certificate(_)));
        assert!(to.service.0.lock().expect("no panic").is_empty());
    }
}

#[tokio::test]
async fn a_node_speaks_only_under_the_name_in_its_certificate() {
    let folder = tempfile::tempdir().expect("a folder");
    let a = node("a", certified(folder.path(), "a"), false).await;
    // The node holds c's certificate, and says that it is b.
    let liar = node("b", certified(folder.path(), "c"), false).await;
    let Mismatch::Certificate(what) = mismatch(&liar, &a.address).await else { panic!("another reason") };
    assert!(what.contains("`b`"), "{what}");
    let found = mismatch(&a, &liar.address).await;
    assert_eq!(found, Mismatch::OtherNode { wanted: "b".into(), found: "c".into() });
    assert!(a.service.0.lock().expect("no panic").is_empty());
}

#[tokio::test]
async fn plain_and_certified_nodes_do_not_speak() {
    let folder = tempfile::tempdir().expect("a folder");
    let (plain, safe) = (node("a", PLAIN, false).await, node("b", certified(folder.path(), "b"), true).await);
    assert!(matches!(mismatch(&plain, &safe.address).await, Mismatch::Certificate(_)));
    // A TLS hello is no greeting; the plain node closes. The caller may take it for a node that is just ending, so it tries again.
    let error = safe.link.call(&plain.address, "hello".into(), Duration::from_millis(300)).await;
    assert!(matches!(error, Err(LinkError::Unreachable { .. } | LinkError::Handshake { .. })), "{error:?}");
    // A plain connection for bytes is refused, too, even where they need not be encrypted.
    let open = node("c", certified(folder.path(), "c"), false).await;
    for to in [&safe.address, &open.address] {
        for purpose in [Purpose::Bulk, Purpose::OpenBulk] {
            let (_, answer) = greeted(to, &hello(purpose, "a", to), VERSION).await;
            assert!(matches!(Answer::decode(&answer), Ok(Answer::Sorry(Mismatch::Certificate(_)))));
        }
    }
}

#[tokio::test]
async fn links_without_certificates_stay_on_loopback() {
    let listen: SocketAddr = "0.0.0.0:0".parse().expect("an address");
    let settings = |off_loopback| Settings {
        listen,
        security: Security::Insecure { off_loopback },
        encrypt_bulk: false,
        bulk_streams: 1,
    };
    let refused = Tcp::listen(identity("a"), settings(false), Arc::new(Echo::default())).await;
    assert!(matches!(refused, Err(ListenError::Insecure { .. })), "{refused:?}");
    Tcp::listen(identity("a"), settings(true), Arc::new(Echo::default())).await.expect("its owner said so");
    let a = node("a", PLAIN, false).await;
    let far = Address { node: "b".into(), address: "192.0.2.1:7070".into() };
    let why = mismatch(&a, &far).await;
    assert_eq!(why, Mismatch::Insecure { address: "192.0.2.1:7070".into() });
}

#[tokio::test]
async fn another_version_is_named_by_both_ends() {
    let a = node("a", PLAIN, false).await;
    // The head of the answer, which `greeted` checks, names the version that `a` speaks.
    let (mut stream, _) = greeted(&a.address, &hello(Purpose::Control, "b", &a.address), VERSION + 1).await;
    assert!(ended(&mut stream).await);
    // A node of the first version opened plain connections for bytes, whatever certificates it had.
    let folder = tempfile::tempdir().expect("a folder");
    let safe = node("a", certified(folder.path(), "a"), true).await;
    let (mut stream, _) = greeted(&safe.address, &hello(Purpose::Bulk, "b", &safe.address), 1).await;
    assert!(ended(&mut stream).await);

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let later =
        Address { node: "b".into(), address: listener.local_addr().expect("its address").to_string() };
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a caller");
        let mut greeting = b"tidelink".to_vec();
        greeting.extend_from_slice(&(VERSION + 1).to_le_bytes());
        greeting.extend_from_slice(&[0, 0]);
        stream.write_all(&greeting).await.expect("sent");
        // Not closed before the other end has read.
        let _ = stream.read_to_end(&mut vec![]).await;
    });
    let why = mismatch(&a, &later).await;
    assert_eq!(why, Mismatch::OtherVersion { ours: VERSION, theirs: VERSION + 1 });
}

#[tokio::test]
async fn a_caller_that_wants_somebody_else_or_is_of_elsewhere_is_refused() {
    let a = node("a", PLAIN, false).await;
    let mut mistaken = hello(Purpose::Control, "b", &a.address);
    mistaken.wanted = "z".into();
    let mut foreign = hello(Purpose::Bulk, "b", &a.address);
    foreign.identity.cluster = "red".into();
    let mut twin = hello(Purpose::Control, "a", &a.address);
    twin.identity.incarnation = 2;
    for (hello, expected) in [
        (mistaken, Mismatch::OtherNode { wanted: "z".into(), found: "a".into() }),
        (foreign, Mismatch::OtherCluster { ours: "red".into(), theirs: "blue".into() }),
        (twin, Mismatch::TwoNodes { node: "a".into(), live: 1, refused: 2 }),
    ] {
        let (mut stream, answer) = greeted(&a.address, &hello, VERSION).await;
        assert_eq!(Answer::decode(&answer), Ok(Answer::Sorry(expected)));
        assert!(ended(&mut stream).await);
    }
}

#[tokio::test]
async fn a_stranger_who_talks_nonsense_is_dropped_and_harms_nobody() {
    let (a, b) = (node("a", PLAIN, false).await, node("b", PLAIN, false).await);
    for nonsense in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0x16, 3, 1, 2, 0, 1], &[b't'; 4000], b"tidelink\x01\x00\xff\xff"]
    {
        let mut stream = TcpStream::connect(&a.address.address).await.expect("it listens");
        stream.write_all(nonsense).await.expect("sent");
        assert!(ended(&mut stream).await, "{nonsense:?}");
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let web = Address { node: "b".into(), address: listener.local_addr().expect("its address").to_string() };
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a caller");
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.expect("sent");
        let _ = stream.read_to_end(&mut vec![]).await;
    });
    assert!(matches!(mismatch(&b, &web).await, Mismatch::NotALink(_)));
    b.link.call(&a.address, "still there".into(), AMPLE).await.expect("an answer");
}

#[tokio::test]
async fn frames_that_break_the_rules_end_the_connection_at_once() {
    let a = node("a", PLAIN, false).await;
    let mut oversized = Header::encode(Kind::Call, 1, 0);
    oversized[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut strange = Header::encode(Kind::Call, 1, 0);
    strange[0] = 99;
    let unasked = Header::encode(Kind::Answer, 1, 0);
    for frame in [oversized, strange, unasked] {
        let (mut stream, answer) =
            greeted(&a.address, &hello(Purpose::Control, "b", &a.address), VERSION).await;
        assert!(matches!(Answer::decode(&answer), Ok(Answer::Welcome(_))));
        stream.write_all(&frame).await.expect("sent");
        assert!(ended(&mut stream).await, "{frame:?}");
    }
    // More requests at a time than there are credits.
    let (mut stream, _) = greeted(&a.address, &hello(Purpose::Control, "b", &a.address), VERSION).await;
    for id in 1..=CALLS_IN_FLIGHT_MAX as u64 + 1 {
        let mut frame = Header::encode(Kind::Call, id, 4).to_vec();
        frame.extend_from_slice(b"hang");
        if stream.write_all(&frame).await.is_err() {
            break;
        }
    }
    assert!(ended(&mut stream).await);
    assert_eq!(a.service.0.lock().expect("no panic").len(), CALLS_IN_FLIGHT_MAX);
}

#[tokio::test]
async fn a_silent_peer_does_not_hold_a_call_beyond_its_deadline() {
    let a = node("a", PLAIN, false).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let silent =
        Address { node: "b".into(), address: listener.local_addr().expect("its address").to_string() };
    let begun = Instant::now();
    let error = a.link.call(&silent, "hello".into(), Duration::from_millis(200)).await.expect_err("silent");
    assert!(matches!(error, LinkError::Unreachable { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_peer_that_dies_while_it_is_asked_is_told_at_once() {
    let (a, b) = (node("a", PLAIN, false).await, node("b", PLAIN, false).await);
    let call = a.link.call(&b.address, "hang".into(), AMPLE);
    let die = async {
        while b.service.0.lock().expect("no panic").is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        b.link.close().await;
    };
    let begun = Instant::now();
    let (answer, ()) = tokio::join!(call, die);
    let error = answer.expect_err("it died");
    assert!(matches!(error, LinkError::Lost { .. }), "{error}");
    assert!(begun.elapsed() < AMPLE / 2);
}

/// A proxy that passes connections on to `to`, and cuts each after `cut_after_bytes` bytes towards it.
struct Proxy {
    address: String,
    cut_after_bytes: Arc<AtomicU64>,
    carried_bytes: Arc<AtomicU64>,
}

async fn proxy(to: String) -> Proxy {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("its address").to_string();
    let (cut_after_bytes, carried_bytes) = (Arc::new(AtomicU64::new(u64::MAX)), Arc::new(AtomicU64::new(0)));
    let (cut, carried) = (Arc::clone(&cut_after_bytes), Arc::clone(&carried_bytes));
    tokio::spawn(async move {
        while let Ok((inward, _)) = listener.accept().await {
            let outward = TcpStream::connect(&to).await.expect("it listens");
            let (cut, carried) = (Arc::clone(&cut), Arc::clone(&carried));
            tokio::spawn(async move {
                let ((mut from_in, mut to_in), (mut from_out, mut to_out)) =
                    (inward.into_split(), outward.into_split());
                let forth = async {
                    let (mut buffer, mut sum) = (vec![0; 64 << 10], 0_u64);
                    while let Ok(read @ 1..) = from_in.read(&mut buffer).await {
                        sum += read as u64;
                        if sum > cut.load(Ordering::Relaxed)
                            || to_out.write_all(&buffer[..read]).await.is_err()
                        {
                            return;
                        }
                        carried.fetch_add(read as u64, Ordering::Relaxed);
                    }
                };
                tokio::select! {
                    () = forth => {}
                    _ = tokio::io::copy(&mut from_out, &mut to_in) => {}
                }
            });
        }
    });
    Proxy { address, cut_after_bytes, carried_bytes }
}

fn file_with(bytes: &[u8]) -> Arc<File> {
    let file = tempfile::tempfile().expect("a file");
    file.write_all_at(bytes, 0).expect("written");
    Arc::new(file)
}

struct Sink(File);

impl BytesSink for Sink {
    fn file(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_is_cut_goes_on_with_what_is_missing() {
    // Goal: a cut never sends the whole file again. Method: a proxy that cuts; count what passes it.
    let folder = tempfile::tempdir().expect("a folder");
    for encrypt_bulk in [false, true] {
        let a = node("a", certified(folder.path(), "a"), encrypt_bulk).await;
        let b = node("b", certified(folder.path(), "b"), encrypt_bulk).await;
        let proxy = proxy(b.address.address.clone()).await;
        let through = Address { node: "b".into(), address: proxy.address.clone() };
        // Longer than the unconfirmed bytes on the way (16 MiB), so that some were confirmed before the cut.
        let size = 40 << 20;
        let bytes: Vec<u8> = (0..size).map(|at: u64| (at ^ (at >> 9)).to_le_bytes()[0]).collect();
        let (from, into) = (file_with(&bytes), Arc::new(Sink(tempfile::tempfile().expect("a file"))));
        let token = b
            .link
            .grant("a", Grant::Receive { into: Arc::clone(&into) as Arc<dyn BytesSink>, limit_bytes: size });
        let whole = [0..size; 1];

        proxy.cut_after_bytes.store(30 << 20, Ordering::Relaxed);
        let error = a.link.push(&through, token, from.clone(), &whole, &Unpaced).await.expect_err("cut");
        assert_eq!(error.kind(), LinkErrorKind::Unavailable);
        let LinkError::Cut { landed, .. } = error else { panic!("{error}") };
        assert_eq!(landed.len(), 1, "{landed:?}");
        assert!((10 << 20..=30 << 20).contains(&landed[0].end), "{landed:?}");

        proxy.cut_after_bytes.store(u64::MAX, Ordering::Relaxed);
        let before = proxy.carried_bytes.load(Ordering::Relaxed);
        let missing = [landed[0].end..size; 1];
        a.link.push(&through, token, from.clone(), &missing, &Unpaced).await.expect("the rest");
        let carried = proxy.carried_bytes.load(Ordering::Relaxed) - before;
        assert!(carried < size - landed[0].end + (1 << 20), "{carried} bytes for the rest");
        let mut arrived = vec![0; bytes.len()];
        into.0.read_exact_at(&mut arrived, 0).expect("all there");
        assert!(arrived == bytes);

        // The connection that now waits for the next push dies; the next push does not care.
        proxy.cut_after_bytes.store(0, Ordering::Relaxed);
        let some = [0..4096_u64; 1];
        let dead = a.link.push(&through, token, from.clone(), &some, &Unpaced).await;
        assert!(matches!(dead, Err(LinkError::Unreachable { .. })), "{dead:?}");
        proxy.cut_after_bytes.store(u64::MAX, Ordering::Relaxed);
        a.link.push(&through, token, from, &some, &Unpaced).await.expect("on a fresh one");
    }
}

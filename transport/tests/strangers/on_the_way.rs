//! An attacker on the way between two nodes: what the attacker sees, and what becomes of a change.
//!
//! Each test shows first that the same relay does see, or does change, the bytes of a link without certificates.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tidemark_transport::tcp::Security;
use tidemark_transport::{Address, BytesSink, BytesSource, Grant, Link, LinkError, LinkErrorKind, Unpaced};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::{AMPLE, Node, PLAIN, certified, node};

const WORD: &[u8] = b"a word that stands in a checkpoint";

/// Three pieces, so that some end and some begin on a connection.
const SIZE: usize = (2 << 20) + 12_345;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// From the node that opened the connection.
    Forth,
    Back,
}

/// Nothing is changed.
const NEVER: usize = usize::MAX;

/// A relay that passes connections on to a node, records the bytes, and flips a bit of one byte.
struct Relay {
    address: Address,
    seen: Arc<Mutex<Vec<u8>>>,
    ways: [Arc<OneWay>; 2],
}

/// A direction of a relay's connections.
#[derive(Debug)]
struct OneWay {
    /// Index of the byte to change in the next connections, counted from their first byte.
    changes: AtomicUsize,
    /// Number of bytes that the last connection carried.
    passed: AtomicUsize,
}

impl Relay {
    async fn before(to: &Address) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = Address {
            node: to.node.clone(),
            address: listener.local_addr().expect("its address").to_string(),
        };
        let way = || Arc::new(OneWay { changes: AtomicUsize::new(NEVER), passed: AtomicUsize::new(0) });
        let relay = Self { address, seen: Arc::default(), ways: [way(), way()] };
        let (seen, ways, to) = (Arc::clone(&relay.seen), relay.ways.clone(), to.address.clone());
        tokio::spawn(async move {
            while let Ok((inward, _)) = listener.accept().await {
                let outward = TcpStream::connect(&to).await.expect("it listens");
                let (from_in, to_in) = inward.into_split();
                let (from_out, to_out) = outward.into_split();
                let (seen, [forth, back]) = (Arc::clone(&seen), ways.clone());
                tokio::spawn(async move {
                    // Either end closes both.
                    tokio::select! {
                        () = carry(from_in, to_out, &seen, &forth) => {}
                        () = carry(from_out, to_in, &seen, &back) => {}
                    }
                });
            }
        });
        relay
    }

    fn way(&self, way: Way) -> &OneWay {
        &self.ways[usize::from(way == Way::Back)]
    }

    fn change(&self, way: Way, at: usize) {
        self.way(way).changes.store(at, Ordering::SeqCst);
    }

    fn passed(&self, way: Way) -> usize {
        self.way(way).passed.load(Ordering::SeqCst)
    }

    fn saw(&self, word: &[u8]) -> bool {
        self.seen.lock().expect("no panic").windows(word.len()).any(|found| found == word)
    }

    fn saw_bytes(&self) -> usize {
        self.seen.lock().expect("no panic").len()
    }
}

async fn carry(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    seen: &Mutex<Vec<u8>>,
    way: &OneWay,
) {
    let (mut buffer, mut passed, change) = (vec![0; 64 << 10], 0, way.changes.load(Ordering::SeqCst));
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let bytes = &mut buffer[..read];
        if let Some(byte) = change.checked_sub(passed).and_then(|at| bytes.get_mut(at)) {
            *byte ^= 0x10;
        }
        passed += read;
        way.passed.store(passed, Ordering::SeqCst);
        seen.lock().expect("no panic").extend_from_slice(bytes);
        if to.write_all(bytes).await.is_err() {
            return;
        }
    }
}

/// A file that is written into and read from.
struct Bucket(File);

impl Bucket {
    fn holding(bytes: &[u8]) -> Arc<Self> {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(bytes, 0).expect("written");
        Arc::new(Self(file))
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; SIZE];
        self.0.read_exact_at(&mut bytes, 0).expect("read");
        bytes
    }
}

impl BytesSink for Bucket {
    fn file(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl BytesSource for Bucket {
    fn file(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn checkpoint() -> Vec<u8> {
    // No byte is zero, since unwritten bytes read as zero.
    let mut bytes: Vec<u8> = (0..SIZE).map(|at| (at ^ (at >> 8)).to_le_bytes()[0] | 1).collect();
    bytes[SIZE / 2..][..WORD.len()].copy_from_slice(WORD);
    bytes
}

/// Moves the checkpoint through the relay: `a` pushes it to `b`, or pulls it from `b`. Returns the result and the receiver's content.
async fn copy(a: &Node, b: &Node, through: &Relay, is_push: bool) -> (Result<(), LinkError>, Vec<u8>) {
    let (from, into) = (Bucket::holding(&checkpoint()), Bucket::holding(&[0; SIZE]));
    let (whole, limit_bytes) = ([0..SIZE as u64; 1], SIZE as u64);
    let moved = if is_push {
        let token = b.link.grant("a", Grant::Receive { into: Arc::clone(&into) as _, limit_bytes });
        a.link.push(&through.address, token, from, &whole, &Unpaced).await
    } else {
        let token = b.link.grant("a", Grant::Send { from, size_bytes: limit_bytes });
        a.link.pull(&through.address, token, &whole, Arc::clone(&into) as _).await
    };
    (moved, into.bytes())
}

/// Makes two nodes of one cluster; `encrypts` says for each whether it encrypts bytes.
async fn pair(security: impl Fn(&str) -> Security, encrypts: [bool; 2]) -> (Node, Node, Relay) {
    let a = node("a", security("a"), encrypts[0]).await;
    let b = node("b", security("b"), encrypts[1]).await;
    let relay = Relay::before(&b.address).await;
    (a, b, relay)
}

fn certificates(folder: &Path) -> impl Fn(&str) -> Security {
    move |name| certified(folder, name)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_a_copy_is_readable_on_the_way_unless_both_ends_allow_it() {
    let folder = tempfile::tempdir().expect("a folder");
    for is_push in [true, false] {
        let (a, b, relay) = pair(|_| PLAIN, [true, true]).await;
        copy(&a, &b, &relay, is_push).await.0.expect("moved");
        assert!(relay.saw(WORD), "the relay sees what is plain");
        for encrypts in [[true, true], [true, false], [false, true], [false, false]] {
            let (a, b, relay) = pair(certificates(folder.path()), encrypts).await;
            a.link.call(&relay.address, WORD.into(), AMPLE).await.expect("an answer");
            assert!(!relay.saw(WORD), "words are always encrypted");
            let (moved, landed) = copy(&a, &b, &relay, is_push).await;
            moved.expect("moved");
            assert!(landed == checkpoint() && relay.saw_bytes() > SIZE);
            assert_eq!(relay.saw(WORD), encrypts == [false, false], "{encrypts:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_byte_that_is_changed_on_the_way_lands_nowhere_and_the_next_copy_is_right() {
    let folder = tempfile::tempdir().expect("a folder");
    for is_push in [true, false] {
        let bytes_go = if is_push { Way::Forth } else { Way::Back };
        let (a, b, relay) = pair(|_| PLAIN, [false, false]).await;
        relay.change(bytes_go, SIZE / 2);
        let (moved, landed) = copy(&a, &b, &relay, is_push).await;
        moved.expect("nobody noticed");
        assert!(landed != checkpoint(), "the relay changes what is plain");

        for encrypts in [true, false] {
            for way in [Way::Forth, Way::Back] {
                let (a, b, relay) = pair(certificates(folder.path()), [encrypts; 2]).await;
                copy(&a, &b, &relay, is_push).await.0.expect("nothing is changed");
                let length = relay.passed(way);
                // A byte in the handshake, after it, and in the last request, reply or piece. A signature's length differs by some bytes
                // between handshakes; the end of a message is longer than that.
                for at in [40, length / 2, length - 12] {
                    let (a, b, relay) = pair(certificates(folder.path()), [encrypts; 2]).await;
                    relay.change(way, at);
                    let (moved, landed) = copy(&a, &b, &relay, is_push).await;
                    let which = format!("push {is_push}, encrypted {encrypts}, {way:?} byte {at}");
                    let error = moved.expect_err(&which);
                    assert!(
                        matches!(error.kind(), LinkErrorKind::Unavailable | LinkErrorKind::Invalid),
                        "{which}: {error}"
                    );
                    let wrong = landed
                        .iter()
                        .zip(checkpoint())
                        .position(|(found, sent)| *found != 0 && *found != sent);
                    assert_eq!(wrong, None, "{which}");
                    relay.change(way, NEVER);
                    let (moved, landed) = copy(&a, &b, &relay, is_push).await;
                    moved.expect(&which);
                    assert!(landed == checkpoint(), "{which}");
                }
            }
        }
    }
}

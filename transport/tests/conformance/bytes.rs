//! Pushing and pulling the bytes of files.

use std::fs::OpenOptions;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tidemark_transport::{
    BytesSink, BytesSource, Grant, LinkError, LinkErrorKind, Pace, Token, TokenRefusal, Unpaced,
};

use crate::world::{AMPLE, Bucket, Kind, Node, World, pattern};

/// Several pieces, and a last one shorter than a piece.
const SIZE: u64 = (5 << 20) + 4321;

fn receive(node: &Node, peer: &str, into: &Arc<Bucket>, limit_bytes: u64) -> Token {
    node.link.grant(peer, Grant::Receive { into: Arc::clone(into) as Arc<dyn BytesSink>, limit_bytes })
}

fn send(node: &Node, peer: &str, from: &Arc<Bucket>, size_bytes: u64) -> Token {
    node.link.grant(peer, Grant::Send { from: Arc::clone(from) as Arc<dyn BytesSource>, size_bytes })
}

async fn push(
    a: &Node,
    b: &Node,
    token: Token,
    from: &Arc<Bucket>,
    ranges: &[Range<u64>],
) -> Result<(), LinkError> {
    a.link.push(&b.address, token, Arc::clone(from) as Arc<dyn BytesSource>, ranges, &Unpaced).await
}

async fn pull(
    a: &Node,
    b: &Node,
    token: Token,
    ranges: &[Range<u64>],
    into: &Arc<Bucket>,
) -> Result<(), LinkError> {
    a.link.pull(&b.address, token, ranges, Arc::clone(into) as Arc<dyn BytesSink>).await
}

fn refusal(moved: Result<(), LinkError>) -> TokenRefusal {
    match moved {
        Err(LinkError::Token { why, .. }) => why,
        other => panic!("not refused for its token: {other:?}"),
    }
}

/// Returns a range as an array of ranges.
fn one(range: Range<u64>) -> [Range<u64>; 1] {
    std::array::from_fn(|_| range.clone())
}

pub(crate) async fn a_push_lands_byte_for_byte(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    // Long enough that several streams have work.
    let size = 40 << 20;
    let (from, into) = (Bucket::filled(size, 3), Bucket::new(0));
    let token = receive(&b, "a", &into, size);
    push(&a, &b, token, &from, &one(0..size)).await.expect("pushed");
    assert!(into.read(0..size) == pattern(0..size, 3));
    assert_eq!(into.landed_bytes(), size);
}

pub(crate) async fn a_pull_lands_byte_for_byte(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let size = 40 << 20;
    let (from, into) = (Bucket::filled(size, 9), Bucket::new(0));
    let token = send(&b, "a", &from, size);
    pull(&a, &b, token, &one(0..size), &into).await.expect("pulled");
    assert!(into.read(0..size) == pattern(0..size, 9));
    assert_eq!(into.landed_bytes(), size);
}

pub(crate) async fn sparse_ranges_leave_the_rest_alone(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let from = Bucket::filled(SIZE, 1);
    let (pushed, pulled) = (Bucket::filled(SIZE, 77), Bucket::filled(SIZE, 77));
    let ranges = [1..2, 4095..8193, 1 << 20..(3 << 20) + 5, SIZE - 1..SIZE];
    push(&a, &b, receive(&b, "a", &pushed, SIZE), &from, &ranges).await.expect("pushed");
    pull(&a, &b, send(&b, "a", &from, SIZE), &ranges, &pulled).await.expect("pulled");
    let mut expected = pattern(0..SIZE, 77);
    for range in ranges {
        let at = usize::try_from(range.start).expect("small");
        let bytes = pattern(range, 1);
        expected[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    assert!(pushed.read(0..SIZE) == expected);
    assert!(pulled.read(0..SIZE) == expected);
}

pub(crate) async fn no_bytes_are_fine(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let (from, into) = (Bucket::filled(10, 1), Bucket::new(0));
    let token = receive(&b, "a", &into, 10);
    push(&a, &b, token, &from, &[]).await.expect("nothing");
    push(&a, &b, token, &from, &[0..0, 7..7]).await.expect("nothing twice");
    pull(&a, &b, send(&b, "a", &from, 10), &one(3..3), &into).await.expect("nothing back");
    assert_eq!(into.landed_bytes(), 0);
    assert_eq!(into.file.metadata().expect("a file").len(), 0);
}

pub(crate) async fn every_landed_byte_was_told_before_the_push_returned(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let (from, into) = (Bucket::filled(SIZE, 1), Bucket::new(0));
    let token = receive(&b, "a", &into, SIZE);
    for round in 1..=20 {
        push(&a, &b, token, &from, &one(0..SIZE)).await.expect("pushed");
        assert_eq!(into.landed_bytes(), round * SIZE);
    }
}

pub(crate) async fn the_token_of_another_node_is_refused(kind: Kind) {
    let world = World::new(kind);
    let (a, b, c) = (world.join("a").await, world.join("b").await, world.join("c").await);
    let (from, into) = (Bucket::filled(SIZE, 1), Bucket::new(SIZE));
    let token = receive(&b, "a", &into, SIZE);
    assert_eq!(refusal(push(&c, &b, token, &from, &one(0..SIZE)).await), TokenRefusal::OtherNode);
    let token = send(&b, "a", &from, SIZE);
    assert_eq!(refusal(pull(&c, &b, token, &one(0..SIZE), &into).await), TokenRefusal::OtherNode);
    assert_eq!(into.landed_bytes(), 0);
    assert!(into.read(0..SIZE).iter().all(|byte| *byte == 0));
    pull(&a, &b, token, &one(0..SIZE), &into).await.expect("it is a's");
}

pub(crate) async fn a_revoked_token_is_refused(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let (from, into) = (Bucket::filled(SIZE, 1), Bucket::new(SIZE));
    let token = receive(&b, "a", &into, SIZE);
    push(&a, &b, token, &from, &one(0..9)).await.expect("pushed");
    b.link.revoke(token);
    b.link.revoke(token);
    let error = push(&a, &b, token, &from, &one(9..20)).await.expect_err("revoked");
    assert_eq!(error.kind(), LinkErrorKind::NotFound);
    assert_eq!(refusal(Err(error)), TokenRefusal::Unknown);
    let mut other = receive(&b, "a", &into, SIZE).to_bytes();
    other[10] ^= 1;
    let other = Token::from_bytes(other);
    assert_eq!(refusal(push(&a, &b, other, &from, &one(9..20)).await), TokenRefusal::Unknown);
    assert_eq!(into.landed_bytes(), 9);
    assert_eq!(into.read(9..20), [0; 11]);
}

pub(crate) async fn a_token_for_one_direction_is_refused_for_the_other(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let (from, into) = (Bucket::filled(SIZE, 1), Bucket::new(SIZE));
    let (receiving, sending) = (receive(&b, "a", &into, SIZE), send(&b, "a", &from, SIZE));
    assert_eq!(refusal(push(&a, &b, sending, &from, &one(0..SIZE)).await), TokenRefusal::OtherDirection);
    assert_eq!(refusal(pull(&a, &b, receiving, &one(0..SIZE), &into).await), TokenRefusal::OtherDirection);
}

pub(crate) async fn no_byte_goes_beyond_the_limit(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let (from, into) = (Bucket::filled(100, 1), Bucket::new(0));
    let token = receive(&b, "a", &into, 50);
    assert_eq!(refusal(push(&a, &b, token, &from, &one(49..51)).await), TokenRefusal::BeyondLimit);
    push(&a, &b, token, &from, &one(0..50)).await.expect("up to the limit");
    assert_eq!(into.file.metadata().expect("a file").len(), 50);
    let token = send(&b, "a", &from, 50);
    assert_eq!(refusal(pull(&a, &b, token, &one(50..51), &into).await), TokenRefusal::BeyondLimit);
}

pub(crate) async fn a_refused_push_does_not_spoil_the_next(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let (from, into) = (Bucket::filled(SIZE, 1), Bucket::new(0));
    let good = receive(&b, "a", &into, SIZE);
    for _ in 0..100 {
        let bad = receive(&b, "nobody", &into, SIZE);
        assert_eq!(refusal(push(&a, &b, bad, &from, &one(0..SIZE)).await), TokenRefusal::OtherNode);
        push(&a, &b, good, &from, &one(0..5000)).await.expect("pushed");
    }
    assert!(into.read(0..5000) == pattern(0..5000, 1));
}

pub(crate) async fn a_source_that_is_too_short_is_the_callers_fault(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let (from, into) = (Bucket::filled(1000, 1), Bucket::new(0));
    let token = receive(&b, "a", &into, SIZE);
    let error = push(&a, &b, token, &from, &one(500..2000)).await.expect_err("it ends before");
    assert!(matches!(&error, LinkError::Local { doing: "reading", .. }), "{error}");
    assert_eq!(error.kind(), LinkErrorKind::Corrupt);
    assert_eq!(into.landed_bytes(), 0);
    push(&a, &b, token, &from, &one(500..1000)).await.expect("what is there");
}

pub(crate) async fn a_receiver_without_space_says_so(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let from = Bucket::filled(SIZE, 1);
    let full = OpenOptions::new().write(true).open("/dev/full").expect("every Linux has it");
    let into = Arc::new(Bucket { file: full, landed: Default::default() });
    let token = receive(&b, "a", &into, SIZE);
    let error = push(&a, &b, token, &from, &one(0..SIZE)).await.expect_err("no space");
    assert_eq!(error.kind(), LinkErrorKind::NoSpace, "{error}");
    let error = pull(&a, &b, send(&b, "a", &from, SIZE), &one(0..SIZE), &into).await.expect_err("no space");
    assert!(matches!(&error, LinkError::Local { doing: "writing", .. }), "{error}");
    assert_eq!(error.kind(), LinkErrorKind::NoSpace, "{error}");
    assert_eq!(into.landed_bytes(), 0);
}

/// A pace that counts the requested bytes, and holds everything back for a moment.
#[derive(Default)]
struct Counting(AtomicU64);

#[async_trait]
impl Pace for Counting {
    async fn take(&self, bytes: u64) {
        assert!((1..=1 << 20).contains(&bytes), "a piece of {bytes} bytes");
        self.0.fetch_add(bytes, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) async fn a_push_asks_its_pace_for_every_byte(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let (from, into) = (Bucket::filled(SIZE, 1), Bucket::new(0));
    let token = receive(&b, "a", &into, SIZE);
    let (pace, begun) = (Counting::default(), Instant::now());
    a.link.push(&b.address, token, from, &one(0..SIZE), &pace).await.expect("pushed");
    assert_eq!(pace.0.load(Ordering::Relaxed), SIZE);
    assert!(begun.elapsed() >= Duration::from_millis(6 * 20), "it did not wait for its pace");
}

pub(crate) async fn words_do_not_wait_behind_bytes(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    a.link.call(&b.address, "connected".into(), AMPLE).await.expect("an answer");
    let (from, into) = (Bucket::filled(SIZE, 1), Bucket::new(0));
    let token = receive(&b, "a", &into, SIZE);
    /// Never lets the second piece go.
    struct Held(AtomicU64);
    #[async_trait]
    impl Pace for Held {
        async fn take(&self, _bytes: u64) {
            if self.0.fetch_add(1, Ordering::Relaxed) > 0 {
                std::future::pending::<()>().await;
            }
        }
    }
    let (link, to) = (Arc::clone(&a.link), b.address.clone());
    let pushing =
        tokio::spawn(
            async move { link.push(&to, token, from, &one(0..SIZE), &Held(AtomicU64::new(0))).await },
        );
    crate::world::eventually("the first piece", || into.landed_bytes() > 0).await;
    assert_eq!(a.link.call(&b.address, "meanwhile".into(), AMPLE).await.expect("an answer"), "meanwhile");
    assert!(!pushing.is_finished());
    pushing.abort();
    // A cancelled push leaves the token, and the pieces that landed.
    let from = Bucket::filled(SIZE, 1);
    push(&a, &b, token, &from, &one(1 << 20..SIZE)).await.expect("the rest");
    assert!(into.read(0..SIZE) == pattern(0..SIZE, 1));
}

pub(crate) async fn two_pushes_into_one_file_at_once(kind: Kind) {
    let world = World::new(kind);
    let (a, b, c) = (world.join("a").await, world.join("b").await, world.join("c").await);
    let (from, into) = (Bucket::filled(SIZE, 1), Bucket::new(0));
    let (of_a, of_b) = (receive(&c, "a", &into, SIZE), receive(&c, "b", &into, SIZE));
    let half = SIZE / 2;
    let (first, second) = (one(0..half), one(half..SIZE));
    let (one, other) = tokio::join!(push(&a, &c, of_a, &from, &first), push(&b, &c, of_b, &from, &second));
    one.expect("the first half");
    other.expect("the second half");
    assert!(into.read(0..SIZE) == pattern(0..SIZE, 1));
}

//! Silent connections: their cost for nodes that have something to send.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use tidemark_transport::{Grant, Link, Unpaced};
use tokio::io::AsyncReadExt;
use tokio::net::TcpSocket;
use tokio::task::JoinSet;

use crate::{AMPLE, Node, Sink, certified, file_with, node};

/// Number of silent connections: more than a node has places for unproven ones.
const SILENT: usize = 320;

/// Five copies of this size, each over connections of its own.
const COPY_BYTES: u64 = 8 << 20;

/// Several times as long as a slow stranger keeps its place from a newcomer, and half as long as each would without that rule: on a
/// busy machine this test's own strangers take processor time.
const WAIT: Duration = Duration::from_millis(2500);

/// Opens and keeps `SILENT` connections from `addresses` addresses; a connection that is closed is opened again. Dropping the set ends all.
async fn silence(to: SocketAddr, addresses: u8) -> JoinSet<()> {
    let (mut silent, opened) = (JoinSet::new(), Arc::new(AtomicUsize::new(0)));
    for number in 0..SILENT {
        let from = SocketAddr::from(([127, 0, 1, number.to_le_bytes()[0] % addresses], 0));
        let opened = Arc::clone(&opened);
        silent.spawn(async move {
            loop {
                let socket = TcpSocket::new_v4().expect("a socket");
                socket.bind(from).expect("every address that begins with 127 is ours");
                if let Ok(mut stream) = socket.connect(to).await {
                    opened.fetch_add(1, Ordering::Relaxed);
                    let _ = stream.read(&mut [0]).await;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }
    while opened.load(Ordering::Relaxed) < SILENT {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    silent
}

/// Makes five copies by nodes that have no connection yet. Returns the longest time.
async fn copies(folder: &Path, b: &Node) -> Duration {
    let mut longest = Duration::ZERO;
    for _ in 0..5 {
        let a = node("a", certified(folder, "a"), true).await;
        let bytes: Vec<u8> = (0..COPY_BYTES).map(|at| (at >> 7).to_le_bytes()[0]).collect();
        let (from, into): (Arc<File>, _) =
            (file_with(&bytes), Arc::new(Sink(tempfile::tempfile().expect("a file"))));
        let token = b.link.grant("a", Grant::Receive { into, limit_bytes: COPY_BYTES });
        let begun = Instant::now();
        a.link.call(&b.address, "hello".into(), AMPLE).await.expect("an answer");
        a.link
            .push(&b.address, token, from, std::slice::from_ref(&(0..COPY_BYTES)), &Unpaced)
            .await
            .expect("copied");
        longest = longest.max(begun.elapsed());
        a.link.close().await;
    }
    longest
}

/// Goal: a peer that opens more connections at once than a stranger may is not taken for a stranger. Method: transfers that each need a
/// connection of their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_may_need_many_connections_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let a = node("a", certified(folder.path(), "a"), true).await;
    let b = node("b", certified(folder.path(), "b"), true).await;
    let whole = [0..4096_u64; 1];
    let pushes = (0..100).map(|_| {
        let into = Arc::new(Sink(tempfile::tempfile().expect("a file")));
        let token = b.link.grant("a", Grant::Receive { into, limit_bytes: 4096 });
        a.link.push(&b.address, token, file_with(&[7; 4096]), &whole, &Unpaced)
    });
    try_join_all(pushes).await.expect("copied");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_silent_connections_do_not_keep_a_peer_from_copying() {
    let folder = tempfile::tempdir().expect("a folder");
    let b = node("b", certified(folder.path(), "b"), true).await;
    let calm = copies(folder.path(), &b).await;
    let address = b.address.address.parse().expect("an address");
    // From one machine they have its share only. From many they fill the table, and the slow ones give way.
    for addresses in [1, 20] {
        let silent = silence(address, addresses).await;
        let beside = copies(folder.path(), &b).await;
        assert_eq!(silent.len(), SILENT, "they went on all the time");
        assert!(
            beside < 3 * calm + WAIT,
            "{beside:?} beside strangers from {addresses} addresses, {calm:?} without"
        );
    }
}

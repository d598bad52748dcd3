//! The answering end of a bulk connection: receives and sends pieces, each under a token.
//!
//! Owns: the order of steps for one piece and the time limits for its sender. Does not own: the tokens.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use tokio::time::timeout;

use super::halves::{Failure, Receiving, Sending, split};
use super::wire::{REPLY_BYTES, REQUEST_BYTES, Reply, Request};
use crate::error::TokenRefusal;
use crate::link::Grant;
use crate::tcp::greeting::{Hello, Purpose};
use crate::tcp::stream::Stream;
use crate::tcp::{Node, listen};

/// How long a connection that proved no name may take to show that it holds a token.
const FIRST: Duration = Duration::from_secs(30);

/// How long a peer's connection may wait for its next request: a pace may hold bytes back for minutes. If the other machine is gone, that
/// is noticed long before.
const IDLE: Duration = Duration::from_secs(600);

/// How long one piece may take. A MiB over a bad 1 Mbit/s link fits.
pub(crate) const PIECE: Duration = Duration::from_secs(30);

/// Refusals in a row after which a connection is no use. If a token is revoked during a transfer, as many are refused as pieces are on the
/// way.
const REFUSALS_MAX: usize = 64;

/// Serves one connection until it ends.
pub(crate) async fn serve(node: &Arc<Node>, mut stream: Stream, hello: Hello) -> io::Result<()> {
    let (encrypts, mut patience) = match stream {
        Stream::Plain(_) => (false, FIRST),
        Stream::Tls(_) => (node.settings.encrypt_bulk || hello.purpose == Purpose::Bulk, IDLE),
    };
    listen::welcome(node, &mut stream, encrypts).await?;
    let (mut receiving, mut sending) = split(stream, encrypts)?;
    let mut refusals = 0;
    while refusals < REFUSALS_MAX {
        let request = timeout(patience, receiving.header::<REQUEST_BYTES>()).await;
        let Some(request) = request.unwrap_or(Ok(None))? else { return Ok(()) };
        let request = Request::decode(&request)?;
        let checked =
            node.tokens.check(request.token, &hello.identity.node, request.direction, &request.range);
        let (request, piece) =
            (&request, timeout(PIECE, answer(checked, &request, &mut receiving, &mut sending)));
        let said = piece.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
        if let Err(why) = said {
            tracing::debug!(peer = hello.identity.node, ?request, %why, "a piece was refused");
        }
        match said {
            Ok(()) => (refusals, patience) = (0, IDLE),
            Err(_) => refusals += 1,
        }
    }
    Ok(())
}

/// Moves one piece, or returns why it was refused. An error ends the connection.
async fn answer(
    checked: Result<Arc<Grant>, TokenRefusal>,
    request: &Request,
    receiving: &mut Receiving,
    sending: &mut Sending,
) -> io::Result<Result<(), TokenRefusal>> {
    let range = &request.range;
    let said = match checked.as_deref() {
        Ok(Grant::Receive { into, .. }) => {
            into.landing(range.clone());
            match receiving.piece(into.as_ref(), range).await {
                Ok(()) => {
                    into.landed(range.clone());
                    Ok(())
                }
                Err(Failure::Connection(error)) => return Err(error),
                Err(Failure::File { missing_bytes, source, .. }) => {
                    receiving.discard(missing_bytes).await?;
                    Err(refusal_of(&source, request))
                }
            }
        }
        Ok(Grant::Send { from, .. }) => {
            sending.header(&reply(request, Ok(())), true).await?;
            return match sending.piece(from.as_ref(), range).await {
                Ok(()) => Ok(Ok(())),
                Err(Failure::Connection(error)) => Err(error),
                Err(Failure::File { source, .. }) => {
                    // The reply has promised the bytes; only the end of the connection says that they do not come.
                    refusal_of(&source, request);
                    Err(source)
                }
            };
        }
        Err(why) => {
            if request.direction == crate::token::Direction::Receive {
                receiving.discard(range.end - range.start).await?;
            }
            Err(*why)
        }
    };
    sending.header(&reply(request, said), false).await?;
    Ok(said)
}

fn reply(request: &Request, said: Result<(), TokenRefusal>) -> [u8; REPLY_BYTES] {
    Reply { range: request.range.clone(), said }.encode()
}

/// Returns the refusal that the other end gets for an error of this node's file. Logs the error, unless space ran out.
fn refusal_of(error: &io::Error, request: &Request) -> TokenRefusal {
    if Errno::from_io_error(error) == Some(Errno::NOSPC) {
        return TokenRefusal::NoSpace;
    }
    tracing::warn!(%error, ?request, "moving a piece failed at this node's file");
    TokenRefusal::File
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{Address, BytesSink, Identity, Link, Peer, Service};
    use crate::range::PIECE_BYTES;
    use crate::tcp::{Security, Settings, Tcp, dial};
    use crate::token::{Direction, Token};
    use bytes::Bytes;
    use std::fs::File;
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::fs::FileExt;
    use std::sync::Mutex;

    struct Silent;

    #[async_trait::async_trait]
    impl Service for Silent {
        async fn call(&self, _from: Peer, body: Bytes) -> Result<Bytes, crate::Refusal> {
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

    struct Sink(File, Mutex<Vec<std::ops::Range<u64>>>);

    impl Sink {
        fn new(file: File) -> Arc<Self> {
            Arc::new(Self(file, Mutex::default()))
        }
    }

    impl BytesSink for Sink {
        fn file(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }

        fn landing(&self, piece: std::ops::Range<u64>) {
            self.1.lock().expect("no panic").push(piece);
        }
    }

    async fn node(name: &str) -> Tcp {
        let settings = Settings {
            listen: "127.0.0.1:0".parse().expect("an address"),
            security: Security::Insecure { off_loopback: false },
            encrypt_bulk: false,
            bulk_streams: 1,
        };
        let identity = Identity { cluster: "blue".into(), node: name.into(), incarnation: 1, start: 1 };
        Tcp::listen(identity, settings, Arc::new(Silent)).await.expect("it listens")
    }

    #[tokio::test]
    async fn a_piece_that_breaks_off_was_announced_before_its_first_byte_lay_there() {
        let (a, b) = (node("a").await, node("b").await);
        let to = Address { node: "b".into(), address: b.local_address().to_string() };
        let sink = Sink::new(tempfile::tempfile().expect("a file"));
        let into = Arc::clone(&sink) as Arc<dyn BytesSink>;
        let token = b.grant("a", Grant::Receive { into, limit_bytes: PIECE_BYTES });
        let (stream, _) = dial::dial(&a.node, &to, Purpose::Bulk).await.expect("welcome");
        let (receiving, mut sending) = split(stream, false).expect("a connection");
        let request = Request { direction: Direction::Receive, token, range: 0..PIECE_BYTES }.encode();
        sending.header(&request, false).await.expect("sent");
        sending.header(&vec![9; 300_000], false).await.expect("sent");
        let lie_there = || sink.0.metadata().expect("a file").len() > 0;
        for _ in 0..1000 {
            if lie_there() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(lie_there(), "nothing was written");
        drop((receiving, sending));
        assert_eq!(sink.1.lock().expect("no panic").as_slice(), std::slice::from_ref(&(0..PIECE_BYTES)));
    }

    #[tokio::test]
    async fn what_follows_a_refused_piece_on_its_connection_is_understood() {
        // Goal: a refusal is sent in order, and affects no other piece. Method: one connection, pieces of four kinds.
        let (a, b) = (node("a").await, node("b").await);
        let to = Address { node: "b".into(), address: b.local_address().to_string() };
        let full = Sink::new(File::options().write(true).open("/dev/full").expect("every Linux has it"));
        let good = Sink::new(tempfile::tempfile().expect("a file"));
        let limit_bytes = PIECE_BYTES;
        let full = b.grant("a", Grant::Receive { into: full, limit_bytes });
        let receive =
            b.grant("a", Grant::Receive { into: Arc::clone(&good) as Arc<dyn BytesSink>, limit_bytes });
        let (stream, _) = dial::dial(&a.node, &to, Purpose::Bulk).await.expect("welcome");
        let (mut receiving, mut sending) = split(stream, false).expect("a connection");
        let bytes = vec![9; usize::try_from(PIECE_BYTES).expect("small")];
        for (token, expected) in [
            (Token::random(), Err(TokenRefusal::Unknown)),
            (full, Err(TokenRefusal::NoSpace)),
            (receive, Ok(())),
        ] {
            let range = 0..PIECE_BYTES;
            let request = Request { direction: Direction::Receive, token, range: range.clone() }.encode();
            let (sent, reply) = tokio::join!(
                async {
                    sending.header(&request, false).await?;
                    let (first, second) = bytes.split_at(bytes.len() / 3);
                    sending.header(first, false).await?;
                    // The file has failed by then, in the middle of the piece.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    sending.header(second, false).await
                },
                receiving.header::<REPLY_BYTES>()
            );
            sent.expect("sent");
            let reply = reply.expect("a reply").expect("not the end");
            assert_eq!(Reply::decode(&reply).expect("a reply"), Reply { range, said: expected });
        }
        let mut landed = vec![0; bytes.len()];
        good.0.read_exact_at(&mut landed, 0).expect("it landed");
        assert_eq!(landed, bytes);
    }
}

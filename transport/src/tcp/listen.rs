//! Answering: accepting connections, checking who opens them, and handing them on.
//!
//! It owns the listener, the first byte that tells TLS from plain, and the limits on strangers. It does not own what
//! happens on a connection afterwards (`control`, `bulk`).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;

use super::greeting::{self, Answer, Hello, Purpose, VERSION, Welcome};
use super::stream::{self, Stream};
use super::{Node, Security, bulk, control};
use crate::CALLS_IN_FLIGHT_MAX;
use crate::error::Mismatch;
use crate::link::Peer;
use crate::names::proves;

/// Connections that have not said who they are; each may hold a descriptor and some KiB for [`GREETING`]. All nodes of
/// a large cluster may come at once after an outage; those beyond wait in the kernel's queue.
const STRANGERS_MAX: usize = 256;

/// From accepting to the end of the greeting.
const GREETING: Duration = Duration::from_secs(5);

/// Connections that carry bytes, of all peers: some streams each from the few nodes that a node is paired with. Each
/// holds three descriptors.
const BULK_MAX: usize = 512;

/// How long to rest when the system gives no more descriptors.
const REST: Duration = Duration::from_millis(50);

/// Accepts until the link closes.
pub(crate) async fn listen(node: Arc<Node>, listener: TcpListener) {
    let mut closed = node.closed.subscribe();
    let strangers = Arc::new(Semaphore::new(STRANGERS_MAX));
    let bulk = Arc::new(Semaphore::new(BULK_MAX));
    let accepting = async {
        loop {
            let Ok(stranger) = Arc::clone(&strangers).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((socket, address)) => {
                    tokio::spawn(guest(Arc::clone(&node), socket, address, stranger, Arc::clone(&bulk)));
                }
                Err(error) => {
                    tracing::warn!(%error, "accepting a connection failed");
                    tokio::time::sleep(REST).await;
                }
            }
        }
    };
    tokio::select! {
        _ = closed.wait_for(|closed| *closed) => {}
        () = accepting => {}
    }
    // Before `closed` is: who waits for closing may want the port.
    drop(listener);
}

async fn guest(
    node: Arc<Node>,
    socket: TcpStream,
    address: SocketAddr,
    stranger: OwnedSemaphorePermit,
    bulk: Arc<Semaphore>,
) {
    let mut closed = node.closed.subscribe();
    let greeting = tokio::time::timeout(GREETING, greet(&node, socket, address));
    let greeted = tokio::select! {
        _ = closed.wait_for(|closed| *closed) => return,
        greeted = greeting => greeted,
    };
    drop(stranger);
    let (stream, hello, nonce) = match greeted {
        Ok(Ok(greeted)) => greeted,
        Ok(Err(failure)) => {
            tracing::warn!(%address, %failure, "a connection was refused");
            return;
        }
        Err(_) => {
            tracing::debug!(%address, "a connection did not greet in time");
            return;
        }
    };
    let serving = async {
        match hello.purpose {
            Purpose::Control => control::answer(&node, stream, hello, nonce).await,
            Purpose::Bulk => match bulk.try_acquire() {
                Ok(_slot) => bulk::serve(&node, stream, hello, nonce).await,
                Err(_) => sorry(stream, Mismatch::Busy).await,
            },
        }
    };
    let served = tokio::select! {
        _ = closed.wait_for(|closed| *closed) => return,
        served = serving => served,
    };
    if let Err(failure) = served {
        tracing::debug!(%address, %failure, "a connection ended");
    }
}

/// TLS and the hello. The answer is said by who takes the connection over, when it agrees too.
async fn greet(node: &Node, socket: TcpStream, address: SocketAddr) -> io::Result<(Stream, Hello, [u8; 32])> {
    stream::configure(&socket)?;
    let mut first = [0];
    if socket.peek(&mut first).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let plain = first == [greeting::FIRST_BYTE];
    let stream = match &node.settings.security {
        Security::Certificates(certs) if !plain => {
            let stream = TlsAcceptor::from(Arc::clone(&certs.server)).accept(socket).await?;
            Stream::Tls(Box::new(stream.into()))
        }
        _ => Stream::Plain(socket),
    };
    let (stream, hello) = judge(node, stream, address, plain).await?;
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).expect("the kernel has random numbers");
    Ok((stream, hello, nonce))
}

async fn judge(
    node: &Node,
    mut stream: Stream,
    address: SocketAddr,
    plain: bool,
) -> io::Result<(Stream, Hello)> {
    let judged = match greeting::hear(&mut stream).await? {
        Ok(body) => Hello::decode(&body).and_then(|hello| {
            hello.check(&node.identity)?;
            allowed(node, &stream, &hello, address, plain)?;
            Ok(hello)
        }),
        Err(why) => Err(why),
    };
    match judged {
        Ok(hello) => Ok((stream, hello)),
        Err(why) => Err(sorry(stream, why.clone()).await.err().unwrap_or_else(|| io::Error::other(why))),
    }
}

/// Whether what the connection proves is enough for what it wants.
fn allowed(
    node: &Node,
    stream: &Stream,
    hello: &Hello,
    address: SocketAddr,
    plain: bool,
) -> Result<(), Mismatch> {
    match (&node.settings.security, stream) {
        (Security::Insecure { off_loopback }, _) => {
            if *off_loopback || address.ip().is_loopback() {
                return Ok(());
            }
            Err(Mismatch::Insecure { address: address.to_string() })
        }
        (Security::Certificates(_), Stream::Tls(stream)) => {
            let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
            let missing = || Mismatch::Certificate("there is none".into());
            proves(certificate.ok_or_else(missing)?, &node.identity.cluster, &hello.identity.node)
        }
        // Plain bulk: the token proves the right to each piece.
        (Security::Certificates(_), _) if hello.purpose == Purpose::Bulk && !node.settings.encrypt_bulk => {
            Ok(())
        }
        (Security::Certificates(_), _) => Err(Mismatch::Certificate(format!(
            "this node wants one, and the connection is {}",
            if plain { "plain" } else { "unknown" }
        ))),
    }
}

/// Says no, and why.
pub(crate) async fn sorry(mut stream: Stream, why: Mismatch) -> io::Result<()> {
    greeting::say(&mut stream, &Answer::Sorry(why).encode()).await?;
    stream.shutdown().await
}

/// Says yes.
pub(crate) async fn welcome(node: &Node, stream: &mut Stream, nonce: [u8; 32]) -> io::Result<()> {
    let credits = u16::try_from(CALLS_IN_FLIGHT_MAX).expect("few");
    let identity = node.identity.clone();
    let welcome = Welcome { identity, epoch: node.service.epoch(), credits, nonce };
    greeting::say(stream, &Answer::Welcome(welcome).encode()).await
}

/// Who said this.
pub(crate) fn peer(hello: &Hello) -> Peer {
    let crate::Identity { node, incarnation, start, .. } = hello.identity.clone();
    Peer { node, incarnation, start }
}

const _: () = assert!(VERSION > 0, "zero is what a cleared buffer says");

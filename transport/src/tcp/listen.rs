//! Answering: accepting connections, checking who opens them, and handing them on.
//!
//! Owns: the listener and the first byte that tells TLS from plain. Does not own: the limits on connections that have proven nothing
//! (`strangers`), nor what happens on a connection afterwards (`control`, `bulk`).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

use super::greeting::{self, Answer, Hello, Purpose, VERSION, Welcome};
use super::strangers::Stranger;
use super::stream::{self, Stream};
use super::{Node, Security, bulk, control};
use crate::CALLS_IN_FLIGHT_MAX;
use crate::error::Mismatch;
use crate::link::Peer;
use crate::names::proves;

/// Time limit from accepting to the end of the greeting: two lost packets fit. A connection that takes longer than a handshake may be
/// closed for a newcomer before that.
const GREETING: Duration = Duration::from_secs(5);

/// Connections that carry bytes, of all peers: some streams each from the few nodes that a node is paired with. Each holds a descriptor and
/// half a MiB, or three descriptors where it is plain. Where nodes have certificates only a peer may open such a connection.
const BULK_MAX: usize = 512;

/// The pause when the system gives no more descriptors.
const REST: Duration = Duration::from_millis(50);

/// Accepts connections until the link closes.
pub(crate) async fn listen(node: Arc<Node>, listener: TcpListener) {
    let mut closed = node.closed.subscribe();
    let bulk = Arc::new(Semaphore::new(BULK_MAX));
    let accepting = async {
        loop {
            node.strangers.room().await;
            match listener.accept().await {
                Ok((socket, address)) => {
                    let Some(stranger) = node.strangers.admit(address.ip(), Instant::now()) else { continue };
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
    // Dropped before `closed`: a task that waits for closing may want the port.
    drop(listener);
}

async fn guest(
    node: Arc<Node>,
    socket: TcpStream,
    address: SocketAddr,
    mut stranger: Stranger,
    bulk: Arc<Semaphore>,
) {
    let mut closed = node.closed.subscribe();
    let greeting = tokio::time::timeout(GREETING, greet(&node, socket, address));
    let greeted = tokio::select! {
        _ = closed.wait_for(|closed| *closed) => return,
        () = stranger.gives_way() => {
            tracing::debug!(%address, "a connection that had proven nothing gave way to another");
            return;
        }
        greeted = greeting => greeted,
    };
    drop(stranger);
    let (stream, hello) = match greeted {
        Ok(Ok(greeted)) => greeted,
        Ok(Err(failure)) => {
            if node.strangers.may_log(address.ip()) {
                tracing::warn!(%address, %failure, "a connection was refused");
            }
            return;
        }
        Err(_) => {
            tracing::debug!(%address, "a connection did not greet in time");
            return;
        }
    };
    let serving = async {
        match hello.purpose {
            Purpose::Control => control::answer(&node, stream, hello).await,
            Purpose::Bulk | Purpose::OpenBulk => match bulk.try_acquire() {
                Ok(_slot) => bulk::serve(&node, stream, hello).await,
                Err(_) => sorry(stream, Mismatch::Busy).await,
            },
        }
    };
    let served = tokio::select! {
        _ = closed.wait_for(|closed| *closed) => return,
        served = serving => served,
    };
    match served {
        Err(failure) if failure.kind() == io::ErrorKind::InvalidData => {
            tracing::warn!(%address, %failure, "a connection was ended: what came is not what a peer says");
        }
        Err(failure) => tracing::debug!(%address, %failure, "a connection ended"),
        Ok(()) => {}
    }
}

/// Does TLS and reads the hello. The task that takes over the connection sends the answer, when it agrees too.
async fn greet(node: &Node, socket: TcpStream, address: SocketAddr) -> io::Result<(Stream, Hello)> {
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
    judge(node, stream, address, plain).await
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

/// Checks that a connection's proof suffices for its purpose.
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
        (Security::Certificates(_), _) => Err(Mismatch::Certificate(format!(
            "this node wants one, and the connection is {}",
            if plain { "plain" } else { "unknown" }
        ))),
    }
}

/// Sends a refusal and its reason.
pub(crate) async fn sorry(mut stream: Stream, why: Mismatch) -> io::Result<()> {
    greeting::say(&mut stream, &Answer::Sorry(why).encode()).await?;
    stream.shutdown().await
}

/// Sends the welcome, and whether what follows is encrypted.
pub(crate) async fn welcome(node: &Node, stream: &mut Stream, encrypts: bool) -> io::Result<()> {
    let credits = u16::try_from(CALLS_IN_FLIGHT_MAX).expect("few");
    let identity = node.identity.clone();
    let welcome = Welcome { identity, epoch: node.service.epoch(), credits, encrypts };
    greeting::say(stream, &Answer::Welcome(welcome).encode()).await
}

/// Returns the peer that sent this hello.
pub(crate) fn peer(hello: &Hello) -> Peer {
    let crate::Identity { node, incarnation, start, .. } = hello.identity.clone();
    Peer { node, incarnation, start }
}

const _: () = assert!(VERSION > 0, "zero is what a cleared buffer says");

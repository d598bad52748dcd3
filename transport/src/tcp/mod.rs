//! Links over TCP: messages on control connections, bytes on connections of their own.
//!
//! Owns: a node's end, which is its settings, its open connections, and when to try again. Each step has a file: `greeting` (first
//! message), `listen` and `dial` (opening a connection), `strangers` (limits until a connection proves its node), `control` (messages),
//! `bulk` (bytes), `stream` (plain or TLS).
//!
//! ```text
//!   node A                                     node B
//!   Control ══ calls, tells ═════════════════► answer ──► Service       one control connection each way
//!   answer  ◄═════════════════ calls, tells ══ Control
//!   push, pull ── pieces of files, by token ─► serve  ──► BytesSink     bulk: its own connections, kept a while
//! ```

mod bulk;
mod control;
mod dial;
pub mod greeting;
mod listen;
mod strangers;
mod stream;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout_at};

use self::control::{Control, REQUEST_UNITS};
use self::greeting::Purpose;
use self::strangers::Strangers;
use crate::TELL_CONNECTS;
use crate::certs::Certs;
use crate::error::{LinkError, Mismatch, check_body};
use crate::link::{Address, BytesSink, BytesSource, Grant, Identity, Link, Pace, Peer, Service};
use crate::names::is_name;
use crate::peers::{Peers, Side};
use crate::token::{Token, Tokens};

/// The pause after the first failure to connect; doubles with each.
const BACK_OFF_FIRST: Duration = Duration::from_millis(10);

/// The longest pause: a node that comes back is found within that time.
const BACK_OFF_MAX: Duration = Duration::from_millis(500);

/// Addresses whose connection is remembered, as many as peers. Beyond the limit, those without an open connection are forgotten.
const SLOTS_MAX: usize = 20_000;

/// Interval at which old entries are forgotten.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// The most streams of one push or pull; each is a connection at both ends.
pub const BULK_STREAMS_MAX: usize = 8;

/// How connections prove the peer's identity.
#[derive(Debug, Clone)]
pub enum Security {
    /// Mutual TLS on every connection; [`Settings::encrypt_bulk`] decides whether connections that carry bytes stay encrypted.
    Certificates(Certs),
    /// Nothing is proved or hidden.
    Insecure {
        /// If false, both ends must have loopback addresses; any other is refused. True is for networks that belong to a test.
        off_loopback: bool,
    },
}

/// The choices of a node's owner about its links.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The address to listen on; port 0 chooses a free port.
    pub listen: SocketAddr,
    /// The proof that peers must give.
    pub security: Security,
    /// Whether bytes of files are encrypted. If both ends have it off, the bytes can be read on the way; either end's keyed checksums
    /// detect and refuse a change. Without certificates bytes are neither encrypted nor authenticated, whatever this says. Design 0002 has
    /// the cost.
    pub encrypt_bulk: bool,
    /// Connections that one push or pull uses side by side, 1 to [`BULK_STREAMS_MAX`]. More than one helps where one
    /// core of the receiver, or one connection's share of the network, is the limit.
    pub bulk_streams: usize,
}

/// Why a node cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The address is taken, or not this machine's.
    #[error("listening on {address} failed")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// Links without certificates are for loopback.
    #[error("{address} is not a loopback address, and links without certificates are for loopback only")]
    Insecure {
        /// The address.
        address: SocketAddr,
    },
    /// A name that no node or cluster can have.
    #[error("`{name}` is no name (1 to 64 letters, digits, '.', '_' or '-', the first no '.' or '-')")]
    Name {
        /// The name.
        name: String,
    },
}

/// State that all tasks of one node's link share.
pub(crate) struct Node {
    identity: Identity,
    settings: Settings,
    service: Arc<dyn Service>,
    peers: Arc<Peers>,
    tokens: Arc<Tokens>,
    /// Set to true once. Each task that holds a connection holds a receiver, so that closing can wait for all.
    closed: watch::Sender<bool>,
    /// The budget of received requests, in units of a KiB.
    request_units: Arc<Semaphore>,
    strangers: Arc<Strangers>,
    slots: Mutex<HashMap<Address, Slot>>,
    pool: bulk::Pool,
}

/// The control connection to one address. Locked while the connection is being opened, so that it is opened once.
type Slot = Arc<tokio::sync::Mutex<Option<Control>>>;

/// A node's links over TCP. Dropping it closes them.
pub struct Tcp {
    node: Arc<Node>,
    address: SocketAddr,
}

impl fmt::Debug for Tcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tcp({} at {}, peers {:?})", self.node.identity.node, self.address, self.node.peers)
    }
}

impl Tcp {
    /// Listens, and answers with `service` from then on. Must run inside a tokio runtime, which the link keeps using.
    ///
    /// # Errors
    /// If the node cannot, or must not, listen there.
    pub async fn listen(
        identity: Identity,
        settings: Settings,
        service: Arc<dyn Service>,
    ) -> Result<Self, ListenError> {
        for name in [&identity.cluster, &identity.node] {
            if !is_name(name) {
                return Err(ListenError::Name { name: name.clone() });
            }
        }
        let address = settings.listen;
        if matches!(settings.security, Security::Insecure { off_loopback: false })
            && !address.ip().is_loopback()
        {
            return Err(ListenError::Insecure { address });
        }
        let bind = |source| ListenError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        let tokens = Arc::new(Tokens::default());
        let (closed, _) = watch::channel(false);
        let strangers = Strangers::new(matches!(settings.security, Security::Certificates(_)));
        let node = Arc::new(Node {
            identity,
            settings,
            strangers,
            peers: Peers::new(Arc::clone(&service), Arc::clone(&tokens)),
            service,
            tokens,
            closed,
            request_units: Arc::new(Semaphore::new(REQUEST_UNITS)),
            slots: Mutex::default(),
            pool: bulk::Pool::default(),
        });
        tokio::spawn(listen::listen(Arc::clone(&node), listener));
        tokio::spawn(keep_house(Arc::clone(&node)));
        Ok(Self { node, address })
    }

    /// Returns the address where this node listens, with the port that was chosen.
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    fn check_open(&self) -> Result<(), LinkError> {
        if *self.node.closed.borrow() { Err(LinkError::Closed) } else { Ok(()) }
    }

    fn shut(&self) {
        self.node.closed.send_replace(true);
        self.node.slots.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.node.pool.close();
        self.node.tokens.clear();
    }

    /// Returns the open connection to an address. If there is none, tries to open it until `until`, with pauses that double.
    async fn connect(&self, to: &Address, until: Instant, deadline: Duration) -> Result<Control, LinkError> {
        let mut pause = BACK_OFF_FIRST;
        let mut last = None;
        loop {
            self.check_open()?;
            match timeout_at(until, self.node.control(to)).await {
                Ok(Err(error @ LinkError::Unreachable { .. })) if Instant::now() + pause < until => {
                    last = Some(error);
                    sleep(pause).await;
                    pause = BACK_OFF_MAX.min(pause * 2);
                }
                Ok(connected) => return connected,
                Err(_) => {
                    return Err(last.unwrap_or_else(|| LinkError::Unreachable {
                        node: to.node.clone(),
                        address: to.address.clone(),
                        source: io::Error::new(
                            io::ErrorKind::TimedOut,
                            format!("no connection within {} ms", deadline.as_millis()),
                        ),
                    }));
                }
            }
        }
    }
}

impl Node {
    fn slot(&self, to: &Address) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.len() >= SLOTS_MAX {
            // A locked slot is being opened.
            slots.retain(|_, slot| {
                slot.try_lock().map_or(true, |control| control.as_ref().is_some_and(Control::is_open))
            });
        }
        Arc::clone(slots.entry(to.clone()).or_default())
    }

    async fn control(self: &Arc<Self>, to: &Address) -> Result<Control, LinkError> {
        let slot = self.slot(to);
        let mut slot = slot.lock().await;
        if let Some(control) = slot.as_ref().filter(|control| control.is_open()) {
            return Ok(control.clone());
        }
        // Held until the connection's task holds its own receiver, so that closing waits for both.
        let mut closed = self.closed.subscribe();
        let (stream, welcome) = tokio::select! {
            biased;
            _ = closed.wait_for(|closed| *closed) => return Err(LinkError::Closed),
            dialled = dial::dial(self, to, Purpose::Control) => dialled?,
        };
        let Identity { node, incarnation, start, .. } = welcome.identity.clone();
        let peer = Peer { node, incarnation, start };
        let admitted = self.peers.admit(&peer, Side::Ours).map_err(|why| mismatch(to, why))?;
        self.service.saw_epoch(&peer, welcome.epoch);
        let control = Control::open(closed.clone(), stream, &welcome, admitted);
        *slot = Some(control.clone());
        Ok(control)
    }
}

fn mismatch(to: &Address, why: Mismatch) -> LinkError {
    LinkError::Handshake { node: to.node.clone(), address: to.address.clone(), why }
}

async fn keep_house(node: Arc<Node>) {
    let mut closed = node.closed.subscribe();
    let mut ticks = tokio::time::interval(HOUSEKEEPING);
    loop {
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => return,
            _ = ticks.tick() => {}
        }
        let now = std::time::Instant::now();
        node.tokens.sweep(now);
        node.pool.sweep(now);
        if let Some((refused, address)) = node.strangers.take_refused() {
            tracing::warn!(refused, last = %address, "connections that had proven nothing were closed, more than are logged one by one");
        }
    }
}

#[async_trait]
impl Link for Tcp {
    async fn call(&self, to: &Address, mut body: Bytes, deadline: Duration) -> Result<Bytes, LinkError> {
        check_body(&body)?;
        let until = Instant::now() + deadline;
        loop {
            let control = self.connect(to, until, deadline).await?;
            match timeout_at(until, control.call(body)).await {
                Err(_) => return Err(LinkError::Deadline { node: to.node.clone(), deadline }),
                Ok(Ok(answer)) => return answer.map_err(|lost| lost.into_error(&to.node)),
                // The connection ended before it took the request: try once more on another.
                Ok(Err(unsent)) => body = unsent,
            }
        }
    }

    async fn tell(&self, to: &Address, mut body: Bytes) -> Result<(), LinkError> {
        check_body(&body)?;
        let until = Instant::now() + TELL_CONNECTS;
        loop {
            let control = self.connect(to, until, TELL_CONNECTS).await?;
            match control.tell(body).await {
                Ok(()) => return Ok(()),
                Err(unsent) => body = unsent,
            }
        }
    }

    fn grant(&self, peer: &str, grant: Grant) -> Token {
        self.node.tokens.grant(peer, grant)
    }

    fn revoke(&self, token: Token) {
        self.node.tokens.revoke(token);
    }

    async fn push(
        &self,
        to: &Address,
        token: Token,
        from: Arc<dyn BytesSource>,
        ranges: &[Range<u64>],
        pace: &dyn Pace,
    ) -> Result<(), LinkError> {
        self.check_open()?;
        bulk::push(&self.node, to, token, &from, ranges, pace).await
    }

    async fn pull(
        &self,
        from: &Address,
        token: Token,
        ranges: &[Range<u64>],
        into: Arc<dyn BytesSink>,
    ) -> Result<(), LinkError> {
        self.check_open()?;
        bulk::pull(&self.node, from, token, &into, ranges).await
    }

    async fn close(&self) {
        self.shut();
        self.node.closed.closed().await;
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.shut();
    }
}

//! What every link promises: the words a node says to another, and the bytes it moves.
//!
//! It owns the traits and the plain types in them. It does not own how anything travels (`loopback`, `tcp`).

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::error::{LinkError, Refusal};
use crate::token::Token;

/// The longest body of a call, an answer or a tell. A list of the chunks of a 1 TiB file fits; more is sent in parts.
pub const BODY_BYTES_MAX: usize = 16 << 20;

/// Who we are. The certificate proves `cluster` and `node`; the handshake tells the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Nodes of other clusters are refused.
    pub cluster: String,
    /// The name of this node.
    pub node: String,
    /// One life of this node's memory.
    pub incarnation: u64,
    /// One run of this node's daemon. Unordered: of two with one incarnation the one that connects later is alive.
    pub start: u64,
}

/// Who speaks, as the connection proved it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Peer {
    /// The node's name; over TLS its certificate says so.
    pub node: String,
    /// One life of its memory.
    pub incarnation: u64,
    /// One run of its daemon.
    pub start: u64,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:016x}, start {:016x})", self.node, self.incarnation, self.start)
    }
}

/// Whom to call, and where. Who answers there must prove to be `node`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    /// The node's name.
    pub node: String,
    /// `host:port`; for [`Loopback`](crate::Loopback) the name it was joined under.
    pub address: String,
}

/// What a node answers with. One per link, shared by all connections.
#[async_trait]
pub trait Service: Send + Sync + 'static {
    /// Answers a request. Runs to its end even when the caller has given up; at most [`BODY_BYTES_MAX`] either way.
    async fn call(&self, from: Peer, body: Bytes) -> Result<Bytes, Refusal>;

    /// Hears a one-way word. Tells of one connection come in the order they were said, one at a time; a call on the
    /// same connection starts after the tells before it. Must not block: what follows on the connection waits.
    fn tell(&self, from: Peer, body: Bytes);

    /// The coordinator's epoch as this node knows it; told in the handshake.
    fn epoch(&self) -> u64;

    /// A peer told its epoch in a handshake.
    fn saw_epoch(&self, from: &Peer, epoch: u64);

    /// The first control connection with this peer is there, whoever opened it.
    fn connected(&self, peer: &Peer);

    /// The last control connection with this peer is gone. Comes once for each `connected`, after it.
    fn disconnected(&self, peer: &Peer);
}

/// One node's end of the links to all others.
///
/// Cancelling any of these futures leaks nothing; a cancelled call may still have been carried out.
#[async_trait]
pub trait Link: Send + Sync + fmt::Debug {
    /// Asks `to` and waits for its answer, connecting first (with bounded back-off) when it must.
    ///
    /// # Errors
    /// [`LinkError::Refused`] is the service's own answer. After [`LinkError::Deadline`] and [`LinkError::Lost`] the
    /// request may have been carried out, so it must be repeatable.
    async fn call(&self, to: &Address, body: Bytes, deadline: Duration) -> Result<Bytes, LinkError>;

    /// Says something to `to` without an answer. `Ok` means that it was handed to the connection, not that it arrived.
    /// Waits while the connection's queue is full.
    ///
    /// # Errors
    /// Those of connecting, and a body that is too long.
    async fn tell(&self, to: &Address, body: Bytes) -> Result<(), LinkError>;

    /// Lets the node `peer` move the bytes of one file. The token goes to it in a call; it works for that node only,
    /// over as many connections as it takes, until it is revoked or the peer has been without a control connection
    /// for [`TOKEN_ORPHANED_MS`](crate::TOKEN_ORPHANED_MS).
    fn grant(&self, peer: &str, grant: Grant) -> Token;

    /// Takes a token back. Pieces that are moving are finished, then refused. A token that is gone already is fine.
    fn revoke(&self, token: Token);

    /// Writes these ranges of `from` into the file behind `token` at `to`, at the same offsets. On `Ok` the receiver
    /// has written, and its sink has been told of, every byte. Asks `pace` before each piece.
    ///
    /// # Errors
    /// [`LinkError::Cut`] carries the ranges that did land: the same token goes on with the others.
    async fn push(
        &self,
        to: &Address,
        token: Token,
        from: Arc<dyn BytesSource>,
        ranges: &[Range<u64>],
        pace: &dyn Pace,
    ) -> Result<(), LinkError>;

    /// Reads these ranges of the file behind `token` at `from` into `into`, at the same offsets.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    async fn pull(
        &self,
        from: &Address,
        token: Token,
        ranges: &[Range<u64>],
        into: Arc<dyn BytesSink>,
    ) -> Result<(), LinkError>;

    /// Stops listening, closes every connection, lets go of every granted file, and waits until that is done. Calls
    /// after it are [`LinkError::Closed`]. Dropping the last handle closes too, without waiting.
    async fn close(&self);
}

/// What a token lets a peer do.
pub enum Grant {
    /// Write into our file, below `limit_bytes`.
    Receive {
        /// The file.
        into: Arc<dyn BytesSink>,
        /// No byte at or beyond this offset.
        limit_bytes: u64,
    },
    /// Read from our file, below `size_bytes`.
    Send {
        /// The file.
        from: Arc<dyn BytesSource>,
        /// No byte at or beyond this offset.
        size_bytes: u64,
    },
}

impl fmt::Debug for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Receive { limit_bytes, .. } => write!(f, "Receive(below {limit_bytes} bytes)"),
            Self::Send { size_bytes, .. } => write!(f, "Send(below {size_bytes} bytes)"),
        }
    }
}

/// A file that bytes come from. It must not be cut shorter than the ranges while they move.
pub trait BytesSource: Send + Sync + 'static {
    /// A readable, seekable descriptor; its offset is neither used nor moved.
    fn file(&self) -> BorrowedFd<'_>;
}

/// A file that bytes go into.
pub trait BytesSink: Send + Sync + 'static {
    /// A writable, seekable descriptor without `O_APPEND`; its offset is neither used nor moved. Holes that no range
    /// covers stay holes.
    fn file(&self) -> BorrowedFd<'_>;

    /// From now on bytes of this piece may be written, all or some: what a connection that breaks leaves behind is told
    /// to nobody else. Called before the first of them, in any order, from several tasks at once. Must be quick.
    fn landing(&self, _piece: Range<u64>) {}

    /// All bytes of this piece are written. Called once per piece that landed, in any order, from several tasks at once, before
    /// the sender hears of it; a piece that is sent again lands again. Must be quick.
    fn landed(&self, _piece: Range<u64>) {}
}

impl BytesSource for std::fs::File {
    fn file(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(self)
    }
}

/// Says when the next bytes may go.
#[async_trait]
pub trait Pace: Send + Sync {
    /// Returns when `bytes` more may be sent. Asked before each piece; not told of pieces that failed.
    async fn take(&self, bytes: u64);
}

/// No limit.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unpaced;

#[async_trait]
impl Pace for Unpaced {
    async fn take(&self, _bytes: u64) {}
}

/// What a local file did wrong, as [`LinkError::Local`] tells it.
pub(crate) fn local(doing: &'static str, range: &Range<u64>, source: io::Error) -> LinkError {
    LinkError::Local { doing, offset: range.start, bytes: range.end.saturating_sub(range.start), source }
}

//! The contract of every link: the messages that a node sends to another, and the bytes it moves.
//!
//! Owns: the traits and the plain types in them. Does not own: how anything travels (`loopback`, `tcp`).

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

/// The longest body of a call, an answer or a tell. A list of the chunks of a 1 TiB file fits; a longer one is sent in parts.
pub const BODY_BYTES_MAX: usize = 16 << 20;

/// The local node. The certificate proves `cluster` and `node`; the handshake transmits the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The cluster's name. Nodes of other clusters are refused.
    pub cluster: String,
    /// The name of this node.
    pub node: String,
    /// Number of this life of the node's memory.
    pub incarnation: u64,
    /// Number of this run of the node's daemon. Unordered: of two runs with the same incarnation the one that connects later is alive.
    pub start: u64,
}

/// The sender, as the connection proved it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Peer {
    /// The node's name. Over TLS its certificate proves it.
    pub node: String,
    /// Number of the life of its memory.
    pub incarnation: u64,
    /// Number of the run of its daemon.
    pub start: u64,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:016x}, start {:016x})", self.node, self.incarnation, self.start)
    }
}

/// The node to call, and where. The node that answers there must prove to be `node`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    /// The node's name.
    pub node: String,
    /// `host:port`; for [`Loopback`](crate::Loopback) the name under which the node was joined.
    pub address: String,
}

/// A node's handler of calls and tells. Each link has one service, shared by all connections.
#[async_trait]
pub trait Service: Send + Sync + 'static {
    /// Answers a request. Runs to its end even when the caller no longer waits. Both bodies have at most [`BODY_BYTES_MAX`].
    async fn call(&self, from: Peer, body: Bytes) -> Result<Bytes, Refusal>;

    /// Handles a one-way message. Tells of one connection come in the order in which they were sent, one at a time; a call on the same
    /// connection starts after the tells before it. Must not block: everything that follows on the connection waits.
    fn tell(&self, from: Peer, body: Bytes);

    /// Returns the coordinator's epoch as this node knows it, for the handshake.
    fn epoch(&self) -> u64;

    /// Notes the epoch that a peer sent in a handshake.
    fn saw_epoch(&self, from: &Peer, epoch: u64);

    /// Notes that the first control connection with this peer is open, whichever node opened it.
    fn connected(&self, peer: &Peer);

    /// Notes that the last control connection with this peer is closed. Called once for each `connected`, after it.
    fn disconnected(&self, peer: &Peer);
}

/// A node's end of the links to all others.
///
/// Cancelling any of these futures leaks nothing; a cancelled call may still have been carried out.
#[async_trait]
pub trait Link: Send + Sync + fmt::Debug {
    /// Asks `to` and waits for its answer. If there is no connection, connects first, with bounded back-off.
    ///
    /// # Errors
    /// [`LinkError::Refused`] is the service's own answer. After [`LinkError::Deadline`] and [`LinkError::Lost`] the request may have been
    /// carried out, so it must be repeatable.
    async fn call(&self, to: &Address, body: Bytes, deadline: Duration) -> Result<Bytes, LinkError>;

    /// Sends a message to `to` without an answer. `Ok` means that the connection took it, not that it arrived. Waits while the connection's
    /// queue is full.
    ///
    /// # Errors
    /// The errors of connecting, and a body that is too long.
    async fn tell(&self, to: &Address, body: Bytes) -> Result<(), LinkError>;

    /// Lets the node `peer` move the bytes of one file. The caller sends the token to the peer in a call. The token works for that node
    /// only, over any number of connections. A token ends when it is revoked, or the peer has been without a control connection for
    /// [`TOKEN_ORPHANED_MS`](crate::TOKEN_ORPHANED_MS).
    fn grant(&self, peer: &str, grant: Grant) -> Token;

    /// Revokes a token. Pieces that are moving are finished; later ones are refused. Revoking an unknown token does nothing.
    fn revoke(&self, token: Token);

    /// Writes these ranges of `from` into the file behind `token` at `to`, at the same offsets. On `Ok` the receiver has written every byte
    /// and notified its sink. Asks `pace` before each piece.
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

    /// Stops listening, closes every connection, releases every granted file, and waits until that is done. Later calls return
    /// [`LinkError::Closed`]. Dropping the last handle closes too, without waiting.
    async fn close(&self);
}

/// The access that a token gives a peer.
pub enum Grant {
    /// Write into this node's file, below `limit_bytes`.
    Receive {
        /// The file.
        into: Arc<dyn BytesSink>,
        /// First offset that the peer may not write.
        limit_bytes: u64,
    },
    /// Read from this node's file, below `size_bytes`.
    Send {
        /// The file.
        from: Arc<dyn BytesSource>,
        /// First offset that the peer may not read.
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

/// A file that bytes come from. The file must not be cut shorter than the ranges while they move.
pub trait BytesSource: Send + Sync + 'static {
    /// Returns a readable, seekable descriptor; its offset is neither used nor moved.
    fn file(&self) -> BorrowedFd<'_>;
}

/// A file that bytes go into.
pub trait BytesSink: Send + Sync + 'static {
    /// Returns a writable, seekable descriptor without `O_APPEND`; its offset is neither used nor moved. Holes that no range covers stay
    /// holes.
    fn file(&self) -> BorrowedFd<'_>;

    /// Announces that bytes of this piece may be written from now on, all or some. If the connection breaks, no other call reports what it
    /// leaves behind. Called before the first byte, in any order, from several tasks at once. Must be quick.
    fn landing(&self, _piece: Range<u64>) {}

    /// Announces that all bytes of this piece are written. Called once per piece that landed, in any order, from several tasks at once,
    /// before the sender is notified. A piece that is sent again lands again. Must be quick.
    fn landed(&self, _piece: Range<u64>) {}
}

impl BytesSource for std::fs::File {
    fn file(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(self)
    }
}

/// Decides when the next bytes may go.
#[async_trait]
pub trait Pace: Send + Sync {
    /// Returns when `bytes` more may be sent. Called before each piece; not notified of pieces that failed.
    async fn take(&self, bytes: u64);
}

/// No limit.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unpaced;

#[async_trait]
impl Pace for Unpaced {
    async fn take(&self, _bytes: u64) {}
}

/// Makes a [`LinkError::Local`] from an error of a local file.
pub(crate) fn local(doing: &'static str, range: &Range<u64>, source: io::Error) -> LinkError {
    LinkError::Local { doing, offset: range.start, bytes: range.end.saturating_sub(range.start), source }
}

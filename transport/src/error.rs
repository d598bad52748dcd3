//! Errors between two nodes, sorted by what the caller should do about them.
//!
//! Owns: the errors of links and the refusals of services. Does not own: the refusals of datagrams, which are counted
//! and not returned.

use std::fmt;
use std::io;
use std::ops::Range;
use std::time::Duration;

use crate::link::BODY_BYTES_MAX;

/// The reaction expected of the caller. The words are those of the engine's own error kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkErrorKind {
    /// The request is wrong; repeating it will not help.
    Invalid,
    /// There is no such thing.
    NotFound,
    /// The bytes are wrong.
    Corrupt,
    /// The peer or something it needs is away; retry later.
    Unavailable,
    /// A newer coordinator or incarnation decides now; stop.
    Fenced,
    /// A budget is exhausted; free something or raise it.
    NoSpace,
}

/// A service's "no". Refusals travel, so their words are for the reader at the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reaction expected of the caller.
    pub kind: LinkErrorKind,
    /// The refused request and the reason; cut at [`Refusal::REASON_BYTES_MAX`] bytes when it travels.
    pub reason: String,
}

impl Refusal {
    /// The longest reason, in bytes: a sentence or two.
    pub const REASON_BYTES_MAX: usize = 4096;

    /// Makes a refusal with its reason.
    pub fn new(kind: LinkErrorKind, reason: impl Into<String>) -> Self {
        Self { kind, reason: reason.into() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Refusal {}

/// Why a link could not carry out a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// No connection: nobody listens, there is no route, or the peer did not finish the handshake.
    #[error("{node} does not answer at {address}; look whether it runs and is reachable")]
    Unreachable {
        /// The node that was called.
        node: String,
        /// The address that was tried.
        address: String,
        /// The error of the last attempt.
        source: io::Error,
    },
    /// The deadline passed. The request may have been carried out.
    #[error("{node} gave no answer within {} ms; the request may have been carried out", .deadline.as_millis())]
    Deadline {
        /// The node that was asked.
        node: String,
        /// How long the caller waited.
        deadline: Duration,
    },
    /// The connection ended while the answer was awaited. The request may have been carried out.
    #[error("the connection to {node} ended before it answered; the request may have been carried out")]
    Lost {
        /// The node that was asked.
        node: String,
    },
    /// The peer's service refused.
    #[error("{node} refused: {refusal}")]
    Refused {
        /// The node that refused.
        node: String,
        /// The service's refusal.
        refusal: Refusal,
    },
    /// A body beyond [`BODY_BYTES_MAX`](crate::BODY_BYTES_MAX); nothing was sent.
    #[error("a body of {bytes} bytes is more than a frame may carry ({limit_bytes}); send it in parts")]
    TooBig {
        /// The body's length.
        bytes: usize,
        /// The longest body.
        limit_bytes: usize,
    },
    /// The two nodes may not speak with each other. Repeating does not help until somebody changes the configuration.
    #[error("no handshake with {node} at {address}: {why}")]
    Handshake {
        /// The node that was called.
        node: String,
        /// The address that was tried.
        address: String,
        /// The objection, and which end raised it.
        why: Mismatch,
    },
    /// The peer does not accept this token: it was revoked, is another node's, or the range is beyond its limit.
    #[error("{node} refused the token for bytes {}..{}: {why}", .range.start, .range.end)]
    Token {
        /// The node that refused.
        node: String,
        /// The piece that was refused.
        range: Range<u64>,
        /// The peer's reason.
        why: TokenRefusal,
    },
    /// Moving bytes ended early. The same token goes on with the missing ranges.
    #[error("moving bytes with {node} was cut after {} bytes: {reason}", sum(.landed))]
    Cut {
        /// The other node.
        node: String,
        /// Ranges that are written and confirmed at the receiver, sorted and joined.
        landed: Vec<Range<u64>>,
        /// Why the transfer ended.
        reason: String,
    },
    /// The local file failed.
    #[error("{doing} {bytes} bytes at offset {offset} of the local file failed")]
    Local {
        /// Reading or writing.
        doing: &'static str,
        /// Where the operation began in the file.
        offset: u64,
        /// Length of the operation.
        bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The local end of the link was closed.
    #[error("this node's link is closed")]
    Closed,
}

/// Why two nodes do not speak.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// The other end belongs to another cluster.
    #[error("it is of cluster `{theirs}`, and this node is of cluster `{ours}`")]
    OtherCluster {
        /// Our cluster.
        ours: String,
        /// The other end's cluster.
        theirs: String,
    },
    /// The other end speaks another version of the protocol.
    #[error(
        "it speaks version {theirs} of the link protocol, and this node speaks {ours}; upgrade the older one"
    )]
    OtherVersion {
        /// The local version.
        ours: u16,
        /// The other end's version.
        theirs: u16,
    },
    /// Another node answers at that address.
    #[error("`{found}` answers there, not `{wanted}`; correct the address")]
    OtherNode {
        /// The node that was called.
        wanted: String,
        /// The node that answered.
        found: String,
    },
    /// A certificate is missing, expired, of another authority, or does not name the node or the cluster.
    #[error("certificate: {0}")]
    Certificate(String),
    /// Another life of a node with this name is connected.
    #[error(
        "two nodes are called `{node}`: incarnation {live:016x} is connected, {refused:016x} is refused; stop or rename one"
    )]
    TwoNodes {
        /// The name they share.
        node: String,
        /// The incarnation that is connected.
        live: u64,
        /// The incarnation that is refused.
        refused: u64,
    },
    /// The owner of the local node did not allow plain connections off loopback.
    #[error("`{address}` is not a loopback address, and links without certificates are for loopback only")]
    Insecure {
        /// The other end's address.
        address: String,
    },
    /// The other end did not send a greeting of this protocol.
    #[error("what answers there does not speak this protocol: {0}")]
    NotALink(String),
    /// The other end has as many connections as it takes.
    #[error("it has as many connections as it takes")]
    Busy,
}

/// Why a token was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenRefusal {
    /// Never given, revoked, or forgotten because the link was gone too long. Ask for another.
    #[error("no such token; it was revoked, or the link was gone too long")]
    Unknown,
    /// Given to another node.
    #[error("the token was given to another node")]
    OtherNode,
    /// A token for sending does not receive, nor the other way round.
    #[error("the token is for the other direction")]
    OtherDirection,
    /// The range ends beyond the limit of the grant.
    #[error("the range ends beyond the limit of the grant")]
    BeyondLimit,
    /// The receiver's file cannot take the bytes because its memory is full.
    #[error("its file could not take the bytes: no space")]
    NoSpace,
    /// The file at the other end failed for another reason.
    #[error("its file failed; its log says how")]
    File,
}

impl LinkError {
    /// Returns the reaction expected of the caller.
    pub fn kind(&self) -> LinkErrorKind {
        match self {
            Self::Unreachable { .. }
            | Self::Deadline { .. }
            | Self::Lost { .. }
            | Self::Cut { .. }
            | Self::Closed => LinkErrorKind::Unavailable,
            Self::Refused { refusal, .. } => refusal.kind,
            Self::TooBig { .. } => LinkErrorKind::Invalid,
            Self::Handshake { why, .. } => match why {
                Mismatch::Busy => LinkErrorKind::Unavailable,
                Mismatch::TwoNodes { .. } => LinkErrorKind::Fenced,
                _ => LinkErrorKind::Invalid,
            },
            Self::Token { why, .. } => match why {
                TokenRefusal::Unknown => LinkErrorKind::NotFound,
                TokenRefusal::NoSpace => LinkErrorKind::NoSpace,
                TokenRefusal::File => LinkErrorKind::Unavailable,
                TokenRefusal::OtherNode | TokenRefusal::OtherDirection | TokenRefusal::BeyondLimit => {
                    LinkErrorKind::Invalid
                }
            },
            Self::Local { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull => LinkErrorKind::NoSpace,
                io::ErrorKind::UnexpectedEof => LinkErrorKind::Corrupt,
                _ => LinkErrorKind::Unavailable,
            },
        }
    }
}

fn sum(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// Refuses a body that is too long for a frame.
pub(crate) fn check_body(body: &[u8]) -> Result<(), LinkError> {
    if body.len() <= BODY_BYTES_MAX {
        return Ok(());
    }
    Err(LinkError::TooBig { bytes: body.len(), limit_bytes: BODY_BYTES_MAX })
}

/// Makes the refusal that a caller gets instead of an answer that is too long for a frame.
pub(crate) fn answer_too_big(bytes: usize) -> Refusal {
    Refusal::new(
        LinkErrorKind::Invalid,
        format!("the answer has {bytes} bytes, more than a frame may carry ({BODY_BYTES_MAX}); ask for less"),
    )
}

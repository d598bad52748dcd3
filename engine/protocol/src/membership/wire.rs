//! The messages about presence between nodes and their coordinator.
//!
//! Owns: the messages and their bounds. Does not own: how they travel, their consequences (`mod`, `view`).

use crate::id::{Epoch, Incarnation, NodeName, StartId};
use crate::label::Labels;
use serde::{Deserialize, Serialize};

/// Maximum number of bytes of a message as JSON, except a join, which has labels. A message must fit a
/// datagram that is not fragmented.
pub const MESSAGE_BYTES_MAX: usize = 1024;
/// Maximum number of bytes of a join: every label at its longest.
pub const JOIN_BYTES_MAX: usize = 4096;
/// Maximum number of bytes of an address, `host:port`; a DNS name has 253 bytes.
pub const ADDRESS_BYTES_MAX: usize = 260;

/// The sender of a message: one run of a daemon on one life of its memory, by name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Life {
    pub node: NodeName,
    pub incarnation: Incarnation,
    pub start: StartId,
}

/// "I am here." Sent at every interval; see [`super::interval_ms`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    #[serde(flatten)]
    pub from: Life,
    /// The epoch that the node follows.
    pub epoch: Epoch,
    /// Number of the beat since the start, by which a delayed one is recognised.
    pub number: u64,
    pub tier1_used_bytes: u64,
    pub tier1_size_bytes: u64,
}

/// "Let me in", or "let me in again".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    #[serde(flatten)]
    pub from: Life,
    /// The highest epoch that the node has heard of; 0 for none.
    pub epoch: Epoch,
    /// The node's address for others, `host:port`.
    pub address: String,
    pub labels: Labels,
}

/// The coordinator's question to a neighbour: "can you hear this node?"
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    pub epoch: Epoch,
    /// Number of the question: an answer to an older one is ignored.
    pub question: u64,
    pub about: Life,
    /// Time for which the neighbour may try.
    pub within_ms: u64,
}

/// The neighbour's answer to an [`Ask`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    pub from: Life,
    pub epoch: Epoch,
    pub question: u64,
    pub about: NodeName,
    /// Whether the neighbour heard exactly that life since the question.
    pub heard: bool,
}

/// The coordinator's message to an admitted node: follow this epoch, beat at this interval.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admit {
    pub epoch: Epoch,
    pub to: Life,
    pub coordinator: NodeName,
    pub interval_ms: u64,
}

/// The coordinator's answer to a beat, by which a node knows that it is heard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Echo {
    pub epoch: Epoch,
    pub coordinator: NodeName,
    /// The number of the beat.
    pub number: u64,
    /// Interval for the next beats, which depends on the number of nodes.
    pub interval_ms: u64,
}

//! What nodes and their coordinator tell each other about being there.
//!
//! Owns: the messages and their bounds. Does not own: how they travel, what follows from them (`mod`, `view`).

use crate::id::{Epoch, Incarnation, NodeName, StartId};
use crate::label::Labels;
use serde::{Deserialize, Serialize};

/// Of one message as JSON but for a join, which has labels. It must fit a datagram that is not cut into parts.
pub const MESSAGE_BYTES_MAX: usize = 1024;
/// Of a join: every label at its longest.
pub const JOIN_BYTES_MAX: usize = 4096;
/// `host:port`; a DNS name has 253 bytes.
pub const ADDRESS_BYTES_MAX: usize = 260;

/// One run of a daemon on one life of its memory, by name: who speaks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Life {
    pub node: NodeName,
    pub incarnation: Incarnation,
    pub start: StartId,
}

/// "I am here." Sent at every interval, see [`super::interval_ms`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    #[serde(flatten)]
    pub from: Life,
    /// The epoch that the node follows.
    pub epoch: Epoch,
    /// Counts the beats of a start, so that one that was delayed is known.
    pub number: u64,
    pub tier1_used_bytes: u64,
    pub tier1_size_bytes: u64,
}

/// "Let me in", and "let me in again".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    #[serde(flatten)]
    pub from: Life,
    /// The highest epoch that the node has heard of; 0 for none.
    pub epoch: Epoch,
    /// Where others reach it, `host:port`.
    pub address: String,
    pub labels: Labels,
}

/// The coordinator to a neighbour: "can you hear this one?"
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    pub epoch: Epoch,
    /// Which question: an answer to an older one counts for nothing.
    pub question: u64,
    pub about: Life,
    /// So long the neighbour may try.
    pub within_ms: u64,
}

/// The neighbour's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    pub from: Life,
    pub epoch: Epoch,
    pub question: u64,
    pub about: NodeName,
    /// Whether it heard that very life since it was asked.
    pub heard: bool,
}

/// The coordinator to a node that is in: follow this epoch, beat at this interval.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admit {
    pub epoch: Epoch,
    pub to: Life,
    pub coordinator: NodeName,
    pub interval_ms: u64,
}

/// The coordinator's answer to a beat: by it a node knows that it is heard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Echo {
    pub epoch: Epoch,
    pub coordinator: NodeName,
    /// Of the beat.
    pub number: u64,
    /// The next beats come at this interval: it follows the number of nodes.
    pub interval_ms: u64,
}

//! The reasons for refusing a message.
//!
//! Owns: the reasons, and the action of the sender. Does not own: when each applies (`mod`, `view`).

use crate::id::{Epoch, Incarnation, NodeName, StartId};
use serde::{Deserialize, Serialize};

/// The reason why a message was refused, as its sender is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "refused")]
pub enum Refusal {
    #[error("it follows epoch {theirs}, and the coordinator's is {ours}; join again")]
    OldEpoch { theirs: Epoch, ours: Epoch },
    #[error(
        "it knows of epoch {theirs}, and the coordinator's is {ours}: a newer coordinator decides; ask that one"
    )]
    Superseded { theirs: Epoch, ours: Epoch },
    #[error("node {node} is no member; join first")]
    Stranger { node: NodeName },
    #[error(
        "another node {node} lives at {address} (incarnation {alive:016x}); end that one, or give this one another name"
    )]
    SecondLive { node: NodeName, alive: u64, address: String },
    #[error("incarnation {incarnation:016x} of node {node} was replaced; start it with empty memory")]
    Replaced { node: NodeName, incarnation: u64 },
    #[error("start {start:016x} of node {node} was followed by another; end this process")]
    OldStart { node: NodeName, start: u64 },
    #[error("node {node} was declared gone; join again")]
    WasGone { node: NodeName },
    #[error("{members} members, and {limit} are served at most; remove some that are gone for good")]
    Full { members: usize, limit: usize },
    #[error("an address of {found} bytes, and at most {limit} are taken; give a shorter --advertise")]
    Address { found: usize, limit: usize },
    #[error("question {question} about node {node} is not open; nothing to do")]
    NoQuestion { node: NodeName, question: u64 },
    #[error("beat {theirs} of node {node} came after beat {ours}; nothing to do")]
    OldBeat { node: NodeName, theirs: u64, ours: u64 },
    #[error(
        "epoch {epoch} has the coordinator {ours}, and {theirs} says it is its own; look which of the two holds the lease"
    )]
    TwoCoordinators { epoch: Epoch, ours: NodeName, theirs: NodeName },
}

/// The action of the sender of a refused message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cure {
    /// Send a join, with the memory as it is.
    Join,
    /// Try again later: a verdict has to come first.
    Wait,
    /// Stop deciding and serving commands: another node or process has this place.
    Stop,
    /// Nothing: the message was late or doubled.
    Nothing,
    /// A person must change something.
    Person,
}

impl Refusal {
    pub(super) fn second(node: &NodeName, alive: Incarnation, address: &str) -> Self {
        Self::SecondLive { node: node.clone(), alive: alive.0, address: address.to_owned() }
    }

    pub(super) fn replaced(node: &NodeName, incarnation: Incarnation) -> Self {
        Self::Replaced { node: node.clone(), incarnation: incarnation.0 }
    }

    pub(super) fn old_start(node: &NodeName, start: StartId) -> Self {
        Self::OldStart { node: node.clone(), start: start.0 }
    }

    #[must_use]
    pub fn cure(&self) -> Cure {
        match self {
            Self::OldEpoch { .. } | Self::Stranger { .. } | Self::WasGone { .. } => Cure::Join,
            // The live node may be dying: the name is free once it is declared gone.
            Self::SecondLive { .. } | Self::Superseded { .. } => Cure::Wait,
            Self::Replaced { .. } | Self::OldStart { .. } => Cure::Stop,
            Self::NoQuestion { .. } | Self::OldBeat { .. } => Cure::Nothing,
            Self::Full { .. } | Self::Address { .. } | Self::TwoCoordinators { .. } => Cure::Person,
        }
    }
}

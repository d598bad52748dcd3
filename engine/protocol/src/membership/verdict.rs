//! The coordinator's verdicts on a node, with their reasons, also in words.
//!
//! Owns: the verdicts and their reasons. Does not own: when each is given (`mod`).

use super::wire::{Admit, Ask, Echo, Life};
use crate::id::{Epoch, Incarnation, NodeName, StartId};
use std::fmt;

/// An action for the owner of the state; actions are carried out in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    Admit(Admit),
    Echo {
        to: NodeName,
        echo: Echo,
    },
    Ask {
        to: NodeName,
        ask: Ask,
    },
    /// To be logged, shown, and acted upon.
    Tell(Change),
    /// The member list changed: make it durable where the lease is, before anything follows from it.
    Keep,
    /// Make the placement again.
    Place,
    /// A node knows of a higher epoch: check whether the lease is still ours. Nothing is decided on a node's word alone.
    Doubt {
        by: NodeName,
        theirs: Epoch,
    },
}

/// A change of a node's standing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub life: Life,
    pub verdict: Verdict,
}

/// The new standing of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Joined,
    /// The daemon was started again on the same memory.
    Restarted {
        was: StartId,
    },
    /// Another life of the name, with empty memory: the content of the former memory is lost.
    Replaced {
        was: Incarnation,
    },
    Suspect(Suspicion),
    /// Alive, but not for the coordinator. The node's copies and files stay, and its ranks are not replaced.
    CutOff {
        heard_by: NodeName,
    },
    /// The node is heard again, with all that it held.
    Back {
        after_ms: u64,
    },
    /// The node's copies count as lost until it is back.
    Gone(Proof),
    /// The node is no longer a member: its copies are made again elsewhere.
    ForGood(Farewell),
}

/// The reason for suspecting a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Suspicion {
    ConnectionDied,
    Missed {
        beats: u64,
        silent_ms: u64,
    },
    /// The node was a member before this coordinator began, and has not joined.
    NeverCame {
        waited_ms: u64,
    },
    /// The former coordinator let its lease run out, and has not joined this one.
    LostItsSeat {
        waited_ms: u64,
    },
}

/// The proof that a node is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proof {
    /// Neighbours that were asked did not hear the node either.
    Neighbours { asked: usize, unheard: Vec<NodeName>, within_ms: u64 },
    /// No node answered that could have heard it. Either the node is dead, or the network to it is.
    Silence {
        beats: u64,
        silent_ms: u64,
        /// The coordinator's node and this one are the only nodes: the survivor serves reads, and taking over is the
        /// operator's decision (P3).
        two_alone: bool,
    },
    /// Neighbours heard the node, but the coordinator did not for too long.
    CutOffTooLong { for_ms: u64 },
}

impl Proof {
    /// Whether the node may be removed without an operator's word: other nodes have looked too.
    #[must_use]
    pub fn is_certain(&self) -> bool {
        matches!(self, Self::Neighbours { .. })
    }
}

/// The reason why a node is no longer a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Farewell {
    TimeOut {
        gone_ms: u64,
    },
    /// An operator removed the node; `by` is the operator.
    Operator {
        by: String,
    },
    /// The node announced that it leaves, after others had taken over its copies.
    Left,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = &self.life.node;
        match &self.verdict {
            Verdict::Joined => write!(f, "node {node} joined"),
            Verdict::Restarted { .. } => {
                write!(f, "the daemon of node {node} was started again, its memory is as it was")
            }
            Verdict::Replaced { was } => write!(
                f,
                "node {node} is back with empty memory: incarnation {:016x} was replaced by {:016x}",
                was.0, self.life.incarnation.0
            ),
            Verdict::Suspect(Suspicion::ConnectionDied) => {
                write!(f, "node {node} is suspect: its connection died")
            }
            Verdict::Suspect(Suspicion::Missed { beats, silent_ms }) => {
                write!(f, "node {node} is suspect: {beats} beats missed, silent for {silent_ms} ms")
            }
            Verdict::Suspect(Suspicion::NeverCame { waited_ms }) => write!(
                f,
                "node {node} is suspect: it was a member, and has not joined this coordinator for {waited_ms} ms"
            ),
            Verdict::Suspect(Suspicion::LostItsSeat { waited_ms }) => write!(
                f,
                "node {node} is suspect: it was the coordinator, its lease ran out, and it has not joined this one for {waited_ms} ms"
            ),
            Verdict::CutOff { heard_by } => {
                write!(
                    f,
                    "node {node} is cut off from the coordinator: {heard_by} hears it; look at the network between"
                )
            }
            Verdict::Back { after_ms } => {
                write!(f, "node {node} is back after {after_ms} ms, with what it held")
            }
            Verdict::Gone(proof) => write!(f, "node {node} is gone: {proof}"),
            Verdict::ForGood(Farewell::TimeOut { gone_ms }) => {
                write!(
                    f,
                    "node {node} is gone for good: it has been away for {gone_ms} ms; its copies are made again elsewhere"
                )
            }
            Verdict::ForGood(Farewell::Operator { by }) => {
                write!(f, "node {node} is gone for good: {by} said so; its copies are made again elsewhere")
            }
            Verdict::ForGood(Farewell::Left) => write!(f, "node {node} left"),
        }
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Neighbours { asked, unheard, within_ms } => {
                let names = unheard.iter().map(NodeName::as_str).collect::<Vec<_>>().join(" and ");
                write!(f, "{names}, of {asked} asked, did not hear it within {within_ms} ms")
            }
            Self::Silence { beats, silent_ms, two_alone: false } => write!(
                f,
                "{beats} beats missed, silent for {silent_ms} ms, and nobody answers who could have heard it; `ckptctl recover --take-over` if it is dead"
            ),
            Self::Silence { beats, silent_ms, two_alone: true } => write!(
                f,
                "{beats} beats missed, silent for {silent_ms} ms; two nodes alone cannot tell death from a broken network: reads go on, and taking over is your word (`ckptctl recover --take-over`)"
            ),
            Self::CutOffTooLong { for_ms } => write!(f, "it was cut off for {for_ms} ms"),
        }
    }
}

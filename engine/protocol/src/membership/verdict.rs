//! What the coordinator makes of a node, and why, in words too.
//!
//! Owns: the verdicts and their reasons. Does not own: when each is given (`mod`).

use super::wire::{Admit, Ask, Echo, Life};
use crate::id::{Epoch, Incarnation, NodeName, StartId};
use std::fmt;

/// What the owner of the state carries out, in order.
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
    /// The placement is to be made anew.
    Place,
    /// A node knows of a higher epoch: look at the lease whether it is still ours. Nothing is decided here on a node's word.
    Doubt {
        by: NodeName,
        theirs: Epoch,
    },
}

/// A node is something else than it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub life: Life,
    pub verdict: Verdict,
}

/// What it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Joined,
    /// The daemon was started again on the same memory.
    Restarted {
        was: StartId,
    },
    /// Another life of the name, with empty memory: what the one before held is lost.
    Replaced {
        was: Incarnation,
    },
    Suspect(Suspicion),
    /// Alive, but not for the coordinator. Its copies and files stay, and its ranks are not replaced.
    CutOff {
        heard_by: NodeName,
    },
    /// It is heard again, with what it held.
    Back {
        after_ms: u64,
    },
    /// Its copies count as lost until it is back.
    Gone(Proof),
    /// No member any more: its copies are made again elsewhere.
    ForGood(Farewell),
}

/// Why a node is looked into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Suspicion {
    ConnectionDied,
    Missed {
        beats: u64,
        silent_ms: u64,
    },
    /// It was a member before this coordinator began, and has not come.
    NeverCame {
        waited_ms: u64,
    },
    /// The coordinator of before let its lease run out, and has not come to this one.
    LostItsSeat {
        waited_ms: u64,
    },
}

/// How sure it is that a node is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proof {
    /// Neighbours that were asked did not hear it either.
    Neighbours { asked: usize, unheard: Vec<NodeName>, within_ms: u64 },
    /// Nobody answered who could have heard it. It may be dead, or the way to it may be.
    Silence {
        beats: u64,
        silent_ms: u64,
        /// The coordinator's node and this one are all there is: whoever survives serves reads, and taking over is the
        /// operator's word (P3).
        two_alone: bool,
    },
    /// Neighbours heard it, and the coordinator did not for too long.
    CutOffTooLong { for_ms: u64 },
}

impl Proof {
    /// Whether it may be given up without an operator's word: others have looked too.
    #[must_use]
    pub fn is_certain(&self) -> bool {
        matches!(self, Self::Neighbours { .. })
    }
}

/// Why a node is no member any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Farewell {
    TimeOut {
        gone_ms: u64,
    },
    /// The operator's word, from whom.
    Operator {
        by: String,
    },
    /// It said that it leaves, its copies having been taken over.
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

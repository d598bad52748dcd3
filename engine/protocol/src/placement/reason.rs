//! Reasons for a change of partner, and weaknesses of a placement.
//!
//! Owns: the reasons, also in words. Does not own: the choice (`ring`, `pair`).

use super::{Placement, Scope};
use crate::id::NodeName;
use crate::label::Labels;
use std::collections::BTreeMap;
use std::fmt;

/// A node whose copies are made again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    pub node: NodeName,
    /// The node that kept the copies; none for a new node.
    pub from: Option<NodeName>,
    pub to: Option<NodeName>,
    pub because: Because,
}

/// The reason for another partner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Because {
    /// The node was not placed before.
    New,
    /// The partner is no longer a member.
    PartnerGone,
    /// The partner was where it should not be.
    Better,
    /// Other nodes came or went, or needed a better partner.
    Room,
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name =
            |node: &Option<NodeName>| node.as_ref().map_or_else(|| "nobody".to_owned(), NodeName::to_string);
        let (node, from, to) = (&self.node, name(&self.from), name(&self.to));
        match self.because {
            Because::New => write!(f, "copies of {node} go to {to}: it is new"),
            Because::PartnerGone => write!(f, "copies of {node} go to {to}: {from} is no member any more"),
            Because::Better => write!(f, "copies of {node} move from {from} to {to}: it is the better place"),
            Because::Room => write!(f, "copies of {node} move from {from} to {to}: others came or went"),
        }
    }
}

/// A weakness of a placement, on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// The only node, of all or of its domain: nothing that it saves is replicated.
    Alone { node: NodeName, domain: Option<String> },
    /// The partner is in the node's own domain, although it should be in another.
    SameDomain { node: NodeName, partner: NodeName, label: String, domain: String },
    /// Other nodes have the label but this one has not: its failure domain is unknown.
    Unlabelled { node: NodeName, label: String },
}

impl Note {
    #[must_use]
    pub fn node(&self) -> &NodeName {
        match self {
            Self::Alone { node, .. } | Self::SameDomain { node, .. } | Self::Unlabelled { node, .. } => node,
        }
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alone { node, domain: None } => {
                write!(f, "node {node} has no partner: nothing that it saves is replicated; add a node")
            }
            Self::Alone { node, domain: Some(domain) } => write!(
                f,
                "node {node} has no partner in {domain}: nothing that it saves is replicated; add a node there, or let placement.scope be wider"
            ),
            Self::SameDomain { node, partner, label, domain } => write!(
                f,
                "node {node} has no partner in another {label}: its copies are at {partner}, and the loss of {label} {domain} loses both; add nodes in other {label}s"
            ),
            Self::Unlabelled { node, label } => write!(
                f,
                "node {node} has no label {label}, and counts as a {label} of its own; start it with --label {label}=NAME"
            ),
        }
    }
}

/// Returns every node with another partner than before, by name.
pub(super) fn moves(
    previous: Option<&Placement>,
    placement: &Placement,
    members: &BTreeMap<&NodeName, &Labels>,
) -> Vec<Move> {
    let before = previous.map(Placement::partners).unwrap_or_default();
    let mut moves = vec![];
    for (node, to) in placement.partners() {
        let (from, because) = match before.get(node) {
            Some(from) if *from == to => continue,
            None => (None, Because::New),
            // The node had no partner, and has one now.
            Some(None) => (None, Because::Better),
            Some(Some(from)) if !members.contains_key(from) => (Some(*from), Because::PartnerGone),
            Some(Some(from)) if placement.is_misplaced(members, node, from) => (Some(*from), Because::Better),
            Some(Some(from)) => (Some(*from), Because::Room),
        };
        moves.push(Move { node: node.clone(), from: from.cloned(), to: to.cloned(), because });
    }
    moves
}

impl Placement {
    /// Whether the scope speaks against copies of `node` at `partner`.
    fn is_misplaced(
        &self,
        members: &BTreeMap<&NodeName, &Labels>,
        node: &NodeName,
        partner: &NodeName,
    ) -> bool {
        let label = self.rules.scope.label();
        let domain = |node: &NodeName| members.get(node).and_then(|labels| labels.get(label));
        let (mine, theirs) = (domain(node), domain(partner));
        match self.rules.scope {
            Scope::Apart(_) => mine.is_some() && mine == theirs,
            Scope::Within(_) => mine != theirs,
        }
    }
}

/// Returns the weaknesses, by node.
pub(super) fn notes(placement: &Placement, members: &BTreeMap<&NodeName, &Labels>) -> Vec<Note> {
    let label = placement.rules.scope.label();
    let domain = |node: &NodeName| members.get(node).and_then(|labels| labels.get(label));
    let is_labelled = members.values().any(|labels| labels.get(label).is_some());
    let within = matches!(placement.rules.scope, Scope::Within(_));
    let mut notes = vec![];
    for (node, partner) in placement.partners() {
        if is_labelled && domain(node).is_none() {
            notes.push(Note::Unlabelled { node: node.clone(), label: label.to_owned() });
        }
        match (partner, domain(node)) {
            (None, mine) => {
                let domain = mine.filter(|_| within).map(|mine| format!("{label} {mine}"));
                notes.push(Note::Alone { node: node.clone(), domain });
            }
            (Some(partner), Some(mine)) if !within && domain(partner) == Some(mine) => {
                notes.push(Note::SameDomain {
                    node: node.clone(),
                    partner: partner.clone(),
                    label: label.to_owned(),
                    domain: mine.to_owned(),
                });
            }
            (Some(_), _) => {}
        }
    }
    notes
}

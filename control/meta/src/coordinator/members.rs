//! Members come, are declared gone, come back, and are written off.
//!
//! Owns: the changes that this makes, and the sweep of tombstones, which depends on it. Does not own: detection.

use super::{Command, Coordinator, Phase};
use crate::key::Key;
use crate::message::ToNode;
use crate::rules::{Rule, Rules};
use crate::state::State;
use crate::value::Change;
use crate::value::{Member, Published, Standing, Value};
use tidemark_protocol::id::{Incarnation, NodeName};
use tidemark_protocol::key::NodeLife;

/// Tombstones that one transaction removes: a compare and a change each, with room for calls.
pub const SWEPT_AT_ONCE_MAX: usize = 32;

/// A change of the members that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Membership {
    Join { node: NodeName, life: Incarnation, replaces: Option<Incarnation> },
    Gone(NodeLife),
    WriteOff(NodeName),
    Sweep,
}

impl Membership {
    /// Returns the changes; none if the membership is already as requested, or cannot become so.
    pub(super) fn changes(&self, state: &State, rules: Rules) -> Vec<Change> {
        match self {
            Self::Join { node, life, replaces } => {
                let present = state.members().get(node);
                if present.map(|member| member.life) != *replaces || *replaces == Some(*life) {
                    return vec![];
                }
                // A node that had an earlier life reports when it has published again what that life had not.
                let standing = if present.is_some() { Standing::Returning } else { Standing::Present };
                // If nothing of a former life was taken, what the node knows of the life before that one stays.
                let before = state.published(node).map(|last| match (last.number, last.before) {
                    (0, Some(before)) => before,
                    (number, _) => (last.life, number),
                });
                let published = Published { life: *life, number: 0, refused: vec![], before };
                vec![
                    (Key::Member(node.clone()), Some(Value::Member(Member { life: *life, standing }))),
                    (Key::Publication(node.clone()), Some(Value::Published(published))),
                ]
            }
            Self::Gone(NodeLife { node, incarnation }) => {
                if state.node_of(*incarnation) != Some(node) {
                    return vec![];
                }
                let gone = Member { life: *incarnation, standing: Standing::Gone };
                vec![(Key::Member(node.clone()), Some(Value::Member(gone)))]
            }
            Self::WriteOff(node) => match state.members().get(node) {
                Some(member) if member.standing == Standing::Gone => {
                    vec![(Key::Member(node.clone()), None), (Key::Publication(node.clone()), None)]
                }
                _ => vec![],
            },
            Self::Sweep => sweep(state, rules),
        }
    }
}

/// Removes tombstones that no former life's change can depend on, in directories that no node has alone: a delegate counts versions from
/// the names that it was given.
fn sweep(state: &State, rules: Rules) -> Vec<Change> {
    if state.awaits_returns() && rules.has(Rule::Tombstones) {
        return vec![];
    }
    let at_rest = |id| state.inode(id).is_none_or(|inode| state.alone(inode).is_none());
    let swept = state.tombstones().filter(|place| at_rest(place.directory)).take(SWEPT_AT_ONCE_MAX);
    swept.map(|place| (Key::Name(place.clone()), None)).collect()
}

impl Coordinator {
    pub(super) fn want(&mut self, membership: Membership) {
        if let Phase::Leading(leading) = &mut self.phase
            && !leading.membership.contains(&membership)
        {
            leading.membership.push(membership);
        }
    }

    /// Answers a join that the copy shows the result of.
    pub(super) fn answer_join(&self, node: &NodeName, life: Incarnation, out: &mut Vec<Command>) {
        let Some(member) = self.copy.state.members().get(node) else { return };
        let message = if self.copy.state.node_of(life) == Some(node) {
            let before = self.copy.state.published(node).and_then(|published| published.before);
            ToNode::Joined { life, before }
        } else {
            ToNode::NotJoined { life, present: member.life }
        };
        self.send(node.clone(), message, out);
    }
}

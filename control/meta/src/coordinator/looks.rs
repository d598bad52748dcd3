//! Look-ups, answered from memory after one shared read of the store.
//!
//! Owns: which lives have to publish before an answer, the read that shows the election, the answers. Does not own: the answers that a node
//! gives by itself (`node`).

use super::{Command, Coordinator, Lane, Phase, Why};
use crate::key::{Key, Place};
use crate::message::{Found, ToNode};
use crate::refusal::Refusal;
use crate::rules::{Rule, Rules};
use crate::state::State;
use crate::store::{Request, Response, Stored};
use crate::value::{Kind, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::id::{Incarnation, NodeName};

/// The longest wait of a call or a look-up for another node; after that it fails with EIO. A waiting call holds its directory's lock on its
/// node.
pub const CALL_WAITS_MAX: Duration = Duration::from_secs(5);

/// Look-ups of one node at a time: more than a node has threads. Others are dropped, and sent again by their node.
pub const LOOKS_PER_NODE_MAX: usize = 1024;

/// A look-up.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Looking {
    pub(super) node: NodeName,
    pub(super) life: Incarnation,
    pub(super) number: u64,
    after: u64,
    place: Place,
    since: Duration,
    pub(super) needs: BTreeSet<Incarnation>,
    pub(super) asked: BTreeSet<Incarnation>,
    /// The last call of a life when it was asked.
    pub(super) known: BTreeMap<Incarnation, u64>,
    /// Whether the pending or last read of the election began after the look-up came.
    confirming: bool,
    confirmed: bool,
}

impl Looking {
    /// Returns the answer, or the lives that have to publish first.
    fn evaluate(&self, state: &State, rules: Rules) -> Result<Found, BTreeSet<Incarnation>> {
        let mut needs = BTreeSet::new();
        let mut need = |life: Option<Incarnation>| {
            let Some(life) = life.filter(|life| *life != self.life) else { return };
            if self.known.get(&life).is_none_or(|last| state.taken_of(life) < *last) {
                needs.insert(life);
            }
        };
        let found = match state.inode(self.place.directory) {
            None => Found::Refused(Refusal::NoDirectory),
            Some(inode) if inode.kind == Kind::File => Found::Refused(Refusal::NotDirectory),
            Some(directory) => {
                if rules.has(Rule::AskDelegate) {
                    need(state.alone(directory));
                }
                match state.entry(&self.place).target {
                    None => Found::Absent,
                    Some(target) => {
                        let Some(inode) = state.inode(target.id) else {
                            panic!("{:?} leads to {}, which has no inode", self.place, target.id);
                        };
                        if rules.has(Rule::AskHolder) && inode.kind == Kind::File {
                            need(state.alone(inode));
                        }
                        Found::Present(target, inode.clone())
                    }
                }
            }
        };
        if needs.is_empty() { Ok(found) } else { Err(needs) }
    }
}

impl Coordinator {
    #[expect(clippy::too_many_arguments, reason = "the parts of one message")]
    pub(super) fn look(
        &mut self,
        now: Duration,
        node: &NodeName,
        life: Incarnation,
        number: u64,
        after: u64,
        place: Place,
        out: &mut Vec<Command>,
    ) {
        if self.copy.state.node_of(life) != Some(node) {
            return self.send(node.clone(), ToNode::Over { life }, out);
        }
        let Phase::Leading(leading) = &mut self.phase else { return };
        let mut mine = leading.looking.iter().filter(|looking| looking.life == life);
        if mine.clone().count() >= LOOKS_PER_NODE_MAX || mine.any(|looking| looking.number == number) {
            return;
        }
        let (needs, asked, known) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
        leading.looking.push(Looking {
            node: node.clone(),
            life,
            number,
            after: if self.rules.has(Rule::OwnFirst) { after } else { 0 },
            place,
            since: now,
            needs,
            asked,
            known,
            confirming: false,
            confirmed: false,
        });
    }

    /// Answers the look-ups that can be answered, and notes the needs of the others.
    pub(super) fn answer_looks(&mut self, now: Duration, out: &mut Vec<Command>) {
        let (state, rules) = (Arc::clone(&self.copy.state), self.rules);
        let Phase::Leading(leading) = &mut self.phase else { return };
        let mut answers = vec![];
        leading.looking.retain_mut(|looking| {
            let expired = now.saturating_sub(looking.since) >= CALL_WAITS_MAX;
            let mut answer = |found| {
                let (life, number) = (looking.life, looking.number);
                answers.push((looking.node.clone(), ToNode::Looked { life, number, found }));
                false
            };
            match looking.evaluate(&state, rules) {
                _ if state.taken_of(looking.life) < looking.after && !expired => true,
                _ if state.taken_of(looking.life) < looking.after => {
                    answer(Found::Refused(Refusal::Unreachable))
                }
                Ok(found) if looking.confirmed || !rules.has(Rule::Confirm) => answer(found),
                Err(_) if expired && !rules.has(Rule::NoGuess) => answer(Found::Absent),
                _ if expired => answer(Found::Refused(Refusal::Unreachable)),
                Ok(_) => {
                    looking.needs.clear();
                    true
                }
                Err(needs) => {
                    looking.needs = needs;
                    true
                }
            }
        });
        for (node, message) in answers {
            self.send(node, message, out);
        }
    }

    /// Begins a read of the election, if look-ups wait for one and none is pending.
    pub(super) fn confirm(&mut self, out: &mut Vec<Command>) {
        let Phase::Leading(leading) = &mut self.phase else { return };
        let wanted = leading.suspect || leading.looking.iter().any(|looking| !looking.confirmed);
        if leading.confirming.is_some() || !wanted || !self.rules.has(Rule::Confirm) {
            return;
        }
        leading.confirming = Some(std::mem::take(&mut leading.suspect));
        for looking in &mut leading.looking {
            looking.confirming = true;
        }
        out.push(Command::Store(Lane::Confirm, Request::Read(vec![Key::Coordinator, Key::Era, Key::Tick])));
    }

    pub(super) fn confirmed(&mut self, response: Response, out: &mut Vec<Command>) {
        let (known_era, known) = (self.copy.state.era(), self.copy.state.tick());
        let Phase::Leading(leading) = &mut self.phase else { return };
        let Some(suspect) = leading.confirming.take() else { return };
        let Response::Values(values) = response else {
            leading.suspect |= suspect;
            return;
        };
        let [role, era, tick] = &values[..] else { return };
        if role.as_ref().map(|role| role.revision) != Some(leading.election) {
            return self.step_down();
        }
        let number = |stored: &Option<Stored>| match stored {
            Some(Stored { value: Value::Number(number), .. }) => Some(*number),
            _ => None,
        };
        let (Some(era), Some(tick)) = (number(era), number(tick)) else {
            return self.stop(Why::Inconsistent, out);
        };
        let known_era = known_era.unwrap_or(era);
        // Still elected, and a node knows more than the store holds: the store went back under both.
        let back = era != known_era || tick < known || suspect;
        if back {
            return self.stop(Why::WentBack { known_era, known, found_era: era, found: tick }, out);
        }
        for looking in leading.looking.iter_mut().filter(|looking| looking.confirming) {
            looking.confirmed = true;
        }
    }
}

//! Turns calls into transactions, one at a time, and resolves doubtful answers by reading.
//!
//! Owns: the waiting calls, the pending transaction, the answers to nodes. Does not own: the content of a transaction (`state`).

use super::looks::CALL_WAITS_MAX;
use super::members::Membership;
use super::{Command, Coordinator, Lane, Phase, Why};
use crate::key::Key;
use crate::message::{Done, Grant, Outcome, ToNode};
use crate::rules::Rule;
use crate::state::{Batch, Call, Need, State, plan};
use crate::store::{Request, Response, Revision, Stored, Transaction};
use crate::value::{Kind, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::id::{Incarnation, NodeName};

/// Changes of members in one transaction: at most two keys each, 32 of a sweep.
const MEMBERSHIP_AT_ONCE_MAX: usize = 8;

/// The calls of one node that were not taken yet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Waiting {
    node: NodeName,
    pub(super) life: Incarnation,
    /// The number of `calls[0]`.
    pub(super) first: u64,
    /// Calls from `unanswered` up to `first`, which were taken, and those that wait.
    unanswered: u64,
    calls: Vec<Call>,
    /// The time at which the first waiting call began to wait for another life.
    since: Option<Duration>,
    pub(super) needs: BTreeSet<Need>,
    pub(super) asked: BTreeSet<Need>,
    /// The last call of a life when it was asked.
    pub(super) known: BTreeMap<Need, u64>,
}

impl Waiting {
    fn pending(&self) -> &[Call] {
        let taken = usize::try_from(self.first - self.unanswered).unwrap_or(usize::MAX);
        self.calls.get(taken..).unwrap_or_default()
    }

    /// Moves on to the first call that was not taken.
    fn move_on(&mut self, first: u64) {
        if first > self.first {
            self.first = first;
            self.since = None;
            self.needs.clear();
            self.asked.clear();
            self.known.clear();
        }
    }
}

/// A transaction that the store has not answered for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Append {
    transaction: Transaction,
    taken: Vec<NodeName>,
    joins: Vec<(NodeName, Incarnation)>,
    /// Set while the store is read, because no answer came or a compare did not hold.
    doubt: Option<Doubt>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Doubt {
    NoAnswer,
    Refused,
}

impl Coordinator {
    /// Takes the calls that a node has sent.
    pub(super) fn published(
        &mut self,
        node: &NodeName,
        life: Incarnation,
        first: u64,
        calls: Vec<Call>,
        out: &mut Vec<Command>,
    ) {
        let state = Arc::clone(&self.copy.state);
        if state.node_of(life) != Some(node) && self.rules.has(Rule::Life) {
            return self.send(node.clone(), ToNode::Over { life }, out);
        }
        if first == 0 {
            // No call has this number: the sender is broken, and none of its messages can be answered.
            return;
        }
        let taken = state.taken_by(node, life);
        let last = first.saturating_add(calls.len() as u64).saturating_sub(1);
        if self.rules.has(Rule::Chain) && (last <= taken || first > taken + 1) {
            // Everything was taken before. Or calls that the node believes to be taken are not here, which its answer shows.
            let outcomes = outcomes(&state, node, life, first, taken, &calls);
            return self.send(node.clone(), ToNode::Taken { life, first, number: taken, outcomes }, out);
        }
        let Phase::Leading(leading) = &mut self.phase else { return };
        let pending = if self.rules.has(Rule::Chain) { taken + 1 } else { first };
        if let Some(waiting) = leading.waiting.iter_mut().find(|waiting| waiting.node == *node) {
            // A message that came late, or twice.
            let known = (first, calls.len()) <= (waiting.unanswered, waiting.calls.len());
            if waiting.life == life && known {
                return;
            }
            let since = waiting.since.filter(|_| waiting.life == life && waiting.first == pending);
            if since.is_none() {
                waiting.move_on(u64::MAX);
            }
            (waiting.life, waiting.first, waiting.unanswered) = (life, pending, first);
            (waiting.calls, waiting.since) = (calls, since);
            return;
        }
        let (needs, asked, known) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
        let (node, since) = (node.clone(), None);
        leading.waiting.push(Waiting {
            node,
            life,
            first: pending,
            unanswered: first,
            calls,
            since,
            needs,
            asked,
            known,
        });
    }

    /// Begins a transaction of the waiting calls, if none is pending.
    pub(super) fn append(&mut self, now: Duration, out: &mut Vec<Command>) {
        // A second round refuses calls whose callers came to owe another node something in the first.
        for _ in 0..2 {
            let state = Arc::clone(&self.copy.state);
            let Phase::Leading(leading) = &mut self.phase else { return };
            if leading.append.is_some() {
                return;
            }
            let (mut first, mut joins) = (vec![], vec![]);
            let wanted = leading.membership.len().min(MEMBERSHIP_AT_ONCE_MAX);
            for membership in leading.membership.drain(..wanted) {
                let changes = membership.changes(&state, self.rules);
                // Two changes of one member in a transaction: the first counts, and the other's node asks again.
                if !changes.iter().any(|(key, _)| first.iter().any(|(put, _)| put == key)) {
                    first.extend(changes);
                }
                if let Membership::Join { node, life, .. } = membership {
                    joins.push((node, life));
                }
            }
            let owing: BTreeSet<_> = owing(&state, &leading.waiting, &leading.looking).collect();
            let heard: Vec<_> = leading.waiting.iter().map(|waiting| heard(&state, waiting)).collect();
            let batches = leading.waiting.iter().zip(&heard).map(|(waiting, heard)| Batch {
                node: &waiting.node,
                life: waiting.life,
                first: waiting.first,
                unanswered: waiting.unanswered,
                calls: waiting.pending(),
                heard,
                owes: owing.contains(&waiting.life),
                expired: waiting.since.is_some_and(|since| now.saturating_sub(since) >= CALL_WAITS_MAX),
            });
            let plan = plan(&state, leading.election, self.rules, first, &batches.collect::<Vec<_>>());
            for wait in plan.waits {
                let mut waiting = leading.waiting.iter_mut();
                if let Some(waiting) = waiting.find(|waiting| waiting.node == wait.node)
                    && waiting.first == wait.number
                {
                    waiting.since.get_or_insert(now);
                    waiting.needs = wait.needs;
                }
            }
            if let Some(transaction) = plan.transaction {
                out.push(Command::Store(Lane::Append, Request::Append(transaction.clone())));
                leading.append = Some(Append { transaction, taken: plan.taken, joins, doubt: None });
                return;
            }
            for (node, life) in joins {
                self.answer_join(&node, life, out);
            }
        }
    }

    pub(super) fn append_stored(&mut self, response: Response, out: &mut Vec<Command>) {
        let Phase::Leading(leading) = &mut self.phase else { return };
        let Some(append) = &mut leading.append else { return };
        match (response, append.doubt) {
            (Response::Taken(revision), None) => self.appended(revision, out),
            (Response::Values(values), Some(doubt)) => self.doubt_read(&values, doubt, out),
            (response, doubt) => {
                let refused = response == Response::Refused || doubt == Some(Doubt::Refused);
                append.doubt = Some(if refused { Doubt::Refused } else { Doubt::NoAnswer });
                if !self.rules.has(Rule::ReadAfterDoubt) {
                    return self.appended(self.copy.revision.unwrap_or_default(), out);
                }
                let mut keys = vec![Key::Coordinator, Key::Era, Key::Tick];
                keys.extend(append.taken.iter().cloned().map(Key::Publication));
                out.push(Command::Store(Lane::Append, Request::Read(keys)));
            }
        }
    }

    /// Decides the outcome of a transaction: its tick and publications are in the store, or they are not and it is sent again.
    fn doubt_read(&mut self, values: &[Option<Stored>], doubt: Doubt, out: &mut Vec<Command>) {
        let tick = self.copy.state.tick();
        let Phase::Leading(leading) = &mut self.phase else { return };
        let Some(append) = &mut leading.append else { return };
        let [role, era, found, publications @ ..] = values else { return };
        if role.as_ref().map(|role| role.revision) != Some(leading.election) {
            return self.step_down();
        }
        let (Some(era), Some(found)) = (number(era), number(found)) else {
            return self.stop(Why::Inconsistent, out);
        };
        let known_era = self.copy.state.era().unwrap_or(era);
        if era != known_era || found < tick {
            self.stop_if_back(known_era, tick, era, found, out);
            return;
        }
        if found == tick {
            if doubt == Doubt::Refused {
                return self.stop(Why::Inconsistent, out);
            }
            // Not taken yet. The same transaction is sent again: the first may still be on its way, and the compare of the tick lets only
            // one of the two through.
            append.doubt = None;
            let again = Request::Append(append.transaction.clone());
            out.push(Command::Store(Lane::Append, again));
            return;
        }
        let put = |node: &NodeName| {
            let key = Key::Publication(node.clone());
            append
                .transaction
                .changes
                .iter()
                .find(|(changed, _)| *changed == key)
                .and_then(|(_, value)| value.as_ref())
        };
        let stored = publications.iter().map(|stored| stored.as_ref().map(|stored| &stored.value));
        let same = append.taken.iter().map(put).eq(stored);
        let revision = values.get(2).and_then(|found| found.as_ref()).map(|found| found.revision);
        match revision {
            Some(revision) if same && found == tick + 1 => self.appended(revision, out),
            _ => self.stop(Why::Inconsistent, out),
        }
    }

    /// Makes the changes of the transaction that was taken, and answers its nodes.
    fn appended(&mut self, revision: Revision, out: &mut Vec<Command>) {
        let Phase::Leading(leading) = &mut self.phase else { return };
        let Some(append) = leading.append.take() else { return };
        let state = Arc::make_mut(&mut self.copy.state);
        state.apply(&append.transaction.changes);
        self.copy.revision = Some(revision);
        let mut answers = vec![];
        for waiting in &mut leading.waiting {
            if !append.taken.contains(&waiting.node) {
                continue;
            }
            let (life, first) = (waiting.life, waiting.unanswered);
            let number = state.taken_by(&waiting.node, life);
            let outcomes = outcomes(state, &waiting.node, life, first, number, &waiting.calls);
            answers.push((waiting.node.clone(), ToNode::Taken { life, first, number, outcomes }));
            waiting.move_on(number + 1);
        }
        // Calls of a life that is over are answered with that when their node sends them again.
        leading.waiting.retain(|waiting| {
            state.node_of(waiting.life) == Some(&waiting.node) && !waiting.pending().is_empty()
        });
        leading.looking.retain(|looking| state.node_of(looking.life) == Some(&looking.node));
        for (node, message) in answers {
            self.send(node, message, out);
        }
        for (node, life) in append.joins {
            self.answer_join(&node, life, out);
        }
    }
}

/// Lists the lives that some other call or look-up waits for.
fn owing<'a>(
    state: &'a State,
    waiting: &'a [Waiting],
    looking: &'a [super::looks::Looking],
) -> impl Iterator<Item = Incarnation> + 'a {
    let calls = waiting.iter().flat_map(move |waiting| {
        let met = heard(state, waiting);
        waiting.needs.iter().filter(move |need| !met.contains(need)).map(|need| need.life())
    });
    calls.chain(looking.iter().flat_map(|looking| looking.needs.iter().copied()))
}

/// Returns the needs that are met: all calls that the life knew when it was asked are taken.
fn heard(state: &State, waiting: &Waiting) -> BTreeSet<Need> {
    let met = waiting.known.iter().filter(|(need, last)| state.taken_of(need.life()) >= **last);
    met.map(|(need, _)| *need).collect()
}

fn number(stored: &Option<Stored>) -> Option<u64> {
    match stored {
        Some(Stored { value: Value::Number(number), .. }) => Some(*number),
        _ => None,
    }
}

/// Returns the outcomes of the calls from `first` to `last`. Each can be sent again: a right that a call gave stays as it is until the
/// caller itself gives it back.
fn outcomes(
    state: &State,
    node: &NodeName,
    life: Incarnation,
    first: u64,
    last: u64,
    calls: &[Call],
) -> Vec<Outcome> {
    let Some(published) = state.published(node) else { return vec![] };
    let taken = (first..=last).zip(calls);
    let outcome = |(number, call): (u64, &Call)| {
        if let Some((_, refusal)) = published.refused.iter().find(|(refused, _)| *refused == number) {
            return Outcome::Refused(*refusal);
        }
        let entries = call.places().map(|place| (place.clone(), state.entry(place))).collect();
        let inodes = call.inode().map(|id| (id, state.inode(id).cloned())).into_iter().collect();
        let granted = call
            .inode()
            .filter(|_| matches!(call, Call::Delegate { .. } | Call::Create { kind: Kind::Directory, .. }));
        let grant = granted.and_then(|directory| {
            let inode = state.inode(directory).filter(|inode| state.alone(inode) == Some(life))?;
            let names = state.entries(directory).map(|(name, entry)| (name.clone(), *entry)).collect();
            Some(Grant { directory, version: inode.version, names })
        });
        Outcome::Done(Done { entries, inodes, grant })
    };
    taken.map(outcome).collect()
}

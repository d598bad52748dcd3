//! Forms one transaction from the calls of many nodes.
//!
//! Owns: the chain of each node's numbers, the bounds of a transaction, its compares. Does not own: the meaning of a call
//! (`effect`), sending it (the coordinator).

use super::draft::Draft;
use super::effect::{Caller, effect};
use super::{Call, Need, State, Waits};
use crate::key::Key;
use crate::refusal::Refusal;
use crate::rules::{Rule, Rules};
use crate::store::{Compare, Revision, Transaction};
use crate::value::Change;
use crate::value::Value;
use std::collections::BTreeSet;
use tidemark_protocol::id::{Incarnation, NodeName};

/// Most keys in one transaction: etcd takes as many without a setting (`--max-txn-ops`).
pub const TRANSACTION_KEYS_MAX: usize = 128;

/// Keys that a transaction's bounds leave free: the tick's change, and the compares of the era and the election, since etcd counts
/// compares and changes apart and each publication has one of both.
const RESERVED_KEYS: usize = 3;

/// Bytes of one transaction. etcd refuses requests above 1.5 MiB without a setting. [`TRANSACTION_KEYS_MAX`] of the largest
/// keys and values stay far below; a test compares.
pub const TRANSACTION_BYTES_MAX: usize = 1 << 20;

/// Calls of one node in one transaction, so that one node with a long queue leaves room for others.
pub const TAKEN_AT_ONCE_MAX: usize = 64;

/// The waiting calls of one node.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    pub node: &'a NodeName,
    pub life: Incarnation,
    /// The number of the first of `calls`.
    pub first: u64,
    /// The first call that the node has no answer to; at most `first`.
    pub unanswered: u64,
    pub calls: &'a [Call],
    /// The needs of the first call that were met by a publication.
    pub heard: &'a BTreeSet<Need>,
    /// Whether the node owes other nodes an answer. If so, a call that would wait is refused as busy, or both would wait for each other.
    pub owes: bool,
    /// Whether the first call has waited as long as a call may.
    pub expired: bool,
}

/// A call that waits for other lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    pub node: NodeName,
    pub number: u64,
    pub needs: BTreeSet<Need>,
}

/// The result of planning.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// The transaction; `None` if nothing changes.
    pub transaction: Option<Transaction>,
    /// The nodes of which calls are taken.
    pub taken: Vec<NodeName>,
    pub waits: Vec<Wait>,
}

/// Forms the next transaction from the waiting calls, in the order of `batches`, after the changes in `first`. Calls are taken as long as
/// they fit; the rest stays for the next transaction. The result depends on nothing else.
#[must_use]
pub fn plan(
    state: &State,
    election: Revision,
    rules: Rules,
    first: Vec<Change>,
    batches: &[Batch<'_>],
) -> Plan {
    let mut draft = Draft::new(state);
    let mut compares = vec![];
    for (key, _) in &first {
        compares.push(Compare::Is(key.clone(), state.value(key)));
    }
    draft.add(first);
    let mut plan = Plan::default();
    for batch in batches {
        // A verdict in the same transaction ends the life.
        let member = Key::Member(batch.node.clone());
        if draft.contains(&member) || (rules.has(Rule::Life) && state.node_of(batch.life) != Some(batch.node))
        {
            continue;
        }
        take(&mut draft, rules, batch, &mut compares, &mut plan);
    }
    if !draft.is_unchanged() {
        let tick = state.tick();
        draft.add(vec![(Key::Tick, Some(Value::Number(tick + 1)))]);
        compares.push(Compare::Is(Key::Tick, Some(Value::Number(tick))));
        compares.push(Compare::Is(Key::Era, state.era().map(Value::Number)));
        if draft.contains(&Key::Moves) {
            compares.push(Compare::Is(Key::Moves, Some(Value::Number(state.moves()))));
        }
        if rules.has(Rule::Fence) {
            compares.push(Compare::Elected(election));
        }
        let changes = draft.into_changes();
        let keys = changes.len().max(compares.len());
        assert!(keys <= TRANSACTION_KEYS_MAX, "{keys} keys in one transaction");
        plan.transaction = Some(Transaction { compares, changes });
    }
    plan
}

/// Takes as many calls of one node as fit.
fn take(
    draft: &mut Draft<'_>,
    rules: Rules,
    batch: &Batch<'_>,
    compares: &mut Vec<Compare>,
    plan: &mut Plan,
) {
    let key = Key::Publication(batch.node.clone());
    let before = draft.state.published(batch.node).cloned();
    let Some(mut published) = before.clone() else { return };
    published.refused.retain(|(number, _)| *number >= batch.unanswered);
    let nothing = BTreeSet::new();
    let (mut heard, mut expired, mut taken) = (batch.heard, batch.expired, 0);
    for (number, call) in (batch.first..).zip(batch.calls).take(TAKEN_AT_ONCE_MAX) {
        if number > published.number.saturating_add(1) && rules.has(Rule::Chain) {
            break;
        }
        let caller = Caller { node: batch.node, life: batch.life, heard, expired, rules };
        let refused = match effect(draft, caller, call) {
            Ok(changes) => {
                // One more for the node's publication.
                if draft.keys_with(&changes) + 1 + RESERVED_KEYS > TRANSACTION_KEYS_MAX {
                    break;
                }
                draft.add(changes);
                None
            }
            Err(Waits::Refused(refusal)) => Some(refusal),
            Err(Waits::For(_)) if expired => Some(Refusal::Unreachable),
            Err(Waits::For(_)) if batch.owes && rules.has(Rule::Yield) => Some(Refusal::Busy),
            Err(Waits::For(needs)) => {
                plan.waits.push(Wait { node: batch.node.clone(), number, needs });
                break;
            }
        };
        if draft.keys_with(&[(key.clone(), None)]) + RESERVED_KEYS > TRANSACTION_KEYS_MAX {
            break;
        }
        published.refused.extend(refused.map(|refusal| (number, refusal)));
        published.number = published.number.max(number);
        taken += 1;
        (heard, expired) = (&nothing, false);
    }
    if taken > 0 {
        compares.push(Compare::Is(key.clone(), before.map(Value::Published)));
        draft.add(vec![(key, Some(Value::Published(published)))]);
        plan.taken.push(batch.node.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Name, Place, ROOT};
    use crate::value::{Attributes, Kind, Member, Published, Standing, empty_tree};
    use tidemark_protocol::id::{FileCounter, FileId};

    fn member(state: &mut State, name: &str, life: u64) -> NodeName {
        let node: NodeName = name.parse().unwrap();
        let life = Incarnation(life);
        let member = Member { life, standing: Standing::Present };
        let published = Published { life, number: 0, refused: vec![], before: None };
        state.apply(&[
            (Key::Member(node.clone()), Some(Value::Member(member))),
            (Key::Publication(node.clone()), Some(Value::Published(published))),
        ]);
        node
    }

    fn creates(life: u64, count: u64) -> Vec<Call> {
        let create = |counter| {
            let name = Name::new(format!("{counter:->200}-{life:->54}").as_bytes()).unwrap();
            let id = FileId { incarnation: Incarnation(life), counter: FileCounter(counter) };
            let (kind, attributes) = (Kind::File, Attributes::default());
            Call::Create { place: Place { directory: ROOT, name }, base: None, id, kind, attributes }
        };
        (1..=count).map(create).collect()
    }

    #[test]
    fn calls_of_many_nodes_are_one_transaction_within_its_bounds() {
        let mut state = State::default();
        state.apply(&empty_tree(1).into_iter().map(|(key, value)| (key, Some(value))).collect::<Vec<_>>());
        let nodes = [member(&mut state, "a", 1), member(&mut state, "b", 2), member(&mut state, "c", 3)];
        let heard = BTreeSet::new();
        let calls: Vec<_> = (1..=3).map(|life| creates(life, 100)).collect();
        let mut rounds = 0;
        loop {
            let batch = |index: usize| {
                let life = Incarnation(index as u64 + 1);
                let first = state.taken_of(life) + 1;
                let calls = &calls[index][usize::try_from(first - 1).unwrap()..];
                let node = &nodes[index];
                let (owes, expired) = (false, false);
                Batch { node, life, first, unanswered: first, calls, heard: &heard, owes, expired }
            };
            let mut batches: Vec<_> = (0..3).map(batch).collect();
            batches.rotate_left(rounds % 3);
            let plan = plan(&state, Revision(1), Rules::COMPLETE, vec![], &batches);
            let Some(transaction) = plan.transaction else { break };
            assert!(transaction.changes.len() <= TRANSACTION_KEYS_MAX);
            assert!(transaction.compares.len() <= TRANSACTION_KEYS_MAX);
            let bytes = |change: &Change| {
                change.0.to_bytes().len() + change.1.as_ref().map_or(0, |value| value.to_bytes().len())
            };
            assert!(transaction.changes.iter().map(bytes).sum::<usize>() < TRANSACTION_BYTES_MAX / 4);
            state.apply(&transaction.changes);
            rounds += 1;
            assert!(rounds <= 12, "some 60 creates fit into one");
        }
        assert_eq!(state.entries(ROOT).count(), 300);
    }
}

//! The order in which several nodes read the same bytes of Tier-3: one node reads, and the others take the bytes from each other.
//!
//! Owns: the order in which nodes asked, and the supplier that each is sent to. Does not own: the nodes that have the bytes in
//! memory anyway (they are asked first), the bytes.
//!
//! The nodes that asked for the same bytes form a tree in the order of their questions. The first reads Tier-3, and each of the
//! others takes the bytes from a node that asked earlier, so no nodes wait in a circle. A node that could not supply the bytes to
//! another leaves the tree until a new tree for them begins. Such a node reads Tier-3 itself: a link that is cut costs a second
//! read and never a restore.

use crate::id::{FileId, NodeName, SealNumber};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Number of nodes that take a file's bytes from one other at once. More of them share its link; fewer make the tree deeper, and
/// each level begins when the one above is whole.
pub const FAN_OUT: usize = 4;

/// Number of files whose readers are remembered, about 200 bytes each. If a file is forgotten while it is read, a second node reads
/// Tier-3, too.
pub const READ_MAX: usize = 65_536;

/// The questions during one coordinator's term.
#[derive(Debug, Default)]
pub struct Readers {
    trees: BTreeMap<(FileId, SealNumber), Tree>,
    /// The same keys, in the order of their first questions.
    order: VecDeque<(FileId, SealNumber)>,
}

#[derive(Debug, Default)]
struct Tree {
    /// Nodes in the order of their questions.
    nodes: Vec<NodeName>,
    /// The last node that was sent to read Tier-3.
    reader: Option<NodeName>,
    /// Nodes that could not supply the bytes to another.
    aside: BTreeSet<NodeName>,
}

impl Readers {
    /// Returns the node from which `asker` takes the bytes; none: `asker` reads Tier-3. `failed`: nodes that could not supply them.
    ///
    /// Costs a pass over the nodes that asked for the same bytes.
    pub fn ask(
        &mut self,
        bytes: (FileId, SealNumber),
        asker: &NodeName,
        failed: &[NodeName],
    ) -> Option<&NodeName> {
        if !self.trees.contains_key(&bytes) {
            if self.trees.len() >= READ_MAX
                && let Some(oldest) = self.order.pop_front()
            {
                self.trees.remove(&oldest);
            }
            self.order.push_back(bytes);
        }
        let tree = self.trees.entry(bytes).or_default();
        for node in failed.iter().filter(|node| *node != asker) {
            let before = tree.nodes.len();
            tree.nodes.retain(|known| known != node);
            if tree.nodes.len() < before {
                tree.aside.insert(node.clone());
            }
        }
        if tree.aside.contains(asker) {
            return None;
        }
        let place = tree.nodes.iter().position(|node| node == asker).unwrap_or_else(|| {
            tree.nodes.push(asker.clone());
            tree.nodes.len() - 1
        });
        if place == 0 {
            let reader = Some(asker.clone());
            if tree.reader == reader {
                // The reader asks again: its bytes have been evicted since.
                *tree = Tree { nodes: vec![asker.clone()], ..Tree::default() };
            }
            tree.reader = reader;
            return None;
        }
        tree.nodes.get((place - 1) / FAN_OUT)
    }

    /// Forgets a node that is gone and the bytes that it read.
    pub fn gone(&mut self, node: &NodeName) {
        for tree in self.trees.values_mut() {
            tree.nodes.retain(|known| known != node);
            tree.aside.remove(node);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{FileCounter, Incarnation};
    use proptest::prelude::*;

    const BYTES: (FileId, SealNumber) =
        (FileId { incarnation: Incarnation(1), counter: FileCounter(1) }, SealNumber(1));

    fn name(number: usize) -> NodeName {
        format!("n{number}").parse().unwrap()
    }

    #[test]
    fn one_reads_and_the_others_are_spread_over_those_before_them() {
        let mut readers = Readers::default();
        let sources: Vec<_> = (0..10).map(|asker| readers.ask(BYTES, &name(asker), &[]).cloned()).collect();
        let of = |asker: usize| sources[asker].clone();
        assert_eq!(of(0), None);
        assert!((1..=FAN_OUT).all(|asker| of(asker) == Some(name(0))), "{sources:?}");
        assert!((FAN_OUT + 1..=2 * FAN_OUT).all(|asker| of(asker) == Some(name(1))), "{sources:?}");
        assert_eq!(of(2 * FAN_OUT + 1), Some(name(2)));
        assert_eq!(readers.ask(BYTES, &name(3), &[]), Some(&name(0)), "asked twice, answered alike");
    }

    #[test]
    fn the_next_reads_when_the_reader_is_gone_or_cannot_give_it() {
        let mut readers = Readers::default();
        for asker in 0..4 {
            readers.ask(BYTES, &name(asker), &[]);
        }
        assert_eq!(readers.ask(BYTES, &name(2), &[name(0)]), Some(&name(1)));
        assert_eq!(readers.ask(BYTES, &name(3), &[name(0)]), Some(&name(1)));
        assert_eq!(readers.ask(BYTES, &name(1), &[name(0)]), None);
        assert_eq!(readers.ask(BYTES, &name(0), &[]), None, "it takes no part any more");
        readers.gone(&name(1));
        assert_eq!(readers.ask(BYTES, &name(2), &[]), None);
    }

    #[test]
    fn no_more_is_remembered_than_there_is_room_for() {
        let mut readers = Readers::default();
        for counter in 0..READ_MAX as u64 + 10 {
            readers.ask((FileId { counter: FileCounter(counter), ..BYTES.0 }, SealNumber(1)), &name(1), &[]);
        }
        assert_eq!((readers.trees.len(), readers.order.len()), (READ_MAX, READ_MAX));
    }

    proptest! {
        /// Goal: no nodes wait in a circle, and without failures one node reads. Method: nodes ask at any moment, complain of the
        /// node they wait for, finish, and begin again; after each step all waits are followed to their end.
        #[test]
        fn whoever_waits_waits_for_one_that_reads(steps: Vec<(u8, bool)>) {
            let mut readers = Readers::default();
            let mut waits: BTreeMap<NodeName, Option<NodeName>> = BTreeMap::new();
            let mut complained = false;
            for (number, complains) in steps {
                let asker = name(usize::from(number) % 7);
                let from = waits.get(&asker).cloned().flatten();
                // A node that reads does not ask before it is done, and then it has the bytes.
                if waits.get(&asker) == Some(&None) {
                    continue;
                }
                let failed: Vec<_> = from.into_iter().filter(|_| complains).collect();
                complained |= !failed.is_empty();
                let source = readers.ask(BYTES, &asker, &failed).cloned();
                waits.insert(asker, source);
                for start in waits.keys() {
                    let mut at = start;
                    for _ in 0..=waits.len() {
                        match waits.get(at) {
                            Some(Some(next)) => at = next,
                            Some(None) | None => break,
                        }
                    }
                    prop_assert!(!matches!(waits.get(at), Some(Some(_))), "{:?}", waits);
                }
                let reads = waits.values().filter(|source| source.is_none()).count();
                prop_assert!(complained || reads <= 1, "{:?}", waits);
            }
        }
    }
}

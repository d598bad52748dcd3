//! Names that changed here lately, in the order of their changes.
//!
//! Owns: how many changes are remembered, and the number of each. Does not own: what a change was (`unanswered`), whom it is told (`outgoing`).

use super::NodeId;
use std::collections::{HashMap, VecDeque};

/// Names whose last operation is remembered, beside those that no coordinator has answered for: far more than change while a question is on
/// its way.
pub(super) const RECENT_MAX: usize = 1 << 14;

/// Names that changed here lately.
#[derive(Debug, Default)]
pub(super) struct RecentNames {
    /// Counts operations on names.
    pub(super) number: u64,
    /// The last operation on each name, and the order of these operations.
    pub(super) last: HashMap<(NodeId, Vec<u8>), u64>,
    pub(super) order: VecDeque<((NodeId, Vec<u8>), u64)>,
    /// The last operation that is not remembered any more.
    dropped: u64,
}

impl RecentNames {
    /// Notes an operation on a name. `unanswered`: the number of operations without an answer, each on two names at most. A catalog that this
    /// node takes up lacks them.
    pub(super) fn note(&mut self, name: (NodeId, Vec<u8>), unanswered: usize) {
        self.note_at(name, self.number + 1, unanswered);
    }

    /// Returns the names that changed after operation `number`, some of them twice; none if not all of them are remembered.
    pub(super) fn after(&self, number: u64) -> Option<impl Iterator<Item = &(NodeId, Vec<u8>)>> {
        let last = self.order.iter().rev().take_while(move |(_, at)| *at > number);
        (self.dropped <= number).then(|| last.map(|(name, _)| name))
    }

    pub(super) fn note_at(&mut self, name: (NodeId, Vec<u8>), number: u64, unanswered: usize) {
        self.number = number;
        self.last.insert(name.clone(), self.number);
        self.order.push_back((name, self.number));
        while self.order.len() > RECENT_MAX + 2 * unanswered {
            let (name, number) = self.order.pop_front().expect("it is longer than that");
            self.dropped = number;
            if self.last.get(&name) == Some(&number) {
                self.last.remove(&name);
            }
        }
    }
}

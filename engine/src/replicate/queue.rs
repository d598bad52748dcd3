//! The queue of questions, hashes and pushes that wait for their turn.
//!
//! Owns: the choice of the next. Does not own: how many are under way (`send`), the order (`protocol::replication::next_to_send`).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use tidemark_namespace::NodeId;
use tidemark_protocol::id::FileId;
use tidemark_protocol::replication::{BulkToken, Priority, SenderCommand, Waiting, next_to_send};

/// A file and a partner, between which a way (`send`) leads.
pub(super) type WayKey = (NodeId, String);
/// A way's key and number.
pub(super) type WayOf = (WayKey, u64);

/// A question or a hash.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) of: WayOf,
    pub(super) file: FileId,
    pub(super) command: SenderCommand,
}

#[derive(Debug)]
pub(super) struct Push {
    pub(super) of: WayOf,
    pub(super) file: FileId,
    pub(super) op: u64,
    pub(super) token: BulkToken,
    pub(super) chunks: Vec<u64>,
}

/// Rank of a way's file: its priority, whether it is sealed, since when it waits.
pub(super) type Rank = (Priority, bool, Duration);

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Questions by priority, each in order of arrival: a save's first question does not wait behind a lost partner's 100,000 files.
    asks: BTreeMap<Priority, VecDeque<Asked>>,
    /// Pushes, at most one for each way.
    pushes: Vec<Push>,
}

impl Queue {
    pub(super) fn ask(&mut self, priority: Priority, asked: Asked) {
        self.asks.entry(priority).or_default().push_back(asked);
    }

    /// Moves a file's questions to its new priority. Costs a look at each waiting question.
    pub(super) fn turns(&mut self, node: NodeId, priority: Priority) {
        let mut turned = Vec::new();
        for (_, asks) in self.asks.iter_mut().filter(|(of, asks)| **of != priority && !asks.is_empty()) {
            let (of_it, others) = std::mem::take(asks).into_iter().partition(|asked| asked.of.0.0 == node);
            *asks = others;
            turned.extend::<VecDeque<_>>(of_it);
        }
        for asked in turned {
            self.ask(priority, asked);
        }
    }

    pub(super) fn push(&mut self, push: Push) {
        self.pushes.push(push);
    }

    pub(super) fn next_ask(&mut self) -> Option<Asked> {
        self.asks.values_mut().find_map(VecDeque::pop_front)
    }

    /// Takes the next push. A push without a rank, because its way is gone, comes first, so that it leaves the queue. Costs a look at each.
    pub(super) fn next_push(&mut self, rank: impl Fn(&WayOf) -> Option<Rank>) -> Option<Push> {
        let waiting = self.pushes.iter().enumerate().map(|(at, push)| {
            let gone = (Priority::Differential, true, Duration::ZERO);
            let (priority, sealed, since) = rank(&push.of).unwrap_or(gone);
            Waiting { key: at, priority, sealed, since }
        });
        next_to_send(waiting).map(|at| self.pushes.swap_remove(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::id::{FileCounter, Incarnation};

    const FILE: FileId = FileId { incarnation: Incarnation(1), counter: FileCounter(1) };

    fn way(node: NodeId) -> WayOf {
        ((node, "b".to_owned()), 1)
    }

    #[test]
    fn a_new_save_is_asked_about_and_sent_before_what_was_lost_and_that_before_what_was_bad() {
        let mut queue = Queue::default();
        let all = [Priority::Scrub, Priority::Again, Priority::Again, Priority::Base];
        for (node, priority) in (0..).zip(all) {
            queue.ask(priority, Asked { of: way(node), file: FILE, command: SenderCommand::Hash { op: 1 } });
            let token = BulkToken([0; 16]);
            queue.push(Push { of: way(node), file: FILE, op: 1, token, chunks: vec![0] });
        }
        let asked: Vec<_> = std::iter::from_fn(|| queue.next_ask()).map(|asked| asked.of.0.0).collect();
        assert_eq!(asked, [3, 1, 2, 0]);
        for node in [1, 2, 1] {
            let asked = Asked { of: way(node), file: FILE, command: SenderCommand::Hash { op: 1 } };
            queue.ask(Priority::Again, asked);
        }
        // The file is written again.
        queue.turns(1, Priority::Base);
        let asked: Vec<_> = std::iter::from_fn(|| queue.next_ask()).map(|asked| asked.of.0.0).collect();
        assert_eq!(asked, [1, 1, 2]);
        // The second push has waited longer than the third.
        let since = |node: NodeId| Duration::from_secs(node);
        let rank = |of: &WayOf| Some((all[usize::try_from(of.0.0).ok()?], true, since(of.0.0)));
        let sent: Vec<_> = std::iter::from_fn(|| queue.next_push(rank)).map(|push| push.of.0.0).collect();
        assert_eq!(sent, [3, 1, 2, 0]);
    }
}

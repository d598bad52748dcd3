//! The directories that this node holds alone, and the calls at work.
//!
//! Owns: which directories are held or were given back, the calls at work in them and on single names, waiting for these calls. Does not
//! own: when to ask (`names`), who gets a directory (the coordinator), the names themselves (`namespace`).
//!
//! A directory is given back only when no call is at work in it: a call's changes are published before another node may look.

use super::asking::Turns;
use super::remembered::{Name, Remembered};
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidemark_namespace::{Namespace, NodeId};
use tidemark_protocol::cluster::leases::KNOWN;
use tidemark_protocol::cluster::wire::BATCH_ITEMS_MAX;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Maximum number of directories held at a time, about 200 bytes each. Forgetting a directory costs a question.
const HELD_MAX: usize = 65_536;

/// Maximum number of recalled directories that are remembered: far more than answers on their way at a time.
const GIVEN_BACK_MAX: usize = 4096;

/// Longest time that an answer sent before a recall may be on its way: the coordinator's wait for a recall, and some more. An answer
/// after this is meant: the coordinator did not hear that the directory was given back.
const GIVEN_BACK_FOR: Duration = Duration::from_secs(6);

/// Longest wait for a call at work in a directory before the directory is given back: an open for writing may copy the bytes first.
/// No call waits for room meanwhile (`fuse/src/room.rs`).
const WORK_MAX: Duration = Duration::from_secs(35);

/// Time for which this node asks before it changes a directory in one that it holds, once another node was answered about a name there.
/// A node that was answered may have looked the directory up, and does not ask about it for a moment (`remembered`).
const SEEN_FOR: Duration = Duration::from_secs(3);
const _: () =
    assert!(SEEN_FOR.as_millis() > KNOWN.as_millis(), "what others know of a directory is forgotten by then");

#[derive(Debug, Default)]
pub(super) struct Names {
    held: Mutex<Held>,
    left: Notify,
    /// When the coordinator was first found to be away; none while it answers.
    outage: Mutex<Option<Instant>>,
    pub(super) turns: Turns,
}

#[derive(Debug, Default)]
pub(super) struct Held {
    directories: HashMap<NodeId, Holding>,
    /// The tickets of the calls at work on single names, from before they ask.
    at_work: HashMap<Name, BTreeSet<u64>>,
    /// Number of the last ticket. A recall waits for those before it: a program that looks a name up all the time has no end.
    last_ticket: u64,
    /// When this node was last asked to settle a name.
    settled_at: Option<Instant>,
    /// Directories that were recalled: an answer on its way may still say that this node holds them alone.
    given_back: GivenBack,
    pub(super) remembered: Remembered,
    /// Number of held directories below each directory.
    above: HashMap<NodeId, u32>,
    /// Number of recalls under way of each directory: no new call may begin there.
    recalls: HashMap<NodeId, u32>,
}

/// The directories that were recalled last, the oldest first.
#[derive(Debug, Default)]
struct GivenBack {
    nodes: HashMap<NodeId, Instant>,
    order: VecDeque<NodeId>,
}

impl GivenBack {
    fn note(&mut self, node: NodeId) {
        if self.nodes.insert(node, Instant::now()).is_some() {
            return;
        }
        self.order.push_back(node);
        if self.order.len() > GIVEN_BACK_MAX
            && let Some(old) = self.order.pop_front()
        {
            self.nodes.remove(&old);
        }
    }

    /// Whether the directory was recalled less than [`GIVEN_BACK_FOR`] ago, or since `asked_at`.
    fn is_recent(&self, node: NodeId, asked_at: Instant) -> bool {
        self.nodes.get(&node).is_some_and(|at| *at >= asked_at || at.elapsed() < GIVEN_BACK_FOR)
    }
}

#[derive(Debug)]
struct Holding {
    at_work: u32,
    /// The directories above, which cannot move while this one is held.
    above: Vec<NodeId>,
    /// When another node was last answered about a name in the directory.
    seen_at: Option<Instant>,
}

impl Names {
    pub(super) fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that this node holds the directory alone. Returns false if it was recalled before the answer came. `seen`: other nodes were
    /// answered about directories in it a moment ago. So they were if this node was asked for a name since it asked.
    pub(super) fn hold(&self, namespace: &Namespace, node: NodeId, seen: bool, asked_at: Instant) -> bool {
        let above = directories_above(namespace, node);
        let mut held = self.lock();
        let was_asked = held.settled_at.is_some_and(|settled_at| settled_at >= asked_at);
        let seen_at = (seen || was_asked).then(Instant::now);
        if held.given_back.is_recent(node, asked_at) || held.recalls.contains_key(&node) {
            return false;
        }
        if held.directories.len() >= HELD_MAX
            && let Some(idle) =
                held.directories.iter().find(|(_, holding)| holding.at_work == 0).map(|(node, _)| *node)
        {
            held.forget(idle);
        }
        if let Some(holding) = held.directories.get_mut(&node) {
            holding.seen_at = seen_at.or(holding.seen_at);
            return true;
        }
        for parent in &above {
            *held.above.entry(*parent).or_insert(0) += 1;
        }
        held.directories.insert(node, Holding { at_work: 0, above, seen_at });
        true
    }

    /// Begins a call in a directory. Returns false if the directory is not held.
    pub(super) fn enter(&self, node: NodeId) -> bool {
        self.lock().enter(node)
    }

    /// Begins a call that changes a directory, by the directory that it is in. Returns its ticket; none if that one is not held, and
    /// if others may have looked up directories in it. Who looks the changed one up waits for the call.
    pub(super) fn enter_to_change(&self, name: &Name) -> Option<u64> {
        let mut held = self.lock();
        let seen_at = held.directories.get(&name.0).and_then(|holding| holding.seen_at);
        let enters = seen_at.is_none_or(|at| at.elapsed() >= SEEN_FOR) && held.enter(name.0);
        enters.then(|| held.begin(name.clone()))
    }

    pub(super) fn leave(&self, node: NodeId) {
        if let Some(holding) = self.lock().directories.get_mut(&node) {
            holding.at_work = holding.at_work.saturating_sub(1);
        }
        self.left.notify_waiters();
    }

    pub(super) fn holds_all(&self, nodes: &[NodeId]) -> bool {
        let held = self.lock();
        nodes.iter().all(|node| held.directories.contains_key(node) && !held.recalls.contains_key(node))
    }

    /// Whether a directory is where it was: one above a held directory cannot move, and this node hears of a change of one that it looked
    /// up.
    pub(super) fn is_still_there(&self, node: NodeId) -> bool {
        let held = self.lock();
        held.above.contains_key(&node)
            || held.directories.contains_key(&node)
            || held.remembered.knows(node, Instant::now())
    }

    /// Lets no new call begin in a directory, and waits up to [`WORK_MAX`] for calls at work. Calls may begin again once what is returned is
    /// dropped, unless the directory was given back by then.
    pub(super) async fn recall(&self, node: NodeId) -> Recall<'_> {
        let recall = Recall { names: self, node };
        let last = {
            let mut held = self.lock();
            held.given_back.note(node);
            *held.recalls.entry(node).or_insert(0) += 1;
            held.last_ticket
        };
        self.wait_while(|held| {
            let is_earlier = |ticket: &u64| *ticket <= last;
            held.directories.get(&node).is_some_and(|holding| holding.at_work > 0)
                || held.at_work.iter().any(|((directory, _), at_work)| {
                    *directory == node && at_work.first().is_some_and(is_earlier)
                })
        })
        .await;
        recall
    }

    /// Waits until no such call is at work any more, up to [`WORK_MAX`].
    async fn wait_while(&self, is_at_work: impl Fn(&Held) -> bool) {
        let ended = async {
            loop {
                // Listens before it looks, so that an end in between is not missed.
                let mut left = pin!(self.left.notified());
                left.as_mut().enable();
                if !is_at_work(&self.lock()) {
                    return;
                }
                left.await;
            }
        };
        // After that, what the call does is published later.
        let _ = tokio::time::timeout(WORK_MAX, ended).await;
    }

    /// Records that a call begins to work on a name. Returns its ticket.
    pub(super) fn begin(&self, name: Name) -> u64 {
        self.lock().begin(name)
    }

    pub(super) fn done(&self, name: &Name, ticket: u64) {
        let mut held = self.lock();
        if let Some(at_work) = held.at_work.get_mut(name) {
            at_work.remove(&ticket);
            if at_work.is_empty() {
                held.at_work.remove(name);
            }
        }
        drop(held);
        self.left.notify_waiters();
    }

    /// Begins a call on a name that a look-up found missing a moment ago, and that is promised to this node since. Returns its ticket; none if
    /// it has to ask.
    pub(super) fn begin_promised(&self, name: &Name) -> Option<u64> {
        let now = Instant::now();
        let mut held = self.lock();
        if !held.remembered.take_promise(name, now) {
            return None;
        }
        held.remembered.makes(name.0, now);
        Some(held.begin(name.clone()))
    }

    /// Forgets what earlier answers allowed.
    pub(super) fn forget_answers(&self) {
        self.lock().remembered.forget_answers(Instant::now());
    }

    /// Gives the promise of a name back, and waits up to [`WORK_MAX`] until no call that has begun works on the name.
    pub(super) async fn settle(&self, name: &Name) {
        let last = {
            let mut held = self.lock();
            let now = Instant::now();
            held.remembered.wants(name, now);
            held.settled_at = Some(now);
            if let Some(holding) = held.directories.get_mut(&name.0) {
                holding.seen_at = Some(now);
            }
            held.last_ticket
        };
        self.wait_while(|held| {
            held.at_work.get(name).and_then(BTreeSet::first).is_some_and(|first| *first <= last)
        })
        .await;
    }

    /// Records that this node no longer holds the directory alone.
    pub(super) fn forget(&self, node: NodeId) {
        self.lock().forget(node);
    }

    /// Follows a directory that got another place: it and those below it are held in other directories now.
    pub(super) fn moved(&self, namespace: &Namespace, node: NodeId) {
        let mut held = self.lock();
        for at in held.at_or_below(node) {
            let above = directories_above(namespace, at);
            for parent in &above {
                *held.above.entry(*parent).or_insert(0) += 1;
            }
            let holding = held.directories.get_mut(&at).expect("it was found a moment ago");
            let before = std::mem::replace(&mut holding.above, above);
            held.leave_above(&before);
        }
    }

    /// Records that this node no longer holds the directory, or any below it, alone.
    pub(super) fn forget_below(&self, node: NodeId) {
        let mut held = self.lock();
        for at in held.at_or_below(node) {
            held.forget(at);
        }
    }

    /// Returns the paths of the held directories; of at most [`BATCH_ITEMS_MAX`].
    pub(super) fn alone(&self, namespace: &Namespace) -> Vec<Vec<u8>> {
        let held: Vec<_> = self.lock().directories.keys().copied().take(BATCH_ITEMS_MAX).collect();
        held.into_iter().filter_map(|node| namespace.nodes().path_of(node)).collect()
    }

    /// Forgets all held directories but these, which the coordinator lets this node hold on.
    pub(super) fn keep_alone(&self, namespace: &Namespace, paths: &[Vec<u8>]) {
        let kept: HashSet<NodeId> = paths.iter().filter_map(|path| namespace.nodes().node_at(path)).collect();
        let mut held = self.lock();
        let lost: Vec<_> = held.directories.keys().filter(|node| !kept.contains(node)).copied().collect();
        for node in lost {
            held.forget(node);
        }
        held.given_back = GivenBack::default();
        held.remembered.forget_answers(Instant::now());
    }

    /// Returns when the outage began: at `asked`, unless it had begun before.
    pub(super) fn outage_begun(&self, asked: Instant) -> Instant {
        *self.outage.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(asked)
    }

    pub(super) fn outage_over(&self) {
        *self.outage.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// A recall under way. A recall that failed gave nothing back, and nobody may come with another one.
#[derive(Debug)]
pub(super) struct Recall<'a> {
    names: &'a Names,
    node: NodeId,
}

impl Recall<'_> {
    /// Records that this node no longer holds the directory alone.
    pub(super) fn give_back(self) {
        self.names.forget(self.node);
    }
}

impl Drop for Recall<'_> {
    fn drop(&mut self) {
        count_down(&mut self.names.lock().recalls, self.node);
    }
}

impl Held {
    fn enter(&mut self, node: NodeId) -> bool {
        if self.recalls.contains_key(&node) {
            return false;
        }
        match self.directories.get_mut(&node) {
            Some(holding) => {
                holding.at_work += 1;
                true
            }
            None => false,
        }
    }

    fn begin(&mut self, name: Name) -> u64 {
        self.last_ticket += 1;
        self.at_work.entry(name).or_default().insert(self.last_ticket);
        self.last_ticket
    }

    /// Returns the held directories at or below one.
    fn at_or_below(&self, node: NodeId) -> Vec<NodeId> {
        let is_below = |at: &NodeId, holding: &Holding| *at == node || holding.above.contains(&node);
        let below = self.directories.iter().filter(|(at, holding)| is_below(at, holding));
        below.map(|(at, _)| *at).collect()
    }

    fn forget(&mut self, node: NodeId) {
        if let Some(holding) = self.directories.remove(&node) {
            self.leave_above(&holding.above);
        }
    }

    /// Notes that one held directory less is below these.
    fn leave_above(&mut self, above: &[NodeId]) {
        for parent in above {
            count_down(&mut self.above, *parent);
        }
    }
}

/// Takes one off a number; a number that is not there stays so.
fn count_down(numbers: &mut HashMap<NodeId, u32>, node: NodeId) {
    if let Some(count) = numbers.get_mut(&node) {
        *count -= 1;
        if *count == 0 {
            numbers.remove(&node);
        }
    }
}

/// Returns the directories above one, the nearest first.
fn directories_above(namespace: &Namespace, node: NodeId) -> Vec<NodeId> {
    let mut above = Vec::new();
    let mut at = node;
    while let Ok(parent) = namespace.nodes().parent(at)
        && parent != at
    {
        above.push(parent);
        at = parent;
    }
    above
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn after_a_recall_that_failed_calls_begin_again_unless_another_one_is_under_way() {
        let names = Names::default();
        let holding = Holding { at_work: 0, above: Vec::new(), seen_at: None };
        names.lock().directories.insert(7, holding);
        let (one, other) = (names.recall(7).await, names.recall(7).await);
        assert!(!names.enter(7));
        drop(one);
        assert!(!names.enter(7), "the other one waits for no call that begins now");
        drop(other);
        assert!(names.enter(7));
        names.leave(7);
        names.recall(7).await.give_back();
        assert!(!names.enter(7));
        // A recall that came while the directory was not held ends no other one.
        let before = names.recall(7).await;
        names.lock().directories.insert(7, Holding { at_work: 0, above: Vec::new(), seen_at: None });
        let one = names.recall(7).await;
        drop(before);
        assert!(!names.enter(7));
        drop(one);
        assert!(names.enter(7));
    }

    #[test]
    fn an_answer_to_a_question_from_before_a_recall_counts_for_nothing_however_late() {
        let now = Instant::now();
        let given_back = GivenBack { nodes: HashMap::from([(7, now - GIVEN_BACK_FOR)]), order: [7].into() };
        assert!(given_back.is_recent(7, now - 2 * GIVEN_BACK_FOR));
        assert!(!given_back.is_recent(7, now));
        assert!(!given_back.is_recent(8, now - 2 * GIVEN_BACK_FOR));
    }
}

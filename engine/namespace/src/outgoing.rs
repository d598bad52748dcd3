//! Changes to publish to other nodes: the operations on names made here, in order, and the nodes whose state changed.
//!
//! Owns: collecting both in the change that makes them, and their audience. Does not own: which operations are kept (`unanswered`), nodes
//! as they stand (`standing`), sending them (`cluster::publisher`), applying other nodes' changes (`mirror`).
//!
//! Operations keep their order. States are published as they are at that moment, so that a thousand changes of one file are a single
//! state. If more has gathered than is kept, everything is published anew, which costs nothing but time.

use super::attr::observe;
use super::carried::CarriedNames;
use super::catalog::{Moment, is_told};
use super::guarded::Guarded;
use super::hidden::path_in;
use super::node::Node;
use super::recent::RecentNames;
use super::standing::node_in_sight;
use super::tree::{Touched, Tree};
use super::unanswered::Unanswered;
use super::view::NODES_AT_ONCE;
use super::{FileState, FileView, NodeId, ROOT, State, is_hidden};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;
use tidemark_protocol::cluster::kept::REMOVED_MAX;
use tidemark_protocol::cluster::wire::{NUMBER_BYTES, NameOperation, NodeAttributes};
use tidemark_protocol::id::{FileId, Incarnation};
use tidemark_protocol::path::{split, upwards};

/// Files that are begun and empty at a time: more than programs may have open. Files beyond this limit are published when they are
/// closed.
const BEGUN_MAX: usize = 1 << 16;

/// Operations that are examined for each question about a name. With more, publishing them first costs less.
const LAG_MAX: usize = 1024;

/// Receiver of this node's changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Audience {
    /// Another node, which coordinates.
    #[default]
    Coordinator,
    /// Another node keeps the tree of this node, which coordinates. If this node loses the coordinator role, its operations tell its
    /// successor what it missed.
    Keeper,
    /// No other node keeps the tree of this node, which coordinates.
    Nobody,
}

/// Changes to publish to other nodes; nothing is collected if there are none.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    pub(super) untold: Option<Unpublished>,
    /// Operations that names read from Tier-3 do not reflect, while those names are awaited.
    pub(super) carried: CarriedNames,
}

/// Changes that have not been published.
#[derive(Debug, Default)]
pub(super) struct Unpublished {
    pub(super) unanswered: Unanswered,
    audience: Audience,
    touched: BTreeSet<NodeId>,
    /// Files that were published as empty while a program writes them. Writes past the daemon are not published.
    begun: BTreeSet<NodeId>,
    /// Whether the current change came from other nodes.
    muted: bool,
    recent: RecentNames,
    /// Names that this node was let change lately; an empty name is the whole directory.
    lets: RecentNames,
    /// Number of operations on names that the catalog has which this tree became last; 0 for a member.
    taken_up: u64,
    /// Files that lost their last name by operations without an answer, each with the operation's number.
    ended: VecDeque<(u64, FileId)>,
}

impl Unpublished {
    fn new(journal_bytes: u64) -> Self {
        Self { unanswered: Unanswered::new(journal_bytes), ..Self::default() }
    }
}

/// A question to the coordinator whose answer is applied here.
#[derive(Debug, Clone, Copy)]
pub struct Question {
    /// [`Publications::names_number`] before the question.
    pub at: u64,
    /// The same for attributes: those that were set here later are not in the answer. They are told as states, and not as operations.
    pub attributes_at: u64,
    /// Whether the answer lets this node change what it is about. Who wants to change that waits for this node's call, so answers to other
    /// questions from before, which arrive after this one, say nothing of it.
    pub lets: bool,
}

impl Question {
    /// Makes a question that was asked after so many operations on names here.
    #[must_use]
    pub fn new(at: u64, lets: bool) -> Self {
        Self { at, attributes_at: at, lets }
    }
}

/// A publication to send.
#[derive(Debug, Default)]
pub struct Told {
    /// The publication's number; 0 if there is nothing to publish.
    pub number: u64,
    pub operations: Vec<NameOperation>,
    pub states: Vec<OutgoingNode>,
    /// Whether nothing else was left to publish then.
    pub all: bool,
}

/// A node as it stands.
#[derive(Debug, Clone)]
pub struct OutgoingNode {
    pub node: NodeId,
    pub path: Vec<u8>,
    pub attributes: NodeAttributes,
    /// When a call last set any of the attributes.
    pub attributes_ns: i64,
    /// The node's other paths, if all of them are known.
    pub other_names: Option<Vec<Vec<u8>>>,
    pub body: OutgoingBody,
}

impl OutgoingNode {
    /// Upper estimate of the bytes that the node takes in a message.
    pub(super) fn bytes_most(&self) -> usize {
        let of_body = match &self.body {
            OutgoingBody::File(view) => match &view.state {
                FileState::Sealed { chunks, .. } => chunks.len() * NUMBER_BYTES,
                FileState::Open { .. } | FileState::Closed | FileState::Cut | FileState::Mapped => 0,
            },
            OutgoingBody::Symlink(target) => target.len(),
            OutgoingBody::Directory => 0,
        };
        self.path.len() + self.attributes.xattr_bytes() + of_body
    }
}

/// The kind of a node, with its content.
#[derive(Debug, Clone)]
pub enum OutgoingBody {
    Directory,
    Symlink(Vec<u8>),
    File(Box<FileView>),
}

/// Publications to other nodes, for the sender.
#[derive(Debug, Clone, Copy)]
pub struct Publications<'a> {
    pub(super) state: &'a Guarded,
}

impl Publications<'_> {
    /// Starts collecting changes for another node, which coordinates from now on ([`Publications::take_outgoing`]). Does nothing while
    /// this tree is the catalog: a join that was under way when this node took the coordinator role ends after that.
    pub fn collect_outgoing(&self) {
        self.state.look(|state| {
            if state.removed.is_some() {
                return;
            }
            state.outgoing.carried = CarriedNames::default();
            let outgoing =
                state.outgoing.untold.get_or_insert_with(|| Unpublished::new(self.state.journal_bytes));
            (outgoing.audience, outgoing.taken_up) = (Audience::Coordinator, 0);
        });
    }

    /// Makes this tree the source of other nodes' state, since this node coordinates from now on. If `is_kept`, another node keeps this
    /// tree, and this node's own operations stay here until their outcome is kept there.
    pub fn lead_outgoing(&self, is_kept: bool) {
        self.state.look(|state| {
            if is_kept && !state.outgoing.is_collected() {
                state.outgoing.untold = Some(Unpublished::new(self.state.journal_bytes));
            }
            let Some(outgoing) = &mut state.outgoing.untold else { return };
            outgoing.audience = if is_kept { Audience::Keeper } else { Audience::Nobody };
            outgoing.touched.clear();
            outgoing.unanswered.unsent();
        });
    }

    /// Takes the next publication: up to `most` operations first, and states once no operation is left; each kind up to `bytes_most`
    /// bytes besides its last item. Numbers the publication if there is anything to publish, or if `anyway`. The number is in the journal
    /// when this returns, so that a successor knows that the publication may have been sent.
    #[must_use]
    pub fn take_outgoing(&self, most: usize, bytes_most: usize, anyway: bool) -> Told {
        self.publish(|state| {
            let Some(outgoing) = &mut state.outgoing.untold else { return Told::default() };
            let has_operations = outgoing.unanswered.has_operations();
            if !has_operations && outgoing.touched.is_empty() && !anyway {
                return Told::default();
            }
            outgoing.unanswered.publish(most, bytes_most);
            let (number, operations) = outgoing.unanswered.on_its_way().expect("it was made just now");
            let mut touched = BTreeSet::new();
            if outgoing.unanswered.has_all_sent() {
                std::mem::swap(&mut touched, &mut outgoing.touched);
            }
            let (mut states, mut bytes) = (Vec::new(), 0);
            while states.len() + operations.len() < most
                && bytes < bytes_most
                && let Some(node) = touched.pop_first()
            {
                let found = node_in_sight(&state.tree, node);
                state.outgoing.note_begun(node, found.as_ref());
                bytes += found.as_ref().map_or(0, OutgoingNode::bytes_most);
                states.extend(found);
            }
            let mut all = false;
            if let Some(outgoing) = &mut state.outgoing.untold {
                outgoing.touched.append(&mut touched);
                all = outgoing.touched.is_empty() && outgoing.unanswered.has_all_sent();
            }
            Told { number, operations, states, all }
        })
    }

    /// Begins to publish everything. Takes the next part: up to `most` operations, and up to `bytes_most` bytes besides the last. The
    /// part has no number when no operation is left. Drops collected states of this node's own nodes, because the whole that follows
    /// contains them.
    #[must_use]
    pub fn take_operations(&self, most: usize, bytes_most: usize) -> Told {
        self.publish(|state| {
            let (nodes, Some(outgoing)) = (&state.tree.nodes, &mut state.outgoing.untold) else {
                return Told::default();
            };
            // The whole omits other nodes' files, so their states stay.
            let is_others = |node: &Node| node.file().is_ok_and(|file| file.remote.is_some());
            outgoing.touched.retain(|id| nodes.get(id).is_some_and(|node| is_others(node)));
            if !outgoing.unanswered.has_operations() {
                return Told::default();
            }
            outgoing.unanswered.publish(most, bytes_most);
            let (number, operations) = outgoing.unanswered.on_its_way().expect("it was made just now");
            Told { number, operations, ..Told::default() }
        })
    }

    /// Returns the number of a new publication without operations.
    #[must_use]
    pub fn number_publication(&self) -> u64 {
        self.publish(|state| {
            let number =
                state.outgoing.untold.as_mut().map_or(0, |outgoing| outgoing.unanswered.publish(0, 0));
            Told { number, ..Told::default() }
        })
        .number
    }

    fn publish(&self, take: impl FnOnce(&mut State) -> Told) -> Told {
        let mut told = Told::default();
        let journaled = self.state.change(|state| {
            told = take(state);
            Ok(())
        });
        if let Err(error) = journaled {
            tracing::error!(%error, "the journal did not take what other nodes are told of");
        }
        told
    }

    /// Returns the publication that has not been answered yet, also one of the previous daemon.
    #[must_use]
    pub fn unanswered_publication(&self) -> Option<(u64, Vec<NameOperation>)> {
        self.state.look(|state| state.outgoing.untold.as_ref()?.unanswered.on_its_way())
    }

    /// Returns the operations that have not been answered.
    #[must_use]
    pub fn untold_operations(&self) -> Vec<NameOperation> {
        self.state.look(|state| {
            let outgoing = state.outgoing.untold.as_ref();
            outgoing.map_or_else(Vec::new, |outgoing| outgoing.unanswered.operations().cloned().collect())
        })
    }

    /// Whether any operation on names here has not been answered.
    #[must_use]
    pub fn has_untold(&self) -> bool {
        self.state.look(|state| {
            state.outgoing.untold.as_ref().is_some_and(|outgoing| {
                let unanswered = &outgoing.unanswered;
                let is_sent = unanswered.on_its_way().is_some_and(|(_, operations)| !operations.is_empty());
                is_sent || unanswered.has_operations() || unanswered.lost().is_some()
            })
        })
    }

    /// Returns the number of the last publication.
    #[must_use]
    pub fn last_publication(&self) -> u64 {
        self.state.look(|state| {
            state.outgoing.untold.as_ref().map_or(0, |outgoing| outgoing.unanswered.publication())
        })
    }

    /// Returns the number of the last answered publication, as far as the journal knows.
    #[must_use]
    pub fn last_answered(&self) -> u64 {
        self.state.look(|state| {
            state.outgoing.untold.as_ref().map_or(0, |outgoing| outgoing.unanswered.last_answered())
        })
    }

    /// Notes that the last publication was answered.
    pub fn publication_answered(&self) {
        self.with_unanswered(Unanswered::answered);
    }

    /// Notes that the last publication is not sent again: its content is published with everything. Files that other nodes have removed or
    /// replaced since are not made again.
    pub fn publication_unsent(&self) {
        self.publish(|state| {
            let (tree, identities, own) = (&state.tree, &state.identities, self.state.incarnation);
            let Some(outgoing) = &mut state.outgoing.untold else { return Told::default() };
            outgoing.unanswered.unsent();
            outgoing.unanswered.end_replaced(|file| {
                let node = identities.node_of(tree, file, own).and_then(|node| tree.nodes.get(&node));
                let mut paths = node.iter().flat_map(|node| node.links()).filter_map(|link| tree.path(link));
                paths.any(|path| is_told(&path))
            });
            Told::default()
        });
    }

    /// Returns the last loss of unpublished operations, if everything was not published since. Until then states create names.
    #[must_use]
    pub fn lost_operations(&self) -> Option<u64> {
        self.state.look(|state| state.outgoing.untold.as_ref()?.unanswered.lost())
    }

    /// Notes that unpublished operations are missing.
    pub fn lose_operations(&self) {
        self.with_unanswered(Unanswered::miss);
    }

    /// Notes that everything was published since that loss.
    pub fn everything_told(&self, loss: u64) {
        self.with_unanswered(|unanswered| unanswered.make_up(loss));
    }

    /// Notes that the tree is kept elsewhere, as of this node's publication of that number. `loss`: the last loss of operations before
    /// it.
    pub fn kept_until(&self, publication: u64, loss: Option<u64>) {
        self.with_unanswered(|unanswered| {
            if unanswered.publication() == publication {
                unanswered.answered();
            }
            if let Some(loss) = loss {
                unanswered.make_up(loss);
            }
        });
    }

    fn with_unanswered(&self, f: impl FnOnce(&mut Unanswered)) {
        self.state.look(|state| {
            if let Some(outgoing) = &mut state.outgoing.untold {
                f(&mut outgoing.unanswered);
            }
        });
    }

    /// Returns the number of operations on names so far. An answer requested before the next operation does not reflect it.
    #[must_use]
    pub fn names_number(&self) -> u64 {
        self.state.look(|state| state.outgoing.number())
    }

    /// Returns the paths of the names that this node changed and that the catalog lacks which this tree became. None if not all of them are
    /// remembered.
    #[must_use]
    pub fn changed_since_taken_up(&self) -> Option<Vec<Vec<u8>>> {
        self.state.look(|state| {
            let untold = state.outgoing.untold.as_ref()?;
            let changed = untold.recent.after(untold.taken_up)?;
            Some(changed.filter_map(|(parent, name)| path_in(&state.tree, *parent, name)).collect())
        })
    }

    /// Whether all of these are remembered.
    #[must_use]
    pub fn knows_changes_since_taken_up(&self) -> bool {
        self.state.look(|state| {
            let untold = state.outgoing.untold.as_ref();
            untold.is_some_and(|untold| untold.recent.after(untold.taken_up).is_some())
        })
    }

    /// Returns the number of operations on names so far, if those that were not answered only made files, at most [`LAG_MAX`], and this
    /// node has nothing of the name `name` in `parent`. Then an answer that there is no such name is true, whether these operations are
    /// published before or after it.
    #[must_use]
    pub fn makes_only_others(&self, parent: NodeId, name: &[u8]) -> Option<u64> {
        self.state.look(|state| {
            let unanswered = &state.outgoing.untold.as_ref()?.unanswered;
            let makes_another = |operation: &NameOperation| match operation {
                NameOperation::File { path, .. } => split(path).1 != name,
                _ => false,
            };
            let only_makes = unanswered.lost().is_none()
                && unanswered.count() <= LAG_MAX
                && unanswered.operations().all(makes_another);
            (only_makes && state.tree.child(parent, name).is_err()).then(|| state.outgoing.number())
        })
    }

    /// Whether an operation made here and not answered yet may have changed what is at `path`, or, if `is_listed`, which names are in it.
    /// Assumes so where operations are missing, or more than [`LAG_MAX`] have no answer.
    #[must_use]
    pub fn may_change(&self, path: &[u8], is_listed: bool) -> bool {
        self.state.look(|state| {
            let Some(untold) = &state.outgoing.untold else { return false };
            let unanswered = &untold.unanswered;
            let changes = |changed: &[u8]| {
                upwards(path).any(|above| above == changed) || is_listed && split(changed).0 == path
            };
            unanswered.lost().is_some()
                || unanswered.count() > LAG_MAX
                || unanswered.operations().any(|operation| operation.paths().any(changes))
        })
    }

    /// Queues files that were published as empty and have bytes by now. Each costs a look at its size, so the lock is released after
    /// every [`NODES_AT_ONCE`] of them.
    pub fn tell_begun(&self) {
        let mut after = ROOT;
        while let Some(last) = self.state.look(|state| state.outgoing.tell_begun_after(&state.tree, after)) {
            after = last;
        }
    }

    /// Wakes the sender, whether there is something to publish or not.
    pub fn told_again(&self) {
        self.state.told.notify_one();
    }

    /// Resolves when there may be something to publish.
    pub async fn outgoing_changed(self) {
        self.state.told.notified().await;
    }
}

impl Outgoing {
    /// Whether there are other nodes.
    pub(super) fn is_collected(&self) -> bool {
        self.untold.is_some()
    }

    /// Goes on publishing where the previous daemon was killed. The coordinator does not know that daemon's last operations on names.
    pub(super) fn tell_on(&mut self, unanswered: Option<Unanswered>, tree: &Tree) {
        let Some(mut unanswered) = unanswered else { return };
        let (mut recent, count) = (RecentNames::default(), unanswered.count());
        unanswered.count_names(|operation| {
            let before = recent.number;
            for (parent, name) in operation.paths().map(split) {
                // If a directory was moved since, the operation that moved it tells so.
                if let Ok(parent) = tree.resolve(parent) {
                    recent.note((parent, name.to_vec()), count);
                }
            }
            before
        });
        // Files that a rename replaced are not in its operation.
        let ended = (unanswered.first()..).zip(unanswered.operations()).filter_map(|(number, operation)| {
            let file = match operation {
                NameOperation::Removed { what, .. } => *what,
                NameOperation::Taken { from, .. } => Some(*from),
                _ => None,
            };
            Some((number, file?))
        });
        let ended = ended.collect();
        self.untold = Some(Unpublished { unanswered, recent, ended, ..Unpublished::default() });
    }

    /// Returns the number of operations on names so far.
    pub(super) fn number(&self) -> u64 {
        self.untold.as_ref().map_or(0, |untold| untold.recent.number)
    }

    /// Notes an operation on names. Costs nothing if no node is to be notified.
    pub(super) fn tell(&mut self, operation: impl FnOnce() -> Option<NameOperation>) {
        let is_carried = self.carried.is_collected();
        match &mut self.untold {
            None => return,
            Some(untold) if untold.muted => return,
            Some(untold) if untold.audience == Audience::Nobody => {
                untold.unanswered.miss();
                if !is_carried {
                    return;
                }
            }
            Some(_) => {}
        }
        let Some(operation) = operation() else { return };
        self.carried.note(&operation);
        if let Some(untold) = self.untold.as_mut().filter(|untold| untold.audience != Audience::Nobody) {
            untold.unanswered.push(operation, untold.recent.number);
        }
    }

    /// Notes that a name was given or removed here.
    pub(super) fn note_name(&mut self, parent: NodeId, name: &[u8]) {
        if let Some(untold) = &mut self.untold {
            untold.recent.note((parent, name.to_vec()), untold.unanswered.count());
        }
    }

    /// Notes that this node was let change a name, or all names of a directory (`name` is empty).
    pub(super) fn note_let(&mut self, parent: NodeId, name: &[u8]) {
        if let Some(untold) = &mut self.untold {
            untold.recent.number += 1;
            untold.lets.note_at((parent, name.to_vec()), untold.recent.number, 0);
        }
    }

    /// Whether an answer says nothing of a name: the name changed here after the question, or the answer to another question let this node
    /// change it since.
    pub(super) fn is_passed_over(&self, parent: NodeId, name: &[u8], asked: Question) -> bool {
        let is_let = |untold: &Unpublished| {
            let since = |name: &[u8]| untold.lets.last.get(&(parent, name.to_vec())).copied();
            since(name).max(since(b"")).is_some_and(|last| last > asked.at)
        };
        self.is_newer(parent, name, asked.at) || !asked.lets && self.untold.as_ref().is_some_and(is_let)
    }

    /// Notes that this tree becomes a catalog that has the operations on names up to this number. Forgets what this node was let change:
    /// another coordinator decides.
    pub(super) fn takes_up(&mut self, names: u64) {
        if let Some(untold) = &mut self.untold {
            (untold.lets, untold.taken_up) = (RecentNames::default(), names);
        }
    }

    /// Whether a name changed here after operation `number`.
    pub(super) fn is_newer(&self, parent: NodeId, name: &[u8], number: u64) -> bool {
        let untold = self.untold.as_ref();
        untold.is_some_and(|untold| {
            untold.recent.last.get(&(parent, name.to_vec())).is_some_and(|last| *last > number)
        })
    }

    /// Notes that the operation that was told last takes the last name from a file.
    pub(super) fn note_ended(&mut self, file: FileId) {
        let Some(untold) = &mut self.untold else { return };
        let (first, number) = (untold.unanswered.first(), untold.unanswered.next().saturating_sub(1));
        let is_answered = |ended: Option<&(u64, FileId)>| ended.is_some_and(|(number, _)| *number < first);
        while untold.ended.len() >= REMOVED_MAX || is_answered(untold.ended.front()) {
            untold.ended.pop_front();
        }
        untold.ended.push_back((number, file));
    }

    /// Takes the files that lost their last name by operations without an answer.
    pub(super) fn take_ended(&mut self) -> Vec<FileId> {
        let Some(untold) = &mut self.untold else { return Vec::new() };
        let first = untold.unanswered.first();
        untold.ended.drain(..).filter(|(number, _)| *number >= first).map(|(_, file)| file).collect()
    }

    /// Marks the current change as coming from other nodes, so that it is not published to them.
    pub(super) fn mute(&mut self) {
        if let Some(untold) = &mut self.untold {
            untold.muted = true;
        }
    }

    /// Queues a file whose present size other nodes need. For the journal nothing changes.
    pub(super) fn tell_size(&mut self, node: NodeId) {
        if let Some(untold) = &mut self.untold {
            untold.touched.insert(node);
        }
    }

    /// Notes that a node was published as it stands.
    pub(super) fn note_begun(&mut self, node: NodeId, told: Option<&OutgoingNode>) {
        let Some(untold) = &mut self.untold else { return };
        let is_begun = told.is_some_and(|told| match &told.body {
            OutgoingBody::File(view) => {
                view.remote.is_none() && view.size_bytes == 0 && matches!(view.state, FileState::Open { .. })
            }
            OutgoingBody::Directory | OutgoingBody::Symlink(_) => false,
        });
        if !is_begun {
            untold.begun.remove(&node);
        } else if untold.begun.len() < BEGUN_MAX {
            untold.begun.insert(node);
        }
    }

    /// [`Publications::tell_begun`] for the next files after `after`; returns the last of them, or none if there is none.
    pub(super) fn tell_begun_after(&mut self, tree: &Tree, after: NodeId) -> Option<NodeId> {
        let (nodes, untold) = (&tree.nodes, self.untold.as_mut()?);
        let size_bytes = |id: &NodeId| {
            let node = nodes.get(id)?;
            observe(node, node.file().ok()?).ok().map(|observed| observed.size_bytes)
        };
        let range = (Bound::Excluded(after), Bound::Unbounded);
        let some: Vec<_> = untold.begun.range(range).take(NODES_AT_ONCE).copied().collect();
        for id in some.iter().filter(|id| size_bytes(id) != Some(0)) {
            untold.begun.remove(id);
            untold.touched.insert(*id);
        }
        some.last().copied()
    }

    /// Whether there is something to publish.
    pub(super) fn tells(&self) -> bool {
        self.untold.as_ref().is_some_and(|untold| {
            untold.audience == Audience::Coordinator
                && (untold.unanswered.has_operations() || !untold.touched.is_empty())
        })
    }

    /// Queues, at the end of a change, the changed nodes if they are to be published.
    #[inline]
    pub(super) fn collect(&mut self, touched: &Touched) {
        if let Some(untold) = &mut self.untold
            && !std::mem::take(&mut untold.muted)
            && untold.audience == Audience::Coordinator
        {
            untold.touched.extend(touched.nodes.iter().filter(|node| **node != ROOT));
        }
    }

    /// Counts operations that are kept together with the present tree as a publication of this node; returns its number.
    pub(super) fn publish_to_keeper(&mut self) -> u64 {
        let Some(untold) = &mut self.untold else { return 0 };
        if untold.audience == Audience::Keeper && !untold.unanswered.has_all_sent() {
            untold.unanswered.publish(usize::MAX, usize::MAX);
        }
        untold.unanswered.publication()
    }

    /// Returns the operations that are not in this node's publications up to this one.
    pub(super) fn untold_after(&self, publication: u64) -> Vec<NameOperation> {
        let untold = self.untold.as_ref();
        untold.map_or_else(Vec::new, |untold| untold.unanswered.after(publication).cloned().collect())
    }

    /// Returns the moment up to which this node's changes are in its publications up to this one. None where operations that are in none of
    /// them are not known. `next`: the number that the next node has.
    pub(super) fn told_until(&self, publication: u64, next: NodeId, own: Incarnation) -> Option<Moment> {
        let untold = self.untold.as_ref()?;
        let names = untold.unanswered.names_until(publication, untold.recent.number)?;
        // A file's number is that of the node with which it was made. A file that was taken over may have an older node.
        let made = untold.unanswered.after(publication).filter_map(|operation| match operation {
            NameOperation::File { file, .. } => Some(*file),
            _ => None,
        });
        let made = made.filter(|file| file.incarnation == own).map(|file| file.counter.0);
        Some(Moment { names, next: made.min().unwrap_or(next) })
    }

    /// Notes that a node's names changed here in a way that an answer on its way does not reflect.
    pub(super) fn note_names_of(&mut self, tree: &Tree, node: NodeId) {
        let Some(untold) = &mut self.untold else { return };
        let unanswered = untold.unanswered.count();
        tree.names_of(node).into_iter().for_each(|name| untold.recent.note(name, unanswered));
    }

    /// Notes that the names of `node` meant the file `from` until now, and mean `own` from now on.
    pub(super) fn tell_taken(&mut self, tree: &Tree, node: NodeId, from: FileId, own: FileId) {
        self.tell(|| {
            let taken = tree.node(node).ok()?;
            let mut paths = taken.links().filter_map(|link| tree.path(link));
            let path = paths.find(|path| !is_hidden(path))?;
            Some(NameOperation::Taken { path, from, file: own, attributes: attributes(taken) })
        });
        // An answer on its way about such a name, and the names in etcd, do not reflect this. After the operation, since these changes are its.
        self.note_names_of(tree, node);
        self.note_ended(from);
    }
}

pub(super) fn attributes(node: &Node) -> NodeAttributes {
    NodeAttributes {
        mode: node.mode,
        uid: node.uid,
        gid: node.gid,
        mtime_ns: node.mtime_ns,
        xattrs: node.xattrs.as_ref().map_or_else(Vec::new, |xattrs| xattrs.pairs()),
    }
}

#[cfg(test)]
#[path = "outgoing_test.rs"]
mod tests;

//! What other nodes have to be told: the operations on names made here, in order, and the nodes whose state changed.
//!
//! Owns: collecting both in the change that makes them, and for whom. Does not own: which operations are kept (`unanswered`),
//! nodes as they stand (`standing`), sending them (`cluster::publisher`), taking in what others send (`mirror`).
//!
//! Operations keep their order; states are told as they are when somebody asks, so that a thousand changes of one file are one.
//! Where more has gathered than is kept, everything is told anew instead: nothing is lost by that but time.

use super::attr::observe;
use super::carried::CarriedNames;
use super::guarded::Guarded;
use super::node::Node;
use super::standing::node_in_sight;
use super::tree::{Touched, Tree};
use super::unanswered::Unanswered;
use super::view::NODES_AT_ONCE;
use super::{FileState, FileView, NodeId, ROOT, State, is_hidden};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Bound;
use tidemark_protocol::cluster::wire::{NUMBER_BYTES, NameOperation, NodeAttributes};
use tidemark_protocol::id::FileId;
use tidemark_protocol::path::split;

/// Names whose last operation is remembered: far more than change while one question is on its way.
const RECENT_MAX: usize = 1 << 14;

/// Files that are begun and empty at a time: more than programs may have open. Of what is beyond it others hear when it is closed.
const BEGUN_MAX: usize = 1 << 16;

/// Who is told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Audience {
    /// Another node, which coordinates.
    #[default]
    Coordinator,
    /// This node coordinates, and another keeps its tree. If it is not the coordinator any more, its operations tell what that one missed.
    Keeper,
    /// This node coordinates, and nobody keeps its tree.
    Nobody,
}

/// Changes that other nodes have to be told of; nothing is collected where there are none.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    pub(super) untold: Option<Unpublished>,
    /// Operations that names of Tier-3 do not know of, while those are awaited.
    pub(super) carried: CarriedNames,
}

/// What has not been told.
#[derive(Debug, Default)]
pub(super) struct Unpublished {
    pub(super) unanswered: Unanswered,
    audience: Audience,
    touched: BTreeSet<NodeId>,
    /// Files that were told to be empty while a program writes them: of what it writes past the daemon nobody is told.
    begun: BTreeSet<NodeId>,
    /// What is changed now was heard from others.
    muted: bool,
    recent: RecentNames,
}

impl Unpublished {
    fn new(journal_bytes: u64) -> Self {
        Self { unanswered: Unanswered::new(journal_bytes), ..Self::default() }
    }
}

/// Names that changed here lately.
#[derive(Debug, Default)]
struct RecentNames {
    /// Counts operations on names.
    number: u64,
    /// The last operation on each, and their order.
    last: HashMap<(NodeId, Vec<u8>), u64>,
    order: VecDeque<((NodeId, Vec<u8>), u64)>,
}

impl RecentNames {
    fn note(&mut self, name: (NodeId, Vec<u8>)) {
        self.number += 1;
        self.last.insert(name.clone(), self.number);
        self.order.push_back((name, self.number));
        if self.order.len() > RECENT_MAX
            && let Some((name, number)) = self.order.pop_front()
            && self.last.get(&name) == Some(&number)
        {
            self.last.remove(&name);
        }
    }
}

/// A publication to be.
#[derive(Debug, Default)]
pub struct Told {
    /// Its number; 0 where there is nothing to tell.
    pub number: u64,
    pub operations: Vec<NameOperation>,
    pub states: Vec<OutgoingNode>,
    /// Nothing else was to be told then.
    pub all: bool,
}

/// A node as it stands.
#[derive(Debug, Clone)]
pub struct OutgoingNode {
    pub node: NodeId,
    pub path: Vec<u8>,
    pub attributes: NodeAttributes,
    /// When a call last set any of them.
    pub attributes_ns: i64,
    /// Its other paths, where they are known to be all.
    pub other_names: Option<Vec<Vec<u8>>>,
    pub body: OutgoingBody,
}

impl OutgoingNode {
    /// How many bytes of a message it takes, about and at most.
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

/// What it is.
#[derive(Debug, Clone)]
pub enum OutgoingBody {
    Directory,
    Symlink(Vec<u8>),
    File(Box<FileView>),
}

/// Publications to other nodes, for whoever sends them.
#[derive(Debug, Clone, Copy)]
pub struct Publications<'a> {
    pub(super) state: &'a Guarded,
}

impl Publications<'_> {
    /// From now on another node coordinates, and changes are collected for it ([`Publications::take_outgoing`]). Nothing changes while this tree is
    /// the catalog: a join that was under way when this node took the seat ends after that.
    pub fn collect_outgoing(&self) {
        self.state.look(|state| {
            if state.removed.is_some() {
                return;
            }
            state.outgoing.carried = CarriedNames::default();
            let outgoing =
                state.outgoing.untold.get_or_insert_with(|| Unpublished::new(self.state.journal_bytes));
            outgoing.audience = Audience::Coordinator;
        });
    }

    /// From now on this node coordinates: its tree is what others are told of. Its own operations stay here until what came of
    /// them is kept elsewhere, where anybody keeps it.
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

    /// Takes what is to be told: up to `most` operations first, and states once no operation is left; of each up to `bytes_most` besides the last.
    /// With a number where there is anything, or `anyway`. It is in the journal when this returns: whoever takes over knows that it may have been
    /// sent.
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

    /// Begins to tell everything: the next part of up to `most` operations, and of up to `bytes_most` besides the last; without a number where
    /// none is left. States of what this node has that were to be told are in what follows.
    #[must_use]
    pub fn take_operations(&self, most: usize, bytes_most: usize) -> Told {
        self.publish(|state| {
            let (nodes, Some(outgoing)) = (&state.tree.nodes, &mut state.outgoing.untold) else {
                return Told::default();
            };
            // Of others' files a whole says nothing.
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

    /// The number of a publication that has no operations.
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

    /// The publication that has not been answered yet, also one of the daemon before.
    #[must_use]
    pub fn unanswered_publication(&self) -> Option<(u64, Vec<NameOperation>)> {
        self.state.look(|state| state.outgoing.untold.as_ref()?.unanswered.on_its_way())
    }

    /// The operations that nobody has answered for.
    #[must_use]
    pub fn untold_operations(&self) -> Vec<NameOperation> {
        self.state.look(|state| {
            let outgoing = state.outgoing.untold.as_ref();
            outgoing.map_or_else(Vec::new, |outgoing| outgoing.unanswered.operations().cloned().collect())
        })
    }

    /// Whether something was done to names here that nobody has answered for.
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

    /// The number of the last publication.
    #[must_use]
    pub fn last_publication(&self) -> u64 {
        self.state.look(|state| {
            state.outgoing.untold.as_ref().map_or(0, |outgoing| outgoing.unanswered.publication())
        })
    }

    /// The number of the last publication that was answered, as far as the journal knows.
    #[must_use]
    pub fn last_answered(&self) -> u64 {
        self.state.look(|state| {
            state.outgoing.untold.as_ref().map_or(0, |outgoing| outgoing.unanswered.last_answered())
        })
    }

    /// The last publication was answered.
    pub fn publication_answered(&self) {
        self.with_unanswered(Unanswered::answered);
    }

    /// The last publication is not sent again: what was in it is told with everything.
    pub fn publication_unsent(&self) {
        self.with_unanswered(Unanswered::unsent);
    }

    /// The last loss of operations that were to be told, where everything was not told since: then states make names.
    #[must_use]
    pub fn lost_operations(&self) -> Option<u64> {
        self.state.look(|state| state.outgoing.untold.as_ref()?.unanswered.lost())
    }

    /// Operations are missing where they are to be told.
    pub fn lose_operations(&self) {
        self.with_unanswered(Unanswered::miss);
    }

    /// Everything was told since that loss.
    pub fn everything_told(&self, loss: u64) {
        self.with_unanswered(|unanswered| unanswered.make_up(loss));
    }

    /// The tree is kept elsewhere as this node's operations up to its publication of that number left it.
    /// `loss`: the last operations of them that were not collected.
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

    /// How many operations on names there have been: what was asked before the next one does not know of that.
    #[must_use]
    pub fn names_number(&self) -> u64 {
        self.state.look(|state| state.outgoing.number())
    }

    /// Files that were told to be empty and have bytes by now are to be told again. Each costs a look at its size, so the lock is let go
    /// of between [`NODES_AT_ONCE`] of them.
    pub fn tell_begun(&self) {
        let mut after = ROOT;
        while let Some(last) = self.state.look(|state| state.outgoing.tell_begun_after(&state.tree, after)) {
            after = last;
        }
    }

    /// Wakes whoever tells others, whether there is something or not.
    pub fn told_again(&self) {
        self.state.told.notify_one();
    }

    /// Resolves when there may be something to tell.
    pub async fn outgoing_changed(self) {
        self.state.told.notified().await;
    }
}

impl Outgoing {
    /// Whether there are other nodes.
    pub(super) fn is_collected(&self) -> bool {
        self.untold.is_some()
    }

    /// Goes on telling where the daemon before was killed. What it did to names last, the coordinator does not know.
    pub(super) fn tell_on(&mut self, unanswered: Option<Unanswered>, tree: &Tree) {
        let Some(unanswered) = unanswered else { return };
        let mut recent = RecentNames::default();
        for path in unanswered.operations().flat_map(NameOperation::paths) {
            let (parent, name) = split(path);
            // A directory that was moved since is said by what moved it.
            if let Ok(parent) = tree.resolve(parent) {
                recent.note((parent, name.to_vec()));
            }
        }
        self.untold = Some(Unpublished { unanswered, recent, ..Unpublished::default() });
    }

    /// How many operations on names there have been.
    pub(super) fn number(&self) -> u64 {
        self.untold.as_ref().map_or(0, |untold| untold.recent.number)
    }

    /// Notes an operation on names. Costs nothing where nobody is to be told.
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
            untold.unanswered.push(operation);
        }
    }

    /// A name was given or taken away here.
    pub(super) fn note_name(&mut self, parent: NodeId, name: &[u8]) {
        if let Some(untold) = &mut self.untold {
            untold.recent.note((parent, name.to_vec()));
        }
    }

    /// Whether a name changed here after so many operations.
    pub(super) fn is_newer(&self, parent: NodeId, name: &[u8], number: u64) -> bool {
        let untold = self.untold.as_ref();
        untold.is_some_and(|untold| {
            untold.recent.last.get(&(parent, name.to_vec())).is_some_and(|last| *last > number)
        })
    }

    /// What this change touches was heard from others; they are not told of it.
    pub(super) fn mute(&mut self) {
        if let Some(untold) = &mut self.untold {
            untold.muted = true;
        }
    }

    /// The bytes of a file are to be seen elsewhere as they are now. Nothing of it changes for the journal.
    pub(super) fn tell_size(&mut self, node: NodeId) {
        if let Some(untold) = &mut self.untold {
            untold.touched.insert(node);
        }
    }

    /// A node was told as it stands.
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

    /// [`Publications::tell_begun`] for the next files after that one; gives the last of them, and none where there is none.
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

    /// Whether there is something to tell.
    pub(super) fn tells(&self) -> bool {
        self.untold.as_ref().is_some_and(|untold| {
            untold.audience == Audience::Coordinator
                && (untold.unanswered.has_operations() || !untold.touched.is_empty())
        })
    }

    /// At the end of a change: its nodes are to be told, or not.
    #[inline]
    pub(super) fn collect(&mut self, touched: &Touched) {
        if let Some(untold) = &mut self.untold
            && !std::mem::take(&mut untold.muted)
            && untold.audience == Audience::Coordinator
        {
            untold.touched.extend(touched.nodes.iter().filter(|node| **node != ROOT));
        }
    }

    /// Operations that are kept in one go with the present tree count as a publication of this node; gives its number.
    pub(super) fn publish_to_keeper(&mut self) -> u64 {
        let Some(untold) = &mut self.untold else { return 0 };
        if untold.audience == Audience::Keeper && !untold.unanswered.has_all_sent() {
            untold.unanswered.publish(usize::MAX, usize::MAX);
        }
        untold.unanswered.publication()
    }

    /// Something about a node changed here that an answer about its names, which may be on its way, does not know of.
    pub(super) fn note_names_of(&mut self, tree: &Tree, node: NodeId) {
        let Some(untold) = &mut self.untold else { return };
        tree.names_of(node).into_iter().for_each(|name| untold.recent.note(name));
    }

    /// The names of `node` meant the file `from` until now, and mean `own` from now on.
    pub(super) fn tell_taken(&mut self, tree: &Tree, node: NodeId, from: FileId, own: FileId) {
        // An answer about one of them that is on its way, and what etcd keeps, do not know of this.
        self.note_names_of(tree, node);
        self.tell(|| {
            let taken = tree.node(node).ok()?;
            let mut paths = taken.links().filter_map(|link| tree.path(link));
            let path = paths.find(|path| !is_hidden(path))?;
            Some(NameOperation::Taken { path, from, file: own, attributes: attributes(taken) })
        });
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
mod tests {
    use super::super::{Caller, Namespace, NamespaceSettings};
    use super::*;
    use tidemark_protocol::id::Incarnation;
    use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};

    #[test]
    fn more_begun_files_than_are_looked_at_at_once_are_all_told_again() {
        const ME: Caller = Caller { uid: 0, gid: 0, pid: 0, now_ns: 1, request: 0 };
        const FILES: usize = NODES_AT_ONCE + 2;
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let medium = MediumChoice::Directory(folder.path().to_path_buf());
        let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
        let tree = Namespace::new(NamespaceSettings::new(Incarnation(1)), tier1).unwrap();
        tree.publications().collect_outgoing();
        let create = |file: usize| tree.create(&ME, ROOT, file.to_string().as_bytes(), 0o644, 1).unwrap().1;
        let made: Vec<_> = (0..FILES).map(create).collect();
        let told = || {
            tree.publications().publication_answered();
            tree.publications().take_outgoing(usize::MAX, usize::MAX, false).states.len()
        };
        assert_eq!(told(), FILES);
        tree.publications().tell_begun();
        assert_eq!(told(), 0, "they are empty still");
        for file in &made {
            file.backing.write_at(b"bytes", 0).unwrap();
        }
        tree.publications().tell_begun();
        assert_eq!(told(), FILES);
    }
}

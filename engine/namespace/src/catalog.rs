//! The tree as the catalog: collecting changes that are not kept elsewhere yet.
//!
//! Owns: which nodes, fates and removals are not kept yet. Does not own: keeping (control's catalog), the format
//! (`protocol::cluster::kept`), becoming the catalog from what is kept (`mirror`), what members are notified of (`outgoing`).
//!
//! The catalog keeps states, not operations: a state that is kept twice, or in another order, gives the same result.

use super::fates::Fates;
use super::file::File;
use super::guarded::Guarded;
use super::hidden::TORN;
use super::standing::node_under;
use super::tree::Tree;
use super::view::NODES_AT_ONCE;
use super::{HIDDEN, NodeId, OutgoingNode, ROOT, State, is_hidden, path_of_torn};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Mutex;
use tidemark_protocol::cluster::kept::{Process, ProcessFate, REMOVED_MAX};
use tidemark_protocol::id::{FileId, Incarnation};

/// A node with the directories that contain it, and its name in each.
pub type NamedNode = (OutgoingNode, Vec<(NodeId, Vec<u8>)>);

/// Changes that are not kept elsewhere yet, taken in order to be kept.
#[derive(Debug, Default)]
pub struct Unkept {
    pub nodes: Vec<NamedNode>,
    /// Nodes without a name.
    pub gone: Vec<NodeId>,
    pub fates: Vec<ProcessFate>,
    /// Processes whose fates this node has forgotten.
    pub forgotten: Vec<Process>,
    /// Files that lost their last name, in the order of the losses.
    pub removed: Vec<FileId>,
    /// Whether nothing is left to take.
    pub all: bool,
    /// If nothing is left, the last publication that this node's own operations in the tree count as.
    pub publication: u64,
    /// Number of the last loss of uncollected operations, if it was not made up for; the tree has their results.
    pub loss: Option<u64>,
}

/// A moment of this node's tree, from which later operations and nodes are told apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moment {
    /// Number of operations on names until then.
    pub names: u64,
    /// Number that the next node had then.
    pub next: NodeId,
}

/// The last files that lost their last name here ([`REMOVED_MAX`]). A node that was away, or that keeps a copy, cannot bring them back
/// although it does not know of their removal.
#[derive(Debug)]
pub(super) struct Removed {
    /// The life of this node.
    own: Incarnation,
    files: BTreeSet<FileId>,
    order: VecDeque<FileId>,
    /// Removed files whose nodes have not been notified yet.
    untold: BTreeSet<FileId>,
    /// The removed files that are not kept elsewhere yet, in the same order.
    unkept: VecDeque<FileId>,
}

impl Removed {
    fn of(own: Incarnation) -> Self {
        Self {
            own,
            files: BTreeSet::new(),
            order: VecDeque::new(),
            untold: BTreeSet::new(),
            unkept: VecDeque::new(),
        }
    }

    /// Whether a file is removed with the last name of `node` ([`is_last_of`]).
    pub(super) fn means(&self, node: NodeId, file: &File, adopted: Option<NodeId>) -> bool {
        is_last_of(self.own, node, file, adopted)
    }

    pub(super) fn note(&mut self, file: FileId) {
        if self.files.insert(file) {
            self.order.push_back(file);
            self.unkept.push_back(file);
            self.tell(file);
        }
        if self.unkept.len() > REMOVED_MAX {
            self.unkept.pop_front();
        }
        if self.order.len() > REMOVED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.files.remove(&oldest);
        }
    }

    fn tell_again(&mut self, file: FileId) {
        self.note(file);
        self.tell(file);
    }

    fn tell(&mut self, file: FileId) {
        // Beyond that, nodes keep the bytes until they are asked for the file.
        if self.untold.len() < REMOVED_MAX {
            self.untold.insert(file);
        }
    }

    pub(super) fn contains(&self, file: FileId) -> bool {
        self.files.contains(&file)
    }
}

/// The tree as the catalog: what other nodes published for it, and which part is not kept elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct CatalogTree<'a> {
    pub(super) state: &'a Guarded,
    pub(super) fates: &'a Mutex<Fates>,
}

impl CatalogTree<'_> {
    /// Begins to remember removed files, because this tree becomes the catalog. `before`: files removed while another tree was. `is_all`: the
    /// tree has all names. Then what this node removed or took over itself, without an answer, is removed as well: the keeper of a copy
    /// would bring such a file back. Otherwise it may have another name elsewhere.
    pub fn remember_removed(&self, before: &[FileId], is_all: bool) {
        let mut removed = Removed::of(self.state.incarnation);
        before.iter().for_each(|file| removed.note(*file));
        removed.unkept.clear();
        self.state.look(|state| {
            for file in state.outgoing.take_ended().into_iter().filter(|_| is_all) {
                if state.named(file, self.state.incarnation).is_none() {
                    removed.note(file);
                }
            }
            state.removed = Some(removed);
        });
    }

    /// Returns those of these files that have no name here.
    #[must_use]
    pub fn nameless(&self, files: &[FileId]) -> Vec<FileId> {
        let some = files.chunks(NODES_AT_ONCE).map(|files| {
            self.state.look(|state| {
                let is_nameless = |file: &&FileId| state.named(**file, self.state.incarnation).is_none();
                files.iter().filter(is_nameless).copied().collect::<Vec<_>>()
            })
        });
        some.flatten().collect()
    }

    /// Forgets the removed files: this tree is not the catalog any more.
    pub fn forget_removed(&self) {
        self.state.look(|state| state.removed = None);
    }

    /// Whether a file is remembered as one that lost its last name.
    #[must_use]
    pub fn was_removed(&self, file: FileId) -> bool {
        self.state.look(|state| state.was_removed(file))
    }

    /// Queues removal notices for files of other nodes that have no name here although their nodes believe otherwise.
    pub fn tell_removed_again(&self, files: &[FileId]) {
        self.state.look(|state| {
            if let Some(removed) = &mut state.removed {
                files.iter().for_each(|file| removed.tell_again(*file));
            }
        });
    }

    /// Takes the removed files whose nodes must be notified.
    #[must_use]
    pub fn take_removed(&self) -> BTreeSet<FileId> {
        self.state.look(|state| {
            state.removed.as_mut().map_or_else(BTreeSet::new, |removed| std::mem::take(&mut removed.untold))
        })
    }

    /// Collects changes from now on for [`CatalogTree::take_unkept`]; the first are all nodes that exist. `anew`: nothing of the tree is
    /// kept elsewhere, so files that were removed earlier count, too.
    pub fn collect_unkept(&self, anew: bool) {
        let is_catalog = self.state.look(|state| {
            // Another tree may be the catalog by now.
            let Some(removed) = &mut state.removed else { return false };
            if anew {
                removed.unkept.clone_from(&removed.order);
            }
            state.tree.collect_unkept();
            true
        });
        if !is_catalog {
            return;
        }
        self.fates.lock().expect(super::UNPOISONED).collect_unkept();
    }

    /// Stops collecting: this tree is not kept elsewhere any more.
    pub fn collect_no_more(&self) {
        self.state.look(|state| state.tree.changes.keep_no_more());
        self.fates.lock().expect(super::UNPOISONED).unkept = None;
    }

    /// Waits until a change may exist that is not kept.
    pub async fn unkept_changed(self) {
        self.state.catalog_changed.notified().await;
    }

    /// Wakes the task in [`CatalogTree::unkept_changed`].
    pub fn wake_keeper(&self) {
        self.state.catalog_changed.notify_one();
    }

    /// Takes up to `most` changes that are not kept, of up to `bytes_most` besides the last node.
    #[must_use]
    pub fn take_unkept(&self, most: usize, bytes_most: usize) -> Unkept {
        let mut told = Unkept::default();
        let journaled = self.state.change(|state| {
            let mut bytes = 0;
            while told.nodes.len() + told.gone.len() < most
                && bytes < bytes_most
                && let Some(id) = state.tree.changes.pop_unkept()
            {
                match unkept_node(&state.tree, id) {
                    _ if id == ROOT => {}
                    Some(node) => {
                        bytes += node.0.bytes_most();
                        told.nodes.push(node);
                    }
                    None => told.gone.push(id),
                }
            }
            if let Some(removed) = &mut state.removed {
                told.removed = removed.unkept.drain(..).collect();
            }
            told.all = !state.tree.changes.has_unkept();
            // In one hold of the lock: the state taken from the tree is the result of exactly these operations.
            if told.all {
                told.publication = state.outgoing.publish_to_keeper();
                told.loss = state.outgoing.untold.as_ref().and_then(|outgoing| outgoing.unanswered.lost());
            }
            Ok(())
        });
        if let Err(error) = journaled {
            tracing::error!(%error, "the journal did not take what is to be kept elsewhere");
        }
        let mut fates = self.fates.lock().expect(super::UNPOISONED);
        while told.nodes.len() + told.gone.len() + told.fates.len() < most
            && let Some(process) = fates.unkept.as_mut().and_then(BTreeSet::pop_first)
        {
            let Some(&(fate, failed_at_ns)) = fates.known.get(&process) else { continue };
            let (home, number, start) = process;
            told.fates.push(ProcessFate { home, process: (number, start), fate, failed_at_ns });
        }
        told.forgotten = std::mem::take(&mut fates.forgotten).into_iter().collect();
        told.all &= fates.unkept.as_ref().is_none_or(BTreeSet::is_empty);
        told
    }

    /// Returns the moment before all operations that were not published when this daemon began.
    #[must_use]
    pub fn moment_before(&self) -> Moment {
        self.state.look(|state| Moment { names: 0, next: state.tree.next })
    }

    /// Returns the present moment.
    #[must_use]
    pub fn moment(&self) -> Moment {
        self.state.look(|state| Moment { names: state.outgoing.number(), next: state.tree.next })
    }

    /// Adopts the last coordinator's knowledge of other nodes' processes.
    pub fn take_process_fates(&self, fates: &[ProcessFate]) {
        let mut known = self.fates.lock().expect(super::UNPOISONED);
        for fate in fates.iter().filter(|fate| fate.home != self.state.incarnation) {
            known.set((fate.home, fate.process.0, fate.process.1), (fate.fate, fate.failed_at_ns));
        }
    }
}

/// Whether a file is removed with the last name of `node`. `own`: the life of this node. `adopted`: the node that carries the file's identity, if
/// that is not the one the identity names.
///
/// If the file has another node by now, this one has its old bytes only. A copy was written elsewhere, and this node does not know who
/// writes it. Files of this node count: it may be lost, and then no other node knows that they have no name.
pub(super) fn is_last_of(own: Incarnation, node: NodeId, file: &File, adopted: Option<NodeId>) -> bool {
    let is_own = file.id.incarnation == own;
    match adopted {
        Some(adopted) => adopted == node && (is_own || file.remote.is_some()),
        None => is_own && file.id.counter.0 == node,
    }
}

impl State {
    /// Whether this tree is the catalog and remembers a file as one that lost its last name.
    pub(super) fn was_removed(&self, file: FileId) -> bool {
        self.removed.as_ref().is_some_and(|removed| removed.contains(file))
    }
}

/// Whether other nodes are told of a path: hidden copies of other nodes' files are nobody else's business, but torn checkpoints are.
pub(super) fn is_told(path: &[u8]) -> bool {
    let is_torn = || path_of_torn(path).is_some() || path == [HIDDEN, TORN].join(&b'/');
    !is_hidden(path) || path == HIDDEN || is_torn()
}

fn unkept_node(tree: &Tree, id: NodeId) -> Option<NamedNode> {
    let node = tree.nodes.get(&id)?;
    let names: Vec<_> = node
        .links()
        .filter(|link| tree.path(*link).is_some_and(|path| is_told(&path)))
        .filter_map(|link| Some((link.parent, tree.entry_at(link)?.name.to_vec())))
        .collect();
    if names.is_empty() {
        return None;
    }
    Some((node_under(tree, id, Vec::new())?, names))
}

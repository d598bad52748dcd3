//! The tree as the catalog: collecting what is not kept elsewhere yet.
//!
//! Owns: which nodes, fates and removals are not kept yet. Does not own: keeping
//! (control's catalog), the format (`protocol::cluster::kept`), becoming the catalog from what is kept (`mirror`), what members are told (`outgoing`).
//!
//! States are kept and not operations: what is kept twice, or in another order, comes to the same.

use super::fates::Fates;
use super::file::File;
use super::guarded::Guarded;
use super::hidden::TORN;
use super::standing::node_under;
use super::tree::Tree;
use super::{HIDDEN, NodeId, OutgoingNode, ROOT, is_hidden, path_of_torn};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Mutex;
use tidemark_protocol::cluster::kept::{Process, ProcessFate, REMOVED_MAX};
use tidemark_protocol::id::{FileId, Incarnation};

/// A node with the directories that have it, and what it is called there.
pub type NamedNode = (OutgoingNode, Vec<(NodeId, Vec<u8>)>);

/// Changes that are not kept elsewhere yet, taken to be kept.
#[derive(Debug, Default)]
pub struct Unkept {
    pub nodes: Vec<NamedNode>,
    /// Nodes without a name.
    pub gone: Vec<NodeId>,
    pub fates: Vec<ProcessFate>,
    /// Processes of which nothing is known any more.
    pub forgotten: Vec<Process>,
    /// Files that lost their last name, in the order in which they did.
    pub removed: Vec<FileId>,
    /// Nothing is left.
    pub all: bool,
    /// The last publication that this node's own operations in the tree count as, where nothing is left.
    pub publication: u64,
    /// Operations that were not collected until then, and of which the tree has what came.
    pub loss: Option<u64>,
}

/// A moment of this node's tree, to tell what was made since.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moment {
    /// Operations on names until then.
    pub names: u64,
    /// The next node's number then.
    pub next: NodeId,
}

/// The last files that lost their last name here ([`REMOVED_MAX`]): a node that was away and knows nothing of that does not bring them back, nor
/// one that keeps a copy.
#[derive(Debug)]
pub(super) struct Removed {
    /// The life of this node.
    own: Incarnation,
    files: BTreeSet<FileId>,
    order: VecDeque<FileId>,
    /// Of which the nodes that have them have not been told.
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

    /// Whether a file is removed with the last name of `node`. `adopted`: the node that carries its identity, where that is not the one it is
    /// named for.
    ///
    /// Where it has another node by now, this one has its old bytes only. A copy was written elsewhere, and nothing is known here of who
    /// writes it. Files of this node count: it may be lost, and then nobody else knows that they have no name.
    pub(super) fn means(&self, node: NodeId, file: &File, adopted: Option<NodeId>) -> bool {
        let own = file.id.incarnation == self.own;
        match adopted {
            Some(adopted) => adopted == node && (own || file.remote.is_some()),
            None => own && file.id.counter.0 == node,
        }
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
        // Beyond that they keep what they have until they are asked for it.
        if self.untold.len() < REMOVED_MAX {
            self.untold.insert(file);
        }
    }

    pub(super) fn contains(&self, file: FileId) -> bool {
        self.files.contains(&file)
    }
}

/// The tree as the catalog: what was heard for it, and what of it is not kept elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct CatalogTree<'a> {
    pub(super) state: &'a Guarded,
    pub(super) fates: &'a Mutex<Fates>,
}

impl CatalogTree<'_> {
    /// This tree is the catalog from now on; `before`: files that were removed when another one was.
    pub fn remember_removed(&self, before: &[FileId]) {
        let mut removed = Removed::of(self.state.incarnation);
        before.iter().for_each(|file| removed.note(*file));
        removed.unkept.clear();
        self.state.look(|state| state.removed = Some(removed));
    }

    /// This tree is not the catalog any more.
    pub fn forget_removed(&self) {
        self.state.look(|state| state.removed = None);
    }

    /// Whether a file is remembered as one that lost its last name.
    #[must_use]
    pub fn was_removed(&self, file: FileId) -> bool {
        self.state.look(|state| state.removed.as_ref().is_some_and(|removed| removed.contains(file)))
    }

    /// Files of other nodes that have no name here, and whose nodes believe otherwise: they are to be told.
    pub fn tell_removed_again(&self, files: &[FileId]) {
        self.state.look(|state| {
            if let Some(removed) = &mut state.removed {
                files.iter().for_each(|file| removed.tell_again(*file));
            }
        });
    }

    /// Takes the files that were removed since this was asked last.
    #[must_use]
    pub fn take_removed(&self) -> BTreeSet<FileId> {
        self.state.look(|state| {
            state.removed.as_mut().map_or_else(BTreeSet::new, |removed| std::mem::take(&mut removed.untold))
        })
    }

    /// From now on changes are collected for [`CatalogTree::take_unkept`]; first of all everything that is there. `anew`: nothing of it is kept,
    /// so that the files that were removed before count, too.
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

    /// Nobody keeps this tree any more.
    pub fn collect_no_more(&self) {
        self.state.look(|state| state.tree.changes.keep_no_more());
        self.fates.lock().expect(super::UNPOISONED).unkept = None;
    }

    /// Resolves when there may be something that is not kept.
    pub async fn unkept_changed(self) {
        self.state.catalog_changed.notified().await;
    }

    /// Wakes whoever waits for that.
    pub fn wake_keeper(&self) {
        self.state.catalog_changed.notify_one();
    }

    /// Takes up to `most` of what is not kept, of up to `bytes_most` besides its last node.
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
            // In one hold: what is told of the tree is what came of these operations.
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

    /// The moment before all that was done here and not told when this daemon began.
    #[must_use]
    pub fn moment_before(&self) -> Moment {
        self.state.look(|state| Moment { names: 0, next: state.tree.next })
    }

    /// This moment.
    #[must_use]
    pub fn moment(&self) -> Moment {
        self.state.look(|state| Moment { names: state.outgoing.number(), next: state.tree.next })
    }

    /// What the last coordinator knew of other nodes' processes.
    pub fn take_process_fates(&self, fates: &[ProcessFate]) {
        let mut known = self.fates.lock().expect(super::UNPOISONED);
        for fate in fates.iter().filter(|fate| fate.home != self.state.incarnation) {
            known.set((fate.home, fate.process.0, fate.process.1), (fate.fate, fate.failed_at_ns));
        }
    }
}

/// Copies for other nodes are hidden too, and no other node's.
fn is_torn(path: &[u8]) -> bool {
    path_of_torn(path).is_some() || path == [HIDDEN, TORN].join(&b'/')
}

fn unkept_node(tree: &Tree, id: NodeId) -> Option<NamedNode> {
    let node = tree.nodes.get(&id)?;
    let is_told = |path: &[u8]| !is_hidden(path) || path == HIDDEN || is_torn(path);
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

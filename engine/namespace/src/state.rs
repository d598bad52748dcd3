//! Everything under the lock, and when a node's bytes and number go.
//!
//! Owns: [`State`], whose parts own their fields each, and what is freed once nobody can reach it. Does not own: the lock (`guarded`), what a
//! call does to the parts (each call).

use super::catalog::Removed;
use super::copies::Copies;
use super::departing::Departures;
use super::handle::HandleTable;
use super::heard::Heard;
use super::node::Body;
use super::outgoing::Outgoing;
use super::reclaim::Candidate;
use super::session::Session;
use super::stale::StaleCallers;
use super::tree::Tree;
use super::writers::Deeds;
use super::{NodeId, ROOT};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_protocol::file::FileEvent;
use tidemark_protocol::id::{FileId, Incarnation};
use tidemark_tier1::Backing;

/// Everything under the lock.
#[derive(Debug)]
pub(super) struct State {
    pub(super) tree: Tree,
    pub(super) handles: HandleTable,
    pub(super) session: Session,
    /// Who waits for it: only then somebody has to be woken.
    pub(super) watching: u32,
    /// Records not yet written to the journal.
    pub(super) pending: Vec<u8>,
    /// Backing files to drop once the lock is free and the journal no longer names them.
    pub(super) trash: Vec<Arc<Backing>>,
    /// Names that another node took away, of which the kernel is told once the lock is free; with the node where it was its last.
    pub(super) lost_names: Vec<(NodeId, Vec<u8>, Option<NodeId>)>,
    pub(super) stale: StaleCallers,
    pub(super) candidates: BTreeSet<Candidate>,
    /// Files without a name that the kernel may remember without knowing that: their bytes are the first to give way.
    pub(super) leftovers: BTreeSet<NodeId>,
    pub(super) departing: Departures,
    /// Files that carry another identity than their node's: another incarnation's, or that of one of our own that was
    /// removed and brought back.
    pub(super) adopted: BTreeMap<FileId, NodeId>,
    pub(super) copies: Copies,
    pub(super) waiting: u32,
    pub(super) deeds: Deeds,
    /// Something that a waiter may wait for has happened.
    pub(super) woken: bool,
    pub(super) outgoing: Outgoing,
    /// What this node heard as the coordinator.
    pub(super) heard: Heard,
    /// Files that were removed; none where this tree is not the catalog.
    pub(super) removed: Option<Removed>,
}

impl State {
    pub(super) fn new(tree: Tree) -> Self {
        Self {
            tree,
            handles: HandleTable::default(),
            session: Session::default(),
            watching: 0,
            pending: Vec::new(),
            trash: Vec::new(),
            lost_names: Vec::new(),
            stale: StaleCallers::default(),
            candidates: BTreeSet::new(),
            leftovers: BTreeSet::new(),
            departing: Departures::default(),
            adopted: BTreeMap::new(),
            copies: Copies::default(),
            waiting: 0,
            deeds: Deeds::default(),
            woken: false,
            outgoing: Outgoing::default(),
            heard: Heard::default(),
            removed: None,
        }
    }

    /// The node that carries a file's identity.
    pub(super) fn node_of(&self, id: FileId, own: Incarnation) -> Option<NodeId> {
        // One of our own that was removed and brought back has another node than the one it is named for.
        let node =
            self.adopted.get(&id).copied().or_else(|| (id.incarnation == own).then_some(id.counter.0))?;
        let file = self.tree.nodes.get(&node)?.file().ok()?;
        (file.id == id).then_some(node)
    }

    /// Frees what nobody can reach any more: a node and its bytes go with the last name, the last handle, and the kernel's
    /// memory of it. An open that looked its name up before that was replaced comes after, and finds the old bytes.
    pub(super) fn release_unreachable(&mut self, id: NodeId) {
        let Some(node) = self.tree.nodes.get_mut(&id) else { return };
        if id == ROOT || node.link_count() > 0 {
            return;
        }
        let (remembered, forsaken) = (node.is_remembered(), node.forsaken);
        if let Body::File(file) = &mut node.body {
            // The RELEASE of a descriptor that was closed before may be on its way, as FORGET is.
            self.departing.leaves(file);
            let adopted = self.adopted.get(&file.id).copied();
            if let Some(removed) = self.removed.as_mut().filter(|removed| removed.means(id, file, adopted)) {
                removed.note(file.id);
            }
            if file.opens > 0 || file.busy {
                return;
            }
            self.tree.changes.mark(id);
            if remembered {
                if forsaken {
                    self.leftovers.insert(id);
                }
                return;
            }
            self.trash.extend(file.backing.take());
            file.happens(FileEvent::Changed);
            let key = Candidate::of(id, file);
            self.candidates.remove(&key);
            self.leftovers.remove(&id);
        }
        if !remembered
            && let Some(node) = self.tree.free(id)
            && let Body::File(file) = node.body
            && self.adopted.get(&file.id) == Some(&id)
        {
            self.adopted.remove(&file.id);
        }
    }

    /// The same after the daemon itself took a name away: the kernel may not know that the node has lost its last one.
    pub(super) fn forsake(&mut self, id: NodeId) {
        if let Ok(node) = self.tree.node_mut(id) {
            node.forsaken = node.link_count() == 0;
        }
        self.release_unreachable(id);
    }
}

//! Everything under the lock, and when a node's bytes and number are freed.
//!
//! Owns: [`State`], whose parts own their fields each, and freeing nodes that nothing can reach any more. Does not own: the lock
//! (`guarded`), the effect of a call on the parts (each call).

use super::catalog::{Removed, is_last_of};
use super::copies::Copies;
use super::departing::Departures;
use super::guarded::Waiters;
use super::handle::HandleTable;
use super::heard::Heard;
use super::identities::Identities;
use super::node::Body;
use super::outgoing::Outgoing;
use super::reclaim::{Candidate, Reclaimable};
use super::session::Session;
use super::stale::StaleCallers;
use super::tree::Tree;
use super::writers::Deeds;
use super::{NodeId, ROOT};
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
    /// Records not yet written to the journal.
    pub(super) pending: Vec<u8>,
    /// Backing files to drop once the lock is free and the journal no longer names them.
    pub(super) trash: Vec<Arc<Backing>>,
    /// Names that another node removed, of which the kernel is told once the lock is free; with the node if it was its last name.
    pub(super) lost_names: Vec<(NodeId, Vec<u8>, Option<NodeId>)>,
    pub(super) stale: StaleCallers,
    pub(super) reclaimable: Reclaimable,
    pub(super) departing: Departures,
    pub(super) identities: Identities,
    pub(super) copies: Copies,
    pub(super) deeds: Deeds,
    pub(super) waiters: Waiters,
    pub(super) outgoing: Outgoing,
    /// Publications that this node received as the coordinator.
    pub(super) heard: Heard,
    /// Files that were removed; none if this tree is not the catalog.
    pub(super) removed: Option<Removed>,
}

impl State {
    pub(super) fn new(tree: Tree) -> Self {
        Self {
            tree,
            handles: HandleTable::default(),
            session: Session::default(),
            pending: Vec::new(),
            trash: Vec::new(),
            lost_names: Vec::new(),
            stale: StaleCallers::default(),
            reclaimable: Reclaimable::default(),
            departing: Departures::default(),
            identities: Identities::default(),
            copies: Copies::default(),
            deeds: Deeds::default(),
            waiters: Waiters::default(),
            outgoing: Outgoing::default(),
            heard: Heard::default(),
            removed: None,
        }
    }

    /// Returns the node that has a file's identity.
    pub(super) fn node_of(&self, id: FileId, own: Incarnation) -> Option<NodeId> {
        self.identities.node_of(&self.tree, id, own)
    }

    /// Returns the node that has a file's identity, if a name leads to it.
    pub(super) fn named(&self, id: FileId, own: Incarnation) -> Option<NodeId> {
        self.node_of(id, own).filter(|node| self.tree.is_reachable(*node))
    }

    /// Notes that a call of this node took a name from a node. If that was the last name of a file, a copy elsewhere does not make the file
    /// again where this tree becomes the catalog before the operation has an answer.
    pub(super) fn took_name(&mut self, id: NodeId, own: Incarnation) {
        let node = self.tree.nodes.get(&id).filter(|node| node.link_count() == 0);
        let Some(file) = node.and_then(|node| node.file().ok()) else { return };
        if self.removed.is_none() && is_last_of(own, id, file, self.identities.adopted(file.id)) {
            self.outgoing.note_ended(file.id);
        }
    }

    /// Frees a node and its bytes once nothing can reach it: its last name, its last handle and the kernel's memory of it are gone. An
    /// open whose look-up came before the replacement arrives later, and finds the old bytes.
    pub(super) fn release_unreachable(&mut self, id: NodeId) {
        let Some(node) = self.tree.nodes.get_mut(&id) else { return };
        if id == ROOT || node.link_count() > 0 {
            return;
        }
        let (remembered, forsaken) = (node.is_remembered(), node.forsaken);
        if let Body::File(file) = &mut node.body {
            // The RELEASE of a descriptor that was closed before may be on its way, as FORGET is.
            self.departing.leaves(file);
            let adopted = self.identities.adopted(file.id);
            if let Some(removed) = self.removed.as_mut().filter(|removed| removed.means(id, file, adopted)) {
                removed.note(file.id);
            }
            if file.opens > 0 || file.busy {
                return;
            }
            self.tree.changes.mark(id);
            if remembered {
                if forsaken {
                    self.reclaimable.add_leftover(id);
                }
                return;
            }
            self.trash.extend(file.backing.take());
            file.happens(FileEvent::Changed);
            let key = Candidate::of(id, file);
            self.reclaimable.remove(&key);
            self.reclaimable.remove_leftover(id);
        }
        if !remembered
            && let Some(node) = self.tree.free(id)
            && let Body::File(file) = node.body
        {
            self.identities.remove(file.id, id);
        }
    }

    /// Does the same after the daemon itself removed a name: the kernel may not know that the node has lost its last one.
    pub(super) fn forsake(&mut self, id: NodeId) {
        if let Ok(node) = self.tree.node_mut(id) {
            node.forsaken = node.link_count() == 0;
        }
        self.release_unreachable(id);
    }
}

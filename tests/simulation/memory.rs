//! Tier-1 and the journal of one life: what a node knows and holds while daemons come and go.
//!
//! Owns: the node's tree, the copies that it keeps for other nodes, the highest epoch that it knows. Does not own:
//! notifying other nodes (`node`), changing the tree (`tree`).

use super::files::Told;
use super::tree::Tree;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use tidemark_protocol::file::Seal;
use tidemark_protocol::id::{Epoch, FileId, Incarnation, NodeName, SealNumber};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::replication::SealedCopy;

/// A copy of another node's file.
#[derive(Debug, Clone)]
pub(crate) struct Copy {
    pub(crate) sealed: SealedCopy,
    /// Content of each chunk.
    pub(crate) chunks: Vec<u64>,
}

#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) life: NodeLife,
    pub(crate) tree: RefCell<Tree>,
    pub(crate) copies: RefCell<BTreeMap<(FileId, SealNumber), Copy>>,
    pub(crate) epoch: Cell<Epoch>,
    /// Seals that are in Tier-3.
    pub(crate) in_tier3: RefCell<BTreeSet<(FileId, SealNumber)>>,
    /// Answers to calls, so that no call is carried out twice.
    pub(crate) replies: RefCell<BTreeMap<u64, Told>>,
    /// Whether there is no room for other nodes' copies.
    pub(crate) full: Cell<bool>,
}

impl Memory {
    pub(crate) fn new(node: NodeName, incarnation: Incarnation) -> Self {
        Self {
            life: NodeLife { node, incarnation },
            tree: RefCell::new(Tree::new(incarnation)),
            copies: RefCell::default(),
            epoch: Cell::new(Epoch(0)),
            in_tier3: RefCell::default(),
            replies: RefCell::default(),
            full: Cell::new(false),
        }
    }

    /// Prepares for another daemon. Since that daemon cannot know which changes are unpublished, it publishes everything.
    pub(crate) fn taken_up(&self) {
        self.tree.borrow_mut().forget_outgoing();
    }

    /// Records an epoch that a message names. Returns false if a newer one is known.
    pub(crate) fn saw_epoch(&self, epoch: Epoch) -> bool {
        let current = epoch >= self.epoch.get();
        self.epoch.set(self.epoch.get().max(epoch));
        current
    }

    /// Returns the sealed bytes of a file, from the node's own files or from a copy.
    pub(crate) fn bytes_of(&self, file: FileId, seal: SealNumber) -> Option<(Seal, Vec<u64>)> {
        if let Some(own) = self.tree.borrow().own(file)
            && let Some(sealed) = own.fate.seal().filter(|sealed| sealed.number == seal)
        {
            return Some((sealed.clone(), own.chunks.clone()));
        }
        let copies = self.copies.borrow();
        let copy = copies.get(&(file, seal))?;
        Some((copy.sealed.sealed(), copy.chunks.clone()))
    }
}

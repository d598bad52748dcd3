//! What this node has heard as the coordinator: in which epoch its tree is the catalog, and how far each life's publications are in it.
//!
//! Owns: both, and that they are journaled with what they speak of. Does not own: taking publications (control's catalog), the tree.
//!
//! A coordinator whose daemon is killed begins again with the tree that it had, and nobody has to make names anew: among those might be
//! names that were taken away since. A deputy's copy of that tree is older, and would undo what this node did last.

use super::{Namespace, State};
use std::collections::{BTreeMap, BTreeSet};
use tidemark_protocol::id::Epoch;
use tidemark_protocol::key::NodeLife;

/// How far the publications of a life are in the tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Taken {
    /// The last that was begun.
    pub(super) publication: u64,
    /// Its operations before this one are carried out.
    pub(super) operations: u64,
    /// All that it says is in the tree.
    pub(super) whole: bool,
}

impl Taken {
    /// The last publication of which everything is in the tree.
    fn last(&self) -> Option<u64> {
        self.publication.checked_sub(u64::from(!self.whole)).filter(|last| *last > 0)
    }
}

/// What was heard.
#[derive(Debug, Default)]
pub(super) struct Heard {
    /// The epoch in which this tree is the catalog.
    epoch: Option<Epoch>,
    lives: BTreeMap<NodeLife, Taken>,
    /// What the journal does not know.
    touched: BTreeSet<NodeLife>,
    epoch_touched: bool,
}

impl Heard {
    /// What a journal tells of.
    pub(super) fn found(epoch: Option<Epoch>, lives: BTreeMap<NodeLife, Taken>) -> Self {
        Self { epoch, lives, ..Self::default() }
    }

    fn set(&mut self, life: &NodeLife, taken: Taken) {
        self.lives.insert(life.clone(), taken);
        self.touched.insert(life.clone());
    }

    /// How many operations of a publication have been carried out before.
    fn done(&self, life: &NodeLife, publication: u64) -> usize {
        let taken = self.lives.get(life).filter(|taken| taken.publication == publication);
        taken.map_or(0, |taken| usize::try_from(taken.operations).unwrap_or(usize::MAX))
    }

    pub(super) fn has_unjournaled(&self) -> bool {
        self.epoch_touched || !self.touched.is_empty()
    }

    /// The epoch where it is to be journaled, before all lives, and lives with what was taken of them.
    pub(super) fn unjournaled(&mut self) -> (Option<Option<Epoch>>, Vec<(NodeLife, Taken)>) {
        let touched = std::mem::take(&mut self.touched);
        let lives = touched.into_iter().filter_map(|life| {
            let taken = *self.lives.get(&life)?;
            Some((life, taken))
        });
        (std::mem::take(&mut self.epoch_touched).then_some(self.epoch), lives.collect())
    }

    /// All of it, for a snapshot.
    pub(super) fn snapshot(&self) -> (Option<Epoch>, impl Iterator<Item = (&NodeLife, Taken)>) {
        (self.epoch, self.lives.iter().map(|(life, taken)| (life, *taken)))
    }
}

impl Namespace {
    /// This tree is the catalog from now on, and has the publications of each life up to these. Of which epoch, where it has all names; otherwise
    /// [`Namespace::has_catalog_of`] says it: a daemon that takes over before that must not take this tree for all there is.
    pub fn becomes_catalog_of(&self, epoch: Option<Epoch>, published: &BTreeMap<NodeLife, u64>) {
        self.note_heard(|heard| {
            let before = std::mem::replace(heard, Heard { epoch, epoch_touched: true, ..Heard::default() });
            for (life, publication) in published {
                let known = before.lives.get(life).filter(|taken| taken.last() == Some(*publication));
                let taken = Taken { publication: *publication, operations: 0, whole: true };
                heard.set(life, known.copied().unwrap_or(taken));
            }
        });
    }

    /// The tree has all names of the catalog of this epoch.
    pub fn has_catalog_of(&self, epoch: Epoch) {
        self.note_heard(|heard| {
            (heard.epoch, heard.epoch_touched) = (Some(epoch), true);
            // A journal that tells of another epoch forgets what was heard before.
            heard.touched.extend(heard.lives.keys().cloned());
        });
    }

    /// Another node's tree is the catalog.
    pub fn is_catalog_no_more(&self) {
        self.note_heard(|heard| *heard = Heard { epoch_touched: heard.epoch.is_some(), ..Heard::default() });
    }

    /// The epoch in which this tree was the catalog, if no other was since.
    #[must_use]
    pub fn catalog_of(&self) -> Option<Epoch> {
        self.look(|state| state.heard.epoch)
    }

    /// The last publication of each life that the tree has.
    #[must_use]
    pub fn heard_publications(&self) -> BTreeMap<NodeLife, u64> {
        self.look(|state| {
            let lives = state.heard.lives.iter();
            lives.filter_map(|(life, taken)| Some((life.clone(), taken.last()?))).collect()
        })
    }

    /// All that a publication says is in the tree.
    pub fn took_publication(&self, life: &NodeLife, publication: u64) {
        self.note_heard(|heard| heard.set(life, Taken { publication, operations: 0, whole: true }));
    }

    /// Nothing is known of a life's publications any more.
    pub fn forget_publications(&self, life: &NodeLife) {
        self.note_heard(|heard| {
            if heard.lives.contains_key(life) {
                heard.set(life, Taken { whole: true, ..Taken::default() });
            }
        });
    }

    /// How many operations of a publication are carried out already: a coordinator before this daemon was killed in the middle of it.
    pub(super) fn operations_done(&self, life: &NodeLife, publication: u64) -> usize {
        self.look(|state| state.heard.done(life, publication))
    }

    fn note_heard(&self, note: impl FnOnce(&mut Heard)) {
        let journaled = self.change(|state| {
            state.mute();
            note(&mut state.heard);
            Ok(())
        });
        if let Err(error) = journaled {
            tracing::error!(%error, "the journal did not take what was heard of other nodes");
        }
    }
}

impl State {
    /// The operations of a publication before this one are carried out, in the same change.
    pub(super) fn note_operations_done(&mut self, life: &NodeLife, publication: u64, operations: usize) {
        self.heard.set(life, Taken { publication, operations: operations as u64, whole: false });
    }
}

//! What this node has heard as the coordinator: in which epoch its tree is the catalog, how far each life's publications are in it, and which
//! of its nodes were made while a life counted as lost.
//!
//! Owns: all three, and that they are journaled with what they speak of. Does not own: taking publications and verdicts (control's
//! catalog), the tree.
//!
//! A coordinator whose daemon is killed begins again with the tree that it had, and nobody has to make names anew: among those might be
//! names that were taken away since. What is kept of that tree elsewhere is older, and would undo what this node did last.

use super::NodeId;
use super::catalog::CatalogTree;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
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

/// Lives that were given up and may come back: more than a cluster loses at once. An entry is some 60 bytes, here and in the journal.
const AWAY_MAX: usize = 1024;

/// The nodes of the tree that are others', for each life that was given up, until it has told everything since.
#[derive(Debug, Default)]
struct Away {
    made: BTreeMap<NodeLife, Range<NodeId>>,
    /// What the journal does not know.
    touched: BTreeSet<NodeLife>,
}

impl Away {
    /// What a journal tells of.
    fn found(made: BTreeMap<NodeLife, Range<NodeId>>) -> Self {
        Self { made, touched: BTreeSet::new() }
    }

    /// From now on everything that is made is others'. `next`: the node that is made next. A life that was away already has been since then.
    fn gives_up(&mut self, life: &NodeLife, next: NodeId) {
        let is_away = self.made.get(life).is_some_and(|made| made.end == NodeId::MAX);
        if is_away {
            return;
        }
        self.made.insert(life.clone(), next..NodeId::MAX);
        self.touched.insert(life.clone());
        let oldest = self.made.iter().min_by_key(|(_, made)| made.start).map(|(life, _)| life.clone());
        if let Some(oldest) = oldest.filter(|_| self.made.len() > AWAY_MAX) {
            self.made.remove(&oldest);
            self.touched.insert(oldest);
        }
    }

    /// A life that was given up is back.
    fn is_back(&mut self, life: &NodeLife, next: NodeId) {
        if let Some(made) = self.made.get_mut(life).filter(|made| made.end == NodeId::MAX) {
            made.end = next;
            self.touched.insert(life.clone());
        }
    }

    /// It has told everything.
    fn told_all(&mut self, life: &NodeLife) {
        if self.made.remove(life).is_some() {
            self.touched.insert(life.clone());
        }
    }

    /// A journal that tells of another epoch forgets them.
    fn touch_all(&mut self) {
        self.touched.extend(self.made.keys().cloned());
    }
}

/// What was heard.
#[derive(Debug, Default)]
pub(super) struct Heard {
    /// The epoch in which this tree is the catalog.
    epoch: Option<Epoch>,
    lives: BTreeMap<NodeLife, Taken>,
    away: Away,
    /// What the journal does not know.
    touched: BTreeSet<NodeLife>,
    epoch_touched: bool,
}

/// What is to be journaled, in this order.
#[derive(Debug)]
pub(super) struct Unjournaled {
    pub(super) epoch: Option<Option<Epoch>>,
    pub(super) lives: Vec<(NodeLife, Taken)>,
    /// None of a life that is away no more.
    pub(super) away: Vec<(NodeLife, Option<Range<NodeId>>)>,
}

impl Heard {
    /// What a journal tells of.
    pub(super) fn found(
        epoch: Option<Epoch>,
        lives: BTreeMap<NodeLife, Taken>,
        away: BTreeMap<NodeLife, Range<NodeId>>,
    ) -> Self {
        Self { epoch, lives, away: Away::found(away), ..Self::default() }
    }

    /// The nodes that were made while a life counted as lost.
    pub(super) fn made_while_away(&self, life: &NodeLife) -> Option<&Range<NodeId>> {
        self.away.made.get(life)
    }

    fn set(&mut self, life: &NodeLife, taken: Taken) {
        self.lives.insert(life.clone(), taken);
        self.touched.insert(life.clone());
    }

    /// How many operations of a publication are carried out already: a coordinator before this daemon was killed in the middle of it.
    pub(super) fn done(&self, life: &NodeLife, publication: u64) -> usize {
        let taken = self.lives.get(life).filter(|taken| taken.publication == publication);
        taken.map_or(0, |taken| usize::try_from(taken.operations).unwrap_or(usize::MAX))
    }

    pub(super) fn has_unjournaled(&self) -> bool {
        self.epoch_touched || !self.touched.is_empty() || !self.away.touched.is_empty()
    }

    /// What the journal does not know; it is taken for journaled.
    pub(super) fn unjournaled(&mut self) -> Unjournaled {
        let touched = std::mem::take(&mut self.touched);
        let lives = touched.into_iter().filter_map(|life| {
            let taken = *self.lives.get(&life)?;
            Some((life, taken))
        });
        let lives = lives.collect();
        let away = std::mem::take(&mut self.away.touched).into_iter().map(|life| {
            let made = self.away.made.get(&life).cloned();
            (life, made)
        });
        let away = away.collect();
        Unjournaled { epoch: std::mem::take(&mut self.epoch_touched).then_some(self.epoch), lives, away }
    }

    /// All of it, for a snapshot.
    pub(super) fn snapshot(&self) -> Unjournaled {
        let lives = self.lives.iter().map(|(life, taken)| (life.clone(), *taken));
        let away = self.away.made.iter().map(|(life, made)| (life.clone(), Some(made.clone())));
        Unjournaled { epoch: Some(self.epoch), lives: lives.collect(), away: away.collect() }
    }

    /// The operations of a publication before this one are carried out, in the same change.
    pub(super) fn note_done(&mut self, life: &NodeLife, publication: u64, operations: usize) {
        self.set(life, Taken { publication, operations: operations as u64, whole: false });
    }
}

impl CatalogTree<'_> {
    /// This tree is the catalog from now on, and has the publications of each life up to these. Of which epoch, where it has all names; otherwise
    /// [`CatalogTree::has_catalog_of`] says it: a daemon that takes over before that must not take this tree for all there is.
    ///
    /// `own`: it was the catalog before, and nobody else's was since. Then lives that were given up are away still.
    pub fn becomes_catalog_of(&self, epoch: Option<Epoch>, published: &BTreeMap<NodeLife, u64>, own: bool) {
        self.note_heard(|heard| {
            let before = std::mem::replace(heard, Heard { epoch, epoch_touched: true, ..Heard::default() });
            if own {
                heard.away = before.away;
                heard.away.touch_all();
            }
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
            heard.away.touch_all();
        });
    }

    /// Another node's tree is the catalog.
    pub fn is_catalog_no_more(&self) {
        self.note_heard(|heard| {
            let knew = heard.epoch.is_some() || !heard.lives.is_empty() || !heard.away.made.is_empty();
            *heard = Heard { epoch_touched: knew, ..Heard::default() };
        });
    }

    /// The epoch in which this tree was the catalog, if no other was since.
    #[must_use]
    pub fn catalog_of(&self) -> Option<Epoch> {
        self.state.look(|state| state.heard.epoch)
    }

    /// The last publication of each life that the tree has.
    #[must_use]
    pub fn heard_publications(&self) -> BTreeMap<NodeLife, u64> {
        self.state.look(|state| {
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

    /// Nothing is expected from a life any more: what is made from now on is others', and keeps its names if it comes back.
    pub fn gives_up(&self, life: &NodeLife) {
        let next = self.next_node();
        self.note_heard(|heard| heard.away.gives_up(life, next));
    }

    /// A life is let in. What is made from now on may be its own.
    pub fn is_back(&self, life: &NodeLife) {
        let next = self.next_node();
        self.note_heard(|heard| heard.away.is_back(life, next));
    }

    /// A life has told how everything stands.
    pub fn told_all(&self, life: &NodeLife) {
        self.note_heard(|heard| heard.away.told_all(life));
    }

    /// The numbers of the nodes that were made while a life counted as lost, where it has not told everything since. These are others'.
    #[must_use]
    pub fn made_while_away(&self, life: &NodeLife) -> Option<Range<NodeId>> {
        self.state.look(|state| state.heard.made_while_away(life).cloned())
    }

    fn note_heard(&self, note: impl FnOnce(&mut Heard)) {
        let journaled = self.state.change(|state| {
            state.outgoing.mute();
            note(&mut state.heard);
            Ok(())
        });
        if let Err(error) = journaled {
            tracing::error!(%error, "the journal did not take what was heard of other nodes");
        }
    }

    /// The number of the node that is made next: numbers only rise.
    #[must_use]
    pub fn next_node(&self) -> NodeId {
        self.state.look(|state| state.tree.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::id::Incarnation;

    fn life(incarnation: u64) -> NodeLife {
        NodeLife { node: "n2".parse().unwrap(), incarnation: Incarnation(incarnation) }
    }

    #[test]
    fn what_is_made_while_a_life_is_given_up_is_others_until_it_has_told_everything() {
        let (mut away, life) = (Away::default(), life(8));
        away.is_back(&life, 5);
        assert_eq!((away.made.get(&life), away.touched.len()), (None, 0), "it was never given up");
        away.gives_up(&life, 10);
        // A coordinator that begins again gives it up again.
        away.gives_up(&life, 15);
        assert_eq!(away.made.get(&life), Some(&(10..NodeId::MAX)));
        away.is_back(&life, 20);
        away.is_back(&life, 25);
        assert_eq!(away.made.get(&life), Some(&(10..20)));
        away.gives_up(&life, 30);
        assert_eq!(away.made.get(&life), Some(&(30..NodeId::MAX)), "what it made in between is its own");
        away.told_all(&life);
        assert_eq!(away.made.get(&life), None);
    }

    #[test]
    fn of_lives_that_were_given_up_the_one_that_is_away_longest_is_forgotten() {
        let mut away = Away::default();
        // The oldest is not the first by name.
        let lives = (0..=AWAY_MAX as u64).map(|at| life(AWAY_MAX as u64 - at));
        for (next, life) in lives.enumerate() {
            away.gives_up(&life, next as u64);
        }
        assert_eq!(away.made.len(), AWAY_MAX);
        assert_eq!(away.made.get(&life(AWAY_MAX as u64)), None);
        assert!(away.touched.contains(&life(AWAY_MAX as u64)), "the journal forgets it, too");
    }

    #[test]
    fn what_is_journaled_is_what_is_found() {
        let mut heard = Heard::default();
        heard.set(&life(8), Taken { publication: 3, operations: 0, whole: true });
        heard.away.gives_up(&life(8), 10);
        heard.away.gives_up(&life(9), 11);
        heard.away.told_all(&life(9));
        let Unjournaled { epoch, lives, away } = heard.unjournaled();
        assert_eq!((epoch, lives.len()), (None, 1));
        assert_eq!(away, [(life(8), Some(10..NodeId::MAX)), (life(9), None)]);
        assert!(!heard.has_unjournaled());
        let found = Heard::found(None, BTreeMap::new(), BTreeMap::from([(life(8), 10..NodeId::MAX)]));
        assert_eq!(found.made_while_away(&life(8)), Some(&(10..NodeId::MAX)));
        assert_eq!(found.snapshot().away, [(life(8), Some(10..NodeId::MAX))]);
    }
}

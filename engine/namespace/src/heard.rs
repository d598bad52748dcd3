//! Knowledge of this node as the coordinator: in which epoch its tree is the catalog, how far each life's publications are in it, and which
//! of its nodes were made while a life counted as lost.
//!
//! Owns: all three, and that they are journaled with the changes that they describe. Does not own: accepting publications and verdicts
//! (control's catalog), the tree.
//!
//! A coordinator whose daemon is killed begins again with its own tree, so no node has to publish its names again: among those might be
//! names that were removed since. The tree that is kept elsewhere is older, and would undo this node's last operations.

use super::NodeId;
use super::catalog::CatalogTree;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use tidemark_protocol::id::Epoch;
use tidemark_protocol::key::NodeLife;

/// Progress of a life's publications in the tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Taken {
    /// Number of the last publication that was begun.
    pub(super) publication: u64,
    /// Number of its operations carried out so far, while it is not whole.
    pub(super) operations: u64,
    /// Whether all of that publication is in the tree.
    pub(super) whole: bool,
}

impl Taken {
    /// Returns the last publication that is in the tree as a whole.
    fn last(&self) -> Option<u64> {
        self.publication.checked_sub(u64::from(!self.whole)).filter(|last| *last > 0)
    }
}

/// Most lives remembered that were declared lost and may come back: more than a cluster loses at once. An entry has some 60 bytes, here and
/// in the journal.
const AWAY_MAX: usize = 1024;

/// The tree's nodes that belong to others, for each life declared lost, until that life has published everything since.
#[derive(Debug, Default)]
struct Away {
    made: BTreeMap<NodeLife, Range<NodeId>>,
    /// Lives whose entry changed and is not journaled yet.
    touched: BTreeSet<NodeLife>,
}

impl Away {
    /// Recovers the entries from a journal.
    fn found(made: BTreeMap<NodeLife, Range<NodeId>>) -> Self {
        Self { made, touched: BTreeSet::new() }
    }

    /// Declares a life lost: all nodes made from now on, `next` being the first, belong to others. A life that is away already keeps its
    /// first node.
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

    /// Notes that a lost life is back.
    fn is_back(&mut self, life: &NodeLife, next: NodeId) {
        if let Some(made) = self.made.get_mut(life).filter(|made| made.end == NodeId::MAX) {
            made.end = next;
            self.touched.insert(life.clone());
        }
    }

    /// Forgets a life that has published everything.
    fn told_all(&mut self, life: &NodeLife) {
        if self.made.remove(life).is_some() {
            self.touched.insert(life.clone());
        }
    }

    /// Marks all entries for the journal, which forgets them when it records another epoch.
    fn touch_all(&mut self) {
        self.touched.extend(self.made.keys().cloned());
    }
}

/// Knowledge of this node as the coordinator.
#[derive(Debug, Default)]
pub(super) struct Heard {
    /// The epoch in which this tree is the catalog.
    epoch: Option<Epoch>,
    lives: BTreeMap<NodeLife, Taken>,
    away: Away,
    /// Lives whose progress changed and is not journaled yet.
    touched: BTreeSet<NodeLife>,
    epoch_touched: bool,
}

/// Changes to be journaled, in this order.
#[derive(Debug)]
pub(super) struct Unjournaled {
    pub(super) epoch: Option<Option<Epoch>>,
    pub(super) lives: Vec<(NodeLife, Taken)>,
    /// None as the range of a life that is not away any more.
    pub(super) away: Vec<(NodeLife, Option<Range<NodeId>>)>,
}

impl Heard {
    /// Recovers the knowledge from a journal.
    pub(super) fn found(
        epoch: Option<Epoch>,
        lives: BTreeMap<NodeLife, Taken>,
        away: BTreeMap<NodeLife, Range<NodeId>>,
    ) -> Self {
        Self { epoch, lives, away: Away::found(away), ..Self::default() }
    }

    /// Returns the nodes that were made while a life counted as lost.
    pub(super) fn made_while_away(&self, life: &NodeLife) -> Option<&Range<NodeId>> {
        self.away.made.get(life)
    }

    fn set(&mut self, life: &NodeLife, taken: Taken) {
        self.lives.insert(life.clone(), taken);
        self.touched.insert(life.clone());
    }

    /// Returns how many operations of a publication are carried out already. An earlier daemon of this coordinator may have been killed in
    /// the middle of it.
    pub(super) fn done(&self, life: &NodeLife, publication: u64) -> usize {
        let taken = self.lives.get(life).filter(|taken| taken.publication == publication);
        taken.map_or(0, |taken| usize::try_from(taken.operations).unwrap_or(usize::MAX))
    }

    pub(super) fn has_unjournaled(&self) -> bool {
        self.epoch_touched || !self.touched.is_empty() || !self.away.touched.is_empty()
    }

    /// Takes the changes that are not journaled yet; from now on they count as journaled.
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

    /// Returns everything, for a snapshot.
    pub(super) fn snapshot(&self) -> Unjournaled {
        let lives = self.lives.iter().map(|(life, taken)| (life.clone(), *taken));
        let away = self.away.made.iter().map(|(life, made)| (life.clone(), Some(made.clone())));
        Unjournaled { epoch: Some(self.epoch), lives: lives.collect(), away: away.collect() }
    }

    /// Notes that a publication's first `operations` are carried out, in the same change as these.
    pub(super) fn note_done(&mut self, life: &NodeLife, publication: u64, operations: usize) {
        self.set(life, Taken { publication, operations: operations as u64, whole: false });
    }
}

impl CatalogTree<'_> {
    /// Makes this tree the catalog from now on, with each life's publications up to these. `epoch`: the catalog's, if the tree has all its
    /// names. Otherwise [`CatalogTree::has_catalog_of`] sets it later: a daemon that takes over before that must not take this tree for
    /// complete.
    ///
    /// `own`: this tree was the catalog before, and no other was since. Then lives that were declared lost are away still.
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

    /// Notes that the tree has all names of the catalog of this epoch.
    pub fn has_catalog_of(&self, epoch: Epoch) {
        self.note_heard(|heard| {
            (heard.epoch, heard.epoch_touched) = (Some(epoch), true);
            // When a journal records another epoch, it forgets all earlier knowledge.
            heard.touched.extend(heard.lives.keys().cloned());
            heard.away.touch_all();
        });
    }

    /// Forgets everything: another node's tree is the catalog.
    pub fn is_catalog_no_more(&self) {
        self.note_heard(|heard| {
            let knew = heard.epoch.is_some() || !heard.lives.is_empty() || !heard.away.made.is_empty();
            *heard = Heard { epoch_touched: knew, ..Heard::default() };
        });
    }

    /// Returns the epoch in which this tree was the catalog, if no other was since.
    #[must_use]
    pub fn catalog_of(&self) -> Option<Epoch> {
        self.state.look(|state| state.heard.epoch)
    }

    /// Returns the last publication of each life that is in the tree as a whole.
    #[must_use]
    pub fn heard_publications(&self) -> BTreeMap<NodeLife, u64> {
        self.state.look(|state| {
            let lives = state.heard.lives.iter();
            lives.filter_map(|(life, taken)| Some((life.clone(), taken.last()?))).collect()
        })
    }

    /// Notes that all of a publication is in the tree.
    pub fn took_publication(&self, life: &NodeLife, publication: u64) {
        self.note_heard(|heard| heard.set(life, Taken { publication, operations: 0, whole: true }));
    }

    /// Forgets a life's publications.
    pub fn forget_publications(&self, life: &NodeLife) {
        self.note_heard(|heard| {
            if heard.lives.contains_key(life) {
                heard.set(life, Taken { whole: true, ..Taken::default() });
            }
        });
    }

    /// Declares a life lost: nodes made from now on belong to others, and keep their names if it comes back.
    pub fn gives_up(&self, life: &NodeLife) {
        let next = self.next_node();
        self.note_heard(|heard| heard.away.gives_up(life, next));
    }

    /// Readmits a life. Nodes made from now on may be its own.
    pub fn is_back(&self, life: &NodeLife) {
        let next = self.next_node();
        self.note_heard(|heard| heard.away.is_back(life, next));
    }

    /// Notes that a life has published the state of all its files.
    pub fn told_all(&self, life: &NodeLife) {
        self.note_heard(|heard| heard.away.told_all(life));
    }

    /// Returns the numbers of the nodes made while a life counted as lost, if it has not published everything since. Such nodes belong to
    /// others.
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

    /// Returns the number of the node that is made next. Numbers only rise.
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
        // A coordinator that begins again declares the life lost again.
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

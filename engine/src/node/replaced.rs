//! The checkpoints that replace removed ones.
//!
//! Owns: of which runs something is in memory only, and of which something committed stays. Does not own: what was removed, and
//! when that is published (`tree`).
//!
//! A job removes the old checkpoint when the next one is whole, which is in memory then. If the removal were published before that
//! one is in Tier-3, the loss of the node would leave neither.

use crate::node::backlog::lags;
use crate::node::book::Book;
use std::collections::BTreeMap;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::recognise::CheckpointId;

/// For each run at most two, so that each checkpoint finds one besides itself.
type Two<'a> = BTreeMap<&'a RunPath, Vec<&'a CheckpointId>>;

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct Replacing<'a> {
    coming: Two<'a>,
    staying: Two<'a>,
}

impl<'a> Replacing<'a> {
    /// Collects the checkpoints that are on their way to Tier-3. Costs a pass over the books. A checkpoint that was removed itself
    /// replaces nothing.
    pub(crate) fn of(books: impl Iterator<Item = &'a Book>) -> Self {
        let mut replacing = Self::default();
        books
            .filter(|book| book.candidate.is_some() && comes(book))
            .for_each(|book| replacing.comes(&book.id));
        replacing
    }

    fn comes(&mut self, id: &'a CheckpointId) {
        note(&mut self.coming, id);
    }

    /// Whether it matters what stays of a run.
    pub(crate) fn asks_about(&self, run: &RunPath) -> bool {
        self.coming.contains_key(run)
    }

    /// Records that a committed checkpoint is in the tree.
    pub(crate) fn stays(&mut self, id: &'a CheckpointId) {
        note(&mut self.staying, id);
    }

    /// Whether another checkpoint of its run is in memory only, and none besides stays.
    pub(crate) fn is_awaited_for(&self, removed: &CheckpointId) -> bool {
        has_other(&self.coming, removed) && !has_other(&self.staying, removed)
    }
}

/// Whether Tier-3 has nothing of a checkpoint yet, or a newer version is on its way.
fn comes(book: &Book) -> bool {
    !book.is_prepared() || book.versions.values().any(|version| lags(&version.checkpoint))
}

fn note<'a>(of: &mut Two<'a>, id: &'a CheckpointId) {
    let known = of.entry(&id.run).or_default();
    if known.len() < 2 {
        known.push(id);
    }
}

fn has_other(of: &Two<'_>, id: &CheckpointId) -> bool {
    of.get(&id.run).is_some_and(|known| known.iter().any(|other| *other != id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::path::RelPath;

    #[test]
    fn a_removal_waits_for_what_is_in_memory_only_where_nothing_else_stays() {
        let id = |path: &str| CheckpointId::at(&RelPath::new(path).unwrap()).unwrap();
        let [old, next, best, other] =
            ["run/step1.pt", "run/step2.pt", "run/best.pt", "else/step3.pt"].map(id);
        let mut replacing = Replacing::default();
        replacing.comes(&other);
        assert!(!replacing.is_awaited_for(&old) && !replacing.asks_about(&old.run), "it is of another run");
        replacing.comes(&old);
        assert!(!replacing.is_awaited_for(&old), "nothing replaces itself");
        replacing.comes(&next);
        assert!(replacing.is_awaited_for(&old) && replacing.asks_about(&old.run));
        replacing.stays(&old);
        assert!(replacing.is_awaited_for(&old), "what is left of it is no other");
        replacing.stays(&best);
        replacing.stays(&next);
        assert!(!replacing.is_awaited_for(&old));
    }
}

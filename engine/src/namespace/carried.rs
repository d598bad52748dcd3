//! What was done to names while those of Tier-3 are not in the tree yet.
//!
//! Owns: collecting the operations of this node and of others, from the moment when this node becomes a coordinator that has no catalog of
//! before. Does not own: what they make of a name (`protocol::cluster::carried`), bringing the names in (`node::adopt`).

use super::Namespace;
use tidemark_protocol::cluster::wire::NameOperation;

/// Operations that are collected: about as many as a node keeps for a coordinator. Of more than that the last are forgotten, and what they took
/// away may be back.
const CARRIED_MAX: usize = 1 << 18;

/// The operations, while Tier-3 is awaited.
#[derive(Debug, Default)]
pub(super) struct CarriedNames(Option<Vec<NameOperation>>);

impl CarriedNames {
    pub(super) fn is_collected(&self) -> bool {
        self.0.is_some()
    }

    pub(super) fn note(&mut self, operation: &NameOperation) {
        let Some(operations) = self.0.as_mut().filter(|operations| operations.len() <= CARRIED_MAX) else {
            return;
        };
        operations.push(operation.clone());
        if operations.len() > CARRIED_MAX {
            tracing::error!(
                limit = CARRIED_MAX,
                "more was done to names than is remembered until Tier-3 is read; some that were taken away may be back then"
            );
        }
    }
}

impl Namespace {
    /// From now on what is done to names is remembered, what this node did before and no coordinator has answered, too.
    pub fn carry_names(&self) {
        self.look(|state| {
            let untold = state.outgoing.iter().flat_map(|outgoing| outgoing.unanswered.operations());
            state.carried = CarriedNames(Some(untold.cloned().collect()));
        });
    }

    /// What was done to names since [`Namespace::carry_names`], in order. It is not collected any more.
    #[must_use]
    pub(crate) fn take_carried(&self) -> Vec<NameOperation> {
        self.look(|state| std::mem::take(&mut state.carried).0.unwrap_or_default())
    }
}

//! Operations on names, collected while the names of Tier-3 are not in the tree yet.
//!
//! Owns: collecting the operations of this node and of others, from the moment when this node becomes a coordinator without an earlier
//! catalog. Does not own: what they make of a name (`protocol::cluster::carried`), bringing the names in (`cold`, `node::adopt`).

use super::guarded::Guarded;
use tidemark_protocol::cluster::carried::Carried;
use tidemark_protocol::cluster::wire::NameOperation;
use tidemark_protocol::id::FileId;

/// Most operations collected: about as many as a node keeps for a coordinator. Later ones are dropped, and the names that they removed may
/// come back.
const CARRIED_MAX: usize = 1 << 18;

/// The operations collected while Tier-3 is awaited.
#[derive(Debug, Default)]
pub(super) struct CarriedNames(Option<Carried>);

impl CarriedNames {
    pub(super) fn is_collected(&self) -> bool {
        self.0.is_some()
    }

    pub(super) fn note(&mut self, operation: &NameOperation) {
        let Some(carried) = self.0.as_mut().filter(|carried| carried.len() <= CARRIED_MAX) else { return };
        carried.push(operation.clone());
        if carried.len() > CARRIED_MAX {
            tracing::error!(
                limit = CARRIED_MAX,
                "more was done to names than is remembered until Tier-3 is read; some that were taken away may be back then"
            );
        }
    }

    /// Returns the present names of what Tier-3 has under `path`; `file` is the file that Tier-3 means there.
    pub(super) fn names(&self, path: &[u8], file: Option<FileId>) -> Vec<Vec<u8>> {
        self.0.as_ref().map_or_else(|| vec![path.to_vec()], |carried| carried.names(path, file))
    }
}

/// Tier-3's names, brought into this tree.
#[derive(Debug, Clone, Copy)]
pub struct Adoption<'a> {
    pub(super) state: &'a Guarded,
}

impl Adoption<'_> {
    /// Collects operations on names from now on. The first are those of this node that no coordinator has answered.
    pub fn carry_names(&self) {
        self.state.look(|state| {
            let mut carried = Carried::default();
            let untold = state.outgoing.untold.iter().flat_map(|outgoing| outgoing.unanswered.operations());
            untold.cloned().for_each(|operation| carried.push(operation));
            state.outgoing.carried = CarriedNames(Some(carried));
        });
    }

    /// Ends collecting: the names of Tier-3 are in the tree.
    pub fn end_carrying(&self) {
        self.state.look(|state| state.outgoing.carried = CarriedNames::default());
    }

    /// Whether names of Tier-3 come into the tree after operations that it does not know of.
    pub fn is_carrying(&self) -> bool {
        self.state.look(|state| state.outgoing.carried.is_collected())
    }

    /// Returns the present names of a file that Tier-3 has under `path`.
    pub fn carried_names(&self, path: &[u8], file: FileId) -> Vec<Vec<u8>> {
        self.state.look(|state| state.outgoing.carried.names(path, Some(file)))
    }
}

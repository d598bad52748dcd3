//! Keeps the ledger up with the namespace.
//!
//! Owns: that each change reaches the ledger and the copies at other nodes. Does not own: what the ledger makes of it (`ledger`).

use crate::node::Shared;
use crate::node::ledger::Ledger;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{CheckpointId, Rules};

impl Shared {
    /// Makes the ledger know all that changed before this call.
    pub(crate) fn catch_up(&self, ledger: &mut Ledger) {
        let nodes = self.namespace.take_dirty();
        ledger.refresh(&self.namespace, &nodes);
        self.copy_to_peers(&nodes);
    }

    /// Whether paths that `asked` selects changed without the ledger's knowledge. Afterwards it knows of the changes.
    ///
    /// Called after a process was seen to have ended, and before anything is done about that. The ledger may lack what that process
    /// did last, or what a living one did meanwhile. If this returns true, the decision is made again later.
    pub(crate) fn had_not_heard(
        &self,
        ledger: &mut Ledger,
        asked: impl Fn(&Rules, &RelPath) -> bool,
    ) -> bool {
        let nodes = self.namespace.take_dirty();
        let asked = |ledger: &Ledger| {
            let mut paths = nodes.iter().flat_map(|node| ledger.paths_of(*node));
            paths.any(|path| asked(ledger.rules(), path))
        };
        let had = asked(ledger);
        ledger.refresh(&self.namespace, &nodes);
        self.copy_to_peers(&nodes);
        had || asked(ledger)
    }

    /// Whether something that decides about a checkpoint changed without the ledger's knowledge.
    pub(crate) fn had_not_heard_of(&self, ledger: &mut Ledger, id: &CheckpointId) -> bool {
        let scope = ledger.books[id].scope.clone();
        self.had_not_heard(ledger, |rules, path| rules.scope(path) == scope) || ledger.is_stale_scope(&scope)
    }
}

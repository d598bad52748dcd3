//! Beginning after another coordinator: with what its deputy kept, and with what all nodes say.
//!
//! Owns: who is still to be heard, and whether names can be answered for. Does not own: what a deputy keeps (`cluster::deputy`),
//! what nodes say (`take`), who is gone (`members`).
//!
//! Nobody is answered before every member has published what the last coordinator did not acknowledge, or is gone; and where no
//! deputy kept the catalog, before Tier-3 has been read: only then is a name that is not there known not to be there (P8).

use super::{Catalog, Terms};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tidemark_engine::cluster::{Cluster, KeptCatalog, Presence};
use tidemark_protocol::id::Epoch;
use tidemark_protocol::key::NodeLife;

/// Between two looks at who has been heard.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Who and what a new coordinator waits for.
#[derive(Debug, Default)]
pub(super) struct Hearing {
    nodes: BTreeSet<NodeLife>,
    tier3: bool,
}

impl Catalog {
    /// The coordinator of an epoch that follows another. `terms` hold the members of before, and `kept` is what this node kept as the
    /// deputy of that one; its tree is what that one's was then ([`tidemark_engine::namespace::Namespace::become_catalog`]). None: it
    /// was not the deputy, or there was no coordinator.
    #[must_use]
    pub fn succeed(
        cluster: Arc<Cluster>,
        epoch: Epoch,
        presence: Arc<Presence>,
        terms: Terms,
        kept: Option<&KeptCatalog>,
    ) -> Arc<Self> {
        let lives = terms
            .stored
            .members
            .iter()
            .map(|listed| NodeLife { node: listed.life.node.clone(), incarnation: listed.life.incarnation });
        let nodes: BTreeSet<_> = lives.filter(|life| life.node != cluster.life.node).collect();
        tracing::info!(%epoch, nodes = nodes.len(), deputy = kept.is_some(), "this node is the coordinator, and hears the others");
        let mut published = kept.map(|kept| kept.published().clone()).unwrap_or_default();
        published.remove(&cluster.life);
        cluster.namespace().remember_removed(&kept.map(KeptCatalog::removed).unwrap_or_default());
        let hearing = Hearing { nodes, tier3: kept.is_none() };
        Self::start(cluster, epoch, presence, terms, (published, hearing))
    }

    /// Whether somebody or something is still to be heard.
    pub(super) fn hears_still(&self) -> bool {
        self.lock().hearing.is_open()
    }

    /// Resolves when every member has been heard, or is gone.
    pub async fn nodes_heard(&self) {
        while !self.lock().hearing.nodes.is_empty() {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// A node has said all that it knows.
    pub(super) fn heard(&self, life: &NodeLife) {
        self.lock().hearing.heard(life);
    }

    /// What Tier-3 holds is in the tree.
    pub fn heard_tier3(&self) {
        let mut state = self.lock();
        if std::mem::take(&mut state.hearing.tier3) {
            state.hearing.say();
        }
    }
}

impl Hearing {
    /// Whether somebody or something is still to be heard.
    pub(super) fn is_open(&self) -> bool {
        self.tier3 || !self.nodes.is_empty()
    }

    /// Whether it is still to be heard.
    pub(super) fn hears(&self, life: &NodeLife) -> bool {
        self.nodes.contains(life)
    }

    /// It has spoken, or never will.
    pub(super) fn heard(&mut self, life: &NodeLife) {
        if self.nodes.remove(life) {
            self.say();
        }
    }

    fn say(&self) {
        if self.nodes.is_empty() && !self.tier3 {
            tracing::info!("all nodes have been heard: names are answered for");
        }
    }
}

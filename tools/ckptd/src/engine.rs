//! The engine of one start, put together from memory, Tier-3 and the settings.
//!
//! Owns: which setting goes where. Does not own: the order of a start (`up`), the parts.

use crate::base::Base;
use crate::ends::cores;
use crate::peers::Peers;
use crate::tier3::Tier3;
use std::sync::{Arc, OnceLock};
use tidemark_engine::metrics::Metrics;
use tidemark_engine::node::{Node, NodeParts, Recovered, Shared};
use tidemark_engine::restore::Restorer;
use tidemark_engine::restore::peer::Nearby;
use tidemark_engine::save::drain::Drain;
use tidemark_engine::settings::Settings;
use tidemark_namespace::Clock;
use tidemark_protocol::key::NodeLife;
use tidemark_store::UploadLimits;

/// Builds the state that the loop, its jobs and its callers share.
///
/// # Errors
/// The name of the node could be read as another node's in a key.
pub(crate) fn shared(
    settings: &Settings,
    life: NodeLife,
    base: &Base,
    tier3: &Tier3,
    peers: Option<&Peers>,
) -> anyhow::Result<Arc<Shared>> {
    anyhow::ensure!(
        life.is_unambiguous(),
        "--name {} reads as another node's in a key; choose another",
        life.node
    );
    let limits = UploadLimits {
        part_bytes: settings.tier3.part_bytes,
        parts_in_flight: usize::try_from(settings.tier3.parts_in_flight).expect("at most 256"),
    };
    let fetches = usize::try_from(settings.tier3.fetches_in_flight).expect("at most 256");
    let metrics = Arc::new(Metrics::new());
    let store = Arc::clone(&tier3.store);
    let drain = Drain::new(store, life, tier3.right.epoch, limits, &tier3.probe, Arc::clone(&metrics))
        .with_compression(settings.compression.clone());
    let nearby = if peers.is_some() { Nearby::expected() } else { Nearby::alone() };
    let (namespace, store) = (Arc::clone(&base.namespace), Arc::clone(&drain.store));
    let restorer = Restorer::new(namespace, store, Arc::clone(&metrics), fetches, nearby);
    let shared = Arc::new(Shared {
        settings: settings.clone(),
        namespace: Arc::clone(&base.namespace),
        tier1: Arc::clone(&base.tier1),
        drain: Arc::new(drain),
        metrics,
        events: tidemark_engine::node::Events::default(),
        clock: Clock::system(),
        sizes: Arc::default(),
        seal_threads: cores(),
        cluster: OnceLock::new(),
        replicator: OnceLock::new(),
        restorer,
    });
    if let Some(peers) = peers {
        assert!(shared.cluster.set(Arc::clone(&peers.cluster)).is_ok(), "it was made above");
    }
    Ok(shared)
}

/// The loop, over what is known so far.
pub(crate) fn start(shared: &Arc<Shared>, recovered: Recovered) -> Node {
    let rules = shared.settings.recognition().expect("the settings were checked when they were read");
    Node::start(NodeParts { shared: Arc::clone(shared), rules, recovered })
}

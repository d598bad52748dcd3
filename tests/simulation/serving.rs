//! A daemon's part in bytes and checkpoints: the loop, copies on other nodes, Tier-3. All of it is the product's.
//!
//! Owns: putting the parts together as `ckptd` does. Does not own: the parts; names and the coordinator's role (`machine`).

use async_trait::async_trait;
use bytes::Bytes;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tidemark_control::catalog::Catalog;
use tidemark_engine::cluster::{Cluster, Inbox, Near, NodeService, Tagged, follow_partners, tell_copies};
use tidemark_engine::metrics::Metrics;
use tidemark_engine::node::{Events, Names, Node, NodeParts, Recovered, Shared, recover};
use tidemark_engine::replicate::{Receiver, ReceiverParts, Replicator, ReplicatorParts};
use tidemark_engine::restore::Restorer;
use tidemark_engine::restore::peer::Nearby;
use tidemark_engine::save::drain::{Drain, Raised};
use tidemark_engine::save::share::Participations;
use tidemark_engine::settings::Settings;
use tidemark_namespace::{Clock, object_copy};
use tidemark_protocol::cluster::wire::{Object, Prepare, Preparing};
use tidemark_protocol::id::{Epoch, FileId, Incarnation, SealNumber};
use tidemark_protocol::replication::{Holder, Priority};
use tidemark_store::{Probe, Store, UploadLimits};
use tidemark_tier1::Tier1;
use tidemark_transport::{Link, LinkErrorKind, Peer, Refusal};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Interval between two tries to read Tier-3, as `ckptd`'s.
const AGAIN: Duration = Duration::from_secs(1);

/// See the module's head.
pub(super) struct Serving {
    pub(super) node: Node,
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Serving")
    }
}

impl Serving {
    /// Starts the loop and the copies. `tasks` end with the daemon.
    pub(super) fn begin(
        (cluster, service, link): (&Arc<Cluster>, &Arc<NodeService>, Arc<dyn Link>),
        (tier1, clock): (Arc<Tier1>, Clock),
        store: Arc<dyn Store>,
        tasks: &mut JoinSet<()>,
    ) -> Arc<Self> {
        let settings = settings();
        let (namespace, metrics) = (Arc::clone(cluster.namespace()), Arc::new(Metrics::new()));
        let limits = UploadLimits::default();
        let (life, unknown) = (cluster.life.clone(), Probe::unknown());
        let drain = Drain::new(store, life.clone(), Epoch(0), limits, &unknown, Arc::clone(&metrics));
        let (tree, store) = (Arc::clone(&namespace), Arc::clone(&drain.store));
        let restorer = Restorer::new(tree, store, Arc::clone(&metrics), 4, Nearby::expected());
        let shared = Arc::new(Shared {
            settings: settings.clone(),
            namespace: Arc::clone(&namespace),
            tier1: Arc::clone(&tier1),
            drain: Arc::new(drain),
            metrics: Arc::clone(&metrics),
            events: Events::default(),
            clock,
            sizes: Arc::default(),
            seal_threads: 1,
            cluster: OnceLock::from(Arc::clone(cluster)),
            replicator: OnceLock::new(),
            restorer,
        });
        let rules = settings.recognition().expect("the default settings are right");
        let parts = NodeParts { shared: Arc::clone(&shared), rules, recovered: Recovered::default() };
        let node = Node::start(parts);
        let link = Tagged::replication(link);
        let receiver = Receiver::new(ReceiverParts {
            namespace: Arc::clone(&namespace),
            tier1,
            metrics: Arc::clone(&metrics),
            holder: Holder(life.incarnation),
            coming: Arc::clone(&shared.restorer.coming),
            verify_threads: 1,
        });
        receiver.use_link(Arc::clone(&link));
        let (partners, followed) = watch::channel(Vec::new());
        let parts = ReplicatorParts {
            namespace: Arc::clone(&namespace),
            link: Arc::clone(&link),
            metrics,
            home: life.node.to_string(),
            partners: followed,
            facts: Arc::new(|_| Vec::new()),
            streams: true,
            paced: settings.replication.paced,
        };
        let (replicator, copying) = Replicator::start(parts, life.incarnation);
        tasks.spawn(End(copying).wait());
        for view in namespace.nodes().views_below(b"") {
            replicator.look_at(&view, Priority::Base);
        }
        let told = Arc::clone(&replicator);
        receiver.tell_withdrawn_by(Box::new(move |node, file, seal, why| {
            told.withdrawn_by(node, file, seal, why);
        }));
        assert!(shared.replicator.set(Arc::clone(&replicator)).is_ok(), "it serves once");
        shared.restorer.nearby.ask(Near::new(Arc::clone(cluster), link));
        tasks.spawn(follow_partners(Arc::clone(cluster), partners));
        tasks.spawn(tell_copies(Arc::clone(cluster)));
        let members = Arc::clone(cluster);
        let address_of = move |node: &str| members.following.address_of(node);
        tasks.spawn(Arc::clone(&receiver).keep_house(address_of));
        service.deliver_to(Arc::new(Calls {
            shared,
            cluster: Arc::clone(cluster),
            participations: Participations::default(),
            receiver,
            replicator,
        }));
        Arc::new(Self { node })
    }

    /// Reads Tier-3, however often it takes, and decides over checkpoints from then on.
    pub(super) async fn take_tier3_up(&self, catalog: &Catalog, knows: bool) {
        while let Err(why) = self.read_tier3(catalog, knows).await {
            self.node.tier3_is_not_taken_up(why).await;
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn read_tier3(&self, catalog: &Catalog, knows: bool) -> Result<(), String> {
        let shared = self.node.shared();
        let probe =
            tidemark_store::probe(shared.drain.store.as_ref()).await.map_err(|error| error.to_string())?;
        shared.drain.learn(&probe);
        let raised = shared.drain.make_sure_of_epoch().await.map_err(|error| error.to_string())?;
        if let Raised::Newer(epoch) = raised {
            return Err(format!("epoch {epoch} is in Tier-3"));
        }
        let names = if knows { Names::Kept } else { Names::Empty };
        if !knows {
            catalog.nodes_heard().await;
        }
        let recovered = recover(shared, names).await.map_err(|error| error.to_string())?;
        self.node.decide_from_now_on(recovered).await;
        Ok(())
    }
}

fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.replication.paced = false;
    settings.tier3.paced = false;
    settings
}

/// A task that ends with the one that waits for it.
struct End(tokio::task::JoinHandle<()>);

impl End {
    async fn wait(mut self) {
        if let Err(error) = (&mut self.0).await
            && error.is_panic()
        {
            std::panic::resume_unwind(error.into_panic());
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Answers calls that are not about names.
struct Calls {
    shared: Arc<Shared>,
    cluster: Arc<Cluster>,
    participations: Participations,
    receiver: Arc<Receiver>,
    replicator: Arc<Replicator>,
}

#[async_trait]
impl Inbox for Calls {
    async fn replication(&self, from: Peer, body: Bytes) -> Result<Bytes, Refusal> {
        let answer = self.receiver.answer(&from, body).await;
        self.cluster.holders.copies_changed();
        answer
    }

    async fn prepare(&self, prepare: Prepare) -> Preparing {
        self.participations.prepare(&prepare, &self.shared.drain, &self.shared.namespace)
    }

    fn objects(&self, objects: Vec<(FileId, SealNumber, Object)>) {
        for (file, seal, object) in objects {
            self.cluster.take_object(file, seal, &object_copy(&object));
        }
    }

    fn pace(&self, waited_for: bool) {
        if waited_for {
            self.replicator.lift_pace();
        } else {
            self.replicator.checkpoint_completed();
        }
    }

    async fn command(&self, _: Bytes) -> Result<Bytes, Refusal> {
        Err(Refusal::new(LinkErrorKind::Invalid, "nobody gives commands here"))
    }

    fn connection(&self, peer: &Peer, there: bool) {
        if there {
            self.replicator.saw_life(&peer.node, Incarnation(peer.incarnation));
        }
    }
}

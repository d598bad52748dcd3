//! Links of this node to other nodes, and its role: coordinator, member or candidate.
//!
//! Owns: opening the links with the settings, taking the coordinator role or following the coordinator. Does not own: links
//! (transport), the tree over nodes (the engine's cluster), the coordinator (control).

use crate::api::Daemon;
use crate::cli::Failure;
use crate::known::{keep_members, members_before};
use crate::seat::Candidate;
use crate::state_dir::StateDir;
use anyhow::Context;
use bytes::Bytes;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tidemark_control::catalog::{Before, Catalog, Terms};
use tidemark_control::lease::{EtcdAccess, EtcdPlace};
use tidemark_engine::cluster::{
    Cluster, Inbox, Near, NodeService, Presence, Seat, Tagged, follow, follow_partners, tell_copies,
};
use tidemark_engine::node::Shared;
use tidemark_engine::replicate::{Receiver, ReceiverParts, Replicator, ReplicatorParts};
use tidemark_engine::save::share::Participations;
use tidemark_engine::settings::Settings;
use tidemark_namespace::{Namespace, object_copy};
use tidemark_protocol::cluster::wire::{Object, Prepare, Preparing};
use tidemark_protocol::id::{Epoch, FileId, Incarnation, SealNumber, StartId};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::label::Labels;
use tidemark_protocol::replication::{Holder, Priority};
use tidemark_tier1::Tier1;
use tidemark_transport::certs::Certs;
use tidemark_transport::tcp::{self, Security};
use tidemark_transport::{Address, Identity, Peer, Refusal, Tcp};

/// Connections of one transfer: one core sends about as fast as a network of 100 Gbit/s takes, and two are for the receiver.
const BULK_STREAMS: usize = 2;

/// Where the settings say that the coordinator is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Role {
    /// The node has no link to other nodes.
    Alone,
    /// The coordinator is this node, and others may come.
    Coordinator,
    /// A node at one of these addresses is the coordinator.
    Member(Vec<Address>),
    /// The holder of the lease there is the coordinator; it may be this node.
    Candidate(EtcdPlace),
}

impl Role {
    pub(crate) fn of(settings: &Settings) -> anyhow::Result<Self> {
        let node = &settings.node;
        let speaks = node.certs.is_some() || node.insecure;
        if let Some(place) = settings.etcd_place() {
            let flag = if settings.etcd.url.is_some() { "--etcd" } else { "--lease" };
            anyhow::ensure!(
                speaks && node.coordinator == "embedded",
                "{flag} {place} names the coordinator of several nodes: it needs --certs DIR (see `ckptctl certs`), or --insecure on loopback, and no --coordinator"
            );
            return Ok(Self::Candidate(place.parse().context(flag)?));
        }
        if node.coordinator == "embedded" {
            return Ok(if speaks { Self::Coordinator } else { Self::Alone });
        }
        anyhow::ensure!(
            speaks,
            "--coordinator {:?} needs --certs DIR (see `ckptctl certs`), or --insecure on loopback",
            node.coordinator
        );
        let nodes: anyhow::Result<_> = node.coordinator.split(',').map(address).collect();
        nodes.map(Self::Member).context("--coordinator")
    }
}

/// Refuses certificates that cannot be used before anything is asked of Tier-3.
pub(crate) fn check_certificates(settings: &Settings, role: &Role, name: &str) -> anyhow::Result<()> {
    match &settings.node.certs {
        Some(directory) if *role != Role::Alone => Certs::load(directory, &settings.node.cluster, name)
            .map(drop)
            .context("the certificates cannot be used"),
        Some(_) | None => Ok(()),
    }
}

/// Reads what the etcd of a candidate needs, for the same reason.
pub(crate) fn open_etcd(settings: &Settings, role: &Role) -> anyhow::Result<Option<EtcdAccess>> {
    let Role::Candidate(place) = role else { return Ok(None) };
    Ok(Some(EtcdAccess::open(place.clone(), &settings.etcd)?))
}

/// The address of a node from `NODE@HOST:PORT`.
pub(crate) fn address(text: &str) -> anyhow::Result<Address> {
    let (node, address) = text
        .split_once('@')
        .filter(|(node, address)| !node.is_empty() && address.contains(':'))
        .with_context(|| format!("{text:?} is not NODE@HOST:PORT"))?;
    Ok(Address { node: node.to_owned(), address: address.to_owned() })
}

/// Links of this node to other nodes.
#[derive(Debug)]
pub(crate) struct Peers {
    pub(crate) cluster: Arc<Cluster>,
    service: Arc<NodeService>,
    link: Arc<Tcp>,
    address: String,
    role: Role,
}

impl Peers {
    /// Listens; `None` for a node that is alone.
    pub(crate) async fn open(
        settings: &Settings,
        role: Role,
        (life, start): (NodeLife, StartId),
        listen: SocketAddr,
        namespace: Arc<Namespace>,
    ) -> Result<Option<Self>, Failure> {
        if role == Role::Alone {
            return Ok(None);
        }
        let node = &settings.node;
        let security = match &node.certs {
            Some(directory) => Security::Certificates(
                Certs::load(directory, &node.cluster, life.node.as_str())
                    .context("the certificates cannot be used")
                    .map_err(Failure::usage)?,
            ),
            None => Security::Insecure { off_loopback: false },
        };
        let runtime = tokio::runtime::Handle::current();
        let cluster = Cluster::new(life.clone(), start, namespace, runtime);
        let service = NodeService::new(Arc::clone(&cluster));
        let identity = Identity {
            cluster: node.cluster.clone(),
            node: life.node.to_string(),
            incarnation: life.incarnation.0,
            start: start.0,
        };
        let encrypt_bulk = settings.links.encrypt_bulk;
        tracing::info!(
            bytes = match (&security, encrypt_bulk) {
                (Security::Insecure { .. }, _) => "plain",
                (Security::Certificates(_), true) => "encrypted",
                (Security::Certificates(_), false) =>
                    "authenticated, and readable where the other node allows it",
            },
            "how the bytes of files travel between nodes"
        );
        let settings = tcp::Settings { listen, security, encrypt_bulk, bulk_streams: BULK_STREAMS };
        let link = Tcp::listen(identity, settings, Arc::clone(&service) as Arc<_>)
            .await
            .context("other nodes cannot be heard")
            .map_err(Failure::failed)?;
        let link = Arc::new(link);
        cluster.connect(Arc::clone(&link) as Arc<_>);
        let address = node.advertise.clone().unwrap_or_else(|| link.local_address().to_string());
        Ok(Some(Self { cluster, service, link, address, role }))
    }

    /// Where this node listens.
    pub(crate) fn local_address(&self) -> SocketAddr {
        self.link.local_address()
    }

    /// Others may ask from now on, and this node's files are copied to them. The tasks end with the runtime.
    pub(crate) fn serve(&self, shared: &Arc<Shared>, daemon: &Arc<Daemon>) {
        let link = Tagged::replication(Arc::clone(&self.link) as Arc<_>);
        let life = &self.cluster.life;
        let receiver = Receiver::new(ReceiverParts {
            namespace: Arc::clone(&shared.namespace),
            tier1: Arc::clone(&shared.tier1),
            metrics: Arc::clone(&shared.metrics),
            holder: Holder(life.incarnation),
            coming: Arc::clone(&shared.restorer.coming),
            verify_threads: shared.seal_threads,
        });
        receiver.use_link(Arc::clone(&link));
        let (partners, followed) = tokio::sync::watch::channel(Vec::new());
        let (replicator, _) = Replicator::start(
            ReplicatorParts {
                namespace: Arc::clone(&shared.namespace),
                link: Arc::clone(&link),
                metrics: Arc::clone(&shared.metrics),
                home: life.node.to_string(),
                partners: followed,
                facts: Arc::new(|_| Vec::new()),
                streams: true,
                paced: shared.settings.replication.paced,
            },
            life.incarnation,
        );
        // Files that lay here before this daemon began.
        for view in shared.namespace.nodes().views_below(b"") {
            replicator.look_at(&view, Priority::Base);
        }
        let told = Arc::clone(&replicator);
        receiver.tell_withdrawn_by(Box::new(move |node, file, seal, why| {
            told.withdrawn_by(node, file, seal, why)
        }));
        assert!(shared.replicator.set(Arc::clone(&replicator)).is_ok(), "a node serves once");
        shared.restorer.nearby.ask(Near::new(Arc::clone(&self.cluster), link));
        tokio::spawn(follow_partners(Arc::clone(&self.cluster), partners));
        tokio::spawn(tell_copies(Arc::clone(&self.cluster)));
        let cluster = Arc::clone(&self.cluster);
        let address_of = move |node: &str| cluster.following.address_of(node);
        tokio::spawn(Arc::clone(&receiver).keep_house(address_of));
        let shared = Arc::clone(shared);
        let cluster = Arc::clone(&self.cluster);
        let participations = Participations::default();
        self.service.deliver_to(Arc::new(NodeInbox {
            daemon: Arc::clone(daemon),
            shared,
            cluster,
            participations,
            receiver,
            replicator,
        }));
    }

    /// Takes the coordinator role, or follows the coordinator. The tasks end with the runtime.
    pub(crate) fn begin(&self, shared: &Arc<Shared>, epoch: Epoch, version: &str, state_dir: &StateDir) {
        let settings = &shared.settings;
        let presence = self.presence(shared, version);
        match &self.role {
            Role::Alone => {}
            Role::Coordinator => {
                let cluster = &self.cluster;
                let stored = members_before(state_dir, &cluster.life.node, &presence.address);
                let terms = Terms { stored, ..terms(settings) };
                // No other node was the coordinator since this tree was the catalog, and Tier-3 has been read if the tree is new.
                let before = Before::Own(None);
                let catalog = Catalog::succeed(Arc::clone(cluster), epoch, presence, terms, &before, true);
                cluster.sit(Seat::Here(Arc::clone(&catalog) as Arc<_>));
                tokio::spawn(keep_members(Arc::clone(&catalog), Arc::clone(cluster), state_dir.clone()));
                tokio::spawn(Arc::clone(&catalog).tell_removed());
                tokio::spawn(catalog.watch());
            }
            Role::Member(coordinators) => {
                if let Some(coordinator) = coordinators.first() {
                    self.cluster.sit(Seat::There(coordinator.clone()));
                }
                tokio::spawn(follow(Arc::clone(&self.cluster), presence));
            }
            Role::Candidate(_) => {
                tokio::spawn(follow(Arc::clone(&self.cluster), presence));
            }
        }
    }

    /// Returns this node's description of itself.
    fn presence(&self, shared: &Arc<Shared>, version: &str) -> Arc<Presence> {
        let tier1 = Arc::clone(&shared.tier1);
        Arc::new(Presence {
            address: self.address.clone(),
            labels: Labels::try_from(shared.settings.node.labels.clone()).unwrap_or_default(),
            version: version.to_owned(),
            tier1: Box::new(move || occupancy(&tier1)),
        })
    }

    /// Returns this node as a candidate for the coordinator role, if it is one.
    pub(crate) fn candidate(&self, daemon: &Arc<Daemon>, etcd: Option<EtcdAccess>) -> Option<Candidate> {
        let shared = daemon.node.shared();
        Some(Candidate {
            etcd: etcd?,
            cluster: Arc::clone(&self.cluster),
            daemon: Arc::clone(daemon),
            presence: self.presence(shared, daemon.version),
            terms: terms(&shared.settings),
            settling: Arc::default(),
        })
    }
}

/// Returns the coordinator's settings for members and their places.
fn terms(settings: &Settings) -> Terms {
    let (rules, patience) = (settings.placement.rules(), settings.members.patience());
    Terms { rules, patience, ..Terms::default() }
}

/// The bytes of Tier-1 that are in use, and its size.
fn occupancy(tier1: &Tier1) -> (u64, u64) {
    let usage = tier1.usage();
    (usage.used_bytes, usage.size_bytes)
}

/// Handler of messages that are not about names.
#[derive(Debug)]
struct NodeInbox {
    daemon: Arc<Daemon>,
    shared: Arc<Shared>,
    cluster: Arc<Cluster>,
    participations: Participations,
    receiver: Arc<Receiver>,
    replicator: Arc<Replicator>,
}

#[async_trait::async_trait]
impl Inbox for NodeInbox {
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
        if waited_for || self.daemon.draining.load(Ordering::Acquire) {
            self.replicator.lift_pace();
        } else {
            self.replicator.checkpoint_completed();
        }
    }

    async fn command(&self, body: Bytes) -> Result<Bytes, Refusal> {
        self.daemon.answer_for_others(&body).await
    }

    fn connection(&self, peer: &Peer, there: bool) {
        if there {
            self.replicator.saw_life(&peer.node, Incarnation(peer.incarnation));
        }
    }
}

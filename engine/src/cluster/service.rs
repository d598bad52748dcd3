//! Answering other nodes' calls.
//!
//! Owns: sorting calls by kind, recalls, changes of the members. Does not own: the coordinator's answers
//! ([`Authority`](super::Authority)), moving bytes (`replicate`), phase 1 (`save`).

use super::{Cluster, Seat, member, tag, witness};
use bytes::Bytes;
use std::sync::{Arc, OnceLock};
use tidemark_protocol::cluster::wire::{self, Prepare, Preparing, ToCoordinator, ToNode};
use tidemark_protocol::id::{Epoch, Incarnation, NodeName, StartId};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::membership::Life;
use tidemark_transport::{LinkErrorKind, Peer, Refusal, Service};

/// The receiver of messages that are not about names.
#[async_trait::async_trait]
pub trait Inbox: Send + Sync {
    /// Answers a message about copies.
    async fn replication(&self, from: Peer, body: Bytes) -> Result<Bytes, Refusal>;
    /// Carries out phase 1 of an attempt; called again until it is done.
    async fn prepare(&self, prepare: Prepare) -> Preparing;
    /// Records copies in Tier-3 of files that are here.
    fn objects(
        &self,
        objects: Vec<(tidemark_protocol::id::FileId, tidemark_protocol::id::SealNumber, wire::Object)>,
    );
    /// Notifies that a checkpoint with files of this node is complete, or (`waited_for`) that a caller waits.
    fn pace(&self, waited_for: bool);
    /// Carries out a person's command that another node received.
    async fn command(&self, body: Bytes) -> Result<Bytes, Refusal>;
    /// Records whether a node's connections are there (`there`) or gone.
    fn connection(&self, peer: &Peer, there: bool);
}

/// The service of a node's links.
pub struct NodeService {
    cluster: Arc<Cluster>,
    inbox: OnceLock<Arc<dyn Inbox>>,
}

impl std::fmt::Debug for NodeService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeService").finish_non_exhaustive()
    }
}

impl NodeService {
    /// Makes a service that answers calls about names only, until [`Self::deliver_to`].
    #[must_use]
    pub fn new(cluster: Arc<Cluster>) -> Arc<Self> {
        Arc::new(Self { cluster, inbox: OnceLock::new() })
    }

    /// Sets the receiver of all other calls. May be called once.
    pub fn deliver_to(&self, inbox: Arc<dyn Inbox>) {
        assert!(self.inbox.set(inbox).is_ok(), "a node has one inbox");
    }

    fn inbox(&self) -> Result<&Arc<dyn Inbox>, Refusal> {
        self.inbox.get().ok_or_else(|| {
            Refusal::new(LinkErrorKind::Unavailable, "this node is starting; ask again in a moment")
        })
    }

    async fn to_node(&self, from: &Peer, message: ToNode) -> Result<Vec<u8>, Refusal> {
        let cluster = &self.cluster;
        let answer = match message {
            ToNode::Recall { epoch, path, name, release } => {
                self.check(epoch)?;
                recall(cluster, &path, name, release).await?;
                wire::encode(&())
            }
            ToNode::Forget { epoch } => {
                self.check(epoch)?;
                cluster.names.forget_answers();
                wire::encode(&())
            }
            ToNode::Members(change) => {
                self.check(change.epoch)?;
                // Other commands may carry an epoch that their sender has merely seen; only the epoch's coordinator sends this one.
                cluster.following.heard_commander(change.epoch, from.node.clone());
                let number = change.number;
                if let Err(missed) = cluster.following.follow_members(change) {
                    tracing::debug!(%missed, "a change of the members");
                    member::take_newer_members(cluster, number).await;
                }
                wire::encode(&())
            }
            ToNode::Ask(ask) => wire::encode(&witness::look(cluster, ask).await?),
            ToNode::Knock => wire::encode(&cluster.own_life()),
            ToNode::Prepare(prepare) => {
                self.check(prepare.epoch)?;
                wire::encode(&self.inbox()?.prepare(*prepare).await)
            }
            ToNode::Objects { epoch, objects } => {
                self.check(epoch)?;
                self.inbox()?.objects(objects);
                wire::encode(&())
            }
            ToNode::Removed { epoch, files } => {
                self.check(epoch)?;
                let namespace = Arc::clone(&cluster.namespace);
                tokio::task::spawn_blocking(move || namespace.mirror().end_removed(&files))
                    .await
                    .expect("removing does not panic");
                cluster.holders.copies_changed();
                wire::encode(&())
            }
            ToNode::Pace { epoch, waited_for } => {
                self.check(epoch)?;
                self.inbox()?.pace(waited_for);
                wire::encode(&())
            }
        };
        answer.map_err(|error| Refusal::new(LinkErrorKind::Invalid, error.to_string()))
    }

    /// Refuses a command of any coordinator but the newest.
    fn check(&self, epoch: Epoch) -> Result<(), Refusal> {
        if self.cluster.following.saw_epoch(epoch) {
            return Ok(());
        }
        let ours = self.cluster.following.epoch();
        Err(Refusal::new(
            LinkErrorKind::Fenced,
            format!("epoch {epoch} commands, and epoch {ours} was seen: another coordinator took over"),
        ))
    }
}

/// Publishes all changes, and gives a directory back if `release`.
async fn recall(
    cluster: &Arc<Cluster>,
    path: &[u8],
    name: Option<Vec<u8>>,
    release: bool,
) -> Result<(), Refusal> {
    if release {
        cluster.names.forget_answers();
    }
    let mut recalled = None;
    if let Some(node) = cluster.namespace.nodes().node_at(path)
        && (release || name.is_some())
    {
        // Waits for calls at work in the directory, or on the name.
        if let Some(name) = name {
            cluster.names.settle(&(node, name)).await;
        }
        if release {
            recalled = Some(cluster.names.recall(node).await);
        }
    }
    cluster.namespace.publications().tell_begun();
    cluster
        .publish_unkept()
        .await
        .map_err(|away| Refusal::new(LinkErrorKind::Unavailable, format!("it cannot publish: {away}")))?;
    if let Some(recalled) = recalled {
        recalled.give_back();
    }
    Ok(())
}

#[async_trait::async_trait]
impl Service for NodeService {
    async fn call(&self, from: Peer, body: Bytes) -> Result<Bytes, Refusal> {
        let invalid = |what: String| Refusal::new(LinkErrorKind::Invalid, what);
        let Some((&kind, _)) = body.split_first() else { return Err(invalid("an empty call".to_owned())) };
        let rest = body.slice(1..);
        match kind {
            tag::COORDINATOR => {
                let message: ToCoordinator =
                    wire::decode(&rest).map_err(|error| invalid(error.to_string()))?;
                let Seat::Here(authority) = self.cluster.following.seat() else {
                    let why = "this node is not the coordinator; ask the one that the lease names";
                    return Err(Refusal::new(LinkErrorKind::Unavailable, why));
                };
                let node: NodeName =
                    from.node.parse().map_err(|_| invalid(format!("{} is no name", from.node)))?;
                let life = NodeLife { node, incarnation: Incarnation(from.incarnation) };
                authority.answer(life, message).await.map(Bytes::from)
            }
            tag::NODE => {
                let message: ToNode = wire::decode(&rest).map_err(|error| invalid(error.to_string()))?;
                self.to_node(&from, message).await.map(Bytes::from)
            }
            tag::REPLICATION => self.inbox()?.replication(from, rest).await,
            tag::COMMAND => self.inbox()?.command(rest).await,
            other => Err(invalid(format!("a call of kind {other:#04x} is not known to this build"))),
        }
    }

    fn tell(&self, _: Peer, _: Bytes) {}

    fn epoch(&self) -> u64 {
        self.cluster.following.epoch().0
    }

    fn saw_epoch(&self, _: &Peer, epoch: u64) {
        // A peer's epoch only hints at a newer coordinator; what counts is a coordinator's own message.
        tracing::debug!(epoch, "a peer follows this epoch");
    }

    fn connected(&self, peer: &Peer) {
        if let Ok(inbox) = self.inbox() {
            inbox.connection(peer, true);
        }
    }

    fn disconnected(&self, peer: &Peer) {
        if let (Seat::Here(authority), Ok(node)) = (self.cluster.following.seat(), peer.node.parse()) {
            let (incarnation, start) = (Incarnation(peer.incarnation), StartId(peer.start));
            authority.disconnected(Life { node, incarnation, start });
        }
        if let Ok(inbox) = self.inbox() {
            inbox.connection(peer, false);
        }
    }
}

impl Cluster {
    /// Waits for calls at work on a name, and gives back a directory that this node holds alone if `release`. The coordinator
    /// recalls from its own node this way.
    ///
    /// # Errors
    /// Never for the coordinator's own node.
    pub async fn give_back(
        self: &Arc<Self>,
        path: &[u8],
        name: Option<Vec<u8>>,
        release: bool,
    ) -> Result<(), Refusal> {
        recall(self, path, name, release).await
    }
}

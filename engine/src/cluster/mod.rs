//! A node within the cluster: one tree over all nodes.
//!
//! | file | owns |
//! |---|---|
//! | `names` | leave for calls on names |
//! | `leave` | leave for whole calls, which may work on several names |
//! | `held` | the directories that this node holds alone, and the calls at work |
//! | `asking` | asking the coordinator about a name |
//! | `remembered` | what answers let this node do without a question, for a moment |
//! | `publisher` | publishing this node's changes to the coordinator |
//! | `facts` | the tree's nodes as they are published |
//! | `following` | the coordinator that this node follows, and the members |
//! | `member` | joining, beating, following the coordinator |
//! | `calls` | the number of calls to the coordinator, by kind |
//! | `said` | what coordinators said in their answers to beats |
//! | `service` | answers to other nodes' calls |
//! | `aside` | files of this node that lost their names to other nodes' files |
//! | `copies` | which copies this node keeps, and which nodes keep copies of a file |
//! | `pace` | notifying nodes that a checkpoint is complete, or that a caller waits |
//! | `participants` | asking other nodes for their parts of a commit |
//! | `tagged` | one link for all kinds of calls |
//! | `witness` | whether this node reaches a node that the coordinator does not |
//! | `whereabouts` | where a file's bytes can be had |
//!
//! Does not own: the coordinator (control), which node that is (the daemon), the tree (`namespace`), links (transport).
//! `engine/design/0018-one-tree.md` has the argument.

mod aside;
mod asking;
mod calls;
mod copies;
mod facts;
mod following;
mod held;
mod leave;
mod member;
mod names;
mod pace;
mod participants;
mod publisher;
mod remembered;
mod said;
mod service;
mod tagged;
mod whereabouts;
mod witness;

pub use copies::{Holders, follow_partners, tell_copies};
pub use facts::state_of;
pub use following::Following;
pub use leave::{Leave, Wanted};
pub use member::{Presence, follow};
pub use names::{Access, Guard};
pub use said::Said;
pub use service::{Inbox, NodeService};
pub use tagged::Tagged;
pub use whereabouts::Near;

use bytes::Bytes;
use calls::Calls;
use held::Names;
use publisher::Publisher;
use serde::de::DeserializeOwned;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tidemark_namespace::{Moment, Namespace, NodeId};
use tidemark_protocol::cluster::wire::{self, Member, Members, ToCoordinator, ToNode, WireError};
use tidemark_protocol::error::error_text;
use tidemark_protocol::id::StartId;
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::membership::Life;
use tidemark_protocol::path::join;
use tidemark_protocol::report;
use tidemark_transport::{Address, Link, LinkError, LinkErrorKind, Refusal};
use tokio::time::Instant;

/// Longest wait for an answer of the coordinator that may depend on other nodes' answers.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

/// The first byte of a call, which names its kind.
pub(crate) mod tag {
    /// [`super::ToCoordinator`].
    pub(crate) const COORDINATOR: u8 = b'C';
    /// [`super::ToNode`].
    pub(crate) const NODE: u8 = b'N';
    /// Replication.
    pub(crate) const REPLICATION: u8 = b'R';
    /// A person's command.
    pub(crate) const COMMAND: u8 = b'A';
}

/// The coordinator's rules for names and checkpoints: answers the calls of all nodes.
#[async_trait::async_trait]
pub trait Authority: Send + Sync + std::fmt::Debug {
    /// Returns the encoded answer to the message.
    ///
    /// # Errors
    /// A refusal for the asker to read.
    async fn answer(&self, from: NodeLife, message: ToCoordinator) -> Result<Vec<u8>, Refusal>;

    /// Records that the coordinator's own node made a directory. Returns false if another node holds it already.
    fn made(&self, path: &[u8]) -> bool;

    /// Records that the coordinator's own node renamed a directory: directories held below it are known under the new path from now on.
    /// If two directories changed places (`exchange`), no node holds either, or one below them, alone any more.
    fn moved(&self, from: &[u8], to: &[u8], exchange: bool);

    /// Records that the coordinator's own node removed a directory: whoever makes one of its name holds that alone.
    fn removed(&self, path: &[u8]);

    /// Recalls these names, or their directories, from the nodes that hold them alone: the coordinator itself made or removed the names.
    /// Does not wait for the recalls, and must not block.
    fn changed_here(&self, paths: &[&[u8]]);

    /// Whether the coordinator is new, and some nodes have not yet published all they know.
    fn hears_still(&self) -> bool;

    /// Waits, up to a limit, until every change of the coordinator's own node so far is stored elsewhere. Returns whether it is; true if
    /// no etcd keeps the names, or etcd is full.
    async fn is_kept(&self) -> bool;

    /// Asks every node that may know of names at or below a path to publish them. Returns false if a node could not be asked.
    async fn hear_below(&self, path: &[u8]) -> bool;

    /// Asks every member that is not gone to publish what it knows. Returns a sentence for each that did not.
    async fn hear_all(&self) -> Vec<String>;

    /// Records that the last connection with a node's daemon is gone. Must not block.
    fn disconnected(&self, life: Life);

    /// Describes every member, for people.
    fn nodes(&self) -> Vec<report::Node>;

    /// Describes who keeps whose copies, and which losses the copies survive.
    fn placement(&self) -> report::Placement;

    /// Returns the number of calls of each kind.
    fn calls(&self) -> Vec<(&'static str, u64)>;
}

/// The place of the coordinator.
#[derive(Debug, Clone, Default)]
pub enum Seat {
    /// Not known.
    #[default]
    Unknown,
    /// In this process.
    Here(Arc<dyn Authority>),
    /// On another node.
    There(Address),
}

/// Why the coordinator did not answer.
#[derive(Debug, thiserror::Error)]
pub enum Away {
    #[error("nobody is known to be the coordinator")]
    Nobody,
    #[error("another coordinator took over before this one answered")]
    Replaced,
    #[error("the coordinator is new and has not heard all nodes")]
    New,
    #[error("the coordinator cannot be asked")]
    Link(#[from] LinkError),
    #[error("the coordinator refused: {0}")]
    Refused(Refusal),
    #[error("the coordinator did not answer within {} ms", .0.as_millis())]
    Late(Duration),
    #[error("the etcd of the cluster has not taken the change yet")]
    NotKept,
    #[error("the coordinator's answer is not understood")]
    Wire(#[from] WireError),
}

impl Away {
    /// Whether another try soon may succeed: another coordinator takes the role, or this one answers again.
    fn passes(&self) -> bool {
        match self {
            Self::Nobody | Self::Replaced | Self::New | Self::Late(_) | Self::NotKept => true,
            Self::Link(error) => !matches!(error, LinkError::Handshake { .. }),
            Self::Refused(refusal) => {
                matches!(refusal.kind, LinkErrorKind::Unavailable | LinkErrorKind::Fenced)
            }
            Self::Wire(_) => false,
        }
    }
}

/// Why the coordinator has not let this node in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotIn {
    /// The error with its causes.
    pub why: String,
    /// Whether further tries fail until a person changes something.
    pub for_good: bool,
}

impl NotIn {
    fn of(error: &Away) -> Self {
        let for_good = match error {
            Away::Link(LinkError::Handshake { .. }) => true,
            Away::Refused(refusal) => refusal.kind == LinkErrorKind::Invalid,
            _ => false,
        };
        Self { why: error_text(error), for_good }
    }
}

/// See the module's head. Share it by `Arc`.
#[derive(Debug)]
pub struct Cluster {
    pub life: NodeLife,
    pub start: StartId,
    namespace: Arc<Namespace>,
    link: OnceLock<Arc<dyn Link>>,
    runtime: tokio::runtime::Handle,
    pub following: Following,
    calls: Calls,
    names: Names,
    publisher: Publisher,
    pub holders: Holders,
    /// Whether this node was the coordinator: it then collected no states for another one.
    led: AtomicBool,
    said: Said,
}

impl Cluster {
    /// Makes the state of a node that knows of no other node yet.
    #[must_use]
    pub fn new(
        life: NodeLife,
        start: StartId,
        namespace: Arc<Namespace>,
        runtime: tokio::runtime::Handle,
    ) -> Arc<Self> {
        let NodeLife { node, incarnation } = life.clone();
        let following = Following::new(Life { node, incarnation, start });
        Arc::new(Self {
            life,
            start,
            names: Names::default(),
            publisher: Publisher::new(namespace.catalog().moment_before()),
            holders: Holders::default(),
            // The daemon before this one may have been the coordinator.
            led: AtomicBool::new(namespace.catalog().catalog_of().is_some()),
            said: Said::default(),
            namespace,
            link: OnceLock::new(),
            runtime,
            following,
            calls: Calls::default(),
        })
    }

    /// Returns the identity of this run of this node's daemon.
    #[must_use]
    pub fn own_life(&self) -> Life {
        let NodeLife { node, incarnation } = self.life.clone();
        Life { node, incarnation, start: self.start }
    }

    /// Returns the number of calls to the coordinator of each kind, if another node is the coordinator.
    #[must_use]
    pub fn calls(&self) -> Vec<(&'static str, u64)> {
        self.calls.counted()
    }

    /// Sets the link to the other nodes. May be called once.
    pub fn connect(&self, link: Arc<dyn Link>) {
        assert!(self.link.set(link).is_ok(), "a node has one end of the links");
    }

    /// Returns the link to the other nodes, once it is set.
    #[must_use]
    pub fn link(&self) -> Option<&Arc<dyn Link>> {
        self.link.get()
    }

    /// Sets where the coordinator is. Directories that this node holds alone stay so until the new coordinator says otherwise.
    pub fn sit(&self, seat: Seat) {
        let mut now = self.following.lock_seat();
        let same = matches!((&*now, &seat), (Seat::There(one), Seat::There(other)) if one == other);
        if matches!(*now, Seat::Here(_)) {
            self.namespace.catalog().forget_removed();
            self.namespace.catalog().collect_no_more();
            self.led.store(true, Ordering::Release);
        }
        if matches!(seat, Seat::There(_)) {
            self.namespace.catalog().is_catalog_no_more();
        }
        if let Seat::Here(authority) = &seat {
            let alone = self.names.alone(&self.namespace);
            let kept: Vec<_> = alone.into_iter().filter(|path| authority.made(path)).collect();
            self.names.keep_alone(&self.namespace, &kept);
        }
        *now = seat;
        drop(now);
        self.names.forget_answers();
        if !same {
            self.following.seat_has_changed();
        }
    }

    /// Returns what the coordinators said that this node followed.
    #[must_use]
    pub fn said(&self) -> &Said {
        &self.said
    }

    /// Asks the coordinator.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        message: &ToCoordinator,
        deadline: Duration,
    ) -> Result<T, Away> {
        let bytes = match self.following.seat() {
            Seat::Unknown => return Err(Away::Nobody),
            Seat::Here(authority) => {
                let answer = authority.answer(self.life.clone(), message.clone());
                let answer = tokio::time::timeout(deadline, answer).await;
                Bytes::from(answer.map_err(|_| Away::Late(deadline))?.map_err(Away::Refused)?)
            }
            Seat::There(address) => {
                let link = self.link.get().ok_or(Away::Nobody)?;
                self.calls.count(message);
                let mut seats = self.following.watch_seat();
                let answer = tokio::select! {
                    answer = link.call(&address, tagged(tag::COORDINATOR, message)?, deadline) => answer,
                    // An answer of a replaced coordinator is not used.
                    _ = seats.changed() => return Err(Away::Replaced),
                };
                let answer = answer.map_err(|error| match error {
                    LinkError::Refused { refusal, .. } => Away::Refused(refusal),
                    error => Away::Link(error),
                })?;
                self.following.heard_coordinator();
                answer
            }
        };
        Ok(wire::decode(&bytes)?)
    }

    /// Forwards a person's command to the coordinator; both ends agree on the bytes.
    ///
    /// # Errors
    /// The coordinator is away, or refuses. [`Away::Nobody`] if this node is the coordinator.
    pub async fn forward(&self, command: &[u8], deadline: Duration) -> Result<Bytes, Away> {
        let Seat::There(address) = self.following.seat() else { return Err(Away::Nobody) };
        let link = self.link.get().ok_or(Away::Nobody)?;
        let body = [&[tag::COMMAND], command].concat();
        link.call(&address, body.into(), deadline).await.map_err(|error| match error {
            LinkError::Refused { refusal, .. } => Away::Refused(refusal),
            error => Away::Link(error),
        })
    }

    /// Asks a node.
    ///
    /// # Errors
    /// The link's errors; also a message that the link does not accept.
    pub async fn ask_node<T: DeserializeOwned>(
        &self,
        node: &Address,
        message: &ToNode,
        deadline: Duration,
    ) -> Result<T, Away> {
        let link = self.link.get().ok_or(Away::Nobody)?;
        let answer = link.call(node, tagged(tag::NODE, message)?, deadline).await?;
        Ok(wire::decode(&answer)?)
    }

    /// Sends a message to every other member that is not gone, each on its own, and logs each failure with `what`. Encodes it once,
    /// because the copies for a large cluster take megabytes. Returns how many bytes were queued.
    pub fn tell_others(
        &self,
        members: &Members,
        message: &ToNode,
        deadline: Duration,
        what: &'static str,
    ) -> u64 {
        self.tell_each(members.members.iter(), message, deadline, what)
    }

    /// Does as [`Cluster::tell_others`], for some members.
    fn tell_each<'a>(
        &self,
        members: impl Iterator<Item = &'a Member>,
        message: &ToNode,
        deadline: Duration,
        what: &'static str,
    ) -> u64 {
        let Some(link) = self.link.get() else { return 0 };
        let body = match tagged(tag::NODE, message) {
            Ok(body) => body,
            Err(error) => {
                tracing::error!(%error, what, "nobody can be told");
                return 0;
            }
        };
        let others = members.filter(|member| !member.gone && member.life != self.life);
        let mut bytes = 0;
        for address in others.map(address_of) {
            let (link, body) = (Arc::clone(link), body.clone());
            bytes += body.len() as u64;
            self.runtime.spawn(async move {
                if let Err(error) = link.call(&address, body, deadline).await {
                    tracing::debug!(%error, node = %address.node, what, "not told");
                }
            });
        }
        bytes
    }

    /// Publishes every change that the coordinator has not received.
    ///
    /// # Errors
    /// The coordinator is away; the changes are published later.
    pub async fn publish(&self) -> Result<(), Away> {
        match self.following.seat() {
            Seat::Here(authority) => {
                if authority.is_kept().await {
                    Ok(())
                } else {
                    Err(Away::NotKept)
                }
            }
            Seat::There(_) | Seat::Unknown => publisher::publish(self).await,
        }
    }

    /// Does as [`Cluster::publish`], but does not wait until the coordinator's own changes are stored elsewhere.
    async fn publish_unkept(&self) -> Result<(), Away> {
        publisher::publish(self).await
    }

    /// Whether this node is a new coordinator, and some nodes have not yet published all they know.
    #[must_use]
    pub fn hears_still(&self) -> bool {
        matches!(self.following.seat(), Seat::Here(authority) if authority.hears_still())
    }

    /// Asks every node that may know of names at or below a path to publish them. Returns false if a node could not be asked, and if this
    /// node is not the coordinator.
    pub(crate) async fn hear_below(&self, path: &[u8]) -> bool {
        match self.following.seat() {
            Seat::Here(authority) => authority.hear_below(path).await,
            Seat::There(_) | Seat::Unknown => false,
        }
    }

    /// Recalls these names from other nodes, if this node is the coordinator: its loop, and not a call with leave, made or removed them.
    pub(crate) fn changed_here(&self, paths: &[&[u8]]) {
        if let Seat::Here(authority) = self.following.seat() {
            authority.changed_here(paths);
        }
    }

    /// Returns the moment up to which this node's publications, up to the given one, hold all changes here; none: no node has any.
    #[must_use]
    pub fn told_until(&self, publication: Option<u64>) -> Moment {
        self.publisher.told_until(publication.unwrap_or(0))
    }

    /// Notes that this node's publications up to this one hold all changes here until the moment. A coordinator's own are those that etcd
    /// keeps.
    pub fn note_told(&self, publication: u64, moment: Moment) {
        self.publisher.note_told(publication, moment);
    }

    /// Returns the namespace of this node.
    #[must_use]
    pub fn namespace(&self) -> &Arc<Namespace> {
        &self.namespace
    }

    /// Records that this node made a directory, and so holds it alone.
    pub fn made_directory(&self, node: NodeId) {
        // Other nodes see a directory in the coordinator's tree at once, and one of them may hold it by now.
        if let Seat::Here(authority) = self.following.seat()
            && !self.namespace.nodes().path_of(node).is_some_and(|path| authority.made(&path))
        {
            return;
        }
        self.names.hold(&self.namespace, node, false, Instant::now());
    }

    /// Records a rename on this node. If this node is not the coordinator, the published operation reports the rename.
    pub fn moved(&self, from: (NodeId, &[u8]), to: (NodeId, &[u8]), exchange: bool) {
        let directory =
            |(parent, name): (NodeId, &[u8])| self.namespace.standing().child_directory(parent, name);
        let moved: Vec<NodeId> = if exchange {
            [from, to].into_iter().filter_map(directory).collect()
        } else {
            directory(to).into_iter().collect()
        };
        if exchange {
            moved.iter().for_each(|node| self.names.forget_below(*node));
        }
        moved.iter().for_each(|node| self.names.moved(&self.namespace, *node));
        if !moved.is_empty() {
            // The coordinator knows what it allowed by the path of before.
            self.names.forget_answers();
        }
        let path =
            |(parent, name): (NodeId, &[u8])| Some(join(&self.namespace.nodes().path_of(parent)?, name));
        if let (false, Seat::Here(authority)) = (moved.is_empty(), self.following.seat())
            && let (Some(from), Some(to)) = (path(from), path(to))
        {
            authority.moved(&from, &to, exchange);
        }
    }
}

/// Returns the address of a member.
#[must_use]
pub fn address_of(member: &Member) -> Address {
    Address { node: member.life.node.to_string(), address: member.address.clone() }
}

/// Builds the body of a call.
pub(crate) fn tagged<T: serde::Serialize>(tag: u8, message: &T) -> Result<Bytes, WireError> {
    let mut body = vec![tag];
    body.extend(wire::encode(message)?);
    Ok(Bytes::from(body))
}

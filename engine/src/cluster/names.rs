//! Leave for calls on names.
//!
//! Owns: which calls ask the coordinator and which do not, what is done while it is away. Does not own: the directories that this node
//! holds alone (`held`), the question (`asking`), who gets a directory (the coordinator).
//!
//! In a directory that it holds alone, a node asks no one. Elsewhere it asks the coordinator about the one name, and then lets the call
//! go on.

use super::asking::{Asked, Asking};
use super::remembered::Name;
use super::{Away, Cluster, address_of};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tidemark_namespace::{FsError, Namespace, NodeId};
use tidemark_protocol::cluster::leases::KNOWN;
use tidemark_protocol::cluster::wire::{Intent, Leave, ToNode};
use tidemark_protocol::id::NodeName;
use tokio::time::Instant;

/// Longest wait of a call on a name for a coordinator that is away, once an outage.
pub(super) const OUTAGE_WAIT: Duration = Duration::from_millis(200);

/// Longest wait of a look-up, or of an open whose bytes are elsewhere, for a coordinator that is away or does not know yet. The call
/// then fails. A new coordinator is there within four seconds.
pub(super) const MISS_WAIT: Duration = Duration::from_secs(20);

/// Maximum number of directories below a renamed directory, all held, for which the coordinator is not asked: more than a checkpoint
/// has, and quicker to examine than a question.
const CLEAR_MAX: usize = 64;

/// Pause between two tries.
pub(super) const ASK_AGAIN: Duration = Duration::from_millis(50);

/// The use that a call is about to make of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access<'a> {
    /// Reads the meaning of a name.
    Look { parent: NodeId, name: &'a [u8] },
    /// Makes, changes or removes a name. `sure`: another node's file must not be replaced unseen.
    Change { parent: NodeId, name: &'a [u8], sure: bool },
    /// Renames or removes a directory, or sets its attributes.
    Move { parent: NodeId, name: &'a [u8] },
    /// Sets the attributes of a directory that this node holds.
    Attributes { parent: NodeId, name: &'a [u8] },
    /// Lists a directory.
    List { directory: NodeId },
}

/// Why a question gave no leave.
#[derive(Debug)]
pub(super) enum NoLeave {
    /// Another node is in the way, or the coordinator is away. The call ends what leave it has, and asks again after [`ASK_AGAIN`].
    Yet,
    Error(FsError),
}

impl NoLeave {
    fn until(give_up: Instant) -> Self {
        if Instant::now() >= give_up { Self::Error(FsError::Io) } else { Self::Yet }
    }
}

impl From<FsError> for NoLeave {
    fn from(error: FsError) -> Self {
        Self::Error(error)
    }
}

/// Leave for one call; the directory is not given back before it is dropped.
#[derive(Debug)]
pub struct Guard {
    cluster: Arc<Cluster>,
    held: Option<NodeId>,
    /// The name that the call works on, and its ticket.
    name: Option<(Name, u64)>,
}

impl Guard {
    fn new(cluster: &Arc<Cluster>, held: Option<NodeId>, name: Option<(Name, u64)>) -> Self {
        Self { cluster: Arc::clone(cluster), held, name }
    }

    /// Whether this node holds the directory alone: the call's changes may then be published later.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.held.is_some()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(node) = self.held {
            self.cluster.names.leave(node);
        }
        if let Some((name, ticket)) = self.name.take() {
            self.cluster.names.done(&name, ticket);
        }
    }
}

impl Cluster {
    /// Gives leave at once, if the coordinator need not be asked.
    #[must_use]
    pub fn try_enter(self: &Arc<Self>, access: Access<'_>) -> Option<Guard> {
        let directory = access.directory();
        if let Some(name) = access.changed_directory() {
            let name = (directory, name.to_vec());
            if self.is_clear(directory, &name.1)
                && let Some(ticket) = self.names.enter_to_change(&name)
            {
                return Some(Guard::new(self, Some(directory), Some((name, ticket))));
            }
        } else if self.names.enter(directory) {
            return Some(Guard::new(self, Some(directory), None));
        }
        if let Access::Change { parent, name, .. } = access {
            let name = (parent, name.to_vec());
            if let Some(ticket) = self.names.begin_promised(&name) {
                return Some(Guard::new(self, None, Some((name, ticket))));
            }
        }
        if let Access::Look { parent, name } = access
            && let Some(child) = self.namespace.standing().child_directory(parent, name)
            && self.names.is_still_there(child)
        {
            return Some(Guard::new(self, None, None));
        }
        None
    }

    /// Whether no node has to be evicted from a directory that is changed. Another node may hold a directory below one that this node holds.
    fn is_clear(&self, parent: NodeId, name: &[u8]) -> bool {
        let Some(child) = self.namespace.standing().child_directory(parent, name) else { return true };
        let below = self.namespace.standing().directories_below(child, CLEAR_MAX);
        below.is_some_and(|below| self.names.holds_all(&below))
    }

    /// Gives leave, after asking the coordinator once if necessary.
    ///
    /// # Errors
    /// [`NoLeave::Yet`]: ask again. [`FsError::Io`] if only the coordinator could answer, and it is away still at `give_up`.
    pub(super) async fn try_ask(
        self: &Arc<Self>,
        access: Access<'_>,
        give_up: Instant,
    ) -> Result<Guard, NoLeave> {
        let asking = Asking { cluster: self };
        loop {
            if let Some(guard) = self.try_enter(access) {
                return Ok(guard);
            }
            // While a call waits for its turn, it is not at work on a name yet, and its question may become needless.
            let turn = asking.turn_until(give_up).await;
            let asked_at = Instant::now();
            if let Some(guard) = self.try_enter(access) {
                return Ok(guard);
            }
            let directory = access.directory();
            let path = self.namespace.nodes().path_of(directory).ok_or(FsError::Stale)?;
            let intent = asking.intent_of(access);
            // Begins before asking: once the name is promised to this call, the next asker waits until this call is done.
            let name =
                access.name().filter(|_| intent != Intent::Read).map(|name| (directory, name.to_vec()));
            let name = name.map(|name| (name.clone(), self.names.begin(name)));
            let mut guard = Guard::new(self, None, name);
            let asked = match turn {
                // The turn ends with the answer.
                Ok(_turn) => asking.about(&path, access, intent).await,
                Err(away) => Err(Asked::Away(away)),
            };
            match asked {
                Ok(leave) => {
                    self.names.outage_over();
                    if access.changed_directory().is_some() {
                        // The coordinator does not remember that this node knows it by another name.
                        self.names.forget_answers();
                    }
                    let Leave::Directory { seen, .. } = leave else {
                        asking.remember(access, &leave, asked_at);
                        return Ok(guard);
                    };
                    let is_held = self.names.hold(&self.namespace, directory, seen, asked_at);
                    // The answer says that every other node was evicted from the directories below, and has to look a changed one up again.
                    if is_held && access.changed_directory().is_some() && self.names.enter(directory) {
                        guard.held = Some(directory);
                        return Ok(guard);
                    }
                    if !is_held {
                        // The directory was recalled while the answer was on its way, so the answer promises nothing any more.
                        return Err(NoLeave::until(give_up));
                    }
                }
                Err(Asked::Gone) => return Err(NoLeave::Error(FsError::NotFound)),
                Err(Asked::Here(error)) => return Err(NoLeave::Error(error)),
                Err(Asked::OfTwoMoments) => return Err(NoLeave::until(give_up)),
                Err(Asked::Away(away)) => {
                    // A coordinator that waits for another node is not away, nor is one that answers beats while connections break: a
                    // call that went on without its answer might make a file twice.
                    if !matches!(away, Away::Refused(_)) {
                        let begun = self.names.outage_begun(asked_at);
                        let is_away = self.following.is_coordinator() || !self.following.is_reachable();
                        if is_away && begun.elapsed() >= OUTAGE_WAIT && access.goes_on(&self.namespace) {
                            return Ok(guard);
                        }
                    }
                    if Instant::now() >= give_up {
                        let path = String::from_utf8_lossy(&path).into_owned();
                        tracing::error!(%path, error = &away as &dyn std::error::Error, "a name is not known here, and the coordinator cannot be asked");
                    }
                    return Err(NoLeave::until(give_up));
                }
            }
        }
    }

    /// Publishes changes in a directory that other nodes change, too. Waits for a coordinator as a look-up does.
    ///
    /// # Errors
    /// [`FsError::Io`]: no coordinator answered within `MISS_WAIT`. The changes are published later.
    pub async fn publish_ordered(&self) -> Result<(), FsError> {
        let give_up = Instant::now() + MISS_WAIT;
        loop {
            let Err(away) = self.publish().await else { return Ok(()) };
            if Instant::now() >= give_up {
                tracing::error!(
                    error = &away as &dyn std::error::Error,
                    "a change of names is done here, and nobody could be told in time"
                );
                return Err(FsError::Io);
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }

    /// Publishes begun changes, without waiting for a silent coordinator.
    ///
    /// # Errors
    /// The coordinator is away or silent; the changes are published later.
    pub async fn publish_begun(&self) -> Result<(), Away> {
        Asking { cluster: self }.unless_silent(self.publish()).await
    }

    /// Has nodes ask again about what earlier answers allowed: a directory is about to change. Returns false if one did not answer within
    /// [`KNOWN`]: after that it asks by itself.
    pub async fn forget_answers(&self, nodes: &BTreeSet<NodeName>) -> bool {
        if nodes.contains(&self.life.node) {
            self.names.forget_answers();
        }
        let (members, message) = (self.following.members(), ToNode::Forget { epoch: self.following.epoch() });
        let others = members
            .members
            .iter()
            .filter(|member| !member.gone && member.life != self.life && nodes.contains(&member.life.node));
        let addresses: Vec<_> = others.map(address_of).collect();
        let asked = addresses.iter().map(|node| self.ask_node::<()>(node, &message, KNOWN));
        futures::future::join_all(asked).await.iter().all(Result::is_ok)
    }
}

impl Access<'_> {
    /// Whether the call may go on without the coordinator: this node knows the name, or makes it here and publishes it
    /// later.
    fn goes_on(&self, namespace: &Namespace) -> bool {
        match self {
            Self::Look { parent, name } => namespace.standing().has_name(*parent, name),
            Self::Change { sure, .. } => !*sure,
            Self::Attributes { .. } => true,
            Self::Move { .. } | Self::List { .. } => false,
        }
    }

    /// Returns the name in question; none for a whole directory.
    pub(super) fn name(&self) -> Option<&[u8]> {
        match self {
            Self::Look { name, .. }
            | Self::Change { name, .. }
            | Self::Move { name, .. }
            | Self::Attributes { name, .. } => Some(name),
            Self::List { .. } => None,
        }
    }

    /// Returns the name of the directory that the call changes.
    fn changed_directory(&self) -> Option<&[u8]> {
        match self {
            Self::Move { name, .. } | Self::Attributes { name, .. } => Some(name),
            Self::Look { .. } | Self::Change { .. } | Self::List { .. } => None,
        }
    }

    pub(super) fn directory(&self) -> NodeId {
        match self {
            Self::Look { parent, .. }
            | Self::Change { parent, .. }
            | Self::Move { parent, .. }
            | Self::Attributes { parent, .. } => *parent,
            Self::List { directory } => *directory,
        }
    }
}

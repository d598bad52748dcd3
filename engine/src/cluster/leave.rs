//! Leave for a whole call, which may work on several names.
//!
//! Owns: which names and directories a call needs leave for, in which order, and what it publishes before it is answered. Does not own:
//! leave for one name (`names`), the calls themselves (the mount's).

use super::names::{ASK_AGAIN, MISS_WAIT, NoLeave};
use super::{Access, Cluster, Guard, Seat};
use std::sync::Arc;
use tidemark_namespace::{FsError, NodeId};
use tidemark_protocol::path::join;
use tokio::time::Instant;

/// The intended action of a call.
#[derive(Debug)]
pub enum Wanted {
    Look {
        parent: NodeId,
        name: Vec<u8>,
    },
    Change {
        parent: NodeId,
        name: Vec<u8>,
        sure: bool,
    },
    /// Remove a directory, which has to be empty.
    RemoveDirectory {
        parent: NodeId,
        name: Vec<u8>,
    },
    Rename {
        from: (NodeId, Vec<u8>),
        to: (NodeId, Vec<u8>),
    },
    /// Change the bytes of a file.
    Write {
        node: NodeId,
    },
    /// Set attributes of a node, which may be a directory.
    Attributes {
        node: NodeId,
    },
    /// Give a file another name.
    Link {
        node: NodeId,
        to: (NodeId, Vec<u8>),
    },
    List {
        directory: NodeId,
    },
}

/// Permission to continue. Until the leave is dropped, other nodes see nothing of the directories.
#[derive(Debug, Default)]
pub struct Leave {
    guards: Vec<Guard>,
    /// None where no other node is asked about anything.
    cluster: Option<Arc<Cluster>>,
    /// The action that the leave is for; none where no other node is asked.
    wanted: Option<Wanted>,
    /// The directory that the action removes or replaces, and its place.
    ends: Option<(NodeId, (NodeId, Vec<u8>))>,
}

impl Drop for Leave {
    fn drop(&mut self) {
        let (Some(cluster), Some((directory, (parent, name)))) = (&self.cluster, &self.ends) else { return };
        if cluster.namespace.nodes().path_of(*directory).is_some() {
            return;
        }
        // Otherwise those above it would count as unable to move.
        cluster.names.forget(*directory);
        if let Seat::Here(authority) = cluster.following.seat()
            && cluster.namespace.standing().child_directory(*parent, name).is_none()
            && let Some(above) = cluster.namespace.nodes().path_of(*parent)
        {
            authority.removed(&join(&above, name));
        }
    }
}

fn try_guards(cluster: &Arc<Cluster>, wanted: &Wanted) -> Option<Vec<Guard>> {
    let mut guards = match changed(wanted) {
        Some(node) => try_by_name(cluster, node)?,
        None => Vec::new(),
    };
    for access in accesses(cluster, wanted) {
        guards.push(cluster.try_enter(access)?);
    }
    Some(guards)
}

async fn get_guards(cluster: &Arc<Cluster>, wanted: &Wanted) -> Result<Vec<Guard>, FsError> {
    let give_up = Instant::now() + MISS_WAIT;
    loop {
        match ask_for_guards(cluster, wanted, give_up).await {
            Ok(guards) => return Ok(guards),
            Err(NoLeave::Error(error)) => return Err(error),
            // All leave is given back by now: the node in the way may itself wait for this call.
            Err(NoLeave::Yet) => tokio::time::sleep(ASK_AGAIN).await,
        }
    }
}

async fn ask_for_guards(
    cluster: &Arc<Cluster>,
    wanted: &Wanted,
    give_up: Instant,
) -> Result<Vec<Guard>, NoLeave> {
    let mut guards = match changed(wanted) {
        Some(node) => ask_by_name(cluster, node, give_up).await?,
        None => Vec::new(),
    };
    if let Wanted::RemoveDirectory { parent, name } = wanted
        && let Some(directory) = cluster.namespace.standing().child_directory(*parent, name)
    {
        // If the directory stays, no node is evicted from it: cleaning jobs try to remove directories that other nodes use.
        let _known = cluster.try_ask(Access::List { directory }, give_up).await?;
        if !cluster.namespace.standing().is_empty_directory(directory) {
            return Err(NoLeave::Error(FsError::NotEmpty));
        }
    }
    let asked_for = in_order(cluster, wanted);
    for access in &asked_for {
        guards.push(cluster.try_ask(*access, give_up).await?);
    }
    // An answer may have brought a directory where none was known: then its entries are asked for as well.
    if in_order(cluster, wanted) == asked_for { Ok(guards) } else { Err(NoLeave::Yet) }
}

/// Lists the accesses of a call in the order in which all nodes ask, so that two calls do not wait for each other.
fn in_order<'a>(cluster: &Arc<Cluster>, wanted: &'a Wanted) -> Vec<Access<'a>> {
    let mut accesses: Vec<_> = accesses(cluster, wanted).collect();
    if accesses.len() > 1 {
        accesses.sort_by_cached_key(|access| {
            let path = cluster.namespace.nodes().path_of(access.directory()).unwrap_or_default();
            (access.name().is_none(), access.name().map(|name| join(&path, name)))
        });
    }
    accesses
}

/// Returns the node that is itself to be changed, or `None` where a name is.
fn changed(wanted: &Wanted) -> Option<NodeId> {
    match wanted {
        Wanted::Write { node } | Wanted::Attributes { node } | Wanted::Link { node, .. } => Some(*node),
        Wanted::Look { .. }
        | Wanted::Change { .. }
        | Wanted::RemoveDirectory { .. }
        | Wanted::Rename { .. }
        | Wanted::List { .. } => None,
    }
}

fn try_by_name(cluster: &Arc<Cluster>, node: NodeId) -> Option<Vec<Guard>> {
    let names = cluster.namespace.nodes().names_of(node);
    let enter = |(parent, name): &(NodeId, Vec<u8>)| {
        let (access, held) = to_change(cluster, *parent, name);
        Some(held.into_iter().chain([cluster.try_enter(access)?]).collect())
    };
    if names.is_empty() { Some(Vec::new()) } else { names.iter().find_map(enter) }
}

/// Gets leave by a name of the node that still exists. A single such name is enough: the file may have further names here that other nodes
/// removed without this node's knowledge. If none exists, the kernel looks its path up again.
async fn ask_by_name(cluster: &Arc<Cluster>, node: NodeId, give_up: Instant) -> Result<Vec<Guard>, NoLeave> {
    let names = cluster.namespace.nodes().names_of(node);
    for (parent, name) in &names {
        let (access, held) = to_change(cluster, *parent, name);
        match cluster.try_ask(access, give_up).await {
            Ok(guard) if cluster.namespace.nodes().names_of(node).contains(&(*parent, name.clone())) => {
                return Ok(held.into_iter().chain([guard]).collect());
            }
            Ok(_) | Err(NoLeave::Error(FsError::NotFound | FsError::Stale)) => {}
            Err(error) => return Err(error),
        }
    }
    // A node without names belongs only to the processes that have it open.
    if names.is_empty() { Ok(Vec::new()) } else { Err(NoLeave::Error(FsError::Stale)) }
}

/// Chooses the access for changing attributes. A node that has a directory alone sees its attributes without asking, so all other nodes are
/// evicted from it first.
fn to_change<'a>(cluster: &Arc<Cluster>, parent: NodeId, name: &'a [u8]) -> (Access<'a>, Option<Guard>) {
    let change = Access::Change { parent, name, sure: false };
    let Some(directory) = cluster.namespace.standing().child_directory(parent, name) else {
        return (change, None);
    };
    match cluster.try_enter(Access::List { directory }) {
        Some(held) => (Access::Attributes { parent, name }, Some(held)),
        None => (Access::Move { parent, name }, None),
    }
}

/// Returns access to all of a directory, which can be removed or replaced only if it is empty.
fn whole<'a>(cluster: &Arc<Cluster>, parent: NodeId, name: &[u8]) -> Option<Access<'a>> {
    cluster.namespace.standing().child_directory(parent, name).map(|directory| Access::List { directory })
}

/// Lists the other accesses that the call needs leave for, in this order. Runs for each call on names, so it allocates nothing.
fn accesses<'a>(cluster: &Arc<Cluster>, wanted: &'a Wanted) -> impl Iterator<Item = Access<'a>> {
    let accesses = match wanted {
        Wanted::Look { parent, name } => [Some(Access::Look { parent: *parent, name }), None, None],
        Wanted::Change { parent, name, sure } => {
            [Some(Access::Change { parent: *parent, name, sure: *sure }), None, None]
        }
        Wanted::RemoveDirectory { parent, name } => {
            // A node that has the directory, or one below it, alone would not learn that it is gone: all are evicted from it first.
            let moves = Access::Move { parent: *parent, name };
            [Some(moves), whole(cluster, *parent, name), None]
        }
        Wanted::Rename { from, to } => {
            // A node that has a directory alone knows it by itself and not by its path: all are evicted from it first.
            let wanted =
                |parent: NodeId, name| match cluster.namespace.standing().child_directory(parent, name) {
                    Some(_) => Access::Move { parent, name },
                    None => Access::Change { parent, name, sure: true },
                };
            [Some(wanted(from.0, &from.1)), Some(wanted(to.0, &to.1)), whole(cluster, to.0, &to.1)]
        }
        Wanted::List { directory } => [Some(Access::List { directory: *directory }), None, None],
        Wanted::Link { to: (parent, name), .. } => {
            [Some(Access::Change { parent: *parent, name, sure: true }), None, None]
        }
        Wanted::Write { .. } | Wanted::Attributes { .. } => [None, None, None],
    };
    accesses.into_iter().flatten()
}

impl Leave {
    /// Gives leave if that costs no question.
    ///
    /// # Errors
    /// The action, where another node has to be asked.
    pub fn at_once(cluster: &Arc<Cluster>, wanted: Wanted) -> Result<Self, Wanted> {
        match try_guards(cluster, &wanted) {
            Some(guards) => Ok(Self::of(cluster, guards, wanted)),
            None => Err(wanted),
        }
    }

    /// Gives leave, and waits for other nodes up to a limit. [`Leave::wait`] does the same on a thread outside the runtime.
    ///
    /// # Errors
    /// [`FsError::Stale`] if the node to change has other names by now; [`FsError::NotEmpty`] for a directory to remove; the errors of asking.
    pub async fn ask(cluster: &Arc<Cluster>, wanted: Wanted) -> Result<Self, FsError> {
        let guards = get_guards(cluster, &wanted).await?;
        Ok(Self::of(cluster, guards, wanted))
    }

    /// Does as [`Leave::ask`]. Blocks.
    ///
    /// # Errors
    /// As [`Leave::ask`].
    pub fn wait(cluster: &Arc<Cluster>, wanted: Wanted) -> Result<Self, FsError> {
        cluster.runtime.block_on(Self::ask(cluster, wanted))
    }

    fn of(cluster: &Arc<Cluster>, guards: Vec<Guard>, wanted: Wanted) -> Self {
        let ends = match &wanted {
            Wanted::RemoveDirectory { parent, name } => Some((*parent, name.clone())),
            Wanted::Rename { to, .. } => Some(to.clone()),
            _ => None,
        };
        let ends = ends.and_then(|(parent, name)| {
            let directory = cluster.namespace.standing().child_directory(parent, &name)?;
            Some((directory, (parent, name)))
        });
        Self { guards, cluster: Some(Arc::clone(cluster)), wanted: Some(wanted), ends }
    }

    /// Returns whether this node has everything to itself that the leave is for. Getting it again then costs no question, unless another
    /// node asked for it meanwhile.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.guards.iter().all(Guard::is_alone)
    }

    /// Ends the leave before its call is done, and returns the action to ask for again.
    #[must_use]
    pub fn give_back(mut self) -> Option<Wanted> {
        self.wanted.take()
    }

    /// Notes that a directory was made: this node has it to itself.
    pub fn made(&self, directory: NodeId) {
        if let Some(cluster) = &self.cluster {
            cluster.made_directory(directory);
        }
    }

    /// Notes that a name was moved.
    pub fn moved(&self, from: (NodeId, &[u8]), to: (NodeId, &[u8]), exchange: bool) {
        if let Some(cluster) = &self.cluster {
            cluster.moved(from, to, exchange);
        }
    }

    /// Publishes the change in order with other nodes' changes, before the caller gets its answer. Waits where the directory is shared,
    /// also for another coordinator when this one is lost. [`Leave::ordered`] does the same on a thread outside the runtime.
    ///
    /// # Errors
    /// [`FsError::Io`]: the change is made here, and no other node knows it; it is published as soon as a coordinator is there.
    pub async fn order(self) -> Result<(), FsError> {
        match self.shared_with() {
            Some(cluster) => cluster.publish_ordered().await,
            None => Ok(()),
        }
    }

    /// Does as [`Leave::order`]. Blocks where the directory is shared.
    ///
    /// # Errors
    /// As [`Leave::order`].
    pub fn ordered(self) -> Result<(), FsError> {
        match self.shared_with().cloned() {
            Some(cluster) => cluster.runtime.block_on(self.order()),
            None => Ok(()),
        }
    }

    /// Publishes that a change has begun; if no coordinator is there, it is published later. Blocks where the directory is shared.
    pub fn announced(self) {
        if let Some(cluster) = self.shared_with()
            && let Err(away) = cluster.runtime.block_on(cluster.publish_begun())
        {
            let error = &away as &dyn std::error::Error;
            tracing::warn!(error, "what is written here is told to others later");
        }
    }

    /// Returns the cluster to notify; `None` if this node has the directory alone.
    fn shared_with(&self) -> Option<&Arc<Cluster>> {
        self.cluster.as_ref().filter(|_| !self.is_alone())
    }
}

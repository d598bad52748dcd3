//! Leave for calls on names, which may depend on other nodes.
//!
//! Owns: which calls wait for leave, and on which thread. Does not own: asking (the engine's cluster), the calls (`adapter`).
//!
//! A single node asks no other, and neither does a node that has the directory to itself: then the call continues on its thread. Otherwise
//! it moves to a worker, so that a coordinator that is slow or away holds up only the calls that need it.

use crate::cold::Workers;
use crate::shared::Shared;
use std::sync::Arc;
use tidemark_engine::cluster::{Access, Cluster, Guard};
use tidemark_namespace::{FsError, NodeId};

/// The intended action of a call.
#[derive(Debug)]
pub(crate) enum Wanted {
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
pub(crate) struct Leave {
    guards: Vec<Guard>,
    cluster: Option<Arc<Cluster>>,
    /// The action that the leave is for; `None` if no node had to be asked.
    wanted: Option<Wanted>,
}

/// The rest of a call, run once leave is granted or refused.
type Act = Box<dyn FnOnce(&Shared, Result<Leave, FsError>) + Send>;

/// A call that a worker carries out once it has leave.
pub(crate) struct Call {
    /// The action that needs leave; `None` where no leave is needed.
    wanted: Option<Wanted>,
    /// Whether the call found no room: before asking for leave, the worker waits for files that were just removed.
    is_short: bool,
    act: Act,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.wanted.fmt(f)
    }
}

/// Carries out a call once it has leave: here if leave costs no question, otherwise on a worker.
pub(crate) fn pass(
    shared: &Shared,
    workers: &Workers,
    wanted: impl FnOnce() -> Wanted,
    act: impl FnOnce(&Shared, Result<Leave, FsError>) + Send + 'static,
) {
    let Some(cluster) = shared.host.cluster() else { return act(shared, Ok(Leave::default())) };
    let wanted = wanted();
    match try_guards(shared, cluster, &wanted) {
        Some(guards) => act(shared, Ok(Leave::of(cluster, guards, wanted))),
        None => workers.ask(Call { wanted: Some(wanted), is_short: false, act: Box::new(act) }),
    }
}

/// Waits for leave, up to a limit. For workers.
///
/// # Errors
/// [`FsError::Stale`] if the node to change has other names by now; the errors of asking.
pub(crate) fn enter(shared: &Shared, wanted: Wanted) -> Result<Leave, FsError> {
    let Some(cluster) = shared.host.cluster() else { return Ok(Leave::default()) };
    let guards = get_guards(shared, cluster, &wanted)?;
    Ok(Leave::of(cluster, guards, wanted))
}

/// Waits for leave for a call that gave its leave back ([`Leave::give_back`]). The call may find other names than before.
///
/// # Errors
/// As [`enter`].
pub(crate) fn enter_again(shared: &Shared, wanted: Option<Wanted>) -> Result<Leave, FsError> {
    wanted.map_or_else(|| Ok(Leave::default()), |wanted| enter(shared, wanted))
}

impl Call {
    /// Makes a call that found no room. Gives its leave back, since no other node is to wait for memory of this one. The worker gets leave
    /// again when it repeats the call.
    pub(crate) fn short_of_room(
        leave: Leave,
        act: impl FnOnce(&Shared, Result<Leave, FsError>) + Send + 'static,
    ) -> Self {
        Self { wanted: leave.give_back(), is_short: true, act: Box::new(act) }
    }

    /// Carries out the call. For workers.
    pub(crate) fn go(self, shared: &Shared) {
        if self.is_short {
            shared.namespace.room().wait_for_departures();
        }
        (self.act)(shared, enter_again(shared, self.wanted));
    }

    /// Refuses the call, because no worker can do it.
    pub(crate) fn refuse(self, shared: &Shared) {
        (self.act)(shared, Err(FsError::Busy));
    }
}

fn try_guards(shared: &Shared, cluster: &Arc<Cluster>, wanted: &Wanted) -> Option<Vec<Guard>> {
    let mut guards = match changed(wanted) {
        Some(node) => try_by_name(shared, cluster, node)?,
        None => Vec::new(),
    };
    for access in accesses(shared, wanted) {
        guards.push(cluster.try_enter(access)?);
    }
    Some(guards)
}

fn get_guards(shared: &Shared, cluster: &Arc<Cluster>, wanted: &Wanted) -> Result<Vec<Guard>, FsError> {
    let mut guards = match changed(wanted) {
        Some(node) => enter_by_name(shared, cluster, node)?,
        None => Vec::new(),
    };
    if let Wanted::RemoveDirectory { parent, name } = wanted
        && let Some(directory) = shared.namespace.standing().child_directory(*parent, name)
    {
        // If the directory stays, no node is evicted from it: cleaning jobs try to remove directories that other nodes use.
        let _known = cluster.enter(Access::List { directory })?;
        if !shared.namespace.standing().is_empty_directory(directory) {
            return Err(FsError::NotEmpty);
        }
    }
    for access in accesses(shared, wanted) {
        guards.push(cluster.enter(access)?);
    }
    Ok(guards)
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

fn try_by_name(shared: &Shared, cluster: &Arc<Cluster>, node: NodeId) -> Option<Vec<Guard>> {
    let names = shared.namespace.nodes().names_of(node);
    let enter = |(parent, name): &(NodeId, Vec<u8>)| {
        let (access, held) = to_change(shared, cluster, *parent, name);
        Some(held.into_iter().chain([cluster.try_enter(access)?]).collect())
    };
    if names.is_empty() { Some(Vec::new()) } else { names.iter().find_map(enter) }
}

/// Gets leave by a name of the node that still exists. A single such name is enough: the file may have further names here that other nodes
/// removed without this node's knowledge. If none exists, the kernel looks its path up again.
fn enter_by_name(shared: &Shared, cluster: &Arc<Cluster>, node: NodeId) -> Result<Vec<Guard>, FsError> {
    let names = shared.namespace.nodes().names_of(node);
    for (parent, name) in &names {
        let (access, held) = to_change(shared, cluster, *parent, name);
        match cluster.enter(access) {
            Ok(guard) if shared.namespace.nodes().names_of(node).contains(&(*parent, name.clone())) => {
                return Ok(held.into_iter().chain([guard]).collect());
            }
            Ok(_) | Err(FsError::NotFound | FsError::Stale) => {}
            Err(error) => return Err(error),
        }
    }
    // A node without names belongs only to the processes that have it open.
    if names.is_empty() { Ok(Vec::new()) } else { Err(FsError::Stale) }
}

/// Chooses the access for changing attributes. A node that has a directory alone sees its attributes without asking, so all other nodes are
/// evicted from it first.
fn to_change<'a>(
    shared: &Shared,
    cluster: &Arc<Cluster>,
    parent: NodeId,
    name: &'a [u8],
) -> (Access<'a>, Option<Guard>) {
    let change = Access::Change { parent, name, sure: false };
    let Some(directory) = shared.namespace.standing().child_directory(parent, name) else {
        return (change, None);
    };
    match cluster.try_enter(Access::List { directory }) {
        Some(held) => (Access::Attributes { parent, name }, Some(held)),
        None => (Access::Move { parent, name }, None),
    }
}

/// Returns access to all of a directory, which can be removed or replaced only if it is empty.
fn whole<'a>(shared: &Shared, parent: NodeId, name: &[u8]) -> Option<Access<'a>> {
    shared.namespace.standing().child_directory(parent, name).map(|directory| Access::List { directory })
}

/// Lists the other accesses that the call needs leave for, in this order. Runs for each call on names, so it allocates nothing.
fn accesses<'a>(shared: &Shared, wanted: &'a Wanted) -> impl Iterator<Item = Access<'a>> {
    let accesses = match wanted {
        Wanted::Look { parent, name } => [Some(Access::Look { parent: *parent, name }), None, None],
        Wanted::Change { parent, name, sure } => {
            [Some(Access::Change { parent: *parent, name, sure: *sure }), None, None]
        }
        Wanted::RemoveDirectory { parent, name } => {
            // A node that has the directory, or one below it, alone would not learn that it is gone: all are evicted from it first.
            let moves = Access::Move { parent: *parent, name };
            [Some(moves), whole(shared, *parent, name), None]
        }
        Wanted::Rename { from, to } => {
            // A node that has a directory alone knows it by itself and not by its path: all are evicted from it first.
            let wanted =
                |parent: NodeId, name| match shared.namespace.standing().child_directory(parent, name) {
                    Some(_) => Access::Move { parent, name },
                    None => Access::Change { parent, name, sure: true },
                };
            [Some(wanted(from.0, &from.1)), Some(wanted(to.0, &to.1)), whole(shared, to.0, &to.1)]
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
    fn of(cluster: &Arc<Cluster>, guards: Vec<Guard>, wanted: Wanted) -> Self {
        Self { guards, cluster: Some(Arc::clone(cluster)), wanted: Some(wanted) }
    }

    /// Returns whether this node has everything to itself that the leave is for. Getting it again then costs no question, unless another
    /// node asked for it meanwhile.
    pub(crate) fn is_alone(&self) -> bool {
        self.guards.iter().all(Guard::is_alone)
    }

    /// Ends the leave before its call is done, and returns the action to ask for again ([`enter_again`]).
    pub(crate) fn give_back(self) -> Option<Wanted> {
        self.wanted
    }

    /// Notes that a directory was made: this node has it to itself.
    pub(crate) fn made(&self, directory: NodeId) {
        if let Some(cluster) = &self.cluster {
            cluster.made_directory(directory);
        }
    }

    /// Notes that a name was moved.
    pub(crate) fn moved(&self, from: (NodeId, &[u8]), to: (NodeId, &[u8]), exchange: bool) {
        if let Some(cluster) = &self.cluster {
            cluster.moved(from, to, exchange);
        }
    }

    /// Publishes the change in order with other nodes' changes, before the caller gets its answer. Blocks where the directory is shared,
    /// also for another coordinator when this one is lost.
    ///
    /// # Errors
    /// [`FsError::Io`]: the change is made here, and no other node knows it; it is published as soon as a coordinator is there.
    pub(crate) fn ordered(self) -> Result<(), FsError> {
        match self.shared_with() {
            Some(cluster) => cluster.publish_ordered(),
            None => Ok(()),
        }
    }

    /// Publishes that a change has begun; if no coordinator is there, it is published later.
    pub(crate) fn announced(self) {
        if let Some(cluster) = self.shared_with()
            && let Err(away) = cluster.publish_begun()
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

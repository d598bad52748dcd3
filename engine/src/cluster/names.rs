//! Directories that this node holds alone, and asking the coordinator about all others.
//!
//! Owns: the directories that this node holds alone, the calls at work in them, what is done while the coordinator is away.
//! Does not own: who gets a directory (the coordinator), the names themselves (`namespace`).
//!
//! In a directory that it holds alone, a node asks no one. Elsewhere it publishes its changes, asks the coordinator about the one
//! name, applies the answer to its tree, and lets the call go on. A directory is given back only when no call is at work in it:
//! a call's changes are published before another node may look.

use super::{ANSWER_DEADLINE, Away, Cluster};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tidemark_namespace::{FsError, Namespace, NodeId};
use tidemark_protocol::cluster::wire::{
    Answer, BATCH_ITEMS_MAX, Intent, Leave, Look, Looked, NodeState, ToCoordinator,
};
use tidemark_transport::{LinkErrorKind, Refusal};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum number of directories held at a time, about 200 bytes each. Forgetting a directory costs a question.
const HELD_MAX: usize = 65_536;

/// Maximum number of recalled directories that are remembered: far more than answers on their way at a time.
const GIVEN_BACK_MAX: usize = 4096;

/// Longest time that an answer sent before a recall may be on its way: the coordinator's wait for a recall, and some more. An answer
/// after this is meant: the coordinator did not hear that the directory was given back.
const GIVEN_BACK_FOR: Duration = Duration::from_secs(6);

/// Longest wait for a call at work in a directory before the directory is given back: an open for writing may copy the bytes first.
/// No call waits for room meanwhile (`fuse/src/room.rs`).
const WORK_MAX: Duration = Duration::from_secs(35);

/// Longest wait of a call on a name for a coordinator that is away, once an outage.
const OUTAGE_WAIT: Duration = Duration::from_millis(200);

/// Longest wait of a look-up, or of an open whose bytes are elsewhere, for a coordinator that is away or does not know yet. The call
/// then fails. A new coordinator is there within four seconds.
pub(super) const MISS_WAIT: Duration = Duration::from_secs(20);

/// Maximum number of directories below a renamed directory, all held, for which the coordinator is not asked: more than a checkpoint
/// has, and quicker to examine than a question.
const CLEAR_MAX: usize = 64;

/// Maximum number of questions about names on their way: each takes one of a connection's 64 calls, which beats need, too.
const ASKS_MAX: usize = 16;

/// Pause between two tries.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// The use that a call is about to make of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access<'a> {
    /// Reads the meaning of a name.
    Look { parent: NodeId, name: &'a [u8] },
    /// Makes, changes or removes a name. `sure`: another node's file must not be replaced unseen.
    Change { parent: NodeId, name: &'a [u8], sure: bool },
    /// Renames or removes a directory.
    Move { parent: NodeId, name: &'a [u8] },
    /// Lists a directory.
    List { directory: NodeId },
}

/// Leave for one call; the directory is not given back before it is dropped.
#[derive(Debug)]
pub struct Guard {
    cluster: Arc<Cluster>,
    held: Option<NodeId>,
    /// A name of a directory that other nodes change, too.
    name: Option<(NodeId, Vec<u8>)>,
}

impl Guard {
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
        if let Some(name) = self.name.take() {
            self.cluster.names.done(&name);
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Names {
    held: Mutex<Held>,
    left: Condvar,
    /// When the coordinator was first found to be away; none while it answers.
    outage: Mutex<Option<Instant>>,
    turns: Turns,
}

/// Permits for questions to the coordinator.
#[derive(Debug)]
struct Turns(Semaphore);

impl Default for Turns {
    fn default() -> Self {
        Self(Semaphore::new(ASKS_MAX))
    }
}

#[derive(Debug, Default)]
struct Held {
    directories: HashMap<NodeId, Holding>,
    /// Numbers of calls at work on single names of directories that are not held, counted from before they ask.
    at_work: HashMap<(NodeId, Vec<u8>), u32>,
    /// Directories that were recalled: an answer on its way may still say that this node holds them alone.
    given_back: GivenBack,
    /// Number of held directories below each directory.
    above: HashMap<NodeId, u32>,
}

/// The directories that were recalled last, the oldest first.
#[derive(Debug, Default)]
struct GivenBack {
    nodes: HashMap<NodeId, Instant>,
    order: VecDeque<NodeId>,
}

impl GivenBack {
    fn note(&mut self, node: NodeId) {
        if self.nodes.insert(node, Instant::now()).is_some() {
            return;
        }
        self.order.push_back(node);
        if self.order.len() > GIVEN_BACK_MAX
            && let Some(old) = self.order.pop_front()
        {
            self.nodes.remove(&old);
        }
    }

    /// Whether the directory was recalled less than [`GIVEN_BACK_FOR`] ago.
    fn is_recent(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|at| at.elapsed() < GIVEN_BACK_FOR)
    }
}

#[derive(Debug)]
struct Holding {
    at_work: u32,
    /// Whether the directory is being given back: no new call may begin.
    recalled: bool,
    /// The directories above, which cannot move while this one is held.
    above: Vec<NodeId>,
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that this node holds the directory alone. Returns false if it was recalled before the answer came.
    pub(super) fn hold(&self, namespace: &Namespace, node: NodeId) -> bool {
        let mut above = Vec::new();
        let mut at = node;
        while let Ok(parent) = namespace.nodes().parent(at)
            && parent != at
        {
            above.push(parent);
            at = parent;
        }
        let mut held = self.lock();
        if held.given_back.is_recent(node) {
            return false;
        }
        if held.directories.len() >= HELD_MAX
            && let Some(idle) =
                held.directories.iter().find(|(_, holding)| holding.at_work == 0).map(|(node, _)| *node)
        {
            held.forget(idle);
        }
        if held.directories.contains_key(&node) {
            return true;
        }
        for parent in &above {
            *held.above.entry(*parent).or_insert(0) += 1;
        }
        held.directories.insert(node, Holding { at_work: 0, recalled: false, above });
        true
    }

    /// Begins a call in a directory. Returns false if the directory is not held.
    fn enter(&self, node: NodeId) -> bool {
        match self.lock().directories.get_mut(&node) {
            Some(holding) if !holding.recalled => {
                holding.at_work += 1;
                true
            }
            _ => false,
        }
    }

    fn leave(&self, node: NodeId) {
        if let Some(holding) = self.lock().directories.get_mut(&node) {
            holding.at_work = holding.at_work.saturating_sub(1);
        }
        self.left.notify_all();
    }

    fn holds_all(&self, nodes: &[NodeId]) -> bool {
        let held = self.lock();
        nodes.iter().all(|node| held.directories.get(node).is_some_and(|holding| !holding.recalled))
    }

    fn is_at_or_above_held(&self, node: NodeId) -> bool {
        let held = self.lock();
        held.above.contains_key(&node) || held.directories.contains_key(&node)
    }

    /// Lets no new call begin in a directory, and waits up to [`WORK_MAX`] for calls at work.
    pub(super) fn recall(&self, node: NodeId) {
        let until = Instant::now() + WORK_MAX;
        let mut held = self.lock();
        held.given_back.note(node);
        if let Some(holding) = held.directories.get_mut(&node) {
            holding.recalled = true;
        }
        loop {
            let at_work = held.directories.get(&node).is_some_and(|holding| holding.at_work > 0)
                || held.at_work.keys().any(|(directory, _)| *directory == node);
            let left = until.checked_duration_since(Instant::now());
            let (true, Some(left)) = (at_work, left) else { return };
            held = self.left.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records that a call begins to work on a name.
    fn begin(&self, name: (NodeId, Vec<u8>)) {
        *self.lock().at_work.entry(name).or_insert(0) += 1;
    }

    fn done(&self, name: &(NodeId, Vec<u8>)) {
        let mut held = self.lock();
        if let Some(count) = held.at_work.get_mut(name) {
            *count -= 1;
            if *count == 0 {
                held.at_work.remove(name);
            }
        }
        drop(held);
        self.left.notify_all();
    }

    /// Waits up to [`WORK_MAX`] until no call works on a name.
    pub(super) fn settle(&self, name: &(NodeId, Vec<u8>)) {
        let until = Instant::now() + WORK_MAX;
        let mut held = self.lock();
        while held.at_work.contains_key(name)
            && let Some(left) = until.checked_duration_since(Instant::now())
        {
            held = self.left.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records that this node no longer holds the directory alone.
    pub(super) fn forget(&self, node: NodeId) {
        self.lock().forget(node);
    }

    /// Records that this node no longer holds the directory, or any below it, alone.
    pub(super) fn forget_below(&self, node: NodeId) {
        let mut held = self.lock();
        let is_below = |at: &NodeId, holding: &Holding| *at == node || holding.above.contains(&node);
        let below = held.directories.iter().filter(|(at, holding)| is_below(at, holding));
        for at in below.map(|(at, _)| *at).collect::<Vec<_>>() {
            held.forget(at);
        }
    }

    /// Returns the paths of the held directories; of at most [`BATCH_ITEMS_MAX`].
    pub(super) fn alone(&self, namespace: &Namespace) -> Vec<Vec<u8>> {
        let held: Vec<_> = self.lock().directories.keys().copied().take(BATCH_ITEMS_MAX).collect();
        held.into_iter().filter_map(|node| namespace.nodes().path_of(node)).collect()
    }

    /// Forgets all held directories but these, which a new coordinator lets this node hold on.
    pub(super) fn keep_alone(&self, namespace: &Namespace, paths: &[Vec<u8>]) {
        let kept: HashSet<NodeId> = paths.iter().filter_map(|path| namespace.nodes().node_at(path)).collect();
        let mut held = self.lock();
        let lost: Vec<_> = held.directories.keys().filter(|node| !kept.contains(node)).copied().collect();
        for node in lost {
            held.forget(node);
        }
        held.given_back = GivenBack::default();
    }

    /// Returns when the outage began: at `asked`, unless it had begun before.
    fn outage_begun(&self, asked: Instant) -> Instant {
        *self.outage.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(asked)
    }

    pub(super) fn outage_over(&self) {
        *self.outage.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Held {
    fn forget(&mut self, node: NodeId) {
        let Some(holding) = self.directories.remove(&node) else { return };
        for parent in holding.above {
            if let Some(count) = self.above.get_mut(&parent) {
                *count -= 1;
                if *count == 0 {
                    self.above.remove(&parent);
                }
            }
        }
    }
}

impl Cluster {
    /// Gives leave at once, if the coordinator need not be asked.
    #[must_use]
    pub fn try_enter(self: &Arc<Self>, access: Access<'_>) -> Option<Guard> {
        let directory = access.directory();
        if self.is_clear(access) && self.names.enter(directory) {
            return Some(self.guard(Some(directory), None));
        }
        if let Access::Look { parent, name } = access
            && let Some(child) = self.namespace.standing().child_directory(parent, name)
            && self.names.is_at_or_above_held(child)
        {
            // A directory above a held directory cannot move.
            return Some(self.guard(None, None));
        }
        None
    }

    /// Whether no node has to be evicted from a directory that is moved. Another node may hold a directory below one that this node holds.
    fn is_clear(&self, access: Access<'_>) -> bool {
        let Access::Move { parent, name } = access else { return true };
        let Some(child) = self.namespace.standing().child_directory(parent, name) else { return true };
        let below = self.namespace.standing().directories_below(child, CLEAR_MAX);
        below.is_some_and(|below| self.names.holds_all(&below))
    }

    /// Gives leave, after asking the coordinator if necessary. Blocks; not for a thread of the runtime.
    ///
    /// # Errors
    /// [`FsError::Io`] if only the coordinator could answer, and it is away for longer than `MISS_WAIT`.
    pub fn enter(self: &Arc<Self>, access: Access<'_>) -> Result<Guard, FsError> {
        let give_up = Instant::now() + MISS_WAIT;
        loop {
            if let Some(guard) = self.try_enter(access) {
                return Ok(guard);
            }
            // While a call waits for its turn, it is not at work on a name yet, and its question may become needless.
            let turn = self.runtime.block_on(self.turn_until(give_up));
            let asked_at = Instant::now();
            if let Some(guard) = self.try_enter(access) {
                return Ok(guard);
            }
            let directory = access.directory();
            let path = self.namespace.nodes().path_of(directory).ok_or(FsError::Stale)?;
            // Begins before asking: once the name is promised to this call, the next asker waits until this call is done.
            let name = access.changed().map(|name| (directory, name.to_vec()));
            if let Some(name) = &name {
                self.names.begin(name.clone());
            }
            let guard = self.guard(None, name);
            let asked = turn.map_err(Asked::Away).and_then(|_turn| {
                // The turn ends with the answer.
                self.runtime.block_on(self.ask_about(&path, access))
            });
            match asked {
                Ok(alone) => {
                    self.names.outage_over();
                    if !alone {
                        return Ok(guard);
                    }
                    let is_held = self.names.hold(&self.namespace, directory);
                    // The answer says that every other node was evicted from the directories below.
                    if is_held && matches!(access, Access::Move { .. }) && self.names.enter(directory) {
                        return Ok(self.guard(Some(directory), None));
                    }
                    if !is_held {
                        // The directory was recalled while the answer was on its way, so the answer promises nothing any more.
                        drop(guard);
                        if Instant::now() >= give_up {
                            return Err(FsError::Io);
                        }
                        std::thread::sleep(ASK_AGAIN);
                    }
                }
                Err(Asked::Gone) => return Err(FsError::NotFound),
                Err(Asked::Here(error)) => return Err(error),
                Err(Asked::Away(away)) => {
                    // A coordinator that waits for another node is not away: a call that went on without that node's answer might
                    // make a file twice.
                    if !matches!(away, Away::Refused(_)) {
                        let begun = self.names.outage_begun(asked_at);
                        if begun.elapsed() >= OUTAGE_WAIT && self.goes_on(access) {
                            return Ok(guard);
                        }
                    }
                    drop(guard);
                    if Instant::now() >= give_up {
                        let path = String::from_utf8_lossy(&path).into_owned();
                        tracing::error!(%path, error = &away as &dyn std::error::Error, "a name is not known here, and the coordinator cannot be asked");
                        return Err(FsError::Io);
                    }
                    std::thread::sleep(ASK_AGAIN);
                }
            }
        }
    }

    /// Publishes changes in a directory that other nodes change, too. Waits for a coordinator as a look-up does. Blocks; not for a
    /// thread of the runtime.
    ///
    /// # Errors
    /// [`FsError::Io`]: no coordinator answered within `MISS_WAIT`. The changes are published later.
    pub fn publish_ordered(&self) -> Result<(), FsError> {
        let give_up = Instant::now() + MISS_WAIT;
        loop {
            let Err(away) = self.publish_now() else { return Ok(()) };
            if Instant::now() >= give_up {
                tracing::error!(
                    error = &away as &dyn std::error::Error,
                    "a change of names is done here, and nobody could be told in time"
                );
                return Err(FsError::Io);
            }
            std::thread::sleep(ASK_AGAIN);
        }
    }

    /// Publishes begun changes, without waiting for a silent coordinator. Blocks; not for a thread of the runtime.
    ///
    /// # Errors
    /// The coordinator is away or silent; the changes are published later.
    pub fn publish_begun(&self) -> Result<(), Away> {
        self.runtime.block_on(self.unless_silent(self.publish()))
    }

    fn guard(self: &Arc<Self>, held: Option<NodeId>, name: Option<(NodeId, Vec<u8>)>) -> Guard {
        Guard { cluster: Arc::clone(self), held, name }
    }

    /// Whether the call may go on without the coordinator: this node knows the name, or makes it here and publishes it
    /// later.
    fn goes_on(&self, access: Access<'_>) -> bool {
        match access {
            Access::Look { parent, name } => self.namespace.standing().has_name(parent, name),
            Access::Change { sure, .. } => !sure,
            Access::Move { .. } | Access::List { .. } => false,
        }
    }

    /// Asks the coordinator. Returns whether this node holds the directory alone from now on.
    async fn ask_about(&self, path: &[u8], access: Access<'_>) -> Result<bool, Asked> {
        // Publishes first, so that the coordinator's answer covers this node's changes so far. Later changes are not in the answer.
        let asked_at = self.namespace.publications().names_number();
        self.publish_soon().await?;
        if let Access::List { .. } = access {
            let message = ToCoordinator::List { path: path.to_vec() };
            let found: Option<Vec<NodeState>> = known(self.ask_soon(&message).await?)?;
            let found = found.ok_or(Asked::Gone)?;
            if self.is_coordinator() {
                // The answer is from this very tree, which may have changed since.
                return Ok(false);
            }
            self.namespace.mirror().settle_directory(path, &found, asked_at).map_err(Asked::Here)?;
            return Ok(false);
        }
        let (name, intent) = match access {
            Access::Look { name, .. } => (name, Intent::Read),
            Access::Change { name, .. } => (name, Intent::Change),
            Access::Move { name, .. } => (name, Intent::Move),
            Access::List { .. } => unreachable!("answered above"),
        };
        let message = ToCoordinator::Look(Look { directory: path.to_vec(), name: name.to_vec(), intent });
        let looked: Looked = known(self.ask_soon(&message).await?)?;
        if !looked.directory {
            return Err(Asked::Gone);
        }
        if self.is_coordinator() {
            return Ok(matches!(looked.leave, Leave::Directory { .. }));
        }
        if let Leave::Directory { entries } = &looked.leave {
            self.namespace.mirror().settle_directory(path, entries, asked_at).map_err(Asked::Here)?;
            return Ok(true);
        }
        self.namespace
            .mirror()
            .settle_name(path, name, looked.found.as_ref(), asked_at)
            .map_err(Asked::Here)?;
        Ok(false)
    }

    /// Waits for a turn to ask. The calls that have turns may themselves wait for a silent node.
    async fn turn_until(&self, give_up: Instant) -> Result<SemaphorePermit<'_>, Away> {
        let turn = async { self.names.turns.0.acquire().await.map_err(|_| Away::Nobody) };
        let longest = give_up.saturating_duration_since(Instant::now());
        let turn = tokio::time::timeout(longest, self.unless_silent(turn)).await;
        turn.unwrap_or_else(|_| {
            Err(Away::Refused(Refusal::new(
                LinkErrorKind::Unavailable,
                "too many questions about names wait for nodes that do not answer",
            )))
        })
    }

    async fn publish_soon(&self) -> Result<(), Asked> {
        self.unless_silent(self.publish_unkept()).await.map_err(Asked::Away)
    }

    async fn ask_soon<T: serde::de::DeserializeOwned>(&self, message: &ToCoordinator) -> Result<T, Asked> {
        self.unless_silent(self.ask(message, ANSWER_DEADLINE)).await.map_err(Asked::Away)
    }

    /// Waits for an answer as long as the coordinator answers anything.
    async fn unless_silent<T>(&self, answer: impl Future<Output = Result<T, Away>>) -> Result<T, Away> {
        let silence = async {
            tokio::time::sleep(OUTAGE_WAIT).await;
            while self.is_reachable() {
                tokio::time::sleep(ASK_AGAIN).await;
            }
        };
        tokio::select! {
            answer = answer => answer,
            () = silence => Err(Away::Late(OUTAGE_WAIT)),
        }
    }
}

/// The reason for a missing answer.
#[derive(Debug)]
enum Asked {
    /// The directory no longer exists.
    Gone,
    /// The answer could not be applied to this node's tree.
    Here(FsError),
    Away(Away),
}

fn known<T>(answer: Answer<T>) -> Result<T, Asked> {
    match answer {
        Answer::Known(answer) => Ok(answer),
        Answer::NotYet => Err(Asked::Away(Away::New)),
    }
}

impl Access<'_> {
    /// Returns the name that is about to change.
    fn changed(&self) -> Option<&[u8]> {
        match self {
            Self::Change { name, .. } | Self::Move { name, .. } => Some(name),
            Self::Look { .. } | Self::List { .. } => None,
        }
    }

    fn directory(&self) -> NodeId {
        match self {
            Self::Look { parent, .. } | Self::Change { parent, .. } | Self::Move { parent, .. } => *parent,
            Self::List { directory } => *directory,
        }
    }
}

//! The directories that a node may answer for, and questions to the coordinator about the rest, as in the engine's
//! `cluster::names`.
//!
//! Owns: the directories held, the changes under way in them, and what goes on without a coordinator. Does not own:
//! which node gets a directory (`coordinator`), the names (`tree`).

use super::exec::{Signal, within};
use super::network::Refused;
use super::node::{Node, Seat};
use super::tree::join;
use super::world::show;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::{Intent, Leave, Look, Looked, ToCoordinator};
use tidemark_protocol::membership;

/// Longest wait for an answer of a coordinator that shows that it lives.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// Longest wait for calls at work in a directory before the node gives the directory back.
const WORK_MAX: Duration = Duration::from_secs(35);
/// How long names wait for a coordinator that is away, once per outage.
const OUTAGE_WAIT: Duration = Duration::from_millis(200);
/// How long a call that needs the coordinator waits for one.
const MISS_WAIT: Duration = Duration::from_secs(20);
/// How long the answer to a recall may be in flight, longer than the coordinator waits for it.
const RECALL_MAX: Duration = Duration::from_secs(6);
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Intent of a call with a name.
#[derive(Debug, Clone)]
pub(crate) enum Access {
    Look {
        directory: Vec<u8>,
        name: Vec<u8>,
    },
    /// A change of a name. If `sure`, the call must not replace another node's file unseen.
    Change {
        directory: Vec<u8>,
        name: Vec<u8>,
        sure: bool,
    },
    /// A new name for a directory.
    Move {
        directory: Vec<u8>,
        name: Vec<u8>,
    },
}

/// Error of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Errno {
    NotFound,
    Exists,
    /// No node that could know can be asked, or the call may have taken effect.
    Io,
}

/// Why the coordinator did not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Away {
    Nobody,
    Late,
    Refused(Refused),
}

#[derive(Debug, Default)]
pub(crate) struct Names {
    held: RefCell<BTreeMap<u64, Holding>>,
    at_work: RefCell<BTreeMap<(u64, Vec<u8>), u32>>,
    given_back: RefCell<BTreeMap<u64, Duration>>,
    left: Signal,
    outage: Cell<Option<Duration>>,
}

#[derive(Debug, Default)]
struct Holding {
    at_work: u32,
    recalled: bool,
}

/// Leave for one call.
pub(crate) struct Guard {
    node: Rc<Node>,
    held: Option<u64>,
    name: Option<(u64, Vec<u8>)>,
    /// Whether the call goes on without a coordinator, because none could be asked.
    pub(crate) in_outage: bool,
}

impl Guard {
    pub(crate) fn is_alone(&self) -> bool {
        self.held.is_some()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let names = &self.node.names;
        if let Some(directory) = self.held
            && let Some(holding) = names.held.borrow_mut().get_mut(&directory)
        {
            holding.at_work = holding.at_work.saturating_sub(1);
        }
        if let Some(name) = self.name.take() {
            let mut at_work = names.at_work.borrow_mut();
            if let Some(count) = at_work.get_mut(&name) {
                *count -= 1;
                if *count == 0 {
                    at_work.remove(&name);
                }
            }
        }
        names.left.tell();
    }
}

/// Reason why a question has no answer.
enum Asked {
    Gone,
    Away(Away),
}

impl Names {
    /// Holds a directory that the coordinator gave on a question sent at `asked`. Returns false if the directory was recalled
    /// lately, because the answer to the recall may still be in flight.
    pub(crate) fn hold(&self, directory: u64, asked: Duration) -> bool {
        if self.given_back.borrow().get(&directory).is_some_and(|at| asked < *at + RECALL_MAX) {
            return false;
        }
        self.held.borrow_mut().entry(directory).or_default();
        true
    }

    pub(crate) fn forget(&self, directory: u64) {
        self.held.borrow_mut().remove(&directory);
    }

    pub(crate) fn forget_all(&self) {
        self.held.borrow_mut().clear();
        self.given_back.borrow_mut().clear();
    }

    pub(crate) fn outage_over(&self) {
        self.outage.set(None);
    }

    async fn wait(&self, node: &Node, mut busy: impl FnMut() -> bool) {
        let _over = within(&node.world.exec, WORK_MAX, self.left.until(|| (!busy()).then_some(()))).await;
    }

    /// Lets no new call begin in a directory, and waits for those at work.
    pub(crate) async fn recall(&self, node: &Node, directory: u64) {
        self.given_back.borrow_mut().insert(directory, node.world.now());
        if let Some(holding) = self.held.borrow_mut().get_mut(&directory) {
            holding.recalled = true;
        }
        self.wait(node, || {
            self.held.borrow().get(&directory).is_some_and(|holding| holding.at_work > 0)
                || self.at_work.borrow().keys().any(|(at, _)| *at == directory)
        })
        .await;
    }

    /// Waits until no call works on a name.
    pub(crate) async fn settle(&self, node: &Node, name: &(u64, Vec<u8>)) {
        self.wait(node, || self.at_work.borrow().contains_key(name)).await;
    }
}

impl Access {
    fn directory(&self) -> &[u8] {
        match self {
            Self::Look { directory, .. } | Self::Change { directory, .. } | Self::Move { directory, .. } => {
                directory
            }
        }
    }

    fn changed(&self) -> Option<&[u8]> {
        match self {
            Self::Change { name, .. } | Self::Move { name, .. } => Some(name),
            Self::Look { .. } => None,
        }
    }
}

impl Node {
    /// Returns leave at once, if the coordinator need not be asked.
    fn try_enter(self: &Rc<Self>, access: &Access) -> Option<Guard> {
        let tree = self.memory.tree.borrow();
        let directory = tree.directory(access.directory())?;
        if let Some(holding) = self.names.held.borrow_mut().get_mut(&directory)
            && !holding.recalled
        {
            holding.at_work += 1;
            return Some(self.guard(Some(directory), None));
        }
        if let Access::Look { directory, name } = access {
            let path = join(directory, name);
            let held = self.names.held.borrow();
            let leads = held.keys().filter_map(|held| tree.path_of(*held));
            if tree.directory(&path).is_some()
                && leads.into_iter().any(|held| super::tree::is_below(&held, &path))
            {
                return Some(self.guard(None, None));
            }
        }
        None
    }

    /// Returns leave for a call, and asks the coordinator if that is needed.
    pub(crate) async fn enter(self: &Rc<Self>, access: Access) -> Result<Guard, Errno> {
        let give_up = self.world.now() + MISS_WAIT;
        loop {
            if let Some(guard) = self.try_enter(&access) {
                return Ok(guard);
            }
            let directory = self.memory.tree.borrow().directory(access.directory());
            let Some(directory) = directory else { return Err(Errno::NotFound) };
            let name = access.changed().map(|name| (directory, name.to_vec()));
            if let Some(name) = &name {
                *self.names.at_work.borrow_mut().entry(name.clone()).or_insert(0) += 1;
            }
            let mut guard = self.guard(None, name);
            let asked = self.world.now();
            match self.ask_about(&access).await {
                Ok(alone) => {
                    self.names.outage_over();
                    if !alone {
                        return Ok(guard);
                    }
                    drop(guard);
                    if !self.names.hold(directory, asked) {
                        // The node gave the directory back, but the coordinator does not know yet. Such leave is worthless.
                        self.world.count("directory given back before it was had");
                        if self.world.now() >= give_up {
                            return Err(Errno::Io);
                        }
                        self.world.sleep(ASK_AGAIN).await;
                    }
                }
                Err(Asked::Gone) => return Err(Errno::NotFound),
                Err(Asked::Away(away)) => {
                    if !matches!(away, Away::Refused(_)) {
                        let now = self.world.now();
                        let begun = self.names.outage.get().unwrap_or(asked);
                        self.names.outage.set(Some(begun));
                        if now - begun >= OUTAGE_WAIT && self.goes_on(&access) {
                            self.world.count("name without the coordinator");
                            guard.in_outage = true;
                            return Ok(guard);
                        }
                    }
                    drop(guard);
                    if self.world.now() >= give_up {
                        let path = show(access.directory());
                        self.world.note(|| format!("{} gives up on a name in {path}: {away:?}", self.name()));
                        return Err(Errno::Io);
                    }
                    self.world.sleep(ASK_AGAIN).await;
                }
            }
        }
    }

    fn guard(self: &Rc<Self>, held: Option<u64>, name: Option<(u64, Vec<u8>)>) -> Guard {
        Guard { node: Rc::clone(self), held, name, in_outage: false }
    }

    /// Whether the call may go on without the coordinator.
    fn goes_on(&self, access: &Access) -> bool {
        match access {
            Access::Look { directory, name } => {
                self.memory.tree.borrow().names.contains_key(&join(directory, name))
            }
            Access::Change { sure, .. } => !sure,
            Access::Move { .. } => false,
        }
    }

    async fn ask_about(self: &Rc<Self>, access: &Access) -> Result<bool, Asked> {
        let asked_at = self.memory.tree.borrow().number;
        self.unless_silent(self.publish()).await?;
        let directory = access.directory();
        let (name, intent) = match access {
            Access::Look { name, .. } => (name, Intent::Read),
            Access::Change { name, .. } => (name, Intent::Change),
            Access::Move { name, .. } => (name, Intent::Move),
        };
        let look = Look { directory: directory.to_vec(), name: name.clone(), intent };
        let looked: Looked = self.unless_silent(self.ask(ToCoordinator::Look(look), ANSWER_DEADLINE)).await?;
        if !looked.directory {
            return Err(Asked::Gone);
        }
        if self.is_coordinator() {
            return Ok(matches!(looked.leave, Leave::Directory { .. }));
        }
        let mut tree = self.memory.tree.borrow_mut();
        if let Leave::Directory { entries, .. } = &looked.leave {
            tree.settle_directory(directory, entries, asked_at);
            return Ok(true);
        }
        tree.settle_name(&join(directory, name), looked.found.as_ref(), asked_at);
        Ok(false)
    }

    /// Waits for an answer while the coordinator shows that it lives.
    async fn unless_silent<T>(&self, answer: impl Future<Output = Result<T, Away>>) -> Result<T, Asked> {
        let mut answer = std::pin::pin!(answer);
        let begun = self.world.now();
        loop {
            if let Some(answer) = within(&self.world.exec, ASK_AGAIN, answer.as_mut()).await {
                return answer.map_err(Asked::Away);
            }
            if self.world.now() - begun >= OUTAGE_WAIT && !self.is_reachable() {
                return Err(Asked::Away(Away::Late));
            }
        }
    }

    pub(crate) fn is_coordinator(&self) -> bool {
        matches!(*self.seat.borrow(), Seat::Here(_))
    }

    /// Whether the coordinator answered lately.
    pub(crate) fn is_reachable(&self) -> bool {
        if let Seat::Here(catalog) = &*self.seat.borrow() {
            return !catalog.is_closed();
        }
        let view = self.view.borrow();
        matches!(view.coordinator(self.world.now_ms()), membership::Coordinator::Heard { .. })
    }
}

//! The calls of processes on the mount of their node.
//!
//! Owns: the effect of a call that has leave, replies that outlive a daemon, the meaning of a call during which the daemon
//! dies. Does not own: the leave (`names`).

use super::exec::{Owner, Signal, within};
use super::names::{Access, Errno};
use super::node::Node;
use super::tree::{Entry, split};
use super::world::{World, show};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::{WireFate, WriterFact};
use tidemark_protocol::id::{FileId, Incarnation};

/// Longest wait until the coordinator has a change that other nodes must know of.
const ORDERED_WAIT: Duration = Duration::from_secs(20);

#[derive(Debug, Clone)]
pub(crate) enum Call {
    MakeDirectory(Vec<u8>),
    Create { path: Vec<u8>, exclusive: bool },
    Close { file: FileId, cut: bool },
    Rename { from: Vec<u8>, to: Vec<u8> },
    Unlink(Vec<u8>),
    Look(Vec<u8>),
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::MakeDirectory(path) => write!(f, "mkdir {}", show(path)),
            Self::Create { path, exclusive } => write!(f, "create {} exclusive {exclusive}", show(path)),
            Self::Close { file, cut } => write!(f, "close {file} cut {cut}"),
            Self::Rename { from, to } => write!(f, "rename {} {}", show(from), show(to)),
            Self::Unlink(path) => write!(f, "unlink {}", show(path)),
            Self::Look(path) => write!(f, "look {}", show(path)),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Done {
    Nothing,
    /// A file; `in_outage` if it was made or found without a coordinator.
    File {
        file: FileId,
        in_outage: bool,
    },
}

/// A failure as a process sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    Errno(Errno),
    /// The process's node was lost, and the process with it.
    Died,
}

pub(crate) type Told = Result<Done, Errno>;

/// A process, of a job or not.
#[derive(Clone)]
pub(crate) struct Process {
    pub(crate) world: Rc<World>,
    pub(crate) machine: usize,
    pub(crate) life: Incarnation,
    fact: WriterFact,
}

impl Process {
    /// Starts a process on a machine. Returns `None` if the machine has no memory, because its node is lost.
    pub(crate) fn on(
        world: &Rc<World>,
        machine: usize,
        session: &str,
        rank: Option<(u64, u64)>,
    ) -> Option<Self> {
        let life = world.machines[machine].memory.borrow().as_ref()?.life.incarnation;
        let id = world.rng.next();
        let fact = WriterFact {
            session: session.to_owned(),
            process: (u32::try_from(id % 60_000).expect("it is below 60,000"), id),
            environment_seen: rank.is_some(),
            world_size: rank.map(|(_, size)| size),
            rank: rank.map(|(rank, _)| rank),
            fate: WireFate::Alive,
            failed_at_ns: None,
        };
        Some(Self { world: Rc::clone(world), machine, life, fact })
    }

    pub(crate) fn is_alive(&self) -> bool {
        let memory = self.world.machines[self.machine].memory.borrow();
        memory.as_ref().is_some_and(|memory| memory.life.incarnation == self.life)
    }

    /// Makes a call. If the daemon dies during the call, repeats it at the next daemon.
    pub(crate) async fn call(&self, call: Call) -> Result<Done, Failure> {
        let done = self.calls(call.clone()).await;
        if !matches!(call, Call::Look(_)) || done.is_err() {
            self.world.note(|| format!("n{}: {call} -> {done:?}", self.machine));
        }
        done
    }

    async fn calls(&self, call: Call) -> Result<Done, Failure> {
        let id = self.world.rng.next();
        loop {
            if !self.is_alive() {
                return Err(Failure::Died);
            }
            let Some(node) = self.world.daemon(self.machine) else {
                self.world.sleep(Duration::from_millis(20)).await;
                continue;
            };
            let told: Rc<(RefCell<Option<Told>>, Signal)> = Rc::default();
            let (there, call, fact, start) = (Rc::clone(&told), call.clone(), self.fact.clone(), node.start);
            self.world.spawn(Owner::Node(self.machine), async move {
                let answer = node.serve(id, call, fact).await;
                *there.0.borrow_mut() = Some(answer);
                there.1.tell();
            });
            loop {
                let answer = told.1.until(|| told.0.borrow_mut().take());
                if let Some(answer) = within(&self.world.exec, Duration::from_millis(100), answer).await {
                    return answer.map_err(Failure::Errno);
                }
                if self.world.daemon(self.machine).is_none_or(|node| node.start != start) {
                    self.world.count("call asked again of the next daemon");
                    break;
                }
            }
        }
    }

    /// Writes a chunk, which goes past the daemon.
    pub(crate) fn write(&self, file: FileId, content: u64) -> Result<(), Failure> {
        let memory = self.world.machines[self.machine].memory.borrow().clone();
        let memory = memory.filter(|_| self.is_alive()).ok_or(Failure::Died)?;
        memory.tree.borrow_mut().append(file, content);
        Ok(())
    }

    /// Ends the process, as its node learns from the kernel.
    pub(crate) fn ends(&self, fate: WireFate) {
        let memory = self.world.machines[self.machine].memory.borrow().clone();
        if let Some(memory) = memory.filter(|_| self.is_alive()) {
            let at_ns = self.world.wall_ns(self.machine);
            memory.tree.borrow_mut().fates(|fact| {
                let is_it = fact.process == self.fact.process && fact.fate == WireFate::Alive;
                if is_it {
                    fact.fate = fate;
                    fact.failed_at_ns = (fate == WireFate::Killed).then_some(at_ns);
                }
                is_it
            });
        }
    }
}

impl Node {
    async fn serve(self: &Rc<Self>, id: u64, call: Call, writer: WriterFact) -> Told {
        let before = self.memory.replies.borrow().get(&id).copied();
        if let Some(done) = before {
            // An earlier daemon carried out the call without answering. If other nodes must know of the change, it is published now.
            if let Call::Create { exclusive: true, .. } | Call::Rename { .. } | Call::Unlink(_) = call {
                self.ordered().await?;
            }
            return done;
        }
        let replied = |done: Told| {
            let mut replies = self.memory.replies.borrow_mut();
            replies.insert(id, done);
            done
        };
        let access = |path: &[u8], sure: bool| {
            let (directory, name) = split(path);
            Access::Change { directory: directory.to_vec(), name: name.to_vec(), sure }
        };
        let walked = match &call {
            Call::MakeDirectory(path) | Call::Create { path, .. } | Call::Unlink(path) | Call::Look(path) => {
                self.walk(path).await
            }
            Call::Rename { from, to } => match self.walk(from).await {
                Ok(()) => self.walk(to).await,
                Err(errno) => Err(errno),
            },
            Call::Close { .. } => Ok(()),
        };
        walked?;
        match call {
            Call::MakeDirectory(path) => {
                let guard = self.enter(access(&path, false)).await?;
                let made = self.memory.tree.borrow().directory(&path).is_none();
                self.memory.tree.borrow_mut().make_directory(&path);
                // A directory made during an outage may exist at another node too.
                if made && !guard.in_outage {
                    self.made(&path);
                }
                drop(guard);
                replied(Ok(Done::Nothing))
            }
            Call::Create { path, exclusive } => {
                let guard = self.enter(access(&path, exclusive)).await?;
                let here = self.memory.tree.borrow().names.get(&path).copied();
                if exclusive && here.is_some() {
                    return Err(Errno::Exists);
                }
                let now_ns = self.now_ns();
                let file = {
                    let mut tree = self.memory.tree.borrow_mut();
                    match here {
                        Some(Entry::File(file)) if tree.own(file).is_some() => {
                            tree.truncate(file, writer, now_ns);
                            file
                        }
                        _ => tree.create(&path, writer, now_ns),
                    }
                };
                let done = replied(Ok(Done::File { file, in_outage: guard.in_outage }));
                if exclusive && !guard.is_alone() {
                    self.ordered().await?;
                }
                done
            }
            Call::Close { file, cut } => {
                self.memory.tree.borrow_mut().close(file, cut, self.now_ns());
                self.outgoing.tell();
                replied(Ok(Done::Nothing))
            }
            Call::Rename { from, to } => {
                let is_directory = self.memory.tree.borrow().directory(&from).is_some();
                let (directory, name) = split(&from);
                let first = if is_directory {
                    Access::Move { directory: directory.to_vec(), name: name.to_vec() }
                } else {
                    access(&from, true)
                };
                let (one, other) = (self.enter(first).await?, self.enter(access(&to, true)).await?);
                if !self.memory.tree.borrow_mut().rename(&from, &to, self.now_ns()) {
                    return Err(Errno::NotFound);
                }
                if let super::node::Seat::Here(catalog) = &*self.seat.borrow() {
                    catalog.renamed(&from, &to);
                }
                let done = replied(Ok(Done::Nothing));
                if !one.is_alone() || !other.is_alone() {
                    self.ordered().await?;
                }
                done
            }
            Call::Unlink(path) => {
                let guard = self.enter(access(&path, true)).await?;
                if !self.memory.tree.borrow_mut().unlink(&path) {
                    return Err(Errno::NotFound);
                }
                let done = replied(Ok(Done::Nothing));
                if !guard.is_alone() {
                    self.ordered().await?;
                }
                done
            }
            Call::Look(path) => {
                let (directory, name) = split(&path);
                let look = Access::Look { directory: directory.to_vec(), name: name.to_vec() };
                let in_outage = self.enter(look).await?.in_outage;
                match self.memory.tree.borrow().names.get(&path) {
                    Some(Entry::File(file)) => Ok(Done::File { file: *file, in_outage }),
                    Some(Entry::Directory(_)) => Ok(Done::Nothing),
                    None => Err(Errno::NotFound),
                }
            }
        }
    }

    /// Looks up each directory of the path, as a kernel that caches no names does.
    async fn walk(self: &Rc<Self>, path: &[u8]) -> Result<(), Errno> {
        let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        for at in slashes {
            let (directory, name) = split(&path[..at]);
            let look = Access::Look { directory: directory.to_vec(), name: name.to_vec() };
            let _guard = self.enter(look).await?;
            if self.memory.tree.borrow().directory(&path[..at]).is_none() {
                return Err(Errno::NotFound);
            }
        }
        Ok(())
    }

    /// Publishes this node's changes before the caller gets its answer. If that fails for too long, returns EIO, because
    /// the result is uncertain.
    async fn ordered(self: &Rc<Self>) -> Result<(), Errno> {
        let until = self.world.now() + ORDERED_WAIT;
        while self.publish().await.is_err() {
            if self.world.now() >= until {
                return Err(Errno::Io);
            }
            self.world.sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Gives this node the directory it made, unless the coordinator's tree shows that directory to other nodes already.
    fn made(&self, path: &[u8]) {
        if let super::node::Seat::Here(catalog) = &*self.seat.borrow()
            && !catalog.made(path)
        {
            return;
        }
        let directory = self.memory.tree.borrow().directory(path);
        if let Some(directory) = directory {
            self.names.hold(directory, self.world.now());
        }
    }
}

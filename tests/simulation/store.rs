//! Tier-3 and the lease, as services that answer late, twice or not at all.
//!
//! Owns: conditional creates, reads, lists and deletes with doubtful answers; a lease of 2 s with the member list beside it, whose
//! create revision is the epoch. Does not own: what is written, and when.
//!
//! A request that was sent takes effect at a moment of its own, whether its sender lives by then or not.

use super::exec::{Owner, Signal, within};
use super::network::{LEASE, TIER3, transit};
use super::node::Node;
use super::world::World;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use tidemark_protocol::id::Epoch;
use tidemark_protocol::membership::MemberList;

/// How long the lease lasts without a renewal.
pub(crate) const TERM: Duration = Duration::from_secs(2);

/// Limit of the wait for an answer of Tier-3.
const DEADLINE: Duration = Duration::from_secs(8);

/// Time that an object store takes for a chunk of 8 MiB.
const CHUNK_TIME: Duration = Duration::from_millis(25);

/// Object under a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Object {
    Document(Vec<u8>),
    /// A file's bytes: the content of each chunk.
    Data {
        chunks: Vec<u64>,
        size_bytes: u64,
    },
}

#[derive(Debug, Clone)]
enum Request {
    Create { key: String, object: Object },
    Get { key: String },
    List { prefix: String },
}

#[derive(Debug, Clone)]
enum Reply {
    Created(bool),
    Got(Option<Object>),
    Listed(Vec<String>),
}

/// Error: whether the request took effect cannot be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Doubt;

#[derive(Debug, Default)]
pub(crate) struct Store {
    pub(crate) objects: RefCell<BTreeMap<String, Object>>,
    pub(crate) away: Cell<bool>,
    /// Number of requests in a thousand whose answer is lost or whose effect is late.
    pub(crate) ambiguous: Cell<u64>,
    /// Factor by which Tier-3 is slower than usual.
    pub(crate) slower: Cell<u32>,
}

async fn request(node: &Rc<Node>, epoch: Epoch, request: Request) -> Result<Reply, Doubt> {
    let world = Rc::clone(&node.world);
    let answer: Rc<(RefCell<Option<Reply>>, Signal)> = Rc::default();
    let (from, life) = (node.machine, node.memory.life.incarnation);
    let there = (!world.store.away.get()).then(|| transit(&world, from, TIER3)).flatten();
    if let Some(there) = there {
        let (at, answer) = (Rc::clone(&world), Rc::clone(&answer));
        world.spawn(Owner::World, async move {
            let mut delay = there;
            if let Request::Create { object: Object::Data { chunks, .. }, .. } = &request {
                delay += CHUNK_TIME * u32::try_from(chunks.len()).expect("files are small here");
            }
            delay *= at.store.slower.get().max(1);
            if at.rng.permille(at.store.ambiguous.get()) {
                // Late means seconds after the sender has stopped waiting.
                at.count("request to Tier-3 takes effect late");
                delay += at.rng.between(DEADLINE, 2 * DEADLINE);
            }
            at.sleep(delay).await;
            let reply = at.store.apply(&at, epoch, life, request);
            if at.rng.permille(at.store.ambiguous.get()) {
                at.count("answer of Tier-3 lost");
                return;
            }
            if let Some(back) = transit(&at, TIER3, from) {
                at.sleep(back).await;
                *answer.0.borrow_mut() = Some(reply);
                answer.1.tell();
            }
        });
    }
    within(&world.exec, DEADLINE, answer.1.until(|| answer.0.borrow_mut().take())).await.ok_or(Doubt)
}

impl Store {
    fn apply(
        &self,
        world: &World,
        epoch: Epoch,
        life: tidemark_protocol::id::Incarnation,
        request: Request,
    ) -> Reply {
        match request {
            Request::Create { key, object } => {
                let mut objects = self.objects.borrow_mut();
                if objects.contains_key(&key) {
                    return Reply::Created(false);
                }
                objects.insert(key.clone(), object);
                drop(objects);
                world.note(|| format!("Tier-3: {key} is there, epoch {epoch}"));
                world.truth.borrow_mut().created(world, &key, epoch, life);
                Reply::Created(true)
            }
            Request::Get { key } => Reply::Got(self.objects.borrow().get(&key).cloned()),
            Request::List { prefix } => {
                let objects = self.objects.borrow();
                let from = objects.range(prefix.clone()..);
                Reply::Listed(
                    from.take_while(|(key, _)| key.starts_with(&prefix))
                        .map(|(key, _)| key.clone())
                        .collect(),
                )
            }
        }
    }

    /// Creates an object. False: the key exists.
    pub(crate) async fn create(
        node: &Rc<Node>,
        epoch: Epoch,
        key: String,
        object: Object,
    ) -> Result<bool, Doubt> {
        match request(node, epoch, Request::Create { key, object }).await? {
            Reply::Created(created) => Ok(created),
            _ => Err(Doubt),
        }
    }

    pub(crate) async fn get(node: &Rc<Node>, key: String) -> Result<Option<Object>, Doubt> {
        match request(node, Epoch(0), Request::Get { key }).await? {
            Reply::Got(found) => Ok(found),
            _ => Err(Doubt),
        }
    }

    pub(crate) async fn list(node: &Rc<Node>, prefix: String) -> Result<Vec<String>, Doubt> {
        match request(node, Epoch(0), Request::List { prefix }).await? {
            Reply::Listed(keys) => Ok(keys),
            _ => Err(Doubt),
        }
    }
}

/// Holder of the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) machine: usize,
    pub(crate) epoch: Epoch,
}

#[derive(Debug, Default)]
struct LeaseState {
    revision: u64,
    holder: Option<(Holder, Duration)>,
    members: MemberList,
}

/// The service that grants the lease.
#[derive(Debug, Default)]
pub(crate) struct LeaseService(RefCell<LeaseState>);

/// A request to the lease service.
#[derive(Debug, Clone)]
pub(crate) enum LeaseAsk {
    /// Take the lease, if no machine has it.
    Take,
    /// Keep the lease.
    Renew(Epoch),
    /// Read the holder.
    See,
    /// Write the member list, if the caller is the holder.
    Keep(Epoch, MemberList),
}

/// The lease service's answer: the holder, and the members.
#[derive(Debug, Clone)]
pub(crate) struct LeaseSays {
    pub(crate) holder: Option<Holder>,
    /// Whether the request was carried out.
    pub(crate) done: bool,
    pub(crate) members: MemberList,
}

impl LeaseService {
    fn apply(&self, from: usize, now: Duration, ask: LeaseAsk) -> LeaseSays {
        let mut state = self.0.borrow_mut();
        if state.holder.is_some_and(|(_, until)| now >= until) {
            (state.holder, state.revision) = (None, state.revision + 1);
        }
        let current = state.holder.map(|(holder, _)| holder);
        let done = match ask {
            LeaseAsk::See => true,
            LeaseAsk::Take if current.is_none() => {
                state.revision += 1;
                let holder = Holder { machine: from, epoch: Epoch(state.revision) };
                state.holder = Some((holder, now + TERM));
                true
            }
            LeaseAsk::Take => false,
            LeaseAsk::Renew(epoch) => {
                let ours = Some(Holder { machine: from, epoch }) == current;
                if let (true, Some((_, until))) = (ours, &mut state.holder) {
                    *until = now + TERM;
                }
                ours
            }
            LeaseAsk::Keep(epoch, members) => {
                let ours = Some(Holder { machine: from, epoch }) == current;
                if ours {
                    state.members = members;
                    state.revision += 1;
                }
                ours
            }
        };
        LeaseSays { holder: state.holder.map(|(holder, _)| holder), done, members: state.members.clone() }
    }

    /// Returns the holder, for code outside the simulated cluster.
    pub(crate) fn holder(&self, now: Duration) -> Option<Holder> {
        self.apply(usize::MAX, now, LeaseAsk::See).holder
    }
}

/// Asks the lease service. `None`: the result is not known.
pub(crate) async fn ask_lease(node: &Rc<Node>, ask: LeaseAsk, most: Duration) -> Option<LeaseSays> {
    let world = Rc::clone(&node.world);
    let from = node.machine;
    let answer: Rc<(RefCell<Option<LeaseSays>>, Signal)> = Rc::default();
    if let Some(there) = transit(&world, from, LEASE) {
        let (at, answer) = (Rc::clone(&world), Rc::clone(&answer));
        world.spawn(Owner::World, async move {
            at.sleep(there).await;
            let says = at.lease.apply(from, at.now(), ask);
            if let Some(back) = transit(&at, LEASE, from) {
                at.sleep(back).await;
                *answer.0.borrow_mut() = Some(says);
                answer.1.tell();
            }
        });
    }
    within(&world.exec, most, answer.1.until(|| answer.0.borrow_mut().take())).await
}

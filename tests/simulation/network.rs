//! The network between the nodes, to the lease and to Tier-3.
//!
//! Owns: which messages are lost, late, doubled or out of order, which machines are cut from each other, calls and datagrams.
//! Does not own: the content of messages.
//!
//! Any message may overtake any other, because no connection promises an order here.

use super::exec::{Owner, Signal, within};
use super::node::Node;
use super::world::World;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;
use tidemark_protocol::id::StartId;
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::membership;

/// The machine that has the lease.
pub(crate) const LEASE: usize = 1000;
/// The machines of the object store.
pub(crate) const TIER3: usize = 1001;

const QUICK: Duration = Duration::from_micros(100);
const USUAL: Duration = Duration::from_millis(2);
const SLOW: Duration = Duration::from_millis(900);

/// Numbers of messages in a thousand that suffer each fault.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Weather {
    pub(crate) lost: u64,
    pub(crate) doubled: u64,
    pub(crate) slow: u64,
}

/// Sender of a message.
#[derive(Debug, Clone)]
pub(crate) struct From {
    pub(crate) machine: usize,
    pub(crate) life: NodeLife,
    pub(crate) start: StartId,
}

/// A request to a node.
#[derive(Debug, Clone)]
pub(crate) enum Letter {
    /// `cluster::wire::ToCoordinator`.
    Coordinator(Vec<u8>),
    /// `cluster::wire::ToNode`.
    Node(Vec<u8>),
    /// `replication::Request`.
    Replication(Vec<u8>),
    /// Bytes to write under a token: chunks with their content.
    Push { token: [u8; 16], chunks: Vec<(u64, u64)> },
    /// A read of a file's bytes by a token.
    Read { token: [u8; 16] },
}

/// Reason of a refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The sender of the question or command was replaced.
    Fenced(String),
    /// The sender shall ask again.
    Unavailable(String),
}

/// A message without an answer.
#[derive(Debug, Clone)]
pub(crate) enum Datagram {
    Beat(membership::Beat),
    Echo(membership::Echo),
    Ask(membership::Ask),
    Heard(membership::Heard),
    Refused(membership::Refusal),
    /// A neighbour's question on the coordinator's behalf whether the node lives. `Here` is the answer.
    Probe,
    Here,
}

pub(crate) type Answer = Result<Vec<u8>, Refused>;

/// The answer, once it has come.
#[derive(Debug, Default)]
struct Waiting {
    answer: RefCell<Option<Answer>>,
    came: Signal,
}

#[derive(Debug)]
pub(crate) struct Network {
    /// Pairs of a sender and a receiver that no message connects.
    cuts: RefCell<BTreeSet<(usize, usize)>>,
    pub(crate) weather: Cell<Weather>,
}

impl Network {
    pub(crate) fn new() -> Self {
        Self { cuts: RefCell::default(), weather: Cell::default() }
    }

    pub(crate) fn cut(&self, from: usize, to: usize) {
        self.cuts.borrow_mut().insert((from, to));
    }

    pub(crate) fn heal(&self, from: usize, to: usize) {
        self.cuts.borrow_mut().remove(&(from, to));
    }

    pub(crate) fn heal_all(&self) {
        self.cuts.borrow_mut().clear();
    }

    pub(crate) fn is_cut(&self, from: usize, to: usize) -> bool {
        from != to && self.cuts.borrow().contains(&(from, to))
    }
}

/// Draws how long a message takes. Returns `None` if it is lost.
pub(crate) fn transit(world: &World, from: usize, to: usize) -> Option<Duration> {
    let weather = world.network.weather.get();
    if world.network.is_cut(from, to) {
        world.count("message cut off");
        return None;
    }
    if from != to && world.rng.permille(weather.lost) {
        world.count("message lost");
        return None;
    }
    if from != to && world.rng.permille(weather.slow) {
        world.count("message late");
        return Some(world.rng.between(USUAL, SLOW));
    }
    Some(world.rng.between(QUICK, USUAL))
}

fn copies(world: &World) -> u32 {
    if world.rng.permille(world.network.weather.get().doubled) {
        world.count("message doubled");
        return 2;
    }
    1
}

/// Carries a message one way, and then runs `arrived` at its destination.
fn carry(world: &Rc<World>, from: usize, to: usize, arrived: impl FnOnce(&Rc<World>) + 'static) {
    let Some(delay) = transit(world, from, to) else { return };
    let there = Rc::clone(world);
    world.spawn(Owner::World, async move {
        there.sleep(delay).await;
        if !there.network.is_cut(from, to) {
            arrived(&there);
        }
    });
}

/// Asks, and waits for the answer. Returns `None` if none comes in time; the request may have arrived.
pub(crate) async fn call(node: &Rc<Node>, to: usize, letter: Letter, most: Duration) -> Option<Answer> {
    let world = Rc::clone(&node.world);
    let from = node.from();
    let waiting = Rc::new(Waiting::default());
    let here = from.machine;
    // A join is not doubled: a connection carries calls once, and no node joins twice at once. A caller may repeat other calls.
    let is_join = matches!(&letter, Letter::Coordinator(bytes) if bytes.get(1) == Some(&0));
    let times = if is_join { 1 } else { copies(&world) };
    for _ in 0..times {
        let (waiting, letter, from) = (Rc::clone(&waiting), letter.clone(), from.clone());
        carry(&world, here, to, move |world| {
            let Some(there) = world.daemon(to) else { return };
            let world = Rc::clone(world);
            there.world.clone().spawn(Owner::Node(to), async move {
                let answer = there.answer(from, letter).await;
                carry(&world, to, here, move |_| {
                    waiting.answer.borrow_mut().get_or_insert(answer);
                    waiting.came.tell();
                });
            });
        });
    }
    let answer = waiting.came.until(|| waiting.answer.borrow_mut().take());
    within(&world.exec, most, answer).await
}

/// Sends a datagram, which may be lost.
pub(crate) fn tell(node: &Rc<Node>, to: usize, datagram: Datagram) {
    let world = Rc::clone(&node.world);
    let from = node.from();
    for _ in 0..copies(&world) {
        let (datagram, from) = (datagram.clone(), from.clone());
        carry(&world, from.machine, to, move |world| {
            let Some(there) = world.daemon(to) else { return };
            world.spawn(Owner::Node(to), async move { there.told(&from, datagram) });
        });
    }
}

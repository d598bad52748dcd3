//! A cluster in one value: the store, coordinators, nodes, and the messages between them.
//!
//! Owns: the parts, and the messages between them. Does not own: clients (`clients`), the list of actions (`actions`), what is right
//! (`ghost`), the search.

mod actions;
mod clients;
mod terms;

pub(crate) use terms::{Action, At, Bounds, Dir, Op, Trouble};

use crate::ghost::{Ghost, Verdict};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;
use tidemark_meta::coordinator::{Command, Coordinator, Event};
use tidemark_meta::key::Key;
use tidemark_meta::message::{Stamp, ToCoordinator, ToNode};
use tidemark_meta::node::{Node, Notice};
use tidemark_meta::store::{Fault, Memory, Store};
use tidemark_meta::value::{Published, Value, empty_tree};
use tidemark_protocol::id::{Epoch, FileId, Incarnation, NodeName};
use tidemark_protocol::key::NodeLife;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Link {
    Up,
    Cut,
    Dead,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Site {
    node: Arc<Node>,
    lives: Vec<Incarnation>,
    link: Link,
    follows: usize,
    /// The number of times that parked calls were queued again, which is bounded, as call numbers are.
    retries: u8,
    /// Calls and look-ups that clients wait for.
    blocked: Vec<u64>,
    /// Files that clients opened for writing.
    open: Vec<FileId>,
    /// Files that are open once the ticket is answered.
    opening: Vec<(u64, FileId)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Body {
    Up(ToCoordinator),
    Down(ToNode),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Packet {
    node: usize,
    coordinator: usize,
    stamp: Stamp,
    body: Body,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    store: Memory,
    coordinators: Vec<Arc<Coordinator>>,
    sites: Vec<Site>,
    net: Vec<(u64, Arc<Packet>)>,
    ghost: Arc<Ghost>,
    seen: BTreeMap<NodeName, (Incarnation, u64)>,
    operations: u8,
    faults: u8,
    /// Clients on a node that may wait at a time.
    clients: usize,
    truncated: bool,
    /// Whether the store went back: its content is no longer judged, only the answers about it.
    restored: bool,
    next_life: u64,
    bad: Option<String>,
}

fn name_of(index: usize) -> NodeName {
    format!("n{index}").parse().unwrap()
}

fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl World {
    /// Makes a cluster at rest after the prelude, with a standby whose copy is from then.
    pub(crate) fn new(bounds: &Bounds) -> Self {
        let coordinator = |index: u64| {
            let life = NodeLife {
                node: format!("c{index}").parse().unwrap(),
                incarnation: Incarnation(1000 + index),
            };
            Arc::new(Coordinator::new(life, "host:1".into(), Epoch(0), bounds.rules))
        };
        let mut world = Self {
            store: Memory::new(empty_tree(1)),
            coordinators: (0..2).map(coordinator).collect(),
            sites: vec![],
            net: vec![],
            ghost: Arc::new(Ghost::new()),
            seen: BTreeMap::new(),
            operations: 0,
            faults: 0,
            clients: bounds.clients,
            truncated: false,
            restored: false,
            next_life: 1,
            bad: None,
        };
        world.event(0, Event::TakeOver);
        for _ in 0..bounds.nodes {
            let life = world.new_life();
            let node = Arc::new(Node::new(life, None, bounds.rules));
            let (link, follows, retries, blocked, open) = (Link::Up, 0, 0, vec![], vec![]);
            let lives = vec![life];
            world.sites.push(Site { node, lives, link, follows, retries, blocked, open, opening: vec![] });
        }
        world.settle();
        for (node, op) in &bounds.prelude {
            world.client(*node, *op);
            world.settle();
        }
        world.event(1, Event::Tick);
        for action in &bounds.beginning {
            assert!(world.act(action), "{action:?} comes to nothing");
        }
        world.operations = 0;
        assert_eq!(world.bad, None, "the beginning");
        world
    }

    pub(crate) fn bad(&self) -> Option<&str> {
        self.bad.as_deref()
    }

    pub(crate) fn fingerprint(&self) -> u64 {
        hash_of(self)
    }

    pub(super) fn new_life(&mut self) -> Incarnation {
        self.next_life += 1;
        Incarnation(self.next_life)
    }

    /// Delivers everything, in order, until nothing moves.
    pub(crate) fn settle(&mut self) {
        for _ in 0..1000 {
            let sender = (0..self.sites.len())
                .find(|at| self.sites[*at].node.has_to_send() && self.sites[*at].link == Link::Up);
            if let Some(at) = sender {
                self.send(at);
            } else if let Some(at) =
                self.net.iter().position(|(_, packet)| self.sites[packet.node].link == Link::Up)
            {
                self.deliver(at, None);
            } else {
                return;
            }
        }
        self.fail(Err("the cluster does not come to rest".into()));
    }

    pub(super) fn fail(&mut self, verdict: Verdict) {
        if let Err(why) = verdict
            && self.bad.is_none()
        {
            self.bad = Some(why);
        }
    }

    pub(super) fn ghost(&mut self) -> &mut Ghost {
        Arc::make_mut(&mut self.ghost)
    }

    // ---- the coordinators ----

    pub(super) fn event(&mut self, at: usize, event: Event) {
        self.event_at(at, Duration::ZERO, event);
    }

    pub(super) fn event_at(&mut self, at: usize, now: Duration, event: Event) {
        let mut commands = Arc::make_mut(&mut self.coordinators[at]).step(now, event);
        while !commands.is_empty() {
            match commands.remove(0) {
                Command::Store(lane, request) => {
                    let response = self.store.serve(&request);
                    self.stored();
                    let event = Event::Stored(lane, response);
                    commands.extend(Arc::make_mut(&mut self.coordinators[at]).step(now, event));
                }
                Command::Send { to, stamp, message } => {
                    let node = (0..self.sites.len()).find(|node| name_of(*node) == to);
                    if let Some(node) = node.filter(|node| self.sites[*node].link != Link::Dead) {
                        self.post(Packet { node, coordinator: at, stamp, body: Body::Down(message) });
                    }
                }
                Command::Stop(why) => self.fail(Err(format!("a coordinator stopped: {why}"))),
            }
        }
        let followed = self.coordinators.iter().filter_map(|coordinator| coordinator.revision()).min();
        if let Some(followed) = followed {
            self.store.compact(followed);
        }
    }

    /// Examines the changes that the store has taken since the last call.
    pub(super) fn stored(&mut self) {
        self.store.inject(None);
        if self.restored {
            return;
        }
        let mut news = vec![];
        for (key, value) in self.store.entries() {
            if let (Key::Publication(node), Value::Published(published)) = (key, value) {
                let (life, number) = self.seen.get(node).copied().unwrap_or((published.life, 0));
                if published.life == life && published.number > number {
                    news.push((node.clone(), published.clone(), number));
                } else if published.life != life {
                    news.push((node.clone(), published.clone(), 0));
                }
            }
        }
        for (node, published, _) in &news {
            self.seen.insert(node.clone(), (published.life, published.number));
        }
        match self.in_some_order(&self.ghost, &news) {
            Ok(ghost) => self.ghost = Arc::new(ghost),
            Err(why) => self.fail(Err(why)),
        }
    }

    /// Returns the observer after one transaction. A transaction does not show the order of its nodes: some order has to be right.
    fn in_some_order(&self, ghost: &Ghost, news: &[(NodeName, Published, u64)]) -> Result<Ghost, String> {
        if news.is_empty() {
            let mut ghost = ghost.clone();
            ghost.members(&self.store);
            return ghost.agrees(&self.store).map(|()| ghost);
        }
        let mut why = None;
        for at in 0..news.len() {
            let mut rest = news.to_vec();
            let (node, published, before) = rest.remove(at);
            let mut next = ghost.clone();
            match self
                .taken(&mut next, &node, &published, before)
                .and_then(|()| self.in_some_order(&next, &rest))
            {
                Ok(ghost) => return Ok(ghost),
                Err(wrong) => why = why.or(Some(wrong)),
            }
        }
        Err(why.unwrap_or_default())
    }

    fn taken(&self, ghost: &mut Ghost, node: &NodeName, published: &Published, before: u64) -> Verdict {
        let at = (0..self.sites.len()).find(|at| name_of(*at) == *node).unwrap();
        let site = &self.sites[at];
        for number in before + 1..=published.number {
            let queued = site.node.queue().find(|queued| queued.number == number);
            let Some(queued) = queued.filter(|_| site.node.life() == published.life) else {
                return Err("a call was taken that its node does not wait for".into());
            };
            if !ghost.is_living(published.life) && site.lives.first() == Some(&published.life) {
                return Err("a call of a life that is over was taken".into());
            }
            let refused =
                published.refused.iter().find(|(refused, _)| *refused == number).map(|(_, why)| *why);
            let origin = queued.ticket.is_none().then_some(queued.origin);
            ghost.taken(origin, published.life, &queued.call, refused)?;
        }
        Ok(())
    }

    // ---- the network ----

    fn post(&mut self, packet: Packet) {
        let hash = hash_of(&packet);
        // A message that is there already is one that may come twice, which is a separate fault.
        if let Err(at) = self.net.binary_search_by_key(&hash, |(hash, _)| *hash) {
            self.net.insert(at, (hash, Arc::new(packet)));
        }
    }

    pub(super) fn send(&mut self, at: usize) {
        let site = &mut self.sites[at];
        let node = Arc::make_mut(&mut site.node);
        let (stamp, messages, coordinator) = (node.stamp(), node.send(), site.follows);
        for message in messages {
            self.post(Packet { node: at, coordinator, stamp, body: Body::Up(message) });
        }
    }

    pub(super) fn deliver(&mut self, at: usize, trouble: Option<Trouble>) {
        let packet = match trouble {
            Some(Trouble::Repeat) => Arc::clone(&self.net[at].1),
            _ => self.net.remove(at).1,
        };
        match trouble {
            Some(Trouble::Lose) => return,
            Some(Trouble::AnswerLost) => self.store.inject(Some(Fault::AnswerLost)),
            Some(Trouble::Delayed) => self.store.inject(Some(Fault::Delayed)),
            _ => {}
        }
        match &packet.body {
            Body::Up(message) => {
                let (from, stamp, message) = (name_of(packet.node), packet.stamp, message.clone());
                self.event(packet.coordinator, Event::Message { from, stamp, message });
            }
            Body::Down(message) => {
                let site = &mut self.sites[packet.node];
                let node = Arc::make_mut(&mut site.node);
                let output = node.step(packet.stamp, message.clone());
                if node.stamp().epoch == packet.stamp.epoch {
                    site.follows = packet.coordinator;
                }
                let (stamp, coordinator) = (node.stamp(), site.follows);
                for message in output.messages {
                    self.post(Packet { node: packet.node, coordinator, stamp, body: Body::Up(message) });
                }
                self.notices(packet.node, output.notices);
            }
        }
        self.store.inject(None);
    }

    pub(super) fn notices(&mut self, at: usize, notices: Vec<Notice>) {
        for notice in notices {
            let life = self.sites[at].node.life();
            match notice {
                Notice::Answered(ticket, result) => {
                    let site = &mut self.sites[at];
                    site.blocked.retain(|blocked| *blocked != ticket.0);
                    if let Some(opening) = site.opening.iter().position(|(opening, _)| *opening == ticket.0) {
                        let (_, id) = site.opening.remove(opening);
                        if result.is_ok() {
                            site.open.push(id);
                        }
                    }
                }
                Notice::Opened(ticket, origin) => {
                    let site = &mut self.sites[at];
                    site.blocked.retain(|blocked| *blocked != ticket.0);
                    if let Some((opening, id)) =
                        site.opening.iter().find(|(opening, _)| *opening == ticket.0).copied()
                    {
                        site.opening.retain(|(other, _)| *other != opening);
                        site.open.push(id);
                    }
                    let queued =
                        origin.and_then(|origin| site.node.queue().find(|queued| queued.origin == origin));
                    if let Some(queued) = queued.cloned() {
                        let verdict = self.ghost().acked(queued.origin, &queued.call);
                        self.fail(verdict);
                    }
                }
                Notice::Looked(ticket, found) => {
                    self.sites[at].blocked.retain(|blocked| *blocked != ticket.0);
                    let reader =
                        self.sites[at].lives.iter().copied().find(|life| self.ghost.is_living(*life));
                    let verdict = self.ghost().read_ends(reader.unwrap_or(life), ticket.0, &found);
                    self.fail(verdict);
                }
                Notice::Conflict { origin, .. } | Notice::Logged { origin, .. } => {
                    let verdict = self.ghost().given_up(origin);
                    self.fail(verdict);
                }
                Notice::Over => {}
                Notice::WentBack => self.fail(Err("a node believes that the store went back".into())),
            }
        }
        let site = &self.sites[at];
        let kept = self.ghost.kept(&site.lives, |origin| {
            site.node.queue().chain(site.node.returning()).any(|queued| queued.origin == origin)
        });
        self.fail(kept);
    }
}

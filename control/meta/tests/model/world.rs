//! A cluster in one value: the store, coordinators, nodes, and the messages between them.
//!
//! Owns: how one action changes the cluster, and which actions there are. Does not own: what is right (`ghost`), the search.

use crate::ghost::{Ghost, Tree, Verdict};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;
use tidemark_meta::coordinator::{CALL_WAITS_MAX, Command, Coordinator, Event};
use tidemark_meta::key::{Key, Name, Place, ROOT};
use tidemark_meta::message::{Stamp, ToCoordinator, ToNode};
use tidemark_meta::node::{Answer, Look, Node, Notice};
use tidemark_meta::rules::Rules;
use tidemark_meta::state::Call;
use tidemark_meta::store::{Backup, Fault, Memory, Store};
use tidemark_meta::value::{Attributes, Kind, Published, SealSummary, Value, empty_tree};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::id::{Epoch, FileId, Incarnation, NodeName, SealNumber};
use tidemark_protocol::key::NodeLife;

/// A client's call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Op {
    Delegate(Dir),
    Create(At),
    Mkdir(At),
    Unlink(At),
    Rmdir(At),
    Rename(At, At),
    Exchange(At, At),
    Link(At, At),
    Open(At),
    Truncate(At),
    Chmod(At),
    /// Closes what is open for writing, with new bytes.
    Close,
    /// Creates, opens and closes in one go.
    Write(At),
    Look(At),
}

/// A directory of the scenario: the root, or the one of that name, wherever it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Dir {
    Root,
    In(&'static str),
}

/// A name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct At(pub(crate) Dir, pub(crate) &'static str);

/// What may go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Trouble {
    Cut,
    PowerOff,
    Lose,
    Repeat,
    AnswerLost,
    Delayed,
    Replace,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    Client(usize, Op),
    Send(usize),
    Again(usize),
    Deliver(usize),
    DeliverWith(usize, Trouble),
    Node(usize, Trouble),
    Heal(usize),
    Verdict(usize),
    ComeBack(usize),
    Replace,
    Release,
    Ask,
    Wait,
    Sweep,
}

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
    /// How often parked calls were queued again: bounded, as the numbers are.
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

/// The scenario's bounds; the same in all states.
#[derive(Debug, Clone)]
pub(crate) struct Bounds {
    pub(crate) nodes: usize,
    pub(crate) operations: u8,
    pub(crate) faults: u8,
    pub(crate) ops: Vec<Op>,
    pub(crate) troubles: Vec<Trouble>,
    /// Calls that are done, and come to rest, before the search begins.
    pub(crate) prelude: Vec<(usize, Op)>,
    /// What happens first in it.
    pub(crate) beginning: Vec<Action>,
    /// Clients on a node that may wait at a time.
    pub(crate) clients: usize,
    pub(crate) rules: Rules,
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
    /// The store went back: what it holds is not judged any more, only what is said of it.
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
    /// A cluster at rest in which the prelude was done, with a standby whose copy is from then.
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

    fn new_life(&mut self) -> Incarnation {
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
        panic!("the cluster does not come to rest");
    }

    fn fail(&mut self, verdict: Verdict) {
        if let Err(why) = verdict
            && self.bad.is_none()
        {
            self.bad = Some(why);
        }
    }

    fn ghost(&mut self) -> &mut Ghost {
        Arc::make_mut(&mut self.ghost)
    }

    // ---- the coordinators ----

    fn event(&mut self, at: usize, event: Event) {
        self.event_at(at, Duration::ZERO, event);
    }

    fn event_at(&mut self, at: usize, now: Duration, event: Event) {
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

    /// Looks at what the store has taken since the last time.
    fn stored(&mut self) {
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

    /// The observer after one transaction. It does not say in which order it took its nodes: some order has to be right.
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
        // A message that is there already is one that may come twice; that is a fault of its own.
        if let Err(at) = self.net.binary_search_by_key(&hash, |(hash, _)| *hash) {
            self.net.insert(at, (hash, Arc::new(packet)));
        }
    }

    fn send(&mut self, at: usize) {
        let site = &mut self.sites[at];
        let node = Arc::make_mut(&mut site.node);
        let (stamp, messages, coordinator) = (node.stamp(), node.send(), site.follows);
        for message in messages {
            self.post(Packet { node: at, coordinator, stamp, body: Body::Up(message) });
        }
    }

    fn deliver(&mut self, at: usize, trouble: Option<Trouble>) {
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

    fn notices(&mut self, at: usize, notices: Vec<Notice>) {
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

    // ---- clients ----

    fn dir(tree: &Tree, dir: Dir) -> Option<FileId> {
        match dir {
            Dir::Root => Some(ROOT),
            Dir::In(name) => tree.directory(name),
        }
    }

    fn at(tree: &Tree, at: At) -> Option<Place> {
        Self::dir(tree, at.0).map(|directory| place(directory, at.1))
    }

    /// Does a client's call; false if it makes no sense now.
    fn client(&mut self, node: usize, op: Op) -> bool {
        if self.sites[node].blocked.len() >= self.clients || self.sites[node].link == Link::Dead {
            return false;
        }
        let tree = self.ghost.effective();
        let seal = SealSummary {
            number: SealNumber(1),
            size_bytes: 1,
            crc: Crc64(100 + u64::from(self.operations)),
        };
        let attributes = Attributes { mode: u32::from(self.operations) + 1, ..Attributes::default() };
        let file =
            |at: At| Self::at(&tree, at).and_then(|place| tree.at(&place)).filter(|id| tree.is_file(*id));
        let holder = self.sites[node].node.life();
        let bases = None;
        let call = match op {
            Op::Look(at) => {
                let Some(place) = Self::at(&tree, at) else { return false };
                self.look(node, &place);
                return true;
            }
            Op::Write(at) => {
                let Some(place) = Self::at(&tree, at) else { return false };
                let id = Arc::make_mut(&mut self.sites[node].node).new_id();
                let attributes = Attributes::default();
                if self.sites[node].node.has_alone(place.directory) {
                    self.call(node, Call::Create { place, base: None, id, kind: Kind::File, attributes });
                    self.call(node, Call::Take { id, truncate: false });
                    if self.sites[node].node.writers(id) > 0 {
                        self.call(node, Call::Close { id, base: 0, holder, seal });
                    }
                    return true;
                }
                return false;
            }
            Op::Delegate(dir) => Self::dir(&tree, dir).map(|directory| Call::Delegate { directory }),
            Op::Create(at) | Op::Mkdir(at) => {
                let kind = if matches!(op, Op::Create(_)) { Kind::File } else { Kind::Directory };
                let place = Self::at(&tree, at);
                let id = Arc::make_mut(&mut self.sites[node].node).new_id();
                let attributes = Attributes::default();
                place.map(|place| Call::Create { place, base: None, id, kind, attributes })
            }
            Op::Unlink(at) => Self::at(&tree, at).map(|place| Call::Unlink { place, base: None }),
            Op::Rmdir(at) => Self::at(&tree, at).map(|place| Call::Rmdir { place }),
            Op::Rename(from, to) | Op::Exchange(from, to) => {
                let exchange = matches!(op, Op::Exchange(..));
                let places = Self::at(&tree, from).zip(Self::at(&tree, to));
                places.map(|(from, to)| Call::Rename { from, to, bases, replaces: true, exchange })
            }
            Op::Link(from, to) => {
                file(from).zip(Self::at(&tree, to)).map(|(id, place)| Call::Link { id, place })
            }
            Op::Open(at) | Op::Truncate(at) => {
                let truncate = matches!(op, Op::Truncate(_));
                self.truncated |= truncate;
                file(at).map(|id| Call::Take { id, truncate })
            }
            Op::Chmod(at) => file(at).map(|id| Call::SetAttributes { id, attributes }),
            Op::Close => {
                let id = self.sites[node].open.first().copied();
                id.map(|id| Call::Close { id, base: 0, holder, seal })
            }
        };
        let Some(call) = call else { return false };
        self.call(node, call);
        true
    }

    fn call(&mut self, at: usize, call: Call) {
        let site = &mut self.sites[at];
        if let Call::Close { id, .. } = &call {
            let at = site.open.iter().position(|open| open == id);
            at.map(|at| site.open.remove(at));
        }
        let node = Arc::make_mut(&mut site.node);
        match node.call(call.clone()) {
            Answer::Done(origin) => {
                if let Call::Take { id, .. } = &call {
                    site.open.push(*id);
                }
                if let Some(origin) = origin {
                    let queued = site.node.queue().find(|queued| queued.origin == origin);
                    let call = queued.map_or(call, |queued| queued.call.clone());
                    let verdict = self.ghost().acked(origin, &call);
                    self.fail(verdict);
                }
            }
            Answer::Waits(ticket) => {
                site.blocked.push(ticket.0);
                if let Call::Take { id, .. } = call {
                    site.opening.push((ticket.0, id));
                }
            }
            // A writer loses its file to a truncation, or with its node's life; else its close counts.
            Answer::Refused(why) if matches!(call, Call::Close { .. }) && !self.truncated => {
                if self.sites[at].lives.len() == 1 {
                    self.fail(Err(format!("a writer's file was taken from under it ({why})")));
                }
            }
            Answer::Refused(_) => {}
        }
    }

    fn look(&mut self, at: usize, place: &Place) {
        let site = &mut self.sites[at];
        let life = site.node.life();
        match Arc::make_mut(&mut site.node).look(place.clone()) {
            Look::Found(found) => {
                let verdict = self.ghost().read_here(life, place, &found);
                self.fail(verdict);
            }
            Look::Waits(ticket) => {
                site.blocked.push(ticket.0);
                self.ghost().read_begins(life, ticket.0, place);
            }
        }
    }

    // ---- actions ----

    /// Every action that can happen now.
    pub(crate) fn actions(&self, bounds: &Bounds) -> Vec<Action> {
        let mut actions = vec![];
        let may_fail = self.faults < bounds.faults;
        let has = |trouble| may_fail && bounds.troubles.contains(&trouble);
        for (at, site) in self.sites.iter().enumerate() {
            if site.link == Link::Dead {
                if self.ghost.is_living(site.node.life()) {
                    actions.push(Action::Verdict(at));
                }
                continue;
            }
            if self.operations < bounds.operations {
                actions.extend(bounds.ops.iter().map(|op| Action::Client(at, *op)));
            } else if !site.open.is_empty() {
                actions.push(Action::Client(at, Op::Close));
            }
            if site.node.has_to_send() {
                actions.push(Action::Send(at));
            }
            let quiet = !self.net.iter().any(|(_, packet)| packet.node == at);
            let lost = self.faults > 0 || site.node.is_parked();
            if quiet && lost && site.node.awaits() && site.retries < 2 {
                actions.push(Action::Again(at));
            }
            match site.link {
                Link::Cut => {
                    actions.push(Action::Heal(at));
                    if self.ghost.is_living(site.node.life()) {
                        actions.push(Action::Verdict(at));
                    }
                }
                _ => {
                    if site.node.is_over() {
                        actions.push(Action::ComeBack(at));
                    }
                    for trouble in [Trouble::Cut, Trouble::PowerOff] {
                        if has(trouble) {
                            actions.push(Action::Node(at, trouble));
                        }
                    }
                }
            }
        }
        for (at, (_, packet)) in self.net.iter().enumerate() {
            if self.sites[packet.node].link != Link::Up {
                continue;
            }
            actions.push(Action::Deliver(at));
            for trouble in [Trouble::Lose, Trouble::Repeat] {
                if has(trouble) {
                    actions.push(Action::DeliverWith(at, trouble));
                }
            }
            if matches!(packet.body, Body::Up(ToCoordinator::Publish { .. } | ToCoordinator::Join { .. })) {
                for trouble in [Trouble::AnswerLost, Trouble::Delayed] {
                    if has(trouble) {
                        actions.push(Action::DeliverWith(at, trouble));
                    }
                }
            }
        }
        if has(Trouble::Replace) && !self.coordinators[1].leads() && self.coordinators[0].leads() {
            actions.push(Action::Replace);
        }
        if self.store.delayed() > 0 {
            actions.push(Action::Release);
        }
        let waits = self.coordinators.iter().any(|coordinator| coordinator.waits());
        if waits && self.net.is_empty() {
            actions.push(Action::Ask);
        }
        if waits && self.sites.iter().any(|site| site.link != Link::Up) {
            actions.push(Action::Wait);
        }
        if self.faults > 0
            && self.coordinators.iter().any(|coordinator| coordinator.state().tombstones().next().is_some())
        {
            actions.push(Action::Sweep);
        }
        actions
    }

    /// Does an action; false if it comes to nothing.
    pub(crate) fn act(&mut self, action: &Action) -> bool {
        match action {
            Action::Client(node, op) => {
                self.operations += 1;
                let did = self.client(*node, *op);
                self.operations -= u8::from(!did);
                return did;
            }
            Action::Send(at) => self.send(*at),
            Action::Again(at) => {
                let elected = match self.store.get(&Key::Coordinator) {
                    Some(Value::Role(role)) => usize::from(role.life.node.as_str() == "c1"),
                    _ => 0,
                };
                let site = &mut self.sites[*at];
                site.retries += 1;
                site.follows = elected;
                Arc::make_mut(&mut site.node).again();
                self.send(*at);
            }
            Action::Deliver(at) => self.deliver(*at, None),
            Action::DeliverWith(at, trouble) => {
                self.faults += 1;
                self.deliver(*at, Some(*trouble));
            }
            Action::Node(at, trouble) => {
                self.faults += 1;
                self.sites[*at].link = if *trouble == Trouble::Cut { Link::Cut } else { Link::Dead };
                if *trouble == Trouble::PowerOff {
                    self.net.retain(|(_, packet)| packet.node != *at);
                }
            }
            Action::Heal(at) => self.sites[*at].link = Link::Up,
            Action::Verdict(at) => {
                let life = NodeLife { node: name_of(*at), incarnation: self.sites[*at].node.life() };
                for coordinator in self.leaders() {
                    self.event(coordinator, Event::Gone(life.clone()));
                }
            }
            Action::ComeBack(at) => {
                let life = self.new_life();
                let site = &mut self.sites[*at];
                site.lives.insert(0, life);
                let notices = Arc::make_mut(&mut site.node).come_back(life);
                self.notices(*at, notices);
            }
            Action::Replace => {
                self.faults += 1;
                self.event(1, Event::TakeOver);
            }
            Action::Release => {
                self.store.release();
                self.stored();
            }
            Action::Ask => {
                for coordinator in self.leaders() {
                    self.event(coordinator, Event::Tick);
                }
            }
            Action::Wait => {
                for coordinator in self.leaders() {
                    self.event_at(coordinator, CALL_WAITS_MAX, Event::Tick);
                }
            }
            Action::Sweep => {
                for coordinator in self.leaders() {
                    self.event(coordinator, Event::Sweep);
                }
            }
        }
        true
    }

    /// Compacts the store up to now, whoever follows.
    pub(crate) fn forget_history(&mut self) {
        let revision = self.store.revision();
        self.store.compact(revision);
    }

    /// The store's content now.
    pub(crate) fn backup(&self) -> Backup {
        self.store.backup()
    }

    /// Puts an older content back, as an operator may, behind everybody's back.
    pub(crate) fn restore(&mut self, backup: &Backup) {
        self.store.restore(backup);
        self.restored = true;
    }

    /// Brings the standby's copy forward.
    pub(crate) fn follow(&mut self) {
        self.event(1, Event::Tick);
    }

    /// Ends all faults, and lets everything come to its end.
    pub(crate) fn come_to_rest(&mut self) {
        while self.store.delayed() > 0 {
            self.act(&Action::Release);
        }
        for at in 0..self.sites.len() {
            match self.sites[at].link {
                Link::Cut => self.sites[at].link = Link::Up,
                Link::Dead if self.ghost.is_living(self.sites[at].node.life()) => {
                    self.act(&Action::Verdict(at));
                }
                _ => {}
            }
        }
        for _ in 0..50 {
            self.settle();
            for at in 0..self.sites.len() {
                if self.sites[at].link == Link::Dead {
                    continue;
                }
                while !self.sites[at].open.is_empty() {
                    let before = self.sites[at].open.len();
                    self.sites[at].blocked.clear();
                    self.client(at, Op::Close);
                    assert!(self.sites[at].open.len() < before, "a close opens nothing");
                }
                if self.sites[at].node.is_over() {
                    self.act(&Action::ComeBack(at));
                }
                if self.sites[at].node.awaits() {
                    self.act(&Action::Again(at));
                }
            }
            self.act(&Action::Ask);
        }
        self.settle();
        for at in 0..self.sites.len() {
            let site = &self.sites[at];
            if site.link != Link::Dead && (!site.blocked.is_empty() || site.node.queue().next().is_some()) {
                let queue: Vec<_> = site.node.queue().collect();
                let why = format!("n{at} waits for ever, {:?}: {queue:?}, {:?}", site.blocked, site.node);
                self.fail(Err(why));
            }
        }
    }

    fn leaders(&self) -> Vec<usize> {
        (0..2).filter(|at| self.coordinators[*at].leads()).collect()
    }
}

fn place(directory: FileId, name: &str) -> Place {
    Place { directory, name: Name::new(name.as_bytes()).unwrap() }
}

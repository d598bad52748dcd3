//! A run of a daemon, which follows the coordinator or has its role, publishes changes and answers other nodes.
//!
//! Owns: joining, beating, publishing, recalls, as the engine's `cluster::{member, publisher, service}` do; the lease. Does not own:
//! names (`names`), the coordinator's decisions (`coordinator`), copies (`replicate`), Tier-3 (`save`).

use super::coordinator::Catalog;
use super::exec::{Owner, Signal, Turn};
use super::memory::Memory;
use super::names::{ANSWER_DEADLINE, Away, Names};
use super::network::{Answer, Datagram, From, Letter, Refused, call, tell};
use super::replicate::Replication;
use super::save::Participations;
use super::store::{LeaseAsk, TERM, ask_lease};
use super::world::World;
use serde::de::DeserializeOwned;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::{
    self, Join, Joined, Members, Object, Publication, Published, ToCoordinator, ToNode,
};
use tidemark_protocol::id::{Epoch, FileId, SealNumber, StartId};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::membership::{Cure, Heard, Life, View};

/// Intervals between two tries to take the lease, and between two renewals.
const LEASE_EVERY: Duration = Duration::from_millis(200);
const RENEW_EVERY: Duration = Duration::from_millis(500);
const LEASE_DEADLINE: Duration = Duration::from_millis(400);
/// Pause before the node asks the coordinator again to let it join.
const JOIN_AGAIN: Duration = Duration::from_millis(300);
/// Interval at which the node checks for changes to publish.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Most operations in one publication. Small, so that there are several publications.
const BATCH_MAX: usize = 32;

/// Holder of the coordinator role, as this node knows it.
#[derive(Clone)]
pub(crate) enum Seat {
    Unknown,
    Here(Rc<Catalog>),
    There(usize, Epoch),
}

#[derive(Debug, Default)]
struct Telling {
    number: u64,
    unanswered: Option<Publication>,
    whole: bool,
}

pub(crate) struct Node {
    pub(crate) world: Rc<World>,
    pub(crate) machine: usize,
    pub(crate) memory: Rc<Memory>,
    pub(crate) start: StartId,
    pub(crate) view: RefCell<View>,
    pub(crate) seat: RefCell<Seat>,
    seat_changed: Signal,
    rejoin: Cell<bool>,
    pub(crate) members: RefCell<Members>,
    pub(crate) names: Names,
    pub(crate) joined: Cell<u64>,
    turn: Turn,
    telling: RefCell<Telling>,
    pub(crate) outgoing: Signal,
    /// When the last datagram of each life came here.
    heard: RefCell<BTreeMap<Life, Duration>>,
    pub(crate) replication: Replication,
    pub(crate) participations: Participations,
}

impl Node {
    pub(crate) fn new(world: &Rc<World>, machine: usize, memory: Rc<Memory>, start: StartId) -> Rc<Self> {
        let NodeLife { node, incarnation } = memory.life.clone();
        let view = View::new(Life { node, incarnation, start }, memory.epoch.get());
        Rc::new(Self {
            world: Rc::clone(world),
            machine,
            memory,
            start,
            view: RefCell::new(view),
            seat: RefCell::new(Seat::Unknown),
            seat_changed: Signal::default(),
            rejoin: Cell::new(false),
            members: RefCell::default(),
            names: Names::default(),
            joined: Cell::new(0),
            turn: Turn::default(),
            telling: RefCell::default(),
            outgoing: Signal::default(),
            heard: RefCell::default(),
            replication: Replication::default(),
            participations: Participations::default(),
        })
    }

    pub(crate) fn begin(self: &Rc<Self>) {
        self.run(|node| async move { node.seek().await });
        self.run(|node| async move { node.follow().await });
        self.run(|node| async move { node.beat().await });
        self.run(|node| async move { node.publish_on().await });
        self.run(|node| async move { node.seal_on().await });
        self.run(|node| async move { node.tell_copies().await });
        self.run(|node| async move { node.replicate_on().await });
    }

    /// Runs a task of this daemon, for as long as the daemon lives.
    pub(crate) fn run<F: Future<Output = ()> + 'static>(self: &Rc<Self>, what: impl FnOnce(Rc<Self>) -> F) {
        self.world.spawn(Owner::Node(self.machine), what(Rc::clone(self)));
    }

    pub(crate) fn name(&self) -> &str {
        self.memory.life.node.as_str()
    }

    pub(crate) fn life(&self) -> Life {
        let NodeLife { node, incarnation } = self.memory.life.clone();
        Life { node, incarnation, start: self.start }
    }

    pub(crate) fn from(&self) -> From {
        From { machine: self.machine, life: self.memory.life.clone(), start: self.start }
    }

    pub(crate) fn now_ns(&self) -> i64 {
        self.world.wall_ns(self.machine)
    }

    // The lease.

    /// Competes for the lease, keeps it, or learns its holder, until the daemon ends.
    async fn seek(self: Rc<Self>) {
        loop {
            let sent = self.world.now();
            if let Some(says) = ask_lease(&self, LeaseAsk::Take, LEASE_DEADLINE).await {
                match says.holder {
                    Some(holder) if says.done => {
                        self.govern(holder.epoch, says.members, sent).await;
                        self.sit(Seat::Unknown);
                    }
                    Some(holder) if holder.machine != self.machine => {
                        self.sit(Seat::There(holder.machine, holder.epoch));
                    }
                    // The node has the lease from before, or by a lost answer, but may not decide. No node does until the lease ends.
                    _ => {}
                }
            }
            self.world.sleep(self.world.rng.between(LEASE_EVERY, 2 * LEASE_EVERY)).await;
        }
    }

    /// Coordinates for as long as the lease is renewed. Each term counts from the sending of the renewal.
    async fn govern(
        self: &Rc<Self>,
        epoch: Epoch,
        members: tidemark_protocol::membership::MemberList,
        mut sent: Duration,
    ) {
        if self.view.borrow_mut().follow(epoch).is_err() {
            return;
        }
        self.memory.saw_epoch(epoch);
        // While it coordinates, this node publishes nothing, so the next coordinator must get everything.
        self.telling.borrow_mut().whole = true;
        self.world.note(|| format!("{} is the coordinator of epoch {epoch}", self.name()));
        self.world.count("term of a coordinator");
        let catalog = Catalog::new(self, epoch, members);
        catalog.until.set(sent + TERM);
        self.sit(Seat::Here(Rc::clone(&catalog)));
        catalog.begin();
        loop {
            self.world.sleep(RENEW_EVERY).await;
            let asked = self.world.now();
            let left = (sent + TERM).saturating_sub(asked);
            if left.is_zero() || catalog.is_closed() {
                break;
            }
            match ask_lease(self, LeaseAsk::Renew(epoch), left.min(LEASE_DEADLINE)).await {
                Some(says) if says.done => {
                    sent = asked;
                    catalog.until.set(sent + TERM);
                }
                Some(_) => break,
                None => {}
            }
        }
        catalog.close();
        self.world.note(|| format!("{} is not the coordinator of epoch {epoch} any more", self.name()));
    }

    fn sit(&self, seat: Seat) {
        let same = matches!((&*self.seat.borrow(), &seat),
            (Seat::There(one, epoch), Seat::There(other, newer)) if one == other && epoch == newer)
            || matches!((&*self.seat.borrow(), &seat), (Seat::Unknown, Seat::Unknown));
        *self.seat.borrow_mut() = seat;
        if !same {
            self.names.forget_all();
            self.seat_changed.tell();
        }
    }

    // Membership.

    async fn follow(self: Rc<Self>) {
        loop {
            let epoch = self
                .seat_changed
                .until(|| match *self.seat.borrow() {
                    Seat::There(_, epoch) => Some(epoch),
                    Seat::Unknown | Seat::Here(_) => None,
                })
                .await;
            self.rejoin.set(false);
            if self.join(epoch).await.is_some() {
                let stays = || matches!(*self.seat.borrow(), Seat::There(_, now) if now == epoch);
                self.seat_changed.until(|| (!stays() || self.rejoin.get()).then_some(())).await;
            }
            self.world.sleep(JOIN_AGAIN).await;
        }
    }

    async fn join(self: &Rc<Self>, epoch: Epoch) -> Option<()> {
        let join = Join {
            life: self.memory.life.clone(),
            start: self.start,
            address: format!("{}:7070", self.name()),
            labels: BTreeMap::new(),
            epoch: self.view.borrow().epoch(),
            publication: self.telling.borrow().number,
            alone: Vec::new(),
            version: String::new(),
        };
        let joined: Joined = match self.ask(ToCoordinator::Join(join), ANSWER_DEADLINE).await {
            Ok(joined) => joined,
            Err(away) => {
                self.world.note(|| format!("{} may not join: {away:?}", self.name()));
                return None;
            }
        };
        if !matches!(*self.seat.borrow(), Seat::There(_, now) if now == epoch && joined.admit.epoch == epoch)
        {
            return None;
        }
        self.view.borrow_mut().admitted(&joined.admit, self.world.now_ms()).ok()?;
        self.memory.saw_epoch(epoch);
        self.names.forget_all();
        self.world.truth.borrow_mut().is_back(self.memory.life.incarnation, self.world.now());
        self.joined.set(self.joined.get() + 1);
        self.take_members(joined.members.decode().expect("a list as it was told"));
        {
            let _turn = self.turn.take().await;
            // Until everything is published again, the coordinator cannot call a name absent.
            self.telling.borrow_mut().whole = true;
        }
        self.world.note(|| format!("{} joined epoch {epoch}", self.name()));
        self.outgoing.tell();
        Some(())
    }

    async fn beat(self: Rc<Self>) {
        loop {
            self.world.sleep(Duration::from_millis(50)).await;
            let Seat::There(to, _) = *self.seat.borrow() else { continue };
            let beat = self.view.borrow_mut().beat(0, 0, self.world.now_ms());
            if let Some(beat) = beat {
                tell(&self, to, Datagram::Beat(beat));
            }
        }
    }

    pub(crate) fn join_again(&self) {
        self.view.borrow_mut().rejoin();
        self.rejoin.set(true);
        self.seat_changed.tell();
    }

    pub(crate) fn take_members(&self, members: Members) {
        let mut known = self.members.borrow_mut();
        if (members.epoch, members.number) > (known.epoch, known.number) {
            *known = members;
            drop(known);
            self.replication.changed.tell();
        }
    }

    // Publications.

    async fn publish_on(self: Rc<Self>) {
        loop {
            self.world.sleep(LOOK_EVERY).await;
            if matches!(*self.seat.borrow(), Seat::There(..)) && self.publish().await.is_err() {
                self.world.sleep(LOOK_EVERY).await;
            }
        }
    }

    /// Sends the coordinator all changes that it has not acknowledged.
    pub(crate) async fn publish(self: &Rc<Self>) -> Result<(), Away> {
        if self.is_coordinator() {
            return Ok(());
        }
        let _turn = self.turn.take().await;
        loop {
            if self.telling.borrow().whole {
                self.publish_whole().await?;
                continue;
            }
            let unanswered = self.telling.borrow_mut().unanswered.take();
            let publication = match unanswered {
                Some(publication) => publication,
                None => {
                    let (operations, states, overflowed) =
                        self.memory.tree.borrow_mut().take_outgoing(BATCH_MAX);
                    let mut telling = self.telling.borrow_mut();
                    if overflowed {
                        self.world.count("too much to tell, so everything");
                        telling.whole = true;
                        continue;
                    }
                    if operations.is_empty() && states.is_empty() {
                        return Ok(());
                    }
                    telling.number += 1;
                    Publication { number: telling.number, operations, states, ..Publication::default() }
                }
            };
            self.send(publication).await?;
        }
    }

    async fn publish_whole(self: &Rc<Self>) -> Result<(), Away> {
        self.telling.borrow_mut().unanswered = None;
        let states = {
            let mut tree = self.memory.tree.borrow_mut();
            tree.forget_outgoing();
            tree.whole()
        };
        let mut batches = states.chunks(BATCH_MAX).map(<[_]>::to_vec).collect::<Vec<_>>();
        if batches.is_empty() {
            batches.push(Vec::new());
        }
        let count = batches.len();
        for (at, states) in batches.into_iter().enumerate() {
            let number = {
                let mut telling = self.telling.borrow_mut();
                telling.number += 1;
                telling.number
            };
            let last = at + 1 == count;
            self.send(Publication { number, whole: true, last, states, ..Publication::default() }).await?;
        }
        self.telling.borrow_mut().whole = false;
        Ok(())
    }

    async fn send(self: &Rc<Self>, mut publication: Publication) -> Result<(), Away> {
        publication.now_ns = self.now_ns();
        let message = ToCoordinator::Publish(publication.clone());
        self.telling.borrow_mut().unanswered = Some(publication);
        let published: Published = self.ask(message, ANSWER_DEADLINE).await?;
        {
            let mut telling = self.telling.borrow_mut();
            telling.unanswered = None;
            telling.whole |= published.whole_wanted;
        }
        for path in published.shared {
            let directory = self.memory.tree.borrow().directory(&path);
            directory.into_iter().for_each(|directory| self.names.forget(directory));
        }
        Ok(())
    }

    // Questions and answers.

    /// Asks the coordinator.
    pub(crate) async fn ask<T: DeserializeOwned>(
        self: &Rc<Self>,
        message: ToCoordinator,
        most: Duration,
    ) -> Result<T, Away> {
        let seat = self.seat.borrow().clone();
        let answer = match seat {
            Seat::Unknown => return Err(Away::Nobody),
            Seat::Here(catalog) => {
                let answer = Box::pin(catalog.answer(self.from(), message));
                super::exec::within(&self.world.exec, most, answer).await
            }
            Seat::There(to, _) => {
                let bytes = wire::encode(&message).expect("no message is that large here");
                call(self, to, Letter::Coordinator(bytes), most).await
            }
        };
        let bytes = answer.ok_or(Away::Late)?.map_err(Away::Refused)?;
        Ok(wire::decode(&bytes).expect("both sides are of one build"))
    }

    /// Asks a node.
    pub(crate) async fn ask_node<T: DeserializeOwned>(
        self: &Rc<Self>,
        to: usize,
        message: &ToNode,
        most: Duration,
    ) -> Result<T, Away> {
        let bytes = wire::encode(message).expect("no message is that large here");
        let answer = call(self, to, Letter::Node(bytes), most).await;
        let bytes = answer.ok_or(Away::Late)?.map_err(Away::Refused)?;
        Ok(wire::decode(&bytes).expect("both sides are of one build"))
    }

    pub(crate) async fn answer(self: Rc<Self>, from: From, letter: Letter) -> Answer {
        match letter {
            Letter::Coordinator(bytes) => {
                let message = wire::decode(&bytes).expect("both sides are of one build");
                let Seat::Here(catalog) = self.seat.borrow().clone() else {
                    return Err(Refused::Unavailable("this is not the coordinator".to_owned()));
                };
                catalog.answer(from, message).await
            }
            Letter::Node(bytes) => self.commanded(wire::decode(&bytes).expect("both of one build")).await,
            Letter::Replication(bytes) => self.asked_of_copies(&from, &bytes),
            Letter::Push { token, chunks } => self.pushed(token, &chunks).await,
            Letter::Read { token } => self.read(token).await,
        }
    }

    /// Carries out a command of the coordinator. A command of an older epoch is refused.
    async fn commanded(self: &Rc<Self>, message: ToNode) -> Answer {
        let epoch = match &message {
            ToNode::Recall { epoch, .. } | ToNode::Objects { epoch, .. } => *epoch,
            ToNode::Members(members) => members.epoch,
            ToNode::Prepare(prepare) => prepare.epoch,
            ToNode::Ask(_)
            | ToNode::Forget { .. }
            | ToNode::Knock
            | ToNode::Removed { .. }
            | ToNode::Pace { .. } => {
                unreachable!("nobody tells that here")
            }
        };
        self.view.borrow_mut().follow(epoch).map_err(|refusal| {
            self.world.count("command of an older epoch refused");
            Refused::Fenced(refusal.to_string())
        })?;
        self.memory.saw_epoch(epoch);
        let bytes = match message {
            ToNode::Recall { path, name, release, .. } => {
                self.recalled(&path, name, release).await?;
                wire::encode(&())
            }
            ToNode::Members(change) => {
                let followed = self.members.borrow_mut().follow(change);
                if followed.expect("each time the whole is told") {
                    self.replication.changed.tell();
                }
                wire::encode(&())
            }
            ToNode::Prepare(prepare) => wire::encode(&self.prepare(&prepare)),
            ToNode::Objects { objects, .. } => {
                self.in_tier3(&objects);
                wire::encode(&())
            }
            ToNode::Ask(_)
            | ToNode::Forget { .. }
            | ToNode::Knock
            | ToNode::Removed { .. }
            | ToNode::Pace { .. } => {
                unreachable!("nobody tells that here")
            }
        };
        Ok(bytes.expect("no answer is that large here"))
    }

    /// Waits for calls on `name`, and publishes. With `release`, also gives the directory back.
    pub(crate) async fn recalled(
        self: &Rc<Self>,
        path: &[u8],
        name: Option<Vec<u8>>,
        release: bool,
    ) -> Result<(), Refused> {
        let directory = self.memory.tree.borrow().directory(path);
        if let Some(directory) = directory {
            if let Some(name) = name {
                self.names.settle(self, &(directory, name)).await;
            }
            if release {
                self.names.recall(self, directory).await;
            }
        }
        let published = self.publish().await;
        published.map_err(|away| Refused::Unavailable(format!("it cannot publish: {away:?}")))?;
        if let (true, Some(directory)) = (release, directory) {
            self.names.forget(directory);
        }
        Ok(())
    }

    /// Handles a datagram.
    pub(crate) fn told(self: &Rc<Self>, from: &From, datagram: Datagram) {
        let life =
            Life { node: from.life.node.clone(), incarnation: from.life.incarnation, start: from.start };
        self.heard.borrow_mut().insert(life, self.world.now());
        match datagram {
            Datagram::Beat(beat) => {
                if let Seat::Here(catalog) = self.seat.borrow().clone() {
                    catalog.beat(beat);
                }
            }
            Datagram::Heard(heard) => {
                if let Seat::Here(catalog) = self.seat.borrow().clone() {
                    catalog.heard(heard);
                }
            }
            Datagram::Echo(echo) => {
                let echoed = self.view.borrow_mut().echoed(&echo, self.world.now_ms());
                if echoed.is_ok() {
                    self.names.outage_over();
                }
            }
            Datagram::Refused(refusal) => {
                if refusal.cure() == Cure::Join {
                    self.join_again();
                }
            }
            Datagram::Ask(ask) => {
                let to = from.machine;
                self.run(|node| async move { node.look_for(to, ask).await });
            }
            Datagram::Probe => tell(self, from.machine, Datagram::Here),
            Datagram::Here => {}
        }
    }

    /// Probes a neighbour that the coordinator cannot hear, and reports whether it answers.
    async fn look_for(self: Rc<Self>, asker: usize, ask: tidemark_protocol::membership::Ask) {
        let since = self.world.now();
        let Some(neighbour) = self.world.index_of(&ask.about.node) else { return };
        let until = since + Duration::from_millis(ask.within_ms) - Duration::from_millis(20);
        loop {
            tell(&self, neighbour, Datagram::Probe);
            self.world.sleep(Duration::from_millis(60)).await;
            let heard = self.heard.borrow().get(&ask.about).is_some_and(|at| *at > since);
            if heard || self.world.now() >= until {
                let answer: Result<Heard, _> = self.view.borrow().clone().answer(&ask, heard);
                if let Ok(answer) = answer {
                    tell(&self, asker, Datagram::Heard(answer));
                }
                return;
            }
        }
    }

    /// Records seals that are in Tier-3.
    pub(crate) fn in_tier3(&self, objects: &[(FileId, SealNumber, Object)]) {
        self.memory.in_tier3.borrow_mut().extend(objects.iter().map(|(file, seal, _)| (*file, *seal)));
    }

    async fn seal_on(self: Rc<Self>) {
        loop {
            self.world.sleep(Duration::from_millis(40)).await;
            let closed: Vec<_> = {
                let tree = self.memory.tree.borrow();
                let state = |own: &super::tree::Own| own.fate.state();
                let closed = tree
                    .own_files()
                    .filter(|(_, own)| state(own) == tidemark_protocol::file::FileState::Closed);
                closed.map(|(file, _)| *file).collect()
            };
            for file in closed {
                // Stands for the time that hashing takes.
                self.world
                    .sleep(self.world.rng.between(Duration::from_millis(1), Duration::from_millis(30)))
                    .await;
                let sealed = self.memory.tree.borrow_mut().seal(file);
                if sealed.is_some() {
                    self.replication.changed.tell();
                }
            }
        }
    }
}

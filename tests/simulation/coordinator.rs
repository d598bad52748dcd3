//! The coordinator of one epoch: the publications of all nodes, and what each node may do without asking, as control's `catalog`
//! does.
//!
//! Owns: members with their verdicts and partners, answering for names, taking publications, which node keeps which copies,
//! whether everything is known. Does not own: the rules (protocol), checkpoints (`decide`).
//!
//! The tree of the coordinator's node is the catalog. A missing name is ENOENT only when every member has published everything or
//! is gone, and Tier-3 was listed.

use super::catalog::{home_of, take_if_free};
use super::decide::Books;
use super::exec::Turn;
use super::names::Away;
use super::network::{Datagram, From, Refused, tell};
use super::node::Node;
use super::store::{LeaseAsk, ask_lease};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;
use tidemark_protocol::cluster::clocks::Clocks;
use tidemark_protocol::cluster::leases::Leases;
use tidemark_protocol::cluster::wire::{
    self, EncodedMembers, Join, Joined, Member, Members, NodeState, ToNode,
};
use tidemark_protocol::id::{Epoch, FileId, Incarnation, NodeName, SealNumber};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::label::Labels;
use tidemark_protocol::membership::{
    self, Admit, Beat, Command, Event, Heard, Life, MemberList, Membership, Patience, Standing, TICK_MS,
    Verdict,
};
use tidemark_protocol::placement::{Placement, PlacementVersion, Rules, place};

/// Longest wait of the coordinator for a node that must publish before another node gets its answer.
pub(crate) const NODE_DEADLINE: Duration = Duration::from_secs(5);

pub(crate) struct Catalog {
    pub(crate) node: Rc<Node>,
    pub(crate) epoch: Epoch,
    pub(crate) state: RefCell<State>,
    pub(crate) books: RefCell<Books>,
    closed: Cell<bool>,
    /// End of the lease, counted from the moment when the last renewal was sent.
    pub(crate) until: Cell<Duration>,
    carrying: Turn,
}

pub(crate) struct State {
    pub(crate) leases: Leases,
    pub(crate) clocks: Clocks,
    pub(crate) membership: Membership,
    placement: Option<Placement>,
    pub(crate) published: BTreeMap<NodeLife, u64>,
    pub(crate) holders: BTreeMap<(FileId, SealNumber), BTreeSet<NodeName>>,
    /// States of the files, as the holders report them.
    pub(crate) kept: BTreeMap<FileId, NodeState>,
    /// Lives that have published all their names, and all copies that they keep.
    pub(crate) told_names: BTreeSet<Incarnation>,
    pub(crate) told_copies: BTreeSet<Incarnation>,
    /// Lives that have published all their names at any time of this term.
    pub(crate) has_told: BTreeSet<Incarnation>,
    /// Files published so far by each life whose whole publication is under way.
    pub(crate) telling: BTreeMap<Incarnation, BTreeSet<FileId>>,
    pub(crate) is_tier3_listed: bool,
    number: u64,
    todo: VecDeque<Command>,
}

impl Catalog {
    pub(crate) fn new(node: &Rc<Node>, epoch: Epoch, stored: MemberList) -> Rc<Self> {
        let name = node.memory.life.node.clone();
        let patience = Patience { cutoff_ms: 30_000, for_good_ms: 20_000 };
        let mut stored = stored;
        // Another life of this node's name has ended. The present life has its place.
        stored.members.retain(|listed| listed.life.node != name);
        let now_ms = node.world.now_ms();
        let membership = Membership::new(epoch, name, true, stored, patience, now_ms);
        let own = node.memory.life.incarnation;
        node.memory.tree.borrow_mut().dropped.clear();
        let state = State {
            leases: Leases::default(),
            clocks: Clocks::default(),
            membership,
            placement: None,
            published: BTreeMap::new(),
            holders: BTreeMap::new(),
            kept: BTreeMap::new(),
            told_names: BTreeSet::from([own]),
            told_copies: BTreeSet::from([own]),
            has_told: BTreeSet::from([own]),
            telling: BTreeMap::new(),
            is_tier3_listed: false,
            number: 0,
            todo: VecDeque::new(),
        };
        Rc::new(Self {
            node: Rc::clone(node),
            epoch,
            state: RefCell::new(state),
            books: RefCell::default(),
            closed: Cell::new(false),
            until: Cell::new(node.world.now()),
            carrying: Turn::default(),
        })
    }

    /// Begins to decide. The coordinator's own node is the first member.
    pub(crate) fn begin(self: &Rc<Self>) {
        let join = membership::Join {
            from: self.node.life(),
            epoch: self.epoch,
            address: format!("{}:7070", self.node.name()),
            labels: Labels::default(),
        };
        self.step(Event::Join(join)).expect("its own node is the first");
        self.take_own_copies();
        self.run(|catalog| async move { catalog.tick().await });
        self.run(|catalog| async move { catalog.decide().await });
    }

    pub(crate) fn close(&self) {
        self.closed.set(true);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get() || self.node.world.now() >= self.until.get()
    }

    pub(crate) fn run<F: Future<Output = ()> + 'static>(self: &Rc<Self>, what: impl FnOnce(Rc<Self>) -> F) {
        let work = what(Rc::clone(self));
        self.node.run(|_| work);
    }

    // Members.

    async fn tick(self: Rc<Self>) {
        while !self.is_closed() {
            self.step(Event::Tick).expect("time is no message");
            self.take_own_copies();
            self.node.world.sleep(Duration::from_millis(TICK_MS)).await;
        }
    }

    /// Records that the coordinator's own node made a directory; false if another node has it already.
    pub(crate) fn made(&self, path: &[u8]) -> bool {
        self.state.borrow_mut().leases.made(&self.node.memory.life.node, path)
    }

    /// Records that the coordinator's own node renamed something, because no publication reports that.
    pub(crate) fn renamed(&self, from: &[u8], to: &[u8]) {
        self.state.borrow_mut().leases.renamed(&self.node.memory.life.node, from, to);
    }

    fn step(self: &Rc<Self>, event: Event) -> Result<(), membership::Refusal> {
        let now_ms = self.node.world.now_ms();
        let mut todo = Vec::new();
        let taken = self.state.borrow_mut().membership.step(event, now_ms, &mut todo);
        if !todo.is_empty() {
            self.state.borrow_mut().todo.extend(todo);
            self.run(|catalog| async move { catalog.carry_out().await });
        }
        taken
    }

    /// Carries out what the rules decided, in order. The list of members is durable before the commands that follow from it.
    async fn carry_out(self: Rc<Self>) {
        let _turn = self.carrying.take().await;
        loop {
            let next = self.state.borrow_mut().todo.pop_front();
            let Some(command) = next.filter(|_| !self.is_closed()) else { return };
            match command {
                Command::Keep => self.keep().await,
                Command::Admit(_) => {}
                Command::Echo { to, echo } => self.datagram(&to, Datagram::Echo(echo)),
                Command::Ask { to, ask } => self.datagram(&to, Datagram::Ask(ask)),
                Command::Tell(change) => self.changed(&change.life, &change.verdict, &change),
                Command::Place => {
                    let mut state = self.state.borrow_mut();
                    let candidates = state.membership.candidates();
                    let placed = place(state.placement.as_ref(), &candidates, &Rules::default(), self.epoch);
                    state.placement = Some(placed.placement);
                    drop(state);
                    self.tell_members();
                }
                Command::Doubt { .. } => {
                    let says = ask_lease(&self.node, LeaseAsk::See, Duration::from_millis(400)).await;
                    if let Some(holder) = says.and_then(|says| says.holder)
                        && holder.epoch != self.epoch
                    {
                        self.close();
                    }
                }
            }
        }
    }

    async fn keep(&self) {
        while !self.is_closed() {
            let list = self.state.borrow().membership.list();
            let ask = LeaseAsk::Keep(self.epoch, list);
            match ask_lease(&self.node, ask, Duration::from_millis(400)).await {
                Some(says) if says.done => return,
                Some(_) => self.close(),
                None => self.node.world.sleep(Duration::from_millis(100)).await,
            }
        }
    }

    fn datagram(&self, to: &NodeName, datagram: Datagram) {
        if let Some(to) = self.node.world.index_of(to) {
            tell(&self.node, to, datagram);
        }
    }

    fn changed(self: &Rc<Self>, life: &Life, verdict: &Verdict, change: &membership::Change) {
        self.node.world.note(|| format!("{}: {change}", self.node.name()));
        match verdict {
            Verdict::Gone(_) | Verdict::ForGood(_) => {
                self.node.world.count("node taken for gone");
                self.ended(&life.node, life.incarnation);
            }
            Verdict::Replaced { was } => self.ended(&life.node, *was),
            Verdict::CutOff { .. } => self.node.world.count("node taken for cut off"),
            Verdict::Joined | Verdict::Restarted { .. } | Verdict::Suspect(_) | Verdict::Back { .. } => {}
        }
        self.tell_members();
    }

    /// Ends a life: frees its leases, and knows its files only from the nodes that keep copies of them.
    fn ended(&self, node: &NodeName, life: Incarnation) {
        let mut state = self.state.borrow_mut();
        state.leases.gone(node);
        state.told_names.remove(&life);
        let kept = state.kept.values().filter(|state| home_of(state) == Some(life));
        let states: Vec<_> = kept.cloned().collect();
        drop(state);
        let mut tree = self.node.memory.tree.borrow_mut();
        // A removed file does not come back.
        let states = states.iter().filter(|told| !tree.is_dropped(told)).cloned().collect::<Vec<_>>();
        for told in states {
            take_if_free(&mut tree, &told, life);
        }
        drop(tree);
        self.books.borrow_mut().end_fates(life);
        self.node.world.truth.borrow_mut().given_up(life);
    }

    pub(crate) fn members(&self) -> Members {
        let state = self.state.borrow();
        let partners = state.placement.as_ref().map(Placement::partners).unwrap_or_default();
        let member = |member: &membership::Member| Member {
            life: NodeLife { node: member.life.node.clone(), incarnation: member.life.incarnation },
            address: member.address.clone(),
            labels: BTreeMap::new(),
            gone: matches!(member.standing, Standing::Gone { .. }),
            partners: partners.get(&member.life.node).copied().flatten().cloned().into_iter().collect(),
            // Only people read this field.
            standing: wire::Standing::default(),
            since_ms: 0,
            why: String::new(),
        };
        let members = state.membership.members().map(member).collect();
        let placement = PlacementVersion::default();
        Members { epoch: self.epoch, number: state.number, placement, members }
    }

    fn tell_members(self: &Rc<Self>) {
        self.state.borrow_mut().number += 1;
        let members = self.members();
        // The whole list is sent each time. The difference of two lists has tests of its own, in `protocol::cluster::members`.
        let change = members.since(&Members::default());
        self.node.take_members(members.clone());
        for member in
            members.members.iter().filter(|member| !member.gone && member.life != self.node.memory.life)
        {
            let Some(to) = self.node.world.index_of(&member.life.node) else { continue };
            let (node, message) = (Rc::clone(&self.node), ToNode::Members(change.clone()));
            self.node.run(|_| async move {
                let _told: Result<(), Away> = node.ask_node(to, &message, NODE_DEADLINE).await;
            });
        }
    }

    pub(crate) fn check_member(&self, from: &From) -> Result<(), Refused> {
        let state = self.state.borrow();
        let current = state.membership.member(&from.life.node).is_some_and(|member| {
            member.life.incarnation == from.life.incarnation
                && member.life.start == from.start
                && !matches!(member.standing, Standing::Gone { .. } | Standing::Awaited)
        });
        if current { Ok(()) } else { Err(Refused::Fenced(format!("{} is no member: join first", from.life))) }
    }

    pub(crate) fn beat(self: &Rc<Self>, beat: Beat) {
        let from = beat.from.node.clone();
        if let Err(refusal) = self.step(Event::Beat(beat)) {
            self.datagram(&from, Datagram::Refused(refusal));
        }
    }

    pub(crate) fn heard(self: &Rc<Self>, heard: Heard) {
        // A late answer is refused, and has no effect.
        let _refused = self.step(Event::Heard(heard));
    }

    pub(crate) async fn join(self: &Rc<Self>, from: &From, join: Join) -> Result<Joined, Refused> {
        let NodeLife { node, incarnation } = join.life.clone();
        let life = Life { node: node.clone(), incarnation, start: join.start };
        let before = self.state.borrow().membership.member(&node).map(|member| member.life.clone());
        let Join { address, epoch, .. } = join;
        let event =
            Event::Join(membership::Join { from: life.clone(), epoch, address, labels: Labels::default() });
        self.step(event).map_err(|refusal| Refused::Fenced(refusal.to_string()))?;
        {
            let mut state = self.state.borrow_mut();
            if before.is_none_or(|before| before.start != life.start) {
                state.published.remove(&from.life);
            }
            state.leases.gone(&node);
            state.told_copies.remove(&incarnation);
            state.told_names.remove(&incarnation);
        }
        // The join has no effect before it is durable.
        Rc::clone(self).carry_out().await;
        let published = self.state.borrow().published.get(&from.life).copied();
        let coordinator = self.node.memory.life.node.clone();
        let admit = Admit { epoch: self.epoch, to: life, coordinator, interval_ms: 0 };
        let members = EncodedMembers::of(&self.members()).expect("a small list");
        Ok(Joined { admit, members, published, states: false, alone: Vec::new() })
    }

    /// Lists, for each member, whether its names and copies are known completely.
    pub(crate) fn silent(&self) -> String {
        let state = self.state.borrow();
        let standing = |member: &membership::Member| {
            let life = &member.life.incarnation;
            let (names, copies) = (state.told_names.contains(life), state.told_copies.contains(life));
            format!("{} {:?} names {names} copies {copies}; ", member.life.node, member.standing)
        };
        let members: String = state.membership.members().map(standing).collect();
        format!("Tier-3 listed {}; {members}", state.is_tier3_listed)
    }

    /// Whether every name is known, so that an unknown name does not exist.
    pub(crate) fn knows_all(&self) -> bool {
        let state = self.state.borrow();
        state.is_tier3_listed
            && state.membership.unreported().next().is_none()
            && state.membership.members().all(|member| {
                let life = &member.life.incarnation;
                matches!(member.standing, Standing::Gone { .. })
                    || state.told_names.contains(life) && state.told_copies.contains(life)
            })
    }

    pub(crate) fn is_gone(&self, life: Incarnation) -> bool {
        let state = self.state.borrow();
        let mut members = state.membership.members();
        !members.any(|member| {
            member.life.incarnation == life && !matches!(member.standing, Standing::Gone { .. })
        })
    }
}

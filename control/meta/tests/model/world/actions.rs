//! The actions of a cluster, and their effects.
//!
//! Owns: the choice and the effect. Does not own: what is right (`ghost`).

use super::{Action, Body, Bounds, Link, Op, Trouble, World, name_of};
use std::sync::Arc;
use tidemark_meta::coordinator::{CALL_WAITS_MAX, Event};
use tidemark_meta::key::Key;
use tidemark_meta::message::ToCoordinator;
use tidemark_meta::store::Backup;
use tidemark_meta::value::Value;
use tidemark_protocol::key::NodeLife;

impl World {
    /// Lists every action that can happen now.
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

    /// Does an action; returns false if it has no effect.
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

    /// Compacts the store up to now, even if a standby still follows older history.
    pub(crate) fn forget_history(&mut self) {
        let revision = self.store.revision();
        self.store.compact(revision);
    }

    /// Returns the store's present content.
    pub(crate) fn backup(&self) -> Backup {
        self.store.backup()
    }

    /// Restores an older content, as an operator may, without notice to any node.
    pub(crate) fn restore(&mut self, backup: &Backup) {
        self.store.restore(backup);
        self.restored = true;
    }

    /// Writes off a node that was declared gone, with its unpublished changes.
    pub(crate) fn write_off(&mut self, node: usize) {
        self.event(0, Event::WrittenOff(name_of(node)));
    }

    /// Returns the number of removed names whose tombstone is kept.
    pub(crate) fn tombstones(&self) -> usize {
        self.coordinators[0].state().tombstones().count()
    }

    /// Brings the standby's copy forward.
    pub(crate) fn follow(&mut self) {
        self.event(1, Event::Tick);
    }

    /// Ends all faults, and runs the world until nothing moves.
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

    pub(super) fn leaders(&self) -> Vec<usize> {
        (0..2).filter(|at| self.coordinators[*at].leads()).collect()
    }
}

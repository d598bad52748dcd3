//! The coordinator: the one writer.
//!
//! Owns: the role (`role`), transactions (`append`), look-ups (`looks`), members (`members`), and which event leads to which
//! command. Does not own: when a node is declared gone or a standby takes over (detection decides), connections, clocks.
//!
//! Each event is one call of [`Coordinator::step`] with the time since some fixed moment; commands are returned, not performed.
//! At most one request of each [`Lane`] is under way at a time.

mod append;
mod copy;
mod looks;
mod members;
mod role;

pub use copy::{FOLLOW_TRANSACTIONS, PAGE_KEYS};
pub use looks::CALL_WAITS_MAX;
pub use looks::LOOKS_PER_NODE_MAX;
pub use members::SWEPT_AT_ONCE_MAX;

use crate::message::{Asker, Stamp, ToCoordinator, ToNode};
use crate::rules::Rules;
use crate::state::{Need, State};
use crate::store::{Request, Response, Revision};
use append::{Append, Waiting};
use copy::Copy;
use looks::Looking;
use members::Membership;
use role::Electing;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::id::{Epoch, Incarnation, NodeName};
use tidemark_protocol::key::NodeLife;

/// An event for a coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Take the role, whether it is free or its holder was declared gone.
    TakeOver,
    Message {
        from: NodeName,
        stamp: Stamp,
        message: ToCoordinator,
    },
    Stored(Lane, Response),
    /// The life of a node is declared gone.
    Gone(NodeLife),
    /// A node that was declared gone will not come back: its unpublished changes are lost.
    WrittenOff(NodeName),
    /// Time has passed: questions without an answer are sent again, and calls that waited too long are refused.
    Tick,
    /// Remove tombstones that no node needs.
    Sweep,
}

/// A command to the coordinator's host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    Store(Lane, Request),
    Send {
        to: NodeName,
        stamp: Stamp,
        message: ToNode,
    },
    /// Stop serving, for this reason.
    Stop(Why),
}

/// The purpose of a store request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    Role,
    Append,
    Confirm,
}

/// The reason for which a coordinator stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Why {
    #[error(
        "the store went back: it holds transaction {found} of era {found_era}, and {known} of era {known_era} was seen; \
         run `ckptctl recover --from-nodes`"
    )]
    WentBack { known_era: u64, known: u64, found_era: u64, found: u64 },
    #[error("the store refused a transaction although this node is elected and nothing else has written")]
    Inconsistent,
}

/// A candidate, and the coordinator while it is elected.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Coordinator {
    me: NodeLife,
    address: String,
    rules: Rules,
    /// The greatest known epoch: of an election, of a node, or of Tier-3.
    epoch: Epoch,
    copy: Copy,
    phase: Phase,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Phase {
    Standby { asked: bool },
    Electing(Electing),
    Leading(Box<Leading>),
    Stopped(Why),
}

/// The pending work of a coordinator that is elected.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Leading {
    election: Revision,
    epoch: Epoch,
    /// Waiting calls, sorted by arrival.
    waiting: Vec<Waiting>,
    looking: Vec<Looking>,
    membership: Vec<Membership>,
    append: Option<Append>,
    /// Set while a read is pending: whether a node had shown before that it knows more than the copy.
    confirming: Option<bool>,
    /// Whether a node knows more than the copy: another is elected, or the store went back.
    suspect: bool,
}

impl Coordinator {
    /// Makes a standby. `epoch`: the greatest that Tier-3 knows.
    #[must_use]
    pub fn new(me: NodeLife, address: String, epoch: Epoch, rules: Rules) -> Self {
        let phase = Phase::Standby { asked: false };
        Self { me, address, rules, epoch, copy: Copy::default(), phase }
    }

    /// Returns whether this node believes to be elected.
    #[must_use]
    pub fn leads(&self) -> bool {
        matches!(self.phase, Phase::Leading(_))
    }

    /// Returns the state as of this coordinator's copy.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.copy.state
    }

    /// Returns the revision of the copy; `None` before anything was loaded.
    #[must_use]
    pub fn revision(&self) -> Option<Revision> {
        self.copy.revision
    }

    /// Returns whether a call or a look-up waits for another node.
    #[must_use]
    pub fn waits(&self) -> bool {
        let Phase::Leading(leading) = &self.phase else { return false };
        !leading.waiting.is_empty() || !leading.looking.is_empty()
    }

    /// Takes one event at the time `now`.
    pub fn step(&mut self, now: Duration, event: Event) -> Vec<Command> {
        let mut out = vec![];
        match event {
            Event::TakeOver => self.take_over(&mut out),
            Event::Stored(Lane::Role, response) => self.role_stored(response, &mut out),
            Event::Stored(Lane::Append, response) => self.append_stored(response, &mut out),
            Event::Stored(Lane::Confirm, response) => self.confirmed(response, &mut out),
            Event::Message { from, stamp, message } => self.message(now, &from, stamp, message, &mut out),
            Event::Gone(life) => self.want(Membership::Gone(life)),
            Event::WrittenOff(node) => self.want(Membership::WriteOff(node)),
            Event::Sweep => self.want(Membership::Sweep),
            Event::Tick => self.tick(&mut out),
        }
        self.advance(now, &mut out);
        out
    }

    fn tick(&mut self, out: &mut Vec<Command>) {
        match &mut self.phase {
            Phase::Standby { .. } => self.follow(out),
            Phase::Leading(leading) => {
                for waiting in &mut leading.waiting {
                    waiting.asked.clear();
                }
                for looking in &mut leading.looking {
                    looking.asked.clear();
                }
            }
            Phase::Electing(_) | Phase::Stopped(_) => {}
        }
    }

    fn message(
        &mut self,
        now: Duration,
        from: &NodeName,
        stamp: Stamp,
        message: ToCoordinator,
        out: &mut Vec<Command>,
    ) {
        let Phase::Leading(leading) = &mut self.phase else {
            self.epoch = self.epoch.max(stamp.epoch);
            return;
        };
        let state = &self.copy.state;
        let other_era = stamp.era.is_some() && stamp.era != state.era();
        if stamp.epoch > leading.epoch || stamp.tick > state.tick() || other_era {
            leading.suspect |= !other_era;
            // The node learns from the stamp which era and epoch speak here.
            self.send(from.clone(), ToNode::Lead, out);
            return;
        }
        match message {
            ToCoordinator::Join { life, replaces } => {
                self.want(Membership::Join { node: from.clone(), life, replaces });
            }
            ToCoordinator::Publish { life, first, calls } => self.published(from, life, first, calls, out),
            ToCoordinator::Look { life, number, after, place } => {
                self.look(now, from, life, number, after, place, out);
            }
            ToCoordinator::Known { life, asker, file, last } => {
                if self.copy.state.node_of(life) == Some(from) {
                    self.known(life, asker, file, last);
                }
            }
        }
    }

    /// Notes the calls that a life knew when it was asked.
    fn known(
        &mut self,
        life: Incarnation,
        asker: Asker,
        file: Option<tidemark_protocol::id::FileId>,
        last: u64,
    ) {
        let Phase::Leading(leading) = &mut self.phase else { return };
        match asker {
            Asker::Call { life: caller, number } => {
                let waiting = leading.waiting.iter_mut();
                for waiting in waiting.filter(|waiting| waiting.life == caller && waiting.first == number) {
                    let need = file.map(|file| Need::Publish { life, file });
                    if let Some(need) = need.filter(|need| waiting.needs.contains(need)) {
                        waiting.known.insert(need, last);
                    }
                }
            }
            Asker::Look { life: caller, number } => {
                let looking = leading.looking.iter_mut();
                for looking in looking.filter(|looking| looking.life == caller && looking.number == number) {
                    if looking.needs.contains(&life) {
                        looking.known.insert(life, last);
                    }
                }
            }
        }
    }

    /// Does everything that is possible now: a transaction if none is pending, questions, answers to look-ups.
    fn advance(&mut self, now: Duration, out: &mut Vec<Command>) {
        self.append(now, out);
        self.answer_looks(now, out);
        self.ask(out);
        self.confirm(out);
    }

    /// Asks lives for the acts that calls and look-ups wait for.
    fn ask(&mut self, out: &mut Vec<Command>) {
        let stamp = self.stamp();
        let Phase::Leading(leading) = &mut self.phase else { return };
        let state = Arc::clone(&self.copy.state);
        let mut send = |life: Incarnation, message: ToNode| {
            if let Some(to) = state.node_of(life) {
                out.push(Command::Send { to: to.clone(), stamp, message });
            }
        };
        for waiting in &mut leading.waiting {
            let asker = Asker::Call { life: waiting.life, number: waiting.first };
            for need in waiting.needs.difference(&waiting.asked).copied().collect::<BTreeSet<_>>() {
                waiting.asked.insert(need);
                match need {
                    Need::GiveBack { life, id, version, force } => {
                        send(life, ToNode::GiveBack { life, id, version, force });
                    }
                    Need::Publish { life, file } => {
                        if !waiting.known.contains_key(&need) {
                            send(life, ToNode::Publish { life, asker, file: Some(file) });
                        }
                    }
                }
            }
        }
        for looking in &mut leading.looking {
            let asker = Asker::Look { life: looking.life, number: looking.number };
            for life in looking.needs.difference(&looking.asked).copied().collect::<BTreeSet<_>>() {
                looking.asked.insert(life);
                if !looking.known.contains_key(&life) {
                    send(life, ToNode::Publish { life, asker, file: None });
                }
            }
        }
    }

    fn stamp(&self) -> Stamp {
        let epoch = match &self.phase {
            Phase::Leading(leading) => leading.epoch,
            _ => Epoch(0),
        };
        Stamp { era: self.copy.state.era(), epoch, tick: self.copy.state.tick() }
    }

    fn send(&self, to: NodeName, message: ToNode, out: &mut Vec<Command>) {
        out.push(Command::Send { to, stamp: self.stamp(), message });
    }

    /// Steps down because another is elected. The nodes send their waiting calls again.
    fn step_down(&mut self) {
        self.phase = Phase::Standby { asked: false };
    }

    fn stop(&mut self, why: Why, out: &mut Vec<Command>) {
        self.phase = Phase::Stopped(why);
        out.push(Command::Stop(why));
    }
}

//! Membership: which nodes are members, which are alive, and how sure that is. The coordinator keeps this state of every node.
//!
//! ```text
//!              3 beats missed,                 2 neighbours asked,
//!              connection died                 none heard it in 300 ms            for_good_ms
//! alive ─────────────────────────► suspect ─────────────────────────► gone ─────────────────► no member
//!   ▲                                 │ one heard it                    ▲     or an operator
//!   └── a beat, a join ── cut off ◄───┘     ── cutoff_ms ───────────────┘
//! ```
//!
//! Owns: joins, beats, verdicts with their reasons, and which messages are refused. Does not own: sending and timers (the control plane's
//! loop), the node's own side (`view`), partners (`placement`).
//!
//! Time is an argument: milliseconds of the coordinator's monotonic clock. No other clock is ever compared with it.

mod inquiry;
mod refuse;
mod verdict;
mod view;
mod wire;

pub use inquiry::Inquiry;
pub use refuse::{Cure, Refusal};
pub use verdict::{Change, Command, Farewell, Proof, Suspicion, Verdict};
pub use view::{Coordinator, View};
pub use wire::{
    ADDRESS_BYTES_MAX, Admit, Ask, Beat, Echo, Heard, JOIN_BYTES_MAX, Join, Life, MESSAGE_BYTES_MAX,
};

use crate::id::{Epoch, Incarnation, NodeName, StartId};
use crate::label::Labels;
use crate::placement::{Candidate, MEMBERS_MAX};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

/// Interval at which the owner calls with [`Event::Tick`]. A verdict is late by this much at most.
pub const TICK_MS: u64 = 50;
/// Interval between two beats of a node: a third of the time that a verdict may take.
pub const BEAT_MS: u64 = 150;
/// Beats per second that a part of one core of a coordinator handles while beats are calls on control links, at some 30 µs each (bench
/// `catalog`). If there are more nodes, each beats at a longer interval.
pub const BEATS_PER_SECOND_MAX: u64 = 10_000;
/// Missed beats after which a node is suspect: a lost datagram, or two, means nothing.
pub const SUSPECT_BEATS: u64 = 3;
/// Missed beats after which a node is gone if no other node could be asked about it.
pub const ALONE_BEATS: u64 = 5;
/// Number of neighbours that are asked: one of them may be dying too.
pub const NEIGHBOURS: usize = 2;
/// Time that the neighbours have to try and to answer.
pub const ANSWER_MS: u64 = 300;
/// Delay between two calls, beyond the tick, after which the coordinator itself counts as having been away. As long as the shortest beat.
pub const LATE_MS: u64 = 150;
/// Time for which neighbours that did not answer are asked again: a busy one has had ten questions by then.
pub const ASK_FOR_MS: u64 = 3_000;
/// Time for which a new coordinator waits for earlier members to join it: as long as a node may take to notice it.
pub const RESTORE_MS: u64 = 3_000;
/// Interval at which neighbours are asked again about a node that is cut off, so that its death is noticed.
pub const REASK_MS: u64 = 1_000;
/// Number of a name's former lives and starts that are remembered.
const OLD_MAX: usize = 8;

/// Returns the interval between two beats, given the number of nodes.
#[must_use]
pub fn interval_ms(nodes: usize) -> u64 {
    (nodes as u64).saturating_mul(1000).div_ceil(BEATS_PER_SECOND_MAX).max(BEAT_MS)
}

/// Times after which the coordinator declares a node gone, and removes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Time after which a node counts as gone if others hear it and the coordinator does not.
    pub cutoff_ms: u64,
    /// Time after which a node that is surely gone stops being a member, and its copies are made again. If it is shorter, saves are
    /// replicated again sooner. If it is longer, a node that only restarts is still a member, and nothing is copied for it.
    pub for_good_ms: u64,
}

impl Default for Patience {
    fn default() -> Self {
        Self { cutoff_ms: 30_000, for_good_ms: 60_000 }
    }
}

/// An event for the membership.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Nothing but the passage of time.
    Tick,
    Join(Join),
    Beat(Beat),
    Heard(Heard),
    /// The connection of exactly that life died.
    Disconnected(Life),
    /// An operator removes a node.
    Forget {
        node: NodeName,
        by: String,
    },
    /// A node leaves, having handed over what it held.
    Leave(Life),
}

/// The standing of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// Listed from before; the node has not joined this coordinator yet.
    Awaited,
    Alive,
    Suspect(Inquiry),
    CutOff {
        since_ms: u64,
        heard_by: NodeName,
        confirmed_ms: u64,
        /// The open question whether others still hear the node.
        inquiry: Option<Inquiry>,
    },
    Gone {
        since_ms: u64,
        proof: Proof,
    },
}

/// A node, as the coordinator knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub life: Life,
    pub address: String,
    pub labels: Labels,
    pub standing: Standing,
    /// The last accepted beat.
    pub beat: Option<Beat>,
    /// Whether the node has joined this coordinator.
    has_come: bool,
    /// Whether the node was the coordinator before. The lease has run out: no one had heard from it for a whole term when this term began.
    lost_its_seat: bool,
    /// Time when the node was last heard, on the clock that stands still while the coordinator does.
    heard_ms: u64,
    /// The longer of the last two intervals that the node was told: it may not have heard the last.
    interval_ms: u64,
    /// The last interval that the node was told.
    told_interval_ms: u64,
    old_incarnations: VecDeque<Incarnation>,
    old_starts: VecDeque<StartId>,
}

/// A member as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    #[serde(flatten)]
    pub life: Life,
    pub address: String,
    pub labels: Labels,
}

/// All members, as they are stored beside the lease. About 150 bytes each as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemberList {
    /// Epoch of the coordinator that wrote the list.
    pub epoch: Epoch,
    /// Name of that coordinator; none in a list of an older build, and if the coordinator is no node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<NodeName>,
    /// At most [`MEMBERS_MAX`] are read.
    pub members: Vec<Listed>,
}

/// The members of one coordinator's term.
#[derive(Debug)]
pub struct Membership {
    epoch: Epoch,
    /// The coordinator's name, which is also the name of the node it is embedded in, if any. The coordinator never judges its own node.
    coordinator: NodeName,
    is_embedded: bool,
    patience: Patience,
    members: BTreeMap<NodeName, Member>,
    questions: u64,
    /// Time of the last call.
    last_ms: u64,
    /// Time for which the coordinator was away, in all. Beats that it did not hear then do not count as missed.
    slept_ms: u64,
    /// Time before which no verdict is given: after a sleep every node has a round to be heard.
    withheld_until_ms: u64,
}

impl Membership {
    /// Begins a term with the stored members, each awaited for [`RESTORE_MS`]. The former coordinator is awaited only until other nodes
    /// have joined that can be asked about it. `epoch` is the lease's.
    #[must_use]
    pub fn new(
        epoch: Epoch,
        coordinator: NodeName,
        is_embedded: bool,
        stored: MemberList,
        patience: Patience,
        now_ms: u64,
    ) -> Self {
        let interval_ms = interval_ms(stored.members.len());
        let last = stored.coordinator;
        let member = |listed: Listed| {
            let Listed { life, address, labels } = listed;
            let member = Member {
                lost_its_seat: last.as_ref() == Some(&life.node),
                life,
                address,
                labels,
                standing: Standing::Awaited,
                beat: None,
                has_come: false,
                heard_ms: now_ms,
                interval_ms,
                told_interval_ms: interval_ms,
                old_incarnations: VecDeque::new(),
                old_starts: VecDeque::new(),
            };
            (member.life.node.clone(), member)
        };
        Self {
            epoch,
            coordinator,
            is_embedded,
            patience,
            members: stored.members.into_iter().take(MEMBERS_MAX).map(member).collect(),
            questions: 0,
            last_ms: now_ms,
            slept_ms: 0,
            withheld_until_ms: 0,
        }
    }

    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns every member, by name.
    pub fn members(&self) -> impl ExactSizeIterator<Item = &Member> {
        self.members.values()
    }

    #[must_use]
    pub fn member(&self, node: &NodeName) -> Option<&Member> {
        self.members.get(node)
    }

    /// Returns for how long a member has not been heard, on the clock that stands still while the coordinator does.
    #[must_use]
    pub fn silent_ms(&self, node: &NodeName) -> Option<u64> {
        let member = self.members.get(node)?;
        Some((self.last_ms - self.slept_ms).saturating_sub(member.heard_ms))
    }

    /// Returns earlier members that have neither joined nor been declared gone. While there are any, the coordinator does not know all
    /// names (P8).
    pub fn unreported(&self) -> impl Iterator<Item = &NodeName> {
        let open = |member: &&Member| !member.has_come && !matches!(member.standing, Standing::Gone { .. });
        self.members.values().filter(open).map(|member| &member.life.node)
    }

    /// Returns the list to store on [`Command::Keep`].
    #[must_use]
    pub fn list(&self) -> MemberList {
        let listed = |member: &Member| Listed {
            life: member.life.clone(),
            address: member.address.clone(),
            labels: member.labels.clone(),
        };
        MemberList {
            epoch: self.epoch,
            coordinator: self.is_embedded.then(|| self.coordinator.clone()),
            members: self.members.values().map(listed).collect(),
        }
    }

    /// Returns the nodes to place: every member. A node that is gone keeps its place until it is gone for good.
    #[must_use]
    pub fn candidates(&self) -> Vec<Candidate> {
        let one =
            |member: &Member| Candidate { name: member.life.node.clone(), labels: member.labels.clone() };
        self.members.values().map(one).collect()
    }

    /// Applies an event at `now_ms`, and adds the consequences to `todo`. A repeated message changes nothing.
    ///
    /// # Errors
    /// When the message is refused: its sender is to be told why. The commands in `todo` are to be carried out all the same.
    pub fn step(&mut self, event: Event, now_ms: u64, todo: &mut Vec<Command>) -> Result<(), Refusal> {
        let now_ms = self.awake(now_ms);
        match event {
            Event::Tick => {
                self.judge(now_ms, todo);
                Ok(())
            }
            Event::Join(join) => self.join(join, now_ms, todo),
            Event::Beat(beat) => self.beat(beat, now_ms, todo),
            Event::Heard(heard) => self.heard(&heard, now_ms, todo),
            Event::Disconnected(life) => {
                let is_up = |member: &&Member| matches!(member.standing, Standing::Alive | Standing::Awaited);
                let is_current =
                    self.members.get(&life.node).filter(is_up).is_some_and(|member| member.life == life);
                if is_current && !self.is_own(&life.node) {
                    self.suspect(&life.node, Suspicion::ConnectionDied, now_ms, todo);
                }
                Ok(())
            }
            Event::Forget { node, by } => {
                let farewell = Farewell::Operator { by };
                self.remove(&node, farewell, todo).ok_or(Refusal::Stranger { node })
            }
            Event::Leave(life) => {
                self.known(&life)?;
                let node = life.node;
                self.remove(&node, Farewell::Left, todo).ok_or(Refusal::Stranger { node })
            }
        }
    }

    /// Returns the time without the periods in which the coordinator did not run: messages that it could not receive were not missed.
    fn awake(&mut self, now_ms: u64) -> u64 {
        let now_ms = now_ms.max(self.last_ms);
        let away_ms = now_ms - self.last_ms;
        self.last_ms = now_ms;
        if away_ms > TICK_MS + LATE_MS {
            self.slept_ms = self.slept_ms.saturating_add(away_ms - TICK_MS);
            // Messages sent meanwhile may have been dropped from their queue: each node has the full time again.
            let round_ms = SUSPECT_BEATS * interval_ms(self.members.len());
            self.withheld_until_ms = now_ms - self.slept_ms + round_ms;
        }
        now_ms - self.slept_ms
    }

    fn is_own(&self, node: &NodeName) -> bool {
        self.is_embedded && *node == self.coordinator
    }

    /// Checks that a message is of this epoch.
    fn check_epoch(&self, by: &NodeName, theirs: Epoch, todo: &mut Vec<Command>) -> Result<(), Refusal> {
        let ours = self.epoch;
        if theirs > ours {
            todo.push(Command::Doubt { by: by.clone(), theirs });
            return Err(Refusal::Superseded { theirs, ours });
        }
        if theirs < ours { Err(Refusal::OldEpoch { theirs, ours }) } else { Ok(()) }
    }

    /// Returns the member if this is its present life.
    fn known(&self, life: &Life) -> Result<&Member, Refusal> {
        let node = &life.node;
        let stranger = || Refusal::Stranger { node: node.clone() };
        let member = self.members.get(node).ok_or_else(stranger)?;
        if member.old_incarnations.contains(&life.incarnation) {
            return Err(Refusal::replaced(node, life.incarnation));
        }
        if member.old_starts.contains(&life.start) {
            return Err(Refusal::old_start(node, life.start));
        }
        if member.life == *life { Ok(member) } else { Err(stranger()) }
    }

    fn join(&mut self, join: Join, now_ms: u64, todo: &mut Vec<Command>) -> Result<(), Refusal> {
        let Join { from: life, epoch, address, labels } = join;
        if address.len() > ADDRESS_BYTES_MAX {
            return Err(Refusal::Address { found: address.len(), limit: ADDRESS_BYTES_MAX });
        }
        // An older epoch is the reason for a join.
        if epoch > self.epoch {
            self.check_epoch(&life.node, epoch, todo)?;
        }
        let interval_ms = interval_ms(self.members.len() + 1);
        let admit =
            Admit { epoch: self.epoch, to: life.clone(), coordinator: self.coordinator.clone(), interval_ms };
        let is_own = self.is_own(&life.node);
        let Some(member) = self.members.get_mut(&life.node) else {
            let (members, limit) = (self.members.len(), MEMBERS_MAX);
            if members >= limit {
                return Err(Refusal::Full { members, limit });
            }
            let member = Member {
                life: life.clone(),
                address,
                labels,
                standing: Standing::Alive,
                beat: None,
                has_come: true,
                lost_its_seat: false,
                heard_ms: now_ms,
                interval_ms,
                told_interval_ms: interval_ms,
                old_incarnations: VecDeque::new(),
                old_starts: VecDeque::new(),
            };
            self.members.insert(life.node.clone(), member);
            todo.extend([Command::Keep, Command::Admit(admit)]);
            todo.extend([Command::Tell(Change { life, verdict: Verdict::Joined }), Command::Place]);
            return Ok(());
        };
        // The coordinator's node answers at this address now, so an earlier life of it does not.
        let is_awaited = matches!(member.standing, Standing::Awaited);
        let succeeds_itself = is_own && is_awaited && member.address == address;
        let verdict = member.welcome(&life, succeeds_itself, now_ms)?;
        let is_listed = member.life == life && member.address == address && member.labels == labels;
        let is_placed = member.labels == labels;
        (member.life, member.address, member.labels) = (life.clone(), address, labels);
        (member.standing, member.heard_ms) = (Standing::Alive, now_ms);
        (member.interval_ms, member.told_interval_ms) = (interval_ms, interval_ms);
        member.has_come = true;
        if !is_listed {
            todo.push(Command::Keep);
        }
        todo.push(Command::Admit(admit));
        todo.extend(verdict.map(|verdict| Command::Tell(Change { life, verdict })));
        if !is_placed {
            todo.push(Command::Place);
        }
        Ok(())
    }

    /// Returns the answer to the beat of that number.
    #[must_use]
    pub fn echo(&self, number: u64) -> Echo {
        let interval_ms = interval_ms(self.members.len());
        Echo { epoch: self.epoch, coordinator: self.coordinator.clone(), number, interval_ms }
    }

    fn beat(&mut self, beat: Beat, now_ms: u64, todo: &mut Vec<Command>) -> Result<(), Refusal> {
        self.check_epoch(&beat.from.node, beat.epoch, todo)?;
        self.known(&beat.from)?;
        let node = beat.from.node.clone();
        let echo = self.echo(beat.number);
        let Some(member) = self.members.get_mut(&node) else { return Err(Refusal::Stranger { node }) };
        if let Some(ours) = member.beat.as_ref().map(|last| last.number).filter(|ours| *ours >= beat.number) {
            return Err(Refusal::OldBeat { node, theirs: beat.number, ours });
        }
        match member.standing {
            Standing::Gone { .. } => return Err(Refusal::WasGone { node }),
            Standing::Awaited => return Err(Refusal::Stranger { node }),
            Standing::Alive | Standing::Suspect(_) | Standing::CutOff { .. } => {}
        }
        member.interval_ms = member.told_interval_ms.max(echo.interval_ms);
        member.told_interval_ms = echo.interval_ms;
        todo.push(Command::Echo { to: node, echo });
        if matches!(member.standing, Standing::Suspect(_) | Standing::CutOff { .. }) {
            let verdict = Verdict::Back { after_ms: now_ms.saturating_sub(member.heard_ms) };
            todo.push(Command::Tell(Change { life: beat.from.clone(), verdict }));
        }
        (member.standing, member.heard_ms, member.beat) = (Standing::Alive, now_ms, Some(beat));
        Ok(())
    }

    fn heard(&mut self, heard: &Heard, now_ms: u64, todo: &mut Vec<Command>) -> Result<(), Refusal> {
        self.check_epoch(&heard.from.node, heard.epoch, todo)?;
        self.known(&heard.from)?;
        let closed = || Refusal::NoQuestion { node: heard.about.clone(), question: heard.question };
        let member = self.members.get_mut(&heard.about).ok_or_else(closed)?;
        let (inquiry, cut_off_ms) = match &mut member.standing {
            Standing::Suspect(inquiry) => (inquiry, None),
            Standing::CutOff { inquiry: Some(inquiry), since_ms, .. } => (inquiry, Some(*since_ms)),
            _ => return Err(closed()),
        };
        let by = &heard.from.node;
        if inquiry.question != heard.question || !inquiry.asked.contains(by) {
            return Err(closed());
        }
        if !heard.heard {
            if !inquiry.unheard.contains(by) {
                inquiry.unheard.push(by.clone());
            }
            return Ok(());
        }
        member.standing = Standing::CutOff {
            since_ms: cut_off_ms.unwrap_or(now_ms),
            heard_by: by.clone(),
            confirmed_ms: now_ms,
            inquiry: None,
        };
        if cut_off_ms.is_none() {
            let verdict = Verdict::CutOff { heard_by: by.clone() };
            todo.push(Command::Tell(Change { life: member.life.clone(), verdict }));
        }
        Ok(())
    }

    /// Judges every member once.
    fn judge(&mut self, now_ms: u64, todo: &mut Vec<Command>) {
        if now_ms < self.withheld_until_ms {
            return;
        }
        let patience = self.patience;
        let present = Present {
            two_alone: self.is_embedded
                && self.members.values().filter(|member| !member.is_surely_gone()).count() == 2,
            others: self.members.values().any(|member| self.can_answer(member)),
        };
        let due = |member: &Member| Some((member.life.node.clone(), member.due(now_ms, patience, present)?));
        // An earlier member may have the coordinator's own name and another address.
        let judged =
            self.members.values().filter(|member| !self.is_own(&member.life.node) || !member.has_come);
        for (node, due) in judged.filter_map(due).collect::<Vec<_>>() {
            match due {
                Due::Suspect(why) => self.suspect(&node, why, now_ms, todo),
                Due::Ask => {
                    let inquiry = self.ask(&node, now_ms, todo);
                    match self.members.get_mut(&node).map(|member| &mut member.standing) {
                        Some(Standing::CutOff { inquiry: open, confirmed_ms, .. }) => {
                            (*open, *confirmed_ms) = (inquiry, now_ms);
                        }
                        Some(Standing::Suspect(open)) => {
                            let asked = inquiry.unwrap_or_else(|| Inquiry::of_nobody(now_ms));
                            *open = Inquiry { began_ms: open.began_ms, ..asked };
                        }
                        _ => {}
                    }
                }
                Due::Gone(proof) => {
                    let Some(member) = self.members.get_mut(&node) else { continue };
                    member.standing = Standing::Gone { since_ms: now_ms, proof: proof.clone() };
                    let change = Change { life: member.life.clone(), verdict: Verdict::Gone(proof) };
                    todo.push(Command::Tell(change));
                }
                Due::ForGood(farewell) => {
                    let _was_there = self.remove(&node, farewell, todo);
                }
            }
        }
    }

    fn suspect(&mut self, node: &NodeName, why: Suspicion, now_ms: u64, todo: &mut Vec<Command>) {
        let Some(life) = self.members.get(node).map(|member| member.life.clone()) else { return };
        todo.push(Command::Tell(Change { life, verdict: Verdict::Suspect(why) }));
        let inquiry = self.ask(node, now_ms, todo).unwrap_or_else(|| Inquiry::of_nobody(now_ms));
        if let Some(member) = self.members.get_mut(node) {
            member.standing = Standing::Suspect(inquiry);
        }
    }

    /// Whether the member can be asked about another one.
    fn can_answer(&self, member: &Member) -> bool {
        matches!(member.standing, Standing::Alive) && !self.is_own(&member.life.node)
    }

    /// Asks the live members that follow by name.
    fn ask(&mut self, about: &NodeName, now_ms: u64, todo: &mut Vec<Command>) -> Option<Inquiry> {
        let life = self.members.get(about)?.life.clone();
        let after = self.members.range((Bound::Excluded(about.clone()), Bound::Unbounded));
        let before = self.members.range(..about.clone());
        let able = after.chain(before).filter(|(node, member)| *node != about && self.can_answer(member));
        let asked: Vec<NodeName> = able.map(|(node, _)| node.clone()).take(NEIGHBOURS).collect();
        if asked.is_empty() {
            return None;
        }
        self.questions += 1;
        let question = self.questions;
        let ask = Ask { epoch: self.epoch, question, about: life, within_ms: ANSWER_MS };
        todo.extend(asked.iter().map(|to| Command::Ask { to: to.clone(), ask: ask.clone() }));
        Some(Inquiry { question, asked, unheard: vec![], until_ms: now_ms + ANSWER_MS, began_ms: now_ms })
    }

    fn remove(&mut self, node: &NodeName, farewell: Farewell, todo: &mut Vec<Command>) -> Option<()> {
        let member = self.members.remove(node)?;
        todo.push(Command::Keep);
        todo.push(Command::Tell(Change { life: member.life, verdict: Verdict::ForGood(farewell) }));
        todo.push(Command::Place);
        Some(())
    }
}

/// Facts about the other nodes that a verdict on a member needs.
#[derive(Debug, Clone, Copy)]
struct Present {
    /// Whether the coordinator and this member are the only nodes.
    two_alone: bool,
    /// Whether another node can be asked about the member.
    others: bool,
}

/// The step that is due for a member.
enum Due {
    Suspect(Suspicion),
    Ask,
    Gone(Proof),
    ForGood(Farewell),
}

impl Member {
    /// Decides whether a life may take this place, and returns the verdict; none if the life has the place already. `is_over`: the former
    /// life is known to have ended.
    fn welcome(&mut self, life: &Life, is_over: bool, now_ms: u64) -> Result<Option<Verdict>, Refusal> {
        let node = &life.node;
        if self.old_incarnations.contains(&life.incarnation) {
            return Err(Refusal::replaced(node, life.incarnation));
        }
        let was_away =
            matches!(self.standing, Standing::Suspect(_) | Standing::CutOff { .. } | Standing::Gone { .. });
        if self.life == *life {
            let after_ms = now_ms.saturating_sub(self.heard_ms);
            return Ok(was_away.then_some(Verdict::Back { after_ms }));
        }
        let second = || Refusal::second(node, self.life.incarnation, &self.address);
        if self.life.incarnation == life.incarnation {
            if self.old_starts.contains(&life.start) {
                return Err(Refusal::old_start(node, life.start));
            }
            // A start succeeds another one only after that one has died, and its connection with it. A delayed join must not displace the
            // start that came after it.
            if matches!(self.standing, Standing::Alive) && self.missed(now_ms) < SUSPECT_BEATS {
                return Err(second());
            }
            let was = self.life.start;
            remember(&mut self.old_starts, was);
            self.beat = None;
            return Ok(Some(Verdict::Restarted { was }));
        }
        if !is_over && !matches!(self.standing, Standing::Gone { .. }) {
            return Err(second());
        }
        let was = self.life.incarnation;
        remember(&mut self.old_incarnations, was);
        self.old_starts.clear();
        self.beat = None;
        Ok(Some(Verdict::Replaced { was }))
    }

    fn is_surely_gone(&self) -> bool {
        matches!(&self.standing, Standing::Gone { proof, .. } if proof.is_certain())
    }

    /// Returns how many beats should have come since the last one.
    fn missed(&self, now_ms: u64) -> u64 {
        now_ms.saturating_sub(self.heard_ms) / self.interval_ms.max(1)
    }

    fn due(&self, now_ms: u64, patience: Patience, present: Present) -> Option<Due> {
        let silent_ms = now_ms.saturating_sub(self.heard_ms);
        let beats = self.missed(now_ms);
        match &self.standing {
            // A whole term of silence has passed already, which is longer than a living node may be silent.
            Standing::Awaited if self.lost_its_seat && present.others && beats >= SUSPECT_BEATS => {
                Some(Due::Suspect(Suspicion::LostItsSeat { waited_ms: silent_ms }))
            }
            Standing::Awaited => (silent_ms >= RESTORE_MS)
                .then_some(Due::Suspect(Suspicion::NeverCame { waited_ms: silent_ms })),
            Standing::Alive => {
                (beats >= SUSPECT_BEATS).then_some(Due::Suspect(Suspicion::Missed { beats, silent_ms }))
            }
            Standing::Suspect(inquiry) => {
                if let Some(proof) = inquiry.proof(now_ms) {
                    return Some(Due::Gone(proof));
                }
                if !inquiry.unheard.is_empty() || now_ms < inquiry.until_ms {
                    return None;
                }
                if present.others && now_ms.saturating_sub(inquiry.began_ms) < ASK_FOR_MS {
                    return Some(Due::Ask);
                }
                (beats >= ALONE_BEATS).then_some(Due::Gone(Proof::Silence {
                    beats,
                    silent_ms,
                    two_alone: present.two_alone,
                }))
            }
            Standing::CutOff { since_ms, confirmed_ms, inquiry, .. } => {
                let for_ms = now_ms.saturating_sub(*since_ms);
                if for_ms >= patience.cutoff_ms {
                    return Some(Due::Gone(Proof::CutOffTooLong { for_ms }));
                }
                if let Some(proof) = inquiry.as_ref().and_then(|inquiry| inquiry.proof(now_ms)) {
                    return Some(Due::Gone(proof));
                }
                (now_ms.saturating_sub(*confirmed_ms) >= REASK_MS).then_some(Due::Ask)
            }
            Standing::Gone { since_ms, proof } => {
                let gone_ms = now_ms.saturating_sub(*since_ms);
                let is_over = proof.is_certain() && gone_ms >= patience.for_good_ms;
                is_over.then_some(Due::ForGood(Farewell::TimeOut { gone_ms }))
            }
        }
    }
}

/// Adds a former life or start; the oldest is forgotten.
fn remember<T>(old: &mut VecDeque<T>, one: T) {
    if old.len() == OLD_MAX {
        old.pop_front();
    }
    old.push_back(one);
}

#[cfg(test)]
mod tests;

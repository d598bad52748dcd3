//! A node's reactions to the coordinator's messages.
//!
//! Owns: answers, questions and grants. Does not own: the return after a verdict (`coming_back`).

use super::{Answer, Directory, Held, Node, Notice, Output, Queued, Standing};
use crate::message::{Done, Found, Outcome, Stamp, ToCoordinator, ToNode};
use crate::refusal::Refusal;
use crate::rules::Rule;
use crate::state::Call;
use crate::value::{Inode, Kind};
use std::sync::Arc;
use tidemark_protocol::id::FileId;

impl Node {
    /// Takes one message.
    pub fn step(&mut self, stamp: Stamp, message: ToNode) -> Output {
        let mut out = Output::default();
        if !self.follow(stamp, &mut out) {
            return out;
        }
        match message {
            ToNode::Lead => {}
            ToNode::Joined { life, before } if life == self.life => self.joined(before, &mut out),
            ToNode::NotJoined { life, present } if life == self.life => {
                if present == life && matches!(self.standing, Standing::Joining { .. }) {
                    // Declared gone before this node learned that it was admitted.
                    self.standing = Standing::Over;
                    out.notices.push(Notice::Over);
                } else if let Standing::Joining { replaces, sent } = &mut self.standing {
                    (*replaces, *sent) = (Some(present), false);
                }
            }
            ToNode::Over { life } if life == self.life && self.standing == Standing::Member => {
                self.standing = Standing::Over;
                out.notices.push(Notice::Over);
            }
            ToNode::Taken { life, first, number, outcomes } if life == self.life => {
                self.taken(first, number, outcomes, &mut out);
            }
            ToNode::Looked { life, number, found } if life == self.life => {
                self.looked(super::Ticket(number), found, &mut out);
            }
            ToNode::Publish { life, asker, file } if life == self.life => {
                // Whether the file is held now or not: it may be again before the change is made for which this is asked.
                self.shared.extend(file);
                let last = self.last_number();
                out.messages.push(ToCoordinator::Known { life, asker, file, last });
            }
            ToNode::GiveBack { life, id, version, force } if life == self.life => {
                self.give_back(id, version, force);
            }
            // The message belongs to an earlier life.
            _ => {}
        }
        out
    }

    /// Follows the coordinator that speaks; returns false if the message does not count.
    fn follow(&mut self, stamp: Stamp, out: &mut Output) -> bool {
        if self.standing == Standing::Stopped || stamp.epoch < self.stamp.epoch {
            return false;
        }
        let newer = stamp.epoch > self.stamp.epoch;
        let other_era = self.stamp.era.is_some() && stamp.era != self.stamp.era;
        // A new coordinator has everything that any earlier coordinator has answered for.
        if other_era || newer && stamp.tick < self.stamp.tick {
            self.stop(out);
            return false;
        }
        if newer {
            self.again();
        }
        self.stamp = Stamp { tick: self.stamp.tick.max(stamp.tick), ..stamp };
        true
    }

    fn stop(&mut self, out: &mut Output) {
        self.standing = Standing::Stopped;
        out.notices.push(Notice::WentBack);
    }

    fn looked(&mut self, ticket: super::Ticket, found: Found, out: &mut Output) {
        if self.looking.remove(&ticket).is_some() {
            out.notices.push(Notice::Looked(ticket, found));
        }
    }

    fn give_back(&mut self, id: FileId, version: u64, force: bool) {
        if self.directories.remove(&id).is_some() {
            self.push(None, Call::GiveBack { id, version });
            return;
        }
        if let Some(held) = self.held.get(&id) {
            let (version, writers) = (held.inode.version, held.writers);
            if writers > 0 && !force && self.rules.has(Rule::WritersBlock) {
                self.wanted.insert(id, false);
                return;
            }
            if writers > 0 {
                *self.stale.entry(id).or_default() += writers;
            }
            self.give_back_file(id, version);
            return;
        }
        if self.is_take_queued(id) {
            // The file seems to be taken, and the answer is on its way. It is used once, or two nodes may take it from each other for ever.
            *self.wanted.entry(id).or_default() |= force;
            return;
        }
        // Not here yet, or not any more: the grant may be on its way.
        let call = Call::GiveBack { id, version };
        if !self.queue.iter().any(|queued| queued.call == call) {
            self.push(None, call);
        }
    }

    /// Takes the answers to calls up to `number`.
    fn taken(&mut self, first: u64, number: u64, outcomes: Vec<Outcome>, out: &mut Output) {
        let Some(front) = self.queue.front().map(|queued| queued.number) else { return };
        if first == front && number + 1 < first {
            return self.stop(out);
        }
        for (at, outcome) in (first..=number).zip(outcomes) {
            if self.queue.front().is_none_or(|queued| queued.number != at) {
                continue;
            }
            let Some(queued) = self.queue.pop_front() else { return };
            self.answered = at;
            match outcome {
                Outcome::Done(done) => self.made(queued, done, out),
                Outcome::Refused(refusal) => self.refused(queued, refusal, out),
            }
        }
        if self.sent.is_some_and(|sent| sent <= self.answered) {
            self.sent = None;
        }
    }

    fn made(&mut self, queued: Queued, done: Done, out: &mut Output) {
        let Queued { origin, ticket, call, .. } = queued;
        let Some(ticket) = ticket else {
            // This life knows what it made itself; files that a former life made become this one's.
            if origin.0 != self.life {
                self.learn(&call, &done);
            }
            return;
        };
        self.learn(&call, &done);
        let gone = matches!(call, Call::Take { .. }) && done.inodes.iter().any(|(_, inode)| inode.is_none());
        // Taken, and its last name was removed before this answer came.
        let result = if gone { Err(Refusal::NoInode) } else { Ok(done) };
        out.notices.push(Notice::Answered(ticket, result));
        self.give_up_if_taken(&call);
        self.open_parked(&call, out);
    }

    fn refused(&mut self, queued: Queued, refusal: Refusal, out: &mut Output) {
        let Queued { origin, ticket, call, .. } = queued;
        match (ticket, refusal) {
            (Some(ticket), Refusal::Busy) => {
                let gives = |queued: &Queued| matches!(queued.call, Call::GiveBack { .. });
                if self.queue.iter().any(gives) {
                    self.push(Some(ticket), call);
                } else {
                    self.parked.push((ticket, call));
                }
            }
            (Some(ticket), refusal) => {
                out.notices.push(Notice::Answered(ticket, Err(refusal)));
                self.give_up_if_taken(&call);
                self.open_parked(&call, out);
            }
            // The file's last name was removed by a change that came after the close in the single order.
            (None, Refusal::NoInode) if call.inode().is_some() && origin.0 == self.life => {}
            (None, why) => out.notices.push(Notice::Conflict { origin, call, why }),
        }
    }

    /// Gives a file back if its version was taken before the call that opened it was answered: its handle is stale from the beginning.
    fn give_up_if_taken(&mut self, call: &Call) {
        let Call::Take { id, .. } = call else { return };
        match (self.held.get(id), self.wanted.get(id)) {
            (Some(held), Some(true)) => {
                *self.stale.entry(*id).or_default() += held.writers;
                let version = held.inode.version;
                self.give_back_file(*id, version);
            }
            (None, _) => {
                self.wanted.remove(id);
            }
            _ => {}
        }
    }

    /// Continues calls to open a file that waited for `call`.
    fn open_parked(&mut self, call: &Call, out: &mut Output) {
        let Call::Take { id, .. } = call else { return };
        while let Some(at) = self.parked_take(*id) {
            let here = self.held.contains_key(id);
            // Given back first, and then asked for again.
            if here && self.wanted.contains_key(id) {
                return;
            }
            let (ticket, call) = self.parked.remove(at);
            match call {
                Call::Take { truncate, .. } if here => {
                    let answer = self.open_here(*id, truncate);
                    let origin = if let Answer::Done(origin) = answer { origin } else { None };
                    out.notices.push(Notice::Opened(ticket, origin));
                }
                call => {
                    self.push(Some(ticket), call);
                    return;
                }
            }
        }
    }

    /// Adopts the rights and names that a call has given to this node.
    fn learn(&mut self, call: &Call, done: &Done) {
        for (place, entry) in &done.entries {
            if let Some(directory) = self.directories.get_mut(&place.directory) {
                Arc::make_mut(directory).names.insert(place.name.clone(), *entry);
            }
        }
        for (id, inode) in &done.inodes {
            if let Some(inode) = inode {
                self.learn_inode(*id, inode, call);
            }
        }
        if let Some(grant) = &done.grant
            && !self.is_recalled(grant.directory)
            // Requested twice: entries that were made there since are not in the second answer.
            && !self.has_alone(grant.directory)
        {
            let names = grant.names.iter().cloned().collect();
            let directory = Directory { version: grant.version, names };
            self.directories.insert(grant.directory, Arc::new(directory));
        }
    }

    fn learn_inode(&mut self, id: FileId, inode: &Inode, call: &Call) {
        // Later calls on the inode count from the version that comes with the last of them.
        let counts = |call: &Call| {
            matches!(call, Call::Close { .. } | Call::Take { .. } | Call::GiveBack { .. })
                && call.inode() == Some(id)
        };
        let more = self.queue.iter().any(|queued| counts(&queued.call));
        if inode.kind == Kind::Directory {
            return;
        }
        let opens = u32::from(matches!(call, Call::Take { .. }));
        match self.held.get_mut(&id) {
            Some(held) => {
                held.writers += opens;
                held.inode.attributes = inode.attributes;
                // A file whose last name was removed here has none, even if the removal is not taken yet.
                if held.inode.links > 0 {
                    held.inode.links = inode.links;
                }
                if !more && held.inode.links > 0 {
                    held.inode = inode.clone();
                }
            }
            None if !more && inode.holder == self.life && inode.alone => {
                self.held.insert(id, Held { inode: inode.clone(), writers: opens });
            }
            None => {}
        }
    }
}

//! The calls and look-ups that a node answers by itself.
//!
//! Owns: the decision, and the effect on what the node has alone. Does not own: the coordinator's view of the same call
//! (`state::effect`), which must agree.

use super::{Answer, Directory, Held, Look, Looking, Node};
use crate::key::Place;
use crate::message::Found;
use crate::refusal::Refusal;
use crate::rules::Rule;
use crate::state::Call;
use crate::value::{Entry, Inode, Kind, Target};
use std::collections::BTreeMap;
use std::sync::Arc;
use tidemark_protocol::id::FileId;

impl Node {
    /// Makes a change. Bases and holders in `call` are filled in here.
    pub fn call(&mut self, call: Call) -> Answer {
        match call {
            Call::Create { place, id, kind, attributes, .. } => {
                let Some(entry) = self.entry(&place) else {
                    return self.wait(Call::Create { place, base: None, id, kind, attributes });
                };
                if entry.target.is_some() {
                    return Answer::Refused(Refusal::Exists);
                }
                let base = Some(entry.version);
                self.set(&place, entry, Some(Target { id, kind }));
                let parent = (kind == Kind::Directory).then_some(place.directory);
                let (holder, alone, links, version, seal) = (self.life, true, 1, 1, None);
                let inode = Inode { kind, attributes, seal, links, holder, alone, version, parent };
                match kind {
                    Kind::File => {
                        self.held.insert(id, Held { inode, writers: 0 });
                    }
                    Kind::Directory => {
                        self.directories.insert(id, Arc::new(Directory { version, names: BTreeMap::new() }));
                    }
                }
                self.done(Call::Create { place, base, id, kind, attributes })
            }
            Call::Close { id, seal, .. } => self.close(id, seal),
            Call::SetAttributes { id, attributes } => {
                if self.own(id).is_none() {
                    return self.wait(Call::SetAttributes { id, attributes });
                }
                self.held.entry(id).and_modify(|held| held.inode.attributes = attributes);
                self.done(Call::SetAttributes { id, attributes })
            }
            Call::Unlink { place, .. } => {
                let Some(entry) = self.entry(&place) else {
                    return self.wait(Call::Unlink { place, base: None });
                };
                match entry.target {
                    None => Answer::Refused(Refusal::NoEntry),
                    Some(target) if target.kind == Kind::Directory => Answer::Refused(Refusal::IsDirectory),
                    Some(target) if self.has_one_name(target.id) => {
                        self.unname(target.id);
                        self.set(&place, entry, None);
                        self.done(Call::Unlink { place, base: Some(entry.version) })
                    }
                    Some(_) => self.wait(Call::Unlink { place, base: None }),
                }
            }
            Call::Rename { from, to, exchange, .. } => self.rename(from, to, exchange),
            Call::Take { id, truncate } => {
                if self.held.contains_key(&id) && !self.wanted.contains_key(&id) {
                    return self.open_here(id, truncate);
                }
                if self.held.contains_key(&id) || self.is_take_queued(id) {
                    // After the call that waits for the file, or for the pending take.
                    let ticket = self.ticket();
                    self.parked.push((ticket, call));
                    return Answer::Waits(ticket);
                }
                self.wait(call)
            }
            Call::Delegate { directory } if self.has_alone(directory) => Answer::Done(None),
            call => self.wait(call),
        }
    }

    fn rename(&mut self, from: Place, to: Place, exchange: bool) -> Answer {
        let sync = |from, to| Call::Rename { from, to, bases: None, replaces: true, exchange };
        let (Some(source), Some(over)) = (self.entry(&from), self.entry(&to)) else {
            return self.wait(sync(from, to));
        };
        let Some(moved) = source.target else { return Answer::Refused(Refusal::NoEntry) };
        if over.target.is_some_and(|target| target.id == moved.id) {
            return Answer::Done(None);
        }
        let stays = moved.kind == Kind::File || from.directory == to.directory;
        let replaces = |target: Target| {
            (moved.kind, target.kind) == (Kind::File, Kind::File) && self.has_one_name(target.id)
        };
        if exchange || !stays || !over.target.is_none_or(replaces) {
            return self.wait(sync(from, to));
        }
        if let Some(target) = over.target {
            self.unname(target.id);
        }
        self.set(&to, over, Some(moved));
        self.set(&from, source, None);
        let (bases, replaces) = (Some((source.version, over.version)), over.target.is_some());
        self.done(Call::Rename { from, to, bases, replaces, exchange })
    }

    /// Opens a file for writing that this node has alone.
    pub(super) fn open_here(&mut self, id: FileId, truncate: bool) -> Answer {
        self.held.entry(id).and_modify(|held| {
            held.writers += 1;
            if truncate {
                held.inode.version += 1;
                held.inode.seal = None;
            }
        });
        if truncate { self.done(Call::Take { id, truncate }) } else { Answer::Done(None) }
    }

    fn close(&mut self, id: FileId, seal: crate::value::SealSummary) -> Answer {
        if let Some(stale) = self.stale.get_mut(&id) {
            *stale -= 1;
            if *stale == 0 {
                self.stale.remove(&id);
            }
            return Answer::Refused(Refusal::Stale);
        }
        let life = self.life;
        let Some(held) = self.held.get_mut(&id).filter(|held| held.writers > 0) else {
            return Answer::Refused(Refusal::Stale);
        };
        held.writers -= 1;
        let (base, idle, named) = (held.inode.version, held.writers == 0, held.inode.links > 0);
        held.inode.version += 1;
        held.inode.seal = Some(seal);
        if !named {
            if idle {
                self.drop_file(id);
                self.queue_parked_take(id);
            }
            return Answer::Done(None);
        }
        let answer = self.done(Call::Close { id, base, holder: life, seal });
        if idle && self.wanted.remove(&id).is_some() {
            self.give_back_file(id, base + 1);
        }
        answer
    }

    /// Looks a name up.
    pub fn look(&mut self, place: Place) -> Look {
        if let Some(entry) = self.entry(&place) {
            match entry.target {
                None => return Look::Found(Found::Absent),
                Some(target) => {
                    if let Some(held) = self.own(target.id) {
                        return Look::Found(Found::Present(target, held.inode.clone()));
                    }
                }
            }
        }
        let (ticket, after) = (self.ticket(), self.last_number());
        self.looking.insert(ticket, Looking { place, after, sent: false });
        Look::Waits(ticket)
    }

    /// Returns a name in a directory that this node has alone, if no pending call may change it.
    fn entry(&self, place: &Place) -> Option<Entry> {
        let directory = self.directories.get(&place.directory)?;
        (!self.is_busy(place)).then(|| directory.names.get(&place.name).copied().unwrap_or_default())
    }

    pub(super) fn set(&mut self, place: &Place, was: Entry, target: Option<Target>) {
        if let Some(directory) = self.directories.get_mut(&place.directory) {
            let entry = Entry { version: was.version + 1, target };
            Arc::make_mut(directory).names.insert(place.name.clone(), entry);
        }
    }

    fn has_one_name(&self, id: FileId) -> bool {
        self.own(id).is_some_and(|held| held.inode.links == 1)
    }

    /// Removes the last name of a file. Open handles stay.
    fn unname(&mut self, id: FileId) {
        if let Some(held) = self.held.get_mut(&id) {
            held.inode.links = 0;
            if held.writers == 0 {
                self.drop_file(id);
            }
        }
    }

    pub(super) fn drop_file(&mut self, id: FileId) {
        self.held.remove(&id);
        self.wanted.remove(&id);
    }

    fn done(&mut self, call: Call) -> Answer {
        Answer::Done(Some(self.push(None, call)))
    }

    fn wait(&mut self, call: Call) -> Answer {
        let ticket = self.ticket();
        self.push(Some(ticket), call);
        Answer::Waits(ticket)
    }

    /// Gives a file back that this node has alone, as of `version`.
    pub(super) fn give_back_file(&mut self, id: FileId, version: u64) {
        self.drop_file(id);
        self.push(None, Call::GiveBack { id, version });
        // A client that waits here to open the file now comes after the other node.
        self.queue_parked_take(id);
    }

    fn queue_parked_take(&mut self, id: FileId) {
        if let Some(at) = self.parked_take(id) {
            let (ticket, call) = self.parked.remove(at);
            self.push(Some(ticket), call);
        }
    }

    /// Returns the first call to open a file that waits for another one.
    pub(super) fn parked_take(&self, id: FileId) -> Option<usize> {
        self.parked.iter().position(|(_, call)| matches!(call, Call::Take { id: taken, .. } if *taken == id))
    }

    /// Returns whether a give-back is queued: a grant that arrives after it is not used.
    pub(super) fn is_recalled(&self, id: FileId) -> bool {
        let gives = |call: &Call| matches!(call, Call::GiveBack { id: given, .. } if *given == id);
        self.rules.has(Rule::RecalledGrant) && self.queue.iter().any(|queued| gives(&queued.call))
    }
}

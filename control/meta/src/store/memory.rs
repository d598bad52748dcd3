//! A store in memory, for tests and models, with faults by script.
//!
//! Owns: revisions, history, compaction, faults. Does not own: durability; a restart begins empty.

use super::{Compare, Request, Response, Revision, Store, Stored, Transaction};
use crate::key::Key;
use crate::value::Change;
use crate::value::Value;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

/// The fate of the next request that writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Performed, and the answer is lost.
    AnswerLost,
    /// Not performed, and answered as [`Response::Unknown`]. [`Memory::release`] performs it later.
    Delayed,
}

/// The content at one moment, to be restored later.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Backup(Arc<BTreeMap<Key, Stored>>);

/// A store in memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Memory {
    revision: Revision,
    keys: Arc<BTreeMap<Key, Stored>>,
    history: VecDeque<(Revision, Vec<Change>)>,
    /// The history begins after this revision.
    compacted: Revision,
    next: Option<Fault>,
    delayed: Vec<Request>,
}

impl Memory {
    /// Makes a store that contains `entries` at revision 1.
    #[must_use]
    pub fn new(entries: Vec<(Key, Value)>) -> Self {
        let revision = Revision(1);
        let keys = entries.into_iter().map(|(key, value)| (key, Stored { value, revision })).collect();
        Self { revision, keys: Arc::new(keys), compacted: revision, ..Self::default() }
    }

    /// Iterates over every key with its value, in order.
    pub fn entries(&self) -> impl Iterator<Item = (&Key, &Value)> {
        self.keys.iter().map(|(key, stored)| (key, &stored.value))
    }

    /// Returns a key's value.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&Value> {
        self.keys.get(key).map(|stored| &stored.value)
    }

    /// Returns the newest revision.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// Sets the fate of the next request that writes.
    pub fn inject(&mut self, fault: Option<Fault>) {
        self.next = fault;
    }

    /// Returns the number of requests that were delayed and not yet performed.
    #[must_use]
    pub fn delayed(&self) -> usize {
        self.delayed.len()
    }

    /// Performs the oldest delayed request. The answer is dropped.
    pub fn release(&mut self) {
        if !self.delayed.is_empty() {
            let request = self.delayed.remove(0);
            self.perform(&request);
        }
    }

    /// Forgets the history up to and including `revision`.
    pub fn compact(&mut self, revision: Revision) {
        self.compacted = self.compacted.max(revision.min(self.revision));
        while self.history.front().is_some_and(|(at, _)| *at <= self.compacted) {
            self.history.pop_front();
        }
    }

    /// Returns the present content.
    #[must_use]
    pub fn backup(&self) -> Backup {
        Backup(Arc::clone(&self.keys))
    }

    /// Restores an older content. The revision still rises, as that of a restored etcd may.
    pub fn restore(&mut self, backup: &Backup) {
        self.keys = Arc::clone(&backup.0);
        self.revision = Revision(self.revision.0 + 1);
        self.compact(self.revision);
    }

    fn holds(&self, compare: &Compare) -> bool {
        match compare {
            Compare::Is(key, value) => self.get(key) == value.as_ref(),
            Compare::Elected(revision) => {
                self.keys.get(&Key::Coordinator).is_some_and(|stored| stored.revision == *revision)
            }
        }
    }

    fn append(&mut self, transaction: &Transaction) -> Response {
        if !transaction.compares.iter().all(|compare| self.holds(compare)) {
            return Response::Refused;
        }
        self.put(transaction.changes.clone())
    }

    fn put(&mut self, changes: Vec<Change>) -> Response {
        self.revision = Revision(self.revision.0 + 1);
        let (revision, keys) = (self.revision, Arc::make_mut(&mut self.keys));
        for (key, value) in &changes {
            match value {
                Some(value) => {
                    assert!(value.fits(key), "a value of another kind is put under {key:?}");
                    keys.insert(key.clone(), Stored { value: value.clone(), revision });
                }
                None => {
                    keys.remove(key);
                }
            }
        }
        self.history.push_back((revision, changes));
        Response::Taken(revision)
    }

    fn perform(&mut self, request: &Request) -> Response {
        match request {
            Request::Append(transaction) => self.append(transaction),
            Request::Elect { over, role } => {
                if self.keys.get(&Key::Coordinator).map(|stored| stored.revision) != *over {
                    return Response::Refused;
                }
                self.put(vec![(Key::Coordinator, Some(Value::Role(role.clone())))])
            }
            Request::Read(keys) => {
                Response::Values(keys.iter().map(|key| self.keys.get(key).cloned()).collect())
            }
            Request::Load { at, after, limit } => self.load(*at, after.as_ref(), *limit),
            Request::Follow { after, limit } => self.follow(*after, *limit),
        }
    }

    /// Returns a page of the present revision. A page of an older one counts as compacted, so the reader begins again.
    fn load(&self, at: Option<Revision>, after: Option<&Key>, limit: usize) -> Response {
        let at = at.unwrap_or(self.revision);
        if at != self.revision {
            return Response::Compacted;
        }
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = self.keys.range((from, Bound::Unbounded));
        let entries = rest.by_ref().take(limit).map(|(key, stored)| (key.clone(), stored.value.clone()));
        Response::Page { at, entries: entries.collect(), more: rest.next().is_some() }
    }

    fn follow(&self, after: Revision, limit: usize) -> Response {
        if after < self.compacted {
            return Response::Compacted;
        }
        let (mut to, mut changes) = (after, vec![]);
        for (revision, change) in self.history.iter().filter(|(revision, _)| *revision > after).take(limit) {
            to = *revision;
            changes.extend(change.iter().cloned());
        }
        Response::Changes { to, changes }
    }
}

impl Store for Memory {
    fn serve(&mut self, request: &Request) -> Response {
        if matches!(request, Request::Append(_) | Request::Elect { .. }) {
            match self.next.take() {
                Some(Fault::AnswerLost) => {
                    self.perform(request);
                    return Response::Unknown;
                }
                Some(Fault::Delayed) => {
                    self.delayed.push(request.clone());
                    return Response::Unknown;
                }
                None => {}
            }
        }
        self.perform(request)
    }
}

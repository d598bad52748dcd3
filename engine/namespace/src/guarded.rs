//! The state under its lock, and what follows a change of it.
//!
//! Owns: the one mutex, whom a change wakes or tells, that a call returns once what it changed is journaled. Does not own: what is changed
//! ([`State`]), the journal's files and order (`journal`).
//!
//! [`Guarded`] knows whose state it is and what time it is there: all that most calls need besides.

use super::journal::Journal;
use super::node::Body;
use super::view::NODES_AT_ONCE;
use super::withdraw::Withdrawn;
use super::writer::WriterCache;
use super::{Clock, FsError, NodeId, ROOT, State, UNPOISONED};
use std::fmt;
use std::ops::Bound;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use tidemark_protocol::id::{FileCounter, FileId, Incarnation};

/// How long a call waits for another that changes the same file's bytes: a copy of 100 GB takes about 20 s.
const BUSY_WAIT: Duration = Duration::from_secs(60);

/// Threads that wait, so that a change wakes somebody only where there is one.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    /// For changed nodes.
    watching: u32,
    /// For a busy file, or a last release.
    waiting: u32,
    /// Something that those may wait for has happened.
    pub(super) woken: bool,
}

/// The state, its lock and its journal. All calls take `&self`, from any thread.
pub(super) struct Guarded {
    pub(super) incarnation: Incarnation,
    clock: Clock,
    state: Mutex<State>,
    /// Wakes those who wait for a busy file or for a last release.
    changed: Condvar,
    /// Wakes the node loop.
    dirtied: Condvar,
    /// Wakes whoever tells other nodes.
    pub(super) told: tokio::sync::Notify,
    /// Wakes whoever keeps the coordinator's tree elsewhere.
    pub(super) catalog_changed: tokio::sync::Notify,
    /// Told of each name that no request took away: the kernel may remember it.
    pub(super) withdrawn: OnceLock<Withdrawn>,
    pub(super) journal: Mutex<Journal>,
    pub(super) journal_bytes: u64,
    /// Knows how processes ended, which a snapshot in the journal tells with the files that name them.
    pub(super) writers: Arc<WriterCache>,
}

impl fmt::Debug for Guarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guarded").field("incarnation", &self.incarnation).finish_non_exhaustive()
    }
}

impl Guarded {
    pub(super) fn new(
        incarnation: Incarnation,
        clock: Clock,
        state: State,
        journal: Journal,
        writers: Arc<WriterCache>,
    ) -> Self {
        Self {
            incarnation,
            clock,
            state: Mutex::new(state),
            changed: Condvar::new(),
            dirtied: Condvar::new(),
            told: tokio::sync::Notify::new(),
            catalog_changed: tokio::sync::Notify::new(),
            withdrawn: OnceLock::new(),
            journal_bytes: journal.size_bytes(),
            journal: Mutex::new(journal),
            writers,
        }
    }

    /// Nanoseconds since 1970 by this node's clock.
    pub(super) fn now_ns(&self) -> i64 {
        self.clock.now_ns()
    }

    /// Waits until something changed that nobody took yet, or until `timeout` has passed. Whether something did.
    pub(super) fn wait_dirty(&self, timeout: Duration) -> bool {
        let mut state = self.lock();
        state.waiters.watching += 1;
        let (mut state, _) = self
            .dirtied
            .wait_timeout_while(state, timeout, |state| !state.tree.changes.has_dirty())
            .expect(UNPOISONED);
        state.waiters.watching -= 1;
        state.tree.changes.has_dirty()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(UNPOISONED)
    }

    /// Looks at the state; changes nothing that the journal holds.
    pub(super) fn look<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.lock())
    }

    /// Changes the state: `f` checks first and changes only when it will succeed. Afterwards, outside the lock,
    /// what changed is journaled, and then what is no longer named is dropped.
    pub(super) fn change<R>(&self, f: impl FnOnce(&mut State) -> Result<R, FsError>) -> Result<R, FsError> {
        let mut state = self.lock();
        let result = f(&mut state);
        state.note_touched();
        let journals = !state.pending.is_empty();
        let woken = std::mem::take(&mut state.waiters.woken) && state.waiters.waiting > 0;
        let dirty = state.waiters.watching > 0 && state.tree.changes.has_dirty();
        let tells = state.outgoing.tells();
        let is_unkept = state.tree.changes.has_unkept();
        let trash = std::mem::take(&mut state.trash);
        let lost_names = std::mem::take(&mut state.lost_names);
        drop(state);
        if let Some(told) = self.withdrawn.get() {
            lost_names.into_iter().for_each(|(parent, name, node)| told(parent, &name, node));
        }
        if woken {
            self.changed.notify_all();
        }
        if dirty {
            self.dirtied.notify_all();
        }
        if tells {
            self.told.notify_one();
        }
        if is_unkept {
            self.catalog_changed.notify_one();
        }
        let journaled = if journals { self.commit() } else { Ok(()) };
        drop(trash);
        let value = result?;
        journaled?;
        Ok(value)
    }

    /// Waits, at most until `deadline`, for something to change. False when the time is up.
    pub(super) fn wait_change<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        deadline: Instant,
    ) -> (MutexGuard<'a, State>, bool)
    where
        Self: 'a,
    {
        let Some(left) = deadline.checked_duration_since(Instant::now()) else {
            return (state, false);
        };
        state.waiters.waiting += 1;
        // A safeguard of 50 ms, because a hold on a seal is dropped without the lock and wakes nobody.
        let (mut state, _) =
            self.changed.wait_timeout(state, left.min(Duration::from_millis(50))).expect(UNPOISONED);
        state.waiters.waiting -= 1;
        (state, true)
    }

    /// Waits, bounded, until nobody changes the bytes of `node`.
    pub(super) fn settle(&self, node: NodeId) -> Result<MutexGuard<'_, State>, FsError> {
        let deadline = Instant::now() + BUSY_WAIT;
        let mut state = self.lock();
        loop {
            match &state.tree.node(node)?.body {
                Body::File(file) if file.busy => {}
                _ => return Ok(state),
            }
            let (next, in_time) = self.wait_change(state, deadline);
            state = next;
            if !in_time {
                return Err(FsError::Busy);
            }
        }
    }

    /// Calls `act` for every node but the root, in the order of their numbers. Costs a pass over all nodes, in slices of the lock: a node that
    /// is made meanwhile may be among them.
    pub(super) fn for_each_node(&self, mut act: impl FnMut(&mut State, NodeId)) {
        let mut after: NodeId = ROOT;
        loop {
            let last = self.look(|state| {
                let range = (Bound::Excluded(after), Bound::Unbounded);
                let ids: Vec<_> =
                    state.tree.nodes.range(range).take(NODES_AT_ONCE).map(|(id, _)| *id).collect();
                ids.iter().for_each(|id| act(state, *id));
                ids.last().copied()
            });
            match last {
                Some(last) => after = last,
                None => return,
            }
        }
    }

    /// Bytes of snapshot that the journal admits: a quarter of a file is left for what comes after one.
    pub(super) fn weight_limit(&self) -> u64 {
        self.journal_bytes / 4 * 3
    }

    /// The identity that a file of this incarnation has at `node`.
    pub(super) fn file_id(&self, node: NodeId) -> FileId {
        own_file(self.incarnation, node)
    }
}

/// The identity that a file of incarnation `own` has at `node`.
pub(super) fn own_file(own: Incarnation, node: NodeId) -> FileId {
    FileId { incarnation: own, counter: FileCounter(node) }
}

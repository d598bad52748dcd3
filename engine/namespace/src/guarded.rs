//! The state under its lock, and what follows a change of it.
//!
//! Owns: the one mutex, which waiters a change wakes or notifies, and that a call returns once its changes are journaled. Does not own:
//! what is changed ([`State`]), the journal's files and order (`journal`).
//!
//! [`Guarded`] also knows the node's incarnation and clock. Most calls need no more than that.

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

/// How long a call waits for another that changes the same file's bytes. A copy of 100 GB takes about 20 s.
const BUSY_WAIT: Duration = Duration::from_secs(60);

/// Waiting threads, counted so that a change wakes a thread only if one waits.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    /// Threads that wait for a busy file, or for a last release.
    waiting: u32,
    /// Whether an event has happened for which `waiting` threads may wait.
    pub(super) woken: bool,
}

/// The state, its lock and its journal. All calls take `&self`, from any thread.
pub(super) struct Guarded {
    pub(super) incarnation: Incarnation,
    clock: Clock,
    state: Mutex<State>,
    /// Wakes the threads that wait for a busy file or for a last release.
    changed: Condvar,
    /// Wakes the node loop.
    dirtied: tokio::sync::Notify,
    /// Wakes the task that publishes to other nodes.
    pub(super) told: tokio::sync::Notify,
    /// Wakes the task that keeps the coordinator's tree elsewhere.
    pub(super) catalog_changed: tokio::sync::Notify,
    /// Notified of each name that was removed without a request: the kernel may remember it.
    pub(super) withdrawn: OnceLock<Withdrawn>,
    pub(super) journal: Mutex<Journal>,
    pub(super) journal_bytes: u64,
    /// Ends of processes, which a snapshot in the journal lists with the files that name them.
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
            dirtied: tokio::sync::Notify::new(),
            told: tokio::sync::Notify::new(),
            catalog_changed: tokio::sync::Notify::new(),
            withdrawn: OnceLock::new(),
            journal_bytes: journal.size_bytes(),
            journal: Mutex::new(journal),
            writers,
        }
    }

    /// Returns nanoseconds since 1970 by this node's clock.
    pub(super) fn now_ns(&self) -> i64 {
        self.clock.now_ns()
    }

    /// Waits until a change exists that was not taken yet. Cancel safe.
    pub(super) async fn dirty(&self) {
        while !self.look(|state| state.tree.changes.has_dirty()) {
            // A change after the look has left its permit, or leaves it now.
            self.dirtied.notified().await;
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(UNPOISONED)
    }

    /// Runs `f` on the state, in which it may change only what the journal does not hold.
    pub(super) fn look<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.lock())
    }

    /// Changes the state: `f` checks first and changes only when it will succeed. Afterwards, outside the lock,
    /// journals the changes, and then drops what no name leads to any more.
    pub(super) fn change<R>(&self, f: impl FnOnce(&mut State) -> Result<R, FsError>) -> Result<R, FsError> {
        let mut state = self.lock();
        let result = f(&mut state);
        state.note_touched();
        let journals = !state.pending.is_empty();
        let woken = std::mem::take(&mut state.waiters.woken) && state.waiters.waiting > 0;
        let dirty = state.tree.changes.has_dirty();
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
            self.dirtied.notify_one();
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

    /// Waits, at most until `deadline`, for something to change. Returns false when the time is up.
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

    /// Waits, up to [`BUSY_WAIT`], until no call changes the bytes of `node`.
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

    /// Calls `act` for every node but the root, in the order of their numbers. Costs a pass over all nodes, in slices of the lock. A node
    /// that is made meanwhile may be among them.
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

    /// Returns how many bytes of snapshot the journal admits. A quarter of a file is left for the changes after the
    /// snapshot.
    pub(super) fn weight_limit(&self) -> u64 {
        self.journal_bytes / 4 * 3
    }

    /// Returns the identity that a file of this incarnation has at `node`.
    pub(super) fn file_id(&self, node: NodeId) -> FileId {
        own_file(self.incarnation, node)
    }
}

/// Returns the identity that a file of incarnation `own` has at `node`.
pub(super) fn own_file(own: Incarnation, node: NodeId) -> FileId {
    FileId { incarnation: own, counter: FileCounter(node) }
}

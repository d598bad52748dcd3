//! Changes of frozen bytes that old handles must keep: which threads are sent back to the names, and what their next look-up does.
//!
//! Owns: which thread was answered ESTALE for which node, giving the names to a new node at its next look-up, and where a change must be
//! made in place instead. Does not own: the change itself (`open`, `resize`).
//!
//! The kernel answers an ESTALE by looking all names of the path up again and repeating the call once, in the same thread. A second
//! one would reach the program. So the first answer changes nothing: a call that fails has done nothing. When the thread
//! looks the name up, the names go to the new node. When it comes back without a look-up, there is no name, and no new node
//! could be found.

use super::Node;
use super::attr::{Attr, attr, observe};
use super::open::Change;
use super::overwrite::Overwrites;
use super::{Caller, FsError, Namespace, NodeId, State, UNPOISONED};
use std::collections::VecDeque;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

/// How long an ESTALE is remembered: the kernel's second try comes within milliseconds of the answer, which waits a second at most
/// for the kernel to forget the names.
const STALE_MEMORY: Duration = Duration::from_secs(5);
/// Callers remembered; beyond, the oldest is forgotten, and could meet a second ESTALE.
const STALE_CALLERS: usize = 1024;
/// How long a change without a name waits for the seal or the upload that reads the bytes.
const HELD_WAIT: Duration = Duration::from_secs(10);
/// The same wait if a program holds a lock on the inode; after that the bytes being read count for more.
const LOCKED_WAIT: Duration = Duration::from_secs(1);
/// How often a change looks whether a seal that gives way to it has ended. Hashing stops after a chunk, which takes milliseconds.
const GIVES_WAY_POLL: Duration = Duration::from_millis(2);

/// Part of the old bytes that a change keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spared {
    All,
    First(u64),
}

impl Spared {
    pub(super) fn of(self, size_bytes: u64) -> u64 {
        match self {
            Self::All => size_bytes,
            Self::First(bytes) => bytes.min(size_bytes),
        }
    }
}

/// Whether a program holds a lock on an inode. The numbers are those that the kernel may show for it.
pub type LockOracle = Box<dyn Fn([u64; 2]) -> bool + Send + Sync>;

/// Outcome of a look-up.
#[derive(Debug)]
pub enum Looked {
    Found(Attr),
    /// The names go to a new node first, which may take as long as a copy: call [`Namespace::lookup_anew`].
    Begun,
}

/// A thread that was sent back to the names.
#[derive(Debug, Clone, Copy)]
struct SentBack {
    pid: u32,
    node: NodeId,
    at: Instant,
    /// Whether the thread has looked a name up since.
    looked: bool,
    /// Bytes that the thread's change will keep; none if it only opened a node whose names lead elsewhere.
    kept: Option<Spared>,
}

/// The threads that were answered ESTALE lately, the oldest first.
#[derive(Debug, Default)]
pub(super) struct StaleCallers(VecDeque<SentBack>);

impl StaleCallers {
    /// Whether this thread was sent back from this node and returned without a look-up, and therefore has no name.
    fn is_nameless(&self, pid: u32, node: NodeId) -> bool {
        self.0.iter().any(|sent| sent.is_of(pid, node) && !sent.looked && sent.at.elapsed() < STALE_MEMORY)
    }

    fn note(&mut self, pid: u32, node: NodeId, kept: Option<Spared>) {
        self.settle(pid, node);
        while self.0.len() >= STALE_CALLERS
            || self.0.front().is_some_and(|sent| sent.at.elapsed() >= STALE_MEMORY)
        {
            self.0.pop_front();
        }
        self.0.push_back(SentBack { pid, node, at: Instant::now(), looked: false, kept });
    }

    /// Notes that the thread looks a name up that leads to `node`; returns what its change there keeps, if it means to make one.
    fn looks_up(&mut self, pid: u32, node: Option<NodeId>) -> Option<Spared> {
        if self.0.is_empty() {
            return None;
        }
        self.0.retain(|sent| sent.at.elapsed() < STALE_MEMORY);
        self.0.iter_mut().filter(|sent| sent.pid == pid).for_each(|sent| sent.looked = true);
        self.0.iter().find(|sent| Some(sent.node) == node && sent.pid == pid)?.kept
    }

    pub(super) fn settle(&mut self, pid: u32, node: NodeId) {
        self.0.retain(|sent| !sent.is_of(pid, node));
    }

    /// Refuses once, with ESTALE, an open of a node whose names the daemon gave away: a path then finds the node that has them now.
    pub(super) fn send_back_if_forsaken(&mut self, id: NodeId, node: &Node, pid: u32) -> Result<(), FsError> {
        if !node.forsaken || self.is_nameless(pid, id) {
            return Ok(());
        }
        self.note(pid, id, None);
        Err(FsError::Stale)
    }
}

impl SentBack {
    fn is_of(&self, pid: u32, node: NodeId) -> bool {
        self.pid == pid && self.node == node
    }
}

/// State of a single call whose change old handles stand in the way of.
#[derive(Debug)]
pub(super) struct Patience {
    pid: u32,
    kept: Spared,
    begun: Instant,
    /// Whether the call has no name. Waiting does not change that.
    nameless: bool,
    /// Whether a program holds a lock on the inode, once the oracle was asked.
    locked: Option<bool>,
}

impl Patience {
    pub(super) fn begin(pid: u32, kept: Spared) -> Self {
        Self { pid, kept, begun: Instant::now(), nameless: false, locked: None }
    }

    pub(super) fn is_nameless(&self) -> bool {
        self.nameless
    }
}

impl Namespace {
    /// Sets the oracle that knows whether a program holds a lock. The mount calls this before it serves.
    pub fn set_lock_oracle(&self, oracle: LockOracle) {
        *self.locks.write().expect(UNPOISONED) = Some(oracle);
    }

    /// Finds a name for a thread and counts that the kernel knows its node.
    ///
    /// # Errors
    /// As [`Namespace::lookup`].
    pub fn lookup_by(&self, pid: u32, parent: NodeId, name: &[u8]) -> Result<Looked, FsError> {
        self.state.look(|state| {
            let found = state.tree.child(parent, name);
            if state.stale.looks_up(pid, found.ok()).is_some() {
                return Ok(Looked::Begun);
            }
            let id = found?;
            let node = state.tree.node_mut(id)?;
            let attr = attr(id, node)?;
            node.lookups += 1;
            Ok(Looked::Found(attr))
        })
    }

    /// Does the same after [`Looked::Begun`]: gives the names to a new node with the bytes that the change keeps. May block while they
    /// are copied.
    ///
    /// # Errors
    /// As [`Namespace::lookup`]; [`FsError::NoSpace`], and nothing has changed.
    pub fn lookup_anew(&self, caller: &Caller, parent: NodeId, name: &[u8]) -> Result<Attr, FsError> {
        let begun = self.state.look(|state| {
            let node = state.tree.child(parent, name).ok()?;
            Some((node, state.stale.looks_up(caller.pid, Some(node))?))
        });
        if let Some((node, kept)) = begun {
            self.overwrites().give_names_away(node, kept, caller.now_ns)?;
            self.state.look(|state| state.stale.settle(caller.pid, node));
        }
        self.lookup(parent, name)
    }
}

impl<'a> Overwrites<'a> {
    fn is_locked(&self, numbers: [u64; 2]) -> bool {
        self.locks.read().expect(UNPOISONED).as_ref().is_some_and(|is_locked| is_locked(numbers))
    }

    /// Decides a change that would need a new node. A seal in the making is worth nothing once the bytes change, so it gives way, and the
    /// change is made in place. So it is if no path leads to the new node, or if a lock must go on to exclude; otherwise the caller is sent
    /// back to the names. Returns `None` after a wait: the caller examines everything again.
    ///
    /// # Errors
    /// [`FsError::Stale`]: nothing has changed, and the names are to be looked up again. [`FsError::Busy`] when the bytes were
    /// read for too long.
    pub(super) fn without_new_node(
        &self,
        mut state: MutexGuard<'a, State>,
        node: NodeId,
        change: Change,
        patience: &mut Patience,
    ) -> Result<Option<(MutexGuard<'a, State>, Change)>, FsError> {
        if !matches!(change, Change::NewNode { .. }) {
            return Ok(Some((state, change)));
        }
        let target = state.tree.node(node)?;
        let numbers = [node, target.ino];
        patience.nameless |= target.link_count() == 0 || state.stale.is_nameless(patience.pid, node);
        let nameless = patience.nameless;
        let held = target.file()?.is_held();
        if let Some(seal) = target.file()?.seal_in_the_making()
            && patience.begun.elapsed() < HELD_WAIT
        {
            seal.abandon();
            drop(seal); // Otherwise this thread itself would hold it.
            drop(self.state.wait_change(state, Instant::now() + GIVES_WAY_POLL));
            return Ok(None);
        }
        let locked = match patience.locked {
            Some(locked) => locked,
            None if nameless => false,
            None => {
                drop(state);
                patience.locked = Some(self.is_locked(numbers));
                return Ok(None);
            }
        };
        if (nameless || locked) && !held {
            return Ok(Some((state, Change::InPlace)));
        }
        if nameless || locked {
            let wait = if nameless { HELD_WAIT } else { LOCKED_WAIT };
            let (next, in_time) = self.state.wait_change(state, patience.begun + wait);
            if in_time {
                return Ok(None);
            }
            if nameless {
                return Err(FsError::Busy);
            }
            state = next;
        }
        // From now on the kernel keeps no name of it: all of them are about to lead elsewhere.
        state.tree.node_mut(node)?.overwritten = true;
        state.stale.note(patience.pid, node, Some(patience.kept));
        Err(FsError::Stale)
    }

    /// Gives the names of a file to a new node, where that is still needed.
    fn give_names_away(&self, node: NodeId, kept: Spared, now_ns: i64) -> Result<(), FsError> {
        let (size_bytes, change) = {
            let mut state = self.state.settle(node)?;
            let target = state.tree.node(node)?;
            let file = target.file()?;
            let size_bytes = observe(target, file)?.size_bytes;
            let change = file.change(size_bytes, kept);
            if target.link_count() == 0 || !matches!(change, Change::NewNode { .. }) {
                return Ok(()); // The old handles are gone, or somebody else was first.
            }
            state.tree.file_mut(node)?.busy = true;
            (size_bytes, change)
        };
        let keep_bytes = kept.of(size_bytes);
        let prepared = if keep_bytes == 0 {
            self.prepare_overwrite(self.expected_bytes(node).max(size_bytes))
        } else {
            self.prepare(node, change, keep_bytes, size_bytes)
        };
        self.state.change(|state| {
            state.apply_change(self.state.incarnation, node, change, prepared, None, now_ns).map(drop)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_looked_a_name_up_since_has_one() {
        let mut stale = StaleCallers::default();
        stale.note(7, 40, Some(Spared::First(0)));
        assert!(stale.is_nameless(7, 40));
        assert!(!stale.is_nameless(8, 40) && !stale.is_nameless(7, 41), "another thread, another file");
        assert_eq!(stale.looks_up(8, Some(40)), None);
        assert_eq!(stale.looks_up(7, Some(3)), None, "a directory above it");
        assert!(!stale.is_nameless(7, 40));
        assert_eq!(stale.looks_up(7, Some(40)), Some(Spared::First(0)));
        stale.settle(7, 40);
        assert_eq!(stale.looks_up(7, Some(40)), None);
        stale.note(7, 40, None);
        assert_eq!(stale.looks_up(7, Some(40)), None, "it changes nothing");
    }

    #[test]
    fn the_callers_that_are_remembered_are_bounded() {
        let mut stale = StaleCallers::default();
        for pid in 0..u32::try_from(STALE_CALLERS).unwrap() + 1 {
            stale.note(pid, 40, None);
        }
        assert_eq!(stale.0.len(), STALE_CALLERS);
        assert!(!stale.is_nameless(0, 40));
    }
}

//! Parts of the kernel's session that outlive a daemon: handles, backing ids, answers not yet delivered.
//!
//! Owns: the answers to requests that must not be executed twice, the backing ids in use, recovering a session. Does not own: the handles
//! themselves (`handle`), their records' bytes (`record`), the kernel's protocol (fuse).
//!
//! A request that changes something is journaled in one group with its effect and the number that the kernel gave it.
//! A daemon that dies before it answered is asked again under the same number; its successor finds the number here and
//! gives the answer without doing the work again. Once the answer is out, the number is forgotten.

use super::attr::{Attr, attr};
use super::guarded::Guarded;
use super::{FsError, NodeId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// The kernel's number of a request; 0 for calls that no kernel made.
pub type RequestId = u64;

/// Answers read from a journal, newest last; what is older was delivered long ago. More than a daemon gives while one of its
/// threads waits 30 s for room between what it did and its answer.
pub(super) const ANSWERS_READ_MAX: usize = 1 << 18;

/// The kernel sends unanswered requests again within milliseconds of a takeover. Answers that it has not asked for within this time were
/// delivered, and are left out of snapshots.
const ASKED_AGAIN_WITHIN: Duration = Duration::from_secs(60);

/// Result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Done; there is nothing more to say.
    Done,
    /// A node was entered, and looked up once more.
    Entered(NodeId),
    /// A handle was opened.
    Opened(u64),
    /// Both.
    Created(NodeId, u64),
    /// The names went to a new node: the kernel is to look them up again.
    Superseded,
}

/// The live part of the kernel's session.
#[derive(Debug, Default)]
pub(super) struct Session {
    pub(super) answers: BTreeMap<RequestId, Answer>,
    /// Answers of the daemon before this one, delivered or not, and when they were read.
    inherited: BTreeMap<RequestId, Answer>,
    inherited_at: Option<Instant>,
    /// By the number of the backing file.
    pub(super) backing_ids: BTreeMap<u64, u32>,
    pub(super) touched: TouchedSession,
}

/// Parts of the session that the journal does not know yet.
#[derive(Debug, Default)]
pub(super) struct TouchedSession {
    /// Whether the kernel's session is over. Then the journal's account of it no longer holds, and a new session counts its requests
    /// anew.
    pub(super) ended: bool,
    pub(super) answers: Vec<(RequestId, Answer)>,
    pub(super) handles: BTreeSet<u64>,
    pub(super) backing_ids: BTreeSet<u64>,
}

impl Session {
    /// Recovers the answers in a journal.
    pub(super) fn inherit(&mut self, answers: impl Iterator<Item = (RequestId, Answer)>) {
        self.inherited = answers.collect();
        self.inherited_at = Some(Instant::now());
    }

    fn answer_to(&self, request: RequestId) -> Option<Answer> {
        self.answers.get(&request).or_else(|| self.inherited.get(&request)).copied()
    }

    /// Returns the answers that the kernel may still ask for, for a snapshot.
    pub(super) fn undelivered(&self) -> impl Iterator<Item = (RequestId, Answer)> + '_ {
        let late = self.inherited_at.is_none_or(|at| at.elapsed() > ASKED_AGAIN_WITHIN);
        let inherited = self.inherited.iter().filter(move |_| !late);
        inherited.chain(&self.answers).map(|(request, answer)| (*request, *answer))
    }

    /// Notes, in the change that carries a request out, what its answer is.
    pub(super) fn answer(&mut self, request: RequestId, answer: Answer) {
        if request != 0 {
            self.answers.insert(request, answer);
            self.touched.answers.push((request, answer));
        }
    }
}

impl TouchedSession {
    pub(super) fn is_empty(&self) -> bool {
        !self.ended && self.answers.is_empty() && self.handles.is_empty() && self.backing_ids.is_empty()
    }
}

/// Parts of the kernel's session that outlive a daemon.
#[derive(Debug, Clone, Copy)]
pub struct SessionCalls<'a> {
    pub(super) state: &'a Guarded,
}

impl SessionCalls<'_> {
    /// Returns the answer to a request that was carried out before; none if it was not.
    pub fn answered(&self, request: RequestId) -> Option<Answer> {
        self.state.look(|state| state.session.answer_to(request))
    }

    /// Returns a node's attributes, counting that the kernel is told of it once more.
    ///
    /// # Errors
    /// [`FsError::Stale`] when it is gone.
    pub fn enter(&self, node: NodeId) -> Result<Attr, FsError> {
        self.state.look(|state| {
            let known = state.tree.node_mut(node)?;
            known.lookups += 1;
            attr(node, known)
        })
    }

    /// Forgets an answer that was delivered, since the kernel will not ask for it again.
    pub fn delivered(&self, request: RequestId) {
        if request != 0 {
            self.state.look(|state| {
                state.session.answers.remove(&request);
                state.session.inherited.remove(&request);
            });
        }
    }

    /// Journals the id under which the kernel knows a backing file; no id means that the kernel does not know it any more. Call this
    /// before the id is given to the kernel, and after it was taken back.
    ///
    /// # Errors
    /// [`FsError::Io`], [`FsError::NoSpace`] when the journal did not take it.
    pub fn note_backing_id(&self, backing: u64, id: Option<u32>) -> Result<(), FsError> {
        self.state.change(|state| {
            match id {
                Some(id) => state.session.backing_ids.insert(backing, id),
                None => state.session.backing_ids.remove(&backing),
            };
            state.session.touched.backing_ids.insert(backing);
            Ok(())
        })
    }

    /// The journaled backing ids, by the number of their backing file.
    pub fn backing_ids(&self) -> Vec<(u64, u32)> {
        self.state
            .look(|state| state.session.backing_ids.iter().map(|(backing, id)| (*backing, *id)).collect())
    }
}

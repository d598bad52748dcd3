//! A file's bytes as its home publishes them.
//!
//! Owns: accepting these facts, and which local bytes they leave in place. Does not own: the file's names (`mirror`), fetching (`cold`).

use super::file::ObjectCopy;
use super::mirror::Remote;
use super::node::Node;
use super::reclaim::Candidate;
use super::writer::{SessionKey, WriterId};
use super::{FsError, NodeId, ReclaimClass, State};
use std::sync::Arc;
use tidemark_protocol::cluster::wire::{FileFacts, Object, WireState, WriterFact};
use tidemark_protocol::file::{FileFate, Seal};
use tidemark_protocol::id::Incarnation;

impl Node {
    /// Whether a process here has a file open with other bytes than those that its home publishes.
    pub(super) fn is_open_with_other_bytes(&self, facts: &FileFacts) -> Result<bool, FsError> {
        let file = self.file()?;
        let was = file.fate.seal().map(|seal| seal.number);
        let in_use = file.backing.is_some() && file.opens > 0 && !file.busy;
        // A file that was begun elsewhere is read as empty here until it has a size.
        let is_fuller = was.is_none() && file.size_bytes != facts.size_bytes;
        // Without a name, it cannot be opened anew.
        Ok(self.link_count() > 0 && in_use && (was != facts.sealed() || is_fuller))
    }
}

impl State {
    /// Accepts the facts about a file's bytes that its home publishes.
    pub(super) fn take_facts(
        &mut self,
        id: NodeId,
        facts: &FileFacts,
        home: Incarnation,
    ) -> Result<(), FsError> {
        let file = self.tree.file_mut(id)?;
        let before = Candidate::of(id, file);
        let was = file.fate.seal().map(|seal| seal.number);
        let sealed = facts.sealed();
        let stays = sealed.is_some() && was == sealed;
        file.remote = Some(Box::new(Remote {
            home,
            state: facts.file_state(),
            published_ns: facts.published_ns,
            vouched: facts.vouched,
            host: facts.host,
        }));
        file.opened_ns = facts.opened_ns;
        file.closed_ns = facts.closed_ns;
        file.writers = facts.writers.iter().map(|fact| Arc::new(writer(fact, home))).collect();
        let mut dropped = None;
        if !stays {
            // The bytes here belong to another seal.
            file.class = ReclaimClass::Never;
            if file.opens == 0 && !file.busy {
                dropped = file.backing.take();
                file.object = None;
            }
            let seal = match &facts.state {
                WireState::Sealed { crc, chunks } if is_consistent(facts.size_bytes, chunks.len()) => {
                    Some(Seal {
                        number: facts.seal,
                        size_bytes: facts.size_bytes,
                        crc: *crc,
                        chunks: Arc::clone(chunks),
                    })
                }
                _ => None,
            };
            file.fate = FileFate::found(seal, facts.seal, false, false, facts.vouched);
            file.changes += 1;
        }
        if file.backing.is_none() {
            file.size_bytes = facts.size_bytes;
        }
        if let Some(object) = &facts.object
            && file.object.is_none()
            && sealed.is_some()
        {
            file.object = Some(Box::new((facts.seal, object_copy(object))));
            // A home names an object once a marker or a sidecar leads to it. Bytes fetched from then on are a copy of that object.
            if file.class == ReclaimClass::Never {
                file.class = ReclaimClass::CommittedNewest;
            }
        }
        let after = file.backing.is_some().then(|| Candidate::of(id, file));
        self.reclaimable.remove(&before);
        after.into_iter().for_each(|after| self.reclaimable.add(after));
        self.trash.extend(dropped);
        if !stays {
            self.tree.touched.chunks.push(id);
        }
        self.waiters.woken = true;
        self.tree.touched.node(id);
        self.tree.mark(id);
        Ok(())
    }
}

fn is_consistent(size_bytes: u64, chunks: usize) -> bool {
    i64::try_from(size_bytes).is_ok() && tidemark_protocol::layout::chunk_count(size_bytes) == chunks as u64
}

/// Converts a copy in Tier-3 from a peer's description.
#[must_use]
pub fn object_copy(object: &Object) -> ObjectCopy {
    ObjectCopy {
        key: object.key.clone(),
        size_bytes: object.size_bytes,
        encoding: object.encoding.clone().map(Arc::new),
    }
}

/// Converts a copy in Tier-3 to the description for a peer.
#[must_use]
pub fn object_of(copy: &ObjectCopy) -> Object {
    Object { key: copy.key.clone(), size_bytes: copy.size_bytes, encoding: copy.encoding.as_deref().cloned() }
}

fn writer(fact: &WriterFact, home: Incarnation) -> WriterId {
    WriterId {
        session: SessionKey(fact.session.clone()),
        world_size: fact.world_size,
        rank: fact.rank,
        environment_seen: fact.environment_seen,
        tgid: fact.process.0,
        start_time_ticks: fact.process.1,
        home: Some(home),
    }
}

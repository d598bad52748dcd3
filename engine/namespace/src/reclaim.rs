//! Reclaim: giving host copies' memory back where Tier-3 has the bytes.
//!
//! Owns: which file goes first, noting object copies. Does not own: when (the node loop), what is committed.

use super::cold::HostCopies;
use super::file::{File, ObjectCopy};
use super::host_room::HostRoom;
use super::{FsError, NodeId, ReclaimClass, State};
use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Instant;
use tidemark_protocol::file::FileEvent;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::replication::GAVE_WAY;
use tidemark_tier1::Backing;

/// Where host copies lie. Each place has its own room, and making room in one does not help the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Memory,
    Spill,
}

impl Place {
    pub(super) fn of(backing: &Backing) -> Self {
        if backing.is_spilled() { Self::Spill } else { Self::Memory }
    }
}

/// Copies that a round of reclaiming takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// All copies except just prefetched ones.
    Any,
    Prefetched,
}

/// Files examined in one hold of the lock.
const EXAMINED_AT_ONCE: usize = 1024;

/// A file that may be reclaimed, in the order of taking: class first, then the longest closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    class: ReclaimClass,
    closed_ns: i64,
    node: NodeId,
}

impl Candidate {
    pub(super) fn of(node: NodeId, file: &File) -> Self {
        Self { class: file.class, closed_ns: file.closed_ns, node }
    }
}

/// The host copies that may give way, in the order in which they do.
#[derive(Debug, Default)]
pub(super) struct Reclaimable {
    candidates: BTreeSet<Candidate>,
    /// Files without a name that the kernel may remember without knowing that they have none: their bytes give way first.
    leftovers: BTreeSet<NodeId>,
}

impl Reclaimable {
    /// Adds a host copy that may give way, unless its class says never.
    pub(super) fn add(&mut self, candidate: Candidate) {
        if candidate.class != ReclaimClass::Never {
            self.candidates.insert(candidate);
        }
    }

    pub(super) fn remove(&mut self, candidate: &Candidate) {
        self.candidates.remove(candidate);
    }

    /// Returns up to `most` candidates after `after`, or from the first if there is none.
    fn after(&self, after: Option<Candidate>, most: usize) -> Vec<Candidate> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.candidates.range((from, Bound::Unbounded)).take(most).copied().collect()
    }

    pub(super) fn add_leftover(&mut self, node: NodeId) {
        self.leftovers.insert(node);
    }

    pub(super) fn remove_leftover(&mut self, node: NodeId) {
        self.leftovers.remove(&node);
    }

    fn take_leftovers(&mut self) -> BTreeSet<NodeId> {
        std::mem::take(&mut self.leftovers)
    }
}

impl HostCopies<'_> {
    /// Sets the class in which a file may be reclaimed. A file that is changed goes back to `Never`.
    pub fn set_reclaim(&self, file: FileId, class: ReclaimClass) {
        self.state.look(|state| {
            let Some(node) = state.node_of(file, self.state.incarnation) else { return };
            let Ok(known) = state.tree.file_mut(node) else { return };
            let before = Candidate::of(node, known);
            known.class = class;
            let after = Candidate::of(node, known);
            let here = known.backing.is_some();
            state.reclaimable.remove(&before);
            if here {
                state.reclaimable.add(after);
            }
        });
    }

    /// Lets every host copy with a noted copy in Tier-3 give way. Meant for a member of a cluster, which was told so once, perhaps before
    /// its daemon restarted; a node that decides over checkpoints sets classes itself. Costs a look at every node, in slices.
    pub fn let_known_objects_give_way(&self) {
        self.state.for_each_node(|state, id| {
            let Ok(file) = state.tree.file_mut(id) else { return };
            let seal = file.fate.seal().map(|seal| seal.number);
            let noted = seal.is_some() && file.object.as_ref().map(|noted| noted.0) == seal;
            if !noted || file.class != ReclaimClass::Never {
                return;
            }
            file.class = ReclaimClass::CommittedNewest;
            if file.backing.is_some() {
                let key = Candidate::of(id, file);
                state.reclaimable.add(key);
            }
        });
    }

    /// Whether a copy in Tier-3 is noted of that seal.
    #[must_use]
    pub fn has_object(&self, file: FileId, seal: SealNumber) -> bool {
        self.state.look(|state| {
            let known =
                state.node_of(file, self.state.incarnation).and_then(|node| state.tree.file_mut(node).ok());
            known.and_then(|known| known.object.as_ref()).is_some_and(|noted| noted.0 == seal)
        })
    }

    /// Notes that Tier-3 holds the bytes of a seal. False when the file has other bytes by now.
    pub fn note_object(&self, file: FileId, seal: SealNumber, object: ObjectCopy) -> bool {
        let noted = self.state.change(|state| {
            let node = state.node_of(file, self.state.incarnation).ok_or(FsError::NotFound)?;
            let known = state.tree.file_mut(node)?;
            if known
                .fate
                .seal()
                .is_none_or(|sealed| sealed.number != seal || sealed.size_bytes != object.size_bytes)
            {
                return Err(FsError::Stale);
            }
            let encoded = object.encoding.is_some();
            known.object = Some(Box::new((seal, object)));
            state.tree.touched.node(node);
            if encoded {
                state.tree.touched.chunks.push(node);
            }
            state.tree.mark(node);
            Ok(())
        });
        noted.is_ok()
    }

    /// Forgets a copy that Tier-3 no longer holds: the host copy is the only one again and is not reclaimed.
    pub fn forget_object(&self, file: FileId, seal: SealNumber) {
        let forgotten = self.state.change(|state| {
            let Some(node) = state.node_of(file, self.state.incarnation) else { return Ok(()) };
            let known = state.tree.file_mut(node)?;
            if known.object.as_ref().is_some_and(|noted| noted.0 == seal) {
                known.object = None;
                state.tree.touched.node(node);
                state.tree.mark(node);
            }
            Ok(())
        });
        if let Err(error) = forgotten {
            tracing::error!(%file, %seal, %error, "the journal still names an object that is gone");
        }
    }
}

impl<'a> HostRoom<'a> {
    /// Reclaims host copies in class order, longest closed first, until `bytes` are free or nothing is left to
    /// take; returns the bytes freed. Open, held and just restored files are passed over.
    pub fn make_room(&self, bytes: u64) -> u64 {
        self.make_room_in(Place::Memory, bytes)
    }

    /// Does the same for the files in one of the two places. Prefetched files go last.
    pub fn make_room_in(&self, place: Place, bytes: u64) -> u64 {
        let mut freed = self.drop_leftovers(place);
        freed += self.make_room_from(place, bytes.saturating_sub(freed), Wanted::Any);
        if freed < bytes {
            freed + self.make_room_from(place, bytes - freed, Wanted::Prefetched)
        } else {
            freed
        }
    }

    /// Does the same for a prefetch, which takes no prefetched files.
    pub(super) fn make_room_gently(&self, bytes: u64) -> u64 {
        self.make_room_from(Place::Memory, bytes, Wanted::Any)
    }

    /// Drops the bytes of files without a name that the kernel may remember only because it does not know that.
    fn drop_leftovers(&self, place: Place) -> u64 {
        let dropped = self.state.change(|state| {
            let leftovers = state.reclaimable.take_leftovers();
            Ok(leftovers.into_iter().map(|node| state.drop_leftover(node, place)).sum())
        });
        dropped.unwrap_or(0)
    }

    fn make_room_from(&self, place: Place, bytes: u64, wanted: Wanted) -> u64 {
        let mut freed = 0;
        let mut after: Option<Candidate> = None;
        while freed < bytes {
            let turn = self.state.change(|state| {
                let batch = state.reclaimable.after(after, EXAMINED_AT_ONCE);
                let mut taken = 0;
                for candidate in &batch {
                    if freed + taken >= bytes {
                        break;
                    }
                    let file = state.tree.file_mut(candidate.node);
                    if file.is_ok_and(|file| file.may_be_taken(place, wanted)) {
                        taken += state.evict(candidate.node).unwrap_or(0);
                    }
                }
                Ok((batch.last().copied(), taken))
            });
            let Ok((last, taken)) = turn else { break };
            freed += taken;
            if last.is_none() {
                break;
            }
            after = last;
        }
        freed
    }

    /// Reclaims one host copy; returns its bytes. The caller has decided; the class is not asked.
    ///
    /// # Errors
    /// [`FsError::Busy`] while it is open, held, not sealed, or without an object copy of this seal.
    pub fn reclaim(&self, node: NodeId) -> Result<u64, FsError> {
        self.state.change(|state| state.evict(node))
    }
}

impl File {
    /// Whether a round of reclaiming may take the file's bytes, judged by the file alone.
    fn may_be_taken(&self, place: Place, wanted: Wanted) -> bool {
        let here = self.backing.as_deref().is_some_and(|backing| Place::of(backing) == place);
        let prefetched = self.prefetched_until.is_some_and(|until| Instant::now() < until);
        here && (!prefetched || wanted == Wanted::Prefetched)
    }
}

impl State {
    /// Drops a nameless file's bytes; returns how many were freed. A file that is in use, or in another place, stays for the next time.
    fn drop_leftover(&mut self, node: NodeId, place: Place) -> u64 {
        let Ok(known) = self.tree.node_mut(node) else { return 0 };
        if known.link_count() > 0 {
            return 0;
        }
        let Ok(file) = known.file_mut() else { return 0 };
        let here = file.backing.as_deref().is_some_and(|backing| Place::of(backing) == place);
        if !here || file.opens > 0 || file.busy {
            self.reclaimable.add_leftover(node);
            return 0;
        }
        let freed = if file.is_held() { 0 } else { file.size_bytes };
        let key = Candidate::of(node, file);
        self.trash.extend(file.backing.take());
        file.happens(FileEvent::Changed);
        self.reclaimable.remove(&key);
        self.tree.touched.node(node);
        freed
    }

    /// Drops a host copy whose bytes Tier-3 has; returns the bytes freed. A file that shares the memory of a peer copy gives way with it.
    fn evict(&mut self, node: NodeId) -> Result<u64, FsError> {
        let Some(backing) = self.drop_backing(node)? else { return Ok(0) };
        let size_bytes = self.tree.file_mut(node)?.size_bytes;
        let mut dropped = vec![backing];
        if let Some(file) = self.withdraw_copy(node, GAVE_WAY)
            && let Some(sharer) = self.identities.adopted(file)
            && let Ok(Some(backing)) = self.drop_backing(sharer)
        {
            dropped.push(backing);
        }
        let is_last = dropped.iter().all(|backing| Arc::ptr_eq(backing, &dropped[0]))
            && Arc::strong_count(&dropped[0]) == dropped.len();
        self.trash.extend(dropped);
        Ok(if is_last { size_bytes } else { 0 })
    }

    /// Takes the backing from a file that is at rest and that Tier-3 has; none if the bytes are not here. Drops it and never truncates: a
    /// mapping keeps dropped bytes, while a truncation would raise SIGBUS in it.
    fn drop_backing(&mut self, node: NodeId) -> Result<Option<Arc<Backing>>, FsError> {
        let file = self.tree.file_mut(node)?;
        let seal = file.fate.seal().map(|seal| seal.number);
        let elsewhere = seal.is_some() && file.object.as_ref().map(|noted| noted.0) == seal;
        let kept = file.kept_until.is_some_and(|until| Instant::now() < until);
        if file.opens > 0 || file.busy || file.is_held() || kept || !elsewhere {
            return Err(FsError::Busy);
        }
        let Some(backing) = file.backing.take() else { return Ok(None) };
        let key = Candidate::of(node, file);
        self.reclaimable.remove(&key);
        self.tree.touched.node(node);
        self.tree.mark(node);
        Ok(Some(backing))
    }
}

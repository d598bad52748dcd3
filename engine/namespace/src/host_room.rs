//! Backing files for new bytes, and the room for them.
//!
//! Owns: which of memory and spill a file gets, that others give way once for it, statfs. Does not own: which files give way (`reclaim`),
//! waiting (`room`), the memory (`tier1`).

use super::FsError;
use super::guarded::Guarded;
use super::handle::{OpenFile, Statfs};
use super::reclaim::Place;
use super::room::Room;
use std::sync::Arc;
use tidemark_protocol::error::ErrorKind;
use tidemark_tier1::{Backing, Tier1, Tier1Error};

/// Room made for a file of unknown size: the first allocation of a backing file.
const UNKNOWN_SIZE_ROOM_BYTES: u64 = 2 << 20;

/// Memory for new bytes.
#[derive(Debug, Clone, Copy)]
pub struct HostRoom<'a> {
    pub(super) state: &'a Guarded,
    pub(super) tier1: &'a Arc<Tier1>,
    pub(super) waits: &'a Room,
}

impl<'a> HostRoom<'a> {
    /// Returns a backing file from the pool; makes room once when there is none.
    pub(super) fn new_backing(&self, predicted_bytes: Option<u64>) -> Result<Arc<Backing>, FsError> {
        Ok(self.backing_for(predicted_bytes)?)
    }

    /// Returns a backing file in memory, for which others give way; else in the spill, if there is one.
    ///
    /// # Errors
    /// [`Tier1Error::NoSpace`], [`Tier1Error::SpillFull`] when neither has room now: see [`HostRoom::room_wait`].
    pub fn backing_for(&self, predicted_bytes: Option<u64>) -> Result<Arc<Backing>, Tier1Error> {
        self.backing_from(predicted_bytes, |bytes| self.make_room(bytes))
    }

    /// Returns the same for a prefetch, for which no other prefetched file gives way.
    ///
    /// # Errors
    /// As [`HostRoom::backing_for`].
    pub fn backing_for_prefetch(&self, size_bytes: u64) -> Result<Arc<Backing>, Tier1Error> {
        self.backing_from(Some(size_bytes), |bytes| self.make_room_gently(bytes))
    }

    fn backing_from(
        &self,
        predicted_bytes: Option<u64>,
        make_room: impl FnOnce(u64) -> u64,
    ) -> Result<Arc<Backing>, Tier1Error> {
        let is_full = |error: &Tier1Error| error.kind() == ErrorKind::NoSpace;
        let spills = self.tier1.has_spill();
        if self.tier1.is_outgrown(predicted_bytes) {
            match self.tier1.create_spilled(predicted_bytes) {
                Err(error) if is_full(&error) => {}
                made => return made,
            }
        }
        match self.tier1.create(predicted_bytes) {
            Err(error) if is_full(&error) => {}
            made => return made,
        }
        let wanted = predicted_bytes.unwrap_or_else(|| self.tier1.unknown_bytes());
        make_room(wanted.max(UNKNOWN_SIZE_ROOM_BYTES));
        match self.tier1.create(predicted_bytes) {
            Err(error) if is_full(&error) && spills => {}
            made => return made,
        }
        match self.tier1.create_spilled(predicted_bytes) {
            Err(error) if is_full(&error) => {
                self.make_room_in(Place::Spill, wanted.max(UNKNOWN_SIZE_ROOM_BYTES));
                self.tier1.create_spilled(predicted_bytes)
            }
            made => made,
        }
    }

    /// Reserves for a saved-over file the size that it had ([`OpenFile::awaits_bytes`]), and waits, up to a limit, for the room. Called
    /// after the opener has given back all other room. Failure only logs a warning: the size is a guess, and the new bytes may be fewer.
    pub fn wait_for_expected(&self, file: &OpenFile) {
        let (backing, bytes) = (&file.backing, file.awaits_bytes);
        if bytes == 0 {
            return;
        }
        let mut wait = self.room_wait();
        loop {
            match backing.reserve(bytes) {
                Ok(()) => return,
                Err(error) => {
                    self.make_room_in(Place::of(backing), bytes);
                    if !wait.again() {
                        tracing::warn!(%error, "an overwritten file begins without the room that it had");
                        return;
                    }
                }
            }
        }
    }

    /// Sets a file's length. Tier-1 must admit the growth; if it cannot, room is made once.
    pub(super) fn grow(&self, backing: &Arc<Backing>, old_bytes: u64, new_bytes: u64) -> Result<(), FsError> {
        match backing.set_len(new_bytes).map_err(FsError::from) {
            Err(FsError::NoSpace) if new_bytes > old_bytes => {
                self.make_room_in(Place::of(backing), new_bytes - old_bytes);
                Ok(backing.set_len(new_bytes)?)
            }
            set => set,
        }
    }

    /// Returns Tier-1's budget with the spill's, and how many more nodes the journal can hold.
    pub fn statfs(&self) -> Statfs {
        let usage = self.tier1.usage();
        let (nodes, weight) =
            self.state.look(|state| (state.tree.nodes.len() as u64, state.tree.weight_bytes));
        let spill = self.tier1.spill_usage();
        let (spill_bytes, spill_free) =
            spill.map_or((0, 0), |spill| (spill.size_bytes, spill.available_bytes));
        Statfs {
            size_bytes: usage.size_bytes + spill_bytes,
            free_bytes: usage.size_bytes.saturating_sub(usage.used_bytes) + spill_free,
            nodes,
            nodes_free: self.state.weight_limit().saturating_sub(weight) / 400,
        }
    }
}

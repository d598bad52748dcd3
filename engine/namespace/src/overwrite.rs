//! Preparing bytes for a change while other programs may hold them.
//!
//! Owns: the work outside the lock before a change: a new backing file, a copy, a new length. Does not own: the choice (`open`), sending
//! threads back to the names (`stale`), the change itself (`State::apply_change`).

use super::attr::freeze;
use super::guarded::Guarded;
use super::host_room::HostRoom;
use super::open::Change;
use super::view::NodeViews;
use super::{FsError, LockOracle, NodeId, Prediction};
use std::sync::{Arc, RwLock};
use tidemark_tier1::Backing;

/// Bytes copied at a time when a frozen file is opened for update.
const COPY_BYTES: usize = 4 << 20;

/// Preparation of bytes for a change while other programs may hold them.
#[derive(Clone, Copy)]
pub(super) struct Overwrites<'a> {
    pub(super) state: &'a Guarded,
    pub(super) room: HostRoom<'a>,
    pub(super) prediction: &'a RwLock<Option<Prediction>>,
    pub(super) locks: &'a RwLock<Option<LockOracle>>,
}

impl<'a> Overwrites<'a> {
    /// Returns the size of the last file of this node's name; 0 if it is unknown.
    pub(super) fn expected_bytes(&self, node: NodeId) -> u64 {
        NodeViews { state: self.state }.path_of(node).and_then(|path| self.predict(&path)).unwrap_or(0)
    }

    pub(super) fn predict(&self, path: &[u8]) -> Option<u64> {
        self.prediction.read().expect(super::UNPOISONED).as_ref().and_then(|predict| predict(path))
    }

    /// Returns an empty backing file for a file that is overwritten, of the expected size if there is room for that beside the old bytes.
    pub(super) fn prepare_overwrite(&self, expected_bytes: u64) -> Result<Option<Arc<Backing>>, FsError> {
        match self.room.new_backing(Some(expected_bytes)) {
            Err(FsError::NoSpace) => self.room.new_backing(Some(0)).map(Some),
            made => made.map(Some),
        }
    }

    /// Does, outside the lock, the work that a change needs: the busy mark keeps all other calls off these bytes.
    pub(super) fn prepare(
        &self,
        node: NodeId,
        change: Change,
        new_size_bytes: u64,
        old_size_bytes: u64,
    ) -> Result<Option<Arc<Backing>>, FsError> {
        let (old, opens) = self
            .state
            .look(|state| state.tree.node(node)?.file().map(|file| (file.backing.clone(), file.opens)))?;
        match change {
            Change::InPlace => {
                if new_size_bytes != old_size_bytes {
                    let old = old.ok_or(FsError::Stale)?;
                    self.state.look(|state| freeze(state.tree.node_mut(node)?))?;
                    return match self.room.grow(&old, old_size_bytes, new_size_bytes) {
                        // While the file is open the kernel allows it no other backing file.
                        Err(FsError::NoSpace)
                            if opens == 0 && !old.is_spilled() && self.room.tier1.has_spill() =>
                        {
                            let fresh = self.room.tier1.create_spilled(Some(new_size_bytes))?;
                            copy(&old, &fresh, old_size_bytes)?;
                            fresh.set_len(new_size_bytes)?;
                            Ok(Some(fresh))
                        }
                        grown => grown.map(|()| None),
                    };
                }
                Ok(None)
            }
            Change::NewBacking { keep_bytes } | Change::NewNode { keep_bytes } => {
                let fresh = self.room.new_backing(Some(new_size_bytes))?;
                if let (Some(old), true) = (old, keep_bytes > 0) {
                    copy(&old, &fresh, keep_bytes)?;
                }
                if new_size_bytes != keep_bytes {
                    self.room.grow(&fresh, keep_bytes, new_size_bytes)?;
                }
                Ok(Some(fresh))
            }
        }
    }
}

fn copy(from: &Backing, to: &Backing, len_bytes: u64) -> Result<(), FsError> {
    let mut buffer = vec![0; COPY_BYTES.min(usize::try_from(len_bytes).unwrap_or(COPY_BYTES))];
    let mut offset = 0;
    while offset < len_bytes {
        let want = usize::try_from(len_bytes - offset).map_or(buffer.len(), |left| left.min(buffer.len()));
        let read = from.read_at(&mut buffer[..want], offset)?;
        if read == 0 {
            break; // Someone shortened it after its size was read; what is beyond reads as zeros.
        }
        let mut written = 0;
        while written < read {
            let wrote = to.write_at(&buffer[written..read], offset + written as u64)?;
            if wrote == 0 {
                return Err(FsError::NoSpace);
            }
            written += wrote;
        }
        offset += read as u64;
    }
    Ok(())
}

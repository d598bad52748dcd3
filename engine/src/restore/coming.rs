//! Bytes that are being brought into this node's memory.
//!
//! Owns: the set of these bytes, each as long as a task brings it. Does not own: bringing them (`restorer`), waiting for them
//! (`replicate::serve`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tidemark_protocol::id::{FileId, SealNumber};

type Bytes = (FileId, SealNumber);

/// Number of fetches of each file: one may be for an open, and another for the node itself.
#[derive(Debug, Default)]
pub struct Coming(Mutex<BTreeMap<Bytes, usize>>);

/// A fetch in progress; dropping it ends the fetch's entry.
#[derive(Debug)]
pub struct Bringing {
    coming: Arc<Coming>,
    bytes: Bytes,
}

impl Coming {
    #[must_use]
    pub fn begin(self: &Arc<Self>, bytes: Bytes) -> Bringing {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(bytes).or_insert(0) += 1;
        Bringing { coming: Arc::clone(self), bytes }
    }

    #[must_use]
    pub fn has(&self, file: FileId, seal: SealNumber) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&(file, seal))
    }
}

impl Drop for Bringing {
    fn drop(&mut self) {
        let mut coming = self.coming.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = coming.get_mut(&self.bytes) {
            *count -= 1;
            if *count == 0 {
                coming.remove(&self.bytes);
            }
        }
    }
}

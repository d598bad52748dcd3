//! Files of which no copy is good.
//!
//! Owns: which, why, and what is new of that. Does not own: finding that out (an open, `verify`), what follows for a checkpoint
//! (`node::visibility`).
//!
//! The next daemon knows nothing of it: it finds out again, at the first open.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tidemark_protocol::id::{FileId, SealNumber};

/// Files remembered. Of more the rest is found again when it is opened.
const LOSSES_MAX: usize = 10_000;

/// Files of which no copy is good, and why.
#[derive(Debug, Default)]
pub struct Losses(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    why: BTreeMap<(FileId, SealNumber), String>,
    /// Files of versions whose commit cannot be read: names in the tree, so that a job sees that there was something.
    refused: BTreeMap<(FileId, SealNumber), String>,
    news: bool,
    /// Some of them were read whole since.
    good_news: bool,
}

impl Losses {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an open of every file may find its bytes.
    pub(crate) fn is_empty(&self) -> bool {
        let known = self.lock();
        known.why.is_empty() && known.refused.is_empty()
    }

    pub(crate) fn note(&self, file: FileId, seal: SealNumber, why: String) {
        let mut known = self.lock();
        if known.why.len() < LOSSES_MAX {
            known.news |= known.why.insert((file, seal), why).is_none();
        }
    }

    /// From now on an open of these bytes fails with that reason.
    pub(crate) fn refuse(&self, file: FileId, seal: SealNumber, why: String) {
        self.lock().refused.insert((file, seal), why);
    }

    /// Why an open of these bytes fails before any copy is asked.
    pub(crate) fn refusal(&self, file: FileId, seal: SealNumber) -> Option<String> {
        self.lock().refused.get(&(file, seal)).cloned()
    }

    /// Why no copy is good; none for all that is known.
    pub(crate) fn why(&self, file: FileId, seal: SealNumber) -> Option<String> {
        self.lock().why.get(&(file, seal)).cloned()
    }

    /// It was read whole after all.
    pub(crate) fn mend(&self, file: FileId, seal: SealNumber) {
        let mut known = self.lock();
        known.good_news |= known.why.remove(&(file, seal)).is_some();
    }

    /// Its bytes were given up: that no copy is good means nothing.
    pub(crate) fn forget(&self, file: FileId, seal: SealNumber) {
        self.lock().why.remove(&(file, seal));
    }

    pub(crate) fn take_news(&self) -> bool {
        std::mem::take(&mut self.lock().news)
    }

    pub(crate) fn take_good_news(&self) -> bool {
        std::mem::take(&mut self.lock().good_news)
    }
}

//! Files of which no copy is good.
//!
//! Owns: these files, the reasons, and whether any is new. Does not own: finding them (an open, `verify`), the consequences for a
//! checkpoint (`node::visibility`).
//!
//! A restarted daemon knows no losses, and finds each again at the first open.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tidemark_protocol::id::{FileId, SealNumber};

/// Maximum number of files remembered. Any other is found again when it is opened.
const LOSSES_MAX: usize = 10_000;

/// Files of which no copy is good, with the reasons.
#[derive(Debug, Default)]
pub struct Losses(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    why: BTreeMap<(FileId, SealNumber), String>,
    /// Files of versions whose commit cannot be read. Their names stay in the tree, so that a job sees that the files existed.
    refused: BTreeMap<(FileId, SealNumber), String>,
    news: bool,
    /// Whether some lost files were read whole since.
    good_news: bool,
}

impl Losses {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no loss and no refusal is known.
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

    /// Makes every later open of these bytes fail with that reason.
    pub(crate) fn refuse(&self, file: FileId, seal: SealNumber, why: String) {
        self.lock().refused.insert((file, seal), why);
    }

    /// Returns the reason for which an open of these bytes fails before any copy is read; none if no reason is known.
    pub(crate) fn refusal(&self, file: FileId, seal: SealNumber) -> Option<String> {
        self.lock().refused.get(&(file, seal)).cloned()
    }

    /// Returns the reason why no copy of these bytes is good; none if they are not known as lost.
    pub(crate) fn why(&self, file: FileId, seal: SealNumber) -> Option<String> {
        self.lock().why.get(&(file, seal)).cloned()
    }

    /// Forgets the loss of bytes that were read whole after all.
    pub(crate) fn mend(&self, file: FileId, seal: SealNumber) {
        let mut known = self.lock();
        known.good_news |= known.why.remove(&(file, seal)).is_some();
    }

    /// Forgets the loss of bytes that were retired or removed, and so no longer matter.
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

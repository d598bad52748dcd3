//! One file's life: open, closed or cut, mapped, sealed, and open again.
//!
//! Owns: [`File`], and what follows in it from each event. Does not own: the rules from one state to the next
//! (`protocol::file`), where its bytes are moved (`open`, `cold`, `reclaim`), when it is sealed (the node loop).

use super::mirror::Remote;
use super::writer::WriterId;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;
use tidemark_content::Judgement;
use tidemark_protocol::encoding::{Encoding, ObjectLayout};
use tidemark_protocol::file::{FileEvent, FileFate};
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::manifest::ManifestFile;
use tidemark_protocol::residency::ReclaimClass;
use tidemark_tier1::Backing;
use tokio::sync::Notify;

/// Processes remembered per file: forked writers of one shard, never a crowd. Later ones are left out.
pub(super) const MAX_WRITERS: usize = 64;

/// A copy of a seal's bytes in Tier-3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectCopy {
    pub key: String,
    /// The file's size; the object's own is another where it is encoded.
    pub size_bytes: u64,
    pub encoding: Option<Arc<Encoding>>,
}

impl ObjectCopy {
    /// As a manifest lists it.
    #[must_use]
    pub fn of(file: &ManifestFile) -> Self {
        let encoding = file.encoding.clone().map(Arc::new);
        Self { key: file.key.clone(), size_bytes: file.size_bytes, encoding }
    }

    /// Where its chunks lie.
    #[must_use]
    pub fn layout(&self) -> ObjectLayout {
        ObjectLayout::new(self.size_bytes, self.encoding.as_deref())
    }
}

/// While one lives, someone reads a seal's bytes (to hash or to upload them): they are copied, not changed.
#[derive(Debug, Default)]
pub(super) struct SealHold {
    abandoned: AtomicBool,
    told: Notify,
}

impl SealHold {
    /// Nobody wants what is made of these bytes any more, and their memory is needed.
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
        self.told.notify_waiters();
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    /// Resolves when it is abandoned.
    pub(super) async fn abandoned(&self) {
        loop {
            let told = self.told.notified();
            if self.is_abandoned() {
                return;
            }
            told.await;
        }
    }
}

/// A file of the tree.
#[derive(Debug)]
pub(super) struct File {
    pub(super) id: FileId,
    pub(super) generation: Generation,
    /// None: COLD, the bytes are elsewhere.
    pub(super) backing: Option<Arc<Backing>>,
    /// Exact while nobody writes; the backing file knows better otherwise.
    pub(super) size_bytes: u64,
    /// Who may write it, and its seals.
    pub(super) fate: FileFate,
    /// The seal that the copy holds, and the copy.
    pub(super) object: Option<Box<(SealNumber, ObjectCopy)>>,
    /// What the bytes say of themselves, where they begin as a format; none where they were not asked since they last changed, or by
    /// this daemon.
    pub(super) judged: Option<Option<Box<Judgement>>>,
    pub(super) writers: Vec<Arc<WriterId>>,
    pub(super) opens: u32,
    pub(super) class: ReclaimClass,
    /// A call is changing its bytes outside the lock; others wait.
    pub(super) busy: bool,
    pub(super) opened_ns: i64,
    /// When its last writer let go of it.
    pub(super) closed_ns: i64,
    /// When close(2) last gave up a descriptor that could write: earlier than `closed_ns`, by much where a mapping stayed.
    pub(super) flushed_ns: i64,
    /// When the present name was given by link or rename.
    pub(super) named_ns: i64,
    /// The backing file's mtime at which nothing was written yet.
    pub(super) baseline_ns: i64,
    /// Counts whatever voids a ticket.
    pub(super) changes: u64,
    pub(super) hold: Weak<SealHold>,
    /// Sealed before this daemon started, and not looked at since: somebody may have touched the bytes meanwhile. Or found bad.
    pub(super) unverified: bool,
    /// Just restored for an open that has not come yet.
    pub(super) kept_until: Option<Instant>,
    /// Its writers are on another node.
    pub(super) remote: Option<Box<Remote>>,
    /// Restored, or found here, for opens that somebody foresaw.
    pub(super) prefetched_until: Option<Instant>,
}

impl File {
    /// Of its object, whichever seal that has.
    pub(super) fn encoding(&self) -> Option<&Encoding> {
        self.object.as_ref()?.1.encoding.as_deref()
    }

    /// A new, empty, closed file.
    pub(super) fn new(
        id: FileId,
        generation: Generation,
        backing: Option<Arc<Backing>>,
        now_ns: i64,
    ) -> Self {
        Self {
            id,
            generation,
            backing,
            size_bytes: 0,
            fate: FileFate::default(),
            object: None,
            judged: None,
            writers: Vec::new(),
            opens: 0,
            class: ReclaimClass::Never,
            busy: false,
            opened_ns: now_ns,
            closed_ns: now_ns,
            flushed_ns: now_ns,
            named_ns: now_ns,
            baseline_ns: 0,
            changes: 0,
            hold: Weak::new(),
            unverified: false,
            kept_until: None,
            remote: None,
            prefetched_until: None,
        }
    }

    /// Which file it is, once it is sealed.
    pub(super) fn sealed_id(&self) -> Option<FileId> {
        self.fate.seal().map(|_| self.id)
    }

    /// Takes an event that the order of the namespace's own calls makes lawful.
    pub(super) fn happens(&mut self, event: FileEvent) {
        if let Err(illegal) = self.fate.step(event) {
            tracing::error!(file = %self.id, %illegal, "the namespace believed otherwise of a file");
            debug_assert!(false, "{illegal}");
        }
    }

    /// Its bytes are in no place that is known.
    pub(super) fn is_lost(&self) -> bool {
        self.backing.is_none() && self.size_bytes > 0 && self.object.is_none()
    }

    /// Someone reads the present seal's bytes.
    pub(super) fn is_held(&self) -> bool {
        self.hold.strong_count() > 0
    }

    pub(super) fn hold(&mut self) -> Arc<SealHold> {
        self.hold.upgrade().unwrap_or_else(|| {
            let hold = Arc::new(SealHold::default());
            self.hold = Arc::downgrade(&hold);
            hold
        })
    }

    /// Whether its bytes lie in the backing file of this number.
    pub(super) fn lies_in(&self, number: u64) -> bool {
        self.backing.as_ref().is_some_and(|backing| backing.number() == number)
    }

    /// The bytes are about to change: what was said of the old ones no longer holds. `own` is the identity
    /// the file has from now on: one of another incarnation, or one of ours that was brought back under another node,
    /// becomes the node's own, so that no two ever number one seal.
    pub(super) fn unseal(&mut self, own: FileId) {
        self.happens(FileEvent::Changed);
        self.object = None;
        self.judged = None;
        self.class = ReclaimClass::Never;
        self.unverified = false;
        self.remote = None;
        self.changes += 1;
        if self.id != own {
            self.id = own;
            self.happens(FileEvent::Renumbered);
        }
    }

    pub(super) fn add_writer(&mut self, writer: Option<&Arc<WriterId>>) -> bool {
        let Some(writer) = writer else { return false };
        if self.writers.len() >= MAX_WRITERS || self.writers.iter().any(|known| known == writer) {
            return false;
        }
        self.writers.push(Arc::clone(writer));
        true
    }
}

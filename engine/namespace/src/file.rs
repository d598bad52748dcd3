//! Life of a file: open, closed or cut, mapped, sealed, and open again.
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

/// Most processes remembered per file: forked writers of one shard, never a crowd. Later ones are left out.
pub(super) const MAX_WRITERS: usize = 64;

/// A copy of a seal's bytes in Tier-3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectCopy {
    pub key: String,
    /// The file's size; an encoded object has another.
    pub size_bytes: u64,
    pub encoding: Option<Arc<Encoding>>,
}

impl ObjectCopy {
    /// Returns the copy that a manifest lists.
    #[must_use]
    pub fn of(file: &ManifestFile) -> Self {
        let encoding = file.encoding.clone().map(Arc::new);
        Self { key: file.key.clone(), size_bytes: file.size_bytes, encoding }
    }

    /// Returns where the copy's chunks lie.
    #[must_use]
    pub fn layout(&self) -> ObjectLayout {
        ObjectLayout::new(self.size_bytes, self.encoding.as_deref())
    }
}

/// While a hold lives, a job hashes or uploads a seal's bytes: a writer copies them instead of changing them.
#[derive(Debug, Default)]
pub(super) struct SealHold {
    abandoned: AtomicBool,
    told: Notify,
}

impl SealHold {
    /// Stops the readers: the result is unwanted by now, and the memory is needed.
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
        self.told.notify_waiters();
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    /// Waits until the hold is abandoned.
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
    /// The file's bytes; none if it is COLD, so that they are elsewhere.
    pub(super) backing: Option<Arc<Backing>>,
    /// Exact while no writer has the file open; otherwise the backing file has the exact size.
    pub(super) size_bytes: u64,
    /// Writers' state and seals, as `protocol::file` rules.
    pub(super) fate: FileFate,
    /// The copy in Tier-3 with the seal that it holds.
    pub(super) object: Option<Box<(SealNumber, ObjectCopy)>>,
    /// The format's own judgement of the bytes, where they begin as a format. None if they were not judged since their last change, or by
    /// this daemon.
    pub(super) judged: Option<Option<Box<Judgement>>>,
    pub(super) writers: Vec<Arc<WriterId>>,
    pub(super) opens: u32,
    pub(super) class: ReclaimClass,
    /// Whether a call is changing the bytes outside the lock; other calls wait.
    pub(super) busy: bool,
    pub(super) opened_ns: i64,
    /// When the last writer closed the file.
    pub(super) closed_ns: i64,
    /// When close(2) last closed a descriptor that could write. A mapping that stays can make `closed_ns` much later.
    pub(super) flushed_ns: i64,
    /// When the present name was given by link or rename.
    pub(super) named_ns: i64,
    /// The backing file's mtime as long as no write has come since the last measurement.
    pub(super) baseline_ns: i64,
    /// Counts all events that void a ticket.
    pub(super) changes: u64,
    pub(super) hold: Weak<SealHold>,
    /// Whether the bytes need verification: found bad, or sealed before this daemon started. A process may have changed them meanwhile.
    pub(super) unverified: bool,
    /// Set if the bytes were just restored for an open that has not come yet.
    pub(super) kept_until: Option<Instant>,
    /// Set if the file's writers are on another node.
    pub(super) remote: Option<Box<Remote>>,
    /// Set if the bytes were restored, or found here, for opens that a prefetch expects.
    pub(super) prefetched_until: Option<Instant>,
}

impl File {
    /// Returns the encoding of the object copy, whichever seal that has.
    pub(super) fn encoding(&self) -> Option<&Encoding> {
        self.object.as_ref()?.1.encoding.as_deref()
    }

    /// Makes a new, empty, closed file.
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

    /// Returns the file's identity while it is sealed.
    pub(super) fn sealed_id(&self) -> Option<FileId> {
        self.fate.seal().map(|_| self.id)
    }

    /// Applies an event that the order of the namespace's own calls makes lawful.
    pub(super) fn happens(&mut self, event: FileEvent) {
        if let Err(illegal) = self.fate.step(event) {
            tracing::error!(file = %self.id, %illegal, "the namespace believed otherwise of a file");
            debug_assert!(false, "{illegal}");
        }
    }

    /// Whether the bytes are in no known place.
    pub(super) fn is_lost(&self) -> bool {
        self.backing.is_none() && self.size_bytes > 0 && self.object.is_none()
    }

    /// Whether a job reads the present seal's bytes.
    pub(super) fn is_held(&self) -> bool {
        self.hold.strong_count() > 0
    }

    /// Returns the hold of the job that hashes bytes which have no seal yet.
    pub(super) fn seal_in_the_making(&self) -> Option<Arc<SealHold>> {
        if self.fate.seal().is_some() { None } else { self.hold.upgrade() }
    }

    pub(super) fn hold(&mut self) -> Arc<SealHold> {
        self.hold.upgrade().unwrap_or_else(|| {
            let hold = Arc::new(SealHold::default());
            self.hold = Arc::downgrade(&hold);
            hold
        })
    }

    /// Whether the bytes lie in the backing file of this number.
    pub(super) fn lies_in(&self, number: u64) -> bool {
        self.backing.as_ref().is_some_and(|backing| backing.number() == number)
    }

    /// Voids all that was known of the bytes, because they are about to change. `own` is the file's identity from now
    /// on. An identity of another incarnation, or one of ours that was brought back under another node, becomes the
    /// node's own, so that two files never number one seal.
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

//! One file's life: open, closed or cut, mapped, sealed, and open again.
//!
//! Owns: [`File`], [`FileState`] and the rules from one state to the next.
//! Does not own: where its bytes are moved (`open`, `cold`, `reclaim`), when it is sealed (the node loop).

use super::writer::WriterId;
use crate::tier1::Backing;
use std::sync::{Arc, Weak};
use std::time::Instant;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::id::{FileId, Generation, SealNumber};

/// Processes remembered per file: forked writers of one shard, never a crowd. Later ones are left out.
pub(super) const MAX_WRITERS: usize = 64;

/// Where a file is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileState {
    /// `writers` handles may write.
    Open { writers: u32 },
    /// The last writer called close(2).
    Closed,
    /// The kernel closed it for a process that was killed, or nobody saw it closed: torn, unless an index
    /// proves its size.
    Cut,
    /// Closed, but a writable mapping still lives; its bytes may change at any moment.
    Mapped,
    /// Frozen: these bytes, with these checksums (of the whole and of each chunk), have this number.
    Sealed { seal: SealNumber, size_bytes: u64, crc: Crc64, chunks: Arc<[Crc64]> },
}

/// A copy of a seal's bytes in Tier-3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectCopy {
    pub key: String,
    pub size_bytes: u64,
}

/// What may be taken of a file's host copy under pressure; in this order, `Never` never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ReclaimClass {
    /// Belongs to a committed version below the watermark: taken first.
    BelowWatermark,
    /// Fits no rule; uploaded and recorded.
    Loose,
    /// Of the newest committed version: taken last, and only under pressure.
    CommittedNewest,
    #[default]
    Never,
}

/// Frozen bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seal {
    pub(super) number: SealNumber,
    pub(super) size_bytes: u64,
    pub(super) crc: Crc64,
    pub(super) chunks: Arc<[Crc64]>,
}

/// While one lives, someone reads a seal's bytes (to hash or to upload them): they are copied, not changed.
#[derive(Debug)]
pub(super) struct SealHold;

/// A file of the tree.
#[derive(Debug)]
pub(super) struct File {
    pub(super) id: FileId,
    pub(super) generation: Generation,
    /// None: COLD, the bytes are elsewhere.
    pub(super) backing: Option<Arc<Backing>>,
    /// Exact while nobody writes; the backing file knows better otherwise.
    pub(super) size_bytes: u64,
    pub(super) seal: Option<Box<Seal>>,
    /// The last number given to a seal of this file.
    pub(super) last_seal: SealNumber,
    /// The seal that the copy holds, and the copy.
    pub(super) object: Option<Box<(SealNumber, ObjectCopy)>>,
    pub(super) writers: Vec<Arc<WriterId>>,
    pub(super) opens: u32,
    pub(super) write_opens: u32,
    pub(super) class: ReclaimClass,
    pub(super) cut: bool,
    pub(super) mapped: bool,
    /// fsync or rename came since it was last opened for writing.
    pub(super) durable: bool,
    /// utimens came while writers have it open.
    pub(super) times_set: bool,
    /// A call is changing its bytes outside the lock; others wait.
    pub(super) busy: bool,
    pub(super) opened_ns: i64,
    pub(super) closed_ns: i64,
    /// When the present name was given by link or rename.
    pub(super) named_ns: i64,
    pub(super) baseline_ns: i64,
    /// Counts whatever voids a ticket.
    pub(super) changes: u64,
    pub(super) hold: Weak<SealHold>,
    /// Just restored for an open that has not come yet.
    pub(super) kept_until: Option<Instant>,
}

impl File {
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
            seal: None,
            last_seal: SealNumber(0),
            object: None,
            writers: Vec::new(),
            opens: 0,
            write_opens: 0,
            class: ReclaimClass::Never,
            cut: false,
            mapped: false,
            durable: false,
            times_set: false,
            busy: false,
            opened_ns: now_ns,
            closed_ns: now_ns,
            named_ns: now_ns,
            baseline_ns: 0,
            changes: 0,
            hold: Weak::new(),
            kept_until: None,
        }
    }

    pub(super) fn state(&self) -> FileState {
        if self.write_opens > 0 {
            return FileState::Open { writers: self.write_opens };
        }
        if let Some(seal) = &self.seal {
            return FileState::Sealed {
                seal: seal.number,
                size_bytes: seal.size_bytes,
                crc: seal.crc,
                chunks: Arc::clone(&seal.chunks),
            };
        }
        match (self.cut, self.mapped) {
            (true, _) => FileState::Cut,
            (false, true) => FileState::Mapped,
            (false, false) => FileState::Closed,
        }
    }

    /// The seal's number where it is sealed, else the last one given.
    pub(super) fn seal_number(&self) -> SealNumber {
        self.seal.as_ref().map_or(self.last_seal, |seal| seal.number)
    }

    /// Someone reads the present seal's bytes.
    pub(super) fn is_held(&self) -> bool {
        self.hold.strong_count() > 0
    }

    pub(super) fn hold(&mut self) -> Arc<SealHold> {
        self.hold.upgrade().unwrap_or_else(|| {
            let hold = Arc::new(SealHold);
            self.hold = Arc::downgrade(&hold);
            hold
        })
    }

    /// The bytes are about to change: what was said of the old ones no longer holds. `own` is the identity
    /// the file has from now on; another incarnation's file becomes ours, so that no two ever number one seal.
    pub(super) fn unseal(&mut self, own: FileId) {
        self.seal = None;
        self.object = None;
        self.class = ReclaimClass::Never;
        self.changes += 1;
        self.mapped = false;
        self.durable = false;
        if self.id.incarnation != own.incarnation {
            self.id = own;
            self.last_seal = SealNumber(0);
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

//! The answer of `ckptctl tiers`: how full each tier is, who uses it, and why it is not falling.
//!
//! Owns: [`TierStatus`] of memory, the spill and Tier-3. Does not own: the numbers (each tier has its own).

use super::run::Engine;
use std::collections::BTreeMap;
use tidemark_namespace::Place;
use tidemark_protocol::report::{Marks, TierState, TierStatus};
use tidemark_protocol::size::Shown;
use tidemark_tier1::SpillUsage;

/// A tier with less than this to give calls itself full: many a shard is larger.
const FULL_BYTES: u64 = 64 << 20;

/// Name of the bytes in use that are no file's host copy.
const LINGERING: &str = "removed or replaced, still open or mapped";

/// The sizes of the tiers, and what holds their bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiers<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> Tiers<'a> {
    pub(crate) fn tiers(self) -> Vec<TierStatus> {
        let usage = self.engine.shared.tier1.usage();
        let warm = usage.warm_fraction();
        let full = usage.available_bytes < FULL_BYTES;
        // A part of the files, not beside them.
        let copies_of_peers = self.engine.shared.namespace.peer_copies().copies_usage();
        let state = match (full, warm < 0.95 && self.engine.shared.settings.tier1.ballast) {
            (true, _) => TierState::Full,
            (false, true) => TierState::Warming,
            (false, false) => TierState::Ok,
        };
        let users = [
            ("journal", usage.journal_bytes),
            ("files", usage.files_bytes.saturating_sub(copies_of_peers.bytes)),
            ("peer copies", copies_of_peers.bytes),
            ("lingering", usage.lingering_bytes),
        ];
        let copies = self.engine.ledger.copies;
        let private = &self.engine.shared.tier1.capabilities().private_tmpfs;
        let spill = self.engine.shared.tier1.spill_usage();
        let marks = self.engine.shared.settings.tier1.marks.of(usage.size_bytes);
        let mut held_by = self.held_by(Place::Memory, usage.used_bytes, marks);
        if !held_by.is_empty() && usage.lingering_bytes > 0 {
            held_by.insert(LINGERING.to_owned(), usage.lingering_bytes);
        }
        let tier1 = TierStatus {
            name: "tier1".to_owned(),
            used_bytes: usage.used_bytes,
            size_bytes: Some(usage.size_bytes),
            warm_fraction: Some(warm),
            state,
            medium: if private.works {
                "private tmpfs".to_owned()
            } else {
                format!("directory ({})", private.reason)
            },
            files: copies.host_files.saturating_sub(spill.as_ref().map_or(0, |spill| spill.files)),
            used_by: users.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect(),
            queued_bytes: 0,
            fencing: None,
            part_checksums: None,
            marks: Some(marks),
            held_by,
            notes: Vec::new(),
        };
        let store = &self.engine.shared.drain.store;
        let mut notes = Vec::new();
        if store.describe().starts_with("file://") {
            notes.push(
                "Tier-3 is a local directory: commits do not survive the loss of this machine".to_owned(),
            );
        }
        let tier3 = TierStatus {
            name: "tier3".to_owned(),
            used_bytes: copies.object_bytes,
            size_bytes: None,
            warm_fraction: None,
            state: if self.engine.tier3_away.trouble(&self.engine.shared).is_some() {
                TierState::Away
            } else {
                TierState::Ok
            },
            medium: store.describe(),
            files: copies.object_files,
            used_by: BTreeMap::new(),
            queued_bytes: self
                .engine
                .backlog
                .lag(&self.engine.ledger, self.engine.shared.now_ns(), None)
                .bytes,
            fencing: Some(self.engine.shared.drain.fencing()),
            part_checksums: Some(self.engine.shared.drain.part_checksums()),
            marks: None,
            held_by: BTreeMap::new(),
            notes,
        };
        [Some(tier1), spill.map(|spill| self.spill(&spill)), Some(tier3)].into_iter().flatten().collect()
    }

    fn spill(self, usage: &SpillUsage) -> TierStatus {
        let marks = self.engine.shared.settings.spill.marks.of(usage.size_bytes);
        let mut held_by = self.held_by(Place::Spill, usage.used_bytes, marks);
        if !held_by.is_empty() && usage.lingering_bytes > 0 {
            held_by.insert(LINGERING.to_owned(), usage.lingering_bytes);
        }
        let free = usage.size_bytes.saturating_sub(usage.used_bytes);
        let mut notes = Vec::new();
        if usage.used_bytes > usage.size_bytes {
            let over = Shown(usage.used_bytes - usage.size_bytes);
            notes.push(format!("writers of unknown size went {over} beyond the budget"));
        } else if usage.available_bytes < free {
            notes.push(format!(
                "the disk has only {} of the free {}",
                Shown(usage.available_bytes),
                Shown(free)
            ));
        }
        TierStatus {
            name: "spill".to_owned(),
            used_bytes: usage.used_bytes,
            size_bytes: Some(usage.size_bytes),
            warm_fraction: None,
            state: if usage.available_bytes < FULL_BYTES { TierState::Full } else { TierState::Ok },
            medium: format!("local disk, {}", usage.folder.display()),
            files: usage.files,
            used_by: [("files", usage.files_bytes), ("lingering", usage.lingering_bytes)]
                .map(|(name, bytes)| (name.to_owned(), bytes))
                .into(),
            queued_bytes: 0,
            fencing: None,
            part_checksums: None,
            marks: Some(marks),
            held_by,
            notes,
        }
    }

    /// Returns why a tier is not below its low mark. Empty: it is below.
    fn held_by(self, place: Place, used_bytes: u64, marks: Marks) -> BTreeMap<String, u64> {
        if used_bytes <= marks.low_bytes {
            return BTreeMap::new();
        }
        let kept = self.engine.shared.namespace.nodes().kept_in(place).into_iter();
        kept.map(|(by, bytes)| (by.words().to_owned(), bytes)).collect()
    }
}

//! Detects a tier that is full of files that may not be evicted. Saves then fail, and `status`, an event and the log say so.
//!
//! Owns: when a tier is full, and reporting it once. Does not own: making room (`save::reclaim`), refusing a call (`namespace::room`).
//!
//! Memory also keeps the tree's names, in a journal whose size is a part of Tier-1's. So there may be no room for another name while
//! there is room for bytes.
//!
//! With passthrough the kernel refuses a write without asking the daemon. So a tier counts as full by its free bytes, and not only by
//! the calls that the daemon refused.

use crate::node::Shared;
use crate::node::run::Engine;
use crate::node::tiers::Tiers;
use std::time::Duration;
use tidemark_namespace::{KeptBy, Place, Refusals};
use tidemark_protocol::report::{EventLevel, ProblemCode, TierStatus};
use tidemark_protocol::size::Shown;
use tokio::time::Instant;

/// Room below which a tier is full: many a shard is larger.
const FULL_BYTES: u64 = 64 << 20;
/// For a small tier, the limit is the tier's size divided by this.
const FULL_PART: u64 = 16;
/// Time for which a refused call is reported, so that a person who looks after a failed save finds the reason.
const SAID_FOR: Duration = Duration::from_secs(20);
/// Interval between two counts of the bytes that may be evicted: each costs a pass over the files.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// State of the loop for reporting a full tier.
#[derive(Debug, Default)]
pub(crate) struct Full {
    /// Whether memory was reported as full, and that has not ended.
    said: bool,
    not_before: Option<Instant>,
}

/// Room in a tier.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    size_bytes: u64,
    available_bytes: u64,
    /// Host copies that have another copy in Tier-3.
    may_give_way_bytes: u64,
}

impl Room {
    fn is_full(self) -> bool {
        let least = FULL_BYTES.min(self.size_bytes / FULL_PART);
        self.available_bytes.saturating_add(self.may_give_way_bytes) < least
    }
}

/// Whether a call was refused so lately that it is still reported.
fn is_recent(refusals: Refusals, now: Instant) -> bool {
    refusals.last.is_some_and(|last| now.saturating_duration_since(last.into()) < SAID_FOR)
}

impl Shared {
    pub(crate) fn room_in(&self, place: Place, may_give_way_bytes: u64) -> Option<Room> {
        let (size_bytes, available_bytes) = match place {
            Place::Memory => {
                let usage = self.tier1.usage();
                (usage.size_bytes, usage.available_bytes)
            }
            Place::Spill => {
                let spill = self.tier1.spill_usage()?;
                (spill.size_bytes, spill.available_bytes)
            }
        };
        Some(Room { size_bytes, available_bytes, may_give_way_bytes })
    }

    /// Describes the tiers that are full, each in a sentence. If there is a spill, full memory fails nothing while the spill has room.
    pub(crate) fn full_tiers(&self, tiers: &[TierStatus], now: Instant) -> Vec<(ProblemCode, String)> {
        let may_give_way = |name: &str| {
            let tier = tiers.iter().find(|tier| tier.name == name);
            tier.and_then(|tier| tier.held_by.get(KeptBy::Nothing.words())).copied().unwrap_or(0)
        };
        let sentence = |name: &str, title: &str, is: &str, room: Room| {
            let held = tiers.iter().find(|tier| tier.name == name).map(|tier| &tier.held_by);
            let held: Vec<_> =
                held.into_iter().flatten().map(|(by, bytes)| format!("{} {by}", Shown(*bytes))).collect();
            let (available, size) = (Shown(room.available_bytes), Shown(room.size_bytes));
            let held = if held.is_empty() { String::new() } else { format!(": {}", held.join(", ")) };
            format!("{title} {is}, {available} of {size} are left{held}")
        };
        let refusals = self.namespace.room().refusals();
        let names = self.namespace.room().statfs();
        let are_names_full = names.nodes_free == 0;
        let memory = self.room_in(Place::Memory, may_give_way("tier1"));
        let spill = self.room_in(Place::Spill, may_give_way("spill"));
        let spill_is_full = spill.is_none_or(Room::is_full);
        let mut full = Vec::new();
        if are_names_full {
            let (names, size) = (names.nodes, Shown(self.tier1.usage().size_bytes));
            let what = format!(
                "the tree has {names} names, and a Tier-1 of {size} keeps no more: nothing can be created"
            );
            full.push((ProblemCode::Tier1Full, what));
        }
        if let Some(room) = memory
            && (room.is_full() && spill_is_full || !are_names_full && is_recent(refusals, now))
        {
            // A call was refused, but uploads have made room since.
            let is = if room.is_full() { "is full" } else { "was full a moment ago" };
            let mut what = sentence("tier1", "Tier-1", is, room);
            if refusals.count > 0 {
                what.push_str(&format!("; {} calls got ENOSPC since the daemon began", refusals.count));
            }
            full.push((ProblemCode::Tier1Full, what));
        }
        if let Some(room) = spill.filter(|room| room.is_full()) {
            full.push((ProblemCode::SpillFull, sentence("spill", "the spill", "is full", room)));
        }
        full
    }
}

impl Engine {
    /// Reports once that saves fail, and once that this is over.
    pub(crate) fn watch_room(&mut self, now: Instant) {
        let refused = is_recent(self.shared.namespace.room().refusals(), now);
        let short = self.shared.room_in(Place::Memory, 0).is_some_and(Room::is_full)
            || self.shared.namespace.room().statfs().nodes_free == 0;
        if !short && !refused {
            if std::mem::take(&mut self.full.said) {
                tracing::info!("Tier-1 has room again");
                let what = "Tier-1 has room again".to_owned();
                self.shared.events.add(self.shared.now_ns(), EventLevel::Info, "room", None, what);
            }
            return;
        }
        if self.full.said || self.full.not_before.is_some_and(|at| at > now) {
            return;
        }
        self.full.not_before = Some(now + LOOK_EVERY);
        let full = self.shared.full_tiers(&Tiers { engine: self }.tiers(), now);
        let Some((_, what)) = full.into_iter().find(|(code, _)| *code == ProblemCode::Tier1Full) else {
            return;
        };
        self.full.said = true;
        tracing::warn!(%what, "memory is full of what may not give way: saves fail");
        self.shared.events.add(self.shared.now_ns(), EventLevel::Warn, "full", None, what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_is_full_when_what_is_free_and_what_may_give_way_are_together_less_than_a_shard() {
        const MIB: u64 = 1 << 20;
        let room = |size_mib, available_mib, may_mib| Room {
            size_bytes: size_mib * MIB,
            available_bytes: available_mib * MIB,
            may_give_way_bytes: may_mib * MIB,
        };
        assert!(room(64, 3, 0).is_full());
        assert!(!room(64, 4, 0).is_full(), "a sixteenth of a small tier");
        assert!(!room(64, 0, 20).is_full(), "a cache is not full");
        assert!(room(1 << 20, 40, 23).is_full());
        assert!(!room(1 << 20, 40, 24).is_full());
    }

    #[test]
    fn a_refused_call_is_said_for_a_while() {
        let now = Instant::now();
        let refusals = |last: Option<Instant>| Refusals { count: 1, last: last.map(Instant::into_std) };
        assert!(!is_recent(refusals(None), now));
        assert!(is_recent(refusals(Some(now)), now + SAID_FOR / 2));
        assert!(!is_recent(refusals(Some(now)), now + SAID_FOR));
    }
}

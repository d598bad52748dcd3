//! Keeps room in Tier-1 for writers of unknown size.
//!
//! Owns: when host copies give way in the background, and how much. Does not own: which ones and in what order (the
//! namespace, by the classes that the node loop sets), making room for a size that is known (create, ftruncate).
//!
//! A passthrough write takes pages without asking, so room must be there before it is needed. A thread of its own makes room, not
//! the loop: a writer at memory speed fills a small Tier-1 within one of the loop's ticks.

use crate::node::Shared;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tidemark_namespace::Place;
use tidemark_protocol::report::Marks;
use tidemark_tier1::Usage;

/// Interval between two checks while a file grows. At 10 GB/s a writer takes 20 MB in this time.
const LOOK_GROWING: Duration = Duration::from_millis(2);
/// Interval between two checks while no file grows.
const LOOK_IDLE: Duration = Duration::from_millis(20);
/// With less than this left a writer is refused before the next look: two of the slices in which files grow.
const WALL_BYTES: u64 = 4 << 20;

/// Returns how many bytes must give way in a tier of `size_bytes` of which `available_bytes` are left. If more than the high mark
/// is in use, enough to reach the low one. While a file grows, the whole room is kept ahead of it.
fn lacking(marks: Marks, size_bytes: u64, available_bytes: u64, growing: bool) -> u64 {
    let used = size_bytes.saturating_sub(available_bytes);
    let begins = if growing { marks.low_bytes } else { marks.high_bytes };
    if used > begins { used - marks.low_bytes } else { 0 }
}

/// Keeps room until `stop` by evicting host copies that have a recorded copy in Tier-3: a cached copy is worth less than the next save.
/// If that frees too little while a writer waits or a file grows, hidden files that are not open go as well. Costs one short lock for
/// each check.
pub(crate) fn run(shared: &Shared, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        let usage = shared.tier1.usage();
        let growing = usage.growing_files > 0;
        let marks = shared.settings.tier1.marks.of(usage.size_bytes);
        let lacking = lacking(marks, usage.size_bytes, usage.available_bytes, growing);
        if lacking > 0 {
            shared.tier1.let_go();
            let freed = shared.namespace.room().make_room(lacking);
            shared.metrics.reclaim_bytes.inc_by(freed);
            let waited_for = shared.namespace.room().waiting_for_room() > 0;
            if freed < lacking && (waited_for || growing) {
                shared.namespace.room().abandon_departed();
                shared.namespace.hidden().drop_hidden();
            }
            if freed < lacking && is_at_wall(shared.tier1.usage()) {
                shared.namespace.room().note_wall();
            }
            if freed < lacking && waited_for {
                // Nothing else gives way: what is not in Tier-3 yet must get there first. A copy elsewhere frees nothing here, so
                // those go on at their pace.
                shared.drain.with_pace(|pace, _| pace.lift());
            }
        }
        let growing = reclaim_spill(shared) || growing;
        std::thread::sleep(if growing { LOOK_GROWING } else { LOOK_IDLE });
    }
}

/// Whether a file that grows is refused its next page, or was a moment ago: what is promised to open files and not taken yet is still
/// there.
fn is_at_wall(usage: Usage) -> bool {
    usage.size_bytes.saturating_sub(usage.used_bytes) < WALL_BYTES
}

/// Reclaims the spill, whose files are counted here while they grow. Returns whether one grows.
fn reclaim_spill(shared: &Shared) -> bool {
    let Some(usage) = shared.tier1.spill_usage() else { return false };
    let marks = shared.settings.spill.marks.of(usage.size_bytes);
    let growing = usage.growing_files > 0;
    let available = usage.size_bytes.saturating_sub(usage.used_bytes);
    let lacking = lacking(marks, usage.size_bytes, available, growing);
    if lacking > 0 {
        shared.tier1.let_go();
        shared.metrics.reclaim_bytes.inc_by(shared.namespace.room().make_room_in(Place::Spill, lacking));
    }
    growing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reclaiming_begins_above_the_high_mark_and_ends_below_the_low_one() {
        let marks = Marks { high_bytes: 85, low_bytes: 75 };
        assert_eq!(lacking(marks, 100, 15, false), 0, "at the mark, not above it");
        assert_eq!(lacking(marks, 100, 14, false), 11, "down to the low one");
        assert_eq!(lacking(marks, 100, 20, true), 5, "ahead of a file that grows");
        assert_eq!(lacking(marks, 100, 25, true), 0);
    }
}

//! Keeps room in Tier-1 for writers whose size nobody knows.
//!
//! Owns: when host copies give way in the background, and how much. Does not own: which ones and in what order (the
//! namespace, by the classes that the node loop sets), making room for a size that is known (create, ftruncate).
//!
//! A passthrough write asks nobody before it takes a page, so room must be there before it is needed. This is a thread
//! and not a part of the loop: a writer at memory speed fills a small Tier-1 within one of the loop's ticks.

use crate::node::Shared;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Between two looks while some file grows. At 10 GB/s a writer takes 20 MB in this time.
const LOOK_GROWING: Duration = Duration::from_millis(2);
/// Between two looks while none does.
const LOOK_IDLE: Duration = Duration::from_millis(20);

/// The room that is kept free of files, in percent of Tier-1: reclaiming begins below the first and goes up to the
/// second. Host copies are a cache, and a cache that leaves no room for the next save is worth less than that save.
const ROOM_LOW_PERCENT: u64 = 15;
const ROOM_HIGH_PERCENT: u64 = 25;

/// Runs until `stop`. Costs one short lock for each look; evicts only what has a recorded copy in Tier-3.
pub fn run(shared: &Shared, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        let usage = shared.tier1.usage();
        let growing = usage.growing_files > 0;
        let high = usage.size_bytes / 100 * ROOM_HIGH_PERCENT;
        // While a file grows the whole room is kept ahead of it.
        let low = if growing { high } else { usage.size_bytes / 100 * ROOM_LOW_PERCENT };
        if usage.available_bytes < low {
            shared.tier1.let_go();
            let lacking = high - usage.available_bytes;
            let freed = shared.namespace.make_room(lacking);
            shared.metrics.reclaim_bytes.inc_by(freed);
            let waited_for = shared.namespace.waiting_for_room() > 0;
            if freed < lacking && (waited_for || growing) {
                shared.namespace.drop_hidden();
            }
            if freed < lacking && waited_for {
                // Nothing else gives way: what is not in Tier-3 yet must get there first.
                shared.drain.with_pace(|pace, _| pace.lift());
            }
        }
        std::thread::sleep(if growing { LOOK_GROWING } else { LOOK_IDLE });
    }
}

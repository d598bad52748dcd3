//! The lead: how far ahead of a writer space is made ready.
//!
//! Owns: the range, given the results of two looks at the file. Does not own: the looks (`run_ahead`), the allocation
//! (`backing`).

use std::ops::Range;

use super::ballast::SLICE_BYTES;
use super::space::PAGE_BYTES;

/// Space made ready ahead of a growing file in one step, and the least lead of a fast one while memory is plentiful.
pub(super) const RUN_AHEAD_STEP_BYTES: u64 = 64 << 20;

/// The lead of a fast file, in growths between two looks: three late looks do no harm.
const LEAD_LOOKS: u64 = 4;

/// A file's lead is at most this many times its size: a small file usually ends before it needs more.
const LEAD_TIMES_SIZE: u64 = 32;

/// State of a file that is open for writing, at the latest look.
#[derive(Debug, Clone, Copy)]
pub(super) struct Looked {
    pub(super) size_bytes: u64,
    /// Whether it has more bytes or more space than at the look before.
    pub(super) grew: bool,
    /// Growth between two looks, in bytes.
    pub(super) per_look_bytes: u64,
    /// The size it is predicted or promised to reach.
    pub(super) planned_to: u64,
    /// Nothing is allocated at or beyond this offset.
    pub(super) led_to: u64,
}

/// Returns the range to allocate now; empty if there is enough. `most_lead_bytes`: the longest lead of a file without a plan.
pub(super) fn lead(file: &Looked, most_lead_bytes: impl FnOnce() -> u64) -> Range<u64> {
    let Looked { size_bytes, grew, per_look_bytes, planned_to, led_to } = *file;
    let fast = per_look_bytes.saturating_mul(LEAD_LOOKS);
    let planned = size_bytes <= planned_to;
    let to = if planned {
        planned_to
    } else if grew && size_bytes > led_to / 2 {
        let usual = RUN_AHEAD_STEP_BYTES.min(LEAD_TIMES_SIZE.saturating_mul(size_bytes));
        let lead = fast.max(usual).min(most_lead_bytes());
        if size_bytes.saturating_add(lead / 4 * 3) < led_to {
            return led_to..led_to;
        }
        size_bytes.saturating_add(lead)
    } else {
        // A file that does not grow keeps its space, and a small one has enough from the start.
        return led_to..led_to;
    };
    // A plan is exact, or nearly; space ahead of it would only be trimmed again. A file that has outgrown a small plan goes on
    // from its present end.
    let begun = if led_to < SLICE_BYTES { PAGE_BYTES } else { SLICE_BYTES };
    let from = if planned { led_to } else { led_to.max(size_bytes.next_multiple_of(begun)) };
    let most = from.saturating_add(RUN_AHEAD_STEP_BYTES.max(fast));
    // Whole slices come warm out of the ballast. If a file has less than one slice, the rest of it would only be trimmed.
    let unit = if to <= SLICE_BYTES { PAGE_BYTES } else { SLICE_BYTES };
    from..to.min(most).next_multiple_of(unit).max(from)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    fn of(size_bytes: u64, planned_to: u64, led_to: u64) -> Range<u64> {
        lead(&Looked { size_bytes, grew: true, per_look_bytes: 0, planned_to, led_to }, || 1 << 40)
    }

    #[test]
    fn a_plan_is_led_to_its_end_a_step_at_a_time() {
        assert_eq!(of(0, 11, 4 * KIB), 4 * KIB..4 * KIB, "a page is enough");
        assert_eq!(of(0, 100 * KIB + 1, 64 * KIB), 64 * KIB..104 * KIB, "and no slice for a part of one");
        assert_eq!(of(0, 3 * MIB, 2 * MIB), 2 * MIB..4 * MIB, "whole slices beyond the first");
        assert_eq!(of(0, 1 << 30, 2 * MIB), 2 * MIB..66 * MIB);
        assert_eq!(of(MIB, 3 * MIB, 4 * MIB), 4 * MIB..4 * MIB, "it has all of it");
    }

    #[test]
    fn a_file_without_a_plan_is_led_by_its_size_and_speed_and_no_further_than_it_may() {
        assert_eq!(of(16 * KIB, 10, 4 * KIB), 16 * KIB..528 * KIB, "it has outgrown a small plan");
        assert_eq!(of(MIB, 0, 2 * MIB), 2 * MIB..2 * MIB, "half of what it has is left");
        assert_eq!(of(3 * MIB, 0, 4 * MIB), 4 * MIB..68 * MIB);
        let mut fast = Looked {
            size_bytes: 100 * MIB,
            grew: true,
            per_look_bytes: 30 * MIB,
            planned_to: 0,
            led_to: 128 * MIB,
        };
        assert_eq!(lead(&fast, || 1 << 40), 128 * MIB..220 * MIB, "four looks of it");
        assert_eq!(lead(&fast, || 40 * MIB), 128 * MIB..140 * MIB);
        assert_eq!(lead(&fast, || 20 * MIB), 128 * MIB..128 * MIB);
        fast.grew = false;
        assert!(lead(&fast, || 1 << 40).is_empty(), "it rests");
    }
}

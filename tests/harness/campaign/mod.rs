//! What the trainers of the crash campaign and its auditor share: the words they exchange, and the page on which a
//! trainer shows what it is inside of.
//!
//! It owns the exchange. It does not own what trainers do (`bin/trainer`) or what is expected of the daemon (the suite
//! `campaign`).

pub mod dice;
pub mod event;
pub mod page;

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds on a clock that all processes of this machine share.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds =
        Duration::from_secs(u64::try_from(now.tv_sec).expect("the machine was started in the past"));
    let passed = seconds + Duration::from_nanos(u64::try_from(now.tv_nsec).expect("less than a second"));
    u64::try_from(passed.as_nanos()).expect("584 years")
}

//! Exchange between the crash campaign's trainers and its auditor: the events, and the page on which a trainer shows
//! its current call.
//!
//! Owns: what is exchanged. Does not own: the trainers' work (`bin/trainer`), the demands on the daemon (the suite
//! `campaign`).

pub mod dice;
pub mod event;
pub mod page;

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the time in nanoseconds, on a clock that all processes of this machine share.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds =
        Duration::from_secs(u64::try_from(now.tv_sec).expect("the machine was started in the past"));
    let passed = seconds + Duration::from_nanos(u64::try_from(now.tv_nsec).expect("less than a second"));
    u64::try_from(passed.as_nanos()).expect("584 years")
}

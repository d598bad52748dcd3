//! A process that competes for the lease in etcd and prints each result. Tests kill it.
//!
//! `tidemark-candidate URL NAME` prints one line for each change: `holds EPOCH MS`, `renewed EPOCH MS`, `waits HOLDER EPOCH`,
//! `undecided`, `lost`. Until MS, a time of CLOCK_MONOTONIC in milliseconds, the process may decide.

#![expect(clippy::print_stdout, reason = "what it says is what it is for")]

use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};
use tidemark_control::lease::{EtcdAccess, EtcdLease, LeaseError, LeaseTimes, Turn};
use tidemark_engine::settings::EtcdSettings;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let (Some(url), Some(name)) = (arguments.next(), arguments.next()) else {
        panic!("usage: tidemark-candidate URL NAME");
    };
    let place = url.parse().expect("a place in etcd");
    let access = EtcdAccess::open(place, &EtcdSettings::default()).expect("no files are named");
    let nonce = getrandom::u64().expect("the kernel has random numbers");
    let times = LeaseTimes::etcd();
    let mut lease = EtcdLease::new(access, name, nonce, times);
    let mut said = String::new();
    let mut say = |line: String| {
        if line != said {
            println!("{line}");
            said = line;
        }
    };
    loop {
        let (now, now_ms) = (Instant::now(), monotonic_ms());
        match lease.try_acquire(now).await {
            Ok(Turn::Ours(epoch)) => {
                say(format!("holds {epoch} {}", now_ms + times.term.as_millis()));
                keep(&mut lease, times, &mut say).await;
            }
            Ok(Turn::Theirs { holder, epoch, wait }) => {
                say(format!("waits {holder} {epoch}"));
                tokio::time::sleep(wait).await;
            }
            Err(error) => {
                say(format!("error {error}"));
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

/// Renews the lease until it is lost, and prints each change.
async fn keep(lease: &mut EtcdLease, times: LeaseTimes, say: &mut impl FnMut(String)) {
    loop {
        tokio::time::sleep(times.term / 3).await;
        let (now, now_ms) = (Instant::now(), monotonic_ms());
        match lease.renew(now).await {
            Ok(epoch) => say(format!("renewed {epoch} {}", now_ms + times.term.as_millis())),
            Err(LeaseError::Lost { .. }) => {
                say("lost".to_owned());
                return;
            }
            Err(_) if lease.epoch(Instant::now()).is_none() => say("undecided".to_owned()),
            Err(_) => {}
        }
    }
}

fn monotonic_ms() -> u128 {
    let now = clock_gettime(ClockId::Monotonic);
    let now = Duration::try_from(now).expect("the monotonic clock is not negative");
    now.as_millis()
}

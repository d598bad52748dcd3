//! Keeps idle processors from sleeping while one request follows the other.
//!
//! Owns: when a busy spell of requests begins and ends, for which share of the time it may keep processors awake, and the request to the
//! kernel (`/dev/cpu_dma_latency`, Documentation/power/pm_qos_interface.rst). Does not own: the requests.
//!
//! A request wakes a thread of the daemon, and its answer wakes the program. A processor that halted has to be woken first: in a virtual
//! machine by its host, 17 to 35 µs each time, which was two thirds of the cost of creating a small file. The daemon asks the kernel for
//! quick processors only while requests come close together, and withdraws that a millisecond after the last one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use tidemark_tier1::allowance::Allowance;

const DEVICE: &str = "/dev/cpu_dma_latency";
const DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";

/// On a virtual machine that may only poll, no host has to wake a processor (drivers/cpuidle/governors/haltpoll.c).
const POLL_US: i32 = 0;
/// Elsewhere the first sleep (C1) takes about this time to leave, and saves most of the possible energy.
const LIGHT_SLEEP_US: i32 = 2;
/// `PM_QOS_DEFAULT_VALUE`, include/linux/pm_qos.h: nothing is asked for.
const NO_REQUEST: i32 = -1;

/// Requests that follow each other within this time belong together. A woken thread and its answer take less, halted processors included.
const TOGETHER: Duration = Duration::from_millis(1);
/// Number of such requests that begin a spell: a lone `stat` or `ls` does not.
const SPELL_REQUESTS: u32 = 4;
/// The longest time at once for which idle processors are kept awake: a save of 50,000 small files. After that they are kept awake half of
/// the time, however many requests come.
const AT_ONCE: Duration = Duration::from_secs(10);

/// Notices when requests come close together. Costs each request one read of the clock and two relaxed stores.
#[derive(Debug)]
pub(crate) struct Awake {
    began: Instant,
    /// Time of the last request, in nanoseconds since `began`.
    last_ns: AtomicU64,
    together: AtomicU32,
    /// Whether the thread that keeps spells sleeps, and must be woken for the next one.
    resting: AtomicBool,
    held_ns: AtomicU64,
    keeper: Option<Thread>,
}

impl Awake {
    /// Makes one that never asks the kernel for anything.
    pub(crate) fn off() -> Arc<Self> {
        Arc::new(Self::new(None))
    }

    /// Starts the thread that asks the kernel; the thread ends with the last reference. If the kernel has no such device or denies access,
    /// returns one that is off.
    pub(crate) fn start() -> io::Result<Arc<Self>> {
        let device = match OpenOptions::new().write(true).open(DEVICE) {
            Ok(device) => device,
            Err(error) => {
                tracing::debug!(%error, DEVICE, "idle processors sleep while requests come");
                return Ok(Self::off());
            }
        };
        let (tell, told) = std::sync::mpsc::sync_channel::<Weak<Self>>(1);
        let thread = thread::Builder::new().name("mount-awake".into()).spawn(move || {
            if let Ok(awake) = told.recv() {
                keep(&awake, &device);
            }
        })?;
        let awake = Arc::new(Self::new(Some(thread.thread().clone())));
        let _ = tell.send(Arc::downgrade(&awake));
        Ok(awake)
    }

    fn new(keeper: Option<Thread>) -> Self {
        Self {
            began: Instant::now(),
            last_ns: AtomicU64::new(0),
            together: AtomicU32::new(0),
            resting: AtomicBool::new(false),
            held_ns: AtomicU64::new(0),
            keeper,
        }
    }

    /// Counts a request.
    pub(crate) fn request(&self) {
        let Some(keeper) = &self.keeper else { return };
        let now_ns = self.now_ns();
        let before_ns = self.last_ns.load(Ordering::Relaxed);
        self.last_ns.store(now_ns, Ordering::Relaxed);
        if !self.resting.load(Ordering::Relaxed) {
            return;
        }
        // Two threads may count at once: a spell then begins a request sooner or later.
        let together =
            if are_together(before_ns, now_ns) { self.together.load(Ordering::Relaxed) + 1 } else { 1 };
        self.together.store(together, Ordering::Relaxed);
        if together >= SPELL_REQUESTS && self.resting.swap(false, Ordering::Relaxed) {
            keeper.unpark();
        }
    }

    /// Returns how long idle processors were kept awake, over all finished spells.
    pub(crate) fn held(&self) -> Duration {
        Duration::from_nanos(self.held_ns.load(Ordering::Relaxed))
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn is_spell(&self) -> bool {
        are_together(self.last_ns.load(Ordering::Relaxed), self.now_ns())
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        if let Some(keeper) = &self.keeper {
            keeper.unpark();
        }
    }
}

fn are_together(before_ns: u64, now_ns: u64) -> bool {
    Duration::from_nanos(now_ns.saturating_sub(before_ns)) <= TOGETHER
}

/// Waits for spells, and asks the kernel for quick processors while each lasts.
fn keep(awake: &Weak<Awake>, device: &File) {
    let wanted_us = if is_virtual_and_polls() { POLL_US } else { LIGHT_SLEEP_US };
    let mut allowance = Allowance::new(AT_ONCE, Instant::now());
    loop {
        match awake.upgrade() {
            Some(awake) => awake.resting.store(true, Ordering::Relaxed),
            None => return,
        }
        thread::park();
        let Some(awake) = awake.upgrade() else { return };
        if awake.resting.load(Ordering::Relaxed) {
            continue;
        }
        allowance.rested(Instant::now());
        let before = allowance.left();
        if let Err(error) = ask(device, wanted_us) {
            tracing::warn!(%error, DEVICE, "idle processors sleep while requests come");
            return;
        }
        while awake.is_spell() && !allowance.left().is_zero() {
            thread::sleep(TOGETHER);
            allowance.used(Instant::now());
        }
        let _ = ask(device, NO_REQUEST);
        let held = before.saturating_sub(allowance.left());
        awake.held_ns.fetch_add(u64::try_from(held.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        if allowance.left().is_zero() {
            drop(awake);
            thread::sleep(AT_ONCE / 10);
        }
    }
}

/// Asks for processors that wake within `latency_us`. The request ends with the descriptor, however this process ends.
fn ask(mut device: &File, latency_us: i32) -> io::Result<()> {
    device.write_all(&latency_us.to_ne_bytes())
}

fn is_virtual_and_polls() -> bool {
    fs::read_to_string(DRIVER).is_ok_and(|driver| driver.trim() == "haltpoll")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn requests_far_apart_wake_nobody_and_close_ones_do() {
        let awake = Awake::new(Some(thread::current()));
        awake.resting.store(true, Ordering::Relaxed);
        for _ in 0..2 * SPELL_REQUESTS {
            awake.request();
            thread::sleep(2 * TOGETHER);
        }
        assert!(awake.resting.load(Ordering::Relaxed), "a lone request now and then is no spell");
        // A machine that takes longer between two requests in each of a hundred tries is too busy to be asked.
        let begun = (0..100).any(|_| {
            (0..SPELL_REQUESTS).for_each(|_| awake.request());
            !awake.resting.load(Ordering::Relaxed)
        });
        assert!(begun);
    }

    /// Returns the latency that the kernel uses now, whichever process asked.
    fn in_force_us() -> i32 {
        let mut value = [0; 4];
        File::open(DEVICE).unwrap().read_exact(&mut value).unwrap();
        i32::from_ne_bytes(value)
    }

    #[test]
    fn the_kernel_is_asked_while_requests_come_and_not_afterwards() {
        let awake = Awake::start().unwrap();
        if awake.keeper.is_none() {
            // No device here, or no access.
            assert!(OpenOptions::new().write(true).open(DEVICE).is_err());
            return;
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while in_force_us() > LIGHT_SLEEP_US {
            assert!(Instant::now() < deadline, "{} µs in force, nothing was asked for", in_force_us());
            (0..SPELL_REQUESTS).for_each(|_| awake.request());
        }
        while awake.held().is_zero() || !awake.resting.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline, "the spell does not end");
            thread::sleep(TOGETHER);
        }
        // Another mount of this machine may ask at the same moment, not for longer than its allowance.
        let deadline = Instant::now() + 3 * AT_ONCE;
        while in_force_us() <= LIGHT_SLEEP_US {
            assert!(Instant::now() < deadline, "{} µs stay in force", in_force_us());
            thread::sleep(TOGETHER);
        }
    }
}

//! The thread that moves idle memory to where it is needed. The worker fills and touches ballast, makes ready files, takes spent files
//! apart, frees lingering ones, and frees ballast when the machine needs it.
//!
//! Owns: when these happen. Does not own: how memory moves (`space`), what a slice is (`ballast`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::ballast::SLICE_BYTES;
use super::budget::User;
use super::lock;
use super::pool::STOCKS;
use super::pressure::Pressure;
use super::space::Space;
use crate::courtesy::{Courtesy, QUIET};
use crate::priority;

/// Interval between two looks at the machine's memory while there is nothing to do.
const IDLE_TICK: Duration = Duration::from_millis(500);
/// Interval between two looks while something waits: files that linger, work put off for writers.
const WAITING_TICK: Duration = Duration::from_millis(50);
/// Longest time at once for which the worker gives way to programs that make requests.
const GIVES_WAY_AT_ONCE: Duration = Duration::from_secs(1);
/// Time after pressure in which the ballast does not grow again.
const PAUSE_AFTER_PRESSURE: Duration = Duration::from_secs(30);
/// Slices moved before the worker checks for other work: 64 MiB.
const SLICES_PER_TURN: u64 = 32;
/// Bytes freed at once when the trigger fires and the lacking amount is unknown.
const PRESSURE_STEP_BYTES: u64 = 256 << 20;

/// Free memory that the ballast leaves alone. Writers allocate some of their own between two looks at their files, and the ballast,
/// on a file system of its own, would not notice. The amount is 30 ms of writers at 8 GB/s, thirty looks; a part of a small Tier-1.
const HEADROOM_BYTES: u64 = 256 << 20;
const HEADROOM_PART: u64 = 8;
/// The part of the available memory that each stock of small ready files may hold.
const SMALL_FILES_PART: u64 = 16;

pub(super) fn headroom_bytes(size_bytes: u64) -> u64 {
    HEADROOM_BYTES.min(size_bytes / HEADROOM_PART)
}

/// Wakes the worker; coalesces.
#[derive(Debug)]
pub(super) struct Wake {
    event: OwnedFd,
    /// Whether a wake-up is on its way; the worker clears it before it looks for work.
    woken: AtomicBool,
    stopping: AtomicBool,
    /// Bytes touched and the time for it, for `usage`: the measured warmth of the machine's memory.
    pub(super) touched_bytes: AtomicU64,
    pub(super) touched_us: AtomicU64,
}

impl Wake {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            woken: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            touched_bytes: AtomicU64::new(0),
            touched_us: AtomicU64::new(0),
        })
    }

    /// Wakes the worker. Costs a system call only if the worker has not been woken already.
    pub(super) fn now(&self) {
        if self.woken.swap(true, Ordering::AcqRel) {
            return;
        }
        // Fails only when the counter is full, and then the worker is awake already.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.now();
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }
}

/// The result of one turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Worked,
    /// Work is left, but not for now.
    Waiting,
    /// Work is left for when the programs are done.
    GivingWay,
    Idle,
}

struct Worker<'a> {
    space: &'a Space,
    pressure: Pressure,
    paused_until: Option<Instant>,
    last_look: Instant,
    /// Gives way to programs' requests. The kernel does not interrupt the touching of a slice, which takes 0.2 ms. If the host of a
    /// virtual machine has to bring the memory, it takes up to 4 ms. A request meanwhile would wait for its processor.
    courtesy: Courtesy,
    zeros: Vec<u8>,
}

/// Runs the thread until [`Wake::stop`].
pub(super) fn run(space: &Space) {
    if let Err(error) = priority::give_way() {
        tracing::debug!(%error, "the ballast is kept at the usual priority");
    }
    let mut worker = Worker {
        space,
        pressure: Pressure::watch(),
        paused_until: None,
        last_look: Instant::now(),
        courtesy: Courtesy::new(GIVES_WAY_AT_ONCE, Instant::now()),
        zeros: vec![0; usize::try_from(SLICE_BYTES).unwrap_or(0)],
    };
    while !space.wake.is_stopping() {
        let wait = match worker.turn() {
            Turn::Worked => Duration::ZERO,
            Turn::Waiting => WAITING_TICK,
            Turn::GivingWay => QUIET,
            Turn::Idle => IDLE_TICK,
        };
        let alarmed = worker.sleep(wait);
        if alarmed || worker.last_look.elapsed() >= IDLE_TICK {
            worker.last_look = Instant::now();
            worker.yield_to_pressure(alarmed);
        }
    }
}

impl Worker<'_> {
    /// Waits for a wake-up, the pressure trigger, or the time; returns true for the trigger.
    fn sleep(&self, time: Duration) -> bool {
        let mut fds = vec![PollFd::new(&self.space.wake.event, PollFlags::IN)];
        let trigger = self.pressure.trigger();
        if let Some(trigger) = &trigger {
            fds.push(PollFd::new(trigger, PollFlags::PRI));
        }
        let time = Timespec::try_from(time).ok();
        if poll(&mut fds, time.as_ref()).is_err() {
            return false;
        }
        let alarmed = fds.get(1).is_some_and(|fd| fd.revents().contains(PollFlags::PRI));
        if fds[0].revents().contains(PollFlags::IN) {
            let mut count = [0_u8; 8];
            // Empties the counter; another wake-up in between is served by the turn that follows.
            let _ = rustix::io::read(&self.space.wake.event, &mut count);
            self.space.wake.woken.store(false, Ordering::Release);
        }
        alarmed
    }

    fn turn(&mut self) -> Turn {
        if self.refill_small() {
            return Turn::Worked;
        }
        let lingering = self.space.let_go();
        if self.space.run_ahead.is_busy() {
            return Turn::Waiting;
        }
        if self.gives_way() {
            return Turn::GivingWay;
        }
        let paused = self.paused_until.is_some_and(|until| Instant::now() < until);
        if self.take_apart(paused)
            || self.drop_unwanted()
            || (!paused && self.refill_large())
            || self.zero()
            || (!paused && self.fill())
        {
            return Turn::Worked;
        }
        if lingering { Turn::Waiting } else { Turn::Idle }
    }

    fn yield_to_pressure(&mut self, alarmed: bool) {
        let missing = self.pressure.missing_bytes();
        let wanted = if alarmed { missing.max(PRESSURE_STEP_BYTES) } else { missing };
        if wanted == 0 {
            return;
        }
        self.paused_until = Some(Instant::now() + PAUSE_AFTER_PRESSURE);
        let mut given = 0;
        while given < wanted && self.space.ballast.pop_slice() {
            lock(&self.space.budget).give_back(User::Ballast, SLICE_BYTES);
            given += SLICE_BYTES;
        }
        if given > 0 {
            tracing::info!(given_bytes = given, wanted_bytes = wanted, "memory pressure: gave up ballast");
        }
    }

    /// Keeps small ready files in stock, each kind on at most a sixteenth of the available memory.
    fn refill_small(&self) -> bool {
        let available = lock(&self.space.budget).available();
        let ready = lock(&self.space.pool).small.each_ref().map(Vec::len);
        let lacking = STOCKS.iter().zip(ready).find(|(stock, ready)| {
            let most = (available / SMALL_FILES_PART / stock.ready_bytes).min(stock.files as u64);
            (*ready as u64) < most && self.space.idle_bytes() >= stock.ready_bytes
        });
        let Some((stock, _)) = lacking else { return false };
        self.stock(stock.ready_bytes)
    }

    fn stock(&self, bytes: u64) -> bool {
        match self.space.make_file(User::Pool, bytes) {
            Ok(file) if file.ready_bytes == bytes => {
                lock(&self.space.pool).put(file);
                true
            }
            Ok(file) => {
                self.space.discard(file);
                false
            }
            Err(error) => {
                tracing::warn!(%error, bytes, "no ready file could be made");
                false
            }
        }
    }

    fn drop_unwanted(&self) -> bool {
        let Some(file) = lock(&self.space.pool).take_unwanted() else { return false };
        self.space.discard(file);
        true
    }

    /// Makes one file of a size predicted lately, if all such files stay within half of the available memory.
    fn refill_large(&self) -> bool {
        let room = lock(&self.space.budget).available() / 2;
        let Some(bytes) = lock(&self.space.pool).missing_large(room) else { return false };
        if self.space.idle_bytes() < bytes {
            return false;
        }
        self.stock(bytes)
    }

    /// Zeroes large ready files, a limited amount at a time. Small ones do not need it: a writer fills most small pages whole.
    fn zero(&mut self) -> bool {
        if !self.space.capabilities.huge.works {
            return false;
        }
        self.slice_by_slice(|worker| worker.space.zero_slice())
    }

    /// Moves spent files to the ballast, a limited amount at a time; under pressure they are only freed.
    fn take_apart(&mut self, paused: bool) -> bool {
        let mut worked = false;
        for _ in 0..SLICES_PER_TURN {
            if self.must_stop() {
                break;
            }
            let freed = {
                let mut pool = lock(&self.space.pool);
                let Some(last) = pool.spent.last_mut() else { break };
                let freed = last.give_slice();
                let done = freed.is_err() || last.is_empty();
                let held = last.held();
                if done {
                    pool.spent.pop();
                }
                worked = true;
                let mut budget = lock(&self.space.budget);
                match freed {
                    Ok(freed) => {
                        budget.give_back(User::Pool, freed.bytes + if done { held } else { 0 });
                        freed
                    }
                    Err(error) => {
                        tracing::error!(%error, "a spent file could not be punched; it is closed whole");
                        budget.give_back(User::Pool, held);
                        continue;
                    }
                }
            };
            // If there is no room for it beside the headroom, the slice is only freed.
            if freed.bytes == SLICE_BYTES && !paused && self.has_room() && !self.add_slice(!freed.touched) {
                break;
            }
        }
        worked
    }

    /// Fills the ballast out of free memory, touching every slice; false if there is nothing to fill.
    fn fill(&mut self) -> bool {
        if !self.space.ballast_on || !self.has_room() {
            return false;
        }
        if !self.pressure.has_room_for(SLICE_BYTES * SLICES_PER_TURN) {
            return false;
        }
        self.slice_by_slice(|worker| worker.has_room() && worker.add_slice(true))
    }

    /// Does one slice after the other, a turn of them at most; false if not even one could be done.
    fn slice_by_slice(&mut self, one: impl Fn(&Self) -> bool) -> bool {
        let mut done = 0;
        while done < SLICES_PER_TURN && !self.must_stop() && one(self) {
            done += 1;
        }
        done > 0
    }

    /// Whether to stop: writers have begun, a program makes requests, or the worker ends.
    fn must_stop(&mut self) -> bool {
        self.space.wake.is_stopping() || self.space.run_ahead.is_busy() || self.gives_way()
    }

    fn gives_way(&mut self) -> bool {
        self.courtesy.gives_way(&self.space.asked, Instant::now())
    }

    /// Whether one more slice leaves the headroom free.
    fn has_room(&self) -> bool {
        let budget = lock(&self.space.budget);
        budget.free() >= headroom_bytes(budget.size()) + SLICE_BYTES
    }

    /// Adds a slice, touched if requested; false on failure.
    fn add_slice(&self, touch: bool) -> bool {
        if !lock(&self.space.budget).take(User::Ballast, SLICE_BYTES) {
            return false;
        }
        let slice = match self.space.ballast.begin() {
            Ok(slice) => slice,
            Err(error) => {
                tracing::warn!(%error, "the ballast cannot grow");
                lock(&self.space.budget).give_back(User::Ballast, SLICE_BYTES);
                return false;
            }
        };
        if touch {
            let begun = Instant::now();
            if let Err(error) = slice.touch(&self.zeros) {
                tracing::warn!(%error, "the ballast cannot be touched");
            }
            let took_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.space.wake.touched_bytes.fetch_add(SLICE_BYTES, Ordering::Relaxed);
            self.space.wake.touched_us.fetch_add(took_us, Ordering::Relaxed);
        }
        self.space.ballast.add(&slice);
        true
    }
}

//! Order of events: lets one request happen at a time, chosen by a seed, and decides which answer its caller gets.
//!
//! Owns: waiting requests, which of them happens, lost answers, requests that arrive late, deaths, the trace. Does not own:
//! the effect of a request (`wire`), invariants (`audit`), the work of a start (`life`).
//!
//! Everything runs on one thread and nothing reads a clock, so a seed determines the schedule.

use super::audit::Audit;
use super::chaos::Chaos;
use super::tally::{Seen, Tally};
use super::wire::{Answer, Bucket, Call};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tidemark_store::StoreError;
use tokio::sync::oneshot;

/// Turns in a row without any request while a start runs. After more, the start counts as waiting for ever.
const IDLE_TURNS_MAX: u32 = 10_000;
/// Longest stall of a start, in requests of others: a few whole lives of another start.
const STALL_MAX: u64 = 400;
/// Most lost answers in a row, more than any caller bears: five times five (`commit`, `drain`).
const SILENCE_MAX: u64 = 30;
/// Most lines of the trace that are printed.
const TRACE_SHOWN: usize = 1500;

#[derive(Debug)]
struct Waiting {
    start: u64,
    call: Call,
    answer: oneshot::Sender<Result<Answer, StoreError>>,
    /// Whether the request was not chosen yet.
    fresh: bool,
}

/// Fate of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Happens,
    /// The request does not happen, and its caller knows.
    Refused,
    LostBefore,
    LostAfter,
    /// The answer is lost, and the request arrives later.
    Late,
    DiesBefore,
    DiesAfter,
    DiesLate,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) bucket: Bucket,
    pub(super) audit: Audit,
    pub(super) tally: Tally,
    waiting: Vec<Waiting>,
    late: Vec<(u64, Call)>,
    deaths: BTreeMap<u64, oneshot::Sender<()>>,
    buried: BTreeSet<u64>,
    stalled: BTreeMap<u64, u64>,
    /// Start and key whose answers are lost, and how many more of them.
    silence: Option<(u64, String, u64)>,
    starts: u64,
    arrived: u64,
    pub(super) running: usize,
    last: u64,
    clock_ns: i64,
    trace: Vec<(u64, String)>,
}

/// Tier-3, and the requests of all starts to it.
#[derive(Debug, Default)]
pub(super) struct World {
    state: Mutex<State>,
}

impl World {
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A failed check panics under the lock, and its trace is printed from there: a poisoned lock is still read.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wait(&self, start: u64, call: Call) -> oneshot::Receiver<Result<Answer, StoreError>> {
        let (answer, answered) = oneshot::channel();
        self.with(|state| {
            state.arrived += 1;
            if !state.buried.contains(&start) {
                state.waiting.push(Waiting { start, call, answer, fresh: true });
            }
        });
        answered
    }

    /// Begins the next start. Returns its number, which is also its epoch, and a receiver that is notified of its death.
    pub(super) fn start(&self) -> (u64, oneshot::Receiver<()>) {
        let (death, died) = oneshot::channel();
        self.with(|state| {
            state.starts += 1;
            state.tally.count(Seen::Start);
            state.deaths.insert(state.starts, death);
            (state.starts, died)
        })
    }

    /// Ends a start's process: no further request of it reaches the store.
    pub(super) fn bury(&self, start: u64) {
        self.with(|state| {
            state.buried.insert(start);
            state.silence = state.silence.take().filter(|(whom, ..)| *whom != start);
            state.waiting.retain(|waiting| waiting.start != start);
        });
    }

    /// Returns a moment later than any before, in nanoseconds.
    pub(super) fn now_ns(&self) -> i64 {
        self.with(|state| {
            state.clock_ns += 1;
            state.clock_ns
        })
    }

    pub(super) fn note(&self, start: u64, what: impl fmt::Display) {
        self.with(|state| state.trace.push((start, what.to_string())));
    }

    /// Returns the trace, for a failure.
    pub(super) fn told(&self) -> String {
        let state = self.lock();
        let skipped = state.trace.len().saturating_sub(TRACE_SHOWN);
        let shown = state.trace[skipped..].iter().map(|(start, what)| format!("  start {start}: {what}\n"));
        format!("({skipped} lines before)\n{}", shown.collect::<String>())
    }

    /// Lets one request after the other happen, until no start runs and no request is on its way.
    pub(super) async fn drive(self: Arc<Self>, mut chaos: Chaos) {
        let mut idle = 0;
        loop {
            self.settle().await;
            match self.with(|state| state.step(&mut chaos)) {
                Stepped::Over => return,
                Stepped::Moved => idle = 0,
                Stepped::Idle => {
                    idle += 1;
                    assert!(idle < IDLE_TURNS_MAX, "a start waits for something that is no request");
                    tokio::task::yield_now().await;
                }
            }
        }
    }

    /// Lets all starts run until each waits for the store.
    async fn settle(&self) {
        loop {
            let before = self.with(|state| state.arrived);
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
            if self.with(|state| state.arrived) == before {
                return;
            }
        }
    }
}

enum Stepped {
    Moved,
    Idle,
    Over,
}

impl State {
    fn step(&mut self, chaos: &mut Chaos) -> Stepped {
        let late = !self.late.is_empty();
        if late && (self.waiting.is_empty() || chaos.rng.permille(100)) {
            let (start, call) = self.late.swap_remove(chaos.rng.index(self.late.len()));
            // The sender gets no answer any more.
            let _ = self.happen(start, call, "late");
            return Stepped::Moved;
        }
        if self.waiting.is_empty() {
            return if self.running == 0 { Stepped::Over } else { Stepped::Idle };
        }
        let chosen = self.choose(chaos);
        if self.waiting[chosen].fresh && self.waiting[chosen].call.decides() {
            self.waiting[chosen].fresh = false;
            if chaos.rng.permille(chaos.stall_at_decision) {
                self.stall(self.waiting[chosen].start, chaos);
                return Stepped::Moved;
            }
        }
        let Waiting { start, call, answer, .. } = self.waiting.remove(chosen);
        self.last = start;
        self.tally.count(Seen::Request);
        let fate = if self.is_silent(start, &call, chaos) {
            chaos.rng.pick(&[Fate::LostBefore, Fate::LostBefore, Fate::Late])
        } else {
            fate(&call, chaos)
        };
        match fate {
            Fate::Happens => {
                let result = self.happen(start, call, "");
                let _ = answer.send(result);
            }
            Fate::Refused => {
                self.tally.count(Seen::Refusal);
                self.trace(start, &call, "refused");
                let _ = answer.send(Err(call.unavailable()));
            }
            Fate::LostBefore | Fate::LostAfter | Fate::Late => {
                let error = if call.writes() { call.doubtful() } else { call.unavailable() };
                match fate {
                    Fate::LostAfter => {
                        self.tally.count(Seen::DoubtDone);
                        let _ = self.happen(start, call, "and its answer is lost");
                    }
                    Fate::Late => {
                        self.tally.count(Seen::DoubtLate);
                        self.trace(start, &call, "on its way, its answer is lost");
                        self.late.push((start, call));
                    }
                    _ => {
                        self.tally.count(Seen::DoubtNotDone);
                        self.trace(start, &call, "never arrives, its answer is lost");
                    }
                }
                let _ = answer.send(Err(error));
            }
            Fate::DiesBefore => self.die(start, chaos),
            Fate::DiesAfter => {
                let _ = self.happen(start, call, "and then");
                self.die(start, chaos);
            }
            Fate::DiesLate => {
                self.late.push((start, call));
                self.die(start, chaos);
            }
        }
        Stepped::Moved
    }

    fn choose(&mut self, chaos: &mut Chaos) -> usize {
        if chaos.rng.permille(chaos.stall) {
            self.stall(self.waiting[chaos.rng.index(self.waiting.len())].start, chaos);
        }
        let asks = self.tally.of(Seen::Request);
        self.stalled.retain(|_, until| *until > asks);
        let runs = |waiting: &&Waiting| !self.stalled.contains_key(&waiting.start);
        let mut starts: BTreeSet<u64> =
            self.waiting.iter().filter(runs).map(|waiting| waiting.start).collect();
        if starts.is_empty() {
            starts = self.waiting.iter().map(|waiting| waiting.start).collect();
        }
        let starts: Vec<u64> = starts.into_iter().collect();
        let sticks = starts.contains(&self.last) && chaos.rng.permille(chaos.stick);
        let start = if sticks { self.last } else { chaos.rng.pick(&starts) };
        let of: Vec<usize> = (0..self.waiting.len()).filter(|at| self.waiting[*at].start == start).collect();
        chaos.rng.pick(&of)
    }

    fn is_silent(&mut self, start: u64, call: &Call, chaos: &mut Chaos) -> bool {
        if call.decides() && self.silence.is_none() && chaos.rng.permille(chaos.silence) {
            self.tally.count(Seen::Silence);
            self.silence = Some((start, call.key().to_owned(), 1 + chaos.rng.below(SILENCE_MAX)));
        }
        let Some((whom, key, left)) = &mut self.silence else { return false };
        if (*whom, key.as_str()) != (start, call.key()) || !call.writes() {
            return false;
        }
        *left -= 1;
        if *left == 0 {
            self.silence = None;
        }
        true
    }

    fn stall(&mut self, start: u64, chaos: &mut Chaos) {
        self.tally.count(Seen::Stall);
        let until = self.tally.of(Seen::Request) + chaos.rng.below(STALL_MAX);
        self.trace.push((start, format!("stands still until request {until}")));
        self.stalled.insert(start, until);
    }

    fn happen(&mut self, start: u64, call: Call, how: &str) -> Result<Answer, StoreError> {
        self.trace(start, &call, how);
        let Self { bucket, audit, tally, .. } = self;
        audit.before(bucket, start, &call, tally);
        let target = bucket.target(&call);
        let result = bucket.happen(start, call);
        if let Some(key) = target {
            audit.after(bucket, start, &key);
        }
        result
    }

    fn die(&mut self, start: u64, chaos: &mut Chaos) {
        self.trace.push((start, "dies".to_owned()));
        self.tally.count(Seen::Death);
        self.buried.insert(start);
        let all = std::mem::take(&mut self.waiting);
        let (gone, stay): (Vec<_>, Vec<_>) = all.into_iter().partition(|waiting| waiting.start == start);
        self.waiting = stay;
        // Requests that were sent before the death may still arrive.
        for Waiting { call, .. } in gone {
            if call.writes() && chaos.rng.permille(500) {
                self.late.push((start, call));
            }
        }
        self.silence = self.silence.take().filter(|(whom, ..)| *whom != start);
        if let Some(death) = self.deaths.remove(&start) {
            let _ = death.send(());
        }
    }

    fn trace(&mut self, start: u64, call: &Call, how: &str) {
        if !matches!(call, Call::Rest) {
            self.trace.push((start, format!("{} {} {how}", call.operation(), call.key())));
        }
    }
}

fn fate(call: &Call, chaos: &mut Chaos) -> Fate {
    let rng = &mut chaos.rng;
    let rest = matches!(call, Call::Rest);
    if rng.permille(chaos.death) {
        return match rng.below(3) {
            0 => Fate::DiesBefore,
            1 if !rest => Fate::DiesAfter,
            2 if call.writes() => Fate::DiesLate,
            _ => Fate::DiesBefore,
        };
    }
    if rest {
        return Fate::Happens;
    }
    if call.writes() && rng.permille(chaos.doubt) {
        return rng.pick(&[Fate::LostBefore, Fate::LostAfter, Fate::Late]);
    }
    if rng.permille(chaos.away) { Fate::Refused } else { Fate::Happens }
}

//! A life of a job: started, followed by the words that its ranks print, killed or ended.
//!
//! Owns: the words (see `mod`), the search for a moment to kill at. Does not own: the choice of that moment, the demands on the next
//! life.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tidemark_tests::campaign::dice::Dice;
use tidemark_tests::python::{Hashes, Ranks, hashes};

/// Most moments that may miss. After a miss, the search goes on at the next save, with other delays.
pub(super) const MISSES_MAX: u32 = 12;

/// Exit code of a job that its handler of SIGTERM ends.
const PREEMPTED: i32 = 143;

pub(super) struct Life {
    ranks: Ranks,
    world: usize,
    ending: Ending,
}

/// The end of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Killed,
    /// SIGTERM, whose handler raises.
    Preempted,
}

/// Hashes by each rank at each step.
pub(super) type Steps = Vec<BTreeMap<u64, Hashes>>;

/// Durations of saves and pauses here, for aiming.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) save: Duration,
    pub(super) between: Duration,
}

/// Moment at which a life is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    InsideSave,
    Between,
}

/// State of a life at its kill.
#[derive(Clone, Copy, Debug)]
pub(super) struct Killed {
    /// Whether a rank had printed SAVING and not SAVED.
    pub(super) inside: bool,
    /// The newest step for which every rank had printed SAVED in this life, if any.
    pub(super) saved: Option<u64>,
    /// The newest step for which any rank had printed SAVING.
    pub(super) begun: Option<u64>,
}

impl Life {
    pub(super) fn new(ranks: Ranks, world: usize, ending: Ending) -> Self {
        Self { ranks, world, ending }
    }

    /// Waits until every rank has printed the step from which it goes on, which must be the same. `Err` holds the ranks' output.
    pub(super) fn resumed(&mut self) -> Result<u64, String> {
        let world = self.world;
        let all = self.ranks.seen("RESUMED", |ranks| {
            (0..world).map(|rank| last(&ranks.printed(rank), "RESUMED")).collect::<Option<Vec<u64>>>()
        })?;
        let agree = all.iter().all(|step| *step == all[0]);
        if agree { Ok(all[0]) } else { Err(format!("the ranks go on from different steps: {all:?}")) }
    }

    /// Lets the life come to its end. Returns its hashes, and how long a save and the pause between two saves took.
    pub(super) fn ends(mut self) -> (Steps, Pace) {
        let (mut inside, mut outside) = (Stopwatch::default(), Stopwatch::default());
        self.ranks.wait_until("DONE", |ranks| {
            let now = Instant::now();
            let printed = ranks.printed(0);
            let (saving, saved) = (last(&printed, "SAVING"), last(&printed, "SAVED"));
            inside.is(saving.filter(|_| saving != saved), now);
            outside.is(saved.filter(|_| saving == saved), now);
            printed.lines().any(|line| line == "DONE").then_some(())
        });
        self.ranks.finish();
        for rank in 0..self.world {
            let done = self.ranks.printed(rank).lines().any(|line| line == "DONE");
            assert!(done, "rank {rank} ended without DONE:\n{}", self.ranks.printed(rank));
        }
        (self.steps(), Pace { save: inside.usual(), between: outside.usual() })
    }

    /// Kills every rank at a moment of that kind, at the save of `step` or later.
    ///
    /// The ranks are stopped first and examined, which shows whether the moment was inside a save. If it should have been inside and
    /// was not, or if `passes` says that nothing can be known of it, the ranks and the search go on.
    pub(super) fn killed(
        mut self,
        step: u64,
        moment: Moment,
        pace: Pace,
        dice: &mut Dice,
        passes: impl Fn() -> bool,
    ) -> (Steps, Killed) {
        let (word, span) = match moment {
            Moment::InsideSave => ("SAVING", pace.save),
            Moment::Between => ("SAVED", pace.between),
        };
        let mut misses = Vec::new();
        for miss in 0..=MISSES_MAX {
            let rank = usize::try_from(dice.within(0..self.world as u64)).expect("a rank");
            let wanted = step + u64::from(miss);
            self.ranks.wait_until(&format!("{word} {wanted}"), |ranks| {
                (last(&ranks.printed(rank), word)? >= wanted).then_some(())
            });
            let span_us = u64::try_from(span.as_micros()).expect("steps are short").max(1);
            let delays_us = match moment {
                Moment::InsideSave => 0..span_us / u64::from(miss + 1) + 1,
                // Later in the pause, a save that is still undecided has settled.
                Moment::Between => (if miss == 0 { 0 } else { span_us / 2 })..span_us + 1,
            };
            let delay = Duration::from_micros(dice.within(delays_us));
            sleep(delay);
            self.ranks.freeze();
            let at = self.at();
            let passes = passes();
            if (at.inside || moment == Moment::Between) && !passes {
                match self.ending {
                    Ending::Killed => self.ranks.kill9(),
                    Ending::Preempted => self.ranks.preempt(PREEMPTED),
                }
                return (self.steps(), at);
            }
            misses.push(format!("{delay:?} after {word}: {at:?}, passes: {passes}"));
            self.ranks.thaw();
        }
        panic!("no moment of a save of about {span:?} was one to be killed at:\n{}", misses.join("\n"));
    }

    /// Kills every rank when `is_there` holds, and still holds after they were stopped.
    pub(super) fn killed_when(mut self, what: &str, is_there: impl Fn() -> bool) -> (Steps, Killed) {
        self.ranks.wait_until(what, |_| is_there().then_some(()));
        self.ranks.freeze();
        assert!(is_there(), "{what} was over before the ranks were stopped");
        let at = self.at();
        self.ranks.kill9();
        (self.steps(), at)
    }

    /// Waits until every rank has failed, and returns their output.
    pub(super) fn fails(mut self) -> String {
        self.ranks.fail()
    }

    fn at(&self) -> Killed {
        let of = |word: &str| -> Vec<Option<u64>> {
            (0..self.world).map(|rank| last(&self.ranks.printed(rank), word)).collect()
        };
        let (saving, saved) = (of("SAVING"), of("SAVED"));
        Killed {
            inside: saving != saved,
            saved: saved.into_iter().min().flatten(),
            begun: saving.into_iter().max().flatten(),
        }
    }

    /// Returns the hashes of every step. Each saved step must have some.
    fn steps(&self) -> Steps {
        (0..self.world)
            .map(|rank| {
                let printed = self.ranks.printed(rank);
                // A rank may have been killed in the middle of a line.
                let whole = &printed[..printed.rfind('\n').map_or(0, |end| end + 1)];
                let label = |line: &str| line.strip_prefix("HASHES step-")?.split(' ').next()?.parse().ok();
                let found: BTreeMap<u64, Hashes> = whole
                    .lines()
                    .filter_map(label)
                    .map(|step| (step, hashes(whole, &format!("step-{step}"))))
                    .collect();
                for step in whole.lines().filter_map(|line| line.strip_prefix("SAVED ")?.parse().ok()) {
                    assert!(
                        found.contains_key(&step),
                        "rank {rank} shows no hashes of step {step}:\n{printed}"
                    );
                }
                found
            })
            .collect()
    }
}

/// Returns the number behind the last whole line that begins with a word.
fn last(printed: &str, word: &str) -> Option<u64> {
    let whole = &printed[..printed.rfind('\n')?];
    whole.lines().rev().find_map(|line| line.strip_prefix(word)?.strip_prefix(' ')?.parse().ok())
}

/// Measures how long a state usually lasts.
#[derive(Default)]
struct Stopwatch {
    since: Option<(u64, Instant)>,
    times: Vec<Duration>,
}

impl Stopwatch {
    fn is(&mut self, what: Option<u64>, now: Instant) {
        if self.since.map(|(what, _)| what) == what {
            return;
        }
        if let Some((_, since)) = self.since {
            self.times.push(now - since);
        }
        self.since = what.map(|what| (what, now));
    }

    fn usual(mut self) -> Duration {
        self.times.sort();
        self.times.get(self.times.len() / 2).copied().unwrap_or_default()
    }
}

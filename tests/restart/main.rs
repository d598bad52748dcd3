//! Is the tree after a restart the tree before? Random operations run on a real mount, whose daemon is killed at random moments.
//! Then everything is made durable, the memory emptied, and each name compared with a model outside the product.
//!
//! Owns: the lives of daemons and their kills, and the counts it prints. Does not own: the operations and the comparison
//! (`operation`), their meaning (`model`), the links that change places meanwhile (`crowd`), two situations at the end of a
//! memory (`ends`).
//!
//! `TIDEMARK_RESTART_SEED=7` runs the lives of one seed; `TIDEMARK_LONG` runs more of them.

mod crowd;
mod ends;
mod model;
mod operation;

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidemark_tests::campaign::dice::Dice;
use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::machine;

use crate::crowd::Crowd;
use crate::operation::{Entries, Sequence, differences};

/// Sequences in one life of a daemon's memory, each in a directory of its own.
const SEQUENCES: u64 = 50;
/// Number of lives, without and with `TIDEMARK_LONG`.
const LIVES: u64 = 40;
const LIVES_LONG: u64 = 1000;
/// Lives at once, each with a daemon of its own, since CI has two processors.
const LANES: u64 = 2;
/// Lives of one daemon, which keeps its Tier-3 over them, so that a file removed in one must not come back in the next.
const LIVES_OF_A_DAEMON: u64 = 5;
/// Share of lives, as one in this many, in which links change places beside everything else, on a processor of their
/// own.
const CROWD_ONE_IN: u64 = 5;
/// Parts of a life. Between two of them, everything may be made durable. In each, the daemon may be killed.
const PARTS: u64 = 3;
/// Operations of one sequence in one part, at most.
const OPERATIONS: u64 = 20;
/// Threads that carry sequences on.
const THREADS: u64 = 2;
/// Interval between two checks of the operations' progress. A kill is late by at most this time.
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// Configuration that settles files quickly, so that uploads happen while operations go on.
const CONFIG: &str = "[save]\nsettle_s = 0.05\n[tier3]\npaced = false\n";

/// Counts over all lives.
#[derive(Debug, Default)]
struct Counts {
    lives: AtomicU64,
    sequences: AtomicU64,
    operations: AtomicU64,
    kills: AtomicU64,
    /// Kills that came while operations were under way, a part of `kills`.
    kills_amid: AtomicU64,
    /// Saves that were never proven whole when the memory ended.
    settled: AtomicU64,
    compared: AtomicU64,
}

#[test]
fn the_tree_after_a_restart_is_the_tree_before() {
    if !machine::can_mount() {
        return;
    }
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let seed = std::env::var("TIDEMARK_RESTART_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(random);
    let lives = if machine::long() { LIVES_LONG } else { LIVES };
    eprintln!("TIDEMARK_RESTART_SEED={seed}");
    let (counts, begun) = (Counts::default(), Instant::now());
    let next = AtomicU64::new(0);
    let failed: Mutex<Vec<String>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(|| {
                let mut lane = Lane { seed, counts: &counts, daemon: None };
                while failed.lock().expect("no lane panics with it").is_empty() {
                    let life = next.fetch_add(1, Ordering::Relaxed);
                    if life >= lives {
                        break;
                    }
                    if let Err(why) = lane.live(life) {
                        failed.lock().expect("no lane panics with it").push(why);
                    }
                }
            });
        }
    });
    let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
    eprintln!(
        "{} lives: {} sequences, {} operations, {} kills ({} amid operations), {} entries compared, {:.0} s",
        count(&counts.lives),
        count(&counts.sequences),
        count(&counts.operations),
        count(&counts.kills),
        count(&counts.kills_amid),
        count(&counts.compared),
        begun.elapsed().as_secs_f64()
    );
    let failed = failed.into_inner().expect("no lane panics with it");
    assert!(failed.is_empty(), "TIDEMARK_RESTART_SEED={seed}:\n{}", failed.join("\n"));
    assert!(2 * count(&counts.kills_amid) > count(&counts.lives), "kills hardly ever met anything");
    assert!(2 * count(&counts.settled) > count(&counts.lives), "saves hardly ever only settled");
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the kernel has random bytes");
    u64::from_le_bytes(bytes) >> 32
}

/// Lives that run one after the other.
struct Lane<'a> {
    seed: u64,
    counts: &'a Counts,
    daemon: Option<(Daemon, u64)>,
}

impl Lane<'_> {
    fn live(&mut self, life: u64) -> Result<(), String> {
        let (mut daemon, lived) = self.daemon.take().unwrap_or_else(|| (Daemon::start(options()), 0));
        // A life must not depend on the lane that runs it.
        let mut dice = Dice::new(Dice::new(self.seed).roll() ^ Dice::new(life).roll());
        let result = Life { daemon: &mut daemon, number: life, counts: self.counts }.run(&mut dice);
        result.map_err(|why| format!("life {life}: {why}\n{}", daemon.log_tail()))?;
        self.counts.lives.fetch_add(1, Ordering::Relaxed);
        self.daemon = (lived + 1 < LIVES_OF_A_DAEMON).then_some((daemon, lived + 1));
        Ok(())
    }
}

fn options() -> DaemonOptions {
    DaemonOptions { tier1: "256MiB".into(), config: Some(CONFIG.into()), ..DaemonOptions::default() }
}

/// A life of a daemon's memory.
struct Life<'a> {
    daemon: &'a mut Daemon,
    number: u64,
    counts: &'a Counts,
}

impl Life<'_> {
    fn run(mut self, dice: &mut Dice) -> Result<(), String> {
        let mut sequences = Vec::new();
        for number in 0..SEQUENCES {
            let root = self.daemon.mount().join(format!("life{}-{number}", self.number));
            let sequence = Sequence::begin(root, Dice::new(dice.roll()));
            sequences.push(sequence.map_err(|error| format!("a directory for a sequence: {error}"))?);
        }
        let root = self.daemon.mount().join(self.crowd_name());
        let crowd =
            self.number.is_multiple_of(CROWD_ONE_IN).then(|| Crowd::begin(root, Dice::new(dice.roll())));
        let mut crowd = crowd.transpose().map_err(|error| format!("links that change places: {error}"))?;
        for _ in 0..PARTS {
            let flush = dice.one_in(2);
            self.part(&mut sequences, crowd.as_mut(), dice)?;
            if flush {
                self.flush(&mut sequences)?;
            }
        }
        self.flush(&mut sequences)?;
        let before = self.compare(&sequences, None, "before the restart")?;
        for restart in 0..if dice.one_in(4) { 2 } else { 1 } {
            // `flush --wait` promises durability, so a daemon killed after it must lose nothing.
            if restart == 0 && dice.one_in(3) {
                self.daemon.kill9();
            } else {
                self.daemon.stop();
            }
            self.daemon.start_again();
            self.compare(&sequences, Some(&before), &format!("after restart {restart} with empty memory"))?;
            let wrong = crowd.iter().flat_map(Crowd::wrong).collect::<Vec<_>>();
            if !wrong.is_empty() {
                return Err(format!("after restart {restart}: {}", wrong.join("\n")));
            }
        }
        self.rename_and_lose(&sequences, dice)?;
        self.settle_and_stop(dice)?;
        self.counts.sequences.fetch_add(SEQUENCES, Ordering::Relaxed);
        let roots =
            sequences.iter().map(|sequence| &sequence.root).chain(crowd.iter().map(|crowd| &crowd.root));
        for root in roots {
            fs::remove_dir_all(root).map_err(|error| format!("removing it all: {error}"))?;
        }
        Ok(())
    }

    /// Runs some operations of each sequence, with a kill or two among them.
    fn part(
        &mut self,
        sequences: &mut [Sequence],
        crowd: Option<&mut Crowd>,
        dice: &mut Dice,
    ) -> Result<(), String> {
        let each: Vec<u64> = sequences.iter().map(|_| dice.within(1..OPERATIONS + 1)).collect();
        let all: u64 = each.iter().sum();
        let mut kills: Vec<u64> = (0..dice.within(0..3)).map(|_| dice.within(0..all)).collect();
        kills.sort_unstable();
        let (done, ended) = (&AtomicU64::new(0), &AtomicBool::new(false));
        let share = sequences.len().div_ceil(usize::try_from(THREADS).expect("few"));
        let wrong: &Mutex<Vec<String>> = &Mutex::default();
        std::thread::scope(|scope| {
            let workers: Vec<_> = (sequences.chunks_mut(share).zip(each.chunks(share)))
                .map(|(sequences, each)| scope.spawn(move || carry_on(sequences, each, done, wrong)))
                .collect();
            let milling = crowd.map(|crowd| scope.spawn(|| self.mill(crowd, ended)));
            let killer = scope.spawn(|| {
                for at in kills {
                    while done.load(Ordering::Relaxed) < at && !ended.load(Ordering::Relaxed) {
                        std::thread::sleep(LOOK_EVERY);
                    }
                    let dead = self.daemon.kill_serving();
                    let amid = !ended.load(Ordering::Relaxed);
                    self.daemon.wait_for_next(dead);
                    self.counts.kills.fetch_add(1, Ordering::Relaxed);
                    self.counts.kills_amid.fetch_add(u64::from(amid), Ordering::Relaxed);
                }
            });
            for worker in workers {
                worker.join().expect("a worker says what is wrong");
            }
            ended.store(true, Ordering::Relaxed);
            if let Some(Err(error)) = milling.map(|milling| milling.join().expect("links change places")) {
                wrong
                    .lock()
                    .expect("no worker panics with it")
                    .push(format!("an exchange of links: {error}"));
            }
            killer.join().expect("the next daemon comes");
        });
        self.counts.operations.fetch_add(done.load(Ordering::Relaxed), Ordering::Relaxed);
        let wrong = wrong.lock().expect("no worker panics with it");
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
    }

    /// Lets links change places until told to stop. The tree document is written often only while a flush waits.
    fn mill(&self, crowd: &mut Crowd, ended: &AtomicBool) -> std::io::Result<()> {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    self.daemon.ctl(&["flush", "--wait", "--timeout", "1"]);
                }
            });
            crowd.mill(ended)
        })
    }

    fn crowd_name(&self) -> String {
        format!("crowd{}", self.number)
    }

    /// Closes what is open, and waits until all is in Tier-3.
    fn flush(&mut self, sequences: &mut [Sequence]) -> Result<(), String> {
        sequences.iter_mut().for_each(Sequence::close_all);
        let output = self.daemon.ctl(&["flush", "--wait", "--timeout", "60"]);
        // Tier-3 refuses such a document. Until the next one, its content would be lost with the node.
        if let Some(refused) = self.daemon.log().lines().find(|line| line.contains("contradicts itself")) {
            return Err(format!("a tree document was of no one moment: {refused}"));
        }
        if output.status.success() { Ok(()) } else { Err(format!("flush --wait: {}", shown(&output))) }
    }

    /// Compares every name with its model and, if `before` is given, with its times then. Returns the entries found.
    fn compare(
        &self,
        sequences: &[Sequence],
        before: Option<&Vec<Entries>>,
        when: &str,
    ) -> Result<Vec<Entries>, String> {
        let mut all = Vec::new();
        let mut wrong = Vec::new();
        for (number, sequence) in sequences.iter().enumerate() {
            let seen = sequence.seen().map_err(|error| {
                format!("{when}, {} cannot be looked at: {error}", sequence.root.display())
            })?;
            let mut expected = sequence.expected();
            for (path, entry) in &mut expected {
                let then = before.and_then(|before| before[number].get(path));
                entry.mtime = entry.mtime.or_else(|| then.and_then(|then| then.mtime));
            }
            self.counts.compared.fetch_add(expected.len() as u64, Ordering::Relaxed);
            let lines = differences(&expected, &seen);
            if !lines.is_empty() {
                let done: Vec<_> =
                    sequence.done.iter().map(|operation| format!("    {operation:.80?}")).collect();
                wrong.push(format!(
                    "{when}, {}:\n  {}\n  after\n{}",
                    sequence.root.display(),
                    lines.join("\n  "),
                    done.join("\n")
                ));
            }
            all.push(seen);
        }
        wrong.extend(self.strangers(sequences)?.map(|path| format!("{when}, {} is there", path.display())));
        if wrong.is_empty() { Ok(all) } else { Err(wrong.join("\n")) }
    }

    /// Returns the entries of the root that belong to no sequence.
    fn strangers(&self, sequences: &[Sequence]) -> Result<impl Iterator<Item = PathBuf>, String> {
        let mut there = Vec::new();
        let listed = fs::read_dir(self.daemon.mount()).map_err(|error| format!("the root: {error}"))?;
        for entry in listed {
            there.push(entry.map_err(|error| format!("the root: {error}"))?.path());
        }
        let crowd = self.daemon.mount().join(self.crowd_name());
        there.retain(|path| *path != crowd && sequences.iter().all(|sequence| sequence.root != *path));
        Ok(there.into_iter())
    }
}

/// Does this many operations with each of some sequences, in turn.
fn carry_on(sequences: &mut [Sequence], each: &[u64], done: &AtomicU64, wrong: &Mutex<Vec<String>>) {
    let rounds = each.iter().copied().max().unwrap_or(0);
    for round in 0..rounds {
        for (sequence, most) in sequences.iter_mut().zip(each) {
            if round >= *most {
                continue;
            }
            if let Err(why) = sequence.step() {
                let last: Vec<_> =
                    sequence.done.iter().map(|operation| format!("    {operation:.80?}")).collect();
                let what = format!("{}: {why}; after\n{}", sequence.root.display(), last.join("\n"));
                wrong.lock().expect("no worker panics with it").push(what);
                return;
            }
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

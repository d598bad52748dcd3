//! Real packages are killed again and again and resumed by their own code: does each go on from its newest whole save, bit for bit?
//!
//! Owns: when a job is killed, where it must go on, the line of counts. Does not own: a package's saves, resumption and hashes (its
//! script), the checkpoints hidden from it (`durability`).
//!
//! A script knows nothing of Tidemark. The arguments are the directory, the last step, and the row's own. The script resumes from the
//! directory by its package's own code, and ends with an error if that fails. Every rank prints
//!
//! ```text
//! RESUMED k             where it goes on; 0: it found nothing
//! HASHES step-k {…}     model, optimizer and what else is restored, once at each step (and of what was loaded)
//! SAVING k, SAVED k     before and after each save
//! DONE                  at the last step
//! ```

mod life;
mod rows;
mod slow_rank;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use life::{Ending, Killed, Life, MISSES_MAX, Moment, Pace, Steps};
use tidemark_tests::campaign::dice::Dice;
use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::machine;
use tidemark_tests::python::Python;

use crate::{content, environment, script};

const KILLS: u64 = 3;
/// Kills of a package whose family has another row with [`KILLS`]. Most of a life is loading the framework. So the short form
/// kills one row of a family often, and each other row once, in a save, after which the node's memory is lost.
const KILLS_OF_A_SIBLING: u64 = 1;
const KILLS_LONG: u64 = 20;
/// Pause before a job starts again. A launcher takes seconds, but a fork no time: a life could load a checkpoint that is about to be
/// hidden. Hiding takes up to two seconds by SEMANTICS (S-torn), and a quarter of a second here.
const STARTS_AGAIN_AFTER: Duration = Duration::from_millis(500);
/// Share of the kills, as one in this many, that come between two saves. The rest come inside a save.
const BETWEEN_ONE_IN: u64 = 3;
/// Steps of a life, which ends at its first or second save. Further steps are room for missed moments.
const STEPS_PER_LIFE: u64 = 3;
/// Moments that one kill may miss, since a save of some milliseconds is often over before the ranks are stopped.
const SPARE_STEPS: u64 = 6;
/// Wait before a file is overwritten, so that its save is committed: the settle time, and an upload.
const LONG_ENOUGH_TO_COMMIT_S: &str = "1.5";
/// Variable with the seed of the kills. Without it, a seed is drawn and shown.
const SEED_ENV: &str = "TIDEMARK_PACKAGES_SEED";

/// A row of the table.
#[derive(Clone, Copy)]
struct Package {
    /// Name of the row, for its run and in the output.
    name: &'static str,
    script: &'static str,
    ranks: usize,
    /// Ranks of every second life.
    ranks_then: usize,
    arguments: &'static [&'static str],
    temporary: Temporary,
    ending: Ending,
    /// Wait of the script before each save, in seconds, in the mount.
    between_saves_s: &'static str,
    /// Text added to the daemon's configuration.
    config: &'static str,
    /// Number of kills without `--long`.
    kills: u64,
    /// Whether a run has no whole checkpoint by the package's own doing. A job killed then cannot resume.
    between_chairs: fn(&Path) -> bool,
}

/// Place of $TMPDIR.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Temporary {
    Outside,
    InTheMount,
}

#[test]
fn deepspeed_zero_1() {
    // ZeRO-1 has the kills of the two, because it names a step in its tracker before all ranks have saved.
    comes_back(&deepspeed("deepspeed-zero1", &["1"]));
}

#[test]
fn deepspeed_zero_3() {
    comes_back(&Package { kills: KILLS_OF_A_SIBLING, ..deepspeed("deepspeed-zero3", &["3"]) });
}

/// Lightning copies from another file system, with 64 KiB writes into the final name.
#[test]
fn lightning_with_tmpdir_outside_the_mount() {
    comes_back(&LIGHTNING);
}

/// Lightning renames the file into place.
#[test]
fn lightning_with_tmpdir_in_the_mount() {
    let temporary = Temporary::InTheMount;
    comes_back(&Package {
        name: "lightning-tmpdir-inside",
        temporary,
        kills: KILLS_OF_A_SIBLING,
        ..LIGHTNING
    });
}

/// Lightning copies a second file over in place.
#[test]
fn lightning_with_a_copied_last() {
    comes_back(&Package {
        name: "lightning-copy",
        arguments: &["copy"],
        between_saves_s: LONG_ENOUGH_TO_COMMIT_S,
        kills: KILLS_OF_A_SIBLING,
        between_chairs: |_| false,
        ..LIGHTNING
    });
}

/// The default row.
const ROW: Package = Package {
    name: "",
    script: "",
    ranks: 1,
    ranks_then: 1,
    arguments: &[],
    temporary: Temporary::Outside,
    ending: Ending::Killed,
    between_saves_s: "0",
    config: "",
    kills: KILLS,
    between_chairs: |_| false,
};

const LIGHTNING: Package = Package {
    name: "lightning",
    script: "lightning_trainer.py",
    // Lightning removes the link and then recreates it.
    between_chairs: |run| {
        run.join("step=1.ckpt").exists() && fs::symlink_metadata(run.join("last.ckpt")).is_err()
    },
    ..ROW
};

const fn deepspeed(name: &'static str, arguments: &'static [&'static str]) -> Package {
    Package { name, script: "deepspeed_zero.py", ranks: 2, ranks_then: 2, arguments, ..ROW }
}

/// Kills a job again and again, loses the node's memory once, and lets the job come to its end.
fn comes_back(package: &Package) {
    let Some(python) = environment() else { return };
    let kills = if machine::long() { KILLS_LONG } else { package.kills };
    // Among many lives, some miss more moments, and a job must not end before it is killed.
    let spare = if machine::long() { 2 * u64::from(MISSES_MAX) } else { SPARE_STEPS };
    let seed = seed();
    let mut dice = Dice::new(seed);
    let steps = kills * STEPS_PER_LIFE + spare;
    let config = super::config() + package.config;
    let mut daemon = super::daemon_with("1GiB", config);

    // Loading the packages is most of a life, so lives are forked. In a row with many kills, the first life loads them as a job does.
    let loading = python.clone().with("BETWEEN_SAVES_S", package.between_saves_s);
    let python = python.forking(package.ranks, &script(package.script));
    let plain = daemon.scratch("plain");
    let unbroken = start(package, &python, &plain, &plain, steps);
    let (truth, mut pace) = unbroken.ends();
    pace.between += Duration::from_secs_f64(package.between_saves_s.parse().expect("seconds"));
    assert!(truth.iter().all(|rank| rank.len() as u64 == steps), "{}: hashes of {steps} steps", package.name);
    let content = content::of_saves(&plain, &mut Dice::new(seed));
    fs::remove_dir_all(&plain).expect("the unbroken run is not needed any more");

    let outside = daemon.scratch("outside");
    let mut told = Told { kills: vec![], resumed: vec![], content };
    let of_life = |life: u64| {
        let ranks = if life.is_multiple_of(2) { package.ranks } else { package.ranks_then };
        Package { ranks, ..*package }
    };
    let python = python.with("BETWEEN_SAVES_S", package.between_saves_s);
    for kill in 0..kills {
        let loads = kill == 0 && package.kills > KILLS_OF_A_SIBLING;
        let python = if loads { &loading } else { &python };
        let mut life = start(&of_life(kill), python, daemon.mount(), &outside, steps);
        let resumed = told.resumes(&mut life, package, seed, &daemon);
        let moment =
            if kill % BETWEEN_ONE_IN == BETWEEN_ONE_IN - 1 { Moment::Between } else { Moment::InsideSave };
        let run = daemon.mount().join(package.name);
        let passes = || (package.between_chairs)(&run);
        // A run's first save stays visible when torn, so that a job fails on it and does not start over unnoticed.
        let first = resumed + 1 + u64::from(resumed == 0);
        let (found, killed) = life.killed(first + dice.within(0..2), moment, pace, &mut dice, passes);
        assert_same(package, seed, &found, &truth);
        told.kills.push(killed);
        sleep(STARTS_AGAIN_AFTER);
        if kill == kills / 2 {
            lose_memory(&mut daemon);
        }
    }
    let mut life = start(&of_life(kills), &python, daemon.mount(), &outside, steps);
    told.resumes(&mut life, package, seed, &daemon);
    let (found, _) = life.ends();
    assert_same(package, seed, &found, &truth);
    assert!(found.iter().all(|rank| rank.contains_key(&steps)), "{}: it came to its last step", package.name);
    told.show(package, seed, pace);
}

fn start(package: &Package, python: &Python, place: &Path, outside: &Path, steps: u64) -> Life {
    let temporary = match package.temporary {
        Temporary::Outside => outside.join("tmp"),
        Temporary::InTheMount => place.join("tmp"),
    };
    fs::create_dir_all(&temporary).expect("a directory for temporary files");
    let run = place.join(package.name);
    let text = |path: PathBuf| path.to_str().expect("paths of tests are UTF-8").to_owned();
    let (run, steps) = (text(run), steps.to_string());
    let arguments = [&[run.as_str(), &steps], package.arguments].concat();
    let mut python = python.clone().with("TMPDIR", &text(temporary));
    if package.ending == Ending::Preempted {
        // A job that is asked to end has a launcher, which gives it a rank.
        python = python.with("RANK", "0");
    }
    let ranks = python.start(package.ranks, &script(package.script), &arguments);
    Life::new(ranks, package.ranks, package.ending)
}

/// Returns the step from which a life goes on. If it fails, panics with the run's files and the daemon's events.
fn resumed(life: &mut Life, daemon: &Daemon, name: &str) -> u64 {
    life.resumed().unwrap_or_else(|said| {
        let found =
            Command::new("find").arg(daemon.mount().join(name)).args(["-printf", "%p %s %t\\n"]).output();
        let found = found.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let events = daemon.ctl(&["events"]);
        panic!("{said}\n{}\n{}", found.unwrap_or_default(), shown(&events))
    })
}

/// A job's history so far.
struct Told {
    kills: Vec<Killed>,
    resumed: Vec<u64>,
    /// Verdicts on the files of the unbroken run.
    content: content::Said,
}

impl Told {
    /// Checks that the next life goes on from the newest whole save, or from a newer one that was done but not reported yet.
    fn resumes(&mut self, life: &mut Life, package: &Package, seed: u64, daemon: &Daemon) -> u64 {
        let resumed = resumed(life, daemon, package.name);
        let whole = self.kills.iter().filter_map(|killed| killed.saved).max().unwrap_or(0);
        let begun = self.kills.last().and_then(|killed| killed.begun).unwrap_or(0).max(whole);
        assert!(
            (whole..=begun).contains(&resumed),
            "{} goes on from step {resumed}: it had saved {whole} and begun {begun} (seed {seed}): {:#?}\n{:#?}",
            package.name,
            self.kills,
            daemon.checkpoints()
        );
        self.resumed.push(resumed);
        resumed
    }

    #[expect(clippy::print_stdout, reason = "the counts are what a person runs this for")]
    fn show(&self, package: &Package, seed: u64, pace: Pace) {
        let inside = self.kills.iter().filter(|killed| killed.inside).count();
        assert!(2 * inside >= self.kills.len(), "{inside} of {} kills were inside a save", self.kills.len());
        let mut whole = 0;
        let by_then = self.kills.iter().map(|killed| {
            whole = killed.saved.unwrap_or(0).max(whole);
            whole
        });
        let saved: Vec<u64> = by_then.collect();
        println!(
            "packages: {}: {} kills, {inside} inside a save; saved by then {saved:?}; resumed {:?}; a save {} ms; seed {seed}",
            package.name,
            self.kills.len(),
            &self.resumed[1..],
            pace.save.as_millis()
        );
        println!("content: {}: {}", package.name, self.content);
    }
}

/// Asserts that every step of a life equals the same step of the unbroken run.
fn assert_same(package: &Package, seed: u64, found: &Steps, truth: &Steps) {
    for (rank, (found, truth)) in found.iter().zip(truth).enumerate() {
        for (step, hashes) in found {
            let other: Vec<_> =
                hashes.iter().filter(|(name, hash)| truth[step].get(*name) != Some(hash)).collect();
            assert!(
                other.is_empty() && hashes.len() == truth[step].len(),
                "{}, rank {rank}, step {step} (seed {seed}): {} of {} differ from the unbroken run: {other:?}",
                package.name,
                other.len(),
                truth[step].len()
            );
        }
    }
}

/// Makes whole checkpoints durable, kills the node at once, and starts it with nothing but Tier-3.
fn lose_memory(daemon: &mut Daemon) {
    let flushed = daemon.ctl(&["flush", "--wait", "--timeout", "60", "-o", "json"]);
    let answer: serde_json::Value = serde_json::from_slice(&flushed.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", shown(&flushed)));
    // Only torn checkpoints may be excused; if one was whole, the next life shows it.
    for pending in answer["pending"].as_array().expect("a list") {
        assert_eq!(pending["reason"], "torn", "not durable: {}", shown(&flushed));
    }
    daemon.kill9();
    daemon.start_again();
    for checkpoint in daemon.checkpoints() {
        assert_eq!(checkpoint["copies"]["host"]["bytes"], 0, "memory is not empty: {checkpoint}");
    }
}

fn seed() -> u64 {
    match std::env::var(SEED_ENV) {
        Ok(seed) => seed.parse().expect("a number"),
        Err(_) => {
            let mut bytes = [0; 4];
            getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
            u32::from_le_bytes(bytes).into()
        }
    }
}

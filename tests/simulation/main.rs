//! Does the cluster keep its promises under loss, delay, partition, death and wrong clocks?
//!
//! A cluster of 3 to 9 nodes runs in one thread, on a simulated clock. All decisions come from the protocol crate's own rules:
//! leases, clocks, membership, placement, the states of files and checkpoints, evidence, sender and landing, the documents and
//! keys of Tier-3. The code around the rules, which the engine and the control plane have in full, is here a smaller second
//! version. Every fault follows from the seed.
//!
//! | file | owns |
//! |---|---|
//! | `exec`, `rng`, `world` | tasks and time, the seed, the machines |
//! | `network`, `store` | messages; Tier-3 and the lease |
//! | `memory`, `tree`, `files`, `names` | what a node holds, its names, calls on its mount, leave for them |
//! | `node`, `replicate`, `save` | one daemon, copies, its part in Tier-3 |
//! | `coordinator`, `catalog`, `decide` | one epoch: members, names, checkpoints |
//! | `job`, `faults`, `invariants` | what runs, what goes wrong, what must hold |
//! | `outage` | an hour without a coordinator |
//!
//! Does not own: the catalog in etcd (here every node publishes everything to a successor), files put aside, lists, retention.
//! The cluster suite has those with real daemons.
//!
//! `TIDEMARK_SIM_SEED=7` runs one seed and prints its last events. `TIDEMARK_LONG` runs more seeds.
#![expect(clippy::print_stderr, reason = "what was exercised is what it is run for")]

mod catalog;
mod coordinator;
mod decide;
mod exec;
mod faults;
mod files;
mod invariants;
mod job;
mod memory;
mod names;
mod network;
mod node;
mod outage;
mod replicate;
mod rng;
mod save;
mod store;
mod tree;
mod world;

use exec::Owner;
use faults::Fault;
use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use world::World;

const SEED_ENV: &str = "TIDEMARK_SIM_SEED";
/// Number of seeds, without and with `TIDEMARK_LONG`.
const SEEDS: u64 = 60;
const SEEDS_LONG: u64 = 5_000;
/// How long faults happen in each seed, and how long the cluster may then take to come together.
const TROUBLE: Duration = Duration::from_secs(150);
const CALM: Duration = Duration::from_secs(240);

/// Log of a seed that prints, when dropped after a failure, what led to it and how to run it again.
struct Story<'a>(&'a World, bool);

impl Drop for Story<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() || self.1 {
            eprintln!("{}", self.0.told());
        }
        if std::thread::panicking() {
            eprintln!("again: {SEED_ENV}={} cargo xtask test --only simulation", self.0.seed);
        }
    }
}

/// Runs the world until `until`, or until no task can go on.
fn run_until(world: &World, until: Duration) {
    while world.now() < until && world.exec.step(&world.rng, until) {}
}

/// The result of one seed.
struct Outcome {
    tally: BTreeMap<&'static str, u64>,
    checked: u64,
    events: u64,
    simulated: Duration,
    committed: usize,
    log: String,
}

fn simulate(seed: u64, tell: bool) -> Outcome {
    let rng = rng::Rng::new(seed ^ 0x51);
    let world = World::new(seed, 3 + rng.below_usize(7));
    if tell {
        world.remember_all();
    }
    let story = Story(&world, tell);
    faults::skew_clocks(&world);
    (0..world.machines.len()).for_each(|machine| world.start(machine));
    for run in 0..1 + rng.below_usize(2) {
        world.spawn(Owner::World, job::train(Rc::clone(&world), run, Duration::from_secs(8)));
    }
    for machine in 0..world.machines.len() {
        world.spawn(Owner::World, job::tinker(Rc::clone(&world), machine));
    }
    world.spawn(Owner::World, job::reader(Rc::clone(&world)));
    let every = Duration::from_secs(2 + rng.below(20));
    world.spawn(Owner::World, faults::trouble(Rc::clone(&world), every));
    run_until(&world, TROUBLE);
    faults::calm(&world);
    come_together(&world);
    let outcome = Outcome {
        tally: world.tally.borrow().clone(),
        checked: world.truth.borrow().checked,
        events: world.exec.polls.get(),
        simulated: world.now(),
        committed: world.truth.borrow().committed(),
        log: world.told(),
    };
    drop(story);
    world.end();
    outcome
}

/// Runs the world without faults until every complete checkpoint is committed and every file has its copy.
fn come_together(world: &Rc<World>) {
    let until = world.now() + CALM;
    loop {
        let next = world.now() + Duration::from_secs(5);
        run_until(world, next);
        match invariants::is_together(world) {
            Ok(()) => return,
            Err(why) if world.now() >= until => {
                world.broken("when nothing goes wrong any more, everything comes together", &why);
            }
            Err(_) => {}
        }
    }
}

#[test]
fn no_seed_breaks_a_promise() {
    if let Ok(seed) = std::env::var(SEED_ENV) {
        let outcome = simulate(seed.parse().expect("a seed is a number"), true);
        println!("seed {seed}: {} events, {} committed", outcome.events, outcome.committed);
        return;
    }
    let seeds = if std::env::var_os("TIDEMARK_LONG").is_some() { SEEDS_LONG } else { SEEDS };
    // Seeds are independent, so as many run at once as there are processors.
    let next = AtomicU64::new(0);
    let some = || {
        let seed = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < seeds);
        std::iter::from_fn(seed)
            .map(|seed| simulate(seed, false))
            .map(|found| Outcome { log: String::new(), ..found })
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let begun: Vec<_> = (0..threads).map(|_| scope.spawn(|| some().collect::<Vec<_>>())).collect();
        let ended =
            begun.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ended.flatten().collect()
    });
    let mut sum: BTreeMap<&'static str, u64> = BTreeMap::new();
    let (mut checked, mut events, mut simulated, mut committed) = (0, 0, Duration::ZERO, 0);
    assert_eq!(outcomes.len() as u64, seeds);
    for outcome in outcomes {
        for (what, count) in outcome.tally {
            *sum.entry(what).or_insert(0) += count;
        }
        checked += outcome.checked;
        events += outcome.events;
        simulated += outcome.simulated;
        committed += outcome.committed;
    }
    for (what, count) in &sum {
        println!("{count:>10} {what}");
    }
    let faults: u64 = Fault::ALL.iter().map(|fault| sum.get(fault.word()).copied().unwrap_or(0)).sum();
    println!(
        "{seeds} seeds, {:.1} simulated hours, {events} events, {faults} faults, {committed} versions committed, {checked} checks",
        simulated.as_secs_f64() / 3600.0
    );
    for fault in Fault::ALL {
        assert!(sum.contains_key(fault.word()), "no seed had any {}", fault.word());
    }
}

#[test]
fn a_seed_is_one_story() {
    for seed in 0..3 {
        assert_eq!(simulate(seed, false).log, simulate(seed, false).log, "seed {seed}");
    }
}

//! Test of two or three coordinators over one Tier-3, with any order of their requests, lost answers, late requests, and deaths.
//!
//! Goal: in any order, no marker ever names missing or different data, and there is one decision about a version. Nothing is deleted
//! before it is aborted or retired, and the newest committed versions are never retired.
//!
//! Method: the engine's own functions (`raise_epoch`, `recover`, `Attempt`, `commit`, `retire`, `sweep`) run over a store in which every
//! request waits until a seeded schedule lets it happen. After each request, `audit` checks its invariants in the memory itself.
//!
//! | file | owns |
//! |---|---|
//! | `wire` | requests as data, and their effects |
//! | `world` | which request happens next, and which answer its caller gets |
//! | `chaos` | the seed, and the chances of trouble |
//! | `life` | the work of one start of a daemon |
//! | `audit` | invariants |
//! | `tally` | counts of the exercised cases |
//!
//! `TIDEMARK_SCHEDULE_SEED=7` runs one schedule and prints its trace; `TIDEMARK_LONG` runs more of them. Not covered: loose
//! files, pins, the tree, participants on several nodes.

mod audit;
mod chaos;
mod life;
mod tally;
mod wire;
mod world;

use chaos::{Chaos, Rng};
use futures::future;
pub(in crate::node) use life::shared as shared_over;
use life::{Life, Work};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tally::{Seen, Tally};
use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};
use world::World;

/// Schedules that are run without `TIDEMARK_LONG`; with it, [`SCHEDULES_LONG`].
const SCHEDULES: u64 = 1000;
const SCHEDULES_LONG: u64 = 200_000;
/// Schedules at once: each is one thread, and CI has two.
const THREADS: usize = 2;
/// Starts of one schedule, over all its coordinators.
const STARTS: u64 = 7;

/// Prints the trace that led to a failure.
struct Told<'a>(&'a World, u64, bool);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() || self.2 {
            eprintln!("{}the schedule of seed {}", self.0.told(), self.1);
        }
    }
}

/// Runs the schedule of one seed.
fn schedule(seed: u64, tier1: &Arc<Tier1>, tell: bool) -> Arc<World> {
    let world = Arc::new(World::default());
    let told = Told(&world, seed, tell);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut rng = Rng(seed);
        let coordinators = if rng.permille(300) { 3 } else { 2 };
        let mut starts = Vec::new();
        for at in 0..coordinators {
            starts.push(coordinator(&world, tier1, Rng(rng.next()), STARTS / 2 - at / 2));
        }
        world.with(|state| state.running = starts.len());
        let chaos = Chaos::of(Rng(rng.next()));
        future::join(future::join_all(starts), Arc::clone(&world).drive(chaos)).await;
        world.with(|state| state.audit.all(&state.bucket));
        at_rest(&world, tier1, &mut rng).await;
    });
    drop(told);
    world.with(|state| state.tally.count(Seen::Schedule));
    world
}

/// Runs one machine: a daemon that starts again some time after it ended.
async fn coordinator(world: &Arc<World>, tier1: &Arc<Tier1>, mut rng: Rng, starts: u64) {
    for _ in 0..starts {
        let (start, died) = world.start();
        let work = Work { saves: 1 + rng.below(3), looks: rng.below(6) };
        let life = Life::new(world, tier1, start, Rng(rng.next()));
        tokio::select! {
            biased;
            _ = died => {}
            () = life.run(work) => {
                // Most starts end here. For the others, background work goes on beside their successor.
                if rng.permille(700) {
                    world.bury(start);
                }
            }
        }
    }
    world.with(|state| state.running -= 1);
}

/// Checks the state after all starts are gone and all requests have arrived: standing versions are whole, two undisturbed starts agree
/// on them, and dead versions are swept.
async fn at_rest(world: &Arc<World>, tier1: &Arc<Tier1>, rng: &mut Rng) {
    let mut known = BTreeSet::new();
    for round in 0..2 {
        let (start, _alive) = world.start();
        let life = Life::new(world, tier1, start, Rng(rng.next()));
        let before = world.with(|state| state.audit.standing(&state.bucket));
        let begins = async {
            assert!(life.begin().await, "start {start} cannot start although nothing disturbs it");
            world.with(|state| state.running = 0);
        };
        world.with(|state| state.running = 1);
        future::join(begins, Arc::clone(world).drive(Chaos::none())).await;
        let standing = world.with(|state| {
            state.audit.all(&state.bucket);
            state.audit.standing(&state.bucket)
        });
        assert!(standing.is_superset(&before), "a start alone gave something up");
        let books = life.books.borrow();
        let versions = books.values().flat_map(|book| book.versions.values());
        let committed = versions.filter(|version| version.checkpoint.is_committed());
        let committed: BTreeSet<_> = committed.map(|version| version.record().version.clone()).collect();
        assert_eq!(committed, standing, "start {start} knows other versions than stand");
        if round == 1 {
            assert_eq!(standing, known, "two starts after each other know other versions");
        }
        known = standing;
    }
    world.with(|state| state.audit.all_is_swept(&state.bucket));
}

/// Returns memory for a test, and the folder whose end removes it.
pub(in crate::node) fn tier1() -> (tempfile::TempDir, Arc<Tier1>) {
    let folder = tempfile::Builder::new().prefix("tidemark-schedule-").tempdir_in("/dev/shm").unwrap();
    let medium = MediumChoice::Directory(folder.path().to_path_buf());
    let tier1 = Tier1::open(Tier1Settings { size_bytes: 128 << 20, ballast: false, medium }).unwrap();
    (folder, tier1)
}

#[test]
fn no_schedule_of_coordinators_makes_a_marker_name_missing_or_different_data() {
    let (_folder, tier1) = tier1();
    if let Ok(seed) = std::env::var("TIDEMARK_SCHEDULE_SEED") {
        schedule(seed.parse().unwrap(), &tier1, true);
        return;
    }
    let all = if std::env::var_os("TIDEMARK_LONG").is_some() { SCHEDULES_LONG } else { SCHEDULES };
    let (next, sum) = (AtomicU64::new(0), Mutex::new(Tally::default()));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= all {
                        return;
                    }
                    let tally = schedule(seed, &tier1, false).with(|state| state.tally);
                    sum.lock().unwrap().add(&tally);
                }
            });
        }
    });
    for (what, count) in sum.lock().unwrap().rows() {
        println!("{count:>10} {what:?}");
        assert!(count > 0, "no schedule had any {what:?}");
    }
}

#[test]
fn a_seed_is_one_schedule() {
    let (_folder, tier1) = tier1();
    for seed in 0..20 {
        let told = || schedule(seed, &tier1, false).told();
        assert_eq!(told(), told(), "seed {seed}");
    }
}

//! A long time without any coordinator.
//!
//! Owns: the hour in which no node can take the coordinator role while training goes on, and the limit of saves in that hour.
//! Does not own: faults that come and go (`faults`).

use super::exec::Owner;
use super::faults;
use super::files::Process;
use super::invariants::coordinator;
use super::job;
use super::world::World;
use super::{Story, come_together, run_until};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

const HOUR: Duration = Duration::from_secs(3600);
/// Time before the outage, in which every node saves and publishes.
const USUAL: Duration = Duration::from_secs(90);
const BETWEEN_SAVES: Duration = Duration::from_secs(20);
/// Longest wait of a save: the time for which the coordinator's last beats count, and the wait for one answer that never
/// comes.
const NOTICED: Duration = Duration::from_secs(1);
/// Time that a save takes at most.
const LAST: Duration = Duration::from_secs(5);
const SEEDS: u64 = 1;
const SEEDS_LONG: u64 = 20;

/// A save by one rank into directories of its node.
struct Saved {
    began: Duration,
    took: Duration,
    well: bool,
}

/// Saves with a single rank, again and again.
async fn train_alone(world: Rc<World>, machine: usize, saves: Rc<RefCell<Vec<Saved>>>) {
    for step in 1.. {
        world.sleep(BETWEEN_SAVES).await;
        if world.calm.get() {
            return;
        }
        let run = 100 + machine;
        let session = format!("job-{run}-{step}");
        let Some(rank) = Process::on(&world, machine, &session, Some((0, 1))) else { return };
        let directory = format!("run-{run}/step-{step}").into_bytes();
        let began = world.now();
        let well = job::save_of_one(&world, run, &directory, &rank).await.is_ok();
        saves.borrow_mut().push(Saved { began, took: world.now() - began, well });
        rank.ends(tidemark_protocol::cluster::wire::WireFate::Exited);
    }
}

/// Runs a seed with an hour's outage, and returns the number of saves in it.
fn an_hour(seed: u64) -> usize {
    let world = World::new(seed, 4);
    let story = Story(&world, false);
    faults::skew_clocks(&world);
    (0..world.machines.len()).for_each(|machine| world.start(machine));
    let saves: Vec<Rc<RefCell<Vec<Saved>>>> = world.machines.iter().map(|_| Rc::default()).collect();
    for (machine, saves) in saves.iter().enumerate() {
        world.spawn(Owner::World, train_alone(Rc::clone(&world), machine, Rc::clone(saves)));
    }
    run_until(&world, USUAL);
    let seat = faults::take_the_seat_away(&world);
    let began = world.now();
    run_until(&world, began + HOUR);
    assert!(coordinator(&world).is_none(), "somebody decided");
    let committed = world.truth.borrow().committed();
    faults::calm(&world);
    come_together(&world);
    let mut done = 0;
    for (machine, saves) in saves.iter().enumerate().filter(|(machine, _)| *machine != seat) {
        let saves = saves.borrow();
        let (before, after): (Vec<_>, Vec<_>) = saves.iter().partition(|save| save.began < began);
        // A save that ends when there is a coordinator again may wait until the coordinator has its changes.
        let during: Vec<_> = after.into_iter().filter(|save| save.began + LAST < began + HOUR).collect();
        let usual = before.iter().map(|save| save.took).max().expect("it saved before");
        assert!(during.len() >= 100, "n{machine} saved {} times", during.len());
        assert!(during.iter().all(|save| save.well), "a save of n{machine} failed");
        assert!(during.iter().all(|save| save.took < usual + NOTICED), "a save of n{machine} waited");
        done += during.len();
    }
    let now = world.truth.borrow().committed();
    assert!(
        now >= committed + done,
        "{done} saves in the hour, {committed} committed before its end, {now} after"
    );
    drop(story);
    world.end();
    done
}

/// Goal: an hour without a coordinator costs no save and delays none, because a node goes on in directories of its own. Once
/// there is a coordinator again, all saves are committed.
#[test]
fn an_hour_without_a_coordinator_costs_no_save() {
    let seeds = if std::env::var_os("TIDEMARK_LONG").is_some() { SEEDS_LONG } else { SEEDS };
    for seed in 0..seeds {
        let saves = an_hour(seed);
        println!("seed {seed}: {saves} saves in an hour without a coordinator, all committed after it");
    }
}

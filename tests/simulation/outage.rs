//! A long time without any coordinator.
//!
//! Owns: the hour in which no node reaches etcd while training goes on, and what saves may take in it. Does not own: outages that come and
//! go, the judge of saves (`saves`).

use super::etcd;
use super::faults::Trouble;
use super::machine::Machine;
use super::saves::{World, on_simulated_clock};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use tokio::time::Instant;

const HOUR: Duration = Duration::from_secs(3600);
/// Time before the outage, in which every node saves.
const USUAL: Duration = Duration::from_secs(250);
/// A coordinator's term is over by then.
const NOBODY_LEADS: Duration = Duration::from_secs(10);
const BETWEEN_SAVES: Duration = Duration::from_secs(120);
/// Longest wait of a save that notices the outage: the time for which the coordinator's last beats count, and one answer that never comes.
const NOTICED: Duration = Duration::from_secs(1);
/// Number of seeds, without and with `TIDEMARK_LONG`.
const SEEDS: u64 = 1;
const SEEDS_LONG: u64 = 20;

/// A save by one rank into a directory that its node has to itself.
struct Took {
    began: Instant,
    took: Duration,
    well: bool,
}

/// Saves with a single rank, again and again.
async fn train_alone(world: Rc<World>, at: usize, is_over: Rc<Cell<bool>>, saves: Rc<RefCell<Vec<Took>>>) {
    let run = format!("alone_{at}");
    assert!(world.make_directory(at, &run).await, "the cluster does not begin");
    let mut step = 0;
    while !is_over.get() {
        step += 1;
        let (path, began) = (format!("{run}/step_{step}"), Instant::now());
        let saved = world.save(&path, &[at], false).await;
        saves.borrow_mut().push(Took { began, took: began.elapsed(), well: saved.is_some() });
        world.saved.borrow_mut().extend(saved.map(|saved| (path, saved)));
        tokio::time::sleep(BETWEEN_SAVES).await;
    }
}

/// Runs a seed, and returns the number of saves in the hour.
async fn an_hour(seed: u64) -> usize {
    let world = World::new(seed, Trouble::None);
    world.machines.iter().for_each(Machine::start);
    let is_over = Rc::new(Cell::new(false));
    let saves: Vec<Rc<RefCell<Vec<Took>>>> = world.machines.iter().map(|_| Rc::default()).collect();
    let mut programs = tokio::task::JoinSet::new();
    for (at, saves) in saves.iter().enumerate() {
        programs.spawn_local(train_alone(Rc::clone(&world), at, Rc::clone(&is_over), Rc::clone(saves)));
    }
    tokio::time::sleep(USUAL).await;
    for machine in &world.machines {
        world.wire.cut(&machine.name, etcd::PLACE);
        world.wire.cut(etcd::PLACE, &machine.name);
    }
    let began = Instant::now();
    tokio::time::sleep(NOBODY_LEADS).await;
    let committed = world.tier3.committed().len();
    tokio::time::sleep(HOUR).await;
    let serving = world.machines.iter().filter_map(|machine| machine.running()?.serving.clone());
    assert!(!serving.into_iter().any(|serving| serving.node.shared().decides()), "somebody decides");
    assert_eq!(world.tier3.committed().len(), committed, "somebody decided");
    is_over.set(true);
    let ended = Instant::now();
    while let Some(ended) = programs.join_next().await {
        ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
    }
    let mut done = 0;
    for (at, saves) in saves.iter().enumerate() {
        let saves = saves.borrow();
        let (before, during): (Vec<_>, Vec<_>) =
            saves.iter().filter(|save| save.began < ended).partition(|save| save.began < began);
        let usual = before.iter().map(|save| save.took).max().expect("it saved before");
        let longest = during.iter().map(|save| save.took).max().expect("it saved in the hour");
        assert!(longest < usual + NOTICED, "a save of node {at} took {longest:?}, and {usual:?} before");
        // Some ranks are killed while they save.
        let well = during.iter().filter(|save| save.well).count();
        assert!(well >= 25, "node {at} saved {well} of {} times", during.len());
        done += well;
    }
    world.end().await;
    let now = world.tier3.committed().len();
    assert!(
        now >= committed + done,
        "{done} saves in the hour, {committed} committed before it, {now} after it"
    );
    world.machines.iter().for_each(|machine| machine.end());
    world.tier3.assert_right();
    done
}

/// An hour without a coordinator costs no save and delays none, because a node goes on in directories that it has to itself. Once there is
/// a coordinator again, all saves are committed.
#[test]
fn an_hour_without_a_coordinator_costs_no_save() {
    let seeds = if std::env::var_os("TIDEMARK_LONG").is_some() { SEEDS_LONG } else { SEEDS };
    for seed in 1..=seeds {
        let saves = on_simulated_clock(an_hour(seed));
        println!("seed {seed}: {saves} saves in an hour without a coordinator, all committed after it");
    }
}

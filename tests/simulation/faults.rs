//! Faults: the seed decides the kind, the moment, the place and the duration.
//!
//! Owns: the kinds of faults, beginning and ending each. Does not own: what follows.

use super::exec::Owner;
use super::invariants::coordinator;
use super::network::{LEASE, TIER3, Weather};
use super::world::World;
use std::rc::Rc;
use std::time::Duration;

/// Kinds of faults. Each must happen somewhere in the suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Partition,
    OneWay,
    CutFromLease,
    CutFromTier3,
    PowerOff,
    DaemonKilled,
    Paused,
    Tier3Away,
    Tier3Ambiguous,
    Tier3Slow,
    BadWeather,
    MemoryFull,
}

impl Fault {
    pub(crate) const ALL: [Self; 12] = [
        Self::Partition,
        Self::OneWay,
        Self::CutFromLease,
        Self::CutFromTier3,
        Self::PowerOff,
        Self::DaemonKilled,
        Self::Paused,
        Self::Tier3Away,
        Self::Tier3Ambiguous,
        Self::Tier3Slow,
        Self::BadWeather,
        Self::MemoryFull,
    ];

    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Partition => "fault: partition",
            Self::OneWay => "fault: one-way partition",
            Self::CutFromLease => "fault: cut from the lease",
            Self::CutFromTier3 => "fault: cut from Tier-3",
            Self::PowerOff => "fault: power off",
            Self::DaemonKilled => "fault: daemon killed",
            Self::Paused => "fault: paused",
            Self::Tier3Away => "fault: Tier-3 away",
            Self::Tier3Ambiguous => "fault: Tier-3 ambiguous",
            Self::Tier3Slow => "fault: Tier-3 slow",
            Self::BadWeather => "fault: messages lost, doubled, late",
            Self::MemoryFull => "fault: memory full",
        }
    }
}

/// Sets wall clocks wrong by minutes and hours from the beginning.
pub(crate) fn skew_clocks(world: &World) {
    const HOUR_NS: i64 = 3_600_000_000_000;
    for machine in &world.machines {
        let wrong = i64::try_from(world.rng.below(6 * 3600)).expect("hours") * 1_000_000_000 - 3 * HOUR_NS;
        machine.skew_ns.set(if world.rng.permille(700) { wrong } else { 0 });
    }
}

/// Causes faults until all is calm. Each fault ends some time later.
pub(crate) async fn trouble(world: Rc<World>, every: Duration) {
    loop {
        world.sleep(world.rng.between(every / 4, every * 2)).await;
        if world.calm.get() {
            return;
        }
        let fault = *world.rng.one_of(&Fault::ALL).expect("there are some");
        let most = if world.rng.permille(200) { Duration::from_secs(70) } else { Duration::from_secs(12) };
        let lasts = world.rng.between(Duration::from_millis(200), most);
        let machine = world.rng.below_usize(world.machines.len());
        world.count(fault.word());
        world.note(|| format!("{} at n{machine} for {:.1} s", fault.word(), lasts.as_secs_f64()));
        let there = Rc::clone(&world);
        world.spawn(Owner::World, async move { strike(there, fault, machine, lasts).await });
    }
}

async fn strike(world: Rc<World>, fault: Fault, machine: usize, lasts: Duration) {
    let wait = || world.sleep(lasts);
    let network = &world.network;
    match fault {
        Fault::Partition => {
            let apart: Vec<usize> = (0..world.machines.len())
                .filter(|other| *other != machine && world.rng.permille(700))
                .collect();
            for other in &apart {
                network.cut(machine, *other);
                network.cut(*other, machine);
            }
            wait().await;
            for other in &apart {
                network.heal(machine, *other);
                network.heal(*other, machine);
            }
        }
        Fault::OneWay => {
            let other = world.rng.below_usize(world.machines.len());
            network.cut(machine, other);
            wait().await;
            network.heal(machine, other);
        }
        Fault::CutFromLease | Fault::CutFromTier3 => {
            let other = if fault == Fault::CutFromLease { LEASE } else { TIER3 };
            network.cut(machine, other);
            network.cut(other, machine);
            wait().await;
            network.heal(machine, other);
            network.heal(other, machine);
        }
        Fault::PowerOff => {
            world.power_off(machine);
            wait().await;
            begin(&world, machine);
        }
        Fault::DaemonKilled => {
            world.kill_daemon(machine);
            world.sleep(lasts / 8).await;
            begin(&world, machine);
        }
        Fault::Paused => {
            world.exec.pause(machine);
            wait().await;
            world.exec.resume(machine);
        }
        Fault::Tier3Away => {
            world.store.away.set(true);
            wait().await;
            world.store.away.set(false);
        }
        Fault::Tier3Ambiguous => {
            world.store.ambiguous.set(150);
            wait().await;
            world.store.ambiguous.set(0);
        }
        Fault::Tier3Slow => {
            world.store.slower.set(20);
            wait().await;
            world.store.slower.set(1);
        }
        Fault::BadWeather => {
            network.weather.set(Weather {
                lost: world.rng.below(200),
                doubled: world.rng.below(100),
                slow: world.rng.below(200),
            });
            wait().await;
            network.weather.set(Weather::default());
        }
        Fault::MemoryFull => {
            if let Some(memory) = world.machines[machine].memory.borrow().as_ref() {
                memory.full.set(true);
            }
            wait().await;
            if let Some(memory) = world.machines[machine].memory.borrow().as_ref() {
                memory.full.set(false);
            }
        }
    }
}

/// Stops and cuts off the coordinator, and keeps every other node from the coordinator role, until all is calm. Returns
/// the coordinator's machine.
pub(crate) fn take_the_seat_away(world: &World) -> usize {
    let seat = coordinator(world).expect("somebody decides").node.machine;
    world.note(|| format!("n{seat} had the seat, and nobody has it now"));
    for machine in 0..world.machines.len() {
        world.network.cut(machine, LEASE);
        world.network.cut(LEASE, machine);
        if machine != seat {
            world.network.cut(machine, seat);
            world.network.cut(seat, machine);
        }
    }
    world.exec.pause(seat);
    seat
}

/// Starts a daemon on a machine that has none.
fn begin(world: &Rc<World>, machine: usize) {
    if world.machines[machine].daemon.borrow().is_none() {
        world.start(machine);
    }
}

/// Ends all faults, and starts a daemon on every machine that has none.
pub(crate) fn calm(world: &Rc<World>) {
    world.calm.set(true);
    world.network.heal_all();
    world.network.weather.set(Weather::default());
    world.store.away.set(false);
    world.store.ambiguous.set(0);
    world.store.slower.set(1);
    for machine in 0..world.machines.len() {
        world.exec.resume(machine);
        begin(world, machine);
        if let Some(memory) = world.machines[machine].memory.borrow().as_ref() {
            memory.full.set(false);
        }
    }
}

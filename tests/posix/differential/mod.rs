//! The same calls on the mount, on a disk and on a tmpfs must have the same results.
//!
//! Owns: running every scenario in every place, and comparing the results. Does not own: the scenarios (`table` and the files
//! beside it), the places (`place`).
//!
//! If the mount answers a scenario otherwise, the scenario is listed with the mark of the paragraph of SEMANTICS.md that says so.
//! A listed scenario must then differ, so that the list goes stale in neither direction.

mod bytes;
mod locks;
mod names;
mod opens;
mod table;
mod world;

use crate::place::Place;
use std::collections::BTreeSet;
use table::Scenario;
use world::World;

/// Least number of scenarios, and most that may be listed. Fewer scenarios, or more listed ones, would prove too little.
const SCENARIOS_MIN: usize = 120;
const LISTED_MAX: usize = 10;

const SEMANTICS: &str = include_str!("../../../fuse/SEMANTICS.md");

/// Runs each scenario in a place and returns what it saw.
fn run(place: &Place, scenarios: &[Scenario]) -> Vec<Vec<String>> {
    let root = place.path().join("differential");
    let seen = |(number, scenario): (usize, &Scenario)| {
        let world = World::new(root.join(number.to_string()));
        (scenario.run)(&world);
        world.seen()
    };
    scenarios.iter().enumerate().map(seen).collect()
}

/// Runs all scenarios in all places at once. The mounts are compared with the disk and the tmpfs.
pub(crate) fn assert_alike(mounts: &[Place], disk: &Place, tmpfs: &Place) {
    let scenarios = table::scenarios();
    let names: BTreeSet<_> = scenarios.iter().map(|scenario| scenario.name.as_str()).collect();
    assert_eq!(names.len(), scenarios.len(), "a name is given twice");
    assert!(scenarios.len() >= SCENARIOS_MIN, "{} scenarios", scenarios.len());
    let places: Vec<&Place> = mounts.iter().chain([disk, tmpfs]).collect();
    let seen: Vec<_> = std::thread::scope(|scope| {
        let scenarios = &scenarios;
        let threads: Vec<_> =
            places.iter().copied().map(|place| scope.spawn(move || run(place, scenarios))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a scenario's own step failed")).collect()
    });
    let (mounts_seen, plain) = seen.split_at(mounts.len());
    let mut wrong = Vec::new();
    let mut listed = 0;
    for (number, scenario) in scenarios.iter().enumerate() {
        let (on_disk, on_tmpfs) = (&plain[0][number], &plain[1][number]);
        if on_disk != on_tmpfs {
            wrong.push(format!("{}: {} {on_disk:?}, tmpfs {on_tmpfs:?}", scenario.name, disk.name));
        }
        listed += usize::from(scenario.differs.is_some());
        for (place, seen) in mounts.iter().zip(mounts_seen) {
            let seen = &seen[number];
            match scenario.differs {
                None if seen != on_disk => {
                    wrong.push(format!(
                        "{}: {} {seen:?}, {} {on_disk:?}",
                        scenario.name, place.name, disk.name
                    ));
                }
                Some(mark) if seen == on_disk => {
                    wrong.push(format!(
                        "{}: {} is like {} now, and listed by {mark}",
                        scenario.name, place.name, disk.name
                    ));
                }
                _ => {}
            }
        }
        if let Some(mark) = scenario.differs {
            assert!(SEMANTICS.contains(&format!("**{mark}.**")), "SEMANTICS.md has no {mark}");
        }
    }
    println!("differential: {} scenarios, {} listed, in {} mounts", scenarios.len(), listed, mounts.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(listed <= LISTED_MAX, "{listed} scenarios are listed");
}

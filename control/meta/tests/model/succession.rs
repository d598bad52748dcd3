//! A new coordinator, a store that went back, a node that is written off.
//!
//! Owns: single cases of each. Does not own: their interleavings, which are scenarios.

use crate::scenarios;
use crate::world::{Action, At, Dir, Op, Trouble, World};

const A: At = At(Dir::Root, "a");
const B: At = At(Dir::Root, "b");

fn world() -> World {
    World::new(&scenarios::everything())
}

/// Makes a call, and runs the world until nothing moves.
fn call(world: &mut World, node: usize, op: Op) {
    assert!(world.act(&Action::Client(node, op)), "{op:?} comes to nothing");
    world.settle();
}

#[test]
fn a_coordinator_that_cannot_follow_loads_everything() {
    let mut world = world();
    // The standby's copy ends before these, and the history that it would follow is gone.
    call(&mut world, 0, Op::Create(B));
    call(&mut world, 1, Op::Unlink(A));
    world.forget_history();
    world.act(&Action::Replace);
    world.settle();
    call(&mut world, 2, Op::Look(B));
    call(&mut world, 3, Op::Look(A));
    call(&mut world, 3, Op::Create(A));
    assert_eq!(world.bad(), None);
}

#[test]
fn a_store_that_went_back_is_refused_by_its_coordinator() {
    let mut world = world();
    let backup = world.backup();
    call(&mut world, 0, Op::Create(B));
    world.restore(&backup);
    call(&mut world, 1, Op::Look(A));
    let why = world.bad().unwrap();
    assert!(why.contains("a coordinator stopped: the store went back"), "{why}");
}

#[test]
fn a_store_that_went_back_is_refused_by_a_standby_that_followed() {
    let mut world = world();
    let backup = world.backup();
    call(&mut world, 0, Op::Create(B));
    world.follow();
    world.restore(&backup);
    world.act(&Action::Replace);
    let why = world.bad().unwrap();
    assert!(why.contains("a coordinator stopped: the store went back"), "{why}");
}

#[test]
fn a_store_that_went_back_is_refused_by_its_nodes() {
    let mut world = world();
    let backup = world.backup();
    call(&mut world, 0, Op::Create(B));
    world.restore(&backup);
    // This standby has followed up to the backup only: it sees nothing wrong, the nodes do.
    world.act(&Action::Replace);
    assert_eq!(world.bad(), None);
    world.settle();
    assert_eq!(world.bad(), Some("a node believes that the store went back"));
}

#[test]
fn tombstones_go_when_a_lost_node_is_written_off() {
    let mut world = world();
    world.act(&Action::Node(3, Trouble::PowerOff));
    world.act(&Action::Verdict(3));
    call(&mut world, 0, Op::Unlink(A));
    world.act(&Action::Sweep);
    assert_eq!(world.tombstones(), 1, "the lost node may come back");
    world.write_off(3);
    world.act(&Action::Sweep);
    assert_eq!(world.tombstones(), 0);
    assert_eq!(world.bad(), None);
}

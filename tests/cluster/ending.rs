//! A node is told to end while another takes the coordinator role: the choice of that node, and whether each node drains by the rule of
//! its role at that time.
//!
//! Does not own: the end of a node while nothing else changes (`tree`), the role of nodes that stay (`failover`).

use std::fs::{self, File};
use std::io::Write;

use rustix::process::Signal;
use tidemark_tests::daemon::Daemon;
use tidemark_tests::process;

use crate::site::{Cluster, LIMIT, MIB, noise};

/// Configuration with which an end waits for a save longer than a lease lives.
const PATIENT: &str = "[shutdown]\ngrace_s = 40\ndrain_timeout_s = 60\n";

/// Begins the end of a daemon, which waits while a program saves.
fn tell_to_end(daemon: &Daemon) {
    process::signal(daemon.keeper_pid(), Signal::TERM);
    let drains =
        process::until(LIMIT, || (daemon.ctl_json(&["status"])["state"] == "draining").then_some(()));
    assert!(drains.is_some(), "{}", daemon.log_tail());
}

fn assert_ends_durable(cluster: &mut Cluster, node: usize) {
    let daemon = cluster.nodes[node].daemon_mut();
    let ended = daemon.wait_for_end_by_itself(LIMIT);
    assert_eq!(ended.and_then(|status| status.code()), Some(0), "{}", daemon.log_tail());
}

/// Goal: a node that stays takes a free coordinator role. Method: the coordinator's node is lost while another waits at its end for a save.
#[test]
fn a_node_that_ends_leaves_the_free_seat_to_one_that_stays() {
    let Some(mut cluster) = Cluster::start_with_lease_and(PATIENT) else { return };
    let ends = 1;
    let run = cluster.mount(ends).join("run");
    fs::create_dir(&run).unwrap();
    let mut save = File::create(run.join("step_1.pt")).unwrap();
    tell_to_end(cluster.nodes[ends].daemon());
    cluster.nodes[0].power_off();
    let stays = 3 - ends;
    assert_eq!(cluster.wait_for_seat(&[1, 2]), stays, "{}", cluster.nodes[ends].daemon().log_tail());
    let bytes = noise(1, MIB);
    save.write_all(&bytes).unwrap();
    drop(save);
    cluster.wait_for(stays, "run/step_1.pt", &["committed"]);
    assert_ends_durable(&mut cluster, ends);
    assert!(fs::read(cluster.mount(stays).join("run/step_1.pt")).unwrap() == bytes);
}

/// Goal: a coordinator that loses its role while it drains ends as a member does, with its last save in Tier-3. Method: the coordinator
/// waits at its end for a save, and is cut off from etcd alone.
#[test]
fn a_coordinator_that_loses_its_seat_while_it_drains_ends_as_a_member() {
    let Some(mut cluster) = Cluster::start_with_lease_and(PATIENT) else { return };
    let run = cluster.mount(0).join("run");
    fs::create_dir(&run).unwrap();
    let mut save = File::create(run.join("step_1.pt")).unwrap();
    tell_to_end(cluster.nodes[0].daemon());
    let cut = cluster.nodes[0].host().partition(cluster.network.host("etcd"));
    let seat = cluster.wait_for_seat(&[1, 2]);
    let bytes = noise(1, MIB);
    let written = save.write_all(&bytes);
    drop(save);
    assert!(written.is_ok(), "{written:?}: {}", cluster.nodes[0].daemon().log_tail());
    cluster.wait_for(seat, "run/step_1.pt", &["committed"]);
    assert_ends_durable(&mut cluster, 0);
    assert!(fs::read(cluster.mount(seat).join("run/step_1.pt")).unwrap() == bytes);
    assert!(cut.heal() > 0, "nothing was dropped");
}

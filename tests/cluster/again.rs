//! A node that coordinated, lost the role, and takes it again.

use crate::site::{Cluster, LIMIT, SEAT_TAKEN, names};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;
use tidemark_tests::process;

/// Line in the coordinator's log once etcd has the whole catalog.
const CATALOG_KEPT: &str = "the whole catalog is kept in etcd";

/// Goal: names that another coordinator gave stay when a former coordinator takes the role again, although that one had used and removed the
/// same names in its earlier term. Method: the first one is stopped until another has led and given the names, and has lost its power.
/// Directories and links, because their bytes are in no node's memory.
#[test]
fn names_given_meanwhile_stay_when_a_former_coordinator_takes_the_role_again() {
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    let log = |cluster: &Cluster, node: usize| cluster.nodes[node].daemon().log();
    process::until(LIMIT, || log(&cluster, 0).contains(CATALOG_KEPT).then_some(()))
        .expect("etcd has the catalog");
    let mount = cluster.mount(0).to_path_buf();
    fs::create_dir(mount.join("folder")).expect("a directory");
    symlink("target", mount.join("link")).expect("a link");
    fs::remove_dir(mount.join("folder")).expect("it is empty");
    fs::remove_file(mount.join("link")).expect("a name");
    let none = |node: usize| names(cluster.mount(node)).is_empty();
    process::until(LIMIT, || (1..3).all(none).then_some(())).expect("all nodes know that they are gone");
    // Until etcd has that, too.
    std::thread::sleep(Duration::from_secs(1));
    let first = cluster.nodes[0].daemon().serving_pid().expect("it serves");
    process::signal(first, Signal::STOP);
    let second = cluster.wait_for_seat(&[1, 2]);
    let elsewhere = cluster.mount(second).to_path_buf();
    let made = || {
        fs::create_dir(elsewhere.join("folder")).and_then(|()| symlink("target", elsewhere.join("link"))).ok()
    };
    process::until(LIMIT, made).expect("the names are free");
    let other = 3 - second;
    let all = |node: usize| names(cluster.mount(node)).len() == 2;
    process::until(LIMIT, || all(other).then_some(()))
        .expect("the other node has the names, and so etcd has");

    // It follows nobody in between, and so tells nobody anything.
    cluster.nodes[second].power_off();
    cluster.nodes[other].power_off();
    process::signal(first, Signal::CONT);
    let again = || (log(&cluster, 0).matches(SEAT_TAKEN).count() > 1).then_some(());
    process::until(LIMIT, again).expect("the first one has the role again");
    let found = process::until(LIMIT, || {
        let found = fs::read_dir(&mount).ok()?;
        Some(found.map(|entry| entry.expect("an entry").file_name()).collect::<Vec<_>>())
    });
    let found = found.expect("it answers for names");
    assert!(found.len() == 2, "of two names it has {found:?}\n{}", log(&cluster, 0));
}

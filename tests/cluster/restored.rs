//! An etcd that is put back to an older state, as an operator does from a backup.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use tidemark_tests::process;

use crate::site::{Cluster, LIMIT, names, noise};

/// Line in the coordinator's log once etcd has the whole catalog.
const CATALOG_KEPT: &str = "the whole catalog is kept in etcd";

/// Words in the log of a coordinator that found an older catalog in etcd than there was.
const WENT_BACK: &str = "etcd lost changes that it had taken";

/// Goal: what was acknowledged after a backup of etcd is there after etcd was put back to it, whichever node takes the role over, and the
/// log says what happened. Method: the backup is of the same term. Two nodes make a file and a link each, and their daemons are killed
/// afterwards: they do not remember which of their changes the backup lacks. The coordinator loses its power, and Tier-3 never had the files.
#[test]
fn what_was_acknowledged_after_a_backup_of_etcd_is_there_after_it_was_put_back() {
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    let kept = || cluster.nodes[0].daemon().log().contains(CATALOG_KEPT).then_some(());
    process::until(LIMIT, kept).expect("etcd has the catalog");
    cluster.take_tier3_away();
    let backup = cluster.etcd.as_ref().expect("it has a lease").backup();
    let made = [1, 2].map(|node: u8| (format!("of_{node}"), noise(node, 100_000)));
    for (node, (name, bytes)) in (1..).zip(&made) {
        fs::write(cluster.mount(node).join(name), bytes).expect("a file");
        symlink(name, cluster.mount(node).join(format!("to_{name}"))).expect("a link");
    }
    let told = |node: usize| names(cluster.mount(node)).len() == 2 * made.len();
    process::until(LIMIT, || (0..3).all(told).then_some(())).expect("all nodes know all names");
    for node in [1, 2] {
        let daemon = cluster.nodes[node].daemon_mut();
        let dead = daemon.kill_serving();
        daemon.wait_for_next(dead);
    }
    let follows = |node: &usize| cluster.nodes[*node].daemon().log().matches("\"joined\"").count() >= 2;
    process::until(LIMIT, || [1, 2].iter().all(follows).then_some(())).expect("they follow again");
    // The step comes with the answer to a beat.
    std::thread::sleep(Duration::from_secs(1));
    let etcd = cluster.etcd.as_mut().expect("it has a lease");
    etcd.kill();
    cluster.nodes[0].power_off();
    cluster.etcd.as_mut().expect("it has a lease").put_back(&backup);
    let seat = cluster.wait_for_seat(&[1, 2]);
    let log = cluster.nodes[seat].daemon().log();
    assert!(log.contains(WENT_BACK), "{log}");
    cluster.assert_tier3_is_away();
    cluster.bring_tier3_back();
    for node in [1, 2] {
        for (name, bytes) in &made {
            // Through the link, of which no copy is anywhere.
            let path = cluster.mount(node).join(format!("to_{name}"));
            let read = process::until(LIMIT, || fs::read(&path).ok());
            assert!(
                read.as_ref() == Some(bytes),
                "node {node} has another {name}: {:?}",
                read.map(|read| read.len())
            );
        }
    }
}

//! Tier-3 behind several nodes: how often it is read.
//!
//! Does not own: a Tier-3 that is away (`tree`, `failover`).

use std::fs;
use std::sync::Barrier;
use std::thread;

use crate::site::{Cluster, MIB, noise};

/// Goal: when all memory is gone and three fresh nodes restore a checkpoint at once, each byte is read once from Tier-3, and the
/// nodes pass it on to each other. Method: every node reads every file at the same time. The counters of all nodes are added up.
#[test]
fn three_nodes_that_restore_at_once_read_each_object_once() {
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    let sizes = [20 * MIB + 5, 9 * MIB, 100];
    let save = cluster.mount(1).join("run/step_1");
    fs::create_dir_all(&save).unwrap();
    for (file, size) in (0..).zip(sizes) {
        fs::write(save.join(format!("rank{file}.pt")), noise(file, size)).unwrap();
    }
    cluster.wait_for(0, "run/step_1", &["committed"]);
    for node in 0..3 {
        assert!(cluster.nodes[node].power_off().len() >= 2, "keeper and daemon");
    }
    for name in ["n4", "n5", "n6"] {
        cluster.add(name);
    }
    let fresh = [3, 4, 5];
    cluster.wait_for_seat(&fresh);

    let together = Barrier::new(fresh.len());
    thread::scope(|scope| {
        for node in fresh {
            let (save, together) = (cluster.mount(node).join("run/step_1"), &together);
            scope.spawn(move || {
                together.wait();
                for (file, size) in (0..).zip(sizes) {
                    let read = fs::read(save.join(format!("rank{file}.pt"))).unwrap();
                    assert!(read == noise(file, size), "rank{file} on node {node}");
                }
            });
        }
    });
    let sum =
        |name: &str| fresh.iter().map(|node| cluster.nodes[*node].daemon().metric(name, &[])).sum::<f64>();
    let once: f64 = sizes.iter().map(|size| *size as f64).sum();
    let (from_tier3, from_peers) =
        (sum("tidemark_fetch_bytes_total"), sum("tidemark_fetch_peer_bytes_total"));
    println!("tier3: {once} bytes saved, {from_tier3} read from Tier-3, {from_peers} from other nodes");
    assert_eq!((from_tier3, from_peers), (once, 2.0 * once));
}

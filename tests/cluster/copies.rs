//! Copies in other nodes' memory: damage to their bytes, the pace of copying, and eviction.
//!
//! Does not own: how copies come about (`tree`), damage on one node (the durability suite).

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tidemark_tests::daemon::shown;
use tidemark_tests::process;

use crate::site::{Cluster, LIMIT, MIB, noise};

const OFFSET: u64 = 100;

/// Returns the files in a daemon's memory that hold these bytes. Finds them by the directory that the daemon has open.
pub(crate) fn in_memory(pid: u32, bytes: &[u8]) -> Vec<PathBuf> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).expect("a daemon that runs");
    let directories = open.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir());
    let files = directories.filter_map(|directory| fs::read_dir(directory).ok()).flatten();
    let holds = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() == bytes.len() as u64)
            && fs::read(path).is_ok_and(|found| found == bytes)
    };
    files.filter_map(|file| Some(file.ok()?.path())).filter(holds).collect()
}

fn flip(path: &Path) {
    let file = OpenOptions::new().read(true).write(true).open(path).expect("a file in memory");
    let mut byte = [0];
    file.read_exact_at(&mut byte, OFFSET).expect("reading a byte");
    file.write_all_at(&[byte[0] ^ 0x10], OFFSET).expect("writing a byte");
}

/// Goal: if `verify --deep` finds a copy whose bytes are wrong, the node reports it, withdraws the copy and gets it again.
/// Method: one bit of a copy flips in the partner's memory, past its daemon. Only `verify` reveals it.
#[test]
fn a_copy_that_is_not_what_was_sealed_is_found_and_made_again() {
    let Some(cluster) = Cluster::start() else { return };
    cluster.take_tier3_away();
    let bytes = noise(1, 9 * MIB);
    fs::write(cluster.mount(0).join("step_1.pt"), &bytes).unwrap();
    cluster.wait_for(0, "step_1.pt", &["replicated"]);
    let pids = [1, 2].map(|node| cluster.nodes[node].daemon().serving_pid().unwrap());
    let copies = || pids.iter().flat_map(|pid| in_memory(*pid, &bytes)).collect::<Vec<_>>();
    assert_eq!(copies().len(), 1, "one partner has it: {:?}", copies());

    let mut places = [0; 64];
    let name = "user.tidemark.copies";
    let said = rustix::fs::getxattr(cluster.mount(0).join("step_1.pt"), name, &mut places).unwrap();
    assert_eq!(&places[..said], b"host,peer");

    let coordinator = cluster.nodes[0].daemon();
    let verify = || coordinator.ctl_json(&["verify", "--deep"]);
    let before = verify();
    assert_eq!(
        (before["copies"].as_u64(), &before["unchecked"]),
        (Some(2), &serde_json::json!([])),
        "{before:#}"
    );
    flip(&copies()[0]);
    assert!(copies().is_empty(), "the damage reached the pages");
    let found = verify();
    let said = found["unchecked"][0]["what"].as_str().unwrap_or_default();
    assert!(said.contains("peer n") && said.contains("its chunk 0 has checksum"), "{found:#}");
    // The home still has the bytes, so nothing is lost.
    assert_eq!(found["unrecoverable"], serde_json::json!([]));
    // The copy's bytes are there a moment before the coordinator knows of the copy.
    let is_again = || (copies().len() == 1 && verify() == before).then_some(());
    let again = process::until(Duration::from_secs(30), is_again);
    assert!(again.is_some(), "{:#}\n{}", verify(), shown(&coordinator.ctl(&["events"])));
}

/// Goal: when a checkpoint is complete, exactly the nodes that wrote of it pace their copies, even if another node decided it. A
/// flush that waits on any node lifts the pace.
#[test]
fn a_complete_checkpoint_paces_the_copies_of_who_wrote_it_and_a_flush_lifts_that() {
    let Some(cluster) = Cluster::start() else { return };
    let pace = |node: usize| cluster.nodes[node].daemon().metric("tidemark_replica_pace_bytes", &[]);
    let has = |node: usize, paced: bool| {
        process::until(Duration::from_secs(30), || ((pace(node) > 0.0) == paced).then_some(()))
            .unwrap_or_else(|| panic!("{}\n{}", pace(node), cluster.nodes[node].daemon().log_tail()))
    };
    let save = |step: u8| {
        for node in [0, 1] {
            let name = format!("run{node}/step_{step}.pt");
            fs::create_dir_all(cluster.mount(node).join(format!("run{node}"))).unwrap();
            fs::write(cluster.mount(node).join(&name), noise(step, MIB)).unwrap();
            cluster.wait_for(0, &name, &["replicated", "committed"]);
        }
    };
    save(1);
    assert_eq!([0, 1, 2].map(pace), [0.0; 3], "no node knows an interval");
    save(2);
    for node in [0, 1] {
        has(node, true);
    }
    assert!(pace(2) == 0.0, "it wrote nothing");
    let flushed = cluster.nodes[0].daemon().ctl(&["flush", "--wait"]);
    assert!(flushed.status.success(), "{}", shown(&flushed));
    for node in [0, 1] {
        has(node, false);
    }
    save(3);
    for node in [0, 1] {
        has(node, true);
    }
}

/// Goal: bytes that a member only read are evicted like other copies of what Tier-3 has. Method: the member reads more than it has
/// memory for and saves all the same, also after its daemon was killed.
#[test]
fn what_a_member_only_read_gives_way() {
    const FILES: u8 = 20;
    const FILE_BYTES: usize = 16 * MIB;
    let Some(mut cluster) = Cluster::start() else { return };
    let name = |number: u8| format!("run/step_{number}.pt");
    fs::create_dir(cluster.mount(0).join("run")).unwrap();
    for number in 0..FILES {
        fs::write(cluster.mount(0).join(name(number)), noise(number, FILE_BYTES)).unwrap();
        cluster.wait_for(0, &name(number), &["committed"]);
    }
    let member = 2;
    let reads_and_saves = |cluster: &Cluster, own: u8| {
        for number in 0..FILES {
            let read = fs::read(cluster.mount(member).join(name(number)));
            let read = read.unwrap_or_else(|error| panic!("{}: {error}", name(number)));
            assert!(read == noise(number, FILE_BYTES), "{} has other bytes", name(number));
        }
        let save = cluster.mount(member).join(format!("own_{own}.pt"));
        fs::write(&save, noise(own, FILE_BYTES))
            .unwrap_or_else(|error| panic!("{}: {error}", save.display()));
    };
    reads_and_saves(&cluster, 1);
    reads_and_saves(&cluster, 2);
    let daemon = cluster.nodes[member].daemon_mut();
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    reads_and_saves(&cluster, 3);
}

/// Goal: a file that was evicted from its writer's node, and that another node renamed, is there under the new name, with bytes and
/// mode. Method: the writer's node looks first, then the other nodes.
#[test]
fn what_a_node_gave_up_is_there_under_the_name_that_another_gave_it() {
    const FILES: u8 = 20;
    const FILE_BYTES: usize = 16 * MIB;
    let Some(cluster) = Cluster::start() else { return };
    let (author, other) = (2, 0);
    let at = |node: usize, path: &str| cluster.mount(node).join(path);
    let name = |number: u8| format!("run/step_{number}/model.pt");
    for number in 0..FILES {
        fs::create_dir_all(at(author, &format!("run/step_{number}"))).unwrap();
        fs::write(at(author, &name(number)), noise(number, FILE_BYTES)).unwrap();
        cluster.wait_for(author, &format!("run/step_{number}"), &["committed"]);
    }
    let given_up = || {
        let row = cluster.nodes[author].daemon().checkpoint("run/step_0")?;
        (row["copies"]["host"]["files"] == 0 && row["copies"]["object"]["files"] == 1).then_some(())
    };
    process::until(LIMIT, given_up).expect("the memory is needed for what came later");
    let mode = fs::metadata(at(author, &name(0))).unwrap().mode();
    fs::rename(at(other, "run/step_0"), at(other, "run/kept")).unwrap();
    for node in [author, other, 1, author] {
        let path = at(node, "run/kept/model.pt");
        assert!(!at(node, "run/step_0").exists());
        assert_eq!(fs::metadata(&path).unwrap().mode(), mode, "on node {node}");
        assert!(fs::read(&path).unwrap() == noise(0, FILE_BYTES), "other bytes on node {node}");
    }
}

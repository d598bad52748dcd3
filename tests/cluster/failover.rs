//! The coordinator role in the lease of a real etcd: the coordinator is lost, stopped or cut off, and another node takes over.
//!
//! Does not own: the lease itself (`lease`), one tree while nothing is lost (`tree`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidemark_tests::daemon::shown;
use tidemark_tests::process;
use tidemark_tests::python::Python;

use crate::copies::in_memory;
use crate::job::Plan;
use crate::site::{Cluster, LIMIT, MIB, SEAT_TAKEN, names, noise};

/// Line in the coordinator's log once etcd has the whole catalog.
const CATALOG_KEPT: &str = "the whole catalog is kept in etcd";

/// Field in the log of a new coordinator that does not know the earlier catalog.
const NOTHING_KNOWN: &str = r#""before":"unknown""#;
const KEPT_IN_ETCD: &str = r#""before":"kept in etcd""#;
const OWN: &str = r#""before":"own""#;

const PLAN: Plan = Plan { until: 9, every: 2, width: 256, pause_ms: 20, tracker: false };

/// Goal: the coordinator's node is lost with its rank and its memory right after `replicated`, while Tier-3 cannot be reached. Another node
/// becomes the coordinator and knows every name. The job goes on from peers bit for bit, with a fresh node of another name instead of the
/// lost one. When Tier-3 is back, all is committed.
#[test]
fn a_job_goes_on_from_peers_when_the_coordinator_is_lost_and_tier3_is_away() {
    let Some(python) = Python::find() else { return };
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    let unbroken = cluster.unbroken(&python, [0, 1, 2], PLAN);
    cluster.take_tier3_away();
    let mut job = cluster.start_job(&python, [0, 1, 2], PLAN);
    job.wait_for("saved", 4);
    let replicated = cluster.wait_for(0, "job/step_4", &["replicated"]);
    assert_eq!(replicated["copies"]["object"]["files"], 0, "Tier-3 was not reached: {replicated:#}");
    let killed = cluster.nodes[0].power_off();
    assert!(killed.len() >= 3, "keeper, daemon and rank: {killed:?}");
    job.kill9();

    let lost = Instant::now();
    let seat = cluster.wait_for_seat(&[1, 2]);
    let seated = lost.elapsed();
    // The new coordinator knows that a missing name is missing, although no node can read Tier-3.
    assert!(!cluster.mount(seat).join("job/step_1").exists());
    let answered = lost.elapsed();
    cluster.add("n4");
    let joined = lost.elapsed();
    let mut job = cluster.start_job(&python, [1, 2, 3], PLAN);
    let stages = job.finish_in_stages(lost);
    println!(
        "failover: after the loss of the coordinator's node: seat taken after {seated:.1?}, names answered after {answered:.1?}, fresh node joined after {joined:.1?}, {stages}"
    );
    assert!(job.found() >= 4, "it went on from {}", job.found());
    job.assert_goes_on_as(&unbroken);
    cluster.assert_tier3_is_away();
    cluster.bring_tier3_back();
    cluster.wait_for(seat, "job/step_8", &["committed"]);
}

/// Goal: the coordinator and the node that keeps its copies are lost at once, after a save that was `replicated` and before it was
/// committed. The third node becomes the coordinator with what etcd keeps. The save is torn and hidden, although its index is there. The
/// job's tracker names the newest committed save on every node, and all ranks go on from that.
#[test]
fn when_two_partners_are_lost_all_ranks_go_on_from_the_newest_committed_save() {
    let Some(python) = Python::find() else { return };
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    let plan = Plan { tracker: true, ..PLAN };
    let unbroken = cluster.unbroken(&python, [2, 0, 1], plan);
    let mut job = cluster.start_job(&python, [2, 0, 1], Plan { pause_ms: 700, ..plan });
    job.wait_for("saved", 4);
    cluster.wait_for(0, "job/iter_0000004", &["committed"]);
    cluster.take_tier3_away();
    job.wait_for("saved", 6);
    cluster.wait_for(0, "job/iter_0000006", &["replicated"]);
    // The remaining node has the index, and knows all the names.
    assert_eq!(names(&cluster.mount(2).join("job/iter_0000006")).len(), 4);
    let tracker = cluster.mount(1).join("job/latest_checkpointed_iteration.txt");
    assert_eq!(fs::read_to_string(tracker).unwrap(), "6");
    for lost in [0, 1] {
        assert!(cluster.nodes[lost].power_off().len() >= 3);
    }
    job.kill9();
    cluster.bring_tier3_back();
    cluster.wait_for_seat(&[2]);
    for name in ["n4", "n5"] {
        cluster.add(name);
    }
    let torn = cluster.mount(2).join("job/iter_0000006");
    let hidden = process::until(Duration::from_secs(30), || (!torn.exists()).then_some(()));
    let daemon = cluster.nodes[2].daemon();
    assert!(
        hidden.is_some(),
        "{:#?}\n{}",
        daemon.checkpoint("job/iter_0000006"),
        shown(&daemon.ctl(&["events"]))
    );
    let flushed = cluster.nodes[2].daemon().ctl(&["flush", "--wait", "--timeout", "30"]);
    assert_eq!(flushed.status.code(), Some(1), "what is torn is not durable: {flushed:?}");
    // The tracker's bytes still say 6, in the memory of the node that wrote them.
    for node in [2, 3, 4] {
        let tracker = cluster.mount(node).join("job/latest_checkpointed_iteration.txt");
        let follows = process::until(Duration::from_secs(10), || {
            fs::read_to_string(&tracker).is_ok_and(|text| text == "4").then_some(())
        });
        assert!(follows.is_some(), "node {node}: {:?}", fs::read_to_string(&tracker));
    }
    let mut job = cluster.start_job(&python, [2, 3, 4], plan);
    job.finish();
    assert_eq!(job.found(), 4);
    job.assert_goes_on_as(&unbroken);
    cluster.wait_for(2, "job/iter_0000008", &["committed"]);
}

/// Goal: a former coordinator that comes back with its memory, and with an old tree, follows the present coordinator.
#[test]
fn a_coordinator_that_was_cut_off_follows_the_one_that_took_its_place() {
    let Some(cluster) = Cluster::start_with_lease() else { return };
    let [a, b, c] = [0, 1, 2].map(|node| cluster.mount(node).to_owned());
    fs::create_dir(a.join("run")).unwrap();
    fs::write(a.join("run/kept"), noise(1, MIB)).unwrap();
    fs::write(a.join("run/removed"), noise(2, MIB)).unwrap();
    fs::write(b.join("run/by-b"), noise(3, MIB)).unwrap();
    assert_eq!(names(&c.join("run")).len(), 3);
    fs::create_dir(a.join("alone")).unwrap();
    let cut = cluster.nodes[0].host().isolate();
    let seat = cluster.wait_for_seat(&[1, 2]);
    // Close-to-open goes on among the remaining nodes, and nothing of the tree is lost with the old coordinator.
    let [seated, other] = if seat == 1 { [&b, &c] } else { [&c, &b] };
    assert_eq!(names(&seated.join("run")).len(), 3);
    fs::remove_file(other.join("run/removed")).unwrap();
    fs::write(seated.join("run/later"), noise(4, MIB)).unwrap();
    assert_eq!(fs::read(other.join("run/later")).unwrap(), noise(4, MIB));
    // The changes that the cut-off node makes in a directory of its own are published when it is back.
    fs::write(a.join("alone/made"), noise(5, MIB)).unwrap();
    assert!(cut.heal() > 0, "nothing was dropped");
    let expected = ["by-b", "kept", "later"].map(str::to_owned);
    for mount in [&a, &b, &c] {
        let seen = process::until(Duration::from_secs(20), || {
            (names(&mount.join("run")).into_iter().eq(expected.clone())).then_some(())
        });
        assert!(seen.is_some(), "{}: {:?}", mount.display(), names(&mount.join("run")));
        assert_eq!(fs::read(mount.join("run/kept")).unwrap(), noise(1, MIB));
        assert_eq!(fs::read(mount.join("alone/made")).unwrap(), noise(5, MIB));
    }
    let log = cluster.nodes[0].daemon().log();
    assert!(log.contains("this node is not the coordinator any more"), "{log}");
}

/// Goal: a node that cannot reach etcd, but reaches the coordinator, follows it, so that names are answered for in seconds.
/// Method: first the coordinator is cut off from etcd. Then a member is cut off, and the next coordinator loses its power.
#[test]
fn who_reaches_all_but_etcd_follows_the_coordinator_that_it_hears() {
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    let answered = |cluster: &Cluster, nodes: &[usize]| {
        let began = Instant::now();
        for node in nodes {
            let found = fs::metadata(cluster.mount(*node).join("absent")).map(drop);
            let log = || cluster.nodes[*node].daemon().log_tail();
            let said = found.expect_err("nobody made it");
            assert_eq!(said.kind(), ErrorKind::NotFound, "node {node}: {said}\n{}", log());
        }
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    };
    let cut = cluster.nodes[0].host().partition(cluster.network.host("etcd"));
    let seat = cluster.wait_for_seat(&[1, 2]);
    answered(&cluster, &[seat, 3 - seat, 0]);
    let status = cluster.nodes[0].daemon().ctl_json(&["status"]);
    assert!(status["problems"].to_string().contains("etcd_away"), "{:#}", status["problems"]);
    cluster.nodes[seat].power_off();
    let next = cluster.wait_for_seat(&[3 - seat]);
    answered(&cluster, &[next, 0]);
    let row = || {
        let rows = cluster.nodes[next].daemon().ctl_json(&["nodes"]);
        rows.as_array()?.iter().find(|row| row["name"] == "n1" && row["standing"] == "alive").cloned()
    };
    let alive = process::until(Duration::from_secs(10), row);
    assert!(alive.is_some(), "{:#}", cluster.nodes[next].daemon().ctl_json(&["nodes"]));
    assert!(cut.heal() > 0, "nothing was dropped");
}

/// Deletes the mark of the catalog in etcd, without which the catalog does not count.
fn lose_catalog(cluster: &Cluster) {
    cluster.etcd.as_ref().expect("it has a lease").delete("ckpt/catalog");
}

/// Makes a directory that node 1 has alone, with files that Tier-3 has under their names.
fn begin_own(cluster: &Cluster) {
    let own = cluster.mount(1).join("own");
    fs::create_dir(&own).expect("its own directory goes on");
    for file in 0..6_u8 {
        fs::write(own.join(format!("f{file}")), noise(file, 5000)).expect("its own directory goes on");
    }
    cluster.nodes[0].daemon().flush();
}

/// Makes, renames and removes names in node 1's own directory, while there is no coordinator.
fn change_own(cluster: &Cluster) {
    let own = cluster.mount(1).join("own");
    fs::rename(own.join("f0"), own.join("f0-new")).expect("its own directory goes on");
    fs::rename(own.join("f1"), own.join("f2")).expect("its own directory goes on");
    fs::remove_file(own.join("f3")).expect("its own directory goes on");
    fs::hard_link(own.join("f4"), own.join("f4-too")).expect("its own directory goes on");
    fs::write(own.join("f5"), noise(50, 4000)).expect("its own directory goes on");
    fs::write(own.join("f6"), noise(60, 4000)).expect("its own directory goes on");
}

fn assert_own_is_changed(cluster: &Cluster, nodes: &[usize], when: &str) {
    let wanted = [("f0-new", 0, 5000), ("f2", 1, 5000), ("f4", 4, 5000), ("f4-too", 4, 5000)];
    let wanted = wanted.into_iter().chain([("f5", 50, 4000), ("f6", 60, 4000)]);
    let wanted: BTreeMap<_, _> =
        wanted.map(|(name, seed, bytes)| (name.to_owned(), noise(seed, bytes))).collect();
    for node in nodes {
        let folder = cluster.mount(*node).join("own");
        let read = |name: &String| Some((name.clone(), fs::read(folder.join(name)).ok()?));
        let same = || {
            let found: Option<BTreeMap<_, _>> = names(&folder).iter().map(read).collect();
            (found.as_ref() == Some(&wanted)).then_some(())
        };
        let seen = process::until(Duration::from_secs(20), same);
        assert!(seen.is_some(), "{when}, node {node}: {:?}", names(&folder));
    }
}

/// Goal: a node's own directory goes on while the coordinator is lost. Once the coordinator is back with empty memory, every node sees
/// the changes there: new names, removed names and bytes.
#[test]
fn what_a_node_changed_in_its_own_directory_while_the_coordinator_was_lost_stays_changed() {
    let Some(mut cluster) = Cluster::start() else { return };
    begin_own(&cluster);
    cluster.nodes[0].power_off();
    change_own(&cluster);
    cluster.nodes[0].power_on();
    assert_own_is_changed(&cluster, &[0, 1], "it is back");
}

/// Goal: the same if etcd has lost the catalog. The next coordinator is the node that changed something, another, or the lost one with
/// empty memory. Method: after the changes the daemons of both other nodes are killed, and the catalog's mark is deleted. A node that must
/// not become the coordinator is cut off from etcd until another has the role.
#[test]
fn what_a_node_changed_in_its_own_directory_stays_changed_where_nobody_kept_the_catalog() {
    for seat in 0..3 {
        let Some(mut cluster) = Cluster::start_with_lease() else { return };
        begin_own(&cluster);
        cluster.nodes[0].power_off();
        lose_catalog(&cluster);
        change_own(&cluster);
        let waits = [1, 2].into_iter().filter(|node| *node != seat);
        let cuts: Vec<_> =
            waits.map(|node| cluster.nodes[node].host().partition(cluster.network.host("etcd"))).collect();
        for node in [1, 2] {
            let daemon = cluster.nodes[node].daemon_mut();
            let dead = daemon.kill_serving();
            daemon.wait_for_next(dead);
        }
        if seat == 0 {
            cluster.nodes[0].power_on();
        }
        cluster.wait_for_seat(&[seat]);
        assert!(cluster.nodes[seat].daemon().log().contains(NOTHING_KNOWN), "node {seat} knew the catalog");
        for cut in cuts {
            assert!(cut.heal() > 0, "nothing was dropped");
        }
        let nodes: &[usize] = if seat == 0 { &[0, 1, 2] } else { &[1, 2] };
        assert_own_is_changed(&cluster, nodes, &format!("node {seat} decides"));
    }
}

/// Goal: a node becomes the coordinator without an earlier catalog, while Tier-3 is away. If its daemon is killed and it becomes the
/// coordinator again, it still knows that its names are not all. Method: the coordinator's power, the catalog in etcd and the
/// daemons of both other nodes are gone at once, so that only Tier-3 knows of a symbolic link.
#[test]
fn a_coordinator_that_is_killed_before_it_has_read_tier3_reads_it_afterwards() {
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    std::os::unix::fs::symlink("step_7", cluster.mount(0).join("latest")).unwrap();
    cluster.nodes[0].daemon().flush();
    cluster.take_tier3_away();
    cluster.nodes[0].power_off();
    lose_catalog(&cluster);
    let mut kill = |node: usize| {
        let daemon = cluster.nodes[node].daemon_mut();
        let dead = daemon.kill_serving();
        daemon.wait_for_next(dead);
    };
    kill(1);
    kill(2);
    let seat = cluster.wait_for_seat(&[1, 2]);
    let terms = || {
        let log = cluster.nodes[seat].daemon().log();
        log.lines().filter(|line| line.contains(NOTHING_KNOWN)).count()
    };
    assert_eq!(terms(), 1, "it knew the catalog");
    let daemon = cluster.nodes[seat].daemon();
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    let seats = || {
        let log = cluster.nodes[seat].daemon().log();
        (log.matches(SEAT_TAKEN).count() == 2).then_some(())
    };
    process::until(LIMIT, seats).expect("it takes the seat again");
    cluster.bring_tier3_back();
    let read = || fs::read_link(cluster.mount(seat).join("latest")).ok();
    assert_eq!(process::until(LIMIT, read), Some("step_7".into()), "{}", cluster.nodes[seat].daemon().log());
}

/// Goal: a coordinator whose daemon is killed has the catalog afterwards, although etcd has lost its list of members. No call waits for
/// Tier-3, which is away. Method: the list is deleted. The other nodes are cut off from etcd, so that the same node becomes the
/// coordinator again.
#[test]
fn a_coordinator_whose_members_were_not_stored_still_has_the_catalog() {
    let Some(cluster) = Cluster::start_with_lease() else { return };
    fs::write(cluster.mount(1).join("here"), noise(1, 5000)).unwrap();
    let kept = || cluster.nodes[0].daemon().log().contains(CATALOG_KEPT).then_some(());
    process::until(LIMIT, kept).expect("etcd has the catalog");
    cluster.take_tier3_away();
    let cuts = [1, 2].map(|node| cluster.nodes[node].host().partition(cluster.network.host("etcd")));
    let blind = |node: &usize| cluster.nodes[*node].daemon().log().contains("the lease cannot be looked at");
    process::until(LIMIT, || [1, 2].iter().all(blind).then_some(())).expect("they do not reach etcd");
    cluster.etcd.as_ref().expect("it has a lease").delete("ckpt/members");
    let daemon = cluster.nodes[0].daemon();
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    let again = || (daemon.log().matches(SEAT_TAKEN).count() == 2).then_some(());
    process::until(LIMIT, again).expect("it takes the seat again");
    assert!(daemon.log().contains(OWN), "{}", daemon.log());
    let missing = fs::symlink_metadata(cluster.mount(0).join("missing")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");
    assert!(cluster.mount(0).join("here").exists());
    for cut in cuts {
        assert!(cut.heal() > 0, "nothing was dropped");
    }
    cluster.assert_tier3_is_away();
}

/// Goal: a coordinator that lost its power and is back before another node took its role has the catalog that etcd kept, and is a member.
/// Method: the other nodes are cut off from etcd. Just before, each node removes a name, and Tier-3 does not yet know of the removal.
#[test]
fn a_coordinator_that_is_back_with_empty_memory_before_its_seat_is_taken_has_the_catalog_and_is_a_member() {
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    let run = cluster.mount(0).join("run");
    fs::create_dir(&run).unwrap();
    for (home, by) in [(1_u8, 2), (2, 1), (1, 0), (2, 0)] {
        fs::write(cluster.mount(home.into()).join(format!("run/{home}-{by}")), noise(home, 5000)).unwrap();
        fs::write(cluster.mount(home.into()).join(format!("run/{home}-{by}-stays")), noise(home, 5000))
            .unwrap();
    }
    cluster.nodes[0].daemon().flush();
    for (home, by) in [(1, 2), (2, 1), (1, 0), (2, 0)] {
        fs::remove_file(cluster.mount(by).join(format!("run/{home}-{by}"))).unwrap();
    }
    let left = names(&run);
    assert_eq!(left.len(), 4);
    let cuts = [1, 2].map(|node| cluster.nodes[node].host().partition(cluster.network.host("etcd")));
    cluster.nodes[0].power_off();
    cluster.nodes[0].power_on();
    cluster.wait_for_seat(&[0]);
    let log = cluster.nodes[0].daemon().log();
    assert!(log.contains(KEPT_IN_ETCD), "{log}");
    for cut in cuts {
        assert!(cut.heal() > 0, "nothing was dropped");
    }
    for node in 0..3 {
        let same = || (names(&cluster.mount(node).join("run")) == left).then_some(());
        let found = || names(&cluster.mount(node).join("run"));
        process::until(LIMIT, same).unwrap_or_else(|| panic!("node {node}: {:?}", found()));
    }
    let members = || cluster.nodes[0].daemon().ctl_json(&["nodes"]);
    let all_alive = || {
        let rows = members();
        let rows = rows.as_array()?;
        (rows.len() == 3 && rows.iter().all(|row| row["standing"] == "alive")).then_some(())
    };
    process::until(LIMIT, all_alive).unwrap_or_else(|| panic!("{:#}", members()));
    // The former coordinator's files are copied, as a member's are.
    let bytes = noise(99, MIB);
    fs::write(run.join("own"), &bytes).unwrap();
    let copied = || {
        let pids = [1, 2].map(|node| cluster.nodes[node].daemon().serving_pid().expect("it runs"));
        pids.iter().any(|pid| !in_memory(*pid, &bytes).is_empty()).then_some(())
    };
    process::until(LIMIT, copied).expect("nobody has a copy of what the coordinator wrote");
}

/// Goal: acknowledged names, empty directories and symbolic links too, survive the loss of their node and the coordinator at once. Removed
/// names stay removed. Method: Tier-3 is away, so that only etcd knows the changes of the two nodes.
#[test]
fn what_two_nodes_did_to_names_outlives_both_of_them() {
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    for node in [0, 1] {
        let run = cluster.mount(node).join(format!("run{node}"));
        fs::create_dir(&run).unwrap();
        fs::write(run.join("removed"), noise(1, 5000)).unwrap();
        fs::create_dir(run.join("renamed")).unwrap();
    }
    cluster.nodes[0].daemon().flush();
    cluster.take_tier3_away();
    for node in [0, 1] {
        // Each works in the directory of the other, so that the coordinator is asked.
        let run = cluster.mount(node).join(format!("run{}", 1 - node));
        std::os::unix::fs::symlink("step_7", run.join("latest")).unwrap();
        fs::remove_file(run.join("removed")).unwrap();
        // The rename returns once etcd has what the node did until then. A name that the coordinator's node makes is there a moment later.
        fs::rename(run.join("renamed"), run.join("by-another-name")).unwrap();
    }
    // A lookup of another node's name makes that node publish all its changes.
    for node in [0, 1] {
        assert_eq!(names(&cluster.mount(2).join(format!("run{node}"))).len(), 2);
    }
    for node in [0, 1] {
        cluster.nodes[node].power_off();
    }
    cluster.wait_for_seat(&[2]);
    let log = cluster.nodes[2].daemon().log();
    assert!(log.contains(KEPT_IN_ETCD), "{log}");
    let expected = ["by-another-name", "latest"].map(str::to_owned);
    for node in [0, 1] {
        let run = cluster.mount(2).join(format!("run{node}"));
        assert!(names(&run).into_iter().eq(expected.clone()), "{:?}", names(&run));
        assert_eq!(fs::read_link(run.join("latest")).unwrap(), Path::new("step_7"));
    }
    cluster.assert_tier3_is_away();
    cluster.bring_tier3_back();
    let removed =
        || cluster.mount(2).join("run0/removed").exists() || cluster.mount(2).join("run1/removed").exists();
    assert!(process::until(Duration::from_secs(3), || removed().then_some(())).is_none(), "it is back");
}

/// Goal: files that a node makes are kept while the next daemon of a killed coordinator gets all publications again. Method: another node
/// has thousands of names to publish, and goes on making files in a directory of its own meanwhile.
#[test]
fn what_is_made_while_a_new_coordinator_hears_everything_is_kept() {
    const NAMES: usize = 3000;
    const KILLS: usize = 4;
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    let own = cluster.mount(1).join("own");
    fs::create_dir_all(own.join("links")).unwrap();
    for name in 0..NAMES {
        std::os::unix::fs::symlink("x", own.join(format!("links/{name}"))).unwrap();
    }
    let ended = AtomicBool::new(false);
    let made = std::thread::scope(|scope| {
        let making = scope.spawn(|| {
            let mut made = 0_usize;
            while !ended.load(Ordering::Acquire) {
                fs::write(own.join(format!("file-{made}")), made.to_string()).unwrap();
                made += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            made
        });
        for _ in 0..KILLS {
            let daemon = cluster.nodes[0].daemon_mut();
            let dead = daemon.kill_serving();
            daemon.wait_for_next(dead);
            std::thread::sleep(Duration::from_secs(1));
        }
        ended.store(true, Ordering::Release);
        making.join().unwrap()
    });
    for node in [0, 1, 2] {
        let lost: Vec<_> = (0..made)
            .filter_map(|file| {
                match fs::read_to_string(cluster.mount(node).join(format!("own/file-{file}"))) {
                    Ok(read) if read == file.to_string() => None,
                    read => Some((file, read)),
                }
            })
            .collect();
        assert!(
            lost.is_empty(),
            "node {node} lacks {} of {made} files: {:?}",
            lost.len(),
            &lost[..lost.len().min(9)]
        );
    }
    println!(
        "failover: {made} files were made on one node while the coordinator's daemon was killed {KILLS} times"
    );
}

/// Goal: an acknowledged removal stays, whichever node takes over. Method: one node is cut off from etcd before the coordinator loses its
/// power, until another node has become the coordinator.
#[test]
fn what_was_removed_stays_removed_whoever_takes_over() {
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    let run = cluster.mount(0).join("run");
    fs::create_dir(&run).unwrap();
    for home in 0..3_u8 {
        for by in 0..3 {
            let path = format!("run/{home}-{by}");
            fs::write(cluster.mount(home.into()).join(&path), noise(home, 5000)).unwrap();
            fs::create_dir(cluster.mount(home.into()).join(format!("{path}-d"))).unwrap();
        }
    }
    // Tier-3 has all of them, so a removal that the next coordinator does not know would bring the name back.
    cluster.nodes[0].daemon().flush();
    for home in 0..3 {
        for by in 0..3 {
            let path = cluster.mount(by).join(format!("run/{home}-{by}"));
            match home {
                1 => fs::rename(&path, path.with_file_name(format!("{home}-{by}-new"))).unwrap(),
                _ => fs::remove_file(&path).unwrap(),
            }
            fs::remove_dir(cluster.mount(by).join(format!("run/{home}-{by}-d"))).unwrap();
        }
    }
    let left: BTreeSet<_> = (0..3).map(|by| format!("1-{by}-new")).collect();
    assert_eq!(names(&run), left);
    let cut = cluster.nodes[1].host().partition(cluster.network.host("etcd"));
    cluster.nodes[0].power_off();
    let seat = cluster.wait_for_seat(&[2]);
    assert!(cut.heal() > 0, "nothing was dropped");
    for node in [seat, 1] {
        assert_eq!(names(&cluster.mount(node).join("run")), left, "node {node}");
    }
}

/// Goal: the coordinator's node removes its own files and is lost. The files stay removed, although a node with copies of them was cut off
/// when the copies were to be withdrawn. Method: that node is cut off, the files are removed, it comes back, and the coordinator loses its
/// power.
#[test]
fn what_was_removed_stays_removed_where_copies_of_it_were_out_of_reach() {
    const FILES: u8 = 8;
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    let run = cluster.mount(0).join("run");
    fs::create_dir(&run).unwrap();
    let file = |number: u8| run.join(format!("file-{number}"));
    for number in 0..FILES {
        fs::write(file(number), noise(number, MIB)).unwrap();
    }
    let keeps = |node: usize| {
        let pid = cluster.nodes[node].daemon().serving_pid().expect("it runs");
        (0..FILES).all(|number| !in_memory(pid, &noise(number, MIB)).is_empty())
    };
    let keeper = process::until(LIMIT, || [1, 2].into_iter().find(|node| keeps(*node)));
    let keeper = keeper.expect("one node keeps a copy of each");
    let cut = cluster.nodes[keeper].host().isolate();
    let gone =
        || cluster.nodes[0].daemon().log().contains("nothing is expected from it any more").then_some(());
    process::until(LIMIT, gone).expect("a node that is cut off is gone");
    for number in 0..FILES - 1 {
        fs::remove_file(file(number)).unwrap();
    }
    assert!(cut.heal() > 0, "nothing was dropped");
    let left = || names(&cluster.mount(keeper).join("run"));
    let last = format!("file-{}", FILES - 1);
    process::until(LIMIT, || left().into_iter().eq([last.clone()]).then_some(())).expect("it is back");
    cluster.nodes[0].power_off();
    let seat = cluster.wait_for_seat(&[1, 2]);
    for node in [seat, keeper, 3 - keeper] {
        let run = cluster.mount(node).join("run");
        assert!(names(&run).into_iter().eq([last.clone()]), "node {node}: {:?}", names(&run));
        assert!(fs::read(run.join(&last)).unwrap() == noise(FILES - 1, MIB), "node {node}");
    }
}

/// Goal: a node's writes while there is no coordinator stay when that node becomes the coordinator, as other nodes' writes do.
/// Method: the coordinator loses its power. Both other nodes write into files of the lost one until one of them becomes the coordinator,
/// while a program has the old bytes open.
#[test]
fn what_the_next_coordinator_wrote_into_files_of_the_lost_one_is_kept() {
    const FILES: usize = 40;
    let Some(mut cluster) = Cluster::start_with_lease() else { return };
    fs::create_dir(cluster.mount(0).join("run")).unwrap();
    let name = |node: usize, number: usize| format!("run/{node}-{number}");
    let bytes = noise(1, 9884);
    for node in [1, 2] {
        for number in 0..FILES {
            fs::write(cluster.mount(0).join(name(node, number)), &bytes).unwrap();
        }
    }
    // Tier-3 has the bytes of the lost node.
    cluster.nodes[0].daemon().flush();
    let open = |node: usize| (0..FILES).map(move |number| (node, number));
    let open = [1, 2].into_iter().flat_map(open);
    let readers: Vec<_> = open
        .map(|(node, number)| File::open(cluster.mount(node).join(name(node, number))).unwrap())
        .collect();
    cluster.nodes[0].power_off();
    let changed = |number: usize| {
        let mut bytes = bytes.clone();
        bytes[100..200].fill(u8::try_from(number).expect("few"));
        bytes
    };
    let write_into = |path: &Path, number: usize| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&changed(number)[100..200], 100).unwrap();
    };
    std::thread::scope(|scope| {
        for node in [1, 2] {
            let mount = cluster.mount(node);
            scope.spawn(move || {
                (0..FILES).for_each(|number| write_into(&mount.join(name(node, number)), number));
            });
        }
    });
    let seat = cluster.wait_for_seat(&[1, 2]);
    let mut wrong = Vec::new();
    for reader in [seat, 3 - seat] {
        for (node, number) in [1, 2].into_iter().flat_map(|node| (0..FILES).map(move |number| (node, number)))
        {
            let read = fs::read(cluster.mount(reader).join(name(node, number)));
            if !read.as_ref().is_ok_and(|read| *read == changed(number)) {
                let found = read.map(|read| read.len());
                wrong.push(format!(
                    "{} on node {reader}, where {seat} decides: {found:?}",
                    name(node, number)
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(names(&cluster.mount(seat).join("run")).len(), 2 * FILES);
    assert_eq!(readers.len(), 2 * FILES);
}

/// Goal: while the coordinator's daemon stands still, saves take no longer than usual. All saves are published and committed when
/// there is a coordinator again.
#[test]
fn a_save_does_not_wait_for_a_coordinator_that_stands_still() {
    let Some(cluster) = Cluster::start_with_lease() else { return };
    let mount = cluster.mount(2).to_owned();
    let save = |step: u64| {
        let began = Instant::now();
        let folder = mount.join(format!("run/step_{step}"));
        fs::create_dir_all(&folder).unwrap();
        for file in 0..8_u8 {
            fs::write(folder.join(format!("rank{file}.pt")), noise(file, MIB)).unwrap();
        }
        began.elapsed()
    };
    let usual = (1..=3).map(save).max().expect("three");
    cluster.wait_for(0, "run/step_3", &["committed"]);
    let pid = cluster.nodes[0].daemon().serving_pid().unwrap();
    process::signal(pid, rustix::process::Signal::STOP);
    let stopped = (4..=6).map(save).max().expect("three");
    let seat = cluster.wait_for_seat(&[1, 2]);
    println!("failover: a save took up to {usual:?}, and {stopped:?} while the coordinator stood still");
    cluster.wait_for(seat, "run/step_6", &["committed"]);
    process::signal(pid, rustix::process::Signal::CONT);
    for node in [0, 1] {
        for step in 4..=6 {
            for file in 0..8_u8 {
                let path = cluster.mount(node).join(format!("run/step_{step}/rank{file}.pt"));
                assert!(fs::read(&path).unwrap() == noise(file, MIB), "{}", path.display());
            }
        }
    }
}

/// Goal: while the coordinator's daemon stands still and no other node may take its role, saves go on. All of them are committed when the
/// daemon goes on. Method: two minutes with `--long`, a sixth of that in CI.
#[test]
fn saves_go_on_while_nobody_decides() {
    let Some(cluster) = Cluster::start() else { return };
    let lasts = Duration::from_secs(if std::env::var_os("TIDEMARK_LONG").is_some() { 120 } else { 20 });
    let save = |node: usize, step: u64| {
        let began = Instant::now();
        let folder = cluster.mount(node).join(format!("run{node}/step_{step}"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("rank0.pt"), noise(7, MIB)).unwrap();
        began.elapsed()
    };
    let usual = (1..=3).flat_map(|step| [save(1, step), save(2, step)]).max().expect("six");
    for node in [1, 2] {
        cluster.wait_for(0, &format!("run{node}/step_3"), &["committed"]);
    }
    let pid = cluster.nodes[0].daemon().serving_pid().unwrap();
    process::signal(pid, rustix::process::Signal::STOP);
    let (began, mut longest, mut last) = (Instant::now(), Duration::ZERO, 3);
    while began.elapsed() < lasts {
        last += 1;
        longest = longest.max(save(1, last)).max(save(2, last));
        std::thread::sleep(Duration::from_millis(700));
    }
    process::signal(pid, rustix::process::Signal::CONT);
    println!(
        "failover: a save took up to {usual:?}, and up to {longest:?} in {lasts:?} without a coordinator"
    );
    assert!(last >= 10, "{last} saves");
    for node in [1, 2] {
        for step in 4..=last {
            cluster.wait_for(0, &format!("run{node}/step_{step}"), &["committed"]);
        }
        let read = fs::read(cluster.mount(0).join(format!("run{node}/step_{last}/rank0.pt"))).unwrap();
        assert!(read == noise(7, MIB));
    }
}

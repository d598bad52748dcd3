//! A tree over three nodes: names and bytes made on one are seen on all, and survive the loss of the node that made them.
//!
//! Does not own: the network (`net`), the job (`job`).

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, RenameFlags};
use tidemark_tests::daemon::shown;
use tidemark_tests::process;
use tidemark_tests::python::Python;

use crate::job::Plan;
use crate::site::{Cluster, LIMIT, MIB, names, noise};

/// Goal: close-to-open over nodes, for names and bytes, in directories that one node has and in those that all have.
#[test]
fn what_is_done_on_one_node_is_seen_on_the_others() {
    let Some(cluster) = Cluster::start() else { return };
    let [a, b, c] = [0, 1, 2].map(|node| cluster.mount(node).to_owned());
    fs::create_dir(b.join("run")).unwrap();
    let bytes: Vec<_> = (0..3).map(|seed| noise(seed, 9 * MIB + usize::from(seed))).collect();
    fs::write(b.join("run/by-b"), &bytes[1]).unwrap();
    // The reader comes at once, and must itself wait for the seal and for the place of the bytes.
    assert!(fs::read(c.join("run/by-b")).unwrap() == bytes[1], "c reads what b has just closed");
    fs::write(a.join("run/by-a"), &bytes[0]).unwrap();
    fs::write(c.join("run/by-c"), &bytes[2]).unwrap();
    let all = BTreeSet::from(["by-a", "by-b", "by-c"].map(str::to_owned));
    for mount in [&a, &b, &c] {
        assert_eq!(names(&mount.join("run")), all);
        for (name, bytes) in ["by-a", "by-b", "by-c"].iter().zip(&bytes) {
            assert!(
                fs::read(mount.join("run").join(name)).unwrap() == *bytes,
                "{name} at {}",
                mount.display()
            );
        }
    }
    // Another node than the writer's saves over the file.
    fs::write(c.join("run/by-b"), b"short").unwrap();
    for mount in [&a, &b, &c] {
        assert_eq!(fs::read(mount.join("run/by-b")).unwrap(), b"short");
    }
    fs::rename(a.join("run/by-c"), a.join("run/renamed")).unwrap();
    fs::remove_file(b.join("run/by-a")).unwrap();
    fs::rename(c.join("run"), c.join("moved")).unwrap();
    for mount in [&a, &b, &c] {
        assert_eq!(names(mount), BTreeSet::from(["moved".to_owned()]));
        assert_eq!(names(&mount.join("moved")), BTreeSet::from(["by-b", "renamed"].map(str::to_owned)));
        assert!(!mount.join("run").exists());
        // The new names come from another node than the writers'.
        assert!(fs::read(mount.join("moved/by-b")).unwrap() == b"short", "at {}", mount.display());
        assert!(fs::read(mount.join("moved/renamed")).unwrap() == bytes[2], "at {}", mount.display());
    }
    fs::remove_dir_all(a.join("moved")).unwrap();
    assert_eq!(names(&b), BTreeSet::new());
}

/// Goal: a file is written under each of its names, whatever other nodes did meanwhile to the directories of its names. The writer's node
/// made the file and looks up nothing else in between, so it still knows the old names.
#[test]
fn a_file_is_written_by_the_name_that_another_node_gave_it() {
    let Some(cluster) = Cluster::start() else { return };
    let mounts = [0, 1, 2].map(|node| cluster.mount(node).to_owned());
    for writer in 0..3 {
        for other in (0..3).filter(|other| *other != writer) {
            let (by, from) = (&mounts[writer], &mounts[other]);
            let at = format!("at-{writer}-{other}");
            fs::create_dir_all(by.join(&at).join("old/below")).unwrap();
            fs::write(by.join(&at).join("old/below/file"), b"one").unwrap();
            fs::rename(from.join(&at).join("old"), from.join(&at).join("new")).unwrap();
            append(&by.join(&at).join("new/below/file"), b" two");
            // Another name of the file lies in a directory that is removed.
            fs::create_dir(by.join(&at).join("links")).unwrap();
            fs::hard_link(by.join(&at).join("new/below/file"), by.join(&at).join("links/link")).unwrap();
            fs::remove_dir_all(from.join(&at).join("new")).unwrap();
            append(&by.join(&at).join("links/link"), b" three");
            for mount in &mounts {
                assert_eq!(names(&mount.join(&at)), BTreeSet::from(["links".to_owned()]));
                assert_eq!(fs::read(mount.join(&at).join("links/link")).unwrap(), b"one two three");
            }
        }
    }
}

fn append(path: &Path, bytes: &[u8]) {
    let done = OpenOptions::new().append(true).open(path).and_then(|mut open| open.write_all(bytes));
    done.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// Goal: if two nodes write one file, one after the other, the later bytes stay under each of its names. The coordinator may be either
/// node, and news of the earlier bytes may come late. Method: a third node first gives each file a second name. The other node opens the
/// file right after the close, so that the first seal is published after the second write has begun.
#[test]
fn of_two_that_write_one_after_the_other_the_later_bytes_stay_under_all_names() {
    const FILES: usize = 16;
    let Some(cluster) = Cluster::start() else { return };
    let mounts = [0, 1, 2].map(|node| cluster.mount(node).to_owned());
    let pairs = [(1, 0), (2, 0), (0, 1), (1, 2)];
    fs::create_dir(mounts[0].join("run")).unwrap();
    let path = |(first, then): (usize, usize), file: usize| format!("run/{first}-{then}-{file}");
    for pair @ (first, then) in pairs {
        let third = 3 - first - then;
        for file in 0..FILES {
            let path = path(pair, file);
            let (linked, fresh) = (file % 2 == 0, file % 4 == 1);
            if !fresh {
                fs::write(mounts[then].join(&path), noise(1, 3000)).unwrap();
            }
            if linked {
                fs::hard_link(mounts[third].join(&path), mounts[third].join(format!("{path}-too"))).unwrap();
            }
            fs::write(mounts[first].join(&path), noise(2, 3000)).unwrap();
            fs::write(mounts[then].join(&path), noise(3, 2000)).unwrap();
        }
    }
    // By then the files that were closed first are sealed and published.
    std::thread::sleep(Duration::from_secs(2));
    let all: Vec<_> = pairs.into_iter().flat_map(|pair| (0..FILES).map(move |file| (pair, file))).collect();
    for (node, mount) in mounts.iter().enumerate() {
        for (pair, file) in &all {
            let also = (file % 2 == 0).then(|| format!("{}-too", path(*pair, *file)));
            for path in also.into_iter().chain([path(*pair, *file)]) {
                assert!(fs::read(mount.join(&path)).unwrap() == noise(3, 2000), "{path} on node {node}");
            }
        }
        // A node's link count includes only names that were looked up there, hence a second pass.
        for (pair, file) in &all {
            let path = path(*pair, *file);
            let links = fs::metadata(mount.join(&path)).unwrap().nlink();
            assert_eq!(links, 1 + u64::from(file % 2 == 0), "names of {path} on node {node}");
        }
    }
}

/// Goal: a node that has a directory alone gives it back when another node changes something in it. The same holds if the directory was
/// renamed: by its holder, by another node, or by an exchange with a second directory.
#[test]
fn a_directory_that_was_moved_is_still_given_back_by_who_has_it_alone() {
    let Some(cluster) = Cluster::start() else { return };
    let mounts = [0, 1, 2].map(|node| cluster.mount(node).to_owned());
    let made = |node: usize, name: &str| fs::write(mounts[node].join(name), name).unwrap();
    let all_see = |directory: &str, wanted: &[&str]| {
        let wanted: BTreeSet<_> = wanted.iter().map(|name| (*name).to_owned()).collect();
        for (node, mount) in mounts.iter().enumerate() {
            assert_eq!(names(&mount.join(directory)), wanted, "{directory} on node {node}");
        }
    };
    for (has, other) in [(0, 1), (1, 0), (1, 2)] {
        let [first, second, third] = ["a", "b", "c"].map(|name| format!("{name}{has}{other}"));
        fs::create_dir(mounts[has].join(&first)).unwrap();
        made(has, &format!("{first}/one"));
        fs::rename(mounts[has].join(&first), mounts[has].join(&second)).unwrap();
        made(has, &format!("{second}/two"));
        fs::rename(mounts[other].join(&second), mounts[other].join(&third)).unwrap();
        made(other, &format!("{third}/three"));
        made(has, &format!("{third}/four"));
        made(other, &format!("{third}/five"));
        all_see(&third, &["one", "two", "three", "four", "five"]);

        let [left, right] = ["left", "right"].map(|name| format!("{name}{has}{other}"));
        fs::create_dir(mounts[has].join(&left)).unwrap();
        fs::create_dir(mounts[other].join(&right)).unwrap();
        made(has, &format!("{left}/of-left"));
        made(other, &format!("{right}/of-right"));
        let [one, two] = [&left, &right].map(|name| mounts[has].join(name));
        rustix::fs::renameat_with(CWD, &one, CWD, &two, RenameFlags::EXCHANGE).unwrap();
        for node in [has, other, has] {
            made(node, &format!("{left}/by-{node}"));
            made(node, &format!("{right}/by-{node}"));
        }
        let by = [has, other].map(|node| format!("by-{node}"));
        all_see(&left, &["of-right", &by[0], &by[1]]);
        all_see(&right, &["of-left", &by[0], &by[1]]);
    }
}

/// Goal: if another node removes a directory with all below it, the directory is gone also for the node that has it alone, and its name
/// is free there.
#[test]
fn a_directory_that_was_removed_is_gone_for_who_has_it_alone() {
    let Some(cluster) = Cluster::start() else { return };
    let mounts = [0, 1, 2].map(|node| cluster.mount(node).to_owned());
    for (has, other) in [(2, 1), (2, 0), (0, 1)] {
        let name = format!("x{has}{other}");
        let at = mounts[has].join(&name);
        fs::create_dir_all(at.join("y")).unwrap();
        fs::remove_dir_all(mounts[other].join(&name)).unwrap();
        assert!(!at.exists(), "{name} is there on node {has}");
        let below = fs::write(at.join("y/file"), b"late");
        assert!(below.is_err(), "a file was made below {name}, which was removed");
        fs::create_dir(&at).unwrap();
        for (node, mount) in mounts.iter().enumerate() {
            assert_eq!(names(&mount.join(&name)), BTreeSet::new(), "{name} on node {node}");
        }
    }
}

/// Goal: an undeleted file is there on every node, also on the node that removed it and has the directory alone. Afterwards that node has
/// the directory alone again, and asks no other node.
#[test]
fn what_is_brought_back_is_there_for_who_has_its_directory_alone() {
    /// Time after which the metrics of calls are up to date. The daemon updates them five times a second.
    const COUNTED: Duration = Duration::from_millis(600);
    let Some(cluster) = Cluster::start() else { return };
    let [a, c] = [0, 2].map(|node| cluster.mount(node).join("run"));
    fs::create_dir(&c).unwrap();
    for step in [1, 2] {
        fs::write(c.join(format!("step_{step}.pt")), noise(step, MIB)).unwrap();
        cluster.wait_for(0, &format!("run/step_{step}.pt"), &["committed"]);
    }
    fs::remove_file(c.join("step_1.pt")).unwrap();
    assert!(!a.join("step_1.pt").exists() && !c.join("step_1.pt").exists(), "it was removed");
    let mut said = String::new();
    let back = process::until(LIMIT, || {
        let undelete = cluster.nodes[1].daemon().ctl(&["undelete", "run/step_1.pt"]);
        said = shown(&undelete);
        undelete.status.success().then_some(())
    });
    assert!(back.is_some(), "{said}");
    for run in [&a, &c] {
        let read = process::until(LIMIT, || fs::read(run.join("step_1.pt")).ok());
        assert!(read.is_some_and(|read| read == noise(1, MIB)), "at {}", run.display());
        assert_eq!(names(run), BTreeSet::from(["step_1.pt", "step_2.pt"].map(str::to_owned)));
    }
    // The node must have given the directory back, because it sees the name.
    let holder = cluster.nodes[2].daemon();
    let asked = || holder.metric("tidemark_coordinator_calls_total", &["call=\"look\""]);
    let mut round = 0;
    std::thread::sleep(COUNTED);
    let asks_nobody = || {
        let before = asked();
        fs::write(c.join(format!("log-{round}")), b"line").unwrap();
        round += 1;
        std::thread::sleep(COUNTED);
        (asked() <= before).then_some(())
    };
    assert!(process::until(LIMIT, asks_nobody).is_some(), "each name is asked for");
    assert!(round > 1, "the directory was never given back");
}

/// Goal: a node that is told to end does not report that all is durable while no other node knows its changes of names. Method: the node
/// has the directory alone, so that the rename returns although its coordinator is stopped.
#[test]
fn an_end_that_could_not_tell_the_last_names_says_so() {
    let Some(mut cluster) = Cluster::start_with("[shutdown]\ndrain_timeout_s = 3\n", None) else { return };
    let own = cluster.mount(2).join("own");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("step_1.pt"), noise(1, MIB)).unwrap();
    cluster.wait_for(0, "own/step_1.pt", &["committed"]);
    let mut places = [0; 64];
    let is_in_tier3 = || {
        let said = rustix::fs::getxattr(own.join("step_1.pt"), "user.tidemark.copies", &mut places).ok()?;
        String::from_utf8_lossy(&places[..said]).contains("object").then_some(())
    };
    assert!(process::until(LIMIT, is_in_tier3).is_some(), "its own node knows that it is committed");
    let coordinator = cluster.nodes[0].daemon().serving_pid().unwrap();
    process::signal(coordinator, rustix::process::Signal::STOP);
    fs::rename(own.join("step_1.pt"), own.join("step_2.pt")).unwrap();
    let member = cluster.nodes[2].daemon_mut();
    let ended = member.stop_with_status();
    let log = member.log();
    assert!(ended.code().is_some_and(|code| code != 0), "{ended}: {}", member.log_tail());
    assert!(log.contains("not told to the coordinator at the end") && log.contains("own/step_2.pt"), "{log}");
}

/// Goal: O_EXCL has one winner, mkdir of the same directory is one directory, and no call waits for long.
#[test]
fn of_three_that_make_one_name_one_wins() {
    let Some(cluster) = Cluster::start() else { return };
    let mounts = [0, 1, 2].map(|node| cluster.mount(node).to_owned());
    let began = Instant::now();
    for round in 0..10 {
        let winners = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for (node, mount) in mounts.iter().enumerate() {
                let winners = &winners;
                scope.spawn(move || {
                    let folder = mount.join(format!("run/step_{round}"));
                    fs::create_dir_all(&folder).unwrap();
                    match OpenOptions::new().write(true).create_new(true).open(folder.join("lock")) {
                        Ok(_) => winners.lock().unwrap().push(node),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}"),
                    }
                    fs::write(folder.join(format!("rank{node}")), [0; 100]).unwrap();
                });
            }
        });
        assert_eq!(winners.lock().unwrap().len(), 1, "round {round}");
        let expected = BTreeSet::from(["lock", "rank0", "rank1", "rank2"].map(str::to_owned));
        for mount in &mounts {
            assert_eq!(names(&mount.join(format!("run/step_{round}"))), expected);
        }
    }
    assert!(began.elapsed() < LIMIT, "a promise was waited out");
}

const PLAN: Plan = Plan { until: 9, every: 2, width: 256, pause_ms: 20, tracker: false };

/// Goal: a node is lost with its rank and its memory right after `replicated`, while Tier-3 cannot be reached. A fresh node under
/// another name takes its place. The job goes on from the last save, bit for bit, out of the survivors' memory.
#[test]
fn a_job_goes_on_from_peers_when_a_node_is_lost_and_tier3_is_away() {
    let Some(python) = Python::find() else { return };
    let Some(mut cluster) = Cluster::start() else { return };
    let unbroken = cluster.unbroken(&python, [0, 1, 2], PLAN);
    cluster.take_tier3_away();
    let start = |cluster: &Cluster, nodes| cluster.start_job(&python, nodes, PLAN);
    let mut job = start(&cluster, [0, 1, 2]);
    job.wait_for("saved", 4);
    let replicated = cluster.wait_for(0, "job/step_4", &["replicated"]);
    assert_eq!(replicated["copies"]["object"]["files"], 0, "Tier-3 was not reached: {replicated:#}");
    let killed = cluster.nodes[2].power_off();
    assert!(killed.len() >= 3, "keeper, daemon and rank: {killed:?}");
    job.kill9();

    let lost = Instant::now();
    cluster.add("n4");
    let joined = lost.elapsed();
    let mut job = start(&cluster, [0, 1, 3]);
    let stages = job.finish_in_stages(lost);
    println!("cluster: after the loss of a node: fresh node joined after {joined:.1?}, {stages}");
    assert!(job.found() >= 4, "it went on from {}", job.found());
    job.assert_goes_on_as(&unbroken);
    cluster.assert_tier3_is_away();
}

/// Goal: memory is bounded. If a file was removed, by its own node or by another, that node and the partners free its memory.
#[test]
fn memory_of_what_was_removed_comes_back_on_every_node() {
    let Some(cluster) = Cluster::start() else { return };
    let used = |node: usize| {
        let tiers = cluster.nodes[node].daemon().ctl_json(&["tiers"]);
        let tier1 = tiers.as_array().expect("tiers").iter().find(|tier| tier["name"] == "tier1");
        tier1.expect("tier1")["used_bytes"].as_u64().expect("bytes")
    };
    let [a, b] = [0, 1].map(|node| cluster.mount(node).to_owned());
    let copied = || cluster.nodes[1].daemon().metric("tidemark_replica_acknowledged_files_total", &[]);
    let before = [0, 1, 2].map(used);
    fs::create_dir(b.join("run")).unwrap();
    // The files have four times a node's memory in all.
    for round in 0..40_u8 {
        let path = b.join(format!("run/scratch{round}"));
        let seen = copied();
        fs::write(&path, noise(round, 24 * MIB)).unwrap_or_else(|error| panic!("round {round}: {error}"));
        let is_copied = process::until(LIMIT, || (copied() > seen).then_some(()));
        assert!(
            is_copied.is_some(),
            "round {round} was not copied: {}",
            cluster.nodes[1].daemon().log_tail()
        );
        if round % 2 == 0 {
            fs::remove_file(&path).unwrap();
        } else {
            // The node that removes the file has neither the file nor a copy.
            fs::remove_file(a.join(format!("run/scratch{round}"))).unwrap();
        }
    }
    for (node, before) in before.into_iter().enumerate() {
        let most = before + 8 * MIB as u64;
        let fell = process::until(LIMIT, || (used(node) <= most).then_some(()));
        assert!(fell.is_some(), "node {node}: {} bytes in use, {most} expected at most", used(node));
    }
}

/// Goal: a create that waits for its node's memory keeps no other node waiting, and finds what another node made meanwhile. Method: open
/// files fill a node's memory, in a directory that it has alone, until a create there waits. Then another node makes a directory there,
/// and also the name whose create waits.
#[test]
fn a_create_that_waits_for_memory_keeps_no_other_node_waiting() {
    const STILL: Duration = Duration::from_secs(2);
    let Some(cluster) = Cluster::start() else { return };
    let [other, own] = [1, 2].map(|node| cluster.mount(node).join("run"));
    fs::create_dir(&own).unwrap();
    let (bytes, made) = (noise(1, 4 * MIB), AtomicUsize::new(0));
    let fill = || {
        let mut open = Vec::new();
        loop {
            match OpenOptions::new().write(true).create_new(true).open(own.join(open.len().to_string())) {
                Ok(mut file) => {
                    // The last files are cut short and stay open, so that no memory is freed.
                    let _ = file.write_all(&bytes);
                    open.push(file);
                    made.store(open.len(), Ordering::Release);
                }
                Err(error) => return error,
            }
        }
    };
    let (waiting, directory, theirs, refused) = std::thread::scope(|scope| {
        let filling = scope.spawn(fill);
        let waiting = process::until(LIMIT, || {
            let before = made.load(Ordering::Acquire);
            std::thread::sleep(STILL);
            (before > 0 && made.load(Ordering::Acquire) == before).then_some(before)
        });
        let name = waiting.unwrap_or_default().to_string();
        let directory = fs::create_dir(other.join("directory"));
        let theirs = fs::write(other.join(name), b"theirs");
        (waiting, directory, theirs, filling.join().expect("the thread does not panic"))
    });
    assert!(waiting.is_some(), "no create waited");
    let log = || cluster.nodes[2].daemon().log_tail();
    assert!(directory.is_ok() && theirs.is_ok(), "{directory:?}, {theirs:?}: {}", log());
    assert_eq!(refused.kind(), ErrorKind::AlreadyExists, "{refused}: {}", log());
}

/// Goal: a checkpoint of which the coordinator's node has nothing, not even its index, is committed. The writer's node can wait for
/// that itself.
#[test]
fn a_save_that_the_coordinator_has_no_part_in_is_committed() {
    let Some(python) = Python::find() else { return };
    let Some(mut cluster) = Cluster::start() else { return };
    cluster.add("n4");
    let mut job = cluster.start_job(&python, [1, 2, 3], Plan { until: 4, ..PLAN });
    job.finish();
    let flushed = cluster.nodes[1].daemon().ctl_json(&["flush", "--wait", "--timeout", "60"]);
    assert_eq!(flushed["pending"].as_array().map(Vec::len), Some(0), "{flushed:#}");
    let committed = cluster.nodes[0].daemon().checkpoint("job/step_4");
    let committed = committed.filter(|checkpoint| checkpoint["state"] == "committed").unwrap_or_else(|| {
        panic!(
            "the member's flush was answered before: {flushed:#}\n{:#?}",
            cluster.nodes[0].daemon().checkpoints()
        )
    });
    assert_eq!(committed["framework"], "dcp", "{committed:#}");
    // If something cannot be durable, the waiting flush names what is missing.
    let open = fs::File::create(cluster.mount(2).join("job/open.bin")).unwrap();
    let flushed = cluster.nodes[2].daemon().ctl(&["flush", "--wait", "--timeout", "3", "-o", "json"]);
    assert_eq!(flushed.status.code(), Some(1), "{flushed:?}");
    assert!(String::from_utf8_lossy(&flushed.stdout).contains("open.bin"), "{flushed:?}");
    let asked = cluster.nodes[2].daemon().ctl_json(&["flush"]);
    assert!(asked["pending"].to_string().contains("open.bin"), "who does not wait, too: {asked:#}");
    drop(open);
}

/// Goal: an open reads the bytes that were closed last, although a program of the same node still reads the earlier bytes, which it keeps.
/// Method: a reader holds the file while the writer's node appends to it, rewrites it, fills it if empty, or closes it if begun.
#[test]
fn an_open_finds_what_was_closed_last_beside_one_that_reads_what_was_before() {
    let Some(cluster) = Cluster::start() else { return };
    let mounts = [0, 1, 2].map(|node| cluster.mount(node).to_owned());
    fs::create_dir(mounts[0].join("run")).unwrap();
    for (writer, reader) in [(0, 1), (1, 0), (1, 2), (2, 1)] {
        for kind in ["appended", "anew", "empty", "begun"] {
            let path = format!("run/{writer}-{reader}-{kind}");
            let [by, at] = [writer, reader].map(|node: usize| mounts[node].join(&path));
            let before = if kind == "empty" || kind == "begun" { Vec::new() } else { noise(1, 2 * MIB) };
            let after = if kind == "appended" { [&before[..], b" more"].concat() } else { noise(2, 3 * MIB) };
            let begun = fs::File::create(&by).unwrap();
            (&begun).write_all(&before).unwrap();
            let mut begun = Some(begun).filter(|_| kind == "begun");
            let held = fs::File::open(&at).unwrap();
            let all = |file: &fs::File| {
                let mut bytes = vec![0; before.len() + 1];
                let read = file.read_at(&mut bytes, 0).unwrap();
                bytes.truncate(read);
                bytes
            };
            assert!(all(&held) == before, "{path} before");
            match (kind, begun.take()) {
                ("appended", _) => append(&by, b" more"),
                (_, Some(mut begun)) => begun.write_all(&after).unwrap(),
                (_, None) => fs::write(&by, &after).unwrap(),
            }
            for mount in &mounts {
                let read = fs::read(mount.join(&path)).unwrap();
                assert!(read == after, "{path}: {} bytes at {}", read.len(), mount.display());
            }
            assert!(all(&held) == before, "{path} is what was opened");
            drop(held);
            assert!(fs::read(&at).unwrap() == after, "{path} once nobody reads what was before");
        }
    }
}

/// Goal: a file being written on one node is no empty file on another. The other node waits for it, and returns EIO if it stays open. If
/// the writer's node is lost before any other node knows of the bytes, the result is EIO, too.
#[test]
fn what_is_being_written_elsewhere_is_no_empty_file() {
    let Some(mut cluster) = Cluster::start() else { return };
    let [reader, writer] = [1, 2].map(|node| cluster.mount(node).join("run"));
    fs::create_dir(&writer).unwrap();
    // The other node knows the file as begun, before it is written.
    let begin = |name: &str| {
        let mut begun = fs::File::create(writer.join(name)).unwrap();
        assert!(names(&reader).contains(name));
        assert!(fs::read(reader.join(name)).unwrap().is_empty(), "{name} is begun");
        begun.write_all(&noise(1, MIB)).unwrap();
        begun
    };
    let (open, began) = (begin("open"), Instant::now());
    let read = fs::read(reader.join("open")).map(|bytes| bytes.len());
    assert!(
        read.is_err() && began.elapsed() >= Duration::from_secs(4),
        "{read:?} after {:?}",
        began.elapsed()
    );
    let lost = begin("lost");
    cluster.nodes[2].power_off();
    let refused = process::until(LIMIT, || fs::read(reader.join("lost")).err());
    assert!(refused.is_some(), "{}", cluster.nodes[1].daemon().log_tail());
    drop((open, lost));
}

/// Goal: names and bytes that other nodes make while a node counts as lost stay, even if programs of that node use the same names
/// meanwhile. Method: the node has the directory alone, so that its programs go on. The node is cut off from all other nodes until it
/// is declared gone, and publishes everything when it is back.
#[test]
fn what_was_made_while_a_node_was_away_keeps_its_name() {
    what_was_made_keeps_its_name(|_| {});
}

/// Goal: the names and bytes also stay if the coordinator's daemon is killed before that node is back.
#[test]
fn what_was_made_while_a_node_was_away_keeps_its_name_for_the_next_daemon_of_the_coordinator() {
    what_was_made_keeps_its_name(|cluster| {
        // Everything is published by then.
        assert_eq!(fs::read_to_string(cluster.mount(0).join("run/tracker")).unwrap(), "stays");
        let daemon = cluster.nodes[0].daemon();
        let dead = daemon.kill_serving();
        daemon.wait_for_next(dead);
    });
}

fn what_was_made_keeps_its_name(before_it_is_back: impl Fn(&Cluster)) {
    let Some(cluster) = Cluster::start() else { return };
    let [first, other, away] = [0, 1, 2].map(|node| cluster.mount(node).join("run"));
    fs::create_dir(&away).expect("the node answers");
    fs::write(away.join("early"), b"early").expect("the node answers");
    // A look-up makes the node publish it.
    assert_eq!(fs::read(first.join("early")).expect("the node answers"), b"early");
    let cuts = [0, 1].map(|node| cluster.nodes[node].host().partition(cluster.nodes[2].host()));
    let stands = |wanted: &str| {
        let found = process::until(LIMIT, || {
            let rows = cluster.nodes[0].daemon().ctl_json(&["nodes"]);
            let row = rows.as_array()?.iter().find(|row| row["name"] == "n3")?.clone();
            (row["standing"] == wanted).then_some(())
        });
        found.unwrap_or_else(|| panic!("{:#}", cluster.nodes[0].daemon().ctl_json(&["nodes"])));
    };
    stands("gone");
    let save = |run: &Path, says: &str| {
        fs::write(run.join("file"), says).expect("the node answers");
        std::os::unix::fs::symlink(says, run.join("link")).expect("the node answers");
        fs::create_dir(run.join("step_5.tmp")).expect("the node answers");
        fs::write(run.join("step_5.tmp/rank0"), says).expect("the node answers");
        fs::rename(run.join("step_5.tmp"), run.join("step_5")).expect("the node answers");
        fs::write(run.join("tracker.tmp"), says).expect("the node answers");
        fs::rename(run.join("tracker.tmp"), run.join("tracker")).expect("the node answers");
    };
    save(&away, "late");
    save(&other, "stays");
    before_it_is_back(&cluster);
    let dropped: u64 = cuts.map(|cut| cut.heal()).into_iter().sum();
    assert!(dropped > 0, "nothing was dropped");
    stands("alive");
    // Once this file is seen elsewhere, all changes before it were published.
    fs::write(away.join("after"), b"after").expect("the node answers");
    process::until(LIMIT, || fs::read(first.join("after")).ok()).expect("it tells what it did");
    for run in [&first, &other, &away] {
        for name in ["file", "step_5/rank0", "tracker"] {
            let read = fs::read_to_string(run.join(name));
            assert!(read.as_ref().is_ok_and(|read| read == "stays"), "{name} at {}: {read:?}", run.display());
        }
        assert_eq!(fs::read_link(run.join("link")).expect("the node answers"), Path::new("stays"));
        assert_eq!(
            fs::read(run.join("early")).expect("the node answers"),
            b"early",
            "what was made before is as it was"
        );
    }
}

//! A fixed coordinator whose daemon stands still: what goes on in directories that several nodes use.
//!
//! Does not own: saves in directories of one node, the change of coordinators (`failover`).

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Signal;
use tidemark_tests::process;

use crate::site::{Cluster, LIMIT, names};

/// Limit that tells two kinds of calls apart. A call that goes on ends sooner, also on a busy machine. A call that waits for an
/// answer, which has 10 s, ends later.
const GOES_ON: Duration = Duration::from_secs(5);

/// Makes a directory that all nodes use, with a file of node 2 and one of another node. Returns its path on each node.
fn shared(cluster: &Cluster) -> [PathBuf; 3] {
    let run = [0, 1, 2].map(|node| cluster.mount(node).join("run"));
    fs::create_dir(&run[0]).expect("all nodes answer");
    fs::write(run[2].join("known"), b"one").expect("all nodes answer");
    fs::write(run[1].join("other"), b"other").expect("all nodes answer");
    assert_eq!(fs::read(run[1].join("known")).expect("all nodes answer"), b"one");
    assert_eq!(names(&run[2]).len(), 2);
    run
}

fn coordinator(cluster: &Cluster) -> u32 {
    cluster.nodes[0].daemon().serving_pid().expect("it runs")
}

/// Waits, up to a limit, until a node reports that its coordinator is silent. Returns whether it did.
fn is_silent_for(cluster: &Cluster, node: usize) -> bool {
    let problems = || cluster.nodes[node].daemon().ctl_json(&["status"])["problems"].to_string();
    process::until(LIMIT, || problems().contains("coordinator_away").then_some(())).is_some()
}

/// Goal: while the coordinator is silent, an open for writing of a known file goes on at once, as SEMANTICS says. When the
/// coordinator answers again, every node has the bytes.
#[test]
fn an_open_for_writing_does_not_wait_for_a_silent_coordinator() {
    let Some(cluster) = Cluster::start() else { return };
    let [_, other, own] = shared(&cluster);
    let pid = coordinator(&cluster);
    process::signal(pid, Signal::STOP);
    let began = Instant::now();
    let mut open = OpenOptions::new().append(true).open(own.join("known")).unwrap();
    open.write_all(b" two").unwrap();
    drop(open);
    let took = began.elapsed();
    let silent = is_silent_for(&cluster, 2);
    process::signal(pid, Signal::CONT);
    assert!(took < GOES_ON, "{took:?}");
    assert!(silent, "it was silent for nobody");
    process::until(LIMIT, || (fs::read(other.join("known")).ok()? == b"one two").then_some(()))
        .expect("it is told later");
}

/// Goal: calls that have to wait for the coordinator do not hold up one that goes on without it.
/// Method: look-ups of absent names wait, twice as many as a node first has threads, when a known name is looked up.
#[test]
fn look_ups_that_wait_do_not_hold_up_one_that_goes_on() {
    const WAITING: usize = 32;
    let Some(cluster) = Cluster::start() else { return };
    let [_, _, own] = shared(&cluster);
    // By this descriptor, each call is one look-up.
    let own = rustix::fs::open(&own, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
    let look_up = |name: &str| rustix::fs::statat(&own, name, AtFlags::empty()).map(drop);
    let looked_up = || {
        let status = cluster.nodes[2].daemon().ctl_json(&["status"]);
        status["mount"]["requests"]["lookup"].as_u64().expect("a number")
    };
    let pid = coordinator(&cluster);
    process::signal(pid, Signal::STOP);
    let silent = is_silent_for(&cluster, 2);
    let before = looked_up();
    let (took, found, waited, ended) = std::thread::scope(|scope| {
        let absent = |number: usize| scope.spawn(move || look_up(&format!("absent-{number}")));
        let waiting: Vec<_> = (0..WAITING).map(absent).collect();
        let all = process::until(LIMIT, || (looked_up() >= before + WAITING as u64).then_some(()));
        let began = Instant::now();
        let found = look_up("known");
        let took = began.elapsed();
        let waited = all.is_some() && waiting.iter().all(|one| !one.is_finished());
        process::signal(pid, Signal::CONT);
        let ended: Vec<_> = waiting.into_iter().map(|one| one.join().unwrap()).collect();
        (took, found, waited, ended)
    });
    assert!(silent && waited, "the others did not wait");
    assert!(found.is_ok() && took < Duration::from_secs(2), "{found:?} after {took:?}");
    assert!(ended.iter().all(|one| *one == Err(Errno::NOENT)), "{ended:?}");
}

//! Two daemons on one Tier-3: the newer one decides, the older one notices, and no version has two decisions.
//!
//! Owns: real processes, one of them stale. Does not own: the marker's conditional create on real stores (suite s3).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::{machine, process, tier3};

use crate::site::{CONFIG, MIB, assert_holds, has_problem, noise, options, problems, save, start};

const NOTICE_LIMIT: Duration = Duration::from_secs(30);

fn on(tier3: &Path) -> DaemonOptions {
    DaemonOptions { tier3: Some(format!("file://{}", tier3.display())), ..options("256MiB", CONFIG) }
}

/// Returns the options of a daemon that supersedes one that lives.
fn over(tier3: &Path) -> DaemonOptions {
    DaemonOptions { flags: vec!["--take-over".into()], ..on(tier3) }
}

#[test]
fn a_second_stand_alone_daemon_is_refused_and_the_successor_of_a_dead_one_is_not() {
    let shared = tempfile::tempdir().unwrap();
    let Some(mut first) = start(on(shared.path())) else { return };
    let begun = Instant::now();
    let refused = Daemon::start_refused(on(shared.path()));
    let text = shown(&refused);
    assert_eq!(refused.status.code(), Some(6), "{text}");
    let pid = first.ready().pid.to_string();
    for word in [&pid, "--coordinator", "--certs", "another --tier3", "--take-over"] {
        assert!(text.contains(word), "{word} is not in {text}");
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "on one machine nothing is waited for");
    save(&first, "run/step1.pt", &noise(1, MIB));
    first.flush();

    // After a crash or an orderly end, the next daemon, in another state directory, starts without `--take-over`.
    first.kill9();
    let begun = Instant::now();
    let mut second = Daemon::start(on(shared.path()));
    second.stop();
    let mut third = Daemon::start(on(shared.path()));
    assert!(
        begun.elapsed() < Duration::from_secs(15),
        "a dead daemon is not waited for: {:?}",
        begun.elapsed()
    );
    // The next daemon of a keeper is the same node.
    let dead = third.kill_serving();
    third.wait_for_next(dead);
    save(&third, "run/step2.pt", &noise(2, MIB));
    third.flush();

    // A superseded daemon notices even if it writes nothing.
    let fourth = Daemon::start(over(shared.path()));
    let fenced = process::until(Duration::from_secs(15), || has_problem(&third, "fenced").then_some(()));
    assert!(fenced.is_some(), "{:#?}", problems(&third));
    drop(fourth);
    third.stop_with_status();
}

/// Committed checkpoints stay committed. Names that only the older daemon knew are reported, not dropped silently.
#[test]
fn names_that_a_fenced_daemon_did_not_tell_are_said_by_flush_and_by_its_end() {
    let shared = tempfile::tempdir().unwrap();
    let Some(mut first) = start(on(shared.path())) else { return };
    save(&first, "run/step1.pt", &noise(1, MIB));
    save(&first, "run/notes.txt", b"loose");
    first.flush();
    let second = Daemon::start(over(shared.path()));
    let fenced = process::until(NOTICE_LIMIT, || has_problem(&first, "fenced").then_some(()));
    assert!(fenced.is_some(), "{:#?}", problems(&first));
    first.flush();
    fs::remove_file(first.mount().join("run/notes.txt")).unwrap();
    let begun = Instant::now();
    let output = first.ctl(&["flush", "--wait", "--timeout", "60"]);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("another daemon decides"), "{}", shown(&output));
    assert!(begun.elapsed() < NOTICE_LIMIT, "it waited for what cannot come");
    assert_eq!(first.stop_with_status().code(), Some(1), "{}", first.log_tail());
    drop(second);
}

#[test]
fn an_older_coordinator_is_fenced_and_its_bytes_are_still_served() {
    let shared = tempfile::tempdir().unwrap();
    let Some(mut first) = start(on(shared.path())) else { return };
    let (one, two, late) = (noise(1, 3 * MIB + 1), noise(2, 3 * MIB + 2), noise(3, 3 * MIB + 3));
    save(&first, "run/step1.pt", &one);
    first.flush();
    let second = Daemon::start(over(shared.path()));
    assert_holds(&second, "run/step1.pt", &one, "what the first committed");
    // The first daemon may decide none of these later saves.
    for path in ["run/step2.pt", "run/step3.pt", "other/step1.pt"] {
        save(&first, path, &late);
    }
    let output = first.ctl(&["flush", "--wait", "--timeout", "20"]);
    assert!(matches!(output.status.code(), Some(1 | 6)), "{}", shown(&output));
    let fenced = process::until(NOTICE_LIMIT, || has_problem(&first, "fenced").then_some(()));
    assert!(fenced.is_some(), "{:#?}", problems(&first));
    assert!(problems(&first).iter().all(|(_, what, action)| !what.is_empty() && !action.is_empty()));
    for path in ["run/step2.pt", "run/step3.pt", "other/step1.pt"] {
        assert!(tier3::markers(shared.path(), path).is_empty(), "{path} was decided by the older one");
        assert_holds(&first, path, &late, "at the fenced one");
    }
    save(&second, "run/step2.pt", &two);
    second.flush();
    assert_holds(&second, "run/step2.pt", &two, "at the newer one");
    assert_holds(&first, "run/step2.pt", &late, "at the fenced one");
    let begun = Instant::now();
    let status = first.stop_with_status();
    assert!(
        begun.elapsed() < NOTICE_LIMIT,
        "a fenced node waited for what cannot come: {:?}",
        begun.elapsed()
    );
    assert_eq!(status.code(), Some(1), "not everything of a fenced node is durable");
    drop(second);
    let mut third = Daemon::start(on(shared.path()));
    assert_holds(&third, "run/step1.pt", &one, "afterwards");
    assert_holds(&third, "run/step2.pt", &two, "afterwards");
    third.stop();
}

#[test]
fn a_coordinator_stopped_and_continued_around_anothers_commit_decides_nothing_twice() {
    if !machine::can_mount() {
        return;
    }
    let rounds = if machine::long() { 30 } else { 6 };
    for round in 0..rounds {
        // The moments are spread over the time that a commit of 12 MiB takes here, denser at its beginning.
        let delay = Duration::from_millis(round * round * 300 / (rounds * rounds));
        stopped_around(round, delay);
    }
}

fn stopped_around(round: u64, delay: Duration) {
    const PATH: &str = "run/step1.pt";
    let shared = tempfile::tempdir().unwrap();
    let (zero, mine, theirs) =
        (noise(round * 3, 5 * MIB), noise(round * 3 + 1, 12 * MIB + 1), noise(round * 3 + 2, 12 * MIB + 2));
    let first = Daemon::start(on(shared.path()));
    first.assert_passthrough();
    save(&first, PATH, &zero);
    first.flush();
    save(&first, PATH, &mine);
    let pid = first.ready().pid;
    // The flush makes the commit begin now. The daemon is stopped somewhere in it.
    thread::scope(|scope| {
        let flush = scope.spawn(|| first.ctl(&["flush", "--wait", "--timeout", "10"]));
        thread::sleep(delay);
        process::signal(pid, Signal::STOP);
        let mut second = Daemon::start(over(shared.path()));
        save(&second, PATH, &theirs);
        second.flush();
        assert_holds(&second, PATH, &theirs, "at the newer one");
        process::signal(pid, Signal::CONT);
        let flush = flush.join().expect("the flush was run");
        assert!(matches!(flush.status.code(), Some(0 | 1 | 6)), "{}", shown(&flush));
        check_decisions(shared.path(), PATH, &[&zero, &mine, &theirs]);
        second.stop();
    });
    drop(first);
    let third = Daemon::start(on(shared.path()));
    assert_holds(&third, PATH, &theirs, &format!("round {round}, stopped after {} ms", delay.as_millis()));
    assert_eq!(third.checkpoint(PATH).expect("it is listed")["state"], "committed");
}

/// Checks that every version has one decision, and that every commit is whole, of saved bytes, and made once.
fn check_decisions(tier3_dir: &Path, path: &str, saved: &[&[u8]]) {
    let mut seen = BTreeMap::new();
    for marker in tier3::commits(tier3_dir, path) {
        let name = Path::new(path).file_name().unwrap();
        let bytes = fs::read(marker.attempt_dir().join(name)).expect("a committed version has its file");
        let which = saved.iter().position(|saved| *saved == bytes);
        let which = which.unwrap_or_else(|| panic!("{}: bytes that nobody saved", marker.path.display()));
        if let Some(before) = seen.insert(which, marker.path.clone()) {
            panic!("save {which} is committed as {} and {}", before.display(), marker.path.display());
        }
    }
    assert!(seen.contains_key(&0) && seen.contains_key(&2), "{seen:?}");
}

//! kill -9 of the daemon under load.
//!
//! Owns: the moments of the kills, and which of them count. Does not own: the load.

use crate::workload::{Call, Workload};
use crate::{pattern, start, start_with};
use rustix::process::Signal;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tidemark_tests::cgroup::Cgroup;
use tidemark_tests::daemon::Daemon;
use tidemark_tests::{machine, process};

/// Number of kills by the test at random moments, and of deaths between a rename's effect and its answer.
const RANDOM_KILLS: u32 = 40;
const RENAME_DEATHS: u32 = 10;
/// Step at which a daemon kills itself, after a number of renames that take about half a second of this load.
const STOP_AT: &str = "rename.before_answer:1500";
/// Limit of the wait for a moment at which calls of each kind are unanswered. The load is so dense that it comes soon.
const DENSE_LIMIT: Duration = Duration::from_secs(20);

/// Counts over all kills.
#[derive(Debug, Default)]
struct Tally {
    kills: u32,
    at_rename: u32,
    writes_unanswered: u32,
    opens_unanswered: u32,
    renames_unanswered: u32,
    back: Vec<Duration>,
}

#[test]
fn killed_fifty_times_in_mid_save_nothing_fails() {
    let Some(daemon) = start_with("1GiB", &[("TIDEMARK_STOP_AT", STOP_AT)]) else { return };
    let directory = daemon.mount().join("run");
    fs::create_dir(&directory).unwrap();
    let load = Workload::begin(&directory);
    let tally = kill_again_and_again(&daemon, &load, RANDOM_KILLS, RENAME_DEATHS);
    report("50 kills", &load, tally);
    let calls = load.end();
    assert!(calls > 10_000, "the load was a load: {calls} calls");
    daemon.flush();
    let committed = daemon.checkpoints().iter().filter(|found| found["state"] == "committed").count();
    assert!(committed > 0, "{:#?}", daemon.checkpoints());
}

#[test]
fn killed_with_the_tier_nearly_full_nothing_fails() {
    let Some(daemon) = start("768MiB") else { return };
    let directory = daemon.mount().join("run");
    fs::create_dir(&directory).unwrap();
    // Earlier files leave room for little more than the load's own files, so older saves are evicted all the time.
    for number in 0..3_u64 {
        fs::write(directory.join(format!("full_{number}.bin")), pattern(number, 0, 64 << 20)).unwrap();
    }
    let load = Workload::begin(&directory);
    let tally = kill_again_and_again(&daemon, &load, if machine::long() { 50 } else { 10 }, 0);
    report("nearly full", &load, tally);
    load.end();
    for number in 0..3_u64 {
        let path = directory.join(format!("full_{number}.bin"));
        assert!(fs::read(&path).unwrap() == pattern(number, 0, 64 << 20), "{}", path.display());
    }
}

/// Kills the daemon when a write, an open and a rename are unanswered at that instant. Other kills do not count.
fn kill_again_and_again(daemon: &Daemon, load: &Workload, kills: u32, rename_deaths: u32) -> Tally {
    let mut tally = Tally::default();
    let mut random = fastrand(0x7469_6465);
    while tally.kills < kills || tally.at_rename < rename_deaths {
        load.check();
        let pid = process::until(DENSE_LIMIT, || daemon.serving_pid()).expect("a daemon is kept");
        // Some lives are long enough to reach the step, others are killed before.
        let patient = tally.kills >= kills || (random().is_multiple_of(3) && tally.at_rename < rename_deaths);
        let life = Duration::from_millis(if patient { 3000 } else { 30 + random() % 400 });
        let died = process::until(life, || (!process::is_alive(pid)).then_some(()));
        if died.is_some() {
            assert!(rename_deaths > 0, "the daemon died by itself:\n{}", daemon.log_tail());
            tally.at_rename += 1;
            tally.back.push(answered_again(load));
            continue;
        }
        let kinds = [Call::Write, Call::Open, Call::Rename];
        let deadline = Instant::now() + DENSE_LIMIT;
        let before = loop {
            let before = kinds.map(|kind| load.unanswered(kind));
            if before.iter().all(|calls| !calls.is_empty()) {
                break before;
            }
            assert!(Instant::now() < deadline, "no moment with a write, an open and a rename unanswered");
        };
        process::signal(pid, Signal::KILL);
        // Requests that are still unanswered once the daemon is gone were unanswered at the kill. A write goes past the daemon,
        // so it is only known to be under way.
        let gone = process::until(DENSE_LIMIT, || (daemon.serving_pid() != Some(pid)).then_some(()));
        assert!(gone.is_some(), "daemon {pid} outlives SIGKILL");
        let [_, opens, renames] = kinds.map(|kind| load.unanswered(kind));
        let still =
            |before: &[(usize, u64)], after: &[(usize, u64)]| before.iter().any(|call| after.contains(call));
        let (open, rename) = (still(&before[1], &opens), still(&before[2], &renames));
        tally.opens_unanswered += u32::from(open);
        tally.renames_unanswered += u32::from(rename);
        if open && rename {
            tally.writes_unanswered += 1;
            tally.kills += 1;
        }
        tally.back.push(answered_again(load));
    }
    tally
}

/// Waits until every thread has had an answer, and returns the duration.
fn answered_again(load: &Workload) -> Duration {
    let begun = Instant::now();
    let before: Vec<_> = load.inside.iter().map(|(_, inside)| inside.calls()).collect();
    let all = process::until(Duration::from_secs(60), || {
        let again = load.inside.iter().zip(&before).all(|((_, inside), before)| inside.calls() > *before);
        load.check();
        again.then_some(())
    });
    assert!(all.is_some(), "a call is not answered although a daemon serves");
    begun.elapsed()
}

#[expect(clippy::print_stderr, reason = "the figures belong to the output of the suite")]
fn report(name: &str, load: &Workload, mut tally: Tally) {
    tally.back.sort_unstable();
    let back = |part: usize| tally.back[(tally.back.len() - 1) * part / 100].as_millis();
    eprintln!(
        "{name}: {} kills that count (writes under way {}, opens unanswered {}, renames unanswered {}), \
         {} deaths between a rename's effect and its answer; every thread answered again after p50 {} ms, \
         p90 {} ms, most {} ms; longest write {} ms, open {} ms, rename {} ms",
        tally.kills,
        tally.writes_unanswered,
        tally.opens_unanswered,
        tally.renames_unanswered,
        tally.at_rename,
        back(50),
        back(90),
        back(100),
        load.longest(Call::Write).as_millis(),
        load.longest(Call::Open).as_millis(),
        load.longest(Call::Rename).as_millis(),
    );
}

#[test]
fn a_writer_in_a_small_cgroup_outlives_the_daemon() {
    // Five deaths within half a second can leave a writer 90 MiB ahead (note 0009), and more on a busy machine. The file is
    // eight times as large. The writer is about as fast as torch.save, because a copy of zeros at 8 GB/s would be further
    // ahead before the test could look.
    let cgroup = match Cgroup::make("survive", 192 << 20) {
        Ok(cgroup) => cgroup,
        Err(why) => return machine::left_out(&format!("a memory cgroup cannot be made: {why}")),
    };
    let Some(daemon) = start("3GiB") else { return };
    // The host gives cold memory page by page, which is slower than a writer.
    daemon.wait_warm();
    let path = daemon.mount().join("large.bin");
    // The shell enters the group and becomes the writer.
    let script = format!(
        "echo $$ > {}/cgroup.procs && exec perl -e 'open(F, \">\", $ARGV[0]) or die; $b = \"x\" x (1 << 20); \
         for (1..1536) {{ syswrite(F, $b) == length($b) or die; select(undef, undef, undef, 0.0003) }} \
         close(F) or die' {}",
        cgroup.path().display(),
        path.display()
    );
    let mut writer = Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).spawn().unwrap();
    let mut kills = 0;
    let status = loop {
        if let Some(status) = process::wait(&mut writer, Duration::from_millis(40)).unwrap() {
            break status;
        }
        if kills < 5
            && fs::metadata(&path).is_ok_and(|found| found.len() > 0)
            && let Some(pid) = daemon.serving_pid()
        {
            process::signal(pid, Signal::KILL);
            kills += 1;
        }
    };
    assert!(status.success(), "{status}: the writer was killed or saw an error\n{}", daemon.log_tail());
    assert!(kills >= 2, "it was written before the daemon could be killed: {kills} kills");
    assert_eq!(fs::metadata(&path).unwrap().len(), 1536 << 20);
}

/// Returns a xorshift generator, which gives the same moments for the same seed.
fn fastrand(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

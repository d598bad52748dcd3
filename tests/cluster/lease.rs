//! The lease in a real etcd: one holder at a time, epochs that rise, and former holders that cannot write.

use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, thread};
use tidemark_control::lease::{EtcdAccess, EtcdLease, LeaseError, LeaseTimes, MEMBERS_BYTES_MAX, Turn};
use tidemark_engine::settings::EtcdSettings;
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::id::Epoch;
use tidemark_tests::etcd::Etcd;
use tidemark_tests::{machine, process};

/// Limit until there is a new holder: the design's limit for etcd, and more, because the machine does other work too.
const TAKEN_OVER: Duration = Duration::from_secs(4);
const PATIENCE: Duration = Duration::from_secs(20);

fn candidate(url: &str, name: &str) -> EtcdLease {
    let nonce = getrandom::u64().expect("the kernel has random numbers");
    let access = EtcdAccess::open(url.parse().expect("a place in etcd"), &EtcdSettings::default());
    EtcdLease::new(access.expect("no files are named"), name.to_owned(), nonce, LeaseTimes::etcd())
}

async fn acquire(lease: &mut EtcdLease) -> Epoch {
    let give_up = Instant::now() + PATIENCE;
    loop {
        match lease.try_acquire(Instant::now()).await {
            Ok(Turn::Ours(epoch)) => return epoch,
            Ok(Turn::Theirs { wait, .. }) => tokio::time::sleep(wait).await,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
        }
        assert!(Instant::now() < give_up, "the lease is not free after {PATIENCE:?}");
    }
}

/// Renews the lease. While the term runs, a renewal that the machine was too busy for is tried again.
async fn renew(lease: &mut EtcdLease) -> Result<Epoch, LeaseError> {
    loop {
        match lease.renew(Instant::now()).await {
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                assert!(lease.epoch(Instant::now()).is_some(), "no renewal for a term: {error}");
            }
            other => return other,
        }
    }
}

/// Writes the member list, and tries again as [`renew`] does.
async fn write(lease: &mut EtcdLease, list: &[u8]) -> Result<(), LeaseError> {
    loop {
        match lease.write_members(list).await {
            Err(error) if error.kind() == ErrorKind::Unavailable => drop(renew(lease).await?),
            other => return other,
        }
    }
}

fn holder(turn: &Turn) -> (&str, Epoch) {
    match turn {
        Turn::Theirs { holder, epoch, .. } => (holder, *epoch),
        Turn::Ours(epoch) => ("ours", *epoch),
    }
}

/// Goal: a coordinator whose daemon was killed has the lease again at once, and the dead daemon cannot write. No node ends another's
/// term.
#[tokio::test(flavor = "multi_thread")]
async fn a_later_start_of_the_holder_does_not_wait_for_the_term_of_the_one_before() {
    let Some(etcd) = Etcd::start() else { return };
    let url = etcd.url("again");
    let [mut before, mut after, other] = ["n1", "n1", "n2"].map(|name| candidate(&url, name));
    let first = acquire(&mut before).await;
    assert!(!other.end_earlier_start().await.unwrap() && !before.end_earlier_start().await.unwrap());
    assert_eq!(renew(&mut before).await.unwrap(), first);
    assert!(after.end_earlier_start().await.unwrap());
    let Turn::Ours(second) = after.try_acquire(Instant::now()).await.unwrap() else { panic!("it is free") };
    assert!(second > first);
    assert!(matches!(write(&mut before, b"[]").await, Err(LeaseError::Lost { .. })));
    write(&mut after, b"[]").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_candidates_one_holds_at_a_time_with_a_higher_epoch_each() {
    let Some(etcd) = Etcd::start() else { return };
    // Each candidate takes the lease, renews it a few times, decides while it may, and gives it up or falls silent.
    let decided: Arc<Mutex<Vec<(Epoch, Instant, Instant)>>> = Arc::default();
    let mut tasks = vec![];
    for number in 0..6 {
        let mut lease = candidate(&etcd.url("c"), &format!("n{number}"));
        let decided = Arc::clone(&decided);
        tasks.push(tokio::spawn(async move {
            let epoch = acquire(&mut lease).await;
            let from = Instant::now();
            let mut last = from;
            for _ in 0..number {
                tokio::time::sleep(Duration::from_millis(200)).await;
                renew(&mut lease).await.expect("renewed in time");
            }
            if number % 3 == 2 {
                // A candidate that falls silent decides to the end of its term.
                while lease.epoch(Instant::now()) == Some(epoch) {
                    last = Instant::now();
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            } else {
                last = Instant::now();
                lease.release().await.expect("released");
                assert_eq!(lease.epoch(Instant::now()), None);
            }
            decided.lock().expect("no panic").push((epoch, from, last));
        }));
    }
    for task in tasks {
        task.await.expect("a candidate");
    }
    let mut decided = decided.lock().expect("no panic").clone();
    decided.sort_unstable();
    assert_eq!(decided.len(), 6);
    for two in decided.windows(2) {
        assert!(two[0].0 < two[1].0, "{decided:?}");
        assert!(two[0].2 <= two[1].1, "two decided at once: {decided:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_try_whose_answer_was_lost_is_ours_and_a_stranger_waits() {
    let Some(etcd) = Etcd::start() else { return };
    let mut first = candidate(&etcd.url("c"), "a");
    let epoch = acquire(&mut first).await;
    // After an answer that never came, the holder asks again and finds itself.
    assert_eq!(first.try_acquire(Instant::now()).await.expect("again"), Turn::Ours(epoch));
    let mut rival = candidate(&etcd.url("c"), "b");
    assert_eq!(holder(&rival.try_acquire(Instant::now()).await.expect("waits")), ("a", epoch));
    // Another life under the same name is a rival like any other.
    let mut second_life = candidate(&etcd.url("c"), "a");
    assert_eq!(holder(&second_life.try_acquire(Instant::now()).await.expect("waits")), ("a", epoch));
    // Another prefix is another lease. A dead endpoint before the live one makes no difference.
    let elsewhere = format!("http://127.0.0.1:1,{}/other", etcd.endpoint());
    let mut other = candidate(&elsewhere, "b");
    assert!(acquire(&mut other).await > epoch);
    other.renew(Instant::now()).await.expect("renewed");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_zombie_writes_or_renews_is_refused_and_the_members_stay() {
    let Some(etcd) = Etcd::start() else { return };
    let (mut old, mut new) = (candidate(&etcd.url("c"), "old"), candidate(&etcd.url("c"), "new"));
    let first = acquire(&mut old).await;
    assert_eq!(old.read_members().await.expect("read"), None);
    write(&mut old, b"one").await.expect("the holder writes");
    let large = old.write_members(&vec![0; MEMBERS_BYTES_MAX + 1]).await.expect_err("too large");
    assert_eq!(large.kind(), ErrorKind::NoSpace, "{large}");
    write(&mut old, &vec![b'x'; MEMBERS_BYTES_MAX]).await.expect("the largest is taken");
    write(&mut old, b"one").await.expect("the holder writes");
    // The first holder does not renew for a term, and another takes over.
    let second = acquire(&mut new).await;
    assert!(second > first);
    assert_eq!(old.epoch(Instant::now()), None, "it stopped before the other began");
    let refused = write(&mut old, b"zombie").await.expect_err("refused");
    assert!(
        matches!(&refused, LeaseError::Lost { ours, theirs, holder, .. }
        if (*ours, *theirs, holder.as_str()) == (first, second, "new")),
        "{refused}"
    );
    assert_eq!(refused.kind(), ErrorKind::Fenced);
    assert_eq!(new.read_members().await.expect("read").as_deref(), Some(&b"one"[..]));
    write(&mut new, b"two").await.expect("the holder writes");
    assert!(matches!(renew(&mut old).await, Err(LeaseError::Lost { .. })));
    old.release().await.expect("what is not held needs no release");
    assert_eq!(renew(&mut new).await.expect("renewed"), second);
    assert_eq!(old.read_members().await.expect("read").as_deref(), Some(&b"two"[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_whose_key_somebody_deleted_learns_of_it_with_its_next_renewal() {
    let Some(etcd) = Etcd::start() else { return };
    let mut lease = candidate(&etcd.url("c"), "a");
    acquire(&mut lease).await;
    etcd.delete("c/lease");
    let lost = renew(&mut lease).await.expect_err("its etcd lease lives, its key does not");
    assert!(matches!(lost, LeaseError::Lost { theirs: Epoch(0), .. }), "{lost}");
    assert_eq!(lease.epoch(Instant::now()), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_etcd_is_stopped_the_holder_decides_to_the_end_of_its_term_and_no_longer() {
    let Some(etcd) = Etcd::start() else { return };
    let mut lease = candidate(&etcd.url("c"), "a");
    acquire(&mut lease).await;
    let (epoch, sent) = loop {
        let sent = Instant::now();
        match lease.renew(sent).await {
            Ok(epoch) => break (epoch, sent),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
                assert!(lease.epoch(Instant::now()).is_some(), "no renewal for a term: {error}");
            }
        }
    };
    etcd.stop();
    let error = lease.renew(Instant::now()).await.expect_err("etcd is stopped");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    // The lease is asked about computed moments, because a busy machine would look too late.
    let end = sent + LeaseTimes::etcd().term;
    assert_eq!(
        lease.epoch(end.checked_sub(Duration::from_millis(1)).expect("later")),
        Some(epoch),
        "it gave up early"
    );
    assert_eq!(lease.epoch(end), None, "it decides for longer than a term after its last renewal");
    etcd.signal(Signal::CONT);
    // If etcd had not ended the lease yet, the term goes on. If it had, this is a new term.
    let again = acquire(&mut lease).await;
    assert!(again >= epoch, "{again} after {epoch}");
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_death_of_etcd_epochs_go_on_rising_and_the_members_are_there() {
    let Some(mut etcd) = Etcd::start() else { return };
    let (mut first, mut second) = (candidate(&etcd.url("c"), "a"), candidate(&etcd.url("c"), "b"));
    let mut last = acquire(&mut first).await;
    write(&mut first, b"one").await.expect("the holder writes");
    for _ in 0..3 {
        etcd.kill_and_start();
        let epoch = acquire(&mut second).await;
        assert!(epoch > last, "{epoch} after {last}");
        assert_eq!(second.read_members().await.expect("read").as_deref(), Some(&b"one"[..]));
        assert!(matches!(first.renew(Instant::now()).await, Err(LeaseError::Lost { .. })));
        last = epoch;
        std::mem::swap(&mut first, &mut second);
    }
}

/// A `tidemark-candidate`; killed when dropped.
struct Process {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Process {
    fn start(url: &str, name: &str) -> Self {
        let mut child = Command::new(machine::binary("tidemark-candidate"))
            .args([url, name])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a candidate starts");
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let (seen, said) = (Arc::clone(&lines), BufReader::new(child.stdout.take().expect("its output")));
        thread::spawn(move || {
            said.lines().map_while(Result::ok).for_each(|line| seen.lock().expect("no panic").push(line));
        });
        Self { child, lines }
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().expect("no panic").clone()
    }

    /// Returns the process's epoch and the end of its term, in milliseconds of the monotonic clock.
    fn holds(&self, limit: Duration) -> Option<(u64, u64)> {
        process::until(limit, || {
            let lines = self.lines();
            let words: Vec<&str> = lines.last()?.split(' ').collect();
            match words.as_slice() {
                ["holds" | "renewed", epoch, until_ms] => Some((epoch.parse().ok()?, until_ms.parse().ok()?)),
                _ => None,
            }
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        process::signal(self.child.id(), Signal::CONT);
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn monotonic_ms() -> u64 {
    let now = Duration::try_from(clock_gettime(ClockId::Monotonic)).expect("not negative");
    u64::try_from(now.as_millis()).expect("an uptime")
}

#[test]
fn a_holder_that_is_killed_is_followed_within_the_stated_time_by_one_with_a_higher_epoch() {
    let Some(etcd) = Etcd::start() else { return };
    assert!(fs::exists(machine::binary("tidemark-candidate")).expect("looking for it"));
    let mut holder = Process::start(&etcd.url("c"), "n0");
    let (mut epoch, _) = holder.holds(PATIENCE).expect("the first takes it");
    for round in 1..=3 {
        let rival = Process::start(&etcd.url("c"), &format!("n{round}"));
        let waits = process::until(PATIENCE, || {
            rival.lines().last().filter(|line| line.starts_with("waits")).cloned()
        });
        assert_eq!(waits.expect("it waits"), format!("waits n{} {epoch}", round - 1));
        process::signal(holder.child.id(), Signal::KILL);
        let killed = Instant::now();
        let (next, _) =
            rival.holds(PATIENCE).unwrap_or_else(|| panic!("nobody took over: {:?}", rival.lines()));
        let took = killed.elapsed();
        println!("round {round}: epoch {next} after {epoch}, {} ms after the kill", took.as_millis());
        let (_, until_ms) = holder.holds(Duration::from_secs(1)).expect("it held to the end");
        assert!(monotonic_ms() >= until_ms, "the term of the dead one had not ended");
        assert!(next > epoch);
        assert!(took < TAKEN_OVER, "{took:?}");
        (holder, epoch) = (rival, next);
    }
}

#[test]
fn a_holder_that_is_stopped_and_continued_knows_that_it_lost() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Process::start(&etcd.url("c"), "a");
    let (epoch, _) = a.holds(PATIENCE).expect("the first takes it");
    process::signal(a.child.id(), Signal::STOP);
    let b = Process::start(&etcd.url("c"), "b");
    let (next, _) = b.holds(PATIENCE).expect("the second takes over");
    assert!(next > epoch);
    process::signal(a.child.id(), Signal::CONT);
    let waits = format!("waits b {next}");
    let told = process::until(PATIENCE, || a.lines().contains(&waits).then(|| a.lines()));
    let told = told.unwrap_or_else(|| panic!("{:?}", a.lines()));
    let lost = told.iter().position(|line| line == "lost").expect("it says that it lost");
    let last = told.iter().rposition(|line| line.starts_with("renewed") || line.starts_with("holds"));
    assert!(last < Some(lost), "it decided after it had lost: {told:?}");
    assert!(b.holds(Duration::from_secs(1)).is_some_and(|(epoch, _)| epoch == next));
}

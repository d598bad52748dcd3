//! The network itself: does each fault of the harness happen, can a test prove it, and does it end?
//!
//! Owns: the checks of the harness, without daemons. Does not own: what a daemon does when a link fails.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tidemark_tests::net::{Host, Network};
use tidemark_tests::process;

/// Limit for events that must happen.
const LIMIT: Duration = Duration::from_secs(30);
/// Wait for events that must not happen, many times as long as they take on a working link.
const SILENCE: Duration = Duration::from_millis(300);

/// Message for a failure that is not the subject of a test.
const STEP: &str = "a step of the test itself";

/// Returns both ends of a connection from one host to another.
fn connect(from: &Host, to: &Host) -> (TcpStream, TcpStream) {
    connect_within(LIMIT, from, to).expect("hosts that nothing separates")
}

/// Whether one host does not reach another.
fn cut_off(from: &Host, to: &Host) -> bool {
    let silent = |error: io::Error| {
        // `HostUnreachable`: no host answered even the query for the address.
        matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable)
    };
    connect_within(SILENCE, from, to).is_err_and(silent)
}

fn connect_within(limit: Duration, from: &Host, to: &Host) -> io::Result<(TcpStream, TcpStream)> {
    let listener = to.inside(|| TcpListener::bind((to.address(), 0)))?;
    let address = listener.local_addr()?;
    let near = from.inside(|| TcpStream::connect_timeout(&address, limit))?;
    let (far, peer) = listener.accept()?;
    assert_eq!(peer.ip(), from.address());
    for end in [&near, &far] {
        end.set_read_timeout(Some(LIMIT))?;
    }
    Ok((near, far))
}

/// Writes some bytes at one end and reads them at the other.
fn talk(near: &mut TcpStream, far: &mut TcpStream, word: &[u8]) {
    near.write_all(word).expect(STEP);
    let mut heard = vec![0; word.len()];
    far.read_exact(&mut heard).expect(STEP);
    assert_eq!(heard, word);
}

/// Returns a socket for datagrams on each of two hosts, and the second's address.
fn sockets(from: &Host, to: &Host) -> (UdpSocket, UdpSocket, SocketAddr) {
    let bind = |host: &Host| host.inside(|| UdpSocket::bind((host.address(), 0))).expect(STEP);
    let (near, far) = (bind(from), bind(to));
    far.set_read_timeout(Some(SILENCE)).expect(STEP);
    let address = far.local_addr().expect(STEP);
    (near, far, address)
}

/// Returns how many of `sent` datagrams arrive. The far end reads each as it comes, so that no buffer drops
/// any. Reading ends when no more come after the last was sent.
fn arrived(from: &Host, to: &Host, sent: u32) -> u32 {
    let (near, far, address) = sockets(from, to);
    let all_sent = AtomicBool::new(false);
    thread::scope(|scope| {
        let heard = scope.spawn(|| {
            let mut heard = 0;
            loop {
                let over = all_sent.load(Ordering::SeqCst);
                match far.recv(&mut [0; 4]) {
                    Ok(_) => heard += 1,
                    Err(_) if over => return heard,
                    Err(_) => {}
                }
            }
        });
        for number in 0..sent {
            near.send_to(&number.to_le_bytes(), address).expect(STEP);
            if number % 16 == 0 {
                thread::sleep(Duration::from_micros(200));
            }
        }
        all_sent.store(true, Ordering::SeqCst);
        heard.join().expect(STEP)
    })
}

fn sleeper(host: &Host) -> Child {
    host.spawn(Command::new("sleep").arg("600")).expect(STEP)
}

fn reap(mut child: Child) {
    assert!(process::wait(&mut child, LIMIT).expect(STEP).is_some(), "{} still runs", child.id());
}

#[test]
fn two_hosts_talk_until_they_are_cut_off_and_again_when_it_is_over() {
    let Some(network) = Network::make(&["n1", "n2", "n3"]) else { return };
    let [first, second, third] = network.hosts() else { panic!("three hosts") };
    let (mut near, mut far) = connect(first, second);
    talk(&mut near, &mut far, b"before");

    let cut = first.partition(second);
    assert_eq!(cut.dropped_packets(), 0, "nothing was said yet");
    near.write_all(b"meanwhile").unwrap();
    far.set_read_timeout(Some(SILENCE)).unwrap();
    let heard = far.read(&mut [0; 1]).unwrap_err().kind();
    assert_eq!(heard, io::ErrorKind::WouldBlock, "it arrived");
    let dropped = cut.dropped_packets();
    assert!(dropped > 0, "what was not heard was not dropped either");
    assert!(cut_off(second, first), "a connection came about across the cut");
    assert!(cut.dropped_packets() > dropped, "the counter stands still");
    // The cut does not affect the third host.
    connect(third, first);
    connect(second, third);

    assert!(cut.heal() > dropped);
    far.set_read_timeout(Some(LIMIT)).unwrap();
    let mut heard = [0; 9];
    far.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"meanwhile", "TCP says again what was lost");
    talk(&mut far, &mut near, b"after");
    connect(second, first);
}

#[test]
fn a_muted_host_hears_and_is_not_heard() {
    let Some(network) = Network::make(&["n1", "n2"]) else { return };
    let [first, second] = network.hosts() else { panic!("two hosts") };
    // Both hosts know each other's addresses from now on, so that only the datagrams are lost.
    assert_eq!((arrived(first, second, 1), arrived(second, first, 1)), (1, 1));
    let muted = first.mute_towards(second);
    assert_eq!(arrived(first, second, 20), 0);
    assert_eq!(arrived(second, first, 20), 20);
    assert_eq!(muted.heal(), 20);
    assert_eq!(arrived(first, second, 20), 20);
}

#[test]
fn an_isolated_host_reaches_nobody_and_the_others_reach_each_other() {
    let Some(network) = Network::make(&["n1", "n2", "n3"]) else { return };
    let [first, second, third] = network.hosts() else { panic!("three hosts") };
    let (mut near, mut far) = connect(second, first);
    let isolated = first.isolate();
    assert!(cut_off(first, second) && cut_off(third, first));
    connect(second, third);
    near.write_all(b"x").unwrap();
    thread::sleep(SILENCE);
    // If two faults overlap, each still counts and ends by itself.
    let cut = first.partition(second);
    assert!(isolated.heal() > 0);
    assert!(cut_off(first, second));
    connect(first, third);
    drop(cut);
    far.read_exact(&mut [0; 1]).unwrap();
}

#[test]
fn a_lossy_link_loses_about_what_was_asked() {
    const SENT: u32 = 4000;
    let Some(network) = Network::make(&["n1", "n2"]) else { return };
    let [first, second] = network.hosts() else { panic!("two hosts") };
    assert_eq!(arrived(first, second, SENT), SENT, "a whole link loses nothing");
    let lossy = first.loss(25.0);
    for (from, to) in [(first, second), (second, first)] {
        let before = lossy.dropped_packets();
        let heard = arrived(from, to, SENT);
        // Six standard deviations to each side: 0.25 ± 0.041.
        let lost = f64::from(SENT - heard) / f64::from(SENT);
        assert!((0.209..0.291).contains(&lost), "{lost} of {SENT} were lost");
        assert_eq!(lossy.dropped_packets() - before, u64::from(SENT - heard));
    }
    drop(lossy);
    // A loss of 100 % lets nothing through.
    let all = first.loss(100.0);
    assert!(cut_off(first, second));
    assert!(all.heal() > 0);
}

#[test]
fn a_narrow_link_carries_what_was_asked_and_no_more() {
    const BITS_PER_S: u64 = 40_000_000;
    const FOR: Duration = Duration::from_secs(2);
    let Some(network) = Network::make(&["n1", "n2"]) else { return };
    let [first, second] = network.hosts() else { panic!("two hosts") };
    let free = bits_per_s(first, second, FOR / 4);
    assert!(free > 4 * BITS_PER_S, "{free} bit/s without a limit, so a limit would show nothing");
    let narrow = first.bandwidth(BITS_PER_S);
    assert_eq!(narrow.held_back(), 0);
    for (from, to) in [(first, second), (second, first)] {
        let measured = bits_per_s(from, to, FOR);
        assert!(
            (BITS_PER_S / 2..BITS_PER_S * 6 / 5).contains(&measured),
            "{measured} bit/s from {from:?}, of {BITS_PER_S}"
        );
    }
    assert!(narrow.held_back() > 0);
    drop(narrow);
    let free = bits_per_s(first, second, FOR / 4);
    assert!(free > 4 * BITS_PER_S, "{free} bit/s after the limit");
}

/// Returns the rate from one host to another over this time, by the bytes that arrived.
fn bits_per_s(from: &Host, to: &Host, during: Duration) -> u64 {
    let (mut near, mut far) = connect(from, to);
    let began = Instant::now();
    let writer = thread::spawn(move || {
        let piece = vec![7; 64 << 10];
        while began.elapsed() < during && near.write_all(&piece).is_ok() {}
    });
    let mut piece = vec![0; 256 << 10];
    let mut heard_bytes = 0;
    while began.elapsed() < during {
        heard_bytes += u64::try_from(far.read(&mut piece).expect(STEP)).expect(STEP);
    }
    let took = began.elapsed();
    // Bytes still on their way no longer count, and the writer gets an error.
    drop(far);
    writer.join().expect(STEP);
    heard_bytes * 8 * 1000 / u64::try_from(took.as_millis()).expect(STEP)
}

#[test]
fn a_pulled_cable_is_seen_by_the_host_and_put_back() {
    let Some(network) = Network::make(&["n1", "n2"]) else { return };
    let [first, second] = network.hosts() else { panic!("two hosts") };
    let (mut near, mut far) = connect(first, second);
    assert!(first.has_carrier());
    let pulled = first.link_down();
    assert!(!first.has_carrier() && second.has_carrier());
    assert!(cut_off(second, first));
    drop(pulled);
    assert!(first.has_carrier());
    talk(&mut near, &mut far, b"the same connection");
}

#[test]
fn a_killed_host_has_no_process_left_and_the_others_have_theirs() {
    let Some(network) = Network::make(&["n1", "n2"]) else { return };
    let [first, second] = network.hosts() else { panic!("two hosts") };
    let kept = sleeper(second);
    let outside = Command::new("sleep").arg("600").spawn().unwrap();
    // A shell that starts one process after another, a process that ignores signals, a grandchild, and a
    // stopped process.
    let mut stubborn = vec![];
    for script in
        ["while :; do sleep 0.001; done", "trap '' TERM INT HUP; sleep 600; :", "sleep 600 & wait; :"]
    {
        stubborn.push(first.spawn(Command::new("sh").args(["-c", script])).unwrap());
    }
    let stopped = sleeper(first);
    process::signal(stopped.id(), rustix::process::Signal::STOP);
    let grown = process::until(LIMIT, || (first.processes().len() >= 6).then_some(()));
    assert!(grown.is_some(), "{:?}", first.processes());
    let ids: Vec<u32> = stubborn.iter().map(Child::id).chain([stopped.id()]).collect();
    assert!(!first.processes().contains(&std::process::id()), "the test itself only visits");

    let killed = first.kill_all();
    assert!(ids.iter().all(|pid| killed.contains(pid)), "{ids:?} are not all in {killed:?}");
    assert!(killed.iter().all(|pid| !process::is_alive(*pid)));
    assert_eq!(first.processes(), [0; 0]);
    for child in stubborn.into_iter().chain([stopped]) {
        reap(child);
    }
    assert_eq!(second.processes(), [kept.id()]);
    assert!(process::is_alive(outside.id()), "a process of this machine is none of a host's");
    // A host whose processes were killed can be used again.
    let again = sleeper(first);
    assert_eq!(first.kill_all(), [again.id()]);
    reap(again);
    for mut child in [kept, outside] {
        child.kill().unwrap();
        reap(child);
    }
}

#[test]
fn a_network_takes_its_names_and_processes_with_it_also_out_of_a_panic() {
    let Some(network) = Network::make(&["n1", "n2"]) else { return };
    let named = |name: &str| Path::new("/run/netns").join(name).exists();
    let names = network.names();
    assert!(names.len() == 3 && names.iter().all(|name| named(name)));
    let mut running = vec![sleeper(network.host("n1"))];
    // A fault that outlives its network has nothing left to end.
    let cut = network.host("n1").partition(network.host("n2"));
    drop(network);
    drop(cut);
    assert!(!names.iter().any(|name| named(name)));

    let mut names = vec![];
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let network = Network::make(&["n1"]).unwrap();
        names = network.names();
        running.push(sleeper(network.host("n1")));
        panic!("on purpose");
    }));
    assert!(panicked.is_err() && names.len() == 2);
    assert!(!names.iter().any(|name| named(name)));
    running.into_iter().for_each(reap);
}

#[test]
fn what_a_killed_test_left_is_removed_and_what_a_living_one_has_is_not() {
    let Some(living) = Network::make(&["n1"]) else { return };
    let mine = sleeper(living.host("n1"));
    // The namespace's owner has ended. The kernel reuses the owner's pid only after all others.
    let mut ended = Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let left = format!("tidemark-{}-1-0-n1", ended.id());
    let other = format!("someone-{}-1-0-n1", ended.id());
    for name in [&left, &other] {
        assert!(Command::new("ip").args(["netns", "add", name]).status().unwrap().success());
    }
    let orphan = Command::new("ip").args(["netns", "exec", &left, "sleep", "600"]).spawn().unwrap();
    let inside = |pid| {
        fs::metadata(format!("/proc/{pid}/ns/net"))
            .map(|found| std::os::linux::fs::MetadataExt::st_ino(&found))
    };
    let here = inside(std::process::id()).unwrap();
    assert!(
        process::until(LIMIT, || inside(orphan.id()).is_ok_and(|there| there != here).then_some(()))
            .is_some()
    );

    let next = Network::make(&["n1"]).unwrap();
    let named = |name: &str| Path::new("/run/netns").join(name).exists();
    assert!(!named(&left) && named(&other));
    reap(orphan);
    assert!(living.names().iter().chain(&next.names()).all(|name| named(name)));
    assert_eq!(living.host("n1").processes(), [mine.id()]);
    assert!(Command::new("ip").args(["netns", "del", &other]).status().unwrap().success());
    drop(living);
    reap(mine);
}

#[test]
fn two_networks_have_the_same_addresses_and_do_not_meet() {
    let (Some(here), Some(mut there)) = (Network::make(&["n1", "n2"]), Network::make(&["n1"])) else {
        return;
    };
    assert_eq!(here.host("n1").address(), there.host("n1").address());
    let listener = here.host("n1").inside(|| TcpListener::bind((here.host("n1").address(), 0))).unwrap();
    let address = listener.local_addr().unwrap();
    let reach = |host: &Host| host.inside(|| TcpStream::connect_timeout(&address, SILENCE));
    reach(here.host("n2")).unwrap();
    assert_eq!(reach(there.host("n1")).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    // A host that is added later reaches the earlier ones.
    let late = there.add_host("n2");
    connect(&late, there.host("n1"));
    connect(there.host("n1"), &late);
}

//! Single circumstances that may disturb a takeover after a daemon's death.
//!
//! Owns: the keeper killed alone, signals that mean nothing, a daemon that hangs, handles closed meanwhile, very many open files, flipped
//! bytes, kills while resuming.

use crate::{pattern, start};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::time::Duration;
use tidemark_tests::daemon::is_mounted;
use tidemark_tests::process;

const MIB: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_handle_closed_while_the_daemon_is_away_is_closed_and_not_cut() {
    let Some(daemon) = start("256MiB") else { return };
    let path = daemon.mount().join("run/step1.pt");
    fs::create_dir(path.parent().unwrap()).unwrap();
    for round in 0..10_u64 {
        let bytes = pattern(round, 0, MIB);
        let mut file = File::create(&path).unwrap();
        file.write_all(&bytes).unwrap();
        let dead = daemon.kill_serving();
        // close(2) waits for the answer to FLUSH, which the next daemon gives.
        drop(file);
        daemon.wait_for_next(dead);
        daemon.flush();
        assert_eq!(daemon.checkpoint("run/step1.pt").expect("it is listed")["state"], "committed");
        assert!(fs::read(&path).unwrap() == bytes);
    }
}

/// Goal: if another process takes the address of commands while no daemon serves, the mount stays. Method: the keeper stands still
/// meanwhile.
#[test]
fn an_address_that_somebody_took_costs_no_mount() {
    let Some(daemon) = start("256MiB") else { return };
    let path = daemon.mount().join("file");
    let open = File::create(&path).unwrap();
    process::signal(daemon.keeper_pid(), Signal::STOP);
    let dead = daemon.kill_serving();
    let http = &daemon.ready().http;
    let taken = process::until(LIMIT, || TcpListener::bind(http).ok())
        .expect("the daemon is dead, and its address free");
    process::signal(daemon.keeper_pid(), Signal::CONT);
    daemon.wait_for_next(dead);
    assert!(daemon.log().contains("another port is taken"), "{}", daemon.log_tail());
    drop(taken);
    open.write_all_at(b"goes on", 0).unwrap();
    drop(open);
    assert_eq!(fs::read(&path).unwrap(), b"goes on");
    assert_eq!(daemon.ctl_json(&["status"])["problems"], serde_json::json!([]));
}

#[test]
fn a_writer_killed_with_the_daemon_leaves_a_cut_file() {
    let Some(daemon) = start("256MiB") else { return };
    let path = daemon.mount().join("run/step1.pt");
    fs::create_dir(path.parent().unwrap()).unwrap();
    let script = format!("exec 3>{}; head -c 70000 /dev/zero >&3; echo; exec sleep 600", path.display());
    let mut writer = std::process::Command::new("sh")
        .args(["-c", &script])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut written = [0; 1];
    writer.stdout.as_mut().unwrap().read_exact(&mut written).unwrap();
    let dead = daemon.kill_serving();
    writer.kill().unwrap();
    writer.wait().unwrap();
    daemon.wait_for_next(dead);
    let output = daemon.ctl(&["flush", "--wait", "--timeout", "20"]);
    assert_eq!(
        output.status.code(),
        Some(1),
        "torn is not durable: {}",
        tidemark_tests::daemon::shown(&output)
    );
    // The checkpoint may be visible still, or hidden by now.
    let places = ["run/step1.pt", ".tidemark/torn/run/step1.pt"];
    let listed = places.iter().find_map(|path| daemon.checkpoint(path)).expect("it is listed");
    assert_eq!(listed["state"], "torn", "{listed:#}");
}

#[test]
fn ten_thousand_open_files_are_taken_over() {
    const FILES: usize = 10_000;
    let Some(daemon) = start("1GiB") else { return };
    let directory = daemon.mount().join("many");
    fs::create_dir(&directory).unwrap();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    rustix::process::setrlimit(
        rustix::process::Resource::Nofile,
        rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum },
    )
    .unwrap();
    let path = |number: usize| directory.join(format!("f{number}"));
    let open: Vec<File> = (0..FILES)
        .map(|number| {
            let mut file =
                File::options().read(true).write(true).create_new(true).open(path(number)).unwrap();
            file.write_all(&number.to_le_bytes()).unwrap();
            file
        })
        .collect();
    // Half of the files lose their names.
    (0..FILES).step_by(2).for_each(|number| fs::remove_file(path(number)).unwrap());
    let dead = daemon.kill_serving();
    assert_eq!(fs::read_dir(&directory).unwrap().count(), FILES / 2);
    daemon.wait_for_next(dead);
    for (number, file) in open.iter().enumerate() {
        file.write_all_at(b"!", 8).unwrap();
        let mut bytes = [0; 9];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!((&bytes[..8], bytes[8]), (&number.to_le_bytes()[..], b'!'));
        // A second handle needs the same backing id.
        if number % 2 == 1 {
            assert_eq!(fs::read(path(number)).unwrap(), bytes);
        }
    }
    drop(open);
    daemon.flush();
    // The memory of files without a name was freed, so only the other files use memory.
    let used = |status: serde_json::Value| status["tiers"][0]["used_bytes"].as_u64().unwrap();
    let small = process::until(LIMIT, || (used(daemon.ctl_json(&["status"])) < 256 << 20).then_some(()));
    assert!(small.is_some(), "{:#}", daemon.ctl_json(&["status"]));
}

#[test]
fn a_byte_flipped_while_the_daemon_was_dead_is_found_at_the_first_open() {
    let Some(daemon) = start("256MiB") else { return };
    let path = daemon.mount().join("run/step1.pt");
    fs::create_dir(path.parent().unwrap()).unwrap();
    let bytes = pattern(9, 0, 20 * MIB);
    fs::write(&path, &bytes).unwrap();
    daemon.flush();
    let files = daemon.ctl_json(&["show", "run/step1.pt", "--files"]);
    let host_path = files["files"][0]["host_path"].as_str().expect("it is in memory").to_owned();
    // The descriptor gives root the daemon's own view of Tier-1, for as long as it is open.
    let host = File::options().write(true).open(&host_path).unwrap();
    let dead = daemon.kill_serving();
    host.write_all_at(&[bytes[9 * MIB] ^ 0x10], 9 * MIB as u64).unwrap();
    drop(host);
    assert!(fs::read(&path).unwrap() == bytes, "the good bytes come from Tier-3");
    daemon.wait_for_next(dead);
    assert!(daemon.log().contains("a host copy was bad at its first open"), "{}", daemon.log_tail());
    assert!(daemon.metric("tidemark_verify_mismatches_total", &["host"]) > 0.0);
}

#[test]
fn daemons_killed_while_they_resume_are_followed_by_one_that_serves() {
    let Some(daemon) = start("256MiB") else { return };
    let path = daemon.mount().join("a");
    let mut file = File::create(&path).unwrap();
    for round in 0..12_u64 {
        file.write_all(&[1; 1000]).unwrap();
        let mut dead = daemon.kill_serving();
        // The next daemon and the one after it die at other moments of their first milliseconds.
        for kill in 0..2 {
            let next = process::until(LIMIT, || daemon.serving_pid().filter(|pid| *pid != dead));
            let next = next.expect("the keeper starts another");
            std::thread::sleep(Duration::from_micros(round * 1500 + kill * 700));
            process::signal(next, Signal::KILL);
            dead = next;
        }
        assert_eq!(fs::metadata(&path).unwrap().len(), (round + 1) * 1000);
        fs::rename(&path, daemon.mount().join("b")).unwrap();
        fs::rename(daemon.mount().join("b"), &path).unwrap();
        daemon.wait_for_next(dead);
        // The daemon lives long enough not to count as part of a crash loop, in which the keeper pauses.
        std::thread::sleep(Duration::from_millis(300));
    }
}

#[test]
fn a_keeper_killed_alone_takes_the_mount_with_it_and_loses_nothing_closed() {
    let Some(mut daemon) = start("256MiB") else { return };
    let path = daemon.mount().join("run/step1.pt");
    fs::create_dir(path.parent().unwrap()).unwrap();
    let bytes = pattern(3, 0, 3 * MIB);
    fs::write(&path, &bytes).unwrap();
    let mount = daemon.mount().to_owned();
    process::signal(daemon.keeper_pid(), Signal::KILL);
    assert!(daemon.wait_for_death(LIMIT).is_some());
    let gone = process::until(LIMIT, || (!is_mounted(&mount)).then_some(()));
    assert!(gone.is_some(), "the daemon drains and unmounts:\n{}", daemon.log_tail());
    daemon.start_again();
    assert!(fs::read(&path).unwrap() == bytes, "what was closed was brought to Tier-3 at the end");
}

#[test]
fn nothing_can_be_written_to_the_state_directory_and_the_mount_goes_on() {
    let Some(daemon) = start("256MiB") else { return };
    // Without the state directory nothing can be written there. A serving daemon does not need it.
    let aside = daemon.scratch("aside").join("state");
    let path = daemon.mount().join("a.bin");
    fs::write(&path, b"before").unwrap();
    // A running daemon would recreate it.
    process::signal(daemon.serving_pid().unwrap(), Signal::STOP);
    fs::rename(daemon.state_dir(), &aside).unwrap();
    let dead = daemon.kill_serving();
    fs::write(&path, b"after").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"after");
    fs::rename(&aside, daemon.state_dir()).unwrap();
    daemon.wait_for_next(dead);
}

/// A closed terminal, a rotation of logs or `systemctl reload` by habit sends signals to the keeper and to the daemon. From then on, the
/// daemon's log can no longer be written.
#[test]
fn signals_that_others_send_by_habit_end_neither_keeper_nor_daemon() {
    if !tidemark_tests::machine::can_mount() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name);
    let mut command = std::process::Command::new(tidemark_tests::machine::binary("ckptd"));
    command.arg("up").arg(path("ckpt")).arg("--state-dir").arg(path("state"));
    command.arg(format!("--tier3=file://{}", path("t3").display()));
    command.args(["--tier1=128MiB", "--listen=127.0.0.1:0", "--http=127.0.0.1:0"]);
    let piped = std::process::Stdio::piped;
    let mut keeper = command.stdout(piped()).stderr(piped()).spawn().unwrap();
    let mut line = String::new();
    let mut stdout = std::io::BufReader::new(keeper.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    assert!(line.starts_with("ready:"), "{line}");
    // From now on, log lines cannot be written.
    drop((stdout, keeper.stderr.take()));
    let daemon = process::children(keeper.id())[0];
    for signal in [Signal::HUP, Signal::USR1, Signal::USR2] {
        process::signal(keeper.id(), signal);
        process::signal(daemon, signal);
    }
    fs::create_dir(path("ckpt/run")).unwrap();
    fs::write(path("ckpt/run/step1.pt"), pattern(1, 0, MIB)).unwrap();
    let ctl = |arguments: &[&str]| {
        let mut command = std::process::Command::new(tidemark_tests::machine::binary("ckptctl"));
        process::run(command.arg("--state-dir").arg(path("state")).args(arguments), LIMIT)
    };
    assert!(ctl(&["flush", "--wait", "--timeout", "30"]).status.success());
    assert!(keeper.try_wait().unwrap().is_none());
    assert_eq!(process::children(keeper.id()), [daemon], "neither was replaced");
    process::signal(keeper.id(), Signal::TERM);
    assert_eq!(process::wait(&mut keeper, LIMIT).unwrap().and_then(|status| status.code()), Some(0));
    assert!(!is_mounted(&path("ckpt")));
}

/// A daemon that stands still is not gone. After ten seconds of SIGSTOP, it goes on. After 30 s in which a program waits, which only
/// `--long` tests, its keeper replaces it.
#[test]
fn a_daemon_that_hangs_is_said_to_hang_and_is_replaced_only_after_long() {
    let Some(daemon) = start("128MiB") else { return };
    let pid = daemon.serving_pid().unwrap();
    let path = daemon.mount().join("run");
    fs::create_dir(&path).unwrap();
    process::signal(pid, Signal::STOP);
    let waiting = std::thread::spawn(move || fs::metadata(path).unwrap().is_dir());
    let begun = std::time::Instant::now();
    let asked = daemon.ctl(&["status"]);
    let text = tidemark_tests::daemon::shown(&asked);
    assert!(begun.elapsed() < Duration::from_secs(4), "it took {:?}", begun.elapsed());
    assert_eq!(asked.status.code(), Some(5), "{text}");
    assert!(text.contains("UNKNOWN") && text.contains("SIGSTOP") && text.contains("no_answer"), "{text}");
    if tidemark_tests::machine::long() {
        let next = daemon.wait_for_next(pid);
        assert_ne!(next, pid);
        assert!(begun.elapsed() >= Duration::from_secs(30), "it was replaced after {:?}", begun.elapsed());
        assert!(daemon.log().contains("the daemon hangs"), "{}", daemon.log_tail());
    } else {
        process::signal(pid, Signal::CONT);
        assert_eq!(daemon.serving_pid(), Some(pid));
        assert!(daemon.ctl(&["status"]).status.success());
    }
    assert!(waiting.join().unwrap(), "the call that waited was answered once");
}

//! systemd in the keeper's place: its descriptor store, as sd_notify(3) and sd_listen_fds(3) describe it.
//!
//! Owns: a service manager of a few lines that keeps descriptors and hands them to the next start. The manager speaks
//! systemd's protocol, byte for byte as the manual pages have it. Does not own: systemd itself, which does not run in
//! containers.

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix, SocketFlags,
    SocketType, recvmsg,
};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tidemark_tests::{machine, process};

const LIMIT: Duration = Duration::from_secs(30);

/// A unit with `Type=notify` and `FileDescriptorStoreMax=16`.
#[derive(Debug)]
struct Unit {
    home: tempfile::TempDir,
    notify: OwnedFd,
    kept: BTreeMap<String, OwnedFd>,
    /// Whether the manager keeps descriptors, and announces that.
    stores: bool,
}

impl Unit {
    /// Makes a unit. If it `stores` descriptors, the socket is at a path. If not, the socket has an abstract name. Both forms are in use.
    fn new(stores: bool) -> Self {
        let home = tempfile::tempdir().expect("a step of the harness itself");
        let notify =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
                .expect("a step of the harness itself");
        let path = home.path().join("notify");
        let address = if stores {
            SocketAddrUnix::new(path.as_path())
        } else {
            SocketAddrUnix::new_abstract_name(path.as_os_str().as_encoded_bytes())
        };
        rustix::net::bind(&notify, &address.expect("a step of the harness itself"))
            .expect("a step of the harness itself");
        fs::create_dir(home.path().join("tier3")).expect("a step of the harness itself");
        Self { home, notify, kept: BTreeMap::new(), stores }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn start(&self) -> Child {
        let passed: Vec<_> = self
            .kept
            .values()
            .map(|fd| {
                // The copy's number is above every number that the daemon gets.
                rustix::io::fcntl_dupfd_cloexec(fd, 100).expect("a step of the harness itself")
            })
            .collect();
        let names: Vec<_> = self.kept.keys().cloned().collect();
        let path = self.path("notify").into_os_string().into_string().expect("text");
        let mut command = Command::new("sh");
        // systemd knows the pid before exec, and so does a shell that becomes the daemon.
        command
            .args(["-c", "LISTEN_PID=$$ exec \"$@\"", "sh"])
            .arg(machine::binary("ckptd"))
            .arg("up")
            .arg(self.path("ckpt"))
            .args(["--tier1", "256MiB", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tier3"])
            .arg(format!("file://{}", self.path("tier3").display()))
            .arg("--state-dir")
            .arg(self.path("state"))
            .env("NOTIFY_SOCKET", if self.stores { path } else { format!("@{path}") })
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(
                File::options()
                    .append(true)
                    .create(true)
                    .open(self.path("log"))
                    .expect("a step of the harness itself"),
            );
        if self.stores {
            let count = names.len().to_string();
            command.env("FDSTORE", "16").env("LISTEN_FDS", count).env("LISTEN_FDNAMES", names.join(":"));
        }
        let pass = move || {
            for (number, fd) in (3..).zip(&passed) {
                // SAFETY: dup2 of an open descriptor onto a number that nothing of this process has. Async-signal-safe.
                if unsafe { libc::dup2(fd.as_raw_fd(), number) } == -1 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes system calls only.
        unsafe { command.pre_exec(pass) };
        command.spawn().expect("a step of the harness itself")
    }

    /// Receives messages until one contains `word`.
    fn wait_for(&mut self, word: &str, child: &mut Child) {
        let said = process::until(LIMIT, || {
            while let Some(text) = self.hear() {
                if text.lines().any(|line| line == word) {
                    return Some(true);
                }
            }
            child.try_wait().expect("a step of the harness itself").map(|_| false)
        });
        assert_eq!(
            said,
            Some(true),
            "no {word}:\n{}",
            fs::read_to_string(self.path("log")).expect("a step of the harness itself")
        );
    }

    fn hear(&mut self) -> Option<String> {
        let mut text = [0; 8192];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [io::IoSliceMut::new(&mut text)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let length = recvmsg(&self.notify, &mut iov, &mut ancillary, flags).ok()?.bytes;
        let fds: Vec<_> = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        let text = String::from_utf8_lossy(&text[..length]).into_owned();
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or("stored").to_owned();
        if text.lines().any(|line| line == "FDSTORE=1") {
            let fd = fds.into_iter().next().expect("a descriptor comes with FDSTORE=1");
            self.kept.insert(name, fd);
        } else if text.lines().any(|line| line == "FDSTOREREMOVE=1") {
            self.kept.remove(&name);
        }
        Some(text)
    }
}

#[test]
fn systemd_s_descriptor_store_takes_the_keeper_s_place() {
    if !machine::can_mount() {
        return;
    }
    let mut unit = Unit::new(true);
    let mut daemon = unit.start();
    unit.wait_for("READY=1", &mut daemon);
    let path = unit.path("ckpt").join("open.bin");
    // Another process has the file open, because this one starts the daemon: its fork would close the file and wait for the daemon.
    let script = format!("exec cat > {}", path.display());
    let mut writer = Command::new("sh").args(["-c", &script]).stdin(Stdio::piped()).spawn().unwrap();
    let mut pipe = writer.stdin.take().unwrap();
    let status = |unit: &Unit| status(&unit.path("state"));
    assert!(status(&unit)["keeper_pid"].is_null());
    for round in 0..5_u8 {
        pipe.write_all(&[round; 1000]).unwrap();
        let length = (u64::from(round) + 1) * 1000;
        let written = process::until(LIMIT, || {
            fs::metadata(&path).is_ok_and(|found| found.len() == length).then_some(())
        });
        assert!(written.is_some(), "the writer goes on");
        assert_eq!(status(&unit)["pid"], daemon.id(), "there is no keeper between");
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        // A process that looks up a name now waits for the unit's next start.
        let waiting = std::thread::spawn({
            let path = path.clone();
            move || fs::metadata(path).unwrap().len()
        });
        while unit.hear().is_some() {}
        daemon = unit.start();
        assert_eq!(waiting.join().unwrap(), length);
        unit.wait_for("READY=1", &mut daemon);
    }
    drop(pipe);
    assert!(writer.wait().unwrap().success());
    let bytes = fs::read(&path).unwrap();
    assert!((0..5).all(|round| bytes[round * 1000..][..1000].iter().all(|byte| usize::from(*byte) == round)));
    process::signal(daemon.id(), rustix::process::Signal::TERM);
    let ended = process::wait(&mut daemon, LIMIT).unwrap();
    assert_eq!(
        ended.and_then(|status| status.code()),
        Some(0),
        "{}",
        fs::read_to_string(unit.path("log")).unwrap()
    );
    assert!(!tidemark_tests::daemon::is_mounted(&unit.path("ckpt")));
    // After an orderly end nothing is kept, so the next start is like a first one.
    while unit.hear().is_some() {}
    assert!(unit.kept.is_empty(), "{:?}", unit.kept.keys());
    let mut daemon = unit.start();
    unit.wait_for("READY=1", &mut daemon);
    assert!(fs::read(&path).unwrap() == bytes, "from Tier-3");
    process::signal(daemon.id(), rustix::process::Signal::TERM);
    assert!(process::wait(&mut daemon, LIMIT).unwrap().is_some());
}

/// systemd before 254, or a unit without `FileDescriptorStoreMax=`, keeps nothing. The process that the unit started must report the
/// start and the end.
#[test]
fn a_unit_that_keeps_no_descriptors_hears_of_the_start_and_the_end_from_the_keeper() {
    if !machine::can_mount() {
        return;
    }
    let mut unit = Unit::new(false);
    let mut keeper = unit.start();
    unit.wait_for("READY=1", &mut keeper);
    let served = status(&unit.path("state"));
    assert_eq!(served["keeper_pid"], keeper.id(), "the unit's process is the keeper");
    let pid = served["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).unwrap();
    process::signal(pid, rustix::process::Signal::KILL);
    let next = process::until(LIMIT, || (status(&unit.path("state"))["pid"] != pid).then_some(()));
    assert!(next.is_some(), "the keeper keeps");
    assert!(unit.hear().is_none() && unit.kept.is_empty(), "a daemon that dies is no news for systemd");
    process::signal(keeper.id(), rustix::process::Signal::TERM);
    unit.wait_for("STOPPING=1", &mut keeper);
    let ended = process::wait(&mut keeper, LIMIT).unwrap();
    let log = || fs::read_to_string(unit.path("log")).unwrap();
    assert_eq!(ended.and_then(|status| status.code()), Some(0), "{}", log());
}

fn status(state_dir: &Path) -> serde_json::Value {
    let found = process::until(LIMIT, || {
        let mut command = Command::new(machine::binary("ckptctl"));
        let output =
            process::run(command.arg("--state-dir").arg(state_dir).args(["status", "-o", "json"]), LIMIT);
        output
            .status
            .success()
            .then(|| serde_json::from_slice(&output.stdout).expect("a step of the harness itself"))
    });
    found.expect("the daemon answers")
}

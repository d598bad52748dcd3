//! A named network namespace: threads that enter it, tools that run in it, the processes in it and their end.
//!
//! Owns: its name in `/run/netns` and its descriptor. Does not own: what it is connected to (`mod`), how names are chosen
//! (`leftover`).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{io, thread};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::TOOL_LIMIT;
use crate::process;

/// Where `ip netns` keeps the names.
pub(super) const NAMES: &str = "/run/netns";

/// A killed process gives back its memory first: gigabytes of Tier-1 take a second or two on a busy machine.
const KILL_LIMIT: Duration = Duration::from_secs(60);
/// How often what a host runs is listed until nothing new appears. A program that forks without end is stopped in the
/// second or third; more is a bug of this code.
const STOP_ROUNDS: usize = 20;

/// Identity that all descriptors of a namespace share: the device and inode of `/proc/PID/ns/net`.
type Identity = (u64, u64);

#[derive(Debug)]
pub(super) struct Namespace {
    name: String,
    file: File,
    identity: Identity,
}

impl Namespace {
    pub(super) fn make(name: String) -> Self {
        tool(Command::new("ip").args(["netns", "add", &name]), "");
        let namespace = Self::open(name).expect("a namespace that was made a moment ago");
        // Before there is an interface, so that the kernel sends nothing by itself: counters of packets count the test's.
        let settings = || {
            for which in ["all", "default"] {
                let setting = format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6");
                // A kernel without IPv6 has no such file.
                if Path::new(&setting).exists() {
                    fs::write(&setting, "1").unwrap_or_else(|error| panic!("{setting}: {error}"));
                }
            }
        };
        namespace.inside(settings);
        namespace
    }

    /// Opens an existing namespace, made by this process or another.
    pub(super) fn open(name: String) -> io::Result<Self> {
        let file = File::open(path(&name))?;
        let found = file.metadata()?;
        Ok(Self { name, file, identity: (found.st_dev(), found.st_ino()) })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether its name is still there.
    pub(super) fn is_named(&self) -> bool {
        path(&self.name).exists()
    }

    /// Runs `act` on a thread that has entered the namespace, and ends with it.
    pub(super) fn inside<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        let enter = || move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network));
        let entered = || {
            enter().unwrap_or_else(|error| panic!("a thread cannot enter {}: {error}", self.name));
            act()
        };
        thread::scope(|scope| scope.spawn(entered).join())
            .unwrap_or_else(|panicked| std::panic::resume_unwind(panicked))
    }

    /// Runs lines of `ip` in it; panics with what `ip` said when one fails.
    pub(super) fn ip(&self, lines: &str) {
        self.inside(|| tool(Command::new("ip").args(["-batch", "-"]), lines));
    }

    /// Runs a script of `nft` in it, all of it or nothing.
    pub(super) fn nft(&self, script: &str) {
        self.inside(|| tool(Command::new("nft").args(["-f", "-"]), script));
    }

    /// Runs a tool in it and gives what it printed; panics when it fails.
    pub(super) fn ask(&self, program: &str, arguments: &[&str]) -> String {
        self.inside(|| tool(Command::new(program).args(arguments), ""))
    }

    /// The pids of what runs in it, without this process, of which only threads are ever there.
    pub(super) fn processes(&self) -> Vec<u32> {
        let listed = fs::read_dir("/proc").expect("procfs").flatten();
        let pids = listed.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(|pid| *pid != std::process::id() && self.has(*pid)).collect()
    }

    /// Whether a process is in this namespace. If its first thread has ended, its other threads decide.
    fn has(&self, pid: u32) -> bool {
        let of = |path: PathBuf| fs::metadata(path).ok().map(|found| (found.st_dev(), found.st_ino()));
        let process = PathBuf::from(format!("/proc/{pid}"));
        of(process.join("ns/net")).map_or_else(
            || {
                let threads = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
                threads.into_iter().any(|thread| of(thread.path().join("ns/net")) == Some(self.identity))
            },
            |found| found == self.identity,
        )
    }

    /// SIGKILL of all that runs in it; see [`super::Host::kill_all`]. The error says what still runs.
    pub(super) fn kill_all(&self) -> Result<Vec<u32>, String> {
        // Stopped first, so that none starts another, or says goodbye, while the next is being killed.
        let mut held: BTreeMap<u32, OwnedFd> = BTreeMap::new();
        for _ in 0..STOP_ROUNDS {
            let fresh = self.hold(&held);
            fresh.values().for_each(|process| send(process, Signal::STOP));
            if fresh.is_empty() {
                break;
            }
            held.extend(fresh);
        }
        held.values().for_each(|process| send(process, Signal::KILL));
        let gone = process::until(KILL_LIMIT, || {
            // A process may have been forked at the very moment at which its parent was stopped.
            let fresh = self.hold(&held);
            fresh.values().for_each(|process| send(process, Signal::KILL));
            held.extend(fresh);
            (!held.keys().any(|pid| process::is_alive(*pid)) && self.processes().is_empty()).then_some(())
        });
        match gone {
            Some(()) => Ok(held.into_keys().collect()),
            None => Err(format!(
                "of {:?} in {} there are still {:?} after {} s",
                held.keys(),
                self.name,
                self.processes(),
                KILL_LIMIT.as_secs()
            )),
        }
    }

    /// Opens descriptors of the processes in it that are not held yet. A pid can be given to another process at any
    /// moment, a descriptor cannot; so the namespace is checked once more when there is a descriptor.
    fn hold(&self, held: &BTreeMap<u32, OwnedFd>) -> BTreeMap<u32, OwnedFd> {
        let fresh = self.processes().into_iter().filter(|pid| !held.contains_key(pid));
        let opened = fresh.filter_map(|pid| {
            let process = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
            self.has(pid).then_some((pid, process))
        });
        opened.collect()
    }

    /// Kills what runs in it and removes its name. The kernel ends it when the last descriptor of it is closed.
    pub(super) fn remove(&self) -> Result<(), String> {
        let killed = self.kill_all();
        let said = Command::new("ip").args(["netns", "del", &self.name]).output();
        // Two processes may remove what a third left behind: the second gets an error, and waits for the first.
        let gone = process::until(TOOL_LIMIT, || (!self.is_named()).then_some(()));
        gone.ok_or_else(|| format!("{} cannot be removed: {said:?}", self.name))?;
        killed.map(drop)
    }
}

fn path(name: &str) -> PathBuf {
    Path::new(NAMES).join(name)
}

fn send(process: &OwnedFd, signal: Signal) {
    match pidfd_send_signal(process, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => panic!("cannot send {signal:?}: {error}"),
    }
}

/// Runs a tool with `input`, gives what it printed, and panics with what it said when it fails.
fn tool(command: &mut Command, input: &str) -> String {
    let shown = format!("{command:?}");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot start {shown}: {error}"));
    // A few hundred bytes, which the pipe takes whether the tool reads them or not.
    let fed = child.stdin.take().expect("the pipe was asked for").write_all(input.as_bytes());
    let ended = process::wait(&mut child, TOOL_LIMIT).expect("waiting for a child of ours");
    if ended.is_none() {
        child.kill().expect("killing a child of ours");
    }
    let output = child.wait_with_output().expect("reading what a child of ours prints");
    assert!(
        output.status.success() && ended.is_some() && fed.is_ok(),
        "{shown} with\n{input}\nfailed ({}, {fed:?}):\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("tools print UTF-8")
}

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

/// Directory in which `ip netns` keeps the names.
pub(super) const NAMES: &str = "/run/netns";

/// Limit of a kill. A killed process first frees its memory, and gigabytes of Tier-1 take seconds on a busy machine.
const KILL_LIMIT: Duration = Duration::from_secs(60);
/// Listings of a host's processes until no new one appears. A program that forks without end is stopped in the second
/// or third listing. More are a bug of this code.
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
        // Set before there is an interface, so that the kernel sends nothing by itself and packet counters count the test's only.
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

    /// Whether the namespace's name is still there.
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

    /// Runs lines of `ip` in the namespace. If one fails, panics with the output of `ip`.
    pub(super) fn ip(&self, lines: &str) {
        self.inside(|| tool(Command::new("ip").args(["-batch", "-"]), lines));
    }

    /// Runs a script of `nft` in the namespace, as a whole or not at all.
    pub(super) fn nft(&self, script: &str) {
        self.inside(|| tool(Command::new("nft").args(["-f", "-"]), script));
    }

    /// Runs a tool in the namespace and returns its output. Panics if the tool fails.
    pub(super) fn ask(&self, program: &str, arguments: &[&str]) -> String {
        self.inside(|| tool(Command::new(program).args(arguments), ""))
    }

    /// Returns the pids of the processes in the namespace, without this process, which only enters with threads.
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

    /// Kills all processes in the namespace, as [`super::Host::kill_all`] describes. The error says which still run.
    pub(super) fn kill_all(&self) -> Result<Vec<u32>, String> {
        // All are stopped first, so that no process starts another, or takes leave of its peers, while the next is killed.
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
            // A process may have been forked just when its parent was stopped.
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

    /// Opens descriptors of the processes in the namespace that are not held yet. The kernel can reuse a pid at any moment,
    /// but not a descriptor, so each process's namespace is checked again once its descriptor is open.
    fn hold(&self, held: &BTreeMap<u32, OwnedFd>) -> BTreeMap<u32, OwnedFd> {
        let fresh = self.processes().into_iter().filter(|pid| !held.contains_key(pid));
        let opened = fresh.filter_map(|pid| {
            let process = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
            self.has(pid).then_some((pid, process))
        });
        opened.collect()
    }

    /// Kills all processes in the namespace and removes its name. The kernel ends the namespace when its last descriptor is closed.
    pub(super) fn remove(&self) -> Result<(), String> {
        let killed = self.kill_all();
        let said = Command::new("ip").args(["netns", "del", &self.name]).output();
        // Two processes may remove what a third left behind. The second gets an error and waits for the first.
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

/// Runs a tool with `input` and returns its output. If the tool fails, panics with its message.
fn tool(command: &mut Command, input: &str) -> String {
    let shown = format!("{command:?}");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot start {shown}: {error}"));
    // The pipe has room for these few hundred bytes, even if the tool does not read them.
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

//! Writing processes: the process behind a thread, and the session it belongs to.
//!
//! Owns: [`WriterId`], [`SessionKey`], reading them from /proc, the bounded cache.
//! Does not own: what a session means for completeness (the protocol).

use super::Caller;
use super::ends::{End, Ends, Process};
use super::pidfd;
pub use super::pidfd::Ended;
use super::process::{STAT_BYTES, Stat, read};
use super::tree::Tree;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::ClockId;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tidemark_protocol::id::Incarnation;

/// The launch that a group of writers shares, as text: `torchelastic:ID#RESTART`, `slurm:JOB.STEP#RESTART`,
/// `master:ADDR:PORT#RESTART`, or `session:SID@START` for processes that were not launched together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionKey(pub String);

/// A process that opened a file for writing.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WriterId {
    pub session: SessionKey,
    pub world_size: Option<u64>,
    pub rank: Option<u64>,
    /// Whether the process's environment could be read; without it the size of its job is unknown.
    pub environment_seen: bool,
    pub tgid: u32,
    /// The node on which the process runs, if that is another node.
    pub home: Option<Incarnation>,
    /// Field 22 of /proc/<pid>/stat, in clock ticks since boot; with `tgid` it names a process for good.
    pub start_time_ticks: u64,
}

impl WriterId {
    /// Returns the process's permanent identity: a process number that is used again has another start time.
    #[must_use]
    pub fn process(&self) -> (u32, u64) {
        // Two nodes number their processes alike.
        (self.tgid, self.start_time_ticks ^ self.home.map_or(0, |home| home.0))
    }
}

/// Result of a search in /proc for processes that share a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peers {
    None,
    /// Such a process exists; this is the first one found.
    Some {
        process: u32,
    },
    /// No such process was found, but this process's environment cannot be read.
    Unknown {
        process: u32,
    },
}

/// Bytes read of a process's environment. Linux allows megabytes, launchers use a few KiB.
const ENVIRONMENT_BYTES: u64 = 256 << 10;
/// USER_HZ of Linux on every architecture that we run on.
const TICKS_PER_SECOND: u64 = 100;
/// Ranks that a node's launcher starts begin within this of each other.
const LAUNCH_TICKS: u64 = 60 * TICKS_PER_SECOND;
/// Environment variables in which launchers pass the number of ranks and a rank: torchrun, Open MPI, and PMI launchers (MPICH, Intel
/// MPI).
const SIZES: [&str; 3] = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];
const RANKS: [&str; 3] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"];
/// Slurm's steps that `srun` launched have numbers up to this (slurm.h, `SLURM_MAX_NORMAL_STEP_ID`).
const SLURM_LAST_STEP: u64 = 0xffff_fff0;
/// Longer session keys are cut, and their hash kept, so that records stay small.
const MAX_SESSION_BYTES: usize = 200;
/// Processes remembered, one descriptor each.
const CACHED: usize = 512;
/// How long the kernel is asked how a process ended: the answer exists only once its parent has waited for it.
const REAPED_WITHIN: Duration = Duration::from_secs(60);
/// A thread id is looked up again after this, should it have been reused in a process that still lives.
const CACHED_FOR: Duration = Duration::from_secs(60);
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Facts known of a thread.
#[derive(Debug)]
struct Known {
    writer: Arc<WriterId>,
    /// Descriptor that becomes readable once the process is dead: then its ids may name another.
    process: OwnedFd,
    since: Instant,
    /// When the process was first seen to have ended.
    ended: Option<(Instant, i64)>,
}

/// Remembers threads' processes, so that creating a file does not read /proc each time.
#[derive(Debug)]
pub(super) struct WriterCache {
    proc_root: PathBuf,
    known: Mutex<BTreeMap<u32, Known>>,
    ends: Mutex<Ends>,
    /// Number of times that a program without a process number known here opened a file for writing.
    unseen: AtomicU64,
}

impl WriterCache {
    /// Creates the cache. `ends`: the ends that the previous daemon saw.
    pub(super) fn new(proc_root: PathBuf, ends: Ends) -> Self {
        Self { proc_root, known: Mutex::default(), ends: Mutex::new(ends), unseen: AtomicU64::new(0) }
    }

    /// Watches the living processes that wrote a file of the tree. The previous daemon had descriptors of them.
    pub(super) fn watch_all(&self, tree: &Tree) {
        let files = tree.nodes.values().filter_map(|node| node.file().ok());
        files.flat_map(|file| &file.writers).for_each(|writer| self.watch(writer));
    }

    pub(super) fn proc_root(&self) -> &Path {
        &self.proc_root
    }

    /// Returns the process that opens a file for writing. For a process that we cannot see returns none, and counts it.
    pub(super) fn opens(&self, caller: &Caller) -> Option<Arc<WriterId>> {
        // Without a request it is a call of our own.
        if caller.pid == 0 && caller.request != 0 && self.unseen.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                "a process that this daemon cannot see writes into the mount: how it ends is not known, and few of its saves are \
                 committed; run ckptd in the host's pid namespace (hostPID: true)"
            );
        }
        self.identify(caller.pid)
    }

    /// Returns how often [`WriterCache::opens`] found no process.
    pub(super) fn unseen(&self) -> u64 {
        self.unseen.load(Ordering::Relaxed)
    }

    /// Returns the process behind thread `tid`; none if we cannot see it. Costs a poll if the thread is known, and reading three files of
    /// /proc if not.
    pub(super) fn identify(&self, tid: u32) -> Option<Arc<WriterId>> {
        if tid == 0 {
            return None;
        }
        {
            let mut known = self.known.lock().expect(super::UNPOISONED);
            match known.get(&tid) {
                Some(entry) if entry.since.elapsed() < CACHED_FOR && is_alive(&entry.process) => {
                    return Some(Arc::clone(&entry.writer));
                }
                Some(_) => {
                    known.remove(&tid);
                }
                None => {}
            }
        }
        // The descriptor is taken before the files are read: if the process lives on afterwards, they were its.
        let tgid = thread_group(&self.proc_root, tid)?;
        let process = pidfd_open(Pid::from_raw(i32::try_from(tgid).ok()?)?, PidfdFlags::empty()).ok();
        let writer = Arc::new(identify(&self.proc_root, tid)?);
        if let Some(process) = process.filter(is_alive) {
            let mut known = self.known.lock().expect(super::UNPOISONED);
            if known.len() >= CACHED
                && let Some(oldest) = known.iter().min_by_key(|(_, entry)| entry.since).map(|(tid, _)| *tid)
            {
                known.remove(&oldest);
            }
            let since = Instant::now();
            known.insert(tid, Known { writer: Arc::clone(&writer), process, since, ended: None });
        }
        Some(writer)
    }

    /// Remembers a process that wrote under the previous daemon, if it still lives.
    fn watch(&self, writer: &Arc<WriterId>) {
        if self.end(writer).is_some() {
            return;
        }
        let mut known = self.known.lock().expect(super::UNPOISONED);
        if writer.home.is_some() || known.len() >= CACHED || known.contains_key(&writer.tgid) {
            return;
        }
        let pid = i32::try_from(writer.tgid).ok().and_then(Pid::from_raw);
        let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        // The descriptor is taken first: if the number still means the same process afterwards, the descriptor does, too.
        let is_it = |stat: &Stat| stat.start_time_ticks == writer.start_time_ticks;
        let found = Stat::read(&self.proc_root, writer.tgid).filter(is_it).and(process);
        if let Some(process) = found {
            let (writer, since) = (Arc::clone(writer), Instant::now());
            known.insert(writer.tgid, Known { writer, process, since, ended: None });
        }
    }

    /// Returns how the process was seen to end.
    pub(super) fn end(&self, writer: &WriterId) -> Option<End> {
        self.ends().get(writer.process())
    }

    /// Locks the ends. Lock after the namespace's state, never before.
    pub(super) fn ends(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().expect(super::UNPOISONED)
    }

    /// Whether the process is still remembered: it lives, or the kernel has not said how it ended.
    pub(super) fn is_awaited(&self, writer: &WriterId) -> bool {
        let known = self.known.lock().expect(super::UNPOISONED);
        known.values().any(|entry| entry.writer.process() == writer.process())
    }

    /// Closes the descriptors of processes that have ended, once the kernel has said how; returns the new ends. Costs one poll of all
    /// remembered processes.
    pub(super) fn forget_ended(&self, now_ns: i64) -> Vec<(Process, End)> {
        let mut news = Vec::new();
        let mut known = self.known.lock().expect(super::UNPOISONED);
        let ended: Vec<u32> = {
            let mut fds: Vec<_> =
                known.values().map(|entry| PollFd::new(&entry.process, PollFlags::IN)).collect();
            if !matches!(poll(&mut fds, Some(&NO_WAIT)), Ok(1..)) {
                return news;
            }
            known.keys().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty()).map(|(tid, _)| *tid).collect()
        };
        known.retain(|tid, entry| {
            if !ended.contains(tid) {
                return true;
            }
            let (seen, at_ns) = *entry.ended.get_or_insert_with(|| (Instant::now(), now_ns));
            let how = pidfd::ended(&entry.process).or_else(|| zombie(&self.proc_root, &entry.writer));
            match how {
                Some(how) => {
                    let (process, end) = (entry.writer.process(), End { at_ns, how });
                    if self.ends().add(process, end) {
                        news.push((process, end));
                    }
                    false
                }
                None => pidfd::tells() && seen.elapsed() < REAPED_WITHIN,
            }
        });
        news
    }
}

/// Looks for processes of `writer`'s launch that began with it and before `before_ns` (CLOCK_REALTIME), since processes of its next life
/// share the name. Returns none for a session that no launcher named, because only its writers are known. Costs a file of /proc for each
/// process of the machine, and three more for each that began then.
pub(super) fn peers(proc_root: &Path, writer: &WriterId, before_ns: i64) -> Peers {
    if writer.session.0.starts_with("session:") {
        return Peers::None;
    }
    let Ok(processes) = std::fs::read_dir(proc_root) else { return Peers::Unknown { process: 0 } };
    let launched = writer.start_time_ticks.saturating_sub(LAUNCH_TICKS)..=ticks_at(before_ns);
    let mut unknown = None;
    for entry in processes.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process that ended meanwhile does not count.
        let lives = || Stat::read(proc_root, pid).filter(|stat| !stat.ended && !stat.ends);
        let Some(stat) = lives() else { continue };
        if stat.kernel || !launched.contains(&stat.start_time_ticks) {
            continue;
        }
        let Some(found) = identify(proc_root, pid) else { continue };
        if !found.environment_seen {
            // A process's environment is gone before the process is, for as long as it waits for us to release the last of its files.
            unknown = lives().map(|_| pid).or(unknown);
        } else if found.session == writer.session && (found.rank.is_some() || writer.rank.is_none()) {
            // The process's launcher may carry the name too, but no rank.
            return Peers::Some { process: pid };
        }
    }
    unknown.map_or(Peers::None, |process| Peers::Unknown { process })
}

/// Converts a moment to clock ticks since boot, as /proc counts them.
fn ticks_at(realtime_ns: i64) -> u64 {
    let ns = |clock| {
        let now = rustix::time::clock_gettime(clock);
        now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec)
    };
    let since_boot = ns(ClockId::Boottime) - (ns(ClockId::Realtime) - realtime_ns);
    u64::try_from(since_boot).unwrap_or(0) / 1_000_000_000 * TICKS_PER_SECOND
        + u64::try_from(since_boot).unwrap_or(0) % 1_000_000_000 * TICKS_PER_SECOND / 1_000_000_000
}

/// Returns how a process ended before its parent waits for it; none if that is not known. Since 3.5, Linux shows it to those who may
/// trace the process, and 0 to all others (do_task_stat in fs/proc/array.c).
fn zombie(proc_root: &Path, writer: &WriterId) -> Option<Ended> {
    let stat = Stat::read(proc_root, writer.tgid).filter(|_| may_trace_all())?;
    let is_it = stat.ended && stat.start_time_ticks == writer.start_time_ticks;
    stat.exit_code.filter(|_| is_it).map(Ended::from_wait)
}

/// Whether this process may trace every other.
fn may_trace_all() -> bool {
    static MAY: LazyLock<bool> = LazyLock::new(|| {
        rustix::thread::capabilities(None)
            .is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::SYS_PTRACE))
    });
    *MAY
}

fn is_alive(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&NO_WAIT)), Ok(0))
}

/// Reads a thread's process and session from `proc_root`.
fn identify(proc_root: &Path, tid: u32) -> Option<WriterId> {
    let tgid = thread_group(proc_root, tid)?;
    let stat = Stat::read(proc_root, tgid)?;
    let environment = read(&proc_root.join(tid.to_string()).join("environ"), ENVIRONMENT_BYTES);
    let environment_seen = environment.is_some();
    let environment = environment.unwrap_or_default();
    let variable = |name: &str| {
        let found = environment.split(|byte| *byte == 0).find_map(|variable| {
            variable.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="))
        })?;
        Some(String::from_utf8_lossy(found).into_owned()).filter(|value| !value.is_empty())
    };
    let number = |name: &str| variable(name).and_then(|value| value.trim().parse::<u64>().ok());
    let restart = |name: &str| number(name).unwrap_or(0);
    // The script of `sbatch --ntasks=4` has the size of its job and rank 0, too, and everything that it starts without `srun` inherits them.
    let is_step = number("SLURM_STEP_ID").is_some_and(|step| step <= SLURM_LAST_STEP);
    let task = |name: &str| number(name).filter(|_| is_step);
    let first = |names: &[&str]| names.iter().find_map(|name| number(name));
    let elastic = variable("TORCHELASTIC_RUN_ID").filter(|id| id != "none");
    let session = if let Some(id) = elastic {
        format!("torchelastic:{id}#{}", restart("TORCHELASTIC_RESTART_COUNT"))
    } else if let Some(job) = variable("SLURM_JOB_ID") {
        let step = variable("SLURM_STEP_ID").unwrap_or_else(|| "batch".into());
        format!("slurm:{job}.{step}#{}", restart("SLURM_RESTART_COUNT"))
    } else if let (Some(address), Some(port)) = (variable("MASTER_ADDR"), variable("MASTER_PORT")) {
        format!("master:{address}:{port}#{}", restart("TORCHELASTIC_RESTART_COUNT"))
    } else {
        let leader = u32::try_from(stat.session).ok().and_then(|sid| Stat::read(proc_root, sid));
        format!("session:{}@{}", stat.session, leader.map_or(0, |leader| leader.start_time_ticks))
    };
    Some(WriterId {
        home: None,
        session: SessionKey(bounded(session)),
        world_size: first(&SIZES).or_else(|| task("SLURM_NTASKS").filter(|_| task("SLURM_PROCID").is_some())),
        rank: first(&RANKS).or_else(|| task("SLURM_PROCID")),
        environment_seen,
        tgid,
        start_time_ticks: stat.start_time_ticks,
    })
}

fn bounded(key: String) -> String {
    if key.len() <= MAX_SESSION_BYTES {
        return key;
    }
    let hash = blake3::hash(key.as_bytes()).to_hex();
    let mut cut = MAX_SESSION_BYTES - hash.len() - 1;
    while !key.is_char_boundary(cut) {
        cut -= 1;
    }
    format!("{}~{hash}", &key[..cut])
}

/// Returns the process of a thread and its start time, which together identify it for good ([`WriterId::process`]). Costs two files of
/// /proc.
pub(super) fn process_of(proc_root: &Path, tid: u32) -> Option<(u32, u64)> {
    let tgid = thread_group(proc_root, tid)?;
    Some((tgid, Stat::read(proc_root, tgid)?.start_time_ticks))
}

fn thread_group(proc_root: &Path, tid: u32) -> Option<u32> {
    let status = read(&proc_root.join(tid.to_string()).join("status"), STAT_BYTES)?;
    let line = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"Tgid:"))?;
    std::str::from_utf8(line).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::process::{PF_EXITING, PF_KTHREAD};
    use super::*;

    fn process(root: &Path, pid: u32, command: &str, environment: &[&str]) {
        let folder = root.join(pid.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("status"), format!("Name:\tx\nTgid:\t{pid}\nPid:\t{pid}\n")).unwrap();
        let stat = format!("{pid} ({command}) S 1 7 70 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0");
        std::fs::write(folder.join("stat"), stat).unwrap();
        std::fs::write(folder.join("environ"), environment.join("\0")).unwrap();
    }

    /// A process whose memory is gone, with such flags.
    fn without_environment(root: &Path, pid: u32, flags: u64) {
        process(root, pid, "rank", &[]);
        let folder = root.join(pid.to_string());
        let stat = format!("{pid} (rank) R 1 7 70 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0");
        std::fs::write(folder.join("stat"), stat).unwrap();
        std::fs::remove_file(folder.join("environ")).unwrap();
    }

    fn session_of(environment: &[&str]) -> WriterId {
        let root = tempfile::tempdir().unwrap();
        process(root.path(), 70, "bash", &[]);
        process(root.path(), 71, "a) b (c", environment);
        identify(root.path(), 71).unwrap()
    }

    #[test]
    fn the_first_launch_identity_that_is_set_names_the_session() {
        let all = ["RANK=3", "WORLD_SIZE=8", "MASTER_ADDR=h", "MASTER_PORT=29500", "TORCHELASTIC_RUN_ID=job"];
        let writer = session_of(&all);
        assert_eq!(writer.session.0, "torchelastic:job#0");
        assert_eq!((writer.rank, writer.world_size), (Some(3), Some(8)));
        assert_eq!((writer.tgid, writer.start_time_ticks), (71, 4242));
        let unset = [
            "MASTER_ADDR=h",
            "MASTER_PORT=29500",
            "TORCHELASTIC_RUN_ID=none",
            "TORCHELASTIC_RESTART_COUNT=2",
        ];
        assert_eq!(session_of(&unset).session.0, "master:h:29500#2");
        assert_eq!(session_of(&["SLURM_JOB_ID=9", "SLURM_STEP_ID=1"]).session.0, "slurm:9.1#0");
        assert_eq!(session_of(&[]).session.0, "session:70@4242");
    }

    #[test]
    fn a_process_is_a_rank_of_what_launched_it_and_of_no_script_of_slurm() {
        let ranked = |environment: &[&str]| {
            let writer = session_of(environment);
            (writer.rank, writer.world_size)
        };
        let slurm = ["SLURM_JOB_ID=9", "SLURM_NTASKS=4", "SLURM_PROCID=0"];
        let with = |more: &[&'static str]| ranked(&[&slurm[..], more].concat());
        assert_eq!(with(&[]), (None, None), "in the script of sbatch");
        assert_eq!(with(&["SLURM_STEP_ID=4294967291"]), (None, None), "the same");
        assert_eq!(with(&["SLURM_STEP_ID=0"]), (Some(0), Some(4)), "launched by srun");
        assert_eq!(with(&["RANK=1", "WORLD_SIZE=2"]), (Some(1), Some(2)), "torchrun in the script");
        let mpi = ["OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=8"];
        assert_eq!(with(&mpi), (Some(3), Some(8)), "mpirun in the script");
        assert_eq!(ranked(&["PMI_RANK=0", "PMI_SIZE=2"]), (Some(0), Some(2)));
        assert_eq!(ranked(&["SLURM_NTASKS=4", "SLURM_STEP_ID=0"]), (None, None), "a size without a rank");
    }

    #[test]
    fn a_rank_that_is_being_closed_down_is_nobody_to_wait_for_and_one_that_cannot_be_read_is() {
        let root = tempfile::tempdir().unwrap();
        let job = ["MASTER_ADDR=h", "MASTER_PORT=29500", "RANK=0", "WORLD_SIZE=2"];
        process(root.path(), 71, "rank", &job);
        let writer = identify(root.path(), 71).unwrap();
        let now = rustix::time::clock_gettime(ClockId::Realtime);
        let peers = || peers(root.path(), &writer, now.tv_sec.saturating_mul(1_000_000_000));
        assert_eq!(peers(), Peers::Some { process: 71 });
        without_environment(root.path(), 71, PF_EXITING);
        assert_eq!(peers(), Peers::None);
        without_environment(root.path(), 72, 0);
        assert_eq!(peers(), Peers::Unknown { process: 72 });
        without_environment(root.path(), 72, PF_KTHREAD);
        assert_eq!(peers(), Peers::None);
    }

    #[test]
    fn a_session_key_is_bounded_and_stays_distinct() {
        let long = format!("TORCHELASTIC_RUN_ID={}", "é".repeat(500));
        let longer = format!("TORCHELASTIC_RUN_ID={}", "é".repeat(501));
        let (one, other) = (session_of(&[&long]), session_of(&[&longer]));
        assert!(one.session.0.len() <= MAX_SESSION_BYTES);
        assert_ne!(one.session, other.session);
    }

    #[test]
    fn this_thread_is_identified_and_remembered() {
        let cache = WriterCache::new("/proc".into(), Ends::default());
        let tid = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
        let first = cache.identify(tid).unwrap();
        assert_eq!(first.tgid, std::process::id());
        assert!(Arc::ptr_eq(&first, &cache.identify(tid).unwrap()));
        assert!(cache.identify(0).is_none());
    }

    #[test]
    fn a_program_that_opens_a_file_and_has_no_number_here_is_counted() {
        let cache = WriterCache::new("/proc".into(), Ends::default());
        let caller = |pid, request| Caller { uid: 0, gid: 0, pid, now_ns: 1, request };
        assert!(cache.opens(&caller(std::process::id(), 6)).is_some());
        assert!(cache.opens(&caller(0, 0)).is_none());
        assert_eq!(cache.unseen(), 0, "a call of our own is no program");
        assert!(cache.opens(&caller(0, 7)).is_none() && cache.opens(&caller(0, 8)).is_none());
        assert_eq!(cache.unseen(), 2);
    }

    #[test]
    fn how_a_process_ended_is_known_before_somebody_waits_for_it() {
        let cache = WriterCache::new("/proc".into(), Ends::default());
        for (script, how) in [
            ("read line; exit 0", Ended::Well),
            ("read line; exit 3", Ended::Failed),
            ("read line; kill -9 $$", Ended::Killed),
        ] {
            let mut child = std::process::Command::new("sh")
                .args(["-c", script])
                .stdin(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let writer = cache.identify(child.id()).unwrap();
            assert_eq!(cache.end(&writer), None);
            drop(child.stdin.take());
            let deadline = Instant::now() + Duration::from_secs(10);
            while cache.end(&writer).is_none() && may_trace_all() {
                assert!(Instant::now() < deadline, "{script}");
                std::thread::sleep(Duration::from_millis(1));
                cache.forget_ended(7);
            }
            assert_eq!(cache.end(&writer), may_trace_all().then_some(End { at_ns: 7, how }), "{script}");
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_process_that_ended_is_let_go_of_and_others_are_kept() {
        let cache = WriterCache::new("/proc".into(), Ends::default());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(cache.identify(child.id()).unwrap().tgid, child.id());
        cache.identify(std::process::id()).unwrap();
        cache.forget_ended(1);
        assert_eq!(cache.known.lock().unwrap().len(), 2, "both live");
        let writer = cache.identify(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        cache.forget_ended(7);
        assert_eq!(cache.end(&writer), pidfd::tells().then_some(End { at_ns: 7, how: Ended::Killed }));
        assert_eq!(cache.known.lock().unwrap().keys().collect::<Vec<_>>(), [&std::process::id()]);
    }
}

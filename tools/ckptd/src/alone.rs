//! A single daemon for each Tier-3: a stand-alone daemon, or a coordinator without a shared lease, leaves signs of life there.
//!
//! Owns: which daemon holds a Tier-3, whether that daemon still lives, and the refusal of a second one. Does not own: safety (each
//! write carries its epoch, and the older daemon is fenced), the numbered objects (control's `StoreLease`).
//!
//! Without this, two nodes with one directory and no coordinator would fence each other by turns, and each would hide the other's
//! saves. A daemon that crashed delays its successor only briefly. On the same machine the successor sees the death in /proc, or by the
//! lock of the state directory. From elsewhere the successor waits until it has seen no sign of life for longer than the interval
//! between signs, by its own clock alone.

use crate::cli::Failure;
use crate::state_dir::StateDir;
use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_control::lease::{LeaseError, LeaseTimes, StoreLease, Turn};
use tidemark_store::Store;
use tokio::sync::Mutex;

/// The folder of the signs of life, relative to the store's URL.
const FOLDER: &str = ".tidemark/alone/";

/// A sign is two requests, so that one every seven seconds costs an object store some cents a day. A rival elsewhere waits for 25
/// seconds at most, and a daemon that was superseded notices within ten.
const TIMES: LeaseTimes = LeaseTimes { term: Duration::from_secs(20), margin: Duration::from_secs(5) };
pub(crate) const SIGN_EVERY: Duration = Duration::from_secs(7);

/// Interval between two checks of a holder that may be dead.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long an end waits for Tier-3 to take that this daemon is gone.
const RELEASE_PATIENCE: Duration = Duration::from_secs(2);

/// A process, distinguished from a later one of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    pid: u32,
    start_ticks: u64,
}

/// The daemon that holds a Tier-3, as other daemons read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    node: String,
    /// Host name, for people.
    host: String,
    /// The boot of the kernel that the daemon runs on, and the pid namespace there.
    boot: String,
    pid_namespace: String,
    daemon: Process,
    /// The process that starts the daemon again when the daemon dies.
    keeper: Option<Process>,
    /// Device and inode of the state directory's lock.
    lock: (u64, u64),
}

/// Whether a holder lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Lives,
    Gone,
    /// The daemon runs on another machine, or in another container.
    Unknown,
}

impl Holder {
    fn of_this_process(node: &str, keeper: Option<u32>, state_dir: &StateDir) -> anyhow::Result<Self> {
        let own = std::process::id();
        let process = |pid| {
            let start_ticks = start_ticks(pid).with_context(|| format!("/proc/{pid}/stat cannot be read"))?;
            Ok::<_, anyhow::Error>(Process { pid, start_ticks })
        };
        Ok(Self {
            node: node.to_owned(),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned(),
            pid_namespace: fs::read_link("/proc/self/ns/pid")
                .map(|link| link.to_string_lossy().into_owned())
                .unwrap_or_default(),
            daemon: process(own)?,
            keeper: keeper.map(process).transpose()?,
            lock: state_dir.lock_identity()?,
        })
    }

    /// Whether `self`, read from Tier-3, lives, as far as `ours` can know. `runs` asks this machine for a process.
    fn life(&self, ours: &Self, runs: impl Fn(Process) -> bool) -> Life {
        if self.boot != ours.boot || self.boot.is_empty() {
            return Life::Unknown;
        }
        let same_keeper = self.keeper.is_some() && self.keeper == ours.keeper;
        if self.lock == ours.lock || same_keeper {
            // The lock is ours, or our keeper's other daemon is the one before this.
            return Life::Gone;
        }
        if self.pid_namespace != ours.pid_namespace || self.pid_namespace.is_empty() {
            return Life::Unknown;
        }
        let lives = runs(self.daemon) || self.keeper.is_some_and(runs);
        if lives { Life::Lives } else { Life::Gone }
    }

    fn shown(&self) -> String {
        format!("node {} on host {} (process {})", self.node, self.host, self.daemon.pid)
    }
}

/// When a process began, in ticks since boot; none when it is gone, or has ended and is not buried.
fn start_ticks(pid: u32) -> Option<u64> {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = line.rsplit_once(')')?.1.split_ascii_whitespace();
    let ended = matches!(fields.next()?, "Z" | "X");
    let start = fields.nth(18)?.parse().ok()?;
    (!ended).then_some(start)
}

fn runs(process: Process) -> bool {
    start_ticks(process.pid) == Some(process.start_ticks)
}

/// The last sign of life of this process, if it has taken a Tier-3 and not given it back. The code that ends a start has the sign
/// besides [`Alone`], which may be dropped in the middle of a start.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sign(Arc<Mutex<Option<StoreLease>>>);

impl Sign {
    /// Gives the Tier-3 back when this process ends in order, so that no successor waits. Costs one request, and 2 s at most.
    pub(crate) async fn give_back(&self) {
        let release = async {
            let Some(mut lease) = self.0.lock().await.take() else { return };
            if let Err(error) = lease.release().await {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "the next daemon waits for this one"
                );
            }
        };
        if tokio::time::timeout(RELEASE_PATIENCE, release).await.is_err() {
            tracing::debug!("Tier-3 does not take that this daemon is gone");
        }
    }
}

/// A Tier-3 that this daemon has for itself.
#[derive(Debug)]
pub(crate) struct Alone {
    sign: Sign,
}

impl Alone {
    /// Takes a Tier-3 for this daemon. With `take_over` also from a daemon that lives. Errors: another holds it.
    pub(crate) async fn take(
        store: &Arc<dyn Store>,
        node: &str,
        keeper: Option<u32>,
        state_dir: &StateDir,
        take_over: bool,
        sign: &Sign,
    ) -> Result<Self, Failure> {
        let ours = Holder::of_this_process(node, keeper, state_dir).map_err(Failure::failed)?;
        let text = serde_json::to_string(&ours).expect("a holder is written as JSON");
        let nonce = getrandom::u64().context("the kernel has random numbers").map_err(Failure::failed)?;
        let mut lease = StoreLease::in_folder(FOLDER, Arc::clone(store), text, nonce, TIMES);
        let life = |holder: &str| match serde_json::from_str::<Holder>(holder) {
            _ if take_over => Life::Gone,
            Ok(theirs) => theirs.life(&ours, runs),
            // A holder of a later version cannot be read: only its silence shows that it is gone.
            Err(_) => Life::Unknown,
        };
        let mut shortest: Option<Duration> = None;
        loop {
            let turn = lease.try_acquire_from(Instant::now(), |holder| life(holder) == Life::Gone).await;
            let turn = turn.context("Tier-3 cannot be used").map_err(Failure::unavailable)?;
            let (holder, wait) = match turn {
                Turn::Ours(_) => {
                    *sign.0.lock().await = Some(lease);
                    return Ok(Self { sign: sign.clone() });
                }
                Turn::Theirs { holder, wait, .. } => (holder, wait),
            };
            // Each sign of life starts the wait over.
            let spoke = shortest.is_some_and(|shortest| wait > shortest);
            if life(&holder) == Life::Lives || spoke {
                return Err(refusal(&holder, &store.describe()));
            }
            if shortest.is_none() {
                let holder = shown(&holder);
                let wait_s = wait.as_secs();
                tracing::warn!(
                    holder,
                    wait_s,
                    "another daemon held this Tier-3; if it gives no sign of life, this one goes on"
                );
            }
            shortest = Some(wait);
            tokio::time::sleep(wait.min(LOOK_EVERY)).await;
        }
    }

    /// Gives a sign of life. Errors, for good: another daemon has taken this Tier-3, whose words say so.
    pub(crate) async fn renew(&mut self) -> Result<(), String> {
        let mut sign = self.sign.0.lock().await;
        let Some(lease) = sign.as_mut() else { return Ok(()) };
        match lease.renew(Instant::now()).await {
            Err(LeaseError::Lost { holder, .. }) => {
                Err(format!("{} took this Tier-3 over; stop one of the two", shown(&holder)))
            }
            Err(error) => {
                // A Tier-3 that is away is reported elsewhere.
                tracing::debug!(error = &error as &dyn std::error::Error, "no sign of life was given");
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    /// Ends in order, so that no successor waits.
    pub(crate) async fn release(self) {
        self.sign.give_back().await;
    }
}

fn shown(holder: &str) -> String {
    serde_json::from_str::<Holder>(holder)
        .map_or_else(|_| "another ckptd".to_owned(), |theirs| theirs.shown())
}

fn refusal(holder: &str, store: &str) -> Failure {
    Failure::fenced(anyhow!(
        "{} holds the Tier-3 {store}, and two daemons that do not know each other would fence each other; nothing was mounted. \
         To join this node to that one, start both with --certs and this one with --coordinator NODE@HOST:PORT \
         (control/SEVERAL-NODES.md). To keep the two apart, give this one another --tier3 prefix. To supersede that daemon, which \
         then commits nothing any more, add --take-over",
        shown(holder)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_store::MemoryStore;

    const DAEMON: Process = Process { pid: 7, start_ticks: 70 };
    const KEEPER: Process = Process { pid: 6, start_ticks: 60 };

    fn holder() -> Holder {
        Holder {
            node: "a".into(),
            host: "h".into(),
            boot: "b0".into(),
            pid_namespace: "pid:[1]".into(),
            daemon: DAEMON,
            keeper: Some(KEEPER),
            lock: (1, 2),
        }
    }

    #[test]
    fn a_holder_of_this_machine_is_dead_when_its_processes_are_or_when_its_lock_is_ours() {
        let own = |pid| Process { pid, start_ticks: 1 };
        let ours = Holder { daemon: own(9), keeper: Some(own(8)), lock: (1, 3), ..holder() };
        assert_eq!(holder().life(&ours, |_| true), Life::Lives);
        assert_eq!(
            holder().life(&ours, |process| process == KEEPER),
            Life::Lives,
            "it starts the next daemon"
        );
        assert_eq!(holder().life(&ours, |_| false), Life::Gone);
        // The daemon before this one, of the same keeper; or any before this one in the same state directory.
        assert_eq!(holder().life(&Holder { keeper: Some(KEEPER), ..ours.clone() }, |_| true), Life::Gone);
        let contained = Holder { pid_namespace: "pid:[2]".into(), ..ours.clone() };
        assert_eq!(holder().life(&contained, |_| false), Life::Unknown, "its numbers mean nothing here");
        assert_eq!(holder().life(&Holder { lock: (1, 2), ..contained }, |_| true), Life::Gone);
        let elsewhere = Holder { boot: "b1".into(), lock: (1, 2), ..ours };
        assert_eq!(holder().life(&elsewhere, |_| false), Life::Unknown, "numbers of another machine");
    }

    #[tokio::test]
    async fn a_start_that_is_told_to_end_gives_back_what_it_took_and_nobody_elsewhere_waits() {
        let folder = tempfile::tempdir().unwrap();
        let state_dir = StateDir::take(&folder.path().join("state"), None).unwrap();
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let sign = Sign::default();
        let alone = Alone::take(&store, "a", None, &state_dir, false, &sign).await.unwrap();
        // As with the future of a start that reads Tier-3.
        drop(alone);
        let mut elsewhere = StoreLease::in_folder(FOLDER, Arc::clone(&store), "b".to_owned(), 2, TIMES);
        let now = Instant::now();
        assert!(matches!(elsewhere.try_acquire(now).await.unwrap(), Turn::Theirs { .. }));
        sign.give_back().await;
        assert!(matches!(elsewhere.try_acquire(now).await.unwrap(), Turn::Ours(_)));
        // Once: what another has by now stays with it.
        sign.give_back().await;
        elsewhere.renew(now).await.unwrap();
    }

    #[test]
    fn a_process_is_told_from_a_later_one_of_its_number() {
        let pid = std::process::id();
        let start_ticks = start_ticks(pid).unwrap();
        assert!(runs(Process { pid, start_ticks }) && !runs(Process { pid, start_ticks: start_ticks + 1 }));
        assert!(!runs(Process { pid: u32::MAX, start_ticks }));
    }

    #[test]
    fn the_refusal_says_how_two_nodes_are_joined() {
        let text = serde_json::to_string(&holder()).unwrap();
        let refused = refusal(&text, "file:///t3").to_string();
        for part in ["node a on host h (process 7)", "file:///t3", "--coordinator", "--take-over"] {
            assert!(refused.contains(part), "{part}: {refused}");
        }
        assert!(refusal("{}", "s3://b/p").to_string().contains("another ckptd"));
    }
}

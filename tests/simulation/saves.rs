//! Saves over nodes: what a job closed is committed whole, is served from what survives, and is never other bytes.
//!
//! Owns: the job, its readers, and what must hold. Does not own: the nodes (`machine`, `serving`), what goes wrong (`faults`), the judge
//! of markers (`tier3`).

use super::calls::{Calls, Inodes, split};
use super::etcd::Etcd;
use super::faults::Trouble;
use super::machine::{Machine, Running, TIER1_BYTES};
use super::tier3::{Files, Tier3};
use super::wire::Wire;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tidemark_namespace::FsError;
use tidemark_protocol::report::CheckpointState;
use tokio::time::Instant;

const SEED_ENV: &str = "TIDEMARK_SAVES_SEED";

/// Number of seeds of each kind of fault, without and with `TIDEMARK_LONG`.
const SEEDS: u64 = 8;
/// A daemon that is killed leaves two threads of this process behind.
const SEEDS_LONG: u64 = 500;

/// Nodes of a cluster, at least and at most, and of one cluster in [`MANY_ONE_IN`].
const NODES: (usize, usize) = (3, 5);
const MANY_NODES: (usize, usize) = (6, 9);
const MANY_ONE_IN: u64 = 8;
/// Saves of a job, and how many of them it keeps.
const STEPS: usize = 7;
const KEPT: usize = 5;
/// Ranks of which one is killed while it saves.
const KILLED_ONE_IN: usize = 40;
const READERS: usize = 2;

/// Sizes of files: some are sent in one message, some by pieces while they lie here.
const SMALL_BYTES: usize = 40 << 10;
const LARGE_BYTES: usize = 700 << 10;

/// Memory for few saves: what is committed has to give way.
const SHORT_BYTES: u64 = 8 << 20;
const IN_SHORT_MEMORY_BYTES: usize = 2 << 20;

/// How long a rank takes, at least and at most, to gather what the others wrote before it writes the index.
const GATHERS_MS: (u64, u64) = (20, 200);

/// How long all takes that is not lost to be committed, and served on every node, after the last fault.
const SETTLES: Duration = Duration::from_secs(180);

/// The longest job.
const JOB_MAX: Duration = Duration::from_secs(600);

/// How long a program tries again what its node cannot do now.
const TRIES: Duration = Duration::from_secs(40);
const TRIES_AGAIN: Duration = Duration::from_millis(500);

/// The life of each node's memory, counted.
type Lives = Vec<u64>;

/// A save that its job was told is closed.
#[derive(Debug, Clone)]
pub(super) struct Saved {
    files: Files,
    /// When it was written.
    lives: Lives,
    /// Whether a node was cut off meanwhile. Its changes give way to what others did, so such a save may stay undecided.
    is_cut: bool,
}

pub(super) struct World {
    rng: RefCell<fastrand::Rng>,
    pub(super) machines: Vec<Arc<Machine>>,
    inodes: Vec<Inodes>,
    pub(super) wire: Arc<Wire>,
    pub(super) tier3: Arc<Tier3>,
    began: Instant,
    pub(super) trouble: Trouble,
    /// Whether the job renames its saves into place.
    renames: bool,
    pub(super) lives: RefCell<Lives>,
    pub(super) saved: RefCell<BTreeMap<String, Saved>>,
    /// Saves that a coordinator said are replicated, and the lives at that moment.
    replicated: RefCell<BTreeMap<String, Lives>>,
    /// Cuts that have begun, and the number of those that are over.
    pub(super) cuts: Cell<(u64, u64)>,
    /// Saves that their job removed.
    removed: RefCell<BTreeSet<String>>,
    pub(super) ran: RefCell<Ran>,
}

/// Counts over histories.
#[derive(Debug, Default, Clone)]
pub(super) struct Ran {
    saves: u64,
    failed_saves: u64,
    removed: u64,
    replicated: u64,
    committed: u64,
    lost: u64,
    reads: u64,
    refused_reads: u64,
    /// Bytes in memory that gave way.
    reclaimed_bytes: u64,
    pub(super) faults: u64,
    messages: u64,
    simulated: Duration,
}

impl World {
    pub(super) fn new(seed: u64, trouble: Trouble) -> Rc<Self> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (least, most) = if seed.is_multiple_of(MANY_ONE_IN) { MANY_NODES } else { NODES };
        let nodes = rng.usize(least..=most);
        let breaks = if trouble == Trouble::Breaks { 25 } else { 0 };
        let tier1_bytes = if trouble == Trouble::Memory { SHORT_BYTES } else { TIER1_BYTES };
        let wire = Wire::new(rng.u64(..), breaks);
        let (etcd, tier3) = (Etcd::new(Arc::clone(&wire)), Tier3::new(Arc::clone(&wire)));
        let mut machine = |at: usize| {
            let ahead_ns = rng.i64(-super::CLOCKS_APART_NS..=super::CLOCKS_APART_NS);
            let (name, life) = (format!("n{}", at + 1), 100 + at as u64);
            Machine::new(&name, &wire, &etcd, Some(&tier3), tier1_bytes, (life, ahead_ns))
        };
        let machines: Vec<_> = (0..nodes).map(&mut machine).collect();
        Rc::new(Self {
            rng: RefCell::new(rng),
            inodes: machines.iter().map(|_| Inodes::default()).collect(),
            machines,
            wire,
            tier3,
            began: Instant::now(),
            trouble,
            renames: seed % 3 == 2,
            lives: RefCell::new(vec![0; nodes]),
            saved: RefCell::default(),
            replicated: RefCell::default(),
            cuts: Cell::default(),
            removed: RefCell::default(),
            ran: RefCell::default(),
        })
    }

    pub(super) fn below(&self, end: usize) -> usize {
        self.rng.borrow_mut().usize(..end)
    }

    pub(super) fn some(&self, from_ms: u64, to_ms: u64) -> Duration {
        Duration::from_millis(self.rng.borrow_mut().u64(from_ms..to_ms))
    }

    fn bytes(&self) -> Vec<u8> {
        let mut rng = self.rng.borrow_mut();
        let most = match rng.u8(..4) {
            _ if self.trouble == Trouble::Memory => IN_SHORT_MEMORY_BYTES,
            0 => LARGE_BYTES,
            _ => SMALL_BYTES,
        };
        let mut bytes = vec![0; rng.usize(1..most)];
        rng.fill(&mut bytes);
        bytes
    }

    /// Carries out a program's call on a node; none if its daemon ends meanwhile.
    async fn on<T>(
        &self,
        at: usize,
        call: impl AsyncFn(Calls<'_>) -> Result<T, FsError>,
    ) -> Option<Result<T, FsError>> {
        let machine = &self.machines[at];
        let running: Arc<Running> = machine.running()?;
        let calls = Calls { running: &running, inodes: &self.inodes[at] };
        tokio::select! {
            done = call(calls) => Some(done),
            () = machine.ended(&running) => None,
        }
    }

    /// Makes a directory, which may be there.
    pub(super) async fn make_directory(&self, at: usize, path: &str) -> bool {
        let until = Instant::now() + TRIES;
        loop {
            let made = self.on(at, async |calls| calls.mkdir(path, 1).await).await;
            match made {
                Some(Ok(_) | Err(FsError::Exists)) => return true,
                _ if Instant::now() > until => return false,
                _ => tokio::time::sleep(TRIES_AGAIN).await,
            }
        }
    }

    /// Saves with a rank on each of these nodes, and returns whether every rank was told that its file is closed. The first rank gathers
    /// what the others wrote. If `renames`, it gives the directory its name afterwards, as torchtitan does.
    pub(super) async fn save(&self, path: &str, ranks: &[usize], renames: bool) -> Option<Saved> {
        let (above, name) = split(path);
        let place = if renames { format!("{above}/tmp_{name}") } else { path.to_owned() };
        if !self.make_directory(ranks[0], &place).await {
            return None;
        }
        let (lives, (begun, healed)) = (self.lives.borrow().clone(), self.cuts.get());
        let shards: Vec<_> = ranks.iter().map(|rank| (format!("__{rank}_0.distcp"), self.bytes())).collect();
        let written = shards.iter().zip(ranks).map(|((name, bytes), rank)| {
            let (file, dies) = (format!("{place}/{name}"), self.is_killed());
            let writes = async move |calls: Calls<'_>| calls.write_file(&file, bytes, dies).await;
            async move { self.on(*rank, writes).await?.ok().filter(|()| !dies) }
        });
        for written in futures::future::join_all(written).await {
            written?;
        }
        // The ranks come to a barrier, and one of them gathers what the others wrote.
        let gathers = self.wire.delay() + self.wire.delay() + self.some(GATHERS_MS.0, GATHERS_MS.1);
        tokio::time::sleep(gathers).await;
        let index = metadata(shards.iter().map(|(name, bytes)| (name.as_str(), bytes.len())));
        let mut files: Files = shards.into_iter().collect();
        files.insert(".metadata".to_owned(), index.clone());
        // From the close on, before its caller hears of it.
        self.tier3.saves(&place, path, &files);
        let file = format!("{place}/.metadata");
        self.on(ranks[0], async |calls| calls.write_file(&file, &index, false).await).await?.ok()?;
        if renames {
            self.on(ranks[0], async |calls| calls.rename(&place, path, true).await).await?.ok()?;
        }
        let is_cut = begun != healed || self.cuts.get().0 != begun;
        Some(Saved { files, lives, is_cut })
    }

    /// Draws whether a rank is killed while it saves. What it leaves stays in memory, in which there has to be room.
    fn is_killed(&self) -> bool {
        self.trouble != Trouble::Memory && self.below(KILLED_ONE_IN) == 0
    }

    /// Removes what there is of a save that failed, as a job does that goes on without it.
    async fn clear(&self, path: &str) {
        let (above, name) = split(path);
        for place in [path.to_owned(), format!("{above}/tmp_{name}")] {
            for rank in 0..self.machines.len() {
                let file = format!("{place}/__{rank}_0.distcp");
                let _ = self.on(0, async |calls| calls.remove(&file, false).await).await;
            }
            let _ = self.on(0, async |calls| calls.remove(&format!("{place}/.metadata"), false).await).await;
            let _ = self.on(0, async |calls| calls.remove(&place, true).await).await;
        }
    }

    /// Removes a save, on any node. Nothing is asked of the save from then on, unless all of it is removed.
    async fn remove(&self, path: &str) {
        let Some(save) = self.saved.borrow_mut().remove(path) else { return };
        let at = self.below(self.machines.len());
        for name in save.files.keys() {
            let file = format!("{path}/{name}");
            if !matches!(self.on(at, async |calls| calls.remove(&file, false).await).await, Some(Ok(_))) {
                return;
            }
        }
        if self.trouble == Trouble::Removals {
            // Before the directory goes: that waits for etcd.
            self.kill_coordinator().await;
        }
        let until = Instant::now() + TRIES;
        loop {
            match self.on(at, async |calls| calls.remove(path, true).await).await {
                Some(Ok(_)) => {
                    self.removed.borrow_mut().insert(path.to_owned());
                    return;
                }
                _ if Instant::now() > until => return,
                _ => tokio::time::sleep(TRIES_AGAIN).await,
            }
        }
    }

    /// Notes what coordinators say is replicated, and checks that the newest committed save never goes back.
    async fn watch(&self, is_over: &Cell<bool>) {
        let mut newest = 0;
        while !is_over.get() {
            tokio::time::sleep(Duration::from_millis(100)).await;
            for machine in &self.machines {
                let Some(serving) = machine.running().and_then(|running| running.serving.clone()) else {
                    continue;
                };
                if !serving.node.shared().decides() {
                    continue;
                }
                let lives = self.lives.borrow().clone();
                let rows = tokio::time::timeout(Duration::from_secs(1), serving.node.list(Vec::new(), false));
                let rows = rows.await.ok().flatten().unwrap_or_default();
                let committed = rows.iter().filter(|row| row.state == CheckpointState::Committed);
                let steps = committed.filter_map(|row| row.path.rsplit('_').next()?.parse().ok());
                let last: usize = steps.max().unwrap_or(0);
                // A coordinator that has just begun may not have read Tier-3 yet.
                let is_removed = !self.saved.borrow().contains_key(&format!("job/step_{newest}"));
                let may_be_older = last == 0 || is_removed;
                assert!(
                    may_be_older || last >= newest,
                    "step {newest} was committed, and now {last} is the newest"
                );
                newest = newest.max(last);
                let replicated = rows.into_iter().filter(|row| row.state == CheckpointState::Replicated);
                self.replicated.borrow_mut().extend(replicated.map(|row| (row.path, lives.clone())));
            }
        }
    }

    async fn job(&self) {
        let ranks: Vec<_> = (0..self.machines.len()).collect();
        for step in 1..=STEPS {
            let path = format!("job/step_{step}");
            match self.save(&path, &ranks, self.renames).await {
                Some(saved) => {
                    self.ran.borrow_mut().saves += 1;
                    self.saved.borrow_mut().insert(path, saved);
                }
                None => {
                    self.ran.borrow_mut().failed_saves += 1;
                    if self.trouble == Trouble::Memory {
                        self.clear(&path).await;
                    }
                }
            }
            if step > KEPT {
                self.remove(&format!("job/step_{}", step - KEPT)).await;
            }
            tokio::time::sleep(self.some(300, 4000)).await;
        }
    }

    /// Reads what was saved, on any node. Bytes that are served are right.
    async fn reader(&self, is_over: &Cell<bool>) {
        while !is_over.get() {
            tokio::time::sleep(self.some(100, 1500)).await;
            let saved: Vec<_> = {
                let saved = self.saved.borrow();
                let files = |(path, saved): (&String, &Saved)| {
                    let path = path.clone();
                    let of = |(name, bytes): (&String, &Vec<u8>)| (format!("{path}/{name}"), bytes.clone());
                    saved.files.iter().map(of).collect::<Vec<_>>()
                };
                saved.iter().flat_map(files).collect()
            };
            if saved.is_empty() {
                continue;
            }
            let (path, bytes) = &saved[self.below(saved.len())];
            let at = self.below(self.machines.len());
            // Refused is what nobody can serve now.
            let _ = self.read(at, path, bytes).await;
        }
    }

    /// Reads a file. The error says why it is not served.
    async fn read(&self, at: usize, path: &str, bytes: &[u8]) -> Result<(), String> {
        let read = match self.on(at, async |calls| calls.read_file(path).await).await {
            Some(Ok(read)) => read,
            refused => {
                self.ran.borrow_mut().refused_reads += 1;
                return Err(
                    refused.map_or_else(|| "its daemon ended".to_owned(), |refused| format!("{refused:?}"))
                );
            }
        };
        assert!(
            read == bytes,
            "{path} on node {at}: {} bytes are served, which are not the {} saved",
            read.len(),
            bytes.len()
        );
        self.ran.borrow_mut().reads += 1;
        Ok(())
    }

    /// Waits until everything is committed and served that has not been lost.
    pub(super) async fn end(&self) {
        self.wire.calm();
        let until = Instant::now() + SETTLES;
        loop {
            let left = self.left().await;
            if left.is_empty() {
                return;
            }
            if Instant::now() > until {
                panic!("all is quiet for {SETTLES:?}, and still: {left:#?}\n{}", self.told().await);
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// Returns what each node says of the saves.
    async fn told(&self) -> String {
        let mut told = String::new();
        for machine in &self.machines {
            let Some(serving) = machine.running().and_then(|running| running.serving.clone()) else {
                continue;
            };
            let rows = serving.node.list(Vec::new(), true).await.unwrap_or_default();
            let problems = serving.node.standing().await.map(|standing| standing.problems);
            told += &format!("{}: {problems:#?}\n", machine.name);
            for row in rows {
                told += &format!("  {} {:?} {:?} {:?}\n", row.path, row.state, row.evidence, row.copies);
            }
            for event in serving.node.shared().events.since(0) {
                told += &format!("  {event:?}\n");
            }
        }
        told
    }

    /// Returns what is still to be committed, or not served.
    async fn left(&self) -> Vec<String> {
        let committed: BTreeSet<_> = self.tier3.committed().into_iter().collect();
        let lives = self.lives.borrow().clone();
        let (mut left, mut lost) = (Vec::new(), 0);
        let saved = self.saved.borrow().clone();
        for (path, save) in &saved {
            let is_committed = committed.contains(path);
            // The loss of one node does no harm once all was replicated.
            let ended =
                |before: &Lives| before.iter().zip(&lives).filter(|(before, now)| before != now).count();
            let replicated = self.replicated.borrow().get(path).is_some_and(|lives| ended(lives) <= 1);
            if !is_committed && ended(&save.lives) > 0 && !replicated {
                lost += 1;
                continue;
            }
            if !is_committed && !save.is_cut {
                left.push(format!("{path} is not committed"));
                continue;
            }
            for at in 0..self.machines.len() {
                for (name, bytes) in &save.files {
                    let path = format!("{path}/{name}");
                    if let Err(why) = self.read(at, &path, bytes).await {
                        left.push(format!("{path} is not served on node {at}: {why}"));
                    }
                }
            }
        }
        let removed = self.removed.borrow().clone();
        for path in &removed {
            for at in 0..self.machines.len() {
                let found = self.on(at, async |calls| calls.find(path).await).await;
                if !matches!(found, Some(Err(FsError::NotFound))) {
                    left.push(format!("{path} was removed, and is back on node {at}: {found:?}"));
                }
            }
        }
        let serving = self.machines.iter().filter_map(|machine| machine.running()?.serving.clone());
        let reclaimed = serving.map(|serving| serving.node.shared().metrics.reclaim_bytes.get());
        let mut ran = self.ran.borrow_mut();
        ran.reclaimed_bytes = reclaimed.sum();
        (ran.committed, ran.lost) = (committed.len() as u64, lost);
        (ran.removed, ran.replicated) = (removed.len() as u64, self.replicated.borrow().len() as u64);
        left
    }
}

/// Returns a `.metadata` that lists these files with their sizes, as pickle protocol 2 writes it.
fn metadata<'a>(files: impl Iterator<Item = (&'a str, usize)>) -> Vec<u8> {
    let number = |of: usize| u32::try_from(of).expect("files of tests are small").to_le_bytes();
    let text = |text: &str| [&b"X"[..], &number(text.len()), text.as_bytes()].concat();
    let mut pickle = b"\x80\x02".to_vec();
    for (name, size_bytes) in files {
        pickle.extend(b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}(");
        let named = [text("relative_path"), text(name), text("offset"), b"K\x00".to_vec(), text("length")];
        pickle.extend(named.concat());
        pickle.extend([&b"J"[..], &number(size_bytes), b"ub"].concat());
    }
    pickle.push(b'.');
    pickle
}

/// Runs a history on a simulated clock.
pub(super) fn on_simulated_clock<T>(history: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .max_blocking_threads(1)
        .build()
        .expect("a runtime starts");
    tokio::task::LocalSet::new().block_on(&runtime, history)
}

/// Runs one history.
fn run(seed: u64, trouble: Trouble) -> Ran {
    on_simulated_clock(async {
        let world = World::new(seed, trouble);
        world.machines.iter().for_each(Machine::start);
        assert!(world.make_directory(0, "job").await, "the cluster does not begin");
        let is_over = Rc::new(Cell::new(false));
        let mut programs = tokio::task::JoinSet::new();
        for _ in 0..READERS {
            let (world, is_over) = (Rc::clone(&world), Rc::clone(&is_over));
            programs.spawn_local(async move { world.reader(&is_over).await });
        }
        {
            let (world, is_over) = (Rc::clone(&world), Rc::clone(&is_over));
            programs.spawn_local(async move { world.watch(&is_over).await });
        }
        {
            let world = Rc::clone(&world);
            programs.spawn_local(async move { world.go_wrong().await });
        }
        let begins = tokio::time::timeout(JOB_MAX, world.job());
        begins.await.expect("a job ends");
        is_over.set(true);
        while let Some(ended) = programs.join_next().await {
            ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        }
        world.end().await;
        world.machines.iter().for_each(|machine| machine.end());
        world.tier3.assert_right();
        let mut ran = world.ran.borrow().clone();
        (ran.messages, ran.simulated) = (world.wire.messages(), world.began.elapsed());
        ran
    })
}

#[test]
fn what_is_saved_over_nodes_is_committed_whole_and_served_right() {
    let only = std::env::var(super::TROUBLE_ENV).unwrap_or_default();
    let troubles =
        Trouble::ALL.into_iter().filter(|trouble| only.is_empty() || only == format!("{trouble:?}"));
    let one = std::env::var(SEED_ENV).ok().map(|seed| seed.parse::<u64>().expect("a seed is a number"));
    let seeds = if std::env::var_os("TIDEMARK_LONG").is_some() { SEEDS_LONG } else { SEEDS };
    for trouble in troubles {
        let mut all = Ran::default();
        for seed in one.map_or(0..seeds, |seed| seed..seed + 1) {
            println!(
                "{trouble:?}, seed {seed}: again with {SEED_ENV}={seed} {}={trouble:?}",
                super::TROUBLE_ENV
            );
            let ran = run(seed, trouble);
            all.saves += ran.saves;
            all.failed_saves += ran.failed_saves;
            all.removed += ran.removed;
            all.replicated += ran.replicated;
            all.committed += ran.committed;
            all.lost += ran.lost;
            all.reads += ran.reads;
            all.refused_reads += ran.refused_reads;
            all.reclaimed_bytes += ran.reclaimed_bytes;
            all.faults += ran.faults;
            all.messages += ran.messages;
            all.simulated += ran.simulated;
        }
        println!("{trouble:?}: {all:?}");
        assert_eq!(all.faults > 0, trouble.strikes(), "{trouble:?} happens where it should");
        assert!(trouble != Trouble::Memory || all.reclaimed_bytes > 0, "memory is never short");
        assert!(all.committed > 0 && all.reads > 0, "{trouble:?}: nothing was saved");
        assert!(2 * all.replicated > all.committed, "{trouble:?}: copies are rarely complete");
    }
}

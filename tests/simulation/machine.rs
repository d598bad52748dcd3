//! A node: its memory, and the daemon that runs on it. The daemon is the product's, from its names to its catalog.
//!
//! Owns: starting, killing and starting again; the steps by which a node follows a coordinator or becomes one, after `ckptd`'s. Does not
//! own: what programs call (`calls`), what a daemon does about bytes and checkpoints (`serving`), which a history of names alone leaves out.

use super::etcd::{Etcd, Log};
use super::serving::Serving;
use super::tier3::Tier3;
use super::wire::Wire;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidemark_control::catalog::{Catalog, Legacy, TakenUp, Terms};
use tidemark_engine::cluster::{Cluster, NodeService, Presence, Seat, follow};
use tidemark_engine::node::Recovered;
use tidemark_namespace::{Clock, Namespace, NamespaceSettings};
use tidemark_protocol::id::{Epoch, Incarnation, StartId};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::label::Labels;
use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};
use tidemark_transport::{Address, Peer};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Memory of a node: some saves.
pub(super) const TIER1_BYTES: u64 = 64 << 20;

/// Size of each file of the journal: some thousand changes.
const JOURNAL_BYTES: u64 = 512 << 10;

/// Interval at which a node looks at the lease, and the pause before a request to etcd is repeated, as `ckptd`'s.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const LOAD_AGAIN: Duration = Duration::from_millis(100);

/// How long a coordinator decides after it sent its last renewal, and the interval between renewals, as `ckptd`'s.
const TERM: Duration = Duration::from_secs(2);
const RENEW_EVERY: Duration = Duration::from_millis(500);

/// Beginning of the clocks, in nanoseconds since 1970.
const CLOCKS_BEGIN_NS: i64 = 1_700_000_000_000_000_000;

/// A node of the cluster.
pub(super) struct Machine {
    pub(super) name: String,
    wire: Arc<Wire>,
    etcd: Arc<Etcd>,
    /// Where saves go; none in a history of names alone.
    tier3: Option<Arc<Tier3>>,
    tier1_bytes: u64,
    ahead_ns: i64,
    memory: Mutex<Memory>,
    running: watch::Sender<Option<Arc<Running>>>,
}

/// What outlives the daemon.
struct Memory {
    settings: NamespaceSettings,
    tier1_settings: Tier1Settings,
    tier1: Arc<Tier1>,
    starts: u64,
    _folder: tempfile::TempDir,
}

/// A daemon.
pub(super) struct Running {
    pub(super) namespace: Arc<Namespace>,
    pub(super) cluster: Arc<Cluster>,
    pub(super) serving: Option<Arc<Serving>>,
    peer: Peer,
    tasks: Mutex<JoinSet<()>>,
}

impl Memory {
    fn new(incarnation: u64, ahead_ns: i64, size_bytes: u64) -> Self {
        let folder = tempfile::Builder::new().prefix("tidemark-simulation-").tempdir_in("/dev/shm");
        let folder = folder.expect("there is memory for a test");
        let medium = MediumChoice::Directory(folder.path().to_path_buf());
        let tier1_settings = Tier1Settings { size_bytes, ballast: false, medium };
        let tier1 = Tier1::open(tier1_settings.clone());
        let began = Instant::now();
        let clock = Clock(Arc::new(move || {
            let passed = i64::try_from(began.elapsed().as_nanos()).expect("no history lasts for centuries");
            CLOCKS_BEGIN_NS + ahead_ns + passed
        }));
        let settings = NamespaceSettings {
            journal_bytes: Some(JOURNAL_BYTES),
            clock,
            ..NamespaceSettings::new(Incarnation(incarnation))
        };
        let tier1 = tier1.expect("a folder in memory opens");
        Self { settings, tier1_settings, tier1, starts: 0, _folder: folder }
    }

    /// Makes the tree, or goes on with the one that a killed daemon left.
    fn namespace(&mut self, has_bytes: bool) -> Arc<Namespace> {
        self.starts += 1;
        let settings = self.settings.clone();
        if self.starts == 1 {
            return Namespace::new(settings, Arc::clone(&self.tier1)).expect("memory is there");
        }
        if !has_bytes {
            let recovered = Namespace::recover(settings, Arc::clone(&self.tier1), true, &mut |_| None);
            return recovered.expect("a journal of our own is read");
        }
        let kept = self.tier1.kept_mounts().expect("a folder is kept");
        let next = Tier1::take_over(self.tier1_settings.clone(), kept).expect("a folder is taken over");
        // A daemon that was killed gives nothing back.
        std::mem::forget(std::mem::replace(&mut self.tier1, Arc::clone(&next)));
        let recovered =
            Namespace::recover(settings, Arc::clone(&next), false, &mut |number| next.adopt(number));
        next.adopt_rest();
        recovered.expect("a journal of our own is read")
    }
}

impl Machine {
    pub(super) fn new(
        name: &str,
        wire: &Arc<Wire>,
        etcd: &Arc<Etcd>,
        tier3: Option<&Arc<Tier3>>,
        tier1_bytes: u64,
        (incarnation, ahead_ns): (u64, i64),
    ) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            wire: Arc::clone(wire),
            etcd: Arc::clone(etcd),
            tier3: tier3.cloned(),
            tier1_bytes,
            ahead_ns,
            memory: Mutex::new(Memory::new(incarnation, ahead_ns, tier1_bytes)),
            running: watch::Sender::new(None),
        })
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the daemon, if one runs.
    pub(super) fn running(&self) -> Option<Arc<Running>> {
        self.running.borrow().clone()
    }

    /// Waits until this daemon has ended.
    pub(super) async fn ended(&self, running: &Arc<Running>) {
        let is_other = |now: &Option<Arc<Running>>| now.as_ref().is_none_or(|now| !Arc::ptr_eq(now, running));
        // The sender lives as long as this does.
        let _ = self.running.subscribe().wait_for(is_other).await;
    }

    /// Starts the daemon.
    pub(super) fn start(self: &Arc<Self>) {
        let (namespace, tier1, settings, starts) = {
            let mut memory = self.memory();
            let namespace = memory.namespace(self.tier3.is_some());
            (namespace, Arc::clone(&memory.tier1), memory.settings.clone(), memory.starts)
        };
        let incarnation = settings.incarnation;
        let node = self.name.parse().expect("it is a node's name");
        let (life, start) = (NodeLife { node, incarnation }, StartId(starts));
        let runtime = tokio::runtime::Handle::current();
        let cluster = Cluster::new(life, start, Arc::clone(&namespace), runtime);
        let peer = Peer { node: self.name.clone(), incarnation: incarnation.0, start: start.0 };
        let service = NodeService::new(Arc::clone(&cluster));
        let link = self.wire.join(peer.clone(), Arc::clone(&service) as Arc<_>);
        cluster.connect(Arc::clone(&link));
        let mut tasks = JoinSet::new();
        let serving = self.tier3.as_ref().map(|tier3| {
            let (store, clock) = (tier3.at(&peer), settings.clock.clone());
            Serving::begin((&cluster, &service, link), (tier1, clock), store, &mut tasks)
        });
        let presence = Arc::new(Presence {
            address: self.name.clone(),
            labels: Labels::default(),
            version: "simulated".to_owned(),
            tier1: Box::new(|| (0, TIER1_BYTES)),
        });
        tasks.spawn(follow(Arc::clone(&cluster), Arc::clone(&presence)));
        let candidate = Candidate {
            machine: Arc::clone(self),
            cluster: Arc::clone(&cluster),
            serving: serving.clone(),
            presence,
            leading: Mutex::default(),
        };
        tasks.spawn(candidate.run());
        let running = Running { namespace, cluster, serving, peer, tasks: Mutex::new(tasks) };
        self.running.send_replace(Some(Arc::new(running)));
    }

    /// Ends the daemon at once. Its memory stays.
    pub(super) fn kill(&self) {
        if let Some(running) = self.end_daemon()
            && running.serving.is_some()
        {
            // A daemon that is killed gives no memory back.
            std::mem::forget(Arc::clone(&running.namespace));
        }
    }

    fn end_daemon(&self) -> Option<Arc<Running>> {
        let running = self.running.send_replace(None)?;
        running.tasks.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
        self.wire.leave(&running.peer);
        if let Some(serving) = &running.serving {
            serving.node.stop();
        }
        Some(running)
    }

    /// Ends the daemon at once, and its memory: the node comes back as another life.
    pub(super) fn lose_power(&self, incarnation: u64) {
        self.end();
        *self.memory() = Memory::new(incarnation, self.ahead_ns, self.tier1_bytes);
    }

    /// Ends the daemon and its memory for good.
    pub(super) fn end(&self) {
        self.end_daemon();
        self.memory().tier1.end();
    }
}

/// A daemon that may become the coordinator: `ckptd`'s seat, without Tier-3.
struct Candidate {
    machine: Arc<Machine>,
    cluster: Arc<Cluster>,
    serving: Option<Arc<Serving>>,
    presence: Arc<Presence>,
    /// The catalog while this daemon coordinates.
    leading: Mutex<Option<Arc<Catalog>>>,
}

impl Candidate {
    async fn run(self) {
        let (name, etcd) = (self.machine.name.clone(), Arc::clone(&self.machine.etcd));
        loop {
            match etcd.holder(&name).await {
                Ok(Some((holder, epoch))) if holder == name => {
                    // An earlier daemon of this node had it, and died.
                    let _ = etcd.release(&name, epoch).await;
                }
                Ok(Some((node, epoch))) => {
                    if self.cluster.following.saw_epoch(epoch) {
                        self.cluster.sit(Seat::There(Address { address: node.clone(), node }));
                    }
                }
                Ok(None) => {
                    let sent = Instant::now();
                    if let Ok(Some(epoch)) = etcd.acquire(&name).await {
                        self.lead(epoch, sent).await;
                    }
                }
                Err(_) => {
                    if let Some(commander) = self.cluster.following.commander() {
                        self.cluster.sit(Seat::There(commander));
                    }
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Coordinates until the lease is lost.
    async fn lead(&self, epoch: Epoch, sent: Instant) {
        let mut reign = JoinSet::new();
        tokio::select! {
            () = self.keep(epoch, sent) => {}
            () = self.reign(epoch, &mut reign) => {}
        }
        reign.shutdown().await;
        *self.leading() = None;
        self.cluster.sit(Seat::Unknown);
        if let Some(serving) = &self.serving {
            serving.node.decide_no_more().await;
        }
    }

    fn leading(&self) -> MutexGuard<'_, Option<Arc<Catalog>>> {
        self.leading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Renews the lease until it is lost.
    async fn keep(&self, epoch: Epoch, mut sent: Instant) {
        let (name, etcd) = (&self.machine.name, &self.machine.etcd);
        loop {
            if let Some(catalog) = &*self.leading() {
                catalog.term.lasts_until(Some(sent + TERM));
            }
            tokio::time::sleep(RENEW_EVERY).await;
            let trying = Instant::now();
            let renewed = tokio::time::timeout_at(sent + TERM, etcd.renew(name, epoch)).await;
            match renewed {
                Ok(Ok(true)) => sent = trying,
                Ok(Ok(false)) | Err(_) => return,
                Ok(Err(_)) => {}
            }
        }
    }

    /// Takes the coordinator's role, and does its work until dropped.
    async fn reign(&self, epoch: Epoch, tasks: &mut JoinSet<()>) {
        let (name, etcd, cluster) = (&self.machine.name, &self.machine.etcd, &self.cluster);
        let stored = loop {
            match etcd.members(name).await {
                Ok(stored) => break stored,
                Err(_) => tokio::time::sleep(LOAD_AGAIN).await,
            }
        };
        let kept = loop {
            match etcd.load(name).await {
                Ok(kept) => break kept,
                Err(_) => tokio::time::sleep(LOAD_AGAIN).await,
            }
        };
        if let Some(serving) = &self.serving {
            serving.node.shared().drain.set_epoch(epoch, false);
        }
        let (legacy, presence) = (Legacy { stored, kept }, Arc::clone(&self.presence));
        let taken = legacy.take_up(cluster, epoch, presence, Terms::default(), ()).await;
        let (knows, TakenUp { catalog, before, is_complete }) = (taken.knows(), taken);
        *self.leading() = Some(Arc::clone(&catalog));
        cluster.sit(Seat::Here(Arc::clone(&catalog) as Arc<_>));
        if let Some(serving) = self.serving.as_ref().filter(|_| knows) {
            serving.node.decide_from_now_on(Recovered::names_only()).await;
        }
        let log = Arc::new(Log { etcd: Arc::clone(etcd), node: name.clone(), epoch });
        tasks.spawn(Arc::clone(&catalog).watch());
        tasks.spawn(Arc::clone(&catalog).keep(log, before.into_kept(), is_complete));
        tasks.spawn(Arc::clone(&catalog).tell_removed());
        let (read, serving) = (Arc::clone(&catalog), self.serving.clone());
        tasks.spawn(async move {
            read.announced().await;
            match serving {
                Some(serving) => serving.take_tier3_up(&read, knows).await,
                None if !knows => read.nodes_heard().await,
                None => {}
            }
            read.heard_tier3();
        });
        let mut changes = catalog.watch_stored();
        changes.mark_changed();
        while changes.changed().await.is_ok() {
            while etcd.store_members(name, epoch, catalog.stored()).await.is_err() {
                tokio::time::sleep(LOAD_AGAIN).await;
            }
        }
    }
}

//! The coordinator: it knows what every node has published, and decides what each may do without asking.
//!
//! | file | owns |
//! |---|---|
//! | `look` | answering for names; which nodes to ask first |
//! | `recall` | asking a node to publish, and to give directories back |
//! | `hear` | making every node publish its pending changes |
//! | `take` | taking publications in |
//! | `term` | the end of the term, after which nobody is answered |
//! | `roll` | the members, and which node keeps whose copies |
//! | `members` | joins, beats and verdicts, and what follows from them |
//! | `whereabouts` | which nodes have which bytes |
//! | `keep` | the catalog, kept in etcd, too |
//! | `removed` | notifying nodes of files that have no name any more |
//! | `succeed` | beginning after another coordinator, and which nodes are still to be heard then |
//!
//! Does not own: the tree itself, which is this node's namespace; decisions over checkpoints (the engine's node loop, which reads that
//! tree); the election of the coordinator (`lease`).
//!
//! A single mutex guards the facts about nodes and leases, and is never held while a node is asked.

mod hear;
mod keep;
mod look;
mod members;
mod recall;
mod removed;
mod roll;
mod succeed;
mod take;
mod term;
mod whereabouts;

pub use roll::Terms;
pub use term::Term;

use hear::Heard;
use keep::Keeping;
pub use keep::{CatalogLog, Step, StepError};
use look::Lookups;
use members::{ASKS_MAX, Outbox, Told};
use recall::Recalls;
use roll::{Now, Roll};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use succeed::Hearing;
pub use succeed::{Before, Legacy, TakenUp};
use take::{News, Taking};
use tidemark_engine::cluster::{Authority, Cluster, Presence};
use tidemark_protocol::cluster::clocks::Clocks;
use tidemark_protocol::cluster::leases::Leases;
use tidemark_protocol::cluster::readers::Readers;
use tidemark_protocol::cluster::wire::{self, NodeState, Published, ToCoordinator, WireError};
use tidemark_protocol::id::{Epoch, FileId};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::membership::{Life, MemberList};
use tidemark_protocol::report;
use tidemark_transport::{LinkErrorKind, Refusal};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;
use whereabouts::Locator;

/// How long to wait for a node that has to publish before another node is answered. After that the answer is that the state is unknown.
const NODE_DEADLINE: Duration = Duration::from_secs(5);

/// The coordinator of one epoch. Share it by `Arc`.
#[derive(Debug)]
pub struct Catalog {
    cluster: Arc<Cluster>,
    epoch: Epoch,
    started: Instant,
    /// The time for which this coordinator may answer.
    pub term: Term,
    /// The presence of the coordinator's own node.
    presence: Arc<Presence>,
    state: Mutex<State>,
    keeping: Keeping,
    counters: Counters,
    /// Counts changes of the members that are to be stored beside the lease.
    stored: watch::Sender<u64>,
    /// Wakes the loop: a node is to be asked or notified.
    woken: Notify,
    /// Wakes waiters of [`Catalog::doubted`]: a node follows a higher epoch.
    doubted: Notify,
    asking: Arc<Semaphore>,
    /// The last round of asking all nodes; locked during a round.
    last_heard: tokio::sync::Mutex<Option<Heard>>,
}

/// Numbers of answers, for people and for tests.
#[derive(Debug, Default)]
pub struct Counters {
    /// Answers about single names.
    pub looks: std::sync::atomic::AtomicU64,
    /// Answers with whole directories.
    pub lists: std::sync::atomic::AtomicU64,
    /// Publications taken in.
    pub publications: std::sync::atomic::AtomicU64,
    /// Times that a node was asked to publish or to give back before another node was answered.
    pub recalls: std::sync::atomic::AtomicU64,
}

#[derive(Debug)]
struct State {
    leases: Leases,
    readers: Readers,
    clocks: Clocks,
    roll: Roll,
    outbox: Outbox,
    told: Told,
    /// The last publication of each life.
    published: BTreeMap<NodeLife, u64>,
    /// The answer to the last publication of each life, for a node that sends it again.
    answers: BTreeMap<NodeLife, Published>,
    /// The last publication of each life that is kept in etcd.
    kept: BTreeMap<NodeLife, u64>,
    /// Lives whose last publication is not kept yet.
    unkept: BTreeSet<NodeLife>,
    hearing: Hearing,
    /// Lives that joined and have not published yet all that they did before, each with the paths of the directories that it moved.
    catching_up: BTreeMap<NodeLife, BTreeSet<Vec<u8>>>,
    /// Files of which a holder of a copy published more than the home has.
    unclaimed: BTreeMap<FileId, (News, NodeState)>,
}

impl Catalog {
    fn start(
        cluster: Arc<Cluster>,
        epoch: Epoch,
        presence: Arc<Presence>,
        terms: Terms,
        (published, hearing, is_complete): (BTreeMap<NodeLife, u64>, Hearing, bool),
    ) -> Arc<Self> {
        let started = Instant::now();
        let known = (is_complete && !hearing.knows_nothing()).then_some(epoch);
        cluster.namespace().catalog().becomes_catalog_of(known, &published, hearing.is_own());
        let now = Now { ms: 0, wall_ms: cluster.namespace().now_ns() / 1_000_000 };
        let state = State {
            leases: Leases::default(),
            readers: Readers::default(),
            clocks: Clocks::default(),
            roll: Roll::begin(epoch, &cluster.own_life(), terms, now),
            outbox: Outbox::default(),
            told: Told::default(),
            published,
            answers: BTreeMap::new(),
            kept: BTreeMap::new(),
            unkept: BTreeSet::new(),
            hearing,
            catching_up: BTreeMap::new(),
            unclaimed: BTreeMap::new(),
        };
        let catalog = Arc::new(Self {
            cluster,
            epoch,
            started,
            term: Term::default(),
            presence,
            state: Mutex::new(state),
            keeping: Keeping::default(),
            counters: Counters::default(),
            stored: watch::Sender::new(0),
            woken: Notify::new(),
            doubted: Notify::new(),
            asking: Arc::new(Semaphore::new(ASKS_MAX)),
            last_heard: tokio::sync::Mutex::default(),
        });
        catalog.begin();
        {
            let mut state = catalog.lock();
            // Few members are notified of the coordinator at once: a member that cannot reach the lease learns it only this way.
            if !state.roll.is_small() {
                state.told = Told::new(Arc::clone(state.roll.list()));
            }
        }
        catalog
    }

    /// Returns a receiver that changes with [`Self::stored`].
    #[must_use]
    pub fn watch_stored(&self) -> watch::Receiver<u64> {
        self.stored.subscribe()
    }

    /// Returns the members to be stored beside the lease, for the next coordinator. Costs a copy of all of them.
    #[must_use]
    pub fn stored(&self) -> MemberList {
        self.lock().roll.stored()
    }

    /// Returns the members that are still expected: the next coordinator awaits these if no lease keeps the list of all. Costs a copy of
    /// all of them.
    #[must_use]
    pub fn expected(&self) -> MemberList {
        self.lock().roll.expected_next()
    }

    /// Waits until a node reports that it follows a higher epoch. The report is no proof, but a reason to ask the lease at once. If there
    /// are several, the last counts. Cancel safe.
    pub async fn doubted(&self) {
        self.doubted.notified().await;
    }

    /// Returns the epoch in which this coordinator decides.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns the numbers of answers since the start.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    fn recalls(&self) -> Recalls<'_> {
        Recalls { catalog: self }
    }

    fn lookups(&self) -> Lookups<'_> {
        Lookups { catalog: self }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }
}

#[async_trait::async_trait]
impl Authority for Catalog {
    fn made(&self, path: &[u8]) -> bool {
        self.lock().leases.made(&self.cluster.life.node, path)
    }

    fn moved(&self, from: &[u8], to: &[u8], exchange: bool) {
        let leases = &mut self.lock().leases;
        if exchange {
            leases.removed(from);
            leases.removed(to);
        } else {
            leases.renamed(&self.cluster.life.node, from, to);
        }
    }

    fn removed(&self, path: &[u8]) {
        self.lock().leases.removed(path);
    }

    fn changed_here(&self, paths: &[&[u8]]) {
        self.recalls().after_own(paths);
    }

    async fn is_kept(&self) -> bool {
        self.is_kept_by_now().await
    }

    async fn hear_below(&self, path: &[u8]) -> bool {
        if self.hears_still() {
            return false;
        }
        let own = &self.cluster.life.node;
        let knowing = self.lock().leases.knowing_below(own, path, self.now());
        let told = knowing.iter().map(|node| self.recalls().of(node, &[], None, false));
        futures::future::join_all(told).await.iter().all(Result::is_ok)
    }

    async fn hear_all(&self) -> Vec<String> {
        self.hear_members().await
    }

    fn hears_still(&self) -> bool {
        Self::hears_still(self)
    }

    fn disconnected(&self, life: Life) {
        self.lost_connection(life);
    }

    fn nodes(&self) -> Vec<report::Node> {
        let own = &self.cluster.life.node;
        let mut rows = self.lock().roll.nodes(own);
        if let Some(row) = rows.iter_mut().find(|row| row.this) {
            (row.tier1_used_bytes, row.tier1_size_bytes) = (self.presence.tier1)();
        }
        rows
    }

    fn placement(&self) -> report::Placement {
        self.lock().roll.placement()
    }

    fn calls(&self) -> Vec<(&'static str, u64)> {
        let Counters { looks, lists, publications, recalls } = &self.counters;
        let words = [("look", looks), ("list", lists), ("publish", publications), ("recall", recalls)];
        words.map(|(word, count)| (word, count.load(Ordering::Relaxed))).to_vec()
    }

    async fn answer(&self, from: NodeLife, message: ToCoordinator) -> Result<Vec<u8>, Refusal> {
        // Before any wait for a lock, which is no part of the delivery.
        let arrived_ns = self.cluster.namespace().now_ns();
        // A join makes a node a member, and a beat carries the identity of its sender.
        let is_checked = !matches!(message, ToCoordinator::Join(_) | ToCoordinator::Beat(_));
        if is_checked && from != self.cluster.life {
            self.check_member(&from)?;
        }
        let answer = match message {
            ToCoordinator::Join(join) => wire::encode(&self.join(&from, join)?),
            ToCoordinator::Publish(publication) => {
                wire::encode(&Taking { catalog: self }.take(&from, &publication).await?)
            }
            ToCoordinator::Look(look) => wire::encode(&self.lookups().look(&from.node, &look).await?),
            ToCoordinator::List { path } => wire::encode(&self.lookups().list(&from.node, &path).await?),
            ToCoordinator::Where { file, failed } => {
                wire::encode(&Locator { catalog: self }.of(&from.node, file, &failed).await?)
            }
            ToCoordinator::Beat(beat) => wire::encode(&self.beat(&from, beat, arrived_ns)?),
            ToCoordinator::Members => self.lock().roll.encoded().and_then(|members| wire::encode(&members)),
            ToCoordinator::Copies(copies) => {
                Taking { catalog: self }.take_copies(&from, &copies);
                wire::encode(&())
            }
            ToCoordinator::Find { file } => wire::encode(&self.lookups().find(file)),
            ToCoordinator::Reported => {
                self.heard(&from);
                wire::encode(&())
            }
            ToCoordinator::Time { now_ns } => {
                self.lock().clocks.heard(from.incarnation, now_ns, arrived_ns);
                wire::encode(&self.cluster.namespace().now_ns())
            }
        };
        // Afterwards: what was read of the tree before this was read within the term.
        self.term.check(self.epoch)?;
        answer.map_err(|error: WireError| Refusal::new(LinkErrorKind::Invalid, error.to_string()))
    }
}

//! Brings one file's bytes from other nodes' memory into Tier-1, each chunk verified where it landed.
//!
//! Owns: asking several nodes at once, and the handling of a node with bad bytes. Does not own: which node has which copy
//! ([`Suppliers`]), the other nodes' answers (`replicate::serve`), further sources (`restorer`).

use crate::chunk::bytes::{Sink, Touched, blocking, chunk_bytes, landed_sums};
use crate::metrics::Metrics;
use futures::stream::{FuturesUnordered, StreamExt};
use std::collections::BTreeSet;
use std::fmt;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tidemark_namespace::ColdFile;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::layout::chunk_count;
use tidemark_protocol::replication::{Answer, BulkToken, Request, decode, encode};
use tidemark_tier1::{Backing, Growing};
use tidemark_transport::{Address, Link, Token};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Maximum number of nodes asked for one file at once: two fill a link, and the others replace nodes that fail.
pub const SUPPLIERS_AT_ONCE: usize = 4;
/// Chunks of one request: 16 MiB, as much as one connection has on its way. Much of so little is in the processor's cache when it
/// is hashed; with 64 MiB a restore was a tenth slower.
const BATCH_CHUNKS: usize = 2;
/// Maximum number of one node's batches under way: while some are hashed, the others are on the wire.
const BATCHES_AT_ONCE: usize = 4;
/// Longest wait for an answer. A supplier whose daemon was just restarted may have to verify the whole file first.
const ASK_DEADLINE: Duration = Duration::from_secs(20);
/// Pause between two questions about bytes that a node is bringing in.
const COMING_PAUSE: Duration = Duration::from_millis(20);

/// Longest time for which this node asks again, if the other lends to as many nodes as it may.
const BUSY_WAIT: Duration = Duration::from_secs(30);
/// Longest wait for the answer to the notice that a fetch has ended. A supplier that misses the notice finds out by itself.
const DONE_DEADLINE: Duration = Duration::from_secs(2);

/// The nodes that can be asked for bytes.
#[async_trait::async_trait]
pub trait Suppliers: Send + Sync + fmt::Debug {
    /// Finds the nodes that have a file's bytes, and returns the file as it is to be fetched. If its checksums are not known yet, waits,
    /// up to a limit, while another node seals it. `failed`: nodes that were asked in vain.
    async fn find(&self, cold: &ColdFile, _failed: &[Address]) -> ColdFile {
        cold.clone()
    }

    /// Returns other nodes that should have these sealed bytes, the nearest first.
    fn suppliers(&self, file: FileId, seal: SealNumber) -> Vec<Address>;

    /// Returns the link to these nodes.
    fn link(&self) -> Arc<dyn Link>;

    /// Records that a node sent bytes that differ from the seal. The node should verify its copy, and does not count as a supplier
    /// until it has.
    fn is_bad(&self, node: &str, file: FileId, seal: SealNumber, chunk: u64);
}

/// Other nodes' memory, once the suppliers are set.
#[derive(Debug)]
pub struct Nearby {
    /// Whether there is never another node to ask.
    alone: bool,
    suppliers: OnceLock<Arc<dyn Suppliers>>,
}

impl Nearby {
    /// Makes the value for a node without other nodes.
    #[must_use]
    pub fn alone() -> Self {
        Self { alone: true, suppliers: OnceLock::new() }
    }

    /// Makes the value for a node of a cluster, before its suppliers are set.
    #[must_use]
    pub fn expected() -> Self {
        Self { alone: false, suppliers: OnceLock::new() }
    }

    /// Whether no other node can come back with a file.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    /// Sets the suppliers that are asked before Tier-3 from now on.
    ///
    /// # Panics
    /// If it is called twice, or for a node without other nodes.
    pub fn ask(&self, suppliers: Arc<dyn Suppliers>) {
        assert!(!self.alone && self.suppliers.set(suppliers).is_ok(), "there is one cluster");
    }

    #[must_use]
    pub fn get(&self) -> Option<&Arc<dyn Suppliers>> {
        self.suppliers.get()
    }
}

/// A (file, seal) to fetch, with the checksums of its bytes.
#[derive(Debug, Clone)]
pub struct PeerPlan {
    /// The file's path, for messages.
    pub path: String,
    pub file: FileId,
    pub seal: SealNumber,
    pub size_bytes: u64,
    pub chunks: Arc<[Crc64]>,
}

/// The reason why the bytes did not come from other nodes.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    #[error("no other node has {path}")]
    Nobody { path: String },
    #[error("{left} of {chunks} chunks of {path} could not be had from other nodes: {why}")]
    Lacking { path: String, left: usize, chunks: usize, why: String },
    #[error("{path} is described by {chunks} checksums, but {size_bytes} bytes have {expected} chunks")]
    Geometry { path: String, chunks: usize, size_bytes: u64, expected: u64 },
    #[error("{path} cannot be written on this node")]
    Write { path: String, source: std::io::Error },
}

/// The chunks still to fetch, and the reasons why nodes did not supply them.
#[derive(Debug)]
struct Left {
    chunks: BTreeSet<u64>,
    /// Number of chunks for which a node is being asked.
    flying: usize,
    why: Vec<String>,
}

impl Left {
    fn is_done(&self) -> bool {
        self.chunks.is_empty() && self.flying == 0
    }
}

/// Fetches the whole of `plan` into `landing`, which is empty. If a node does not supply a chunk well, the next is asked for it.
///
/// Costs one hash per byte besides the transfer. After an error some good chunks may have landed, and nothing may be served. Dropping
/// the future stops the transfers; a write just about to begin may still land, and the memory lives until then.
///
/// # Errors
/// [`PeerError`]; a node that sent wrong bytes was reported to `suppliers` before.
pub async fn fetch_from_peers(
    suppliers: &Arc<dyn Suppliers>,
    plan: PeerPlan,
    landing: Arc<Backing>,
    metrics: Arc<Metrics>,
) -> Result<(), PeerError> {
    let expected = chunk_count(plan.size_bytes);
    if plan.chunks.len() as u64 != expected {
        let PeerPlan { path, size_bytes, chunks, .. } = plan;
        return Err(PeerError::Geometry { path, chunks: chunks.len(), size_bytes, expected });
    }
    let asked = suppliers.suppliers(plan.file, plan.seal);
    if asked.is_empty() {
        return Err(PeerError::Nobody { path: plan.path });
    }
    let sink = Sink::open(&landing, Touched::default())
        .map_err(|source| PeerError::Write { path: plan.path.clone(), source })?;
    let left = Arc::new(Mutex::new(Left { chunks: (0..expected).collect(), flying: 0, why: Vec::new() }));
    let fetch = |from: Address| {
        let source = Source {
            from,
            suppliers: Arc::clone(suppliers),
            plan: plan.clone(),
            landing: Arc::clone(&landing),
            _growing: landing.growing(),
            sink: Arc::clone(&sink),
            left: Arc::clone(&left),
            metrics: Arc::clone(&metrics),
        };
        Arc::new(source).fetch()
    };
    let mut asked = asked.into_iter();
    let mut running: FuturesUnordered<_> = asked.by_ref().take(SUPPLIERS_AT_ONCE).map(fetch).collect();
    let mut idle = Vec::new();
    while let Some(ended) = running.next().await {
        // Once the other nodes have supplied everything, a node that does not answer is not waited for.
        if lock(&left).is_done() {
            break;
        }
        match ended {
            Some(good) => idle.push(good),
            None => running.extend(asked.next().map(fetch)),
        }
        // A node may end well a moment before another fails: then it is asked for the chunks that the other left.
        if !lock(&left).chunks.is_empty() {
            running.extend(idle.drain(..).map(fetch));
        }
    }
    drop(running);
    let left = lock(&left);
    if left.is_done() {
        return Ok(());
    }
    let (path, chunks) = (plan.path, plan.chunks.len());
    Err(PeerError::Lacking { path, left: left.chunks.len() + left.flying, chunks, why: left.why.join("; ") })
}

fn lock(left: &Mutex<Left>) -> std::sync::MutexGuard<'_, Left> {
    left.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A node that is asked.
struct Source {
    from: Address,
    suppliers: Arc<dyn Suppliers>,
    plan: PeerPlan,
    landing: Arc<Backing>,
    /// Counts the file's space until the last lane has ended: a stopped lane may still write its next bytes.
    _growing: Growing,
    sink: Arc<Sink>,
    left: Arc<Mutex<Left>>,
    metrics: Arc<Metrics>,
}

impl Source {
    /// Takes chunks until none is left. Returns the node's address if it may be asked again.
    async fn fetch(self: Arc<Self>) -> Option<Address> {
        let link = self.suppliers.link();
        match self.all(&link).await {
            Ok(()) => Some(self.from.clone()),
            Err(why) => {
                tracing::warn!(path = %self.plan.path, node = %self.from.node, why, "a node does not supply a file");
                lock(&self.left).why.push(format!("{}: {why}", self.from.node));
                None
            }
        }
    }

    async fn ask(
        &self,
        link: &Arc<dyn Link>,
        request: Request,
        deadline: Duration,
    ) -> Result<Answer, String> {
        let body = encode(&request).map_err(|error| error.to_string())?;
        let answer = link.call(&self.from, body.into(), deadline).await.map_err(|error| error.to_string())?;
        decode(&answer).map_err(|error| error.to_string())
    }

    async fn all(self: &Arc<Self>, link: &Arc<dyn Link>) -> Result<(), String> {
        let (file, seal) = (self.plan.file, self.plan.seal);
        let asked = Instant::now();
        let BulkToken(token) = loop {
            match self.ask(link, Request::Pull { file, seal }, ASK_DEADLINE).await? {
                Answer::Granted { token, size_bytes } if size_bytes == self.plan.size_bytes => break token,
                Answer::Granted { size_bytes, .. } => {
                    return Err(format!(
                        "it has {size_bytes} bytes, and {} were sealed",
                        self.plan.size_bytes
                    ));
                }
                // The node answers this as long as it and its own source live.
                Answer::Coming => tokio::time::sleep(COMING_PAUSE).await,
                Answer::Busy if asked.elapsed() < BUSY_WAIT => tokio::time::sleep(COMING_PAUSE).await,
                Answer::Busy => return Err("it lends to too many others".to_owned()),
                _ => return Err("it does not have it".to_owned()),
            }
        };
        let result = self.lanes(link, Token::from_bytes(token)).await;
        let done = Request::Pulled { file, seal, token: BulkToken(token) };
        if let Err(why) = self.ask(link, done, DONE_DEADLINE).await {
            tracing::debug!(node = %self.from.node, why, "a supplier was not told that we are done");
        }
        result
    }

    /// Fetches several batches side by side, each in its own task: in one task a single core would receive them all.
    async fn lanes(self: &Arc<Self>, link: &Arc<dyn Link>, token: Token) -> Result<(), String> {
        let ended = Arc::new(AtomicBool::new(false));
        let mut lanes = JoinSet::new();
        for _ in 0..BATCHES_AT_ONCE {
            let (source, link, ended) = (Arc::clone(self), Arc::clone(link), Arc::clone(&ended));
            lanes.spawn(async move { source.batches(&link, token, &ended).await });
        }
        let mut result = Ok(());
        while let Some(lane) = lanes.join_next().await {
            // Chunks of a lane that did not end stay counted in `flying`, so that the file never counts as whole.
            let ended = lane.unwrap_or_else(|error| match error.try_into_panic() {
                Ok(panic) => panic::resume_unwind(panic),
                Err(_) => Err("this daemon ends".to_owned()),
            });
            result = result.and(ended);
        }
        result
    }

    /// Takes batch after batch until none is left, or until one has failed on any lane (`ended`).
    async fn batches(&self, link: &Arc<dyn Link>, token: Token, ended: &AtomicBool) -> Result<(), String> {
        while !ended.load(Ordering::Relaxed) {
            let batch: Vec<u64> = {
                let mut left = lock(&self.left);
                let batch: Vec<u64> = left.chunks.iter().take(BATCH_CHUNKS).copied().collect();
                batch.iter().for_each(|chunk| {
                    left.chunks.remove(chunk);
                });
                left.flying += batch.len();
                batch
            };
            if batch.is_empty() {
                break;
            }
            let mut missing: BTreeSet<u64> = batch.iter().copied().collect();
            let result = self.batch(link, token, &batch, &mut missing).await;
            let mut left = lock(&self.left);
            left.flying -= batch.len();
            left.chunks.extend(missing);
            if result.is_err() {
                ended.store(true, Ordering::Relaxed);
                return result;
            }
        }
        Ok(())
    }

    /// Fetches a batch, and removes the chunks that arrived well from `missing`.
    async fn batch(
        &self,
        link: &Arc<dyn Link>,
        token: Token,
        batch: &[u64],
        missing: &mut BTreeSet<u64>,
    ) -> Result<(), String> {
        let size_bytes = self.plan.size_bytes;
        let ranges: Vec<_> = batch.iter().map(|chunk| chunk_bytes(*chunk, size_bytes)).collect();
        let into: Arc<Sink> = Arc::clone(&self.sink);
        link.pull(&self.from, token, &ranges, into).await.map_err(|error| error.to_string())?;
        let (landing, chunks) = (Arc::clone(&self.landing), batch.to_vec());
        let found = blocking(move || landed_sums(&landing, &chunks, size_bytes))
            .await
            .map_err(|error| error.to_string())?;
        let mut bad = None;
        for (chunk, found) in found {
            let expected = usize::try_from(chunk).ok().and_then(|at| self.plan.chunks.get(at)).copied();
            if expected == Some(found) {
                missing.remove(&chunk);
                let range = chunk_bytes(chunk, size_bytes);
                self.metrics.fetch_peer_bytes.inc_by(range.end - range.start);
            } else {
                self.metrics.verify_mismatches.get_or_create(&[("copy", "peer")]).inc();
                self.suppliers.is_bad(&self.from.node, self.plan.file, self.plan.seal, chunk);
                bad = Some(format!(
                    "its chunk {chunk} has checksum {found}, expected {}",
                    expected.unwrap_or_default()
                ));
            }
        }
        if bad.is_some() {
            let (file, seal) = (self.plan.file, self.plan.seal);
            if let Err(why) = self.ask(link, Request::Suspect { file, seal }, ASK_DEADLINE).await {
                tracing::debug!(node = %self.from.node, why, "a node was not told that its copy is bad");
            }
        }
        match bad {
            Some(bad) => Err(bad),
            None if missing.is_empty() => Ok(()),
            None => Err(format!("{} of {} chunks did not arrive", missing.len(), batch.len())),
        }
    }
}

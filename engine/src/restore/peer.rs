//! Brings one file's bytes from other nodes' memory into Tier-1, each chunk verified where it landed.
//!
//! Owns: asking several nodes at once, and what is done about one that has bad bytes. Does not own: who has which copy
//! ([`Suppliers`]), what the others answer (`replicate::serve`), what is tried after that (`restorer`).

use crate::chunk::bytes::{Sink, Touched, blocking, chunk_bytes, landed_sums};
use crate::metrics::Metrics;
use futures::stream::{FuturesUnordered, StreamExt};
use std::collections::BTreeSet;
use std::fmt;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tidemark_namespace::ColdFile;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::layout::chunk_count;
use tidemark_protocol::replication::{Answer, BulkToken, Request, decode, encode};
use tidemark_tier1::{Backing, Growing};
use tidemark_transport::{Address, Link, Token};
use tokio::task::JoinSet;

/// Nodes that are asked for one file at once: two fill a link, the others are for those that fail.
pub const SUPPLIERS_AT_ONCE: usize = 4;
/// Chunks of one request: 16 MiB, what one connection has on its way, and so little that much of it is in the processor's cache when
/// it is hashed. With 64 MiB a restore was a tenth slower.
const BATCH_CHUNKS: usize = 2;
/// Batches of one node under way at once: while some are hashed, the others are on the wire.
const BATCHES_AT_ONCE: usize = 4;
/// A supplier may have to look at the whole file first, when its daemon was just restarted.
const ASK_DEADLINE: Duration = Duration::from_secs(20);
/// Between two questions about bytes that a node is bringing in.
const COMING_PAUSE: Duration = Duration::from_millis(20);

/// How long a node is asked again that lends to as many others as it may.
const BUSY_WAIT: Duration = Duration::from_secs(30);
/// Who has no time to hear that we are done will see for itself.
const DONE_DEADLINE: Duration = Duration::from_secs(2);

/// Who can be asked for bytes.
#[async_trait::async_trait]
pub trait Suppliers: Send + Sync + fmt::Debug {
    /// Finds out who has a file's bytes, and what they are where that is not known yet: waits, bounded, for a file that is being
    /// sealed elsewhere. The file as it is to be fetched. `failed`: who was asked for it in vain.
    async fn find(&self, cold: &ColdFile, _failed: &[Address]) -> ColdFile {
        cold.clone()
    }

    /// Other nodes that should have these sealed bytes, the nearest first.
    fn suppliers(&self, file: FileId, seal: SealNumber) -> Vec<Address>;

    /// The link to them.
    fn link(&self) -> Arc<dyn Link>;

    /// What that node sent is not what was sealed: it should look at its copy, and is not counted on until it has.
    fn is_bad(&self, node: &str, file: FileId, seal: SealNumber, chunk: u64);
}

/// Other nodes' memory, once somebody says where it is.
#[derive(Debug)]
pub struct Nearby {
    /// No other node is ever asked.
    alone: bool,
    suppliers: OnceLock<Arc<dyn Suppliers>>,
}

impl Nearby {
    /// Of a node that has no others beside it.
    #[must_use]
    pub fn alone() -> Self {
        Self { alone: true, suppliers: OnceLock::new() }
    }

    /// Of a node of several, before it has heard of them.
    #[must_use]
    pub fn expected() -> Self {
        Self { alone: false, suppliers: OnceLock::new() }
    }

    /// Whether no other node can come back with a file.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    /// From now on these are asked before Tier-3. Once.
    ///
    /// # Panics
    /// The second time.
    pub fn ask(&self, suppliers: Arc<dyn Suppliers>) {
        assert!(!self.alone && self.suppliers.set(suppliers).is_ok(), "there is one cluster");
    }

    #[must_use]
    pub fn get(&self) -> Option<&Arc<dyn Suppliers>> {
        self.suppliers.get()
    }
}

/// One (file, seal), with what its bytes must be.
#[derive(Debug, Clone)]
pub struct PeerPlan {
    /// For messages.
    pub path: String,
    pub file: FileId,
    pub seal: SealNumber,
    pub size_bytes: u64,
    pub chunks: Arc<[Crc64]>,
}

/// Why the bytes did not come from there.
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

/// What is still to be had, and why somebody did not give it.
#[derive(Debug)]
struct Left {
    chunks: BTreeSet<u64>,
    /// Chunks that somebody is being asked for.
    flying: usize,
    why: Vec<String>,
}

impl Left {
    fn is_done(&self) -> bool {
        self.chunks.is_empty() && self.flying == 0
    }
}

/// Fetches the whole of `plan` into `landing`, which is empty. Chunks that cannot be had well from one node are asked of the next.
///
/// Costs one hash per byte besides the transfer. On error some good chunks may have landed, and nothing may be served. Dropping the
/// future stops the transfers; what each was just about to write may still land, and the memory lives until then.
///
/// # Errors
/// [`PeerError`]; a node that sent wrong bytes has been named to `suppliers` then.
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
        // Who does not answer is not waited for when the others had it all.
        if lock(&left).is_done() {
            break;
        }
        match ended {
            Some(good) => idle.push(good),
            None => running.extend(asked.next().map(fetch)),
        }
        // A node that ends well may do so a moment before another fails: then it is asked for what that one left.
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

/// One node that is asked.
struct Source {
    from: Address,
    suppliers: Arc<dyn Suppliers>,
    plan: PeerPlan,
    landing: Arc<Backing>,
    /// A lane that is stopped may still write what it is about to: the file's space is counted until the last has ended.
    _growing: Growing,
    sink: Arc<Sink>,
    left: Arc<Mutex<Left>>,
    metrics: Arc<Metrics>,
}

impl Source {
    /// Takes chunks until none is left; itself, when it may be asked again.
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
                // It says so for as long as it lives and its own source does.
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

    /// Several batches side by side, each a task of its own: in one task a single core would receive them all.
    async fn lanes(self: &Arc<Self>, link: &Arc<dyn Link>, token: Token) -> Result<(), String> {
        let ended = Arc::new(AtomicBool::new(false));
        let mut lanes = JoinSet::new();
        for _ in 0..BATCHES_AT_ONCE {
            let (source, link, ended) = (Arc::clone(self), Arc::clone(link), Arc::clone(&ended));
            lanes.spawn(async move { source.batches(&link, token, &ended).await });
        }
        let mut result = Ok(());
        while let Some(lane) = lanes.join_next().await {
            // Chunks of a lane that did not come to its end fly for ever, and so the file is never taken for whole.
            let ended = lane.unwrap_or_else(|error| match error.try_into_panic() {
                Ok(panic) => panic::resume_unwind(panic),
                Err(_) => Err("this daemon ends".to_owned()),
            });
            result = result.and(ended);
        }
        result
    }

    /// Takes batch after batch until none is left, or until one of them `ended` badly.
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

    /// Takes what arrived well out of `missing`.
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

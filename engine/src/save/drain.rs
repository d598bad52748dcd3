//! State shared by all jobs that write to Tier-3.
//!
//! Owns: the writer's identity (node life and epoch), the bound on parts in flight, the pace, which runs are encoded. Does not own: the
//! objects' contents.

use crate::flight::Flight;
use crate::metrics::Metrics;
use crate::restore::joined::JoinedStore;
use crate::save::coders::Coders;
use crate::save::pace::Pace;
use crate::settings::CompressionSettings;
use bytes::Bytes;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tidemark_protocol::encoding::Codec;
use tidemark_protocol::format::is_document;
use tidemark_protocol::id::Epoch;
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::path::RunPath;
use tidemark_store::{Created, Operation, Probe, Store, StoreError, UploadLimits, raise_epoch};
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Maximum number of doubtful creates of one of our own objects. After the last the job fails, and the loop decides when to try
/// again.
const DOUBTS_MAX: u32 = 5;

/// First pause between two such creates, doubled each time.
const DOUBT_PAUSE: Duration = Duration::from_millis(50);

/// Interval at which a paced sender checks whether pacing was lifted: the last of the parts in flight may have seconds to wait.
const PACE_NAP_MAX: Duration = Duration::from_millis(50);

/// Maximum number of bytes read of an object in a document's place, to see whether it is a document: login pages are smaller. A larger
/// object counts as a document.
const THEIRS_BYTES: u64 = 1 << 20;

/// Maximum number of bytes of an object that is no document shown to people.
const SHOWN_BYTES: usize = 40;

/// Describes an object that is no document.
fn beginning(found: &[u8]) -> String {
    let shown = String::from_utf8_lossy(&found[..found.len().min(SHOWN_BYTES)]);
    format!("{} bytes that begin with {shown:?}", found.len())
}

/// The state that all jobs of one start of the daemon share.
#[derive(Debug)]
pub struct Drain {
    pub store: Arc<dyn Store>,
    pub life: NodeLife,
    epoch: AtomicU64,
    /// Whether Tier-3 has the epoch, which a newer coordinator would have raised there.
    raised: AtomicBool,
    pub limits: UploadLimits,
    /// Whether the store refuses a damaged part, or compares each with what it holds; otherwise every object is read back before it
    /// is prepared.
    part_checksums: AtomicBool,
    /// Whether the store lets exactly one of many creates of one key win.
    fencing: AtomicBool,
    pub metrics: Arc<Metrics>,
    /// Parts on their way, over all files.
    pub flight: Arc<Flight>,
    compression: CompressionSettings,
    pub(crate) coders: Coders,
    parts: Arc<Semaphore>,
    pace: Mutex<Pace>,
    started: Instant,
}

/// Whether one of our own objects is there with our bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    Ours,
    /// The key holds another document, or a damaged one, and it stays.
    Theirs,
}

/// The epoch that Tier-3 has: this drain's, or a newer coordinator's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Raised {
    Ours,
    Newer(Epoch),
}

impl Drain {
    /// Makes a drain that no job has used yet.
    pub fn new(
        store: Arc<dyn Store>,
        life: NodeLife,
        epoch: Epoch,
        limits: UploadLimits,
        probe: &Probe,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            store: JoinedStore::over(store),
            life,
            epoch: AtomicU64::new(epoch.0),
            raised: AtomicBool::new(true),
            limits,
            part_checksums: AtomicBool::new(probe.part_checksums),
            fencing: AtomicBool::new(probe.fencing),
            metrics,
            flight: Flight::new(limits.parts_in_flight),
            compression: CompressionSettings::default(),
            coders: Coders::new(),
            parts: Arc::new(Semaphore::new(limits.parts_in_flight)),
            pace: Mutex::new(Pace::new(Duration::ZERO)),
            started: Instant::now(),
        }
    }

    /// Returns the drain with these settings for encoding runs.
    #[must_use]
    pub fn with_compression(self, compression: CompressionSettings) -> Self {
        Self { compression, ..self }
    }

    /// Records the guarantees that this node's probe of the store found.
    pub fn learn(&self, probe: &Probe) {
        self.part_checksums.store(probe.part_checksums, Ordering::Release);
        self.fencing.store(probe.fencing, Ordering::Release);
    }

    /// Returns the field of this name.
    pub fn part_checksums(&self) -> bool {
        self.part_checksums.load(Ordering::Acquire)
    }

    /// Returns the field of this name.
    pub fn fencing(&self) -> bool {
        self.fencing.load(Ordering::Acquire)
    }

    /// Returns the coordinator's epoch in which writes are made.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// Sets the coordinator's epoch for all further writes. `raised`: Tier-3 has it.
    pub fn set_epoch(&self, epoch: Epoch, raised: bool) {
        self.epoch.fetch_max(epoch.0, Ordering::AcqRel);
        self.raised.store(raised, Ordering::Release);
    }

    /// Makes sure that Tier-3 has the epoch, before anything is written in it.
    ///
    /// # Errors
    /// The store is away. [`Raised::Newer`] is no error: the caller must stop.
    pub async fn make_sure_of_epoch(&self) -> Result<Raised, StoreError> {
        if self.raised.load(Ordering::Acquire) {
            return Ok(Raised::Ours);
        }
        let epoch = self.epoch();
        let highest = raise_epoch(self.store.as_ref(), epoch).await?;
        if highest > epoch {
            return Ok(Raised::Newer(highest));
        }
        self.raised.store(true, Ordering::Release);
        Ok(Raised::Ours)
    }

    /// Returns the codec for a run's checkpoints; none if they are not encoded.
    pub(crate) fn codec_of(&self, run: &RunPath) -> Option<Codec> {
        self.compression.codec_of(run)
    }

    /// Waits for the permits of `count` parts, at most all there are; the caller holds them until the upload ends. The flight
    /// decides how many of the parts are on their way at once.
    pub(crate) async fn parts(&self, count: usize) -> tokio::sync::OwnedSemaphorePermit {
        let count =
            u32::try_from(count.clamp(1, self.limits.parts_in_flight)).expect("settings allow at most 256");
        Arc::clone(&self.parts).acquire_many_owned(count).await.expect("the semaphore is never closed")
    }

    /// Takes `bytes` from the pace and blocks this thread for the wait that the pace demands. For the blocking pool only.
    pub(crate) fn wait_for_pace(&self, bytes: u64) {
        let mut wait = self.with_pace(|pace, now| pace.claim(now, bytes));
        while let Some(nap) = self.next_nap(&mut wait) {
            std::thread::sleep(nap);
        }
    }

    /// Does as [`Self::wait_for_pace`], for a task.
    pub(crate) async fn paced(&self, bytes: u64) {
        let mut wait = self.with_pace(|pace, now| pace.claim(now, bytes));
        while let Some(nap) = self.next_nap(&mut wait) {
            tokio::time::sleep(nap).await;
        }
    }

    /// Returns the next piece of `wait`; none at the end, or once the pace is lifted.
    fn next_nap(&self, wait: &mut Duration) -> Option<Duration> {
        let nap = PACE_NAP_MAX.min(*wait);
        *wait -= nap;
        let goes_on = !nap.is_zero() && self.with_pace(|pace, _| pace.rate_bytes_per_s().is_some());
        goes_on.then_some(nap)
    }

    /// Reads or changes the pace at the present time.
    pub fn with_pace<R>(&self, f: impl FnOnce(&mut Pace, Duration) -> R) -> R {
        f(&mut self.pace.lock().expect("pacing is arithmetic and does not panic"), self.started.elapsed())
    }

    /// Creates one of our own objects and returns what stands under its key. Reads the object back if the answer is doubtful, and
    /// always if the store accepts bytes that differ from their checksum.
    ///
    /// Errors: the store is away, refuses, stays doubtful, or gives no document where the object should be. The result is then unknown,
    /// and a later call with the same bytes is safe.
    pub async fn create(&self, key: &str, body: &[u8]) -> Result<Stored, StoreError> {
        let mut length = DOUBT_PAUSE;
        let mut doubts = 0;
        loop {
            match self.store.create(key, Bytes::copy_from_slice(body)).await {
                Ok(Created::Created) if self.part_checksums() => return Ok(Stored::Ours),
                Ok(Created::Created) => return self.is_as_sent(key, body).await,
                Ok(Created::AlreadyExists) => return self.whose(key, body).await,
                Err(error) if error.is_doubtful() => {
                    self.metrics.commit_doubts.inc();
                    if self.store.head(key).await?.is_some() {
                        return self.whose(key, body).await;
                    }
                    doubts += 1;
                    if doubts == DOUBTS_MAX {
                        return Err(error);
                    }
                    self.store.pause(length).await;
                    length *= 2;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads back an object that the store accepted. Bytes that differ were damaged on the way; no other writer made them.
    async fn is_as_sent(&self, key: &str, body: &[u8]) -> Result<Stored, StoreError> {
        match self.store.get(key, body.len() as u64).await {
            Ok(Some(found)) if found == body => Ok(Stored::Ours),
            Ok(_) | Err(StoreError::TooLarge { .. }) => Ok(Stored::Theirs),
            Err(error) => Err(error),
        }
    }

    /// Reads the object that stands in the place of a document of ours.
    async fn whose(&self, key: &str, body: &[u8]) -> Result<Stored, StoreError> {
        match self.store.get(key, THEIRS_BYTES.max(body.len() as u64)).await {
            Ok(Some(found)) if found == body => Ok(Stored::Ours),
            Ok(Some(found)) if !is_document(&found) => Err(StoreError::NoDocument {
                operation: Operation::Create,
                key: key.to_owned(),
                store: self.store.describe(),
                found: beginning(&found),
            }),
            Ok(_) | Err(StoreError::TooLarge { .. }) => Ok(Stored::Theirs),
            Err(error) => Err(error),
        }
    }
}

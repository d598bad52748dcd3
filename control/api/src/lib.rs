//! The commands of a node: one method, one path and one request type each (`command` lists them).
//!
//! ```text
//! ckptctl ─ client ── unix socket, HTTP/1.1 + JSON ── server ─ NodeApi ─ the daemon
//! Prometheus, probes ── TCP, read-only ──────────────┘
//! ```
//!
//! Owns: the names and the bounds that both ends keep, the framing of long answers. Does not own: the content of the answers (the daemon
//! implements [`NodeApi`]), their shapes (`protocol::report`), drawing them (`ckptctl`).
//!
//! Commands without arguments are GET; commands with arguments are POST with a JSON body of their request type. An error is an HTTP status
//! above 399 with an [`ApiError`] as its body. Long work answers `application/x-ndjson`: one [`report::StreamLine`] a line, an empty line
//! after a silence of [`KEEPALIVE`], the result last. `curl --unix-socket ckptd.sock http://node/v1/status` works.

pub mod client;
pub mod command;
pub mod server;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tidemark_protocol::report::{
    ApiError, Checkpoint, Commit, Doctor, ErrorCode, Event, Export, Flush, Gc, Import, Node, Pin, Placement,
    Prefetch, Progress, Recovery, Removal, Show, Status, TierStatus, Undelete, Verify, Why,
};
use tidemark_protocol::selector::{Place, Selector, VersionNumber};
use tokio::sync::mpsc;

/// The socket's name in the state directory.
pub const SOCKET_NAME: &str = "ckptd.sock";
/// Lock file in the state directory, held by the node's first process while it lives.
pub const LOCK_NAME: &str = "lock";
/// File in the state directory that the keeper writes while its daemons die again and again.
pub const KEEPER_FILE_NAME: &str = "keeper.json";
/// Lock file held by the processes that keep the daemon's memory: the daemon, and its keeper.
pub const LOCK_FILE_NAME: &str = "lock";
/// File in the state directory with the last known status.
pub const STATUS_FILE_NAME: &str = "status.json";

/// The longest request body: a selector of 4095 bytes written as a list of numbers is 16 KiB.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;
/// How long a stream of lines is silent before it sends an empty line to show that it is alive.
pub const KEEPALIVE: Duration = Duration::from_secs(2);

/// The paths of what is no [`Command`](command::Command).
pub mod path {
    pub const EVENTS: &str = "/v1/events";
    /// Also on TCP: Prometheus text.
    pub const METRICS: &str = "/metrics";
    /// Also on TCP: 200 `ok`, or 503 with the reason.
    pub const HEALTHZ: &str = "/healthz";
    /// On TCP: the same answer as [`StatusRequest`](super::StatusRequest)'s.
    pub const STATUS_HTTP: &str = "/status";
}

/// `status`.
#[derive(Debug, Clone, Copy)]
pub struct StatusRequest;

/// `tiers`.
#[derive(Debug, Clone, Copy)]
pub struct TiersRequest;

/// `nodes`.
#[derive(Debug, Clone, Copy)]
pub struct NodesRequest;

/// `placement`.
#[derive(Debug, Clone, Copy)]
pub struct PlacementRequest;

/// `doctor`.
#[derive(Debug, Clone, Copy)]
pub struct DoctorRequest;

/// `ls`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListRequest {
    /// Only checkpoints at or below this place, or the checkpoint in which it lies.
    pub place: Place,
    /// Also loose files, and versions that newer ones replaced.
    pub all: bool,
}

/// `show`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShowRequest {
    pub checkpoint: Selector,
    /// Also list its files.
    pub files: bool,
}

/// `why`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WhyRequest {
    /// A checkpoint, or a file of one, or a file outside any.
    pub place: Place,
}

/// `verify`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifyRequest {
    /// `None`: everything that this node knows.
    pub checkpoint: Option<Selector>,
    /// Also read the copies in Tier-3, which costs their transfer.
    pub deep: bool,
}

/// `prefetch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefetchRequest {
    pub checkpoint: Selector,
    /// Answer when everything that fits is here, instead of when the work is planned.
    pub wait: bool,
}

/// `flush`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlushRequest {
    /// Limits the flush to paths at or below it, or to the checkpoint in which it lies.
    pub place: Place,
    /// Answer when all are committed, instead of with the pending ones.
    pub wait: bool,
    /// How long to wait; `None`: until done.
    pub timeout_s: Option<u64>,
}

/// `commit`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommitRequest {
    pub place: Place,
}

/// `gc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GcRequest {
    /// Only report which versions would be retired.
    pub dry_run: bool,
}

/// `pin` and `unpin`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinRequest {
    pub checkpoint: Selector,
    pub pinned: bool,
    /// The person or program that asks, for later readers.
    pub by: String,
}

/// `rm`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveRequest {
    pub checkpoint: Selector,
}

/// `undelete`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UndeleteRequest {
    pub checkpoint: Selector,
}

/// `export`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportRequest {
    pub checkpoint: Selector,
    /// `None`: the newest committed version.
    pub version: Option<VersionNumber>,
    /// Absolute path on the daemon's machine; it must not exist.
    pub directory: String,
}

/// `import`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportRequest {
    /// A path below the URL of Tier-3, relative to it or with it.
    pub from: String,
    /// `None`: the last part of `from`, in the mount's root.
    pub to: Option<Place>,
}

/// `recover --plan`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecoverRequest {
    /// Only the checkpoints at or below it, or the one in which it lies.
    pub place: Place,
}

/// `events`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventsRequest {
    /// Only events with a greater number. All events if this daemon has not reached the number, since each daemon counts from 1.
    pub since: u64,
    /// Continue with new events until the client hangs up.
    pub follow: bool,
}

/// The commands that a node answers. The daemon implements the trait; so does a fake node in the tests.
///
/// The future of a method is dropped when its client hangs up or the server ends: that is how long work is cancelled. So a method must hold
/// nothing across an await that dropping leaves broken, and its helpers must end with it. Methods are called concurrently, at most
/// `server::REQUESTS_MAX` at once.
#[async_trait]
pub trait NodeApi: Send + Sync + 'static {
    /// Returns the status. Must be cheap: called for each probe and by each command that takes a path.
    async fn status(&self) -> Result<Status, ApiError>;
    /// Lists checkpoints in order of run, timeline, step, version. Empty is not an error.
    async fn list(&self, request: ListRequest) -> Result<Vec<Checkpoint>, ApiError>;
    async fn show(&self, request: ShowRequest) -> Result<Show, ApiError>;
    async fn why(&self, request: WhyRequest) -> Result<Why, ApiError>;
    async fn tiers(&self) -> Result<Vec<TierStatus>, ApiError>;
    async fn nodes(&self) -> Result<Vec<Node>, ApiError>;
    /// Returns the placement; not found on a node that is alone.
    async fn placement(&self) -> Result<Placement, ApiError>;
    async fn doctor(&self) -> Result<Doctor, ApiError>;
    /// Verifies checkpoints. Dropping the future cancels the work.
    async fn verify(&self, request: VerifyRequest, progress: ProgressSink) -> Result<Verify, ApiError>;
    /// Prefetches a checkpoint. If the request waits for the end, dropping the future stops the work.
    async fn prefetch(&self, request: PrefetchRequest, progress: ProgressSink) -> Result<Prefetch, ApiError>;
    /// Flushes. Dropping the future ends the waiting, not the queued uploads.
    async fn flush(&self, request: FlushRequest, progress: ProgressSink) -> Result<Flush, ApiError>;
    async fn commit(&self, request: CommitRequest) -> Result<Commit, ApiError>;
    /// Retires checkpoints by the retention rules. Dropping the future ends the waiting, not the work.
    async fn gc(&self, request: GcRequest, progress: ProgressSink) -> Result<Gc, ApiError>;
    async fn pin(&self, request: PinRequest) -> Result<Pin, ApiError>;
    /// Removes checkpoints. Dropping the future ends the waiting, not the work.
    async fn remove(&self, request: RemoveRequest, progress: ProgressSink) -> Result<Removal, ApiError>;
    async fn undelete(&self, request: UndeleteRequest) -> Result<Undelete, ApiError>;
    /// Exports a checkpoint. Dropping the future leaves nothing at the directory.
    async fn export(&self, request: ExportRequest, progress: ProgressSink) -> Result<Export, ApiError>;
    /// Imports checkpoints. Dropping the future keeps what was imported; a checkpoint that is not committed yet may still be committed by
    /// the next start.
    async fn import(&self, request: ImportRequest, progress: ProgressSink) -> Result<Import, ApiError>;
    /// Plans a recovery, and changes nothing.
    async fn recover(&self, request: RecoverRequest) -> Result<Recovery, ApiError>;
    /// Sends the requested events, oldest first; with `follow` it returns only on an error or when dropped.
    async fn events(&self, request: EventsRequest, events: EventSink) -> Result<(), ApiError>;
    /// Returns all metrics in the Prometheus (OpenMetrics) text format, with its final `# EOF`.
    fn metrics_text(&self) -> String;
    /// Returns whether the mount serves; the error says why not.
    fn healthy(&self) -> Result<(), String>;

    /// Returns problems although the mount serves, a line each: the rest of the answer of `/healthz`.
    fn concerns(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Receives the progress of long work. Sending never waits: a client that reads slowly misses some lines.
#[derive(Debug, Clone)]
pub struct ProgressSink(mpsc::Sender<Progress>);

impl ProgressSink {
    /// Progress lines that wait for a slow client; beyond them newer ones are dropped until it reads.
    const QUEUE_MAX: usize = 4;

    /// Makes the sink and the receiver of its lines.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<Progress>) {
        let (sender, receiver) = mpsc::channel(Self::QUEUE_MAX);
        (Self(sender), receiver)
    }

    /// Reports the progress of the work.
    pub fn tell(&self, progress: Progress) {
        // A full or closed queue loses progress, never the result.
        let _ = self.0.try_send(progress);
    }
}

/// Receives events.
#[derive(Debug, Clone)]
pub struct EventSink(mpsc::Sender<Event>);

impl EventSink {
    /// Events that wait for a slow client before the sender waits too.
    const QUEUE_MAX: usize = 64;

    /// Makes the sink and the receiver of its events.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<Event>) {
        let (sender, receiver) = mpsc::channel(Self::QUEUE_MAX);
        (Self(sender), receiver)
    }

    /// Sends an event, waiting while the client is slow.
    ///
    /// # Errors
    /// If the client is gone, which ends the command.
    pub async fn send(&self, event: Event) -> Result<(), ApiError> {
        self.0
            .send(event)
            .await
            .map_err(|_| ApiError::new(ErrorCode::Unavailable, "nobody listens to the events any more", ""))
    }
}

//! Jobs that the node loop starts, and that report their end to it.
//!
//! Owns: the jobs' bodies and what they report. Does not own: when one is started and what follows (`run`).
//!
//! A job owns what it works on and gives it back at its end, so nothing is shared with the loop while it runs.

use crate::chunk::bytes::read_all;
use crate::chunk::{self, SealSums};
use crate::node::Shared;
use crate::node::book::Number;
use crate::node::generations::Sifted;
use crate::node::ledger::Contents;
use crate::node::loose::LooseDone;
use crate::restore::RestoreError;
use crate::save::commit::{self, Attempt, CommitError};
use crate::save::content;
use crate::save::loose::{self, LooseError, LooseUpload};
use crate::save::small;
use crate::step_point::{StepPoint, reach};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tidemark_content::Judgement;
use tidemark_namespace::{ColdFile, JudgeTicket, Namespace, NodeId, SealTicket};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::manifest::Manifest;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::retention::Retirement;
use tokio::time::Instant;

/// Before a node that could not be asked is asked again: it comes back, or is declared gone.
const HEAR_AGAIN: Duration = Duration::from_millis(200);

/// Between two looks whether a seal still gives way.
const SEAL_PAUSE: Duration = Duration::from_millis(1);

/// Checksums of a closed file, and what its content says about itself.
#[derive(Debug)]
pub(crate) struct Hashed {
    pub(crate) sums: SealSums,
    pub(crate) content: Option<Judgement>,
}

/// How a job ended.
#[derive(Debug)]
pub(crate) enum Done {
    Sealed {
        hashed: Vec<(SealTicket, io::Result<Hashed>)>,
        /// Removed meanwhile, and their memory was needed.
        given_up: Vec<NodeId>,
    },
    Judged(Vec<(JudgeTicket, Option<Judgement>)>),
    Prepared {
        id: CheckpointId,
        number: Number,
        attempt: Box<Attempt>,
        result: Result<(), CommitError>,
    },
    Decided {
        id: CheckpointId,
        number: Number,
        attempt: Box<Attempt>,
        result: Result<Box<Manifest>, CommitError>,
    },
    Loose(LooseDone),
    /// Every node was asked that may know more of a checkpoint with these contents.
    Heard {
        id: CheckpointId,
        contents: Contents,
        heard: bool,
    },
    Fetched {
        node: NodeId,
        result: Result<(), RestoreError>,
    },
    Tree {
        number: u64,
        result: Result<(), LooseError>,
    },
    Sifted(Sifted),
    Scrubbed(crate::node::scrub::Scrubbed),
    Retired {
        id: CheckpointId,
        number: Number,
        leave: Retirement,
        result: Result<(), CommitError>,
    },
}

/// Hashes closed files, one after the other, and judges what they hold while their pages are at hand.
pub(crate) async fn seal(shared: Arc<Shared>, tickets: Vec<SealTicket>) -> Done {
    let joined = tokio::task::spawn_blocking(move || {
        let mut given_up = Vec::new();
        let mut hash = |ticket: SealTicket| {
            let begun = Instant::now();
            let with_content = |sums, bytes: &[u8]| {
                let judges = shared.settings.content.judge;
                let content = if judges { content::of(&bytes, ticket.size_bytes) } else { None };
                Hashed { sums, content }
            };
            let hashed = if ticket.size_bytes <= small::SMALL_BYTES {
                read_all(&ticket.backing, ticket.size_bytes)
                    .map(|bytes| Some(with_content(chunk::hash(&bytes, 1), &bytes)))
            } else {
                // A seal that takes a millisecond delays no other job.
                let long = ticket.size_bytes > CHUNK_BYTES;
                let go_on = || {
                    while long && !ticket.is_abandoned() && shared.namespace.seals().give_way() {
                        std::thread::sleep(SEAL_PAUSE);
                    }
                    !ticket.is_abandoned()
                };
                ticket.backing.map().map(|mapping| {
                    let sums = chunk::hash_while(&mapping, shared.seal_threads, go_on)?;
                    Some(with_content(sums, &mapping))
                })
            };
            let Some(hashed) = hashed.transpose() else {
                // With the ticket goes what keeps the memory.
                given_up.push(ticket.node);
                return None;
            };
            if hashed.is_ok() {
                shared.metrics.seal_seconds.observe(begun.elapsed().as_secs_f64());
                shared.metrics.seal_bytes.inc_by(ticket.size_bytes);
            }
            reach(StepPoint::SealHashed);
            Some((ticket, hashed))
        };
        let hashed = tickets.into_iter().filter_map(&mut hash).collect();
        Done::Sealed { hashed, given_up }
    });
    joined.await.expect("hashing a mapping does not panic")
}

/// Asks bytes that are not hashed now what they say of themselves: of cut files, and of what an earlier daemon hashed.
pub(crate) async fn judge(tickets: Vec<JudgeTicket>) -> Done {
    let joined = tokio::task::spawn_blocking(move || {
        let judge = |ticket: JudgeTicket| {
            let content = content::of(&content::InMemory(&ticket.backing), ticket.size_bytes);
            (ticket, content)
        };
        Done::Judged(tickets.into_iter().map(judge).collect())
    });
    joined.await.expect("a reader's panic is caught")
}

/// Runs phase 1 of an attempt.
pub(crate) async fn prepare(
    shared: Arc<Shared>,
    id: CheckpointId,
    number: Number,
    mut attempt: Box<Attempt>,
) -> Done {
    let result = attempt.prepare_over_nodes(shared.means()).await;
    Done::Prepared { id, number, attempt, result }
}

/// Runs phase 2 of an attempt.
pub(crate) async fn decide(
    shared: Arc<Shared>,
    id: CheckpointId,
    number: Number,
    attempt: Box<Attempt>,
) -> Done {
    let result = attempt.commit(&shared.drain).await.map(Box::new);
    Done::Decided { id, number, attempt, result }
}

/// Gives a committed version up.
pub(crate) async fn retire(
    shared: Arc<Shared>,
    id: CheckpointId,
    number: Number,
    manifest: Arc<Manifest>,
    leave: Retirement,
) -> Done {
    let result = commit::retire(&shared.drain, &manifest, &leave, shared.now_ns()).await;
    Done::Retired { id, number, leave, result }
}

/// Uploads a loose file and its sidecar.
pub(crate) async fn upload_loose(
    shared: Arc<Shared>,
    upload: LooseUpload,
    tries: u32,
    begun: Instant,
) -> Done {
    let (path, of) = (upload.path.clone(), (upload.file, upload.seal));
    let (generation, size_bytes) = (upload.generation, upload.bytes.size_bytes());
    let left = upload.left;
    let result = loose::upload(&shared.drain, upload).await;
    let took = begun.elapsed();
    Done::Loose(LooseDone { path, of, generation, size_bytes, left, tries, took, result })
}

/// Asks the other nodes to publish what they know of a checkpoint before it counts as whole. The marker may be published before a
/// file that was closed earlier on another node.
pub(crate) async fn hear(shared: Arc<Shared>, id: CheckpointId, path: Vec<u8>, contents: Contents) -> Done {
    let heard = match shared.cluster.get() {
        Some(cluster) => cluster.hear_below(&path).await,
        None => true,
    };
    if !heard {
        tokio::time::sleep(HEAR_AGAIN).await;
    }
    Done::Heard { id, contents, heard }
}

/// Fetches a cold file whose bytes the loop itself needs.
pub(crate) async fn fetch_cold(shared: Arc<Shared>, path: String, cold: ColdFile) -> Done {
    let node = cold.node;
    let result = shared.restorer.restore(path, cold).await;
    Done::Fetched { node, result }
}

/// Returns the path of a node for messages.
pub(crate) fn path_text(namespace: &Namespace, node: NodeId) -> String {
    let path = namespace.nodes().path_of(node);
    path.map_or_else(|| format!("node {node}"), |path| tidemark_protocol::report::path_text(&path))
}

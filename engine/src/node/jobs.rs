//! What the node loop starts and hears the end of.
//!
//! Owns: the jobs' bodies and what they report. Does not own: when one is started and what follows (`run`).
//!
//! A job owns what it works on and gives it back at its end, so nothing is shared with the loop while it runs.

use crate::namespace::{ColdFile, FsError, Namespace, NodeId, SealTicket};
use crate::node::Shared;
use crate::node::book::Number;
use crate::restore::fetch::{FetchError, FetchPlan, fetch};
use crate::save::commit::{Attempt, CommitError};
use crate::save::loose::{self, LooseError, LooseUpload};
use crate::save::seal::{self, SealSums};
use crate::step_point::{StepPoint, reach};
use std::io;
use std::sync::Arc;
use std::time::Instant;
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::manifest::Manifest;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::CheckpointId;

/// How a job ended.
#[derive(Debug)]
pub(crate) enum Done {
    Sealed {
        ticket: SealTicket,
        sums: io::Result<SealSums>,
    },
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
    Loose {
        path: RelPath,
        of: (FileId, SealNumber),
        size_bytes: u64,
        result: Result<(Generation, String), LooseError>,
    },
    Fetched {
        node: NodeId,
        result: Result<(), RestoreError>,
    },
    Tree {
        number: u64,
        result: Result<(), LooseError>,
    },
    Scrubbed(crate::node::scrub::Scrubbed),
}

/// Hashes a closed file.
pub(crate) async fn seal(shared: Arc<Shared>, ticket: SealTicket) -> Done {
    let threads = shared.seal_threads;
    let joined = tokio::task::spawn_blocking(move || {
        let begun = Instant::now();
        let sums = ticket.backing.map().map(|mapping| seal::hash(&mapping, threads));
        if sums.is_ok() {
            shared.metrics.seal_seconds.observe(begun.elapsed().as_secs_f64());
            shared.metrics.seal_bytes.inc_by(ticket.size_bytes);
        }
        reach(StepPoint::SealHashed);
        Done::Sealed { ticket, sums }
    });
    joined.await.expect("hashing a mapping does not panic")
}

/// Phase 1 of an attempt.
pub(crate) async fn prepare(
    shared: Arc<Shared>,
    id: CheckpointId,
    number: Number,
    mut attempt: Box<Attempt>,
) -> Done {
    let result = attempt.prepare(&shared.drain).await;
    Done::Prepared { id, number, attempt, result }
}

/// Phase 2 of an attempt.
pub(crate) async fn decide(
    shared: Arc<Shared>,
    id: CheckpointId,
    number: Number,
    attempt: Box<Attempt>,
) -> Done {
    let result = attempt.commit(&shared.drain).await.map(Box::new);
    Done::Decided { id, number, attempt, result }
}

/// A loose file and its sidecar.
pub(crate) async fn upload_loose(shared: Arc<Shared>, upload: LooseUpload) -> Done {
    let (path, of) = (upload.path.clone(), (upload.file, upload.seal));
    let size_bytes = upload.size_bytes;
    let result = loose::upload(&shared.drain, upload).await;
    Done::Loose { path, of, size_bytes, result }
}

/// A cold file whose bytes the loop itself needs.
pub(crate) async fn fetch_cold(shared: Arc<Shared>, path: String, cold: ColdFile) -> Done {
    let node = cold.node;
    let result = restore(&shared, path, cold).await;
    Done::Fetched { node, result }
}

/// Why a cold file did not become hot.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error(
        "{path} has no copy left: its bytes were lost before they reached Tier-3; remove it, or save it again"
    )]
    NoCopy { path: String },
    #[error("no memory for the {size_bytes} bytes of {path}; free some, or raise --tier1")]
    NoSpace { path: String, size_bytes: u64, source: crate::tier1::Tier1Error },
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("{path} changed while it was fetched")]
    Changed { path: String, source: FsError },
}

impl RestoreError {
    /// What the caller of open(2) is told.
    #[must_use]
    pub fn errno(&self) -> FsError {
        match self {
            Self::NoSpace { .. } => FsError::NoSpace,
            Self::NoCopy { .. } | Self::Fetch(_) => FsError::Io,
            Self::Changed { source, .. } => *source,
        }
    }
}

/// Brings a cold file in and makes it hot: memory, every chunk verified, then the namespace.
///
/// Costs the file's size in Tier-1, for which host copies with an object copy give way.
pub async fn restore(shared: &Shared, path: String, cold: ColdFile) -> Result<(), RestoreError> {
    let begun = Instant::now();
    let backing = fetched(shared, &path, &cold).await.inspect_err(|_| {
        shared.metrics.fetch_failures.inc();
    })?;
    shared
        .namespace
        .finish_restore(cold.node, cold.file, cold.seal, backing)
        .map_err(|source| RestoreError::Changed { path, source })?;
    shared.metrics.fetch_files.inc();
    shared.metrics.fetch_seconds.observe(begun.elapsed().as_secs_f64());
    Ok(())
}

/// The verified bytes of a cold file in a backing file of their own.
pub(crate) async fn fetched(
    shared: &Shared,
    path: &str,
    cold: &ColdFile,
) -> Result<Arc<crate::tier1::Backing>, RestoreError> {
    let (Some(object), Some((_, chunks))) = (&cold.object, &cold.checksums) else {
        return Err(RestoreError::NoCopy { path: path.to_owned() });
    };
    let backing = make_backing(shared, cold.size_bytes).map_err(|source| RestoreError::NoSpace {
        path: path.to_owned(),
        size_bytes: cold.size_bytes,
        source,
    })?;
    let plan = FetchPlan {
        path: path.to_owned(),
        key: object.key.clone(),
        size_bytes: cold.size_bytes,
        chunks: Arc::clone(chunks),
    };
    let in_flight = shared.fetches_in_flight;
    fetch(
        Arc::clone(&shared.drain.store),
        plan,
        Arc::clone(&backing),
        in_flight,
        Arc::clone(&shared.metrics),
    )
    .await?;
    Ok(backing)
}

fn make_backing(
    shared: &Shared,
    size_bytes: u64,
) -> Result<Arc<crate::tier1::Backing>, crate::tier1::Tier1Error> {
    match shared.tier1.create(Some(size_bytes)) {
        Err(crate::tier1::Tier1Error::NoSpace { .. }) => {
            shared.namespace.make_room(size_bytes);
            shared.tier1.create(Some(size_bytes))
        }
        result => result,
    }
}

/// The path of a node for messages.
pub(crate) fn path_text(namespace: &Namespace, node: NodeId) -> String {
    namespace
        .path_of(node)
        .map_or_else(|| format!("node {node}"), |path| String::from_utf8_lossy(&path).into_owned())
}

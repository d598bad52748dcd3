//! What the node loop starts and hears the end of.
//!
//! Owns: the jobs' bodies and what they report. Does not own: when one is started and what follows (`run`).
//!
//! A job owns what it works on and gives it back at its end, so nothing is shared with the loop while it runs.

use crate::error::ErrorKind;
use crate::namespace::{ColdFile, FsError, JudgeTicket, Namespace, NodeId, RoomWait, SealTicket};
use crate::node::Shared;
use crate::node::book::Number;
use crate::node::generations::Sifted;
use crate::node::ledger::Contents;
use crate::node::loose::LooseDone;
use crate::node::run::error_text;
use crate::restore::fetch::{FetchError, FetchPlan, fetch};
use crate::restore::peer::{PeerError, PeerPlan, fetch_from_peers};
use crate::save::commit::{self, Attempt, CommitError};
use crate::save::content;
use crate::save::loose::{self, LooseError, LooseUpload};
use crate::save::seal::{self, SealSums};
use crate::save::small;
use crate::step_point::{StepPoint, reach};
use crate::store::StoreError;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_content::Judgement;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::manifest::Manifest;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::retention::Retirement;
use tidemark_transport::Address;

/// Rounds of asking other nodes for one file, each with those left out that failed, before Tier-3 is read.
const SOURCES_MAX: usize = 4;

/// Before a node that could not be asked is asked again: it comes back, or is declared gone.
const HEAR_AGAIN: Duration = Duration::from_millis(200);

/// Between two looks whether a seal still gives way.
const SEAL_PAUSE: Duration = Duration::from_millis(1);

/// What a closed file's bytes are, and what they say of themselves.
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
    /// Everybody was asked who may know more of a checkpoint with these contents.
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
                small::read(&ticket.backing, ticket.size_bytes)
                    .map(|bytes| Some(with_content(seal::hash(&bytes, 1), &bytes)))
            } else {
                // One that takes a millisecond is in nobody's way.
                let long = ticket.size_bytes > CHUNK_BYTES;
                let go_on = || {
                    while long && !ticket.is_abandoned() && shared.namespace.seals_give_way() {
                        std::thread::sleep(SEAL_PAUSE);
                    }
                    !ticket.is_abandoned()
                };
                ticket.backing.map().map(|mapping| {
                    let sums = seal::hash_while(&mapping, shared.seal_threads, go_on)?;
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
            let content = content::of(&*ticket.backing, ticket.size_bytes);
            (ticket, content)
        };
        Done::Judged(tickets.into_iter().map(judge).collect())
    });
    joined.await.expect("a reader's panic is caught")
}

/// Phase 1 of an attempt.
pub(crate) async fn prepare(
    shared: Arc<Shared>,
    id: CheckpointId,
    number: Number,
    mut attempt: Box<Attempt>,
) -> Done {
    let result = attempt.prepare_over_nodes(&shared).await;
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

/// A loose file and its sidecar.
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

/// Has other nodes say what they know of a checkpoint before it is taken for whole: its marker may be told before a file that was
/// closed earlier elsewhere.
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
    #[error(
        "{path} was committed, and Tier-3 does not say any more what it holds: {why}; restore that object and restart, or \
         remove {path}"
    )]
    Unreadable { path: String, why: String },
    #[error("no memory for the {size_bytes} bytes of {path}; free some, or raise --tier1")]
    NoSpace { path: String, size_bytes: u64, source: crate::tier1::Tier1Error },
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error("{path} changed while it was fetched")]
    Changed { path: String, source: FsError },
}

impl RestoreError {
    /// Whether no copy is left, and not only out of reach.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        match self {
            Self::NoCopy { .. } | Self::Unreadable { .. } => true,
            // An object that is too short does not have the range.
            Self::Fetch(FetchError::Store { source: StoreError::Range { .. }, .. }) => true,
            Self::Fetch(error) => matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound),
            // Another node may have it again when it is back.
            Self::Peer(_) | Self::NoSpace { .. } | Self::Changed { .. } => false,
        }
    }

    /// Whether this node has no room for it: it has copies, and may be fetched when there is.
    #[must_use]
    pub fn is_full(&self) -> bool {
        match self {
            Self::NoSpace { .. } => true,
            Self::Fetch(error) => error.kind() == ErrorKind::NoSpace,
            Self::Peer(PeerError::Write { source, .. }) => source.kind() == io::ErrorKind::StorageFull,
            Self::NoCopy { .. } | Self::Unreadable { .. } | Self::Peer(_) | Self::Changed { .. } => false,
        }
    }

    /// What the caller of open(2) is told.
    #[must_use]
    pub fn errno(&self) -> FsError {
        match self {
            error if error.is_full() => FsError::NoSpace,
            Self::NoSpace { .. }
            | Self::NoCopy { .. }
            | Self::Unreadable { .. }
            | Self::Fetch(_)
            | Self::Peer(_) => FsError::Io,
            Self::Changed { source, .. } => *source,
        }
    }
}

/// Where the bytes of a file were fetched from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Peer,
    Object,
}

impl Origin {
    /// As reports say it.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Object => "object",
        }
    }

    /// As sentences say it.
    pub(crate) const fn place(self) -> &'static str {
        match self {
            Self::Peer => "another node",
            Self::Object => "Tier-3",
        }
    }
}

/// Brings a cold file in and makes it hot: memory, every chunk verified, then the namespace.
///
/// Costs the file's size in Tier-1, for which host copies with an object copy give way.
pub async fn restore(shared: &Shared, path: String, cold: ColdFile) -> Result<(), RestoreError> {
    restore_when(Room::Awaited, shared, path, cold).await
}

/// The same, refused at once where there is no room now.
pub(crate) async fn restore_at_once(
    shared: &Shared,
    path: String,
    cold: ColdFile,
) -> Result<(), RestoreError> {
    restore_when(Room::Now, shared, path, cold).await
}

/// Whether memory that is on its way back is waited for, as an open does and a prefetch does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    Awaited,
    Now,
}

async fn restore_when(room: Room, shared: &Shared, path: String, cold: ColdFile) -> Result<(), RestoreError> {
    let begun = Instant::now();
    if shared.namespace.warm_from_copy(cold.file, cold.seal) {
        shared.losses.mend(cold.file, cold.seal);
        return Ok(());
    }
    // Before anybody hears that it comes from here.
    let _bringing = shared.coming.begin(home_of(shared, &cold));
    let (backing, cold, _) = match fetched_when(room, shared, &path, &cold).await {
        Ok(fetched) => fetched,
        // A copy of it came to this node meanwhile.
        Err(_) if shared.namespace.cold(cold.node).is_none() => return Ok(()),
        Err(error) => {
            shared.metrics.fetch_failures.inc();
            // Where there are other nodes, one of them may come back with it.
            if error.is_loss() && shared.cluster.get().is_none() {
                shared.losses.note(cold.file, cold.seal, error_text(&error));
            }
            return Err(error);
        }
    };
    shared.losses.mend(cold.file, cold.seal);
    shared
        .namespace
        .finish_restore(cold.node, cold.file, cold.seal, backing)
        .map_err(|source| RestoreError::Changed { path, source })?;
    shared.metrics.fetch_files.inc();
    shared.metrics.fetch_seconds.observe(begun.elapsed().as_secs_f64());
    Ok(())
}

/// The verified bytes of a cold file in a backing file of their own, and where they came from.
pub(crate) async fn fetched(
    shared: &Shared,
    path: &str,
    cold: &ColdFile,
) -> Result<(Arc<crate::tier1::Backing>, Origin), RestoreError> {
    fetched_when(Room::Awaited, shared, path, cold).await.map(|(backing, _, from)| (backing, from))
}

/// Verified bytes, what is known of their file by then, and where they came from.
type Fetched = (Arc<crate::tier1::Backing>, ColdFile, Origin);

async fn fetched_when(
    room: Room,
    shared: &Shared,
    path: &str,
    cold: &ColdFile,
) -> Result<Fetched, RestoreError> {
    if let Some(why) = shared.losses.refusal(cold.file, cold.seal) {
        return Err(RestoreError::Unreadable { path: path.to_owned(), why });
    }
    let mut wait = shared.namespace.room_wait();
    loop {
        match fetched_once(room, shared, path, cold, &mut wait).await {
            // A writer took the page that was promised to this file: the room is made once more.
            Err(error) if error.is_full() && room == Room::Awaited => match wait.pause() {
                Some(pause) => tokio::time::sleep(pause).await,
                None => return Err(error),
            },
            result => return result,
        }
    }
}

async fn fetched_once(
    room: Room,
    shared: &Shared,
    path: &str,
    cold: &ColdFile,
    wait: &mut RoomWait<'_>,
) -> Result<Fetched, RestoreError> {
    let mut cold = cold.clone();
    let mut failed: Vec<Address> = Vec::new();
    let mut backing = None;
    for _ in 0..SOURCES_MAX {
        let Some(peers) = shared.nearby.get() else { break };
        cold = peers.find(&cold, &failed).await;
        let (file, seal) = home_of(shared, &cold);
        let mut suppliers = peers.suppliers(file, seal);
        suppliers.retain(|supplier| !failed.contains(supplier));
        let Some((_, chunks)) = cold.checksums.clone().filter(|_| !suppliers.is_empty()) else { break };
        let landing = match backing.take() {
            Some(landing) => landing,
            None => room_for(room, shared, path, &cold, wait).await?,
        };
        let _growing = landing.growing();
        let plan = PeerPlan { path: path.to_owned(), file, seal, size_bytes: cold.size_bytes, chunks };
        match fetch_from_peers(peers, plan, Arc::clone(&landing), Arc::clone(&shared.metrics)).await {
            Ok(()) => return Ok((landing, cold, Origin::Peer)),
            Err(error) if cold.object.is_none() => return Err(error.into()),
            Err(error) => {
                tracing::warn!(why = %error_text(&error), "others are asked for a file, or Tier-3");
                failed.extend(suppliers);
                backing = Some(landing);
            }
        }
    }
    let (Some((_, chunks)), Some(object)) = (&cold.checksums, &cold.object) else {
        return Err(RestoreError::NoCopy { path: path.to_owned() });
    };
    let backing = match backing {
        Some(backing) => backing,
        None => room_for(room, shared, path, &cold, wait).await?,
    };
    let _growing = backing.growing();
    let plan = FetchPlan {
        path: path.to_owned(),
        key: object.key.clone(),
        size_bytes: cold.size_bytes,
        chunks: Arc::clone(chunks),
        layout: object.layout(),
    };
    fetch(
        Arc::clone(&shared.drain.store),
        plan,
        Arc::clone(&backing),
        Arc::clone(&shared.fetches),
        Arc::clone(&shared.metrics),
    )
    .await?;
    Ok((backing, cold, Origin::Object))
}

/// The file and the seal that other nodes know the bytes by: a copy that is kept here has an identity of its own.
fn home_of(shared: &Shared, cold: &ColdFile) -> (FileId, SealNumber) {
    shared.namespace.copy_at(cold.node).map_or((cold.file, cold.seal), |copy| (copy.file, copy.sealed.number))
}

/// A backing file for all of it; waits for one, bounded, while memory is on its way back.
async fn room_for(
    room: Room,
    shared: &Shared,
    path: &str,
    cold: &ColdFile,
    wait: &mut RoomWait<'_>,
) -> Result<Arc<crate::tier1::Backing>, RestoreError> {
    let size_bytes = cold.size_bytes;
    loop {
        let made = match room {
            Room::Now => shared.namespace.backing_for_prefetch(size_bytes),
            Room::Awaited => shared.namespace.backing_for(Some(size_bytes)),
        };
        let full = made.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoSpace);
        if full
            && room == Room::Awaited
            && let Some(pause) = wait.pause()
        {
            tokio::time::sleep(pause).await;
            continue;
        }
        let path = path.to_owned();
        return made.map_err(|source| RestoreError::NoSpace { path, size_bytes, source });
    }
}

/// The path of a node for messages.
pub(crate) fn path_text(namespace: &Namespace, node: NodeId) -> String {
    let path = namespace.path_of(node);
    path.map_or_else(|| format!("node {node}"), |path| tidemark_protocol::report::path_text(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_is_told_that_there_is_no_room_and_not_that_the_bytes_are_gone() {
        let full =
            FetchError::Write { path: "a".into(), chunk: 0, source: io::ErrorKind::StorageFull.into() };
        let error = RestoreError::from(full);
        assert_eq!((error.errno(), error.is_full(), error.is_loss()), (FsError::NoSpace, true, false));
        let lost = RestoreError::NoCopy { path: "a".into() };
        assert_eq!((lost.errno(), lost.is_full()), (FsError::Io, false));
    }
}

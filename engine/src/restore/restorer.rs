//! Brings a cold file back: chooses the copy, the order and the memory.
//!
//! Owns: the order (a copy kept here, other nodes' memory, Tier-3), the wait for room, noting files of which no copy is good. Does not
//! own: asking nodes (`peer`), reading Tier-3 (`fetch`), which file is opened when (the mount, the node loop).

use super::coming::Coming;
use super::fetch::{FetchError, FetchPlan, Landing, fetch};
use super::losses::Losses;
use super::peer::{Nearby, PeerError, PeerPlan, fetch_from_peers};
use crate::flight::Flight;
use crate::metrics::Metrics;
use std::io;
use std::sync::Arc;
use tidemark_namespace::{ColdFile, FsError, Namespace, RoomWait};
use tidemark_protocol::error::{ErrorKind, error_text};
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_store::{Store, StoreError};
use tidemark_tier1::{Backing, Tier1Error};
use tidemark_transport::Address;
use tokio::time::Instant;

/// Maximum number of rounds of asking other nodes for a file, each without the nodes that failed, before Tier-3 is read.
const SOURCES_MAX: usize = 4;

/// The means to bring back a node's cold files.
#[derive(Debug)]
pub struct Restorer {
    pub(super) namespace: Arc<Namespace>,
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    /// The chunks from Tier-3 on their way.
    pub(crate) fetches: Arc<Flight>,
    /// Cold files on their way.
    pub coming: Arc<Coming>,
    /// Files that cannot be read whole any more.
    pub losses: Losses,
    /// Other nodes' memory.
    pub nearby: Nearby,
}

impl Restorer {
    /// Makes a restorer that reads at most `fetches` chunks of `store` at a time.
    pub fn new(
        namespace: Arc<Namespace>,
        store: Arc<dyn Store>,
        metrics: Arc<Metrics>,
        fetches: usize,
        nearby: Nearby,
    ) -> Self {
        Self {
            namespace,
            store,
            metrics,
            fetches: Flight::new(fetches),
            coming: Arc::default(),
            losses: Losses::default(),
            nearby,
        }
    }

    /// Brings a cold file in and makes it hot: memory, every chunk verified, then the namespace.
    ///
    /// Costs the file's size in Tier-1, for which host copies with an object copy are evicted.
    pub async fn restore(&self, path: String, cold: ColdFile) -> Result<(), RestoreError> {
        self.restore_when(Room::Awaited, path, cold).await
    }

    /// Does as [`Self::restore`], but fails at once if there is no room now.
    pub(crate) async fn restore_at_once(&self, path: String, cold: ColdFile) -> Result<(), RestoreError> {
        self.restore_when(Room::Now, path, cold).await
    }

    async fn restore_when(&self, room: Room, path: String, cold: ColdFile) -> Result<(), RestoreError> {
        let begun = Instant::now();
        if self.namespace.peer_copies().warm_from_copy(cold.file, cold.seal) {
            self.losses.mend(cold.file, cold.seal);
            return Ok(());
        }
        // Begins before any other node may be sent here for these bytes.
        let _bringing = self.coming.begin(self.home_of(&cold));
        let (backing, cold, _) = match self.fetched_when(room, &path, &cold).await {
            Ok(fetched) => fetched,
            // A copy of the file came to this node meanwhile.
            Err(_) if self.namespace.hosts().cold(cold.node).is_none() => return Ok(()),
            Err(error) => {
                self.metrics.fetch_failures.inc();
                // If there are other nodes, one of them may come back with the file.
                if error.is_loss() && self.nearby.is_alone() {
                    self.losses.note(cold.file, cold.seal, error_text(&error));
                }
                return Err(error);
            }
        };
        self.losses.mend(cold.file, cold.seal);
        self.namespace
            .hosts()
            .finish_restore(cold.node, cold.file, cold.seal, backing)
            .map_err(|source| RestoreError::Changed { path, source })?;
        self.metrics.fetch_files.inc();
        self.metrics.fetch_seconds.observe(begun.elapsed().as_secs_f64());
        Ok(())
    }

    /// Fetches a cold file into a backing file of its own. Returns the verified bytes, and their origin.
    pub(crate) async fn fetched(
        &self,
        path: &str,
        cold: &ColdFile,
    ) -> Result<(Arc<Backing>, Origin), RestoreError> {
        self.fetched_when(Room::Awaited, path, cold).await.map(|(backing, _, from)| (backing, from))
    }

    async fn fetched_when(&self, room: Room, path: &str, cold: &ColdFile) -> Result<Fetched, RestoreError> {
        if let Some(why) = self.losses.refusal(cold.file, cold.seal) {
            return Err(RestoreError::Unreadable { path: path.to_owned(), why });
        }
        let mut wait = self.namespace.room().room_wait();
        loop {
            match self.fetched_once(room, path, cold, &mut wait).await {
                // A writer took a page that was promised to this file: room is made once more.
                Err(error) if error.is_full() && room == Room::Awaited => match wait.pause() {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => return Err(error),
                },
                result => return result,
            }
        }
    }

    async fn fetched_once(
        &self,
        room: Room,
        path: &str,
        cold: &ColdFile,
        wait: &mut RoomWait<'_>,
    ) -> Result<Fetched, RestoreError> {
        let mut cold = cold.clone();
        let mut failed: Vec<Address> = Vec::new();
        let mut backing = None;
        for _ in 0..SOURCES_MAX {
            let Some(peers) = self.nearby.get() else { break };
            cold = peers.find(&cold, &failed).await;
            let (file, seal) = self.home_of(&cold);
            let mut suppliers = peers.suppliers(file, seal);
            suppliers.retain(|supplier| !failed.contains(supplier));
            let Some((_, chunks)) = cold.checksums.clone().filter(|_| !suppliers.is_empty()) else { break };
            let landing = match backing.take() {
                Some(landing) => landing,
                None => self.room_for(room, path, &cold, wait).await?,
            };
            let _growing = landing.growing();
            let plan = PeerPlan { path: path.to_owned(), file, seal, size_bytes: cold.size_bytes, chunks };
            match fetch_from_peers(peers, plan, Arc::clone(&landing), Arc::clone(&self.metrics)).await {
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
            None => self.room_for(room, path, &cold, wait).await?,
        };
        let _growing = backing.growing();
        let plan = FetchPlan {
            path: path.to_owned(),
            key: object.key.clone(),
            size_bytes: cold.size_bytes,
            chunks: Arc::clone(chunks),
            layout: object.layout(),
        };
        self.fetch(plan, Arc::clone(&backing)).await?;
        Ok((backing, cold, Origin::Object))
    }

    /// Returns the file and the seal by which other nodes know the bytes: a copy that is kept here has an identity of its own.
    fn home_of(&self, cold: &ColdFile) -> (FileId, SealNumber) {
        self.namespace
            .peer_copies()
            .copy_at(cold.node)
            .map_or((cold.file, cold.seal), |copy| (copy.file, copy.sealed.number))
    }

    /// Returns a backing file for the whole file. Waits, up to a limit, while memory is being freed.
    async fn room_for(
        &self,
        room: Room,
        path: &str,
        cold: &ColdFile,
        wait: &mut RoomWait<'_>,
    ) -> Result<Arc<Backing>, RestoreError> {
        let size_bytes = cold.size_bytes;
        loop {
            let made = match room {
                Room::Now => self.namespace.room().backing_for_prefetch(size_bytes),
                Room::Awaited => self.namespace.room().backing_for(Some(size_bytes)),
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

    /// Reads one file's object into `landing`, each chunk verified.
    ///
    /// # Errors
    /// The errors of [`fetch`].
    pub(crate) async fn fetch<L: Landing>(&self, plan: FetchPlan, landing: Arc<L>) -> Result<(), FetchError> {
        let (store, flight) = (Arc::clone(&self.store), Arc::clone(&self.fetches));
        fetch(store, plan, landing, flight, Arc::clone(&self.metrics)).await
    }
}

/// Whether to wait for memory that is being freed: an open waits, a prefetch does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    Awaited,
    Now,
}

/// Verified bytes, their file as it is known by then, and their origin.
type Fetched = (Arc<Backing>, ColdFile, Origin);

/// The reason why a cold file did not become hot.
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
    NoSpace { path: String, size_bytes: u64, source: Tier1Error },
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error("{path} changed while it was fetched")]
    Changed { path: String, source: FsError },
}

impl RestoreError {
    /// Whether no copy is left; false if copies are only out of reach.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        match self {
            Self::NoCopy { .. } | Self::Unreadable { .. } => true,
            // The range is missing because the object is too short.
            Self::Fetch(FetchError::Store { source: StoreError::Range { .. }, .. }) => true,
            Self::Fetch(error) => matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound),
            // Another node may have the file when that node is back.
            Self::Peer(_) | Self::NoSpace { .. } | Self::Changed { .. } => false,
        }
    }

    /// Whether this node lacks room for the file: there are copies, and the file may be fetched once there is room.
    #[must_use]
    pub fn is_full(&self) -> bool {
        match self {
            Self::NoSpace { .. } => true,
            Self::Fetch(error) => error.kind() == ErrorKind::NoSpace,
            Self::Peer(PeerError::Write { source, .. }) => source.kind() == io::ErrorKind::StorageFull,
            Self::NoCopy { .. } | Self::Unreadable { .. } | Self::Peer(_) | Self::Changed { .. } => false,
        }
    }

    /// Returns the error for the caller of open(2).
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

/// The source of a file's fetched bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Peer,
    Object,
}

impl Origin {
    /// Returns the origin as a word for reports.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Object => "object",
        }
    }

    /// Returns the origin as a phrase for sentences.
    pub(crate) const fn place(self) -> &'static str {
        match self {
            Self::Peer => "another node",
            Self::Object => "Tier-3",
        }
    }
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

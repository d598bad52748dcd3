//! State that all parts of the receiver share.
//!
//! Owns: whether a copy here may be relied on. Does not own: requests (`receive`), files coming in (`incoming`), readers (`serve`).

use crate::chunk;
use crate::chunk::bytes::blocking;
use crate::metrics::Metrics;
use crate::restore::coming::Coming;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tidemark_namespace::{Namespace, SealPin};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::file::Seal;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::replication::{Holder, LandingEvent, SMALL_BYTES};
use tidemark_tier1::Tier1;
use tidemark_transport::Link;
use tokio::time::Instant;

/// The state that all parts of the receiver share.
pub(super) struct Here {
    pub(super) namespace: Arc<Namespace>,
    pub(super) tier1: Arc<Tier1>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) holder: Holder,
    pub(super) coming: Arc<Coming>,
    pub(super) verify_threads: usize,
    pub(super) link: OnceLock<Arc<dyn Link>>,
    pub(super) began: Instant,
}

impl std::fmt::Debug for Here {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Here").field("holder", &self.holder).finish_non_exhaustive()
    }
}

impl Here {
    pub(super) fn now(&self) -> Duration {
        Instant::now().saturating_duration_since(self.began)
    }

    pub(super) fn link(&self) -> &Arc<dyn Link> {
        self.link.get().expect("requests come over the link, so it is there")
    }

    /// Returns whether there is a good copy of these bytes, or a file with the same size and checksum.
    pub(super) async fn found(
        self: &Arc<Self>,
        file: FileId,
        seal: SealNumber,
        size_bytes: u64,
        crc: Crc64,
    ) -> LandingEvent {
        let copy = self.good_copy(file, seal).await.is_some_and(|copy| copy == (size_bytes, crc));
        let namespace = Arc::clone(&self.namespace);
        let alike = !copy
            && size_bytes > SMALL_BYTES
            && blocking(move || namespace.peer_copies().sealed_alike(file, size_bytes, crc).is_some()).await;
        LandingEvent::Found { copy, alike }
    }

    /// Returns size and checksum of a good copy. A copy that was here before this daemon started is verified first.
    pub(super) async fn good_copy(self: &Arc<Self>, file: FileId, seal: SealNumber) -> Option<(u64, Crc64)> {
        let copy = self.namespace.peer_copies().copy(file, seal)?;
        if copy.unverified {
            let pin = self.namespace.peer_copies().pin_copy(file, seal)?;
            if !self.is_good(pin, copy.sealed.clone()).await {
                self.metrics.verify_mismatches.get_or_create(&[("copy", "peer")]).inc();
                self.namespace.peer_copies().lose_copy(
                    file,
                    seal,
                    "it was bad when it was looked at after a restart",
                );
                return None;
            }
            self.namespace.seals().verified(copy.own, seal);
        }
        Some((copy.sealed.size_bytes, copy.sealed.crc))
    }

    /// Verifies every byte.
    pub(super) async fn is_good(&self, pin: SealPin, sealed: Seal) -> bool {
        let threads = self.verify_threads;
        blocking(move || match pin.backing.map() {
            Ok(mapping) => {
                mapping.len() as u64 == sealed.size_bytes
                    && chunk::hash(&mapping, threads).chunks == sealed.chunks
            }
            Err(error) => {
                tracing::error!(%error, "a sealed file cannot be mapped to be looked at");
                false
            }
        })
        .await
    }
}

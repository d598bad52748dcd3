//! Tier-3 as this start found it, and the right to commit there.
//!
//! Owns: the order of opening, probing and fencing, and what each failure means for the exit code. Does not own: stores
//! (engine), leases (`lease`).

use crate::cli::Failure;
use crate::lease::Lease;
use crate::state_dir::StateDir;
use anyhow::Context;
use std::sync::Arc;
use std::time::Duration;
use tidemark_engine::settings::Settings;
use tidemark_engine::store::{self, Probe, Store, StoreError, raise_epoch};
use tidemark_protocol::id::Epoch;

/// Between two tries while a mount serves and Tier-3 is away.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Tier3 {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) probe: Probe,
    pub(crate) lease: Lease,
    pub(crate) epoch: Epoch,
}

impl Tier3 {
    /// Opens, probes and fences.
    pub(crate) async fn open(settings: &Settings, state_dir: &StateDir, name: &str) -> Result<Self, Failure> {
        let store = store::open(&settings.tier3.url).await.map_err(|error| match error {
            StoreError::Url { .. } => Failure::usage(error),
            error => Failure::unavailable(anyhow::Error::from(error).context("Tier-3 cannot be used")),
        })?;
        let probe = store::probe(store.as_ref())
            .await
            .context("Tier-3 cannot be used")
            .map_err(Failure::unavailable)?;
        let lease = Lease::take(settings, state_dir, &store, name).await.map_err(Failure::unavailable)?;
        let epoch = lease.epoch();
        let highest = raise_epoch(store.as_ref(), epoch)
            .await
            .context("Tier-3 cannot be used")
            .map_err(Failure::unavailable)?;
        if highest > epoch {
            return Err(Failure::fenced(anyhow::anyhow!(
                "epoch {highest} is in Tier-3, and our lease gave {epoch}: another coordinator commits there"
            )));
        }
        Ok(Self { store, probe, lease, epoch })
    }

    /// As a node sees it that does not decide: it is not asked anything now, and what it is like the coordinator knows.
    pub(crate) async fn of_member(settings: &Settings) -> Result<Self, Failure> {
        let store = store::LaterStore::open(&settings.tier3.url).await.map_err(Failure::usage)?;
        Ok(Self { store, probe: Probe::unknown(), lease: Lease::Elsewhere, epoch: Epoch(0) })
    }

    /// The same while a mount serves already: it is tried until it succeeds, and what is in memory is served meanwhile.
    pub(crate) async fn open_in_the_end(settings: &Settings, state_dir: &StateDir, name: &str) -> Self {
        let mut said = String::new();
        loop {
            match Self::open(settings, state_dir, name).await {
                Ok(tier3) => return tier3,
                Err(failure) => {
                    let why = failure.to_string();
                    if why != said {
                        tracing::warn!(%why, "memory is served, and Tier-3 is tried again");
                        said = why;
                    }
                    tokio::time::sleep(TRY_AGAIN).await;
                }
            }
        }
    }
}

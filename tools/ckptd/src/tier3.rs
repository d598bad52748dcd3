//! Tier-3 as this start found it, and the right to commit there.
//!
//! Owns: the order of opening, probing and fencing, and what each failure means for the exit code. Does not own: stores
//! (engine), leases (`lease`).

use crate::alone::Alone;
use crate::cli::Failure;
use crate::lease::Lease;
use crate::state_dir::StateDir;
use anyhow::Context;
use std::sync::Arc;
use std::time::Duration;
use tidemark_engine::settings::Settings;
use tidemark_engine::store::{self, Probe, Store, StoreError, raise_epoch};
use tidemark_protocol::id::Epoch;

/// A Tier-3 that has not answered for so long is named as what a start waits for, and then again and again.
const SAID_AFTER: Duration = Duration::from_secs(3);
const SAID_EVERY: Duration = Duration::from_secs(10);

/// Between two tries while a mount serves and Tier-3 is away.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Tier3 {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) probe: Probe,
    pub(crate) lease: Lease,
    /// This daemon's sign of life, where no shared lease says who commits.
    pub(crate) alone: Option<Alone>,
    pub(crate) epoch: Epoch,
}

/// Who opens a Tier-3.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opener<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) state_dir: &'a StateDir,
    pub(crate) name: &'a str,
    pub(crate) keeper: Option<u32>,
    /// A daemon that holds this Tier-3 is superseded.
    pub(crate) take_over: bool,
}

/// Says what is waited for where `work` takes long, and again and again.
pub(crate) async fn waited_for<T>(store: &str, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    let began = tokio::time::Instant::now();
    let mut pause = SAID_AFTER;
    loop {
        match tokio::time::timeout(pause, work.as_mut()).await {
            Ok(done) => return done,
            Err(_) => {
                let waited_s = began.elapsed().as_secs();
                tracing::warn!(
                    store,
                    waited_s,
                    "Tier-3 has not answered yet; ckptd waits for it. SIGTERM ends it"
                );
                pause = SAID_EVERY;
            }
        }
    }
}

impl Tier3 {
    /// Opens, probes and fences. A Tier-3 that takes long is named in the log meanwhile.
    pub(crate) async fn open(opener: Opener<'_>) -> Result<Self, Failure> {
        waited_for(&opener.settings.tier3.url, Self::open_now(opener)).await
    }

    async fn open_now(opener: Opener<'_>) -> Result<Self, Failure> {
        let Opener { settings, state_dir, name, keeper, take_over } = opener;
        let store = store::open(&settings.tier3.url).await.map_err(|error| match error {
            StoreError::Url { .. } => Failure::usage(error),
            error => Failure::unavailable(anyhow::Error::from(error).context("Tier-3 cannot be used")),
        })?;
        let probe = store::probe(store.as_ref())
            .await
            .context("Tier-3 cannot be used")
            .map_err(Failure::unavailable)?;
        // A lease in Tier-3 says by itself who has it.
        let alone = if settings.node.lease.as_deref() == Some("tier3") {
            None
        } else {
            Some(Alone::take(&store, name, keeper, state_dir, take_over).await?)
        };
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
        Ok(Self { store, probe, lease, alone, epoch })
    }

    /// As a node sees it that does not decide: it is not asked anything now, and what it is like the coordinator knows.
    pub(crate) async fn of_member(settings: &Settings) -> Result<Self, Failure> {
        let store = store::LaterStore::open(&settings.tier3.url).await.map_err(Failure::usage)?;
        Ok(Self { store, probe: Probe::unknown(), lease: Lease::Elsewhere, alone: None, epoch: Epoch(0) })
    }

    /// The same while a mount serves already: it is tried until it succeeds, and what is in memory is served meanwhile.
    pub(crate) async fn open_in_the_end(opener: Opener<'_>) -> Self {
        let mut said = String::new();
        loop {
            match Self::open(opener).await {
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

//! The coordinator's lease of this node, whichever kind was asked for.
//!
//! Owns: the choice, taking it at the start, renewing it. Does not own: the kinds (control).

use crate::api::Daemon;
use crate::state_dir::StateDir;
use anyhow::Context;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_control::lease::{FileLease, LeaseTimes, StoreLease, Turn};
use tidemark_engine::settings::Settings;
use tidemark_engine::store::{Store, current_epoch};
use tidemark_protocol::id::Epoch;

/// How long a new holder waits for the lease in Tier-3 before it says who has it.
const LEASE_PATIENCE: Duration = Duration::from_secs(30);

/// The coordinator's lease of this node.
#[derive(Debug)]
pub(crate) enum Lease {
    File(FileLease),
    Store(Box<StoreLease>, Epoch),
    /// Another node is the coordinator, or whichever the lease in an etcd names (`seat`).
    Elsewhere,
}

impl Lease {
    pub(crate) async fn take(
        settings: &Settings,
        state_dir: &StateDir,
        store: &Arc<dyn Store>,
        name: &str,
    ) -> anyhow::Result<Self> {
        let in_tier3 = current_epoch(store.as_ref()).await.context("Tier-3 cannot be used")?;
        match settings.node.lease.as_deref() {
            None => Ok(Self::File(FileLease::acquire(&state_dir.lease(), in_tier3)?)),
            Some("tier3") => {
                let nonce = getrandom::u64().context("the kernel has random numbers")?;
                let mut lease =
                    StoreLease::new(Arc::clone(store), name.to_owned(), nonce, LeaseTimes::default());
                let give_up = Instant::now() + LEASE_PATIENCE;
                loop {
                    match lease.try_acquire(Instant::now()).await? {
                        Turn::Ours(epoch) => return Ok(Self::Store(Box::new(lease), epoch)),
                        Turn::Theirs { holder, epoch, wait } => {
                            anyhow::ensure!(
                                Instant::now() + wait < give_up,
                                "the lease in Tier-3 is held by {holder} (epoch {epoch}); stop it, or wait until it is gone"
                            );
                            tokio::time::sleep(wait).await;
                        }
                    }
                }
            }
            Some(other) => {
                let path = other.strip_prefix("file:").with_context(|| {
                    format!("--lease {other:?} is not supported; write file:PATH, tier3, or etcd://HOST:PORT/PREFIX for several nodes")
                })?;
                Ok(Self::File(FileLease::acquire(Path::new(path), in_tier3)?))
            }
        }
    }

    pub(crate) fn epoch(&self) -> Epoch {
        match self {
            Self::File(lease) => lease.epoch(),
            Self::Store(_, epoch) => *epoch,
            Self::Elsewhere => Epoch(0),
        }
    }

    /// Holds the lease until dropped; a lease that is lost fences the node.
    pub(crate) async fn keep(self, daemon: Arc<Daemon>) {
        match self {
            Self::File(_lease) => std::future::pending().await,
            Self::Elsewhere => std::future::pending().await,
            Self::Store(mut lease, _) => loop {
                tokio::time::sleep(LeaseTimes::default().term / 3).await;
                if let Err(error) = lease.renew(Instant::now()).await {
                    tracing::warn!(error = &error as &dyn std::error::Error, "the lease was not renewed");
                    if lease.epoch(Instant::now()).is_none() {
                        daemon.node.fence(error.to_string()).await;
                        return;
                    }
                }
            },
        }
    }
}

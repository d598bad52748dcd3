//! The coordinator's lease of this node, whichever kind was asked for.
//!
//! Owns: the choice, taking it at the start, renewing it. Does not own: the kinds (control).

use crate::alone::{Alone, SIGN_EVERY};
use crate::api::Daemon;
use crate::state_dir::StateDir;
use anyhow::Context;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_control::lease::{FileLease, LeaseTimes, StoreLease, Turn};
use tidemark_engine::settings::Settings;
use tidemark_protocol::id::Epoch;
use tidemark_store::{Store, current_epoch};

/// How long a new holder waits for the lease in Tier-3 before it says who has it.
const LEASE_PATIENCE: Duration = Duration::from_secs(30);

/// The coordinator's lease of this node.
#[derive(Debug)]
pub(crate) enum Lease {
    File(FileLease),
    Store(Box<StoreLease>, Epoch),
    /// Another node is the coordinator, or the holder of a lease in an etcd (`seat`).
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
                    format!("--lease {other:?} is not supported; write file:PATH or tier3, or --etcd http[s]://HOST:PORT/PREFIX for several nodes")
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

    /// Holds the lease, and Tier-3 for a daemon that is `alone`, until `ending`; what is lost fences the node.
    pub(crate) async fn keep(
        mut self,
        mut alone: Option<Alone>,
        daemon: Arc<Daemon>,
        ending: impl Future<Output = ()>,
    ) {
        let lost = tokio::select! {
            why = self.renew() => Some(why),
            why = give_signs(&mut alone) => Some(why),
            () = ending => None,
        };
        if let Some(why) = lost {
            daemon.node.fence(why).await;
            return;
        }
        if let Some(alone) = alone {
            alone.release().await;
        }
    }

    /// Renews the lease until it is lost; says why.
    async fn renew(&mut self) -> String {
        let Self::Store(lease, _) = self else { return std::future::pending().await };
        loop {
            tokio::time::sleep(LeaseTimes::default().term / 3).await;
            if let Err(error) = lease.renew(Instant::now()).await {
                tracing::warn!(error = &error as &dyn std::error::Error, "the lease was not renewed");
                if lease.epoch(Instant::now()).is_none() {
                    return error.to_string();
                }
            }
        }
    }
}

/// Says that this daemon lives until another has taken its place; says who.
async fn give_signs(alone: &mut Option<Alone>) -> String {
    let Some(alone) = alone else { return std::future::pending().await };
    loop {
        tokio::time::sleep(SIGN_EVERY).await;
        if let Err(why) = alone.renew().await {
            tracing::error!(%why, "another daemon commits in this Tier-3");
            return why;
        }
    }
}

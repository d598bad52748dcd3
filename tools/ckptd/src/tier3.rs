//! Tier-3 as this start found it, and the right to commit there.
//!
//! Owns: the order of opening, probing and fencing, and what each failure means for the exit code. Does not own: stores
//! (engine), leases (`lease`), a daemon that serves before it has the right (`taking_up`).

use crate::alone::{Alone, Sign};
use crate::api::Daemon;
use crate::cli::Failure;
use crate::lease::Lease;
use crate::state_dir::StateDir;
use std::sync::Arc;
use std::time::Duration;
use tidemark_engine::settings::Settings;
use tidemark_protocol::id::Epoch;
use tidemark_store::{LaterStore, Operation, Probe, Store, StoreError, raise_epoch};
use tokio::sync::oneshot;

/// Time without an answer after which the log names Tier-3 as what a start waits for.
const SAID_AFTER: Duration = Duration::from_secs(3);
const SAID_EVERY: Duration = Duration::from_secs(10);

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Tier3 {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) probe: Probe,
    pub(crate) right: Right,
}

/// The right to commit.
#[derive(Debug)]
pub(crate) struct Right {
    lease: Lease,
    /// Sign of life of this daemon, if no shared lease says which node commits.
    alone: Option<Alone>,
    pub(crate) epoch: Epoch,
}

/// Opener of a Tier-3, with the daemon's identity.
#[derive(Debug)]
pub(crate) struct Opener {
    pub(crate) settings: Settings,
    pub(crate) state_dir: StateDir,
    pub(crate) name: String,
    pub(crate) keeper: Option<u32>,
    /// Whether a daemon that holds this Tier-3 is superseded.
    pub(crate) take_over: bool,
    /// The sign of life that opening takes; the code that ends the opener gives it back.
    pub(crate) sign: Sign,
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
    pub(crate) async fn open(opener: &Opener) -> Result<Self, Failure> {
        waited_for(&opener.settings.tier3.url, Self::open_now(opener)).await
    }

    async fn open_now(opener: &Opener) -> Result<Self, Failure> {
        let store = tidemark_store::open(&opener.settings.tier3.url).await.map_err(|error| match error {
            StoreError::Url { .. } => Failure::usage(error),
            error => unusable(error),
        })?;
        let (probe, right) = opener.take(&store).await?;
        Ok(Self { store, probe, right })
    }

    /// As a node sees it that does not decide: it is not asked anything now, and what it is like the coordinator knows.
    pub(crate) async fn of_member(settings: &Settings) -> Result<Self, Failure> {
        let store = LaterStore::open(&settings.tier3.url).await.map_err(Failure::usage)?;
        Ok(Self::unknown(store))
    }

    /// Before this node has tried it.
    pub(crate) fn unknown(store: Arc<dyn Store>) -> Self {
        let right = Right { lease: Lease::Elsewhere, alone: None, epoch: Epoch(0) };
        Self { store, probe: Probe::unknown(), right }
    }
}

impl Opener {
    /// Probes an open store, and takes the right to commit there. Nothing of this node is there before it has the right.
    pub(crate) async fn take(&self, store: &Arc<dyn Store>) -> Result<(Probe, Right), Failure> {
        let Self { settings, state_dir, name, keeper, take_over, sign } = self;
        let probe = tidemark_store::probe(store.as_ref()).await.map_err(unusable)?;
        // A lease in Tier-3 says by itself who has it.
        let alone = if settings.node.lease.as_deref() == Some("tier3") {
            None
        } else {
            Some(Alone::take(store, name, *keeper, state_dir, *take_over, sign).await?)
        };
        let lease = Lease::take(settings, state_dir, store, name).await.map_err(Failure::unavailable)?;
        let epoch = lease.epoch();
        let highest = raise_epoch(store.as_ref(), epoch).await.map_err(unusable)?;
        if highest > epoch {
            return Err(Failure::fenced(anyhow::anyhow!(
                "epoch {highest} is in Tier-3, and our lease gave {epoch}: another coordinator commits there"
            )));
        }
        Ok((probe, Right { lease, alone, epoch }))
    }
}

impl Right {
    /// Holds it until `ending`; what is lost fences the node.
    pub(crate) async fn keep(self, daemon: Arc<Daemon>, ending: oneshot::Receiver<()>) {
        let ended = async {
            // An error means that the sender is gone, which is the end, too.
            let _ = ending.await;
        };
        self.lease.keep(self.alone, daemon, ended).await;
    }
}

fn unusable(error: StoreError) -> Failure {
    let what = says(&error);
    Failure::unavailable(anyhow::Error::from(error).context(what))
}

/// How it is with a Tier-3 that a daemon cannot commit to, for people.
fn says(error: &StoreError) -> &'static str {
    match error {
        StoreError::NoSpace { .. } => "Tier-3 is full: it takes nothing",
        StoreError::Refused { operation: Operation::Create | Operation::Upload, .. } => {
            "Tier-3 takes nothing: it is read-only, or refuses what is written"
        }
        _ => "Tier-3 cannot be used",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier3_that_takes_nothing_is_told_from_one_that_is_away() {
        let (key, store) = ("k".to_owned(), "file:///t3".to_owned());
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let full = StoreError::NoSpace {
            operation: Operation::Create,
            key: key.clone(),
            store: store.clone(),
            source: full,
        };
        assert!(says(&full).contains("full"));
        let text = unusable(full).to_string();
        assert!(text.contains("full") && text.contains("file:///t3"), "{text}");
        let refused = |operation| StoreError::Refused {
            operation,
            key: key.clone(),
            store: store.clone(),
            reason: "read-only".to_owned(),
            action: "mount it read-write".to_owned(),
        };
        assert!(says(&refused(Operation::Create)).contains("read-only"));
        assert_eq!(says(&refused(Operation::List)), "Tier-3 cannot be used");
    }
}

//! The coordinator role, if a lease in an etcd names its holder.
//!
//! Owns: following the lease's holder, or commands where the lease cannot be read; taking the lease when it is free; a node's steps when it
//! becomes the coordinator and when it ceases to be. Does not own: the lease (control), a coordinator's work (the catalog, the engine),
//! following as a member (`engine::cluster::follow`).
//!
//! The beginning has an order: this node's tree becomes the previous coordinator's catalog, which etcd has. Then all members come and
//! publish what they know, and Tier-3 is read as soon as it answers. Nothing is written to Tier-3 before that.

use crate::api::Daemon;
use crate::cli::Failure;
use crate::peers::address;
use anyhow::Context;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tidemark_control::catalog::{Catalog, Legacy, TakenUp, Terms};
use tidemark_control::lease::{
    EtcdAccess, EtcdCatalog, EtcdLease, LeaseError, LeaseTimes, LoadError, Turn, current_epoch,
};
use tidemark_engine::cluster::{Cluster, Presence, Seat};
use tidemark_engine::node::{Names, Recovered, recover};
use tidemark_engine::save::drain::Raised;
use tidemark_protocol::cluster::kept::KeptCatalog;
use tidemark_protocol::id::Epoch;
use tidemark_protocol::membership::MemberList;
use tidemark_store::probe;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

/// Interval at which a node without the lease reads it.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How long an ending node leaves the free role to the nodes that stay: until the last of them has tried, with two requests to etcd of the
/// longest. After that the ending node takes it: all nodes may end at once, and none drains without a coordinator.
const STAYING_FIRST: Duration = Duration::from_secs(4);

/// Interval between two tries to read the catalog in etcd.
const LOAD_AGAIN: Duration = Duration::from_millis(100);

/// How long a beginning coordinator waits for Tier-3 to show whether etcd's catalog is the last coordinator's. Names wait meanwhile.
const TIER3_WAIT: Duration = Duration::from_secs(5);

/// Interval between two tries to read Tier-3.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// A node that may become the coordinator.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub(crate) etcd: EtcdAccess,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) daemon: Arc<Daemon>,
    pub(crate) presence: Arc<Presence>,
    /// The settings for members.
    pub(crate) terms: Terms,
    /// Held while this node's tree becomes a catalog, which nothing breaks off.
    pub(crate) settling: Arc<tokio::sync::Mutex<()>>,
}

/// Whether a node tries to take a role that has been free for this long. `is_ending`: the node would leave the role again as soon as it has
/// drained, and the rule of its drain would change twice.
fn stands(is_ending: bool, free_for: Duration) -> bool {
    !is_ending || free_for >= STAYING_FIRST
}

/// Asks the etcd of a candidate once: a start that cannot know who decides says so at once.
pub(crate) async fn look(etcd: Option<&EtcdAccess>) -> Result<(), Failure> {
    let Some(etcd) = etcd else { return Ok(()) };
    let lease = EtcdLease::new(etcd.clone(), String::new(), 0, LeaseTimes::etcd());
    lease.holder().await.context("who is the coordinator cannot be asked").map_err(Failure::unavailable)?;
    Ok(())
}

impl Candidate {
    /// Follows, and leads when it is this node's turn; until dropped.
    pub(crate) async fn run(self) {
        let holder = format!("{}@{}", self.cluster.life.node, self.presence.address);
        let nonce = self.daemon.start.0;
        let mut lease = EtcdLease::new(self.etcd.clone(), holder.clone(), nonce, LeaseTimes::etcd());
        let mut free_since = None;
        let mut said = String::new();
        loop {
            let found = lease.holder().await.map_err(with_causes);
            self.daemon.troubles.etcd_is(found.as_ref().err());
            match found {
                Ok(Some((theirs, epoch))) => {
                    free_since = None;
                    said.clear();
                    if theirs != holder {
                        self.follow(&theirs, epoch);
                    } else if self.end_earlier_start(&lease).await {
                        continue;
                    }
                }
                Ok(None) => {
                    said.clear();
                    let since = *free_since.get_or_insert_with(Instant::now);
                    let ending = self.daemon.draining.load(Ordering::Acquire);
                    if stands(ending, since.elapsed()) && self.take(&mut lease).await {
                        free_since = None;
                    }
                }
                Err(why) => {
                    if said != why {
                        tracing::warn!(%why, "the lease cannot be looked at; what is here goes on");
                        said = why;
                    }
                    // A node that got the members from the coordinator of the highest epoch reaches all but etcd.
                    if let Some(commander) = self.cluster.following.commander() {
                        self.cluster.sit(Seat::There(commander));
                    }
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Ends the term of this node's earlier daemon, which died: no node need wait until that term is over.
    async fn end_earlier_start(&self, lease: &EtcdLease) -> bool {
        match lease.end_earlier_start().await {
            Ok(ended) => ended,
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the term of before ends by itself");
                false
            }
        }
    }

    /// Follows the lease's holder as the coordinator.
    fn follow(&self, holder: &str, epoch: Epoch) {
        match address(holder) {
            Ok(coordinator) => {
                if self.cluster.following.saw_epoch(epoch) {
                    self.cluster.sit(Seat::There(coordinator));
                }
            }
            Err(error) => {
                tracing::error!(%error, "the lease is not held by a node; is its prefix another's?")
            }
        }
    }

    /// Takes the free role, and leads until it is lost; false if another node was quicker.
    async fn take(&self, lease: &mut EtcdLease) -> bool {
        match lease.try_acquire(Instant::now()).await {
            Ok(Turn::Ours(epoch)) => {
                if epoch <= self.cluster.following.epoch() {
                    let seen = self.cluster.following.epoch();
                    tracing::error!(%epoch, %seen, "the etcd gives an epoch that is past: it lost its data; restore it from its backup");
                    let _ = lease
                        .release()
                        .await
                        .inspect_err(|error| tracing::debug!(%error, "the lease ends by itself"));
                    return false;
                }
                self.lead(lease, epoch).await;
                true
            }
            Ok(Turn::Theirs { .. }) => false,
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the lease cannot be taken");
                false
            }
        }
    }

    /// Coordinates until the lease is lost.
    async fn lead(&self, lease: &mut EtcdLease, epoch: Epoch) {
        let stored = match self.stored(lease).await {
            Ok(stored) => stored,
            Err(why) => {
                tracing::warn!(%why, "the members of before are not known, and the seat is left");
                return;
            }
        };
        let (keeping, kept) = oneshot::channel();
        // Apart, since it works for seconds on a large catalog, and the lease is to be renewed meanwhile.
        let mut reign = JoinSet::new();
        reign.spawn(self.clone().reign(epoch, lease.until(), stored, keeping));
        let why = tokio::select! {
            why = keep(lease, kept) => why,
            Some(ended) = reign.join_next() => match ended {
                Ok(never) => match never {},
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            },
        };
        reign.shutdown().await;
        drop(self.settling.lock().await);
        self.cluster.sit(Seat::Unknown);
        self.daemon.troubles.catalog_is(None);
        self.daemon.node.decide_no_more().await;
        tracing::warn!(%why, "this node is not the coordinator any more");
    }

    /// The members that the last coordinator stored.
    async fn stored(&self, lease: &EtcdLease) -> Result<MemberList, String> {
        let stored = lease.read_members().await.map_err(with_causes)?;
        let list = stored.map(|bytes| serde_json::from_slice(&bytes)).transpose();
        Ok(list.map_err(|error| format!("the member list is not understood: {error}"))?.unwrap_or_default())
    }

    /// Loads the previous coordinator's catalog from etcd. None if etcd does not have all of it, or if Tier-3 knows of a later coordinator
    /// that did not write there. From now on only this coordinator writes it. Tries for as long as it takes: without the catalog nothing is
    /// known.
    async fn kept(&self, log: &EtcdCatalog) -> Option<KeptCatalog> {
        let mut said = String::new();
        let kept = loop {
            let why = match log.load().await {
                Ok(kept) => break kept?,
                Err(LoadError::Kept { place, source }) => {
                    tracing::error!(%place, %source, "the catalog in etcd is not used: names are read from Tier-3 and from the members");
                    return None;
                }
                Err(error) => format!("{:#}", anyhow::Error::from(error)),
            };
            if why != said {
                tracing::warn!(%why, "the catalog is not read yet");
                said = why;
            }
            tokio::time::sleep(LOAD_AGAIN).await;
        };
        let of = kept.mark.epoch;
        // A node that followed that coordinator knows that there was no later one.
        if self.cluster.following.epoch() != of {
            let store = &self.daemon.node.shared().drain.store;
            match tokio::time::timeout(TIER3_WAIT, current_epoch(store.as_ref())).await {
                Ok(Ok(Some(found))) if found > of => {
                    tracing::error!(%found, %of, "Tier-3 had a later coordinator than etcd: the catalog in etcd is old, and names are read from Tier-3");
                    return None;
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    tracing::warn!(%error, "whether Tier-3 had a later coordinator than etcd is not known")
                }
                Err(_) => tracing::warn!(
                    "whether Tier-3 had a later coordinator than etcd is not known: it does not answer"
                ),
            }
        }
        Some(kept)
    }

    /// Takes the coordinator role, and does a coordinator's work until dropped.
    async fn reign(
        self,
        epoch: Epoch,
        until: Option<Instant>,
        stored: MemberList,
        keeping: Keeping,
    ) -> std::convert::Infallible {
        let began = Instant::now();
        let log = Arc::new(EtcdCatalog::new(self.etcd.clone(), epoch));
        let legacy = Legacy { stored, kept: self.kept(&log).await };
        self.daemon.node.shared().drain.set_epoch(epoch, false);
        let (presence, terms) = (Arc::clone(&self.presence), self.terms.clone());
        let settling = Arc::clone(&self.settling).lock_owned().await;
        let taken = legacy.take_up(&self.cluster, epoch, presence, terms, settling).await;
        let (knows, TakenUp { catalog, before, is_complete }) = (taken.knows(), taken);
        // The task that renews the lease sets a later end.
        catalog.term.lasts_until(until.map(Into::into));
        // The lease is lost if the receiver is gone; then this ends, too.
        let _ = keeping.send(Arc::clone(&catalog));
        self.cluster.sit(Seat::Here(Arc::clone(&catalog) as Arc<_>));
        if knows {
            self.daemon.node.decide_from_now_on(Recovered::names_only()).await;
        }
        tracing::info!(took_ms = began.elapsed().as_millis(), "the seat is taken");
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&catalog).watch());
        tasks.spawn(Arc::clone(&catalog).keep(log, before.into_kept(), is_complete));
        tasks.spawn(tell_trouble(Arc::clone(&catalog), Arc::clone(&self.daemon)));
        tasks.spawn(Arc::clone(&catalog).tell_removed());
        tasks.spawn(self.clone().take_tier3_up(catalog, if knows { Names::Kept } else { Names::Empty }));
        std::future::pending().await
    }

    /// Reads Tier-3, however often it takes, and decides over checkpoints from then on.
    async fn take_tier3_up(self, catalog: Arc<Catalog>, names: Names) {
        // Tier-3 is to know of no later coordinator than etcd does, see `kept`.
        catalog.announced().await;
        let mut said = String::new();
        loop {
            match self.read_tier3(&catalog, names).await {
                Ok(recovered) => {
                    self.daemon.node.decide_from_now_on(recovered).await;
                    catalog.heard_tier3();
                    tracing::info!("Tier-3 is read: checkpoints are decided over");
                    return;
                }
                Err(error) => {
                    let why = format!("{error:#}");
                    if why != said {
                        tracing::warn!(%why, "Tier-3 is not read yet; nothing is written there");
                        said.clone_from(&why);
                    }
                    self.daemon.node.tier3_is_not_taken_up(why).await;
                    tokio::time::sleep(TRY_AGAIN).await;
                }
            }
        }
    }

    async fn read_tier3(&self, catalog: &Catalog, names: Names) -> anyhow::Result<Recovered> {
        let shared = self.daemon.node.shared();
        let probe = probe(shared.drain.store.as_ref()).await?;
        shared.drain.learn(&probe);
        anyhow::ensure!(
            probe.fencing,
            "several nodes need a Tier-3 in which a create has one winner, and this one has not: {}",
            probe.fencing_reason
        );
        if let Raised::Newer(epoch) = shared.drain.make_sure_of_epoch().await? {
            anyhow::bail!(
                "epoch {epoch} is in Tier-3, and the lease gave {}: another coordinator commits there, or the etcd lost its data",
                shared.drain.epoch()
            );
        }
        if names == Names::Empty {
            // Torn checkpoints show only once everything written is known.
            catalog.nodes_heard().await;
        }
        Ok(recover(shared, names).await?)
    }
}

/// Says in the problems of this node why the catalog is not kept in etcd, until dropped.
async fn tell_trouble(catalog: Arc<Catalog>, daemon: Arc<Daemon>) {
    let mut trouble = catalog.watch_trouble();
    loop {
        daemon.troubles.catalog_is(trouble.borrow_and_update().clone());
        if trouble.changed().await.is_err() {
            return;
        }
    }
}

/// Returns an error's words and those of its causes.
fn with_causes(error: LeaseError) -> String {
    format!("{:#}", anyhow::Error::from(error))
}

/// Channel for the catalog whose members are stored with the lease, and whose followers may doubt the lease.
type Keeping = oneshot::Sender<Arc<Catalog>>;

/// Pause after a check of the lease because of a doubt: a small part of its term.
const DOUBT_PAUSE: Duration = Duration::from_millis(200);

/// Interval between two tries to store the members. Meanwhile no other node may learn that this node has the catalog, and each try is a
/// warning in the log.
const STORE_AGAIN: Duration = Duration::from_millis(250);

/// Renews the lease, and stores the members, until it is lost; says why.
async fn keep(lease: &mut EtcdLease, mut coming: oneshot::Receiver<Arc<Catalog>>) -> String {
    let mut renewal = tokio::time::interval(LeaseTimes::etcd().term / 4);
    renewal.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut members: Option<(Arc<Catalog>, watch::Receiver<u64>)> = None;
    let mut store_at = tokio::time::Instant::now();
    loop {
        let until = lease.until();
        if let Some((catalog, _)) = &members {
            catalog.term.lasts_until(until.map(Into::into));
        }
        let turn = async {
            let waits = members.is_none();
            let doubting = members.as_ref().map(|(catalog, _)| Arc::clone(catalog));
            let doubted = async {
                match doubting {
                    Some(catalog) => catalog.doubted().await,
                    None => std::future::pending().await,
                }
            };
            let changed = async {
                match &mut members {
                    Some((_, members)) => {
                        tokio::time::sleep_until(store_at).await;
                        members.changed().await.is_ok()
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = renewal.tick() => lease.renew(Instant::now()).await.map(drop),
                // A node that follows another is no proof; etcd is.
                () = doubted => {
                    let renewed = lease.renew(Instant::now()).await.map(drop);
                    // Such a node may come again and again. A lease that is lost is left at once.
                    if lease.epoch(Instant::now()).is_some() {
                        tokio::time::sleep(DOUBT_PAUSE).await;
                    }
                    renewed
                }
                Ok(catalog) = &mut coming, if waits => {
                    let mut stored = catalog.watch_stored();
                    stored.mark_changed();
                    members = Some((catalog, stored));
                    Ok(())
                }
                true = changed => {
                    let (catalog, stored) = members.as_mut().expect("it changed");
                    stored.mark_unchanged();
                    let list = serde_json::to_vec(&catalog.stored()).expect("a list is written as JSON");
                    let written = lease.write_members(&list).await;
                    match &written {
                        // A list that is too large does not become smaller by itself.
                        Ok(()) | Err(LeaseError::MembersTooLarge { .. }) => {}
                        // There may be no next change for long, and a successor begins with what is stored.
                        Err(_) => {
                            stored.mark_changed();
                            store_at = tokio::time::Instant::now() + STORE_AGAIN;
                        }
                    }
                    written
                }
            }
        };
        // A request that is under way does not make the term longer.
        let result = match until {
            Some(until) => match tokio::time::timeout_at(until.into(), turn).await {
                Ok(result) => result,
                Err(_) => return "etcd did not answer before the term was over".to_owned(),
            },
            None => return "the term is over".to_owned(),
        };
        if let Err(error) = result {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the lease was not renewed, or its members not stored"
            );
            if lease.epoch(Instant::now()).is_none() {
                return with_causes(error);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_ends_comes_last() {
        let stands_at =
            |is_ending| [Duration::ZERO, STAYING_FIRST].map(|free_for| stands(is_ending, free_for));
        assert_eq!([stands_at(false), stands_at(true)], [[true, true], [false, true]]);
    }
}

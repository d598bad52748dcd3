//! An etcd, as far as nodes use it here: the lease of the coordinator, its members, and the catalog.
//!
//! Owns: one order of transactions, and the fence: who has lost the lease changes nothing. Does not own: requests and their encoding
//! (`control::lease::etcd`, which the cluster suite runs against a real one).

use super::wire::Wire;
use async_trait::async_trait;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidemark_control::catalog::{CatalogLog, Step, StepError};
use tidemark_protocol::cluster::kept::{Change, Entry, KeptCatalog, Mark};
use tidemark_protocol::id::Epoch;
use tidemark_protocol::membership::MemberList;
use tokio::time::Instant;

/// The name of etcd's place in the network.
pub(super) const PLACE: &str = "etcd";

/// How long a lease lasts after its last renewal arrived: the product's term, and what etcd takes to end one.
pub(super) const LASTS: Duration = Duration::from_millis(2500);

/// How long a request waits for its answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// No answer came: the request may have been carried out.
#[derive(Debug)]
pub(super) struct NoAnswer;

pub(super) struct Etcd {
    wire: Arc<Wire>,
    state: Mutex<State>,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Etcd")
    }
}

#[derive(Default)]
struct State {
    revision: u64,
    lease: Option<Lease>,
    members: MemberList,
    keys: BTreeMap<String, (Vec<u8>, u64)>,
    mark: Option<Mark>,
}

#[derive(Clone)]
struct Lease {
    node: String,
    epoch: Epoch,
    until: Instant,
}

impl Etcd {
    pub(super) fn new(wire: Arc<Wire>) -> Arc<Self> {
        Arc::new(Self { wire, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.lease.as_ref().is_some_and(|lease| lease.until <= Instant::now()) {
            state.lease = None;
        }
        state
    }

    /// Carries a request there, out, and its answer back.
    async fn ask<T>(&self, from: &str, request: impl FnOnce(&mut State) -> T) -> Result<T, NoAnswer> {
        let exchange = async {
            tokio::time::sleep(self.wire.delay()).await;
            if !self.wire.reaches(from, PLACE) {
                return std::future::pending().await;
            }
            let answer = request(&mut self.lock());
            tokio::time::sleep(self.wire.delay()).await;
            if !self.wire.reaches(PLACE, from) {
                return std::future::pending().await;
            }
            answer
        };
        tokio::time::timeout(PATIENCE, exchange).await.map_err(|_| NoAnswer)
    }

    /// Returns the holder of the lease.
    pub(super) async fn holder(&self, from: &str) -> Result<Option<(String, Epoch)>, NoAnswer> {
        self.ask(from, |state| state.lease.as_ref().map(|lease| (lease.node.clone(), lease.epoch))).await
    }

    /// Takes the lease if it is free.
    pub(super) async fn acquire(&self, from: &str) -> Result<Option<Epoch>, NoAnswer> {
        let node = from.to_owned();
        self.ask(from, |state| {
            if state.lease.is_some() {
                return None;
            }
            state.revision += 1;
            let epoch = Epoch(state.revision);
            state.lease = Some(Lease { node, epoch, until: Instant::now() + LASTS });
            Some(epoch)
        })
        .await
    }

    /// Makes a lease last longer. Returns false if it is lost.
    pub(super) async fn renew(&self, from: &str, epoch: Epoch) -> Result<bool, NoAnswer> {
        self.ask(from, |state| {
            let held = state.lease.as_mut().filter(|lease| lease.epoch == epoch);
            held.map(|lease| lease.until = Instant::now() + LASTS).is_some()
        })
        .await
    }

    /// Gives a lease back that an earlier daemon of this node had.
    pub(super) async fn release(&self, from: &str, epoch: Epoch) -> Result<(), NoAnswer> {
        self.ask(from, |state| state.lease.take_if(|lease| lease.epoch == epoch)).await.map(drop)
    }

    pub(super) async fn members(&self, from: &str) -> Result<MemberList, NoAnswer> {
        self.ask(from, |state| state.members.clone()).await
    }

    /// Stores the members, if the lease still is of that epoch.
    pub(super) async fn store_members(
        &self,
        from: &str,
        epoch: Epoch,
        members: MemberList,
    ) -> Result<(), NoAnswer> {
        self.ask(from, |state| {
            if state.lease.as_ref().is_some_and(|lease| lease.epoch == epoch) {
                state.members = members;
            }
        })
        .await
    }

    /// Reads the catalog at one revision; none if it is not whole.
    pub(super) async fn load(&self, from: &str) -> Result<Option<KeptCatalog>, NoAnswer> {
        self.ask(from, |state| {
            let mark = state.mark.filter(|mark| mark.whole)?;
            let entries = state.keys.iter().map(|(key, (value, revision))| Entry {
                key: key.clone(),
                value: value.clone(),
                revision: *revision,
            });
            Some(KeptCatalog::read(mark, entries).expect("what the product wrote it reads"))
        })
        .await
    }
}

/// The catalog of one coordinator in the etcd.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) etcd: Arc<Etcd>,
    pub(super) node: String,
    pub(super) epoch: Epoch,
}

#[async_trait]
impl CatalogLog for Log {
    async fn step(&self, step: &Step) -> Result<(), StepError> {
        let made = self.etcd.ask(&self.node, |state| {
            if state.lease.as_ref().is_none_or(|lease| lease.epoch != self.epoch) {
                return Err(StepError::Lost("the lease is another's".to_owned()));
            }
            let before = state.mark.unwrap_or_default();
            if before.epoch == step.mark.epoch && before.number == step.mark.number {
                return Ok(());
            }
            let follows = if before.epoch == step.mark.epoch { before.number + 1 } else { 1 };
            if step.mark.number != follows {
                return Err(StepError::Changed(format!("step {} came after {before:?}", step.mark.number)));
            }
            state.revision += 1;
            let revision = state.revision;
            for change in &step.changes {
                match change {
                    Change::Put { key, value } => {
                        state.keys.insert(key.clone(), (value.clone(), revision));
                    }
                    Change::Delete { from, until } => {
                        state.keys.retain(|key, _| !(from..until).contains(&key));
                    }
                }
            }
            state.mark = Some(step.mark);
            Ok(())
        });
        made.await.unwrap_or_else(|NoAnswer| Err(StepError::Away("no answer".to_owned())))
    }
}

//! Asking a node to publish what it knows, and to give directories back.
//!
//! Owns: recalls, and what they end among the leases; which directories are recalled after a change without leave. Does not own: whom an
//! answer needs to recall (`look`).

use super::{Catalog, NODE_DEADLINE, State};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tidemark_protocol::cluster::leases::Verdict;
use tidemark_protocol::cluster::members::Standing;
use tidemark_protocol::cluster::wire::ToNode;
use tidemark_protocol::id::NodeName;
use tidemark_protocol::path::split;
use tidemark_transport::{LinkErrorKind, Refusal};

impl State {
    /// Notes that `by` changed a name without leave, and recalls the name's directory from a node that has it alone.
    fn recall_directory_of(&mut self, by: &NodeName, path: &[u8], now: Duration) {
        let directory = split(path).0;
        self.hearing.note_in(by, directory);
        if let Verdict::PublishFirst(holder) = self.leases.read(by, directory, None, now) {
            self.outbox.recalls.insert((holder, directory.to_vec()));
        }
    }
}

/// Recalls, as a coordinator makes them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Recalls<'a> {
    pub(super) catalog: &'a Catalog,
}

impl Recalls<'_> {
    fn is_cut_off(self, node: &NodeName) -> bool {
        let members = self.catalog.cluster.following.members();
        let mut cut_off = members.members.iter().filter(|member| member.standing == Standing::CutOff);
        cut_off.any(|member| member.life.node == *node && !member.gone)
    }

    /// Asks a node to publish its changes, once it is done with `name`, and if `release` to give a directory back.
    pub(super) async fn of(
        self,
        holder: &NodeName,
        path: &[u8],
        name: Option<&[u8]>,
        release: bool,
    ) -> Result<(), Refusal> {
        let (promise, lease) = {
            let leases = &self.catalog.lock().leases;
            (name.and_then(|name| leases.promise_of(holder, path, name)), leases.lease_of(holder, path))
        };
        if !self.ask(holder, path, name, release).await? {
            return Ok(());
        }
        let mut state = self.catalog.lock();
        if let (Some(name), Some(promise)) = (name, promise) {
            state.leases.published(path, name, promise);
        }
        if let Some(lease) = lease.filter(|_| release) {
            state.leases.released(path, lease);
        }
        Ok(())
    }

    /// Asks a node to give back a directory that no other node wants to change: the node may have it alone again later.
    pub(super) async fn for_none(self, holder: &NodeName, path: &[u8]) -> Result<(), Refusal> {
        let lease = self.catalog.lock().leases.lease_of(holder, path);
        if self.ask(holder, path, None, true).await? {
            let now = self.catalog.now();
            self.catalog.lock().leases.rests(path, lease, now);
        }
        Ok(())
    }

    /// Asks the holder, and returns whether it did so; false if it is gone and holds nothing any more.
    pub(super) async fn ask(
        self,
        holder: &NodeName,
        path: &[u8],
        name: Option<&[u8]>,
        release: bool,
    ) -> Result<bool, Refusal> {
        self.catalog.counters.recalls.fetch_add(1, Ordering::Relaxed);
        let owned = name.map(<[u8]>::to_vec);
        if *holder == self.catalog.cluster.life.node {
            self.catalog.cluster.give_back(path, owned, release).await?;
            return Ok(true);
        }
        let Some(address) = self.catalog.address(holder) else {
            // Gone: the directories that it held are free again.
            self.catalog.lock().leases.gone(holder);
            return Ok(false);
        };
        if self.is_cut_off(holder) {
            // The caller has to ask again all the same; until then it holds up no other node.
            let what =
                format!("{holder} has {:?} and is cut off; it is asked again", String::from_utf8_lossy(path));
            return Err(Refusal::new(LinkErrorKind::Unavailable, what));
        }
        let message = ToNode::Recall { epoch: self.catalog.epoch, path: path.to_vec(), name: owned, release };
        match self.catalog.cluster.ask_node::<()>(&address, &message, NODE_DEADLINE).await {
            Ok(()) => Ok(true),
            Err(away) => {
                let path = String::from_utf8_lossy(path);
                Err(Refusal::new(
                    LinkErrorKind::Unavailable,
                    format!("{holder} has {path:?} and does not answer: {away}; it is asked again"),
                ))
            }
        }
    }

    /// Recalls directories after this node's own change, which is no publication: nodes that have such a name, or its directory, alone have
    /// to look again.
    pub(super) fn after_own(self, paths: &[&[u8]]) {
        let own = &self.catalog.cluster.life.node;
        let now = self.catalog.now();
        let mut state = self.catalog.lock();
        for path in paths {
            state.recall_directory_of(own, path, now);
            state.hearing.note_in(own, path);
            let holders = state.leases.holders_below(own, path);
            state.outbox.recalls.extend(holders);
            let knowing = state.leases.take_knowing(own, path, now);
            state.outbox.forgets.extend(knowing);
        }
        if !state.outbox.recalls.is_empty() || !state.outbox.forgets.is_empty() {
            self.catalog.woken.notify_one();
        }
    }

    /// Recalls the directories of names that `by` made without leave.
    pub(super) fn after_made(self, by: &NodeName, paths: &[&[u8]]) {
        if paths.is_empty() {
            return;
        }
        let now = self.catalog.now();
        let mut state = self.catalog.lock();
        paths.iter().for_each(|path| state.recall_directory_of(by, path, now));
        if !state.outbox.recalls.is_empty() {
            self.catalog.woken.notify_one();
        }
    }
}

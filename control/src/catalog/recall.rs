//! Asking a node to publish what it knows, and to give directories back.
//!
//! Owns: recalls, and what they end among the leases. Does not own: whom to recall (`look`, `take`).

use super::{Catalog, NODE_DEADLINE};
use std::sync::atomic::Ordering;
use tidemark_protocol::cluster::members::Standing;
use tidemark_protocol::cluster::wire::ToNode;
use tidemark_protocol::id::NodeName;
use tidemark_transport::{LinkErrorKind, Refusal};

impl Catalog {
    fn is_cut_off(&self, node: &NodeName) -> bool {
        let members = self.cluster.members();
        let mut cut_off = members.members.iter().filter(|member| member.standing == Standing::CutOff);
        cut_off.any(|member| member.life.node == *node && !member.gone)
    }

    /// Asks a node to publish its changes, once it is done with `name`, and if `release` to give a directory back.
    pub(super) async fn recall(
        &self,
        holder: &NodeName,
        path: &[u8],
        name: Option<&[u8]>,
        release: bool,
    ) -> Result<(), Refusal> {
        let (promise, lease) = {
            let leases = &self.lock().leases;
            (name.and_then(|name| leases.promise_of(holder, path, name)), leases.lease_of(holder, path))
        };
        if !self.ask_back(holder, path, name, release).await? {
            return Ok(());
        }
        let mut state = self.lock();
        if let (Some(name), Some(promise)) = (name, promise) {
            state.leases.published(path, name, promise);
        }
        if let Some(lease) = lease.filter(|_| release) {
            state.leases.released(path, lease);
        }
        Ok(())
    }

    /// Asks a node to give back a directory that no other node wants to change: the node may have it alone again later.
    pub(super) async fn recall_for_none(&self, holder: &NodeName, path: &[u8]) -> Result<(), Refusal> {
        let lease = self.lock().leases.lease_of(holder, path);
        if self.ask_back(holder, path, None, true).await? {
            let now = self.now();
            self.lock().leases.rests(path, lease, now);
        }
        Ok(())
    }

    /// Asks the holder, and returns whether it did so; false if it is gone and holds nothing any more.
    pub(super) async fn ask_back(
        &self,
        holder: &NodeName,
        path: &[u8],
        name: Option<&[u8]>,
        release: bool,
    ) -> Result<bool, Refusal> {
        self.counters.recalls.fetch_add(1, Ordering::Relaxed);
        let owned = name.map(<[u8]>::to_vec);
        if *holder == self.cluster.life.node {
            self.cluster.give_back(path, owned, release).await?;
            return Ok(true);
        }
        let Some(address) = self.address(holder) else {
            // Gone: the directories that it held are free again.
            self.lock().leases.gone(holder);
            return Ok(false);
        };
        if self.is_cut_off(holder) {
            // The caller has to ask again all the same; until then it holds up no other node.
            let what =
                format!("{holder} has {:?} and is cut off; it is asked again", String::from_utf8_lossy(path));
            return Err(Refusal::new(LinkErrorKind::Unavailable, what));
        }
        let message = ToNode::Recall { epoch: self.epoch, path: path.to_vec(), name: owned, release };
        match self.cluster.ask_node::<()>(&address, &message, NODE_DEADLINE).await {
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
}

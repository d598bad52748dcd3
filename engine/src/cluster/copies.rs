//! Reporting to the coordinator which copies this node keeps, and the coordinator's table of all nodes' copies.
//!
//! Owns: finding and reporting changes, the table of holders, following who keeps this node's copies. Does not own: the copies (`namespace::copies`), sending and
//! receiving (`replicate`).

use super::{ANSWER_DEADLINE, Cluster, address_of};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tidemark_namespace::{CopyView, Namespace, ObjectCopy, OutgoingBody, ReclaimClass, object_of};
use tidemark_protocol::cluster::wire::{
    BATCH_ITEMS_MAX, Copies, FileFacts, Member, NodeAttributes, NodeKind, NodeState, ToCoordinator, ToNode,
    WireState,
};
use tidemark_protocol::id::{Epoch, FileId, Generation, NodeName, SealNumber};
use tidemark_protocol::key::NodeLife;
use tidemark_transport::Address;
use tokio::sync::{Notify, watch};

/// Shortest interval between two reports, so that a checkpoint's copies are reported together.
const TELL_PAUSE: Duration = Duration::from_millis(10);

/// Interval at which kept copies are examined without a notice of a change.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The nodes that keep copies of each file.
#[derive(Debug, Default)]
pub struct Holders {
    by_seal: Mutex<BTreeMap<(FileId, SealNumber), BTreeSet<NodeName>>>,
    /// Notifies that the copies kept here may have changed.
    changed: Notify,
}

impl Holders {
    /// Notifies that a copy was added here or dropped.
    pub fn copies_changed(&self) {
        self.changed.notify_one();
    }

    /// Returns the nodes that keep a copy of these bytes, as the coordinator knows them.
    #[must_use]
    pub fn of(&self, file: FileId, seal: SealNumber) -> BTreeSet<NodeName> {
        let holders = self.by_seal.lock().unwrap_or_else(PoisonError::into_inner);
        holders.get(&(file, seal)).cloned().unwrap_or_default()
    }

    /// Returns the nodes that keep a copy of any seal of a file.
    #[must_use]
    pub fn of_any_seal(&self, file: FileId) -> BTreeSet<NodeName> {
        let holders = self.by_seal.lock().unwrap_or_else(PoisonError::into_inner);
        let all = (file, SealNumber(0))..=(file, SealNumber(u64::MAX));
        holders.range(all).flat_map(|(_, names)| names).cloned().collect()
    }

    /// Records the copies that a node reports.
    pub fn take(&self, from: &NodeName, copies: &Copies) {
        let mut holders = self.by_seal.lock().unwrap_or_else(PoisonError::into_inner);
        if copies.whole {
            holders.retain(|_, names| {
                names.remove(from);
                !names.is_empty()
            });
        }
        for state in &copies.kept {
            if let NodeKind::File(facts) = &state.kind {
                holders.entry((facts.file, facts.seal)).or_default().insert(from.clone());
            }
        }
        for key in &copies.dropped {
            if let Some(names) = holders.get_mut(key) {
                names.remove(from);
                if names.is_empty() {
                    holders.remove(key);
                }
            }
        }
    }
}

impl Cluster {
    /// Notifies all nodes that these bytes are in Tier-3: nodes that have them may evict them under pressure.
    pub fn tell_objects(&self, objects: Vec<(FileId, SealNumber, ObjectCopy)>) {
        for (file, seal, object) in &objects {
            take_copy_object(&self.namespace, *file, *seal, object);
        }
        let members = self.following.members();
        for message in objects_messages(self.following.epoch(), objects) {
            // A node that misses the message gets it again when it next reports the bytes.
            self.tell_others(&members, &message, ANSWER_DEADLINE, "what is in Tier-3");
        }
    }

    /// Notifies one node, which reported these bytes without knowing that they are in Tier-3.
    pub fn tell_objects_to(&self, life: &NodeLife, objects: Vec<(FileId, SealNumber, ObjectCopy)>) {
        if *life == self.life {
            for (file, seal, object) in &objects {
                take_copy_object(&self.namespace, *file, *seal, object);
            }
            return;
        }
        let members = self.following.members();
        for message in objects_messages(self.following.epoch(), objects) {
            let member = members.members.iter().filter(|member| member.life == *life);
            self.tell_each(member, &message, ANSWER_DEADLINE, "what is in Tier-3");
        }
    }

    /// Records that Tier-3 has these bytes: a file or a copy here that holds them may be evicted.
    pub fn take_object(&self, file: FileId, seal: SealNumber, object: &ObjectCopy) {
        take_copy_object(&self.namespace, file, seal, object);
        if self.namespace.hosts().note_object(file, seal, object.clone()) {
            self.namespace.hosts().set_reclaim(file, ReclaimClass::CommittedNewest);
        }
    }

    /// Returns the other nodes that should have these bytes and are not gone: the file's home if it reported them, and the nodes that
    /// keep copies.
    #[must_use]
    pub fn keepers(&self, file: FileId, seal: SealNumber) -> Vec<Address> {
        let holders = self.holders.of(file, seal);
        let at_home = self.namespace.standing().outgoing_file(file).is_some_and(|node| {
            matches!(&node.body, OutgoingBody::File(view) if view.remote.as_ref().is_some_and(|remote| remote.host))
        });
        let members = self.following.members();
        let others = members.members.iter().filter(|member| !member.gone && member.life != self.life);
        let keeps = |member: &&Member| {
            at_home && member.life.incarnation == file.incarnation || holders.contains(&member.life.node)
        };
        others.filter(keeps).map(address_of).collect()
    }

    /// Whether a member that is not gone keeps a copy of these bytes, besides the file's home.
    #[must_use]
    pub fn is_copied(&self, file: FileId, seal: SealNumber) -> bool {
        let holders = self.holders.by_seal.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(names) = holders.get(&(file, seal)) else { return false };
        let members = self.following.members();
        members.members.iter().any(|member| !member.gone && names.contains(&member.life.node))
    }
}

fn objects_messages(
    epoch: Epoch,
    objects: Vec<(FileId, SealNumber, ObjectCopy)>,
) -> impl Iterator<Item = ToNode> + use<> {
    let objects: Vec<_> =
        objects.into_iter().map(|(file, seal, object)| (file, seal, object_of(&object))).collect();
    let batches: Vec<_> = objects.chunks(BATCH_ITEMS_MAX).map(<[_]>::to_vec).collect();
    batches.into_iter().map(move |objects| ToNode::Objects { epoch, objects })
}

fn take_copy_object(namespace: &Namespace, file: FileId, seal: SealNumber, object: &ObjectCopy) {
    if namespace.peer_copies().note_copy_object(file, seal, object.clone()) {
        namespace.peer_copies().set_copy_reclaim(file, seal, ReclaimClass::CommittedNewest);
    }
}

/// Tells `partners` which nodes keep copies of this node's files, as the members change, until dropped.
pub async fn follow_partners(cluster: Arc<Cluster>, partners: watch::Sender<Vec<Address>>) {
    let mut members = cluster.following.watch_members();
    loop {
        let now = members.borrow_and_update().clone();
        let of = |name| now.members.iter().find(|member| member.life.node == name && !member.gone);
        let own = now.members.iter().find(|member| member.life == cluster.life);
        let names = own.map(|member| member.partners.clone()).unwrap_or_default();
        let addresses: Vec<_> = names.into_iter().filter_map(of).map(address_of).collect();
        partners.send_if_modified(|known| {
            let changed = *known != addresses;
            *known = addresses;
            changed
        });
        if members.changed().await.is_err() {
            return;
        }
    }
}

/// Reports the copies kept here to the coordinator, until dropped.
pub async fn tell_copies(cluster: Arc<Cluster>) {
    let mut untold: BTreeSet<(FileId, SealNumber)> = BTreeSet::new();
    let mut seats = cluster.following.watch_seat();
    let mut epoch = None;
    loop {
        tokio::select! {
            () = cluster.holders.changed.notified() => {}
            _ = seats.changed() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        tokio::time::sleep(TELL_PAUSE).await;
        // A coordinator that is new, or that has just let this node join, knows nothing of its copies.
        let now = (cluster.following.joined_number(), cluster.following.epoch());
        let whole = epoch != Some(now);
        untold.extend(cluster.namespace.peer_copies().take_changed_copies());
        if whole {
            untold = cluster
                .namespace
                .peer_copies()
                .all()
                .iter()
                .map(|copy| (copy.file, copy.sealed.number))
                .collect();
        }
        if untold.is_empty() && !whole {
            continue;
        }
        let some: Vec<_> = untold.iter().take(BATCH_ITEMS_MAX).copied().collect();
        let (mut kept, mut dropped) = (Vec::new(), Vec::new());
        for (file, seal) in &some {
            match cluster.namespace.peer_copies().copy(*file, *seal) {
                Some(copy) => kept.push(state_of(&copy)),
                None => dropped.push((*file, *seal)),
            }
        }
        let copies = Copies { whole, kept, dropped };
        match cluster.ask::<()>(&ToCoordinator::Copies(copies), ANSWER_DEADLINE).await {
            Ok(()) => {
                epoch = Some(now);
                // `take_changed_copies` returns again, in the next round, what has changed meanwhile.
                untold.retain(|key| some.binary_search(key).is_err());
                if !untold.is_empty() {
                    cluster.holders.changed.notify_one();
                }
            }
            Err(away) => {
                tracing::debug!(error = &away as &dyn std::error::Error, "what is kept here is told later");
                cluster.holders.changed.notify_one();
                tokio::time::sleep(LOOK_EVERY / 10).await;
            }
        }
    }
}

fn state_of(copy: &CopyView) -> NodeState {
    let meta = &copy.meta;
    NodeState {
        path: meta.path.clone(),
        attributes: NodeAttributes {
            mode: meta.mode,
            uid: meta.uid,
            gid: meta.gid,
            mtime_ns: meta.mtime_ns,
            xattrs: meta.xattrs.clone(),
        },
        // The holder of a copy does not know attributes that were set since.
        attributes_ns: 0,
        other_names: None,
        kind: NodeKind::File(Box::new(FileFacts {
            file: copy.file,
            size_bytes: copy.sealed.size_bytes,
            state: WireState::Sealed { crc: copy.sealed.crc, chunks: Arc::clone(&copy.sealed.chunks) },
            seal: copy.sealed.number,
            opened_ns: meta.published_at_ns,
            closed_ns: meta.published_at_ns,
            published_ns: meta.published_at_ns,
            vouched: true,
            generation: Generation(0),
            writers: Vec::new(),
            host: true,
            object: copy.object.as_ref().map(object_of),
        })),
    }
}

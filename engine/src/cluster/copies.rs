//! Which copies this node keeps for others, told to the coordinator; and who keeps which, as the coordinator knows it.
//!
//! Owns: finding out what changed and telling it, the table of holders. Does not own: the copies (`namespace::copies`), sending and
//! receiving (`replicate`).

use super::{ANSWER_DEADLINE, Cluster, address_of};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tidemark_namespace::{CopyView, ObjectCopy, OutgoingBody, ReclaimClass, object_of};
use tidemark_protocol::cluster::wire::{
    BATCH_ITEMS_MAX, Copies, FileFacts, Member, NodeAttributes, NodeKind, NodeState, ToCoordinator, ToNode,
    WireState,
};
use tidemark_protocol::id::{FileId, Generation, NodeName, SealNumber};
use tidemark_protocol::key::NodeLife;
use tidemark_transport::Address;
use tokio::sync::Notify;

/// A copy is told of at most so often: a checkpoint's are told together.
const TELL_PAUSE: Duration = Duration::from_millis(10);

/// How often what is kept is looked at without a reason.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Who keeps copies of what.
#[derive(Debug, Default)]
pub(super) struct Holders {
    by_seal: Mutex<BTreeMap<(FileId, SealNumber), BTreeSet<NodeName>>>,
    /// What is kept here may have changed.
    pub(super) changed: Notify,
}

impl Cluster {
    /// Something that is kept for others came or went.
    pub fn copies_changed(&self) {
        self.holders.changed.notify_one();
    }

    /// These bytes are in Tier-3 from now on: who has them may give them up under pressure.
    pub fn tell_objects(&self, objects: Vec<(FileId, SealNumber, ObjectCopy)>) {
        for (file, seal, object) in &objects {
            self.take_copy_object(*file, *seal, object);
        }
        let members = self.members();
        for message in self.objects_messages(objects) {
            // A node that misses it is told when it next says that it has the bytes.
            self.tell_others(&members, &message, ANSWER_DEADLINE, "what is in Tier-3");
        }
    }

    /// The same for one node, which said that it has these bytes and does not know that Tier-3 has them.
    pub fn tell_objects_to(&self, life: &NodeLife, objects: Vec<(FileId, SealNumber, ObjectCopy)>) {
        if *life == self.life {
            for (file, seal, object) in &objects {
                self.take_copy_object(*file, *seal, object);
            }
            return;
        }
        let members = self.members();
        for message in self.objects_messages(objects) {
            let member = members.members.iter().filter(|member| member.life == *life);
            self.tell_each(member, &message, ANSWER_DEADLINE, "what is in Tier-3");
        }
    }

    fn objects_messages(
        &self,
        objects: Vec<(FileId, SealNumber, ObjectCopy)>,
    ) -> impl Iterator<Item = ToNode> + use<> {
        let epoch = self.epoch();
        let objects: Vec<_> =
            objects.into_iter().map(|(file, seal, object)| (file, seal, object_of(&object))).collect();
        let batches: Vec<_> = objects.chunks(BATCH_ITEMS_MAX).map(<[_]>::to_vec).collect();
        batches.into_iter().map(move |objects| ToNode::Objects { epoch, objects })
    }

    /// Tier-3 has these bytes: what is here of them, as a file or as a copy, may give way.
    pub fn take_object(&self, file: FileId, seal: SealNumber, object: &ObjectCopy) {
        self.take_copy_object(file, seal, object);
        if self.namespace.note_object(file, seal, object.clone()) {
            self.namespace.set_reclaim(file, ReclaimClass::CommittedNewest);
        }
    }

    fn take_copy_object(&self, file: FileId, seal: SealNumber, object: &ObjectCopy) {
        if self.namespace.note_copy_object(file, seal, object.clone()) {
            self.namespace.set_copy_reclaim(file, seal, ReclaimClass::CommittedNewest);
        }
    }

    /// The nodes that keep a copy of these bytes, as the coordinator knows them.
    #[must_use]
    pub fn holders(&self, file: FileId, seal: SealNumber) -> BTreeSet<NodeName> {
        let holders = self.holders.by_seal.lock().unwrap_or_else(PoisonError::into_inner);
        holders.get(&(file, seal)).cloned().unwrap_or_default()
    }

    /// The nodes that keep a copy of a file, whichever seal.
    #[must_use]
    pub fn holders_of(&self, file: FileId) -> BTreeSet<NodeName> {
        let holders = self.holders.by_seal.lock().unwrap_or_else(PoisonError::into_inner);
        let all = (file, SealNumber(0))..=(file, SealNumber(u64::MAX));
        holders.range(all).flat_map(|(_, names)| names).cloned().collect()
    }

    /// The other nodes that should have these bytes: its home as far as it said so, and who keeps copies, of those that live.
    #[must_use]
    pub fn keepers(&self, file: FileId, seal: SealNumber) -> Vec<Address> {
        let holders = self.holders(file, seal);
        let at_home = self.namespace.outgoing_file(file).is_some_and(|node| {
            matches!(&node.body, OutgoingBody::File(view) if view.remote.as_ref().is_some_and(|remote| remote.host))
        });
        let members = self.members.borrow();
        let others = members.members.iter().filter(|member| !member.gone && member.life != self.life);
        let keeps = |member: &&Member| {
            at_home && member.life.incarnation == file.incarnation || holders.contains(&member.life.node)
        };
        others.filter(keeps).map(address_of).collect()
    }

    /// Whether a member that lives, besides its home, keeps a copy of these bytes.
    #[must_use]
    pub fn is_copied(&self, file: FileId, seal: SealNumber) -> bool {
        let holders = self.holders.by_seal.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(names) = holders.get(&(file, seal)) else { return false };
        let members = self.members.borrow();
        members.members.iter().any(|member| !member.gone && names.contains(&member.life.node))
    }

    /// Takes in what a node says that it keeps.
    pub fn take_copies(&self, from: &NodeName, copies: &Copies) {
        let mut holders = self.holders.by_seal.lock().unwrap_or_else(PoisonError::into_inner);
        if copies.whole {
            for names in holders.values_mut() {
                names.remove(from);
            }
        }
        for state in &copies.kept {
            if let NodeKind::File(facts) = &state.kind {
                holders.entry((facts.file, facts.seal)).or_default().insert(from.clone());
            }
        }
        for key in &copies.dropped {
            if let Some(names) = holders.get_mut(key) {
                names.remove(from);
            }
        }
        holders.retain(|_, names| !names.is_empty());
    }
}

/// Tells the coordinator what is kept here, until dropped.
pub async fn tell_copies(cluster: Arc<Cluster>) {
    let mut untold: BTreeSet<(FileId, SealNumber)> = BTreeSet::new();
    let mut seats = cluster.seat_changed.subscribe();
    let mut epoch = None;
    loop {
        tokio::select! {
            () = cluster.holders.changed.notified() => {}
            _ = seats.changed() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        tokio::time::sleep(TELL_PAUSE).await;
        // A coordinator that has just begun, with us or at all, knows nothing.
        let now = (cluster.joined_number(), cluster.epoch());
        let whole = epoch != Some(now);
        untold.extend(cluster.namespace.take_changed_copies());
        if whole {
            untold = cluster.namespace.copies().iter().map(|copy| (copy.file, copy.sealed.number)).collect();
        }
        if untold.is_empty() && !whole {
            continue;
        }
        let some: Vec<_> = untold.iter().take(BATCH_ITEMS_MAX).copied().collect();
        let (mut kept, mut dropped) = (Vec::new(), Vec::new());
        for (file, seal) in &some {
            match cluster.namespace.copy(*file, *seal) {
                Some(copy) => kept.push(state_of(&copy)),
                None => dropped.push((*file, *seal)),
            }
        }
        let copies = Copies { whole, kept, dropped };
        match cluster.ask::<()>(&ToCoordinator::Copies(copies), ANSWER_DEADLINE).await {
            Ok(()) => {
                epoch = Some(now);
                // What has changed meanwhile is among those that are taken next.
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
        // The holder of a copy does not know what was set since.
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

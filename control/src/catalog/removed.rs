//! Notifies nodes of files that have no name any more: the writers, and the holders of copies.
//!
//! Owns: which nodes are notified, and the repetition. Does not own: what was removed (`namespace::catalog`), what a node does then.
//!
//! A node learns of other nodes' changes to a name only when it looks the name up. No program looks up a removed name, so without notices
//! the memory of its nodes would fill up.

use super::{Catalog, NODE_DEADLINE};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::{BATCH_ITEMS_MAX, ToNode};
use tidemark_protocol::id::{FileId, NodeName};

/// Interval between notices. A job that removes a checkpoint removes many files; one notice names all of them.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// Most files of which one node still has to be notified. Beyond it the oldest are dropped: such a node is away, and forgets them when it
/// comes back as another life, or keeps them until a program looks them up.
const UNTOLD_MAX: usize = 1 << 16;

impl Catalog {
    /// Notifies nodes of removed files, until dropped.
    pub async fn tell_removed(self: Arc<Self>) {
        let mut untold: BTreeMap<NodeName, BTreeSet<FileId>> = BTreeMap::new();
        loop {
            tokio::time::sleep(TELL_EVERY).await;
            for file in self.cluster.namespace().catalog().take_removed() {
                let home = self.cluster.following.member_of(file.incarnation).map(|member| member.life.node);
                // The tree of this node reports that itself.
                let home = home.filter(|home| *home != self.cluster.life.node);
                for node in self.cluster.holders.of_any_seal(file).into_iter().chain(home) {
                    let files = untold.entry(node).or_default();
                    files.insert(file);
                    if files.len() > UNTOLD_MAX {
                        files.pop_first();
                    }
                }
            }
            let mut left = BTreeMap::new();
            for (node, files) in std::mem::take(&mut untold) {
                if let Some(files) = self.tell_of(&node, files).await {
                    left.insert(node, files);
                }
            }
            untold = left;
        }
    }

    /// Notifies one node; returns the files of which it could not be notified.
    async fn tell_of(&self, node: &NodeName, mut files: BTreeSet<FileId>) -> Option<BTreeSet<FileId>> {
        if *node == self.cluster.life.node {
            let files: Vec<_> = files.into_iter().collect();
            self.cluster.namespace().mirror().end_removed(&files);
            return None;
        }
        // A node that is gone has nothing any more, or is another life when it is back.
        let address = self.address(node)?;
        while !files.is_empty() {
            let some: Vec<_> = files.iter().take(BATCH_ITEMS_MAX).copied().collect();
            let message = ToNode::Removed { epoch: self.epoch, files: some.clone() };
            if let Err(away) = self.cluster.ask_node::<()>(&address, &message, NODE_DEADLINE).await {
                tracing::debug!(%node, error = &away as &dyn std::error::Error, "told again of what was removed");
                return Some(files);
            }
            files.retain(|file| some.binary_search(file).is_err());
        }
        None
    }
}

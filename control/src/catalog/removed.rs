//! Telling nodes of files that have no name any more: whoever wrote them, and whoever keeps copies.
//!
//! Owns: who is told, and telling again. Does not own: what was removed (`namespace::catalog`), what a node does then.
//!
//! A node hears of what others did to a name only when it looks. Nobody looks for what was removed, and its memory would be full.

use super::{Catalog, NODE_DEADLINE};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::{BATCH_ITEMS_MAX, ToNode};
use tidemark_protocol::id::{FileId, NodeName};

/// A job that removes a checkpoint removes many files; they are told together.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// Files that one node still has to be told of. Beyond it the oldest are not told: it is away, and forgets them when it comes back as
/// another life, or keeps them until somebody looks.
const UNTOLD_MAX: usize = 1 << 16;

impl Catalog {
    /// Tells nodes of what was removed, until dropped.
    pub async fn tell_removed(self: Arc<Self>) {
        let mut untold: BTreeMap<NodeName, BTreeSet<FileId>> = BTreeMap::new();
        loop {
            tokio::time::sleep(TELL_EVERY).await;
            for file in self.cluster.namespace().take_removed() {
                let home = self.cluster.member_of(file.incarnation).map(|member| member.life.node);
                // This node's tree says so itself.
                let home = home.filter(|home| *home != self.cluster.life.node);
                for node in self.cluster.holders_of(file).into_iter().chain(home) {
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

    /// Tells one node; gives back what it could not be told.
    async fn tell_of(&self, node: &NodeName, mut files: BTreeSet<FileId>) -> Option<BTreeSet<FileId>> {
        if *node == self.cluster.life.node {
            let files: Vec<_> = files.into_iter().collect();
            self.cluster.namespace().end_removed(&files);
            return None;
        }
        // One that is gone has nothing any more, or is another life when it is back.
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

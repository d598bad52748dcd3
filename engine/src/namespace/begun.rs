//! Directories that were made and hold no file yet.
//!
//! Owns: who made them, and what is below them. Does not own: what follows when who made one is gone (`node::begun`).

use super::node::Body;
use super::writer::WriterId;
use super::{Namespace, NodeId, State, is_hidden};
use std::collections::VecDeque;
use std::sync::Arc;
use tidemark_protocol::path::RelPath;

/// Directories that wait for the node loop to ask: it does so many times a second.
const MAKERS_MAX: usize = 1024;

/// Directories below one that were looked at; with more it counts as written.
const DIRECTORIES_MAX: usize = 64;

impl Namespace {
    /// Who made directories since this was asked last; of very many the latest.
    #[must_use]
    pub fn take_makers(&self) -> VecDeque<(NodeId, Arc<WriterId>)> {
        self.look(|state| std::mem::take(&mut state.makers))
    }

    /// The path of a directory that holds nothing but directories, and theirs; none where there is more, or nothing any more.
    #[must_use]
    pub fn unwritten(&self, directory: NodeId) -> Option<Vec<RelPath>> {
        self.look(|state| {
            let link = state.tree.nodes.get(&directory)?.first_link()?;
            let path = state.tree.path(link)?;
            if is_hidden(&path) {
                return None;
            }
            let mut found = vec![RelPath::new(path).ok()?];
            let mut nodes = vec![directory];
            let mut at = 0;
            while let Some(node) = nodes.get(at) {
                let Body::Directory(directory) = &state.tree.nodes.get(node)?.body else { return None };
                if nodes.len() + directory.by_cookie.len() > DIRECTORIES_MAX {
                    return None;
                }
                for entry in directory.by_cookie.values() {
                    found.push(found[at].join(&RelPath::new(entry.name.to_vec()).ok()?).ok()?);
                    nodes.push(entry.node);
                }
                at += 1;
            }
            Some(found)
        })
    }
}

impl State {
    pub(super) fn note_maker(&mut self, directory: NodeId, maker: Arc<WriterId>) {
        if self.makers.len() == MAKERS_MAX {
            self.makers.pop_front();
        }
        self.makers.push_back((directory, maker));
    }
}

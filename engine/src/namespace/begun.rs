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
const MADE_MAX: usize = 1024;

/// Directories below one that were looked at; with more it counts as written.
const DIRECTORIES_MAX: usize = 64;

/// A directory, and who made it when.
#[derive(Debug, Clone)]
pub struct Made {
    pub directory: NodeId,
    pub maker: Arc<WriterId>,
    pub at_ns: i64,
}

impl Namespace {
    /// Which directories were made since this was asked last; of very many the latest.
    #[must_use]
    pub fn take_made(&self) -> VecDeque<Made> {
        self.look(|state| std::mem::take(&mut state.made))
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
    pub(super) fn note_made(&mut self, made: Made) {
        if self.made.len() == MADE_MAX {
            self.made.pop_front();
        }
        self.made.push_back(made);
    }
}

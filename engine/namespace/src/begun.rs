//! Directories that were made and hold no file yet.
//!
//! Owns: which process made them, and what is below them. Does not own: what follows when that process is gone
//! (`node::begun`).

use super::node::Body;
use super::writer::WriterId;
use super::writers::Writers;
use super::{NodeId, is_hidden};
use std::sync::Arc;
use tidemark_protocol::path::RelPath;

/// Most entries examined of one directory, or of all directories below it; with more it counts as written.
const ENTRIES_MAX: usize = 64;

/// A directory, and which process made it when.
#[derive(Debug, Clone)]
pub struct Made {
    pub directory: NodeId,
    pub maker: Arc<WriterId>,
    pub at_ns: i64,
}

/// Content of a directory in which no file counts as written.
#[derive(Debug, Clone)]
pub struct Unwritten {
    /// The directory itself and those below it.
    pub directories: Vec<RelPath>,
    /// Files in flight.
    pub temporaries: usize,
    /// Files that come before what is saved, such as a model's configuration.
    pub forewords: usize,
    /// When the last foreword was closed.
    pub closed_ns: i64,
    /// Whether a process has one of the files open.
    pub open: bool,
}

impl Writers<'_> {
    /// Returns the content of a directory that holds nothing but directories, files in flight under a temporary name, and forewords. None
    /// if it holds more, or exists no more.
    #[must_use]
    pub fn unwritten(
        &self,
        directory: NodeId,
        is_temporary: impl Fn(&RelPath) -> bool,
        is_foreword: impl Fn(&RelPath) -> bool,
    ) -> Option<Unwritten> {
        self.state.look(|state| {
            let link = state.tree.nodes.get(&directory)?.first_link()?;
            let path = state.tree.path(link)?;
            if is_hidden(&path) {
                return None;
            }
            let directories = vec![RelPath::new(path).ok()?];
            let mut found =
                Unwritten { directories, temporaries: 0, forewords: 0, closed_ns: i64::MIN, open: false };
            let mut nodes = vec![directory];
            let mut at = 0;
            while let Some(node) = nodes.get(at) {
                let Body::Directory(directory) = &state.tree.nodes.get(node)?.body else { return None };
                if nodes.len() + directory.by_cookie.len() > ENTRIES_MAX {
                    return None;
                }
                for entry in directory.by_cookie.values() {
                    let path = found.directories[at].join(&RelPath::new(entry.name.to_vec()).ok()?).ok()?;
                    match &state.tree.nodes.get(&entry.node)?.body {
                        Body::Directory(_) => {
                            found.directories.push(path);
                            nodes.push(entry.node);
                        }
                        Body::File(file) if is_temporary(&path) => {
                            found.temporaries += 1;
                            found.open |= file.opens > 0;
                        }
                        Body::File(file) if is_foreword(&path) => {
                            found.forewords += 1;
                            found.closed_ns = found.closed_ns.max(file.closed_ns);
                            found.open |= file.opens > 0;
                        }
                        Body::File(_) | Body::Symlink(_) | Body::Special(_) => return None,
                    }
                }
                at += 1;
            }
            Some(found)
        })
    }
}

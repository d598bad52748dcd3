//! Files of this node whose last known name was taken away on another node, kept until the coordinator says whether they have other names.
//!
//! Owns: putting files aside (hidden), and ending that. Does not own: asking the coordinator (`cluster::aside`), what a name stands for
//! (`mirror`).
//!
//! A node learns of a rename elsewhere when it asks about one of the two names: the old one is gone, and the new one is not there yet. The
//! file's only bytes may be on this node.

use super::mirror::Mirror;
use super::mirroring::Mirroring;
use super::{FsError, HIDDEN, NodeId};
use tidemark_protocol::cluster::wire::{NodeKind, NodeState};
use tidemark_protocol::id::FileId;

/// Below [`HIDDEN`], one name for each file.
const ASIDE: &[u8] = b"aside";

/// Files asked about at a time.
const ASIDE_AT_ONCE: usize = 256;

impl Mirror<'_> {
    /// Returns some of the files that were put aside.
    #[must_use]
    pub fn put_aside(&self) -> Vec<FileId> {
        self.state.look(|state| {
            let Ok(directory) = state.tree.resolve(&place()) else { return Vec::new() };
            let Ok(found) = state.tree.node(directory).and_then(|node| node.directory()) else {
                return Vec::new();
            };
            let files = found.by_cookie.values().take(ASIDE_AT_ONCE);
            files.filter_map(|entry| Some(state.tree.node(entry.node).ok()?.file().ok()?.id)).collect()
        })
    }

    /// Ends the wait of one file: gives it the name under which the coordinator knows it, or removes it if there is
    /// none.
    ///
    /// # Errors
    /// The journal's errors; an unlawful path.
    pub fn end_aside(&self, file: FileId, found: Option<&NodeState>) -> Result<(), FsError> {
        let now_ns = self.state.now_ns();
        self.state.change(|state| {
            let own = self.state.incarnation;
            let mut mirroring = state.mirroring(own);
            let state = &mut *mirroring.state;
            let directory = state.tree.resolve(&place())?;
            let is_it = |node: &NodeId| {
                let found = state.tree.node(*node).and_then(|node| node.file());
                found.is_ok_and(|found| found.id == file)
            };
            let entries = state.tree.node(directory)?.directory()?.by_cookie.values();
            let aside: Vec<_> = entries.map(|entry| entry.node).filter(is_it).collect();
            for node in aside {
                // If the file has another node by now, this one has its old bytes only.
                let is_its_node = mirroring.state.node_of(file, own) == Some(node);
                if let Some(found) = found.filter(|found| {
                    is_its_node && matches!(&found.kind, NodeKind::File(facts) if facts.file == file)
                }) {
                    let name = mirroring.make_directories_of(&found.path, found)?;
                    mirroring.give_name(node, name, now_ns)?;
                }
                let gone = mirroring.state.tree.unlink(directory, &name_of(node), now_ns)?;
                mirroring.state.tree.mark(gone);
                mirroring.state.forsake(gone);
            }
            Ok(())
        })
    }
}

impl Mirroring<'_> {
    /// Puts a file aside that is about to lose its last name. Returns false if its bytes are not this node's to lose.
    pub(super) fn put_aside(
        &mut self,
        node: NodeId,
        from: (NodeId, &[u8]),
        now_ns: i64,
    ) -> Result<bool, FsError> {
        // If this tree is the catalog, its own removal is final.
        if self.state.removed.is_some() || !self.state.outgoing.is_collected() {
            return Ok(false);
        }
        let found = self.state.tree.node(node)?;
        let is_last = found.link_count() == 1;
        let only_here = found.file().is_ok_and(|file| file.remote.is_none() && file.backing.is_some());
        if !(is_last && only_here) {
            return Ok(false);
        }
        let directory = self.state.tree.quietly().make_hidden(&place(), now_ns)?;
        let (moved, _) = self.state.tree.rename(from, (directory, &name_of(node)), true, now_ns)?;
        self.state.tree.mark(moved);
        Ok(true)
    }

    /// Removes the hidden name of a file that was put aside and has a name again.
    pub(super) fn leave_aside(&mut self, node: NodeId, now_ns: i64) -> Result<(), FsError> {
        let Ok(directory) = self.state.tree.resolve(&place()) else { return Ok(()) };
        if self.state.tree.child(directory, &name_of(node)) == Ok(node) {
            self.state.tree.unlink(directory, &name_of(node), now_ns)?;
            self.state.tree.mark(node);
        }
        Ok(())
    }
}

fn place() -> Vec<u8> {
    [HIDDEN, ASIDE].join(&b'/')
}

fn name_of(node: NodeId) -> Vec<u8> {
    node.to_string().into_bytes()
}

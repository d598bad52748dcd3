//! The meaning of this node's last operations for a catalog that lacks them.
//!
//! Owns: bringing the catalog's paths to those of this tree, and which names these operations leave to its files. Does not own: which
//! operations are missing (`unanswered`), what an operation makes of a path (`protocol::cluster::carried`).
//!
//! A directory has no identity besides its path. What the catalog says of `a` is said of `b` here, if `a` was moved there since; and `b` here
//! is not the catalog's `b`.

use tidemark_protocol::cluster::carried::Carried;
use tidemark_protocol::cluster::wire::{NameOperation, NodeState};
use tidemark_protocol::id::FileId;

/// This node's operations that a catalog lacks.
#[derive(Debug)]
pub(super) struct Moved(Carried);

impl Moved {
    pub(super) fn by(operations: Vec<NameOperation>) -> Self {
        Self(Carried::after(operations))
    }

    /// Returns where the directory lies that the catalog has at `path`; none if it was removed.
    pub(super) fn directory(&self, path: &[u8]) -> Option<Vec<u8>> {
        self.0.names(path, None).pop()
    }

    /// Returns a state of the catalog, with each name of it in the directory in which that one is now. Names in directories that were removed
    /// are left out. The last part of a name stays: what became of it is known of the tree's own names.
    pub(super) fn state(&self, found: &NodeState) -> Option<NodeState> {
        let name = |path: &[u8]| {
            let at = path.iter().rposition(|byte| *byte == b'/');
            let Some(at) = at else { return Some(path.to_vec()) };
            Some([&self.directory(&path[..at])?, &path[at..]].concat())
        };
        let others = |names: &Vec<Vec<u8>>| names.iter().filter_map(|path| name(path)).collect();
        Some(NodeState {
            path: name(&found.path)?,
            other_names: found.other_names.as_ref().map(others),
            ..found.clone()
        })
    }

    /// Returns the names that these operations leave to a file that the catalog has at `path`.
    pub(super) fn names(&self, path: &[u8], file: FileId) -> Vec<Vec<u8>> {
        self.0.names(path, Some(file))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::cluster::wire::{NodeAttributes, NodeKind};
    use tidemark_protocol::id::{FileCounter, FileId, Incarnation};

    fn renamed(from: &str, to: &str, exchange: bool) -> NameOperation {
        NameOperation::Renamed { from: from.into(), to: to.into(), exchange, what: None }
    }

    fn removed(path: &str) -> NameOperation {
        NameOperation::Removed { path: path.into(), what: None }
    }

    #[test]
    fn a_directory_is_where_the_operations_left_it() {
        let what = Some(FileId { incarnation: Incarnation(1), counter: FileCounter(2) });
        let of_a_file = NameOperation::Renamed { from: b"a".into(), to: b"b".into(), exchange: false, what };
        let made = NameOperation::Directory { path: b"a".into(), attributes: NodeAttributes::default() };
        for (operations, path, now) in [
            (vec![], "a", Some("a")),
            (vec![renamed("a", "b", false)], "a/c", Some("b/c")),
            (vec![renamed("a", "b", false)], "ab", Some("ab")),
            (vec![renamed("a", "b", false)], "b", None),
            (vec![renamed("a", "b", false), made.clone()], "a", Some("b")),
            (vec![renamed("a", "b", true)], "b/c", Some("a/c")),
            (vec![renamed("a", "b", false), renamed("c", "a", false)], "c", Some("a")),
            (vec![renamed("a/c", "c", false), renamed("a", "b", false)], "a/c/d", Some("c/d")),
            (vec![removed("a")], "a", None),
            (vec![removed("a"), made], "a", None),
            (vec![removed("a"), renamed("b", "a", false)], "b", Some("a")),
            (vec![of_a_file], "a", Some("a")),
        ] {
            let found = Moved::by(operations.clone()).directory(path.as_bytes());
            assert_eq!(found.as_deref(), now.map(str::as_bytes), "{path} after {operations:?}");
        }
    }

    #[test]
    fn the_names_of_a_state_go_with_their_directories() {
        let moved = Moved::by(vec![renamed("a", "b", false), removed("c")]);
        let state = |path: &str, others: &[&str]| NodeState {
            path: path.into(),
            attributes: NodeAttributes::default(),
            attributes_ns: 0,
            other_names: Some(others.iter().map(|path| path.as_bytes().to_vec()).collect()),
            kind: NodeKind::Directory,
        };
        assert_eq!(moved.state(&state("a/x", &["y", "c/z", "a/d/x"])), Some(state("b/x", &["y", "b/d/x"])));
        assert_eq!(moved.state(&state("a", &[])), Some(state("a", &[])), "a name in the root stays one");
        assert_eq!(moved.state(&state("c/x", &[])), None);
    }
}

//! Names that no key of Tier-3 can hold: they end with this node's memory.
//!
//! Owns: which those are, how many, and what people see of them. Does not own: which paths a key can hold (`protocol::path`),
//! examining files (`ledger`) and the rest of the tree (`tree`).

use super::Ledger;
use crate::node::flush::covers;
use std::collections::BTreeMap;
use std::sync::Arc;
use tidemark_namespace::{FileView, NodeId, TreeSnapshot, is_hidden};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::report::{Pending, PendingReason, path_text};

/// Directories, links and special files whose paths are kept; of more only how many they are. A flush names no more of anything.
const OTHERS_MAX: usize = 1000;

/// Longest path that is kept and reported whole. If a path is longer, both its ends are. A tree may have any depth, and no call
/// takes a path of more than half of this.
const PATH_BYTES_MAX: usize = 8192;

/// The same limit in a sentence about all of them, which `status` says five times a second.
const EXAMPLE_BYTES_MAX: usize = 256;

const WHY: &str =
    "its path is too long for Tier-3: this name ends with this node's memory; use a shorter path";

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct Unkept {
    /// Files with such a name, as last examined: one view each, as the ledger has of every file in the tree.
    files: BTreeMap<NodeId, Arc<FileView>>,
    /// The names of those files.
    file_names: u64,
    /// The other such names, from the tree as last examined.
    others: Vec<Vec<u8>>,
    others_left_out: u64,
}

/// Whether nothing in Tier-3 can have the name at this path. Hidden names belong to this memory only, so none of them counts.
fn is_unkept(path: &[u8]) -> bool {
    !is_hidden(path) && RelPath::new(path).is_err()
}

fn names_of(view: &FileView) -> impl Iterator<Item = &[u8]> {
    view.paths.iter().map(Vec::as_slice).filter(|path| is_unkept(path))
}

fn count_of(view: &FileView) -> u64 {
    u64::try_from(names_of(view).count()).expect("a count fits 64 bits")
}

/// Whether no name carries the bytes of a file to Tier-3.
fn has_no_other_name(view: &FileView) -> bool {
    view.paths.iter().all(|path| is_hidden(path) || is_unkept(path))
}

/// Returns a path, or both ends of a longer one.
fn cut(path: &[u8], most_bytes: usize) -> Vec<u8> {
    if path.len() <= most_bytes {
        return path.to_vec();
    }
    let half = most_bytes / 2;
    [&path[..half], "…".as_bytes(), &path[path.len() - half..]].concat()
}

impl Unkept {
    /// Returns how many such names there are.
    pub(crate) fn count(&self) -> u64 {
        let others = u64::try_from(self.others.len()).expect("a count fits 64 bits");
        self.file_names + others + self.others_left_out
    }

    fn names(&self) -> impl Iterator<Item = &[u8]> {
        let files = self.files.values().flat_map(|view| names_of(view));
        files.chain(self.others.iter().map(Vec::as_slice))
    }

    /// Examines the names of everything but files. Costs a pass over the directories and the links.
    pub(crate) fn look_at(&mut self, tree: &TreeSnapshot) {
        let links = tree.symlinks.iter().map(|(node, _)| node);
        let specials = tree.specials.iter().map(|(node, _)| node);
        let nodes = tree.directories.iter().chain(links).chain(specials);
        let mut names = nodes.map(|node| node.path.as_slice()).filter(|path| is_unkept(path));
        self.others = names.by_ref().take(OTHERS_MAX).map(|path| cut(path, PATH_BYTES_MAX)).collect();
        self.others_left_out = u64::try_from(names.count()).expect("a count fits 64 bits");
    }

    /// Returns the rows of a flush for the names at or below `place`. Waiting makes none of them durable.
    pub(crate) fn pending(&self, place: &[u8]) -> impl Iterator<Item = Pending> {
        self.names().filter(move |path| covers(place, path)).map(|path| Pending {
            path: path_text(&cut(path, PATH_BYTES_MAX)),
            reason: PendingReason::Unnameable,
            what: WHY.to_owned(),
        })
    }

    /// Returns a sentence about the names. `None`: there are none.
    pub(crate) fn problem(&self) -> Option<String> {
        let example = path_text(&cut(self.names().next()?, EXAMPLE_BYTES_MAX));
        let names = match self.count() {
            1 => "1 name is".to_owned(),
            count => format!("{count} names are"),
        };
        Some(format!("{names} too long for Tier-3, such as {example}"))
    }
}

impl Ledger {
    /// Records the state of a file that has a name which no key can hold. `None`: the file has no such name, or is gone. If it has
    /// no other name, its bytes count as not saved.
    pub(super) fn set_unkept(&mut self, node: NodeId, view: Option<Arc<FileView>>) {
        if let Some(view) = &view {
            self.unkept.file_names += count_of(view);
            if has_no_other_name(view) {
                self.copies.add(view);
            }
        }
        let before = match view {
            Some(view) => self.unkept.files.insert(node, view),
            None => self.unkept.files.remove(&node),
        };
        if let Some(before) = before {
            self.unkept.file_names -= count_of(&before);
            if has_no_other_name(&before) {
                self.copies.take(&before);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::view;
    use super::*;
    use tidemark_namespace::SnapshotNode;
    use tidemark_protocol::path::MAX_PATH_BYTES;
    use tidemark_protocol::recognise::Rules;

    /// Makes a path of so many bytes, with this end.
    fn path(bytes: usize, end: &str) -> String {
        let mut path = "d/".repeat(bytes / 2 - end.len() / 2 - 1);
        while path.len() + end.len() < bytes {
            path.push('d');
        }
        path + end
    }

    fn said(ledger: &Ledger, place: &str) -> Vec<String> {
        ledger.unkept.pending(place.as_bytes()).map(|pending| pending.path).collect()
    }

    #[test]
    fn a_name_that_no_key_holds_is_named_once_while_it_is_there() {
        let (kept, gone, other) =
            (path(MAX_PATH_BYTES, "/a"), path(MAX_PATH_BYTES + 1, "/a"), path(MAX_PATH_BYTES + 9, "/b"));
        let mut ledger = Ledger::new(Rules::builtin());
        for _ in 0..3 {
            ledger.put(view(1, &[&gone]));
            ledger.put(view(2, &["r/a.csv", &other]));
            ledger.put(view(3, &[&kept]));
        }
        assert_eq!(ledger.unkept.count(), 2, "looks at one file are not more names");
        assert_eq!(said(&ledger, ""), [gone.as_str(), &other]);
        assert_eq!(said(&ledger, "d/d").len(), 2);
        assert_eq!(said(&ledger, "r"), [""; 0]);
        assert!(ledger.unkept.pending(b"").all(|row| row.reason == PendingReason::Unnameable));
        let what = ledger.unkept.problem().unwrap();
        assert!(what.starts_with("2 names ") && what.contains("d/…") && what.len() < 512, "{what}");
        assert_eq!(
            ledger.copies.unsaved_files, 3,
            "the bytes of the second go to Tier-3 under its other name"
        );
        ledger.put(view(1, &["r/short.csv"]));
        assert_eq!(said(&ledger, ""), [other.as_str()], "it was renamed");
        assert_eq!(ledger.copies.unsaved_files, 3);
        ledger.remove(2);
        assert_eq!((ledger.unkept.count(), ledger.unkept.problem()), (0, None));
        assert_eq!(ledger.copies.unsaved_files, 2);
    }

    #[test]
    fn directories_and_links_count_as_the_tree_has_them() {
        let node = |path: String| SnapshotNode { path: path.into_bytes(), ..SnapshotNode::default() };
        let tree = |directories: usize| TreeSnapshot {
            directories: (0..directories).map(|number| node(path(5000, &format!("/d{number:04}")))).collect(),
            symlinks: vec![
                (node(path(5000, "/link")), b"x".to_vec()),
                (node("r/link".to_owned()), b"x".to_vec()),
            ],
            ..TreeSnapshot::default()
        };
        let mut ledger = Ledger::new(Rules::builtin());
        ledger.unkept.look_at(&tree(2));
        assert_eq!(said(&ledger, "").len(), 3);
        ledger.unkept.look_at(&tree(OTHERS_MAX + 4));
        let counted = usize::try_from(ledger.unkept.count()).unwrap();
        assert_eq!((counted, said(&ledger, "").len()), (OTHERS_MAX + 5, OTHERS_MAX));
        ledger.unkept.look_at(&TreeSnapshot::default());
        assert_eq!(ledger.unkept.count(), 0);
    }

    #[test]
    fn of_a_path_of_any_depth_both_ends_are_told() {
        let told = cut(path(100_000, "/weights.bin").as_bytes(), PATH_BYTES_MAX);
        assert_eq!(told.len(), PATH_BYTES_MAX + "…".len());
        assert!(told.starts_with(b"d/d/") && told.ends_with(b"/weights.bin"));
    }
}

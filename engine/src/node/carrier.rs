//! Carrier of a file: the one of its names under which its bytes go to Tier-3.
//!
//! Owns: that choice, for uploads and for the tree document alike; making names due again when it may change. Does not own:
//! the uploads (`loose`, `decide`), the document (`tree`).
//!
//! The other names are hard links in the tree document. If a link led to a name that is never uploaded, all names of the file would be
//! gone after a restart.

use super::Ledger;
use std::collections::HashMap;
use tidemark_namespace::{NodeId, TreeSnapshot};
use tidemark_protocol::id::FileId;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{Candidate, CheckpointId, Rules};

impl Ledger {
    /// Returns the name that carries a file's bytes; none if it has no name. Preference: the first name that is not temporary, because
    /// a checkpoint's version or the file itself is uploaded under it; then the first loose one, which is no part in flight of a
    /// checkpoint; then the first.
    pub(crate) fn carrier(&self, node: NodeId) -> Option<&RelPath> {
        let names = self.paths_of(node);
        if names.len() < 2 {
            return names.first();
        }
        let lasts = |name: &&RelPath| !self.rules().is_temporary(name);
        let is_loose = |name: &&RelPath| self.loose.contains_key(*name);
        names.iter().find(lasts).or_else(|| names.iter().find(is_loose)).or_else(|| names.first())
    }

    /// Whether another name carries the bytes of the file at `path`.
    pub(crate) fn is_further(&self, path: &RelPath, node: NodeId) -> bool {
        self.carrier(node).is_some_and(|carrier| carrier != path)
    }

    /// Names each file of the tree by the name that carries its bytes, and makes its other names links to that one. Files that changed
    /// since the snapshot stay as they are. Costs the number of files with several names.
    pub(crate) fn name_by_carrier(&self, snapshot: &mut TreeSnapshot) {
        let mut others: HashMap<&[u8], Vec<&[u8]>> = HashMap::new();
        for link in &snapshot.hard_links {
            others.entry(link.to.as_slice()).or_default().push(link.path.as_slice());
        }
        let mut carriers: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
        for file in &snapshot.files {
            let first = file.node.path.as_slice();
            let Some(others) = others.get(first) else { continue };
            let mut names = std::iter::once(first).chain(others.iter().copied());
            let Some(carrier) = names.find_map(|name| self.carrier_at(name, file.file)) else { continue };
            if others.contains(&carrier.as_bytes()) {
                carriers.insert(first.to_vec(), carrier.as_bytes().to_vec());
            }
        }
        if carriers.is_empty() {
            return;
        }
        for file in &mut snapshot.files {
            if let Some(carrier) = carriers.get(&file.node.path) {
                file.node.path.clone_from(carrier);
            }
        }
        for link in &mut snapshot.hard_links {
            if let Some(carrier) = carriers.get(&link.to) {
                let before = std::mem::replace(&mut link.to, carrier.clone());
                if link.path == *carrier {
                    link.path = before;
                }
            }
        }
        snapshot.files.sort_unstable_by(|one, other| one.node.path.cmp(&other.node.path));
        snapshot.hard_links.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    }

    /// Returns the carrier of the file with this name; none if the name means another file by now.
    fn carrier_at(&self, name: &[u8], file: FileId) -> Option<&RelPath> {
        let path = RelPath::new(name).ok()?;
        let view = self.file(&path).filter(|view| view.file == file)?;
        self.carrier(view.node)
    }

    /// Makes the other names of the file at `path` due, because it may have another carrier now.
    pub(super) fn look_at_other_names(&mut self, path: &RelPath) {
        let Some(node) = self.file(path).map(|view| view.node) else { return };
        let others =
            self.paths_of(node).iter().filter(|name| *name != path && self.loose.contains_key(*name));
        let others: Vec<_> = others.cloned().collect();
        // The tree document records which name carries each file.
        self.tree_changed |= !others.is_empty();
        for name in others {
            self.loose_due.insert(name);
        }
    }

    /// Makes files under temporary names in a committed checkpoint due: the version needs no file in flight any more, so they are files
    /// like others.
    pub(crate) fn frees_temporaries(&mut self, id: &CheckpointId) {
        let Some(book) = self.books.get(id) else { return };
        let Some(candidate) = book.candidate.as_ref().filter(|found| !found.temporaries.is_empty()) else {
            return;
        };
        for path in leftovers(&self.rules, candidate) {
            // A torn save had held it back until now.
            if self.loose.contains_key(path) {
                self.loose_due.insert(path.clone());
            }
        }
        self.stale.insert(book.scope.clone());
    }

    /// Whether a torn save of the surrounding checkpoint left this file. Such a file is not uploaded: the checkpoint is reported as torn,
    /// and is hidden together with the file, or saved again.
    pub(crate) fn is_left_by_torn(&self, path: &RelPath) -> bool {
        self.rules().is_temporary(path)
            && std::iter::successors(path.parent(), RelPath::parent)
                .filter_map(|above| self.books.get(&CheckpointId::at(&above)?))
                .any(|book| book.is_torn() && book.holds(path))
    }
}

/// Returns the files under temporary names in a committed checkpoint, except marks: beside committed bytes, a mark would claim that they
/// are not whole.
pub(super) fn leftovers<'a>(rules: &'a Rules, candidate: &'a Candidate) -> impl Iterator<Item = &'a RelPath> {
    candidate.temporaries.iter().filter(|path| !rules.is_mark(path))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{regroup_all, view};
    use super::*;
    use tidemark_namespace::{SnapshotFile, SnapshotHardLink, SnapshotNode, torn_path};
    use tidemark_protocol::id::{Generation, SealNumber};

    const CHECKPOINT: [(NodeId, &str); 2] =
        [(1, "run/checkpoint-1/model.safetensors"), (2, "run/checkpoint-1/trainer_state.json")];
    const TEMPORARY: &str = "run/checkpoint-1/x.csv.tmp";

    fn ledger(files: &[(NodeId, &[&str])]) -> Ledger {
        let mut ledger = Ledger::new(Rules::builtin());
        for (node, name) in CHECKPOINT {
            ledger.put(view(node, &[name]));
        }
        for (node, names) in files {
            ledger.put(view(*node, names));
        }
        regroup_all(&mut ledger);
        ledger
    }

    fn carrier(names: &[&str]) -> String {
        ledger(&[(9, names)]).carrier(9).unwrap().to_string()
    }

    #[test]
    fn the_first_name_that_something_uploads_carries_the_bytes() {
        assert_eq!(carrier(&["run/a.csv", "run/b.csv"]), "run/a.csv");
        assert_eq!(carrier(&[TEMPORARY, "run/keep.csv"]), "run/keep.csv", "nobody uploads the first");
        assert_eq!(carrier(&[TEMPORARY, "run/checkpoint-1/x.csv"]), "run/checkpoint-1/x.csv");
        assert_eq!(carrier(&["run/checkpoint-1/x.csv", "run/keep.csv"]), "run/checkpoint-1/x.csv");
        assert_eq!(carrier(&["run/x.tmp", "run/keep.csv"]), "run/keep.csv", "the other may be about to go");
        assert_eq!(carrier(&[TEMPORARY, "run/y.tmp"]), "run/y.tmp", "no part of a checkpoint");
        assert_eq!(carrier(&[TEMPORARY]), TEMPORARY);
        let out_of_sight = torn_path(&RelPath::new("run/checkpoint-2/a.log").unwrap());
        let out_of_sight = String::from_utf8(out_of_sight).unwrap();
        assert_eq!(carrier(&[&out_of_sight, "run/keep.log"]), "run/keep.log", "of this memory only");
    }

    #[test]
    fn the_tree_names_a_file_as_its_upload_does() {
        let ledger =
            ledger(&[(8, &["run/a.csv", "run/b.csv"]), (9, &[TEMPORARY, "run/z.csv", "run/keep.csv"])]);
        let file = |node: NodeId, path: &str| SnapshotFile {
            node: SnapshotNode { path: path.as_bytes().to_vec(), ..SnapshotNode::default() },
            file: view(node, &[]).file,
            seal: SealNumber(1),
            generation: Generation(1),
            size_bytes: 1,
        };
        let link = |path: &str, to: &str| SnapshotHardLink {
            path: path.as_bytes().to_vec(),
            to: to.as_bytes().to_vec(),
        };
        let mut snapshot = TreeSnapshot {
            files: vec![file(8, "run/a.csv"), file(9, TEMPORARY)],
            hard_links: vec![
                link("run/b.csv", "run/a.csv"),
                link("run/keep.csv", TEMPORARY),
                link("run/z.csv", TEMPORARY),
            ],
            ..TreeSnapshot::default()
        };
        ledger.name_by_carrier(&mut snapshot);
        assert_eq!(snapshot.files, [file(8, "run/a.csv"), file(9, "run/z.csv")]);
        let links =
            [link("run/b.csv", "run/a.csv"), link(TEMPORARY, "run/z.csv"), link("run/keep.csv", "run/z.csv")];
        assert_eq!(snapshot.hard_links, links);
    }

    #[test]
    fn another_name_is_looked_at_when_the_one_that_carried_the_bytes_becomes_a_part_in_flight() {
        let mut ledger = Ledger::new(Rules::builtin());
        ledger.put(view(9, &[TEMPORARY, "run/y.tmp"]));
        regroup_all(&mut ledger);
        assert_eq!(ledger.carrier(9).unwrap().to_string(), TEMPORARY, "no checkpoint is there yet");
        while ledger.loose_due.pop().is_some() {}
        for (node, name) in CHECKPOINT {
            ledger.put(view(node, &[name]));
        }
        regroup_all(&mut ledger);
        assert_eq!(ledger.carrier(9).unwrap().to_string(), "run/y.tmp");
        assert_eq!(ledger.loose_due.pop(), Some(RelPath::new("run/y.tmp").unwrap()));
    }
}

//! The removals and the links that Tier-3 knows of.
//!
//! Owns: what the newest tree document in Tier-3 says of them, and which of the removals stand. Does not own: what is removed now,
//! and whether that may be published (`tree`).
//!
//! A published removal stands until the tree shows again what was removed. A new file under the name does not undo it, nor does a
//! file that lost another of its copies: what the job removed for good must not come back.

use crate::node::book::{Book, LooseBook, Number};
use std::collections::{BTreeMap, BTreeSet};
use tidemark_protocol::documents::{RemovedFile, TreeDocument};
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::manifest::Symlink;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::CheckpointId;

/// The removals and the links in a tree document.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// Each up to and with this version.
    versions: BTreeMap<CheckpointId, Number>,
    /// Names of checkpoints of which others stay, with what they named.
    files: BTreeMap<RelPath, BTreeSet<(FileId, SealNumber)>>,
    /// Each up to and with this generation.
    pub(crate) loose: BTreeMap<RelPath, Generation>,
    pub(crate) links: BTreeMap<RelPath, Symlink>,
}

/// The published removals of one checkpoint.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ToldOfOne {
    pub(crate) version: Option<Number>,
    pub(crate) files: BTreeSet<RemovedFile>,
}

impl Told {
    pub(crate) fn of(tree: &TreeDocument) -> Self {
        let mut told = Self::default();
        for version in &tree.removed_versions {
            let id = CheckpointId { run: version.run.clone(), directory: version.directory.clone() };
            let number = (version.timeline, version.version);
            let highest = told.versions.entry(id).or_insert(number);
            *highest = number.max(*highest);
        }
        for RemovedFile { path, file, seal } in &tree.removed_files {
            told.files.entry(path.clone()).or_default().insert((*file, *seal));
        }
        told.loose = tree.removed_loose.iter().map(|loose| (loose.path.clone(), loose.generation)).collect();
        told.links = tree.symlinks.iter().map(|link| (link.path.clone(), link.clone())).collect();
        told
    }

    /// Returns how many removals it has that `before` does not.
    pub(crate) fn removals_beyond(&self, before: &Self) -> u64 {
        let versions = self.versions.iter().filter(|(id, until)| before.versions.get(*id) < Some(*until));
        let loose = self.loose.iter().filter(|(path, until)| before.loose.get(*path) < Some(*until));
        let files = self.files.iter().map(|(path, removed)| {
            before.files.get(path).map_or(removed.len(), |known| removed.difference(known).count())
        });
        (versions.count() + loose.count() + files.sum::<usize>()) as u64
    }

    /// Returns the last version of a checkpoint that is removed.
    pub(crate) fn version(&self, id: &CheckpointId) -> Option<Number> {
        self.versions.get(id).copied()
    }

    /// Whether a checkpoint's name is removed as the one of these bytes.
    pub(crate) fn has_file(&self, path: &RelPath, of: (FileId, SealNumber)) -> bool {
        self.files.get(path).is_some_and(|removed| removed.contains(&of))
    }

    /// Whether a generation of a loose file is removed.
    pub(crate) fn has_loose(&self, path: &RelPath, generation: Generation) -> bool {
        self.loose.get(path).is_some_and(|until| *until >= generation)
    }

    /// Returns the standing removals of a checkpoint of which a restart shows the version `shown`. `now` gives the file that the
    /// tree has at a path.
    pub(crate) fn standing(
        &self,
        book: &Book,
        shown: Number,
        now: impl Fn(&RelPath) -> Option<(FileId, SealNumber)>,
    ) -> ToldOfOne {
        let version = self.version(&book.id).filter(|until| {
            let contents = book.versions.range(..=until).flat_map(|(_, version)| &version.contents);
            !contents.into_iter().any(|(path, of)| now(path) == Some(*of))
        });
        let contents = book.versions.get(&shown).into_iter().flat_map(|version| &version.contents);
        let contents = contents.filter(|_| !self.files.is_empty());
        let gone = contents.filter(|(path, of)| self.has_file(path, **of) && now(path) != Some(**of));
        let removed = |(path, of): (&RelPath, &(FileId, SealNumber))| RemovedFile {
            path: path.clone(),
            file: of.0,
            seal: of.1,
        };
        ToldOfOne { version, files: gone.map(removed).collect() }
    }

    /// Returns the last generation that a standing removal of a loose file covers. If Tier-3 has a later one, those before it need
    /// no removal.
    pub(crate) fn standing_loose(
        &self,
        path: &RelPath,
        book: &LooseBook,
        now: Option<&(FileId, SealNumber)>,
    ) -> Option<Generation> {
        let until = *self.loose.get(path)?;
        let is_back = book.generation == Some(until) && now.is_some() && book.of.as_ref() == now;
        let is_followed = book.described > Some(until);
        (!is_back && !is_followed).then_some(until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::id::{FileCounter, Incarnation};

    #[test]
    fn a_removal_of_a_loose_file_stands_until_its_bytes_are_back_or_newer_ones_are_in_tier3() {
        let path = RelPath::new("run/log.txt").unwrap();
        let of = |file| (FileId { incarnation: Incarnation(1), counter: FileCounter(file) }, SealNumber(1));
        let told = Told { loose: [(path.clone(), Generation(2))].into(), ..Told::default() };
        let stands = |generation, described, bytes, now: Option<u64>| {
            let (generation, described) = (Some(Generation(generation)), Some(Generation(described)));
            let book = LooseBook { generation, described, of: Some(of(bytes)), ..LooseBook::default() };
            told.standing_loose(&path, &book, now.map(of).as_ref()).is_some()
        };
        assert!(stands(2, 2, 7, None), "removed");
        assert!(stands(2, 2, 7, Some(8)), "the name is taken anew");
        assert!(stands(3, 2, 8, Some(8)), "the new bytes are on their way");
        assert!(!stands(3, 3, 8, Some(8)), "they are there");
        assert!(!stands(2, 2, 7, Some(7)), "it was put back");
    }
}

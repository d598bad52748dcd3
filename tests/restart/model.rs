//! A tree of files in plain Rust: the effect of each operation, and whether it fails.
//!
//! Owns: the rules of POSIX for a tree with one writer. Does not own: anything else; there is no product code and no system call.
//! The model knows only times that an operation named, not those that the kernel's clock wrote.

use std::collections::{BTreeMap, BTreeSet};

pub(crate) type Id = u64;
/// Seconds and nanoseconds.
pub(crate) type Time = (i64, u32);

const ROOT: Id = 0;

/// Kind of a node, with its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File(Vec<u8>),
    Directory(BTreeMap<String, Id>),
    Symlink(String),
    Pipe,
}

#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) xattrs: BTreeMap<String, Vec<u8>>,
    /// The time, or `None` if the kernel's clock wrote it.
    pub(crate) mtime: Option<Time>,
}

/// Failure of an operation, which then changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused;

type Outcome<T = ()> = Result<T, Refused>;

/// A tree, as the module's head describes. Paths are relative to the tree's root, which has the empty path.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    nodes: BTreeMap<Id, Node>,
    next: Id,
}

impl Model {
    /// Returns an empty directory of this mode, owned by root.
    pub(crate) fn new(mode: u32) -> Self {
        let mut model = Self { nodes: BTreeMap::new(), next: ROOT };
        model.make(Kind::Directory(BTreeMap::new()), mode);
        model
    }

    fn make(&mut self, kind: Kind, mode: u32) -> Id {
        let id = self.next;
        self.next += 1;
        let node = Node { kind, mode, uid: 0, gid: 0, xattrs: BTreeMap::new(), mtime: None };
        self.nodes.insert(id, node);
        id
    }

    pub(crate) fn find(&self, path: &str) -> Option<Id> {
        let mut at = ROOT;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            at = *self.entries(at)?.get(part)?;
        }
        Some(at)
    }

    pub(crate) fn node(&self, id: Id) -> &Node {
        &self.nodes[&id]
    }

    fn node_mut(&mut self, id: Id) -> &mut Node {
        self.nodes.get_mut(&id).expect("nodes stay")
    }

    fn entries(&self, id: Id) -> Option<&BTreeMap<String, Id>> {
        match &self.nodes[&id].kind {
            Kind::Directory(entries) => Some(entries),
            Kind::File(_) | Kind::Symlink(_) | Kind::Pipe => None,
        }
    }

    fn entries_mut(&mut self, id: Id) -> &mut BTreeMap<String, Id> {
        let node = self.node_mut(id);
        node.mtime = None;
        match &mut node.kind {
            Kind::Directory(entries) => entries,
            Kind::File(_) | Kind::Symlink(_) | Kind::Pipe => unreachable!("who changes entries has looked"),
        }
    }

    fn bytes(&self, id: Id) -> Outcome<&Vec<u8>> {
        match &self.nodes[&id].kind {
            Kind::File(bytes) => Ok(bytes),
            Kind::Directory(_) | Kind::Symlink(_) | Kind::Pipe => Err(Refused),
        }
    }

    fn bytes_mut(&mut self, id: Id) -> Outcome<&mut Vec<u8>> {
        self.bytes(id)?;
        let node = self.node_mut(id);
        node.mtime = None;
        match &mut node.kind {
            Kind::File(bytes) => Ok(bytes),
            Kind::Directory(_) | Kind::Symlink(_) | Kind::Pipe => Err(Refused),
        }
    }

    /// Returns the directory of a path's last name, and that name.
    fn place<'a>(&self, path: &'a str) -> Outcome<(Id, &'a str)> {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let directory = self.find(above).filter(|id| self.entries(*id).is_some()).ok_or(Refused)?;
        if name.is_empty() { Err(Refused) } else { Ok((directory, name)) }
    }

    fn free(&self, path: &str) -> Outcome {
        self.place(path)?;
        if self.find(path).is_some() { Err(Refused) } else { Ok(()) }
    }

    fn add(&mut self, path: &str, id: Id) -> Outcome {
        let (directory, name) = self.place(path)?;
        self.entries_mut(directory).insert(name.to_owned(), id);
        Ok(())
    }

    fn take(&mut self, path: &str) -> Outcome {
        let (directory, name) = self.place(path)?;
        self.entries_mut(directory).remove(name).map(drop).ok_or(Refused)
    }

    /// Opens for writing as open(2), never through a symlink, and returns the file.
    pub(crate) fn open(
        &mut self,
        path: &str,
        create: bool,
        exclusive: bool,
        truncate: bool,
        mode: u32,
    ) -> Outcome<Id> {
        match self.find(path) {
            Some(_) if exclusive => Err(Refused),
            Some(id) => {
                self.bytes(id)?;
                if truncate {
                    self.bytes_mut(id)?.clear();
                }
                Ok(id)
            }
            None if create => {
                self.free(path)?;
                let id = self.make(Kind::File(Vec::new()), mode);
                self.add(path, id)?;
                Ok(id)
            }
            None => Err(Refused),
        }
    }

    /// Writes into an open file at `offset` or, without one, at its end.
    pub(crate) fn write(&mut self, id: Id, offset: Option<usize>, bytes: &[u8]) -> Outcome {
        // A write of no bytes makes no file longer.
        if bytes.is_empty() {
            return self.bytes(id).map(drop);
        }
        let held = self.bytes_mut(id)?;
        let at = offset.unwrap_or(held.len());
        if held.len() < at + bytes.len() {
            held.resize(at + bytes.len(), 0);
        }
        held[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    pub(crate) fn truncate(&mut self, id: Id, size_bytes: usize) -> Outcome {
        self.bytes_mut(id)?.resize(size_bytes, 0);
        Ok(())
    }

    pub(crate) fn mkdir(&mut self, path: &str, mode: u32) -> Outcome {
        self.free(path)?;
        let id = self.make(Kind::Directory(BTreeMap::new()), mode);
        self.add(path, id)
    }

    pub(crate) fn symlink(&mut self, path: &str, target: &str) -> Outcome {
        self.free(path)?;
        let id = self.make(Kind::Symlink(target.to_owned()), 0o777);
        self.add(path, id)
    }

    pub(crate) fn pipe(&mut self, path: &str, mode: u32) -> Outcome {
        self.free(path)?;
        let id = self.make(Kind::Pipe, mode);
        self.add(path, id)
    }

    pub(crate) fn link(&mut self, from: &str, to: &str) -> Outcome {
        let id = self.find(from).ok_or(Refused)?;
        if self.entries(id).is_some() {
            return Err(Refused);
        }
        self.free(to)?;
        self.add(to, id)
    }

    pub(crate) fn unlink(&mut self, path: &str) -> Outcome {
        let id = self.find(path).ok_or(Refused)?;
        if self.entries(id).is_some() { Err(Refused) } else { self.take(path) }
    }

    pub(crate) fn rmdir(&mut self, path: &str) -> Outcome {
        let id = self.find(path).ok_or(Refused)?;
        match self.entries(id) {
            Some(entries) if entries.is_empty() && id != ROOT => self.take(path),
            Some(_) | None => Err(Refused),
        }
    }

    pub(crate) fn rename(&mut self, from: &str, to: &str, no_replace: bool) -> Outcome {
        let moved = self.find(from).filter(|id| *id != ROOT).ok_or(Refused)?;
        self.place(to)?;
        if is_at_or_below(to, from) && to != from {
            return Err(Refused);
        }
        if let Some(replaced) = self.find(to) {
            if no_replace || replaced == ROOT {
                return Err(Refused);
            }
            // If both names are of one file, rename(2) does nothing.
            if replaced == moved {
                return Ok(());
            }
            let (moves, over) = (self.entries(moved).is_some(), self.entries(replaced));
            if moves != over.is_some() || over.is_some_and(|entries| !entries.is_empty()) {
                return Err(Refused);
            }
            self.take(to)?;
        }
        self.take(from)?;
        self.add(to, moved)
    }

    pub(crate) fn exchange(&mut self, one: &str, other: &str) -> Outcome {
        let (first, second) = (self.find(one).ok_or(Refused)?, self.find(other).ok_or(Refused)?);
        if first == second {
            return Ok(());
        }
        if is_at_or_below(one, other) || is_at_or_below(other, one) {
            return Err(Refused);
        }
        self.add(one, second)?;
        self.add(other, first)
    }

    pub(crate) fn chmod(&mut self, path: &str, mode: u32) -> Outcome {
        let id = self.find(path).ok_or(Refused)?;
        self.node_mut(id).mode = mode;
        Ok(())
    }

    pub(crate) fn chown(&mut self, path: &str, uid: u32, gid: u32) -> Outcome {
        let id = self.find(path).ok_or(Refused)?;
        let node = self.node_mut(id);
        (node.uid, node.gid) = (uid, gid);
        if !matches!(node.kind, Kind::Directory(_)) {
            let sgid = if node.mode & 0o010 != 0 { 0o2000 } else { 0 };
            node.mode &= !(0o4000 | sgid);
        }
        Ok(())
    }

    pub(crate) fn utimens(&mut self, path: &str, mtime: Time) -> Outcome {
        let id = self.find(path).ok_or(Refused)?;
        self.node_mut(id).mtime = Some(mtime);
        Ok(())
    }

    pub(crate) fn set_xattr(&mut self, path: &str, name: &str, value: &[u8]) -> Outcome {
        let id = self.find(path).ok_or(Refused)?;
        self.node_mut(id).xattrs.insert(name.to_owned(), value.to_vec());
        Ok(())
    }

    pub(crate) fn remove_xattr(&mut self, path: &str, name: &str) -> Outcome {
        let id = self.find(path).ok_or(Refused)?;
        self.node_mut(id).xattrs.remove(name).map(drop).ok_or(Refused)
    }

    /// Returns every path, in order, the root's first.
    pub(crate) fn paths(&self) -> Vec<(String, Id)> {
        let mut all = vec![(String::new(), ROOT)];
        let mut at = 0;
        while at < all.len() {
            let (path, id) = all[at].clone();
            for (name, below) in self.entries(id).into_iter().flatten() {
                let path = if path.is_empty() { name.clone() } else { format!("{path}/{name}") };
                all.push((path, *below));
            }
            at += 1;
        }
        all.sort();
        all
    }

    /// Returns each node's link count. A directory's count is 2, and one more for each directory in it.
    pub(crate) fn link_counts(&self) -> BTreeMap<Id, u64> {
        let mut counts = BTreeMap::new();
        for (_, id) in self.paths() {
            *counts.entry(id).or_default() += 1;
        }
        let directories: BTreeSet<Id> = self.paths().into_iter().map(|(_, id)| id).collect();
        for id in directories {
            if let Some(entries) = self.entries(id) {
                let below = entries.values().filter(|below| self.entries(**below).is_some()).count();
                counts.insert(id, 2 + below as u64);
            }
        }
        counts
    }
}

fn is_at_or_below(path: &str, above: &str) -> bool {
    above.is_empty() || path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_refuses_what_posix_refuses() {
        let mut model = Model::new(0o755);
        model.mkdir("d", 0o755).unwrap();
        let file = model.open("d/f", true, true, false, 0o644).unwrap();
        model.write(file, None, b"abc").unwrap();
        model.write(file, Some(5), b"z").unwrap();
        assert_eq!(model.node(file).kind, Kind::File(b"abc\0\0z".to_vec()));
        model.link("d/f", "g").unwrap();
        assert_eq!(model.link_counts()[&file], 2);
        assert_eq!(model.rename("d/f", "g", false), Ok(()), "two names of one file");
        assert!(model.find("d/f").is_some());
        assert_eq!(model.rmdir("d"), Err(Refused), "not empty");
        assert_eq!(model.rename("d", "d/x", false), Err(Refused), "into itself");
        assert_eq!(model.exchange("d", "d/f"), Err(Refused));
        assert_eq!(model.exchange("", "g"), Err(Refused));
        assert_eq!(model.rename("g", "d", false), Err(Refused), "over a directory");
        model.exchange("d", "g").unwrap();
        assert_eq!(model.find("g/f"), model.find("d"));
        model.unlink("d").unwrap();
        let paths: Vec<_> = model.paths().into_iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["", "g", "g/f"]);
        model.pipe("p", 0o7754).unwrap();
        model.chown("p", 1, 2).unwrap();
        assert_eq!(model.node(model.find("p").unwrap()).mode, 0o1754);
    }
}

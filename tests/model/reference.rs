//! The reference: the namespace's correct behaviour, in plain maps and vectors.
//!
//! Owns: the one definition of correctness of the model suite. Does not own: running it against the namespace.

use std::collections::BTreeMap;
use tidemark_namespace::{FsError, Special};

/// A node's place in `Reference::nodes`.
pub(crate) type Id = usize;
pub(crate) const ROOT: Id = 0;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Content {
    Directory(BTreeMap<Vec<u8>, Id>),
    File(Vec<u8>),
    Symlink(Vec<u8>),
    Special(Special),
}

#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) content: Content,
    pub(crate) mode: u32,
    /// The time, or `None` if only the kernel knows it, because a writer has had the file open since.
    pub(crate) mtime_ns: Option<i64>,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(crate) ino: u64,
    pub(crate) cut: bool,
    pub(crate) sealed: bool,
    pub(crate) cold: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Reference {
    pub(crate) nodes: BTreeMap<Id, Node>,
    next: Id,
}

impl Reference {
    pub(crate) fn new() -> Self {
        let mut reference = Self::default();
        reference.make(Content::Directory(BTreeMap::new()), 0o755, 0, 1);
        reference.nodes.get_mut(&ROOT).unwrap().mtime_ns = None;
        reference
    }

    pub(crate) fn make(&mut self, content: Content, mode: u32, now_ns: i64, ino: u64) -> Id {
        let id = self.next;
        self.next += 1;
        let node = Node {
            content,
            mode,
            mtime_ns: Some(now_ns),
            xattrs: BTreeMap::new(),
            ino,
            cut: false,
            sealed: false,
            cold: false,
        };
        self.nodes.insert(id, node);
        id
    }

    pub(crate) fn node(&mut self, id: Id) -> &mut Node {
        self.nodes.get_mut(&id).unwrap()
    }

    pub(crate) fn entries(&self, id: Id) -> Option<&BTreeMap<Vec<u8>, Id>> {
        match &self.nodes[&id].content {
            Content::Directory(entries) => Some(entries),
            Content::File(_) | Content::Symlink(_) | Content::Special(_) => None,
        }
    }

    fn entries_mut(&mut self, id: Id, now_ns: i64) -> &mut BTreeMap<Vec<u8>, Id> {
        let node = self.node(id);
        node.mtime_ns = Some(now_ns);
        match &mut node.content {
            Content::Directory(entries) => entries,
            Content::File(_) | Content::Symlink(_) | Content::Special(_) => {
                unreachable!("callers pass directories")
            }
        }
    }

    pub(crate) fn bytes(&mut self, id: Id) -> &mut Vec<u8> {
        match &mut self.node(id).content {
            Content::File(bytes) => bytes,
            Content::Directory(_) | Content::Symlink(_) | Content::Special(_) => {
                unreachable!("callers pass files")
            }
        }
    }

    pub(crate) fn is_directory(&self, id: Id) -> bool {
        self.entries(id).is_some()
    }

    pub(crate) fn child(&self, dir: Id, name: &[u8]) -> Result<Id, FsError> {
        self.entries(dir).ok_or(FsError::NotDirectory)?.get(name).copied().ok_or(FsError::NotFound)
    }

    /// Returns every path with its node, parents before children. The root's path is empty.
    pub(crate) fn paths(&self) -> Vec<(Vec<u8>, Id)> {
        let mut found = vec![(Vec::new(), ROOT)];
        let mut at = 0;
        while at < found.len() {
            let (path, id) = found[at].clone();
            for (name, child) in self.entries(id).into_iter().flatten() {
                let parts: Vec<&[u8]> =
                    [&path[..], name].into_iter().filter(|part| !part.is_empty()).collect();
                found.push((parts.join(&b'/'), *child));
            }
            at += 1;
        }
        found
    }

    pub(crate) fn links(&self, id: Id) -> usize {
        self.nodes.values().map(|node| names_of(node, id)).sum()
    }

    pub(crate) fn insert(&mut self, dir: Id, name: &[u8], id: Id, now_ns: i64) {
        self.entries_mut(dir, now_ns).insert(name.to_vec(), id);
    }

    /// Gives the names of `from` to `to`. The directories' times stay.
    pub(crate) fn move_names(&mut self, from: Id, to: Id) {
        for node in self.nodes.values_mut() {
            if let Content::Directory(entries) = &mut node.content {
                entries.values_mut().filter(|id| **id == from).for_each(|id| *id = to);
            }
        }
    }

    pub(crate) fn link(&mut self, id: Id, dir: Id, name: &[u8], now_ns: i64) -> Result<(), FsError> {
        if self.child(dir, name).is_ok() {
            return Err(FsError::Exists);
        }
        if self.is_directory(id) {
            return Err(FsError::NotPermitted);
        }
        self.insert(dir, name, id, now_ns);
        Ok(())
    }

    pub(crate) fn unlink(&mut self, dir: Id, name: &[u8], now_ns: i64) -> Result<(), FsError> {
        if self.is_directory(self.child(dir, name)?) {
            return Err(FsError::IsDirectory);
        }
        self.entries_mut(dir, now_ns).remove(name);
        Ok(())
    }

    pub(crate) fn rmdir(&mut self, dir: Id, name: &[u8], now_ns: i64) -> Result<(), FsError> {
        let child = self.child(dir, name)?;
        if !self.entries(child).ok_or(FsError::NotDirectory)?.is_empty() {
            return Err(FsError::NotEmpty);
        }
        self.entries_mut(dir, now_ns).remove(name);
        Ok(())
    }

    fn is_below(&self, id: Id, ancestor: Id) -> bool {
        id == ancestor
            || self
                .entries(ancestor)
                .is_some_and(|entries| entries.values().any(|child| self.is_below(id, *child)))
    }

    pub(crate) fn rename(
        &mut self,
        (dir, name): (Id, &[u8]),
        (to_dir, to_name): (Id, &[u8]),
        no_replace: bool,
        now_ns: i64,
    ) -> Result<(), FsError> {
        let moved = self.child(dir, name)?;
        if self.is_directory(moved) && self.is_below(to_dir, moved) {
            return Err(FsError::Invalid);
        }
        if let Ok(target) = self.child(to_dir, to_name) {
            if no_replace {
                return Err(FsError::Exists);
            }
            if target == moved {
                return Ok(());
            }
            match (self.entries(moved), self.entries(target)) {
                (Some(_), Some(entries)) if !entries.is_empty() => return Err(FsError::NotEmpty),
                (Some(_), None) => return Err(FsError::NotDirectory),
                (None, Some(_)) => return Err(FsError::IsDirectory),
                (Some(_), Some(_)) | (None, None) => {}
            }
        }
        self.entries_mut(dir, now_ns).remove(name);
        self.insert(to_dir, to_name, moved, now_ns);
        Ok(())
    }

    pub(crate) fn exchange(
        &mut self,
        (dir, name): (Id, &[u8]),
        (to_dir, to_name): (Id, &[u8]),
        now_ns: i64,
    ) -> Result<(), FsError> {
        let (one, other) = (self.child(dir, name)?, self.child(to_dir, to_name)?);
        if one == other {
            return Ok(());
        }
        if self.is_below(to_dir, one) || self.is_below(dir, other) {
            return Err(FsError::Invalid);
        }
        self.insert(dir, name, other, now_ns);
        self.insert(to_dir, to_name, one, now_ns);
        Ok(())
    }

    /// Forgets nodes that no name and no handle reaches.
    pub(crate) fn sweep(&mut self, open: &[Id]) {
        let named: Vec<Id> = self.paths().into_iter().map(|(_, id)| id).collect();
        self.nodes.retain(|id, _| named.contains(id) || open.contains(id));
    }
}

fn names_of(node: &Node, id: Id) -> usize {
    match &node.content {
        Content::Directory(entries) => entries.values().filter(|child| **child == id).count(),
        Content::File(_) | Content::Symlink(_) | Content::Special(_) => 0,
    }
}

//! A single change that another node published, applied to the tree.
//!
//! Owns: the effect on this node's names and files of another node's operation, state or settled name. Does not own: which of them are
//! applied (`mirror`), a node's further names (`links`), putting nodes aside (`aside`), the bytes (`facts`).

use super::attributes::{Teller, take_attributes};
use super::cold::AdoptEntry;
use super::file::File;
use super::hidden::{first_entry, is_in_sight};
use super::mirror::Remote;
use super::node::{Body, Node};
use super::outgoing::{Question, attributes};
use super::tree::Tree;
use super::writer::WriterId;
use super::xattr::Xattrs;
use super::{AdoptKind, FILE_MODE_BITS, FsError, HIDDEN, NodeId, ROOT, State};
use std::ops::Range;
use std::sync::Arc;
use tidemark_protocol::cluster::wire::{FileFacts, NameOperation, NodeAttributes, NodeKind, NodeState};
use tidemark_protocol::id::{FileId, Generation, Incarnation};

/// The state while it applies another node's changes, which are not published again.
#[derive(Debug)]
pub(super) struct Mirroring<'a> {
    pub(super) state: &'a mut State,
    /// The life of this node.
    pub(super) own: Incarnation,
}

impl State {
    /// Begins to apply another node's changes, for the rest of this change.
    pub(super) fn mirroring(&mut self, own: Incarnation) -> Mirroring<'_> {
        self.outgoing.mute();
        Mirroring { state: self, own }
    }
}

impl Mirroring<'_> {
    /// Handles that another node removed a name. If it was the last, the kernel would otherwise keep the node until the kernel is short
    /// of memory.
    pub(super) fn loses_name(&mut self, parent: NodeId, name: &[u8], node: NodeId) {
        self.state.tree.mark(node);
        if self.state.tree.node(node).is_ok_and(|node| node.link_count() == 0 && node.is_remembered()) {
            self.state.lost_names.push((parent, name.to_vec(), Some(node)));
        }
        self.state.forsake(node);
    }

    /// Handles that another node moves a named node. The kernel knows a directory at one place only. If a call finds the directory
    /// elsewhere while that call moves names, the kernel refuses it (ESTALE, `fs/dcache.c`, `d_splice_alias`).
    fn loses_place(&mut self, (parent, name): (NodeId, &[u8]), node: NodeId) {
        if self.state.tree.node(node).is_ok_and(Node::is_directory) {
            self.state.lost_names.push((parent, name.to_vec(), None));
        }
    }

    /// Whether the described node is here, under any name.
    pub(super) fn has(&self, told: &NodeState) -> bool {
        let there = || self.state.tree.node(self.state.tree.resolve(&told.path).ok()?).ok();
        match &told.kind {
            NodeKind::File(facts) => self.state.named(facts.file, self.own).is_some(),
            NodeKind::Directory => there().is_some_and(Node::is_directory),
            // Another target is another link: a name that was lost to one is not won back by telling how the old one stands.
            NodeKind::Symlink { target } => {
                there().is_some_and(|node| matches!(&node.body, Body::Symlink(here) if **here == target[..]))
            }
        }
    }

    pub(super) fn follow(
        &mut self,
        operation: &NameOperation,
        home: Incarnation,
        now_ns: i64,
    ) -> Result<(), FsError> {
        match operation {
            NameOperation::Directory { path, attributes } => {
                self.make_mirror(path, attributes, Body::Directory(Box::default())).map(drop)
            }
            NameOperation::Symlink { path, target, attributes } => {
                self.make_mirror(path, attributes, Body::Symlink(target.as_slice().into())).map(drop)
            }
            NameOperation::File { path, file, attributes } => {
                // A file is created once. An operation published twice may arrive after the file was renamed.
                if self.shows(*file) {
                    return Ok(());
                }
                self.make_file(path, *file, attributes, home, now_ns).map(drop)
            }
            NameOperation::Linked { from, path, what } => {
                let node = match what {
                    Some(file) => self.state.node_of(*file, self.own).ok_or(FsError::Stale)?,
                    None => self.state.tree.resolve(from)?,
                };
                let (parent, name) = self.state.tree.split(path)?;
                self.state.tree.link(node, parent, name, now_ns)?;
                self.state.tree.named(node, now_ns);
                Ok(())
            }
            NameOperation::Removed { path, what } => {
                let (parent, name) = self.state.tree.split(path)?;
                let node = meant(&self.state.tree, parent, name, *what)?;
                let gone = if self.state.tree.node(node)?.is_directory() {
                    self.state.tree.rmdir(parent, name, now_ns)?
                } else {
                    self.state.tree.unlink(parent, name, now_ns)?
                };
                self.loses_name(parent, name, gone);
                Ok(())
            }
            NameOperation::Taken { path, from, file, attributes } => {
                // The operation is published twice if the old file still exists because a program has it open.
                if self.shows(*file) {
                    return Ok(());
                }
                if let Some(old) = self.state.named(*from, self.own) {
                    return self.give_names(old, *file, attributes, home, now_ns).map(drop);
                }
                // The node that made the old file does not tell that any more, because the file was overwritten.
                if self.state.was_removed(*from) || self.state.tree.resolve(path).is_ok() {
                    return Err(FsError::Stale);
                }
                self.make_file(path, *file, attributes, home, now_ns).map(drop)
            }
            NameOperation::Renamed { from, to, exchange, what } => {
                let (from, to) = (self.state.tree.split(from)?, self.state.tree.split(to)?);
                let moved = meant(&self.state.tree, from.0, from.1, *what)?;
                self.loses_place(from, moved);
                if *exchange {
                    self.loses_place(to, self.state.tree.child(to.0, to.1)?);
                    let (one, other) = self.state.tree.exchange(from, to, now_ns)?;
                    self.state.tree.renamed(one, now_ns);
                    self.state.tree.renamed(other, now_ns);
                    return Ok(());
                }
                let (moved, replaced) = self.state.tree.rename(from, to, false, now_ns)?;
                self.state.tree.renamed(moved, now_ns);
                if let Some(replaced) = replaced {
                    self.loses_name(to.0, to.1, replaced);
                }
                Ok(())
            }
        }
    }

    fn shows(&self, file: FileId) -> bool {
        self.state.node_of(file, self.own).is_some_and(|node| is_in_sight(&self.state.tree, node))
    }

    /// Gives the names of `old` to bytes that another node writes or has written. Programs that have the old bytes open keep them.
    fn give_names(
        &mut self,
        old: NodeId,
        file: FileId,
        attributes: &NodeAttributes,
        home: Incarnation,
        now_ns: i64,
    ) -> Result<NodeId, FsError> {
        // Checked first: the other node's attributes may be refused, and then nothing must have changed.
        let xattrs = Xattrs::from_pairs(&attributes.xattrs)?;
        let id = self.state.tree.number();
        let replaced = self.state.tree.node_mut(old)?;
        (replaced.overwritten, replaced.forsaken) = (true, true);
        let (uid, gid, ino) = (attributes.uid, attributes.gid, replaced.ino);
        let mut mirror = File::new(file, Generation(id), None, now_ns);
        mirror.remote = Some(Box::new(Remote::begun(home, now_ns)));
        let body = Body::File(Box::new(mirror));
        let mut node = Node::new(ino, attributes.mode & FILE_MODE_BITS, uid, gid, now_ns, body);
        node.overwritten = true;
        node.xattrs = xattrs;
        if let Some(xattrs) = &node.xattrs {
            self.state.tree.touched.xattrs.extend(xattrs.names().map(|name| (id, name)));
        }
        self.state.tree.insert(id, node);
        self.state.tree.move_names(old, id);
        self.state.identities.adopt(file, id);
        self.state.tree.mark(old);
        self.state.tree.mark(id);
        self.state.release_unreachable(old);
        Ok(id)
    }

    /// Replaces a file's bytes. Attributes that were set here and are not published yet stay.
    fn begin_anew(&mut self, old: NodeId, facts: &FileFacts, home: Incarnation) -> Result<NodeId, FsError> {
        let node = self.state.tree.node(old)?;
        let (here, set_ns, read_ns) = (attributes(node), node.attributes_ns, node.atime_ns);
        let id = self.give_names(old, facts.file, &here, home, facts.opened_ns)?;
        let node = self.state.tree.node_mut(id)?;
        (node.mtime_ns, node.attributes_ns, node.atime_ns) = (here.mtime_ns, set_ns, read_ns);
        Ok(id)
    }

    /// Applies a node's state, as published by the life `home`. For a node without bytes the coordinator passes life 0; for a file it
    /// passes the file's home.
    pub(super) fn take_state(&mut self, told: &NodeState, home: Incarnation) -> Result<NodeId, FsError> {
        let without_bytes = if home == Incarnation(0) { Teller::Coordinator } else { Teller::Any };
        let (node, teller) = match &told.kind {
            NodeKind::Directory => {
                let body = Body::Directory(Box::default());
                (self.make_mirror(&told.path, &told.attributes, body)?, without_bytes)
            }
            NodeKind::Symlink { target } => {
                let body = Body::Symlink(target.as_slice().into());
                (self.make_mirror(&told.path, &told.attributes, body)?, without_bytes)
            }
            NodeKind::File(facts) => {
                let known = self.state.named(facts.file, self.own);
                let node = match known {
                    Some(node) => node,
                    None => {
                        self.make_file(&told.path, facts.file, &told.attributes, home, facts.opened_ns)?
                    }
                };
                // Another node may change a file's mode; only the file's home knows its bytes. This node knows its own files better,
                // unless it had evicted the bytes and then lost the name: then only the state that it published before is left.
                let of_home = facts.file.incarnation == home && (home != self.own || known.is_none());
                // Programs read the old bytes to the end; whoever opens the name from now on gets the new ones.
                let node = if of_home && self.state.tree.node(node)?.is_open_with_other_bytes(facts)? {
                    self.begin_anew(node, facts, home)?
                } else {
                    node
                };
                if of_home {
                    self.state.take_facts(node, facts, home)?;
                }
                if of_home && home == self.own {
                    self.state.tree.file_mut(node)?.take_back();
                }
                (node, if of_home { Teller::Home } else { Teller::Other })
            }
        };
        take_attributes(&mut self.state.tree, node, told, teller)?;
        Ok(node)
    }

    /// Returns the node that another node has at `path`, creating it if it is missing.
    fn make_mirror(
        &mut self,
        path: &[u8],
        attributes: &NodeAttributes,
        body: Body,
    ) -> Result<NodeId, FsError> {
        let (parents, name) = parts(path)?;
        let entry = entry(path, attributes, AdoptKind::Directory);
        let parent = self.state.tree.quietly().make_parents(&parents, &entry)?;
        match self.state.tree.child(parent, name) {
            Ok(there) => match (&self.state.tree.node(there)?.body, &body) {
                (Body::Directory(_), Body::Directory(_)) => Ok(there),
                (Body::Symlink(one), Body::Symlink(other)) if one == other => Ok(there),
                _ => {
                    self.drop_name(parent, name, attributes.mtime_ns)?;
                    self.state.tree.quietly().adopt_node(parent, name, &entry, body)
                }
            },
            Err(_) => self.state.tree.quietly().adopt_node(parent, name, &entry, body),
        }
    }

    /// Returns the file that another node has at `path`. If the name belongs to another file, supersedes that file.
    fn make_file(
        &mut self,
        path: &[u8],
        file: FileId,
        attributes: &NodeAttributes,
        home: Incarnation,
        opened_ns: i64,
    ) -> Result<NodeId, FsError> {
        if self.state.was_removed(file) {
            return Err(FsError::NotFound);
        }
        let (parents, name) = parts(path)?;
        let entry = entry(path, attributes, AdoptKind::Directory);
        let parent = self.state.tree.quietly().make_parents(&parents, &entry)?;
        if let Ok(there) = self.state.tree.child(parent, name) {
            if self.state.tree.node(there)?.file().is_ok_and(|found| found.id == file) {
                return Ok(there);
            }
            self.drop_name(parent, name, attributes.mtime_ns)?;
        }
        // A hidden copy of the file may be here already: then the copy gets its name.
        if let Some(known) = self.state.identities.adopted(file)
            && self.state.tree.is_reachable(known)
        {
            self.state.tree.quietly().name_again(known, parent, name, opened_ns)?;
            self.state.tree.mark(known);
            return Ok(known);
        }
        let mut mirror = File::new(file, Generation(0), None, opened_ns);
        mirror.remote = Some(Box::new(Remote::begun(home, opened_ns)));
        let id = self.state.tree.quietly().adopt_node(parent, name, &entry, Body::File(Box::new(mirror)))?;
        self.state.tree.file_mut(id)?.generation = Generation(id);
        self.state.identities.adopt(file, id);
        self.state.tree.mark(id);
        Ok(id)
    }

    pub(super) fn settle_name(
        &mut self,
        (parent, name): (NodeId, &[u8]),
        found: Option<&NodeState>,
        asked: Question,
        now_ns: i64,
    ) -> Result<(), FsError> {
        let here = self.state.tree.child(parent, name).ok();
        let Some(found) = found else {
            let ours = (parent, name) == (ROOT, HIDDEN);
            if here.is_some_and(|here| !ours && !is_special(&self.state.tree, here)) {
                self.drop_name(parent, name, now_ns)?;
            }
            return Ok(());
        };
        let home = match &found.kind {
            NodeKind::File(facts) => facts.file.incarnation,
            // Nodes without bytes have no home. Attributes that were set here since count by their moment, as if any node told these.
            NodeKind::Directory | NodeKind::Symlink { .. } => {
                let is_set = self.state.outgoing.is_newer(parent, name, asked.attributes_at);
                if is_set { self.own } else { Incarnation(0) }
            }
        };
        if let (NodeKind::File(facts), Some(here)) = (&found.kind, here)
            && home == self.own
            && self.state.tree.node(here)?.file().is_ok_and(|file| file.id == facts.file)
        {
            // This node's own file: this node knows its bytes better.
            take_attributes(&mut self.state.tree, here, found, Teller::Other)?;
            return self.settle_other_names((parent, name), found, asked, now_ns);
        }
        let times = self.state.tree.quietly().times(parent)?;
        if let NodeKind::File(facts) = &found.kind
            && let Some(known) = self.state.named(facts.file, self.own)
        {
            // The file has this name by now, whatever its name here.
            self.give_name(known, (parent, name), now_ns)?;
        }
        self.take_state(found, home)?;
        self.state.tree.quietly().put_back(parent, times)?;
        self.settle_other_names((parent, name), found, asked, now_ns)
    }

    /// Removes a name with everything below it. Files that a program has open live on without a name. Puts aside files that only this
    /// node has, since they may have another name by now.
    pub(super) fn drop_name(&mut self, parent: NodeId, name: &[u8], now_ns: i64) -> Result<(), FsError> {
        let top = self.state.tree.child(parent, name)?;
        loop {
            let (mut at, mut entry) = (top, (parent, name.to_vec()));
            while let Some((name, below)) = first_entry(&self.state.tree, at) {
                entry = (at, name);
                at = below;
            }
            if self.put_aside(at, (entry.0, &entry.1), now_ns)? {
                if at == top {
                    return Ok(());
                }
                continue;
            }
            let gone = if self.state.tree.node(at)?.is_directory() {
                self.state.tree.rmdir(entry.0, &entry.1, now_ns)?
            } else {
                self.state.tree.unlink(entry.0, &entry.1, now_ns)?
            };
            self.loses_name(entry.0, &entry.1, gone);
            if at == top {
                return Ok(());
            }
        }
    }

    /// Keeps a name if this node made what it leads to, or something below that, from number `since` on, and removes the other names below
    /// it. Returns whether the name stays.
    pub(super) fn drop_before(
        &mut self,
        parent: NodeId,
        name: &[u8],
        (since, asked): (NodeId, Question),
        now_ns: i64,
    ) -> Result<bool, FsError> {
        let node = self.state.tree.child(parent, name)?;
        if since == NodeId::MAX || !self.is_made_here(node, since, asked) {
            return Ok(false);
        }
        let Ok(directory) = self.state.tree.node(node)?.directory() else { return Ok(true) };
        let below: Vec<_> = directory.by_name.keys().cloned().collect();
        for name in below {
            let stays = self.state.outgoing.is_passed_over(node, &name, asked)
                || self.drop_before(node, &name, (since, asked), now_ns)?;
            if !stays {
                self.drop_name(node, &name, now_ns)?;
            }
        }
        Ok(true)
    }

    /// Whether this node made it, or something below it, from number `since` on. What a look-up found has such a number, too, but another
    /// node made it. A directory or a symbolic link does not say who made it: their names are among those that changed here.
    fn is_made_here(&self, node: NodeId, since: NodeId, asked: Question) -> bool {
        let Ok(found) = self.state.tree.node(node) else { return false };
        match &found.body {
            Body::File(file) => node >= since && file.id.incarnation == self.own,
            Body::Special(_) => node >= since,
            Body::Symlink(_) => false,
            Body::Directory(directory) => directory.by_cookie.values().any(|entry| {
                self.state.outgoing.is_passed_over(node, &entry.name, asked)
                    || self.is_made_here(entry.node, since, asked)
            }),
        }
    }
}

impl File {
    /// Makes a file that was taken for another node's this node's own.
    fn take_back(&mut self) {
        self.remote = None;
        let own = |writer: &Arc<WriterId>| Arc::new(WriterId { home: None, ..WriterId::clone(writer) });
        self.writers = self.writers.iter().map(own).collect();
    }
}

/// Returns the node under a name, if it is the described one.
fn meant(tree: &Tree, parent: NodeId, name: &[u8], what: Option<FileId>) -> Result<NodeId, FsError> {
    let node = tree.child(parent, name)?;
    if tree.node(node)?.file_id() == what { Ok(node) } else { Err(FsError::Stale) }
}

/// Whether other nodes made the node. A directory belongs to every node that made something in it: holders of copies publish files in
/// directories that their home made.
fn is_made_by_others(tree: &Tree, node: NodeId, nodes: &Range<NodeId>, home: Incarnation) -> bool {
    let Ok(found) = tree.node(node) else { return false };
    nodes.contains(&node)
        && match &found.body {
            Body::File(file) => file.id.incarnation != home,
            Body::Symlink(_) | Body::Special(_) => true,
            Body::Directory(directory) => {
                directory.by_cookie.values().any(|entry| is_made_by_others(tree, entry.node, nodes, home))
            }
        }
}

/// Whether an operation of `home`, which was away, would supersede, move or remove what other nodes made meanwhile, or supersede a file that
/// they moved there. `nodes`: the numbers that were given meanwhile.
pub(super) fn meets_made(
    tree: &Tree,
    operation: &NameOperation,
    nodes: &Range<NodeId>,
    home: Incarnation,
) -> bool {
    let made = |path: &[u8]| tree.resolve(path).is_ok_and(|node| is_made_by_others(tree, node, nodes, home));
    // A rename gives a file a number like that of a new node.
    let moved = |node: &Node| node.file().is_ok_and(|file| nodes.contains(&file.generation.0));
    let there = |path: &[u8]| tree.node(tree.resolve(path).ok()?).ok();
    let given = |path: &[u8]| made(path) || there(path).is_some_and(moved);
    match operation {
        // Two nodes that make the same directory share it.
        NameOperation::Directory { path, .. } => !there(path).is_some_and(Node::is_directory) && given(path),
        // Its node found the name free, so what was moved there meanwhile stays, also if it is older.
        NameOperation::Symlink { path, .. } => given(path),
        NameOperation::File { path, file, .. } => {
            there(path).is_some_and(|node| node.file_id() != Some(*file)) && given(path)
        }
        // A file is identified by more than its name.
        NameOperation::Removed { path, what } => what.is_none() && made(path),
        NameOperation::Renamed { from, to, what, .. } => made(to) || what.is_none() && made(from),
        // Another name of a file takes no name away; a taken file's old file is not here.
        NameOperation::Linked { .. } | NameOperation::Taken { .. } => false,
    }
}

fn is_special(tree: &Tree, node: NodeId) -> bool {
    tree.node(node).is_ok_and(|node| matches!(node.body, Body::Special(_)))
}

/// Splits a path into its directories and its last part.
pub(super) fn parts(path: &[u8]) -> Result<(Vec<&[u8]>, &[u8]), FsError> {
    let mut parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
    let name = parts.pop().filter(|name| !name.is_empty()).ok_or(FsError::Invalid)?;
    Ok((parts, name))
}

pub(super) fn entry(path: &[u8], attributes: &NodeAttributes, kind: AdoptKind) -> AdoptEntry {
    AdoptEntry {
        path: path.to_vec(),
        kind,
        mode: attributes.mode,
        uid: attributes.uid,
        gid: attributes.gid,
        mtime_ns: attributes.mtime_ns,
        xattrs: Vec::new(),
    }
}

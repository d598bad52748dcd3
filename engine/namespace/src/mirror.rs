//! What other nodes say of names and files, taken into this node's tree.
//!
//! Owns: carrying out others' operations, bringing a name or a directory to what the coordinator says of it, what is known of a
//! file whose writers are elsewhere ([`Remote`]). Does not own: asking and telling (`cluster`), what a file's home says of its bytes
//! (`facts`), the bytes (`cold`).
//!
//! On the coordinator the tree is the catalog: it has everything that was published. On other nodes it has what was made there
//! and what was asked for. A file of another node is cold here until somebody opens it.

use super::attributes::Teller;
use super::catalog::Moment;
use super::cold::AdoptEntry;
use super::file::File;
use super::guarded::Guarded;
use super::hidden::TORN;
use super::hidden::first_entry;
use super::hidden::is_in_sight;
use super::node::{Body, Node};
use super::outgoing::attributes;
use super::tree::Tree;
use super::writer::WriterId;
use super::xattr::Xattrs;
use super::{AdoptKind, FILE_MODE_BITS, FsError, HIDDEN, NodeId, ROOT, State};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use tidemark_protocol::cluster::wire::{FileFacts, NameOperation, NodeAttributes, NodeKind, NodeState};
use tidemark_protocol::file::FileState;
use tidemark_protocol::id::{FileId, Incarnation};
use tidemark_protocol::key::NodeLife;

/// What is known of a file whose writers are on another node.
#[derive(Debug, Clone, PartialEq)]
pub struct Remote {
    /// The life that says so.
    pub home: Incarnation,
    pub state: FileState,
    pub published_ns: i64,
    pub vouched: bool,
    /// The bytes of the present seal are in its memory.
    pub host: bool,
}

impl Remote {
    /// Of a file that is open for writing there, and of which nothing else is known yet.
    fn begun(home: Incarnation, opened_ns: i64) -> Self {
        let state = FileState::Open { writers: 1 };
        Self { home, state, published_ns: opened_ns, vouched: false, host: false }
    }
}

/// Names settled in one hold of the lock.
const SETTLED_AT_ONCE: usize = 256;

/// Other nodes' names and states, taken into this tree.
#[derive(Debug, Clone, Copy)]
pub struct Mirror<'a> {
    pub(super) state: &'a Guarded,
}

impl Mirror<'_> {
    /// Carries out what another node did to names, in order, as its publication of that number says; what cannot be done is passed over and
    /// said, since the other has done it. What was carried out before the daemon was killed is not carried out again.
    ///
    /// What was made while `from` counted as lost is others', and keeps its names ([`CatalogTree::gives_up`](super::CatalogTree::gives_up)).
    pub fn follow(&self, operations: &[NameOperation], from: &NodeLife, publication: u64) {
        let now_ns = self.state.now_ns();
        let mut done = self.state.look(|state| state.heard.done(from, publication)).min(operations.len());
        while done < operations.len() {
            let next = operations.len().min(done + SETTLED_AT_ONCE);
            let followed = self.state.change(|state| {
                state.outgoing.mute();
                let away = state.heard.made_while_away(from).cloned();
                for operation in &operations[done..next] {
                    if away.as_ref().is_some_and(|away| meets_made(&state.tree, operation, away, from.incarnation)) {
                        tracing::warn!(?operation, %from, "another node made something of this name while it was away, which stays");
                        continue;
                    }
                    state.outgoing.carried.note(operation);
                    if let Err(error) = state.follow(operation, from.incarnation, self.state.incarnation, now_ns) {
                        tracing::debug!(?operation, %error, "an operation of another node finds another tree here");
                    }
                }
                state.heard.note_done(from, publication, next);
                Ok(())
            });
            if let Err(error) = followed {
                tracing::error!(%error, "the journal did not take what another node did");
            }
            done = next;
        }
    }

    /// Takes in how nodes stand, as `home` says. What is not here is made where `makes`: then no operation says that it was. Otherwise it
    /// lost its name here since, and stays without; such files are returned.
    pub fn take_states(&self, states: &[NodeState], home: Incarnation, makes: bool) -> Vec<FileId> {
        let mut nameless = Vec::new();
        for states in states.chunks(SETTLED_AT_ONCE) {
            let taken = self.state.change(|state| {
                state.outgoing.mute();
                for told in states {
                    if !makes && !state.has(told, self.state.incarnation) {
                        if let NodeKind::File(facts) = &told.kind {
                            nameless.push(facts.file);
                        }
                        continue;
                    }
                    let makes_names = makes && !state.was_told(told, self.state.incarnation);
                    let taken = state
                        .take_state(told, home, self.state.incarnation)
                        .and_then(|node| if makes_names { state.make_names(node, told) } else { Ok(()) });
                    if let Err(error) = taken {
                        let path = String::from_utf8_lossy(&told.path);
                        tracing::debug!(%path, %error, "what another node says of a name does not fit here");
                    }
                }
                Ok(())
            });
            if let Err(error) = taken {
                tracing::error!(%error, "the journal did not take how nodes stand elsewhere");
            }
        }
        nameless
    }

    /// Brings one name of a directory to what the coordinator says of it. What changed here after `asked_at` operations it does not
    /// know, and stays.
    ///
    /// # Errors
    /// [`FsError::NotFound`] where the directory itself is not here; those of the journal.
    pub fn settle_name(
        &self,
        directory: &[u8],
        name: &[u8],
        found: Option<&NodeState>,
        asked_at: u64,
    ) -> Result<(), FsError> {
        let now_ns = self.state.now_ns();
        self.state.change(|state| {
            state.outgoing.mute();
            let parent = state.tree.resolve(directory)?;
            if state.outgoing.is_newer(parent, name, asked_at) {
                return Ok(());
            }
            state.settle_name((parent, name), found, asked_at, self.state.incarnation, now_ns)
        })
    }

    /// Brings a whole directory to what the coordinator says of it.
    ///
    /// # Errors
    /// As [`Mirror::settle_name`].
    pub fn settle_directory(
        &self,
        directory: &[u8],
        found: &[NodeState],
        asked_at: u64,
    ) -> Result<(), FsError> {
        self.settle_names(directory, found, asked_at, NodeId::MAX)
    }

    /// The same; a node with a number from `made_since` on was made here since, and stays under its name too.
    pub(super) fn settle_names(
        &self,
        directory: &[u8],
        found: &[NodeState],
        asked_at: u64,
        made_since: NodeId,
    ) -> Result<(), FsError> {
        let now_ns = self.state.now_ns();
        let name_of = |state: &NodeState| state.path.rsplit(|b| *b == b'/').next().unwrap_or(&[]).to_vec();
        let names: BTreeSet<Vec<u8>> = found.iter().map(name_of).collect();
        // A lot that cannot be carried out, or journaled, does not stop the others.
        let mut settled = Ok(());
        for states in found.chunks(SETTLED_AT_ONCE) {
            let result = self.state.change(|state| {
                state.outgoing.mute();
                let parent = state.tree.resolve(directory)?;
                for told in states {
                    let name = name_of(told);
                    if !state.outgoing.is_newer(parent, &name, asked_at) {
                        state.settle_name(
                            (parent, &name),
                            Some(told),
                            asked_at,
                            self.state.incarnation,
                            now_ns,
                        )?;
                    }
                }
                Ok(())
            });
            settled = settled.and(result);
        }
        settled?;
        self.state.change(|state| {
            state.outgoing.mute();
            let parent = state.tree.resolve(directory)?;
            let here = state.tree.node(parent)?.directory()?.by_name.keys();
            let surplus: Vec<_> = here.filter(|name| !names.contains(&***name)).cloned().collect();
            for name in surplus {
                if state.outgoing.is_newer(parent, &name, asked_at)
                    || state.drop_before(parent, &name, made_since, now_ns)?
                {
                    continue;
                }
                state.settle_name((parent, &name), None, asked_at, self.state.incarnation, now_ns)?;
            }
            Ok(())
        })
    }

    /// The coordinator says that these files have no name any more: their names here go, and copies of them.
    pub fn end_removed(&self, files: &[FileId]) {
        let now_ns = self.state.now_ns();
        tracing::debug!(?files, "no name is left of them");
        for file in files {
            let ended = self.state.change(|state| {
                state.outgoing.mute();
                state.forget_copies_of(*file);
                let Some(node) = state.node_of(*file, self.state.incarnation) else { return Ok(()) };
                for link in state.tree.node(node)?.links().collect::<Vec<_>>() {
                    let Some(name) = state.tree.entry_at(link).map(|entry| entry.name.to_vec()) else {
                        continue;
                    };
                    state.tree.unlink(link.parent, &name, now_ns)?;
                    state.loses_name(link.parent, &name, node);
                }
                state.tree.mark(node);
                state.forsake(node);
                Ok(())
            });
            if let Err(error) = ended {
                tracing::error!(%file, %error, "a file that another node removed stays here");
            }
        }
    }

    /// Brings the tree to what the last coordinator's was: `directories` with what is in them, parents first. What was done here after
    /// `told` that coordinator did not know, and it stays. False where not all of it could be carried out, or journaled.
    pub fn become_catalog(&self, directories: &[(Vec<u8>, Vec<NodeState>)], told: Moment) -> bool {
        let mut is_complete = true;
        for (path, found) in directories {
            let settled = if path == HIDDEN {
                // What else this node hides, copies above all, is no other's.
                found.iter().try_for_each(|state| self.settle_name(HIDDEN, TORN, Some(state), told.names))
            } else {
                self.settle_names(path, found, told.names, told.next)
            };
            match settled {
                Ok(()) => {}
                // Removed here since, with all that was in it.
                Err(FsError::NotFound) if is_complete => {}
                Err(error) => {
                    is_complete = false;
                    let path = String::from_utf8_lossy(path);
                    tracing::error!(%path, %error, "a directory of the catalog cannot be made here");
                }
            }
        }
        is_complete
    }
}

impl File {
    /// It was taken for another node's, and is this node's own.
    fn take_back(&mut self) {
        self.remote = None;
        let own = |writer: &Arc<WriterId>| Arc::new(WriterId { home: None, ..WriterId::clone(writer) });
        self.writers = self.writers.iter().map(own).collect();
    }
}

impl State {
    /// Another node took a name away. Where it was the last, the kernel would keep the node until it is short of memory itself.
    pub(super) fn loses_name(&mut self, parent: NodeId, name: &[u8], node: NodeId) {
        self.tree.mark(node);
        if self.tree.node(node).is_ok_and(|node| node.link_count() == 0 && node.is_remembered()) {
            self.lost_names.push((parent, name.to_vec(), Some(node)));
        }
        self.forsake(node);
    }

    /// Another node moves what has a name here. The kernel knows a directory at one place only, and refuses a call that finds it at
    /// another one while it moves names itself (ESTALE, `fs/dcache.c`, `d_splice_alias`).
    fn loses_place(&mut self, (parent, name): (NodeId, &[u8]), node: NodeId) {
        if self.tree.node(node).is_ok_and(Node::is_directory) {
            self.lost_names.push((parent, name.to_vec(), None));
        }
    }

    /// Whether what is told of is here, under whichever name.
    fn has(&self, told: &NodeState, own: Incarnation) -> bool {
        let there = || self.tree.node(self.tree.resolve(&told.path).ok()?).ok();
        match &told.kind {
            NodeKind::File(facts) => {
                self.node_of(facts.file, own).is_some_and(|node| self.tree.is_reachable(node))
            }
            NodeKind::Directory => there().is_some_and(Node::is_directory),
            // Another target is another link: a name that was lost to one is not won back by telling how the old one stands.
            NodeKind::Symlink { target } => {
                there().is_some_and(|node| matches!(&node.body, Body::Symlink(here) if **here == target[..]))
            }
        }
    }

    fn follow(
        &mut self,
        operation: &NameOperation,
        home: Incarnation,
        own: Incarnation,
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
                // A file is made once. What is told twice may come after it was renamed.
                if self.shows(*file, own) {
                    return Ok(());
                }
                self.make_file(path, *file, attributes, home, now_ns).map(drop)
            }
            NameOperation::Linked { from, path, what } => {
                let node = match what {
                    Some(file) => self.node_of(*file, own).ok_or(FsError::Stale)?,
                    None => self.tree.resolve(from)?,
                };
                let (parent, name) = self.tree.split(path)?;
                self.tree.link(node, parent, name, now_ns)?;
                self.tree.named(node, now_ns);
                Ok(())
            }
            NameOperation::Removed { path, what } => {
                let (parent, name) = self.tree.split(path)?;
                let node = meant(&self.tree, parent, name, *what)?;
                let gone = if self.tree.node(node)?.is_directory() {
                    self.tree.rmdir(parent, name, now_ns)?
                } else {
                    self.tree.unlink(parent, name, now_ns)?
                };
                self.loses_name(parent, name, gone);
                Ok(())
            }
            NameOperation::Taken { from, file, attributes, .. } => {
                // It is told twice where the old file is still there, because a program has it open.
                if self.shows(*file, own) {
                    return Ok(());
                }
                let old = self.node_of(*from, own).filter(|node| self.tree.is_reachable(*node));
                self.give_names(old.ok_or(FsError::Stale)?, *file, attributes, home, now_ns).map(drop)
            }
            NameOperation::Renamed { from, to, exchange, what } => {
                let (from, to) = (self.tree.split(from)?, self.tree.split(to)?);
                let moved = meant(&self.tree, from.0, from.1, *what)?;
                self.loses_place(from, moved);
                if *exchange {
                    self.loses_place(to, self.tree.child(to.0, to.1)?);
                    let (one, other) = self.tree.exchange(from, to, now_ns)?;
                    self.tree.renamed(one, now_ns);
                    self.tree.renamed(other, now_ns);
                    return Ok(());
                }
                let (moved, replaced) = self.tree.rename(from, to, false, now_ns)?;
                self.tree.renamed(moved, now_ns);
                if let Some(replaced) = replaced {
                    self.loses_name(to.0, to.1, replaced);
                }
                Ok(())
            }
        }
    }

    fn shows(&self, file: FileId, own: Incarnation) -> bool {
        self.node_of(file, own).is_some_and(|node| is_in_sight(&self.tree, node))
    }

    /// Gives the names of `old` to bytes that another node writes or has written. Who has the old ones open keeps them.
    fn give_names(
        &mut self,
        old: NodeId,
        file: FileId,
        attributes: &NodeAttributes,
        home: Incarnation,
        now_ns: i64,
    ) -> Result<NodeId, FsError> {
        // First: what another node says may be refused, and nothing is changed then.
        let xattrs = Xattrs::from_pairs(&attributes.xattrs)?;
        let id = self.tree.number();
        let replaced = self.tree.node_mut(old)?;
        (replaced.overwritten, replaced.forsaken) = (true, true);
        let (uid, gid, ino) = (attributes.uid, attributes.gid, replaced.ino);
        let mut mirror = File::new(file, super::Generation(id), None, now_ns);
        mirror.remote = Some(Box::new(Remote::begun(home, now_ns)));
        let body = Body::File(Box::new(mirror));
        let mut node = Node::new(ino, attributes.mode & FILE_MODE_BITS, uid, gid, now_ns, body);
        node.overwritten = true;
        node.xattrs = xattrs;
        if let Some(xattrs) = &node.xattrs {
            self.tree.touched.xattrs.extend(xattrs.names().map(|name| (id, name)));
        }
        self.tree.insert(id, node);
        self.tree.move_names(old, id);
        self.adopted.insert(file, id);
        self.tree.mark(old);
        self.tree.mark(id);
        self.release_unreachable(old);
        Ok(id)
    }

    /// The same file with other bytes. What was set here of its attributes, and not told yet, stays.
    fn begin_anew(&mut self, old: NodeId, facts: &FileFacts, home: Incarnation) -> Result<NodeId, FsError> {
        let node = self.tree.node(old)?;
        let (here, set_ns, read_ns) = (attributes(node), node.attributes_ns, node.atime_ns);
        let id = self.give_names(old, facts.file, &here, home, facts.opened_ns)?;
        let node = self.tree.node_mut(id)?;
        (node.mtime_ns, node.attributes_ns, node.atime_ns) = (here.mtime_ns, set_ns, read_ns);
        Ok(id)
    }

    /// Takes in how a node stands, as the life `home` says; the coordinator says it of what has no bytes as life 0, and of a file in the name
    /// of its home.
    fn take_state(
        &mut self,
        told: &NodeState,
        home: Incarnation,
        own: Incarnation,
    ) -> Result<NodeId, FsError> {
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
                let known = self.node_of(facts.file, own).filter(|node| self.tree.is_reachable(*node));
                let node = match known {
                    Some(node) => node,
                    None => {
                        self.make_file(&told.path, facts.file, &told.attributes, home, facts.opened_ns)?
                    }
                };
                // Another node may change the mode of a file; what its bytes are only its home says. Of its own this node knows
                // better, unless it had given up the bytes, and then lost the name: what it told of it then is all that it is told now.
                let of_home = facts.file.incarnation == home && (home != own || known.is_none());
                // They are read to the end; whoever opens the name from now on has the others.
                let node = if of_home && self.tree.node(node)?.is_open_with_other_bytes(facts)? {
                    self.begin_anew(node, facts, home)?
                } else {
                    node
                };
                if of_home {
                    self.take_facts(node, facts, home)?;
                }
                if of_home && home == own {
                    self.tree.file_mut(node)?.take_back();
                }
                (node, if of_home { Teller::Home } else { Teller::Other })
            }
        };
        self.take_attributes(node, told, teller)?;
        Ok(node)
    }

    /// A node that another node has at `path`, made where it is missing.
    fn make_mirror(
        &mut self,
        path: &[u8],
        attributes: &NodeAttributes,
        body: Body,
    ) -> Result<NodeId, FsError> {
        let (parents, name) = parts(path)?;
        let entry = entry(path, attributes, AdoptKind::Directory);
        let parent = self.tree.quietly().make_parents(&parents, &entry)?;
        match self.tree.child(parent, name) {
            Ok(there) => match (&self.tree.node(there)?.body, &body) {
                (Body::Directory(_), Body::Directory(_)) => Ok(there),
                (Body::Symlink(one), Body::Symlink(other)) if one == other => Ok(there),
                _ => {
                    self.drop_name(parent, name, attributes.mtime_ns)?;
                    self.tree.quietly().adopt_node(parent, name, &entry, body)
                }
            },
            Err(_) => self.tree.quietly().adopt_node(parent, name, &entry, body),
        }
    }

    /// A file that another node has at `path`. Where the name is another file's, that one is superseded.
    fn make_file(
        &mut self,
        path: &[u8],
        file: FileId,
        attributes: &NodeAttributes,
        home: Incarnation,
        opened_ns: i64,
    ) -> Result<NodeId, FsError> {
        if self.removed.as_ref().is_some_and(|removed| removed.contains(file)) {
            return Err(FsError::NotFound);
        }
        let (parents, name) = parts(path)?;
        let entry = entry(path, attributes, AdoptKind::Directory);
        let parent = self.tree.quietly().make_parents(&parents, &entry)?;
        if let Ok(there) = self.tree.child(parent, name) {
            if self.tree.node(there)?.file().is_ok_and(|found| found.id == file) {
                return Ok(there);
            }
            self.drop_name(parent, name, attributes.mtime_ns)?;
        }
        // A copy of it may be here already, out of sight: then it gets its name.
        if let Some(&known) = self.adopted.get(&file)
            && self.tree.is_reachable(known)
        {
            self.tree.quietly().keeping_times(parent, |tree| tree.link(known, parent, name, opened_ns))?;
            self.tree.mark(known);
            return Ok(known);
        }
        let mut mirror = File::new(file, super::Generation(0), None, opened_ns);
        mirror.remote = Some(Box::new(Remote::begun(home, opened_ns)));
        let id = self.tree.quietly().adopt_node(parent, name, &entry, Body::File(Box::new(mirror)))?;
        self.tree.file_mut(id)?.generation = super::Generation(id);
        self.adopted.insert(file, id);
        self.tree.mark(id);
        Ok(id)
    }

    fn settle_name(
        &mut self,
        (parent, name): (NodeId, &[u8]),
        found: Option<&NodeState>,
        asked_at: u64,
        own: Incarnation,
        now_ns: i64,
    ) -> Result<(), FsError> {
        let here = self.tree.child(parent, name).ok();
        let Some(found) = found else {
            let ours = (parent, name) == (ROOT, HIDDEN);
            if here.is_some_and(|here| !ours && !is_special(&self.tree, here)) {
                self.drop_name(parent, name, now_ns)?;
            }
            return Ok(());
        };
        let home = match &found.kind {
            NodeKind::File(facts) => facts.file.incarnation,
            // Whose it is makes no difference for what has no bytes.
            NodeKind::Directory | NodeKind::Symlink { .. } => Incarnation(0),
        };
        if let (NodeKind::File(facts), Some(here)) = (&found.kind, here)
            && home == own
            && self.tree.node(here)?.file().is_ok_and(|file| file.id == facts.file)
        {
            // Our own: of its bytes we know better.
            self.take_attributes(here, found, Teller::Other)?;
            return self.settle_other_names((parent, name), found, asked_at, now_ns);
        }
        let times = self.tree.quietly().times(parent)?;
        if let NodeKind::File(facts) = &found.kind
            && let Some(known) = self.node_of(facts.file, own).filter(|node| self.tree.is_reachable(*node))
        {
            // It has this name by now, whatever it is called here.
            self.give_name(known, (parent, name), now_ns)?;
        }
        self.take_state(found, home, own)?;
        self.tree.quietly().put_back(parent, times)?;
        self.settle_other_names((parent, name), found, asked_at, now_ns)
    }

    /// Takes a name away with all that is below it. What somebody has open lives on without it; what only this node has is put
    /// aside, since it may have another name by now.
    pub(super) fn drop_name(&mut self, parent: NodeId, name: &[u8], now_ns: i64) -> Result<(), FsError> {
        let top = self.tree.child(parent, name)?;
        loop {
            let (mut at, mut entry) = (top, (parent, name.to_vec()));
            while let Some((name, below)) = first_entry(&self.tree, at) {
                entry = (at, name);
                at = below;
            }
            if self.put_aside(at, (entry.0, &entry.1), now_ns)? {
                if at == top {
                    return Ok(());
                }
                continue;
            }
            let gone = if self.tree.node(at)?.is_directory() {
                self.tree.rmdir(entry.0, &entry.1, now_ns)?
            } else {
                self.tree.unlink(entry.0, &entry.1, now_ns)?
            };
            self.loses_name(entry.0, &entry.1, gone);
            if at == top {
                return Ok(());
            }
        }
    }
}

impl State {
    /// Whether a name stays because of what was made there from the number `since` on. What is below it and older goes then.
    fn drop_before(
        &mut self,
        parent: NodeId,
        name: &[u8],
        since: NodeId,
        now_ns: i64,
    ) -> Result<bool, FsError> {
        let node = self.tree.child(parent, name)?;
        if node >= since {
            return Ok(true);
        }
        if since == NodeId::MAX || !has_since(&self.tree, node, since) {
            return Ok(false);
        }
        let below = self.tree.node(node)?.directory()?.by_name.keys().cloned();
        for name in below.collect::<Vec<_>>() {
            if !self.drop_before(node, &name, since, now_ns)? {
                self.drop_name(node, &name, now_ns)?;
            }
        }
        Ok(true)
    }
}

/// The node that a name means, if that is what is told of.
fn meant(tree: &Tree, parent: NodeId, name: &[u8], what: Option<FileId>) -> Result<NodeId, FsError> {
    let node = tree.child(parent, name)?;
    if tree.node(node)?.file_id() == what { Ok(node) } else { Err(FsError::Stale) }
}

/// A directory is whoever's who made something in it: holders of copies tell of files in directories that their home made.
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

/// Whether an operation of `home` would supersede, move or remove what others made among `nodes`.
fn meets_made(tree: &Tree, operation: &NameOperation, nodes: &Range<NodeId>, home: Incarnation) -> bool {
    let made = |path: &[u8]| tree.resolve(path).is_ok_and(|node| is_made_by_others(tree, node, nodes, home));
    match operation {
        // Two that make one directory have the same.
        NameOperation::Directory { path, .. } => {
            let is_directory = |node| tree.node(node).is_ok_and(Node::is_directory);
            !tree.resolve(path).is_ok_and(is_directory) && made(path)
        }
        NameOperation::Symlink { path, .. } | NameOperation::File { path, .. } => made(path),
        // A file is known by more than its name.
        NameOperation::Removed { path, what } => what.is_none() && made(path),
        NameOperation::Renamed { from, to, what, .. } => made(to) || what.is_none() && made(from),
        // No name gives way to another one of a file, and of a file that was taken since the old one is not there.
        NameOperation::Linked { .. } | NameOperation::Taken { .. } => false,
    }
}

fn has_since(tree: &Tree, node: NodeId, since: NodeId) -> bool {
    let below = |directory: &super::node::Directory| {
        directory.by_cookie.values().any(|entry| has_since(tree, entry.node, since))
    };
    node >= since || tree.node(node).and_then(|found| found.directory()).is_ok_and(below)
}

fn is_special(tree: &Tree, node: NodeId) -> bool {
    tree.node(node).is_ok_and(|node| matches!(node.body, Body::Special(_)))
}

/// The directories of a path, and its last part.
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

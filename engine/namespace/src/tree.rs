//! The tree: which name stands for which node.
//!
//! Owns: entries, links, hard links, renames in constant time, refusal of loops, directory times, paths.
//! Does not own: bytes, handles, the journal's writing. Pure: no lock, no clock, no I/O.
//!
//! Every change is noted in [`Touched`]; the journal turns what was touched into records of the state it then
//! finds, so that replaying a record twice, or after a newer one's twin, changes nothing.

use super::changes::Changes;
use super::file::File;
use super::node::{Body, Directory, Entry, Link, Name, Node};
use super::{FsError, MAX_LINKS, MAX_NAME_BYTES, NodeId, ROOT};
use std::collections::BTreeMap;
use std::sync::Arc;
use tidemark_protocol::id::{FileId, SealNumber};

/// Bytes one file's records take in the journal, with its seal, its object's key and its writers, but not its
/// names: admission counts with it. How its writers ended is left to what admission leaves free: some 45 bytes a process, 720 KiB at most.
const NODE_WEIGHT_BYTES: u64 = 288;
/// Bytes one entry's record takes besides its name.
pub(super) const ENTRY_WEIGHT_BYTES: u64 = 48;

/// Changes that the journal has not collected yet.
#[derive(Debug, Default)]
pub(super) struct Touched {
    pub(super) nodes: Vec<NodeId>,
    pub(super) links: Vec<Link>,
    pub(super) chunks: Vec<NodeId>,
    pub(super) writers: Vec<NodeId>,
    pub(super) xattrs: Vec<(NodeId, Name)>,
    pub(super) freed: Vec<NodeId>,
}

impl Touched {
    pub(super) fn node(&mut self, id: NodeId) {
        if !self.nodes.contains(&id) {
            self.nodes.push(id);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
            && self.links.is_empty()
            && self.chunks.is_empty()
            && self.writers.is_empty()
            && self.xattrs.is_empty()
            && self.freed.is_empty()
    }
}

/// All nodes, and the counter that numbers nodes and generations.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) nodes: BTreeMap<NodeId, Box<Node>>,
    /// The next number to give. Never reused, so that a file's identity never is.
    pub(super) next: u64,
    pub(super) touched: Touched,
    pub(super) changes: Changes,
    /// Estimated bytes that a snapshot of this tree takes in the journal.
    pub(super) weight_bytes: u64,
}

impl Tree {
    /// Creates a tree with an empty root.
    pub(super) fn new(root: Node) -> Self {
        let mut tree = Self {
            nodes: BTreeMap::new(),
            next: ROOT + 1,
            touched: Touched::default(),
            changes: Changes::default(),
            weight_bytes: NODE_WEIGHT_BYTES,
        };
        tree.nodes.insert(ROOT, Box::new(root));
        tree.touched.node(ROOT);
        tree
    }

    pub(super) fn number(&mut self) -> u64 {
        let number = self.next;
        self.next = number.checked_add(1).expect("a counter that grows by one never reaches 2^64");
        number
    }

    pub(super) fn node(&self, id: NodeId) -> Result<&Node, FsError> {
        self.nodes.get(&id).map(|node| &**node).ok_or(FsError::Stale)
    }

    pub(super) fn node_mut(&mut self, id: NodeId) -> Result<&mut Node, FsError> {
        self.nodes.get_mut(&id).map(|node| &mut **node).ok_or(FsError::Stale)
    }

    /// Returns a node that our own structure names.
    fn known(&mut self, id: NodeId) -> &mut Node {
        self.nodes.get_mut(&id).expect("entries name nodes that exist")
    }

    pub(super) fn insert(&mut self, id: NodeId, node: Node) {
        self.weight_bytes += NODE_WEIGHT_BYTES;
        self.nodes.insert(id, Box::new(node));
        self.touched.node(id);
    }

    /// Removes a node without names from the tree.
    pub(super) fn free(&mut self, id: NodeId) -> Option<Box<Node>> {
        let node = self.nodes.remove(&id)?;
        assert!(node.link_count() == 0, "node {id} is freed while it has a name");
        self.weight_bytes -= NODE_WEIGHT_BYTES;
        self.touched.freed.push(id);
        Some(node)
    }

    pub(super) fn entry(&self, parent: NodeId, name: &[u8]) -> Result<(Link, NodeId), FsError> {
        check_length(name)?;
        let directory = self.node(parent)?.directory()?;
        let cookie = *directory.by_name.get(name).ok_or(FsError::NotFound)?;
        Ok((Link { parent, cookie }, directory.by_cookie[&cookie].node))
    }

    pub(super) fn child(&self, parent: NodeId, name: &[u8]) -> Result<NodeId, FsError> {
        self.entry(parent, name).map(|(_, node)| node)
    }

    /// Whether `name` may be made in `parent`: a live directory, a lawful name, not taken.
    pub(super) fn check_free(&self, parent: NodeId, name: &[u8]) -> Result<(), FsError> {
        check_name(name)?;
        match self.entry(parent, name) {
            Ok(_) => Err(FsError::Exists),
            Err(FsError::NotFound) => self.check_alive(parent),
            Err(error) => Err(error),
        }
    }

    /// Refuses a directory that was removed while a process works in it: such a directory takes no new names.
    fn check_alive(&self, directory: NodeId) -> Result<(), FsError> {
        if directory != ROOT && self.node(directory)?.first_link().is_none() {
            return Err(FsError::NotFound);
        }
        Ok(())
    }

    /// Names `node` in `parent`. The name is free: `check_free` said so under the same lock.
    pub(super) fn attach(&mut self, parent: NodeId, name: &[u8], node: NodeId, now_ns: i64) -> Link {
        let name: Name = Arc::from(name);
        self.weight_bytes += ENTRY_WEIGHT_BYTES + name.len() as u64;
        let is_directory = self.known(node).is_directory();
        let directory = self.stamp(parent, now_ns);
        let cookie = directory.next_cookie;
        directory.next_cookie += 1;
        directory.subdirectories += u32::from(is_directory);
        let replaced = directory.by_name.insert(Arc::clone(&name), cookie);
        assert!(replaced.is_none(), "a name is attached once");
        directory.by_cookie.insert(cookie, Entry { name, node });
        let link = Link { parent, cookie };
        self.known(node).add_link(link);
        self.touched.links.push(link);
        self.touched.node(node);
        link
    }

    /// Removes the entry `link` and returns the node it named, which may have no name left.
    pub(super) fn detach(&mut self, link: Link, now_ns: i64) -> NodeId {
        let directory = self.stamp(link.parent, now_ns);
        let entry = directory.by_cookie.remove(&link.cookie).expect("a link names an entry");
        directory.by_name.remove(&entry.name);
        let is_directory = self.known(entry.node).is_directory();
        if is_directory {
            self.known(link.parent).directory_mut().expect("links name directories").subdirectories -= 1;
        }
        self.weight_bytes -= ENTRY_WEIGHT_BYTES + entry.name.len() as u64;
        let node = self.known(entry.node);
        node.remove_link(link);
        node.ctime_ns = now_ns;
        self.touched.links.push(link);
        self.touched.node(entry.node);
        entry.node
    }

    /// Makes the entry `link` name another node; the caller has handled the old one's loss of it.
    fn redirect(&mut self, link: Link, to: NodeId, now_ns: i64) -> NodeId {
        let to_directory = self.known(to).is_directory();
        let directory = self.stamp(link.parent, now_ns);
        let entry = directory.by_cookie.get_mut(&link.cookie).expect("a link names an entry");
        let from = std::mem::replace(&mut entry.node, to);
        directory.subdirectories += u32::from(to_directory);
        if self.known(from).is_directory() {
            self.known(link.parent).directory_mut().expect("links name directories").subdirectories -= 1;
        }
        self.known(from).remove_link(link);
        self.known(to).add_link(link);
        self.known(from).ctime_ns = now_ns;
        self.known(to).ctime_ns = now_ns;
        self.touched.links.push(link);
        self.touched.node(from);
        self.touched.node(to);
        from
    }

    /// Gives all names of `from` to `to` without touching the directories' times: the file is the same to its
    /// users, only its node is new.
    pub(super) fn move_names(&mut self, from: NodeId, to: NodeId) {
        let links: Vec<Link> = self.known(from).links().collect();
        for link in links {
            let directory = self.known(link.parent).directory_mut().expect("links name directories");
            directory.by_cookie.get_mut(&link.cookie).expect("a link names an entry").node = to;
            self.known(from).remove_link(link);
            self.known(to).add_link(link);
            self.touched.links.push(link);
        }
        self.touched.node(from);
        self.touched.node(to);
    }

    fn stamp(&mut self, directory: NodeId, now_ns: i64) -> &mut Directory {
        self.touched.node(directory);
        let node = self.known(directory);
        node.mtime_ns = now_ns;
        node.ctime_ns = now_ns;
        node.directory_mut().expect("entries are made in directories")
    }

    /// Gives `node` another name in `parent`.
    pub(super) fn link(
        &mut self,
        node: NodeId,
        parent: NodeId,
        name: &[u8],
        now_ns: i64,
    ) -> Result<(), FsError> {
        self.check_free(parent, name)?;
        let target = self.node_mut(node)?;
        if target.is_directory() {
            return Err(FsError::NotPermitted);
        }
        if target.link_count() == 0 {
            return Err(FsError::NotFound);
        }
        if target.link_count() >= MAX_LINKS {
            return Err(FsError::NoSpace);
        }
        target.ctime_ns = now_ns;
        self.attach(parent, name, node, now_ns);
        Ok(())
    }

    /// Removes a name of a file or symlink; returns the node.
    pub(super) fn unlink(&mut self, parent: NodeId, name: &[u8], now_ns: i64) -> Result<NodeId, FsError> {
        let (link, node) = self.entry(parent, name)?;
        if self.node(node)?.is_directory() {
            return Err(FsError::IsDirectory);
        }
        Ok(self.detach(link, now_ns))
    }

    /// Removes an empty directory; returns the node.
    pub(super) fn rmdir(&mut self, parent: NodeId, name: &[u8], now_ns: i64) -> Result<NodeId, FsError> {
        let (link, node) = self.entry(parent, name)?;
        if !self.node(node)?.directory()?.by_cookie.is_empty() {
            return Err(FsError::NotEmpty);
        }
        Ok(self.detach(link, now_ns))
    }

    /// Moves a name, over whatever has the new one; returns (moved, replaced). Costs the depth of the new
    /// place, never the size of what moves.
    pub(super) fn rename(
        &mut self,
        from: (NodeId, &[u8]),
        to: (NodeId, &[u8]),
        no_replace: bool,
        now_ns: i64,
    ) -> Result<(NodeId, Option<NodeId>), FsError> {
        check_name(to.1)?;
        let (from_link, moved) = self.entry(from.0, from.1)?;
        let target = match self.entry(to.0, to.1) {
            Ok(found) => Some(found),
            Err(FsError::NotFound) => None,
            Err(error) => return Err(error),
        };
        self.check_alive(to.0)?;
        let moves_directory = self.node(moved)?.is_directory();
        if moves_directory && self.is_below(to.0, moved) {
            return Err(FsError::Invalid);
        }
        let Some((to_link, replaced)) = target else {
            self.detach(from_link, now_ns);
            self.attach(to.0, to.1, moved, now_ns);
            return Ok((moved, None));
        };
        if no_replace {
            return Err(FsError::Exists);
        }
        if replaced == moved {
            return Ok((moved, None)); // Two names of one file: rename(2) does nothing.
        }
        match (moves_directory, &self.node(replaced)?.body) {
            (true, Body::Directory(directory)) if !directory.by_cookie.is_empty() => {
                return Err(FsError::NotEmpty);
            }
            (true, Body::Directory(_)) | (false, Body::File(_) | Body::Symlink(_) | Body::Special(_)) => {}
            (true, _) => return Err(FsError::NotDirectory),
            (false, _) => return Err(FsError::IsDirectory),
        }
        self.detach(from_link, now_ns);
        self.redirect(to_link, moved, now_ns);
        Ok((moved, Some(replaced)))
    }

    /// Swaps what two names stand for; returns both nodes.
    pub(super) fn exchange(
        &mut self,
        one: (NodeId, &[u8]),
        other: (NodeId, &[u8]),
        now_ns: i64,
    ) -> Result<(NodeId, NodeId), FsError> {
        let (one_link, one_node) = self.entry(one.0, one.1)?;
        let (other_link, other_node) = self.entry(other.0, other.1)?;
        if one_node == other_node {
            return Ok((one_node, other_node));
        }
        let one_loops = self.node(one_node)?.is_directory() && self.is_below(other.0, one_node);
        let other_loops = self.node(other_node)?.is_directory() && self.is_below(one.0, other_node);
        if one_loops || other_loops {
            return Err(FsError::Invalid);
        }
        self.redirect(one_link, other_node, now_ns);
        // `other_node` now has both names; redirecting its old one takes exactly that link away again.
        self.redirect(other_link, one_node, now_ns);
        Ok((one_node, other_node))
    }

    /// Whether `node` is `ancestor` or lies below it.
    fn is_below(&self, node: NodeId, ancestor: NodeId) -> bool {
        let mut at = node;
        loop {
            if at == ancestor {
                return true;
            }
            match self.parent(at) {
                Some(parent) => at = parent,
                None => return false,
            }
        }
    }

    /// Returns the directory that names `node` first; none for the root and for a node without a name.
    pub(super) fn parent(&self, node: NodeId) -> Option<NodeId> {
        self.nodes.get(&node)?.first_link().map(|link| link.parent)
    }

    pub(super) fn entry_at(&self, link: Link) -> Option<&Entry> {
        self.nodes.get(&link.parent)?.directory().ok()?.by_cookie.get(&link.cookie)
    }

    /// Returns the path that ends in `link`, relative to the root. None below a removed directory.
    pub(super) fn path(&self, link: Link) -> Option<Vec<u8>> {
        let mut parts: Vec<&[u8]> = Vec::new();
        let mut at = link;
        loop {
            parts.push(&self.entry_at(at)?.name);
            if at.parent == ROOT {
                break;
            }
            at = self.nodes.get(&at.parent)?.first_link()?;
        }
        parts.reverse();
        Some(parts.join(&b'/'))
    }

    /// Returns the target of a symlink.
    pub(super) fn target(&self, node: NodeId) -> Result<Vec<u8>, FsError> {
        match &self.node(node)?.body {
            Body::Symlink(target) => Ok(target.to_vec()),
            Body::File(_) | Body::Directory(_) | Body::Special(_) => Err(FsError::Invalid),
        }
    }

    /// Returns the node at a path relative to the root; the empty path is the root. Symlinks are not followed.
    pub(super) fn resolve(&self, path: &[u8]) -> Result<NodeId, FsError> {
        let mut at = ROOT;
        for part in path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            at = self.child(at, part)?;
        }
        Ok(at)
    }

    /// Asks the node loop to examine a node.
    #[inline]
    pub(super) fn mark(&mut self, node: NodeId) {
        self.changes.mark(node);
    }

    /// Whether a file has a name or an open handle.
    pub(super) fn is_reachable(&self, id: NodeId) -> bool {
        self.node(id).is_ok_and(|node| node.link_count() > 0 || node.file().is_ok_and(|file| file.opens > 0))
    }

    pub(super) fn file_mut(&mut self, id: NodeId) -> Result<&mut File, FsError> {
        self.node_mut(id)?.file_mut()
    }

    /// Whether the node holds these very bytes.
    pub(super) fn holds(&self, node: NodeId, file: FileId, seal: SealNumber) -> bool {
        self.node(node).and_then(|node| node.file()).is_ok_and(|found| {
            found.id == file && found.fate.seal().is_some_and(|found| found.number == seal)
        })
    }

    /// Splits a path into its directory and its name.
    pub(super) fn split<'a>(&self, path: &'a [u8]) -> Result<(NodeId, &'a [u8]), FsError> {
        match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) => Ok((self.resolve(&path[..at])?, &path[at + 1..])),
            None => Ok((ROOT, path)),
        }
    }

    /// Asks the node loop to examine every node.
    pub(super) fn mark_all(&mut self) {
        self.nodes.keys().for_each(|node| self.changes.mark(*node));
    }

    /// Starts collecting changes for the node that keeps this tree elsewhere, first of all everything.
    pub(super) fn collect_unkept(&mut self) {
        self.changes.keep(self.nodes.keys().copied().collect());
    }
}

fn check_length(name: &[u8]) -> Result<(), FsError> {
    if name.len() > MAX_NAME_BYTES { Err(FsError::NameTooLong) } else { Ok(()) }
}

/// Whether a name may be made: 1 to 255 bytes, neither `.` nor `..`, no '/' and no NUL.
fn check_name(name: &[u8]) -> Result<(), FsError> {
    check_length(name)?;
    let unlawful =
        name.is_empty() || name == b"." || name == b".." || name.iter().any(|b| *b == b'/' || *b == 0);
    if unlawful { Err(FsError::Invalid) } else { Ok(()) }
}

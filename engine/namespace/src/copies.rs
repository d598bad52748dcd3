//! Copies of other nodes' files that this node keeps for them: Tier-2.
//!
//! Owns: keeping, finding, sharing and dropping copies, and which homes must be notified when one is gone. Does not own: how their bytes
//! came (`replicate`), whose partner this node is, when copies may give way (the publisher of versions sets that with
//! [`PeerCopies::set_copy_reclaim`]).
//!
//! A copy is a hidden file of the tree with its own identity and a label that names the copied file. The journal, the budget, a takeover,
//! the scrub and the first verification after a restart therefore treat it as any file. Several seals of one file may be kept side by side:
//! the newest is not the better one until its checkpoint is whole.
//!
//! Bytes that are here already are not held twice: a copy and a file of the tree may share one backing file. The copy then holds the file's
//! seal, so that a writer of the file changes bytes of its own (`open`), and the copy stays as it was.

use super::Tree;
use super::attr::rebase;
use super::cold::HostCopies;
use super::file::{File, ObjectCopy, SealHold};
use super::guarded::Guarded;
use super::hidden::HIDDEN;
use super::node::{Body, Node};
use super::reclaim::Candidate;
use super::seal::Seals;
use super::view::NODES_AT_ONCE;
use super::xattr::Xattrs;
use super::{FILE_MODE_BITS, FsError, NodeId, ROOT, ReclaimClass, SealPin, State};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::file::{FileFate, Seal};
use tidemark_protocol::id::{FileId, Generation, Incarnation, SealNumber};
use tidemark_protocol::replication::{self, CopyMeta, GAVE_WAY, SealedCopy};
use tidemark_tier1::Backing;

/// Below [`HIDDEN`], one name for each copy.
const COPIES: &[u8] = b"copies";
/// Attribute that marks a node as a copy, and names the copied file. No program can set it: its name is not one of `user.`.
pub(super) const COPY_XATTR: &[u8] = b"tidemark.copy";

/// Value of [`COPY_XATTR`]. The copied file's attributes are set on the copy's node itself.
#[derive(Debug, Serialize, Deserialize)]
struct Label {
    file: FileId,
    seal: SealNumber,
    meta: CopyMeta,
}

/// A copy that is kept here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyView {
    /// The hidden node.
    pub node: NodeId,
    /// The copy's own identity, for verification of its bytes; the copied file has another.
    pub own: FileId,
    pub file: FileId,
    pub sealed: Seal,
    pub meta: CopyMeta,
    /// Whether the bytes were found bad, or were not verified since this daemon started.
    pub unverified: bool,
    pub object: Option<ObjectCopy>,
    pub reclaim: ReclaimClass,
}

/// A copy that no longer exists: its home must be notified before it counts on the copy again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WithdrawnCopy {
    pub file: FileId,
    pub seal: SealNumber,
    pub home: String,
    pub why: &'static str,
}

/// How much of Tier-1 is peer copies: a part of `Usage::files_bytes`, not in addition to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopiesUsage {
    pub files: u64,
    /// Bytes that only copies hold.
    pub bytes: u64,
    /// Bytes that are also held by a file of the tree or a reader, or by several copies.
    pub shared_bytes: u64,
}

/// A file's present bytes.
#[derive(Debug, Clone)]
pub struct Present {
    pub file: FileId,
    pub backing: Arc<Backing>,
}

/// Index and pending notices of the copies, besides their nodes.
#[derive(Debug, Default)]
pub(super) struct Copies {
    by_seal: BTreeMap<(FileId, SealNumber), NodeId>,
    kept: BTreeMap<NodeId, KeptCopy>,
    /// Withdrawn copies whose homes were not notified yet; never more than there were copies.
    withdrawn: Vec<WithdrawnCopy>,
    /// Copies that came or went since the coordinator was last notified; no more than there were in all.
    changed: BTreeSet<(FileId, SealNumber)>,
}

#[derive(Debug)]
struct KeptCopy {
    file: FileId,
    seal: SealNumber,
    meta: CopyMeta,
    /// Seal holds of the tree's files with the same backing file: those files copy their bytes before they change.
    sharing: Vec<Arc<SealHold>>,
}

/// Copies of other nodes' files that this node keeps.
#[derive(Debug, Clone, Copy)]
pub struct PeerCopies<'a> {
    pub(super) state: &'a Guarded,
    pub(super) seals: Seals<'a>,
    pub(super) hosts: HostCopies<'a>,
}

impl PeerCopies<'_> {
    /// Keeps verified bytes as a copy, unless this node has that copy already. A COLD file of the tree with the same seal becomes HOT with
    /// them. Costs one group of records.
    ///
    /// # Errors
    /// [`FsError::Invalid`] when the numbers do not agree, [`FsError::NoSpace`] when the journal is full.
    pub fn keep_copy(&self, copy: &SealedCopy, backing: Arc<Backing>) -> Result<NodeId, FsError> {
        if !copy.is_lawful() || backing.stat()?.size_bytes != copy.size_bytes {
            return Err(FsError::Invalid);
        }
        if let Err(error) = backing.trim() {
            tracing::debug!(file = %copy.file, %error, "the space beyond a copy's end stays with it");
        }
        self.keep_as(copy, |_| Ok((backing, Vec::new())))
    }

    /// Keeps as a copy the bytes of another sealed file here, which were found to be the same.
    ///
    /// # Errors
    /// [`FsError::Stale`] when that file has other bytes by now; else as [`PeerCopies::keep_copy`].
    pub fn keep_copy_of(&self, copy: &SealedCopy, alike: (FileId, SealNumber)) -> Result<NodeId, FsError> {
        if !copy.is_lawful() {
            return Err(FsError::Invalid);
        }
        let own = self.state.incarnation;
        self.keep_as(copy, |state| {
            let node = state.sealed_node(alike, own).ok_or(FsError::Stale)?;
            let file = state.tree.file_mut(node)?;
            let sealed =
                file.fate.seal().filter(|seal| seal.crc == copy.crc && seal.size_bytes == copy.size_bytes);
            let backing =
                file.backing.clone().filter(|_| sealed.is_some() && !file.busy).ok_or(FsError::Stale)?;
            let hold = file.hold();
            // A copy may share another copy's bytes: the hold on the tree's file must outlive both.
            let mut sharing: Vec<_> =
                state.copies.kept.get(&node).map_or_else(Vec::new, |kept| kept.sharing.clone());
            sharing.push(hold);
            Ok((backing, sharing))
        })
    }

    fn keep_as(
        &self,
        copy: &SealedCopy,
        bytes: impl FnOnce(&mut State) -> Result<(Arc<Backing>, Vec<Arc<SealHold>>), FsError>,
    ) -> Result<NodeId, FsError> {
        let label = Label {
            file: copy.file,
            seal: copy.seal,
            meta: CopyMeta { xattrs: Vec::new(), ..copy.meta.clone() },
        };
        let label_bytes = replication::encode(&label).map_err(|_| FsError::TooBig)?;
        let xattrs = Xattrs::from_pairs(&copy.meta.xattrs)?;
        let (limit, now_ns) = (self.state.weight_limit(), self.state.now_ns());
        self.state.change(|state| {
            if let Some(known) = state.copies.by_seal.get(&(copy.file, copy.seal)) {
                return Ok(*known);
            }
            if state.tree.weight_bytes + label_bytes.len() as u64 >= limit {
                return Err(FsError::NoSpace);
            }
            let (backing, sharing) = bytes(state)?;
            let parent = state.tree.quietly().make_hidden(&[HIDDEN, COPIES].join(&b'/'), now_ns)?;
            let name = format!("{}.{}", copy.file, copy.seal).into_bytes();
            state.tree.check_free(parent, &name)?;
            let (id, meta) = (state.tree.number(), &copy.meta);
            let mut file = File::new(self.state.file_id(id), Generation(id), Some(backing), now_ns);
            file.size_bytes = copy.size_bytes;
            file.fate = FileFate::found(Some(copy.sealed()), copy.seal, false, false, false);
            let body = Body::File(Box::new(file));
            let mut node = Node::new(id, meta.mode & FILE_MODE_BITS, meta.uid, meta.gid, meta.mtime_ns, body);
            let mut xattrs = xattrs.unwrap_or_default();
            xattrs.values.insert(Arc::from(COPY_XATTR), label_bytes.into());
            let names: Vec<_> = xattrs.names().map(|name| (id, name)).collect();
            node.xattrs = Some(xattrs);
            rebase(&mut node, copy.size_bytes)?;
            state.tree.insert(id, node);
            state.tree.quietly().keeping_times(parent, |tree| {
                tree.attach(parent, &name, id, now_ns);
                Ok(())
            })?;
            state.tree.touched.chunks.push(id);
            state.tree.touched.xattrs.extend(names);
            state.copies.by_seal.insert((copy.file, copy.seal), id);
            state.copies.changed.insert((copy.file, copy.seal));
            let kept = KeptCopy { file: copy.file, seal: copy.seal, meta: copy.meta.clone(), sharing };
            state.copies.kept.insert(id, kept);
            state.warm_by_copy(id, self.state.incarnation);
            state.tree.mark(id);
            Ok(id)
        })
    }

    /// Returns the hidden node of the copy of this seal.
    #[must_use]
    pub fn copy_of(&self, file: FileId, seal: SealNumber) -> Option<NodeId> {
        self.state.look(|state| state.copies.node(file, seal))
    }

    /// Returns the copy of this seal with its facts.
    #[must_use]
    pub fn copy(&self, file: FileId, seal: SealNumber) -> Option<CopyView> {
        self.state.look(|state| state.copies.view(&state.tree, state.copies.node(file, seal)?))
    }

    /// Returns the copy at a hidden node.
    #[must_use]
    pub fn copy_at(&self, node: NodeId) -> Option<CopyView> {
        self.state.look(|state| state.copies.view(&state.tree, node))
    }

    /// Returns all copies in slices of the lock, ordered by the copied file.
    #[must_use]
    pub fn all(&self) -> Vec<CopyView> {
        let nodes: Vec<NodeId> = self.state.look(|state| state.copies.by_seal.values().copied().collect());
        let views = |nodes: &[NodeId]| -> Vec<CopyView> {
            self.state
                .look(|state| nodes.iter().filter_map(|node| state.copies.view(&state.tree, *node)).collect())
        };
        nodes.chunks(NODES_AT_ONCE).flat_map(views).collect()
    }

    /// Returns how much memory the copies take. Costs one look at each.
    #[must_use]
    pub fn copies_usage(&self) -> CopiesUsage {
        self.state.look(|state| {
            let mut usage = CopiesUsage::default();
            for node in state.copies.kept.keys() {
                let Ok(file) = state.tree.node(*node).and_then(|node| node.file()) else { continue };
                let Some(backing) = &file.backing else { continue };
                usage.files += 1;
                let bytes =
                    if Arc::strong_count(backing) == 1 { &mut usage.bytes } else { &mut usage.shared_bytes };
                *bytes += backing.held_bytes();
            }
            usage
        })
    }

    /// Pins a copy's bytes for reading, until the pin is dropped.
    #[must_use]
    pub fn pin_copy(&self, file: FileId, seal: SealNumber) -> Option<SealPin> {
        let own =
            self.state.look(|state| state.copies.view(&state.tree, state.copies.node(file, seal)?))?.own;
        self.seals.pin_seal(own, seal)
    }

    /// Drops a copy at its home's request, so that no notice is due. Returns false when there is none.
    pub fn drop_copy(&self, file: FileId, seal: SealNumber) -> bool {
        let dropped = self.state.change(|state| {
            let Some(node) = state.copies.node(file, seal) else { return Ok(false) };
            state.forget_copy(node);
            Ok(true)
        });
        dropped.unwrap_or_else(|error| {
            tracing::error!(%file, %seal, %error, "the journal still names a copy that is gone");
            true
        })
    }

    /// Drops a copy that cannot be kept, and queues a notice to its home with the reason.
    pub fn lose_copy(&self, file: FileId, seal: SealNumber, why: &'static str) {
        let lost = self.state.change(|state| {
            if let Some(node) = state.copies.node(file, seal) {
                state.withdraw_copy(node, why);
            }
            Ok(())
        });
        if let Err(error) = lost {
            tracing::error!(%file, %seal, %error, "the journal still names a copy that is gone");
        }
    }

    /// Takes the copies that are gone without their home's request, each once.
    #[must_use]
    pub fn take_withdrawn_copies(&self) -> Vec<WithdrawnCopy> {
        self.state.look(|state| std::mem::take(&mut state.copies.withdrawn))
    }

    /// Takes the copies that came or went since the last call.
    #[must_use]
    pub fn take_changed_copies(&self) -> BTreeSet<(FileId, SealNumber)> {
        self.state.look(|state| std::mem::take(&mut state.copies.changed))
    }

    /// Queues withdrawn copies again whose homes could not be notified.
    pub fn give_back_withdrawn(&self, withdrawn: Vec<WithdrawnCopy>) {
        self.state.look(|state| state.copies.withdrawn.extend(withdrawn));
    }

    /// Sets when a copy may give way. Initially, its class is [`ReclaimClass::Never`]: it then stays, as it does while no object copy of it
    /// is noted.
    pub fn set_copy_reclaim(&self, file: FileId, seal: SealNumber, class: ReclaimClass) {
        if let Some(copy) = self.copy(file, seal) {
            self.hosts.set_reclaim(copy.own, class);
        }
    }

    /// Notes that Tier-3 has a copy's bytes. Returns false when there is no such copy.
    pub fn note_copy_object(&self, file: FileId, seal: SealNumber, object: ObjectCopy) -> bool {
        self.copy(file, seal).is_some_and(|copy| self.hosts.note_object(copy.own, seal, object))
    }

    /// Finds another sealed file here, or a copy, of this size and checksum; never `not` itself. Costs a pass over all nodes, in slices of
    /// the lock.
    #[must_use]
    pub fn sealed_alike(&self, not: FileId, size_bytes: u64, crc: Crc64) -> Option<(FileId, SealNumber)> {
        let mut after: NodeId = ROOT;
        loop {
            let (found, last) = self.state.look(|state| {
                let mut last = None;
                let range = (std::ops::Bound::Excluded(after), std::ops::Bound::Unbounded);
                for (id, node) in state.tree.nodes.range(range).take(NODES_AT_ONCE) {
                    last = Some(*id);
                    let Body::File(file) = &node.body else { continue };
                    let alike = |seal: &&Seal| seal.size_bytes == size_bytes && seal.crc == crc;
                    let here = file.backing.is_some() && !file.unverified && !file.busy && file.id != not;
                    if let Some(seal) = file.fate.seal().filter(alike).filter(|_| here) {
                        return (Some((file.id, seal.number)), last);
                    }
                }
                (None, last)
            });
            match (found, last) {
                (Some(found), _) => return Some(found),
                (None, Some(last)) => after = last,
                (None, None) => return None,
            }
        }
    }

    /// Gives a COLD file the bytes of the copy of its seal, if there is one that was verified. The two share one backing file.
    pub fn warm_from_copy(&self, file: FileId, seal: SealNumber) -> bool {
        let warmed = self.state.change(|state| {
            let Some(copy) = state.copies.node(file, seal) else { return Ok(false) };
            Ok(state.warm_by_copy(copy, self.state.incarnation))
        });
        warmed.unwrap_or(false)
    }
}

impl Copies {
    fn node(&self, file: FileId, seal: SealNumber) -> Option<NodeId> {
        self.by_seal.get(&(file, seal)).copied()
    }

    /// Returns the copy at a hidden node.
    fn view(&self, tree: &Tree, id: NodeId) -> Option<CopyView> {
        let kept = self.kept.get(&id)?;
        let file = tree.node(id).ok()?.file().ok()?;
        let seal = file.fate.last_seal();
        Some(CopyView {
            node: id,
            own: file.id,
            file: kept.file,
            sealed: file.fate.seal()?.clone(),
            meta: kept.meta.clone(),
            unverified: file.unverified,
            object: file.object.as_ref().filter(|noted| noted.0 == seal).map(|noted| noted.1.clone()),
            reclaim: file.class,
        })
    }
}

impl State {
    /// Drops all copies of a file.
    pub(super) fn forget_copies_of(&mut self, file: FileId) {
        let all = (file, SealNumber(0))..=(file, SealNumber(u64::MAX));
        let nodes: Vec<_> = self.copies.by_seal.range(all).map(|(_, node)| *node).collect();
        for node in nodes {
            self.forget_copy(node);
        }
    }

    /// Recovers the copies that the journal lists. Withdraws the copies whose bytes are lost.
    pub(super) fn find_copies(&mut self) {
        let mut sharers: BTreeMap<u64, Vec<NodeId>> = BTreeMap::new();
        let mut labels = Vec::new();
        for (id, node) in &self.tree.nodes {
            let Body::File(file) = &node.body else { continue };
            let Some(value) = node.xattrs.as_ref().and_then(|xattrs| xattrs.values.get(COPY_XATTR)) else {
                if let Some(backing) = &file.backing {
                    sharers.entry(backing.number()).or_default().push(*id);
                }
                continue;
            };
            let label: Result<Label, _> = replication::decode(value);
            match label {
                Ok(label) => labels.push((*id, label)),
                Err(error) => {
                    tracing::error!(node = id, %error, "the journal tells of a copy of nobody knows what")
                }
            }
        }
        for (id, Label { file, seal, mut meta }) in labels {
            let Ok(node) = self.tree.node(id) else { continue };
            let pairs = node.xattrs.as_ref().map_or_else(Vec::new, |xattrs| xattrs.pairs());
            meta.xattrs = pairs.into_iter().filter(|(name, _)| name != COPY_XATTR).collect();
            let Ok(found) = node.file() else { continue };
            let here = found.backing.as_ref().map(|backing| backing.number());
            let is_sealed = found.fate.seal().is_some_and(|sealed| sealed.number == seal);
            let mut sharing = Vec::new();
            for other in here.and_then(|number| sharers.get(&number)).into_iter().flatten() {
                sharing.extend(self.tree.file_mut(*other).map(File::hold));
            }
            self.copies.by_seal.insert((file, seal), id);
            self.copies.kept.insert(id, KeptCopy { file, seal, meta, sharing });
            if here.is_none() || !is_sealed {
                self.withdraw_copy(id, "its bytes were lost with the memory they lay in");
            }
        }
    }

    /// Returns the node with these sealed bytes: a file of the tree, or a copy by its own identity.
    fn sealed_node(&self, (file, seal): (FileId, SealNumber), own: Incarnation) -> Option<NodeId> {
        self.node_of(file, own).filter(|node| self.tree.holds(*node, file, seal))
    }

    /// Gives a copy's bytes to the COLD file that it copies.
    fn warm_by_copy(&mut self, copy: NodeId, own: Incarnation) -> bool {
        let Some(kept) = self.copies.kept.get(&copy) else { return false };
        let (id, seal) = (kept.file, kept.seal);
        let Ok(lying) = self.tree.node(copy).and_then(|node| node.file()) else { return false };
        let Some(backing) = lying.backing.clone().filter(|_| !lying.unverified && !lying.busy) else {
            return false;
        };
        let Some(node) = self.node_of(id, own) else { return false };
        let Ok(file) = self.tree.file_mut(node) else { return false };
        let same = file.fate.seal().is_some_and(|found| found.number == seal);
        if file.backing.is_some() || file.busy || !same {
            return false;
        }
        let size_bytes = file.size_bytes;
        file.backing = Some(backing);
        file.unverified = false;
        let (hold, key) = (file.hold(), Candidate::of(node, file));
        if let Ok(node) = self.tree.node_mut(node)
            && let Err(error) = rebase(node, size_bytes)
        {
            tracing::warn!(%error, file = %id, "times of a file that was here as a copy may be off");
        }
        self.reclaimable.add(key);
        self.copies.kept.entry(copy).and_modify(|kept| kept.sharing.push(hold));
        self.tree.touched.node(node);
        self.tree.mark(node);
        self.waiters.woken = true;
        true
    }

    /// Removes a copy and queues a notice to its home. Returns the copied file; none if the node is no copy.
    pub(super) fn withdraw_copy(&mut self, node: NodeId, why: &'static str) -> Option<FileId> {
        let KeptCopy { file, seal, meta, .. } = self.forget_copy(node)?;
        if why == GAVE_WAY {
            tracing::debug!(%file, %seal, home = %meta.home, why, "a peer copy is no more");
        } else {
            tracing::warn!(%file, %seal, home = %meta.home, why, "a peer copy is no more");
        }
        self.copies.withdrawn.push(WithdrawnCopy { file, seal, home: meta.home, why });
        Some(file)
    }

    fn forget_copy(&mut self, node: NodeId) -> Option<KeptCopy> {
        let kept = self.copies.kept.remove(&node)?;
        self.copies.by_seal.remove(&(kept.file, kept.seal));
        self.copies.changed.insert((kept.file, kept.seal));
        let links: Vec<_> = self.tree.node(node).map_or_else(|_| Vec::new(), |node| node.links().collect());
        for link in links {
            let now_ns = self.tree.node(link.parent).map_or(0, |parent| parent.mtime_ns);
            self.tree.detach(link, now_ns);
        }
        self.tree.mark(node);
        self.forsake(node);
        Some(kept)
    }
}

//! COLD files: known by name and checksums, their bytes elsewhere.
//!
//! Owns: what an open needs in order to fetch, accepting fetched bytes, adopting a tree at start. Does not own:
//! fetching and verifying (the restore flow).

use super::attr::{Special, rebase};
use super::carried::Adoption;
use super::file::{File, ObjectCopy};
use super::guarded::Guarded;
use super::handle::OpenFile;
use super::hidden::is_out_of_sight;
use super::node::Body;
use super::open::OpenOutcome;
use super::reclaim::Candidate;
use super::xattr::Xattrs;
use super::{Caller, FsError, MAX_TARGET_BYTES, Namespace, NodeId, ROOT, State};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::file::{FileFate, Seal};
use tidemark_protocol::id::{FileCounter, FileId, Generation, Incarnation, SealNumber};
use tidemark_tier1::Backing;

/// How long fetched bytes are kept for the open that asked for them.
const RESTORE_HOLD: Duration = Duration::from_secs(10);

/// Facts needed to fetch a file's bytes before it can be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColdFile {
    pub node: NodeId,
    pub file: FileId,
    pub seal: SealNumber,
    pub size_bytes: u64,
    /// Checksums of the whole and of each chunk; none when the file's bytes were lost before it was sealed.
    pub checksums: Option<(Crc64, Arc<[Crc64]>)>,
    pub object: Option<ObjectCopy>,
}

impl ColdFile {
    pub(super) fn of(node: NodeId, file: &File) -> Self {
        let seal = file.fate.last_seal();
        let object = file.object.as_ref().filter(|noted| noted.0 == seal).map(|noted| noted.1.clone());
        Self {
            node,
            file: file.id,
            seal,
            size_bytes: file.size_bytes,
            checksums: file.fate.seal().map(|seal| (seal.crc, Arc::clone(&seal.chunks))),
            object,
        }
    }
}

/// An entry of a restored tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdoptEntry {
    /// Path relative to the mount; empty for a directory that is the root. Missing directories above it are made.
    pub path: Vec<u8>,
    pub kind: AdoptKind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime_ns: i64,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Kind of an adopted entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdoptKind {
    File {
        file: FileId,
        seal: SealNumber,
        size_bytes: u64,
        crc: Crc64,
        chunks: Arc<[Crc64]>,
        object: Option<ObjectCopy>,
    },
    Directory,
    Symlink {
        target: Vec<u8>,
    },
    Special(Special),
    /// Another name of the entry at `to`, which was adopted before; the other fields are ignored.
    HardLink {
        to: Vec<u8>,
        /// Identity of the file at `to` when names are carried over, because `to` may be another file by now.
        file: Option<FileId>,
    },
}

impl AdoptKind {
    pub fn file(&self) -> Option<FileId> {
        match self {
            Self::File { file, .. } => Some(*file),
            Self::HardLink { file, .. } => *file,
            Self::Directory | Self::Symlink { .. } | Self::Special(_) => None,
        }
    }
}

/// Files' bytes in this node's memory, and whether Tier-3 has them.
#[derive(Debug, Clone, Copy)]
pub struct HostCopies<'a> {
    pub(super) state: &'a Guarded,
}

impl HostCopies<'_> {
    /// Returns the facts needed to fetch `node` before it can be opened or resized; none when its bytes are here.
    pub fn cold(&self, node: NodeId) -> Option<ColdFile> {
        self.state.look(|state| {
            let file = state.tree.node(node).ok()?.file().ok()?;
            file.backing.is_none().then(|| ColdFile::of(node, file))
        })
    }

    /// Returns the same facts by the file's identity.
    pub fn cold_file(&self, file: FileId) -> Option<ColdFile> {
        let node = self.state.look(|state| state.node_of(file, self.state.incarnation))?;
        self.cold(node)
    }

    /// Accepts verified bytes: the COLD file becomes HOT. If its bytes are here already, nothing happens.
    ///
    /// # Errors
    /// [`FsError::Stale`] when the file is gone or has other bytes by now; [`FsError::Invalid`] for another size.
    pub fn finish_restore(
        &self,
        node: NodeId,
        file: FileId,
        seal: SealNumber,
        backing: Arc<Backing>,
    ) -> Result<(), FsError> {
        let size_bytes = backing.stat()?.size_bytes;
        self.state.change(|state| {
            let target = state.tree.file_mut(node)?.at(file, seal)?;
            if target.busy {
                return Err(FsError::Stale);
            }
            if target.backing.is_some() {
                return Ok(());
            }
            if target.size_bytes != size_bytes {
                return Err(FsError::Invalid);
            }
            target.backing = Some(backing);
            target.unverified = false;
            target.kept_until = Some(Instant::now() + RESTORE_HOLD);
            let key = Candidate::of(node, target);
            rebase(state.tree.node_mut(node)?, size_bytes)?;
            state.reclaimable.add(key);
            state.tree.touched.node(node);
            state.tree.mark(node);
            state.waiters.woken = true;
            Ok(())
        })
    }

    /// Marks a host copy that was found bad, by the number of its backing file, so that each open verifies it first. The mark stays until
    /// the copy is replaced or dropped. All other files and copies in the same backing file are marked, too. Open handles keep their bytes.
    /// Returns false if the file has other bytes by now, of which nothing is known. Costs a pass over all nodes, in slices of the lock.
    pub fn doubt_host(&self, node: NodeId, file: FileId, seal: SealNumber, number: u64) -> bool {
        // Marks this file at once, before its slice comes.
        let doubted = self.state.look(|state| {
            let found = state.tree.file_mut(node).and_then(|found| found.at(file, seal));
            let Ok(target) = found else { return false };
            let is_doubted = target.fate.seal().is_some() && target.lies_in(number);
            target.unverified |= is_doubted;
            is_doubted
        });
        self.state.for_each_node(|state, id| {
            if let Ok(file) = state.tree.file_mut(id) {
                file.unverified |= file.lies_in(number) && file.fate.seal().is_some();
            }
        });
        doubted
    }

    /// Replaces a host copy that a scrub found bad with a good one of the same seal.
    ///
    /// # Errors
    /// [`FsError::Busy`] while a handle is open; [`FsError::Stale`], [`FsError::Invalid`] as [`HostCopies::finish_restore`].
    pub fn replace_bad_host(
        &self,
        node: NodeId,
        file: FileId,
        seal: SealNumber,
        backing: Arc<Backing>,
    ) -> Result<(), FsError> {
        let size_bytes = backing.stat()?.size_bytes;
        self.state.change(|state| {
            let target = state.tree.file_mut(node)?.idle_at(file, seal)?;
            if target.size_bytes != size_bytes {
                return Err(FsError::Invalid);
            }
            let bad = target.backing.replace(backing);
            target.unverified = false;
            state.trash.extend(bad);
            rebase(state.tree.node_mut(node)?, size_bytes)?;
            state.tree.touched.node(node);
            state.tree.mark(node);
            Ok(())
        })
    }

    /// Drops a host copy that is in doubt. From now on an open tries the other copies, and fails if none is left. Open handles keep their
    /// bytes.
    ///
    /// # Errors
    /// [`FsError::Busy`] while a handle is open; [`FsError::Stale`] when the file has another seal by now, or was given good bytes.
    pub fn lose_host(&self, node: NodeId, file: FileId, seal: SealNumber) -> Result<(), FsError> {
        self.state.change(|state| {
            let target = state.tree.file_mut(node)?.idle_at(file, seal)?;
            if !target.unverified {
                return Err(FsError::Stale);
            }
            let key = Candidate::of(node, target);
            let bad = target.backing.take();
            target.unverified = false;
            state.reclaimable.remove(&key);
            state.trash.extend(bad);
            state.tree.touched.node(node);
            state.tree.mark(node);
            state.withdraw_copy(node, "it was found bad, and there was no other to replace it with");
            Ok(())
        })
    }

    /// Makes a file's bytes here give way last for `hold`, and to no prefetch, because a process is about to open it.
    pub fn hold_prefetched(&self, node: NodeId, hold: Duration) {
        self.state.look(|state| {
            if let Ok(file) = state.tree.file_mut(node)
                && file.backing.is_some()
            {
                file.prefetched_until = Some(Instant::now() + hold);
            }
        });
    }
}

impl Namespace {
    /// Opens a file whose bytes were just fetched.
    ///
    /// # Errors
    /// As [`Namespace::open`]; [`FsError::Io`] when the bytes are not here after all.
    pub fn finish_cold_open(&self, caller: &Caller, node: NodeId, flags: i32) -> Result<OpenFile, FsError> {
        match self.open(caller, node, flags)? {
            OpenOutcome::Ready(open) => Ok(open),
            OpenOutcome::Cold(cold) => {
                tracing::error!(node, file = %cold.file, seal = %cold.seal, "opened before its bytes were restored");
                Err(FsError::Io)
            }
            OpenOutcome::Unverified => Err(FsError::Io),
        }
    }
}

impl Adoption<'_> {
    /// Makes one entry of a restored tree; files are COLD. The directories above keep their times. If a file with the entry's identity has
    /// a name already but other bytes, it keeps both; the entry gets an identity of its own, so that no name is lost.
    ///
    /// # Errors
    /// [`FsError::Exists`] (not for a directory on a directory, which takes the attributes), [`FsError::Invalid`] for
    /// an unlawful path or a wrong number of chunk checksums, [`FsError::NotFound`] for a hard link to nothing.
    pub fn adopt(&self, entry: &AdoptEntry) -> Result<NodeId, FsError> {
        let xattrs = Xattrs::from_pairs(&entry.xattrs)?;
        let limit = self.state.weight_limit();
        self.state.change(|state| state.adopt(entry, xattrs, limit, self.state.incarnation))
    }

    /// Makes the entry under all names that it was given since its document was written ([`Adoption::carry_names`]). Returns each name's
    /// result.
    ///
    /// # Errors
    /// The journal's errors, and those of the extended attributes.
    pub fn adopt_carried(&self, entry: &AdoptEntry) -> Result<Vec<Result<NodeId, FsError>>, FsError> {
        let xattrs = Xattrs::from_pairs(&entry.xattrs)?;
        let limit = self.state.weight_limit();
        self.state.change(|state| {
            let names = state.outgoing.carried.names(&entry.path, entry.kind.file()).into_iter();
            let entries = names.map(|path| AdoptEntry { path, ..entry.clone() });
            Ok(entries
                .map(|entry| state.adopt(&entry, xattrs.clone(), limit, self.state.incarnation))
                .collect())
        })
    }
}

impl File {
    /// Returns the file itself if it has this identity and this last seal.
    fn at(&mut self, file: FileId, seal: SealNumber) -> Result<&mut Self, FsError> {
        if self.id != file || self.fate.last_seal() != seal { Err(FsError::Stale) } else { Ok(self) }
    }

    /// Returns the same while the file is sealed and unused, so that its host copy may be exchanged.
    fn idle_at(&mut self, file: FileId, seal: SealNumber) -> Result<&mut Self, FsError> {
        let found = self.at(file, seal)?;
        match (found.fate.seal(), found.opens > 0 || found.busy) {
            (None, _) => Err(FsError::Stale),
            (Some(_), true) => Err(FsError::Busy),
            (Some(_), false) => Ok(found),
        }
    }
}

impl State {
    fn adopt(
        &mut self,
        entry: &AdoptEntry,
        xattrs: Option<Box<Xattrs>>,
        limit: u64,
        own: Incarnation,
    ) -> Result<NodeId, FsError> {
        if self.tree.weight_bytes >= limit {
            return Err(FsError::NoSpace);
        }
        let mut parts: Vec<&[u8]> = entry.path.split(|byte| *byte == b'/').collect();
        let is_root = entry.path.is_empty() && matches!(entry.kind, AdoptKind::Directory);
        let name = parts.pop().filter(|name| !name.is_empty() || is_root).ok_or(FsError::Invalid)?;
        let id = match entry.kind {
            AdoptKind::Directory if is_root => ROOT,
            AdoptKind::HardLink { ref to, file } => {
                let node = match file {
                    None => self.tree.resolve(to)?,
                    Some(file) => self
                        .node_of(file, own)
                        .filter(|node| self.tree.is_reachable(*node))
                        .ok_or(FsError::NotFound)?,
                };
                let parent = self.tree.quietly().make_parents_of_link(node, &parts, entry)?;
                return self.tree.quietly().adopt_link(node, parent, name);
            }
            AdoptKind::Directory => {
                let parent = self.tree.quietly().make_parents(&parts, entry)?;
                match self.tree.child(parent, name) {
                    Ok(existing) if self.tree.node(existing)?.is_directory() => existing,
                    Ok(_) => return Err(FsError::Exists),
                    Err(_) => {
                        let body = Body::Directory(Box::default());
                        self.tree.quietly().adopt_node(parent, name, entry, body)?
                    }
                }
            }
            AdoptKind::Symlink { ref target } => {
                if target.is_empty() || target.len() > MAX_TARGET_BYTES {
                    return Err(FsError::NameTooLong);
                }
                let parent = self.tree.quietly().make_parents(&parts, entry)?;
                self.tree.quietly().adopt_node(
                    parent,
                    name,
                    entry,
                    Body::Symlink(target.as_slice().into()),
                )?
            }
            AdoptKind::Special(special) => {
                let parent = self.tree.quietly().make_parents(&parts, entry)?;
                self.tree.quietly().adopt_node(parent, name, entry, Body::Special(special))?
            }
            AdoptKind::File { file, seal, size_bytes, crc, ref chunks, ref object } => {
                if chunks.len() as u64 != tidemark_protocol::layout::chunk_count(size_bytes)
                    || i64::try_from(size_bytes).is_err()
                {
                    return Err(FsError::Invalid);
                }
                // A removed file may still wait for the kernel to forget it; no name leads to it.
                let known = self.node_of(file, own);
                let mut taken = false;
                if let Some(known) = known.filter(|known| self.tree.is_reachable(*known)) {
                    // Hard links of one file in two checkpoints: each lists one of its names.
                    if self.tree.holds(known, file, seal) {
                        let parent = self.tree.quietly().make_parents(&parts, entry)?;
                        return self.tree.quietly().adopt_link(known, parent, name);
                    }
                    // If it was saved over, torn and hidden, it makes way.
                    if is_out_of_sight(&self.tree, known) {
                        self.renew(known, own, entry.mtime_ns)?;
                    } else if self.outgoing.is_collected() || self.removed.is_some() {
                        // Other nodes know it by its identity.
                        return Err(FsError::Exists);
                    } else {
                        taken = true;
                    }
                }
                let mut adopted = File::new(file, Generation(0), None, entry.mtime_ns);
                adopted.size_bytes = size_bytes;
                let frozen = Seal { number: seal, size_bytes, crc, chunks: Arc::clone(chunks) };
                adopted.fate = FileFate::found(Some(frozen), seal, false, false, false);
                adopted.object = object.clone().map(|object| Box::new((seal, object)));
                let parent = self.tree.quietly().make_parents(&parts, entry)?;
                let id =
                    self.tree.quietly().adopt_node(parent, name, entry, Body::File(Box::new(adopted)))?;
                let made = self.tree.file_mut(id)?;
                made.generation = Generation(id);
                if taken {
                    made.id = FileId { incarnation: own, counter: FileCounter(id) };
                } else {
                    self.identities.adopt(file, id);
                }
                self.tree.touched.chunks.push(id);
                id
            }
        };
        let node = self.tree.node_mut(id)?;
        node.mode = entry.mode & node.body.mode_bits();
        node.uid = entry.uid;
        node.gid = entry.gid;
        node.mtime_ns = entry.mtime_ns;
        node.ctime_ns = entry.mtime_ns;
        // The directory may have had other attributes.
        let names = node.xattrs.iter().chain(&xattrs).flat_map(|xattrs| xattrs.names());
        let names: Vec<_> = names.map(|name| (id, name)).collect();
        node.xattrs.clone_from(&xattrs);
        self.tree.touched.xattrs.extend(names);
        self.tree.touched.node(id);
        self.tree.mark(id);
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NamespaceSettings;
    use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};

    const BYTES: &[u8] = b"bytes";

    /// Verification takes as long as the file is large, and the bytes that it found bad may have been replaced by then.
    #[test]
    fn only_the_bytes_that_were_looked_at_are_doubted_and_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let medium = MediumChoice::Directory(directory.path().join("tier1"));
        let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
        let settings =
            NamespaceSettings { journal_bytes: Some(1 << 20), ..NamespaceSettings::new(Incarnation(1)) };
        let namespace = Namespace::new(settings, Arc::clone(&tier1)).unwrap();
        let caller = Caller { uid: 0, gid: 0, pid: 0, now_ns: 1, request: 0 };
        let flags = (rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CREATE).bits().cast_signed();
        let (_, open) = namespace.create(&caller, ROOT, b"f", 0o644, flags).unwrap();
        open.backing.write_at(BYTES, 0).unwrap();
        namespace.handles().flush(open.fh, &caller, false).unwrap();
        namespace.handles().release(open.fh).unwrap();
        let ticket = namespace.seals().begin_seal(open.node).unwrap();
        namespace.seals().finish_seal(&ticket, Crc64(1), [Crc64(1)].into()).unwrap();
        let (node, file, seal) = (open.node, ticket.file, ticket.seal);
        let number = || namespace.seals().pin_seal(file, seal).unwrap().backing.number();
        let bad = number();
        assert!(namespace.hosts().doubt_host(node, file, seal, bad) && namespace.seals().is_unverified(node));
        let good = tier1.create(Some(BYTES.len() as u64)).unwrap();
        good.write_at(BYTES, 0).unwrap();
        namespace.hosts().replace_bad_host(node, file, seal, good).unwrap();
        assert!(!namespace.hosts().doubt_host(node, file, seal, bad), "another look at what was there");
        assert!(!namespace.seals().is_unverified(node));
        assert_eq!(namespace.hosts().lose_host(node, file, seal), Err(FsError::Stale));
        let good = number();
        assert!(namespace.hosts().doubt_host(node, file, seal, good));
        assert_eq!(namespace.hosts().lose_host(node, file, seal), Ok(()));
    }
}

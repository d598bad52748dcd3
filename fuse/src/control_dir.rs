//! `/ckpt/.tidemark/`, the directory through which programs talk to the daemon with open and read.
//!
//! Owns: its nodes, its open files. Does not own: the content of the files ([`Host`]).
//!
//! The directory is virtual: a look-up finds it, but a listing of the root does not show it, so that no program that
//! walks the tree copies or deletes it. A file's content is fixed when it is opened. Sizes are shown as 0, as in /proc,
//! because the content is made at open; with direct I/O readers go on until the end of the content.

use crate::attr;
use crate::host::Host;
use fuser::{FileAttr, FileType, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus};
use rustix::process::{getgid, getuid};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use tidemark_namespace::Namespace;

/// The directory's name in the root.
pub(crate) const NAME: &[u8] = b".tidemark";

/// The first node id of the directory; the namespace counts up from 1 and never gets here.
const FIRST_NODE: u64 = 0xffff_ff00_0000_0000;
const DIRECTORY: u64 = FIRST_NODE;

/// The bit that marks handles of the directory; the namespace counts up from 1.
const HANDLE_BIT: u64 = 1 << 63;

/// The most distinct names that get a node. The host's list is a handful; this bounds a list that changes.
const NAMES_MAX: usize = 4096;

/// The virtual directory of one mount.
pub(crate) struct ControlDir {
    host: Arc<dyn Host>,
    names: Mutex<Vec<String>>,
    open: Mutex<HashMap<u64, Arc<[u8]>>>,
    next_handle: AtomicU64,
    born: SystemTime,
}

impl std::fmt::Debug for ControlDir {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlDir").field("names", &self.names).finish_non_exhaustive()
    }
}

impl ControlDir {
    pub(crate) fn new(host: Arc<dyn Host>, born: SystemTime) -> Self {
        Self {
            host,
            names: Mutex::default(),
            open: Mutex::default(),
            next_handle: AtomicU64::new(HANDLE_BIT),
            born,
        }
    }

    /// Returns whether the node is the directory or one of its files.
    pub(crate) fn owns(node: u64) -> bool {
        node >= FIRST_NODE
    }

    /// Returns whether the handle belongs to one of its files.
    pub(crate) fn owns_handle(handle: u64) -> bool {
        handle & HANDLE_BIT != 0
    }

    /// Returns whether the name is reserved in the root.
    pub(crate) fn is_reserved(parent: u64, name: &[u8]) -> bool {
        parent == INodeNo::ROOT.0 && name == NAME
    }

    /// Returns the attributes of the directory itself.
    pub(crate) fn directory(&self) -> FileAttr {
        self.attributes(DIRECTORY)
    }

    /// Returns the attributes of a file by name; `None` when the host has no such file.
    pub(crate) fn lookup(&self, name: &[u8]) -> Option<FileAttr> {
        let name = std::str::from_utf8(name).ok()?;
        self.host
            .control_files()
            .iter()
            .any(|known| known == name)
            .then(|| self.node_of(name))?
            .map(|node| self.attributes(node))
    }

    /// Returns the attributes of a node; `None` for a node that was never assigned.
    pub(crate) fn attr(&self, node: u64) -> Option<FileAttr> {
        (node == DIRECTORY || self.name_of(node).is_some()).then(|| self.attributes(node))
    }

    /// Lists the directory's content: node and name.
    pub(crate) fn list(&self) -> Vec<(u64, String)> {
        self.host.control_files().into_iter().filter_map(|name| Some((self.node_of(&name)?, name))).collect()
    }

    /// Lists the directory from after `cookie`: its files, with cookies after `last`, and the directory of torn
    /// checkpoints.
    pub(crate) fn fill(&self, namespace: &Namespace, (last, cookie): (u64, u64), reply: &mut ReplyDirectory) {
        let files =
            self.list().into_iter().map(|(node, name)| (node, FileType::RegularFile, name.into_bytes()));
        let torn = namespace.hidden().torn_directory();
        let torn = torn.map(|torn| (torn.node, FileType::Directory, torn.name.to_vec()));
        for (position, (node, kind, name)) in (last + 1..).zip(files.chain(torn)) {
            if position > cookie && reply.add(INodeNo(node), position, kind, OsStr::from_bytes(&name)) {
                return;
            }
        }
    }

    /// Lists as [`ControlDir::fill`] does, with attributes, for which it looks up the torn checkpoints' directory once
    /// more.
    pub(crate) fn fill_plus(
        &self,
        namespace: &Namespace,
        (last, cookie): (u64, u64),
        block_size: u32,
        reply: &mut ReplyDirectoryPlus,
    ) {
        let mut position = last;
        for (node, name) in self.list() {
            position += 1;
            let Some(found) = self.attr(node).filter(|_| position > cookie) else { continue };
            let name = OsStr::new(&name);
            if reply.add(found.ino, position, name, &Duration::ZERO, &found, Generation(0)) {
                return;
            }
        }
        let torn = namespace.hidden().torn_directory().filter(|_| position + 1 > cookie);
        let Some(torn) = torn else { return };
        let Ok(found) = namespace.lookup(torn.parent, torn.name) else { return };
        let (ttl, sent) = (attr::ttl(&found), attr::entry(&found, block_size));
        let name = OsStr::from_bytes(torn.name);
        if reply.add(sent.ino, position + 1, name, &ttl, &sent, Generation(0)) {
            namespace.forget(found.node, 1);
        }
    }

    /// Fixes the content and returns a handle to it; `None` when the file is gone.
    pub(crate) fn open(&self, node: u64) -> Option<u64> {
        let content = self.host.control_read(&self.name_of(node)?)?;
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(handle, content.into());
        Some(handle)
    }

    /// Returns the content of an open file and the range that a read requested.
    pub(crate) fn read(&self, handle: u64, offset: u64, size: u32) -> Option<(Arc<[u8]>, Range<usize>)> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let content = Arc::clone(open.get(&handle)?);
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(content.len());
        let end = start.saturating_add(usize::try_from(size).unwrap_or(usize::MAX)).min(content.len());
        Some((content, start..end))
    }

    pub(crate) fn release(&self, handle: u64) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&handle);
    }

    fn attributes(&self, node: u64) -> FileAttr {
        let (kind, perm, nlink) = if node == DIRECTORY {
            (FileType::Directory, 0o555, 2)
        } else {
            (FileType::RegularFile, 0o444, 1)
        };
        FileAttr {
            ino: INodeNo(node),
            size: 0,
            blocks: 0,
            atime: self.born,
            mtime: self.born,
            ctime: self.born,
            crtime: self.born,
            kind,
            perm,
            nlink,
            uid: getuid().as_raw(),
            gid: getgid().as_raw(),
            rdev: 0,
            blksize: attr::BLOCK_SIZE_FALLBACK,
            flags: 0,
        }
    }

    fn node_of(&self, name: &str) -> Option<u64> {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let index = match names.iter().position(|known| known == name) {
            Some(index) => index,
            None if names.len() == NAMES_MAX => return None,
            None => {
                names.push(name.to_owned());
                names.len() - 1
            }
        };
        Some(DIRECTORY + 1 + index as u64)
    }

    fn name_of(&self, node: u64) -> Option<String> {
        let index = usize::try_from(node.checked_sub(DIRECTORY + 1)?).ok()?;
        self.names.lock().unwrap_or_else(PoisonError::into_inner).get(index).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_namespace::{ColdFile, FsError, NodeId};

    struct Clock(AtomicU64);

    impl Host for Clock {
        fn fetch(&self, _: ColdFile) -> Result<(), FsError> {
            Err(FsError::Io)
        }
        fn verify(&self, _: NodeId) -> Result<(), FsError> {
            Ok(())
        }

        fn control_files(&self) -> Vec<String> {
            vec!["ticks".into()]
        }
        fn control_read(&self, name: &str) -> Option<Vec<u8>> {
            (name == "ticks").then(|| self.0.fetch_add(1, Ordering::Relaxed).to_string().into_bytes())
        }
    }

    fn directory() -> ControlDir {
        ControlDir::new(Arc::new(Clock(AtomicU64::new(100))), SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn content_is_fixed_at_open() {
        let dir = directory();
        let node = dir.lookup(b"ticks").unwrap().ino.0;
        let (first, second) = (dir.open(node).unwrap(), dir.open(node).unwrap());
        let text = |handle| {
            let (content, range) = dir.read(handle, 0, 4096).unwrap();
            String::from_utf8(content[range].to_vec()).unwrap()
        };
        assert_eq!((text(first), text(second), text(first)), ("100".into(), "101".into(), "100".into()));
        dir.release(first);
        assert!(dir.read(first, 0, 1).is_none());
    }

    #[test]
    fn reads_beyond_the_end_are_empty() {
        let dir = directory();
        let handle = dir.open(dir.lookup(b"ticks").unwrap().ino.0).unwrap();
        for (offset, size) in [(3, 10), (u64::MAX, u32::MAX), (4, 0)] {
            let (_, range) = dir.read(handle, offset, size).unwrap();
            assert!(range.is_empty());
        }
        assert_eq!(dir.read(handle, 1, 1).unwrap().1, 1..2);
    }

    #[test]
    fn names_the_host_does_not_have_are_not_there() {
        let dir = directory();
        assert!(dir.lookup(b"nothing").is_none());
        assert!(dir.lookup(b"\xff").is_none());
        assert!(dir.attr(DIRECTORY + 9).is_none());
        assert!(ControlDir::is_reserved(1, b".tidemark") && !ControlDir::is_reserved(2, b".tidemark"));
    }
}

//! A single node: its attributes, its names and its kind.
//!
//! Owns: [`Node`] and [`Directory`]. Does not own: a file's life (`file`), how nodes hang together (`tree`).

use super::attr::Special;
use super::file::File;
use super::xattr::Xattrs;
use super::{FILE_MODE_BITS, FsError, MODE_BITS, NodeId, SPECIAL_MODE_BITS};
use std::collections::BTreeMap;
use std::sync::Arc;
use tidemark_protocol::id::FileId;

/// A name's bytes, held once by the directory and lent to its index.
pub(super) type Name = Arc<[u8]>;

/// Cookies below this stand for the start of a directory, `.` and `..`, which the adapter makes up.
pub(super) const FIRST_COOKIE: u64 = 3;

/// Where a node is named: the entry `cookie` of the directory `parent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) parent: NodeId,
    pub(super) cookie: u64,
}

/// A node. Boxed in the tree, so that the tree's own growth moves pointers only.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) ino: u64,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Whether it shares its inode number with the node that it replaced.
    pub(super) overwritten: bool,
    pub(super) atime_ns: i64,
    pub(super) mtime_ns: i64,
    pub(super) ctime_ns: i64,
    /// When a call last set mode, owner, mtime or an extended attribute, here or on another node; 0: none has.
    pub(super) attributes_ns: i64,
    /// Number of look-ups of this node that the kernel has not forgotten yet.
    pub(super) lookups: u64,
    /// Whether this daemon found the node in a session that goes on. The kernel may know it from an unknown number of look-ups.
    pub(super) taken_up: bool,
    /// Whether the daemon removed the last name, or gave it to another node, perhaps without the kernel knowing. An open that arrives
    /// here may have meant a name that leads elsewhere now.
    pub(super) forsaken: bool,
    link: Option<Link>,
    /// Hard links beyond the first; nearly always empty.
    more_links: Vec<Link>,
    pub(super) xattrs: Option<Box<Xattrs>>,
    pub(super) body: Body,
}

/// The kind of a node, with its content.
#[derive(Debug)]
pub(super) enum Body {
    File(Box<File>),
    Directory(Box<Directory>),
    Symlink(Box<[u8]>),
    Special(Special),
}

const SUID: u32 = 0o4000;
const SGID: u32 = 0o2000;
const GROUP_EXECUTES: u32 = 0o010;

impl Body {
    /// The permission bits that a node of this kind keeps, whoever sets them: a call, another node, or Tier-3.
    pub(super) fn mode_bits(&self) -> u32 {
        match self {
            Self::File(_) => FILE_MODE_BITS,
            Self::Directory(_) | Self::Symlink(_) => MODE_BITS,
            Self::Special(_) => SPECIAL_MODE_BITS,
        }
    }

    /// Returns the mode after chown(2). Except for directories, chown(2) clears suid, and sgid where the group may execute. The kernel
    /// leaves this to us (`FUSE_HANDLE_KILLPRIV_V2`).
    pub(super) fn mode_after_chown(&self, mode: u32) -> u32 {
        if matches!(self, Self::Directory(_)) {
            return mode;
        }
        let sgid = if mode & GROUP_EXECUTES != 0 { SGID } else { 0 };
        mode & !(SUID | sgid)
    }
}

/// An entry of a directory.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) name: Name,
    pub(super) node: NodeId,
}

/// The entries of a directory, by name and by cookie. A cookie is given once, so that a listing in progress
/// sees each surviving entry exactly once however many are created or removed beside it.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) by_name: BTreeMap<Name, u64>,
    pub(super) by_cookie: BTreeMap<u64, Entry>,
    pub(super) next_cookie: u64,
    pub(super) subdirectories: u32,
    /// When the directory got its name by rename; 0 if it was made under that name.
    pub(super) renamed_ns: i64,
}

impl Default for Directory {
    fn default() -> Self {
        Self {
            by_name: BTreeMap::new(),
            by_cookie: BTreeMap::new(),
            next_cookie: FIRST_COOKIE,
            subdirectories: 0,
            renamed_ns: 0,
        }
    }
}

impl Node {
    /// Creates a node without a name; all three times are `now_ns`.
    pub(super) fn new(ino: u64, mode: u32, uid: u32, gid: u32, now_ns: i64, body: Body) -> Self {
        Self {
            ino,
            mode,
            uid,
            gid,
            overwritten: false,
            atime_ns: now_ns,
            mtime_ns: now_ns,
            ctime_ns: now_ns,
            attributes_ns: 0,
            lookups: 0,
            taken_up: false,
            forsaken: false,
            link: None,
            more_links: Vec::new(),
            xattrs: None,
            body,
        }
    }

    /// Returns the file's identity; none for other kinds of node.
    pub(super) fn file_id(&self) -> Option<FileId> {
        self.file().ok().map(|file| file.id)
    }

    pub(super) fn links(&self) -> impl Iterator<Item = Link> + '_ {
        self.link.iter().chain(&self.more_links).copied()
    }

    pub(super) fn first_link(&self) -> Option<Link> {
        self.link
    }

    pub(super) fn link_count(&self) -> u32 {
        let count = usize::from(self.link.is_some()) + self.more_links.len();
        u32::try_from(count).expect("links are bounded by MAX_LINKS")
    }

    /// Whether the kernel may still ask for the node. Recovered nodes count, since this daemon does not know whether the kernel forgot
    /// them, unless their last name was removed.
    pub(super) fn is_remembered(&self) -> bool {
        self.lookups > 0 || (self.taken_up && !self.forsaken)
    }

    pub(super) fn add_link(&mut self, link: Link) {
        self.forsaken = false;
        if self.link.is_none() {
            self.link = Some(link);
        } else {
            self.more_links.push(link);
        }
    }

    pub(super) fn remove_link(&mut self, link: Link) {
        if self.link == Some(link) {
            self.link = self.more_links.pop();
            return;
        }
        let at = self.more_links.iter().position(|other| *other == link);
        self.more_links.swap_remove(at.expect("an entry and the link of its node come and go together"));
    }

    pub(super) fn is_directory(&self) -> bool {
        matches!(self.body, Body::Directory(_))
    }

    pub(super) fn directory(&self) -> Result<&Directory, FsError> {
        match &self.body {
            Body::Directory(directory) => Ok(directory),
            Body::File(_) | Body::Symlink(_) | Body::Special(_) => Err(FsError::NotDirectory),
        }
    }

    pub(super) fn directory_mut(&mut self) -> Result<&mut Directory, FsError> {
        match &mut self.body {
            Body::Directory(directory) => Ok(directory),
            Body::File(_) | Body::Symlink(_) | Body::Special(_) => Err(FsError::NotDirectory),
        }
    }

    /// Returns the node's file; refuses other kinds as open(2) and truncate(2) do.
    pub(super) fn file(&self) -> Result<&File, FsError> {
        match &self.body {
            Body::File(file) => Ok(file),
            Body::Directory(_) => Err(FsError::IsDirectory),
            Body::Symlink(_) | Body::Special(_) => Err(FsError::Invalid),
        }
    }

    pub(super) fn file_mut(&mut self) -> Result<&mut File, FsError> {
        match &mut self.body {
            Body::File(file) => Ok(file),
            Body::Directory(_) => Err(FsError::IsDirectory),
            Body::Symlink(_) | Body::Special(_) => Err(FsError::Invalid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_keeps_its_bits_and_chown_takes_those_that_it_takes_elsewhere() {
        let pipe = Body::Special(Special::Pipe);
        let directory = Body::Directory(Box::default());
        assert_eq!(0o7755 & pipe.mode_bits(), 0o7755);
        assert_eq!(0o7755 & directory.mode_bits(), 0o3755);
        assert_eq!(pipe.mode_after_chown(0o7755), 0o1755);
        assert_eq!(pipe.mode_after_chown(0o6745), 0o2745, "its group may not execute it");
        assert_eq!(directory.mode_after_chown(0o3755), 0o3755);
    }
}

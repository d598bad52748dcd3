//! Attributes: what stat(2) shows, and how exact it is.
//!
//! Owns: [`Attr`], [`SetAttr`], and which of the two clocks of a file (the backing file's, the record's) holds.
//! Does not own: changing a file's size (`resize`).
//!
//! A file's size is always its backing file's. Its mtime is the backing file's only while a writer has it open,
//! because passthrough writes do not pass here; preallocation, punching and trimming move the backing file's
//! mtime too, so the time noted when the writer opened (`baseline_ns`) tells a change from none, and after the
//! last writer, or after utimens, the record holds.

use super::file::File;
use super::node::{Body, Node};
use super::{FsError, NodeId};

/// What kind of node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    Special(Special),
}

/// A node that is only a name with attributes: what it does when it is opened is the kernel's. A device's number is
/// in the kernel's own encoding, which nobody here reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Special {
    Pipe,
    Socket,
    CharacterDevice(u32),
    BlockDevice(u32),
}

/// How long the kernel may keep an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ttl {
    /// Ask every time: the inode number is shared by two nodes while old handles live.
    Zero,
    /// The mount's default.
    Default,
}

/// What stat(2) shows. Times in nanoseconds since 1970, sizes in bytes, `blocks_512` in 512-byte units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    pub node: NodeId,
    /// Differs from `node` after an overwrite of a sealed file whose old handles were still open.
    pub ino: u64,
    pub kind: Kind,
    /// Permission bits only, without the file type.
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub size_bytes: u64,
    pub blocks_512: u64,
    pub atime_ns: i64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
    pub ttl: Ttl,
}

/// A time to set: the call's own, or a given one in nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    Now,
    At(i64),
}

/// What setattr changes; `None` leaves a field.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SetAttr {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
}

/// The size every directory shows; tools only want it not to be zero.
const DIRECTORY_BYTES: u64 = 4096;

/// What is true of a file's bytes right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Observed {
    pub(super) size_bytes: u64,
    pub(super) blocks_512: u64,
    pub(super) mtime_ns: i64,
    pub(super) ctime_ns: i64,
    /// What the backing file's own clock says; none where there is none.
    backing_mtime_ns: Option<i64>,
}

/// Reads a file's size and times: one look at the backing file, none for a COLD file.
pub(super) fn observe(node: &Node, file: &File) -> Result<Observed, FsError> {
    let Some(backing) = &file.backing else {
        return Ok(Observed {
            size_bytes: file.size_bytes,
            blocks_512: file.size_bytes.div_ceil(512),
            mtime_ns: node.mtime_ns,
            ctime_ns: node.ctime_ns,
            backing_mtime_ns: None,
        });
    };
    let stat = backing.stat()?;
    let mut observed = Observed {
        size_bytes: stat.size_bytes,
        blocks_512: stat.blocks_512,
        mtime_ns: node.mtime_ns,
        ctime_ns: node.ctime_ns,
        backing_mtime_ns: Some(stat.mtime_ns),
    };
    if file.fate.writers() > 0 && !file.times_set && stat.mtime_ns != file.baseline_ns {
        // The kernel stamps writes with its coarse clock, which may lie a tick before the open's exact time.
        observed.mtime_ns = stat.mtime_ns.max(file.opened_ns);
        observed.ctime_ns = observed.ctime_ns.max(observed.mtime_ns);
    }
    Ok(observed)
}

/// Takes what the writers did into the record, and measures from here on: called when the last writer is gone
/// and before the daemon itself changes the backing file. Costs one look at it.
pub(super) fn freeze(node: &mut Node) -> Result<(), FsError> {
    if let Some(observed) = measure_from_now(node)? {
        node.mtime_ns = observed.mtime_ns;
        node.ctime_ns = observed.ctime_ns;
    }
    Ok(())
}

/// Declares the backing file's size and mtime to be no news, and says what was true until now; nothing of what is no
/// file. Costs one look at it.
pub(super) fn measure_from_now(node: &mut Node) -> Result<Option<Observed>, FsError> {
    let Body::File(file) = &node.body else {
        return Ok(None);
    };
    let observed = observe(node, file)?;
    if let Body::File(file) = &mut node.body {
        file.size_bytes = observed.size_bytes;
        file.baseline_ns = observed.backing_mtime_ns.unwrap_or(file.baseline_ns);
    }
    Ok(Some(observed))
}

/// Declares the backing file's present mtime to be no news.
pub(super) fn rebase(node: &mut Node, size_bytes: u64) -> Result<(), FsError> {
    let Body::File(file) = &mut node.body else {
        return Ok(());
    };
    file.size_bytes = size_bytes;
    if let Some(backing) = &file.backing {
        file.baseline_ns = backing.stat()?.mtime_ns;
    }
    Ok(())
}

/// What stat(2) shows of a node. Costs one look at a file that is here.
pub(super) fn attr(id: NodeId, node: &Node) -> Result<Attr, FsError> {
    let observed = match &node.body {
        Body::File(file) => observe(node, file)?,
        Body::Directory(_) => record(node, DIRECTORY_BYTES),
        Body::Symlink(target) => record(node, target.len() as u64),
        Body::Special(_) => record(node, 0),
    };
    Ok(shown(id, node, &observed))
}

/// The same of a file that was made just now and that nobody can have written yet: it need not be looked at.
pub(super) fn attr_of_new(id: NodeId, node: &Node) -> Attr {
    shown(id, node, &record(node, 0))
}

fn shown(id: NodeId, node: &Node, observed: &Observed) -> Attr {
    let (kind, nlink) = match &node.body {
        Body::File(_) => (Kind::File, node.link_count()),
        Body::Directory(directory) => {
            let nlink =
                if node.link_count() == 0 && id != super::ROOT { 0 } else { 2 + directory.subdirectories };
            (Kind::Directory, nlink)
        }
        Body::Symlink(_) => (Kind::Symlink, node.link_count()),
        Body::Special(special) => (Kind::Special(*special), node.link_count()),
    };
    Attr {
        node: id,
        ino: node.ino,
        kind,
        mode: node.mode,
        nlink,
        uid: node.uid,
        gid: node.gid,
        size_bytes: observed.size_bytes,
        blocks_512: observed.blocks_512,
        atime_ns: node.atime_ns,
        mtime_ns: observed.mtime_ns,
        ctime_ns: observed.ctime_ns,
        ttl: if node.overwritten { Ttl::Zero } else { Ttl::Default },
    }
}

fn record(node: &Node, size_bytes: u64) -> Observed {
    Observed {
        size_bytes,
        blocks_512: size_bytes.div_ceil(512),
        mtime_ns: node.mtime_ns,
        ctime_ns: node.ctime_ns,
        backing_mtime_ns: None,
    }
}

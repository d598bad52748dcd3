//! Attributes: what stat(2) shows, and how exact it is.
//!
//! Owns: [`Attr`], [`SetAttr`], and which of the two clocks of a file (the backing file's, the record's) holds.
//! Does not own: changing a file's size (`resize`).
//!
//! A file's size is always its backing file's. Passthrough writes do not pass here, so while a writer has the file
//! open, the backing file's mtime holds; after the last writer the record holds. Preallocation, punching and trimming
//! move the backing file's mtime, too. The mtime noted when the writer opened the file (`baseline_ns`) therefore tells
//! a change from none. After utimens the record holds until the next write: the backing file is marked with a time that
//! no write gives, since a write within the same tick of the kernel's clock would not show.

use super::file::File;
use super::node::{Body, Node};
use super::{FsError, NodeId};
use tidemark_tier1::UNWRITTEN_NS;

/// Type of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    Special(Special),
}

/// A node that is only a name with attributes: the kernel does what opening it means. A device's number is in the
/// kernel's own encoding, which this crate never interprets.
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

/// Attributes as stat(2) shows them. Times in nanoseconds since 1970, sizes in bytes, `blocks_512` in 512-byte units.
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

/// Attributes that setattr changes; `None` leaves a field.
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

/// The kernel stamps writes with a coarse clock, whose ticks are 10 ms at most.
const TICK_NS: i64 = 10_000_000;

/// Size and times of a file's bytes at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Observed {
    pub(super) size_bytes: u64,
    pub(super) blocks_512: u64,
    pub(super) mtime_ns: i64,
    pub(super) ctime_ns: i64,
    /// The backing file's own mtime; none without a backing file.
    backing_mtime_ns: Option<i64>,
}

/// Reads a file's size and times. Costs one fstat of the backing file, none for a COLD file.
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
    // A daemon may have died after it marked the backing file and before it journaled the mark.
    let is_news = ![file.baseline_ns, UNWRITTEN_NS].contains(&stat.mtime_ns);
    if file.fate.writers() > 0 && is_news {
        observed.mtime_ns = written_ns(stat.mtime_ns, file.opened_ns, node.mtime_ns);
        observed.ctime_ns = observed.ctime_ns.max(observed.mtime_ns);
    }
    Ok(observed)
}

/// Returns the mtime of bytes written at `backing_ns` by the coarse clock, which may lie a tick before two exact times: the open's, and
/// that of the call that set the record's time.
fn written_ns(backing_ns: i64, opened_ns: i64, record_ns: i64) -> i64 {
    let written_ns = backing_ns.max(opened_ns);
    let is_same_tick = (0..TICK_NS).contains(&record_ns.saturating_sub(written_ns));
    if is_same_tick { record_ns } else { written_ns }
}

/// Whether a write at `now_ns` might get the very time that the backing file has already, while the record has another.
fn may_hide_a_write(backing_ns: i64, record_ns: i64, now_ns: i64) -> bool {
    let tick_ns = TICK_NS.cast_unsigned();
    now_ns.abs_diff(backing_ns) < tick_ns && record_ns.abs_diff(backing_ns) >= tick_ns
}

/// Notes the backing file's time when the first writer opens a file, so that later writes are told from earlier ones. Costs an fstat of the
/// backing file. If it was changed just now although the record has another time, setting a mark costs another call.
pub(super) fn measure_writer(node: &mut Node, now_ns: i64) -> Result<(), FsError> {
    let observed = measure_from_now(node)?.ok_or(FsError::Invalid)?;
    match observed.backing_mtime_ns {
        Some(backing_ns) if may_hide_a_write(backing_ns, node.mtime_ns, now_ns) => mark_unwritten(node),
        Some(_) | None => Ok(()),
    }
}

/// Makes the next write show whenever it comes, after the record's time was set while a writer may be active. Costs a call on the backing
/// file and an fstat of it.
pub(super) fn mark_unwritten(node: &mut Node) -> Result<(), FsError> {
    if let Body::File(file) = &mut node.body
        && let Some(backing) = &file.backing
    {
        backing.mark_unwritten()?;
        // Reads the time back, because the file system may round it.
        file.baseline_ns = backing.stat()?.mtime_ns;
    }
    Ok(())
}

/// Copies the writers' changes of size and time into the record, and measures from here on. Called when the last writer
/// is gone, and before the daemon itself changes the backing file. Costs one fstat.
pub(super) fn freeze(node: &mut Node) -> Result<(), FsError> {
    if let Some(observed) = measure_from_now(node)? {
        node.mtime_ns = observed.mtime_ns;
        node.ctime_ns = observed.ctime_ns;
    }
    Ok(())
}

/// Takes the backing file's present size and mtime as the new baseline, and returns the values that held until now;
/// none if the node is no file. Costs one fstat of the backing file.
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

/// Takes the backing file's present mtime as the new baseline.
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

/// Returns a node's attributes as stat(2) shows them. Costs one fstat for a file whose bytes are here.
pub(super) fn attr(id: NodeId, node: &Node) -> Result<Attr, FsError> {
    let observed = match &node.body {
        Body::File(file) => observe(node, file)?,
        Body::Directory(_) => record(node, DIRECTORY_BYTES),
        Body::Symlink(target) => record(node, target.len() as u64),
        Body::Special(_) => record(node, 0),
    };
    Ok(shown(id, node, &observed))
}

/// Returns the attributes of a file that was made just now. No process can have written it yet, so it needs no fstat.
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

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: i64 = 1_000_000_000;

    #[test]
    fn a_write_has_the_time_of_the_clock_but_none_before_what_came_before_it() {
        let now_ns = 1_700_000_000 * SECOND_NS;
        assert_eq!(written_ns(now_ns, now_ns - SECOND_NS, 5), now_ns, "an old time was set");
        assert_eq!(
            written_ns(now_ns, now_ns - SECOND_NS, now_ns + SECOND_NS),
            now_ns,
            "a time to come was set"
        );
        assert_eq!(written_ns(now_ns, now_ns + 3, 5), now_ns + 3, "opened within the tick");
        assert_eq!(written_ns(now_ns, now_ns - SECOND_NS, now_ns + 7), now_ns + 7, "touched within the tick");
        assert_eq!(written_ns(now_ns, i64::MIN, i64::MIN), now_ns);
        assert_eq!(written_ns(now_ns, i64::MIN, i64::MAX), now_ns);
    }

    #[test]
    fn a_write_hides_only_in_the_tick_of_another_change_and_where_it_would_move_the_time() {
        let now_ns = 1_700_000_000 * SECOND_NS;
        assert!(may_hide_a_write(now_ns, 5, now_ns + 1));
        assert!(may_hide_a_write(now_ns, now_ns + SECOND_NS, now_ns - 1));
        assert!(!may_hide_a_write(now_ns, 5, now_ns + TICK_NS), "the clock went on");
        assert!(!may_hide_a_write(now_ns, now_ns + 1, now_ns + 1), "it is its time already");
        assert!(!may_hide_a_write(now_ns, i64::MIN, i64::MAX));
    }
}

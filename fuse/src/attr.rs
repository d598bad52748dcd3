//! Attributes: translated from the namespace's form into the kernel's.
//!
//! Owns: the two forms in which an attribute is sent, times, times to live. Does not own: the values (the namespace).
//!
//! fuser 0.18 sends `attr.ino` as the node id of every reply that makes an entry known. After an overwrite of a
//! file that is still open, a node keeps the old inode number for stat(2) but has a node id of its own: such a
//! node is entered under its id with a time to live of zero, so that the stat that follows asks GETATTR,
//! which answers the inode number.

use fuser::{FileAttr, FileType, INodeNo};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tidemark_namespace::{Attr, Kind, Special, Ttl};

/// How long the kernel may believe an entry or attributes that only this mount changes. The kernel itself drops them on every change made
/// through it. The daemon makes changes, too (a hidden torn checkpoint, a restored file). If the invalidation of such a change is lost, it
/// stays unseen for at most this long.
pub(crate) const TTL_DEFAULT: Duration = Duration::from_secs(1);

/// st_blksize with passthrough, by which glibc's stdio and Python's `open` size their buffers: they gather small writes to this size, and a
/// seek to a few bytes reads as much. `torch.load` of a mapped file seeks 17 times, and with 128 KiB copied 2 MB for it.
pub(crate) const BLOCK_SIZE_PASSTHROUGH: u32 = 16 * 1024;
/// st_blksize without passthrough: the kernel's page cache works in pages.
pub(crate) const BLOCK_SIZE_FALLBACK: u32 = 4096;

const NANOSECONDS: i128 = 1_000_000_000;

/// Makes the attributes for LOOKUP, CREATE, MKDIR, SYMLINK, LINK and READDIRPLUS: the number is the node id.
pub(crate) fn entry(attr: &Attr, block_size: u32) -> FileAttr {
    convert(attr, attr.node, block_size)
}

/// Makes the attributes for GETATTR and SETATTR: the number is st_ino.
pub(crate) fn stat(attr: &Attr, block_size: u32) -> FileAttr {
    convert(attr, attr.ino, block_size)
}

/// Returns how long the kernel may believe the entry and its attributes.
pub(crate) fn ttl(attr: &Attr) -> Duration {
    match attr.ttl {
        Ttl::Default if attr.ino == attr.node => TTL_DEFAULT,
        Ttl::Default | Ttl::Zero => Duration::ZERO,
    }
}

/// Returns the kernel's type of a node.
pub(crate) fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Special(Special::Pipe) => FileType::NamedPipe,
        Kind::Special(Special::Socket) => FileType::Socket,
        Kind::Special(Special::CharacterDevice(_)) => FileType::CharDevice,
        Kind::Special(Special::BlockDevice(_)) => FileType::BlockDevice,
    }
}

fn convert(attr: &Attr, number: u64, block_size: u32) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size: attr.size_bytes,
        blocks: attr.blocks_512,
        atime: system_time(attr.atime_ns),
        mtime: system_time(attr.mtime_ns),
        ctime: system_time(attr.ctime_ns),
        crtime: UNIX_EPOCH,
        kind: file_type(attr.kind),
        perm: u16::try_from(attr.mode & 0o7777).expect("masked to 12 bits"),
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: device_number(attr.kind),
        blksize: block_size,
        flags: 0,
    }
}

/// Returns st_rdev in the encoding that MKNOD used.
fn device_number(kind: Kind) -> u32 {
    match kind {
        Kind::Special(Special::CharacterDevice(number) | Special::BlockDevice(number)) => number,
        Kind::Special(Special::Pipe | Special::Socket) | Kind::File | Kind::Directory | Kind::Symlink => 0,
    }
}

/// Returns the special file that mknod(2) requests, or `None` for a type that mknod cannot make.
pub(crate) fn special(mode: u32, device_number: u32) -> Option<Special> {
    match mode & libc::S_IFMT {
        libc::S_IFIFO => Some(Special::Pipe),
        libc::S_IFSOCK => Some(Special::Socket),
        libc::S_IFCHR => Some(Special::CharacterDevice(device_number)),
        libc::S_IFBLK => Some(Special::BlockDevice(device_number)),
        _ => None,
    }
}

/// Converts nanoseconds since 1970, before it too.
pub(crate) fn system_time(ns: i64) -> SystemTime {
    let distance = Duration::from_nanos(ns.unsigned_abs());
    if ns >= 0 { UNIX_EPOCH + distance } else { UNIX_EPOCH - distance }
}

/// Converts a time that the kernel sent, as fuser 0.18 passes it on, to nanoseconds since 1970. Times beyond the years 1677..2262 become
/// the nearest that 64 bits hold.
///
/// For a time before 1970 fuser subtracts the nanoseconds instead of adding them (`system_time_from_time`): -1 s + 0.25 s comes as 1.25 s
/// before 1970. The function undoes that.
pub(crate) fn nanoseconds(time: SystemTime) -> i64 {
    let exact = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i128::from(after.as_secs()) * NANOSECONDS + i128::from(after.subsec_nanos()),
        Err(error) => {
            let before = error.duration();
            i128::from(before.subsec_nanos()) - i128::from(before.as_secs()) * NANOSECONDS
        }
    };
    i64::try_from(exact).unwrap_or(if exact < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_keep_every_nanosecond_on_both_sides_of_1970() {
        for ns in [0, 1, 999_999_999, 1_234_567_890_123_456_789, i64::MAX] {
            assert_eq!(nanoseconds(system_time(ns)), ns);
        }
        assert_eq!(system_time(-1), UNIX_EPOCH - Duration::from_nanos(1));
        assert_eq!(system_time(i64::MIN), UNIX_EPOCH - Duration::from_nanos(1 << 63));
    }

    #[test]
    fn the_way_fuser_reads_times_before_1970_is_undone() {
        // utimensat(-1 s, 250 ms), in fuser's reading.
        let read = UNIX_EPOCH - Duration::new(1, 250_000_000);
        assert_eq!(nanoseconds(read), -750_000_000);
    }

    #[test]
    fn times_beyond_64_bits_become_the_nearest() {
        assert_eq!(nanoseconds(UNIX_EPOCH + Duration::from_secs(1 << 40)), i64::MAX);
        assert_eq!(nanoseconds(UNIX_EPOCH - Duration::from_secs(1 << 40)), i64::MIN);
    }
}

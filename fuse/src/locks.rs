//! Whether a program holds a lock on a file of the mount.
//!
//! Owns: reading `/proc/locks`. Does not own: the locks, which the kernel keeps, and the reaction to one (the namespace).

use std::fs::File;
use std::io::{self, BufRead, BufReader};

/// The most bytes read: 16 MiB are some 300,000 locks of the machine. Later locks are not seen.
const LOCKS_BYTES_MAX: u64 = 16 << 20;

/// Kinds of locks that count: flock(2), fcntl(2), and locks of open file descriptions. Leases and delegations exclude no process.
const KINDS: [&str; 3] = ["FLOCK", "POSIX", "OFDLCK"];

/// Returns whether a process holds, or waits for, a lock on one of these inodes of the file system `device`. Costs reading all locks of the
/// machine. Locks of processes that this process's `/proc` does not show are not seen.
pub(crate) fn is_locked(device: (u32, u32), inodes: [u64; 2]) -> bool {
    let seen = File::open("/proc/locks").and_then(|file| find(BufReader::new(file), device, inodes));
    seen.unwrap_or_else(|error| {
        tracing::warn!(%error, "/proc/locks cannot be read; an overwritten file counts as not locked");
        false
    })
}

fn find(locks: impl BufRead, device: (u32, u32), inodes: [u64; 2]) -> io::Result<bool> {
    for line in locks.take(LOCKS_BYTES_MAX).lines() {
        if place_of(&line?).is_some_and(|(found, inode)| found == device && inodes.contains(&inode)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Parses a line of proc_locks(5): `1: FLOCK  ADVISORY  WRITE 4711 00:3f:12 0 EOF`, with `->` before the kind of a waiting lock.
fn place_of(line: &str) -> Option<((u32, u32), u64)> {
    let mut fields = line.split_ascii_whitespace().skip(1).filter(|field| *field != "->");
    let kind = fields.next()?;
    let mut place = fields.nth(3).filter(|_| KINDS.contains(&kind))?.split(':');
    let major = u32::from_str_radix(place.next()?, 16).ok()?;
    let minor = u32::from_str_radix(place.next()?, 16).ok()?;
    Some(((major, minor), place.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_told_from_leases_and_from_those_on_other_files() {
        let locks = "1: POSIX  ADVISORY  WRITE 733 00:3f:7 0 EOF\n2: FLOCK  ADVISORY  READ  -1 fd:01:8 0 EOF\n\
                     2: -> OFDLCK ADVISORY  WRITE -1 00:3f:9 5 8\n3: LEASE  ACTIVE    READ  77 00:3f:10 0 EOF\nodd\n4: FLOCK\n";
        let holds = |device, inodes| find(locks.as_bytes(), device, inodes).unwrap();
        assert!(holds((0, 0x3f), [7, 1]) && holds((0, 0x3f), [1, 7]) && holds((0, 0x3f), [9, 9]));
        assert!(holds((0xfd, 1), [8, 8]));
        assert!(!holds((0, 0x3f), [8, 8]), "of another file system");
        assert!(!holds((0, 0x3f), [10, 10]), "a lease");
    }
}

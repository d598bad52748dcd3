//! Counts the kernel's requests of each kind.
//!
//! Owns: the counters and their names. Does not own: where they are published (the daemon's metrics). The counters are
//! the proof that passthrough works: a save must leave READ and WRITE at zero.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! opcodes {
    ($($name:ident => $text:literal,)+) => {
        /// A kind of kernel request, named as in `include/uapi/linux/fuse.h` without the `FUSE_` prefix.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Opcode { $($name,)+ }

        impl Opcode {
            /// Every opcode that is counted, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];

            /// Returns the kernel's name for the opcode, upper case, as metrics and `status` show it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }
        }
    };
}

opcodes! {
    Lookup => "LOOKUP",
    Forget => "FORGET",
    GetAttr => "GETATTR",
    SetAttr => "SETATTR",
    ReadLink => "READLINK",
    SymLink => "SYMLINK",
    MkNod => "MKNOD",
    MkDir => "MKDIR",
    Unlink => "UNLINK",
    RmDir => "RMDIR",
    Rename => "RENAME",
    Link => "LINK",
    Open => "OPEN",
    Read => "READ",
    Write => "WRITE",
    StatFs => "STATFS",
    Release => "RELEASE",
    FSync => "FSYNC",
    SetXattr => "SETXATTR",
    GetXattr => "GETXATTR",
    ListXattr => "LISTXATTR",
    RemoveXattr => "REMOVEXATTR",
    Flush => "FLUSH",
    OpenDir => "OPENDIR",
    ReadDir => "READDIR",
    ReadDirPlus => "READDIRPLUS",
    ReleaseDir => "RELEASEDIR",
    FSyncDir => "FSYNCDIR",
    Create => "CREATE",
    FAllocate => "FALLOCATE",
    Other => "OTHER",
}

const OPCODES: usize = Opcode::ALL.len();

/// The live counters, shared by all session threads. A request costs one relaxed add.
#[derive(Default)]
pub(crate) struct RequestCounters {
    counts: [AtomicU64; OPCODES],
}

impl RequestCounters {
    pub(crate) fn count(&self, opcode: Opcode) {
        self.counts[opcode as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> Counters {
        Counters { counts: std::array::from_fn(|i| self.counts[i].load(Ordering::Relaxed)) }
    }
}

impl fmt::Debug for RequestCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.snapshot().fmt(f)
    }
}

/// Requests counted since the mount began. Read without stopping anything, so two counters may differ by the requests
/// that arrived between reading the one and the other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    counts: [u64; OPCODES],
}

impl Counters {
    /// Returns the requests of this kind since the mount began.
    #[must_use]
    pub fn get(&self, opcode: Opcode) -> u64 {
        self.counts[opcode as usize]
    }

    /// Iterates over every opcode with its count, zeros included.
    pub fn iter(&self) -> impl Iterator<Item = (Opcode, u64)> + '_ {
        Opcode::ALL.iter().map(|&opcode| (opcode, self.get(opcode)))
    }

    /// Returns the counts since `earlier`, which must be of the same mount.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self { counts: std::array::from_fn(|i| self.counts[i].saturating_sub(earlier.counts[i])) }
    }
}

impl fmt::Debug for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().filter(|&(_, n)| n > 0).map(|(o, n)| (o.name(), n))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_opcode_has_a_counter_of_its_own() {
        let live = RequestCounters::default();
        for (i, &opcode) in Opcode::ALL.iter().enumerate() {
            for _ in 0..=i {
                live.count(opcode);
            }
        }
        for (i, (_, n)) in live.snapshot().iter().enumerate() {
            assert_eq!(n, i as u64 + 1);
        }
    }

    #[test]
    fn since_counts_only_what_came_later() {
        let live = RequestCounters::default();
        live.count(Opcode::Create);
        let before = live.snapshot();
        live.count(Opcode::Create);
        live.count(Opcode::Write);
        let later = live.snapshot().since(&before);
        assert_eq!((later.get(Opcode::Create), later.get(Opcode::Write)), (1, 1));
    }
}

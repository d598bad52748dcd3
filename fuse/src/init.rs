//! The agreement with the kernel in FUSE_INIT.
//!
//! Owns: which capabilities the daemon asks for and why. Does not own: whether passthrough is wanted (`probe`).

use fuser::{InitFlags, KernelConfig};

/// Requests that the kernel may queue in the background (readahead, asynchronous direct I/O, RELEASE). The kernel's own default of 12 is
/// for slow devices. Memory is fast: 64 keeps every thread busy without letting one reader fill the queue.
const MAX_BACKGROUND: u16 = 64;

/// Backing files are on a plain tmpfs or disk, stack depth 0, so 1 is enough; it leaves room for one overlay on top of the mount.
const STACK_DEPTH: u32 = 1;

/// Capabilities asked for on every mount. Each is dropped where the kernel does not offer it.
const ALWAYS: &[InitFlags] = &[
    // O_TRUNC comes with OPEN, so that truncating a sealed file and opening it are one decision.
    InitFlags::FUSE_ATOMIC_O_TRUNC,
    // Otherwise every write asks for security.capability. The daemon never stores suid or sgid bits of files, so there is nothing to kill.
    // Anything but a file loses them by chown(2) in the namespace; fuser 0.18 does not pass on the kernel's kill flags either.
    InitFlags::FUSE_HANDLE_KILLPRIV_V2,
    InitFlags::FUSE_PARALLEL_DIROPS,
    InitFlags::FUSE_ASYNC_READ,
    InitFlags::FUSE_ASYNC_DIO,
    InitFlags::FUSE_MAX_PAGES,
    InitFlags::FUSE_DO_READDIRPLUS,
    InitFlags::FUSE_READDIRPLUS_AUTO,
    // A symlink's target never changes while its node lives.
    InitFlags::FUSE_CACHE_SYMLINKS,
    // MAP_SHARED on files opened with FOPEN_DIRECT_IO, for FALLBACK.
    InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
];

// Never asked for: WRITEBACK_CACHE (switches passthrough off without saying so, fs/fuse/inode.c), POSIX_LOCKS and
// FLOCK_LOCKS (left out, the kernel keeps locks itself, which on one node is what flock, fcntl and OFD locks
// mean), OVER_IO_URING (fuser 0.18 cannot serve it).

/// The kernel's part of the agreement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Negotiated {
    pub(crate) passthrough: bool,
    pub(crate) direct_io_allow_mmap: bool,
}

/// Fills in the daemon's half of INIT. `agreed_before`: flags of a living mount, beyond which no daemon may go.
pub(crate) fn negotiate(
    config: &mut KernelConfig,
    want_passthrough: bool,
    agreed_before: Option<InitFlags>,
) -> Negotiated {
    for &flag in ALWAYS {
        if agreed_before.is_some_and(|agreed| !agreed.contains(flag)) {
            continue;
        }
        if config.add_capabilities(flag).is_err() {
            tracing::debug!(?flag, "the kernel does not offer this");
        }
    }
    let passthrough = want_passthrough
        && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
        && config.set_max_stack_depth(STACK_DEPTH).is_ok();
    // The largest write stays fuser's 16 MiB: the kernel cuts it down to fs.fuse.max_pages_limit.
    let set = config.set_max_background(MAX_BACKGROUND);
    assert!(set.is_ok(), "fuser refuses only zero");
    Negotiated {
        passthrough,
        direct_io_allow_mmap: config.capabilities().contains(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP),
    }
}

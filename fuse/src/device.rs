//! The `/dev/fuse` descriptor of one mount and the two passthrough calls on it.
//!
//! Owns: the descriptor that backing ids are registered on. Does not own: reading and answering requests
//! (fuser, on a duplicate of the same open file), which ids are in use (`backing_ids`).
//!
//! Every descriptor here is a duplicate, never a clone made with `FUSE_DEV_IOC_CLONE`: closing a clone
//! aborts the requests that were read through it.

use rustix::ioctl::{Opcode, Setter, opcode};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// `FUSE_DEV_IOC_BACKING_CLOSE`, include/uapi/linux/fuse.h: `_IOW(229, 2, uint32_t)`.
const BACKING_CLOSE: Opcode = opcode::write::<u32>(229, 2);

/// Where backing ids come from; the kernel, or a fake in tests.
pub(crate) trait Registry {
    /// Registers an open file for passthrough. Needs CAP_SYS_ADMIN. About 3 µs.
    fn open(&self, file: BorrowedFd<'_>) -> io::Result<u32>;
    /// Gives an id back. Open files that were answered with it keep their own reference.
    fn close(&self, id: u32) -> io::Result<()>;
}

impl<R: Registry + ?Sized> Registry for std::sync::Arc<R> {
    fn open(&self, file: BorrowedFd<'_>) -> io::Result<u32> {
        (**self).open(file)
    }
    fn close(&self, id: u32) -> io::Result<()> {
        (**self).close(id)
    }
}

/// One mount's `/dev/fuse`.
#[derive(Debug)]
pub(crate) struct Device {
    fd: OwnedFd,
}

impl Device {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Another descriptor of the same open file, close-on-exec.
    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Registry for Device {
    fn open(&self, file: BorrowedFd<'_>) -> io::Result<u32> {
        fuser::BackingId::create_raw(self, file)
    }

    fn close(&self, id: u32) -> io::Result<()> {
        // SAFETY: BACKING_CLOSE reads one u32, which is what the setter passes.
        let request = unsafe { Setter::<BACKING_CLOSE, u32>::new(id) };
        // SAFETY: the call reads the id and changes only kernel state; an unknown id is answered ENOENT.
        unsafe { rustix::ioctl::ioctl(&self.fd, request) }.map_err(io::Error::from)
    }
}

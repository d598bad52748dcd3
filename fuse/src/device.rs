//! The `/dev/fuse` descriptor of one mount and the calls on it that fuser does not make.
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

/// `FUSE_NOTIFY_RESEND`, include/uapi/linux/fuse.h.
const NOTIFY_RESEND: i32 = 7;

/// The `/dev/fuse` descriptor of one mount.
#[derive(Debug)]
pub(crate) struct Device {
    fd: OwnedFd,
}

impl Device {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Device {
    /// Registers an open file for passthrough. Needs CAP_SYS_ADMIN.
    pub(crate) fn register(&self, file: BorrowedFd<'_>) -> io::Result<u32> {
        fuser::BackingId::create_raw(self, file)
    }

    /// Gives an id back.
    pub(crate) fn unregister(&self, id: u32) -> io::Result<()> {
        // SAFETY: BACKING_CLOSE reads one u32, which is what the setter passes.
        let request = unsafe { Setter::<BACKING_CLOSE, u32>::new(id) };
        // SAFETY: the call reads the id and changes only kernel state; an unknown id is answered ENOENT.
        unsafe { rustix::ioctl::ioctl(&self.fd, request) }.map_err(io::Error::from)
    }

    /// Asks the kernel to send again every request that was read and not answered (FUSE_NOTIFY_RESEND, Linux 6.9).
    pub(crate) fn resend(&self) -> io::Result<()> {
        // `fuse_out_header`: length, the notification's code in the place of the error, no request.
        let mut header = [0; 16];
        header[..4].copy_from_slice(&16_u32.to_ne_bytes());
        header[4..8].copy_from_slice(&NOTIFY_RESEND.to_ne_bytes());
        rustix::io::write(&self.fd, &header)?;
        Ok(())
    }
}

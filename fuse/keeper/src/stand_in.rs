//! The answers that the keeper itself gives while its daemons die again and again: as many as open files need to go on.
//!
//! Owns: GETXATTR, FLUSH, FSYNC, and remembering flushes for the next daemon. Does not own: anything that needs names; such a request is
//! read, left unanswered, and sent again to the next daemon (FUSE_NOTIFY_RESEND).
//!
//! Reads, writes and mappings of open files pass the daemon anyway. But the first write after an open asks for `security.capability`, and
//! every close(2) (also the closing of descriptors in execve(2)) sends FLUSH and waits.

use crate::closing::closed_by;
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// `fuse_in_header` and `fuse_out_header` of include/uapi/linux/fuse.h.
const IN_HEADER_BYTES: usize = 40;
const OUT_HEADER_BYTES: usize = 16;
/// `FUSE_NOTIFY_RESEND`, in the place of an error.
const NOTIFY_RESEND: i32 = 7;
/// Opcodes.
const FSYNC: u32 = 20;
const GETXATTR: u32 = 22;
const FLUSH: u32 = 25;

/// The kernel fills no buffer that could not hold its largest write, which is 16 MiB at most, and its headers.
const READ_BYTES: usize = (16 << 20) + (64 << 10);

/// Flushes remembered. If a program closes more files in one crash loop and is killed as well, the others count as cut.
const REMEMBERED_MAX: usize = 1 << 20;

/// An answer that a keeper gave in the place of a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answered {
    /// close(2) of a descriptor of this handle.
    Closed { fh: u64 },
    /// The kernel closed it because its process ended.
    Cut { fh: u64 },
    /// fsync(2).
    Synced { fh: u64 },
}

/// Length of a record: eight bytes of handle, one of kind.
const RECORD_BYTES: usize = 9;

/// Answers requests while no daemon does; see the module's head.
#[derive(Debug)]
pub(crate) struct StandIn {
    device: OwnedFd,
    buffer: Vec<u8>,
    answered: File,
    remembered: usize,
}

impl StandIn {
    /// Begins to answer on a mount's device. `before`: earlier answers that no daemon has read yet.
    pub(crate) fn begin(device: BorrowedFd<'_>, before: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let answered = match before {
            Some(before) => before.try_clone_to_owned()?,
            None => rustix::fs::memfd_create("tidemark-answered", MemfdFlags::CLOEXEC)?,
        };
        let mut answered = File::from(answered);
        let end = answered.seek(SeekFrom::End(0))?;
        let remembered = usize::try_from(end).map_or(REMEMBERED_MAX, |end| end / RECORD_BYTES);
        let device = device.try_clone_to_owned()?;
        let standing = Self { device, buffer: vec![0; READ_BYTES], answered, remembered };
        set_nonblocking(&standing.device, true)?;
        // The requests that the daemon had read when it died are waited for, too. If a kernel cannot send these again, it could not give
        // the next daemon the ones that are left unanswered here, either.
        let mut again = [0; OUT_HEADER_BYTES];
        again[..4].copy_from_slice(&16_u32.to_ne_bytes());
        again[4..8].copy_from_slice(&NOTIFY_RESEND.to_ne_bytes());
        rustix::io::write(&standing.device, &again)?;
        Ok(standing)
    }

    pub(crate) fn device(&self) -> &OwnedFd {
        &self.device
    }

    /// Returns the record of answers, for the next daemon.
    pub(crate) fn answered(&self) -> BorrowedFd<'_> {
        self.answered.as_fd()
    }

    /// Reads one request, if there is one, and answers it if the keeper can.
    pub(crate) fn serve_one(&mut self) -> io::Result<()> {
        let length = match rustix::io::read(&self.device, self.buffer.as_mut_slice()) {
            Ok(length) => length,
            // Interrupted, or withdrawn by its program, perhaps since the device was polled.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN | rustix::io::Errno::NOENT) => {
                return Ok(());
            }
            Err(errno) => return Err(errno.into()),
        };
        let Some(request) = Request::read(&self.buffer[..length]) else { return Ok(()) };
        let (error, answered) = match request.opcode {
            // No program can store such an attribute; requests for others wait for the next daemon.
            GETXATTR if request.asks_for_capabilities => (-libc::ENODATA, None),
            FLUSH => {
                let fh = request.fh;
                let cut = closed_by(request.pid).cut();
                (0, Some(if cut { Answered::Cut { fh } } else { Answered::Closed { fh } }))
            }
            FSYNC => (0, Some(Answered::Synced { fh: request.fh })),
            _ => return Ok(()),
        };
        if let Some(answered) = answered {
            if self.remembered >= REMEMBERED_MAX {
                // Left unanswered: the kernel sends it again to the next daemon.
                return Ok(());
            }
            self.answered.write_all(&answered.encode())?;
            self.remembered += 1;
        }
        let mut answer = [0; OUT_HEADER_BYTES];
        answer[..4].copy_from_slice(&16_u32.to_ne_bytes());
        answer[4..8].copy_from_slice(&i32::to_ne_bytes(error));
        answer[8..].copy_from_slice(&request.unique.to_ne_bytes());
        match rustix::io::write(&self.device, &answer) {
            // The request's program is gone.
            Ok(_) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        if let Err(error) = set_nonblocking(&self.device, false) {
            tracing::error!(%error, "the next daemon's reads of the device do not wait");
        }
    }
}

/// Sets the flag of the open file, which the daemons share: non-blocking while no daemon is there.
fn set_nonblocking(device: &OwnedFd, on: bool) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(device)?;
    flags.set(rustix::fs::OFlags::NONBLOCK, on);
    Ok(rustix::fs::fcntl_setfl(device, flags)?)
}

/// The part of a request that the keeper needs.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    opcode: u32,
    unique: u64,
    pid: u32,
    /// Handle of FLUSH and FSYNC, where it is the first field.
    fh: u64,
    /// Whether it is a GETXATTR of `security.…`. The name follows a size and a pad.
    asks_for_capabilities: bool,
}

impl Request {
    fn read(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let (opcode, unique, pid) = (word(4)?, long(8)?, word(32)?);
        let has_handle = matches!(opcode, FLUSH | FSYNC);
        let fh = if has_handle { long(IN_HEADER_BYTES)? } else { 0 };
        let name = bytes.get(IN_HEADER_BYTES + 8..).unwrap_or_default();
        let asks_for_capabilities = opcode == GETXATTR && name.starts_with(b"security.");
        Some(Self { opcode, unique, pid, fh, asks_for_capabilities })
    }
}

impl Answered {
    fn encode(self) -> [u8; RECORD_BYTES] {
        let (fh, kind) = match self {
            Self::Closed { fh } => (fh, 1),
            Self::Cut { fh } => (fh, 2),
            Self::Synced { fh } => (fh, 3),
        };
        let mut record = [kind; RECORD_BYTES];
        record[..8].copy_from_slice(&fh.to_ne_bytes());
        record
    }

    fn decode(record: &[u8]) -> Option<Self> {
        let fh = u64::from_ne_bytes(record.get(..8)?.try_into().ok()?);
        match record.get(8)? {
            1 => Some(Self::Closed { fh }),
            2 => Some(Self::Cut { fh }),
            3 => Some(Self::Synced { fh }),
            _ => None,
        }
    }

    /// Reads the answers that a keeper remembered, in their order.
    ///
    /// # Errors
    /// If the memory cannot be read.
    pub fn read_all(answered: OwnedFd) -> io::Result<Vec<Self>> {
        let mut file = File::from(answered);
        file.seek(SeekFrom::Start(0))?;
        let mut records = Vec::new();
        file.take((REMEMBERED_MAX * RECORD_BYTES) as u64).read_to_end(&mut records)?;
        Ok(records.chunks_exact(RECORD_BYTES).filter_map(Self::decode).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_read_back_in_order() {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let all = [Answered::Closed { fh: 7 }, Answered::Synced { fh: u64::MAX }, Answered::Cut { fh: 7 }];
        let mut file = File::from(memory);
        all.iter().for_each(|answered| file.write_all(&answered.encode()).unwrap());
        // A torn end, and a kind of a newer keeper.
        file.write_all(&[9; RECORD_BYTES + 3]).unwrap();
        assert_eq!(Answered::read_all(file.into()).unwrap(), all);
    }

    #[test]
    fn a_short_request_is_none_and_no_panic() {
        let mut whole = [0; IN_HEADER_BYTES + 8];
        whole[4..8].copy_from_slice(&FLUSH.to_ne_bytes());
        whole[8..16].copy_from_slice(&3_u64.to_ne_bytes());
        whole[32..36].copy_from_slice(&44_u32.to_ne_bytes());
        whole[IN_HEADER_BYTES..].copy_from_slice(&5_u64.to_ne_bytes());
        for length in 0..whole.len() {
            assert_eq!(Request::read(&whole[..length]), None);
        }
        assert_eq!(
            Request::read(&whole),
            Some(Request { opcode: FLUSH, unique: 3, pid: 44, fh: 5, asks_for_capabilities: false })
        );
    }
}

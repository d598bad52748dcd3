//! FUSE_INIT, first with the kernel, later with a record of the kernel's request.
//!
//! Owns: the exchange as it is kept for the next daemon, and putting the real descriptor under fuser's session. Does not own: the flags
//! that are agreed (`init`). Contains unsafe code: a descriptor is replaced beneath its owner.
//!
//! The kernel sends INIT once in the life of a mount. fuser's session begins by reading it, so every session begins on a socket of this
//! process: there it reads the kernel's request, kept or fresh, and writes its answer. Then `/dev/fuse` replaces the socket's descriptor,
//! and the session's next reads come from the kernel.

use crate::adapter::Adapter;
use crate::device::Device;
use fuser::{Config, InitFlags, Session, SessionACL};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Buffer for INIT. The kernel refuses to fill a buffer below FUSE_MIN_READ_BUFFER (8 KiB); its INIT has 104 bytes.
const READ_BYTES: usize = 64 << 10;

/// Headers before the fields of INIT: `fuse_in_header` and `fuse_out_header` (include/uapi/linux/fuse.h).
const IN_HEADER_BYTES: usize = 40;
const OUT_HEADER_BYTES: usize = 16;

/// Offsets of the flags in `fuse_init_in` and `fuse_init_out`.
const IN_FLAGS_AT: usize = IN_HEADER_BYTES + 12;
const IN_FLAGS2_AT: usize = IN_HEADER_BYTES + 16;
const OUT_FLAGS_AT: usize = OUT_HEADER_BYTES + 12;
const OUT_FLAGS2_AT: usize = OUT_HEADER_BYTES + 32;

/// FUSE_HAS_RESEND: the kernel sends unanswered requests again when asked (Linux 6.9).
const HAS_RESEND: u64 = 1 << 39;

/// The INIT request and answer of kernel and daemon when the mount was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InitExchange {
    pub request: Vec<u8>,
    pub answer: Vec<u8>,
}

impl InitExchange {
    /// Returns whether the kernel can send unanswered requests again, so that another daemon can continue.
    pub(crate) fn can_resend(&self) -> bool {
        flags(&self.request, IN_FLAGS_AT, IN_FLAGS2_AT).is_some_and(|flags| flags & HAS_RESEND != 0)
    }

    /// Returns the agreed flags, or `None` if the answer is too short to hold them.
    pub(crate) fn agreed(&self) -> Option<InitFlags> {
        flags(&self.answer, OUT_FLAGS_AT, OUT_FLAGS2_AT).map(InitFlags::from_bits_retain)
    }
}

fn flags(message: &[u8], low_at: usize, high_at: usize) -> Option<u64> {
    let word = |at: usize| {
        let bytes = message.get(at..at + 4)?;
        Some(u64::from(u32::from_le_bytes(bytes.try_into().expect("four bytes"))))
    };
    Some(word(low_at)? | word(high_at)? << 32)
}

/// Begins a session on the device: with the kernel's INIT, or, for a living mount, with the kept one, which must lead to the same answer.
pub(crate) fn begin(
    adapter: Adapter,
    device: &Device,
    config: Config,
    kept: Option<&InitExchange>,
) -> io::Result<(Session<Adapter>, InitExchange)> {
    let request = match kept {
        Some(kept) => kept.request.clone(),
        None => read_init(device.as_fd())?,
    };
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::io::write(&ours, &request)?;
    let begun = Session::from_fd(adapter, theirs, SessionACL::All, config);
    let mut answer = vec![0; READ_BYTES];
    let length = match &begun {
        // An error was answered too, and the kernel waits for it; without any answer there is nothing to pass on.
        Ok(_) | Err(_) => rustix::net::recv(&ours, answer.as_mut_slice(), rustix::net::RecvFlags::DONTWAIT),
    };
    answer.truncate(length.map_or(0, |(length, _)| length));
    let exchange = InitExchange { request, answer };
    if kept.is_none() && !exchange.answer.is_empty() {
        rustix::io::write(device, &exchange.answer)?;
    }
    let session = begun?;
    if let Some(kept) = kept
        && kept.agreed() != exchange.agreed()
    {
        return Err(io::Error::other(format!(
            "the mount was agreed with {:?}, this daemon would agree to {:?}",
            kept.agreed(),
            exchange.agreed()
        )));
    }
    replace(session.as_fd(), device.as_fd())?;
    Ok((session, exchange))
}

fn read_init(device: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut request = vec![0; READ_BYTES];
    loop {
        match rustix::io::read(device, request.as_mut_slice()) {
            Ok(length) => {
                request.truncate(length);
                return Ok(request);
            }
            // Interrupted, or the request was withdrawn: include/uapi/linux/fuse.h and fs/fuse/dev.c.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN | rustix::io::Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Makes the number `at` mean the open file of `with`.
fn replace(at: BorrowedFd<'_>, with: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: both numbers are open descriptors, as they are borrowed. The owner of `at` still owns the number, and closes it once,
    // whatever it means by then; no pointer into the file that it meant before exists.
    let number = unsafe { libc::dup3(with.as_raw_fd(), at.as_raw_fd(), libc::O_CLOEXEC) };
    if number == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_or_odd_exchange_agrees_to_nothing_and_does_not_panic() {
        for length in 0..OUT_FLAGS2_AT + 4 {
            let exchange = InitExchange { request: vec![0xff; length], answer: vec![0xff; length] };
            assert_eq!(exchange.agreed().is_some(), length >= OUT_FLAGS2_AT + 4);
            assert_eq!(exchange.can_resend(), length >= IN_FLAGS2_AT + 4);
        }
    }
}

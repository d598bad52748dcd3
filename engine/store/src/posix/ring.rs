//! An io_uring that moves one part between memory and the device, several pieces at once.
//!
//! Owns: the ring's calls, and that the memory of a request outlives it. Does not own: which parts go this way, and the
//! handling of a part that cannot (`direct`). The module has unsafe code: the kernel is given addresses.
//!
//! Every call borrows its bytes and returns only when the kernel has answered each request that it took. After the call the
//! kernel therefore holds no address, whatever failed.

use io_uring::{IoUring, opcode, squeue, types};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Bytes of a request. A part of 8 MiB is eight of them, which keeps a disk busy from one thread.
const PIECE_BYTES: usize = 1 << 20;

/// Maximum number of requests of one part on their way at once.
const DEPTH: u32 = 8;

/// An io_uring with nothing on its way.
pub(super) struct Ring {
    ring: IoUring,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("depth", &DEPTH).finish_non_exhaustive()
    }
}

impl Ring {
    /// # Errors
    /// When the kernel has no io_uring, or does not allow it here (ENOSYS, EPERM).
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { ring: IoUring::new(DEPTH)? })
    }

    /// Writes `bytes` at `offset` and returns how many of them, from the first on, are there.
    ///
    /// # Errors
    /// The first error of the file. The ring is of no use after one.
    pub(super) fn write(&mut self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let fd = types::Fd(file.as_raw_fd());
        let requests = bytes.chunks(PIECE_BYTES).zip((offset..).step_by(PIECE_BYTES)).map(|(piece, at)| {
            let len = u32::try_from(piece.len()).expect("a piece fits 32 bits");
            (opcode::Write::new(fd, piece.as_ptr(), len).offset(at).build(), len)
        });
        // SAFETY: each request reads one piece of `bytes`, which is borrowed until after the call, from a file that is too.
        unsafe { self.run(requests) }
    }

    /// Reads from `offset` into `buffer` and returns how many bytes, from the first on, came; fewer at the end of the file.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(super) fn read(&mut self, file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let fd = types::Fd(file.as_raw_fd());
        let pieces = buffer.chunks_mut(PIECE_BYTES);
        let requests = pieces.zip((offset..).step_by(PIECE_BYTES)).map(|(piece, at)| {
            let len = u32::try_from(piece.len()).expect("a piece fits 32 bits");
            (opcode::Read::new(fd, piece.as_mut_ptr(), len).offset(at).build(), len)
        });
        // SAFETY: each request fills one piece of `buffer`, which nobody else has until after the call, from a file that is
        // borrowed as long.
        unsafe { self.run(requests) }
    }

    /// Carries out all requests, which are [`PIECE_BYTES`] apart, and returns the number of bytes up to the first that came
    /// short.
    ///
    /// # Safety
    /// The memory that each request points at stays valid, and is not used otherwise, until this returns.
    unsafe fn run(&mut self, requests: impl Iterator<Item = (squeue::Entry, u32)>) -> io::Result<usize> {
        let mut requests = requests.enumerate();
        let mut lengths: Vec<u32> = Vec::new();
        // Requests put into the queue, taken by the kernel, answered.
        let (mut queued, mut taken, mut answered) = (0, 0, 0);
        let mut short_at: Option<usize> = None;
        let mut failed: Option<io::Error> = None;
        loop {
            while queued - answered < DEPTH as usize && failed.is_none() {
                let Some((index, (entry, len))) = requests.next() else { break };
                lengths.push(len);
                let entry = entry.user_data(index as u64);
                // SAFETY: the memory and the file of the request stay until it is answered: this function's own contract,
                // and it does not return before `answered` is `taken`.
                let pushed = unsafe { self.ring.submission().push(&entry) };
                pushed.expect("the queue has room for as many requests as are on their way at once");
                queued += 1;
            }
            if queued == answered {
                break;
            }
            match self.ring.submit_and_wait(1) {
                Ok(count) => taken += count,
                Err(error) if is_passing(&error) => {}
                // No request of this call was taken. Requests not taken are forgotten with the ring. Requests taken earlier
                // are still being moved, and there is no way left to learn when that ends.
                Err(error) if taken > answered => {
                    tracing::error!(%error, "an io_uring with requests on their way failed");
                    std::process::abort();
                }
                Err(error) => return Err(error),
            }
            for answer in self.ring.completion() {
                answered += 1;
                let index = usize::try_from(answer.user_data()).expect("an index of ours");
                match u32::try_from(answer.result()) {
                    Ok(moved) if moved == lengths[index] => {}
                    Ok(moved) => {
                        let end = index * PIECE_BYTES + moved as usize;
                        short_at = Some(short_at.map_or(end, |at| at.min(end)));
                    }
                    Err(_) => {
                        failed.get_or_insert_with(|| io::Error::from_raw_os_error(-answer.result()));
                    }
                }
            }
        }
        let all = lengths.iter().map(|&len| len as usize).sum();
        failed.map_or_else(|| Ok(short_at.unwrap_or(all)), Err)
    }
}

/// Whether the same call may succeed later: a signal came, or answers must be taken out first.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns none if this machine allows no io_uring; then there is nothing to test, and `direct` works without.
    fn ring() -> Option<Ring> {
        Ring::new().inspect_err(|error| eprintln!("left out: no io_uring here: {error}")).ok()
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| u8::try_from((i * 7 + i / 4096) % 251).unwrap()).collect()
    }

    #[test]
    fn more_pieces_than_fit_the_ring_arrive_and_come_back() {
        let Some(mut ring) = ring() else { return };
        let file = tempfile::tempfile().expect("a file");
        let sent = bytes(2 * DEPTH as usize * PIECE_BYTES + 17);
        assert_eq!(ring.write(&file, &sent, 4096).expect("write"), sent.len());
        let mut came = vec![0; sent.len()];
        assert_eq!(ring.read(&file, &mut came, 4096).expect("read"), sent.len());
        assert!(came == sent);
        assert_eq!(ring.write(&file, &[], 0).expect("nothing"), 0);
    }

    #[test]
    fn a_read_beyond_the_end_says_how_much_there_was() {
        let Some(mut ring) = ring() else { return };
        let file = tempfile::tempfile().expect("a file");
        let there = bytes(3 * PIECE_BYTES + 5);
        ring.write(&file, &there, 0).expect("write");
        let mut came = vec![0; 6 * PIECE_BYTES];
        assert_eq!(ring.read(&file, &mut came, 0).expect("read"), there.len());
        assert!(came[..there.len()] == there);
        assert_eq!(ring.read(&file, &mut came, 1 << 40).expect("read"), 0);
    }

    #[test]
    fn a_refused_request_is_told_after_all_others_have_been_answered() {
        let Some(mut ring) = ring() else { return };
        let folder = tempfile::tempdir().expect("tempdir");
        let path = folder.path().join("file");
        std::fs::write(&path, b"there").expect("write");
        let readable = File::open(&path).expect("open");
        let error = ring.write(&readable, &bytes(20 * PIECE_BYTES), 0).expect_err("not open for writing");
        assert_eq!(error.raw_os_error(), Some(libc::EBADF), "{error}");
        assert_eq!(std::fs::read(&path).expect("read"), b"there");
    }
}

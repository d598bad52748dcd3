//! Memory for parts that are read from the device: whole pages, which are reused while reads go on.
//!
//! Owns: the buffers, lent as `Bytes` and taken back when the last holder drops them. Does not own: the number of reads
//! on their way (their callers), and so the number of buffers lent.

use bytes::Bytes;
use memmap2::MmapMut;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The size of each buffer: the manifest's chunk, which a restore reads at a time.
pub(super) const BUFFER_BYTES: usize = 8 << 20;

/// Maximum number of buffers kept for the next read while others are lent. Further ones are returned to the system at
/// once.
const IDLE_MOST: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Buffers {
    shelf: Mutex<Shelf>,
}

#[derive(Debug, Default)]
struct Shelf {
    idle: Vec<MmapMut>,
    lent: usize,
}

/// A buffer that is lent.
#[derive(Debug)]
pub(super) struct Buffer {
    /// None only during the drop.
    pages: Option<MmapMut>,
    len: usize,
    home: Arc<Buffers>,
}

impl Buffers {
    /// # Errors
    /// When the system has no memory.
    pub(super) fn lend(self: &Arc<Self>) -> io::Result<Buffer> {
        let found = {
            let mut shelf = self.shelf();
            shelf.lent += 1;
            shelf.idle.pop()
        };
        let mut buffer = Buffer { pages: found, len: BUFFER_BYTES, home: Arc::clone(self) };
        if buffer.pages.is_none() {
            buffer.pages = Some(MmapMut::map_anon(BUFFER_BYTES)?);
        }
        Ok(buffer)
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffer {
    pub(super) fn as_mut(&mut self) -> &mut [u8] {
        self.pages.as_deref_mut().unwrap_or_default()
    }

    /// Returns the first `len` bytes, without a copy.
    pub(super) fn into_bytes(mut self, len: usize) -> Bytes {
        assert!(len <= BUFFER_BYTES, "{len} bytes of a buffer of {BUFFER_BYTES}");
        self.len = len;
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.pages.as_deref().map_or(&[], |pages| &pages[..self.len])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut unwanted = Vec::new();
        let mut shelf = self.home.shelf();
        shelf.lent -= 1;
        if shelf.lent == 0 {
            // No buffer is lent any more: the memory goes back to the host.
            unwanted = std::mem::take(&mut shelf.idle);
        } else if let Some(pages) = self.pages.take().filter(|_| shelf.idle.len() < IDLE_MOST) {
            shelf.idle.push(pages);
        }
        drop(shelf);
        // Outside the lock: unmapping waits for other cores.
        drop(unwanted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the numbers of lent and idle buffers.
    fn counts(buffers: &Buffers) -> (usize, usize) {
        let shelf = buffers.shelf();
        (shelf.lent, shelf.idle.len())
    }

    #[test]
    fn a_buffer_that_comes_back_is_lent_again_and_the_last_takes_all_along() {
        let buffers = Arc::new(Buffers::default());
        let (mut first, second) = (buffers.lend().unwrap(), buffers.lend().unwrap());
        first.as_mut()[..4].copy_from_slice(b"abcd");
        assert!(first.as_mut().as_ptr().addr().is_multiple_of(4096), "whole pages");
        let bytes = first.into_bytes(3);
        assert_eq!(&bytes[..], b"abc");
        let part = bytes.slice(1..);
        drop(bytes);
        assert_eq!(counts(&buffers), (2, 0), "a part of it is held");
        drop(part);
        assert_eq!(counts(&buffers), (1, 1));
        drop(buffers.lend().unwrap());
        assert_eq!(buffers.shelf().idle.len(), 1, "the same one");
        drop(second);
        assert_eq!(counts(&buffers), (0, 0));
    }

    #[test]
    fn idle_buffers_are_bounded() {
        let buffers = Arc::new(Buffers::default());
        let stays = buffers.lend().unwrap();
        let many: Vec<_> = (0..IDLE_MOST + 5).map(|_| buffers.lend().unwrap()).collect();
        drop(many);
        assert_eq!(buffers.shelf().idle.len(), IDLE_MOST);
        drop(stays);
    }
}

//! Parts that move directly between memory and the device, past the page cache: O_DIRECT through io_uring.
//!
//! Owns: whether this file system and kernel support it, and which parts qualify. Does not own: the ring (`ring`), the
//! handling of other parts (`files`: the page cache).
//!
//! A failure here is no error of the store: the part is done again through the page cache, whose call then reports the error.
//! Nothing is copied on the way to the device, so there is no copy to compare, unlike the parts that `compare` handles.

use super::buffers::{BUFFER_BYTES, Buffers};
use super::ring::Ring;
use super::root::{Inside, open_object_with};
use bytes::Bytes;
use rustix::fs::{OFlags, fcntl_setfl};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Addresses, offsets and lengths are multiples of this: a page, which is as large as the largest logical blocks.
const ALIGN_BYTES: usize = 4096;

/// Smallest part that is worth a second descriptor. Smaller ones are often read again soon.
pub(super) const DIRECT_LEAST_BYTES: usize = 1 << 20;

/// Maximum number of rings kept for later parts. Each part on its way has one; further ones are made when needed.
const IDLE_RINGS_MOST: usize = 16;

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Direct {
    works: AtomicBool,
    rings: Mutex<Vec<Ring>>,
    buffers: Arc<Buffers>,
}

impl Direct {
    /// Tries `path`, a new file of ours that is open as `file`: whether bytes written past the page cache are read back the
    /// same both ways.
    pub(super) fn try_out(&self, path: &Path, file: &File) {
        match self.tried(path, file) {
            Ok(works) => self.works.store(works, Ordering::Relaxed),
            Err(error) => {
                tracing::debug!(%error, "no O_DIRECT through io_uring here; parts take the page cache")
            }
        }
    }

    fn tried(&self, path: &Path, file: &File) -> io::Result<bool> {
        let mut buffer = self.buffers.lend()?;
        let mut sent = self.buffers.lend()?;
        let sent = &mut sent.as_mut()[..2 * ALIGN_BYTES];
        getrandom::fill(sent).map_err(io::Error::other)?;
        let direct = open_staged(OpenOptions::new().read(true).write(true), path)?;
        let mut ring = Ring::new()?;
        if ring.write(&direct, sent, 0)? != sent.len() {
            return Ok(false);
        }
        let found = &mut buffer.as_mut()[..sent.len()];
        std::os::unix::fs::FileExt::read_exact_at(file, found, 0)?;
        let plain_same = found == sent;
        found.fill(0);
        Ok(ring.read(&direct, found, 0)? == sent.len() && found == sent && plain_same)
    }

    /// Opens a second descriptor of a staged file, for [`Self::write`]; none if parts go through the page cache.
    pub(super) fn open_for_write(&self, path: &Path) -> Option<File> {
        self.works().then(|| open_staged(OpenOptions::new().write(true), path).ok()).flatten()
    }

    /// Writes as much of a part as it can, from its beginning, and returns that length. The caller writes the rest.
    pub(super) fn write(&self, file: &File, bytes: &[u8], offset: u64) -> usize {
        let len = bytes.len() / ALIGN_BYTES * ALIGN_BYTES;
        let aligned = bytes.as_ptr().addr().is_multiple_of(ALIGN_BYTES)
            && offset.is_multiple_of(ALIGN_BYTES as u64)
            && len >= DIRECT_LEAST_BYTES;
        if !aligned || !self.works() {
            return 0;
        }
        match self.with_ring(|ring| ring.write(file, &bytes[..len], offset)) {
            Ok(written) if written == len => len,
            Ok(_) => 0,
            Err(error) => {
                self.give_up_if_refused(&error);
                tracing::debug!(%error, offset, "a part is written through the page cache instead");
                0
            }
        }
    }

    /// Returns the bytes of `range`; `None` if they cannot be read this way.
    pub(super) fn read(&self, inside: &Inside<'_>, path: &Path, range: &Range<u64>) -> Option<Bytes> {
        let len = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        let suits = range.start.is_multiple_of(ALIGN_BYTES as u64)
            && (DIRECT_LEAST_BYTES..=BUFFER_BYTES).contains(&len);
        if !suits || !self.works() {
            return None;
        }
        let read = || -> io::Result<Option<Bytes>> {
            let file = open_object(inside, path)?;
            let mut buffer = self.buffers.lend()?;
            let whole = &mut buffer.as_mut()[..len.next_multiple_of(ALIGN_BYTES)];
            let came = self.with_ring(|ring| ring.read(&file, whole, range.start))?;
            Ok((came >= len).then(|| buffer.into_bytes(len)))
        };
        read().unwrap_or_else(|error| {
            self.give_up_if_refused(&error);
            tracing::debug!(%error, path = %path.display(), "a range is read through the page cache instead");
            None
        })
    }

    fn works(&self) -> bool {
        self.works.load(Ordering::Relaxed)
    }

    /// Stops using this way if the file system refuses it: one that refuses after the trial will go on refusing.
    fn give_up_if_refused(&self, error: &io::Error) {
        let refusals = [libc::EINVAL, libc::EOPNOTSUPP, libc::ENOSYS, libc::EPERM];
        if error.raw_os_error().is_some_and(|code| refusals.contains(&code)) {
            self.works.store(false, Ordering::Relaxed);
        }
    }

    /// Runs `work` with exclusive use of a ring. A ring whose operation failed is dropped, not reused.
    fn with_ring<R>(&self, work: impl FnOnce(&mut Ring) -> io::Result<R>) -> io::Result<R> {
        let rings = || self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = rings().pop();
        let mut ring = idle.map_or_else(Ring::new, Ok)?;
        let done = work(&mut ring)?;
        let mut rings = rings();
        if rings.len() < IDLE_RINGS_MOST {
            rings.push(ring);
        }
        Ok(done)
    }
}

/// Opens a file of ours.
fn open_staged(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    options.custom_flags(libc::O_DIRECT).open(path)
}

fn open_object(inside: &Inside<'_>, path: &Path) -> io::Result<File> {
    let file = open_object_with(inside, path, OFlags::DIRECT)?;
    // Clears the flag again: io_uring takes it as "fail rather than wait".
    fcntl_setfl(&file, OFlags::DIRECT)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::super::root::Root;
    use super::*;
    use std::os::unix::fs::FileExt;

    /// Makes a file of `len` bytes, and a `Direct` that was tried on another one; none if there is no such way.
    fn scene(len: usize) -> Option<(tempfile::TempDir, std::path::PathBuf, Direct)> {
        let folder = tempfile::tempdir().expect("tempdir");
        let direct = Direct::default();
        let trial = folder.path().join("trial");
        let file = File::options().read(true).write(true).create_new(true).open(&trial).expect("create");
        direct.try_out(&trial, &file);
        if !direct.works() {
            eprintln!("left out: no O_DIRECT through io_uring in {}", folder.path().display());
            return None;
        }
        let path = folder.path().join("file");
        File::create_new(&path).expect("create").set_len(len as u64).expect("size");
        Some((folder, path, direct))
    }

    /// Makes whole pages with random content.
    fn pages(len: usize) -> Bytes {
        let buffers = Arc::new(Buffers::default());
        let mut buffer = buffers.lend().expect("memory");
        getrandom::fill(&mut buffer.as_mut()[..len]).expect("random");
        buffer.into_bytes(len)
    }

    #[test]
    fn a_part_goes_past_the_page_cache_up_to_its_last_whole_page_and_comes_back() {
        let len = (2 << 20) + 4096 + 5;
        let Some((folder, path, direct)) = scene(4096 + len) else { return };
        let bytes = pages(len);
        let file = direct.open_for_write(&path).expect("a second descriptor");
        let written = direct.write(&file, &bytes, 4096);
        assert_eq!(written, len - 5);
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .write_all_at(&bytes[written..], 4096 + written as u64)
            .unwrap();
        let range = 4096..4096 + len as u64;
        let root = Root::new(folder.path());
        let inside = root.enter().expect("enter");
        assert_eq!(direct.read(&inside, &path, &range), Some(bytes));
        assert_eq!(direct.read(&inside, &path, &(4096..range.end + 1)), None, "one more than there is");
        assert_eq!(direct.read(&inside, &path, &(4097..range.end)), None, "not at a page");
        assert_eq!(direct.rings.lock().unwrap().len(), 1, "one ring did all of it");
    }

    #[test]
    fn what_does_not_lie_on_pages_is_left_to_the_page_cache() {
        let Some((_folder, path, direct)) = scene(4 << 20) else { return };
        let file = direct.open_for_write(&path).expect("a second descriptor");
        let bytes = pages(3 << 20);
        assert_eq!(direct.write(&file, &bytes[1..], 0), 0, "the memory");
        assert_eq!(direct.write(&file, &bytes, 512), 0, "the offset");
        assert_eq!(direct.write(&file, &bytes[..4096], 0), 0, "too little to be worth it");
        assert!(direct.works(), "none of these says anything of the file system");
        assert!(std::fs::read(&path).unwrap().iter().all(|&byte| byte == 0), "nothing was written");
    }

    #[test]
    fn a_file_system_that_refuses_is_asked_once() {
        let Some((folder, path, direct)) = scene(4 << 20) else { return };
        let root = Root::new(folder.path());
        let inside = root.enter().expect("enter");
        // A file that is not open for writing: the error says nothing about the file system.
        let readable = File::open(&path).unwrap();
        assert_eq!(direct.write(&readable, &pages(2 << 20), 0), 0);
        assert!(direct.works());
        direct.give_up_if_refused(&io::Error::from_raw_os_error(libc::EINVAL));
        assert!(direct.open_for_write(&path).is_none());
        assert_eq!(direct.read(&inside, &path, &(0..2 << 20)), None);
    }
}

//! A read-only view of a sealed backing file's bytes, for hashing and for sending.
//!
//! Owns: the mapping and its one hazard. Does not own: the file; the view keeps it alive. The module has unsafe code (memory mapping).

use std::any::Any;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// A mapping of exactly the bytes that the file had when it was made; an empty file gives an empty slice.
///
/// Hazard: reading a page beyond the file's present end is SIGBUS, and so is reading a hole when memory is out. A caller that maps
/// therefore fills holes first, or reads only parts known to be written. Only sealed files and whole copies are mapped. Such a file is
/// never truncated (it is replaced or unlinked), and its pages are not freed while a view lives. A file that is still written may be
/// mapped to send its stable prefix early: its bytes may then change under the reader, who must hash again after the seal.
pub struct Mapping {
    map: Option<memmap2::Mmap>,
    /// Dropped after the map: the last holder frees the pages.
    _file: Arc<dyn Any + Send + Sync>,
}

impl Mapping {
    /// Makes a mapping; `fd` is of `file`, and the map keeps its own reference.
    pub(super) fn new(file: Arc<dyn Any + Send + Sync>, fd: &OwnedFd, len_bytes: u64) -> io::Result<Self> {
        if len_bytes == 0 {
            return Ok(Self { map: None, _file: file });
        }
        let len = usize::try_from(len_bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        // SAFETY: the file lives as long as the map and nobody truncates it below `len` meanwhile (type's
        // documentation); its bytes may only change while it is not sealed, when callers treat them as a hint.
        let map = unsafe { memmap2::MmapOptions::new().len(len).map(fd.as_raw_fd())? };
        Ok(Self { map: Some(map), _file: file })
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("len_bytes", &self.len()).finish_non_exhaustive()
    }
}

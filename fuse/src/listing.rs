//! Listings in progress.
//!
//! Owns: where each ends. Does not own: entries and their cookies (the namespace).
//!
//! Cookies only rise, so a program that renames or makes entries while it lists them would meet its own new ones for ever. A listing
//! therefore omits entries that get their name after it began. A listing begins at its first entry, and again after rewinddir(3).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use tidemark_namespace::FsError;

/// The open directories of one mount.
#[derive(Debug)]
pub(crate) struct Listings {
    next: AtomicU64,
    /// The end of each listing by the directory's handle: the first cookie that it omits.
    ends: Mutex<HashMap<u64, u64>>,
}

impl Listings {
    /// Makes an empty table. `now_ns` is the first handle, so that no handle equals one of the previous daemon, whose directories are still
    /// open.
    pub(crate) fn new(now_ns: i64) -> Self {
        Self { next: AtomicU64::new(now_ns.max(1).unsigned_abs()), ends: Mutex::default() }
    }

    /// Returns a handle for a directory that is opened.
    pub(crate) fn open(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the end of the listing of `handle`. If the listing begins now (`begins`), or an earlier daemon held its end, calls `now` for
    /// the end.
    ///
    /// # Errors
    /// The error of `now`.
    pub(crate) fn end(
        &self,
        handle: u64,
        begins: bool,
        now: impl FnOnce() -> Result<u64, FsError>,
    ) -> Result<u64, FsError> {
        let known = self.ends.lock().unwrap_or_else(PoisonError::into_inner).get(&handle).copied();
        if let Some(end) = known.filter(|_| !begins) {
            return Ok(end);
        }
        let end = now()?;
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).insert(handle, end);
        Ok(end)
    }

    pub(crate) fn close(&self, handle: u64) {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).remove(&handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_ends_where_the_directory_ended_when_it_began() {
        let listings = Listings::new(1000);
        let (one, other) = (listings.open(), listings.open());
        assert_ne!(one, other);
        assert_eq!(listings.end(one, true, || Ok(10)), Ok(10));
        assert_eq!(listings.end(one, false, || Ok(11)), Ok(10));
        assert_eq!(listings.end(other, true, || Ok(11)), Ok(11));
        assert_eq!(listings.end(one, true, || Ok(12)), Ok(12), "rewound");
        assert_eq!(listings.end(7, false, || Ok(13)), Ok(13), "begun with the daemon before");
        assert_eq!(listings.end(7, false, || Ok(14)), Ok(13));
        assert_eq!(listings.end(9, true, || Err(FsError::NotDirectory)), Err(FsError::NotDirectory));
        [one, other, 7].into_iter().for_each(|handle| listings.close(handle));
        assert!(listings.ends.lock().unwrap().is_empty());
    }
}

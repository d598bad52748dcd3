//! Which backing file is registered for passthrough under which id.
//!
//! Owns: the ids in use and how many open files each serves. Does not own: the backing files (Tier-1), the
//! decision which file an inode has (the namespace).
//!
//! The kernel wants one id per inode for as long as any file of it is open: a second id for the same inode
//! fails the open with EIO (fs/fuse/iomode.c). An inode and its backing file belong together while a handle
//! is open, so ids are kept by backing file: then the order in which a last release and the next open are
//! processed does not matter. Ids are plain numbers so that they can be written down and used again by the
//! next daemon on the same descriptor.

use crate::device::Registry;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// The ids in use, each with its count of open files.
#[derive(Debug)]
pub(crate) struct BackingIds<R> {
    registry: R,
    held: Mutex<HashMap<u64, Held>>,
}

#[derive(Debug)]
struct Held {
    id: u32,
    opens: u64,
}

impl<R: Registry> BackingIds<R> {
    pub(crate) fn new(registry: R) -> Self {
        Self { registry, held: Mutex::default() }
    }

    /// The id for one more open file of backing file `number`. `read_fd` is asked for a read-only descriptor of it
    /// when it has no id yet: the kernel opens the file anew for each open, and a writable descriptor of ours would
    /// hide whether anyone else still has one. It is closed before this returns; the registration needs none.
    pub(crate) fn acquire(
        &self,
        number: u64,
        read_fd: impl FnOnce() -> io::Result<OwnedFd>,
    ) -> io::Result<u32> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match held.entry(number) {
            Entry::Occupied(mut entry) => {
                entry.get_mut().opens += 1;
                Ok(entry.get().id)
            }
            Entry::Vacant(entry) => {
                let id = self.registry.open(read_fd()?.as_fd())?;
                entry.insert(Held { id, opens: 1 });
                Ok(id)
            }
        }
    }

    /// One open file of backing file `number` is gone; the last one gives the id back.
    pub(crate) fn release(&self, number: u64) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let Entry::Occupied(mut entry) = held.entry(number) else {
            panic!("backing file {number} was released more often than it was opened");
        };
        entry.get_mut().opens -= 1;
        if entry.get().opens == 0 {
            let id = entry.remove().id;
            if let Err(error) = self.registry.close(id) {
                // The kernel keeps the pages of this one file until the mount ends; nothing else is wrong.
                tracing::warn!(id, number, %error, "a passthrough id could not be given back");
            }
        }
    }

    /// How many ids are registered now.
    #[cfg(test)]
    fn registered(&self) -> usize {
        self.held.lock().unwrap().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::BorrowedFd;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Default)]
    struct Fake {
        next: AtomicU32,
        closed: Mutex<Vec<u32>>,
        refuse: bool,
    }

    impl Registry for &Fake {
        fn open(&self, _: BorrowedFd<'_>) -> io::Result<u32> {
            if self.refuse {
                return Err(io::Error::from_raw_os_error(libc::EPERM));
            }
            Ok(self.next.fetch_add(1, Ordering::Relaxed) + 1)
        }
        fn close(&self, id: u32) -> io::Result<()> {
            self.closed.lock().unwrap().push(id);
            Ok(())
        }
    }

    #[test]
    fn one_backing_file_has_one_id_until_its_last_release() {
        let fake = Fake::default();
        let ids = BackingIds::new(&fake);
        let file = || Ok(OwnedFd::from(std::fs::File::open("/dev/null")?));
        let first = ids.acquire(7, file).unwrap();
        assert_eq!(ids.acquire(7, file).unwrap(), first);
        assert_ne!(ids.acquire(8, file).unwrap(), first);
        ids.release(7);
        assert!(fake.closed.lock().unwrap().is_empty(), "still open once");
        ids.release(7);
        assert_eq!(*fake.closed.lock().unwrap(), [first]);
        assert_ne!(ids.acquire(7, file).unwrap(), first, "a closed id is not handed out again");
    }

    #[test]
    fn a_refused_registration_leaves_nothing_behind() {
        let fake = Fake { refuse: true, ..Fake::default() };
        let ids = BackingIds::new(&fake);
        let file = || Ok(OwnedFd::from(std::fs::File::open("/dev/null")?));
        assert!(ids.acquire(7, file).is_err());
        assert_eq!(ids.registered(), 0);
    }

    #[test]
    #[should_panic(expected = "released more often")]
    fn a_release_without_an_open_is_a_broken_belief() {
        let fake = Fake::default();
        BackingIds::new(&fake).release(1);
    }
}

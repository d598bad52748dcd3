//! The passthrough ids of backing files.
//!
//! Owns: the ids in use and which handles each serves. Does not own: the backing files (Tier-1), the choice of an inode's file, the journal
//! that the ids are written to (the namespace).
//!
//! The kernel wants one id per inode for as long as any file of it is open: a second id for the same inode fails the open with EIO
//! (fs/fuse/iomode.c). An inode and its backing file belong together while a handle is open, so ids are kept by backing file: then the
//! order in which a last release and the next open are processed does not matter.
//!
//! An id is journaled before the kernel gets it, so that the next daemon on the same device uses the same one. Giving an id back is
//! journaled first, too: otherwise the next daemon might answer an open with an id that the kernel no longer knows, which fails with EIO
//! too.

use crate::device::Device;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use tidemark_namespace::Namespace;

/// The most ids tried at a takeover. A daemon may die between registering an id and journaling it, or between journaling its return and
/// giving it back. Either leaves an unknown id that keeps a file's pages alive. The kernel counts ids up (`idr_alloc_cyclic`,
/// fs/fuse/backing.c), so an id of the first kind lies just below the next one: no more are registered while one thread is between the two
/// steps. An id of the second kind may be older, and then stays until the mount ends.
const UNKNOWN_IDS_MAX: u32 = 4096;

/// Source and journal of backing ids: the kernel and the namespace, or a fake in tests.
pub(crate) trait Registry {
    /// Registers an open file for passthrough. Needs CAP_SYS_ADMIN. About 3 µs.
    fn open(&self, file: BorrowedFd<'_>) -> io::Result<u32>;
    /// Gives an id back. Open files that were answered with it keep their own reference.
    fn close(&self, id: u32) -> io::Result<()>;
    /// Journals the id of a backing file, or that the file has none any more.
    fn note(&self, number: u64, id: Option<u32>) -> io::Result<()>;
}

/// The real registry.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) device: Arc<Device>,
    pub(crate) namespace: Arc<Namespace>,
}

impl Registry for Kernel {
    fn open(&self, file: BorrowedFd<'_>) -> io::Result<u32> {
        self.device.register(file)
    }

    fn close(&self, id: u32) -> io::Result<()> {
        self.device.unregister(id)
    }

    fn note(&self, number: u64, id: Option<u32>) -> io::Result<()> {
        self.namespace.session().note_backing_id(number, id).map_err(io::Error::other)
    }
}

/// The ids in use, each with its open files.
#[derive(Debug)]
pub(crate) struct BackingIds<R> {
    registry: R,
    held: Mutex<HashMap<u64, Held>>,
}

#[derive(Debug)]
struct Held {
    id: u32,
    handles: BTreeSet<u64>,
}

impl<R: Registry> BackingIds<R> {
    pub(crate) fn new(registry: R) -> Self {
        Self { registry, held: Mutex::default() }
    }

    /// Recovers the journal of the previous daemon: ids, and which handle has which backing file. Gives back ids without a handle, and ids
    /// that the previous daemon registered last and did not journal. `spare` opens a descriptor that is registered to learn the next id.
    pub(crate) fn take_up(
        &self,
        ids: &[(u64, u32)],
        handles: impl Iterator<Item = (u64, u64)>,
        spare: impl FnOnce() -> io::Result<OwnedFd>,
    ) -> io::Result<()> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        *held = ids.iter().map(|&(number, id)| (number, Held { id, handles: BTreeSet::new() })).collect();
        for (fh, number) in handles {
            if let Some(held) = held.get_mut(&number) {
                held.handles.insert(fh);
            }
        }
        held.retain(|number, held| !held.handles.is_empty() || !self.give_back(*number, held.id));
        let known: BTreeSet<u32> = held.values().map(|held| held.id).collect();
        drop(held);
        let next = self.registry.open(spare()?.as_fd())?;
        for id in next.saturating_sub(UNKNOWN_IDS_MAX).max(1)..=next {
            if !known.contains(&id) {
                // Nearly all of them were given back long ago, and are answered ENOENT.
                let _ = self.registry.close(id);
            }
        }
        Ok(())
    }

    /// Returns the id for open file `fh` of backing file `number`; repeated calls for one handle return the same id. If the file has no id
    /// yet, calls `read_fd` for a read-only descriptor: the kernel opens the file again for each open, and a writable descriptor of the
    /// daemon would hide whether another process still has one. The descriptor is closed before this returns; the registration does not
    /// need it.
    pub(crate) fn acquire(
        &self,
        number: u64,
        fh: u64,
        read_fd: impl FnOnce() -> io::Result<OwnedFd>,
    ) -> io::Result<u32> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match held.entry(number) {
            Entry::Occupied(mut entry) => {
                entry.get_mut().handles.insert(fh);
                Ok(entry.get().id)
            }
            Entry::Vacant(entry) => {
                let id = self.registry.open(read_fd()?.as_fd())?;
                if let Err(error) = self.registry.note(number, Some(id)) {
                    // The kernel did not get the id.
                    self.close(number, id);
                    return Err(error);
                }
                entry.insert(Held { id, handles: BTreeSet::from([fh]) });
                Ok(id)
            }
        }
    }

    /// Notes that open file `fh` of backing file `number` is gone. The last one gives the id back. Does nothing for a handle without an id:
    /// a release may be sent again to another daemon.
    pub(crate) fn release(&self, number: u64, fh: u64) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let Entry::Occupied(mut entry) = held.entry(number) else { return };
        entry.get_mut().handles.remove(&fh);
        // Under the lock: the next open of this file must be journaled after this.
        if entry.get().handles.is_empty() && self.give_back(number, entry.get().id) {
            entry.remove();
        }
    }

    /// Gives an id back and returns whether that worked; otherwise it stays for the next open of this file, or for the next daemon.
    fn give_back(&self, number: u64, id: u32) -> bool {
        if let Err(error) = self.registry.note(number, None) {
            tracing::warn!(id, number, %error, "a passthrough id is kept: that it is given back is not in the journal");
            return false;
        }
        self.close(number, id);
        true
    }

    fn close(&self, number: u64, id: u32) {
        if let Err(error) = self.registry.close(id) {
            // The kernel keeps the pages of this one file until the mount ends; nothing else is wrong.
            tracing::warn!(id, number, %error, "a passthrough id could not be given back");
        }
    }

    /// Returns the number of ids that are registered now.
    #[cfg(test)]
    fn registered(&self) -> usize {
        self.held.lock().unwrap().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    #[derive(Default)]
    struct Fake {
        next: AtomicU32,
        closed: Mutex<Vec<u32>>,
        refuse: bool,
        refuse_notes: AtomicBool,
        noted: Mutex<Vec<(u64, Option<u32>)>>,
        journal: Mutex<HashMap<u64, u32>>,
    }

    impl Registry for &Fake {
        fn open(&self, _: BorrowedFd<'_>) -> io::Result<u32> {
            if self.refuse {
                return Err(io::Error::from_raw_os_error(libc::EPERM));
            }
            Ok(self.next.fetch_add(1, Ordering::Relaxed) + 1)
        }
        fn close(&self, id: u32) -> io::Result<()> {
            let journaled = self.journal.lock().unwrap().values().any(|known| *known == id);
            assert!(!journaled, "a daemon that dies now has a successor that answers opens with {id}");
            self.closed.lock().unwrap().push(id);
            Ok(())
        }
        fn note(&self, number: u64, id: Option<u32>) -> io::Result<()> {
            if self.refuse_notes.load(Ordering::Relaxed) {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            self.noted.lock().unwrap().push((number, id));
            let mut journal = self.journal.lock().unwrap();
            match id {
                Some(id) => journal.insert(number, id),
                None => journal.remove(&number),
            };
            Ok(())
        }
    }

    fn file() -> io::Result<OwnedFd> {
        Ok(OwnedFd::from(std::fs::File::open("/dev/null")?))
    }

    #[test]
    fn one_backing_file_has_one_id_until_its_last_release() {
        let fake = Fake::default();
        let ids = BackingIds::new(&fake);
        let first = ids.acquire(7, 1, file).unwrap();
        assert_eq!(ids.acquire(7, 2, file).unwrap(), first);
        assert_eq!(ids.acquire(7, 2, file).unwrap(), first, "asked again for the same handle");
        assert_ne!(ids.acquire(8, 3, file).unwrap(), first);
        ids.release(7, 2);
        ids.release(7, 2);
        assert!(fake.closed.lock().unwrap().is_empty(), "still open once");
        ids.release(7, 1);
        assert_eq!(*fake.closed.lock().unwrap(), [first]);
        let second = ids.acquire(7, 4, file).unwrap();
        assert_ne!(second, first, "a closed id is not handed out again");
        let noted = fake.noted.lock().unwrap();
        let of_seven: Vec<_> = noted.iter().filter(|(number, _)| *number == 7).map(|(_, id)| *id).collect();
        assert_eq!(of_seven, [Some(first), None, Some(second)], "each change is journaled, in order");
    }

    #[test]
    fn a_refused_registration_leaves_nothing_behind() {
        let fake = Fake { refuse: true, ..Fake::default() };
        let ids = BackingIds::new(&fake);
        assert!(ids.acquire(7, 1, file).is_err());
        assert_eq!(ids.registered(), 0);
        assert!(fake.noted.lock().unwrap().is_empty());
    }

    #[test]
    fn an_id_that_cannot_be_journaled_as_given_back_is_kept() {
        let fake = Fake::default();
        let ids = BackingIds::new(&fake);
        let first = ids.acquire(7, 1, file).unwrap();
        fake.refuse_notes.store(true, Ordering::Relaxed);
        ids.release(7, 1);
        assert!(fake.closed.lock().unwrap().is_empty());
        assert!(ids.acquire(8, 2, file).is_err());
        assert_eq!(*fake.closed.lock().unwrap(), [first + 1], "nobody was told of it");
        fake.refuse_notes.store(false, Ordering::Relaxed);
        assert_eq!(ids.acquire(7, 3, file).unwrap(), first);
        ids.release(7, 3);
        assert_eq!(*fake.closed.lock().unwrap(), [first + 1, first]);
    }

    #[test]
    fn the_next_daemon_uses_the_same_ids_and_gives_back_what_nobody_knows() {
        let fake = Fake { next: AtomicU32::new(5), ..Fake::default() };
        let ids = BackingIds::new(&fake);
        // 2 is in use, 3 lost its last handle, 1 was given back before, 4 and 5 are not in the journal.
        *fake.journal.lock().unwrap() = HashMap::from([(70, 2), (80, 3)]);
        ids.take_up(&[(70, 2), (80, 3)], [(11, 70), (12, 70)].into_iter(), file).unwrap();
        let closed: BTreeSet<u32> = fake.closed.lock().unwrap().iter().copied().collect();
        assert_eq!(closed, BTreeSet::from([1, 3, 4, 5, 6]), "6 was only asked for to learn where ids are");
        assert_eq!(*fake.noted.lock().unwrap(), [(80, None)]);
        assert_eq!(ids.acquire(70, 13, file).unwrap(), 2);
        for fh in [11, 12, 13] {
            assert!(!fake.closed.lock().unwrap().contains(&2));
            ids.release(70, fh);
        }
        assert!(fake.closed.lock().unwrap().contains(&2));
    }
}

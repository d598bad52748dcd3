//! The spill: files of Tier-1 that lie on a local disk, because memory had no room for them.
//!
//! | file | owns |
//! |---|---|
//! | `folder` | the private folder, its lock, removing the folders of dead daemons |
//! | `file` | one file: size, space, the seal test |
//!
//! Owns: the spill's budget, and the bytes of it that open and dropped files hold. Does not own: which file goes here
//! (`namespace`), memory (`space`), the numbers, which count over both so that a number tells where its file lies.
//! `engine/design/0016-pressure.md` explains the design.
//!
//! The kernel writes these files without the daemon, like those in memory, and here no wall stops it at our budget. A file
//! is therefore counted by the bytes that the file system reports, and promised bytes are allocated at once.

mod file;
mod folder;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::{AtFlags, OFlags, Stat, fstatvfs, statat, unlinkat, utimensat};

pub(super) use self::file::SpillFile;
use self::folder::{FILE_PREFIX, Folder, file_name, open_file};
use super::backing::unwritten;
use super::pool::LingeringFile;
use super::{Tier1Error, adopt, lease, lock};

/// Closed files remembered for [`Spill::unknown_bytes`]: some saves of a node with eight ranks.
const CLOSED_KEPT: usize = 64;

/// Expected size of a file of unknown size if no larger one was seen, as a part of Tier-1.
const UNKNOWN_PART: u64 = 8;

/// Smallest remembered size: smaller files do not show how large the large ones are.
const CLOSED_LEAST_BYTES: u64 = 1 << 20;

/// The place of the spill, and its budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpillPlace {
    /// Must exist: making it could fill another disk if the right one is not mounted.
    pub directory: PathBuf,
    /// Name of the folder in it: this node's life.
    pub name: String,
    pub budget_bytes: u64,
}

/// The parts of a spill that a successor needs to go on with it.
#[derive(Debug)]
pub struct KeptSpill {
    pub folder: PathBuf,
    pub directory: OwnedFd,
    pub budget_bytes: u64,
}

/// The spill at one moment, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpillUsage {
    pub folder: PathBuf,
    pub size_bytes: u64,
    /// Files and lingering. May exceed the size if writers of unknown size went on.
    pub used_bytes: u64,
    pub files_bytes: u64,
    pub lingering_bytes: u64,
    /// Room for a new file: the rest of the budget, or of the disk if that is less.
    pub available_bytes: u64,
    /// Bytes that files have released since the start; only rises.
    pub released_bytes: u64,
    pub files: u64,
    pub growing_files: u64,
}

#[derive(Debug)]
pub(super) struct Spill {
    folder: Folder,
    size_bytes: u64,
    sum: Mutex<Sum>,
    growing: Mutex<HashMap<u64, Weak<SpillFile>>>,
    lingering: Mutex<Vec<LingeringFile>>,
    /// Files that an earlier daemon left, by number, with the bytes that each holds.
    found: Mutex<HashMap<u64, u64>>,
    files: AtomicU64,
    closed: Mutex<Closed>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Sum {
    files_bytes: u64,
    lingering_bytes: u64,
    released_bytes: u64,
}

/// Sizes seen lately, for files of unknown size.
#[derive(Debug, Default)]
struct Closed {
    sizes: VecDeque<u64>,
    /// The size at which a file in memory found no more room; none once a file has ended well here.
    outgrown: Option<u64>,
}

impl Spill {
    pub(super) fn make(place: &SpillPlace) -> Result<Self, Tier1Error> {
        Ok(Self::new(Folder::make(&place.directory, &place.name)?, place.budget_bytes))
    }

    /// Goes on with a dead daemon's spill; also returns the highest number found there.
    pub(super) fn take_over(kept: KeptSpill) -> Result<(Self, u64), Tier1Error> {
        let path = kept.folder.clone();
        let failed = |source| Tier1Error::Spill { step: "going on with", path: path.clone(), source };
        let folder = Folder::take_over(kept.folder, kept.directory).map_err(failed)?;
        let spill = Self::new(folder, kept.budget_bytes);
        let mut highest = 0;
        for number in adopt::numbers(spill.folder.directory(), FILE_PREFIX).map_err(failed)? {
            highest = highest.max(number);
            let held = spill.look(number).map_err(failed)?.st_blocks.cast_unsigned() * 512;
            lock(&spill.sum).files_bytes += held;
            lock(&spill.found).insert(number, held);
        }
        Ok((spill, highest))
    }

    fn new(folder: Folder, size_bytes: u64) -> Self {
        Self {
            folder,
            size_bytes,
            sum: Mutex::default(),
            growing: Mutex::default(),
            lingering: Mutex::default(),
            found: Mutex::default(),
            files: AtomicU64::new(0),
            closed: Mutex::default(),
        }
    }

    pub(super) fn remove(&self) {
        self.folder.remove();
    }

    pub(super) fn keep(&self) -> io::Result<KeptSpill> {
        self.folder.keep();
        Ok(KeptSpill {
            folder: self.folder.path().to_owned(),
            directory: self.folder.directory().try_clone()?,
            budget_bytes: self.size_bytes,
        })
    }

    /// Makes a new, empty file. A predicted size is allocated in full before this returns.
    pub(super) fn create(
        self: &Arc<Self>,
        number: u64,
        predicted_bytes: Option<u64>,
        unknown_bytes: u64,
    ) -> Result<Arc<SpillFile>, Tier1Error> {
        let wanted = predicted_bytes.unwrap_or(unknown_bytes);
        if wanted > self.available() {
            return Err(self.no_space(wanted));
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        open_file(self.folder.directory(), number, flags)
            .map_err(|source| Tier1Error::Create { number, source })?;
        let file = SpillFile::new(Arc::clone(self), number, 0);
        if let Some(bytes) = predicted_bytes {
            // If this call fails, the drop of the file removes it.
            file.plan(bytes)?;
        }
        Ok(file)
    }

    /// Returns the file of a number as an earlier daemon left it; once.
    pub(super) fn adopt(self: &Arc<Self>, number: u64) -> Option<Arc<SpillFile>> {
        let held_bytes = lock(&self.found).remove(&number)?;
        Some(SpillFile::new(Arc::clone(self), number, held_bytes))
    }

    /// Ends the claims, and removes all other files.
    pub(super) fn adopt_rest(&self) {
        for (number, held_bytes) in std::mem::take(&mut *lock(&self.found)) {
            self.unlink(number);
            self.settle(held_bytes, 0);
        }
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub(super) fn usage(&self) -> SpillUsage {
        self.look_at_growing();
        let sum = *lock(&self.sum);
        SpillUsage {
            folder: self.folder.path().to_owned(),
            size_bytes: self.size_bytes,
            used_bytes: sum.files_bytes + sum.lingering_bytes,
            files_bytes: sum.files_bytes,
            lingering_bytes: sum.lingering_bytes,
            available_bytes: self.available(),
            released_bytes: sum.released_bytes,
            files: self.files.load(Ordering::Relaxed),
            growing_files: lock(&self.growing).len() as u64,
        }
    }

    /// Returns the room for promises: by the budget, and by the disk, which others may fill too.
    fn available(&self) -> u64 {
        let sum = *lock(&self.sum);
        let budget = self.size_bytes.saturating_sub(sum.files_bytes + sum.lingering_bytes);
        let disk =
            fstatvfs(self.folder.directory()).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
        budget.min(disk)
    }

    fn no_space(&self, wanted_bytes: u64) -> Tier1Error {
        Tier1Error::SpillFull { wanted_bytes, available_bytes: self.available(), size_bytes: self.size_bytes }
    }

    /// Counts the present bytes of open files, because their writers do not ask.
    fn look_at_growing(&self) {
        let files: Vec<_> = {
            let mut growing = lock(&self.growing);
            growing.retain(|_, file| file.strong_count() > 0);
            growing.values().filter_map(Weak::upgrade).collect()
        };
        for file in files {
            file.count();
        }
    }

    /// Changes the sum from a file's counted bytes to its actual ones.
    fn settle(&self, counted: u64, actual: u64) {
        let mut sum = lock(&self.sum);
        sum.files_bytes = sum.files_bytes + actual - counted;
        sum.released_bytes += counted.saturating_sub(actual);
    }

    /// Returns the room that a file of unknown size should find where it begins: the size of the largest file closed
    /// lately.
    pub(super) fn unknown_bytes(&self, tier1_bytes: u64) -> u64 {
        let largest = lock(&self.closed).sizes.iter().copied().max().unwrap_or(0);
        largest.max(tier1_bytes / UNKNOWN_PART)
    }

    /// Whether a file would reach a size at which one found no more room in memory.
    pub(super) fn is_outgrown(&self, predicted_bytes: Option<u64>) -> bool {
        lock(&self.closed).outgrown.is_some_and(|most| predicted_bytes.is_none_or(|bytes| bytes >= most))
    }

    /// Notes that a file was closed for writing with this size. `short`: it was in memory, and there was no more room.
    pub(super) fn closed(&self, size_bytes: u64, spilled: bool, short: bool) {
        if size_bytes < CLOSED_LEAST_BYTES {
            return;
        }
        let mut closed = lock(&self.closed);
        if short {
            closed.outgrown = Some(closed.outgrown.map_or(size_bytes, |before| before.min(size_bytes)));
            return;
        }
        if spilled {
            closed.outgrown = None;
        }
        if closed.sizes.len() == CLOSED_KEPT {
            closed.sizes.pop_front();
        }
        closed.sizes.push_back(size_bytes);
    }

    /// Frees dropped files that no process has open any more.
    pub(super) fn let_go(&self) {
        lock(&self.lingering).retain(|file| {
            let gone = file.is_gone();
            if gone {
                let mut sum = lock(&self.sum);
                sum.lingering_bytes -= file.held_bytes;
                sum.released_bytes += file.held_bytes;
            }
            !gone
        });
    }

    /// Takes a file without holders. If another process has it open, its bytes stay counted until that ends.
    fn retire(&self, number: u64, held_bytes: u64) {
        self.files.fetch_sub(1, Ordering::Relaxed);
        let read_fd = self.open(number, OFlags::RDONLY).ok();
        self.unlink(number);
        // If the question cannot be asked, the bytes are not counted: the disk itself shows its free space.
        let open = read_fd.filter(|fd| lease::open_elsewhere(fd.as_fd()).unwrap_or(false));
        match open {
            Some(read_fd) => {
                let mut sum = lock(&self.sum);
                sum.files_bytes -= held_bytes;
                sum.lingering_bytes += held_bytes;
                drop(sum);
                lock(&self.lingering).push(LingeringFile { read_fd, held_bytes });
            }
            None => self.settle(held_bytes, 0),
        }
    }

    fn open(&self, number: u64, access: OFlags) -> io::Result<OwnedFd> {
        open_file(self.folder.directory(), number, access)
    }

    fn look(&self, number: u64) -> io::Result<Stat> {
        Ok(statat(self.folder.directory(), file_name(number), AtFlags::SYMLINK_NOFOLLOW)?)
    }

    fn mark_unwritten(&self, number: u64) -> io::Result<()> {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        Ok(utimensat(self.folder.directory(), file_name(number), &unwritten(), flags)?)
    }

    fn unlink(&self, number: u64) {
        if let Err(error) = unlinkat(self.folder.directory(), file_name(number), AtFlags::empty()) {
            tracing::warn!(number, %error, "a spilled file's name could not be removed");
        }
    }
}

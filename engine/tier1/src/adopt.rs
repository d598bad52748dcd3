//! Taking over the Tier-1 of a daemon that died: its mounts are open still, its files lie there under their numbers.
//!
//! Owns: what is found there, and that the budget counts all of it before anything else moves. Does not own: which file
//! is whose (the namespace's journal says so), who kept the mounts open meanwhile (the keeper).
//!
//! Ready files that nobody was given become ready files again; what was written and belongs to nobody is given back.
//! Bytes of files that were unlinked and that a program still maps have no name any more: they are the difference
//! between what the file system has in use and what is found, and are counted until it closes.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use rustix::fs::{AtFlags, Dir, fstatvfs, statat};

use super::backing::Backing;
use super::ballast::SLICE_BYTES;
use super::budget::User;
use super::file::File;
use super::pool::ReadyFile;
use super::space::Space;
use super::spill::KeptSpill;
use super::{Tier1, Tier1Error, lock};

/// What a daemon's Tier-1 lives in, and what its successor needs to go on with it.
#[derive(Debug)]
pub struct KeptMounts {
    pub files: OwnedFd,
    pub ballast: OwnedFd,
    pub journal: OwnedFd,
    /// The folder and its lock, where there is no tmpfs of our own.
    pub folder: Option<(PathBuf, OwnedFd)>,
    pub spill: Option<KeptSpill>,
}

/// Files found and not yet claimed, by number.
#[derive(Debug, Default)]
pub(super) struct Found {
    files: Mutex<HashMap<u64, FoundFile>>,
}

#[derive(Debug, Clone, Copy)]
struct FoundFile {
    size_bytes: u64,
    held_bytes: u64,
}

impl FoundFile {
    /// Whether it was zeroed is not known; its writer sees to it.
    fn ready(&self, number: u64) -> ReadyFile {
        let held_bytes = self.held_bytes;
        ReadyFile { number, ready_bytes: held_bytes, held_bytes, zeroed_bytes: held_bytes }
    }
}

impl Space {
    /// Counts every file and every slice of ballast that is there. Must come before anything is made.
    pub(super) fn find(&self) -> io::Result<()> {
        let mut found = HashMap::new();
        let mut highest = 0;
        for number in numbers(&self.medium.files, "f-")? {
            highest = highest.max(number);
            let stat = self.look(number)?;
            let actual = stat.st_blocks.cast_unsigned() * 512;
            let held_bytes = lock(&self.budget).take_up_to(User::Pool, actual);
            found.insert(number, FoundFile { size_bytes: stat.st_size.cast_unsigned(), held_bytes });
        }
        self.next_number.store(highest + 1, Ordering::Relaxed);
        *lock(&self.found.files) = found;
        let unnamed = self.unnamed_bytes();
        let counted = lock(&self.budget).take_up_to(User::Lingering, unnamed);
        self.unnamed.store(counted, Ordering::Relaxed);
        let names = numbers(&self.medium.ballast, "b-")?;
        let slices = self.ballast.adopt(names)?;
        for _ in 0..slices {
            if !lock(&self.budget).take(User::Ballast, SLICE_BYTES) && !self.ballast.pop_slice() {
                break;
            }
        }
        Ok(())
    }

    /// Bytes on the files' tmpfs that no name leads to.
    fn unnamed_bytes(&self) -> u64 {
        if !self.medium.walled {
            return 0;
        }
        let Ok(used) =
            fstatvfs(&self.medium.files).map(|stat| (stat.f_blocks - stat.f_bfree) * stat.f_frsize)
        else {
            return 0;
        };
        let budget = lock(&self.budget);
        let named = budget.held(User::Files) + budget.held(User::Pool);
        let lingering = budget.held(User::Lingering) - self.unnamed.load(Ordering::Relaxed);
        used.saturating_sub(named + lingering)
    }

    /// Looks again at what had no name when this daemon began; it only gets less. Writers that allocate between two looks
    /// at their files make it look like more for a moment.
    pub(super) fn recount_unnamed(&self) -> u64 {
        let counted = self.unnamed.load(Ordering::Relaxed);
        if counted > 0 {
            let left = self.unnamed_bytes().min(counted);
            lock(&self.budget).give_back(User::Lingering, counted - left);
            self.unnamed.store(left, Ordering::Relaxed);
            return left;
        }
        0
    }
}

impl Tier1 {
    /// What a successor needs; the descriptors stay ours.
    ///
    /// # Errors
    /// When this process may open no more.
    pub fn kept_mounts(&self) -> io::Result<KeptMounts> {
        let spill = self.space.spill.get().map(|spill| spill.keep()).transpose()?;
        Ok(KeptMounts { spill, ..self.space.medium.keep()? })
    }

    /// The file of a number, found where a daemon before this one left it; once. None when it is not there.
    #[must_use]
    pub fn adopt(&self, number: u64) -> Option<Arc<Backing>> {
        if let Some(spilled) = self.space.spill.get().and_then(|spill| spill.adopt(number)) {
            return Some(Arc::new(Backing::spilled(spilled)));
        }
        let found = lock(&self.space.found.files).remove(&number)?;
        lock(&self.space.budget).shift(User::Pool, User::Files, found.held_bytes);
        let ready = found.ready(number);
        Some(Arc::new(Backing::new(File::found(Arc::clone(&self.space), ready))))
    }

    /// Nobody claims the rest: ready files are ready again, the others are given back.
    pub fn adopt_rest(&self) {
        if let Some(spill) = self.space.spill.get() {
            spill.adopt_rest();
        }
        let rest = std::mem::take(&mut *lock(&self.space.found.files));
        for (number, found) in rest {
            let ready = found.ready(number);
            let unused = found.size_bytes == 0 && found.held_bytes > 0;
            if !unused {
                self.space.discard(ready);
                continue;
            }
            lock(&self.space.pool).put(ready);
        }
    }
}

/// The numbers of the files that are called `<prefix><number>`.
pub(super) fn numbers(directory: &OwnedFd, prefix: &str) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy();
        if let Some(number) = name.strip_prefix(prefix).and_then(|rest| rest.parse().ok()) {
            numbers.push(number);
        }
    }
    Ok(numbers)
}

/// The error of a Tier-1 that cannot be taken over.
pub(super) fn failed(source: io::Error) -> Tier1Error {
    Tier1Error::Adopt { source }
}

/// Whether a directory of the medium is still one: its mount may have been taken away under us.
pub(super) fn is_alive(directory: &OwnedFd) -> io::Result<()> {
    statat(directory, ".", AtFlags::empty())?;
    Ok(())
}

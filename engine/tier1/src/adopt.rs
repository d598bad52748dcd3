//! Recovery of the Tier-1 of a daemon that died: its mounts are still open, and its files lie there under their numbers.
//!
//! Owns: the files found there, and that the budget counts all of them before anything else moves. Does not own: which
//! file is whose (the namespace's journal), keeping the mounts open meanwhile (the keeper).
//!
//! Unused ready files become ready files again; written files that nothing claims are freed. Unlinked files that a
//! program still maps have no name any more. Their bytes are the difference between the file system's usage and the found
//! files, and stay counted until the program closes them.

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

/// The mounts of a daemon's Tier-1, as its successor needs them to go on.
#[derive(Debug)]
pub struct KeptMounts {
    pub files: OwnedFd,
    pub ballast: OwnedFd,
    pub journal: OwnedFd,
    /// The folder and its lock, if there is no tmpfs of our own.
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
    /// Returns the file as a ready file. Whether it was zeroed is unknown, so that is left to its writer.
    fn ready(&self, number: u64) -> ReadyFile {
        let held_bytes = self.held_bytes;
        ReadyFile { number, ready_bytes: held_bytes, held_bytes, zeroed_bytes: held_bytes }
    }
}

impl Space {
    /// Counts every file and every slice of ballast that exists. Must run before anything is made.
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

    /// Returns the bytes on the files' tmpfs that have no name.
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

    /// Measures again the bytes that had no name when this daemon began; they only become fewer. Writers that allocate
    /// between two stats of their files make them seem more for a moment.
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
    /// Returns duplicates for a successor; the descriptors stay ours.
    ///
    /// # Errors
    /// When this process may open no more.
    pub fn kept_mounts(&self) -> io::Result<KeptMounts> {
        let spill = self.space.spill.get().map(|spill| spill.keep()).transpose()?;
        Ok(KeptMounts { spill, ..self.space.medium.keep()? })
    }

    /// Returns the file of a number as an earlier daemon left it; once. None if it does not exist.
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

    /// Ends the claims: ready files are ready again, all others are freed.
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

/// Returns the numbers of the files with the name `<prefix><number>`.
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

/// Makes the error of a Tier-1 that cannot be taken over.
pub(super) fn failed(source: io::Error) -> Tier1Error {
    Tier1Error::Adopt { source }
}

/// Checks that a directory of the medium still is one: its mount may have been removed meanwhile.
pub(super) fn is_alive(directory: &OwnedFd) -> io::Result<()> {
    statat(directory, ".", AtFlags::empty())?;
    Ok(())
}

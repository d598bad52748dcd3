//! A spilled file: the kernel reads and writes it on the disk, and the daemon works on it on request.
//!
//! Owns: its size, its space, the seal test. Does not own: the sum over all (`mod`), the users' view of it
//! (`namespace`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, OFlags, Stat, fallocate, fstat, ftruncate};

use super::Spill;
use super::folder::file_name;
use crate::space::PAGE_BYTES;
use crate::{Tier1Error, lease, lock};

#[derive(Debug)]
pub(crate) struct SpillFile {
    spill: Arc<Spill>,
    number: u64,
    growth: Mutex<Growth>,
}

#[derive(Debug)]
struct Growth {
    writers: u32,
    /// Kept while a writer has the file open, then none: our own write descriptor would look like a writer to the seal
    /// test.
    write_fd: Option<Arc<OwnedFd>>,
    /// Bytes that the spill counts for this file.
    held_bytes: u64,
}

impl SpillFile {
    pub(super) fn new(spill: Arc<Spill>, number: u64, held_bytes: u64) -> Arc<Self> {
        spill.files.fetch_add(1, Ordering::Relaxed);
        let growth = Growth { writers: 0, write_fd: None, held_bytes };
        Arc::new(Self { spill, number, growth: Mutex::new(growth) })
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn read_fd(&self) -> io::Result<OwnedFd> {
        self.spill.open(self.number, OFlags::RDONLY)
    }

    pub(crate) fn look(&self) -> io::Result<Stat> {
        self.spill.look(self.number)
    }

    /// See [`crate::Backing::mark_unwritten`]. Nothing is made ready ahead of a writer here.
    pub(crate) fn mark_unwritten(&self) -> io::Result<()> {
        self.spill.mark_unwritten(self.number)
    }

    pub(crate) fn host_path(&self) -> String {
        let directory = self.spill.folder.directory().as_raw_fd();
        format!("/proc/{}/fd/{directory}/{}", std::process::id(), file_name(self.number))
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.growth().held_bytes
    }

    fn growth(&self) -> MutexGuard<'_, Growth> {
        lock(&self.growth)
    }

    fn failed<E: Into<io::Error>>(
        &self,
        step: &'static str,
        offset: u64,
        len: u64,
    ) -> impl Fn(E) -> Tier1Error + use<E> {
        Tier1Error::resize(self.number, step, offset, len)
    }

    fn writer(&self, growth: &mut Growth) -> io::Result<Arc<OwnedFd>> {
        if let Some(fd) = &growth.write_fd {
            return Ok(Arc::clone(fd));
        }
        let fd = Arc::new(self.spill.open(self.number, OFlags::RDWR)?);
        if growth.writers > 0 {
            growth.write_fd = Some(Arc::clone(&fd));
        }
        Ok(fd)
    }

    /// Sets the count to the bytes that the file holds.
    pub(super) fn count(&self) {
        self.settle(&mut self.growth());
    }

    fn settle(&self, growth: &mut Growth) {
        match self.look() {
            Ok(stat) => {
                let actual = stat.st_blocks.cast_unsigned() * 512;
                self.spill.settle(growth.held_bytes, actual);
                growth.held_bytes = actual;
            }
            Err(error) => tracing::error!(number = self.number, %error, "a spilled file cannot be looked at"),
        }
    }

    /// Promises that the file may reach `bytes`, by allocating them.
    pub(crate) fn plan(&self, bytes: u64) -> Result<(), Tier1Error> {
        self.allocate_locked(&mut self.growth(), 0, bytes)
    }

    fn allocate_locked(&self, growth: &mut Growth, from: u64, bytes: u64) -> Result<(), Tier1Error> {
        let more = bytes.saturating_sub(growth.held_bytes);
        if bytes == 0 || (from == 0 && more == 0) {
            return Ok(());
        }
        if more > self.spill.available() {
            return Err(self.spill.no_space(more));
        }
        let failed = self.failed("allocating", from, bytes);
        let fd = self.writer(growth).map_err(&failed)?;
        let allocated = fallocate(&fd, FallocateFlags::KEEP_SIZE, from, bytes);
        if allocated == Err(rustix::io::Errno::NOSPC) {
            // Some of it may have been allocated although it was not promised.
            self.give_back_beyond_end(&fd);
        }
        self.settle(growth);
        match allocated {
            Err(rustix::io::Errno::NOSPC) => Err(self.spill.no_space(more)),
            allocated => allocated.map_err(|error| failed(error.into())),
        }
    }

    /// Frees the space beyond the end. File systems differ in which of the two calls does so.
    fn give_back_beyond_end(&self, fd: &OwnedFd) {
        let Ok(stat) = fstat(fd) else { return };
        let size = stat.st_size.cast_unsigned();
        let end = size.next_multiple_of(PAGE_BYTES);
        let punch = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE;
        let _ = fallocate(fd, punch, end, i64::MAX.cast_unsigned() - end);
        let _ = ftruncate(fd, size);
    }

    pub(crate) fn begin_growth(self: &Arc<Self>) {
        let mut growth = self.growth();
        growth.writers += 1;
        if growth.writers == 1 {
            lock(&self.spill.growing).insert(self.number, Arc::downgrade(self));
        }
    }

    pub(crate) fn end_growth(&self) {
        let mut growth = self.growth();
        assert!(growth.writers > 0, "growth of spilled file {} ended once too often", self.number);
        growth.writers -= 1;
        if growth.writers == 0 {
            growth.write_fd = None;
            self.settle(&mut growth);
            drop(growth);
            lock(&self.spill.growing).remove(&self.number);
            let size_bytes = self.look().map_or(0, |stat| stat.st_size.cast_unsigned());
            self.spill.closed(size_bytes, true, false);
        }
    }

    pub(crate) fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let end = offset
            .checked_add(bytes.len() as u64)
            .ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let fd = {
            let mut growth = self.growth();
            let more = end.saturating_sub(growth.held_bytes).min(bytes.len() as u64);
            if more > 0 && more > self.spill.available() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.writer(&mut growth)?
        };
        let written = rustix::io::pwrite(&fd, bytes, offset);
        drop(fd);
        self.count();
        Ok(written?)
    }

    pub(crate) fn set_len(&self, bytes: u64) -> Result<(), Tier1Error> {
        let failed = self.failed("truncating", 0, bytes);
        let mut growth = self.growth();
        let size = self.look().map_err(&failed)?.st_size.cast_unsigned();
        if bytes == size {
            return Ok(());
        }
        if bytes > size {
            self.allocate_locked(&mut growth, 0, bytes)?;
        }
        let fd = self.writer(&mut growth).map_err(&failed)?;
        let truncated = ftruncate(&fd, bytes).map_err(|error| failed(error.into()));
        self.settle(&mut growth);
        truncated
    }

    pub(crate) fn allocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> Result<(), Tier1Error> {
        let failed = self.failed("allocating", offset, len);
        let Some(end) = offset.checked_add(len).filter(|end| i64::try_from(*end).is_ok() && len > 0) else {
            return Err(failed(rustix::io::Errno::INVAL.into()));
        };
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let zero = mode.contains(FallocateFlags::ZERO_RANGE);
        let keeps_size = mode.contains(FallocateFlags::KEEP_SIZE);
        if mode != punch && !(mode - FallocateFlags::ZERO_RANGE - FallocateFlags::KEEP_SIZE).is_empty() {
            return Err(failed(rustix::io::Errno::OPNOTSUPP.into()));
        }
        let mut growth = self.growth();
        let fd = self.writer(&mut growth).map_err(&failed)?;
        if mode == punch || zero {
            fallocate(&fd, punch, offset, len).map_err(|error| failed(error.into()))?;
            self.settle(&mut growth);
        }
        if mode != punch {
            self.allocate_locked(&mut growth, offset, len)?;
            let size = self.look().map_err(&failed)?.st_size.cast_unsigned();
            if !keeps_size && end > size {
                ftruncate(&fd, end).map_err(|error| failed(error.into()))?;
            }
        }
        Ok(())
    }

    pub(crate) fn writable_elsewhere(&self) -> io::Result<bool> {
        let growth = self.growth();
        if growth.write_fd.is_some() {
            return Ok(true);
        }
        lease::writable_elsewhere(self.read_fd()?.as_fd())
    }

    pub(crate) fn trim(&self) -> io::Result<()> {
        let mut growth = self.growth();
        if growth.writers > 0 {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let stat = self.look()?;
        if stat.st_blocks.cast_unsigned() * 512 > stat.st_size.cast_unsigned().next_multiple_of(PAGE_BYTES) {
            let fd = self.spill.open(self.number, OFlags::RDWR)?;
            self.give_back_beyond_end(&fd);
        }
        self.settle(&mut growth);
        Ok(())
    }
}

impl Drop for SpillFile {
    fn drop(&mut self) {
        let growth = self.growth.get_mut().unwrap_or_else(PoisonError::into_inner);
        growth.write_fd = None;
        let counted = growth.held_bytes;
        let actual =
            self.spill.look(self.number).map_or(counted, |stat| stat.st_blocks.cast_unsigned() * 512);
        self.spill.settle(counted, actual);
        self.spill.retire(self.number, actual);
    }
}

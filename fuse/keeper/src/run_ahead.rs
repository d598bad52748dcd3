//! Space ahead of files that grow while no daemon is there to make it.
//!
//! Owns: which files those are, and how far ahead. Does not own: what the budget says; the next daemon counts what it
//! finds. Bounded by the ballast, slice for slice, and by the size of the files' tmpfs.
//!
//! A page that write(2) has to allocate is charged to the writer's memory cgroup; a writer in a small one is killed for
//! it. A daemon is away for some tens of milliseconds, in which a writer of 8 GB/s passes more than that.

use rustix::fs::{AtFlags, Dir, FallocateFlags, Mode, OFlags, fallocate, openat, statat};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// What moves at once: the ballast's folios.
const SLICE_BYTES: u64 = 2 << 20;
/// Kept ready ahead of a file that was seen to grow.
const LEAD_BYTES: u64 = 256 << 20;
/// Made ready in one go, before other files have their turn.
const STRIDE_BYTES: u64 = 64 << 20;
/// Files looked at: those that were begun last. More are not written at once by the ranks of one node.
const FILES_MAX: usize = 1024;

/// Files that may grow, and the ballast that gives way to them.
#[derive(Debug)]
pub(crate) struct RunAhead {
    growing: Vec<Growing>,
    /// Ballast files with what is left of each, the last first.
    ballast: Vec<(OwnedFd, u64)>,
}

#[derive(Debug)]
struct Growing {
    file: OwnedFd,
    size: u64,
    /// Where its allocated space ends.
    end: u64,
}

impl RunAhead {
    /// Looks which files were being written: closed ones have no space beyond their end.
    pub(crate) fn begin(files: BorrowedFd<'_>, ballast: BorrowedFd<'_>) -> io::Result<Self> {
        let mut numbers = numbers(files, "f-")?;
        numbers.sort_unstable();
        let mut growing = Vec::new();
        for number in numbers.into_iter().rev().take(FILES_MAX) {
            let name = format!("f-{number}");
            let Ok(stat) = statat(files, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let (size, held) = (stat.st_size.cast_unsigned(), stat.st_blocks.cast_unsigned() * 512);
            if size > 0 && held > size.next_multiple_of(4096) {
                let Ok(file) = openat(files, &name, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) else {
                    continue;
                };
                growing.push(Growing { file, size, end: held });
            }
        }
        let mut slices = Vec::new();
        for number in self::numbers(ballast, "b-")? {
            let flags = OFlags::RDWR | OFlags::CLOEXEC;
            let Ok(file) = openat(ballast, format!("b-{number}"), flags, Mode::empty()) else { continue };
            let stat = rustix::fs::fstat(&file)?;
            slices.push((file, stat.st_blocks.cast_unsigned() * 512));
        }
        Ok(Self { growing, ballast: slices })
    }

    /// One look at every file: those that have grown get their lead.
    pub(crate) fn look(&mut self) {
        for at in 0..self.growing.len() {
            let Ok(stat) = rustix::fs::fstat(&self.growing[at].file) else { continue };
            let file = &mut self.growing[at];
            let (size, held) = (stat.st_size.cast_unsigned(), stat.st_blocks.cast_unsigned() * 512);
            let grew = size > file.size;
            file.size = size;
            file.end = file.end.max(held).max(size.next_multiple_of(SLICE_BYTES));
            if grew && file.end < size + LEAD_BYTES {
                let wanted = (size + LEAD_BYTES - file.end).min(STRIDE_BYTES).next_multiple_of(SLICE_BYTES);
                let (from, mut given) = (file.end, 0);
                while given < wanted && self.free_slice() {
                    given += SLICE_BYTES;
                }
                // Without ballast there may be free memory still; the tmpfs says when there is none.
                let length = if given > 0 { given } else { SLICE_BYTES };
                let file = &mut self.growing[at];
                if fallocate(file.file.as_fd(), FallocateFlags::KEEP_SIZE, from, length).is_ok() {
                    file.end = from + length;
                }
            }
        }
    }

    /// Frees a slice of ballast; false when there is none.
    fn free_slice(&mut self) -> bool {
        while let Some((file, left)) = self.ballast.last_mut() {
            if *left < SLICE_BYTES {
                self.ballast.pop();
                continue;
            }
            *left -= SLICE_BYTES;
            let punch = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE;
            if fallocate(file.as_fd(), punch, *left, SLICE_BYTES).is_ok() {
                return true;
            }
        }
        false
    }
}

fn numbers(directory: BorrowedFd<'_>, prefix: &str) -> io::Result<Vec<u64>> {
    // Through a descriptor of its own: the position in a directory belongs to the open file, which others share.
    let own = openat(directory, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut numbers = Vec::new();
    for entry in Dir::read_from(&own)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy();
        numbers.extend(name.strip_prefix(prefix).and_then(|rest| rest.parse::<u64>().ok()));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{fstat, ftruncate, open};

    fn directory(path: &std::path::Path) -> OwnedFd {
        open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap()
    }

    fn file(directory: &OwnedFd, name: &str, size: u64, allocated: u64) -> OwnedFd {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let file = openat(directory, name, flags, Mode::RUSR | Mode::WUSR).unwrap();
        fallocate(&file, FallocateFlags::KEEP_SIZE, 0, allocated).unwrap();
        ftruncate(&file, size).unwrap();
        // Truncating gives back what lies beyond.
        fallocate(&file, FallocateFlags::KEEP_SIZE, 0, allocated).unwrap();
        file
    }

    fn held(file: &OwnedFd) -> u64 {
        fstat(file).unwrap().st_blocks.cast_unsigned() * 512
    }

    #[test]
    fn a_file_that_grows_gets_space_out_of_the_ballast_and_others_get_none() {
        let [files, ballast] = [0, 1].map(|_| tempfile::tempdir_in("/dev/shm").unwrap());
        let (files_fd, ballast_fd) = (directory(files.path()), directory(ballast.path()));
        let growing = file(&files_fd, "f-1", 4096, SLICE_BYTES);
        let resting = file(&files_fd, "f-2", 4096, SLICE_BYTES);
        let closed = file(&files_fd, "f-3", 4096, 4096);
        let slices = file(&ballast_fd, "b-1", 0, 4 * SLICE_BYTES);
        let mut ahead = RunAhead::begin(files_fd.as_fd(), ballast_fd.as_fd()).unwrap();
        ahead.look();
        assert_eq!((held(&growing), held(&slices)), (SLICE_BYTES, 4 * SLICE_BYTES), "nothing grew yet");
        rustix::io::pwrite(&growing, &[1; 4096], 4096).unwrap();
        ahead.look();
        assert_eq!(held(&growing), 5 * SLICE_BYTES, "all of the ballast");
        assert_eq!(held(&slices), 0);
        assert_eq!((held(&resting), held(&closed)), (SLICE_BYTES, 4096));
        assert_eq!(fstat(&growing).unwrap().st_size, 8192, "the size is the writer's");
    }
}

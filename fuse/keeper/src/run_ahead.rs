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
use std::time::{Duration, Instant};

/// What moves at once: the ballast's folios.
const SLICE_BYTES: u64 = 2 << 20;
/// Kept ready ahead of a file that was seen to grow.
const LEAD_BYTES: u64 = 256 << 20;
/// Made ready in one go, before other files have their turn.
const STRIDE_BYTES: u64 = 64 << 20;
/// Files looked at: those whose space was made last. A look at so many takes less than a millisecond.
const FILES_MAX: usize = 1024;

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Very many files at rest must not take a CPU for themselves: a look that finds none growing rests so many times as long.
const REST_TIMES: u32 = 4;
/// Files are run ahead of for so long after a death; a daemon that is not back by then is in trouble, and memory is not to
/// be given away for ever.
const RUN_AHEAD_FOR: Duration = Duration::from_secs(60);

/// Looks at the files again and again, while a daemon is away.
#[derive(Debug)]
pub(crate) struct RunAhead {
    space: Space,
    until: Instant,
    next_look: Instant,
}

/// Files that may grow, and the ballast that gives way to them.
#[derive(Debug)]
struct Space {
    directory: OwnedFd,
    files: Vec<Watched>,
    ballast_directory: OwnedFd,
    /// Ballast files with what is left of each, the last first.
    ballast: Vec<(OwnedFd, u64)>,
}

/// Any file: one whose writer has passed the space that was made for it looks like one that is closed.
#[derive(Debug)]
struct Watched {
    name: String,
    size: u64,
    /// Where its allocated space ends.
    end: u64,
    /// Opened when it grows.
    file: Option<OwnedFd>,
}

impl RunAhead {
    /// Begins with what is there now.
    pub(crate) fn begin(files: BorrowedFd<'_>, ballast: BorrowedFd<'_>) -> io::Result<Self> {
        let now = Instant::now();
        let space = Space::begin(files, ballast)?;
        Ok(Self { space, until: now + RUN_AHEAD_FOR, next_look: now + LOOK_EVERY })
    }

    /// How long until it is to be looked again.
    pub(crate) fn patience(&self) -> Duration {
        self.next_look.saturating_duration_since(Instant::now())
    }

    /// Looks when it is time; false when it has been long enough.
    pub(crate) fn goes_on(&mut self) -> bool {
        let begun = Instant::now();
        if begun >= self.next_look {
            let grew = self.space.look();
            let now = Instant::now();
            let rest = if grew { LOOK_EVERY } else { LOOK_EVERY.max((now - begun) * REST_TIMES) };
            self.next_look = now + rest;
        }
        begun < self.until
    }
}

impl Space {
    /// Takes down how large every file is.
    fn begin(files: BorrowedFd<'_>, ballast: BorrowedFd<'_>) -> io::Result<Self> {
        let mut numbers = numbers(files, "f-")?;
        numbers.sort_unstable();
        let mut watched = Vec::new();
        for number in numbers.into_iter().rev().take(FILES_MAX) {
            let name = format!("f-{number}");
            let Ok(stat) = statat(files, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let (size, held) = (stat.st_size.cast_unsigned(), stat.st_blocks.cast_unsigned() * 512);
            watched.push(Watched { name, size, end: held, file: None });
        }
        let mut slices = Vec::new();
        for number in self::numbers(ballast, "b-")? {
            let flags = OFlags::RDWR | OFlags::CLOEXEC;
            let Ok(file) = openat(ballast, format!("b-{number}"), flags, Mode::empty()) else { continue };
            let stat = rustix::fs::fstat(&file)?;
            slices.push((file, stat.st_blocks.cast_unsigned() * 512));
        }
        Ok(Self {
            directory: files.try_clone_to_owned()?,
            files: watched,
            ballast_directory: ballast.try_clone_to_owned()?,
            ballast: slices,
        })
    }

    /// One look at every file: those that have grown get their lead. True when one had.
    fn look(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.files.len() {
            let watched = &mut self.files[at];
            let Ok(stat) = statat(&self.directory, &watched.name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            let (size, held) = (stat.st_size.cast_unsigned(), stat.st_blocks.cast_unsigned() * 512);
            let grew = size > watched.size;
            any |= grew;
            watched.size = size;
            watched.end = watched.end.max(held).max(size.next_multiple_of(SLICE_BYTES));
            if grew && watched.end < size + LEAD_BYTES {
                self.lead(at);
            }
        }
        any
    }

    /// Makes the next stride of a file's lead ready.
    fn lead(&mut self, at: usize) {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let watched = &mut self.files[at];
        if watched.file.is_none() {
            watched.file = openat(&self.directory, &watched.name, flags, Mode::empty()).ok();
        }
        let (from, size) = (watched.end, watched.size);
        let wanted = (size + LEAD_BYTES - from).min(STRIDE_BYTES).next_multiple_of(SLICE_BYTES);
        let mut given = 0;
        while given < wanted && self.free_slice() {
            given += SLICE_BYTES;
        }
        // While a tier is young, most of its memory is in no file at all yet.
        let length = given + (wanted - given).min(self.unused_bytes());
        let watched = &mut self.files[at];
        let Some(file) = &watched.file else { return };
        if length > 0 && fallocate(file, FallocateFlags::KEEP_SIZE, from, length).is_ok() {
            watched.end = from + length;
        }
    }

    /// What neither files nor ballast hold of the files' tmpfs, whose size is what both may hold together; nothing where
    /// there is no such tmpfs, only a folder of another file system.
    fn unused_bytes(&self) -> u64 {
        let used = |directory| {
            let stat = rustix::fs::fstatfs(directory).ok()?;
            (stat.f_type == libc::TMPFS_MAGIC).then(|| {
                let block_bytes = stat.f_bsize.cast_unsigned();
                (stat.f_blocks * block_bytes, (stat.f_blocks - stat.f_bfree) * block_bytes)
            })
        };
        let (Some((size, files)), Some((_, ballast))) =
            (used(&self.directory), used(&self.ballast_directory))
        else {
            return 0;
        };
        size.saturating_sub(files + ballast) / SLICE_BYTES * SLICE_BYTES
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
        let slices = file(&ballast_fd, "b-1", 0, 4 * SLICE_BYTES);
        let mut ahead = Space::begin(files_fd.as_fd(), ballast_fd.as_fd()).unwrap();
        assert!(!ahead.look());
        assert_eq!((held(&growing), held(&slices)), (SLICE_BYTES, 4 * SLICE_BYTES), "nothing grew yet");
        rustix::io::pwrite(&growing, &[1; 4096], 4096).unwrap();
        assert!(ahead.look());
        assert_eq!(held(&slices), 0, "all of the ballast goes first");
        assert!(held(&growing) >= 5 * SLICE_BYTES, "{}", held(&growing));
        assert_eq!(held(&resting), SLICE_BYTES);
        assert_eq!(fstat(&growing).unwrap().st_size, 8192, "the size is the writer's");
    }

    #[test]
    fn a_writer_that_has_passed_its_space_is_run_ahead_of_too() {
        let [files, ballast] = [0, 1].map(|_| tempfile::tempdir_in("/dev/shm").unwrap());
        let (files_fd, ballast_fd) = (directory(files.path()), directory(ballast.path()));
        // As closed files look, and as a file does that was given and not yet written.
        let overrun = file(&files_fd, "f-1", SLICE_BYTES, SLICE_BYTES);
        let unwritten = file(&files_fd, "f-2", 0, SLICE_BYTES);
        let mut ahead = Space::begin(files_fd.as_fd(), ballast_fd.as_fd()).unwrap();
        rustix::io::pwrite(&overrun, &[1; 4096], SLICE_BYTES).unwrap();
        assert!(ahead.look());
        assert!(held(&overrun) > 2 * SLICE_BYTES, "{}", held(&overrun));
        rustix::io::pwrite(&unwritten, &[1; 4096], 0).unwrap();
        assert!(ahead.look());
        assert!(held(&unwritten) > SLICE_BYTES, "{}", held(&unwritten));
    }
}

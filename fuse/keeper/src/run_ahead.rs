//! Space ahead of files that grow while no daemon is there to make it.
//!
//! Owns: which files those are, and how far ahead. Does not own: the budget's account; the next daemon counts the space it finds. Bounded
//! by the ballast, slice for slice, and by the size of the files' tmpfs.
//!
//! A page that write(2) has to allocate is charged to the writer's memory cgroup; a writer in a small one is killed for
//! it. A daemon is away for some tens of milliseconds, in which a writer of 8 GB/s passes more than that.

use rustix::fs::{AtFlags, Dir, FallocateFlags, Mode, OFlags, fallocate, openat, statat};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Unit of all moves: the ballast's folios.
const SLICE_BYTES: u64 = 2 << 20;
/// Space kept ready ahead of a file that was seen to grow.
const LEAD_BYTES: u64 = 256 << 20;
/// Space made ready in one go, before other files have their turn.
const STRIDE_BYTES: u64 = 64 << 20;
/// A file's lead is at most this many times its size, as in the daemon.
const LEAD_TIMES_SIZE: u64 = 32;
/// Divisor of the ballast and of the unused memory for the part that all leads of one absence may take: an open file does
/// not give back the space it got.
const LEADS_PART: u64 = 2;
/// Divisor of the tier for the part that is left to writers without a lead.
const HEADROOM_PART: u64 = 16;
/// The most files that are examined: those whose space was made last. Examining so many takes less than a millisecond.
const FILES_MAX: usize = 1024;

/// Interval between two examinations.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Very many files at rest must not occupy a CPU: an examination that finds no file growing is followed by a rest of so many times its
/// duration.
const REST_TIMES: u32 = 4;
/// How long files get leads after a death. A daemon that is not back by then is in trouble, and memory must not be given away for ever.
const RUN_AHEAD_FOR: Duration = Duration::from_secs(60);

/// Examines the files at intervals, while a daemon is away.
#[derive(Debug)]
pub(crate) struct RunAhead {
    space: Space,
    until: Instant,
    next_look: Instant,
}

/// Files that may grow, and the ballast that is freed for them.
#[derive(Debug)]
struct Space {
    directory: OwnedFd,
    files: Vec<Watched>,
    ballast_directory: OwnedFd,
    /// Numbers of ballast files, and the open ballast file with the bytes left in it.
    ballast: Vec<u64>,
    open_ballast: Option<(OwnedFd, u64)>,
    /// Bytes that all leads together may still take.
    left: u64,
    /// Index of the file whose turn is next.
    turn: usize,
}

/// Any file: if its writer has passed the space that was made for it, it looks like a closed file.
#[derive(Debug)]
struct Watched {
    name: String,
    size: u64,
    /// The end of its allocated space.
    end: u64,
    /// Whether the file grew and has not had its turn since.
    grows: bool,
    /// The file, opened when it grows.
    file: Option<OwnedFd>,
}

impl RunAhead {
    /// Begins with the present state of the files.
    pub(crate) fn begin(files: BorrowedFd<'_>, ballast: BorrowedFd<'_>) -> io::Result<Self> {
        let now = Instant::now();
        let space = Space::begin(files, ballast)?;
        Ok(Self { space, until: now + RUN_AHEAD_FOR, next_look: now + LOOK_EVERY })
    }

    /// Returns the time until the next examination.
    pub(crate) fn patience(&self) -> Duration {
        self.next_look.saturating_duration_since(Instant::now())
    }

    /// Examines the files when it is time; returns false when the daemon has been away too long.
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
    /// Records the size of every file.
    fn begin(files: BorrowedFd<'_>, ballast: BorrowedFd<'_>) -> io::Result<Self> {
        let mut numbers = numbers(files, "f-")?;
        numbers.sort_unstable();
        let mut watched = Vec::new();
        for number in numbers.into_iter().rev().take(FILES_MAX) {
            let name = format!("f-{number}");
            let Ok(stat) = statat(files, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let (size, held) = (stat.st_size.cast_unsigned(), stat.st_blocks.cast_unsigned() * 512);
            watched.push(Watched { name, size, end: held, grows: false, file: None });
        }
        let mut space = Self {
            directory: files.try_clone_to_owned()?,
            files: watched,
            ballast_directory: ballast.try_clone_to_owned()?,
            ballast: self::numbers(ballast, "b-")?,
            open_ballast: None,
            left: 0,
            turn: 0,
        };
        let ballast_bytes = size_and_used(&space.ballast_directory).map_or(0, |(_, used)| used);
        space.left = (ballast_bytes + space.unused_bytes()) / LEADS_PART;
        Ok(space)
    }

    /// Examines every file once, and gives one that has grown the next stride of its lead. Returns whether a file had grown.
    fn look(&mut self) -> bool {
        let mut grown = None;
        for at in 0..self.files.len() {
            // The next examination begins after the file that got something in this one.
            let at = (self.turn + at) % self.files.len();
            let watched = &mut self.files[at];
            let Ok(stat) = statat(&self.directory, &watched.name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            let (size, held) = (stat.st_size.cast_unsigned(), stat.st_blocks.cast_unsigned() * 512);
            watched.grows |= size > watched.size;
            watched.size = size;
            watched.end = watched.end.max(held).max(size.next_multiple_of(SLICE_BYTES));
            watched.grows &= watched.wants() > 0;
            if watched.grows {
                grown = grown.or(Some(at));
            }
        }
        if let Some(at) = grown {
            self.files[at].grows = false;
            self.turn = at + 1;
            self.lead(at);
        }
        grown.is_some()
    }

    /// Makes the next stride of a file's lead ready, as far as there is memory for it.
    fn lead(&mut self, at: usize) {
        let watched = &mut self.files[at];
        if watched.file.is_none() {
            let flags = OFlags::RDWR | OFlags::CLOEXEC;
            watched.file = openat(&self.directory, &watched.name, flags, Mode::empty()).ok();
        }
        if watched.file.is_none() {
            return;
        }
        let (from, wanted) = (watched.end, watched.wants().min(self.left));
        let mut given = 0;
        while given < wanted && self.free_slice() {
            given += SLICE_BYTES;
        }
        // While a tier is young, most of its memory is in no file at all yet. Slices freed just now are unused too.
        let length = if given < wanted { wanted.min(given.max(self.unused_bytes())) } else { given };
        let watched = &mut self.files[at];
        let Some(file) = &watched.file else { return };
        if length > 0 && fallocate(file, FallocateFlags::KEEP_SIZE, from, length).is_ok() {
            watched.end = from + length;
            self.left = self.left.saturating_sub(length);
        }
    }

    /// Returns the bytes of the files' tmpfs that neither files nor ballast hold, less some for writers without a lead. The size of that
    /// tmpfs is what both may hold together. Returns 0 if there is no such tmpfs, only a folder of another file system.
    fn unused_bytes(&self) -> u64 {
        let device = |directory: &OwnedFd| rustix::fs::fstat(directory).map(|stat| stat.st_dev).ok();
        if device(&self.directory) == device(&self.ballast_directory) {
            return 0;
        }
        let (Some((size, files)), Some((_, ballast))) =
            (size_and_used(&self.directory), size_and_used(&self.ballast_directory))
        else {
            return 0;
        };
        size.saturating_sub(files + ballast + size / HEADROOM_PART) / SLICE_BYTES * SLICE_BYTES
    }

    /// Frees a slice of ballast; returns false when there is none.
    fn free_slice(&mut self) -> bool {
        loop {
            let Some((file, left)) = &mut self.open_ballast else {
                // Opened one at a time: a large tier has thousands, and this process may open few.
                let Some(number) = self.ballast.pop() else { return false };
                let flags = OFlags::RDWR | OFlags::CLOEXEC;
                let opened = openat(&self.ballast_directory, format!("b-{number}"), flags, Mode::empty());
                let with_size = opened.and_then(|file| rustix::fs::fstat(&file).map(|stat| (file, stat)));
                self.open_ballast =
                    with_size.ok().map(|(file, stat)| (file, stat.st_blocks.cast_unsigned() * 512));
                continue;
            };
            if *left < SLICE_BYTES {
                self.open_ballast = None;
                continue;
            }
            *left -= SLICE_BYTES;
            let punch = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE;
            if fallocate(file.as_fd(), punch, *left, SLICE_BYTES).is_ok() {
                return true;
            }
        }
    }
}

impl Watched {
    /// Returns the bytes that the file's lead still lacks, one stride at most. A small file usually ends before it needs much.
    fn wants(&self) -> u64 {
        let lead = LEAD_BYTES.min(self.size.saturating_mul(LEAD_TIMES_SIZE)).next_multiple_of(SLICE_BYTES);
        (self.size + lead).saturating_sub(self.end).min(STRIDE_BYTES) / SLICE_BYTES * SLICE_BYTES
    }
}

/// Returns size and used bytes of the tmpfs that a directory is on, or `None` on another file system.
fn size_and_used(directory: &OwnedFd) -> Option<(u64, u64)> {
    let stat = rustix::fs::fstatfs(directory).ok()?;
    let block_bytes = stat.f_bsize.cast_unsigned();
    let used_bytes = stat.f_blocks.saturating_sub(stat.f_bfree) * block_bytes;
    (stat.f_type == libc::TMPFS_MAGIC).then_some((stat.f_blocks * block_bytes, used_bytes))
}

fn numbers(directory: BorrowedFd<'_>, prefix: &str) -> io::Result<Vec<u64>> {
    // Through a descriptor of its own: the position in a directory belongs to the open file, which other processes share.
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
        // Truncating frees the space beyond.
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
        // The figure counts the whole file system, which other tests use too.
        ahead.left = u64::MAX;
        assert!(!ahead.look());
        assert_eq!((held(&growing), held(&slices)), (SLICE_BYTES, 4 * SLICE_BYTES), "nothing grew yet");
        rustix::io::pwrite(&growing, &[1; 4096], 4096).unwrap();
        assert!(!ahead.look(), "so small a file has enough");
        rustix::io::pwrite(&growing, &[1; 4096], SLICE_BYTES / 2).unwrap();
        assert!(ahead.look());
        assert_eq!(held(&slices), 0, "all of the ballast");
        assert_eq!(held(&growing), 5 * SLICE_BYTES);
        assert_eq!(held(&resting), SLICE_BYTES);
        assert_eq!(fstat(&growing).unwrap().st_size, SLICE_BYTES.cast_signed() / 2 + 4096, "its writer's");
    }

    #[test]
    fn what_all_leads_may_take_is_kept_to() {
        let [files, ballast] = [0, 1].map(|_| tempfile::tempdir_in("/dev/shm").unwrap());
        let (files_fd, ballast_fd) = (directory(files.path()), directory(ballast.path()));
        let growing = file(&files_fd, "f-1", SLICE_BYTES, SLICE_BYTES);
        let slices = file(&ballast_fd, "b-1", 0, 4 * SLICE_BYTES);
        let mut ahead = Space::begin(files_fd.as_fd(), ballast_fd.as_fd()).unwrap();
        assert!(ahead.left >= 5 * SLICE_BYTES / LEADS_PART, "{}", ahead.left);
        ahead.left = 3 * SLICE_BYTES;
        rustix::io::pwrite(&growing, &[1; 4096], SLICE_BYTES).unwrap();
        assert!(ahead.look());
        assert_eq!((held(&slices), ahead.left), (SLICE_BYTES, 0));
        rustix::io::pwrite(&growing, &[1; 4096], SLICE_BYTES + 4096).unwrap();
        ahead.look();
        assert_eq!(held(&slices), SLICE_BYTES, "there is more, but not for leads");
    }

    #[test]
    fn a_writer_that_has_passed_its_space_is_run_ahead_of_too_and_each_has_its_turn() {
        let [files, ballast] = [0, 1].map(|_| tempfile::tempdir_in("/dev/shm").unwrap());
        let (files_fd, ballast_fd) = (directory(files.path()), directory(ballast.path()));
        // Like closed files.
        let size = SLICE_BYTES / 8;
        let overrun = [1, 2].map(|number| file(&files_fd, &format!("f-{number}"), size, size));
        let slices = file(&ballast_fd, "b-1", 0, 10 * SLICE_BYTES);
        let mut ahead = Space::begin(files_fd.as_fd(), ballast_fd.as_fd()).unwrap();
        ahead.left = u64::MAX;
        for file in &overrun {
            rustix::io::pwrite(file, &[1; 4096], size).unwrap();
        }
        assert!(ahead.look() && ahead.look() && !ahead.look());
        assert!(held(&slices) <= 4 * SLICE_BYTES, "{}", held(&slices));
        for file in &overrun {
            assert!(held(file) >= 3 * SLICE_BYTES, "{}", held(file));
        }
    }
}

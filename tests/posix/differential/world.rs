//! A directory of one scenario, and the results seen there.
//!
//! Owns: short functions for the calls, and the record of each result. Does not own: which calls are made.

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use std::cell::RefCell;
use std::ffi::CString;
use std::fmt::Debug;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long the mount may take to seal a closed file.
const SEALED_WITHIN: Duration = Duration::from_secs(20);

pub(crate) struct World {
    root: PathBuf,
    seen: RefCell<Vec<String>>,
}

impl World {
    pub(crate) fn new(root: PathBuf) -> Self {
        fs::create_dir_all(&root).expect("a scenario's directory");
        Self { root, seen: RefCell::default() }
    }

    pub(crate) fn seen(self) -> Vec<String> {
        self.seen.into_inner()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.root.clone() } else { self.root.join(name) }
    }

    /// Writes and closes a file.
    pub(crate) fn put(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).expect("a scenario's file");
    }

    /// Writes a file and waits until it is at rest, which means sealed on the mount.
    pub(crate) fn at_rest(&self, name: &str, bytes: &[u8]) {
        self.put(name, bytes);
        self.rest(name);
    }

    /// Waits until the mount has sealed a closed file. In other places, returns at once.
    pub(crate) fn rest(&self, name: &str) {
        let path = self.path(name);
        if rustix::fs::getxattr(&path, "user.tidemark.copies", &mut [0; 64]).is_err() {
            return;
        }
        let until = Instant::now() + SEALED_WITHIN;
        while rustix::fs::getxattr(&path, "user.tidemark.crc64nvme", &mut [0; 64]).is_err() {
            assert!(Instant::now() < until, "{name} was not sealed");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Records the result of a call.
    pub(crate) fn saw<T: Debug, E: Into<io::Error>>(&self, what: &str, came: Result<T, E>) {
        let came = match came {
            Ok(value) => format!("{value:?}"),
            Err(error) => {
                let error: io::Error = error.into();
                error.raw_os_error().map_or_else(|| format!("{error}"), |code| format!("errno {code}"))
            }
        };
        self.seen.borrow_mut().push(format!("{what}: {came}"));
    }

    pub(crate) fn note(&self, what: &str, value: impl Debug) {
        self.saw(what, Ok::<_, Errno>(value));
    }

    pub(crate) fn open(&self, name: &str, flags: OFlags) -> Result<File, Errno> {
        openat(CWD, self.path(name), flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o644)).map(File::from)
    }

    /// Opens a file, and records only whether that succeeded.
    pub(crate) fn opens(&self, name: &str, flags: OFlags) -> Option<File> {
        let opened = self.open(name, flags);
        self.saw("open", opened.as_ref().map(|_| ()).map_err(|errno| *errno));
        opened.ok()
    }

    /// Records kind, size, links and mode of a name.
    pub(crate) fn stat(&self, name: &str) {
        let shown = fs::symlink_metadata(self.path(name)).map(|found| {
            let kind = found.file_type();
            let letter = match () {
                () if kind.is_file() => 'f',
                () if kind.is_dir() => 'd',
                () if kind.is_symlink() => 'l',
                () if kind.is_fifo() => 'p',
                () if kind.is_socket() => 's',
                () => '?',
            };
            // The size and the links of a directory depend on the file system.
            let (size, links) = if kind.is_dir() { (0, 0) } else { (found.len(), found.nlink()) };
            format!("{letter} {size} {links} {:o}", found.mode() & 0o7777)
        });
        self.saw(&format!("stat {name}"), shown);
    }

    pub(crate) fn read(&self, name: &str) {
        self.saw(&format!("read {name}"), fs::read(self.path(name)).map(|bytes| short(&bytes)));
    }

    /// Records the names in a directory, in order.
    pub(crate) fn list(&self, name: &str) {
        let listed = fs::read_dir(self.path(name)).map(|entries| {
            let mut names: Vec<_> = entries
                .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
                .map(|name| name.unwrap_or_else(|error| error.to_string()))
                .collect();
            names.sort();
            names
        });
        self.saw(&format!("list {name}"), listed);
    }
}

/// Calls truncate(2), with which the file system sees a path and no descriptor.
pub(crate) fn truncate(path: &Path, size: u64) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: truncate(2) reads one string that ends with a zero, which lives until the call returns.
    match unsafe { libc::truncate(path.as_ptr(), size.cast_signed()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Formats bytes as text, and long ones by their length and sum.
pub(crate) fn short(bytes: &[u8]) -> String {
    if bytes.len() <= 64 {
        String::from_utf8_lossy(bytes).into_owned()
    } else {
        let sum: u64 =
            bytes.iter().enumerate().map(|(at, byte)| (at as u64 % 251 + 1) * u64::from(*byte)).sum();
        format!("{} bytes, {sum}", bytes.len())
    }
}

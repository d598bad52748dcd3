//! The lease of one machine: a locked file with the epoch inside.
//!
//! Owns: the file, its lock and the number. Does not own: anything between machines; flock on a network mount is not
//! relied on.

use super::LeaseError;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tidemark_protocol::id::Epoch;

/// The longest content: a decimal u64 and a newline; anything longer is another file.
const CONTENT_BYTES: u64 = 32;

/// How often the file may be replaced between opening and locking it before that is an error.
const OPEN_ATTEMPTS: u32 = 8;

/// The lease of this machine, held until this value is dropped or its process dies, however it dies; the kernel
/// releases the lock. There is no time-out, so a stopped process keeps it.
#[derive(Debug)]
pub struct FileLease {
    epoch: Epoch,
    path: PathBuf,
    /// The open file, whose lock lives as long as this value.
    _file: File,
}

impl FileLease {
    /// Takes the lease with an epoch above every epoch that this file issued and above `above`. `above` is the highest
    /// epoch that the caller found elsewhere (in Tier-3): the file may have been deleted. The epoch is durable before
    /// this returns. Returns [`LeaseError::Held`] at once when another process has the lease.
    pub fn acquire(path: &Path, above: Option<Epoch>) -> Result<Self, LeaseError> {
        let failed = |operation| move |source| LeaseError::File { path: path.to_owned(), operation, source };
        let mut file = Self::open_locked(path)?;
        let mut text = String::new();
        (&mut file).take(CONTENT_BYTES).read_to_string(&mut text).map_err(failed("read"))?;
        // Empty is a new file, or a crash before the first write: no epoch was issued.
        let last = match text.trim() {
            "" => Epoch(0),
            digits => digits
                .parse()
                .map(Epoch)
                .map_err(|_| LeaseError::Garbled { path: path.to_owned(), text: text.clone() })?,
        };
        let highest = above.map_or(last, |above| last.max(above));
        let Some(epoch) = highest.0.checked_add(1).map(Epoch) else {
            return Err(LeaseError::Garbled { path: path.to_owned(), text });
        };
        // Twenty digits always: overwritten in place the number is never a mixture of two lengths.
        file.write_all_at(format!("{:020}\n", epoch.0).as_bytes(), 0).map_err(failed("write"))?;
        file.sync_all().map_err(failed("fsync"))?;
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or_else(|| Path::new("."));
        File::open(directory).and_then(|open| open.sync_all()).map_err(failed("fsync of the directory"))?;
        Ok(Self { epoch, path: path.to_owned(), _file: file })
    }

    fn open_locked(path: &Path) -> Result<File, LeaseError> {
        let failed =
            |operation, source: io::Error| LeaseError::File { path: path.to_owned(), operation, source };
        for _ in 0..OPEN_ATTEMPTS {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(path)
                .map_err(|error| failed("open", error))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(LeaseError::Held { path: path.to_owned() }),
                Err(error) => return Err(failed("lock", error.into())),
            }
            // A lock on a file that was deleted meanwhile excludes no process.
            let ours = file.metadata().map_err(|error| failed("stat", error))?.ino();
            if std::fs::metadata(path).is_ok_and(|there| there.ino() == ours) {
                return Ok(file);
            }
        }
        Err(failed("open", io::Error::other("the file is replaced again and again")))
    }

    /// Returns the fencing number of this term.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time_and_each_term_has_a_higher_epoch() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("lease");
        let first = FileLease::acquire(&path, None).expect("first");
        assert_eq!(first.epoch(), Epoch(1));
        assert!(matches!(FileLease::acquire(&path, None), Err(LeaseError::Held { .. })));
        drop(first);
        let second = FileLease::acquire(&path, None).expect("second");
        assert_eq!(second.epoch(), Epoch(2));
        drop(second);
        assert_eq!(FileLease::acquire(&path, Some(Epoch(40))).expect("third").epoch(), Epoch(41));
        assert_eq!(FileLease::acquire(&path, Some(Epoch(3))).expect("fourth").epoch(), Epoch(42));
    }

    #[test]
    fn a_file_that_was_deleted_does_not_bring_an_old_epoch_back() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("lease");
        let held = FileLease::acquire(&path, Some(Epoch(9))).expect("first");
        std::fs::remove_file(&path).expect("remove");
        drop(held);
        assert_eq!(FileLease::acquire(&path, Some(Epoch(10))).expect("again").epoch(), Epoch(11));
    }

    #[test]
    fn what_is_no_epoch_is_refused_and_kept() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("lease");
        for text in ["hello", "18446744073709551615", "-1"] {
            std::fs::write(&path, text).expect("write");
            let error = FileLease::acquire(&path, None).expect_err(text);
            assert!(matches!(error, LeaseError::Garbled { .. }), "{error}");
            assert_eq!(std::fs::read_to_string(&path).expect("read"), text);
        }
    }
}

//! The content of a name, read through the mount with plain calls and compared with what is
//! expected.
//!
//! Owns: the reading. Does not own: which of several states is right (`claims`).

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use tidemark_tests::campaign::event::{Bytes, Holds};

/// Bytes hashed at a time.
const READ_BYTES: usize = 1 << 20;

/// Whether anything has the name.
pub(crate) fn is_there(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reads the content of a name to its end.
pub(crate) fn look(path: &Path) -> io::Result<Holds> {
    match File::open(path) {
        Ok(mut file) if file.metadata()?.is_file() => Ok(Holds::Whole(read(&mut file, u64::MAX)?)),
        Ok(_) => Err(io::Error::other("a directory is in its place")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Holds::Absent),
        Err(error) => Err(error),
    }
}

fn read(file: &mut File, most_bytes: u64) -> io::Result<Bytes> {
    let (mut hasher, mut size_bytes) = (blake3::Hasher::new(), 0);
    let mut buffer = vec![0; READ_BYTES];
    let mut file = file.take(most_bytes);
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok(Bytes { size_bytes, blake3: hasher.finalize().to_string() });
        }
        hasher.update(&buffer[..count]);
        size_bytes += count as u64;
    }
}

/// Checks that a name holds what it should. The error says what it holds instead.
pub(crate) fn compare(path: &Path, holds: &Holds, compared_bytes: &mut u64) -> Result<(), String> {
    let text = |error: io::Error| format!("cannot be read: {error}; it should hold {holds:?}");
    if *holds == Holds::Absent {
        return match is_there(path).map_err(text)? {
            false => Ok(()),
            true => Err("is there, although it was removed".into()),
        };
    }
    let mut file = File::open(path).map_err(text)?;
    let (wanted, seen) = match holds {
        Holds::Absent => unreachable!("answered above"),
        Holds::Whole(bytes) => (bytes, read(&mut file, u64::MAX).map_err(text)?),
        Holds::Begins(bytes) => (bytes, read(&mut file, bytes.size_bytes).map_err(text)?),
    };
    *compared_bytes += seen.size_bytes;
    if seen == *wanted { Ok(()) } else { Err(format!("holds {seen:?}, it should hold {holds:?}")) }
}

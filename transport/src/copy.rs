//! Copying a piece of one local file into another.
//!
//! Owns: the loop that makes partial reads and writes whole. Does not own: sockets.

use std::io;
use std::ops::Range;

use crate::link::{BytesSink, BytesSource};

/// Bytes of one read: stays in a core's second-level cache, so that the write finds them there.
const BUFFER_BYTES: usize = 256 << 10;

/// Copies `range` to the same offsets, and says which side failed. Blocks for as long as the files do.
pub(crate) fn piece(
    from: &dyn BytesSource,
    into: &dyn BytesSink,
    range: &Range<u64>,
) -> Result<(), (&'static str, io::Error)> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut at = range.start;
    while at < range.end {
        let wanted = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(BUFFER_BYTES);
        let read = read_at(from, &mut buffer[..wanted], at).map_err(|error| ("reading", error))?;
        write_at(into, &buffer[..read], at).map_err(|error| ("writing", error))?;
        at += read as u64;
    }
    Ok(())
}

/// Reads some bytes, at least one; the end of the file is an error.
pub(crate) fn read_at(from: &dyn BytesSource, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    match rustix::io::retry_on_intr(|| rustix::io::pread(from.file(), &mut *buffer, at))? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        read => Ok(read),
    }
}

/// Writes all bytes.
pub(crate) fn write_at(into: &dyn BytesSink, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::retry_on_intr(|| rustix::io::pwrite(into.file(), bytes, at))? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => {
                bytes = &bytes[written..];
                at += written as u64;
            }
        }
    }
    Ok(())
}

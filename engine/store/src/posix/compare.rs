//! Comparison of parts with the file once they are written: a damaged part is refused, as S3 refuses one.
//!
//! Owns: writing with that comparison. Does not own: when the file is durable and named (`files`).
//!
//! The comparison finds damage on the way into the kernel. Later damage is reported by fsync, or found by
//! `verify --deep`. Reading everything again from the device before it is named took three times as long as
//! writing it, where reads are the slower half (design note 0006).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes read back at a time, by each of the parts in flight. The bytes are still in a core's cache when they are
/// compared.
const SCRATCH_BYTES: usize = 256 << 10;

/// Maximum number of writes of a part that reads back wrong: a bit that flipped on its way is right the second
/// time.
const WRITES_MAX: u32 = 2;

/// Writes `bytes` at `offset` and compares them with the file's content.
///
/// # Errors
/// The file system's own errors; and an error that names the first offset at which it gives back other bytes than
/// were written.
pub(super) fn write_compared(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut writes = 0;
    loop {
        writes += 1;
        file.write_all_at(bytes, offset)?;
        match first_difference(file, bytes, offset)? {
            None => return Ok(()),
            Some(at) if writes == WRITES_MAX => {
                return Err(io::Error::other(format!(
                    "the file system gives back other bytes than were written, first at offset {at}, {writes} \
                     times; check this host's memory and the file system"
                )));
            }
            Some(at) => tracing::warn!(at, "a part reads back other bytes than were written; written again"),
        }
    }
}

/// Whether a differing byte is found.
pub(super) fn finds_damage(file: &File) -> io::Result<bool> {
    let mut bytes = [0x5a_u8; 64];
    write_compared(file, &bytes, 0)?;
    bytes[17] ^= 1;
    Ok(first_difference(file, &bytes, 0)? == Some(17))
}

/// Returns the offset in the file of the first byte that differs from `bytes`, which begin at `offset`.
fn first_difference(file: &File, bytes: &[u8], offset: u64) -> io::Result<Option<u64>> {
    let mut scratch = vec![0; SCRATCH_BYTES.min(bytes.len())];
    let mut at = offset;
    for piece in bytes.chunks(SCRATCH_BYTES) {
        let found = &mut scratch[..piece.len()];
        file.read_exact_at(found, at)?;
        if found != piece {
            let same = found.iter().zip(piece).take_while(|(found, wrote)| found == wrote).count();
            return Ok(Some(at + same as u64));
        }
        at += piece.len() as u64;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_arrives_and_the_first_other_byte_is_named() {
        let file = tempfile::tempfile().expect("a file");
        let mut bytes: Vec<u8> =
            (0..2 * SCRATCH_BYTES + 5).map(|i| u8::try_from(i * 7 % 251).unwrap()).collect();
        write_compared(&file, &bytes, 3).expect("write");
        assert_eq!(first_difference(&file, &bytes, 3).expect("read"), None);
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        assert_eq!(first_difference(&file, &bytes, 3).expect("read"), Some(3 + last as u64));
        assert!(finds_damage(&file).expect("probe"));
        write_compared(&file, &[], 0).expect("nothing to write is no error");
    }
}

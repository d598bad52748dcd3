//! HDF5: the superblock, which contains the end of the file.
//!
//! Owns: versions 0 to 3 of it at the beginning of a file. Does not own: groups and datasets. Source: the HDF5 file format
//! specification 3.0, II.A.
//!
//! A file that an exception closed is a valid one with fewer datasets. A file that was cut after a flush has the state of that flush.
//! Such files count as whole here.

use crate::Read;
use crate::source::{Source, Stop};

pub(crate) const SIGNATURE: &[u8] = b"\x89HDF\r\n\x1a\n";
/// Bytes of the widest superblock that are needed: four addresses of eight bytes and a checksum. Old versions have more.
const SUPERBLOCK_BYTES: usize = 60;
/// Flag of version 3: a process has the file open for writing.
const OPEN_FOR_WRITING: u8 = 1;

/// Reads the superblock of a file in `length` bytes from `start` on.
pub(crate) fn read(source: &mut Source<'_>, start: u64, length: u64) -> Read {
    let block: [u8; SUPERBLOCK_BYTES] = read_block(source, start, length)?;
    let version = block[8];
    let (width, base_at, end_at) = match version {
        // Version 1 has four more numbers of two bytes.
        0 | 1 => (block[13], 24 + 4 * usize::from(version), 2),
        2 | 3 => (block[9], 12, 2),
        _ => {
            return Err(Stop::unknown(format!(
                "its superblock has version {version}, and 3 is the newest known"
            )));
        }
    };
    let address = |index: usize| match width {
        4 => block
            .get(base_at + 4 * index..)
            .and_then(|rest| rest.first_chunk())
            .map(|b| u32::from_le_bytes(*b).into()),
        8 => block
            .get(base_at + 8 * index..)
            .and_then(|rest| rest.first_chunk())
            .map(|b| u64::from_le_bytes(*b)),
        _ => None,
    };
    let (Some(base), Some(end)) = (address(0), address(end_at)) else {
        return Err(Stop::unknown(format!("its addresses have {width} bytes")));
    };
    if version >= 2 {
        let checked = base_at + 4 * usize::from(width);
        let said = block.get(checked..).and_then(|rest| rest.first_chunk()).map(|b| u32::from_le_bytes(*b));
        let found = block.get(..checked).map(checksum);
        if let (Some(said), Some(found)) = (said, found)
            && said != found
        {
            return Err(Stop::broken(format!(
                "the checksum of its superblock is {found:08x}, and the superblock says {said:08x}"
            )));
        }
    }
    if version == 3 && block[11] & OPEN_FOR_WRITING != 0 {
        return Err(Stop::broken(
            "its superblock says that it is open for writing, and whoever closes it takes that away",
        ));
    }
    if base != 0 {
        return Err(Stop::unknown(format!("its addresses count from {base}")));
    }
    if end > length {
        // Several files that are one share these addresses: old versions say so in a driver's block, newer ones may in an extension.
        // Each of several files has room for more than a superblock.
        let undefined = if width == 4 { u64::from(u32::MAX) } else { u64::MAX };
        let elsewhere = address(if version < 2 { 3 } else { 1 }).is_none_or(|address| address != undefined);
        if elsewhere && length >= SUPERBLOCK_BYTES as u64 {
            return Err(Stop::unknown(format!("it ends at {length} of {end}, and may go on in other files")));
        }
        return Err(Stop::broken(format!(
            "its superblock says that it ends at {end}, and it ends at {length}"
        )));
    }
    if end < length {
        return Err(Stop::unknown(format!(
            "its superblock says that it ends at {end}, and it goes on to {length}"
        )));
    }
    Ok(format!("it ends at {end}, as its superblock says"))
}

/// Reads the superblock; a smaller one is followed by zeros.
fn read_block(source: &mut Source<'_>, start: u64, length: u64) -> Result<[u8; SUPERBLOCK_BYTES], Stop> {
    let mut block = [0; SUPERBLOCK_BYTES];
    let held = usize::try_from(length).unwrap_or(SUPERBLOCK_BYTES).min(SUPERBLOCK_BYTES);
    source.read(start, &mut block[..held])?;
    if !block.starts_with(SIGNATURE) {
        return Err(Stop::unknown("it does not begin with the signature of HDF5"));
    }
    // The smallest superblock has 48 bytes.
    if held < 48 {
        return Err(Stop::broken(format!("its superblock is cut: the file ends at {length}")));
    }
    Ok(block)
}

/// Returns Bob Jenkins' lookup3 with the initial value 0, as HDF5 sums its metadata.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let start = 0xdead_beef_u32.wrapping_add(length);
    let (mut a, mut b, mut c) = (start, start, start);
    let mut rest = bytes;
    while rest.len() > 12 {
        let (block, after) = rest.split_at(12);
        (a, b, c) =
            (a.wrapping_add(word(block, 0)), b.wrapping_add(word(block, 4)), c.wrapping_add(word(block, 8)));
        (a, b, c) = mix(a, b, c);
        rest = after;
    }
    if rest.is_empty() {
        return c;
    }
    (a, b, c) = (a.wrapping_add(word(rest, 0)), b.wrapping_add(word(rest, 4)), c.wrapping_add(word(rest, 8)));
    last(a, b, c)
}

/// Returns four bytes; bytes beyond the end count as zeros.
fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    for (byte, place) in bytes.iter().skip(at).zip(&mut word) {
        *place = *byte;
    }
    u32::from_le_bytes(word)
}

fn mix(mut a: u32, mut b: u32, mut c: u32) -> (u32, u32, u32) {
    a = a.wrapping_sub(c) ^ c.rotate_left(4);
    c = c.wrapping_add(b);
    b = b.wrapping_sub(a) ^ a.rotate_left(6);
    a = a.wrapping_add(c);
    c = c.wrapping_sub(b) ^ b.rotate_left(8);
    b = b.wrapping_add(a);
    a = a.wrapping_sub(c) ^ c.rotate_left(16);
    c = c.wrapping_add(b);
    b = b.wrapping_sub(a) ^ a.rotate_left(19);
    a = a.wrapping_add(c);
    c = c.wrapping_sub(b) ^ b.rotate_left(4);
    b = b.wrapping_add(a);
    (a, b, c)
}

fn last(mut a: u32, mut b: u32, mut c: u32) -> u32 {
    c = (c ^ b).wrapping_sub(b.rotate_left(14));
    a = (a ^ c).wrapping_sub(c.rotate_left(11));
    b = (b ^ a).wrapping_sub(a.rotate_left(25));
    c = (c ^ b).wrapping_sub(b.rotate_left(16));
    a = (a ^ c).wrapping_sub(c.rotate_left(4));
    b = (b ^ a).wrapping_sub(a.rotate_left(14));
    (c ^ b).wrapping_sub(b.rotate_left(24))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values given by the hash's author.
    #[test]
    fn the_checksum_is_lookup3() {
        assert_eq!(checksum(b""), 0xdead_beef);
        assert_eq!(checksum(b"Four score and seven years ago"), 0x1777_0551);
    }
}

//! tar: headers and members in blocks, and two blocks of zeros at the end.
//!
//! Owns: ustar, and the long names and large sizes of pax and GNU. Members that were not added leave no trace. Sources:
//! POSIX.1-2024, pax, "ustar Interchange Format" and "pax Header Block"; the manual of GNU tar, "Basic Tar Format".

use crate::Read;
use crate::source::{Source, Stop};

const BLOCK: usize = 512;
const BLOCK_BYTES: u64 = BLOCK as u64;
/// Maximum number of bytes of a pax header that are read. A header may hold any attributes; the usual writers put the size
/// first.
const MAX_PAX_BYTES: usize = 64 << 10;

type Block = [u8; BLOCK];

/// Whether the file begins with a header that its own checksum proves.
pub(crate) fn begins(head: &[u8]) -> bool {
    head.first_chunk().is_some_and(|block: &Block| &block[257..262] == b"ustar" && is_summed(block))
}

pub(crate) fn read(source: &mut Source<'_>) -> Read {
    let size_bytes = source.size_bytes();
    let (mut at, mut members) = (0_u64, 0_u64);
    // The size of the next member in a pax header.
    let mut pax_size = None;
    loop {
        source.step()?;
        let block = match source.array::<BLOCK>(at) {
            Ok(block) => block,
            Err(Stop::Early(_)) => return Err(cut_before_its_end(source, at, members)),
            Err(stop) => return Err(stop),
        };
        if block.iter().all(|byte| *byte == 0) {
            return end(source, at, members);
        }
        if !is_summed(&block) {
            return Err(Stop::unknown(format!(
                "no header with its checksum is at {at}, after {members} members"
            )));
        }
        let Some(said) = number(&block[124..136]) else {
            return Err(Stop::unknown(format!("the size in the header at {at} is not understood")));
        };
        let (data_at, kind) = (at + BLOCK_BYTES, block[156]);
        let stored = match kind {
            b'0' | 0 | b'7' => pax_size.take().unwrap_or(said),
            b'x' => {
                pax_size = pax(source, data_at, said)?;
                said
            }
            b'g' | b'L' | b'K' => said,
            // Links, devices, directories. Readers differ on links that have data.
            b'1' if said != 0 => return Err(Stop::unknown(format!("the link at {at} has {said} bytes"))),
            b'1'..=b'6' => {
                pax_size = None;
                0
            }
            _ => return Err(Stop::unknown(format!("the member at {at} has the type {kind:#04x}"))),
        };
        let end = stored.checked_next_multiple_of(BLOCK_BYTES).and_then(|stored| data_at.checked_add(stored));
        match end.filter(|end| *end <= size_bytes) {
            Some(end) => at = end,
            None => {
                return Err(Stop::broken(format!(
                    "a member of {stored} bytes begins at {data_at}, and the file ends at {size_bytes}"
                )));
            }
        }
        members += 1;
    }
}

/// Judges a file that ends where a header or the end's zeros must be. Some writers leave the zeros out, and readers accept
/// that.
fn cut_before_its_end(source: &mut Source<'_>, at: u64, members: u64) -> Stop {
    let mut rest = [0; BLOCK];
    let length = source.size_bytes() - at;
    let rest = usize::try_from(length).ok().and_then(|length| rest.get_mut(..length));
    let Some(rest) = rest else { return Stop::unknown("its end is not where it is read") };
    match source.read(at, rest) {
        Err(stop) => stop,
        Ok(()) if rest.iter().all(|byte| *byte == 0) => Stop::unknown(format!(
            "after {members} members, {length} zeros are in the place of its end's 1024"
        )),
        Ok(()) => {
            Stop::broken(format!("{length} bytes of a header are at {at}, and a header has {BLOCK_BYTES}"))
        }
    }
}

/// Judges the end; the first block of zeros is at `at`.
fn end(source: &mut Source<'_>, at: u64, members: u64) -> Read {
    match source.array::<BLOCK>(at + BLOCK_BYTES) {
        Ok(second) if second.iter().all(|byte| *byte == 0) => {
            Ok(format!("its {members} members end at {at}, and the end's zeros follow"))
        }
        Ok(_) | Err(Stop::Early(_)) => {
            Err(Stop::unknown(format!("after {members} members, one block of zeros is at {at} and not two")))
        }
        Err(stop) => Err(stop),
    }
}

/// Whether the header's checksum is right: the sum of all bytes, with spaces in the place of the sum. Some old writers added
/// signed bytes.
fn is_summed(block: &Block) -> bool {
    let bytes =
        || block.iter().enumerate().map(|(at, byte)| if (148..156).contains(&at) { b' ' } else { *byte });
    let unsigned: i64 = bytes().map(i64::from).sum();
    let signed: i64 = bytes().map(|byte| i64::from(byte.cast_signed())).sum();
    let said = number(&block[148..156]).and_then(|said| i64::try_from(said).ok());
    said.is_some_and(|said| said == unsigned || said == signed)
}

/// Parses octal digits between spaces and zeros, or GNU's binary number after a high bit.
fn number(field: &[u8]) -> Option<u64> {
    if let [0x80, rest @ ..] = field {
        let (high, low) = rest.split_at_checked(rest.len().checked_sub(8)?)?;
        let fits = high.iter().all(|byte| *byte == 0);
        return if fits { low.first_chunk().map(|low| u64::from_be_bytes(*low)) } else { None };
    }
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    let digits = std::str::from_utf8(field.get(..end)?).ok()?.trim_matches(' ');
    if digits.is_empty() { Some(0) } else { u64::from_str_radix(digits, 8).ok() }
}

/// Returns the member's size if a pax header gives one: records of `LENGTH KEY=VALUE\n`.
fn pax(source: &mut Source<'_>, at: u64, length: u64) -> Result<Option<u64>, Stop> {
    let too_long =
        || Stop::unknown(format!("the pax header at {at} has {length} bytes, more than {MAX_PAX_BYTES}"));
    let length =
        usize::try_from(length).ok().filter(|length| *length <= MAX_PAX_BYTES).ok_or_else(too_long)?;
    let mut records = vec![0; length];
    source.read(at, &mut records).map_err(|stop| stop.early_is_broken("a pax header"))?;
    let mut rest = &records[..];
    let mut size = None;
    while !rest.is_empty() {
        let record = record(rest);
        let Some((record, after)) = record else {
            return Err(Stop::unknown(format!("the pax header at {at} is not understood")));
        };
        if record.starts_with(b"GNU.sparse") {
            return Err(Stop::unknown(format!("the member after {at} is sparse")));
        }
        if let Some(value) = record.strip_prefix(b"size=") {
            size = Some(
                decimal(value).ok_or_else(|| Stop::unknown(format!("the pax header at {at} has no size")))?,
            );
        }
        rest = after;
    }
    Ok(size)
}

/// Returns the first record's key and value, and the rest.
fn record(records: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = records.iter().position(|byte| *byte == b' ')?;
    let length = usize::try_from(decimal(records.get(..space)?)?).ok()?;
    let (record, after) = records.split_at_checked(length)?;
    Some((record.get(space + 1..)?.strip_suffix(b"\n")?, after))
}

fn decimal(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

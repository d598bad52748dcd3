//! numpy's files: a header with type and shape, then the items; and archives of such files.
//!
//! Owns: the length that a header gives. Does not own: the archive (`zip`). Source: `numpy/lib/_format_impl.py`.

use crate::Read;
use crate::source::{Source, Stop};
use crate::zip::{self, Directory, u16_at, u32_at};

pub(crate) const MAGIC: &[u8] = b"\x93NUMPY";
/// Magic, two bytes of version, a length of four bytes in the newer ones.
const PREFIX_BYTES: usize = 12;
/// Longest header that is read. Longer ones belong to structures with many fields, which are not supported.
const MAX_HEADER_BYTES: u64 = 64 << 10;

/// Reads an archive of `np.savez`. Members that were not written leave no trace; a member that broke off is shorter than its
/// header says.
pub(crate) fn read_archive(source: &mut Source<'_>, directory: Directory) -> Read {
    let mut unknown = None;
    zip::members(source, directory, &mut |source, name, member| {
        let read = if !name.ends_with(b".npy") {
            Err(Stop::unknown("which is no array"))
        } else if member.is_plain() {
            read(source, member.at, member.size_bytes)
        } else {
            Err(Stop::unknown("which is compressed"))
        };
        match read {
            Ok(_) => Ok(()),
            // A later member may be broken.
            Err(Stop::Unknown(reason)) => {
                unknown.get_or_insert_with(|| Stop::Unknown(reason).of_member(name));
                Ok(())
            }
            Err(stop) => Err(stop),
        }
    })?;
    match unknown {
        Some(stop) => Err(stop),
        None => Ok(format!("each of its {} arrays has the length that its header says", directory.entries)),
    }
}

/// Reads the array in `length` bytes from `start` on.
pub(crate) fn read(source: &mut Source<'_>, start: u64, length: u64) -> Read {
    let cut = |needed: u64| Stop::broken(format!("its header ends at {needed} of its {length} bytes"));
    if length < PREFIX_BYTES as u64 {
        // numpy returns such a member as it is, whatever its name, unless it begins as an array does.
        let mut begins = vec![0; MAGIC.len().min(usize::try_from(length).unwrap_or(MAGIC.len()))];
        source.read(start, &mut begins)?;
        if !MAGIC.starts_with(&begins) {
            return Err(Stop::unknown(format!("its {length} bytes are too few for an array")));
        }
        return Err(cut(PREFIX_BYTES as u64));
    }
    let prefix: [u8; PREFIX_BYTES] = source.array(start)?;
    let (header_at, header_bytes) = match (prefix.starts_with(MAGIC), prefix[6]) {
        (true, 1) => (10, u64::from(u16_at(&prefix, 8))),
        (true, 2 | 3) => (12, u64::from(u32_at(&prefix, 8))),
        (true, version) => {
            return Err(Stop::unknown(format!("its version is {version}, and 3 the newest known")));
        }
        (false, _) => return Err(Stop::unknown("it does not begin as an array of numpy")),
    };
    let data_at = header_at + header_bytes;
    if data_at > length {
        return Err(cut(data_at));
    }
    if header_bytes > MAX_HEADER_BYTES {
        return Err(Stop::unknown(format!(
            "its header has {header_bytes} bytes, more than {MAX_HEADER_BYTES}"
        )));
    }
    let mut header = vec![0; usize::try_from(header_bytes).unwrap_or_default()];
    source.read(start + header_at, &mut header)?;
    let Some((item_bytes, count)) = item_bytes(&header).zip(count(&header)) else {
        return Err(Stop::unknown("the length of its items is not known here"));
    };
    let Some(end) = count.checked_mul(item_bytes).and_then(|data| data_at.checked_add(data)) else {
        return Err(Stop::unknown(format!("{count} items of {item_bytes} bytes are more than 2^64")));
    };
    if end > length {
        return Err(Stop::broken(format!(
            "it has {} bytes for {count} items of {item_bytes}: {} bytes",
            length - data_at,
            end - data_at
        )));
    }
    if end < length {
        return Err(Stop::unknown(format!("its {count} items end at {end}, and it at {length}")));
    }
    Ok(format!("its {count} items of {item_bytes} bytes end with it at {length}"))
}

/// Returns the text after `'name':` in the header, a dictionary as Python prints it.
fn field<'a>(header: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let at = header.windows(name.len()).position(|part| part == name)?;
    header.get(at + name.len()..).map(<[u8]>::trim_ascii_start)
}

/// Parses `'<f4'`: order, kind, bytes; characters have four. Objects and structures have no known length.
fn item_bytes(header: &[u8]) -> Option<u64> {
    let [b'\'', b'<' | b'>' | b'|' | b'=', kind, rest @ ..] = field(header, b"'descr':")? else {
        return None;
    };
    let end = rest.iter().position(|byte| !byte.is_ascii_digit())?;
    let number: u64 = std::str::from_utf8(rest.get(..end)?).ok()?.parse().ok()?;
    match (kind, rest.get(end)?) {
        // Dates have their unit afterwards: `<M8[ns]`.
        (b'M' | b'm', b'\'' | b'[') => Some(number),
        (b'b' | b'i' | b'u' | b'f' | b'c' | b'S' | b'a' | b'V', b'\'') => Some(number),
        (b'U', b'\'') => number.checked_mul(4),
        _ => None,
    }
}

/// Parses `(3, 4)` and returns how many items there are.
fn count(header: &[u8]) -> Option<u64> {
    let shape = field(header, b"'shape':")?.strip_prefix(b"(")?;
    let end = shape.iter().position(|byte| *byte == b')')?;
    let (mut count, mut empty) = (Some(1_u64), false);
    for side in
        shape.get(..end)?.split(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|side| !side.is_empty())
    {
        let side: u64 = std::str::from_utf8(side).ok()?.parse().ok()?;
        empty |= side == 0;
        count = count.and_then(|count| count.checked_mul(side));
    }
    if empty { Some(0) } else { count }
}

//! Zip archives: the end record, the directory, and the check that each entry has its place.
//!
//! Owns: the common part of all archives. Does not own: the kind of an archive (`archive`), the meaning of members (`torch_zip`, `npy`,
//! `keras`). Source: PKWARE's APPNOTE 6.3.10. Nothing is decompressed.

use crate::source::{Source, Stop, Window};
use memchr::memmem::FinderRev;

/// Signature of a member's own header. A file that begins with it is an archive, or was to become one.
pub(crate) const LOCAL: &[u8] = b"PK\x03\x04";
pub(crate) const LOCAL_BYTES: usize = 30;
const CENTRAL: [u8; 4] = *b"PK\x01\x02";
const CENTRAL_BYTES: usize = 46;
const END: [u8; 4] = *b"PK\x05\x06";
const END_BYTES: usize = 22;
const END64: [u8; 4] = *b"PK\x06\x06";
const END64_BYTES: usize = 56;
const LOCATOR: [u8; 4] = *b"PK\x06\x07";
const LOCATOR_BYTES: usize = 20;
/// Bytes at the end in which the end record lies: it may have a comment of 64 KiB.
const TAIL_BYTES: u64 = END_BYTES as u64 + 0xffff;
/// Distance from the file's end in which an archive is searched for that other bytes follow, as `torch.save` and `np.save` into one file
/// leave it.
const FOLLOWED_BYTES: u64 = 32 << 20;
/// Bytes searched at once.
const LOOK_BYTES: usize = 1 << 20;
/// Maximum number of entries of one archive: a torch zip has one for each storage.
const MAX_ENTRIES: usize = 1 << 18;

/// An entry of the directory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    /// Offset of the member's own header.
    pub(crate) header_at: u64,
    /// Offset of its bytes.
    pub(crate) at: u64,
    pub(crate) stored_bytes: u64,
    pub(crate) size_bytes: u64,
    /// Compression method; 0: the bytes as they are.
    pub(crate) method: u16,
}

impl Entry {
    /// Whether the member's bytes lie in the file as they are.
    pub(crate) fn is_plain(self) -> bool {
        self.method == 0 && self.stored_bytes == self.size_bytes
    }
}

/// Callback for each entry and its name.
type See<'a> = &'a mut dyn FnMut(&mut Source<'_>, &[u8], Entry) -> Result<(), Stop>;

/// The place of the directory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Directory {
    at: u64,
    bytes: u64,
    pub(crate) entries: u64,
}

/// Finds the end record, and the directory that it names.
pub(crate) fn open(source: &mut Source<'_>) -> Result<Directory, Stop> {
    let size_bytes = source.size_bytes();
    let tail_at = size_bytes.saturating_sub(TAIL_BYTES);
    let mut tail = vec![0; usize::try_from(size_bytes - tail_at).unwrap_or_default()];
    source.read(tail_at, &mut tail)?;
    let ends = tail.windows(END_BYTES).enumerate().rev().filter(|(_, record)| record.starts_with(&END));
    // Prefers a record whose comment ends with the file; else one that other bytes follow.
    let mut followed = None;
    for (offset, record) in ends {
        let at = tail_at + offset as u64;
        let end = at + END_BYTES as u64 + u64::from(u16_at(record, 20));
        if end == size_bytes {
            return directory(source, at, record);
        }
        if end < size_bytes && followed.is_none() && directory(source, at, record).is_ok() {
            followed = Some(end);
        }
    }
    if followed.is_none() {
        followed = find_followed(source, tail_at)?;
    }
    match followed {
        // A program that appends to an archive, or puts several into one file, knows how to read it.
        Some(end) => {
            Err(Stop::unknown(format!("an archive in it ends at {end}, and the file at {size_bytes}")))
        }
        None => Err(Stop::broken(format!(
            "the archive has no end record: the last {} of its {size_bytes} bytes hold none",
            size_bytes - tail_at.saturating_sub(FOLLOWED_BYTES)
        ))),
    }
}

/// Returns where an archive ends that lies before `before` and is followed by more than a comment may hold. Costs a pass over
/// [`FOLLOWED_BYTES`], some ten milliseconds; each apparent end record counts as a step.
fn find_followed(source: &mut Source<'_>, before: u64) -> Result<Option<u64>, Stop> {
    let least = before.saturating_sub(FOLLOWED_BYTES);
    let ends = FinderRev::new(&END);
    let mut buffer = vec![0; LOOK_BYTES];
    let mut to = before;
    while to > least {
        let from = to.saturating_sub(LOOK_BYTES as u64).max(least);
        let looked_at = &mut buffer[..usize::try_from(to - from).unwrap_or_default()];
        source.read_untimed(from, looked_at)?;
        for offset in ends.rfind_iter(looked_at) {
            source.step()?;
            let at = from + offset as u64;
            let record: [u8; END_BYTES] = source.array(at)?;
            if directory(source, at, &record).is_ok() {
                return Ok(Some(at + END_BYTES as u64 + u64::from(u16_at(&record, 20))));
            }
        }
        if from == least {
            break;
        }
        // A record may lie across the border.
        to = from + END.len() as u64 - 1;
    }
    Ok(None)
}

/// Returns the directory of the end record at `end_at`.
fn directory(source: &mut Source<'_>, end_at: u64, record: &[u8]) -> Result<Directory, Stop> {
    let (mut entries, mut bytes, mut at) =
        (u64::from(u16_at(record, 10)), u64::from(u32_at(record, 12)), u64::from(u32_at(record, 16)));
    let mut directory_end = end_at;
    let locator_at = end_at.checked_sub(LOCATOR_BYTES as u64);
    let locator: Option<[u8; LOCATOR_BYTES]> = locator_at.and_then(|at| source.array(at).ok());
    if let (Some(locator_at), Some(locator)) = (locator_at, locator)
        && locator.starts_with(&LOCATOR)
    {
        // The locator counts from the beginning of the archive, which may not be the file's. The record itself ends at the locator.
        let said = u64_at(&locator, 8);
        let before = locator_at.checked_sub(END64_BYTES as u64);
        let mut record_at = |place: u64| {
            let end64: [u8; END64_BYTES] = source.array(place).ok()?;
            let end = place.checked_add(12)?.checked_add(u64_at(&end64, 4))?;
            (end64.starts_with(&END64) && end == locator_at).then_some((place, end64))
        };
        let Some((place, end64)) = before.and_then(&mut record_at).or_else(|| record_at(said)) else {
            return Err(Stop::unknown(format!("no end record lies at {said}, where its locator says")));
        };
        (entries, bytes, at) = (u64_at(&end64, 32), u64_at(&end64, 40), u64_at(&end64, 48));
        directory_end = place;
    }
    let said_end = at.checked_add(bytes).filter(|end| *end <= directory_end);
    let Some(said_end) = said_end else {
        return Err(Stop::broken(format!(
            "its directory would be {bytes} bytes from {at} on, and its end record is at {directory_end}"
        )));
    };
    if said_end < directory_end {
        return Err(Stop::unknown(format!(
            "its directory ends at {said_end} and its end record is at {directory_end}: other archives may precede it"
        )));
    }
    if entries.checked_mul(CENTRAL_BYTES as u64).is_none_or(|least| least > bytes) {
        return Err(Stop::broken(format!("its directory of {bytes} bytes cannot hold {entries} entries")));
    }
    if entries > MAX_ENTRIES as u64 {
        return Err(Stop::unknown(format!("it has {entries} entries, more than {MAX_ENTRIES}")));
    }
    Ok(Directory { at, bytes, entries })
}

/// Passes each entry and its name to `see`, and checks that all lie before the directory and do not overlap.
pub(crate) fn members(source: &mut Source<'_>, directory: Directory, see: See<'_>) -> Result<(), Stop> {
    let Directory { at, bytes, entries } = directory;
    let mut window = Window::new(source, at, at + bytes);
    let (mut name, mut extra) = (vec![], vec![]);
    let mut extents = vec![];
    for number in 1..=entries {
        window.step()?;
        let header: [u8; CENTRAL_BYTES] = window.array()?;
        if !header.starts_with(&CENTRAL) {
            return Err(Stop::broken(format!("entry {number} of {entries} in its directory is none")));
        }
        name.resize(usize::from(u16_at(&header, 28)), 0);
        window.fill(&mut name)?;
        extra.resize(usize::from(u16_at(&header, 30)), 0);
        window.fill(&mut extra)?;
        window.skip(u64::from(u16_at(&header, 32)))?;
        let source = window.source();
        let seen = entry(&header, &extra).and_then(|entry| placed(source, entry, at)).and_then(|entry| {
            extents.push((entry.header_at, entry.at + entry.stored_bytes));
            see(source, &name, entry)
        });
        seen.map_err(|stop| stop.of_member(&name))?;
    }
    // Some writers count only to 65535.
    if window.at() < at + bytes {
        let more = at + bytes - window.at();
        return Err(Stop::unknown(format!("its directory has {more} bytes behind its {entries} entries")));
    }
    extents.sort_unstable();
    // Two names of the same bytes do not conflict.
    extents.dedup();
    for pair in extents.windows(2) {
        if let [(_, end), (next, _)] = *pair
            && next < end
        {
            return Err(Stop::broken(format!("an entry ends at {end}, and the next begins at {next}")));
        }
    }
    Ok(())
}

/// Reads the directory's description of an entry. Numbers that do not fit are in the extra field, in this order.
fn entry(header: &[u8], extra: &[u8]) -> Result<Entry, Stop> {
    let mut wide = wide_fields(extra).chunks_exact(8).map(|field| u64_at(field, 0));
    let mut number = |at| match u32_at(header, at) {
        u32::MAX => wide.next().ok_or_else(|| Stop::unknown("its size is in a field that it does not have")),
        narrow => Ok(u64::from(narrow)),
    };
    let (size_bytes, stored_bytes, header_at) = (number(24)?, number(20)?, number(42)?);
    Ok(Entry { header_at, at: 0, stored_bytes, size_bytes, method: u16_at(header, 10) })
}

fn wide_fields(extra: &[u8]) -> &[u8] {
    let mut rest = extra;
    while let [id_low, id_high, low, high, fields @ ..] = rest {
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        let Some(field) = fields.get(..length) else { break };
        if [*id_low, *id_high] == [1, 0] {
            return field;
        }
        rest = &fields[length..];
    }
    &[]
}

/// Finds the entry's bytes by its own header.
fn placed(source: &mut Source<'_>, entry: Entry, directory_at: u64) -> Result<Entry, Stop> {
    let Entry { header_at, stored_bytes, .. } = entry;
    let beyond = || {
        Stop::broken(format!(
            "{stored_bytes} bytes whose header is at {header_at} reach beyond {directory_at}, where the directory begins"
        ))
    };
    if header_at.checked_add(LOCAL_BYTES as u64).is_none_or(|end| end > directory_at) {
        return Err(beyond());
    }
    let header: [u8; LOCAL_BYTES] = source.array(header_at)?;
    if !header.starts_with(LOCAL) {
        return Err(Stop::broken(format!("no header is at {header_at}, where the directory says")));
    }
    let at = header_at + LOCAL_BYTES as u64 + u64::from(u16_at(&header, 26)) + u64::from(u16_at(&header, 28));
    let end = at.checked_add(stored_bytes).filter(|end| *end <= directory_at);
    end.map(|_| Entry { at, ..entry }).ok_or_else(beyond)
}

/// Returns a number of a record; zero beyond its end.
pub(crate) fn u16_at(record: &[u8], at: usize) -> u16 {
    record.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u16::from_le_bytes(*bytes))
}

pub(crate) fn u32_at(record: &[u8], at: usize) -> u32 {
    record.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

pub(crate) fn u64_at(record: &[u8], at: usize) -> u64 {
    record.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

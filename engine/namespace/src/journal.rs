//! The journal: the namespace's state, kept in a mount of its own that outlives the daemon.
//!
//! Owns: two files of a fixed, preallocated size, frames with checksums, the torn tail, compaction. Does not own: the
//! records' content (`record`), the state that they rebuild (`replay`).
//!
//! A file is a header and frames. Header (64 bytes): magic, version u32, complete u32, serial u64, incarnation u64,
//! CRC-64/NVME u64 of the bytes before it. Frame: length u32 (bit 31: more of this change follow), u64 CRC-64/NVME of
//! (serial, offset, length, record), record. The checksum includes serial and offset, so frames of an earlier use of
//! the file are invalid. The complete file with the highest serial holds.
//!
//! The version stays as it was found until right before the first frame that needs a newer one. An older daemon can therefore take the
//! journal back if this one turns out not to serve.
//!
//! Compaction writes a snapshot to the other file in slices, a slice with each call that journals, and every new record to both meanwhile.
//! Records state the present, not changes, so the mixture replays to the present state.

use super::ends::Process;
use super::guarded::Guarded;
use super::record::{
    FORMAT_VERSION, FORMAT_VERSION_LEAST, FORMAT_VERSION_MIN, MAX_RECORD_BYTES, MORE, encode_slice, format_of,
};
use super::{FsError, NamespaceError, NodeId};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufReader, Read};
use tidemark_protocol::id::Incarnation;

const NAMES: [&str; 2] = ["namespace.0", "namespace.1"];
const MAGIC: [u8; 8] = *b"TDMKNS\r\n";
const HEADER_BYTES: u64 = 64;
/// The same, as a length in memory.
const HEADER_LEN: usize = 64;
const FRAME_BYTES: usize = 12;
/// Bytes that changes may add before a new snapshot is written, or as many as the snapshot itself has if those are more. Writing it then
/// costs no more than the changes did. The next daemon replays all of them, some 20,000 records a MiB, while programs wait.
const REPLAYED_BYTES: u64 = 2 << 20;
/// Bytes read in one go when a journal is recovered.
const READ_BYTES: usize = 1 << 20;
/// Nodes in one slice of a snapshot: about 50 µs of the lock.
const SLICE_NODES: usize = 128;
/// If less than one part in this many of the file is free, the call that finds it so finishes the compaction.
const RESERVE_PARTS: u64 = 16;

/// A journal file.
#[derive(Debug)]
struct Slot {
    index: usize,
    file: OwnedFd,
    header: Header,
    end: u64,
}

/// A snapshot that is being written to the other file.
#[derive(Debug)]
struct Compaction {
    slot: Slot,
    after: NodeId,
    /// Processes whose end the snapshot lists already: at most as many as are remembered.
    ends: BTreeSet<Process>,
}

/// The journal's files. Locked before the namespace's state, never after.
#[derive(Debug)]
pub(super) struct Journal {
    slot: Slot,
    other: Option<OwnedFd>,
    compaction: Option<Compaction>,
    size_bytes: u64,
    /// Highest serial ever used, also by an unfinished snapshot: a frame's checksum holds only for its own serial.
    last_serial: u64,
    /// Where the present file's snapshot ended, in bytes.
    base_bytes: u64,
    /// Spare buffers, so that a call allocates nothing.
    records: Vec<u8>,
    frames: Vec<u8>,
    failed: bool,
}

/// All records of a journal, in order: whole changes only.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) records: Vec<u8>,
}

impl Image {
    /// Returns the records, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        each(&self.records)
    }
}

/// Returns records that lie one after the other, each behind its length.
fn each(mut records: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, after) = records.split_first_chunk::<4>()?;
        let len = usize::try_from(u32::from_le_bytes(*length) & !MORE).ok()?;
        let (record, after) = after.split_at_checked(len)?;
        records = after;
        Some(record)
    })
}

impl Journal {
    /// Makes an empty journal in `directory`, over any existing one.
    pub(super) fn create(
        directory: BorrowedFd<'_>,
        size_bytes: u64,
        incarnation: Incarnation,
    ) -> Result<Self, NamespaceError> {
        let [first, other] = [open_file(directory, 0, size_bytes)?, open_file(directory, 1, size_bytes)?];
        let header =
            Header { version: FORMAT_VERSION_LEAST, complete: true, serial: random_serial()?, incarnation };
        let slot = Slot { index: 0, file: first, header, end: HEADER_BYTES };
        let mut journal = Self::with_slot(slot, other, size_bytes);
        // The higher serial of two complete headers would win, so the other file's header is erased first.
        for (index, file) in [(1, journal.other.as_ref()), (0, Some(&journal.slot.file))] {
            if let Some(file) = file {
                write_all(file, &[0; HEADER_LEN], 0).map_err(failed(index, "erasing", size_bytes))?;
            }
        }
        journal.last_serial = journal.slot.header.serial;
        journal.slot.write_header().map_err(failed(0, "writing", size_bytes))?;
        Ok(journal)
    }

    fn with_slot(slot: Slot, other: OwnedFd, size_bytes: u64) -> Self {
        Self {
            slot,
            other: Some(other),
            compaction: None,
            size_bytes,
            last_serial: 0,
            base_bytes: HEADER_BYTES,
            records: Vec::new(),
            frames: Vec::new(),
            failed: false,
        }
    }

    /// Reads the journal in `directory`. A torn tail is cut off: all bytes after the last whole change are lost.
    pub(super) fn open(
        directory: BorrowedFd<'_>,
        size_bytes: u64,
        incarnation: Incarnation,
    ) -> Result<(Self, Image), NamespaceError> {
        let files = [open_file(directory, 0, size_bytes)?, open_file(directory, 1, size_bytes)?];
        let mut best: Option<(usize, Header)> = None;
        let mut last_serial = 0;
        for (index, file) in files.iter().enumerate() {
            let Some(header) = read_header(file).map_err(failed(index, "reading", size_bytes))? else {
                continue;
            };
            if !(FORMAT_VERSION_MIN..=FORMAT_VERSION).contains(&header.version) {
                return Err(NamespaceError::Version { found: header.version, known: FORMAT_VERSION });
            }
            let newer = best.as_ref().is_none_or(|(_, best)| header.serial > best.serial);
            last_serial = last_serial.max(header.serial);
            if header.complete && newer && header.incarnation == incarnation {
                best = Some((index, header));
            }
        }
        let (index, mut header) =
            best.ok_or(NamespaceError::Corrupt { what: "header", found: 0, most: NAMES.len() as u64 })?;
        let [first, second] = files;
        let (file, other) = if index == 0 { (first, second) } else { (second, first) };
        // An older format is a part of the least one that is written from here on.
        header.version = header.version.max(FORMAT_VERSION_LEAST);
        let mut slot = Slot { index, file, header, end: HEADER_BYTES };
        let image = read_frames(&mut slot, size_bytes).map_err(failed(index, "reading", size_bytes))?;
        slot.write_header().map_err(failed(index, "writing", size_bytes))?;
        let mut journal = Self::with_slot(slot, other, size_bytes);
        // The end of the snapshot is unknown: all bytes count as changes, and a long journal soon gets a new snapshot.
        journal.last_serial = last_serial;
        Ok((journal, image))
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn is_due(&self) -> bool {
        let grown = self.slot.end - self.base_bytes;
        let room = self.size_bytes.saturating_sub(self.base_bytes);
        grown > self.base_bytes.max(REPLAYED_BYTES).min(room / 2)
    }

    fn append(&mut self, to_both: bool) -> rustix::io::Result<()> {
        write_frames(&mut self.slot, &self.records, &mut self.frames, self.size_bytes)?;
        if let (Some(compaction), true) = (&mut self.compaction, to_both) {
            let written =
                write_frames(&mut compaction.slot, &self.records, &mut self.frames, self.size_bytes);
            if let Err(errno) = written {
                // The snapshot is abandoned, and begun again when it is due; the journal has the records.
                tracing::warn!(%errno, size_bytes = self.size_bytes, "a snapshot of the journal does not fit");
                self.other = self.compaction.take().map(|compaction| compaction.slot.file);
            }
        }
        Ok(())
    }

    fn begin_compaction(&mut self) -> rustix::io::Result<()> {
        let Some(file) = self.other.take() else { return Ok(()) };
        self.last_serial += 1;
        let header = Header { complete: false, serial: self.last_serial, ..self.slot.header };
        let slot = Slot { index: 1 - self.slot.index, file, header, end: HEADER_BYTES };
        let written = slot.write_header();
        self.compaction = Some(Compaction { slot, after: 0, ends: BTreeSet::new() });
        written
    }

    /// Makes the other file the journal: it holds everything now.
    fn finish_compaction(&mut self) -> rustix::io::Result<()> {
        let Some(Compaction { mut slot, .. }) = self.compaction.take() else { return Ok(()) };
        slot.header.complete = true;
        slot.write_header()?;
        let old = std::mem::replace(&mut self.slot, slot);
        self.base_bytes = self.slot.end;
        self.other = Some(old.file);
        Ok(())
    }
}

impl Guarded {
    /// Writes the pending records. When this returns, all changes made under the lock before the call are in the
    /// journal, by this call or by another's. Costs one write; during a compaction two and a slice.
    pub(super) fn commit(&self) -> Result<(), FsError> {
        let mut journal = self.journal.lock().expect(super::UNPOISONED);
        let journal = &mut *journal;
        journal.records.clear();
        std::mem::swap(&mut self.lock().pending, &mut journal.records);
        let written = self.write_pending(journal);
        if let Err(errno) = written {
            if !journal.failed {
                tracing::error!(%errno, size_bytes = journal.size_bytes, end = journal.slot.end,
                    "the namespace's journal cannot be written; changes are refused until it can");
            }
            journal.failed = true;
            return Err(if errno == Errno::NOSPC { FsError::NoSpace } else { FsError::Io });
        }
        if journal.failed {
            // The state contains the unwritten changes: a snapshot makes the journal whole again.
            journal.begin_compaction().map_err(|_| FsError::Io)?;
            self.compact_fully(journal).map_err(|_| FsError::Io)?;
            journal.failed = false;
        }
        Ok(())
    }

    fn write_pending(&self, journal: &mut Journal) -> rustix::io::Result<()> {
        let framed = framed_bytes(&journal.records);
        if journal.slot.end + framed > journal.size_bytes {
            // The records are in the state already, so a snapshot of it holds them.
            journal.begin_compaction()?;
            return self.compact_fully(journal);
        }
        journal.append(true)?;
        if journal.compaction.is_none() && journal.is_due() {
            journal.begin_compaction()?;
        }
        if journal.compaction.is_some() {
            if journal.size_bytes - journal.slot.end < journal.size_bytes / RESERVE_PARTS {
                return self.compact_fully(journal);
            }
            self.compact_slice(journal)?;
        }
        Ok(())
    }

    fn compact_fully(&self, journal: &mut Journal) -> rustix::io::Result<()> {
        while journal.compaction.is_some() {
            self.compact_slice(journal)?;
        }
        Ok(())
    }

    /// Writes the next slice of the snapshot; ends the compaction with the last.
    fn compact_slice(&self, journal: &mut Journal) -> rustix::io::Result<()> {
        let Some(compaction) = &mut journal.compaction else { return Ok(()) };
        let mut slice = Vec::new();
        let last = {
            let mut state = self.lock();
            // Records of changes before this slice go first, or they would undo its contents.
            journal.records.clear();
            std::mem::swap(&mut state.pending, &mut journal.records);
            let known = self.writers.ends();
            let ends = (&*known, &mut compaction.ends);
            let last = encode_slice(&state.tree, compaction.after, SLICE_NODES, ends, &mut slice);
            if last.is_none() {
                state.encode_rest(&mut slice);
            }
            last
        };
        if journal.slot.end + framed_bytes(&journal.records) <= journal.size_bytes {
            write_frames(&mut journal.slot, &journal.records, &mut journal.frames, journal.size_bytes)?;
        }
        let before_slice =
            write_frames(&mut compaction.slot, &journal.records, &mut journal.frames, journal.size_bytes);
        let written = before_slice.and_then(|()| {
            write_frames(&mut compaction.slot, &slice, &mut journal.frames, journal.size_bytes)
        });
        if let Err(errno) = written {
            // The snapshot does not fit: the old file stays the journal.
            if let Some(compaction) = journal.compaction.take() {
                journal.other = Some(compaction.slot.file);
            }
            return Err(errno);
        }
        match last {
            Some(last) => {
                compaction.after = last;
                Ok(())
            }
            None => journal.finish_compaction(),
        }
    }
}

/// Returns the bytes that records take once framed.
fn framed_bytes(records: &[u8]) -> u64 {
    (records.len() + each(records).count() * (FRAME_BYTES - 4)) as u64
}

fn checksum(serial: u64, offset: u64, length: u32, record: &[u8]) -> u64 {
    let mut digest = tidemark_kernels::Crc64Digest::new();
    digest.update(&serial.to_le_bytes());
    digest.update(&offset.to_le_bytes());
    digest.update(&length.to_le_bytes());
    digest.update(record);
    digest.finalize()
}

fn write_frames(
    slot: &mut Slot,
    records: &[u8],
    frames: &mut Vec<u8>,
    size_bytes: u64,
) -> rustix::io::Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    if slot.end + framed_bytes(records) > size_bytes {
        return Err(Errno::NOSPC);
    }
    slot.raise_format(records)?;
    frames.clear();
    let mut rest = records;
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length);
        let (record, after) = after.split_at((length & !MORE) as usize);
        let offset = slot.end + frames.len() as u64;
        frames.extend_from_slice(&length.to_le_bytes());
        frames.extend_from_slice(&checksum(slot.header.serial, offset, length, record).to_le_bytes());
        frames.extend_from_slice(record);
        rest = after;
    }
    write_all(&slot.file, frames, slot.end)?;
    slot.end += frames.len() as u64;
    Ok(())
}

/// Reads frames up to the first invalid one. Keeps whole changes, and sets the slot's end behind the last.
fn read_frames(slot: &mut Slot, size_bytes: u64) -> rustix::io::Result<Image> {
    let mut file = File::from(rustix::io::fcntl_dupfd_cloexec(&slot.file, 0)?);
    // Only this function uses the position: all other calls read and write at offsets.
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(slot.end))?;
    let left = size_bytes.saturating_sub(slot.end);
    // A frame has some tens of bytes, and there are hundreds of thousands: a system call for each would take most of the time.
    let mut frames = BufReader::with_capacity(READ_BYTES, (&mut file).take(left));
    let mut records = Vec::new();
    let mut whole = 0;
    let mut offset = slot.end;
    loop {
        let mut head = [0; FRAME_BYTES];
        if !read_whole(&mut frames, &mut head)? {
            break;
        }
        let (length, sum) = head.split_at(4);
        let length = u32::from_le_bytes(length.try_into().expect("four bytes"));
        let sum = u64::from_le_bytes(sum.try_into().expect("eight bytes"));
        let len = (length & !MORE) as usize;
        if len == 0 || len > MAX_RECORD_BYTES {
            break;
        }
        let at = records.len() + 4;
        records.extend_from_slice(&length.to_le_bytes());
        records.resize(at + len, 0);
        let read = read_whole(&mut frames, &mut records[at..])?;
        if !read || checksum(slot.header.serial, offset, length, &records[at..]) != sum {
            break;
        }
        offset += (FRAME_BYTES + len) as u64;
        if length & MORE == 0 {
            whole = records.len();
            slot.end = offset;
        }
    }
    records.truncate(whole);
    Ok(Image { records })
}

/// Fills `bytes`; returns false when the end comes before.
fn read_whole(frames: &mut impl Read, bytes: &mut [u8]) -> rustix::io::Result<bool> {
    match frames.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
    }
}

#[derive(Debug, Clone, Copy)]
struct Header {
    version: u32,
    complete: bool,
    serial: u64,
    incarnation: Incarnation,
}

impl Slot {
    fn write_header(&self) -> rustix::io::Result<()> {
        let Header { version, complete, serial, incarnation } = self.header;
        let mut header = [0; HEADER_LEN];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&version.to_le_bytes());
        header[12..16].copy_from_slice(&u32::from(complete).to_le_bytes());
        header[16..24].copy_from_slice(&serial.to_le_bytes());
        header[24..32].copy_from_slice(&incarnation.0.to_le_bytes());
        let sum = tidemark_kernels::crc64(&header[..32]);
        header[32..40].copy_from_slice(&sum.to_le_bytes());
        write_all(&self.file, &header, 0)
    }

    /// Raises the header's version to the one that records need, before they are written.
    fn raise_format(&mut self, records: &[u8]) -> rustix::io::Result<()> {
        let needed = each(records).map(format_of).max().unwrap_or(FORMAT_VERSION_LEAST);
        if needed > self.header.version {
            self.header.version = needed;
            self.write_header()?;
        }
        Ok(())
    }
}

fn read_header(file: &OwnedFd) -> rustix::io::Result<Option<Header>> {
    let mut header = [0; HEADER_LEN];
    let read = read_all(file, &mut header, 0)?;
    let u32_at = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    let u64_at = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
    if read < header.len() || header[..8] != MAGIC || tidemark_kernels::crc64(&header[..32]) != u64_at(32) {
        return Ok(None);
    }
    let incarnation = Incarnation(u64_at(24));
    Ok(Some(Header { version: u32_at(8), complete: u32_at(12) == 1, serial: u64_at(16), incarnation }))
}

fn open_file(directory: BorrowedFd<'_>, index: usize, size_bytes: u64) -> Result<OwnedFd, NamespaceError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, NAMES[index], flags, Mode::RUSR | Mode::WUSR)
        .map_err(failed(index, "opening", size_bytes))?;
    let there = rustix::fs::fstat(&file).map_err(failed(index, "looking at", size_bytes))?;
    let (length, held) = (there.st_size.cast_unsigned(), there.st_blocks.cast_unsigned() * 512);
    // Allocating pages that exist takes a microsecond each, and programs wait for a daemon that takes over.
    if length < size_bytes || held < size_bytes {
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size_bytes).map_err(failed(
            index,
            "preallocating",
            size_bytes,
        ))?;
    }
    Ok(file)
}

fn failed(index: usize, operation: &'static str, bytes: u64) -> impl Fn(Errno) -> NamespaceError {
    move |errno| NamespaceError::Journal { name: NAMES[index], operation, bytes, source: errno.into() }
}

/// Returns a random first serial, so that a frame of an earlier journal in the same file is never taken for ours.
fn random_serial() -> Result<u64, NamespaceError> {
    let random = getrandom::u64().map_err(|_| failed(0, "drawing a serial for", 0)(Errno::NOSYS))?;
    Ok(random >> 1)
}

fn write_all(file: &OwnedFd, mut bytes: &[u8], mut offset: u64) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, offset) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(written) => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn read_all(file: &OwnedFd, bytes: &mut [u8], offset: u64) -> rustix::io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pread(file, &mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::AWAY;
    use rustix::fd::AsFd;

    const SIZE_BYTES: u64 = 64 << 10;
    const OWN: Incarnation = Incarnation(7);

    fn append(journal: &mut Journal, kind: u8) {
        journal.records = vec![1, 0, 0, 0, kind];
        journal.append(true).unwrap();
    }

    /// The versions in the headers of the two files; 0 where there is none.
    fn versions(directory: &File) -> [u32; 2] {
        [0, 1].map(|index| {
            let file = open_file(directory.as_fd(), index, SIZE_BYTES).unwrap();
            read_header(&file).unwrap().map_or(0, |header| header.version)
        })
    }

    #[test]
    fn the_format_goes_up_with_the_first_record_that_needs_it_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let directory = File::open(folder.path()).unwrap();
        let open = || Journal::open(directory.as_fd(), SIZE_BYTES, OWN).unwrap().0;
        let mut journal = Journal::create(directory.as_fd(), SIZE_BYTES, OWN).unwrap();
        append(&mut journal, AWAY - 1);
        assert_eq!(versions(&directory), [7, 0]);
        drop(journal);
        let mut journal = open();
        assert_eq!(versions(&directory), [7, 0], "the daemon of before reads it still");
        // A snapshot that is being written gets every record, too.
        journal.begin_compaction().unwrap();
        append(&mut journal, AWAY - 1);
        assert_eq!(versions(&directory), [7, 7]);
        append(&mut journal, AWAY);
        assert_eq!(versions(&directory), [8, 8]);
        journal.finish_compaction().unwrap();
        drop(journal);
        let mut journal = open();
        journal.begin_compaction().unwrap();
        journal.finish_compaction().unwrap();
        assert_eq!(versions(&directory), [8, 8], "the file that was left has such a record");
    }

    #[test]
    fn a_snapshot_with_such_a_record_raises_the_format_by_itself() {
        let folder = tempfile::tempdir().unwrap();
        let directory = File::open(folder.path()).unwrap();
        let mut journal = Journal::create(directory.as_fd(), SIZE_BYTES, OWN).unwrap();
        journal.begin_compaction().unwrap();
        let mut frames = Vec::new();
        let snapshot = &mut journal.compaction.as_mut().unwrap().slot;
        write_frames(snapshot, &[1, 0, 0, 0, AWAY], &mut frames, SIZE_BYTES).unwrap();
        journal.finish_compaction().unwrap();
        assert_eq!(versions(&directory), [7, 8]);
        assert_eq!(journal.slot.header.version, 8);
    }
}

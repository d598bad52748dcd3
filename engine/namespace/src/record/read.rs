//! Reading records: from bytes back to the facts that they record.
//!
//! Owns: the bounds of credible values. Does not own: the layout, which is that of the writer (`mod`).

use super::{
    ANSWER, ATTRIBUTES_SET, AWAY, BACKING_ID, BLOCK_DEVICE, Bytes, CATALOG, CHARACTER_DEVICE, CHUNKS,
    CHUNKS_PER_RECORD, DIRECTORY, ENCODED_PLANES, ENCODED_ZSTD, END, ENDED_FAILED, ENDED_KILLED, ENDED_WELL,
    ENTRY, FILE, FREED, HANDLE, HEARD, LENGTHS, MAX_CHUNKS, MAX_KEY_BYTES, MAX_OPERATION_BYTES,
    MAX_RECORD_BYTES, NEXT, NO_ENTRY, NO_HANDLE, NO_NODE, OPERATION, OVERWRITTEN, PIPE, PLAIN, PROGRESS,
    Record, SESSION_ENDED, SOCKET, SPECIAL, SYMLINK, WRITERS, XATTR,
};
use crate::attr::Special;
use crate::ends::{End, Process};
use crate::file::{File, MAX_WRITERS, ObjectCopy};
use crate::handle::{Closing, Handle};
use crate::heard::Taken;
use crate::node::{Body, Directory, Link, Node};
use crate::pidfd::Ended;
use crate::session::Answer;
use crate::unanswered::Progress;
use crate::writer::{SessionKey, WriterId};
use crate::{MAX_NAME_BYTES, MAX_TARGET_BYTES};
use std::sync::Arc;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::cluster::wire::NameOperation;
use tidemark_protocol::encoding::{Codec, Encoding};
use tidemark_protocol::file::{FileFate, Seal};
use tidemark_protocol::id::{Epoch, FileCounter, FileId, Generation, Incarnation, NodeName, SealNumber};
use tidemark_protocol::key::NodeLife;

/// Reader of bytes that `Writer` wrote; returns none for anything else.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn u32(&mut self) -> Option<u32> {
        u32::try_from(self.u64()?).ok()
    }

    fn u64(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return None; // More than 64 bits.
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn crc(&mut self) -> Option<Crc64> {
        Some(Crc64(u64::from_le_bytes(self.take(8)?.try_into().ok()?)))
    }

    fn i64(&mut self) -> Option<i64> {
        Some(i64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn bytes(&mut self, most: usize) -> Option<&'a [u8]> {
        let len = usize::try_from(self.u32()?).ok().filter(|len| *len <= most)?;
        self.take(len)
    }

    fn text(&mut self, most: usize) -> Option<String> {
        String::from_utf8(self.bytes(most)?.to_vec()).ok()
    }

    fn optional(&mut self) -> Option<Option<u64>> {
        let present = self.u8()? != 0;
        let value = self.u64()?;
        Some(present.then_some(value))
    }
}

/// Decodes a record; none if it is not one that we write.
pub(crate) fn decode(bytes: &[u8]) -> Option<Record> {
    let mut reader = Reader(bytes);
    let record = match reader.u8()? {
        NEXT => Record::Next(reader.u64()?),
        kind @ (FILE | DIRECTORY | SYMLINK | SPECIAL) => node(kind, &mut reader)?,
        ENTRY => {
            let link = Link { parent: reader.u64()?, cookie: reader.u64()? };
            let node = reader.u64()?;
            let name = reader.bytes(MAX_NAME_BYTES)?.to_vec();
            Record::Entry { link, name, node }
        }
        NO_ENTRY => Record::NoEntry(Link { parent: reader.u64()?, cookie: reader.u64()? }),
        CHUNKS => {
            let (node, first, count) = (reader.u64()?, reader.u64()?, reader.u32()?);
            let count = usize::try_from(count).ok().filter(|count| *count <= CHUNKS_PER_RECORD)?;
            let values = (0..count).map(|_| reader.crc()).collect::<Option<_>>()?;
            Record::Chunks { node, first, values }
        }
        LENGTHS => {
            let (node, first, count) = (reader.u64()?, reader.u64()?, reader.u32()?);
            let count = usize::try_from(count).ok().filter(|count| *count <= CHUNKS_PER_RECORD)?;
            let values = (0..count).map(|_| reader.u32()).collect::<Option<_>>()?;
            Record::Lengths { node, first, values }
        }
        WRITERS => {
            let (node, count) = (reader.u64()?, reader.u32()?);
            let count = usize::try_from(count).ok().filter(|count| *count <= MAX_WRITERS)?;
            let writers = (0..count).map(|_| writer(&mut reader).map(Arc::new)).collect::<Option<_>>()?;
            Record::Writers { node, writers }
        }
        XATTR => {
            let (node, present) = (reader.u64()?, reader.u8()? != 0);
            let name = reader.bytes(MAX_NAME_BYTES)?.to_vec();
            let value = reader.bytes(MAX_RECORD_BYTES)?.to_vec();
            // A later daemon's attributes of no node are skipped like an attribute of a node that is gone.
            match end(&value).filter(|_| node == NO_NODE && name == END) {
                Some((process, end)) => Record::End(process, end),
                None => Record::Xattr { node, name, value: present.then_some(value) },
            }
        }
        FREED => Record::Freed(reader.u64()?),
        HANDLE => Record::Handle(reader.u64()?, handle(&mut reader)?),
        NO_HANDLE => Record::NoHandle(reader.u64()?),
        BACKING_ID => {
            let (backing, id) = (reader.u64()?, reader.optional()?);
            Record::BackingId { backing, id: id.map(u32::try_from).transpose().ok()? }
        }
        SESSION_ENDED => Record::SessionEnded,
        PROGRESS => Record::Progress(Progress {
            publication: reader.u64()?,
            answered: reader.u64()?,
            on_its_way: reader.u8()? != 0,
            first: reader.u64()?,
            sent: reader.u64()?,
            lost: reader.u8()? != 0,
        }),
        OPERATION => {
            let number = reader.u64()?;
            let operation = NameOperation::from_bytes(reader.bytes(MAX_OPERATION_BYTES)?)?;
            Record::Operation(number, Box::new(operation))
        }
        CATALOG => Record::Catalog(reader.optional()?.map(Epoch)),
        HEARD => {
            let life = life(&mut reader)?;
            let (publication, operations, whole) = (reader.u64()?, reader.u64()?, reader.u8()? != 0);
            Record::Heard(life, Taken { publication, operations, whole })
        }
        AWAY => {
            let life = life(&mut reader)?;
            let (present, first, end) = (reader.u8()? != 0, reader.u64()?, reader.u64()?);
            Record::Away(life, present.then_some(first..end))
        }
        ANSWER => Record::Answer(reader.u64()?, answer(&mut reader)?),
        _ => return None,
    };
    reader.0.is_empty().then_some(record)
}

fn life(reader: &mut Reader<'_>) -> Option<NodeLife> {
    let node = reader.text(MAX_NAME_BYTES)?.parse::<NodeName>().ok()?;
    Some(NodeLife { node, incarnation: Incarnation(reader.u64()?) })
}

fn handle(reader: &mut Reader<'_>) -> Option<Handle> {
    let (node, writable) = (reader.u64()?, reader.u8()? != 0);
    let closing = match reader.u8()? {
        0 => Closing::Unseen,
        1 => Closing::Closed,
        2 => Closing::Cut,
        _ => return None,
    };
    Some(Handle { node, writable, closing, flushed_ns: reader.i64()? })
}

fn answer(reader: &mut Reader<'_>) -> Option<Answer> {
    let (kind, node, fh) = (reader.u8()?, reader.u64()?, reader.u64()?);
    Some(match kind {
        0 => Answer::Done,
        1 => Answer::Entered(node),
        2 => Answer::Opened(fh),
        3 => Answer::Created(node, fh),
        4 => Answer::Superseded,
        _ => return None,
    })
}

fn writer(reader: &mut Reader<'_>) -> Option<WriterId> {
    Some(WriterId {
        home: None,
        session: SessionKey(reader.text(MAX_KEY_BYTES)?),
        world_size: reader.optional()?,
        rank: reader.optional()?,
        environment_seen: reader.u8()? != 0,
        tgid: reader.u32()?,
        start_time_ticks: reader.u64()?,
    })
}

fn end(value: &[u8]) -> Option<(Process, End)> {
    let mut reader = Reader(value);
    let tgid = u32::from_le_bytes(reader.take(4)?.try_into().ok()?);
    let start_time_ticks = u64::from_le_bytes(reader.take(8)?.try_into().ok()?);
    let at_ns = reader.i64()?;
    let how = match reader.u8()? {
        ENDED_WELL => Ended::Well,
        ENDED_FAILED => Ended::Failed,
        ENDED_KILLED => Ended::Killed,
        _ => return None,
    };
    reader.0.is_empty().then_some(((tgid, start_time_ticks), End { at_ns, how }))
}

fn node(kind: u8, reader: &mut Reader<'_>) -> Option<Record> {
    let (id, ino) = (reader.u64()?, reader.u64()?);
    let (mode, uid, gid, flags) = (reader.u32()?, reader.u32()?, reader.u32()?, reader.u8()?);
    if flags & !(OVERWRITTEN | ATTRIBUTES_SET) != 0 {
        return None;
    }
    let (atime_ns, mtime_ns, ctime_ns) = (reader.i64()?, reader.i64()?, reader.i64()?);
    let attributes_ns = if flags & ATTRIBUTES_SET == 0 { 0 } else { reader.i64()? };
    let (body, bytes) = match kind {
        DIRECTORY => {
            let (next_cookie, renamed_ns) = (reader.u64()?, reader.i64()?);
            let directory = Directory { next_cookie, renamed_ns, ..Default::default() };
            (Body::Directory(Box::new(directory)), None)
        }
        SYMLINK => (Body::Symlink(reader.bytes(MAX_TARGET_BYTES)?.into()), None),
        SPECIAL => (Body::Special(special(reader)?), None),
        _ => {
            let (file, bytes) = file(reader)?;
            (Body::File(Box::new(file)), Some(bytes))
        }
    };
    let mut node = Node::new(ino, mode, uid, gid, mtime_ns, body);
    node.overwritten = flags & OVERWRITTEN != 0;
    node.attributes_ns = attributes_ns;
    node.atime_ns = atime_ns;
    node.ctime_ns = ctime_ns;
    Some(Record::Node(id, Box::new(node), bytes))
}

fn special(reader: &mut Reader<'_>) -> Option<Special> {
    let (kind, device) = (reader.u8()?, reader.u32()?);
    match kind {
        PIPE => Some(Special::Pipe),
        SOCKET => Some(Special::Socket),
        CHARACTER_DEVICE => Some(Special::CharacterDevice(device)),
        BLOCK_DEVICE => Some(Special::BlockDevice(device)),
        _ => None,
    }
}

fn file(reader: &mut Reader<'_>) -> Option<(File, Bytes)> {
    let id = FileId { incarnation: Incarnation(reader.u64()?), counter: FileCounter(reader.u64()?) };
    let mut file = File::new(id, Generation(reader.u64()?), None, 0);
    let backing = reader.optional()?;
    file.size_bytes = reader.u64()?;
    let last_seal = SealNumber(reader.u64()?);
    let flags = reader.u8()?;
    let flag = |bit: u8| flags >> bit & 1 == 1;
    file.baseline_ns = reader.i64()?;
    file.opened_ns = reader.i64()?;
    file.closed_ns = reader.i64()?;
    file.flushed_ns = reader.i64()?;
    file.named_ns = reader.i64()?;
    let (mut seal, mut chunk_count) = (None, 0);
    if flag(3) {
        let (number, size_bytes, crc) = (SealNumber(reader.u64()?), reader.u64()?, reader.crc()?);
        chunk_count = reader.u64()?;
        if chunk_count > MAX_CHUNKS {
            return None;
        }
        // The chunks' checksums are in records of their own; the replay puts them in.
        seal = Some(Seal { number, size_bytes, crc, chunks: Arc::new([]) });
    }
    file.fate = FileFate::found(seal, last_seal, flag(1), false, flag(2)).found_renamed_cut(flag(6));
    let mut length_count = 0;
    if flag(4) {
        let (seal, size_bytes) = (SealNumber(reader.u64()?), reader.u64()?);
        let key = reader.text(MAX_KEY_BYTES)?;
        let codec = match reader.u8()? {
            PLAIN => None,
            ENCODED_ZSTD => Some(Codec::Zstd),
            ENCODED_PLANES => Some(Codec::Planes),
            _ => return None,
        };
        length_count = reader.u64()?;
        if length_count > MAX_CHUNKS {
            return None;
        }
        // The lengths are in records of their own; the replay puts them in.
        let encoding = codec.map(|codec| Arc::new(Encoding { codec, lengths: Vec::new() }));
        file.object = Some(Box::new((seal, ObjectCopy { key, size_bytes, encoding })));
    }
    Some((file, Bytes { backing, chunk_count, length_count, was_open: flag(0) }))
}

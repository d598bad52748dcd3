//! Records of the journal: the bytes that tell a namespace's state.
//!
//! Owns: their encoding, decoding and bounds. Does not own: files, checksums and order (`journal`), what a set
//! of records makes (`replay`).
//!
//! A record states what is, never what was done, so replaying one twice is harmless. Unsigned integers are LEB128
//! (most are small); times and checksums 8 bytes little-endian; bytes are preceded by their length. The layout of each is `encode` below, in order; any change raises
//! [`FORMAT_VERSION`].

use super::attr::Special;
use super::file::{File, ObjectCopy};
use super::handle::{Closing, Handle};
use super::heard::Taken;
use super::node::{Body, Link, Node};
use super::session::{Answer, RequestId, TouchedSession};
use super::tree::Touched;
use super::unanswered::Progress;
use super::writer::{SessionKey, WriterId};
use super::{MAX_NAME_BYTES, NodeId, State};
use std::sync::Arc;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::cluster::wire::NameOperation;
use tidemark_protocol::encoding::{Codec, Encoding};
use tidemark_protocol::file::{FileFate, Seal};
use tidemark_protocol::id::{Epoch, FileCounter, FileId, Generation, Incarnation, NodeName, SealNumber};
use tidemark_protocol::key::NodeLife;

/// The journal's format. Raised with any change of a record.
pub(super) const FORMAT_VERSION: u32 = 6;
/// The oldest format that is read: it has no operations.
pub(super) const FORMAT_VERSION_MIN: u32 = 5;
/// The longest record: an xattr of 64 KiB, or a piece of a seal's chunk checksums.
pub(super) const MAX_RECORD_BYTES: usize = 72 << 10;
/// The longest operation that is kept: two paths as long as Linux takes them, and what goes with them.
pub(super) const MAX_OPERATION_BYTES: usize = 16 << 10;
/// Chunk checksums, or lengths of encoded chunks, in one record; a file of 1 TiB has 131,072 in 16 records.
const CHUNKS_PER_RECORD: usize = 8192;
/// The longest key of an object: S3 allows 1024 bytes, escapes may triple it.
const MAX_KEY_BYTES: usize = 4096;
/// Chunks of the largest file believed: 64 PiB at 8 MiB.
const MAX_CHUNKS: u64 = 1 << 33;

/// One record.
#[derive(Debug)]
pub(super) enum Record {
    /// Numbers below this were given.
    Next(u64),
    Node(NodeId, Box<Node>, Option<Bytes>),
    Entry {
        link: Link,
        name: Vec<u8>,
        node: NodeId,
    },
    NoEntry(Link),
    Chunks {
        node: NodeId,
        first: u64,
        values: Vec<Crc64>,
    },
    Lengths {
        node: NodeId,
        first: u64,
        values: Vec<u32>,
    },
    Writers {
        node: NodeId,
        writers: Vec<Arc<WriterId>>,
    },
    Xattr {
        node: NodeId,
        name: Vec<u8>,
        value: Option<Vec<u8>>,
    },
    Freed(NodeId),
    Handle(u64, Handle),
    NoHandle(u64),
    BackingId {
        backing: u64,
        id: Option<u32>,
    },
    Answer(RequestId, Answer),
    SessionEnded,
    /// How far other nodes have been told.
    Progress(Progress),
    /// What they are to be told, by its number.
    Operation(u64, Box<NameOperation>),
    /// The epoch in which this tree is the catalog. What was heard of lives before holds no more.
    Catalog(Option<Epoch>),
    /// How far a life's publications are in it.
    Heard(NodeLife, Taken),
}

/// What a file's record says of its bytes, to be looked up by the replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bytes {
    pub(super) backing: Option<u64>,
    pub(super) chunk_count: u64,
    /// Lengths of encoded chunks that its object has; 0 where it is not encoded.
    pub(super) length_count: u64,
    /// Someone had it open for writing.
    pub(super) was_open: bool,
}

const NEXT: u8 = 1;
const FILE: u8 = 2;
const DIRECTORY: u8 = 3;
const SYMLINK: u8 = 4;
const ENTRY: u8 = 5;
const NO_ENTRY: u8 = 6;
const CHUNKS: u8 = 7;
const WRITERS: u8 = 8;
const XATTR: u8 = 9;
const FREED: u8 = 10;
const HANDLE: u8 = 11;
const NO_HANDLE: u8 = 12;
const BACKING_ID: u8 = 13;
const ANSWER: u8 = 14;
const SPECIAL: u8 = 15;
const SESSION_ENDED: u8 = 16;
const LENGTHS: u8 = 17;
const PROGRESS: u8 = 18;
const OPERATION: u8 = 19;
const CATALOG: u8 = 20;
const HEARD: u8 = 21;

/// How an object is encoded.
const PLAIN: u8 = 0;
const ENCODED_ZSTD: u8 = 1;
const ENCODED_PLANES: u8 = 2;

/// What a [`SPECIAL`] record says its node is.
const PIPE: u8 = 1;
const SOCKET: u8 = 2;
const CHARACTER_DEVICE: u8 = 3;
const BLOCK_DEVICE: u8 = 4;

/// Set in a record's length where more of the same change follow: all of them hold, or none.
pub(super) const MORE: u32 = 1 << 31;

/// Collects records, each preceded by its length, the last of a change without [`MORE`].
struct Writer<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
    last: Option<usize>,
}

impl<'a> Writer<'a> {
    fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, start: 0, last: None }
    }

    fn begin(&mut self, kind: u8) {
        self.start = self.out.len();
        self.out.extend_from_slice(&[0; 4]);
        self.out.push(kind);
    }

    fn end(&mut self) {
        let len = self.out.len() - self.start - 4;
        assert!(len <= MAX_RECORD_BYTES, "a record of {len} bytes");
        let length = u32::try_from(len).expect("bounded above") | MORE;
        self.out[self.start..self.start + 4].copy_from_slice(&length.to_le_bytes());
        self.last = Some(self.start);
    }

    /// The change is whole.
    fn close(self) {
        if let Some(last) = self.last {
            self.out[last + 3] &= 0x7f;
        }
    }

    fn u8(&mut self, value: u8) {
        self.out.push(value);
    }

    fn u32(&mut self, value: u32) {
        self.u64(value.into());
    }

    fn u64(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.out.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.out.push((value & 0x7f) as u8);
    }

    fn crc(&mut self, value: Crc64) {
        self.out.extend_from_slice(&value.0.to_le_bytes());
    }

    fn i64(&mut self, value: i64) {
        self.out.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.u32(u32::try_from(bytes.len()).expect("names, keys and values are bounded"));
        self.out.extend_from_slice(bytes);
    }

    fn optional(&mut self, value: Option<u64>) {
        self.u8(u8::from(value.is_some()));
        self.u64(value.unwrap_or(0));
    }

    fn next(&mut self, next: u64) {
        self.begin(NEXT);
        self.u64(next);
        self.end();
    }

    fn node(&mut self, id: NodeId, node: &Node) {
        self.begin(match node.body {
            Body::File(_) => FILE,
            Body::Directory(_) => DIRECTORY,
            Body::Symlink(_) => SYMLINK,
            Body::Special(_) => SPECIAL,
        });
        self.u64(id);
        self.u64(node.ino);
        self.u32(node.mode);
        self.u32(node.uid);
        self.u32(node.gid);
        self.u8(u8::from(node.overwritten));
        self.i64(node.atime_ns);
        self.i64(node.mtime_ns);
        self.i64(node.ctime_ns);
        match &node.body {
            Body::Directory(directory) => {
                self.u64(directory.next_cookie);
                self.i64(directory.renamed_ns);
            }
            Body::Symlink(target) => self.bytes(target),
            Body::Special(special) => self.special(*special),
            Body::File(file) => self.file(file),
        }
        self.end();
    }

    fn file(&mut self, file: &File) {
        self.u64(file.id.incarnation.0);
        self.u64(file.id.counter.0);
        self.u64(file.generation.0);
        self.optional(file.backing.as_ref().map(|backing| backing.number()));
        self.u64(file.size_bytes);
        self.u64(file.fate.last_seal().0);
        let (fate, seal) = (&file.fate, file.fate.seal());
        let flags = [
            fate.writers() > 0,
            fate.is_cut(),
            fate.is_vouched(),
            seal.is_some(),
            file.object.is_some(),
            file.times_set,
        ];
        self.u8(flags.iter().rev().fold(0, |bits, flag| bits << 1 | u8::from(*flag)));
        self.i64(file.baseline_ns);
        self.i64(file.opened_ns);
        self.i64(file.closed_ns);
        self.i64(file.flushed_ns);
        self.i64(file.named_ns);
        if let Some(seal) = seal {
            self.u64(seal.number.0);
            self.u64(seal.size_bytes);
            self.crc(seal.crc);
            self.u64(seal.chunks.len() as u64);
        }
        if let Some(noted) = &file.object {
            self.u64(noted.0.0);
            self.u64(noted.1.size_bytes);
            self.bytes(&noted.1.key.as_bytes()[..noted.1.key.len().min(MAX_KEY_BYTES)]);
            let encoding = noted.1.encoding.as_deref();
            self.u8(match encoding.map(|encoding| encoding.codec) {
                None => PLAIN,
                Some(Codec::Zstd) => ENCODED_ZSTD,
                Some(Codec::Planes) => ENCODED_PLANES,
            });
            self.u64(encoding.map_or(0, |encoding| encoding.lengths.len() as u64));
        }
    }

    fn special(&mut self, special: Special) {
        let (kind, device) = match special {
            Special::Pipe => (PIPE, 0),
            Special::Socket => (SOCKET, 0),
            Special::CharacterDevice(device) => (CHARACTER_DEVICE, device),
            Special::BlockDevice(device) => (BLOCK_DEVICE, device),
        };
        self.u8(kind);
        self.u32(device);
    }

    /// The checksums of a seal's chunks, and where those of its object lie.
    fn chunks(&mut self, id: NodeId, file: &File) {
        let sums = file.fate.seal().map_or(&[][..], |seal| &*seal.chunks);
        for (piece, values) in sums.chunks(CHUNKS_PER_RECORD).enumerate() {
            self.begin(CHUNKS);
            self.u64(id);
            self.u64((piece * CHUNKS_PER_RECORD) as u64);
            self.u32(u32::try_from(values.len()).expect("at most CHUNKS_PER_RECORD"));
            for value in values {
                self.crc(*value);
            }
            self.end();
        }
        let lengths = file.encoding().map_or(&[][..], |encoding| &*encoding.lengths);
        for (piece, values) in lengths.chunks(CHUNKS_PER_RECORD).enumerate() {
            self.begin(LENGTHS);
            self.u64(id);
            self.u64((piece * CHUNKS_PER_RECORD) as u64);
            self.u32(u32::try_from(values.len()).expect("at most CHUNKS_PER_RECORD"));
            for value in values {
                self.u32(*value);
            }
            self.end();
        }
    }

    fn writers(&mut self, id: NodeId, writers: &[Arc<WriterId>]) {
        self.begin(WRITERS);
        self.u64(id);
        self.u32(u32::try_from(writers.len()).expect("at most MAX_WRITERS"));
        for writer in writers {
            self.bytes(writer.session.0.as_bytes());
            self.optional(writer.world_size);
            self.optional(writer.rank);
            self.u8(u8::from(writer.environment_seen));
            self.u32(writer.tgid);
            self.u64(writer.start_time_ticks);
        }
        self.end();
    }

    fn xattr(&mut self, id: NodeId, name: &[u8], value: Option<&[u8]>) {
        self.begin(XATTR);
        self.u64(id);
        self.u8(u8::from(value.is_some()));
        self.bytes(name);
        self.bytes(value.unwrap_or_default());
        self.end();
    }

    fn entry(&mut self, link: Link, found: Option<(&[u8], NodeId)>) {
        self.begin(if found.is_some() { ENTRY } else { NO_ENTRY });
        self.u64(link.parent);
        self.u64(link.cookie);
        if let Some((name, node)) = found {
            self.u64(node);
            self.bytes(name);
        }
        self.end();
    }

    fn handle(&mut self, fh: u64, handle: Option<Handle>) {
        self.begin(if handle.is_some() { HANDLE } else { NO_HANDLE });
        self.u64(fh);
        if let Some(Handle { node, writable, closing, flushed_ns }) = handle {
            self.u64(node);
            self.u8(u8::from(writable));
            self.u8(match closing {
                Closing::Unseen => 0,
                Closing::Closed => 1,
                Closing::Cut => 2,
            });
            self.i64(flushed_ns);
        }
        self.end();
    }

    fn backing_id(&mut self, backing: u64, id: Option<u32>) {
        self.begin(BACKING_ID);
        self.u64(backing);
        self.optional(id.map(u64::from));
        self.end();
    }

    fn answer(&mut self, request: RequestId, answer: Answer) {
        self.begin(ANSWER);
        self.u64(request);
        let (kind, node, fh) = match answer {
            Answer::Done => (0, 0, 0),
            Answer::Entered(node) => (1, node, 0),
            Answer::Opened(fh) => (2, 0, fh),
            Answer::Created(node, fh) => (3, node, fh),
            Answer::Superseded => (4, 0, 0),
        };
        self.u8(kind);
        self.u64(node);
        self.u64(fh);
        self.end();
    }

    fn progress(&mut self, progress: Progress) {
        let Progress { publication, answered, on_its_way, first, sent, lost } = progress;
        self.begin(PROGRESS);
        self.u64(publication);
        self.u64(answered);
        self.u8(u8::from(on_its_way));
        self.u64(first);
        self.u64(sent);
        self.u8(u8::from(lost));
        self.end();
    }

    fn operation(&mut self, number: u64, bytes: &[u8]) {
        self.begin(OPERATION);
        self.u64(number);
        self.bytes(bytes);
        self.end();
    }

    fn catalog(&mut self, epoch: Option<Epoch>) {
        self.begin(CATALOG);
        self.optional(epoch.map(|epoch| epoch.0));
        self.end();
    }

    fn heard(&mut self, life: &NodeLife, taken: Taken) {
        self.begin(HEARD);
        self.bytes(life.node.as_str().as_bytes());
        self.u64(life.incarnation.0);
        self.u64(taken.publication);
        self.u64(taken.operations);
        self.u8(u8::from(taken.whole));
        self.end();
    }

    fn freed(&mut self, id: NodeId) {
        self.begin(FREED);
        self.u64(id);
        self.end();
    }
}

impl State {
    /// Turns what was touched into records of what now is.
    pub(super) fn note_touched(&mut self) {
        self.collect_touched();
        let tells = self.outgoing.as_ref().is_some_and(|outgoing| outgoing.unanswered.has_unjournaled());
        let is_same_tree = self.tree.touched.is_empty() && self.session.touched.is_empty();
        if is_same_tree && !tells && !self.heard.has_unjournaled() {
            return;
        }
        let touched: Touched = std::mem::take(&mut self.tree.touched);
        if let Some(changed) = &mut self.changed {
            let xattrs = touched.xattrs.iter().map(|(id, _)| id);
            changed.extend(touched.nodes.iter().chain(&touched.freed).chain(xattrs));
        }
        let session: TouchedSession = std::mem::take(&mut self.session.touched);
        let mut out = std::mem::take(&mut self.pending);
        let mut writer = Writer::new(&mut out);
        let node = |id: &NodeId| self.tree.nodes.get(id).map(|node| (*id, &**node));
        let file = |id: &NodeId| node(id).and_then(|(id, node)| Some((id, node.file().ok()?)));
        for (id, node) in touched.nodes.iter().filter_map(node) {
            writer.node(id, node);
        }
        for (id, file) in touched.chunks.iter().filter_map(file) {
            writer.chunks(id, file);
        }
        for (id, file) in touched.writers.iter().filter_map(file) {
            writer.writers(id, &file.writers);
        }
        for (id, name) in &touched.xattrs {
            if let Some((id, node)) = node(id) {
                let value = node.xattrs.as_ref().and_then(|xattrs| xattrs.values.get(name));
                writer.xattr(id, name, value.map(|value| &**value));
            }
        }
        for link in &touched.links {
            writer.entry(*link, self.tree.entry_at(*link).map(|entry| (&*entry.name, entry.node)));
        }
        for id in &touched.freed {
            writer.freed(*id);
        }
        if session.ended {
            writer.begin(SESSION_ENDED);
            writer.end();
        }
        for fh in &session.handles {
            writer.handle(*fh, self.handles.get(*fh));
        }
        for backing in &session.backing_ids {
            writer.backing_id(*backing, self.session.backing_ids.get(backing).copied());
        }
        for (request, answer) in &session.answers {
            writer.answer(*request, *answer);
        }
        if let Some(outgoing) = &mut self.outgoing {
            let (progress, operations) = outgoing.unanswered.unjournaled();
            operations.iter().for_each(|(number, bytes)| writer.operation(*number, bytes));
            progress.into_iter().for_each(|progress| writer.progress(progress));
        }
        let (epoch, lives) = self.heard.unjournaled();
        epoch.into_iter().for_each(|epoch| writer.catalog(epoch));
        lives.iter().for_each(|(life, taken)| writer.heard(life, *taken));
        writer.close();
        self.pending = out;
    }

    /// Appends records of everything about up to `count` nodes after `after`; returns the last of them.
    pub(super) fn encode_slice(&self, after: NodeId, count: usize, out: &mut Vec<u8>) -> Option<NodeId> {
        let mut last = None;
        for (id, node) in self.tree.nodes.range(after + 1..).take(count) {
            let mut writer = Writer::new(out);
            writer.node(*id, node);
            if let Body::File(file) = &node.body {
                writer.chunks(*id, file);
                if !file.writers.is_empty() {
                    writer.writers(*id, &file.writers);
                }
            }
            for (name, value) in node.xattrs.iter().flat_map(|xattrs| &xattrs.values) {
                writer.xattr(*id, name, Some(value));
            }
            for link in node.links() {
                writer.entry(link, self.tree.entry_at(link).map(|entry| (&*entry.name, entry.node)));
            }
            writer.close();
            last = Some(*id);
        }
        last
    }

    /// Ends a snapshot: the number that is given next, the kernel's session, what other nodes have not been told, and what they told.
    pub(super) fn encode_rest(&self, out: &mut Vec<u8>) {
        let mut writer = Writer::new(out);
        writer.next(self.tree.next);
        for fh in self.handles.numbers() {
            writer.handle(fh, self.handles.get(fh));
        }
        for (backing, id) in &self.session.backing_ids {
            writer.backing_id(*backing, Some(*id));
        }
        for (request, answer) in self.session.undelivered() {
            writer.answer(request, answer);
        }
        if let Some(outgoing) = &self.outgoing {
            let (progress, operations) = outgoing.unanswered.snapshot();
            writer.progress(progress);
            operations.for_each(|(number, bytes)| writer.operation(number, &bytes));
        }
        let (epoch, lives) = self.heard.snapshot();
        writer.catalog(epoch);
        lives.for_each(|(life, taken)| writer.heard(life, taken));
        writer.close();
    }
}

/// Reads what `Writer` wrote; none where it is not that.
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

/// Decodes one record; none when it is not one that we write.
pub(super) fn decode(bytes: &[u8]) -> Option<Record> {
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
            let count = usize::try_from(count).ok().filter(|count| *count <= super::file::MAX_WRITERS)?;
            let writers = (0..count).map(|_| writer(&mut reader).map(Arc::new)).collect::<Option<_>>()?;
            Record::Writers { node, writers }
        }
        XATTR => {
            let (node, present) = (reader.u64()?, reader.u8()? != 0);
            let name = reader.bytes(MAX_NAME_BYTES)?.to_vec();
            let value = reader.bytes(MAX_RECORD_BYTES)?.to_vec();
            Record::Xattr { node, name, value: present.then_some(value) }
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
            let node = reader.text(MAX_NAME_BYTES)?.parse::<NodeName>().ok()?;
            let life = NodeLife { node, incarnation: Incarnation(reader.u64()?) };
            let (publication, operations, whole) = (reader.u64()?, reader.u64()?, reader.u8()? != 0);
            Record::Heard(life, Taken { publication, operations, whole })
        }
        ANSWER => Record::Answer(reader.u64()?, answer(&mut reader)?),
        _ => return None,
    };
    reader.0.is_empty().then_some(record)
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

fn node(kind: u8, reader: &mut Reader<'_>) -> Option<Record> {
    let (id, ino) = (reader.u64()?, reader.u64()?);
    let (mode, uid, gid, overwritten) = (reader.u32()?, reader.u32()?, reader.u32()?, reader.u8()? != 0);
    let (atime_ns, mtime_ns, ctime_ns) = (reader.i64()?, reader.i64()?, reader.i64()?);
    let (body, bytes) = match kind {
        DIRECTORY => {
            let (next_cookie, renamed_ns) = (reader.u64()?, reader.i64()?);
            let directory = super::node::Directory { next_cookie, renamed_ns, ..Default::default() };
            (Body::Directory(Box::new(directory)), None)
        }
        SYMLINK => (Body::Symlink(reader.bytes(super::MAX_TARGET_BYTES)?.into()), None),
        SPECIAL => (Body::Special(special(reader)?), None),
        _ => {
            let (file, bytes) = file(reader)?;
            (Body::File(Box::new(file)), Some(bytes))
        }
    };
    let mut node = Node::new(ino, mode, uid, gid, mtime_ns, body);
    node.overwritten = overwritten;
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
    file.times_set = flag(5);
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
    file.fate = FileFate::found(seal, last_seal, flag(1), false, flag(2));
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

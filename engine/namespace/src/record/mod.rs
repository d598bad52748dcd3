//! Records of the journal: the bytes that describe a namespace's state.
//!
//! Owns: their kinds and their encoding; reading is in `read`. Does not own: files, checksums and order (`journal`), the state that a set
//! of records makes (`replay`).
//!
//! A record states what is, never what was done, so replaying one twice is harmless. Unsigned integers are LEB128 (most are small); times
//! and checksums 8 bytes little-endian; bytes are preceded by their length. The layout of each is `encode` below, in order; any change
//! raises [`FORMAT_VERSION`], unless an older reader passes over it, as over a new flag of a file.

mod read;

use super::tree::Tree;
pub(super) use read::decode;

use super::attr::Special;
use super::ends::{End, Ends, Process};
use super::file::File;
use super::handle::{Closing, Handle};
use super::heard::{Taken, Unjournaled};
use super::node::{Body, Link, Node};
use super::pidfd::Ended;
use super::session::{Answer, RequestId, TouchedSession};
use super::tree::Touched;
use super::unanswered::Progress;
use super::writer::WriterId;
use super::{NodeId, State};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::cluster::wire::NameOperation;
use tidemark_protocol::encoding::Codec;
use tidemark_protocol::id::Epoch;
use tidemark_protocol::key::NodeLife;

/// The journal's newest format. Raise it with any change of a record that an older reader refuses.
pub(super) const FORMAT_VERSION: u32 = 8;
/// The format of a journal without a record of the newest one ([`format_of`]).
pub(super) const FORMAT_VERSION_LEAST: u32 = 7;
/// The oldest format that is read: it has no operations. Up to 6, nodes have no time at which their attributes were set. Up to 7, lives
/// that were given up are not recorded, and none counts as away.
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
/// The largest file, 64 PiB: records of a larger file would be refused when read back.
pub const LARGEST_FILE_BYTES: u64 = MAX_CHUNKS * tidemark_protocol::layout::CHUNK_BYTES;

/// A record of the journal.
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
    /// How a process was seen to end.
    End(Process, End),
    Freed(NodeId),
    Handle(u64, Handle),
    NoHandle(u64),
    BackingId {
        backing: u64,
        id: Option<u32>,
    },
    Answer(RequestId, Answer),
    SessionEnded,
    /// How far changes were published to other nodes.
    Progress(Progress),
    /// An operation to publish to other nodes, by its number.
    Operation(u64, Box<NameOperation>),
    /// The epoch in which this tree is the catalog. Earlier records of other lives' publications no longer hold.
    Catalog(Option<Epoch>),
    /// How far a life's publications are applied to this tree.
    Heard(NodeLife, Taken),
    /// The nodes that were made while a life counted as lost; none: the life has published everything since.
    Away(NodeLife, Option<Range<NodeId>>),
}

/// Facts about a file's bytes in its record, to be looked up by the replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bytes {
    pub(super) backing: Option<u64>,
    pub(super) chunk_count: u64,
    /// Number of lengths of encoded chunks that the file's object has; 0 if it is not encoded.
    pub(super) length_count: u64,
    /// Whether a program had the file open for writing.
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
pub(super) const AWAY: u8 = 22;

/// Flags of a node.
const OVERWRITTEN: u8 = 1;
const ATTRIBUTES_SET: u8 = 2;

/// How an object is encoded.
const PLAIN: u8 = 0;
const ENCODED_ZSTD: u8 = 1;
const ENCODED_PLANES: u8 = 2;

/// Kinds of node in a [`SPECIAL`] record.
const PIPE: u8 = 1;
const SOCKET: u8 = 2;
const CHARACTER_DEVICE: u8 = 3;
const BLOCK_DEVICE: u8 = 4;

/// Number that no node has, so that earlier readers skip its attributes: they know no ends, and lose nothing else.
const NO_NODE: NodeId = 0;
/// The attribute of [`NO_NODE`] that says how a process ended.
const END: &[u8] = b"end";
/// Size of that attribute's value: number, start, moment, how; each of a fixed size, little-endian.
const END_BYTES: usize = 4 + 8 + 8 + 1;
const ENDED_WELL: u8 = 0;
const ENDED_FAILED: u8 = 1;
const ENDED_KILLED: u8 = 2;

/// Flag in a record's length if more records of the same change follow: all of them hold, or none.
pub(super) const MORE: u32 = 1 << 31;

/// Returns the oldest format whose readers take this record as it is written here.
pub(super) fn format_of(record: &[u8]) -> u32 {
    if record.first() == Some(&AWAY) { FORMAT_VERSION } else { FORMAT_VERSION_LEAST }
}

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

    /// Marks the change as whole.
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
        let set = node.attributes_ns != 0;
        self.u8((u8::from(node.overwritten) * OVERWRITTEN) | (u8::from(set) * ATTRIBUTES_SET));
        self.i64(node.atime_ns);
        self.i64(node.mtime_ns);
        self.i64(node.ctime_ns);
        if set {
            self.i64(node.attributes_ns);
        }
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
            // Builds before this one noted here that utimens came while writers had the file open.
            false,
            fate.is_renamed_cut(),
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

    /// Writes the checksums of a seal's chunks, and where those of its object lie.
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

    fn ended(&mut self, (tgid, start_time_ticks): Process, end: End) {
        let how = match end.how {
            Ended::Well => ENDED_WELL,
            Ended::Failed => ENDED_FAILED,
            Ended::Killed => ENDED_KILLED,
        };
        let mut value = [how; END_BYTES];
        value[..4].copy_from_slice(&tgid.to_le_bytes());
        value[4..12].copy_from_slice(&start_time_ticks.to_le_bytes());
        value[12..20].copy_from_slice(&end.at_ns.to_le_bytes());
        self.xattr(NO_NODE, END, Some(&value));
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

    fn heard(&mut self, Unjournaled { epoch, lives, away }: &Unjournaled) {
        epoch.iter().for_each(|epoch| self.catalog(*epoch));
        lives.iter().for_each(|(life, taken)| self.taken(life, *taken));
        away.iter().for_each(|(life, made)| self.away(life, made.as_ref()));
    }

    fn life(&mut self, life: &NodeLife) {
        self.bytes(life.node.as_str().as_bytes());
        self.u64(life.incarnation.0);
    }

    fn away(&mut self, life: &NodeLife, made: Option<&Range<NodeId>>) {
        self.begin(AWAY);
        self.life(life);
        self.u8(u8::from(made.is_some()));
        self.u64(made.map_or(0, |made| made.start));
        self.u64(made.map_or(0, |made| made.end));
        self.end();
    }

    fn taken(&mut self, life: &NodeLife, taken: Taken) {
        self.begin(HEARD);
        self.life(life);
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
    /// Turns the touched parts into records of their present state.
    pub(super) fn note_touched(&mut self) {
        self.tree.changes.collect(&self.tree.touched);
        self.outgoing.collect(&self.tree.touched);
        let tells =
            self.outgoing.untold.as_ref().is_some_and(|outgoing| outgoing.unanswered.has_unjournaled());
        let is_same_tree = self.tree.touched.is_empty() && self.session.touched.is_empty();
        if is_same_tree && !tells && !self.heard.has_unjournaled() {
            return;
        }
        let touched: Touched = std::mem::take(&mut self.tree.touched);
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
        if let Some(outgoing) = &mut self.outgoing.untold {
            let (progress, operations) = outgoing.unanswered.unjournaled();
            operations.iter().for_each(|(number, bytes)| writer.operation(*number, bytes));
            progress.into_iter().for_each(|progress| writer.progress(progress));
        }
        writer.heard(&self.heard.unjournaled());
        writer.close();
        self.pending = out;
    }

    /// Appends records of how processes ended.
    pub(super) fn note_ends(&mut self, ends: &[(Process, End)]) {
        let mut writer = Writer::new(&mut self.pending);
        ends.iter().for_each(|(process, end)| writer.ended(*process, *end));
        writer.close();
    }

    /// Ends a snapshot: the next number, the kernel's session, changes not published to other nodes, and how far theirs were applied.
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
        if let Some(outgoing) = &self.outgoing.untold {
            let (progress, operations) = outgoing.unanswered.snapshot();
            writer.progress(progress);
            operations.for_each(|(number, bytes)| writer.operation(number, &bytes));
        }
        writer.heard(&self.heard.snapshot());
        writer.close();
    }
}

/// Appends records of everything about up to `count` nodes after `after`, and of those `ends` of their writers that were not recorded
/// yet; returns the last of the nodes.
pub(super) fn encode_slice(
    tree: &Tree,
    after: NodeId,
    count: usize,
    (ends, told): (&Ends, &mut BTreeSet<Process>),
    out: &mut Vec<u8>,
) -> Option<NodeId> {
    let mut last = None;
    for (id, node) in tree.nodes.range(after + 1..).take(count) {
        let mut writer = Writer::new(out);
        writer.node(*id, node);
        if let Body::File(file) = &node.body {
            writer.chunks(*id, file);
            if !file.writers.is_empty() {
                writer.writers(*id, &file.writers);
            }
            for (process, end) in ends.untold(&file.writers, told) {
                writer.ended(process, end);
            }
        }
        for (name, value) in node.xattrs.iter().flat_map(|xattrs| &xattrs.values) {
            writer.xattr(*id, name, Some(value));
        }
        for link in node.links() {
            writer.entry(link, tree.entry_at(link).map(|entry| (&*entry.name, entry.node)));
        }
        writer.close();
        last = Some(*id);
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(write: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
        let mut out = Vec::new();
        let mut writer = Writer::new(&mut out);
        write(&mut writer);
        writer.close();
        out.split_off(4)
    }

    /// The previous version of the daemon takes the journal back, and knows no ends.
    #[test]
    fn an_end_is_an_attribute_of_no_node_to_daemons_that_know_no_ends() {
        let (process, end) = ((7, 1 << 40), End { at_ns: -3, how: Ended::Killed });
        let told = record(|writer| writer.ended(process, end));
        let Some(Record::End(of, how)) = decode(&told) else { panic!("{told:?}") };
        assert_eq!((of, how), (process, end));
        assert_eq!((told[0], u64::from(told[1])), (XATTR, NO_NODE));
        assert_eq!(format_of(&told), FORMAT_VERSION_LEAST);
        // This daemon, too, passes over a later daemon's attributes of no node.
        for (name, value) in [(&b"later"[..], &b"?"[..]), (END, b"longer than it was, or of another form")] {
            let later = record(|writer| writer.xattr(NO_NODE, name, Some(value)));
            assert!(matches!(decode(&later), Some(Record::Xattr { node: NO_NODE, .. })), "{later:?}");
        }
    }
}

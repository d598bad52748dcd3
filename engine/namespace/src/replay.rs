//! Replay: from the journal's records back to a namespace.
//!
//! Owns: putting records together and refusing impossible ones. Does not own: their bytes (`record`), the files (`journal`).

use super::ends::{End, Ends, Process};
use super::file::File;
use super::handle::Handle;
use super::heard::{Heard, Taken};
use super::journal::Image;
use super::node::{Body, Entry, Link, Name, Node};
use super::record::{Bytes, Record, decode};
use super::session::{ANSWERS_READ_MAX, Answer, RequestId};
use super::tree::Tree;
use super::unanswered::{Progress, Unanswered};
use super::xattr::Xattrs;
use super::{NamespaceError, NodeId, ROOT, State};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::cluster::wire::NameOperation;
use tidemark_protocol::encoding::Encoding;
use tidemark_protocol::file::{FileFate, Seal};
use tidemark_protocol::id::{Epoch, FileId, Incarnation};
use tidemark_protocol::key::NodeLife;
use tidemark_tier1::Backing;

/// The state as the records describe it, before it is checked.
#[derive(Debug, Default)]
struct Raw {
    next: u64,
    nodes: BTreeMap<NodeId, (Box<Node>, Option<Bytes>)>,
    chunks: BTreeMap<NodeId, Vec<Crc64>>,
    lengths: BTreeMap<NodeId, Vec<u32>>,
    entries: BTreeMap<(NodeId, u64), (Name, NodeId)>,
    handles: BTreeMap<u64, Handle>,
    last_handle: u64,
    backing_ids: BTreeMap<u64, u32>,
    answers: VecDeque<(RequestId, Answer)>,
    progress: Option<Progress>,
    operations: BTreeMap<u64, NameOperation>,
    catalog_of: Option<Epoch>,
    heard: BTreeMap<NodeLife, Taken>,
    away: BTreeMap<NodeLife, Range<NodeId>>,
    /// In the order in which they were recorded.
    ends: Vec<(Process, End)>,
}

impl Raw {
    fn apply(&mut self, record: Record) {
        match record {
            Record::Next(next) => self.next = self.next.max(next),
            Record::Node(id, mut node, bytes) => {
                self.next = self.next.max(id + 1);
                if let Body::File(file) = &node.body {
                    self.next = self.next.max(file.generation.0 + 1);
                }
                if let Some((old, _)) = self.nodes.get_mut(&id) {
                    node.xattrs = old.xattrs.take();
                    if let (Body::File(new), Body::File(old)) = (&mut node.body, &mut old.body) {
                        new.writers = std::mem::take(&mut old.writers);
                    }
                }
                if bytes.is_none_or(|bytes| bytes.chunk_count == 0) {
                    self.chunks.remove(&id); // A seal of no bytes has no record of chunks to say so.
                }
                if bytes.is_none_or(|bytes| bytes.length_count == 0) {
                    self.lengths.remove(&id);
                }
                self.nodes.insert(id, (node, bytes));
            }
            Record::Entry { link, name, node } => {
                self.entries.insert((link.parent, link.cookie), (Arc::from(name), node));
            }
            Record::NoEntry(link) => {
                self.entries.remove(&(link.parent, link.cookie));
            }
            Record::Chunks { node, first, values } => {
                let chunks = self.chunks.entry(node).or_default();
                if first == 0 {
                    chunks.clear();
                }
                if chunks.len() as u64 == first {
                    chunks.extend(values);
                }
            }
            Record::Lengths { node, first, values } => {
                let lengths = self.lengths.entry(node).or_default();
                if first == 0 {
                    lengths.clear();
                }
                if lengths.len() as u64 == first {
                    lengths.extend(values);
                }
            }
            Record::Writers { node, writers } => {
                if let Some((known, _)) = self.nodes.get_mut(&node)
                    && let Ok(file) = known.file_mut()
                {
                    file.writers = writers;
                }
            }
            Record::Xattr { node, name, value } => {
                if let Some((known, _)) = self.nodes.get_mut(&node) {
                    let xattrs = known.xattrs.get_or_insert_with(|| Box::new(Xattrs::default()));
                    match value {
                        Some(value) => {
                            xattrs.values.insert(Arc::from(name), value.into());
                        }
                        None => {
                            xattrs.values.remove(&*name);
                        }
                    }
                    if xattrs.values.is_empty() {
                        known.xattrs = None;
                    }
                }
            }
            Record::End(process, end) => self.ends.push((process, end)),
            Record::Freed(node) => {
                self.next = self.next.max(node + 1);
                self.nodes.remove(&node);
                self.chunks.remove(&node);
                self.lengths.remove(&node);
            }
            Record::Handle(fh, handle) => {
                self.last_handle = self.last_handle.max(fh);
                self.handles.insert(fh, handle);
            }
            Record::NoHandle(fh) => {
                self.last_handle = self.last_handle.max(fh);
                self.handles.remove(&fh);
            }
            Record::BackingId { backing, id } => {
                match id {
                    Some(id) => self.backing_ids.insert(backing, id),
                    None => self.backing_ids.remove(&backing),
                };
            }
            Record::SessionEnded => {
                self.handles.clear();
                self.backing_ids.clear();
                self.answers.clear();
            }
            Record::Progress(progress) => {
                self.operations = self.operations.split_off(&progress.first);
                self.progress = Some(progress);
            }
            Record::Operation(number, operation) => {
                self.operations.insert(number, *operation);
            }
            Record::Catalog(epoch) => {
                self.catalog_of = epoch;
                self.heard.clear();
                self.away.clear();
            }
            Record::Heard(life, taken) => {
                self.heard.insert(life, taken);
            }
            Record::Away(life, made) => {
                match made {
                    Some(made) => self.away.insert(life, made),
                    None => self.away.remove(&life),
                };
            }
            Record::Answer(request, answer) => {
                if self.answers.len() == ANSWERS_READ_MAX {
                    self.answers.pop_front();
                }
                self.answers.push_back((request, answer));
            }
        }
    }
}

/// Builds the state that `image` describes, and the ends of the processes that wrote its files. Unless the kernel's session goes on, its
/// handles are gone, and with them the nodes without a name.
pub(super) fn rebuild(
    image: Image,
    own: Incarnation,
    session_goes_on: bool,
    journal_bytes: u64,
    backing: &mut dyn FnMut(u64) -> Option<Arc<Backing>>,
) -> Result<(State, Ends), NamespaceError> {
    let mut raw = Raw::default();
    for (index, bytes) in image.iter().enumerate() {
        let record = decode(bytes);
        raw.apply(record.ok_or(NamespaceError::Corrupt { what: "record", found: index as u64, most: 0 })?);
    }
    drop(image);
    if !session_goes_on {
        raw.apply(Record::SessionEnded);
    }
    let mut nodes = std::mem::take(&mut raw.nodes);
    let (root, _) = nodes.remove(&ROOT).ok_or(NamespaceError::Corrupt { what: "root", found: 0, most: 1 })?;
    if !root.is_directory() {
        return Err(NamespaceError::Corrupt { what: "root's kind", found: 0, most: 1 });
    }
    let mut tree = Tree::new(*root);
    tree.next = raw.next.max(tree.next);
    let mut states: BTreeMap<NodeId, Bytes> = BTreeMap::new();
    for (id, (node, bytes)) in nodes {
        states.extend(bytes.map(|bytes| (id, bytes)));
        tree.insert(id, *node);
    }
    hang(&mut tree, raw.entries)?;
    let (handles, writers) = held(&tree, raw.handles);
    let open: BTreeSet<NodeId> = handles.values().map(|handle| handle.node).collect();
    let dropped = drop_unreachable(&mut tree, &open, session_goes_on);
    // An inode that the kernel remembers keeps its node and its bytes. Inodes that it forgot while no daemon ran give way first.
    let nameless = tree.nodes.iter().filter(|(id, node)| **id != ROOT && node.link_count() == 0);
    let leftovers: Vec<_> = nameless.map(|(id, _)| *id).filter(|id| !open.contains(id)).collect();
    for node in tree.nodes.values_mut() {
        node.taken_up = session_goes_on;
        node.forsaken = node.overwritten && node.link_count() == 0;
    }
    let mut state = State::new(tree);
    leftovers.into_iter().for_each(|id| state.reclaimable.add_leftover(id));
    state.handles.given(raw.last_handle);
    state.session.backing_ids = raw.backing_ids;
    state.session.inherit(raw.answers.into_iter());
    state.session.touched.ended = !session_goes_on;
    let unanswered = raw.progress.map(|progress| Unanswered::found(progress, raw.operations, journal_bytes));
    state.outgoing.tell_on(unanswered, &state.tree);
    state.heard = Heard::found(raw.catalog_of, raw.heard, raw.away);
    for (id, bytes) in states {
        let Ok(node) = state.tree.node_mut(id) else { continue };
        let chunks = raw.chunks.remove(&id).unwrap_or_default();
        let Ok(file) = node.file_mut() else { continue };
        let writing = writers.get(&id).copied().unwrap_or(0);
        put_lengths(id, file, raw.lengths.remove(&id).unwrap_or_default());
        revive(id, file, bytes, chunks, writing, backing);
        let identity = file.id;
        let size_bytes =
            file.backing.as_ref().and_then(|b| b.stat().ok()).map_or(file.size_bytes, |s| s.size_bytes);
        // Writes since the journal's last record are still to be taken from the backing file's clock.
        if writing > 0 {
            file.size_bytes = size_bytes;
        } else if super::attr::rebase(node, size_bytes).is_err() {
            tracing::warn!(node = id, "times of a recovered file may be off");
        }
        if identity != (FileId { incarnation: own, counter: tidemark_protocol::id::FileCounter(id) }) {
            state.identities.adopt(identity, id);
        }
    }
    for (fh, handle) in handles {
        let Ok(file) = state.tree.file_mut(handle.node) else { continue };
        if file.backing.is_none() {
            tracing::error!(fh, node = handle.node, "an open file's bytes are gone from Tier-1");
            continue;
        }
        file.opens += 1;
        state.handles.put(fh, handle);
    }
    state.find_copies();
    state.tree.mark_all();
    // The journal holds all this already; the next compaction records the files that were cut, dropped or lost. But a daemon that goes on
    // with the next session must not recover anything of this one.
    state.tree.touched = super::tree::Touched { freed: dropped, ..super::tree::Touched::default() };
    let ends = Ends::found(raw.ends, &state.tree);
    Ok((state, ends))
}

/// Puts entries into their directories.
fn hang(tree: &mut Tree, entries: BTreeMap<(NodeId, u64), (Name, NodeId)>) -> Result<(), NamespaceError> {
    for ((parent, cookie), (name, node)) in entries {
        let known = tree.nodes.contains_key(&node) && node != ROOT;
        let is_directory = known && tree.nodes[&node].is_directory();
        let twice = is_directory && tree.nodes[&node].first_link().is_some();
        let directory = tree.nodes.get_mut(&parent).and_then(|node| node.directory_mut().ok());
        let (Some(directory), true, false) = (directory, known, twice) else {
            return Err(NamespaceError::Corrupt { what: "entry", found: node, most: tree.next });
        };
        directory.next_cookie = directory.next_cookie.max(cookie + 1);
        directory.subdirectories += u32::from(is_directory);
        tree.weight_bytes += super::tree::ENTRY_WEIGHT_BYTES + name.len() as u64;
        if directory.by_name.insert(Arc::clone(&name), cookie).is_some() {
            return Err(NamespaceError::Corrupt { what: "name given twice", found: node, most: tree.next });
        }
        directory.by_cookie.insert(cookie, Entry { name, node });
        tree.nodes.get_mut(&node).expect("looked up above").add_link(Link { parent, cookie });
    }
    Ok(())
}

/// Returns the handles whose files are known, and how many of them may write each file.
fn held(tree: &Tree, handles: BTreeMap<u64, Handle>) -> (BTreeMap<u64, Handle>, BTreeMap<NodeId, u32>) {
    let is_file = |handle: &Handle| tree.node(handle.node).is_ok_and(|node| node.file().is_ok());
    let handles: BTreeMap<_, _> = handles.into_iter().filter(|(_, handle)| is_file(handle)).collect();
    let mut writers: BTreeMap<_, u32> = BTreeMap::new();
    for handle in handles.values().filter(|handle| handle.writable) {
        *writers.entry(handle.node).or_default() += 1;
    }
    (handles, writers)
}

/// Frees nodes that no path from the root reaches and no program has open. While the session goes on a node without a name stays: when
/// the kernel forgets such a node, the journal records it as freed.
fn drop_unreachable(tree: &mut Tree, open: &BTreeSet<NodeId>, session_goes_on: bool) -> Vec<NodeId> {
    let mut reached = open.clone();
    reached.insert(ROOT);
    if session_goes_on {
        reached.extend(tree.nodes.iter().filter(|(_, node)| node.link_count() == 0).map(|(id, _)| *id));
    }
    let mut todo = vec![ROOT];
    while let Some(at) = todo.pop() {
        if let Ok(directory) = tree.nodes[&at].directory() {
            todo.extend(
                directory.by_cookie.values().map(|entry| entry.node).filter(|node| reached.insert(*node)),
            );
        }
    }
    let dropped = tree.nodes.keys().copied().filter(|id| !reached.contains(id)).collect();
    tree.nodes.retain(|id, _| reached.contains(id));
    dropped
}

/// Gives an encoded object the lengths of its chunks back. Without them the object cannot be read, and does not count as a copy.
fn put_lengths(id: NodeId, file: &mut File, lengths: Vec<u32>) {
    let Some(noted) = &mut file.object else { return };
    let Some(encoding) = &noted.1.encoding else { return };
    let encoding = Encoding { codec: encoding.codec, lengths };
    match encoding.check(&noted.1.key, noted.1.size_bytes) {
        Ok(()) => noted.1.encoding = Some(Arc::new(encoding)),
        Err(flaw) => {
            tracing::error!(node = id, %flaw, "a journaled object cannot be read");
            file.object = None;
        }
    }
}

/// Gives a file its bytes and its state back.
fn revive(
    id: NodeId,
    file: &mut File,
    bytes: Bytes,
    chunks: Vec<Crc64>,
    writers: u32,
    backing: &mut dyn FnMut(u64) -> Option<Arc<Backing>>,
) {
    file.backing = bytes.backing.and_then(backing);
    let fate = &file.fate;
    let whole = chunks.len() as u64 == bytes.chunk_count;
    let seal = fate.seal().filter(|_| whole).map(|seal| Seal { chunks: chunks.into(), ..seal.clone() });
    // The file was open then and is not open now: its close was not seen.
    let lost = bytes.was_open && writers == 0;
    let found = FileFate::found(seal, fate.last_seal(), fate.is_cut(), lost, fate.is_vouched());
    file.fate = found.found_renamed_cut(fate.is_renamed_cut());
    file.fate.taken_up(writers);
    file.unverified = file.backing.is_some() && file.fate.seal().is_some();
    // Growth begins with the first writer and ends with the last.
    if let (Some(backing), true) = (&file.backing, writers > 0) {
        backing.begin_growth();
    }
    if let (Some(_), None, true) = (bytes.backing, &file.backing, file.size_bytes > 0) {
        tracing::warn!(node = id, file = %file.id, size_bytes = file.size_bytes, object = file.object.is_some(),
            "the bytes of a journaled file are gone from Tier-1");
    }
}

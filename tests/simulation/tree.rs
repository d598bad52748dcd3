//! A node's tree: names and files made here, and those that other nodes reported.
//!
//! Owns: names, files with the rules of their states, unpublished changes, applying other nodes' changes, as the
//! engine's namespace does (`mirror`, `outgoing`). Does not own: which node to ask, bytes of copies.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::cluster::wire::{
    FileFacts, NameOperation, NodeAttributes, NodeKind, NodeState, WireState, WriterFact,
};
use tidemark_protocol::file::{FileEvent, FileFate, Seal};
use tidemark_protocol::id::{FileCounter, FileId, Generation, Incarnation};
use tidemark_protocol::layout::CHUNK_BYTES;

/// Most operations kept while no coordinator takes them. Beyond it, the node publishes everything. Small, so that this
/// happens.
const OPERATIONS_MAX: usize = 256;

/// Size of each file's last chunk, less than a whole chunk, so that file sizes are not round.
const TAIL_BYTES: u64 = 300_001;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    Directory(u64),
    File(FileId),
}

/// A file whose writers are here.
#[derive(Debug, Clone)]
pub(crate) struct Own {
    pub(crate) fate: FileFate,
    /// Content of each chunk.
    pub(crate) chunks: Vec<u64>,
    pub(crate) writers: Vec<WriterFact>,
    opened_ns: i64,
    closed_ns: i64,
    published_ns: i64,
}

#[derive(Debug)]
pub(crate) struct Tree {
    life: Incarnation,
    pub(crate) names: BTreeMap<Vec<u8>, Entry>,
    directories: BTreeMap<u64, Vec<u8>>,
    pub(crate) paths: BTreeMap<FileId, Vec<u8>>,
    own: BTreeMap<FileId, Own>,
    pub(crate) told: BTreeMap<FileId, FileFacts>,
    /// Files that lost their names, as long as this tree is the catalog.
    pub(crate) dropped: BTreeSet<FileId>,
    next: u64,
    operations: Vec<NameOperation>,
    touched: Vec<Vec<u8>>,
    overflowed: bool,
    /// Number of changes of names made here so far. `recent` has the number of the last change of each name.
    pub(crate) number: u64,
    recent: BTreeMap<Vec<u8>, u64>,
}

/// Splits a path into its directory and its last part.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[], path),
    }
}

pub(crate) fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, name].join(&b'/') }
}

pub(crate) fn is_below(path: &[u8], directory: &[u8]) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// Returns the checksum of a chunk with this content.
pub(crate) fn sum(content: u64) -> Crc64 {
    Crc64(content.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ 0x1234_5678_9abc_def1)
}

pub(crate) fn size_of(chunks: usize) -> u64 {
    if chunks == 0 { 0 } else { (chunks as u64 - 1) * CHUNK_BYTES + TAIL_BYTES }
}

impl Tree {
    pub(crate) fn new(life: Incarnation) -> Self {
        Self {
            life,
            names: BTreeMap::new(),
            directories: BTreeMap::from([(0, Vec::new())]),
            paths: BTreeMap::new(),
            own: BTreeMap::new(),
            told: BTreeMap::new(),
            dropped: BTreeSet::new(),
            next: 1,
            operations: Vec::new(),
            touched: Vec::new(),
            overflowed: false,
            number: 0,
            recent: BTreeMap::new(),
        }
    }

    // Reading the tree.

    /// Returns the number of a directory, which it keeps when it is renamed.
    pub(crate) fn directory(&self, path: &[u8]) -> Option<u64> {
        match self.names.get(path) {
            _ if path.is_empty() => Some(0),
            Some(Entry::Directory(number)) => Some(*number),
            _ => None,
        }
    }

    pub(crate) fn path_of(&self, directory: u64) -> Option<Vec<u8>> {
        self.directories.get(&directory).cloned()
    }

    pub(crate) fn own(&self, file: FileId) -> Option<&Own> {
        self.own.get(&file)
    }

    pub(crate) fn own_files(&self) -> impl Iterator<Item = (&FileId, &Own)> {
        self.own.iter()
    }

    /// Returns the states of a directory's entries.
    pub(crate) fn entries(&self, directory: &[u8]) -> Option<Vec<NodeState>> {
        self.directory(directory)?;
        let below = self.names.range(directory.to_vec()..).filter(|(path, _)| split(path).0 == directory);
        Some(below.map(|(path, _)| path).filter_map(|path| self.state_of(path)).collect())
    }

    pub(crate) fn state_of(&self, path: &[u8]) -> Option<NodeState> {
        let kind = match self.names.get(path)? {
            Entry::Directory(_) => NodeKind::Directory,
            Entry::File(file) => NodeKind::File(Box::new(self.facts_of(*file)?)),
        };
        Some(NodeState {
            path: path.to_vec(),
            attributes: NodeAttributes::default(),
            attributes_ns: 0,
            other_names: None,
            kind,
        })
    }

    pub(crate) fn facts_of(&self, file: FileId) -> Option<FileFacts> {
        let Some(own) = self.own.get(&file) else { return self.told.get(&file).cloned() };
        Some(FileFacts {
            file,
            size_bytes: size_of(own.chunks.len()),
            state: WireState::from(&own.fate.state()),
            seal: own.fate.last_seal(),
            opened_ns: own.opened_ns,
            closed_ns: own.closed_ns,
            published_ns: own.published_ns,
            vouched: own.fate.is_vouched(),
            generation: Generation(0),
            writers: own.writers.clone(),
            host: true,
            object: None,
        })
    }

    /// Whether the state is of a file that lost its name.
    pub(crate) fn is_dropped(&self, told: &NodeState) -> bool {
        matches!(&told.kind, NodeKind::File(facts) if self.dropped.contains(&facts.file))
    }

    // Changes made here.

    pub(crate) fn make_directory(&mut self, path: &[u8]) {
        if self.directory(path).is_none() {
            self.add_directory(path);
            self.tell(NameOperation::Directory {
                path: path.to_vec(),
                attributes: NodeAttributes::default(),
            });
            self.changed(path);
        }
    }

    /// Creates a file under a name, and removes what had the name.
    pub(crate) fn create(&mut self, path: &[u8], writer: WriterFact, now_ns: i64) -> FileId {
        self.next += 1;
        let file = FileId { incarnation: self.life, counter: FileCounter(self.next) };
        self.drop_name(path);
        let mut own = Own {
            fate: FileFate::default(),
            chunks: Vec::new(),
            writers: vec![writer],
            opened_ns: now_ns,
            closed_ns: 0,
            published_ns: now_ns,
        };
        own.fate.step(FileEvent::WriterOpened).expect("a new file can be written");
        self.own.insert(file, own);
        self.names.insert(path.to_vec(), Entry::File(file));
        self.paths.insert(file, path.to_vec());
        let attributes = NodeAttributes::default();
        self.tell(NameOperation::File { path: path.to_vec(), file, attributes });
        self.changed(path);
        file
    }

    /// Truncates one of this node's files, as O_TRUNC does.
    pub(crate) fn truncate(&mut self, file: FileId, writer: WriterFact, now_ns: i64) {
        let Some(own) = self.own.get_mut(&file) else { return };
        for event in [FileEvent::Changed, FileEvent::Emptied, FileEvent::WriterOpened] {
            own.fate.step(event).expect("what is begun anew can be written");
        }
        own.chunks.clear();
        own.writers = vec![writer];
        own.opened_ns = now_ns;
        self.touch(file);
    }

    pub(crate) fn append(&mut self, file: FileId, content: u64) {
        if let Some(own) = self.own.get_mut(&file) {
            own.chunks.push(content);
        }
    }

    pub(crate) fn close(&mut self, file: FileId, cut: bool, now_ns: i64) {
        let Some(own) = self.own.get_mut(&file) else { return };
        if own.fate.step(FileEvent::WriterReleased { cut }).is_ok() {
            (own.closed_ns, own.published_ns) = (now_ns, now_ns);
            self.touch(file);
        }
    }

    /// Updates the fates of the processes that wrote.
    pub(crate) fn fates(&mut self, change: impl Fn(&mut WriterFact) -> bool) {
        let mut touched = Vec::new();
        for (file, own) in &mut self.own {
            if own.writers.iter_mut().map(&change).fold(false, |any, one| any | one) {
                touched.push(*file);
            }
        }
        touched.into_iter().for_each(|file| self.touch(file));
    }

    /// Seals a file without writers. Returns the seal, if there is one now.
    pub(crate) fn seal(&mut self, file: FileId) -> Option<Seal> {
        let own = self.own.get_mut(&file)?;
        own.fate.step(FileEvent::Tested { mapped: false }).ok()?;
        let chunks: Arc<[Crc64]> = own.chunks.iter().map(|content| sum(*content)).collect();
        let size_bytes = size_of(chunks.len());
        let crc = Crc64::combine_all(&chunks, size_bytes).expect("as many as the size makes");
        let seal = Seal { number: own.fate.last_seal().next(), size_bytes, crc, chunks };
        own.fate.step(FileEvent::Hashed(seal.clone())).ok()?;
        self.touch(file);
        Some(seal)
    }

    /// Renames a file or directory. Returns false if there is no such name.
    pub(crate) fn rename(&mut self, from: &[u8], to: &[u8], now_ns: i64) -> bool {
        if !self.names.contains_key(from) {
            return false;
        }
        self.move_name(from, to);
        if let Some(Entry::File(file)) = self.names.get(to).copied()
            && let Some(own) = self.own.get_mut(&file)
        {
            own.fate.step(FileEvent::Vouched).expect("rename vouches for anything");
            own.published_ns = now_ns;
            self.touch(file);
        }
        let what = self.file_at(to);
        self.tell(NameOperation::Renamed { from: from.to_vec(), to: to.to_vec(), exchange: false, what });
        self.changed(from);
        self.changed(to);
        true
    }

    pub(crate) fn unlink(&mut self, path: &[u8]) -> bool {
        let what = self.file_at(path);
        if !self.drop_name(path) {
            return false;
        }
        self.tell(NameOperation::Removed { path: path.to_vec(), what });
        self.changed(path);
        true
    }

    // Changes to publish.

    fn tell(&mut self, operation: NameOperation) {
        if self.operations.len() >= OPERATIONS_MAX {
            self.operations.clear();
            self.overflowed = true;
        }
        self.operations.push(operation);
    }

    fn touch(&mut self, file: FileId) {
        if let Some(path) = self.paths.get(&file)
            && !self.touched.contains(path)
        {
            self.touched.push(path.clone());
        }
    }

    /// Counts a change of a name that was made here.
    fn changed(&mut self, path: &[u8]) {
        self.number += 1;
        self.recent.insert(path.to_vec(), self.number);
    }

    pub(crate) fn forget_outgoing(&mut self) {
        self.operations.clear();
        self.touched.clear();
        self.overflowed = false;
    }

    /// Takes operations to publish, then states once no operation is left. The bool says whether operations were dropped before.
    pub(crate) fn take_outgoing(&mut self, most: usize) -> (Vec<NameOperation>, Vec<NodeState>, bool) {
        let overflowed = std::mem::take(&mut self.overflowed);
        let count = self.operations.len().min(most);
        let operations: Vec<_> = self.operations.drain(..count).collect();
        let touched = if self.operations.is_empty() { std::mem::take(&mut self.touched) } else { Vec::new() };
        let states = touched.iter().filter_map(|path| self.state_of(path)).collect();
        (operations, states, overflowed)
    }

    pub(crate) fn whole(&self) -> Vec<NodeState> {
        self.names.keys().filter_map(|path| self.state_of(path)).collect()
    }

    // Changes from other nodes.

    pub(crate) fn follow(&mut self, operation: &NameOperation, home: Incarnation) {
        match operation {
            NameOperation::Directory { path, .. } => self.make_mirror(path),
            NameOperation::File { path, file, .. } => self.make_file(path, *file, home),
            NameOperation::Removed { path, what } if self.file_at(path) == *what => {
                self.drop_name(path);
            }
            NameOperation::Renamed { from, to, what, .. }
                if self.names.contains_key(from) && self.file_at(from) == *what =>
            {
                self.move_name(from, to)
            }
            NameOperation::Removed { .. }
            | NameOperation::Renamed { .. }
            | NameOperation::Symlink { .. }
            | NameOperation::Linked { .. }
            | NameOperation::Taken { .. } => {}
        }
    }

    pub(crate) fn take_state(&mut self, told: &NodeState, home: Incarnation) {
        match &told.kind {
            NodeKind::Directory => self.make_mirror(&told.path),
            NodeKind::Symlink { .. } => {}
            NodeKind::File(facts) => {
                if !self.paths.contains_key(&facts.file) {
                    self.make_file(&told.path, facts.file, home);
                }
                let is_homes = facts.file.incarnation == home && home != self.life;
                // If no other report of the file exists, any report is better than none.
                if is_homes || !self.told.contains_key(&facts.file) {
                    self.told.insert(facts.file, (**facts).clone());
                }
            }
        }
    }

    /// Brings a name to the coordinator's state, unless the name changed here after operation `asked_at`.
    pub(crate) fn settle_name(&mut self, path: &[u8], found: Option<&NodeState>, asked_at: u64) {
        if self.recent.get(path).is_some_and(|last| *last > asked_at) {
            return;
        }
        let Some(found) = found else {
            self.drop_name(path);
            return;
        };
        let NodeKind::File(facts) = &found.kind else { return self.make_mirror(path) };
        if self.names.get(path) == Some(&Entry::File(facts.file)) && facts.file.incarnation == self.life {
            return;
        }
        if let Some(other) = self.paths.get(&facts.file).cloned()
            && other != path
        {
            self.drop_name(path);
            self.make_parents(path);
            self.names.remove(&other);
            self.names.insert(path.to_vec(), Entry::File(facts.file));
            self.paths.insert(facts.file, path.to_vec());
        }
        self.take_state(found, facts.file.incarnation);
    }

    pub(crate) fn settle_directory(&mut self, directory: &[u8], found: &[NodeState], asked_at: u64) {
        let here: Vec<_> = self.names.keys().filter(|path| split(path).0 == directory).cloned().collect();
        for path in here.iter().filter(|path| !found.iter().any(|state| state.path == **path)) {
            self.settle_name(path, None, asked_at);
        }
        for state in found {
            self.settle_name(&state.path, Some(state), asked_at);
        }
    }

    // Helpers of own and foreign changes.

    /// Returns the file of a name, or `None` for a directory or a missing name.
    fn file_at(&self, path: &[u8]) -> Option<FileId> {
        match self.names.get(path) {
            Some(Entry::File(file)) => Some(*file),
            Some(Entry::Directory(_)) | None => None,
        }
    }

    fn add_directory(&mut self, path: &[u8]) {
        self.drop_name(path);
        self.make_parents(path);
        self.next += 1;
        self.names.insert(path.to_vec(), Entry::Directory(self.next));
        self.directories.insert(self.next, path.to_vec());
    }

    fn make_parents(&mut self, path: &[u8]) {
        let parent = split(path).0.to_vec();
        if self.directory(&parent).is_none() {
            self.add_directory(&parent);
        }
    }

    fn make_mirror(&mut self, path: &[u8]) {
        if self.directory(path).is_none() {
            self.add_directory(path);
        }
    }

    fn make_file(&mut self, path: &[u8], file: FileId, home: Incarnation) {
        self.make_parents(path);
        if self.names.get(path) == Some(&Entry::File(file)) {
            return;
        }
        self.drop_name(path);
        if let Some(other) = self.paths.get(&file) {
            self.names.remove(other);
        }
        self.names.insert(path.to_vec(), Entry::File(file));
        self.paths.insert(file, path.to_vec());
        if home != self.life && !self.own.contains_key(&file) {
            self.told.entry(file).or_insert_with(|| unheard(file));
        }
    }

    /// Removes a name with all that is below it.
    fn drop_name(&mut self, path: &[u8]) -> bool {
        let below: Vec<_> = self.below(path);
        for path in &below {
            match self.names.remove(path) {
                Some(Entry::Directory(number)) => drop(self.directories.remove(&number)),
                Some(Entry::File(file)) => {
                    self.paths.remove(&file);
                    self.dropped.insert(file);
                }
                None => {}
            }
        }
        !below.is_empty()
    }

    fn move_name(&mut self, from: &[u8], to: &[u8]) {
        let moved: Vec<_> =
            self.below(from).into_iter().filter_map(|path| self.names.remove_entry(&path)).collect();
        self.drop_name(to);
        self.make_parents(to);
        for (path, entry) in moved {
            let path = [to, &path[from.len()..]].concat();
            match entry {
                Entry::Directory(number) => drop(self.directories.insert(number, path.clone())),
                Entry::File(file) => drop(self.paths.insert(file, path.clone())),
            }
            self.names.insert(path, entry);
        }
    }

    fn below(&self, path: &[u8]) -> Vec<Vec<u8>> {
        let near = self.names.range(path.to_vec()..).take_while(|(other, _)| other.starts_with(path));
        near.map(|(other, _)| other).filter(|other| is_below(other, path)).cloned().collect()
    }
}

/// Returns the facts of a file of which only the name is known.
fn unheard(file: FileId) -> FileFacts {
    FileFacts {
        file,
        size_bytes: 0,
        state: WireState::Open { writers: 1 },
        seal: tidemark_protocol::id::SealNumber(0),
        opened_ns: 0,
        closed_ns: 0,
        published_ns: 0,
        vouched: false,
        generation: Generation(0),
        writers: Vec::new(),
        host: false,
        object: None,
    }
}

//! The catalog as the etcd of a cluster keeps it: names and bytes of its keys, and the tree that they make.
//!
//! Owns: the format, the keys that a change of the catalog puts and deletes, reading all of it. Does not own: requests (control's lease),
//! what is published and when (control's catalog), the tree that follows from it (the engine's namespace).
//!
//! Values are states and not operations: a state that is published twice comes to the same. A node has one key, so that renaming a
//! directory is one change. If changes that belong together are too many for one transaction, they are written down first, in lots with a
//! key each. The mark says when all lots are there; from then on every reader counts them as made. Times are by the *catalog's clock*: the
//! clock of its first coordinator. Later coordinators know their distance to it.

use super::wire::{NodeKind, NodeState, WireFate};
use crate::id::{Epoch, FileId, Incarnation};
use crate::key::NodeLife;
use crate::path::join;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Format number, raised with every change of a value's bytes. A build that finds another format does not read it and publishes the catalog
/// again.
pub const FORMAT: u8 = 1;

/// The number of the directory that the mount shows.
pub const ROOT: u64 = 1;

/// Number of files without a last name that are remembered, so that a node that was away does not bring them back. A job removes fewer
/// while a node is cut off. The oldest are forgotten.
pub const REMOVED_MAX: usize = 1 << 16;

/// Largest value of one key, in bytes; a longer one lies in several keys. An etcd refuses requests over 1.5 MiB with its usual settings.
pub const VALUE_BYTES_MAX: usize = 512 << 10;

/// Largest number of pieces of one value. A file of 4 TiB has some 4 MiB of checksums; the names of a file with 100,000 links are as long.
const PIECES_MAX: u32 = 64;

/// The key of the [`Mark`].
pub const MARK: &str = "catalog";

/// Prefix of all other keys. All of them sort before [`ALL_END`].
pub const ALL: &str = "catalog/";
pub const ALL_END: &str = "catalog0";

/// A coordinator's progress. A coordinator writes the mark with each step; if an answer is lost, the mark shows whether the step arrived.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The epoch of the coordinator that wrote it.
    pub epoch: Epoch,
    /// Number of the step of that coordinator, from 1 on.
    pub number: u64,
    /// The clock of that coordinator minus the catalog's, in nanoseconds.
    pub ahead_ns: i64,
    /// Whether all of the tree is there.
    pub whole: bool,
    /// Number of lots of changes that were written down. All lots still there count as made; 0: none do.
    pub lots: u32,
}

impl Mark {
    /// Returns the step with which the mark was written.
    #[must_use]
    pub fn step(&self) -> StepNumber {
        StepNumber { epoch: self.epoch, number: self.number }
    }
}

/// A step, in the order in which etcd takes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepNumber {
    /// The epoch of the coordinator that made it.
    pub epoch: Epoch,
    pub number: u64,
}

impl fmt::Display for StepNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of epoch {}", self.number, self.epoch)
    }
}

/// A node of the catalog.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatalogNode {
    /// The node's number in the catalog.
    pub id: u64,
    /// The directories that name the node, and its name in each.
    pub names: Vec<(u64, Vec<u8>)>,
    /// The node's state. `state.path` has no meaning: the names give the path.
    pub state: NodeState,
}

/// A process: the life of its node, its number there, and its start time.
pub type Process = (Incarnation, u32, u64);

/// How a process ended, and when it was seen to have failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessFate {
    /// The life of the node that the process ran on.
    pub home: Incarnation,
    pub process: (u32, u64),
    pub fate: WireFate,
    pub failed_at_ns: Option<i64>,
}

impl ProcessFate {
    /// Returns the process.
    #[must_use]
    pub fn of(&self) -> Process {
        (self.home, self.process.0, self.process.1)
    }
}

/// A change of the keys. No two changes in one transaction touch the same key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    Put {
        key: String,
        value: Vec<u8>,
    },
    /// All keys from `from` on, and before `until`.
    Delete {
        from: String,
        until: String,
    },
}

impl Change {
    /// Returns about how many bytes of a request the change takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Put { key, value } => key.len() + value.len(),
            Self::Delete { from, until } => from.len() + until.len(),
        }
    }

    fn delete_one(key: String) -> Self {
        let until = format!("{key}\0");
        Self::Delete { from: key, until }
    }
}

/// Why the content of the etcd is not read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeptError {
    #[error("it has format {found}, and this build reads {FORMAT}: another version wrote it")]
    Format { found: u8 },
    #[error("key {key:?} is not as this version writes it: {why}")]
    Malformed { key: String, why: String },
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Value {
    Node(CatalogNode),
    /// The bytes of [`Value::Node`] in `count` keys, which carry `number`.
    Pieces {
        count: u32,
        number: u64,
    },
}

/// Encodes a mark.
///
/// # Panics
/// Never: every part of a mark can be written.
#[must_use]
pub fn mark_bytes(mark: &Mark) -> Vec<u8> {
    encode(mark)
}

/// Decodes a mark.
///
/// # Errors
/// See [`KeptError`].
pub fn read_mark(bytes: &[u8]) -> Result<Mark, KeptError> {
    decode(MARK, bytes)
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    postcard::to_extend(value, vec![FORMAT]).expect("plain values are written to memory")
}

fn decode<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T, KeptError> {
    let malformed = |why: String| KeptError::Malformed { key: key.to_owned(), why };
    match bytes.split_first() {
        None => Err(malformed("it is empty".to_owned())),
        Some((&FORMAT, body)) => postcard::from_bytes(body).map_err(|error| malformed(error.to_string())),
        Some((&found, _)) => Err(KeptError::Format { found }),
    }
}

fn node_key(id: u64) -> String {
    format!("{ALL}node/{id:016x}")
}

fn pieces_key(id: u64, number: u64) -> String {
    format!("{ALL}piece/{id:016x}/{number:016x}")
}

fn lot_key(at: u32) -> String {
    format!("{ALL}lot/{at:08x}")
}

/// Returns the change that writes a lot of changes down.
#[must_use]
pub fn write_down(at: u32, changes: &[Change]) -> Change {
    Change::Put { key: lot_key(at), value: encode(&changes) }
}

/// Returns the change that deletes a lot after its changes were made.
#[must_use]
pub fn take_down(at: u32) -> Change {
    Change::delete_one(lot_key(at))
}

/// Returns the change that deletes all lots: they were not finished.
#[must_use]
pub fn take_all_down() -> Change {
    Change::Delete { from: lot_key(0), until: lot_key(u32::MAX) }
}

fn life_key(life: &NodeLife) -> String {
    format!("{ALL}life/{}/{:016x}", life.node, life.incarnation.0)
}

fn fate_key((home, process, start): Process) -> String {
    format!("{ALL}fate/{:016x}/{process:08x}/{start:016x}", home.0)
}

/// Translates changes of the catalog into changes of keys.
#[derive(Debug, Default)]
pub struct Writer {
    /// Nodes that have pieces in the etcd.
    in_pieces: BTreeSet<u64>,
    /// Number of nodes written in pieces so far.
    pieces: u64,
    /// Number of files that ever lost their last name.
    removed: u64,
}

impl Writer {
    /// Makes a writer that goes on after `kept`.
    #[must_use]
    pub fn after(kept: &KeptCatalog) -> Self {
        Self {
            in_pieces: kept.in_pieces.clone(),
            pieces: kept.pieces,
            removed: kept.removed.last().map_or(0, |(number, _)| number + 1),
        }
    }

    /// Returns the change that deletes the whole catalog before another one is written.
    #[must_use]
    pub fn delete_all() -> Change {
        Change::Delete { from: ALL.to_owned(), until: ALL_END.to_owned() }
    }

    /// Writes the state of a node.
    pub fn node(&mut self, node: CatalogNode, to: &mut impl Extend<Change>) {
        let id = node.id;
        let value = encode(&Value::Node(node));
        if value.len() <= VALUE_BYTES_MAX {
            to.extend([Change::Put { key: node_key(id), value }]);
            if self.in_pieces.remove(&id) {
                to.extend([Change::Delete { from: pieces_key(id, 0), until: pieces_key(id, u64::MAX) }]);
            }
            return;
        }
        self.pieces += 1;
        let number = self.pieces;
        let before = pieces_key(id, number);
        let pieces = value.chunks(VALUE_BYTES_MAX).enumerate();
        to.extend(
            pieces
                .map(|(at, piece)| Change::Put { key: format!("{before}/{at:08x}"), value: piece.to_vec() }),
        );
        let count = u32::try_from(value.len().div_ceil(VALUE_BYTES_MAX)).unwrap_or(u32::MAX);
        to.extend([Change::Put { key: node_key(id), value: encode(&Value::Pieces { count, number }) }]);
        if !self.in_pieces.insert(id) {
            to.extend([Change::Delete { from: pieces_key(id, 0), until: before }]);
        }
    }

    /// Deletes a node that has no name any more.
    pub fn gone(&mut self, id: u64, to: &mut impl Extend<Change>) {
        to.extend([Change::delete_one(node_key(id))]);
        if self.in_pieces.remove(&id) {
            to.extend([Change::Delete { from: pieces_key(id, 0), until: pieces_key(id, u64::MAX) }]);
        }
    }

    /// Records a file that lost its last name.
    pub fn removed(&mut self, file: FileId, to: &mut impl Extend<Change>) {
        let number = self.removed;
        self.removed += 1;
        // Overwrites the key of the oldest file that is remembered.
        let key = format!("{ALL}removed/{:08x}", number % REMOVED_MAX as u64);
        to.extend([Change::Put { key, value: encode(&(number, file)) }]);
    }

    /// Records the last publication of a life that the catalog contains.
    pub fn published(&self, life: &NodeLife, number: u64, to: &mut impl Extend<Change>) {
        to.extend([Change::Put { key: life_key(life), value: encode(&(life, number)) }]);
    }

    /// Writes how a process ended.
    pub fn fate(&self, fate: &ProcessFate, to: &mut impl Extend<Change>) {
        to.extend([Change::Put { key: fate_key(fate.of()), value: encode(fate) }]);
    }

    /// Forgets how a process ended.
    pub fn forget_fate(&self, process: Process, to: &mut impl Extend<Change>) {
        to.extend([Change::delete_one(fate_key(process))]);
    }
}

/// A key as it was found: its name below the prefix, its value, and the revision at which it was last put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub key: String,
    pub value: Vec<u8>,
    pub revision: u64,
}

/// A whole catalog as it was read.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct KeptCatalog {
    /// The last mark that was written.
    pub mark: Mark,
    /// The present node's clock minus the catalog's, in nanoseconds.
    pub ahead_ns: i64,
    /// Nodes by number, each with its revision.
    nodes: BTreeMap<u64, (CatalogNode, u64)>,
    published: BTreeMap<NodeLife, u64>,
    fates: BTreeMap<Process, ProcessFate>,
    /// Files that lost their last name, in that order.
    removed: Vec<(u64, FileId)>,
    in_pieces: BTreeSet<u64>,
    pieces: u64,
    /// Lots that count as made, and that still have to be applied to the keys.
    lots: Vec<(u32, Vec<Change>)>,
}

impl KeptCatalog {
    /// Reads all entries below [`ALL`], in any order.
    ///
    /// # Errors
    /// See [`KeptError`]. Entries of kinds that this build does not know are passed over.
    pub fn read(mark: Mark, entries: impl IntoIterator<Item = Entry>) -> Result<Self, KeptError> {
        let mut kept = Self { mark, ..Self::default() };
        let mut entries: BTreeMap<_, _> =
            entries.into_iter().map(|entry| (entry.key, (entry.value, entry.revision))).collect();
        for at in 0..mark.lots {
            let Some((value, revision)) = entries.remove(&lot_key(at)) else { continue };
            let changes: Vec<Change> = decode(&lot_key(at), &value)?;
            for change in &changes {
                make(change, revision, &mut entries);
            }
            kept.lots.push((at, changes));
        }
        let mut pieces = BTreeMap::new();
        let mut in_pieces = Vec::new();
        for (key, (value, revision)) in entries {
            let Some((kind, _)) = key.strip_prefix(ALL).and_then(|rest| rest.split_once('/')) else {
                continue;
            };
            match kind {
                "node" => match decode(&key, &value)? {
                    Value::Node(node) => kept.insert(node, revision),
                    Value::Pieces { count, number } => in_pieces.push((key, count, number, revision)),
                },
                "piece" => {
                    pieces.insert(key, value);
                }
                "life" => {
                    let (life, number): (NodeLife, u64) = decode(&key, &value)?;
                    kept.published.insert(life, number);
                }
                "fate" => {
                    let fate: ProcessFate = decode(&key, &value)?;
                    kept.fates.insert(fate.of(), fate);
                }
                "removed" => kept.removed.push(decode(&key, &value)?),
                _ => {}
            }
        }
        kept.removed.sort_unstable_by_key(|(number, _)| *number);
        for (key, count, number, revision) in in_pieces {
            let malformed = |why: &str| KeptError::Malformed { key: key.clone(), why: why.to_owned() };
            if count > PIECES_MAX {
                return Err(malformed("it has too many pieces"));
            }
            let id = key.rsplit('/').next().and_then(|id| u64::from_str_radix(id, 16).ok());
            let id = id.ok_or_else(|| malformed("it names no number"))?;
            let before = pieces_key(id, number);
            let mut bytes = Vec::new();
            for at in 0..count {
                let piece = pieces.remove(&format!("{before}/{at:08x}"));
                bytes.extend(piece.ok_or_else(|| malformed("a piece of it is missing"))?);
            }
            match decode(&key, &bytes)? {
                Value::Node(node) => kept.insert(node, revision),
                Value::Pieces { .. } => return Err(malformed("its pieces are pieces")),
            }
            kept.in_pieces.insert(id);
            kept.pieces = kept.pieces.max(number);
        }
        // Pieces of an unfinished write are never read; the next pieces of their node delete them.
        for key in pieces.keys() {
            let mut parts = key[ALL.len()..].split('/').skip(1).map(|part| u64::from_str_radix(part, 16));
            if let (Some(Ok(id)), Some(Ok(number))) = (parts.next(), parts.next()) {
                kept.in_pieces.insert(id);
                kept.pieces = kept.pieces.max(number);
            }
        }
        Ok(kept)
    }

    fn insert(&mut self, node: CatalogNode, revision: u64) {
        self.nodes.insert(node.id, (node, revision));
    }

    /// Returns the last publication of each life that the catalog contains.
    #[must_use]
    pub fn published(&self) -> &BTreeMap<NodeLife, u64> {
        &self.published
    }

    /// Returns files that have no name any more, the latest last. Files that were brought back have a name and are left out.
    #[must_use]
    pub fn removed(&self) -> Vec<FileId> {
        let named: BTreeSet<FileId> = self.files().collect();
        self.removed.iter().map(|(_, file)| *file).filter(|file| !named.contains(file)).collect()
    }

    /// Returns the files that have a name.
    pub fn files(&self) -> impl Iterator<Item = FileId> {
        self.nodes.values().filter_map(|(node, _)| file_of(node))
    }

    /// Converts a time of the catalog's clock to this node's. The result is at most `now_ns`, because the event has happened.
    fn time(&self, at_ns: i64, now_ns: i64) -> i64 {
        at_ns.saturating_add(self.ahead_ns).min(now_ns)
    }

    /// Returns how processes ended, by this node's clock.
    #[must_use]
    pub fn fates(&self, now_ns: i64) -> Vec<ProcessFate> {
        let read = |at| self.time(at, now_ns);
        let fates = self.fates.values();
        fates.map(|fate| ProcessFate { failed_at_ns: fate.failed_at_ns.map(read), ..*fate }).collect()
    }

    /// Returns the highest number of a node; the root's if there is no other.
    #[must_use]
    pub fn last_id(&self) -> u64 {
        self.nodes.keys().next_back().copied().unwrap_or(ROOT).max(ROOT)
    }

    /// Returns the numbers of all nodes.
    pub fn ids(&self) -> impl Iterator<Item = u64> {
        self.nodes.keys().copied()
    }

    /// Returns the lots that count as made and still have to be applied, in order.
    #[must_use]
    pub fn lots(&self) -> &[(u32, Vec<Change>)] {
        &self.lots
    }

    /// Drops all but the nodes and the processes, to compare them with a tree.
    #[must_use]
    pub fn into_parts(self) -> (BTreeMap<u64, CatalogNode>, BTreeMap<Process, ProcessFate>) {
        (self.nodes.into_iter().map(|(id, (node, _))| (id, node)).collect(), self.fates)
    }

    /// Returns the names in each directory. If two nodes have one name, the one that was put later keeps it.
    fn children(&self) -> BTreeMap<u64, BTreeMap<&[u8], &CatalogNode>> {
        let mut children: BTreeMap<u64, BTreeMap<&[u8], (&CatalogNode, u64)>> = BTreeMap::new();
        for (node, revision) in self.nodes.values() {
            for (parent, name) in &node.names {
                let there = children.entry(*parent).or_default().entry(name);
                let there = there.or_insert((node, *revision));
                if there.1 < *revision {
                    *there = (node, *revision);
                }
            }
        }
        let only_node =
            |names: BTreeMap<_, (_, u64)>| names.into_iter().map(|(name, (node, _))| (name, node)).collect();
        children.into_iter().map(|(parent, names)| (parent, only_node(names))).collect()
    }

    /// Returns the tree, its times on this node's clock: directories with their entries, parents first.
    #[must_use]
    pub fn directories(&self, now_ns: i64) -> Vec<(Vec<u8>, Vec<NodeState>)> {
        let mut children = self.children();
        let mut directories = Vec::new();
        let mut todo = vec![(ROOT, Vec::new())];
        // Removes each directory when it is reached. Directories without a path from the root are never reached.
        while let Some((id, path)) = todo.pop() {
            let mut found = Vec::new();
            for (name, node) in children.remove(&id).unwrap_or_default() {
                let below = join(&path, name);
                if matches!(node.state.kind, NodeKind::Directory) {
                    todo.push((node.id, below.clone()));
                }
                let state = NodeState { path: below, ..node.state.clone() };
                found.push(state.with_times(|at| self.time(at, now_ns)));
            }
            directories.push((path, found));
        }
        directories
    }

    /// Returns the catalog's numbers for the nodes of a tree that have the same name there. `child` gives an entry of a directory of that
    /// tree.
    #[must_use]
    pub fn numbers_in(&self, root: u64, child: impl Fn(u64, &[u8]) -> Option<u64>) -> BTreeMap<u64, u64> {
        let mut children = self.children();
        let (mut numbers, mut met) = (BTreeMap::from([(root, ROOT)]), BTreeSet::from([ROOT]));
        let mut todo = vec![(ROOT, root)];
        while let Some((id, here)) = todo.pop() {
            for (name, node) in children.remove(&id).unwrap_or_default() {
                let Some(there) = child(here, name) else { continue };
                if numbers.contains_key(&there) || !met.insert(node.id) {
                    continue;
                }
                numbers.insert(there, node.id);
                if matches!(node.state.kind, NodeKind::Directory) {
                    todo.push((node.id, there));
                }
            }
        }
        numbers
    }
}

/// Applies a change to entries that have been read.
fn make(change: &Change, revision: u64, entries: &mut BTreeMap<String, (Vec<u8>, u64)>) {
    match change {
        Change::Put { key, value } => {
            entries.insert(key.clone(), (value.clone(), revision));
        }
        Change::Delete { from, until } if from < until => {
            let keys: Vec<_> = entries.range::<String, _>(from..until).map(|(key, _)| key.clone()).collect();
            for key in keys {
                entries.remove(&key);
            }
        }
        Change::Delete { .. } => {}
    }
}

fn file_of(node: &CatalogNode) -> Option<FileId> {
    match &node.state.kind {
        NodeKind::File(facts) => Some(facts.file),
        NodeKind::Directory | NodeKind::Symlink { .. } => None,
    }
}

#[cfg(test)]
#[path = "kept_test.rs"]
mod tests;

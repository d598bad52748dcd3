//! The promises to an outside observer.
//!
//! Owns: a plain map of the tree in the order of the store, changes that were answered for and not yet taken, pending look-ups, and the
//! judgement. Does not own: any part of the code under test; versions and names are counted here anew.

use std::collections::{BTreeMap, BTreeSet};
use tidemark_meta::key::{Key, Place, ROOT};
use tidemark_meta::message::Found;
use tidemark_meta::node::Origin;
use tidemark_meta::refusal::Refusal;
use tidemark_meta::state::Call;
use tidemark_meta::store::Memory;
use tidemark_meta::value::{Kind, Standing, Value};
use tidemark_protocol::id::{FileId, Incarnation};

/// A judgement; the error says what is wrong.
pub(crate) type Verdict = Result<(), String>;

/// A file's bytes: their version and checksum.
type Bytes = (u64, Option<u64>);

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct File {
    version: u64,
    crc: Option<u64>,
    mode: u32,
    links: u32,
    /// The life that may act on the file without asking.
    alone: Option<Incarnation>,
}

/// A tree as a map.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Tree {
    names: BTreeMap<Place, (Option<FileId>, u32)>,
    files: BTreeMap<FileId, File>,
    directories: BTreeMap<FileId, Option<FileId>>,
}

impl Tree {
    pub(crate) fn at(&self, place: &Place) -> Option<FileId> {
        self.names.get(place).and_then(|(id, _)| *id)
    }

    /// Returns the directory of that name, wherever it is.
    pub(crate) fn directory(&self, name: &str) -> Option<FileId> {
        let mut found = self.names.iter().filter(|(place, _)| place.name.as_bytes() == name.as_bytes());
        found.find_map(|(_, (id, _))| id.filter(|id| self.directories.contains_key(id)))
    }

    pub(crate) fn is_file(&self, id: FileId) -> bool {
        self.files.contains_key(&id)
    }

    fn changes(&self, place: &Place) -> u32 {
        self.names.get(place).map_or(0, |(_, changes)| *changes)
    }

    fn bytes(&self, id: FileId) -> Option<Bytes> {
        self.files.get(&id).map(|file| (file.version, file.crc))
    }

    fn set(&mut self, place: &Place, id: Option<FileId>) {
        let name = self.names.entry(place.clone()).or_default();
        *name = (id, name.1 + 1);
    }

    fn unname(&mut self, id: FileId) -> Verdict {
        if self.directories.contains_key(&id) {
            if self.names.iter().any(|(place, (at, _))| place.directory == id && at.is_some()) {
                return Err("a directory was removed that has names".into());
            }
            self.directories.remove(&id);
            return Ok(());
        }
        let file = self.files.get_mut(&id).ok_or("a name led to a file that is gone")?;
        file.links -= 1;
        if file.links == 0 {
            self.files.remove(&id);
        }
        Ok(())
    }

    /// Makes a change that counts. An impossible change is an error of the node or coordinator that let it count.
    fn apply(&mut self, life: Incarnation, call: &Call) -> Verdict {
        for place in call.places() {
            if !self.directories.contains_key(&place.directory) {
                return Err("a name was changed in a directory that is gone".into());
            }
        }
        match call {
            Call::Create { place, id, kind, .. } => {
                if self.at(place).is_some() {
                    return Err("a name was created exclusively that is taken".into());
                }
                self.set(place, Some(*id));
                match kind {
                    Kind::File => {
                        self.files
                            .insert(*id, File { version: 1, links: 1, alone: Some(life), ..File::default() });
                    }
                    Kind::Directory => {
                        self.directories.insert(*id, Some(place.directory));
                    }
                }
            }
            Call::Close { id, seal, .. } => {
                if let Some(file) = self.files.get_mut(id) {
                    file.version += 1;
                    (file.crc, file.alone) = (Some(seal.crc.0), Some(life));
                }
            }
            Call::SetAttributes { id, attributes } => {
                if let Some(file) = self.files.get_mut(id) {
                    file.mode = attributes.mode;
                }
            }
            Call::Link { id, place } => {
                if self.at(place).is_some() {
                    return Err("a link replaced a name".into());
                }
                self.files.get_mut(id).ok_or("a link to a file that is gone")?.links += 1;
                self.set(place, Some(*id));
            }
            Call::Unlink { place, .. } | Call::Rmdir { place } => {
                let id = self.at(place).ok_or("a name was removed that is absent")?;
                self.unname(id)?;
                self.set(place, None);
            }
            Call::Rename { from, to, exchange, .. } => {
                let moved = self.at(from).ok_or("a name was moved that is absent")?;
                let over = self.at(to);
                if over == Some(moved) {
                    return Ok(());
                }
                match over {
                    Some(over) if !exchange => self.unname(over)?,
                    _ => {}
                }
                self.set(to, Some(moved));
                self.set(from, over.filter(|_| *exchange));
                if let Some(parent) = self.directories.get_mut(&moved) {
                    *parent = Some(to.directory);
                }
                if let Some(over) = over.filter(|_| *exchange)
                    && let Some(parent) = self.directories.get_mut(&over)
                {
                    *parent = Some(from.directory);
                }
                self.no_loops()?;
            }
            Call::Take { id, truncate } => {
                if let Some(file) = self.files.get_mut(id) {
                    file.version += u64::from(*truncate || file.alone != Some(life));
                    file.alone = Some(life);
                    file.crc = file.crc.filter(|_| !truncate);
                }
            }
            Call::GiveBack { id, version } => {
                if let Some(file) = self.files.get_mut(id)
                    && (file.version, file.alone) == (*version, Some(life))
                {
                    file.alone = None;
                }
            }
            Call::Delegate { .. } | Call::Returned => {}
        }
        Ok(())
    }

    fn no_loops(&self) -> Verdict {
        for directory in self.directories.keys() {
            let (mut at, mut steps) = (*directory, 0);
            while let Some(Some(parent)) = self.directories.get(&at) {
                (at, steps) = (*parent, steps + 1);
                if steps > self.directories.len() {
                    return Err("a directory lies below itself".into());
                }
            }
        }
        Ok(())
    }
}

/// A change that was answered for, and the versions that it depended on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Acked {
    call: Call,
    names: Vec<u32>,
    /// The version and the checksum of a file's bytes: a close does not depend on attributes.
    bytes: Option<Bytes>,
}

/// A pending look-up, and its possible results.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Read {
    life: Incarnation,
    ticket: u64,
    place: Place,
    ids: BTreeSet<Option<FileId>>,
    bytes: BTreeSet<(FileId, Bytes)>,
    /// Kept apart from the bytes: a change of the one commutes with a change of the other, so either may be seen first.
    modes: BTreeSet<(FileId, u32)>,
    no_directory: bool,
}

/// The observer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Ghost {
    /// The tree as the store has it.
    taken: Tree,
    acked: BTreeMap<Origin, Acked>,
    living: BTreeSet<Incarnation>,
    /// The tree that a life saw when it ended, with its own changes since.
    frozen: BTreeMap<Incarnation, Tree>,
    reads: Vec<Read>,
}

impl Ghost {
    pub(crate) fn new() -> Self {
        let mut ghost = Self::default();
        ghost.taken.directories.insert(ROOT, None);
        ghost
    }

    /// Returns the tree that every client that asks now has to see.
    pub(crate) fn effective(&self) -> Tree {
        let mut tree = self.taken.clone();
        for ((life, _), acked) in &self.acked {
            if self.living.contains(life) {
                // Judged when it was answered for; if two exclude each other, they are judged when one is taken.
                let _ = tree.apply(*life, &acked.call);
            }
        }
        tree
    }

    fn rests_on(tree: &Tree, call: &Call) -> (Vec<u32>, Option<Bytes>) {
        let names = call.places().map(|place| tree.changes(place)).collect();
        let closed = call.inode().filter(|_| matches!(call, Call::Close { .. }));
        (names, closed.and_then(|id| tree.bytes(id)))
    }

    /// Notes that a node has answered for a change by itself.
    pub(crate) fn acked(&mut self, origin: Origin, call: &Call) -> Verdict {
        let living = self.living.contains(&origin.0);
        let mut tree =
            if living { self.effective() } else { self.frozen.get(&origin.0).cloned().unwrap_or_default() };
        let (names, bytes) = Self::rests_on(&tree, call);
        tree.apply(origin.0, call).map_err(|why| format!("{why}, by a node that answered for it alone"))?;
        if !living {
            self.frozen.insert(origin.0, tree);
        }
        self.acked.insert(origin, Acked { call: call.clone(), names, bytes });
        self.note_reads();
        Ok(())
    }

    /// Notes that the store has taken a call, or its refusal. `origin`: set if the change was answered for before.
    pub(crate) fn taken(
        &mut self,
        origin: Option<Origin>,
        life: Incarnation,
        call: &Call,
        refused: Option<Refusal>,
    ) -> Verdict {
        let effective = self.effective();
        let before = origin.and_then(|origin| self.acked.remove(&origin).map(|acked| (origin.0, acked)));
        match (refused, &before) {
            (Some(Refusal::NoInode), Some(_)) if call.inode().is_some_and(|id| !self.taken.is_file(id)) => {
                return Ok(());
            }
            (Some(why), Some((life, _))) if self.living.contains(life) => {
                return Err(format!("a change that was answered for is refused ({why}): {call:?}"));
            }
            (Some(_), Some(_)) => {
                // A former life's change: it becomes a conflict, and stays until the node reports that.
                if let (Some(origin), Some((_, acked))) = (origin, before) {
                    self.acked.insert(origin, acked);
                }
                return Ok(());
            }
            (Some(_), None) => return Ok(()),
            (None, Some((former, acked))) if !self.living.contains(former) => {
                if matches!(call, Call::Unlink { .. }) {
                    return Err("a removal of a node that was declared gone was published".into());
                }
                if Self::rests_on(&effective, call) != (acked.names.clone(), acked.bytes) {
                    return Err(format!("a change of a node that was declared gone undid another: {call:?}"));
                }
            }
            (None, Some(_)) => {}
            (None, None) => {
                let mut tree = effective;
                tree.apply(life, call).map_err(|why| format!("{why}, by the coordinator"))?;
            }
        }
        self.taken.apply(life, call)?;
        self.note_reads();
        Ok(())
    }

    /// Notes that a node reported a change that was answered for as a conflict or as logged.
    pub(crate) fn given_up(&mut self, origin: Origin) -> Verdict {
        if self.living.contains(&origin.0) {
            return Err("a change became a conflict although its node was never declared gone".into());
        }
        self.acked.remove(&origin);
        Ok(())
    }

    /// Notes that the store's members changed: lives end, and begin.
    pub(crate) fn members(&mut self, store: &Memory) {
        let mut living = BTreeSet::new();
        for (key, value) in store.entries() {
            if let (Key::Member(_), Value::Member(member)) = (key, value)
                && member.standing != Standing::Gone
            {
                living.insert(member.life);
            }
        }
        if living != self.living {
            let tree = self.effective();
            for life in self.living.difference(&living) {
                self.frozen.insert(*life, tree.clone());
            }
            self.living = living;
            self.note_reads();
        }
    }

    pub(crate) fn is_living(&self, life: Incarnation) -> bool {
        self.living.contains(&life)
    }

    /// Checks that every change that was answered for is in the store, or still with its node.
    pub(crate) fn kept(&self, lives: &[Incarnation], mut queued: impl FnMut(Origin) -> bool) -> Verdict {
        for (origin, acked) in self.acked.iter().filter(|(origin, _)| lives.contains(&origin.0)) {
            if !queued(*origin) {
                return Err(format!("a change that was answered for is lost: {:?}", acked.call));
            }
        }
        Ok(())
    }

    pub(crate) fn read_begins(&mut self, life: Incarnation, ticket: u64, place: &Place) {
        let (ids, bytes, modes) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        self.reads.push(Read { life, ticket, place: place.clone(), ids, bytes, modes, no_directory: false });
        self.note_reads();
    }

    pub(crate) fn read_ends(&mut self, life: Incarnation, ticket: u64, found: &Found) -> Verdict {
        let Some(at) = self.reads.iter().position(|read| read.life == life && read.ticket == ticket) else {
            return Ok(());
        };
        let read = self.reads.remove(at);
        if self.living.contains(&life) { judge(&read, found) } else { Ok(()) }
    }

    /// Judges a look-up that a node answers at once.
    pub(crate) fn read_here(&mut self, life: Incarnation, place: &Place, found: &Found) -> Verdict {
        self.read_begins(life, 0, place);
        self.read_ends(life, 0, found)
    }

    fn note_reads(&mut self) {
        if self.reads.is_empty() {
            return;
        }
        let tree = self.effective();
        for read in &mut self.reads {
            read.ids.insert(tree.at(&read.place));
            read.no_directory |= !tree.directories.contains_key(&read.place.directory);
            // A name is followed and a file is read in two steps: the file may be in any state that it had since the beginning.
            for (id, file) in &tree.files {
                read.bytes.insert((*id, (file.version, file.crc)));
                read.modes.insert((*id, file.mode));
            }
        }
    }

    /// Checks that the store holds what was taken, and nothing else.
    pub(crate) fn agrees(&self, store: &Memory) -> Verdict {
        let mut names = BTreeMap::new();
        let mut files = BTreeMap::new();
        let mut directories = BTreeMap::new();
        for (key, value) in store.entries() {
            match (key, value) {
                (Key::Name(place), Value::Entry(entry)) => {
                    if let Some(target) = entry.target {
                        names.insert(place, target.id);
                    }
                }
                (Key::Inode(id), Value::Inode(inode)) if inode.kind == Kind::File => {
                    let crc = inode.seal.map(|seal| seal.crc.0);
                    let (version, mode, links) = (inode.version, inode.attributes.mode, inode.links);
                    let alone = inode.alone.then_some(inode.holder);
                    files.insert(*id, File { version, crc, mode, links, alone });
                }
                (Key::Inode(id), Value::Inode(inode)) => {
                    directories.insert(*id, inode.parent);
                }
                _ => {}
            }
        }
        let mine = self.taken.names.iter().filter_map(|(place, (id, _))| id.map(|id| (place, id)));
        if names != mine.collect() {
            return Err("the names in the store are not those that were taken".into());
        }
        if directories != self.taken.directories {
            return Err("the directories in the store are not those that were taken".into());
        }
        if files != self.taken.files {
            return Err(format!("the files in the store are not those that were taken: {files:?}"));
        }
        Ok(())
    }
}

fn judge(read: &Read, found: &Found) -> Verdict {
    match found {
        Found::Absent if read.ids.contains(&None) || read.no_directory => Ok(()),
        Found::Absent => Err("a name was answered as absent that was there all the time".into()),
        Found::Refused(Refusal::NoDirectory) if !read.no_directory => {
            Err("a directory was answered as gone that was there all the time".into())
        }
        Found::Refused(_) => Ok(()),
        Found::Present(target, inode) => {
            if !read.ids.contains(&Some(target.id)) {
                return Err("a look-up found what the name did not lead to".into());
            }
            let bytes = (inode.version, inode.seal.map(|seal| seal.crc.0));
            let is_so = read.bytes.contains(&(target.id, bytes))
                && read.modes.contains(&(target.id, inode.attributes.mode));
            if inode.kind == Kind::File && !is_so {
                return Err("a look-up found bytes or attributes that were not the file's".into());
            }
            Ok(())
        }
    }
}

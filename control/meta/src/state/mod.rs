//! The metadata as one value: the tree, the members, how far each was taken.
//!
//! Owns: the state and how changes are applied to it. Does not own: which changes a call makes (`effect`), how calls become a
//! transaction (`plan`), who may write (`coordinator`).

mod call;
mod draft;
mod effect;
mod plan;

pub use call::Call;
pub use effect::{Need, Waits};
pub use plan::{Batch, Plan, TAKEN_AT_ONCE_MAX, TRANSACTION_BYTES_MAX, TRANSACTION_KEYS_MAX, Wait, plan};

use crate::key::{Key, Name, Place};
use crate::value::Change;
use crate::value::{Entry, Inode, Member, Published, Standing, Value};
use std::collections::{BTreeMap, BTreeSet};
use tidemark_protocol::id::{FileId, Incarnation, NodeName};

/// Everything that the store holds, but the coordinator's role, as of one revision.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct State {
    era: Option<u64>,
    tick: u64,
    moves: u64,
    members: BTreeMap<NodeName, Member>,
    /// The nodes of the lives that are not over.
    lives: BTreeMap<Incarnation, NodeName>,
    published: BTreeMap<NodeName, Published>,
    inodes: BTreeMap<FileId, Inode>,
    names: BTreeMap<FileId, BTreeMap<Name, Entry>>,
    tombstones: BTreeSet<Place>,
}

impl State {
    /// The era; none before anything was applied.
    #[must_use]
    pub fn era(&self) -> Option<u64> {
        self.era
    }

    /// Transactions of this era.
    #[must_use]
    pub fn tick(&self) -> u64 {
        self.tick
    }

    /// Directories that were moved to another parent.
    #[must_use]
    pub fn moves(&self) -> u64 {
        self.moves
    }

    /// All members by name.
    #[must_use]
    pub fn members(&self) -> &BTreeMap<NodeName, Member> {
        &self.members
    }

    /// The node whose present life this is; none if the life is over or unknown.
    #[must_use]
    pub fn node_of(&self, life: Incarnation) -> Option<&NodeName> {
        self.lives.get(&life)
    }

    /// Whether a life was declared gone and has not yet said all that it had not published.
    #[must_use]
    pub fn awaits_returns(&self) -> bool {
        self.members.values().any(|member| member.standing != Standing::Present)
    }

    /// Returns the progress of a node's calls.
    #[must_use]
    pub fn published(&self, node: &NodeName) -> Option<&Published> {
        self.published.get(node)
    }

    /// Returns the last call taken of a present life; 0 for any other.
    #[must_use]
    pub fn taken_of(&self, life: Incarnation) -> u64 {
        self.node_of(life).map_or(0, |node| self.taken_by(node, life))
    }

    /// Returns the last call taken of a node's last life; 0 for any other life.
    #[must_use]
    pub fn taken_by(&self, node: &NodeName, life: Incarnation) -> u64 {
        let published = self.published.get(node).filter(|published| published.life == life);
        published.map_or(0, |published| published.number)
    }

    /// An inode.
    #[must_use]
    pub fn inode(&self, id: FileId) -> Option<&Inode> {
        self.inodes.get(&id)
    }

    /// A name, absent at version 0 if nothing is known of it.
    #[must_use]
    pub fn entry(&self, place: &Place) -> Entry {
        self.names.get(&place.directory).and_then(|names| names.get(&place.name)).copied().unwrap_or_default()
    }

    /// All names of a directory, tombstones included.
    pub fn entries(&self, directory: FileId) -> impl Iterator<Item = (&Name, &Entry)> {
        self.names.get(&directory).into_iter().flatten()
    }

    /// Names that were removed and whose tombstone is kept.
    pub fn tombstones(&self) -> impl Iterator<Item = &Place> {
        self.tombstones.iter()
    }

    /// The present life that may act alone on an inode.
    #[must_use]
    pub fn alone(&self, inode: &Inode) -> Option<Incarnation> {
        (inode.alone && self.lives.contains_key(&inode.holder)).then_some(inode.holder)
    }

    /// The value that a key has here; none for the coordinator's role, which is not kept.
    #[must_use]
    pub fn value(&self, key: &Key) -> Option<Value> {
        match key {
            Key::Era => self.era.map(Value::Number),
            Key::Coordinator => None,
            Key::Tick => Some(Value::Number(self.tick)),
            Key::Moves => Some(Value::Number(self.moves)),
            Key::Member(node) => self.members.get(node).copied().map(Value::Member),
            Key::Publication(node) => self.published.get(node).cloned().map(Value::Published),
            Key::Inode(id) => self.inodes.get(id).cloned().map(Value::Inode),
            Key::Name(place) => {
                let names = self.names.get(&place.directory);
                names.and_then(|names| names.get(&place.name)).copied().map(Value::Entry)
            }
        }
    }

    /// Makes changes that the store has taken.
    ///
    /// # Panics
    /// If a value does not fit its key: values are checked where they are read.
    pub fn apply(&mut self, changes: &[Change]) {
        for (key, value) in changes {
            self.put(key, value.as_ref());
        }
    }

    fn put(&mut self, key: &Key, value: Option<&Value>) {
        match (key, value) {
            (Key::Era, Some(Value::Number(era))) => self.era = Some(*era),
            (Key::Tick, Some(Value::Number(tick))) => self.tick = *tick,
            (Key::Moves, Some(Value::Number(moves))) => self.moves = *moves,
            (Key::Coordinator, _) => {}
            (Key::Member(node), value) => {
                if let Some(old) = self.members.remove(node) {
                    self.lives.remove(&old.life);
                }
                if let Some(Value::Member(member)) = value {
                    if member.standing != Standing::Gone {
                        self.lives.insert(member.life, node.clone());
                    }
                    self.members.insert(node.clone(), *member);
                }
            }
            (Key::Publication(node), Some(Value::Published(published))) => {
                self.published.insert(node.clone(), published.clone());
            }
            (Key::Publication(node), None) => {
                self.published.remove(node);
            }
            (Key::Inode(id), Some(Value::Inode(inode))) => {
                self.inodes.insert(*id, inode.clone());
            }
            (Key::Inode(id), None) => {
                self.inodes.remove(id);
            }
            (Key::Name(place), Some(Value::Entry(entry))) => {
                match entry.target {
                    Some(_) => self.tombstones.remove(place),
                    None => self.tombstones.insert(place.clone()),
                };
                self.names.entry(place.directory).or_default().insert(place.name.clone(), *entry);
            }
            (Key::Name(place), None) => {
                self.tombstones.remove(place);
                if let Some(names) = self.names.get_mut(&place.directory) {
                    names.remove(&place.name);
                    if names.is_empty() {
                        self.names.remove(&place.directory);
                    }
                }
            }
            (key, value) => panic!("{value:?} is not a value of {key:?}"),
        }
    }
}

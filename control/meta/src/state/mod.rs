//! The metadata as one value: the tree, the members, the progress of each.
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

/// Everything that the store holds as of one revision, except the coordinator's role.
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
    /// Returns the era; `None` before anything was applied.
    #[must_use]
    pub fn era(&self) -> Option<u64> {
        self.era
    }

    /// Returns the number of transactions of this era.
    #[must_use]
    pub fn tick(&self) -> u64 {
        self.tick
    }

    /// Returns the number of directories that were moved to another parent.
    #[must_use]
    pub fn moves(&self) -> u64 {
        self.moves
    }

    /// Returns all members by name.
    #[must_use]
    pub fn members(&self) -> &BTreeMap<NodeName, Member> {
        &self.members
    }

    /// Returns the node whose present life this is; `None` if the life is over or unknown.
    #[must_use]
    pub fn node_of(&self, life: Incarnation) -> Option<&NodeName> {
        self.lives.get(&life)
    }

    /// Returns whether a life was declared gone whose unpublished changes are still to come.
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

    /// Returns an inode.
    #[must_use]
    pub fn inode(&self, id: FileId) -> Option<&Inode> {
        self.inodes.get(&id)
    }

    /// Returns a name's entry, absent at version 0 if the name is unknown.
    #[must_use]
    pub fn entry(&self, place: &Place) -> Entry {
        self.names.get(&place.directory).and_then(|names| names.get(&place.name)).copied().unwrap_or_default()
    }

    /// Iterates over all names of a directory, tombstones included.
    pub fn entries(&self, directory: FileId) -> impl Iterator<Item = (&Name, &Entry)> {
        self.names.get(&directory).into_iter().flatten()
    }

    /// Iterates over removed names whose tombstone is kept.
    pub fn tombstones(&self) -> impl Iterator<Item = &Place> {
        self.tombstones.iter()
    }

    /// Returns the present life that may act alone on an inode.
    #[must_use]
    pub fn alone(&self, inode: &Inode) -> Option<Incarnation> {
        (inode.alone && self.lives.contains_key(&inode.holder)).then_some(inode.holder)
    }

    /// Returns the value of a key in this state; `None` for the coordinator's role, which is not kept here.
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

    /// Applies changes that the store has taken.
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

//! A state with changes that are not in the store yet.
//!
//! Owns: reading through the changes. Does not own: their meaning.

use super::State;
use crate::key::{Key, Place};
use crate::value::Change;
use crate::value::{Entry, Inode, Value};
use std::collections::BTreeMap;
use tidemark_protocol::id::FileId;

/// A state and the changes of the earlier calls.
#[derive(Debug)]
pub(super) struct Draft<'a> {
    pub(super) state: &'a State,
    changes: BTreeMap<Key, Option<Value>>,
}

impl<'a> Draft<'a> {
    pub(super) fn new(state: &'a State) -> Self {
        Self { state, changes: BTreeMap::new() }
    }

    pub(super) fn inode(&self, id: FileId) -> Option<&Inode> {
        match self.changes.get(&Key::Inode(id)) {
            Some(Some(Value::Inode(inode))) => Some(inode),
            Some(_) => None,
            None => self.state.inode(id),
        }
    }

    pub(super) fn entry(&self, place: &Place) -> Entry {
        match self.changes.get(&Key::Name(place.clone())) {
            Some(Some(Value::Entry(entry))) => *entry,
            Some(_) => Entry::default(),
            None => self.state.entry(place),
        }
    }

    /// Returns whether no name of `directory` leads anywhere. Costs the directory's names and this draft's changes.
    pub(super) fn is_empty(&self, directory: FileId) -> bool {
        let kept = self
            .state
            .entries(directory)
            .all(|(name, _)| self.entry(&Place { directory, name: name.clone() }).target.is_none());
        kept && self.changes.iter().all(|(key, value)| match (key, value) {
            (Key::Name(place), Some(Value::Entry(entry))) => {
                place.directory != directory || entry.target.is_none()
            }
            _ => true,
        })
    }

    pub(super) fn moves(&self) -> u64 {
        match self.changes.get(&Key::Moves) {
            Some(Some(Value::Number(moves))) => *moves,
            _ => self.state.moves(),
        }
    }

    /// Returns the number of keys if `more` were added.
    pub(super) fn keys_with(&self, more: &[Change]) -> usize {
        self.changes.len() + more.iter().filter(|(key, _)| !self.changes.contains_key(key)).count()
    }

    pub(super) fn add(&mut self, changes: Vec<Change>) {
        self.changes.extend(changes);
    }

    pub(super) fn contains(&self, key: &Key) -> bool {
        self.changes.contains_key(key)
    }

    pub(super) fn is_unchanged(&self) -> bool {
        self.changes.is_empty()
    }

    pub(super) fn into_changes(self) -> Vec<Change> {
        self.changes.into_iter().collect()
    }
}

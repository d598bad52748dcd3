//! Directories that are about to move.
//!
//! Owns: which node was let to move, remove or change a directory, and when that is over. Does not own: leases and promises in it
//! (`leases`), taking the other nodes out of it (the coordinator).
//!
//! What a node makes in a directory is published under the directory's path. A name that is made while the directory gets another path
//! would stand under the old one. So no other node begins anything in or below a directory from before the others are taken out of it
//! until its move is published.

use crate::id::NodeName;
use crate::path::upwards;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time after which a move is over even if nobody asked its node: longer than any call waits.
const MOVE: Duration = Duration::from_secs(60);

/// Moves that are kept before those that are over are looked for.
const SWEEP_MIN: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Move {
    node: NodeName,
    until: Duration,
    /// Tells this move from a later one of the same directory.
    number: u64,
    /// Whether the other nodes were taken out of the directory, and its node was answered.
    is_let: bool,
}

/// A move that is in the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moving {
    /// The directory that moves.
    pub path: Vec<u8>,
    pub node: NodeName,
    pub number: u64,
    /// Whether its node was answered: it ends once that node is asked. Otherwise its node waits for others, and who is in its way asks again.
    pub is_let: bool,
}

/// The moves of one epoch. Paths are relative to the mount.
#[derive(Debug, Clone, Default)]
pub struct Moves {
    by_path: BTreeMap<Vec<u8>, Move>,
    /// Number of the last move.
    last: u64,
}

impl Moves {
    /// Begins a move of the directory at `path` by `from`. Returns its number.
    ///
    /// # Errors
    /// Another node's move of this directory, or of one above it.
    pub fn begin(&mut self, from: &NodeName, path: &[u8], now: Duration) -> Result<u64, Moving> {
        if let Some(moving) = self.above(from, path, now) {
            return Err(moving);
        }
        if self.by_path.len() >= SWEEP_MIN {
            self.by_path.retain(|_, known| known.until > now);
        }
        self.last += 1;
        let begun = Move { node: from.clone(), until: now + MOVE, number: self.last, is_let: false };
        self.by_path.insert(path.to_vec(), begun);
        Ok(self.last)
    }

    /// Notes that a move's node is answered.
    pub fn let_go(&mut self, path: &[u8], number: u64) {
        if let Some(known) = self.by_path.get_mut(path).filter(|known| known.number == number) {
            known.is_let = true;
        }
    }

    /// Ends a move: its node was asked, or the others could not be taken out of the directory. A later move of the directory stays.
    pub fn end(&mut self, path: &[u8], number: u64) {
        if self.by_path.get(path).is_some_and(|known| known.number == number) {
            self.by_path.remove(path);
        }
    }

    /// Ends the move of a directory that is elsewhere by now, or gone.
    pub(super) fn done(&mut self, path: &[u8]) {
        self.by_path.remove(path);
    }

    /// Ends the moves of a node that is gone.
    pub(super) fn gone(&mut self, node: &NodeName) {
        self.by_path.retain(|_, known| known.node != *node);
    }

    /// Returns the move of a directory, or of one above it, by another node than `from`. Costs the depth of the directory.
    #[must_use]
    pub fn above(&self, from: &NodeName, directory: &[u8], now: Duration) -> Option<Moving> {
        if self.by_path.is_empty() {
            return None;
        }
        upwards(directory).find_map(|at| {
            let is_in_the_way = |known: &&Move| known.node != *from && known.until > now;
            let Move { node, number, is_let, .. } = self.by_path.get(at).filter(is_in_the_way)?.clone();
            Some(Moving { path: at.to_vec(), node, number, is_let })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    #[test]
    fn what_lies_below_a_moving_directory_waits_until_its_node_was_asked() {
        let (a, b) = (node("a"), node("b"));
        let mut moves = Moves::default();
        let number = moves.begin(&a, b"run/step", NOW).unwrap();
        for below in [&b"run/step"[..], b"run/step/deep", b"run/step/deep/er"] {
            let moving = moves.above(&b, below, NOW).unwrap();
            assert_eq!((moving.path.as_slice(), moving.is_let), (&b"run/step"[..], false));
            assert_eq!(moves.above(&a, below, NOW), None, "its own");
        }
        for beside in [&b""[..], b"run", b"run/step2", b"run/ste"] {
            assert_eq!(moves.above(&b, beside, NOW), None);
        }
        assert!(moves.begin(&b, b"run/step/deep", NOW).is_err());
        moves.let_go(b"run/step", number);
        assert!(moves.above(&b, b"run/step", NOW).unwrap().is_let);
        let again = moves.begin(&a, b"run/step", NOW).unwrap();
        moves.end(b"run/step", number);
        assert!(moves.above(&b, b"run/step", NOW).is_some(), "the later one stays");
        moves.end(b"run/step", again);
        assert!(moves.begin(&b, b"run/step", NOW).is_ok());
        assert_eq!(moves.above(&a, b"run/step", NOW + MOVE), None);
        moves.gone(&b);
        assert_eq!(moves.above(&a, b"run/step", NOW), None);
    }
}

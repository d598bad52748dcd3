//! What is to be looked at now, and what when a moment has come.
//!
//! Owns: that each key waits once, and in which order. Does not own: what a look finds, or when it is worth another.
//!
//! Everything costs the logarithm of what waits: 100,000 files that settle at different moments are not walked to find
//! the one that has.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// See the module's head. Within `now` the order is the keys', within `later` the moments'.
#[derive(Debug)]
pub(crate) struct Due<K> {
    now: BTreeSet<K>,
    later: BTreeSet<(Instant, K)>,
    /// The moment each key in `later` has.
    moments: BTreeMap<K, Instant>,
}

impl<K: Ord + Clone> Due<K> {
    pub(crate) fn new() -> Self {
        Self { now: BTreeSet::new(), later: BTreeSet::new(), moments: BTreeMap::new() }
    }

    /// To be looked at now, whatever moment it waited for.
    pub(crate) fn insert(&mut self, key: K) {
        self.drop_moment(&key);
        self.now.insert(key);
    }

    /// To be looked at when `moment` has come. A key that is due already stays due.
    pub(crate) fn insert_at(&mut self, key: K, moment: Instant) {
        if self.now.contains(&key) {
            return;
        }
        self.drop_moment(&key);
        self.moments.insert(key.clone(), moment);
        self.later.insert((moment, key));
    }

    pub(crate) fn remove(&mut self, key: &K) {
        self.drop_moment(key);
        self.now.remove(key);
    }

    fn drop_moment(&mut self, key: &K) {
        if let Some(moment) = self.moments.remove(key) {
            self.later.remove(&(moment, key.clone()));
        }
    }

    /// Makes due what waited for a moment until `now`.
    pub(crate) fn ripen(&mut self, now: Instant) {
        while self.later.first().is_some_and(|(moment, _)| *moment <= now) {
            let (_, key) = self.later.pop_first().expect("it was there a moment ago");
            self.moments.remove(&key);
            self.now.insert(key);
        }
    }

    /// Takes out the first that is due now.
    pub(crate) fn pop(&mut self) -> Option<K> {
        self.now.pop_first()
    }
}

#[cfg(test)]
mod tests {
    use super::Due;
    use std::time::{Duration, Instant};

    #[test]
    fn a_key_waits_once_for_the_moment_it_was_given_last() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut due = Due::new();
        due.insert_at("a", at(10));
        due.insert_at("b", at(5));
        due.insert_at("a", at(1));
        due.ripen(at(4));
        assert_eq!((due.pop(), due.pop()), (Some("a"), None));
        due.insert("b");
        due.insert_at("b", at(20));
        assert_eq!(due.pop(), Some("b"), "what is due is not put off");
        due.ripen(at(100));
        assert_eq!(due.pop(), None, "nor looked at twice");
        due.insert_at("c", at(7));
        due.remove(&"c");
        due.ripen(at(100));
        assert_eq!(due.pop(), None);
    }
}

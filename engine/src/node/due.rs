//! Queue of keys that are due now, or when a moment has come.
//!
//! Owns: that each key waits once, and in which order. Does not own: the work on a key, or when it is due again.
//!
//! Every call costs the logarithm of the number of keys that wait. With 100,000 files that settle at different moments, no call
//! walks them all to find the next one.

use std::collections::{BTreeMap, BTreeSet};
use tokio::time::Instant;

/// See the module's head. Within `now` the order is the keys', within `later` the moments'.
#[derive(Debug)]
pub(crate) struct Due<K> {
    now: BTreeSet<K>,
    later: BTreeSet<(Instant, K)>,
    /// Moment of each key in `later`.
    moments: BTreeMap<K, Instant>,
}

impl<K: Ord + Clone> Due<K> {
    pub(crate) fn new() -> Self {
        Self { now: BTreeSet::new(), later: BTreeSet::new(), moments: BTreeMap::new() }
    }

    /// Makes a key due now, whatever moment it waited for.
    pub(crate) fn insert(&mut self, key: K) {
        self.drop_moment(&key);
        self.now.insert(key);
    }

    /// Makes a key due when `moment` has come. A key that is due already stays due.
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

    /// Makes the keys due whose moment has come by `now`.
    pub(crate) fn ripen(&mut self, now: Instant) {
        while self.later.first().is_some_and(|(moment, _)| *moment <= now) {
            let (_, key) = self.later.pop_first().expect("it was there a moment ago");
            self.moments.remove(&key);
            self.now.insert(key);
        }
    }

    /// Takes out the first key that is due now.
    pub(crate) fn pop(&mut self) -> Option<K> {
        self.now.pop_first()
    }
}

#[cfg(test)]
mod tests {
    use super::Due;
    use std::time::Duration;
    use tokio::time::Instant;

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

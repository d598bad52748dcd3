//! Calls that need no question for a moment after the coordinator's answer.
//!
//! Owns: the missing names that are promised to this node, the directories that it may look up by itself, the directories in which it is
//! making names. Does not own: directories that it holds alone (`names`), what the coordinator remembers of it
//! (`protocol::cluster::leases`), the clock.
//!
//! A program that saves makes one file after the other in a few directories. For each the kernel looks up every directory on the way and
//! the missing name, and only then makes it. With this, all that is one question.
//!
//! Moments count from before the question was asked. The coordinator remembers each for longer, and asks this node before another one
//! acts against it.

use std::collections::HashMap;
use std::time::Duration;
use tidemark_namespace::NodeId;
use tidemark_protocol::cluster::leases::KNOWN;
use tokio::time::Instant;

/// Time after a look-up of a missing name during which the call that makes it does not ask again. The kernel sends one right after the
/// other. Less than the coordinator's promise lasts.
const PROMISED_FOR: Duration = Duration::from_millis(250);

/// Time for which a directory that was looked up is not asked about again. Its time of change and its links may be as old where other
/// nodes change its entries.
const KNOWN_FOR: Duration = Duration::from_secs(1);
const _: () =
    assert!(KNOWN_FOR.as_millis() * 2 <= KNOWN.as_millis(), "the coordinator remembers it for longer");

/// Time after a name was made in a directory during which a look-up there asks for a promise of the name, too.
const MAKING_FOR: Duration = Duration::from_secs(1);

/// Maximum number of entries of each kind. Without an entry a question is asked.
const ENTRIES_MAX: usize = 4096;

/// A name in a directory.
pub(super) type Name = (NodeId, Vec<u8>);

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Remembered {
    /// When this node last made a name in a directory that other nodes change, too.
    making: HashMap<NodeId, Instant>,
    promised: HashMap<Name, Instant>,
    /// When another node last wanted a name. Answers to questions from before that promise nothing, and later look-ups ask for no promise.
    wanted: HashMap<Name, Instant>,
    /// The same for all names that are not in `wanted`.
    all_wanted_at: Option<Instant>,
    known: HashMap<NodeId, Instant>,
    /// Answers to questions from before this moment say nothing of directories any more.
    forgotten_at: Option<Instant>,
}

impl Remembered {
    /// Notes that this node makes a name in a directory.
    pub(super) fn makes(&mut self, directory: NodeId, now: Instant) {
        note(&mut self.making, directory, now, (now, MAKING_FOR));
    }

    /// Whether names are being made in a directory, and nobody else wants this one: who looks for it, and does not find it, is about to
    /// make it.
    pub(super) fn is_making(&self, directory: NodeId, name: &[u8], now: Instant) -> bool {
        is_young(self.making.get(&directory), now, MAKING_FOR)
            && !is_young(self.wanted_at(&(directory, name.to_vec())).as_ref(), now, MAKING_FOR)
    }

    /// Notes that a missing name was promised to this node.
    pub(super) fn promised(&mut self, name: Name, asked_at: Instant, now: Instant) {
        if self.wanted_at(&name).is_none_or(|wanted_at| wanted_at < asked_at) {
            note(&mut self.promised, name, asked_at, (now, PROMISED_FOR));
        }
    }

    /// Uses a promise. Returns false if there is none.
    pub(super) fn take_promise(&mut self, name: &Name, now: Instant) -> bool {
        let asked_at = self.promised.remove(name);
        is_young(asked_at.as_ref(), now, PROMISED_FOR)
    }

    /// Ends the promise of a name, because another node wants it.
    pub(super) fn wants(&mut self, name: &Name, now: Instant) {
        self.promised.remove(name);
        if !note(&mut self.wanted, name.clone(), now, (now, MAKING_FOR)) {
            self.wants_all(now);
        }
    }

    fn wants_all(&mut self, now: Instant) {
        self.promised.clear();
        self.all_wanted_at = Some(now);
    }

    fn wanted_at(&self, name: &Name) -> Option<Instant> {
        self.wanted.get(name).copied().max(self.all_wanted_at)
    }

    /// Notes that a look-up found a directory, unless a directory was about to change since it was asked for.
    pub(super) fn found(&mut self, directory: NodeId, asked_at: Instant, now: Instant) {
        if self.forgotten_at.is_none_or(|forgotten_at| forgotten_at < asked_at) {
            note(&mut self.known, directory, asked_at, (now, KNOWN_FOR));
        }
    }

    /// Whether a directory can be looked up without a question.
    pub(super) fn knows(&self, directory: NodeId, now: Instant) -> bool {
        is_young(self.known.get(&directory), now, KNOWN_FOR)
    }

    /// Forgets what earlier answers allowed.
    pub(super) fn forget_answers(&mut self, now: Instant) {
        self.wants_all(now);
        self.known.clear();
        self.forgotten_at = Some(now);
    }
}

fn is_young(at: Option<&Instant>, now: Instant, limit: Duration) -> bool {
    at.is_some_and(|at| now.saturating_duration_since(*at) < limit)
}

/// Adds an entry of the moment `at`, if there is room once entries older than `limit` are gone. Returns whether there is.
fn note<K: std::hash::Hash + Eq>(
    entries: &mut HashMap<K, Instant>,
    key: K,
    at: Instant,
    (now, limit): (Instant, Duration),
) -> bool {
    if entries.len() >= ENTRIES_MAX {
        entries.retain(|_, at| is_young(Some(at), now, limit));
    }
    let fits = entries.len() < ENTRIES_MAX;
    if fits {
        entries.insert(key, at);
    }
    fits
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_promise_is_used_once_and_soon_and_not_after_it_was_broken() {
        let (asked, mut all) = (Instant::now(), Remembered::default());
        let name = |name: &str| (7, name.as_bytes().to_vec());
        for one in ["used", "late", "broken", "kept"] {
            all.promised(name(one), asked, asked + MS);
        }
        assert!(all.take_promise(&name("used"), asked + MS));
        assert!(!all.take_promise(&name("used"), asked + MS));
        assert!(!all.take_promise(&name("late"), asked + PROMISED_FOR), "it counts from the question");
        all.wants(&name("broken"), asked + MS);
        assert!(!all.take_promise(&name("broken"), asked) && all.take_promise(&name("kept"), asked));
        all.promised(name("broken"), asked, asked + MS);
        assert!(!all.take_promise(&name("broken"), asked), "its question is older than the other node's");
        all.promised(name("all"), asked, asked);
        all.makes(7, asked);
        assert!(all.is_making(7, b"new", asked) && !all.is_making(7, b"broken", asked + MS));
        all.forget_answers(asked + MS);
        assert!(!all.take_promise(&name("all"), asked) && !all.is_making(7, b"new", asked));
    }

    #[test]
    fn names_that_others_want_beyond_the_limit_end_all_promises() {
        let (asked, mut all) = (Instant::now(), Remembered::default());
        for number in 0..=ENTRIES_MAX as u64 {
            all.promised((7, b"kept".to_vec()), asked, asked);
            all.wants(&(8, number.to_le_bytes().to_vec()), asked + MS);
        }
        assert!(!all.take_promise(&(7, b"kept".to_vec()), asked + MS));
        all.promised((7, b"kept".to_vec()), asked, asked + MS);
        assert!(!all.take_promise(&(7, b"kept".to_vec()), asked + MS), "nobody knows whether it was wanted");
        all.promised((7, b"kept".to_vec()), asked + 2 * MS, asked + 2 * MS);
        assert!(all.take_promise(&(7, b"kept".to_vec()), asked + 2 * MS));
    }

    #[test]
    fn an_answer_that_was_asked_for_before_a_directory_changed_is_not_remembered() {
        let (begun, mut all) = (Instant::now(), Remembered::default());
        all.found(3, begun, begun + MS);
        assert!(all.knows(3, begun + MS) && !all.knows(3, begun + KNOWN_FOR));
        all.forget_answers(begun + 5 * MS);
        assert!(!all.knows(3, begun + 5 * MS));
        all.found(3, begun + 4 * MS, begun + 6 * MS);
        assert!(!all.knows(3, begun + 6 * MS), "its question is older than the change");
        all.found(3, begun + 6 * MS, begun + 7 * MS);
        assert!(all.knows(3, begun + 7 * MS));
    }

    #[test]
    fn there_are_never_more_entries_than_the_limit() {
        let (begun, mut all) = (Instant::now(), Remembered::default());
        for directory in 0..2 * ENTRIES_MAX as u64 {
            all.found(directory, begun, begun);
        }
        assert_eq!(all.known.len(), ENTRIES_MAX);
        all.found(1 << 40, begun + KNOWN_FOR, begun + KNOWN_FOR);
        assert_eq!(all.known.len(), 1, "old ones make room");
        assert!(all.knows(1 << 40, begun + KNOWN_FOR));
    }
}

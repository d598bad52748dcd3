//! Removes or hides the directory of a checkpoint if its maker failed before anything was written into it.
//!
//! Owns: which process made which directory, asking how it ended, carrying the decision out. Does not own: the decision
//! (`protocol::shield`), checkpoints with files (`torn`).
//!
//! Resume code takes the directory with the highest number, and fails on one without files (Accelerate, HF Trainer). So an empty
//! directory is removed: nothing is lost with it. A directory with a file in flight, under its temporary name, is hidden. If a directory
//! has a model's configuration or card and nothing else, it is hidden once a job can load another checkpoint of the run.
//!
//! Nothing of this outlives the daemon: the next one leaves such directories alone. Until it is decided, Tier-3 gets neither the
//! directory nor the files that come before the weights. Otherwise a job would find them after the loss of the node, and their maker
//! would not be known any more. For the same reason an ending daemon decides, too.

use crate::node::Shared;
use crate::node::decide::settle_ns;
use crate::node::flush::Flushes;
use crate::node::ledger::Ledger;
use crate::node::rescue::IDLE_NS;
use crate::node::rights::Rights;
use crate::node::visibility::DECIDED_WITHIN;
use crate::node::visibility::timetable::Subject;
use crate::node::visibility::tracker::is_of_run;
use crate::node::visibility::{Shielding, Visibility};
use std::sync::Arc;
use tidemark_namespace::{Made, NodeId, is_alive};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::Rules;
use tidemark_protocol::removal::Actor;
use tidemark_protocol::report::EventLevel;
use tidemark_protocol::shield::{self, Unwritten};
use tokio::time::Instant;

/// Directories that are remembered; beyond that the oldest are forgotten.
pub(super) const DIRECTORIES_MAX: usize = 1024;

/// A directory that was still without written files when it was examined last.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) made: Made,
    /// Since when its maker does not live, as of the last check.
    pub(super) dead_since: Option<Instant>,
}

/// Lookups about directories that a job made and has not written into.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Beginnings<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a Ledger,
    pub(crate) visibility: &'a Visibility,
    pub(crate) flushes: &'a Flushes,
    pub(crate) rights: &'a Rights,
}

impl<'a> Beginnings<'a> {
    /// Returns the directories of checkpoints that Tier-3 must not have yet, because nothing that counts is in them.
    pub(crate) fn begun(self, now: Instant) -> impl Iterator<Item = RelPath> {
        let named =
            self.visibility.made.iter().filter_map(move |(node, begun)| Some((begun, self.begun_at(*node)?)));
        let withheld = named.filter(move |(begun, found)| {
            found.forewords == 0 || self.why_undecided(begun, found, now).is_some()
        });
        withheld.flat_map(|(_, found)| found.directories)
    }

    /// Returns why Tier-3 must not have yet a file with which a save begins, or a file in flight beside it. Either the maker of its
    /// directory lives, or the decision about the directory is open.
    pub(crate) fn why_beginning_waits(self, path: &RelPath, now: Instant) -> Option<String> {
        if !Rules::is_foreword(path) && !self.ledger.rules().is_temporary(path) {
            return None;
        }
        std::iter::successors(path.parent(), RelPath::parent).find_map(|directory| {
            self.ledger.rules().named_by_directory(&directory)?;
            let node = self.shared.namespace.nodes().node_at(directory.as_bytes())?;
            let begun = self.visibility.made.get(&node)?;
            self.why_undecided(begun, &self.unwritten(node)?, now)
        })
    }

    /// See [`Self::why_beginning_waits`]. As with any checkpoint, a directory to which nothing was added for long is taken as it is; if a
    /// flush waits, that time is shorter.
    fn why_undecided(
        self,
        begun: &Begun,
        found: &tidemark_namespace::Unwritten,
        now: Instant,
    ) -> Option<String> {
        let idle_ns = if self.flushes.is_empty() { IDLE_NS } else { settle_ns(self.shared) };
        let quiet = self.shared.now_ns().saturating_sub(found.closed_ns) >= idle_ns;
        let process = begun.made.maker.tgid;
        let lives = || is_alive(&self.shared.namespace, &begun.made.maker);
        match begun.dead_since {
            _ if self.rights.never_shields() => None,
            Some(since) if now.saturating_duration_since(since) >= DECIDED_WITHIN => None,
            None if lives() => (!quiet).then(|| {
                format!("a save begins with it, and process {process} lives, which made its directory")
            }),
            Some(_) | None => Some(format!(
                "a save began with it, and process {process}, which made its directory, ended before more was there"
            )),
        }
    }

    /// Whether a decision about a directory comes within moments: its maker is dead, or the daemon ends.
    pub(crate) fn decides_about_begun(self, now: Instant) -> bool {
        self.visibility.made.iter().any(|(node, begun)| {
            let Some(found) = self.begun_at(*node) else { return false };
            (self.rights.draining || !is_alive(&self.shared.namespace, &begun.made.maker))
                && self.why_undecided(begun, &found, now).is_some()
        })
    }

    /// Whether a living program began a save less than `gap_ns` ago, and has written nothing into it that counts.
    pub(crate) fn is_anything_begun(self, gap_ns: i64) -> bool {
        let now_ns = self.shared.now_ns();
        self.visibility.made.iter().any(|(node, Begun { made, .. })| {
            let is_new = |found: tidemark_namespace::Unwritten| {
                now_ns.saturating_sub(found.closed_ns.max(made.at_ns)) < gap_ns
            };
            self.begun_at(*node).is_some_and(is_new) && is_alive(&self.shared.namespace, &made.maker)
        })
    }

    fn unwritten(self, directory: u64) -> Option<tidemark_namespace::Unwritten> {
        let rules = self.ledger.rules();
        self.shared.namespace.writers().unwritten(
            directory,
            |path| rules.is_temporary(path),
            Rules::is_foreword,
        )
    }

    /// Does the same, for directories with the name of a checkpoint only.
    fn begun_at(self, directory: NodeId) -> Option<tidemark_namespace::Unwritten> {
        let is_named = |found: &tidemark_namespace::Unwritten| {
            self.ledger.rules().named_by_directory(&found.directories[0])
        };
        self.unwritten(directory).filter(|found| is_named(found).is_some())
    }
}

impl Shielding<'_> {
    /// Removes or hides directories without written files whose makers failed.
    pub(crate) fn drop_unwritten(&mut self, now: Instant) {
        let nodes: Vec<u64> = self.visibility.made.keys().copied().collect();
        for node in nodes {
            let Some(found) = self.beginnings().unwritten(node) else {
                self.visibility.forget_made(node);
                continue;
            };
            let rests = self.visibility.rests(&Subject::Unwritten(node), now);
            if self.rights.never_shields() || rests {
                continue;
            }
            // A directory that gets such a name later is still remembered then.
            let Some(id) = self.ledger.rules().named_by_directory(&found.directories[0]) else { continue };
            let Made { maker, at_ns, .. } = self.visibility.made[&node].made.clone();
            let lives = is_alive(&self.shared.namespace, &maker);
            let begun = self.visibility.made.get_mut(&node).expect("it was there a moment ago");
            begun.dead_since = if lives { None } else { begun.dead_since.or(Some(now)) };
            if found.open {
                // The kernel closes the files of a dead process within moments.
                continue;
            }
            let actor = self.sessions().actor(&maker, &id.run);
            if actor == Actor::Ended {
                // The parent collects its exit status within moments, and a job may be restarted within a second.
                continue;
            }
            let session = || self.sessions().session_of(&id.run, &[&maker], at_ns);
            match shield::decide_unwritten(actor, session) {
                Unwritten::Stays => self.unwritten_ends(node),
                Unwritten::Waits { process } => {
                    self.visibility.timetable.ask_again(Subject::Unwritten(node), now, process);
                }
                // Another process, which lives, may have written into it.
                Unwritten::Goes { .. } if self.shared.had_not_heard(self.ledger, is_of_run(&id.run)) => {}
                Unwritten::Goes { .. } if found.forewords > 0 && !self.fallbacks().has_another(&id) => {
                    // Another checkpoint may be about to settle.
                    self.visibility.timetable.ask_again(Subject::Unwritten(node), now, None);
                }
                Unwritten::Goes { why } => {
                    // A file in flight may hold the only bytes of something: it stays below `.tidemark/torn`.
                    let gone = if found.temporaries + found.forewords == 0 {
                        self.shared.withdraw(&[], &found.directories).map(drop)
                    } else {
                        self.shared.hide(&found.directories[0])
                    };
                    match gone {
                        Ok(()) => {
                            let what = format!(
                                "it held {} files in flight, {} that come before what is saved, and no other: {why}",
                                found.temporaries, found.forewords
                            );
                            self.shared.event_of(EventLevel::Warn, "hidden", &id, what);
                        }
                        Err(error) => {
                            tracing::error!(path = %found.directories[0], %error, "an empty checkpoint stays");
                        }
                    }
                    self.unwritten_ends(node);
                }
            }
        }
    }

    fn unwritten_ends(&mut self, node: NodeId) {
        self.visibility.forget_made(node);
        // A flush that waited for the decision now waits until Tier-3 has the tree as decided.
        self.tree.tells_more(self.ledger);
    }
}

//! Takes the directory of a checkpoint away when who made it failed before anything was written into it.
//!
//! Owns: who made which directory, asking how they ended, carrying the decision out. Does not own: the decision
//! (`protocol::shield`), checkpoints with files (`torn`).
//!
//! Resume code takes the directory with the highest number, and fails on one without files (Accelerate, HF Trainer). An empty one goes:
//! nothing is lost with it. One with a file in flight, under its temporary name, goes out of sight; one with a model's configuration or
//! card and nothing else does where a job can load another checkpoint of the run. Nothing of it outlives the daemon: the next one
//! leaves what is there. Until it is decided, Tier-3 has neither the directory nor what came before the weights: after the loss of the
//! node a job would find those, and nobody would know any more who had made them. So it is decided while the daemon ends, too.

use crate::node::decide::settle_ns;
use crate::node::rescue::IDLE_NS;
use crate::node::run::Engine;
use crate::node::visibility::DECIDED_WITHIN;
use crate::node::visibility::timetable::Subject;
use crate::node::visibility::tracker::is_of_run;
use std::time::Instant;
use tidemark_namespace::{Made, NodeId, is_alive};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::Rules;
use tidemark_protocol::removal::Actor;
use tidemark_protocol::report::EventLevel;
use tidemark_protocol::shield::{self, Unwritten};

/// Directories that are remembered, the latest.
pub(super) const DIRECTORIES_MAX: usize = 1024;

/// A directory in which nothing was yet, when it was looked at last.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) made: Made,
    /// Since when its maker does not live, as far as it was asked.
    pub(super) dead_since: Option<Instant>,
}

/// Directories that a job made and has not written into.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Beginnings<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> Beginnings<'a> {
    /// The directories of checkpoints in which nothing is yet that Tier-3 has to know.
    pub(crate) fn begun(self, now: Instant) -> impl Iterator<Item = RelPath> {
        let named = self
            .engine
            .visibility
            .made
            .iter()
            .filter_map(move |(node, begun)| Some((begun, self.begun_at(*node)?)));
        let withheld = named.filter(move |(begun, found)| {
            found.forewords == 0 || self.why_undecided(begun, found, now).is_some()
        });
        withheld.flat_map(|(_, found)| found.directories)
    }

    /// Why a file with which a save begins stays out of Tier-3, or one in flight beside it: who writes that lives, or it is not decided
    /// yet what becomes of it.
    pub(crate) fn why_beginning_waits(self, path: &RelPath, now: Instant) -> Option<String> {
        if !Rules::is_foreword(path) && !self.engine.ledger.rules().is_temporary(path) {
            return None;
        }
        std::iter::successors(path.parent(), RelPath::parent).find_map(|directory| {
            self.engine.ledger.rules().named_by_directory(&directory)?;
            let node = self.engine.shared.namespace.node_at(directory.as_bytes())?;
            let begun = self.engine.visibility.made.get(&node)?;
            self.why_undecided(begun, &self.unwritten(node)?, now)
        })
    }

    /// See [`Self::why_beginning_waits`]. As of any checkpoint, what nothing was added to for long is taken as it is, and sooner where a
    /// flush waits.
    fn why_undecided(
        self,
        begun: &Begun,
        found: &tidemark_namespace::Unwritten,
        now: Instant,
    ) -> Option<String> {
        let idle_ns = if self.engine.flushes.is_empty() { IDLE_NS } else { settle_ns(&self.engine.shared) };
        let quiet = self.engine.shared.now_ns().saturating_sub(found.closed_ns) >= idle_ns;
        let process = begun.made.maker.tgid;
        let lives = || is_alive(&self.engine.shared.namespace, &begun.made.maker);
        match begun.dead_since {
            _ if self.engine.never_shields() => None,
            Some(since) if now.saturating_duration_since(since) >= DECIDED_WITHIN => None,
            None if lives() => (!quiet).then(|| {
                format!("a save begins with it, and process {process} lives, which made its directory")
            }),
            Some(_) | None => Some(format!(
                "a save began with it, and process {process}, which made its directory, ended before more was there"
            )),
        }
    }

    /// Whether it is decided within moments what becomes of what the dead began, and while the daemon ends also of what those who live
    /// did.
    pub(crate) fn decides_about_begun(self, now: Instant) -> bool {
        self.engine.visibility.made.iter().any(|(node, begun)| {
            let Some(found) = self.begun_at(*node) else { return false };
            (self.engine.draining || !is_alive(&self.engine.shared.namespace, &begun.made.maker))
                && self.why_undecided(begun, &found, now).is_some()
        })
    }

    /// Whether a program that lives began a save less than `gap_ns` ago, and wrote nothing into it yet that counts.
    pub(crate) fn is_anything_begun(self, gap_ns: i64) -> bool {
        let now_ns = self.engine.shared.now_ns();
        self.engine.visibility.made.iter().any(|(node, Begun { made, .. })| {
            let is_new = |found: tidemark_namespace::Unwritten| {
                now_ns.saturating_sub(found.closed_ns.max(made.at_ns)) < gap_ns
            };
            self.begun_at(*node).is_some_and(is_new) && is_alive(&self.engine.shared.namespace, &made.maker)
        })
    }

    fn unwritten(self, directory: u64) -> Option<tidemark_namespace::Unwritten> {
        let rules = self.engine.ledger.rules();
        self.engine.shared.namespace.unwritten(directory, |path| rules.is_temporary(path), Rules::is_foreword)
    }

    /// The same of a directory with the name of a checkpoint.
    fn begun_at(self, directory: NodeId) -> Option<tidemark_namespace::Unwritten> {
        let is_named = |found: &tidemark_namespace::Unwritten| {
            self.engine.ledger.rules().named_by_directory(&found.directories[0])
        };
        self.unwritten(directory).filter(|found| is_named(found).is_some())
    }
}

impl Engine {
    /// Looks what has become of who made them.
    pub(crate) fn drop_unwritten(&mut self, now: Instant) {
        let nodes: Vec<u64> = self.visibility.made.keys().copied().collect();
        for node in nodes {
            let Some(found) = self.beginnings().unwritten(node) else {
                self.visibility.forget_made(node);
                continue;
            };
            let rests = self.visibility.rests(&Subject::Unwritten(node), now);
            if self.never_shields() || rests {
                continue;
            }
            // One that gets such a name later is still remembered then.
            let Some(id) = self.ledger.rules().named_by_directory(&found.directories[0]) else { continue };
            let Made { maker, at_ns, .. } = self.visibility.made[&node].made.clone();
            let lives = is_alive(&self.shared.namespace, &maker);
            let begun = self.visibility.made.get_mut(&node).expect("it was there a moment ago");
            begun.dead_since = if lives { None } else { begun.dead_since.or(Some(now)) };
            if found.open {
                // The kernel closes what a dead one had open within moments.
                continue;
            }
            let actor = self.sessions().actor(&maker, &id.run);
            if actor == Actor::Ended {
                // Its parent asks within moments, and a job may be started again in a second.
                continue;
            }
            let session = || self.sessions().session_of(&id.run, &[&maker], at_ns);
            match shield::decide_unwritten(actor, session) {
                Unwritten::Stays => self.unwritten_ends(node),
                Unwritten::Waits { process } => {
                    self.visibility.timetable.ask_again(Subject::Unwritten(node), now, process);
                }
                // Another may have written into it, and lives.
                Unwritten::Goes { .. } if self.had_not_heard(is_of_run(&id.run)) => {}
                Unwritten::Goes { .. } if found.forewords > 0 && !self.fallbacks().has_another(&id) => {
                    // One may be about to settle.
                    self.visibility.timetable.ask_again(Subject::Unwritten(node), now, None);
                }
                Unwritten::Goes { why } => {
                    // A file in flight may be all that there is of something: it stays to be looked at.
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
        // A flush that waited for it waits for the tree without it, or with it.
        self.tree.tells_more(&mut self.ledger);
    }
}

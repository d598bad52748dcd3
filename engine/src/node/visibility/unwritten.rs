//! Takes the directory of a checkpoint away when who made it failed before anything was written into it.
//!
//! Owns: who made which directory, asking how they ended, carrying the decision out. Does not own: the decision
//! (`protocol::shield`), checkpoints with files (`torn`).
//!
//! Resume code takes the directory with the highest number, and fails on one without files (Accelerate, HF Trainer). An empty one goes:
//! nothing is lost with it. One with a file in flight, under its temporary name, goes out of sight; one with a model's configuration or
//! card and nothing else does where a job can load another checkpoint of the run. Nothing of it outlives the daemon: the next one
//! leaves what is there.

use crate::namespace::{self, Made, NodeId};
use crate::node::run::Engine;
use crate::node::visibility::timetable::Subject;
use crate::node::visibility::tracker::is_of_run;
use std::time::Instant;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::Rules;
use tidemark_protocol::removal::Actor;
use tidemark_protocol::report::EventLevel;
use tidemark_protocol::shield::{self, Unwritten};

/// Directories that are remembered, the latest.
const DIRECTORIES_MAX: usize = 1024;

impl Engine {
    /// Takes down what was made since the last time.
    pub(crate) fn hear_made(&mut self) {
        for made in self.shared.namespace.take_made() {
            self.visibility.made.insert(made.directory, made);
        }
        while self.visibility.made.len() > DIRECTORIES_MAX {
            let (node, _) = self.visibility.made.pop_first().expect("there are more than may be");
            self.visibility.timetable.forget(&Subject::Unwritten(node));
        }
    }

    /// The directories of checkpoints in which nothing is yet, while it is not clear that they are meant to be empty.
    pub(crate) fn begun(&self) -> impl Iterator<Item = RelPath> + '_ {
        let found = self.visibility.made.keys().filter_map(|node| self.unwritten(*node));
        // What was closed is kept where it is, until it goes.
        let found = found.filter(|found| found.forewords == 0);
        let named =
            found.filter(|found| self.ledger.rules().named_by_directory(&found.directories[0]).is_some());
        named.flat_map(|found| found.directories)
    }

    fn unwritten(&self, directory: u64) -> Option<namespace::Unwritten> {
        let rules = self.ledger.rules();
        self.shared.namespace.unwritten(directory, |path| rules.is_temporary(path), Rules::is_foreword)
    }

    /// Looks what has become of who made them.
    pub(crate) fn drop_unwritten(&mut self, now: Instant) {
        let nodes: Vec<u64> = self.visibility.made.keys().copied().collect();
        for node in nodes {
            let Some(found) = self.unwritten(node) else {
                self.forget_made(node);
                continue;
            };
            let rests = self.visibility.rests(&Subject::Unwritten(node), now);
            if found.open || self.shields_nothing() || rests {
                continue;
            }
            // One that gets such a name later is still remembered then.
            let Some(id) = self.ledger.rules().named_by_directory(&found.directories[0]) else { continue };
            let Made { maker, at_ns, .. } = &self.visibility.made[&node];
            let actor = self.actor(maker, &id.run);
            if actor == Actor::Ended {
                // Its parent asks within moments, and a job may be started again in a second.
                continue;
            }
            let session = || self.session_of(&id.run, &[maker], *at_ns);
            match shield::decide_unwritten(actor, session) {
                Unwritten::Stays => self.unwritten_ends(node),
                Unwritten::Waits { process } => {
                    self.visibility.timetable.ask_again(Subject::Unwritten(node), now, process);
                }
                // Another may have written into it, and lives.
                Unwritten::Goes { .. } if self.had_not_heard(is_of_run(&id.run)) => {}
                Unwritten::Goes { .. } if found.forewords > 0 && !self.has_another(&id) => {
                    // One may be about to settle.
                    self.visibility.timetable.ask_again(Subject::Unwritten(node), now, None);
                }
                Unwritten::Goes { why } => {
                    // A file in flight may be all that there is of something: it stays to be looked at.
                    let gone = if found.temporaries + found.forewords == 0 {
                        self.shared.namespace.withdraw(&[], &found.directories).map(drop)
                    } else {
                        self.shared.namespace.hide(&found.directories[0])
                    };
                    match gone {
                        Ok(()) => {
                            let what = format!(
                                "it held {} files in flight, {} that come before what is saved, and no other: {why}",
                                found.temporaries, found.forewords
                            );
                            self.event(EventLevel::Warn, "hidden", &id, what);
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
        self.forget_made(node);
        self.ledger.tree_changed = true;
    }

    fn forget_made(&mut self, node: NodeId) {
        self.visibility.made.remove(&node);
        self.visibility.timetable.forget(&Subject::Unwritten(node));
    }
}

//! Takes the directory of a checkpoint away when who made it failed before anything was written into it.
//!
//! Owns: who made which directory, asking how they ended, carrying the decision out. Does not own: the decision
//! (`protocol::shield`), checkpoints with files (`shield`).
//!
//! Resume code takes the directory with the highest number, and fails on one without files (Accelerate, HF Trainer). An empty one goes:
//! nothing is lost with it. One with a file in flight, under its temporary name, goes out of sight. Nothing of it outlives the daemon: the next one leaves what is there.

use crate::namespace::{self, Made};
use crate::node::run::Engine;
use crate::node::tracker::is_of_run;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::removal::Actor;
use tidemark_protocol::report::EventLevel;
use tidemark_protocol::shield::{self, Unwritten};

/// Directories that are remembered, the latest.
const DIRECTORIES_MAX: usize = 1024;

/// Between two looks at a session, which read /proc of the whole machine.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// What the loop keeps for it.
#[derive(Debug, Default)]
pub(crate) struct Begun {
    /// By the directories' nodes, which only rise.
    directories: BTreeMap<u64, Directory>,
}

#[derive(Debug)]
struct Directory {
    made: Made,
    /// Not asked again before, unless the process ends that was alive then.
    later: Option<(Instant, Option<u32>)>,
}

impl Engine {
    /// Takes down what was made since the last time.
    pub(crate) fn hear_made(&mut self) {
        for made in self.shared.namespace.take_made() {
            self.begun.directories.insert(made.directory, Directory { made, later: None });
        }
        while self.begun.directories.len() > DIRECTORIES_MAX {
            self.begun.directories.pop_first();
        }
    }

    /// The directories of checkpoints in which nothing is yet, while it is not clear that they are meant to be empty.
    pub(crate) fn begun(&self) -> impl Iterator<Item = RelPath> + '_ {
        let found = self.begun.directories.keys().filter_map(|node| self.unwritten(*node));
        let named =
            found.filter(|found| self.ledger.rules().named_by_directory(&found.directories[0]).is_some());
        named.flat_map(|found| found.directories)
    }

    fn unwritten(&self, directory: u64) -> Option<namespace::Unwritten> {
        let rules = self.ledger.rules();
        self.shared.namespace.unwritten(directory, |path| rules.is_temporary(path))
    }

    /// Looks what has become of who made them.
    pub(crate) fn drop_begun(&mut self, now: Instant) {
        let nodes: Vec<u64> = self.begun.directories.keys().copied().collect();
        for node in nodes {
            let Some(found) = self.unwritten(node) else {
                self.begun.directories.remove(&node);
                continue;
            };
            let waits = |(until, process): (Instant, Option<u32>)| {
                until > now && process.is_none_or(crate::node::decide::is_running)
            };
            if found.open || self.shields_nothing() || self.begun.directories[&node].later.is_some_and(waits)
            {
                continue;
            }
            // One that gets such a name later is still remembered then.
            let Some(id) = self.ledger.rules().named_by_directory(&found.directories[0]) else { continue };
            let Made { maker, at_ns, .. } = &self.begun.directories[&node].made;
            let actor = self.actor(maker, &id.run);
            if actor == Actor::Ended {
                // Its parent asks within moments, and a job may be started again in a second.
                continue;
            }
            let session = || self.session_of(&id.run, &[maker], *at_ns);
            match shield::decide_unwritten(actor, session) {
                Unwritten::Stays => self.begun_ends(node),
                Unwritten::Waits { process } => {
                    let remembered = self.begun.directories.get_mut(&node).expect("it was there");
                    remembered.later = Some((now + ASK_EVERY, process));
                }
                // Another may have written into it, and lives.
                Unwritten::Goes { .. } if self.had_not_heard(is_of_run(&id.run)) => {}
                Unwritten::Goes { why } => {
                    // A file in flight may be all that there is of something: it stays to be looked at.
                    let gone = if found.temporaries == 0 {
                        self.shared.namespace.withdraw(&[], &found.directories).map(drop)
                    } else {
                        self.shared.namespace.hide(&found.directories[0])
                    };
                    match gone {
                        Ok(()) => {
                            let what =
                                format!("it held {} files in flight and no other: {why}", found.temporaries);
                            self.event(EventLevel::Warn, "hidden", &id, what);
                        }
                        Err(error) => {
                            tracing::error!(path = %found.directories[0], %error, "an empty checkpoint stays");
                        }
                    }
                    self.begun_ends(node);
                }
            }
        }
    }

    fn begun_ends(&mut self, node: u64) {
        self.begun.directories.remove(&node);
        self.ledger.tree_changed = true;
    }
}

//! Takes the directory of a checkpoint away when who made it failed before anything was written into it.
//!
//! Owns: who made which directory, asking how they ended, carrying the decision out. Does not own: the decision
//! (`protocol::shield`), checkpoints with files (`shield`).
//!
//! Resume code takes the directory with the highest number, and fails on an empty one (Accelerate, HF Trainer). Nothing is lost with
//! it, so it is not kept out of sight. Nothing of it outlives the daemon: the next one leaves what is there.

use crate::namespace::Made;
use crate::node::run::Engine;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::CheckpointId;
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
        let found = self.begun.directories.keys().filter_map(|node| self.begun_at(*node));
        found.flat_map(|(_, directories)| directories)
    }

    fn begun_at(&self, directory: u64) -> Option<(CheckpointId, Vec<RelPath>)> {
        let directories = self.shared.namespace.unwritten(directory)?;
        Some((self.ledger.rules().named_by_directory(&directories[0])?, directories))
    }

    /// Looks what has become of who made them.
    pub(crate) fn drop_begun(&mut self, now: Instant) {
        let nodes: Vec<u64> = self.begun.directories.keys().copied().collect();
        for node in nodes {
            if self.shared.namespace.unwritten(node).is_none() {
                self.begun.directories.remove(&node);
                continue;
            }
            let waits = |(until, process): (Instant, Option<u32>)| {
                until > now && process.is_none_or(crate::node::decide::is_running)
            };
            if self.shields_nothing() || self.begun.directories[&node].later.is_some_and(waits) {
                continue;
            }
            // One that gets such a name later is still remembered then.
            let Some((id, directories)) = self.begun_at(node) else { continue };
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
                Unwritten::Goes { why } => {
                    match self.shared.namespace.withdraw(&[], &directories) {
                        Ok(_) => {
                            self.event(EventLevel::Warn, "hidden", &id, format!("it held no file: {why}"))
                        }
                        Err(error) => {
                            tracing::error!(path = %directories[0], %error, "an empty checkpoint stays")
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

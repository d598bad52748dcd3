//! The loop that owns everything one node knows of its checkpoints.
//!
//! `let what = select().await; apply(what); step()`: it waits for changed files, finished jobs, questions or a
//! moment; notes them; and then examines what is due. Only one thing happens at a time, so its knowledge needs no
//! locks, and the order of events does no harm. There are two costs. Anything that takes long must be a job (`jobs`)
//! whose end is one more event. A question from outside waits its turn.
//!
//! | file | owns |
//! |---|---|
//! | `rights` | the rights of this node: to decide, to write to Tier-3, to hide names |
//! | `catch_up` | that the ledger learns of each change |
//! | `ledger`, `copies` | files, groups, books, which name of a file carries its bytes, which names Tier-3 cannot hold; how many copies there are |
//! | `book` | one checkpoint over its versions |
//! | `due` | which entries are examined now, which later |
//! | `looks` | how much of the loop's time goes into judging checkpoints |
//! | `decide` | what a book should do next |
//! | `indices` | which indices can be read |
//! | `unsaved`, `links` | which directories and links Tier-3 does not know yet |
//! | `run` | the loop, and which jobs it starts |
//! | `views` | the parts of the state that each question and each step borrows |
//! | `advance` | versions: what the rules say is done |
//! | `in_the_way` | how long a version waits for content of others in its place |
//! | `backlog` | versions that are not at rest, the lag |
//! | `loose` | files that belong to no checkpoint |
//! | `file_jobs` | hashing, judging and fetching single files |
//! | `apply` | what follows from the end of a job |
//! | `jobs` | the bodies of jobs |
//! | `away` | operations that Tier-3 does not take |
//! | `full` | tiers that fail saves |
//! | `pressure` | room in Tier-1 for writers of unknown size |
//! | `flush`, `pending`, `outstanding` | which callers wait for what to be durable; what is not, and why |
//! | `rescue` | what only Tier-1 holds when the daemon ends |
//! | `tree`, `tree_now` | the tree document: when it is written, and what it holds |
//! | `recover` | from what Tier-3 holds to a tree |
//! | `stand_in` | stand-ins for documents that cannot be read |
//! | `removals`, `replaced` | which removals Tier-3 knows of; what replaces what was removed |
//! | `scrub`, `verify`, `verify_names`, `verify_removed`, `verify_scope`, `verify_peers` | verifying bytes at rest, and healing them |
//! | `damage` | what copies that are known to be bad count for |
//! | `verdicts`, `gc` | which committed versions are retired, and retiring them |
//! | `given_up` | whether findings about examined content still count |
//! | `generations` | which generations of loose files are retired |
//! | `export` | a version written out of the mount |
//! | `import` | checkpoints that others wrote into Tier-3 |
//! | `metric` | what jobs say of their checkpoints |
//! | `names` | what the loop does to names, and which nodes learn of it |
//! | `keeping` | pins, and what people remove and bring back |
//! | `visibility` | what a returning job sees |
//! | `proof` | verifying the documents on which commits rest |
//! | `answer`, `inventory`, `show`, `why`, `tiers`, `problems`, `recovery` | reports for people |
//! | `select`, `by_path` | which checkpoint a person means; which lie at a path |
//! | `attributes` | `user.tidemark.*` |
//! | `events` | what happened lately |

mod adopt;
mod advance;
mod answer;
mod apply;
mod attributes;
mod away;
mod backlog;
mod book;
mod by_path;
mod catch_up;
mod copies;
mod damage;
mod decide;
mod due;
mod events;
mod export;
mod file_jobs;
mod flush;
mod full;
mod gc;
mod generations;
mod given_up;
mod import;
mod in_the_way;
mod indices;
mod inventory;
mod jobs;
mod keeping;
mod ledger;
mod links;
mod looks;
mod loose;
mod metric;
mod names;
mod outstanding;
mod pace;
mod pending;
mod prefetch;
mod pressure;
mod problems;
mod proof;
mod recover;
mod recovery;
mod removals;
mod replaced;
mod rescue;
mod rights;
mod run;
#[cfg(test)]
mod schedule;
mod scrub;
mod select;
mod show;
mod stand_in;
mod tiers;
mod tree;
mod tree_now;
mod unsaved;
mod verdicts;
mod verify;
mod verify_names;
mod verify_peers;
mod verify_removed;
mod verify_scope;
mod views;
mod visibility;
mod why;

pub use advance::ATTEMPTS_IN_FLIGHT_MAX;
pub use answer::{Identity, Standing};
pub use events::Events;
pub use flush::FlushOutcome;
pub use recover::{Names, RecoverError, Recovered, look, recover};
pub use run::{Node, NodeParts, QUESTIONS_MAX};
pub use scrub::{BadAtOpen, NotVerified, heal_at_open, verify_at_open};
pub use select::Wanted;

use crate::cluster::Cluster;
use crate::metrics::Metrics;
use crate::replicate::Replicator;
use crate::restore::Restorer;
use crate::save::drain::Drain;
use crate::save::predict::Sizes;
use crate::save::share::{Means, Participants};
use crate::settings::Settings;
use std::sync::{Arc, OnceLock};
use tidemark_namespace::{Clock, FileView, Namespace};
use tidemark_protocol::id::{FileId, Incarnation, SealNumber};
use tidemark_protocol::key::NodeLife;
use tidemark_tier1::Tier1;

/// State that the loop, its jobs and their callers share. Each part handles concurrent use itself.
#[derive(Debug)]
pub struct Shared {
    pub settings: Settings,
    pub namespace: Arc<Namespace>,
    pub tier1: Arc<Tier1>,
    pub drain: Arc<Drain>,
    pub metrics: Arc<Metrics>,
    pub events: Events,
    pub clock: Clock,
    pub sizes: Arc<Sizes>,
    /// Threads that hash one file.
    pub seal_threads: usize,
    /// The way back of cold files.
    pub restorer: Restorer,
    /// The other nodes, if this one has any.
    pub cluster: OnceLock<Arc<Cluster>>,
    /// The replicator that copies this node's files, if there are other nodes.
    pub replicator: OnceLock<Arc<Replicator>>,
}

impl Shared {
    /// Whether a life of a node is over. An unknown life counts as over.
    pub(crate) fn is_gone(&self, life: Incarnation) -> bool {
        let member = self.cluster.get().and_then(|cluster| cluster.following.member_of(life));
        member.is_none_or(|member| member.gone)
    }

    /// Whether another node that lives keeps a copy of these bytes.
    pub(crate) fn is_copied(&self, file: FileId, seal: SealNumber) -> bool {
        self.cluster.get().is_some_and(|cluster| cluster.is_copied(file, seal))
    }

    /// Whether the bytes of a file are lost: its node is gone, and no copy is known, here, elsewhere or in Tier-3.
    pub(crate) fn has_lost(&self, view: &FileView) -> bool {
        let (Some(cluster), Some(remote)) = (self.cluster.get(), &view.remote) else { return false };
        let is_somewhere = view.host || view.object.is_some() || !self.is_gone(remote.home);
        !is_somewhere && cluster.following.is_settled() && !cluster.is_copied(view.file, view.last_seal)
    }

    /// Returns the life that wrote a file. If no node knows that life any more, it counts as one of this node.
    pub(crate) fn life_of(&self, incarnation: Incarnation) -> NodeLife {
        let member = self.cluster.get().and_then(|cluster| cluster.following.member_of(incarnation));
        let node = member.map_or_else(|| self.drain.life.node.clone(), |member| member.life.node);
        NodeLife { node, incarnation }
    }

    /// Whether this node decides over checkpoints: it is alone, or the coordinator.
    pub fn decides(&self) -> bool {
        self.cluster.get().is_none_or(|cluster| cluster.following.is_coordinator())
    }

    /// Returns the parts that phase 1 of an attempt works with.
    pub(crate) fn means(&self) -> Means<'_> {
        Means {
            drain: &self.drain,
            namespace: &self.namespace,
            restorer: &self.restorer,
            others: self.cluster.get().map(|cluster| cluster.as_ref() as &dyn Participants),
        }
    }

    pub(crate) fn now_ns(&self) -> i64 {
        (self.clock.0)()
    }
}

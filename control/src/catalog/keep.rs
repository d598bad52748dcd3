//! The catalog in etcd: what is acknowledged there survives the coordinator.
//!
//! Owns: collecting what changed, the order in which it is written, who waits for that. Does not own: requests ([`CatalogLog`] has them
//! made), the format (`protocol::cluster::kept`), what a successor makes of it (`succeed`).
//!
//! One change is under way at a time, and the number in its mark says whether it arrived: a change whose answer was lost is sent again as it was.

use super::Catalog;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidemark_engine::cluster::state_of;
use tidemark_engine::namespace::{NamedNode, ROOT as TREE_ROOT, Unkept};
use tidemark_protocol::cluster::kept::{
    CatalogNode, Change, KeptCatalog, Mark, Process, ProcessFate, ROOT, VALUE_BYTES_MAX, Writer,
};
use tidemark_protocol::cluster::wire::{BATCH_BYTES_MAX, BATCH_ITEMS_MAX};
use tidemark_protocol::id::Epoch;
use tidemark_protocol::key::NodeLife;
use tidemark_transport::{LinkErrorKind, Refusal};
use tokio::sync::Notify;

/// An etcd takes 128 operations in a transaction with its usual settings, of which the mark is one.
const CHANGES_MAX: usize = 120;

/// Beyond its last change. With that, a request stays below the 1.5 MiB that an etcd takes with its usual settings.
const CHANGES_BYTES_MAX: usize = 256 << 10;
const _: () = assert!(CHANGES_BYTES_MAX + VALUE_BYTES_MAX < 1 << 20, "etcd takes 1.5 MiB, and adds to it");

/// How long an acknowledgement waits. Who is refused after that says the same again.
const KEPT_WAIT: Duration = Duration::from_secs(5);

/// Before a change that failed is sent again.
const SEND_AGAIN: Duration = Duration::from_millis(100);

/// The part that says that nobody is to be waited for.
const NOBODY: u64 = u64::MAX;

/// Changes to be made in one step, where the catalog is still as the mark before says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub mark: Mark,
    pub changes: Vec<Change>,
}

/// Why a step was not made, or may not have been.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// Another coordinator writes there.
    #[error("another coordinator took over: {0}")]
    Lost(String),
    /// Nobody who may has written it as it is.
    #[error("the catalog is not as it was left: {0}")]
    Changed(String),
    /// It takes nothing, and says so: its quota is used up, say.
    #[error("it refuses them, and this coordinator's memory alone has them: {0}")]
    Refused(String),
    /// Perhaps it was made.
    #[error("it does not answer, and names wait: {0}")]
    Away(String),
}

/// Where the catalog is kept.
#[async_trait::async_trait]
pub trait CatalogLog: Send + Sync + std::fmt::Debug {
    /// Makes a step, once however often it is asked for.
    ///
    /// # Errors
    /// See [`StepError`].
    async fn step(&self, step: &Step) -> Result<(), StepError>;
}

/// How far the catalog is kept.
#[derive(Debug)]
pub(super) struct Keeping {
    /// Publications are taken in, and parts collected, one at a time.
    step: tokio::sync::Mutex<()>,
    /// Parts begun.
    begun: AtomicU64,
    /// The last publication of this node itself that was collected.
    own: AtomicU64,
    /// The last part up to which everything is kept.
    kept: tokio::sync::watch::Sender<u64>,
    /// Why the last step was not made; none where it was.
    trouble: tokio::sync::watch::Sender<Option<String>>,
    /// What Tier-3 holds is in the tree.
    tier3_heard: Notify,
}

impl Default for Keeping {
    fn default() -> Self {
        Self {
            step: tokio::sync::Mutex::default(),
            begun: AtomicU64::new(0),
            own: AtomicU64::new(0),
            kept: tokio::sync::watch::Sender::new(NOBODY),
            trouble: tokio::sync::watch::Sender::default(),
            tier3_heard: Notify::new(),
        }
    }
}

impl Keeping {
    pub(super) async fn step(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.step.lock().await
    }

    /// All that was before is kept: what comes is waited for from now on.
    pub(super) fn begin(&self) {
        self.kept(0);
    }

    /// Nothing stands in the way any more of a catalog that was not known.
    pub(super) fn heard_tier3(&self) {
        self.tier3_heard.notify_one();
    }

    fn kept(&self, part: u64) {
        self.kept.send_replace(part);
    }

    fn trouble(&self, why: Option<String>) {
        self.trouble.send_if_modified(|last| {
            let differs = *last != why;
            if differs {
                match &why {
                    Some(why) => tracing::warn!(%why, "the catalog is not kept in etcd"),
                    None => tracing::info!("the catalog is kept in etcd again"),
                }
                *last = why;
            }
            differs
        });
    }
}

/// A part of the catalog that is not kept yet.
struct Part {
    unkept: Unkept,
    published: Vec<(NodeLife, u64)>,
    /// Its number among all parts.
    begun: u64,
}

impl Catalog {
    /// Whether everything that has been done until now is kept, for which this waits within bounds. True where nobody keeps it, or where etcd says
    /// that it takes nothing: names then go on with the coordinator's memory alone, and its problems say so.
    pub async fn is_kept_by_now(&self) -> bool {
        let begun = self.keeping.begun.load(Ordering::Acquire);
        let mut kept = self.keeping.kept.subscribe();
        if *kept.borrow() == NOBODY {
            return true;
        }
        // A part that has begun may have been collected before.
        self.cluster.namespace().wake_keeper();
        let waited = tokio::time::timeout(KEPT_WAIT, kept.wait_for(|part| *part > begun)).await;
        matches!(waited, Ok(Ok(_)))
    }

    /// The refusal for who is not answered because etcd is slow.
    pub(super) fn not_kept(&self) -> Refusal {
        let why = self.keeping.trouble.borrow().clone().unwrap_or_else(|| "it has not answered".to_owned());
        Refusal::new(
            LinkErrorKind::Unavailable,
            format!("the cluster's etcd has not taken the change yet: {why}; it is sent again"),
        )
    }

    /// Why the catalog is not kept where it should be; none where it is. Changes are seen.
    #[must_use]
    pub fn watch_trouble(&self) -> tokio::sync::watch::Receiver<Option<String>> {
        self.keeping.trouble.subscribe()
    }

    /// Keeps what changes in `log`, where `before` is kept already, until dropped.
    pub async fn keep(self: Arc<Self>, log: Arc<dyn CatalogLog>, mut before: Option<KeptCatalog>) {
        loop {
            let why = self.keep_after(log.as_ref(), before.take()).await;
            tracing::error!(%why, "the catalog in etcd is written anew");
        }
    }

    /// Returns only where all has to be written anew.
    async fn keep_after(&self, log: &dyn CatalogLog, before: Option<KeptCatalog>) -> String {
        let namespace = self.cluster.namespace();
        let mut script = match before {
            Some(before) => {
                let child = |parent, name: &[u8]| namespace.child_number(parent, name);
                tokio::task::block_in_place(|| Script::after(before, self.epoch, child))
            }
            None => {
                let mut script = Script::anew(self.epoch);
                if let Err(why) = self.write(&mut script, log).await {
                    return why;
                }
                // A successor would take a part of the names for all of them.
                while self.lock().hearing.knows_nothing() {
                    self.keeping.tier3_heard.notified().await;
                }
                script
            }
        };
        // In this order: what is done in between is collected, and stays here in case it is not kept.
        self.keeping.kept(if script.is_whole() { 0 } else { NOBODY });
        namespace.lead_outgoing(true);
        namespace.collect_unkept(!script.is_whole());
        {
            let mut state = self.lock();
            state.unkept = state.published.keys().cloned().collect();
            state.unkept.insert(self.cluster.life.clone());
        }
        loop {
            let Part { unkept, published, begun } = self.next_part().await;
            let (all, publication) = (unkept.all, unkept.publication);
            script.take(unkept, published, |node| {
                let (node, names) = node;
                CatalogNode { id: node.node, names, state: state_of(namespace, node) }
            });
            if let Err(why) = self.write(&mut script, log).await {
                return why;
            }
            if all {
                namespace.kept_until(publication);
                if *self.keeping.kept.borrow() == NOBODY {
                    tracing::info!("the whole catalog is kept in etcd");
                }
                self.keeping.kept(begun);
                if script.is_idle() {
                    namespace.unkept_changed().await;
                }
            }
        }
    }

    /// Makes all steps that are left, however often each has to be sent. The error says why all has to be written anew.
    async fn write(&self, script: &mut Script, log: &dyn CatalogLog) -> Result<(), String> {
        while let Some(step) = script.next_step() {
            match log.step(&step).await {
                Ok(()) => {
                    self.keeping.trouble(None);
                    script.made();
                }
                Err(StepError::Changed(why)) => return Err(why),
                Err(StepError::Lost(why)) => {
                    // Whoever renews the lease ends this.
                    tracing::warn!(%why, "this coordinator's changes are not kept any more");
                    std::future::pending::<()>().await;
                }
                Err(error) => {
                    if matches!(error, StepError::Refused(_)) {
                        self.keeping.kept(NOBODY);
                    }
                    self.keeping.trouble(Some(error.to_string()));
                    tokio::time::sleep(SEND_AGAIN).await;
                }
            }
        }
        Ok(())
    }

    /// Takes the next part of the catalog that is not kept.
    async fn next_part(&self) -> Part {
        let _step = self.keeping.step().await;
        let begun = self.keeping.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let unkept = self.cluster.namespace().take_unkept(BATCH_ITEMS_MAX, BATCH_BYTES_MAX);
        let published = {
            let mut state = self.lock();
            // Only with the last part are all names of a publication there.
            let lives: BTreeSet<NodeLife> =
                if unkept.all { std::mem::take(&mut state.unkept) } else { BTreeSet::new() };
            // This node's own operations count as published, too: it goes on from there where another coordinates.
            let is_news = self.keeping.own.swap(unkept.publication, Ordering::Relaxed) != unkept.publication;
            let own = (unkept.all && (is_news || lives.contains(&self.cluster.life)))
                .then(|| (self.cluster.life.clone(), unkept.publication));
            let last =
                lives.into_iter().filter_map(|life| Some((life.clone(), *state.published.get(&life)?)));
            last.chain(own).collect()
        };
        Part { unkept, published, begun }
    }
}

/// What is to be written, in steps.
#[derive(Debug)]
struct Script {
    writer: Writer,
    /// With the last step that was begun.
    mark: Mark,
    /// All of the tree has been taken in.
    complete: bool,
    numbers: Numbers,
    /// What was kept before, and has not been met in the tree.
    before: Option<(BTreeMap<u64, CatalogNode>, BTreeMap<Process, ProcessFate>)>,
    changes: VecDeque<Change>,
    /// How many of them are in the step that is under way.
    under_way: usize,
}

/// The numbers of the tree's nodes in the catalog.
#[derive(Debug)]
struct Numbers {
    /// Those that were there before.
    kept: BTreeMap<u64, u64>,
    /// All others are by this much higher than in the tree.
    above: u64,
}

impl Numbers {
    fn of(&self, node: u64) -> u64 {
        let known = self.kept.get(&node).copied();
        known.unwrap_or_else(|| if node == TREE_ROOT { ROOT } else { node.saturating_add(self.above) })
    }
}

impl Script {
    /// Nothing of the catalog is there, or nothing that is of use.
    fn anew(epoch: Epoch) -> Self {
        Self {
            writer: Writer::default(),
            mark: Mark { epoch, ..Mark::default() },
            complete: false,
            numbers: Numbers { kept: BTreeMap::new(), above: 0 },
            before: None,
            changes: VecDeque::from([Writer::delete_all()]),
            under_way: 0,
        }
    }

    /// All of it is there as `before` has it; `child`: what a directory of the present tree has.
    fn after(before: KeptCatalog, epoch: Epoch, child: impl Fn(u64, &[u8]) -> Option<u64>) -> Self {
        let kept = before.numbers_in(TREE_ROOT, child);
        let mark = Mark { epoch, number: 0, ahead_ns: before.ahead_ns, whole: before.mark.whole };
        Self {
            writer: Writer::after(&before),
            mark,
            complete: false,
            numbers: Numbers { kept, above: before.last_id() },
            before: Some(before.into_parts()),
            changes: VecDeque::new(),
            under_way: 0,
        }
    }

    fn is_whole(&self) -> bool {
        self.mark.whole
    }

    fn is_idle(&self) -> bool {
        self.changes.is_empty()
    }

    /// Takes a part in; `node`: a node with its numbers in the tree, on this node's clock.
    fn take(
        &mut self,
        unkept: Unkept,
        published: Vec<(NodeLife, u64)>,
        node: impl Fn(NamedNode) -> CatalogNode,
    ) {
        let ahead_ns = self.mark.ahead_ns;
        let catalogs = |at: i64| at.saturating_sub(ahead_ns);
        for told in unkept.nodes {
            let CatalogNode { id, names, state } = node(told);
            let names = names.into_iter().map(|(parent, name)| (self.numbers.of(parent), name)).collect();
            let node = CatalogNode { id: self.numbers.of(id), names, state: state.with_times(catalogs) };
            let before = self.before.as_mut().and_then(|(nodes, _)| nodes.remove(&node.id));
            if before.as_ref() != Some(&node) {
                self.writer.node(node, &mut self.changes);
            }
        }
        for gone in unkept.gone {
            let id = self.numbers.of(gone);
            self.numbers.kept.remove(&gone);
            if let Some((nodes, _)) = &mut self.before {
                nodes.remove(&id);
            }
            self.writer.gone(id, &mut self.changes);
        }
        for fate in unkept.fates {
            let fate = ProcessFate { failed_at_ns: fate.failed_at_ns.map(catalogs), ..fate };
            let before = self.before.as_mut().and_then(|(_, fates)| fates.remove(&fate.of()));
            if before != Some(fate) {
                self.writer.fate(&fate, &mut self.changes);
            }
        }
        for process in unkept.forgotten {
            self.writer.forget_fate(process, &mut self.changes);
        }
        for file in unkept.removed {
            self.writer.removed(file, &mut self.changes);
        }
        if unkept.all {
            // What has not been met is not in the tree.
            let (nodes, fates) = self.before.take().unwrap_or_default();
            for id in nodes.into_keys() {
                self.writer.gone(id, &mut self.changes);
            }
            for process in fates.into_keys() {
                self.writer.forget_fate(process, &mut self.changes);
            }
            for (life, number) in published {
                self.writer.published(&life, number, &mut self.changes);
            }
            self.complete = true;
        }
    }

    /// The step that is to be made next, or made again; none where nothing is left.
    fn next_step(&mut self) -> Option<Step> {
        if self.changes.is_empty() {
            return None;
        }
        if self.under_way == 0 {
            let mut bytes = 0;
            let fits = |change: &&Change| {
                let fits = bytes < CHANGES_BYTES_MAX;
                bytes += change.bytes();
                fits
            };
            self.under_way = self.changes.iter().take(CHANGES_MAX).take_while(fits).count();
            self.mark.number += 1;
        }
        // Once it is whole it stays so: half a part is as if its publications had not been made.
        self.mark.whole |= self.complete && self.under_way == self.changes.len();
        Some(Step { mark: self.mark, changes: self.changes.iter().take(self.under_way).cloned().collect() })
    }

    fn made(&mut self) {
        self.changes.drain(..self.under_way);
        self.under_way = 0;
    }
}

#[cfg(test)]
#[path = "keep_test.rs"]
mod tests;

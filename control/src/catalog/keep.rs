//! The catalog in etcd: what is acknowledged there survives the coordinator.
//!
//! Owns: collecting what changed, the order in which it is written, who waits for that. Does not own: requests ([`CatalogLog`] has them
//! made), the format (`protocol::cluster::kept`), what a successor makes of it (`succeed`).
//!
//! The steps are made one after the other. The number in a step's mark says whether it arrived, so a step whose answer was lost is sent again.
//! A batch shows the tree at one moment, and is kept all or not at all: operations that a node sends again would not fit half of what came of them.

use super::Catalog;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidemark_engine::cluster::state_of;
use tidemark_namespace::{NamedNode, ROOT as TREE_ROOT, Unkept};
use tidemark_protocol::cluster::kept::{
    self, CatalogNode, Change, KeptCatalog, Mark, Process, ProcessFate, ROOT, VALUE_BYTES_MAX, Writer,
};
use tidemark_protocol::cluster::wire::{BATCH_BYTES_MAX, BATCH_ITEMS_MAX};
use tidemark_protocol::id::{Epoch, FileId, Incarnation};
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
    /// Its space is used up.
    #[error("it is full, and this coordinator's memory alone has them: {0}")]
    Full(String),
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
    /// Wakes the keeper once the names of Tier-3 are in the tree.
    tier3_heard: Notify,
    /// The mark in etcd is of this coordinator, or etcd is full.
    announced: tokio::sync::watch::Sender<bool>,
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
            announced: tokio::sync::watch::Sender::new(false),
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
#[derive(Debug)]
struct Part {
    unkept: Unkept,
    published: BTreeMap<NodeLife, u64>,
    /// Its number among all parts.
    begun: u64,
}

impl Catalog {
    /// Whether everything that has been done until now is kept, for which this waits within bounds. True where nobody keeps it, or where etcd says
    /// that it takes nothing: names then go on with the coordinator's memory alone, and its problems say so.
    pub(super) async fn is_kept_by_now(&self) -> bool {
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

    /// Resolves once no coordinator before this one can be taken for the last, by whoever reads etcd; or etcd is full.
    pub async fn announced(&self) {
        // The sender lives as long as this does.
        let _ = self.keeping.announced.subscribe().wait_for(|announced| *announced).await;
    }

    /// The last publication of a life that its node may take for answered.
    pub(super) fn answered_until(&self, life: &NodeLife, state: &super::State) -> Option<u64> {
        let taken = state.published.get(life).copied();
        if *self.keeping.kept.borrow() == NOBODY {
            return taken;
        }
        state.kept.get(life).copied().or(taken)
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

    /// Keeps what changes in `log`, where `before` is kept already, until dropped. `is_complete`: the tree has become all of that.
    pub async fn keep(
        self: Arc<Self>,
        log: Arc<dyn CatalogLog>,
        mut before: Option<KeptCatalog>,
        is_complete: bool,
    ) {
        loop {
            let why = self.keep_after(log.as_ref(), before.take(), is_complete).await;
            tracing::error!(%why, "the catalog in etcd is written anew");
        }
    }

    /// Returns only where all has to be written anew.
    async fn keep_after(
        &self,
        log: &dyn CatalogLog,
        before: Option<KeptCatalog>,
        is_complete: bool,
    ) -> String {
        let namespace = self.cluster.namespace();
        let own = self.cluster.life.incarnation;
        let mut script = match before {
            Some(before) => {
                let child = |parent, name: &[u8]| namespace.child_number(parent, name);
                let script = tokio::task::block_in_place(|| {
                    Script::after(before, (self.epoch, own), is_complete, child)
                });
                // The seat may have been lost meanwhile, and then nothing goes on from here.
                tokio::task::yield_now().await;
                script
            }
            None => Script::anew((self.epoch, own)),
        };
        // Before anything else the mark says who writes, or that nothing of use is there.
        if let Err(why) = self.write(&mut script, log).await {
            return why;
        }
        self.keeping.announced.send_replace(true);
        // A successor would take a part of the names for all of them.
        while self.lock().hearing.knows_nothing() {
            self.keeping.tier3_heard.notified().await;
        }
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
            // All that is found until nothing is left is of one moment, that of the last part, and is kept in one step or not at all.
            let (last, begun) = loop {
                let Part { mut unkept, published, begun } = self.next_part().await;
                script.take(&mut unkept, |node| {
                    let (node, names) = node;
                    CatalogNode { id: node.node, names, state: state_of(namespace, node) }
                });
                if unkept.all {
                    break ((unkept, published), begun);
                }
                // Nobody reads a catalog that is not whole, so its parts need not wait here for each other.
                if !script.is_whole() {
                    script.plan();
                    if let Err(why) = self.write(&mut script, log).await {
                        return why;
                    }
                }
            };
            let (unkept, published) = last;
            script.finish(&published);
            if let Err(why) = self.write(&mut script, log).await {
                return why;
            }
            namespace.kept_until(unkept.publication, unkept.loss);
            self.lock().kept.extend(published);
            if *self.keeping.kept.borrow() == NOBODY {
                tracing::info!("the whole catalog is kept in etcd");
            }
            self.keeping.kept(begun);
            namespace.unkept_changed().await;
        }
    }

    /// Makes all steps that are planned, however often each has to be sent. The error says why all has to be written anew.
    async fn write(&self, script: &mut Script, log: &dyn CatalogLog) -> Result<(), String> {
        while let Some(step) = script.next_step() {
            match log.step(step).await {
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
                    if matches!(error, StepError::Full(_)) {
                        self.keeping.kept(NOBODY);
                        self.keeping.announced.send_replace(true);
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
        let mut published = BTreeMap::new();
        // Only with the last part are all names of a publication there.
        if unkept.all {
            let mut state = self.lock();
            for life in std::mem::take(&mut state.unkept) {
                if let Some(number) = state.published.get(&life) {
                    published.insert(life, *number);
                }
            }
            // The coordinator's own operations count as published, too: its node goes on from there where another coordinates.
            let own = published.remove(&self.cluster.life);
            if own.is_some()
                || self.keeping.own.swap(unkept.publication, Ordering::Relaxed) != unkept.publication
            {
                published.insert(self.cluster.life.clone(), unkept.publication);
            }
        }
        Part { unkept, published, begun }
    }
}

/// The steps that are to be made, and what the next ones are planned from.
#[derive(Debug)]
struct Script {
    writer: Writer,
    /// The mark of the last step that was planned.
    mark: Mark,
    /// All of the tree has been planned.
    whole: bool,
    /// The life of this node.
    own: Incarnation,
    /// The tree has all that `before` had when it was taken up.
    is_complete: bool,
    numbers: Numbers,
    /// Nodes and fates of the catalog before that the tree has not shown yet.
    before: Option<(BTreeMap<u64, CatalogNode>, BTreeMap<Process, ProcessFate>)>,
    /// The nodes that are there by their numbers in the catalog.
    there: HashSet<u64>,
    found: Found,
    steps: VecDeque<Step>,
}

/// The changes since the last step was planned. None: it is gone.
#[derive(Debug, Default)]
struct Found {
    nodes: BTreeMap<u64, Option<CatalogNode>>,
    fates: BTreeMap<Process, Option<ProcessFate>>,
    removed: Vec<FileId>,
}

/// The numbers of the tree's nodes in the catalog.
#[derive(Debug)]
struct Numbers {
    /// The nodes that were in the catalog before.
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
    fn anew((epoch, own): (Epoch, Incarnation)) -> Self {
        let mut script = Self {
            writer: Writer::default(),
            mark: Mark { epoch, ..Mark::default() },
            whole: false,
            own,
            is_complete: true,
            numbers: Numbers { kept: BTreeMap::new(), above: 0 },
            before: None,
            there: HashSet::new(),
            found: Found::default(),
            steps: VecDeque::new(),
        };
        script.push(0, vec![Writer::delete_all()]);
        script
    }

    /// All of it is there as `before` has it; `child`: what a directory of the present tree has. Where the tree is not `is_complete`, what it has
    /// not stays in the catalog.
    fn after(
        before: KeptCatalog,
        (epoch, own): (Epoch, Incarnation),
        is_complete: bool,
        child: impl Fn(u64, &[u8]) -> Option<u64>,
    ) -> Self {
        let kept = before.numbers_in(TREE_ROOT, child);
        let lots = before.lots().to_vec();
        let mut script = Self {
            writer: Writer::after(&before),
            mark: Mark { epoch, number: 0, ahead_ns: before.ahead_ns, whole: true, lots: before.mark.lots },
            whole: true,
            own,
            is_complete,
            numbers: Numbers { kept, above: before.last_id() },
            there: before.ids().collect(),
            before: Some(before.into_parts()),
            found: Found::default(),
            steps: VecDeque::new(),
        };
        if lots.is_empty() {
            // Lots that the last coordinator wrote down and did not finish count for nothing.
            script.push(0, vec![kept::take_all_down()]);
        } else {
            script.push(script.mark.lots, Vec::new());
            script.make_lots(script.mark.lots, lots);
        }
        script
    }

    fn is_whole(&self) -> bool {
        self.whole
    }

    /// Takes a part in; `node`: a node with its numbers in the tree, on this node's clock.
    fn take(&mut self, unkept: &mut Unkept, node: impl Fn(NamedNode) -> CatalogNode) {
        let ahead_ns = self.mark.ahead_ns;
        let catalogs = |at: i64| at.saturating_sub(ahead_ns);
        for told in unkept.nodes.drain(..) {
            let CatalogNode { id, names, state } = node(told);
            let names = names.into_iter().map(|(parent, name)| (self.numbers.of(parent), name)).collect();
            let node = CatalogNode { id: self.numbers.of(id), names, state: state.with_times(catalogs) };
            let before = self.before.as_mut().and_then(|(nodes, _)| nodes.remove(&node.id));
            if before.as_ref() != Some(&node) {
                self.found.nodes.insert(node.id, Some(node));
            }
        }
        for gone in unkept.gone.drain(..) {
            let id = self.numbers.of(gone);
            self.numbers.kept.remove(&gone);
            if let Some((nodes, _)) = &mut self.before {
                nodes.remove(&id);
            }
            self.found.nodes.insert(id, None);
        }
        for fate in unkept.fates.drain(..) {
            let fate = ProcessFate { failed_at_ns: fate.failed_at_ns.map(catalogs), ..fate };
            let before = self.before.as_mut().and_then(|(_, fates)| fates.remove(&fate.of()));
            if before != Some(fate) {
                self.found.fates.insert(fate.of(), Some(fate));
            }
        }
        self.found.fates.extend(unkept.forgotten.drain(..).map(|process| (process, None)));
        self.found.removed.append(&mut unkept.removed);
    }

    /// Plans what was found.
    fn plan(&mut self) {
        let changes = self.changes();
        self.push_all(changes, &BTreeMap::new());
    }

    /// The same where nothing is left, with the publications that are in it: all of it is made, or nothing is.
    fn finish(&mut self, published: &BTreeMap<NodeLife, u64>) {
        // Nodes that the tree has not shown are gone. The fates of this node's own processes stay: a coordinator does not tell them.
        let (nodes, fates) = self.before.take().unwrap_or_default();
        if self.is_complete {
            self.found.nodes.extend(nodes.into_keys().map(|id| (id, None)));
        }
        let others = fates.into_keys().filter(|(home, ..)| *home != self.own);
        self.found.fates.extend(others.map(|process| (process, None)));
        let changes = self.changes();
        self.whole = true;
        self.push_all(changes, published);
    }

    fn changes(&mut self) -> Vec<Change> {
        let Found { nodes, fates, removed } = std::mem::take(&mut self.found);
        let mut changes = Vec::new();
        for (id, node) in nodes {
            match node {
                Some(node) => {
                    self.there.insert(id);
                    self.writer.node(node, &mut changes);
                }
                // A node without a name that counts was never written.
                None if self.there.remove(&id) => self.writer.gone(id, &mut changes),
                None => {}
            }
        }
        for (process, fate) in fates {
            match fate {
                Some(fate) => self.writer.fate(&fate, &mut changes),
                None => self.writer.forget_fate(process, &mut changes),
            }
        }
        for file in removed {
            self.writer.removed(file, &mut changes);
        }
        changes
    }

    fn push_all(&mut self, mut changes: Vec<Change>, published: &BTreeMap<NodeLife, u64>) {
        for (life, number) in published {
            self.writer.published(life, *number, &mut changes);
        }
        let mut lots = lots_of(changes);
        let was_whole = self.mark.whole;
        if lots.len() <= 1 {
            self.mark.whole |= self.whole;
            if let Some(lot) = lots.pop() {
                self.push(0, lot);
            } else if !was_whole && self.whole {
                self.push(0, Vec::new());
            }
            return;
        }
        if !was_whole {
            let last = lots.pop().unwrap_or_default();
            for lot in lots {
                self.push(0, lot);
            }
            self.mark.whole |= self.whole;
            self.push(0, last);
            return;
        }
        let lots: Vec<_> = (0..).zip(lots).collect();
        let count = u32::try_from(lots.len()).unwrap_or(u32::MAX);
        for (at, lot) in &lots {
            // With the last one all of them count.
            let all = if at + 1 == count { count } else { 0 };
            self.push(all, vec![kept::write_down(*at, lot)]);
        }
        self.make_lots(count, lots);
    }

    /// Makes what was written down.
    fn make_lots(&mut self, count: u32, lots: Vec<(u32, Vec<Change>)>) {
        for (at, mut lot) in lots {
            lot.push(kept::take_down(at));
            self.push(if at + 1 == count { 0 } else { count }, lot);
        }
    }

    fn push(&mut self, lots: u32, changes: Vec<Change>) {
        self.mark.number += 1;
        self.mark.lots = lots;
        self.steps.push_back(Step { mark: self.mark, changes });
    }

    /// The step that is to be made next, or made again; none where nothing is left.
    fn next_step(&self) -> Option<&Step> {
        self.steps.front()
    }

    fn made(&mut self) {
        self.steps.pop_front();
    }
}

/// Changes in lots that an etcd takes.
fn lots_of(changes: Vec<Change>) -> Vec<Vec<Change>> {
    let mut lots: Vec<Vec<Change>> = Vec::new();
    let mut bytes = 0;
    for change in changes {
        let is_full = |lot: &Vec<Change>| lot.len() >= CHANGES_MAX || bytes >= CHANGES_BYTES_MAX;
        if lots.last().is_none_or(is_full) {
            lots.push(Vec::new());
            bytes = 0;
        }
        bytes += change.bytes();
        lots.last_mut().expect("one was pushed").push(change);
    }
    lots
}

#[cfg(test)]
#[path = "keep_test.rs"]
mod tests;
